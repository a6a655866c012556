"""The ways to make a box: each starts a warden and gives the host the ends of a connection to it.

    namespaces   Linux namespaces made by a keeper process (`inside/launch.py`); root and unprivileged users
    bubblewrap   the same through `bwrap`, where it is installed
    container    `docker` or `podman` by their command line
    plain        no isolation at all: limits and an end to what is left behind, nothing else
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import logging
import os
import pathlib
import select
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from typing import Any, Sequence

from sao_jax.sandbox import base
from sao_jax.sandbox.inside import files, proc, wire

START_S = 60.0  # For a box to be ready, on a machine that is busy.
INSIDE = pathlib.Path(__file__).resolve().parent / 'inside'
PATH = '/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin'
PACKAGES = '/opt/packages'
_OTHER_USER = 0x6FFFFFFF  # What root starts bubblewrap as: root in a box would be root of the host, only without capabilities.
ENVIRONMENT = {'HOME': files.FOLDER, 'TMPDIR': '/tmp', 'LANG': 'C.UTF-8', 'USER': 'box', 'LOGNAME': 'box', 'TERM': 'dumb'}


# Runs a module of `inside` without the package around it, which neither a box nor a quick start has: its folder, its name, its arguments.
BOOT = """
import importlib, sys, types
for name, path in ('sao_jax', []), ('sao_jax.sandbox', []), ('sao_jax.sandbox.inside', [sys.argv[1]]):
  sys.modules[name] = types.ModuleType(name)
  sys.modules[name].__path__ = path
importlib.import_module('sao_jax.sandbox.inside.' + sys.argv[2]).main(*sys.argv[3:])
"""


class Keeper:
  """The first process of a box, which is no child of this one; what is used of `subprocess.Popen`."""

  stderr = None

  def __init__(self):
    self.pid, self._handle = 0, -1

  def found(self, pid: int) -> None:
    self.pid = pid
    with contextlib.suppress(ProcessLookupError):  # It ended at once.
      self._handle = os.pidfd_open(pid)

  def poll(self) -> int | None:
    """0 when it has ended."""
    try:
      self.wait(0.0)
    except subprocess.TimeoutExpired:
      return None
    return 0

  def wait(self, timeout: float) -> int:
    if self._handle >= 0:
      poll = select.poll()
      poll.register(self._handle, select.POLLIN)
      if not poll.poll(timeout * 1000.0):
        raise subprocess.TimeoutExpired('keeper', timeout)
      os.close(self._handle)
      self._handle = -1
    return 0

  def kill(self) -> None:
    if self._handle >= 0:
      with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(self._handle, signal.SIGKILL)


@dataclasses.dataclass
class Connection:
  """A started warden.

  Attributes:
    process: ends when the box does, and ending it ends the box.
    reader, writer: descriptors to it, one and the same where it is a socket.
    folder: of the host, to be removed after the end.
    container: command that ends the container.
    busy: held while the descriptors are used, and while they are closed: the next file that is opened gets their numbers.
  """

  process: subprocess.Popen | Keeper
  reader: int
  writer: int
  backend: str
  folder: str | None = None
  container: tuple[str, ...] = ()
  busy: Any = dataclasses.field(default_factory=threading.RLock)

  def end(self) -> None:
    """Ends the box and all that runs in it; waits until its first process is gone. A request of another thread finds the box gone."""
    with contextlib.ExitStack() as last:
      last.callback(self._release)
      last.callback(self._wait)
      if self.reader == self.writer:  # Else they are pipes, which end with the container.
        hang_up(self.reader)
      if self.container:
        subprocess.run(self.container, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=60, check=False)

  def _wait(self) -> None:
    try:
      self.process.wait(5.0 if self.backend in ('plain', 'container') else 0.5)  # It goes by itself when the host has hung up.
    except subprocess.TimeoutExpired:
      self.process.kill()
      self.process.wait(30.0)

  def _release(self) -> None:
    """Closes the host's ends. A request that uses them ends now, since the other end is gone."""
    if self.busy.acquire(timeout=60.0):
      for descriptor in {self.reader, self.writer}:
        os.close(descriptor)
      self.busy.release()
    if self.process.stderr is not None:
      self.process.stderr.close()
    if self.folder:
      shutil.rmtree(self.folder, ignore_errors=True)


