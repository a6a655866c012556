"""A table of kinds of attacks and abuses on a box, and a range that tries them and sees what came of it.

Each attempt is a program for the box. It won when it printed `WON` (it saw its own effect), when it printed a secret of the host, or when
the host sees it: a connection, a changed file, a process that was ended, a process of the box that is left, a host that needs much
memory, an answer beyond its size, a box that does not work afterwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import resource
import secrets
import signal
import socket
import subprocess
import tempfile
import time
from typing import Callable, Iterator

from sao_jax import sandbox

LIMITS = sandbox.Limits(time_s=8.0, memory_mb=160, processes=24, file_mb=8, disk_mb=24, output_bytes=8000, flood_mb=8)
SHORT_S = 0.4  # For what never ends by itself.
HEAD = 'import os, sys, errno, socket, signal, struct, time\ndef won(*x): print("WON", *x, flush=True)\n'
C = ('import ctypes\nL = ctypes.CDLL(None, use_errno=True)\n'
     'def call(*a):\n  r = L.syscall(*a)\n  return r if r >= 0 else -ctypes.get_errno()\n')
FORK = 'def spawn(f):\n  p = os.fork()\n  if p == 0:\n    try: f()\n    finally: os._exit(0)\n  return p\n'


@dataclasses.dataclass(frozen=True)
class Attempt:
  """`program`: Python source, with {names} of the host's secrets filled in; or `act`: what the host does with the box."""

  kind: str
  program: str = ''
  act: Callable[['Range'], bool] | None = None
  time_s: float = 8.0


def tried(body: str) -> str:
  """A program that may fail by an error of the system, which is no win."""
  return 'try:\n' + ''.join('  ' + line + '\n' for line in body.split('\n'
      '')) + 'except (OSError, ValueError, MemoryError) as e: print(repr(e))\n'


def host_files() -> Iterator[str]:
  ways = ('p', '"/proc/self/root" + p', '"/proc/1/root" + p', '"/box/" + "../" * 30 + p', '"/proc/1/cwd" + p', 'link(os.symlink)',
      'link(os.link)')
  for path in ('{secret_file}', '{repository}/pyproject.toml', '/etc/shadow', '/var/log'):
    for way in ways:
      yield (f'p = {path!r}\ndef link(f):\n  if os.path.lexists("/box/k"): os.unlink("/box/k")\n  f(p, "/box/k")\n  return "/box/k"\n'
             + tried(f'w = {way}\nprint(os.listdir(w) if os.path.isdir(w) else open(w, "rb").read())\nwon(w)'))
  yield tried('for f, d, n in os.walk("/"):\n  if f == "/usr": d.clear()\n  if "secret_of_host" in str(n) + str(d): won(f)')
  yield tried('f = os.open("/", os.O_RDONLY)\nfor _ in range(9): f = os.open("..", os.O_RDONLY, dir_fd=f)\n'
      'if "work" in os.listdir(f) and "home" in os.listdir(f): won()')


def proc() -> Iterator[str]:
  for name in ('environ', 'mem', 'maps', 'root/etc', 'cwd', 'fd', 'io', 'stack', 'syscall', 'auxv', 'map_files', 'exe', 'fdinfo',
      'personality'):
    yield tried(f'w = "/proc/1/{name}"\nr = os.listdir(w) if os.path.isdir(w) else open(w, "rb").read(100)\nif r: won(r)')
  for name, text in (('sysrq-trigger', 'b'), ('sys/kernel/core_pattern', '|/box/x'), ('sys/kernel/hostname', 'mine'),
      ('sys/vm/drop_caches', '3'),
                     ('sys/vm/overcommit_memory', '1'), ('1/oom_score_adj', '1000'), ('1/comm', 'x'), ('sys/kernel/modprobe', '/box/x'),
                     ('sys/net/ipv4/ip_forward', '1'), ('sys/user/max_user_namespaces', '99'), ('1/clear_refs', '1'),
                         ('1/coredump_filter', '1'),
                     ('sys/fs/binfmt_misc/register', ':x:M::MZ::/box/x:')):
    yield tried(f'open("/proc/{name}", "w").write({text!r})\nwon()')
  for name in ('kcore', 'kmsg', 'kallsyms', 'keys', 'cmdline', 'timer_list', 'config.gz', 'slabinfo'):
    yield tried(f'if open("/proc/{name}", "rb").read(64): won()')
  yield 'for p in os.listdir("/proc"):\n  if p.isdigit() and int(p) not in (1, os.getpid()): won(p)'
  yield tried('said = open("/proc/{victim}/cmdline").read()\nif "100000" in said: won(said)')  # The number may be one of the box's own.


def environment() -> Iterator[str]:
  yield 'print(os.environ)'
  yield 'import subprocess\nprint(subprocess.run(["env"], capture_output=True).stdout)'
  for path in ('/proc/self/environ', '/proc/1/environ', '/proc/1/task/1/environ', '/proc/thread-self/environ'):
    yield tried(f'print(open({path!r}, "rb").read())')
  yield tried('for l in open("/proc/self/maps"):\n  a, b = [int(x, 16) for x in l.split()[0].split("-")]\n'
      '  if "stack" in l or "heap" in l:\n'
              '    with open("/proc/self/mem", "rb") as f:\n      f.seek(a)\n      d = f.read(b - a)\n'
                  '      i = d.find(b"secret_" + b"value_")\n      if i >= 0: won(d[i-20:i+60])')
  yield 'if set(os.environ) & {"SECRET_OF_HOST", "PYTHONPATH", "VIRTUAL_ENV", "OLDPWD", "SHLVL"}: won()'


