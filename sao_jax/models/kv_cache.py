"""The paged key/value cache and the attention that reads it.

One layer has

    pool      keys [P, K, d, page]   values [P, K, page, d]     every session's pages: the truth
    work      keys [B, K, d, S]      values [B, K, S, d]        the decoding rows' pages side by side: a copy, fast to read
    recent    keys [B, K, d, C]      values [B, K, C, d]        what the current chunk of C steps wrote

with P pages, B rows, K key/value heads of size d, S cached positions (a bucket). Keys have positions last, so that both products of
attention read memory in order: on CPU this is four times faster than [B, S, K, d]. A decode step writes only to `recent`, at the same
index in every row; at the end of a chunk `write_pages` and `write_rows` copy it to the pages and to `work`. So the large arrays are never
written inside the loop over steps, where they would be copied.

With unrolled layers the state is a list with one (keys, values) per layer; with `scan_layers` it is one such pair with a leading axis L.
Positions of rows that attention must not see are masked by length, so what a freed page still holds cannot matter as long as it is finite.
"""

from __future__ import annotations

from typing import Any, Callable

import jax
import jax.numpy as jnp

from sao_jax.config import ModelConfig

Layer = tuple[jax.Array, jax.Array]  # keys, values
Cache = list[Layer] | Layer
Partial = tuple[jax.Array, jax.Array, jax.Array]
MASKED = -1e30
EXTEND_BLOCK = 2048  # Cached positions that a prefill looks at together.

AXES = (('batch', 'kv_heads', 'head_dim', None), ('batch', 'kv_heads', None, 'head_dim'))  # Keys, values; pages split as rows do.


def zeros(config: ModelConfig, rows: int, length: int, dtype: Any) -> Cache:
  """Zeroed keys [rows, K, d, length] and values [rows, K, length, d] of every layer: a pool (pages of `length`) or rows."""
  c = config
  keys, values = (rows, c.num_kv_heads, c.head_dim, length), (rows, c.num_kv_heads, length, c.head_dim)
  if c.scan_layers:
    return jnp.zeros((c.num_layers, *keys), dtype), jnp.zeros((c.num_layers, *values), dtype)
  return [(jnp.zeros(keys, dtype), jnp.zeros(values, dtype)) for _ in range(c.num_layers)]


def each_layer(function: Callable[..., Any], *caches: Cache) -> Any:
  """`function(*layers)` for every layer, in the structure of the caches."""
  if isinstance(caches[0], list):
    return [function(*layers) for layers in zip(*caches, strict=True)]
  return jax.vmap(function)(*caches)


def join(*caches: Cache) -> Any:
  """Layer states that hold the arrays of several caches: (keys, values, keys, values, ...)."""
  if isinstance(caches[0], list):
    return [sum(layers, ()) for layers in zip(*caches, strict=True)]
  return sum(caches, ())


def gather(pool: Cache, tables: jax.Array) -> Cache:
  """Pages side by side: keys [R, K, d, n * page], values [R, K, n * page, d] for block tables i32[R, n]."""

  def layer(pages: Layer) -> Layer:
    keys, values = pages
    r, n = tables.shape
    _, k, d, page = keys.shape
    return (
        keys[tables].transpose(0, 2, 3, 1, 4).reshape(r, k, d, n * page),
        values[tables].transpose(0, 2, 1, 3, 4).reshape(r, k, n * page, d),
    )

  return each_layer(layer, pool)


def load(work: Cache, pool: Cache, rows: jax.Array, tables: jax.Array) -> Cache:
  """`work` with the rows `rows` i32[R] read anew from the pages of `tables` i32[R, n]; a row number >= B is skipped."""

  def layer(old: Layer, new: Layer) -> Layer:
    return tuple(a.at[rows].set(b, mode='drop') for a, b in zip(old, new))

  return each_layer(layer, work, gather(pool, tables))


def write_pages(pool: Cache, new: Cache, slots: jax.Array) -> Cache:
  """Writes new keys [R, K, d, T] and values [R, K, T, d] to the pages.

  Args:
    pool: the pages.
    new: what to write.
    slots: i32[R, T], page number * page size + offset in the page; at least P * page for positions that are not to be written.
  """

  def layer(pages: Layer, fresh: Layer) -> Layer:
    (keys, values), (new_keys, new_values) = pages, fresh
    page, offset = jnp.divmod(slots, keys.shape[-1])
    return (
        keys.at[page, :, :, offset].set(new_keys.transpose(0, 3, 1, 2).astype(keys.dtype), mode='drop'),
        values.at[page, :, offset, :].set(new_values.transpose(0, 2, 1, 3).astype(values.dtype), mode='drop'),
    )

  return each_layer(layer, pool, new)


def write_rows(work: Cache, recent: Cache, start: jax.Array) -> Cache:
  """Writes `recent` (C positions) to `work` from position `start` i32[B] on; what passes the end of `work` is left out."""

  def layer(old: Layer, fresh: Layer) -> Layer:
    (keys, values), (new_keys, new_values) = old, fresh
    row = jnp.arange(keys.shape[0])[:, None]
    position = start[:, None] + jnp.arange(new_values.shape[2])  # [B, C]
    return (
        keys.at[row, :, :, position].set(new_keys.transpose(0, 3, 1, 2).astype(keys.dtype), mode='drop'),
        values.at[row, :, position, :].set(new_values.transpose(0, 2, 1, 3).astype(values.dtype), mode='drop'),
    )

  return each_layer(layer, work, recent)


