"""SWE-bench as a benchmark: predictions by a policy, or given, and their grading.

    OUTPUT/settings.json                     what decides the result; a run with other settings is refused
    OUTPUT/episodes/INSTANCE.json            what the policy made of an instance, as its episode ends
    OUTPUT/predictions.jsonl                 all predictions in the form of SWE-bench: instance_id, model_name_or_path, model_patch
    OUTPUT/logs/INSTANCE/patch.diff          the prediction
    OUTPUT/logs/INSTANCE/test_output.txt     what the tests printed
    OUTPUT/logs/INSTANCE/report.json         its verdict
    OUTPUT/report.json                       all verdicts in the form of SWE-bench, and the resolved share with its interval

A run that was killed goes on with the instances that have no episode, or no verdict, yet. An instance that was lost to a failing sandbox
has neither, is counted as an error, and is tried again by the same command.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import pathlib
import time
from typing import Any, Callable, Iterator, Mapping, Sequence

from sao_jax import config as settings_lib, report
from sao_jax.config import Config
from sao_jax.environments.base import EnvironmentFailure, Task
from sao_jax.environments.swe import measuring
from sao_jax.environments.swe.instances import Instance, is_writable
from sao_jax.environments.swe.judge import Judge, Measured, Verdict
from sao_jax.evaluation import ListFlow, run_list, wilson_interval

PSEUDO = ('gold', 'empty')
LONGEST = 32768  # Tokens of an episode, unless more are asked for.
Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class Request:
  """What to grade.

  Attributes:
    source: file of the instances; `repositories`: folder of their repositories.
    measured: file of `measure`, or ''.
    test_time_s: of one run of tests.
    controls: control runs of a prediction that passes.
    workers: instances at once.
    limit: only the first so many.
  """

  source: str
  repositories: str = ''
  measured: str = ''
  test_time_s: float = 1800.0
  controls: int = 1
  workers: int = 1
  limit: int | None = None


# --- Predictions -----------------------------------------------------------------------------------------------------------------


def read_predictions(path: str, instances: Sequence[Instance]) -> dict[str, dict[str, str]]:
  """instance_id -> {'model_name_or_path', 'model_patch'}: from a file of SWE-bench's form (JSON lines, a JSON list, or a JSON object by
  instance_id), or made, for 'gold' and 'empty'. Raises ValueError with the place of what is wrong, OSError."""
  if path in PSEUDO:
    return {i.instance_id: {'model_name_or_path': path, 'model_patch': i.patch if path == 'gold' else ''} for i in instances}
  text = pathlib.Path(path).read_text(encoding='utf-8')
  found: dict[str, dict[str, str]] = {}
  for where, row in _rows(text, path):
    if not isinstance(row, Mapping) or not isinstance(row.get('instance_id'), str):
      raise ValueError(f'{where}: a prediction must be an object with instance_id, model_name_or_path and model_patch.')
    patch, name = row.get('model_patch'), row.get('model_name_or_path', 'unknown')
    if patch is not None and not isinstance(patch, str) or not isinstance(name, str):
      raise ValueError(f'{where}: model_patch must be a text or null, and model_name_or_path a text.')
    if not is_writable(patch or ''):
      raise ValueError(f'{where}: model_patch holds half of a surrogate pair.')
    if row['instance_id'] in found:
      raise ValueError(f'{where}: there are two predictions for {row["instance_id"]}.')
    found[row['instance_id']] = {'model_name_or_path': name, 'model_patch': patch or ''}
  unknown = sorted(set(found) - {i.instance_id for i in instances})
  if unknown and len(unknown) == len(found):
    raise ValueError(f'{path} holds no prediction for any instance of the source; the first one is for {unknown[0]!r}.')
  return found


def _rows(text: str, path: str) -> Iterator[tuple[str, Any]]:
  try:
    whole = json.loads(text)
  except (ValueError, RecursionError):
    for number, line in enumerate(text.split('\n'), start=1):
      if line.strip():
        try:
          yield f'{path}, line {number}', json.loads(line)
        except (ValueError, RecursionError) as error:
          raise ValueError(f'{path}, line {number}: not valid JSON ({error}).') from None
    return
  if isinstance(whole, Mapping) and 'instance_id' not in whole:
    whole = [{'instance_id': key, **value} if isinstance(value, Mapping) else value for key, value in whole.items()]
  for number, row in enumerate(whole if isinstance(whole, list) else [whole], start=1):
    yield f'{path}, row {number}', row


def write_predictions(path: pathlib.Path, predictions: Mapping[str, Mapping[str, str]]) -> None:
  """Writes the form that `read_predictions` and SWE-bench's own harness read."""
  scratch = path.with_name('.' + path.name)
  with open(scratch, 'w', encoding='utf-8') as file:
    for instance_id in sorted(predictions):
      file.write(json.dumps({'instance_id': instance_id, **predictions[instance_id]}) + '\n')
  scratch.replace(path)


