"""The one check of a rollout, made where it enters the queue."""

from __future__ import annotations

import numbers

import numpy as np

from sao_jax.types import ENDINGS, STOP_REASONS, Rollout

LOG_PROB_TOLERANCE = 1e-4  # Nats that a float32 log-probability may lie above 0 by round-off.

_DTYPES = {
    'tokens': np.int32, 'action_mask': np.bool_, 'behaviour_log_prob': np.float32, 'policy_version': np.int32, 'reward': np.float32,
    'turn': np.int32,
}


def check_rollout(rollout: Rollout, *, oldest: int, newest: int, vocab_size: int, max_length: int) -> str:
  """Why `rollout` must not be trained on; '' if nothing is wrong with it.

  Args:
    oldest: lowest version that its action tokens may have.
    newest: highest version that they may have.
    vocab_size: token ids are 0..vocab_size - 1.
    max_length: longest segment in tokens.
  """
  return _wrong_form(rollout, max_length) or _wrong_fields(rollout) or _wrong_values(rollout, oldest, newest, vocab_size)


def _wrong_form(rollout: Rollout, max_length: int) -> str:
  for name, dtype in _DTYPES.items():
    array = getattr(rollout, name)
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
      found = f'{array.dtype}{list(array.shape)}' if isinstance(array, np.ndarray) else type(array).__name__
      return f'{name} must be a NumPy array {np.dtype(dtype).name}[T], got {found}'
    if array.shape != rollout.tokens.shape:
      return f'{name} has {array.shape[0]} positions, tokens has {rollout.tokens.shape[0]}'
  if not rollout.action_mask.any():
    return 'no action token'
  return _wrong_segments(rollout) or _too_long(rollout, max_length)


def _too_long(rollout: Rollout, max_length: int) -> str:
  longest = rollout.longest_segment
  return f'{longest} tokens are longer than the longest rollout, {max_length}' if longest > max_length else ''


def _wrong_segments(rollout: Rollout) -> str:
  """Segments begin where the history was shown anew, right after an action, and each has actions."""
  starts, mask = rollout.segment_starts, rollout.action_mask
  if not starts or starts[0] != 0 or any(a >= b for a, b in zip(starts, (*starts[1:], rollout.length))):
    return f'segment_starts must ascend from 0 within {rollout.length} tokens, got {starts}'
  for start, stop in rollout.segments:
    if start and (mask[start] or not mask[start - 1]):
      return f'the segment at {start} must begin with history, right after an action'
    if not mask[start:stop].any():
      return f'the segment at {start} has no action token'
  return ''


def _wrong_fields(rollout: Rollout) -> str:
  if rollout.ending not in ENDINGS:
    return f'unknown ending {rollout.ending!r}; known: {", ".join(ENDINGS)}'
  if rollout.stop_reason not in STOP_REASONS:
    return f'unknown stop_reason {rollout.stop_reason!r}; known: {", ".join(STOP_REASONS)}'
  if (rollout.ending == 'terminated') != (rollout.stop_reason == 'answer'):
    return f'ending {rollout.ending!r} does not go with stop_reason {rollout.stop_reason!r}'
  if rollout.prompt_id < 0 or rollout.attempt < 0:
    return f'prompt_id {rollout.prompt_id} and attempt {rollout.attempt} must not be negative'
  for name, value in rollout.metrics.items():
    if not isinstance(value, (numbers.Real, np.bool_)) or not np.isfinite(value):
      return f'metric {name!r} is not a finite number: {value!r}'
  return ''


def _wrong_values(rollout: Rollout, oldest: int, newest: int, vocab_size: int) -> str:
  mask = rollout.action_mask
  if mask[0]:
    return 'the first token is an action, but nothing comes before it'
  outside = (rollout.tokens < 0) | (rollout.tokens >= vocab_size)
  if outside.any():
    return f'token {rollout.tokens[outside][0]} is outside the vocabulary of {vocab_size}'
  log_prob, version, reward = rollout.behaviour_log_prob, rollout.policy_version, rollout.reward
  if not np.isfinite(log_prob).all():
    return 'a log-probability is not finite'
  if (log_prob > LOG_PROB_TOLERANCE).any():
    return f'log-probability {log_prob.max()} is above 0'
  if (log_prob[~mask] != 0).any():
    return 'a log-probability off the action tokens is not 0'
  if (version[~mask] != -1).any():
    return 'a version off the action tokens is not -1'
  if version[mask].max() > newest:
    return f'version {version[mask].max()} is from the future; the newest is {newest}'
  if version[mask].min() < oldest:
    return f'version {version[mask].min()} is older than {oldest}, the oldest that its ticket was reported to draw with'
  if not np.isfinite(reward).all():
    return 'a reward is not finite'
  if (reward[~mask] != 0).any():
    return 'a reward off the action tokens is not 0'
  if rollout.turn[0] < 0 or (np.diff(rollout.turn) < 0).any():
    return 'turns must start at 0 or later and never go back'
  return ''
