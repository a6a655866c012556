"""Threads: this module starts them, and `threads.py` for parts below it.

1. `WorkerGroup` (of `threads.py`) runs loops in threads and carries their failures to the thread that calls `check`.
2. `EnvironmentPool` runs environment calls with a time limit each. A call that hangs is given up: its thread is abandoned (it ends
   when the call does, or with the process) and replaced, its late result is thrown away.
3. `DeviceTurns` lets sampler and learner take turns on a mesh that they share; collectives of two threads must not interleave.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import queue
import threading
import time
from typing import Any, Callable, Iterator

from sao_jax.rollouts import Call, CallResult
from sao_jax.threads import WorkerGroup, bounded

__all__ = ['DeviceTurns', 'EnvironmentPool', 'WorkerGroup', 'bounded']

MAX_ABANDONED = 64  # Environment calls that may hang at once.
IDLE_S = 60.0  # No wait is for ever.


@dataclasses.dataclass
class _Running:
  call: Call | None  # None: a function that runs aside.
  started_s: float
  abandoned: bool = False


class EnvironmentPool:
  """Environment calls in daemon threads, each with a time limit that starts when the call starts.

  Implements `rollouts.Calls`. One thread submits and collects; results wait in a list guarded by a lock held for assignments only.
  """

  def __init__(self, threads: int, step_timeout_s: float, max_abandoned: int = MAX_ABANDONED):
    self._timeout_s, self._max_abandoned = step_timeout_s, max_abandoned
    self._work: queue.SimpleQueue[Call | Callable[[], None] | None] = queue.SimpleQueue()  # None: no more.
    self._lock = threading.Lock()
    self._results: collections.deque[CallResult] = collections.deque()
    self._running: dict[int, _Running] = {}
    self._arrived = threading.Event()
    self._threads: list[threading.Thread] = []
    self._closed = False
    self.abandoned = 0  # Calls that hang now.
    for _ in range(threads):
      self._start_thread()

  def submit(self, call: Call, *, due_s: float | None = None) -> None:
    del due_s  # Real calls end when they end.
    self._work.put(call)

  def run_aside(self, function: Callable[[], None]) -> None:
    self._work.put(function)

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
      self.abandoned += len(overdue)
    for running in overdue:
      self._replace(running.call)
      if running.call is None:
        continue  # A function that runs aside: nobody waits for it.
      results.append(CallResult(running.call.ticket, error=TimeoutError(
          f'environment call of ticket {running.call.ticket}, turn {running.call.turn}, took more than '
          f'task.step_timeout_s={self._timeout_s}')))
    return results

  def wait(self, timeout_s: float) -> bool:
    """Sleeps until a result arrives; False after the time-out."""
    return self._arrived.wait(timeout_s)

  def due(self) -> dict[int, float]:
    return {}

  def close(self, timeout_s: float = 0.0) -> bool:
    """Ends the pool: queued calls are thrown away, functions queued to run aside are run. Waits up to `timeout_s` for that; whatever
    hangs then is left to the end of the process. Returns whether all threads have left."""
    self._closed = True
    for _ in self._threads:
      self._work.put(None)
    deadline = time.monotonic() + timeout_s
    for thread in self._threads:
      thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in self._threads)

  def _replace(self, call: Call | None) -> None:
    """Starts another thread in the place of one that hangs. Raises RuntimeError when too many hang at once."""
    if self.abandoned > self._max_abandoned:
      last = 'closing an environment' if call is None else f'ticket {call.ticket}'
      raise RuntimeError(
          f'{self.abandoned} environment calls hang beyond task.step_timeout_s={self._timeout_s} (last: {last}), and a thread that hangs '
          'cannot be ended. Mend the environment or raise the limit.')
    self._start_thread()

  def _start_thread(self) -> None:
    self._threads = [t for t in self._threads if t.is_alive()]
    self._threads.append(threading.Thread(target=self._loop, name='environment', daemon=True))
    self._threads[-1].start()

  def _loop(self) -> None:
    while True:
      try:
        work = self._work.get(timeout=IDLE_S)
      except queue.Empty:
        continue
      if work is None:
        return
      if not (isinstance(work, Call) and self._closed) and not self._run(work):
        return

  def _run(self, work: Call | Callable[[], None]) -> bool:
    """Does one piece of work; False when it took so long that this thread was replaced."""
    call = work if isinstance(work, Call) else None
    identity, running = threading.get_ident(), _Running(call, time.monotonic())
    with self._lock:
      self._running[identity] = running
    ticket = -1 if call is None else call.ticket
    try:
      result = CallResult(ticket, value=work() if call is None else call.function())
    except BaseException as error:  # Carried to the engine, which decides.
      result = CallResult(ticket, error=error)
    with self._lock:
      del self._running[identity]
      if running.abandoned:
        self.abandoned -= 1
        return False
      if call is not None or result.error is not None:
        self._results.append(result)
        self._arrived.set()
    return True


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
