"""Whether a response's form says the same as the known answer's: the policy of `docs/graders.md`, without any algebra of its own.

`Comparer` decides forms against forms and plain numbers exactly, and asks `same_value` about expressions. In the grading process that
question is not answered: it raises `Undecided`, and a worker process goes through the same comparison with algebra at hand.
"""

from __future__ import annotations

import dataclasses
from typing import Callable, Protocol, Sequence

from sao_jax.graders import arithmetic, forms, latex
from sao_jax.graders.forms import Form, Interval, Many, Matrix, Named, Other, Relation, Single, Tokens, Words

MAX_ITEMS = 64  # Of a list or set that is compared item by item.


class Undecided(Exception):
  """Plain arithmetic does not tell."""


class Algebra(Protocol):
  """What a worker knows of expressions."""

  def same_value(self, gold: Tokens, response: Tokens) -> bool: ...

  def same_equation(self, gold: tuple[Tokens, Tokens], response: tuple[Tokens, Tokens], sign: str) -> bool:
    """Whether the left side minus the right side is the other's times a constant (for inequalities: a positive one)."""
    ...

  def same_whole(self, gold: Tokens, response: Tokens) -> bool: ...


class NoAlgebra:
  """Answers no question."""

  def same_value(self, gold: Tokens, response: Tokens) -> bool:
    raise Undecided

  def same_equation(self, gold: tuple[Tokens, Tokens], response: tuple[Tokens, Tokens], sign: str) -> bool:
    raise Undecided

  def same_whole(self, gold: Tokens, response: Tokens) -> bool:
    raise Undecided


