"""The scripted environment with tasks that have an end, for runs over rows."""

from sao_jax.environments import base
from sao_jax.environments.scripted import Scripted


class ScriptedRows(Scripted):
  """`rows` tasks in two sets, of which the first has twice its share where `weighted`."""

  name = 'scripted_rows'

  def __init__(self, *, rows: int = 12, weighted: bool = False, turns: int = 1):
    super().__init__(turns=turns)
    self.rows, self.weighted = rows, weighted

  def task_sets(self, split: str) -> tuple[base.TaskSet, ...]:
    first = self.rows // 3
    weights = (2.0, 1.0) if self.weighted else (None, None)
    return (base.TaskSet('a', 0, first, weights[0]), base.TaskSet('b', first, self.rows - first, weights[1]))

  def sample_task(self, index: int, split: str, seed: int) -> base.Task:
    assert 0 <= index < self.rows
    return super().sample_task(index, split, seed)
