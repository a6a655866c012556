"""Loss of the value model, and how much of the returns it explains."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from sao_jax.masking import masked_stat, masked_variance
from sao_jax.types import Stat


def squared_error_value_loss(value: jax.Array, target: jax.Array, action_mask: jax.Array) -> dict[str, Stat]:
  """Squared error of the values to their returns, totalled over action tokens.

  Each action token adds (value - target)^2: no factor 1/2, no clipping. With targets at lambda 1 its mean is the mean squared error
  to the discounted rest of the rewards.

  Args:
    value: f32[B, T]; carries the gradient.
    target: f32[B, T]; no gradient flows through it.
    action_mask: bool[B, T]. Values elsewhere are ignored, NaN included.

  Returns:
    `Stat` 'loss'; total and count are 0 with no action token.

  Source: SAO, arXiv:2607.07508, value model with lambda_critic = 1.
  """
  chex.assert_rank([value, target, action_mask], 2)
  chex.assert_equal_shape([value, target, action_mask])
  chex.assert_type([value, target, action_mask], [jnp.float32, jnp.float32, bool])
  error = jnp.where(action_mask, value, 0.0) - jax.lax.stop_gradient(jnp.where(action_mask, target, 0.0))
  return {'loss': masked_stat(jnp.square(error), action_mask)}


def explained_variance(value: jax.Array, target: jax.Array, action_mask: jax.Array) -> jax.Array:
  """1 - Var(target - value) / Var(target) over action tokens, f32[]; at most 1, and 0 for a value that is constant.

  It is undefined where the targets do not vary or no token is an action; the result is then 0, and the learner's metric has count 0,
  so that nothing is logged.

  Args:
    value, target: f32[B, T].
    action_mask: bool[B, T]. Values elsewhere are ignored, NaN included.
  """
  chex.assert_equal_shape([value, target, action_mask])
  value, target = jnp.where(action_mask, value, 0.0), jnp.where(action_mask, target, 0.0)
  variance = masked_variance(target, action_mask)
  residual = masked_variance(target - value, action_mask)
  return jnp.where(variance > 0, 1.0 - residual / jnp.where(variance > 0, variance, 1.0), 0.0)
