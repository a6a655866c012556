"""Whether a prediction repairs its instance: the listed tests, on a clean copy with the original tests, in a sandbox of their own.

    1  the prediction is laid over the base commit; its changes to trusted files are taken back (`trusted`)
    2  the listed tests run in a new sandbox, and each reports to a process that the graded code cannot reach (`inside/runner.py`)
    3  where all pass, the same tests made to fail run in another new sandbox; none may pass (`controls`)

What the prediction does is a `Verdict`, whatever it does. Exceptions are for sandboxes and repositories that fail.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import json
import pathlib
import random
import re
import secrets
import shlex
import threading
import time
from typing import Any, Iterable, Mapping, Sequence

from sao_jax import sandbox
from sao_jax.environments import base as environments
from sao_jax.environments.swe import controls, patches, repository
from sao_jax.environments.swe.inside import runner as runner_script
from sao_jax.environments.swe.instances import Instance
from sao_jax.environments.swe.patches import Change, Entry
from sao_jax.environments.swe.trusted import Laid, Trusted

SCRIPT = pathlib.Path(runner_script.__file__).read_text(encoding='utf-8')
REASONS = (
    'resolved', 'empty', 'does_not_apply', 'setup_failed', 'tests_failed', 'time', 'no_result', 'tampered', 'forged')
PACKAGES = sandbox.PACKAGES  # Where a box without an image shows packages.
OUTPUT_BYTES = 32 << 20


class SandboxFailure(environments.EnvironmentFailure):
  """A sandbox that could not be made, or failed."""

  reason = 'environment_sandbox'


class RepositoryFailure(environments.EnvironmentFailure):
  """An instance whose repository or own patches are not as they must be."""

  reason = 'environment_repository'
  retry = False


@dataclasses.dataclass(frozen=True)
class Verdict:
  """What came of a prediction.

  Attributes:
    reason: one of `REASONS`; 'resolved' for a reward of 1.
    outcomes: {test: 'passed' | 'xfailed' | 'failed' | 'missing'} of the run that decided; empty where none was made.
    detail: for people, one line.
    log: what the tests printed.
    dropped: {path: why} of the prediction's changes that were taken back.
    controls: tests that were made to fail, and did.
    seconds: of all runs.
  """

  reason: str
  outcomes: Mapping[str, str] = dataclasses.field(default_factory=dict)
  detail: str = ''
  log: str = ''
  dropped: Mapping[str, str] = dataclasses.field(default_factory=dict)
  controls: int = 0
  seconds: float = 0.0

  @property
  def resolved(self) -> bool:
    return self.reason == 'resolved'


@dataclasses.dataclass(frozen=True)
class Measured:
  """What the gold patch showed of an instance: `ids` to leave out, with the reason; whether the instance can be judged here at all."""

  left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
  usable: bool = True
  detail: str = ''
  patches_runner: bool = False


@dataclasses.dataclass(frozen=True)
class Run:
  """One run of tests: how it ended ('exited', 'time', ..., 'no_result'), and what was reported."""

  ending: str
  outcomes: Mapping[str, str]
  wrong: tuple[str, ...] = ()
  log: str = ''
  detail: str = ''


class Judge:
  """Judges predictions; threads may share one.

  Args:
    backend: of the sandboxes of instances without an image; those with one run in containers.
    limits: of a sandbox with tests; None for `LIMITS`.
    time_s: of one run of the tests, and of the setup.
    controls: control runs after a run in which all tests pass.
    bases: copies of repositories, shared with others.
  """

  LIMITS = sandbox.Limits(
      memory_mb=4096, address_mb=32768, processes=256, file_mb=512, disk_mb=2048, open_files=1024, output_bytes=OUTPUT_BYTES, flood_mb=256)

  def __init__(
      self, *, backend: str = 'auto', limits: sandbox.Limits | None = None, time_s: float = 900.0, controls: int = 1,
      bases: repository.Bases | None = None,
  ):
    environments.check_range('time_s', time_s, 0.1, 86_400.0)
    environments.check_range('controls', controls, 0, 16)
    self._backend, self._limits, self._time_s, self._controls = backend, limits or self.LIMITS, time_s, controls
    self.bases = bases or repository.Bases()
    self._lock = threading.Lock()
    self._trusted: dict[str, Trusted] = {}

  # --- Parts of an instance ----------------------------------------------------------------------------------------------------

  def open_box(self, instance: Instance, limits: sandbox.Limits | None = None) -> sandbox.Box:
    """A new box for an instance. Raises SandboxFailure."""
    try:
      if instance.image:
        return sandbox.open('container', image=instance.image, limits=limits or self._limits)
      if instance.packages and self._backend != 'plain':
        shown = sandbox.Mount(instance.packages, PACKAGES)
        return sandbox.open(self._backend, limits=limits or self._limits, mounts=[shown], env={'PYTHONPATH': PACKAGES})
      return sandbox.open(self._backend, limits=limits or self._limits, packages=self._backend != 'plain')
    except sandbox.SandboxError as error:
      raise SandboxFailure(str(error)) from error

  def python(self, instance: Instance) -> str:
    return instance.python or 'python3'

  def base(self, instance: Instance) -> repository.Base:
    """The instance's repository at its base commit. Raises RepositoryFailure, SandboxFailure."""
    try:
      return self.bases.get(instance, lambda: self.open_box(instance), self.python(instance))
    except repository.RepositoryError as error:
      raise RepositoryFailure(f'{instance.instance_id}: {error}') from error
    except (sandbox.SandboxError, sandbox.PathError) as error:
      raise SandboxFailure(f'{instance.instance_id}: {error}') from error

  def populate(self, box: sandbox.Box, instance: Instance, *, git: bool = True) -> None:
    """Puts the repository into a new box. Raises RepositoryFailure, SandboxFailure."""
    base = self.base(instance)
    try:
      base.populate(box, self.python(instance), git=git)
    except repository.RepositoryError as error:
      raise RepositoryFailure(f'{instance.instance_id}: {error}') from error
    except (sandbox.SandboxError, sandbox.PathError) as error:
      raise SandboxFailure(f'{instance.instance_id}: {error}') from error

  def trusted(self, instance: Instance) -> Trusted:
    """Raises RepositoryFailure where the instance's own patches do not fit."""
    base = self.base(instance)
    with self._lock:
      if instance.key not in self._trusted:
        try:
          self._trusted[instance.key] = Trusted(instance, base)
        except patches.PatchError as error:
          raise RepositoryFailure(f'{instance.instance_id}: its own patch or test_patch does not fit its base_commit: {error}') from error
      return self._trusted[instance.key]

  # --- Judging -----------------------------------------------------------------------------------------------------------------

  def judge_patch(self, instance: Instance, patch: str, *, measured: Measured = Measured()) -> Verdict:
    """The verdict on a patch in git's form."""
    base = self.base(instance)
    try:
      change = patches.apply(patch.encode('utf-8', 'surrogateescape'), base.entry)
    except patches.PatchError as error:
      return Verdict('does_not_apply', detail=str(error))
    return self.judge(instance, change, measured=measured)

  def judge(self, instance: Instance, change: Change, *, measured: Measured = Measured()) -> Verdict:
    """The verdict on a change of the base commit. Raises SandboxFailure, RepositoryFailure."""
    start = time.monotonic()
    base, trusted = self.base(instance), self.trusted(instance)
    if not any(base.entry(path) != entry for path, entry in change.items()):
      return Verdict('empty')
    laid = trusted.lay(change)
    ids = [test for test in instance.ids if test not in measured.left_out]
    run = self.run(instance, laid.change, ids)
    verdict = self._verdict(_as_expected(run, instance, trusted, base), ids, measured)
    spoiled = 0
    if verdict.resolved:
      for _ in range(self._controls):
        count, passed = self._control(instance, trusted, laid, ids)
        spoiled += count
        if passed:
          verdict = dataclasses.replace(
              verdict, reason='forged', detail=f'{len(passed)} tests passed that cannot pass, such as {passed[0]}')
          break
    return dataclasses.replace(verdict, dropped=laid.dropped, controls=spoiled, seconds=time.monotonic() - start)

  @staticmethod
  def _verdict(run: Run, ids: Sequence[str], measured: Measured) -> Verdict:
    wrong = () if measured.patches_runner else run.wrong
    failed = [test for test in ids if run.outcomes.get(test) != 'passed']
    if run.ending != 'exited':
      reason, detail = run.ending, run.detail
    elif failed:
      reason, detail = 'tests_failed', f'{len(failed)} of {len(ids)} tests did not pass, such as {failed[0]}'
    elif wrong:
      reason, detail = 'tampered', '; '.join(wrong)[:500]
    else:
      reason, detail = 'resolved', ''
    return Verdict(reason, dict(run.outcomes), detail, run.log)

  def _control(self, instance: Instance, trusted: Trusted, laid: Laid, ids: Sequence[str]) -> tuple[int, list[str]]:
    """(tests that had to fail, those of them that passed) of one control run."""
    base = self.base(instance)
    read = lambda path: trusted.files[path] if path in trusted.files else base.entry(path)
    control = controls.make(ids, lambda test: locate(instance, trusted, read, test), read, random.SystemRandom())
    if not control.ids:
      return 0, []
    run = self.run(instance, {**laid.change, **control.files}, ids)
    passed = [test for test in control.ids if run.outcomes.get(test) in ('passed', 'xfailed')]
    return len(control.ids) - len(passed), passed

  # --- One run -----------------------------------------------------------------------------------------------------------------

  def run(self, instance: Instance, change: Mapping[str, Entry | None], ids: Sequence[str]) -> Run:
    """Runs tests in a new box, on the base commit with a change."""
    try:
      with self.open_box(instance) as box:
        return self._run(box, instance, change, ids)
    except (sandbox.SandboxError, sandbox.PathError) as error:
      raise SandboxFailure(f'{instance.instance_id}: {error}') from error

  def _run(self, box: sandbox.Box, instance: Instance, change: Mapping[str, Entry | None], ids: Sequence[str]) -> Run:
    trusted, python = self.trusted(instance), self.python(instance)
    self.populate(box, instance, git=not instance.files)
    if not repository.place(box, python, change):
      raise SandboxFailure(f'{instance.instance_id}: the files of the prediction could not be written to the sandbox')
    if instance.setup:
      result = box.run(['bash', '-c', instance.setup], cwd=repository.ROOT, time_s=self._time_s, env=dict(instance.env))
      if not result.ok:
        log = (result.stdout[-20_000:] + result.stderr[-20_000:]).decode('utf-8', 'replace')
        return Run('setup_failed', {}, (), log, f'the setup ended with {result.ending} {result.exit_code}')
    nonce = secrets.token_hex(24)
    request = self._request(instance, trusted, ids) | {'nonce': nonce}
    result = box.run(
        [python, '-I', '-B', '-c', SCRIPT, 'control', SCRIPT], stdin=json.dumps(request).encode(), cwd=repository.ROOT,
        time_s=self._time_s + 10.0)
    if result.exit_code in (126, 127):
      raise SandboxFailure(f'{instance.instance_id}: {python} cannot be started: {result.stderr.decode(errors="replace")[-300:]}')
    return _read(result, nonce, instance, ids)

  def _request(self, instance: Instance, trusted: Trusted, ids: Sequence[str]) -> dict[str, Any]:
    files = [f for f in trusted.test_files if instance.runner != 'pytest' or _holds_tests(f, ids)]
    plain = self._backend == 'plain'
    site = [] if instance.image else [p for p in (instance.packages if plain else PACKAGES,) if p]
    return {
        'kind': instance.runner, 'log_format': instance.log_format, 'ids': list(ids), 'files': files, 'env': dict(instance.env),
        'python_path': list(trusted.roots), 'site': site, 'plugins': bool(instance.packages),
        'time_s': self._time_s, 'is_runner': trusted.is_runner, 'command': command_of(instance, trusted.test_files, ids)}

  # --- Measuring an instance ---------------------------------------------------------------------------------------------------

  def measure(self, instance: Instance, *, repeats: int = 2) -> Measured:
    """Runs the gold patch `repeats` times and nothing once: tests that fail with the first, or pass without, are left out.

    Raises SandboxFailure, RepositoryFailure.
    """
    base, trusted = self.base(instance), self.trusted(instance)
    gold = trusted.lay(patches.apply(instance.patch.encode('utf-8', 'surrogateescape'), base.entry)).change
    left_out: dict[str, str] = {}
    changed = False
    for number in range(repeats):
      run = _as_expected(self.run(instance, gold, instance.ids), instance, trusted, base)
      if run.ending != 'exited':
        return Measured(usable=False, detail=f'the run with the gold patch ended with {run.ending}: {run.detail}{_told(run.log)}')
      changed |= bool(run.wrong)
      for test in instance.ids:
        if run.outcomes[test] != 'passed' and left_out.get(test) != 'flaky':
          left_out[test] = f'{run.outcomes[test]} with the gold patch' if number == 0 or test in left_out else 'flaky'
        elif run.outcomes[test] == 'passed' and test in left_out:
          left_out[test] = 'flaky'
    without = self.run(instance, trusted.lay({}).change, instance.ids)
    for test in instance.fail_to_pass:
      if without.outcomes.get(test) == 'passed' and test not in left_out:
        left_out[test] = 'passes without a patch'
    usable = any(test not in left_out for test in instance.fail_to_pass)
    detail = '' if usable else f'no test of FAIL_TO_PASS tells the gold patch from none{_told(run.log)}'
    return Measured(left_out, usable, detail, changed)