# --- Grading ---------------------------------------------------------------------------------------------------------------------


def grade(
    instances: Sequence[Instance], predictions: Mapping[str, Mapping[str, str]], request: Request, output: str | os.PathLike[str], *,
    judge: Judge | None = None, on_progress: Progress = lambda *_: None,
) -> dict[str, Any]:
  """Grades predictions and writes what the module's text says; instances that have a verdict for the same patch are not run again.

  Returns: the content of report.json with 'output'. Raises ValueError where the folder belongs to other settings, OSError.
  """
  folder = pathlib.Path(output)
  with _held(folder, _settings(instances, request)):
    write_predictions(folder / 'predictions.jsonl', predictions)
    return _grade(folder, instances, predictions, request, judge or _judge(request), on_progress)


def _judge(request: Request) -> Judge:
  return Judge(time_s=request.test_time_s, controls=request.controls)


def _grade(
    folder: pathlib.Path, instances: Sequence[Instance], predictions: Mapping[str, Mapping[str, str]], request: Request, judge: Judge,
    on_progress: Progress,
) -> dict[str, Any]:
  measured = measuring.load_measured(request.measured) if request.measured else {}
  unusable = [i.instance_id for i in instances if not measured.get(i.instance_id, Measured()).usable]
  todo = [i for i in instances if i.instance_id in predictions and i.instance_id not in unusable]
  verdicts: dict[str, dict[str, Any]] = {}
  with concurrent.futures.ThreadPoolExecutor(request.workers, thread_name_prefix='grading') as pool:
    start = lambda i: pool.submit(
        _graded, folder / 'logs' / i.instance_id, i, predictions[i.instance_id]['model_patch'], judge,
        measured.get(i.instance_id, Measured()))
    futures = [start(i) for i in todo]
    try:
      for instance, future in zip(todo, futures):
        verdicts[instance.instance_id] = future.result()
        on_progress('grading', len(verdicts), len(todo))
    except BaseException:
      pool.shutdown(wait=False, cancel_futures=True)
      raise
  found = summary(instances, predictions, verdicts, unusable)
  report.write_json(folder / 'report.json', found)
  return {**found, 'output': str(folder)}


def _graded(folder: pathlib.Path, instance: Instance, patch: str, judge: Judge, measured: Measured) -> dict[str, Any]:
  """The report of one instance, made now or read."""
  digest = hashlib.sha256(f'{instance.key} {sorted(measured.left_out)} {patch}'.encode('utf-8', 'surrogateescape')).hexdigest()
  path = folder / 'report.json'
  with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
    known = json.loads(path.read_text(encoding='utf-8'))
    if known['digest'] == digest:
      return known
  try:
    verdict = judge.judge_patch(instance, patch, measured=measured) if patch.strip() else Verdict('empty')
  except EnvironmentFailure as error:
    return {'instance_id': instance.instance_id, 'reason': error.reason, 'detail': str(error), 'resolved': False}
  folder.mkdir(parents=True, exist_ok=True)
  (folder / 'patch.diff').write_text(patch, encoding='utf-8', errors='surrogateescape')
  (folder / 'test_output.txt').write_text(verdict.log, encoding='utf-8', errors='replace')
  tests = {
      name: {'success': [t for t in ids if verdict.outcomes.get(t) == 'passed'],
             'failure': [t for t in ids if verdict.outcomes.get(t) != 'passed' and t not in measured.left_out],
             'left_out': [t for t in ids if t in measured.left_out]}
      for name, ids in (('FAIL_TO_PASS', instance.fail_to_pass), ('PASS_TO_PASS', instance.pass_to_pass))}
  found = {
      'instance_id': instance.instance_id, 'resolved': verdict.resolved, 'reason': verdict.reason, 'detail': verdict.detail,
      'patch_exists': bool(patch.strip()), 'patch_successfully_applied': verdict.reason not in ('does_not_apply', 'empty'),
      'tests_status': tests, 'dropped': dict(verdict.dropped), 'controls': verdict.controls, 'seconds': round(verdict.seconds, 3),
      'digest': digest}
  report.write_json(path, found)
  return found


