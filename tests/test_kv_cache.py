"""Pages and rows of the cache, and attention over them, against plain causal attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax.config import ModelConfig
from sao_jax.models import kv_cache
from sao_jax.models import transformer
from sao_jax.paging import PagePool

PAGE, HEADS, KV, SIZE = 4, 4, 2, 8
MODEL = ModelConfig(num_layers=2, num_heads=HEADS, num_kv_heads=KV, head_dim=SIZE)


def random_layers(rng, rows, length):
  """One layer of new keys [R, K, d, T] and values [R, K, T, d]."""
  return (rng.normal(size=(rows, KV, SIZE, length)).astype(np.float32), rng.normal(size=(rows, KV, length, SIZE)).astype(np.float32))


def test_pages_written_are_the_rows_gathered():
  rng = np.random.default_rng(0)
  pool = kv_cache.zeros(MODEL, 7, PAGE, jnp.float32)
  tables = np.array([[5, 0, 3], [1, 6, 2]], np.int32)
  new = [random_layers(rng, 2, 10) for _ in range(2)]
  position = np.arange(10)
  slots = tables[:, position // PAGE] * PAGE + position % PAGE
  slots[1, 7:] = 7 * PAGE  # Not written.
  pool = jax.jit(kv_cache.write_pages)(pool, new, slots)
  rows = jax.jit(kv_cache.gather)(pool, tables)
  assert len(rows) == 2
  for (keys, values), (new_keys, new_values) in zip(rows, new):
    assert keys.shape == (2, KV, SIZE, 12) and values.shape == (2, KV, 12, SIZE)
    np.testing.assert_array_equal(keys[0, :, :, :10], new_keys[0])
    np.testing.assert_array_equal(values[0, :, :10], new_values[0])
    np.testing.assert_array_equal(keys[1, :, :, :7], new_keys[1, :, :, :7])
    assert not np.any(np.asarray(keys[1, :, :, 7:])) and not np.any(np.asarray(values[1, :, 7:]))
  assert not np.any(np.asarray(pool[0][0][4]))  # A page that nobody named.


def test_write_rows_starts_where_each_row_is_and_stops_at_the_end():
  rng = np.random.default_rng(1)
  work = kv_cache.zeros(MODEL, 3, 8, jnp.float32)
  recent = [random_layers(rng, 3, 4) for _ in range(2)]
  out = jax.jit(kv_cache.write_rows)(work, recent, np.array([0, 3, 6], np.int32))
  for (keys, values), (new_keys, new_values) in zip(out, recent):
    np.testing.assert_array_equal(keys[1, :, :, 3:7], new_keys[1])
    np.testing.assert_array_equal(values[0, :, :4], new_values[0])
    np.testing.assert_array_equal(keys[2, :, :, 6:], new_keys[2, :, :, :2])
    assert not np.any(np.asarray(keys[2, :, :, :6]))


def test_load_reads_the_named_rows_only():
  rng = np.random.default_rng(2)
  pool = [random_layers(rng, 5, PAGE) for _ in range(2)]
  work = [tuple(np.full_like(x, 9.0) for x in random_layers(rng, 3, 8)) for _ in range(2)]
  out = jax.jit(kv_cache.load)(work, pool, np.array([2, 3], np.int32), np.array([[4, 1], [0, 0]], np.int32))
  for (keys, values), (pool_keys, pool_values) in zip(out, pool):
    np.testing.assert_array_equal(keys[2], np.concatenate([pool_keys[4], pool_keys[1]], axis=-1))
    np.testing.assert_array_equal(values[2], np.concatenate([pool_values[4], pool_values[1]], axis=1))
    assert np.all(np.asarray(keys[:2]) == 9.0)


def attention_inputs(rng, rows, length):
  q = rng.normal(size=(rows, length, HEADS, SIZE)).astype(np.float32)
  k, v = (rng.normal(size=(rows, length, KV, SIZE)).astype(np.float32) for _ in range(2))
  return q, k, v


@pytest.mark.parametrize('cached, poison, block', [(0, 0.0, 99), (5, 1e6, 99), (9, -1e6, 99), (9, 1e6, 5), (5, -1e6, 3)])
def test_extend_then_decode_is_causal_attention(monkeypatch, cached, poison, block):
  """`cached` positions, then 4 extended at once, then 3 decoded one by one; what lies beyond a row's length cannot matter."""
  monkeypatch.setattr(kv_cache, 'EXTEND_BLOCK', block)
  rng = np.random.default_rng(cached)
  q, k, v = attention_inputs(rng, 2, cached + 7)
  want = np.asarray(transformer.causal_attention(q, k, v)[0])
  space = 16
  keys = np.full((2, KV, SIZE, space), poison, np.float32)
  values = np.full((2, KV, space, SIZE), poison, np.float32)
  keys[..., :cached], values[:, :, :cached] = k[:, :cached].transpose(0, 2, 3, 1), v[:, :cached].transpose(0, 2, 1, 3)
  lengths = np.full(2, cached, np.int32)
  part = slice(cached, cached + 4)
  extend = jax.jit(lambda q, k, v, state, n: kv_cache.extend_attention(n)(q, k, v, state))
  state = (keys, values) if cached else None
  out, (new_keys, new_values) = extend(q[:, part], k[:, part], v[:, part], state, lengths)
  np.testing.assert_allclose(out, want[:, part], atol=2e-5)
  keys[..., part], values[:, :, part] = new_keys, new_values

  decode = jax.jit(lambda q, k, v, state, n, i: kv_cache.decode_attention(n, i)(q, k, v, state))
  recent = (np.full((2, KV, SIZE, 3), poison, np.float32), np.full((2, KV, 3, SIZE), poison, np.float32))
  for i in range(3):
    at = slice(cached + 4 + i, cached + 5 + i)
    out, recent = decode(q[:, at], k[:, at], v[:, at], (keys, values, *recent), lengths + 4, np.int32(i))
    np.testing.assert_allclose(out, want[:, at], atol=2e-5)


