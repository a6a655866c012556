"""One run from settings to summary: warm start, value pretraining, RL; resumed from the workdir's checkpoint if there is one.

1. `run` locks the workdir, compares its settings with those of an earlier start, builds the parts, restores or initialises.
2. Each stage trains to its last step and hands over to the next; every hand-over is saved.
3. Held-out success is measured after the warm start ('before') and at the end ('after'); `summary.json` says what the run did.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import threading
from typing import Any, Iterator

import jax

from sao_jax import algorithms, environments, report, stages
from sao_jax.config import Config, Refused, differences_from_stored, to_dict
from sao_jax.data import PromptStream
from sao_jax.metrics import read_rows
from sao_jax.parts import STAGES, Parts, Progress, build, initial_state, num_parameters
from sao_jax.rl import ReinforcementLearning
from sao_jax.evaluation import Stopped  # Re-exported: it is what `run` raises.
from sao_jax.run import Run
from sao_jax.workers import bounded

FILES = ('config.json', 'lock', 'metrics.jsonl', 'ledger.jsonl', 'difficulty.jsonl', 'summary.json', 'learning_curve.png', 'error.txt')
FOLDERS = ('checkpoints', 'rollouts', 'tensorboard')


def run(config: Config, workdir: str | os.PathLike[str], *, stop: threading.Event | None = None) -> dict[str, Any]:
  """Trains to the end and returns the summary, which is also in `workdir/summary.json`.

  Args:
    config: checked settings, from `config.from_dict`.
    workdir: folder of this run; one that holds an unfinished run with the same settings is resumed.
    stop: once set, the run saves after the step under way and ends with `run.Stopped`.

  Raises:
    Stopped: `stop` was set; everything is saved.
    ValueError: settings that do not fit the machine or the environment.
    config.Refused: a workdir that another process holds, or a run with other settings; nothing there is changed.
    OSError: a workdir that cannot be written.
    FloatingPointError: a non-finite loss or gradient; the checkpoints before it stay.
    RuntimeError: a worker failed, or too many rollouts were lost; the first cause is chained.
  """
  workdir = pathlib.Path(workdir)
  with locked(workdir):
    compare_settings(config, workdir)
    validate_names(config)
    with closed_at_end(build(config, workdir)) as parts:
      parts.stop = stop or parts.stop
      this = start(parts)
      write_settings(config, workdir)
      while this.progress.stage != 'done':
        run_stage(this)
      summary = finish(this)
    (workdir / 'error.txt').unlink(missing_ok=True)  # Of an earlier start that failed.
    return summary


def write_settings(config: Config, workdir: pathlib.Path) -> None:
  """Writes `config.json`, unless it holds these settings already."""
  path = workdir / 'config.json'
  try:
    same = path.exists() and not differences_from_stored(report.read_settings(path), to_dict(config))
  except ValueError:  # Damaged, and of a start that trained nothing: `compare_settings` has judged it.
    same = False
  if not same:
    report.write_json(path, to_dict(config))


@contextlib.contextmanager
def closed_at_end(parts: Parts) -> Iterator[Parts]:
  """Closes the parts. An error while closing does not hide the one that ended the run; it is told with it."""
  try:
    yield parts
  except BaseException as error:
    try:
      parts.close()
    except Exception as second:
      error.add_note(f'And while the run was closed: {second}')
    raise
  parts.close()


def start(parts: Parts) -> Run:
  """The state of the newest checkpoint, or a fresh one."""
  latest = parts.checkpointer.latest_step()
  if latest is None:
    refuse_lost_checkpoints(parts)
    progress = Progress()
    state = parts.learner.begin_stage(initial_state(parts), progress.stage)
  else:
    progress = Progress(**parts.checkpointer.restore_host(latest))
    state = parts.checkpointer.restore(latest, parts.learner.abstract_state('rl' if progress.stage == 'done' else progress.stage))
  parts.open_files(progress)
  parts.progress_bar.line(
      f'{num_parameters(parts.learner.policy_params(state)):,} parameters, {jax.device_count()} {jax.default_backend()} device(s), '
      f'{"resumed at" if latest is not None else "starting with"} stage {progress.stage}, step {progress.step}')
  return Run(parts, state, progress)


def refuse_lost_checkpoints(parts: Parts) -> None:
  """Raises ValueError where there is no checkpoint, though the run has come so far that there must have been one.

  A save ends the one before it first, and follows the metrics of its step: with those of a step after the second save, the first is whole.
  """
  ledger, metrics = parts.workdir / 'ledger.jsonl', parts.workdir / 'metrics.jsonl'
  last = max((row['step'] for row in read_rows(metrics)), default=0) if metrics.exists() else 0
  if last > 2 * parts.config.checkpoint.every or (ledger.exists() and read_rows(ledger)):
    raise ValueError(
        f'{parts.workdir} holds {last} steps of a run, but its checkpoints are gone; restore {parts.workdir / "checkpoints"}, or use '
        'another --workdir.')


def run_stage(this: Run) -> None:
  """Runs the current stage to its end and enters the next."""
  stage, evaluation = this.progress.stage, this.config.evaluation
  if stage == 'sft':
    stages.sft(this)
  elif stage == 'value_pretrain':
    if 'before' not in this.progress.evaluation and evaluation.prompts:
      this.progress.evaluation['before'] = this.evaluate('before', evaluation.prompts)
    stages.value_pretrain(this)
  elif this.config.rl.policy_steps:
    ReinforcementLearning(this).run()
    if evaluation.prompts:
      evaluate_after(this)
  this.enter(STAGES[STAGES.index(stage) + 1])


def evaluate_after(this: Run) -> None:
  """Held-out success at the end; where the run is asked to stop meanwhile, it is resumed with this."""
  try:
    this.progress.evaluation['after'] = this.evaluate('after', this.config.evaluation.prompts)
  except Stopped:
    this.save()
    this.stop_if_asked()
    raise


def finish(this: Run) -> dict[str, Any]:
  """Writes the summary and the learning curve."""
  progress, saved = this.progress, this.progress.rl or {}
  summary = {
      'seed': this.config.seed, 'policy_steps': progress.version, 'learner_steps': progress.step,
      'evaluation': progress.evaluation, 'accounting': saved['accounting'] if saved else {}, 'seconds': progress.seconds,
      'final_metrics': final_metrics(this.parts.workdir), 'packages': report.package_versions(), 'devices': [str(d) for d in jax.devices()]}
  this.parts.checkpointer.wait()
  report.write_json(this.parts.workdir / 'summary.json', summary)
  report.learning_curve(
      this.parts.workdir / 'metrics.jsonl', this.parts.workdir / 'learning_curve.png',
      title=f'{this.config.task.name}: {this.config.algorithm.advantage} + {this.config.algorithm.objective}, seed {this.config.seed}')
  return summary


def final_metrics(workdir: pathlib.Path) -> dict[str, Any]:
  """The newest value of every metric."""
  values: dict[str, Any] = {}
  for row in read_rows(workdir / 'metrics.jsonl'):
    values.update(row)
  return values


def validate_names(config: Config) -> None:
  """Raises ValueError for an algorithm or environment that does not exist, or settings that the environment or its prompts refuse."""
  for path, registry in (('algorithm.advantage', algorithms.ADVANTAGES), ('algorithm.objective', algorithms.OBJECTIVES)):
    name = getattr(config.algorithm, path.split('.')[1])
    if name not in registry:
      raise ValueError(f'{path} must be one of {", ".join(sorted(registry))}, got {name!r}.')
  environment = bounded(
      lambda: environments.make(config.task.name, **config.task.settings), config.task.step_timeout_s,
      f'making the environment {config.task.name!r}')
  PromptStream(environment, seed=config.seed, epochs=config.data.epochs, skip_solved=config.data.skip_solved)
  bounded(environment.close, config.task.step_timeout_s, f'closing the environment {config.task.name!r}')


@contextlib.contextmanager
def locked(workdir: pathlib.Path) -> Iterator[None]:
  """Makes the workdir and holds it for this process; a second process on the same folder would ruin both runs."""
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    check_files(workdir)
    file = open(workdir / 'lock', 'a')
  except (FileExistsError, NotADirectoryError):
    raise OSError(f'{workdir} cannot be a workdir: it, or what it lies in, is a file; choose another --workdir.') from None
  except OSError as error:
    if error.errno is None:
      raise
    raise OSError(
        error.errno, f'{workdir} cannot be a workdir: {error.strerror}; make it writable, or choose another --workdir.') from None
  with file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise Refused(f'Another process is running in {workdir}; wait for it or choose another --workdir.') from None
    yield


def check_files(workdir: pathlib.Path) -> None:
  """Raises OSError where a folder has the name of a file that the run writes, or a file that of a folder."""
  for names, is_right, what, wanted in (
      (FILES, pathlib.Path.is_file, 'a folder', 'a file'), (FOLDERS, pathlib.Path.is_dir, 'a file', 'a folder')):
    for name in names:
      path = workdir / name
      if path.exists() and not is_right(path):
        raise OSError(f'{path} is {what}, and a run keeps {wanted} of that name there; move it away, or choose another --workdir.')


def compare_settings(config: Config, workdir: pathlib.Path) -> None:
  """Raises Refused where the workdir holds a run with other settings, listing them; ValueError where its `config.json` is damaged.

  A start that ended before anything was trained binds nobody, and neither does a setting that is newer than the run and has its default.
  """
  path, metrics = workdir / 'config.json', workdir / 'metrics.jsonl'
  trained = any(p.name.isdecimal() for p in (workdir / 'checkpoints').glob('*')) or (metrics.exists() and metrics.stat().st_size)
  if path.exists() and trained:
    different = differences_from_stored(report.read_settings(path), to_dict(config))
    if different:
      raise Refused(f'{workdir} holds a run with other settings: {"; ".join(different)}. Use the same settings or another --workdir.')
