"""Threads: the only module that starts any.

1. `WorkerGroup` runs loops in threads and carries their failures to the thread that calls `check`.
2. `EnvironmentPool` runs environment calls with a time limit each. A call that hangs is given up: its thread is abandoned (it ends
   with the process) and replaced, its late result is thrown away.
3. `DeviceTurns` lets sampler and learner take turns on a mesh that they share; collectives of two threads must not interleave.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import queue
import threading
import time
from typing import Callable, Iterator

from sao_jax.rollouts import Call, CallResult


class WorkerGroup:
  """Starts worker threads and carries their failures to the thread that calls `check`."""

  def __init__(self):
    self.stop = threading.Event()
    self._failures: queue.SimpleQueue[tuple[str, BaseException]] = queue.SimpleQueue()
    self._threads: list[threading.Thread] = []

  def start(self, name: str, loop: Callable[[threading.Event], None]) -> None:
    def run():
      try:
        loop(self.stop)
      except BaseException as error:  # Reported by check(), never swallowed.
        self._failures.put((name, error))
        self.stop.set()

    self._threads.append(threading.Thread(target=run, name=name, daemon=True))
    self._threads[-1].start()

  def check(self) -> None:
    """Raises RuntimeError from the first failure of a worker, if there is one."""
    if not self._failures.empty():
      name, error = self._failures.get()
      raise RuntimeError(f'Worker {name!r} failed: {type(error).__name__}: {error}') from error

  def close(self, timeout_s: float) -> list[str]:
    """Stops and joins all threads; returns the names of those still alive after the deadline."""
    self.stop.set()
    deadline = time.monotonic() + timeout_s
    for thread in self._threads:
      thread.join(max(0.0, deadline - time.monotonic()))
    return [t.name for t in self._threads if t.is_alive()]


@dataclasses.dataclass
class _Running:
  call: Call
  started_s: float
  abandoned: bool = False


class EnvironmentPool:
  """Environment calls in daemon threads, each with a time limit that starts when the call starts.

  Implements `rollouts.Calls`. One thread submits and collects; results wait in a list guarded by a lock held for assignments only.
  """

  def __init__(self, threads: int, step_timeout_s: float, max_abandoned: int = 64):
    self._timeout_s, self._max_abandoned = step_timeout_s, max_abandoned
    self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
    self._lock = threading.Lock()
    self._results: collections.deque[CallResult] = collections.deque()
    self._running: dict[int, _Running] = {}
    self._arrived = threading.Event()
    self._threads = 0
    self.abandoned = 0
    self.busy_s = 0.0
    for _ in range(threads):
      self._start_thread()

  def submit(self, call: Call, *, due_s: float | None = None) -> None:
    del due_s  # Real calls end when they end.
    self._calls.put(call)

  def ready(self) -> list[CallResult]:
    """Results so far, in order of arrival; calls over their limit are among them, with a TimeoutError."""
    now = time.monotonic()
    with self._lock:
      results = list(self._results)
      self._results.clear()
      self._arrived.clear()
      overdue = [r for r in self._running.values() if not r.abandoned and now - r.started_s > self._timeout_s]
      for running in overdue:
        running.abandoned = True
    for running in overdue:
      self._give_up(running.call)
      results.append(CallResult(running.call.ticket, error=TimeoutError(
          f'environment call of ticket {running.call.ticket}, turn {running.call.turn}, took more than '
          f'task.step_timeout_s={self._timeout_s}')))
    return results

  def wait(self, timeout_s: float) -> bool:
    """Sleeps until a result arrives; False after the time-out."""
    return self._arrived.wait(timeout_s)

  def due(self) -> dict[int, float]:
    return {}

  def close(self) -> None:
    """Lets idle threads leave; running calls are abandoned."""
    for _ in range(self._threads):
      self._calls.put(None)

  def _give_up(self, call: Call) -> None:
    self.abandoned += 1
    if self.abandoned > self._max_abandoned:
      raise RuntimeError(
          f'{self.abandoned} environment calls hung beyond task.step_timeout_s={self._timeout_s} (last: ticket {call.ticket}); '
          'their threads cannot be ended. Mend the environment or raise the limit.')
    self._start_thread()

  def _start_thread(self) -> None:
    self._threads += 1
    threading.Thread(target=self._loop, name=f'environment-{self._threads}', daemon=True).start()

  def _loop(self) -> None:
    identity = threading.get_ident()
    while (call := self._calls.get()) is not None:
      running = _Running(call, time.monotonic())
      with self._lock:
        self._running[identity] = running
      try:
        result = CallResult(call.ticket, value=call.function())
      except BaseException as error:  # Carried to the engine, which decides.
        result = CallResult(call.ticket, error=error)
      with self._lock:
        del self._running[identity]
        self.busy_s += time.monotonic() - running.started_s
        if running.abandoned:
          return  # Replaced already.
        self._results.append(result)
        self._arrived.set()


class DeviceTurns:
  """First come, first served turns on shared devices; `enabled=False` (separate devices, or a single one) makes it free."""

  def __init__(self, enabled: bool):
    self.enabled = enabled
    self._condition = threading.Condition()
    self._next = 0
    self._serving = 0

  @property
  def waiting(self) -> int:
    """How many wait for their turn."""
    with self._condition:
      return max(0, self._next - self._serving - 1)

  @contextlib.contextmanager
  def turn(self) -> Iterator[None]:
    """Holds the devices; whoever holds them waits for its own device work before leaving."""
    if not self.enabled:
      yield
      return
    with self._condition:
      ticket = self._next
      self._next += 1
      while self._serving != ticket:
        self._condition.wait(1.0)
    try:
      yield
    finally:
      with self._condition:
        self._serving += 1
        self._condition.notify_all()
