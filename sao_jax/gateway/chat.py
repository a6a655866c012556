"""OpenAI's chat completions: requests read strictly, answers written whole or as a stream of events.

What the policy that is trained must not follow (temperature, top_p, seed, penalties ...: they are the run's own) is left aside and its name
told in the answer, in the header of `OVERRIDDEN`. What would change the meaning of an answer and cannot be done (several choices, images,
enforced formats) is refused.
"""

from __future__ import annotations

import dataclasses
import json
import math
import secrets
import time
from typing import Any, Mapping, Sequence

from sao_jax import tool_calls
from sao_jax.gateway.http import HttpError

OVERRIDDEN = 'X-Sao-Overridden'
ROLES = ('system', 'developer', 'user', 'assistant', 'tool')
MAX_MESSAGES, MAX_TOOLS, MAX_STOPS, MAX_SCHEMA_DEPTH = 16_384, 128, 16, 32
_READ = {
    'model', 'messages', 'tools', 'tool_choice', 'max_tokens', 'max_completion_tokens', 'stop', 'stream', 'stream_options', 'logprobs',
    'top_logprobs', 'n', 'response_format', 'modalities', 'audio', 'functions', 'function_call', 'return_token_ids', 'parallel_tool_calls',
    'prediction', 'web_search_options'}
_HARMLESS = {'user', 'metadata', 'store', 'service_tier', 'prompt_cache_key', 'prompt_cache_retention', 'safety_identifier'}


@dataclasses.dataclass(frozen=True)
class ChatRequest:
  """A request that can be served.

  Attributes:
    model: as the client wrote it; there is one policy.
    messages: {'role', 'content'} each, contents as texts; those of the assistant with 'tool_calls', ((name, arguments as text), ...).
    tools: JSON-schema functions that the prompt tells of.
    calls: whether calls in the turn are read as such; not with tool_choice 'none'.
    max_tokens: longest turn, None for the run's own limit.
    stop: strings where the turn ends.
    stream, include_usage, log_probs, token_ids: the form of the answer.
    overridden: names of the parameters that are not followed.
  """

  model: str
  messages: tuple[dict[str, Any], ...]
  tools: tuple[dict[str, Any], ...] = ()
  calls: bool = True
  max_tokens: int | None = None
  stop: tuple[str, ...] = ()
  stream: bool = False
  include_usage: bool = False
  log_probs: bool = False
  token_ids: bool = False
  overridden: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Answer:
  """One sampled turn as its client sees it.

  Attributes:
    content: what the turn says outside of reasoning and calls; as sampled where a call is malformed.
    reasoning: '' where there is none.
    calls: (id, name, arguments as JSON) each.
    finish_reason: 'stop', 'length' or 'tool_calls'.
    text: the whole turn as sampled.
    prompt_ids, ids, log_probs, versions: the tokens before the turn, and those of the turn.
  """

  content: str
  reasoning: str
  calls: tuple[tuple[str, str, str], ...]
  finish_reason: str
  text: str
  prompt_ids: Sequence[int]
  ids: Sequence[int]
  log_probs: Sequence[float]
  versions: Sequence[int]
  id: str = dataclasses.field(default_factory=lambda: f'chatcmpl-{secrets.token_hex(12)}')
  created: int = dataclasses.field(default_factory=lambda: int(time.time()))


def bad(message: str, param: str | None = None, code: str | None = None) -> HttpError:
  return HttpError(400, message, code=code, param=param)


# --- Reading ---------------------------------------------------------------------------------------------------------------------


def load(body: bytes) -> Any:
  """JSON of a body. Raises HttpError for what is none: NaN, infinite numbers and half surrogate pairs included."""
  try:
    text = body.decode('utf-8')
  except UnicodeDecodeError:
    raise bad('The body is not UTF-8.') from None
  try:
    value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
    if '\\ud' in text or '\\uD' in text:
      json.dumps(value, ensure_ascii=False).encode('utf-8')
  except UnicodeEncodeError:
    raise bad('A text in the body holds half of a surrogate pair.') from None
  except RecursionError:
    raise bad('The body is nested too deeply.') from None
  except ValueError as error:
    raise bad(f'The body is not JSON: {str(error)[:200]}.') from None
  return value


