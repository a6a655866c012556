"""Tokenizers: text to ids and back, losslessly.

Ids are what travels and what is trained; text only goes to environments and people. `decode` therefore shows special tokens and never
drops any, and `token_bytes` gives the exact bytes behind one id, so that a stop string can be found across token borders.

Two kinds of vocabulary have exact bytes and are supported, both BPE: byte-level (GPT-2's alphabet; Llama 3, Qwen, GLM, SmolLM) and
sentencepiece-style with byte fallback ('▁' for a blank, '<0x0A>' for a byte; Llama 2, Mistral, Gemma). Others are refused.

Added tokens are of three kinds: special ones (`<|im_end|>`); markup, written `<...>` or `[...]` but not marked special (`<tool_call>`); and
plain pieces of text (runs of blanks), which are like any other token. The first two are control tokens: text of users and environments
never yields them.
"""

from __future__ import annotations

import copy
import json
import pathlib
import re
from typing import Any, Callable, Iterable, Mapping, Protocol

from sao_jax.config import ModelConfig
from sao_jax.models import files


FILES = ('tokenizer.json', 'tokenizer_config.json')  # A folder with one of these has a tokenizer.
MOST_IDS = 2**22


class Tokenizer(Protocol):
  """What the rest of the library needs of a tokenizer.

  Attributes:
    vocab_size: number of ids, 0 to vocab_size - 1.
    pad_id: fills padded positions; never told apart from others by its value.
    stop_ids: ids that end a turn, at least one; `pad_id` may be one of them.
    chat_template: Jinja text of the model's chat format, '' where it has none.
    names: what templates know of special tokens, e.g. {'bos_token': '<s>'}.
  """

  vocab_size: int
  pad_id: int
  stop_ids: tuple[int, ...]
  chat_template: str
  names: dict[str, str]

  def encode(self, text: str, *, parse_special: bool = True) -> list[int]:
    """Ids of `text`, nothing added. With `parse_special`, the text of a control token becomes its id; without, it is like any other."""
    ...

  def encode_run(self, text: str, *, after: str) -> list[int]:
    """Ids of `text` without control tokens, as a part of a longer sequence.

    Args:
      after: what stands before it: 'start' (nothing), 'special' (a control token) or 'text'. Some tokenizers put a blank before a word at
        the first two; none does in the middle of text, so that what is appended is exactly what was said.
    """
    ...

  def split(self, text: str, *, markup_only: bool = False) -> list[str | int]:
    """`text` cut at control tokens: their ids, and the text between them; with `markup_only`, special ones are text."""
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

  specials: dict[str, int]  # Control tokens.
  markup: frozenset[str] = frozenset()  # Those of them that are not marked special.
  names: dict[str, str] = {}
  vocab_size: int

  def encode(self, text: str, *, parse_special: bool = True) -> list[int]:
    raise NotImplementedError

  def encode_run(self, text: str, *, after: str) -> list[int]:
    del after
    return self.encode(text, parse_special=False)

  def split(self, text: str, *, markup_only: bool = False) -> list[str | int]:
    return _cut(text, self.specials, self._pattern(markup_only))

  def _pattern(self, markup_only: bool) -> re.Pattern[str] | None:
    """Finds control tokens, the longest where several begin at one place; None where there is none."""
    cache = self.__dict__.setdefault('_patterns', {})
    if markup_only not in cache:
      names = sorted((n for n in self.specials if not markup_only or n in self.markup), key=len, reverse=True)
      cache[markup_only] = re.compile('|'.join(f'(?P<t{i}>{self._form(name)})' for i, name in enumerate(names))) if names else None
    return cache[markup_only]

  def _form(self, name: str) -> str:
    """Regular expression of a control token in text."""
    return re.escape(name)

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


def _cut(text: str, ids: dict[str, int], pattern: re.Pattern[str] | None) -> list[str | int]:
  parts: list[str | int] = []
  start = 0
  for found in pattern.finditer(text) if pattern else ():
    parts += [text[start:found.start()]] if found.start() > start else []
    # A form may take blanks around a token with it; its name is what is left.
    parts.append(ids[found[0]] if found[0] in ids else ids[found[0].strip()])
    start = found.end()
  return parts + ([text[start:]] if start < len(text) else [])


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
    self._names = {i: name.encode() for name, i in self.specials.items()}

  def encode(self, text: str, *, parse_special: bool = True) -> list[int]:
    if not parse_special:
      return list(text.encode('utf-8'))
    ids: list[int] = []
    for part in self.split(text):
      ids += [part] if isinstance(part, int) else part.encode('utf-8')
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


