"""The stages before RL: supervised warm start, and value pretraining on recorded rollouts.

Each stage continues from `progress.stage_step`, so that a resumed run goes on where its checkpoint was. The batch of a step is a function
of the seed and the step alone.
"""

from __future__ import annotations

import functools
import time
from typing import Sequence

import numpy as np

from sao_jax import prng, tool_calls
from sao_jax.checkpoint import load_rollouts, save_rollouts
from sao_jax.data import PromptStream
from sao_jax.environments.base import Environment, EnvironmentFailure, Observation, StepResult, Task
from sao_jax.evaluation import Stopped
from sao_jax.metrics import rollout_metrics
from sao_jax.models.conversation import as_messages
from sao_jax.parts import Parts
from sao_jax.episodes import actor, expect, next_turn, shown
from sao_jax.rollouts import Call, FailureShare
from sao_jax.run import Run
from sao_jax.types import Rollout


def sft(run: Run) -> None:
  """Fits the policy to demonstrations of the environment."""
  settings = run.config.sft
  if not settings.steps:
    return
  demonstrations = record_demonstrations(run.parts, settings.demonstrations)
  for step in range(run.progress.stage_step, settings.steps):
    batch = pick(demonstrations, settings.batch_size, run.config.seed, 'sft', step)
    run.state, metrics = run.parts.learner.sft_update(run.state, run.parts.make_batch(batch, settings.batch_size))
    run.step_done(metrics, total=settings.steps)
    run.save_if_due()


