"""Threads that carry their failures to whoever asks: what parts below `workers.py` start theirs with. Standard library only."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any, Callable


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


def bounded(function: Callable[[], Any], timeout_s: float, what: str) -> Any:
  """What `function` gives, or its error. Raises TimeoutError, naming `what`, where it takes longer; its thread ends with the process."""
  done: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

  def run():
    try:
      done.put((True, function()))
    except BaseException as error:  # Raised below, in the thread that asked.
      done.put((False, error))

  threading.Thread(target=run, name=what, daemon=True).start()
  try:
    well, value = done.get(timeout=timeout_s)
  except queue.Empty:
    raise TimeoutError(f'{what} took more than {timeout_s:g} s.') from None
  if not well:
    raise value
  return value
