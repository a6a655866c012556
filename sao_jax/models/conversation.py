"""From messages to ids, one piece at a time: only new text is ever tokenized.

What the policy sampled stays as it was sampled. A format gives the ids of the prompt, up to the place where the policy speaks, and the ids
that go between two of its turns:

    <|im_start|>user\\nWhat is 1+2?<|im_end|>\\n<|im_start|>assistant\\n   first(...)
    3.<|im_end|>                                                        sampled, the end token too
    \\n<|im_start|>user\\nAnd 2+2?<|im_end|>\\n<|im_start|>assistant\\n     follow(...)

What goes between is the difference of two renderings of the model's chat template: of the history up to the turn, and of the history with
the turn and the new messages. That is right where the first, and after it the turn as it was said, begin the second (blanks apart).
Otherwise the template rewrites history: Qwen3 drops the reasoning of earlier turns when a user speaks again. Then `Continuation.rewritten`
is True and its ids are the whole conversation, rendered afresh: a new segment of the rollout begins.

Text from users and environments never yields control tokens: `<|im_end|>` in an observation is tokenized as the characters it is written
with. Work for a turn: the new text is tokenized once; the template runs over the messages with their contents hidden
(`chat_template.py`), which costs by the number of messages, not their length, and is remembered by the shape of the conversation.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import re
from typing import Any, Mapping, Protocol, Sequence

from sao_jax import tool_calls
from sao_jax.models.chat_template import NAME, ChatTemplate, Hidden, Message, TemplateLimit, hide
from sao_jax.models.tokenizers import Tokenizer

KINDS = ('raw', 'chat')
Tools = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Continuation:
  """What follows a turn of the policy.

  Attributes:
    ids: to append to the sequence; of the whole conversation where it is `rewritten`.
    rewritten: the template shows the history otherwise than it was sampled; `ids` begin a new segment.
    history: the messages so far, for the next call.
  """

  ids: list[int]
  rewritten: bool
  history: list[dict[str, Any]]


class Conversation(Protocol):
  """A conversation format.

  Attributes:
    stop_ids: ids that end a turn of the policy.
    tool_format: how its tool calls are written, one of `tool_calls.FORMATS`.
    lead: what the header of a turn says in the policy's name, e.g. '<think>\\n'; a turn's whole text begins with it.
  """

  stop_ids: tuple[int, ...]
  tool_format: str
  lead: str

  def first(self, messages: str | Sequence[Message], tools: Tools = ()) -> list[int]:
    """Ids of the prompt, ending right where the policy speaks. A plain text is one message of the user."""
    ...

  def follow(
      self, history: Sequence[Message], text: str, messages: str | Sequence[Message], *, stop_id: int | None, tools: Tools = (),
      afresh: bool = False,
  ) -> Continuation:
    """What follows a turn: the rest of it, the new messages, and the header of the next turn.

    Args:
      history: messages before the turn: those of the prompt, or of the last `Continuation`.
      text: what the policy said, without the stop token.
      messages: new ones, at least one; a plain text is one message of the user.
      stop_id: the stop token that ended the turn, None where something else did.
      tools: as for `first`.
      afresh: these are other tools than those that the sequence begins with: a format that shows tools rewrites the history.
    """
    ...

  def turn_ids(self, text: str, next_role: str = 'user') -> list[int]:
    """Ids of a turn as a demonstrator writes it, its stop token included; `next_role` speaks after it."""
    ...


def as_messages(messages: str | Sequence[Message]) -> list[dict[str, Any]]:
  """The messages; a plain text is one of the user."""
  return [{'role': 'user', 'content': messages}] if isinstance(messages, str) else [dict(m) for m in messages]


class RawConversation:
  """Text as it is, with nothing around it; a turn of the policy ends with the tokenizer's stop id or with a stop string."""

  tool_format = 'hermes'
  lead = ''

  def __init__(self, tokenizer: Tokenizer):
    self._tokenizer = tokenizer
    self.stop_ids = tokenizer.stop_ids

  def first(self, messages: str | Sequence[Message], tools: Tools = ()) -> list[int]:
    del tools  # The environment's own text tells of them.
    text = ''.join(m['content'] for m in as_messages(messages))
    if not text:
      raise ValueError('A raw prompt must hold some text, got none.')
    return self._tokenizer.encode_run(text, after='start')

  def follow(
      self, history: Sequence[Message], text: str, messages: str | Sequence[Message], *, stop_id: int | None, tools: Tools = (),
      afresh: bool = False,
  ) -> Continuation:
    del history, text, tools, afresh  # Raw text marks neither turns nor speakers, and shows no tools.
    new = ''.join(m['content'] for m in as_messages(messages))
    return Continuation(self._tokenizer.encode_run(new, after='text' if stop_id is None else 'special'), False, [])

  def turn_ids(self, text: str, next_role: str = 'user') -> list[int]:
    del next_role
    return self._tokenizer.encode_run(text, after='text')