def _told(log: str) -> str:
  """The last error that a log tells of."""
  errors = [line.strip() for line in log.split('\n') if re.search(r'\b[A-Z]\w*Error\b', line)]
  return f'; the last error in its log: {errors[-1][:300]}' if errors else ''


def _as_expected(run: Run, instance: Instance, trusted: Trusted, base: repository.Base) -> Run:
  """A failure that was expected passes, as in logs, where the trusted file of the test speaks of such; else it is a failure."""
  read = lambda path: trusted.files[path] if path in trusted.files else base.entry(path)
  result = dict(run.outcomes)
  for test in [t for t, outcome in result.items() if outcome == 'xfailed']:
    place = locate(instance, trusted, read, test)
    entry = read(place[0]) if place is not None else None
    expected = entry is not None and (b'xfail' in entry.data or b'expectedFailure' in entry.data)
    result[test] = 'passed' if expected else 'failed'
  return dataclasses.replace(run, outcomes=result)


def _holds_tests(path: str, ids: Sequence[str]) -> bool:
  """Whether pytest is to be given a file: one with listed ids, or, where no id names a file, any Python file."""
  return any(test.startswith(path + '::') for test in ids) or not any('::' in test for test in ids) and path.endswith('.py')


def command_of(instance: Instance, files: Sequence[str], ids: Sequence[str]) -> str:
  """The shell command of the runner 'command', filled in."""
  python = [f for f in files if f.endswith('.py')]
  modules = [f.removesuffix('.py').removeprefix('tests/').replace('/', '.') for f in python]
  words = {'files': python, 'modules': modules, 'ids': list(ids)}
  command = instance.test_command
  for name, values in words.items():
    command = command.replace('{' + name + '}', ' '.join(map(shlex.quote, values)))
  return command


