"""Parameter snapshots: versions, wholeness, no buffer shared with the learner."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax import sharding
from sao_jax.param_store import ParamStore


def make_params(value=0.0):
  return {'a': jnp.full((8, 4), value, jnp.float32), 'b.c': jnp.full((8,), value, jnp.float32)}


def converter(dtype=jnp.float32, devices=None):
  mesh = sharding.make_mesh(devices or jax.devices(), (1, -1, 1, 1, 1))
  shardings = {'a': jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('fsdp')), 'b.c': sharding.replicated(mesh)}
  return sharding.make_converter(shardings, dtype)


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize('count', [1, 4, 8])
def test_a_snapshot_outlives_the_donated_source(dtype, count):
  """The learner donates what it published; same devices, other devices, cast or not."""
  on_one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  update = jax.jit(lambda p: jax.tree.map(lambda x: x + 1, p), donate_argnums=0)
  params = jax.device_put(make_params(), on_one)
  store = ParamStore(converter(dtype, jax.devices()[:count]), params)
  snapshots = [store.latest()]
  for _ in range(3):
    params = update(params)
    snapshots.append(store.publish(params))
    old, params = params, update(params)
    assert all(x.is_deleted() for x in old.values())
  for i, snapshot in enumerate(snapshots):
    assert snapshot.version == i
    assert snapshot.params['a'].dtype == dtype
    value = 0 if i == 0 else 2 * i - 1
    np.testing.assert_array_equal(np.asarray(snapshot.params['a'], np.float32), np.full((8, 4), value))
    np.testing.assert_array_equal(np.asarray(snapshot.params['b.c'], np.float32), np.full((8,), value))


def test_versions_go_on_from_a_resumed_one():
  store = ParamStore(converter(), make_params(), version=7)
  assert (store.version, store.latest().version) == (7, 7)
  assert store.publish(make_params(1.0)).version == 8 and store.version == 8


def test_a_converter_that_aliases_is_refused():
  with pytest.raises(ValueError, match="very array of 'a'"):
    ParamStore(lambda params: params, make_params())


def test_a_failed_conversion_leaves_the_old_snapshot():
  store = ParamStore(converter(), make_params())
  with pytest.raises(ValueError, match='different paths'):
    store.publish({'a': jnp.zeros((8, 4))})
  assert store.version == 0 and set(store.latest().params) == {'a', 'b.c'}


def test_readers_see_one_version_whole():
  store = ParamStore(converter(), make_params())
  stop, failures = threading.Event(), []

  def read():
    seen = -1
    try:
      while not stop.is_set():
        snapshot = store.latest()
        assert snapshot.version >= seen
        seen = snapshot.version
        assert {float(x.ravel()[-1]) for x in map(np.asarray, snapshot.params.values())} == {float(seen)}
    except BaseException as error:
      failures.append(error)

  readers = [threading.Thread(target=read, daemon=True) for _ in range(2)]
  for reader in readers:
    reader.start()
  for version in range(1, 40):
    store.publish(make_params(float(version)))
  stop.set()
  for reader in readers:
    reader.join(60.0)
  assert not failures and not any(r.is_alive() for r in readers)


def test_publish_time_is_measured():
  now = iter([0.0, 0.5, 1.0, 2.5])
  store = ParamStore(converter(), make_params(), clock=lambda: next(now))
  assert store.publish_s == 0.0
  store.publish(make_params())
  assert store.publish_s == 0.5
  store.publish(make_params())
  assert store.publish_s == 1.5
