"""Runs chat templates in a process with limits of time and memory: they come with a model's files, and two nested loops are enough to hang.

A service of `services.worker`. The environment is that of transformers: a sandbox in which nothing can be changed, `raise_exception`,
`strftime_now`, `tojson` without HTML escapes, `break` and `continue`, and `{% generation %}` blocks, which only mark what they hold.
"""

from __future__ import annotations

import datetime
import functools
import importlib
import json
from typing import Any

LONGEST = 1 << 21  # Characters of a rendering; contents are not in it.


def prepare() -> None:
  """Loads the library, before any limit holds."""
  _environment()


def answer(request: dict[str, Any]) -> dict[str, str]:
  """Renders `request['source']`, or only compiles it where there are no messages.

  The verdict is 'rendered' with the text as its reason, 'refused' (by the template or by Jinja), 'failed' (an error of Python's), or
  'too_much', with the reason.
  """
  jinja2 = importlib.import_module('jinja2')
  try:
    template = _compiled(request['source'])
    if 'messages' not in request:
      return {'verdict': 'rendered', 'reason': ''}
    text = template.render(
        **request['variables'], messages=json.loads(request['messages']), tools=json.loads(request['tools']) or None, documents=None,
        add_generation_prompt=request['generation'])
    text.encode('utf-8')
  except jinja2.TemplateSyntaxError as error:
    return {'verdict': 'refused', 'reason': f'{error.message} (line {error.lineno})'}
  except jinja2.TemplateError as error:
    return {'verdict': 'refused', 'reason': str(error)[:2000]}
  except MemoryError:
    return {'verdict': 'too_much', 'reason': 'more memory than a template may have'}
  except Exception as error:  # Templates do what they want.
    return {'verdict': 'failed', 'reason': f'{type(error).__name__}: {str(error)[:2000]}'}
  if len(text) > LONGEST:
    return {'verdict': 'too_much', 'reason': f'a text of {len(text):,} characters, more than {LONGEST:,}'}
  return {'verdict': 'rendered', 'reason': text}


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> Any:
  return _environment().from_string(source)


@functools.lru_cache(maxsize=1)
def _environment() -> Any:
  """Jinja as transformers sets it up for chat templates."""
  jinja2 = importlib.import_module('jinja2')
  sandbox, ext, nodes = (importlib.import_module(f'jinja2.{name}') for name in ('sandbox', 'ext', 'nodes'))

  class Generation(ext.Extension):
    """`{% generation %}` marks what an assistant said; here it is only passed over."""

    tags = {'generation'}

    def parse(self, parser: Any) -> Any:
      line = next(parser.stream).lineno
      return nodes.Scope(parser.parse_statements(('name:endgeneration',), drop_needle=True)).set_lineno(line)

  def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)

  def tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

  environment = sandbox.ImmutableSandboxedEnvironment(
      trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols])
  environment.filters['tojson'] = tojson
  environment.globals['raise_exception'] = raise_exception
  environment.globals['strftime_now'] = lambda form: datetime.datetime.now().strftime(form)
  return environment
