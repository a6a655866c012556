"""Tokenizers: byte, and the one in the GGUF file of SmolLM2."""

import json
import pathlib
import random
import shutil

from hypothesis import given, settings, strategies as st
import pytest
import tokenizers as library

from sao_jax.config import ModelConfig
from sao_jax.models import files
from sao_jax.models import tokenizers
from tests import tokenizer_factory as factory

REFERENCE = json.loads((pathlib.Path(__file__).parent / 'goldens' / 'smollm2_reference.json').read_text())


@pytest.fixture(scope='module')
def smollm2():
  return tokenizers.load(files.SMOLLM2)


def test_byte_tokenizer_ids():
  tokenizer = tokenizers.make(ModelConfig())
  assert tokenizer.encode('aé') == [97, 0xC3, 0xA9]
  assert tokenizer.encode('a<|end|>b<|pad|>') == [97, 258, 98, 256]
  assert tokenizer.encode('<|end|>', parse_special=False) == list(b'<|end|>')
  assert tokenizer.decode([97, 258, 0xC3, 0xA9, 257]) == 'a<|end|>é<|start|>'
  assert (tokenizer.vocab_size, tokenizer.pad_id, tokenizer.stop_ids) == (259, 256, (258,))
  assert tokenizer.decode([0xC3]) == '\ufffd' and tokenizer.token_bytes(0xC3) == b'\xc3'


@given(st.text())
def test_byte_tokenizer_round_trip(text):
  tokenizer = tokenizers.ByteTokenizer()
  assert tokenizer.decode(tokenizer.encode(text, parse_special=False)) == text
  assert tokenizer.encode(tokenizer.decode(tokenizer.encode(text))) == tokenizer.encode(text)


@pytest.mark.parametrize('token', [-1, 259])
def test_ids_outside_the_vocabulary(token):
  with pytest.raises(ValueError, match='outside the vocabulary'):
    tokenizers.ByteTokenizer().token_bytes(token)


def test_smollm2_matches_the_reference(smollm2):
  assert len(REFERENCE['prompts']) == 3
  for prompt in REFERENCE['prompts']:
    assert smollm2.encode(prompt['text']) == prompt['input_ids']
    assert smollm2.decode(prompt['input_ids']) == prompt['text']
    assert smollm2.decode(prompt['greedy_ids']) == prompt['greedy_text']
  assert (smollm2.vocab_size, smollm2.pad_id, smollm2.stop_ids, len(smollm2.specials)) == (49152, 2, (2,), 17)


def test_smollm2_splits_every_digit(smollm2):
  digits = [smollm2.encode(str(d)) for d in range(10)]
  assert all(len(d) == 1 for d in digits)
  for text in ('2024', '7 x 13 = 91', '3.14159', 'a1b22c333'):
    ids = smollm2.encode(text)
    for i in ids:
      piece = smollm2.token_bytes(i).decode()
      assert not any(c.isdigit() for c in piece) or len(piece) == 1, (text, piece)
    assert smollm2.decode(ids) == text


def test_smollm2_special_text_is_text_unless_asked_for(smollm2):
  text = 'a<|im_end|>b'
  assert 2 in smollm2.encode(text)
  plain = smollm2.encode(text, parse_special=False)
  assert not set(plain) & set(smollm2.specials.values()) and smollm2.decode(plain) == text


# Bytes for which the vocabulary of SmolLM2 has no token: six control characters, and bytes of planes 4 to 11 or of no UTF-8 at all.
ABSENT = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100)}


def test_smollm2_absent_bytes(smollm2):
  present = {smollm2.token_bytes(i) for i in range(smollm2.vocab_size)}
  assert {b for b in range(256) if bytes([b]) not in present} == ABSENT
  assert smollm2.decode(smollm2.encode('a\x04b')) == 'ab'


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=['Cs'])).filter(lambda text: not set(text.encode()) & ABSENT))
def test_smollm2_round_trip(text):
  tokenizer = smollm2_cached()
  for parse_special in (False, True):
    ids = tokenizer.encode(text, parse_special=parse_special)
    assert tokenizer.decode(ids) == text
    assert b''.join(tokenizer.token_bytes(i) for i in ids) == text.encode()


