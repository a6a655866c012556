"""The transformer: against a float64 oracle, and its settings against each other."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax import sharding
from sao_jax.config import ModelConfig
from sao_jax.models import attention
from sao_jax.models import transformer

TINY = ModelConfig(vocab_size=61, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=48, max_length=64)
FULL = dataclasses.replace(TINY, qk_norm=True, qkv_bias=True, tie_embeddings=False, head_dim=16)


def random_params(kind, config, seed=0):
  """Random parameters, unrolled, in which norms, biases and heads matter too."""
  params = transformer.init(kind, dataclasses.replace(config, scan_layers=False), jax.random.key(seed))
  rng = np.random.default_rng(seed)
  noisy = lambda p, x: x + jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype) if p.endswith(('scale', 'bias', 'head')) else x
  return {p: noisy(p, x) for p, x in sorted(params.items())}


def random_tokens(b=3, t=13, seed=1, vocab=61):
  rng = np.random.default_rng(seed)
  return rng.integers(0, vocab, (b, t)).astype(np.int32), np.broadcast_to(np.arange(t, dtype=np.int32), (b, t))


def forward(params, tokens, positions, config, shard=transformer.no_shard):
  model = transformer.merge(transformer.Policy, config, params)
  hidden, _ = model.hidden(tokens, positions, attention.make(config), shard=shard)
  return model.logits(hidden)


def compiled(config, shard=transformer.no_shard):
  return jax.jit(functools.partial(forward, config=config, shard=shard))


# --- Oracle --------------------------------------------------------------------------------------------------------------------


def oracle_norm(x, scale, eps):
  return x / np.sqrt(np.mean(x * x) + eps) * scale


def oracle_rotate(x, position, theta):
  half, out = len(x) // 2, np.zeros_like(x)
  for i in range(half):
    angle = position * theta ** (-i / half)
    out[i] = x[i] * np.cos(angle) - x[i + half] * np.sin(angle)
    out[i + half] = x[i + half] * np.cos(angle) + x[i] * np.sin(angle)
  return out


def oracle_row(params, tokens, positions, c):
  """Hidden states [T, D] of one row, position by position and head by head in float64."""
  p = {k: np.asarray(v, np.float64) for k, v in params.items()}
  x = [p['trunk.embedding'][t].copy() for t in tokens]
  for layer in range(c.num_layers):
    w = lambda name, layer=layer: p[f'trunk.layers.{layer}.{name}']
    queries, keys, values = [], [], []
    for t, position in enumerate(positions):
      y = oracle_norm(x[t], w('attention_norm.scale'), c.norm_eps)
      for name, out, heads in (('query', queries, c.num_heads), ('key', keys, c.num_kv_heads), ('value', values, c.num_kv_heads)):
        rows = []
        for h in range(heads):
          z = y @ w(f'attention.{name}')[:, h]
          z = z + w(f'attention.{name}_bias')[h] if c.qkv_bias else z
          if name != 'value':
            z = oracle_norm(z, w(f'attention.{name}_norm.scale'), c.norm_eps) if c.qk_norm else z
            z = oracle_rotate(z, position, c.rope_theta)
          rows.append(z)
        out.append(rows)
    for t in range(len(x)):
      mixed = np.zeros(c.embed_dim)
      for h in range(c.num_heads):
        g = h // (c.num_heads // c.num_kv_heads)
        scores = np.array([queries[t][h] @ keys[s][g] for s in range(t + 1)]) / np.sqrt(c.head_dim)
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        mixed += sum(weights[s] * values[s][g] for s in range(t + 1)) @ w('attention.out')[h]
      x[t] = x[t] + mixed
    for t in range(len(x)):
      y = oracle_norm(x[t], w('mlp_norm.scale'), c.norm_eps)
      gate = y @ w('mlp.gate')
      x[t] = x[t] + (gate / (1 + np.exp(-gate)) * (y @ w('mlp.up'))) @ w('mlp.down')
  return np.array([oracle_norm(y, p['trunk.final_norm.scale'], c.norm_eps) for y in x])


@pytest.mark.parametrize('config', [TINY, FULL], ids=['tied', 'norms_biases_untied'])
def test_policy_equals_the_oracle(config):
  params, (tokens, positions) = random_params(transformer.Policy, config), random_tokens(2, 7)
  positions = positions + np.array([[0], [1000]], np.int32)
  got = compiled(config)(params, tokens, positions)
  head = np.asarray(params['trunk.embedding'], np.float64).T if config.tie_embeddings else np.asarray(params['unembedding'], np.float64)
  want = np.stack([oracle_row(params, t, q, config) @ head for t, q in zip(tokens, positions)])
  assert got.dtype == jnp.float32 and got.shape == (2, 7, 61)
  np.testing.assert_allclose(got, want, atol=2e-5 * np.max(np.abs(want)), rtol=0)


def test_value_model_equals_the_oracle():
  params, (tokens, positions) = random_params(transformer.ValueModel, FULL), random_tokens(2, 7)

  @jax.jit
  def values(params):
    return transformer.merge(transformer.ValueModel, FULL, params)(tokens, positions, attention.causal_attention)

  hidden = np.stack([oracle_row(params, t, q, FULL) for t, q in zip(tokens, positions)])
  want = hidden @ np.asarray(params['head'], np.float64) + float(params['head_bias'])
  np.testing.assert_allclose(values(params), want, atol=2e-5 * np.max(np.abs(want)), rtol=0)


def test_a_value_model_made_from_a_policy_starts_at_zero():
  policy = random_params(transformer.Policy, FULL)
  value = transformer.value_params_from_policy(policy, FULL)
  tokens, positions = random_tokens()
  model = transformer.merge(transformer.ValueModel, FULL, value)
  assert not np.any(model(tokens, positions, attention.causal_attention))
  assert set(value) == (set(policy) - {'unembedding'}) | {'head', 'head_bias'}


def test_leaves():
  _, tied, axes = transformer.abstract(transformer.Policy, TINY)
  _, untied, _ = transformer.abstract(transformer.Policy, FULL)
  assert 'unembedding' not in tied and untied['unembedding'].shape == (32, 61)
  assert set(tied) == set(axes) and all(len(axes[p]) == len(s.shape) for p, s in tied.items())


# --- What may not matter -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('kind', ['dense', 'blockwise'])
def test_what_comes_later_cannot_matter(kind):
  config = dataclasses.replace(FULL, attention=kind, attention_block=4)
  params, (tokens, positions) = random_params(transformer.Policy, config), random_tokens(3, 13)
  run = compiled(config)
  whole = np.asarray(run(params, tokens, positions))
  for cut in (1, 5, 12):
    other = tokens.copy()
    other[:, cut:] = (other[:, cut:] + 7) % 61
    np.testing.assert_array_equal(run(params, other, positions)[:, :cut], whole[:, :cut])
    assert np.max(np.abs(run(params, other, positions)[:, cut:] - whole[:, cut:])) > 1e-3


@pytest.mark.parametrize('kind', ['dense', 'blockwise'])
def test_padding_and_neighbours_change_nothing_but_round_off(kind):
  config = dataclasses.replace(FULL, attention=kind, attention_block=4)
  params, (tokens, _) = random_params(transformer.Policy, config), random_tokens(3, 13)
  run = compiled(config)
  alone = [np.asarray(run(params, t[None], np.arange(13)[None]))[0] for t in tokens]
  padded = np.concatenate([tokens, np.zeros((3, 6), np.int32)], axis=1)[::-1]
  together = np.asarray(run(params, padded, np.broadcast_to(np.arange(19), (3, 19))))[::-1, :13]
  np.testing.assert_allclose(together, np.stack(alone), atol=2e-5)


# --- Settings against each other -----------------------------------------------------------------------------------------------


def loss(params, tokens, positions, config):
  return jnp.mean(jnp.sin(forward(params, tokens, positions, config)))


@functools.cache
def reference_gradient():
  params, (tokens, positions) = random_params(transformer.Policy, FULL), random_tokens(3, 13)
  return jax.jit(jax.value_and_grad(functools.partial(loss, config=FULL)))(params, tokens, positions)


@pytest.mark.slow
@pytest.mark.parametrize('scan, remat, kind', [
    (False, True, 'blockwise'), (True, False, 'dense'), (True, False, 'blockwise'), (True, True, 'dense')])
def test_layouts_give_the_same_loss_and_gradient(scan, remat, kind):
  params, (tokens, positions) = random_params(transformer.Policy, FULL), random_tokens(3, 13)
  want, want_grad = reference_gradient()
  config = dataclasses.replace(FULL, scan_layers=scan, remat=remat, attention=kind, attention_block=4)
  given = transformer.stack_layers(params) if scan else params
  _, shapes, _ = transformer.abstract(transformer.Policy, config)
  assert {p: x.shape for p, x in given.items()} == {p: s.shape for p, s in shapes.items()}
  got, grad = jax.jit(jax.value_and_grad(functools.partial(loss, config=config)))(given, tokens, positions)
  grad = transformer.unstack_layers(grad) if scan else grad
  assert set(grad) == set(want_grad) and len(grad) > 20
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)
  for path, x in want_grad.items():
    np.testing.assert_allclose(grad[path], x, atol=1e-5 * max(1e-2, float(jnp.max(jnp.abs(x)))), err_msg=path)
    assert np.any(x), path


def test_stacking_round_trip():
  params = random_params(transformer.Policy, FULL)
  stacked = transformer.stack_layers(params)
  assert stacked['trunk.layers.mlp.up'].shape == (2, 32, 48) and not any('.0.' in p for p in stacked)
  again = transformer.unstack_layers(stacked)
  assert set(again) == set(params)
  for path, x in params.items():
    np.testing.assert_array_equal(again[path], x)


def test_scanned_initialisation_has_the_same_spread():
  unrolled = transformer.stack_layers(transformer.init(transformer.Policy, FULL, jax.random.key(0)))
  scanned = transformer.init(transformer.Policy, dataclasses.replace(FULL, scan_layers=True), jax.random.key(0))
  assert {p: x.shape for p, x in unrolled.items()} == {p: x.shape for p, x in scanned.items()}
  for path, x in scanned.items():
    np.testing.assert_allclose(jnp.std(x), jnp.std(unrolled[path]), rtol=0.15, atol=1e-6)
  assert np.max(np.abs(scanned['trunk.layers.mlp.up'][0] - scanned['trunk.layers.mlp.up'][1])) > 0.1


@pytest.mark.parametrize('scan', [False, True])
def test_each_layer_gets_its_own_attention_state(scan):
  config = dataclasses.replace(FULL, scan_layers=scan)
  params, (tokens, positions) = random_params(transformer.Policy, FULL), random_tokens(2, 5)
  params = transformer.stack_layers(params) if scan else params

  def attend(q, k, v, state):
    return attention.causal_attention(q, k, v)[0], {'number': state['number'] * 10, 'key': k}

  states = {'number': jnp.arange(2)} if scan else [{'number': jnp.int32(i)} for i in range(2)]
  model = transformer.merge(transformer.Policy, config, params)
  _, new = jax.jit(lambda: model.hidden(tokens, positions, attend, states))()
  numbers = new['number'] if scan else [s['number'] for s in new]
  keys = new['key'] if scan else jnp.stack([s['key'] for s in new])
  assert list(map(int, numbers)) == [0, 10]
  assert keys.shape == (2, 2, 5, 2, 16) and np.max(np.abs(keys[0] - keys[1])) > 0.1
  with pytest.raises(ValueError):
    model.hidden(tokens, positions, attend, {'number': jnp.arange(3)} if scan else states[:1])


@pytest.mark.slow
def test_remat_saves_memory():
  big = dataclasses.replace(TINY, num_layers=8, scan_layers=True, attention='blockwise')
  tokens, positions = random_tokens(4, 128)

  def temporary(remat):
    config = dataclasses.replace(big, remat=remat)
    _, shapes, _ = transformer.abstract(transformer.Policy, config)
    program = jax.jit(jax.grad(functools.partial(loss, config=config))).lower(shapes, tokens, positions).compile()
    return program.memory_analysis().temp_size_in_bytes

  assert temporary(True) < 0.6 * temporary(False)


def test_bfloat16_computes_logits_in_float32():
  config = dataclasses.replace(FULL, compute_dtype='bfloat16')
  params, (tokens, positions) = random_params(transformer.Policy, FULL), random_tokens()
  got, want = compiled(config)(params, tokens, positions), compiled(FULL)(params, tokens, positions)
  assert got.dtype == jnp.float32
  assert 0 < np.max(np.abs(got - want)) < 0.15 * np.max(np.abs(want))


# --- Attention -----------------------------------------------------------------------------------------------------------------


def random_qkv(b, t, h, k, d, dtype=np.float32):
  rng = np.random.default_rng(b * 1000 + t)
  return [jnp.asarray(2 * rng.normal(size=(b, t, n, d)), dtype) for n in (h, k, k)]

@pytest.mark.parametrize('heads', [(4, 4, 8), (6, 2, 5)])
def test_dense_attention_has_the_gradient_of_its_formula(heads):
  """Its gradient is written by hand: compared with automatic differentiation of softmax(q k / sqrt(d)) v, query by query."""
  h, groups, e = heads
  q, k, v, weight = (jax.random.normal(jax.random.key(i), (2, 9, n, d)) for i, (n, d) in enumerate([(h, 7), (groups, 7), (groups, e), (h, e)]))

  def plain(q, k, v):
    k, v = (jnp.repeat(x, h // groups, axis=2) for x in (k, v))
    rows = [jnp.einsum('bhs,bshe->bhe', jax.nn.softmax(jnp.einsum('bhd,bshd->bhs', q[:, t], k[:, :t + 1]) / 7**0.5), v[:, :t + 1])
            for t in range(q.shape[1])]
    return jnp.stack(rows, axis=1)

  want, pull = jax.vjp(plain, q, k, v)
  got, pull_got = jax.vjp(lambda q, k, v: attention.causal_attention(q, k, v)[0], q, k, v)
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
  for ours, theirs in zip(pull_got(weight), pull(weight), strict=True):
    assert np.abs(theirs).max() > 0.1
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)



@pytest.mark.parametrize('t, block', [(1, 1), (1, 8), (5, 1), (7, 8), (8, 8), (9, 8), (40, 8), (31, 64)])
@pytest.mark.parametrize('heads', [(3, 3), (4, 2), (6, 1)])
def test_blockwise_equals_dense(t, block, heads):
  q, k, v = random_qkv(2, t, *heads, 8)
  weights = jnp.asarray(np.random.default_rng(0).normal(size=q.shape), jnp.float32)

  def run(attend):
    return jax.jit(jax.value_and_grad(lambda q, k, v: (attend(q, k, v)[0] * weights).sum(), argnums=(0, 1, 2)))(q, k, v)

  want, got = run(attention.causal_attention), run(functools.partial(attention.blockwise_attention, block=block))
  np.testing.assert_allclose(got[0], want[0], rtol=1e-5, atol=1e-5)
  for a, b in zip(got[1], want[1], strict=True):
    np.testing.assert_allclose(a, b, atol=5e-6 * max(1.0, float(jnp.max(jnp.abs(b)))))


def test_blockwise_takes_extreme_scores():
  q, k, v = random_qkv(1, 24, 2, 1, 8)
  for scale in (0.0, 300.0):
    out, grad = jax.value_and_grad(lambda q: attention.blockwise_attention(q * scale, k * scale, v, block=8)[0].sum())(q)
    want = attention.causal_attention(q * scale, k * scale, v)[0].sum()
    assert np.all(np.isfinite(grad))
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)


def test_blockwise_bfloat16_is_as_close_as_dense():
  q, k, v = random_qkv(2, 40, 4, 2, 16)
  exact = attention.causal_attention(q, k, v)[0]
  low = [x.astype(jnp.bfloat16) for x in (q, k, v)]
  dense, blocks = attention.causal_attention(*low)[0], attention.blockwise_attention(*low, block=8)[0]
  assert blocks.dtype == jnp.bfloat16
  error = lambda x: float(jnp.max(jnp.abs(x.astype(jnp.float32) - exact)))
  assert error(blocks) <= 1.5 * error(dense) + 1e-3


def test_blockwise_memory_is_linear_in_length():

  def temporary(attend, t):
    shapes = [jax.ShapeDtypeStruct((1, t, n, 16), jnp.float32) for n in (4, 2, 2)]
    program = jax.jit(jax.grad(lambda q, k, v: attend(q, k, v)[0].sum(), argnums=(0, 1, 2))).lower(*shapes).compile()
    return program.memory_analysis().temp_size_in_bytes

  blocks = functools.partial(attention.blockwise_attention, block=64)
  assert temporary(blocks, 4096) < 2.2 * temporary(blocks, 2048)
  assert temporary(attention.causal_attention, 2048) > 3.5 * temporary(attention.causal_attention, 1024)
  assert temporary(blocks, 4096) < temporary(attention.causal_attention, 1024)


def test_attention_is_chosen_by_name():
  assert attention.make(TINY) is attention.causal_attention
  with pytest.raises(ValueError, match="'dense' or 'blockwise', got 'flash'"):
    attention.make(dataclasses.replace(TINY, attention='flash'))


# --- On a mesh -----------------------------------------------------------------------------------------------------------------

MESHED = dataclasses.replace(FULL, vocab_size=62)  # Divides over tensor=2.


@pytest.mark.slow
@pytest.mark.parametrize('sizes, scan', [
    ((1, 4, 1, 1, 2), False), ((2, 2, 1, 1, 2), True), ((1, 2, 1, 1, 4), True), ((8, 1, 1, 1, 1), False)], ids=str)
def test_init_on_a_mesh_gives_the_same_numbers_where_they_belong(sizes, scan):
  mesh, config = sharding.make_mesh(jax.devices(), sizes), dataclasses.replace(MESHED, scan_layers=scan)
  params = transformer.init_on_mesh(transformer.Policy, config, jax.random.key(0), mesh)
  plain = jax.jit(functools.partial(transformer.init, transformer.Policy, config))(jax.random.key(0))
  _, shapes, axes = transformer.abstract(transformer.Policy, config)
  placement = sharding.param_shardings(axes, shapes, mesh)
  for path, x in params.items():
    assert x.sharding == placement[path]
    assert x.addressable_shards[0].data.nbytes * len(x.sharding.device_set) >= x.nbytes
    np.testing.assert_array_equal(x, plain[path])
  if sizes[0] != 8:
    sharding.check_replication(params, limit_bytes=3 * 2 * 16 * 4 * (2 + 4))  # q/k norms, and key/value biases where K < tensor.


@pytest.mark.slow
@pytest.mark.parametrize('sizes, scan, kind', [((1, 4, 1, 1, 2), False, 'dense'), ((1, 2, 1, 1, 4), True, 'blockwise')], ids=str)
def test_forward_and_gradient_on_a_mesh_equal_one_device(sizes, scan, kind):
  config = dataclasses.replace(MESHED, scan_layers=scan, attention=kind, attention_block=8, remat=scan)
  mesh = sharding.make_mesh(jax.devices(), sizes)
  shard = sharding.shard_fn(mesh)
  plain = random_params(transformer.Policy, config)
  plain = transformer.stack_layers(plain) if scan else plain
  _, shapes, axes = transformer.abstract(transformer.Policy, config)
  placement = sharding.param_shardings(axes, shapes, mesh)
  tokens, positions = random_tokens(8, 13)

  def run(params, tokens, positions, shard):

    def total(params):
      logits = shard(forward(params, tokens, positions, config, shard), ('batch', 'length', 'vocab'))
      return jnp.mean(jnp.sin(logits)), logits

    return jax.value_and_grad(total, has_aux=True)(params)

  rows = sharding.batch_sharding(mesh)
  program = jax.jit(
      functools.partial(run, shard=shard), in_shardings=(placement, rows, rows), out_shardings=((None, None), placement))
  (value, logits), grad = program(jax.device_put(plain, placement), *jax.device_put((tokens, positions), rows))
  (want, want_logits), want_grad = jax.jit(functools.partial(run, shard=transformer.no_shard))(plain, tokens, positions)
  assert {s.data.shape[0] for s in logits.addressable_shards} == {8 // sizes[1]}
  assert {s.data.shape[2] for s in logits.addressable_shards} == {62 // sizes[4] if 62 % sizes[4] == 0 else 62}
  np.testing.assert_allclose(logits, want_logits, atol=2e-5 * float(jnp.max(jnp.abs(want_logits))))
  np.testing.assert_allclose(value, want, rtol=1e-5, atol=1e-7)
  for path, x in want_grad.items():
    assert grad[path].sharding == placement[path]
    np.testing.assert_allclose(grad[path], x, atol=2e-5 * max(1e-2, float(jnp.max(jnp.abs(x)))), err_msg=path)