def hang_up(descriptor: int) -> None:
  """Ends a socket for both sides, for every process and thread that has it; the descriptor stays."""
  end = socket.socket(fileno=descriptor)
  with contextlib.suppress(OSError):  # The other side has hung up before.
    end.shutdown(socket.SHUT_RDWR)
  end.detach()


@dataclasses.dataclass(frozen=True)
class Plan:
  """What a box is to be."""

  limits: base.Limits
  mounts: tuple[base.Mount, ...]
  env: dict[str, str]
  image: str
  packages: bool


def connect(backend: str, plan: Plan) -> Connection:
  """A warden that is ready. Raises Unavailable."""
  return {'namespaces': _namespaces, 'bubblewrap': _bubblewrap, 'container': _container, 'plain': _plain}[backend](plan)


# --- Pythons and packages --------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def _interpreter() -> tuple[str, tuple[tuple[str, str], ...]]:
  """(the interpreter's path in a box, [folder of the host, where it is shown] that it needs beyond the system)."""
  binary = pathlib.Path(getattr(sys, '_base_executable', None) or sys.executable)
  prefix = pathlib.Path(sys.base_prefix).resolve()
  name = f'python{sys.version_info[0]}.{sys.version_info[1]}'
  found = next((p for p in (prefix / 'bin' / name, binary.resolve(), prefix / 'bin' / 'python3') if p.exists()), None)
  if found is None:
    raise base.Unavailable(f'The Python installation of this process was not found below {prefix}.')
  if prefix.is_relative_to('/usr'):
    return str(found), ()
  if prefix.parts[1] in ('box', 'tmp', 'proc', 'dev', 'sys', 'etc', 'run', 'var') or str(prefix).startswith('/opt/box'):
    raise base.Unavailable(
        f'The Python installation lies in {prefix}, where a box has a folder of its own; start from one elsewhere (/usr, /opt, a home).')
  return str(found), ((str(prefix), str(prefix)),)


def site_packages() -> str:
  """The folder of the packages of this interpreter, for `packages=True`."""
  return str(pathlib.Path(sysconfig.get_paths()['purelib']).resolve())


def _packages_of_installation() -> list[str]:
  """Folders of packages inside the Python installation itself, where this process runs without a virtual environment."""
  paths = sysconfig.get_paths(vars={'base': sys.base_prefix, 'platbase': sys.base_prefix})
  folders = {os.path.realpath(paths[name]) for name in ('purelib', 'platlib')}
  return sorted(f for f in folders if os.path.isdir(f))


def _common(plan: Plan) -> tuple[str, list[list[Any]], dict[str, Any]]:
  """(interpreter, mounts, settings of the warden) of a box on this host's system."""
  python, shown = _interpreter()
  mounts: list[list[Any]] = [[source, target, False] for source, target in shown]
  if plan.packages:
    mounts.append([site_packages(), PACKAGES, False])
  mounts += [[m.real_source, m.target, m.writable] for m in plan.mounts]
  environment = ENVIRONMENT | {'PATH': f'{pathlib.Path(python).parent}:{PATH}'}
  if plan.packages:
    environment['PYTHONPATH'] = PACKAGES
  settings = {
      'work': files.FOLDER, 'python': python, 'inside': '/opt/box', 'boot': BOOT, 'packages': [PACKAGES] * plan.packages,
      'kill': 'namespace', 'confine': True, 'nice': plan.limits.nice, 'environment': environment | plan.env,
      'count_processes': os.geteuid() == 0 or _release() >= (5, 14)}
  return python, mounts, settings