_CACHE = []


def smollm2_cached():
  if not _CACHE:
    _CACHE.append(tokenizers.load(files.SMOLLM2))
  return _CACHE[0]


def test_every_id_decodes_to_its_own_bytes(smollm2):
  ids = list(range(smollm2.vocab_size))
  random.Random(0).shuffle(ids)
  assert all(smollm2.token_bytes(i) for i in ids)
  named = smollm2.decode(ids[:2000])
  assert named == b''.join(smollm2.token_bytes(i) for i in ids[:2000]).decode('utf-8', 'replace')


def test_folder_round_trip(smollm2, tmp_path):
  smollm2.save(tmp_path)
  again = tokenizers.from_folder(tmp_path, vocab_size=49200)
  text = REFERENCE['prompts'][0]['text'] + ' 12345 naïve 🎉'
  assert again.encode(text) == smollm2.encode(text)
  assert again.encode(text, parse_special=False) == smollm2.encode(text, parse_special=False)
  assert (again.stop_ids, again.pad_id, again.chat_template) == (smollm2.stop_ids, smollm2.pad_id, smollm2.chat_template)
  assert again.specials == smollm2.specials and again.token_bytes(49199) == b''


def test_folder_errors(smollm2, tmp_path):
  with pytest.raises(ValueError, match='tokenizer.json is missing'):
    tokenizers.from_folder(tmp_path)
  (tmp_path / 'tokenizer.model').write_bytes(b'x')
  with pytest.raises(ValueError, match='tokenizer.json is missing.*has tokenizer.model; make the other from it'):
    tokenizers.from_folder(tmp_path)
  smollm2.save(tmp_path)
  (tmp_path / 'tokenizer.json').write_text('{"version": "1.0"')
  with pytest.raises(ValueError, match='cannot be read as a tokenizer'):
    tokenizers.from_folder(tmp_path)
  (tmp_path / 'tokenizer_config.json').write_text('[]')
  with pytest.raises(ValueError, match='must hold a JSON object'):
    tokenizers.from_folder(tmp_path)


def test_make_errors():
  with pytest.raises(ValueError, match='at least 259'):
    tokenizers.make(ModelConfig(vocab_size=100))
  with pytest.raises(ValueError, match='needs model.pretrained'):
    tokenizers.make(ModelConfig(tokenizer='pretrained'))
  with pytest.raises(ValueError, match="'byte' or 'pretrained'"):
    tokenizers.make(ModelConfig(tokenizer='words'))
  with pytest.raises(ValueError, match='Unknown pretrained model .* known names are smollm2-135m-instruct'):
    tokenizers.load('smollm3')
  with pytest.raises(ValueError, match="Unknown pretrained model '~nosuchuser/model'.*it does not exist"):
    tokenizers.load('~nosuchuser/model')
  with pytest.raises(ValueError, match="nothing here opens addresses that begin with 'foo://'"):
    tokenizers.load('foo://bucket/model')


def test_ids_that_only_pad_the_embedding_have_no_text():
  tokenizer = tokenizers.ByteTokenizer(264)
  assert tokenizer.decode([65, 263, 66]) == 'AB'
  with pytest.raises(ValueError, match='outside the vocabulary'):
    tokenizer.token_bytes(264)
  with pytest.raises(ValueError, match='at least 259'):
    tokenizers.ByteTokenizer(258)


# --- Hugging Face folders --------------------------------------------------------------------------------------------------------


def small(folder, special=('<s>', '</s>'), markup=(), **files_):
  return tokenizers.from_folder(factory.write_folder(folder, factory.small_backend(special, markup), **files_))