class Comparer:
  """Compares forms; `same` may raise `Undecided` (with `NoAlgebra`) and `arithmetic.TooLarge`."""

  def __init__(self, algebra: Algebra):
    self._algebra = algebra

  def same(self, gold: Form, response: Form) -> bool:
    if gold == response:
      return True
    if isinstance(gold, Named) or isinstance(response, Named):
      return self._named(gold, response)
    gold, response = _unwrapped(gold, response)
    rules: tuple[tuple[type, Callable[[Form, Form], bool]], ...] = (
        (Words, self._words), (Other, self._whole), (Matrix, self._matrices), (Interval, self._intervals), (Many, self._collections),
        (Relation, self._relations))
    for kind, rule in rules:
      if isinstance(gold, kind) or isinstance(response, kind):
        return rule(gold, response)
    return self._singles(gold, response)

  # --- Names -------------------------------------------------------------------------------------------------------------------

  def _named(self, gold: Form, response: Form) -> bool:
    """x = 5 is 5; x = 5 is not y = 5; f(x) = x and f(t) = t are the same; y = 2x is y - 2x = 0."""
    if isinstance(gold, Named) and isinstance(response, Named):
      if gold.name == response.name and len(gold.arguments) == len(response.arguments):
        names = dict(zip(response.arguments, gold.arguments))
        free = {new: old for old, new in names.items() if new not in names}  # f(t) = x + t is not f(x) = x + x.
        renamed = _rename(response.value, {**free, **names})
        return self.same(gold.value, renamed)
      if gold.equation and response.equation and not gold.arguments and not response.arguments and _symbols(gold.equation[1]):
        return self._algebra.same_equation(gold.equation, response.equation, '=')
      return False
    named, other = (gold, response) if isinstance(gold, Named) else (response, gold)
    if isinstance(other, Relation):
      if other.sign != '=' or named.equation is None or named.arguments:
        return False
      sides = (other.left, other.right)
      return self._algebra.same_equation(*((named.equation, sides) if named is gold else (sides, named.equation)), '=')
    return self.same(gold.value, response) if named is gold else self.same(gold, response.value)

  # --- Collections -------------------------------------------------------------------------------------------------------------

  def _collections(self, gold: Form, response: Form) -> bool:
    if not isinstance(gold, Many) or not isinstance(response, Many):
      return False  # A list of guesses is no answer where one is asked for.
    kinds = {gold.kind, response.kind}
    if 'union' in kinds:
      return kinds <= {'union', 'list', 'set'} and self._same_items(gold.items, response.items)
    if kinds == {'tuple'} or kinds == {'tuple', 'list'}:
      return len(gold.items) == len(response.items) and all(map(self.same, gold.items, response.items))
    if 'tuple' in kinds:
      return False
    return (len(gold.items) == len(response.items) or kinds != {'list'}) and self._same_items(gold.items, response.items)

  def _same_items(self, gold: Sequence[Form], response: Sequence[Form]) -> bool:
    """Every item of each side is one of the other's; order does not count."""
    if len(gold) > MAX_ITEMS or len(response) > MAX_ITEMS:
      raise arithmetic.TooLarge(f'more than {MAX_ITEMS} items')
    if not gold or not response:
      return len(gold) == len(response)
    if len(gold) != len(response) and not all(isinstance(item, Single) for item in (*gold, *response)):
      return False
    pairs = [[self._lazily(g, r) for r in response] for g in gold]
    if all(p is not None for row in pairs for p in row):
      return all(map(any, pairs)) and all(map(any, zip(*pairs)))
    if any(not any(p is not False for p in row) for row in (*pairs, *zip(*pairs))):
      return False  # Whatever the rest says.
    raise Undecided

  def _lazily(self, gold: Form, response: Form) -> bool | None:
    try:
      return self.same(gold, response)
    except Undecided:
      return None

  def _intervals(self, gold: Form, response: Form) -> bool:
    """Ends and whether they belong to it; (1, 2) may be read as an open interval."""
    pairs = []
    for form in (gold, response):
      if isinstance(form, Many) and form.kind == 'union' and len(form.items) == 1:
        form = form.items[0]
      if isinstance(form, Many) and form.kind == 'tuple' and len(form.items) == 2 and all(
          isinstance(item, Single) and not item.unit for item in form.items):
        form = Interval(form.items[0].parts, form.items[1].parts, False, False)
      pairs.append(form)
    left, right = pairs
    if not isinstance(left, Interval) or not isinstance(right, Interval):
      return False
    if _finite_closed(left) != _finite_closed(right):
      return False
    return self._tokens(left.low, right.low) and self._tokens(left.high, right.high)

  def _matrices(self, gold: Form, response: Form) -> bool:
    """Cell by cell; a row or a column is also a tuple."""
    if isinstance(gold, Matrix) and isinstance(response, Matrix):
      if [len(row) for row in gold.rows] != [len(row) for row in response.rows]:
        return False
      return all(self.same(g, r) for gs, rs in zip(gold.rows, response.rows) for g, r in zip(gs, rs))
    matrix, other = (gold, response) if isinstance(gold, Matrix) else (response, gold)
    if isinstance(other, Interval) and other.low_closed and other.high_closed:
      other = Many('tuple', (Single(other.low), Single(other.high)))
    if not isinstance(other, Many) or other.kind != 'tuple' or (len(matrix.rows) > 1 and any(len(row) > 1 for row in matrix.rows)):
      return False
    cells = [cell for row in matrix.rows for cell in row]
    pairs = zip(cells, other.items) if matrix is gold else zip(other.items, cells)
    return len(cells) == len(other.items) and all(self.same(g, r) for g, r in pairs)

  # --- Expressions -------------------------------------------------------------------------------------------------------------

  def _words(self, gold: Form, response: Form) -> bool:
    texts = [form.text if isinstance(form, Words) else _letters(form) for form in (gold, response)]
    if None in texts:
      return False
    without = [' '.join(w for w in text.split() if w not in ('the', 'a', 'an')) or text for text in texts]
    return without[0] == without[1] or without[0].replace(' ', '') == without[1].replace(' ', '')

  def _relations(self, gold: Form, response: Form) -> bool:
    if not isinstance(gold, Relation) or not isinstance(response, Relation):
      return False
    if gold.sign not in forms.OPPOSITE or response.sign not in forms.OPPOSITE:
      return False
    sides = (response.left, response.right)
    if gold.sign == response.sign:
      return self._algebra.same_equation((gold.left, gold.right), sides, gold.sign)
    if gold.sign == forms.OPPOSITE[response.sign]:
      return self._algebra.same_equation((gold.left, gold.right), sides[::-1], gold.sign)
    return False

  def _whole(self, gold: Form, response: Form) -> bool:
    if not isinstance(gold, Other) and isinstance(response, Other) and not forms.balanced(response.parts):
      return False
    left, right = (_bare(_parts(form)) for form in (gold, response))
    if left == right:
      return True
    if any('\\ldots' in parts or any(p.startswith('\\text{') for p in parts) for parts in (left, right)):
      return False  # Compared as strings only.
    return self._algebra.same_whole(left, right)

  def _singles(self, gold: Single, response: Single) -> bool:
    if not units_agree(gold.unit, response.unit):
      return False
    if gold.base or response.base:
      return self._bases(gold, response)
    if (gold.unit == '%') != (response.unit == '%'):
      return self._percent(gold, response)
    return self._tokens(gold.parts, response.parts)

  def _bases(self, gold: Single, response: Single) -> bool:
    """The same digits in the same base; only the answer's base may be left out, and base 10 where the answer states none."""
    if gold.base and response.base and gold.base != response.base:
      return False
    if not gold.base and response.base != 10:
      return False
    digits = [''.join(form.parts).upper().lstrip('0') or '0' for form in (gold, response)]
    return digits[0] == digits[1]

  def _percent(self, gold: Single, response: Single) -> bool:
    """50% is 50 (the sign left out, for numbers from 1 up) and 0.5 (the value)."""
    plain, percent = (response, gold) if gold.unit == '%' else (gold, response)
    value = arithmetic.evaluate(plain.parts)
    if (value is None or abs(value) >= 1 or value == 0 or gold.unit == '%') and self._tokens(gold.parts, response.parts):
      return True
    hundredth = ('\\frac', '{', *percent.parts, '}', '{', '100', '}')
    return self._tokens(*((hundredth, plain.parts) if gold.unit == '%' else (plain.parts, hundredth)))

  def _tokens(self, gold: Tokens, response: Tokens) -> bool:
    if gold == response:
      return True
    values = arithmetic.evaluate(gold), arithmetic.evaluate(response)
    if None not in values:
      return values[0] == values[1]
    if '\\infty' in gold or '\\infty' in response:
      return [p for p in gold if p != '+'] == [p for p in response if p != '+']
    if not gold or not response:
      return False
    return self._algebra.same_value(gold, response)