def _refuse(name: str) -> Any:
  raise ValueError(f'{name} is no number')


def _finite(text: str) -> float:
  value = float(text)
  if not math.isfinite(value):
    raise ValueError(f'the number {text[:40]} is too large')
  return value


def parse(body: bytes) -> ChatRequest:
  """Reads the body of a request for a completion. Raises HttpError (400) with what is wrong."""
  value = load(body)
  if not isinstance(value, dict):
    raise bad('The body must be a JSON object.')
  value = {name: item for name, item in value.items() if item is not None}
  _refuse_impossible(value)
  tools = _tools(value.get('tools', []))
  choice = value.get('tool_choice', 'auto')
  if choice not in ('auto', 'none'):
    raise bad('tool_choice must be "auto" or "none": which tool is called is the policy\'s own choice.', 'tool_choice', 'unsupported_value')
  options = value.get('stream_options', {})
  if not isinstance(options, dict):
    raise bad('stream_options must be an object.', 'stream_options')
  limits = [_whole(value[name], name) for name in ('max_tokens', 'max_completion_tokens') if name in value]
  overridden = sorted(set(value) - _READ - _HARMLESS)
  if _flag(value, 'parallel_tool_calls', True) is False:
    overridden.append('parallel_tool_calls')
  return ChatRequest(
      model=_text(value.get('model', 'policy'), 'model'), messages=_messages(value.get('messages')), tools=tools, calls=choice == 'auto',
      max_tokens=min(limits) if limits else None, stop=_stop(value.get('stop', [])), stream=_flag(value, 'stream', False),
      include_usage=_flag(options, 'include_usage', False), log_probs=_flag(value, 'logprobs', False),
      token_ids=_flag(value, 'return_token_ids', False), overridden=tuple(name[:60] for name in overridden[:32]))


def _refuse_impossible(value: Mapping[str, Any]) -> None:
  if 'n' in value and (isinstance(value['n'], bool) or value['n'] != 1):
    raise bad('n must be 1: each answer is one turn of one rollout. Ask again for another sample.', 'n', 'unsupported_value')
  form = value.get('response_format', {'type': 'text'})
  if not isinstance(form, dict) or form.get('type') != 'text':
    raise bad('response_format must be {"type": "text"}: the policy is not held to a format.', 'response_format', 'unsupported_value')
  if value.get('modalities', ['text']) != ['text']:
    raise bad('modalities must be ["text"].', 'modalities', 'unsupported_value')
  if value.get('top_logprobs', 0) != 0:
    raise bad('top_logprobs must be 0: only the log-probabilities of what was sampled are kept.', 'top_logprobs', 'unsupported_value')
  for name in ('audio', 'functions', 'function_call', 'prediction', 'web_search_options'):
    if name in value:
      raise bad(f'{name} is not supported' + ('; use tools.' if name.startswith('function') else '.'), name, 'unsupported_parameter')


def _flag(value: Mapping[str, Any], name: str, default: bool) -> bool:
  flag = value.get(name, default)
  if not isinstance(flag, bool):
    raise bad(f'{name} must be true or false.', name)
  return flag


def _text(value: Any, name: str) -> str:
  if not isinstance(value, str):
    raise bad(f'{name} must be a text.', name)
  return value


def _whole(value: Any, name: str) -> int:
  if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 2**31:
    raise bad(f'{name} must be a whole number of at least 1.', name)
  return value


def _stop(value: Any) -> tuple[str, ...]:
  values = [value] if isinstance(value, str) else value
  if not isinstance(values, list) or len(values) > MAX_STOPS or not all(isinstance(s, str) and 0 < len(s) <= 1000 for s in values):
    raise bad(f'stop must be a text or up to {MAX_STOPS} texts, none empty.', 'stop')
  return tuple(values)


def _messages(value: Any) -> tuple[dict[str, Any], ...]:
  if not isinstance(value, list) or not value:
    raise bad('messages must be a list with at least one message.', 'messages')
  if len(value) > MAX_MESSAGES:
    raise bad(f'There may be {MAX_MESSAGES} messages, got {len(value)}.', 'messages')
  messages = tuple(_message(message, f'messages[{i}]') for i, message in enumerate(value))
  if messages[-1]['role'] == 'assistant':
    raise bad('The last message must not be of the assistant: a turn cannot be continued, only followed.', 'messages')
  return messages


