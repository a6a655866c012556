r"""What an answer says: a number, a list, an interval, an equation, words. Made from tokens, by rules that `docs/graders.md` states.

    1, -2                  Many('list', ...)        x = 5              Named('x', ...)
    \{1, 2\}               Many('set', ...)         2x + y = 3         Relation('=', ...)
    (1, 2)                 Many('tuple', ...)       x \leq 3           Named('x', Interval)
    (3, 4]                 Interval                 x < 2 or x > 3     Named('x', Many('union', ...))
    1 \pm \sqrt{2}         Many('list', ...)        864 \text{ cm}^2   Single with a unit
    52_8                   Single with a base       \text{east}        Words
"""

from __future__ import annotations

import dataclasses
from typing import Callable, Sequence

from sao_jax.graders import latex

Tokens = tuple[str, ...]
OPPOSITE = {'<': '>', '>': '<', '\\leq': '\\geq', '\\geq': '\\leq', '=': '=', '\\neq': '\\neq'}
INFINITY: Tokens = ('\\infty',)
MINUS_INFINITY: Tokens = ('-', '\\infty')

_OF_ANGLES = {'\\sin', '\\cos', '\\tan', '\\cot', '\\sec', '\\csc'}
_HALF_TURN = ('\\frac', '{', '\\pi', '}', '{', '180', '}')  # Over 180.
_OPENING = {'(', '[', '{', '\\{', '\\lfloor', '\\lceil', '\\langle', '\\begin'}
_CLOSING = {')', ']', '}', '\\}', '\\rfloor', '\\rceil', '\\rangle', '\\end'}
_RELATIONS = {'=', '<', '>', '\\leq', '\\geq', '\\neq', '\\in', '\\approx', '\\equiv'}
_OR = {'\\text{or}', 'or'}
_AND = {'\\text{and}', 'and'}
_MATRICES = {'matrix', 'pmatrix', 'bmatrix', 'vmatrix', 'Bmatrix', 'smallmatrix', 'array'}
_UNITS = {
    'cm': 'cm', 'centimeter': 'cm', 'centimetre': 'cm', 'mm': 'mm', 'millimeter': 'mm', 'm': 'm', 'meter': 'm', 'metre': 'm', 'km': 'km',
    'kilometer': 'km', 'kilometre': 'km', 'inch': 'inch', 'inche': 'inch', 'in': 'inch', 'ft': 'foot', 'foot': 'foot', 'feet': 'foot',
    'yard': 'yard', 'yd': 'yard', 'mile': 'mile', 'mi': 'mile', 'g': 'gram', 'gram': 'gram', 'kg': 'kg', 'kilogram': 'kg', 'lb': 'pound',
    'pound': 'pound', 'ounce': 'ounce', 'oz': 'ounce', 'l': 'liter', 'liter': 'liter', 'litre': 'liter', 'ml': 'ml', 'second': 'second',
    'sec': 'second', 'minute': 'minute', 'min': 'minute', 'hour': 'hour', 'hr': 'hour', 'day': 'day', 'week': 'week', 'month': 'month',
    'year': 'year', 'degree': 'degree', 'deg': 'degree', 'radian': 'radian', 'rad': 'radian', 'dollar': 'dollar', 'usd': 'dollar',
    'cent': 'cent', 'euro': 'euro', 'mph': 'mph', 'unit': '', 'percent': '%', 'percentage': '%',
}
_LABELS = {'\\angle', '\\triangle', '\\cap', '\\cup', '\\overline', '\\mathbb', '\\max', '\\min', '\\gcd', '\\measuredangle', '\\Delta',
           '\\vec'}
_NO_UNIT = frozenset((
    'if', 'is', 'are', 'not', 'for', 'when', 'where', 'otherwise', 'else', 'or', 'and', 'all', 'no', 'any', 'with', 'only', 'then',
    'but', 'mod', 'modulo', 'to', 'except', 'unless', 'than', 'plus', 'minus', 'times', 'over', 'base', 'from', 'we', 'it', 'as', 'so',
    'at', 'by', 'be', 'some', 'integer', 'integers', 'positive', 'negative', 'even', 'odd', 'prime', 'real', 'dozen', 'hundred',
    'thousand', 'million', 'billion', 'trillion', 'half', 'maybe', 'perhaps', 'wrong', 'right', 'factorial', 'squared', 'cubed', 'pi',
    'nor', 'never', 'less', 'more'))
