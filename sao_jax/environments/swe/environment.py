"""Repository repair as an environment: a problem, a repository in a sandbox, tools, and hidden tests that give the reward.

Two interfaces:
    'tools'   shell, editor and submit (`tools`); the episode ends with submit, or after `max_turns` turns, with what is there then
    'reply'   one turn: the reply is the new text of the file `target`. In a chat its code block replaces the file; in a raw conversation
              the prompt is the file, and the reply goes on from its end. For small tasks and small models.

The reward is 1 where the judge says 'resolved' (`judge`), else 0. A sandbox or a repository that fails is a failure of the environment.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pathlib
import posixpath
import threading
from typing import Any, Mapping, Sequence

import numpy as np

from sao_jax import sandbox
from sao_jax.environments import base, compaction as compaction_lib
from sao_jax.environments.swe import instances as instances_lib
from sao_jax.environments.swe import patches, repository, small_tasks, tools
from sao_jax.environments.swe.instances import Instance
from sao_jax.environments.swe.judge import Judge, Measured, SandboxFailure, Verdict
from sao_jax.environments.swe.measuring import load_measured
from sao_jax.graders.code_tests import extract_code
from sao_jax.tool_calls import ToolCall, ToolCallError, Turn

INTERFACES = ('tools', 'reply')
MAX_CALLS_A_TURN = 8
SYSTEM = (
    'You repair a software repository. It lies in {root}; you may look at it, change it and run it with the tools. Hidden tests decide '
    'whether the problem is solved. Change the code, not the tests, and call submit when you are done.')
REPLY_SYSTEM = 'Write the whole new text of the file, in one code block.'
METRICS = ('success', 'resolved', 'submitted', 'diff_lines', 'tool_calls', 'errors', 'forged')


class SWE(compaction_lib.Compaction, base.Environment):
  """Instances of a file.

  Args:
    source: JSON lines of instances, or of HumanEval or MBPP items (`items=True`); {'train': file, 'test': file} for one of each split, else
      one file whose instances are divided.
    generated: so many one-line functions (`small_tasks.one_line`) besides those of the source, or alone.
    repositories: folder of repositories, see `instances.load`.
    measured: file that `launch/evaluate.py --benchmark=swe --measure` wrote: tests it found unfit are left out, unusable instances too.
    items: whether the rows are items of HumanEval or MBPP.
    limit: only the first so many instances of each file; 0 for all.
    interface: 'tools' or 'reply'.
    conversation: of the interface 'reply': 'chat' or 'raw'.
    stop_strings: of a raw reply.
    target: file that a reply is the text of.
    system_prompt: system message; None for the usual one, '' for none.
    max_turns: turns after which the repository is taken as it is; `task.max_turns` must be as large.
    compaction: how tools make room where `task.compact_room` asks for it: 'drop' (older outputs), 'summary', or ''; see `compaction`.
    shell_time_s: of one shell command.
    max_output: characters of an observation.
    test_time_s: of one run of the tests.
    memory_mb: of a sandbox.
    controls: control runs, see `controls`.
    backend: of the sandbox.
    warm: sandboxes that are kept ready, for instances without an image.
    judge: whether the tests are run; without them every reward is 0 (the predictions are graded later).
    predictions: folder to which every episode writes what it made; '' for none.
    test_share: share of the instances that belong to the test split, where one file serves both.

  Raises:
    ValueError: a setting or a row that is not as it must be.
  """

  name = 'swe'
  replayable = False
  conversation = 'chat'
  has_demonstrations = True
  metric_names = METRICS

  def __init__(
      self, *, source: Any = '', generated: int = 0, repositories: str = '', measured: str = '', items: bool = False, limit: int = 0,
      interface: str = 'tools', conversation: str = 'chat', stop_strings: Sequence[str] = (), target: str = small_tasks.TARGET,
      system_prompt: str | None = None, max_turns: int = 300, compaction: str = 'drop', shell_time_s: float = 60.0,
      max_output: int = 10_000, test_time_s: float = 900.0, memory_mb: int = 4096, controls: int = 1, backend: str = 'auto', warm: int = 0,
      judge: bool = True, predictions: str = '', test_share: float = 0.1,
  ):
    for name, value, choices in (
        ('interface', interface, INTERFACES), ('conversation', conversation, base.CONVERSATIONS), ('items', items, (False, True)),
        ('judge', judge, (False, True))):
      if value not in choices:
        raise ValueError(f'{name} must be one of {", ".join(map(str, choices))}, got {value!r}.')
    if interface == 'tools' and (conversation != 'chat' or stop_strings):
      raise ValueError("conversation='raw' and stop_strings are for interface='reply'; tools are called in a chat.")
    for name, value, low, high in (
        ('limit', limit, 0, 10**9), ('generated', generated, 0, 10**6), ('max_turns', max_turns, 1, 10_000),
        ('shell_time_s', shell_time_s, 0.1, 86_400.0),
        ('max_output', max_output, 200, 10**7), ('memory_mb', memory_mb, 64, 1 << 20), ('warm', warm, 0, 64),
        ('test_share', test_share, 0.001, 0.999)):
      base.check_range(name, value, low, high)
    compaction_lib.check_way('compaction', compaction)
    self.compaction = compaction if interface == 'tools' else ''  # A reply is one turn.
    self.conversation, self.stop_strings = conversation, tuple(stop_strings)
    self.tools = tools.definitions(shell_time_s) if interface == 'tools' else ()
    self._interface, self._target, self._system = interface, target, system_prompt
    self._max_turns, self._shell_time_s, self._max_output = max_turns, shell_time_s, max_output
    self._judging, self._predictions = judge, predictions
    completion = interface == 'reply' and conversation == 'raw'
    self._splits = _splits(
        _hashable(source, generated), generated, repositories, measured, items, completion, limit, test_share, _stamps(source, measured))
    self._judge = _judge(backend, memory_mb, float(test_time_s), controls)
    self._pool = _pool(backend, memory_mb, warm) if warm else None
    self._lock, self._closed = threading.Lock(), False  # Of the box, which `close` may take away from a call that hangs.
    self._box: sandbox.Box | None = None
    self._instance: Instance | None = None
    self._task: base.Task | None = None

  # --- Tasks -------------------------------------------------------------------------------------------------------------------

  def task_sets(self, split: str) -> tuple[base.TaskSet, ...]:
    base.check_split(split)
    sets, start = [], 0
    for name, part in self._splits[split].parts.items():
      digest = hashlib.sha256(' '.join(i.key for i in part).encode()).hexdigest()[:16]
      sets.append(base.TaskSet(name, start, len(part), None, digest))
      start += len(part)
    return tuple(sets)

  def sample_task(self, index: int, split: str, seed: int) -> base.Task:
    base.check_split(split)
    found = self._splits[split].instances
    if not 0 <= index < len(found):
      raise ValueError(f'The {split} split has tasks 0 to {len(found) - 1}, got {index}.')
    return base.Task(index, split, seed, {'instance_id': found[index].instance_id})

  def _instance_of(self, task: base.Task) -> tuple[Instance, Measured]:
    for split in (task.split, *base.SPLITS):
      found = self._splits[split].by_id.get(task.data['instance_id'])
      if found is not None:
        return found
    raise ValueError(f'There is no instance {task.data["instance_id"]!r} in the source.')

  # --- Episodes ----------------------------------------------------------------------------------------------------------------

  def reset(self, task: base.Task) -> base.Observation:
    self._give_up_box()
    self._task, (self._instance, self._measured) = task, self._instance_of(task)
    self._metrics = dict.fromkeys(METRICS, 0.0)
    self._turns = 0
    self.begin_episode()
    if self._interface == 'reply':
      return self._ask()
    instance = self._instance
    self._judge.populate(self._take_box(instance), instance)
    where = instance.repo_path if instance.image else repository.ROOT
    env = dict(instance.env)
    if not instance.image:  # What the tests can import; in an image the project is installed.
      roots = [posixpath.normpath(posixpath.join(where, root)) for root in self._judge.trusted(instance).roots]
      env.setdefault('PYTHONPATH', ':'.join([*roots, sandbox.PACKAGES]))
    self._toolbox = tools.Toolbox(
        self._box, shell_time_s=self._shell_time_s, max_output=self._max_output, repo_path=where, env=env)
    system = SYSTEM.format(root=where) if self._system is None else self._system
    return base.Observation(messages=(
        *(({'role': 'system', 'content': system},) if system else ()), {'role': 'user', 'content': instance.problem_statement}))

  def _ask(self) -> base.Observation:
    stub = self._stub()
    if self.conversation == 'raw':
      return base.Observation(stub)
    system = REPLY_SYSTEM if self._system is None else self._system
    text = f'{self._instance.problem_statement}\n\n{self._target}:\n```python\n{stub}```'
    return base.Observation(messages=(
        *(({'role': 'system', 'content': system},) if system else ()), {'role': 'user', 'content': text}))

  def _stub(self) -> str:
    entry = self._judge.base(self._instance).entry(self._target)
    if entry is None:
      raise ValueError(f'{self._instance.instance_id} has no file {self._target!r} to be replied to; set target.')
    return entry.data.decode('utf-8', 'replace')

  def step(self, action: str) -> base.StepResult:
    if self._instance is None:
      raise RuntimeError('step was called without a running episode; call reset first.')
    if self.conversation == 'raw':
      for stop in self.stop_strings:
        action = action.split(stop, 1)[0] + stop if stop in action else action
      text: str | None = self._stub() + action
    else:
      text = extract_code(action)
    change = {} if text is None else {self._target: patches.Entry(patches.FILE, text.encode('utf-8', 'replace'))}
    self._metrics['submitted'] = float(text is not None)
    return self._end(change)

  def step_calls(self, calls: Sequence[ToolCall | ToolCallError], text: str) -> base.StepResult:
    if self._instance is None:
      raise RuntimeError('step_calls was called without a running episode; call reset first.')
    self._turns += 1
    if (shorter := self.take_summary(text)) is not None and self._turns < self._max_turns:
      return base.StepResult(shorter, metrics=dict(self._metrics))
    replies = []
    try:
      for call in calls[:MAX_CALLS_A_TURN]:
        if isinstance(call, ToolCall) and call.name == 'submit':
          self._metrics['tool_calls'] += 1
          self._metrics['submitted'] = 1.0
          return self._end(self._extract(self._instance))
        replies.append(('tool', self._answer(call)))
      if not calls:
        self._metrics['errors'] += 1
        replies.append(('user', 'error: call a tool; call submit when the work is done'))
      elif len(calls) > MAX_CALLS_A_TURN:
        replies.append(('tool', f'error: at most {MAX_CALLS_A_TURN} calls a turn, the others were left out'))
      if self._turns >= self._max_turns:
        return self._end(self._extract(self._instance))
    except (sandbox.SandboxError, sandbox.PathError) as error:
      raise SandboxFailure(f'{self._instance.instance_id}: {error}') from error
    messages = tuple({'role': role, 'content': content} for role, content in replies)
    return base.StepResult(base.Observation(messages=messages), metrics=dict(self._metrics))

  def _answer(self, call: ToolCall | ToolCallError) -> str:
    if isinstance(call, ToolCallError):
      self._metrics['errors'] += 1
      return f'error: {call.reason[:400]}'
    self._metrics['tool_calls'] += 1
    answer, well = self._toolbox.call(call.name, call.arguments)
    self._metrics['errors'] += not well
    return answer

  def _extract(self, instance: Instance) -> patches.Change:
    change, left = repository.extract(self._box, self._judge.python(instance), self._judge.base(instance))
    self._metrics['errors'] += len(left)
    return change

  def _end(self, change: patches.Change) -> base.StepResult:
    """Judges what was made, and ends the episode."""
    self._give_up_box()
    instance, self._instance = self._instance, None
    patch = patches.write(change, self._judge.base(instance).entry)
    self._metrics['diff_lines'] = float(sum(
        line[:1] in (b'+', b'-') and line[:4] not in (b'+++ ', b'--- ') for line in patch.split(b'\n')))
    self._write_prediction(instance, patch)
    verdict = self._judge.judge(instance, change, measured=self._measured) if self._judging else Verdict('empty')
    resolved = float(verdict.resolved)
    self._metrics |= {'success': resolved, 'resolved': resolved, 'forged': float(verdict.reason in ('forged', 'tampered'))}
    return base.StepResult(reward=resolved, terminated=True, metrics=dict(self._metrics))

  def _write_prediction(self, instance: Instance, patch: bytes) -> None:
    if self._predictions:
      folder = pathlib.Path(self._predictions)
      folder.mkdir(parents=True, exist_ok=True)
      row = {'instance_id': instance.instance_id, 'model_patch': patch.decode('utf-8', 'surrogateescape')}
      path = folder / f'{instance.instance_id}.json'
      scratch = path.with_name(f'.{path.name}.{os.getpid()}.{threading.get_ident()}')
      scratch.write_text(json.dumps(row), encoding='utf-8')
      scratch.replace(path)

  # --- Boxes -------------------------------------------------------------------------------------------------------------------

  def _take_box(self, instance: Instance) -> sandbox.Box:
    """A new box, which is the episode's. Raises SandboxFailure."""
    try:
      pooled = self._pool is not None and not instance.image and not instance.packages
      box = self._pool.take() if pooled else self._judge.open_box(instance)
    except sandbox.SandboxError as error:
      raise SandboxFailure(f'{instance.instance_id}: {error}') from error
    with self._lock:
      closed, self._box = self._closed, box
    if closed:
      self._give_up_box()
      raise SandboxFailure(f'{instance.instance_id}: closed while its box was made')
    return box

  def _give_up_box(self) -> None:
    with self._lock:
      box, self._box = self._box, None
    if box is not None:
      if self._pool is not None:
        self._pool.give_back(box)
      else:
        box.close()

  def close(self) -> None:
    with self._lock:
      self._closed = True
    instance = self._instance
    if self._predictions and instance is not None and self._box is not None:
      self._write_cut(instance)
    self._give_up_box()

  def _write_cut(self, instance: Instance) -> None:
    """The prediction of an episode that a limit outside of the environment has cut: what is there."""
    try:
      change = self._extract(instance)
    except (sandbox.SandboxError, sandbox.PathError):
      return  # A box that has failed holds nothing to be written.
    self._write_prediction(instance, patches.write(change, self._judge.base(instance).entry))

  # --- Demonstrations ----------------------------------------------------------------------------------------------------------

  def demonstration(self, task: base.Task, rng: np.random.Generator) -> list[str | Turn]:
    """The gold patch, by the editor or as a reply."""
    del rng
    instance, _ = self._instance_of(task)
    tree = self._judge.base(instance).entry
    change = patches.apply(instance.patch.encode('utf-8', 'surrogateescape'), tree)
    if self._interface == 'tools':
      return demonstrated(change, tree)
    entry = change.get(self._target)
    if entry is None:
      raise ValueError(f'The gold patch of {instance.instance_id} leaves {self._target!r} as it is or deletes it; nothing to demonstrate.')
    text, stub = entry.data.decode('utf-8', 'replace'), (tree(self._target) or patches.Entry(patches.FILE, b'')).data.decode()
    if self.conversation == 'chat':
      return [f'```python\n{text}```']
    if not text.startswith(stub):
      raise ValueError(f'The gold patch of {instance.instance_id} does not go on from the end of {self._target!r}; use a chat.')
    return [text[len(stub):]]