def _read(result: sandbox.Result, nonce: str, instance: Instance, ids: Sequence[str]) -> Run:
  """What the controller in the box has answered."""
  try:
    answer = json.loads(result.stdout[result.stdout.rindex(b'\n') + 1:])
    if not secrets.compare_digest(str(answer['nonce']).encode(), nonce.encode()):
      raise ValueError('the nonce is another one')
    reports, ending, log = list(answer['reports']), str(answer['ending']), str(answer['log'])
    wrong = [str(w) for w in answer['wrong']]
  except (ValueError, KeyError, TypeError, RecursionError):
    if result.ending in ('time', 'exited', 'killed', 'memory', 'processes', 'output'):
      reason = 'time' if result.ending == 'time' else 'no_result'
      return Run(reason, {}, (), result.stderr.decode('utf-8', 'replace')[-20_000:], f'the run was ended: {result.ending}')
    raise
  for report in reports:
    if isinstance(report, dict) and report.get('changed'):
      wrong.append('functions of the runner were exchanged: ' + ', '.join(map(str, report['changed'][:5])))
  detail = {'time': 'the tests took too long', 'without an end': 'the test process left before its end'}.get(ending, '')
  ending = {'exited': 'exited', 'time': 'time'}.get(ending, 'no_result')
  return Run(ending, outcomes(reports, ids, pytest=instance.runner == 'pytest'), tuple(dict.fromkeys(wrong)), log, detail)


