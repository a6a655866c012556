"""A run in progress: its parts, where it stands, and what happens after every learner step.

`Run` belongs to the main thread. It writes metrics one step late, so that fetching them does not hold up the device; before a checkpoint
it catches up, so that parameters of a step with a non-finite loss are never saved.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any, Mapping

from sao_jax import report
from sao_jax.evaluation import Stopped
from sao_jax.metrics import StepMetrics
from sao_jax.parts import Parts, Progress
from sao_jax.updates import Metrics, TrainState


class Run:
  """The state of a run and its bookkeeping."""

  def __init__(self, parts: Parts, state: TrainState, progress: Progress):
    self.parts, self.state, self.progress = parts, state, progress
    self.stop, self.config = parts.stop, parts.config
    self._pending: tuple[int, str, Metrics, dict[str, Any]] | None = None  # The last step, its numbers still on the device.
    self._collected = StepMetrics()
    self._collected_to = 0, ''  # Step and stage of the newest numbers in there.
    self._stage_started = time.monotonic()

  # --- Metrics -----------------------------------------------------------------------------------------------------------------

  def step_done(self, device: Metrics, host: Mapping[str, Any] | None = None, *, total: int) -> None:
    """Counts a learner step of the current stage and logs the step before it: what it left on the `device`, and numbers of the `host`."""
    self.progress.stage_step += 1
    self.progress.step += 1
    self.flush_metrics()
    self._pending = (self.progress.step, self.progress.stage, device, dict(host or {}))
    self.parts.progress_bar.update(self.progress.stage, self.progress.stage_step, total)

  def flush_metrics(self) -> None:
    """Fetches and logs the last step's numbers. Raises FloatingPointError, naming step and metric, where one is not finite."""
    if self._pending is None:
      return
    step, stage, device, host = self._pending
    self._pending = None
    self._collected.add({**self.parts.learner.fetch(device, step), **host})
    self._collected_to = step, stage
    if step % self.config.logging.every == 0:
      self._write_row()

  def close_metrics(self) -> None:
    """Logs everything so far, also where `logging.every` steps are not full: at the end of a stage, and before a checkpoint."""
    self.flush_metrics()
    self._write_row()

  def _write_row(self) -> None:
    row = self._collected.collect()
    if row:
      step, stage = self._collected_to
      self.parts.writer.write(step, row)
      self.parts.progress_bar.show(stage, row)

  # --- Evaluation --------------------------------------------------------------------------------------------------------------

  def evaluate(self, name: str, prompts: int) -> dict[str, Any]:
    """Evaluates the policy on held-out prompts, writes numbers and sample trajectories; `name` is 'before', 'after' or 'step N'."""
    self.flush_metrics()
    policy = self.parts.learner.policy_params(self.state)
    found = self.parts.evaluate(policy, version=self.progress.version, prompts=prompts, label=name)
    numbers: dict[str, float] = {}
    for temperature, result in found.items():
      numbers.update({
          f'evaluation/success_{temperature}': result.success, f'evaluation/success_low_{temperature}': result.low,
          f'evaluation/success_high_{temperature}': result.high, f'evaluation/reward_{temperature}': result.reward,
          f'evaluation/truncated_fraction_{temperature}': result.truncated,
          **{f'evaluation/{k}_{temperature}': v for k, v in result.metrics.items() if k != 'success'}})
    self.parts.writer.write(self.progress.step, numbers)
    report.write_samples(
        self.parts.workdir / 'rollouts', f'{self.progress.step:06d}_{name.replace(" ", "_")}',
        found['temperature_1'].rollouts[:self.config.logging.sample_rollouts], self.parts.tokenizer.decode,
        title=f'Held-out rollouts at temperature 1, {name}')
    self.parts.progress_bar.line(
        f'held-out success {name}: {found["temperature_1"].success:.3f} at temperature 1, '
        f'{found["greedy"].success:.3f} greedy (n={found["greedy"].n})')
    return {'policy_step': self.progress.version, 'n': found['greedy'].n, 'success_temperature_1': found['temperature_1'].success,
            'success_greedy': found['greedy'].success, **{k: v.summary() for k, v in found.items()}}

  # --- Saving ------------------------------------------------------------------------------------------------------------------

  @property
  def save_due(self) -> bool:
    return self.stop.is_set() or self.progress.step % self.config.checkpoint.every == 0

  def save_if_due(self) -> None:
    """What follows a step. Raises Stopped where the run was asked to stop."""
    if self.save_due:
      self.save()
      self.stop_if_asked()

  def stop_if_asked(self) -> None:
    """Raises Stopped, when the save before it is on disk, where the run was asked to stop."""
    if self.stop.is_set():
      self.parts.checkpointer.wait()
      raise Stopped(f'stopped after step {self.progress.step}, in stage {self.progress.stage}')

  def save(self) -> None:
    """Saves everything under the next number; returns when the arrays are copied, the files are written behind."""
    self.close_metrics()
    self.progress.saves += 1
    self.progress.metric_rows, self.progress.ledger_rows = self.parts.writer.rows, self.parts.ledger.rows
    self._count_seconds()
    host = {field.name: getattr(self.progress, field.name) for field in dataclasses.fields(self.progress)}
    self.parts.checkpointer.save(self.progress.saves, self.state, host)

  def enter(self, stage: str) -> None:
    """Ends the current stage and begins `stage` with fresh optimizer states."""
    self.close_metrics()
    self._count_seconds()
    self.progress.stage, self.progress.stage_step = stage, 0
    if stage != 'done':
      self.state = self.parts.learner.begin_stage(self.state, stage)
    self.save()

  def _count_seconds(self) -> None:
    if self.progress.stage != 'done':
      self.progress.seconds[self.progress.stage] = self.progress.seconds.get(self.progress.stage, 0.0) + self._lap()

  def _lap(self) -> float:
    now = time.monotonic()
    seconds, self._stage_started = now - self._stage_started, now
    return seconds