def value_pretrain(run: Run) -> None:
  """Records rollouts of the warm-started policy and fits the value model to their returns."""
  settings = run.config.value_pretrain
  if not settings.rollouts:
    return
  rollouts = recorded_rollouts(run, settings.rollouts)
  size = run.config.learner.batch_size
  steps = settings.epochs * max(1, len(rollouts) // size)
  for step in range(run.progress.stage_step, steps):
    batch = pick(rollouts, size, run.config.seed, 'value_pretrain', step)
    run.state, metrics = run.parts.learner.value_update(run.state, run.parts.make_batch(batch, size))
    run.step_done(metrics, total=steps)
    run.save_if_due()


def pick(rollouts: Sequence[Rollout], size: int, seed: int, name: str, step: int) -> list[Rollout]:
  """Rollouts of a step: every epoch is its own permutation, cut into batches; a rest smaller than a batch is left out of its epoch."""
  size = min(size, len(rollouts))
  per_epoch = len(rollouts) // size
  order = prng.generator(seed, f'{name}/order', step // per_epoch).permutation(len(rollouts))
  start = step % per_epoch * size
  return [rollouts[i] for i in order[start:start + size]]


def record_demonstrations(parts: Parts, count: int) -> list[Rollout]:
  """Demonstrated episodes as rollouts: the demonstrator's tokens are the actions, the environment's are not.

  Demonstrations whose environment fails or hangs are left out and told. Raises ValueError where the environment has none, or one is longer
  than a rollout may be; RuntimeError where too many are lost.
  """
  if not parts.environment.has_demonstrations:
    raise ValueError(f'Environment {parts.environment.name!r} has no demonstrations: set sft.steps=0, or choose another task.')
  stream = PromptStream(parts.environment, seed=parts.config.seed, split='train')
  failures, results = FailureShare(parts.config.task.max_failure_share), []
  with parts.environment_calls() as calls:
    for index in range(count):
      prompt_id, _, task = stream.next()
      actions = parts.environment.demonstration(task, prng.generator(parts.config.seed, 'demonstration', index))
      calls.submit(Call(index, 0, 0, functools.partial(_play, parts, prompt_id, task, actions)))
    while len(results) < count:
      arrived = calls.ready()
      for result in arrived:
        if result.error is not None and not isinstance(result.error, (EnvironmentFailure, TimeoutError)):
          raise RuntimeError(
              f'Environment {parts.environment.name!r}, demonstration {result.ticket}: {type(result.error).__name__}: {result.error}'
          ) from result.error
        failures.add('' if result.error is None else f'demonstration {result.ticket}: {result.error}')
      results += arrived
      if parts.stop.is_set():
        raise Stopped('stopped before the first step, while demonstrations were played')
      if not arrived:
        time.sleep(0.001)
  rollouts = [result.value for result in sorted(results, key=lambda r: r.ticket) if result.error is None]
  if len(rollouts) < count:
    parts.progress_bar.line(f'{count - len(rollouts)} of {count} demonstrations were lost to failures of their environment')
  if not rollouts:
    raise RuntimeError(f'All {count} demonstrations were lost to failures of their environment; the last one: {results[-1].error}')
  longest = max(rollouts, key=lambda r: r.longest_segment)
  if longest.longest_segment > parts.max_length:
    raise ValueError(
        f'The demonstration of prompt {longest.prompt_id} has {longest.longest_segment} tokens; {parts.max_length} fit (task.max_tokens, '
        'model.max_length).')
  return rollouts


def _play(parts: Parts, prompt_id: int, task: Task, actions: Sequence[str | tool_calls.Turn]) -> Rollout:
  """Plays a demonstration in an environment of its own; ends with the episode, or with the last action."""
  if not actions:
    raise ValueError(f'the demonstration of prompt {prompt_id} holds no action')
  environment = parts.make_environment()
  try:
    return _played(parts, environment, prompt_id, task, actions)
  finally:
    environment.close()


def _played(
    parts: Parts, environment: Environment, prompt_id: int, task: Task, actions: Sequence[str | tool_calls.Turn]
) -> Rollout:
  form = parts.conversation
  observation = expect(environment.reset(task), Observation, 'reset')
  tools = tuple(environment.tools if observation.tools is None else observation.tools)
  act, history = actor(form, tools), as_messages(shown(observation))
  tokens = list(form.first(shown(observation), tools))
  mask, turns, starts = [False] * len(tokens), [0] * len(tokens), [0]
  metrics: dict[str, float] = {}
  reward, terminated = 0.0, False

  def add(ids: list[int], turn: int, action: bool) -> None:
    tokens.extend(ids)
    mask.extend([action] * len(ids))
    turns.extend([turn] * len(ids))

  for turn, action in enumerate(actions):
    text = action if isinstance(action, str) else tool_calls.write(action, form.tool_format)
    step = expect(act(environment, text), StepResult, 'step')
    answer = step.observation.messages
    ids = form.turn_ids(text, answer[0]['role'] if answer else 'user')
    add(ids, turn, True)
    reward, terminated = reward + step.reward, step.terminated
    metrics.update(step.metrics)
    if terminated or step.truncated:
      break
    if turn + 1 < len(actions):
      before, tools = tools, tools if step.observation.tools is None else tuple(step.observation.tools)
      stop_id = ids[-1] if environment.conversation == 'chat' else None
      follow = next_turn(form, history, text, step.observation, stop_id, tools=tools, before=before)
      act, history = act if tools == before else actor(form, tools), follow.history
      if follow.rewritten and len(starts) == parts.config.task.max_segments:
        break
      starts += [len(tokens)] * follow.rewritten
      add(follow.ids, turn, False)
  mask_array = np.asarray(mask, bool)
  rewards = np.zeros(len(tokens), np.float32)
  rewards[np.flatnonzero(mask_array)[-1]] = reward
  return Rollout(
      tokens=np.asarray(tokens, np.int32), action_mask=mask_array, behaviour_log_prob=np.zeros(len(tokens), np.float32),
      policy_version=np.where(mask_array, 0, -1).astype(np.int32), reward=rewards, turn=np.asarray(turns, np.int32),
      ending='terminated' if terminated else 'truncated', stop_reason='answer' if terminated else 'environment_limit',
      prompt_id=prompt_id, attempt=0, environment=environment.name, metrics=metrics, segment_starts=tuple(starts))


def recorded_rollouts(run: Run, count: int) -> list[Rollout]:
  """Rollouts of the current policy on prompts of their own; kept in the workdir, so that a resumed stage fits the same ones."""
  path = run.parts.workdir / 'rollouts' / 'value_pretrain.npz'
  if run.progress.stage_step and not path.exists():
    raise ValueError(f'{path} is missing, but the checkpoint stands in the middle of fitting it; restore the file or start afresh.')
  if run.progress.stage_step:
    return load_rollouts(path)
  seed = run.config.seed + 1  # Other prompts and other noise than those of RL.
  stream = PromptStream(run.parts.environment, seed=seed, split='train')
  prompts = [(prompt_id, task) for prompt_id, _, task in (stream.next() for _ in range(count))]
  policy = run.parts.learner.policy_params(run.state)
  flow = run.parts.run_prompts(policy, prompts, label='recording rollouts', seed=seed)
  if not flow.rollouts:
    raise RuntimeError(f'All {count} rollouts for value pretraining were lost: {dict(flow.dropped)}. Mend the environment and run again.')
  if flow.dropped:
    run.parts.progress_bar.line(f'value pretraining: {dict(flow.dropped)} of {count} rollouts were lost')
  run.parts.writer.write(run.progress.step, {f'value_pretrain/{k}': v for k, v in rollout_metrics(flow.rollouts).items()})
  save_rollouts(path, flow.rollouts)
  return flow.rollouts
