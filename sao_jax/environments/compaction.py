"""Two ways to make room in a chat that nears the limit of a sequence, ready for any environment.

    'drop'      the outputs of all but the last tools are replaced by a note; the policy goes on at once
    'summary'   the policy is asked to sum up, and goes on with the task as it was first told and its own summary

Both begin a new segment with the shorter conversation. An environment takes them up in three lines:

    class Mine(Compaction, Environment):

      def reset(self, task):
        self.begin_episode()
        ...

      def step_calls(self, calls, text):
        if (shorter := self.take_summary(text)) is not None:
          return StepResult(shorter, metrics=...)
        ...

and is asked wherever `task.compact_room` says so. With 'summary' that room must hold the request and the summary.
"""

from __future__ import annotations

from typing import Any, Mapping, Sequence

from sao_jax.environments import base
from sao_jax.tool_calls import after_thinking

WAYS = ('drop', 'summary')
LEFT_OUT = '[left out]'
REQUEST = (
    'The conversation is near its length limit. Without calling a tool, write down everything that is needed to go on: what was found so '
    'far, what was tried, and what is left to do. Only your summary will be kept.')
SUMMARY = 'Your summary of the work so far:'

Messages = Sequence[Mapping[str, Any]]


def last_turn(messages: Messages) -> int:
  """Index of the policy's last turn. Raises ValueError where it has none."""
  turns = [i for i, m in enumerate(messages) if m['role'] == 'assistant']
  if not turns:
    raise ValueError('A conversation is shortened after a turn of the policy, and this one holds none.')
  return turns[-1]


def without_outputs(messages: Messages, *, keep: int, note: str = LEFT_OUT) -> tuple[Mapping[str, Any], ...] | None:
  """The conversation with every tool's output but the last `keep` replaced by `note`; None where that makes nothing shorter."""
  outputs = [i for i, m in enumerate(messages) if m['role'] == 'tool']
  old = {i for i in outputs[:max(len(outputs) - keep, 0)] if len(messages[i]['content']) > len(note)}
  if not old:
    return None
  return tuple({**m, 'content': note} if i in old else m for i, m in enumerate(messages))


def summary_request(messages: Messages, *, text: str = REQUEST, note: str = LEFT_OUT) -> tuple[Mapping[str, Any], ...]:
  """What follows the last turn instead of its answers: tools' outputs become `note`, other messages are left out, and `text` is asked."""
  outputs = [m for m in messages[last_turn(messages) + 1:] if m['role'] == 'tool']
  return (*({**m, 'content': note} for m in outputs), {'role': 'user', 'content': text})


def opening(messages: Messages) -> tuple[Mapping[str, Any], ...]:
  """The messages before the policy's first turn."""
  first = next((i for i, m in enumerate(messages) if m['role'] == 'assistant'), len(messages))
  return tuple(messages[:first])


def with_summary(messages: Messages, summary: str) -> tuple[Mapping[str, Any], ...]:
  """`messages`, which a user ends, with the summary added to that message: some templates refuse two of a user in a row."""
  *before, last = messages
  text = f'{SUMMARY}\n{summary}'
  if last['role'] != 'user':
    return (*messages, {'role': 'user', 'content': text})
  return (*before, {**last, 'content': f'{last["content"]}\n\n{text}'})


class Compaction:
  """Mixin for environments; stands before `Environment` among the bases.

  Attributes:
    compaction: one of `WAYS`, or '' for none.
    keep_outputs: with 'drop', the last outputs that stay.
    summary_tokens: with 'summary', most tokens of the summary; None for `task.max_turn_tokens`.
  """

  compaction: str = 'drop'
  keep_outputs: int = 1
  summary_tokens: int | None = None
  _opening: tuple[Mapping[str, Any], ...] = ()
  _asked = False

  def begin_episode(self) -> None:
    """Forgets what was asked; for `reset`."""
    self._opening, self._asked = (), False

  def compact(self, messages: Messages, room: int) -> base.Observation | None:
    """As in `Environment`."""
    del room
    if self.compaction == 'drop':
      shorter = without_outputs(messages, keep=self.keep_outputs)
      return None if shorter is None else base.Observation(messages=shorter, restart=True)
    if self.compaction == 'summary':
      self._opening = self._opening or opening(messages)  # Of the first time: later ones begin with a summary.
      self._asked = True
      return base.Observation(messages=summary_request(messages), max_tokens=self.summary_tokens)
    return None

  def take_summary(self, text: str) -> base.Observation | None:
    """The conversation to go on with, if this turn is a summary that was asked for; calls in it count for nothing."""
    if not self._asked:
      return None
    self._asked = False
    return base.Observation(messages=with_summary(self._opening, after_thinking(text).strip() or '(none)'), restart=True)


def check_way(name: str, value: Any) -> None:
  """Raises ValueError unless `value` is one of `WAYS`, or ''."""
  if value not in ('', *WAYS):
    raise ValueError(f"{name} must be one of {', '.join(WAYS)}, or '' for none, got {value!r}.")
