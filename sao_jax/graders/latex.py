r"""Answers as written, in one spelling, cut into tokens.

`canonical` takes away what does not change the meaning of an answer: dollar signs around mathematics, spacing and sizing commands, bold
and roman type, other spellings of one symbol (\dfrac, \le, ≤, ×, ½). `tokens` cuts the result. `string_key` is what two answers must have
in common to be equal as strings. Everything here takes time linear in the length of the text.
"""

from __future__ import annotations

import re
from typing import Sequence

_CHARACTERS = {
    '−': '-', '–': '-', '—': '-', '‐': '-', '‑': '-', '⁻': '^-', '×': r'\cdot ', '·': r'\cdot ', '⋅': r'\cdot ', '∗': r'\cdot ', '÷': '/',
    '∕': '/', '⁄': '/', '√': r'\sqrt ', 'π': r'\pi ', 'θ': r'\theta ', 'α': r'\alpha ', 'β': r'\beta ', 'λ': r'\lambda ', 'ρ': r'\rho ',
    '°': r'^{\circ}', '∞': r'\infty ', '≤': r'\leq ', '≥': r'\geq ', '≠': r'\neq ', '≈': r'\approx ', '∪': r'\cup ', '∩': r'\cap ',
    '∈': r'\in ', '±': r'\pm ', '∓': r'\mp ', '∅': r'\emptyset ', '⌊': r'\lfloor ', '⌋': r'\rfloor ', '⌈': r'\lceil ', '⌉': r'\rceil ',
    'ℝ': r'\mathbb{R}', 'ℤ': r'\mathbb{Z}', 'ℕ': r'\mathbb{N}', 'ℚ': r'\mathbb{Q}', '’': "'", '′': "'", '（': '(', '）': ')', '，': ',',
    '。': '.', '：': ':', '；': ';', '＝': '=', '％': '%', '＄': r'\$', '€': r'\text{ euros}', '£': r'\text{ pounds sterling}', '\u00a0': ' ',
    '\u200b': '', '\u200c': '', '\u200d': '', '\ufeff': '', '\u2060': '', '\u2009': ' ', '\u202f': ' ', '…': r'\ldots ', '⟨': r'\langle ',
    '⟩': r'\rangle ', '∖': r'\setminus ', '¼': r'\frac{1}{4}', '½': r'\frac{1}{2}', '¾': r'\frac{3}{4}', '⅓': r'\frac{1}{3}',
    '⅔': r'\frac{2}{3}', '⅕': r'\frac{1}{5}', '⅛': r'\frac{1}{8}',
    **{chr(0xff10 + i): str(i) for i in range(10)}, **{chr(0x2080 + i): f'_{i}' for i in range(10)},
}
_SUPERSCRIPTS = {'⁰': '0', '¹': '1', '²': '2', '³': '3', '⁴': '4', '⁵': '5', '⁶': '6', '⁷': '7', '⁸': '8', '⁹': '9'}
_TABLE = str.maketrans(_CHARACTERS)

_DROPPED = {  # Size, space and style: no meaning.
    'left', 'right', 'bigl', 'bigr', 'Bigl', 'Bigr', 'biggl', 'biggr', 'Biggl', 'Biggr', 'big',
    'Big', 'bigg', 'Bigg', 'middle', 'displaystyle', 'textstyle', 'scriptstyle', 'limits', 'nolimits', 'hfill', 'rm', 'bf', 'it',
    'mathstrut', 'ensuremath', 'boldsymbol', 'mathbf', 'bm', 'mathit', 'mathsf', 'phantom', 'mathord', 'mathrel', 'mathbin', 'strut',
}
_SPACES = {'quad', 'qquad', 'thinspace', 'enspace', 'medspace', 'thickspace', 'space', 'negthinspace'}
_SAME = {
    'dfrac': 'frac', 'tfrac': 'frac', 'cfrac': 'frac', 'dbinom': 'binom', 'tbinom': 'binom', 'le': 'leq', 'ge': 'geq', 'ne': 'neq',
    'leqslant': 'leq', 'geqslant': 'geq', 'times': 'cdot', 'ast': 'cdot', 'infin': 'infty', 'varnothing': 'emptyset', 'dots': 'ldots',
    'cdots': 'ldots', 'mbox': 'text', 'textrm': 'text', 'textbf': 'text', 'textit': 'text', 'textnormal': 'text', 'textsf': 'text',
    'texttt': 'text', 'hbox': 'text', 'mathrm': 'text', 'mathtt': 'text', 'backslash': 'setminus', 'smallsetminus': 'setminus', 'iff':
    'Leftrightarrow', 'lvert': 'vert', 'rvert': 'vert', 'epsilon': 'varepsilon', 'phi': 'varphi',
}
_CHARACTER_OF = {'lt': '<', 'gt': '>', 'lbrack': '[', 'rbrack': ']', 'lparen': '(', 'rparen': ')', 'vert': '|', 'mid': '|', 'colon': ':',
                 'lbrace': r'\{', 'rbrace': r'\}', 'degree': r'^{\circ}', 'div': '/', 'lor': r'\text{ or }', 'land': r'\text{ and }',
                 'vee': r'\text{ or }', 'wedge': r'\text{ and }', 'percent': '%', 'slash': '/', 'dollar': r'\$', 'textdollar': r'\$'}