def outcomes(reports: Iterable[Any], ids: Sequence[str], *, pytest: bool) -> dict[str, str]:
  """What became of each listed test: passed where all that was reported of it says so."""
  found: dict[str, list[Mapping[str, Any]]] = collections.defaultdict(list)
  for report in reports:
    if isinstance(report, dict) and isinstance(report.get('id'), str):
      names = {report['id']}
      for name in (*[n for n in report.get('names', ()) if isinstance(n, str)], report['id']):
        names |= {name} if pytest else {name, runner_script.dotted(name), name.split('\n')[-1]}
      for name in names:
        found[name].append(report)
  shortened: dict[str, list[Mapping[str, Any]]] = collections.defaultdict(list)
  if pytest:
    for name, values in found.items():
      for short in runner_script.names_in_lists(name) - {name} if name.strip() else ():
        shortened[short] += values
  result = {}
  for test in ids:
    values = found.get(test) or (shortened.get(test) if pytest else found.get(runner_script.dotted(test))) or []
    result[test] = _outcome(values, pytest) if values else 'missing'
  return result


def _outcome(values: Sequence[Mapping[str, Any]], pytest: bool) -> str:
  phases: set[tuple[str, str]] = set()
  expected = False
  for v in values:
    raised, xfail = bool(v.get('raised')), bool(v.get('xfail'))
    failed_as_expected = xfail and raised and v.get('outcome') == 'skipped'
    if not failed_as_expected and (v.get('outcome') != 'passed' or raised or xfail):
      return 'failed'
    expected |= failed_as_expected
    phases.add((v['id'], str(v.get('when'))))
  if pytest and not all((v['id'], when) in phases for v in values for when in ('setup', 'call', 'teardown')):
    complete = expected and all((v['id'], when) in phases for v in values for when in ('setup', 'teardown'))
    return 'xfailed' if complete else 'failed'  # One that is expected to fail may not have been called.
  return 'xfailed' if expected else 'passed'


