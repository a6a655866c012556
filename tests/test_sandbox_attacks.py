"""Attacks on a box and abuses of it: none succeeds, none leaves a process behind, none harms the host. The table: sandbox_attacks.py."""

import os
import subprocess
import sys

import pytest

import sandbox_attacks
from sao_jax import sandbox
from sao_jax.sandbox import backends
from sao_jax.sandbox.inside import seccomp

try:
  sandbox.open().close()
  REASON = ''
except sandbox.Unavailable as unavailable:
  REASON = str(unavailable)
needs_box = pytest.mark.skipif(bool(REASON), reason=REASON or 'there are boxes here')
EVERYTHING = sandbox_attacks.attempts()


def check(found, least):
  assert found['attempts'] >= least
  assert (found['succeeded'], found['left'], found['boxes_broken'], found['ended']) == ([], 0, [], True)


def test_the_table_is_large_and_of_many_kinds():
  assert len(EVERYTHING) >= 300 and len(sandbox_attacks.TABLE) >= 15
  assert len({(a.kind, a.program, a.act) for a in EVERYTHING}) == len(EVERYTHING)
  for kind in sandbox_attacks.TABLE:
    assert sum(a.kind == kind for a in EVERYTHING) >= 5


@needs_box
def test_some_of_every_kind_fail():
  chosen = []
  for kind in sandbox_attacks.TABLE:
    chosen += [a for a in EVERYTHING if a.kind == kind][1::8][:2]
  check(sandbox_attacks.run(chosen), 30)


@needs_box
@pytest.mark.slow
def test_all_of_them_fail():
  check(sandbox_attacks.run(EVERYTHING), 300)


def test_the_table_finds_what_is_not_isolated():
  """Without isolation the same programs succeed, so that the table cannot pass by being blind."""
  won = set()
  target = sandbox_attacks.Range.__new__(sandbox_attacks.Range)
  target.secret = 'secret_value_' + 'a' * 32
  with sandbox.open('plain', limits=sandbox_attacks.LIMITS) as box:
    for attempt in EVERYTHING:
      if attempt.kind in ('files of the host', 'names of the kernel') and '{' not in attempt.program and 'walk' not in attempt.program:
        result = box.run([sys.executable, '-I', '-S', '-c', sandbox_attacks.HEAD + attempt.program], time_s=60.0)
        if target._said(result.stdout + result.stderr):
          won.add(attempt.program)
  assert len(won) >= 3


@needs_box
def test_the_same_holds_under_bubblewrap():
  try:
    sandbox.open('bubblewrap').close()
  except sandbox.Unavailable as error:
    pytest.skip(str(error))
  chosen = []
  for kind in sandbox_attacks.TABLE:
    chosen += [a for a in EVERYTHING if a.kind == kind and 'n < 100000' not in a.program][1::8][:2]  # It cannot limit how many files.
  check(sandbox_attacks.run(chosen, backend='bubblewrap'), 30)


UNPRIVILEGED = ('import sys\nsys.path[:0] = {paths!r}\nimport sandbox_attacks\n'
                'chosen = [a for k in sandbox_attacks.TABLE for a in [x for x in sandbox_attacks.attempts() if x.kind == k][2::9][:1]]\n'
                'found = sandbox_attacks.run(chosen, backend="namespaces")\n'
                'assert found["attempts"] >= 15 and not found["succeeded"] and not found["boxes_broken"], found\nprint("held")')


@needs_box
@pytest.mark.skipif(os.geteuid() != 0 or not os.path.exists('/usr/bin/setpriv') or not os.path.exists('/usr/bin/python3'),
                    reason='needs root, setpriv and a Python that everyone can read')
