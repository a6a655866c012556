"""The grader of code: tasks of two forms, limits, process trees, and results that cannot be had for the asking."""

import os
import pathlib
import tempfile
import threading
import time

from absl.testing import parameterized
import pytest

from sao_jax import graders, sandbox
from sao_jax.graders import code_tests

COMPLETE = {  # A task in the form of HumanEval.
    'prompt': 'from typing import List\n\ndef helper(x):\n  return x + 1\n\ndef total(values: List[int]) -> int:\n  """Sum plus one."""\n',
    'entry_point': 'total',
    'test': 'def check(candidate):\n  assert candidate([1, 2]) == 4\n  assert candidate([]) == 1\n',
}
SETUP = {'test_list': ['assert double(node.value) == 6'], 'test_setup_code': 'node = Node(3)'}  # Uses what the program defines.
ASSERTIONS = {'test_list': ['assert double(2) == 4', 'assert double(-1) == -2'], 'test_setup_code': 'import math'}


def fenced(code):
  return f'Here it is:\n```python\n{code}\n```\nDone.'


@pytest.fixture(scope='module')
def code():
  grader = graders.make('code', time_limit_s=60.0)
  yield grader
  grader.close()


@pytest.mark.parametrize('response, metadata, verdict', [
    (fenced('def total(values: List[int]) -> int:\n  return sum(values) + 1'), COMPLETE, 'right'),
    (fenced('def total(values):\n  return helper(sum(values))'), COMPLETE, 'right'),  # What the prompt defines is there.
    ('  return sum(values) + 1\n', COMPLETE, 'right'),  # A completion of the prompt.
    (COMPLETE['prompt'] + '  return sum(values) + 1\n', COMPLETE, 'right'),
    (fenced('def total(values):\n  return sum(values)'), COMPLETE, 'wrong'),
    (fenced('def other(values):\n  return sum(values) + 1'), COMPLETE, 'wrong'),
    (fenced('def double(x):\n  return 2 * x'), ASSERTIONS, 'right'),
    ('```\ndef double(x):\n  return math.floor(2 * x)', ASSERTIONS, 'right'),  # A fence that is not closed; set-up code.
    ('def double(x):\n  return x + x', ASSERTIONS, 'right'),
    (fenced('def double(x):\n  return x * x'), ASSERTIONS, 'wrong'),
    (fenced('class Node:\n  def __init__(self, v): self.value = v\n\ndef double(x):\n  return 2 * x'), SETUP, 'right'),
    (fenced('def double(x) return x'), ASSERTIONS, 'wrong'),
    (fenced('def double(x):\n  return 2 * x') + fenced('print(double(2))'), ASSERTIONS, 'right'),  # The last block with a definition.
    (fenced('def double(x):\n  return 0') + fenced('def double(x):\n  return 2 * x'), ASSERTIONS, 'right'),
    ('```bash\nls\n```', ASSERTIONS, 'no_answer'), ('I do not know.', ASSERTIONS, 'no_answer'), ('', ASSERTIONS, 'no_answer'),
    (fenced('def double(x):\n  return 2 * x\n\nif __name__ == "__main__":\n  raise ValueError'), ASSERTIONS, 'right'),
    (fenced('import sys\nsys.exit(0)'), ASSERTIONS, 'wrong'), (fenced('import os\nos._exit(0)'), ASSERTIONS, 'wrong'),
    (fenced('raise SystemExit'), ASSERTIONS, 'wrong'), (fenced('quit()'), ASSERTIONS, 'wrong'),
    (fenced('def double(x):\n  return double(x)'), ASSERTIONS, 'wrong'),
    (fenced('def double(x):\n  return bytearray(1 << 40)'), ASSERTIONS, 'wrong'),
    (fenced('print("{\\"nonce\\": \\"0\\"}" * 10**5)\ndef double(x):\n  return 0'), ASSERTIONS, 'wrong'),
    (fenced('import os\nfor fd in range(3, 64):\n  try: os.write(fd, b\'{"nonce": "0", "ok": true}\')\n  except OSError: pass'),
    ASSERTIONS, 'wrong'),
])
def test_verdicts(code, response, metadata, verdict):
  grade = code.grade(response, '', metadata=metadata)
  assert grade.verdict == verdict, grade
  assert grade.score == float(verdict == 'right')


