"""Rollouts of several rows: advantages, targets and counts as if all action tokens stood in one row, in the formulas and in the learner."""

import dataclasses
import functools

from hypothesis import given, settings, strategies as st
import jax
import numpy as np
import pytest

from sao_jax import algorithms, sharding
from sao_jax.config import TaskConfig
from sao_jax.learner import Learner
from tests import learner_factory
from tests.learner_factory import LENGTH, ROWS, host, make_config, start
from tests.test_learner import dense_values

gae = jax.jit(algorithms.skip_observation_gae)
reinforce = jax.jit(algorithms.reinforce_batch_centred)
adaptive = jax.jit(functools.partial(algorithms.length_adaptive_lambda, alpha=1.5))
B, T = 8, 6
LENGTHS = st.lists(st.integers(1, 4), min_size=1, max_size=5)


def chains_of(follows):
  """Lists of row numbers, by reading the flags one after the other."""
  chains = []
  for row, continues in enumerate(follows):
    chains.append([]) if not chains or not continues else None
    chains[-1].append(row)
  return chains


def oracle(reward, value, bootstrap, mask, follows, gamma, gae_lambda):
  """Plain GAE in float64 over the action tokens of all rows of a chain, put together in one list."""
  advantage, target = np.zeros(mask.shape), np.zeros(mask.shape)
  for rows in chains_of(follows):
    places = [(b, t) for b in rows for t in range(mask.shape[1]) if mask[b, t]]
    following, carry = float(bootstrap[rows[-1]]), 0.0
    for place in reversed(places):
      lam = float(np.broadcast_to(gae_lambda, bootstrap.shape)[place[0]])
      delta = float(reward[place]) + gamma * following - float(value[place])
      carry = delta + gamma * lam * carry
      following = float(value[place])
      advantage[place], target[place] = carry, carry + following
  return advantage, target


def inputs(seed, keep=0.6, shape=(B, T), follow=0.5):
  rng = np.random.default_rng(seed)
  reward, value = (rng.normal(size=shape).astype(np.float32) for _ in range(2))
  follows = rng.random(shape[0]) < follow
  follows[0] = False
  mask = rng.random(shape) < keep
  lam = rng.random(shape[0]).astype(np.float32)
  for rows in chains_of(follows):
    lam[rows] = lam[rows[0]]
  return reward, value, rng.normal(size=shape[0]).astype(np.float32), mask, follows, lam, rng


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 2**31), st.sampled_from([0.0, 0.2, 0.6, 1.0]), st.sampled_from([1.0, 0.9, 0.0]), st.sampled_from([0.0, 0.3, 0.9, 1.0]))
def test_a_chain_is_gae_over_all_its_actions(seed, keep, gamma, follow):
  """Rows without any action among them: at the beginning, in the middle and at the end of a chain."""
  reward, value, bootstrap, mask, follows, lam, _ = inputs(seed, keep, follow=follow)
  for gae_lambda in (0.0, 1.0, 0.95, lam):
    got = gae(reward, value, bootstrap, mask, gamma=gamma, gae_lambda=gae_lambda, follows=follows)
    for a, b in zip(got, oracle(reward, value, bootstrap, mask, follows, gamma, gae_lambda), strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-5, atol=5e-6)


