"""Patches in git's form, read, applied and written without git: on plain bytes, with nothing executed.

A tree is a function from path to `Entry` (None where there is none); a change is a mapping from path to `Entry`, or None for what is
deleted. Reading is strict about paths and numbers and lenient where `git apply` is: hunks may stand at other lines than they say.
"""

from __future__ import annotations

import base64
import dataclasses
import difflib
import hashlib
import os
import re
from typing import Callable, Mapping
import zlib

MAX_PATCH = 64 << 20  # Bytes of a patch, and of one file that comes of it.
MAX_WRITTEN, MAX_FILES = 256 << 20, 20_000  # Bytes and number of all files that come of it.
MAX_NAME, MAX_PATH = 255, 4000  # Bytes, as file systems have it; a link's target is a path.
FILE, EXECUTABLE, LINK, MODULE = 0o100644, 0o100755, 0o120000, 0o160000
MODES = (FILE, EXECUTABLE, LINK, MODULE)
_HUNK = re.compile(rb'@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@')
_ESCAPES = {b'n': b'\n', b't': b'\t', b'"': b'"', b'\\': b'\\', b'r': b'\r', b'a': b'\a', b'b': b'\b', b'f': b'\f', b'v': b'\v'}
_QUOTED = re.compile(rb'\\([0-7]{3}|.)', re.DOTALL)


class PatchError(ValueError):
  """A patch that cannot be read, or does not fit the tree."""


@dataclasses.dataclass(frozen=True)
class Entry:
  """A file: its mode (one of `MODES`) and its bytes; the target of a link; nothing for a submodule."""

  mode: int
  data: bytes


Change = dict[str, Entry | None]


@dataclasses.dataclass
class FilePatch:
  """What a patch says of one file. `hunks` are (old line, lines) each, a line with its mark; `binary` is the whole new content."""

  old: str | None = None
  new: str | None = None
  mode: int | None = None
  copied: bool = False
  hunks: list[tuple[int, list[bytes]]] = dataclasses.field(default_factory=list)
  binary: tuple[str, bytes] | None = None  # ('literal' | 'delta', inflated bytes).
  removed: bool = False
  created: bool = False


def check_path(path: str) -> str:
  """`path`. Raises PatchError unless it lies inside of the tree and outside of git's own folder."""
  parts = path.split('/')
  if not path or '\0' in path or any(p in ('', '.', '..') or p.lower() == '.git' for p in parts):
    raise PatchError(f'{path!r:.200} is no path inside of the repository')
  if len(os.fsencode(path)) > MAX_PATH or any(len(os.fsencode(p)) > MAX_NAME for p in parts):
    raise PatchError(f'{path!r:.200} is too long for a path')
  return path


# --- Reading ---------------------------------------------------------------------------------------------------------------------


def read(patch: bytes) -> list[FilePatch]:
  """The files of a patch, in order. Raises PatchError with what is wrong."""
  if len(patch) > MAX_PATCH:
    raise PatchError(f'the patch has {len(patch)} bytes; at most {MAX_PATCH} are read')
  lines = patch.split(b'\n')
  if lines and lines[-1] == b'':
    lines.pop()
  files: list[FilePatch] = []
  at = 0
  while at < len(lines):
    line = lines[at]
    if line.startswith(b'diff --git '):
      at = _read_file(lines, at, files)
    elif line.startswith(b'--- ') and at + 1 < len(lines) and lines[at + 1].startswith(b'+++ '):
      file = FilePatch()
      at = _read_body(lines, at, file)
      files.append(_named(file))
    elif line.startswith(b'@@ -'):
      raise PatchError(f'line {at + 1}: a hunk without a file')
    else:
      at += 1  # Text between patches.
  if not files and patch.strip():
    raise PatchError('it is no patch: there is no "diff --git" and no "---" in it')
  return files