def demonstrated(change: Mapping[str, patches.Entry | None], tree: Any) -> list[Turn]:
  """Turns that make a change with the tools, and submit."""
  turns = []
  for path in sorted(change):
    before, after = tree(path), change[path]
    try:
      old = before.data.decode('utf-8') if before is not None and before.mode != patches.LINK else None
      new = after.data.decode('utf-8') if after is not None and after.mode in (patches.FILE, patches.EXECUTABLE) else None
    except UnicodeDecodeError:
      raise ValueError(f'{path} is no text; its change cannot be demonstrated.') from None
    quoted = "'" + posixpath.join(repository.ROOT, path).replace("'", "'\\''") + "'"
    if after is None:
      turns.append(Turn(calls=(('shell', {'command': f'rm {quoted}'}),)))
    elif new is None:
      raise ValueError(f'{path} is a link or a submodule; its change cannot be demonstrated.')
    elif old is None:
      turns.append(Turn(calls=(('editor', {'command': 'create', 'path': path, 'file_text': new}),)))
    elif old != new:
      turns += [Turn(calls=(('editor', {'command': 'str_replace', 'path': path, 'old_str': a, 'new_str': b}),)) for a, b in steps(old, new)]
    if after is not None and after.mode == patches.EXECUTABLE and (before is None or before.mode != after.mode):
      turns.append(Turn(calls=(('shell', {'command': f'chmod +x {quoted}'}),)))
  return [*turns, Turn(calls=(('submit', {}),))]


