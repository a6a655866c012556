r"""Algebra for the comparison of expressions: parsed by latex2sympy (the parser of math-verify), compared numerically, then by math-verify.

Runs in worker processes only; nothing here has a time limit of its own. No text is ever evaluated as Python: the parser is a grammar, and
`parse_expr`, `lambdify` and `sympify` of strings are not used on what the policy wrote.

Decimals are turned into fractions first, so that no rounding takes part. Two expressions are the same when they agree to `DIGITS` digits at
`POINTS` random points of their variables (at one point where there is none), and different when they disagree at one. Where they cannot
be worked out in numbers, math-verify decides. Variables are positive; letters that usually count (a..d, i..q) are whole numbers in
expressions with floors, factorials and the like.
"""

from __future__ import annotations

import functools
import random
import re
from typing import Any, Sequence

from sao_jax.graders import forms, latex
from sao_jax.graders.forms import Tokens

DIGITS = 30
CONSTANT_DIGITS = 150  # Where there is no variable, and so only one point.
POINTS = 8
MARKER = 'Xi'  # The parser knows no double factorial: n!! goes through it as the binomial of n and this symbol.
_DECIMAL = re.compile(r'[0-9]*\.[0-9]+')
_COUNTING = set('abcdijklmnopq')
_WHOLE_FUNCTIONS = ('floor', 'ceiling', 'factorial', 'factorial2', 'binomial', 'Mod', 'gcd', 'lcm')


class Symbolic:
  """Implements `compare.Algebra` with sympy and math-verify."""

  def same_value(self, gold: Tokens, response: Tokens) -> bool:
    left, right = parse(gold), parse(response)
    if left is None or right is None:
      return False
    return _same(left, right)

  def same_equation(self, gold: tuple[Tokens, Tokens], response: tuple[Tokens, Tokens], sign: str) -> bool:
    sides = [parse(side) for side in (*gold, *response)]
    if any(side is None or not _is_expression(side) for side in sides):
      return False
    left, right = sides[0] - sides[1], sides[2] - sides[3]
    return _proportional(left, right, positive=sign not in ('=', '\\neq'))

  def same_whole(self, gold: Tokens, response: Tokens) -> bool:
    left, right = parse(gold), parse(response)
    if left is None or right is None:
      return False
    import math_verify
    return bool(math_verify.verify(left, right, float_rounding=15, timeout_seconds=None))


@functools.lru_cache(maxsize=512)
def parse(parts: Tokens) -> Any:
  """The sympy object of grouped tokens, None where the parser does not understand them."""
  import sympy
  from latex2sympy2_extended import latex2sympy
  from latex2sympy2_extended.latex2sympy2 import ConversionConfig
  text = to_latex(parts)
  imaginary = _has_imaginary(parts)
  try:
    parsed = latex2sympy(
        text, is_real=not imaginary, convert_degrees=False, normalization_config=None,
        conversion_config=ConversionConfig(lowercase_symbols=False))
  except MemoryError:
    raise
  except Exception:  # The parser raises plain Exceptions on what it does not understand.
    return None
  if not isinstance(parsed, (sympy.Basic, sympy.MatrixBase)):
    return None
  return _mended(parsed, imaginary)


def _mended(parsed: Any, imaginary: bool) -> Any:
  """With i, e and !! as what they mean."""
  import sympy
  replaced = {}
  for symbol in getattr(parsed, 'free_symbols', ()):
    if symbol.name in ('e', 'E'):
      replaced[symbol] = sympy.E
    elif symbol.name == 'i' and imaginary:
      replaced[symbol] = sympy.I
  parsed = parsed.xreplace(replaced) if replaced else parsed
  if not any(symbol.name == MARKER for symbol in getattr(parsed, 'free_symbols', ())):
    return parsed
  return parsed.replace(
      lambda e: isinstance(e, sympy.binomial) and getattr(e.args[1], 'name', '') == MARKER, lambda e: sympy.factorial2(e.args[0]))


def _has_imaginary(parts: Sequence[str]) -> bool:
  """Whether i is the imaginary unit: it stands as a letter of its own, not as an index, beside no j."""
  for before, part in zip(('', *parts), parts):
    if part.isalpha() and 'j' in part:
      return False
    if before in ('_', '\\sum', '\\prod'):
      return False
  return any(part.isalpha() and part.count('i') == 1 and len(part) <= 2 for part in parts)


def to_latex(parts: Tokens) -> str:
  r"""LaTeX for the parser: decimals as fractions, mixed numbers as sums, !! as a function, letters apart."""
  out: list[str] = []
  for i, part in enumerate(parts):
    before = parts[i - 1] if i else ''
    if _DECIMAL.fullmatch(part):
      whole, digits = part.split('.')
      out.append(rf'{{\frac{{{int(whole + digits)}}}{{{10**len(digits)}}}}}')
    elif part == '\\frac' and i and parts[i - 1].isdigit() and (i < 2 or parts[i - 2] not in '^_') and _proper(parts[i:i + 7]):
      out[-1] = f'({out[-1]}+' + r'\frac{' + parts[i + 2] + '}{' + parts[i + 5] + '})'
      out += [''] * 7
    elif len(out) > i:
      continue  # Taken already by a mixed number.
    elif part == '!!':
      out.append('')
      _double_factorial(out)
    elif part.isalpha() and part.isascii() and len(part) > 1:
      out.append(' '.join(part))
    elif before and before in '^_' and part != '{':
      out.append(f'{{{part}}}')
    else:
      out.append(part)
  return latex.join([part for part in out if part])