BLANK = '\u2581'  # How sentencepiece writes a blank.
_MARKUP = re.compile(r'<[^<>\s]+>|\[[^\[\]\s]+\]')
_BYTE = re.compile(r'<0x([0-9A-F]{2})>')


class PretrainedTokenizer(_Base):
  """A BPE of the `tokenizers` library, with the ids and the chat template of its model."""

  def __init__(
      self, backend: Any, *, pad_id: int, stop_ids: tuple[int, ...], chat_template: str, vocab_size: int | None = None,
      names: dict[str, str] | None = None,
  ):
    """Wraps a tokenizer.

    Args:
      backend: a `tokenizers.Tokenizer`.
      pad_id, stop_ids, chat_template, names: as in `Tokenizer`.
      vocab_size: rows of the model's embedding, where it has more of them than the tokenizer has ids.

    Raises:
      ValueError: a vocabulary without exact bytes, ids outside of `vocab_size`, or a special token that plain text would yield.
    """
    added = {token.content: (i, token) for i, token in backend.get_added_tokens_decoder().items()}
    control = {n for n, (_, token) in added.items() if token.special or _MARKUP.fullmatch(n)}
    self.specials = {n: i for n, (i, _) in sorted(added.items(), key=lambda item: item[1][0]) if n in control}
    self.markup = frozenset(n for n in control if not added[n][1].special)
    self._flags = {n: added[n][1] for n in control}
    self.pad_id, self.stop_ids, self.chat_template, self.names = pad_id, tuple(stop_ids), chat_template, dict(names or {})
    vocabulary = backend.get_vocab(with_added_tokens=True)
    largest = max(vocabulary, key=vocabulary.get)
    self.vocab_size = vocabulary[largest] + 1 if vocab_size is None else vocab_size
    if vocabulary[largest] >= self.vocab_size:
      raise ValueError(
          f'The tokenizer has the id {vocabulary[largest]} ({largest!r}), but the vocabulary of the model has {self.vocab_size} rows; they '
          'do not belong together.')
    _check_ids(self.vocab_size, pad_id, self.stop_ids)
    self._special = backend
    spec = json.loads(backend.to_str())
    self._bytes = _token_bytes(spec, vocabulary, set(added), self.vocab_size)
    self._prefix = _prefix(spec)
    spec['added_tokens'] = [token for token in spec['added_tokens'] if token['content'] not in control]
    spec['post_processor'] = spec['truncation'] = spec['padding'] = None
    self._plain = self._bare = type(backend).from_str(json.dumps(spec))
    if self._prefix:
      self._bare = type(backend).from_str(json.dumps(_without_prefix(spec)))
    kept = [name for name in added if name not in control]  # Their ids may have moved up to where control tokens were.
    self._moved = {j: added[n][0] for n in kept if (j := self._plain.token_to_id(n)) != added[n][0]}
    for name, (i, token) in added.items():
      if token.special and i in self._run(self._bare, name):
        raise ValueError(f'Plain text yields the special token {name!r}, so anybody could forge it; such a tokenizer is not supported.')

  def encode(self, text: str, *, parse_special: bool = True) -> list[int]:
    return self._special.encode(text, add_special_tokens=False).ids if parse_special else self._run(self._plain, text)

  def _run(self, backend: Any, text: str) -> list[int]:
    ids = backend.encode(text, add_special_tokens=False).ids
    return [self._moved.get(i, i) for i in ids] if self._moved else ids

  def encode_run(self, text: str, *, after: str) -> list[int]:
    prefixed = after == 'start' and self._prefix or after == 'special' and self._prefix == 'always'
    return self._run(self._plain if prefixed else self._bare, text)

  def _form(self, name: str) -> str:
    token, form = self._flags[name], re.escape(name)
    form = rf'(?<!\w){form}(?!\w)' if token.single_word else form
    return (r'\s*' if token.lstrip else '') + form + (r'\s*' if token.rstrip else '')

  def token_bytes(self, token: int) -> bytes:
    self._check(token)
    return self._bytes[token]

  def save(self, folder: pathlib.Path) -> None:
    """Writes `tokenizer.json`, `tokenizer_config.json` and, for several stop ids, `generation_config.json`, as Hugging Face names them."""
    (folder / 'tokenizer.json').write_text(self._special.to_str(pretty=False), encoding='utf-8')
    texts = {i: name for name, i in self._special.get_vocab(with_added_tokens=True).items() if i in (self.pad_id, self.stop_ids[0])}
    settings = {
        'tokenizer_class': 'PreTrainedTokenizerFast', 'chat_template': self.chat_template, 'clean_up_tokenization_spaces': False,
        **self.names, 'eos_token': texts.get(self.stop_ids[0]), 'pad_token': texts.get(self.pad_id),
    }
    (folder / 'tokenizer_config.json').write_text(json.dumps(settings, indent=2), encoding='utf-8')
    if len(self.stop_ids) > 1:
      generation = {'eos_token_id': list(self.stop_ids), 'pad_token_id': self.pad_id}
      (folder / 'generation_config.json').write_text(json.dumps(generation, indent=2), encoding='utf-8')


