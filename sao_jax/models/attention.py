"""Causal attention over whole rows, for the learner: dense scores, or blocks with memory linear in length.

Both take q [B, T, H, d], k [B, T, K, d] and v [B, T, K, e] with H a multiple of K: query head h reads key head h // (H // K). Rows are
padded on the right, so a real token comes before all padding and never sees any. Scores and softmax are float32. The G = H // K query
heads of one key head are laid side by side with the positions, which makes every product a batch of [G*T, d] x [d, T], the shape that XLA
multiplies fastest.

With an `Index` each query sees only the keys that the index gives most, and `attend` also returns which: bool[B, T, T], T*T bytes a row.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Callable

import jax
import jax.numpy as jnp

from sao_jax.config import ModelConfig

# attend(q [B,T,H,d], k [B,T,K,d], v [B,T,K,e], state of one layer) -> (out [B,T,H,e], new state of that layer)
# attend(q, k, v, state, Index) -> (out, new state, which keys each query saw; None where it saw all before it)
Attend = Callable[..., Any]

MASKED = -1e30  # Score of a key that may not be seen: finite, so that no row gives NaN.
INDEX_BLOCK = 256  # Queries whose index scores exist at once.
INDEX_SCORES = 2**24  # Scores of single heads that may exist at once.


@dataclasses.dataclass(frozen=True)
class Index:
  """What decides which keys a query sees.

  Attributes:
    top_k: how many.
    query: [B, T, I, d], I small heads; None in a layer that takes `selected` from the layer before.
    weight: f32[B, T, I].
    key: [B, T, 1, d].
    selected: bool[B, T, S], or None for all keys.
  """

  top_k: int
  query: jax.Array | None = None
  weight: jax.Array | None = None
  key: jax.Array | None = None
  selected: jax.Array | None = None


def index_scores(query: jax.Array, weight: jax.Array, key: jax.Array) -> jax.Array:
  """f32[B, T, S]: sum over heads of weight * relu(query . key / sqrt(d)), of queries [B, T, I, d] and keys [B, S, d].

  Head by head where the scores of all heads would be many.
  """
  (b, t, heads, size), length = query.shape, key.shape[1]
  query, key = query.astype(jnp.float32), key.astype(jnp.float32)
  if b * t * heads * length <= INDEX_SCORES:
    scores = jnp.einsum('btid,bsd->btis', query, key) * (size**-0.5)
    return jnp.einsum('bti,btis->bts', weight, jax.nn.relu(scores))

  def add(total: jax.Array, head: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
    scores = jnp.einsum('btd,bsd->bts', head[0], key) * (size**-0.5)
    return total + head[1][..., None] * jax.nn.relu(scores), None

  heads_first = jnp.moveaxis(query, 2, 0), jnp.moveaxis(weight, 2, 0)
  return jax.lax.scan(add, jnp.zeros((b, t, length), jnp.float32), heads_first)[0]


def choose(scores: jax.Array, visible: jax.Array, top_k: int) -> jax.Array:
  """bool[..., S]: the `top_k` visible keys of largest score, fewer where fewer are visible; of equal scores the earlier keys."""
  scores = jnp.where(visible, scores, -jnp.inf)
  last = jax.lax.top_k(scores, top_k)[0][..., -1:]
  above, equal = scores > last, scores == last
  room = top_k - jnp.sum(above, axis=-1, keepdims=True, dtype=jnp.int32)
  return visible & (above | (equal & (jnp.cumsum(equal, axis=-1, dtype=jnp.int32) <= room)))


def select(index: Index) -> jax.Array | None:
  """Choice of each query among the keys up to its own position, bool[B, T, T]; None where rows are too short for one."""
  if index.query is None:
    return index.selected
  b, t = index.query.shape[:2]
  if t <= index.top_k:
    return None
  size = min(INDEX_BLOCK, t)
  count, key = -(-t // size), index.key[:, :, 0]

  def one(part: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
    query, weight, row = part
    return choose(index_scores(query, weight, key), row[:, None] >= jnp.arange(t), index.top_k)

  def split(x: jax.Array) -> jax.Array:  # [B, T, ...] -> [n, B, size, ...]
    x = jnp.pad(x, [(0, 0), (0, count * size - t)] + [(0, 0)] * (x.ndim - 2))
    return x.reshape((b, count, size) + x.shape[2:]).swapaxes(0, 1)

  rows = jnp.arange(count * size).reshape(count, size)
  chosen = jax.lax.map(one, (split(index.query), split(index.weight), rows))
  return chosen.swapaxes(0, 1).reshape(b, count * size, t)[:, :t]


def _answer(out: jax.Array, state: Any, index: Index | None, selected: jax.Array | None) -> Any:
  return (out, state) if index is None else (out, state, selected)


def make(config: ModelConfig) -> Attend:
  """The attention that `config.attention` names. Raises ValueError for an unknown one."""
  if config.attention == 'dense':
    return causal_attention
  if config.attention == 'blockwise':
    return functools.partial(blockwise_attention, block=config.attention_block)
  raise ValueError(f"model.attention must be 'dense' or 'blockwise', got {config.attention!r}.")


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array, state: Any = None, index: Index | None = None) -> Any:
  """Dense causal attention, [B, T, H, e]; memory B*H*T*T. `state` is handed back."""
  b, t, h, d = q.shape
  groups = k.shape[2]
  q = q.transpose(0, 2, 1, 3).reshape(b, groups, h // groups * t, d)
  k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)  # [B, K, T, ...]
  selected = None if index is None else jax.lax.stop_gradient(select(index))
  out = _dense(q, k, v, selected).reshape(b, h, t, v.shape[-1])
  return _answer(out.transpose(0, 2, 1, 3), state, index, selected)


@jax.custom_vjp
def _dense(q: jax.Array, k: jax.Array, v: jax.Array, selected: jax.Array | None) -> jax.Array:
  """Attention [B, K, G*T, e] of q [B, K, G*T, d] to k [B, K, T, d] and v [B, K, T, e].

  Each query sees `selected` bool[B, T, T], or all keys up to its own position. The gradient takes the sum over keys that softmax needs from
  the output, a T-th of the work.
  """
  return _dense_forward(q, k, v, selected)[0]


def _dense_forward(q: jax.Array, k: jax.Array, v: jax.Array, selected: jax.Array | None) -> tuple[jax.Array, Any]:
  (b, groups, rows, d), t = q.shape, k.shape[2]
  scores = jnp.matmul(q, k.swapaxes(2, 3), preferred_element_type=jnp.float32).reshape(b, groups, rows // t, t, t) * (d**-0.5)
  mask = jnp.arange(t)[:, None] >= jnp.arange(t)[None, :] if selected is None else selected[:, None, None]
  probs = jax.nn.softmax(jnp.where(mask, scores, MASKED), axis=-1).astype(v.dtype).reshape(b, groups, rows, t)
  out = jnp.matmul(probs, v)
  return out, (q, k, v, probs, out)


def _dense_backward(saved: Any, grad: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, None]:
  q, k, v, probs, out = saved
  delta = jnp.sum(grad.astype(jnp.float32) * out.astype(jnp.float32), axis=-1, keepdims=True)  # [B, K, G*T, 1]
  dprobs = jnp.matmul(grad, v.swapaxes(2, 3), preferred_element_type=jnp.float32)
  dscores = (probs * (dprobs - delta) * (q.shape[-1]**-0.5)).astype(q.dtype)
  return jnp.matmul(dscores, k), jnp.matmul(dscores.swapaxes(2, 3), q), jnp.matmul(probs.swapaxes(2, 3), grad), None


_dense.defvjp(_dense_forward, _dense_backward)


def blockwise_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, state: Any = None, index: Index | None = None, *, block: int
) -> Any:
  """The same result with an online softmax over blocks of keys: memory linear in T, forward and backward.

  Blocks of keys after the queries are skipped, not masked. The backward pass recomputes each block of scores from the saved logsumexp.

  Args:
    q, k, v: as in `causal_attention`.
    state: handed back.
    index: chooses keys, or None.
    block: positions in a block of queries and of keys; shorter rows use one block.

  Source: Dao et al. 2022, arXiv:2205.14135, algorithms 1 and 4, with the loops over blocks in XLA.
  """
  b, t, h, d = q.shape
  groups, size = k.shape[2], min(block, t)
  count = -(-t // size)
  pad = [(0, 0), (0, count * size - t), (0, 0), (0, 0)]
  q = jnp.pad(q, pad).reshape(b, count, size, groups, h // groups, d).transpose(1, 0, 3, 4, 2, 5).reshape(count, b, groups, -1, d)
  k, v = (jnp.pad(x, pad).reshape(b, count, size, groups, x.shape[-1]).transpose(1, 0, 3, 2, 4) for x in (k, v))
  selected, seen = None if index is None else jax.lax.stop_gradient(select(index)), None
  if selected is not None:
    seen = jnp.pad(selected, [(0, 0), (0, count * size - t), (0, count * size - t)])
    seen = seen.reshape(b, count, size, count, size).transpose(1, 3, 0, 2, 4)  # [n queries, n keys, B, S, S]
  out = _blocks(q, k, v, seen)  # [n, B, K, G*S, e]
  out = out.reshape(count, b, groups, h // groups, size, -1).transpose(1, 0, 4, 2, 3, 5).reshape(b, count * size, h, -1)
  return _answer(out[:, :t], state, index, selected)


def _scores(q: jax.Array, k: jax.Array, i: jax.Array, j: jax.Array, seen: jax.Array | None) -> jax.Array:
  """Masked scores f32[B, K, G*S, S] of query block i against key block j <= i; `seen` is bool[n, B, S, S] of query block i."""
  size = k.shape[-2]
  scores = jnp.einsum('bkqd,bksd->bkqs', q, k, preferred_element_type=jnp.float32) * (q.shape[-1]**-0.5)
  row = jnp.arange(q.shape[-2]) % size
  visible = (j < i) | (row[:, None] >= jnp.arange(size)[None, :])
  if seen is not None:
    visible = visible & jnp.tile(seen[j], (1, q.shape[-2] // size, 1))[:, None]
  return jnp.where(visible, scores, MASKED)


@jax.custom_vjp
def _blocks(q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array | None) -> jax.Array:
  """Attention of q [n, B, K, G*S, d] to k [n, B, K, S, d] and v [n, B, K, S, e], block by block; `seen` bool[n, n, B, S, S] or None."""
  return _forward(q, k, v, seen)[0]


def _forward(q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array | None) -> tuple[jax.Array, jax.Array]:
  """Output [n, B, K, G*S, e] and logsumexp of the scores f32[n, B, K, G*S]."""

  def one(i: jax.Array, query: jax.Array, seen: jax.Array | None) -> tuple[jax.Array, jax.Array]:

    def add(j: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
      top, total, out = carry
      scores = _scores(query, k[j], i, j, seen)
      new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
      weights, keep = jnp.exp(scores - new_top[..., None]), jnp.exp(top - new_top)
      part = jnp.einsum('bkqs,bksd->bkqd', weights.astype(v.dtype), v[j], preferred_element_type=jnp.float32)
      return new_top, total * keep + jnp.sum(weights, axis=-1), out * keep[..., None] + part

    rows = query.shape[:-1]
    start = jnp.full(rows, MASKED, jnp.float32), jnp.zeros(rows, jnp.float32), jnp.zeros((*rows, v.shape[-1]), jnp.float32)
    top, total, out = jax.lax.fori_loop(0, i + 1, add, start)
    return (out / total[..., None]).astype(query.dtype), top + jnp.log(total)

  return jax.lax.scan(lambda i, part: (i + 1, one(i, *part)), jnp.int32(0), (q, seen))[1]


def _forward_and_save(q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array | None) -> tuple[jax.Array, Any]:
  out, logsumexp = _forward(q, k, v, seen)
  return out, (q, k, v, seen, out, logsumexp)


def _backward(saved: Any, grad: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, None]:
  q, k, v, seen, out, logsumexp = saved
  scale = q.shape[-1]**-0.5
  delta = jnp.sum(grad.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)  # [n, B, K, G*S]

  def one(carry: Any, block: Any) -> tuple[Any, jax.Array]:
    i, dk, dv = carry
    query, grad_i, logsumexp_i, delta_i, seen_i = block

    def add(j: jax.Array, carry: Any) -> Any:
      dq, dk, dv = carry
      probs = jnp.exp(_scores(query, k[j], i, j, seen_i) - logsumexp_i[..., None])  # [B, K, G*S, S]
      dprobs = jnp.einsum('bkqd,bksd->bkqs', grad_i, v[j], preferred_element_type=jnp.float32)
      dscores = (probs * (dprobs - delta_i[..., None]) * scale).astype(q.dtype)
      dq += jnp.einsum('bkqs,bksd->bkqd', dscores, k[j], preferred_element_type=jnp.float32)
      dk = dk.at[j].add(jnp.einsum('bkqs,bkqd->bksd', dscores, query, preferred_element_type=jnp.float32))
      dv = dv.at[j].add(jnp.einsum('bkqs,bkqd->bksd', probs.astype(v.dtype), grad_i, preferred_element_type=jnp.float32))
      return dq, dk, dv

    dq, dk, dv = jax.lax.fori_loop(0, i + 1, add, (jnp.zeros(query.shape, jnp.float32), dk, dv))
    return (i + 1, dk, dv), dq.astype(q.dtype)

  start = jnp.int32(0), jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
  (_, dk, dv), dq = jax.lax.scan(one, start, (q, grad, logsumexp, delta, seen))
  return dq, dk.astype(k.dtype), dv.astype(v.dtype), None


_blocks.defvjp(_forward_and_save, _backward)
