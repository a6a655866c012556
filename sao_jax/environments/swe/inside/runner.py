"""Runs tests inside the sandbox and tells the host what became of them.

    controller   reads the request from standard input, starts the test process, collects what it reports, writes one JSON object
    test process the graded code, pytest or unittest, and an observer that reports each test over a pipe

The controller never loads graded code. It holds the nonce that makes its answer valid, and no other process may read its memory or its
descriptors. Reports carry a running number and a keyed digest; what the tests print goes elsewhere and is only kept as a log. The key is in
the test process, so code that sets out to find the observer there can make reports; the judge's control runs are for that.
"""

import hashlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time

LOG_HEAD, LOG_TAIL, MAX_REPORTS = 60000, 140000, 64 << 20
WATCHED = (
    'unittest.case', 'unittest.result', 'unittest.suite', '_pytest.runner', '_pytest.python', '_pytest.reports', '_pytest.main',
    '_pytest.skipping', '_pytest.unittest', '_pytest.outcomes', '_pytest.assertion', '_pytest.assertion.rewrite', '_pytest._code.code',
    'pluggy._caller', 'pluggy._callers', 'pluggy._hook', 'pluggy._hooks', 'pluggy._manager', 'pluggy.callers', 'pluggy.hooks',
    'pluggy.manager')
FUNCTION = type(lambda: None)


# --- The controller --------------------------------------------------------------------------------------------------------------


def control(source):
  request = json.loads(sys.stdin.buffer.read().decode())
  try:
    import ctypes
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: nobody of this user reads or traces this process.
  except (OSError, AttributeError):
    pass
  answer = {'nonce': request.pop('nonce')}
  request['root'] = os.getcwd()
  answer.update(run(request, source))
  os.write(1, b'\n')
  sys.stdout.write(json.dumps(answer))
  sys.stdout.flush()


def run(request, source):
  """Starts the test process and waits for it: {'ending', 'exit', 'reports', 'log', 'wrong'}."""
  key = os.urandom(32).hex()
  reports, write = os.pipe()
  settings, give = os.pipe()
  for descriptor in (write, settings):
    os.set_inheritable(descriptor, True)
  command, env = command_of(request, source, write, settings)
  process = subprocess.Popen(
      command, cwd=request['root'], env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
      pass_fds=(write, settings), start_new_session=True)
  os.close(write)
  os.close(settings)
  threaded_write(give, json.dumps(dict(request, key=key)).encode())
  collected, log, ending = collect(process, reports, time.monotonic() + request['time_s'])
  observed = request['kind'] != 'command'
  found, wrong = read_reports(collected, key if observed else '')
  if observed and ending == 'exited' and not (found and found[-1].get('end')):
    ending = 'without an end'
  if request['kind'] == 'command' and request['log_format'] == 'sympy':
    found = sympy_reports(log)
  return {'ending': ending, 'exit': process.returncode, 'reports': found, 'log': log, 'wrong': wrong}


def threaded_write(descriptor, data):
  """Writes to a pipe that may be too small for all of it at once."""
  import threading

  def write():
    try:
      with os.fdopen(descriptor, 'wb') as file:
        file.write(data)
    except OSError:
      pass

  threading.Thread(target=write, daemon=True).start()


