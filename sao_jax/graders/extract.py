r"""Where the answer stands in a response.

Forms:
  'boxed'        the last \boxed{...} (also \fbox, \framebox), see `boxed`
  'tag'          between the last '<answer>' and '</answer>'
  'hash'         after the last '####', to the end of its line (the form of GSM8K)
  'phrase'       after the last 'answer is' or 'answer:', to the end of its sentence or line
  'last_number'  the last decimal number, thousands separators allowed
  'last_line'    the last line that is not blank
  'whole'        the whole response
  'auto'         boxed where there is a box; else tag, hash, phrase, whichever comes first in this order; else the whole response, if it is
                 short and no prose
All take time linear in the length of what they look at: the last `WINDOW` characters of a response, where its answer stands.
"""

from __future__ import annotations

import re

FORMS = ('auto', 'boxed', 'tag', 'hash', 'phrase', 'last_number', 'last_line', 'whole')
WINDOW = 100_000  # Characters at the end of a response.
MAX_WHOLE = 500  # Characters of a response that 'auto' takes for an answer as a whole.
MAX_BETWEEN = 60  # Characters between two boxes of one list.
MAX_PROSE = 8  # Words from which a response without a marked answer is prose.

_BOX = r'\\(?:boxed|fbox|framebox)(?![A-Za-z])'
_BRACES = re.compile(rf'(?P<box>{_BOX})\s*(?P<open>\{{)?|\\[{{}}]|\\\\(?!boxed|fbox|framebox)|(?P<brace>[{{}}])')
_BARE = re.compile(r'[^\s$]*')
_BETWEEN = re.compile(r'[\s$.]*(?:(?:,|;|\band\b|\bor\b|\\text\{\s*(?:and|or)\s*\})(?:\s|\$|\\quad|\\ )*)+')
_PHRASE = re.compile(r'\banswers?(?:\s+is\b|\s*:)[\s:*]*', re.IGNORECASE)
_SENTENCE_END = re.compile(r'\.(?:\s|$)')
_NUMBER = re.compile(r'(?:(?<![0-9)])-)?[0-9][0-9,]*(?:\.[0-9]+)?')  # In '12-7' and '(3)-4' the minus is no sign.
_COMMAND = re.compile(r'\\[A-Za-z]+')
_WORD = re.compile(r'[A-Za-z]{2,}')


def extract(response: str, form: str) -> str | None:
  """The answer in `response`, None where there is none; never blank. `form` is one of `FORMS`."""
  text = response[-WINDOW:]
  found = _READERS[form](text)
  return found.strip() or None if found is not None else None


def boxed(text: str) -> str | None:
  r"""Content of the last box.

  The last one counts. One that is not closed is no answer, also where an earlier one is: the policy was about to give another answer. Of
  boxes inside boxes the outermost counts. Boxes with nothing but commas, semicolons, 'and' or 'or' between them are one list: \boxed{1} or
  \boxed{2} is '1, 2'. A box without braces, \boxed 72, ends at the next blank or '$'.
  """
  closed, opened = _boxes(text)
  if not closed or any(start > closed[-1][0] for start in opened):
    return None
  outer = []  # Boxes that lie in no other one, in order.
  for start, content, stop in closed:
    if not outer or start > outer[-1][2]:
      outer.append((start, content, stop))
  group = [outer[-1]]
  for box in reversed(outer[:-1]):
    between = text[box[2]:group[0][0]].removeprefix('}')
    if len(between) > MAX_BETWEEN or not _BETWEEN.fullmatch(between):
      break
    group.insert(0, box)
  contents = [re.sub(_BOX, '', text[content:stop]).strip() for _, content, stop in group]
  return ', '.join(dict.fromkeys(contents))


def _boxes(text: str) -> tuple[list[tuple[int, int, int]], list[int]]:
  """((start of the box, start and end of its content) of every closed box, by start; starts of those that are never closed)."""
  first = re.search(_BOX, text)
  if first is None:
    return [], []
  closed, stack = [], []  # Of open braces: (start of its box or -1, start of its content).
  for match in _BRACES.finditer(text, first.start()):
    if match['box'] and match['open']:
      stack.append((match.start(), match.end()))
    elif match['box']:
      content = match.end()
      stop = _BARE.match(text, content).end()
      if stop > content:
        closed.append((match.start(), content, stop))
    elif match['brace'] == '{':
      stack.append((-1, 0))
    elif match['brace'] and stack:
      start, content = stack.pop()
      if start >= 0:
        closed.append((start, content, match.start()))
  return sorted(closed), [start for start, _ in stack if start >= 0]


def _tag(text: str) -> str | None:
  stop = text.rfind('</answer>')
  start = text.rfind('<answer>', 0, max(stop, 0))
  return text[start + len('<answer>'):stop] if start >= 0 else None


def _hash(text: str) -> str | None:
  start = text.rfind('####')
  return text[start + 4:].lstrip(' #').split('\n', 1)[0] if start >= 0 else None


def _phrase(text: str) -> str | None:
  last = None
  for last in _PHRASE.finditer(text):
    pass
  return _SENTENCE_END.split(text[last.end():].split('\n', 1)[0], maxsplit=1)[0].strip().strip('*') if last else None


def _last_number(text: str) -> str | None:
  last = None
  for last in _NUMBER.finditer(text):
    pass
  return last[0].replace(',', '') if last else None


def _last_line(text: str) -> str | None:
  text = text.strip()
  return text.splitlines()[-1] if text else None


def _auto(text: str) -> str | None:
  if re.search(_BOX, text):
    return boxed(text)
  for read in (_tag, _hash, _phrase):
    found = read(text)
    if found is not None:
      return found
  if len(text) > MAX_WHOLE or len(_WORD.findall(_COMMAND.sub(' ', text))) >= MAX_PROSE:
    return None
  return text


_READERS = {
    'auto': _auto, 'boxed': boxed, 'tag': _tag, 'hash': _hash, 'phrase': _phrase, 'last_number': _last_number, 'last_line': _last_line,
    'whole': lambda text: text,
}


def check_form(form: str) -> None:
  if form not in FORMS:
    raise ValueError(f'extraction must be one of {", ".join(FORMS)}, got {form!r}.')