def network() -> Iterator[str]:
  for family, address in (('AF_INET', '("127.0.0.1", {port})'), ('AF_INET6', '("::1", {port})'), ('AF_INET', '("{address}", {port})'),
                          ('AF_INET', '("169.254.169.254", 80)'), ('AF_INET', '("8.8.8.8", 53)'), ('AF_INET', '("0.0.0.0", {port})'),
                          ('AF_UNIX', '"\\0{abstract}"'), ('AF_UNIX', '"{unix_socket}"'), ('AF_UNIX', '"/var/run/docker.sock"'),
                          ('AF_UNIX', '"/proc/1/root{unix_socket}"'), ('AF_UNIX', '"/run/dbus/system_bus_socket"')):
    yield tried(f's = socket.socket(socket.{family}, socket.SOCK_STREAM)\ns.settimeout(0.3)\ns.connect({address})\nwon()')
  for address in ('"127.0.0.1"', '"{address}"', '"255.255.255.255"'):
    yield tried(f's = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\ns.setsockopt(1, 6, 1)\ns.sendto(b"x", ({address}, {{port}}))')
  for family, kind in ((40, 1), (17, 3), (17, 2), (38, 5), (31, 3), (29, 3), (9, 5), (44, 3), (15, 3)):
    yield tried(f's = socket.socket({family}, {kind}, 0)\nwon()')
  yield tried('s = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)\ns.settimeout(0.3)\ns.connect((2, 1024))\nwon()')
  for protocol in (1, 6, 255):
    yield tried(f's = socket.socket(socket.AF_INET, socket.SOCK_RAW, {protocol})\nwon()')
  yield tried('print(socket.getaddrinfo("example.com", 80))\nwon()')
  yield tried('names = [n for _, n in socket.if_nameindex()]\n'
      'if [n for n in names if n != "lo" and not n.startswith(DUMB)]: won(names)').replace(
      'DUMB', '("sit", "tunl", "ip6", "gre", "erspan", "ip_vti", "dummy")')
  yield tried('import fcntl\ns = socket.socket()\nfcntl.ioctl(s, 0x8914, struct.pack("16sH14s", b"lo", 0, b""))\nwon()')
  yield tried('s = socket.socket(16, 3, 0)\ns.bind((0, 0))\n'
      's.send(struct.pack("IHHII", 32, 16, 0x405, 1, 0) + struct.pack("BxHiII", 0, 0, 0, 0, 0))\n'
              'd = s.recv(999)\nif struct.unpack("i", d[16:20])[0] == 0: won()')


def fork_bombs() -> Iterator[tuple[str, float]]:
  yield 'os.execlp("bash", "bash", "-c", ":(){{ :|:& }};:; sleep 9")', SHORT_S
  yield 'os.execlp("sh", "sh", "-c", "f() {{ f & f & }}; f; wait")', 8.0
  for extra in ('', 'os.setsid()', 'signal.signal(15, signal.SIG_IGN)', 'os.setpgid(0, 0)', 'time.sleep(0.001)'):
    yield f'while True:\n  try:\n    os.fork()\n    {extra}\n  except OSError: pass', SHORT_S
  yield 'while True:\n  try:\n    if os.fork(): os._exit(0)\n  except OSError: pass', SHORT_S
  yield ('import threading\nn = 0\ntry:\n  while n < 9999:\n'
      '    threading.Thread(target=time.sleep, args=(9,), daemon=True).start()\n    n += 1\nexcept RuntimeError: pass\n'
      'if n > 40: won(n)\nos._exit(0)', 8.0)
  yield 'def go():\n  while True:\n    try:\n      if os.fork() == 0: os.setsid()\n    except OSError: time.sleep(0.01)\ngo()', SHORT_S
  yield ('import subprocess\np = []\ntry:\n  while len(p) < 9999: p.append(subprocess.Popen(["sleep", "9"]))\n'
      'except OSError: pass\nif len(p) > 40: won(len(p))', 8.0)
  yield 'import resource\ntry:\n  resource.setrlimit(resource.RLIMIT_NPROC, (9999, 9999))\n  won()\nexcept (ValueError, OSError): pass', 8.0


