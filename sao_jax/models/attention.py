"""Causal attention over whole rows, for the learner: dense scores, or blocks with memory linear in length.

Both take q [B, T, H, d] and k, v [B, T, K, d] with H a multiple of K: query head h reads key head h // (H // K). Rows are padded on the
right, so a real token comes before all padding and never sees any. Scores and softmax are float32. The G = H // K query heads of one key
head are laid side by side with the positions, which makes every product a batch of [G*T, d] x [d, T], the shape that XLA multiplies
fastest.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

import jax
import jax.numpy as jnp

from sao_jax.config import ModelConfig

# attend(q [B,T,H,d], k [B,T,K,d], v [B,T,K,d], state of one layer) -> (out [B,T,H,d], new state of that layer)
Attend = Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]

MASKED = -1e30  # Score of a key that may not be seen: finite, so that no row gives NaN.


def make(config: ModelConfig) -> Attend:
  """The attention that `config.attention` names. Raises ValueError for an unknown one."""
  if config.attention == 'dense':
    return causal_attention
  if config.attention == 'blockwise':
    return functools.partial(blockwise_attention, block=config.attention_block)
  raise ValueError(f"model.attention must be 'dense' or 'blockwise', got {config.attention!r}.")


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array, state: Any = None) -> tuple[jax.Array, Any]:
  """Dense causal attention, [B, T, H, d]; memory B*H*T*T. `state` is handed back."""
  b, t, h, d = q.shape
  groups = k.shape[2]
  q = q.transpose(0, 2, 1, 3).reshape(b, groups, h // groups * t, d)
  k, v = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)  # [B, K, d, T], [B, K, T, d]
  scores = jnp.matmul(q, k, preferred_element_type=jnp.float32).reshape(b, groups, h // groups, t, t) * (d**-0.5)
  mask = jnp.arange(t)[:, None] >= jnp.arange(t)[None, :]
  probs = jax.nn.softmax(jnp.where(mask, scores, MASKED), axis=-1).astype(v.dtype)
  out = jnp.matmul(probs.reshape(b, groups, -1, t), v).reshape(b, h, t, d)
  return out.transpose(0, 2, 1, 3), state


def blockwise_attention(q: jax.Array, k: jax.Array, v: jax.Array, state: Any = None, *, block: int) -> tuple[jax.Array, Any]:
  """The same result with an online softmax over blocks of keys: memory linear in T, forward and backward.

  Blocks of keys after the queries are skipped, not masked. The backward pass recomputes each block of scores from the saved logsumexp.

  Args:
    q, k, v: as in `causal_attention`.
    state: handed back.
    block: positions in a block of queries and of keys; shorter rows use one block.

  Source: Dao et al. 2022, arXiv:2205.14135, algorithms 1 and 4, with the loops over blocks in XLA.
  """
  b, t, h, d = q.shape
  groups, size = k.shape[2], min(block, t)
  count = -(-t // size)
  pad = [(0, 0), (0, count * size - t), (0, 0), (0, 0)]
  q = jnp.pad(q, pad).reshape(b, count, size, groups, h // groups, d).transpose(1, 0, 3, 4, 2, 5).reshape(count, b, groups, -1, d)
  k, v = (jnp.pad(x, pad).reshape(b, count, size, groups, d).transpose(1, 0, 3, 2, 4) for x in (k, v))
  out = _blocks(q, k, v)  # [n, B, K, G*S, d]
  out = out.reshape(count, b, groups, h // groups, size, d).transpose(1, 0, 4, 2, 3, 5).reshape(b, count * size, h, d)
  return out[:, :t], state


def _scores(q: jax.Array, k: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
  """Masked scores f32[B, K, G*S, S] of query block i against key block j <= i."""
  size = k.shape[-2]
  scores = jnp.einsum('bkqd,bksd->bkqs', q, k, preferred_element_type=jnp.float32) * (q.shape[-1]**-0.5)
  row = jnp.arange(q.shape[-2]) % size
  return jnp.where((j < i) | (row[:, None] >= jnp.arange(size)[None, :]), scores, MASKED)


@jax.custom_vjp
def _blocks(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
  """Attention of q [n, B, K, G*S, d] to k, v [n, B, K, S, d], block by block."""
  return _forward(q, k, v)[0]


def _forward(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Output [n, B, K, G*S, d] and logsumexp of the scores f32[n, B, K, G*S]."""

  def one(i: jax.Array, query: jax.Array) -> tuple[jax.Array, jax.Array]:

    def add(j: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
      top, total, out = carry
      scores = _scores(query, k[j], i, j)
      new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
      weights, keep = jnp.exp(scores - new_top[..., None]), jnp.exp(top - new_top)
      part = jnp.einsum('bkqs,bksd->bkqd', weights.astype(v.dtype), v[j], preferred_element_type=jnp.float32)
      return new_top, total * keep + jnp.sum(weights, axis=-1), out * keep[..., None] + part

    rows = query.shape[:-1]
    start = jnp.full(rows, MASKED, jnp.float32), jnp.zeros(rows, jnp.float32), jnp.zeros(query.shape, jnp.float32)
    top, total, out = jax.lax.fori_loop(0, i + 1, add, start)
    return (out / total[..., None]).astype(query.dtype), top + jnp.log(total)

  return jax.lax.scan(lambda i, query: (i + 1, one(i, query)), jnp.int32(0), q)[1]


def _forward_and_save(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
  out, logsumexp = _forward(q, k, v)
  return out, (q, k, v, out, logsumexp)


def _backward(saved: Any, grad: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
  q, k, v, out, logsumexp = saved
  scale = q.shape[-1]**-0.5
  delta = jnp.sum(grad.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)  # [n, B, K, G*S]

  def one(carry: Any, block: Any) -> tuple[Any, jax.Array]:
    i, dk, dv = carry
    query, grad_i, logsumexp_i, delta_i = block

    def add(j: jax.Array, carry: Any) -> Any:
      dq, dk, dv = carry
      probs = jnp.exp(_scores(query, k[j], i, j) - logsumexp_i[..., None])  # [B, K, G*S, S]
      dprobs = jnp.einsum('bkqd,bksd->bkqs', grad_i, v[j], preferred_element_type=jnp.float32)
      dscores = (probs * (dprobs - delta_i[..., None]) * scale).astype(q.dtype)
      dq += jnp.einsum('bkqs,bksd->bkqd', dscores, k[j], preferred_element_type=jnp.float32)
      dk = dk.at[j].add(jnp.einsum('bkqs,bkqd->bksd', dscores, query, preferred_element_type=jnp.float32))
      dv = dv.at[j].add(jnp.einsum('bkqs,bkqd->bksd', probs.astype(v.dtype), grad_i, preferred_element_type=jnp.float32))
      return dq, dk, dv

    dq, dk, dv = jax.lax.fori_loop(0, i + 1, add, (jnp.zeros(query.shape, jnp.float32), dk, dv))
    return (i + 1, dk, dv), dq.astype(q.dtype)

  start = jnp.int32(0), jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
  (_, dk, dv), dq = jax.lax.scan(one, start, (q, grad, logsumexp, delta))
  return dq, dk.astype(k.dtype), dv.astype(v.dtype)


_blocks.defvjp(_forward_and_save, _backward)
