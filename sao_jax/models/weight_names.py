"""How other formats name and lay out the weights of this transformer: Hugging Face folders and GGUF files.

Linear layers are stored there as [outputs, inputs] with heads flattened; here inputs come first and heads have their own axis. Which rows
of a query or key projection rotate together also differs: Hugging Face rotates the two halves of a head, as here; GGUF's llama rotates
neighbours, so its rows come back in another order.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Mapping

import numpy as np

from sao_jax.config import ModelConfig

MODEL_TYPES = ('llama', 'qwen2', 'qwen3')
ARCHITECTURES = {'llama': 'LlamaForCausalLM', 'qwen2': 'Qwen2ForCausalLM', 'qwen3': 'Qwen3ForCausalLM'}


@dataclasses.dataclass(frozen=True)
class Weight:
  """Names of one parameter elsewhere, and its stored layout.

  Attributes:
    hugging_face, gguf: name there, without '.weight'; gguf is '' where its llama has none.
    inputs: leading axes here that are the inputs of a linear layer, stored transposed; 0 for a table or a vector.
    flat: a vector here of several axes, stored with one.
  """

  hugging_face: str
  gguf: str
  inputs: int = 0
  flat: bool = False
  bias: bool = False


BLOCK = {
    'attention_norm.scale': Weight('input_layernorm', 'attn_norm'),
    'attention.query': Weight('self_attn.q_proj', 'attn_q', inputs=1),
    'attention.key': Weight('self_attn.k_proj', 'attn_k', inputs=1),
    'attention.value': Weight('self_attn.v_proj', 'attn_v', inputs=1),
    'attention.out': Weight('self_attn.o_proj', 'attn_output', inputs=2),
    'attention.query_bias': Weight('self_attn.q_proj', '', flat=True, bias=True),
    'attention.key_bias': Weight('self_attn.k_proj', '', flat=True, bias=True),
    'attention.value_bias': Weight('self_attn.v_proj', '', flat=True, bias=True),
    'attention.query_norm.scale': Weight('self_attn.q_norm', ''),
    'attention.key_norm.scale': Weight('self_attn.k_norm', ''),
    'mlp_norm.scale': Weight('post_attention_layernorm', 'ffn_norm'),
    'mlp.gate': Weight('mlp.gate_proj', 'ffn_gate', inputs=1),
    'mlp.up': Weight('mlp.up_proj', 'ffn_up', inputs=1),
    'mlp.down': Weight('mlp.down_proj', 'ffn_down', inputs=1),
}
OUTSIDE = {
    'trunk.embedding': Weight('model.embed_tokens', 'token_embd'),
    'trunk.final_norm.scale': Weight('model.norm', 'output_norm'),
    'unembedding': Weight('lm_head', 'output', inputs=1),
}
LAYERS = 'trunk.layers.'


def _find(path: str) -> tuple[Weight, str, str]:
  """Table entry of an unrolled path, and the prefixes of its layer in both formats."""
  if path in OUTSIDE:
    return OUTSIDE[path], '', ''
  layer, rest = path.removeprefix(LAYERS).split('.', 1)
  return BLOCK[rest], f'model.layers.{layer}.', f'blk.{layer}.'


def hugging_face_name(path: str) -> str:
  """Name of an unrolled parameter in a Hugging Face folder."""
  weight, prefix, _ = _find(path)
  return f'{prefix}{weight.hugging_face}.{"bias" if weight.bias else "weight"}'


def gguf_name(path: str) -> str:
  """Name of an unrolled parameter in a GGUF file of architecture llama."""
  weight, _, prefix = _find(path)
  return f'{prefix}{weight.gguf}.weight'


def stored_shape(path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
  """Shape in both formats of a parameter that has `shape` here."""
  weight = _find(path)[0]
  if weight.inputs:
    return math.prod(shape[weight.inputs:]), math.prod(shape[:weight.inputs])
  return (math.prod(shape),) if weight.flat else tuple(shape)


def from_stored(path: str, x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
  """A stored tensor in the layout used here."""
  return (x.T if _find(path)[0].inputs else x).reshape(shape)


def to_stored(path: str, x: np.ndarray) -> np.ndarray:
  """The inverse of `from_stored`."""
  inputs = _find(path)[0].inputs
  return x.reshape(math.prod(x.shape[:inputs]), -1).T if inputs else x.reshape(stored_shape(path, x.shape))


def undo_gguf_rotation(path: str, x: np.ndarray, head_dim: int) -> np.ndarray:
  """Rows of a query or key projection of GGUF's llama in the order of rotated halves; other tensors as they are."""
  if not path.endswith(('attention.query', 'attention.key')):
    return x
  heads = x.shape[0] // head_dim
  return x.reshape(heads, head_dim // 2, 2, x.shape[1]).swapaxes(1, 2).reshape(x.shape)


# --- Shapes of models ----------------------------------------------------------------------------------------------------------


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
      'mlp_dim': get('feed_forward_length'), 'rope_theta': _shortest(get('rope.freq_base', 10_000.0)),
      'norm_eps': _shortest(get('attention.layer_norm_rms_epsilon')), 'qk_norm': False, 'qkv_bias': False, 'tie_embeddings': tied,
      'max_length': get('context_length')}


