"""Which files a prediction may change, and what the tests are run with.

A prediction's changes to these are taken back, whatever they are:
  - files that the test patch touches, and files that hold listed tests: they are as the test patch leaves them;
  - other tests: `test_*.py`, `*_test.py`, everything in folders `tests`, and in `test` and `testing` at the top;
  - what steers the runner or Python itself: conftest.py, pytest.ini, tox.ini, setup.cfg, pyproject.toml, sitecustomize.py, *.pth, package
    metadata with entry points, compiled files, virtual environments;
  - what the instance names in `trusted`.
What the gold patch changes among them is as the gold patch leaves it. New modules at the top of the import path with the name of a module
of the standard library or of the runner would be imported in its place, and so would packages and compiled modules beside a trusted module
of the same name; they are left out.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import pathlib
import re
import sys
from typing import Mapping, Sequence

from sao_jax.environments.swe import patches
from sao_jax.environments.swe.inside.runner import dotted
from sao_jax.environments.swe.instances import Instance
from sao_jax.environments.swe.patches import Change, Entry
from sao_jax.environments.swe.repository import Base

STEERING = (
    'conftest.py', 'pytest.ini', '.pytest.ini', 'pytest.toml', '.pytest.toml', 'tox.ini', 'tox.toml', 'setup.cfg', 'pyproject.toml',
    'sitecustomize.py', 'usercustomize.py', 'noxfile.py', '.coveragerc', '*.pth', '*.egg-link', '*.pyc', '*.pyo', 'pyvenv.cfg')
FOLDERS = ('__pycache__', '.pytest_cache', '.hypothesis', '.tox', '.nox', '.venv', 'site-packages', '.git')
METADATA = ('*.egg-info', '*.dist-info')
TESTS = ('test_*.py', '*_test.py', 'tests.py')
RUNNER_MODULES = frozenset((
    'pytest', '_pytest', 'py', 'pluggy', 'iniconfig', 'packaging', 'exceptiongroup', 'tomli', 'attr', 'attrs', 'pygments', 'colorama',
    'six', 'xdist', 'execnet', 'coverage', 'hypothesis', 'anyio', 'more_itertools', 'wcwidth', 'importlib_metadata', 'zipp',
    'pkg_resources', 'setuptools', '_virtualenv', 'typing_extensions', 'nose', 'pathlib2', 'atomicwrites', 'funcsigs', 'distutils'))
_MODULE_END = re.compile(r'\.(?:py|pyw|pyi|so|pyd|[\w-]+\.so)$')


@dataclasses.dataclass(frozen=True)
class Laid:
  """A prediction as it is laid over a clean copy: `change` with the trusted files in it, `dropped` what was taken back, and why."""

  change: Change
  dropped: Mapping[str, str]


class Trusted:
  """The trusted files of an instance.

  Attributes:
    files: {path: Entry, or None for what is deleted} of all that the test patch, and the gold patch among trusted files, changes.
    test_files: the files with listed tests that are there after the test patch.
  """

  def __init__(self, instance: Instance, base: Base):
    """Raises patches.PatchError where the instance's own patches do not fit its base."""
    self._instance, self._base = instance, base
    self._environments = {path.rpartition('/')[0] for path in base.manifest if path.endswith('/pyvenv.cfg')}
    gold = patches.apply(instance.patch.encode('utf-8', 'surrogateescape'), base.entry) if instance.patch.strip() else {}
    under = lambda path: gold[path] if path in gold else base.entry(path)
    after = patches.apply(instance.test_patch.encode('utf-8', 'surrogateescape'), under) if instance.test_patch.strip() else {}
    self._touched = frozenset(after)
    self._listed = frozenset(file_of(test) for test in instance.ids) - {''}
    self._listed |= self._unittest_files()
    self._gold_folders = {path.rsplit('/', i)[0] for path in gold if not self._is_test_name(path) for i in range(1, path.count('/') + 1)}
    self.files: Change = {path: entry for path, entry in gold.items() if self.owns(path)}
    self.files.update(after)
    self._names = frozenset(base.manifest) | {path for path, entry in self.files.items() if entry is not None}
    self.test_files = tuple(sorted(
        path for path in {*self._touched, *self._listed} if path in self._names and self.files.get(path, True) is not None))
    self._tops = {self._top(path, root) for path in base.manifest for root in self.roots} - {''}

  def _unittest_files(self) -> set[str]:
    """Files of ids such as 'test_x (package.module.Class)'."""
    found = set()
    for test in self._instance.ids:
      parts = [] if '::' in test else dotted(test).split('.')
      for size in range(1, len(parts)):
        module = '/'.join(parts[:size]) + '.py'
        found |= {path for root in (*self.roots, 'tests')
                  if (path := module if root == '.' else f'{root}/{module}') in self._base.manifest or path in self._touched}
    return found

  @property
  def roots(self) -> tuple[str, ...]:
    """Folders of the repository that are on sys.path; '.' for the repository itself."""
    if self._instance.python_path is not None:
      return self._instance.python_path
    return ('src', '.') if any(path.startswith('src/') for path in self._base.manifest) else ('.',)

  @property
  def is_runner(self) -> bool:
    """Whether the repository is pytest itself, so that its own one runs the tests."""
    names = ('_pytest/__init__.py', 'pytest.py', 'pytest/__init__.py')
    return any((name if root == '.' else f'{root}/{name}') in self._base.manifest for root in self.roots for name in names)

  def owns(self, path: str) -> bool:
    """Whether a prediction's change to `path` is taken back."""
    if path in self._touched or path in self._listed or any(fnmatch.fnmatchcase(path, pattern) for pattern in self._instance.trusted):
      return True
    *folders, name = path.split('/')
    if any(fnmatch.fnmatchcase(name, pattern) for pattern in STEERING) or any(part in FOLDERS for part in (*folders, name)):
      return True
    if any(fnmatch.fnmatchcase(part, pattern) for part in (*folders, name) for pattern in METADATA):
      return True
    if not self._environments.isdisjoint(_above(path)):
      return True
    return self._is_test_name(path) or self._in_tests(folders)

  def _is_test_name(self, path: str) -> bool:
    return any(fnmatch.fnmatchcase(path.rsplit('/', 1)[-1], pattern) for pattern in TESTS)

  def _in_tests(self, folders: Sequence[str]) -> bool:
    """Whether the folders lead into tests; not where the gold patch repairs something there, as in a library of test helpers."""
    for i, name in enumerate(folders):
      if name == 'tests' or i == 0 and name in ('test', 'testing'):
        return '/'.join(folders[:i + 1]) not in self._gold_folders
    return False

  @staticmethod
  def _top(path: str, root: str) -> str:
    """Name under which a path can be imported from a folder of sys.path; '' for none."""
    inner = path if root == '.' else path[len(root) + 1:] if path.startswith(root + '/') else ''
    return _MODULE_END.sub('', inner.split('/', 1)[0])

  def _shadows(self, path: str) -> str:
    for root in (*self.roots, *{p.rsplit('/', 1)[0] for p in self.test_files if '/' in p}):
      name = self._top(path, root)
      if (name in RUNNER_MODULES or name in sys.stdlib_module_names or name.startswith('pytest_')) and name not in self._tops:
        return name
    return '' if path in self._base.manifest else self._covers(path)

  def _covers(self, path: str) -> str:
    """Name of the trusted module that Python would not find any more: it prefers a package or a compiled module to `module.py`."""
    module = _MODULE_END.sub('', path).removesuffix('/__init__')
    covered = f'{module}.py'
    there = covered in self._names and self.files.get(covered, True) is not None
    return module.replace('/', '.') if there and covered != path and self.owns(covered) else ''

  def lay(self, prediction: Mapping[str, Entry | None]) -> Laid:
    """The prediction over a clean copy, with every trusted file as the instance has it."""
    change: Change = {}
    dropped: dict[str, str] = {}
    folders = {path.rsplit('/', i)[0] for path in self._names for i in range(1, path.count('/') + 1) if self.owns(path)}
    for path, entry in prediction.items():
      if self.owns(path):
        dropped[path] = 'trusted'
      elif entry is not None and (path in folders):
        dropped[path] = 'it stands where a folder with trusted files is'
      elif entry is not None and entry.mode == patches.LINK and not _stays(path, entry.data):
        dropped[path] = 'a link that leads out of the repository'
      elif entry is not None and (name := self._shadows(path)):
        dropped[path] = f'it would be imported as {name}'
      else:
        change[path] = entry
    left = [path for path in self._base.manifest if path not in change]
    kept = {folder for path in left for folder in _above(path)}
    for path in [p for p, e in change.items() if e is not None and p in kept]:
      del change[path]
      dropped[path] = 'it stands where a folder is'
    for path in [p for p, e in change.items() if e is not None]:
      above = next((a for a in _above(path) if change.get(a) is not None or a in self._base.manifest and a not in change), None)
      if above is not None:
        del change[path]
        dropped[path] = f'{above} is no folder'
    change.update(self.files)
    return Laid(change, dropped)


def _above(path: str) -> list[str]:
  return [path.rsplit('/', i)[0] for i in range(1, path.count('/') + 1)]


def _stays(path: str, target: bytes) -> bool:
  """Whether a link's target lies inside of the repository, and not in git's folder, by its text."""
  place = path.split('/')[:-1]
  text = target.decode('utf-8', 'surrogateescape')
  if not text or text.startswith('/') or '\0' in text:
    return False
  for part in text.split('/'):
    if part == '..':
      if not place:
        return False
      place.pop()
    elif part not in ('', '.'):
      place.append(part)
  return '.git' not in place


def file_of(test: str) -> str:
  """The file of a pytest id; '' for ids of another form."""
  name = test.split('::', 1)[0]
  return name if '::' in test and pathlib.PurePosixPath(name).suffix in ('.py', '.txt', '.rst', '.md', '.pyx') else ''
