"""Tables in files: JSONL, JSON, CSV and Parquet, read by row number without keeping more of them decoded than one row.

A local file is mapped into memory; anything with '://' in its path goes through etils' epath, which knows buckets.
"""

from __future__ import annotations

import array
import csv
import datetime
import decimal
import gzip
import hashlib
import importlib
import io
import json
import math
import mmap
import pathlib
import threading
from typing import Any, Mapping, Protocol, Sequence
import zlib

ENDINGS = ('.jsonl', '.json', '.csv', '.tsv', '.parquet')


class Table(Protocol):
  """Rows by number.

  Attributes:
    path: as it was given.
    digest: of what it holds.
  """

  path: str
  digest: str

  def __len__(self) -> int: ...

  def read(self, index: int) -> dict[str, Any]:
    """Row `index` in [0, len). Raises ValueError, without file and row, for a bad one."""
    ...

  def where(self, index: int) -> str:
    """Where a person finds the row: file and number, counted from 1."""
    ...


def open_table(path: str, errata: Sequence[tuple[str, str]] = ()) -> Table:
  """The table in a file. Raises ValueError for what is no such table, OSError for what cannot be opened.

  `errata` are (text, right text): known faults of a CSV file, put right wherever they occur.
  """
  ending = pathlib.PurePath(path.removesuffix('.gz')).suffix.lower()
  if ending not in ENDINGS or (ending == '.parquet' and path.endswith('.gz')):
    raise ValueError(f'{path} must end in one of {", ".join(ENDINGS)} (all but .parquet also with .gz), so that its format is known.')
  if '://' not in path and pathlib.Path(path).expanduser().is_dir():
    raise ValueError(f'{path} is a folder; give a file in it.')
  if ending == '.parquet':
    return _Parquet(path)
  data = _bytes(path)
  digest = hashlib.sha256(data).hexdigest()
  if ending == '.jsonl':
    return _JsonLines(path, data, digest)
  text = _decode(path, data)
  if ending == '.json':
    return _Rows(path, digest, _json_rows(path, text), 'element')
  for wrong, right in errata:
    text = text.replace(wrong, right)
  return _csv(path, text, '\t' if ending == '.tsv' else ',', digest)


def stem(path: str) -> str:
  """The path without its endings."""
  return str(pathlib.PurePath(path.removesuffix('.gz')).with_suffix(''))


def _bytes(path: str) -> mmap.mmap | bytes:
  """Content of a file, unpacked where it ends in .gz."""
  if '://' in path:
    epath = importlib.import_module('etils.epath')
    data: mmap.mmap | bytes = epath.Path(path).read_bytes()
  else:
    try:
      with open(pathlib.Path(path).expanduser(), 'rb') as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:  # Files of no bytes cannot be mapped.
      data = b''
  if not path.endswith('.gz'):
    return data
  try:
    return gzip.decompress(data)
  except (OSError, EOFError, zlib.error) as error:
    raise ValueError(f'{path} is not a whole gzip file ({error}); fetch it again.') from error


def _decode(path: str, data: mmap.mmap | bytes) -> str:
  try:
    return bytes(data).decode('utf-8-sig')
  except UnicodeDecodeError as error:
    line = bytes(data).count(b'\n', 0, error.start) + 1
    raise ValueError(f'{path}, line {line}: not UTF-8 ({error.reason} at byte {error.start} of the file).') from error


def _loads(text: str | bytes) -> Any:
  """JSON without NaN and Infinity, which are no JSON. Raises ValueError."""
  def refuse(name: str) -> Any:
    raise ValueError(f'{name} is no JSON number')
  try:
    return json.loads(text, parse_constant=refuse)
  except json.JSONDecodeError as error:
    raise ValueError(f'not JSON: {error.msg} at character {error.pos + 1}.') from error
  except UnicodeDecodeError as error:
    raise ValueError(f'not UTF-8: {error.reason} at byte {error.start + 1} of the line.') from error
  except RecursionError as error:
    raise ValueError('nested too deeply to be read.') from error


class _JsonLines:
  """One JSON object a line; blank lines are passed over."""

  def __init__(self, path: str, data: mmap.mmap | bytes, digest: str):
    self.path, self.digest, self._data = path, digest, data
    self._starts, self._lines = array.array('q'), array.array('q')
    start = 3 if data[:3] == b'\xef\xbb\xbf' else 0
    number = 0
    while start < len(data):
      number += 1
      stop = data.find(b'\n', start)
      stop = len(data) if stop < 0 else stop
      if data[start:stop].strip():
        self._starts.append(start)
        self._lines.append(number)
      start = stop + 1

  def __len__(self) -> int:
    return len(self._starts)

  def where(self, index: int) -> str:
    return f'{self.path}, line {self._lines[index]}'

  def read(self, index: int) -> dict[str, Any]:
    start = self._starts[index]
    stop = self._data.find(b'\n', start)
    row = _loads(self._data[start:len(self._data) if stop < 0 else stop])
    return _object(row)


