"""Tokenizers: text to ids and back, losslessly.

Ids are what travels and what is trained; text only goes to environments and people. `decode` therefore shows special tokens and never
drops any, and `token_bytes` gives the exact bytes behind one id, so that a stop string can be found across token borders.
"""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any, Iterable, Protocol

from sao_jax.config import ModelConfig
from sao_jax.models import files


class Tokenizer(Protocol):
  """What the rest of the library needs of a tokenizer.

  Attributes:
    vocab_size: number of ids, 0 to vocab_size - 1.
    pad_id: fills padded positions; never told apart from others by its value.
    stop_ids: ids that end a turn.
    chat_template: Jinja text of the model's chat format, '' where it has none.
  """

  vocab_size: int
  pad_id: int
  stop_ids: tuple[int, ...]
  chat_template: str

  def encode(self, text: str, *, parse_special: bool = True) -> list[int]:
    """Ids of `text`, nothing added. With `parse_special`, the text of a special token becomes its id; without, it is like any other."""
    ...

  def decode(self, ids: Iterable[int]) -> str:
    """Text of `ids` with special tokens shown; bytes that are not UTF-8 become U+FFFD."""
    ...

  def token_bytes(self, token: int) -> bytes:
    """The bytes that `token` stands for; for a special token, those of its name."""
    ...

  def special_id(self, name: str) -> int:
    """Id of the special token `name`. Raises ValueError if there is none."""
    ...

  def save(self, folder: pathlib.Path) -> None:
    """Writes the tokenizer into `folder`, so that `load` finds it there."""
    ...


class _Base:
  """What every tokenizer derives from `token_bytes` and its special tokens."""

  specials: dict[str, int]
  vocab_size: int

  def token_bytes(self, token: int) -> bytes:
    raise NotImplementedError

  def decode(self, ids: Iterable[int]) -> str:
    return b''.join(self.token_bytes(int(i)) for i in ids).decode('utf-8', 'replace')

  def special_id(self, name: str) -> int:
    if name not in self.specials:
      raise ValueError(f'No special token {name!r}; this tokenizer has {", ".join(self.specials)}.')
    return self.specials[name]

  def _check(self, token: int) -> None:
    if not 0 <= token < self.vocab_size:
      raise ValueError(f'Token id {token} is outside the vocabulary 0..{self.vocab_size - 1}.')


class ByteTokenizer(_Base):
  """Ids 0..255 are bytes of UTF-8; 256 pad, 257 start of text, 258 end of turn. Ids from 259 on only pad the embedding: no bytes."""

  NAME = 'sao_jax.ByteTokenizer'
  NUM_IDS = 259
  pad_id = 256
  bos_id = 257
  stop_ids = (258,)
  chat_template = ''
  specials = {'<|pad|>': 256, '<|start|>': 257, '<|end|>': 258}

  def __init__(self, vocab_size: int = NUM_IDS):
    """`vocab_size` is the model's. Raises ValueError where it is too small."""
    if vocab_size < self.NUM_IDS:
      raise ValueError(f'model.vocab_size must be at least {self.NUM_IDS} for the byte tokenizer, got {vocab_size}.')
    self.vocab_size = vocab_size
    self._pattern = re.compile('(' + '|'.join(map(re.escape, self.specials)) + ')')
    self._names = {i: name.encode() for name, i in self.specials.items()}

  def encode(self, text: str, *, parse_special: bool = True) -> list[int]:
    if not parse_special:
      return list(text.encode('utf-8'))
    ids: list[int] = []
    for part in self._pattern.split(text):
      ids += [self.specials[part]] if part in self.specials else part.encode('utf-8')
    return ids

  def token_bytes(self, token: int) -> bytes:
    self._check(token)
    return self._names.get(token, b'') if token > 255 else bytes([token])

  def save(self, folder: pathlib.Path) -> None:
    """Writes a `tokenizer_config.json` that `load` knows."""
    (folder / 'tokenizer_config.json').write_text(json.dumps({'tokenizer_class': self.NAME}))


