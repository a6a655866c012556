"""Advantages and returns of action tokens, and where rewards sit.

Recursions run over action tokens only. Everything between two actions (a tool's output) is passed over: it takes no discount, and
the successor of the last token of one action is the first token of the next.

    tokens   prompt  a0  a1  obs  obs  a2  a3  pad
    mask          0   1   1    0    0   1   1    0
    successor         a1  a2             a3  end        (value 0 if the trajectory terminated, else the bootstrap value)

Every estimator in `ADVANTAGES` has the signature of `skip_observation_gae`.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from sao_jax.masking import masked_mean


def skip_observation_gae(
    reward: jax.Array, value: jax.Array, bootstrap_value: jax.Array, action_mask: jax.Array,
    *, gamma: float, gae_lambda: jax.Array | float,
) -> tuple[jax.Array, jax.Array]:
  """Generalised advantage estimates over action tokens, and the matching returns.

  With k counting the action tokens of a row, and V after the last one equal to `bootstrap_value`,
      delta_k = r_k + gamma * V_{k+1} - V_k,    A_k = delta_k + gamma * gae_lambda * A_{k+1}.

  Args:
    reward: f32[B, T]; on action tokens. Values elsewhere are ignored, NaN included, here and below.
    value: f32[B, T]; value[t] is the value of the state before tokens[t].
    bootstrap_value: f32[B]; value after the last token of a truncated row, 0 where the trajectory terminated.
    action_mask: bool[B, T].
    gamma: discount of one action token, in [0, 1].
    gae_lambda: scalar or f32[B], in [0, 1].

  Returns:
    advantage f32[B, T] and target f32[B, T] = advantage + value on actions, the return at this lambda (with lambda 1: the discounted
    rest of the rewards plus the discounted bootstrap value). Both are 0 off the actions.

  Source: SAO, arXiv:2607.07508, equations 4-5; the bootstrap of truncated rows is our choice, the paper leaves it open.
  """
  chex.assert_rank([reward, value, action_mask], 2)
  chex.assert_equal_shape([reward, value, action_mask])
  chex.assert_shape(bootstrap_value, (reward.shape[0],))
  chex.assert_type([reward, value, bootstrap_value, action_mask], [jnp.float32] * 3 + [bool])
  reward, value = jnp.where(action_mask, reward, 0.0), jnp.where(action_mask, value, 0.0)
  bootstrap_value = jnp.where(jnp.any(action_mask, axis=1), bootstrap_value, 0.0)
  next_value = _next_action_value(value, bootstrap_value, action_mask)
  delta = jnp.where(action_mask, reward + gamma * next_value - value, 0.0)
  gae_lambda = jnp.broadcast_to(jnp.asarray(gae_lambda, jnp.float32), bootstrap_value.shape)
  advantage = _discounted_sum(delta, gamma * gae_lambda, action_mask)
  return jnp.where(action_mask, advantage, 0.0), jnp.where(action_mask, advantage + value, 0.0)


def reinforce_batch_centred(
    reward: jax.Array, value: jax.Array, bootstrap_value: jax.Array, action_mask: jax.Array,
    *, gamma: float, gae_lambda: jax.Array | float,
) -> tuple[jax.Array, jax.Array]:
  """Reward-to-go of each action token minus the mean return of the batch; needs no value model and keeps no state.

      G_k = r_k + gamma * G_{k+1},    A_k = G_k - mean over rows with an action of G_0

  Each row counts once in the mean, however many tokens or turns it has.

  Args:
    reward, action_mask, gamma: as in `skip_observation_gae`.
    value, bootstrap_value, gae_lambda: not used; a truncated row has the rewards that it really got.

  Returns:
    advantage f32[B, T] and target f32[B, T] = G; both 0 off the actions.

  Source: REINFORCE with a batch-mean baseline (Williams 1992).
  """
  del value, bootstrap_value, gae_lambda
  chex.assert_rank([reward, action_mask], 2)
  chex.assert_equal_shape([reward, action_mask])
  chex.assert_type([reward, action_mask], [jnp.float32, bool])
  reward = jnp.where(action_mask, reward, 0.0)
  to_go = _discounted_sum(reward, jnp.full((reward.shape[0],), gamma, jnp.float32), action_mask)
  baseline = masked_mean(to_go[:, 0], jnp.any(action_mask, axis=1))  # Position 0 has passed over everything before the first action.
  return jnp.where(action_mask, to_go - baseline, 0.0), jnp.where(action_mask, to_go, 0.0)


def length_adaptive_lambda(action_mask: jax.Array, *, alpha: float) -> jax.Array:
  """lambda = max(0, 1 - 1 / (alpha * l)), f32[B], with l the number of action tokens of the row; 0 for a row without any.

  Args:
    action_mask: bool[B, T].
    alpha: positive; 1.5 in the paper.

  Source: SAO, arXiv:2607.07508, section on the value model; that l counts action tokens and not all tokens is our reading.
  """
  length = jnp.sum(action_mask, axis=1, dtype=jnp.float32)
  return jnp.where(length > 0, jnp.maximum(0.0, 1.0 - 1.0 / (alpha * jnp.maximum(length, 1.0))), 0.0)


def place_outcome_reward(outcome: jax.Array, action_mask: jax.Array) -> jax.Array:
  """reward f32[B, T]: the outcome f32[B] of each row on its last action token, 0 elsewhere and in rows without an action."""
  chex.assert_rank([outcome, action_mask], [1, 2])
  later = jnp.cumsum(action_mask[:, ::-1], axis=1)[:, ::-1]  # i32[B, T]: actions from here on.
  return jnp.where(action_mask & (later == 1), outcome[:, None], 0.0).astype(jnp.float32)


def _next_action_value(value: jax.Array, bootstrap_value: jax.Array, action_mask: jax.Array) -> jax.Array:
  """f32[B, T]: value of the first action token after each position, the bootstrap value where there is none."""
  length = action_mask.shape[1]
  index = jnp.where(action_mask, jnp.arange(length), length)
  following = jax.lax.cummin(index, axis=1, reverse=True)  # First action at or after the position.
  following = jnp.concatenate([following[:, 1:], jnp.full_like(following[:, :1], length)], axis=1)
  padded = jnp.concatenate([value, bootstrap_value[:, None]], axis=1)
  return jnp.take_along_axis(padded, following, axis=1)


def _discounted_sum(x: jax.Array, discount: jax.Array, action_mask: jax.Array) -> jax.Array:
  """S_t = x_t + discount * S_{t+1} on actions, S_t = S_{t+1} elsewhere (x must be 0 there); discount f32[B], in logarithmic depth."""
  factor = jnp.where(action_mask, discount[:, None], 1.0)

  def combine(later, earlier):
    return later[0] * earlier[0], earlier[1] + earlier[0] * later[1]

  return jax.lax.associative_scan(combine, (factor, x), reverse=True, axis=1)[1]


ADVANTAGES = {
    'skip_observation_gae': skip_observation_gae,
    'reinforce_batch_centred': reinforce_batch_centred,
}