def test_qwen3_folder():
  qwen = factory.qwen3()
  assert (qwen.vocab_size, qwen.stop_ids, qwen.pad_id, qwen.names['eos_token']) == (151669, (151645,), 151643, '<|im_end|>')
  text = 'naïve 你好 12345 <|im_end|>\n<tool_call>{"a": 1}</tool_call> 🎉'
  ids = qwen.encode(text)
  assert {151645, 151657, 151658} <= set(ids) and qwen.decode(ids) == text
  plain = qwen.encode(text, parse_special=False)
  assert max(plain) < 151643 and qwen.decode(plain) == text  # Neither special tokens nor markup, whatever the text says.
  oracle = library.Tokenizer.from_file(str(factory.qwen3_folder() / 'tokenizer.json'))
  assert ids == oracle.encode(text, add_special_tokens=False).ids
  for i in range(0, 151643, 997):
    assert qwen.decode([i]) == oracle.decode([i], skip_special_tokens=False)
  assert qwen.split('a<think>b<|im_end|>', markup_only=True) == ['a', 151667, 'b<|im_end|>']


def test_only_tokenizer_json_is_needed_beside_a_stop_id(tmp_path):
  with pytest.raises(ValueError, match='no file names an eos token'):
    small(tmp_path / 'none')
  found = small(tmp_path / 'config', config={'eos_token_id': 441, 'vocab_size': 500})
  assert (found.stop_ids, found.pad_id, found.chat_template, found.vocab_size) == ((441,), 441, '', 442)
  found = small(tmp_path / 'map', special_tokens_map={'eos_token': {'content': '</s>'}, 'bos_token': '<s>'})
  assert found.stop_ids == (441,) and found.names == {'eos_token': '</s>', 'bos_token': '<s>'}


def test_several_stop_ids_and_the_pad_id(tmp_path):
  special = ('<s>', '</s>', '<|eot|>', '<|pad|>')
  found = small(
      tmp_path / 'a', special, tokenizer_config={'eos_token': '<|eot|>'}, generation_config={'eos_token_id': [441, 442], 'pad_token_id': 443},
      config={'eos_token_id': 441})
  assert (found.stop_ids, found.pad_id) == ((442, 441), 443)  # The tokenizer's own first, each once.
  found.save(tmp_path / 'a')
  again = tokenizers.from_folder(tmp_path / 'a')
  assert (again.stop_ids, again.pad_id, again.specials) == (found.stop_ids, found.pad_id, found.specials)
  equal = small(tmp_path / 'b', special, tokenizer_config={'eos_token': '</s>', 'pad_token': '</s>'})
  assert equal.pad_id == equal.stop_ids[0] == 441
  nested = small(tmp_path / 'c', special, config={'text_config': {'eos_token_id': [441]}})
  assert nested.stop_ids == (441,)


def test_tokens_that_only_the_settings_know_are_added(tmp_path):
  found = small(tmp_path, tokenizer_config={
      'eos_token': '<|end|>', 'added_tokens_decoder': {'441': {'content': '</s>'}, '442': {'content': '<|end|>', 'special': True}}})
  assert found.stop_ids == (442,) and found.encode('a<|end|>')[-1] == 442 and 442 not in found.encode('<|end|>', parse_special=False)


def test_the_template_of_several_and_of_its_own_file(tmp_path):
  settings_ = {'eos_token': '</s>', 'chat_template': [{'name': 'default', 'template': 'D'}, {'name': 'rag', 'template': 'R'}]}
  assert small(tmp_path, tokenizer_config=settings_).chat_template == 'D'
  (tmp_path / 'chat_template.jinja').write_text('J')
  assert tokenizers.from_folder(tmp_path).chat_template == 'J'


