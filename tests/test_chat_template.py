"""Templates: the Jinja surroundings of transformers, contents hidden, renderings shared by shape."""

import contextlib
import json
import re

import pytest

from sao_jax.services import pool
from sao_jax.models import chat_template, conversation
from sao_jax.models.chat_template import NAME, ChatTemplate, TemplateLimit, hide
from tests import tokenizer_factory as factory

USER = [{'role': 'user', 'content': 'x'}]


def render(source, messages=USER, tools=(), names=None, generation=True, **settings):
  return ChatTemplate(source, names=names or {}, settings=settings).render(messages, tools=tools, generation=generation)


def test_what_templates_find_around_them():
  assert render('{{ {"b": "<é&>", "a": 1} | tojson }}') == '{"b": "<é&>", "a": 1}'
  assert render('{{ {"b": 2, "a": [1]} | tojson(indent=1, sort_keys=True, separators=(",", ":")) }}') == '{\n "a":[\n  1\n ],\n "b":2\n}'
  assert render('{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}') == '013'
  assert render('a{% generation %}b{{ messages[0].role }}{% endgeneration %}c') == 'abuserc'
  assert re.fullmatch(r'\d{4}', render('{{ strftime_now("%Y") }}'))
  assert render('{{ bos_token }}{{ eos_token }}|{{ enable_thinking }}', names={'bos_token': '<s>'}, enable_thinking=False) == '<s>|False'
  assert render('{% if tools %}tools{% else %}none{% endif %} {{ add_generation_prompt }}', generation=False) == 'none False'
  assert render('  {% if true %}\n  a\n  {% endif %}\n') == '  a\n'  # Blocks take their line with them.


def test_a_template_refuses_in_its_own_words():
  with pytest.raises(ValueError, match='cannot be rendered: roles must alternate'):
    render('{{ raise_exception("roles must alternate") }}')
  with pytest.raises(ValueError, match='cannot be rendered'):
    render('{% for m in')
  with pytest.raises(ValueError, match='fails on this conversation: TypeError'):
    render('{{ 1 + "a" }}')
  with pytest.raises(ValueError, match='fails on this conversation: ZeroDivisionError'):
    render('{{ 1 / 0 }}')
  with pytest.raises(ValueError, match='fails on this conversation: OverflowError: Range too big'):
    render('{% for i in range(10**9) %}x{% endfor %}')
  with pytest.raises(ValueError, match="'messages' is given by the conversation itself"):
    ChatTemplate('', names={}, settings={'messages': 2})
  with pytest.raises(ValueError, match='settings of a chat template must be JSON-like'):
    ChatTemplate('', names={}, settings={'f': print})


@pytest.mark.parametrize('source, message', [
    ('{% for m in messages %}\n{{ m', r'unexpected end of template.*\(line 2\)'), ('{{ ' + '(' * 5000 + ')' * 5000 + ' }}', 'RecursionError'),
    ('{% for a in [1] %}' * 30 + '{% endfor %}' * 30, 'SyntaxError'), ('\ud800', 'UnicodeEncodeError'),
    ('{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}', 'RecursionError')])
def test_templates_that_break_the_compiler_are_told(source, message):
  with pytest.raises(ValueError, match=f'The chat template (cannot be rendered|fails on this conversation): .*{message}'):
    render(source)


@pytest.fixture
def limit_time(monkeypatch):
  """Sets the seconds that a template may take. What ends by its memory gets a minute, since a busy machine may need seconds to fill it."""
  with contextlib.ExitStack() as stack:
    pools = []

    def limit(seconds):
      if pools:
        pools[0]._time_limit_s = seconds
        return
      made = pool.Pool(
          size=1, time_limit_s=seconds, memory_mb=512, wait_limit_s=60.0, service='sao_jax.models.template_service', max_reply=1 << 25)
      pools.append(made)
      stack.callback(made.close)
      monkeypatch.setattr(chat_template, '_processes', lambda: made)

    yield limit


