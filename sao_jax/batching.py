"""Rollouts into padded batches of a fixed shape. NumPy only.

    rollouts of 3 and 5 tokens, lengths (4, 8), batch_size 4  ->  arrays of [4, 8]
      row 0  t t t . . . . .
      row 1  t t t t t . . .
      row 2  . . . . . . . .      rows beyond the last rollout are empty: all masks False
      row 3  . . . . . . . .

Shapes come from `lengths` and `row_buckets` alone, so the learner compiles once per bucket. Masks say what is real; nothing is derived from
`pad_id`.

A rollout of several segments takes a row for each, one after the other; `Batch.follows` marks the rows that continue the one before, and
advantages and returns run over the whole chain (`algorithms/advantages.py`). Rewards stay where they are.
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


def row_buckets(batch_size: int, max_segments: int) -> tuple[int, ...]:
  """Numbers of rows that a batch may have: `batch_size` doubled until every rollout may have `max_segments` segments."""
  buckets = [batch_size]
  while buckets[-1] < batch_size * max_segments:
    buckets.append(2 * buckets[-1])
  return tuple(buckets)


def make_batch(
    rollouts: Sequence[Rollout], *, lengths: Sequence[int], batch_size: int, pad_id: int, max_segments: int = 1,
) -> Batch:
  """Pads `rollouts`, in their order and one segment a row, into the smallest bucket that holds the longest of them.

  Args:
    rollouts: at most `batch_size`; with fewer, the last rows are empty.
    lengths: buckets of padded length, in tokens.
    batch_size: rows B of the batch, or half, a quarter, ... of them where rollouts have several segments (`row_buckets`).
    pad_id: token id written where there is no token.
    max_segments: most segments that a rollout has.

  Returns:
    `Batch` of NumPy arrays [B, T]; off the tokens `policy_version` is -1 and everything else is 0 or False.

  Raises:
    ValueError: more rollouts than rows, more segments than `max_segments`, or a segment longer than every bucket.
  """
  if len(rollouts) > batch_size:
    raise ValueError(f'{len(rollouts)} rollouts do not fit in a batch of {batch_size} rows.')
  most = max((len(r.segment_starts) for r in rollouts), default=1)
  if most > max_segments:
    raise ValueError(f'A rollout has {most} segments, batches are made for {max_segments}; raise task.max_segments.')
  needed = sum(len(r.segment_starts) for r in rollouts)
  rows = next(n for n in row_buckets(batch_size, max_segments) if n >= needed)
  batch = empty_batch(rows, bucket_length(max((r.longest_segment for r in rollouts), default=0), lengths), pad_id)
  row = 0
  for rollout in rollouts:
    truncated = rollout.ending == 'truncated'
    for start, stop in rollout.segments:
      n, part = stop - start, slice(start, stop)
      batch.tokens[row, :n] = rollout.tokens[part]
      batch.token_mask[row, :n] = True
      batch.action_mask[row, :n] = rollout.action_mask[part]
      batch.behaviour_log_prob[row, :n] = rollout.behaviour_log_prob[part]
      batch.reward[row, :n] = rollout.reward[part]
      batch.policy_version[row, :n] = rollout.policy_version[part]
      batch.truncated[row] = truncated
      batch.follows[row] = start > 0
      batch.turn[row, :n] = rollout.turn[part]
      row += 1
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
      follows=np.zeros((batch_size,), bool),
  )


def padding_fraction(batch: Batch) -> float:
  """Share of the positions of `batch` that hold no token, in 0..1."""
  return 1.0 - float(np.mean(batch.token_mask))
