"""How right, how safe and how fast the graders are: known answers against themselves and each other, hostile answers, answers per second.

    python benchmarks/graders.py                   everything but the pairs (a few minutes on 2 cores)
    python benchmarks/graders.py --pairs           also every known answer against every other problem's (some minutes more)

Prints one JSON object:
  self.<set>                 answers that are right against themselves, of how many, and those that are not
  equal_answers              pairs of different problems whose answers are accepted for each other, strings that are equal left out
  hostile                    verdicts by kind of 1,000 hostile answers, the slowest one in seconds, files they made, whether the grader still works
  integer_per_s              whole numbers graded from `--threads` threads (median of `--repeats`), which need no process
  symbolic_per_s             expressions that need algebra, through `--workers` processes (the same); each pair is graded once in a repeat
The data are those of the tests (tests/data/graders/SOURCE.md).
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import json
import pathlib
import statistics
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / 'tests')]

import graders_hostile
from sao_jax import graders
from sao_jax.graders import arithmetic, compare, latex, symbolic

DATA = ROOT / 'tests' / 'data' / 'graders'
SETS = ('math_500', 'beyondaime', 'imo_answerbench_even')


def known_answers(name: str) -> list[tuple[str, str]]:
  return [(row['id'], row['answer']) for row in map(json.loads, (DATA / f'{name}.jsonl').read_text().splitlines())]


def against_themselves(grader: graders.Grader) -> dict:
  found = {}
  for name in SETS:
    rows = known_answers(name)
    grades = [(identity, grader.grade(f'The answer is $\\boxed{{{answer}}}$', answer)) for identity, answer in rows]
    refused = {identity: [grade.verdict, grade.reason] for identity, grade in grades if grade.verdict != 'right'}
    found[name] = {'right': len(rows) - len(refused), 'of': len(rows), 'refused': refused}
  return found


def against_each_other() -> dict:
  """All pairs of two different answers, in both directions; those that need algebra in this process."""
  unique: dict[str, tuple[str, str]] = {}
  for name in SETS:
    for identity, answer in known_answers(name):
      unique.setdefault(latex.string_key(answer), (identity, answer))
  rows = list(unique.values())
  plain, algebra = compare.Comparer(compare.NoAlgebra()), compare.Comparer(symbolic.Symbolic())
  accepted, undecided, need = [], [], 0
  for i, (one, gold) in enumerate(rows):
    if i % 50 == 0:
      print(f'pairs: {i} of {len(rows)} answers', file=sys.stderr, flush=True)
    for j, (two, other) in enumerate(rows):
      if i == j:
        continue
      try:
        same = symbolic.compare_texts(plain, gold, other)
      except (compare.Undecided, arithmetic.TooLarge):
        need += 1
        if i > j:
          continue  # Algebra does not mind the order.
        try:
          same = symbolic.compare_texts(algebra, gold, other)
        except (compare.Undecided, arithmetic.TooLarge):
          undecided.append([one, two])
          continue
      if same:
        accepted.append([one, gold, two, other])
  return {'answers': len(rows), 'pairs': len(rows) * (len(rows) - 1), 'need_algebra': need, 'accepted': accepted, 'undecided': undecided}


def hostile(count: int, workers: int) -> dict:
  grader = graders.make('math', workers=workers, time_limit_s=5.0)
  verdicts: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
  reasons: collections.Counter = collections.Counter()
  slowest = 0.0
  with tempfile.TemporaryDirectory() as folder:
    for kind, answer in graders_hostile.answers(count, f'{folder}/touched'):
      start = time.monotonic()
      grade = grader.grade(f'\\boxed{{{answer}}}', r'\frac{7\sqrt{2}}{3}')
      slowest = max(slowest, time.monotonic() - start)
      verdicts[kind][grade.verdict] += 1
      if grade.verdict == 'grader_error':
        reasons[grade.reason] += 1
    made = [p.name for p in pathlib.Path(folder).iterdir()]
  works = grader.grade(r'\boxed{\sqrt{8}}', r'2\sqrt{2}').verdict == 'right'
  grader.close()
  return {'count': count, 'verdicts': {k: dict(v) for k, v in sorted(verdicts.items())}, 'slowest_s': round(slowest, 2), 'files_made': made,
          'errors': dict(reasons), 'works_afterwards': works}


def rate(grader: graders.Grader, pairs: list[tuple[str, str, str]], threads: int) -> float:
  """Answers per second; checks every verdict."""
  start = time.monotonic()
  with concurrent.futures.ThreadPoolExecutor(threads) as pool:
    found = list(pool.map(lambda p: grader.grade(p[0], p[1]).verdict, pairs))
  seconds = time.monotonic() - start
  assert found == [p[2] for p in pairs], [(p, f) for p, f in zip(pairs, found) if f != p[2]][:3]
  return len(pairs) / seconds


def integers(count: int) -> list[tuple[str, str, str]]:
  text = 'We reason step by step. ' * 40
  return [(f'{text}So the answer is $\\boxed{{{i * 37 + (i % 2)}}}$.', str(i * 37), 'wrong' if i % 2 else 'right') for i in range(count)]


def expressions(count: int, salt: int) -> list[tuple[str, str, str]]:
  """Pairs that differ from each other and from those of another `salt`, so that no cache answers."""
  makers = [
      lambda n: (rf'{n}\sqrt{{{n + 1}}}', rf'\sqrt{{{n * n * (n + 1)}}}'), lambda n: (rf'x^2+{2 * n}x+{n * n}', rf'(x+{n})^2'),
      lambda n: (rf'\frac{{{n}+a}}{{b}}', rf'\frac{{a}}{{b}}+\frac{{{n}}}{{b}}'), lambda n: (rf'{n}\pi+{n}', rf'{n}(\pi+1)'),
      lambda n: (rf'\left({n}, \sqrt{{{n}}}\right)', rf'({n}, {n}^{{1/2}})'), lambda n: (rf'y = {n}x+1', rf'{n}x-y+1=0')]
  rows = []
  for i in range(count):
    n = 3 + salt * count + i
    gold, other = makers[i % len(makers)](n)
    right = i % 3 != 2
    rows.append((f'\\boxed{{{other if right else other.replace(str(n), str(n + 1), 1)}}}', gold, 'right' if right else 'wrong'))
  return rows


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--pairs', action='store_true')
  parser.add_argument('--hostile', type=int, default=1000)
  parser.add_argument('--workers', type=int, default=2)
  parser.add_argument('--threads', type=int, default=4)
  parser.add_argument('--repeats', type=int, default=5)
  arguments = parser.parse_args()
  grader = graders.make('math', workers=arguments.workers)
  result: dict = {'self': against_themselves(grader)}
  rate(grader, expressions(12, 0), arguments.threads)  # Starts the processes.
  repeats = range(arguments.repeats)
  for name, made in (('integer', [integers(3000) for _ in repeats]), ('symbolic', [expressions(300, 1 + r) for r in repeats])):
    rates = [rate(grader, pairs, arguments.threads) for pairs in made]
    result[f'{name}_per_s'] = round(statistics.median(rates), 1)
    result[f'{name}_per_s_all'] = [round(r, 1) for r in rates]
  grader.close()
  result['hostile'] = hostile(arguments.hostile, arguments.workers)
  if arguments.pairs:
    result['equal_answers'] = against_each_other()
  print(json.dumps(result, indent=1))


if __name__ == '__main__':
  main()
