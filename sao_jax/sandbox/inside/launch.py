"""Builds boxes of namespaces.

    host --- starts once ---> foundry --- forks, for every box ---> keeper --- forks ---> warden, process 1 of the box

The foundry is there for speed alone: it has loaded what a box needs before it is asked for one. It is sent a socket for each box.

The keeper waits for either end: when the host's process ends, however it ends, or when the warden does. The end of the warden is the end
of every process of the box: the kernel ends a process namespace with its first process.

As root the namespaces are made with root's rights, and what runs in the box has a user id of its own, which no one else uses. Otherwise
they are made in a new user namespace, in which only this user exists.
"""

import fcntl
import os
import select
import signal
import socket
import struct
import time

from sao_jax.sandbox.inside import confine, root, system, warden, wire

FIRST_USER = 0x70000000  # Boxes of root run as this plus the number of a process.
ALL = system.NEWNS | system.NEWPID | system.NEWNET | system.NEWIPC | system.NEWUTS


def main(descriptor, host):
  """The foundry: makes a box for every socket that it is sent, until the host is gone. `descriptor`: number of the socket to the host."""
  os.umask(0o022)
  orders = socket.socket(fileno=int(descriptor))
  orders.set_inheritable(False)
  pidfd = os.pidfd_open(int(host))
  if os.getppid() != int(host):
    return  # It ended before.
  signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Nobody waits for keepers.
  poll = select.poll()
  poll.register(pidfd, select.POLLIN)
  poll.register(orders, select.POLLIN)
  while pidfd not in [number for number, _ in poll.poll()]:
    data, sockets, _, _ = socket.recv_fds(orders, 1, 1)
    if not data:
      return
    for number in sockets:
      if os.fork() == 0:
        try:
          signal.signal(signal.SIGCHLD, signal.SIG_DFL)
          orders.close()
          os.setsid()
          make_box(number, pidfd)
        finally:
          os._exit(0)
      os.close(number)


def make_box(descriptor, host):
  """The keeper of one box: makes it, and waits for its end, or for that of the host. `host`: pidfd of its process."""
  os.set_inheritable(descriptor, False)
  header, _ = wire.receive(descriptor, 0, time.monotonic() + 60.0)
  header['warden']['keeper'] = os.getpid()
  try:
    uid, gid = _separate()
    lifeline, held = os.pipe()
    child = os.fork()
    if child == 0:
      os.close(held)
      os.close(host)
      _become_warden(descriptor, lifeline, header, uid, gid)
      os._exit(0)
  except system.Refused as error:
    wire.send(descriptor, {'refused': str(error)})
    return
  except OSError as error:
    wire.send(descriptor, {'refused': 'namespaces cannot be made: %s' % error})
    return
  os.close(descriptor)
  os.close(lifeline)
  _keep(host, child)


def _keep(host, child):
  """Waits for the end of the host or of the warden, and ends the box."""
  box = os.pidfd_open(child)
  poll = select.poll()
  poll.register(host, select.POLLIN)
  poll.register(box, select.POLLIN)
  poll.poll()
  try:
    os.kill(child, signal.SIGKILL)
  except ProcessLookupError:
    pass
  os.waitpid(child, 0)


def _separate():
  """Enters the new namespaces; (uid, gid) of what runs in the box. Raises OSError or Refused."""
  if os.geteuid() == 0:
    user = _own_user()
    try:
      system.unshare(ALL)
      _unshare_cgroup()
      return user, user
    except PermissionError:
      pass  # Root without the right to mount: in a container. As anyone else then, but not as root.
    try:
      os.setgroups([])
      os.setresgid(user, user, user)
      os.setresuid(user, user, user)
      system.call('dumpable', system.libc.prctl(system.PR_SET_DUMPABLE, 1, 0, 0, 0))  # To write its maps below.
    except OSError as error:
      raise system.Refused('root here may neither make namespaces nor change its user (%s)' % error)
  uid, gid = os.geteuid(), os.getegid()
  try:
    system.unshare(system.NEWUSER | ALL)
  except OSError as error:
    raise system.Refused(
        'this user may not make namespaces (%s); see /proc/sys/user/max_user_namespaces, kernel.unprivileged_userns_clone and '
        'kernel.apparmor_restrict_unprivileged_userns' % error)
  for name, text in (('setgroups', 'deny'), ('uid_map', '1000 %d 1' % uid), ('gid_map', '1000 %d 1' % gid)):
    try:
      with open('/proc/self/' + name, 'w') as file:
        file.write(text)
    except OSError as error:
      raise system.Refused('the user namespace cannot be set up (%s: %s)' % (name, error))
  _unshare_cgroup()
  return 1000, 1000


def _unshare_cgroup():
  try:
    system.unshare(system.NEWCGROUP)
  except OSError:
    pass  # Before Linux 4.6.


def _own_user():
  """A user id for this box alone: one that the map of this user namespace holds."""
  with open('/proc/self/uid_map') as file:
    extents = [[int(x) for x in line.split()] for line in file]
  for first, _, count in extents:
    if first <= FIRST_USER and FIRST_USER + (1 << 22) <= first + count:
      return FIRST_USER + os.getpid()  # Process numbers are below 2^22.
  first, _, count = max(extents, key=lambda e: e[2])
  if count < 10_000:
    raise system.Refused('root here has only %d user ids; none is left for a box' % count)
  return first + count - 1 - os.getpid() % 5000


def _become_warden(descriptor, lifeline, header, uid, gid):
  """In process 1 of the box: its file system, then its rights, then its work."""
  try:
    os.setsid()
    system.stand_back(header['warden']['nice'])
    _loopback_up()
    socket.sethostname('box')
    root.build(header['disk_mb'], header['mounts'], header['covered'], header['inside'], (uid, gid))
    system.bound_capabilities()
    if os.geteuid() == 0:
      os.setgroups([])
      os.setresgid(gid, gid, gid)
      os.setresuid(uid, uid, uid)
    system.libc.prctl(system.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    confine.confine()
    for path in header['readable']:
      if not os.access(path, os.R_OK | os.X_OK):
        raise system.Refused('%s cannot be read by the user of the box; make it readable for everyone' % path)
  except system.Refused as error:
    wire.send(descriptor, {'refused': str(error)})
    return
  except OSError as error:
    wire.send(descriptor, {'refused': 'the box cannot be built: %s' % error})
    return
  warden.serve(descriptor, descriptor, lifeline, dict(header['warden'], kill='namespace'))


def _loopback_up():
  with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
    request = struct.pack('16sH14s', b'lo', 0, b'')
    flags = struct.unpack('16sH14s', fcntl.ioctl(probe, 0x8913, request))[1]  # SIOCGIFFLAGS
    fcntl.ioctl(probe, 0x8914, struct.pack('16sH14s', b'lo', flags | 1, b''))  # SIOCSIFFLAGS, IFF_UP

