"""A grading process: reads pairs of answers from a pipe, writes verdicts to another. Started by `pool`, never imported by it.

Frames are four bytes of length (big-endian) and JSON. It ends when its input ends, when its lifeline closes (the parent is gone, whatever
this process is doing), at its limits of CPU time and memory, or when it is killed.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import sys
import threading
from typing import Any, BinaryIO

HEADER = struct.Struct('>I')
CPU_ALLOWANCE_S = 1.0  # Beyond the item's own limit: for the work around it.


def main(lifeline: int, memory_mb: int) -> None:
  """Serves until its input ends. `lifeline` is the read end of a pipe whose write end the parent alone holds."""
  _follow_parent(lifeline)
  output = os.fdopen(os.dup(1), 'wb', buffering=0)
  null = os.open(os.devnull, os.O_RDWR)
  for descriptor in (1, 2):  # What libraries print must not become frames.
    os.dup2(null, descriptor)
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business.
  sys.setrecursionlimit(4000)
  import latex2sympy2_extended  # noqa: F401 (loaded before the clock of the first item runs)
  import math_verify  # noqa: F401
  from sao_jax.graders import symbolic
  symbolic.decide(r'\sqrt{2}', r'2^{1/2}')  # Fills the parser's tables.
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
  resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
  resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
  write(output, {'ready': os.getpid()})
  while (request := read(sys.stdin.buffer)) is not None:
    _limit_cpu(request['cpu_s'])
    write(output, _answer(symbolic, request))


def _answer(symbolic: Any, request: dict[str, Any]) -> dict[str, str]:
  from sao_jax.graders.arithmetic import TooLarge
  try:
    return {'verdict': 'right' if symbolic.decide(request['gold'], request['response']) else 'wrong', 'reason': 'algebra'}
  except TooLarge as error:
    return {'verdict': 'grader_timeout', 'reason': f'not worked out: {error}'}
  except MemoryError:
    return {'verdict': 'grader_timeout', 'reason': 'memory limit'}
  except RecursionError:
    return {'verdict': 'grader_timeout', 'reason': 'recursion limit'}
  except Exception as error:
    return {'verdict': 'grader_error', 'reason': f'{type(error).__name__}: {str(error)[:200]}'}


def _limit_cpu(seconds: float) -> None:
  """Ends this process (SIGXCPU) when the item takes more CPU time than this, also where no thread of Python gets its turn."""
  used = resource.getrusage(resource.RUSAGE_SELF)
  soft = int(used.ru_utime + used.ru_stime + seconds + CPU_ALLOWANCE_S) + 1
  resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))


def _follow_parent(lifeline: int) -> None:
  """Ends this process when the lifeline closes: by a signal of the kernel where it gives one, and by a thread in any case."""
  def watch() -> None:
    os.read(lifeline, 1)
    os._exit(1)

  threading.Thread(target=watch, daemon=True).start()
  try:
    import fcntl
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)  # SIGIO, which ends a process.
  except (ImportError, OSError, AttributeError):
    pass


def read(stream: BinaryIO) -> dict[str, Any] | None:
  header = stream.read(HEADER.size)
  if len(header) < HEADER.size:
    return None
  return json.loads(stream.read(HEADER.unpack(header)[0]))


def write(stream: BinaryIO, message: dict[str, Any]) -> None:
  data = json.dumps(message).encode()
  data = HEADER.pack(len(data)) + data
  while data:
    data = data[stream.write(data):]
