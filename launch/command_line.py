"""What the entry points share: flags parsed with clear errors, failures told in one message, earlier runs kept."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import re
import signal
import sys
import threading
import traceback
import typing
from typing import Any, Callable, Iterator, Mapping

from absl import flags

DEBUG = flags.DEFINE_bool('debug', False, 'Show the whole traceback of an error.')
EXPECTED = (ValueError, OSError, FloatingPointError, RuntimeError, ImportError, MemoryError)


def run(main: Callable[[], None], usage: str) -> None:
  """Parses the flags and runs `main`; exits with status 0, 1 after a told error, 2 after a wrong command line, 130 after Ctrl-C."""
  if any(argument in ('--help', '-h', '-help', '--helpfull', '--helpshort') for argument in sys.argv[1:]):
    print(usage)
    print(flags.FLAGS.main_module_help())
    sys.exit(0)
  try:
    _check_override_names(sys.argv[1:])
    rest = flags.FLAGS(sys.argv)
    if len(rest) > 1:
      raise ValueError(f'unexpected arguments {" ".join(rest[1:])}; everything is given as --name=value.')
    if 'config' in flags.FLAGS and flags.FLAGS['config'].value is not None:
      flags.FLAGS['config'].value.to_dict()  # A config file that failed to load raises here.
  except Exception as error:  # Config files are code: they can raise anything.
    if '--debug' in sys.argv:
      traceback.print_exception(error)
    print(f'Error in the command line: {_command_line_message(error)}\nSee --help; --debug shows the traceback.', file=sys.stderr)
    sys.exit(2)
  with reported_errors(None):
    main()


def _command_line_message(error: Exception) -> str:
  if isinstance(error, OSError) and error.__cause__ is not None:
    return str(error.__cause__)
  if isinstance(error, (KeyError, AttributeError)):
    name = str(error.args[0] if error.args else error).strip('"\'')
    return f'unknown name in a --config.NAME=value: {name}'
  return str(error) if isinstance(error, (flags.Error, ValueError, OSError)) else f'{type(error).__name__}: {error}'


def _check_override_names(arguments: list[str]) -> None:
  """Raises ValueError for a `--config.a.b` that is no setting. What `task.settings` may hold depends on the environment."""
  from sao_jax.config import Config

  for argument in arguments:
    match = re.match(r'--?config\.([\w.]+)', argument)
    section: Any = Config
    for i, name in enumerate(match[1].split('.') if match else ()):
      if not dataclasses.is_dataclass(section):
        break
      hints = typing.get_type_hints(section)
      if name not in hints:
        raise ValueError(f'unknown setting {".".join(match[1].split(".")[:i + 1])}; known here: {", ".join(sorted(hints))}.')
      section = hints[name]


@contextlib.contextmanager
def reported_errors(workdir: pathlib.Path | None) -> Iterator[None]:
  """Tells an error in one message on standard error and exits with status 1; its traceback goes to `error.txt` in the workdir.

  With --debug, and for errors that only a bug can cause, the traceback is shown as well.
  """
  try:
    yield
  except KeyboardInterrupt:
    print('Stopped. Run the same command again to resume from the last checkpoint.', file=sys.stderr)
    leave(130)
  except Exception as error:
    where = _write_traceback(workdir, error)
    if DEBUG.value or not isinstance(error, EXPECTED):
      traceback.print_exception(error)
    print(f'Error: {_message(error)}{where}', file=sys.stderr)
    leave(1)


@contextlib.contextmanager
def stop_on_sigterm() -> Iterator[threading.Event]:
  """An event that the first SIGTERM sets (a machine is about to be taken away); the second ends the process at once."""
  stop = threading.Event()

  def ask(signum, frame):
    del signum, frame
    stop.set()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

  before = signal.signal(signal.SIGTERM, ask)
  try:
    yield stop
  finally:
    signal.signal(signal.SIGTERM, before)


def leave(status: int) -> None:
  """Ends the process at once: threads that hang in an environment must not hold it."""
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(status)


def _message(error: BaseException) -> str:
  """The error and its causes, one after the other, each said once."""
  told = []
  while error is not None:
    text = '\n  '.join([str(error) or type(error).__name__, *getattr(error, '__notes__', ())])
    if not isinstance(error, (ValueError, RuntimeError)):
      text = f'{type(error).__name__}: {text}'
    if not any(text in earlier for earlier in told):
      told.append(text)
    error = error.__cause__
  return '\n  caused by: '.join(told)


def _write_traceback(workdir: pathlib.Path | None, error: BaseException) -> str:
  if workdir is None or not workdir.is_dir():
    return ''
  try:
    (workdir / 'error.txt').write_text(''.join(traceback.format_exception(error)), encoding='utf-8')
  except OSError as second:  # A full or read-only disk may be the very error that is being told.
    return f'\nThe traceback could not be written ({second}); --debug shows it.'
  return f'\nThe traceback is in {workdir / "error.txt"}.'


def keep_previous(workdir: pathlib.Path, settings: Mapping[str, Any]) -> None:
  """Moves a finished run, or one with other settings, out of the way; an unfinished one with the same settings stays, to be resumed.

  Raises ValueError while another process is running in the workdir.
  """
  from sao_jax import report
  from sao_jax.config import differences

  if not (workdir / 'config.json').exists():
    return
  earlier = report.read_json(workdir / 'config.json')
  finished = (workdir / 'summary.json').exists()
  if not finished and not differences(earlier, settings):
    return
  with open(workdir / 'lock', 'a') as lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      raise ValueError(f'Another process is running in {workdir}; choose another --workdir.') from error
    number = 1
    while (target := workdir.with_name(f'{workdir.name}-{number}')).exists():
      number += 1
    workdir.rename(target)
  print(f'{workdir} held {"a finished" if finished else "another"} run; it is in {target} now.', file=sys.stderr)


def what_came_out(workdir: pathlib.Path, summary: Mapping[str, Any]) -> str:
  """Held-out success before and after, and where to look."""
  lines = []
  for when, found in summary.get('evaluation', {}).items():
    lines.append(f'{when}: held-out success {found["success_temperature_1"]:.3f} at temperature 1, {found["success_greedy"]:.3f} greedy '
                 f'(n = {found["n"]})')
  lines.append(f'accounting: {json.dumps(summary.get("accounting", {}))}')
  for name, what in (('learning_curve.png', 'learning curve'), ('rollouts', 'sample trajectories'), ('summary.json', 'summary')):
    if (workdir / name).exists():
      lines.append(f'{what}: {workdir / name}')
  return '\n'.join(lines)