def _release() -> tuple[int, ...]:
  """Version of the kernel: since 5.14 a user namespace counts its own processes."""
  return tuple(int(x) for x in os.uname().release.split('-')[0].split('.')[:2] if x.isdigit())


def _start(argv: Sequence[str], backend: str, *, pipes: bool = False, cwd: str = '/', user: int | None = None, **values: Any) -> Connection:
  """Starts a process that becomes a warden, on a socket given to it in the place of '{socket}', or on its input and
  output; as another user where `user` says so."""
  environment = {'PATH': PATH, 'LANG': 'C.UTF-8'}
  if pipes:
    environment = {k: v for k, v in os.environ.items() if k in ('PATH', 'HOME', 'DOCKER_HOST', 'DOCKER_CONFIG', 'XDG_RUNTIME_DIR')}
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, bufsize=0,
                               start_new_session=True)
    reader, writer = os.dup(process.stdout.fileno()), os.dup(process.stdin.fileno())
    process.stdout.close()
    process.stdin.close()
    return Connection(process, reader, writer, backend, **values)
  ours, theirs = socket.socketpair()
  try:
    with theirs:
      number = str(theirs.fileno())
      argv = [number if a == '{socket}' else a for a in argv]
      process = subprocess.Popen(
          argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
          stderr=subprocess.PIPE if backend == 'bubblewrap' else subprocess.DEVNULL, pass_fds=(theirs.fileno(),), cwd=cwd,
          env=environment, start_new_session=True, user=user, group=user, extra_groups=None if user is None else ())
  except (OSError, subprocess.SubprocessError) as error:
    ours.close()
    raise base.Unavailable(f'{argv[0]} cannot be started: {error}') from error
  descriptor = ours.detach()
  os.set_blocking(descriptor, False)
  return Connection(process, descriptor, descriptor, backend, **values)


def _boot(folder: str | pathlib.Path, module: str, *arguments: str) -> list[str]:
  """Arguments of a Python that runs a module of `inside`."""
  return ['-I', '-S', '-B', '-c', BOOT, str(folder), module, *arguments]


def _greet(connection: Connection, header: dict[str, Any], patience_s: float = START_S) -> Connection:
  """Sends the settings and waits until the warden is ready.

  Raises:
    Unavailable: it says that there can be no box, and why, or ends.
    SandboxError: it has said nothing in time, which is no reason to think that there can be none.
  """
  deadline = time.monotonic() + patience_s
  try:
    wire.send(connection.writer, header, (), deadline)
    frame = wire.receive(connection.reader, 0, deadline)
    reason = 'it ended without a word' if frame is None else frame[0].get('refused', '')
  except wire.Late as error:
    connection.process.kill()
    connection.end()
    raise base.SandboxError(f'No box by {connection.backend} was ready within {patience_s:g} s.') from error
  except wire.WireError as error:
    frame, reason = None, str(error)
  if frame is not None and frame[0].get('ready') is True:
    if isinstance(connection.process, Keeper):
      connection.process.found(frame[0]['keeper'])
    return connection
  errors = b''
  if connection.process.stderr is not None:
    connection.process.kill()
    errors = connection.process.stderr.read(2000)
  connection.end()
  said = errors.decode(errors='replace').strip()
  raise base.Unavailable(f'No box by {connection.backend}: {reason}{f" ({said})" if said else ""}')


# --- The foundry of namespaces ---------------------------------------------------------------------------------------------------


_foundries: dict[int, tuple[subprocess.Popen, socket.socket]] = {}  # Process -> its foundry: one that was forked from it has its own.
_foundry_lock = threading.Lock()


