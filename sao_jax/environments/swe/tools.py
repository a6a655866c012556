"""The tools of an agent that repairs a repository: a shell, an editor, and an end.

    shell    a command for bash; the working folder and exported variables stay for the next one
    editor   view, create, str_replace, insert, undo_edit
    submit   ends the episode; what the repository is then is the answer

Answers are texts for the policy to read, also where a call was wrong; long ones are cut in the middle, and say so. Only a sandbox that
fails raises.
"""

from __future__ import annotations

import posixpath
from typing import Any, Mapping

from sao_jax import sandbox
from sao_jax.environments.swe import repository

MAX_FILE = 4 << 20  # Bytes of a file that the editor opens.
MAX_UNDO = 32 << 20  # Bytes kept for undo_edit.
EDITOR = ('view', 'create', 'str_replace', 'insert', 'undo_edit')
SHELL = '''exec 2>&1
__swe="$(cd .. && pwd)/.shell"
mkdir -p "$__swe"
[ -f "$__swe/env" ] && . "$__swe/env" 2>/dev/null
cd "$(cat "$__swe/cwd" 2>/dev/null)" 2>/dev/null
trap '__code=$?; pwd > "$__swe/cwd"; export -p > "$__swe/env"; exit $__code' EXIT
eval "$1"
'''


def definitions(shell_time_s: float) -> tuple[Mapping[str, Any], ...]:
  """The tools as JSON-schema functions."""
  text, number = {'type': 'string'}, {'type': 'integer'}

  def tool(name: str, description: str, required: list[str], **properties: Any) -> Mapping[str, Any]:
    parameters = {'type': 'object', 'required': required, 'properties': properties, 'additionalProperties': False}
    return {'type': 'function', 'function': {'name': name, 'description': description, 'parameters': parameters}}

  return (
      tool('shell', f'Runs a command with bash; the folder and exported variables stay. At most {shell_time_s:g} s, no input, no network.',
           ['command'], command=text),
      tool('editor', 'Shows and changes files. view: a file with line numbers, or a folder. create: writes file_text to a file, new or '
           'not. str_replace: old_str, which must stand in the file once, becomes new_str. insert: new_str after line insert_line '
           '(0: at the top). undo_edit: takes the last change of the file back.', ['command', 'path'],
           command={'type': 'string', 'enum': list(EDITOR)}, path=text, file_text=text, old_str=text, new_str=text, insert_line=number,
           view_range={'type': 'array', 'items': number}),
      tool('submit', 'Ends the work: the repository as it is now is the answer.', []))


def shortened(text: str, limit: int) -> str:
  """At most about `limit` characters: the middle is left out, with a note that says how much."""
  if len(text) <= limit:
    return text
  half = limit // 2
  left_out = text[half:len(text) - half]
  return f'{text[:half]}\n... ({len(left_out)} characters, {left_out.count(chr(10))} lines left out) ...\n{text[len(text) - half:]}'


class Mistake(Exception):
  """A call that cannot be done; its text is for the policy."""


