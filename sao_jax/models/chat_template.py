"""Chat templates: a model's Jinja text run on messages whose contents are hidden behind names.

Contents never reach the template. It sees a short name in the place of each (`Q7Zx000003xZ7Q`; blanks around the content stay), so what it
writes can be told from what was said: template text may hold control tokens, contents never do. The cost of a rendering then depends on
the number of messages alone (all that is done with their texts is a search for reasoning tags), conversations of one shape share it, and
the reasoning of a turn can be followed through the template: does it keep it, or drop it?

Templates run in a process of their own (`template_service.py`), where one that hangs or grows is ended.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from typing import Any, Mapping, Sequence

from sao_jax.services import pool
from sao_jax.models import files
from sao_jax.tool_calls import THINK, THINK_END

Message = Mapping[str, Any]  # {'role': 'system' | 'user' | 'assistant' | 'tool', 'content': text, ...}

NAME = re.compile(r'(Q7Zx\d{6}xZ7Q)')
_TAG = re.compile(f'({THINK}|{THINK_END})')
_CACHED = 512  # Renderings kept of one template.
TIME_LIMIT_S = 20.0  # Of one rendering, which takes milliseconds.
MEMORY_MB = 1024


class TemplateLimit(ValueError):
  """A template needs more time or memory than one may have."""


@dataclasses.dataclass
class Hidden:
  """Messages with names in the place of contents."""

  messages: list[dict[str, Any]] = dataclasses.field(default_factory=list)
  contents: list[str] = dataclasses.field(default_factory=list)  # Behind the names, by number.
  markup: list[bool] = dataclasses.field(default_factory=list)  # Whether markup in that content is the policy's own.
  message_of: list[int] = dataclasses.field(default_factory=list)  # Number of its message, -1 for the tools.
  tools: list[Any] = dataclasses.field(default_factory=list)

  def name(self, content: str, *, message: int, markup: bool = False) -> str:
    """A new name for a content of a message."""
    self.contents.append(content)
    self.markup.append(markup)
    self.message_of.append(message)
    return f'Q7Zx{len(self.contents) - 1:06d}xZ7Q'

  def number(self, name: str) -> int:
    return int(name[4:10])


def hide(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), control: re.Pattern[str] | None = None) -> Hidden:
  """Hides the contents of `messages`.

  The content of an assistant is cut at `<think>` and `</think>`, which stay, so that templates that look for them find them. In other
  fields (tool calls, names) and in tools only control tokens, found by `control`, are hidden. Numbers are given in order, tools first: a
  longer conversation with the same beginning has the same names there.

  Raises:
    ValueError: a message without role or whose content is no text.
  """
  hidden = Hidden()
  hidden.tools = [_hide_control(hidden, tool, control, -1) for tool in tools]
  for number, message in enumerate(messages):
    role, content = message.get('role'), message.get('content')
    if not isinstance(role, str) or not isinstance(content, str):
      raise ValueError(f'A message must have a role and a content, both texts (not a list of parts), got {dict(message)!r}.')
    if role == 'assistant' and not (message.get('tool_calls') and not content.strip()):
      said = _hide_turn(hidden, content, number)
    else:
      said = _hide_core(hidden, content, number)
    others = {k: _hide_control(hidden, v, control, number) for k, v in message.items() if k not in ('role', 'content')}
    hidden.messages.append({'role': role, 'content': said, **others})
  return hidden


def _hide_core(hidden: Hidden, content: str, message: int, markup: bool = False) -> str:
  core = content.strip()
  if not core:
    return content
  before, after = len(content) - len(content.lstrip()), len(content.rstrip())
  return content[:before] + hidden.name(core, message=message, markup=markup) + content[after:]


def _hide_turn(hidden: Hidden, content: str, message: int) -> str:
  parts = _TAG.split(content) if 'think>' in content else [content]
  if all(not part or part.isspace() for part in parts[::2]):  # Nothing was said: the end, where it would stand, needs a name all the same.
    return ''.join(parts[:-1]) + hidden.name(parts[-1], message=message, markup=True)
  return ''.join(part if i % 2 else _hide_core(hidden, part, message, markup=True) for i, part in enumerate(parts))


def _hide_control(hidden: Hidden, value: Any, control: re.Pattern[str] | None, message: int) -> Any:
  """`value`, JSON-like, with every control token in its texts hidden."""
  if isinstance(value, str):
    return control.sub(lambda found: hidden.name(found[0], message=message), value) if control else value
  if isinstance(value, Mapping):
    return {_hide_control(hidden, str(k), control, message): _hide_control(hidden, v, control, message) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return [_hide_control(hidden, v, control, message) for v in value]
  if value is None or isinstance(value, (bool, int, float)):
    return value
  raise ValueError(f'What a template is given must be JSON-like, got {type(value).__name__}.')


class ChatTemplate:
  """A compiled chat template with its settings; `render` may be called from several threads."""

  def __init__(self, source: str, *, names: Mapping[str, str], settings: Mapping[str, Any]):
    """
    Args:
      source: Jinja text.
      names: special tokens by name, e.g. {'bos_token': '<s>'}.
      settings: further variables of the template, e.g. {'enable_thinking': False}.

    Raises:
      ValueError: the text is no Jinja template, or `settings` name a variable that is given otherwise, or are not JSON-like.
    """
    taken = sorted({'messages', 'tools', 'add_generation_prompt', *names} & set(settings))
    if taken:
      raise ValueError(f'The template setting {taken[0]!r} is given by the conversation itself; leave it out.')
    self.source = source
    files.need('jinja2')
    defaults = {'bos_token': '', 'eos_token': '', 'pad_token': '', 'unk_token': ''}
    self._variables = {**defaults, **names, **settings}
    try:
      json.dumps(self._variables)
    except (TypeError, ValueError) as error:
      raise ValueError(f'The settings of a chat template must be JSON-like, got {dict(settings)!r:.200} ({error}).') from error
    _ask({'source': source})
    self._render = functools.lru_cache(maxsize=_CACHED)(self._run)

  def render(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = (), generation: bool) -> str:
    """Text of hidden messages, followed by the header of the assistant's turn with `generation`.

    Raises:
      ValueError: the template refuses the conversation; the message is the template's own.
      TemplateLimit: it does not end within its limits.
      RuntimeError: there is no process to run it in.
    """
    return self._render(json.dumps(list(messages)), json.dumps(list(tools)), generation)

  def _run(self, messages: str, tools: str, generation: bool) -> str:
    return _ask({'source': self.source, 'variables': self._variables, 'messages': messages, 'tools': tools, 'generation': generation})


@functools.lru_cache(maxsize=1)
def _processes() -> pool.Pool:
  """The one process of this one's templates."""
  return pool.Pool(
      size=1, time_limit_s=TIME_LIMIT_S, memory_mb=MEMORY_MB, wait_limit_s=10 * TIME_LIMIT_S, service='sao_jax.models.template_service',
      max_reply=1 << 25)


def _ask(request: dict[str, Any]) -> str:
  """What the service makes of a request."""
  verdict, reason = _processes().ask(request)
  if verdict == 'refused':
    raise ValueError(f'The chat template cannot be rendered: {reason}')
  if verdict == 'failed':
    raise ValueError(f'The chat template fails on this conversation: {reason}')
  if verdict in ('too_much', pool.TIMEOUT):
    raise TemplateLimit(f'The chat template was stopped: {reason}. Look for a loop or a repetition in it that does not end.')
  if verdict != 'rendered':
    raise RuntimeError(f'The chat template could not be rendered: {reason}.')
  return reason
