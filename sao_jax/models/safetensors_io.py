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

DTYPES = {'F32': np.dtype(np.float32), 'F16': np.dtype(np.float16), 'BF16': np.dtype(ml_dtypes.bfloat16), 'F64': np.dtype(np.float64)}
CODES = {dtype: code for code, dtype in DTYPES.items()}


class SafetensorsFile:
  """The tensors of one file, memory-mapped.

  Attributes:
    shapes: name -> shape of every tensor.
  """

  def __init__(self, path: pathlib.Path):
    """Reads the header. Raises ValueError where the file is missing, cut short or not of this format."""
    self.path = path
    if not path.is_file():
      raise ValueError(f'{path} is missing.')
    size = path.stat().st_size
    with path.open('rb') as file:
      length = int.from_bytes(file.read(8), 'little')
      if size < 8 or length > size - 8:
        raise ValueError(f'{path} is not a whole safetensors file: {size} bytes, the header alone would take {8 + length}.')
      try:
        self._header = json.loads(file.read(length))
        self._header.pop('__metadata__', None)
        self.shapes = {name: tuple(int(n) for n in entry['shape']) for name, entry in self._header.items()}
        ends = [8 + length + entry['data_offsets'][1] for entry in self._header.values()]
      except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f'{path} is not a safetensors file, its header cannot be read: {error!r}') from error
    self._start = 8 + length
    if max(ends, default=size) > size:
      raise ValueError(f'{path} is cut short: it has {size} bytes of {max(ends)}; fetch it again.')

  def read(self, name: str) -> np.ndarray:
    """The tensor `name`, mapped from the file: copy it before it goes anywhere. Raises ValueError on a type other than a float."""
    entry = self._header[name]
    dtype = DTYPES.get(entry['dtype'])
    if dtype is None:
      raise ValueError(f'{self.path}: tensor {name!r} has type {entry["dtype"]}; known are {", ".join(DTYPES)}.')
    begin, end = entry['data_offsets']
    if end - begin != math.prod(self.shapes[name]) * dtype.itemsize:
      raise ValueError(
          f'{self.path}: tensor {name!r} of shape {self.shapes[name]} and type {entry["dtype"]} cannot take {end - begin} bytes.')
    if begin == end:
      return np.zeros(self.shapes[name], dtype)
    return np.memmap(self.path, dtype, 'r', offset=self._start + begin, shape=self.shapes[name])


def write(path: pathlib.Path, shapes: Mapping[str, Sequence[int]], dtypes: Mapping[str, Any], read: Callable[[str], np.ndarray]) -> None:
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
    os.fsync(file.fileno())
