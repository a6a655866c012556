"""One question, one reply, no verdict: for evaluations that grade replies themselves. The messages stand in the task's data."""

from __future__ import annotations

from sao_jax.environments import base


class Ask(base.Environment):
  """Shows `task.data['messages']` ({'role', 'content'} each) and ends with the reply, whatever it is; the reward is 0.

  Args:
    conversation: 'chat', or 'raw' for models without a chat format, which see the contents one after the other.
  """

  name = 'ask'
  replayable = True
  metric_names = ('success',)

  def __init__(self, *, conversation: str = 'chat'):
    if conversation not in base.CONVERSATIONS:
      raise ValueError(f'conversation must be one of {", ".join(base.CONVERSATIONS)}, got {conversation!r}.')
    self.conversation = conversation

  def sample_task(self, index: int, split: str, seed: int) -> base.Task:
    raise ValueError("The environment 'ask' has no tasks of its own; its tasks come from a benchmark.")

  def reset(self, task: base.Task) -> base.Observation:
    messages = tuple(task.data['messages'])
    if self.conversation == 'chat':
      return base.Observation(messages=messages)
    return base.Observation('\n\n'.join(m['content'] for m in messages) + '\n\n')

  def step(self, action: str) -> base.StepResult:
    del action
    return base.StepResult(terminated=True, metrics={'success': 0.0})
