"""The life of a rollout, from its ticket to the queue.

`RolloutEngine` is a state machine with one owner thread and no thread of its own. A session is always in one phase:

    reset --(prompt ids)--> sampling --(turn text)--> step --(observation ids)--> sampling ... --> finished | dropped
            environment                 sampler               environment

One iteration, whatever the clock: `before_chunk` (results of environment calls, new sessions), `Sampler.step`, `after_chunk` (finished
turns). Environment calls go through a `Calls` object: a thread pool under the wall clock, a simulated one under virtual time.

Tokens in, tokens out: the ids that the sampler drew are stored as they came; only new text is tokenized, once, and appended. Where the chat
template rewrites the history, or the environment does (`Observation.restart`, other tools), a new segment begins with the conversation
rendered afresh: the sampler starts on it as on a new sequence, and what was drawn before stays, as it was drawn, in the earlier segments.

Where tools are told of, the environment gets the tool calls of a turn, parsed; what is wrong with a call comes with it, as a
`ToolCallError`. Near the limit of a sequence it is asked once a turn, in a call of its own, whether it can make room (`compact`).
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, Callable, Mapping, Protocol

import numpy as np

from sao_jax.config import TaskConfig
from sao_jax.environments.base import Environment, EnvironmentFailure, Observation, StepResult, Task, UnusableMessages
from sao_jax.episodes import EnvironmentHolder, actor, next_turn, shown
from sao_jax.models.conversation import Conversation, as_messages
from sao_jax.models.tokenizers import Tokenizer
from sao_jax.rollout_session import RolloutSession
from sao_jax.sampler import Completion, Request, Sampler
from sao_jax.types import Rollout


@dataclasses.dataclass(frozen=True)
class Admission:
  """The right to start one rollout, and of what."""

  ticket: int
  prompt_id: int
  attempt: int
  task: Task


class Flow(Protocol):
  """Where sessions come from and where finished rollouts go."""

  def admit(self, version: int) -> Admission | None: ...

  def finish(self, rollout: Rollout, version: int) -> bool:
    """False when there is no room now; the engine keeps the rollout, starts nothing new, and asks again."""
    ...

  def drop(self, ticket: int, reason: str, *, prompt: tuple[int, int] | None = None) -> None:
    """Ends a ticket without a rollout; `prompt` (id, attempt) is handed back to be tried once more."""
    ...

  def set_oldest(self, oldest: Mapping[int, int]) -> None:
    """Versions of the oldest action token of running tickets; a lower bound for those that have drawn none."""
    ...

  def overdue(self, version: int) -> list[int]:
    """Running tickets that would be dropped when they finish, now that the sampler draws with `version`."""
    ...


@dataclasses.dataclass(frozen=True)
class Call:
  """One environment call: `function` runs anywhere and touches nothing but its own environment."""

  ticket: int
  turn: int
  retry: int
  function: Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class CallResult:
  """What a call gave: a value, or an error; a call that passed its time limit has a TimeoutError."""

  ticket: int
  value: Any = None
  error: BaseException | None = None


class Calls(Protocol):
  """Runs environment calls; at most one per ticket at a time."""

  def submit(self, call: Call, *, due_s: float | None = None) -> None:
    """Starts a call. `due_s`: time on the run's clock at which a simulated one ends (of a resumed run); None for a time drawn anew."""
    ...

  def run_aside(self, function: Callable[[], None]) -> None:
    """Runs `function` sometime, its result and its time of no interest; it must catch its own errors."""
    ...

  def ready(self) -> list[CallResult]: ...

  def due(self) -> dict[int, float]:
    """Times at which simulated calls end, by ticket; empty for real ones."""
    ...


SEGMENT_NOISE = 1 << 16  # The noise of a token is a function of its position; segments after the first draw as such a later attempt would.


