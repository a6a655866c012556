"""A scaffold's process: started with little of the host's environment, and ended with all that it has started, unless that hides."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import secrets
import shlex
import signal
import subprocess
import sys
import threading
from typing import Any, Mapping, Sequence

from sao_jax.environments import base, scaffold_watch

Command = str | Sequence[str]
KEPT = ('PATH', 'LANG', 'LC_ALL', 'LC_CTYPE', 'TZ', 'VIRTUAL_ENV')  # Of the host's environment; nothing else is passed on.
MARK = 'SAO_PROCESS'  # Variable by which processes that left their group are found.
TERM_S = 2.0  # Between the request to end and the end.
TAIL = 4000  # Characters of the output in messages.
_FIELD = re.compile(r'\{(\w+)\}')


class ScaffoldFailure(base.EnvironmentFailure):
  """The scaffold could not be started, or ended or hung before it asked for anything."""

  reason = 'environment_scaffold'


def check_command(name: str, command: Any) -> Command:
  """The command. Raises ValueError unless it is a text for the shell or a list of arguments."""
  if isinstance(command, str) and command.strip() and '\0' not in command:
    return command
  if isinstance(command, (list, tuple)) and command and all(isinstance(a, str) and '\0' not in a for a in command) and command[0]:
    return tuple(command)
  raise ValueError(
      f'{name} must be a text for the shell or a list of arguments, not empty and without zero bytes: got {command!r}.')


def fill(command: Command, fields: Mapping[str, Any]) -> list[str]:
  """Arguments of the command with every {name} of a field filled in, quoted where the shell reads it; other braces stay."""
  values = {name: str(value) for name, value in fields.items() if isinstance(value, (str, int, float))}
  if isinstance(command, str):
    return ['/bin/sh', '-c', _FIELD.sub(lambda m: shlex.quote(values[m[1]]) if m[1] in values else m[0], command)]
  return [_FIELD.sub(lambda m: values.get(m[1], m[0]), argument) for argument in command]


class Watch:
  """The process that ends scaffolds when this one is killed: one for all, started with the first of them."""

  def __init__(self):
    self._lock = threading.Lock()
    self._process: subprocess.Popen[bytes] | None = None

  def tell(self, name: str, folder: str | os.PathLike[str] = '') -> None:
    """The scaffold with this mark has started, with a folder of its own; without a folder: it has ended."""
    with self._lock:
      if self._process is None or self._process.poll() is not None:
        self._process = subprocess.Popen(
            [sys.executable, '-I', '-S', scaffold_watch.__file__, MARK], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, bufsize=0, cwd='/', start_new_session=True)
      with contextlib.suppress(BrokenPipeError):  # It was killed just now; the next line starts another.
        self._process.stdin.write(os.fsencode(f'{name}\t{os.fspath(folder)}\n'))


watch = Watch()


class Process:
  """One process and its descendants. Output goes to a file of at most `file_mb`, as does every file that they write."""

  def __init__(
      self, arguments: Sequence[str], *, folder: pathlib.Path, home: pathlib.Path, output: pathlib.Path, stdin: bytes,
      variables: Mapping[str, str], file_mb: int,
  ):
    """Raises ScaffoldFailure where it cannot be started."""
    self._mark = secrets.token_hex(16)
    self._ending, self._ended = threading.Lock(), False
    self._output = output
    environment = {name: value for name in KEPT if (value := os.environ.get(name)) is not None}
    environment |= {'HOME': str(home), 'TMPDIR': str(home), MARK: self._mark, **variables}
    if '\0' in ''.join([*arguments, *environment, *environment.values()]):
      raise ScaffoldFailure('The command or its environment holds a zero byte.')
    (home / 'stdin').write_bytes(stdin)
    limited = ['/bin/sh', '-c', f'ulimit -f {file_mb * 2048}; ulimit -c 0; exec "$@"', 'sh', *arguments]  # In blocks of 512 bytes.
    try:
      watch.tell(self._mark, folder.parent)
      with open(output, 'ab') as stream, open(home / 'stdin', 'rb') as given:
        self._process = subprocess.Popen(
            limited, cwd=folder, env=environment, stdin=given, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True)
    except OSError as error:
      self.forget()
      raise ScaffoldFailure(f'The scaffold could not be started: {error}') from error

  def alive(self) -> bool:
    return self._process.poll() is None

  @property
  def exit_code(self) -> int | None:
    """None while it runs; negative for the signal that ended it."""
    return self._process.poll()

  def tail(self) -> str:
    """The end of what it has written; '' where it has removed that."""
    try:
      with open(self._output, 'rb') as stream:
        stream.seek(max(0, os.fstat(stream.fileno()).st_size - 4 * TAIL))
        return stream.read().decode('utf-8', 'replace')[-TAIL:]
    except OSError:
      return ''

  def wait(self, timeout_s: float) -> bool:
    """Whether it has ended in time."""
    try:
      self._process.wait(timeout_s)
    except subprocess.TimeoutExpired:
      return False
    return True

  def end(self) -> None:
    """Ends the process and all that it has started: its group, and whatever carries the mark. Once: later its number may be another's."""
    with self._ending:
      if not self._ended:
        self._end()
      self._ended = True

  def _end(self) -> None:
    if self.alive():
      self._signal(signal.SIGTERM)
      self.wait(TERM_S)
    self._signal(signal.SIGKILL)
    scaffold_watch.kill_carriers(MARK, self._mark, TERM_S)
    self.wait(TERM_S)

  def _signal(self, number: int) -> None:
    try:
      os.killpg(self._process.pid, number)
    except (ProcessLookupError, PermissionError):
      pass

  def forget(self) -> None:
    """Nothing of it is left."""
    watch.tell(self._mark)
