"""Named key streams derived from one seed: a stream never depends on how often another one was used."""

from __future__ import annotations

import zlib

import jax
import numpy as np


def stream(key: jax.Array, name: str, *counters: int) -> jax.Array:
  """Key of the stream `name` at `counters`; each counter is folded in as two 32-bit halves."""
  key = jax.random.fold_in(key, zlib.crc32(name.encode()))
  for counter in counters:
    low, high = counter & 0xFFFFFFFF, (counter >> 32) & 0xFFFFFFFF
    key = jax.random.fold_in(jax.random.fold_in(key, np.uint32(low)), np.uint32(high))
  return key


def generator(seed: int, name: str, *counters: int) -> np.random.Generator:
  """NumPy generator of the stream `name` at `counters`, for host code; independent of every other stream."""
  return np.random.default_rng([seed & 0xFFFFFFFFFFFFFFFF, zlib.crc32(name.encode()), *counters])
