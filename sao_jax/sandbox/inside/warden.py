"""The warden of a box: starts what the host asks for, watches its limits, and ends it with all that came of it.

It is process 1 of the box, or under the plain backend the adopter of orphans. It reads one request at a time from the host and answers it:

    run            a command, to its end or its limit; whatever it leaves behind is ended
    python, code, end    an interpreter that stays, a piece of code for it, its end
    write, read, list    files of the work folder

Code in the box runs under the same user but cannot reach the warden: without capabilities it may not trace it or read its memory or its
descriptors (it is not dumpable), and the kernel delivers to process 1 no signal from inside that it has no handler for. It ends when the
host closes its side, and the box with it.
"""

import errno
import fcntl
import json
import math
import os
import resource
import select
import signal
import sys
import time
import traceback

from sao_jax.sandbox.inside import collect, files, session, system, wire

MAX_REQUEST = 1 << 28
MAX_ANSWER = 1 << 22  # Bytes of a session's answer.
FIRST_TICK_S, MAX_TICK_S = 0.005, 0.04
PAGE = os.sysconf('SC_PAGE_SIZE')


class Session:
  """An interpreter that stays: its process, the pipe of its output, and the two of its requests and answers."""

  def __init__(self, pid, output, request, answer):
    self.pid, self.output, self.request, self.answer = pid, output, request, answer

  def close(self):
    for descriptor in (self.output, self.request, self.answer):
      os.close(descriptor)


