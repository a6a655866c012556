"""A benchmark run on one policy: several samples of every problem, graded and written problem by problem.

    OUTPUT/settings.json    what decides the result; a run with other settings is refused
    OUTPUT/problems.jsonl   one line as each problem ends: its samples with verdicts, answers read, lengths and texts
    OUTPUT/summary.json     all numbers, when the last problem has ended

A run that was killed goes on with the problems that have no line yet. The noise of a sample is a function of (seed, problem, sample) alone,
so the result is the same as without the kill, to the round-off of another batch composition.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import math
import os
import pathlib
import time
from typing import Any, Callable, Iterator, Mapping, Sequence
import zlib


from sao_jax import benchmark_scores, benchmarks, config as settings_lib, environments, evaluate_run, report
from sao_jax.benchmark_scores import Sample
from sao_jax.benchmarks import Benchmark, Problem
from sao_jax.clock import InlineCalls
from sao_jax.config import Config, ModelConfig
from sao_jax.environments import python_tool
from sao_jax.environments.base import Task
from sao_jax.evaluation import ListFlow, run_list
from sao_jax.graders import Grader
from sao_jax.models import conversation, files, pretrained, tokenizers
from sao_jax.parts import Parts
from sao_jax.rollouts import FailureShare
from sao_jax.types import ParamSnapshot, Params, Rollout
from sao_jax.workers import EnvironmentPool

MAX_TURNS = {'ask': 1, benchmarks.PYTHON_TOOL: 50}
MOST_SAMPLES, MOST_TOKENS = 10_000, 1 << 24
FOREVER_S = 7 * 24 * 3600.0  # A long reply on a slow machine is no failure.


@dataclasses.dataclass(frozen=True)
class Request:
  """What to run.

  Attributes:
    num_samples: per problem.
    temperature: of the sampling; 0 for greedy, which has one sample.
    max_tokens: longest reply (with tools: longest turn, and half of the room for all turns).
    limit: only the first so many problems.
    python_tool: let the policy run Python, in the environment of that name.
  """

  num_samples: int
  temperature: float
  max_tokens: int
  limit: int | None = None
  python_tool: bool = False

  def __post_init__(self):
    for name, most in (('num_samples', MOST_SAMPLES), ('max_tokens', MOST_TOKENS)):
      if not 1 <= getattr(self, name) <= most:
        raise ValueError(f'{name} must be from 1 to {most}, got {getattr(self, name)}.')
    if not 0 <= self.temperature < math.inf:
      raise ValueError(f'temperature must be a number of at least 0, got {self.temperature}.')
    if self.temperature == 0 and self.num_samples > 1:
      raise ValueError(f'At temperature 0 all samples of a problem are the same: use num_samples=1, got {self.num_samples}.')
    if self.python_tool and benchmarks.PYTHON_TOOL not in environments.REGISTRY:
      raise ValueError(
          f'The python tool needs an environment named {benchmarks.PYTHON_TOOL!r}, and there is none in this version '
          f'(there are: {", ".join(sorted(environments.REGISTRY))}). Evaluate without it.')

  @property
  def room(self) -> int:
    """Tokens that a sample may add to its prompt."""
    return self.max_tokens * (2 if self.python_tool else 1)

  @property
  def tools(self) -> tuple[Mapping[str, Any], ...]:
    """What the prompt of a chat tells of."""
    return (python_tool.TOOL,) if self.python_tool else ()

  @property
  def environment(self) -> str:
    return benchmarks.PYTHON_TOOL if self.python_tool else 'ask'


def evaluate_benchmark(
    config: Config, benchmark: Benchmark, path: str | os.PathLike[str], request: Request, *,
    workdir: str | os.PathLike[str] | None, step: int | None, output: str | os.PathLike[str] | None, grader: Grader,
) -> dict[str, Any]:
  """Runs a benchmark, or the rest of it.

  Args:
    config: settings of the model and the sampler.
    benchmark: which, from `benchmarks.make`.
    path: file with its rows.
    request: how many samples, and how they are drawn.
    workdir: folder of a run whose checkpoint is evaluated; it is only read. None for the weights that `config` names (pretrained, random).
    step: number of the checkpoint; None for the newest.
    output: folder for what is written; None for 'runs/evaluations/NAME-HASH', with a hash of the settings.
    grader: of the replies.

  Returns:
    The settings that decide the result, the numbers of `benchmark_scores.score`, and 'output'. JSON-able.

  Raises:
    ValueError: a bad row, no such checkpoint, settings that do not fit, or an output folder of an evaluation with other settings.
    OSError: a file that cannot be read or written.
    RuntimeError: too many samples were lost to failures.
  """
  problems, fingerprint = benchmarks.load(benchmark, path, limit=request.limit)
  if workdir is not None:
    step = evaluate_run.checkpoint_step(pathlib.Path(workdir), step)
  model = pretrained.resolve_config(config.model)
  tokenizer = tokenizers.make(model)
  kind = 'chat' if tokenizer.chat_template else 'raw'
  settings = {
      'benchmark': benchmark.name, 'data': fingerprint, 'problems': len(problems), 'prompt': benchmark.prompt, 'system': benchmark.system,
      'grader': {'name': benchmark.grader, **benchmark.grader_settings}, **dataclasses.asdict(request), 'top_p': config.sampler.top_p,
      'top_k': config.sampler.top_k, 'seed': config.evaluation.seed, 'conversation': kind, 'template': dict(config.task.template),
      'policy': _policy_identity(config, workdir, step), 'model': dataclasses.asdict(model), 'dtype': config.sampler.dtype}
  settings = json.loads(json.dumps(report.plain(settings)))
  del settings['limit']  # Said by the number of problems.
  folder = pathlib.Path(output) if output is not None else _default_output(benchmark.name, settings)
  with ProblemLog(folder, settings, problems) as log:
    todo = [p for p in problems if p.index not in log.rows]
    if todo:
      form = conversation.make(tokenizer, kind, config.task.template)
      lengths = [_prompt_length(form, kind, p, request.tools) for p in problems]
      longest = max(lengths)
      needed = longest + request.room + 1  # One more, so that the limit of a reply is met first.
      context = _context(model, workdir, needed)
      if min(lengths) >= context:
        raise ValueError(f'No problem fits: the shortest prompt has {min(lengths)} tokens, and the model takes {context} with the reply.')
      fitted = _fitted(config, context, request, kind, longest, needed)
      with evaluate_run.opened(fitted, workdir) as parts:
        _, policy = evaluate_run.policy_of(parts, step)
        sample_problems(parts, policy, todo, request, grader, name=benchmark.name, done=len(log.rows), on_problem=log.write)
    numbers = benchmark_scores.score(
        [log.samples(p.index) for p in problems], num_samples=request.num_samples, majority_vote=benchmark.majority_vote,
        seed=config.evaluation.seed)
    if not numbers['graded']:
      raise RuntimeError(
          f'All {numbers["samples"]} samples were lost: {_told(log.rows)}. Mend what failed, delete {folder}, and evaluate again.')
    found = {**settings, **numbers, 'output': str(folder)}
    report.write_json(folder / 'summary.json', found)
  return found


def _told(rows: Mapping[int, Mapping[str, Any]]) -> str:
  """Verdicts with their number, and the reason of the last sample that has one."""
  samples = [s for row in rows.values() for s in row['samples']]
  counts = ', '.join(f'{verdict} {count}' for verdict, count in collections.Counter(s['verdict'] for s in samples).items())
  reasons = [s['reason'] for s in samples if s.get('reason')]
  return f'{counts}; the last one: {reasons[-1]}' if reasons else counts


def _policy_identity(config: Config, workdir: str | os.PathLike[str] | None, step: int | None) -> dict[str, Any]:
  """What tells this policy from others, without reading all of its weights."""
  if workdir is not None:
    sums = pathlib.Path(workdir) / 'checkpoints' / str(step) / 'checksums.json'
    return {'checkpoint': step, 'crc': zlib.crc32(sums.read_bytes())}
  if not config.model.pretrained:
    return {'random': config.seed}
  path = files.locate(config.model.pretrained)
  weights = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.suffix in ('.safetensors', '.gguf', '.json'))
  crc = 0
  for file in weights:
    with open(file, 'rb') as stream:
      crc = zlib.crc32(stream.read(1 << 20), zlib.crc32(f'{file.name} {file.stat().st_size}'.encode(), crc))
  return {'pretrained': config.model.pretrained, 'crc': crc}


def _default_output(name: str, settings: Mapping[str, Any]) -> pathlib.Path:
  digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
  return pathlib.Path('runs') / 'evaluations' / f'{name}-{digest[:8]}'


def _prompt_length(form: conversation.Conversation, kind: str, problem: Problem, tools: Sequence[Mapping[str, Any]]) -> int:
  messages = list(problem.messages)
  if kind == 'chat':
    return len(form.first(messages, tools))
  return len(form.first('\n\n'.join(m['content'] for m in messages) + '\n\n'))


def _context(model: ModelConfig, workdir: str | os.PathLike[str] | None, needed: int) -> int:
  """Longest sequence of the model. Random weights were made for none, so they take whatever the benchmark needs."""
  return max(model.max_length, needed) if workdir is None and not model.pretrained else model.max_length


def _fitted(config: Config, context: int, request: Request, kind: str, longest: int, needed: int) -> Config:
  """The settings with a task and buckets that fit the benchmark; nothing is trained."""
  total = min(needed, context)
  slots = config.sampler.slots
  prefill = {64, min(512, 1 << max(6, (longest - 1).bit_length()))}
  fitted = dataclasses.replace(
      config,
      model=config.model if config.model.pretrained else dataclasses.replace(config.model, max_length=context),
      task=dataclasses.replace(
          config.task, name=request.environment, settings={'conversation': kind},
          max_turns=MAX_TURNS[request.environment], max_turn_tokens=min(request.max_tokens, total), max_tokens=total,
          time_limit_s=FOREVER_S, compact_room=config.task.compact_room if request.python_tool else 0),
      sampler=dataclasses.replace(
          config.sampler, sessions=max(slots, config.sampler.sessions if request.python_tool else slots), pages=0,
          prefill_lengths=tuple(sorted(prefill)), prefill_rows=tuple(sorted({min(4, slots), min(16, slots)})), cache_lengths=()),
      learner=dataclasses.replace(config.learner, lengths=(total,)),
      sft=dataclasses.replace(config.sft, steps=0), value_pretrain=dataclasses.replace(config.value_pretrain, rollouts=0),
      rl=dataclasses.replace(config.rl, policy_steps=0))
  settings_lib.check(fitted)
  return fitted


# --- Sampling and grading --------------------------------------------------------------------------------------------------------


class GradingFlow(ListFlow):
  """A `ListFlow` that grades every rollout in a thread as it comes and keeps only what came out."""

  def __init__(
      self, prompts: Sequence[tuple[int, Task]], grade: Callable[[Rollout, Task], dict[str, Any]],
      on_sample: Callable[[Task, dict[str, Any]], None], threads: int,
  ):
    super().__init__(prompts)
    self._grade, self._on_sample = grade, on_sample
    self._pool = concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix='grading')
    self._graded: collections.deque[tuple[Task, concurrent.futures.Future[dict[str, Any]]]] = collections.deque()
    self._finished = 0

  @property
  def done(self) -> int:
    return self._finished + self.dropped.total()

  def finish(self, rollout: Rollout, version: int) -> bool:
    del version
    task = self._prompts[rollout.ticket][1]
    self._finished += 1
    self._graded.append((task, self._pool.submit(self._grade, rollout, task)))
    return True

  def drop(self, ticket: int, reason: str, *, prompt: tuple[int, int] | None = None) -> None:
    super().drop(ticket, reason, prompt=prompt)
    self._on_sample(self._prompts[ticket][1], {'verdict': reason})

  def collect(self, *, wait: bool = False) -> None:
    """Hands on what is graded by now; with `wait`, everything."""
    for _ in range(len(self._graded)):
      task, future = self._graded.popleft()
      if wait or future.done():
        self._on_sample(task, future.result())
      else:
        self._graded.append((task, future))

  def close(self) -> None:
    self._pool.shutdown(wait=False, cancel_futures=True)


def sample_problems(
    parts: Parts, policy: Params, problems: Sequence[Problem], request: Request, grader: Grader, *, name: str, done: int,
    on_problem: Callable[[Problem, list[dict[str, Any]]], None],
) -> None:
  """Samples and grades every problem; `on_problem` gets each as its last sample ends, its samples in order.

  Args:
    parts: built for a task that shows `data['messages']`.
    policy: parameters in the learner's layout.
    name: shown with the progress; `done` problems of it were finished before.
  """
  by_index = {p.index: p for p in problems}
  ended: dict[int, dict[int, dict[str, Any]]] = collections.defaultdict(dict)
  failures = FailureShare(parts.config.task.max_failure_share)
  finished = done

  def on_sample(task: Task, sample: dict[str, Any]) -> None:
    nonlocal finished
    failures.add('' if sample['verdict'] in benchmark_scores.GRADED else f'{sample["verdict"]}: {sample.get("reason", "")}')
    samples = ended[task.index]
    samples[task.attempt] = sample
    if len(samples) == request.num_samples:
      on_problem(by_index[task.index], [samples[i] for i in range(request.num_samples)])
      del ended[task.index]
      finished += 1

  prompts = [
      (p.index, Task(p.index, 'test', 0, {'messages': p.messages, 'answer': p.answer, **p.metadata}, attempt=i))
      for p in problems for i in range(request.num_samples)]
  flow = GradingFlow(
      prompts, lambda rollout, task: graded(parts, grader, rollout, by_index[task.index]), on_sample, parts.config.task.workers)
  seed = parts.config.evaluation.seed
  snapshot = ParamSnapshot(0, parts.convert(policy))
  sampler = parts.make_sampler(snapshot, seed=seed)
  sampler.reset(snapshot, seed=seed, temperature=request.temperature)

  def on_progress(sampled: int) -> None:
    flow.collect()
    parts.progress_bar.update(name, done * request.num_samples + sampled, done * request.num_samples + len(prompts))

  with contextlib.closing(flow), _calls(parts, request) as calls:
    run_list(parts.make_engine(sampler, calls, flow, time.monotonic), flow, on_progress=on_progress)
    flow.collect(wait=True)
  assert finished == done + len(problems), f'{finished} of {done + len(problems)} problems were written'


@contextlib.contextmanager
def _calls(parts: Parts, request: Request) -> Iterator[InlineCalls | EnvironmentPool]:
  if not request.python_tool:
    yield InlineCalls()
    return
  with contextlib.closing(EnvironmentPool(parts.config.task.workers, parts.config.task.step_timeout_s)) as pool:
    yield pool


def graded(parts: Parts, grader: Grader, rollout: Rollout, problem: Problem) -> dict[str, Any]:
  """One sample as a plain dictionary. A grader that raises is a lost sample, not a wrong one."""
  last = rollout.action_mask & (rollout.turn == rollout.turn[rollout.action_mask][-1])
  ids = [int(t) for t in rollout.tokens[last]]
  if ids[-1] in parts.conversation.stop_ids:
    ids.pop()
  response = parts.tokenizer.decode(ids)
  sample = {
      'length': rollout.num_actions, 'turns': int(rollout.turn[-1]) + 1, 'truncated': rollout.ending == 'truncated',
      'stop_reason': rollout.stop_reason, 'response': response}
  try:
    grade = grader.grade(response, problem.answer, metadata=problem.metadata)
    return {
        'verdict': str(grade.verdict), 'score': float(grade.score), 'extracted': '' if grade.extracted is None else str(grade.extracted),
        'reason': str(grade.reason or ''), **sample}
  except Exception as error:  # Whatever a grader raises is its own fault; told, counted, and beyond a share the end.
    return {'verdict': 'grader_error', 'reason': f'{type(error).__name__}: {error}', **sample}


# --- What is written -------------------------------------------------------------------------------------------------------------


class ProblemLog:
  """The folder of an evaluation; a context manager that holds it for this process.

  Raises:
    ValueError: another process is at work there, it belongs to an evaluation with other settings, or a line is damaged.
  """

  def __init__(self, folder: pathlib.Path, settings: Mapping[str, Any], problems: Sequence[Problem]):
    self._folder, self._settings = folder, settings
    self._problems = {p.index: p for p in problems}
    self.rows: dict[int, dict[str, Any]] = {}

  def __enter__(self) -> 'ProblemLog':
    try:
      self._folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
      raise ValueError(f'{self._folder} cannot be a folder: it, or what it lies in, is a file; choose another --output.') from None
    for name in ('lock', 'settings.json', 'problems.jsonl', 'summary.json'):
      if (self._folder / name).is_dir():
        raise ValueError(f'{self._folder / name} is a folder, and an evaluation keeps a file of that name there; choose another --output.')
    others = sorted(p.name for p in self._folder.iterdir() if p.name != 'lock' and not p.name.startswith('.settings.json.'))
    if others and 'settings.json' not in others:
      raise ValueError(f'{self._folder} is no folder of an evaluation (it holds {others[0]}); choose another --output.')
    with contextlib.ExitStack() as stack:
      lock = stack.enter_context(open(self._folder / 'lock', 'a'))
      try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError as error:
        raise ValueError(f'Another process is writing to {self._folder}; wait for it or choose another --output.') from error
      self._compare()
      self._read()
      self._file = stack.enter_context(open(self._folder / 'problems.jsonl', 'ab'))
      self._stack = stack.pop_all()
    return self

  def __exit__(self, *exc: Any) -> None:
    self._stack.close()

  def _compare(self) -> None:
    path = self._folder / 'settings.json'
    if path.exists():
      different = settings_lib.differences(report.read_settings(path), self._settings)
      if different:
        raise ValueError(
            f'{self._folder} holds an evaluation with other settings: {"; ".join(different)}. Use the same settings or another --output.')
    else:
      report.write_json(path, self._settings)

  def _read(self) -> None:
    """Takes up the lines that are there; a last one that a kill cut off is removed, one that an editor left without its end is ended."""
    path = self._folder / 'problems.jsonl'
    data = path.read_bytes() if path.exists() else b''
    whole = data[:data.rfind(b'\n') + 1]
    if len(whole) < len(data) and data.endswith(b'}') and _is_json(data[len(whole):]):
      with open(path, 'ab') as file:
        file.write(b'\n')
      whole = data + b'\n'
    elif len(whole) < len(data):
      os.truncate(path, len(whole))
    for number, line in enumerate(whole.split(b'\n')[:-1], start=1):
      try:
        row = self._whole(json.loads(line))
      except (ValueError, RecursionError) as error:
        raise ValueError(f'{path}, line {number} is damaged ({error}); delete that line to sample its problem again.') from error
      self.rows[row['problem']] = row

  def _whole(self, row: Any) -> dict[str, Any]:
    """The row of a problem, checked, so that no number is made of what a disk or an editor left. Raises ValueError."""
    index = row.get('problem') if isinstance(row, dict) else None
    if type(index) is not int or index not in self._problems:
      raise ValueError('it tells of no problem of this evaluation')
    known, samples = self._problems[index], row.get('samples')
    if row.get('id') != known.id or row.get('answer') != known.answer:
      raise ValueError(f'problem {index} has the id {known.id!r} and the answer {known.answer!r:.80} in the file of the benchmark')
    if index in self.rows:
      raise ValueError(f'problem {index} stands in a line before it')
    if not isinstance(samples, list) or len(samples) != self._settings['num_samples'] or not all(map(_is_sample, samples)):
      raise ValueError(f'it must have {self._settings["num_samples"]} samples with verdict and numbers')
    return row

  def write(self, problem: Problem, samples: list[dict[str, Any]]) -> None:
    """Adds the line of a problem; on return it survives a kill and a power failure."""
    verdicts = [s['verdict'] for s in samples]
    row = {
        'problem': problem.index, 'id': problem.id, 'answer': problem.answer, 'right': verdicts.count('right'),
        'graded': sum(v in benchmark_scores.GRADED for v in verdicts), 'samples': samples}
    self._file.write(report.json_line(row))
    self._file.flush()
    os.fsync(self._file.fileno())
    self.rows[problem.index] = json.loads(report.json_line(row))

  def samples(self, index: int) -> list[Sample]:
    """The samples of a problem that is written."""
    return [
        Sample(s['verdict'], s.get('extracted', ''), s.get('length', 0), s.get('truncated', False)) for s in self.rows[index]['samples']]


def _is_json(text: bytes) -> bool:
  try:
    json.loads(text)
  except (ValueError, RecursionError):
    return False
  return True


def _is_sample(value: Any) -> bool:
  """Whether this is a sample as `graded` or a lost one is written."""
  if not isinstance(value, dict) or not isinstance(value.get('verdict'), str):
    return False
  length, truncated = value.get('length', 0), value.get('truncated', False)
  return isinstance(value.get('extracted', ''), str) and type(length) is int and length >= 0 and isinstance(truncated, bool)