def _shortest(x: float) -> float:
  """The shortest decimal that is the same float32: 9.99999974e-06 comes back as 1e-05."""
  return float(str(np.float32(x)))


def _refuse(checks: Mapping[str, bool], label: str) -> None:
  bad = [what for what, present in checks.items() if present]
  if bad:
    raise ValueError(f'{label}: not supported: {", ".join(bad)}.')


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

  rotary = values.get('rope_parameters') or values.get('rope_scaling') or {}  # The second name is that of transformers before 5.
  rope_type = rotary.get('rope_type', rotary.get('type', 'default'))
  heads = get('num_attention_heads')
  _refuse({
      f'rope type {rope_type!r}': rope_type != 'default',
      'a bias on all attention projections': bool(values.get('attention_bias')), 'a bias in the feed-forward': bool(values.get('mlp_bias')),
      'sliding windows': bool(values.get('use_sliding_window')) or 'sliding_attention' in (values.get('layer_types') or ()),
      'partial rotation': values.get('partial_rotary_factor', rotary.get('partial_rotary_factor', 1.0)) != 1.0,
      f'activation {values.get("hidden_act")!r}': values.get('hidden_act', 'silu') != 'silu'}, label)
  return {
      'vocab_size': get('vocab_size'), 'embed_dim': get('hidden_size'), 'num_layers': get('num_hidden_layers'), 'num_heads': heads,
      'num_kv_heads': get('num_key_value_heads', heads),
      'head_dim': get('head_dim', 128 if kind == 'qwen3' else get('hidden_size') // heads), 'mlp_dim': get('intermediate_size'),
      'rope_theta': float(rotary.get('rope_theta', values.get('rope_theta', 10_000.0))), 'norm_eps': float(get('rms_norm_eps', 1e-6)),
      'qk_norm': kind == 'qwen3', 'qkv_bias': kind == 'qwen2', 'tie_embeddings': bool(values.get('tie_word_embeddings', False)),
      'max_length': get('max_position_embeddings')}


def json_from_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
  """A Hugging Face `config.json` for `config`; `shape_from_json` gives its shape back. Raises ValueError where no public kind fits."""
  if config.qk_norm and config.qkv_bias:
    raise ValueError('No public kind of model has both a query/key norm and a query/key/value bias; it cannot be saved as one.')
  kind = 'qwen3' if config.qk_norm else 'qwen2' if config.qkv_bias else 'llama'
  return {
      'architectures': [ARCHITECTURES[kind]], 'model_type': kind, 'vocab_size': config.vocab_size, 'hidden_size': config.embed_dim,
      'intermediate_size': config.mlp_dim, 'num_hidden_layers': config.num_layers, 'num_attention_heads': config.num_heads,
      'num_key_value_heads': config.num_kv_heads, 'head_dim': config.head_dim, 'hidden_act': 'silu', 'rms_norm_eps': config.norm_eps,
      'rope_theta': config.rope_theta, 'rope_parameters': {'rope_type': 'default', 'rope_theta': config.rope_theta},
      'max_position_embeddings': config.max_length, 'tie_word_embeddings': config.tie_embeddings, 'attention_bias': False,
      'attention_dropout': 0.0, 'use_sliding_window': False, 'torch_dtype': dtype, 'use_cache': True}
