"""System calls that Python has no name for in all its versions, by ctypes."""

import ctypes
import os
import struct

NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (
    0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000)
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 1, 4, 24, 36, 38, 47
_PIVOT_ROOT = {'x86_64': 155, 'aarch64': 41}
_MOUNT_SETATTR = 442

libc = ctypes.CDLL(None, use_errno=True)


class Refused(Exception):
  """The host does not allow what a box needs."""


def call(what, result):
  """Raises OSError with `what` where a call of the C library failed."""
  if result != 0:
    number = ctypes.get_errno()
    raise OSError(number, '%s: %s' % (what, os.strerror(number)))


def unshare(flags):
  call('unshare', libc.unshare(flags))


def mount(source, target, kind=None, flags=0, data=None):
  coded = [None if x is None else os.fsencode(x) for x in (source, target, kind, data)]
  call('mount of %s' % target, libc.mount(coded[0], coded[1], coded[2], ctypes.c_ulong(flags), coded[3]))


def detach(target):
  call('umount of %s' % target, libc.umount2(os.fsencode(target), DETACH))


def pivot_root(new, old):
  number = _PIVOT_ROOT.get(os.uname().machine)
  if number is None:
    raise Refused('boxes of namespaces are built on x86_64 and aarch64, this is %s; use the container backend' % os.uname().machine)
  call('pivot_root', libc.syscall(number, os.fsencode(new), os.fsencode(old)))


def bind(source, target, writable=False):
  """Shows `source` at `target` with all that is mounted below it; read-only unless `writable`, without devices and setuid."""
  mount(source, target, None, BIND | REC)
  restrict(target, writable)


def restrict(target, writable=False):
  """nosuid, nodev and, unless `writable`, read-only for a mount and all below it."""
  attributes = struct.pack('QQQQ', NOSUID | NODEV | (0 if writable else RDONLY), 0, 0, 0)
  if libc.syscall(_MOUNT_SETATTR, -100, os.fsencode(target), 0x8000, attributes, len(attributes)) == 0:  # AT_RECURSIVE
    return
  for point, flags in _mounts_below(target):  # Before Linux 5.12.
    mount(None, point, None, REMOUNT | BIND | NOSUID | NODEV | (0 if writable else RDONLY) | flags)


def _mounts_below(target):
  """(mount point, the flags that it has and must keep) of `target` and of all below it."""
  names = {'ro': RDONLY, 'nosuid': NOSUID, 'nodev': NODEV, 'noexec': NOEXEC, 'noatime': 1024, 'nodiratime': 2048, 'relatime': 1 << 21}
  found = []
  with open('/proc/self/mountinfo') as file:
    for line in file:
      fields = line.split()
      point = fields[4].encode().decode('unicode_escape')
      if point == target or point.startswith(target.rstrip('/') + '/'):
        found.append((point, sum(names.get(o, 0) for o in fields[5].split(','))))
  return found


def stand_back(nice):
  """Gives this session a lower share where the kernel divides processors among sessions (autogroup): there the `nice` of a process counts
  among those of its session alone. Without rights it is refused when asked for often."""
  try:
    with open('/proc/self/autogroup', 'w') as file:
      file.write(str(nice))
  except OSError:
    pass


def bound_capabilities():
  """No program that is started later can have any capability. Before the user changes, which takes the right to do this away."""
  for number in range(64):
    libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0)  # Fails for those that do not exist.


def drop_capabilities():
  """Gives up every capability, for good."""
  bound_capabilities()
  libc.prctl(PR_CAP_AMBIENT, 4, 0, 0, 0)  # PR_CAP_AMBIENT_CLEAR_ALL
  header, data = struct.pack('Ii', 0x20080522, 0), b'\0' * 24
  call('capset', libc.capset(header, data))
  call('no_new_privs', libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def capabilities():
  """Bits of the capabilities that this process could use or get."""
  with open('/proc/self/status') as file:
    fields = dict(line.split(':', 1) for line in file if ':' in line)
  return int(fields['CapEff'], 16) | int(fields['CapPrm'], 16)