def _message(value: Any, where: str) -> dict[str, Any]:
  if not isinstance(value, dict):
    raise bad(f'{where} must be an object.', where)
  role = value.get('role')
  if role not in ROLES:
    raise bad(f'{where}.role must be one of {", ".join(ROLES)}.', f'{where}.role')
  message: dict[str, Any] = {'role': 'system' if role == 'developer' else role, 'content': _content(value.get('content'), role, where)}
  calls = value.get('tool_calls')
  calls = None if calls == [] else calls
  if calls is not None and role != 'assistant':
    raise bad(f'{where}: only the assistant has tool_calls.', f'{where}.tool_calls')
  if value.get('function_call') is not None:
    raise bad(f'{where}.function_call is not supported; use tool_calls.', f'{where}.function_call')
  if calls is not None:
    message['tool_calls'] = _calls(calls, f'{where}.tool_calls')
  return message


def _content(value: Any, role: str, where: str) -> str:
  if isinstance(value, str):
    return value
  if value is None and role == 'assistant':
    return ''
  if not isinstance(value, list):
    raise bad(f'{where}.content must be a text or a list of parts.', f'{where}.content')
  texts = []
  for part in value:
    kind = part.get('type') if isinstance(part, dict) else None
    if kind not in ('text', 'refusal') or not isinstance(part.get(kind), str):
      raise bad(f'{where}.content may hold parts of the type "text" only: images, audio and files are not read.', f'{where}.content',
                'unsupported_content')
    texts.append(part[kind])
  return ''.join(texts)


def _calls(value: Any, where: str) -> tuple[tuple[str, str], ...]:
  if not isinstance(value, list):
    raise bad(f'{where} must be a list.', where)
  calls = []
  for call in value:
    function = call.get('function') if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get('name'), str) or not isinstance(function.get('arguments', ''), str):
      raise bad(f'{where} must hold functions with a name and arguments, both texts.', where)
    calls.append((function['name'], function.get('arguments', '')))
  return tuple(calls)


def _tools(value: Any) -> tuple[dict[str, Any], ...]:
  if not isinstance(value, list) or len(value) > MAX_TOOLS:
    raise bad(f'tools must be a list of at most {MAX_TOOLS}.', 'tools')
  tools = []
  for i, tool in enumerate(value):
    function = tool.get('function') if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get('type', 'function') != 'function':
      raise bad(f'tools[{i}] must be {{"type": "function", "function": {{...}}}}.', 'tools')
    parameters = function.get('parameters') or {'type': 'object', 'properties': {}}
    description = function.get('description') or ''
    if not isinstance(description, str):
      raise bad(f'tools[{i}].function.description must be a text.', 'tools')
    _check_schema(parameters, f'tools[{i}].function.parameters', 0)
    tools.append({'type': 'function', 'function': {'name': function.get('name'), 'description': description, 'parameters': parameters}})
  try:
    tool_calls.check_tools(tools)
  except ValueError as error:
    raise bad(str(error)[:500], 'tools') from None
  return tuple(tools)


def _check_schema(schema: Any, where: str, depth: int) -> None:
  """Raises HttpError where the parts of a JSON schema that calls are held to are not of their form."""
  if not isinstance(schema, dict) or depth > MAX_SCHEMA_DEPTH:
    raise bad(f'{where} must be a JSON schema, an object' + (f' of at most {MAX_SCHEMA_DEPTH} levels.' if depth else '.'), 'tools')
  kinds = schema.get('type', [])
  kinds = [kinds] if isinstance(kinds, str) else kinds
  texts = (kinds, schema.get('required', []))
  if not all(isinstance(t, list) and all(isinstance(x, str) for x in t) for t in texts) or not isinstance(schema.get('enum', []), list):
    raise bad(f'{where}: type must be one or more names, required a list of names, enum a list.', 'tools')
  properties, others = schema.get('properties', {}), schema.get('additionalProperties', True)
  if not isinstance(properties, dict) or not isinstance(others, (bool, dict)):
    raise bad(f'{where}: properties must be an object, additionalProperties true, false or a schema.', 'tools')
  for name, inner in properties.items():
    _check_schema(inner, f'{where}.{name[:40]}', depth + 1)
  for name in ('items', 'additionalProperties'):
    if isinstance(schema.get(name), dict):
      _check_schema(schema[name], f'{where}.{name}', depth + 1)


