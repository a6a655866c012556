"""Optimizer steps against AdamW written out in float64, schedules by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax import optim
from sao_jax.config import OptimizerConfig

YES = np.bool_(True)


def oracle(config, params, gradients):
  """AdamW with clipping by global norm and constant rate, float64."""
  params = {p: x.astype(np.float64) for p, x in params.items()}
  m, v = ({p: np.zeros_like(x) for p, x in params.items()} for _ in range(2))
  for step, gradient in enumerate(gradients, 1):
    norm = np.sqrt(sum(np.sum(np.square(g.astype(np.float64))) for g in gradient.values()))
    for p, g in gradient.items():
      g = g.astype(np.float64) * min(1.0, config.max_grad_norm / norm)
      m[p] = config.beta1 * m[p] + (1 - config.beta1) * g
      v[p] = config.beta2 * v[p] + (1 - config.beta2) * g * g
      direction = (m[p] / (1 - config.beta1**step)) / (np.sqrt(v[p] / (1 - config.beta2**step)) + config.epsilon)
      params[p] = params[p] - config.learning_rate * (direction + config.weight_decay * params[p])
  return params


def tree(rng, scale=1.0):
  return {'a': (scale * rng.normal(size=(3, 4))).astype(np.float32), 'b.c': (scale * rng.normal(size=5)).astype(np.float32)}


@pytest.mark.parametrize('scale', [0.01, 10.0])  # Below and above the clipping norm.
@pytest.mark.parametrize('weight_decay', [0.0, 0.1])
def test_adamw_matches_float64(scale, weight_decay):
  config = OptimizerConfig(learning_rate=1e-2, weight_decay=weight_decay)
  rng = np.random.default_rng(0)
  params, gradients = tree(rng), [tree(rng, scale) for _ in range(4)]
  optimizer = optim.make_optimizer(config)
  current, state = jax.tree.map(jnp.asarray, params), optim.init(optimizer, params)
  for gradient in gradients:
    current, state = jax.jit(lambda g, s, p: optim.apply(optimizer, g, s, p, accept=YES))(gradient, state, current)
  want = oracle(config, params, gradients)
  for path in params:
    np.testing.assert_allclose(current[path], want[path], rtol=1e-5, atol=1e-6)


def test_a_refused_step_changes_nothing():
  optimizer = optim.make_optimizer(OptimizerConfig(learning_rate=0.1))
  rng = np.random.default_rng(1)
  params = jax.tree.map(jnp.asarray, tree(rng))
  params, state = optim.apply(optimizer, tree(rng), optim.init(optimizer, params), params, accept=YES)
  for gradient in (tree(rng), {p: np.full_like(x, np.nan) for p, x in params.items()}):
    after = optim.apply(optimizer, gradient, state, params, accept=np.bool_(False))
    assert len(jax.tree.leaves(after)) > len(params)
    jax.tree.map(np.testing.assert_array_equal, after, (params, state))


def test_moments_are_float32_for_bfloat16_parameters():
  optimizer = optim.make_optimizer(OptimizerConfig(learning_rate=0.1))
  params = {p: jnp.asarray(x, jnp.bfloat16) for p, x in tree(np.random.default_rng(0)).items()}
  state = optim.init(optimizer, params)
  floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
  assert len(floats) == 2 * len(params) and all(x.dtype == jnp.float32 for x in floats)
  after, state = optim.apply(optimizer, params, state, params, accept=YES)
  assert all(x.dtype == jnp.bfloat16 for x in after.values())
  assert {x.dtype for x in jax.tree.leaves(state)} == {np.dtype('float32'), np.dtype('int32')}


def rates(**settings):
  rate = optim.schedule(OptimizerConfig(learning_rate=2.0, **settings))
  return [float(rate(np.int32(i))) for i in range(8)]


def test_schedules_by_hand():
  np.testing.assert_allclose(rates(), [2.0] * 8)
  np.testing.assert_allclose(rates(warmup_steps=4), [0.5, 1.0, 1.5] + [2.0] * 5)
  np.testing.assert_allclose(rates(schedule='linear', decay_steps=5), [2.0, 1.5, 1.0, 0.5, 0.0, 0.0, 0.0, 0.0])
  np.testing.assert_allclose(
      rates(schedule='linear', warmup_steps=2, decay_steps=6, end_fraction=0.5), [1.0, 2.0, 1.75, 1.5, 1.25, 1.0, 1.0, 1.0])
  cosine = [1 + np.cos(np.pi * i / 4) for i in range(5)]
  np.testing.assert_allclose(rates(schedule='cosine', decay_steps=5), cosine + [0.0] * 3, atol=1e-6)
