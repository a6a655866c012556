"""Who decodes and who holds pages: slots, the waiting line, parked sessions, eviction and preemption. Host state only.

A session is parked (its turn is over: no slot, pages kept), waiting (for a slot), or active (in a slot). What does not fit is made to fit
in this order: pages of parked sessions, the least recently used first; pages of waiting sessions, the last in line first; at last an active
session, the latest admitted, goes back to the head of the line. The oldest active session never gives way and the pages hold at least one
sequence of full length, so the line always moves.
"""

from __future__ import annotations

import collections

from sao_jax.paging import PagePool
from sao_jax.sessions import Session


class Schedule:
  """Sessions by number, slots by index, and the pages behind them.

  `counts` holds 'evictions', 'preemptions', 'tokens_recomputed' (cached tokens that were given up) and 'pages_used_max'.
  """

  def __init__(self, num_slots: int, pages: PagePool):
    self.sessions: dict[int, Session] = {}
    self.slots: list[Session | None] = [None] * num_slots
    self.waiting: collections.deque[Session] = collections.deque()
    self.pages = pages
    self.counts = dict.fromkeys(('evictions', 'preemptions', 'tokens_recomputed', 'pages_used_max'), 0)
    self._clock = 0  # Counts admissions and parkings.

  def active(self) -> list[Session]:
    """Sessions in slots, by slot."""
    return [s for s in self.slots if s is not None]

  def unfinished(self) -> list[Session]:
    """Sessions with a request: the active ones by slot, then the waiting ones in line."""
    return self.active() + list(self.waiting)

  def park(self, session: Session) -> None:
    """Ends or withdraws the session's request; it keeps its pages."""
    if session.slot >= 0:
      self._leave_slot(session)
    else:
      self.waiting.remove(session)
    session.end()
    session.order = self._tick()

  def remove(self, session: Session) -> None:
    """Forgets a parked session and frees its pages."""
    del self.sessions[session.number]
    self.pages.release(session.number)

  def admit(self, chunk_steps: int, *, only_begun: bool) -> None:
    """Gives free slots to the waiting, in order; stops at the first that finds no pages for its tokens and a chunk.

    Args:
      chunk_steps: most tokens of one chunk.
      only_begun: pass over turns that drew nothing yet.
    """
    for slot in [i for i, s in enumerate(self.slots) if s is None]:
      session = next((s for s in self.waiting if s.drawn or not only_begun), None)
      if session is None or not self._reserve(session, chunk_steps):
        return
      self.waiting.remove(session)
      session.slot, session.order = slot, self._tick()
      self.slots[slot] = session

  def make_room(self, chunk_steps: int) -> None:
    """Pages for the next chunk of every active session; the latest admitted give way where there are too few."""
    for session in sorted(self.active(), key=lambda s: s.order):
      while session.slot >= 0 and not self._reserve(session, chunk_steps):
        self._preempt(max(self.active(), key=lambda s: s.order))

  def start_over(self) -> None:
    """Active sessions go back to the head of the line in the order of their slots, and every page is freed: what follows depends only
    on the sessions and their order."""
    for session in reversed(self.active()):
      self._leave_slot(session)
      self.waiting.appendleft(session)
    self.pages.reset()
    for session in self.sessions.values():
      self.counts['tokens_recomputed'] += session.cached
      session.cached, session.loaded = 0, False

  def _tick(self) -> int:
    self._clock += 1
    return self._clock

  def _leave_slot(self, session: Session) -> None:
    self.slots[session.slot] = None
    session.slot, session.loaded = -1, False

  def _evict(self, session: Session) -> None:
    self.counts['evictions'] += 1
    self.counts['tokens_recomputed'] += session.cached
    self.pages.release(session.number)
    session.cached = 0

  def _preempt(self, session: Session) -> None:
    self.counts['preemptions'] += 1
    self._leave_slot(session)
    self.waiting.appendleft(session)
    self._evict(session)

  def _reserve(self, session: Session, chunk_steps: int) -> bool:
    """Pages for the session's tokens and one chunk, taken from sessions without a slot if need be. False where that is not enough."""
    length = session.length - 1 + min(chunk_steps, session.remaining)
    while self.pages.missing(session.number, length) > self.pages.free:
      parked = [s for s in self.sessions.values() if s.request is None and self.pages.pages(s.number)]
      waiting = [s for s in self.waiting if s is not session and self.pages.pages(s.number)]
      if not parked and not waiting:
        return False
      self._evict(min(parked, key=lambda s: s.order) if parked else waiting[-1])
    self.pages.grow(session.number, length)
    self.counts['pages_used_max'] = max(self.counts['pages_used_max'], self.pages.used)
    return True
