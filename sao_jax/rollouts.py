"""The life of a rollout, from its ticket to the queue.

`RolloutEngine` is a state machine with one owner thread and no thread of its own. A session is always in one phase:

    reset --(prompt ids)--> sampling --(turn text)--> step --(observation ids)--> sampling ... --> finished | dropped
            environment                 sampler               environment

One iteration, whatever the clock: `before_chunk` (results of environment calls, new sessions), `Sampler.step`, `after_chunk` (finished
turns). Environment calls go through a `Calls` object: a thread pool under the wall clock, a simulated one under virtual time.

Tokens in, tokens out: the ids that the sampler drew are stored as they came; only new text is tokenized, once, and appended. Where the chat
template rewrites the history, a new segment begins with the conversation rendered afresh: the sampler starts on it as on a new sequence,
and what was drawn before stays, as it was drawn, in the earlier segments.

An environment with `tools` gets the tool calls of a turn, parsed; what is wrong with a call comes with it, as a `ToolCallError`.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from typing import Any, Callable, Mapping, Protocol, Sequence

import numpy as np

from sao_jax import tool_calls
from sao_jax.config import TaskConfig
from sao_jax.environments.base import Environment, EnvironmentFailure, Observation, StepResult, Task
from sao_jax.models.conversation import Continuation, Conversation, as_messages
from sao_jax.models.tokenizers import Tokenizer
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


def expect(value: Any, kind: type, what: str) -> Any:
  """`value`. Raises TypeError where it is of another kind: a fault of the environment's code, not of the policy."""
  if not isinstance(value, kind):
    raise TypeError(f'{what} must return {kind.__name__}, got {type(value).__name__}')
  return value


class EnvironmentHolder:
  """The environment of one session: made in the first call that needs it, closed once, by whichever thread comes to it."""

  def __init__(self, make: Callable[[], Environment], act: Callable[[Environment, str], StepResult]):
    self._make, self._act, self._lock = make, act, threading.Lock()
    self._environment: Environment | None = None
    self._closed = False

  def reset(self, task: Task) -> Observation:
    return expect(self._get()[0].reset(task), Observation, 'reset')

  def step(self, task: Task, actions: list[str]) -> StepResult:
    """Steps with the last action; an environment that is not there yet is made and replayed up to it."""
    environment, fresh = self._get()
    if fresh:
      environment.reset(task)
      for action in actions[:-1]:
        self._act(environment, action)
    return expect(self._act(environment, actions[-1]), StepResult, 'step')

  def _get(self) -> tuple[Environment, bool]:
    """The environment, and whether it was made just now."""
    if self._environment is not None:
      return self._environment, False
    environment = self._make()  # Outside the lock: making may hang, and `close` must not wait for it.
    with self._lock:
      if not self._closed:
        self._environment = environment
        return environment, True
    environment.close()
    raise EnvironmentFailure('closed while it was made')

  def close(self) -> None:
    """Closes what was made; does nothing the second time."""
    with self._lock:
      environment, closed, self._closed = self._environment, self._closed, True
    if environment is not None and not closed:
      environment.close()


@dataclasses.dataclass
class Session:
  """A rollout in flight. Per-token lists have one entry per position of `tokens`; a partly drawn turn stays in the sampler."""

  ticket: int
  prompt_id: int
  attempt: int
  task: Task
  started_s: float
  phase: str = 'reset'  # 'reset' | 'sampling' | 'step'; 'idle' between two of them.
  environment: EnvironmentHolder | None = None  # None: made, and brought up to date by replay, in the next call.
  tokens: list[int] = dataclasses.field(default_factory=list)
  action_mask: list[bool] = dataclasses.field(default_factory=list)
  log_prob: list[float] = dataclasses.field(default_factory=list)
  version: list[int] = dataclasses.field(default_factory=list)
  reward: list[float] = dataclasses.field(default_factory=list)
  turn_of: list[int] = dataclasses.field(default_factory=list)
  actions: list[str] = dataclasses.field(default_factory=list)  # Texts of the finished turns, in order.
  history: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # Messages before the turn.
  segment_starts: list[int] = dataclasses.field(default_factory=lambda: [0])
  turn: int = 0
  turn_start: int = 0
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
    for values in (self.tokens, self.action_mask, self.log_prob, self.version, self.reward, self.turn_of, self.actions, self.history):
      values.clear()
    self.segment_starts = [0]
    self.phase, self.environment, self.turn, self.turn_start, self.metrics = 'reset', None, 0, 0, {}
    self.attempt += 1
    self.task = dataclasses.replace(self.task, attempt=self.attempt)

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


_SAVED = (
    'ticket', 'prompt_id', 'attempt', 'started_s', 'phase', 'actions', 'history', 'segment_starts', 'turn', 'turn_start', 'stop_id',
    'retry', 'oldest', 'metrics')