def _check_ids(vocab_size: int, pad_id: int, stop_ids: tuple[int, ...]) -> None:
  if not stop_ids:
    raise ValueError('A tokenizer needs at least one stop id, to end turns.')
  for name, i in [*(('stop id', i) for i in stop_ids), ('pad id', pad_id)]:
    if not 0 <= i < vocab_size:
      raise ValueError(f'The {name} {i} is outside the vocabulary 0..{vocab_size - 1}.')


def _prefix(spec: dict[str, Any]) -> str:
  """Where the tokenizer puts a blank before a text: '' (nowhere), 'first' (at the start of a sequence) or 'always' (of each run)."""
  prefix = ''
  for part in _parts(spec):
    if part['type'] == 'Prepend' or (part['type'] == 'ByteLevel' and part.get('add_prefix_space')):
      prefix = 'always'
    elif part['type'] == 'Metaspace' and part.get('prepend_scheme', 'always') != 'never':
      prefix = part.get('prepend_scheme', 'always')
  return prefix


def _parts(spec: dict[str, Any]) -> list[dict[str, Any]]:
  """Normalizers and pre-tokenizers of a tokenizer.json, those in sequences too."""
  todo, found = [spec.get('normalizer'), spec.get('pre_tokenizer')], []
  while todo:
    part = todo.pop(0)
    if part:
      found.append(part)
      todo += part.get('normalizers', []) + part.get('pretokenizers', [])
  return found


def _without_prefix(spec: dict[str, Any]) -> dict[str, Any]:
  """The tokenizer.json of the same tokenizer, which puts no blank before a text."""
  spec = copy.deepcopy({**spec, 'model': None}) | {'model': spec['model']}
  if (spec['normalizer'] or {}).get('type') == 'Prepend':
    spec['normalizer'] = None
  for part in _parts(spec):
    if part['type'] == 'Metaspace':
      part['prepend_scheme'] = 'never'
    elif part['type'] == 'ByteLevel':
      part['add_prefix_space'] = False
    elif part['type'] == 'Sequence' and 'normalizers' in part:
      part['normalizers'] = [p for p in part['normalizers'] if p['type'] != 'Prepend']
  return spec


def _token_bytes(spec: dict[str, Any], vocabulary: Mapping[str, int], added: set[str], vocab_size: int) -> list[bytes]:
  """Bytes of every id; b'' for ids that only pad the embedding. Raises ValueError where a vocabulary has no exact bytes."""
  kind = spec['model'].get('type')
  if kind not in (None, 'BPE'):
    raise ValueError(
        f'The tokenizer is of type {kind}; supported are byte-level BPE and BPE with byte fallback, whose tokens have exact bytes.')
  if spec['model'].get('dropout'):
    raise ValueError(f'The tokenizer merges at random (dropout {spec["model"]["dropout"]}); set dropout to null in tokenizer.json.')
  if spec['model'].get('byte_fallback'):
    bytes_of = _fallback_bytes(vocabulary)
  elif any(part['type'] == 'ByteLevel' for part in _parts(spec)):
    alphabet = _byte_alphabet()
    bytes_of = lambda piece: bytes([alphabet[c] for c in piece])
    absent = [c for c, b in alphabet.items() if (32 <= b < 127 or b == 10) and c not in vocabulary]
    if absent:
      raise ValueError(f'The tokenizer has no token for {len(absent)} characters of plain text (the first: {chr(alphabet[absent[0]])!r}).')
  else:
    raise ValueError('The tokenizer is a BPE that is neither byte-level nor with byte fallback: text outside its vocabulary would be lost.')
  table = [b''] * vocab_size
  for piece, i in vocabulary.items():
    try:
      table[i] = piece.encode('utf-8') if piece in added else bytes_of(piece)
    except KeyError:
      raise ValueError(f'Token {piece!r} is not written in the byte-level alphabet, though the tokenizer is byte-level.') from None
  return table


