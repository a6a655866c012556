"""Known forms of rows: from the columns of a published data set to 'question', 'answer' and whatever a grader needs.

Every parser takes a row as its file has it and gives a new one with at least

    'question'   text of the problem
    'answer'     text of the right answer; '' where code is graded by tests
    'id'         text, if the data set has one

and raises ValueError, without file and row, where the row is malformed.
"""

from __future__ import annotations

import ast
import keyword
import re
from typing import Any, Callable, Mapping

Row = dict[str, Any]
_MARKS = re.compile(r'<<[^<>]*>>')  # Calculator marks of GSM8K: '<<48/2=24>>'.
_NUMBER = re.compile(r'-?([0-9]{1,1000}|[0-9]{1,3}(,[0-9]{3}){1,300})')  # 1234 or 1,234; '1,2' is two numbers.
MAX_ID = 200  # Characters.


def text(row: Mapping[str, Any], *names: str) -> str:
  """The first of the fields `names` that the row has, as it is. Raises ValueError unless it is a text with something in it."""
  for name in names:
    if name in row:
      value = row[name]
      if not isinstance(value, str):
        raise ValueError(f'field {name!r} must be text, got {value!r:.80} ({type(value).__name__}).')
      if not value.strip():
        raise ValueError(f'field {name!r} is empty.')
      return value
  raise ValueError(f'has no field {" or ".join(map(repr, names))}; it has {", ".join(map(repr, row)) or "none"}.')


def answer_text(row: Mapping[str, Any], *names: str) -> str:
  """As `text`, for an answer: whole numbers become text, too."""
  for name in names:
    if name in row:
      value = row[name]
      if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
      if isinstance(value, float) and value.is_integer():
        return str(int(value))
      break
  return text(row, *names).strip()


def integer_text(row: Mapping[str, Any], *names: str) -> str:
  """As `answer_text`, for whole numbers only; leading zeros are dropped ('073' is 73)."""
  value = answer_text(row, *names).strip('$ ')
  if not _NUMBER.fullmatch(value):
    raise ValueError(f'the answer must be an integer, got {value!r:.80}.')
  return str(int(value.replace(',', '')))


def identity(row: Mapping[str, Any], *names: str) -> Row:
  """{'id': text} from the first of the fields that the row has; {} if it has none of them. Raises ValueError for what is no name."""
  for name in names:
    value = row.get(name)
    if value is None:
      continue
    if isinstance(value, bool) or not isinstance(value, (str, int)) or not 0 < len(str(value).strip()) <= MAX_ID:
      raise ValueError(f'field {name!r} must be a text of at most {MAX_ID} characters or an integer, got {value!r:.80}.')
    return {'id': str(value)}
  return {}


def code(name: str, source: str) -> str:
  """Python source as it is. Raises ValueError where it is none: every reply would be judged wrong."""
  try:
    ast.parse(source)
  except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
    raise ValueError(f'{name!r} is no Python code: {error}.') from error
  return source


def keep(row: Mapping[str, Any], *names: str) -> Row:
  return {name: row[name] for name in names if name in row}


def gsm8k(row: Mapping[str, Any]) -> Row:
  """GSM8K (openai/grade-school-math, MIT; Cobbe et al. 2021, arXiv:2110.14168): `question`, and `answer` with the solution and '#### 18'.

  The final number loses its thousands separators; the solution loses the calculator marks '<<16-3-4=9>>'.
  """
  question, worked = text(row, 'question'), text(row, 'answer')
  solution, mark, final = worked.rpartition('####')
  final = final.strip().removeprefix('$')
  if not mark or not re.fullmatch(_NUMBER.pattern + r'(\.[0-9]{1,1000})?', final):
    raise ValueError(f'the answer must end in "#### NUMBER", got {worked[-40:]!r}.')
  return {'question': question, 'answer': final.replace(',', ''), 'solution': _MARKS.sub('', solution).strip()}


def math(row: Mapping[str, Any]) -> Row:
  """MATH (hendrycks/math, MIT; Hendrycks et al. 2021, arXiv:2103.03874) and MATH-500 (openai/prm800k, MIT; Lightman et al. 2023,
  arXiv:2305.20050): `problem`, `solution`, and `answer`, or else the last \\boxed of the solution.
  """
  question = text(row, 'problem')
  if 'answer' in row or 'solution' not in row:
    answer = answer_text(row, 'answer', 'solution')
  else:
    answer = last_boxed(text(row, 'solution'))
    if not answer:
      raise ValueError('has no answer, and no \\boxed{...} in its solution.')
  return {
      'question': question, 'answer': answer, **identity(row, 'unique_id'), **keep(row, 'solution', 'subject', 'type', 'level')}


def beyondaime(row: Mapping[str, Any]) -> Row:
  """BeyondAIME (ByteDance-Seed, CC0-1.0): `problem`, and `answer`, an integer."""
  return {'question': text(row, 'problem', 'question'), 'answer': integer_text(row, 'answer'), **identity(row, 'id')}


