"""A session: the mailbox between the requests of one client and the policy that answers them.

Requests come on the server's event loop (`ask`); turns go out and in on some other thread (`next`, `answer`). One turn is sampled at a
time; further requests wait in their order.

A request with the same conversation as the one that is being sampled, or as the last one answered if no client has wholly received that
answer, is a retry: it gets the same answer, and nothing is sampled. After a whole delivery it asks for another sample.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import hashlib
import hmac
import secrets
import threading
import time
from typing import Any, Callable

from sao_jax.gateway import history
from sao_jax.gateway.chat import Answer, ChatRequest
from sao_jax.gateway.http import HttpError, Link

MAX_WAITING = 64  # Requests of one session that wait at once.


Identity = tuple[tuple[history.Key, ...], Any]  # The keys of the messages, and all else that is asked.


def identity_of(request: ChatRequest) -> Identity:
  """Equal for requests that ask the same of the policy; the form of the answer does not matter."""
  return tuple(map(history.key_of, request.messages)), (repr(request.tools), request.calls, request.max_tokens, request.stop)


class Ended(Exception):
  """The session is over."""


@dataclasses.dataclass(frozen=True)
class Prompt:
  """What the policy is to be shown next.

  Attributes:
    messages: {'role', 'content'} each; the whole conversation where `restart` is True or it is the first, else what is new.
    restart: the conversation is not a continuation of the one before.
    tools: JSON-schema functions that hold from here on.
    max_tokens: of the turn, None for the run's own limit.
    stop: strings that end the turn.
  """

  messages: tuple[dict[str, str], ...]
  restart: bool
  tools: tuple[dict[str, Any], ...]
  max_tokens: int | None
  stop: tuple[str, ...]


class Delivery:
  """Whether one answer has reached one client whole: all of it was handed over, and the connection was not broken afterwards."""

  def __init__(self):
    self._link: Link | None = None

  def sent(self, link: Link) -> None:
    self._link = link

  @property
  def whole(self) -> bool:
    return self._link is not None and not self._link.broken


@dataclasses.dataclass(eq=False)
class Asked:
  """A request and all who wait for its answer, and later those who got it."""

  request: ChatRequest
  identity: Identity
  waiters: list[asyncio.Future[Answer]] = dataclasses.field(default_factory=list)
  deliveries: list[Delivery] = dataclasses.field(default_factory=list)
  answer: Answer | HttpError | None = None

  def abandoned(self) -> bool:
    """Whether all who asked have left."""
    return all(waiter.cancelled() for waiter in self.waiters)

  def delivered(self) -> bool:
    return any(delivery.whole for delivery in self.deliveries)


class Session:
  """One client's conversation with the policy, and the record of what was sampled for it."""

  def __init__(self, *, loop: asyncio.AbstractEventLoop, tool_format: str = 'hermes', now: Callable[[], float] = time.monotonic):
    self._loop, self._now = loop, now
    self._condition = threading.Condition()
    self._waiting: collections.deque[Asked] = collections.deque()
    self._current: Asked | None = None  # Being sampled.
    self._last: Asked | None = None  # Answered last.
    self._ended: HttpError | None = None
    self._history = history.History(tool_format)
    self._tools: tuple[dict[str, Any], ...] = ()
    self._record = Record()
    self.counts: collections.Counter[str] = collections.Counter()
    self.used_s = now()  # When something last came or went.

  # --- On the event loop -------------------------------------------------------------------------------------------------------

  def ask(self, request: ChatRequest, identity: Identity | None = None) -> tuple[asyncio.Future[Answer], Delivery]:
    """A future for the answer, to be cancelled by a client that leaves; the delivery is to be told of the answer's way.

    Raises HttpError: 410 after the end of the session, 429 while too many requests wait.
    """
    identity, delivery, future = identity or identity_of(request), Delivery(), self._loop.create_future()
    with self._condition:
      if self._ended is not None:
        raise self._ended
      self.used_s = self._now()
      self.counts['requests'] += 1
      self.counts['overridden'] += bool(request.overridden)
      last = self._last
      if last is not None and last.identity == identity and isinstance(last.answer, Answer) and not last.delivered():
        self.counts['repeated'] += 1
        last.deliveries.append(delivery)
        future.set_result(last.answer)
        return future, delivery
      for asked in (self._current, *self._waiting):
        if asked is not None and asked.identity == identity:
          self.counts['repeated'] += 1
          break
      else:
        if len(self._waiting) >= MAX_WAITING:
          raise HttpError(429, f'{MAX_WAITING} requests of this session wait already.', headers={'Retry-After': '1'})
        asked = Asked(request, identity)
        self._waiting.append(asked)
        self._condition.notify_all()
      asked.waiters.append(future)
      asked.deliveries.append(delivery)
    return future, delivery

  def matches(self, request: ChatRequest, identity: Identity) -> int:
    """How many messages of the known conversation a request goes on with; 0 where it is another one. For a retry: all."""
    with self._condition:
      if self._ended is not None:
        return 0
      last = (self._last,) if self._last is not None and not self._last.delivered() else ()
      if any(a is not None and a.identity == identity for a in (self._current, *last, *self._waiting)):
        return len(request.messages)
      return self._history.continues(identity[0]) if self._current is None and not self._waiting else 0

  # --- On the environment's thread ---------------------------------------------------------------------------------------------

  def next(self, timeout_s: float, alive: Callable[[], bool] = lambda: True, poll_s: float = 0.1) -> Prompt | None:
    """Waits for a request that needs a turn; None where `alive` says that there will be none.

    Raises:
      TimeoutError: none came in time.
      Ended: the session was ended meanwhile.
    """
    deadline = self._now() + timeout_s
    with self._condition:
      while True:
        if self._ended is not None:
          raise Ended
        while self._waiting and self._waiting[0].abandoned():
          self._waiting.popleft()  # Nobody waits for it, and nothing was sampled for it.
        if self._waiting:
          return self._begin(self._waiting.popleft())
        if not alive():
          return None
        if self._now() >= deadline:
          raise TimeoutError
        self._condition.wait(min(poll_s, max(0.001, deadline - self._now())))

  def _begin(self, asked: Asked) -> Prompt:
    self._current = asked
    messages, restart = self._history.take(asked.request.messages, asked.identity[0])
    first, other = not self._record.turns, asked.request.tools != self._tools
    if other and not first and not restart:
      messages, restart = self._history.whole(asked.request.messages), True
    self._tools = asked.request.tools
    self._record.asked(messages, restart, self._tools if other or first else None)
    return Prompt(tuple(messages), restart, self._tools, asked.request.max_tokens, asked.request.stop)

  @property
  def idle(self) -> bool:
    """Whether no request waits."""
    with self._condition:
      return self._current is None and not self._waiting

  @property
  def over(self) -> bool:
    with self._condition:
      return self._ended is not None

  def whole(self) -> list[dict[str, str]]:
    """The conversation of the request whose turn is being sampled, from its first message on, as the policy is to be shown it."""
    with self._condition:
      return self._history.whole(self._current.request.messages) if self._current is not None else []

  @property
  def request(self) -> ChatRequest:
    """The request whose turn is being sampled."""
    with self._condition:
      if self._current is None:
        raise RuntimeError('No request waits for a turn.')
      return self._current.request

  def answer(self, answer: Answer) -> None:
    """Sends the sampled turn to all who wait for it."""
    with self._condition:
      asked, self._current = self._current, None
      if asked is None:
        if self._ended is not None:
          return
        raise RuntimeError('No request waits for an answer.')
      self._history.answered(answer)
      self._record.answered(answer)
      self.used_s = self._now()
      self._settle(asked, answer)
      self._last = asked

  def refuse(self, error: HttpError) -> None:
    """Answers the request with an error in place of a turn."""
    with self._condition:
      asked, self._current = self._current, None
      if asked is not None:
        self._settle(asked, error)

  def end(self, error: HttpError | None = None) -> None:
    """Ends the session: all who wait, and all who come, get the error (410 where none is given)."""
    with self._condition:
      if self._ended is not None:
        return
      self._ended = error or HttpError(410, 'This session is over.', code='session_over')
      for asked in (self._current, *self._waiting):
        if asked is not None:
          self._settle(asked, self._ended)
      self._current = None
      self._waiting.clear()
      self._condition.notify_all()

  def _settle(self, asked: Asked, answer: Answer | HttpError) -> None:
    asked.answer, waiters, asked.waiters = answer, asked.waiters, []
    if self._loop.is_closed():
      return

    def tell() -> None:
      for waiter in waiters:
        if not waiter.done():
          (waiter.set_exception if isinstance(answer, HttpError) else waiter.set_result)(answer)

    self._loop.call_soon_threadsafe(tell)

  def transcript(self) -> dict[str, Any]:
    """All turns so far with their exact tokens, JSON-able."""
    with self._condition:
      return {'ended': self._ended is not None, 'counts': dict(self.counts), **self._record.plain()}


