"""Every family against transformers: long prefill and step-by-step decode from recorded outputs, and live export and reload."""

import dataclasses
import functools
import importlib.util
import json
import logging
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from sao_jax import models
from sao_jax.config import ModelConfig
from sao_jax.models import attention
from sao_jax.models import families
from sao_jax.models import kv_cache
from sao_jax.models import pretrained
from sao_jax.models import transformer
from sao_jax.updates import is_frozen

GOLDENS = pathlib.Path(__file__).parent / 'goldens'
FAMILIES = ('llama3', 'qwen2', 'qwen3', 'qwen3_yarn', 'qwen3_moe', 'glm4_moe', 'glm_moe_dsa', 'glm_moe_dsa_yarn')
SCANNED = ('llama3', 'qwen3', 'glm4_moe')  # The others' layers are of too many kinds.
TOLERANCE = 2e-5  # Of the largest logit.


def folder_of(name):
  return GOLDENS / f'family_{name}'


@functools.lru_cache(maxsize=None)
def load(name, **settings):
  config = pretrained.resolve_config(ModelConfig(pretrained=str(folder_of(name)), **settings))
  return config, pretrained.load_params(config)


def outputs(name):
  return np.load(folder_of(name) / 'outputs.npz')


def assert_close(got, want, tolerance=TOLERANCE):
  """The error is printed for the table in docs/models.md: pytest -rP shows it."""
  assert got.shape == want.shape and want.size > 0
  error = np.max(np.abs(got - want)) / np.max(np.abs(want))
  print(f'error {error:.1e} of the largest logit')
  assert error <= tolerance


@functools.lru_cache(maxsize=None)
def forward(config):
  """Jitted logits of whole rows, at some positions of them or at all."""

  def run(params, tokens, at=None):
    model = transformer.merge(transformer.Policy, config, params)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _ = model.hidden(tokens, positions, attention.make(config))
    return model.logits(hidden if at is None else hidden[:, at])

  return jax.jit(run)


# --- Parity with recorded outputs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize('name', [*FAMILIES, *(f'{n}/scanned' for n in SCANNED)])
def test_logits_of_short_rows(name):
  name, _, scanned = name.partition('/')
  config, params = load(name, scan_layers=bool(scanned))
  golden = outputs(name)
  got = forward(config)(params, golden['short'].astype(np.int32))
  assert got.shape == (2, 48, 64)
  assert_close(got, golden['logits'])


@pytest.mark.parametrize('name', [pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES])
def test_logits_deep_in_long_rows(name):
  """Positions 0, 1, 1000 and 8191, and 32767 where angles are scaled, of one prefill of the whole row; and which keys the index chooses."""
  config, params = load(name, attention='blockwise', attention_block=512)
  golden = outputs(name)
  assert golden['positions'][-1] == len(golden['long']) - 1 >= 8191
  got, chosen = forward_and_choices(config, params, golden['long'][None].astype(np.int32), golden['positions'])
  if golden['positions'][-1] > 8191:
    assert_close(got[-1:], golden['long_logits'][-1:])
  assert_close(got, golden['long_logits'])
  if name == 'glm_moe_dsa':
    # In these 768 choices the last key that is chosen leads the first that is not by at least 4e-6 of the query's largest score.
    assert golden['chosen'].shape == (3, 256, 8)
    np.testing.assert_array_equal(chosen, golden['chosen'])


EVERY_32ND = slice(31, None, 32)


def forward_and_choices(config, params, tokens, at):
  """Logits f32[n, V] of a row at some positions, and the keys that every 32nd query chooses, i32[layers with an index, T / 32, k]."""
  attend = attention.make(config)

  @jax.jit
  def run(params, tokens):
    model, chosen = transformer.merge(transformer.Policy, config, params), []

    def watched(q, k, v, state, index=None):
      result = attend(q, k, v, state) if index is None else attend(q, k, v, state, index)
      if index is not None and index.query is not None:
        seen = jnp.where(result[2][0, EVERY_32ND], jnp.arange(tokens.shape[1]), tokens.shape[1])
        chosen.append(-jax.lax.top_k(-seen, index.top_k)[0])  # Their numbers, the smallest first.
      return result

    hidden, _ = model.hidden(tokens, jnp.arange(tokens.shape[1])[None], watched)
    return model.logits(hidden[:, at])[0], chosen

  logits, chosen = run(params, tokens)
  return np.asarray(logits), np.asarray(chosen)


