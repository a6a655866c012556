"""The order of prompts as pure functions of a position: shuffled epochs, and mixtures that keep to their weights.

Nothing here has state. `Order.locate(position)` says which task stands at a position of an endless (or limited) stream, so that a stream
is saved as one number, and a host of many reads its own positions and no others.
"""

from __future__ import annotations

import dataclasses
import fractions
import hashlib
import heapq
import math
from typing import Sequence

from sao_jax.environments.base import TaskSet

MAX_BLOCK = 10_000  # Positions after which a mixture's pattern repeats.
ROUNDS = 8


def permuted(index: int, size: int, *key: int) -> int:
  """Where a keyed permutation of [0, size) sends `index`: for every key (integers) a bijection, computed without a table.

  A Feistel network on the smallest even number of bits that holds `size`, walked until it lands below `size`.

  Source: Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains", sections 4 and 5 (cycle walking, generalised Feistel).
  """
  if not 0 <= index < size:
    raise ValueError(f'index must be in [0, {size}), got {index}.')
  half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
  mask = (1 << half) - 1
  secret = hashlib.blake2b(','.join(map(str, key)).encode(), digest_size=32).digest()
  while True:
    left, right = index >> half, index & mask
    for i in range(ROUNDS):
      digest = hashlib.blake2b(b'%d,%d' % (i, right), key=secret, digest_size=8).digest()
      left, right = right, left ^ (int.from_bytes(digest, 'little') & mask)
    index = (left << half) | right
    if index < size:
      return index


@dataclasses.dataclass(frozen=True)
class Place:
  """What stands at a position: task `index`, the set it belongs to, and which visit of its set's tasks this is (0 for the first)."""

  index: int
  set: int
  epoch: int


class Order:
  """The task at every position.

  Each set goes through its own epochs, each in an order of its own (a function of seed, set and epoch). Among the sets, after any number
  of positions p, set i has had its share w_i * p to within less than one prompt, and exactly its share at the end of every pattern.

  Args:
    sets: at least one.
    seed: of the shuffles.
    shuffle: False takes the tasks of an epoch in their own order.
    epochs: the stream ends before the first prompt that would begin a set's epoch of this number; 0 for a stream without end.

  Attributes:
    sets: as given.
    counts: prompts of each set in one pattern.
    sweep: positions in which every set has had a whole epoch.
    length: positions until the end, None for a stream without end.
  """

  def __init__(self, sets: Sequence[TaskSet], *, seed: int, shuffle: bool, epochs: int):
    if not sets or any(s.size < 1 for s in sets):
      raise ValueError(f'Prompts need sets of at least one task, got {[(s.name, s.size) for s in sets]}.')
    self.sets, self._seed, self._shuffle = tuple(sets), seed, shuffle
    weights = [float(s.size) if s.weight is None else s.weight for s in sets]
    self.counts = pattern_counts(weights)
    self._pattern = mixture_pattern(self.counts)
    self._before = _ranks(self._pattern)
    self.sweep = max(-(-s.size * len(self._pattern) // n) for s, n in zip(sets, self.counts))
    self.length = min(self._position(i, epochs * s.size) for i, s in enumerate(sets)) if epochs else None

  def locate(self, position: int) -> Place:
    """What stands at a position (at least 0, below `length` if there is one)."""
    block, offset = divmod(position, len(self._pattern))
    chosen = self._pattern[offset]
    tasks = self.sets[chosen]
    epoch, index = divmod(block * self.counts[chosen] + self._before[offset], tasks.size)
    if self._shuffle:
      index = permuted(index, tasks.size, self._seed, chosen, epoch)
    return Place(tasks.start + index, chosen, epoch)

  def _position(self, chosen: int, count: int) -> int:
    """Position of the prompt of a set that has `count` of its prompts before it."""
    block, rank = divmod(count, self.counts[chosen])
    offset = next(o for o, s in enumerate(self._pattern) if s == chosen and self._before[o] == rank)
    return block * len(self._pattern) + offset


def pattern_counts(weights: Sequence[float]) -> tuple[int, ...]:
  """Whole numbers in proportion to the weights, at most `MAX_BLOCK` in all: prompts of each set in one pattern.

  Weights that are short decimals or whole numbers are met exactly; others to one part in `MAX_BLOCK`, each set at least once.
  """
  exact = [fractions.Fraction(repr(float(w))) for w in weights]
  if not exact or any(w <= 0 for w in exact):
    raise ValueError(f'Weights of a mixture must be positive, got {list(weights)}.')
  common = math.lcm(*(w.denominator for w in exact))
  whole = [int(w * common) for w in exact]
  divisor = math.gcd(*whole)
  whole = [w // divisor for w in whole]
  total = sum(whole)
  if total <= MAX_BLOCK:
    return tuple(whole)
  counts = [max(1, w * MAX_BLOCK // total) for w in whole]
  rest = MAX_BLOCK - sum(counts)
  by_need = sorted(range(len(whole)), key=lambda i: counts[i] * total - whole[i] * MAX_BLOCK)  # Furthest below its share first.
  for i in by_need[:max(0, rest)]:
    counts[i] += 1
  return tuple(counts)


def mixture_pattern(counts: Sequence[int]) -> tuple[int, ...]:
  """Which set each position of a pattern belongs to; set i occurs counts[i] times, after t positions less than one off its share.

  Prompt k = 0, 1, ... of a set has the window [floor(k / w), ceil((k + 1) / w)) of positions, w = counts[i] / sum(counts); of those whose
  window has begun, the one whose window ends first is next.

  Source: Baruah, Cohen, Plaxton and Varvel 1996, "Proportionate Progress", for one processor.
  """
  total = sum(counts)
  waiting = [(0, i, 0) for i in range(len(counts))]  # (window begins, set, k)
  heapq.heapify(waiting)
  ready: list[tuple[int, int, int]] = []  # (deadline, set, k)
  pattern = []
  for t in range(total):
    while waiting and waiting[0][0] <= t:
      _, i, k = heapq.heappop(waiting)
      heapq.heappush(ready, (-(-(k + 1) * total // counts[i]), i, k))
    _, i, k = heapq.heappop(ready)
    pattern.append(i)
    if k + 1 < counts[i]:
      heapq.heappush(waiting, ((k + 1) * total // counts[i], i, k + 1))
  return tuple(pattern)


def _ranks(pattern: Sequence[int]) -> tuple[int, ...]:
  """How often the set of each position occurred before it in the pattern."""
  seen: dict[int, int] = {}
  ranks = []
  for chosen in pattern:
    ranks.append(seen.get(chosen, 0))
    seen[chosen] = ranks[-1] + 1
  return tuple(ranks)