def aime(row: Mapping[str, Any]) -> Row:
  """AIME form: `problem` (or `question`), and `answer`, an integer from 0 to 999 ('073' is 73)."""
  answer = integer_text(row, 'answer')
  if not 0 <= int(answer) <= 999:
    raise ValueError(f'an AIME answer is an integer from 0 to 999, got {answer:.80}.')
  return {
      'question': text(row, 'problem', 'question'), 'answer': answer, **identity(row, 'id', 'problem_idx'),
      **keep(row, 'year', 'problem_type')}


def hmmt(row: Mapping[str, Any]) -> Row:
  """HMMT form: `problem` (or `question`), and `answer` in LaTeX."""
  return {
      'question': text(row, 'problem', 'question'), 'answer': answer_text(row, 'answer'), **identity(row, 'id', 'problem_idx'),
      **keep(row, 'problem_type')}


def imo_answerbench(row: Mapping[str, Any]) -> Row:
  """IMO-AnswerBench (google-deepmind/superhuman, CC-BY-4.0, (c) 2025 Google LLC; Luong et al., EMNLP 2025): `Problem`, `Short Answer`.

  Of the published file one row is mended, see `ERRATA`.
  """
  return {
      'question': text(row, 'Problem'), 'answer': text(row, 'Short Answer').strip(), 'id': text(row, 'Problem ID'),
      **{name.lower(): row[name] for name in ('Category', 'Subcategory', 'Source') if name in row}}


def humaneval(row: Mapping[str, Any]) -> Row:
  """HumanEval (openai/human-eval, MIT; Chen et al. 2021, arXiv:2107.03374): `prompt`, `entry_point`, `test`."""
  entry_point = text(row, 'entry_point')
  if not entry_point.isidentifier() or keyword.iskeyword(entry_point):
    raise ValueError(f"'entry_point' must be the name of a function, got {entry_point!r:.80}.")
  prompt, test = text(row, 'prompt'), code('test', text(row, 'test'))
  if 'def check(' not in test:
    raise ValueError("'test' must define check(candidate).")
  if not re.search(rf'\bdef\s+{entry_point}\b', prompt):
    raise ValueError(f"'prompt' must begin the function {entry_point!r} that 'entry_point' names.")
  return {
      'question': prompt, 'answer': '', **identity(row, 'task_id'), 'prompt': prompt, 'test': test,
      'entry_point': entry_point}


def mbpp(row: Mapping[str, Any]) -> Row:
  """MBPP (google-research, CC-BY-4.0; Austin et al. 2021, arXiv:2108.07732): `text` (sanitized form: `prompt`), and `test_list`.

  `test_setup_code` (sanitized form: `test_imports`) runs before the tests.
  """
  tests = row.get('test_list')
  if not isinstance(tests, list) or not tests or not all(isinstance(t, str) and t.strip() for t in tests):
    raise ValueError(f"'test_list' must be a list of assertions, got {tests!r:.80}.")
  setup = row.get('test_setup_code', row.get('test_imports', ''))
  setup = '\n'.join(setup) if isinstance(setup, list) and all(isinstance(x, str) for x in setup) else setup
  if not isinstance(setup, str):
    raise ValueError(f"'test_setup_code' must be text, got {setup!r:.80}.")
  if row.get('task_id') is None:  # It tells the test problems from the others.
    raise ValueError(f"has no field 'task_id'; it has {', '.join(map(repr, row)) or 'none'}.")
  code('test_setup_code', setup)
  for test in tests:
    code('test_list', test)
  return {
      'question': text(row, 'text', 'prompt'), 'answer': '', **identity(row, 'task_id'), 'test_list': tests, 'test_setup_code': setup,
      **keep(row, 'code')}


def last_boxed(solution: str) -> str:
  """Content of the last whole \\boxed{...} (or \\fbox{...}) with its braces balanced; '' where there is none."""
  for match in reversed(list(re.finditer(r'\\(?:boxed|fbox)\s*\{', solution))):
    depth, i = 1, match.end()
    while i < len(solution):
      if solution[i] == '\\':
        i += 2  # '\\{' and '\\}' are no braces.
        continue
      depth += (solution[i] == '{') - (solution[i] == '}')
      if depth == 0:
        return solution[match.end():i].strip()
      i += 1
  return ''


ERRATA: dict[str, tuple[tuple[str, str], ...]] = {  # Faults of published files, by form: text as it is there, and as it should be.
    # The quotation mark that ends the problem of imo-bench-algebra-036 is missing; without it the row's answer reads 'Algebra'.
    'imo_answerbench': (('\\]\n,"$Y(x)=A+\\frac{B}{x}-x$"', '\\]\n","$Y(x)=A+\\frac{B}{x}-x$"'),),
}

PARSERS: dict[str, Callable[[Mapping[str, Any]], Row]] = {
    'gsm8k': gsm8k, 'math': math, 'beyondaime': beyondaime, 'aime': aime, 'hmmt': hmmt, 'imo_answerbench': imo_answerbench,
    'humaneval': humaneval, 'mbpp': mbpp,
}
