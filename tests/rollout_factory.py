"""Rollouts for tests: valid by construction, any field replaceable."""

import dataclasses

import numpy as np

from sao_jax.types import Rollout


def make_rollout(*, ticket=0, version=0, length=6, prompt=2, seed=0, outcome=1.0, prompt_id=None, **fields) -> Rollout:
  """A rollout of `length` tokens: `prompt` prompt tokens, actions of `version` (an int or one per action), one observation token."""
  rng = np.random.default_rng(seed)
  mask = np.arange(length) >= prompt
  turn = np.zeros(length, np.int32)
  if length - prompt >= 3:
    mask[prompt + 1] = False  # action, observation, action...
    turn[prompt + 1:] = 1
  versions = np.full(length, -1, np.int32)
  versions[mask] = version
  log_prob = np.where(mask, -rng.exponential(size=length), 0.0).astype(np.float32)
  rewards = np.zeros(length, np.float32)
  rewards[np.flatnonzero(mask)[-1]] = outcome
  values = dict(
      tokens=rng.integers(0, 256, length).astype(np.int32), action_mask=mask, behaviour_log_prob=log_prob, policy_version=versions,
      reward=rewards, turn=turn, ending='terminated', stop_reason='answer', prompt_id=ticket if prompt_id is None else prompt_id,
      attempt=0, environment='scripted', metrics={'success': float(outcome > 0)}, ticket=ticket,
  )
  return dataclasses.replace(Rollout(**values), **fields)