def memory_bombs() -> Iterator[tuple[str, float]]:
  touch = 'for i in range(0, len(x), 4096): x[i] = 1\n'
  yield tried('x = bytearray(1 << 34)\nwon()'), 8.0
  yield tried('x = []\nwhile True: x.append(bytearray(1 << 20))'), 8.0
  yield tried('x = "a"\nwhile True: x += x'), 8.0
  yield tried('x = 10 ** (10 ** 9)\nwon()'), SHORT_S
  yield f'for _ in range(4): os.fork()\nx = bytearray(100 << 20)\n{touch}time.sleep(4)\nwon()\ntime.sleep(9)', 30.0  # It was let go on.
  yield f'import mmap\nfor _ in range(3): os.fork()\nx = mmap.mmap(-1, 100 << 20)\n{touch}time.sleep(9)', 8.0
  yield (f'import mmap\nn = 0\ntry:\n  while n < 999:\n    x = mmap.mmap(-1, 50 << 20)\n    {touch.strip()}\n    n += 1\n'
      f'    x.close()\nexcept OSError: pass', SHORT_S)
  for place in ('/dev/shm', '/tmp', '/box'):
    yield tried(f'for i in range(99): open("{place}/m%d" % i, "wb").write(b"x" * (7 << 20))\nwon()'), 8.0
  yield tried('f = os.memfd_create("x")\nwon()'), 8.0
  yield C + 'if call(29, 0, 1 << 30, 0o1600) > 0 and os.uname().machine == "x86_64": won()', 8.0
  yield C + 'if call(447, 0) > 0: won()', 8.0
  yield tried('p = []\nwhile True:\n  r, w = os.pipe()\n  os.set_blocking(w, False)\n  p += [r, w]\n  try:\n'
      '    while True: os.write(w, b"x" * 65536)\n  except BlockingIOError: pass'), 8.0
  yield tried('p = []\nwhile True:\n  a, b = socket.socketpair()\n  a.setblocking(False)\n  p += [a, b]\n  try:\n'
      '    while True: a.send(b"x" * 65536)\n  except BlockingIOError: pass'), 8.0
  yield ('import resource\ntry:\n  resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))\n  won()\n'
      'except (ValueError, OSError): pass', 8.0)
  yield 'sys.setrecursionlimit(10**9)\ndef f(): f()\nf()', 8.0
  yield tried('import mmap\nx = mmap.mmap(-1, 1 << 20)\n' + C + 'if L.mlockall(3) == 0: won()'), 8.0
  yield 'if os.nice(0) >= 5:\n  try:\n    os.nice(-5)\n    won()\n  except OSError: pass', 8.0


def disk() -> Iterator[tuple[str, float]]:
  yield tried('open("big", "wb").write(b"x" * (9 << 20))\nwon()'), 8.0
  yield tried('f = open("sparse", "wb")\nf.truncate(1 << 40)\nwon()'), 8.0
  yield tried('f = open("far", "wb")\nf.seek(1 << 40)\nf.write(b"x")\nf.flush()\nwon()'), 8.0
  yield tried('f = os.open("alloc", os.O_CREAT | os.O_RDWR)\nos.posix_fallocate(f, 0, 1 << 30)\nwon()'), 8.0
  yield tried('for i in range(100): open("f%d" % i, "wb").write(b"x" * (1 << 20))\nwon()'), 8.0
  yield tried('for i in range(100):\n  open("/tmp/f%d" % (i % 2), "ab").write(b"x" * (1 << 20))\nwon()'), 8.0
  yield tried('n = 0\nwhile n < 100000:\n  os.close(os.open("n%d" % n, os.O_CREAT))\n  n += 1\nwon()'), 8.0
  yield tried('n = 0\nwhile n < 100000:\n  os.mkdir("d")\n  os.chdir("d")\n  n += 1\nwon()'), 8.0
  yield tried('open("one", "w").close()\nn = 0\nwhile n < 100000:\n  os.link("one", "l%d" % n)\n  n += 1\nwon()'), 8.0
  yield tried('n = 0\nwhile n < 100000:\n  os.symlink("x" * 4000, "s%d" % n)\n  n += 1\nwon()'), 8.0
  yield tried('f = open("held", "wb")\nos.unlink("held")\nfor i in range(100): f.write(b"x" * (1 << 20))\nf.flush()\nwon()'), 8.0
  yield tried('os.mkfifo("pipe")\nos.open("pipe", os.O_RDONLY)'), SHORT_S
  yield tried('import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (1 << 40, 1 << 40))\nwon()'), 8.0
  yield tried('os.setxattr("/box", "user.x", b"x" * 60000)\n'
      'for i in range(100000): os.setxattr("/box", "user.x%d" % i, b"x" * 60000)\nwon()'), SHORT_S


def output() -> Iterator[tuple[str, float]]:
  for stream in (1, 2):
    yield f'while True: os.write({stream}, b"x" * 65536)', 8.0
    yield f'while True: os.write({stream}, b"\\n")', SHORT_S
  yield 'while True:\n  os.write(1, os.urandom(65536))\n  os.write(2, os.urandom(65536))', 8.0
  yield 'os.write(1, bytes(range(256)) * 200)', 8.0
  yield 'os.write(1, b"\\xff\\xfe\\x00" * 40000 + b"\\x1b[2J\\x1b]0;owned\\x07" * 1000)', 8.0
  yield 'while True:\n  os.write(1, b".")\n  time.sleep(0.05)', SHORT_S
  yield 'os.close(1)\nos.close(2)\nos.close(0)\ntime.sleep(9)', SHORT_S
  yield 'os.close(1)\nos.dup2(2, 1)\nprint("x" * 99999)', 8.0
  yield FORK + 'for _ in range(6): spawn(lambda: [os.write(1, b"y" * 65536) for _ in range(10**6)])', 8.0
  yield 'os.execlp("yes", "yes")', 8.0
  yield 'os.execlp("cat", "cat", "/dev/urandom")', 8.0
  yield 'os.execlp("cat", "cat", "/dev/zero")', 8.0
  yield 'os.set_blocking(1, False)\nwhile True:\n  try: os.write(1, b"z" * 65536)\n  except BlockingIOError: pass', 8.0
  yield 'import fcntl\ntry: fcntl.fcntl(1, 1031, 1 << 30)\nexcept OSError: pass\nelse: won()', 8.0


