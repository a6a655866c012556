"""The formulas against float64 loops written from the method, hand-worked values, and what a mask leaves out."""

import functools

from hypothesis import given, settings, strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax import algorithms, train
from sao_jax import config as config_lib

DIS = dict(epsilon_low=0.3, epsilon_high=5.0)
gae = jax.jit(algorithms.skip_observation_gae)


def f32(*rows):
  return np.array(rows, np.float32)


def gae_oracle(reward, value, bootstrap, mask, gamma, gae_lambda):
  """Ordinary GAE, float64, on what is left when all other positions are dropped; results put back."""
  advantage, target = np.zeros(reward.shape), np.zeros(reward.shape)
  for b in range(reward.shape[0]):
    next_value, next_advantage = float(bootstrap[b]), 0.0
    lam = float(np.broadcast_to(gae_lambda, bootstrap.shape)[b])
    for t in [t for t in range(reward.shape[1]) if mask[b, t]][::-1]:
      delta = float(reward[b, t]) + gamma * next_value - float(value[b, t])
      next_advantage = delta + gamma * lam * next_advantage
      next_value = float(value[b, t])
      advantage[b, t], target[b, t] = next_advantage, next_advantage + next_value
  return advantage, target


def random_inputs(seed, shape=(4, 13), keep=0.5):
  rng = np.random.default_rng(seed)
  reward, value = (rng.normal(size=shape).astype(np.float32) for _ in range(2))
  return reward, value, rng.normal(size=shape[0]).astype(np.float32), rng.random(shape) < keep, rng


# --- Advantages ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('keep', [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize('gamma', [1.0, 0.9])
def test_gae_matches_float64_loop(gamma, keep):
  reward, value, bootstrap, mask, rng = random_inputs(3, keep=keep)
  for gae_lambda in (0.0, 0.95, 1.0, rng.random(4).astype(np.float32)):
    got = gae(reward, value, bootstrap, mask, gamma=gamma, gae_lambda=gae_lambda)
    for a, b in zip(got, gae_oracle(reward, value, bootstrap, mask, gamma, gae_lambda), strict=True):
      assert a.dtype == jnp.float32
      np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6)


