"""What a scaffold's work is worth: a Python function, a command, or a file that the scaffold leaves says so."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import pathlib
from typing import Any, Callable, Mapping

from sao_jax.environments import base
from sao_jax.environments.scaffold_process import Command, Process, ScaffoldFailure, fill


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What there is to grade.

  Attributes:
    task: the whole task, hidden fields too.
    transcript: the session: 'segments' of token ids, and 'turns' with messages, texts, tool calls, log-probs and versions.
    folder: the scaffold's working folder.
    exit_code: of the scaffold; negative for a signal, None where it was ended because it hung.
    output: the end of what it wrote to standard output and error.
  """

  task: Mapping[str, Any]
  transcript: Mapping[str, Any]
  folder: pathlib.Path
  exit_code: int | None
  output: str


@dataclasses.dataclass(frozen=True)
class Grade:
  reward: float
  success: float


def function_of(name: str) -> Callable[[Outcome], Any]:
  """The function that 'module:function' names. Raises ValueError where there is none."""
  module, _, attribute = name.partition(':')
  try:
    function = getattr(importlib.import_module(module), attribute)
  except (ImportError, AttributeError, ValueError) as error:
    raise ValueError(f'grade must name a function, "module:function", got {name!r}: {error}') from error
  if not callable(function):
    raise ValueError(f'grade must name a function, {name!r} is a {type(function).__name__}.')
  return function


def as_grade(value: Any) -> Grade:
  """A grade from a number, or from an object with 'reward' and perhaps 'success'. Raises ValueError for anything else."""
  entries = dict(value) if isinstance(value, Mapping) else {'reward': value}
  if 'reward' not in entries or set(entries) - {'reward', 'success'}:
    raise ValueError(f'a grade is a number, or an object with "reward" and perhaps "success", got {value!r:.200}')
  numbers = {}
  for name, number in entries.items():
    if not isinstance(number, (int, float)) or not math.isfinite(number):
      raise ValueError(f'{name} must be a finite number, got {number!r:.80}')
    numbers[name] = float(number)
  return Grade(numbers['reward'], numbers.get('success', float(numbers['reward'] > 0)))


def by_function(function: Callable[[Outcome], Any], outcome: Outcome) -> Grade:
  """Raises GraderError where the function raises, or gives no grade."""
  try:
    return as_grade(function(outcome))
  except base.EnvironmentFailure:
    raise
  except Exception as error:
    raise base.GraderError(f'The grader {function!r} failed: {type(error).__name__}: {error}') from error


def by_command(command: Command, outcome: Outcome, *, private: pathlib.Path, timeout_s: float, file_mb: int) -> Grade:
  """The grade that a command prints as its last line, run in the working folder after the scaffold's end.

  It finds the whole task and the transcript in the files that SAO_TASK_FILE and SAO_TRANSCRIPT_FILE name, and the exit code, empty where
  the scaffold hung, in SAO_EXIT_CODE.

  Args:
    private: folder for those files; the scaffold has not seen it.

  Raises:
    GraderTimeout: it took longer than `timeout_s`.
    GraderError: it failed, or printed no grade.
  """
  files = {'SAO_TASK_FILE': (private / 'task.json', outcome.task), 'SAO_TRANSCRIPT_FILE': (private / 'transcript.json', outcome.transcript)}
  for path, value in files.values():
    path.write_text(json.dumps(value))
  variables = {name: str(path) for name, (path, _) in files.items()}
  variables['SAO_EXIT_CODE'] = '' if outcome.exit_code is None else str(outcome.exit_code)
  try:
    process = Process(
        fill(command, {**outcome.task, 'folder': str(outcome.folder)}), folder=outcome.folder, home=private, output=private / 'output',
        stdin=b'', variables=variables, file_mb=file_mb)
  except ScaffoldFailure as error:
    raise base.GraderError(f'The grading command could not be started: {error}') from error
  try:
    if not process.wait(timeout_s):
      raise base.GraderTimeout(f'The grading command took more than grade_timeout_s={timeout_s:g}.')
  finally:
    process.end()
    process.forget()
  if process.exit_code:
    raise base.GraderError(f'The grading command ended with status {process.exit_code}: {process.tail()}')
  lines = process.tail().split('\n')
  last = next((line for line in reversed(lines) if line.strip()), '')
  try:
    return as_grade(json.loads(last))
  except (ValueError, RecursionError) as error:
    raise base.GraderError(f'The last line of the grading command must be a grade: {error}') from error


def by_file(name: str, outcome: Outcome) -> Grade | None:
  """The grade in a file of the working folder; None where there is none to be read there, which is the scaffold's own doing."""
  path = outcome.folder / name
  try:
    if not path.resolve().is_relative_to(outcome.folder.resolve()) or not path.is_file() or path.stat().st_size > 1 << 20:
      return None
    return as_grade(json.loads(path.read_text(encoding='utf-8')))
  except (OSError, ValueError, RecursionError):
    return None
