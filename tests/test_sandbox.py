"""Boxes: commands, limits, files, Python sessions, pools, and what is left of them (nothing). Attacks: test_sandbox_attacks.py."""

import contextlib
import gc
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from sao_jax import sandbox
from sao_jax.sandbox import backends
from sao_jax.sandbox.inside import wire

LIMITS = sandbox.Limits(time_s=60.0, memory_mb=256, processes=24, file_mb=8, disk_mb=16, output_bytes=4000, flood_mb=4)
PYTHON = 'python3'


def unavailable():
  try:
    sandbox.open().close()
  except sandbox.Unavailable as error:
    return str(error)
  return ''


REASON = unavailable()
needs_box = pytest.mark.skipif(bool(REASON), reason=REASON or 'there are boxes here')


@pytest.fixture(scope='module')
def box():
  if REASON:
    pytest.skip(REASON)
  with sandbox.open(limits=LIMITS) as opened:
    yield opened


@pytest.fixture(scope='module', params=['isolated', 'plain'])
def any_box(request):
  if request.param == 'isolated' and REASON:
    pytest.skip(REASON)
  with sandbox.open('plain' if request.param == 'plain' else 'auto', limits=LIMITS) as opened:
    yield opened


def alive(mark):
  """Processes of the host that have `mark` in their command line."""
  found = []
  for entry in pathlib.Path('/proc').iterdir():
    if entry.name.isdigit() and int(entry.name) != os.getpid():
      try:
        if mark.encode() in (entry / 'cmdline').read_bytes():
          found.append(int(entry.name))
      except OSError:
        pass
  return found


def wait_until(condition, deadline_s=60.0):
  end = time.monotonic() + deadline_s
  while not condition():
    assert time.monotonic() < end, 'deadline passed'
    time.sleep(0.01)


def with_time(call, enough, first_s=0.3):
  """What `call(time_s)` gives for endless work, with ten times the limit as long as a busy machine did not get to what comes before it."""
  for time_s in (first_s, 10 * first_s, 100 * first_s):
    result = call(time_s)
    assert result.ending == 'time'
    if enough(result):
      break
  return result, time_s


# --- Commands -------------------------------------------------------------------------------------------------------------------


def test_a_command_with_input_arguments_folder_and_environment(any_box):
  program = 'import os, sys; print(sys.argv[1:], os.getcwd() != "/", os.environ["COLOUR"], sys.stdin.read()); sys.stderr.write("bad")'
  result = any_box.run([PYTHON, '-c', program, 'a b', 'ü\n'], stdin=b'input', env={'COLOUR': 'red'})
  assert result.stdout.decode() == "['a b', 'ü\\n'] True red input\n" and result.stderr == b'bad'
  assert (result.exit_code, result.ending, result.ok, result.stdout_cut) == (0, 'exited', True, False)


@pytest.mark.parametrize('argv, code', [
    (['false'], 1), (['sh', '-c', 'exit 77'], 77), (['no-such-program'], 127), (['/etc'], 126), (['a\0b'], 126),
    (['sh', '-c', 'kill -SEGV $$'], -signal.SIGSEGV), (['echo', 'x' * 3_000_000], 126)])
def test_exit_codes(any_box, argv, code):
  result = any_box.run(argv)
  assert result.exit_code == code and result.ending == ('killed' if code < 0 else 'exited')
  assert result.stderr or code in (1, 77) or code < 0


@pytest.mark.parametrize('argv', ['ls', [], [1], b'ls'])
def test_what_is_no_command_is_the_callers_fault(any_box, argv):
  with pytest.raises(ValueError, match='argv must be a list'):
    any_box.run(argv)


def test_a_folder_that_is_not_there(any_box):
  result = any_box.run(['true'], cwd='/box/nowhere')
  assert result.exit_code == 127 and b'nowhere' in result.stderr


def test_output_is_cut_in_the_middle(any_box):
  result = any_box.run([PYTHON, '-c', 'print("begin"); print("x" * 100000); print("end")'])
  assert result.ok and result.stdout_cut and not result.stderr_cut
  assert result.stdout.startswith(b'begin\n') and result.stdout.endswith(b'x\nend\n') and b'bytes left out' in result.stdout
  assert len(result.stdout) < LIMITS.output_bytes + 100


