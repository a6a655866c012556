"""Latency that the gateway adds to a request, over the time that the sampler itself takes.

    python benchmarks/gateway.py [--sessions 1 64] [--turns 20] [--turn_s 1.0]

The whole path is measured: a client's HTTP request, the environment's thread, the engine with a real conversation format, a sampler that
answers each turn `turn_s` after it was asked (a real turn takes longer, and nothing else of it matters here), and back. Clients run in
another process, one thread for each session, and go on with their conversation at once; the first requests are spread over one turn, as
those of scaffolds are. Added latency is what the client waits beyond what the sampler took for that turn.

Prints one JSON object: by number of sessions the median, 95th percentile and maximum of the added milliseconds, and requests a second.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import http.client
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

TOOLS = [{'type': 'function', 'function': {'name': 'bash', 'description': 'Runs a command.', 'parameters': {
    'type': 'object', 'properties': {'command': {'type': 'string'}}, 'required': ['command']}}}]
OBSERVATION = 'total 8\n-rw-r--r-- 1 a a 120 Jan 1 00:00 file.py\n' * 10  # About 500 characters.


def client(port: int, keys: list[str], turns: int, turn_s: float) -> None:
  """Plays the conversations and prints the seconds that each request took, a list for each key."""

  def talk(place: int) -> list[float]:
    time.sleep(turn_s * place / len(keys))
    connection = http.client.HTTPConnection('127.0.0.1', port, timeout=120)
    messages, took = [{'role': 'user', 'content': 'Mend the file.'}], []
    for _ in range(turns):
      body = json.dumps({'model': 'm', 'messages': messages, 'tools': TOOLS})
      started = time.perf_counter()
      connection.request('POST', '/v1/chat/completions', body, {'Authorization': f'Bearer {keys[place]}'})
      response = connection.getresponse()
      value = response.read()
      took.append(time.perf_counter() - started)
      assert response.status == 200, value
      message = json.loads(value)['choices'][0]['message']
      messages += [message, {'role': 'tool', 'tool_call_id': message['tool_calls'][0]['id'], 'content': OBSERVATION}]
    connection.close()
    return took

  with concurrent.futures.ThreadPoolExecutor(len(keys)) as pool:
    print(json.dumps(list(pool.map(talk, range(len(keys))))))


def measure(sessions: int, turns: int, turn_s: float) -> dict[str, float]:
  import numpy as np

  from sao_jax import evaluation, gateway, tool_calls
  from sao_jax.config import TaskConfig
  from sao_jax.environments.base import Task
  from sao_jax.environments.served import Served
  from sao_jax.gateway.sessions import Session
  from sao_jax.models import conversation
  from sao_jax.rollouts import RolloutEngine
  from sao_jax.workers import EnvironmentPool
  from tests import tokenizer_factory
  from tests.scripted_sampler import ScriptedSampler

  class Board:
    """Sessions by number, as a switchboard has them."""

    def __init__(self, server: gateway.Gateway):
      made = [server.open() for _ in range(sessions)]
      self.sessions, self.keys = [session for session, _ in made], [key for _, key in made]

    def session(self, number: int) -> Session:
      return self.sessions[number]

  turn = tool_calls.write(tool_calls.Turn('I look.', (('bash', {'command': 'ls -la'}),)), 'hermes')
  tokenizer = tokenizer_factory.chatml()
  server = gateway.Gateway(gateway.GatewaySettings(requests_per_s=1e6, burst=10**6)).start()
  board = Board(server)
  sampler = ScriptedSampler(tokenizer, None, delay_s=turn_s)
  sampler.fixed_ids = np.asarray(sampler.ids_of(turn, tokenizer.stop_ids), np.int32)
  task = TaskConfig(
      max_turns=turns + 1, max_turn_tokens=1000, max_tokens=100_000, max_segments=4, time_limit_s=1e6, step_timeout_s=1e6,
      workers=sessions)
  flow = evaluation.ListFlow([(i, Task(i, 'test', 0, {'conversation': i})) for i in range(sessions)])
  calls = EnvironmentPool(sessions, task.step_timeout_s)
  engine = RolloutEngine(
      sampler=sampler, calls=calls, flow=flow, make_environment=lambda: Served(board, 60.0),
      conversation=conversation.make(tokenizer, 'chat'), tokenizer=tokenizer, task=task, max_length=task.max_tokens, sessions=sessions,
      now=time.monotonic)
  arguments = json.dumps([server.port, board.keys, turns, turn_s])
  results = tempfile.TemporaryFile()
  process = subprocess.Popen([sys.executable, __file__, '--client', arguments], stdout=results)
  started = time.perf_counter()
  while process.poll() is None:
    moved = engine.before_chunk()
    if sampler.busy:
      engine.after_chunk(sampler.step())
    elif not moved:
      time.sleep(0.001)  # As a run waits for its environments.
  elapsed = time.perf_counter() - started
  for session in board.sessions:
    session.end()
  engine.close()
  server.close()
  calls.close(5.0)
  results.seek(0)
  took = json.loads(results.read())
  pairs = [pair for number, row in enumerate(took) for pair in list(zip(row, sampler.spent_s[number]))[1:]]  # Not the first: it starts all.
  added = sorted(1000 * (whole - sampled) for whole, sampled in pairs)
  return {
      'requests': len(added), 'added_ms_median': round(statistics.median(added), 2),
      'added_ms_p95': round(added[int(0.95 * len(added))], 2), 'added_ms_max': round(added[-1], 2), 'requests_per_s': round(sessions * turns / elapsed, 1)}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--sessions', type=int, nargs='+', default=[1, 64])
  parser.add_argument('--turns', type=int, default=20)
  parser.add_argument('--turn_s', type=float, default=1.0)
  parser.add_argument('--client', default='')
  arguments = parser.parse_args()
  if arguments.client:
    client(*json.loads(arguments.client))
    return
  found = {str(n): measure(n, arguments.turns, arguments.turn_s) for n in arguments.sessions}
  print(json.dumps({'turn_s': arguments.turn_s, 'turns': arguments.turns, 'sessions': found}))


if __name__ == '__main__':
  main()
