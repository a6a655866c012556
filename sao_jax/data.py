"""The stream of prompts: a position in an environment's tasks that can be saved, restored and given back to. NumPy and standard library.

A prompt's id is its position in the stream, and the stream hands out every position once; a prompt comes again only where it was given back
(its rollout was dropped), with the attempt it was given back with. One thread owns a stream.
"""

from __future__ import annotations

import dataclasses
import heapq
from typing import Any, Mapping

from sao_jax.environments.base import Environment, Task, check_split


class PromptStream:
  """Endless prompts of one environment and split.

  Args:
    environment: gives `sample_task(index, split, seed)`, a pure function.
    seed: of the tasks.
    split: 'train' or 'test'.
  """

  def __init__(self, environment: Environment, *, seed: int, split: str = 'train'):
    check_split(split)
    self._environment, self._seed, self._split = environment, seed, split
    self._position = 0
    self._returned: list[tuple[int, int]] = []  # Heap of (prompt id, attempt).

  def next(self) -> tuple[int, int, Task]:
    """(prompt id, attempt, task): first what was given back, lowest id first, then the next new position with attempt 0."""
    if self._returned:
      prompt_id, attempt = heapq.heappop(self._returned)
    else:
      prompt_id, attempt = self._position, 0
      self._position += 1
    return prompt_id, attempt, self.task(prompt_id, attempt)

  def task(self, prompt_id: int, attempt: int) -> Task:
    """The task of a prompt, whether it was handed out already or not; changes nothing."""
    return dataclasses.replace(self._environment.sample_task(prompt_id, self._split, self._seed), attempt=attempt)

  def give_back(self, prompt_id: int, attempt: int) -> None:
    """Puts a prompt back, to be served before any new one. Raises ValueError when it was never handed out, or waits here already."""
    if not 0 <= prompt_id < self._position:
      raise ValueError(f'Prompt {prompt_id} was never handed out: the stream is at {self._position}.')
    if any(prompt_id == waiting for waiting, _ in self._returned):
      raise ValueError(f'Prompt {prompt_id} was given back twice.')
    if attempt < 0:
      raise ValueError(f'attempt must not be negative, got {attempt}.')
    heapq.heappush(self._returned, (prompt_id, attempt))

  def state(self) -> dict[str, Any]:
    """JSON-able state; a stream restored from it goes on exactly as this one would."""
    return {
        'environment': self._environment.name, 'seed': self._seed, 'split': self._split, 'position': self._position,
        'returned': [list(item) for item in sorted(self._returned)],
    }

  def restore(self, state: Mapping[str, Any]) -> None:
    """Takes over a saved state. Raises ValueError when it belongs to another environment, seed or split."""
    for name, mine in (('environment', self._environment.name), ('seed', self._seed), ('split', self._split)):
      if state[name] != mine:
        raise ValueError(
            f'The saved prompt stream has {name} {state[name]!r}, this run has {mine!r}; resume with the settings it was made with.')
    self._position = int(state['position'])
    self._returned = [(int(prompt_id), int(attempt)) for prompt_id, attempt in state['returned']]
    heapq.heapify(self._returned)


def heldout(environment: Environment, n: int, seed: int) -> list[tuple[int, Task]]:
  """The first `n` (prompt id, task) of the test split, always the same for the same seed; no prompt of training is among them."""
  return [(index, environment.sample_task(index, 'test', seed)) for index in range(n)]
