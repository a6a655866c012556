"""What the entry points share: flags parsed with clear errors, failures told in one message, earlier runs kept."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import queue
import re
import signal
import sys
import threading
import traceback
import typing
from typing import Any, Callable, Iterator, Mapping

try:
  from absl import flags
  import ml_collections
except ModuleNotFoundError as error:
  sys.exit(
      f'Error: {error.name} is not installed in {sys.executable}. Use the environment that launch/quickstart.sh makes, .venv/bin/python, '
      'or install it: python -m pip install -r requirements.txt')

DEBUG = flags.DEFINE_bool('debug', False, 'Show the whole traceback of an error.')
BASE = ('jax', 'jaxlib', 'flax', 'optax', 'orbax', 'orbax.checkpoint', 'chex', 'numpy', 'tqdm', 'matplotlib', 'tensorboardX')
EXPECTED = (ValueError, OSError, FloatingPointError, RuntimeError, ImportError, MemoryError)


RESUME = 'Run the same command again to resume from the last checkpoint.'


def run(main: Callable[[], None], usage: str, *, interrupted: str = RESUME) -> None:
  """Parses the flags and runs `main`; exits with status 0, 1 after a told error, 2 after a wrong command line, 130 after Ctrl-C.

  Args:
    main: takes its settings from the flags.
    usage: what --help shows.
    interrupted: what to do after Ctrl-C, told then.
  """
  open_standard_streams()
  sys.unraisablehook = _show_unless_late
  if any(argument in ('--help', '-h', '-help', '--helpfull', '--helpshort') for argument in sys.argv[1:]):
    print(usage)
    print(flags.FLAGS.main_module_help())
    sys.exit(0)
  try:
    _find_modules_beside_the_config(sys.argv[1:])
    _check_override_names(sys.argv[1:])
    rest = flags.FLAGS(sys.argv)
    if len(rest) > 1:
      raise ValueError(f'unexpected arguments {" ".join(rest[1:])}; everything is given as --name=value.')
    if 'config' in flags.FLAGS and flags.FLAGS['config'].value is not None:
      _check_config_file(flags.FLAGS['config'].value)
  except Exception as error:  # Config files are code: they can raise anything.
    if '--debug' in sys.argv:
      say(''.join(traceback.format_exception(error)))
    say(f'Error in the command line: {_command_line_message(error)}\nSee --help; --debug shows the traceback.')
    leave(2)
  with reported_errors(None, interrupted):
    main()
  try:
    sys.stderr.flush()
  except (OSError, ValueError):
    leave(0)  # All is done; Python itself would end with status 120, since nobody could read the messages.


def prepare_host() -> None:
  """On a machine without accelerator, has this process keep the memory of compiled programs between calls."""
  import jax
  from sao_jax import host_allocator

  if jax.default_backend() == 'cpu':
    host_allocator.keep_freed_memory()


def _show_unless_late(unraisable: Any) -> None:
  """Shows an error that nobody can catch; not that of a file written for a checkpoint that has failed, and been told, meanwhile."""
  if not (unraisable.exc_type is RuntimeError and str(unraisable.exc_value) == 'Event loop is closed'):
    sys.__unraisablehook__(unraisable)


def open_standard_streams() -> None:
  """Gives a process that was started with closed standard streams (`>&-`) empty ones, or the next file opened would get their place."""
  while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
    os.set_inheritable(descriptor, True)
  os.close(descriptor)
  for name in ('stdout', 'stderr'):
    if getattr(sys, name) is None:
      setattr(sys, name, open(os.devnull, 'w', encoding='utf-8'))


def say(text: str) -> None:
  """Writes a line to standard error, if it can be written to: nothing ends because nobody can read a message."""
  with contextlib.suppress(OSError, ValueError):
    print(text, file=sys.stderr, flush=True)


def answer(text: str, otherwise: str) -> None:
  """Writes the result to standard output. Where it can't be, says so with `otherwise` and ends the process with status 1."""
  try:
    print(text, flush=True)
  except (OSError, ValueError) as error:
    say(f'Error: standard output could not be written ({getattr(error, "strerror", None) or error}). {otherwise}')
    leave(1)


def _check_config_file(config: Any) -> None:
  """Raises ValueError where a config file gave something else than settings; what was raised while it was read is raised here."""
  if isinstance(config, ml_collections.ConfigDict):
    return
  if 'Error' in type(config).__name__:  # What ml_collections keeps of a file that could not be read: raises when it is used.
    config.to_dict()
  raise ValueError(
      f'get_config() of the config file must return an ml_collections.ConfigDict, got {type(config).__name__}; '
      'see configs/quickstart.py.')


