"""Rotary angles of every scaling, against float64 and against frequencies recorded from transformers."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax.config import ModelConfig, RopeConfig
from sao_jax.models import rope

RECORDED = json.loads((pathlib.Path(__file__).parent / 'goldens' / 'rope_frequencies.json').read_text())
YARN = RopeConfig(kind='yarn', factor=4.0, original_length=8192)


def config_of(dim=64, theta=1e5, **settings):
  return ModelConfig(head_dim=dim, rope_theta=theta, rope=RopeConfig(**settings))


@pytest.mark.parametrize('position', [0, 1, 1000, 8191, 32767, 131071])
@pytest.mark.parametrize('theta', [1e4, 1e5, 5e5, 1e6])
def test_table_is_the_cosine_of_the_float32_angle(position, theta):
  """A float32 angle has a rounding of its own; its cosine must add none, however large the angle."""
  cos, sin = jax.jit(lambda p: rope.table(p, config_of(64, theta)))(jnp.array([[position]]))
  angle = (np.float32(position) * rope.frequencies(64, theta)).astype(np.float64)
  np.testing.assert_allclose(cos[0, 0, 0], np.cos(angle), atol=3e-7, rtol=0)
  np.testing.assert_allclose(sin[0, 0, 0], np.sin(angle), atol=3e-7, rtol=0)
  true = position * theta ** (-np.arange(32) / 32)
  np.testing.assert_allclose(cos[0, 0, 0], np.cos(true), atol=max(1e-6, position * 1.8e-7), rtol=0)


@pytest.mark.parametrize('number', range(len(RECORDED)))
def test_frequencies_are_those_of_transformers(number):
  """To the last bit, but for one power in a table that PyTorch does not round to nearest; no angle up to 32767 differs by 1e-4."""
  case = RECORDED[number]
  got = rope.frequencies(case['dim'], case['theta'], RopeConfig(**case['rope']))
  want = np.array([int(x, 16) for x in case['bits']], np.uint32).view(np.float32)
  assert got.dtype == np.float32 and got.shape == (case['dim'] // 2,)
  np.testing.assert_array_max_ulp(got, want, maxulp=1)
  assert np.sum(got != want) <= 1 and np.max(np.abs(got.astype(np.float64) - want)) * 32767 < 1e-4
  np.testing.assert_allclose(rope.attention_factor(RopeConfig(**case['rope'])), case['attention_factor'], rtol=1e-12)


def test_linear_and_llama3_by_hand():
  plain = rope.frequencies(4, 100.0)
  np.testing.assert_allclose(plain, [1.0, 0.1], rtol=1e-6)
  np.testing.assert_allclose(rope.frequencies(4, 100.0, RopeConfig(kind='linear', factor=4.0)), [0.25, 0.025], rtol=1e-6)
  # Waves of 6.28 and 62.8 positions; those longer than 40 are stretched, those shorter than 10 kept.
  llama3 = RopeConfig(kind='llama3', factor=8.0, original_length=40, low_frequency=1.0, high_frequency=4.0)
  np.testing.assert_allclose(rope.frequencies(4, 100.0, llama3), [1.0, 0.1 / 8], rtol=1e-6)
  # A wave of 6.28 between 3 and 12 is stretched in part.
  between = rope.frequencies(2, 1.0, dataclasses.replace(llama3, original_length=12))
  smooth = (12 / (2 * np.pi) - 1) / 3
  np.testing.assert_allclose(between, [(1 - smooth) / 8 + smooth], rtol=1e-5)


def test_yarn_keeps_fast_dimensions_and_stretches_slow_ones():
  plain, scaled = rope.frequencies(64, 1e6), rope.frequencies(64, 1e6, YARN)
  np.testing.assert_array_equal(scaled[:5], plain[:5])
  np.testing.assert_allclose(scaled[-5:], plain[-5:] / 4, rtol=1e-6)
  assert np.all(np.diff(scaled / plain) <= 1e-6)


def test_factors_of_yarn():
  assert rope.attention_factor(RopeConfig()) == 1.0 and rope.score_factor(YARN) == 1.0
  assert rope.attention_factor(YARN) == pytest.approx(0.1 * np.log(4) + 1)
  assert rope.attention_factor(dataclasses.replace(YARN, attention_factor=1.5)) == 1.5
  both = dataclasses.replace(YARN, mscale=1.0, mscale_all_dim=0.5)
  assert rope.attention_factor(both) == pytest.approx((0.1 * np.log(4) + 1) / (0.05 * np.log(4) + 1))
  assert rope.score_factor(both) == pytest.approx((0.05 * np.log(4) + 1)**2)
  cos, _ = rope.table(jnp.array([[0]]), ModelConfig(head_dim=8, rope=YARN))
  np.testing.assert_allclose(cos, 0.1 * np.log(4) + 1, rtol=1e-6)


def test_an_unknown_kind_is_refused():
  with pytest.raises(ValueError, match="one of default, linear, llama3, yarn, got 'dynamic'"):
    rope.frequencies(8, 1e4, RopeConfig(kind='dynamic'))


@pytest.mark.parametrize('interleaved', [False, True])
def test_rotation_of_a_part_of_the_head(interleaved):
  x = np.random.default_rng(0).normal(size=(2, 3, 2, 8)).astype(np.float32)
  positions = np.array([[0, 1, 2], [5, 7, 1000]])
  got = np.asarray(rope.rotate(jnp.asarray(x), rope.table(positions, config_of(8, 100.0, fraction=0.5)), interleaved=interleaved))
  np.testing.assert_array_equal(got[..., 4:], x[..., 4:])
  for b, t in np.ndindex(2, 3):
    for i, angle in enumerate(positions[b, t] * 100.0 ** (-np.arange(2) / 2)):
      first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + 2)
      p, q = x[b, t, :, first], x[b, t, :, second]
      np.testing.assert_allclose(got[b, t, :, i], p * np.cos(angle) - q * np.sin(angle), atol=1e-4)
      np.testing.assert_allclose(got[b, t, :, i + 2], q * np.cos(angle) + p * np.sin(angle), atol=1e-4)


def test_rotation_is_relative():
  """Scores of rotated heads depend on the distance alone, in both orders of pairs and for latent attention's part."""
  rng = np.random.default_rng(1)
  q, k = rng.normal(size=(2, 1, 1, 1, 16)).astype(np.float32)
  for interleaved in (False, True):
    score = lambda a, b, interleaved=interleaved: float(jnp.sum(
        rope.rotate(q, rope.table(np.array([[a]]), config_of(16)), interleaved=interleaved)
        * rope.rotate(k, rope.table(np.array([[b]]), config_of(16)), interleaved=interleaved)))
    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-4)
    assert abs(score(7, 3) - score(9, 3)) > 1e-3
