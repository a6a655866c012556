"""Frames between the host and the warden of a box: a JSON header and blobs of bytes.

    4 bytes  length of the header, big-endian
    header   JSON object; 'sizes' holds the lengths of the blobs
    blobs    one after the other

Either side may be a socket or a pair of pipes. A reader states how much it takes; what is larger, or is no frame, raises `WireError`.
"""

import json
import os
import select
import struct
import time

MAX_HEADER = 8 << 20  # Bytes.


SLICE_S = 1.0  # Of a wait.


class WireError(Exception):
  """The other side is gone, silent for too long, or wrote what is no frame."""


class Late(WireError):
  """The other side has been silent for too long."""


def send(descriptor, header, blobs=(), deadline=None):
  """Writes one frame. Raises WireError when the other side does not take it by `deadline` (time.monotonic)."""
  write_all(descriptor, packed(header, blobs), deadline)


def packed(header, blobs=()):
  """The bytes of a frame."""
  head = json.dumps(dict(header, sizes=[len(b) for b in blobs])).encode('ascii')
  if len(head) > MAX_HEADER:
    raise WireError('the header of a frame has %d bytes, at most %d can be sent' % (len(head), MAX_HEADER))
  return b''.join((struct.pack('>I', len(head)), head) + tuple(blobs))


def receive(descriptor, limit, deadline=None):
  """(header, blobs) of the next frame, None where the other side has closed. `limit`: bytes of all blobs together."""
  prefix = _read(descriptor, 4, deadline, start=True)
  if prefix is None:
    return None
  length = struct.unpack('>I', prefix)[0]
  if length > MAX_HEADER:
    raise WireError('a header of %d bytes' % length)
  try:
    header = json.loads(_read(descriptor, length, deadline).decode('ascii'))
    sizes = header['sizes']
    good = isinstance(sizes, list) and all(type(s) is int and s >= 0 for s in sizes)
  except (ValueError, TypeError, KeyError, RecursionError) as error:
    raise WireError('a header that cannot be read: %s' % error)
  if not good or sum(sizes) > limit:
    raise WireError('a frame of sizes %s, at most %d bytes are taken' % (str(sizes)[:80], limit))
  return header, [_read(descriptor, size, deadline) for size in sizes]


def write_all(descriptor, data, deadline=None):
  view = memoryview(data)
  while len(view):
    wait(descriptor, select.POLLOUT, deadline)
    try:
      view = view[os.write(descriptor, view[:1 << 16]):]
    except BlockingIOError:
      continue
    except OSError as error:
      raise WireError('the other side is gone (%s)' % error)


def wait(descriptor, event, deadline):
  """Returns when the descriptor is ready. Raises Late at the deadline.

  Time in which this process stood still (a machine that was halted, or much too busy) does not count: the other side may have stood still,
  too. After the deadline the descriptor is looked at once more.
  """
  poll = select.poll()
  poll.register(descriptor, event)
  while True:
    start = time.monotonic()
    left = 60.0 if deadline is None else min(deadline - start, SLICE_S)
    if poll.poll(max(0.05, left) * 1000 + 1):
      return
    if deadline is not None:
      deadline += max(0.0, time.monotonic() - start - 2 * SLICE_S)
      if left <= 0:
        raise Late('no answer in time')


def _read(descriptor, count, deadline, start=False):
  data = bytearray()
  while len(data) < count:
    wait(descriptor, select.POLLIN, deadline)
    try:
      part = os.read(descriptor, min(count - len(data), 1 << 16))
    except BlockingIOError:
      continue
    except OSError as error:
      raise WireError('the other side is gone (%s)' % error)
    if not part:
      if start and not data:
        return None
      raise WireError('the other side ended in the middle of a frame')
    data += part
  return bytes(data)
