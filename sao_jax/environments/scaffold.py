"""Any agent program that speaks OpenAI's chat completions, unchanged, as an environment.

    environments.make('scaffold', command=['python', 'agent.py', '{task_file}'], source='tasks.jsonl', grade='my_package.grading:grade')

An episode starts the program in a working folder of its own, with the address of the gateway and a key in its environment, and plays the
policy for it: each of its requests is an observation, each turn of the policy the answer. It ends with the program, and is graded then.

    the program       ends or hangs before its first request   the environment failed: tried again, then dropped
                      fails or hangs later                     graded as it stands, with the metric `scaffold_failed`
    its requests      go on with the conversation              new messages are appended to the tokens that were sampled
                      show another history, or other tools     a new segment of the rollout begins
                      are repeats of one not answered yet      the recorded answer, nothing is sampled
    the conversation  does not fit any more                    with task.compact_room the program is told so, as OpenAI does
                                                               (`context_length_exceeded`), and may shorten it; else the rollout is cut

Isolation: none by default: the program runs as a process of this host, with its files and its network, and may do what this user may. It
gets none of the trainer's environment variables but PATH and the locale, a home and a temporary folder of its own, and everything that it
has started is ended with it. With network='gateway' it runs in a network namespace of its own, where there is nothing but the gateway.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading
from typing import Any, Mapping, Sequence

from sao_jax import data_sources, gateway
from sao_jax.environments import base, scaffold_grading
from sao_jax.environments.scaffold_grading import Grade, Outcome
from sao_jax.environments.scaffold_process import Command, Process, ScaffoldFailure, check_command, fill, watch
from sao_jax.tool_calls import FORMATS, ToolCall, ToolCallError


NAMESPACE = ('unshare', '--user', '--map-current-user', '--net', '--keep-caps')
FORWARD = str(pathlib.Path(gateway.__file__).with_name('forward.py'))


@functools.cache
def check_namespaces() -> None:
  """Raises ValueError where this host gives no network namespace."""
  try:
    done = subprocess.run([*NAMESPACE, 'true'], capture_output=True, text=True, timeout=20, check=False)
    reason = done.stderr.strip() if done.returncode else ''
  except (OSError, subprocess.TimeoutExpired) as error:
    reason = str(error)
  if reason:
    raise ValueError(f"network='gateway' needs network namespaces, and this host gives none ({reason}); use network='host'.")


class SharedGateway:
  """The gateway of this process: one for all scaffolds with the same settings, there while one of them is."""

  def __init__(self):
    self._lock = threading.Lock()
    self._gateways: dict[gateway.GatewaySettings, tuple[gateway.Gateway, int]] = {}
    self._folders: dict[gateway.GatewaySettings, str] = {}  # Of their unix sockets.

  def take(self, settings: gateway.GatewaySettings) -> gateway.Gateway:
    with self._lock:
      server, users = self._gateways.get(settings, (None, 0))
      if server is None:
        folder = tempfile.mkdtemp(prefix='sao_gateway_')
        watch.tell(folder, folder)
        try:
          server = gateway.Gateway(settings, unix_socket=pathlib.Path(folder) / 'socket').start()
        except BaseException:
          shutil.rmtree(folder, ignore_errors=True)
          watch.tell(folder)
          raise
        self._folders[settings] = folder
      self._gateways[settings] = (server, users + 1)
      return server

  def give_back(self, settings: gateway.GatewaySettings) -> None:
    with self._lock:
      server, users = self._gateways.pop(settings)
      if users > 1:
        self._gateways[settings] = (server, users - 1)
        return
      folder = self._folders.pop(settings)
    try:
      server.close()
    finally:
      shutil.rmtree(folder, ignore_errors=True)
      watch.tell(folder)


_shared = SharedGateway()


class Scaffold(base.Environment):
  """The environment of the module's docstring.

  Args:
    command: a text for the shell or a list of arguments. {task_file}, {folder}, {base_url}, {key} and the text and number fields of the
      task that are not hidden are filled in.
    source: tasks, a source of `data_sources` or {'train': ..., 'test': ...}; every row is a task.
    grade, grade_command, result_file: exactly one says what the work is worth: 'module:function', called with an `Outcome`; a command whose
      last line is the grade; a JSON file that the program leaves in its working folder, for programs whose result the policy cannot write.
      A grade is a number, or {'reward': r, 'success': s}.
    hidden: fields of a task that only the grader sees.
    stdin: what the program reads there, with fields filled in as {name}.
    workspace: folder whose content the working folder starts with; fields are filled in.
    variables: added to the program's environment.
    network: 'host', or 'gateway' for a program that reaches nothing but the gateway (Linux, where user namespaces are allowed).
    tool_format: how calls in turns that others wrote (examples in a prompt) are shown to the policy.
    idle_limit_s: longest time between two requests, and from the last one to the end; must be below task.step_timeout_s.
    grade_timeout_s: of the grading command.
    file_mb: largest file that the program may write.
    requests_per_s, max_request_mb: limits of its requests.
    test_share: share of the tasks in the test split where `source` does not say.
    keep_folders: folder where working folders are kept, to look at; '' for none.
  """

  name = 'scaffold'
  conversation = 'chat'
  takes_cut_turns = True
  wants_tokens = True
  metric_names = ('success', 'requests', 'repeated', 'restarts', 'malformed', 'overridden', 'scaffold_failed')

  def __init__(
      self, *, command: Command, source: Any, grade: str = '', grade_command: Command | str = '', result_file: str = '',
      hidden: Sequence[str] = ('answer',), stdin: str = '', workspace: str = '', variables: Mapping[str, str] | None = None,
      network: str = 'host', tool_format: str = 'hermes', idle_limit_s: float = 50.0, grade_timeout_s: float = 30.0, file_mb: int = 256,
      requests_per_s: float = 50.0, max_request_mb: int = 16, test_share: float = 0.1, keep_folders: str = '',
  ):
    self._command = check_command('command', command)
    for name, text in (
        ('grade', grade), ('result_file', result_file), ('stdin', stdin), ('workspace', workspace), ('keep_folders', keep_folders)):
      if not isinstance(text, str) or '\0' in text:
        raise ValueError(f'{name} must be a text without zero bytes, got {text!r}.')
    if not isinstance(hidden, (list, tuple, set, frozenset)) or not all(isinstance(field, str) for field in hidden):
      raise ValueError(f'hidden must be a list of names of fields, got {hidden!r}.')  # The letters of a text would hide nothing.
    if sum(map(bool, (grade, grade_command, result_file))) != 1:
      raise ValueError('Give exactly one of grade, grade_command and result_file: what is the work worth?')
    self._function = scaffold_grading.function_of(grade) if grade else None
    self._grade_command = check_command('grade_command', grade_command) if grade_command else ''
    if result_file and (pathlib.PurePath(result_file).is_absolute() or '..' in pathlib.PurePath(result_file).parts):
      raise ValueError(f'result_file must be a path inside of the working folder, got {result_file!r}.')
    if network not in ('host', 'gateway'):
      raise ValueError(f"network must be 'host' or 'gateway', got {network!r}.")
    if network == 'gateway':
      check_namespaces()
    if tool_format not in FORMATS:
      raise ValueError(f'tool_format must be one of {", ".join(FORMATS)}, got {tool_format!r}.')
    for name, value, low, high in (
        ('idle_limit_s', idle_limit_s, 0.01, 1e6), ('grade_timeout_s', grade_timeout_s, 0.01, 1e6), ('file_mb', file_mb, 1, 1 << 20),
        ('requests_per_s', requests_per_s, 0.01, 1e6), ('max_request_mb', max_request_mb, 1, 1024),
        ('test_share', test_share, 0.001, 0.999)):
      base.check_range(name, value, low, high)
    if not isinstance(variables or {}, Mapping):
      raise ValueError(f'variables must map names to texts, got {variables!r}.')
    self._variables = dict(variables or {})
    if not all(isinstance(k, str) and isinstance(v, str) and k and '=' not in k and '\0' not in k + v for k, v in self._variables.items()):
      raise ValueError('variables must map names without "=" to texts without zero bytes.')
    self._result_file, self._hidden, self._stdin, self._workspace = result_file, frozenset(hidden), stdin, workspace
    self._network, self._tool_format = network, tool_format
    self._idle_s, self._grade_s, self._file_mb = idle_limit_s, grade_timeout_s, file_mb
    self._settings = gateway.GatewaySettings(
        requests_per_s=requests_per_s, burst=max(1, int(2 * requests_per_s)), http=gateway.HttpLimits(body_bytes=max_request_mb << 20))
    self._keep, self._rows = keep_folders, _splits(_frozen(source), test_share)
    self._lock = threading.Lock()  # Guards `_episode`, which `close` may end while a call is running.
    self._episode: Episode | None = None
    self._turn: base.SampledTurn | None = None

  # --- Tasks -------------------------------------------------------------------------------------------------------------------

  def task_sets(self, split: str) -> tuple[base.TaskSet, ...]:
    base.check_split(split)
    source, numbers = self._rows[split]
    return (base.TaskSet(source.name, 0, len(numbers), None, f'{source.fingerprint}/{len(numbers)}'),)

  def sample_task(self, index: int, split: str, seed: int) -> base.Task:
    base.check_split(split)
    source, numbers = self._rows[split]
    if not 0 <= index < len(numbers):
      raise ValueError(f'The {split} split has tasks 0 to {len(numbers) - 1}, got {index}.')
    return base.Task(index, split, seed, source[numbers[index]])

  def check_run(self, *, workers: int, sessions: int, step_timeout_s: float) -> None:
    """A call holds its thread while the program thinks."""
    if workers < sessions:
      raise ValueError(
          f'task.workers must be at least sampler.sessions={sessions} for scaffolds, since each holds a thread while it works, got '
          f'{workers}; set task.workers={sessions}.')
    needed = self._idle_s + (self._grade_s if self._grade_command else 0.0)
    if step_timeout_s <= needed:
      raise ValueError(
          f'task.step_timeout_s must be above {needed:g} (idle_limit_s, and grade_timeout_s with a grading command), got '
          f'{step_timeout_s:g}; else a program that hangs is lost in place of being graded.')

  # --- Episodes ----------------------------------------------------------------------------------------------------------------

  def reset(self, task: base.Task) -> base.Observation:
    self.close()
    episode = Episode(self, task)
    with self._lock:
      self._episode = episode
    try:
      episode.start()
      prompt = episode.next()
    except gateway.Ended:
      raise ScaffoldFailure('closed') from None
    except TimeoutError:
      raise ScaffoldFailure(f'The scaffold asked for nothing within idle_limit_s={self._idle_s:g}: {episode.process.tail()}') from None
    if prompt is None:
      raise ScaffoldFailure(
          f'The scaffold ended with status {episode.process.exit_code} before it asked for anything: {episode.process.tail()}')
    return _observation(prompt)

  def sampled(self, turn: base.SampledTurn) -> None:
    self._turn = turn

  def step(self, action: str) -> base.StepResult:
    return self._answered((), action)

  def step_calls(self, calls: Sequence[ToolCall | ToolCallError], text: str) -> base.StepResult:
    return self._answered(calls, text)

  def _answered(self, calls: Sequence[ToolCall | ToolCallError], text: str) -> base.StepResult:
    episode, turn = self._running(), self._turn
    if turn is None:
      raise RuntimeError('step was called without sampled before it.')
    self._turn = None
    if episode.over:
      return self._finish(episode, hung=episode.hung)
    episode.malformed += any(isinstance(call, ToolCallError) for call in calls)
    try:
      episode.session.answer(gateway.make_answer(turn, calls, text, episode.session.request))
      prompt = episode.next()
    except gateway.Ended:
      raise ScaffoldFailure('closed') from None
    except TimeoutError:
      return self._finish(episode, hung=True)
    if prompt is None:
      return self._finish(episode)
    episode.restarts += prompt.restart
    return base.StepResult(_observation(prompt), metrics=episode.metrics())

  def compact(self, messages: Sequence[Mapping[str, Any]], room: int) -> base.Observation | None:
    """Tells the program that its conversation is too long, and shows what it asks next. None where it ends over this."""
    del messages
    episode = self._running()
    episode.session.refuse(gateway.HttpError(
        400, f'This conversation leaves {max(room, 0)} tokens of the context for the answer. Shorten it.', code='context_length_exceeded',
        param='messages'))
    try:
      prompt = episode.next()
    except gateway.Ended:
      raise ScaffoldFailure('closed') from None
    except TimeoutError:
      prompt, episode.hung = None, True
    if prompt is None:
      episode.over = True  # What is sampled still, if anything is, goes nowhere; then it is graded.
      return None
    episode.restarts += 1
    return _observation(dataclasses.replace(prompt, messages=tuple(episode.session.whole()), restart=True))

  def _running(self) -> 'Episode':
    with self._lock:
      if self._episode is None:
        raise RuntimeError('step was called without a running episode; call reset first.')
      return self._episode

  def _finish(self, episode: 'Episode', hung: bool = False) -> base.StepResult:
    code = None if hung else episode.process.exit_code
    failed = code != 0
    outcome = episode.end(code)
    try:
      grade = self._grade(outcome, episode.private)
      if grade is None:
        grade, failed = Grade(0.0, 0.0), True
    finally:
      self.close()
    metrics = {**episode.metrics(), 'success': grade.success, 'scaffold_failed': float(failed)}
    return base.StepResult(reward=grade.reward, terminated=True, metrics=metrics)

  def _grade(self, outcome: Outcome, private: pathlib.Path) -> Grade | None:
    if self._function is not None:
      return scaffold_grading.by_function(self._function, outcome)
    if self._grade_command:
      return scaffold_grading.by_command(
          self._grade_command, outcome, private=private, timeout_s=self._grade_s, file_mb=self._file_mb)
    return scaffold_grading.by_file(self._result_file, outcome)

  def close(self) -> None:
    with self._lock:
      episode, self._episode = self._episode, None
    if episode is not None:
      episode.close(self._keep)


class Episode:
  """One run of the program: its session, its folders and its process."""

  def __init__(self, environment: Scaffold, task: base.Task):
    self._environment, self._task = environment, task
    self.root: pathlib.Path | None = None
    self.process: Process | None = None
    self.session: gateway.Session | None = None
    self._server: gateway.Gateway | None = None
    self._key = ''
    self._closed, self._lock = False, threading.Lock()
    self.malformed = self.restarts = 0
    self.over = self.hung = False

  def start(self) -> None:
    """Raises ScaffoldFailure where it cannot be started, gateway.Ended where the episode was closed meanwhile."""
    try:
      self._start()
    except BaseException:
      if self._closed and self.root is not None:
        shutil.rmtree(self.root, ignore_errors=True)  # What was copied meanwhile has made it again.
      raise

  def _start(self) -> None:
    e, data = self._environment, dict(self._task.data)
    with self._lock:
      if self._closed:
        raise gateway.Ended
      self.root = pathlib.Path(tempfile.mkdtemp(prefix='sao_scaffold_'))
      self._server = _shared.take(e._settings)
      self.session, self._key = self._server.open(tool_format=e._tool_format)
    shown = {name: value for name, value in data.items() if name not in e._hidden}
    folder, home = self.root / 'work', self.root / 'home'
    try:
      if e._workspace:
        shutil.copytree(_filled(e._workspace, data), folder, symlinks=True)
      else:
        folder.mkdir()
      home.mkdir()
      (self.root / 'task.json').write_text(json.dumps(shown))
    except (OSError, shutil.Error) as error:
      raise ScaffoldFailure(f'The working folder could not be made: {error}') from error
    fields = {**shown, 'task_file': str(self.root / 'task.json'), 'folder': str(folder), 'base_url': self._server.url, 'key': self._key}
    variables = {
        'OPENAI_BASE_URL': self._server.url, 'OPENAI_API_BASE': self._server.url, 'OPENAI_API_KEY': self._key,
        'SAO_TASK_FILE': str(self.root / 'task.json'), 'NO_PROXY': '127.0.0.1,localhost', **e._variables}
    alone = [*NAMESPACE, sys.executable, '-S', FORWARD, str(self._server.unix_socket)] if e._network == 'gateway' else []
    with self._lock:
      if self._closed:
        raise gateway.Ended
      self.process = Process(
          alone + fill(e._command, fields), folder=folder, home=home, output=self.root / 'output', stdin=_filled(e._stdin, shown).encode(),
          variables=variables, file_mb=e._file_mb)

  def next(self) -> gateway.Prompt | None:
    return self.session.next(self._environment._idle_s, self.process.alive)

  @property
  def private(self) -> pathlib.Path:
    """A folder that the program has not seen."""
    path = self.root / 'private'
    path.mkdir(exist_ok=True)
    return path

  def metrics(self) -> dict[str, float]:
    counts = self.session.counts
    return {
        'success': 0.0, 'scaffold_failed': 0.0, 'malformed': float(self.malformed), 'restarts': float(self.restarts),
        **{name: float(counts[name]) for name in ('requests', 'repeated', 'overridden')}}

  def end(self, exit_code: int | None) -> Outcome:
    """Ends the process and the session; what there is to grade."""
    self.process.end()
    self.session.end()
    with contextlib.suppress(FileExistsError):
      (self.root / 'work').mkdir(parents=True, exist_ok=True)  # A program that removed it is graded like any other.
    return Outcome(dict(self._task.data), self.session.transcript(), self.root / 'work', exit_code, self.process.tail())

  def close(self, keep: str) -> None:
    """Ends what is there; also while another thread is in `start` or `next`."""
    with self._lock:
      closed, self._closed = self._closed, True
    if closed or self.root is None:
      return
    if self.process is not None:
      self.process.end()
    try:
      if self.session is not None:
        self.session.end()
        self._server.remove(self._key)
        if keep:
          self._keep(pathlib.Path(keep))
      shutil.rmtree(self.root, ignore_errors=True)
      if self.process is not None:
        self.process.forget()
    finally:
      if self.session is not None:
        _shared.give_back(self._environment._settings)

  def _keep(self, target: pathlib.Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    self.root.mkdir(exist_ok=True)  # Its program may have removed it.
    (self.root / 'transcript.json').write_text(json.dumps(self.session.transcript()))
    shutil.move(self.root, target / f'{self._task.split}-{self._task.index}-{self._task.attempt}-{self.root.name}')


def _observation(prompt: gateway.Prompt) -> base.Observation:
  return base.Observation(
      messages=prompt.messages, restart=prompt.restart, tools=prompt.tools, max_tokens=prompt.max_tokens, stop=prompt.stop)


def _filled(text: str, data: Mapping[str, Any]) -> str:
  return fill([text], data)[0]


def _frozen(source: Any) -> str:
  """The source as a text, so that opened ones can be kept."""
  try:
    return json.dumps(source, default=str, sort_keys=True)
  except (TypeError, ValueError, RecursionError) as error:
    raise ValueError(f'source must be a path or a source of data_sources, got {source!r:.200}: {error}') from error


@functools.lru_cache(maxsize=16)
def _splits(frozen: str, test_share: float) -> dict[str, tuple[data_sources.Source, Sequence[int]]]:
  """Split -> (rows, numbers of those that belong to it)."""
  source = json.loads(frozen)
  if isinstance(source, dict) and set(source) == set(base.SPLITS):
    opened = {split: data_sources.open(part) for split, part in source.items()}
    divided: dict[str, tuple[data_sources.Source, Sequence[int]]] = {split: (rows, range(len(rows))) for split, rows in opened.items()}
  else:
    rows = data_sources.open(source)
    sides: dict[str, list[int]] = {split: [] for split in base.SPLITS}
    for number in range(len(rows)):
      sides[base.split_of(json.dumps(rows[number], sort_keys=True, default=str), test_share)].append(number)
    divided = {split: (rows, numbers) for split, numbers in sides.items()}
  for split, (_, numbers) in divided.items():
    if not len(numbers):
      raise ValueError(f'The source {source!r:.200} has no rows for the {split} split; give one of each split, or change test_share.')
  return divided