_ESCAPE = re.compile(r'\\([A-Za-z]+)|\\(.)', re.DOTALL)
_DOUBLED = re.compile(r'\\\\(?=(?:frac|dfrac|tfrac|sqrt|text|pi|infty|cup|left|right|le|ge|pm|cdot|times)(?![A-Za-z]))')  # As in JSON.
_NAMED = re.compile(r'\\operatorname\s*\*?\s*\{\s*([A-Za-z]+)\s*\}')
_FUNCTIONS = {
    'sin', 'cos', 'tan', 'cot', 'sec', 'csc', 'sinh', 'cosh', 'tanh', 'arcsin', 'arccos', 'arctan', 'log', 'ln', 'exp', 'max', 'min',
    'gcd', 'lcm', 'det', 'arg', 'lim',
}
_TEXT = re.compile(r'\\text\s*\{([^{}]*)\}')
_TOKEN = re.compile(r'\\text\{[^{}]*\}|\\[A-Za-z]+|\\.|[0-9]+(?:\.[0-9]+)?|\.[0-9]+|[A-Za-z]+|!!|[^\s]')
_THOUSANDS = re.compile(r'(?<![0-9.,])([0-9]{1,3}(?:,[0-9]{3})+)(?![0-9]|,[0-9])')
_LETTER = re.compile(r'[A-Za-z]')
_LATIN = re.compile(r'[a-z]+')
_CHOICES = frozenset('ABCDEFGHIJ')
_SHORT_WORDS = frozenset(('yes', 'no', 'odd', 'all', 'one', 'two', 'six', 'ten', 'red', 'sum'))
ARGUMENTS = {'\\frac': 2, '\\binom': 2, '\\sqrt': 1}


def _replace_escape(match: re.Match) -> str:
  name, symbol = match[1], match[2]
  if name is not None:
    name = _SAME.get(name, name)
    if name in _DROPPED or name in _SPACES:
      return ' '
    return _CHARACTER_OF[name] + ' ' if name in _CHARACTER_OF else '\\' + name
  if symbol == '!':
    return '\x00'  # Negative space: also takes away the blanks after it.
  if symbol in ',;:> \n\t/':
    return ' '
  if symbol in '()[]':
    return ' '  # The signs around mathematics.
  if symbol == '%':
    return '%'
  return '\\' + symbol


def canonical(text: str) -> str:
  """`text` in one spelling, on one line, without surrounding blanks, dollar signs and the full stop at its end."""
  text = text.translate(_TABLE)
  text = re.sub(r'[⁰¹²³⁴⁵⁶⁷⁸⁹]+', lambda m: '^{' + ''.join(_SUPERSCRIPTS[c] for c in m[0]) + '}', text)
  text = text.replace('**', '^') if re.search(r'[0-9A-Za-z)]\s*\*\*\s*[-0-9A-Za-z(]', text) else text.replace('**', '')
  text = _DOUBLED.sub(r'\\', text)
  text = _ESCAPE.sub(_replace_escape, text)
  text = re.sub(r'\x00\s*', '', text)
  text = re.sub(r'(?<!\\)\$', ' ', text).replace('~', ' ').replace('`', ' ')
  text = text.replace('{,}', ',').replace(r'^\circ', r'^{\circ}').replace('*', r'\cdot ')
  text = _NAMED.sub(lambda m: ('\\' if m[1] in _FUNCTIONS else r'\text') + (m[1] + ' ' if m[1] in _FUNCTIONS else '{' + m[1] + '}'), text)
  text = _TEXT.sub(lambda m: r'\text{' + ' '.join(m[1].split()) + '}' if _LETTER.search(m[1]) else f' {m[1]} ', text)
  text = ' '.join(text.split())
  previous = None
  while text != previous:
    previous, text = text, text.strip().rstrip('.,;:').removesuffix('\\').strip()
  return text


