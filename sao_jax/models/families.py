"""Families of models: the `config.json` of a Hugging Face folder, or the metadata of a GGUF file, as fields of `ModelConfig`, and back.

One transformer computes all of them; a family is the set of fields that it fixes. What a file asks for and this transformer does not do
is refused by name, never ignored.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Mapping

import numpy as np

from sao_jax import config_checks
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
MOST_LAYERS = 2**12


class _Values:
  """The values of a `config.json`, each of the type that it must have. None there is the same as nothing."""

  def __init__(self, values: Mapping[str, Any], label: str):
    self.values, self.label = values, label

  def get(self, name: str, default: Any = None) -> Any:
    """The value `name`, or the default; one of them must be there."""
    value = self.values.get(name)
    value = default if value is None else value
    if value is None:
      raise ValueError(f'{self.label}: {name!r} is missing.')
    return value

  def count(self, name: str, default: int | None = None, *, least: int = 1, most: int = 2**30) -> int:
    value = self.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
      raise ValueError(f'{self.label}: {name!r} must be an integer from {least} to {most}, got {value!r}.')
    return value

  def number(self, name: str, default: float | None = None) -> float:
    return _number(self.get(name, default), name, self.label)

  def flag(self, name: str, default: bool = False) -> bool:
    value = self.get(name, default)
    if not isinstance(value, bool):
      raise ValueError(f'{self.label}: {name!r} must be true or false, got {value!r}.')
    return value

  def items(self, name: str, kind: type) -> list[Any] | None:
    """A list of values of one type; None where there is none, or an empty one."""
    value = self.values.get(name) or None
    if value is not None and not (isinstance(value, list) and all(isinstance(v, kind) and not isinstance(v, bool) for v in value)):
      raise ValueError(f'{self.label}: {name!r} must be a list of {"names" if kind is str else "integers"}, got {value!r:.80}.')
    return value


def _number(value: Any, name: str, label: str) -> float:
  if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
    raise ValueError(f'{label}: {name!r} must be a number, got {value!r}.')
  return float(value)


def _checked(shape: dict[str, Any], label: str) -> dict[str, Any]:
  """`shape`, if a model can have it. Raises ValueError for what is of another type, out of range or does not go together."""
  types = {'int': int, 'float': float, 'bool': bool}
  for field in dataclasses.fields(ModelConfig):
    if field.name in shape and field.type in types and type(shape[field.name]) is not types[field.type]:
      raise ValueError(f'{label} gives model.{field.name} as {shape[field.name]!r}; it must be of type {field.type}.')
  try:
    config_checks.check_shape(ModelConfig(**shape))
  except ValueError as error:
    raise ValueError(f'{label} describes a model that cannot be: {error}') from error
  return shape


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
  v = _Values(values, label)
  theta, rope = _rope_from_json(v, kind)
  bias = v.flag('attention_bias')
  _refuse({
      'a bias on all attention projections': bias and kind != 'glm4_moe', 'a bias in the feed-forward': v.flag('mlp_bias'),
      'sliding windows': v.flag('use_sliding_window') or 'sliding_attention' in (v.items('layer_types', str) or ()),
      'partial rotation': rope.fraction != 1.0 and kind != 'glm4_moe',
      f'activation {values.get("hidden_act")!r}': values.get('hidden_act', 'silu') != 'silu'}, label)
  heads, width = v.count('num_attention_heads'), v.count('hidden_size')
  v.count('num_nextn_predict_layers', 0, least=0)  # For `extra_layers`.
  shape = {
      'vocab_size': v.count('vocab_size'), 'embed_dim': width, 'num_layers': v.count('num_hidden_layers', most=MOST_LAYERS),
      'num_heads': heads, 'num_kv_heads': v.count('num_key_value_heads', heads),
      'head_dim': v.count('head_dim', 128 if kind == 'qwen3' else width // heads), 'mlp_dim': v.count('intermediate_size'),
      'rope_theta': theta, 'rope': rope, 'norm_eps': v.number('rms_norm_eps', 1e-6),
      'qk_norm': kind in ('qwen3', 'qwen3_moe') or (kind == 'glm4_moe' and v.flag('use_qk_norm')),
      'qkv_bias': kind == 'qwen2' or bias, 'tie_embeddings': v.flag('tie_word_embeddings'),
      'max_length': v.count('max_position_embeddings'), 'experts': ExpertsConfig(), 'latent': LatentConfig()}
  if kind == 'qwen3_moe':
    shape['experts'] = _qwen3_experts(v)
  elif kind in ('glm4_moe', 'glm_moe_dsa'):
    shape['experts'] = _glm_experts(v)
  if kind == 'glm_moe_dsa':
    latent = shape['latent'] = _latent_from_json(v)
    shape |= {'head_dim': latent.plain_dim + latent.rotary_dim, 'num_kv_heads': heads}
  return _checked(shape, label)


def _rope_from_json(v: _Values, kind: str) -> tuple[float, RopeConfig]:
  """Base and scaling of the rotary angles.

  They stand in `rope_parameters` (transformers 5), or in `rope_scaling` with `rope_theta` beside it (before), or, by type of layer, one
  level deeper. What is missing there is looked for at the top level.
  """
  values, label = v.values, v.label
  found = values.get('rope_scaling') or values.get('rope_parameters') or {}
  if not isinstance(found, Mapping):
    raise ValueError(f'{label}: the rotary settings (rope_scaling, rope_parameters) must be an object, got {found!r}.')
  nested = [part for part in found.values() if isinstance(part, Mapping)]
  if nested:
    if len(nested) != len(found) or any(part != nested[0] for part in nested):
      raise ValueError(f'{label}: rotary angles that differ between types of layers are not supported: {dict(found)}.')
    found = nested[0]
  name = found.get('rope_type', found.get('type', 'default'))
  if name not in ROPE_KINDS:
    raise ValueError(f'{label}: rope type {name!r} is not supported; known: {", ".join(ROPE_KINDS)}.')
  used = ROPE_FIELDS[name]
  unknown = sorted(n for n, x in found.items() if x is not None and n not in {
      'rope_type', 'type', 'rope_theta', 'partial_rotary_factor', 'factor', 'original_max_position_embeddings', 'mscale_all_dim', *used})
  if unknown:
    raise ValueError(f'{label}: rope type {name!r} has no setting {", ".join(unknown)}; known for it: {", ".join(used) or "none"}.')
  given = {n: x for n, x in found.items() if x is not None}
  if values.get('original_max_position_embeddings') is not None:
    given['original_max_position_embeddings'] = values['original_max_position_embeddings']
  given.setdefault('original_max_position_embeddings', values.get('max_position_embeddings'))
  if name != 'default' and not _number(given['original_max_position_embeddings'], 'original_max_position_embeddings', label) >= 1:
    raise ValueError(
        f"{label}: 'original_max_position_embeddings' must be at least 1, got {given['original_max_position_embeddings']!r}.")
  if name == 'yarn' and 'factor' not in given:
    given['factor'] = v.count('max_position_embeddings') / given['original_max_position_embeddings']
  missing = [n for n in used if n in ('factor', 'low_freq_factor', 'high_freq_factor') and n not in given]
  if missing:
    raise ValueError(f'{label}: rope type {name!r} needs {", ".join(missing)}.')
  types = RopeConfig.__annotations__
  fields: dict[str, Any] = {}
  for n, field in used.items():
    if n in given and types[field] == 'bool':
      fields[field] = _Values(given, label).flag(n)
    elif n in given:
      fields[field] = (int if types[field] == 'int' else float)(_number(given[n], n, label))
  fraction = given.get('partial_rotary_factor', values.get('partial_rotary_factor'))
  fraction = (0.5 if kind == 'glm4_moe' else 1.0) if fraction is None else _number(fraction, 'partial_rotary_factor', label)
  theta = given.get('rope_theta', values.get('rope_theta'))
  return _number(10_000.0 if theta is None else theta, 'rope_theta', label), RopeConfig(kind=name, fraction=fraction, **fields)


def _qwen3_experts(v: _Values) -> ExpertsConfig:
  layers, step = v.count('num_hidden_layers', most=MOST_LAYERS), v.count('decoder_sparse_step', 1)
  plain = set(v.items('mlp_only_layers', int) or ())
  dense = tuple(i for i in range(layers) if i in plain or (i + 1) % step)
  count = v.count('num_experts', v.values.get('num_local_experts', 128), least=0)
  if not count or len(dense) == layers:
    return ExpertsConfig()
  return ExpertsConfig(
      count=count, top_k=v.count('num_experts_per_tok', 8), mlp_dim=v.count('moe_intermediate_size', 768),
      normalise=v.flag('norm_topk_prob'), dense_layers=dense)


def _glm_experts(v: _Values) -> ExpertsConfig:
  values, label = v.values, v.label
  _refuse({
      f'scoring function {values.get("scoring_func")!r}': values.get('scoring_func', 'sigmoid') != 'sigmoid',
      f'choice of experts {values.get("topk_method")!r}': values.get('topk_method', 'noaux_tc') != 'noaux_tc',
      'experts in every n-th layer': values.get('moe_layer_freq', 1) != 1}, label)
  layers, dsa = v.count('num_hidden_layers', most=MOST_LAYERS), values['model_type'] == 'glm_moe_dsa'
  first = min(v.count('first_k_dense_replace', 3 if dsa else 1, least=0), layers)
  kinds = v.items('mlp_layer_types', str) or ['dense'] * first + ['sparse'] * (layers - first)
  dense = tuple(i for i, kind in enumerate(kinds) if kind == 'dense')
  if not set(kinds) <= {'dense', 'sparse'}:
    raise ValueError(f"{label}: 'mlp_layer_types' must name each layer 'dense' or 'sparse', got {kinds}.")
  if len(kinds) != layers or len(dense) == layers:
    raise ValueError(f'{label}: {len(dense)} of {len(kinds)} layers are without experts, of num_hidden_layers={layers}; needed: some with.')
  return ExpertsConfig(
      count=v.count('n_routed_experts', values.get('num_local_experts', values.get('num_experts'))),
      top_k=v.count('num_experts_per_tok', 8), mlp_dim=v.count('moe_intermediate_size'), shared=v.count('n_shared_experts', 1, least=0),
      router='sigmoid', normalise=v.flag('norm_topk_prob', True), scale=v.number('routed_scaling_factor', 2.5 if dsa else 1.0),
      groups=v.count('n_group', 1), top_groups=v.count('topk_group', 1), dense_layers=dense)


def _latent_from_json(v: _Values) -> LatentConfig:
  values, label, layers = v.values, v.label, v.count('num_hidden_layers', most=MOST_LAYERS)
  kinds: Any = values.get('indexer_types')
  if kinds is None and values.get('index_topk_pattern') is not None:
    pattern, names = values['index_topk_pattern'], {'F': 'full', 'S': 'shared'}
    kinds = [names.get(c, c) for c in pattern] if isinstance(pattern, str) else pattern
  if kinds is None:
    every, offset = max(v.count('index_topk_freq', 1, least=0), 1), v.count('index_skip_topk_offset', 2, least=0)
    kinds = ['full' if max(i - offset + 1, 0) % every == 0 else 'shared' for i in range(layers)]
  if not isinstance(kinds, list) or len(kinds) < layers or any(kind not in ('full', 'shared') for kind in kinds) or kinds[0] != 'full':
    raise ValueError(f"{label}: the index of each of {layers} layers must be 'full' or 'shared', the first one 'full': got {kinds}.")
  _refuse({
      'rotary pairs of halves in latent attention': values.get('rope_interleave') is False,
      'rotary pairs of halves in the index': values.get('indexer_rope_interleave') is False}, label)
  return LatentConfig(
      rank=v.count('kv_lora_rank'), query_rank=v.count('q_lora_rank'), plain_dim=v.count('qk_nope_head_dim'),
      rotary_dim=v.count('qk_rope_head_dim'), value_dim=v.count('v_head_dim'), index_top_k=v.count('index_topk', 2048),
      index_heads=v.count('index_n_heads', 32), index_dim=v.count('index_head_dim', 128),
      shared_index_layers=tuple(i for i in range(layers) if kinds[i] == 'shared'))


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

  def count(name: str, default: Any = None) -> int:
    value = get(name, default)
    if not isinstance(value, int) or value < 1:
      raise ValueError(f'{label}: llama.{name} must be a positive integer, got {value!r}.')
    return value

  heads, width = count('attention.head_count'), count('embedding_length')
  head_dim = count('attention.key_length', width // heads)
  scaling = fields.get('llama.rope.scaling.type', 'none')
  refused = {
      'rope scaling': scaling not in ('none', ''), 'experts': bool(fields.get('llama.expert_count', 0)),
      'partial rotation': get('rope.dimension_count', head_dim) != head_dim,
      'values of another size': fields.get('llama.attention.value_length', head_dim) != head_dim}
  _refuse(refused, label)
  return _checked({
      'vocab_size': count('vocab_size', len(fields.get('tokenizer.ggml.tokens', ())) or None), 'embed_dim': width,
      'num_layers': count('block_count'), 'num_heads': heads, 'num_kv_heads': count('attention.head_count_kv', heads), 'head_dim': head_dim,
      'mlp_dim': count('feed_forward_length'), 'rope_theta': _shortest(get('rope.freq_base', 10_000.0)), 'rope': RopeConfig(),
      'norm_eps': _shortest(get('attention.layer_norm_rms_epsilon')), 'qk_norm': False, 'qkv_bias': False, 'tie_embeddings': tied,
      'max_length': count('context_length'), 'experts': ExpertsConfig(), 'latent': LatentConfig()}, label)


def _shortest(x: float) -> float:
  """The shortest decimal that is the same float32: 9.99999974e-06 comes back as 1e-05."""
  return float(str(np.float32(x)))
