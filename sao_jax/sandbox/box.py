"""A box from the host's side: `Box` asks its warden, `PythonSession` is an interpreter that stays, `open` makes a box.

A box does one thing at a time; calls from several threads wait for each other. `close` may be called at any time, also while a call of
another thread runs, which then raises SandboxError.
"""

from __future__ import annotations

import itertools
import logging
import os
import pathlib
import time
import weakref
from typing import Any, Mapping, Sequence

from sao_jax.sandbox import backends, base
from sao_jax.sandbox.inside import files, wire

BACKENDS = ('auto', 'bubblewrap', 'namespaces', 'container', 'plain')
GRACE_S = 30.0  # Beyond a command's own limit, for the warden to end it and to answer, on a machine that is busy.
FILES_S = 120.0  # Of one file operation.
CHUNK = 8 << 20  # Bytes of one request or answer with contents of files.

_works: list[str] = []  # The backend that 'auto' has settled on in this process.


def open(  # pylint: disable=redefined-builtin
    backend: str = 'auto', *, image: str = '', limits: base.Limits = base.Limits(), mounts: Sequence[base.Mount] = (),
    env: Mapping[str, str] | None = None, packages: bool = False,
) -> Box:
  """A new box.

  Args:
    backend: 'auto' (bubblewrap where it is installed and works, else namespaces), or one of them by name; 'container'; 'plain', which
      isolates nothing and says so in the log.
    image: of the backend 'container'.
    limits: what it may use.
    mounts: files and folders of the host to show in it.
    env: environment variables of what runs in it, besides a few of the box's own. Nothing of this process's environment is there.
    packages: whether the packages of this process's Python can be imported in it (read-only); its standard library always can.

  Raises:
    Unavailable: where this cannot be had here.
    ValueError: wrong arguments.
  """
  if backend not in BACKENDS:
    raise ValueError(f'backend must be one of {", ".join(BACKENDS)}, got {backend!r}.')
  if image and backend != 'container':
    raise ValueError(f"An image is for backend='container', got image={image!r} with backend={backend!r}.")
  variables = dict(env or {})
  if not all(isinstance(k, str) and isinstance(v, str) and k and '=' not in k and '\0' not in k + v for k, v in variables.items()):
    raise ValueError('env must map names to texts, without "=" in a name and zero bytes.')
  plan = backends.Plan(limits, tuple(mounts), variables, image, packages)
  if backend != 'auto':
    return Box(backends.connect(backend, plan), limits)
  reasons = []
  for name in _works or ('bubblewrap', 'namespaces'):
    try:
      box = Box(backends.connect(name, plan), limits)
    except base.Unavailable as error:
      reasons.append(str(error))
      continue
    _works[:] = [name]
    return box
  raise base.Unavailable(
      'No isolated box can be made here. ' + ' '.join(reasons) + " Allow user namespaces, install bubblewrap, or use backend='container'; "
      "backend='plain' runs without any isolation.")