def tokens(text: str) -> list[str]:
  r"""Tokens of a canonical text: commands, \text{...} as one, numbers without thousands separators, runs of letters, single signs."""
  text = _THOUSANDS.sub(lambda m: m[1] if _is_pair(m) else m[1].replace(',', ''), text)
  return [part for part in _TOKEN.findall(text) if part != r'\text{}']


def _is_pair(match: re.Match) -> bool:
  r"""Whether (12,102), [12,102] or \{12,102\} holds nothing else: then the comma separates two numbers."""
  text, before, after = match.string, match.start(), match.end()
  opened = text[before - 1:before] in ('(', '[') or text[before - 2:before] == '\\{'
  return opened and (text[after:after + 1] in (')', ']') or text[after:after + 2] == '\\}')


def has_thousands(text: str) -> bool:
  """Whether a comma in the canonical text was read as a thousands separator."""
  return any(not _is_pair(match) for match in _THOUSANDS.finditer(text))


def join(parts: Sequence[str]) -> str:
  """Text of tokens, with blanks where two would otherwise become one."""
  out = ''
  for part in parts:
    if out and (out[-1].isalnum() and part[0].isalnum()):
      out += ' '
    out += part
  return out


def string_key(text: str) -> str:
  r"""What two answers must share to be equal as strings: the canonical text without blanks and with one spelling of short groups.

  \frac12 is \frac{1}{2}, \sqrt2 is \sqrt{2}, x^{2} is x^2; in a text of words alone, capitals and punctuation do not count.
  """
  parts = tokens(canonical(text))
  words = word_text(parts)
  if words is not None:
    return 'text:' + words
  return '\x1f'.join(grouped(parts))


def grouped(parts: Sequence[str]) -> list[str]:
  r"""Tokens with braces written out after \frac, \binom and \sqrt and taken away around single tokens after '^' and '_'.

  \frac12 and \frac1{2} are \frac{1}{2}, \sqrt13 is \sqrt{13} (TeX reads \sqrt{1}3, but nobody means it), x^{2} is x^2. Recursion is as deep
  as the braces are.
  """
  out: list[str] = []
  todo = list(reversed(parts))
  while todo:
    out += _next_group(todo)
  return out


def _next_group(todo: list[str]) -> list[str]:
  """Takes one token, with what belongs to it, from the end of `todo`."""
  part = todo.pop()
  if part == '{':
    return ['{', *grouped(_up_to(todo, '{', '}')), '}']
  if part in ARGUMENTS:
    out = [part]
    if part == '\\sqrt' and todo and todo[-1] == '[':
      todo.pop()
      out += ['[', *grouped(_up_to(todo, '[', ']')), ']']
    for _ in range(ARGUMENTS[part]):
      out += _argument(todo, whole_number=part == '\\sqrt')
    return out
  if part in '^_' and todo and todo[-1] == '{':
    inside = _next_group(todo)
    return [part, *(inside[1:-1] if len(inside) == 3 else inside)]
  return [part]


def _argument(todo: list[str], whole_number: bool) -> list[str]:
  """The next argument of a command, in braces; of several digits or letters without braces the first one is it, or the whole number."""
  if not todo:
    return []
  if todo[-1] == '{':
    return _next_group(todo)
  if len(todo[-1]) > 1 and todo[-1].isalnum() and not (whole_number and todo[-1].isdigit()):
    first, todo[-1] = todo[-1][0], todo[-1][1:]
    return ['{', first, '}']
  return ['{', *_next_group(todo), '}']


def _up_to(todo: list[str], opening: str, closing: str) -> list[str]:
  """Takes the tokens up to the one that closes the group just opened, which it drops."""
  inside, depth = [], 1
  while todo:
    part = todo.pop()
    depth += (part == opening) - (part == closing)
    if depth == 0:
      break
    inside.append(part)
  return inside


def word_text(parts: Sequence[str]) -> str | None:
  r"""The words of an answer that has nothing else in it ('\text{(C)}', 'east', 'No solution'), in small letters; None for others.

  A single letter is a word inside \text{}, or alone in parentheses; elsewhere it is a variable.
  """
  if len(parts) == 3 and parts[0] == '(' and parts[2] == ')' and parts[1] in _CHOICES:
    return parts[1].lower()
  words, marked = [], False
  for part in parts:
    if part.startswith('\\text{'):
      words.append(part[6:-1])
      marked = True
    elif part.isalpha() and part.isascii():
      words.append(part)
      marked |= len(part) > 3 or part.lower() in _SHORT_WORDS
    elif part not in ".,;:'\"-\\ {}":
      return None
  text = ' '.join(words).lower()
  found = _LATIN.findall(text)
  return ' '.join(found) if marked and found and not any(c.isdigit() for c in text) else None
