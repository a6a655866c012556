"""Tool calls in the text of a turn, read strictly and piece by piece. Standard library only.

    hermes (Qwen, Hermes)   <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>
    glm (GLM-4.5 on)        <tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</arg_key>...</tool_call>

Several calls may stand in a turn, with text around them. What is not a call as it must be is a `ToolCallError` with the reason, in its
place among the calls: the policy is told, nothing crashes, and a call is never guessed. `ToolCallParser` may be fed pieces cut anywhere; it
gives what `parse` gives for the whole text, in time linear in its length.

A call ends at the first `</tool_call>` outside a JSON string (hermes; a raw line break ends a string, as JSON has it) or outside an
`<arg_value>` (glm), so that arguments may hold that text.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from typing import Any, Mapping, Sequence

OPEN, CLOSE = '<tool_call>', '</tool_call>'
FORMATS = ('hermes', 'glm')
MAX_CALL = 200_000  # Characters of one call.
MAX_DEPTH = 32  # Of nested objects and lists.
_NAME = re.compile(r'[A-Za-z0-9_.\-]+')
_TAGS = re.compile(f'{OPEN}|{CLOSE}')
THINK, THINK_END = '<think>', '</think>'

_JSON_TYPES = {
    'string': lambda v: isinstance(v, str), 'boolean': lambda v: isinstance(v, bool), 'null': lambda v: v is None,
    'integer': lambda v: isinstance(v, int) and not isinstance(v, bool),
    'number': lambda v: isinstance(v, (int, float)) and not isinstance(v, bool),
    'object': lambda v: isinstance(v, dict), 'array': lambda v: isinstance(v, list),
}
_ARGUMENT = re.compile(r'\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>', re.DOTALL)


@dataclasses.dataclass(frozen=True)
class ToolCall:
  """A call as the policy wrote it: `arguments` fit the tool's schema; `raw` is its text, tags included."""

  name: str
  arguments: dict[str, Any]
  raw: str


@dataclasses.dataclass(frozen=True)
class ToolCallError:
  """Text that was meant as a call and is none; `reason` is written for the policy to read."""

  reason: str
  raw: str


@dataclasses.dataclass(frozen=True)
class Turn:
  """A turn as a demonstrator gives it: what it says, and then calls, (name, arguments) each."""

  text: str = ''
  calls: tuple[tuple[str, Mapping[str, Any]], ...] = ()


@dataclasses.dataclass(frozen=True)
class Parsed:
  """What `parse` found: the text outside of calls, and the calls in order."""

  text: str
  calls: tuple[ToolCall | ToolCallError, ...]


def parse(text: str, form: str, tools: Sequence[Mapping[str, Any]] | None = None) -> Parsed:
  """Calls in a whole turn. Arguments as for `ToolCallParser`."""
  parser = ToolCallParser(form, tools)
  calls = (*parser.feed(text), *parser.close())
  return Parsed(parser.text, calls)


def write(turn: Turn, form: str) -> str:
  """Text of a turn in one of `FORMATS`; `parse` reads it back."""
  calls = []
  for name, arguments in turn.calls:
    if form == 'hermes':
      body = '\n' + json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False) + '\n'
    else:
      values = {k: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for k, v in arguments.items()}
      body = name + '\n' + ''.join(f'<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n' for k, v in values.items())
    calls.append(f'{OPEN}{body}{CLOSE}')
  return '\n'.join([turn.text] * bool(turn.text) + calls)


def after_thinking(text: str) -> str:
  """What a turn says beyond its reasoning: all after the last `</think>`; what stands before an unfinished `<think>`."""
  if THINK_END in text:
    text = text[text.rindex(THINK_END) + len(THINK_END):]
  return text[:text.index(THINK)] if THINK in text else text


