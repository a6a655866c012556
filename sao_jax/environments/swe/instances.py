"""Instances in the SWE-bench form: one JSON object a line, read and checked before anything runs.

Fields of the published form: instance_id, repo, base_commit, problem_statement, test_patch, patch, FAIL_TO_PASS and PASS_TO_PASS (lists, or
lists written as JSON), version, image. Fields of our own say what a row of the published form leaves to its harness:

    path         repository: a folder with a git repository, or a git bundle; relative to the file
    files        the repository itself, {path: text}; base_commit may then be left out
    runner       'pytest' (default), 'unittest', or 'command'
    test_command shell command of the runner 'command'; {files}, {modules} and {ids} are filled in, quoted
    log_format   how its results are told: 'unittest' and 'pytest' are observed in the process, 'sympy' is read from the log
    setup        shell text that runs in the repository before the tests
    python       interpreter inside the sandbox, a path or a name
    packages     without an image: a folder of the host with the packages of the tests, in place of those of this Python; for instance
                 lib/python3.X/site-packages of a virtual environment of the same Python version; relative to the file
    python_path  folders of the repository that are put on sys.path; default: 'src' where there is one, then '.'
    env          environment variables of the tests
    trusted      patterns of further files that a prediction may not change
    repo_path    where the repository lies in the image

Fields that are not named here are left alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import re
from typing import Any, Mapping

RUNNERS = ('pytest', 'unittest', 'command')
LOG_FORMATS = ('unittest', 'pytest', 'sympy')
KNOWN = {  # What the published form leaves to its harness, for repositories with a runner of their own.
    'django/django': {
        'runner': 'command', 'log_format': 'unittest',
        'test_command': 'python tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1 {modules}'},
    'sympy/sympy': {
        'runner': 'command', 'log_format': 'sympy',
        'test_command': "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' bin/test -C --verbose {files}"},
}
PUBLISHED_IMAGES = re.compile(r'(?:^|/)(?:sweb\.eval|swebench)\b')  # Their Python lies in an environment of conda.
CONDA = '/opt/miniconda3/envs/testbed/bin'
MAX_ID = 200  # An instance's files are named after it.
_ID = re.compile(r'[A-Za-z0-9][A-Za-z0-9_.+-]*')
_COMMIT = re.compile(r'[0-9A-Za-z][0-9A-Za-z._/~^-]*')


@dataclasses.dataclass(frozen=True)
class Instance:
  """One problem; see the module's text for the fields. `path` is absolute, '' where the repository is `files` or in an image."""

  instance_id: str
  repo: str
  base_commit: str
  problem_statement: str
  test_patch: str
  patch: str
  fail_to_pass: tuple[str, ...]
  pass_to_pass: tuple[str, ...]
  version: str = ''
  image: str = ''
  path: str = ''
  files: Mapping[str, str] = dataclasses.field(default_factory=dict)
  runner: str = 'pytest'
  test_command: str = ''
  log_format: str = ''
  setup: str = ''
  python: str = ''
  packages: str = ''
  python_path: tuple[str, ...] | None = None
  env: Mapping[str, str] = dataclasses.field(default_factory=dict)
  trusted: tuple[str, ...] = ()
  repo_path: str = '/testbed'

  @property
  def ids(self) -> tuple[str, ...]:
    """Every listed test."""
    return (*self.fail_to_pass, *self.pass_to_pass)

  @property
  def key(self) -> str:
    """Changes with anything that the verdict depends on."""
    return hashlib.sha256(json.dumps(dataclasses.asdict(self), sort_keys=True).encode('utf-8', 'surrogatepass')).hexdigest()[:16]


