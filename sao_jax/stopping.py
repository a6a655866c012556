"""Stop rules of one turn, on the host: stop ids, and stop strings in the bytes of the drawn tokens wherever the tokens split them."""

from __future__ import annotations

from typing import Callable, Sequence

import numpy as np


class StopMatcher:
  """Watches the tokens of one turn; fed in order, it says after how many of them the turn ends.

  A stop string is looked for in the concatenated bytes of the turn's tokens, so it may span several tokens, begin and end inside tokens,
  and begin in tokens that were drawn before the turn was interrupted.
  """

  def __init__(
      self, stop_ids: Sequence[int], stop_strings: Sequence[str], token_bytes: Callable[[int], bytes] | None, drawn_before: Sequence[int]
  ):
    """
    Args:
      stop_ids: ids that end the turn.
      stop_strings: strings that end the turn, none empty.
      token_bytes: bytes of a token id; needed with stop strings.
      drawn_before: tokens that this turn drew earlier.

    Raises:
      ValueError: an empty stop string, or stop strings without `token_bytes`.
    """
    self._ids = frozenset(int(i) for i in stop_ids)
    self._strings = tuple(s.encode() for s in stop_strings)
    if any(not s for s in self._strings):
      raise ValueError('A stop string must not be empty.')
    if self._strings and token_bytes is None:
      raise ValueError('Stop strings need a tokenizer: pass tokenizer= to the Sampler.')
    self._token_bytes = token_bytes
    self._longest = max((len(s) for s in self._strings), default=0)
    self._tail = b''.join(token_bytes(int(t)) for t in drawn_before)[-self._longest:] if self._strings else b''

  def feed(self, tokens: np.ndarray) -> tuple[int, str] | None:
    """(number of `tokens` that belong to the turn, 'stop_id' or 'stop_string'), or None if the turn goes on. tokens: i32[n]."""
    for i, token in enumerate(tokens.tolist()):
      if token in self._ids:
        return i + 1, 'stop_id'
      if self._strings:
        new = self._token_bytes(token)
        if self._completes(new):
          return i + 1, 'stop_string'
        self._tail = (self._tail + new)[-self._longest:]
    return None

  def _completes(self, new: bytes) -> bool:
    """True where a stop string ends inside `new`."""
    for string in self._strings:
      keep = len(string) - 1
      before = self._tail[-keep:] if keep else b''
      if string in before + new:
        return True
    return False