def function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
  """The function in a tool definition: {'type': 'function', 'function': {...}}, or the inner part alone."""
  return tool.get('function', tool)


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
  """Raises ValueError unless `tools` are JSON-schema functions with different names."""
  names = []
  for tool in tools:
    function = function_of(tool) if isinstance(tool, Mapping) else None
    name = function.get('name') if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not _NAME.fullmatch(name):
      raise ValueError(f'A tool must be a function with a name of letters, digits, "_", "-" or ".", got {tool!r}.')
    parameters = function.get('parameters', {})
    if not isinstance(parameters, Mapping) or parameters.get('type', 'object') != 'object':
      raise ValueError(f'The parameters of the tool {name!r} must be a JSON schema of type object, got {parameters!r}.')
    names.append(name)
  if len(set(names)) < len(names):
    raise ValueError(f'Tools must have different names, got {", ".join(names)}.')


class ToolCallParser:
  """Reads the pieces of one turn. `text` is what stood outside of calls so far."""

  def __init__(self, form: str, tools: Sequence[Mapping[str, Any]] | None = None):
    """
    Args:
      form: one of `FORMATS`.
      tools: calls must be of these and fit their schemas; None: any name, any arguments.

    Raises:
      ValueError: unknown format, or tools that are no JSON-schema functions.
    """
    if form not in FORMATS:
      raise ValueError(f'The format of tool calls must be one of {", ".join(FORMATS)}, got {form!r}.')
    check_tools(tools or ())
    self._read = _read_hermes if form == 'hermes' else _read_glm
    self._stops = re.compile(r'["\\\n<]') if form == 'hermes' else re.compile('<')
    self._form = form
    self._tools = None if tools is None else {function_of(t)['name']: function_of(t).get('parameters', {}) for t in tools}
    self._texts: list[str] = []
    self._buffer, self._at = '', 0  # What is not settled yet, from `_at` on: it may begin a tag.
    self._raw: list[str] = []  # Of the open call, at most MAX_CALL characters; none outside of one.
    self._length = 0  # Of the open call as far as it is settled.
    self._inside = self._quoted = False  # In a call; in a JSON string or an argument of it.

  @property
  def text(self) -> str:
    return ''.join(self._texts)

  def feed(self, piece: str) -> list[ToolCall | ToolCallError]:
    """Calls that are complete now."""
    self._buffer, self._at = self._buffer[self._at:] + piece, 0
    found: list[ToolCall | ToolCallError] = []
    while self._scan_call(found) if self._inside else self._scan_text(found):
      pass
    return found

  def close(self) -> list[ToolCall | ToolCallError]:
    """Ends the turn: a call that is still open is an error."""
    inside, rest = self._inside, self._buffer[self._at:]
    self._buffer, self._at, self._inside = '', 0, False
    if inside:
      self._settle(rest)
      return [ToolCallError(f'unterminated: there is no {CLOSE} for {OPEN}', ''.join(self._raw))]
    self._texts.append(rest)
    return []

  def _scan_text(self, found: list[ToolCall | ToolCallError]) -> bool:
    """Takes text up to the next tag; False when more is needed."""
    tag = _TAGS.search(self._buffer, self._at)
    if tag is None:
      end = len(self._buffer) - _held_back(self._buffer[-len(CLOSE):] if self._at < len(self._buffer) else '', (OPEN, CLOSE))
      self._texts.append(self._buffer[self._at:end])
      self._at = max(end, self._at)
      return False
    self._texts.append(self._buffer[self._at:tag.start()])
    if tag[0] == OPEN:
      self._at, self._inside, self._quoted, self._raw, self._length = tag.start(), True, False, [], 0
      self._take(len(OPEN))
    else:
      self._at = tag.end()
      found.append(ToolCallError(f'{CLOSE} without {OPEN} before it', CLOSE))
    return True

  def _scan_call(self, found: list[ToolCall | ToolCallError]) -> bool:
    """Looks for the end of the open call; False when more is needed."""
    buffer, place = self._buffer, self._at
    while (stop := self._stops.search(buffer, place)) is not None:
      i = stop.start()
      if buffer[i] == '<':
        tags = self._tags()
        tag = next((t for t in tags if buffer.startswith(t, i)), '')
        if not tag and len(buffer) - i < 16 and _held_back(buffer[i:], tags) == len(buffer) - i:
          self._take(i - self._at)
          return False
        if tag in (OPEN, CLOSE):
          self._take(i - self._at + (len(CLOSE) if tag == CLOSE else 0))
          self._inside = False
          found.append(self._call() if tag == CLOSE else ToolCallError(f'nested: {OPEN} inside of a call', ''.join(self._raw)))
          return True
        self._quoted = tag == '<arg_value>' or (self._quoted and not tag)
        place = i + max(len(tag), 1)
      elif buffer[i] == '\\':
        if i + 1 == len(buffer):
          self._take(i - self._at)
          return False
        place = i + (2 if self._quoted and buffer[i + 1] != '\n' else 1)
      else:
        self._quoted = buffer[i] == '"' and not self._quoted
        place = i + 1
    self._take(len(buffer) - self._at)
    return False

  def _take(self, count: int) -> None:
    """Settles the next `count` characters of the buffer as a part of the open call."""
    self._settle(self._buffer[self._at:self._at + count])
    self._at += count

  def _settle(self, text: str) -> None:
    self._raw.append(text[:max(0, MAX_CALL - self._length)])
    self._length += len(text)

  def _tags(self) -> tuple[str, ...]:
    """The tags that mean something at this place of a call."""
    if self._form == 'glm':
      return ('</arg_value>',) if self._quoted else (OPEN, CLOSE, '<arg_value>')
    return () if self._quoted else (OPEN, CLOSE)

  def _call(self) -> ToolCall | ToolCallError:
    raw = ''.join(self._raw)
    if self._length > MAX_CALL:
      return ToolCallError(f'too long: {self._length} characters, at most {MAX_CALL} are read', raw)
    try:
      name, arguments = self._read(raw[len(OPEN):-len(CLOSE)], self._tools)
      schema = _schema(name, self._tools)
      _check(arguments, schema, 'arguments')
      json.dumps(arguments, ensure_ascii=False).encode('utf-8')  # Half of a surrogate pair is no text.
    except RecursionError:
      return ToolCallError('nested too deeply', raw)
    except UnicodeEncodeError:
      return ToolCallError('a text holds half of a surrogate pair', raw)
    except ValueError as error:
      return ToolCallError(str(error), raw)
    return ToolCall(name, arguments, raw)