class Box:
  """Runs commands and Python code that are not trusted. Use `open`.

  Attributes:
    backend: how it is isolated.
    limits: its limits, unless a call says otherwise.
  """

  def __init__(self, connection: backends.Connection, limits: base.Limits):
    self.backend, self.limits = connection.backend, limits
    self._connection = connection
    self._numbers = itertools.count(1)
    self._finish = weakref.finalize(self, _end, connection)

  def __enter__(self) -> Box:
    return self

  def __exit__(self, *_: Any) -> None:
    self.close()

  @property
  def closed(self) -> bool:
    return not self._finish.alive

  def close(self) -> None:
    """Ends the box and all that runs in it. Nothing of it is left; the second time nothing happens."""
    self._finish()

  # --- Commands ---------------------------------------------------------------------------------------------------------------

  def run(
      self, argv: Sequence[str], *, stdin: bytes = b'', cwd: str = files.FOLDER, time_s: float | None = None,
      env: Mapping[str, str] | None = None, limits: base.Limits | None = None,
  ) -> base.Result:
    """Runs a command to its end or its limit, and ends whatever it leaves behind (Python sessions stay).

    Args:
      argv: program and arguments; no shell takes part. A program that is not there is a result with exit code 127.
      stdin: what it can read.
      cwd: folder that it starts in.
      time_s: wall time, instead of the limits' own.
      env: further environment variables.
      limits: instead of the box's (`disk_mb` stays the box's).

    Raises:
      SandboxError: the box failed; it is closed.
      ValueError: wrong arguments.
    """
    argv = _argv(argv)
    limits, seconds = self._limits(limits, time_s)
    header, blobs = self._ask(
        {'op': 'run', 'argv': argv, 'cwd': cwd, 'env': dict(env or {}), 'time_s': seconds, 'limits': limits.settings()}, [bytes(stdin)],
        seconds + GRACE_S, 2 * limits.output_bytes + 1000)
    try:
      ending, code, cut = str(header['ending']), int(header['code']), [bool(c) for c in header['cut']]
      if ending not in base.ENDINGS:
        raise ValueError(f'the ending {ending!r:.40}')
      return base.Result(blobs[0], blobs[1], code, ending, float(header['seconds']), *cut)
    except (KeyError, TypeError, ValueError, IndexError) as error:
      raise self._broken(f'an answer that cannot be read: {error}') from error

  def python(self, *, cwd: str = files.FOLDER, env: Mapping[str, str] | None = None, limits: base.Limits | None = None) -> PythonSession:
    """An interpreter in the box whose state stays between calls. Raises SandboxError where it cannot be started."""
    limits, _ = self._limits(limits, None)
    number = next(self._numbers)
    header, _ = self._ask(
        {'op': 'python', 'id': number, 'cwd': cwd, 'env': dict(env or {}), 'limits': limits.settings()}, [], GRACE_S, 0)
    if 'trouble' in header:
      raise base.SandboxError(f'No Python session: {header["trouble"]}')
    return PythonSession(self, number, limits)

  # --- Files ------------------------------------------------------------------------------------------------------------------

  def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
    """Writes a file of the work folder, making folders on the way. Raises PathError."""
    self._write([([path, mode, 'file'], bytes(data))])

  def read(self, path: str, max_bytes: int = 64 << 20) -> bytes:
    """Contents of a regular file of the work folder. Raises PathError, also where it is larger than `max_bytes` or behind a link."""
    base.check_range('max_bytes', max_bytes, 0, 1 << 34)
    first = min(max_bytes, CHUNK)
    if max_bytes <= CHUNK:
      return self._file({'op': 'read', 'entries': [[path, 0, first, True]]}, [], first)[1][0]
    data = b''
    while True:
      part = self._file({'op': 'read', 'entries': [[path, len(data), CHUNK, False]]}, [], CHUNK)[1][0]
      data += part
      if len(data) > max_bytes:
        raise base.PathError(f'{path!r} has more than {max_bytes} bytes.')
      if len(part) < CHUNK:
        return data

  def put_folder(self, host_folder: str | os.PathLike[str], path: str) -> None:
    """Copies a folder of the host into the work folder, with its links as they are. Raises PathError."""
    top = pathlib.Path(host_folder)
    if not top.is_dir():
      raise ValueError(f'put_folder needs a folder of the host, got {str(host_folder)!r}.')
    self._write(_entries_of(top, path))

  def get_folder(self, path: str, host_folder: str | os.PathLike[str], max_bytes: int = 1 << 30) -> int:
    """Copies a folder of the work folder into a new, or empty, folder of the host; the bytes of its files.

    Regular files, folders, and links that stay inside of what is copied; everything else is left out. Raises PathError, also where there
    is more than `max_bytes`.
    """
    target = pathlib.Path(host_folder)
    target.mkdir(parents=True, exist_ok=True)
    if any(target.iterdir()):
      raise ValueError(f'get_folder needs a new or empty folder, {str(host_folder)!r} holds something.')
    header, _ = self._file({'op': 'list', 'path': path}, [], 0)
    try:
      entries = [(_relative(str(n)), str(k), int(m), int(s), str(t)) for n, k, m, s, t in header['entries']]
    except (KeyError, TypeError, ValueError) as error:
      raise self._broken(f'a listing that cannot be read: {error}') from error
    total = sum(size for _, kind, _, size, _ in entries if kind == 'file')
    if total > max_bytes:
      raise base.PathError(f'{path!r} holds {total} bytes, at most {max_bytes} were asked for.')
    for name, kind, _, _, _ in entries:
      if kind == 'folder':
        (target / name).mkdir()
    self._fetch(path, target, [e for e in entries if e[1] == 'file'])
    for name, kind, _, _, link in entries:
      if kind == 'link' and _stays_inside(name, link):
        os.symlink(link, target / name)
    return total

  def _fetch(self, path: str, target: pathlib.Path, entries: list[tuple[str, str, int, int, str]]) -> None:
    """Files of a listing, several small ones at a time. Their folders were made just now, so no link is in the way."""
    batch: list[tuple[str, int, int]] = []
    room = CHUNK
    for name, _, mode, size, _ in [*entries, ('', '', 0, 0, '')]:
      if batch and (not name or size > room or len(batch) >= 500):
        wanted = [[f'{path.rstrip("/")}/{n}', 0, s, False] for n, s, _ in batch]
        blobs = self._file({'op': 'read', 'entries': wanted}, [], CHUNK)[1]
        for (n, _, m), blob in zip(batch, blobs, strict=True):
          _new_file(target / n, blob, m)
        batch, room = [], CHUNK
      if not name:
        break
      if size > CHUNK:
        _new_file(target / name, self.read(f'{path.rstrip("/")}/{name}', size + CHUNK), mode)
      else:
        batch.append((name, size, mode))
        room -= size

  def _write(self, entries: Any) -> None:
    """Writes ([path, mode, kind] or [path, mode, kind, extra], data) each, in requests of at most about `CHUNK` bytes."""
    batch: list[Any] = []
    blobs: list[bytes] = []
    size = 0
    for entry, data in entries:
      for offset in range(0, max(1, len(data)), CHUNK):
        piece = data[offset:offset + CHUNK]
        if batch and (size + len(piece) > CHUNK or len(batch) >= 2000):
          self._file({'op': 'write', 'entries': batch}, blobs, 0)
          batch, blobs, size = [], [], 0
        batch.append(entry if len(entry) == 4 else [*entry, offset])
        blobs.append(piece)
        size += len(piece)
    if batch:
      self._file({'op': 'write', 'entries': batch}, blobs, 0)

  def _file(self, header: dict[str, Any], blobs: list[bytes], limit: int) -> tuple[dict[str, Any], list[bytes]]:
    answer, data = self._ask(header | {'time_s': FILES_S}, blobs, FILES_S + GRACE_S, limit)
    if 'refusal' in answer:
      number = answer.get('errno')
      raise base.PathError(*([number, str(answer['refusal'])] if isinstance(number, int) else [str(answer['refusal'])]))
    if header['op'] == 'read' and len(data) != len(header['entries']):
      raise self._broken('an answer with other files than asked for')
    return answer, data

  # --- The warden -------------------------------------------------------------------------------------------------------------

  def _limits(self, limits: base.Limits | None, time_s: float | None) -> tuple[base.Limits, float]:
    limits = self.limits if limits is None else limits
    if time_s is not None:
      base.check_range('time_s', time_s, 0.01, 86_400.0)
    return limits, limits.time_s if time_s is None else float(time_s)

  def _ask(self, header: dict[str, Any], blobs: list[bytes], patience_s: float, limit: int) -> tuple[dict[str, Any], list[bytes]]:
    """One request and its answer. Raises SandboxError, and closes the box, where there is none in time."""
    try:
      data = wire.packed(header, blobs)
    except wire.WireError as error:
      raise ValueError(f'The request is too large: {error}.') from None
    with self._connection.busy:
      if self.closed:
        raise base.SandboxError('The box is closed.')
      deadline = time.monotonic() + patience_s
      try:
        wire.write_all(self._connection.writer, data, deadline)
        frame = wire.receive(self._connection.reader, limit, deadline)
      except (wire.WireError, OSError) as error:
        raise self._broken(str(error)) from error
      except BaseException:  # Interrupted, by Ctrl-C say: the next call would take the answer for its own.
        self.close()
        raise
      if frame is None:
        raise self._broken('its warden ended')
      if 'failed' in frame[0]:
        raise self._broken(str(frame[0]['failed']))
      return frame

  def _broken(self, reason: str) -> base.SandboxError:
    closed = self.closed
    self.close()
    return base.SandboxError('The box was closed during a call.' if closed else f'The box ({self.backend}) failed: {reason}')


