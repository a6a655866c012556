"""The stream of prompts: a position in an environment's tasks that can be saved, restored and given back to. NumPy and standard library.

A prompt's id is its position in the stream, and the stream hands out every position once; a prompt comes again only where it was given
back (its rollout was dropped), with the attempt it was given back with. One thread owns a stream.

Where an environment makes a task for every index (`task_sets` is empty), prompt n is task n. Where its tasks have an end,
`data_order.Order` says which task stands at a position: shuffled epochs, mixed by weights. Of several hosts, host h of n takes the
positions h, h + n, h + 2n...
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from typing import Any, Mapping

from sao_jax.data_order import Order, permuted
from sao_jax.environments.base import Environment, Task, check_split

MAX_PASSED_SWEEPS = 2  # So many in a row hold every task that is not solved; where there is none, the next prompt is served all the same.


class Difficulty:
  """What came out of the prompts so far: visits, rewards and successes of every task that was visited."""

  def __init__(self):
    self._tasks: dict[int, list[float]] = {}  # Task index -> [visits, total reward, successes, successes in a row until now].

  def record(self, index: int, reward: float, solved: bool) -> None:
    """Counts one finished rollout of task `index`."""
    visits, total, successes, streak = self._tasks.get(index, (0, 0.0, 0, 0))
    self._tasks[index] = [visits + 1, total + float(reward), successes + solved, streak + 1 if solved else 0]

  def solved(self, index: int, times: int) -> bool:
    """Whether the last `times` rollouts of the task all solved it."""
    return index in self._tasks and self._tasks[index][3] >= times

  def rows(self) -> list[dict[str, Any]]:
    """{'task', 'visits', 'mean_reward', 'successes', 'streak'} of every visited task, by index."""
    return [
        {'task': index, 'visits': visits, 'mean_reward': total / visits, 'successes': successes, 'streak': streak}
        for index, (visits, total, successes, streak) in sorted(self._tasks.items())]

  def state(self) -> list[list[float]]:
    return [[index, *numbers] for index, numbers in sorted(self._tasks.items())]

  def restore(self, state: Any) -> None:
    self._tasks = {int(index): [int(visits), float(total), int(won), int(streak)] for index, visits, total, won, streak in state}


class PromptStream:
  """Prompts of one environment and split.

  Args:
    environment: gives `sample_task(index, split, seed)`, a pure function, and `task_sets(split)`.
    seed: of the tasks and of the shuffles.
    split: 'train' or 'test'.
    epochs: how often a task may come; 0 for a stream without end.
    shuffle: whether every epoch has an order of its own; False for the tasks' own order.
    skip_solved: pass over a task whose last so many rollouts all solved it (see `record`); 0 for never.
    host, hosts: this host's number in [0, hosts).

  Raises:
    ValueError: epochs or skip_solved for an environment whose tasks have no end, a host out of range, or one without prompts.
  """

  def __init__(
      self, environment: Environment, *, seed: int, split: str = 'train', epochs: int = 0, shuffle: bool = True, skip_solved: int = 0,
      host: int = 0, hosts: int = 1,
  ):
    check_split(split)
    if not 0 <= host < hosts:
      raise ValueError(f'host must be in [0, hosts), got {host} of {hosts}.')
    sets = environment.task_sets(split)
    for name, value in (('data.epochs', epochs), ('data.skip_solved', skip_solved)):
      if value and not sets:
        raise ValueError(f'{name}={value} needs tasks that come again, but {environment.name!r} makes new ones without end; use 0.')
    self._environment, self._seed, self._split = environment, seed, split
    self._order = Order(sets, seed=seed, shuffle=shuffle, epochs=epochs) if sets else None
    if self._order is not None and self._order.length is not None and self._order.length < hosts:
      raise ValueError(
          f'data.epochs={epochs} gives {self._order.length} prompts, fewer than the {hosts} hosts; use more epochs or fewer hosts.')
    self._host, self._hosts, self._skip_solved = host, hosts, skip_solved
    self._identity = _identity(self._order, shuffle, epochs)
    self._count = 0  # Positions of this host that were handed out or passed over.
    self._returned: list[tuple[int, int]] = []  # Heap of (prompt id, attempt).
    self.difficulty = Difficulty()

  @property
  def exhausted(self) -> bool:
    """Whether `next` has nothing more to give; false again when a prompt is given back."""
    return not self._returned and self._next_position() is None

  def next(self) -> tuple[int, int, Task]:
    """(prompt id, attempt, task): first what was given back, lowest id first, then the next new position with attempt 0.

    Raises:
      ValueError: the stream is exhausted.
    """
    if self._returned:
      prompt_id, attempt = heapq.heappop(self._returned)
    else:
      position = self._next_position()
      if position is None:
        raise ValueError(f'The prompts are exhausted after {self._count} of this host; data.epochs limits them.')
      prompt_id, attempt = position, 0
      self._count += 1
    return prompt_id, attempt, self.task(prompt_id, attempt)

  def _next_position(self) -> int | None:
    """The next new position of this host, None at the end. Passes over solved tasks for good."""
    passed = 0
    while True:
      position = self._host + self._count * self._hosts
      if self._order is None:
        return position
      if self._order.length is not None and position >= self._order.length:
        return None
      may_pass = self._skip_solved and passed < MAX_PASSED_SWEEPS * self._order.sweep
      if not may_pass or not self.difficulty.solved(self._order.locate(position).index, self._skip_solved):
        return position
      self._count += 1
      passed += 1

  def task(self, prompt_id: int, attempt: int) -> Task:
    """The task of a prompt, whether it was handed out already or not; changes nothing."""
    index = prompt_id if self._order is None else self._order.locate(prompt_id).index
    return dataclasses.replace(self._environment.sample_task(index, self._split, self._seed), attempt=attempt)

  def record(self, prompt_id: int, reward: float, solved: bool) -> None:
    """Notes how a rollout of a prompt ended. Nothing is kept where tasks never come again, or of a reward that is no number."""
    if self._order is not None and math.isfinite(reward):
      self.difficulty.record(self._order.locate(prompt_id).index, reward, solved)

  def give_back(self, prompt_id: int, attempt: int) -> None:
    """Puts a prompt back, to be served before any new one. Raises ValueError when it was never handed out, or waits here already."""
    if not 0 <= prompt_id - self._host < self._count * self._hosts or (prompt_id - self._host) % self._hosts:
      raise ValueError(f'Prompt {prompt_id} was never handed out: the stream is at {self._host + self._count * self._hosts}.')
    if any(prompt_id == waiting for waiting, _ in self._returned):
      raise ValueError(f'Prompt {prompt_id} was given back twice.')
    if attempt < 0:
      raise ValueError(f'attempt must not be negative, got {attempt}.')
    heapq.heappush(self._returned, (prompt_id, attempt))

  def difficulty_rows(self) -> list[dict[str, Any]]:
    """The rows of `Difficulty.rows` with the 'set' that the task belongs to and its 'row' in there."""
    found = []
    for row in self.difficulty.rows():
      owner = next(s for s in self._order.sets if s.start <= row['task'] < s.start + s.size)
      found.append({'set': owner.name, 'row': row['task'] - owner.start, **row})
    return found

  def state(self) -> dict[str, Any]:
    """JSON-able state; a stream restored from it goes on exactly as this one would."""
    return {
        'environment': self._environment.name, 'seed': self._seed, 'split': self._split, 'hosts': [self._host, self._hosts],
        'order': self._identity, 'position': self._count, 'returned': [list(item) for item in sorted(self._returned)],
        'difficulty': self.difficulty.state(),
    }

  def restore(self, state: Mapping[str, Any]) -> None:
    """Takes over a saved state. Raises ValueError when it belongs to another environment, seed, split, host or data."""
    mine = self.state()
    for name, older in (('environment', None), ('seed', None), ('split', None), ('hosts', [0, 1]), ('order', [])):
      saved = state.get(name, older)
      if saved != mine[name]:
        hint = ('the data, their weights or the way they are drawn have changed: put them back, or use another --workdir' if name == 'order'
                else 'resume with what it was made with')
        raise ValueError(f'The saved prompt stream has {name} {saved!r}, this run has {mine[name]!r}; {hint}.')
    self._count = int(state['position'])
    self._returned = [(int(prompt_id), int(attempt)) for prompt_id, attempt in state['returned']]
    heapq.heapify(self._returned)
    self.difficulty.restore(state.get('difficulty', ()))


def _identity(order: Order | None, shuffle: bool, epochs: int) -> list[Any]:
  """What decides the order, as JSON gives it back; [] where the index is the order."""
  if order is None:
    return []
  return [shuffle, epochs, *([s.name, s.size, s.weight, s.fingerprint] for s in order.sets)]


def heldout(environment: Environment, n: int, seed: int) -> list[tuple[int, Task]]:
  """(prompt id, task) of `n` tasks of the test split, always the same for the same seed; no prompt of training is among them.

  Where the test tasks have an end, `n` of them drawn without return, or all if there are fewer.
  """
  size = sum(s.size for s in environment.task_sets('test'))
  if not size:
    return [(index, environment.sample_task(index, 'test', seed)) for index in range(n)]
  return [(i, environment.sample_task(permuted(i, size, seed), 'test', seed)) for i in range(min(n, size))]
