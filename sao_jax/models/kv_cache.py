"""The paged key/value cache and the attention that reads it.

One layer has

    pool      keys [P, K, d, page]   values [P, K, page, d]     every session's pages: the truth
    work      keys [B, K, d, S]      values [B, K, S, d]        the decoding rows' pages side by side: a copy, fast to read
    recent    keys [B, K, d, C]      values [B, K, C, d]        what the current chunk of C steps wrote

with P pages, B rows, K key/value heads of size d, S cached positions (a bucket). Keys have positions last, so that both products of
attention read memory in order: on CPU this is four times faster than [B, S, K, d]. A decode step writes only to `recent`, at the same
index in every row; at the end of a chunk `write_pages` and `write_rows` copy it to the pages and to `work`. So the large arrays are never
written inside the loop over steps, where they would be copied.

Latent attention caches one head for all: keys [.., 1, rank + rotary, ..] and values [.., 1, .., rank]. A layer with an index of its own has
a third array, its index keys, laid out like keys.

With unrolled layers the state is a list with one (keys, values) or (keys, values, index keys) per layer; with `scan_layers` it is one such
tuple with a leading axis L. Positions of rows that attention must not see are masked by length, so what a freed page still holds cannot
matter as long as it is finite.
"""

from __future__ import annotations

from typing import Any, Callable

import jax
import jax.numpy as jnp

from sao_jax.config import ModelConfig
from sao_jax.models.attention import Index, choose, index_scores

Layer = tuple[jax.Array, ...]  # keys, values, and index keys where the layer has an index
Cache = list[Layer] | Layer
Partial = tuple[jax.Array, jax.Array, jax.Array]
MASKED = -1e30
EXTEND_BLOCK = 2048  # Cached positions that a prefill looks at together.

# Keys, values, index keys; pages split as rows do.
AXES = (('batch', 'kv_heads', 'head_dim', None), ('batch', 'kv_heads', None, 'head_dim'), ('batch', 'kv_heads', 'head_dim', None))
VALUES = 1  # Place of the values in a layer: they alone have positions before the head's dimensions.


def layer_shapes(config: ModelConfig, layer: int, rows: int, length: int) -> list[tuple[int, ...]]:
  """Shapes of one layer's arrays: keys [rows, K, d, length], values [rows, K, length, e], and index keys [rows, 1, i, length]."""
  c, latent = config, config.latent
  if not latent.rank:
    return [(rows, c.num_kv_heads, c.head_dim, length), (rows, c.num_kv_heads, length, c.head_dim)]
  shapes = [(rows, 1, latent.rank + latent.rotary_dim, length), (rows, 1, length, latent.rank)]
  if latent.index_top_k and layer not in latent.shared_index_layers:
    shapes.append((rows, 1, latent.index_dim, length))
  return shapes


def zeros(config: ModelConfig, rows: int, length: int, dtype: Any) -> Cache:
  """Zeroed arrays of every layer: a pool (pages of `length`) or rows."""
  if config.scan_layers:
    return tuple(jnp.zeros((config.num_layers, *shape), dtype) for shape in layer_shapes(config, 0, rows, length))
  return [tuple(jnp.zeros(shape, dtype) for shape in layer_shapes(config, i, rows, length)) for i in range(config.num_layers)]


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
  """Pages side by side: keys [R, K, d, n * page], values [R, K, n * page, e] for block tables i32[R, n]."""
  r, n = tables.shape

  def layer(pages: Layer) -> Layer:
    rows = []
    for place, x in enumerate(pages):
      _, k, before, after = x.shape
      if place == VALUES:
        rows.append(x[tables].transpose(0, 2, 1, 3, 4).reshape(r, k, n * before, after))
      else:
        rows.append(x[tables].transpose(0, 2, 3, 1, 4).reshape(r, k, before, n * after))
    return tuple(rows)

  return each_layer(layer, pool)


def load(work: Cache, pool: Cache, rows: jax.Array, tables: jax.Array) -> Cache:
  """`work` with the rows `rows` i32[R] read anew from the pages of `tables` i32[R, n]; a row number >= B is skipped."""

  def layer(old: Layer, new: Layer) -> Layer:
    return tuple(a.at[rows].set(b, mode='drop') for a, b in zip(old, new))

  return each_layer(layer, work, gather(pool, tables))


