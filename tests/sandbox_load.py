"""Many environments with Python tools at once, through the real pool and engine, with a sampler that follows a script: code that is quick,
slow, wrong, that hangs, crashes and floods, calls that are none, environments that hang, boxes that are ended from outside.
"""

from __future__ import annotations

import collections
import dataclasses
import random
import resource
import threading
import time

import test_rollouts
from sao_jax.config import TaskConfig
from sao_jax.environments import base, python_tool
from sao_jax.models.conversation import RawConversation
from sao_jax.models.tokenizers import ByteTokenizer
from sao_jax.rollouts import RolloutEngine
from sao_jax.workers import EnvironmentPool

TURNS = 20
TASK = TaskConfig(max_turns=TURNS, max_turn_tokens=200, max_tokens=60_000, time_limit_s=600.0, retries=1, max_failure_share=1.0,
                  step_timeout_s=20.0)
CODE = (  # (weight, code)
    (60, 'x = x + 1 if "x" in dir() else 0\nx'), (10, 'sum(i * i for i in range(20000))'), (6, '1 / 0'), (4, 'import time; time.sleep(0.1)'),
    (3, 'print("x" * 100000)'), (2, 'import os; os._exit(1)'), (2, 'import os; os.kill(os.getpid(), 11)'), (2, 'while True: pass'),
    (2, 'import os\nwhile True: os.fork()'), (2, 'x = [0] * 10**10'), (2, 'import os, time\nif os.fork() == 0: time.sleep(999)'),
    (1, 'import os\nwhile True: os.write(1, b"x" * 65536)'), (2, 'import time; time.sleep(999)'))
HANG, KILL = 'HANG THE ENVIRONMENT', 'KILL THE BOX'


class Troubled(python_tool.PythonTool):
  """The environment, which also hangs or loses its box when the script says so."""

  release = threading.Event()

  def reset(self, task):
    return super().reset(dataclasses.replace(task, data={'question': 'What is it?', 'answer': '7'}))

  def step(self, action):
    if HANG in action:
      self.release.wait(60.0)
      raise base.EnvironmentFailure('it hung')
    if KILL in action and self._box is not None:
      self._box._connection.process.kill()
      action = '<python>1</python>'
    return super().step(action)


class Counting(test_rollouts.FakeFlow):
  """Keeps of a rollout its ticket and how it ended."""

  def finish(self, rollout, version):
    self.rollouts.append((rollout.ticket, rollout.stop_reason))
    return True


def script(prompt: int, turn: int, attempt: int) -> str:
  """A turn, drawn from its numbers."""
  rng = random.Random(f'{prompt}/{turn}/{attempt}')
  draw = rng.random()
  if draw < 0.0006:
    return f'{HANG}</python>'
  if draw < 0.004:
    return f'{KILL}</python>'
  if draw < 0.02:
    return '<python>1 + 1'  # Without an end.
  if draw < 0.05 and turn > 3:
    return 'The answer is \\boxed{7}'
  code = rng.choices([c for _, c in CODE], [w for w, _ in CODE])[0]
  return f'<python>{code}</python>'


def resident_mb() -> float:
  with open('/proc/self/statm') as file:
    return int(file.read().split()[1]) * resource.getpagesize() / 2**20


def run(calls: int, environments: int, *, step_timeout_s: float = 20.0, deadline_s: float = 900.0) -> dict:
  """Plays rollouts until `calls` calls were made; what came of them, the longest pause of the sampler, the memory along the way."""
  Troubled.release.clear()
  settings = dict(conversation='raw', grader='integer', time_limit_s=0.3, memory_mb=64, max_output=500, max_turns=TURNS, max_malformed=3)
  probe = Troubled(**settings)
  flow = Counting(10**9)
  sampler = test_rollouts.FakeSampler(script)
  tokenizer = ByteTokenizer()
  pool = EnvironmentPool(16, step_timeout_s, max_abandoned=1000)
  engine = RolloutEngine(
      sampler=sampler, calls=pool, flow=flow, make_environment=lambda: Troubled(**settings), conversation=RawConversation(tokenizer),
      tokenizer=tokenizer, task=TASK, max_length=60_000, sessions=environments, now=time.monotonic)
  probe.close()
  made, longest, memory, most = 0, 0.0, [], 0
  start = time.monotonic()
  try:
    while time.monotonic() - start < deadline_s and (flow.left or engine.in_flight):
      began = time.monotonic()
      engine.before_chunk()
      done = sampler.step()
      engine.after_chunk(done)
      longest = max(longest, time.monotonic() - began)
      most = max(most, engine.in_flight)
      made += len(done)
      sampler.seen.clear()
      if made >= calls:
        flow.left = 0
      if made >= len(memory) * calls // 10:
        memory.append(round(resident_mb(), 1))
      if not done:
        pool.wait(0.05)
  finally:
    Troubled.release.set()
    engine.close()
    pool.close(20.0)
  ended = collections.Counter(reason for _, reason in flow.rollouts) + collections.Counter(reason for _, reason, _ in flow.dropped)
  tickets = [ticket for ticket, _ in flow.rollouts] + [ticket for ticket, _, _ in flow.dropped]
  seconds = time.monotonic() - start
  return {'calls': made, 'rollouts': flow.given, 'ended': dict(ended), 'counted_once': sorted(tickets) == list(range(1, flow.given + 1)),
          'environments': most, 'sampler_longest_pause_s': round(longest, 3), 'memory_mb': memory, 'seconds': round(seconds, 1),
          'calls_per_s': round(made / seconds, 1)}
