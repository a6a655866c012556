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
import sys
import time
from typing import Any, Callable, Iterator, Mapping, Sequence, TextIO

import numpy as np
from tqdm import tqdm

from sao_jax.types import Rollout

PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'chex', 'numpy', 'ml_collections')
Decode = Callable[[list[int]], str]


# --- Progress ------------------------------------------------------------------------------------------------------------------


class Progress:
  """A bar on a terminal; elsewhere (a log file, CI) a plain line every few seconds, and one at the end.

  Args:
    total: units of work in all.
    label: name of the stage.
    enabled: False writes nothing at all.
    stream: where to write; None for standard error.
    every_s: seconds between plain lines.
  """

  def __init__(self, total: int, label: str, *, enabled: bool, stream: TextIO | None = None, every_s: float = 5.0):
    self._stream = sys.stderr if stream is None else stream
    self._total, self._label, self._enabled, self._every_s = total, label, enabled, every_s
    self._done, self._numbers, self._written = 0, '', -1
    self._started = self._last = time.monotonic()
    self._bar = None
    if enabled and self._stream.isatty():
      self._bar = tqdm(total=total, desc=label, file=self._stream, dynamic_ncols=True, leave=True)

  def update(self, done: int, **numbers: float) -> None:
    """Reports that `done` units are finished so far, with the newest `numbers` beside it. A NaN is shown as a dash."""
    self._done = done
    self._numbers = ' '.join(f'{name} {_short(value)}' for name, value in numbers.items())
    if self._bar is not None:
      self._bar.n = done
      self._bar.set_postfix_str(self._numbers, refresh=False)
      self._bar.refresh() if done >= self._total else self._bar.update(0)
    elif self._enabled and time.monotonic() - self._last >= self._every_s:
      self._line()

  def note(self, text: str) -> None:
    """Writes one line that stays, above the bar if there is one."""
    if self._bar is not None:
      self._bar.write(text, file=self._stream)
    elif self._enabled:
      print(text, file=self._stream, flush=True)

  def close(self) -> None:
    """Leaves the last state on the screen or in the log."""
    if self._bar is not None:
      self._bar.refresh()
      self._bar.close()
      self._bar = None
    elif self._enabled and self._written != self._done:
      self._line()
    self._enabled = False

  def __enter__(self) -> 'Progress':
    return self

  def __exit__(self, *unused) -> None:
    self.close()

  def _line(self) -> None:
    self._last = time.monotonic()
    self._written = self._done
    seconds = self._last - self._started
    print(f'{self._label}: {self._done}/{self._total} after {seconds:.0f} s {self._numbers}'.rstrip(), file=self._stream, flush=True)


def _short(value: float) -> str:
  return f'{value:.3g}' if math.isfinite(value) else '-'


# --- Files ---------------------------------------------------------------------------------------------------------------------


def write_text(path: str | os.PathLike[str], text: str) -> None:
  """Writes `text` to `path` as UTF-8, whole or not at all; folders are made. A lone surrogate is written as its escape.

  Raises: OSError, naming the path, where it cannot be written.
  """
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  temporary = path.with_name(f'.{path.name}.{os.getpid()}.tmp')
  try:
    temporary.write_bytes(text.encode('utf-8', 'backslashreplace'))
    os.replace(temporary, path)
  finally:
    temporary.unlink(missing_ok=True)


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


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """Rows of a `metrics.jsonl`. A last line cut short by a killed process is left out; any other bad line is a ValueError."""
  lines = pathlib.Path(path).read_text(encoding='utf-8').split('\n')
  rows = []
  for number, line in enumerate(lines, start=1):
    if not line.strip():
      continue
    try:
      rows.append(json.loads(line))
    except json.JSONDecodeError as error:
      if number == len(lines):  # No newline after it: the process died while writing.
        break
      raise ValueError(f'{path}, line {number} is not JSON: {error}.') from error
  return rows


# --- Learning curve ------------------------------------------------------------------------------------------------------------

