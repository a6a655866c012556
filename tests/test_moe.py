"""Mixture of experts: grouped products, routing and the whole layer against float64 loops; loads; the balance loss; sharded experts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax import sharding
from sao_jax.config import ExpertsConfig, ModelConfig
from sao_jax.models import attention
from sao_jax.models import grouped
from sao_jax.models import layers
from sao_jax.models import moe
from sao_jax.models import transformer

TINY = ModelConfig(vocab_size=64, embed_dim=16, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=24, max_length=64)
SOFTMAX = ExpertsConfig(count=8, top_k=2, mlp_dim=12)
SIGMOID = ExpertsConfig(
    count=8, top_k=3, mlp_dim=12, shared=2, router='sigmoid', scale=2.5, groups=4, top_groups=2, dense_layers=(0,))
MODELS = {
    'softmax': dataclasses.replace(TINY, experts=SOFTMAX, qk_norm=True),
    'plain_between': dataclasses.replace(TINY, experts=dataclasses.replace(SOFTMAX, dense_layers=(1,), normalise=False)),
    'sigmoid': dataclasses.replace(TINY, experts=SIGMOID, tie_embeddings=False)}


def random_params(kind, config, seed=0):
  """Random parameters, unrolled, in which norms, corrections and heads matter too."""
  params = transformer.init(kind, dataclasses.replace(config, scan_layers=False), jax.random.key(seed))
  rng = np.random.default_rng(seed)
  matter = ('scale', 'correction', 'bias', 'head')
  return {p: x + jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype) if p.endswith(matter) else x for p, x in sorted(params.items())}


def forward(config, params, tokens, shard=layers.no_shard, mask=None):
  model = transformer.merge(transformer.Policy, config, params)
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  mask = jnp.ones(tokens.shape, bool) if mask is None else mask
  hidden, load = model.hidden_and_load(tokens, positions, attention.make(config), mask, shard=shard)
  return model.logits(hidden), load


# --- Grouped products ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('sizes, rest, transposed', [
    ([3, 0, 5, 1], 5, False), ([0, 0, 0, 0], 5, False), ([9, 0, 0, 0], 0, False), ([0, 0, 0, 11], 5, True), ([40, 37, 1, 22], 0, True),
    ([300, 7, 0, 500], 5, False)], ids=str)
def test_products_equal_a_loop(sizes, rest, transposed):
  """Output and both gradients; rows behind the last group hold garbage that may not matter."""
  rng = np.random.default_rng(sum(sizes) + rest)
  rows, used = max(sum(sizes) + rest, 1), sum(sizes)
  x, out_gradient = rng.normal(size=(rows, 6)).astype(np.float32), rng.normal(size=(rows, 10)).astype(np.float32)
  weight = rng.normal(size=(len(sizes), 6, 10)).astype(np.float32)
  given = weight.swapaxes(1, 2) if transposed else weight
  run = jax.jit(lambda x, w, s: jax.vjp(lambda x, w: grouped.product(x, w, s, transposed), x, w))
  out, back = run(x, given, np.array(sizes, np.int32))
  x_gradient, weight_gradient = back(out_gradient)
  group = np.repeat(np.arange(len(sizes)), sizes)
  want, want_x, want_weight = np.zeros((rows, 10)), np.zeros((rows, 6)), np.zeros(weight.shape)
  for n in range(used):
    w = weight[group[n]].astype(np.float64)
    want[n], want_x[n] = x[n] @ w, w @ out_gradient[n]
    want_weight[group[n]] += np.outer(x[n], out_gradient[n])
  np.testing.assert_allclose(out, want, atol=1e-5)
  np.testing.assert_allclose(x_gradient, want_x, atol=1e-5)
  np.testing.assert_allclose(weight_gradient, want_weight.swapaxes(1, 2) if transposed else want_weight, atol=3e-5)


def test_each_platform_has_its_own_kernel():
  """Lowered without the hardware: megablox on TPUs, ragged_dot on GPUs, neither on the CPU."""
  shapes = [jax.ShapeDtypeStruct(s, d) for s, d in (((300, 128), jnp.bfloat16), ((4, 128, 256), jnp.bfloat16), ((4,), jnp.int32))]

  def both(x, w, s):
    out, back = jax.vjp(lambda x, w: grouped.product(x, w, s), x, w)
    return out, back(out)

  text = {p: jax.export.export(jax.jit(both), platforms=[p])(*shapes).mlir_module() for p in ('cpu', 'tpu', 'cuda')}
  assert text['tpu'].count('tpu_custom_call') >= 3 and 'ragged_dot' not in text['tpu']
  assert 'tpu_custom_call' not in text['cpu'] and 'tpu_custom_call' not in text['cuda'] and 'while' in text['cpu']


def test_other_platforms_compute_the_same():
  """What GPUs run, run here."""
  rng = np.random.default_rng(0)
  x, y, weight = (rng.normal(size=s).astype(np.float32) for s in ((20, 6), (20, 10), (4, 6, 10)))
  sizes = jnp.array([3, 0, 9, 5], jnp.int32)
  np.testing.assert_allclose(
      grouped._ragged_product(x, weight, sizes, transposed=False), grouped._cpu_product(x, weight, sizes, transposed=False), atol=1e-5)
  np.testing.assert_allclose(
      grouped._ragged_product(y, weight, sizes, transposed=True), grouped._cpu_product(y, weight, sizes, transposed=True), atol=1e-5)
  np.testing.assert_allclose(grouped._ragged_outer(x, y, sizes), grouped._cpu_outer(x, y, sizes), atol=1e-5)


# --- Routing -------------------------------------------------------------------------------------------------------------------


def oracle_route(logits, correction, c):
  """ids and weights of one token, by sorting lists."""
  if c.router == 'softmax':
    scores = np.exp(logits - logits.max()) / np.sum(np.exp(logits - logits.max()))
  else:
    scores = 1 / (1 + np.exp(-logits))
  ranking = list(scores + (correction if correction is not None else 0))
  if c.groups > 1:
    size = c.count // c.groups
    sums = [sum(sorted(ranking[g * size: (g + 1) * size])[-2:]) for g in range(c.groups)]
    kept = sorted(range(c.groups), key=lambda g: -sums[g])[:c.top_groups]
    ranking = [r if e // size in kept else -np.inf for e, r in enumerate(ranking)]
  ids = sorted(range(c.count), key=lambda e: -ranking[e])[:c.top_k]
  weights = np.array([scores[e] for e in ids])
  return ids, weights / (weights.sum() if c.normalise else 1.0) * c.scale


@pytest.mark.parametrize('config', [
    SOFTMAX, SIGMOID, dataclasses.replace(SOFTMAX, normalise=False, scale=0.5), dataclasses.replace(SIGMOID, groups=1, top_groups=1),
    dataclasses.replace(SOFTMAX, top_k=8)], ids=['softmax', 'groups', 'not_normalised', 'one_group', 'all_experts'])
def test_routing_equals_a_loop(config):
  rng = np.random.default_rng(0)
  logits = 2 * rng.normal(size=(5, 7, 8)).astype(np.float32)
  correction = rng.normal(size=8).astype(np.float32) if config.router == 'sigmoid' else None
  choice = jax.jit(functools.partial(moe.route, config=config))(logits, correction)
  np.testing.assert_allclose(np.sum(choice.probs, axis=-1), 1.0, atol=1e-5)
  for place in np.ndindex(5, 7):
    ids, weights = oracle_route(logits[place].astype(np.float64), correction, config)
    assert list(choice.ids[place]) == ids
    np.testing.assert_allclose(choice.weights[place], weights, rtol=1e-5)


def test_the_correction_moves_the_choice_but_not_the_weights():
  config = dataclasses.replace(SIGMOID, groups=1, top_groups=1, top_k=1, normalise=False, scale=1.0)
  logits = jnp.array([[2.0, 1.0, 0, 0, 0, 0, 0, 0]])
  correction = jnp.array([0.0, 1.0, 0, 0, 0, 0, 0, 0])
  choice = moe.route(logits, correction, config)
  assert int(choice.ids[0, 0]) == 1
  np.testing.assert_allclose(choice.weights[0, 0], jax.nn.sigmoid(1.0), rtol=1e-6)
  gradient = jax.grad(lambda c: jnp.sum(moe.route(logits, c, config).weights))(correction)
  assert not np.any(gradient)


# --- The layer -----------------------------------------------------------------------------------------------------------------


def oracle_layer(params, x, c):
  """[N, D] of tokens [N, D], token by token and expert by expert in float64."""
  p = {k: np.asarray(v, np.float64) for k, v in params.items()}
  silu = lambda z: z / (1 + np.exp(-z))
  out = []
  for token in x:
    ids, weights = oracle_route(token @ p['router.weight'], p.get('router.correction'), c)
    y = np.zeros_like(token)
    for e, w in zip(ids, weights, strict=True):
      y += w * ((silu(token @ p['experts.gate'][e]) * (token @ p['experts.up'][e])) @ p['experts.down'][e])
    if c.shared:
      y += (silu(token @ p['shared.gate']) * (token @ p['shared.up'])) @ p['shared.down']
    out.append(y)
  return np.array(out)


@pytest.mark.parametrize('name', MODELS)
@pytest.mark.parametrize('shape', [(2, 1), (3, 13), (2, 100)], ids=str)
def test_layer_equals_the_oracle(name, shape):
  config = MODELS[name]
  params = random_params(transformer.Policy, config)
  own = {p.removeprefix('trunk.layers.2.mlp.'): x for p, x in params.items() if p.startswith('trunk.layers.2.mlp.')}
  x = np.random.default_rng(1).normal(size=(*shape, 16)).astype(np.float32)

  @jax.jit
  def run(params, x):
    return transformer.merge(transformer.Policy, config, params).trunk.layers[2].mlp(x, layers.no_shard)[0]

  want = oracle_layer(own, x.reshape(-1, 16).astype(np.float64), config.experts)
  np.testing.assert_allclose(run(params, x).reshape(-1, 16), want, atol=2e-5 * np.max(np.abs(want)))


def test_layers_with_and_without_experts():
  for name, experts in (('softmax', [0, 1, 2]), ('plain_between', [0, 2]), ('sigmoid', [1, 2])):
    params = transformer.abstract(transformer.Policy, MODELS[name])[1]
    assert [i for i in range(3) if f'trunk.layers.{i}.mlp.experts.up' in params] == experts
    assert [i for i in range(3) if f'trunk.layers.{i}.mlp.up' in params] == [i for i in range(3) if i not in experts]
  half = dataclasses.replace(MODELS['sigmoid'], param_dtype='bfloat16')
  dtypes = {p: s.dtype for p, s in transformer.abstract(transformer.Policy, half)[1].items()}
  assert {p for p, d in dtypes.items() if d == jnp.float32} == {p for p in dtypes if '.router.' in p} and len(dtypes) > 20


@pytest.mark.parametrize('name', ['softmax', 'sigmoid'])
def test_scanned_layers_are_the_unrolled_ones(name):
  config = MODELS[name]
  params, tokens = random_params(transformer.Policy, config), np.arange(26).reshape(2, 13)
  scanned = dataclasses.replace(config, scan_layers=True)
  stacked = transformer.stack_layers(params)
  assert {p: x.shape for p, x in stacked.items()} == {p: s.shape for p, s in transformer.abstract(transformer.Policy, scanned)[1].items()}
  assert ('trunk.first_layers.mlp.up' in stacked) == (name == 'sigmoid')
  again = transformer.unstack_layers(stacked)
  assert set(again) == set(params) and all(np.array_equal(again[p], params[p]) for p in params)
  want, want_load = jax.jit(functools.partial(forward, config))(params, tokens)
  got, load = jax.jit(functools.partial(forward, scanned))(stacked, tokens)
  np.testing.assert_allclose(got, want, atol=2e-5 * np.max(np.abs(want)))
  np.testing.assert_array_equal(load.chosen, want_load.chosen)
  assert load.chosen.shape == (2 if name == 'sigmoid' else 3, 8)


def test_scanned_layers_of_too_many_kinds_are_refused():
  with pytest.raises(ValueError, match='scan_layers needs layers of one kind.*plain feed-forwards behind the first layer with experts'):
    transformer.abstract(transformer.Policy, dataclasses.replace(MODELS['plain_between'], scan_layers=True))


def test_padding_and_neighbours_change_nothing_but_round_off():
  config = MODELS['sigmoid']
  params, tokens = random_params(transformer.Policy, config), np.random.default_rng(0).integers(0, 64, (3, 9))
  run = jax.jit(lambda params, tokens: forward(config, params, tokens)[0])
  alone = np.stack([run(params, t[None])[0] for t in tokens])
  together = run(params, np.concatenate([tokens, np.zeros((3, 7), int)], axis=1)[::-1])[::-1, :9]
  np.testing.assert_allclose(together, alone, atol=2e-5 * np.max(np.abs(alone)))


# --- Loads and the balance loss ------------------------------------------------------------------------------------------------


def loss_of(choice, mask):
  load = jax.tree.map(lambda x: x[None], moe.load_of(choice, mask))
  return moe.balance_loss(load, load.chosen, load.tokens)


def test_padding_does_not_make_a_collapsed_router_look_balanced():
  """2 experts, 4 real tokens that all choose expert 0, 12 padding tokens that would choose expert 1."""
  config = ExpertsConfig(count=2, top_k=1, mlp_dim=4)
  logits = jnp.where(jnp.arange(16)[:, None] < 4, jnp.array([2.0, 0.0]), jnp.array([0.0, 2.0]))[None]
  mask = (jnp.arange(16) < 4)[None]
  p = 1 / (1 + np.exp(-2.0))
  run = lambda logits, mask: loss_of(moe.route(logits, None, config), mask)
  assert float(run(logits, mask)) == pytest.approx(2 * p, rel=1e-6)  # 2 * (1 * p + 0 * (1 - p)).
  with_padding = 2 * (0.25 * (p + 3 * (1 - p)) / 4 + 0.75 * (1 - p + 3 * p) / 4)
  assert float(run(logits, jnp.ones((1, 16), bool))) == pytest.approx(with_padding, rel=1e-6)
  gradient = jax.grad(run)(logits, mask)
  assert not np.any(gradient[0, 4:]) and np.all(gradient[0, :4, 0] > 0)
  poisoned = jnp.where(mask[..., None], logits, 1e30)
  assert float(run(poisoned, mask)) == pytest.approx(2 * p, rel=1e-6) and np.all(np.isfinite(jax.grad(run)(poisoned, mask)))
  assert float(run(logits, jnp.zeros((1, 16), bool))) == 0.0


@pytest.mark.parametrize('top_k', [1, 2, 4])
def test_an_even_use_of_experts_has_loss_one(top_k):
  config = ExpertsConfig(count=4, top_k=top_k, mlp_dim=4)
  logits = jnp.stack([jnp.roll(jnp.array([3.0, 2.0, 1.0, 0.0]), i) for i in range(4)])[None]
  assert float(loss_of(moe.route(logits, None, config), jnp.ones((1, 4), bool))) == pytest.approx(1.0, rel=1e-6)
  same = jnp.tile(logits[:, :1] * 10, (1, 4, 1))
  assert float(loss_of(moe.route(same, None, config), jnp.ones((1, 4), bool))) == pytest.approx(4 / top_k, rel=1e-3)


def test_loads_of_parts_add_up():
  config = MODELS['sigmoid']
  params, tokens = random_params(transformer.Policy, config), np.random.default_rng(0).integers(0, 64, (4, 9))
  mask = np.random.default_rng(1).random((4, 9)) < 0.6
  run = jax.jit(lambda tokens, mask: forward(config, params, tokens, mask=mask)[1])
  whole = run(tokens, mask)
  parts = jax.tree.map(jnp.add, run(tokens[:2], mask[:2]), run(tokens[2:], mask[2:]))
  np.testing.assert_array_equal(whole.chosen, parts.chosen)
  np.testing.assert_allclose(whole.probs, parts.probs, rtol=1e-5)
  np.testing.assert_array_equal(np.sum(whole.chosen, axis=-1), 3 * mask.sum() * np.ones(2))
  np.testing.assert_allclose(np.sum(whole.probs, axis=-1), mask.sum(), rtol=1e-5)
  np.testing.assert_array_equal(whole.tokens, mask.sum() * np.ones(2))


# --- On a mesh -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('name, sizes, scan', [
    ('sigmoid', (1, 2, 2, 1, 2), False), ('softmax', (1, 1, 8, 1, 1), False), ('sigmoid', (2, 1, 4, 1, 1), True)], ids=str)
def test_experts_on_a_mesh_equal_one_device(name, sizes, scan):
  config = dataclasses.replace(MODELS[name], scan_layers=scan, remat=scan)
  mesh = sharding.make_mesh(jax.devices(), sizes)
  plain = random_params(transformer.Policy, config)
  plain = transformer.stack_layers(plain) if scan else plain
  _, shapes, axes = transformer.abstract(transformer.Policy, config)
  placement = sharding.param_shardings(axes, shapes, mesh)
  tokens, mask = np.random.default_rng(0).integers(0, 64, (8, 6)), np.random.default_rng(1).random((8, 6)) < 0.7

  def run(params, tokens, shard):

    def total(params):
      logits, load = forward(config, params, tokens, shard, mask)
      return jnp.mean(jnp.sin(logits)) + moe.balance_loss(load, load.chosen, load.tokens), load

    return jax.value_and_grad(total, has_aux=True)(params)

  rows = sharding.batch_sharding(mesh)
  program = jax.jit(
      functools.partial(run, shard=sharding.shard_fn(mesh)), in_shardings=(placement, rows), out_shardings=((None, None), placement))
  (value, load), gradient = program(jax.device_put(plain, placement), jax.device_put(tokens, rows))
  (want, want_load), want_gradient = jax.jit(functools.partial(run, shard=layers.no_shard))(plain, tokens)
  np.testing.assert_allclose(value, want, rtol=1e-5)
  np.testing.assert_array_equal(load.chosen, want_load.chosen)
  up = next(x for p, x in gradient.items() if p.endswith('experts.up'))
  assert {s.data.shape[-3] for s in up.addressable_shards} == {8 // sizes[2]}
  assert {s.data.shape[-1] for s in up.addressable_shards} == {12 // sizes[4]}
  for path, x in want_gradient.items():
    np.testing.assert_allclose(gradient[path], x, atol=2e-5 * max(1e-2, float(jnp.max(jnp.abs(x)))), err_msg=path)
    assert np.any(x) or path.endswith('correction'), path


def test_experts_that_do_not_divide_are_refused():
  mesh = sharding.make_mesh(jax.devices()[:3], (1, 1, 3, 1, 1))
  _, shapes, axes = transformer.abstract(transformer.Policy, MODELS['softmax'])
  with pytest.raises(ValueError, match="axis 'expert' of size 8 does not divide over mesh axis 'expert' of size 3"):
    sharding.param_shardings(axes, shapes, mesh)
