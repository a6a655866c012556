"""Padding into buckets: every token kept, nothing else marked as real."""

from hypothesis import given, settings, strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax import algorithms
from sao_jax import batching
from tests.rollout_factory import make_rollout

FIELDS = ('tokens', 'action_mask', 'behaviour_log_prob', 'reward', 'policy_version', 'turn')


@pytest.mark.parametrize('length, expected', [(1, 4), (4, 4), (5, 8), (8, 8)])
def test_smallest_bucket_whatever_the_order(length, expected):
  assert batching.bucket_length(length, (8, 4)) == expected


def test_too_long_names_the_setting():
  with pytest.raises(ValueError, match=r'9 tokens.*learner.lengths \(4, 8\).*at least 9'):
    batching.make_batch([make_rollout(length=9)], lengths=(4, 8), batch_size=2, pad_id=0)


def test_more_rollouts_than_rows():
  with pytest.raises(ValueError, match='3 rollouts do not fit in a batch of 2'):
    batching.make_batch([make_rollout(ticket=i) for i in range(3)], lengths=(8,), batch_size=2, pad_id=0)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(3, 20), max_size=5), st.integers(0, 255))
def test_every_token_is_kept_and_nothing_else_is_real(lengths, pad_id):
  rollouts = [make_rollout(ticket=i, length=n, seed=i, version=i) for i, n in enumerate(lengths)]
  batch = batching.make_batch(rollouts, lengths=(8, 16, 32), batch_size=5, pad_id=pad_id)
  width = next(n for n in (8, 16, 32) if n >= max(lengths, default=0))
  assert batch.tokens.shape == (5, width)
  for row in range(5):
    n = lengths[row] if row < len(lengths) else 0
    np.testing.assert_array_equal(batch.token_mask[row], np.arange(width) < n)
    for name in FIELDS:
      got = getattr(batch, name)
      if n:
        np.testing.assert_array_equal(got[row, :n], getattr(rollouts[row], name))
        assert got.dtype == getattr(rollouts[row], name).dtype
      rest = {'tokens': pad_id, 'policy_version': -1}.get(name, 0)
      assert np.all(got[row, n:] == rest)
  assert batching.padding_fraction(batch) == pytest.approx(1 - sum(lengths) / (5 * width))


def test_truncation_comes_from_the_ending_not_from_a_full_row():
  cut = make_rollout(ticket=0, length=5, ending='truncated', stop_reason='max_tokens')
  full = make_rollout(ticket=1, length=8)
  batch = batching.make_batch([cut, full], lengths=(8,), batch_size=3, pad_id=0)
  np.testing.assert_array_equal(batch.truncated, [True, False, False])


def test_a_pad_id_inside_a_rollout_is_a_token():
  rollout = make_rollout(tokens=np.zeros(6, np.int32))
  batch = batching.make_batch([rollout], lengths=(8,), batch_size=1, pad_id=0)
  assert batch.token_mask.sum() == 6


def losses_of(batch, order):
  """Totals of the DIS loss over skip-observation advantages; values and log-probs are a function of each row's rollout alone."""
  value, log_prob = np.zeros(batch.tokens.shape, np.float32), np.zeros(batch.tokens.shape, np.float32)
  bootstrap = np.zeros(batch.tokens.shape[0], np.float32)
  for row, i in enumerate(order):
    rng = np.random.default_rng(100 + i)
    n = int(batch.token_mask[row].sum())
    value[row, :n], log_prob[row, :n] = rng.standard_normal(n), -rng.exponential(size=n)
    bootstrap[row] = rng.standard_normal() if batch.truncated[row] else 0.0
  value[~batch.token_mask] = log_prob[~batch.token_mask] = np.nan  # What a model gives for padding cannot matter.
  bootstrap[len(order):] = np.nan
  gae_lambda = algorithms.length_adaptive_lambda(jnp.asarray(batch.action_mask), alpha=1.5)
  advantage, target = jax.jit(algorithms.skip_observation_gae, static_argnames='gamma')(
      batch.reward, value, bootstrap, batch.action_mask, gamma=0.97, gae_lambda=gae_lambda)
  stats = algorithms.dis_policy_loss(
      jnp.asarray(log_prob), jnp.asarray(batch.behaviour_log_prob), advantage, jnp.asarray(batch.action_mask), epsilon_low=0.8,
      epsilon_high=3.0)
  return {**{f'{name}/{part}': float(getattr(s, part)) for name, s in stats.items() for part in ('total', 'count')},
          'advantage': float(jnp.sum(jnp.abs(advantage))), 'target': float(jnp.sum(jnp.abs(target)))}


@pytest.mark.parametrize('lengths, batch_size, pad_id', [((16,), 4, 7), ((24, 64), 4, 0), ((64,), 4, 0), ((16,), 9, 255), ((128,), 12, 3)])
def test_padding_changes_no_loss(lengths, batch_size, pad_id):
  rollouts = [
      make_rollout(ticket=i, length=n, seed=i, outcome=float(i), **({'ending': 'truncated', 'stop_reason': 'context'} if i == 2 else {}))
      for i, n in enumerate((5, 16, 9, 12))]
  tight = losses_of(batching.make_batch(rollouts, lengths=(16,), batch_size=4, pad_id=0), range(4))
  assert tight['loss/count'] == sum(r.num_actions for r in rollouts) and 0 < tight['kept_fraction/total'] < tight['loss/count']
  for order in (range(4), (3, 1, 0, 2)):
    batch = batching.make_batch([rollouts[i] for i in order], lengths=lengths, batch_size=batch_size, pad_id=pad_id)
    found = losses_of(batch, order)
    assert found == pytest.approx(tight, rel=2e-6, abs=1e-6)