def test_the_answer_itself_may_hold_the_tests(code):
  assert code.grade(fenced('def f(): return 1'), 'assert f() == 1').verdict == 'right'
  assert code.grade(fenced('def f(): return 1'), 'assert f() == 2').verdict == 'wrong'


def test_tests_that_cannot_run_are_the_graders_fault(code):
  assert code.grade(fenced('def f(): return 1'), 'assert f( == 1').verdict == 'grader_error'
  assert code.grade(fenced('def f(): return 1'), '').verdict == 'grader_error'


def test_too_long_is_wrong_and_takes_no_longer_than_the_limit(monkeypatch):
  make_box = code_tests._make_box
  monkeypatch.setattr(code_tests, '_make_box', lambda time_s, memory_mb: make_box(time_s + 600.0, memory_mb))  # Its limit is not meant.
  grader = graders.make('code', time_limit_s=1.0)
  for body in ('while True: pass', 'import time; time.sleep(1000)',
      'import signal\n  signal.signal(signal.SIGXCPU, signal.SIG_IGN)\n  while True: pass'):
    start = time.monotonic()
    grade = grader.grade(fenced(f'def f():\n  {body}'), 'f()')
    assert (grade.verdict, 'took more than 1 s' in grade.reason) == ('wrong', True), grade
    assert time.monotonic() - start < 4.0
  grader.close()


def test_nothing_is_left_of_a_process_tree(tmp_path):
  code = graders.make('code', time_limit_s=60.0, isolation='process')
  note = tmp_path / 'pids'
  note.write_text('')
  program = ('import os, time\n'
             'for session in (False, True):\n'
             '  if os.fork() == 0:\n'
             '    if session: os.setsid()\n'
             '    if os.fork() != 0 and session: os._exit(0)\n'
             f'    open({str(note)!r}, "a").write(f"{{os.getpid()}}\\n")\n'
             '    time.sleep(1000)\n'
             f'while len(open({str(note)!r}).read().split()) < 3: time.sleep(0.01)\n'
             'def f(): return 1')
  assert code.grade(fenced(program), 'assert f() == 1').verdict == 'right'
  pids = [int(pid) for pid in note.read_text().split()]
  assert len(pids) >= 3
  code.close()
  assert not any(map(alive, pids))


def alive(pid):
  """Whether the process exists and is no zombie."""
  try:
    return pathlib.Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] != 'Z'
  except OSError:
    return False


def test_code_in_a_sandbox_sees_nothing_of_the_host_and_code_in_a_process_does(tmp_path):
  (tmp_path / 'known').write_text('x')
  program = f'import os\ndef look(): return os.path.exists({str(tmp_path / "known")!r})'
  grader = graders.make('code', time_limit_s=60.0, isolation='process')
  assert grader.grade(fenced(program), 'assert look()').verdict == 'right'
  try:
    sandbox.open().close()
  except sandbox.Unavailable as error:
    pytest.skip(str(error))
  isolated = graders.make('code', time_limit_s=60.0, isolation='sandbox')
  grade = isolated.grade(fenced(program), 'assert not look()')
  assert grade.verdict == 'right', grade
  for program in ('import os, signal\nos.kill(os.getppid(), 9)', 'import os\nos.kill(-1, 9)', 'import os\nwhile True: os.fork()'):
    assert isolated.grade(fenced(program + '\ndef f(): return 1'), 'assert f() == 1').verdict == 'wrong'
  assert isolated.grade(fenced('def f(): return 1'), 'assert f() == 1').verdict == 'right'
  grader.close()
  isolated.close()
  assert isolated.grade(fenced('def f(): return 1'), 'assert f() == 1').verdict == 'grader_error'