# Panels of the figure: title, then (metric, label, style); a panel without data is left out.
PANELS = (
    ('Success', (
        ('reward/success', 'training rollouts', {'color': '0.75', 'linewidth': 1.0}),
        ('evaluation/success_temperature_1', 'held out, temperature 1', {'color': 'tab:blue', 'marker': 'o'}),
        ('evaluation/success_greedy', 'held out, greedy', {'color': 'tab:green', 'marker': 's'}))),
    ('Explained variance of the value model', (('value/explained_variance', None, {'color': 'tab:purple'}),)),
    ('Share of action tokens outside the band', (
        ('dis/above', 'above', {'color': 'tab:red'}), ('dis/below', 'below', {'color': 'tab:orange'}))),
    ('Staleness in versions', (
        ('queue/staleness_max', 'max', {'color': '0.6'}), ('queue/staleness_mean', 'mean', {'color': 'tab:blue'}))),
)
SMOOTHED = 'reward/success'


def learning_curve(metrics_path: str | os.PathLike[str], png_path: str | os.PathLike[str], *, title: str) -> bool:
  """Draws the learning curve of a run from its `metrics.jsonl`. Returns False, and draws nothing, where there is no data yet."""
  from matplotlib.backends.backend_agg import FigureCanvasAgg  # No pyplot: no global state, no display.
  from matplotlib.figure import Figure

  rows = read_metrics(metrics_path)
  panels = [(name, [(series(rows, metric), metric, label, style) for metric, label, style in lines]) for name, lines in PANELS]
  panels = [(name, [line for line in lines if line[0]]) for name, lines in panels]
  panels = [panel for panel in panels if panel[1]]
  if not panels:
    return False
  columns = min(2, len(panels))
  figure = Figure(figsize=(5.5 * columns, 3.4 * -(-len(panels) // columns)), layout='constrained')
  FigureCanvasAgg(figure)
  for place, (name, lines) in enumerate(panels, start=1):
    axes = figure.add_subplot(-(-len(panels) // columns), columns, place)
    for points, metric, label, style in lines:
      steps, values = zip(*points)
      axes.plot(steps, values, label=label, **style)
      if metric == SMOOTHED and len(values) >= 8:
        axes.plot(steps, trailing_mean(values, 8), color='0.35', label='training, mean of 8 steps')
    axes.set_title(name, fontsize=10)
    axes.set_xlabel('learner step')
    axes.grid(alpha=0.3)
    if name == 'Success':
      axes.set_ylim(-0.02, 1.02)
    if any(line[2] for line in lines):
      axes.legend(fontsize=8)
  figure.suptitle(title)
  _save_figure(figure, pathlib.Path(png_path))
  return True


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
  """Cuts a rollout where the source or the turn changes; the segments joined cover every token once."""
  mask, turn = rollout.action_mask, rollout.turn
  cuts = [0, *(np.flatnonzero((mask[1:] != mask[:-1]) | (turn[1:] != turn[:-1])) + 1).tolist(), rollout.length]
  acted = False
  for start, stop in zip(cuts, cuts[1:]):
    if start == stop:
      continue
    is_action = bool(mask[start])
    acted |= is_action
    drawn = rollout.policy_version[start:stop]
    yield Segment(
        source='policy' if is_action else 'environment' if acted else 'prompt', turn=int(turn[start]),
        text=decode([int(t) for t in rollout.tokens[start:stop]]), start=start, stop=stop,
        versions=(int(drawn.min()), int(drawn.max())) if is_action else None)


def trajectory_text(rollout: Rollout, decode: Decode) -> str:
  """One trajectory as Markdown: a heading with how it ended, then who wrote what and with which version."""
  numbers = ', '.join(f'{name} {value:g}' for name, value in sorted(rollout.metrics.items()))
  head = f'### Prompt {rollout.prompt_id}, attempt {rollout.attempt}: reward {rollout.total_reward:g}'
  facts = (
      f'{rollout.environment}; {rollout.ending} ({rollout.stop_reason}); {rollout.length} tokens, {rollout.num_actions} of them '
      f'sampled; turns: {int(rollout.turn[-1]) + 1}' + (f'; {numbers}' if numbers else ''))
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
  data = [json.dumps(trajectory_data(rollout, decode), ensure_ascii=False, allow_nan=False) for rollout in rollouts]
  write_text(folder / f'{name}.jsonl', ''.join(line + '\n' for line in data))
