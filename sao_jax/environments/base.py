"""What an environment is, and the values it exchanges with a rollout.

An `Environment` object plays one episode at a time: `reset(task)` starts it, `step(action)` continues it until a result says `terminated`
or `truncated`. One rollout owns one object, so an implementation needs no lock; calls of one object may come from different threads, one
after the other. Nothing under `environments/` imports JAX.

Three endings are kept apart, since learning treats them differently:
  terminated  the task is over, solved or not; the reward is what it is and nothing is worth anything afterwards;
  truncated   a limit cut the episode; the state after it still has a value;
  failure     the environment itself broke (`EnvironmentFailure`); the rollout is dropped and counted, never given a reward of zero.
What the policy does wrong is none of these: a malformed action or tool call gets an observation that says so.

Time limits are not an environment's business: the pool that calls it has them.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import hashlib
import math
import threading
from typing import Any, Awaitable, Coroutine, Mapping, Sequence

import numpy as np

from sao_jax.tool_calls import ToolCall, ToolCallError, Turn

SPLITS = ('train', 'test')
CONVERSATIONS = ('raw', 'chat')
FAILURE_KINDS = ('environment_', 'grader_')  # How the reasons begin for which failures drop a rollout.


def is_failure(reason: str) -> bool:
  """Whether a rollout dropped for `reason` was lost to its environment."""
  return reason.startswith(FAILURE_KINDS)


class EnvironmentFailure(Exception):
  """The environment broke: a lost sandbox, a grader that raised, a reward that is not a number. Says nothing about the policy.

  Attributes of a subclass:
    reason: the name under which lost rollouts are counted; begins with one of `FAILURE_KINDS`.
    retry: whether the same call may go better the next time.
  """

  reason: str = 'environment_error'
  retry: bool = True

  def __init_subclass__(cls, **kwargs: Any):
    super().__init_subclass__(**kwargs)
    if not is_failure(cls.reason):
      raise ValueError(f'The reason of {cls.__name__} must begin with one of {", ".join(FAILURE_KINDS)}; got {cls.reason!r}.')


class GraderTimeout(EnvironmentFailure):
  """A grader ran into its limits before it could tell; it would again."""

  reason = 'grader_timeout'
  retry = False


class GraderError(EnvironmentFailure):
  """A grader itself failed."""

  reason = 'grader_error'


class UnusableMessages(EnvironmentFailure):
  """Messages that the chat template cannot show, or not after those before them; it would refuse them again."""

  reason = 'environment_messages'
  retry = False


@dataclasses.dataclass(frozen=True)
class Observation:
  """What the policy sees next: `text` in a raw conversation, `messages` ({'role', 'content'} each) in a chat.

  A tool's result is a message of the role 'tool'; several messages may follow one turn.

  Attributes:
    restart: text or messages are the whole conversation from here on, the policy's own turns among them (role 'assistant', the reasoning
      as the policy wrote it). The rollout goes on in a new segment that begins with it.
    tools: the tools from here on, as in `Environment.tools`; None for those of before. Turns come to `step_calls` if there are any, else
      to `step`. Where the chat template shows them, other tools begin a new segment.
    max_tokens: most tokens of the next turn, and of that one only; `task.max_turn_tokens` holds, too. None for that alone.
    stop: strings that end the next turn, and that one only, besides those of `Environment.stop_strings`.

  Raises:
    ValueError: a restart with an empty conversation, `max_tokens` below 1, or an empty string in `stop`.
  """

  text: str = ''
  messages: tuple[Mapping[str, str], ...] = ()
  restart: bool = dataclasses.field(default=False, kw_only=True)
  tools: tuple[Mapping[str, Any], ...] | None = dataclasses.field(default=None, kw_only=True)
  max_tokens: int | None = dataclasses.field(default=None, kw_only=True)
  stop: tuple[str, ...] = dataclasses.field(default=(), kw_only=True)

  def __post_init__(self):
    if self.restart and not (self.text or self.messages):
      raise ValueError('An observation with restart=True must hold the whole conversation, got none.')
    if self.max_tokens is not None and (isinstance(self.max_tokens, bool) or not isinstance(self.max_tokens, int) or self.max_tokens < 1):
      raise ValueError(f'max_tokens of an observation must be None or an integer of at least 1, got {self.max_tokens!r}.')
    if isinstance(self.stop, str) or not all(isinstance(s, str) and s for s in self.stop):
      raise ValueError(f'stop of an observation must be strings, none empty, got {self.stop!r}.')


@dataclasses.dataclass(frozen=True)
class SampledTurn:
  """A turn as the sampler drew it, for environments that ask for it (`wants_tokens`).

  Attributes:
    prompt_ids: ids of the sequence before the turn: of its segment of the rollout, from the first token on.
    ids: what was drawn, a stop token included.
    log_probs: nats, one for each of `ids`, under the distribution that they were drawn from.
    versions: of the parameters that drew each of `ids`.
    text: the turn's whole text, without the stop token.
    stop_reason: 'stop' (a stop token or string) or 'length' (a limit of the turn cut it).
  """

  prompt_ids: tuple[int, ...]
  ids: tuple[int, ...]
  log_probs: tuple[float, ...]
  versions: tuple[int, ...]
  text: str
  stop_reason: str


@dataclasses.dataclass(frozen=True)
class StepResult:
  """Answer to one action.

  Attributes:
    observation: what the policy sees next; not shown to it when the episode is over.
    reward: reward of this turn, finite.
    terminated: the task is over. Wins over `truncated`: an episode that ends and is cut on the same step has ended.
    truncated: a limit of the environment cut the episode.
    metrics: numbers of the episode so far, under the environment's `metric_names`; the last ones are the rollout's.

  Raises:
    EnvironmentFailure: on a reward or metric that is not a finite number.
  """

  observation: Observation = Observation()
  reward: float = 0.0
  terminated: bool = False
  truncated: bool = False
  metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    numbers = {'reward': self.reward, **self.metrics}
    for name, value in numbers.items():
      if not isinstance(value, (int, float, np.number, np.bool_)) or not math.isfinite(value):
        raise EnvironmentFailure(f'The environment gave {name} = {value!r}; it must be a finite number.')
    object.__setattr__(self, 'reward', float(self.reward))
    object.__setattr__(self, 'metrics', {name: float(value) for name, value in self.metrics.items()})
    object.__setattr__(self, 'truncated', bool(self.truncated) and not self.terminated)


@dataclasses.dataclass(frozen=True)
class Task:
  """One problem, a pure function of (seed, split, index). `data` is plain (JSON-able); `attempt` counts tries at the same problem."""

  index: int
  split: str
  seed: int
  data: Mapping[str, Any]
  attempt: int = 0


@dataclasses.dataclass(frozen=True)
class TaskSet:
  """Tasks that have an end: indices [start, start + size) of an environment's split.

  Attributes:
    name: for people.
    weight: share of the prompts, relative to the other sets; None (for all sets) for one in proportion to the size.
    fingerprint: changes when the tasks change; '' where nothing is known.
  """

  name: str
  start: int
  size: int
  weight: float | None = None
  fingerprint: str = ''


class Environment:
  """Base of all environments; subclasses give `sample_task`, `reset` and `step`.

  Attributes:
    name: name in the registry.
    replayable: the same task and the same actions lead to the same observations and rewards, so an episode can be continued elsewhere.
    conversation: 'raw' (text as is) or 'chat' (messages).
    stop_strings: a turn of the policy ends with the first of these.
    has_demonstrations: `demonstration` is there.
    metric_names: what every `StepResult.metrics` holds; a rollout cut before its first step counts 0 for each.
    tools: JSON-schema functions, {'type': 'function', 'function': {'name', 'description', 'parameters'}}, that the prompt tells of. With
      them turns come to `step_calls` instead of `step`. An observation may replace them.
    takes_cut_turns: a turn that `task.max_turn_tokens` or `Observation.max_tokens` cut comes to `step` or `step_calls` like any other,
      instead of ending the rollout. One that ran out of context ends it all the same.
    wants_tokens: `sampled` is called before each `step` or `step_calls`.
  """

  name: str = ''
  replayable: bool = False
  conversation: str = 'raw'
  stop_strings: tuple[str, ...] = ()
  has_demonstrations: bool = False
  metric_names: tuple[str, ...] = ('success',)
  tools: tuple[Mapping[str, Any], ...] = ()
  takes_cut_turns: bool = False
  wants_tokens: bool = False

  def sample_task(self, index: int, split: str, seed: int) -> Task:
    """The task at `index` of a split; the same arguments give the same task, and tasks of different splits differ."""
    raise NotImplementedError(f'{type(self).__name__} has no sample_task.')

  def task_sets(self, split: str) -> tuple[TaskSet, ...]:
    """The tasks of a split where they have an end, one set after the other from index 0; () where `sample_task` takes every index."""
    del split
    return ()

  def reset(self, task: Task) -> Observation:
    """Starts an episode (leaving any earlier one) and gives what the policy sees first. Raises EnvironmentFailure."""
    raise NotImplementedError(f'{type(self).__name__} has no reset.')

  def step(self, action: str) -> StepResult:
    """Continues the episode with the text of one turn, its stop string included. Raises EnvironmentFailure."""
    raise NotImplementedError(f'{type(self).__name__} has no step.')

  def step_calls(self, calls: Sequence[ToolCall | ToolCallError], text: str) -> StepResult:
    """Continues the episode with a turn of an environment with `tools`. Raises EnvironmentFailure.

    Args:
      calls: in order; a `ToolCall` names one of the tools, with arguments that fit its schema; a `ToolCallError` says what was wrong
        with what should have been one, for the policy to be told.
      text: what the turn says outside of calls and reasoning.
    """
    raise NotImplementedError(f'{type(self).__name__} has tools but no step_calls.')

  def check_run(self, *, workers: int, sessions: int, step_timeout_s: float) -> None:
    """Called once before a run. Raises ValueError where `task.workers`, `sampler.sessions` or `task.step_timeout_s` do not do for this
    environment."""
    del workers, sessions, step_timeout_s

  def sampled(self, turn: SampledTurn) -> None:
    """Takes the tokens of the turn that `step` or `step_calls` gets next, in the same call of the pool. Raises EnvironmentFailure."""
    raise NotImplementedError(f'{type(self).__name__} wants tokens but has no sampled.')

  def compact(self, messages: Sequence[Mapping[str, Any]], room: int) -> Observation | None:
    """Makes room in a conversation that nears its limit; called after a step whose observation leaves fewer than `task.compact_room`
    tokens, and never where no further segment may begin (`task.max_segments`). Raises EnvironmentFailure.

    Args:
      messages: the whole conversation, with the last turn and the observation that would follow it.
      room: tokens that this observation leaves for the next turn; below 1 where it does not fit.

    Returns:
      What the policy sees in place of that observation: a shorter conversation (`restart=True`), or messages that follow the turn, for
      instance a request to sum up, which the next step answers with a restart. None to go on as it is, to the limit.
    """
    del messages, room
    return None

  def demonstration(self, task: Task, rng: np.random.Generator) -> list[str | Turn]:
    """The actions of one demonstrated episode, in order: texts, or with tools `Turn`s, which are written in the form of the model's tool
    calls; the environment's own settings say how good it is."""
    raise NotImplementedError(f'{type(self).__name__} has no demonstrations.')

  def close(self) -> None:
    """Gives up what the environment holds. Called once, also while a hung call is still running in another thread."""