def test_an_unprivileged_user_has_boxes_too(tmp_path):
  tests = os.path.dirname(os.path.abspath(__file__))
  tmp_path.chmod(0o777)
  program = UNPRIVILEGED.format(paths=[os.path.dirname(tests), tests])
  found = subprocess.run(
      ['setpriv', '--reuid', '65534', '--regid', '65534', '--clear-groups', '/usr/bin/python3', '-B', '-c', program], capture_output=True,
      text=True, timeout=900, env={'TMPDIR': '/tmp', 'PATH': os.environ['PATH'], 'HOME': '/tmp'}, cwd='/')
  if 'Permission denied' in found.stderr and 'sandbox_attacks' not in found.stderr or 'No module named' in found.stderr:
    pytest.skip('this checkout cannot be read by others')
  if 'may not make namespaces' in found.stderr or '/proc of its own cannot be mounted' in found.stderr:
    pytest.skip('unprivileged users may not make namespaces here')
  assert found.stdout.strip() == 'held', found.stderr[-2000:]


# --- The filter of system calls -----------------------------------------------------------------------------------------------------


def evaluate(program, arch, number, arguments=()):
  """What a filter answers to one call: an interpreter of its instructions."""
  import struct
  lines = [struct.unpack_from('HBBI', program, i) for i in range(0, len(program), 8)]
  data = {0: number, 4: arch} | {16 + 8 * i: a & 0xFFFFFFFF for i, a in enumerate(arguments)}
  value, at = 0, 0
  while True:
    code, yes, no, k = lines[at]
    at += 1
    if code == 0x20:
      value = data.get(k, 0)
    elif code == 0x06:
      return k
    else:
      hit = {0x15: value == k, 0x35: value >= k, 0x45: bool(value & k)}[code]
      at += yes if hit else no


@pytest.mark.parametrize('machine', list(seccomp.MACHINES))
def test_the_filter_refuses_what_it_names_and_lets_the_rest_through(machine):
  arch, refused, special, own = seccomp.MACHINES[machine]
  program = seccomp.program(machine)
  allow, denied = 0x7FFF0000, 0x00050001
  assert len(program) // 8 < 4096
  for name, number in (refused | seccomp.LATER).items():
    assert evaluate(program, arch, number) == (0x00050026 if name in seccomp.ABSENT else denied), name
  everything = set((refused | seccomp.LATER | special | own).values()) | {440, 448}
  for number in set(range(424)) - everything:
    assert evaluate(program, arch, number) == allow, number
  for family in range(46):
    assert (evaluate(program, arch, special['socket'], (family,)) == allow) == (family in seccomp.ALLOWED_FAMILIES)
  for flag in range(32):
    namespaces = (1 << flag) & 0x7E020000
    assert (evaluate(program, arch, special['clone'], (1 << flag | 17,)) == denied) == bool(namespaces)
    assert (evaluate(program, arch, special['unshare'], (1 << flag,)) == denied) == bool(namespaces or 1 << flag == 0x80)
  assert evaluate(program, arch, special['clone3']) == 0x00050026
  assert evaluate(program, arch, special['ioctl'], (0, 0x5412)) == denied and evaluate(program, arch, special['ioctl'], (0,
      0x5413)) == allow
  for name, number in own.items():
    kind = {'setpriority': 0, 'ioprio_set': 1}.get(name)
    mine, other = ((0,), (1,)) if kind is None else ((kind, 0), (kind, 1))
    assert evaluate(program, arch, number, mine) == allow and evaluate(program, arch, number, other) == denied, name
    assert kind is None or evaluate(program, arch, number, (2, 0)) == denied
  assert evaluate(program, 0x40000003, 5) == 0x00050026  # Another machine's calls: none.


def test_a_machine_that_is_not_known_has_no_filter():
  assert seccomp.program('pdp11') is None


# --- Backends that are not here ------------------------------------------------------------------------------------------------------


FAKE = '''#!{python}
import json, os, sys
arguments = sys.argv[1:]
with open({log!r}, 'a') as file:
  file.write(json.dumps(arguments) + '\\n')
if arguments[0] == 'info':
  print('"id"') if {daemon!r} else sys.exit('Cannot connect to the daemon')
if arguments[0] == 'run':
  at = arguments.index('--entrypoint')
  command = [sys.executable] + [a.replace('/opt/box', {inside!r}) for a in arguments[at + 3:]]
  os.environ.clear()
  os.execv(command[0], command)
'''


