"""Control runs: the listed tests, made to fail.

A process that runs graded code can be made to report anything. So a run in which everything passes is repeated in a new sandbox, with the
same command, the same files and the same ids, but with tests whose source was changed so that they must fail wherever the original passes.
A runner that lets one of them pass proves nothing, and the prediction gets no reward. Nothing but the sense of the changed assertions tells
one run from the other:

    assert total(x) == 12        ->  assert total(x) == 57, or assert total(x) != 12
    assert is_open(x)            ->  assert not is_open(x)
    self.assertIn(a, b)          ->  self.assertNotIn(a, b)

A change looks like what a person writes: code that reads the tests must not know a control by its form.

Only an assertion that is reached whenever the test passes is changed: a statement of the test's own body with no way out before it. Where a
test has none, a failing assertion is put at the beginning of its body.
"""

from __future__ import annotations

import ast
import dataclasses
import random
import re
import threading
import time
from typing import Any, Callable, Mapping, Sequence

from sao_jax.environments.swe.patches import Entry

OPPOSITE = {
    'assertEqual': 'assertNotEqual', 'assertTrue': 'assertFalse', 'assertIs': 'assertIsNot', 'assertIsNone': 'assertIsNotNone',
    'assertIn': 'assertNotIn', 'assertIsInstance': 'assertNotIsInstance', 'assertGreater': 'assertLessEqual',
    'assertGreaterEqual': 'assertLess', 'assertAlmostEqual': 'assertNotAlmostEqual', 'assertRegex': 'assertNotRegex'}
