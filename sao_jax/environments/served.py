"""A conversation that a client of the stand-alone server leads: an environment that ends when the client falls silent, ungraded."""

from __future__ import annotations

from typing import Sequence

from sao_jax import gateway
from sao_jax.environments import base
from sao_jax.gateway.switchboard import Switchboard
from sao_jax.tool_calls import ToolCall, ToolCallError


class Served(base.Environment):
  """One conversation of a switchboard; the task's data name it."""

  name = 'served'
  conversation = 'chat'
  takes_cut_turns = True
  wants_tokens = True
  metric_names = ('success',)

  def __init__(self, board: Switchboard, quiet_s: float):
    self._board, self._quiet_s = board, quiet_s
    self._session: gateway.Session | None = None
    self._turn: base.SampledTurn | None = None

  def reset(self, task: base.Task) -> base.Observation:
    self._session = self._board.session(task.data['conversation'])
    try:
      prompt = self._session.next(self._quiet_s, poll_s=5.0)
    except (gateway.Ended, TimeoutError):
      raise base.EnvironmentFailure('The client left before its first request was taken up.') from None
    return base.Observation(
        messages=prompt.messages, tools=prompt.tools, max_tokens=prompt.max_tokens, stop=prompt.stop)

  def sampled(self, turn: base.SampledTurn) -> None:
    self._turn = turn

  def step(self, action: str) -> base.StepResult:
    return self._answered((), action)

  def step_calls(self, calls: Sequence[ToolCall | ToolCallError], text: str) -> base.StepResult:
    return self._answered(calls, text)

  def _answered(self, calls: Sequence[ToolCall | ToolCallError], text: str) -> base.StepResult:
    try:
      self._session.answer(gateway.make_answer(self._turn, calls, text, self._session.request))
      prompt = self._session.next(self._quiet_s, poll_s=5.0)
    except (gateway.Ended, TimeoutError, RuntimeError):
      return base.StepResult(terminated=True)
    return base.StepResult(base.Observation(
        messages=prompt.messages, restart=prompt.restart, tools=prompt.tools, max_tokens=prompt.max_tokens, stop=prompt.stop))
