"""The RL stage: rollouts and learner side by side, under the wall clock or under virtual time.

    rollouts thread: RolloutEngine, Sampler, PromptStream        main thread: RolloutQueue.take -> Learner.update -> ParamStore.publish

1. The engine starts rollouts as tickets allow and puts finished ones into the queue.
2. The main thread takes the first `batch_size` of them, updates, and publishes the new policy as the next version.
3. The sampler takes it up between two decode chunks.
4. At a publish the checkpoint is taken: under the wall clock the rollouts thread is asked to stand still between two chunks.

Under virtual time both sides run in the main thread; a loop advances the clock over chunks, environment calls and updates. An update
computes when it starts and is published when its time is up, at the first chunk boundary.
"""

from __future__ import annotations

import dataclasses
import math
import queue
import threading
import time
from typing import Any, Callable

import jax

from sao_jax import report
from sao_jax.batching import padding_fraction
from sao_jax.clock import VirtualCalls, VirtualClock, WallClock
from sao_jax.data import PromptStream
from sao_jax.environments.base import Task, is_failure
from sao_jax.evaluation import Stopped
from sao_jax.metrics import Timers, rollout_metrics
from sao_jax.param_store import ParamStore
from sao_jax.rollout_queue import RolloutQueue
from sao_jax.rollouts import Admission, FailureShare, RolloutEngine
from sao_jax.run import Run
from sao_jax.types import Rollout, Stat
from sao_jax.workers import DeviceTurns, EnvironmentPool, WorkerGroup

SHUTDOWN_S = 10.0  # For threads to leave at the end.
GUARD = 'disallow'  # Nothing goes to or from a device but by device_put and device_get.
IDLE_S = 0.02  # Longest sleep of the rollouts thread while every session waits for its environment.


class TrainingFlow:
  """Tickets and prompts in, finished rollouts to the queue; implements `rollouts.Flow`. Owned by the rollouts thread.

  Attributes:
    ended: the stream had no prompt left when it was last asked; may be read from any thread.
  """

  def __init__(self, rollout_queue: RolloutQueue, stream: PromptStream):
    self._queue, self._stream = rollout_queue, stream
    self.ended = False
    self.drop = rollout_queue.drop
    self.set_oldest = rollout_queue.set_oldest
    self.overdue = rollout_queue.overdue_running

  def admit(self, version: int) -> Admission | None:
    self.ended = False  # Before prompts come back: whoever sees that none waits must not see the old answer.
    for prompt_id, attempt in self._queue.returned_prompts():
      self._stream.give_back(prompt_id, attempt)
    self.ended = self._stream.exhausted
    if self.ended:
      return None
    ticket = self._queue.ticket(version)
    if ticket is None:
      return None
    prompt_id, attempt, task = self._stream.next()
    return Admission(ticket, prompt_id, attempt, task)

  def finish(self, rollout: Rollout, version: int) -> bool:
    taken = self._queue.put(rollout, version)
    if taken:
      self._stream.record(rollout.prompt_id, rollout.total_reward, rollout.metrics.get('success', 0.0) >= 1.0)
    return taken

  def task_of(self, prompt_id: int, attempt: int) -> Task:
    return self._stream.task(prompt_id, attempt)


@dataclasses.dataclass(frozen=True)
class Update:
  """A learner step whose result is computed but not yet published."""

  rollouts: list[Rollout]
  metrics: dict[str, Any]
  trains_policy: bool
  padding: float  # Share of the batch's positions without a token.