def steps(old: str, new: str) -> list[tuple[str, str]]:
  """Replacements, each of a text that stands once in what the earlier ones have made, that lead from one text to the other."""
  import difflib

  a, b = old.splitlines(keepends=True), new.splitlines(keepends=True)
  found = []
  done: list[str] = []  # Lines of the result so far; the rest is `a[at:]`.
  blocks = [op for op in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes() if op[0] != 'equal']
  at = 0
  for _, i, j, k, l in blocks:
    done += a[at:i]
    current = ''.join(done + a[i:])
    before = after = 0
    while True:
      piece = ''.join(done[len(done) - before:] + a[i:j + after])
      start = len(''.join(done[:len(done) - before]))
      if piece and current.find(piece) == start and current.find(piece, start + 1) < 0:
        break
      if before >= len(done) and j + after >= len(a):
        break
      before, after = min(before + 1, len(done)), min(after + 1, len(a) - j)
    if not piece:
      return [*found]  # An empty file: nothing to hold on to; `create` would be used.
    found.append((piece, ''.join(done[len(done) - before:] + b[k:l] + a[j:j + after])))
    done += b[k:l]
    at = j
  return found


# --- Shared in a process ---------------------------------------------------------------------------------------------------------


class _Split:

  def __init__(self, parts: Mapping[str, Sequence[Instance]], measured: Mapping[str, Measured]):
    fit = lambda found: [i for i in found if measured.get(i.instance_id, Measured()).usable]
    self.parts = {name: part for name, found in parts.items() if (part := fit(found))}
    usable = [i for part in self.parts.values() for i in part]
    self.instances = tuple(usable)
    self.by_id = {i.instance_id: (i, measured.get(i.instance_id, Measured())) for i in usable}