def _write(old: Layer, new: Layer, first: jax.Array, position: jax.Array) -> Layer:
  """`old` with `new` [R, ..] at rows or pages `first` and positions `position`, both i32[R, T]; what lies outside is left out."""
  written = []
  for place, (x, fresh) in enumerate(zip(old, new, strict=True)):
    if place == VALUES:
      written.append(x.at[first, :, position, :].set(fresh.transpose(0, 2, 1, 3).astype(x.dtype), mode='drop'))
    else:
      written.append(x.at[first, :, :, position].set(fresh.transpose(0, 3, 1, 2).astype(x.dtype), mode='drop'))
  return tuple(written)


def write_pages(pool: Cache, new: Cache, slots: jax.Array) -> Cache:
  """Writes new keys [R, K, d, T] and values [R, K, T, e] to the pages.

  Args:
    pool: the pages.
    new: what to write.
    slots: i32[R, T], page number * page size + offset in the page; at least P * page for positions that are not to be written.
  """

  def layer(pages: Layer, fresh: Layer) -> Layer:
    page, offset = jnp.divmod(slots, pages[0].shape[-1])
    return _write(pages, fresh, page, offset)

  return each_layer(layer, pool, new)


def write_rows(work: Cache, recent: Cache, start: jax.Array) -> Cache:
  """Writes `recent` (C positions) to `work` from position `start` i32[B] on; what passes the end of `work` is left out."""

  def layer(old: Layer, fresh: Layer) -> Layer:
    row = jnp.arange(old[0].shape[0])[:, None]
    return _write(old, fresh, row, start[:, None] + jnp.arange(fresh[0].shape[-1]))  # [B, C]

  return each_layer(layer, work, recent)


def _cached(x: jax.Array, place: int, dtype: Any) -> jax.Array:
  """What is cached of new keys or values [R, T, K, d]."""
  return (x.transpose(0, 2, 1, 3) if place == VALUES else x.transpose(0, 2, 3, 1)).astype(dtype)


def _new_arrays(k: jax.Array, v: jax.Array, index: Index | None) -> list[jax.Array]:
  """Keys, values and index keys [R, T, K, d] of new positions, in the order of a layer."""
  return [k, v] + ([index.key] if index is not None and index.key is not None else [])


def _choice(index: Index | None, keys: list[jax.Array], visible: list[jax.Array]) -> jax.Array | None:
  """Which keys each of T queries sees, bool[R, T, S]; None for all that are visible.

  Args:
    index: of the queries.
    keys: parts of the index keys [R, 1, d, S_i], side by side.
    visible: which of them each query may see at all, bool[R, T, S_i].
  """
  if index is None or index.query is None:
    return None if index is None else index.selected
  if sum(x.shape[-1] for x in keys) <= index.top_k:
    return None
  scores = [index_scores(index.query, index.weight, x[:, 0].swapaxes(1, 2)) for x in keys]
  return choose(jnp.concatenate(scores, axis=-1), jnp.concatenate(visible, axis=-1), index.top_k)