OPPOSITE |= {b: a for a, b in OPPOSITE.items()}
OPPOSITE_SIGN = {'==': '!=', 'is': 'is not', 'in': 'not in', '<': '>=', '>': '<='}
OPPOSITE_SIGN |= {b: a for a, b in OPPOSITE_SIGN.items()}
_SIGN = re.compile(r'is\s+not\b|not\s+in\b|is\b|in\b|[=!<>]=|[<>]')
_WAYS_OUT = (ast.Return, ast.Yield, ast.YieldFrom, ast.Try, ast.TryStar, ast.With, ast.AsyncWith, ast.While, ast.Raise)
_EXPECTED = re.compile(r'xfail|expectedFailure|skip', re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Control:
  """`files` in place of the originals; the tests of `ids` must not pass with them."""

  files: Mapping[str, Entry]
  ids: tuple[str, ...]


def make(
    ids: Sequence[str], locate: Callable[[str], tuple[str, tuple[str, ...]] | None], read: Callable[[str], Entry | None],
    rng: random.Random, *, most: int = 40,
) -> Control:
  """A control of some of the tests.

  Args:
    ids: tests that passed, those first that matter most.
    locate: (file, names of classes and function) of a test, None where it is not known.
    read: the file's entry.
    rng: decides how each is changed.
    most: at most so many functions are changed.
  """
  places: dict[tuple[str, tuple[str, ...]], list[str]] = {}
  for test in ids:
    place = locate(test)
    if place is not None and place[0].endswith('.py'):
      places.setdefault(place, []).append(test)
  chosen = dict(list(places.items())[:most])
  files, failing = {}, []
  for path in {file for file, _ in chosen}:
    entry = read(path)
    if entry is None:
      continue
    wanted = {names: tests for (file, names), tests in chosen.items() if file == path}
    data, changed = spoiled(entry.data, list(wanted), rng)
    if changed:
      files[path] = dataclasses.replace(entry, data=data)
      failing += [test for names in changed for test in wanted[names]]
  return Control(files, tuple(failing))


_parsing = threading.Lock()


def parse(source: bytes | str) -> ast.Module:
  """`ast.parse`, one thread at a time: CPython 3.11 counts its depth for all threads together, and fails where two parse at once.

  Raises SyntaxError, ValueError, RecursionError, MemoryError.
  """
  for _ in range(20):
    with _parsing:
      try:
        return ast.parse(source)
      except SystemError:  # A thread of others was parsing, too.
        time.sleep(0.005)
  raise ValueError('the source could not be parsed')


def spoiled(source: bytes, wanted: Sequence[tuple[str, ...]], rng: random.Random) -> tuple[bytes, list[tuple[str, ...]]]:
  """The source with the functions `wanted` made to fail, and those of them that were found. Bytes that are no source stay as they are."""
  try:
    module = parse(source)
    lines = source.decode('utf-8').encode('utf-8').splitlines(keepends=True)
  except (SyntaxError, ValueError, RecursionError, MemoryError):
    return source, []
  if any(line.endswith(b'\r') for line in lines) or len(lines) != source.count(b'\n') + (not source.endswith(b'\n') and bool(source)):
    return source, []  # Lines that Python and this count differently.
  changes: list[tuple[int, int, bytes]] = []
  done = []
  starts = [0]
  for line in lines:
    starts.append(starts[-1] + len(line))
  for names in wanted:
    function = _function(module, names)
    if function is not None:
      changes.append(_change(function, source, starts, rng))
      done.append(names)
  result = source
  for start, stop, text in sorted(changes, reverse=True):
    result = result[:start] + text + result[stop:]
  try:
    parse(result)
  except (SyntaxError, ValueError):
    return source, []
  return result, done


def _function(module: ast.Module, names: tuple[str, ...]) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
  """The last definition of that name, as Python would have it; None where it is no plain test."""
  body: Sequence[ast.stmt] = module.body
  for i, name in enumerate(names):
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef) if i == len(names) - 1 else (ast.ClassDef,)
    nodes = [n for n in body if isinstance(n, kinds) and n.name == name]
    others = [n for n in ast.walk(ast.Module(list(body), [])) if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n.name == name]
    if not nodes or i < len(names) - 1 and len(nodes) > 1 or len(names) == 1 and len(others) > 1:
      return None
    node = nodes[-1]
    if any(_EXPECTED.search(ast.unparse(d)) for d in node.decorator_list):
      return None
    body = node.body
  marks = [n for n in module.body if isinstance(n, ast.Assign) and any(isinstance(t, ast.Name) and t.id == 'pytestmark' for t in n.targets)]
  if any(_EXPECTED.search(ast.unparse(n)) for n in marks) or 'xfail(' in ast.unparse(node):
    return None
  if any(isinstance(n, (ast.Yield, ast.YieldFrom)) for n in ast.walk(node)):
    return None
  return node


def _change(function: Any, source: bytes, starts: Sequence[int], rng: random.Random) -> tuple[int, int, bytes]:
  """(start, stop, text) of what is exchanged in the source."""
  at = lambda line, column: starts[line - 1] + column
  spots, literals = [], []  # Another expected value is the better change: an object that is equal to everything passes with it.
  for statement in function.body:
    found = _spots(statement)
    spots += found
    literals += [node for node, _ in found if _is_literal(node)]
    if any(isinstance(n, _WAYS_OUT) for n in ast.walk(statement)):
      break
  spots = [s for s in spots if s[0] in literals] or spots
  if spots:
    node, texts = rng.choice(spots)
    text = rng.choice(texts(source[at(node.lineno, node.col_offset):at(node.end_lineno, node.end_col_offset)].decode(), rng))
    return at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset), text.encode()
  first = function.body[0]
  a = rng.randrange(20, 90)
  failing = f'assert {a} == {a + rng.randrange(1, 9)}; ' if not isinstance(first, _COMPOUND) else ''
  start = at(first.lineno, first.col_offset)
  if failing:
    return start, start, failing.encode()
  if getattr(first, 'decorator_list', None):
    start = at(first.decorator_list[0].lineno, first.decorator_list[0].col_offset - 1)
  line_start = source.rfind(b'\n', 0, start) + 1
  indent = source[line_start:start]
  return start, start, f'assert {a} == {a + rng.randrange(1, 9)}\n'.encode() + (indent if not indent.strip() else b'')