def _read_file(lines: list[bytes], at: int, files: list[FilePatch]) -> int:
  """Reads one 'diff --git' section; gives the line after it."""
  file, header = FilePatch(), lines[at][len(b'diff --git '):]
  at += 1
  while at < len(lines):
    line = lines[at]
    for start, act in (
        (b'old mode ', None), (b'similarity index ', None), (b'dissimilarity index ', None), (b'index ', _index_mode),
        (b'new mode ', _mode), (b'new file mode ', _created), (b'deleted file mode ', _removed), (b'rename from ', _from),
        (b'rename to ', _to), (b'copy from ', _copy), (b'copy to ', _to)):
      if line.startswith(start):
        if act is not None:
          act(file, line[len(start):])
        break
    else:
      break
    at += 1
  at = _read_body(lines, at, file)
  if file.old is None and file.new is None:
    name = _header_name(header)
    file.old, file.new = (None if file.created else name), (None if file.removed else name)
  files.append(_named(file))
  return at


def _named(file: FilePatch) -> FilePatch:
  if file.old is None and file.new is None:
    raise PatchError('a file of the patch has no name')
  for path in {file.old, file.new} - {None}:
    check_path(path)
  return file


def _mode(file: FilePatch, text: bytes) -> None:
  try:
    file.mode = int(text.strip(), 8)
  except ValueError:
    raise PatchError(f'{text!r:.40} is no mode of a file') from None
  if file.mode not in MODES:
    file.mode = EXECUTABLE if file.mode & 0o111 and file.mode >> 12 == 0o10 else FILE if file.mode >> 12 == 0o10 else -1
  if file.mode < 0:
    raise PatchError(f'{text!r:.40} is no mode of a file')


def _index_mode(file: FilePatch, text: bytes) -> None:
  if b' ' in text:
    _mode(file, text.rsplit(b' ', 1)[1])


def _created(file: FilePatch, text: bytes) -> None:
  file.created = True
  _mode(file, text)


def _removed(file: FilePatch, text: bytes) -> None:
  del text
  file.removed = True


def _from(file: FilePatch, text: bytes) -> None:
  file.old = _name(text, strip=False)


def _copy(file: FilePatch, text: bytes) -> None:
  file.copied = True
  _from(file, text)


def _to(file: FilePatch, text: bytes) -> None:
  file.new = _name(text, strip=False)


def _name(text: bytes, *, strip: bool = True) -> str | None:
  """A name as git writes it, in quotes where it must be; the first folder ('a', 'b') is taken away."""
  text = text.rstrip(b'\r')
  if text.startswith(b'"'):
    end = re.match(rb'"((?:[^"\\]|\\.)*)"', text, re.DOTALL)
    if end is None:
      raise PatchError(f'{text!r:.80} is a name without its closing quote')
    text = _QUOTED.sub(lambda m: bytes([int(m[1], 8) & 255]) if len(m[1]) == 3 else _ESCAPES.get(m[1], m[1]), end[1])
  else:
    text = text.split(b'\t')[0]
  if text == b'/dev/null':
    return None
  name = text.decode('utf-8', 'surrogateescape')
  if strip and '/' not in name:
    raise PatchError(f'{name!r:.80}: names in a patch begin with a folder, as in a/NAME and b/NAME')
  return name.split('/', 1)[1] if strip else name


def _header_name(header: bytes) -> str:
  """The name in 'a/NAME b/NAME', for sections that name it nowhere else."""
  if header.startswith(b'"'):
    return _name(header) or ''
  half = len(header) // 2
  if len(header) % 2 and header[half:half + 1] == b' ' and header[2:half] == header[half + 3:]:
    return header[2:half].decode('utf-8', 'surrogateescape')
  raise PatchError(f'{header!r:.80} does not tell the name of the file')


def _read_body(lines: list[bytes], at: int, file: FilePatch) -> int:
  if at < len(lines) and lines[at].startswith(b'GIT binary patch'):
    return _read_binary(lines, at + 1, file)
  if at < len(lines) and lines[at].startswith(b'Binary files '):
    raise PatchError(f'line {at + 1}: a binary file without its content; make the patch with --binary')
  if at + 1 < len(lines) and lines[at].startswith(b'--- ') and lines[at + 1].startswith(b'+++ '):
    old, new = _name(lines[at][4:]), _name(lines[at + 1][4:])
    renamed = file.old is not None
    file.old, file.new = (file.old, file.new) if renamed else (old, new)
    file.created |= old is None
    file.removed |= new is None
    at += 2
    while at < len(lines) and (head := _HUNK.match(lines[at])):
      at = _read_hunk(lines, at, head, file)
  return at


