r"""Exact values of numbers as written, and a fence against numbers too large to write out. No sympy: rational arithmetic on tokens.

`evaluate` gives the value of an answer that is a rational number however it is written (1,234, 0.15, \frac{3}{4}, 2\frac{1}{2},
3\cdot 2^{10}, \binom{6}{2}, 5!), None for anything else, and raises `TooLarge` where working the answer out would take for ever: towers of
powers, factorials of factorials. What has a value is compared exactly: 0.1000001 is not 0.1.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from fractions import Fraction
from typing import Sequence

from sao_jax.graders import latex

MAX_BITS = 100_000  # Of a number's numerator or denominator.
MAX_FACTORIAL = 5_000
MAX_DEGREE = 100_000  # Exponent of a variable.


class TooLarge(Exception):
  """Working the expression out would take more than the limits allow."""


class _NotKnown(Exception):
  """Not of the grammar below."""


@dataclasses.dataclass(frozen=True)
class _Value:
  """`exact` for rational numbers; else `bits`, a bound of log2 of the size of a number; neither for what holds variables."""

  exact: Fraction | None = None
  bits: float | None = None

  @property
  def size(self) -> float | None:
    if self.exact is None:
      return self.bits
    return float(max(self.exact.numerator.bit_length() - self.exact.denominator.bit_length() + 1, 0))


_VARIABLE = _Value()
_CONSTANTS = {'\\pi': 2.0, '\\infty': None, 'e': 2.0}
_CLOSING = {'(': ')', '{': '}', '[': ']', '\\{': '\\}', '\\lfloor': '\\rfloor', '\\lceil': '\\rceil', '\\langle': '\\rangle'}
_ENDS = {')', '}', ']', '\\}', '\\rfloor', '\\rceil', '\\rangle', '+', '-', '\\pm', '\\mp', ',', ';', '=', '<', '>', '/', '\\cdot', '&',
         '\\\\', '%', ':', '\\leq', '\\geq', '\\neq', '\\in', '\\cup', '\\cap', '\\approx', '!', '!!', '^', '_', '|'}


@functools.lru_cache(maxsize=4096)
def evaluate(parts: tuple[str, ...]) -> Fraction | None:
  """Value of grouped tokens that are one rational number, None for anything else. Raises TooLarge."""
  try:
    reader = _Reader(parts)
    value = reader.sum()
    return value.exact if reader.done else None
  except (_NotKnown, RecursionError):
    return None


def check_size(parts: Sequence[str]) -> None:
  """Raises TooLarge if some part of the tokens, between relations, commas and the like, is too large to work out."""
  reader = _Reader(tuple(parts))
  while not reader.done:
    try:
      reader.sum()
    except (_NotKnown, RecursionError):
      pass
    reader.skip()


class _Reader:
  """Recursive descent over tokens."""

  def __init__(self, parts: Sequence[str]):
    self._parts, self._at = parts, 0

  @property
  def done(self) -> bool:
    return self._at >= len(self._parts)

  @property
  def _next(self) -> str:
    return self._parts[self._at] if self._at < len(self._parts) else ''

  def skip(self) -> str:
    self._at += 1
    return self._parts[self._at - 1] if self._at <= len(self._parts) else ''

  def sum(self) -> _Value:
    value = self._product()
    while self._next in ('+', '-', '\\pm', '\\mp'):
      sign = self.skip()
      value = _add(value, self._product(), -1 if sign == '-' else 1, known=sign in '+-')
    return value

  def _product(self) -> _Value:
    if self._next in ('+', '-', '\\pm', '\\mp'):
      sign = self.skip()
      value = self._product()
      if sign in '+-' and value.exact is not None:
        return _Value(-value.exact) if sign == '-' else value
      return _Value(None, value.size)
    start = self._at
    value = self._power()
    while not self.done:
      if self._next in ('\\cdot', '/', ':'):
        value = _divide(value, self._signed()) if self.skip() != '\\cdot' else _multiply(value, self._signed())
      elif self._next in _ENDS:
        break
      else:
        mixed = self._mixed(value, start)
        value = mixed or _multiply(value, self._power())
    return value

  def _signed(self) -> _Value:
    if self._next == '-':
      self.skip()
      return _multiply(_Value(Fraction(-1)), self._power())
    return self._power()

  def _mixed(self, value: _Value, start: int) -> _Value | None:
    r"""2\frac{1}{2} and 2 1/2 right after their whole number: a sum, where the fraction is a proper one of digits; else None."""
    if self._at != start + 1 or not self._parts[start].isdigit():
      return None
    if self._next == '\\frac':
      inside = self._parts[self._at:self._at + 7]
      if len(inside) == 7 and inside[2].isdigit() and inside[5].isdigit() and inside[3] == '}':
        top, bottom, used = int(inside[2]), int(inside[5]), 7
      else:
        return None
    elif self._next.isdigit() and self._parts[self._at + 1:self._at + 2] == ('/',):
      below = self._parts[self._at + 2:self._at + 3]
      if not below or not below[0].isdigit():
        raise _NotKnown
      top, bottom, used = int(self._next), int(below[0]), 3
    else:
      if self._next[:1].isdigit():
        raise _NotKnown  # '12 34' is no product.
      return None
    if not 0 < top < bottom or self._parts[self._at + used:self._at + used + 1] == ('^',):
      return None
    self._at += used
    return _Value(value.exact + Fraction(top, bottom))

  def _power(self) -> _Value:
    value = self._atom()
    while self._next in ('^', '!', '!!', '_'):
      sign = self.skip()
      if sign == '^':
        value = _raise(value, self._exponent())
      elif sign == '_':
        self._exponent()
        value = _VARIABLE
      else:
        value = _factorial(value, 2 if sign == '!!' else 1)
    return value

  def _exponent(self) -> _Value:
    if self._next == '-':
      self.skip()
      return _multiply(_Value(Fraction(-1)), self._exponent())
    value = self._atom()
    return _raise(value, self._exponent()) if self._next == '^' and self.skip() else value  # a^b^c, as programmers write it.

  def _atom(self) -> _Value:
    part = self.skip()
    if not part or part in _ENDS and part != '|':
      raise _NotKnown
    if part[0].isdigit() or part[0] == '.' and len(part) > 1:
      if len(part) > 4000:
        raise TooLarge('a number of more than 4,000 digits')
      return _Value(Fraction(part))
    if part in latex.ARGUMENTS:
      return self._command(part)
    if part in _CLOSING:
      value = self.sum()
      if self.skip() != _CLOSING[part]:
        raise _NotKnown
      return value if part in '({[' else _Value(None, value.size)
    if part in _CONSTANTS:
      return _Value(None, _CONSTANTS[part])
    if part == '|':
      raise _NotKnown
    return _VARIABLE

  def _command(self, part: str) -> _Value:
    root = None
    if part == '\\sqrt' and self._next == '[':
      root = self._atom()
    arguments = [self._atom() for _ in range(latex.ARGUMENTS[part])]
    if part == '\\frac':
      return _divide(*arguments)
    if part == '\\binom':
      return _binomial(*arguments)
    return _root(arguments[0], root)


def _bounded(value: Fraction) -> _Value:
  if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
    raise TooLarge(f'a number of more than {MAX_BITS:,} bits')
  return _Value(value)


def _size(*values: _Value) -> float | None:
  sizes = [value.size for value in values]
  return None if None in sizes else sum(sizes) + 1.0


def _add(left: _Value, right: _Value, sign: int, known: bool) -> _Value:
  if known and left.exact is not None and right.exact is not None:
    return _bounded(left.exact + sign * right.exact)
  return _Value(None, _size(left, right))


def _multiply(left: _Value, right: _Value) -> _Value:
  if left.exact is not None and right.exact is not None:
    return _bounded(left.exact * right.exact)
  return _Value(None, _size(left, right))


def _divide(left: _Value, right: _Value) -> _Value:
  if left.exact is not None and right.exact is not None:
    if right.exact == 0:
      raise _NotKnown
    return _bounded(left.exact / right.exact)
  return _Value(None, _size(left, right))


def _raise(base: _Value, exponent: _Value) -> _Value:
  """base^exponent, or a bound of its size. Raises TooLarge beyond `MAX_BITS`, or beyond `MAX_DEGREE` where the base holds variables."""
  if base.exact in (0, 1, -1) and exponent.exact is None:
    return _Value(None, 0.0)
  if exponent.exact is None:
    if exponent.bits is not None and exponent.bits > math.log2(MAX_BITS):
      raise TooLarge('a tower of powers')
    return _Value(None, None if exponent.bits is None or base.size is None else base.size * 2.0**exponent.bits)
  power, constant = exponent.exact, base.exact
  if base.size is None:
    if abs(power) > MAX_DEGREE:
      raise TooLarge(f'a power above {MAX_DEGREE:,} of a variable')
    return _VARIABLE
  if constant is not None and power.denominator == 1:
    if constant in (0, 1, -1):
      if constant == 0 and power <= 0:
        raise _NotKnown
      return _Value(constant**int(power % 2) if constant == -1 else constant)
    if abs(power) * max(constant.numerator.bit_length(), constant.denominator.bit_length()) > MAX_BITS + 64:
      raise TooLarge('a tower of powers' if abs(power) > 10**7 else f'a power of more than {MAX_BITS:,} bits')
    return _bounded(constant**int(power))
  if abs(power) * (Fraction(base.size) + 1) > MAX_BITS:
    raise TooLarge('a tower of powers')
  return _Value(None, float(abs(power)) * (base.size + 1))


def _factorial(value: _Value, step: int) -> _Value:
  number = value.exact
  if number is None:
    if value.bits is not None and value.bits > math.log2(MAX_FACTORIAL):
      raise TooLarge('the factorial of a large number')
    return _VARIABLE if value.bits is None else _Value(None, 2.0 * 2.0**value.bits * value.bits + 1.0)
  if number.denominator != 1 or number < 0:
    raise _NotKnown
  if number > MAX_FACTORIAL:
    raise TooLarge(f'the factorial of a number above {MAX_FACTORIAL:,}')
  return _bounded(Fraction(math.prod(range(int(number), 0, -step))))


def _binomial(top: _Value, bottom: _Value) -> _Value:
  if top.exact is None or bottom.exact is None:
    sizes = [v.size for v in (top, bottom) if v.size is not None]
    if any(size > math.log2(MAX_BITS) for size in sizes):
      raise TooLarge('a binomial coefficient of large numbers')
    return _VARIABLE if top.size is None or bottom.size is None else _Value(None, 2.0**top.size)
  n, k = top.exact, bottom.exact
  if n.denominator != 1 or k.denominator != 1 or n < 0:
    raise _NotKnown
  if n > MAX_FACTORIAL * 4:
    raise TooLarge('a binomial coefficient of large numbers')
  return _Value(Fraction(math.comb(int(n), int(k)) if 0 <= k <= n else 0))


def _root(value: _Value, degree: _Value | None) -> _Value:
  """The root where it is rational, else a bound."""
  n = 2 if degree is None else degree.exact
  if value.exact is None or n is None:
    return _Value(None, value.size)
  if n == 2 and value.exact >= 0:
    top, bottom = math.isqrt(value.exact.numerator), math.isqrt(value.exact.denominator)
    if top * top == value.exact.numerator and bottom * bottom == value.exact.denominator:
      return _Value(Fraction(top, bottom))
  return _Value(None, value.size)