def _fallback_bytes(vocabulary: Mapping[str, int]) -> Callable[[str], bytes]:
  """Bytes of a piece of a sentencepiece-style vocabulary. Raises ValueError where a byte has no token."""
  absent = [b for b in range(256) if f'<0x{b:02X}>' not in vocabulary]
  if absent:
    raise ValueError(f'The tokenizer falls back to bytes, but has no token for {len(absent)} of them (the first: <0x{absent[0]:02X}>).')

  def bytes_of(piece: str) -> bytes:
    found = _BYTE.fullmatch(piece)
    return bytes([int(found[1], 16)]) if found else piece.replace(BLANK, ' ').encode('utf-8')

  return bytes_of


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
  named = [name for name in ('bos', 'eos') if f'tokenizer.ggml.{name}_token_id' in reader.fields]
  names = {f'{name}_token': tokens[field(f'{name}_token_id')] for name in named}
  return PretrainedTokenizer(
      backend, pad_id=field('padding_token_id'), stop_ids=(field('eos_token_id'),), chat_template=template.contents() if template else '',
      names=names)


def from_folder(folder: pathlib.Path, vocab_size: int | None = None) -> PretrainedTokenizer:
  """The tokenizer of a Hugging Face folder.

  `tokenizer.json` must be there; `tokenizer_config.json`, `special_tokens_map.json`, `generation_config.json`, `config.json` and
  `chat_template.jinja` are read where they are. Stop ids are the tokenizer's eos token and all of `eos_token_id` in the two configs; the
  pad id is the first stop id where none is named.

  Args:
    folder: of a model or of a tokenizer.
    vocab_size: rows of the model's embedding; None: as many as the tokenizer has ids.

  Raises:
    ValueError: a file is missing, damaged or contradicts another, or the kind of tokenizer is not supported; the message names the file.
  """
  library = files.need('tokenizers')
  settings = {**_optional_json(folder / 'special_tokens_map.json'), **_optional_json(folder / 'tokenizer_config.json')}
  path = folder / 'tokenizer.json'
  if not files.has(path):
    raise ValueError(f'{path} is missing; the folder of a pretrained model needs it.{_other_format(folder)}')
  try:
    backend = library.Tokenizer.from_str(path.read_text(encoding='utf-8'))
  except BaseException as error:  # The library raises a bare Exception on bad JSON, and what is not even one where its own code panics.
    if not isinstance(error, Exception) and type(error).__name__ != 'PanicException':
      raise
    raise ValueError(f'{path} cannot be read as a tokenizer: {error}.{files.pointer_hint(path)}') from error
  _add_tokens(library, backend, settings, folder)
  names = _special_names(backend, settings, folder)
  stops, pad = _stops_and_pad(backend, names, folder)
  try:
    return PretrainedTokenizer(
        backend, pad_id=stops[0] if pad is None else pad, stop_ids=stops, chat_template=_template(folder, settings),
        vocab_size=vocab_size, names=names)
  except ValueError as error:
    raise ValueError(str(error) if str(error).startswith(f'{folder}/') else f'{folder}: {error}') from error


def _optional_json(path: pathlib.Path) -> dict[str, Any]:
  return files.read_json(path) if files.has(path) else {}


def _other_format(folder: pathlib.Path) -> str:
  for name in ('tokenizer.model', 'vocab.json', 'vocab.txt', 'tiktoken.model'):
    if (folder / name).is_file():
      return f' It has {name}; make the other from it with transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...).'
  return ''


def _add_tokens(library: Any, backend: Any, settings: Mapping[str, Any], folder: pathlib.Path) -> None:
  """Adds the tokens that only `tokenizer_config.json` knows, as transformers does. Raises ValueError where they get another id."""
  declared, label = settings.get('added_tokens_decoder') or {}, folder / 'tokenizer_config.json'
  if not isinstance(declared, dict):
    raise ValueError(f'{label}: added_tokens_decoder must be an object, got {type(declared).__name__}.')
  for key, token in declared.items():
    content = token.get('content') if isinstance(token, dict) else None
    if not re.fullmatch('[0-9]{1,9}', key) or not isinstance(content, str) or not content or not _is_unicode(content):
      raise ValueError(f'{label}: added_tokens_decoder must map ids to objects with a content, got {key!r:.80}: {token!r:.80}.')
  known = backend.get_added_tokens_decoder()
  for key, token in sorted(declared.items(), key=lambda item: int(item[0])):
    if int(key) in known:
      if known[int(key)].content != token['content']:
        raise ValueError(
            f'{label} gives the id {key} to {token["content"]!r}, tokenizer.json to {known[int(key)].content!r}; the two files do not '
            'belong together.')
      continue
    flags = {name: bool(token.get(name, False)) for name in ('single_word', 'lstrip', 'rstrip', 'normalized', 'special')}
    backend.add_tokens([library.AddedToken(token['content'], **flags)])
    if backend.token_to_id(token['content']) != int(key):
      raise ValueError(
          f'{label} gives {token["content"]!r} the id {key}, tokenizer.json makes it '
          f'{backend.token_to_id(token["content"])}; the two files do not belong together.')


