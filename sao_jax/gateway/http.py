"""A small HTTP/1.1 server on asyncio streams that trusts nothing it reads. It knows nothing of chats.

A connection is served one request after the other, pipelined ones in their order. Everything has a limit: the request line, the headers and
their number, the body, the time for each of them, the number of connections. Bodies come with a Content-Length: a request with a
Transfer-Encoding is answered 411, so that no two readers can disagree about where it ends. What is no HTTP is answered 400 and the
connection closed.

A handler is told when its client has gone (`Link.gone`): closed or half-closed, which counts the same here. `Response.on_sent` is called
when all of a response has been handed to the kernel, with the link: if the client resets the connection later, without having read it all,
`Link.broken` says so.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from typing import Any, Awaitable, Callable, Mapping

REASONS = {
    200: 'OK', 400: 'Bad Request', 401: 'Unauthorized', 404: 'Not Found', 405: 'Method Not Allowed', 408: 'Request Timeout', 410: 'Gone',
    411: 'Length Required', 413: 'Content Too Large', 417: 'Expectation Failed', 429: 'Too Many Requests',
    431: 'Request Header Fields Too Large', 500: 'Internal Server Error', 503: 'Service Unavailable', 505: 'HTTP Version Not Supported'}
_REQUEST_LINE = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]{1,32}) (/[\x21-\x7e]*|\*|[a-z]+://[\x21-\x7e]*) HTTP/(\d)\.(\d)")
_HEADER = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):([^\x00-\x08\x0a-\x1f\x7f]*)")
_LINGER_BYTES, _LINGER_S = 64 << 20, 2.0  # What is read and thrown away of a refused request, so that its client reads why.


@dataclasses.dataclass(frozen=True)
class HttpLimits:
  """Sizes in bytes, times in seconds."""

  head_bytes: int = 32_768  # Request line and headers.
  headers: int = 100
  body_bytes: int = 16 << 20
  head_s: float = 10.0  # For the whole head, from its first byte.
  body_s: float = 30.0
  idle_s: float = 120.0  # Between two requests of a connection.
  write_s: float = 30.0  # For a client to take a response.
  connections: int = 1024

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ValueError(f'The limit {field.name} must be a number above 0, got {value!r}.')


class HttpError(Exception):
  """What ends a request with an error status. `code` is for programs, the message for people."""

  def __init__(
      self, status: int, message: str, *, code: str | None = None, param: str | None = None, headers: Mapping[str, str] | None = None):
    super().__init__(message)
    self.status, self.message, self.code, self.param, self.headers = status, message, code, param, dict(headers or {})


@dataclasses.dataclass(frozen=True)
class Request:
  """One request; header names in lower case."""

  method: str
  path: str
  headers: Mapping[str, str]
  body: bytes


@dataclasses.dataclass(frozen=True)
class Response:
  """A whole response. `on_sent(link)` is called when it has been handed to the kernel."""

  status: int
  body: bytes
  content_type: str = 'application/json'
  headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
  on_sent: Callable[['Link'], None] | None = None


class Gone(Exception):
  """The client has left before its answer came."""


class Link(asyncio.StreamReaderProtocol):
  """One connection, and what is known of its client."""

  def __init__(self, serve: Callable[['Link', asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]], limit: int):
    self.gone, self.broken = asyncio.Event(), False
    super().__init__(asyncio.StreamReader(limit=limit), lambda reader, writer: serve(self, reader, writer))

  def eof_received(self) -> bool | None:
    self.gone.set()
    return super().eof_received()

  def connection_lost(self, exc: Exception | None) -> None:
    self.gone.set()
    self.broken = self.broken or exc is not None
    super().connection_lost(exc)

  async def unless_gone(self, future: asyncio.Future[Any]) -> Any:
    """What `future` gives. Raises Gone where the client leaves before."""
    if not future.done():
      gone = asyncio.ensure_future(self.gone.wait())
      try:
        await asyncio.wait({future, gone}, return_when=asyncio.FIRST_COMPLETED)
      finally:
        gone.cancel()
    if not future.done() or self.gone.is_set():
      raise Gone
    return future.result()


Handler = Callable[[Request, Link], Awaitable[Response]]


def error_body(error: HttpError) -> bytes:
  """The error in OpenAI's form."""
  kinds = {401: 'authentication_error', 429: 'rate_limit_error', 500: 'server_error', 503: 'server_error'}
  kind = kinds.get(error.status, 'invalid_request_error')
  return json.dumps({'error': {'message': error.message, 'type': kind, 'param': error.param, 'code': error.code}}).encode()


