"""Families of models: the `config.json` of a Hugging Face folder, or the metadata of a GGUF file, as fields of `ModelConfig`, and back.

One transformer computes all of them; a family is the set of fields that it fixes. What a file asks for and this transformer does not do
is refused by name, never ignored.
"""

from __future__ import annotations

from typing import Any, Callable, Mapping

import numpy as np

from sao_jax.config import ExpertsConfig, LatentConfig, ModelConfig, RopeConfig

ARCHITECTURES = {
    'llama': 'LlamaForCausalLM', 'qwen2': 'Qwen2ForCausalLM', 'qwen3': 'Qwen3ForCausalLM', 'qwen3_moe': 'Qwen3MoeForCausalLM',
    'glm4_moe': 'Glm4MoeForCausalLM', 'glm_moe_dsa': 'GlmMoeDsaForCausalLM'}
MODEL_TYPES = tuple(ARCHITECTURES)
ROPE_KINDS = ('default', 'linear', 'llama3', 'yarn')
# Name in `rope_parameters` -> field of `RopeConfig`, for each kind.
ROPE_FIELDS = {
    'default': {},
    'linear': {'factor': 'factor'},
    'llama3': {
        'factor': 'factor', 'low_freq_factor': 'low_frequency', 'high_freq_factor': 'high_frequency',
        'original_max_position_embeddings': 'original_length'},
    'yarn': {
        'factor': 'factor', 'original_max_position_embeddings': 'original_length', 'beta_fast': 'beta_fast', 'beta_slow': 'beta_slow',
        'attention_factor': 'attention_factor', 'mscale': 'mscale', 'mscale_all_dim': 'mscale_all_dim', 'truncate': 'truncate'}}
Get = Callable[..., Any]


def _refuse(checks: Mapping[str, bool], label: str) -> None:
  bad = [what for what, present in checks.items() if present]
  if bad:
    raise ValueError(f'{label}: not supported: {", ".join(bad)}.')


# --- From config.json ----------------------------------------------------------------------------------------------------------


