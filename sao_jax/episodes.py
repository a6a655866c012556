"""The environment's side of a rollout: its turns, played on one environment and, where that was lost, played again on another.

Everything here runs in a thread of the pool and touches nothing but its own environment; what the engine knows of the turns comes with
each call, so a call can always be made on a fresh environment:

    reset, then for each turn:  sampled (if tokens are wanted), step or step_calls, compact (if it was called then)

The last of these is the call itself, all before it is replay.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from typing import Any, Callable, Mapping, Sequence

from sao_jax import tool_calls
from sao_jax.environments.base import Environment, EnvironmentFailure, Observation, SampledTurn, StepResult, Task
from sao_jax.models.conversation import Continuation, Conversation, as_messages

Tools = Sequence[Mapping[str, Any]]
Act = Callable[[Environment, str], StepResult]


@dataclasses.dataclass(frozen=True)
class Played:
  """A turn of the policy as its environment gets it.

  Attributes:
    text: without the stop token.
    sampled: its tokens, for an environment that wants them.
    room: of the call of `compact` that followed; None for no such call.
  """

  text: str
  sampled: SampledTurn | None = None
  room: int | None = None


def expect(value: Any, kind: type, what: str) -> Any:
  """`value`. Raises TypeError where it is of another kind: a fault of the environment's code, not of the policy."""
  if not isinstance(value, kind):
    raise TypeError(f'{what} must return {kind.__name__}, got {type(value).__name__}')
  return value


def shown(observation: Observation) -> str | tuple[Mapping[str, Any], ...]:
  """What an observation shows: its messages, or its text."""
  return observation.messages or observation.text


def next_turn(
    conversation: Conversation, history: Sequence[Mapping[str, Any]], text: str, observation: Observation, stop_id: int | None, *,
    tools: Tools, before: Tools,
) -> Continuation:
  """What goes between two turns.

  Args:
    conversation: the format.
    history: messages before the turn.
    text: of the turn.
    observation: what follows it; the whole conversation where it restarts.
    stop_id: the stop token that ended the turn, None where something else did.
    tools: from here on.
    before: tools that the sequence was begun with.
  """
  if observation.restart:
    return Continuation(conversation.first(shown(observation), tools), True, as_messages(shown(observation)))
  return conversation.follow(history, text, shown(observation), stop_id=stop_id, tools=tools, afresh=list(tools) != list(before))


def actor(conversation: Conversation, tools: Tools) -> Act:
  """How a turn's text steps an environment: as text, or as the tool calls in it where there are `tools`.

  Raises:
    ValueError: `tools` are no JSON-schema functions, or the chat template has no place for the answer of a tool.
  """
  act = act_with(conversation.tool_format, conversation.lead, tools)
  if tools:
    conversation.follow([{'role': 'user', 'content': 'x'}], 'x', [{'role': 'tool', 'content': 'x'}], stop_id=None, tools=tools)
  return act


def act_with(form: str, lead: str, tools: Tools) -> Act:
  """As `actor`, from the form of tool calls and the lead of a turn alone; the template is not asked."""
  if not tools:
    return lambda environment, text: environment.step(text)
  tool_calls.check_tools(tools)
  tools = tuple(tools)

  def act(environment: Environment, text: str) -> StepResult:
    parsed = tool_calls.parse(tool_calls.after_thinking(lead + text), form, tools)
    return environment.step_calls(parsed.calls, parsed.text)

  return act


class EnvironmentHolder:
  """The environment of one session: made in the first call that needs it, closed once, by whichever thread comes to it."""

  def __init__(self, make: Callable[[], Environment], conversation: Conversation):
    self._make, self._lock = make, threading.Lock()
    self._act_with = functools.partial(act_with, conversation.tool_format, conversation.lead)
    self._lead = conversation.lead
    self._environment: Environment | None = None
    self._closed = False
    self._act: Act | None = None
    self._said: list[dict[str, Any]] = []  # The conversation up to the last turn, that included.
    self._messages: list[dict[str, Any]] = []  # And with the observation after it.

  def reset(self, task: Task) -> Observation:
    return self._reset(self._get()[0], task)

  def step(self, task: Task, turns: Sequence[Played]) -> StepResult:
    """Steps with the last turn."""
    return self._step(self._played(task, turns[:-1]), turns[-1])

  def compact(self, task: Task, turns: Sequence[Played]) -> Observation | None:
    """Asks for a compaction after the last turn, with its room."""
    environment, fresh = self._get()
    if fresh:
      self._replay(environment, task, turns[:-1])
      self._step(environment, turns[-1])
    return self._compact(environment, turns[-1].room)

  def _played(self, task: Task, turns: Sequence[Played]) -> Environment:
    """The environment as these turns leave it; one that is not there yet is made and they are played again."""
    environment, fresh = self._get()
    if fresh:
      self._replay(environment, task, turns)
    return environment

  def _replay(self, environment: Environment, task: Task, turns: Sequence[Played]) -> None:
    self._reset(environment, task)
    for turn in turns:
      self._step(environment, turn)
      if turn.room is not None:
        self._compact(environment, turn.room)

  def _reset(self, environment: Environment, task: Task) -> Observation:
    observation = expect(environment.reset(task), Observation, 'reset')
    self._act = self._act_with(environment.tools)
    self._said = []
    self._take(observation)
    return observation

  def _step(self, environment: Environment, turn: Played) -> StepResult:
    if turn.sampled is not None:
      environment.sampled(turn.sampled)
    result = expect(self._act(environment, turn.text), StepResult, 'step')
    self._said = [*self._messages, {'role': 'assistant', 'content': self._lead + turn.text}]
    self._take(result.observation)
    return result

  def _compact(self, environment: Environment, room: int) -> Observation | None:
    observation = environment.compact(tuple(self._messages), room)
    if observation is not None:
      self._take(expect(observation, Observation, 'compact'))
    return observation

  def _take(self, observation: Observation) -> None:
    """Keeps the tools and the conversation up to date."""
    if observation.tools is not None:
      self._act = self._act_with(observation.tools)
    new = as_messages(shown(observation))
    self._messages = new if observation.restart else [*self._said, *new]

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