class Warden:
  """Serves one box."""

  def __init__(self, reader, writer, lifeline, settings):
    self._reader, self._writer, self._lifeline, self._settings = reader, writer, lifeline, settings
    self._work = settings['work']
    self._statuses = {}
    self._sessions = {}
    self._null = os.open(os.devnull, os.O_RDWR)
    self._namespace = settings['kill'] == 'namespace'
    if self._namespace and os.getpid() != 1:
      raise RuntimeError('the warden of a namespace must be its first process')

  def serve(self):
    """Answers requests until the host closes."""
    while True:
      frame = self._next()
      if frame is None:
        return
      header, blobs = frame
      try:
        answer, data = getattr(self, 'do_' + header['op'])(header, blobs)
      except wire.WireError:
        raise
      except Exception:  # A fault of this code, or of the system: the host is told, and the box ends.
        wire.send(self._writer, {'failed': traceback.format_exc()[-2000:]})
        return
      wire.send(self._writer, answer, data)

  def _next(self):
    """The next request; orphans that end meanwhile are taken note of."""
    poll = self._poll([self._reader])
    while True:
      ready = [d for d, _ in poll.poll(1000)]
      self._reap()
      if self._lifeline in ready:
        return None
      if self._reader in ready:
        return wire.receive(self._reader, MAX_REQUEST)

  def _poll(self, readable):
    poll = select.poll()
    poll.register(self._reader, 0)  # Its end is reported all the same.
    if self._lifeline is not None:
      poll.register(self._lifeline, 0)
    for descriptor in readable:
      poll.register(descriptor, select.POLLIN)
    return poll

  # --- Commands ---------------------------------------------------------------------------------------------------------------

  def do_run(self, header, blobs):
    limits = header['limits']
    out, out_end = os.pipe()
    err, err_end = os.pipe()
    into, feed = os.pipe() if blobs[0] else (os.open(os.devnull, os.O_RDONLY), None)
    start = time.monotonic()
    pid, trouble = self._start(header, limits, {0: into, 1: out_end, 2: err_end}, header['time_s'])
    for descriptor in (into, out_end, err_end):
      os.close(descriptor)
    output, errors = (collect.Collector(limits['output_bytes']) for _ in range(2))
    try:
      if trouble:
        if feed is not None:
          os.close(feed)
        return self._unstarted(header, trouble, time.monotonic() - start)
      streams = {out: output.add, err: errors.add}
      ending = self._attend(pid, streams, (feed, blobs[0]), start + header['time_s'], limits, lambda: pid in self._statuses)
      self._end_all()
      self._drain(streams)
    finally:
      os.close(out)
      os.close(err)
    code = self._statuses.pop(pid, -signal.SIGKILL)
    if not ending:
      ending = 'time' if code == -signal.SIGXCPU else 'killed' if code < 0 else 'exited'
    answer = {'ending': ending, 'code': code, 'seconds': time.monotonic() - start, 'cut': [output.cut, errors.cut]}
    self._statuses.clear()
    return answer, [output.value(), errors.value()]

  def _unstarted(self, header, trouble, seconds):
    """The answer for a command that cannot be started, in the manner of a shell."""
    self._end_all()
    self._statuses.clear()
    text = '%s: %s\n' % (header['argv'][0][:200], trouble[1])
    code = 127 if trouble[0] == errno.ENOENT else 126
    return {'ending': 'exited', 'code': code, 'seconds': seconds, 'cut': [False, False]}, [b'', text.encode('utf-8', 'replace')]

  def _start(self, header, limits, descriptors, cpu_s, interpreter=False):
    """(process, None), or (process, (errno, text)) where the command cannot be started. `descriptors`: the child's number -> ours."""
    status, told = os.pipe()
    try:
      pid = os.fork()
    except OSError as error:
      os.close(status)
      os.close(told)
      return None, (error.errno, os.strerror(error.errno))
    if pid == 0:
      self._become(header, limits, descriptors, told, cpu_s, interpreter)
    os.close(told)
    problem = os.read(status, 400)
    os.close(status)
    if not problem:
      return pid, None
    number, _, text = problem.decode('utf-8', 'replace').partition(' ')
    return pid, (int(number), text)

  def _become(self, header, limits, descriptors, told, cpu_s, interpreter):
    """In the forked process: limits, then the command, or the loop of an `interpreter`. Never returns."""
    folder = False
    try:
      os.setpgid(0, 0)  # Of the warden's session: one of its own would have a share of the processors like that of the whole host.
      high = {target: _above(source) for target, source in descriptors.items()}
      told = _above(told)
      for target, source in high.items():
        os.dup2(source, target)
      for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
      os.umask(0o022)
      os.nice(limits['nice'])
      cwd = header['cwd']
      if cwd == files.FOLDER or cwd.startswith(files.FOLDER + '/'):
        cwd = self._work + cwd[len(files.FOLDER):]
      folder = True
      os.chdir(cwd)
      folder = False
      self._limit(limits, cpu_s)
      environment = dict(self._settings['environment'], **header['env'])
      if interpreter:
        os.close(told)
        self._interpret(environment)
      else:
        os.execvpe(header['argv'][0], header['argv'], environment)
    except OSError as error:
      where = 'in the folder %r' % header['cwd'][:100] if folder else ''
      os.write(told, ('%d %s %s' % (error.errno or 0, os.strerror(error.errno or 0), where)).strip().encode('utf-8', 'replace'))
    except BaseException as error:  # A zero byte in an argument, say.
      os.write(told, ('%d %s' % (errno.EINVAL, error)).encode('utf-8', 'replace')[:300])
    finally:
      os._exit(126)

  def _interpret(self, environment):
    """Makes this process, a copy of the warden, an interpreter that has nothing of it: for a new one it would take five times as long."""
    for name in os.listdir('/proc/self/fd'):
      if int(name) > 4:
        try:
          os.close(int(name))
        except OSError:
          pass  # The one of this listing.
    for number in (signal.SIGINT, signal.SIGPIPE):
      signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_IGN)
    if self._settings['kill'] != 'children':
      system.libc.prctl(system.PR_SET_DUMPABLE, 1, 0, 0, 0)  # Its own /proc/self is its own again.
    os.environ.clear()
    os.environ |= environment
    sys.executable = self._settings['python']
    session.main(*self._settings['packages'])

  def _limit(self, limits, cpu_s):
    wanted = {
        resource.RLIMIT_AS: limits['address_mb'] << 20, resource.RLIMIT_FSIZE: limits['file_mb'] << 20,
        resource.RLIMIT_NOFILE: limits['open_files'], resource.RLIMIT_CORE: 0, resource.RLIMIT_MEMLOCK: 1 << 16}
    if cpu_s is not None:
      wanted[resource.RLIMIT_CPU] = int(math.ceil(cpu_s)) + 1
    if self._settings['count_processes']:
      wanted[resource.RLIMIT_NPROC] = limits['processes'] + 1  # And the warden.
    for kind, value in wanted.items():
      hard = resource.getrlimit(kind)[1]
      value = value if hard == resource.RLIM_INFINITY else min(value, hard)
      resource.setrlimit(kind, (value, value))

  # --- Watching ---------------------------------------------------------------------------------------------------------------

  def _attend(self, pid, streams, feed, deadline, limits, done):
    """Takes output and gives input until `done()`; '' then, else which limit was passed. Ends the box where the host is gone.

    Args:
      streams: descriptor -> function that takes what is read from it.
      feed: (descriptor or None, bytes to write there); it is closed after them.
    """
    poll = self._poll(streams)
    handle = _pidfd(pid)
    if handle is not None:
      poll.register(handle, select.POLLIN)
    target, data = feed
    view = memoryview(data)
    if target is not None:
      os.set_blocking(target, False)
      poll.register(target, select.POLLOUT)
    taken, tick, next_look = 0, FIRST_TICK_S, time.monotonic() + FIRST_TICK_S
    try:
      while True:
        self._reap()
        if done():
          return ''
        now = time.monotonic()
        if now >= deadline:
          return 'time'
        if now >= next_look:
          trouble = self._over(limits)
          if trouble:
            return trouble
          tick = min(2 * tick, MAX_TICK_S)
          next_look = time.monotonic() + tick
        for descriptor, _ in poll.poll(max(0.0, min(deadline, next_look) - now) * 1000 + 1):
          if descriptor in (self._reader, self._lifeline):
            raise wire.WireError('the host is gone')
          if descriptor in streams:
            part = os.read(descriptor, 1 << 16)
            taken += len(part)
            if part:
              streams[descriptor](part)
            else:
              poll.unregister(descriptor)
          elif descriptor == target:
            view = _feed(target, view)
            if not len(view):
              poll.unregister(target)
              os.close(target)
              target = None
          elif descriptor == handle:
            poll.unregister(handle)
        if taken > limits['flood_mb'] << 20:
          return 'output'
    finally:
      for descriptor in (handle, target):
        if descriptor is not None:
          os.close(descriptor)

  def _over(self, limits):
    """'memory' or 'processes' where all processes together pass their limit, else ''."""
    members = self._members()
    if len(members) > limits['processes']:
      return 'processes'
    most = limits['memory_mb'] << 20
    if sum(_resident(p) for p in members) > most and sum(_proportional(p) for p in members) > most:
      return 'memory'
    return ''

  def _members(self):
    """Processes that code of the box runs in, as far as /proc tells."""
    if self._namespace:
      return [int(name) for name in os.listdir('/proc') if name.isdigit() and name != '1']
    found, open_ = [], [os.getpid()]
    while open_:
      children = _children(open_.pop())
      found += children
      open_ += children
    return found

  def _drain(self, streams):
    """Takes what is left in the pipes; nobody writes to them any more."""
    for descriptor, take in streams.items():
      os.set_blocking(descriptor, False)
      try:
        part = os.read(descriptor, 1 << 20)
        while part:
          take(part)
          part = os.read(descriptor, 1 << 20)
      except BlockingIOError:
        pass

  # --- Ending -----------------------------------------------------------------------------------------------------------------

  def _reap(self):
    while True:
      try:
        pid, status = os.waitpid(-1, os.WNOHANG)
      except ChildProcessError:
        return False
      if not pid:
        return True
      self._statuses[pid] = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)

  def _end_all(self):
    """Ends every process but the warden and living sessions (and what these hold as children), and waits until they are gone."""
    began = time.monotonic()
    while True:
      alive = {s.pid for s in self._sessions.values()} - set(self._statuses)
      if not alive and self._namespace:
        _kill(-1)
      others = self._others(alive)
      for pid in others:
        _kill(pid)
      more = self._reap()
      if not more or (alive and not others and not self._others(alive)):
        break
      waited = time.monotonic() - began
      if waited > 10.0:
        if not alive:
          os._exit(1)  # What cannot be ended ends with the box.
        for pid in alive:
          _kill(pid)
      time.sleep(min(0.02, 0.0005 + waited / 4))

  def _others(self, alive):
    """Processes that do not belong to a living session."""
    if not alive:
      return [] if self._namespace else self._members()
    kept = set(alive)
    parents = {pid: _parent(pid) for pid in self._members()}
    for _ in range(len(parents)):
      new = {pid for pid, parent in parents.items() if parent in kept} - kept
      if not new:
        break
      kept |= new
    return [pid for pid, parent in parents.items() if pid not in kept and parent is not None]

  # --- Python sessions --------------------------------------------------------------------------------------------------------

  def do_python(self, header, blobs):
    limits = header['limits']
    output, out_end = os.pipe()
    request_end, request = os.pipe()
    answer, answer_end = os.pipe()
    command = {'argv': ['python'], 'cwd': header['cwd'], 'env': header['env']}
    pid, trouble = self._start(command, limits, {0: self._null, 1: out_end, 2: out_end, 3: request_end, 4: answer_end}, None, True)
    for descriptor in (out_end, request_end, answer_end):
      os.close(descriptor)
    session = Session(pid, output, request, answer)
    if trouble:
      session.close()
      return {'trouble': trouble[1]}, []
    self._sessions[header['id']] = session
    return {}, []

  def do_code(self, header, blobs):
    limits, start = header['limits'], time.monotonic()
    deadline = start + header['time_s']
    session = self._sessions.get(header['id'])
    if session is None:
      return {'ending': 'ended', 'seconds': 0.0, 'cut': False, 'value': False, 'error': False}, [b'', b'', b'']
    output, answer = collect.Collector(limits['output_bytes']), bytearray()
    self._drain({session.answer: lambda data: None})  # What was written there without being asked.
    os.set_blocking(session.request, False)
    found = []

    def take(data):
      if len(answer) <= MAX_ANSWER:
        answer.extend(data)
      found[:] = _answers(answer, header['number'])

    streams = {session.output: output.add, session.answer: take}
    request = wire.packed({'id': header['number']}, blobs[:1])
    ending = self._attend(
        session.pid, streams, (os.dup(session.request), request), deadline, limits,
        lambda: found or session.pid in self._statuses or len(answer) > MAX_ANSWER)
    alive = bool(found) and not ending and session.pid not in self._statuses
    if not alive:
      _kill(session.pid)
      del self._sessions[header['id']]
    self._end_all()
    self._drain({session.output: output.add})
    if alive:
      value, error, blobs = found[0]
      ending = 'answered'
    else:
      value, error, blobs = False, False, [b'', b'']
      code = self._statuses.get(session.pid, 0)
      ending = ending or ('killed' if code < 0 else 'exited')
      session.close()
    for pid in [p for p in self._statuses if p not in {s.pid for s in self._sessions.values()}]:
      del self._statuses[pid]
    return ({'ending': ending, 'seconds': time.monotonic() - start, 'cut': output.cut, 'value': value, 'error': error},
            [output.value()] + blobs)

  def do_end(self, header, blobs):
    session = self._sessions.pop(header['id'], None)
    if session is not None:
      _kill(session.pid)
      self._end_all()
      session.close()
      self._statuses.pop(session.pid, None)
    return {}, []

  # --- Files ------------------------------------------------------------------------------------------------------------------

  def _in_child(self, header, blobs):
    """Does a file operation in a process of its own, which may take, and break, whatever it likes."""
    out, end = os.pipe()
    start = time.monotonic()
    try:
      pid = os.fork()
    except OSError as error:
      os.close(out)
      os.close(end)
      return {'refusal': 'no process for it: %s' % os.strerror(error.errno)}, []
    if pid == 0:
      try:
        os.close(out)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        answer, data = files.perform(self._work, header, blobs)
        wire.send(end, answer, data)
      finally:
        os._exit(0)
    os.close(end)
    try:
      return wire.receive(out, MAX_REQUEST, start + header['time_s']) or ({'refusal': 'the operation was ended'}, [])
    except wire.WireError as error:
      return {'refusal': str(error)}, []
    finally:
      os.close(out)
      _kill(pid)
      while pid not in self._statuses:
        self._reap()
        time.sleep(0.0005)
      del self._statuses[pid]

  do_write = do_read = do_list = _in_child


