"""From a turn as it was sampled to the message that a client gets."""

from __future__ import annotations

import json
import secrets
from typing import Protocol, Sequence

from sao_jax import tool_calls
from sao_jax.gateway.chat import Answer, ChatRequest
from sao_jax.tool_calls import ToolCall, ToolCallError


class Turn(Protocol):
  """A sampled turn, as `environments.base.SampledTurn` has it."""

  prompt_ids: Sequence[int]
  ids: Sequence[int]
  log_probs: Sequence[float]
  versions: Sequence[int]
  text: str
  stop_reason: str


def split_reasoning(text: str) -> tuple[str, str]:
  """(reasoning, what is said beyond it) of a whole turn."""
  if tool_calls.THINK_END in text:
    at = text.rindex(tool_calls.THINK_END)
    return text[:at].strip().removeprefix(tool_calls.THINK).strip(), text[at + len(tool_calls.THINK_END):].lstrip()
  if tool_calls.THINK in text:
    at = text.index(tool_calls.THINK)
    return text[at + len(tool_calls.THINK):].strip(), text[:at].strip()
  return '', text


def cut_at(text: str, stops: Sequence[str]) -> str:
  """The text up to the first of `stops`, which OpenAI's API does not show."""
  return text[:min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


def make_answer(turn: Turn, calls: Sequence[ToolCall | ToolCallError], text: str, request: ChatRequest) -> Answer:
  """The answer to `request`.

  Calls become the message's tool calls if all of them are as they must be. With a malformed one among them, or where the request wants
  none, the content is the turn as it was sampled, for the client to read or to complain about.

  Args:
    turn: as sampled.
    calls: of the turn, as `Environment.step_calls` gets them.
    text: what the turn says outside of calls and reasoning.
    request: what is answered.
  """
  said = cut_at(turn.text, request.stop)
  reasoning, content = split_reasoning(said)
  finish, written = 'length' if turn.stop_reason == 'length' else 'stop', ()
  if calls and request.calls and len(said) == len(turn.text) and all(isinstance(call, ToolCall) for call in calls):
    written = tuple((f'call_{secrets.token_hex(12)}', c.name, json.dumps(c.arguments, ensure_ascii=False)) for c in calls)
    content, finish = text.strip(), 'tool_calls'
  return Answer(
      content=content, reasoning=reasoning, calls=written, finish_reason=finish, text=turn.text, prompt_ids=turn.prompt_ids, ids=turn.ids,
      log_probs=turn.log_probs, versions=turn.versions)
