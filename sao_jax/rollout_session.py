"""A rollout in flight, and how it is saved."""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping

import numpy as np

from sao_jax.environments.base import Observation, SampledTurn, Task
from sao_jax.episodes import EnvironmentHolder, Played
from sao_jax.types import Rollout

_VALUES = (
    'ticket', 'prompt_id', 'attempt', 'started_s', 'phase', 'turn', 'turn_start', 'turn_limit', 'turn_stop',
    'stop_id', 'retry', 'oldest', 'tools')
_LISTS = ('actions', 'stops', 'rooms', 'history', 'segment_starts')
_ARRAYS = {'tokens': np.int32, 'action_mask': bool, 'log_prob': np.float32, 'version': np.int32, 'reward': np.float32, 'turn_of': np.int32}


@dataclasses.dataclass
class RolloutSession:
  """A rollout in flight. Per-token lists have one entry per position of `tokens`; a partly drawn turn stays in the sampler."""

  ticket: int
  prompt_id: int
  attempt: int
  task: Task
  started_s: float
  phase: str = 'reset'  # 'reset' | 'sampling' | 'step' | 'compact'; 'idle' between two of them.
  environment: EnvironmentHolder | None = None  # None: made, and brought up to date by replay, in the next call.
  tokens: list[int] = dataclasses.field(default_factory=list)
  action_mask: list[bool] = dataclasses.field(default_factory=list)
  log_prob: list[float] = dataclasses.field(default_factory=list)
  version: list[int] = dataclasses.field(default_factory=list)
  reward: list[float] = dataclasses.field(default_factory=list)
  turn_of: list[int] = dataclasses.field(default_factory=list)
  actions: list[str] = dataclasses.field(default_factory=list)  # Texts of the finished turns, in order.
  stops: list[str] = dataclasses.field(default_factory=list)  # What ended each of them: 'stop' or 'length'.
  rooms: list[int | None] = dataclasses.field(default_factory=list)  # Of the call of `compact` after each of them.
  history: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # Messages before the turn.
  tools: tuple[Mapping[str, Any], ...] = ()  # That the segment begins with.
  pending: Observation | None = None  # What follows the last turn unless `compact` gives something else.
  segment_starts: list[int] = dataclasses.field(default_factory=lambda: [0])
  turn: int = 0
  turn_start: int = 0
  turn_limit: int | None = None  # Of the observation before the turn, as is the next.
  turn_stop: tuple[str, ...] = ()
  stop_id: int | None = None  # Stop token of the conversation format that ended the last turn.
  retry: int = 0
  oldest: int = 0
  metrics: dict[str, float] = dataclasses.field(default_factory=dict)

  def append(self, tokens: Any, *, action: bool, log_probs: Any = None, versions: Any = None) -> None:
    count = len(tokens)
    self.tokens.extend(int(t) for t in tokens)
    self.action_mask.extend([action] * count)
    self.log_prob.extend([float(x) for x in log_probs] if action else [0.0] * count)
    self.version.extend([int(v) for v in versions] if action else [-1] * count)
    self.reward.extend([0.0] * count)
    self.turn_of.extend([self.turn] * count)

  @property
  def segment_length(self) -> int:
    """Tokens of the segment that is being written: of the sequence that the sampler sees."""
    return len(self.tokens) - self.segment_starts[-1]

  def restart(self) -> None:
    """Back to before the reset, as another attempt: for environments that cannot be replayed."""
    for name in (*_ARRAYS, *_LISTS):
      getattr(self, name).clear()
    self.segment_starts, self.tools, self.pending, self.turn_limit, self.turn_stop = [0], (), None, None, ()
    self.phase, self.environment, self.turn, self.turn_start, self.metrics = 'reset', None, 0, 0, {}
    self.attempt += 1
    self.task = dataclasses.replace(self.task, attempt=self.attempt)

  def played(self, *, tokens: bool, last: bool) -> list[Played]:
    """The finished turns, for the environment; nothing has been appended since the last one.

    Args:
      tokens: with what was sampled.
      last: of the last turn alone, since the environment has seen the others.
    """
    first = len(self.actions) - 1 if last else 0
    return [
        Played(text, self._sampled(turn) if tokens and turn >= first else None, room)
        for turn, (text, room) in enumerate(zip(self.actions, self.rooms, strict=True))]

  def _sampled(self, turn: int) -> SampledTurn:
    start, stop = self.turn_start, len(self.tokens)  # Of the last turn, with nothing after it yet.
    if turn < len(self.actions) - 1:
      mine = np.flatnonzero(np.asarray(self.action_mask) & (np.asarray(self.turn_of) == turn))
      start, stop = int(mine[0]), int(mine[-1]) + 1
    begin = max(s for s in self.segment_starts if s <= start)
    return SampledTurn(
        prompt_ids=tuple(self.tokens[begin:start]), ids=tuple(self.tokens[start:stop]), log_probs=tuple(self.log_prob[start:stop]),
        versions=tuple(self.version[start:stop]), text=self.actions[turn], stop_reason=self.stops[turn])

  def save(self) -> dict[str, Any]:
    """The session as plain values that share nothing with it that changes later."""
    entry = {name: getattr(self, name) for name in _VALUES}
    entry.update({name: list(getattr(self, name)) for name in _LISTS}, metrics=dict(self.metrics))
    entry.update({name: np.asarray(getattr(self, name), dtype) for name, dtype in _ARRAYS.items()})
    entry['pending'] = None if self.pending is None else {f.name: getattr(self.pending, f.name) for f in dataclasses.fields(Observation)}
    return entry

  @classmethod
  def load(cls, entry: Mapping[str, Any], task: Task) -> RolloutSession:
    """The session that `save` gave `entry` of."""
    session = cls(task=task, **{name: entry[name] for name in _VALUES})
    for name in (*_LISTS, *_ARRAYS):
      setattr(session, name, list(entry[name]) if name in _LISTS else entry[name].tolist())
    session.history = [dict(m) for m in session.history]
    session.metrics = dict(entry['metrics'])
    session.pending = None if entry['pending'] is None else Observation(**entry['pending'])
    return session

  def to_rollout(self, ending: str, stop_reason: str, environment: str, now_s: float) -> Rollout:
    starts = self.segment_starts
    if len(starts) > 1 and not any(self.action_mask[starts[-1]:]):  # Begun, but nothing was drawn in it.
      starts, end = starts[:-1], starts[-1]
    else:
      end = len(self.tokens)
    return Rollout(
        tokens=np.asarray(self.tokens[:end], np.int32), action_mask=np.asarray(self.action_mask[:end], bool),
        behaviour_log_prob=np.asarray(self.log_prob[:end], np.float32), policy_version=np.asarray(self.version[:end], np.int32),
        reward=np.asarray(self.reward[:end], np.float32), turn=np.asarray(self.turn_of[:end], np.int32), segment_starts=tuple(starts),
        ending=ending, stop_reason=stop_reason, prompt_id=self.prompt_id, attempt=self.attempt, environment=environment,
        metrics=dict(self.metrics), ticket=self.ticket, started_s=self.started_s, finished_s=now_s)
