"""Advantages and returns of action tokens, and where rewards sit.

Recursions run over action tokens only. Everything between two actions (a tool's output) is passed over: it takes no discount, and
the successor of the last token of one action is the first token of the next.

    tokens   prompt  a0  a1  obs  obs  a2  a3  pad
    mask          0   1   1    0    0   1   1    0
    successor         a1  a2             a3  end        (value 0 if the trajectory terminated, else the bootstrap value)

A rollout of several segments has a row for each, one after the other, and `follows` says which rows continue the one before. Such a chain
is treated as if its action tokens stood in one row: the successor of the last action of a row is the first action of the next.

    row 0  p a0 a1     follows 0          a1's successor is a2; the end of the chain is that of row 1, and so is its bootstrap value
    row 1  p p  a2 .   follows 1
    row 2  p b0 b1 b2  follows 0          another rollout

Every estimator in `ADVANTAGES` has the signature of `skip_observation_gae`.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from sao_jax.masking import masked_mean


def skip_observation_gae(
    reward: jax.Array, value: jax.Array, bootstrap_value: jax.Array, action_mask: jax.Array,
    *, gamma: float, gae_lambda: jax.Array | float, follows: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Generalised advantage estimates over action tokens, and the matching returns.

  With k counting the action tokens of a row (of a chain of rows), and V after the last one equal to `bootstrap_value`,
      delta_k = r_k + gamma * V_{k+1} - V_k,    A_k = delta_k + gamma * gae_lambda * A_{k+1}.

  Args:
    reward: f32[B, T]; on action tokens. Values elsewhere are ignored, NaN included, here and below.
    value: f32[B, T]; value[t] is the value of the state before tokens[t].
    bootstrap_value: f32[B]; value after the last token of a truncated row, 0 where the trajectory terminated. Of a chain that of its last
      row counts.
    action_mask: bool[B, T].
    gamma: discount of one action token, in [0, 1].
    gae_lambda: scalar or f32[B], in [0, 1].
    follows: bool[B], True where a row continues the one before; None where none does.

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
  acts = jnp.any(action_mask, axis=1)
  end_value = jnp.where(acts if follows is None else acts | follows, bootstrap_value, 0.0)
  if follows is not None:
    end_value = _next_row_value(value, end_value, action_mask, follows)
  next_value = _next_action_value(value, end_value, action_mask)
  delta = jnp.where(action_mask, reward + gamma * next_value - value, 0.0)
  gae_lambda = jnp.broadcast_to(jnp.asarray(gae_lambda, jnp.float32), bootstrap_value.shape)
  advantage = _discounted_sum(delta, gamma * gae_lambda, action_mask, follows)
  return jnp.where(action_mask, advantage, 0.0), jnp.where(action_mask, advantage + value, 0.0)


def reinforce_batch_centred(
    reward: jax.Array, value: jax.Array, bootstrap_value: jax.Array, action_mask: jax.Array,
    *, gamma: float, gae_lambda: jax.Array | float, follows: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Reward-to-go of each action token minus the mean return of the batch; needs no value model and keeps no state.

      G_k = r_k + gamma * G_{k+1},    A_k = G_k - mean over rollouts with an action of G_0

  Each rollout (row, or chain of rows) counts once in the mean, however many tokens, turns or segments it has.

  Args:
    reward, action_mask, gamma, follows: as in `skip_observation_gae`.
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
  to_go = _discounted_sum(reward, jnp.full((reward.shape[0],), gamma, jnp.float32), action_mask, follows)
  baseline = masked_mean(to_go[:, 0], rollouts(action_mask, follows))  # Position 0 has passed over everything before the first action.
  return jnp.where(action_mask, to_go - baseline, 0.0), jnp.where(action_mask, to_go, 0.0)


def length_adaptive_lambda(action_mask: jax.Array, *, alpha: float, follows: jax.Array | None = None) -> jax.Array:
  """lambda = max(0, 1 - 1 / (alpha * l)), f32[B], with l the number of action tokens of the rollout; 0 for one without any.

  Args:
    action_mask: bool[B, T].
    alpha: positive; 1.5 in the paper.
    follows: as in `skip_observation_gae`.

  Source: SAO, arXiv:2607.07508, section on the value model; that l counts action tokens and not all tokens is our reading.
  """
  length = num_actions(action_mask, follows)
  return jnp.where(length > 0, jnp.maximum(0.0, 1.0 - 1.0 / (alpha * jnp.maximum(length, 1.0))), 0.0)


def num_actions(action_mask: jax.Array, follows: jax.Array | None = None) -> jax.Array:
  """f32[B]: action tokens of the rollout that each row of `action_mask` bool[B, T] belongs to."""
  count = jnp.sum(action_mask, axis=1, dtype=jnp.float32)
  if follows is None:
    return count
  chain = jnp.cumsum(~_continues(follows), dtype=jnp.int32) - 1
  return jax.ops.segment_sum(count, chain, num_segments=len(count))[chain]


def rollouts(action_mask: jax.Array, follows: jax.Array | None = None) -> jax.Array:
  """bool[B]: the first row of each rollout that has an action, so that summing over these counts every rollout once."""
  some = num_actions(action_mask, follows) > 0
  return some if follows is None else some & ~_continues(follows)


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


def _continues(follows: jax.Array) -> jax.Array:
  """`follows`, and False for the first row, which has none before it."""
  chex.assert_rank(follows, 1)
  chex.assert_type(follows, bool)
  return jnp.concatenate([jnp.zeros((1,), bool), follows[1:]])


def _from_next_row(own: jax.Array, factor: jax.Array, follows: jax.Array, end: jax.Array) -> jax.Array:
  """f32[B]: what a recursion over rows brings to the end of each row, from the row after it: S_b = own_b + factor_b * S_{b+1} along a
  chain, and `end` of its last row there. In logarithmic depth; what is not of a chain cannot matter to it, NaN included."""
  goes_on = jnp.concatenate([_continues(follows)[1:], jnp.zeros((1,), bool)])

  def combine(later, earlier):
    open_ = earlier[2]
    total = earlier[1] + jnp.where(open_, earlier[0] * later[1], 0.0)
    return jnp.where(open_, earlier[0] * later[0], 0.0), total, open_ & later[2]

  last = jnp.where(goes_on, own, own + factor * end)
  starts = jax.lax.associative_scan(combine, (factor, last, goes_on), reverse=True)[1]
  return jnp.where(goes_on, jnp.roll(starts, -1), end)


def _next_row_value(value: jax.Array, end_value: jax.Array, action_mask: jax.Array, follows: jax.Array) -> jax.Array:
  """f32[B]: value of the first action after each row of a chain, the end value of its last row where there is none."""
  first = jnp.take_along_axis(value, jnp.argmax(action_mask, axis=1)[:, None], axis=1)[:, 0]
  acts = jnp.any(action_mask, axis=1)
  return _from_next_row(jnp.where(acts, first, 0.0), jnp.where(acts, 0.0, 1.0), follows, end_value)


def _discounted_sum(x: jax.Array, discount: jax.Array, action_mask: jax.Array, follows: jax.Array | None) -> jax.Array:
  """S_t = x_t + discount * S_{t+1} on actions, S_t = S_{t+1} elsewhere (x must be 0 there); discount f32[B], in logarithmic depth.

  Along a chain of rows the recursion within a row is affine in what comes after it: S_t = own_t + factor_t * S_end. A second scan, over
  rows alone, gives S_end.
  """
  factor = jnp.where(action_mask, discount[:, None], 1.0)

  def combine(later, earlier):
    return later[0] * earlier[0], earlier[1] + earlier[0] * later[1]

  factor, own = jax.lax.associative_scan(combine, (factor, x), reverse=True, axis=1)
  if follows is None:
    return own
  end = _from_next_row(own[:, 0], factor[:, 0], follows, jnp.zeros_like(discount))
  return own + factor * end[:, None]


ADVANTAGES = {
    'skip_observation_gae': skip_observation_gae,
    'reinforce_batch_centred': reinforce_batch_centred,
}
