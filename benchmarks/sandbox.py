"""How fast boxes are, and how well they hold.

    python benchmarks/sandbox.py                   speed, and all attempts of tests/sandbox_attacks.py
    python benchmarks/sandbox.py --calls 10000     also that many calls from --environments environments at once, through the rollout engine

Requirements: pip install -r requirements/test.txt. Prints one JSON object:
  warm_call_ms               `box.run(['true'])` in a box that is there, median
  python_call_ms             a piece of code in a session that is there, median; first_python_call_ms: the one that starts the interpreter
  take_and_call_ms           a box from a pool that has one ready, and a command in it, median
  cold_start_ms              a new box, median; close_ms
  attempts, succeeded, left  of the table of attacks
  calls ...                  what came of the concurrent environments
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / 'tests')]

import sandbox_attacks
import sandbox_load
from sao_jax import sandbox


def timed(times: list[float], function):
  start = time.perf_counter()
  result = function()
  times.append(1000.0 * (time.perf_counter() - start))
  return result


def speed(repeats: int, backend: str) -> dict:
  names = ('cold_start_ms', 'warm_call_ms', 'first_python_call_ms', 'python_call_ms', 'close_ms', 'take_and_call_ms')
  times: dict[str, list[float]] = {name: [] for name in names}
  for _ in range(repeats):
    box = timed(times['cold_start_ms'], lambda: sandbox.open(backend))
    for _ in range(5):
      assert timed(times['warm_call_ms'], lambda: box.run(['true'])).ok
    session = timed([], box.python)
    assert timed(times['first_python_call_ms'], lambda: session.run('1 + 1')).value == '2'
    for _ in range(5):
      assert timed(times['python_call_ms'], lambda: session.run('sum(range(1000))')).value == '499500'
    timed(times['close_ms'], box.close)
  with sandbox.Pool(lambda: sandbox.open(backend), 2) as pool:
    for _ in range(repeats):
      assert pool.wait_ready(1, 60.0)
      box = None

      def call():
        nonlocal box
        box = pool.take()
        return box.run(['true'])

      assert timed(times['take_and_call_ms'], call).ok
      pool.give_back(box)
  return {name: round(statistics.median(values), 2) for name, values in times.items()}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--repeats', type=int, default=20)
  parser.add_argument('--backend', default='auto')
  parser.add_argument('--calls', type=int, default=0)
  parser.add_argument('--environments', type=int, default=200)
  arguments = parser.parse_args()
  result: dict = speed(arguments.repeats, arguments.backend)
  start = time.monotonic()
  found = sandbox_attacks.run(sandbox_attacks.attempts(), backend=arguments.backend)
  result |= {'attempts': found['attempts'], 'succeeded': len(found['succeeded']), 'left': found['left'],
             'attempts_s': round(time.monotonic() - start, 1)}
  if arguments.calls:
    result['load'] = sandbox_load.run(arguments.calls, arguments.environments)
  print(json.dumps(result, indent=1))


if __name__ == '__main__':
  main()
