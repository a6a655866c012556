"""The loop over chunks against full logits and automatic differentiation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax import algorithms, log_probs

V, D, B, T = 23, 6, 4, 9
objective = functools.partial(algorithms.dis_policy_loss, epsilon_low=0.5, epsilon_high=1.0)


def unembed(hidden, weight):
  return jnp.einsum('...d,vd->...v', hidden, weight)


def make_head(temperature=1.0, chunk=5, groups=1):
  return log_probs.Head(unembed=unembed, temperature=temperature, chunk=chunk, groups=groups, shard=lambda x, axes: x)


def inputs(keep=0.6, seed=0):
  rng = np.random.default_rng(seed)
  hidden, weight = rng.normal(size=(B, T, D)).astype(np.float32), rng.normal(size=(V, D)).astype(np.float32)
  tokens, mask = rng.integers(0, V, (B, T)).astype(np.int32), rng.random((B, T)) < keep
  mask[:, 0] = False
  behaviour, advantage = (rng.normal(size=(B, T)).astype(np.float32) - 3 for _ in range(2))
  return hidden, weight, tokens, mask, behaviour, advantage + 3


def dense(hidden, weight, tokens, mask, temperature):
  """log_prob and entropy f32[B, T] from full logits; position 0 has none."""
  logs = jax.nn.log_softmax(unembed(hidden, weight)[:, :-1] / temperature, axis=-1)
  log_prob = jnp.take_along_axis(logs, tokens[:, 1:, None], axis=-1)[..., 0]
  entropy = -jnp.sum(jnp.exp(logs) * logs, axis=-1)
  pad = lambda x: jnp.where(mask, jnp.pad(x, [(0, 0), (1, 0)]), 0.0)
  return pad(log_prob), pad(entropy)


@pytest.mark.parametrize('chunk,groups', [(1, 1), (5, 1), (8, 2), (1000, 1), (4, 4)])
@pytest.mark.parametrize('keep', [0.0, 0.3, 1.0])
def test_values_and_gradients_match_full_logits(chunk, groups, keep):
  hidden, weight, tokens, mask, behaviour, advantage = inputs(keep)
  run = jax.jit(functools.partial(log_probs.token_terms, make_head(0.7, chunk, groups), objective=objective, with_gradient=True))
  terms = run(hidden, weight, tokens, mask, inputs=(behaviour, advantage))

  def loss(hidden, weight):
    return objective(dense(hidden, weight, tokens, mask, 0.7)[0], behaviour, advantage, mask)['loss'].total

  log_prob, entropy = dense(hidden, weight, tokens, mask, 0.7)
  want = jax.grad(loss, argnums=(0, 1))(hidden, weight)
  stats = objective(log_prob, behaviour, advantage, mask)
  np.testing.assert_allclose(terms.log_prob, log_prob, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(terms.entropy, entropy, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(terms.hidden_gradient, want[0], rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(terms.weight_gradient, want[1], rtol=1e-4, atol=1e-5)
  for name, stat in stats.items():
    np.testing.assert_allclose([terms.stats[name].total, terms.stats[name].count], [stat.total, stat.count], rtol=1e-5, atol=1e-5)
  if keep == 0.0:
    assert not np.any(terms.hidden_gradient) and not np.any(terms.weight_gradient)


@pytest.mark.parametrize('temperature,expected', [(1.0, -0.12693), (0.5, -0.01815)])
def test_b09_log_probabilities_are_of_the_tempered_softmax(temperature, expected):
  """Logits 2, 0; token 0."""
  hidden = np.array([[[2.0, 0.0], [0.0, 0.0]]], np.float32)
  terms = log_probs.token_terms(
      make_head(temperature), hidden, np.eye(2, dtype=np.float32), np.zeros((1, 2), np.int32), np.array([[False, True]]),
      algorithms.supervised_loss, (), with_gradient=False)
  np.testing.assert_allclose(terms.log_prob, [[0.0, expected]], atol=5e-6)
  assert terms.hidden_gradient is None and terms.weight_gradient is None


def test_the_first_token_is_predicted_by_nothing():
  hidden, weight, tokens, _, behaviour, advantage = inputs()
  terms = log_probs.token_terms(
      make_head(), hidden, weight, tokens, np.ones((B, T), bool), objective, (behaviour, advantage), with_gradient=True)
  assert not np.any(np.asarray(terms.log_prob)[:, 0]) and float(terms.stats['loss'].count) == B * (T - 1)


def test_hidden_states_of_unselected_positions_cannot_matter():
  """B07: NaN where nothing is predicted leaves value and gradients as they were."""
  hidden, weight, tokens, mask, behaviour, advantage = inputs()
  run = functools.partial(log_probs.token_terms, make_head(), objective=objective, with_gradient=True)
  clean = run(hidden, weight, tokens, mask, inputs=(behaviour, advantage))
  selected = np.concatenate([mask[:, 1:], np.zeros((B, 1), bool)], axis=1)
  poison = [np.where(mask, x, np.nan).astype(np.float32) for x in (behaviour, advantage)]
  assert 0 < np.sum(selected) < selected.size
  for bad in (1e30, np.nan, np.inf):
    dirty = run(np.where(selected[..., None], hidden, bad).astype(np.float32), weight, tokens, mask, inputs=tuple(poison))
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(dirty))


@pytest.mark.parametrize('scale', [1e3, 1e4])
def test_large_logits_stay_finite(scale):
  hidden, weight, tokens, mask, behaviour, advantage = inputs()
  terms = log_probs.token_terms(
      make_head(), hidden * scale, weight, tokens, mask, objective, (behaviour, advantage), with_gradient=True)
  assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(terms))
  assert np.all(np.asarray(terms.entropy) >= -1e-6)


@pytest.mark.parametrize('vocabulary, chunk', [(259, 1024), (32768, 512), (49152, 256), (151936, 128), (10**6, 128)])
def test_a_chunk_of_logits_fits_its_memory(vocabulary, chunk):
  assert log_probs.chunk_for(vocabulary) == chunk
