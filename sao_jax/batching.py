"""Rollouts into padded batches of a fixed shape. NumPy only.

    rollouts of 3 and 5 tokens, lengths (4, 8), batch_size 4  ->  arrays of [4, 8]
      row 0  t t t . . . . .
      row 1  t t t t t . . .
      row 2  . . . . . . . .      rows beyond the last rollout are empty: all masks False
      row 3  . . . . . . . .

Shapes come from `lengths` alone, so the learner compiles once per bucket. Masks say what is real; nothing is derived from `pad_id`.
"""

from __future__ import annotations

from typing import Sequence

import numpy as np

from sao_jax.types import Batch, Rollout


def bucket_length(length: int, lengths: Sequence[int]) -> int:
  """The smallest of `lengths` that holds `length` tokens.

  Raises:
    ValueError: when none does; the message names `lengths`.
  """
  fitting = [n for n in lengths if n >= length]
  if not fitting:
    raise ValueError(
        f'A rollout of {length} tokens fits in no bucket of learner.lengths {tuple(lengths)}; '
        f'add a bucket of at least {length}, or lower task.max_tokens.'
    )
  return min(fitting)


def make_batch(rollouts: Sequence[Rollout], *, lengths: Sequence[int], batch_size: int, pad_id: int) -> Batch:
  """Pads `rollouts`, one a row and in their order, into the smallest bucket that holds the longest of them.

  Args:
    rollouts: at most `batch_size`; with fewer, the last rows are empty.
    lengths: buckets of padded length, in tokens.
    batch_size: rows B of the batch.
    pad_id: token id written where there is no token.

  Returns:
    `Batch` of NumPy arrays [B, T]; off the tokens `policy_version` is -1 and everything else is 0 or False.

  Raises:
    ValueError: more rollouts than rows, or a rollout longer than every bucket.
  """
  if len(rollouts) > batch_size:
    raise ValueError(f'{len(rollouts)} rollouts do not fit in a batch of {batch_size} rows.')
  length = bucket_length(max((r.length for r in rollouts), default=0), lengths)
  batch = empty_batch(batch_size, length, pad_id)
  for row, rollout in enumerate(rollouts):
    n = rollout.length
    batch.tokens[row, :n] = rollout.tokens
    batch.token_mask[row, :n] = True
    batch.action_mask[row, :n] = rollout.action_mask
    batch.behaviour_log_prob[row, :n] = rollout.behaviour_log_prob
    batch.reward[row, :n] = rollout.reward
    batch.policy_version[row, :n] = rollout.policy_version
    batch.truncated[row] = rollout.ending == 'truncated'
    batch.turn[row, :n] = rollout.turn
  return batch


def empty_batch(batch_size: int, length: int, pad_id: int) -> Batch:
  """A `Batch` [batch_size, length] without a single token; also what a learner warms up on."""
  shape = (batch_size, length)
  return Batch(
      tokens=np.full(shape, pad_id, np.int32),
      token_mask=np.zeros(shape, bool),
      action_mask=np.zeros(shape, bool),
      behaviour_log_prob=np.zeros(shape, np.float32),
      reward=np.zeros(shape, np.float32),
      policy_version=np.full(shape, -1, np.int32),
      truncated=np.zeros((batch_size,), bool),
      turn=np.zeros(shape, np.int32),
  )


def padding_fraction(batch: Batch) -> float:
  """Share of the positions of `batch` that hold no token, in 0..1."""
  return 1.0 - float(np.mean(batch.token_mask))
