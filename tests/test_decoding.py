"""The compiled functions of the sampler as production compiles them: what they copy, and the closed list of their shapes."""

import re

import jax
import numpy as np
import pytest

from sao_jax import decoding
from sao_jax import sharding
from sao_jax.config import ModelConfig, SamplerConfig
from tests.sampler_factory import make_sampler


def one_device():
  return sharding.make_mesh(jax.devices()[:1], (1, 1, 1, 1, 1))


def shapes(max_length, **settings):
  return decoding.make_shapes(ModelConfig(), SamplerConfig(**settings), one_device(), max_length)


def copies(compiled, shape_pattern):
  """Copies of arrays of that shape in the optimised program; the pattern must occur in it at all."""
  text = compiled.as_text()
  assert re.search(rf'f32\[{shape_pattern}\]', text)
  return re.findall(rf'= f32\[{shape_pattern}\]\S* copy\(', text)


def test_pages_and_rows_are_written_in_place():
  """A copy of all pages at every call would cost more than the call. 50 pages of 4, rows of 96."""
  sampler = make_sampler(pages=50)
  programs, put, pool = sampler._programs, sampler._programs.put, sampler._pool
  pages, rows = '50,2,(8,4|4,8)', '4,2,(8,96|96,8)'
  work = programs.rebuild(pool, put(np.zeros((4, 24), np.int32)))
  cached = programs.read(pool, put(np.zeros((4, 24), np.int32)))
  scalars = put((np.int32(2), np.float32(1)))
  decode = programs.decode.lower(sampler._params, pool, work, put(np.zeros((4, 8), np.int32)), *scalars).compile()
  assert not copies(decode, pages) and not copies(decode, rows)
  for read in (None, cached):
    assert not copies(programs.prefill.lower(sampler._params, pool, read, put(np.zeros((4, 33), np.int32))).compile(), pages)
  assert not copies(programs.load.lower(work, pool, put(np.zeros((4, 25), np.int32))).compile(), f'({pages}|{rows})')
  memory = decode.memory_analysis()
  assert memory.alias_size_in_bytes >= 2 * 2 * 4 * (50 * 2 * 8 * 4 + 4 * 2 * 8 * 96)  # Two layers, keys and values, pages and rows.
  assert memory.temp_size_in_bytes < 50_000


@pytest.mark.parametrize('max_length, page, given, want', [
    (128, 16, (), (64, 128)), (288, 16, (), (64, 128, 256, 288)), (30, 16, (), (32,)), (100, 7, (), (28, 56, 105)),
    (128, 16, (10, 40, 500), (16, 48, 128)), (5, 4, (), (8,))])
def test_buckets_of_cached_length(max_length, page, given, want):
  found = shapes(max_length, page_size=page, cache_lengths=given)
  assert found.cached == want and found.prefill_cached[0] == 0 and found.prefill_cached[-1] == want[-1]
  assert set(found.prefill_cached[1:]) <= set(want)


def test_buckets_of_prefill_are_clipped_to_what_can_occur():
  found = shapes(40, slots=5, prefill_rows=(2, 8, 64), prefill_lengths=(16, 64, 256))
  assert found.prefill_rows == (2, 5) and found.prefill_lengths == (16, 40) and found.load_rows == 2
  assert decoding.bucket((2, 5), 1) == 2 and decoding.bucket((2, 5), 3) == 5 and decoding.bucket((2, 5), 9) == 5


def test_pages_divide_over_the_mesh():
  mesh = sharding.make_mesh(jax.devices()[:8], (1, 4, 1, 1, 2))
  assert decoding.make_shapes(ModelConfig(), SamplerConfig(sessions=3, page_size=10), mesh, 30).pages == 12
  assert decoding.make_shapes(ModelConfig(), SamplerConfig(pages=3, page_size=10), mesh, 30).pages == 4
  with pytest.raises(ValueError, match='got 2 pages of 10; use 3 or more'):
    shapes(30, pages=2, page_size=10)