def _foundry() -> Connection:
  """A connection to a box that is to be made. Starts the foundry where there is none, or it has ended. Raises Unavailable."""
  ours, theirs = socket.socketpair()
  with theirs, _foundry_lock:
    for again in (True, False):
      process, orders = _foundries.get(os.getpid()) or _start_foundry()
      try:
        socket.send_fds(orders, [b'+'], [theirs.fileno()])
        break
      except OSError as error:
        del _foundries[os.getpid()]
        orders.close()
        process.kill()
        process.wait()
        if not again:
          ours.close()
          raise base.Unavailable(f'No box by namespaces: the foundry ends ({error})') from error
  descriptor = ours.detach()
  os.set_blocking(descriptor, False)
  return Connection(Keeper(), descriptor, descriptor, 'namespaces')


def _start_foundry() -> tuple[subprocess.Popen, socket.socket]:
  connection = _start([sys.executable, *_boot(INSIDE, 'launch', '{socket}', str(os.getpid()))], 'foundry')
  if not _foundries:
    atexit.register(_end_foundry)
  orders = socket.socket(fileno=connection.reader)
  orders.setblocking(True)
  _foundries[os.getpid()] = connection.process, orders
  return _foundries[os.getpid()]


def _end_foundry() -> None:
  process, orders = _foundries.pop(os.getpid(), (None, None))
  if process is not None:
    hang_up(orders.fileno())  # A process that was forked from this one may have it, too.
    orders.close()
    process.wait()


# --- The four ------------------------------------------------------------------------------------------------------------------


def _namespaces(plan: Plan) -> Connection:
  if sys.platform != 'linux':
    raise base.Unavailable(f'Namespaces are a matter of Linux; this is {sys.platform}. Use the container backend.')
  python, mounts, settings = _common(plan)
  connection = _foundry()
  return _greet(connection, {
      'disk_mb': plan.limits.disk_mb, 'mounts': mounts, 'inside': str(INSIDE), 'warden': settings,
      'covered': [] if plan.packages else _packages_of_installation(), 'readable': _folders(python, mounts)})


def _folders(python: str, mounts: Sequence[Sequence[Any]]) -> list[str]:
  """What the user of the box must be able to enter: the interpreter, and the folders shown to it."""
  return [python, '/opt/box', *(target for source, target, _ in mounts if os.path.isdir(source))]


def _bubblewrap(plan: Plan) -> Connection:
  bwrap = shutil.which('bwrap')
  if bwrap is None:
    raise base.Unavailable('bubblewrap (bwrap) is not installed.')
  python, mounts, settings = _common(plan)
  argv = [bwrap, '--unshare-all', '--unshare-user', '--uid', '1000', '--gid', '1000', '--as-pid-1', '--new-session',
          '--cap-drop', 'ALL', '--hostname', 'box', '--clearenv']
  for path in ('/usr', '/bin', '/sbin', '/lib', '/lib32', '/lib64', '/nix/store'):
    if os.path.islink(path):
      argv += ['--symlink', os.readlink(path), path]
    elif os.path.isdir(path):
      argv += ['--ro-bind', path, path]
  for name in ('ld.so.cache', 'alternatives', 'localtime', 'ssl/certs', 'os-release'):
    argv += ['--ro-bind-try', f'/etc/{name}', f'/etc/{name}']
  argv += ['--proc', '/proc', '--dev', '/dev', '--ro-bind', str(INSIDE), '/opt/box']
  for name in proc.COVERED:
    if os.path.exists('/proc/' + name):
      argv += ['--ro-bind', '/dev/null', '/proc/' + name]
  for path in (files.FOLDER, '/tmp', '/dev/shm'):
    argv += ['--size', str(plan.limits.disk_mb << 20), '--tmpfs', path]
  for source, target, writable in mounts:
    argv += ['--bind' if writable else '--ro-bind', source, target]
  for path in [] if plan.packages else _packages_of_installation():
    argv += ['--tmpfs', path, '--remount-ro', path]
  argv += ['--remount-ro', '/dev', '--remount-ro', '/', '--chdir', files.FOLDER, '--', python]
  argv += _boot('/opt/box', 'warden', '{socket}', '{socket}')
  settings['count_processes'] = _release() >= (5, 14)  # Before, the user's other processes would count.
  return _greet(_start(argv, 'bubblewrap', user=_OTHER_USER if os.geteuid() == 0 else None), {'warden': settings})


