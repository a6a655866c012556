"""Held-out success of a policy: a fixed list of prompts, each rolled out once, greedily or at a temperature.

The prompts are a function of `evaluation.seed` alone and never those of training; the noise comes from a stream of its own, so an
evaluation during training changes nothing of it. Rollouts lost to the infrastructure are reported apart and are not failures of the policy.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import threading
import time
from typing import Any, Callable, Mapping, Sequence

from sao_jax.environments.base import Task
from sao_jax.rollouts import Admission, RolloutEngine
from sao_jax.types import Rollout


class Stopped(Exception):
  """The run was asked to stop; what it is to be resumed from is saved."""


class ListFlow:
  """A fixed list of prompts in, a list of rollouts out; implements `rollouts.Flow`. The ticket is the place in the list.

  A prompt that is in the list several times has a task with another `attempt` each time, and so other noise.
  """

  def __init__(self, prompts: Sequence[tuple[int, Task]]):
    self._prompts = prompts
    self._next = 0
    self.rollouts: list[Rollout] = []
    self.dropped: collections.Counter[str] = collections.Counter()

  @property
  def total(self) -> int:
    return len(self._prompts)

  @property
  def done(self) -> int:
    return len(self.rollouts) + self.dropped.total()

  def admit(self, version: int) -> Admission | None:
    del version
    if self._next == len(self._prompts):
      return None
    ticket = self._next
    self._next += 1
    prompt_id, task = self._prompts[ticket]
    return Admission(ticket, prompt_id, task.attempt, task)

  def finish(self, rollout: Rollout, version: int) -> bool:
    del version
    self.rollouts.append(rollout)
    return True

  def drop(self, ticket: int, reason: str, *, prompt: tuple[int, int] | None = None) -> None:
    del ticket, prompt
    self.dropped[reason] += 1

  def set_oldest(self, oldest: Mapping[int, int]) -> None:
    del oldest

  def overdue(self, version: int) -> list[int]:
    del version
    return []


def run_list(
    engine: RolloutEngine, flow: ListFlow, *, on_progress: Callable[[int], None], stop: threading.Event | None = None
) -> None:
  """Rolls out every prompt of the flow once, in the calling thread; its rollouts are then in the order of the prompts.

  Raises:
    Stopped: `stop` was set meanwhile.
  """
  while flow.done < flow.total:
    if stop is not None and stop.is_set():
      raise Stopped(f'stopped with {flow.done} of {flow.total} rollouts done')
    moved = engine.before_chunk()
    if engine.sampler.busy:
      engine.after_chunk(engine.sampler.step())
      on_progress(flow.done)
    elif not moved:
      time.sleep(0.001)  # Everything waits for environments.
  flow.rollouts.sort(key=lambda r: r.ticket)
  on_progress(flow.done)


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """What one evaluation found; `rollouts` are in the order of the prompts."""

  success: float  # Mean of metrics['success'] over the rollouts, NaN if there are none.
  low: float
  high: float  # 95 % Wilson interval of `success`.
  reward: float
  n: int
  lost: dict[str, int]  # Rollouts that the infrastructure lost, by reason; not in the means.
  metrics: dict[str, float]  # Means of every metric that the environment reported.
  truncated: float
  rollouts: list[Rollout]

  def summary(self) -> dict[str, Any]:
    """The numbers, JSON-able, without the rollouts."""
    values = dataclasses.asdict(dataclasses.replace(self, rollouts=[]))
    del values['rollouts']
    return values


def summarize(flow: ListFlow) -> Evaluation:
  """Means over the finished rollouts, each counted once; a truncated rollout without a verdict counts as no success."""
  rollouts = flow.rollouts
  n = len(rollouts)
  if not n:
    nan = math.nan
    return Evaluation(nan, nan, nan, nan, 0, dict(flow.dropped), {}, nan, [])
  successes = [float(r.metrics.get('success', 0.0)) for r in rollouts]
  names = sorted({name for r in rollouts for name in r.metrics})
  low, high = wilson_interval(sum(successes), n)
  return Evaluation(
      success=sum(successes) / n, low=low, high=high, reward=sum(r.total_reward for r in rollouts) / n, n=n, lost=dict(flow.dropped),
      metrics={name: sum(float(r.metrics.get(name, 0.0)) for r in rollouts) / n for name in names},
      truncated=sum(r.ending == 'truncated' for r in rollouts) / n, rollouts=rollouts)


def wilson_interval(successes: float, n: int, z: float = 1.959964) -> tuple[float, float]:
  """Wilson's 95 % score interval of a proportion; (0, 1) for n = 0. Source: Wilson 1927."""
  if n == 0:
    return 0.0, 1.0
  p, z2 = successes / n, z * z
  centre, spread = p + z2 / (2 * n), z * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
  return max(0.0, (centre - spread) / (1 + z2 / n)), min(1.0, (centre + spread) / (1 + z2 / n))