_SHORT_UNITS = {'cm', 'mm', 'km', 'kg', 'ft', 'mi', 'lb', 'oz', 'ml', 'mph', 'sec', 'min', 'deg', 'inch', 'feet', 'foot'}


@dataclasses.dataclass(frozen=True)
class Single:
  """One expression. `unit` is '' where none is written, '%' for percent; `base` is the number system, 0 where none is written."""

  parts: Tokens
  unit: str = ''
  base: int = 0


@dataclasses.dataclass(frozen=True)
class Words:
  text: str


@dataclasses.dataclass(frozen=True)
class Many:
  """`kind`: 'list' (1, 2 without braces; order does not count), 'set', 'tuple' (order counts), 'union' (of intervals and sets)."""

  kind: str
  items: tuple['Form', ...]


@dataclasses.dataclass(frozen=True)
class Interval:
  low: Tokens
  high: Tokens
  low_closed: bool
  high_closed: bool


@dataclasses.dataclass(frozen=True)
class Matrix:
  rows: tuple[tuple['Form', ...], ...]


@dataclasses.dataclass(frozen=True)
class Named:
  """`name` = value, or `name` in value; `arguments` are the letters in f(x)."""

  name: str
  value: 'Form'
  arguments: tuple[str, ...] = ()
  equation: tuple[Tokens, Tokens] | None = None  # Both sides, where it is written as an equation.


@dataclasses.dataclass(frozen=True)
class Relation:
  """An equation or inequality that names no single variable."""

  sign: str
  left: Tokens
  right: Tokens


@dataclasses.dataclass(frozen=True)
class Other:
  """Anything else; compared as a string, or as mathematics as a whole."""

  parts: Tokens


Form = Single | Words | Many | Interval | Matrix | Named | Relation | Other


def parse(text: str) -> Form:
  """The form of an answer."""
  text = latex.canonical(text)
  return of_tokens(tuple(latex.grouped(latex.tokens(text))))


def parse_as_list(text: str) -> Form | None:
  """Another reading of '1,234': a list of 1 and 234; None where the text has no such comma."""
  text = latex.canonical(text)
  if not latex.has_thousands(text):
    return None
  return of_tokens(tuple(latex.grouped(latex.tokens(text.replace(',', ', ')))))


def parse_in_radians(text: str) -> Form | None:
  r"""Another reading of '\sin 30^\circ', in which the degrees count; None where no function of an angle stands by degrees.

  \sin 30^\circ is then \sin(30 \cdot \pi / 180).
  """
  parts = latex.grouped(latex.tokens(latex.canonical(text)))
  if '\\circ' not in parts or not _OF_ANGLES & set(parts):
    return None
  out: list[str] = []
  for part in parts:
    if part == '\\circ' and len(out) > 1 and out[-1] == '^':
      out.pop()
      start = _last_group(out)
      out[start:] = ['(', *out[start:], '\\cdot', *_HALF_TURN, ')']
    else:
      out.append(part)
  return of_tokens(tuple(out))


def _last_group(parts: Sequence[str]) -> int:
  r"""Index where the number, letter, bracket or \\frac at the end begins."""
  start, groups = len(parts), 0
  while True:
    depth, start = 0, start - 1
    while start > 0 and (depth := depth + (parts[start] in _CLOSING) - (parts[start] in _OPENING)):
      start -= 1
    groups += 1
    if start and parts[start] == '{' and latex.ARGUMENTS.get(parts[start - 1]) == groups:
      return start - 1
    if not start or parts[start] != '{' or parts[start - 1] != '}':
      return start


def of_tokens(parts: Tokens) -> Form:
  parts = _strip(parts)
  if not balanced(parts) or not parts:
    return Other(parts)
  if parts == ('\\emptyset',):
    return Many('set', ())
  words = latex.word_text(parts)
  if words is not None and not any(p in _RELATIONS for p in parts):
    return Words(words)
  pieces, joints = _split(parts, lambda p: p in (',', ';') or p in _OR or p in _AND)
  pieces_left = [piece for piece in pieces if piece]
  if len(pieces) > 1 and pieces_left:
    if '\\ldots' in parts:
      return Other(parts)
    return _listing(pieces_left, joints)
  pieces, _ = _split(parts, lambda p: p == '\\cup')
  if len(pieces) > 1 and not any(p in _RELATIONS for p in parts):
    return Many('union', tuple(of_tokens(piece) for piece in pieces))
  return _relation(parts) or _bracketed(parts) or _plus_minus(parts) or _single(parts)