def _read_hunk(lines: list[bytes], at: int, head: re.Match[bytes], file: FilePatch) -> int:
  start, old, new = int(head[1]), int(head[2] or 1), int(head[4] or 1)
  body: list[bytes] = []
  at += 1
  while old > 0 or new > 0:
    line = lines[at] if at < len(lines) else None
    if line is None:
      raise PatchError(f'line {at}: the patch ends within a hunk')
    if line[:1] in (b' ', b'') or line == b'\r':  # Some programs take the blank from empty lines of context.
      old, new, line = old - 1, new - 1, line if line[:1] == b' ' else b' ' + line
    elif line[:1] == b'-':
      old -= 1
    elif line[:1] == b'+':
      new -= 1
    elif line[:1] != b'\\':
      raise PatchError(f'line {at + 1}: {line!r:.40} is no line of a hunk')
    if old < 0 or new < 0:
      raise PatchError(f'line {at + 1}: the hunk is longer than it says')
    body.append(line)
    at += 1
  if at < len(lines) and lines[at].startswith(b'\\'):
    body.append(lines[at])
    at += 1
  file.hunks.append((start, body))
  return at


def _read_binary(lines: list[bytes], at: int, file: FilePatch) -> int:
  """Reads 'literal N' or 'delta N' and its lines; the second part, the way back, is skipped."""
  first = True
  while at < len(lines) and (head := re.fullmatch(rb'(literal|delta) (\d+)\r?', lines[at])):
    size, packed = int(head[2]), []
    at += 1
    while at < len(lines) and lines[at].rstrip(b'\r'):
      packed.append(_base85(lines[at].rstrip(b'\r'), at))
      at += 1
    at += 1
    if first:
      file.binary = (head[1].decode(), _inflated(b''.join(packed), size))
    first = False
  if first:
    raise PatchError(f'line {at + 1}: a binary patch without content')
  return at


def _base85(line: bytes, at: int) -> bytes:
  length = line[0] - 64 if 65 <= line[0] <= 90 else line[0] - 70 if 97 <= line[0] <= 122 else 0
  try:
    data = base64.b85decode(line[1:])
  except ValueError:
    data = b''
  if not length or len(data) < length:
    raise PatchError(f'line {at + 1}: no line of a binary patch')
  return data[:length]


def _inflated(packed: bytes, size: int) -> bytes:
  if size > MAX_PATCH:
    raise PatchError(f'a file of {size} bytes; at most {MAX_PATCH} are read')
  try:
    data = zlib.decompressobj().decompress(packed, size + 1)
  except zlib.error as error:
    raise PatchError(f'a binary patch is damaged ({error})') from None
  if len(data) != size:
    raise PatchError('a binary patch is damaged: it has another length than it says')
  return data


# --- Applying --------------------------------------------------------------------------------------------------------------------


def apply(patch: bytes, tree: Callable[[str], Entry | None]) -> Change:
  """What the patch changes in a tree. Raises PatchError where it does not fit."""
  change: Change = {}
  written = 0
  look = lambda path: change[path] if path in change else tree(path)
  for file in read(patch):
    before = look(file.old) if file.old is not None else None
    if file.old is not None and before is None:
      raise PatchError(f'{file.old}: there is no such file')
    if file.created and file.new is not None and (look(file.new) is not None):
      raise PatchError(f'{file.new}: the file to create is there already')
    data = _patched(file, before)
    written += len(data)
    if len(data) > MAX_PATCH or written > MAX_WRITTEN or len(change) >= MAX_FILES:
      raise PatchError(f'{file.new}: the patch writes more than {MAX_FILES} files, {MAX_PATCH} bytes of one or {MAX_WRITTEN} of all')
    if file.removed or file.new is None:
      if data and before is not None and before.mode != MODULE:
        raise PatchError(f'{file.old}: the file to delete has lines that the patch does not delete')
      change[file.old] = None
      continue
    if file.old is not None and file.old != file.new and not file.copied:
      change[file.old] = None
    mode = file.mode if file.mode is not None else before.mode if before is not None else FILE
    if mode == LINK and len(data) > MAX_PATH:
      raise PatchError(f'{file.new}: the target of the link is too long')
    change[file.new] = Entry(mode, data)
  return change