class PythonSession:
  """An interpreter in a box; use `Box.python`. Its state is lost when a call passes its limit or ends the interpreter."""

  def __init__(self, box: Box, number: int, limits: base.Limits):
    self._box, self._number, self._limits = box, number, limits
    self._calls = itertools.count(1)

  def run(self, code: str, time_s: float | None = None) -> base.PythonResult:
    """Runs a piece of code. Raises SandboxError where the box failed."""
    limits, seconds = self._box._limits(self._limits, time_s)  # pylint: disable=protected-access
    header, blobs = self._box._ask(  # pylint: disable=protected-access
        {'op': 'code', 'id': self._number, 'number': next(self._calls), 'time_s': seconds, 'limits': limits.settings()},
        [code.encode('utf-8', 'replace')], seconds + GRACE_S, limits.output_bytes + (1 << 23))
    try:
      output, value, error = (blob.decode('utf-8', 'replace') for blob in blobs)
      ending, took, cut = str(header['ending']), float(header['seconds']), bool(header['cut'])
      value, error = value if header['value'] else None, error if header['error'] else None
    except (KeyError, TypeError, ValueError) as failure:
      raise self._box._broken(f'an answer that cannot be read: {failure}') from failure  # pylint: disable=protected-access
    error = error or _LOST.get(ending, '').format(seconds=seconds, limits=limits) or None
    return base.PythonResult(output, value, error, ending, cut, took)

  def close(self) -> None:
    """Ends the interpreter."""
    if not self._box.closed:
      self._box._ask({'op': 'end', 'id': self._number}, [], GRACE_S, 0)  # pylint: disable=protected-access


