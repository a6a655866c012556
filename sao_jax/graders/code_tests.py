"""The grader of code: runs it with the tests of its task, in a sandbox, or where there is none in a process of its own under limits.

Tasks (by the fields in `metadata`):
  'test', 'entry_point', 'prompt'   HumanEval: `check(entry_point)` of the test; what stands before the function in the prompt is kept
  'test_list', 'test_setup_code'    MBPP: assertions
  none of these                     the known answer itself holds the assertions

What it is safe from, and what not: see docs/graders.md. Graded code has limits of time, memory, file size and open files, a temporary
folder, an empty environment, and every process it leaves behind is ended. In a sandbox (isolation 'auto' or 'sandbox') it sees nothing of
this machine. It always runs in one Python process with its tests, so code that sets out to find them can forge the result.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import pathlib
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
from typing import Any, Mapping

from sao_jax import sandbox
from sao_jax.graders import base, code_child, extract

MAX_CODE = 100_000  # Characters.
ISOLATIONS = ('auto', 'sandbox', 'process')
_CHILD = pathlib.Path(code_child.__file__).read_text()
_BLOCK = re.compile(r'^[ \t]*```[ \t]*([A-Za-z0-9_+-]*)[^\n]*\n', re.MULTILINE)
_FENCE = re.compile(r'^[ \t]*```', re.MULTILINE)
_LANGUAGES = ('', 'python', 'py', 'python3')
_CODE = re.compile(r'^(?:def|class|import|from|async def|@|[A-Za-z_]\w*\s*=)', re.MULTILINE)


class CodeTests(base.Grader):
  """Right when every test passes.

  A program that fails a test, raises, or takes longer or more memory than the limits is wrong: the limits are part of the task. Tests that
  do not compile are 'grader_error'.

  Args:
    time_limit_s: of program and tests, wall and CPU.
    memory_mb: address space.
    workers: programs that run at once; 0 for one per CPU.
    isolation: 'sandbox' (each program in a box of its own, see docs/sandbox.md), 'process' (as this user, with all it can do), or
      'auto': the sandbox where there is one, else processes, which the log then says.
  """

  name = 'code'
  needs_answer = False

  def __init__(self, *, time_limit_s: float = 10.0, memory_mb: int = 1024, workers: int = 0, isolation: str = 'auto'):
    if isolation not in ISOLATIONS:
      raise ValueError(f'isolation must be one of {", ".join(ISOLATIONS)}, got {isolation!r}.')
    for name, value, low, high in (('time_limit_s', time_limit_s, 0.1, 3600.0), ('memory_mb', memory_mb, 64, 1 << 20),
                                   ('workers', workers, 0, 1024)):
      if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ValueError(f'{name} must be a number in [{low}, {high}], got {value!r}.')
    self._time_limit_s, self._memory_mb = time_limit_s, int(memory_mb)
    count = int(workers) or len(os.sched_getaffinity(0))
    self._free = threading.Semaphore(count)
    self._isolation, self._pool, self._pool_size = isolation, None, min(count, 4)
    self._lock, self._starting = threading.Lock(), threading.Lock()
    self._lifelines: set[int] = set()
    self._closed = False

  def _grade(self, response: str, answer: str, metadata: Mapping[str, Any]) -> base.Grade:
    entry_point = metadata.get('entry_point', '')
    code = extract_code(response, entry_point, completes='prompt' in metadata)
    if code is None:
      return base.grade_of('no_answer', None, 'no code')
    if len(code) > MAX_CODE:
      return base.grade_of('wrong', code[:MAX_CODE], f'refused: longer than {MAX_CODE:,} characters')
    tests = tests_of(answer, metadata)
    if not tests.strip():
      return base.grade_of('grader_error', code, 'the task has no tests')
    verdict, reason = self._judge(program_of(code, metadata), tests)
    return base.grade_of(verdict, code, reason)

  def _judge(self, program: str, tests: str) -> tuple[str, str]:
    nonce = secrets.token_hex(16)
    with self._free:
      try:
        pool = self._boxes()
      except sandbox.Unavailable:
        raise
      except sandbox.SandboxError as error:
        return 'grader_error', str(error)
      run = self._run if pool is None else functools.partial(self._run_in_box, pool)
      outcome = run({
          'program': program, 'tests': tests, 'nonce': nonce, 'time_limit_s': self._time_limit_s, 'memory_mb': self._memory_mb})
    if outcome is None or outcome['outcome'] == 'closed':
      return 'grader_error', 'the grader was closed' if self._closed else 'the supervisor ended without a result'
    result = outcome['result']
    if secrets.compare_digest(str(result.get('nonce', '')).encode(), nonce.encode()):
      return 'right', 'all tests passed'
    if result.get('stage') == 'tests':
      return 'grader_error', f'the tests do not compile: {result.get("text")}'
    if 'error' in result:
      return 'wrong', f'{result.get("stage")}: {result["error"]}: {result.get("text")}'
    if outcome['outcome'] in ('time', f'signal {int(code_child.signal.SIGXCPU)}'):
      return 'wrong', f'took more than {self._time_limit_s:g} s'
    return 'wrong', f'ended without passing the tests ({outcome["outcome"]})'

  def _boxes(self) -> sandbox.Pool | None:
    """The pool of boxes, made at the first program; None for processes. Raises Unavailable where the sandbox was asked for."""
    with self._starting:
      if self._pool is None and self._isolation != 'process' and not self._closed:
        try:
          _make_box(self._time_limit_s, self._memory_mb).close()
        except sandbox.Unavailable as error:
          if self._isolation == 'sandbox':
            raise
          logging.getLogger(__name__).warning('Code is graded in plain processes, which are not isolated: %s', error)
          self._isolation = 'process'
        else:
          pool = sandbox.Pool(functools.partial(_make_box, self._time_limit_s, self._memory_mb), self._pool_size)
          with self._lock:
            self._pool, closed = pool, self._closed
          if closed:  # While the first box was tried; `close` has seen no pool.
            pool.close()
      return self._pool

  def _run_in_box(self, pool: sandbox.Pool, request: dict[str, Any]) -> dict[str, Any] | None:
    """As `_run`, in a box that is this program's alone. A supervisor that says nothing was ended by the program."""
    environment = {'PATH': os.defpath, 'HOME': sandbox.FOLDER, 'TMPDIR': '/tmp', 'LANG': 'C.UTF-8'}
    request |= {'environment': sorted(environment), 'packages': [sandbox.PACKAGES]}
    try:
      box = pool.take()
    except sandbox.SandboxError:
      return None
    try:
      result = box.run(['python3', '-I', '-B', '-c', _CHILD, '-1'], stdin=json.dumps(request).encode(), env=environment)
    except sandbox.SandboxError:
      return None
    finally:
      pool.give_back(box)
    with contextlib.suppress(ValueError):
      found = json.loads(result.stdout)
      if isinstance(found, dict) and isinstance(found.get('result'), dict) and isinstance(found.get('outcome'), str):
        return found
    return {'outcome': result.ending, 'result': {}}

  def _run(self, request: dict[str, Any]) -> dict[str, Any] | None:
    """What the supervisor says, None if it says nothing."""
    folder = tempfile.mkdtemp(prefix='graded-')
    reading, writing = os.pipe()
    with self._lock:
      closed = self._closed
      self._lifelines.add(writing)
    try:
      if closed:
        return None
      environment = {'PATH': os.defpath, 'HOME': folder, 'TMPDIR': folder, 'LANG': 'C.UTF-8'}
      with subprocess.Popen(
          [sys.executable, '-I', '-B', code_child.__file__, str(reading)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
          stderr=subprocess.DEVNULL, pass_fds=(reading,), cwd=folder, env=environment, start_new_session=True) as process:
        try:
          output, _ = process.communicate(json.dumps(request).encode(), timeout=self._time_limit_s + 20.0)
        except subprocess.TimeoutExpired:
          process.kill()
          return None
      return json.loads(output) if output else None
    finally:
      os.close(reading)
      with self._lock:
        mine = writing in self._lifelines
        self._lifelines.discard(writing)
      if mine:
        os.close(writing)
      shutil.rmtree(folder, ignore_errors=True)

  def close(self) -> None:
    """Ends all programs that run; their calls return 'grader_error'."""
    with self._lock:
      self._closed = True
      lifelines = list(self._lifelines)
      self._lifelines.clear()
      pool = self._pool
    if pool is not None:
      pool.close()
    for descriptor in lifelines:
      with contextlib.suppress(OSError):
        os.close(descriptor)


def _make_box(time_limit_s: float, memory_mb: int) -> sandbox.Box:
  """A box for one program: the supervisor in it keeps the limits of the program, those of the box are a little wider."""
  limits = sandbox.Limits(time_s=time_limit_s + 10.0, memory_mb=memory_mb + 64, file_mb=16, disk_mb=64, open_files=128)
  return sandbox.open(limits=limits, packages=True)


def extract_code(response: str, entry_point: str = '', *, completes: bool = False) -> str | None:
  """The code in a response.

  Of blocks in ``` fences the last one that defines `entry_point`, else the last one with a definition, else the last one; a block that is
  not closed reaches to the end. Without a block, the whole response where it looks like code, or where it `completes` a prompt.
  """
  text = response[-extract.WINDOW * 2:]
  blocks, at = [], 0
  while (start := _BLOCK.search(text, at)) is not None:
    stop = _FENCE.search(text, start.end())
    if start[1].lower() in _LANGUAGES:
      blocks.append(text[start.end():stop.start() if stop else len(text)])
    at = stop.end() if stop else len(text)
  if not blocks:
    return text if text.strip() and (completes or _CODE.search(text)) else None
  for wanted in (f'def {entry_point}' if entry_point else 'def ', 'def '):
    for block in reversed(blocks):
      if wanted in block:
        return block
  return blocks[-1] if blocks[-1].strip() else None


def program_of(code: str, metadata: Mapping[str, Any]) -> str:
  """The whole program: before the code stands what precedes the function in the prompt, or all of it where the code has no head."""
  prompt, entry_point = str(metadata.get('prompt', '')), metadata.get('entry_point', '')
  if not prompt or not entry_point:
    return code
  head = re.search(rf'^(?:async )?def {re.escape(entry_point)}\b', prompt, flags=re.MULTILINE)
  if re.search(rf'^(?:async )?def {re.escape(entry_point)}\b', code, flags=re.MULTILINE):
    return prompt[:head.start() if head else 0] + '\n' + code
  return prompt + code


def tests_of(answer: str, metadata: Mapping[str, Any]) -> str:
  if metadata.get('test_list'):
    setup = metadata.get('test_setup_code', '')  # Runs after the program: some of it uses classes that the program defines.
    return '\n'.join([*([setup] if setup else []), *metadata['test_list']])
  if metadata.get('test'):
    check = f'\ncheck({metadata["entry_point"]})\n' if metadata.get('entry_point') else ''
    return metadata['test'] + check
  return answer