def _patched(file: FilePatch, before: Entry | None) -> bytes:
  old = before.data if before is not None else b''
  if file.binary is not None:
    kind, data = file.binary
    return data if kind == 'literal' else _delta(old, data)
  if not file.hunks:
    return b'' if file.removed else old
  if before is not None and before.mode == MODULE or file.mode == MODULE:
    return b''
  lines = _lines(old)
  at = moved = 0
  done: list[bytes] = []
  for start, body in file.hunks:
    want, become = _sides(body)
    stated = start - 1 if want else start
    place = _find(lines, want, stated + moved, at)
    if place is None:
      raise PatchError(f'{file.old or file.new}: the hunk at line {start} does not fit')
    moved = place - stated
    done += lines[at:place] + become
    at = place + len(want)
    if become and not become[-1].endswith(b'\n') and at < len(lines):
      raise PatchError(f'{file.old or file.new}: the hunk at line {start} ends the file before its end')
  return b''.join(done + lines[at:])


def _lines(data: bytes) -> list[bytes]:
  """Lines with their ends; the last one may have none."""
  *lines, rest = data.split(b'\n')
  return [line + b'\n' for line in lines] + [rest] * bool(rest)


def _sides(body: list[bytes]) -> tuple[list[bytes], list[bytes]]:
  """Lines before and after a hunk, with their ends."""
  want, become, last = [], [], b''
  for line in body:
    mark, text = line[:1], line[1:] + b'\n'
    for side, marks in ((want, b' -'), (become, b' +')):
      if mark == b'\\' and last in (b' ', marks[1:]) and side:
        side[-1] = side[-1][:-1]
      elif mark in (b' ', marks[1:]):
        side.append(text)
    last = mark
  return want, become


def _find(lines: list[bytes], want: list[bytes], guess: int, least: int) -> int | None:
  """Where `want` stands in `lines`: nearest to `guess`, from `least` on."""
  if not want:
    return min(guess, len(lines)) if guess >= least else None
  last = len(lines) - len(want)
  guess = max(least, min(guess, last))  # A patch may name any line.
  for distance in range(max(last - guess, guess - least, 0) + 1):
    for place in (guess - distance, guess + distance):
      if least <= place <= last and lines[place] == want[0] and lines[place:place + len(want)] == want:
        return place
  return None


def _delta(source: bytes, delta: bytes) -> bytes:
  """Git's delta: sizes, then copies from the source and insertions."""
  try:
    size, at = _varint(delta, 0)
    result_size, at = _varint(delta, at)
    if size != len(source) or result_size > MAX_PATCH:
      raise PatchError('a binary patch was made for another file')
    done = bytearray()
    while at < len(delta):
      code = delta[at]
      at += 1
      if code & 0x80:
        offset = count = 0
        for bit in range(7):
          if code & (1 << bit):
            offset, count = (offset | delta[at] << 8 * bit, count) if bit < 4 else (offset, count | delta[at] << 8 * (bit - 4))
            at += 1
        done += source[offset:offset + (count or 0x10000)]
      else:
        done += delta[at:at + code]
        at += code
      if len(done) > result_size:
        raise PatchError('a binary patch is damaged')
  except IndexError:
    raise PatchError('a binary patch is damaged') from None
  if len(done) != result_size:
    raise PatchError('a binary patch is damaged')
  return bytes(done)


def _varint(data: bytes, at: int) -> tuple[int, int]:
  value = shift = 0
  while True:
    byte = data[at]
    value |= (byte & 0x7F) << shift
    shift, at = shift + 7, at + 1
    if not byte & 0x80:
      return value, at


# --- Writing ---------------------------------------------------------------------------------------------------------------------