def decode_logits(config, params, tokens, prompt, space):
  """Logits f32[B, T - prompt, V] by the cache: a prefill in two parts, then one token a step, in chunks of four."""
  b, length, page = tokens.shape[0], tokens.shape[1], 4
  tables = np.arange(b * space // page, dtype=np.int32).reshape(b, -1)
  everywhere = np.arange(length)
  slots = tables[:, everywhere // page] * page + everywhere % page

  @functools.partial(jax.jit, static_argnames='cached')
  def prefill(params, pool, tokens, start, slots, cached):
    model = transformer.merge(transformer.Policy, config, params)
    read = kv_cache.gather(pool, tables[:, : cached // page]) if cached else None
    positions = start[:, None] + jnp.arange(tokens.shape[1])
    return kv_cache.write_pages(pool, model.hidden(tokens, positions, kv_cache.extend_attention(start), read)[1], slots)

  @jax.jit
  def chunk(params, pool, tokens, start):
    model = transformer.merge(transformer.Policy, config, params)
    work = kv_cache.gather(pool, tables)

    def step(recent, part):
      i, token = part
      hidden, recent = model.hidden(
          token[:, None], (start + i)[:, None], kv_cache.decode_attention(start, i), kv_cache.join(work, recent))
      return recent, model.logits(hidden[:, 0])

    recent = kv_cache.zeros(config, b, tokens.shape[1], jnp.float32)
    recent, logits = jax.lax.scan(step, recent, (jnp.arange(tokens.shape[1]), tokens.T))
    rows = start[:, None] + jnp.arange(tokens.shape[1])
    return kv_cache.write_pages(pool, recent, jnp.take_along_axis(tables, rows // page, axis=1) * page + rows % page), logits

  pool = kv_cache.zeros(config, b * space // page, page, jnp.float32)
  first = prompt // 2 // page * page
  start = lambda n: np.full(b, n, np.int32)
  pool = prefill(params, pool, tokens[:, :first], start(0), slots[:, :first], 0)
  pool = prefill(params, pool, tokens[:, first: prompt], start(first), slots[:, first: prompt], space)
  logits = []
  for at in range(prompt, length, 4):
    pool, part = chunk(params, pool, tokens[:, at: at + 4], start(at))
    logits.append(part)
  return jnp.concatenate(logits).swapaxes(0, 1)


@pytest.mark.parametrize('name', [*FAMILIES, 'glm4_moe/scanned'])
def test_decoding_step_by_step(name):
  name, _, scanned = name.partition('/')
  config, params = load(name, scan_layers=bool(scanned))
  golden = outputs(name)
  got = decode_logits(config, params, golden['short'].astype(np.int32), prompt=20, space=48)
  assert_close(got, golden['logits'][:, 20:])


def test_tiny_models_cover_what_differs():
  configs = {name: load(name)[0] for name in FAMILIES}
  assert [c.rope.kind for c in configs.values()] == ['llama3', 'default', 'default', 'yarn', 'default', 'default', 'default', 'yarn']
  assert configs['llama3'].rope.original_length == 8192 and configs['llama3'].max_length == 65536
  assert configs['qwen3_moe'].experts.dense_layers == (1,) and configs['qwen3_moe'].experts.router == 'softmax'
  glm = configs['glm4_moe']
  assert glm.rope.fraction == 0.5 and glm.qkv_bias and glm.qk_norm and glm.experts.shared == 1 and glm.experts.scale == 2.5
  assert (glm.experts.groups, glm.experts.top_groups, glm.experts.dense_layers) == (4, 2, (0,))
  dsa = configs['glm_moe_dsa']
  assert dsa.latent.shared_index_layers == (2,) and (dsa.latent.index_top_k, dsa.latent.index_heads, dsa.head_dim) == (8, 16, 20)
  yarn = configs['glm_moe_dsa_yarn']
  assert yarn.rope.mscale_all_dim == 0.7 and (yarn.latent.index_top_k, yarn.latent.index_heads) == (32, 8)


# --- Loading and saving --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('name', FAMILIES)
@pytest.mark.parametrize('shard_bytes', [10**9, 20_000])
def test_saving_gives_back_the_same_files_and_parameters(name, shard_bytes, tmp_path):
  config, params = load(name)
  pretrained.save_params(tmp_path / 'saved', config, params, shard_bytes=shard_bytes)
  again = pretrained.resolve_config(ModelConfig(pretrained=str(tmp_path / 'saved')))
  assert dataclasses.replace(again, pretrained='') == dataclasses.replace(config, pretrained='')
  after = pretrained.load_params(again)
  assert set(params) == set(after)
  for path in params:
    np.testing.assert_array_equal(params[path], after[path])
  original = safetensors.numpy.load_file(folder_of(name) / 'model.safetensors')
  written = {}
  for file in (tmp_path / 'saved').glob('*.safetensors'):
    written |= safetensors.numpy.load_file(file)
  assert set(original) == set(written)
  for key in original:
    np.testing.assert_array_equal(original[key], written[key])


@pytest.mark.parametrize('name', ['glm4_moe', 'llama3'])
def test_stacked_parameters_are_loaded_and_saved(name, tmp_path):
  config, params = load(name, scan_layers=True)
  assert {p: x.shape for p, x in params.items()} == {p: s.shape for p, s in transformer.abstract(transformer.Policy, config)[1].items()}
  pretrained.save_params(tmp_path / 'saved', config, params)
  again = pretrained.load_params(pretrained.resolve_config(ModelConfig(pretrained=str(tmp_path / 'saved'))))
  for path, x in load(name)[1].items():
    np.testing.assert_array_equal(again[path], x)


def copied(name, tmp_path, *, settings=None, tensors=None):
  folder = tmp_path / 'model'
  shutil.copytree(folder_of(name), folder)
  values = json.loads((folder / 'config.json').read_text())
  (folder / 'config.json').write_text(json.dumps({**values, **(settings or {})}))
  if tensors is not None:
    safetensors.numpy.save_file(tensors(safetensors.numpy.load_file(folder / 'model.safetensors')), folder / 'model.safetensors')
  return folder


@pytest.mark.parametrize('name', ['qwen3_moe', 'glm4_moe', 'glm_moe_dsa'])
def test_experts_stored_as_one_tensor(name, tmp_path):
  """As transformers holds them in memory, and writes them when told not to convert."""

  def join(tensors):
    joined = {n: x for n, x in tensors.items() if '.experts.' not in n}
    for layer in sorted({n.split('.')[2] for n in tensors if '.experts.' in n}):
      prefix = f'model.layers.{layer}.mlp.experts.'
      count = len([n for n in tensors if n.startswith(prefix) and n.endswith('up_proj.weight')])
      stack = lambda kind, prefix=prefix, count=count: np.stack([tensors[f'{prefix}{e}.{kind}_proj.weight'] for e in range(count)])
      joined[prefix + 'gate_up_proj'] = np.concatenate([stack('gate'), stack('up')], axis=1)
      joined[prefix + 'down_proj'] = stack('down')
    return joined

  folder = copied(name, tmp_path, tensors=join)
  params = pretrained.load_params(pretrained.resolve_config(ModelConfig(pretrained=str(folder))))
  for path, x in load(name)[1].items():
    np.testing.assert_array_equal(params[path], x)


@pytest.mark.parametrize('name, layer', [('glm4_moe', 3), ('glm_moe_dsa', 4)])
def test_layers_of_multi_token_prediction_are_left_out_with_a_word(name, layer, tmp_path, caplog):

  def extend(tensors):
    extra = {n.replace(f'.{layer - 1}.', f'.{layer}.'): x for n, x in tensors.items() if n.startswith(f'model.layers.{layer - 1}.')}
    return {**tensors, **extra, f'model.layers.{layer}.eh_proj.weight': np.zeros((32, 64), np.float32)}

  folder = copied(name, tmp_path, tensors=extend, settings={'num_nextn_predict_layers': 1})
  with caplog.at_level(logging.INFO):
    params = pretrained.load_params(pretrained.resolve_config(ModelConfig(pretrained=str(folder))))
  assert f'layers [{layer}]' in caplog.text and 'left out' in caplog.text
  assert set(params) == set(load(name)[1])
  extra_twice = lambda tensors: {**tensors, f'model.layers.{layer + 1}.eh_proj.weight': np.zeros((32, 64), np.float32)}
  (tmp_path / 'other').mkdir()
  with pytest.raises(ValueError, match=f'not part of the model: model.layers.{layer + 1}.eh_proj.weight'):
    models.load_pretrained(copied(name, tmp_path / 'other', tensors=extra_twice))


@pytest.mark.parametrize('name, lost, words', [
    ('qwen3_moe', 'model.layers.0.mlp.experts.3.up_proj.weight', 'missing: model.layers.0.mlp.experts.3.up_proj.weight'),
    ('glm4_moe', 'model.layers.1.mlp.gate.e_score_correction_bias', 'missing: model.layers.1.mlp.gate.e_score_correction_bias'),
    ('glm_moe_dsa', 'model.layers.0.self_attn.indexer.k_norm.bias', 'missing: model.layers.0.self_attn.indexer.k_norm.bias')])
def test_missing_tensors_are_named(name, lost, words, tmp_path):
  folder = copied(name, tmp_path, tensors=lambda tensors: {n: x for n, x in tensors.items() if n != lost})
  with pytest.raises(ValueError, match=words):
    models.load_pretrained(folder)


def test_bfloat16_keeps_the_router_in_float32(tmp_path):
  config, params = load('glm4_moe', param_dtype='bfloat16')
  assert {x.dtype for p, x in params.items() if '.router.' in p} == {jnp.dtype('float32')}
  assert params['trunk.layers.1.mlp.experts.up'].dtype == jnp.bfloat16
  pretrained.save_params(tmp_path / 'saved', config, params)
  again = pretrained.load_params(pretrained.resolve_config(ModelConfig(pretrained=str(tmp_path / 'saved'), param_dtype='bfloat16')))
  for path, x in params.items():
    np.testing.assert_array_equal(again[path].astype(jnp.float32), x.astype(jnp.float32))


# --- Spellings and refusals ----------------------------------------------------------------------------------------------------

BASE = {
    'model_type': 'llama', 'vocab_size': 64, 'hidden_size': 32, 'intermediate_size': 48, 'num_hidden_layers': 2, 'num_attention_heads': 4,
    'max_position_embeddings': 4096, 'rms_norm_eps': 1e-5}
MOE = {**BASE, 'model_type': 'qwen3_moe', 'head_dim': 16, 'num_experts': 8, 'num_experts_per_tok': 2, 'moe_intermediate_size': 16}
GLM = {**BASE, 'model_type': 'glm4_moe', 'n_routed_experts': 8, 'moe_intermediate_size': 16}
DSA = {
    **BASE, 'model_type': 'glm_moe_dsa', 'n_routed_experts': 8, 'moe_intermediate_size': 16, 'kv_lora_rank': 16, 'q_lora_rank': 24,
    'qk_nope_head_dim': 12, 'qk_rope_head_dim': 8, 'v_head_dim': 10, 'first_k_dense_replace': 1, 'num_hidden_layers': 10}
LLAMA3 = {'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0, 'original_max_position_embeddings': 1024}


def shape(values, **changes):
  return families.shape_from_json({**values, **changes}, 'config.json')


@pytest.mark.parametrize('changes', [
    {'rope_theta': 5e5, 'rope_scaling': {'rope_type': 'llama3', **LLAMA3}},
    {'rope_theta': 5e5, 'rope_scaling': {'type': 'llama3', **LLAMA3}, 'rope_parameters': None},
    {'rope_parameters': {'rope_type': 'llama3', 'rope_theta': 5e5, **LLAMA3}},
    {'rope_parameters': {'full_attention': {'rope_type': 'llama3', 'rope_theta': 5e5, **LLAMA3}}},
    {'rope_theta': 5e5, 'original_max_position_embeddings': 1024, 'rope_scaling': {'rope_type': 'llama3', **LLAMA3}},
], ids=['rope_scaling', 'older', 'rope_parameters', 'by_layer_type', 'top_level_length'])
def test_spellings_of_rotary_settings(changes):
  found = shape(BASE, **changes)
  assert found['rope_theta'] == 5e5
  rope = found['rope']
  assert (rope.kind, rope.factor, rope.low_frequency, rope.high_frequency, rope.original_length) == ('llama3', 8.0, 1.0, 4.0, 1024)


def test_rotary_defaults():
  assert shape(BASE)['rope_theta'] == 10_000.0 and shape(BASE)['rope'].kind == 'default'
  yarn = shape(BASE, rope_scaling={'type': 'yarn', 'factor': 4.0, 'beta_fast': None})['rope']
  assert yarn.original_length == 4096 and yarn.beta_fast == 32.0 and yarn.truncate
  assert shape(BASE, rope_scaling={'type': 'yarn', 'original_max_position_embeddings': 1024})['rope'].factor == 4.0
  assert shape(BASE, rope_scaling={'type': 'linear', 'factor': 2})['rope'].factor == 2.0
  assert shape(GLM)['rope'].fraction == 0.5 and shape(GLM, partial_rotary_factor=0.25)['rope'].fraction == 0.25
  assert shape(GLM, rope_parameters={'rope_type': 'default', 'rope_theta': 1e6, 'partial_rotary_factor': 0.75})['rope'].fraction == 0.75


@pytest.mark.parametrize('values, changes, words', [
    (BASE, {'rope_scaling': {'rope_type': 'longrope', 'factor': 4.0}}, "rope type 'longrope' is not supported; known: default, linear"),
    (BASE, {'rope_scaling': {'rope_type': 'dynamic', 'factor': 4.0}}, "rope type 'dynamic' is not supported"),
    (BASE, {'rope_scaling': {'rope_type': 'default', 'mrope_section': [1, 2]}}, "rope type 'default' has no setting mrope_section"),
    (BASE, {'rope_scaling': {'rope_type': 'yarn', 'factor': 4.0, 'short_factor': [1.0]}}, "'yarn' has no setting short_factor"),
    (BASE, {'rope_scaling': {'rope_type': 'llama3', 'factor': 8.0}}, "'llama3' needs low_freq_factor, high_freq_factor"),
    (BASE, {'rope_parameters': {'a': {'rope_type': 'default'}, 'b': {'rope_type': 'linear', 'factor': 2.0}}}, 'differ between types'),
    (MOE, {'attention_bias': True}, 'a bias on all attention projections'),
    (MOE, {'partial_rotary_factor': 0.5}, 'partial rotation'),
    (MOE, {'use_sliding_window': True}, 'sliding windows'),
    (GLM, {'scoring_func': 'softmax'}, "scoring function 'softmax'"),
    (GLM, {'topk_method': 'greedy'}, "choice of experts 'greedy'"),
    (GLM, {'n_routed_experts': None}, "'n_routed_experts' is missing"),
    (GLM, {'first_k_dense_replace': 2}, '2 of 2 layers are without experts'),
    (DSA, {'indexer_types': ['shared'] * 10}, "'full' or 'shared', the first one 'full'"),
    (DSA, {'indexer_types': ['full'] * 3}, 'the index of each of 10 layers'),
    (DSA, {'rope_interleave': False}, 'rotary pairs of halves in latent attention'),
    (DSA, {'q_lora_rank': None}, "'q_lora_rank' is missing"),
])
def test_settings_that_are_not_computed_here(values, changes, words):
  with pytest.raises(ValueError, match=words):
    shape(values, **changes)


def test_layers_of_each_kind():
  assert shape(MOE, num_hidden_layers=6, decoder_sparse_step=2)['experts'].dense_layers == (0, 2, 4)
  assert shape(MOE, num_hidden_layers=6, mlp_only_layers=[1, 5])['experts'].dense_layers == (1, 5)
  assert shape(MOE, num_experts=0)['experts'].count == 0
  assert shape(GLM, num_hidden_layers=6, first_k_dense_replace=3)['experts'].dense_layers == (0, 1, 2)
  assert shape(DSA, mlp_layer_types=['dense', 'sparse'] * 5)['experts'].dense_layers == (0, 2, 4, 6, 8)
  assert shape(DSA)['latent'].shared_index_layers == ()
  assert shape(DSA, index_topk_pattern='FSSFSSFSSF')['latent'].shared_index_layers == (1, 2, 4, 5, 7, 8)
  # Every fourth layer from the offset on is full, and all before: max(i - 3 + 1, 0) % 4 == 0.
  assert shape(DSA, index_topk_freq=4, index_skip_topk_offset=3)['latent'].shared_index_layers == (3, 4, 5, 7, 8, 9)


@pytest.mark.parametrize('changes, words', [
    ({'qk_norm': True, 'qkv_bias': True}, 'not both a query/key norm and a query/key/value bias'),
    ({'rope': dataclasses.replace(ModelConfig().rope, fraction=0.5)}, 'whole heads rotated'),
    ({'experts': dataclasses.replace(ModelConfig().experts, count=4, mlp_dim=8)}, 'qwen3_moe needs a query/key norm'),
    ({'experts': dataclasses.replace(ModelConfig().experts, count=4, mlp_dim=8, router='sigmoid')}, 'glm4_moe needs a shared expert'),
    ({'latent': dataclasses.replace(ModelConfig().latent, rank=8)}, 'glm_moe_dsa needs an index'),
])
def test_shapes_that_no_public_kind_has(changes, words):
  with pytest.raises(ValueError, match=words):
    families.json_from_config(dataclasses.replace(ModelConfig(), **changes), 'float32')


# --- Value models --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('name, policy, value, frozen, never', [
    ('llama3', 21, 22, 9, 0), ('qwen2', 26, 28, 15, 0), ('qwen3', 25, 26, 13, 0), ('qwen3_moe', 38, 39, 19, 0),
    ('glm4_moe', 55, 56, 28, 2), ('glm_moe_dsa', 81, 82, 44, 18)])
def test_leaves_of_policy_and_value_model(name, policy, value, frozen, never):
  """Frozen attention holds projections, norms and index; a router's correction and an index never learn."""
  config, params = load(name)
  leaves = set(transformer.value_params_from_policy(params, config))
  assert len(params) == policy and len(leaves) == value
  assert leaves - set(params) == {'head', 'head_bias'}
  assert set(params) - leaves == (set() if name == 'qwen2' else {'unembedding'})  # Qwen2 has tied embeddings.
  still = {p for p in leaves if is_frozen(p, 'attention_and_embeddings')}
  inside = {p for p in leaves if '.attention.' in p or p == 'trunk.embedding'}
  correction = {p for p in leaves if p.endswith('router.correction')}
  assert still == inside | correction and len(still) == frozen + len(correction)
  fixed = {p for p in leaves if is_frozen(p, 'nothing')}
  assert fixed == {p for p in leaves if '.indexer.' in p} | correction and len(fixed) == never
  routers = {p for p in leaves if '.router.' in p}
  assert {p for p in leaves if is_frozen(p, 'nothing', freeze_router=True)} == fixed | routers


# --- Live checks ---------------------------------------------------------------------------------------------------------------


def live_libraries():
  return all(importlib.util.find_spec(name) for name in ('torch', 'transformers'))


@pytest.mark.skipif(not live_libraries(), reason='needs torch and transformers: pip install -r requirements/parity.txt')
@pytest.mark.parametrize('name', FAMILIES)
def test_transformers_reads_what_is_saved_after_a_change(name, tmp_path):
  import torch  # pylint: disable=g-import-not-at-top
  import transformers  # pylint: disable=g-import-not-at-top
  config, params = load(name)
  golden = outputs(name)
  changed = {p: x + 0.05 * jax.random.normal(jax.random.key(i), x.shape) for i, (p, x) in enumerate(sorted(params.items()))}
  pretrained.save_params(tmp_path / 'saved', config, changed)
  theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
      tmp_path / 'saved', dtype=torch.float32, attn_implementation='eager', output_loading_info=True)
  assert not info['missing_keys'] and not info['unexpected_keys'] and not info['mismatched_keys']
  with torch.no_grad():
    want = theirs(torch.tensor(golden['short']).long(), use_cache=False).logits.numpy()
  got = forward(config)(changed, golden['short'].astype(np.int32))
  assert_close(got, want)
  assert np.max(np.abs(got - golden['logits'])) > 0.1