def test_much_input_that_nobody_reads_does_no_harm(any_box):
  assert any_box.run(['true'], stdin=b'x' * 3_000_000).ok
  assert any_box.run(['wc', '-c'], stdin=b'x' * 3_000_000).stdout.strip() == b'3000000'


# --- Limits ---------------------------------------------------------------------------------------------------------------------


def test_time(any_box):
  result, time_s = with_time(lambda time_s: any_box.run(['sh', '-c', 'echo before; sleep 1000'], time_s=time_s), lambda r: r.stdout)
  assert (result.ending, result.stdout) == ('time', b'before\n') and time_s <= result.seconds < time_s + 10.0
  assert any_box.run(['echo', 'after']).stdout == b'after\n'


def test_memory_of_one_process_and_of_all(any_box):
  one = any_box.run([PYTHON, '-c', 'x = bytearray(1 << 30)'])
  assert one.exit_code == 1 and b'MemoryError' in one.stderr
  several = ('import os, time\nfor _ in range(4): os.fork()\nx = bytearray(60 << 20)\n'
             'for i in range(0, len(x), 4096): x[i] = 1\ntime.sleep(30)')
  assert any_box.run([PYTHON, '-c', several]).ending == 'memory'
  shared = ('import os, time\nx = bytearray(100 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1\n'
            'for _ in range(2): os.fork()\ntime.sleep(0.3)')
  assert any_box.run([PYTHON, '-c', shared]).ok  # 4 x 100 MB, but they are the same 100.


def test_processes_files_and_disk(box):
  forks = 'import os, time\nn = 0\ntry:\n  while True:\n    if os.fork() == 0: time.sleep(100)\n    n += 1\nexcept OSError: print(n)'
  result = box.run([PYTHON, '-c', forks])
  assert result.ok and 10 <= int(result.stdout) < LIMITS.processes
  assert box.run(['dd', 'if=/dev/zero', 'of=big', 'bs=1M', 'count=9']).exit_code == -signal.SIGXFSZ
  assert box.run(['stat', '-c', '%s', 'big']).stdout == b'8388608\n'
  filled = box.run(['sh', '-c', 'for i in 1 2 3 4; do head -c 7000000 /dev/zero > f$i; done'])
  assert b'No space left' in filled.stderr
  assert box.run(['sh', '-c', 'rm -f f? big; echo well > ok; cat ok']).stdout == b'well\n'


@needs_box
@pytest.mark.skipif(os.geteuid() != 0 or not os.path.exists('/proc/self/autogroup'),
                    reason='needs root, and a kernel that divides processors among sessions')
def test_a_box_stands_back_where_sessions_have_shares():
  for _ in range(20):  # In a container the kernel refuses it now and then: where another box has asked within a tenth of a second.
    with sandbox.open(limits=sandbox.Limits(nice=7)) as box:
      said = box.run(['cat', '/proc/self/autogroup']).stdout
      if said.endswith(b' nice 7\n'):
        assert box.python().run('print(open("/proc/self/autogroup").read())').output.endswith(' nice 7\n\n')
        return
    time.sleep(0.13)
  pytest.fail(str(said))


def test_a_flood_is_ended(any_box):
  result = any_box.run(['sh', '-c', 'yes; echo'], time_s=60.0)
  assert result.ending == 'output' and result.stdout_cut and len(result.stdout) < LIMITS.output_bytes + 100


def test_what_a_command_leaves_behind_is_ended(any_box):
  mark = f'left{os.getpid()}behind'
  for pause in ('0.2', '2', '20'):  # Until all of them have begun, on a machine that is busy.
    script = (f'setsid sh -c "sleep 98765; : {mark}" & sh -c "sleep 98765; : {mark}" & '
              f'(sh -c "trap \'\' TERM HUP; sleep 98765; : {mark}" &) ; sleep {pause}; grep -la {mark} /proc/[0-9]*/cmdline | wc -l')
    result = any_box.run(['sh', '-c', script])
    assert result.ending == 'exited' and alive(mark) == []
    if int(result.stdout) >= 5:
      break
  assert int(result.stdout) >= 5  # Three, this shell, and grep.


