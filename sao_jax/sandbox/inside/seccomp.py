"""The filter of system calls that a box runs under, written out by hand: a short list of what code in a box has no business with.

Refused: everything that mounts, makes or joins namespaces, loads code into the kernel, reads or writes other processes, sets clocks, uses
kernel keys, and the kinds of memory that no limit of the box counts (memfd, System V segments and queues). Of sockets only the families
that are confined to the box's network namespace are allowed; AF_VSOCK, for one, is not. Priorities, processors and limits may be set of
the caller only: setting those of the warden, a process of the same user, would be within the rights of any process in the box. `clone3`
is answered as if the kernel did not know it, since its flags lie in memory that a filter cannot read; the C library then uses `clone`.
"""

import ctypes
import errno
import os
import struct

ALLOWED_FAMILIES = (1, 2, 10, 16)  # unix, inet, inet6, netlink
NAMESPACES = 0x7E020080  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET, NEWTIME
TIOCSTI = 0x5412
LATER = {  # The same numbers on all machines.
    'pidfd_getfd': 438, 'io_uring_setup': 425, 'io_uring_enter': 426, 'io_uring_register': 427, 'open_tree': 428, 'move_mount': 429,
    'fsopen': 430, 'fsconfig': 431, 'fsmount': 432, 'fspick': 433, 'mount_setattr': 442, 'quotactl_fd': 443, 'memfd_secret': 447}
MACHINES = {
    'x86_64': (0xC000003E, {
        'mount': 165, 'umount2': 166, 'pivot_root': 155, 'chroot': 161, 'swapon': 167, 'swapoff': 168, 'reboot': 169, 'sethostname': 170,
        'setdomainname': 171, 'init_module': 175, 'delete_module': 176, 'finit_module': 313, 'quotactl': 179, 'acct': 163,
        'settimeofday': 164, 'clock_settime': 227, 'clock_adjtime': 305, 'adjtimex': 159, 'add_key': 248, 'request_key': 249,
        'keyctl': 250, 'kexec_load': 246, 'kexec_file_load': 320, 'bpf': 321, 'perf_event_open': 298, 'userfaultfd': 323,
        'open_by_handle_at': 304, 'setns': 308, 'syslog': 103, 'ptrace': 101, 'process_vm_readv': 310, 'process_vm_writev': 311,
        'kcmp': 312, 'memfd_create': 319, 'shmget': 29, 'msgget': 68, 'mbind': 237, 'migrate_pages': 256, 'move_pages': 279,
        'fanotify_init': 300, 'vhangup': 153, 'lookup_dcookie': 212, 'iopl': 172, 'ioperm': 173},
               {'socket': 41, 'clone': 56, 'unshare': 272, 'ioctl': 16, 'clone3': 435},
               {'setpriority': 141, 'sched_setparam': 142, 'sched_setscheduler': 144, 'sched_setaffinity': 203, 'ioprio_set': 251,
                'prlimit64': 302, 'sched_setattr': 314}),
    'aarch64': (0xC00000B7, {
        'mount': 40, 'umount2': 39, 'pivot_root': 41, 'chroot': 51, 'swapon': 224, 'swapoff': 225, 'reboot': 142, 'sethostname': 161,
        'setdomainname': 162, 'init_module': 105, 'delete_module': 106, 'finit_module': 273, 'quotactl': 60, 'acct': 89,
        'settimeofday': 170, 'clock_settime': 112, 'clock_adjtime': 266, 'adjtimex': 171, 'add_key': 217, 'request_key': 218,
        'keyctl': 219, 'kexec_load': 104, 'kexec_file_load': 294, 'bpf': 280, 'perf_event_open': 241, 'userfaultfd': 282,
        'open_by_handle_at': 265, 'setns': 268, 'syslog': 116, 'ptrace': 117, 'process_vm_readv': 270, 'process_vm_writev': 271,
        'kcmp': 272, 'memfd_create': 279, 'shmget': 194, 'msgget': 186, 'mbind': 235, 'migrate_pages': 238, 'move_pages': 239,
        'fanotify_init': 262, 'vhangup': 58, 'lookup_dcookie': 18},
                {'socket': 198, 'clone': 220, 'unshare': 97, 'ioctl': 29, 'clone3': 435},
                {'setpriority': 140, 'sched_setparam': 118, 'sched_setscheduler': 119, 'sched_setaffinity': 122, 'ioprio_set': 30,
                 'prlimit64': 261, 'sched_setattr': 274})}
