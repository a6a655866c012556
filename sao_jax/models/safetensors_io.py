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
        raise ValueError(f'{path} is not a whole safetensors file: {size} bytes, the header alone would take {8 + length}.')
      try:
        self._header = json.loads(file.read(length))
        self._header.pop('__metadata__', None)
        self.shapes = {name: tuple(int(n) for n in entry['shape']) for name, entry in self._header.items()}
        ends = [8 + length + entry['data_offsets'][1] for entry in self._header.values()]
      except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f'{path} is not a safetensors file, its header cannot be read: {error!r}') from error
    self._start = 8 + length
    other = [name for name, entry in self._header.items() if entry['dtype'] not in DTYPES]
    if other:
      raise ValueError(f'{path}: tensor {other[0]!r} has type {self._header[other[0]]["dtype"]}; known are {", ".join(DTYPES)}.')
    self.dtypes = {name: DTYPES[entry['dtype']] for name, entry in self._header.items()}
    if max(ends, default=size) > size:
      raise ValueError(f'{path} is cut short: it has {size} bytes of {max(ends)}; fetch it again.')

  def read(self, name: str) -> np.ndarray:
    """The tensor `name`. Raises ValueError where shape, type and place in the file contradict each other."""
    entry, dtype = self._header[name], self.dtypes[name]
    begin, end = entry['data_offsets']
    if end - begin != math.prod(self.shapes[name]) * dtype.itemsize:
      raise ValueError(
          f'{self.path}: tensor {name!r} of shape {self.shapes[name]} and type {entry["dtype"]} cannot take {end - begin} bytes.')
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