def _held_back(text: str, tags: Sequence[str]) -> int:
  """Length of the longest end of `text` that begins one of `tags` without being it."""
  longest = max((len(t) for t in tags), default=0)
  return next((n for n in range(min(longest - 1, len(text)), 0, -1) if any(t.startswith(text[-n:]) and n < len(t) for t in tags)), 0)


# --- The two forms; ValueError with the reason where a call is none --------------------------------------------------------------


def _read_hermes(body: str, tools: Mapping[str, Any] | None) -> tuple[str, dict[str, Any]]:
  del tools  # Checked afterwards.
  value = _load(body)
  if not isinstance(value, dict):
    raise ValueError('a call must be a JSON object with "name" and "arguments"')
  for key in ('name', 'arguments'):
    if key not in value:
      raise ValueError(f'the call has no "{key}"')
  extra = sorted(set(value) - {'name', 'arguments'})
  if extra:
    raise ValueError(f'the call has the unexpected key "{extra[0]}"')
  if not isinstance(value['name'], str) or not isinstance(value['arguments'], dict):
    raise ValueError('"name" must be a text and "arguments" an object')
  return value['name'], value['arguments']


def _read_glm(body: str, tools: Mapping[str, Any] | None) -> tuple[str, dict[str, Any]]:
  start = body.find('<arg_key>')
  name = (body if start < 0 else body[:start]).strip()
  if not _NAME.fullmatch(name):
    raise ValueError(f'a call begins with the name of the tool, then <arg_key>; it begins with {name[:80]!r}')
  properties = _schema(name, tools).get('properties', {})
  arguments: dict[str, Any] = {}
  place = len(body) if start < 0 else start
  while body[place:].strip():
    found = _ARGUMENT.match(body, place)
    if found is None:
      raise ValueError('arguments must be written <arg_key>name</arg_key><arg_value>value</arg_value>')
    key, text = found[1].strip(), found[2]
    if '<arg_value>' in text or '<arg_key>' in text:
      raise ValueError(f'the value of "{key}" holds another argument: </arg_value> is missing')
    if key in arguments:
      raise ValueError(f'duplicate key "{key}"')
    arguments[key] = _value(text, properties.get(key, {}))
    place = found.end()
  return name, arguments


