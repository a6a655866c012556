"""Checkpoints: exact restore, any mesh, donation, damage, failures, retention."""

import dataclasses
import json
import logging
import os
import pathlib
import shutil
import subprocess

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
import numpy as np
import optax
import pytest

from sao_jax import checkpoint
from sao_jax.checkpoint import CheckpointError, Checkpointer
from tests.rollout_factory import make_rollout
from tests.test_host_state import assert_same


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
  """As a learner's: parameters, optimizer state, scalars, a key."""

  policy: dict
  optimizer: object
  step: object
  key: object


def mesh_of(*sizes):
  count = int(np.prod(sizes))
  return jax.sharding.Mesh(np.array(jax.devices()[:count]).reshape(sizes), ('fsdp', 'tensor'))


def make_state(seed=0, mesh=None):
  rng = np.random.default_rng(seed)
  policy = {
      'trunk.layers.0.mlp.up': jnp.asarray(rng.standard_normal((16, 8)), jnp.float32),
      'trunk.embedding': jnp.asarray(rng.standard_normal((8, 16)), jnp.bfloat16),
      'head/odd name': jnp.asarray([np.nan, -0.0, np.inf, 1e-40], jnp.float32),
      'empty': jnp.zeros((0, 4), jnp.float32),
  }
  if mesh is not None:
    policy['trunk.layers.0.mlp.up'] = jax.device_put(policy['trunk.layers.0.mlp.up'], NamedSharding(mesh, P('fsdp', 'tensor')))
    policy['trunk.embedding'] = jax.device_put(policy['trunk.embedding'], NamedSharding(mesh, P(None, 'fsdp')))
  optimizer = optax.adamw(1e-3).init({k: v for k, v in policy.items() if k != 'empty'})
  return State(policy, optimizer, jnp.asarray(7, jnp.int32), jax.random.key(seed))


def bits(leaf):
  if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    leaf = jax.random.key_data(leaf)
  return np.asarray(leaf).tobytes()


def assert_same_arrays(a, b):
  a, b = checkpoint.flatten(a), checkpoint.flatten(b)
  assert list(a) == list(b) and len(a) > 5
  for name in a:
    assert a[name].dtype == b[name].dtype and a[name].shape == b[name].shape and bits(a[name]) == bits(b[name]), name


HOST = {'queue': {'queued': [make_rollout(ticket=3)], 'running': np.zeros((0, 2), np.int64)}, 'version': 5, 'rate': 0.1, 'stage': 'rl'}


@pytest.fixture
def checkpointer(tmp_path):
  made = Checkpointer(tmp_path / 'checkpoints', keep=2)
  yield made
  made.close()


def save_now(checkpointer, step, state=None, host=None):
  checkpointer.save(step, make_state(step) if state is None else state, HOST if host is None else host)
  checkpointer.wait()


# --- Restore -------------------------------------------------------------------------------------------------------------------


def test_round_trip_is_equal_in_every_bit(checkpointer):
  state = make_state(3)
  checkpointer.save(1, state, HOST)
  assert_same_arrays(checkpointer.restore(1, make_state(4)), state)
  assert_same(checkpointer.restore_host(1), HOST)
  assert checkpointer.latest_step() == 1


@pytest.mark.parametrize('saved, restored', [((4, 2), (2, 4)), ((8, 1), (1, 2)), ((1, 2), (4, 2))])
def test_another_mesh(checkpointer, saved, restored):
  state, like = make_state(3, mesh_of(*saved)), make_state(4, mesh_of(*restored))
  save_now(checkpointer, 1, state)
  abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
  found = checkpointer.restore(1, abstract)
  assert_same_arrays(found, state)
  for name, leaf in found.policy.items():
    assert leaf.sharding == like.policy[name].sharding, name


def test_a_new_process_sees_the_same(tmp_path):
  first = Checkpointer(tmp_path / 'c', keep=3)
  for step in (1, 5, 12):
    first.save(step, make_state(step), {'step': step})
  first.close()
  first.close()
  second = Checkpointer(tmp_path / 'c', keep=3)
  assert second.steps() == [1, 5, 12] and second.latest_step() == 12
  for step in (12, 5):
    assert second.restore_host(step) == {'step': step}
    assert_same_arrays(second.restore(step, make_state()), make_state(step))
  second.close()