class Toolbox:
  """The tools on one box, in which the repository lies at `repository.ROOT`."""

  def __init__(self, box: sandbox.Box, *, shell_time_s: float, max_output: int, repo_path: str = repository.ROOT,
               env: Mapping[str, str] | None = None):
    self._box, self._time_s, self._max_output, self._repo_path = box, shell_time_s, max_output, repo_path
    self._env = dict(env or {})
    self._undo: list[tuple[str, bytes | None]] = []

  def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
    """(answer, whether the call was done) of 'shell' or 'editor'. Raises sandbox.SandboxError."""
    try:
      text = self.shell(arguments['command']) if name == 'shell' else self.editor(**arguments)
      return shortened(text, self._max_output), True
    except Mistake as mistake:
      return shortened(f'error: {mistake}', self._max_output), False
    except sandbox.PathError as error:
      return shortened(f'error: {error}', self._max_output), False

  # --- Shell -------------------------------------------------------------------------------------------------------------------

  def shell(self, command: str) -> str:
    if '\0' in command:
      raise Mistake('a command cannot hold a zero byte')
    if len(command.encode('utf-8', 'surrogatepass')) > 100_000:
      raise Mistake('the command is longer than 100000 bytes; write files with the editor')
    command = command.encode('utf-8', 'replace').decode()
    result = self._box.run(
        ['bash', '--noprofile', '--norc', '-c', SHELL, 'bash', command], cwd=repository.ROOT, time_s=self._time_s, env=self._env)
    text = result.stdout.decode('utf-8', 'replace') + result.stderr.decode('utf-8', 'replace')
    notes = {
        'time': f'(ended: the command took more than {self._time_s:g} s)', 'memory': '(ended: too much memory)',
        'processes': '(ended: too many processes)', 'output': '(ended: too much output)', 'killed': '(the shell was ended by a signal)'}
    note = notes.get(result.ending, f'(exit status {result.exit_code})' if result.exit_code else '')
    text = shortened(text, self._max_output - len(note) - 2)
    return f'{text.rstrip(chr(10))}\n{note}'.strip('\n') or '(no output)'

  # --- Editor ------------------------------------------------------------------------------------------------------------------

  def editor(self, command: str, path: str, **arguments: Any) -> str:
    needed = {'view': (), 'create': ('file_text',), 'str_replace': ('old_str',), 'insert': ('insert_line', 'new_str'), 'undo_edit': ()}
    taken = {'view': ('view_range',), 'str_replace': ('new_str',)}
    for name in needed[command]:
      if name not in arguments:
        raise Mistake(f'{command} needs {name}')
    extra = sorted(set(arguments) - set(needed[command]) - set(taken.get(command, ())))
    if extra:
      raise Mistake(f'{command} takes no {extra[0]}')
    full = self._path(path)
    return getattr(self, '_' + command)(full, path, **arguments)

  def _path(self, path: str) -> str:
    """Path in the work folder. Raises Mistake."""
    if not path or '\0' in path:
      raise Mistake(f'{path!r} is no path')
    if self._repo_path != repository.ROOT and (path == self._repo_path or path.startswith(self._repo_path + '/')):
      path = repository.ROOT + path[len(self._repo_path):]
    full = posixpath.normpath(posixpath.join(repository.ROOT, path))
    if full != sandbox.FOLDER and not full.startswith(sandbox.FOLDER + '/'):
      raise Mistake(f'{path} lies outside of {self._repo_path}; give a path in it, or one relative to it')
    return full

  def _run(self, *argv: str) -> sandbox.Result:
    return self._box.run(argv, cwd=repository.ROOT, time_s=self._time_s)

  def _read(self, full: str, path: str) -> str:
    data = self._box.read(full, max_bytes=MAX_FILE)
    try:
      return data.decode('utf-8')
    except UnicodeDecodeError:
      raise Mistake(f'{path} is no text in UTF-8; use the shell') from None

  def _write(self, full: str, text: str) -> None:
    try:
      before: bytes | None = self._box.read(full, max_bytes=MAX_FILE)
    except sandbox.PathError:
      before = None
    mode = 0o644
    if before is not None and self._run('test', '-x', _relative(full)).exit_code == 0:
      mode = 0o755
    self._box.write(full, text.encode('utf-8', 'replace'), mode=mode)
    self._undo.append((full, before))
    while sum(len(b or b'') for _, b in self._undo) > MAX_UNDO:
      self._undo.pop(0)

  def _view(self, full: str, path: str, view_range: list[int] | None = None) -> str:
    if self._run('stat', '-c', '%F', '--', _relative(full)).stdout.strip() == b'directory':
      listing = self._run(
          'find', _relative(full), '-mindepth', '1', '-maxdepth', '2', '-not', '-path', '*/.[!/]*', '-not', '-name', '__pycache__')
      return '\n'.join(sorted(listing.stdout.decode('utf-8', 'replace').splitlines())) or '(the folder is empty)'
    lines = self._read(full, path).split('\n')
    if lines[-1] == '':
      lines.pop()
    start, stop = 1, len(lines)
    if view_range is not None:
      if len(view_range) != 2:
        raise Mistake('view_range must be two line numbers, [first, last]; -1 for the last line')
      start, stop = view_range[0], len(lines) if view_range[1] == -1 else view_range[1]
      if not 1 <= start <= max(len(lines), 1) or stop < start:
        raise Mistake(f'view_range must lie in 1 to {len(lines)}, the first line not after the last; got {view_range}')
    shown = [f'{n:6}\t{line}' for n, line in enumerate(lines[start - 1:stop], start)]
    return '\n'.join(shown) or '(the file is empty)'

  def _create(self, full: str, path: str, file_text: str) -> str:
    if full in (sandbox.FOLDER, repository.ROOT):
      raise Mistake(f'{path} is a folder')
    self._write(full, file_text)
    return f'{path} is written: {file_text.count(chr(10))} lines'

  def _str_replace(self, full: str, path: str, old_str: str, new_str: str = '') -> str:
    text = self._read(full, path)
    if not old_str:
      raise Mistake('old_str is empty; use insert')
    places = _places(text, old_str, 20)
    if not places:
      raise Mistake(f'old_str does not stand in {path}; it must be the same to the last blank')
    if len(places) > 1:
      lines = [text.count('\n', 0, i) + 1 for i in places]
      many = f'{len(places)}' if len(places) < 20 else '20 or more'
      raise Mistake(f'old_str stands {many} times in {path} (lines {", ".join(map(str, lines))}); give more lines around it')
    if old_str == new_str:
      raise Mistake('new_str is the same as old_str')
    place = places[0]
    self._write(full, text[:place] + new_str + text[place + len(old_str):])
    return f'{path} is changed:\n' + _around(text[:place] + new_str + text[place + len(old_str):], place, place + len(new_str))

  def _insert(self, full: str, path: str, insert_line: int, new_str: str) -> str:
    lines = self._read(full, path).splitlines(keepends=True)
    if not 0 <= insert_line <= len(lines):
      raise Mistake(f'insert_line must be in 0 to {len(lines)}, got {insert_line}')
    if insert_line and not lines[insert_line - 1].endswith('\n'):
      lines[insert_line - 1] += '\n'
    before = ''.join(lines[:insert_line])
    new = new_str if new_str.endswith('\n') or insert_line == len(lines) else new_str + '\n'
    text = before + new + ''.join(lines[insert_line:])
    self._write(full, text)
    return f'{path} is changed:\n' + _around(text, len(before), len(before) + len(new))

  def _undo_edit(self, full: str, path: str) -> str:
    index = next((i for i in range(len(self._undo) - 1, -1, -1) if self._undo[i][0] == full), None)
    if index is None:
      raise Mistake(f'there is no change of {path} by the editor to take back')
    _, before = self._undo.pop(index)
    if before is None:
      self._run('rm', '-f', '--', _relative(full))
      return f'{path} is deleted: it was new'
    self._box.write(full, before, mode=0o755 if self._run('test', '-x', _relative(full)).exit_code == 0 else 0o644)
    return f'{path} is as it was before the last change'


def _relative(full: str) -> str:
  """The path from the repository: a box without isolation has its work folder elsewhere."""
  inner = posixpath.relpath(full, repository.ROOT)
  return inner if inner.startswith('.') else './' + inner


def _places(text: str, part: str, most: int) -> list[int]:
  found, at = [], -1
  while len(found) < most and (at := text.find(part, at + 1)) >= 0:
    found.append(at)
  return found


def _around(text: str, start: int, stop: int) -> str:
  """The lines of text[start:stop] with three before and after, numbered."""
  first = max(text.count('\n', 0, start) - 3, 0)
  last = text.count('\n', 0, stop) + 4
  return '\n'.join(f'{n + 1:6}\t{line}' for n, line in enumerate(text.split('\n')[first:last], first))
