"""How other formats name and lay out the weights of this transformer: Hugging Face folders and GGUF files.

Linear layers are stored there as [outputs, inputs] with heads flattened; here inputs come first and heads have their own axis. Which rows
of a query or key projection rotate together also differs: Hugging Face rotates the two halves of a head, as here; GGUF's llama rotates
neighbours, so its rows come back in another order.

Experts are stacked here, [E, D, F]; a Hugging Face folder holds one tensor for each expert, or (written by transformers without its
conversion) all of them in one, gate and up projections joined. So a parameter is read in `Piece`s.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Collection

import numpy as np


@dataclasses.dataclass(frozen=True)
class Weight:
  """Names of one parameter elsewhere, and its stored layout.

  Attributes:
    hugging_face, gguf: name there, without `suffix`; gguf is '' where its llama has none. '*' stands for the number of an expert.
    inputs: leading axes here (behind that of the experts) that are the inputs of a linear layer, stored transposed; 0 for a table or a
      vector.
    flat: a vector here of several axes, stored with one.
    suffix: end of the Hugging Face name.
    joined: name of the tensor that holds all experts, where there is one.
    half: which half of the rows of `joined` this is; None for all.
  """

  hugging_face: str
  gguf: str = ''
  inputs: int = 0
  flat: bool = False
  suffix: str = '.weight'
  joined: str = ''
  half: int | None = None


@dataclasses.dataclass(frozen=True)
class Piece:
  """One stored tensor, or a part of one, that makes up a parameter or a part of it.

  Attributes:
    name: of the stored tensor.
    shape: of the whole stored tensor.
    expert: index of the parameter's first axis that it fills; None for the whole parameter.
    half: half of the stored tensor's axis 1 that belongs to the parameter; None for all.
  """

  name: str
  shape: tuple[int, ...]
  expert: int | None = None
  half: int | None = None


BLOCK = {
    'attention_norm.scale': Weight('input_layernorm', 'attn_norm'),
    'attention.query': Weight('self_attn.q_proj', 'attn_q', inputs=1),
    'attention.key': Weight('self_attn.k_proj', 'attn_k', inputs=1),
    'attention.value': Weight('self_attn.v_proj', 'attn_v', inputs=1),
    'attention.out': Weight('self_attn.o_proj', 'attn_output', inputs=2),
    'attention.query_bias': Weight('self_attn.q_proj', flat=True, suffix='.bias'),
    'attention.key_bias': Weight('self_attn.k_proj', flat=True, suffix='.bias'),
    'attention.value_bias': Weight('self_attn.v_proj', flat=True, suffix='.bias'),
    'attention.query_norm.scale': Weight('self_attn.q_norm'),
    'attention.key_norm.scale': Weight('self_attn.k_norm'),
    'mlp_norm.scale': Weight('post_attention_layernorm', 'ffn_norm'),
    'mlp.gate': Weight('mlp.gate_proj', 'ffn_gate', inputs=1),
    'mlp.up': Weight('mlp.up_proj', 'ffn_up', inputs=1),
    'mlp.down': Weight('mlp.down_proj', 'ffn_down', inputs=1),
    'mlp.router.weight': Weight('mlp.gate', inputs=1),
    'mlp.router.correction': Weight('mlp.gate.e_score_correction_bias', suffix=''),
    'mlp.experts.gate': Weight('mlp.experts.*.gate_proj', inputs=1, joined='mlp.experts.gate_up_proj', half=0),
    'mlp.experts.up': Weight('mlp.experts.*.up_proj', inputs=1, joined='mlp.experts.gate_up_proj', half=1),
    'mlp.experts.down': Weight('mlp.experts.*.down_proj', inputs=1, joined='mlp.experts.down_proj'),
    'mlp.shared.gate': Weight('mlp.shared_experts.gate_proj', inputs=1),
    'mlp.shared.up': Weight('mlp.shared_experts.up_proj', inputs=1),
    'mlp.shared.down': Weight('mlp.shared_experts.down_proj', inputs=1),
    'attention.query_down': Weight('self_attn.q_a_proj', inputs=1),
    'attention.query_down_norm.scale': Weight('self_attn.q_a_layernorm'),
    'attention.query_up': Weight('self_attn.q_b_proj', inputs=1),
    'attention.latent_down': Weight('self_attn.kv_a_proj_with_mqa', inputs=1),
    'attention.latent_norm.scale': Weight('self_attn.kv_a_layernorm'),
    'attention.latent_up': Weight('self_attn.kv_b_proj', inputs=1),
    'attention.indexer.query': Weight('self_attn.indexer.wq_b', inputs=1),
    'attention.indexer.key': Weight('self_attn.indexer.wk', inputs=1),
    'attention.indexer.key_norm.scale': Weight('self_attn.indexer.k_norm'),
    'attention.indexer.key_norm.bias': Weight('self_attn.indexer.k_norm', suffix='.bias'),
    'attention.indexer.weight': Weight('self_attn.indexer.weights_proj', inputs=1),
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


def pieces(path: str, shape: tuple[int, ...], *, stored: Collection[str] = ()) -> list[Piece]:
  """The tensors of a Hugging Face folder that make up an unrolled parameter.

  Args:
    path: of the parameter.
    shape: its shape here.
    stored: names in the folder; experts are sought as one tensor where it is among them, else (and for writing) one by one.
  """
  weight, prefix, _ = _find(path)
  name = prefix + weight.hugging_face + weight.suffix
  if '*' not in name:
    return [Piece(name, stored_shape(path, shape))]
  one = _transposed(shape[1:], weight.inputs)
  if prefix + weight.joined in stored:
    rows = one[0] * (1 if weight.half is None else 2)
    return [Piece(prefix + weight.joined, (shape[0], rows, *one[1:]), half=weight.half)]
  return [Piece(name.replace('*', str(i)), one, expert=i) for i in range(shape[0])]


def hugging_face_name(path: str) -> str:
  """Name of an unrolled parameter, other than of experts, in a Hugging Face folder."""
  weight, prefix, _ = _find(path)
  return prefix + weight.hugging_face + weight.suffix


def gguf_name(path: str) -> str:
  """Name of an unrolled parameter in a GGUF file of architecture llama."""
  weight, _, prefix = _find(path)
  return f'{prefix}{weight.gguf}.weight'


def _transposed(shape: tuple[int, ...], inputs: int) -> tuple[int, ...]:
  return math.prod(shape[inputs:]), math.prod(shape[:inputs])


def stored_shape(path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
  """Shape in both formats of a parameter (not of experts) that has `shape` here."""
  weight = _find(path)[0]
  if weight.inputs:
    return _transposed(shape, weight.inputs)
  return (math.prod(shape),) if weight.flat else tuple(shape)


def from_stored(path: str, x: np.ndarray, shape: tuple[int, ...], piece: Piece | None = None) -> np.ndarray:
  """A stored tensor, or what is meant of it, in the layout used here: of the parameter's `shape`, or of one expert of it."""
  weight = _find(path)[0]
  if piece is None or '*' not in weight.hugging_face:
    return (x.T if weight.inputs else x).reshape(shape)
  if piece.expert is not None:
    return x.T
  if piece.half is not None:
    x = np.split(x, 2, axis=1)[piece.half]
  return x.swapaxes(1, 2)


def to_stored(path: str, x: np.ndarray, piece: Piece | None = None) -> np.ndarray:
  """The inverse of `from_stored`; `x` is the whole parameter here, `piece` the one that is wanted of it."""
  if piece is not None and piece.expert is not None:
    return x[piece.expert].T
  inputs = _find(path)[0].inputs
  return x.reshape(math.prod(x.shape[:inputs]), -1).T if inputs else x.reshape(stored_shape(path, x.shape))


def undo_gguf_rotation(path: str, x: np.ndarray, head_dim: int) -> np.ndarray:
  """Rows of a query or key projection of GGUF's llama in the order of rotated halves; other tensors as they are."""
  if not path.endswith(('attention.query', 'attention.key')):
    return x
  heads = x.shape[0] // head_dim
  return x.reshape(heads, head_dim // 2, 2, x.shape[1]).swapaxes(1, 2).reshape(x.shape)


def layer_of(name: str) -> int | None:
  """Number of the layer that a tensor of a Hugging Face folder belongs to; None outside the layers."""
  parts = name.split('.')
  return int(parts[2]) if name.startswith('model.layers.') and len(parts) > 3 and parts[2].isdigit() else None
