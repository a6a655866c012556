"""Scores of benchmarks against exact rational arithmetic and hand-worked cases."""

import collections
import fractions
import itertools
import math

import numpy as np
import pytest

from sao_jax import benchmark_scores
from sao_jax.benchmark_scores import Sample

R, W, N, T = Sample('right', 'gold'), Sample('wrong', 'a'), Sample('no_answer'), Sample('grader_timeout', 'a')


@pytest.mark.parametrize('n', [1, 2, 3, 7, 16, 64, 200])
def test_pass_at_k_is_the_exact_probability(n):
  for c in sorted({0, 1, 2, n // 2, n - 1, n} & set(range(n + 1))):
    for k in sorted({1, 2, 5, n // 2, n - 1, n} & set(range(1, n + 1))):
      exact = 1 - fractions.Fraction(math.comb(n - c, k), math.comb(n, k))
      assert benchmark_scores.pass_at_k(n, c, k) == pytest.approx(float(exact), rel=1e-13, abs=0.0), (n, c, k)


def test_pass_at_k_counts_subsets():
  n, c, k = 6, 2, 3
  hits = sum(any(i < c for i in chosen) for chosen in itertools.combinations(range(n), k))
  assert benchmark_scores.pass_at_k(n, c, k) == pytest.approx(hits / math.comb(n, k), rel=1e-14)
  assert benchmark_scores.pass_at_k(10**6, 1, 10**5) == pytest.approx(0.1, rel=1e-12)  # Binomials of that size are far beyond a float.


def test_pass_at_k_is_unbiased():
  """Over all ways that n samples of a policy with success p can come out, its mean is 1 - (1 - p)^k."""
  p, n = fractions.Fraction(3, 10), 8
  for k in (1, 2, 5, 8):
    mean = sum(float(math.comb(n, c) * p**c * (1 - p) ** (n - c)) * benchmark_scores.pass_at_k(n, c, k) for c in range(n + 1))
    assert mean == pytest.approx(float(1 - (1 - p) ** k), rel=1e-12)


@pytest.mark.parametrize('n, c, k', [(3, 4, 1), (3, -1, 1), (3, 1, 4), (3, 1, 0)])
def test_pass_at_k_refuses(n, c, k):
  with pytest.raises(ValueError, match='pass@k needs'):
    benchmark_scores.pass_at_k(n, c, k)


@pytest.mark.parametrize('samples, value', [
    ([R, R, W], 1.0), ([R, W, W], 0.0), ([R, W], 0.5), ([R, W, Sample('wrong', 'b')], 1 / 3),
    ([Sample('right', '1/2'), Sample('right', '0.5'), W, Sample('wrong', 'b')], 1.0),  # Right answers are one answer.
    ([W, Sample('wrong', ' a '), R], 0.0), ([Sample('wrong', 'x  y'), Sample('wrong', 'x y'), R], 0.0), ([N, N, R], 1.0), ([N, N], 0.0),
    ([Sample('wrong', '  '), N], 0.0), ([T, T, R], 1.0), ([T, T], None), ([T, N], 0.0), ([Sample('right', ''), W, W], 0.0), ([], None)])
def test_majority(samples, value):
  for order in itertools.permutations(samples):
    assert benchmark_scores.majority(order) == (pytest.approx(value) if value is not None else None)


def random_problems(seed, problems=17, num_samples=5):
  rng = np.random.default_rng(seed)
  kinds = ['right', 'wrong', 'no_answer', 'grader_timeout', 'environment_error']
  return [
      [Sample(rng.choice(kinds, p=[0.3, 0.4, 0.1, 0.15, 0.05]), 'abc'[rng.integers(3)], int(rng.integers(1, 50)), bool(rng.integers(2)))
       for _ in range(num_samples)] for _ in range(problems)]


def oracle(problems, num_samples):
  """Every mean as a fraction, by plain loops."""
  graded = [[s for s in p if s.verdict in ('right', 'wrong', 'no_answer')] for p in problems]
  graded = [p for p in graded if p]
  right = [sum(s.verdict == 'right' for s in p) for p in graded]
  avg = sum(fractions.Fraction(c, len(p)) for c, p in zip(right, graded)) / len(graded)
  passed = {}
  for k in range(1, num_samples + 1):
    values = [1 - fractions.Fraction(math.comb(len(p) - c, k), math.comb(len(p), k)) for c, p in zip(right, graded) if len(p) >= k]
    passed[k] = (sum(values) / len(values), len(values)) if values else (None, 0)
  votes = []
  for p in graded:
    counts = collections.Counter('!' if s.verdict == 'right' else s.extracted for s in p if s.verdict != 'no_answer')
    best = [a for a, n in counts.items() if n == max(counts.values())]
    votes.append(fractions.Fraction(best.count('!'), len(best)) if best else fractions.Fraction(0))
  return avg, passed, sum(votes) / len(votes)


@pytest.mark.parametrize('seed', range(12))
def test_all_numbers_against_exact_arithmetic(seed):
  problems = random_problems(seed)
  found = benchmark_scores.score(problems, num_samples=5, majority_vote=True, seed=0)
  avg, passed, maj = oracle(problems, 5)
  assert found['avg'] == pytest.approx(float(avg), rel=1e-12) and found['maj'] == pytest.approx(float(maj), rel=1e-12)
  assert list(found['pass_at']) == ['1', '2', '4', '5']
  for k, at in found['pass_at'].items():
    value, count = passed[int(k)]
    assert at['problems'] == count
    if count:
      assert at['value'] == pytest.approx(float(value), rel=1e-12) and at['low'] <= at['value'] <= at['high']
  assert found['pass_at']['1']['value'] == pytest.approx(found['avg'], rel=1e-12)
  flat = [s for p in problems for s in p]
  kept = [s for s in flat if s.verdict in ('right', 'wrong', 'no_answer')]
  assert found['samples'] == 85 and found['graded'] == len(kept) == found['right'] + found['wrong'] + found['no_answer']
  assert sum(found['lost'].values()) == 85 - len(kept) > 0
  assert found['truncated'] == pytest.approx(np.mean([s.truncated for s in kept]))
  assert found['length']['mean'] == pytest.approx(np.mean([s.length for s in flat]))


def test_lost_samples_are_never_wrong():
  problems = [[R, T], [T, T], [R, R]]
  found = benchmark_scores.score(problems, num_samples=2, majority_vote=True, seed=0)
  assert found['avg'] == found['maj'] == 1.0 and found['problems_lost'] == 1 and found['lost'] == {'grader_timeout': 3}
  assert found['pass_at']['2']['problems'] == 1 and found['wrong'] == 0
  nothing = benchmark_scores.score([[T], [T]], num_samples=1, majority_vote=True, seed=0)
  assert math.isnan(nothing['avg']) and math.isnan(nothing['maj']) and nothing['pass_at']['1']['problems'] == 0 and nothing['length'] == {}


def test_code_has_no_majority():
  assert 'maj' not in benchmark_scores.score([[R, W]], num_samples=2, majority_vote=False, seed=0)


def test_the_interval_draws_whole_problems():
  """20 problems of 50 equal samples each: as wide as for 20 values, not as narrow as for 1,000."""
  values = [float(i % 2) for i in range(20)]
  low, high = benchmark_scores.cluster_interval(values, np.random.default_rng(0))
  half = 1.96 * 0.5 / 20**0.5
  assert low == pytest.approx(0.5 - half, abs=0.04) and high == pytest.approx(0.5 + half, abs=0.04)
  problems = [[R if v else W] * 50 for v in values]
  found = benchmark_scores.score(problems, num_samples=50, majority_vote=True, seed=0)
  assert found['avg_high'] - found['avg_low'] > 0.3
  assert found == benchmark_scores.score(problems, num_samples=50, majority_vote=True, seed=0)
  assert all(math.isnan(x) for x in benchmark_scores.cluster_interval([], np.random.default_rng(0)))


@pytest.mark.slow
def test_the_interval_covers_the_truth_about_as_often_as_it_says():
  rng, covered, runs = np.random.default_rng(1), 0, 400
  for _ in range(runs):
    means = rng.binomial(4, rng.beta(2, 3, size=60)) / 4
    low, high = benchmark_scores.cluster_interval(means, rng, resamples=400)
    covered += low <= 0.4 <= high
  assert 0.90 <= covered / runs <= 0.98
