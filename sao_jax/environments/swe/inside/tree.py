"""Reads and writes the repository inside the sandbox. Never follows a link, and reads no more than it is told to.

    list ROOT OUT     writes {path: [mode, size, sha1]} of all files below ROOT, '.git' left out
    take ROOT OUT     of the paths on standard input (a JSON list), {path: [mode, content in base64]}; those that are gone are left out
    put ROOT          {path: [mode, content] | null} on standard input: written, or deleted
    lose ROOT         gives the tree a new repository of one commit, and nothing else of git

OUT is a file. Paths are written as Latin-1 of their bytes.
"""

import base64
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys

MAX_FILES = 300000
MAX_READ = 96 << 20
LINK, MODULE = 0o120000, 0o160000


def text(raw):
  return raw.decode('latin-1')


def mode_of(found):
  if stat.S_ISLNK(found.st_mode):
    return LINK
  if stat.S_ISREG(found.st_mode):
    return 0o100755 if found.st_mode & 0o111 else 0o100644
  return 0  # A socket, a pipe, a device.


def content(path, mode, limit):
  """The bytes of a file, or a link's target; None where it is gone, longer, or something else now."""
  try:
    if mode == LINK:
      return os.readlink(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, 'rb') as file:
      found = os.fstat(descriptor)
      if not stat.S_ISREG(found.st_mode) or found.st_size > limit:
        return None
      return file.read(limit)
  except OSError:
    return None


def listed(root):
  found = {}
  for folder, folders, names in os.walk(root):
    for name in list(folders):
      path = os.path.join(folder, name)
      if name == b'.git':
        folders.remove(name)
      elif os.path.islink(path):
        folders.remove(name)
        names.append(name)
    folders.sort()
    for name in sorted(names):
      if name == b'.git':
        continue
      path = os.path.join(folder, name)
      try:
        info = os.lstat(path)
      except OSError:
        continue
      mode = mode_of(info)
      if not mode or len(found) >= MAX_FILES:
        continue
      data = content(path, mode, MAX_READ)
      digest = hashlib.sha1(data).hexdigest() if data is not None else ''
      found[text(os.path.relpath(path, root))] = [mode, info.st_size, digest]
  return found


def take(root, paths):
  found, left = {}, MAX_READ
  for path in paths:
    full = os.path.join(root, path.encode('latin-1'))
    if os.path.realpath(os.path.dirname(full)) != os.path.dirname(full):
      continue  # Below a link.
    try:
      mode = mode_of(os.lstat(full))
    except OSError:
      continue
    data = content(full, mode, left) if mode else None
    if data is not None:
      left -= len(data)
      found[path] = [mode, base64.b64encode(data).decode()]
  return found


def put(root, change):
  """Deletes first, then writes files, and links at the very end, so that nothing is written through one."""
  for path in change:
    full = os.path.join(root, path.encode('latin-1'))
    if os.path.lexists(full):
      if os.path.isdir(full) and not os.path.islink(full):
        shutil.rmtree(full)
      else:
        os.unlink(full)
  for last in (False, True):
    for path, entry in change.items():
      if entry is None or (entry[0] == LINK) != last:
        continue
      full = os.path.join(root, path.encode('latin-1'))
      if entry[0] == MODULE:
        os.makedirs(full, exist_ok=True)
        continue
      os.makedirs(os.path.dirname(full), exist_ok=True)
      data = base64.b64decode(entry[1])
      if last:
        os.symlink(data, full)
      else:
        with open(full, 'wb') as file:
          file.write(data)
        os.chmod(full, 0o755 if entry[0] == 0o100755 else 0o644)


def lose(root):
  """A new repository in place of the one that is there; without git in the box, none at all."""
  for folder, folders, names in os.walk(root):
    for name in folders[:]:
      if name == b'.git':
        folders.remove(name)
        shutil.rmtree(os.path.join(folder, name), ignore_errors=True)
    if b'.git' in names:
      os.unlink(os.path.join(folder, b'.git'))
  who = {'GIT_%s_%s' % (a, b): v for a in ('AUTHOR', 'COMMITTER') for b, v in (
      ('NAME', 'base'), ('EMAIL', 'base@localhost'), ('DATE', '2000-01-01T00:00:00Z'))}
  env = dict(os.environ, GIT_CONFIG_NOSYSTEM='1', GIT_CONFIG_GLOBAL='/dev/null', HOME='/nonexistent', **who)
  for words in (['init', '-q', '--template='], ['add', '-A', '-f'], ['commit', '-q', '--allow-empty', '--no-verify', '-m', 'base'],
                ['repack', '-adq'], ['prune-packed', '-q']):
    command = ['git', '-c', 'core.logAllRefUpdates=false', '-c', 'core.hooksPath=/dev/null', '-c', 'safe.directory=*', '-c', 'gc.auto=0']
    if subprocess.call(command + words, cwd=root, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL):
      sys.exit('git ' + words[0] + ' failed')
    if words[0] == 'init':
      os.makedirs(os.path.join(root, b'.git', b'info'), exist_ok=True)
      with open(os.path.join(root, b'.git', b'info', b'attributes'), 'w') as file:
        file.write('* -text -filter -ident -working-tree-encoding\n')  # Files stay as they are, whatever the repository's attributes say.


def main(action, root, out=''):
  root = os.path.realpath(root).encode()
  if action == 'list':
    result = listed(root)
  elif action == 'take':
    result = take(root, json.loads(sys.stdin.read()))
  elif action == 'put':
    put(root, json.loads(sys.stdin.read()))
    return
  else:
    lose(root)
    return
  with open(out, 'w') as file:
    json.dump(result, file)


if __name__ == '__main__':
  main(*sys.argv[1:])
