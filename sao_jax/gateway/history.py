"""Whether a request goes on with the conversation that is known, message by message. No tokens here.

A client sends the whole conversation each time, and rarely as it got it: blanks are stripped, reasoning is left out, tool calls get other
ids and other JSON. Two messages are the same here when role, text (runs of blanks counted as one) and calls (names and the values of their
arguments) are. A turn of the policy may come back in any of the forms of `forms_of`. What is the same is never sent to the policy again, so
the tokens that it sampled stay; anything else begins the conversation anew.
"""

from __future__ import annotations

import json
import re
from typing import Any, Mapping, Sequence

from sao_jax import tool_calls
from sao_jax.gateway.chat import Answer

_TAG = re.compile(f'({tool_calls.THINK}|{tool_calls.THINK_END})')
Key = tuple[str, str, tuple[tuple[str, str], ...]]  # Role, text, calls.


def key_of(message: Mapping[str, Any]) -> Key:
  """What tells a message from others: equal for messages that say the same."""
  content = message['content'] if message['role'] != 'assistant' else _TAG.sub(r' \1 ', message['content'])
  return message['role'], _blanks(content), tuple((name, _value(text)) for name, text in message.get('tool_calls', ()))


def forms_of(answer: Answer) -> frozenset[Key]:
  """The keys under which a turn of the policy may come back: as its client got it, with its reasoning, or as it was sampled."""
  calls = tuple((name, _value(arguments)) for _, name, arguments in answer.calls)
  contents = {answer.content, f'{tool_calls.THINK}{answer.reasoning}{tool_calls.THINK_END}{answer.content}', answer.text}
  keys = [key_of({'role': 'assistant', 'content': content}) for content in (answer.text, *contents)]
  return frozenset({keys[0], *((role, content, calls) for role, content, _ in keys)})


def _blanks(text: str) -> str:
  return ' '.join(text.split())


def _value(arguments: str) -> str:
  """Arguments that are the same JSON have the same text."""
  try:
    return json.dumps(json.loads(arguments), sort_keys=True)
  except (ValueError, RecursionError):
    return _blanks(arguments)


class History:
  """The conversation that the policy's tokens stand for. `known` holds the keys of each message."""

  def __init__(self, tool_format: str):
    self._tool_format = tool_format
    self._known: list[frozenset[Key]] = []
    self._texts: dict[Key, str] = {}  # Of the policy's own turns, as sampled, by every form.

  def take(self, messages: Sequence[Mapping[str, Any]], keys: Sequence[Key] | None = None) -> tuple[list[dict[str, str]], bool]:
    """The messages that the policy is to be shown, and whether they are the whole conversation, shown anew.

    Where nothing is known yet they are not: the first conversation just begins. `keys` are those of the messages, if they are known.
    """
    keys = [key_of(m) for m in messages] if keys is None else keys
    n = len(self._known)
    if self._goes_on(keys):
      self._known += [frozenset({key}) for key in keys[n:]]
      return [self._shown(m, k) for m, k in zip(messages[n:], keys[n:])], False
    same = [known | {key} if key in known else frozenset({key}) for key, known in zip(keys, self._known)]
    self._known = same + [frozenset({key}) for key in keys[len(same):]]
    return [self._shown(m, k) for m, k in zip(messages, keys)], n > 0

  def continues(self, keys: Sequence[Key]) -> int:
    """How many messages are known, where messages with these keys go on with all of them; else 0."""
    return len(self._known) if self._goes_on(keys) else 0

  def whole(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """The messages as the policy is to be shown them, from the first on."""
    return [self._shown(m, key_of(m)) for m in messages]

  def _goes_on(self, keys: Sequence[Key]) -> bool:
    known = self._known
    return 0 < len(known) < len(keys) and all(key in same for key, same in zip(keys, known))

  def answered(self, answer: Answer) -> None:
    """Adds the turn that the policy sampled."""
    forms = forms_of(answer)
    self._known.append(forms)
    self._texts.update(dict.fromkeys(forms, answer.text))

  def _shown(self, message: Mapping[str, Any], key: Key) -> dict[str, str]:
    """A message for the policy: its own turns as it sampled them, calls of others in the form of its own."""
    if message['role'] == 'assistant' and key in self._texts:
      return {'role': 'assistant', 'content': self._texts[key]}
    calls = []
    for name, arguments in message.get('tool_calls', ()):
      try:
        value = json.loads(arguments or '{}')
      except (ValueError, RecursionError):
        value = None
      calls.append((name, value if isinstance(value, dict) else {'arguments': arguments}))
    content = tool_calls.write(tool_calls.Turn(message['content'], tuple(calls)), self._tool_format) if calls else message['content']
    return {'role': message['role'], 'content': content}