class HttpServer:
  """Serves a handler on the addresses given to `listen`; all of it runs on one event loop."""

  def __init__(self, handler: Handler, limits: HttpLimits):
    self._handler, self._limits = handler, limits
    self._servers: list[asyncio.Server] = []
    self._tasks: set[asyncio.Task[Any]] = set()
    self.open_connections = 0
    self.faults: list[BaseException] = []  # Errors of handlers that are none of the client's: faults of ours. The last 16.

  async def listen(self, host: str, port: int) -> int:
    """Listens on a TCP address; the port, also where 0 asked for any."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Link(self._serve, self._limits.head_bytes), host, port, backlog=1024)
    self._servers.append(server)
    return server.sockets[0].getsockname()[1]

  async def listen_unix(self, path: str) -> None:
    loop = asyncio.get_running_loop()
    self._servers.append(await loop.create_unix_server(lambda: Link(self._serve, self._limits.head_bytes), path, backlog=1024))

  async def close(self) -> None:
    for server in self._servers:
      server.close()
    for task in list(self._tasks):
      task.cancel()
    await asyncio.gather(*self._tasks, return_exceptions=True)
    for server in self._servers:
      await server.wait_closed()

  async def _serve(self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    self._tasks.add(asyncio.current_task())
    self.open_connections += 1
    writer.transport.set_write_buffer_limits(high=0)  # `drain` then waits until the kernel has everything.
    try:
      if self.open_connections > self._limits.connections:
        await self._refuse(writer, reader, HttpError(503, 'Too many connections; try again later.', headers={'Retry-After': '1'}))
      else:
        while await self._one(link, reader, writer):
          pass
    except (OSError, Gone, asyncio.CancelledError):
      pass  # The client's own doing, or the end of the server, which asyncio would tell as an error of the connection.
    finally:
      self.open_connections -= 1
      self._tasks.discard(asyncio.current_task())
      writer.close()

  async def _one(self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Serves one request; whether the connection goes on."""
    try:
      request, keep = await self._read(reader, writer)
    except HttpError as error:
      await self._refuse(writer, reader, error)
      return False
    if request is None:
      return False
    try:
      response = await self._handler(request, link)
    except HttpError as error:
      response = Response(error.status, error_body(error), headers=error.headers)
    except (Gone, ConnectionError, asyncio.CancelledError):
      raise
    except Exception as error:  # A fault of ours: told to the client, kept for whoever asks, and the server goes on.
      self.faults = [*self.faults[-15:], error]
      response = Response(500, error_body(HttpError(500, f'The server failed: {type(error).__name__}.')))
    if link.gone.is_set():
      raise Gone
    async with asyncio.timeout(self._limits.write_s):
      writer.write(_head(response, keep) + (b'' if request.method == 'HEAD' else response.body))
      await writer.drain()
    if response.on_sent is not None:
      response.on_sent(link)
    return keep

  async def _refuse(self, writer: asyncio.StreamWriter, reader: asyncio.StreamReader, error: HttpError) -> None:
    """Tells an error and ends the connection; what the client still sends is read first, or it would never see the answer."""
    async with asyncio.timeout(self._limits.write_s):
      writer.write(_head(response := Response(error.status, error_body(error), headers=error.headers), False) + response.body)
      await writer.drain()
    if writer.can_write_eof():
      writer.write_eof()
    try:
      async with asyncio.timeout(_LINGER_S):
        left = _LINGER_BYTES
        while left > 0 and (data := await reader.read(1 << 16)):
          left -= len(data)
    except TimeoutError:
      pass

  # --- Reading -----------------------------------------------------------------------------------------------------------------

  async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[Request | None, bool]:
    """The next request and whether the connection may go on after it; None where there is no more. Raises HttpError."""
    try:
      async with asyncio.timeout(self._limits.idle_s):
        first = await reader.read(1)
    except TimeoutError:
      return None, False
    if not first:
      return None, False
    try:
      async with asyncio.timeout(self._limits.head_s):
        head = first + await reader.readuntil(b'\r\n\r\n')
    except TimeoutError:
      raise HttpError(408, f'The head of the request did not come within {self._limits.head_s:g} s.') from None
    except asyncio.LimitOverrunError:
      raise HttpError(431, f'The head of a request may have {self._limits.head_bytes} bytes.') from None
    except asyncio.IncompleteReadError:
      raise HttpError(400, 'The request ends in its head.') from None
    method, path, version, headers = self._parse_head(head)
    length = _body_length(method, headers)
    if length > self._limits.body_bytes:
      raise HttpError(413, f'The body of a request may have {self._limits.body_bytes} bytes, got {length}.')
    expect = headers.get('expect', '')
    if expect and expect.lower() != '100-continue':
      raise HttpError(417, 'Only "Expect: 100-continue" is known.')
    if expect and length:
      writer.write(b'HTTP/1.1 100 Continue\r\n\r\n')
    try:
      async with asyncio.timeout(self._limits.body_s):
        body = await reader.readexactly(length) if length else b''
    except TimeoutError:
      raise HttpError(408, f'The body of the request did not come within {self._limits.body_s:g} s.') from None
    except asyncio.IncompleteReadError:
      raise HttpError(400, 'The request ends in its body.') from None
    tokens = {t.strip().lower() for t in headers.get('connection', '').split(',')}
    keep = 'close' not in tokens and (version == (1, 1) or 'keep-alive' in tokens)
    return Request(method, path, headers, body), keep

  def _parse_head(self, head: bytes) -> tuple[str, str, tuple[int, int], dict[str, str]]:
    lines = head[:-4].removeprefix(b'\r\n').split(b'\r\n')  # One empty line before a request is forgiven, as HTTP asks.
    found = _REQUEST_LINE.fullmatch(lines[0])
    if found is None:
      raise HttpError(400, 'The request line is not that of an HTTP request.')
    version = (int(found[3]), int(found[4]))
    if version not in ((1, 0), (1, 1)):
      raise HttpError(505, 'HTTP/1.1 and HTTP/1.0 are spoken here.')
    if len(lines) - 1 > self._limits.headers:
      raise HttpError(431, f'A request may have {self._limits.headers} headers, got {len(lines) - 1}.')
    headers: dict[str, str] = {}
    for line in lines[1:]:
      field = _HEADER.fullmatch(line)
      if field is None:
        raise HttpError(400, 'A header is not of the form "name: value".')
      name, value = field[1].decode('ascii').lower(), field[2].decode('latin-1').strip(' \t')
      if name in headers and name in ('host', 'content-length', 'authorization', 'transfer-encoding'):
        raise HttpError(400, f'The header {name} is there twice.')
      headers[name] = f'{headers[name]}, {value}' if name in headers else value
    if version == (1, 1) and 'host' not in headers:
      raise HttpError(400, 'A request of HTTP/1.1 must have the header Host.')
    return found[1].decode('ascii'), found[2].decode('ascii').split('?', 1)[0], version, headers


def _body_length(method: str, headers: Mapping[str, str]) -> int:
  """Bytes of the body. Raises HttpError."""
  if 'transfer-encoding' in headers:
    if 'content-length' in headers:
      raise HttpError(400, 'A request must not have both Content-Length and Transfer-Encoding.')
    raise HttpError(411, 'Send the body with a Content-Length; transfer encodings are not read.')
  text = headers.get('content-length')
  if text is None:
    if method in ('POST', 'PUT', 'PATCH'):
      raise HttpError(411, 'The request needs a Content-Length.')
    return 0
  if not re.fullmatch(r'[0-9]{1,15}', text):
    raise HttpError(400, 'Content-Length must be a number of bytes.')
  return int(text)


def _head(response: Response, keep: bool) -> bytes:
  lines = [
      f'HTTP/1.1 {response.status} {REASONS.get(response.status, "Error")}', f'Content-Type: {response.content_type}',
      f'Content-Length: {len(response.body)}', 'Cache-Control: no-store', 'X-Content-Type-Options: nosniff',
      f'Connection: {"keep-alive" if keep else "close"}', *(f'{name}: {value}' for name, value in response.headers.items())]
  return ('\r\n'.join(lines) + '\r\n\r\n').encode('latin-1')
