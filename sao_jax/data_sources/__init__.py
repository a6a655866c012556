"""Prompts from files and data sets: `open(source)` gives a `Source` with a length and plain rows, whatever the format.

A source is a path, or a mapping:

    {'path': 'gsm8k/train.jsonl', 'parse': 'gsm8k'}                        a known form, see `rows.PARSERS`
    {'path': 'mine.csv', 'fields': {'question': 'Problem', 'answer': 'Short Answer'}, 'skip': 100, 'limit': 50}
    {'path': 'data/{split}.parquet', 'split': 'train'}
    {'path': 'tfds:gsm8k', 'split': 'train[:90%]', 'data_dir': 'tfds'}     prepared by `sao_jax.datasets`
    [{'path': 'a.jsonl', 'weight': 3}, {'path': 'b.jsonl', 'weight': 1}]   a mixture

Formats go by the ending: .jsonl, .json (one array), .csv, .tsv (with a header), .parquet; .jsonl, .json, .csv and .tsv also with .gz. Rows
keep their columns; `fields` adds names for some of them, `parse` makes 'question', 'answer' and more out of a known form.

Every row is read once when a source is opened, so that a bad one is told before any work: file, row, and what is wrong with it.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import os
import pathlib
import threading
from typing import Any, Callable, Mapping, Protocol, Sequence

from sao_jax.data_sources import files, rows

__all__ = ['Mixture', 'Part', 'Source', 'open']

Settings = str | os.PathLike[str] | Mapping[str, Any] | Sequence[Any]
KEYS = ('path', 'split', 'data_dir', 'fields', 'parse', 'skip', 'limit', 'check', 'weight', 'name')
TFDS = 'tfds:'
MOST_WEIGHT = 1e12
KEPT = 16  # Opened sources that stay open for the next `open` with the same settings.


@dataclasses.dataclass(frozen=True)
class Part:
  """One part of a source: rows [start, start + size); `weight` is its share of the prompts, None for one in proportion to its size."""

  name: str
  start: int
  size: int
  weight: float | None


class Source(Protocol):
  """Rows by index; may be read from several threads.

  Attributes:
    name: short, for people.
    parts: what a mixture is made of; a plain source is its own only part.
    fingerprint: changes when the rows, their order, or the settings that make them change.
  """

  name: str
  parts: tuple[Part, ...]
  fingerprint: str

  def __len__(self) -> int: ...

  def __getitem__(self, index: int) -> dict[str, Any]:
    """Row `index` in [0, len) as plain values. Raises IndexError, and ValueError for a bad row with its file and number."""
    ...

  def where(self, index: int) -> str:
    """File and number of a row, for messages."""
    ...


class _Table:
  """A plain source: rows of one file or data set, cut, named and parsed."""

  def __init__(
      self, name: str, table: files.Table, *, fields: Mapping[str, str], parse: str, skip: int, limit: int | None, check: bool
  ):
    self.name, self._table, self._fields, self._parse, self._skip = name, table, dict(fields), parse, skip
    available = len(table) - skip
    if available < 1:
      raise ValueError(f'{table.path} holds {len(table)} rows' + (f', and skip={skip} leaves none of them.' if skip else '.'))
    self._size = available if limit is None else min(limit, available)
    self.parts = (Part(name, 0, self._size, None),)
    made = json.dumps([table.digest, sorted(self._fields.items()), parse, skip, self._size])
    self.fingerprint = hashlib.sha256(made.encode()).hexdigest()[:16]
    for index in range(self._size if check else 1):
      self[index]

  def __len__(self) -> int:
    return self._size

  def where(self, index: int) -> str:
    return self._table.where(self._skip + index)

  def __getitem__(self, index: int) -> dict[str, Any]:
    if not 0 <= index < self._size:
      raise IndexError(f'{self.name} has rows 0 to {self._size - 1}, got {index}.')
    try:
      row = self._table.read(self._skip + index)
      missing = [column for column in self._fields.values() if column not in row]
      if missing:
        raise ValueError(f'has no field {missing[0]!r}; it has {", ".join(map(repr, row)) or "none"}.')
      row = {**row, **{name: row[column] for name, column in self._fields.items()}}
      return rows.PARSERS[self._parse](row) if self._parse else row
    except ValueError as error:
      raise ValueError(f'{self.where(index)}: {error}') from error


class Mixture:
  """Several sources as one: the rows of the first, then those of the second, and so on. Weights are for whoever draws from it."""

  def __init__(self, sources: Sequence[Source], weights: Sequence[float | None]):
    given = [weight for weight in weights if weight is not None]
    if given and len(given) != len(weights):
      raise ValueError('Either every part of a mixture has a weight, or none has (each then counts in proportion to its rows).')
    self.name = '+'.join(source.name for source in sources)
    parts, start = [], 0
    for i, (source, weight) in enumerate(zip(sources, weights)):
      twice = sum(other.name == source.name for other in sources) > 1
      parts.append(Part(f'{source.name}#{i}' if twice else source.name, start, len(source), weight))
      start += len(source)
    self._sources, self.parts, self._size = tuple(sources), tuple(parts), start
    made = json.dumps([[source.fingerprint, weight] for source, weight in zip(sources, weights)])
    self.fingerprint = hashlib.sha256(made.encode()).hexdigest()[:16]

  def __len__(self) -> int:
    return self._size

  def where(self, index: int) -> str:
    source, row = self._find(index)
    return source.where(row)

  def __getitem__(self, index: int) -> dict[str, Any]:
    source, row = self._find(index)
    return source[row]

  def _find(self, index: int) -> tuple[Source, int]:
    if not 0 <= index < self._size:
      raise IndexError(f'{self.name} has rows 0 to {self._size - 1}, got {index}.')
    for source, part in zip(self._sources, self.parts):
      if index < part.start + part.size:
        return source, index - part.start
    raise AssertionError('unreachable')


_opened: collections.OrderedDict[str, Source] = collections.OrderedDict()
_lock = threading.Lock()


def open(source: Settings) -> Source:  # pylint: disable=redefined-builtin
  """Opens a source; see the module's text for what it may be.

  The same settings give the same object while the file does not change, so that opening again costs nothing.

  Raises:
    ValueError: unknown or wrong settings, a file that cannot be read as what its ending says, a row without a field that is asked for; the
      message names file and row.
    OSError: a file that does not exist or cannot be opened.
    ImportError: a format whose library is not installed, with the command that installs it.
  """
  if isinstance(source, Sequence) and not isinstance(source, str):
    if not source:
      raise ValueError('A mixture needs at least one source, got none.')
    settings = [_settings(part) for part in source]
    sources, weights = [_open_cached(part) for part in settings], [part['weight'] for part in settings]
    key = json.dumps([[id(part), weight] for part, weight in zip(sources, weights)])  # A mixture keeps its parts alive, and so their ids.
    return _kept(key, lambda: Mixture(sources, weights))
  settings = _settings(source)
  if settings['weight'] is not None:
    raise ValueError('A weight is for the parts of a mixture (a list of sources), not for a source alone.')
  return _open_cached(settings)


def _settings(source: Any) -> dict[str, Any]:
  """All settings of one plain source, checked."""
  given = dict(source) if isinstance(source, Mapping) else {'path': os.fspath(source) if isinstance(source, os.PathLike) else source}
  unknown = sorted(set(given) - set(KEYS), key=str)
  if unknown:
    raise ValueError(f'Unknown setting {unknown[0]!r} of a data source; known: {", ".join(KEYS)}.')
  values = {
      'split': '', 'data_dir': '', 'fields': {}, 'parse': '', 'skip': 0, 'limit': None, 'check': True, 'weight': None, 'name': '', **given}
  path = values.get('path')
  if not isinstance(path, (str, os.PathLike)) or not os.fspath(path) or '\0' in os.fspath(path):
    raise ValueError(f'A data source needs a path (a file, or tfds:NAME), got {path!r}.')
  values['path'] = os.fspath(path)
  for name in ('split', 'data_dir', 'parse', 'name'):
    if not isinstance(values[name], str):
      raise ValueError(f'{name} of {path} must be a string, got {values[name]!r}.')
  fields = values['fields']
  if not isinstance(fields, Mapping) or not all(isinstance(x, str) for pair in fields.items() for x in pair):
    raise ValueError(f"fields of {path} must map names to columns, like {{'question': 'problem'}}; got {fields!r}.")
  if values['parse'] and values['parse'] not in rows.PARSERS:
    raise ValueError(f'parse of {path} must be one of {", ".join(rows.PARSERS)}, got {values["parse"]!r}.')
  for name, low in (('skip', 0), ('limit', 1)):
    value = values[name]
    if not (name == 'limit' and value is None) and (isinstance(value, bool) or not isinstance(value, int) or value < low):
      raise ValueError(f'{name} of {path} must be an integer of at least {low}, got {value!r}.')
  weight = values['weight']
  if weight is not None and (isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight <= MOST_WEIGHT):
    raise ValueError(f'weight of {path} must be a positive number, at most {MOST_WEIGHT:g}, got {weight!r:.80}.')
  if values['data_dir'] and not values['path'].startswith(TFDS):
    raise ValueError(f'data_dir={values["data_dir"]!r} of {path}: only tfds: data sets have one; write the folder into the path.')
  if not isinstance(values['check'], bool):
    raise ValueError(f'check of {path} must be True or False, got {values["check"]!r}.')
  return values


def _open_cached(settings: Mapping[str, Any]) -> Source:
  values = {name: dict(value) if isinstance(value, Mapping) else value for name, value in settings.items() if name != 'weight'}
  if not values['path'].startswith(TFDS):
    values['path'] = _split_path(values['path'], values['split'])
    values['status'] = _status(values['path'])
  return _kept(json.dumps(values, sort_keys=True), lambda: _open_plain(values))


def _kept(key: str, make: Callable[[], Source]) -> Source:
  with _lock:
    if key not in _opened:
      _opened[key] = make()
      while len(_opened) > KEPT:
        _opened.popitem(last=False)
    _opened.move_to_end(key)
    return _opened[key]


def _split_path(path: str, split: str) -> str:
  if '{split}' not in path:
    if split:
      raise ValueError(f"split={split!r} of {path}: only tfds: data sets and paths with {{split}} in them have splits; use 'skip' and "
                       "'limit' to cut a file.")
    return path
  if not split:
    raise ValueError(f"{path} needs a split, e.g. 'train'.")
  return path.replace('{split}', split)


def _status(path: str) -> list[int]:
  """Size and time of change of a local file, so that a changed one is read again."""
  try:
    status = os.stat(files.local(path))
  except OSError:
    return []  # Told when it is opened; a bucket path has none.
  return [status.st_size, status.st_mtime_ns]


def _open_plain(values: Mapping[str, Any]) -> Source:
  path = values['path']
  if path.startswith(TFDS):
    from sao_jax.data_sources import tfds

    table: files.Table = tfds.open_table(path.removeprefix(TFDS), split=values['split'], data_dir=values['data_dir'])
    name = values['name'] or '/'.join(x for x in (path.removeprefix(TFDS), values['split']) if x)
  else:
    table = files.open_table(path, rows.ERRATA.get(values['parse'], ()))
    name = values['name'] or '/'.join(pathlib.PurePath(files.stem(path)).parts[-2:])
  return _Table(
      name, table, fields=values['fields'], parse=values['parse'], skip=values['skip'], limit=values['limit'], check=values['check'])


