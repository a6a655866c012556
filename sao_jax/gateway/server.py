"""The gateway: an OpenAI-compatible server whose answers are turns of the policy.

    POST /v1/chat/completions   a turn; see `chat.py` for what is read and written
    GET  /v1/models             the one policy
    GET  /v1/sessions/me        the session of the key, with the exact tokens of every turn
    GET  /health                whether the server lives; needs no key

It does no token work: a request is put into the mailbox of its key's account and answered when the other side has a turn. It listens on
loopback unless told otherwise, speaks plain HTTP, and runs in one thread of its own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import ipaddress
import json
import logging
import pathlib
import threading
import time
from typing import Any, Callable, Protocol

from sao_jax.gateway import chat
from sao_jax.gateway.chat import Answer, ChatRequest
from sao_jax.gateway.http import HttpError, HttpLimits, HttpServer, Link, Request, Response
from sao_jax.gateway.sessions import Delivery, Keys, Session
from sao_jax.threads import WorkerGroup

START_S, CLOSE_S = 10.0, 5.0
MODEL = 'policy'


class Account(Protocol):
  """Whom a key stands for: a `Session`, or many of them."""

  def ask(self, request: ChatRequest) -> tuple[asyncio.Future[Answer], Delivery]: ...

  def transcript(self) -> dict[str, Any]: ...


@dataclasses.dataclass(frozen=True)
class GatewaySettings:
  """Where to listen and what to allow.

  Attributes:
    host: an address; other machines reach only what is not loopback, and what they send and get is not encrypted.
    port: 0 for any that is free.
    requests_per_s, burst: of one key; beyond, it is answered 429. `burst` may come at once.
    http: sizes and times.
  """

  host: str = '127.0.0.1'
  port: int = 0
  requests_per_s: float = 50.0
  burst: int = 100
  http: HttpLimits = HttpLimits()

  def __post_init__(self):
    if not isinstance(self.host, str) or not self.host:
      raise ValueError(f'host must be an address such as 127.0.0.1, got {self.host!r}.')
    if isinstance(self.port, bool) or not isinstance(self.port, int) or not 0 <= self.port <= 65535:
      raise ValueError(f'port must be an integer in [0, 65535], got {self.port!r}.')
    if not self.requests_per_s > 0 or not self.burst >= 1:
      raise ValueError(f'requests_per_s must be above 0 and burst at least 1, got {self.requests_per_s!r} and {self.burst!r}.')


class Bucket:
  """A rate limit: `burst` at once, then `rate` a second."""

  def __init__(self, rate: float, burst: int, now: Callable[[], float] = time.monotonic):
    self._rate, self._burst, self._now = rate, burst, now
    self._level, self._at = float(burst), now()

  def take(self) -> float:
    """0, or the seconds to wait for the next."""
    now = self._now()
    self._level = min(self._burst, self._level + (now - self._at) * self._rate)
    self._at = now
    if self._level < 1.0:
      return (1.0 - self._level) / self._rate
    self._level -= 1.0
    return 0.0


class Gateway:
  """The server and its accounts. Starts with `start`, and can be closed once."""

  def __init__(self, settings: GatewaySettings = GatewaySettings(), *, unix_socket: pathlib.Path | None = None):
    self.settings = settings
    self.unix_socket = unix_socket
    self._keys, self._buckets = Keys(), {}
    self._group = WorkerGroup()
    self._ready = threading.Event()
    self._loop: asyncio.AbstractEventLoop | None = None
    self._done: asyncio.Event | None = None
    self._failure: OSError | None = None
    self._http = HttpServer(self._handle, settings.http)
    self.port = 0

  def start(self) -> 'Gateway':
    """Listens. Raises OSError where the address cannot be had."""
    if not _is_loopback(self.settings.host):
      logging.warning(
          'The gateway listens on %s, which is not a loopback address: whoever reaches it sees keys and conversations in plain text.',
          self.settings.host)
    self._group.start('gateway', self._run)
    if not self._ready.wait(START_S):
      raise TimeoutError(f'The gateway did not start within {START_S:g} s.')
    if self._failure is not None:
      raise self._failure
    return self

  @property
  def url(self) -> str:
    """The base URL for clients."""
    host = self.settings.host
    return f'http://{f"[{host}]" if ":" in host else host}:{self.port}/v1'

  @property
  def loop(self) -> asyncio.AbstractEventLoop:
    if self._loop is None:
      raise RuntimeError('The gateway has not been started.')
    return self._loop

  @property
  def faults(self) -> list[BaseException]:
    """Errors of the server itself, each of which a client was told of as status 500."""
    return list(self._http.faults)

  def open(self, *, tool_format: str = 'hermes') -> tuple[Session, str]:
    """A new session and its key."""
    session = Session(loop=self.loop, tool_format=tool_format)
    return session, self.add(session)

  def add(self, account: Account, key: str | None = None) -> str:
    """Admits an account; its key."""
    return self._keys.add(account, key)

  def remove(self, key: str) -> None:
    """The key is over; requests that wait are the account's business."""
    self._keys.remove(key)
    if self._loop is not None and not self._loop.is_closed():
      self._loop.call_soon_threadsafe(self._buckets.pop, key, None)

  def close(self) -> None:
    """Ends the server and its thread; connections are cut."""
    if self._loop is not None and not self._loop.is_closed():
      try:
        self._loop.call_soon_threadsafe(self._done.set)
      except RuntimeError:  # It has just ended.
        pass
    late = self._group.close(CLOSE_S)
    self._group.check()
    if late:
      raise TimeoutError(f'The gateway did not end within {CLOSE_S:g} s.')

  def _run(self, stop: threading.Event) -> None:
    del stop  # Told by `_done`, which wakes the loop.
    with asyncio.Runner() as runner:
      self._loop = runner.get_loop()
      runner.run(self._main())

  async def _main(self) -> None:
    self._done = asyncio.Event()
    try:
      self.port = await self._http.listen(self.settings.host, self.settings.port)
      if self.unix_socket is not None:
        await self._http.listen_unix(str(self.unix_socket))
    except OSError as error:
      where = f'{self.settings.host}:{self.settings.port}'
      self._failure = OSError(error.errno, f'The gateway cannot listen on {where}: {error.strerror or error}. Choose another port or host.')
      await self._http.close()
      return
    finally:
      self._ready.set()
    await self._done.wait()
    await self._http.close()

  # --- Requests ----------------------------------------------------------------------------------------------------------------

  async def _handle(self, request: Request, link: Link) -> Response:
    routes = {
        '/health': ('GET', None), '/v1/models': ('GET', self._models), f'/v1/models/{MODEL}': ('GET', self._model),
        '/v1/chat/completions': ('POST', self._chat), '/v1/sessions/me': ('GET', self._session)}
    if request.path not in routes:
      raise HttpError(404, f'There is no {request.path[:200]}; there are: {", ".join(routes)}.', code='not_found')
    method, function = routes[request.path]
    if request.method != method and not (method == 'GET' and request.method == 'HEAD'):
      raise HttpError(405, f'{request.path} takes {method}.', headers={'Allow': 'GET, HEAD' if method == 'GET' else method})
    if function is None:
      return Response(200, b'{"status":"ok"}')
    key, account = self._keys.find(request.headers.get('authorization', ''))
    settings = self.settings
    wait_s = self._buckets.setdefault(key, Bucket(settings.requests_per_s, settings.burst)).take()
    if wait_s:
      raise HttpError(
          429, f'This key may send {settings.requests_per_s:g} requests a second.', code='rate_limit_exceeded',
          headers={'Retry-After': str(int(wait_s) + 1), 'Retry-After-Ms': str(int(wait_s * 1000) + 1)})
    return await function(request, account, link)

  async def _models(self, request: Request, account: Account, link: Link) -> Response:
    del request, account, link
    return Response(200, json.dumps({'object': 'list', 'data': [_MODEL_OBJECT]}).encode())

  async def _model(self, request: Request, account: Account, link: Link) -> Response:
    del request, account, link
    return Response(200, json.dumps(_MODEL_OBJECT).encode())

  async def _session(self, request: Request, account: Account, link: Link) -> Response:
    del request, link
    return Response(200, json.dumps(account.transcript(), allow_nan=False).encode())

  async def _chat(self, request: Request, account: Account, link: Link) -> Response:
    asked = chat.parse(request.body)
    future, delivery = account.ask(asked)
    try:
      answer = await link.unless_gone(future)
    finally:
      future.cancel()  # Of no effect on an answer that is there.
    body, kind = chat.write(asked, answer)
    headers = {chat.OVERRIDDEN: ','.join(filter(_is_plain, asked.overridden))} if asked.overridden else {}
    return Response(200, body, kind, headers, on_sent=delivery.sent)


_MODEL_OBJECT = {'id': MODEL, 'object': 'model', 'created': 0, 'owned_by': 'sao_jax'}


def _is_plain(name: str) -> bool:
  """Whether a name may stand in a header."""
  return name.isascii() and name.replace('_', '').replace('-', '').isalnum()


def _is_loopback(host: str) -> bool:
  try:
    return ipaddress.ip_address(host).is_loopback
  except ValueError:
    return host == 'localhost'