def _value(text: str, schema: Mapping[str, Any]) -> Any:
  """Value of a GLM argument: as it stands where a text is expected, else JSON; without a schema, JSON if it is some."""
  kinds = schema.get('type')
  kinds = kinds if isinstance(kinds, (list, tuple)) else [kinds] if kinds else []
  if 'string' in kinds:
    return text
  try:
    return _load(text)
  except ValueError:
    if kinds:
      raise
    return text


# --- JSON and schemas ------------------------------------------------------------------------------------------------------------


def _load(text: str) -> Any:
  """Strict JSON: no NaN, no duplicate keys, no numbers beyond float64, limited depth."""
  depth = deepest = 0
  quoted = False
  for found in re.finditer(r'\\.|["\[\]{}]', text, re.DOTALL):
    if found[0] == '"':
      quoted = not quoted
    elif not quoted and len(found[0]) == 1:
      depth += 1 if found[0] in '[{' else -1
      deepest = max(deepest, depth)
  if deepest > MAX_DEPTH:
    raise ValueError(f'nested too deeply: {deepest} levels, at most {MAX_DEPTH} are read')
  try:
    return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite)
  except json.JSONDecodeError as error:
    raise ValueError(f'not valid JSON: {error}') from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  seen: dict[str, Any] = {}
  for key, value in pairs:
    if key in seen:
      raise ValueError(f'duplicate key "{key}"')
    seen[key] = value
  return seen


def _refuse(name: str) -> Any:
  raise ValueError(f'not valid JSON: {name} is no number')


def _finite(text: str) -> float:
  value = float(text)
  if not math.isfinite(value):
    raise ValueError(f'the number {text[:40]} is too large')
  return value


def _schema(name: str, tools: Mapping[str, Any] | None) -> Mapping[str, Any]:
  """Schema of the arguments of a tool; {} where nothing is known of any."""
  if tools is None:
    return {}
  if name not in tools:
    raise ValueError(f'unknown tool "{name[:80]}"; there are: {", ".join(tools)}')
  return {'type': 'object', **tools[name]}


def _check(value: Any, schema: Mapping[str, Any], path: str) -> None:
  """Raises ValueError unless `value` fits the schema: type, enum, required, properties, items. Arguments that it does not name are wrong
  unless `additionalProperties` allows them; below the arguments, JSON schema's own default holds, which lets them pass."""
  if not isinstance(schema, Mapping):
    return
  kinds = schema.get('type')
  kinds = list(kinds) if isinstance(kinds, (list, tuple)) else [kinds] if kinds else []
  if kinds and not any(k not in _JSON_TYPES or _JSON_TYPES[k](value) for k in kinds):
    raise ValueError(f'{path} must be of type {" or ".join(kinds)}, got {json.dumps(value)[:80]}')
  if 'enum' in schema and value not in schema['enum']:
    raise ValueError(f'{path} must be one of {json.dumps(schema["enum"])}, got {json.dumps(value)[:80]}')
  if isinstance(value, dict) and schema:
    properties = schema.get('properties', {})
    missing = [name for name in schema.get('required', ()) if name not in value]
    if missing:
      raise ValueError(f'{path} must hold "{missing[0]}"')
    extra = [name for name in value if name not in properties]
    allowed = schema.get('additionalProperties', path != 'arguments')
    if extra and allowed is False:
      raise ValueError(f'{path} hold the unknown "{extra[0][:80]}"; known: {", ".join(properties) or "none"}')
    for name, item in value.items():
      inner = properties.get(name, allowed if isinstance(allowed, Mapping) else {})
      _check(item, inner, f'{path}.{name}')
  if isinstance(value, list) and isinstance(schema.get('items'), Mapping):
    for i, item in enumerate(value):
      _check(item, schema['items'], f'{path}[{i}]')
