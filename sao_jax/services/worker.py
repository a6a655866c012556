"""A worker process: reads requests from a pipe, writes verdicts to another. Started by `pool`, never imported by it.

It serves a service: a module with `prepare()`, called once before any limit holds, and `answer(request)`, which gives {'verdict',
'reason'} for a request and raises nothing but what ends a process. Frames are four bytes of length (big-endian) and JSON. A process ends
when its input ends, when its lifeline closes (the parent is gone, whatever this process is doing), at its limits of CPU time and memory, or
when it is killed.
"""

from __future__ import annotations

import importlib
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


def main(lifeline: int, memory_mb: int, module: str) -> None:
  """Serves until its input ends. `lifeline` is the read end of a pipe whose write end the parent alone holds."""
  _follow_parent(lifeline)
  output = os.fdopen(os.dup(1), 'wb', buffering=0)
  null = os.open(os.devnull, os.O_RDWR)
  for descriptor in (1, 2):  # What libraries print must not become frames.
    os.dup2(null, descriptor)
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business.
  sys.setrecursionlimit(4000)
  service = importlib.import_module(module)
  service.prepare()
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
  resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
  memory = _allowed(resource.RLIMIT_AS, memory_mb << 20)
  resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
  write(output, {'ready': os.getpid()})
  while (request := read(sys.stdin.buffer)) is not None:
    _limit_cpu(request['cpu_s'])
    write(output, service.answer(request))


def _limit_cpu(seconds: float) -> None:
  """Ends this process (SIGXCPU) when the item takes more CPU time than this, also where no thread of Python gets its turn."""
  used = resource.getrusage(resource.RUSAGE_SELF)
  soft = int(used.ru_utime + used.ru_stime + seconds + CPU_ALLOWANCE_S) + 1
  resource.setrlimit(resource.RLIMIT_CPU, (_allowed(resource.RLIMIT_CPU, soft), resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _allowed(kind: int, value: int) -> int:
  """`value`, or the limit that this process cannot raise (`ulimit -H`) where that is lower."""
  hard = resource.getrlimit(kind)[1]
  return value if hard == resource.RLIM_INFINITY else min(value, hard)


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