def balanced(parts: Sequence[str]) -> bool:
  depth = 0
  for part in parts:
    depth += (part in _OPENING) - (part in _CLOSING)
    if depth < 0:
      return False
  return depth == 0


def depth_of(parts: Sequence[str]) -> int:
  depth = deepest = 0
  for part in parts:
    depth += (part in _OPENING) - (part in _CLOSING)
    deepest = max(deepest, depth)
  return deepest


def _strip(parts: Tokens) -> Tokens:
  """Without braces around the whole, and without a text such as 'or' left at an end."""
  while parts and parts[0] == '{' and _closes(parts, 0) == len(parts) - 1:
    parts = parts[1:-1]
  return parts


def _closes(parts: Sequence[str], start: int) -> int:
  """Index where the group that opens at `start` closes; -1 where it does not."""
  depth = 0
  for i in range(start, len(parts)):
    depth += (parts[i] in _OPENING) - (parts[i] in _CLOSING)
    if depth == 0:
      return i
  return -1


def _split(parts: Tokens, at: Callable[[str], bool]) -> tuple[list[Tokens], list[str]]:
  """Pieces between the tokens outside all brackets for which `at` holds, and those tokens."""
  pieces, joints, depth, start = [], [], 0, 0
  for i, part in enumerate(parts):
    depth += (part in _OPENING) - (part in _CLOSING)
    if depth == 0 and at(part):
      pieces.append(parts[start:i])
      joints.append(part)
      start = i + 1
  return [*pieces, parts[start:]], joints


def _listing(pieces: list[Tokens], joints: list[str]) -> Form:
  """A list; of inequalities of one variable a union, or their intersection where 'and' stands between two that bound both sides."""
  items = _share_unit([of_tokens(piece) for piece in pieces])
  flat: list[Form] = []
  for item in items:
    flat += item.items if isinstance(item, Many) and item.kind == 'list' else [item]  # 1 \pm 2, 5 is one list of three.
  named = [item for item in flat if isinstance(item, Named) and isinstance(item.value, (Interval, Many))
           and (isinstance(item.value, Interval) or item.value.kind == 'union')]
  if len(named) == len(flat) and len({item.name for item in named}) == 1:
    values = [item.value for item in named]
    both = _intersection(values) if len(values) == 2 and not any(j in _OR for j in joints) and any(j in _AND for j in joints) else None
    return Named(named[0].name, both or Many('union', tuple(values)))
  if len(flat) > 1 and isinstance(flat[0], Named) and not any(isinstance(item, Named) for item in flat[1:]) and not flat[0].arguments:
    return Named(flat[0].name, Many('list', (flat[0].value, *flat[1:])))  # x = 1, 2 and x = 1 or 2.
  same = {item.name for item in flat if isinstance(item, Named)}
  if len(flat) > 1 and all(isinstance(item, Named) and not item.arguments for item in flat) and len(same) == 1:
    return Named(flat[0].name, Many('list', tuple(item.value for item in flat)))
  return Many('list', tuple(flat))


def _share_unit(items: list[Form]) -> list[Form]:
  """3, 5 cm: the unit at the end belongs to all."""
  last = items[-1]
  if isinstance(last, Single) and last.unit and all(isinstance(item, Single) and not item.unit for item in items[:-1]):
    return [*(dataclasses.replace(item, unit=last.unit) for item in items[:-1]), last]
  return items


def _intersection(values: list[Form]) -> Interval | None:
  """Of two half-lines that face each other, else None."""
  if not all(isinstance(value, Interval) for value in values):
    return None
  lower = [v for v in values if v.high == INFINITY and v.low != MINUS_INFINITY]
  upper = [v for v in values if v.low == MINUS_INFINITY and v.high != INFINITY]
  if len(lower) != 1 or len(upper) != 1:
    return None
  return Interval(lower[0].low, upper[0].high, lower[0].low_closed, upper[0].high_closed)


