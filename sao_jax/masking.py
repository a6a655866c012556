"""Masked reductions. What a mask leaves out cannot matter: it is replaced before any arithmetic touches it, NaN included."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sao_jax.types import Stat


def masked_sum(x: jax.Array, mask: jax.Array) -> jax.Array:
  """Sum of `x` where `mask` is True, in float32; 0 where the mask is empty."""
  return jnp.sum(jnp.where(mask, x, 0.0), dtype=jnp.float32)


def masked_stat(x: jax.Array, mask: jax.Array) -> Stat:
  """`Stat` of `x` over `mask`: total f32[] and count f32[]."""
  return Stat(masked_sum(x, mask), jnp.sum(mask, dtype=jnp.float32))


def masked_mean(x: jax.Array, mask: jax.Array) -> jax.Array:
  """Mean of `x` where `mask` is True, f32[]; 0 where the mask is empty."""
  return masked_stat(x, mask).mean()


def masked_variance(x: jax.Array, mask: jax.Array) -> jax.Array:
  """Population variance of `x` over `mask`, f32[], in two passes; 0 where the mask is empty."""
  centred = jnp.where(mask, x - masked_mean(x, mask), 0.0)
  return masked_mean(jnp.square(centred), mask)
