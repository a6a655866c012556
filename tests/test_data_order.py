"""The order of prompts: keyed permutations are bijections that look random, mixtures keep to their weights, epochs are whole."""

import collections
import fractions
import itertools

import numpy as np
import pytest

from sao_jax import data_order
from sao_jax.environments.base import TaskSet


@pytest.mark.parametrize('size', [1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 100, 1000, 1319])
def test_a_permutation_hits_every_number_once(size):
  for key in ((0,), (1,), (0, 1, 2)):
    assert sorted(data_order.permuted(i, size, *key) for i in range(size)) == list(range(size))


def test_a_permutation_of_a_large_range_stays_in_it_and_does_not_collide():
  size = 10**12 + 39
  found = [data_order.permuted(i, size, 5) for i in range(2000)]
  assert len(set(found)) == 2000 and 0 <= min(found) and max(found) < size
  assert 0.4 * size < np.mean(found) < 0.6 * size


def test_other_keys_give_other_orders_and_the_same_key_the_same():
  def order(*key):
    return tuple(data_order.permuted(i, 50, *key) for i in range(50))
  keys = [(s, c, e) for s in range(4) for c in range(3) for e in range(4)] + [(1,), (11,), (1, 1)]
  assert len({order(*k) for k in keys}) == len(keys) and order(3, 1, 2) == order(3, 1, 2)
  assert order(1, 12) != order(11, 2)  # Keys are not run together.


@pytest.mark.parametrize('size', [3, 4, 5])
def test_all_orders_of_a_few_are_about_equally_frequent(size):
  draws = 4000
  counts = collections.Counter(tuple(data_order.permuted(i, size, 9, e) for i in range(size)) for e in range(draws))
  orders = list(itertools.permutations(range(size)))
  expected = draws / len(orders)
  if size != 4:  # On a whole block of 4 a Feistel network makes some orders only.
    chi = sum((counts[o] - expected) ** 2 / expected for o in orders)
    assert chi < len(orders) + 6 * (2 * len(orders)) ** 0.5
  for place in range(size):
    first = collections.Counter(data_order.permuted(place, size, 9, e) for e in range(draws))
    assert all(abs(n - draws / size) < 6 * (draws / size) ** 0.5 for n in first.values()) and len(first) == size


def test_index_out_of_range_is_refused():
  for index in (-1, 5):
    with pytest.raises(ValueError, match=r'\[0, 5\)'):
      data_order.permuted(index, 5, 0)


@pytest.mark.parametrize('weights, counts', [
    ([1.0], (1,)), ([2, 2], (1, 1)), ([0.7, 0.3], (7, 3)), ([0.1, 0.2, 0.7], (1, 2, 7)), ([7473.0, 500.0], (7473, 500)), ([3, 1.5], (2, 1)),
    ([1e-3, 1], (1, 1000)), ([1 / 3, 2 / 3], (1, 2))])
def test_short_weights_are_met_exactly(weights, counts):
  assert data_order.pattern_counts(weights) == counts


@pytest.mark.parametrize('weights', [[1 / 3, 0.5, 1 / 6], [7473, 12500, 1], [1e-9, 1], [2**0.5, 3**0.5, 5**0.5], [123457, 7919, 104729]])
def test_other_weights_are_met_to_one_part_in_ten_thousand(weights):
  counts = data_order.pattern_counts(weights)
  total = sum(weights)
  assert abs(sum(counts) - 10_000) <= len(weights) and min(counts) >= 1
  assert all(abs(c / sum(counts) - w / total) < 2e-4 for c, w in zip(counts, weights))


def test_weights_must_be_positive():
  for weights in ([0.0, 1], [-1, 2], []):
    with pytest.raises(ValueError, match='positive'):
      data_order.pattern_counts(weights)