def left_behind() -> Iterator[tuple[str, float]]:
  sleeps = 'time.sleep(999)'
  for prepare in ('', 'os.setsid()', 'os.setpgid(0, 0)', '[signal.signal(s, signal.SIG_IGN) for s in (1, 2, 3, 13, 15, 20, 21, 22)]',
                  'os.close(0); os.close(1); os.close(2)', 'os.kill(os.getpid(), signal.SIGSTOP)', 'os.chdir("/"); os.umask(0)',
                  '[os.close(i) for i in range(3)]; os.setsid(); os.fork()'):
    yield FORK + f'def f():\n  {prepare}\n  {sleeps}\nspawn(f)\ntime.sleep(0.02)', 8.0
    yield FORK + f'def g():\n  {prepare}\n  {sleeps}\ndef f():\n  os.setsid()\n  spawn(g)\nspawn(f)\ntime.sleep(0.02)', 8.0
  yield FORK + f'def f():\n  while True:\n    if os.fork(): os._exit(0)\nspawn(f)\ntime.sleep(0.02)', 8.0
  yield f'os.execlp("sh", "sh", "-c", "nohup setsid sleep 999 >/dev/null 2>&1 & exit 0")', 8.0
  yield f'import threading\nthreading.Thread(target={sleeps.split("(")[0]}, args=(999,)).start()\nos.kill(os.getpid(), 9)', 8.0
  yield FORK + f'import pty\np, f = pty.fork()\nif p == 0: {sleeps}\ntime.sleep(0.02)', 8.0
  yield FORK + f'spawn(lambda: {sleeps})\n{sleeps}', SHORT_S
  yield (FORK + f'signal.signal(15, signal.SIG_IGN)\nsignal.signal(24, signal.SIG_IGN)\nspawn(lambda: exec("while True: pass"))\n'
      f'while True: pass', SHORT_S)


def signals() -> Iterator[str]:
  for number in (1, 2, 9, 10, 11, 15, 19, 24):
    yield tried(f'os.kill(1, {number})\ntime.sleep(0.01)')
  for target in ('{victim}', '-{victim}', '{host}', '{keeper}'):
    yield tried(f'os.kill({target}, 9)\nwon()')
  yield tried('os.kill(-1, 9)')
  yield tried('signal.pidfd_send_signal(os.pidfd_open(1), 9)')
  yield tried('os.killpg(1, 9)')
  yield tried('os.killpg(0, 9)')
  yield tried('signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)\ntime.sleep(1)')


def tracing() -> Iterator[str]:
  for request in (16, 0x4206):
    yield C + f'if call(101, {request}, 1, 0, 0) == 0 and os.uname().machine == "x86_64": won()'
    yield C + f'if L.ptrace({request}, 1, 0, 0) == 0: won()'
  for number in (310, 311):
    yield (C + f'b = ctypes.create_string_buffer(64)\nv = (ctypes.c_uint64 * 2)(ctypes.addressof(b), 64)\n'
        f'r = (ctypes.c_uint64 * 2)(0x400000, 64)\nif call({number}, 1, v, 1, r, 1, 0) > 0: won()')
  yield tried('m = open("/proc/1/mem", "r+b", 0)\nwon()')
  for descriptor in range(0, 12, 3):
    yield C + f'p = os.pidfd_open(1)\nif call(438, p, {descriptor}, 0) >= 0: won()'
  yield tried('for n in range(20):\n  f = os.open("/proc/1/fd/%d" % n, os.O_RDWR)\n  won(n)')
  yield C + 'if call(312, os.getpid(), 1, 0, 0, 0) >= 0 and os.uname().machine == "x86_64": won()'


