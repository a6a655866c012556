"""Log-probabilities of tokens, and the gradient of a loss on them, without logits of all positions at once.

A policy loss is a sum over tokens of functions of one log-probability each. So the loss, its derivative by each log-probability, and from
it the gradients by hidden states and unembedding are all known while the logits of a chunk exist:

    for each chunk of C selected positions:
      logits [C, V] = hidden @ unembedding / temperature           (1 product)
      log_prob, entropy, and d loss / d log_prob = objective'(log_prob)
      d logits = (one_hot(token) - softmax) * d log_prob           (in place of the logits)
      d hidden, and the sum of d unembedding                       (2 products)

Three products instead of the four of recomputation, and memory for C positions. Only selected positions (actions) are visited: they are
moved to the front, and the loop ends where they end. On a mesh every batch shard (group) does this on its own rows; each keeps its own sum
of d unembedding, and these are added over the mesh once, at the end.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Callable

import jax
import jax.numpy as jnp

from sao_jax.types import Stat

CHUNK_BYTES = 1 << 26

Shard = Callable[[jax.Array, tuple[str | None, ...]], jax.Array]
# objective(log_prob f32[G, C], *inputs [G, C], mask bool[G, C]) -> dict of Stat with 'loss'
Objective = Callable[..., dict[str, Stat]]


@dataclasses.dataclass(frozen=True)
class Head:
  """How hidden states become log-probabilities.

  Attributes:
    unembed: (hidden [..., D], weight) -> logits f32[..., V]; linear in both.
    temperature: logits are divided by it; positive.
    chunk: positions of one group whose logits exist at once.
    groups: number of batch shards; each works on its own rows.
    shard: constrains an activation by logical axes.
  """

  unembed: Callable[[jax.Array, jax.Array], jax.Array]
  temperature: float
  chunk: int
  groups: int
  shard: Shard


def chunk_for(vocab_size: int) -> int:
  """Positions whose float32 logits take at most 64 MB, rounded to 128; at least 128, at most 1024."""
  return min(1024, max(1, CHUNK_BYTES // (4 * vocab_size * 128)) * 128)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenTerms:
  """What the loop over chunks leaves.

  Attributes:
    log_prob: f32[B, T], position t given tokens[:t]; 0 where the mask is False.
    entropy: f32[B, T] in nats, of the distribution that tokens[t] was drawn from; 0 where the mask is False.
    stats: of the objective, over the whole call.
    hidden_gradient: [B, T, D] of the loss total, or None.
    weight_gradient: f32, shape of the weight, of the loss total, or None.
  """

  log_prob: jax.Array
  entropy: jax.Array
  stats: dict[str, Stat]
  hidden_gradient: jax.Array | None
  weight_gradient: jax.Array | None


def token_terms(
    head: Head, hidden: jax.Array, weight: jax.Array, tokens: jax.Array, mask: jax.Array,
    objective: Objective, inputs: tuple[jax.Array, ...], *, with_gradient: bool,
) -> TokenTerms:
  """Log-probabilities, entropies, the objective and its gradients.

  Args:
    head: how hidden states become log-probabilities.
    hidden: [B, T, D]; hidden[t] predicts tokens[t + 1].
    weight: the unembedding, in the shape that `head.unembed` takes.
    tokens: i32[B, T].
    mask: bool[B, T], the tokens that count; a token at position 0 is predicted by nothing and is left out.
    objective: see `Objective`; a sum over tokens of functions of one log-probability each.
    inputs: [B, T] each, passed to the objective.
    with_gradient: whether to compute the gradients.

  Returns:
    `TokenTerms`; everything is 0 if no token counts.
  """
  b, t, d = hidden.shape
  groups, size = head.groups, b // head.groups * t
  chunk = min(head.chunk, size)
  padded = math.ceil(size / chunk) * chunk

  def gather(x: jax.Array, order: jax.Array) -> jax.Array:
    return jax.vmap(lambda rows, index: jnp.take(rows, index, axis=0))(x, order)

  def to_groups(x: jax.Array) -> jax.Array:  # [B, T, ...] -> [G, N, ...]
    x = x.reshape((groups, size) + x.shape[2:])
    return head.shard(jnp.pad(x, [(0, 0), (0, padded - size)] + [(0, 0)] * (x.ndim - 2)), ('batch',) + (None,) * (x.ndim - 1))

  def of_next(x: jax.Array) -> jax.Array:  # Column t holds what belongs to tokens[t + 1].
    return jnp.concatenate([x[:, 1:], jnp.zeros_like(x[:, :1])], axis=1)

  selected = to_groups(of_next(mask))
  order = jnp.argsort(~selected, axis=1, stable=True)  # Selected positions first, in their order.
  columns = tuple(gather(to_groups(x), order) for x in (hidden, *(of_next(x) for x in (tokens, mask, *inputs))))
  num_chunks = (jnp.max(jnp.sum(selected, axis=1, dtype=jnp.int32)) + chunk - 1) // chunk
  log_prob, entropy, stats, hidden_gradient, weight_gradient = _loop(
      head, columns, weight, objective, num_chunks, chunk, with_gradient=with_gradient)

  back = jnp.argsort(order, axis=1)

  def from_groups(x: jax.Array) -> jax.Array:  # [G, N, ...] -> [B, T, ...]
    return gather(x, back)[:, :size].reshape((b, t) + x.shape[2:])

  def of_this(x: jax.Array) -> jax.Array:  # Undoes of_next.
    return jnp.concatenate([jnp.zeros_like(x[:, :1]), x[:, :-1]], axis=1)

  return TokenTerms(
      log_prob=of_this(from_groups(log_prob)), entropy=of_this(from_groups(entropy)), stats=stats,
      hidden_gradient=from_groups(hidden_gradient) if with_gradient else None,
      weight_gradient=jnp.sum(weight_gradient, axis=0) if with_gradient else None)


def _loop(
    head: Head, columns: tuple[jax.Array, ...], weight: jax.Array, objective: Objective, num_chunks: jax.Array, chunk: int,
    *, with_gradient: bool,
) -> tuple[Any, ...]:
  """Runs `_chunk_terms` over `num_chunks` chunks (a traced number) of the columns (hidden, tokens, mask, *inputs), each [G, N, ...]."""
  hidden = columns[0]
  groups, length = hidden.shape[:2]

  def take(i: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(jax.lax.dynamic_slice_in_dim(x, i * chunk, chunk, axis=1) for x in columns)

  def put(x: jax.Array, part: jax.Array, i: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(x, part.astype(x.dtype), i * chunk, axis=1)

  def step(i: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
    log_prob, entropy, stats, hidden_gradient, weight_gradient = carry
    terms = _chunk_terms(head, *take(i), weight=weight, objective=objective, with_gradient=with_gradient)
    stats = jax.tree.map(jnp.add, stats, terms[2])
    log_prob, entropy = put(log_prob, terms[0], i), put(entropy, terms[1], i)
    if with_gradient:
      hidden_gradient = put(hidden_gradient, terms[3], i)
      weight_gradient = weight_gradient + terms[4].astype(jnp.float32)
    return log_prob, entropy, stats, hidden_gradient, weight_gradient

  shapes = jax.eval_shape(lambda: _chunk_terms(head, *take(0), weight=weight, objective=objective, with_gradient=with_gradient))
  zeros = jnp.zeros((groups, length), jnp.float32)
  carry = (
      zeros, zeros, jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes[2]),
      jnp.zeros_like(hidden) if with_gradient else None,
      jnp.zeros((groups,) + weight.shape, jnp.float32) if with_gradient else None)
  return jax.lax.fori_loop(0, num_chunks, step, carry)


def _chunk_terms(
    head: Head, hidden: jax.Array, tokens: jax.Array, mask: jax.Array, *inputs: jax.Array,
    weight: jax.Array, objective: Objective, with_gradient: bool,
) -> tuple[Any, ...]:
  """(log_prob, entropy, stats, d hidden, d weight of each group) of one chunk; [G, C, ...]."""
  hidden = jnp.where(mask[..., None], hidden, 0)  # A NaN that no token depends on must reach neither sum.
  logits = head.unembed(hidden, weight) * (1.0 / head.temperature)
  logits = head.shard(logits, ('batch', None, 'vocab'))
  shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
  exp = jnp.exp(shifted)
  normaliser = jnp.sum(exp, axis=-1)
  log_normaliser = jnp.log(normaliser)
  chosen = jnp.take_along_axis(shifted, tokens[..., None], axis=-1)[..., 0]
  log_prob = jnp.where(mask, chosen - log_normaliser, 0.0)
  weighted = jnp.einsum('gcv,gcv->gc', exp, shifted)  # As a product: XLA's sum of exp * shifted is 35 times slower on the CPU.
  entropy = jnp.where(mask, log_normaliser - weighted / normaliser, 0.0)

  def total(log_prob: jax.Array) -> tuple[jax.Array, dict[str, Stat]]:
    stats = objective(log_prob, *inputs, mask)
    return stats['loss'].total, stats

  if not with_gradient:
    return log_prob, entropy, total(log_prob)[1], None, None
  log_prob_gradient, stats = jax.grad(total, has_aux=True)(log_prob)
  log_prob_gradient = log_prob_gradient * (1.0 / head.temperature)
  is_token = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2) == tokens[..., None]
  scale = log_prob_gradient / normaliser
  logits_gradient = jnp.where(is_token, log_prob_gradient[..., None], 0.0) - exp * scale[..., None]

  def group_gradient(hidden: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jax.vjp(head.unembed, hidden, weight)[1](gradient)

  hidden_gradient, weight_gradient = jax.vmap(group_gradient)(hidden, logits_gradient)
  return log_prob, entropy, stats, hidden_gradient, weight_gradient