def _above(descriptor):
  """A copy of a descriptor beyond those that get their places in a child; closed when it starts its program."""
  return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 16)


def _feed(target, view):
  """What is left of `view` after writing as much as the pipe takes; nothing where nobody reads."""
  try:
    return view[os.write(target, view[:1 << 16]):]
  except BlockingIOError:
    return view
  except OSError:
    return view[:0]


def _pidfd(pid):
  try:
    return os.pidfd_open(pid)
  except (AttributeError, OSError):  # Python before 3.9, Linux before 5.3: the end is seen at the next tick.
    return None


def _answers(data, number):
  """[(value?, error?, [value, error])] of the first whole frame in `data` that answers the request of that number."""
  place = 0
  while len(data) - place >= 4:
    length = int.from_bytes(data[place:place + 4], 'big')
    if length > len(data) - place - 4:
      return []
    try:
      header = json.loads(bytes(data[place + 4:place + 4 + length]).decode('ascii'))
      sizes = [int(s) for s in header['sizes']]
      good = len(sizes) == 2 and min(sizes) >= 0
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
      return []
    start = place + 4 + length
    if not good or start + sum(sizes) > len(data):
      return []
    if header.get('id') == number:
      middle = start + sizes[0]
      blobs = [bytes(data[start:middle]), bytes(data[middle:middle + sizes[1]])]
      return [(bool(header.get('value')), bool(header.get('error')), blobs)]
    place = start + sum(sizes)
  return []