def _command_line_message(error: Exception) -> str:
  if 'Error whilst parsing config file' in str(error):  # With a traceback, by ml_collections, and once more by absl.
    while 'Error whilst parsing config file' in str(error) and error.__context__ is not None:
      error = error.__context__
    return f'the config file raised {type(error).__name__}: {error}'
  if isinstance(error, OSError) and error.__cause__ is not None:
    return str(error.__cause__)
  if 'config' in flags.FLAGS and flags.FLAGS['config'].present and '--config=None' in str(error):
    return 'get_config() of the config file returned None; it must return an ml_collections.ConfigDict, see configs/quickstart.py.'
  if isinstance(error, AttributeError) and error.name == 'get_config':
    return 'the config file must define get_config(), which returns an ml_collections.ConfigDict; see configs/quickstart.py.'
  if isinstance(error, AttributeError) and any(frame.name == 'get_config' for frame in traceback.extract_tb(error.__traceback__)):
    return f'the config file raised AttributeError: {error}'
  if isinstance(error, (KeyError, AttributeError)):
    name = str(error.args[0] if error.args else error).strip('"\'')
    return f'unknown name in a --config.NAME=value: {name}'
  return str(error) if isinstance(error, (flags.Error, ValueError, OSError)) else f'{type(error).__name__}: {error}'


def _find_modules_beside_the_config(arguments: list[str]) -> None:
  """Lets a config file, and the settings in it, name modules of its own folder; it comes last on the path, so that it hides nothing."""
  for path in re.findall(r'(?:^|\0)--?config[=\0]([^:\0]+)', '\0'.join(arguments)):
    sys.path.append(str(pathlib.Path(path).absolute().parent))


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
def reported_errors(workdir: pathlib.Path | None, interrupted: str = RESUME) -> Iterator[None]:
  """Tells an error in one message on standard error and exits with status 1; its traceback goes to `error.txt` in the workdir.

  With --debug, and for errors that only a bug can cause, the traceback is shown as well. What belongs to another run is left alone: a
  workdir that refused this one (`config.Refused`) gets no `error.txt`.
  """
  from sao_jax.config import Refused

  try:
    yield
  except KeyboardInterrupt:
    say(f'Stopped. {interrupted}')
    leave(130)
  except Exception as error:
    where = '' if isinstance(error, Refused) else _write_traceback(workdir, error)
    if DEBUG.value or not isinstance(error, EXPECTED):
      say(''.join(traceback.format_exception(error)))
    say(f'Error: {_message(error)}{where}')
    leave(1)


class Stop(threading.Event):
  """Set by the first SIGTERM or Ctrl-C; `status` is then the exit status that tells which it was, `name` says it.

  The signal may come while this very thread waits for the event, holding its lock: setting it must not take that lock.
  """

  status, name = 0, ''

  def __init__(self):
    super().__init__()
    self._told: queue.SimpleQueue[None] = queue.SimpleQueue()  # Its `put` may interrupt its `get`.

  def set(self) -> None:
    self._flag = True
    self._told.put(None)

  def wait(self, timeout: float | None = None) -> bool:
    if not self._flag:
      with contextlib.suppress(queue.Empty):
        self._told.get(timeout=timeout)
        self._told.put(None)  # For whoever else waits.
    return self._flag


@contextlib.contextmanager
def stop_on_signals() -> Iterator[Stop]:
  """A `Stop` that the first SIGTERM (a machine is about to be taken away) or Ctrl-C sets; the second ends the process at once."""
  stop = Stop()
  before = {}

  def ask(signum, frame):
    del frame
    signal.signal(signum, signal.SIG_DFL if signum == signal.SIGTERM else signal.default_int_handler)
    if not stop.is_set():
      stop.status, stop.name = 128 + signum, 'Ctrl-C' if signum == signal.SIGINT else signal.Signals(signum).name
    stop.set()
    if signum == signal.SIGINT:
      with contextlib.suppress(OSError):  # Not through sys.stderr: the signal may have interrupted a write to it.
        os.write(2, b'\nstopping after this step; press Ctrl-C again to stop at once\n')

  for signum in (signal.SIGTERM, signal.SIGINT):
    if signum == signal.SIGTERM or signal.getsignal(signum) != signal.SIG_IGN:  # As in a script's background job.
      before[signum] = signal.signal(signum, ask)
  try:
    yield stop
  finally:
    for signum, handler in before.items():
      signal.signal(signum, handler)