def _special_names(backend: Any, settings: Mapping[str, Any], folder: pathlib.Path) -> dict[str, str]:
  """Texts of the bos, eos, pad and unk tokens that are named. Raises ValueError where one is not in the vocabulary."""
  names = {}
  for name in ('bos_token', 'eos_token', 'pad_token', 'unk_token'):
    token = settings.get(name)
    token = token.get('content') if isinstance(token, dict) else token
    if token is None:
      continue
    if not isinstance(token, str) or backend.token_to_id(token) is None:
      raise ValueError(f'{folder / "tokenizer_config.json"} names the {name} {token!r}, which is not in the vocabulary of tokenizer.json.')
    names[name] = token
  return names


def _stops_and_pad(backend: Any, names: Mapping[str, str], folder: pathlib.Path) -> tuple[tuple[int, ...], int | None]:
  """All ids that end a turn, the tokenizer's own first, and the pad id; None if no file names one."""
  stops = [backend.token_to_id(names['eos_token'])] if 'eos_token' in names else []
  pad = backend.token_to_id(names['pad_token']) if 'pad_token' in names else None
  for name in ('generation_config.json', 'config.json'):
    values = _optional_json(folder / name)
    values = {**_text_config(values), **values}
    found = values.get('eos_token_id')
    for i in found if isinstance(found, list) else [] if found is None else [found]:
      if not isinstance(i, int) or isinstance(i, bool):
        raise ValueError(f'{folder / name}: eos_token_id must be an id or a list of ids, got {found!r}.')
      stops.append(i)
    found = values.get('pad_token_id')
    if found is not None and (not isinstance(found, int) or isinstance(found, bool)):
      raise ValueError(f'{folder / name}: pad_token_id must be an id, got {found!r}.')
    if pad is None and found is not None and found >= 0:
      pad = found
  if not stops:
    raise ValueError(
        f'{folder}: no file names an eos token, which is needed to end turns: eos_token in tokenizer_config.json, or eos_token_id in '
        'generation_config.json or config.json.')
  return tuple(dict.fromkeys(stops)), pad


def _text_config(values: Mapping[str, Any]) -> Mapping[str, Any]:
  """The settings of the language model, where config.json has them one level deeper."""
  found = values.get('text_config')
  return found if isinstance(found, dict) else {}


def _template(folder: pathlib.Path, settings: Mapping[str, Any]) -> str:
  """Chat template of a Hugging Face folder: in its own file, or in the settings. Of several named ones, 'default'."""
  path = folder / 'chat_template.jinja'
  if files.has(path):
    try:
      text = path.read_text(encoding='utf-8')
    except UnicodeDecodeError as error:
      raise ValueError(f'{path} is not UTF-8: {error}') from error
    if not text.strip():
      raise ValueError(f'{path} is empty; fetch it again, or remove it.')
    return text
  found = _optional_json(folder / 'chat_template.json').get('chat_template', settings.get('chat_template')) or ''
  if isinstance(found, list):
    named = {entry.get('name'): entry.get('template') for entry in found if isinstance(entry, dict)}
    if not isinstance(named.get('default'), str):
      raise ValueError(f'of its chat templates ({", ".join(map(str, named)) or "without names"}) none is named default.')
    return named['default']
  if not isinstance(found, str):
    raise ValueError(f'chat_template must be a text or a list of named texts, got {type(found).__name__}.')
  return found


def _is_unicode(text: str) -> bool:
  """Whether a text of a JSON file can be written: not where it has half of a surrogate pair."""
  try:
    text.encode('utf-8')
  except UnicodeEncodeError:
    return False
  return True


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
  if not path.is_dir():
    return from_gguf(files.open_gguf(path), str(path))
  if _optional_json(path / 'tokenizer_config.json').get('tokenizer_class') == ByteTokenizer.NAME:
    return ByteTokenizer()
  config = files.read_json(path / 'config.json')
  size = config.get('vocab_size') or _text_config(config).get('vocab_size')
  if size is not None and (isinstance(size, bool) or not isinstance(size, int) or not 0 < size <= MOST_IDS):
    raise ValueError(f'{path / "config.json"}: vocab_size must be an integer from 1 to {MOST_IDS}, got {size!r:.80}.')
  return from_folder(path, size)