def summary(
    instances: Sequence[Instance], predictions: Mapping[str, Mapping[str, str]], verdicts: Mapping[str, Mapping[str, Any]],
    unusable: Sequence[str] = (),
) -> dict[str, Any]:
  """SWE-bench's report, with the share of resolved instances among those that can be judged, and Wilson's 95 % interval."""
  of = lambda test: sorted(k for k, v in verdicts.items() if test(v))
  errors = of(lambda v: v['reason'].startswith(('environment_', 'grader_')))
  lists = {
      'submitted': sorted(i.instance_id for i in instances if i.instance_id in predictions),
      'completed': of(lambda v: v['instance_id'] not in errors and v['reason'] != 'empty'),
      'resolved': of(lambda v: v['resolved']), 'unresolved': of(lambda v: not v['resolved'] and v['instance_id'] not in errors),
      'empty_patch': of(lambda v: v['reason'] == 'empty'), 'error': errors, 'unusable': sorted(unusable)}
  reasons: dict[str, int] = {}
  for verdict in verdicts.values():
    reasons[verdict['reason']] = reasons.get(verdict['reason'], 0) + 1
  n = len(instances) - len(unusable) - len(errors)
  low, high = wilson_interval(len(lists['resolved']), n)
  return {
      'total_instances': len(instances), **{f'{name}_instances': len(ids) for name, ids in lists.items()},
      **{f'{name}_ids': ids for name, ids in lists.items()}, 'reasons': dict(sorted(reasons.items())), 'judged': n,
      'resolved_share': len(lists['resolved']) / n if n else None, 'resolved_low': low, 'resolved_high': high, 'schema_version': 2}


def measure(
    instances: Sequence[Instance], request: Request, path: str | os.PathLike[str], *, repeats: int, judge: Judge | None = None,
    on_progress: Progress = lambda *_: None,
) -> dict[str, Any]:
  """Runs the gold patches and writes which tests are unfit; instances that stand in the file already are not run again."""
  path, judge = pathlib.Path(path), judge or _judge(request)
  known = measuring.load_measured(str(path)) if path.exists() else {}
  todo = [i for i in instances if i.instance_id not in known]
  lost: dict[str, str] = {}
  path.parent.mkdir(parents=True, exist_ok=True)
  with open(path, 'a', encoding='utf-8') as file, concurrent.futures.ThreadPoolExecutor(request.workers) as pool:
    futures = {pool.submit(judge.measure, i, repeats=repeats): i for i in todo}
    for number, future in enumerate(concurrent.futures.as_completed(futures), start=1):
      instance = futures[future]
      try:
        known[instance.instance_id] = future.result()
        file.write(measuring.line_of(instance.instance_id, known[instance.instance_id]) + '\n')
        file.flush()
      except EnvironmentFailure as error:
        lost[instance.instance_id] = f'{error.reason}: {error}'
      on_progress('measuring', number, len(todo))
  mine = [known[i.instance_id] for i in instances if i.instance_id in known]
  return {
      'instances': len(instances), 'usable': sum(m.usable for m in mine), 'tests_left_out': sum(len(m.left_out) for m in mine),
      'lost': lost, 'output': str(path)}


# --- The folder ------------------------------------------------------------------------------------------------------------------


def _settings(instances: Sequence[Instance], request: Request, **more: Any) -> dict[str, Any]:
  keys = hashlib.sha256(' '.join(i.key for i in instances).encode()).hexdigest()[:16]
  left_out = hashlib.sha256(pathlib.Path(request.measured).read_bytes()).hexdigest()[:16] if request.measured else ''
  settings = {
      'benchmark': 'swe', 'instances': len(instances), 'data': keys, 'measured': left_out, 'controls': request.controls,
      'test_time_s': request.test_time_s, **more}
  return json.loads(json.dumps(report.plain(settings)))


@contextlib.contextmanager
def _held(folder: pathlib.Path, settings: Mapping[str, Any]) -> Iterator[None]:
  """Holds the folder for this process. Raises ValueError where it is another's, or holds an evaluation with other settings."""
  folder.mkdir(parents=True, exist_ok=True)
  path = folder / 'settings.json'
  others = sorted(p.name for p in folder.iterdir() if p.name != 'lock' and not p.name.startswith('.'))
  if others and 'settings.json' not in others:
    raise ValueError(f'{folder} is no folder of an evaluation (it holds {others[0]}); choose another --output.')
  with open(folder / 'lock', 'a', encoding='utf-8') as lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      raise ValueError(f'Another process is writing to {folder}; wait for it or choose another --output.') from error
    if path.exists():
      different = settings_lib.differences(json.loads(path.read_text(encoding='utf-8')), settings)
      if different:
        raise ValueError(
            f'{folder} holds an evaluation with other settings: {"; ".join(different)}. Use the same settings or another --output.')
    else:
      report.write_json(path, dict(settings))
    yield


# --- A policy's predictions ------------------------------------------------------------------------------------------------------


class EpisodeFlow(ListFlow):
  """A `ListFlow` that keeps no rollouts: what matters is written by the episodes themselves."""

  def __init__(self, prompts: Sequence[tuple[int, Task]]):
    super().__init__(prompts)
    self._finished = 0

  @property
  def done(self) -> int:
    return self._finished + self.dropped.total()

  def finish(self, rollout: Any, version: int) -> bool:
    del rollout, version
    self._finished += 1
    return True