def mounting() -> Iterator[str]:
  for source, target, kind, flags in (('proc', '/box', 'proc', 0), ('t', '/box', 'tmpfs', 0), ('/usr', '/box', '', 4096), ('', '/',
      '', 32),
                                      ('', '/usr', '', 32 | 4096), ('s', '/box', 'sysfs', 0), ('d', '/box', 'devtmpfs', 0), ('c',
                                          '/box', 'cgroup2', 0),
                                      ('/dev/vda', '/box', 'ext4', 0), ('', '/', '', 1 << 18), ('o', '/box', 'overlay', 0)):
    yield C + f'if L.mount({source.encode()!r}, {target.encode()!r}, {kind.encode()!r}, {flags}, None) == 0: won()'
  for target in ('/proc/sys', '/proc/kcore', '/box', '/usr'):
    yield C + f'if L.umount2({target.encode()!r}, 2) == 0: won()'
  for flag in (0x20000, 0x10000000, 0x10020000, 0x20000000, 0x40000000, 0x8000000, 0x4000000, 0x2000000, 0x80):
    yield C + f'if L.unshare({flag}) == 0: won()'
  for flag in (0x10000000, 0x20000, 0x40000000):
    yield C + f'p = call(56, {flag} | 17, 0, 0, 0, 0)\nif p == 0: os._exit(0)\nif p > 0 and os.uname().machine == "x86_64": won()'
  for name in ('mnt', 'net', 'pid', 'user', 'ipc'):
    yield tried(C + f'f = os.open("/proc/1/ns/{name}", os.O_RDONLY)\nif L.setns(f, 0) == 0: won()')
  for number in (428, 430, 433, 442, 429):
    yield C + f'if call({number}, -100, b"/", 0, 0, 0) >= 0: won()'
  yield tried('os.mkdir("j")\nos.chroot("j")\nwon()')
  yield tried('f = os.open("/", os.O_RDONLY)\nos.chroot("/box")\nos.fchdir(f)\nwon()')
  yield C + 'if call(155, b"/box", b"/box") == 0 and os.uname().machine == "x86_64": won()'


def devices() -> Iterator[str]:
  for kind, major, minor in (('S_IFBLK', 254, 0), ('S_IFBLK', 8, 0), ('S_IFCHR', 1, 1), ('S_IFCHR', 1, 3), ('S_IFCHR', 10, 232)):
    yield tried(f'import stat\nos.mknod("/box/dev", stat.{kind} | 0o666, os.makedev({major}, {minor}))\nwon()')
  for name in ('mem', 'kmem', 'kmsg', 'port', 'sda', 'vda', 'nvme0', 'fuse', 'kvm', 'net/tun', 'loop-control', 'mapper/control',
      'tty', 'console'):
    yield tried(f'os.open("/dev/{name}", os.O_RDONLY)\nwon()')
  yield tried('os.open("/dev/null2", os.O_CREAT | os.O_WRONLY)\nwon()')


def rights() -> Iterator[str]:
  for call in ('os.setuid(0)', 'os.seteuid(0)', 'os.setgid(0)', 'os.setgroups([0])', 'os.setresuid(0, 0, 0)', 'os.chown("/box", 0, 0)',
               'os.chmod("/usr/bin/env", 0o777)', 'os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))',
                   'os.setpriority(os.PRIO_PROCESS, 1, 19)',
               'os.setpriority(os.PRIO_PROCESS, 0, -10)', 'os.setpriority(os.PRIO_USER, 0, 19)', 'os.sched_setaffinity(1, [0])',
               'os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))',
                   'import resource; resource.prlimit(1, resource.RLIMIT_NOFILE, (3, 3))',
               'import resource; resource.prlimit(1, resource.RLIMIT_CPU, (1, 1))', 'socket.sethostname("mine")',
                   'time.clock_settime(time.CLOCK_REALTIME, 0)'):
    yield tried(f'{call}\nwon()')
  yield C + 'h = struct.pack("Ii", 0x20080522, 0)\nd = struct.pack("6I", *[0xffffffff] * 6)\nif L.capset(h, d) == 0: won()'
  yield C + 'if L.prctl(38, 0, 0, 0, 0) == 0: won()'
  for program in ('su', 'sudo', 'mount', 'newgrp', 'passwd', 'pkexec', 'chsh', 'fusermount'):
    yield (f'import subprocess\ntry: r = subprocess.run([{program!r}, "-c", "id"], input=b"", capture_output=True, timeout=3)\n'
        f'except OSError: sys.exit()\nif b"uid=0" in r.stdout: won(r)')
  yield tried('import shutil\nshutil.copy("/usr/bin/id", "/box/id")\nos.chmod("/box/id", 0o6755)\nimport subprocess\n'
      'if b"uid=0" in subprocess.run(["/box/id"], capture_output=True).stdout: won()')
  yield 'if any(int(l.split()[1], 16) for l in open("/proc/self/status") if l.startswith("Cap")): won()'


def system_calls() -> Iterator[str]:
  numbers = {'bpf': 321, 'keyctl': 250, 'add_key': 248, 'userfaultfd': 323, 'io_uring_setup': 425, 'kexec_load': 246, 'init_module': 175,
             'finit_module': 313, 'delete_module': 176, 'swapon': 167, 'acct': 163, 'settimeofday': 164, 'syslog': 103,
                 'perf_event_open': 298,
             'open_by_handle_at': 304, 'fanotify_init': 300, 'iopl': 172, 'ioperm': 173, 'reboot': 169, 'setdomainname': 171,
                 'vhangup': 153}
  for name, number in numbers.items():
    yield (C + f'r = call({number}, 0, 0, 0, 0, 0)\n'
        f'if r not in (-errno.EPERM, -errno.ENOSYS) and os.uname().machine == "x86_64": won({name!r}, r)')
  yield C + 'r = call(0x40000000 + 39)\nif r > 0: won()'


