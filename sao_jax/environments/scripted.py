"""An environment without a task: seeded latencies with a long tail, failures and hangs, for tests and for measurements of asynchrony.

The prompt is a short text, every turn the policy writes something and gets 'ok' back, and the reward is the share of a target character in
all that it wrote: a policy can learn it from nothing. How long a call takes, and whether it fails or hangs, is a function of
(seed, split, index, attempt, call) alone, whatever thread runs it.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np

from sao_jax.environments import base


class Scripted(base.Environment):
  """The environment of the module's docstring.

  Args:
    turns: turns of an episode; where `max_turns` is above it, each task draws its number of turns uniformly in [turns, max_turns].
    max_turns: see `turns`; 0 for exactly `turns`.
    target: character that the reward counts.
    observation: text that the policy gets after every turn but the last.
    prompt_length: characters of the prompt.
    latency_s: median duration of one call (reset or step), in seconds; 0 for none.
    latency_sigma: sigma of the lognormal; 1.5 gives a tail whose 99th percentile is 33 times the median.
    latency_max_s: longest duration of one call.
    sleep: really wait; False where a virtual clock gives the durations.
    failure_rate: share of the episodes in which a call raises EnvironmentFailure.
    failing_attempts: attempts of such a task that fail, counted from 0; the following ones succeed. 0: all of them fail.
    hang_rate: share of the episodes in which a call does not return (within `hang_s`).
    hang_s: seconds of a hang; `close` ends it, too.
    truncate_rate: share of the episodes that end by a limit of the environment (truncated) where others are terminated.
    noise: characters of a demonstration that are not the target, as a share.
  """

  name = 'scripted'
  replayable = True
  conversation = 'raw'
  stop_strings = ('\n',)
  has_demonstrations = True
  metric_names = ('success', 'target_share', 'calls')

  def __init__(
      self, *, turns: int = 1, max_turns: int = 0, target: str = 'a', observation: str = 'ok\n', prompt_length: int = 4,
      latency_s: float = 0.0, latency_sigma: float = 1.5, latency_max_s: float = 60.0, sleep: bool = True,
      failure_rate: float = 0.0, failing_attempts: int = 0, hang_rate: float = 0.0, hang_s: float = 3600.0,
      truncate_rate: float = 0.0, noise: float = 0.5,
  ):
    base.check_range('turns', turns, 1, 1000)
    if max_turns != 0:
      base.check_range('max_turns', max_turns, turns, 1000)
    base.check_range('prompt_length', prompt_length, 1, 10_000)
    base.check_range('failing_attempts', failing_attempts, 0, 1000)
    for name, value, high in (
        ('latency_s', latency_s, 1e6), ('latency_sigma', latency_sigma, 10.0), ('latency_max_s', latency_max_s, 1e6),
        ('hang_s', hang_s, 1e6), ('failure_rate', failure_rate, 1.0), ('hang_rate', hang_rate, 1.0),
        ('truncate_rate', truncate_rate, 1.0), ('noise', noise, 1.0)):
      base.check_range(name, value, 0.0, high)
    if not isinstance(target, str) or len(target) != 1 or target in self.stop_strings:
      raise ValueError(f'target must be one character other than a newline, got {target!r}.')
    if not isinstance(observation, str) or not observation:
      raise ValueError(f'observation must be a text that is not empty, got {observation!r}.')
    if not isinstance(sleep, bool):
      raise ValueError(f'sleep must be True or False, got {sleep!r}.')
    self.turns, self.target, self.observation, self.prompt_length = (turns, max_turns or turns), target, observation, prompt_length
    self.latency_s, self.latency_sigma, self.latency_max_s, self.sleep = latency_s, latency_sigma, latency_max_s, sleep
    self.failure_rate, self.failing_attempts, self.hang_rate, self.hang_s = failure_rate, failing_attempts, hang_rate, hang_s
    self.truncate_rate, self.noise = truncate_rate, noise
    self._closed = threading.Event()
    self._task: base.Task | None = None

  def sample_task(self, index: int, split: str, seed: int) -> base.Task:
    """Task whose data are the script of its episode: 'prompt', 'turns', 'fails_at', 'hangs_at' (call, or -1) and 'truncates'."""
    base.check_split(split)
    rng = base.generator('scripted/task/' + split, seed, index)
    letters = 'bcdefghijklm' if split == 'train' else 'nopqrstuvwxyz'
    turns = int(rng.integers(self.turns[0], self.turns[1] + 1))
    fails, hangs, truncates = rng.random(3) < (self.failure_rate, self.hang_rate, self.truncate_rate)
    calls = rng.integers(turns + 1, size=2)
    prompt = ''.join(letters[i] for i in rng.integers(len(letters), size=self.prompt_length))
    return base.Task(index, split, seed, {
        'prompt': prompt, 'turns': turns, 'fails_at': int(calls[0]) if fails else -1, 'hangs_at': int(calls[1]) if hangs else -1,
        'truncates': bool(truncates)})

  def latency(self, task: base.Task, call: int) -> float:
    """Seconds that a call of an episode takes; call 0 is the reset."""
    if self.latency_s == 0:
      return 0.0
    rng = base.generator('scripted/latency/' + task.split, task.seed, task.index, task.attempt, call)
    return min(self.latency_s * math.exp(self.latency_sigma * rng.standard_normal()), self.latency_max_s)

  def _wait(self) -> None:
    """Plays the script of one call: waits, hangs, or fails."""
    task, call = self._task, self._calls
    self._calls += 1
    if self.sleep:
      self._closed.wait(self.latency(task, call))
    if task.data['hangs_at'] == call:
      self._closed.wait(self.hang_s)
    if task.data['fails_at'] == call and not 0 < self.failing_attempts <= task.attempt:
      raise base.EnvironmentFailure(f'scripted failure of task {task.index}, attempt {task.attempt}, call {call}')

  def reset(self, task: base.Task) -> base.Observation:
    self._task, self._calls, self._written, self._hits = task, 0, 0, 0
    self._wait()
    return base.Observation(task.data['prompt'] + ':')

  def step(self, action: str) -> base.StepResult:
    if self._task is None:
      raise RuntimeError('step was called without a running episode; call reset first.')
    self._wait()
    text = action.rstrip('\n')
    self._written, self._hits = self._written + len(text), self._hits + text.count(self.target)
    ends = self._calls > self._task.data['turns']
    share = self._hits / max(self._written, 1)
    ending: dict[str, Any] = {'truncated' if self._task.data['truncates'] else 'terminated': True} if ends else {}
    metrics = {'success': float(ends and share == 1.0), 'target_share': share, 'calls': float(self._calls)}
    if ends:
      self._task = None
      return base.StepResult(reward=share, metrics=metrics, **ending)
    return base.StepResult(base.Observation(self.observation), metrics=metrics)

  def demonstration(self, task: base.Task, rng: np.random.Generator) -> list[str]:
    """Four characters a turn, each the target but for a share `noise` of other letters."""
    def turn() -> str:
      return ''.join('xyz'[int(rng.integers(3))] if rng.random() < self.noise else self.target for _ in range(4)) + '\n'
    return [turn() for _ in range(task.data['turns'])]

  def close(self) -> None:
    self._closed.set()