def test_a_chain_by_hand():
  """Two segments of two and one actions, V 0.5 everywhere but 0.25 at the last, reward 1 there; then a cut rollout of one row."""
  mask = np.array([[0, 1, 1, 0], [0, 0, 1, 0], [0, 1, 0, 0]], bool)
  value = np.where(mask, 0.5, np.nan).astype(np.float32)
  value[1, 2] = 0.25
  reward = np.where(mask, 0.0, np.nan).astype(np.float32)
  reward[1, 2] = 1.0
  bootstrap = np.array([9.0, 0.0, 0.75], np.float32)  # That of row 0 is not of the end of its chain.
  follows = np.array([False, True, False])
  advantage, target = gae(reward, value, bootstrap, mask, gamma=1.0, gae_lambda=0.5, follows=follows)
  # deltas 0, -0.25, 0.75: A_2 = 0.75, A_1 = -0.25 + 0.375, A_0 = 0 + 0.0625
  np.testing.assert_allclose(advantage, [[0, 0.0625, 0.125, 0], [0, 0, 0.75, 0], [0, 0.25, 0, 0]], rtol=1e-6)
  np.testing.assert_allclose(target, [[0, 0.5625, 0.625, 0], [0, 0, 1.0, 0], [0, 0.75, 0, 0]], rtol=1e-6)
  np.testing.assert_allclose(
      algorithms.length_adaptive_lambda(mask, alpha=1.5, follows=follows), [1 - 1 / 4.5, 1 - 1 / 4.5, 1 - 1 / 1.5], rtol=1e-6)


@pytest.mark.parametrize('gamma, expected', [(1.0, [1, 1, 1, 1]), (0.9, [0.729, 0.81, 0.9, 1.0])])
def test_b01_actions_of_an_earlier_segment_get_the_reward(gamma, expected):
  """One discount for each action token, none for history that is shown again."""
  mask = np.array([[1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1]], bool)
  reward, zeros, follows = np.zeros((2, 6), np.float32), np.zeros((2, 6), np.float32), np.array([False, True])
  reward[1, 5] = 1.0
  for estimator, more in ((gae, dict(gae_lambda=1.0)), (reinforce, dict(gae_lambda=0.0))):
    _, target = estimator(reward, zeros, np.zeros(2, np.float32), mask, gamma=gamma, follows=follows, **more)
    np.testing.assert_allclose(np.asarray(target)[mask], expected, rtol=1e-6)


def test_b04_a_cut_chain_is_bootstrapped_once_at_its_end():
  mask, zeros = np.array([[1, 1], [1, 0]], bool), np.zeros((2, 2), np.float32)
  bootstrap, follows = np.array([5.0, 0.6], np.float32), np.array([False, True])
  value = np.full((2, 2), 0.5, np.float32)
  advantage, target = gae(zeros, value, bootstrap, mask, gamma=1.0, gae_lambda=1.0, follows=follows)
  np.testing.assert_allclose(np.asarray(advantage)[mask], [0.1] * 3, rtol=1e-5)
  np.testing.assert_allclose(np.asarray(target)[mask], [0.6] * 3, rtol=1e-5)