def command_of(request, source, write, settings):
  env = dict(os.environ)
  for name in list(env):
    if name.startswith(('PYTEST_', 'PYTHON')):
      del env[name]
  scratch = tempfile.mkdtemp(prefix='run')
  roots = [os.path.normpath(os.path.join(request['root'], p)) for p in request['python_path']]
  env.update(HOME=scratch, TMPDIR=scratch, LANG='C.UTF-8', PYTHONDONTWRITEBYTECODE='1', PYTHONHASHSEED='0')
  env['PYTHONPATH'] = os.pathsep.join(roots + request['site'])
  if request['site'] and not request['plugins']:
    env['PYTEST_DISABLE_PLUGIN_AUTOLOAD'] = '1'  # Those are the host's plugins, not the project's.
  env.update(request['env'])
  if request['kind'] != 'command':
    return [sys.executable, '-I', '-B', '-c', source, 'tests', str(write), str(settings)], env
  if request['log_format'] in ('unittest', 'pytest'):
    folder = tempfile.mkdtemp(prefix='observe')
    with open(os.path.join(folder, 'swe_observer.py'), 'w') as file:
      file.write(source)
    with open(os.path.join(folder, 'sitecustomize.py'), 'w') as file:
      file.write('import swe_observer\nswe_observer.attach(%d, %r)\n' % (write, request['log_format']))
    env['PYTHONPATH'] = os.pathsep.join([folder, env['PYTHONPATH']])
    if request['log_format'] == 'pytest':
      env['PYTEST_ADDOPTS'] = '-p swe_observer'
      env['SWE_OBSERVER'] = str(write)
  return ['bash', '-c', request['command']], env


def collect(process, reports, deadline):
  """Reads reports and log until the process ends or its time is over; then ends all that is left of it."""
  out = process.stdout.fileno()
  collected, head, tail = bytearray(), bytearray(), bytearray()
  for descriptor in (out, reports):
    os.set_blocking(descriptor, False)
  watched = {out, reports}

  def take(descriptor):
    """False when there is nothing now."""
    try:
      data = os.read(descriptor, 65536)
    except BlockingIOError:
      return False
    if not data:
      watched.discard(descriptor)
      return False
    if descriptor == reports:
      collected.extend(data[:max(0, MAX_REPORTS - len(collected))])
    else:
      room = LOG_HEAD - len(head)
      head.extend(data[:room])
      tail.extend(data[room:] if room > 0 else data)
      if len(tail) > 2 * LOG_TAIL:
        del tail[:-LOG_TAIL]
    return True

  ending = ''
  while not ending:
    for descriptor in select.select(list(watched), [], [], 0.02)[0] if watched else []:
      take(descriptor)
    if process.poll() is not None:
      ending = 'exited'
    elif time.monotonic() > deadline:
      ending = 'time'
    elif not watched:
      time.sleep(0.01)
  try:
    os.killpg(process.pid, signal.SIGKILL)
  except OSError:
    pass
  process.wait()
  for descriptor in list(watched):
    for _ in range(4096):  # What was written before the end; a process that went on elsewhere is not waited for.
      if not take(descriptor):
        break
  log = bytes(head) + (b'' if len(tail) <= LOG_TAIL else b'\n... (left out) ...\n') + bytes(tail[-LOG_TAIL:])
  return bytes(collected), log.decode('utf-8', 'replace'), ending


def read_reports(data, key):
  """The reports, in order, and what is wrong with them; with a `key` each must be signed and numbered."""
  found, wrong = [], []
  for number, line in enumerate(data.split(b'\n')[:-1]):
    try:
      text, _, mark = line.rpartition(b' ')
      report = json.loads((text if key else line).decode())
      if not isinstance(report, dict):
        raise ValueError('no object')
    except ValueError:
      wrong.append('a report that cannot be read')
      continue
    if key and (mark.decode('latin-1') != digest(key, text) or report.get('n') != number):
      wrong.append('a report that the observer did not make')
      continue
    found.append(report)
  return found, sorted(set(wrong))


def digest(key, data):
  return hashlib.blake2b(data, key=bytes.fromhex(key), digest_size=16).hexdigest()


def sympy_reports(log):
  """'test_name ok' and its like in a log."""
  found = []
  for line in log.splitlines():
    match = re.match(r'(test_\S+)\s+(?:.*\s)?(ok|F|E|f|s|X)$', line.strip())
    if match:
      found.append({'id': match.group(1), 'when': 'call', 'outcome': 'passed' if match.group(2) == 'ok' else 'failed'})
  return found


# --- The test process ------------------------------------------------------------------------------------------------------------