_COMPOUND = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.FunctionDef,
             ast.AsyncFunctionDef, ast.ClassDef, ast.Match, ast.TryStar)


def _spots(statement: ast.stmt) -> list[tuple[ast.AST, Callable[[str, random.Random], list[str]]]]:
  """What can be exchanged in a statement so that it fails: (node, its possible texts from the original one)."""
  if isinstance(statement, ast.Assert):
    test = statement.test
    found: list[Any] = [(test, lambda text, rng: [opposite(text)])]
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq) and _is_literal(test.comparators[0]):
      found = [(test.comparators[0], _others(test.comparators[0])), *found] if _others(test.comparators[0])('', random.Random(0)) else found
    return found
  call = statement.value if isinstance(statement, ast.Expr) else None
  if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or any(isinstance(a, ast.Starred) for a in call.args):
    return []
  name = call.func.attr
  if not (isinstance(call.func.value, ast.Name) and call.func.value.id == 'self') or name not in OPPOSITE:
    return []
  found = [(call.func, lambda text, rng: [text[:text.rindex(name)] + OPPOSITE[name]])]
  if name == 'assertEqual' and len(call.args) >= 2 and _is_literal(call.args[1]) and _others(call.args[1])('', random.Random(0)):
    found.append((call.args[1], _others(call.args[1])))
  return found


def opposite(text: str) -> str:
  """The opposite of a condition, in the form that a person would give it: `a != b` for `a == b`, `not f(x)` for `f(x)`, `x` for `not x`."""
  source = f'({text}\n)'.encode()  # Places in a tree count bytes.
  node = parse(source).body[0].value
  if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
    return text.removeprefix('not').lstrip()
  if isinstance(node, (ast.BoolOp, ast.IfExp, ast.Lambda, ast.NamedExpr)):
    return f'not ({text})'
  if isinstance(node, ast.Compare) and len(node.ops) == 1:
    starts = [0, *(match.end() for match in re.finditer(b'\n', source))]
    left, right = node.left, node.comparators[0]
    start, stop = starts[left.end_lineno - 1] + left.end_col_offset, starts[right.lineno - 1] + right.col_offset
    between = source[start:stop].decode()
    sign = _SIGN.search(between)
    if sign is not None and '#' not in between:
      changed = between[:sign.start()] + OPPOSITE_SIGN[' '.join(sign[0].split())] + between[sign.end():]
      return (source[1:start] + changed.encode() + source[stop:-2]).decode()
  return f'not {text}'


def _is_literal(node: ast.AST) -> bool:
  try:
    ast.literal_eval(node)
  except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
    return False
  return True


def _others(node: ast.AST) -> Callable[[str, random.Random], list[str]]:
  """Writes another value of the same kind, one that no honest `==` takes for the first; [] where none is known."""
  value = ast.literal_eval(node)

  def texts(text: str, rng: random.Random) -> list[str]:
    del text
    other = _another(value, rng)
    return [] if other is None else [repr(other)]

  return texts


def _another(value: Any, rng: random.Random) -> Any:
  if isinstance(value, bool):
    return not value
  if isinstance(value, int):
    return value + rng.choice((-1, 1)) * rng.randrange(1, 40)
  if isinstance(value, float):
    other = abs(value) * 3 + rng.randrange(1, 9)
    return other if other < 1e100 else None
  if isinstance(value, (str, bytes)):
    extra = ''.join(rng.choice('aeinorst') for _ in range(3))
    return value + (extra if isinstance(value, str) else extra.encode())
  if isinstance(value, (list, tuple)):
    i = rng.randrange(len(value)) if value else 0
    inner = _another(value[i], rng) if value else 1
    items = list(value)
    items[i:i + 1] = [inner] if inner is not None else []
    return type(value)(items)
  if isinstance(value, dict) and value:
    key = rng.choice(list(value))
    inner = _another(value[key], rng)
    return {**value, key: inner} if inner is not None else {k: v for k, v in value.items() if k != key}
  return None
