"""The draw of a token: distribution, extremes, noise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax import sampling

draw, pick = jax.jit(sampling.draw), jax.jit(sampling.pick)


def bits(rows: int, seed: int = 0) -> jax.Array:
  return jnp.asarray(np.random.default_rng(seed).integers(0, 2**32, (rows, 4), np.uint32))


def softmax64(logits: np.ndarray) -> np.ndarray:
  weight = np.exp(np.asarray(logits, np.float64) - np.max(logits))
  return weight / weight.sum()


@pytest.mark.parametrize('vocab', [1, 2, 5, 127, 128, 129, 300, 8193])
def test_distribution_is_the_softmax(vocab):
  """Pearson's statistic over many draws; vocabularies of one level, two and three, not multiples of the block."""
  rng = np.random.default_rng(vocab)
  logits = rng.normal(size=vocab).astype(np.float32) * 2
  n = 200_000
  rows = 20_000 if vocab > 1000 else 50_000
  call = jax.jit(lambda b: sampling.draw(jnp.broadcast_to(logits, (rows, vocab)), b)[0])
  prob, counts = softmax64(logits), np.zeros(vocab)
  for i in range(n // rows):
    counts += np.bincount(np.asarray(call(bits(rows, seed=i))), minlength=vocab)
  big = prob * n >= 10  # The rest becomes one cell.
  expected = np.append(prob[big], prob[~big].sum()) * n
  observed = np.append(counts[big], counts[~big].sum())
  keep = expected > 0
  statistic = np.sum((observed - expected)[keep] ** 2 / expected[keep])
  freedom = keep.sum() - 1
  assert statistic < freedom + 5 * np.sqrt(2 * freedom) + 1e-9


def test_huge_vocabulary_keeps_its_tail():
  """One entry of probability one half, 151,935 that share the other half in float32, each 3.3e-6."""
  vocab, rows = 151_936, 128
  logits = np.zeros(vocab, np.float32)
  logits[77] = np.log(vocab - 1)
  call = jax.jit(lambda b: sampling.draw(jnp.broadcast_to(logits, (rows, vocab)), b))
  tokens = np.concatenate([np.asarray(call(bits(rows, seed=i))[0]) for i in range(48)])
  tail = tokens[tokens != 77]
  n = len(tokens)
  assert abs(len(tail) / n - 0.5) < 5 * 0.5 / np.sqrt(n)
  thirds = np.bincount(tail * 8 // vocab, minlength=8)  # The tail is uniform over the whole vocabulary, its last block included.
  assert np.all(np.abs(thirds - len(tail) / 8) < 5 * np.sqrt(len(tail) / 8))
  assert tail.max() > vocab - 500


def test_small_tail_behind_a_likely_token_is_not_lost():
  """A tail of 2e-4 in 100,000 entries of 2e-9: one cumulative sum in float32 after a first entry of 1 would lose every one of them."""
  vocab, rows = 100_001, 64
  logits = np.full(vocab, np.log(2e-9), np.float32)
  logits[0] = 0.0
  # The uniform of the group level decides whether the draw is in the tail: put it just below 1.
  high = np.array([[0xFFFFFF00 - (i << 8), 1 << 31, 1 << 31, 0] for i in range(rows)], np.uint32)
  tokens = np.asarray(draw(jnp.broadcast_to(logits, (rows, vocab)), high)[0])
  assert np.all(tokens > vocab // 2)  # u = 1 - k * 2^-24 with k < 64 is 4e-6 from the end, the last 2 % of the tail.


def test_log_prob_is_the_log_softmax_at_the_drawn_token():
  logits = np.random.default_rng(0).normal(size=(64, 1000)).astype(np.float32) * 5
  tokens, log_prob = map(np.asarray, draw(logits, bits(64)))
  want = np.array([np.log(softmax64(row)[t]) for row, t in zip(logits, tokens)])
  np.testing.assert_allclose(log_prob, want, atol=2e-6)


@pytest.mark.parametrize('vocab', [3, 259, 8193])
@pytest.mark.parametrize('word', [0, 0xFFFFFFFF, 0x80000000, 255])
def test_probability_zero_is_never_drawn(vocab, word):
  """-inf everywhere but in a few places, at both ends of the uniform."""
  rng = np.random.default_rng(vocab)
  logits = np.full((32, vocab), -np.inf, np.float32)
  for row in logits:
    row[rng.integers(0, vocab, 2)] = rng.normal(size=2)
  tokens, log_prob = map(np.asarray, draw(logits, jnp.full((32, 4), word, jnp.uint32)))
  assert np.all(np.isfinite(logits[np.arange(32), tokens])) and np.all(np.isfinite(log_prob))


@pytest.mark.parametrize('value', [1e4, -1e4, 3e38])
def test_extreme_logits(value):
  logits = np.zeros((8, 300), np.float32)
  logits[:, 123] = value
  tokens, log_prob = map(np.asarray, draw(logits, bits(8)))
  assert np.all((tokens == 123) == (value > 0))
  np.testing.assert_allclose(log_prob, 0.0 if value > 0 else -np.log(299), atol=1e-5)


@pytest.mark.parametrize('poison', [np.nan, np.inf])
def test_logits_that_are_no_distribution_give_nan(poison):
  logits = np.zeros((2, 300), np.float32)
  logits[0, 5] = poison
  log_prob = np.asarray(draw(logits, bits(2))[1])
  assert np.isnan(log_prob[0]) and np.isfinite(log_prob[1])
  assert np.isnan(np.asarray(sampling.greedy(logits)[1])[0])
  assert np.isnan(np.asarray(draw(np.full((1, 300), -np.inf, np.float32), bits(1))[1]))[0]


def test_pick_by_hand():
  weight = np.array([[0.0, 1.0, 0.0, 3.0, 0.0]] * 5, np.float32)
  u = np.array([0.0, 0.2499, 0.25, 0.9, 1 - 2**-24], np.float32)
  np.testing.assert_array_equal(pick(weight, u), [1, 1, 3, 3, 3])
  np.testing.assert_array_equal(pick(np.zeros((1, 4), np.float32), np.zeros(1, np.float32)), [0])


def test_uniform_is_below_one():
  u = np.asarray(sampling.uniform(jnp.array([0, 255, 256, 0xFFFFFFFF], jnp.uint32)))
  np.testing.assert_array_equal(u, np.float32([0, 0, 2**-24, 1 - 2**-24]))


def test_noise_is_a_function_of_seed_prompt_attempt_and_position():
  key = sampling.row_key(1, 2, 3)
  assert key.dtype == np.uint32 and key.shape == (2,)
  np.testing.assert_array_equal(key, sampling.row_key(1, 2, 3))
  others = [(2, 2, 3), (1, 3, 3), (1, 2, 4), (1, 2 + 2**32, 3), (1, 2 + 2**62, 3), (2, 1, 3), (2**64 - 1, 2, 3)]
  keys = [tuple(sampling.row_key(*k)) for k in [(1, 2, 3), *others]]
  assert len(set(keys)) == len(keys)
  words = np.asarray(jax.jit(sampling.token_bits)(jnp.asarray(np.stack([key] * 5)), jnp.arange(5)))
  assert words.shape == (5, 4) and len(np.unique(words)) == 20
  alone = np.asarray(jax.jit(sampling.token_bits)(jnp.asarray(key[None]), jnp.array([3])))
  np.testing.assert_array_equal(alone[0], words[3])


def test_uniforms_of_many_tokens_are_uniform():
  rng = np.random.default_rng(0)
  keys = np.stack([sampling.row_key(0, int(p), 0) for p in rng.integers(0, 2**62, 500)])
  u = np.concatenate([np.asarray(sampling.uniform(sampling.token_bits(jnp.asarray(keys), jnp.full(500, t)))) for t in range(40)])
  for column in u.T:
    counts = np.histogram(column, 50, (0, 1))[0]
    assert np.sum((counts - len(u) / 50) ** 2 / (len(u) / 50)) < 49 + 5 * np.sqrt(98)
  assert np.all(np.abs(np.corrcoef(u.T) - np.eye(4)) < 5 / np.sqrt(len(u)))


def test_temperature_zero_is_the_first_maximum():
  logits = np.array([[0.0, 2.0, 2.0, 1.0]], np.float32)
  keys, position = jnp.zeros((1, 2), jnp.uint32), jnp.zeros(1, jnp.int32)
  sample = jax.jit(functools.partial(sampling.sample, top_p=1.0, top_k=0))
  token, log_prob = sample(jnp.asarray(logits), keys, position, jnp.float32(0))
  assert int(token[0]) == 1
  np.testing.assert_allclose(log_prob, np.log(softmax64(logits[0])[1]), atol=1e-6)


@pytest.mark.parametrize('temperature, want', [(1.0, -0.12693), (0.5, -0.01815)])
def test_log_prob_is_that_of_the_scaled_softmax(temperature, want):
  logits = jnp.array([[2.0, 0.0]] * 64)
  keys = jnp.asarray(np.stack([sampling.row_key(0, i, 0) for i in range(64)]))
  token, log_prob = sampling.sample(logits, keys, jnp.zeros(64, jnp.int32), jnp.float32(temperature), top_p=1.0, top_k=0)
  first = np.asarray(log_prob)[np.asarray(token) == 0]
  assert first.size > 30
  np.testing.assert_allclose(first, want, atol=1e-5)


def test_restriction_by_hand():
  logits = np.log(np.array([[0.5, 0.3, 0.15, 0.05]], np.float32))
  kept = lambda **k: np.isfinite(np.asarray(sampling.restrict(jnp.asarray(logits), **k)))[0].tolist()
  assert kept(top_p=1.0, top_k=0) == [True] * 4
  assert kept(top_p=1.0, top_k=2) == [True, True, False, False]
  assert kept(top_p=0.5, top_k=0) == [True, False, False, False]
  assert kept(top_p=0.51, top_k=0) == [True, True, False, False]
  assert kept(top_p=0.9, top_k=0) == [True, True, True, False]
  assert kept(top_p=0.6, top_k=2) == [True, False, False, False]  # 0.5 / 0.8 is enough.
  assert kept(top_p=1e-6, top_k=0) == [True, False, False, False]
  ties = np.isfinite(np.asarray(sampling.restrict(jnp.zeros((1, 4)), top_p=1.0, top_k=2)))
  assert ties.all()
