"""Latent attention and its index: against float64 loops with expanded heads, and the ways to compute them against each other."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax.config import ExpertsConfig, LatentConfig, ModelConfig, RopeConfig
from sao_jax.models import attention
from sao_jax.models import rope
from sao_jax.models import transformer
from tests.sampler_factory import full_log_probs, make_params, make_prompts, make_sampler

LATENT = LatentConfig(
    rank=12, query_rank=10, plain_dim=6, rotary_dim=4, value_dim=7, index_top_k=8, index_heads=8, index_dim=8, shared_index_layers=(2,))
TINY = ModelConfig(
    vocab_size=67, embed_dim=32, num_layers=3, num_heads=4, num_kv_heads=4, head_dim=10, mlp_dim=40, max_length=96, latent=LATENT,
    tie_embeddings=False, rope=RopeConfig(kind='yarn', factor=4.0, original_length=64, mscale=1.0, mscale_all_dim=0.5))
EXPERTS = ExpertsConfig(
    count=8, top_k=3, mlp_dim=12, shared=1, router='sigmoid', scale=2.5, groups=2, top_groups=1, dense_layers=(0,))
FULL = dataclasses.replace(TINY, experts=EXPERTS)


# --- The choice of keys --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('top_k', [1, 3, 8, 20])
def test_choice_equals_a_sort(top_k):
  rng = np.random.default_rng(top_k)
  scores = rng.integers(-3, 4, (4, 9, 20)).astype(np.float32)  # Many ties, and zeros.
  visible = rng.random((4, 9, 20)) < 0.5
  visible[..., 0] = True
  got = np.asarray(jax.jit(functools.partial(attention.choose, top_k=top_k))(scores, visible))
  for place in np.ndindex(4, 9):
    keys = [s for s in range(20) if visible[place][s]]
    want = sorted(keys, key=lambda s: (-scores[place][s], s))[:top_k]  # Of equal scores the earlier ones.
    assert sorted(want) == list(np.flatnonzero(got[place]))


@pytest.mark.parametrize('limit', [0, 2**24])
def test_index_scores_equal_a_loop(monkeypatch, limit):
  monkeypatch.setattr(attention, 'INDEX_SCORES', limit)
  rng = np.random.default_rng(0)
  query, weight, key = (rng.normal(size=s).astype(np.float32) for s in ((2, 3, 4, 6), (2, 3, 4), (2, 5, 6)))
  got = attention.index_scores(query, weight, key)
  for b, t, s in np.ndindex(2, 3, 5):
    want = sum(weight[b, t, i] * max(query[b, t, i] @ key[b, s] / np.sqrt(6), 0) for i in range(4))
    np.testing.assert_allclose(got[b, t, s], want, atol=1e-5)


@pytest.mark.parametrize('t, top_k, queries, block', [(9, 4, 256, 4), (40, 7, 16, 8), (33, 32, 5, 64), (12, 12, 256, 5), (7, 99, 256, 3)])
def test_blockwise_equals_dense(monkeypatch, t, top_k, queries, block):
  monkeypatch.setattr(attention, 'INDEX_BLOCK', queries)
  rng = np.random.default_rng(t)
  q, k, v, iq, ik = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in (
      (2, t, 4, 6), (2, t, 1, 6), (2, t, 1, 5), (2, t, 8, 4), (2, t, 1, 4)))
  weight, cotangent = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((2, t, 8), (2, t, 4, 5)))

  def run(attend, q, k, v, iq, weight, ik):
    out, state, selected = attend(q, k, v, 'state', attention.Index(top_k=top_k, query=iq, weight=weight, key=ik))
    assert state == 'state'
    again, _, same = attend(q, k, v, None, attention.Index(top_k=top_k, selected=selected))  # A layer that shares the choice.
    assert (same is None) == (selected is None) == (t <= top_k)
    return jnp.sum((out + again) * cotangent), (out, again, selected)

  results = []
  for attend in (attention.causal_attention, functools.partial(attention.blockwise_attention, block=block)):
    results.append(jax.jit(jax.value_and_grad(functools.partial(run, attend), argnums=tuple(range(6)), has_aux=True))(
        q, k, v, iq, weight, ik))
  (((_, (out, again, selected)), gradients), ((_, (out_2, _, selected_2)), gradients_2)) = results
  np.testing.assert_array_equal(out, again)
  np.testing.assert_allclose(out_2, out, atol=1e-5)
  for a, b in zip(gradients_2[:3], gradients[:3], strict=True):
    np.testing.assert_allclose(a, b, atol=2e-5)
  assert not any(np.any(g) for g in gradients[3:])  # The choice has no gradient.
  if t > top_k:
    np.testing.assert_array_equal(selected, selected_2)
    np.testing.assert_array_equal(np.sum(selected, axis=-1), np.minimum(np.arange(t) + 1, top_k)[None].repeat(2, 0))


# --- The layer -----------------------------------------------------------------------------------------------------------------


def turn(x, position, config):
  """Interleaved rotation of one vector; pairs come out as two halves."""
  angle = position * rope.frequencies(len(x), config.rope_theta, config.rope).astype(np.float64)
  factor = rope.attention_factor(config.rope)
  a, b = x[0::2], x[1::2]
  return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)]) * factor


def rms(x, scale):
  return x / np.sqrt(np.mean(x * x) + 1e-6) * scale


def oracle(params, layer, xs, c, chosen):
  """Attention output [T, D] of one layer and its choice of keys; heads are expanded, as the paper writes them."""
  p = {k.removeprefix(f'trunk.layers.{layer}.attention.'): np.asarray(v, np.float64) for k, v in params.items()
       if k.startswith(f'trunk.layers.{layer}.attention.')}
  latent, size = c.latent, c.latent.plain_dim + c.latent.rotary_dim
  queries, keys, values, index = [], [], [], []
  for t, x in enumerate(xs):
    low = rms(x @ p['query_down'], p['query_down_norm.scale'])
    q = np.einsum('r,rhk->hk', low, p['query_up'])
    queries.append([np.concatenate([h[:latent.plain_dim], turn(h[latent.plain_dim:], t, c)]) for h in q])
    down = x @ p['latent_down']
    up = np.einsum('r,rhk->hk', rms(down[:latent.rank], p['latent_norm.scale']), p['latent_up'])
    shared = turn(down[latent.rank:], t, c)
    keys.append([np.concatenate([h[:latent.plain_dim], shared]) for h in up])
    values.append(up[:, latent.plain_dim:])
    if 'indexer.key' in p:
      part = lambda z, t=t: np.concatenate([turn(z[:latent.rotary_dim], t, c), z[latent.rotary_dim:]])
      k = x @ p['indexer.key']
      k = (k - k.mean()) / np.sqrt(k.var() + 1e-6) * p['indexer.key_norm.scale'] + p['indexer.key_norm.bias']
      index.append(([part(h) for h in np.einsum('r,rhk->hk', low, p['indexer.query'])], part(k), x @ p['indexer.weight']))
  if index:
    chosen = []
    for t in range(len(xs)):
      heads, _, weight = index[t]
      scores = [sum(w * max(h @ index[s][1] / np.sqrt(latent.index_dim), 0) for h, w in zip(heads, weight)) for s in range(t + 1)]
      chosen.append(sorted(range(t + 1), key=lambda s, scores=scores: -scores[s])[:latent.index_top_k])
  scale = size**-0.5 * (0.1 * c.rope.mscale_all_dim * np.log(c.rope.factor) + 1)**2
  out = []
  for t in range(len(xs)):
    mixed = np.zeros(c.embed_dim)
    for h in range(c.num_heads):
      scores = np.array([queries[t][h] @ keys[s][h] for s in chosen[t]]) * scale
      weights = np.exp(scores - scores.max())
      weights /= weights.sum()
      mixed += sum(w * values[s][h] for w, s in zip(weights, chosen[t])) @ p['out'][h]
    out.append(mixed)
  return np.array(out), chosen


def random_params(config):
  params = transformer.init(transformer.Policy, config, jax.random.key(3))
  rng = np.random.default_rng(3)
  return {
      p: x + jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype) if p.endswith(('scale', 'bias', 'correction')) else x * 1.5
      for p, x in sorted(params.items())}


@pytest.mark.parametrize('kind', ['dense', 'blockwise'])
def test_attention_equals_the_oracle(kind):
  """Layers 1 (an index of its own) and 2 (its choice shared), on a row longer than the number of keys that a query sees."""
  config = dataclasses.replace(TINY, attention=kind, attention_block=8)
  params = random_params(config)
  x = np.random.default_rng(5).normal(size=(1, 23, 32)).astype(np.float32)

  @jax.jit
  def run(params, x):
    trunk = transformer.merge(transformer.Policy, config, params).trunk
    angles, attend, same = rope.table(jnp.arange(23)[None], config), attention.make(config), lambda y, axes: y
    first, _, selected = trunk.layers[1].attention(x, angles, attend, None, same, None)
    second, _, again = trunk.layers[2].attention(x, angles, attend, None, same, selected)
    return first, second, selected, again

  first, second, selected, again = run(params, x)
  want, chosen = oracle(params, 1, x[0].astype(np.float64), config, None)
  want_second, _ = oracle(params, 2, x[0].astype(np.float64), config, chosen)
  assert [sorted(c) for c in chosen] == [list(np.flatnonzero(row)) for row in np.asarray(selected[0])]
  np.testing.assert_array_equal(selected, again)
  np.testing.assert_allclose(first[0], want, atol=2e-5 * np.max(np.abs(want)))
  np.testing.assert_allclose(second[0], want_second, atol=2e-5 * np.max(np.abs(want_second)))


def test_only_layers_with_an_index_of_their_own_hold_and_cache_one():
  params = transformer.abstract(transformer.Policy, FULL)[1]
  assert [i for i in range(3) if f'trunk.layers.{i}.attention.indexer.query' in params] == [0, 1]
  with pytest.raises(ValueError, match='scan_layers needs layers of one kind.*layers that share an index'):
    transformer.abstract(transformer.Policy, dataclasses.replace(FULL, scan_layers=True))


def test_latent_attention_without_an_index_sees_all_keys():
  config = dataclasses.replace(TINY, latent=dataclasses.replace(LATENT, index_top_k=0, shared_index_layers=()))
  wide = dataclasses.replace(TINY, latent=dataclasses.replace(LATENT, index_top_k=99))
  params = random_params(wide)
  tokens, positions = np.arange(40)[None], np.arange(40)[None]

  def logits(config):
    own = {p: params[p] for p in transformer.abstract(transformer.Policy, config)[1]}
    model = transformer.merge(transformer.Policy, config, own)
    return np.asarray(jax.jit(lambda: model.logits(model.hidden(tokens, positions, attention.make(config))[0]))())

  want = logits(config)
  np.testing.assert_allclose(logits(wide), want, atol=1e-5 * np.max(np.abs(want)))
  assert np.max(np.abs(logits(TINY) - want)) > 1e-2 * np.max(np.abs(want))  # And few keys are not all keys.


# --- The sampler ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize('changes', [
    {}, {'latent': dataclasses.replace(LATENT, shared_index_layers=(), index_top_k=40), 'scan_layers': True}], ids=['shared', 'scanned'])
def test_sampled_log_probs_are_those_of_the_full_forward_pass(changes):
  """Prefill in chunks, decode, pages: with experts, and rollouts longer and shorter than what a query sees."""
  model = dataclasses.replace(FULL, **changes)
  params = make_params(model)
  sampler = make_sampler(model, params=params, cache_lengths=(24, 96), prefill_lengths=(16,))
  prompts = make_prompts(6, low=1, high=50)
  done = sampler.generate(prompts, max_new_tokens=[20] * 6)
  for prompt, completion in zip(prompts, done, strict=True):
    want = full_log_probs([*prompt, *completion.tokens], model=model, params=params)[len(prompt):]
    assert len(completion.tokens) == 20
    np.testing.assert_allclose(completion.log_probs, want, atol=1e-4)