def _object(row: Any) -> dict[str, Any]:
  if not isinstance(row, dict):
    raise ValueError(f'a row must be a JSON object like {{"question": ...}}, got {type(row).__name__}.')
  return row


class _Rows:
  """Rows that are in memory."""

  def __init__(self, path: str, digest: str, rows: Sequence[Any], unit: str, lines: Sequence[int] = ()):
    self.path, self.digest, self._rows, self._unit, self._lines = path, digest, rows, unit, lines

  def __len__(self) -> int:
    return len(self._rows)

  def where(self, index: int) -> str:
    return f'{self.path}, {self._unit} {index + 1}' + (f' (line {self._lines[index]})' if self._lines else '')

  def read(self, index: int) -> dict[str, Any]:
    return dict(_object(self._rows[index]))


def _json_rows(path: str, text: str) -> list[Any]:
  try:
    value = _loads(text)
  except ValueError as error:
    raise ValueError(f'{path}: {error} A file with one object a line ends in .jsonl.') from error
  if not isinstance(value, list):
    raise ValueError(f'{path} must hold one JSON array of objects, got {type(value).__name__}.')
  return value


def _csv(path: str, text: str, delimiter: str, digest: str) -> _Rows:
  """Rows of a CSV file by the names of its header; fields may hold line breaks. Every row has as many fields as the header."""
  reader = csv.reader(io.StringIO(text, newline=''), delimiter=delimiter, strict=True)
  header: list[str] | None = None
  rows: list[dict[str, str]] = []
  lines: list[int] = []
  while True:
    line = reader.line_num + 1
    try:
      values = next(reader)
    except StopIteration:
      break
    except csv.Error as error:
      raise ValueError(f'{path}, row {len(rows) + 1} (line {line}): not CSV: {error}.') from error
    if not values:
      continue  # A blank line.
    if header is None:
      header = values
      twice = sorted({name for name in header if header.count(name) > 1})
      if twice:
        raise ValueError(f'{path}: the header names the column {twice[0]!r} more than once.')
      continue
    if len(values) != len(header):
      raise ValueError(
          f'{path}, row {len(rows) + 1} (line {line}): {len(values)} fields, the header has {len(header)} ({", ".join(header)}).')
    rows.append(dict(zip(header, values)))
    lines.append(line)
  return _Rows(path, digest, rows, 'row', lines)


class _Parquet:
  """A Parquet file through pyarrow."""

  def __init__(self, path: str):
    try:
      pyarrow = importlib.import_module('pyarrow')
      parquet = importlib.import_module('pyarrow.parquet')
    except ModuleNotFoundError as error:
      raise ImportError('Parquet files need pyarrow: pip install -r requirements/parquet.txt') from error
    self.path = path
    data = _bytes(path)
    self.digest = hashlib.sha256(data).hexdigest()
    try:
      self._table = parquet.read_table(pyarrow.BufferReader(data))
    except (pyarrow.ArrowException, OSError, ValueError) as error:
      raise ValueError(f'{path} is not a whole Parquet file ({error}); fetch it again.') from error
    twice = sorted({name for name in self._table.column_names if self._table.column_names.count(name) > 1})
    if twice:
      raise ValueError(f'{path} names the column {twice[0]!r} more than once.')
    self._lock = threading.Lock()

  def __len__(self) -> int:
    return self._table.num_rows

  def where(self, index: int) -> str:
    return f'{self.path}, row {index + 1}'

  def read(self, index: int) -> dict[str, Any]:
    with self._lock:
      row = self._table.slice(index, 1).to_pylist()[0]
    return plain(row)


def plain(value: Any) -> Any:
  """`value` as JSON would give it: bytes and dates as text, NumPy values as Python's. Raises ValueError for what has no such form."""
  if isinstance(value, Mapping):
    return {str(k): plain(v) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return [plain(v) for v in value]
  if isinstance(value, bytes):
    try:
      return value.decode('utf-8')
    except UnicodeDecodeError as error:
      raise ValueError(f'bytes that are not UTF-8 ({error.reason}); only text can be a prompt.') from error
  if value is None or isinstance(value, (str, bool, int)):
    return value
  if isinstance(value, float):
    if not math.isfinite(value):
      raise ValueError(f'{value} is no number of a row.')
    return value
  if isinstance(value, (datetime.date, datetime.time, decimal.Decimal)):
    return str(value)
  if hasattr(value, 'tolist'):  # NumPy.
    return plain(value.tolist())
  raise ValueError(f'a {type(value).__name__} is no plain value.')