class AsyncEnvironment(Environment):
  """Synchronous face of an environment written with coroutines: subclasses give `reset_async`, `step_async` and, if needed, `close_async`.

  Each object has its own event loop, which lives from the first call to `close`, so that connections opened in one call serve the next
  one. `close` cancels a call that hangs in another thread; that call then raises EnvironmentFailure.
  """

  def __init__(self):
    self._lock = threading.Lock()  # Guards the three below.
    self._loop: asyncio.AbstractEventLoop | None = None
    self._running: asyncio.Task | None = None
    self._closed = False

  async def reset_async(self, task: Task) -> Observation:
    raise NotImplementedError(f'{type(self).__name__} has no reset_async.')

  async def step_async(self, action: str) -> StepResult:
    raise NotImplementedError(f'{type(self).__name__} has no step_async.')

  async def step_calls_async(self, calls: Sequence[ToolCall | ToolCallError], text: str) -> StepResult:
    raise NotImplementedError(f'{type(self).__name__} has no step_calls_async.')

  async def close_async(self) -> None:
    """Closes connections; runs on the object's own loop after its last call."""

  def reset(self, task: Task) -> Observation:
    return self._run(self.reset_async(task))

  def step(self, action: str) -> StepResult:
    return self._run(self.step_async(action))

  def step_calls(self, calls: Sequence[ToolCall | ToolCallError], text: str) -> StepResult:
    return self._run(self.step_calls_async(calls, text))

  def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
    with self._lock:
      if self._closed or self._running is not None:
        coroutine.close()
        raise EnvironmentFailure('closed' if self._closed else 'another call of this environment is still running')
      self._loop = self._loop or asyncio.new_event_loop()
      self._running = task = self._loop.create_task(coroutine)
    try:
      return _drive(self._loop, task)
    except asyncio.CancelledError as error:
      raise EnvironmentFailure('cancelled by close') from error
    finally:
      with self._lock:
        self._running, closed = None, self._closed
      if closed:
        self._end_loop()

  def close(self) -> None:
    with self._lock:
      if self._closed:
        return
      self._closed, running, loop = True, self._running, self._loop
      if running is not None:
        loop.call_soon_threadsafe(running.cancel)
    if running is None and loop is not None:
      self._end_loop()

  def _end_loop(self) -> None:
    try:
      _drive(self._loop, self.close_async())
    finally:
      self._loop.close()