@pytest.mark.parametrize('files_, message', [
    (dict(tokenizer_config={'eos_token': '<|none|>'}), "eos_token '<|none|>', which is not in the vocabulary"),
    (dict(tokenizer_config={'eos_token': '</s>', 'pad_token': 7}), 'pad_token 7, which is not'),
    (dict(generation_config={'eos_token_id': ['</s>']}), 'eos_token_id must be an id or a list of ids'),
    (dict(generation_config={'eos_token_id': 999}), 'stop id 999 is outside the vocabulary 0..441'),
    (dict(config={'eos_token_id': 441, 'pad_token_id': 9999}), 'pad id 9999 is outside'),
    (dict(tokenizer_config={'eos_token': '</s>', 'added_tokens_decoder': {'500': {'content': '<x>'}}}), "'<x>' the id 500, tokenizer.json makes it"),
    (dict(tokenizer_config={'eos_token': '</s>', 'chat_template': 3}), 'chat_template must be a text'),
    (dict(tokenizer_config={'eos_token': '</s>', 'chat_template': [{'name': 'rag', 'template': 'R'}]}), 'none is named default'),
    (dict(tokenizer_config=[1]), 'must hold a JSON object'),
    (dict(tokenizer_config={'eos_token': '</s>', 'chat_template': ['R']}), 'chat templates .without names. none is named default'),
    *[(dict(tokenizer_config={'eos_token': '</s>', 'added_tokens_decoder': found}), 'tokenizer_config.json: added_tokens_decoder must')
      for found in ([1], {'a': {'content': 'x'}}, {'500': {}}, {'500': 'x'}, {'500': {'content': 3}}, {'-1': {'content': 'x'}})],
    (dict(tokenizer_config={'eos_token': []}), 'names the eos_token .., which is not'),
    (dict(config={'text_config': [1]}), 'no file names an eos token'),
    (dict(tokenizer_config={'eos_token': '</s>', 'added_tokens_decoder': {'441': {'content': '<x>'}}}), "id 441 to '<x>', tokenizer.json to '</s>'"),
    *[(dict(tokenizer_config={'eos_token': '</s>', 'added_tokens_decoder': found}), 'tokenizer_config.json: added_tokens_decoder must')
      for found in ({'9' * 5000: {'content': 'x'}}, {'\u0664': {'content': 'x'}}, {'442': {'content': '\ud800'}})],
    *[(dict(tokenizer_config={'eos_token': '</s>'}, config={'pad_token_id': found}), 'config.json: pad_token_id must be an id') for found in ('x', True)],
])
def test_wrong_folders(tmp_path, files_, message):
  with pytest.raises(ValueError, match=message.replace('|', r'\|')):
    small(tmp_path, **files_)


@pytest.mark.parametrize('content, message', [
    (b'', 'cannot be read as a tokenizer'), (b'{}', 'cannot be read as a tokenizer'), (b'[]', 'cannot be read as a tokenizer'),
    (b'\xff\xfe', 'cannot be read as a tokenizer'), (b'{"version": "1.0", "model": 3}', 'cannot be read as a tokenizer'),
    (b'version https://git-lfs.github.com/spec/v1', 'It is a pointer of Git LFS')])
def test_files_that_are_no_tokenizer(tmp_path, content, message):
  small(tmp_path, tokenizer_config={'eos_token': '</s>'})
  (tmp_path / 'tokenizer.json').write_bytes(content)
  with pytest.raises(ValueError, match=f'tokenizer.json.*{message}'):
    tokenizers.from_folder(tmp_path)


@pytest.mark.parametrize('content, message', [(b'\xff', 'is not UTF-8'), (b' \n', 'is empty')])
def test_a_template_that_is_no_text(tmp_path, content, message):
  small(tmp_path, tokenizer_config={'eos_token': '</s>'})
  (tmp_path / 'chat_template.jinja').write_bytes(content)
  with pytest.raises(ValueError, match=f'chat_template.jinja {message}'):
    tokenizers.from_folder(tmp_path)