def load(path: str | os.PathLike[str], *, repositories: str | os.PathLike[str] = '', limit: int | None = None) -> list[Instance]:
  """Reads a file of instances.

  Args:
    path: JSON lines.
    repositories: folder that holds the repositories of rows without `path`, `files` and `image`, as OWNER__NAME, OWNER/NAME or NAME, each
      a folder or with the ending '.git' or '.bundle'.
    limit: only the first so many.

  Raises:
    ValueError: a row is not as it must be, with file and line; or an instance_id occurs twice.
    OSError: the file cannot be read.
  """
  path = pathlib.Path(path)
  found: dict[str, Instance] = {}
  try:
    lines = path.read_text(encoding='utf-8').split('\n')
  except UnicodeDecodeError as error:
    raise ValueError(f'{path} must be JSON lines in UTF-8: {error}.') from None
  for number, line in enumerate(lines, start=1):
    if not line.strip():
      continue
    where = f'{path}, line {number}'
    try:
      row = json.loads(line)
    except (ValueError, RecursionError) as error:
      raise ValueError(f'{where}: not valid JSON ({error}).') from None
    instance = parse(row, where, folder=path.resolve().parent, repositories=repositories)
    if instance.instance_id in found:
      raise ValueError(f'{where}: instance_id {instance.instance_id!r} stands twice.')
    found[instance.instance_id] = instance
    if limit is not None and len(found) >= limit:
      break
  if not found:
    raise ValueError(f'{path} holds no instances.')
  return list(found.values())


def parse(
    row: Any, where: str, *, folder: str | os.PathLike[str] = '.', repositories: str | os.PathLike[str] = ''
) -> Instance:
  """An instance from a row. Raises ValueError that begins with `where`."""
  try:
    if not isinstance(row, Mapping):
      raise ValueError(f'a row must be an object, got {type(row).__name__}')
    row = {name: value for name, value in row.items() if value is not None}
    row = {**KNOWN.get(row.get('repo') if isinstance(row.get('repo'), str) else '', {}), **row}
    return _parsed(row, pathlib.Path(folder), str(repositories))
  except ValueError as error:
    raise ValueError(f'{where}: {error}.') from None


def _parsed(row: Mapping[str, Any], folder: pathlib.Path, repositories: str) -> Instance:
  texts = {name: _text(row, name) for name in ('instance_id', 'problem_statement', 'test_patch')}
  optional = {name: _text(row, name, needed=False) for name in (
      'repo', 'base_commit', 'patch', 'image', 'path', 'test_command', 'log_format', 'setup', 'python', 'packages')}
  runner, repo_path = _text(row, 'runner', needed=False) or 'pytest', _text(row, 'repo_path', needed=False) or '/testbed'
  version = row.get('version', '')
  if not _ID.fullmatch(texts['instance_id']) or len(texts['instance_id']) > MAX_ID:
    raise ValueError(f'instance_id must be at most {MAX_ID} letters, digits and _ . + -, got {texts["instance_id"]!r:.80}')
  files = _strings(row, 'files')
  for name in files:
    _check_path('files', name)
    if not files.keys().isdisjoint(map(str, pathlib.PurePosixPath(name).parents)):
      raise ValueError(f'files: {name!r:.80} lies below another file')
  if runner not in RUNNERS:
    raise ValueError(f'runner must be one of {", ".join(RUNNERS)}, got {runner!r}')
  if (runner == 'command') != bool(optional['test_command']):
    raise ValueError("test_command and runner='command' go together: give both or neither")
  if runner == 'command' and optional['log_format'] not in LOG_FORMATS:
    raise ValueError(f'log_format must be one of {", ".join(LOG_FORMATS)}, got {optional["log_format"]!r}')
  if optional['base_commit'] and not _COMMIT.fullmatch(optional['base_commit']):
    raise ValueError(f'base_commit must be the name of a commit, got {optional["base_commit"]!r:.80}')
  if not optional['base_commit'] and not files and not optional['image']:
    raise ValueError('base_commit is missing')
  python_path = _list(row, 'python_path') if 'python_path' in row else None
  for name in python_path or ():
    if name != '.':
      _check_path('python_path', name)
  fail, keep = _list(row, 'FAIL_TO_PASS'), _list(row, 'PASS_TO_PASS')
  if not fail:
    raise ValueError('FAIL_TO_PASS must name at least one test')
  keep = tuple(test for test in dict.fromkeys(keep) if test not in set(fail))
  if not repo_path.startswith('/') or '..' in repo_path.split('/'):
    raise ValueError(f'repo_path must be an absolute path, got {repo_path!r}')
  env = _strings(row, 'env')
  if any(not name or '=' in name or '\0' in name + value or not is_writable(name + value) for name, value in env.items()):
    raise ValueError(f'env must map names without "=" to texts without zero bytes, got {env!r:.80}')
  if PUBLISHED_IMAGES.search(optional['image']):
    optional['python'] = optional['python'] or f'{CONDA}/python'
    env = {'PATH': f'{CONDA}:/opt/miniconda3/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin', **env}
  if optional['packages']:
    if optional['image']:
      raise ValueError('packages are for instances without an image; an image has its own')
    optional['packages'] = str((folder / optional['packages']).resolve())
    if not os.path.isdir(optional['packages']):
      raise ValueError(f'packages: there is no folder {optional["packages"]}')
  optional['path'] = _located(optional, files, folder, repositories)
  return Instance(
      **texts, **optional, fail_to_pass=tuple(dict.fromkeys(fail)), pass_to_pass=keep, version=str(version), files=files, runner=runner,
      python_path=python_path, env=env, trusted=_list(row, 'trusted') if 'trusted' in row else (), repo_path=repo_path)