def test_rows_of_different_length_do_not_see_each_other():
  rng = np.random.default_rng(3)
  q, k, v = attention_inputs(rng, 3, 1)
  keys, values = random_layers(rng, 3, 8)
  recent = (np.zeros((3, KV, SIZE, 2), np.float32), np.zeros((3, KV, 2, SIZE), np.float32))
  call = jax.jit(lambda q, k, v, state, n: kv_cache.decode_attention(n, jnp.int32(0))(q, k, v, state)[0])
  out = np.asarray(call(q, k, v, (keys, values, *recent), np.array([0, 3, 8], np.int32)))
  np.testing.assert_allclose(out[0].reshape(KV, 2, SIZE), np.repeat(v[0].reshape(KV, 1, SIZE), 2, axis=1), atol=1e-6)  # Sees itself alone.
  for row, length in ((1, 3), (2, 8)):
    all_k = np.concatenate([keys[row, :, :, :length], k[row].transpose(1, 2, 0)], axis=-1).astype(np.float64)  # [K, d, S]
    all_v = np.concatenate([values[row, :, :length], v[row].transpose(1, 0, 2)], axis=1).astype(np.float64)
    scores = np.einsum('kgd,kds->kgs', q[row].reshape(KV, 2, SIZE), all_k) / np.sqrt(SIZE)
    prob = np.exp(scores - scores.max(-1, keepdims=True))
    want = np.einsum('kgs,ksd->kgd', prob / prob.sum(-1, keepdims=True), all_v)
    np.testing.assert_allclose(out[row].reshape(KV, 2, SIZE), want, atol=1e-5)


def test_stacked_layers_hold_the_same_as_unrolled_ones():
  rng = np.random.default_rng(4)
  new = [random_layers(rng, 2, 6) for _ in range(2)]
  slots = np.arange(12, dtype=np.int32).reshape(2, 6)
  stack = lambda cache: tuple(jnp.stack([layer[i] for layer in cache]) for i in range(2))
  unrolled = kv_cache.write_pages(kv_cache.zeros(MODEL, 3, PAGE, jnp.float32), new, slots)
  scanned = kv_cache.write_pages(stack(kv_cache.zeros(MODEL, 3, PAGE, jnp.float32)), stack(new), slots)
  for a, b in zip(stack(unrolled), scanned):
    np.testing.assert_array_equal(a, b)
  joined = kv_cache.join(unrolled, new)
  assert len(joined) == 2 and len(joined[0]) == 4 and len(kv_cache.join(scanned, stack(new))) == 4


def test_page_pool_hands_each_page_to_one_session():
  pool = PagePool(6, PAGE)
  pool.grow(1, 5)
  pool.grow(2, 4)
  pool.grow(1, 9)
  assert len(pool.pages(1)) == 3 and len(pool.pages(2)) == 1 and pool.free == 2 and pool.used == 4
  assert len({*pool.pages(1), *pool.pages(2)}) == 4
  assert pool.missing(2, 4) == 0 and pool.missing(2, 5) == 1 and pool.missing(3, 0) == 0
  with pytest.raises(RuntimeError, match='3 pages needed, 2 free'):
    pool.grow(2, 16)
  assert pool.release(1) == 3 and pool.release(1) == 0 and pool.free == 5
  pool.reset()
  pool.grow(4, 24)
  assert pool.pages(4) == list(range(6))
  for bad in ((0, 4), (4, 0)):
    with pytest.raises(ValueError, match='at least one page'):
      PagePool(*bad)