@pytest.mark.parametrize('bad', [
    {'time_s': 0}, {'memory_mb': 1}, {'processes': 0}, {'output_bytes': True}, {'disk_mb': 1.5}, {'nice': -1}, {'time_s': float('nan')}])
def test_limits_are_checked(bad):
  with pytest.raises(ValueError, match=f'limits.{next(iter(bad))} must be'):
    sandbox.Limits(**bad)


# --- Files ----------------------------------------------------------------------------------------------------------------------


def test_files_go_in_and_come_out(any_box):
  data = bytes(range(256)) * 1000
  any_box.write('deep/er/file.bin', data)
  assert any_box.read('/box/deep/er/file.bin') == data
  any_box.write('deep/er/file.bin', b'short', mode=0o755)
  assert any_box.read('deep/er/file.bin') == b'short' and any_box.run(['test', '-x', 'deep/er/file.bin']).ok
  any_box.write('odd\nname ü', b'x')
  assert any_box.read('odd\nname ü') == b'x'


@pytest.mark.parametrize('path', [
    'nothing', '../x', '/etc/passwd', '/box/../etc/passwd', 'folder', 'fifo', 'link', 'linked/passwd', '', 'a\0b'])
def test_paths_that_are_refused(any_box, path):
  any_box.run(['sh', '-c', 'mkdir -p folder; test -p fifo || mkfifo fifo; ln -sfn /etc/passwd link; ln -sfn /etc linked'])
  with pytest.raises(sandbox.PathError):
    any_box.read(path)
  if path not in ('nothing', 'link', 'fifo'):  # Those are replaced.
    with pytest.raises(sandbox.PathError):
      any_box.write(path, b'x')


def test_a_link_is_replaced_and_not_written_through(any_box):
  any_box.run(['sh', '-c', 'echo kept > target; ln -sf target through'])
  any_box.write('through', b'new')
  assert any_box.read('target') == b'kept\n' and any_box.read('through') == b'new'


def test_reading_has_a_size(any_box):
  any_box.write('sized', b'x' * 1000)
  assert len(any_box.read('sized', 1000)) == 1000
  with pytest.raises(sandbox.PathError, match='at most 999'):
    any_box.read('sized', 999)


def test_a_full_disk_is_told(box):
  with pytest.raises(sandbox.PathError, match='No space left'):
    box.write('too_big', b'x' * (LIMITS.disk_mb + 4 << 20))
  assert box.run(['rm', '-f', 'too_big']).ok


def test_folders_go_in_and_come_out(any_box, tmp_path):
  source = tmp_path / 'source'
  (source / 'a' / 'b').mkdir(parents=True)
  (source / 'empty').mkdir()
  (source / 'a' / 'b' / 'x').write_bytes(b'1' * 100)
  (source / 'a' / 'big').write_bytes(os.urandom(9 << 20)[:7 << 20])
  (source / 'run').write_text('#!/bin/sh\necho ran\n')
  (source / 'run').chmod(0o755)
  (source / 'a' / 'link').symlink_to('../run')
  any_box.put_folder(source, 'tree')
  assert any_box.run(['sh', '-c', 'tree/run; tree/a/link']).stdout == b'ran\nran\n'
  assert any_box.get_folder('tree', tmp_path / 'out') == (7 << 20) + 100 + 19
  for path in source.rglob('*'):
    other = tmp_path / 'out' / path.relative_to(source)
    assert other.is_symlink() == path.is_symlink() and other.is_dir() == path.is_dir()
    assert path.is_dir() or other.read_bytes() == path.read_bytes()
  assert os.access(tmp_path / 'out' / 'run', os.X_OK)
  with pytest.raises(ValueError, match='holds something'):
    any_box.get_folder('tree', tmp_path / 'out')
  with pytest.raises(sandbox.PathError, match='at most 1000'):
    any_box.get_folder('tree', tmp_path / 'other', max_bytes=1000)
  any_box.run(['rm', '-rf', 'tree'])


