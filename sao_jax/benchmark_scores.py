"""Scores of a benchmark from the verdicts on its samples: avg@k, pass@k, maj@k, and their intervals.

A problem has k samples. Each was graded 'right', 'wrong' or 'no_answer', or it was lost ('grader_timeout', 'environment_error', ...): a
lost sample says nothing of the policy and is in none of the numbers, but counted. A problem all of whose samples were lost is left out.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Any, Sequence

import numpy as np

GRADED = ('right', 'wrong', 'no_answer')


@dataclasses.dataclass(frozen=True)
class Sample:
  """One sample of one problem.

  Attributes:
    verdict: one of `GRADED`, or the reason why the sample was lost.
    extracted: the answer that the grader read, '' for none.
    length: tokens that the policy sampled.
    truncated: a limit cut it.
  """

  verdict: str
  extracted: str = ''
  length: int = 0
  truncated: bool = False

  @property
  def graded(self) -> bool:
    return self.verdict in GRADED


def pass_at_k(n: int, c: int, k: int) -> float:
  """Probability that k of n samples, drawn without return, hold at least one of the c right ones: 1 - C(n - c, k) / C(n, k).

  As a product over the c right samples, so that nothing overflows; the mean over problems is an unbiased estimate of pass@k.

  Raises:
    ValueError: unless 0 <= c <= n and 1 <= k <= n.

  Source: Chen et al. 2021, arXiv:2107.03374, section 2.1.
  """
  if not (0 <= c <= n and 1 <= k <= n):
    raise ValueError(f'pass@k needs 0 <= c <= n and 1 <= k <= n, got n={n}, c={c}, k={k}.')
  if n - c < k:
    return 1.0
  return -math.expm1(math.fsum(math.log1p(-k / i) for i in range(n - c + 1, n + 1))) if c else 0.0


def majority(samples: Sequence[Sample]) -> float | None:
  """maj@k of one problem: 1 where the answer given most often is right, 0 where it is wrong; None where every sample was lost.

  Every sample with an answer has one vote. Right answers are one answer, however they are written; wrong ones are the same where their text
  is, white space apart. Of several answers with the most votes each counts its share: 1/3 for a right one in a tie of three, the mean over
  ties broken by lot. Samples without an answer do not vote; if none votes, the score is 0.

  Source: Wang et al. 2022, arXiv:2203.11171, section 2.
  """
  if not any(s.graded for s in samples):
    return None
  votes = collections.Counter(
      ('right',) if s.verdict == 'right' else ('wrong', ' '.join(s.extracted.split())) for s in samples
      if s.verdict == 'right' or (s.verdict == 'wrong' and s.extracted.strip()))
  if not votes:
    return 0.0
  most = max(votes.values())
  first = [answer for answer, count in votes.items() if count == most]
  return first.count(('right',)) / len(first)


def cluster_interval(values: Sequence[float], rng: np.random.Generator, resamples: int = 2000) -> tuple[float, float]:
  """95 % percentile interval of the mean over problems, by drawing whole problems with return: the samples of a problem stay together.

  Args:
    values: one number per problem, the mean over its samples.
    rng: decides the draws.

  Returns:
    (low, high), NaN for no problem.

  Source: Efron 1979; Cameron, Gelbach and Miller 2008 for clusters.
  """
  if not len(values):
    return math.nan, math.nan
  array = np.asarray(values, np.float64)
  means = [np.mean(array[rng.integers(len(array), size=len(array))]) for _ in range(resamples)]
  low, high = np.percentile(means, [2.5, 97.5])
  return float(low), float(high)


def score(problems: Sequence[Sequence[Sample]], *, num_samples: int, majority_vote: bool, seed: int) -> dict[str, Any]:
  """All numbers of a benchmark, JSON-able.

  Args:
    problems: the samples of each problem, lost ones included.
    num_samples: k, samples asked for per problem.
    majority_vote: whether answers can be compared; False for code.
    seed: of the intervals' draws.

  Returns:
    'avg' with 'avg_low' and 'avg_high': mean over problems of the share of right samples; 'pass_at': {k: {'value', 'low', 'high',
    'problems'}} for k = 1, 2, 4, ... and num_samples, over the problems with at least k graded samples; 'maj', 'maj_low', 'maj_high' (if
    `majority_vote`); 'problems', 'problems_lost', 'samples', 'graded', 'right', 'wrong', 'no_answer', 'lost' by reason; 'truncated' and
    'no_answer_share' as shares of the graded samples; 'length' of the samples that have tokens: mean, median, p90, max. NaN where there is
    nothing to take a mean of.
  """
  samples = [s for problem in problems for s in problem]
  graded = [[s for s in problem if s.graded] for problem in problems]
  counted = [problem for problem in graded if problem]
  numbers: dict[str, Any] = {}

  def add(values: Sequence[float], *names: str) -> dict[str, float]:
    low, high = cluster_interval(values, np.random.default_rng([seed, len(values)]))
    return dict(zip(names, (float(np.mean(values)) if len(values) else math.nan, low, high)))

  numbers |= add([_share(problem, 'right') for problem in counted], 'avg', 'avg_low', 'avg_high')
  numbers['pass_at'] = {}
  for k in _powers(num_samples):
    enough = [problem for problem in counted if len(problem) >= k]
    values = [pass_at_k(len(problem), sum(s.verdict == 'right' for s in problem), k) for problem in enough]
    numbers['pass_at'][str(k)] = {**add(values, 'value', 'low', 'high'), 'problems': len(enough)}
  if majority_vote:
    numbers |= add([v for v in map(majority, problems) if v is not None], 'maj', 'maj_low', 'maj_high')
  flat = [s for problem in counted for s in problem]
  lost = collections.Counter(s.verdict for s in samples if not s.graded)
  lengths = [s.length for s in samples if s.length]
  return numbers | {
      'problems': len(problems), 'problems_lost': len(problems) - len(counted), 'num_samples': num_samples, 'samples': len(samples),
      'graded': len(flat), **{verdict: sum(s.verdict == verdict for s in flat) for verdict in GRADED}, 'lost': dict(sorted(lost.items())),
      'no_answer_share': _share(flat, 'no_answer'), 'truncated': sum(s.truncated for s in flat) / len(flat) if flat else math.nan,
      'length': {
          'mean': float(np.mean(lengths)), 'median': float(np.median(lengths)), 'p90': float(np.percentile(lengths, 90)),
          'max': max(lengths)} if lengths else {}}


def _share(samples: Sequence[Sample], verdict: str) -> float:
  return sum(s.verdict == verdict for s in samples) / len(samples) if samples else math.nan


def _powers(largest: int) -> list[int]:
  """1, 2, 4, ... below `largest`, and `largest`."""
  return [*(2**i for i in range(largest.bit_length()) if 2**i < largest), largest]
