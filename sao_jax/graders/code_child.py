"""Runs graded code under limits: a supervisor that `code_tests` starts as a script, and the runner that it forks. Standard library only.

The supervisor reads one JSON object from its input (program, tests, nonce, limits), forks the runner into a session of its own, waits for
it up to the time limit, ends everything that descends from it (it adopts orphans, so that a process which left the session is found too),
and writes one JSON object with what came of it. It ends early when its lifeline closes: the grader is gone.
"""

import ctypes
import json
import os
import resource
import select
import signal
import sys
import time
import types

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
MAX_RESULT = 4096


def supervise(lifeline: int) -> dict:
  request = json.loads(sys.stdin.buffer.read())
  _prctl(PR_SET_CHILD_SUBREAPER, 1)
  result, write = os.pipe()
  runner = os.fork()
  if runner == 0:
    os.close(result)
    if lifeline >= 0:
      os.close(lifeline)
    try:
      _run(request, write)
    finally:
      os._exit(1)
  os.close(write)
  os.set_blocking(result, False)
  outcome, data = _wait(runner, result, lifeline, time.monotonic() + request['time_limit_s'])
  while len(data) < MAX_RESULT:  # What it wrote last.
    try:
      part = os.read(result, MAX_RESULT)
    except BlockingIOError:
      break
    if not part:
      break
    data += part
  left = _end_descendants(runner)
  try:
    found, _ = json.JSONDecoder().raw_decode(data[:MAX_RESULT].decode(errors='replace'))  # The first one, should there be several.
  except ValueError:
    found = {}
  return {'outcome': outcome, 'result': found if isinstance(found, dict) else {}, 'left': left}


def _wait(runner: int, result: int, lifeline: int, deadline: float) -> tuple:
  """(how the runner ended, what it has written so far)."""
  data = b''
  while True:
    pid, status = os.waitpid(runner, os.WNOHANG)
    if pid:
      return ('signal %d' % os.WTERMSIG(status) if os.WIFSIGNALED(status) else 'exit %d' % os.WEXITSTATUS(status)), data
    left = deadline - time.monotonic()
    if left <= 0:
      return 'time', data
    watched = [lifeline] * (lifeline >= 0) + [result] * (not data)
    ready = select.select(watched, [], [], min(left, 0.02 if data else 0.05))[0]
    if lifeline in ready:
      return 'closed', data
    if result in ready:
      part = os.read(result, MAX_RESULT)
      data += part or b' '  # An end without a result: wait for the process.


def _end_descendants(runner: int) -> int:
  """Kills the runner's group and whatever was left to this process, until nothing is; returns how many there were besides the runner."""
  _kill(-runner)
  found = set()
  deadline = time.monotonic() + 5.0
  while time.monotonic() < deadline:
    for pid in _children():
      _kill(pid)
      found.add(pid)
    try:
      pid, _ = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
      break
    if not pid:
      time.sleep(0.002)
  return len(found - {runner})


def _children() -> list:
  try:
    with open('/proc/self/task/%d/children' % os.getpid()) as file:
      return [int(pid) for pid in file.read().split()]
  except OSError:
    return []


def _kill(pid: int) -> None:
  try:
    os.kill(pid, signal.SIGKILL)
  except (ProcessLookupError, PermissionError):
    pass


def _prctl(option: int, value: int) -> None:
  try:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
  except (OSError, AttributeError):
    pass  # Not Linux.


def _run(request: dict, write: int) -> None:
  """In the forked process: limits, then the program, then its tests; the result carries the nonce."""
  os.setsid()
  _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
  null = os.open(os.devnull, os.O_RDWR)
  for descriptor in (0, 1, 2):
    os.dup2(null, descriptor)
  memory, seconds = request['memory_mb'] << 20, int(request['time_limit_s']) + 1
  for kind, limit in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_FSIZE, 16 << 20),
                      (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, 64)):
    resource.setrlimit(kind, (limit, limit))
  if 'environment' in request:
    for name in set(os.environ) - set(request['environment']):
      os.environ.pop(name)
    sys.path += request['packages']
  nonce, program, tests = request.pop('nonce'), request['program'], request['tests']

  def tell(**values) -> None:
    os.write(write, json.dumps(values).encode()[:MAX_RESULT])
    os._exit(0)

  module = types.ModuleType('graded')
  sys.modules['graded'] = module
  sys.argv = ['graded']
  stage = 'tests'
  try:
    compiled = compile(tests, '<tests>', 'exec')
    stage = 'program'
    exec(compile(program, '<program>', 'exec'), module.__dict__)
    stage = 'test'
    exec(compiled, module.__dict__)
  except BaseException as error:  # SystemExit too: leaving early passes no test.
    tell(stage=stage, error=type(error).__name__, text=str(error)[:300])
  tell(nonce=nonce)


if __name__ == '__main__':
  outcome = supervise(int(sys.argv[1]))
  os.write(1, json.dumps(outcome).encode())
