"""The estimate of memory: compared with what a run really allocates, and refusals that say what to lower."""

import logging
import re

import jax
import pytest
from tiny_run import tiny_config

from sao_jax import memory, parts


def built(tmp_path, **overrides):
  return parts.build(tiny_config(**overrides), tmp_path)


def items_of(made):
  found = memory.items(made.config, made.learner, made.sampler_mesh, made.max_length)
  return {item.name: item for item in found}


def test_parameters_optimizers_and_cache_are_counted_to_the_byte(tmp_path):
  made = built(tmp_path, learner__devices=(0,), sampler__devices=(0,))
  found = items_of(made)
  policy = made.learner.init_policy(jax.random.key(0))
  state = made.learner.begin_stage(made.learner.init_state(policy), 'rl')

  def allocated(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree))

  assert found['parameters of the policy'].device_bytes == allocated(state.policy) > 100_000
  assert found["the policy's optimizer state"].device_bytes == allocated(state.policy_opt)
  assert found['parameters of the value model'].device_bytes == allocated((state.value_trainable, state.value_frozen))
  assert found["the value model's optimizer state"].device_bytes == allocated(state.value_opt)
  assert found["the sampler's copy of the policy"].device_bytes == allocated(state.policy)
  sampler = made.make_sampler(parts.ParamSnapshot(0, made.convert(state.policy)), seed=0)
  assert found['pages of the cache'].device_bytes == allocated(sampler._pool) == 2 * 2 * 16 * 24 * 64 * 4
  made.close()


def test_a_run_without_training_holds_no_optimizer(tmp_path):
  made = built(tmp_path, rl__policy_steps=0, sft__steps=0, value_pretrain__rollouts=0)
  assert set(items_of(made)) == {
      'parameters of the policy', "the sampler's copy of the policy", 'pages of the cache', "the decoding rows' cache",
      "the sampler's logits"}
  made.close()


@pytest.mark.parametrize('share, fits', [(0.99, False), (1.01, True)])
def test_the_bound_is_what_is_available(tmp_path, share, fits):
  made = built(tmp_path)
  found = list(items_of(made).values())
  needed = sum(item.device_bytes * item.mesh.devices.size for item in found)
  if fits:
    memory.check(found, int(share * needed), free=10**15)
  else:
    with pytest.raises(ValueError, match='needs at least .* MB of memory on this host, and it has .* The largest parts: .*; .*; .* Lower'):
      memory.check(found, int(share * needed), free=10**15)
  made.close()


def test_a_busy_host_is_a_warning_and_no_refusal(tmp_path, monkeypatch, caplog):
  """What others hold for now says nothing about whether the run fits."""
  monkeypatch.setattr(memory, 'free_host_bytes', lambda: 1000)
  with caplog.at_level(logging.WARNING):
    made = built(tmp_path)
  assert len(caplog.messages) == 1
  assert re.search('needs at least .* MB of memory on this host, and 1 kB of its .* GB are free now', caplog.text)
  caplog.clear()
  found = list(items_of(made).values())
  for free in (10**15, None):
    monkeypatch.setattr(memory, 'free_host_bytes', lambda free=free: free)
    memory.check(found)
    memory.check(found, total=10**15)
  assert not caplog.messages
  made.close()


@pytest.mark.parametrize('overrides, culprit', [
    ({'model__vocab_size': 4_000_000, 'model__embed_dim': 8192}, "optimizer state, .*model.vocab_size"),
    ({'model__mlp_dim': 4_000_000, 'model__embed_dim': 8192}, "optimizer state, .*model.mlp_dim"),
    ({'sampler__sessions': 1_000_000, 'model__num_kv_heads': 2, 'model__head_dim': 512}, 'pages of the cache, .*sampler.sessions'),
    ({'sampler__pages': 100_000_000}, 'pages of the cache, .*sampler.pages'),
    ({'sampler__slots': 1_000_000, 'sampler__sessions': 1_000_000, 'model__num_kv_heads': 2, 'model__head_dim': 512}, 'sampler.slots'),
    ({'learner__batch_size': 1_000_000, 'queue__capacity': 1_000_000, 'value_pretrain__rollouts': 0}, 'learner.batch_size'),
    ({'learner__lengths': (64, 16_000_000), 'learner__batch_size': 64, 'queue__capacity': 64, 'value_pretrain__rollouts': 0},
     'learner.lengths')])
def test_what_this_machine_cannot_hold_is_refused_before_anything_is_allocated(tmp_path, monkeypatch, overrides, culprit):
  monkeypatch.setattr(memory, 'host_bytes', lambda: 16 * 10**9)
  with pytest.raises(ValueError, match=f'it has 16.0 GB.*{culprit}.*Lower these settings'):
    built(tmp_path, **overrides)
  assert not list(tmp_path.iterdir())


def test_the_host_says_how_much_it_has(tmp_path, monkeypatch):
  monkeypatch.setattr(memory, 'CONTROL_GROUP', tmp_path)
  whole = memory.host_bytes()
  assert whole > 10**8
  for name, content, expected in (
      ('memory.max', 'max\n', whole), ('memory.max', '123456789\n', 123456789), ('memory/memory.limit_in_bytes', '123456788\n', 123456788)):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(content)
    assert memory.host_bytes() == expected and memory.free_host_bytes() <= expected
