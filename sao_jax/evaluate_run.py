"""Held-out success of one checkpoint, apart from the run that wrote it: any task, greedy and at a temperature."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import tempfile
from typing import Any, Iterator, Sequence

import numpy as np

from sao_jax import prng
from sao_jax.config import Config
from sao_jax.evaluation import Evaluation
from sao_jax.parts import Parts, build, initial_state
from sao_jax.train import locked, validate_names
from sao_jax.types import Params


def evaluate_run(
    config: Config, workdir: str | os.PathLike[str] | None, *, step: int | None, prompts: int
) -> dict[str, Any]:
  """Evaluates the policy of a checkpoint on held-out prompts, once greedily and once at `config.sampler.temperature`.

  Args:
    config: settings of the model, and of the task to evaluate on; those of training are ignored.
    workdir: folder of the run; None for the weights that a run would start from (pretrained or random).
    step: number of the checkpoint; None for the newest.
    prompts: how many held-out prompts.

  Returns:
    {'checkpoint', 'stage', 'policy_step', 'task', 'n', 'temperature', 'temperature_1': numbers, 'greedy': numbers}, JSON-able. The numbers
    are those of `evaluation.Evaluation` with `reward_low` and `reward_high`, the 95 % bootstrap interval of the mean reward.

  Raises:
    ValueError: no such checkpoint, settings that do not fit, or a run going on in the workdir.
    OSError: a damaged checkpoint, or a folder that cannot be opened.
  """
  validate_names(config)
  with _parts(config, workdir) as parts:
    if workdir is None:
      where, policy = {'checkpoint': None, 'stage': 'start', 'policy_step': 0}, parts.learner.policy_params(initial_state(parts))
    else:
      where, policy = _restore(parts, step)
    found = parts.evaluate(policy, version=int(where['policy_step']), prompts=prompts, label='of the checkpoint')
  return {
      **where, 'task': config.task.name, 'n': found['greedy'].n, 'temperature': config.sampler.temperature,
      **{name: _numbers(result, config.evaluation.seed) for name, result in found.items()}}


@contextlib.contextmanager
def _parts(config: Config, workdir: str | os.PathLike[str] | None) -> Iterator[Parts]:
  with contextlib.ExitStack() as stack:
    if workdir is None:
      folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
    else:
      folder = pathlib.Path(workdir)
      if not (folder / 'checkpoints').is_dir():
        raise ValueError(f'{folder} holds no checkpoints; give the workdir of a run.')
      stack.enter_context(locked(folder))
    parts = build(config, folder)
    stack.callback(parts.close)
    yield parts


def _restore(parts: Parts, step: int | None) -> tuple[dict[str, Any], Params]:
  steps = parts.checkpointer.steps()
  if not steps or (step is not None and step not in steps):
    wanted = 'There is no checkpoint' if step is None else f'There is no checkpoint {step}'
    raise ValueError(f'{wanted} in {parts.workdir / "checkpoints"}; those there are: {steps or "none"}.')
  step = steps[-1] if step is None else step
  host = parts.checkpointer.restore_host(step)
  stage = 'rl' if host['stage'] == 'done' else host['stage']
  state = parts.checkpointer.restore(step, parts.learner.abstract_state(stage))
  return {'checkpoint': step, 'stage': host['stage'], 'policy_step': host['version']}, parts.learner.policy_params(state)


def _numbers(result: Evaluation, seed: int) -> dict[str, Any]:
  low, high = bootstrap_interval([r.total_reward for r in result.rollouts], seed)
  numbers = dataclasses.asdict(dataclasses.replace(result, rollouts=[]))
  return {**{name: value for name, value in numbers.items() if name != 'rollouts'}, 'reward_low': low, 'reward_high': high}


def bootstrap_interval(values: Sequence[float], seed: int, resamples: int = 2000) -> tuple[float, float]:
  """95 % percentile interval of the mean over bootstrap resamples, a function of (values, seed); NaN for no values.

  Source: Efron 1979.
  """
  if not len(values):
    return float('nan'), float('nan')
  rng = prng.generator(seed, 'bootstrap')
  means = [np.mean(rng.choice(values, len(values))) for _ in range(resamples)]
  low, high = np.percentile(means, [2.5, 97.5])
  return float(low), float(high)
