"""The repository of an instance as it was at its base commit, and what a policy made of it.

The sandbox gets the files of the commit and a new git repository with this one commit: no later history, no remotes, no reflog, no objects
that nothing reaches, no hooks, no configuration of the original. Git runs on the host for the original repository only, and never runs
anything of it. What the policy left in its sandbox comes out as plain bytes, file by file, through a reader that follows no link; the
patch is then written on the host without git.
"""

from __future__ import annotations

import atexit
import base64
import fnmatch
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import threading
from typing import Any, Iterable, Mapping, Sequence

from sao_jax import sandbox
from sao_jax.environments.swe import patches
from sao_jax.environments.swe.inside import tree as tree_script
from sao_jax.environments.swe.instances import Instance
from sao_jax.environments.swe.patches import Change, Entry

ROOT = sandbox.FOLDER + '/repo'
OUT = sandbox.FOLDER + '/.swe_out'  # '../.swe_out' from there.
SCRIPT = pathlib.Path(tree_script.__file__).read_text(encoding='utf-8')
MAX_LISTING = 128 << 20  # Bytes.
MAX_FILE, MAX_TOTAL, MAX_CHANGED = 4 << 20, 24 << 20, 4000  # Of a policy's change: bytes of a file, of all, and number of files.
GIT_S = 1800.0  # Of one command of git.
IGNORED = (  # New files of these names are no part of a solution.
    '__pycache__', '*.pyc', '*.pyo', '.pytest_cache', '.hypothesis', '.mypy_cache', '.ruff_cache', '.tox', '.nox', '.eggs', '*.egg-info',
    '.coverage', 'node_modules', '.cache', '.ipynb_checkpoints', '*.swp', '.DS_Store')
GIT = (
    'git', '-c', 'core.hooksPath=/dev/null', '-c', 'safe.directory=*', '-c', 'core.fsmonitor=false', '-c', 'protocol.file.allow=always',
    '-c', 'core.attributesFile=/dev/null', '-c', 'gc.auto=0')


class RepositoryError(ValueError):
  """The repository of an instance, or its base commit, is not there, or cannot be read."""


def digest(entry: Entry) -> str:
  return hashlib.sha1(entry.data).hexdigest()


class Base:
  """Files of a repository at its base commit. Threads may share one.

  Attributes:
    manifest: {path: (mode, sha1 of the content)}; submodules are left out.
  """

  manifest: Mapping[str, tuple[int, str]]

  def entry(self, path: str) -> Entry | None:
    """The file at a path."""
    raise NotImplementedError(f'{type(self).__name__} has no entry.')

  def populate(self, box: Any, python: str, *, git: bool = True) -> None:
    """Puts the files to `ROOT` of a new box, with a git repository of one commit; without it, that may be left out."""
    raise NotImplementedError(f'{type(self).__name__} has no populate.')


class FolderBase(Base):
  """A repository on the host, made once as a folder that boxes are filled from."""

  def __init__(self, files: Mapping[str, Entry], folder: pathlib.Path):
    self._folder = folder
    self.manifest = {path: (entry.mode, digest(entry)) for path, entry in files.items() if entry.mode != patches.MODULE}
    folder.mkdir(parents=True)
    change = {_latin(path): [entry.mode, base64.b64encode(entry.data).decode()] for path, entry in files.items()}
    tree_script.put(os.fsencode(folder), change)
    self._lock, self._has_git = threading.Lock(), False

  def _make_git(self) -> None:
    with self._lock:
      if not self._has_git:
        try:
          tree_script.lose(os.fsencode(self._folder))
        except SystemExit as error:
          raise RepositoryError(f'The copy of the repository could not be made: {error}.') from None
        self._has_git = True

  def entry(self, path: str) -> Entry | None:
    if path not in self.manifest:
      return None
    full = os.path.join(os.fsencode(self._folder), os.fsencode(path))
    mode = self.manifest[path][0]
    if mode == patches.LINK:
      return Entry(mode, os.readlink(full))
    with open(full, 'rb') as file:
      return Entry(mode, file.read())

  def populate(self, box: Any, python: str, *, git: bool = True) -> None:
    del python
    if git:
      self._make_git()
    box.put_folder(str(self._folder), ROOT)


