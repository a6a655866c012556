"""Worker processes of a service, each with hard limits of time and memory; a process that hangs or grows is ended and replaced.

`Pool.ask` may be called from any thread, and from a running event loop (where it blocks, as any call does; use `asyncio.to_thread`).
Workers are new interpreters (no fork of a process that has threads or holds an accelerator), started when first needed. The pool starts no
thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

from sao_jax.services.worker import HEADER

START_LIMIT_S = 120.0  # For the libraries to be imported, on a machine that is busy.
MAX_FRAME = 65_536
TIMEOUT, ERROR = 'service_timeout', 'service_error'  # Verdicts where the service gave none.
MAX_ITEMS = 2_000  # Items after which a worker is replaced: caches grow.
_BOOT = (
    'import json, sys; sys.path[:] = json.loads(sys.argv[1]); from sao_jax.services import worker; '
    'worker.main(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])')


class WorkerDied(Exception):
  """The process ended without an answer; `signal` is what ended it, 0 if it left by itself."""

  def __init__(self, returncode: int | None):
    super().__init__(f'the worker process ended with status {returncode}')
    self.signal = -returncode if returncode is not None and returncode < 0 else 0


class TimeUp(Exception):
  """No answer within the time limit."""


class _Worker:
  """One process and its pipes. Owned by one thread at a time."""

  def __init__(self, memory_mb: int, service: str, max_reply: int):
    self._max_reply = max_reply
    lifeline, self._lifeline = os.pipe()
    try:
      self._process = subprocess.Popen(
          [sys.executable, '-I', '-B', '-c', _BOOT, json.dumps([path or os.getcwd() for path in sys.path]), str(lifeline), str(memory_mb),
           service],
          stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, pass_fds=(lifeline,), cwd='/', env=_environment(),
          start_new_session=True)
    except BaseException:
      os.close(self._lifeline)
      raise
    finally:
      os.close(lifeline)
    self._finished = False
    self.items = 0
    os.set_blocking(self._process.stdout.fileno(), False)

  @property
  def pid(self) -> int:
    return self._process.pid

  def start(self) -> None:
    """Waits until the libraries are imported."""
    self._receive(time.monotonic() + START_LIMIT_S)

  def ask(self, request: dict[str, Any], time_limit_s: float) -> dict[str, Any]:
    """Raises TimeUp or WorkerDied; the worker is of no use afterwards."""
    self.items += 1
    data = json.dumps(request).encode()
    try:
      self._process.stdin.write(HEADER.pack(len(data)) + data)
      self._process.stdin.flush()
    except (OSError, ValueError):
      raise WorkerDied(self._status()) from None
    return self._receive(time.monotonic() + time_limit_s)

  def _receive(self, deadline: float) -> dict[str, Any]:
    stream, data = self._process.stdout, b''
    poll = select.poll()
    poll.register(stream.fileno(), select.POLLIN)
    while True:
      left = deadline - time.monotonic()
      if left <= 0:
        raise TimeUp
      if not poll.poll(min(left, 1.0) * 1000):
        continue
      part = os.read(stream.fileno(), MAX_FRAME)
      if not part:
        raise WorkerDied(self._status())
      data += part
      if len(data) >= HEADER.size:
        size = HEADER.unpack(data[:HEADER.size])[0]
        if size > self._max_reply:
          raise WorkerDied(None)
        if len(data) >= HEADER.size + size:
          return json.loads(data[HEADER.size:])

  def _status(self) -> int | None:
    try:
      return self._process.wait(5.0)
    except subprocess.TimeoutExpired:
      return None

  def end(self) -> None:
    """Kills and reaps the process. Quick; may be called twice, and while another thread waits for an answer."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
      self._process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
      self._process.wait(5.0)

  def release(self) -> None:
    """Closes the pipes of a process that ended; called by the owner."""
    self.end()
    if not self._finished:
      self._finished = True
      os.close(self._lifeline)
      for stream in (self._process.stdin, self._process.stdout):
        with contextlib.suppress(OSError):
          stream.close()