@pytest.mark.parametrize('name', ['tokenizer.json', 'generation_config.json', 'chat_template.jinja'])
def test_a_link_to_nowhere_and_a_folder_are_no_missing_file(tmp_path, name):
  small(tmp_path, tokenizer_config={'eos_token': '</s>'})
  (tmp_path / name).unlink(missing_ok=True)
  (tmp_path / name).symlink_to(tmp_path / 'blobs' / 'gone')
  with pytest.raises(ValueError, match=f'{name} is a link that leads to no file'):
    tokenizers.from_folder(tmp_path)
  (tmp_path / name).unlink()
  (tmp_path / name).mkdir()
  with pytest.raises(ValueError, match=f'{name} is a folder'):
    tokenizers.from_folder(tmp_path)


@pytest.mark.parametrize('change, message', [
    ({'dropout': 0.5}, 'merges at random .dropout 0.5'), ({'continuing_subword_prefix': '##'}, 'cannot be read as a tokenizer'),  # Panics.
    ({'vocab': {}, 'merges': []}, 'no token for 96 characters of plain text')])
def test_vocabularies_that_cannot_serve(tmp_path, change, message):
  folder = factory.write_folder(tmp_path, factory.small_backend(('</s>',)), tokenizer_config={'eos_token': '</s>'})
  spec = json.loads((folder / 'tokenizer.json').read_text())
  spec['model'] |= change
  (folder / 'tokenizer.json').write_text(json.dumps(spec))
  with pytest.raises(ValueError, match=message):
    tokenizers.from_folder(folder)


@pytest.mark.parametrize('size', ['444', 444.0, -1, [444], True, 10**15])
def test_a_size_of_the_vocabulary_that_is_none(tmp_path, size):
  factory.write_folder(tmp_path, factory.small_backend(('</s>',)), tokenizer_config={'eos_token': '</s>'}, config={'vocab_size': size})
  with pytest.raises(ValueError, match='config.json: vocab_size must be an integer from 1 to 4194304'):
    tokenizers.load(str(tmp_path))


def test_a_number_too_long_is_told_with_its_file(tmp_path):
  small(tmp_path, tokenizer_config={'eos_token': '</s>'})
  (tmp_path / 'config.json').write_text('{"vocab_size": ' + '9' * 5000 + '}')
  with pytest.raises(ValueError, match='config.json is not valid JSON'):
    tokenizers.load(str(tmp_path))


def test_a_tokenizer_larger_than_the_model(tmp_path):
  folder = factory.write_folder(tmp_path, factory.small_backend(('</s>',)), tokenizer_config={'eos_token': '</s>'})
  assert tokenizers.from_folder(folder, vocab_size=500).token_bytes(499) == b''
  with pytest.raises(ValueError, match="the id 440 .'</s>'., but the vocabulary of the model has 440 rows"):
    tokenizers.from_folder(folder, vocab_size=440)


def test_kinds_without_exact_bytes_are_refused(tmp_path):
  vocab = {'<unk>': 0, 'a': 1, 'b': 2, '</s>': 3}
  models = {
      'WordLevel': library.models.WordLevel(vocab, unk_token='<unk>'), 'WordPiece': library.models.WordPiece(vocab, unk_token='<unk>'),
      'Unigram': library.models.Unigram([(t, -1.0) for t in vocab], unk_id=0), 'neither byte-level nor': library.models.BPE(vocab, []),
      'no token for 256 of them': library.models.BPE(vocab, [], byte_fallback=True)}
  for message, model in models.items():
    folder = factory.write_folder(tmp_path / message[:5], library.Tokenizer(model), tokenizer_config={'eos_token': '</s>'})
    with pytest.raises(ValueError, match=message):
      tokenizers.from_folder(folder)


def test_plain_added_tokens_keep_their_ids_without_the_control_tokens(tmp_path):
  backend = factory.small_backend(('<s>', '</s>'))
  backend.add_tokens([library.AddedToken('    ', normalized=False), library.AddedToken('<tool_call>', normalized=False)])
  found = tokenizers.from_folder(factory.write_folder(tmp_path, backend, tokenizer_config={'eos_token': '</s>'}))
  assert found.encode('a    b', parse_special=False) == backend.encode('a    b').ids and 442 in found.encode('a    b', parse_special=False)
  assert found.markup == {'<tool_call>'} and set(found.specials) == {'<s>', '</s>', '<tool_call>'}