# --- Writing ---------------------------------------------------------------------------------------------------------------------


def write(request: ChatRequest, answer: Answer) -> tuple[bytes, str]:
  """Body and content type of an answer, in the form that the request asked for."""
  if request.stream:
    return b''.join(b'data: ' + e + b'\n\n' for e in [*map(_dump, _events(request, answer)), b'[DONE]']), 'text/event-stream; charset=utf-8'
  message: dict[str, Any] = {'role': 'assistant', 'content': answer.content or (None if answer.calls else ''), 'refusal': None}
  if answer.reasoning:
    message['reasoning_content'] = answer.reasoning
  if answer.calls:
    message['tool_calls'] = [
        {'id': identity, 'type': 'function', 'function': {'name': name, 'arguments': arguments}}
        for identity, name, arguments in answer.calls]
  choice = {'index': 0, 'message': message, 'logprobs': _log_probs(request, answer), 'finish_reason': answer.finish_reason}
  whole = {**_frame(request, answer, 'chat.completion'), 'choices': [choice], 'usage': _usage(answer)}
  if request.token_ids:
    choice.update(token_ids=list(answer.ids), policy_versions=list(answer.versions))
    whole['prompt_token_ids'] = list(answer.prompt_ids)
  return _dump(whole), 'application/json'


def _dump(value: Any) -> bytes:
  return json.dumps(value, separators=(',', ':'), allow_nan=False).encode()


def _frame(request: ChatRequest, answer: Answer, kind: str) -> dict[str, Any]:
  return {'id': answer.id, 'object': kind, 'created': answer.created, 'model': request.model}


def _usage(answer: Answer) -> dict[str, int]:
  prompt, turn = len(answer.prompt_ids), len(answer.ids)
  return {'prompt_tokens': prompt, 'completion_tokens': turn, 'total_tokens': prompt + turn}


def _log_probs(request: ChatRequest, answer: Answer) -> dict[str, Any] | None:
  if not request.log_probs:
    return None
  return {'content': [
      {'token': f'token_id:{i}', 'bytes': None, 'logprob': float(p), 'top_logprobs': []} for i, p in zip(answer.ids, answer.log_probs)],
      'refusal': None}


def _events(request: ChatRequest, answer: Answer) -> list[dict[str, Any]]:
  """The chunks of a streamed answer. A turn is settled when its last token is: they come together, at its end."""
  frame = _frame(request, answer, 'chat.completion.chunk')
  chunks: list[dict[str, Any]] = []

  def add(delta: dict[str, Any], finish: str | None = None, **extra: Any) -> None:
    chunks.append({**frame, 'choices': [{'index': 0, 'delta': delta, 'logprobs': None, 'finish_reason': finish, **extra}]})

  add({'role': 'assistant', 'content': '' if answer.content or not answer.calls else None, 'refusal': None})
  if answer.reasoning:
    add({'reasoning_content': answer.reasoning})
  if answer.content:
    add({'content': answer.content})
  for i, (identity, name, arguments) in enumerate(answer.calls):
    add({'tool_calls': [{'index': i, 'id': identity, 'type': 'function', 'function': {'name': name, 'arguments': ''}}]})
    add({'tool_calls': [{'index': i, 'function': {'arguments': arguments}}]})
  tokens = {'token_ids': list(answer.ids), 'policy_versions': list(answer.versions)} if request.token_ids else {}
  add({}, answer.finish_reason, **tokens)
  chunks[-1]['choices'][0]['logprobs'] = _log_probs(request, answer)
  if request.token_ids:
    chunks[0]['prompt_token_ids'] = list(answer.prompt_ids)
  if request.include_usage:
    for chunk in chunks:
      chunk['usage'] = None
    chunks.append({**frame, 'choices': [], 'usage': _usage(answer)})
  return chunks
