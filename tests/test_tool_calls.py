"""Tool calls: both forms, streaming equal to whole, every malformed kind with its reason, bounded time."""

import json
import time

from hypothesis import given, settings, strategies as st
import pytest

from sao_jax import tool_calls
from sao_jax.tool_calls import ToolCall, ToolCallError, ToolCallParser, Turn, parse

ADD = {'type': 'function', 'function': {'name': 'add', 'parameters': {
    'type': 'object', 'required': ['a', 'b'], 'properties': {
        'a': {'type': 'integer'}, 'b': {'type': ['integer', 'null']}, 'note': {'type': 'string'}, 'unit': {'enum': ['m', 's']},
        'points': {'type': 'array', 'items': {'type': 'number'}}, 'more': {'type': 'object', 'properties': {'x': {'type': 'boolean'}}}}}}}
RUN = {'name': 'run', 'parameters': {'type': 'object', 'properties': {'code': {'type': 'string'}}}}
TOOLS = (ADD, RUN)


def hermes(arguments, name='add'):
  return '<tool_call>\n' + json.dumps({'name': name, 'arguments': arguments}) + '\n</tool_call>'


def glm(arguments, name='add'):
  return f'<tool_call>{name}\n' + ''.join(f'<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n' for k, v in arguments) + '</tool_call>'


def test_several_calls_with_text_around_them():
  one, two = hermes({'a': 1, 'b': 2}), hermes({'code': 'print("</tool_call>")\n<tool_call>'}, 'run')
  found = parse(f'First {one} then\n{two} end', 'hermes', TOOLS)
  assert found.calls == (
      ToolCall('add', {'a': 1, 'b': 2}, one), ToolCall('run', {'code': 'print("</tool_call>")\n<tool_call>'}, two))
  assert found.text == 'First  then\n end'
  one, two = glm([('a', 1), ('b', 'null'), ('note', '7')]), glm([('code', 'print("</tool_call>")\n<b> ')], 'run')
  found = parse(f'First {one}{two}', 'glm', TOOLS)
  assert [c.arguments for c in found.calls] == [{'a': 1, 'b': None, 'note': '7'}, {'code': 'print("</tool_call>")\n<b> '}]
  assert parse('no call <b>', 'glm', TOOLS) == tool_calls.Parsed('no call <b>', ())


@pytest.mark.parametrize('body, reason', [
    ('{"name": "add", "arguments": {"a": 1, "b": 2}', 'not valid JSON'), ('', 'not valid JSON'), ('[1]', 'must be a JSON object'),
    ("{'name': 'add'}", 'not valid JSON'), ('{"name": "add"}', 'the call has no "arguments"'), ('{"arguments": {}}', 'has no "name"'),
    ('{"name": "sub", "arguments": {}}', 'unknown tool "sub"; there are: add, run'), ('{"name": 3, "arguments": {}}', 'must be a text'),
    ('{"name": "add", "arguments": "{}"}', '"arguments" an object'), ('{"name": "add", "arguments": {}, "id": 1}', 'unexpected key "id"'),
    ('{"name": "add", "name": "run", "arguments": {}}', 'duplicate key "name"'),
    ('{"name": "add", "arguments": {"a": 1, "a": 2}}', 'duplicate key "a"'),
    ('{"name": "add", "arguments": {"a": 1}}', 'arguments must hold "b"'),
    ('{"name": "add", "arguments": {"a": 1, "b": 2, "c": 3}}', 'unknown "c"'),
    ('{"name": "add", "arguments": {"a": "1", "b": 2}}', 'arguments.a must be of type integer, got "1"'),
    ('{"name": "add", "arguments": {"a": true, "b": 2}}', 'of type integer, got true'),
    ('{"name": "add", "arguments": {"a": 1.0, "b": 2}}', 'of type integer, got 1.0'),
    ('{"name": "add", "arguments": {"a": 1, "b": 2, "unit": "kg"}}', 'must be one of'),
    ('{"name": "add", "arguments": {"a": 1, "b": 2, "points": [1, "x"]}}', r'points\[1\] must be of type number'),
    ('{"name": "add", "arguments": {"a": 1, "b": 2, "more": {"x": 0}}}', 'more.x must be of type boolean'),
    ('{"name": "add", "arguments": {"a": NaN, "b": 2}}', 'NaN is no number'),
    ('{"name": "add", "arguments": {"a": 1e999, "b": 2}}', '1e999 is too large'),
    ('{"name": "run", "arguments": {"code": "\\ud800"}}', 'surrogate'),
    ('{"name": "add", "arguments": ' + '[' * 100 + ']' * 100 + '}', 'nested too deeply: 101 levels'),
    ('{"name": "add", "arguments": {"a": ' + '9' * 5000 + ', "b": 2}}', 'limit'), ('x' * 300_000, 'too long'),
])
def test_malformed_json_calls(body, reason):
  good = hermes({'a': 1, 'b': 2})
  found = parse(f'<tool_call>{body}</tool_call>{good}', 'hermes', TOOLS)
  error, after = found.calls  # What is wrong with one call says nothing about the next.
  assert isinstance(error, ToolCallError) and after == ToolCall('add', {'a': 1, 'b': 2}, good)
  assert __import__('re').search(reason, error.reason), error.reason
  assert len(error.raw) <= tool_calls.MAX_CALL and error.raw.startswith('<tool_call>')


