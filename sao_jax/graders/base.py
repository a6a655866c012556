"""What a grader is: a response and the known answer in, a verdict out.

Five verdicts are kept apart, since learning treats them differently:
  right           the response gives the answer: score 1;
  wrong           it gives another one, or something that is no answer of this kind: score 0;
  no_answer       it gives none, in the place where the grader looks: score 0;
  grader_timeout  the grader ran into its limits before it could tell: says nothing about the response;
  grader_error    the grader itself failed: says nothing about the response.
The last two have score 0 too, but an environment must not use it: it raises an `EnvironmentFailure` of that name, which is counted apart.
Nothing under `graders/` imports JAX.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping

VERDICTS = ('right', 'wrong', 'no_answer', 'grader_timeout', 'grader_error')
FAILURES = ('grader_timeout', 'grader_error')  # Verdicts that say nothing about the response.


@dataclasses.dataclass(frozen=True)
class Grade:
  """What a grader found.

  Attributes:
    score: 1.0 for 'right', else 0.0.
    verdict: one of `VERDICTS`.
    extracted: what was taken for the answer, None where there was none.
    reason: how the verdict was reached, in words.
  """

  score: float
  verdict: str
  extracted: str | None = None
  reason: str = ''

  def __post_init__(self):
    if self.verdict not in VERDICTS:
      raise ValueError(f'verdict must be one of {", ".join(VERDICTS)}, got {self.verdict!r}.')
    if self.score != float(self.verdict == 'right'):
      raise ValueError(f'The score of the verdict {self.verdict!r} is {float(self.verdict == "right")}, got {self.score!r}.')


def grade_of(verdict: str, extracted: str | None = None, reason: str = '') -> Grade:
  """The `Grade` of a verdict, with its score."""
  return Grade(float(verdict == 'right'), verdict, extracted, reason)


class Grader:
  """Base of all graders; subclasses give `_grade`. Safe to call from many threads at once."""

  name: str = ''
  needs_answer: bool = True  # False where the task's metadata say what is right.

  def grade(self, response: str, answer: str, *, metadata: Mapping[str, Any] | None = None) -> Grade:
    """Grades `response`, the whole text that the policy wrote, by the known `answer`.

    Args:
      response: any text, of any length.
      answer: the answer as the data has it; not blank, but for graders with `needs_answer` False.
      metadata: further fields of the task that some graders need.

    Raises:
      ValueError: when response or answer is no string, or answer is blank. Everything else, a fault of the grader included, is a verdict.
    """
    for name, value in (('response', response), ('answer', answer)):
      if not isinstance(value, str):
        raise ValueError(f'{name} must be a string, got {type(value).__name__}.')
    if self.needs_answer and not answer.strip():
      raise ValueError('answer must not be blank: there is nothing to grade by.')
    try:
      return self._grade(response, answer, metadata or {})
    except Exception as error:  # A fault of the grader, under that name.
      return grade_of('grader_error', None, f'{type(error).__name__}: {str(error)[:200]}')

  def _grade(self, response: str, answer: str, metadata: Mapping[str, Any]) -> Grade:
    raise NotImplementedError(f'{type(self).__name__} has no _grade.')

  def close(self) -> None:
    """Gives up processes that the grader holds; quick, also while a call is running in another thread, which then gets 'grader_error'."""
