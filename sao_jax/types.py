"""Values that cross the borders between parts.

`Rollout` is NumPy and lives on the host; `Batch`, `Stat` and `ParamSnapshot` hold arrays of either kind. All are frozen: a value that
crossed a border is never changed by the side that received it.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping

import jax
import numpy as np

Params = dict[str, jax.Array]  # Flat: dotted path -> array, e.g. 'trunk.layers.0.attention.query'.

ENDINGS = ('terminated', 'truncated')
STOP_REASONS = (
    'answer',  # The environment said that the episode is over (terminated).
    'max_turns', 'max_turn_tokens', 'max_tokens', 'context', 'time_limit', 'environment_limit', 'max_segments',  # All truncated.
)


@dataclasses.dataclass(frozen=True)
class Rollout:
  """One finished trajectory, one row per token position.

  Position `t` of every per-token array belongs to `tokens[t]`; `action_mask` selects what the policy sampled (stop tokens included).

  Where the chat template rewrote the history, the trajectory has several segments, one after the other in every array: each begins with the
  whole conversation as it was shown from there on (no actions), and is a sequence of its own for the model. All share ticket, prompt and
  outcome, and the rollout counts once wherever rollouts are counted.

      segment_starts (0, 5)   tokens       p p a a a | p p p o a a      p prompt or history, a action, o observation
                              action_mask  . . 1 1 1 | . . . . 1 1

  Attributes:
    tokens: i32[T], prompt and everything after it.
    action_mask: bool[T].
    behaviour_log_prob: f32[T], nats, at the sampling temperature; 0 off the actions.
    policy_version: i32[T], the version that drew the token; -1 off the actions.
    reward: f32[T], on the last action token of the turn (or of the rollout) it belongs to; 0 elsewhere.
    turn: i32[T], 0-based turn of each token; prompt tokens belong to turn 0.
    ending: 'terminated' or 'truncated'.
    stop_reason: one of `STOP_REASONS`.
    prompt_id: position of the prompt in the prompt stream, non-negative.
    attempt: 0 for the first rollout of this prompt.
    environment: name of the environment.
    metrics: numbers that the environment reported, e.g. {'success': 1.0}.
    ticket: number of the admission ticket, unique in a run.
    started_s, finished_s: run clock, seconds.
    segment_starts: positions where segments begin, ascending from 0.
  """

  tokens: np.ndarray
  action_mask: np.ndarray
  behaviour_log_prob: np.ndarray
  policy_version: np.ndarray
  reward: np.ndarray
  turn: np.ndarray
  ending: str
  stop_reason: str
  prompt_id: int
  attempt: int
  environment: str
  metrics: Mapping[str, float]
  ticket: int = -1
  started_s: float = 0.0
  finished_s: float = 0.0
  segment_starts: tuple[int, ...] = (0,)

  @property
  def length(self) -> int:
    """Positions of all segments."""
    return int(self.tokens.shape[0])

  @property
  def segments(self) -> list[tuple[int, int]]:
    """(start, stop) of every segment."""
    return list(zip(self.segment_starts, (*self.segment_starts[1:], self.length)))

  @property
  def longest_segment(self) -> int:
    """Positions of the longest segment: what one sequence of the model must hold."""
    return max(stop - start for start, stop in self.segments)

  @property
  def num_actions(self) -> int:
    return int(np.sum(self.action_mask))

  @property
  def total_reward(self) -> float:
    return float(np.sum(self.reward, dtype=np.float64))

  @property
  def oldest_version(self) -> int:
    """Version of the oldest action token; the staleness of a rollout is counted from it."""
    return int(np.min(self.policy_version[self.action_mask]))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
  """A padded batch for the learner, a row for each segment of each rollout; rows beyond the last are empty (all masks False).

  Attributes:
    tokens: i32[B, T].
    token_mask: bool[B, T], True where there is a token (never derived from `tokens != pad`).
    action_mask: bool[B, T].
    behaviour_log_prob: f32[B, T].
    reward: f32[B, T].
    policy_version: i32[B, T].
    truncated: bool[B], True where the trajectory was cut, in all of its rows.
    turn: i32[B, T].
    follows: bool[B], True where a row is the next segment of the row before; None where every row is a rollout of its own.
  """

  tokens: Any
  token_mask: Any
  action_mask: Any
  behaviour_log_prob: Any
  reward: Any
  policy_version: Any
  truncated: Any
  turn: Any
  follows: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stat:
  """A total and the count it is a total over. Totals and counts travel; `mean` is taken once, at the end."""

  total: Any
  count: Any

  def __add__(self, other: 'Stat') -> 'Stat':
    return Stat(self.total + other.total, self.count + other.count)

  def mean(self):
    """total / count, and 0 where the count is 0 (jittable). Loggers skip a `Stat` of count 0 instead of writing 0."""
    count = self.count
    return jax.numpy.where(count > 0, self.total / jax.numpy.where(count > 0, count, 1), 0.0)


@dataclasses.dataclass(frozen=True)
class ParamSnapshot:
  """One published version of the policy, whole and immutable: `params` in the sampler's sharding and dtype."""

  version: int
  params: Params