ABSENT = ('memfd_create', 'memfd_secret', 'shmget', 'msgget', 'userfaultfd', 'io_uring_setup', 'io_uring_enter', 'io_uring_register')

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_NUMBER, _ARCH, _ARGUMENT_0, _ARGUMENT_1 = 0, 4, 16, 24  # Offsets; of the arguments the lower half, on little-endian machines.


def program(machine):
  """The filter for a machine, as packed instructions; None where its numbers are not known here."""
  if machine not in MACHINES:
    return None
  arch, refused, special, own = MACHINES[machine]
  refused = dict(refused, **LATER)
  lines = [(_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, arch), _error(errno.ENOSYS), (_LOAD, 0, 0, _NUMBER)]
  if machine == 'x86_64':
    lines += [(_AT_LEAST, 0, 1, 0x40000000), _error(errno.ENOSYS)]  # The x32 calls.
  for name, number in refused.items():
    lines += [(_EQUAL, 0, 1, number), _error(errno.ENOSYS if name in ABSENT else errno.EPERM)]
  lines += [(_EQUAL, 0, 1, special['clone3']), _error(errno.ENOSYS)]
  families = len(ALLOWED_FAMILIES)
  lines += [(_EQUAL, 0, families + 3, special['socket']), (_LOAD, 0, 0, _ARGUMENT_0)]
  lines += [(_EQUAL, families - i, 0, family) for i, family in enumerate(ALLOWED_FAMILIES)]
  lines += [_error(errno.EAFNOSUPPORT), (_RETURN, 0, 0, _ALLOW)]
  for name in ('clone', 'unshare'):
    lines += [(_EQUAL, 0, 4, special[name]), (_LOAD, 0, 0, _ARGUMENT_0), (_ANY_BIT, 0, 1, NAMESPACES & (~0x80 if name == 'clone' else ~0)),
              _error(errno.EPERM), (_RETURN, 0, 0, _ALLOW)]
  for name, number in dict(own, process_madvise=440, process_mrelease=448).items():
    # The number of a process, 0 for the caller; of two calls the second argument, after the kind of number (of priorities 0, of I/O 1).
    lines += _own_only(number, {'setpriority': 0, 'ioprio_set': 1}.get(name))
  lines += [(_EQUAL, 0, 3, special['ioctl']), (_LOAD, 0, 0, _ARGUMENT_1), (_EQUAL, 0, 1, TIOCSTI), _error(errno.EPERM)]
  lines += [(_RETURN, 0, 0, _ALLOW)]
  return b''.join(struct.pack('HBBI', *line) for line in lines)


def _own_only(number, kind):
  """Lets a call through for the caller itself alone."""
  if kind is None:
    return [(_EQUAL, 0, 4, number), (_LOAD, 0, 0, _ARGUMENT_0), (_EQUAL, 1, 0, 0), _error(errno.EPERM), (_RETURN, 0, 0, _ALLOW)]
  return [(_EQUAL, 0, 6, number), (_LOAD, 0, 0, _ARGUMENT_0), (_EQUAL, 0, 2, kind), (_LOAD, 0, 0, _ARGUMENT_1), (_EQUAL, 1, 0, 0),
          _error(errno.EPERM), (_RETURN, 0, 0, _ALLOW)]


def _error(number):
  return (_RETURN, 0, 0, _ERROR | number)


def install(libc):
  """Puts this process and all that come of it under the filter; needs no_new_privs. Raises OSError where the kernel has no filters.
  Returns False on a machine whose numbers are not known."""
  code = program(os.uname().machine)
  if code is None:
    return False

  class Program(ctypes.Structure):
    _fields_ = [('length', ctypes.c_ushort), ('filter', ctypes.c_void_p)]

  buffer = ctypes.create_string_buffer(code, len(code))
  whole = Program(len(code) // 8, ctypes.cast(buffer, ctypes.c_void_p))
  if libc.prctl(22, 2, ctypes.byref(whole), 0, 0):  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
    number = ctypes.get_errno()
    raise OSError(number, 'the kernel takes no filter of system calls: ' + os.strerror(number))
  return True