class Pool:
  """At most `size` workers.

  Args:
    size: processes; 0 for one per CPU that this process may use.
    time_limit_s: wall time of one item, from its arrival at a worker; also its limit of CPU time.
    memory_mb: address space of a worker.
    wait_limit_s: how long a call waits for a free worker.
    service: module whose `answer` a worker calls, see `worker`.
    max_reply: bytes; a worker that says more is ended.
  """

  def __init__(
      self, *, size: int, time_limit_s: float, memory_mb: int, wait_limit_s: float, service: str, max_reply: int = MAX_FRAME,
  ):
    self._service, self._max_reply = service, max_reply
    self._size = size or len(os.sched_getaffinity(0))
    self._time_limit_s, self._memory_mb, self._wait_limit_s = time_limit_s, memory_mb, wait_limit_s
    self._condition = threading.Condition()
    self._idle: list[_Worker] = []
    self._alive: set[_Worker] = set()  # Idle, busy and starting.
    self._count = 0  # Workers, and places for those about to start.
    self._closed = False
    self._finalizer = weakref.finalize(self, _end_all, self._alive)

  @property
  def pids(self) -> list[int]:
    with self._condition:
      return sorted(worker.pid for worker in self._alive)

  def ask(self, request: dict[str, Any]) -> tuple[str, str]:
    """(verdict, reason) of what the service makes of a request; `TIMEOUT` and `ERROR` where it gives no answer."""
    request = {**request, 'cpu_s': self._time_limit_s}
    for last in (False, True):
      try:
        worker = self._take()
      except TimeUp:
        return TIMEOUT, f'no worker was free within {self._wait_limit_s:g} s'
      except (WorkerDied, OSError) as error:
        if last or self._closed:
          return ERROR, 'the pool was closed' if self._closed else f'no worker could be started: {error}'
        continue
      try:
        reply = worker.ask(request, self._time_limit_s)
      except TimeUp:
        self._drop(worker)
        return TIMEOUT, f'no result within {self._time_limit_s:g} s'
      except WorkerDied as error:
        self._drop(worker)
        if self._closed:
          return ERROR, 'the pool was closed'
        if error.signal == signal.SIGXCPU:
          return TIMEOUT, f'more than {self._time_limit_s:g} s of CPU time'
        if last:
          return ERROR, f'{error}, twice'
        continue
      except BaseException:
        self._drop(worker)
        raise
      self._give_back(worker)
      return reply['verdict'], reply['reason']
    raise AssertionError('unreachable')

  def _take(self) -> _Worker:
    """A worker that is ready, for this thread alone. Raises TimeUp, WorkerDied."""
    deadline = time.monotonic() + self._wait_limit_s
    with self._condition:
      while not self._closed and not self._idle and self._count >= self._size:
        if time.monotonic() >= deadline:
          raise TimeUp
        self._condition.wait(1.0)
      if self._closed:
        raise WorkerDied(None)
      if self._idle:
        return self._idle.pop()
      self._count += 1
    worker = None
    try:
      worker = _Worker(self._memory_mb, self._service, self._max_reply)
      with self._condition:
        self._alive.add(worker)
        closed = self._closed
      if closed:
        raise WorkerDied(None)
      worker.start()
      return worker
    except BaseException as error:
      if worker is not None:
        self._drop(worker)
      else:
        self._leave()
      raise WorkerDied(None) if isinstance(error, TimeUp) else error

  def _give_back(self, worker: _Worker) -> None:
    with self._condition:
      if not self._closed and worker.items < MAX_ITEMS:
        self._idle.append(worker)
        self._condition.notify()
        return
    self._drop(worker)

  def _drop(self, worker: _Worker) -> None:
    worker.release()
    with self._condition:
      self._alive.discard(worker)
    self._leave()

  def _leave(self) -> None:
    with self._condition:
      self._count -= 1
      self._condition.notify()

  def close(self) -> None:
    """Ends all workers, hung ones too; calls that are running return `ERROR`."""
    with self._condition:
      self._closed = True
      idle, self._idle = self._idle, []
      busy = [worker for worker in self._alive if worker not in idle]
      self._condition.notify_all()
    for worker in busy:
      worker.end()  # Its owner sees the end of the pipe and releases it.
    for worker in idle:
      self._drop(worker)
    self._finalizer.detach()


def _environment() -> dict[str, str]:
  """What a worker sees of the environment: nothing of the trainer's."""
  return {name: value for name in ('PATH', 'LANG', 'LC_ALL', 'TZ') if (value := os.environ.get(name))}


def _end_all(workers: set[_Worker]) -> None:
  for worker in list(workers):
    worker.end()
