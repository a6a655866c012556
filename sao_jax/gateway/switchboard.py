"""Many conversations under one key: each request finds the one that it goes on with, or begins another.

What a `Session` is for one scaffold, a `Switchboard` is for a client that nobody started: every conversation is a session, and so a
rollout, of its own. One that has been quiet for long makes room for a new one.
"""

from __future__ import annotations

import asyncio
import collections
import threading
from typing import Any

from sao_jax.gateway.chat import Answer, ChatRequest
from sao_jax.gateway.http import HttpError
from sao_jax.gateway.sessions import Delivery, Identity, Session, identity_of

MAX_NEW = 256  # Conversations that wait for a place.


class Switchboard:
  """The account of one key."""

  def __init__(self, *, loop: asyncio.AbstractEventLoop, tool_format: str = 'hermes'):
    self._loop, self._tool_format = loop, tool_format
    self._lock = threading.Lock()
    self._sessions: dict[int, Session] = {}
    self._new: collections.deque[int] = collections.deque()
    self._count = 0
    self._closed = False

  def ask(self, request: ChatRequest) -> tuple[asyncio.Future[Answer], Delivery]:
    """As `Session.ask`. Raises HttpError 429 while too many new conversations wait."""
    identity = identity_of(request)
    while True:
      session = self._session_of(request, identity)
      try:
        return session.ask(request, identity)
      except HttpError:
        if not session.over:
          raise  # Else it was ended just now, to make room say: as if the request had come a moment later, it begins another.

  def _session_of(self, request: ChatRequest, identity: Identity) -> Session:
    """The session that a request goes on with, or a new one."""
    with self._lock:
      if self._closed:
        raise HttpError(410, 'The server is ending.')
      matches = [(session.matches(request, identity), number) for number, session in self._sessions.items()]
      length, number = max(matches, default=(0, -1))
      if not length:
        if len(self._new) >= MAX_NEW:
          raise HttpError(429, f'{MAX_NEW} conversations wait for a place already.', headers={'Retry-After': '5'})
        number, self._count = self._count, self._count + 1
        self._sessions[number] = Session(loop=self._loop, tool_format=self._tool_format)
        self._new.append(number)
      return self._sessions[number]

  def take(self) -> int | None:
    """The number of the next new conversation; None where there is none."""
    with self._lock:
      return self._new.popleft() if self._new else None

  def make_room(self) -> bool:
    """Ends the conversation that has been quiet for longest, if a new one waits; whether one was ended."""
    with self._lock:
      waiting = set(self._new)
      quiet = [(session.used_s, number) for number, session in self._sessions.items() if number not in waiting and session.idle]
      if not waiting or not quiet:
        return False
      session = self._sessions[min(quiet)[1]]
    session.end()
    return True

  def session(self, number: int) -> Session:
    with self._lock:
      return self._sessions[number]

  def end(self, number: int, error: HttpError | None = None) -> dict[str, Any]:
    """Ends a conversation, whose requests get the error; its transcript."""
    with self._lock:
      session = self._sessions.pop(number)
    session.end(error)
    return session.transcript()

  def close(self) -> None:
    with self._lock:
      self._closed, sessions = True, list(self._sessions.values())
    for session in sessions:
      session.end()

  def transcript(self) -> dict[str, Any]:
    with self._lock:
      sessions = dict(self._sessions)
    return {'conversations': {str(number): session.transcript() for number, session in sessions.items()}}