class Record:
  """What was asked and sampled in a session: segments of tokens, and turns as places in them."""

  def __init__(self):
    self.turns: list[dict[str, Any]] = []
    self._segments: list[list[int]] = []
    self._pending: dict[str, Any] = {}

  def asked(self, messages: list[dict[str, str]], restart: bool, tools: Any) -> None:
    self._pending = {'messages': messages, 'restart': restart, **({} if tools is None else {'tools': tools})}

  def answered(self, answer: Answer) -> None:
    before = list(answer.prompt_ids)
    if not self._segments or before[:len(self._segments[-1])] != self._segments[-1]:
      self._segments.append([])
    segment = self._segments[-1]
    segment[:] = before + list(answer.ids)
    self.turns.append({
        **self._pending, 'segment': len(self._segments) - 1, 'start': len(before), 'stop': len(segment), 'text': answer.text,
        'log_probs': list(map(float, answer.log_probs)), 'policy_versions': list(map(int, answer.versions)), 'content': answer.content,
        'tool_calls': [{'id': i, 'name': n, 'arguments': a} for i, n, a in answer.calls], 'finish_reason': answer.finish_reason})

  def plain(self) -> dict[str, Any]:
    return {'segments': [list(s) for s in self._segments], 'turns': list(self.turns)}


