"""Questions with known answers as single-turn chats: one question, one reply, right or wrong by a grader.

Rows come from a data source and hold 'question' and 'answer', and 'solution' where they are to be demonstrated; other fields go to the
grader as metadata. The reply gives its answer in the form `answer_format` (`graders.extract` has the forms).

A grader that runs into its limits or fails is a failure of the environment, counted as 'grader_timeout' or 'grader_error', never a reward
of zero. All environments of a process share one grader of the same settings.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
from typing import Any, Mapping, Sequence

import numpy as np

from sao_jax import graders
from sao_jax.environments import base
from sao_jax.graders import extract

FORMATS = {  # answer_format -> (what the system message asks for, final form of a demonstration)
    'boxed': ('Put the final answer within \\boxed{}.', '\\boxed{%s}'),
    'hash': ('End with a line of the form "#### ANSWER".', '#### %s'),
    'tag': ('Write the final answer, and nothing else, between <answer> and </answer>.', '<answer>%s</answer>'),
    'phrase': ('End with a line of the form "The answer is ANSWER".', 'The answer is %s'),
    'last_number': ('End with the final answer, a number.', '%s'),
    'last_line': ('Write the final answer, and nothing else, in the last line.', '%s'),
    'whole': ('Reply with the final answer and nothing else.', '%s'),
    'auto': ('Put the final answer within \\boxed{}.', '\\boxed{%s}'),
}
_MARKS = re.compile(r'<<[^<>]*>>')  # Calculator marks of GSM8K: '<<48/2=24>>'.
_FIELD = re.compile(r'\{([A-Za-z_]\w*)\}')

_divided: dict[tuple[int, float], tuple[Sequence[Any], dict[str, Sequence[int]]]] = {}

Source = Any  # Settings of a data source: a path, or a mapping with one.


class QuestionAnswer(base.Environment):
  """Questions of one data source.

  Args:
    source: where the rows come from; {'train': source, 'test': source} for one of each split, else one source whose questions are divided.
    grader: name in `graders.REGISTRY`.
    grader_settings: its settings.
    answer_format: where the answer stands in a reply, one of `FORMATS`; the grader's 'extraction', where it has that setting.
    system_prompt: system message; None for what `answer_format` asks for, '' for none.
    template: text of the question; names of text fields of the row in braces are filled in.
    test_share: share of all questions that belong to the test split, where one source serves both.

  Raises:
    ValueError: on an unknown format, grader or setting, rows without question and answer, or a split without rows.
    ImportError: when the grader needs a package that is not installed.
  """

  name = 'question_answer'
  replayable = True
  conversation = 'chat'
  has_demonstrations = True
  metric_names = ('success', 'answered')

  def __init__(
      self, *, source: Source, grader: str = 'math', grader_settings: Mapping[str, Any] | None = None, answer_format: str = 'boxed',
      system_prompt: str | None = None, template: str = '{question}', test_share: float = 0.1,
  ):
    if answer_format not in FORMATS:
      raise ValueError(f'answer_format must be one of {", ".join(FORMATS)}, got {answer_format!r}.')
    if not isinstance(template, str) or '{question}' not in template:
      raise ValueError(f'template must be a text with {{question}} in it, got {template!r}.')
    if system_prompt is not None and not isinstance(system_prompt, str):
      raise ValueError(f'system_prompt must be a string or None, got {system_prompt!r}.')
    base.check_range('test_share', test_share, 0.001, 0.999)
    self.answer_format, self.template = answer_format, template
    self.system_prompt = FORMATS[answer_format][0] if system_prompt is None else system_prompt
    self._rows = _splits(source, test_share)
    settings = dict(grader_settings or {})
    if grader != 'code':
      settings.setdefault('extraction', answer_format)
    self._grader = graders.shared(grader, **settings)
    self._needs_answer = self._grader.needs_answer
    for split in base.SPLITS:
      self._check_row(self._row(split, 0))
    self._data: Mapping[str, Any] | None = None

  def _row(self, split: str, place: int) -> dict[str, Any]:
    source, numbers = self._rows[split]
    return _parsed(source[numbers[place]])

  def _check_row(self, row: Mapping[str, Any]) -> None:
    for field in ('question', 'answer'):
      if not isinstance(row.get(field), str) or (field == 'question' or self._needs_answer) and not row[field].strip():
        has = ', '.join(map(repr, row)) or 'no fields'
        raise ValueError(f'A row must have a text {field!r}; it has {has}, and {field}={row.get(field)!r:.80}.')

  def sample_task(self, index: int, split: str, seed: int) -> base.Task:
    """The row at `index` of an endless order of the split's rows: every epoch is a permutation of them, a function of seed and epoch."""
    base.check_split(split)
    size = len(self._rows[split][1])
    epoch, place = divmod(index, size)
    row = self._row(split, int(_permutation(split, seed, epoch, size)[place]))
    self._check_row(row)
    return base.Task(index, split, seed, row)

  def reset(self, task: base.Task) -> base.Observation:
    self._data = task.data
    system = ({'role': 'system', 'content': self.system_prompt},) if self.system_prompt else ()
    return base.Observation(messages=(*system, {'role': 'user', 'content': fill(self.template, task.data)}))

  def step(self, action: str) -> base.StepResult:
    if self._data is None:
      raise RuntimeError('step was called without a running episode; call reset first.')
    data, self._data = self._data, None
    metadata = {name: value for name, value in data.items() if name not in ('question', 'answer')}
    grade = self._grader.grade(action, data['answer'], metadata=metadata)
    if grade.verdict == 'grader_timeout':
      raise base.GraderTimeout(grade.reason)
    if grade.verdict == 'grader_error':
      raise base.GraderError(grade.reason)
    success = float(grade.verdict == 'right')
    return base.StepResult(reward=success, terminated=True, metrics={'success': success, 'answered': float(grade.verdict != 'no_answer')})

  def demonstration(self, task: base.Task, rng: np.random.Generator) -> list[str]:
    """The row's own solution, if it has one, and the right answer in the form that is asked for."""
    del rng
    solution = _MARKS.sub('', str(task.data.get('solution') or '')).strip()
    if solution and extract.extract(solution, self.answer_format) is not None and self.answer_format == 'boxed':
      return [solution]
    final = FORMATS[self.answer_format][1] % task.data['answer'].strip()
    return [f'{solution}\n{final}' if solution and self.answer_format != 'whole' else final]


