r"""The grader of mathematical answers: plain arithmetic and strings first, algebra in worker processes where that does not tell.

1. `extract` finds the answer; `guards` refuses what is none.
2. Equal strings (in one spelling) are right.
3. `compare` decides what needs no algebra: numbers exactly, lists, intervals, units, bases, by the policy of docs/graders.md.
4. The rest goes to a process of `services.pool`, which parses with math-verify's parser and compares. What runs into its limits there is
   'grader_timeout'.
"""

from __future__ import annotations

from typing import Any, Mapping

from sao_jax.graders import arithmetic, base, compare, extract, forms, guards, latex, symbolic
from sao_jax.services import pool

_VERDICTS = {pool.TIMEOUT: 'grader_timeout', pool.ERROR: 'grader_error'}


class Mathematics(base.Grader):
  """Grades mathematical answers.

  Args:
    extraction: where the answer stands in a response, one of `extract.FORMS`.
    workers: processes; 0 for one per CPU. They start when an answer first needs algebra.
    time_limit_s: of one answer in a process, wall and CPU.
    memory_mb: address space of a process.
    wait_limit_s: how long a call waits for a free process.

  Raises:
    ValueError: on values out of range.
    ImportError: when math-verify is not installed.
  """

  name = 'math'

  def __init__(
      self, *, extraction: str = 'auto', workers: int = 0, time_limit_s: float = 5.0, memory_mb: int = 1024, wait_limit_s: float = 120.0,
  ):
    extract.check_form(extraction)
    for name, value, low, high in (('workers', workers, 0, 1024), ('time_limit_s', time_limit_s, 0.1, 3600.0),
                                   ('memory_mb', memory_mb, 256, 1 << 20), ('wait_limit_s', wait_limit_s, 0.1, 86400.0)):
      if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ValueError(f'{name} must be a number in [{low}, {high}], got {value!r}.')
    _require()
    self.extraction = extraction
    self._pool = pool.Pool(
        size=int(workers), time_limit_s=time_limit_s, memory_mb=int(memory_mb), wait_limit_s=wait_limit_s,
        service='sao_jax.graders.symbolic_service')
    self._plain = compare.Comparer(compare.NoAlgebra())

  def _grade(self, response: str, answer: str, metadata: Mapping[str, Any]) -> base.Grade:
    found = extract.extract(response, self.extraction)
    if found is None:
      return base.grade_of('no_answer', None, f'no answer in the form {self.extraction!r}')
    if found.strip() == answer.strip():
      return base.grade_of('right', found, 'equal strings')
    refused = guards.refusal(found)
    if refused:
      return base.grade_of('wrong', found[:guards.MAX_ANSWER], f'refused: {refused}')
    if guards.refusal(answer):
      return base.grade_of('grader_error', found, f'the known answer is refused: {guards.refusal(answer)}')
    verdict, reason = self._compare(answer, found)
    return base.grade_of(verdict, found, reason)

  def _compare(self, gold: str, response: str) -> tuple[str, str]:
    if latex.string_key(gold) == latex.string_key(response):
      return 'right', 'equal strings'
    try:
      arithmetic.check_size(latex.grouped(latex.tokens(latex.canonical(response))))
      return 'right' if symbolic.compare_texts(self._plain, gold, response) else 'wrong', 'arithmetic'
    except arithmetic.TooLarge as error:
      return 'grader_timeout', f'not worked out: {error}'
    except compare.Undecided:
      verdict, reason = self._pool.ask({'gold': gold, 'response': response})
      return _VERDICTS.get(verdict, verdict), reason

  def describe(self, answer: str) -> str:
    """The form that a known answer is read as: 'Single', 'Many', ..., 'Other' (compared as a whole). For a look at a data set."""
    return type(forms.parse(answer)).__name__

  def close(self) -> None:
    self._pool.close()


def _require() -> None:
  import importlib.util
  if importlib.util.find_spec('math_verify') is None:
    raise ImportError("The grader 'math' needs the package math-verify: pip install -r requirements/math.txt")
