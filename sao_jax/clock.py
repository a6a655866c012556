"""Time: the wall clock, and a virtual one under which a run is a function of its seed alone.

Durations under the virtual clock are drawn per event from seeded lognormal distributions, keyed by what the event is (chunk 17; ticket 5,
turn 2, retry 0) and not by how many were drawn before: a resumed run draws the same ones.
"""

from __future__ import annotations

import heapq
import math
import time
from typing import Callable

from sao_jax import prng
from sao_jax.config import ClockConfig
from sao_jax.rollouts import Call, CallResult


class WallClock:
  """Seconds since the start of the run, going on from `elapsed_s` after a resume."""

  def __init__(self, elapsed_s: float = 0.0):
    self._start = time.monotonic() - elapsed_s

  def now(self) -> float:
    return time.monotonic() - self._start


class VirtualClock:
  """Virtual seconds; moves only when told."""

  def __init__(self, config: ClockConfig, seed: int, elapsed_s: float = 0.0):
    self._config, self._seed, self._now = config, seed, elapsed_s

  def now(self) -> float:
    return self._now

  def advance(self, until_s: float) -> None:
    """Moves to `until_s`, never backwards."""
    self._now = max(self._now, until_s)

  def duration(self, kind: str, *counters: int) -> float:
    """Seconds of one event of `kind` ('chunk', 'update', 'publish' or 'environment'), median from the settings."""
    median = getattr(self._config, f'{kind}_s')
    sigma = self._config.sigma if kind == 'environment' else self._config.sigma / 10
    return median * math.exp(sigma * prng.generator(self._seed, f'duration/{kind}', *counters).standard_normal())


class VirtualCalls:
  """Environment calls under the virtual clock: run at once, their results held back until their time has come.

  Implements `rollouts.Calls`. Ties are settled by ticket, so the order never depends on the order of submission.
  """

  def __init__(self, clock: VirtualClock):
    self._clock = clock
    self._heap: list[tuple[float, int, CallResult]] = []

  def submit(self, call: Call, *, due_s: float | None = None) -> None:
    if due_s is None:
      due_s = self._clock.now() + self._clock.duration('environment', call.ticket, call.turn, call.retry)
    heapq.heappush(self._heap, (due_s, call.ticket, run_call(call)))

  def run_aside(self, function: Callable[[], None]) -> None:
    function()

  def ready(self) -> list[CallResult]:
    results = []
    while self._heap and self._heap[0][0] <= self._clock.now():
      results.append(heapq.heappop(self._heap)[2])
    return results

  def due(self) -> dict[int, float]:
    return {ticket: due_s for due_s, ticket, _ in self._heap}

  def next_due(self) -> float:
    """Time of the next result; infinity if none is coming."""
    return self._heap[0][0] if self._heap else math.inf


class InlineCalls:
  """Environment calls made on the spot, for evaluation and recording under the virtual clock. Implements `rollouts.Calls`."""

  def __init__(self):
    self._results: list[CallResult] = []

  def submit(self, call: Call, *, due_s: float | None = None) -> None:
    del due_s
    self._results.append(run_call(call))

  def run_aside(self, function: Callable[[], None]) -> None:
    function()

  def ready(self) -> list[CallResult]:
    results, self._results = self._results, []
    return results

  def due(self) -> dict[int, float]:
    return {}


def run_call(call: Call) -> CallResult:
  """Runs a call and wraps what it gave; its error is the engine's to judge."""
  try:
    return CallResult(call.ticket, value=call.function())
  except (Exception, SystemExit) as error:  # Not swallowed: the engine retries, drops and counts, or raises it.
    return CallResult(call.ticket, error=error)