@pytest.mark.parametrize('text, reason', [
    (glm([], ''), 'begins with the name'), (glm([], 'a b'), 'begins with the name'), (glm([], 'sub'), 'unknown tool "sub"'),
    (glm([('a', 1)]), 'must hold "b"'), (glm([('a', 1), ('a', 2)]), 'duplicate key "a"'), (glm([('a', 'x'), ('b', 1)]), 'not valid JSON'),
    (glm([('a', '"1"'), ('b', 1)]), 'of type integer'), (glm([('a', 1), ('b', 2), ('c', 3)]), 'unknown "c"'),
    ('<tool_call>add<arg_key>a</arg_key>1</tool_call>', 'arguments must be written'),
    ('<tool_call>add<arg_key>a</arg_key><arg_value>1<arg_key>b</arg_key><arg_value>2</arg_value></tool_call>', 'holds another argument'),
    ('<tool_call>{"name": "add", "arguments": {}}</tool_call>', 'begins with the name'),
])
def test_malformed_glm_calls(text, reason):
  (error,) = parse(text, 'glm', TOOLS).calls
  assert isinstance(error, ToolCallError) and reason in error.reason


@pytest.mark.parametrize('form', tool_calls.FORMATS)
def test_calls_that_are_not_closed_nested_or_not_opened(form):
  kinds = lambda text: [c.reason.split(':')[0] for c in parse(text, form, TOOLS).calls]
  assert kinds('a <tool_call>add') == ['unterminated'] and kinds('<tool_call>') == ['unterminated']
  assert kinds('<tool_call>add<tool_call>add') == ['nested', 'unterminated']
  assert kinds('a</tool_call>b') == ['</tool_call> without <tool_call> before it']
  assert parse('a</tool_call>b', form).text == 'ab' and parse('a <tool_cal', form).text == 'a <tool_cal'


PIECES = [
    '<tool_call>', '</tool_call>', hermes({'a': 1, 'b': 2}), glm([('a', 1), ('b', 2)]), '{"name": "add", "arguments": {"a": 1, "b": 2}}', '"',
    '\\', '\n', '<', '</', 'x', '{', '<arg_key>a</arg_key>', '<arg_value>', '</arg_value>', '<tool', '_call>', 'add', 'é', '3']


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=20).map(''.join), st.sampled_from(tool_calls.FORMATS), st.data())
def test_pieces_cut_anywhere_give_what_the_whole_gives(text, form, data):
  whole = parse(text, form, TOOLS)
  cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
  parser, calls = ToolCallParser(form, TOOLS), []
  for start, stop in zip([0, *cuts], [*cuts, len(text)]):
    calls += parser.feed(text[start:stop])
  calls += parser.close()
  assert (parser.text, tuple(calls)) == (whole.text, whole.calls)
  assert len(whole.text) + sum(len(c.raw) for c in whole.calls) == len(text)  # Nothing is lost, nothing counted twice.