class FailureShare:
  """Stops a run whose environments mostly fail; one bad prompt in a thousand does not."""

  def __init__(self, limit: float, window: int = 100, least: int = 20):
    self._limit, self._least = limit, least
    self._recent: collections.deque[str] = collections.deque(maxlen=window)

  def add(self, failure: str) -> None:
    """Notes how a rollout ended: '' for well. Raises RuntimeError beyond the limit, with the last reason."""
    self._recent.append(failure)
    failed = sum(1 for f in self._recent if f)
    if len(self._recent) >= self._least and failed > self._limit * len(self._recent):
      raise RuntimeError(
          f'{failed} of the last {len(self._recent)} rollouts were lost to failures (limit task.max_failure_share={self._limit}); '
          f'the last one: {[f for f in self._recent if f][-1]}')


class RolloutEngine:
  """Drives sessions between the sampler and their environments."""

  def __init__(
      self, *, sampler: Sampler, calls: Calls, flow: Flow, make_environment: Callable[[], Environment], conversation: Conversation,
      tokenizer: Tokenizer, task: TaskConfig, max_length: int, sessions: int, now: Callable[[], float],
  ):
    self.sampler, self.calls, self.flow = sampler, calls, flow
    self._make_environment, self._conversation, self._tokenizer = make_environment, conversation, tokenizer
    self._task, self._max_length, self._max_sessions, self._now = task, max_length, sessions, now
    self._sessions: dict[int, RolloutSession] = {}
    self._outbox: collections.deque[Rollout] = collections.deque()
    self._failures = FailureShare(task.max_failure_share)
    self._orphans: dict[int, EnvironmentHolder] = {}  # Of dropped sessions, by ticket, while a call still uses them.
    self._close_errors: collections.deque[Exception] = collections.deque()
    probe = make_environment()
    self._name, self._replayable, self._stop_strings = probe.name, probe.replayable, tuple(probe.stop_strings)
    self._metric_names = tuple(probe.metric_names)
    self._tools, self._takes_cut_turns, self._wants_tokens = tuple(probe.tools), probe.takes_cut_turns, probe.wants_tokens
    actor(conversation, self._tools)  # Raises where the template cannot show them.
    calls.run_aside(probe.close)

  @property
  def in_flight(self) -> int:
    return len(self._sessions) + len(self._outbox)

  @property
  def close_failures(self) -> int:
    """Environments whose `close` raised."""
    return len(self._close_errors)

  # --- One iteration -----------------------------------------------------------------------------------------------------------

  def before_chunk(self) -> bool:
    """Takes environment results, hands over finished rollouts, starts sessions. True if anything moved."""
    moved = self._deliver()
    self._flush()
    self._report_oldest()
    self._enforce_limits()
    moved |= self._start_sessions()
    return moved

  def after_chunk(self, completions: list[Completion]) -> None:
    """Handles the turns that the sampler finished."""
    for completion in completions:
      session = self._sessions[completion.session]
      session.append(completion.tokens, action=True, log_probs=completion.log_probs, versions=completion.versions)
      self._turn_sampled(session, completion.stop_reason)
    self._flush()

  def _start_sessions(self) -> bool:
    started = False
    while not self._outbox and len(self._sessions) < self._max_sessions:
      admission = self.flow.admit(self.sampler.version)
      if admission is None:
        break
      session = RolloutSession(
          admission.ticket, admission.prompt_id, admission.attempt, admission.task, started_s=self._now(), oldest=self.sampler.version)
      self._sessions[session.ticket] = session
      self._call(session)
      started = True
    return started

  def _report_oldest(self) -> None:
    """A session that has drawn nothing yet will draw with the sampler's version or a later one."""
    drawn = self.sampler.drawn()
    for session in self._sessions.values():
      if not any(session.action_mask) and session.ticket not in drawn:
        session.oldest = self.sampler.version
    self.flow.set_oldest({s.ticket: s.oldest for s in self._sessions.values()})

  def _enforce_limits(self) -> None:
    for session in [self._sessions[ticket] for ticket in self.flow.overdue(self.sampler.version) if ticket in self._sessions]:
      self._drop(session, 'overdue', prompt=(session.prompt_id, session.attempt))
    now = self._now()
    late = [s for s in self._sessions.values() if s.phase == 'sampling' and now - s.started_s > self._task.time_limit_s]
    for session in sorted(late, key=lambda s: s.ticket):  # The order of `_sessions` is another one after a resume.
      self._take_partial(session)
      if any(session.action_mask):
        self._finish(session, 'truncated', 'time_limit')
      else:
        self._drop(session, 'time_limit')
        self._failures.add(f'time_limit: prompt {session.prompt_id} drew no token within task.time_limit_s={self._task.time_limit_s}')

  def _take_partial(self, session: RolloutSession) -> None:
    tokens, log_probs, versions = self.sampler.partials()[session.ticket]
    self.sampler.cancel(session.ticket)
    session.phase = 'idle'
    session.append(tokens, action=True, log_probs=log_probs, versions=versions)

  # --- Environment calls -------------------------------------------------------------------------------------------------------

  def _call(self, session: RolloutSession, due_s: float | None = None) -> None:
    """Submits the call of the session's phase; it makes and replays the environment first where there is none."""
    fresh = session.environment is None
    if fresh:
      session.environment = EnvironmentHolder(self._make_environment, self._conversation)
    holder, task = session.environment, session.task
    turns = session.played(tokens=self._wants_tokens, last=not fresh)
    function = {
        'reset': lambda: holder.reset(task), 'step': lambda: holder.step(task, turns), 'compact': lambda: holder.compact(task, turns),
    }[session.phase]
    self.calls.submit(Call(session.ticket, session.turn, session.retry, function), due_s=due_s)

  def _deliver(self) -> bool:
    results = self.calls.ready()
    for result in results:
      session = self._sessions.get(result.ticket)
      if session is None:  # Dropped while its call was running.
        self._discard(self._orphans.pop(result.ticket, None))
        continue
      if result.error is not None:
        self._failed(session, result.error)
        continue
      phase, session.phase = session.phase, 'idle'
      if phase == 'reset':
        self._begin(session, result.value)
      elif phase == 'step':
        self._stepped(session, result.value)
      else:
        self._compacted(session, result.value)
    return bool(results)

  def _discard(self, holder: EnvironmentHolder | None) -> None:
    """Closes an environment away from this thread, since closing may hang."""
    def close():
      try:
        holder.close()
      except Exception as error:  # Counted: nothing depends on this environment any more.
        self._close_errors.append(error)

    if holder is not None:
      self.calls.run_aside(close)

  def _failed(self, session: RolloutSession, error: BaseException) -> None:
    """Retries a failure of the environment itself, then drops the rollout under that name; any other error goes up."""
    if not isinstance(error, (EnvironmentFailure, TimeoutError)):
      where = {'reset': 'reset', 'step': f'step, turn {session.turn}', 'compact': f'compact, turn {session.turn - 1}'}[session.phase]
      raise RuntimeError(f'Environment {self._name!r}, prompt {session.prompt_id}, {where}: {type(error).__name__}: {error}') from error
    self._discard(session.environment)  # Also while a call that was given up hangs in it.
    session.environment = None
    if session.retry < self._task.retries and getattr(error, 'retry', True):
      session.retry += 1
      if not self._replayable and session.phase != 'reset':
        self.sampler.release(session.ticket)
        session.restart()
      self._call(session)
      return
    reason = error.reason if isinstance(error, EnvironmentFailure) else 'environment_timeout'
    self._drop(session, reason)
    self._failures.add(f'{reason}: {error}')

  # --- Turns -------------------------------------------------------------------------------------------------------------------

  def _begin(self, session: RolloutSession, observation: Observation) -> None:
    tools = self._tools if observation.tools is None else tuple(observation.tools)
    try:
      prompt = self._conversation.first(shown(observation), tools)
    except ValueError as error:
      self._failed(session, UnusableMessages(str(error)))
      return
    if not prompt or len(prompt) >= self._limit:
      self._drop(session, 'prompt_length')
      self._failures.add(
          f'prompt_length: prompt {session.prompt_id} has {len(prompt)} tokens; 1 to {self._limit - 1} fit '
          f'(task.max_tokens={self._task.max_tokens}, model.max_length={self._max_length})')
      return
    session.metrics = {name: 0.0 for name in self._metric_names}  # Of a rollout that is cut before its first step.
    session.history, session.tools = as_messages(shown(observation)), tools
    session.append(prompt, action=False)
    self._sample(session, observation)

  @property
  def _limit(self) -> int:
    return min(self._task.max_tokens, self._max_length)

  def _sample(self, session: RolloutSession, observation: Observation) -> None:
    session.phase, session.turn_start = 'sampling', len(session.tokens)
    session.turn_limit, session.turn_stop = observation.max_tokens, tuple(observation.stop)
    self._submit(session, drawn=0)

  def _submit(self, session: RolloutSession, drawn: int) -> None:
    """Asks for the rest of the turn; its last `drawn` tokens exist already (resumed sessions)."""
    begin = session.segment_starts[-1]
    start = session.turn_start - begin
    turn = self._task.max_turn_tokens if session.turn_limit is None else min(self._task.max_turn_tokens, session.turn_limit)
    room = min(turn, self._limit - start) - drawn
    attempt = session.attempt + SEGMENT_NOISE * (len(session.segment_starts) - 1)
    self.sampler.submit(Request(
        session=session.ticket, tokens=np.asarray(session.tokens[begin:], np.int32), prompt_id=session.prompt_id, attempt=attempt,
        max_new_tokens=room, turn_start=start, stop_ids=self._conversation.stop_ids,
        stop_strings=(*self._stop_strings, *session.turn_stop)))

  def _turn_sampled(self, session: RolloutSession, stop_reason: str) -> None:
    """The sampler finished a turn: its text goes to the environment, unless a length limit cut it (`takes_cut_turns`)."""
    session.phase = 'idle'
    session.oldest = min(v for v, a in zip(session.version, session.action_mask) if a)
    full = session.segment_length >= self._limit
    if stop_reason == 'length' and (full or not self._takes_cut_turns):
      self._finish(session, 'truncated', self._length_reason() if full else 'max_turn_tokens')
      return
    ids = session.tokens[session.turn_start:]
    session.stop_id = ids[-1] if stop_reason == 'stop_id' else None
    session.actions.append(self._tokenizer.decode(ids if session.stop_id is None else ids[:-1]))
    session.stops.append('length' if stop_reason == 'length' else 'stop')
    session.rooms.append(None)
    session.phase = 'step'
    self._call(session)

  def _length_reason(self) -> str:
    return 'context' if self._max_length < self._task.max_tokens else 'max_tokens'

  def _stepped(self, session: RolloutSession, step: StepResult) -> None:
    session.reward[-1] += float(step.reward)  # The last position is the last action token of this turn.
    session.metrics.update(step.metrics)
    session.turn += 1
    if step.terminated:
      self._finish(session, 'terminated', 'answer')
    elif step.truncated:
      self._finish(session, 'truncated', 'environment_limit')
    elif session.turn >= self._task.max_turns:
      self._finish(session, 'truncated', 'max_turns')
    elif self._now() - session.started_s > self._task.time_limit_s:
      self._finish(session, 'truncated', 'time_limit')
    else:
      self._continue(session, step.observation, may_compact=True)

  def _compacted(self, session: RolloutSession, observation: Observation | None) -> None:
    pending, session.pending = session.pending, None
    if observation is None:
      observation = pending
    elif observation.tools is None:
      observation = dataclasses.replace(observation, tools=pending.tools)
    self._continue(session, observation, may_compact=False)

  def _continue(self, session: RolloutSession, observation: Observation, *, may_compact: bool) -> None:
    """Appends what follows a turn and samples the next one; in a new segment where the history is another one from here on."""
    tools = session.tools if observation.tools is None else tuple(observation.tools)
    try:
      follow = next_turn(
          self._conversation, session.history, session.actions[-1], observation, session.stop_id, tools=tools, before=session.tools)
    except ValueError as error:
      self._failed(session, UnusableMessages(str(error)))
      return
    no_more_segments = len(session.segment_starts) >= self._task.max_segments
    if follow.rewritten and no_more_segments:
      self._finish(session, 'truncated', 'max_segments')
      return
    room = self._limit - len(follow.ids) - (0 if follow.rewritten else session.segment_length)
    if may_compact and self._task.compact_room and room < self._task.compact_room and not no_more_segments:
      session.phase, session.pending, session.rooms[-1] = 'compact', observation, room
      self._call(session)
      return
    if room < 1:  # No room for the observation and one more action.
      self._finish(session, 'truncated', self._length_reason())
      return
    if follow.rewritten:
      self.sampler.release(session.ticket)  # Its cache is of another sequence.
      session.segment_starts.append(len(session.tokens))
    session.history, session.tools = follow.history, tools
    session.append(follow.ids, action=False)
    self._sample(session, observation)

  # --- Ends --------------------------------------------------------------------------------------------------------------------

  def _finish(self, session: RolloutSession, ending: str, stop_reason: str) -> None:
    self._close(session)
    self._outbox.append(session.to_rollout(ending, stop_reason, self._name, self._now()))
    self._failures.add('')

  def _drop(self, session: RolloutSession, reason: str, *, prompt: tuple[int, int] | None = None) -> None:
    self._close(session)
    self.flow.drop(session.ticket, reason, prompt=prompt)

  def _close(self, session: RolloutSession) -> None:
    if session.phase == 'sampling':
      self.sampler.cancel(session.ticket)
    self.sampler.release(session.ticket)
    del self._sessions[session.ticket]
    if session.environment is not None and session.phase in ('reset', 'step', 'compact'):  # A running call still uses it.
      self._orphans[session.ticket] = session.environment
    else:
      self._discard(session.environment)

  def close(self) -> None:
    """Gives up the environments of everything in flight; nothing can go on after it."""
    for holder in [*self._orphans.values(), *(s.environment for s in self._sessions.values())]:
      self._discard(holder)
    self._orphans.clear()
    self._sessions.clear()

  def _flush(self) -> None:
    while self._outbox and self.flow.finish(self._outbox[0], self.sampler.version):
      self._outbox.popleft()

  # --- Saving ------------------------------------------------------------------------------------------------------------------

  def state(self) -> dict[str, Any]:
    """Every session with its tokens so far, those of an unfinished turn included; call between chunks. Finished rollouts that the queue
    has no room for are in `outbox`. Shares nothing with the engine that changes later: it is written to disk while the engine goes on."""
    partials, due = self.sampler.partials(), self.calls.due()
    order = {ticket: i for i, ticket in enumerate(self.sampler.order())}
    saved = []
    for session in sorted(self._sessions.values(), key=lambda s: order.get(s.ticket, -1)):
      entry = session.save()
      if session.ticket in partials:
        entry['partial'] = list(partials[session.ticket])
      if session.ticket in due:
        entry['due_s'] = due[session.ticket]
      saved.append(entry)
    return {'sessions': saved, 'outbox': list(self._outbox)}

  def restore(self, state: Mapping[str, Any], task_of: Callable[[int, int], Task]) -> None:
    """Takes saved sessions up again: replayable environments continue where they were, others start over as a new attempt."""
    self._outbox.extend(state['outbox'])
    for entry in state['sessions']:
      session = RolloutSession.load(entry, task_of(int(entry['prompt_id']), int(entry['attempt'])))
      self._sessions[session.ticket] = session
      if not self._replayable:
        session.restart()
      if session.phase == 'sampling':
        partial = entry.get('partial', ((), (), ()))
        session.append(partial[0], action=True, log_probs=partial[1], versions=partial[2])
        self._submit(session, drawn=len(partial[0]))
      else:
        self._call(session, due_s=entry.get('due_s'))