def read_only() -> Iterator[str]:
  for path in ('/usr/bin/x', '/etc/passwd', '/etc/ld.so.preload', '/opt/box/warden.py', '/opt/box/session.py', '/x', '/run/x',
      '/sys/x', '/root/x', '/bin/sh'):
    yield tried(f'open({path!r}, "a").write("x")\nwon()')
  yield tried('open(os.path.join(os.path.dirname(os.__file__), "site.py"), "a")\nwon()')
  yield tried('os.rename("/usr/bin/env", "/usr/bin/envy")\nwon()')
  yield tried('os.unlink("/etc/passwd")\nwon()')
  yield tried('os.utime("/usr/bin/env", (0, 0))\nwon()')
  yield tried('os.symlink("/box", "/var/lib")\nwon()')


def inherited() -> Iterator[str]:
  yield 'f = [x for x in os.listdir("/proc/self/fd") if int(x) > 2 and os.path.exists("/proc/self/fd/" + x)]\nif f: won(f)'
  yield 'for n in range(3, 256):\n  try: os.fstat(n)\n  except OSError: continue\n  won(n)'
  yield 'for n in range(0, 256):\n  try: s = socket.socket(fileno=os.dup(n))\n  except OSError: continue\n  won(n, s)'
  yield 'for n in range(0, 3):\n  import stat\n  if not (stat.S_ISFIFO(os.fstat(n).st_mode) or stat.S_ISCHR(os.fstat(n).st_mode)): won(n)'
  yield tried('if os.getsid(0) not in (1, os.getpid()): won()')
  yield tried('os.open("/dev/tty", os.O_RDWR)\nwon()')
  yield 'if "{repository}" in " ".join(sys.path) + os.getcwd(): won()'
  yield 'import signal\nfor s in (13, 25, 15, 2):\n  if s != 2 and signal.getsignal(s) == signal.SIG_IGN and s == 15: won(s)'


def kernel_names() -> Iterator[str]:
  yield 'if "shared_of_host" in str(os.listdir("/dev/shm")): won()'
  yield C + 'r = call(64, 0x5A0, 1, 0)\nif r >= 0 and os.uname().machine == "x86_64": won()'
  yield C + 'if call(68, 1, 0o1600) >= 0 and os.uname().machine == "x86_64": won()'
  yield 'if os.uname().nodename != "box": won(os.uname().nodename)'
  yield tried('print(open("/proc/sysvipc/sem").read())\nif len(open("/proc/sysvipc/sem").readlines()) > 1: won()')
  yield tried('os.listdir("/sys/fs/cgroup")\nwon()')
  yield tried('if os.listdir("/sys"): won()')


def by_host() -> Iterator[Callable[['Range'], bool]]:
  """What the host does with what code in the box has prepared."""
  scripts = [
      'ln -sfn {secret_file} bait', 'ln -sfn /etc/shadow bait', 'ln -sfn ../../../../../../{secret_file} bait',
          'ln -sfn /proc/1/environ bait',
      'ln -sfn /proc/self/environ bait', 'mkfifo bait', 'ln -sfn bait bait', 'mkdir bait', 'ln -sfn /dev/zero bait',
          'ln -sfn /proc/kmsg bait']
  for script in scripts:
    yield lambda r, s=script: r.bait(s, lambda: r.box.read('bait'))
    yield lambda r, s=script: r.bait(f'mkdir top; cd top; {s}', lambda: r.copied('top'))
  yield lambda r: r.bait('ln -sfn {folder} bait', lambda: r.box.write('bait/secret_of_host', b'changed'))
  yield lambda r: r.bait('ln -sfn {secret_file} bait', lambda: r.box.write('bait', b'changed'))
  yield lambda r: r.bait('mkdir top; cd top; ln -s {folder} a; mkdir b; ln -s ../a b/c', lambda: r.copied('top'))
  yield lambda r: r.bait('mkdir -p "top/a\nb/ ..."; echo 1 > "top/a\nb/ .../\'\\"; echo 2 > "top/-rf *"', lambda: r.copied('top'))
  yield lambda r: r.bait('i=0; while [ $i -lt 250 ]; do mkdir d; cd d; i=$((i+1)); done', lambda: r.copied('d'))
  yield lambda r: r.bait('mkdir top; mkdir top/$(printf "\\377\\376"); echo x > top/$(printf "\\377\\376")/f', lambda: r.copied('top'))
  yield lambda r: r.bait('mkdir top; truncate -s 8000000 top/big', lambda: r.box.get_folder('top', r.fresh(), max_bytes=1000))
  for argv in (['true'] + ['x'] * 200_000, ['echo', 'y' * (1 << 20)], ['true', '\udcff\udcfe'], ['-c'], [''], ['..'], ['true\n']):
    yield lambda r, a=argv: r.bounded(lambda: r.box.run(a))
  yield lambda r: r.bounded(lambda: r.box.run(['env'], env={'BIG': 'x' * (1 << 20)}))
  yield lambda r: r.bounded(lambda: r.box.run(['true'], cwd='/box/' + 'd/' * 3000))
  yield lambda r: r.bounded(lambda: r.box.run(['cat'], stdin=os.urandom(1 << 20)))
  for code in ('import os\nfor f in range(3, 40):\n  try: os.write(f, b"\\0\\0\\0\\5{{}}" * 9)\n  except OSError: pass',
               'import os, struct\nos.write(4, struct.pack(">I", 2**31) + b"x" * 5000)',
               'import os, struct, json\nh = json.dumps(dict(id=1, value=True, error=False, sizes=[-1, 2])).encode()\n'
                   'os.write(4, struct.pack(">I", len(h)) + h)',
               'import os, struct, json\nh = b"[" * 60000\nos.write(4, struct.pack(">I", len(h)) + h)\n',
               'import os\nos.dup2(1, 4)\nos.dup2(1, 3)', 'import os\nos.write(4, b"x" * 10**7)', 'import os\nos.close(3)',
               'import sys\nsys.modules["ast"] = None\nsys.stdout = 7\n__builtins__.repr = None\nrepr = 0',
               'import gc\nfor o in gc.get_objects():\n  if isinstance(o, dict) and "ENVIRONMENT" in o: o.clear()',
               'class E(BaseException):\n  __class__ = property(lambda s: 1/0)\nraise E', 'import os\nos.fork()\nprint(1)',
               'print("x" * 10**6)\n"y" * 10**8',
               'import os\nfor f in os.listdir("/proc/self/fd"):\n'
                   '  if int(f) > 4 and os.path.exists("/proc/self/fd/" + f): print("WON", f)',
               'import gc\nfor o in gc.get_objects():\n  try: o._reader, os.write(o._reader, b"x" * 100), print("WON")\n'
                   '  except BaseException: pass'):
    yield lambda r, c=code: r.in_session(c)