def _relation(parts: Tokens) -> Form | None:
  sides, signs = _split(parts, lambda p: p in _RELATIONS)
  if not signs:
    return None
  if not all(sides):
    return Other(parts)
  if signs[0] == '\\in' and len(signs) == 1:
    name = _name(sides[0])
    return Named(name[0], of_tokens(sides[1]), name[1]) if name else Other(parts)
  if '\\approx' in signs:  # 1/3 \approx 0.33: the exact side.
    cut = signs.index('\\approx')
    keep = parts[:sum(len(side) for side in sides[:cut + 1]) + cut]
    return of_tokens(keep)
  if set(signs) == {'='}:
    return _equation(sides)
  if len(signs) == 2 and all(sign in ('<', '\\leq') for sign in signs) or len(signs) == 2 and all(sign in ('>', '\\geq') for sign in signs):
    name = _name(sides[1])
    if name:
      low, high = (0, 2) if signs[0] in ('<', '\\leq') else (2, 0)
      closed = [sign in ('\\leq', '\\geq') for sign in signs]
      low_closed, high_closed = closed if low == 0 else closed[::-1]
      return Named(name[0], Interval(sides[low], sides[high], low_closed, high_closed), name[1])
  if len(signs) == 1:
    return _inequality(signs[0], sides[0], sides[1])
  return Other(parts)


def _equation(sides: list[Tokens]) -> Form:
  """name = value; of a chain the last side counts. Without a name: an equation, or the last side where the first is a plain number."""
  name = _name(sides[0]) or _label(sides[0])
  if name:
    return Named(name[0], of_tokens(sides[-1]), name[1], (sides[0], sides[-1]))
  other = _name(sides[1]) if len(sides) == 2 else None
  if other and not other[1]:
    return Named(other[0], of_tokens(sides[0]), (), (sides[1], sides[0]))
  if len(sides) > 2 or not any(part.isalpha() or part.startswith('\\text') for part in sides[0]):
    return of_tokens(sides[-1])
  return Relation('=', sides[0], sides[1])


def _label(parts: Tokens) -> tuple[str, tuple[str, ...]] | None:
  r"""What \angle ABC, P(A \cap B) and \text{Area of } T are names of: letters and signs without numbers or operations, else None."""
  if not any(part[0] == '\\' and part not in _LABELS and not part.startswith('\\text{') for part in parts) and all(
      part.isalpha() or part[0] == '\\' or part in "()|'{}" for part in parts):
    return ''.join(parts), ()
  return None


def _inequality(sign: str, left: Tokens, right: Tokens) -> Form:
  name = _name(left)
  if name is None and _name(right):
    left, right, sign, name = right, left, OPPOSITE.get(sign, sign), _name(right)
  if name is None or sign not in OPPOSITE:
    return Relation(sign, left, right)
  closed = sign in ('\\leq', '\\geq')
  if sign == '\\neq':
    return Named(name[0], _all_but(right), name[1])
  if sign in ('<', '\\leq'):
    return Named(name[0], Interval(MINUS_INFINITY, right, False, closed), name[1])
  return Named(name[0], Interval(right, INFINITY, closed, False), name[1])


def _all_but(point: Tokens) -> Form:
  return Many('union', (Interval(MINUS_INFINITY, point, False, False), Interval(point, INFINITY, False, False)))


def _name(parts: Tokens) -> tuple[str, tuple[str, ...]] | None:
  """(name, arguments) of a variable or of a function of letters: x, x_1, \\theta, f(x), a_{ij}; None for anything else."""
  parts = _strip(parts)
  if len(parts) == 1 and (parts[0].isalpha() and parts[0] not in ('e', 'i') or parts[0].startswith('\\text{')):
    return parts[0], ()
  if len(parts) == 1 and parts[0].startswith('\\') and parts[0][1:].isalpha() and parts[0] not in ('\\pi', '\\infty', '\\emptyset'):
    return parts[0], ()
  if len(parts) >= 3 and parts[0].isalpha() and parts[1] == '_':
    return ''.join(parts), ()
  if len(parts) >= 4 and (parts[0].isalpha() or parts[0][0] == '\\') and parts[1] == '(' and _closes(parts, 1) == len(parts) - 1:
    arguments = parts[2:-1:2]
    if all(a.isalpha() and len(a) == 1 for a in arguments) and all(c == ',' for c in parts[3:-1:2]):
      return parts[0], tuple(arguments)
  if len(parts) >= 5 and parts[0] == '(' and _closes(parts, 0) == len(parts) - 1 and all(
      p.isalpha() or p == ',' for p in parts[1:-1]):
    return ''.join(parts), ()
  return None