def write(change: Mapping[str, Entry | None], tree: Callable[[str], Entry | None]) -> bytes:
  """The patch of a change against a tree: `git apply` takes it, and so does `apply`."""
  parts = []
  for path in sorted(change):
    before, after = tree(path), change[path]
    if before == after:
      continue
    if before is not None and after is not None and before.mode >> 12 != after.mode >> 12:  # A file that became a link: out and in.
      parts += [_section(path, before, None), _section(path, None, after)]
    else:
      parts.append(_section(path, before, after))
  return b''.join(parts)


def _section(path: str, before: Entry | None, after: Entry | None) -> bytes:
  a, b = _quoted('a/' + path), _quoted('b/' + path)
  head = [b'diff --git ' + a + b' ' + b]
  if before is None:
    head.append(b'new file mode %o' % after.mode)
  elif after is None:
    head.append(b'deleted file mode %o' % before.mode)
  elif before.mode != after.mode:
    head += [b'old mode %o' % before.mode, b'new mode %o' % after.mode]
  old, new = (before.data if before else b''), (after.data if after else b'')
  if old == new:
    return b'\n'.join(head) + b'\n'
  if b'\0' in old or b'\0' in new:
    body = [b'index ' + blob_id(before) + b'..' + blob_id(after), b'GIT binary patch', *_literal(new), *_literal(old)]
    return b'\n'.join(head + body) + b'\n'
  head += [b'--- ' + (a if before else b'/dev/null'), b'+++ ' + (b if after else b'/dev/null')]
  return b'\n'.join(head) + b'\n' + b''.join(_hunks(old, new))


def blob_id(entry: Entry | None) -> bytes:
  """Git's name of a file's content, in hexadecimal; zeros for none."""
  return hashlib.sha1(b'blob %d\0' % len(entry.data) + entry.data).hexdigest().encode() if entry is not None else b'0' * 40


def _quoted(name: str) -> bytes:
  raw = name.encode('utf-8', 'surrogateescape')
  if all(32 < c < 127 and c not in b'"\\' or c == 32 for c in raw) and not raw.endswith(b' '):
    return raw
  return b'"' + b''.join(b'\\%03o' % c if c < 32 or c > 126 or c in b'"\\' else bytes([c]) for c in raw) + b'"'


def _literal(data: bytes) -> list[bytes]:
  packed = zlib.compress(data)
  lines = [b'literal %d' % len(data)]
  for i in range(0, len(packed), 52):
    piece = packed[i:i + 52]
    lines.append(bytes([len(piece) + (64 if len(piece) <= 26 else 70)]) + base64.b85encode(piece, pad=True))
  return [*lines, b'']


def _hunks(old: bytes, new: bytes) -> list[bytes]:
  a_lines, b_lines = _lines(old), _lines(new)
  if len(a_lines) * len(b_lines) > 4_000_000:  # Comparing is quadratic at worst: what begins and ends alike is kept, the rest is exchanged.
    return _exchange(a_lines, b_lines)
  text = lambda lines: [x.decode('latin-1') for x in lines]
  result = []
  for line in list(difflib.unified_diff(text(a_lines), text(b_lines), n=3))[2:]:
    raw = line.encode('latin-1')
    result.append(raw if raw.endswith(b'\n') else raw + b'\n\\ No newline at end of file\n')
  return result


def _exchange(a: list[bytes], b: list[bytes]) -> list[bytes]:
  start = 0
  while start < min(len(a), len(b)) and a[start] == b[start]:
    start += 1
  end = 0
  while end < min(len(a), len(b)) - start and a[-1 - end] == b[-1 - end]:
    end += 1
  before, after = a[max(start - 3, 0):start], a[len(a) - end:len(a) - end + 3]
  old, new = a[start:len(a) - end], b[start:len(b) - end]
  counts = (len(before) + len(old) + len(after), len(before) + len(new) + len(after))
  first = start - len(before) + 1
  lines = [b'@@ -%d,%d +%d,%d @@\n' % (first if counts[0] else 0, counts[0], first if counts[1] else 0, counts[1])]
  for mark, part in ((b' ', before), (b'-', old), (b'+', new), (b' ', after)):
    for raw in part:
      lines.append(mark + raw if raw.endswith(b'\n') else mark + raw + b'\n\\ No newline at end of file\n')
  return lines