def evaluate_policy(
    config: Config, instances: Sequence[Instance], request: Request, *, workdir: str | None, step: int | None, output: str,
    max_turns: int, max_turn_tokens: int, max_tokens: int | None, temperature: float, model_name: str,
    on_progress: Progress = lambda *_: None,
) -> dict[str, Any]:
  """Lets a policy work on the instances that have no episode yet, then grades all.

  Args:
    config: settings of the model and the sampler.
    workdir: folder of a run whose checkpoint is evaluated; None for the weights that `config` names.
    step: number of the checkpoint; None for the newest.
    max_turns, max_turn_tokens, max_tokens: of an episode; None for what the model was made for, at most `LONGEST`.
    temperature: of the sampling; 0 for greedy.
    model_name: in the predictions.

  Returns: as `grade`. Raises as `grade`, and RuntimeError where too many episodes are lost.
  """
  from sao_jax import evaluate_run

  if workdir is not None:
    step = evaluate_run.checkpoint_step(pathlib.Path(workdir), step)
  folder = pathlib.Path(output)
  settings = _settings(instances, request, policy={'model': model_name, 'checkpoint': step}, max_turns=max_turns,
                       max_turn_tokens=max_turn_tokens, max_tokens=max_tokens, temperature=temperature, seed=config.evaluation.seed)
  with _held(folder, settings):
    episodes = folder / 'episodes'
    todo = [n for n, i in enumerate(instances) if not (episodes / f'{i.instance_id}.json').exists()]
    if todo:
      fitted = _fitted(config, request, str(episodes), max_turns, max_turn_tokens, max_tokens)
      with evaluate_run.opened(fitted, workdir) as parts:
        _, policy = evaluate_run.policy_of(parts, step)
        prompts = [(n, Task(n, 'test', 0, {'instance_id': instances[n].instance_id})) for n in todo]
        _roll_out(parts, policy, temperature, prompts, on_progress)
    predictions = {}
    for instance in instances:
      with contextlib.suppress(FileNotFoundError):
        row = json.loads((episodes / f'{instance.instance_id}.json').read_text(encoding='utf-8'))
        predictions[instance.instance_id] = {'model_name_or_path': model_name, 'model_patch': row['model_patch']}
    write_predictions(folder / 'predictions.jsonl', predictions)
    return _grade(folder, instances, predictions, request, _judge(request), on_progress)


def _fitted(config: Config, request: Request, episodes: str, max_turns: int, max_turn_tokens: int, max_tokens: int | None) -> Config:
  """The settings with the task 'swe', which writes predictions and judges nothing; nothing is trained."""
  from sao_jax.models import pretrained

  context = pretrained.resolve_config(config.model).max_length
  total = min(max_tokens or LONGEST, context)
  fitted = dataclasses.replace(
      config,
      task=dataclasses.replace(
          config.task, name='swe', max_segments=max(8, config.task.max_segments), max_turns=max_turns + 1,
          max_turn_tokens=min(max_turn_tokens, total - 1), max_tokens=total,
          time_limit_s=7 * 24 * 3600.0, step_timeout_s=1200.0, settings={
              'source': {'train': request.source, 'test': request.source}, 'repositories': request.repositories,
              'max_turns': max_turns, 'judge': False, 'predictions': episodes, 'limit': request.limit or 0}),
      sampler=dataclasses.replace(
          config.sampler, sessions=config.sampler.slots, pages=0, prefill_lengths=tuple(sorted({min(64, total), min(512, total)})),
          prefill_rows=tuple(sorted({min(4, config.sampler.slots), min(16, config.sampler.slots)})), cache_lengths=()),
      learner=dataclasses.replace(config.learner, lengths=(total,)),
      sft=dataclasses.replace(config.sft, steps=0), value_pretrain=dataclasses.replace(config.value_pretrain, rollouts=0),
      rl=dataclasses.replace(config.rl, policy_steps=0))
  settings_lib.check(fitted)
  return fitted


def _roll_out(parts: Any, policy: Any, temperature: float, prompts: Sequence[tuple[int, Task]], on_progress: Progress) -> None:
  from sao_jax.types import ParamSnapshot
  from sao_jax.workers import EnvironmentPool

  flow = EpisodeFlow(prompts)
  seed = parts.config.evaluation.seed
  snapshot = ParamSnapshot(0, parts.convert(policy))
  sampler = parts.make_sampler(snapshot, seed=seed)
  sampler.reset(snapshot, seed=seed, temperature=temperature)
  pool = EnvironmentPool(parts.config.task.workers, parts.config.task.step_timeout_s)
  try:
    run_list(parts.make_engine(sampler, pool, flow, time.monotonic), flow, on_progress=lambda done: on_progress('swe', done, len(prompts)))
  finally:
    pool.close(600.0)  # Episodes that a limit cut write their prediction as they are closed.
