"""Graders without algebra: whole numbers, and strings in one spelling."""

from __future__ import annotations

from typing import Any, Mapping

from sao_jax.graders import arithmetic, base, extract, forms, guards, latex


class Integer(base.Grader):
  """Whole numbers: '1,234', '1234.0', '$1234$' and 'x = 1234' are 1234; anything else is wrong.

  Args:
    extraction: where the answer stands in a response, one of `extract.FORMS`.
  """

  name = 'integer'

  def __init__(self, *, extraction: str = 'auto'):
    extract.check_form(extraction)
    self.extraction = extraction

  def _grade(self, response: str, answer: str, metadata: Mapping[str, Any]) -> base.Grade:
    gold = whole_number(answer)
    if gold is None:
      return base.grade_of('grader_error', None, f'the known answer {answer[:80]!r} is no whole number')
    found = extract.extract(response, self.extraction)
    if found is None:
      return base.grade_of('no_answer', None, f'no answer in the form {self.extraction!r}')
    refused = guards.refusal(found)
    if refused:
      return base.grade_of('wrong', found[:guards.MAX_ANSWER], f'refused: {refused}')
    value = whole_number(found)
    if value is None:
      return base.grade_of('wrong', found, 'no whole number')
    return base.grade_of('right' if value == gold else 'wrong', found, 'whole numbers')


def whole_number(text: str) -> int | None:
  """The whole number that `text` says, by plain digits: no powers, fractions or products; None for anything else."""
  form = forms.parse(text)
  if isinstance(form, forms.Named) and not form.arguments:
    form = form.value
  if not isinstance(form, forms.Single) or form.base not in (0, 10) or form.unit == '%':
    return None
  digits = form.parts[1:] if form.parts[0] in '+-' else form.parts
  if len(digits) != 1 or not digits[0].replace('.', '', 1).isdigit():
    return None
  value = arithmetic.evaluate(form.parts)
  return int(value) if value is not None and value.denominator == 1 else None


class Exact(base.Grader):
  """Equal as strings, in one spelling (`latex.string_key`).

  Args:
    extraction: where the answer stands in a response, one of `extract.FORMS`.
  """

  name = 'exact'

  def __init__(self, *, extraction: str = 'auto'):
    extract.check_form(extraction)
    self.extraction = extraction

  def _grade(self, response: str, answer: str, metadata: Mapping[str, Any]) -> base.Grade:
    found = extract.extract(response, self.extraction)
    if found is None:
      return base.grade_of('no_answer', None, f'no answer in the form {self.extraction!r}')
    if len(found) > max(guards.MAX_ANSWER, 2 * len(answer)):
      return base.grade_of('wrong', found[:guards.MAX_ANSWER], 'refused: too long')
    same = found.strip() == answer.strip() or not guards.refusal(found) and latex.string_key(found) == latex.string_key(answer)
    return base.grade_of('right' if same else 'wrong', found, 'strings')