def test_b30_a_rollout_of_many_rows_counts_once():
  """A: one row, outcome 1. B: seven rows, outcome 0. The mean is 0.5, whatever the rows."""
  mask = np.zeros((9, 3), bool)
  mask[:8, 1] = True
  follows = np.array([False, False] + [True] * 6 + [False])
  reward, nan = np.where(mask, 0.0, np.nan).astype(np.float32), np.full((9, 3), np.nan, np.float32)
  reward[0, 1] = 1.0
  advantage, _ = reinforce(reward, nan, nan[:, 0], mask, gamma=1.0, gae_lambda=0.5, follows=follows)
  np.testing.assert_allclose(np.asarray(advantage)[mask], [0.5] + [-0.5] * 7)
  np.testing.assert_array_equal(algorithms.rollouts(mask, follows), [True, True] + [False] * 7)
  np.testing.assert_array_equal(algorithms.num_actions(mask, follows), [1] + [7] * 7 + [0])
  first_row_empty = mask.copy()
  first_row_empty[1] = False
  assert np.sum(algorithms.rollouts(first_row_empty, follows)) == 2 and np.sum(algorithms.rollouts(np.zeros_like(mask), follows)) == 0


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), LENGTHS)
def test_cutting_a_rollout_into_segments_changes_nothing(seed, lengths):
  """One row with all actions, and the same actions in a row for each segment: the same numbers, among other rollouts."""
  rng = np.random.default_rng(seed)
  n = sum(lengths)
  reward, value = rng.normal(size=(2, n)).astype(np.float32)
  other = [rng.normal(size=20).astype(np.float32) for _ in range(2)]
  cut_at = np.cumsum([0, *lengths])

  def rows(parts):
    arrays = [np.full((6, 20), np.nan, np.float32) for _ in range(2)]
    mask = np.zeros((6, 20), bool)
    for row, (a, b) in enumerate(parts):
      places = np.sort(rng.choice(20, b - a, replace=False))
      mask[row, places] = True
      for array, x in zip(arrays, (reward, value)):
        array[row, places] = x[a:b]
    mask[-1, ::3] = True
    for array, x in zip(arrays, other):
      array[-1] = x
    follows = (np.arange(6) > 0) & (np.arange(6) < len(parts))
    bootstrap = np.full(6, 7.0, np.float32)
    bootstrap[len(parts) - 1] = 0.5
    lam = adaptive(mask, follows=follows)
    found = [gae(*arrays, bootstrap, mask, gamma=0.97, gae_lambda=lam, follows=follows)]
    found.append(reinforce(*arrays, bootstrap, mask, gamma=0.97, gae_lambda=lam, follows=follows))
    return [np.asarray(x)[mask] for pair in found for x in pair]

  whole, cut = rows([(0, n)]), rows(list(zip(cut_at[:-1], cut_at[1:])))
  assert len(whole[0]) == n + 7
  for a, b in zip(whole, cut, strict=True):
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=5e-6)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31))
def test_other_rollouts_padding_and_poison_cannot_matter(seed):
  reward, value, bootstrap, mask, follows, lam, rng = inputs(seed)
  fields = dict(gamma=0.97, gae_lambda=lam, follows=follows)
  clean = gae(reward, value, bootstrap, mask, **fields)
  for poison in (np.nan, np.inf):
    dirty = [np.where(mask, x, np.float32(poison)) for x in (reward, value)]
    last = np.append(~follows[1:], True)
    wrong = np.where(last, bootstrap, np.float32(poison))  # Only that of the last row is of the chain.
    for a, b in zip(clean, gae(*dirty, wrong, mask, **fields), strict=True):
      np.testing.assert_array_equal(a, b)
  # Whole rollouts in another order, with empty rows between them and columns added.
  chains = chains_of(follows)
  order = [row for i in rng.permutation(len(chains)) for row in chains[i]]
  shuffle = lambda x: np.pad(x[order], [(0, 3)] + [(0, 2)] * (x.ndim - 1))
  moved = gae(*(shuffle(x) for x in (reward, value, bootstrap, mask)), gamma=0.97, gae_lambda=shuffle(lam), follows=shuffle(follows))
  for a, b in zip(clean, moved, strict=True):
    np.testing.assert_allclose(np.asarray(b)[:B, :T], np.asarray(a)[order], rtol=1e-6, atol=1e-6)
    assert not np.any(np.asarray(b)[B:])
  # A NaN on an action of one rollout reaches no other.
  if mask[chains[0]].any():
    row = next(b for b in chains[0] if mask[b].any())
    bad = reward.copy()
    bad[row, np.flatnonzero(mask[row])[0]] = np.nan
    got = np.asarray(gae(bad, value, bootstrap, mask, **fields)[0])
    others = [b for b in range(B) if b not in chains[0]]
    np.testing.assert_array_equal(got[others], np.asarray(clean[0])[others])
    assert np.isnan(got[row]).any()


def test_without_chains_it_is_what_it_was_bit_for_bit():
  reward, value, bootstrap, mask, _, lam, _ = inputs(3)
  for estimator in (gae, reinforce):
    plain = estimator(reward, value, bootstrap, mask, gamma=0.97, gae_lambda=lam)
    none = estimator(reward, value, bootstrap, mask, gamma=0.97, gae_lambda=lam, follows=np.zeros(B, bool))
    assert all(np.array_equal(a, b) for a, b in zip(plain, none, strict=True))
  with pytest.raises(AssertionError):
    gae(reward, value, bootstrap, mask, gamma=1.0, gae_lambda=1.0, follows=np.zeros(B, np.int32))