def test_links_that_lead_out_are_not_copied_out(any_box, tmp_path):
  any_box.run(['sh', '-c', 'mkdir -p t/a/b; cd t; ln -s /etc/passwd abs; ln -s ../../x up; ln -s a/../../x sly; ln -s . dot; '
               'ln -s ../.. a/b/in; ln -s ../../.. a/b/out; ln -s a/b good; echo 1 > a/f; mkfifo pipe'])
  any_box.get_folder('t', tmp_path / 'out')
  names = {str(p.relative_to(tmp_path / 'out')) for p in (tmp_path / 'out').rglob('*') if p.is_symlink()}
  assert names == {'good', 'a/b/in'}  # '.' leads nowhere, the others out, or nobody knows where.
  assert (tmp_path / 'out' / 'a' / 'f').read_text() == '1\n' and not (tmp_path / 'out' / 'pipe').exists()
  any_box.run(['rm', '-rf', 't'])


# --- Python sessions --------------------------------------------------------------------------------------------------------------


def test_a_session_keeps_its_state(any_box):
  session = any_box.python()
  assert session.run('x = 40\ndef f(n):\n  return n + 2').value is None
  result = session.run('print("out"); import sys; print("err", file=sys.stderr)\nf(x)')
  assert (result.output, result.value, result.error, result.ending) == ('out\nerr\n', '42', None, 'answered')
  assert session.run('_').value == '42'
  assert session.run('import subprocess; subprocess.run(["echo", "child"]); None').output == 'child\n'
  assert any_box.run(['true']).ok and session.run('x').value == '40'  # Other commands leave it alone.
  session.close()
  assert session.run('x').ending == 'ended'


@pytest.mark.parametrize('code, error', [
    ('1/0', 'ZeroDivisionError: division by zero'), ('def f(:', 'SyntaxError'), ('raise SystemExit(3)', 'SystemExit: 3'),
    ('raise KeyboardInterrupt', 'KeyboardInterrupt'), ('def f(): f()\nf()', 'RecursionError'), ('x = bytearray(1 << 40)', 'MemoryError'),
    ('class E(Exception):\n  def __str__(self): 1/0\nraise E', 'E: <exception str() failed>'), ('"\\udc80" + 1', 'TypeError'),
    ('class R:\n  def __repr__(self): raise ValueError("r")\nR()', 'ValueError: r'), ('a\0b', 'null bytes'),
    ('(' * 5000, 'Error'), ('import sys; sys.stdout = None; 1/0', 'ZeroDivisionError')])
def test_errors_are_texts_and_state_stays(any_box, code, error):
  session = any_box.python()
  session.run('kept = 1')
  result = session.run(code)
  assert error in result.error and result.ending == 'answered', result
  assert 'session.py' not in result.error
  assert session.run('kept').value == '1'
  session.close()


def test_a_traceback_names_the_lines_of_the_code(any_box):
  session = any_box.python()
  session.run('def halve(n):\n  return n // 0')
  error = session.run('a = 1\nhalve(a)').error
  assert error.startswith('Traceback (most recent call last):\n  File "<input 2>", line 2, in <module>\n    halve(a)')
  assert 'File "<input 1>", line 2, in halve\n    return n // 0' in error
  session.close()


@pytest.mark.parametrize('code, ending, word', [
    ('import time; time.sleep(1000)', 'time', 'more than {time_s:g} s'), ('while True: pass', 'time', 'state is lost'),
    ('import os; os._exit(0)', 'exited', 'state is lost'), ('import os; os.kill(os.getpid(), 9)', 'killed', 'state is lost'),
    ('import os\nos.close(4)', 'exited', 'state is lost'), ('import os\nos.write(4, b"x" * 50000)', 'time', 'state is lost'),
    ('import os\nwhile True: os.write(1, b"x" * 100000)', 'output', 'more than 4 MB')])
def test_calls_that_end_the_interpreter_say_so(any_box, code, ending, word):
  sessions = []

  def call(time_s):
    sessions.append(any_box.python())
    return sessions[-1].run('print("before", flush=True)\n' + code, time_s=time_s)

  result, time_s = with_time(call, lambda r: r.output, 0.5) if ending == 'time' else (call(60.0), 60.0)
  session = sessions[-1]
  assert result.ending == ending and word.format(time_s=time_s) in result.error and result.output.startswith('before') and result.state_lost
  assert session.run('1').ending == 'ended'
  session = any_box.python()
  assert session.run('1').value == '1'
  session.close()