def is_writable(text: str) -> bool:
  """Whether a text can be written as bytes, one of which a surrogate from U+DC80 to U+DCFF may stand for."""
  try:
    text.encode('utf-8', 'surrogateescape')
  except UnicodeEncodeError:
    return False
  return True


def _text(row: Mapping[str, Any], name: str, *, needed: bool = True) -> str:
  value = row.get(name, '')
  if needed and name not in row:
    raise ValueError(f'{name} is missing; the row has {", ".join(map(str, row)) or "nothing"}')
  if not isinstance(value, str) or '\0' in value or not is_writable(value):
    raise ValueError(f'{name} must be a text without zero bytes and halves of surrogate pairs, got {value!r:.80}')
  if needed and name != 'test_patch' and not value.strip():
    raise ValueError(f'{name} is empty')
  return value


def _list(row: Mapping[str, Any], name: str) -> tuple[str, ...]:
  """A list of texts, which may be written as JSON."""
  value = row.get(name, ())
  if isinstance(value, str):
    try:
      value = json.loads(value) if value.strip() else []
    except (ValueError, RecursionError):
      raise ValueError(f'{name} must be a list of texts, or one written as JSON, got {value!r:.80}') from None
  if not isinstance(value, (list, tuple)) or not all(
      isinstance(item, str) and item.strip() and '\0' not in item and is_writable(item) for item in value):
    raise ValueError(f'{name} must be a list of texts with something in them, got {value!r:.80}')
  return tuple(value)


def _strings(row: Mapping[str, Any], name: str) -> dict[str, str]:
  value = row.get(name, {})
  if not isinstance(value, Mapping) or not all(isinstance(k, str) and isinstance(v, str) for k, v in value.items()):
    raise ValueError(f'{name} must be an object of texts, got {value!r:.80}')
  return dict(value)


def _check_path(field: str, name: str) -> None:
  parts = name.split('/')
  if '\0' in name or not is_writable(name) or any(part in ('', '.', '..', '.git') for part in parts):
    raise ValueError(f'{field} must hold paths inside of the repository, got {name!r:.80}')


def _located(optional: Mapping[str, str], files: Mapping[str, str], folder: pathlib.Path, repositories: str) -> str:
  """Absolute path of the repository; '' where it is elsewhere."""
  if optional['path']:
    path = folder / optional['path']
    if not path.exists():
      raise ValueError(f'path: there is no {path}')
    return str(path.resolve())
  if files or optional['image']:
    return ''
  if not repositories:
    raise ValueError('there is no repository: give path, files or image in the row, or a folder of repositories')
  owner, _, name = optional['repo'].partition('/')
  if not name or '..' in optional['repo']:
    raise ValueError(f'repo must be OWNER/NAME, got {optional["repo"]!r}')
  tried = [pathlib.Path(repositories) / (stem + ending) for stem in (f'{owner}__{name}', f'{owner}/{name}', name)
           for ending in ('', '.git', '.bundle')]
  for path in tried:
    if path.exists():
      return str(path.resolve())
  raise ValueError(f'there is no repository of {optional["repo"]} in {repositories}; it may be called {tried[0].name} or {tried[2].name}')
