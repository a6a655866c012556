"""Runs a program that has no network but the gateway. A script of the standard library alone: it may run where nothing else is installed.

    unshare --user --map-root-user --net python forward.py SOCKET COMMAND [ARGUMENTS...]

The gateway's unix socket is reached through the file system, which a network namespace does not cut off. A loopback port of the namespace
is forwarded to it, the command runs with OPENAI_BASE_URL and OPENAI_API_BASE set to that port, and its exit status is this one's.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import socket
import struct
import sys

_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 0x1  # ioctl numbers of Linux: SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP.


def raise_loopback() -> None:
  """Turns the loopback device on, which is off in a new network namespace. Raises OSError where that is not allowed."""
  with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    name, flags = struct.unpack('16sH', fcntl.ioctl(s, _GET_FLAGS, struct.pack('16sH14x', b'lo', 0))[:18])
    if not flags & _UP:
      fcntl.ioctl(s, _SET_FLAGS, struct.pack('16sH14x', name, flags | _UP))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
  """Hands over what comes, and its end."""
  try:
    while data := await reader.read(1 << 16):
      writer.write(data)
      await writer.drain()
    writer.write_eof()
  except (ConnectionError, OSError):
    writer.transport.abort()  # A reset is handed over as one: the gateway then knows that its answer did not arrive.


async def _forward(path: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
  try:
    other_reader, other_writer = await asyncio.open_unix_connection(path)
  except OSError:
    writer.transport.abort()
    return
  await asyncio.gather(_pump(reader, other_writer), _pump(other_reader, writer))
  writer.close()
  other_writer.close()


async def run(path: str, command: list[str]) -> int:
  """Runs the command to its end; its exit status, 128 and the number for a signal."""
  raise_loopback()
  server = await asyncio.start_server(lambda r, w: _forward(path, r, w), '127.0.0.1', 0)
  url = f'http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1'
  process = await asyncio.create_subprocess_exec(*command, env={**os.environ, 'OPENAI_BASE_URL': url, 'OPENAI_API_BASE': url})
  asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, process.terminate)
  status = await process.wait()
  server.close()
  return status if status >= 0 else 128 - status


def main() -> int:
  if len(sys.argv) < 3:
    print(f'usage: {sys.argv[0]} SOCKET COMMAND [ARGUMENTS...]', file=sys.stderr)
    return 2
  try:
    return asyncio.run(run(sys.argv[1], sys.argv[2:]))
  except OSError as error:
    print(f'{sys.argv[0]}: {error}', file=sys.stderr)
    return 126


if __name__ == '__main__':
  sys.exit(main())