class ImageBase(Base):
  """A repository inside a container image: it is moved to `ROOT` in each new box, and a link is left where it was."""

  def __init__(self, instance: Instance, box: Any, python: str):
    """`box`: a new one of the image, used up here."""
    self._instance = instance
    self.populate(box, python)
    found = _listing(box, python)
    if not found:
      raise RepositoryError(f'The image {instance.image} holds no files at {instance.repo_path}; give repo_path.')
    self.manifest = {path: (mode, sha) for path, (mode, _, sha) in found.items()}
    self._files = take(box, python, [path for path, (_, size, _) in found.items() if size <= MAX_FILE])

  def entry(self, path: str) -> Entry | None:
    return self._files.get(path)

  def populate(self, box: Any, python: str, *, git: bool = True) -> None:
    place = self._instance.repo_path
    commit = self._instance.base_commit
    words = ' '.join(GIT)
    script = f'set -e\ncd "$1"\n{f"{words} checkout -q -f {commit}" if commit else ""}\n'
    if place != ROOT:
      script += f'cd /\nmv "$1" {ROOT}\nln -s {ROOT} "$1"\n'
    result = box.run(['sh', '-c', script, 'sh', place], time_s=600.0)
    if result.ending != 'exited' or result.exit_code:
      raise RepositoryError(
          f'The repository at {place} of the image {self._instance.image} could not be taken: '
          f'{result.stderr.decode(errors="replace")[-500:]}')
    if git:
      run_script(box, python, 'lose', '.')


def files_at(path: str, commit: str) -> dict[str, Entry]:
  """Every file of a commit, read from a repository or a bundle. Raises RepositoryError."""
  with tempfile.TemporaryDirectory(prefix='swe-') as scratch:
    if os.path.isfile(path):
      _git(['clone', '-q', '--bare', path, scratch + '/bundle'], scratch)
      path = scratch + '/bundle'
    _git(['rev-parse', '-q', '--verify', f'{commit}^{{commit}}'], path, what=f'There is no commit {commit} in {path}')
    listing = _git(['ls-tree', '-r', '-z', '--full-tree', commit], path)
    rows = [row.split(b'\t', 1) for row in listing.split(b'\0') if row]
    heads = [head.split() for head, _ in rows]
    blobs = [sha for _, kind, sha in heads if kind == b'blob']
    contents = _blobs(path, blobs)
  files = {}
  for (mode, kind, sha), (_, name) in zip(heads, rows):
    try:
      name = patches.check_path(os.fsdecode(name))
    except patches.PatchError as error:
      raise RepositoryError(f'{path} at {commit}: {error}.') from None
    files[name] = Entry(int(mode, 8), contents[sha] if kind == b'blob' else b'')
  return files


def _git(words: Sequence[str], folder: str, *, data: bytes = b'', what: str = '') -> bytes:
  env = {'PATH': os.environ.get('PATH', os.defpath), 'HOME': '/nonexistent', 'GIT_CONFIG_NOSYSTEM': '1', 'GIT_CONFIG_GLOBAL': os.devnull,
         'GIT_TERMINAL_PROMPT': '0', 'GIT_NO_LAZY_FETCH': '1', 'GIT_OPTIONAL_LOCKS': '0', 'LC_ALL': 'C'}
  try:
    done = subprocess.run([*GIT, *words], cwd=folder, env=env, input=data, capture_output=True, timeout=GIT_S)
  except FileNotFoundError:
    raise RepositoryError('git is not installed; it is needed to read repositories.') from None
  except subprocess.TimeoutExpired:
    raise RepositoryError(f'git {words[0]} in {folder} took more than {GIT_S:g} s.') from None
  if done.returncode:
    told = done.stderr.decode(errors='replace').strip()[-400:]
    raise RepositoryError(f'{what or f"git {words[0]} failed in {folder}"}{f": {told}" if told else ""}.')
  return done.stdout


def _blobs(path: str, names: Sequence[bytes]) -> dict[bytes, bytes]:
  names = list(dict.fromkeys(names))
  stream = _git(['cat-file', '--batch'], path, data=b''.join(name + b'\n' for name in names))
  found, at = {}, 0
  for name in names:
    end = stream.index(b'\n', at)
    head = stream[at:end].split()
    if len(head) != 3 or head[1] != b'blob':
      raise RepositoryError(f'{path}: object {name.decode()} is missing.')
    size = int(head[2])
    found[name] = stream[end + 1:end + 1 + size]
    at = end + size + 2
  return found


# --- Bases are made once in a process --------------------------------------------------------------------------------------------


class Bases:
  """The bases of a process, by what decides their content. Everything is deleted when the process ends."""

  def __init__(self):
    self._lock = threading.Lock()
    self._locks: dict[str, threading.Lock] = {}
    self._found: dict[str, Base] = {}
    self._folder: pathlib.Path | None = None

  def get(self, instance: Instance, open_box: Any, python: str) -> Base:
    """`open_box`: makes a new box of the instance, for repositories in images. Raises RepositoryError."""
    content = [instance.path, instance.base_commit, instance.image, instance.repo_path, dict(instance.files)]
    key = hashlib.sha256(json.dumps(content, sort_keys=True).encode('utf-8', 'surrogatepass')).hexdigest()[:24]
    with self._lock:
      lock = self._locks.setdefault(key, threading.Lock())
    with lock:
      if key not in self._found:
        self._found[key] = self._made(instance, open_box, python, key)
      return self._found[key]

  def _made(self, instance: Instance, open_box: Any, python: str, key: str) -> Base:
    if instance.files:
      files = {path: Entry(patches.FILE, text.encode('utf-8', 'surrogatepass')) for path, text in instance.files.items()}
    elif instance.path:
      files = files_at(instance.path, instance.base_commit)
    else:
      with open_box() as box:
        return ImageBase(instance, box, python)
    folder = self.folder() / key
    try:
      return FolderBase(files, folder)
    except BaseException:
      shutil.rmtree(folder, ignore_errors=True)
      raise

  def folder(self) -> pathlib.Path:
    """A folder of this process."""
    with self._lock:
      if self._folder is None or not self._folder.is_dir():
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix='swe-bases-'))
        atexit.register(_remove, str(self._folder), os.getpid())
      return self._folder