def units_agree(gold: str, response: str) -> bool:
  """A unit may be left out or added; two that are written must be the same. Percent is no unit here."""
  if '%' in (gold, response) or not gold or not response:
    return True
  return gold == response


def _finite_closed(interval: Interval) -> tuple[bool, bool]:
  return (interval.low_closed and '\\infty' not in interval.low, interval.high_closed and '\\infty' not in interval.high)


def _unwrapped(gold: Form, response: Form) -> tuple[Form, Form]:
  """A set or list of one thing stands for the thing, where the other side is no collection."""
  def only(form: Form) -> Form:
    return form.items[0] if isinstance(form, Many) and form.kind in ('set', 'list', 'union') and len(form.items) == 1 else form
  if not isinstance(gold, Many) or not isinstance(response, Many):
    return only(gold), only(response)
  return gold, response


def _letters(form: Form) -> str | None:
  """The letters of an expression of letters alone, None for others: C is \\text{(C)}."""
  if isinstance(form, Single) and all(part.isalpha() or part.startswith('\\text{') for part in form.parts):
    return ' '.join(''.join(p[6:-1] if p.startswith('\\text{') else p for p in form.parts).lower().split())
  return None


def _symbols(parts: Tokens) -> bool:
  return any(part.isalpha() for part in parts)


def _rename(form: Form, names: dict[str, str]) -> Form:
  """The form with the single letters in `names` replaced."""
  if all(old == new for old, new in names.items()):
    return form
  if isinstance(form, (tuple, list)):
    return tuple(_rename(item, names) for item in form)
  if isinstance(form, str):
    return ''.join(names.get(c, c) for c in form) if form.isalpha() and len(form) < 4 else form
  if dataclasses.is_dataclass(form):
    return dataclasses.replace(form, **{
        field.name: _rename(getattr(form, field.name), names) for field in dataclasses.fields(form)
        if field.name in ('parts', 'items', 'low', 'high', 'rows', 'value', 'left', 'right')})
  return form


def _parts(form: Form) -> Tokens:
  """Tokens that say what a form says, for the comparison of wholes."""
  if isinstance(form, (Single, Other)):
    return form.parts
  if isinstance(form, Words):
    return (f'\\text{{{form.text}}}',)
  if isinstance(form, Relation):
    return (*form.left, form.sign, *form.right)
  if isinstance(form, Interval):
    return ('[' if form.low_closed else '(', *form.low, ',', *form.high, ']' if form.high_closed else ')')
  if isinstance(form, Matrix):
    return ('\\begin', '{', 'pmatrix', '}', *_joined([_joined([_parts(c) for c in row], '&') for row in form.rows], '\\\\'),
            '\\end', '{', 'pmatrix', '}')
  if isinstance(form, Named):
    return (form.name, '=', *_parts(form.value))
  inside = _joined([_parts(item) for item in form.items], '\\cup' if form.kind == 'union' else ',')
  return {'set': ('\\{', *inside, '\\}'), 'tuple': ('(', *inside, ')')}.get(form.kind, inside)


def _bare(parts: Tokens) -> Tokens:
  """Without braces of a set around the whole."""
  return parts[1:-1] if parts[:1] == ('\\{',) and parts[-1:] == ('\\}',) and forms.balanced(parts[1:-1]) else parts


def _joined(pieces: Sequence[Tokens], joint: str) -> Tokens:
  out: list[str] = []
  for i, piece in enumerate(pieces):
    out += ([joint] if i else []) + list(piece)
  return tuple(out)


def same_string(gold: str, response: str) -> bool:
  """Equal in one spelling."""
  return latex.string_key(gold) == latex.string_key(response)