SEGMENT_NOISE = 1 << 16  # The noise of a token is a function of its position; segments after the first draw as such a later attempt would.
_ARRAYS = {'tokens': np.int32, 'action_mask': bool, 'log_prob': np.float32, 'version': np.int32, 'reward': np.float32, 'turn_of': np.int32}


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
    self._sessions: dict[int, Session] = {}
    self._outbox: collections.deque[Rollout] = collections.deque()
    self._failures = FailureShare(task.max_failure_share)
    self._orphans: dict[int, EnvironmentHolder] = {}  # Of dropped sessions, by ticket, while a call still uses them.
    self._close_errors: collections.deque[Exception] = collections.deque()
    probe = make_environment()
    self._name, self._replayable, self._stop_strings = probe.name, probe.replayable, tuple(probe.stop_strings)
    self._metric_names = tuple(probe.metric_names)
    self._tools, self._act = tuple(probe.tools), actor(conversation, probe.tools)
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
      session = Session(
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

  def _take_partial(self, session: Session) -> None:
    tokens, log_probs, versions = self.sampler.partials()[session.ticket]
    self.sampler.cancel(session.ticket)
    session.phase = 'idle'
    session.append(tokens, action=True, log_probs=log_probs, versions=versions)

  # --- Environment calls -------------------------------------------------------------------------------------------------------

  def _call(self, session: Session, due_s: float | None = None) -> None:
    """Submits the call of the session's phase; it makes and replays the environment first where there is none."""
    if session.environment is None:
      session.environment = EnvironmentHolder(self._make_environment, self._act)
    holder, task, actions = session.environment, session.task, list(session.actions)
    function = (lambda: holder.reset(task)) if session.phase == 'reset' else (lambda: holder.step(task, actions))
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
      else:
        self._stepped(session, result.value)
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

  def _failed(self, session: Session, error: BaseException) -> None:
    """Retries a failure of the environment itself, then drops the rollout under that name; any other error goes up."""
    if not isinstance(error, (EnvironmentFailure, TimeoutError)):
      where = 'reset' if session.phase == 'reset' else f'step, turn {session.turn}'
      raise RuntimeError(f'Environment {self._name!r}, prompt {session.prompt_id}, {where}: {type(error).__name__}: {error}') from error
    self._discard(session.environment)  # Also while a call that was given up hangs in it.
    session.environment = None
    if session.retry < self._task.retries and getattr(error, 'retry', True):
      session.retry += 1
      if not self._replayable and session.phase == 'step':
        self.sampler.release(session.ticket)
        session.restart()
      self._call(session)
      return
    reason = error.reason if isinstance(error, EnvironmentFailure) else 'environment_timeout'
    self._drop(session, reason)
    self._failures.add(f'{reason}: {error}')

  # --- Turns -------------------------------------------------------------------------------------------------------------------

  def _begin(self, session: Session, observation: Observation) -> None:
    messages = observation.messages or observation.text
    prompt = self._conversation.first(messages, self._tools)
    if not prompt or len(prompt) >= self._limit:
      self._drop(session, 'prompt_length')
      self._failures.add(
          f'prompt_length: prompt {session.prompt_id} has {len(prompt)} tokens; 1 to {self._limit - 1} fit '
          f'(task.max_tokens={self._task.max_tokens}, model.max_length={self._max_length})')
      return
    session.metrics = {name: 0.0 for name in self._metric_names}  # Of a rollout that is cut before its first step.
    session.history = as_messages(messages)
    session.append(prompt, action=False)
    self._sample(session)

  @property
  def _limit(self) -> int:
    return min(self._task.max_tokens, self._max_length)

  def _sample(self, session: Session) -> None:
    session.phase, session.turn_start = 'sampling', len(session.tokens)
    self._submit(session, drawn=0)

  def _submit(self, session: Session, drawn: int) -> None:
    """Asks for the rest of the turn; its last `drawn` tokens exist already (resumed sessions)."""
    begin = session.segment_starts[-1]
    start = session.turn_start - begin
    room = min(self._task.max_turn_tokens, self._limit - start) - drawn
    attempt = session.attempt + SEGMENT_NOISE * (len(session.segment_starts) - 1)
    self.sampler.submit(Request(
        session=session.ticket, tokens=np.asarray(session.tokens[begin:], np.int32), prompt_id=session.prompt_id, attempt=attempt,
        max_new_tokens=room, turn_start=start, stop_ids=self._conversation.stop_ids, stop_strings=self._stop_strings))

  def _turn_sampled(self, session: Session, stop_reason: str) -> None:
    """The sampler finished a turn: its text goes to the environment, unless a length limit cut it."""
    session.phase = 'idle'
    session.oldest = min(v for v, a in zip(session.version, session.action_mask) if a)
    if stop_reason == 'length':
      full = session.segment_length >= self._limit
      self._finish(session, 'truncated', self._length_reason() if full else 'max_turn_tokens')
      return
    ids = session.tokens[session.turn_start:]
    session.stop_id = ids[-1] if stop_reason == 'stop_id' else None
    session.actions.append(self._tokenizer.decode(ids if session.stop_id is None else ids[:-1]))
    session.phase = 'step'
    self._call(session)

  def _length_reason(self) -> str:
    return 'context' if self._max_length < self._task.max_tokens else 'max_tokens'

  def _stepped(self, session: Session, step: StepResult) -> None:
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
      follow = next_turn(self._conversation, session.history, session.actions[-1], step.observation, session.stop_id, self._tools)
      self._continue(session, follow)

  def _continue(self, session: Session, follow: Continuation) -> None:
    """Appends what follows a turn and samples the next one; in a new segment where the history was rewritten."""
    if follow.rewritten and len(session.segment_starts) >= self._task.max_segments:
      self._finish(session, 'truncated', 'max_segments')
      return
    before = 0 if follow.rewritten else session.segment_length
    if before + len(follow.ids) >= self._limit:  # No room for the observation and one more action.
      self._finish(session, 'truncated', self._length_reason())
      return
    if follow.rewritten:
      self.sampler.release(session.ticket)  # Its cache is of another sequence.
      session.segment_starts.append(len(session.tokens))
    session.history = follow.history
    session.append(follow.ids, action=False)
    self._sample(session)

  # --- Ends --------------------------------------------------------------------------------------------------------------------

  def _finish(self, session: Session, ending: str, stop_reason: str) -> None:
    self._close(session)
    self._outbox.append(session.to_rollout(ending, stop_reason, self._name, self._now()))
    self._failures.add('')

  def _drop(self, session: Session, reason: str, *, prompt: tuple[int, int] | None = None) -> None:
    self._close(session)
    self.flow.drop(session.ticket, reason, prompt=prompt)

  def _close(self, session: Session) -> None:
    if session.phase == 'sampling':
      self.sampler.cancel(session.ticket)
    self.sampler.release(session.ticket)
    del self._sessions[session.ticket]
    if session.environment is not None and session.phase in ('reset', 'step'):  # A running call still uses it.
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
      entry = {name: getattr(session, name) for name in _SAVED}
      entry.update(actions=list(session.actions), metrics=dict(session.metrics))
      entry.update(history=list(session.history), segment_starts=list(session.segment_starts))
      entry.update({name: np.asarray(getattr(session, name), dtype) for name, dtype in _ARRAYS.items()})
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
      session = Session(task=task_of(int(entry['prompt_id']), int(entry['attempt'])), **{name: entry[name] for name in _SAVED})
      session.actions, session.metrics = list(session.actions), dict(session.metrics)
      session.history, session.segment_starts = [dict(m) for m in session.history], list(session.segment_starts)
      for name in _ARRAYS:
        setattr(session, name, entry[name].tolist())
      self._sessions[session.ticket] = session
      if not self._replayable:
        session.restart()
      if session.phase == 'sampling':
        partial = entry.get('partial', ((), (), ()))
        session.append(partial[0], action=True, log_probs=partial[1], versions=partial[2])
        self._submit(session, drawn=len(partial[0]))
      else:
        self._call(session, due_s=entry.get('due_s'))


def next_turn(
    conversation: Conversation, history: Sequence[Mapping[str, Any]], text: str, observation: Observation, stop_id: int | None,
    tools: Sequence[Mapping[str, Any]],
) -> Continuation:
  """What goes between two turns, from the observation's messages, or its text."""
  return conversation.follow(history, text, observation.messages or observation.text, stop_id=stop_id, tools=tools)


def actor(conversation: Conversation, tools: Sequence[Mapping[str, Any]]) -> Callable[[Environment, str], StepResult]:
  """How a turn's text steps an environment: as text, or as the tool calls in it where there are `tools`.

  Raises:
    ValueError: `tools` are no JSON-schema functions, or the chat template has no place for the answer of a tool.
  """
  if not tools:
    return lambda environment, text: environment.step(text)
  tool_calls.check_tools(tools)
  conversation.follow([{'role': 'user', 'content': 'x'}], 'x', [{'role': 'tool', 'content': 'x'}], stop_id=None, tools=tools)
  form, lead, tools = conversation.tool_format, conversation.lead, tuple(tools)

  def act(environment: Environment, text: str) -> StepResult:
    parsed = tool_calls.parse(tool_calls.after_thinking(lead + text), form, tools)
    return environment.step_calls(parsed.calls, parsed.text)

  return act