def _drive(loop: asyncio.AbstractEventLoop, work: Awaitable[Any]) -> Any:
  """Result of `work` on `loop`; in a thread of its own where this thread runs a loop already, as notebooks do."""
  try:
    asyncio.get_running_loop()
  except RuntimeError:
    return loop.run_until_complete(work)
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    return pool.submit(loop.run_until_complete, work).result()


def generator(name: str, *counters: int) -> np.random.Generator:
  """NumPy generator of the stream `name` at `counters` (non-negative after masking to 64 bits), independent of every other stream."""
  digest = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), 'big')
  return np.random.default_rng([digest, *(counter & 0xFFFFFFFFFFFFFFFF for counter in counters)])


def split_of(text: str, test_share: float) -> str:
  """'test' for about `test_share` of all texts, 'train' for the others: a function of the text alone, so the splits never meet."""
  digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), 'big')
  return 'test' if digest < test_share * 2.0**64 else 'train'


def check_split(split: str) -> None:
  if split not in SPLITS:
    raise ValueError(f'split must be one of {", ".join(SPLITS)}, got {split!r}.')


def check_range(name: str, value: Any, low: float, high: float) -> None:
  """Raises ValueError unless `value` is a number (an int where both bounds are ints) in [low, high]."""
  whole = isinstance(low, int) and isinstance(high, int)
  if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not low <= value <= high:
    raise ValueError(f'{name} must be {"an integer" if whole else "a number"} in [{low}, {high}], got {value!r}.')
