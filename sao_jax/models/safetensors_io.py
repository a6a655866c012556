"""Reading and writing safetensors files one tensor at a time, so that a model never stands in host memory as a whole.

    u64 length of the header | header, JSON: name -> {dtype, shape, data_offsets} | data, little-endian, C order

Source: the format as described by Hugging Face's safetensors library.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
from typing import Any, Callable, Mapping, Sequence

import ml_dtypes
import numpy as np

from sao_jax.models import files

READ_BYTES = 1 << 24  # Read at once; a remote file's reader keeps a copy of so much.
DTYPES = {
    'F32': np.dtype(np.float32), 'F16': np.dtype(np.float16), 'BF16': np.dtype(ml_dtypes.bfloat16), 'F64': np.dtype(np.float64),
    'F8_E4M3': np.dtype(ml_dtypes.float8_e4m3fn), 'F8_E5M2': np.dtype(ml_dtypes.float8_e5m2),
    'F8_E8M0': np.dtype(ml_dtypes.float8_e8m0fnu),
}
CODES = {dtype: code for code, dtype in DTYPES.items()}


class SafetensorsFile:
  """The tensors of one file, on a disk or in a bucket; each is read when it is asked for.

  They are read, not mapped: the pages of a mapped file would stay in the memory of the process beside the parameters.

  Attributes:
    shapes: name -> shape of every tensor.
    dtypes: name -> type, as NumPy has it.
  """

  def __init__(self, path: files.Path):
    """Reads the header. Raises ValueError where the file is missing, cut short or not of this format, or holds other types than floats."""
    self.path = path
    if not path.is_file():
      raise ValueError(f'{path} is missing.')
    with path.open('rb') as file:
      size = file.seek(0, os.SEEK_END) or file.tell()
      file.seek(0)
      length = int.from_bytes(file.read(8), 'little')
      if size < 8 or length > size - 8:
        raise ValueError(
            f'{path} is not a whole safetensors file: {size} bytes, the header alone would take {8 + length}.{files.pointer_hint(path)}')
      try:
        self._header = json.loads(file.read(length))
        if not isinstance(self._header, dict):
          raise ValueError(f'it is a {type(self._header).__name__}, not an object')
        self._header.pop('__metadata__', None)
        for name, entry in self._header.items():
          _check_entry(name, entry)
      except (ValueError, RecursionError) as error:
        raise ValueError(f'{path} is not a safetensors file, its header cannot be read: {error}.') from error
    self.shapes = {name: tuple(entry['shape']) for name, entry in self._header.items()}
    self._start = 8 + length
    other = [name for name, entry in self._header.items() if entry['dtype'] not in DTYPES]
    if other:
      raise ValueError(f'{path}: tensor {other[0]!r} has type {self._header[other[0]]["dtype"]}; known are {", ".join(DTYPES)}.')
    self.dtypes = {name: DTYPES[entry['dtype']] for name, entry in self._header.items()}
    for name, entry in self._header.items():
      begin, end = entry['data_offsets']
      if end - begin != math.prod(self.shapes[name]) * self.dtypes[name].itemsize:
        raise ValueError(
            f'{path}: tensor {name!r} of shape {self.shapes[name]} and type {entry["dtype"]} cannot take {end - begin} bytes.')
    end = max((8 + length + entry['data_offsets'][1] for entry in self._header.values()), default=size)
    if end > size:
      raise ValueError(f'{path} is cut short: it has {size} bytes of {end}; fetch it again.')

  def read(self, name: str) -> np.ndarray:
    """The tensor `name`. Raises ValueError where the file ends before it does."""
    dtype, (begin, end) = self.dtypes[name], self._header[name]['data_offsets']
    data = np.empty(end - begin, np.uint8)
    with self.path.open('rb') as file:
      file.seek(self._start + begin)
      done = 0
      while done < len(data):
        part = file.read(min(len(data) - done, READ_BYTES))
        if not part:
          raise ValueError(f'{self.path} is cut short: tensor {name!r} ends after {done} of {len(data)} bytes; fetch the file again.')
        data[done:done + len(part)] = np.frombuffer(part, np.uint8)
        done += len(part)
    return data.view(dtype).reshape(self.shapes[name])


WEIGHTS, INDEX = 'model.safetensors', 'model.safetensors.index.json'


def open_folder(folder: files.Path) -> dict[str, SafetensorsFile]:
  """Tensor -> its file, of a folder with `model.safetensors`, or with several files and their index.

  Raises:
    ValueError: a file that is missing or broken, a tensor that lies in two files, or an index that says something else than the files.
  """
  index = folder / INDEX
  places = _weight_map(index) if index.is_file() else {}
  if not places and not (folder / WEIGHTS).is_file():
    raise ValueError(f'{folder / WEIGHTS} is missing.{_other_weights(folder)}')
  where: dict[str, SafetensorsFile] = {}
  for name in sorted(set(places.values())) or [WEIGHTS]:
    file = SafetensorsFile(folder / name)
    twice = next((tensor for tensor in file.shapes if tensor in where), None)
    if twice is not None:
      raise ValueError(f'{folder}: tensor {twice!r} is in {where[twice].path.name} and in {name}; remove one of them.')
    where.update({tensor: file for tensor in file.shapes})
  lost = [tensor for tensor, name in places.items() if tensor not in where or where[tensor].path.name != name]
  if lost:
    raise ValueError(f'{index} says that tensor {lost[0]!r} is in {places[lost[0]]}, but it is not; fetch both files again.')
  return where


def _weight_map(index: files.Path) -> dict[str, str]:
  """Tensor -> name of its file, as the index has it. Raises ValueError where it names none, or something outside of its folder."""
  places = files.read_json(index).get('weight_map')
  if not isinstance(places, dict) or not places:
    raise ValueError(f'{index} must have a "weight_map" from names of tensors to names of files, got {places!r:.80}.')
  wrong = [name for name in places.values() if not isinstance(name, str) or not name or pathlib.PurePath(name).name != name]
  if wrong:
    raise ValueError(f'{index}: files of "weight_map" must be in its own folder, got {wrong[0]!r:.80}.')
  return places


def _other_weights(folder: files.Path) -> str:
  """What a folder without weights of the right name has in their place."""
  names = sorted(path.name for path in folder.iterdir())
  shards = [name for name in names if name.endswith('.safetensors')]
  if shards:
    return f' There is {shards[0]}; of several files {INDEX} must say what is in which.'
  other = [name for name in names if name.endswith(('.bin', '.pt', '.pth', '.ckpt', '.h5', '.msgpack', '.gguf'))]
  if other and other[0].endswith('.gguf'):
    return f' There is {other[0]}; name that file itself.'
  return f' There is {other[0]}; only safetensors are read: save the model anew with safe_serialization=True.' if other else ''


def _check_entry(name: str, entry: Any) -> None:
  """Raises ValueError where what a header says of a tensor is not of the right form."""
  if not isinstance(entry, dict) or not isinstance(entry.get('dtype'), str):
    raise ValueError(f'tensor {name!r} has no type')
  size = lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 0
  shape, offsets = entry.get('shape'), entry.get('data_offsets')
  if not isinstance(shape, list) or not all(map(size, shape)):
    raise ValueError(f'tensor {name!r} has the shape {shape!r}')
  if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(size, offsets)) or offsets[0] > offsets[1]:
    raise ValueError(f'tensor {name!r} lies at {offsets!r}')


def write(path: files.Path, shapes: Mapping[str, Sequence[int]], dtypes: Mapping[str, Any], read: Callable[[str], np.ndarray]) -> None:
  """Writes the tensors of `shapes`, asking `read(name)` for one at a time and casting it to `dtypes[name]`."""
  header: dict[str, Any] = {'__metadata__': {'format': 'pt'}}  # Readers of this format ask for the key.
  offset = 0
  for name, shape in shapes.items():
    dtype = np.dtype(dtypes[name])
    size = math.prod(shape) * dtype.itemsize
    header[name] = {'dtype': CODES[dtype], 'shape': list(shape), 'data_offsets': [offset, offset + size]}
    offset += size
  text = json.dumps(header).encode()
  text += b' ' * (-len(text) % 8)  # Data starts at a multiple of 8.
  with path.open('wb') as file:
    file.write(len(text).to_bytes(8, 'little'))
    file.write(text)
    for name, shape in shapes.items():
      x = np.ascontiguousarray(read(name), dtypes[name])
      if x.shape != tuple(shape):
        raise ValueError(f'Tensor {name!r} must have shape {tuple(shape)}, got {x.shape}.')
      file.write(x.reshape(-1).view(np.uint8).data)
    file.flush()
    if isinstance(path, pathlib.Path):  # What a bucket has taken is there to stay.
      os.fsync(file.fileno())