def _proper(inside: Sequence[str]) -> bool:
  return (len(inside) == 7 and inside[2].isdigit() and inside[3:5] == ('}', '{') and inside[5].isdigit() and inside[6] == '}'
          and 0 < int(inside[2]) < int(inside[5]))


def _double_factorial(out: list[str]) -> None:
  """Wraps what stands before '!!' into a function of that name."""
  stop = len(out) - 1
  start = stop - 1
  depth = 0
  while start >= 0:
    depth += (out[start] in (')', '}')) - (out[start] in ('(', '{'))
    if depth == 0 and out[start]:
      break
    start -= 1
  if start < 0:
    return
  inside = ''.join(out[start:stop])
  out[start:] = [rf'\binom{{{inside}}}{{\{MARKER}}}'] + [''] * (stop - start)


# --- Equality ----------------------------------------------------------------------------------------------------------------------


def _is_expression(value: Any) -> bool:
  import sympy
  return isinstance(value, sympy.Expr) and not isinstance(value, sympy.MatrixExpr)


def _same(left: Any, right: Any) -> bool:
  import math_verify
  if left == right:
    return True
  if _is_expression(left) and _is_expression(right):
    verdict = _numerically_same(left, right)
    if verdict is not None:
      return verdict
  return bool(math_verify.verify(left, right, float_rounding=15, timeout_seconds=None))


def _points(expressions: Sequence[Any], count: int) -> list[dict[Any, Any]]:
  """Values of all variables, the same for the same variables: positive, whole ones where whole numbers are meant."""
  import sympy
  symbols = sorted({s for e in expressions for s in e.free_symbols}, key=lambda s: s.name)
  names = {type(node).__name__ for e in expressions for node in sympy.preorder_traversal(e)}
  whole = bool(names & set(_WHOLE_FUNCTIONS))
  rounding = bool(names & {'floor', 'ceiling'})
  signs = 'Abs' in names
  rng = random.Random(7)
  points = []
  for index in range(count * (4 if rounding else 1)):
    point = {}
    for symbol in symbols:
      if whole and (symbol.name[0] in _COUNTING or not rounding):
        point[symbol] = sympy.Integer(rng.randint(3, 12) + (index % 5 * 17 if rounding else 0))
      else:
        value = sympy.Rational(rng.randint(10_001, 39_999), 17_383)
        if rounding and index % 4 == 3:
          value = sympy.Integer(rng.randint(1, 40))
        point[symbol] = -value if signs and rng.random() < 0.5 else value
    points.append(point)
  return points


def _numerically_same(left: Any, right: Any) -> bool | None:
  """None where too few points give numbers."""
  constant = not left.free_symbols and not right.free_symbols
  agreed = 0
  points = _points((left, right), 1 if constant else POINTS)
  for point in points:
    digits = CONSTANT_DIGITS if constant else DIGITS
    values = [_number(side, point, digits) for side in (left, right)]
    if None in values:
      continue
    if not _close(*values, digits):
      return False
    agreed += 1
  return True if agreed and agreed >= len(points) // 2 else None


def _number(expression: Any, point: dict[Any, Any], digits: int) -> Any:
  """Value at a point as a complex number, None where there is none."""
  import sympy
  try:
    value = expression.xreplace(point).doit()
    value = value.evalf(digits + 10, maxn=4 * digits + 400)
  except MemoryError:
    raise
  except Exception:  # sympy raises many kinds on what has no value.
    return None
  if not isinstance(value, sympy.Expr) or value.free_symbols or not value.is_number:
    return None
  if value.has(sympy.oo, sympy.zoo, sympy.nan, -sympy.oo):
    return None
  real, imaginary = value.as_real_imag()
  if not (real.is_Float or real.is_Rational) or not (imaginary.is_Float or imaginary.is_Rational):
    return None
  return real, imaginary


def _close(left: Any, right: Any, digits: int) -> bool:
  import sympy
  size = max(*(abs(x) for x in (*left, *right)), sympy.Rational(1, 10**(4 * digits)))
  return all(abs(a - b) <= size * sympy.Rational(1, 10**(digits - 2)) for a, b in zip(left, right))


def _proportional(left: Any, right: Any, positive: bool) -> bool:
  """Whether left = c * right with a constant c other than 0, a positive one if `positive`."""
  import sympy
  if left.free_symbols != right.free_symbols:
    return False
  ratios = []
  for point in _points((left, right), POINTS):
    values = [_number(side, point, DIGITS) for side in (left, right)]
    if None in values or any(abs(x) < sympy.Rational(1, 10**20) for value in values for x in value[:1]):
      continue
    if any(abs(value[1]) > sympy.Rational(1, 10**20) for value in values):
      continue
    ratios.append((values[0][0] / values[1][0], sympy.Integer(0)))
  if len(ratios) < POINTS // 2:
    return False
  return all(_close(ratios[0], ratio, DIGITS) for ratio in ratios) and (not positive or ratios[0][0] > 0)


def decide(gold: str, response: str) -> bool:
  """Whether the answers are the same, as `compare.Comparer` with algebra says; tries the other reading of '1,234' too."""
  from sao_jax.graders import compare
  comparer = compare.Comparer(Symbolic())
  return compare_texts(comparer, gold, response)


def compare_texts(comparer: Any, gold: str, response: str) -> bool:
  """Compares two answers in every reading that they may have."""
  known, found = forms.parse(gold), forms.parse(response)
  if comparer.same(known, found):
    return True
  turned = [forms.parse_in_radians(text) for text in (gold, response)]
  if any(turned) and comparer.same(turned[0] or known, turned[1] or found):
    return True
  other = forms.parse_as_list(response) if isinstance(known, forms.Many) else None
  return other is not None and comparer.same(known, other)