def test_a_long_chain_stays_exact():
  reward, value, bootstrap, mask, _, _, _ = inputs(5, shape=(64, 64))
  follows = np.arange(64) > 0
  got = gae(reward, value, bootstrap, mask, gamma=1.0, gae_lambda=np.float32(1 - 1 / 3000), follows=follows)
  for a, b in zip(got, oracle(reward, value, bootstrap, mask, follows, 1.0, np.float32(1 - 1 / 3000)), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-4)


def test_rows_on_several_devices_are_one_chain():
  """Sixteen rows over eight devices, chains across all of them."""
  mesh = sharding.make_mesh(jax.devices()[:8], (2, 4, 1, 1, 1))
  by_row = sharding.batch_sharding(mesh)
  reward, value, bootstrap, mask, follows, lam, _ = inputs(7, shape=(16, T), follow=0.8)
  assert max(map(len, chains_of(follows))) > 4
  spread = jax.jit(functools.partial(algorithms.skip_observation_gae, gamma=0.97), out_shardings=by_row)
  placed = jax.device_put((reward, value, bootstrap, mask), by_row)
  got = spread(*placed, gae_lambda=jax.device_put(lam, by_row), follows=jax.device_put(follows, by_row))
  assert got[0].sharding.is_equivalent_to(by_row, 2)
  for a, b in zip(got, oracle(reward, value, bootstrap, mask, follows, 0.97, lam), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=5e-6)


# --- The compiled update -----------------------------------------------------------------------------------------------------------

BASE = dict(denominator='trajectory', advantage_values='before_update', gamma=0.9)
FOLLOWS = np.array([False, True, True, False, False, True, False, False])
CHAINED: dict = {}


def learner(devices=1, *, algorithm=None, **fields):
  """A learner that takes rollouts of several segments; compiled once for each set of settings."""
  fields = dict(value_steps=1, algorithm={**BASE, **(algorithm or {})}) | fields
  key = repr((devices, sorted(fields.items())))
  if key not in CHAINED:
    config = dataclasses.replace(make_config(**fields), task=TaskConfig(max_segments=3))
    CHAINED[key] = Learner(config, sharding.make_mesh(jax.devices()[:devices], config.learner.mesh))
  return CHAINED[key]


def batch_of_chains(seed=0, truncated=(0, 3)):
  """Eight rows in five rollouts, of which those that begin at the rows `truncated` are cut; the last row is empty."""
  batch = learner_factory.make_batch(seed)
  cut = np.zeros(ROWS, bool)
  for rows in chains_of(FOLLOWS):
    cut[rows] = rows[0] in truncated
  return dataclasses.replace(batch, truncated=cut, follows=FOLLOWS)


def total(stat):
  return np.array([float(stat.total), float(stat.count)])


