"""File operations in the work folder of a box, done in a process that the warden forks: with no more rights than the code in the box has.

No symbolic link is followed on the way to a path, and only regular files are read, so that what code in the box has left there leads
nowhere. What cannot be done is a `Refusal` with the reason.
"""

import errno
import os
import stat

FOLDER = '/box'  # The work folder, as it is called in a box.
MAX_ENTRIES = 200_000
MAX_DEPTH = 200


class Refusal(Exception):
  """The path is not there, is no regular file, is too large, leads through a link, or the disk is full."""


def parts_of(path):
  """Components below the work folder of 'a/b' or '/box/a/b'."""
  if '\0' in path:
    raise Refusal('a path cannot hold a zero byte: %r' % path)
  if path == FOLDER or path.startswith(FOLDER + '/'):
    path = path[len(FOLDER):]
  elif path.startswith('/'):
    raise Refusal('a path must lie in %s, got %r' % (FOLDER, path))
  parts = [p for p in path.split('/') if p not in ('', '.')]
  if '..' in parts:
    raise Refusal('a path may not hold "..", got %r' % path)
  return parts


def _folder(base, parts, make):
  """Descriptor of a folder, reached without following links."""
  flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
  at = os.open(base, flags)
  for part in parts:
    try:
      below = os.open(part, flags, dir_fd=at)
    except FileNotFoundError:
      if not make:
        raise
      os.mkdir(part, 0o755, dir_fd=at)
      below = os.open(part, flags, dir_fd=at)
    finally_close, at = at, below
    os.close(finally_close)
  return at


def write(base, entries, blobs):
  """Writes [path, mode, kind, extra] each: 'file' (extra: offset; 0 makes it anew), 'folder', 'link' (extra: where to)."""
  for (path, mode, kind, extra), data in zip(entries, blobs):
    parts = parts_of(path)
    if kind == 'folder':
      os.close(_folder(base, parts, True))
      continue
    if not parts:
      raise Refusal('a file needs a name, got %r' % path)
    folder = _folder(base, parts[:-1], True)
    if kind == 'link' or not extra:
      try:
        os.unlink(parts[-1], dir_fd=folder)  # Whatever it was: a link, a pipe, a file that is still open somewhere.
      except FileNotFoundError:
        pass
    if kind == 'link':
      os.symlink(extra, parts[-1], dir_fd=folder)
    else:
      flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | (0 if extra else os.O_CREAT | os.O_EXCL)
      file = os.open(parts[-1], flags, mode, dir_fd=folder)
      _regular(file, path)
      os.lseek(file, extra, os.SEEK_SET)
      view = memoryview(data)
      while len(view):
        view = view[os.write(file, view):]
      os.fchmod(file, mode)
      os.close(file)
    os.close(folder)
  return {}, []


def read(base, entries):
  """Contents of [path, offset, most bytes, whether more is refused] each."""
  blobs = []
  for path, offset, most, whole in entries:
    parts = parts_of(path)
    if not parts:
      raise Refusal('a file needs a name, got %r' % path)
    folder = _folder(base, parts[:-1], False)
    file = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    os.close(folder)
    size = _regular(file, path)
    if whole and size > most:
      raise Refusal('%r has %d bytes, at most %d were asked for' % (path, size, most))
    os.lseek(file, offset, os.SEEK_SET)
    data = b''
    while len(data) < most:
      part = os.read(file, most - len(data))
      if not part:
        break
      data += part
    os.close(file)
    blobs.append(data)
  return {}, blobs


def _regular(file, path):
  found = os.fstat(file)
  if not stat.S_ISREG(found.st_mode):
    raise Refusal('%r is no regular file' % path)
  return found.st_size


def listing(base, path):
  """[name below `path`, kind, mode, size, link target] of everything in a folder, folders before what is in them."""
  found = []
  stack = [(_folder(base, parts_of(path), False), '', 0)]
  while stack:
    folder, prefix, depth = stack.pop()
    if depth > MAX_DEPTH:
      raise Refusal('folders in %r are more than %d deep' % (path, MAX_DEPTH))
    for entry in sorted(os.scandir(folder), key=lambda e: e.name):
      state = os.stat(entry.name, dir_fd=folder, follow_symlinks=False)
      name = prefix + entry.name
      if stat.S_ISDIR(state.st_mode):
        found.append([name, 'folder', stat.S_IMODE(state.st_mode), 0, ''])
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        stack.append((os.open(entry.name, flags, dir_fd=folder), name + '/', depth + 1))
      elif stat.S_ISREG(state.st_mode):
        found.append([name, 'file', stat.S_IMODE(state.st_mode), state.st_size, ''])
      elif stat.S_ISLNK(state.st_mode):
        found.append([name, 'link', 0o777, 0, os.readlink(entry.name, dir_fd=folder)])
      if len(found) > MAX_ENTRIES:
        raise Refusal('%r holds more than %d files' % (path, MAX_ENTRIES))
    os.close(folder)
  return {'entries': found}, []


def perform(base, header, blobs):
  """(header, blobs) of the answer to one request."""
  try:
    if header['op'] == 'write':
      return write(base, header['entries'], blobs)
    if header['op'] == 'read':
      return read(base, header['entries'])
    return listing(base, header['path'])
  except Refusal as error:
    return {'refusal': str(error)}, []
  except OSError as error:
    names = {
        errno.ELOOP: 'a symbolic link is not followed', errno.ENOTDIR: 'a part of it is no folder, or a link',
        errno.ENXIO: 'no regular file'}
    return {'refusal': '%s: %s' % (error.filename, names.get(error.errno, os.strerror(error.errno))), 'errno': error.errno}, []
  except (MemoryError, RecursionError) as error:
    return {'refusal': type(error).__name__}, []
