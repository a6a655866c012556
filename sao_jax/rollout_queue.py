"""The bounded queue between rollouts and the learner: tickets, the staleness rule, accounting.

    ticket() --> running --put()--> queued --take()--> taken --trained()--> trained
                    |                  |
                  drop()           overdue
                    v                  v
                 dropped[reason]    dropped['overdue']

Staleness of a rollout = version that trains it - version of its oldest action token; bound = `max_staleness` (S). So a rollout with oldest
version o has the deadline o + S: the last version at which it may be trained. A step trains B = `batch_size` rollouts and moves the version
on by at most one; hence all that is outstanding can be trained in time, at version v, exactly when for every deadline d

    (outstanding with a deadline <= d)  <=  B * (d - v + 1)                                         (earliest-deadline condition)

The queue keeps that condition true at all times:
  - a ticket has a lower bound of its oldest version (`ticket(version)`, raised by `set_oldest`), so a pessimistic deadline. It is granted
    only if the condition still holds with it; while a step is under way, for the version after that step. With at most (S + 1) * B
    outstanding and a sampler that draws with the newest version this never refuses more than the count does.
  - a step at v must train at least (outstanding with deadline <= d) - B * (d - v) of those with deadline <= d, for every d. `take` puts
    these first, the rest of the batch comes in order of completion. If too few of them have finished, what happens is `overdue`:
      'wait'  the step is held until they have finished or been dropped. Nothing is ever overdue, and no slow rollout is starved.
      'drop'  the step goes on. What is past its deadline is dropped, and its prompt handed back through `returned_prompts`, once.
      'use'   the step goes on and trains what is past its deadline later; the bound is a metric only.

Every ticket ends exactly once, and `accounting` adds up after every operation. A run of which nothing can be trained on (all rollouts
truncated under truncation 'drop', all quarantined, all overdue) ends with an error that says so. All methods may be called from any thread.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Callable, Iterable, Mapping, Sequence

import numpy as np

from sao_jax.rollout_check import check_rollout
from sao_jax.types import Rollout, Stat

OVERDUE = ('wait', 'drop', 'use')
TRUNCATION = ('bootstrap', 'zero', 'drop')
FRUITLESS = 256  # Rollouts that may end one after the other without one to train on; at least four batches of them.
QUARANTINE_KEPT = 64  # Quarantined rollouts held until somebody drains them; the count goes on beyond.


def forced_counts(deadlines: Iterable[int], version: int, batch_size: int) -> dict[int, int]:
  """How many rollouts the step at `version` must train so that later steps, one version each, can train the rest in time.

  Args:
    deadlines: of everything outstanding; those before `version` count as due at `version`.
    version: of the step.
    batch_size: rollouts of one step.

  Returns:
    {d: least number of rollouts with a deadline <= d to train now}, ascending in d, only where that number is positive.
  """
  ordered = sorted(max(d, version) for d in deadlines)
  counts = {d: i + 1 for i, d in enumerate(ordered)}  # The last one of equal deadlines counts them all.
  return {d: n - batch_size * (d - version) for d, n in counts.items() if n > batch_size * (d - version)}


class RolloutQueue:
  """See the module's text. `capacity` bounds the finished rollouts held: a full queue grants no ticket and refuses `put`, unless what it
  holds cannot make the next step (see `put`)."""

  def __init__(
      self, *, capacity: int, batch_size: int, max_staleness: int, overdue: str, truncation: str, vocab_size: int, max_length: int,
      clock: Callable[[], float] = time.monotonic,
  ):
    if batch_size < 1 or max_staleness < 0:
      raise ValueError(f'batch_size must be at least 1 and max_staleness at least 0, got {batch_size} and {max_staleness}.')
    if capacity < batch_size:
      raise ValueError(f'queue.capacity must hold a batch of {batch_size}, got {capacity}; raise it, or lower learner.batch_size.')
    if overdue not in OVERDUE or truncation not in TRUNCATION:
      raise ValueError(f'overdue must be one of {OVERDUE} and truncation one of {TRUNCATION}, got {overdue!r} and {truncation!r}.')
    self._capacity, self._batch_size, self._max_staleness = capacity, batch_size, max_staleness
    self._overdue, self._truncation = overdue, truncation
    self._vocab_size, self._max_length, self._clock = vocab_size, max_length, clock
    self._condition = threading.Condition()
    self._closed = False
    self._version = self._steps = self._admitted = self._trained = 0
    self._dropped: dict[str, int] = {}
    self._running: dict[int, int] = {}  # ticket -> lower bound of its oldest version.
    self._queued: dict[int, Rollout] = {}  # In order of completion.
    self._oldest: dict[int, int] = {}  # ticket -> oldest version of what is queued.
    self._taken: dict[int, Rollout] = {}  # The batch of the step under way.
    self._quarantine: list[tuple[Rollout, str]] = []
    self._returned: list[tuple[int, int]] = []  # Waiting for `returned_prompts`.
    self._returned_once: set[int] = set()
    self._fruitless: dict[str, int] = {}  # Drops by reason since the last rollout that could be trained on.
    self._wait_began_s: float | None = None
    self._waited_s, self._measured_from_s = 0.0, clock()
    self._staleness: list[int] = []  # Of what was taken since the last `metrics`.

  # --- Rollouts' side ----------------------------------------------------------------------------------------------------------

  def ticket(self, version: int) -> int | None:
    """Grants the right to start one rollout, or None for not now (too many outstanding, queue full, closed).

    Args:
      version: of the parameters that the next draw will use, or any lower bound of it: the sampler's version, not the newest published.
    """
    with self._condition:
      if self._closed or len(self._queued) >= self._capacity:
        return None
      if self._admitted - sum(self._dropped.values()) >= (self._steps + self._max_staleness + 1) * self._batch_size:
        return None
      if self._overdue != 'use' and not self._fits(version + self._max_staleness):
        return None
      ticket = self._admitted
      self._admitted += 1
      self._running[ticket] = version
      return ticket

  def set_oldest(self, oldest: Mapping[int, int]) -> None:
    """Raises what is known of running tickets: {ticket: version of its oldest action token, or a lower bound while it has none}.

    Call it before each sampler step, with the version that the sampler draws with for tickets that have drawn nothing yet.

    Raises:
      ValueError: a ticket that isn't running, or a version below what was reported before.
    """
    with self._condition:
      for ticket, version in oldest.items():
        self._require_running(ticket)
        if version < self._running[ticket]:
          raise ValueError(f'Ticket {ticket} was bounded below by version {self._running[ticket]}, now {version} is reported.')
      self._running.update(oldest)
      self._condition.notify_all()

  def put(self, rollout: Rollout, version: int) -> bool:
    """Takes a finished rollout in. Never blocks.

    A rollout that fails `check_rollout` is quarantined and its ticket ends as dropped['quarantined']; a truncated one ends as
    dropped['truncated'] under truncation 'drop', an overdue one as dropped['overdue'] under overdue 'drop'.

    Args:
      rollout: with the ticket it was started with.
      version: the newest version that may occur in it.

    Returns:
      True when its ticket moved on. False when the queue is closed or full: keep the rollout and put it again later. A full queue is
      never the reason why a step cannot be made: while what is queued does not make the next step (it is held for a running rollout),
      rollouts beyond `capacity` are let in; the tickets bound their number.

    Raises:
      ValueError: the ticket was never granted, or has ended (or was put) already.
      RuntimeError: this and all of the last `FRUITLESS` rollouts ended without one to train on.
    """
    with self._condition:
      self._require_running(rollout.ticket)
      bound = self._running[rollout.ticket]
    reason = check_rollout(rollout, oldest=bound, newest=version, vocab_size=self._vocab_size, max_length=self._max_length)
    with self._condition:
      self._require_running(rollout.ticket)
      if self._closed:
        return False
      if reason:
        self._quarantine = [*self._quarantine, (rollout, reason)][-QUARANTINE_KEPT:]
        self._end(rollout.ticket, 'quarantined')
      elif self._truncation == 'drop' and rollout.ending == 'truncated':
        self._end(rollout.ticket, 'truncated')
      elif self._overdue == 'drop' and rollout.oldest_version + self._max_staleness < self._version:
        self._return_prompt(rollout.prompt_id, rollout.attempt)
        self._end(rollout.ticket, 'overdue')
      elif len(self._queued) >= self._capacity and self._select(self._next_version) is not None:
        return False
      else:
        del self._running[rollout.ticket]
        self._enqueue(rollout)
      self._condition.notify_all()
      return True

  def drop(self, ticket: int, reason: str, *, prompt: tuple[int, int] | None = None) -> None:
    """Ends a running ticket without a rollout ('environment_error', 'grader_timeout', ...; 'overdue' for one that was cancelled).

    Args:
      prompt: (prompt_id, attempt) to hand back through `returned_prompts`, unless that prompt was handed back before.
    """
    with self._condition:
      self._require_running(ticket)
      if prompt is not None:
        self._return_prompt(*prompt)
      self._end(ticket, reason)
      self._condition.notify_all()

  def overdue_running(self, version: int) -> list[int]:
    """Running tickets that will be dropped when they finish, in order of admission; empty unless overdue is 'drop'.

    Args:
      version: that the sampler draws with. A ticket whose bound is no older has drawn nothing overdue; call `set_oldest` first, so that
        this holds for all that have drawn nothing yet.
    """
    with self._condition:
      if self._overdue != 'drop':
        return []
      return [t for t, oldest in self._running.items() if oldest + self._max_staleness < self._version and oldest < version]

  def returned_prompts(self) -> list[tuple[int, int]]:
    """(prompt_id, next attempt) of overdue rollouts dropped since the last call; a prompt is returned once in a run, then lost to its
    second drop, so that a prompt that always takes too long cannot keep the run busy."""
    with self._condition:
      returned, self._returned = self._returned, []
      return returned

  @property
  def prompts_to_return(self) -> int:
    """How many prompts wait for `returned_prompts`."""
    with self._condition:
      return len(self._returned)

  # --- Learner's side ----------------------------------------------------------------------------------------------------------

  def take(self, version: int, timeout_s: float) -> list[Rollout] | None:
    """The batch of the step at `version`: `batch_size` rollouts, those that must be in this step first, then in order of completion.

    Waits up to `timeout_s` seconds of real time. None when no batch could be made by then, or the queue is closed.

    Raises:
      ValueError: `version` isn't the queue's.
      RuntimeError: the batch taken before was not reported by `trained`.
    """
    until_s = time.monotonic() + timeout_s
    with self._condition:
      if self._taken:
        raise RuntimeError('take() was called again before trained() reported the batch taken before.')
      if version != self._version:
        raise ValueError(f'take() is for version {version}, but trained() has brought the queue to version {self._version}.')
      if self._wait_began_s is None:
        self._wait_began_s = self._clock()
      while not self._closed:
        self._drop_overdue()
        batch = self._select(self._version)
        if batch is not None:
          self._waited_s += self._clock() - self._wait_began_s
          self._wait_began_s = None
          self._staleness += [version - self._oldest[rollout.ticket] for rollout in batch]
          self._taken = {rollout.ticket: self._dequeue(rollout.ticket) for rollout in batch}
          return batch
        remaining_s = until_s - time.monotonic()
        if remaining_s <= 0:
          return None
        self._condition.wait(remaining_s)
      return None

  def trained(self, tickets: Sequence[int], version_advanced: bool) -> None:
    """Reports that the batch with these tickets was trained, and whether the step made a new policy version (value-only steps do not)."""
    with self._condition:
      if sorted(tickets) != sorted(self._taken):
        raise ValueError(f'trained() reports tickets {sorted(tickets)}, but {sorted(self._taken)} were taken.')
      self._taken = {}
      self._trained += self._batch_size
      self._steps += 1
      self._version += bool(version_advanced)
      self._condition.notify_all()

  @property
  def steps(self) -> int:
    """Batches trained, value-only steps included."""
    with self._condition:
      return self._steps

  @property
  def version(self) -> int:
    """Policy version that the next step trains."""
    with self._condition:
      return self._version

  # --- Both sides --------------------------------------------------------------------------------------------------------------

  def close(self) -> None:
    """Ends every wait at once: from now on no ticket is granted, `put` gives False and `take` None. May be called again."""
    with self._condition:
      self._closed = True
      self._condition.notify_all()

  def accounting(self) -> dict[str, Any]:
    """{'admitted', 'trained', 'carried_over', 'dropped': {reason: n}}, where admitted = trained + carried_over + sum(dropped)."""
    with self._condition:
      carried_over = len(self._running) + len(self._queued) + len(self._taken)
      assert self._admitted == self._trained + carried_over + sum(self._dropped.values()), 'tickets do not add up'
      return {'admitted': self._admitted, 'trained': self._trained, 'carried_over': carried_over, 'dropped': dict(self._dropped)}

  def metrics(self) -> dict[str, Stat | float]:
    """Numbers since the last call: staleness of what was taken, share of the time that the learner waited; and the state now."""
    with self._condition:
      now_s = self._clock()
      staleness, self._staleness = self._staleness, []
      waited_s, self._waited_s = self._waited_s, 0.0
      elapsed_s, self._measured_from_s = now_s - self._measured_from_s, now_s
      values: dict[str, Stat | float] = {
          'queue/depth': float(len(self._queued)),
          'queue/running': float(len(self._running)),
          'queue/admitted': float(self._admitted),
          'queue/staleness_mean': Stat(float(sum(staleness)), float(len(staleness))),
          'time/learner_wait_fraction': Stat(waited_s, elapsed_s),
      }
      if staleness:
        values['queue/staleness_max'] = Stat(float(max(staleness)), 1.0)
      values.update({f'queue/dropped_{reason}': float(n) for reason, n in sorted(self._dropped.items())})
      return values

  def drain_quarantine(self) -> list[tuple[Rollout, str]]:
    """(rollout, reason) of what was quarantined since the last call; at most the newest `QUARANTINE_KEPT`."""
    with self._condition:
      quarantined, self._quarantine = self._quarantine, []
      return quarantined

  def state(self) -> dict[str, Any]:
    """What a checkpoint keeps: NumPy arrays, `Rollout`s and plain values. A batch that is taken but not trained counts as queued."""
    with self._condition:
      return {
          'version': self._version, 'steps': self._steps, 'admitted': self._admitted, 'trained': self._trained,
          'dropped': dict(self._dropped),
          'running': np.asarray(sorted(self._running.items()), np.int64).reshape(-1, 2),  # ticket, oldest version
          'queued': [*self._taken.values(), *self._queued.values()],
          'returned': np.asarray(self._returned, np.int64).reshape(-1, 2),
          'returned_once': np.asarray(sorted(self._returned_once), np.int64),
      }

  def restore(self, state: Mapping[str, Any]) -> None:
    """Puts a saved state into a queue that was not used yet.

    Raises:
      ValueError: the state cannot be continued with this batch size or staleness bound.
    """
    with self._condition:
      if self._admitted:
        raise RuntimeError('restore() needs a queue that has granted no ticket yet.')
      if state['trained'] != state['steps'] * self._batch_size:
        raise ValueError(
            f'The saved queue trained {state["trained"]} rollouts in {state["steps"]} steps; that is no run with '
            f'learner.batch_size={self._batch_size}. Resume with the batch size of the checkpoint.')
      self._version, self._steps = int(state['version']), int(state['steps'])
      self._admitted, self._trained = int(state['admitted']), int(state['trained'])
      self._dropped = {reason: int(n) for reason, n in state['dropped'].items()}
      self._running = {int(ticket): int(oldest) for ticket, oldest in state['running']}
      for rollout in state['queued']:
        self._enqueue(rollout)
      self._returned = [(int(prompt_id), int(attempt)) for prompt_id, attempt in state['returned']]
      self._returned_once = {int(prompt_id) for prompt_id in state['returned_once']}
      if self._overdue == 'wait' and not self._fits():
        raise ValueError(
            f'Not all rollouts of the saved queue can be trained within queue.max_staleness={self._max_staleness}; '
            "resume with the bound of the checkpoint, or with queue.overdue='drop'.")

  # --- Under the lock ----------------------------------------------------------------------------------------------------------

  @property
  def _next_version(self) -> int:
    """Version of the next step that `take` can give; the step under way is assumed to advance it."""
    return self._version + bool(self._taken)

  def _enqueue(self, rollout: Rollout) -> None:
    self._fruitless = {}
    self._queued[rollout.ticket] = rollout
    self._oldest[rollout.ticket] = rollout.oldest_version

  def _dequeue(self, ticket: int) -> Rollout:
    del self._oldest[ticket]
    return self._queued.pop(ticket)

  def _deadlines(self) -> list[int]:
    """Of everything outstanding; that of a running rollout is the earliest possible one."""
    return [oldest + self._max_staleness for oldest in (*self._running.values(), *self._oldest.values())]

  def _fits(self, new: int | None = None) -> bool:
    """Whether the earliest-deadline condition holds; with `new`, whether it does from there on for one more of that deadline."""
    version = self._next_version
    ordered = sorted(self._deadlines() + ([] if new is None else [new]))
    if self._overdue == 'drop':
      ordered = [d for d in ordered if d >= version or d == new]  # The others are lost anyway.
    return all(i + 1 <= self._batch_size * (d - version + 1) for i, d in enumerate(ordered) if new is None or d >= new)

  def _select(self, version: int) -> list[Rollout] | None:
    """The batch of a step at `version`, or None: too few finished, or held for running ones. Changes nothing."""
    if len(self._queued) < self._batch_size:
      return None
    deadlines = {ticket: oldest + self._max_staleness for ticket, oldest in self._oldest.items()}
    outstanding = self._deadlines() if self._overdue == 'wait' else deadlines.values()
    picked: dict[int, Rollout] = {}
    for deadline, count in forced_counts(outstanding, version, self._batch_size).items():
      due = [t for t in self._queued if max(deadlines[t], version) <= deadline]
      if self._overdue == 'wait' and len(due) < count:
        return None
      for ticket in [t for t in due if t not in picked][:max(0, count - sum(t in picked for t in due))]:
        picked[ticket] = self._queued[ticket]
    for ticket in self._queued:
      picked.setdefault(ticket, self._queued[ticket])
    return list(picked.values())[:self._batch_size]

  def _drop_overdue(self) -> None:
    if self._overdue != 'drop':
      return
    for ticket in [t for t, oldest in self._oldest.items() if oldest + self._max_staleness < self._version]:
      rollout = self._dequeue(ticket)
      self._return_prompt(rollout.prompt_id, rollout.attempt)
      self._count_drop('overdue')

  def _return_prompt(self, prompt_id: int, attempt: int) -> None:
    if prompt_id not in self._returned_once:
      self._returned_once.add(prompt_id)
      self._returned.append((prompt_id, attempt + 1))

  def _end(self, ticket: int, reason: str) -> None:
    del self._running[ticket]
    self._count_drop(reason)

  def _count_drop(self, reason: str) -> None:
    self._dropped[reason] = self._dropped.get(reason, 0) + 1
    self._fruitless[reason] = self._fruitless.get(reason, 0) + 1
    count = sum(self._fruitless.values())
    if count >= max(FRUITLESS, 4 * self._batch_size):
      raise RuntimeError(
          f'The last {count} rollouts gave nothing to train on: dropped as {self._fruitless}. Mend the environment, or change what drops '
          'them (algorithm.truncation, task.max_tokens, task.time_limit_s, queue.overdue).')

  def _require_running(self, ticket: int) -> None:
    if ticket not in self._running:
      ended = 0 <= ticket < self._admitted
      raise ValueError(f'Ticket {ticket} {"has ended, or its rollout was put, already" if ended else "was never granted"}.')
