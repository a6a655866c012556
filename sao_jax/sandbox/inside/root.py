"""The file system of a box: a new root in memory that holds the system read-only and a work folder of bounded size.

    /                  tmpfs, read-only in the end
    /usr /bin /lib..   of the host, read-only
    /etc               the few files that programs look for; users, groups and hosts are the box's own
    /opt/box           this folder
    the Python that runs the session, where it is installed; further folders as the caller says
    /box /tmp /dev/shm    one tmpfs of `disk_mb`
    /proc              of the box's own process namespace, with what tells of the host or steers it covered
    /dev               null, zero, full, random, urandom, pseudo-terminals of its own
"""

import os

from sao_jax.sandbox.inside import files, proc
from sao_jax.sandbox.inside.system import (
    BIND, NODEV, NOEXEC, NOSUID, PRIVATE, RDONLY, REC, REMOUNT, Refused, bind, detach, mount, pivot_root)

SYSTEM = ('/usr', '/bin', '/sbin', '/lib', '/lib32', '/lib64', '/libx32', '/nix/store')
ETC = ('ld.so.cache', 'ld.so.conf', 'ld.so.conf.d', 'alternatives', 'localtime', 'ssl/certs', 'ssl/openssl.cnf', 'mime.types', 'services',
       'protocols', 'bash.bashrc', 'profile', 'inputrc', 'debian_version', 'os-release')
DEVICES = ('null', 'zero', 'full', 'random', 'urandom')
READ_ONLY_PROC = ('sys', 'sysrq-trigger', 'irq', 'bus', 'fs', 'acpi', 'scsi')
OLD = '/.old'


def build(disk_mb, mounts, covered, inside, user):
  """Makes the new root of this mount namespace; nothing of the old one stays.

  Args:
    disk_mb: size of what can be written, all together.
    mounts: [source (without symlinks), target, writable] each.
    covered: folders that are shown empty.
    inside: this folder on the host.
    user: (uid, gid) of what runs in the box, as the box sees them.
  """
  mount(None, '/', None, REC | PRIVATE)
  mount('box', '/usr', 'tmpfs', NOSUID | NODEV, 'size=8m,mode=755')
  os.mkdir('/usr' + OLD)
  pivot_root('/usr', '/usr' + OLD)
  os.chdir('/')
  for path in SYSTEM:
    _show_system(path)
  _etc(user)
  _show(inside, '/opt/box')
  _work(disk_mb, user)
  _devices()
  try:
    os.mkdir('/proc')
    mount('proc', '/proc', 'proc', NOSUID | NODEV | NOEXEC)  # Before the old root goes: the kernel wants to see that one's /proc.
  except OSError as error:
    raise Refused('a /proc of its own cannot be mounted (%s); containers often forbid it' % error)
  for source, target, writable in mounts:
    _show(source, target, writable)
  for path in covered:
    if os.path.isdir(path):
      mount('empty', path, 'tmpfs', NOSUID | NODEV | RDONLY, 'size=4k,mode=755')
  _proc()
  os.makedirs('/var', exist_ok=True)
  os.symlink('/tmp', '/var/tmp')
  os.makedirs('/run', exist_ok=True)
  os.makedirs('/sys', exist_ok=True)
  detach(OLD)
  os.rmdir(OLD)
  mount(None, '/', None, REMOUNT | BIND | RDONLY | NOSUID | NODEV)


def _show_system(path):
  old = OLD + path
  if os.path.islink(old):
    os.symlink(os.readlink(old), path)
  elif os.path.isdir(old):
    os.makedirs(path)
    bind(old, path)


def _show(source, target, writable=False):
  """Shows a file or folder of the host. The folder it goes to is made; where that is in a read-only place, it must be there."""
  old = OLD + source
  try:
    if os.path.isdir(old):
      os.makedirs(target, exist_ok=True)
    elif not os.path.exists(target):
      os.makedirs(os.path.dirname(target), exist_ok=True)
      os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    bind(old, target, writable)
  except OSError as error:
    raise Refused('%s cannot be shown at %s: %s' % (source, target, error))


def _etc(user):
  os.makedirs('/etc')
  for name in ETC:
    old = OLD + '/etc/' + name
    if os.path.islink(old) and not os.path.exists(OLD + os.path.realpath(old)[len(OLD):]):
      if not os.readlink(old).startswith('/usr'):
        continue
    if os.path.islink(old):
      os.makedirs(os.path.dirname('/etc/' + name), exist_ok=True)
      os.symlink(os.readlink(old), '/etc/' + name)  # To a place that the box has, or to nothing.
    elif os.path.exists(old):
      _show('/etc/' + name, '/etc/' + name)
  uid, gid = user
  for name, text in (
      ('passwd', 'root:x:0:0:root:/:/bin/sh\nbox:x:%d:%d:box:%s:/bin/sh\n' % (uid, gid, files.FOLDER)),
      ('group', 'root:x:0:\nbox:x:%d:\n' % gid),
      ('hosts', '127.0.0.1 localhost box\n::1 localhost\n'), ('hostname', 'box\n'),
      ('nsswitch.conf', 'passwd: files\ngroup: files\nhosts: files\n'),
      ('host.conf', 'multi on\n'), ('resolv.conf', '')):
    with open('/etc/' + name, 'w') as file:
      file.write(text)


def _work(disk_mb, user):
  mount('work', _made('/.disk'), 'tmpfs', NOSUID | NODEV, 'size=%dm,nr_inodes=%d,mode=755' % (disk_mb, max(16384, 256 * disk_mb)))
  os.makedirs('/dev')
  for name, target, mode in (('box', files.FOLDER, 0o755), ('tmp', '/tmp', 0o1777), ('shm', '/dev/shm', 0o1777)):
    os.mkdir('/.disk/' + name)
    os.chown('/.disk/' + name, *user)
    os.chmod('/.disk/' + name, mode)
    mount('/.disk/' + name, _made(target), None, BIND)
  detach('/.disk')
  os.rmdir('/.disk')


def _made(path):
  os.makedirs(path, exist_ok=True)
  return path


def _devices():
  for name in DEVICES:
    os.close(os.open('/dev/' + name, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o666))
    mount(OLD + '/dev/' + name, '/dev/' + name, None, BIND)
  for name, target in (('fd', '/proc/self/fd'), ('stdin', '/proc/self/fd/0'), ('stdout', '/proc/self/fd/1'), ('stderr', '/proc/self/fd/2')):
    os.symlink(target, '/dev/' + name)
  try:
    mount('devpts', _made('/dev/pts'), 'devpts', NOSUID | NOEXEC, 'newinstance,ptmxmode=0666,mode=620,max=16')
    os.symlink('pts/ptmx', '/dev/ptmx')
  except OSError:
    pass  # Then without pseudo-terminals.


def _proc():
  for name in READ_ONLY_PROC:
    path = '/proc/' + name
    if os.path.exists(path):
      mount(path, path, None, BIND | REC)
      mount(None, path, None, REMOUNT | BIND | RDONLY | NOSUID | NODEV | NOEXEC)
  for name in proc.COVERED:
    if os.path.exists('/proc/' + name):
      mount('/dev/null', '/proc/' + name, None, BIND)