def fake(tmp_path, monkeypatch, daemon):
  import json
  log = tmp_path / 'log'
  program = tmp_path / 'bin' / 'docker'
  program.parent.mkdir()
  program.write_text(FAKE.format(python=sys.executable, log=str(log), daemon=daemon, inside=str(backends.INSIDE)))
  program.chmod(0o755)
  monkeypatch.setenv('PATH', str(program.parent))
  return lambda: [json.loads(line) for line in log.read_text().splitlines()]


def test_containers_are_started_with_everything_taken_away(tmp_path, monkeypatch):
  """The command is one that starts the warden without a container around it, which refuses to be anything but the first process."""
  calls = fake(tmp_path, monkeypatch, daemon=True)
  (tmp_path / 'shown').mkdir()
  limits = sandbox.Limits(memory_mb=100, disk_mb=50, processes=7)
  with pytest.raises(sandbox.Unavailable, match='container'):
    sandbox.open('container', image='some/image:1', limits=limits, mounts=[sandbox.Mount(tmp_path / 'shown', '/data')])
  run = next(c for c in calls() if c[0] == 'run')
  pairs = set(zip(run, run[1:]))
  for pair in (('--network', 'none'), ('--cap-drop', 'ALL'), ('--security-opt', 'no-new-privileges'), ('--pids-limit', '11'),
      ('--memory', '150m'),
               ('--memory-swap', '150m'), ('--volume', f'{tmp_path / "shown"}:/data:ro'), ('--volume', f'{backends.INSIDE}:/opt/box:ro')):
    assert pair in pairs, pair
  assert '--rm' in run and '--privileged' not in run and run[run.index('--entrypoint') + 2] == 'some/image:1'
  removed = next(c for c in calls() if c[0] == 'rm')
  assert removed == ['rm', '--force', run[run.index('--name') + 1]]  # Also of a container that did not come up.


def test_containers_without_a_daemon_are_unavailable(tmp_path, monkeypatch):
  fake(tmp_path, monkeypatch, daemon=False)
  with pytest.raises(sandbox.Unavailable, match='Cannot connect to the daemon'):
    sandbox.open('container', image='x')
  with pytest.raises(ValueError, match='needs image='):
    sandbox.open('container')
  monkeypatch.setenv('PATH', str(tmp_path))
  with pytest.raises(sandbox.Unavailable, match='Neither docker nor podman'):
    sandbox.open('container', image='x')


def test_a_hardened_host_refuses_with_all_reasons(monkeypatch, tmp_path):
  """No bubblewrap, and namespaces that are not allowed."""
  from sao_jax.sandbox import box
  real = backends.connect

  def connect(backend, plan):
    if backend == 'namespaces':
      raise sandbox.Unavailable('No box by namespaces: this user may not make namespaces')
    return real(backend, plan)

  monkeypatch.setattr(backends, 'connect', connect)
  monkeypatch.setattr(box, '_works', [])
  monkeypatch.setenv('PATH', str(tmp_path))
  with pytest.raises(sandbox.Unavailable, match="bwrap.*not installed.*may not make namespaces.*backend='container'.*'plain'"):
    sandbox.open()


@pytest.mark.skipif(os.geteuid() != 0 or not os.path.exists('/usr/bin/setpriv'), reason='needs root and setpriv')
@needs_box
def test_the_kernels_refusal_is_passed_on():
  """A user who may make no namespaces, by the limit of the user namespace that it is in."""
  repository = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
  program = (f'import sys\nsys.path.insert(0, {repository!r})\nfrom sao_jax import sandbox\n'
             'try: sandbox.open("namespaces")\nexcept sandbox.Unavailable as e: print(e)')
  script = 'echo 0 > /proc/sys/user/max_user_namespaces && exec setpriv --bounding-set -all --inh-caps -all ' + '"$@"'
  found = subprocess.run(
      ['unshare', '--user', '--map-root-user', 'sh', '-c', script, 'sh', sys.executable, '-c', program], capture_output=True, text=True,
      timeout=300, check=False)
  assert 'No box by namespaces' in found.stdout, found.stdout + found.stderr


def test_plain_says_what_it_is(caplog):
  with sandbox.open('plain'):
    assert 'NO ISOLATION' in caplog.text
  with pytest.raises(ValueError, match='no mounts'):
    sandbox.open('plain', mounts=[sandbox.Mount('/usr', '/data')])