def leave(status: int) -> None:
  """Ends the process at once: threads that hang in an environment must not hold it."""
  for stream in (sys.stdout, sys.stderr):
    with contextlib.suppress(OSError, ValueError, AttributeError):  # Full, closed, or none.
      stream.flush()
  os._exit(status)


def _message(error: BaseException) -> str:
  """The error and its causes, one after the other, each said once."""
  told = []
  while error is not None:
    text = '\n  '.join([str(error) or type(error).__name__, *getattr(error, '__notes__', ())])
    if isinstance(error, ModuleNotFoundError) and error.name in BASE:
      text += (f'. It is not installed in {sys.executable}: use the environment that launch/quickstart.sh makes, .venv/bin/python, or '
               'install it with python -m pip install -r requirements.txt')
    if not isinstance(error, (ValueError, RuntimeError)):
      text = f'{type(error).__name__}: {text}'
    if not any(text in earlier for earlier in told):
      told.append(text)
    error = None if isinstance(error, OSError) else error.__cause__  # Those raised here say all there is; error.txt has the rest.
  return '\n  caused by: '.join(told)


def _write_traceback(workdir: pathlib.Path | None, error: BaseException) -> str:
  if workdir is None or not workdir.is_dir():
    return ''
  path = workdir / 'error.txt'
  try:
    path.write_text(''.join(traceback.format_exception(error)), encoding='utf-8', errors='backslashreplace')
  except OSError as second:  # A full or read-only disk may be the very error that is being told.
    with contextlib.suppress(OSError):
      path.unlink(missing_ok=True)  # Half of a traceback is of no use.
    return f'\nThe traceback could not be written ({second}); --debug shows it.'
  return f'\nThe traceback is in {workdir / "error.txt"}.'


def keep_previous(workdir: pathlib.Path, settings: Mapping[str, Any]) -> None:
  """Moves a finished run, or one with other settings, out of the way; an unfinished one with the same settings stays, to be resumed.

  Raises ValueError while another process is running in the workdir, or where it is the folder that this process stands in.
  """
  from sao_jax.config import Refused, differences_from_stored
  from sao_jax.report import read_settings

  if not (workdir / 'config.json').is_file():
    return
  if pathlib.Path.cwd().is_relative_to(workdir.resolve()):
    raise ValueError(
        f'--keep_previous cannot move {workdir.resolve()}, the current folder; run from another folder, or name another --workdir.')
  earlier = read_settings(workdir / 'config.json')
  finished = (workdir / 'summary.json').exists()
  if not finished and not differences_from_stored(earlier, settings):
    return
  with open(workdir / 'lock', 'a') as lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise Refused(f'Another process is running in {workdir}; choose another --workdir.') from None
    number = 1
    while (target := workdir.with_name(f'{workdir.name}-{number}')).exists():
      number += 1
    workdir.rename(target)
  say(f'{workdir} held {"a finished" if finished else "another"} run; it is in {target} now.')


def read_settings_file(path: pathlib.Path) -> dict:
  """Settings that a run wrote. Raises ValueError where the file is damaged."""
  try:
    values = json.loads(path.read_text(encoding='utf-8'))
    if not isinstance(values, dict):
      raise ValueError(f'it holds a {type(values).__name__}, not settings')
    sections = ('model', 'sampler', 'rl', 'value_pretrain', 'sft', 'evaluation', 'task')
    wrong = [name for name in sections if not isinstance(values.get(name), dict)]
    if wrong:
      raise ValueError(f'it has no section of settings {wrong[0]!r}')
    return {**values, **{name: dict(values[name]) for name in sections}}
  except ValueError as error:
    raise ValueError(f'{path} is damaged ({error}); restore it, or give the settings with --config.') from None


def check_workdir(name: str) -> pathlib.Path:
  """The workdir of that name. Raises ValueError for no name, or one that libraries would write as another one."""
  if not name:
    raise ValueError('--workdir must name a folder, got an empty name.')
  absolute = os.path.abspath(name)
  try:
    same = absolute.encode() == os.fsencode(absolute)
  except UnicodeEncodeError:
    same = False
  if not same:
    raise ValueError(
        f'--workdir has characters that this locale cannot write ({sys.getfilesystemencoding()}): got {ascii(name)}. Set PYTHONUTF8=1 or '
        'LC_ALL=C.UTF-8, or choose a name of plain letters.')
  return pathlib.Path(name)


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