def test_gae_over_a_long_row_stays_exact():
  reward, value, bootstrap, mask, _ = random_inputs(5, shape=(2, 4096), keep=0.6)
  got = gae(reward, value, bootstrap, mask, gamma=1.0, gae_lambda=1 - 1 / 3000)
  for a, b in zip(got, gae_oracle(reward, value, bootstrap, mask, 1.0, np.float32(1 - 1 / 3000)), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize('gamma,expected', [(1.0, [1, 1, 0, 0, 1, 1]), (0.9, [0.729, 0.81, 0, 0, 0.9, 1.0])])
def test_b01_actions_before_a_tool_output_get_the_reward(gamma, expected):
  mask = np.array([[1, 1, 0, 0, 1, 1]], bool)
  reward, zeros = f32([0, 0, 0, 0, 0, 1]), np.zeros((1, 6), np.float32)
  _, target = gae(reward, zeros, np.zeros(1, np.float32), mask, gamma=gamma, gae_lambda=1.0)
  np.testing.assert_allclose(target[0], expected, rtol=1e-6)
  _, to_go = algorithms.reinforce_batch_centred(reward, zeros, np.zeros(1, np.float32), mask, gamma=gamma, gae_lambda=1.0)
  np.testing.assert_allclose(to_go[0], expected, rtol=1e-6)


def test_b01_rows_with_different_masks_do_not_mix():
  mask = np.array([[1, 1, 0, 0, 1, 1], [0, 1, 1, 1, 1, 0], [0, 0, 0, 0, 0, 0], [0, 0, 1, 0, 1, 0]], bool)
  reward, value, bootstrap, _, _ = random_inputs(0, shape=mask.shape)
  together = gae(reward, value, bootstrap, mask, gamma=0.9, gae_lambda=0.8)
  for b in range(4):
    alone = gae(reward[b:b + 1], value[b:b + 1], bootstrap[b:b + 1], mask[b:b + 1], gamma=0.9, gae_lambda=0.8)
    np.testing.assert_allclose(together[0][b], alone[0][0], rtol=1e-6)
    np.testing.assert_allclose(together[1][b], alone[1][0], rtol=1e-6)


@pytest.mark.parametrize('bootstrap,expected', [(0.0, -0.5), (0.6, 0.1)])
def test_b04_a_cut_rollout_is_bootstrapped(bootstrap, expected):
  zeros, mask = np.zeros((1, 2), np.float32), np.ones((1, 2), bool)
  advantage, _ = gae(zeros, f32([0.5, 0.5]), f32(bootstrap), mask, gamma=1.0, gae_lambda=1.0)
  np.testing.assert_allclose(advantage[0], [expected, expected], rtol=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([0.0, 0.4, 1.0]))
def test_gae_what_the_mask_leaves_out_cannot_matter(seed, keep):
  reward, value, bootstrap, mask, rng = random_inputs(seed, shape=(3, 9), keep=keep)
  clean = gae(reward, value, bootstrap, mask, gamma=0.97, gae_lambda=0.9)
  for poison in (np.nan, np.inf, -1e30):
    dirty = gae(np.where(mask, reward, poison), np.where(mask, value, poison), bootstrap, mask, gamma=0.97, gae_lambda=0.9)
    np.testing.assert_array_equal(clean[0], dirty[0])
    np.testing.assert_array_equal(clean[1], dirty[1])
  assert not np.any(np.asarray(clean[0])[~mask]) and not np.any(np.asarray(clean[1])[~mask])
  # Other positions inserted between two actions, and padding at the end, change nothing.
  cut = int(rng.integers(0, 10))
  wide = [np.insert(x, [cut] * 3, 7.0, axis=1) for x in (reward, value)]
  wide_mask = np.insert(mask, [cut] * 3, False, axis=1)
  stretched = gae(*wide, bootstrap, wide_mask, gamma=0.97, gae_lambda=0.9)
  np.testing.assert_allclose(np.asarray(stretched[0])[wide_mask], np.asarray(clean[0])[mask], rtol=1e-5, atol=1e-6)


def test_gae_empty_row_ignores_its_bootstrap_in_value_and_gradient():
  mask = np.array([[0, 0], [1, 0]], bool)
  zeros = np.zeros((2, 2), np.float32)

  def total(value, bootstrap):
    return jnp.sum(gae(zeros, value, bootstrap, mask, gamma=1.0, gae_lambda=1.0)[0])

  value, gradient = jax.value_and_grad(total, argnums=(0, 1))(f32([np.nan, 9], [1, np.nan]), f32(np.nan, 2.0))
  assert value == 1.0
  np.testing.assert_array_equal(gradient[0], [[0, 0], [-1, 0]])
  np.testing.assert_array_equal(gradient[1], [0, 1])


def test_length_adaptive_lambda_by_hand():
  mask = np.array([[1, 1, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0]], bool)
  np.testing.assert_allclose(
      algorithms.length_adaptive_lambda(mask, alpha=1.5), [1 - 1 / 4.5, 1 - 1 / 1.5, 0.0, 1 - 1 / 3.0], rtol=1e-6)
  assert algorithms.length_adaptive_lambda(mask, alpha=0.5)[1] == 0.0  # Never below 0.


def test_place_outcome_reward_on_the_last_action():
  mask = np.array([[0, 1, 1, 0, 1, 0], [0, 1, 0, 0, 0, 0], [0] * 6, [1] * 6], bool)
  reward = algorithms.place_outcome_reward(f32(1, 2, np.nan, 4).reshape(-1), mask)
  np.testing.assert_array_equal(reward, [[0, 0, 0, 0, 1, 0], [0, 2, 0, 0, 0, 0], [0] * 6, [0, 0, 0, 0, 0, 4]])


def test_reinforce_batch_centred_counts_each_row_once():
  """B30: a row of nine turns is one row in the mean; an empty row is none."""
  mask = np.array([[0, 1] + [0] * 18, [0, 1] * 9 + [0, 0], [0] * 20], bool)
  reward = algorithms.place_outcome_reward(f32(1, 0, 5).reshape(-1), mask)
  nan = np.full(mask.shape, np.nan, np.float32)
  advantage, target = algorithms.reinforce_batch_centred(
      np.where(mask, reward, np.nan).astype(np.float32), nan, nan[:, 0], mask, gamma=1.0, gae_lambda=0.5)
  np.testing.assert_allclose(np.asarray(advantage)[0][mask[0]], [0.5])
  np.testing.assert_allclose(np.asarray(advantage)[1][mask[1]], [-0.5] * 9)
  assert not np.any(np.asarray(advantage)[~mask]) and not np.any(np.asarray(target)[~mask])


def test_registries_hold_the_defaults_and_share_signatures():
  assert config_lib.AlgorithmConfig().advantage in algorithms.ADVANTAGES and len(algorithms.ADVANTAGES) >= 2
  assert config_lib.AlgorithmConfig().objective in algorithms.OBJECTIVES and len(algorithms.OBJECTIVES) >= 2
  reward, value, bootstrap, mask, _ = random_inputs(1)
  for estimator in algorithms.ADVANTAGES.values():
    assert [x.shape for x in estimator(reward, value, bootstrap, mask, gamma=1.0, gae_lambda=0.5)] == [mask.shape] * 2
  for objective in algorithms.OBJECTIVES.values():
    assert set(objective(reward, value, reward, mask, **DIS)) == {'loss', 'kept_fraction', 'above', 'below'}


# --- Policy objectives ---------------------------------------------------------------------------------------------------------


def dis_oracle(log_prob, behaviour, advantage, mask, epsilon_low, epsilon_high):
  loss, gradient, kept, above, below = 0.0, np.zeros(mask.shape), 0, 0, 0
  for i in zip(*np.nonzero(mask)):
    ratio = np.exp(np.float64(log_prob[i]) - np.float64(behaviour[i]))
    if ratio <= 1 - epsilon_low:
      below += 1
    elif ratio >= 1 + epsilon_high:
      above += 1
    else:
      kept += 1
      loss -= ratio * advantage[i] * log_prob[i]
      gradient[i] = -ratio * advantage[i]
  return loss, gradient, kept, above, below


def ppo_oracle(log_prob, behaviour, advantage, mask, epsilon_low, epsilon_high):
  loss, gradient = 0.0, np.zeros(mask.shape)
  for i in zip(*np.nonzero(mask)):
    ratio, a = np.exp(np.float64(log_prob[i]) - np.float64(behaviour[i])), np.float64(advantage[i])
    clipped = min(max(ratio, 1 - epsilon_low), 1 + epsilon_high)
    loss -= min(ratio * a, clipped * a)
    gradient[i] = -ratio * a if ratio * a <= clipped * a and not (clipped != ratio and ratio * a == clipped * a) else 0.0
  return loss, gradient


def objective_value_and_grad(name, args, mask, **bounds):
  def total(log_prob):
    stats = algorithms.OBJECTIVES[name](log_prob, args[1], args[2], mask, **bounds)
    return stats['loss'].total, stats
  (loss, stats), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(args[0])
  return loss, gradient, stats


def random_tokens(seed, shape=(3, 11), keep=0.6, spread=1.5):
  rng = np.random.default_rng(seed)
  behaviour = -rng.gamma(1.0, 1.0, shape)
  args = [(behaviour + rng.normal(size=shape) * spread), behaviour, rng.normal(size=shape)]
  return [x.astype(np.float32) for x in args], rng.random(shape) < keep


@pytest.mark.parametrize('keep', [0.0, 0.5, 1.0])
@pytest.mark.parametrize('bounds', [DIS, dict(epsilon_low=0.8, epsilon_high=3.0), dict(epsilon_low=1.0, epsilon_high=0.2)])
def test_dis_matches_float64_loop(bounds, keep):
  args, mask = random_tokens(7, keep=keep)
  loss, gradient, stats = objective_value_and_grad('dis', args, mask, **bounds)
  want_loss, want_gradient, kept, above, below = dis_oracle(*args, mask, **bounds)
  np.testing.assert_allclose(loss, want_loss, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(gradient, want_gradient, rtol=1e-5, atol=1e-6)
  assert [float(stats[k].total) for k in ('kept_fraction', 'above', 'below')] == [kept, above, below]
  assert all(float(s.count) == mask.sum() for s in stats.values())
  assert kept + above + below == mask.sum()


@pytest.mark.parametrize('keep', [0.0, 0.5, 1.0])
def test_ppo_matches_float64_loop(keep):
  bounds = dict(epsilon_low=0.2, epsilon_high=0.28)
  args, mask = random_tokens(8, keep=keep, spread=0.5)
  loss, gradient, stats = objective_value_and_grad('ppo_clip', args, mask, **bounds)
  want_loss, want_gradient = ppo_oracle(*args, mask, **bounds)
  np.testing.assert_allclose(loss, want_loss, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(gradient, want_gradient, rtol=1e-5, atol=1e-6)
  assert float(stats['kept_fraction'].total) == np.sum(mask & (want_gradient != 0))


def test_dis_band_is_strict_on_both_sides_whatever_the_sign():
  """Bounds that float32 holds exactly: 0.5 and 2; ratios just inside, on and outside them."""
  ratio = f32([0.4999, 0.5, 0.5001, 1.0, 1.9999, 2.0, 2.0001] * 2)
  advantage = np.repeat(f32([1.0, -1.0]), 7, axis=1)
  # exp(0) = 1 exactly, so that a bound at the ratio itself is hit exactly.
  zeros, mask = np.zeros_like(ratio), np.ones(ratio.shape, bool)
  at_bound = algorithms.dis_policy_loss(zeros, zeros, advantage, mask, epsilon_low=0.0, epsilon_high=1.0)
  assert float(at_bound['below'].total) == 14 and float(at_bound['kept_fraction'].total) == 0
  at_bound = algorithms.dis_policy_loss(zeros, zeros, advantage, mask, epsilon_low=0.5, epsilon_high=0.0)
  assert float(at_bound['above'].total) == 14 and float(at_bound['loss'].total) == 0
  inside = (ratio > 0.5) & (ratio < 2.0)
  away = np.abs(np.log2(ratio)) != 1.0
  args = [np.log(ratio) - 1, zeros - 1, advantage]
  _, gradient, _ = objective_value_and_grad('dis', args, mask & away, epsilon_low=0.5, epsilon_high=1.0)
  np.testing.assert_array_equal(np.asarray(gradient) != 0, inside & away)
  np.testing.assert_allclose(np.asarray(gradient)[inside], -(ratio * advantage)[inside], rtol=1e-5)


def test_dis_at_ratio_one_is_the_plain_policy_gradient():
  args, mask = random_tokens(1)
  _, gradient, stats = objective_value_and_grad('dis', [args[1], args[1], args[2]], mask, **DIS)
  np.testing.assert_allclose(gradient, np.where(mask, -args[2], 0), rtol=1e-6)
  assert float(stats['kept_fraction'].mean()) == 1.0


@pytest.mark.parametrize('name', sorted(algorithms.OBJECTIVES))
@pytest.mark.parametrize('poison', [np.nan, np.inf, -np.inf, 1e30])
def test_b07_masked_slots_cannot_matter_in_value_or_gradient(name, poison):
  args, mask = random_tokens(4)
  clean = objective_value_and_grad(name, args, mask, **DIS)
  for which in range(3):
    dirty = [np.where(mask, x, poison).astype(np.float32) if i == which else x for i, x in enumerate(args)]
    got = objective_value_and_grad(name, dirty, mask, **DIS)
    assert got[0] == clean[0]
    np.testing.assert_array_equal(got[1], clean[1])


@pytest.mark.parametrize('name', sorted(algorithms.OBJECTIVES))
@pytest.mark.parametrize('log_ratio', [100.0, 1e4, np.inf, -100.0, -1e30])
@pytest.mark.parametrize('sign', [1.0, -1.0])
def test_b07_an_overflowing_ratio_stays_finite(name, log_ratio, sign):
  """Log-ratios 0 and 100 in one row, as reported."""
  behaviour = f32([-1.0, -1.0])
  log_prob = behaviour + f32([0.0, 1.0]) * np.float32(min(log_ratio, 3e38))
  loss, gradient, _ = objective_value_and_grad(name, [log_prob, behaviour, f32([sign, sign])], np.ones((1, 2), bool), **DIS)
  assert np.isfinite(loss) and np.all(np.isfinite(gradient))
  np.testing.assert_allclose(gradient[0, 0], -sign, rtol=1e-6)
  if name == 'dis':
    assert gradient[0, 1] == 0.0


@pytest.mark.parametrize('name', sorted(algorithms.OBJECTIVES))
def test_a_nan_on_an_action_is_not_hidden(name):
  args, mask = random_tokens(2, keep=1.0)
  args[0][0, 0] = np.nan
  assert np.isnan(objective_value_and_grad(name, args, mask, **DIS)[0])


@pytest.mark.parametrize('name', sorted(algorithms.OBJECTIVES))
def test_b06_nothing_to_train_on_is_exactly_zero(name):
  args, mask = random_tokens(2)
  loss, gradient, stats = objective_value_and_grad(name, args, np.zeros_like(mask), **DIS)
  assert loss == 0 and not np.any(gradient)
  assert all(float(s.count) == 0 and float(s.total) == 0 and float(s.mean()) == 0 for s in stats.values())


@pytest.mark.parametrize('name', sorted(algorithms.OBJECTIVES))
def test_objectives_add_up_over_parts_and_scale_with_the_advantage(name):
  args, mask = random_tokens(5, shape=(4, 10), spread=0.4)
  bounds = dict(epsilon_low=0.2, epsilon_high=0.28)
  objective = functools.partial(algorithms.OBJECTIVES[name], **bounds)
  whole = objective(*args, mask)
  rows = [objective(*(x[i:i + 2] for x in args), mask[i:i + 2]) for i in (0, 2)]
  columns = [objective(*(x[:, i:i + 5] for x in args), mask[:, i:i + 5]) for i in (0, 5)]
  for key in whole:
    for parts in (rows, columns):
      merged = parts[0][key] + parts[1][key]
      np.testing.assert_allclose([merged.total, merged.count], [whole[key].total, whole[key].count], rtol=1e-5, atol=1e-6)
  scaled = objective(args[0], args[1], 0.125 * args[2], mask)
  np.testing.assert_allclose(scaled['loss'].total, 0.125 * whole['loss'].total, rtol=1e-6)


def test_b30_token_mean_weighs_parts_by_their_tokens():
  """Two parts with (3 tokens, mean 1) and (1 token, mean 5): 2, not 3."""
  parts = [algorithms.supervised_loss(f32([-1, -1, -1, 0]), np.array([[1, 1, 1, 0]], bool)),
           algorithms.supervised_loss(f32([-5, np.nan, 0, 0]), np.array([[1, 0, 0, 0]], bool))]
  assert float((parts[0]['loss'] + parts[1]['loss']).mean()) == 2.0


# --- Values --------------------------------------------------------------------------------------------------------------------


def test_squared_error_value_loss_by_hand_and_masked():
  value, target, mask = f32([1.0, 2.0, np.nan]), f32([0.0, 4.0, np.nan]), np.array([[1, 1, 0]], bool)

  def total(value, target):
    return algorithms.squared_error_value_loss(value, target, mask)['loss'].total

  loss, gradient = jax.value_and_grad(total, argnums=(0, 1))(value, target)
  assert float(loss) == 5.0
  np.testing.assert_array_equal(gradient[0], [[2, -4, 0]])
  np.testing.assert_array_equal(gradient[1], [[0, 0, 0]])
  empty = algorithms.squared_error_value_loss(value, target, np.zeros_like(mask))['loss']
  assert float(empty.total) == 0 and float(empty.count) == 0


def test_explained_variance_matches_float64():
  rng = np.random.default_rng(0)
  target = rng.normal(size=(4, 50)).astype(np.float32)
  value = (0.7 * target + 0.2 * rng.normal(size=target.shape) + 100).astype(np.float32)
  mask = rng.random(target.shape) < 0.5
  want = 1 - np.var(target[mask].astype(np.float64) - value[mask]) / np.var(target[mask].astype(np.float64))
  got = algorithms.explained_variance(np.where(mask, value, np.nan), np.where(mask, target, np.nan), mask)
  assert got.shape == () and got.dtype == jnp.float32
  np.testing.assert_allclose(got, want, rtol=1e-3)
  np.testing.assert_allclose(algorithms.explained_variance(target, target, mask), 1.0)
  assert float(algorithms.explained_variance(value, np.ones_like(target), mask)) == 0.0  # Undefined: targets do not vary.
  assert float(algorithms.explained_variance(value, target, np.zeros_like(mask))) == 0.0


def test_what_is_added_to_a_registry_can_be_configured(monkeypatch):
  monkeypatch.setitem(algorithms.ADVANTAGES, 'mine', algorithms.ADVANTAGES['reinforce_batch_centred'])
  config = config_lib.from_dict({'algorithm': {'advantage': 'mine'}})
  train.validate_names(config)
  with pytest.raises(ValueError, match='algorithm.advantage must be one of mine, .*got .other.'):
    train.validate_names(config_lib.from_dict({'algorithm': {'advantage': 'other'}}))
