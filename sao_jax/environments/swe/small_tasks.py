"""Items of HumanEval and MBPP as repositories: a module with a stub, and hidden tests, in the form of `instances`.

    HumanEval   'task_id', 'prompt', 'entry_point', 'canonical_solution', 'test'     solution.py is the prompt
    MBPP        'task_id', 'text', 'code', 'test_list', 'test_setup_code'            solution.py is the head of the function

`one_line` makes rows of the same form, for models that can do no more than finish a line. The gold patch is the data set's own solution.
Tests run with unittest, one test for each assertion of MBPP.
"""

from __future__ import annotations

import ast
import random
import re
from typing import Any, Mapping

from sao_jax.environments.swe import controls, patches

TARGET, TESTS = 'solution.py', 'test_solution.py'
_CALLED = re.compile(r'\b([A-Za-z_]\w*)\s*\(')


def row(item: Mapping[str, Any], *, completion: bool = False) -> dict[str, Any]:
  """A row of `instances` from an item of one of the two data sets.

  Args:
    item: its fields.
    completion: the file ends with the head of the function, so that the solution goes on from its end; HumanEval always does.

  Raises:
    ValueError: it is no item of the two, or not well formed.
  """
  if 'entry_point' in item and 'prompt' in item:
    return _humaneval(item)
  if 'test_list' in item:
    return _mbpp(item, completion)
  raise ValueError(f'an item must have the fields of HumanEval or of MBPP; it has {", ".join(map(str, item)) or "none"}')


def made(name: str, statement: str, stub: str, solution: str, tests: str, count: int, **fields: Any) -> dict[str, Any]:
  """A row: `stub` becomes `solution`; `tests` hold a class SolutionTest with test_1 to test_COUNT."""
  entry = lambda text: patches.Entry(patches.FILE, text.encode())
  before = {TARGET: entry(stub)}
  return {
      'instance_id': name, 'repo': name.split('-')[0].replace('__', '/'), 'base_commit': '', 'version': '1', 'problem_statement': statement,
      'files': {TARGET: stub}, 'patch': patches.write({TARGET: entry(solution)}, before.get).decode(),
      'test_patch': patches.write({TESTS: entry(tests)}, before.get).decode(), 'runner': 'unittest',
      'FAIL_TO_PASS': [f'test_{i + 1} (test_solution.SolutionTest)' for i in range(count)], 'PASS_TO_PASS': [], **fields}


def test_file(name: str, setup: str, bodies: list[str]) -> str:
  """A test module; each body becomes a test, in which the solution's function `name` and its public names are known."""
  lines = ['from solution import *', f'from solution import {name}', 'import unittest', '', *setup.replace('\r', '').split('\n'), '',
           'class SolutionTest(unittest.TestCase):']
  for i, body in enumerate(bodies, start=1):
    lines += ['', f'    def test_{i}(self):', *(f'        {line}' if line else '' for line in body.split('\n'))]
  return '\n'.join(lines) + '\n'


def _humaneval(item: Mapping[str, Any]) -> dict[str, Any]:
  name, prompt = str(item['entry_point']), str(item['prompt'])
  number = str(item['task_id']).rsplit('/', 1)[-1]
  tests = test_file(name, str(item['test']), [f'check({name})'])
  _check_source(tests, 'test')
  return made(f'openai__humaneval-{number}', f'Complete the function {name} in {TARGET}, as its description says.', prompt,
              prompt + str(item['canonical_solution']), tests, 1)


def _mbpp(item: Mapping[str, Any], completion: bool) -> dict[str, Any]:
  code = str(item['code']).replace('\r', '').strip('\n') + '\n'
  assertions = [str(test).replace('\r', '').strip() for test in item['test_list']]
  module = _check_source(code, 'code')
  functions = {n.name: n for n in module.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
  used = [name for test in assertions for name in _CALLED.findall(test) if name in functions]
  if not assertions or not used:
    raise ValueError(f'item {item.get("task_id")}: its tests call nothing that its code defines')
  function = functions[used[0]]
  head = f'def {function.name}({ast.unparse(function.args)}):' if isinstance(function, ast.FunctionDef) else f'class {function.name}:'
  statement = str(item['text']).strip()
  stub = f'# {statement}\n\n{head}\n    raise NotImplementedError\n'.replace('\r', '')
  if completion:
    comment = '# ' + ' '.join(statement.split()) + '\n'
    lines = code.splitlines(keepends=True)
    stub, code = comment + ''.join(lines[:function.body[0].lineno - 1]), comment + code
  tests = test_file(function.name, str(item.get('test_setup_code') or ''), assertions)
  _check_source(tests, 'test_list')
  return made(f'google__mbpp-{item["task_id"]}', f'{statement}\n\nWrite {function.name} in {TARGET}. Example: {assertions[0]}', stub, code,
              tests, len(assertions))


def _check_source(text: str, field: str) -> ast.Module:
  try:
    return controls.parse(text)
  except (SyntaxError, ValueError) as error:
    raise ValueError(f'{field} is no Python source: {error}') from None


# --- A family of one-line functions ----------------------------------------------------------------------------------------------

_FAMILY = (  # (what it says, what it returns); a and b are small numbers.
    ('add {a}', 'x + {a}'), ('subtract {a}', 'x - {a}'), ('multiply by {a}', 'x * {a}'), ('add {a}, multiply by {b}', '(x + {a}) * {b}'),
    ('multiply by {a}, add {b}', 'x * {a} + {b}'), ('square, subtract {a}', 'x * x - {a}'), ('at least {a}', 'max(x, {a})'),
    ('at most {a}', 'min(x, {a})'), ('remainder by {a}', 'x % {a}'), ('take from {a}', '{a} - x'))


def one_line(number: int) -> dict[str, Any]:
  """The row of a generated function: its file ends in 'return ', and the solution is the rest of that line."""
  rng = random.Random(number)
  says, returns = _FAMILY[number % len(_FAMILY)]
  values = {'a': rng.randrange(2, 100), 'b': rng.randrange(2, 10)}
  says, returns = says.format(**values), returns.format(**values)
  stub = f'# {says}\ndef f(x):\n  return '
  f = eval(f'lambda x: {returns}', {'max': max, 'min': min})  # pylint: disable=eval-used
  inputs = sorted({0, 7, 100, rng.randrange(200), -rng.randrange(1, 50)})
  tests = test_file('f', '', [f'assert f({x}) == {f(x)}' for x in inputs])
  return made(f'sao__one_line-{number}', f'Complete f in {TARGET}: {says}.', stub, f'{stub}{returns}\n', tests, len(inputs))