def test_every_prefix_of_a_pattern_is_less_than_one_off_its_share():
  rng = np.random.default_rng(0)
  cases = [tuple(int(x) for x in rng.integers(1, 60, size=rng.integers(1, 7))) for _ in range(150)] + [(1, 1, 1), (1, 999), (2, 3, 5, 7)]
  for counts in cases:
    pattern, total = data_order.mixture_pattern(counts), sum(counts)
    assert collections.Counter(pattern) == dict(enumerate(counts))
    seen = [0] * len(counts)
    for position, chosen in enumerate(pattern, start=1):
      seen[chosen] += 1
      for i, count in enumerate(counts):
        assert abs(seen[i] - fractions.Fraction(count * position, total)) < 1, (counts, position)


def sets_of(*sizes, weights=None):
  starts = np.cumsum([0, *sizes[:-1]])
  return [TaskSet(f's{i}', int(s), n, None if weights is None else weights[i]) for i, (s, n) in enumerate(zip(starts, sizes))]


@pytest.mark.parametrize('seed', range(6))
def test_epochs_are_whole_and_shuffled_anew(seed):
  order = data_order.Order(sets_of(23), seed=seed, shuffle=True, epochs=0)
  epochs = [[order.locate(e * 23 + i).index for i in range(23)] for e in range(5)]
  assert all(sorted(epoch) == list(range(23)) for epoch in epochs) and len(set(map(tuple, epochs))) == 5
  assert [order.locate(e * 23).epoch for e in range(5)] == list(range(5))
  other = data_order.Order(sets_of(23), seed=seed + 1, shuffle=True, epochs=0)
  assert epochs[0] != [other.locate(i).index for i in range(23)]
  plain = data_order.Order(sets_of(23), seed=seed, shuffle=False, epochs=0)
  assert [plain.locate(i).index for i in range(46)] == list(range(23)) * 2


@pytest.mark.parametrize('seed', range(8))
def test_a_mixture_is_its_parts_own_streams_interleaved(seed):
  rng = np.random.default_rng(seed)
  sizes = [int(n) for n in rng.integers(1, 30, size=3)]
  weights = [float(w) for w in rng.integers(1, 6, size=3)]
  order = data_order.Order(sets_of(*sizes, weights=weights), seed=seed, shuffle=True, epochs=0)
  places = [order.locate(p) for p in range(400)]
  for i, tasks in enumerate(order.sets):
    mine = [p for p in places if p.set == i]
    assert abs(len(mine) - 400 * weights[i] / sum(weights)) < 1
    assert all(tasks.start <= p.index < tasks.start + tasks.size for p in mine)
    for start in range(0, len(mine) - tasks.size + 1, tasks.size):
      epoch = mine[start:start + tasks.size]
      assert sorted(p.index for p in epoch) == list(range(tasks.start, tasks.start + tasks.size))
      assert {p.epoch for p in epoch} == {start // tasks.size}


def test_sets_without_weights_count_by_their_size():
  order = data_order.Order(sets_of(30, 10), seed=0, shuffle=True, epochs=1)
  assert order.length == 40 and sorted(order.locate(p).index for p in range(40)) == list(range(40))


@pytest.mark.parametrize('sizes, weights, epochs', [((7,), None, 3), ((5, 8), (1, 1), 2), ((5, 8), (5, 1), 1), ((3, 50, 9), (1, 2, 3), 2)])
def test_a_limited_stream_ends_before_any_set_begins_an_epoch_too_many(sizes, weights, epochs):
  order = data_order.Order(sets_of(*sizes, weights=weights), seed=1, shuffle=True, epochs=epochs)
  assert max(order.locate(p).epoch for p in range(order.length)) == epochs - 1
  assert order.locate(order.length).epoch == epochs  # Not one prompt earlier than needed.
  visits = collections.Counter(order.locate(p).index for p in range(order.length))
  assert max(visits.values()) == epochs


def test_empty_sets_are_refused():
  for sets in ([], sets_of(3, 0)):
    with pytest.raises(ValueError, match='at least one task'):
      data_order.Order(sets, seed=0, shuffle=True, epochs=0)