def _container(plan: Plan) -> Connection:
  program = next((p for p in map(shutil.which, ('docker', 'podman')) if p), None)
  if program is None:
    raise base.Unavailable('Neither docker nor podman is installed.')
  if not plan.image:
    raise ValueError("The container backend needs image='NAME'; any image with Python 3.9 or later will do.")
  try:
    found = subprocess.run([program, 'info', '--format', '{{json .ID}}'] if 'docker' in program else [program, 'info', '--format', 'json'],
                           capture_output=True, timeout=60, check=False)
  except subprocess.TimeoutExpired:
    raise base.SandboxError(f'{program} gave no answer within 60 s.') from None
  if found.returncode:
    raise base.Unavailable(f'{program} answers no: {(found.stderr or found.stdout).decode(errors="replace").strip()[:500]}')
  name, limits = f'sao-box-{os.getpid()}-{os.urandom(6).hex()}', plan.limits
  argv = [
      program, 'run', '--rm', '-i', '--name', name, '--pull', 'missing', '--network', 'none', '--cap-drop', 'ALL', '--security-opt',
      'no-new-privileges', '--pids-limit', str(limits.processes + 4), '--memory', f'{limits.memory_mb + limits.disk_mb}m', '--memory-swap',
      f'{limits.memory_mb + limits.disk_mb}m', '--hostname', 'box', '--ipc', 'private', '--workdir', '/', '--log-driver', 'none', '--tmpfs',
      f'{files.FOLDER}:rw,exec,nosuid,nodev,size={limits.disk_mb}m,mode=1777', '--tmpfs',
      f'/tmp:rw,exec,nosuid,nodev,size={limits.disk_mb}m,mode=1777',
      '--volume', f'{INSIDE}:/opt/box:ro']
  for mount in plan.mounts:
    argv += ['--volume', f'{mount.real_source}:{mount.target}{"" if mount.writable else ":ro"}']
  argv += ['--entrypoint', 'python3', plan.image, *_boot('/opt/box', 'warden', '0', '1')]
  connection = _start(argv, 'container', pipes=True, container=(program, 'rm', '--force', name))
  settings = {
      'work': files.FOLDER, 'python': 'python3', 'inside': '/opt/box', 'boot': BOOT, 'packages': [], 'kill': 'namespace',
      'confine': True, 'nice': plan.limits.nice, 'environment': {'PATH': PATH} | ENVIRONMENT | plan.env, 'count_processes': False}
  return _greet(connection, {'warden': settings}, 600.0)  # The image may have to be fetched.


def _plain(plan: Plan) -> Connection:
  logging.getLogger(__name__).warning(
      'NO ISOLATION: this box is a plain process. What runs in it sees the files, the network and the processes of this user. Use the '
      'backend "namespaces", "bubblewrap" or "container" for code that is not trusted.')
  if plan.mounts:
    raise ValueError('The plain backend has no mounts: what runs in it sees all files of this user anyway.')
  folder = tempfile.mkdtemp(prefix='sao-box-')
  os.mkdir(os.path.join(folder, 'box'))
  os.mkdir(os.path.join(folder, 'tmp'))
  environment = ENVIRONMENT | {
      'HOME': folder + '/box', 'TMPDIR': folder + '/tmp', 'PATH': f'{pathlib.Path(sys.executable).parent}:{PATH}'} | plan.env
  settings = {
      'work': folder + '/box', 'python': sys.executable, 'inside': str(INSIDE), 'boot': BOOT, 'packages': [],
      'kill': 'children', 'confine': False, 'nice': plan.limits.nice, 'environment': environment, 'count_processes': False}
  argv = [sys.executable, *_boot(INSIDE, 'warden', '{socket}', '{socket}')]
  return _greet(_start(argv, 'plain', folder=folder, cwd=folder + '/box'), {'warden': settings})
