"""Policy objectives, as losses to be minimised, totalled over action tokens.

Every objective in `OBJECTIVES` has the signature of `dis_policy_loss`, is a sum of terms of single tokens, and scales with the
advantage: f(c * advantage) = c * f(advantage) for c > 0. The learner relies on all three: it evaluates an objective chunk by chunk,
and weights tokens by scaling their advantage.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from sao_jax.masking import masked_stat, masked_sum
from sao_jax.types import Stat

MAX_LOG_RATIO = 20.0  # exp of it is 5e8: far outside any band, far from overflow.


def _log_ratio(log_prob: jax.Array, behaviour_log_prob: jax.Array, action_mask: jax.Array) -> jax.Array:
  """log_prob - behaviour_log_prob on actions, 0 elsewhere; made safe before any exp sees it. A NaN on an action stays a NaN."""
  difference = jnp.where(action_mask, log_prob, 0.0) - jnp.where(action_mask, behaviour_log_prob, 0.0)
  return jnp.minimum(difference, MAX_LOG_RATIO)


def _check(log_prob: jax.Array, behaviour_log_prob: jax.Array, advantage: jax.Array, action_mask: jax.Array) -> None:
  floats = [log_prob, behaviour_log_prob, advantage]
  chex.assert_rank(floats + [action_mask], 2)
  chex.assert_equal_shape(floats + [action_mask])
  chex.assert_type(floats + [action_mask], [jnp.float32] * 3 + [bool])


def dis_policy_loss(
    log_prob: jax.Array, behaviour_log_prob: jax.Array, advantage: jax.Array, action_mask: jax.Array,
    *, epsilon_low: float, epsilon_high: float,
) -> dict[str, Stat]:
  """Direct double-sided importance sampling, totalled over action tokens.

  With r = exp(log_prob - behaviour_log_prob), each action token adds
      -f(r) * A * log_prob,    f(r) = r if 1 - epsilon_low < r < 1 + epsilon_high, else 0.
  Both bounds are strict and hold whatever the sign of A. A token outside the band gives no loss and no gradient, but is counted.

  Args:
    log_prob: f32[B, T] in nats, under the parameters being trained; carries the gradient, f(r) does not.
    behaviour_log_prob: f32[B, T] in nats, recorded by the sampler.
    advantage: f32[B, T]; no gradient flows through it.
    action_mask: bool[B, T]. Values elsewhere are ignored, NaN included.
    epsilon_low: how far the ratio may fall below 1; at least 0.
    epsilon_high: how far the ratio may rise above 1; at least 0.

  Returns:
    `Stat`s over action tokens: 'loss', and the numbers of tokens in the band ('kept_fraction'), 'above' and 'below' it; the three
    add up to the count. With no action token all totals and counts are 0.

  Source: SAO, arXiv:2607.07508, equations 1-3. Our choice, where the paper is silent: f(r) is a stopped weight.
  """
  _check(log_prob, behaviour_log_prob, advantage, action_mask)
  ratio = jax.lax.stop_gradient(jnp.exp(_log_ratio(log_prob, behaviour_log_prob, action_mask)))
  above = action_mask & (ratio >= 1.0 + epsilon_high)
  below = action_mask & ~above & (ratio <= 1.0 - epsilon_low)
  kept = action_mask & ~above & ~below  # A NaN is neither above nor below: it must show in the loss.
  weight = jax.lax.stop_gradient(jnp.where(kept, ratio, 0.0) * jnp.where(kept, advantage, 0.0))
  loss = -weight * jnp.where(kept, log_prob, 0.0)
  return _stats(loss, kept, above, below, action_mask)


def ppo_clip_policy_loss(
    log_prob: jax.Array, behaviour_log_prob: jax.Array, advantage: jax.Array, action_mask: jax.Array,
    *, epsilon_low: float, epsilon_high: float,
) -> dict[str, Stat]:
  """PPO's clipped surrogate on the sampler's log-probabilities, totalled over action tokens.

  With r = exp(log_prob - behaviour_log_prob), each action token adds
      -min(r * A, clip(r, 1 - epsilon_low, 1 + epsilon_high) * A).
  The log-ratio is bounded at 20 before exp, so that nothing overflows; beyond it the gradient is 0.

  Args: as in `dis_policy_loss`; the gradient flows through r.

  Returns:
    `Stat`s over action tokens: 'loss', and the numbers of tokens whose gradient is kept ('kept_fraction') or clipped because the
    ratio is too high with A > 0 ('above') or too low with A < 0 ('below'). With no action token all totals and counts are 0.

  Source: Schulman et al. 2017, arXiv:1707.06347, equation 7, with separate bounds (VAPO and DAPO: 0.2 / 0.28).
  """
  _check(log_prob, behaviour_log_prob, advantage, action_mask)
  ratio = jnp.exp(_log_ratio(log_prob, behaviour_log_prob, action_mask))
  advantage = jax.lax.stop_gradient(jnp.where(action_mask, advantage, 0.0))
  clipped = jnp.clip(ratio, 1.0 - epsilon_low, 1.0 + epsilon_high)
  loss = -jnp.minimum(ratio * advantage, clipped * advantage)
  above = action_mask & (ratio > 1.0 + epsilon_high) & (advantage > 0)
  below = action_mask & (ratio < 1.0 - epsilon_low) & (advantage < 0)
  return _stats(loss, action_mask & ~above & ~below, above, below, action_mask)


def supervised_loss(log_prob: jax.Array, action_mask: jax.Array) -> dict[str, Stat]:
  """'loss': negative log-likelihood of the action tokens, f32[B, T] and bool[B, T] in, one `Stat` out; NaN elsewhere cannot matter."""
  return {'loss': masked_stat(-jnp.where(action_mask, log_prob, 0.0), action_mask)}


def _stats(loss: jax.Array, kept: jax.Array, above: jax.Array, below: jax.Array, action_mask: jax.Array) -> dict[str, Stat]:
  count = jnp.sum(action_mask, dtype=jnp.float32)
  return {
      'loss': Stat(masked_sum(loss, action_mask), count),
      'kept_fraction': Stat(jnp.sum(kept, dtype=jnp.float32), count),
      'above': Stat(jnp.sum(above, dtype=jnp.float32), count),
      'below': Stat(jnp.sum(below, dtype=jnp.float32), count),
  }


OBJECTIVES = {
    'dis': dis_policy_loss,
    'ppo_clip': ppo_clip_policy_loss,
}
