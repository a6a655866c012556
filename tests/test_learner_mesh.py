"""Micro-batches, devices and length buckets change nothing but round-off; after warm-up nothing compiles."""

import dataclasses
import re

import jax
import numpy as np
import pytest

from sao_jax import sharding
from tests.learner_factory import LENGTH, ROWS, host, make_batch, make_learner, start

DENOMINATORS = ('action_tokens', 'kept_tokens', 'trajectory')


def two_updates(learner):
  """Parameters on the host and metrics after two updates, and the state."""
  state, _ = learner.update(start(learner), make_batch(0), version=1, train_policy=True)
  state, metrics = learner.update(state, make_batch(1), version=1, train_policy=True)
  return host((state.policy, state.value_trainable, state.value_frozen)), learner.fetch(metrics, 1), state


def assert_same_run(got, want):
  for a, b in zip(got[0], want[0], strict=True):
    assert set(a) == set(b)
    for path in b:
      np.testing.assert_allclose(a[path], b[path], rtol=1e-4, atol=2e-5, err_msg=path)
  assert set(got[1]) == set(want[1]) and len(want[1]) > 15
  for name, stat in want[1].items():
    np.testing.assert_allclose([got[1][name].total, got[1][name].count], [stat.total, stat.count], rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize('denominator', DENOMINATORS)
def test_b30_micro_batches_change_nothing(denominator):
  algorithm = dict(denominator=denominator)
  whole = two_updates(make_learner(algorithm=algorithm))
  for parts in (2, 8):  # With 8, one part holds only the empty row.
    assert_same_run(two_updates(make_learner(algorithm=algorithm, micro_batches=parts)), whole)


@pytest.mark.slow
@pytest.mark.parametrize('mesh,settings', [
    ((2, 2, 1, 1, 2), dict(algorithm=dict(denominator='kept_tokens'), micro_batches=2)),
    ((1, 4, 1, 1, 2), dict(model=dict(tie_embeddings=False), algorithm=dict(denominator='trajectory'))),
    ((8, 1, 1, 1, 1), dict()),
    ((1, 2, 1, 1, 4), dict(model=dict(scan_layers=False))),  # Two key/value heads over four devices stay whole.
])
def test_b30_eight_devices_do_what_one_does(mesh, settings):
  one = two_updates(make_learner(**{k: v for k, v in settings.items() if k != 'micro_batches'}))
  learner = make_learner(8, mesh=mesh, **settings)
  many = two_updates(learner)
  assert_same_run(many, one)
  state, shapes = many[2], learner.abstract_state('rl')
  jax.tree.map(lambda x, s: (x.sharding == s.sharding) or pytest.fail(f'{x.sharding} is not {s.sharding}'), state, shapes)
  if mesh[1] > 1 or mesh[4] > 1:
    matrices = [x for x in jax.tree.leaves((state.policy, state.policy_opt, state.value_trainable, state.value_opt)) if x.size >= 256]
    assert len(matrices) > 20
    parts = mesh[1] * mesh[4]
    for x in matrices:
      assert x.addressable_shards[0].data.size <= x.size // min(parts, mesh[1] if 2 in x.shape else parts), (x.shape, x.sharding)


@pytest.mark.slow
def test_no_device_holds_full_logits_or_a_full_embedding_gradient_of_another_shard():
  """Vocabulary over 4 devices: in the compiled update every array with a vocabulary axis has a quarter of it."""
  learner = make_learner(8, mesh=(1, 2, 1, 1, 4), model=dict(vocab_size=1012), value_steps=0, logits_chunk=8)
  text = learner._program('rl', ROWS, LENGTH, True).as_text()
  shapes = {tuple(map(int, s.split(','))) for s in re.findall(r'f32\[([\d,]+)\]', text)}
  assert any(253 in s for s in shapes) and not any(1012 in s for s in shapes)


def test_nothing_compiles_after_warm_up():
  learner = make_learner(lengths=(LENGTH, 20), value_steps=1)
  learner.warm_up('rl')
  state = start(learner)
  batches = [make_batch(i, length=(LENGTH, 20)[i % 2]) for i in range(4)]
  compiled = []
  listen = lambda name, duration, **kwargs: compiled.append(name) if 'compile' in name else None
  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    with jax.transfer_guard('disallow'):
      for i, batch in enumerate(batches * 2):
        state, metrics = learner.update(state, batch, version=i, train_policy=i > 2)
        learner.fetch(metrics, i)
    assert compiled == []
    jax.jit(lambda x: x + 1)(np.float32(len(batches)))
    assert compiled  # The listener hears what compiles.
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)
  assert int(state.step) == 8


def test_rows_do_not_know_their_order_and_padding_is_nothing():
  learner = make_learner(lengths=(LENGTH, 20), value_steps=1)
  batch = make_batch()
  order = np.random.default_rng(0).permutation(ROWS)
  shuffled = jax.tree.map(lambda x: x[order], batch)
  longer = jax.tree.map(lambda x: np.pad(x, [(0, 0), (0, 20 - LENGTH)]) if x.ndim == 2 else x, batch)
  runs = []
  for b in (batch, shuffled, longer):
    state, metrics = learner.update(start(learner), b, version=1, train_policy=True)
    runs.append((host((state.policy, state.value_trainable)), learner.fetch(metrics, 0)))
  for run in runs[1:]:
    assert_same_run(run, runs[0])


def test_the_state_is_donated_and_the_given_parameters_are_not():
  learner = make_learner()
  policy = learner.init_policy(jax.random.key(0))
  state = learner.begin_stage(learner.init_state(policy), 'rl')
  old = state.policy['trunk.embedding']
  state, _ = learner.update(state, make_batch(), version=0, train_policy=True)
  assert old.is_deleted() and not policy['trunk.embedding'].is_deleted()


def test_abstract_state_is_that_of_every_stage():
  learner = make_learner()
  for stage in ('sft', 'value_pretrain', 'rl'):
    state, shapes = start(learner, stage), learner.abstract_state(stage)
    assert jax.tree.structure(state) == jax.tree.structure(shapes)
    for x, s in zip(jax.tree.leaves(state), jax.tree.leaves(shapes), strict=True):
      assert x.shape == s.shape and x.dtype == s.dtype and x.sharding == s.sharding


def test_parameter_shardings_are_those_of_the_table():
  learner = make_learner(8, mesh=(1, 4, 1, 1, 2))
  state = start(learner)
  assert state.policy['trunk.embedding'].sharding.spec == jax.sharding.PartitionSpec('tensor', 'fsdp')
  sharding.check_replication(state.policy, 4096)


def test_one_update_with_empty_batch_changes_nothing():
  learner = make_learner()
  state = start(learner)
  before = host(dataclasses.replace(state, step=0))
  batch = make_batch()
  nothing = np.zeros_like(batch.action_mask)
  state, metrics = learner.update(state, dataclasses.replace(batch, action_mask=nothing, token_mask=nothing), version=0, train_policy=True)
  jax.tree.map(np.testing.assert_array_equal, before, host(dataclasses.replace(state, step=0)))
  assert all(s.count == 0 for s in learner.fetch(metrics, 0).values())