def _remove(folder: str, process: int) -> None:
  if os.getpid() == process:
    shutil.rmtree(folder, ignore_errors=True)


# --- Boxes -----------------------------------------------------------------------------------------------------------------------


def run_script(box: Any, python: str, *words: str, data: bytes = b'') -> bool:
  """Runs the tree script in the repository of a box; whether it went well."""
  result = box.run([python, '-I', '-c', SCRIPT, *words], stdin=data, cwd=ROOT, time_s=300.0)
  return result.ending == 'exited' and result.exit_code == 0


def place(box: Any, python: str, change: Mapping[str, Entry | None]) -> bool:
  """Writes a change into the repository of a box in which nothing of the policy has run yet; False where the box cannot."""
  if all(entry is not None and entry.mode in (patches.FILE, patches.EXECUTABLE) for entry in change.values()):
    try:
      for path, entry in change.items():
        box.write(f'{ROOT}/{path}', entry.data, mode=entry.mode & 0o777)
      return True
    except OSError:
      pass  # Through a link, or where a folder is: the script sees to it.
  coded = {_latin(path): None if entry is None else [entry.mode, base64.b64encode(entry.data).decode()] for path, entry in change.items()}
  return not coded or run_script(box, python, 'put', '.', data=json.dumps(coded).encode())


def _latin(path: str) -> str:
  return os.fsencode(path).decode('latin-1')


def _unlatin(path: str) -> str:
  return os.fsdecode(path.encode('latin-1'))


def _listing(box: Any, python: str) -> dict[str, tuple[int, int, str]]:
  """(mode, size, sha1) of every file in the repository of a box; nothing where the box has been made unable to tell."""
  run_script(box, python, 'list', '.', '../.swe_out')
  found = {}
  for path, value in _read_json(box).items():
    try:
      mode, size, sha = value
      if mode in patches.MODES and isinstance(size, int) and isinstance(sha, str):
        found[patches.check_path(_unlatin(path))] = (mode, size, sha)
    except (ValueError, TypeError):
      continue
  return found


def take(box: Any, python: str, paths: Iterable[str]) -> dict[str, Entry]:
  """Files of a box, as they are now."""
  asked = {_latin(path): path for path in paths}
  run_script(box, python, 'take', '.', '../.swe_out', data=json.dumps(list(asked)).encode())
  found = {}
  for path, value in _read_json(box).items():
    try:
      mode, data = value
      if path in asked and mode in (patches.FILE, patches.EXECUTABLE, patches.LINK):
        found[asked[path]] = Entry(mode, base64.b64decode(data, validate=True))
    except (ValueError, TypeError):
      continue
  return found


def _read_json(box: Any) -> dict[str, Any]:
  """What the script wrote. The policy owns the box and may have written anything."""
  try:
    value = json.loads(box.read(OUT, max_bytes=MAX_LISTING))
  except (OSError, ValueError, RecursionError):
    return {}
  return value if isinstance(value, dict) else {}


def extract(box: Any, python: str, base: Base) -> tuple[Change, dict[str, str]]:
  """What the policy changed in its box, and which changes are left out, with the reason of each."""
  now = _listing(box, python)
  if not now:
    return {}, {ROOT: 'the repository is gone'}
  left: dict[str, str] = {}
  wanted, total = [], 0
  for path in sorted(now):
    mode, size, sha = now[path]
    if base.manifest.get(path) == (mode, sha):
      continue
    total += size
    if path not in base.manifest and is_ignored(path):
      total -= size
    elif size > MAX_FILE or not sha:
      left[path] = f'{size} bytes; a file may have {MAX_FILE}'
    elif total > MAX_TOTAL or len(wanted) >= MAX_CHANGED:
      left[path] = f'the change is too large: {MAX_CHANGED} files and {MAX_TOTAL} bytes are taken'
    else:
      wanted.append(path)
  change: Change = dict(take(box, python, wanted)) if wanted else {}
  for path in base.manifest:
    if path not in now:
      change[path] = None
  return change, left


def is_ignored(path: str) -> bool:
  return any(fnmatch.fnmatchcase(part, pattern) for part in path.split('/') for pattern in IGNORED)