def _bracketed(parts: Tokens) -> Form | None:
  """Tuples, intervals, sets, matrices, and a value in needless parentheses."""
  if _closes(parts, 0) != len(parts) - 1:
    return _set_difference(parts)
  opening, closing, inside = parts[0], parts[-1], parts[1:-1]
  if opening == '\\begin':
    return None
  pieces, _ = _split(inside, lambda p: p in (',', ';'))
  if opening == '\\{' and closing == '\\}':
    if not inside:
      return Many('set', ())
    if any(p in ('|', ':') or p in _RELATIONS for p in inside) or '\\ldots' in inside:
      return _set_builder(inside) or Other(parts)
    items = of_tokens(inside)
    return Many('set', items.items if isinstance(items, Many) and items.kind == 'list' else (items,))
  if opening in '([' and closing in ')]' and len(pieces) == 2 and (opening + closing) != '()':
    return Interval(_strip(pieces[0]), _strip(pieces[1]), opening == '[', closing == ']')
  if opening in ('(', '\\langle', '[') and closing in (')', '\\rangle', ']'):
    if len(pieces) > 1 and all(pieces):
      return Many('tuple', tuple(of_tokens(piece) for piece in pieces))
    if len(pieces) == 1 and opening == '(' and inside:
      return of_tokens(inside)
  return None


def _set_builder(inside: Tokens) -> Form | None:
  r"""x > 2 of \{x : x > 2\} and of \{x \in \mathbb{R} \mid x > 2\}, where it says something of x alone; else None."""
  pieces, _ = _split(inside, lambda p: p in ('|', ':'))
  if len(pieces) != 2 or not all(pieces):
    return None
  name = _name(pieces[0][:-5] if pieces[0][-5:] == ('\\in', '\\mathbb', '{', 'R', '}') else pieces[0])
  said = of_tokens(pieces[1]) if name and not name[1] else None
  return said if isinstance(said, Named) and said.name == name[0] else None


def _set_difference(parts: Tokens) -> Form | None:
  r"""\begin{pmatrix} ... \end{pmatrix}; \mathbb{R} \setminus \{a\}."""
  if parts[0] == '\\begin' and len(parts) > 8:
    name = parts[2]
    if name in _MATRICES and parts[-4:] == ('\\end', '{', name, '}'):
      return _matrix(parts[4:-4], name)
  pieces, joints = _split(parts, lambda p: p in ('\\setminus', '-'))
  if len(pieces) == 2 and pieces[0] == ('\\mathbb', '{', 'R', '}') and pieces[1][:1] == ('\\{',) and pieces[1][-1:] == ('\\}',):
    inside = pieces[1][1:-1]
    if inside and ',' not in inside:
      return _all_but(inside)
  return None


def _matrix(inside: Tokens, name: str) -> Form:
  if name == 'vmatrix':
    return Other(('\\begin', '{', name, '}', *inside, '\\end', '{', name, '}'))
  if name == 'array' and inside[:1] == ('{',):
    inside = inside[_closes(inside, 0) + 1:]
  rows, _ = _split(inside, lambda p: p == '\\\\')
  rows = [row for row in rows if row]
  return Matrix(tuple(tuple(of_tokens(cell) for cell in _split(row, lambda p: p == '&')[0]) for row in rows))


def _plus_minus(parts: Tokens) -> Form | None:
  r"""a \pm b as the list of both; all signs of one expression change together."""
  if '\\pm' not in parts and '\\mp' not in parts:
    return None
  plus = tuple({'\\pm': '+', '\\mp': '-'}.get(p, p) for p in parts)
  minus = tuple({'\\pm': '-', '\\mp': '+'}.get(p, p) for p in parts)
  return Many('list', tuple(of_tokens(p[1:] if p[0] == '+' else p) for p in (plus, minus)))


