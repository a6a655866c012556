"""What a person looks at: progress on the terminal, the learning curve, readable trajectories, and `summary.json`.

Everything is written whole or not at all (a temporary file, then a rename), so that a killed run never leaves half a picture.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import os
import pathlib
import shutil
import sys
import time
from typing import Any, Callable, Iterator, Mapping, Sequence, TextIO

import numpy as np
from tqdm import tqdm

from sao_jax.metrics import read_rows, writing
from sao_jax.types import Rollout, Stat

PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'chex', 'numpy', 'ml_collections')
Decode = Callable[[list[int]], str]


# --- Progress ------------------------------------------------------------------------------------------------------------------


# Numbers shown beside the bar, in this order: metric -> short name.
SHOWN = {
    'sft/loss': 'loss', 'value/loss': 'value loss', 'reward/success': 'success', 'reward/mean': 'reward', 'dis/kept_fraction': 'kept',
    'ppo_clip/kept_fraction': 'kept',
    'queue/staleness_mean': 'staleness',
}


class _Silenced:
  """A text stream that goes silent where it cannot be written to any more: what shows progress must not end a run."""

  def __init__(self, stream: TextIO | None):
    self._stream, self._silent = stream, stream is None

  def write(self, text: str) -> int:
    self._try(lambda: self._stream.write(text))
    return len(text)

  def flush(self) -> None:
    self._try(lambda: self._stream.flush())

  def isatty(self) -> bool:
    return self._stream.isatty()

  def fileno(self) -> int:
    return self._stream.fileno()

  @property
  def encoding(self) -> str:
    return getattr(self._stream, 'encoding', None) or 'utf-8'

  def _try(self, function: Callable[[], Any]) -> None:
    if not self._silent:
      try:
        function()
      except (OSError, ValueError):  # Broken pipe, full disk; closed.
        self._silent = True


class ProgressBar:
  """Progress through the stages: a bar on a terminal; elsewhere (a log file, CI) plain lines, one every few seconds and one at the end.

  Used by one thread. Args: `enabled`: False writes nothing at all; `stream`: None for standard error; `every_s`: seconds between lines.
  Where the stream cannot be written, nothing is shown any more.
  """

  def __init__(self, *, enabled: bool, stream: TextIO | None = None, every_s: float = 5.0):
    stream = sys.stderr if stream is None else stream  # None again in a process without standard error.
    self._stream = _Silenced(stream)
    self._enabled, self._every_s = enabled and stream is not None, every_s
    self._terminal = self._enabled and self._stream.isatty()
    self._bar: tqdm | None = None
    self._stage, self._done, self._total, self._numbers = '', 0, 0, ''
    self._started = self._last = self._updated = time.monotonic()
    self._current = True  # Whether the last plain line tells the newest state.

  def update(self, stage: str, done: int, total: int) -> None:
    """Reports that `done` of `total` steps of `stage` are finished; another stage gets a bar of its own."""
    if stage != self._stage or total != self._total:
      self._end_stage()
      self._stage, self._total, self._numbers, self._started = stage, total, '', time.monotonic()
      if self._terminal:
        self._bar = tqdm(total=total, initial=max(0, done - 1), desc=stage, file=self._stream, dynamic_ncols=True, leave=True)
    self._done, self._current, self._updated = done, False, time.monotonic()
    if self._bar is not None:
      self._bar.update(done - self._bar.n)
    else:
      self._say_state(now=False)

  def show(self, stage: str, metrics: Mapping[str, Any]) -> None:
    """Takes the newest numbers (`Stat`s or floats) to show beside the progress of `stage`; those of other names are left out."""
    if stage == self._stage:
      means = {label: _mean(metrics[name]) for name, label in SHOWN.items() if name in metrics}
      self._numbers = ', '.join(f'{label} {value:.3g}' for label, value in means.items() if math.isfinite(value))
      if self._bar is not None:
        self._bar.set_postfix_str(self._numbers, refresh=False)

  def note(self, text: str) -> None:
    """Shows what goes on inside a step, an evaluation for instance; the next state replaces it."""
    if self._terminal:
      columns = shutil.get_terminal_size().columns - 1
      self._clear_bar()
      self._stream.write('\r' + text[:columns].ljust(columns) + '\r')
      self._stream.flush()
    elif self._is_time():
      self._say(text)

  def waiting(self, seconds: float, text: str) -> None:
    """Shows that the learner has been waiting for rollouts for `seconds`; nothing below five."""
    if seconds >= 5.0:
      where = f'{self._stage}: {self._done}/{self._total}, ' if self._stage else ''
      self.note(f'{where}waiting for rollouts since {seconds:.0f} s, {text}')

  def line(self, text: str) -> None:
    """Writes one line that stays."""
    if self._terminal:
      if self._done >= self._total:
        self._end_stage()
      self._clear_bar()
      self._stream.write('\r' + text.ljust(shutil.get_terminal_size().columns - 1) + '\n')
      self._stream.flush()
    elif self._enabled:
      if self._done == self._total:
        self._say_state(now=True)
      print(text, file=self._stream, flush=True)

  def close(self) -> None:
    """Leaves the last state on the screen or in the log."""
    self._end_stage()
    self._stage = ''

  def _end_stage(self) -> None:
    if self._bar is not None:
      self._bar.refresh()
      self._bar.close()
      self._bar, self._current = None, True
    else:
      self._say_state(now=True)

  def _clear_bar(self) -> None:
    if self._bar is not None:
      self._bar.clear()

  def _say_state(self, *, now: bool) -> None:
    """One plain line with the newest state, unless it was told already; if not `now`, only when it is time for a line."""
    if self._current or not self._enabled or not (now or self._is_time()):
      return
    text = f'{self._stage}: {self._done}/{self._total} after {self._updated - self._started:.0f} s'
    self._say(f'{text}, {self._numbers}' if self._numbers else text)
    self._current = True

  def _is_time(self) -> bool:
    return self._enabled and time.monotonic() - self._last >= self._every_s

  def _say(self, text: str) -> None:
    self._last = time.monotonic()
    print(text, file=self._stream, flush=True)


def _mean(value: Any) -> float:
  """Mean of a `Stat`, NaN where its count is 0; other values as they are."""
  if isinstance(value, Stat):
    return float(value.total) / float(value.count) if value.count else math.nan
  return float(value)


# --- Files ---------------------------------------------------------------------------------------------------------------------


def write_text(path: str | os.PathLike[str], text: str) -> None:
  """Writes `text` to `path` as UTF-8, whole or not at all; a lone surrogate is written as its escape."""
  write_bytes(path, text.encode('utf-8', 'backslashreplace'))


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
  """Writes `data` to `path`, whole or not at all; folders are made. Raises OSError, naming the path, where it cannot be written."""
  path = pathlib.Path(path)
  temporary = path.with_name(f'.{path.name}.{os.getpid()}.tmp')
  with writing(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
      temporary.write_bytes(data)
      os.replace(temporary, path)
    finally:
      temporary.unlink(missing_ok=True)


def read_json(path: str | os.PathLike[str]) -> Any:
  """What `write_json` wrote. Raises ValueError, naming the file, where it is no JSON; OSError where it cannot be read."""
  try:
    return json.loads(pathlib.Path(path).read_text(encoding='utf-8'))
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{path} is damaged ({error}); restore it, or use another folder.') from error


def read_settings(path: str | os.PathLike[str]) -> dict[str, Any]:
  """Settings that `write_json` wrote. Raises ValueError, naming the file, where it holds no settings."""
  values = read_json(path)
  if not isinstance(values, dict):
    raise ValueError(f'{path} is damaged (it holds a {type(values).__name__}, not settings); restore it, or use another folder.')
  return values


def write_json(path: str | os.PathLike[str], value: Any) -> None:
  """Writes `value` as strict, indented JSON: NumPy numbers as numbers, tuples as lists, numbers that are not finite as null."""
  write_text(path, json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False) + '\n')


def plain(value: Any) -> Any:
  """`value` in the types of strict JSON. Raises TypeError for what has no such form."""
  if isinstance(value, Mapping):
    return {str(k): plain(v) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return [plain(v) for v in value]
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    return plain({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
  if value is None or isinstance(value, (str, bool, int)):
    return value
  if isinstance(value, float):
    return value if math.isfinite(value) else None
  if hasattr(value, 'tolist'):  # NumPy and JAX arrays and scalars.
    return plain(value.tolist())
  raise TypeError(f'A {type(value).__name__} cannot be written as JSON: {value!r}.')


def package_versions() -> dict[str, str]:
  """Versions of Python and of the packages that decide results; a package that is not installed is left out."""
  versions = {'python': '.'.join(map(str, sys.version_info[:3]))}
  for name in PACKAGES:
    try:
      versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      continue
  return versions


def append_line(path: str | os.PathLike[str], value: Any) -> None:
  """Adds `value` as one line of strict JSON to the end of `path`; folders are made."""
  path = pathlib.Path(path)
  with writing(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, 'ab') as file:
      file.write(json_line(value))


def json_line(value: Any) -> bytes:
  """`value` as one line of strict JSON."""
  return (json.dumps(plain(value), ensure_ascii=False, allow_nan=False) + '\n').encode('utf-8', 'backslashreplace')


# --- Learning curve ------------------------------------------------------------------------------------------------------------

# Panels of the figure: title, then (metric, label, style); a panel without data is left out.
PANELS = (
    ('Success', (
        ('reward/success', 'training rollouts', {'color': '0.75', 'linewidth': 1.0}),
        ('evaluation/success_temperature_1', 'held out, temperature 1', {'color': 'tab:blue', 'marker': 'o'}),
        ('evaluation/success_greedy', 'held out, greedy', {'color': 'tab:green', 'marker': 's'}))),
    ('Explained variance of the value model', (('value/explained_variance', None, {'color': 'tab:purple'}),)),
    ('Share of action tokens outside the band', (
        ('dis/above', 'above', {'color': 'tab:red'}), ('dis/below', 'below', {'color': 'tab:orange'}),
        ('ppo_clip/above', 'above, clipped', {'color': 'tab:red', 'linestyle': '--'}),
        ('ppo_clip/below', 'below, clipped', {'color': 'tab:orange', 'linestyle': '--'}))),
    ('Staleness in versions', (
        ('queue/staleness_max', 'max', {'color': '0.4', 'linestyle': '--'}), ('queue/staleness_mean', 'mean', {'color': 'tab:blue'}))),
)
SMOOTHED = 'reward/success'
INTERVALS = {  # Metric -> its 95 % interval.
    f'evaluation/success_{name}': (f'evaluation/success_low_{name}', f'evaluation/success_high_{name}')
    for name in ('temperature_1', 'greedy')
}


def learning_curve(metrics_path: str | os.PathLike[str], png_path: str | os.PathLike[str], *, title: str) -> bool:
  """Draws the learning curve of a run from its `metrics.jsonl`, with 95 % intervals around held-out success.

  Returns: False, and no picture is drawn, where there is nothing to draw yet.
  """
  from matplotlib.backends.backend_agg import FigureCanvasAgg  # No pyplot: no global state, no display.
  from matplotlib.figure import Figure

  rows = read_rows(metrics_path) if pathlib.Path(metrics_path).exists() else []
  panels = [(name, [line for line in lines if series(rows, line[0])]) for name, lines in PANELS]
  panels = [(name, lines) for name, lines in panels if lines]
  if not panels:
    return False
  columns = min(2, len(panels))
  down = -(-len(panels) // columns)
  figure = Figure(figsize=(5.5 * columns, 3.4 * down), layout='constrained')
  FigureCanvasAgg(figure)
  for place, (name, lines) in enumerate(panels, start=1):
    _draw_panel(figure.add_subplot(down, columns, place), name, lines, rows)
  figure.suptitle(title)
  _save_figure(figure, pathlib.Path(png_path))
  return True


def _draw_panel(axes: Any, name: str, lines: Sequence[tuple[str, str | None, dict[str, Any]]], rows: Sequence[Mapping[str, Any]]) -> None:
  for metric, label, style in lines:
    steps, values = zip(*series(rows, metric))
    axes.plot(steps, values, label=label, **style)
    low, high = (series(rows, bound) for bound in INTERVALS.get(metric, ('', '')))
    if len(low) == len(high) == len(steps):
      axes.fill_between(steps, [v for _, v in low], [v for _, v in high], color=style['color'], alpha=0.15, linewidth=0)
    if metric == SMOOTHED and len(values) >= 8:
      axes.plot(steps, trailing_mean(values, 8), color='0.35', label='training, mean of 8 steps')
  axes.set_title(name, fontsize=10)
  began = min((row['step'] for row in rows if 'policy_step' in row), default=None)
  axes.set_xlabel('learner step' if began is None else f'learner step, of all stages (RL begins at {began})')
  axes.grid(alpha=0.3)
  if name == 'Success':
    axes.set_ylim(-0.02, 1.02)
  if any(label for _, label, _ in lines):
    axes.legend(fontsize=8)


def _save_figure(figure: Any, path: pathlib.Path) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  temporary = path.with_name(f'.{path.stem}.{os.getpid()}.tmp.png')
  try:
    figure.savefig(temporary, dpi=120)
    os.replace(temporary, path)
  finally:
    temporary.unlink(missing_ok=True)


def series(rows: Sequence[Mapping[str, Any]], metric: str) -> list[tuple[int, float]]:
  """(step, value) of every row that has a finite value of `metric`, in the order of the rows."""
  values = ((row['step'], row.get(metric)) for row in rows)
  return [(step, value) for step, value in values if isinstance(value, (int, float)) and math.isfinite(value)]


def trailing_mean(values: Sequence[float], window: int) -> list[float]:
  """Mean of each value and the up to `window - 1` before it."""
  return [float(np.mean(values[max(0, i + 1 - window):i + 1])) for i in range(len(values))]


# --- Trajectories --------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Segment:
  """A run of tokens of one turn that all come from the policy, or all from elsewhere."""

  source: str  # 'prompt', 'policy' or 'environment'.
  turn: int
  text: str
  start: int
  stop: int  # Positions start <= t < stop of the rollout.
  versions: tuple[int, int] | None  # Oldest and newest version that drew a token; None off the actions.


def segments(rollout: Rollout, decode: Decode) -> Iterator[Segment]:
  """Cuts a rollout where the source or the turn changes; the segments joined cover every token once.

  Not those of `Rollout.segment_starts`: where one of these begins, the history as it is shown from there on is a 'prompt' again.
  """
  mask, turn = rollout.action_mask, rollout.turn
  cuts = [0, *(np.flatnonzero((mask[1:] != mask[:-1]) | (turn[1:] != turn[:-1])) + 1).tolist(), rollout.length]
  acted = False
  for start, stop in zip(cuts, cuts[1:]):
    if start == stop:
      continue
    is_action = bool(mask[start])
    acted = is_action or (acted and start not in rollout.segment_starts)
    drawn = rollout.policy_version[start:stop]
    yield Segment(
        source='policy' if is_action else 'environment' if acted else 'prompt', turn=int(turn[start]),
        text=decode([int(t) for t in rollout.tokens[start:stop]]), start=start, stop=stop,
        versions=(int(drawn.min()), int(drawn.max())) if is_action else None)


def trajectory_text(rollout: Rollout, decode: Decode) -> str:
  """One trajectory as Markdown: a heading with how it ended, then who wrote what and with which version."""
  numbers = ', '.join(f'{name} {value:g}' for name, value in sorted(rollout.metrics.items()))
  head = f'### Prompt {rollout.prompt_id}, attempt {rollout.attempt}: reward {rollout.total_reward:g}'
  n = len(rollout.segment_starts)
  facts = (
      f'{rollout.environment}; {rollout.ending} ({rollout.stop_reason}); {rollout.length} tokens, {rollout.num_actions} of them '
      f'sampled; turns: {int(rollout.turn[-1]) + 1}' + (f'; segments: {n}' if n > 1 else '') + (f'; {numbers}' if numbers else ''))
  lines = [head, '', facts, '']
  for segment in segments(rollout, decode):
    who = segment.source
    if segment.versions is not None:
      oldest, newest = segment.versions
      who += f', version {oldest}' if oldest == newest else f', versions {oldest} to {newest}'
    text = ''.join(c if c.isprintable() or c in '\n\t' else repr(c)[1:-1] for c in segment.text)
    fence = '`' * max(3, 1 + _longest_run(text, '`'))
    lines += [f'**{who}**', '', fence + 'text', text.rstrip('\n'), fence, '']
  return '\n'.join(lines)


def _longest_run(text: str, character: str) -> int:
  longest = run = 0
  for c in text:
    run = run + 1 if c == character else 0
    longest = max(longest, run)
  return longest


def trajectory_data(rollout: Rollout, decode: Decode) -> dict[str, Any]:
  """One trajectory as JSON data: every field of the rollout, and its text by segment."""
  return {**plain(rollout), 'segments': [plain(s) for s in segments(rollout, decode)]}


def write_samples(folder: str | os.PathLike[str], name: str, rollouts: Sequence[Rollout], decode: Decode, *, title: str) -> None:
  """Writes `rollouts` to `folder` twice: `name`.md to read, and `name`.jsonl as data, one rollout a line."""
  folder = pathlib.Path(folder)
  body = '\n'.join(trajectory_text(rollout, decode) for rollout in rollouts)
  write_text(folder / f'{name}.md', f'# {title}\n\n{body or "No rollouts."}\n')
  write_bytes(folder / f'{name}.jsonl', b''.join(json_line(trajectory_data(rollout, decode)) for rollout in rollouts))