# --- Sentencepiece-style BPE with byte fallback ------------------------------------------------------------------------------------


def llama2_backend(prefix):
  """A BPE with byte fallback; `prefix`: 'normalizer' (Llama 2), 'first' or 'always' (Metaspace), 'none' (Gemma)."""
  pieces = ['<unk>', '<s>', '</s>', *(f'<0x{b:02X}>' for b in range(256)), '\u2581', 'a', 'b', 'c', '\u2581a', 'bc', '\u2581abc', 'é']
  merges = [('\u2581', 'a'), ('b', 'c'), ('\u2581a', 'bc')]
  backend = library.Tokenizer(library.models.BPE(
      {p: i for i, p in enumerate(pieces)}, merges, unk_token='<unk>', fuse_unk=True, byte_fallback=True))
  replace = library.normalizers.Replace(' ', '\u2581')
  if prefix == 'normalizer':
    backend.normalizer = library.normalizers.Sequence([library.normalizers.Prepend('\u2581'), replace])
  elif prefix == 'none':
    backend.normalizer = replace
  else:
    backend.pre_tokenizer = library.pre_tokenizers.Metaspace(prepend_scheme=prefix, split=False)
  backend.decoder = library.decoders.Sequence([
      library.decoders.Replace('\u2581', ' '), library.decoders.ByteFallback(), library.decoders.Fuse()])
  backend.add_special_tokens(['<unk>', '<s>', '</s>'])
  return backend


@pytest.mark.parametrize('prefix', ['normalizer', 'first', 'always', 'none'])
def test_byte_fallback(tmp_path, prefix):
  backend = llama2_backend(prefix)
  found = tokenizers.from_folder(factory.write_folder(tmp_path, backend, tokenizer_config={'eos_token': '</s>', 'bos_token': '<s>'}))
  text = 'abc é\n🎉 abc'
  blank = '' if prefix == 'none' else ' '
  assert found.encode(text) == backend.encode(text).ids and found.decode(found.encode(text)) == blank + text
  whole = '<s>abc</s>abc'
  assert found.encode(whole) == backend.encode(whole, add_special_tokens=False).ids
  # Runs put together give the ids of the whole; what is appended to text gets no blank of its own.
  parts = found.split(whole)
  assert [1, *found.encode_run(parts[1], after='special'), 2, *found.encode_run(parts[3], after='special')] == found.encode(whole)
  for string in (text, 'abc', '\n', ' a'):
    assert found.decode(found.encode_run(string, after='text')) == string
  assert found.token_bytes(3 + 0x0A) == b'\n' and found.token_bytes(backend.token_to_id('\u2581abc')) == b' abc'
  assert not set(found.encode('<s></s>', parse_special=False)) & {1, 2}


def test_a_special_token_that_text_yields_is_refused(tmp_path):
  backend = factory.small_backend()
  piece = max((p for p in backend.get_vocab() if p.isascii()), key=len)
  assert len(piece) > 2 and len(backend.encode(piece).ids) == 1
  backend.add_special_tokens([piece, '</s>'])
  folder = factory.write_folder(tmp_path, backend, tokenizer_config={'eos_token': '</s>'})
  with pytest.raises(ValueError, match='Plain text yields the special token'):
    tokenizers.from_folder(folder)


def test_load_takes_a_folder_with_a_model_config(tmp_path):
  shutil.copy(factory.qwen3_folder() / 'tokenizer.json', tmp_path)
  (tmp_path / 'config.json').write_text(json.dumps({'vocab_size': 151936, 'eos_token_id': 151645}))
  found = tokenizers.load(str(tmp_path))
  assert (found.vocab_size, found.stop_ids, found.pad_id, found.token_bytes(151900)) == (151936, (151645,), 151645, b'')
