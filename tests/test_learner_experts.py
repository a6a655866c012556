"""Training mixtures of experts and latent attention: the load-balancing loss, frozen routers, what never learns."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from sao_jax import sharding
from sao_jax.config import ExpertsConfig, LatentConfig
from sao_jax.learner import Learner
from sao_jax.models import transformer
from tests.learner_factory import host, make_batch, make_config

EXPERTS = ExpertsConfig(count=4, top_k=2, mlp_dim=8)
SIGMOID = ExpertsConfig(count=4, top_k=2, mlp_dim=8, shared=1, router='sigmoid', scale=2.0, dense_layers=(0,))
LATENT = LatentConfig(
    rank=12, query_rank=8, plain_dim=6, rotary_dim=2, value_dim=8, index_top_k=4, index_heads=4, index_dim=8, shared_index_layers=(2,))
DSA = dict(experts=SIGMOID, latent=LATENT, num_layers=3, num_kv_heads=4, head_dim=8, qk_norm=False)


@functools.cache
def params_of(model):
  return host(jax.jit(lambda key: transformer.init(transformer.Policy, model, key))(jax.random.key(0)))


@functools.cache
def learner_of(devices, mesh, model, settings):
  config = make_config(model=dict(model), mesh=mesh, **dict(settings))
  return Learner(config, sharding.make_mesh(jax.devices()[:devices], mesh))


def make_learner(devices=1, mesh=(1, -1, 1, 1, 1), model=None, **settings):
  model = {'experts': EXPERTS} if model is None else model
  return learner_of(devices, mesh, tuple(model.items()), tuple(settings.items()))


def step(learner, batch=None, stage='rl'):
  """Policy before and after one update of the policy, and its metrics; the value model does not learn."""
  params = params_of(learner.config.model)
  state = learner.begin_stage(learner.init_state(jax.device_put(params)), stage)
  optimizer = [x.shape for x in jax.tree.leaves(state.policy_opt)]
  batch = make_batch() if batch is None else batch
  if stage == 'sft':
    state, metrics = learner.sft_update(state, batch)
  else:
    state, metrics = learner.update(state, batch, version=2, train_policy=True)
  return params, host(state.policy), learner.fetch(metrics, 1), optimizer


def moved(before, after):
  return {p for p in before if np.any(before[p] != after[p])}


@pytest.mark.parametrize('devices, mesh, micro', [
    (1, (1, 1, 1, 1, 1), 4), pytest.param(8, (1, 4, 2, 1, 1), 1, marks=pytest.mark.slow), pytest.param(8, (2, 2, 1, 1, 2), 2, marks=pytest.mark.slow)], ids=str)
def test_balance_loss_is_the_same_for_micro_batches_and_devices(devices, mesh, micro):
  _, want, metrics, _ = step(make_learner(balance_coefficient=0.5, value_steps=0))
  _, got, metrics_2, _ = step(make_learner(devices, mesh, balance_coefficient=0.5, value_steps=0, micro_batches=micro))
  for name in ('balance_loss', 'load_max_over_mean', 'unused_fraction'):
    np.testing.assert_allclose(metrics_2[f'experts/{name}'].mean(), metrics[f'experts/{name}'].mean(), rtol=1e-5)
  for path in want:
    np.testing.assert_allclose(got[path], want[path], rtol=2e-4, atol=2e-5, err_msg=path)


@pytest.mark.slow
def test_gradient_of_the_balance_loss_is_proportional_to_its_coefficient():
  """Large epsilon and rate: a step is nearly proportional to its gradient."""
  optimizer = dataclasses.replace(make_config().learner.policy, epsilon=1e4, learning_rate=1e4)
  at = {}
  for coefficient in (0.0, 0.5, 1.0):
    before, after, metrics, _ = step(make_learner(balance_coefficient=coefficient, value_steps=0, policy=optimizer))
    at[coefficient] = {p: after[p] - before[p] for p in before}
    assert metrics['experts/balance_loss'].mean() >= 1.0 and metrics['experts/load_max_over_mean'].mean() >= 1.0
  half, whole = ({p: at[c][p] - at[0.0][p] for p in at[c]} for c in (0.5, 1.0))
  router = [p for p in whole if p.endswith('router.weight')]
  assert router and all(np.max(np.abs(whole[p])) > 1e-4 for p in router)
  for path in router:
    np.testing.assert_allclose(whole[path], 2 * half[path], rtol=0.02, atol=1e-6)


def test_padding_has_no_part_in_the_balance_loss():
  """Other tokens behind the ends of rows change neither loss nor step."""
  learner = make_learner(balance_coefficient=0.5, value_steps=0)
  batch = make_batch()
  other = dataclasses.replace(batch, tokens=np.where(batch.token_mask, batch.tokens, (batch.tokens + 17) % 64).astype(np.int32))
  assert np.any(other.tokens != batch.tokens)
  _, want, metrics, _ = step(learner, batch)
  _, got, metrics_2, _ = step(learner, other)
  assert metrics_2['experts/balance_loss'].total == metrics['experts/balance_loss'].total
  for path in want:
    np.testing.assert_allclose(got[path], want[path], rtol=1e-6, atol=1e-7, err_msg=path)


def test_the_balance_loss_is_logged_apart_and_leaves_the_policy_loss_alone():
  _, without, metrics, _ = step(make_learner(value_steps=0))
  _, balanced, metrics_2, _ = step(make_learner(balance_coefficient=0.5, value_steps=0))
  assert metrics_2['policy/loss'].total == pytest.approx(metrics['policy/loss'].total, rel=1e-5)
  assert metrics_2['experts/balance_loss'].mean() == pytest.approx(float(metrics['experts/balance_loss'].mean()), rel=1e-5)
  assert np.max(np.abs(without['trunk.layers.0.mlp.router.weight'] - balanced['trunk.layers.0.mlp.router.weight'])) > 1e-6
  assert not any(name.startswith('experts/') for name in step(make_learner(model={}, value_steps=0))[2])


def test_the_value_model_learns_from_its_returns_alone():
  """Its loss is the squared error and nothing else: the coefficient changes no bit of it, though its experts and routers learn."""
  def values(coefficient):
    learner = make_learner(balance_coefficient=coefficient)
    state = learner.begin_stage(learner.init_state(jax.device_put(params_of(learner.config.model))), 'rl')
    before = host(state.value_trainable)
    return before, host(learner.update(state, make_batch(), version=2, train_policy=False)[0].value_trainable)

  (before, without), (_, balanced) = values(0.0), values(0.5)
  assert {'trunk.layers.0.mlp.router.weight', 'trunk.layers.0.mlp.experts.gate'} <= moved(before, without) and not moved(without, balanced)


def test_a_coefficient_of_zero_adds_nothing_to_the_program():
  """Not a product with zero: the loss is not differentiated at all, so a router of no finite probabilities could not matter either."""
  learner = make_learner(value_steps=0)
  params = params_of(learner.config.model)
  out = jax.eval_shape(lambda p: learner._updates._hidden_and_balance(p, jax.device_put(make_batch()), None), params)
  assert out[0][1] is None and out[1].chosen.shape == (1, 4)


def test_a_balance_loss_without_experts_is_refused():
  with pytest.raises(ValueError, match='balance_coefficient must be 0 for a model without experts, got 0.5'):
    make_learner(model={}, balance_coefficient=0.5)


@pytest.mark.parametrize('stage', ['rl', pytest.param('sft', marks=pytest.mark.slow)])
def test_a_frozen_router_has_no_step_and_no_optimizer_state(stage):
  before, after, _, optimizer = step(make_learner(freeze_router=True, value_steps=0, balance_coefficient=0.5), stage=stage)
  learning = moved(before, after)
  router = {p for p in before if '.router.' in p}
  assert router and not learning & router and len(learning) == len(before) - len(router)
  assert before['trunk.layers.0.mlp.router.weight'].shape not in optimizer
  assert moved(*step(make_learner(value_steps=0), stage=stage)[:2]) == set(before)


def test_what_only_makes_a_choice_never_learns():
  """One update of policy and value model with latent attention, index, sigmoid router and weight decay."""
  decay = dataclasses.replace(make_config().learner.policy, weight_decay=0.1)
  learner = make_learner(model=DSA, policy=decay, value=decay)
  params = params_of(learner.config.model)
  state = learner.begin_stage(learner.init_state(jax.device_put(params)), 'rl')
  value_before = host(state.value_trainable | state.value_frozen)
  state, metrics = learner.update(state, make_batch(), version=2, train_policy=True)
  learner.fetch(metrics, 1)
  still = {p for p in params if '.indexer.' in p or p.endswith('correction')}
  assert moved(params, host(state.policy)) == set(params) - still and len(still) == 2 * 5 + 2
  attention = {p for p in value_before if '.attention.' in p or p == 'trunk.embedding'}
  learns = moved(value_before, host(state.value_trainable | state.value_frozen))
  assert not learns & (attention | still) and {'head', 'head_bias'} <= learns
  assert set(state.value_frozen) == attention | {p for p in still if p in value_before}


@pytest.mark.slow
@pytest.mark.parametrize('sizes', [(1, 2, 2, 1, 2), (2, 1, 4, 1, 1)], ids=str)
def test_a_step_on_a_mesh_equals_one_device(sizes):
  _, want, metrics, _ = step(make_learner(model=DSA, value_steps=0, balance_coefficient=0.1))
  _, got, metrics_2, _ = step(make_learner(8, sizes, model=DSA, value_steps=0, balance_coefficient=0.1))
  for path in want:
    np.testing.assert_allclose(got[path], want[path], rtol=2e-4, atol=2e-5, err_msg=path)
  np.testing.assert_allclose(metrics_2['policy/loss'].mean(), metrics['policy/loss'].mean(), rtol=1e-4)