@pytest.mark.parametrize('truncation', ['bootstrap', pytest.param('drop', marks=pytest.mark.slow)])
def test_the_compiled_update_runs_over_chains(truncation):
  """Targets, advantages and counts of the update that production runs, against the oracle on values of the dense model."""
  this, batch = learner(algorithm={} if truncation == 'bootstrap' else dict(truncation=truncation)), batch_of_chains()
  _, metrics = this.update(start(this), batch, version=0, train_policy=True)
  metrics = this.fetch(metrics, 0)
  mask = batch.action_mask & ~batch.truncated[:, None] if truncation == 'drop' else batch.action_mask
  value, bootstrap = host(dense_values(learner_factory.start_params()[1], this.config, batch))
  n = np.array([sum(mask[b].sum() for b in next(c for c in chains_of(FOLLOWS) if row in c)) for row in range(ROWS)])
  lam = np.where(n > 0, np.maximum(0, 1 - 1 / (1.5 * np.maximum(n, 1))), 0.0)
  advantage = oracle(batch.reward, value, bootstrap, mask, FOLLOWS, 0.9, lam)[0]
  target = oracle(batch.reward, np.zeros_like(value), bootstrap, mask, FOLLOWS, 0.9, 1.0)[1]
  error = np.sum(np.where(mask, value - target, 0.0)**2)
  np.testing.assert_allclose(total(metrics['value/target_mean']), [target.sum(), mask.sum()], rtol=1e-4, atol=1e-4)
  np.testing.assert_allclose(total(metrics['value/loss']), [error, mask.sum()], rtol=1e-4)
  np.testing.assert_allclose(total(metrics['advantage/abs_mean']), [np.abs(advantage).sum(), mask.sum()], rtol=1e-4)
  rollouts = [c for c in chains_of(FOLLOWS) if mask[c].any()]
  assert metrics['policy/loss'].count == len(rollouts) and len(rollouts) < (mask.any(axis=1)).sum()
  some = [c for c in chains_of(FOLLOWS) if batch.action_mask[c].any()]
  assert total(metrics['batch/truncated_fraction']).tolist() == [2.0, len(some)]  # Rollouts, not rows.


def two_updates(this):
  state, _ = this.update(start(this), batch_of_chains(0), version=1, train_policy=True)
  state, metrics = this.update(state, batch_of_chains(1), version=1, train_policy=True)
  return host((state.policy, state.value_trainable)), this.fetch(metrics, 1)


def assert_same_run(got, want):
  for a, b in zip(got[0], want[0], strict=True):
    assert set(a) == set(b) and len(b) > 3
    for path in b:
      np.testing.assert_allclose(a[path], b[path], rtol=1e-4, atol=2e-5, err_msg=path)
  assert set(got[1]) == set(want[1]) and len(want[1]) > 15
  for name, stat in want[1].items():
    np.testing.assert_allclose(total(got[1][name]), total(stat), rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.parametrize('parts', [2, pytest.param(8, marks=pytest.mark.slow)])
def test_chains_split_over_micro_batches_change_nothing(parts):
  """With stride, the rows of every chain lie in different micro-batches."""
  assert_same_run(two_updates(learner(micro_batches=parts)), two_updates(learner()))


@pytest.mark.slow
@pytest.mark.parametrize('mesh, fields', [
    ((2, 2, 1, 1, 2), dict(micro_batches=2)),
    ((8, 1, 1, 1, 1), dict(
        algorithm=dict(denominator='action_tokens', advantage_values='after_update', truncation='zero'), value_steps=2))])
def test_chains_over_eight_devices_change_nothing(mesh, fields):
  one = {k: v for k, v in fields.items() if k != 'micro_batches'}
  assert_same_run(two_updates(learner(8, mesh=mesh, **fields)), two_updates(learner(**one)))


def test_the_order_of_rollouts_changes_nothing():
  this = learner()
  order = [row for chain in reversed(chains_of(FOLLOWS)) for row in chain]
  batch = batch_of_chains()
  runs = []
  for b in (batch, jax.tree.map(lambda x: x[order], batch)):
    state, metrics = this.update(start(this), b, version=1, train_policy=True)
    runs.append((host((state.policy, state.value_trainable)), this.fetch(metrics, 0)))
  assert_same_run(runs[1], runs[0])


def test_segments_are_refused_where_the_settings_have_none():
  this = learner_factory.make_learner()
  with pytest.raises(ValueError, match='needs task.max_segments of at least 2'):
    this.update(start(this), batch_of_chains(), version=0, train_policy=True)


def test_a_batch_that_says_nothing_of_chains_has_none():
  this = learner()
  batch = dataclasses.replace(batch_of_chains(), follows=None)
  _, one = this.update(start(this), batch, version=0, train_policy=True)
  _, two = this.update(start(this), dataclasses.replace(batch, follows=np.zeros(ROWS, bool)), version=0, train_policy=True)
  assert LENGTH and all(np.array_equal(total(x), total(two[name])) for name, x in one.items())
