"""Padding into buckets: every token kept, nothing else marked as real."""

from hypothesis import given, settings, strategies as st
import numpy as np
import pytest

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