def _kill(pid):
  try:
    os.kill(pid, signal.SIGKILL)
  except (ProcessLookupError, PermissionError):
    pass


def _children(pid):
  found = []
  try:
    for task in os.listdir('/proc/%d/task' % pid):
      with open('/proc/%d/task/%s/children' % (pid, task)) as file:
        found += [int(child) for child in file.read().split()]
  except OSError:
    pass
  return found


def _parent(pid):
  try:
    with open('/proc/%d/stat' % pid, 'rb') as file:
      return int(file.read().rpartition(b')')[2].split()[1])
  except (OSError, IndexError):
    return None


def _resident(pid):
  """Bytes in memory, those that it shares included."""
  try:
    with open('/proc/%d/statm' % pid) as file:
      return int(file.read().split()[1]) * PAGE
  except (OSError, IndexError):
    return 0


def _proportional(pid):
  """Bytes in memory, those that several share divided among them; all of them where that cannot be told."""
  try:
    with open('/proc/%d/smaps_rollup' % pid) as file:
      for line in file:
        if line.startswith('Pss:'):
          return int(line.split()[1]) << 10
    return 0
  except OSError:
    return _resident(pid)


def serve(reader, writer, lifeline, settings):
  """Serves a box until the host is gone; the first answer says that it is ready."""
  for descriptor in {reader, writer}:
    os.set_inheritable(descriptor, False)
  for number in range(1, signal.NSIG):  # A handler, such as Python's own of SIGINT, would let code in the box interrupt this process.
    if callable(signal.getsignal(number)) or number == signal.SIGPIPE:
      signal.signal(number, signal.SIG_IGN)
  try:
    own = Warden(reader, writer, lifeline, settings)
    wire.send(writer, {'ready': True, 'keeper': settings.get('keeper', 0)})
    own.serve()
  except wire.WireError:
    pass  # The host is gone.
  finally:
    if settings['kill'] != 'namespace':
      own._sessions.clear()
      own._end_all()
    os._exit(0)


def main(reader, writer):
  """The process under bubblewrap, in a container, or with nothing around it. The first frame holds the settings."""
  reader, writer = int(reader), int(writer)
  header, _ = wire.receive(reader, 0, time.monotonic() + 60.0)
  settings = header['warden']
  system.stand_back(settings['nice'])
  from sao_jax.sandbox.inside import confine  # Not needed where a keeper has done this.
  try:
    if settings['kill'] == 'children':
      system.call('subreaper', system.libc.prctl(system.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
    elif settings['confine']:
      confine.confine()
    else:
      confine.close_to_others()
  except (OSError, AttributeError, system.Refused) as error:
    wire.send(writer, {'refused': str(error)})
    return
  serve(reader, writer, None, settings)