def test_answers_are_not_taken_for_those_of_other_calls(any_box):
  session = any_box.python()
  forged = ('import json, os, struct\nh = json.dumps({"id": %d, "value": True, "error": False, "sizes": [1, 0]}).encode()\n'
            'os.write(4, struct.pack(">I", len(h)) + h + b"7")')
  session.run(forged % 2)
  assert session.run('3').value == '3'
  session.close()


def test_long_values_and_outputs_are_cut_in_the_middle(any_box):
  session = any_box.python()
  value = session.run('"a" + "b" * 10**6 + "c"').value
  assert len(value) < 21_000 and value.startswith("'ab") and value.endswith("bc'") and 'characters left out' in value
  result = session.run('print("b" * 10**5)\nprint("end")')
  assert result.cut and result.output.endswith('b\nend\n') and 'bytes left out' in result.output and len(result.output) < 4200
  session.close()


# --- What a box shows ---------------------------------------------------------------------------------------------------------------


@needs_box
def test_mounts_packages_and_environment(tmp_path, monkeypatch):
  monkeypatch.setenv('A_SECRET', 'x')
  (tmp_path / 'shown').mkdir()
  (tmp_path / 'shown' / 'f').write_text('text')
  (tmp_path / 'open').mkdir(mode=0o777)
  (tmp_path / 'open').chmod(0o777)
  mounts = [sandbox.Mount(tmp_path / 'shown', '/data/in'), sandbox.Mount(tmp_path / 'shown' / 'f', '/data/file'),
            sandbox.Mount(tmp_path / 'open', '/box/out', writable=True)]
  with sandbox.open(limits=LIMITS, mounts=mounts, env={'COLOUR': 'red'}, packages=True) as box:
    script = 'cat /data/in/f /data/file; echo $COLOUR $A_SECRET; touch /data/in/g; echo w > /box/out/w'
    assert box.run(['sh', '-c', script]).stdout == b'texttextred\n'
    assert [p.name for p in (tmp_path / 'shown').iterdir()] == ['f'] and (tmp_path / 'open' / 'w').read_text() == 'w\n'
    assert box.run([PYTHON, '-c', 'import numpy, pytest']).ok
    assert b'A_SECRET' not in box.run(['env']).stdout
    assert box.python().run('import numpy; numpy.arange(3).sum()').error is None
  with sandbox.open(limits=LIMITS) as box:
    assert b'ModuleNotFoundError' in box.run([PYTHON, '-c', 'import jax']).stderr
    assert box.run([PYTHON, '-c', 'import json, os, sys; assert not [p for p in sys.path if "-packages" in p and os.listdir(p)]']).ok


@needs_box
@pytest.mark.skipif(os.geteuid() != 0, reason='needs root: another user reads what is its own')
def test_a_mount_that_nobody_else_can_read_is_refused(tmp_path):
  (tmp_path / 'private').mkdir(mode=0o700)
  with pytest.raises(sandbox.Unavailable, match='cannot be read by the user of the box'):
    sandbox.open(mounts=[sandbox.Mount(tmp_path / 'private', '/data')])


@pytest.mark.parametrize('source, target, message', [
    ('/no/such/place', '/data', 'must exist'), ('/usr', 'data', 'absolute'), ('/usr', '/', 'absolute'), ('/usr', '/proc/x', 'cannot stand'),
    ('/usr', '/a/../b', 'absolute'), ('/usr', '/box', 'cannot stand')])
def test_mounts_are_checked(source, target, message):
  with pytest.raises(ValueError, match=message):
    sandbox.Mount(source, target)


@pytest.mark.parametrize('settings, message', [
    ({'backend': 'chroot'}, 'backend must be one of'), ({'image': 'x'}, 'An image is for'), ({'env': {'A=': 'x'}}, 'env must map'),
    ({'env': {'A': 1}}, 'env must map')])
def test_wrong_settings(settings, message):
  with pytest.raises(ValueError, match=message):
    sandbox.open(**settings)


def command(pid):
  try:
    return pathlib.Path(f'/proc/{pid}/cmdline').read_bytes()
  except OSError:
    return b''


