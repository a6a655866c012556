"""Values of the sandbox: limits, mounts, results, errors.

What untrusted code does is a `Result`, never an exception; exceptions are for the infrastructure and for wrong arguments.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from sao_jax.sandbox.inside import files

ENDINGS = ('exited', 'killed', 'time', 'memory', 'processes', 'output')


class SandboxError(Exception):
  """The infrastructure failed: a box that is gone, that does not answer, that was closed. Says nothing about what ran in it."""


class Unavailable(SandboxError):
  """No isolation is possible here; the message says why, and what can be done."""


class PathError(OSError):
  """A file of a box cannot be read or written: it is not there, no regular file, too large, behind a link, the disk is full."""


@dataclasses.dataclass(frozen=True)
class Limits:
  """What a box may use.

  Attributes:
    time_s: wall time of one command or piece of code, unless its call says otherwise; the same, and one more, of CPU time per process.
    memory_mb: of all processes together, by what they hold in memory; watched every 5 to 40 ms.
    address_mb: address space of one process; 0 for as much as `memory_mb`. Programs that reserve much and use little need more.
    processes: at once, threads included.
    file_mb: size of one file.
    disk_mb: of all files of the box together (they lie in memory).
    open_files: of one process.
    output_bytes: of each of a result's outputs; what is more is cut in the middle, with a note.
    flood_mb: a command that writes more than this in all is ended.
    nice: how much its processes stand back behind others.

  Raises:
    ValueError: on a value out of range.
  """

  time_s: float = 10.0
  memory_mb: int = 1024
  address_mb: int = 0
  processes: int = 64
  file_mb: int = 64
  disk_mb: int = 512
  open_files: int = 256
  output_bytes: int = 64_000
  flood_mb: int = 64
  nice: int = 5

  def __post_init__(self):
    ranges = {
        'time_s': (0.01, 86_400.0), 'memory_mb': (16, 1 << 22), 'address_mb': (0, 1 << 26), 'processes': (1, 1 << 16),
        'file_mb': (1, 1 << 22), 'disk_mb': (1, 1 << 22), 'open_files': (16, 1 << 16), 'output_bytes': (16, 1 << 26),
        'flood_mb': (1, 1 << 16), 'nice': (0, 19)}
    for name, (low, high) in ranges.items():
      check_range('limits.' + name, getattr(self, name), low, high)

  def settings(self) -> dict[str, Any]:
    """For the warden."""
    return dataclasses.asdict(self) | {'address_mb': self.address_mb or self.memory_mb}


@dataclasses.dataclass(frozen=True)
class Mount:
  """A file or folder of the host, shown in a box. It must be readable for everyone where the host runs as root; `writable` ones are bounded
  by nothing but the rights of their files.

  Raises:
    ValueError: where the source does not exist, or the target is no absolute path, or is the system's.
  """

  source: str | pathlib.Path
  target: str
  writable: bool = False

  def __post_init__(self):
    if not pathlib.Path(self.source).exists():
      raise ValueError(f'The source of a mount must exist, got {str(self.source)!r}.')
    target = pathlib.PurePosixPath(self.target)
    if not target.is_absolute() or '..' in target.parts or target == pathlib.PurePosixPath('/') or '\0' in self.target:
      raise ValueError(f'The target of a mount must be an absolute path without "..", got {self.target!r}.')
    if target.parts[1] in ('proc', 'dev', 'sys') or str(target) in (files.FOLDER, '/tmp', '/usr', '/etc', '/opt/box'):
      raise ValueError(f'A mount cannot stand in the place of {self.target!r}; use a folder such as /data or one below {files.FOLDER}.')

  @property
  def real_source(self) -> str:
    return str(pathlib.Path(self.source).resolve())


@dataclasses.dataclass(frozen=True)
class Result:
  """What came of a command.

  Attributes:
    stdout, stderr: at most `output_bytes` each, and a note in the middle where more came.
    exit_code: of the command; minus the signal that ended it; 127 and 126 where it was not found or could not be started.
    ending: 'exited', 'killed' (by a signal of its own making), or the limit that ended it: 'time', 'memory', 'processes', 'output'.
    seconds: wall time.
    stdout_cut, stderr_cut: whether something was left out.
  """

  stdout: bytes
  stderr: bytes
  exit_code: int
  ending: str
  seconds: float
  stdout_cut: bool = False
  stderr_cut: bool = False

  @property
  def ok(self) -> bool:
    return self.ending == 'exited' and self.exit_code == 0


@dataclasses.dataclass(frozen=True)
class PythonResult:
  """What came of a piece of code in a Python session.

  Attributes:
    output: what it printed, to either stream, and what its children did.
    value: the value of its last expression as a text; None where there is none.
    error: the exception as a text, with the part of the traceback that is the code's own; for a call that ended its interpreter, what
      happened and that the state is lost. None where all went well.
    ending: 'answered', or what ended the interpreter: 'exited', 'killed', or a limit as for `Result`; 'ended' where it had ended before.
    cut: whether output was left out.
    seconds: wall time.
  """

  output: str
  value: str | None
  error: str | None
  ending: str
  cut: bool
  seconds: float

  @property
  def state_lost(self) -> bool:
    return self.ending != 'answered'


def check_range(name: str, value: Any, low: float, high: float) -> None:
  """Raises ValueError unless `value` is a number (an int where both bounds are ints) in [low, high]."""
  whole = isinstance(low, int) and isinstance(high, int)
  if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not low <= value <= high:
    raise ValueError(f'{name} must be {"an integer" if whole else "a number"} in [{low}, {high}], got {value!r}.')