def locate(instance: Instance, trusted: Trusted, read: Any, test: str) -> tuple[str, tuple[str, ...]] | None:
  """(file, names) of a test's source."""
  if '::' in test:
    path, *names = test.split('[', 1)[0].split('::')
    return (path, tuple(names)) if names and all(n.isidentifier() for n in names) else None
  parts = runner_script.dotted(test).split('.')
  if not all(part.isidentifier() for part in parts):
    return _described(trusted, read, test)
  if len(parts) == 1:
    holders = [f for f in trusted.test_files if (entry := read(f)) and b'def %s(' % test.encode() in entry.data]
    return (holders[0], (test,)) if len(holders) == 1 else None
  for size in range(len(parts) - 1, 0, -1):
    module = '/'.join(parts[:size]) + '.py'
    for root in (*trusted.roots, 'tests'):
      path = module if root == '.' else f'{root}/{module}'
      if path in trusted.test_files or read(path) is not None:
        return path, tuple(parts[size:])
  return None


def _described(trusted: Trusted, read: Any, test: str) -> tuple[str, tuple[str, ...]] | None:
  """The only test whose description begins with the line `test`: how logs of unittest call it."""
  found = []
  for path in trusted.test_files:
    entry = read(path)
    try:
      module = controls.parse(entry.data) if entry is not None and path.endswith('.py') else ast.Module([], [])
    except (SyntaxError, ValueError, RecursionError, MemoryError):
      continue
    for holder in (n for n in module.body if isinstance(n, ast.ClassDef)):
      for node in (n for n in holder.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))):
        if (ast.get_docstring(node) or '').split('\n')[0].strip() == test.strip():
          found.append((path, (holder.name, node.name)))
  return found[0] if len(found) == 1 else None