def running(pid):
  try:
    return pathlib.Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] != 'Z'
  except OSError:
    return False


# --- Ends -----------------------------------------------------------------------------------------------------------------------


def boxes_of(pid):
  """Processes below a process of this host."""
  found = []
  for path in pathlib.Path(f'/proc/{pid}/task').glob('*/children'):
    with contextlib.suppress(OSError):  # It has ended meanwhile.
      found += [int(child) for child in path.read_text().split()]
  return found + [q for p in found for q in boxes_of(p)]


@pytest.mark.parametrize('backend', ['auto', 'plain'])
def test_nothing_is_left_of_a_host_that_was_killed(backend):
  if backend == 'auto' and REASON:
    pytest.skip(REASON)
  program = (f'from sao_jax import sandbox\nbox = sandbox.open({backend!r})\nprint("ready", flush=True)\n'
             'box.run(["sleep", "54321"], time_s=1000.0)')
  with subprocess.Popen([sys.executable, '-c', program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                        cwd=pathlib.Path(__file__).parents[1]) as host:
    assert host.stdout.readline() == b'ready\n'
    wait_until(lambda: any(b'54321' in command(p) for p in boxes_of(host.pid)))
    pids = boxes_of(host.pid)
    host.kill()
  wait_until(lambda: not [p for p in pids if running(p)])


def test_close_ends_a_call_of_another_thread(any_box):
  del any_box
  box = sandbox.open('plain' if REASON else 'auto')
  raised = []

  def call():
    try:
      box.run(['sleep', '1000'], time_s=1000.0)
    except sandbox.SandboxError as error:
      raised.append(str(error))

  thread = threading.Thread(target=call)
  thread.start()
  time.sleep(0.2)
  box.close()
  thread.join(60.0)
  assert not thread.is_alive() and 'closed' in raised[0]
  with pytest.raises(sandbox.SandboxError, match='closed'):
    box.run(['true'])
  box.close()


def test_descriptors_stay_with_the_call_that_uses_them(monkeypatch):
  """A box that is closed during a call: the next box gets other numbers, or the call would take what that one says."""
  box, listening, same = sandbox.open('plain'), threading.Event(), []

  def receive(descriptor, limit, deadline):
    before = os.fstat(descriptor).st_ino
    listening.set()
    end = time.monotonic() + 60.0
    while os.path.exists(f'/proc/{pid}') and time.monotonic() < end:
      time.sleep(0.01)
    files = [open(os.devnull, 'rb') for _ in range(3)]  # pylint: disable=consider-using-with
    try:
      same.append(os.fstat(descriptor).st_ino == before)
    finally:
      for file in files:
        file.close()
    raise wire.WireError('gone')

  pid = box._connection.process.pid
  monkeypatch.setattr(wire, 'receive', receive)
  thread = threading.Thread(target=lambda: pytest.raises(sandbox.SandboxError, box.run, ['true']))
  thread.start()
  assert listening.wait(60.0)
  box.close()
  thread.join(60.0)
  assert same == [True] and not thread.is_alive()


def test_an_interrupted_call_ends_its_box(monkeypatch):
  box = sandbox.open('plain')

  def receive(*_):
    raise KeyboardInterrupt

  monkeypatch.setattr(wire, 'receive', receive)
  with pytest.raises(KeyboardInterrupt):
    box.run(['true'])
  assert box.closed


class Halting:
  """A clock and a poll on it: the first wait is cut short by a jump of an hour; the other side answers after `answer_s` of others."""

  def __init__(self, answer_s):
    self.now, self.waited_s, self.answer_s, self.halted = 0.0, 0.0, answer_s, False

  def monotonic(self):
    return self.now

  def poll(self, ms=None):
    if ms is None:  # As `select.poll()`.
      return self
    if not self.halted:
      self.halted, self.now = True, self.now + 3600.0
      return []
    step = min(ms / 1000.0, self.answer_s - self.waited_s)
    self.now, self.waited_s = self.now + step, self.waited_s + step
    return [(3, 1)] if self.waited_s >= self.answer_s else []

  def register(self, *_):
    pass


@pytest.mark.parametrize('answer_s, late', [(5.0, False), (50.0, False), (70.0, True)])
def test_time_in_which_the_machine_stood_still_does_not_count(monkeypatch, answer_s, late):
  machine = Halting(answer_s)
  monkeypatch.setattr(wire, 'time', machine)
  monkeypatch.setattr(wire, 'select', machine)
  if late:
    with pytest.raises(wire.Late):
      wire.wait(3, 1, 60.0)
    assert 55.0 < machine.waited_s < 65.0
  else:
    wire.wait(3, 1, 60.0)


def test_a_box_that_is_late_is_no_proof_that_there_can_be_none():
  ours, theirs = socket.socketpair()
  with theirs:
    ours.setblocking(False)
    connection = backends.Connection(backends.Keeper(), ours.fileno(), ours.detach(), 'namespaces')
    with pytest.raises(sandbox.SandboxError, match='within 0.1 s') as raised:
      backends._greet(connection, {}, 0.1)
    assert not isinstance(raised.value, sandbox.Unavailable)


def test_a_container_daemon_that_hangs_is_the_infrastructures_failure(monkeypatch):
  def hang(*_, **settings):
    raise subprocess.TimeoutExpired('docker', settings['timeout'])

  monkeypatch.setattr(backends.shutil, 'which', lambda name: '/usr/bin/' + name)
  monkeypatch.setattr(backends.subprocess, 'run', hang)
  with pytest.raises(sandbox.SandboxError, match='no answer within 60 s'):
    sandbox.open('container', image='x')


@needs_box
def test_a_process_forked_from_the_host_does_not_hold_up_its_end():
  program = ('import os, time\nfrom sao_jax import sandbox\nsandbox.open("namespaces").close()\nchild = os.fork()\n'
             'if child == 0:\n  os.close(1)\n  time.sleep(900)\n  os._exit(0)\nprint(child)')
  host = subprocess.run([sys.executable, '-c', program], stdout=subprocess.PIPE, timeout=300.0, check=False,
                        cwd=pathlib.Path(__file__).parents[1])
  os.kill(int(host.stdout), signal.SIGKILL)
  assert host.returncode == 0


def test_garbage_leaves_nothing():
  box = sandbox.open('plain' if REASON else 'auto')
  process = box._connection.process
  del box
  gc.collect()
  assert process.poll() is not None


@needs_box
def test_a_killed_warden_is_the_infrastructures_failure():
  box = sandbox.open()
  keeper = box._connection.process
  os.kill(boxes_of(keeper.pid)[0], signal.SIGKILL)
  with pytest.raises(sandbox.SandboxError, match='failed'):
    box.run(['true'])
  assert box.closed and keeper.poll() is not None


# --- Pools ----------------------------------------------------------------------------------------------------------------------


def test_a_pool_gives_every_box_once():
  backend = 'plain' if REASON else 'auto'
  with sandbox.Pool(lambda: sandbox.open(backend), 2) as pool:
    boxes = [pool.take() for _ in range(4)]
    assert len(set(map(id, boxes))) == 4
    boxes[0].write('mine', b'x')
    pool.give_back(boxes[0])
    wait_until(lambda: boxes[0].closed)
    with pytest.raises(sandbox.PathError):
      pool.take().read('mine')
  assert all(b.closed for b in boxes)
  with pytest.raises(sandbox.SandboxError, match='closed'):
    pool.take()


def test_boxes_are_not_taken_faster_than_they_are_ended():
  """Of boxes that are slow to end only a few wait for it, however many come and go."""
  alive = set()

  class SlowBox:
    def __init__(self):
      alive.add(self)

    def close(self):
      time.sleep(0.02)
      alive.discard(self)

  with sandbox.Pool(SlowBox, size=2) as pool:
    most = 0
    for _ in range(40):
      box = pool.take()
      most = max(most, len(alive))
      pool.give_back(box)
  assert not alive and most <= 2 + 2 + 3, most  # Ready, waiting to be ended, and in the hands of three threads.


def test_a_pool_without_boxes_tells_why():
  def make():
    raise sandbox.Unavailable('none here')

  with sandbox.Pool(make, 1) as pool:
    with pytest.raises(sandbox.Unavailable, match='none here'):
      pool.take()