def _byte_alphabet() -> dict[str, int]:
  """The printable character that byte-level BPE writes for each byte, and its byte (GPT-2's table)."""
  printable = [*range(ord('!'), ord('~') + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
  others = [b for b in range(256) if b not in printable]
  return {**{chr(b): b for b in printable}, **{chr(256 + n): b for n, b in enumerate(others)}}


class PretrainedTokenizer(_Base):
  """A byte-level BPE of the `tokenizers` library, with the ids and the chat template of its model."""

  def __init__(self, backend: Any, *, pad_id: int, stop_ids: tuple[int, ...], chat_template: str, vocab_size: int | None = None):
    """Wraps `backend` (a `tokenizers.Tokenizer`); `vocab_size` is the model's, where its embedding has more rows than the tokenizer ids."""
    self._plain = backend
    self._special = type(backend).from_str(backend.to_str())
    self._plain.encode_special_tokens = True  # Special tokens in the text are text.
    self.pad_id, self.stop_ids, self.chat_template = pad_id, stop_ids, chat_template
    self.vocab_size = backend.get_vocab_size(with_added_tokens=True) if vocab_size is None else vocab_size
    added = sorted(backend.get_added_tokens_decoder().items())
    self.specials = {token.content: i for i, token in added}
    self._bytes = _token_bytes(backend, self.specials, self.vocab_size)

  def encode(self, text: str, *, parse_special: bool = True) -> list[int]:
    backend = self._special if parse_special else self._plain
    return backend.encode(text, add_special_tokens=False).ids

  def token_bytes(self, token: int) -> bytes:
    self._check(token)
    return self._bytes[token]

  def save(self, folder: pathlib.Path) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`, as Hugging Face names them."""
    (folder / 'tokenizer.json').write_text(self._special.to_str(pretty=False))
    names = {i: name for name, i in self.specials.items()}
    settings = {
        'tokenizer_class': 'PreTrainedTokenizerFast', 'chat_template': self.chat_template, 'clean_up_tokenization_spaces': False,
        'eos_token': names.get(self.stop_ids[0]), 'pad_token': names.get(self.pad_id),
    }
    (folder / 'tokenizer_config.json').write_text(json.dumps(settings, indent=2))


def _token_bytes(backend: Any, specials: dict[str, int], vocab_size: int) -> list[bytes]:
  """Bytes of every id; b'' for ids that only pad the embedding. Raises ValueError where the vocabulary is not byte-level."""
  alphabet = _byte_alphabet()
  table = [b''] * vocab_size
  for piece, i in backend.get_vocab(with_added_tokens=True).items():
    if piece in specials:
      table[i] = piece.encode('utf-8')
    elif all(c in alphabet for c in piece):
      table[i] = bytes(alphabet[c] for c in piece)
    else:
      raise ValueError(f'Token {piece!r} is not written in the byte-level alphabet; only byte-level BPE tokenizers are supported.')
  return table


# --- From files ----------------------------------------------------------------------------------------------------------------


def from_gguf(reader: Any, label: str) -> PretrainedTokenizer:
  """The tokenizer in the metadata of an open GGUF file, `smollm` only: single digits split off, then byte-level BPE.

  Its vocabulary has no token for six control characters and some bytes of rare scripts; as in the original, `encode` leaves them out.
  Raises ValueError for another tokenizer: GGUF only names its pre-tokenizer, so each must be known here.
  """
  library = files.need('tokenizers')
  field = lambda name: files.gguf_field(reader, f'tokenizer.ggml.{name}', label)
  model, pre = field('model'), field('pre')
  if (model, pre) != ('gpt2', 'smollm'):
    raise ValueError(f'{label}: tokenizer {model!r} with pre-tokenizer {pre!r} is not supported, only gpt2 with smollm.')
  tokens, kinds = field('tokens'), field('token_type')
  merges = [tuple(m.split(' ')) for m in field('merges')]
  backend = library.Tokenizer(library.models.BPE({t: i for i, t in enumerate(tokens)}, merges))
  backend.pre_tokenizer = library.pre_tokenizers.Sequence([
      library.pre_tokenizers.Digits(individual_digits=True), library.pre_tokenizers.ByteLevel(add_prefix_space=False)])
  backend.decoder = library.decoders.ByteLevel()
  control = 3  # GGUF's token type of control tokens.
  backend.add_special_tokens([library.AddedToken(t, special=True, normalized=False) for t, kind in zip(tokens, kinds) if kind == control])
  template = reader.fields.get('tokenizer.chat_template')
  return PretrainedTokenizer(
      backend, pad_id=field('padding_token_id'), stop_ids=(field('eos_token_id'),), chat_template=template.contents() if template else '')


def from_folder(folder: pathlib.Path, vocab_size: int | None = None) -> PretrainedTokenizer:
  """The tokenizer of a Hugging Face folder: `tokenizer.json` and `tokenizer_config.json`. Raises ValueError if it does not fit."""
  library = files.need('tokenizers')
  settings = files.read_json(folder / 'tokenizer_config.json')
  path = folder / 'tokenizer.json'
  if not path.is_file():
    raise ValueError(f'{path} is missing; the folder of a pretrained model needs it.')
  try:
    backend = library.Tokenizer.from_file(str(path))
  except Exception as error:  # The library raises a bare Exception on bad JSON.
    raise ValueError(f'{path} cannot be read as a tokenizer: {error}') from error

  def id_of(name: str) -> int | None:
    token = settings.get(name)
    token = token.get('content') if isinstance(token, dict) else token
    return None if token is None else backend.token_to_id(token)

  stop, pad = id_of('eos_token'), id_of('pad_token')
  if stop is None:
    raise ValueError(f'{folder / "tokenizer_config.json"} names no eos_token of the vocabulary; it is needed to end turns.')
  return PretrainedTokenizer(
      backend, pad_id=stop if pad is None else pad, stop_ids=(stop,), chat_template=_template(folder, settings), vocab_size=vocab_size)


def _template(folder: pathlib.Path, settings: dict[str, Any]) -> str:
  """Chat template of a Hugging Face folder: in its own file, or in the settings."""
  path = folder / 'chat_template.jinja'
  return path.read_text() if path.is_file() else settings.get('chat_template') or ''


def make(config: ModelConfig) -> Tokenizer:
  """The tokenizer that `config.tokenizer` names. Raises ValueError where it does not fit the model's vocabulary."""
  if config.tokenizer == 'byte':
    return ByteTokenizer(config.vocab_size)
  if config.tokenizer != 'pretrained':
    raise ValueError(f"model.tokenizer must be 'byte' or 'pretrained', got {config.tokenizer!r}.")
  if not config.pretrained:
    raise ValueError("model.tokenizer='pretrained' needs model.pretrained to name a model.")
  return load(config.pretrained)


def load(name: str) -> Tokenizer:
  """Tokenizer of a pretrained model: a known name, a .gguf file, or a Hugging Face folder."""
  path = files.locate(name)
  if path.is_dir():
    if files.read_json(path / 'tokenizer_config.json').get('tokenizer_class') == ByteTokenizer.NAME:
      return ByteTokenizer()
    return from_folder(path, files.read_json(path / 'config.json').get('vocab_size'))
  return from_gguf(files.open_gguf(path), str(path))


