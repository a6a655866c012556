"""Numbers of a run: gathered per step as totals and counts, divided once, written as JSONL and TensorBoard events.

Names are paths ('reward/mean'). A value is a `Stat`, or a plain number for a state or a running count:

    over several steps          Stat: totals add, counts add      name ends in 'max': the largest      number: the newest
    nothing to count (count 0)  nothing is written, never a 0
    not finite                  null in JSONL, left out of TensorBoard
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
import threading
import time
from typing import Any, Callable, Iterator, Mapping, Sequence

import jax
import numpy as np

from sao_jax.types import Rollout, Stat

Value = Stat | float
RESERVED = ('step', 'time')


def value_of(value: Value) -> float | None:
  """The number that is written for `value`: total / count in float64, or None where the count is 0."""
  if not isinstance(value, Stat):
    return float(value)
  total, count = float(value.total), float(value.count)
  return total / count if count != 0 else None


def merge_steps(steps: Sequence[Mapping[str, Value]]) -> dict[str, Value]:
  """One dictionary of the values of several steps, oldest first, by the rules above. Host values in, host values out."""
  merged: dict[str, Value] = {}
  for values in steps:
    for name, value in values.items():
      before = merged.get(name)
      if isinstance(value, Stat):
        value = Stat(float(value.total), float(value.count))
        if name.endswith('max'):
          value = max((v for v in (before, value) if v is not None and v.count), key=value_of, default=value)
        elif before is not None:
          value = before + value
      merged[name] = value
  return merged


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
  """Turns a full disk or a missing right into an OSError that names the file and says what to do."""
  try:
    yield
  except OSError as error:
    raise OSError(
        error.errno, f'{path} cannot be written: {error.strerror or error}; make room there, or make it writable, and run the same '
        'command again to resume') from error


class StepMetrics:
  """Keeps the values of steps, device arrays included, until they are to be written; nothing is fetched before `collect`."""

  def __init__(self):
    self._steps: list[dict[str, Value]] = []

  def add(self, values: Mapping[str, Value]) -> None:
    """Adds what one step, or one part of it, gave."""
    self._steps.append(dict(values))

  def collect(self) -> dict[str, Value]:
    """Fetches and merges everything since the last call."""
    steps, self._steps = self._steps, []
    return merge_steps(jax.device_get(steps))


class Timers:
  """Adds up named waits and gives each as a share of the time gone by. May be used from any thread."""

  def __init__(self, clock: Callable[[], float] = time.monotonic):
    self._clock, self._lock = clock, threading.Lock()
    self._seconds: dict[str, float] = {}
    self._from_s = clock()

  @contextlib.contextmanager
  def measure(self, name: str) -> Iterator[None]:
    """Adds the time spent inside the `with` block to `name`, whether it ends well or not."""
    began_s = self._clock()
    try:
      yield
    finally:
      self.add(name, self._clock() - began_s)

  def add(self, name: str, seconds: float) -> None:
    with self._lock:
      self._seconds[name] = self._seconds.get(name, 0.0) + seconds

  def metrics(self) -> dict[str, Stat]:
    """{'time/<name>_fraction': seconds measured over seconds gone by} since the last call; a name stays once it was measured."""
    with self._lock:
      now_s = self._clock()
      elapsed_s, self._from_s = now_s - self._from_s, now_s
      seconds, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
    return {f'time/{name}_fraction': Stat(total_s, elapsed_s) for name, total_s in seconds.items()}


def rollout_metrics(rollouts: Sequence[Rollout], *, errored: int = 0) -> dict[str, Stat]:
  """What a set of rollouts was like; every rollout counts once, however many turns or tokens it has.

  Args:
    rollouts: finished ones.
    errored: rollouts that died of their environment meanwhile; they count as reward 0 in 'reward/mean_all' only.

  Returns:
    'reward/mean', 'reward/mean_all', 'reward/success' (over rollouts whose environment reports it), 'rollout/length_mean|max' and
    'rollout/action_tokens' in tokens, 'rollout/segments', 'rollout/turns' (with an action in them), 'rollout/truncated_fraction', and the
    mean of every other number that environments report as 'environment/<name>'. Count 0 where there is nothing to count.
  """
  def over(values: Sequence[float]) -> Stat:
    return Stat(math.fsum(values), float(len(values)))

  rewards = [r.total_reward for r in rollouts]
  lengths = [float(r.length) for r in rollouts]
  stats = {
      'reward/mean': over(rewards),
      'reward/mean_all': over(rewards + [0.0] * errored),
      'rollout/length_mean': over(lengths),
      'rollout/length_max': Stat(max(lengths, default=0.0), float(bool(lengths))),
      'rollout/action_tokens': over([float(r.num_actions) for r in rollouts]),
      'rollout/segments': over([float(len(r.segment_starts)) for r in rollouts]),
      'rollout/turns': over([float(len(np.unique(r.turn[r.action_mask]))) for r in rollouts]),
      'rollout/truncated_fraction': over([float(r.ending == 'truncated') for r in rollouts]),
      'reward/success': over([float(r.metrics['success']) for r in rollouts if 'success' in r.metrics]),
  }
  for name in sorted({name for r in rollouts for name in r.metrics} - {'success'}):
    stats[f'environment/{name}'] = over([float(r.metrics[name]) for r in rollouts if name in r.metrics])
  return stats


def read_rows(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """Rows of a JSONL file; a last line that was cut off while it was written is left out.

  Raises:
    ValueError: another line is not a row.
  """
  rows = []
  lines = pathlib.Path(path).read_bytes().split(b'\n')
  for number, line in enumerate(lines, start=1):
    if number == len(lines):  # What follows the last newline: nothing, or a row cut off.
      break
    try:
      row = json.loads(line)
      row['step']
    except (ValueError, TypeError, KeyError, IndexError) as error:
      raise ValueError(f'{path}, line {number} is no row of a run: {line[:80]!r}. Restore the file, or use another --workdir.') from error
    rows.append(row)
  return rows


def rewind(path: pathlib.Path, resume_step: int | None, resume_rows: int | None = None) -> list[dict[str, Any]]:
  """Cuts a JSONL file back to rows of at most `resume_step` (None: none at all), at most `resume_rows` of them, in one rename.

  Returns the rows that stay; a file that is not there has none.
  """
  if not path.exists():
    return []
  kept = [] if resume_step is None else [row for row in read_rows(path)[:resume_rows] if row['step'] <= resume_step]
  fresh = path.with_suffix('.jsonl.new')
  with writing(path):
    fresh.write_text(''.join(json.dumps(row) + '\n' for row in kept), encoding='utf-8')
    os.replace(fresh, path)
  return kept


class Ledger:
  """Which rollouts each learner step trained: `ledger.jsonl`, one line a step, so that anybody can check that none is trained twice."""

  def __init__(self, workdir: str | os.PathLike[str], resume_step: int):
    self._path = pathlib.Path(workdir) / 'ledger.jsonl'
    self.rows = len(rewind(self._path, resume_step))

  def write(self, step: int, version: int, rollouts: Sequence[Rollout]) -> None:
    """Appends a line: step, the version that trained, and ticket, prompt id and attempt of every rollout, in the order of the batch."""
    row = {
        'step': step, 'version': version, 'tickets': [r.ticket for r in rollouts], 'prompt_ids': [r.prompt_id for r in rollouts],
        'attempts': [r.attempt for r in rollouts]}
    with writing(self._path), open(self._path, 'a', encoding='utf-8') as file:
      file.write(json.dumps(row) + '\n')
    self.rows += 1


class MetricsWriter:
  """Writes rows to `metrics.jsonl` in `workdir`, and to TensorBoard events beside it.

  Each row is flushed: after kill -9 at most the row being written is missing. One writer a workdir, from one thread.

  Attributes:
    last: the newest row of the file, {'step', 'time' (seconds since 1970), name: number or None}; empty if there is none.
  """

  def __init__(self, workdir: str | os.PathLike[str], tensorboard: bool, resume_step: int | None, resume_rows: int | None = None):
    """Opens the files.

    Args:
      workdir: existing or new folder.
      tensorboard: also write event files.
      resume_step: rows up to this step are kept and later ones dropped; None starts a new file.
      resume_rows: at most so many rows are kept, the `rows` of the writer when the checkpoint was taken; None for no such limit.

    Raises:
      OSError: the folder cannot be written; the message names it.
    """
    self._path = pathlib.Path(workdir) / 'metrics.jsonl'
    self.last: dict[str, float | None] = {}
    try:
      self._path.parent.mkdir(parents=True, exist_ok=True)
      self.rows = self._rewind(resume_step, resume_rows)
      self._file = open(self._path, 'a', encoding='utf-8')
    except OSError as error:
      raise OSError(error.errno, f'metrics cannot be written to {self._path}: {error.strerror}; choose a writable workdir') from error
    self._events = _event_writer(workdir, resume_step) if tensorboard else None

  def write(self, step: int, values: Mapping[str, Value]) -> None:
    """Writes one row. Fetches what is on a device."""
    names = [name for name in values if name in RESERVED]
    if names:
      raise ValueError(f'A metric cannot be named {names[0]!r}.')
    row: dict[str, float | None] = {'step': int(step), 'time': time.time()}
    for name, value in jax.device_get(dict(values)).items():
      number = value_of(value)
      if number is not None:
        row[name] = number if math.isfinite(number) else None
    with writing(self._path):
      self._file.write(json.dumps(row, allow_nan=False) + '\n')
      self._file.flush()
    self.rows += 1
    if self._events is not None:
      for name, number in row.items():
        if name not in RESERVED and number is not None:
          self._events.add_scalar(name, number, int(step), walltime=row['time'])
      self._events.flush()
    self.last = row

  def close(self) -> None:
    """Closes the files; may be called again."""
    self._file.close()
    if self._events is not None:
      self._events.close()
      self._events = None

  def _rewind(self, resume_step: int | None, resume_rows: int | None) -> int:
    """Brings the file back to `resume_step`; returns how many rows it has."""
    kept = rewind(self._path, resume_step, resume_rows)
    self.last = kept[-1] if kept else {}
    return len(kept)


def _event_writer(workdir: str | os.PathLike[str], resume_step: int | None) -> Any:
  import tensorboardX  # Optional: only where event files are asked for.

  purge = None if resume_step is None else resume_step + 1
  return tensorboardX.SummaryWriter(str(pathlib.Path(workdir) / 'tensorboard'), purge_step=purge)
