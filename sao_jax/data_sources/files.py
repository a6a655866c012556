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
import os
import pathlib
import re
import stat
import threading
from typing import Any, Callable, Iterable, Mapping, Protocol, Sequence
import zlib

ENDINGS = ('.jsonl', '.json', '.csv', '.tsv', '.parquet')
LONGEST_FIELD = 1 << 30  # Of a CSV file; Python's own limit is 131,072 characters, less than a long prompt.
GZIP, PARQUET = b'\x1f\x8b', b'PAR1'
OTHERS = (  # What files of other kinds begin with, and what to do with them.
    (b'version https://git-lfs', 'is a pointer of Git LFS in the place of the file; run git lfs pull in its folder.'),
    (GZIP, 'is packed by gzip; its name must end in .gz.'), (b'PK\x03\x04', 'is a zip archive; unpack it.'),
    (PARQUET, 'is a Parquet file; its name must end in .parquet.'),
    (b'\xff\xfe', 'is UTF-16 or UTF-32; save it as UTF-8.'), (b'\xfe\xff', 'is UTF-16; save it as UTF-8.'),
    (b'<!doctype html', 'is a web page; fetch the file itself.'), (b'<html', 'is a web page; fetch the file itself.'))
_UNSOUND = re.compile(r'\\u[dD]|NaN|Infinity|[eE]\+?\d')  # Of JSON text: perhaps no text or no number.


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
  if '://' not in path and os.path.isdir(local(path)):
    raise ValueError(f'{path} is a folder; give a file in it.')
  ending = pathlib.PurePath(path.removesuffix('.gz')).suffix.lower()
  if ending not in ENDINGS or (ending == '.parquet' and path.endswith('.gz')):
    raise ValueError(f'{path} must end in one of {", ".join(ENDINGS)} (all but .parquet also with .gz), so that its format is known.')
  if ending == '.parquet':
    return _Parquet(path)
  data = _bytes(path)
  zero = data.find(b'\0')
  if zero >= 0:
    raise ValueError(f'{path}, line {_line(data, zero)}: holds a zero byte; it is no text, or UTF-16: it must be UTF-8.')
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


def local(path: str) -> str:
  """The path with `~` filled in; unlike pathlib's, never an error."""
  return os.path.expanduser(path)


def _bytes(path: str) -> mmap.mmap | bytes:
  """Content of a file, unpacked where it ends in .gz. Raises ValueError for a file of another kind."""
  if '://' in path:
    epath = importlib.import_module('etils.epath')
    try:
      data: mmap.mmap | bytes = epath.Path(path).read_bytes()
    except KeyError as error:
      raise ValueError(f'{path}: nothing here opens addresses that begin with {error}; copy the file to a disk or a bucket.') from None
  else:
    if not stat.S_ISREG(os.stat(local(path)).st_mode):
      raise ValueError(f'{path} is no file but a pipe or a device; rows are read by their place, so copy them into a file.')
    try:
      with open(local(path), 'rb') as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:  # Files of no bytes cannot be mapped.
      data = b''
  _refuse_others(path, data, own=GZIP if path.endswith('.gz') else PARQUET if path.lower().endswith('.parquet') else b'')
  if not path.endswith('.gz'):
    return data
  try:
    unpacked = gzip.decompress(data)
  except (OSError, EOFError, zlib.error) as error:
    raise ValueError(f'{path} is not a whole gzip file ({error}); fetch it again.') from error
  _refuse_others(path, unpacked, own=b'')
  return unpacked


def _refuse_others(path: str, data: mmap.mmap | bytes, *, own: bytes) -> None:
  start = data[:64].lower()
  for beginning, what in OTHERS:
    if beginning != own and start.startswith(beginning.lower()):
      raise ValueError(f'{path} {what}')


def _line(data: mmap.mmap | bytes, place: int) -> int:
  return bytes(data[:place]).count(b'\n') + 1


def _decode(path: str, data: mmap.mmap | bytes) -> str:
  try:
    return bytes(data).decode('utf-8-sig')
  except UnicodeDecodeError as error:
    raise ValueError(f'{path}, line {_line(data, error.start)}: not UTF-8 ({error.reason} at byte {error.start} of the file).') from error


def _loads(text: str) -> Any:
  """What JSON text says. Raises ValueError."""
  try:
    return json.loads(text)
  except json.JSONDecodeError as error:
    raise ValueError(f'not JSON: {error.msg} at character {error.pos + 1}.') from error
  except ValueError as error:
    raise ValueError('a number has too many digits to be read; write it as text.') from error
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
    try:
      text = self._data[start:len(self._data) if stop < 0 else stop].decode('utf-8')
    except UnicodeDecodeError as error:
      raise ValueError(f'not UTF-8: {error.reason} at byte {error.start + 1} of the line.') from error
    row = _loads(text)
    return _object(row, check=bool(_UNSOUND.search(text)))


def _object(row: Any, *, check: bool) -> dict[str, Any]:
  """The row, if it is an object; with `check`, of texts that can be written and numbers that are some."""
  if not isinstance(row, dict):
    raise ValueError(f'a row must be a JSON object like {{"question": ...}}, got {type(row).__name__}.')
  if check:
    try:
      json.dumps(row, ensure_ascii=False, allow_nan=False).encode('utf-8')
    except UnicodeEncodeError as error:
      raise ValueError(f'half of a surrogate pair ({error.object[error.start]!a}) is no text.') from error
    except (ValueError, RecursionError) as error:
      raise ValueError('NaN and Infinity are no JSON numbers; leave the field out, or write null.') from error
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
    return dict(_object(self._rows[index], check=self._unit == 'element'))


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
  csv.field_size_limit(LONGEST_FIELD)
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
      self._table = parquet.ParquetFile(pyarrow.BufferReader(data)).read()
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
      return plain_row(self._table.column_names, lambda name: self._table.column(name)[index].as_py())


def plain_row(names: Iterable[str], value_of: Callable[[str], Any]) -> dict[str, Any]:
  """The row of these columns with plain values. Raises ValueError with the column."""
  row = {}
  for name in names:
    try:
      row[name] = plain(value_of(name))
    except (ValueError, OverflowError) as error:
      told = str(error).rstrip('.')
      raise ValueError(f'column {name!r}: {told}. Leave the column out of the file, or write it as text.') from error
  return row


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
      raise ValueError(f'bytes that are not UTF-8 ({error.reason}).') from error
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