class Channel(object):
  """Writes reports to the controller."""

  def __init__(self, descriptor, key=''):
    process, number = os.getpid(), [0]
    write, getpid, dumps = os.write, os.getpid, json.dumps
    blake = hashlib.blake2b(key=bytes.fromhex(key), digest_size=16) if key else None
    os.set_inheritable(descriptor, not key)

    def send(**values):
      if getpid() != process and key:
        return  # A child of a test.
      if blake is None:
        write(descriptor, dumps(values).encode() + b'\n')
        return
      text = dumps(dict(values, n=number[0])).encode()
      number[0] += 1
      signed = blake.copy()
      signed.update(text)
      data = text + b' ' + signed.hexdigest().encode() + b'\n'
      while data:
        data = data[write(descriptor, data):]

    self.send = send


class Watch(object):
  """Notices functions of the runner that were exchanged."""

  def __init__(self):
    self._known = []
    for name in WATCHED:
      module = sys.modules.get(name)
      for holder in [module] + [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == name] if module else []:
        for attribute, value in list(vars(holder).items()):
          value = getattr(value, '__func__', value)
          if isinstance(value, FUNCTION):
            self._known.append((name, holder, attribute, value, value.__code__))

  def changed(self):
    found = set()
    for name, holder, attribute, value, code in self._known:
      now = vars(holder).get(attribute)
      now = getattr(now, '__func__', now)
      if now is not value or value.__code__ is not code:
        found.add(name + '.' + attribute)
    return sorted(found)


def tests(write, settings):
  with os.fdopen(settings, 'rb') as file:
    request = json.loads(file.read().decode())
  channel = Channel(write, request.pop('key'))
  roots = [os.path.normpath(os.path.join(request['root'], p)) for p in request['python_path']]
  sys.path[:0] = request['site']
  if request['kind'] == 'unittest':
    run_unittest(request, roots, channel)
  else:
    run_pytest(request, roots, channel)


def run_pytest(request, roots, channel):
  if request['is_runner']:
    sys.path[:0] = roots
  import pytest

  place = os.path.realpath(pytest.__file__)
  inside = place.startswith(os.path.realpath(request['root']) + os.sep)
  if inside != request['is_runner']:
    raise SystemExit('pytest would be taken from %s' % place)
  if not request['is_runner']:
    sys.path[:0] = roots
  observer = pytest_observer(pytest, channel, request)
  args = ['-p', 'no:cacheprovider', '--rootdir', request['root'], '-rA', '--tb=short'] + request['files']
  code = pytest.main(args, plugins=[observer])
  channel.send(end=True, changed=observer.changed())
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(int(code))


def pytest_observer(pytest, channel, request):
  wanted = set(request['ids'])
  watch = Watch()
  told, changed = set(), set()

  class Observer(object):

    def changed(self):
      return sorted(changed.union(watch.changed()))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items):
      if wanted:
        keep = [i for i in items if wanted.intersection(names_in_lists(i.nodeid))]
        kept = set(map(id, keep))
        config.hook.pytest_deselected(items=[i for i in items if id(i) not in kept])
        items[:] = keep

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item, call):
      result = yield
      report = result.get_result()
      changed.update(watch.changed() if report.when == 'teardown' else ())
      told.add((report.nodeid, report.when))
      tell(report, call.excinfo is not None)

    def pytest_runtest_logreport(self, report):
      if (report.nodeid, report.when) not in told:  # Of a worker process.
        tell(report, report.outcome != 'passed')

  def tell(report, raised):
    channel.send(id=report.nodeid, when=report.when, outcome=report.outcome, raised=raised, xfail=hasattr(report, 'wasxfail'))

  return Observer()


def names_in_lists(test):
  """A test's id in pytest, and how lists made from logs may call it: up to its first blank, and with the end of a path for the path."""
  cut = test.split()[0]
  match = re.match(r'(.*?)\[(/[^/*][^*]*)\]', cut)
  return {test, cut, '%s[/%s]' % (match.group(1), match.group(2).split('/')[-1]) if match else cut}


