"""The draw of one token from logits: noise, inverse CDF, log-probability of what was drawn.

The noise of a token is a pure function of (seed, prompt_id, attempt, position): a row draws the same token whatever its slot, its
neighbours, the length of a chunk, or the number of devices.

The inverse CDF is taken over a tree of blocks, so that a vocabulary of 150k neither costs one random number per entry nor loses its tail
to the rounding of one long cumulative sum:

    logits [V] -> blocks of 128 -> groups of 32 blocks       pick a group, then a block in it, then an entry in it

Each level has its own 24-bit uniform and a cumulative sum over at most a few hundred float32 weights. An entry of weight 0 is never drawn.
"""

from __future__ import annotations

import hashlib
import struct

import jax
from jax.extend.random import threefry2x32_p
import jax.numpy as jnp
import numpy as np

BLOCK = 128  # Vocabulary entries of one block.
GROUP = 32  # Blocks of one group.


def row_key(seed: int, prompt_id: int, attempt: int) -> np.ndarray:
  """Key u32[2] of every token that one attempt at one prompt draws: a hash of the three, each in [0, 2^64)."""
  words = struct.pack('<3Q', seed, prompt_id, attempt)
  return np.frombuffer(hashlib.blake2b(words, digest_size=8, person=b'sao_jax.sampler').digest(), np.uint32)


def token_bits(keys: jax.Array, position: jax.Array) -> jax.Array:
  """Random bits u32[B, 4] of one token of each row: Threefry-2x32 of the counters (position, 0) and (position, 1).

  Args:
    keys: u32[B, 2] from `row_key`.
    position: i32[B], index of the token in its whole sequence.
  """
  shape = (keys.shape[0], 2)
  counter = jnp.broadcast_to(position.astype(jnp.uint32)[:, None], shape), jnp.broadcast_to(jnp.arange(2, dtype=jnp.uint32), shape)
  words = threefry2x32_p.bind(*(jnp.broadcast_to(keys[:, i, None], shape) for i in range(2)), *counter)
  return jnp.concatenate(words, axis=-1)


def uniform(bits: jax.Array) -> jax.Array:
  """f32 in [0, 1), on the grid of 2^-24: below 1 by construction."""
  return (bits >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)


def pick(weight: jax.Array, u: jax.Array) -> jax.Array:
  """Index drawn with probability weight / sum(weight) by inverse CDF.

  Args:
    weight: f32[B, N], not negative.
    u: f32[B] in [0, 1).

  Returns:
    i32[B]. An entry of weight 0 is picked only where a row is 0 throughout. Where rounding leaves no entry above the threshold, the
    largest one is picked.
  """
  cumulative = jnp.cumsum(weight, axis=-1)  # [B, N]; need not be monotonic to the last bit, hence `weight > 0` below.
  above = (cumulative > u[:, None] * cumulative[:, -1:]) & (weight > 0)
  first, largest = jnp.argmax(above, axis=-1), jnp.argmax(weight, axis=-1)
  return jnp.where(jnp.any(above, axis=-1), first, largest).astype(jnp.int32)


def _take_rows(x: jax.Array, index: jax.Array) -> jax.Array:
  """x[b, index[b]] for x [B, N, M]: [B, M]."""
  return jnp.take_along_axis(x, index[:, None, None], axis=1)[:, 0]


def _blocked(x: jax.Array, size: int, fill: float) -> jax.Array:
  """[B, N] as [B, ceil(N / size), size], padded with `fill`."""
  rest = -x.shape[-1] % size
  padded = jnp.pad(x, ((0, 0), (0, rest)), constant_values=fill) if rest else x
  return padded.reshape(x.shape[0], -1, size)


def draw(logits: jax.Array, bits: jax.Array) -> tuple[jax.Array, jax.Array]:
  """One token of each row from softmax(logits), and its log-probability.

  Args:
    logits: f32[B, V], already divided by the temperature. -inf is probability 0. A row without a finite maximum, or with a NaN, gives
      a NaN log-probability: the caller must look.
    bits: u32[B, 4] from `token_bits`.

  Returns:
    token i32[B] in [0, V), and log_prob f32[B] in nats.
  """
  top = jnp.max(logits, axis=-1, keepdims=True)  # [B, 1]
  blocks = _blocked(logits, BLOCK, -jnp.inf)  # [B, N, 128]
  sums = jnp.sum(jnp.exp(blocks - top[..., None]), axis=-1)  # [B, N]
  if sums.shape[-1] > 2 * GROUP:
    groups = _blocked(sums, GROUP, 0.0)  # [B, G, 32]
    group = pick(jnp.sum(groups, axis=-1), uniform(bits[:, 0]))
    block = group * GROUP + pick(_take_rows(groups, group), uniform(bits[:, 1]))
  else:
    block = pick(sums, uniform(bits[:, 1]))
  entries = _take_rows(blocks, block)  # [B, 128]
  inside = pick(jnp.exp(entries - top), uniform(bits[:, 2]))
  drawn = jnp.take_along_axis(entries, inside[:, None], axis=-1)[:, 0]
  log_prob = drawn - top[:, 0] - jnp.log(jnp.sum(sums, axis=-1))
  return jnp.minimum(block * BLOCK + inside, logits.shape[-1] - 1), log_prob


def greedy(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The most probable token of each row (the first of equals), and its log-probability under softmax(logits) at temperature 1."""
  token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
  top = jnp.max(logits, axis=-1)
  return token, -jnp.log(jnp.sum(jnp.exp(logits - top[:, None]), axis=-1))


def restrict(logits: jax.Array, *, top_p: float, top_k: int) -> jax.Array:
  """Logits with -inf outside the `top_k` most probable entries (0: all) and the smallest set of total probability >= `top_p` (1: all).

  `top_k` goes first, and `top_p` is of what it left. Entries equal to the last one kept are kept too. For evaluation only: the
  log-probability of a draw is then that of the restricted, renormalised distribution.
  """
  size = logits.shape[-1]
  if 0 < top_k < size:
    last = jax.lax.top_k(logits, top_k)[0][:, -1:]
    logits = jnp.where(logits >= last, logits, -jnp.inf)
  if top_p < 1.0:
    ordered = -jnp.sort(-logits, axis=-1)
    prob = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(prob, axis=-1) - prob  # Probability of everything more likely.
    last = jnp.min(jnp.where(before < top_p, ordered, jnp.inf), axis=-1, keepdims=True)
    logits = jnp.where(logits >= last, logits, -jnp.inf)
  return logits


def sample(
    logits: jax.Array, keys: jax.Array, position: jax.Array, temperature: jax.Array, *, top_p: float, top_k: int
) -> tuple[jax.Array, jax.Array]:
  """Token i32[B] and log-probability f32[B] of each row's draw at `temperature`.

  Args:
    logits: f32[B, V] of the model.
    keys: u32[B, 2] from `row_key`.
    position: i32[B], index of the new token in its sequence.
    temperature: f32[]; 0 takes the most probable token, with its log-probability at temperature 1.
    top_p, top_k: see `restrict`; ignored at temperature 0.
  """

  def stochastic():
    scaled = restrict(logits / temperature, top_p=top_p, top_k=top_k)
    return draw(scaled, token_bits(keys, position))

  return jax.lax.cond(temperature > 0.0, stochastic, lambda: greedy(logits))