class Keys:
  """Accounts by their secret keys. A key is looked up by its digest, which an attacker cannot steer, and compared in constant time."""

  def __init__(self, remembered: int = 4096):
    self._lock = threading.Lock()
    self._accounts: dict[bytes, tuple[str, Any]] = {}
    self._over: collections.deque[bytes] = collections.deque(maxlen=remembered)

  def add(self, account: Any, key: str | None = None) -> str:
    """Admits an account; its key, a new one for None."""
    key = key or f'sk-{secrets.token_urlsafe(32)}'
    with self._lock:
      self._accounts[_digest(key)] = (key, account)
    return key

  def remove(self, key: str) -> None:
    """The key is over: it is answered 410 from now on."""
    digest = _digest(key)
    with self._lock:
      if self._accounts.pop(digest, None) is not None:
        self._over.append(digest)

  def find(self, authorization: str) -> tuple[str, Any]:
    """The key and its account. Raises HttpError: 401 or 410."""
    kind, _, key = authorization.partition(' ')
    key = key.strip()
    if kind.lower() != 'bearer' or not key:
      raise HttpError(401, 'Give the key of the session in the header "Authorization: Bearer KEY".', code='invalid_api_key',
                      headers={'WWW-Authenticate': 'Bearer'})
    digest = _digest(key)
    with self._lock:
      known, account = self._accounts.get(digest, ('', None))
      over = digest in self._over
    if hmac.compare_digest(known.encode(), key.encode('utf-8', 'surrogateescape')):
      return known, account
    if over:
      raise HttpError(410, 'The session of this key is over.', code='session_over')
    raise HttpError(401, 'There is no session with this key.', code='invalid_api_key', headers={'WWW-Authenticate': 'Bearer'})


def _digest(key: str) -> bytes:
  return hashlib.sha256(key.encode('utf-8', 'surrogateescape')).digest()
