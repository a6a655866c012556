"""Tokenizers: byte, and the one in the GGUF file of SmolLM2."""

import json
import pathlib
import random

from hypothesis import given, settings, strategies as st
import pytest

from sao_jax.config import ModelConfig
from sao_jax.models import files
from sao_jax.models import tokenizers

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
  with pytest.raises(ValueError, match='tokenizer_config.json is missing'):
    tokenizers.from_folder(tmp_path)
  smollm2.save(tmp_path)
  (tmp_path / 'tokenizer.json').write_text('{"version": "1.0"')
  with pytest.raises(ValueError, match='cannot be read as a tokenizer'):
    tokenizers.from_folder(tmp_path)
  (tmp_path / 'tokenizer.json').unlink()
  with pytest.raises(ValueError, match='tokenizer.json is missing'):
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


def test_ids_that_only_pad_the_embedding_have_no_text():
  tokenizer = tokenizers.ByteTokenizer(264)
  assert tokenizer.decode([65, 263, 66]) == 'AB'
  with pytest.raises(ValueError, match='outside the vocabulary'):
    tokenizer.token_bytes(264)
  with pytest.raises(ValueError, match='at least 259'):
    tokenizers.ByteTokenizer(258)
