"""Prepared TensorFlow Datasets as tables, read through `tfds.data_source`: random access to ArrayRecord files, without TensorFlow."""

from __future__ import annotations

import hashlib
import threading
from typing import Any

from sao_jax import datasets
from sao_jax.data_sources import files


class _DataSource:
  """One split of a data set."""

  def __init__(self, name: str, split: str, data: Any, digest: str):
    self.path, self.digest = f'tfds:{name} {split}', digest
    self._data, self._lock = data, threading.Lock()

  def __len__(self) -> int:
    return len(self._data)

  def where(self, index: int) -> str:
    return f'{self.path}, example {index + 1}'

  def read(self, index: int) -> dict[str, Any]:
    with self._lock:  # Readers share their file position.
      try:
        row = self._data[index]
      except RuntimeError as error:  # What the reader of ArrayRecord raises.
        raise ValueError(f'the file of the data set is damaged ({error}); build it again.') from error
    return files.plain_row(row, row.__getitem__)


def open_table(name: str, *, split: str, data_dir: str) -> files.Table:
  """A split of a data set that is prepared in `data_dir`; nothing is downloaded.

  Args:
    name: of the data set, with configuration and version if need be ('gsm8k', 'prompts/mine:1.0.0').
    split: as TFDS writes it: 'train', 'test[:50%]'.
    data_dir: '' for TFDS's own folder.

  Raises:
    ImportError: tensorflow-datasets is not installed.
    ValueError: no such data set, version or split, or it is not prepared.
  """
  datasets.library()
  if not split:
    raise ValueError(f"tfds:{name} needs a split, e.g. 'train'.")
  builder = datasets.prepared(name, data_dir)
  try:
    data = builder.as_data_source(split=split)
  except (ValueError, KeyError, NotImplementedError) as error:
    raise ValueError(f'tfds:{name} cannot be read as {split!r} ({error}); its splits are {", ".join(builder.info.splits)}.') from error
  info = builder.info
  made = repr([info.full_name, split, sorted((n, s.num_examples, tuple(s.shard_lengths), s.num_bytes) for n, s in info.splits.items())])
  return _DataSource(name, split, data, hashlib.sha256(made.encode()).hexdigest())