class ReinforcementLearning:
  """Builds the RL stage, taking up its saved state if there is one; `run` then trains to the last step."""

  def __init__(self, run: Run):
    self.run_state, self.config, self.parts = run, run.config, run.parts
    c, saved = run.config, run.progress.rl
    self.total = c.learner.value_warmup_steps + c.rl.policy_steps
    elapsed = float(saved['elapsed_s']) if saved else 0.0
    self.virtual = c.clock.kind == 'virtual'
    self.clock = VirtualClock(c.clock, c.seed, elapsed) if self.virtual else WallClock(elapsed)
    self.queue = RolloutQueue(
        capacity=c.queue.capacity, batch_size=c.learner.batch_size, max_staleness=c.queue.max_staleness, overdue=c.queue.overdue,
        truncation=c.algorithm.truncation, vocab_size=self.parts.model.vocab_size, max_length=self.parts.max_length,
        clock=self.clock.now)
    self.stream = PromptStream(
        self.parts.environment, seed=c.seed, split='train', epochs=c.data.epochs, shuffle=c.data.shuffle, skip_solved=c.data.skip_solved,
        host=jax.process_index(), hosts=jax.process_count())
    self.store = ParamStore(self.parts.convert, self.parts.learner.policy_params(run.state), version=run.progress.version)
    self.sampler = self.parts.make_sampler(self.store.latest(), seed=c.seed)
    self._given = self.store.version  # Version of the newest snapshot that the sampler was given.
    self.turns = DeviceTurns(self.parts.shared_devices)
    self.calls = VirtualCalls(self.clock) if self.virtual else EnvironmentPool(c.task.workers, c.task.step_timeout_s)
    self.flow = TrainingFlow(self.queue, self.stream)
    self.engine = self.parts.make_engine(self.sampler, self.calls, self.flow, self.clock.now)
    self.chunks = int(saved['chunks']) if saved else 0
    self._timers = Timers(self.clock.now)
    self._sampled = self._counters()
    self._errored = 0
    self._quarantined = FailureShare(c.task.max_failure_share)
    self._published_s: float | None = None  # Duration of this step's publish.
    self._commands: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]]] = queue.SimpleQueue()
    self._timers.add('sampler_wait', 0.0)  # So that the share is there from the first row on.
    if saved:
      self.queue.restore(saved['queue'])
      self.stream.restore(saved['stream'])
      self.engine.restore(saved['engine'], self.flow.task_of)
      self._errors_since()  # Those before the checkpoint were reported.

  def run(self) -> None:
    """Trains to the last step, or until the prompts end. On any error threads are stopped first; the first cause goes up."""
    try:
      if self.run_state.progress.stage_step < self.total:
        self.parts.progress_bar.update('rl', self.run_state.progress.stage_step, self.total)
        self.parts.progress_bar.line('rl: compiling sampler and learner')
        self.sampler.warm_up()
        self.parts.learner.warm_up('rl')
        self._sampled = self._counters()
        with jax.transfer_guard(GUARD):
          self._evaluate_if_due()
          self._run_virtual() if self.virtual else self._run_wall()
      self.run_state.flush_metrics()
      self._keep_state()
      if self.run_state.progress.stage_step < self.total:
        self.parts.progress_bar.line(
            f'the prompts ended after {self.run_state.progress.stage_step} of {self.total} steps (data.epochs={self.config.data.epochs})')
    finally:
      self.engine.close()
      if not self.virtual and not self.calls.close(SHUTDOWN_S / 2):
        self.parts.progress_bar.line('some calls of the environment hang; they end with the process')

  # --- One learner step --------------------------------------------------------------------------------------------------------

  def start_update(self, rollouts: list[Rollout]) -> Update:
    """Computes the next state from a batch."""
    c, progress = self.config, self.run_state.progress
    batch = self.parts.make_batch(rollouts, c.learner.batch_size)
    trains_policy = progress.stage_step >= c.learner.value_warmup_steps
    with self.turns.turn():
      self.run_state.state, metrics = self.parts.learner.update(
          self.run_state.state, batch, version=progress.version, train_policy=trains_policy)
      if self.turns.enabled:
        jax.block_until_ready(self.run_state.state)  # The turn lasts as long as the work.
    return Update(rollouts, metrics, trains_policy, padding_fraction(batch))

  def finish_update(self, update: Update) -> None:
    """Publishes, settles the tickets, logs, and saves or evaluates when it is time."""
    progress = self.run_state.progress
    version = progress.version
    jax.block_until_ready(self.run_state.state)  # So that the time of the publish is its own.
    if update.trains_policy:
      with self.turns.turn():
        self.store.publish(self.parts.learner.policy_params(self.run_state.state))
      progress.version = self.store.version
    self._published_s = self.store.publish_s if update.trains_policy else None
    for _ in update.rollouts:
      self._quarantined.add('')
    self.queue.trained([r.ticket for r in update.rollouts], version_advanced=update.trains_policy)
    self.parts.ledger.write(progress.step + 1, version, update.rollouts)
    self._report_quarantine()
    numbers = {
        **rollout_metrics(update.rollouts, errored=self._errors_since()), **self._host_metrics(),
        'batch/padding_fraction': Stat(update.padding, 1.0)}
    self.run_state.step_done(update.metrics, numbers, total=self.total)
    every = self.config.evaluation.every
    if every and update.trains_policy and progress.version % every == 0 and progress.stage_step < self.total:
      progress.evaluation_due = f'step {progress.version}'
      self._evaluate_if_due()
    if self.run_state.save_due and progress.stage_step < self.total:
      self._save()
      self.run_state.stop_if_asked()

  def _evaluate_if_due(self) -> None:
    """Held-out success between two steps. Where the run is asked to stop meanwhile, it is resumed with this evaluation."""
    progress = self.run_state.progress
    if not progress.evaluation_due:
      return
    try:
      with self.turns.turn():
        self.run_state.evaluate(progress.evaluation_due, self.config.evaluation.during_prompts)
    except Stopped:
      self._save()
      self.run_state.stop_if_asked()
      raise
    progress.evaluation_due = ''

  def _errors_since(self) -> int:
    """Rollouts that failures of their environment cost since the last call."""
    dropped = self.queue.accounting()['dropped']
    before, self._errored = self._errored, sum(n for reason, n in dropped.items() if is_failure(reason))
    return self._errored - before

  def _counters(self) -> dict[str, float]:
    return {**self.sampler.stats(), 'clock_s': time.monotonic()}

  def _host_metrics(self) -> dict[str, Any]:
    before, self._sampled = self._sampled, self._counters()
    delta = {name: value - before[name] for name, value in self._sampled.items()}
    return {
        **self.queue.metrics(), 'policy_step': float(self.run_state.progress.version),
        'sampler/tokens_per_s': Stat(delta['tokens_drawn'], delta['clock_s']),
        'sampler/slot_occupancy': Stat(delta['tokens_drawn'], delta['slot_steps_total']),
        'sampler/tokens_recomputed': Stat(delta['tokens_recomputed'], 1.0), 'sampler/evictions': Stat(delta['evictions'], 1.0),
        'sampler/params_stall_s': Stat(delta['params_stall_s'], delta['updates']),
        'environment/close_failures': float(self.engine.close_failures), **self._timers.metrics(),
        'time/publish_s': Stat(self._published_s or 0.0, float(self._published_s is not None)), 'time/run_s': self.clock.now()}

  def _report_quarantine(self) -> None:
    """Keeps what failed the queue's check, with the reason, in the workdir. Raises RuntimeError where too many did."""
    for rollout, reason in self.queue.drain_quarantine():
      self._quarantined.add(f'quarantined, {reason}')
      self.parts.progress_bar.line(f'quarantined rollout of prompt {rollout.prompt_id}: {reason}')
      report.append_line(self.parts.workdir / 'rollouts' / 'quarantine.jsonl', {'reason': reason, **report.plain(rollout)})

  # --- Saving ------------------------------------------------------------------------------------------------------------------

  def state(self) -> dict[str, Any]:
    """State of the stage; nothing moves while it is taken."""
    return {
        'queue': self.queue.state(), 'stream': self.stream.state(), 'engine': self.engine.state(), 'chunks': self.chunks,
        'elapsed_s': self.clock.now(), 'accounting': self.queue.accounting()}

  def _keep_state(self) -> None:
    self.run_state.progress.rl = self.state()
    if rows := self.stream.difficulty_rows():
      report.write_bytes(self.parts.workdir / 'difficulty.jsonl', b''.join(map(report.json_line, rows)))

  def _prompts_ended(self) -> bool:
    """Whether no rollout is left that could still reach the queue. The order of the reads matters, see `TrainingFlow.admit`."""
    return not self.queue.prompts_to_return and self.flow.ended and not self.engine.in_flight

  def _save(self) -> None:
    self._standing_still(self._keep_state)
    self.run_state.save()

  def _standing_still(self, function: Callable[[], Any]) -> None:
    """Runs `function` while no rollout moves: in the rollouts thread between two chunks, or here if there is no such thread."""
    if self._group is None:
      function()
      return
    done: queue.SimpleQueue[Any] = queue.SimpleQueue()
    self._commands.put((function, done))
    while True:
      try:
        done.get(timeout=0.5)
        return
      except queue.Empty:
        self._group.check()

  _group: WorkerGroup | None = None

  # --- Wall clock --------------------------------------------------------------------------------------------------------------

  def _run_wall(self) -> None:
    self._group = group = WorkerGroup()
    group.start('rollouts', self._rollouts_loop)
    try:
      while self.run_state.progress.stage_step < self.total and (rollouts := self._take(group)) is not None:
        self.finish_update(self.start_update(rollouts))
    finally:
      alive = group.close(SHUTDOWN_S)
      self.queue.close()
      self._group = None
      if alive:
        self.parts.progress_bar.line(f'still alive after {SHUTDOWN_S:.0f} s: {", ".join(alive)}')

  def _take(self, group: WorkerGroup) -> list[Rollout] | None:
    """The next batch; None when the prompts have ended and what is left makes none."""
    start = time.monotonic()
    while True:
      group.check()
      ended = self._prompts_ended()  # Before the last look into the queue.
      rollouts = self.queue.take(self.run_state.progress.version, timeout_s=0.5)
      if rollouts is not None or (ended and self._prompts_ended()):
        return rollouts
      self._report_quarantine()
      if self.run_state.stop.is_set():
        self._save()
        self.run_state.stop_if_asked()
      self.parts.progress_bar.waiting(time.monotonic() - start, f'{self.engine.in_flight} rollouts in flight')

  def _rollouts_loop(self, stop: threading.Event) -> None:
    with jax.transfer_guard(GUARD):  # It holds for one thread.
      while not stop.is_set():
        self._rollouts_iteration()

  def _rollouts_iteration(self) -> None:
    while not self._commands.empty():
      function, done = self._commands.get()
      done.put(function())
    taken = self._take_up()
    moved = self.engine.before_chunk()
    if taken or self.sampler.busy:
      with self.turns.turn():
        completions = self.sampler.step()
        if self.turns.enabled:
          self.sampler.block_until_ready()  # A step that only prefills leaves work under way.
      self.engine.after_chunk(completions)
    elif not moved:
      with self._timers.measure('sampler_wait'):
        self.calls.wait(IDLE_S)

  def _take_up(self) -> bool:
    """Gives the sampler the newest snapshot; False if it has it."""
    snapshot = self.store.latest()
    if snapshot.version == self._given:
      return False
    self.sampler.update(snapshot)
    self._given = snapshot.version
    return True

  # --- Virtual time ------------------------------------------------------------------------------------------------------------

  def _run_virtual(self) -> None:
    clock, progress = self.clock, self.run_state.progress
    update, update_ends = None, math.inf
    while progress.stage_step < self.total:
      if update is not None and clock.now() >= update_ends:
        self.finish_update(update)
        update, update_ends = None, math.inf
        continue
      if update is None and (rollouts := self.queue.take(progress.version, timeout_s=0.0)) is not None:
        step = progress.stage_step
        update = self.start_update(rollouts)
        update_ends = clock.now() + clock.duration('update', step) + clock.duration('publish', step)
      self._take_up()
      moved = self.engine.before_chunk()
      if self.sampler.busy:
        completions = self.sampler.step()
        clock.advance(clock.now() + clock.duration('chunk', self.chunks))
        self.chunks += 1
        self.engine.after_chunk(completions)
      elif not moved:
        until = min(self.calls.next_due(), update_ends)
        if math.isinf(until) and self._prompts_ended():
          return
        if math.isinf(until):
          raise RuntimeError(f'Nothing can happen any more: {self.engine.in_flight} rollouts in flight, queue {self.queue.metrics()}.')
        self._timers.add('sampler_wait', max(0.0, until - clock.now()))
        clock.advance(until)
