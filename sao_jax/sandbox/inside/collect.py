"""Output of what is not trusted, kept within a size: the beginning and the end, with a note of what lies between."""


class Collector:
  """Takes bytes and keeps at most `limit` of them."""

  def __init__(self, limit):
    self._half = max(1, limit // 2)
    self._limit = limit
    self._head, self._tail = bytearray(), bytearray()
    self.total = 0

  def add(self, data):
    self.total += len(data)
    room = self._half - len(self._head)
    if room > 0:
      self._head += data[:room]
      data = data[room:]
    self._tail += data
    if len(self._tail) > 4 * self._half + 65536:
      del self._tail[:-self._half]

  @property
  def cut(self):
    return self.total > self._limit

  def value(self):
    if not self.cut:
      return bytes(self._head + self._tail)
    tail = self._tail[-self._half:]
    return bytes(self._head) + b'\n[... %d bytes left out ...]\n' % (self.total - len(self._head) - len(tail)) + bytes(tail)


def shorten(text, limit):
  """A text of at most about `limit` characters: beginning and end, with a note of what lies between."""
  if len(text) <= limit:
    return text
  half = max(1, limit // 2)
  return '%s\n[... %d characters left out ...]\n%s' % (text[:half], len(text) - 2 * half, text[-half:])