def shape_from_json(values: Mapping[str, Any], label: str) -> dict[str, Any]:
  """Fields of `ModelConfig` from a Hugging Face `config.json`. Raises ValueError for what this transformer does not compute."""
  kind = values.get('model_type')
  if kind not in MODEL_TYPES:
    raise ValueError(f'{label}: model_type {kind!r} is not supported; known: {", ".join(MODEL_TYPES)}.')

  def get(name: str, default: Any = None) -> Any:
    value = values.get(name)
    value = default if value is None else value
    if value is None:
      raise ValueError(f'{label}: {name!r} is missing.')
    return value

  theta, rope = _rope_from_json(values, kind, label)
  bias = bool(values.get('attention_bias'))
  _refuse({
      'a bias on all attention projections': bias and kind != 'glm4_moe', 'a bias in the feed-forward': bool(values.get('mlp_bias')),
      'sliding windows': bool(values.get('use_sliding_window')) or 'sliding_attention' in (values.get('layer_types') or ()),
      'partial rotation': rope.fraction != 1.0 and kind != 'glm4_moe',
      f'activation {values.get("hidden_act")!r}': values.get('hidden_act', 'silu') != 'silu'}, label)
  heads = get('num_attention_heads')
  shape = {
      'vocab_size': get('vocab_size'), 'embed_dim': get('hidden_size'), 'num_layers': get('num_hidden_layers'), 'num_heads': heads,
      'num_kv_heads': get('num_key_value_heads', heads),
      'head_dim': get('head_dim', 128 if kind == 'qwen3' else get('hidden_size') // heads), 'mlp_dim': get('intermediate_size'),
      'rope_theta': theta, 'rope': rope, 'norm_eps': float(get('rms_norm_eps', 1e-6)),
      'qk_norm': kind in ('qwen3', 'qwen3_moe') or (kind == 'glm4_moe' and bool(values.get('use_qk_norm', False))),
      'qkv_bias': kind == 'qwen2' or bias, 'tie_embeddings': bool(values.get('tie_word_embeddings', False)),
      'max_length': get('max_position_embeddings'), 'experts': ExpertsConfig(), 'latent': LatentConfig()}
  if kind == 'qwen3_moe':
    shape['experts'] = _qwen3_experts(values, get)
  elif kind in ('glm4_moe', 'glm_moe_dsa'):
    shape['experts'] = _glm_experts(values, get, label)
  if kind == 'glm_moe_dsa':
    latent = shape['latent'] = _latent_from_json(values, get, label)
    shape |= {'head_dim': latent.plain_dim + latent.rotary_dim, 'num_kv_heads': heads}
  return shape


def _rope_from_json(values: Mapping[str, Any], kind: str, label: str) -> tuple[float, RopeConfig]:
  """Base and scaling of the rotary angles.

  They stand in `rope_parameters` (transformers 5), or in `rope_scaling` with `rope_theta` beside it (before), or, by type of layer, one
  level deeper. What is missing there is looked for at the top level.
  """
  found = values.get('rope_scaling') or values.get('rope_parameters') or {}
  nested = [v for v in found.values() if isinstance(v, Mapping)]
  if nested:
    if len(nested) != len(found) or any(v != nested[0] for v in nested):
      raise ValueError(f'{label}: rotary angles that differ between types of layers are not supported: {dict(found)}.')
    found = nested[0]
  name = found.get('rope_type', found.get('type', 'default'))
  if name not in ROPE_KINDS:
    raise ValueError(f'{label}: rope type {name!r} is not supported; known: {", ".join(ROPE_KINDS)}.')
  used = ROPE_FIELDS[name]
  unknown = sorted(n for n, v in found.items() if v is not None and n not in {
      'rope_type', 'type', 'rope_theta', 'partial_rotary_factor', 'factor', 'original_max_position_embeddings', 'mscale_all_dim', *used})
  if unknown:
    raise ValueError(f'{label}: rope type {name!r} has no setting {", ".join(unknown)}; known for it: {", ".join(used) or "none"}.')
  given = {n: v for n, v in found.items() if v is not None}
  if values.get('original_max_position_embeddings') is not None:
    given['original_max_position_embeddings'] = values['original_max_position_embeddings']
  given.setdefault('original_max_position_embeddings', values.get('max_position_embeddings'))
  if name == 'yarn' and 'factor' not in given:
    given['factor'] = values['max_position_embeddings'] / given['original_max_position_embeddings']
  missing = [n for n in used if n in ('factor', 'low_freq_factor', 'high_freq_factor') and n not in given]
  if missing:
    raise ValueError(f'{label}: rope type {name!r} needs {", ".join(missing)}.')
  types = RopeConfig.__annotations__
  casts = {'float': float, 'int': int, 'bool': bool}
  fields = {field: casts[types[field]](given[n]) for n, field in used.items() if n in given}
  fraction = given.get('partial_rotary_factor', values.get('partial_rotary_factor'))
  fraction = (0.5 if kind == 'glm4_moe' else 1.0) if fraction is None else float(fraction)
  theta = given.get('rope_theta', values.get('rope_theta'))
  return float(10_000.0 if theta is None else theta), RopeConfig(kind=name, fraction=fraction, **fields)


def _qwen3_experts(values: Mapping[str, Any], get: Get) -> ExpertsConfig:
  layers, step, plain = get('num_hidden_layers'), get('decoder_sparse_step', 1), set(values.get('mlp_only_layers') or ())
  dense = tuple(i for i in range(layers) if i in plain or (i + 1) % step)
  count = get('num_experts', values.get('num_local_experts', 128))
  if not count or len(dense) == layers:
    return ExpertsConfig()
  return ExpertsConfig(
      count=count, top_k=get('num_experts_per_tok', 8), mlp_dim=get('moe_intermediate_size', 768),
      normalise=bool(values.get('norm_topk_prob', False)), dense_layers=dense)


def _glm_experts(values: Mapping[str, Any], get: Get, label: str) -> ExpertsConfig:
  _refuse({
      f'scoring function {values.get("scoring_func")!r}': values.get('scoring_func', 'sigmoid') != 'sigmoid',
      f'choice of experts {values.get("topk_method")!r}': values.get('topk_method', 'noaux_tc') != 'noaux_tc',
      'experts in every n-th layer': values.get('moe_layer_freq', 1) != 1}, label)
  layers, dsa = get('num_hidden_layers'), values['model_type'] == 'glm_moe_dsa'
  first = min(get('first_k_dense_replace', 3 if dsa else 1), layers)
  kinds = values.get('mlp_layer_types') or ['dense'] * first + ['sparse'] * (layers - first)
  dense = tuple(i for i, kind in enumerate(kinds) if kind == 'dense')
  if len(kinds) != layers or len(dense) == layers:
    raise ValueError(f'{label}: {len(dense)} of {len(kinds)} layers are without experts, of num_hidden_layers={layers}; needed: some with.')
  return ExpertsConfig(
      count=get('n_routed_experts', values.get('num_local_experts', values.get('num_experts'))), top_k=get('num_experts_per_tok', 8),
      mlp_dim=get('moe_intermediate_size'), shared=get('n_shared_experts', 1), router='sigmoid',
      normalise=bool(values.get('norm_topk_prob', True)), scale=float(get('routed_scaling_factor', 2.5 if dsa else 1.0)),
      groups=get('n_group', 1), top_groups=get('topk_group', 1), dense_layers=dense)


def _latent_from_json(values: Mapping[str, Any], get: Get, label: str) -> LatentConfig:
  layers = get('num_hidden_layers')
  kinds = values.get('indexer_types')
  if kinds is None and values.get('index_topk_pattern') is not None:
    names = {'F': 'full', 'S': 'shared'}
    kinds = [names.get(c, c) for c in values['index_topk_pattern']]
  if kinds is None:
    every, offset = max(get('index_topk_freq', 1), 1), get('index_skip_topk_offset', 2)
    kinds = ['full' if max(i - offset + 1, 0) % every == 0 else 'shared' for i in range(layers)]
  if len(kinds) < layers or not set(kinds) <= {'full', 'shared'} or kinds[0] != 'full':
    raise ValueError(f"{label}: the index of each of {layers} layers must be 'full' or 'shared', the first one 'full': got {kinds}.")
  _refuse({
      'rotary pairs of halves in latent attention': values.get('rope_interleave') is False,
      'rotary pairs of halves in the index': values.get('indexer_rope_interleave') is False}, label)
  return LatentConfig(
      rank=get('kv_lora_rank'), query_rank=get('q_lora_rank'), plain_dim=get('qk_nope_head_dim'), rotary_dim=get('qk_rope_head_dim'),
      value_dim=get('v_head_dim'), index_top_k=get('index_topk', 2048), index_heads=get('index_n_heads', 32),
      index_dim=get('index_head_dim', 128), shared_index_layers=tuple(i for i in range(layers) if kinds[i] == 'shared'))


def extra_layers(values: Mapping[str, Any]) -> range:
  """Numbers of the layers that a folder may hold behind the model's own: multi-token prediction, which plays no part here.

  GLM checkpoints bring one, whether or not their `config.json` counts it.
  """
  layers = values.get('num_hidden_layers', 0)
  least = 1 if values.get('model_type') in ('glm4_moe', 'glm_moe_dsa') else 0
  return range(layers, layers + max(least, values.get('num_nextn_predict_layers') or 0))


# --- To config.json ------------------------------------------------------------------------------------------------------------


def kind_of(config: ModelConfig) -> str:
  """The `model_type` under which others compute what `config` says. Raises ValueError where there is none."""
  c, experts = config, config.experts
  leading = experts.dense_layers == tuple(range(len(experts.dense_layers)))
  if c.latent.rank:
    kind, reasons = 'glm_moe_dsa', {
        'an index (latent.index_top_k)': c.latent.index_top_k > 0, 'experts with a sigmoid router': experts.router == 'sigmoid',
        'a shared expert': experts.shared > 0, 'all dimensions of rotary_dim rotated': c.rope.fraction == 1.0}
  elif experts.count and experts.router == 'sigmoid':
    kind, reasons = 'glm4_moe', {
        'plain feed-forwards in its first layers alone': leading, 'a shared expert': experts.shared > 0}
  elif experts.count:
    kind, reasons = 'qwen3_moe', {
        'a query/key norm': c.qk_norm, 'no query/key/value bias': not c.qkv_bias, 'no shared expert': not experts.shared,
        'one group of experts': experts.groups == 1, 'no scale of the weights of experts': experts.scale == 1.0,
        'whole heads rotated': c.rope.fraction == 1.0}
  else:
    kind = 'qwen3' if c.qk_norm else 'qwen2' if c.qkv_bias else 'llama'
    reasons = {'not both a query/key norm and a query/key/value bias': not (c.qk_norm and c.qkv_bias),
               'whole heads rotated': c.rope.fraction == 1.0}
  missing = [what for what, there in reasons.items() if not there]
  if missing:
    raise ValueError(f'No public kind of model fits this one, so it cannot be saved: {kind} needs {", ".join(missing)}.')
  return kind


def json_from_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
  """A Hugging Face `config.json` for `config`; `shape_from_json` gives its shape back. Raises ValueError where no public kind fits."""
  kind = kind_of(config)
  values = {
      'architectures': [ARCHITECTURES[kind]], 'model_type': kind, 'vocab_size': config.vocab_size, 'hidden_size': config.embed_dim,
      'intermediate_size': config.mlp_dim, 'num_hidden_layers': config.num_layers, 'num_attention_heads': config.num_heads,
      'num_key_value_heads': config.num_kv_heads, 'head_dim': config.head_dim, 'hidden_act': 'silu', 'rms_norm_eps': config.norm_eps,
      'rope_theta': config.rope_theta, 'rope_parameters': _rope_to_json(config), 'max_position_embeddings': config.max_length,
      'tie_word_embeddings': config.tie_embeddings, 'attention_bias': config.qkv_bias and kind == 'glm4_moe', 'attention_dropout': 0.0,
      'use_sliding_window': False, 'torch_dtype': dtype, 'use_cache': True}
  if kind == 'glm4_moe':
    values |= {'partial_rotary_factor': config.rope.fraction, 'use_qk_norm': config.qk_norm}
  if kind == 'qwen3_moe':
    values |= _qwen3_experts_to_json(config)
  elif kind in ('glm4_moe', 'glm_moe_dsa'):
    values |= _glm_experts_to_json(config)
  if kind == 'glm_moe_dsa':
    values |= _latent_to_json(config)
  return values


def _rope_to_json(config: ModelConfig) -> dict[str, Any]:
  rope = config.rope
  values = {'rope_type': rope.kind, 'rope_theta': config.rope_theta}
  fields = {name: getattr(rope, field) for name, field in ROPE_FIELDS[rope.kind].items()}
  values |= {n: v for n, v in fields.items() if n not in ('attention_factor', 'mscale', 'mscale_all_dim') or v}
  return values | ({'partial_rotary_factor': rope.fraction} if rope.fraction != 1.0 else {})


def _qwen3_experts_to_json(config: ModelConfig) -> dict[str, Any]:
  experts = config.experts
  return {
      'num_experts': experts.count, 'num_experts_per_tok': experts.top_k, 'moe_intermediate_size': experts.mlp_dim,
      'norm_topk_prob': experts.normalise, 'decoder_sparse_step': 1, 'mlp_only_layers': list(experts.dense_layers)}


def _glm_experts_to_json(config: ModelConfig) -> dict[str, Any]:
  experts = config.experts
  return {
      'n_routed_experts': experts.count, 'num_experts_per_tok': experts.top_k, 'moe_intermediate_size': experts.mlp_dim,
      'n_shared_experts': experts.shared, 'norm_topk_prob': experts.normalise, 'routed_scaling_factor': experts.scale,
      'n_group': experts.groups, 'topk_group': experts.top_groups, 'first_k_dense_replace': len(experts.dense_layers),
      'num_nextn_predict_layers': 0}


def _latent_to_json(config: ModelConfig) -> dict[str, Any]:
  latent, layers = config.latent, range(config.num_layers)
  return {
      'kv_lora_rank': latent.rank, 'q_lora_rank': latent.query_rank, 'qk_nope_head_dim': latent.plain_dim,
      'qk_rope_head_dim': latent.rotary_dim, 'qk_head_dim': config.head_dim, 'v_head_dim': latent.value_dim, 'head_dim': latent.rotary_dim,
      'index_topk': latent.index_top_k, 'index_n_heads': latent.index_heads, 'index_head_dim': latent.index_dim,
      'indexer_types': ['shared' if i in latent.shared_index_layers else 'full' for i in layers],
      'mlp_layer_types': ['dense' if i in config.experts.dense_layers else 'sparse' for i in layers]}


# --- From GGUF -----------------------------------------------------------------------------------------------------------------


def shape_from_gguf(fields: Mapping[str, Any], label: str, *, tied: bool) -> dict[str, Any]:
  """Fields of `ModelConfig` from the metadata of a GGUF file. Raises ValueError for what this transformer does not compute."""
  architecture = fields.get('general.architecture')
  if architecture != 'llama':
    raise ValueError(f"{label}: architecture {architecture!r} is not supported, only 'llama' in GGUF files.")

  def get(name: str, default: Any = None) -> Any:
    value = fields.get(f'llama.{name}', default)
    if value is None:
      raise ValueError(f'{label}: the GGUF file has no llama.{name}.')
    return value

  heads, width = get('attention.head_count'), get('embedding_length')
  head_dim = get('attention.key_length', width // heads)
  scaling = fields.get('llama.rope.scaling.type', 'none')
  refused = {
      'rope scaling': scaling not in ('none', ''), 'experts': bool(fields.get('llama.expert_count', 0)),
      'partial rotation': get('rope.dimension_count', head_dim) != head_dim,
      'values of another size': fields.get('llama.attention.value_length', head_dim) != head_dim}
  _refuse(refused, label)
  return {
      'vocab_size': get('vocab_size', len(fields.get('tokenizer.ggml.tokens', ())) or None), 'embed_dim': width,
      'num_layers': get('block_count'), 'num_heads': heads, 'num_kv_heads': get('attention.head_count_kv', heads), 'head_dim': head_dim,
      'mlp_dim': get('feed_forward_length'), 'rope_theta': _shortest(get('rope.freq_base', 10_000.0)), 'rope': RopeConfig(),
      'norm_eps': _shortest(get('attention.layer_norm_rms_epsilon')), 'qk_norm': False, 'qkv_bias': False, 'tie_embeddings': tied,
      'max_length': get('context_length'), 'experts': ExpertsConfig(), 'latent': LatentConfig()}


def _shortest(x: float) -> float:
  """The shortest decimal that is the same float32: 9.99999974e-06 comes back as 1e-05."""
  return float(str(np.float32(x)))
