"""From messages to ids, one piece at a time: only new text is ever tokenized.

What the policy sampled stays as it was sampled. A format gives the ids of the prompt, up to the place where the policy speaks, and the ids
that go between two of its turns:

    <|im_start|>user\\nWhat is 1+2?<|im_end|>\\n<|im_start|>assistant\\n   first(...)
    3.<|im_end|>                                                        sampled, the end token too
    \\n<|im_start|>user\\nAnd 2+2?<|im_end|>\\n<|im_start|>assistant\\n     then_observation(...)

Text from users and environments never yields special ids: `<|im_end|>` in an observation is tokenized as the characters it is written with.
"""

from __future__ import annotations

from typing import Any, Mapping, Protocol, Sequence

from sao_jax.models import files
from sao_jax.models.tokenizers import Tokenizer

Message = Mapping[str, str]  # {'role': 'system' | 'user' | 'assistant', 'content': text}
KINDS = ('raw', 'chat')


class Conversation(Protocol):
  """A conversation format.

  Attributes:
    stop_ids: ids that end a turn of the policy.
  """

  stop_ids: tuple[int, ...]

  def first(self, messages: str | Sequence[Message]) -> list[int]:
    """Ids of the prompt, ending right where the policy speaks. A plain text is one message of the user."""
    ...

  def then_observation(self, text: str, *, ended_with_stop_token: bool, role: str = 'user') -> list[int]:
    """Ids that follow a turn of the policy: the rest of its turn, the message, and the header of its next turn."""
    ...


class RawConversation:
  """Text as it is, with nothing around it; a turn of the policy ends with the tokenizer's stop id."""

  def __init__(self, tokenizer: Tokenizer):
    self._tokenizer = tokenizer
    self.stop_ids = tokenizer.stop_ids

  def first(self, messages: str | Sequence[Message]) -> list[int]:
    text = messages if isinstance(messages, str) else ''.join(m['content'] for m in messages)
    if not text:
      raise ValueError('A raw prompt must hold some text, got none.')
    return self._tokenizer.encode(text, parse_special=False)

  def then_observation(self, text: str, *, ended_with_stop_token: bool, role: str = 'user') -> list[int]:
    del ended_with_stop_token, role  # Raw text marks neither turns nor speakers.
    return self._tokenizer.encode(text, parse_special=False)


class ChatMLConversation:
  """`<|im_start|>role\\ncontent<|im_end|>\\n` for every message, as the template of the model says.

  The template is not run on conversations. It is run on two probes, when the format is made, to learn the system message that it adds
  where there is none, and to make sure that it is ChatML. Ids equal those of the template's whole text, tokenized at once.
  """

  def __init__(self, tokenizer: Tokenizer):
    self._tokenizer = tokenizer
    self._default_system = _default_system(tokenizer.chat_template)
    self._start, self._end = tokenizer.special_id('<|im_start|>'), tokenizer.special_id('<|im_end|>')
    self._newline = tokenizer.encode('\n', parse_special=False)
    self.stop_ids = (self._end,)

  def _message(self, role: str, content: str) -> list[int]:
    # Role and content are one text: a content that starts with a newline may share a token with the header's.
    return [self._start, *self._tokenizer.encode(f'{role}\n{content}', parse_special=False), self._end, *self._newline]

  def _header(self) -> list[int]:
    return [self._start, *self._tokenizer.encode('assistant\n', parse_special=False)]

  def first(self, messages: str | Sequence[Message]) -> list[int]:
    messages = [{'role': 'user', 'content': messages}] if isinstance(messages, str) else list(messages)
    if not messages:
      raise ValueError('A chat needs at least one message, got none.')
    if messages[0]['role'] != 'system' and self._default_system is not None:
      messages = [{'role': 'system', 'content': self._default_system}, *messages]
    return [i for m in messages for i in self._message(m['role'], m['content'])] + self._header()

  def then_observation(self, text: str, *, ended_with_stop_token: bool, role: str = 'user') -> list[int]:
    close = self._newline if ended_with_stop_token else [self._end, *self._newline]
    return [*close, *self._message(role, text), *self._header()]


def _chatml(messages: Sequence[Message]) -> str:
  return ''.join(f'<|im_start|>{m["role"]}\n{m["content"]}<|im_end|>\n' for m in messages) + '<|im_start|>assistant\n'


def _default_system(template: str) -> str | None:
  """System message that the template adds where there is none; None if it adds nothing. Raises ValueError if it is not ChatML."""
  if not template:
    raise ValueError("The tokenizer has no chat template; use the 'raw' conversation.")
  jinja2 = files.need('jinja2')
  sandbox = files.need('jinja2.sandbox')
  environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)

  def render(messages: list[dict[str, str]]) -> str:
    try:
      return environment.from_string(template).render(messages=messages, add_generation_prompt=True, bos_token='', eos_token='')
    except jinja2.TemplateError as error:
      raise ValueError(f'The chat template cannot be rendered: {error}') from error

  turns = [{'role': 'user', 'content': 'A'}, {'role': 'assistant', 'content': 'B'}, {'role': 'user', 'content': 'C'}]
  whole = [{'role': 'system', 'content': 'S'}, *turns]
  bare, suffix = render(turns), _chatml(turns)
  opening, closing = '<|im_start|>system\n', '<|im_end|>\n'
  added = bare.removesuffix(suffix)
  is_system = added.startswith(opening) and added.endswith(closing)
  if render(whole) != _chatml(whole) or not bare.endswith(suffix) or (added and not is_system):
    raise ValueError(f'The chat template is not ChatML, the only chat format known here; it renders {render(whole)!r}.')
  return added[len(opening):-len(closing)] if added else None


def make(tokenizer: Tokenizer, kind: str) -> Conversation:
  """The format `kind`: 'raw', or 'chat' for the template of the tokenizer. Raises ValueError for others."""
  formats: dict[str, Any] = {'raw': RawConversation, 'chat': ChatMLConversation}
  if kind not in formats:
    raise ValueError(f'Conversation must be one of {", ".join(KINDS)}, got {kind!r}.')
  return formats[kind](tokenizer)
