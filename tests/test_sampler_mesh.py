"""The sampler on meshes of several devices: the same draws as on one, and a cache that is split."""

import dataclasses

import jax
import numpy as np
import pytest

from sao_jax import sharding
from sao_jax.models import transformer
from tests.sampler_factory import MODEL, make_params, make_prompts, make_sampler, same

# Sizes that the meshes divide: 4 key/value heads, 8 slots.
WIDE = dataclasses.replace(MODEL, num_kv_heads=4, vocab_size=64)
SETTINGS = dict(slots=8, prefill_rows=(8,), sessions=8)
PROMPTS = make_prompts(11, vocab=64)
LIMITS = [3, 9, 14, 20, 1, 6, 11, 4, 17, 8, 2]


@pytest.fixture(scope='module')
def reference():
  return make_sampler(WIDE, **SETTINGS).generate(PROMPTS, max_new_tokens=LIMITS)


def placed(model, mesh):
  _, shapes, axes = transformer.abstract(transformer.Policy, model)
  return jax.device_put(make_params(model), sharding.param_shardings(axes, shapes, mesh))


@pytest.mark.slow
@pytest.mark.parametrize('sizes', [(1, 4, 1, 1, 2), (2, 1, 1, 1, 4), (1, 2, 1, 1, 2)], ids=str)
def test_meshes_draw_the_same(reference, sizes):
  mesh = sharding.make_mesh(jax.devices()[: int(np.prod(sizes))], sizes)
  sampler = make_sampler(WIDE, mesh=mesh, params=placed(WIDE, mesh), **SETTINGS)
  out = sampler.generate(PROMPTS, max_new_tokens=LIMITS)
  assert len(out) == 11 and all(same(a, b, 2e-5) for a, b in zip(reference, out))
  batch, tensor = sizes[0] * sizes[1], sizes[4]
  for cache, rows in ((sampler._pool, sampler.stats()['pages_total']), (sampler._work, 8)):
    for keys, values in cache:
      assert keys.shape[0] == values.shape[0] == rows and keys.shape[1] == 4
      for x in (keys, values):
        assert x.addressable_shards[0].data.shape[:2] == (rows // batch, 4 // tensor)


@pytest.mark.slow
def test_heads_and_rows_that_the_mesh_does_not_divide_stay_whole():
  mesh = sharding.make_mesh(jax.devices()[:8], (1, 2, 1, 1, 4))
  model = dataclasses.replace(MODEL, vocab_size=64)  # Two key/value heads on a tensor axis of four.
  settings = dict(SETTINGS, slots=3, prefill_rows=(3,))
  want = make_sampler(model, **settings).generate(PROMPTS, max_new_tokens=LIMITS)
  sampler = make_sampler(model, mesh=mesh, params=placed(model, mesh), **settings)
  out = sampler.generate(PROMPTS, max_new_tokens=LIMITS)
  assert len(out) == 11 and all(same(a, b, 2e-5) for a, b in zip(want, out))
  assert sampler._work[0][0].addressable_shards[0].data.shape[:2] == (3, 2)


@pytest.mark.slow
def test_parameters_on_one_device_are_spread_over_the_mesh(reference):
  mesh = sharding.make_mesh(jax.devices()[:8], (1, 4, 1, 1, 2))
  sampler = make_sampler(WIDE, mesh=mesh, **SETTINGS)
  assert all(same(a, b, 2e-5) for a, b in zip(reference, sampler.generate(PROMPTS, max_new_tokens=LIMITS)))
  table = sampler._params['trunk.embedding']
  assert table.addressable_shards[0].data.size == table.size // 8