def fill(template: str, row: Mapping[str, Any]) -> str:
  """The template with every {name} of a text field filled in, once; other braces stay."""
  return _FIELD.sub(lambda m: row[m[1]] if isinstance(row.get(m[1]), str) else m[0], template)


@functools.lru_cache(maxsize=8)
def _permutation(split: str, seed: int, epoch: int, size: int) -> np.ndarray:
  return base.generator('question_answer/order/' + split, seed, epoch).permutation(size)


def _splits(source: Source, test_share: float) -> dict[str, tuple[Sequence[Any], Sequence[int]]]:
  """Split -> (rows, numbers of those that belong to it)."""
  if isinstance(source, Mapping) and set(source) == set(base.SPLITS):
    opened = {split: _open(part) for split, part in source.items()}
    divided = {split: (rows, range(len(rows))) for split, rows in opened.items()}
  else:
    rows = _open(source)
    sides = _sides(rows, test_share)
    divided = {split: (rows, numbers) for split, numbers in sides.items()}
  for split, (_, numbers) in divided.items():
    if not len(numbers):
      raise ValueError(f'The source {source!r:.200} has no rows for the {split} split; give one of each split, or change test_share.')
  return divided


def _sides(rows: Sequence[Any], test_share: float) -> dict[str, Sequence[int]]:
  """Rows divided by the text of their question: two rows with the same question are on the same side. Kept for the next environment."""
  key = (id(rows), test_share)
  if key not in _divided or _divided[key][0] is not rows:
    sides: dict[str, list[int]] = {split: [] for split in base.SPLITS}
    for number in range(len(rows)):
      sides[base.split_of(str(rows[number].get('question')), test_share)].append(number)
    while len(_divided) >= 16:
      _divided.pop(next(iter(_divided)), None)
    _divided[key] = (rows, sides)
  return _divided[key][1]


def _parsed(row: Mapping[str, Any]) -> dict[str, Any]:
  """A row with the answer apart from the solution, where the data have both in one field ('... #### 72')."""
  row = dict(row)
  answer = row.get('answer')
  if isinstance(answer, int) and not isinstance(answer, bool):
    row['answer'] = str(answer)
  elif isinstance(answer, str) and '####' in answer:
    solution, _, final = answer.rpartition('####')
    row.update(solution=_MARKS.sub('', solution).strip(), answer=final.strip())
  return row


def _open(source: Source) -> Sequence[Any]:
  """Rows of a data source: anything with a length that gives mappings by index."""
  try:
    opener = importlib.import_module('sao_jax.data_sources').open
  except ModuleNotFoundError:
    opener = _open_jsonl
  return opener(source)


def _open_jsonl(source: Source) -> Sequence[Any]:
  """Rows of a JSONL file: a path, or {'path': path, 'fields': {name: column}}."""
  settings = dict(source) if isinstance(source, Mapping) else {'path': source}
  path = settings.pop('path', None)
  fields = settings.pop('fields', {})
  if settings or not isinstance(path, (str, os.PathLike)) or not isinstance(fields, Mapping):
    raise ValueError(f"A data source is a path, or {{'path': path, 'fields': {{name: column}}}}; got {source!r:.200}.")
  return _rows_of(os.fspath(path), os.stat(path).st_mtime_ns, tuple(sorted(fields.items())))


@functools.lru_cache(maxsize=8)
def _rows_of(path: str, changed_ns: int, fields: tuple[tuple[str, str], ...]) -> Sequence[Any]:
  del changed_ns  # Only in the key.
  rows = []
  with open(path, encoding='utf-8') as file:
    for number, line in enumerate(file, 1):
      try:
        row = json.loads(line)
        rows.append({**row, **{name: row[column] for name, column in fields}})
      except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f'{path}, line {number}: {error!r}') from error
  return rows