TABLE: dict[str, Callable[[], Iterator]] = {
    'files of the host': host_files, '/proc': proc, 'environment': environment, 'network': network, 'fork bombs': fork_bombs,
    'memory': memory_bombs, 'disk': disk, 'output': output, 'processes left behind': left_behind, 'signals': signals, 'tracing': tracing,
    'mounts and namespaces': mounting, 'devices': devices, 'rights': rights, 'system calls': system_calls, 'read-only system': read_only,
    'inherited': inherited, 'names of the kernel': kernel_names, 'what the host reads, starts and is answered': by_host}


def attempts() -> list[Attempt]:
  """The whole table."""
  made = []
  for kind, rows in TABLE.items():
    for row in rows():
      if callable(row):
        made.append(Attempt(kind, act=row))
      else:
        program, time_s = row if isinstance(row, tuple) else (row, 8.0)
        made.append(Attempt(kind, program, None, time_s))
  return made


class Range:
  """A host with secrets, and a box to attack it from."""

  def __init__(self, **settings):
    with contextlib.ExitStack() as stack:
      self.folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
      self.secret = 'secret_value_' + secrets.token_hex(16)
      self.file = self.folder / 'secret_of_host'
      self.file.write_text(self.secret)
      os.environ['SECRET_OF_HOST'] = self.secret
      stack.callback(os.environ.pop, 'SECRET_OF_HOST')
      self.victim = subprocess.Popen(['sleep', '100000'])
      stack.callback(self._end_victim)
      self.listeners = [self._listen(stack, *where) for where in (
          (socket.AF_INET, ('0.0.0.0', 0)), (socket.AF_UNIX, '\0' + self.secret[-12:]), (socket.AF_UNIX, str(self.folder / 'socket')))]
      self.port = self.listeners[0].getsockname()[1]
      self.listeners.append(self._listen(stack, socket.AF_INET, ('0.0.0.0', self.port), socket.SOCK_DGRAM))
      with contextlib.suppress(OSError):
        self.listeners.append(self._listen(stack, socket.AF_INET6, ('::1', self.port)))
      self.box = stack.enter_context(contextlib.closing(sandbox.open(limits=LIMITS, **settings)))
      self.keeper = self.box._connection.process.pid
      self.fill = {
          'secret_file': str(self.file), 'repository': str(pathlib.Path(__file__).parents[1]), 'victim': str(self.victim.pid),
              'host': str(os.getpid()),
          'keeper': str(self.keeper), 'port': str(self.port), 'address': _address(), 'abstract': self.secret[-12:],
              'folder': str(self.folder),
          'unix_socket': str(self.folder / 'socket')}
      self._memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
      self._stack = stack.pop_all()

  def close(self) -> None:
    self._stack.close()

  def _end_victim(self) -> None:
    self.victim.kill()
    self.victim.wait()

  def _listen(self, stack, family, address, kind=socket.SOCK_STREAM):
    listener = stack.enter_context(socket.socket(family, kind))
    listener.bind(address)
    if kind == socket.SOCK_STREAM:
      listener.listen(8)
    listener.setblocking(False)
    return listener

  def filled(self, text: str) -> str:
    """`text` with the names in braces filled in; doubled braces are single ones then."""
    for name, value in self.fill.items():
      text = text.replace('{' + name + '}', value)
    return text.replace('{{', '{').replace('}}', '}')

  def attempt(self, attempt: Attempt) -> str:
    """'' where nothing came of it, else what did."""
    start = time.monotonic()
    if attempt.act is not None:
      said = 'the host was led astray' if attempt.act(self) else ''
    else:
      program = HEAD + self.filled(attempt.program)
      result = self.box.run(['python3', '-I', '-S', '-c', program], time_s=attempt.time_s)
      said = self._said(result.stdout + result.stderr)
    return said or self._seen(time.monotonic() - start)

  def _said(self, output: bytes) -> str:
    if b'WON' in output:
      return output[output.index(b'WON'):][:200].decode(errors='replace')
    if self.secret.encode() in output:
      return 'it knows the secret'
    return f'{len(output)} bytes of output' if len(output) > 2 * LIMITS.output_bytes + 400 else ''

  def _seen(self, seconds: float) -> str:
    """What the host sees of a successful attack."""
    left = self.left()
    if left:
      return f'left processes: {left}'
    for listener in self.listeners:
      with contextlib.suppress(BlockingIOError):
        (listener.accept if listener.type == socket.SOCK_STREAM else lambda: listener.recvfrom(10))()
        return 'a connection'
    if self.file.read_text() != self.secret or len(list(self.folder.iterdir())) != 2:
      return 'a file of the host was changed'
    if self.victim.poll() is not None:
      return 'a process of the host was ended'
    if seconds > 30.0:
      return f'{seconds:.0f} s'
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - self._memory
    if grown > 150_000:
      return f'the host needed {grown} KB more'
    return ''

  def left(self) -> list[int]:
    """Processes in the box besides its first one, seen from the host. (What lost its parent belongs to the first one.)"""
    warden, = _children(self.keeper)
    deadline = time.monotonic() + 60.0
    while (found := _children(warden)) and time.monotonic() < deadline and not self._sessions():
      time.sleep(0.002)
    return found

  def _sessions(self) -> bool:
    return False

  def works(self) -> bool:
    """Whether the box still does what it should; also makes room in it."""
    clean = 'cd /box; find . -mindepth 1 -delete; find /tmp /dev/shm -mindepth 1 -delete; echo works'
    return self.box.run(['sh', '-c', clean], time_s=600.0).stdout == b'works\n'

  # --- What the host does -------------------------------------------------------------------------------------------------------

  def fresh(self) -> pathlib.Path:
    return pathlib.Path(self._stack.enter_context(tempfile.TemporaryDirectory())) / 'out'

  def bait(self, script: str, act: Callable[[], object]) -> bool:
    """Whether `act` gave the secret, after code in the box has done its part."""
    self.box.run(['sh', '-c', self.filled(script)])
    try:
      given = act()
    except (sandbox.PathError, ValueError):
      return False
    return isinstance(given, bytes) and (self.secret.encode() in given or b'root:' in given) or given is True

  def copied(self, path: str) -> bool:
    """Whether a copy of a folder of the box holds what is not the box's."""
    target = self.fresh()
    self.box.get_folder(path, target)
    for found in target.rglob('*'):
      try:
        real = found.resolve()
      except (OSError, RuntimeError):  # A circle of links.
        continue
      if not real.is_relative_to(target.resolve()) or found.is_file() and self.secret in found.read_text(errors='replace'):
        return True
    return False

  def bounded(self, act: Callable[[], sandbox.Result]) -> bool:
    result = act()
    return len(result.stdout) + len(result.stderr) > 2 * LIMITS.output_bytes + 400

  def in_session(self, code: str) -> bool:
    """Whether code in a Python session breaks more than its session."""
    session = self.box.python()
    result = session.run(code, time_s=0.5)
    later = session.run('"al" + "ive"', time_s=0.5)
    session.close()
    fresh = self.box.python()
    good = fresh.run('6 * 7').value == '42'
    fresh.close()
    return not good or 'WON' in result.output or max(len(result.output), len(result.value or ''),
        len(result.error or '')) > 30_000 or later.ending not in (
        'answered', 'ended', 'time', 'exited', 'killed')


def _children(pid: int) -> list[int]:
  found = []
  for task in pathlib.Path(f'/proc/{pid}/task').iterdir():
    found += [int(child) for child in (task / 'children').read_text().split()]
  return found


def _address() -> str:
  """An address of this host that is not the loopback, if it has one."""
  with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
    try:
      probe.connect(('192.0.2.1', 9))
      return probe.getsockname()[0]
    except OSError:
      return '127.0.0.1'


def run(chosen: list[Attempt], **settings) -> dict:
  """Counts, and the successful ones, of a list of attempts; a box serves them all."""
  succeeded, left, harmed = [], 0, []
  opened = Range(**settings)
  try:
    for number, attempt in enumerate(chosen):
      came = opened.attempt(attempt)
      left += came.startswith('left')
      if came:
        succeeded.append((attempt.kind, attempt.program, came))
      if not opened.works():
        harmed.append((attempt.kind, attempt.program))
        break
      del number
    process = opened.box._connection.process
  finally:
    opened.close()
  return {'attempts': len(chosen), 'succeeded': succeeded, 'left': left, 'boxes_broken': harmed, 'ended': process.poll() is not None}


__all__ = ['Attempt', 'LIMITS', 'Range', 'TABLE', 'attempts', 'run', 'signal']
