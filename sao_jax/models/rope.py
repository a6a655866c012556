"""Rotary positions: frequencies of every scaling variant, the table of angles, and the rotation.

    frequency f[i] of the pair i  --position p-->  angle p f[i]  -->  cosine, sine  --> each pair (a, b) turned by its angle

All frequencies are computed in float32, operation by operation as Hugging Face computes them: at position 32767 a difference in the last
bit of a frequency already turns a pair by 0.002.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from sao_jax.config import ModelConfig, RopeConfig

Rope = tuple[jax.Array, jax.Array]  # Cosine and sine, f32[B, T, 1, d/2].
KINDS = ('default', 'linear', 'llama3', 'yarn')


def rotary_dim(config: ModelConfig) -> int:
  """Number of dimensions of a head that are rotated."""
  if config.latent.rank:
    return config.latent.rotary_dim
  return int(config.head_dim * config.rope.fraction)


def frequencies(dim: int, theta: float, rope: RopeConfig = RopeConfig()) -> np.ndarray:
  """Angle per position of every pair, f32[dim / 2].

  Args:
    dim: number of rotated dimensions.
    theta: base.
    rope: the scaling.

  Raises:
    ValueError: unknown kind of scaling.

  Source: Su et al. 2021, arXiv:2104.09864; Peng et al. 2023, arXiv:2309.00071 (yarn); Llama 3.1 (llama3).
  """
  one = np.float32(1.0)
  waves = _powers(theta, dim)
  plain = one / waves
  if rope.kind == 'default':
    return plain
  if rope.kind == 'linear':
    return plain / np.float32(rope.factor)
  if rope.kind == 'llama3':
    return _llama3(plain, rope)
  if rope.kind == 'yarn':
    low, high = _yarn_range(dim, theta, rope)
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), np.float32(0), one)
    keep = one - ramp
    return (one / (np.float32(rope.factor) * waves)) * (one - keep) + plain * keep
  raise ValueError(f'model.rope.kind must be one of {", ".join(KINDS)}, got {rope.kind!r}.')


def _powers(theta: float, dim: int) -> np.ndarray:
  """theta^(2i/dim) for i < dim/2, f32: the exponent is rounded to float32, the power correctly rounded."""
  exponent = np.arange(0, dim, 2).astype(np.float32) / np.float32(dim)
  return np.power(float(np.float32(theta)), exponent.astype(np.float64)).astype(np.float32)


def _llama3(plain: np.ndarray, rope: RopeConfig) -> np.ndarray:
  """Long waves stretched by `factor`, short ones kept, those between interpolated."""
  factor, one = np.float32(rope.factor), np.float32(1.0)
  length = (one / plain) * np.float32(2 * math.pi)
  longest, shortest = rope.original_length / rope.low_frequency, rope.original_length / rope.high_frequency
  scaled = np.where(length > np.float32(longest), plain / factor, plain)
  span = np.float32(rope.high_frequency - rope.low_frequency)
  smooth = ((one / length) * np.float32(rope.original_length) - np.float32(rope.low_frequency)) / span
  between = (one - smooth) * scaled / factor + smooth * scaled
  middle = ~(length < np.float32(shortest)) & ~(length > np.float32(longest))
  return np.where(middle, between, scaled).astype(np.float32)


def _yarn_range(dim: int, theta: float, rope: RopeConfig) -> tuple[float, float]:
  """First and last pair of the ramp from kept to stretched frequencies."""

  def pair(turns: float) -> float:
    return dim * math.log(rope.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

  low, high = pair(rope.beta_fast), pair(rope.beta_slow)
  if rope.truncate:
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, dim - 1)
  return low, high + 0.001 if low == high else high


def _mscale(factor: float, weight: float = 1.0) -> float:
  return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def attention_factor(rope: RopeConfig) -> float:
  """What cosine and sine are multiplied by: 1 but for 'yarn'."""
  if rope.kind != 'yarn':
    return 1.0
  if rope.attention_factor:
    return rope.attention_factor
  if rope.mscale and rope.mscale_all_dim:
    return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
  return _mscale(rope.factor)


def score_factor(rope: RopeConfig) -> float:
  """What the scores of latent attention are multiplied by, beside the root of the head size (Hugging Face's DeepSeek-V3)."""
  return _mscale(rope.factor, rope.mscale_all_dim)**2 if rope.kind != 'default' and rope.mscale_all_dim else 1.0


def table(positions: jax.Array, config: ModelConfig) -> Rope:
  """Cosine and sine of the rotary angles at positions i32[B, T]; made once for all layers."""
  angle = positions.astype(jnp.float32)[..., None, None] * frequencies(rotary_dim(config), config.rope_theta, config.rope)
  factor = np.float32(attention_factor(config.rope))
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)


def rotate(x: jax.Array, rope: Rope, *, interleaved: bool = False) -> jax.Array:
  """Rotary embedding of x [B, T, N, d]; what `rope` does not cover passes unchanged behind.

  Args:
    x: heads.
    rope: cosine and sine for the first r <= d dimensions.
    interleaved: pairs are neighbours, (0, 1), (2, 3), ..., and come out as two halves (GLM-5, DeepSeek); otherwise the first half of r is
      rotated against the second (Llama in Hugging Face's order).
  """
  cos, sin = rope
  size = 2 * cos.shape[-1]
  turned = x[..., :size].astype(jnp.float32)
  a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else jnp.split(turned, 2, axis=-1)
  parts = [a * cos - b * sin, b * cos + a * sin]
  if size == x.shape[-1]:
    return jnp.concatenate(parts, axis=-1).astype(x.dtype)
  return jnp.concatenate([p.astype(x.dtype) for p in parts] + [x[..., size:]], axis=-1)