def decode_attention(length: jax.Array, step: jax.Array) -> Callable[..., Any]:
  """`attend` of one decode step: one query a row over its cached positions and those of this chunk.

  Args:
    length: i32[B], positions of `work` that each row sees.
    step: i32[], index of this step in the chunk.

  Returns:
    attend(q [B, 1, H, d], k [B, 1, K, d], v [B, 1, K, e], (work arrays, recent arrays)) -> (out [B, 1, H, e], new recent arrays); with
    an `Index` also which keys the query saw, bool[B, 1, S + C] or None.
  """

  def attend(q, k, v, state, index=None):
    work, recent = state[: len(state) // 2], state[len(state) // 2:]
    recent = tuple(
        jax.lax.dynamic_update_slice_in_dim(x, _cached(new, place, x.dtype), step, axis=2 if place == VALUES else 3)
        for place, (x, new) in enumerate(zip(recent, _new_arrays(k, v, index), strict=True)))
    (keys, values), (new_keys, new_values) = work[:2], recent[:2]
    b, _, h, d = q.shape
    size, groups = keys.shape[-1], keys.shape[1]
    grouped = q.reshape(b, groups, h // groups, d)
    cached = jnp.arange(size) < length[:, None]  # [B, S]
    fresh = jnp.arange(new_keys.shape[-1]) <= step  # [C]
    visible = [cached[:, None], jnp.broadcast_to(fresh, (b, 1, fresh.shape[0]))]
    selected = _choice(index, [work[-1], recent[-1]], visible)
    masks = (cached[:, None, None], fresh)
    if selected is not None:
      masks = (selected[:, :, None, :size], selected[:, :, None, size:])
    scores = [
        jnp.where(mask, jnp.einsum('bkgd,bkds->bkgs', grouped, x, preferred_element_type=jnp.float32) * (d**-0.5), MASKED)
        for x, mask in ((keys, masks[0]), (new_keys, masks[1]))
    ]
    prob = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1).astype(values.dtype)
    old, new = prob[..., :size], prob[..., size:]
    out = jnp.einsum('bkgs,bksd->bkgd', old, values) + jnp.einsum('bkgs,bksd->bkgd', new, new_values)
    out = out.reshape(b, 1, h, -1).astype(q.dtype)
    return (out, recent) if index is None else (out, recent, selected)

  return attend


def _partial_attention(q: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array) -> Partial:
  """Softmax attention over some of the keys, not yet divided by its sum.

  Args:
    q: [R, T, K, G, d], queries by key/value head.
    keys: [R, K, d, S].
    values: [R, K, S, e].
    mask: bool, broadcast over [R, K, G, T, S].

  Returns:
    Largest score f32[R, K, G, T], sum of exp(score - largest), and that sum weighted by the values, f32[R, K, G, T, e].
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


def extend_attention(length: jax.Array) -> Callable[..., Any]:
  """`attend` of new tokens over their row's cached positions and, causally, over each other.

  A long cache is taken block by block, so that the scores of T new tokens over S positions never exist at once (index scores do).

  Args:
    length: i32[R], cached positions that each row sees.

  Returns:
    attend(q [R, T, H, d], k [R, T, K, d], v [R, T, K, e], cached layer or None) -> (out [R, T, H, e], the new arrays of that layer: keys
    [R, K, d, T], values [R, K, T, e]); with an `Index` also which keys each query saw, bool[R, T, S + T] or None.
  """

  def attend(q, k, v, state, index=None):
    r, t, h, d = q.shape
    dtype = k.dtype if state is None else state[0].dtype
    new = tuple(_cached(x, place, dtype) for place, x in enumerate(_new_arrays(k, v, index)))
    size = 0 if state is None else state[0].shape[-1]
    causal, seen = jnp.arange(t)[:, None] >= jnp.arange(t), jnp.arange(size) < length[:, None]  # [T, T], [R, S]
    parts = ([] if state is None else [state[-1]]) + [new[-1]]
    visible = [jnp.broadcast_to(seen[:, None], (r, t, size)), jnp.broadcast_to(causal, (r, t, t))][-len(parts):]
    selected = _choice(index, parts, visible)
    grouped = q.reshape(r, t, k.shape[2], h // k.shape[2], d)
    result = _partial_attention(grouped, *new[:2], causal if selected is None else selected[:, None, None, :, size:])
    if state is not None:
      block = _block(size)

      def add(i, done):
        keys = jax.lax.dynamic_slice_in_dim(state[0], i * block, block, axis=3)
        values = jax.lax.dynamic_slice_in_dim(state[1], i * block, block, axis=2)
        if selected is None:
          mask = (i * block + jnp.arange(block) < length[:, None])[:, None, None, None]  # [R, 1, 1, 1, block]
        else:
          mask = jax.lax.dynamic_slice_in_dim(selected, i * block, block, axis=2)[:, None, None]
        return _merge(done, _partial_attention(grouped, keys, values, mask))

      result = add(0, result) if block == size else jax.lax.fori_loop(0, size // block, add, result)
    out = (result[2] / result[1][..., None]).transpose(0, 3, 1, 2, 4).reshape(r, t, h, -1).astype(q.dtype)
    return (out, new) if index is None else (out, new, selected)

  return attend