def _hashable(source: Any, generated: int) -> Any:
  if source == '' and generated:
    return ''
  if isinstance(source, Mapping):
    if set(source) != set(base.SPLITS):
      raise ValueError(f"source must be a file, or {{'train': file, 'test': file}}, got {dict(source)!r:.200}.")
    return tuple(sorted((k, str(v)) for k, v in source.items()))
  if not isinstance(source, (str, os.PathLike)) or not str(source):
    raise ValueError(f'source must be a file, got {source!r:.200}.')
  return str(source)


def _stamps(source: Any, measured: str) -> tuple[tuple[int, int], ...]:
  """Times and sizes of the files."""
  paths = [*(source.values() if isinstance(source, Mapping) else [source] if source else []), *([measured] if measured else [])]
  found = []
  for path in paths:
    if not os.path.isfile(path):
      raise ValueError(f'There is no file {str(path)!r}; it must hold the instances (or what was measured of them).')
    found.append((os.stat(path).st_mtime_ns, os.stat(path).st_size))
  return tuple(found)


@functools.lru_cache(maxsize=16)
def _splits(
    source: Any, generated: int, repositories: str, measured: str, items: bool, completion: bool, limit: int, test_share: float,
    stamps: Any,
) -> dict[str, _Split]:
  """The instances of both splits; `stamps` tell the files from what stood in them before."""
  del stamps
  known = load_measured(measured) if measured else {}
  read = lambda path: _read(path, repositories, items, completion, limit)
  sides = lambda rows: {split: [i for i in rows if base.split_of(i.instance_id, test_share) == split] for split in base.SPLITS}
  if isinstance(source, tuple):
    found = {split: read(path) for split, path in source}
  else:
    rows = read(source) if source else []
    found = {split: rows for split in base.SPLITS} if len(rows) == 1 else sides(rows)  # A single one is tried on in both.
  made = sides([instances_lib.parse(small_tasks.one_line(n), f'generated {n}') for n in range(generated)])
  splits = {split: _Split({'source': found[split], 'generated': made[split]}, known) for split in base.SPLITS}
  for split in base.SPLITS:
    if not splits[split].instances:
      raise ValueError(
          f'The source {source!r:.200} has no usable instances for the {split} split; give one file of each, or change test_share.')
  return splits