_LOST = {
    'time': 'TimeoutError: the code took more than {seconds:g} s; the interpreter was ended and its state is lost',
    'memory': 'MemoryError: more than {limits.memory_mb} MB were used; the interpreter was ended and its state is lost',
    'processes': 'Error: more than {limits.processes} processes; the interpreter was ended and its state is lost',
    'output': 'Error: more than {limits.flood_mb} MB of output; the interpreter was ended and its state is lost',
    'exited': 'SystemExit: the code ended the interpreter; its state is lost',
    'killed': 'Error: the interpreter crashed; its state is lost',
    'ended': 'Error: this interpreter has ended',
}


def _end(connection: backends.Connection) -> None:
  try:
    connection.end()
  except Exception:  # pylint: disable=broad-except
    logging.getLogger(__name__).exception('A box could not be ended.')


def _argv(argv: Sequence[str]) -> list[str]:
  if isinstance(argv, (str, bytes)) or not argv or not all(isinstance(a, str) for a in argv):
    raise ValueError(f'argv must be a list of one or more texts, got {argv!r:.200}.')
  return list(argv)


def _entries_of(top: pathlib.Path, path: str) -> Any:
  """What `_write` takes, for a folder of the host."""
  yield [path, 0o755, 'folder', 0], b''
  for folder, names, file_names in os.walk(top):
    inner = f'{path.rstrip("/")}/{os.path.relpath(folder, top)}'.removesuffix('/.')
    for name in names + file_names:
      full = os.path.join(folder, name)
      if os.path.islink(full):
        yield [f'{inner}/{name}', 0o777, 'link', os.readlink(full)], b''
      elif os.path.isdir(full):
        yield [f'{inner}/{name}', 0o755, 'folder', 0], b''
      elif os.path.isfile(full):
        yield [f'{inner}/{name}', os.stat(full).st_mode & 0o777 | 0o200, 'file'], pathlib.Path(full).read_bytes()


def _relative(name: str) -> str:
  """`name`. Raises ValueError unless it is a plain path below a folder."""
  parts = name.split('/')
  if not name or '\0' in name or any(p in ('', '.', '..') for p in parts) or len(parts) > files.MAX_DEPTH + 2:
    raise ValueError(f'no name of a file below a folder: {name!r:.200}')
  return name


def _stays_inside(name: str, link: str) -> bool:
  """Whether a link leads nowhere but into the folder that it is copied with: relative, with '..' at the beginning only, and not too many.

  Folders above a link are real ones, so the leading '..' lead where they seem to; a '..' further on could follow another link first.
  """
  parts = [p for p in link.split('/') if p not in ('', '.')]
  up = next((i for i, p in enumerate(parts) if p != '..'), len(parts))
  return bool(parts) and not link.startswith('/') and '..' not in parts[up:] and up <= name.count('/') and '\0' not in link


def _new_file(path: pathlib.Path, data: bytes, mode: int) -> None:
  descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
  with os.fdopen(descriptor, 'wb') as file:
    file.write(data)
    os.fchmod(file.fileno(), mode & 0o755 | 0o600)
