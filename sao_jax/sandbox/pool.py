"""Boxes kept ready, so that taking one costs nothing."""

from __future__ import annotations

import collections
import logging
import threading
import time
from typing import Any, Callable

from sao_jax.sandbox import base
from sao_jax.sandbox.box import Box

WAIT_S = 1.0  # A wait never is for ever.


class Pool:
  """Keeps `size` boxes ready. A box that was used is ended, never given to another.

  Args:
    make: makes a box (`lambda: sandbox.open(...)`); called from a thread of the pool.
    size: boxes that wait ready.
  """

  def __init__(self, make: Callable[[], Box], size: int = 2):
    base.check_range('size', size, 0, 1024)
    self._make, self._size = make, size
    self._condition = threading.Condition()
    self._ready: collections.deque[Box] = collections.deque()
    self._used: collections.deque[Box] = collections.deque()
    self._taken: set[Box] = set()
    self._closed = False
    self._thread: threading.Thread | None = None

  def take(self) -> Box:
    """A fresh box: one that waits, or one made now. Raises Unavailable, or SandboxError where the pool is closed."""
    with self._condition:
      if self._closed:
        raise base.SandboxError('The pool of boxes is closed.')
      if self._thread is None and self._size:
        self._thread = threading.Thread(target=self._work, name='boxes', daemon=True)
        self._thread.start()
      box = self._ready.popleft() if self._ready else None
      self._condition.notify_all()
    box = box or self._make()
    with self._condition:
      if not self._closed:
        self._taken.add(box)
        return box
    box.close()
    raise base.SandboxError('The pool of boxes is closed.')

  def give_back(self, box: Box) -> None:
    """Ends a box that was taken: in the pool's own thread, which takes no time, or here where that thread is behind with `size` boxes, so
    that boxes are not taken faster than they are ended."""
    with self._condition:
      self._taken.discard(box)
      if not self._closed and self._thread is not None and len(self._used) < self._size:
        self._used.append(box)
        self._condition.notify_all()
        return
    box.close()

  def close(self) -> None:
    """Ends all boxes, also those that were taken."""
    with self._condition:
      self._closed = True
      boxes = [*self._ready, *self._used, *self._taken]
      self._ready.clear()
      self._used.clear()
      self._taken.clear()
      self._condition.notify_all()
      thread = self._thread
    for box in boxes:
      box.close()
    if thread is not None:
      thread.join(60.0)

  def wait_ready(self, count: int, timeout_s: float) -> bool:
    """Waits until `count` boxes are ready; False after the time-out."""
    deadline = time.monotonic() + timeout_s
    with self._condition:
      if self._thread is None and self._size and not self._closed:
        self._thread = threading.Thread(target=self._work, name='boxes', daemon=True)
        self._thread.start()
      while len(self._ready) < count and time.monotonic() < deadline:
        self._condition.wait(min(WAIT_S, max(0.0, deadline - time.monotonic())))
      return len(self._ready) >= count

  def __enter__(self) -> Pool:
    return self

  def __exit__(self, *_: Any) -> None:
    self.close()

  def _work(self) -> None:
    """Ends used boxes and makes new ones, until the pool is closed."""
    while True:
      with self._condition:
        while not self._closed and not self._used and len(self._ready) >= self._size:
          self._condition.wait(WAIT_S)
        if self._closed:
          return
        used = self._used.popleft() if self._used else None
        short = len(self._ready) < self._size
      if used is not None:
        used.close()
      if short and not self._add():
        time.sleep(WAIT_S)

  def _add(self) -> bool:
    """Makes one box more; False where that fails now (`take` then meets the same failure and tells)."""
    try:
      box = self._make()
    except Exception as error:  # pylint: disable=broad-except
      logging.getLogger(__name__).warning('No box could be made ready: %s', error)
      return False
    with self._condition:
      if not self._closed:
        self._ready.append(box)
        self._condition.notify_all()
        return True
    box.close()
    return True
