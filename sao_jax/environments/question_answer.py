"""Questions with known answers as single-turn chats: one question, one reply, right or wrong by a grader.

Rows come from a data source and hold 'question' and 'answer', and 'solution' where they are to be demonstrated; other fields go to the
grader as metadata. The reply gives its answer in the form `answer_format` (`graders.extract` has the forms).

A grader that runs into its limits or fails is a failure of the environment, counted as 'grader_timeout' or 'grader_error', never a reward
of zero. All environments of a process share one grader of the same settings.
"""

from __future__ import annotations

import bisect
import functools
import re
from typing import Any, Mapping, Sequence

import numpy as np

from sao_jax import data_sources, graders
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

Source = Any  # Settings of a data source, see `data_sources.open`: a path, a mapping with one, or a list of these for a mixture.


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
    if not isinstance(grader_settings, (Mapping, type(None))):
      raise ValueError(f'grader_settings must map names to values, got {grader_settings!r:.200}.')
    settings = dict(grader_settings or {})
    if grader != 'code':
      settings.setdefault('extraction', answer_format)
    self._grader = graders.shared(grader, **settings)
    self._needs_answer = self._grader.needs_answer
    self._rows = self._split_rows(source, test_share)
    self._data: Mapping[str, Any] | None = None

  def _split_rows(self, source: Source, test_share: float) -> dict[str, tuple[data_sources.Source, Sequence[int]]]:
    return _splits(source, test_share, self._needs_answer)

  def _row(self, split: str, place: int) -> dict[str, Any]:
    source, numbers = self._rows[split]
    return _parsed(source[numbers[place]])

  def task_sets(self, split: str) -> tuple[base.TaskSet, ...]:
    """The rows of a split; a mixture has a set for each of its parts that has rows there."""
    base.check_split(split)
    source, numbers = self._rows[split]
    sets, start = [], 0
    for part in source.parts:
      size = bisect.bisect_left(numbers, part.start + part.size) - bisect.bisect_left(numbers, part.start)
      if size:
        sets.append(base.TaskSet(part.name, start, size, part.weight, f'{source.fingerprint}/{len(numbers)}'))
        start += size
    return tuple(sets)

  def sample_task(self, index: int, split: str, seed: int) -> base.Task:
    """The row at `index` of the split's rows; their order and their epochs are the prompt stream's business."""
    base.check_split(split)
    size = len(self._rows[split][1])
    if not 0 <= index < size:
      raise ValueError(f'The {split} split has tasks 0 to {size - 1}, got {index}.')
    return base.Task(index, split, seed, self._row(split, index))

  def reset(self, task: base.Task) -> base.Observation:
    self._data = task.data
    return base.Observation(messages=self.messages(task.data))

  def messages(self, data: Mapping[str, Any]) -> tuple[Mapping[str, str], ...]:
    """The conversation that a row begins with."""
    system = ({'role': 'system', 'content': self.system_prompt},) if self.system_prompt else ()
    return (*system, {'role': 'user', 'content': fill(self.template, data)})

  def step(self, action: str) -> base.StepResult:
    if self._data is None:
      raise RuntimeError('step was called without a running episode; call reset first.')
    data, self._data = self._data, None
    metrics = self.graded(action, data)
    return base.StepResult(reward=metrics['success'], terminated=True, metrics=metrics)

  def graded(self, reply: str, data: Mapping[str, Any]) -> dict[str, float]:
    """'success' and 'answered' of a reply to a row. Raises GraderTimeout or GraderError."""
    metadata = {name: value for name, value in data.items() if name not in ('question', 'answer')}
    grade = self._grader.grade(reply, data['answer'], metadata=metadata)
    if grade.verdict == 'grader_timeout':
      raise base.GraderTimeout(grade.reason)
    if grade.verdict == 'grader_error':
      raise base.GraderError(grade.reason)
    return {'success': float(grade.verdict == 'right'), 'answered': float(grade.verdict != 'no_answer')}

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


@functools.lru_cache(maxsize=16)
def _check_rows(rows: data_sources.Source, needs_answer: bool) -> None:
  """Raises ValueError, with file and number, for the first row without a question or, where it is needed, an answer."""
  for index in range(len(rows)):
    row = _parsed(rows[index])
    for field in ('question', 'answer'):
      if not isinstance(row.get(field), str) or (field == 'question' or needs_answer) and not row[field].strip():
        raise ValueError(
            f'{rows.where(index)}: {field!r} must be a text with something in it, got {row.get(field)!r:.80}; the row has '
            f'{", ".join(map(repr, row)) or "no fields"} (fields={{{field!r}: COLUMN}} in the source names them).')


def _splits(source: Source, test_share: float, needs_answer: bool) -> dict[str, tuple[data_sources.Source, Sequence[int]]]:
  """Split -> (rows, numbers of those that belong to it), every row checked."""
  if isinstance(source, Mapping) and set(source) & set(base.SPLITS):
    if set(source) != set(base.SPLITS):
      raise ValueError(f'A source by splits has {" and ".join(base.SPLITS)}, and nothing else; got {", ".join(map(repr, source))}.')
    opened = {split: data_sources.open(part) for split, part in source.items()}
    for rows in opened.values():
      _check_rows(rows, needs_answer)
    divided = {split: (rows, range(len(rows))) for split, rows in opened.items()}
  else:
    rows = data_sources.open(source)
    _check_rows(rows, needs_answer)
    sides = _sides(rows, test_share)
    divided = {split: (rows, numbers) for split, numbers in sides.items()}
  for split, (_, numbers) in divided.items():
    if not len(numbers):
      raise ValueError(f'The source {source!r:.200} has no rows for the {split} split; give one of each split, or change test_share.')
  return divided


@functools.lru_cache(maxsize=16)
def _sides(rows: data_sources.Source, test_share: float) -> dict[str, Sequence[int]]:
  """Rows divided by the text of their question: two rows with the same question are on the same side. Kept for the next environment."""
  sides: dict[str, list[int]] = {split: [] for split in base.SPLITS}
  for number in range(len(rows)):
    sides[base.split_of(str(rows[number].get('question')), test_share)].append(number)
  return sides


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
