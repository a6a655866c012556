"""The compiled functions of the sampler: prefill, reading rows from pages, and one chunk of decode steps.

Every shape comes from the closed list of `Shapes`: rows and lengths of prefill calls, and buckets of cached length. Counters and lengths
are traced. Host inputs arrive packed in one int32 array a call, since on small models the transfers cost more than the work.

A prefill leaves out the last token of a sequence: the next decode step feeds it and draws what follows. So there is one place where tokens
are drawn, and a prefill makes no logits.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
import numpy as np

from sao_jax import sampling
from sao_jax import sharding
from sao_jax.config import ModelConfig, SamplerConfig
from sao_jax.models import kv_cache
from sao_jax.models import transformer
from sao_jax.types import Params

DECODE_HEADER = 4  # Columns of a decode input before the page slots: token, position, the two words of the row's key.
PREFILL_HEADER = 1  # Columns of a prefill input before tokens and page slots: cached length.


@dataclasses.dataclass(frozen=True)
class Shapes:
  """The closed list of shapes, and what else a compiled function depends on."""

  model: ModelConfig
  mesh: Mesh
  slots: int
  chunk_steps: int
  page_size: int
  pages: int
  cached: tuple[int, ...]  # Lengths of `work`, multiples of the page size.
  prefill_rows: tuple[int, ...]
  prefill_lengths: tuple[int, ...]
  dtype: str
  top_p: float
  top_k: int

  @property
  def prefill_cached(self) -> tuple[int, ...]:
    """Cached lengths of a prefill: none, then every second bucket, the longest included."""
    return (0, *reversed(self.cached[::-2]))

  @property
  def load_rows(self) -> int:
    """Rows that one call of `load` reads."""
    return bucket(self.prefill_rows, self.slots // 8)


def make_shapes(model: ModelConfig, config: SamplerConfig, mesh: Mesh, max_length: int) -> Shapes:
  """Shapes for sequences of at most `max_length` tokens. Raises ValueError where the pages cannot hold one of them."""
  page = config.page_size
  longest = -(-max_length // page) * page
  parts = sharding.batch_parts(mesh)
  pages = -(-(config.pages or config.sessions * (longest // page)) // parts) * parts
  if pages * page < max_length:
    raise ValueError(
        f'sampler.pages must hold at least one sequence of {max_length} tokens: got {pages} pages of {page}; '
        f'use {longest // page} or more, or 0.')
  if config.cache_lengths:
    cached = {min(-(-n // page) * page, longest) for n in config.cache_lengths}
  else:
    cached = {min(4 * page * 2**i, longest) for i in range(longest.bit_length())}
  cached.add(longest)
  return Shapes(
      model=model, mesh=mesh, slots=config.slots, chunk_steps=config.chunk_steps, page_size=page, pages=pages,
      cached=tuple(sorted(cached)), prefill_rows=_clipped(config.prefill_rows, config.slots),
      prefill_lengths=_clipped(config.prefill_lengths, max_length), dtype=config.dtype, top_p=config.top_p, top_k=config.top_k)


def _clipped(sizes: tuple[int, ...], limit: int) -> tuple[int, ...]:
  """Sizes below `limit`, and `limit` itself where a size reaches it."""
  return tuple(sorted({min(size, limit) for size in sizes}))


def bucket(sizes: tuple[int, ...], size: int) -> int:
  """The smallest of `sizes` that is at least `size`, else the largest."""
  return next((s for s in sizes if s >= size), sizes[-1])


class Programs:
  """Jitted functions for one `Shapes`; get them from `programs`, so that samplers of one shape compile once."""

  def __init__(self, shapes: Shapes):
    self.shapes = shapes
    mesh, model = shapes.mesh, shapes.model
    _, abstract, axes = transformer.abstract(transformer.Policy, dataclasses.replace(model, param_dtype=shapes.dtype))
    self._dtypes = {path: s.dtype for path, s in abstract.items()}  # A few leaves are float32 whatever the others are.
    self.param_shapes = {path: s.shape for path, s in abstract.items()}
    self.param_shardings = sharding.param_shardings(axes, abstract, mesh)
    self._convert = sharding.make_converter(self.param_shardings, self._dtypes)
    self.whole = sharding.replicated(mesh)
    pool, work = self._cache_sharding(shapes.pages, shapes.page_size), self._cache_sharding(shapes.slots, shapes.page_size)
    params, whole = self.param_shardings, self.whole
    self.init_pool = jax.jit(
        lambda: kv_cache.zeros(model, shapes.pages, shapes.page_size, jnp.dtype(shapes.dtype)), out_shardings=pool)
    rows = self._cache_sharding(1, shapes.page_size)  # Rows of a prefill: any number of them, so they are not split.
    # Apart from `prefill`: a function that reads pages and writes pages would copy all of them first.
    self.read = jax.jit(kv_cache.gather, in_shardings=(pool, whole), out_shardings=rows)
    self.rebuild = jax.jit(kv_cache.gather, in_shardings=(pool, whole), out_shardings=work)
    self.load = jax.jit(
        lambda old, pages, packed: kv_cache.load(old, pages, packed[:, 0], packed[:, 1:]),
        in_shardings=(work, pool, whole), out_shardings=work, donate_argnums=(0,))
    self.prefill = jax.jit(
        functools.partial(_prefill, shapes), in_shardings=(params, pool, None, whole), out_shardings=pool, donate_argnums=(1,))
    self.decode = jax.jit(
        functools.partial(_decode, shapes), in_shardings=(params, pool, work, whole, whole, whole),
        out_shardings=(pool, work, whole, whole), donate_argnums=(1, 2))

  def _cache_sharding(self, rows: int, length: int) -> Any:
    """Shardings of a cache of that many pages or rows; the cached length is never split."""
    cache = jax.eval_shape(lambda: kv_cache.zeros(self.shapes.model, rows, length, jnp.float32))

    def one(axes: tuple[str | None, ...], x: jax.ShapeDtypeStruct) -> NamedSharding:
      layers = (None,) if self.shapes.model.scan_layers else ()
      return sharding.activation_sharding(layers + axes, x.shape, self.shapes.mesh)

    layer = lambda arrays: tuple(one(axes, x) for axes, x in zip(kv_cache.AXES, arrays))
    return [layer(x) for x in cache] if isinstance(cache, list) else layer(cache)

  def place(self, params: Params) -> Params:
    """Parameters where they are sampled from; what has the right layout and dtype already is taken as it is."""
    if any(x.dtype != self._dtypes.get(path) for path, x in params.items()):
      return self._convert(params)
    return jax.device_put(dict(params), self.param_shardings)

  def put(self, x: np.ndarray | tuple[np.ndarray, ...]) -> Any:
    """A host value on every device of the mesh, by explicit transfer."""
    return jax.device_put(x, self.whole)

  def warm_up(self, params: Params, pool: kv_cache.Cache) -> kv_cache.Cache:
    """Runs every function at every shape, writing nothing; takes the pool and gives it back."""
    shapes, nowhere = self.shapes, self.shapes.pages * self.shapes.page_size
    for rows, length, cached in itertools.product(shapes.prefill_rows, shapes.prefill_lengths, shapes.prefill_cached):
      packed = np.full((rows, PREFILL_HEADER + 2 * length), nowhere, np.int32)
      packed[:, : PREFILL_HEADER + length] = 0
      read = self.read(pool, self.put(np.zeros((rows, cached // shapes.page_size), np.int32))) if cached else None
      pool = self.prefill(params, pool, read, self.put(packed))
    packed = np.full((shapes.slots, DECODE_HEADER + shapes.chunk_steps), nowhere, np.int32)
    packed[:, :DECODE_HEADER] = 0
    for cached in shapes.cached:
      pages = cached // shapes.page_size
      work = self.rebuild(pool, self.put(np.zeros((shapes.slots, pages), np.int32)))
      skip = np.zeros((shapes.load_rows, 1 + pages), np.int32)
      skip[:, 0] = shapes.slots
      work = self.load(work, pool, self.put(skip))
      pool, *_ = self.decode(params, pool, work, *self.put((packed, np.int32(1), np.float32(1.0))))
    return jax.block_until_ready(pool)


@functools.lru_cache(maxsize=8)
def programs(shapes: Shapes) -> Programs:
  """The compiled functions of `shapes`, shared by all samplers that have it."""
  return Programs(shapes)


def _prefill(
    shapes: Shapes, params: Params, pool: kv_cache.Cache, cached: kv_cache.Cache | None, packed: jax.Array
) -> kv_cache.Cache:
  """Computes keys and values of new tokens and writes them to their pages.

  Args:
    cached: what the rows have cached, from `Programs.read`; None where none has anything.
    packed: i32[R, 1 + 2 * T]: cached length, then T tokens (right-padded), then T page slots (see `kv_cache.write_pages`).
  """
  length = (packed.shape[1] - PREFILL_HEADER) // 2
  start, tokens, slots = packed[:, 0], packed[:, PREFILL_HEADER: PREFILL_HEADER + length], packed[:, PREFILL_HEADER + length:]
  model = transformer.merge(transformer.Policy, shapes.model, params)
  positions = start[:, None] + jnp.arange(length)
  _, new = model.hidden(tokens, positions, kv_cache.extend_attention(start), cached, shard=sharding.shard_fn(shapes.mesh))
  return kv_cache.write_pages(pool, new, slots)


def _decode(
    shapes: Shapes, params: Params, pool: kv_cache.Cache, work: kv_cache.Cache, packed: jax.Array, steps: jax.Array,
    temperature: jax.Array
) -> tuple[kv_cache.Cache, kv_cache.Cache, jax.Array, jax.Array]:
  """One chunk: `steps` <= chunk_steps tokens for every row.

  Args:
    packed: i32[B, 4 + C]: token to feed, its position (= cached length), two words of the row's key, then C page slots.
    steps: i32[], how many steps to take.
    temperature: f32[]; 0 is greedy.

  Returns:
    Pages and rows with the new keys and values; tokens i32[C, B] and log_probs f32[C, B], of which the first `steps` rows count.
  """
  b, c = packed.shape[0], shapes.chunk_steps
  start, slots = packed[:, 1], packed[:, DECODE_HEADER:]
  keys = jax.lax.bitcast_convert_type(packed[:, 2:4], jnp.uint32)
  model = transformer.merge(transformer.Policy, shapes.model, params)
  shard = sharding.shard_fn(shapes.mesh)

  def step(i, carry):
    token, recent, tokens, log_probs = carry
    attend = kv_cache.decode_attention(start, i)
    hidden, recent = model.hidden(token[:, None], (start + i)[:, None], attend, kv_cache.join(work, recent), shard=shard)
    logits = shard(model.logits(hidden[:, 0]), ('batch', 'vocab'))
    token, log_prob = sampling.sample(logits, keys, start + i + 1, temperature, top_p=shapes.top_p, top_k=shapes.top_k)
    return token, recent, tokens.at[i].set(token), log_probs.at[i].set(log_prob)

  recent = kv_cache.zeros(shapes.model, b, c, jnp.dtype(shapes.dtype))
  carry = (packed[:, 0], recent, jnp.zeros((c, b), jnp.int32), jnp.zeros((c, b), jnp.float32))
  _, recent, tokens, log_probs = jax.lax.fori_loop(0, steps, step, carry)
  return kv_cache.write_pages(pool, recent, slots), kv_cache.write_rows(work, recent, start), tokens, log_probs