class ChatConversation:
  """The chat template of the tokenizer. Ids of a prompt are those of the template's whole text, tokenized at once."""

  def __init__(self, tokenizer: Tokenizer, settings: Mapping[str, Any] | None = None):
    """Raises ValueError where there is no template, or it cannot render a plain conversation."""
    if not tokenizer.chat_template:
      raise ValueError("The tokenizer has no chat template; use the 'raw' conversation.")
    self._tokenizer = tokenizer
    self._template = ChatTemplate(tokenizer.chat_template, names=tokenizer.names, settings=settings or {})
    if NAME.search(tokenizer.chat_template):
      raise ValueError('The chat template holds text like the names that stand for contents here.')
    names = sorted(tokenizer.specials, key=len, reverse=True)
    self._control = re.compile('|'.join([*map(re.escape, names), NAME.pattern]))  # A text that looks like one of our names is text, too.
    self.tool_format = 'glm' if '<arg_key>' in tokenizer.chat_template else 'hermes'
    self.lead = self._lead()
    self._after_header = 'special' if isinstance(tokenizer.split(self._probe(['user'], generation=True))[-1], int) else 'text'
    self._renders_tools = self._knows_tools()
    self.stop_ids = tokenizer.stop_ids
    closing = self._closing('user')
    if closing is not None:
      self.stop_ids = tuple(dict.fromkeys((closing, *tokenizer.stop_ids)))

  # --- What the template is like -----------------------------------------------------------------------------------------------

  def _probe(self, roles: Sequence[str], *, generation: bool) -> str:
    return self._template.render(hide([{'role': r, 'content': 'x'} for r in roles]).messages, generation=generation)

  def _lead(self) -> str:
    """The part of a turn that its header says already: from `<think>` on, if it is there."""
    opening, whole = self._probe(['user'], generation=False), self._probe(['user'], generation=True)
    if len(NAME.findall(whole)) != 1:
      raise ValueError('The chat template does not show a message of the user once, as it must.')
    header = whole[len(opening):] if whole.startswith(opening) else NAME.split(whole)[-1]
    return header[header.index(tool_calls.THINK):] if tool_calls.THINK in header else ''

  def _knows_tools(self) -> bool:
    """Whether the template tells of tools itself."""
    probe = {'type': 'function', 'function': {'name': 'q7zprobe', 'description': '', 'parameters': {'type': 'object', 'properties': {}}}}
    messages = hide([{'role': 'user', 'content': 'x'}]).messages
    try:
      return 'q7zprobe' in self._template.render(messages, tools=[probe], generation=True)
    except TemplateLimit:
      raise
    except ValueError:
      return False

  @functools.lru_cache(maxsize=None)
  def _closing(self, next_role: str) -> int | None:
    """The control token that ends a turn before a message of `next_role`; None where other text does."""
    try:
      text = self._probe(['user', 'assistant', next_role], generation=True)
    except ValueError as error:
      if next_role == 'user' or isinstance(error, TemplateLimit):
        raise
      return self._closing('user')
    names = NAME.findall(text)
    if len(names) < 3:
      return None if next_role == 'user' else self._closing('user')
    first = self._tokenizer.split(text[text.index(names[1]) + len(names[1]):].lstrip())[0]
    return first if isinstance(first, int) else None

  # --- Conversations -----------------------------------------------------------------------------------------------------------

  def first(self, messages: str | Sequence[Message], tools: Tools = ()) -> list[int]:
    messages = as_messages(messages)
    if not messages:
      raise ValueError('A chat needs at least one message, got none.')
    hidden = self._hidden(messages, tools)
    text = self._template.render(hidden.messages, tools=hidden.tools, generation=True)
    self._require(hidden, range(len(hidden.messages)), text)
    return self._ids(text, hidden, 'start')

  def follow(
      self, history: Sequence[Message], text: str, messages: str | Sequence[Message], *, stop_id: int | None, tools: Tools = (),
      afresh: bool = False,
  ) -> Continuation:
    new = as_messages(messages)
    if not new:
      raise ValueError('At least one message must follow a turn, got none.')
    turn = {'role': 'assistant', 'content': self.lead + text}
    whole = [*map(dict, history), turn, *new]
    hidden = self._hidden(whole, tools)
    at = len(hidden.messages) - len(new) - 1  # Of the turn.
    if afresh:
      after = self._template.render(hidden.messages, tools=hidden.tools, generation=True)
      self._require(hidden, range(at + 1, len(hidden.messages)), after)
      return Continuation(self._ids(after, hidden, 'start'), True, whole)
    before = self._template.render(hidden.messages[:at], tools=hidden.tools, generation=True)
    after = self._template.render(hidden.messages, tools=hidden.tools, generation=True)
    self._require(hidden, range(at + 1, len(hidden.messages)), after)
    end = _end_of_turn(before, after, hidden.messages[at]['content'], self.lead)
    tail = None if end is None else self._tail(after, end, text, stop_id)
    if tail is None:
      return Continuation(self._ids(after, hidden, 'start'), True, whole)
    return Continuation(self._ids(tail, hidden, 'text' if stop_id is None else 'special'), False, whole)

  def _tail(self, after: str, end: int, text: str, stop_id: int | None) -> str | None:
    """What the template writes after a turn, without the stop token that was sampled; None where that token cannot stand there."""
    tail = after[end:]
    bare = tail.lstrip()
    if stop_id is None:
      blanks = tail[:len(tail) - len(bare)]
      return bare if blanks and text.endswith(blanks) else tail
    stop = self._tokenizer.decode([stop_id])
    if not stop:  # An id beyond the tokenizer's vocabulary: it stands for nothing that the template could write.
      return tail
    if bare.startswith(stop):
      return bare[len(stop):]
    # Another stop token than the template's. One that opens a message (GLM: <|user|>) would begin one here; others only stand there.
    return None if stop in NAME.sub('', after) else tail

  def turn_ids(self, text: str, next_role: str = 'user') -> list[int]:
    closing = self._closing(next_role)
    hidden = Hidden()
    name = hidden.name(text, message=0, markup=True)
    return self._ids(name, hidden, self._after_header) + [self.stop_ids[0] if closing is None or closing not in self.stop_ids else closing]

  # --- Parts -------------------------------------------------------------------------------------------------------------------

  def _hidden(self, messages: list[dict[str, Any]], tools: Tools) -> Hidden:
    """Hidden messages and tools for the template; a template that knows none gets them in the system message."""
    tool_calls.check_tools(tools)
    if tools and not self._renders_tools:
      messages, tools = _with_tools(messages, tools), ()
    return hide(messages, tools, self._control)

  def _require(self, hidden: Hidden, messages: Sequence[int], text: str) -> None:
    """Raises ValueError where the template leaves out what a user, system or tool said."""
    shown = collections.Counter(NAME.findall(text))
    for message in messages:
      role, content = hidden.messages[message]['role'], hidden.messages[message]['content']
      if role != 'assistant' and any(shown[name] != 1 for name in NAME.findall(content)):
        raise ValueError(f'The chat template does not show a message of the role {role!r} once, as it must; use a role that it knows.')

  def _ids(self, text: str, hidden: Hidden, after: str) -> list[int]:
    """Ids of a rendered text: control tokens from the template alone, and from the markup in the policy's own turns."""
    ids: list[int] = []
    run = ''
    for i, piece in enumerate(NAME.split(text)):
      if i % 2 == 0:
        parts = self._tokenizer.split(piece)
      else:
        content, markup = hidden.contents[hidden.number(piece)], hidden.markup[hidden.number(piece)]
        parts = self._tokenizer.split(content, markup_only=True) if markup else [content]
      for part in parts:
        if isinstance(part, str):
          run += part
          continue
        ids += self._tokenizer.encode_run(run, after=after) if run else []
        ids.append(part)
        run, after = '', 'special'
    return ids + (self._tokenizer.encode_run(run, after=after) if run else [])