def run_unittest(request, roots, channel):
  import unittest
  import unittest.loader

  watch = Watch()
  sys.path[:0] = roots
  os.chdir(request['root'])

  class Result(unittest.TextTestResult):

    def startTest(self, test):
      super(Result, self).startTest(test)
      started.append(test.id())

    def addSuccess(self, test):
      super(Result, self).addSuccess(test)
      tell(test, 'passed', False)

    def addExpectedFailure(self, test, error):
      super(Result, self).addExpectedFailure(test, error)
      channel.send(id=test.id(), when='call', outcome='skipped', raised=True, xfail=True)

    def addError(self, test, error):
      super(Result, self).addError(test, error)
      tell(test, 'failed', True)

    def addFailure(self, test, error):
      super(Result, self).addFailure(test, error)
      tell(test, 'failed', True)

    def addSkip(self, test, reason):
      super(Result, self).addSkip(test, reason)
      tell(test, 'skipped', True)

    def addUnexpectedSuccess(self, test):
      super(Result, self).addUnexpectedSuccess(test)
      tell(test, 'failed', False)

    def addSubTest(self, test, subtest, error):
      super(Result, self).addSubTest(test, subtest, error)
      if error is not None:
        tell(test, 'failed', True)

  started = []

  def tell(test, outcome, raised):
    channel.send(id=test.id(), when='call', outcome=outcome, raised=raised, xfail=False)

  suite, loader = unittest.TestSuite(), unittest.TestLoader()
  for name in dict.fromkeys(map(dotted, request['ids'])):
    suite.addTests(loader.loadTestsFromName(name))
  unittest.TextTestRunner(stream=sys.stderr, verbosity=2, resultclass=Result).run(suite)
  channel.send(end=True, changed=watch.changed())
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(0)


def dotted(test):
  """'module.Class.test' of any form of a unittest id."""
  match = re.match(r'(\w+) \(([\w.]+)\)$', test.strip())
  if not match:
    return test.strip()
  name, place = match.groups()
  return place if place.endswith('.' + name) else place + '.' + name


# --- Inside of a command of the project ------------------------------------------------------------------------------------------


def attach(descriptor, form):
  """Called as a Python process of the command starts: reports what unittest finds."""
  if form != 'unittest':
    return
  try:
    os.fstat(descriptor)
  except OSError:
    return  # A process that was started without the pipe.
  import unittest

  channel, cls = Channel(descriptor), unittest.TestResult

  def wrap(name, outcome, xfail=False):
    before = getattr(cls, name)

    def wrapped(self, test, *args):
      error = args[-1] if name == 'addSubTest' else None
      if name != 'addSubTest' or error is not None:
        channel.send(id=test.id(), names=names_of(test), when='call', outcome=outcome, raised=outcome != 'passed', xfail=xfail,
                     changed=watch.changed())
      return before(self, test, *args)

    setattr(cls, name, wrapped)

  for name, outcome in (('addSuccess', 'passed'), ('addError', 'failed'), ('addFailure', 'failed'), ('addSkip', 'skipped'),
                        ('addUnexpectedSuccess', 'failed'), ('addSubTest', 'failed')):
    wrap(name, outcome)
  wrap('addExpectedFailure', 'skipped', True)
  watch = Watch()


def names_of(test):
  """How logs of the command may call a test."""
  names = [str(test)]
  try:
    names.append(test.shortDescription() or '')
  except Exception:
    pass
  return [n for n in names if n]


def pytest_configure(config):
  """As a plugin of a command that runs pytest."""
  if 'SWE_OBSERVER' in os.environ and not getattr(config, '_swe_observed', False):
    import pytest
    config._swe_observed = True
    config.pluginmanager.register(pytest_observer(pytest, Channel(int(os.environ.get('SWE_OBSERVER'))), {'ids': []}), 'swe_reports')


if __name__ == '__main__':
  if sys.argv[1] == 'control':
    control(sys.argv[2])
  else:
    tests(int(sys.argv[2]), int(sys.argv[3]))