@pytest.mark.parametrize('form', tool_calls.FORMATS)
def test_one_character_at_a_time(form):
  call = hermes({'a': 1, 'b': 2}) if form == 'hermes' else glm([('a', 1), ('b', 2)])
  parser = ToolCallParser(form, TOOLS)
  arrived = [(i, found) for i, c in enumerate('a' + call + 'b') if (found := parser.feed(c))]
  assert arrived == [(len(call), [ToolCall('add', {'a': 1, 'b': 2}, call)])] and parser.close() == [] and parser.text == 'ab'


@pytest.mark.parametrize('text', [
    '</tool_call>' * 50_000, '<tool_call>' * 50_000, '<tool_call>' + '"\\"' * 200_000, '<tool_call>["' + '\\"' * 90_000 + '</tool_call>',
    '<' * 500_000, '<tool_call>' + '[' * 190_000 + '</tool_call>', '<tool_call>{"name": "' + 'a' * 1_000_000,
    '<tool_call>x' + ''.join(f'<arg_key>a{i}</arg_key><arg_value>1</arg_value>' for i in range(4000)) + '</tool_call>'])
@pytest.mark.parametrize('form', tool_calls.FORMATS)
def test_hostile_text_takes_linear_time_and_bounded_memory(form, text):
  start = time.process_time()
  parser = ToolCallParser(form)
  found = [c for i in range(0, len(text), 50) for c in parser.feed(text[i:i + 50])] + parser.close()
  assert time.process_time() - start < 5 and all(len(c.raw) <= tool_calls.MAX_CALL for c in found)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2**70, 2**70) | st.text(st.characters(exclude_categories=['Cs'])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(exclude_categories=['Cs'])), inner, max_size=3))


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.text('abcxyz_', min_size=1, max_size=5), JSON, max_size=4))
def test_what_is_written_is_read_back(arguments):
  text = tool_calls.write(Turn('go', (('any', arguments), ('any', {}))), 'hermes')
  found = parse(text, 'hermes')
  assert [(c.name, c.arguments) for c in found.calls] == [('any', arguments), ('any', {})] and found.text.strip() == 'go'


@given(st.integers(), st.text(st.characters(exclude_categories=['Cs'])).filter(lambda s: '<arg_' not in s and '</arg_value>' not in s))
def test_what_is_written_in_glm_form_is_read_back(a, note):
  (call,) = parse(tool_calls.write(Turn(calls=(('add', {'a': a, 'b': None, 'note': note}),)), 'glm'), 'glm', TOOLS).calls
  assert call.arguments == {'a': a, 'b': None, 'note': note}


def test_reasoning_is_not_read():
  call = hermes({'a': 1, 'b': 2})
  assert tool_calls.after_thinking(f'<think>maybe {call}</think>\n\nso {call}') == f'\n\nso {call}'
  assert tool_calls.after_thinking(f'{call}<think>not yet {call}') == call
  assert tool_calls.after_thinking('plain') == 'plain'


@pytest.mark.parametrize('tools, message', [
    ([{'type': 'function'}], 'must be a function with a name'), ([{'name': 'a b'}], 'must be a function with a name'), (['add'], 'must be a function'),
    ([{'name': 'add', 'parameters': {'type': 'array'}}], 'must be a JSON schema of type object'), ([ADD, {'name': 'add'}], 'different names')])
def test_wrong_definitions(tools, message):
  with pytest.raises(ValueError, match=message):
    ToolCallParser('hermes', tools)


def test_unknown_format():
  with pytest.raises(ValueError, match="one of hermes, glm, got 'xml'"):
    parse('', 'xml')