def test_where_there_is_no_sandbox_auto_says_so_and_sandbox_refuses(monkeypatch, caplog):
  def refuse(*_, **__):
    raise sandbox.Unavailable('hardened')

  monkeypatch.setattr(sandbox, 'open', refuse)
  grader = graders.make('code', time_limit_s=60.0)
  assert grader.grade(fenced('def f(): return 1'), 'assert f() == 1').verdict == 'right' and 'not isolated: hardened' in caplog.text
  grader.close()
  grader = graders.make('code', isolation='sandbox')
  grade = grader.grade(fenced('def f(): return 1'), 'assert f() == 1')
  assert grade.verdict == 'grader_error' and 'hardened' in grade.reason
  with pytest.raises(ValueError, match='isolation must be one of'):
    graders.make('code', isolation='none')


def test_code_sees_no_environment_and_works_in_a_folder_of_its_own(code, monkeypatch):
  monkeypatch.setenv('A_SECRET', 'x')
  program = ('import os\nopen("made", "w").write("x")\n'
             'KNOWN = {"PATH", "HOME", "TMPDIR", "LANG", "LC_CTYPE"}\n'
             'def look(): return sorted(set(os.environ) - KNOWN), os.getcwd() == os.environ["HOME"], os.listdir(".")')
  grade = code.grade(fenced(program), 'assert look() == ([], True, ["made"]), look()')
  assert grade.verdict == 'right', grade


def test_files_are_small_and_folders_go(code, monkeypatch, tmp_path):
  program = 'def f():\n  with open("big", "wb") as file:\n    for _ in range(64): file.write(b"x" * (1 << 20))\n  return 1'
  assert code.grade(fenced(program), 'assert f() == 1').verdict == 'wrong'
  monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
  plain, made = graders.make('code', time_limit_s=60.0, isolation='process'), []
  mkdtemp = tempfile.mkdtemp
  monkeypatch.setattr(tempfile, 'mkdtemp', lambda **kwargs: made.append(mkdtemp(**kwargs)) or made[-1])
  assert plain.grade(fenced(program), 'assert f() == 1').verdict == 'wrong'
  plain.close()
  assert len(made) == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize('when', ['running', 'starting'])
def test_close_ends_what_runs(monkeypatch, when):
  grader = graders.make('code', time_limit_s=1000.0)
  make_box, found, begun = code_tests._make_box, [], threading.Event()

  def made(*arguments):
    box = make_box(*arguments)
    if when == 'starting' and not begun.is_set():
      grader.close()  # While its first box is tried.
      begun.set()
    return box

  monkeypatch.setattr(code_tests, '_make_box', made)
  thread = threading.Thread(target=lambda: found.append(grader.grade(fenced('import time\ntime.sleep(1000)'), 'pass')))
  thread.start()
  end = time.monotonic() + 60.0
  while not (begun.is_set() or grader._lifelines or grader._pool is not None and grader._pool._taken):
    assert time.monotonic() < end
    time.sleep(0.01)
  start = time.monotonic()
  grader.close()
  thread.join(100.0)
  assert found[0].verdict == 'grader_error' and time.monotonic() - start < 10.0
  assert grader.grade(fenced('x = 1'), 'pass').verdict == 'grader_error'


class ExtractCodeTest(parameterized.TestCase):

  @parameterized.parameters(
      ('```python\na = 1\n```', 'a = 1\n'), ('```py\na = 1\n```', 'a = 1\n'), ('```\na = 1\n```', 'a = 1\n'), ('```Python\na = 1', 'a = 1'),
      ('x ```a``` y', None), ('```js\nlet a\n```', None), ('words only', None), ('import os', 'import os'), ('```python\n```', None))
  def test_blocks(self, response, expected):
    self.assertEqual(code_tests.extract_code(response), expected)


def test_a_first_box_that_is_late_does_not_take_the_isolation_away(monkeypatch):
  make, late = code_tests._make_box, [sandbox.SandboxError('No box was ready within 60 s.')]

  def make_box(*arguments):
    if late:
      raise late.pop()
    return make(*arguments)

  monkeypatch.setattr(code_tests, '_make_box', make_box)
  grader = graders.make('code', isolation='auto')
  try:
    grade = grader.grade(fenced('def double(x):\n  return 2 * x'), '', metadata=ASSERTIONS)
    assert grade.verdict == 'grader_error' and 'within 60 s' in grade.reason and grader._isolation == 'auto'
  finally:
    grader.close()