def test_arrays_may_be_donated_as_soon_as_save_returns(checkpointer):
  """The next update overwrites the buffers while files are still being written."""
  update = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
  size = 1 << 20
  for step in range(1, 9):
    value = jnp.full((4, size), float(step))
    sharded = jax.device_put(jnp.full((8, size // 8), float(step)), NamedSharding(mesh_of(8, 1), P('fsdp')))
    tree = {'a': value, 'b': sharded}
    jax.block_until_ready(tree)
    checkpointer.save(step, tree, {})
    after = update(tree)
    for _ in range(3):
      after = update(after)
    jax.block_until_ready(after)
    assert float(after['a'].max()) == float(after['b'].max()) == -1
    found = checkpointer.restore(step, after)
    assert float(found['a'].min()) == float(found['a'].max()) == step
    assert float(found['b'].min()) == float(found['b'].max()) == step


def test_inside_a_loop_that_forbids_transfers(checkpointer):
  state = make_state(3, mesh_of(4, 2))
  jax.block_until_ready(state)
  with jax.transfer_guard('disallow'):
    checkpointer.save(1, state, HOST)
    found = checkpointer.restore(1, state)
  assert_same_arrays(found, state)


def test_host_state_may_change_as_soon_as_save_returns(checkpointer):
  host = {'list': [1, 2], 'array': np.arange(3)}
  checkpointer.save(1, make_state(), host)
  host['list'].append(3)
  host['array'][:] = 9
  assert_same(checkpointer.restore_host(1), {'list': [1, 2], 'array': np.arange(3)})


# --- Retention -----------------------------------------------------------------------------------------------------------------


def test_the_newest_ones_stay(checkpointer):
  for step in (1, 2, 3, 10):
    checkpointer.save(step, make_state(), {})
    assert len(checkpointer.steps()) <= 3
  checkpointer.wait()
  assert checkpointer.steps() == [3, 10]


def test_steps_go_forward(checkpointer):
  save_now(checkpointer, 4)
  for step in (4, 3):
    with pytest.raises(ValueError, match='Checkpoints go forward'):
      checkpointer.save(step, make_state(), {})


def test_keep_must_be_positive(tmp_path):
  with pytest.raises(ValueError, match='checkpoint.keep'):
    Checkpointer(tmp_path, keep=0)


def test_leftovers_of_a_killed_process_are_cleared_and_never_count(tmp_path):
  folder = tmp_path / 'c'
  for name in ('7.orbax-checkpoint-tmp', '8.orbax-checkpoint-tmp-1234', '3.deleting'):
    (folder / name / 'arrays').mkdir(parents=True)
  made = Checkpointer(folder, keep=2)
  assert made.latest_step() is None and list(folder.iterdir()) == []
  made.close()


# --- Wrong settings and damage -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('change, words', [
    (lambda s: dataclasses.replace(s, policy={**s.policy, 'more': jnp.zeros(2)}), r'policy:more is not in the checkpoint'),
    (lambda s: dataclasses.replace(s, policy={k: v for k, v in s.policy.items() if k != 'empty'}), r'policy:empty is only in the check'),
    (lambda s: dataclasses.replace(s, step=jnp.zeros((2,), jnp.int32)), r'step is int32\[\] there, int32\[2\] here'),
    (lambda s: dataclasses.replace(s, step=jnp.zeros((), jnp.float32)), r'step is int32\[\] there, float32\[\] here'),
])
def test_another_model_is_refused(checkpointer, change, words):
  save_now(checkpointer, 1)
  with pytest.raises(ValueError, match=words):
    checkpointer.restore(1, change(make_state()))


def test_values_that_are_no_arrays_are_refused(checkpointer):
  with pytest.raises(TypeError, match='a is a float'):
    checkpointer.save(1, {'a': 1.0}, {})
  with pytest.raises(TypeError, match='host.x is a set'):
    checkpointer.save(1, make_state(), {'x': {1}})
  assert checkpointer.latest_step() is None


def test_a_missing_step(checkpointer):
  save_now(checkpointer, 2)
  with pytest.raises(CheckpointError, match=r'no checkpoint of step 5 in .*saved are \[2\]'):
    checkpointer.restore(5, make_state())


def files_of(folder):
  return [p for p in sorted(folder.rglob('*')) if p.is_file()]


def damaged_at(directory, damage):
  """Applies `damage` to the newest of two checkpoints and gives the message that a fresh process gets."""
  made = Checkpointer(directory, keep=2)
  for step in (1, 2):
    made.save(step, make_state(step), HOST)
  made.close()
  damage(directory / '2')
  made = Checkpointer(directory, keep=2)
  assert made.latest_step() == 2
  with pytest.raises(CheckpointError) as found:
    made.restore_host(2)
    made.restore(2, make_state())
  assert_same_arrays(made.restore(1, make_state()), make_state(1))  # The older one is whole.
  made.close()
  return str(found.value)


def damage_file(name, how):
  def damage(folder):
    path = folder / name if '*' not in name else max(folder.glob(name), key=lambda p: p.stat().st_size)
    data = bytearray(path.read_bytes())
    if how == 'cut':
      path.write_bytes(data[:len(data) // 2])
    elif how == 'flip':
      data[len(data) // 2] ^= 1
      path.write_bytes(data)
    else:
      path.unlink()
  return damage


@pytest.mark.parametrize('how', ['cut', 'flip', 'gone'])
@pytest.mark.parametrize('name', [
    'host/state_0.npz', 'checksums.json', 'arrays/_METADATA', 'arrays/manifest.ocdbt', 'arrays/d/*', 'arrays/ocdbt.process_0/d/*'])
def test_damage_is_named_with_what_to_do(tmp_path, name, how):
  folder = tmp_path / 'c'
  message = damaged_at(folder, damage_file(name, how))
  assert f'The checkpoint {folder / "2"} is damaged' in message
  assert 'Delete that folder to go on; the run then goes on from step 1' in message
  shutil.rmtree(folder / '2')
  made = Checkpointer(folder, keep=2)
  assert made.latest_step() == 1
  made.close()


def test_an_emptied_folder(tmp_path):
  def damage(folder):
    shutil.rmtree(folder)
    folder.mkdir()
  assert 'checksums.json is missing' in damaged_at(tmp_path / 'c', damage)


def test_damage_without_an_older_one(tmp_path):
  made = Checkpointer(tmp_path, keep=1)
  save_now(made, 1)
  damage_file('host/state_0.npz', 'cut')(tmp_path / '1')
  with pytest.raises(CheckpointError, match='no older checkpoint, so the run then starts afresh'):
    made.restore_host(1)
  made.close()


# --- Failures of the file system -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize('where', ['under a file', '/proc/sao_jax'])
def test_a_directory_that_cannot_be_made_is_told_at_once(tmp_path, where):
  if where == 'under a file':
    (tmp_path / 'file').write_text('')
    where = tmp_path / 'file' / 'checkpoints'
  with pytest.raises(CheckpointError, match=f'Checkpoints cannot be written to {where}.*Choose a workdir'):
    Checkpointer(where, keep=1)


def test_a_failed_save_surfaces_at_the_next_call_and_harms_nothing(tmp_path, monkeypatch):
  made = Checkpointer(tmp_path / 'c', keep=2)
  save_now(made, 1)
  with monkeypatch.context() as patch:
    def fail(path):
      raise OSError(28, 'No space left on device', str(path))
    patch.setattr(checkpoint, '_crc', fail)
    made.save(2, make_state(2), HOST)
    with pytest.raises(CheckpointError, match=r'could not be written to .*No space left on device.*steps \[1\].*Make room'):
      made.save(3, make_state(3), HOST)
  assert [p.name for p in (tmp_path / 'c').iterdir()] == ['1']  # No leftover takes room.
  save_now(made, 4)
  assert made.steps() == [1, 4]
  made.close()


def test_the_reason_is_what_the_system_said():
  raw = ValueError(
      'RESOURCE_EXHAUSTED: Error writing "policy/0.0" in OCDBT database at local file "/w/1/": Failed to write 167843 bytes to file 20: '
      "No space left on device [os_error_code='28']")
  assert checkpoint._reason(raw) == 'No space left on device'
  assert checkpoint._reason(PermissionError(13, 'Permission denied', '/w')) == 'Permission denied'
  assert checkpoint._reason(ValueError('other')) == 'other' and checkpoint._reason(KeyError()) == 'KeyError'


@pytest.mark.parametrize('name, filename, shown', [
    ('absl', 'site-packages/orbax/checkpoint/futures.py', False), ('asyncio', 'site-packages/orbax/checkpoint/futures.py', False),
    ('absl', 'mine.py', True)])
def test_tracebacks_of_a_failed_save_are_told_once(tmp_path, name, filename, shown):
  Checkpointer(tmp_path, keep=1).close()
  seen = []
  handler = logging.Handler()
  handler.emit = seen.append
  logger = logging.getLogger(name)
  logger.addHandler(handler)
  try:
    exec(compile('raise ValueError("full")', filename, 'exec'))
  except ValueError:
    logger.exception('a thread raised')
  finally:
    logger.removeHandler(handler)
  assert bool(seen) == shown


def test_close_tells_of_a_failed_save(tmp_path, monkeypatch):
  made = Checkpointer(tmp_path / 'c', keep=2)
  monkeypatch.setattr(checkpoint, '_crc', lambda path: 1 / 0)
  made.save(1, make_state(), HOST)
  with pytest.raises(CheckpointError, match='division by zero'):
    made.close()
  made.close()


@pytest.fixture
def small_disk(tmp_path):
  """A file system of 8 MB, where this user may mount one."""
  folder = tmp_path / 'disk'
  folder.mkdir()
  mounted = subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=8m', 'tmpfs', str(folder)], capture_output=True)
  if mounted.returncode:
    pytest.skip('mounting needs more rights')
  yield folder
  subprocess.run(['umount', str(folder)], check=True)


def test_a_full_disk(small_disk):
  made = Checkpointer(small_disk / 'c', keep=2)
  rng = np.random.default_rng(0)
  big = {'a': jnp.asarray(rng.standard_normal(900_000), jnp.float32)}  # 3.6 MB that do not compress.
  made.save(1, big, {})
  made.save(2, big, {})
  with pytest.raises(CheckpointError, match=r'could not be written to .*steps \[1, 2\]'):
    made.save(3, big, {})
    made.wait()
  assert made.steps() == [1, 2]
  assert bits(made.restore(2, big)['a']) == bits(big['a'])
  made.close()


def test_checksums_cover_every_file(checkpointer, tmp_path):
  save_now(checkpointer, 1)
  folder = tmp_path / 'checkpoints' / '1'
  sums = json.loads((folder / checkpoint.CHECKSUMS).read_text())
  inside = {p.relative_to(folder).as_posix() for p in files_of(folder) if len(p.relative_to(folder).parts) > 1}
  assert set(sums) == inside and len(inside) >= 6
  assert pathlib.Path(os.fspath(folder / 'host' / 'state_0.npz')).is_file()


def test_reading_deletes_nothing(tmp_path):
  writer = Checkpointer(tmp_path / 'c', keep=5)
  for step in range(1, 6):
    writer.save(step, make_state(step), {'step': step})
  writer.close()
  reader = Checkpointer(tmp_path / 'c', keep=1)
  assert reader.restore_host(1) == {'step': 1}
  assert_same_arrays(reader.restore(1, make_state()), make_state(1))
  reader.close()
  assert Checkpointer(tmp_path / 'c', keep=1).steps() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize('sums', ['{}', 'one less'])
def test_checksums_that_leave_files_out_verify_nothing(tmp_path, sums):
  made = Checkpointer(tmp_path / 'c', keep=2)
  made.save(1, make_state(), {'step': 1})
  made.close()
  path = tmp_path / 'c' / '1' / 'checksums.json'
  listed = json.loads(path.read_text())
  path.write_text(sums if sums == '{}' else json.dumps(dict(list(listed.items())[1:])))
  with pytest.raises(CheckpointError, match=r'is damaged: checksums.json lists \d+ files, but there are'):
    Checkpointer(tmp_path / 'c', keep=2).restore_host(1)