def decode_attention(length: jax.Array, step: jax.Array) -> Callable[..., tuple[jax.Array, Layer]]:
  """`attend` of one decode step: one query a row over its cached positions and those of this chunk.

  Args:
    length: i32[B], positions of `work` that each row sees.
    step: i32[], index of this step in the chunk.

  Returns:
    attend(q [B, 1, H, d], k [B, 1, K, d], v, (work keys, work values, recent keys, recent values)) -> (out [B, 1, H, d], new recent).
  """

  def attend(q, k, v, state):
    keys, values, new_keys, new_values = state
    new_keys = jax.lax.dynamic_update_slice_in_dim(new_keys, k.transpose(0, 2, 3, 1).astype(new_keys.dtype), step, axis=3)
    new_values = jax.lax.dynamic_update_slice_in_dim(new_values, v.transpose(0, 2, 1, 3).astype(new_values.dtype), step, axis=2)
    b, _, h, d = q.shape
    grouped = q.reshape(b, keys.shape[1], h // keys.shape[1], d)
    cached = jnp.arange(keys.shape[-1]) < length[:, None]  # [B, S]
    recent = jnp.arange(new_keys.shape[-1]) <= step  # [C]
    scores = [
        jnp.where(mask, jnp.einsum('bkgd,bkds->bkgs', grouped, x, preferred_element_type=jnp.float32) * (d**-0.5), MASKED)
        for x, mask in ((keys, cached[:, None, None]), (new_keys, recent))
    ]
    prob = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1).astype(values.dtype)
    old, new = prob[..., : keys.shape[-1]], prob[..., keys.shape[-1]:]
    out = jnp.einsum('bkgs,bksd->bkgd', old, values) + jnp.einsum('bkgs,bksd->bkgd', new, new_values)
    return out.reshape(b, 1, h, d).astype(q.dtype), (new_keys, new_values)

  return attend


def _partial_attention(q: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array) -> Partial:
  """Softmax attention over some of the keys, not yet divided by its sum.

  Args:
    q: [R, T, K, G, d], queries by key/value head.
    keys: [R, K, d, S].
    values: [R, K, S, d].
    mask: bool, broadcast over [R, K, G, T, S].

  Returns:
    Largest score f32[R, K, G, T], sum of exp(score - largest), and that sum weighted by the values, f32[R, K, G, T, d].
  """
  scores = jnp.einsum('rtkgd,rkds->rkgts', q, keys, preferred_element_type=jnp.float32) * (q.shape[-1] ** -0.5)
  scores = jnp.where(mask, scores, MASKED)
  top = jnp.max(scores, axis=-1)
  weight = jnp.exp(scores - top[..., None])
  out = jnp.einsum('rkgts,rksd->rkgtd', weight.astype(values.dtype), values, preferred_element_type=jnp.float32)
  return top, jnp.sum(weight, axis=-1), out


def _merge(a: Partial, b: Partial) -> Partial:
  """Attention over the keys of both."""
  top = jnp.maximum(a[0], b[0])
  scale_a, scale_b = jnp.exp(a[0] - top), jnp.exp(b[0] - top)
  return top, a[1] * scale_a + b[1] * scale_b, a[2] * scale_a[..., None] + b[2] * scale_b[..., None]


def _block(size: int) -> int:
  """The largest divisor of `size` that is at most `EXTEND_BLOCK`."""
  return max(n for n in range(1, min(size, EXTEND_BLOCK) + 1) if size % n == 0)


def extend_attention(length: jax.Array) -> Callable[..., tuple[jax.Array, Layer]]:
  """`attend` of new tokens over their row's cached positions and, causally, over each other.

  A long cache is taken block by block, so that the scores of T new tokens over S positions never exist at once.

  Args:
    length: i32[R], cached positions that each row sees.

  Returns:
    attend(q [R, T, H, d], k [R, T, K, d], v, cached layer or None) -> (out [R, T, H, d], keys [R, K, d, T] and values [R, K, T, d]).
  """

  def attend(q, k, v, state):
    r, t, h, d = q.shape
    dtype = k.dtype if state is None else state[0].dtype
    new_keys, new_values = k.transpose(0, 2, 3, 1).astype(dtype), v.transpose(0, 2, 1, 3).astype(dtype)
    grouped = q.reshape(r, t, k.shape[2], h // k.shape[2], d)
    result = _partial_attention(grouped, new_keys, new_values, jnp.arange(t)[:, None] >= jnp.arange(t))
    if state is not None:
      size = state[0].shape[-1]
      block = _block(size)

      def add(i, done):
        keys = jax.lax.dynamic_slice_in_dim(state[0], i * block, block, axis=3)
        values = jax.lax.dynamic_slice_in_dim(state[1], i * block, block, axis=2)
        seen = i * block + jnp.arange(block) < length[:, None]  # [R, block]
        return _merge(done, _partial_attention(grouped, keys, values, seen[:, None, None, None]))

      result = add(0, result) if block == size else jax.lax.fori_loop(0, size // block, add, result)
    out = (result[2] / result[1][..., None]).transpose(0, 3, 1, 2, 4)  # [R, T, K, G, d]
    return out.reshape(r, t, h, d).astype(q.dtype), (new_keys, new_values)

  return attend