def _end_of_turn(before: str, after: str, turn: str, lead: str) -> int | None:
  """Where the turn ends in `after`, if that is `before` and then the turn as it was said, blanks apart; else None."""
  if not after.startswith(before):
    return None
  said = ''.join(turn.split()).removeprefix(''.join(lead.split()))
  place = len(before)
  for character in said:
    while place < len(after) and after[place].isspace():
      place += 1
    if place == len(after) or after[place] != character:
      return None
    place += 1
  return place


def _with_tools(messages: list[dict[str, Any]], tools: Tools) -> list[dict[str, Any]]:
  """The messages with tools told of in the system message, in the words that Hermes models know."""
  definitions = '\n'.join(json.dumps(dict(tool), ensure_ascii=False) for tool in tools)
  text = (
      '# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function signatures within '
      f'<tools></tools> XML tags:\n<tools>\n{definitions}\n</tools>\n\nFor each function call, return a json object with function name and '
      'arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
      '</tool_call>')
  if messages[0]['role'] == 'system':
    text = messages[0]['content'] + '\n\n' + text
    messages = messages[1:]
  return [{'role': 'system', 'content': text}, *messages]


def make(tokenizer: Tokenizer, kind: str, settings: Mapping[str, Any] | None = None) -> Conversation:
  """The format `kind`: 'raw', or 'chat' for the template of the tokenizer, with `settings` as its further variables.

  Raises:
    ValueError: unknown kind, settings for a raw conversation, or a template that cannot be used.
  """
  if kind not in KINDS:
    raise ValueError(f'Conversation must be one of {", ".join(KINDS)}, got {kind!r}.')
  if kind == 'chat':
    return ChatConversation(tokenizer, settings)
  if settings:
    raise ValueError(f"Settings of a chat template ({', '.join(settings)}) mean nothing in a 'raw' conversation; leave them out.")
  return RawConversation(tokenizer)
