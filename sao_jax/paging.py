"""Which session holds which page of the cache: host-side bookkeeping, no arrays.

A session's page `i` holds its token positions `i * page_size` to `(i + 1) * page_size - 1`.
"""

from __future__ import annotations

import collections


class PagePool:
  """Pages of one size, handed out one by one; the caller decides whom to take some from when none is free.

  Invariant: every page is either free or held by exactly one session.
  """

  def __init__(self, num_pages: int, page_size: int):
    """Raises ValueError unless both are positive."""
    if num_pages < 1 or page_size < 1:
      raise ValueError(f'A page pool needs at least one page of at least one token, got {num_pages} pages of {page_size}.')
    self.num_pages, self.page_size = num_pages, page_size
    self._free = collections.deque(range(num_pages))
    self._held: dict[int, list[int]] = {}

  @property
  def free(self) -> int:
    return len(self._free)

  @property
  def used(self) -> int:
    return self.num_pages - len(self._free)

  def pages(self, session: int) -> list[int]:
    """Pages of `session`, in the order of its positions."""
    return self._held.get(session, [])

  def missing(self, session: int, length: int) -> int:
    """Pages that `session` still needs to hold `length` tokens."""
    return max(0, -(-length // self.page_size) - len(self.pages(session)))

  def grow(self, session: int, length: int) -> None:
    """Gives `session` pages for `length` tokens. Raises RuntimeError when too few are free: make room first."""
    missing = self.missing(session, length)
    if missing > len(self._free):
      raise RuntimeError(f'{missing} pages needed, {len(self._free)} free.')
    self._held.setdefault(session, []).extend(self._free.popleft() for _ in range(missing))

  def release(self, session: int) -> int:
    """Frees every page of `session`; returns how many there were."""
    pages = self._held.pop(session, [])
    self._free.extend(pages)
    return len(pages)

  def reset(self) -> None:
    """Frees everything; the pages are then handed out in the order of a new pool."""
    self._free = collections.deque(range(self.num_pages))
    self._held.clear()
