"""Host values to bytes and back, exactly: nested dicts, lists, tuples, strings, numbers, NumPy arrays and scalars, `Rollout`s.

The format is one `.npz` archive: an entry `tree` with JSON text, and one entry per array. Every entry carries a CRC, so that damaged bytes
are refused. In the JSON text whatever JSON itself cannot say is an object with the key '!':

    {'!': 'array', 'entry': 'a3', 'dtype': 'bfloat16', 'shape': [2, 5]}    'scalar' likewise
    {'!': 'tuple', 'items': [...]}    {'!': 'rollout', 'fields': {...}}    {'!': 'dict', 'items': {...}}  (a dict with a key '!')
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pathlib
from typing import Any, Mapping, Sequence
import zipfile

import jax
import numpy as np

from sao_jax.types import Rollout

_NATIVE_KINDS = 'biufcSU'  # What NumPy writes as itself; other types (bfloat16, float8) go as bytes.


def encode(tree: Any) -> bytes:
  """Bytes from which `decode` makes an equal tree: the same types, dtypes, shapes and float bits.

  Raises:
    TypeError: the tree holds something else; the message says where.
  """
  arrays: dict[str, np.ndarray] = {}
  text = json.dumps(_pack(tree, 'state', arrays))
  arrays['tree'] = np.frombuffer(text.encode('ascii'), np.uint8)
  stream = io.BytesIO()
  np.savez(stream, **arrays)
  return stream.getvalue()


def decode(data: bytes) -> Any:
  """The tree that `encode` was given. Raises ValueError when the bytes are damaged."""
  try:
    with np.load(io.BytesIO(data), allow_pickle=False) as archive:
      arrays = {name: archive[name] for name in archive.files}
    return _unpack(json.loads(arrays['tree'].tobytes().decode('ascii')), arrays)
  except (zipfile.BadZipFile, EOFError, OSError, KeyError, ValueError, NotImplementedError) as error:
    raise ValueError(f'damaged host state of {len(data)} bytes: {error}') from error


def write_file(path: str | os.PathLike[str], tree: Any) -> None:
  """Writes `tree` to a file in one rename, making its folder if need be: the file is there whole or not at all."""
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  fresh = path.with_name(path.name + '.new')
  fresh.write_bytes(encode(tree))
  os.replace(fresh, path)


def read_file(path: str | os.PathLike[str]) -> Any:
  """What `write_file` wrote. Raises ValueError, naming the file, when it is damaged."""
  try:
    return decode(pathlib.Path(path).read_bytes())
  except ValueError as error:
    raise ValueError(f'{path} cannot be read: {error}') from error


def save_rollouts(path: str | os.PathLike[str], rollouts: Sequence[Rollout]) -> None:
  """Writes `rollouts` to a file, whole or not at all."""
  write_file(path, list(rollouts))


def load_rollouts(path: str | os.PathLike[str]) -> list[Rollout]:
  """The rollouts that `save_rollouts` wrote, equal in every bit."""
  return read_file(path)


def rollout_to_state(rollout: Rollout) -> dict[str, Any]:
  """Fields of a rollout as a plain dictionary."""
  return {field.name: getattr(rollout, field.name) for field in dataclasses.fields(rollout)}


def rollout_from_state(state: Mapping[str, Any]) -> Rollout:
  """Inverse of `rollout_to_state`."""
  return Rollout(**state)


def _pack(value: Any, path: str, arrays: dict[str, np.ndarray]) -> Any:
  if value is None or type(value) in (bool, int, float, str):
    return value
  if isinstance(value, (np.ndarray, np.generic)):
    return _pack_array(value, path, arrays)
  if isinstance(value, Rollout):
    return {'!': 'rollout', 'fields': _pack(rollout_to_state(value), path, arrays)}
  if isinstance(value, Mapping):
    wrong = [key for key in value if type(key) is not str]
    if wrong:
      raise TypeError(f'{path} has the key {wrong[0]!r}; keys of saved dictionaries are strings.')
    items = {key: _pack(item, f'{path}.{key}', arrays) for key, item in value.items()}
    return {'!': 'dict', 'items': items} if '!' in items else items
  if type(value) in (list, tuple):
    items = [_pack(item, f'{path}[{i}]', arrays) for i, item in enumerate(value)]
    return items if type(value) is list else {'!': 'tuple', 'items': items}
  hint = ' Device arrays go into the arrays of a checkpoint.' if isinstance(value, jax.Array) else ''
  raise TypeError(f'{path} is a {type(value).__name__}, which cannot be saved as host state.{hint}')


def _pack_array(value: np.ndarray | np.generic, path: str, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
  array = np.asarray(value)
  if array.dtype.hasobject or array.dtype.names:
    raise TypeError(f'{path} is an array of {array.dtype}, which cannot be saved as host state.')
  entry = f'a{len(arrays)}'
  plain = array.dtype.kind in _NATIVE_KINDS
  arrays[entry] = array if plain else np.frombuffer(array.tobytes(), np.uint8)
  kind = 'array' if isinstance(value, np.ndarray) else 'scalar'
  return {'!': kind, 'entry': entry, 'dtype': '' if plain else array.dtype.name, 'shape': list(array.shape)}


def _unpack(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
  if isinstance(value, list):
    return [_unpack(item, arrays) for item in value]
  if not isinstance(value, dict):
    return value
  kind = value.get('!')
  if kind is None:
    return {key: _unpack(item, arrays) for key, item in value.items()}
  if kind == 'dict':
    return {key: _unpack(item, arrays) for key, item in value['items'].items()}
  if kind == 'tuple':
    return tuple(_unpack(item, arrays) for item in value['items'])
  if kind == 'rollout':
    return rollout_from_state(_unpack(value['fields'], arrays))
  if kind not in ('array', 'scalar'):
    raise ValueError(f'unknown kind {kind!r}')
  array = arrays[value['entry']]
  if value['dtype']:
    array = np.frombuffer(array.tobytes(), np.dtype(value['dtype'])).reshape(value['shape']).copy()
  return array[()] if kind == 'scalar' else array