def _single(parts: Tokens) -> Form:
  """One expression, without its unit, percent sign and base."""
  unit, base = '', 0
  if parts[0] == '\\$' or parts[:2] == ('-', '\\$'):
    parts, unit = tuple(p for p in parts if p != '\\$'), 'dollar'
    if not parts:
      return Other(parts)
  for _ in range(3):
    stripped, found = _strip_unit(parts)
    if stripped == parts or not stripped:
      break
    parts, unit = stripped, found if unit in ('', 'dollar') and found else unit
  if len(parts) == 3 and parts[1].lower() in ('\\text{base}', 'base') and parts[0].isdigit() and parts[2].isdigit():
    return Single(parts[:1], unit, int(parts[2]))
  if len(parts) >= 3 and '_' in parts[1:]:
    at = parts.index('_', 1)
    number, below = ''.join(parts[:at]), ''.join(p for p in parts[at + 1:] if p not in '{}')
    if below.isdigit() and len(below) < 3 and _is_numeral(number, int(below)):
      return Single((number.upper(),), unit, int(below))
  return Single(parts, unit, base) if parts else Other(parts)


def _is_numeral(text: str, base: int) -> bool:
  """Digits, and above base 10 letters too, with a digit among them."""
  return text.isdigit() or base > 10 and text.isalnum() and any(c.isdigit() for c in text) and all(
      c.isdigit() or 'A' <= c <= chr(ord('A') + base - 11) for c in text.upper())


def _strip_unit(parts: Tokens) -> tuple[Tokens, str]:
  """(without a unit at the end, the unit)."""
  if parts[-1] == '%':
    return parts[:-1], '%'
  if parts[-2:] == ('^', '\\circ'):
    return parts[:-2], 'degree'
  power = ''
  rest = parts
  if len(parts) > 3 and parts[-2] == '^' and parts[-1] in ('2', '3') and parts[-3].startswith('\\text{'):
    rest, power = parts[:-2], parts[-1]
  if rest[-1].startswith('\\text{') and len(rest) > 1:
    return (rest[:-1], unit_of(rest[-1][6:-1], power)) if _may_be_unit(rest[-1][6:-1]) else (parts, '')
  word = rest[-1]
  if not power and len(parts) > 3 and parts[-2] == '^' and parts[-1] in ('2', '3') and (
      parts[-3] in _SHORT_UNITS or parts[-3].isalpha() and len(parts[-3]) > 3):
    return parts[:-3], unit_of(parts[-3], parts[-1])
  if word.isalpha() and word.isascii() and len(rest) > 1 and (word.lower() in _SHORT_UNITS or len(word) > 3):
    words = [word]
    rest = rest[:-1]
    while len(rest) > 1 and rest[-1].isalpha() and rest[-1].isascii() and len(rest[-1]) > 1:
      words.insert(0, rest[-1])
      rest = rest[:-1]
    return (rest, unit_of(' '.join(words))) if _may_be_unit(' '.join(words)) else (parts, '')
  return parts, ''


def _may_be_unit(text: str) -> bool:
  words = text.lower().split()
  return len(words) <= 4 and not _NO_UNIT & (set(words) - {'square', 'squared', 'cubed'} if len(words) > 1 else set(words))


def unit_of(text: str, power: str = '') -> str:
  """One spelling of a unit: 'square inches', 'in^2', 'inches' with the power 2 are 'inch^2'; '' for what is no unit at all."""
  words = [w for w in text.lower().replace('.', ' ').replace('^2', ' 2').replace('^3', ' 3').split() if w not in ('of', 'the')]
  power = {'square': '2', 'sq': '2', 'cubic': '3', 'cu': '3'}.get(words[0], power) if words else power
  words = [w for w in words if w not in ('square', 'sq', 'cubic', 'cu')]
  if words and words[-1] in ('2', '3', 'squared', 'cubed'):
    power = {'2': '2', 'squared': '2'}.get(words.pop(), '3')
  names = [_UNITS.get(w.removesuffix('s') if len(w) > 3 else w, w.removesuffix('s') if len(w) > 3 else w) for w in words]
  name = ' '.join(n for n in names if n)
  return f'{name}^{power}' if name and power else name