@pytest.mark.parametrize('seconds, bomb, message', [
    (60.0, "{{ 'a' * 10**10 }}", 'more memory than'), (60.0, "{{ messages[0].role * 10**10 }}", 'more memory than'),
    (60.0, "{{ '%099999999999d' % 1 }}", 'more memory than'),
    (60.0, "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}", 'more memory than'),
    (3.0, '{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}', '3 s'),
    (3.0, '{{ (messages | length + 9) ** (10**9) }}', '3 s'),
    (60.0, "{{ 'a' * (3 * 10**6) }}", r'a text of 3,000,00\d characters')])
def test_a_template_that_hangs_or_grows_is_stopped(limit_time, seconds, bomb, message):
  limit_time(seconds)
  with pytest.raises(TemplateLimit, match=f'The chat template was stopped: .*{message}'):
    render('{{ messages[0].content }}' + bomb)
  limit_time(60.0)
  assert render('{{ messages[0].content }}') == 'x'  # Others go on.


@pytest.mark.parametrize('condition', ['tools', 'messages | length > 2'])
def test_what_a_template_does_with_tools_and_with_turns_is_tried_when_it_is_loaded(limit_time, condition):
  limit_time(60.0)
  source = factory.CHATML_TEMPLATE + "{% if " + condition + " %}{{ 'a' * 10**10 }}{% endif %}"
  with pytest.raises(TemplateLimit, match='more memory'):
    conversation.make(factory.chatml(source), 'chat')


@pytest.mark.parametrize('source', [
    '{{ messages.append(1) }}', '{{ messages.__class__.__mro__ }}', '{{ "".__class__.__subclasses__() }}',
    '{{ strftime_now.__globals__["json"] }}', '{% include "/etc/passwd" %}'])
def test_a_template_can_do_no_harm(source):
  with pytest.raises(ValueError, match='cannot be rendered|fails'):
    render(source)


def test_contents_are_hidden_and_blanks_are_not():
  control = re.compile(re.escape('<|x|>'))
  tool = {'name': 'f', 'description': 'uses <|x|>'}
  hidden = hide([
      {'role': 'user', 'content': '  a b\n'}, {'role': 'assistant', 'content': '<think>\nwhy\n</think>\n\nso', 'tool_calls': [{'x': '1<|x|>'}]},
      {'role': 'tool', 'content': ' \n'}], [tool], control)
  assert hidden.contents == ['<|x|>', 'a b', 'why', 'so', '<|x|>'] and hidden.message_of == [-1, 0, 1, 1, 1]
  shape = NAME.sub('*', json.dumps(hidden.messages))
  assert json.loads(shape) == [
      {'role': 'user', 'content': '  *\n'}, {'role': 'assistant', 'content': '<think>\n*\n</think>\n\n*', 'tool_calls': [{'x': '1*'}]},
      {'role': 'tool', 'content': ' \n'}]
  assert hidden.tools == [{'name': 'f', 'description': 'uses ' + NAME.findall(hidden.tools[0]['description'])[0]}]
  longer = hide([{'role': 'user', 'content': '  other\n'}, {'role': 'user', 'content': 'more'}], [tool], control)
  assert longer.messages[0] == hidden.messages[0]  # The same names for the same beginning.


def test_messages_that_are_none():
  for message in ({'content': 'x'}, {'role': 'user'}, {'role': 'user', 'content': [{'type': 'text', 'text': 'x'}]}, {'role': 'user', 'content': None}):
    with pytest.raises(ValueError, match='must have a role and a content, both texts'):
      hide([message])
  with pytest.raises(ValueError, match='must be JSON-like, got object'):
    hide([{'role': 'user', 'content': 'x', 'name': object()}])


def test_conversations_of_one_shape_are_rendered_once(monkeypatch):
  runs = []
  monkeypatch.setattr(ChatTemplate, '_run', lambda self, *args: runs.append(args) or 'text')
  template = ChatTemplate('', names={}, settings={})
  for content in ('a', 'b' * 100_000, 'c d'):
    template.render(hide([{'role': 'user', 'content': content}]).messages, generation=True)
  assert len(runs) == 1 and len(runs[0][0]) < 100
  template.render(hide([{'role': 'user', 'content': 'a '}]).messages, generation=True)
  assert len(runs) == 2 and chat_template._CACHED >= 100