def _read(path: str, repositories: str, items: bool, completion: bool, limit: int) -> list[Instance]:
  if not items:
    return instances_lib.load(path, repositories=repositories, limit=limit or None)
  found = []
  for number, line in enumerate(pathlib.Path(path).read_text(encoding='utf-8').split('\n'), start=1):
    if line.strip() and (not limit or len(found) < limit):
      where = f'{path}, line {number}'
      try:
        row = small_tasks.row(json.loads(line), completion=completion)
      except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f'{where}: {error}.') from None
      found.append(instances_lib.parse(row, where))
  return found


@functools.lru_cache(maxsize=16)
def _judge(backend: str, memory_mb: int, time_s: float, controls: int) -> Judge:
  return Judge(backend=backend, limits=_limits(memory_mb), time_s=time_s, controls=controls)


def _limits(memory_mb: int) -> sandbox.Limits:
  import dataclasses

  return dataclasses.replace(Judge.LIMITS, memory_mb=memory_mb, address_mb=8 * memory_mb)


@functools.lru_cache(maxsize=4)
def _pool(backend: str, memory_mb: int, warm: int) -> sandbox.Pool:
  limits = _limits(memory_mb)
  return sandbox.Pool(lambda: sandbox.open(backend, limits=limits, packages=backend != 'plain'), warm)
