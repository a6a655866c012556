"""Meshes, rules, placement and conversion on eight virtual devices."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
import numpy as np
import pytest

from sao_jax import config as config_lib
from sao_jax import sharding
from sao_jax.models import transformer
from sao_jax.types import Batch

GOLDEN = pathlib.Path(__file__).parent / 'goldens' / 'partition_specs.json'
TINY = config_lib.ModelConfig(vocab_size=64, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=48)


def mesh_of(*sizes, count=8):
  return sharding.make_mesh(jax.devices()[:count], sizes)


def pointers(x):
  return {s.data.unsafe_buffer_pointer() for s in x.addressable_shards}


def test_eight_devices():
  assert len(jax.devices()) == 8


def test_make_mesh_fills_minus_one_and_names_axes():
  mesh = mesh_of(1, -1, 1, 1, 2)
  assert dict(mesh.shape) == {'data': 1, 'fsdp': 4, 'expert': 1, 'sequence': 1, 'tensor': 2}


@pytest.mark.parametrize('sizes, words', [
    ((1, 4, 1, 1, 1), 'need 4 devices, got 8'),
    ((3, -1, 1, 1, 1), 'multiple of 3 devices'),
    ((-1, -1, 1, 1, 1), 'at most one -1'),
    ((0, 8, 1, 1, 1), 'positive'),
    ((8,), 'needs 5 sizes'),
])
def test_impossible_mesh(sizes, words):
  with pytest.raises(ValueError, match=words):
    sharding.make_mesh(jax.devices(), sizes)


def test_pick_devices():
  assert sharding.pick_devices(()) == jax.devices()
  assert sharding.pick_devices((5, 2)) == [jax.devices()[5], jax.devices()[2]]
  with pytest.raises(ValueError, match='No device 8'):
    sharding.pick_devices((0, 8))
  with pytest.raises(ValueError, match='differ'):
    sharding.pick_devices((1, 1))


def test_rules_are_enforced():
  with pytest.raises(ValueError, match="'colour' has no sharding rule"):
    sharding.partition_spec(('embed', 'colour'))
  with pytest.raises(ValueError, match="'tensor' would split two"):
    sharding.partition_spec(('heads', 'mlp'))
  assert sharding.partition_spec(('embed', 'heads', 'head_dim')) == P('fsdp', 'tensor', None)


def test_sizes_that_do_not_divide():
  shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
  mesh = mesh_of(1, 2, 1, 1, 4)
  with pytest.raises(ValueError, match=r"w: axis 'heads' of size 6 .* 'tensor' of size 4"):
    sharding.param_shardings({'w': ('embed', 'heads', 'head_dim')}, {'w': shape(8, 6, 4)}, mesh)
  got = sharding.param_shardings(
      {'k': ('embed', 'kv_heads', 'head_dim'), 'e': ('vocab', 'embed')}, {'k': shape(8, 2, 4), 'e': shape(259, 8)}, mesh)
  assert got['k'].spec == P('fsdp', None, None) and got['e'].spec == P(None, 'fsdp')


@pytest.mark.parametrize('kind', [transformer.Policy, transformer.ValueModel])
@pytest.mark.parametrize('scan', [False, True])
def test_partition_specs_are_the_golden_ones(kind, scan):
  model = dataclasses.replace(TINY, qk_norm=True, qkv_bias=True, tie_embeddings=False, scan_layers=scan)
  _, shapes, axes = transformer.abstract(kind, model)
  shardings = sharding.param_shardings(axes, shapes, mesh_of(1, 4, 1, 1, 2))
  got = {p: [list(e) if isinstance(e, tuple) else e for e in s.spec] for p, s in shardings.items()}
  golden = json.loads(GOLDEN.read_text())[f'{kind.__name__}{"/scan_layers" if scan else ""}']
  assert got and got == golden


def test_place_batch_splits_rows():
  rows = np.arange(8 * 4).reshape(8, 4)
  batch = Batch(rows, rows > 0, rows > 1, rows / 2, rows / 4, rows, rows[:, 0] > 3, rows)
  with jax.transfer_guard('disallow'):
    placed = sharding.place_batch(batch, mesh_of(2, 4, 1, 1, 1))
  assert placed.tokens.sharding.spec == P(('data', 'fsdp'))
  assert placed.tokens.addressable_shards[0].data.shape == (1, 4)
  np.testing.assert_array_equal(placed.reward, rows / 4)


def layouts():
  devices = jax.devices()
  return {
      'one': sharding.make_mesh(devices[:1], (1, 1, 1, 1, 1)),
      'first four': sharding.make_mesh(devices[:4], (1, 2, 1, 1, 2)),
      'last four': sharding.make_mesh(devices[4:], (1, 1, 1, 1, 4)),
      'all': sharding.make_mesh(devices, (1, 4, 1, 1, 2)),
      'all, turned': sharding.make_mesh(devices[::-1], (1, 2, 1, 1, 4)),
  }


@pytest.mark.parametrize('source', ['one', 'first four', 'all'])
@pytest.mark.parametrize('target', ['one', 'first four', 'last four', 'all', 'all, turned'])
@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_converter_moves_casts_and_never_aliases(source, target, dtype):
  axes = {'a': ('embed', 'mlp'), 'b': ('embed',), 'c': (), 'd': ('vocab', 'embed')}
  rng = np.random.default_rng(0)
  host = {'a': rng.normal(size=(16, 8)), 'b': rng.normal(size=(16,)), 'c': np.float32(3), 'd': rng.normal(size=(7, 16))}
  host = {p: np.asarray(x, np.float32) for p, x in host.items()}
  meshes = layouts()
  params = {p: jax.device_put(x, sharding.param_shardings(axes, host, meshes[source])[p]) for p, x in host.items()}
  shardings = sharding.param_shardings(axes, host, meshes[target])
  convert = sharding.make_converter(shardings, dtype)
  with jax.transfer_guard('disallow'):
    result = convert(params)
    again = convert(params)
  for path, x in result.items():
    assert x.dtype == dtype and x.sharding == shardings[path]
    assert not pointers(x) & pointers(params[path]) and not pointers(x) & pointers(again[path])
    np.testing.assert_array_equal(np.asarray(x, np.float32), host[path].astype(dtype).astype(np.float32))
  for x in params.values():
    x.delete()
  jax.block_until_ready(jax.tree.map(lambda x: x + 0, result))  # The source is gone, the result stands.


def test_converter_refuses_other_paths():
  convert = sharding.make_converter({'a': sharding.replicated(mesh_of(1, -1, 1, 1, 1))}, jnp.float32)
  with pytest.raises(ValueError, match='different paths'):
    convert({'b': jnp.zeros(3)})


def test_shard_fn_constrains_and_leaves_odd_sizes_whole():
  shard = sharding.shard_fn(mesh_of(1, 4, 1, 1, 2))
  even = jax.jit(lambda x: shard(x, ('batch', 'length', 'mlp')))(np.zeros((8, 3, 6), np.float32))
  assert even.sharding.is_equivalent_to(NamedSharding(even.sharding.mesh, P(('data', 'fsdp'), None, 'tensor')), 3)
  odd = jax.jit(lambda x: shard(x, ('batch', 'length', 'mlp')))(np.zeros((3, 3, 6), np.float32))
  assert odd.sharding.is_equivalent_to(NamedSharding(odd.sharding.mesh, P(None, None, 'tensor')), 3)
  with pytest.raises(ValueError, match='no sharding rule'):
    jax.jit(lambda x: shard(x, ('batch', 'colour')))(np.zeros((8, 3), np.float32))


def test_check_replication():
  mesh = mesh_of(1, 4, 1, 1, 2)
  params = {
      'whole': jax.device_put(np.zeros(100, np.float32), sharding.replicated(mesh)),
      'split': jax.device_put(np.zeros((8, 100), np.float32), NamedSharding(mesh, P('fsdp'))),
  }
  sharding.check_replication(params, 400)
  with pytest.raises(ValueError, match=r'400 bytes .* whole \(400 bytes\)'):
    sharding.check_replication(params, 399)
  sharding.check_replication({'a': jnp.zeros(10)}, 0)  # One device: nothing is replicated.


def changed(**sections):
  base = config_lib.Config()
  return dataclasses.replace(base, **{k: dataclasses.replace(getattr(base, k), **v) for k, v in sections.items()})


def test_check_mesh_accepts_the_defaults_and_split_layouts():
  sharding.check_mesh(config_lib.Config())
  sharding.check_mesh(changed(
      learner={'mesh': (1, 2, 4, 1, 1)}, sampler={'mesh': (1, 1, 8, 1, 1)}, model={'experts': config_lib.ExpertsConfig(count=8, mlp_dim=8)}))
  sharding.check_mesh(changed(learner={'devices': (0, 1, 2, 3)}, sampler={'devices': (4, 5, 6, 7), 'mesh': (1, 1, 1, 1, 4)}))


@pytest.mark.parametrize('sections, words', [
    ({'learner': {'batch_size': 12}}, 'got 12 with micro_batches=1, data.fsdp=8; use a multiple of 8'),
    ({'learner': {'batch_size': 16, 'micro_batches': 4}}, 'use a multiple of 32'),
    ({'learner': {'devices': (0, 9)}}, 'No device 9'),
    ({'learner': {'devices': (0, 1)}, 'sampler': {'devices': (1, 2)}}, 'disjoint'),
    ({'sampler': {'mesh': (1, 1, 1, 1, 1)}}, r'sampler\.mesh: .* need 1 devices, got 8'),
    ({'learner': {'mesh': (1, 1, 1, 1, 8)}}, 'model.num_heads must be a multiple'),
    ({'learner': {'mesh': (1, 1, 1, 8, 1)}}, "axis 'sequence' must be 1"),
    ({'learner': {'mesh': (1, 1, 8, 1, 1)}}, "axis 'expert' must be 1"),
    ({'learner': {'mesh': (1, 2, 4, 1, 1)}, 'model': {'experts': config_lib.ExpertsConfig(count=6, mlp_dim=8)}},
     "model.experts.count must be a multiple of the 'expert' axis of learner.mesh: got 6 with expert=4"),
    ({'model': {'embed_dim': 100}}, 'model.embed_dim must be a multiple'),
])
def test_check_mesh_says_what_to_change(sections, words):
  with pytest.raises(ValueError, match=words):
    sharding.check_mesh(changed(**sections))
