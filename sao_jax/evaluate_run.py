"""Held-out success of one checkpoint, apart from the run that wrote it: any task, greedy and at a temperature.

Nothing is written to the workdir and its lock is not taken: a run may go on there, and the folder may be read-only.
"""

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
from sao_jax.train import validate_names
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
    {'checkpoint', 'stage', 'policy_step', 'task', 'prompts', 'temperature', 'temperature_1': numbers, 'greedy': numbers}, JSON-able. The
    numbers are those of `evaluation.Evaluation` (its 'n' are the rollouts that were not lost) with `reward_low` and `reward_high`, the
    95 % bootstrap interval of the mean reward.

  Raises:
    ValueError: no such checkpoint, or settings that do not fit.
    OSError: a damaged checkpoint, or a folder that cannot be opened.
    RuntimeError: every prompt was lost, at one of the temperatures.
  """
  validate_names(config)
  with opened(config, workdir) as parts:
    where, policy = policy_of(parts, step)
    found = parts.evaluate(
        policy, version=int(where['policy_step']), prompts=prompts, label='of the checkpoint', temperature=config.sampler.temperature)
  for name, result in found.items():
    if not result.n:
      reasons = ', '.join(f'{reason} {count}' for reason, count in result.lost.items()) or 'there were none'
      raise RuntimeError(f'All prompts were lost ({name}): {reasons}. Mend the environment, or task.settings, and evaluate again.')
  asked = found['greedy'].n + sum(found['greedy'].lost.values())
  return {
      **where, 'task': config.task.name, 'prompts': asked, 'temperature': config.sampler.temperature,
      **{name: _numbers(result, config.evaluation.seed) for name, result in found.items()}}


@contextlib.contextmanager
def opened(config: Config, workdir: str | os.PathLike[str] | None) -> Iterator[Parts]:
  """Parts to evaluate with; those of a workdir only read from it. Raises ValueError for a folder without checkpoints."""
  with contextlib.ExitStack() as stack:
    if workdir is None:
      folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
      (folder / 'checkpoints').mkdir()
    else:
      folder = pathlib.Path(workdir)
      checkpoint_step(folder, None)
    parts = build(config, folder, read_only=True)
    stack.callback(parts.close)
    yield parts


def checkpoint_step(workdir: pathlib.Path, step: int | None) -> int:
  """`step`, or the newest one for None. Raises ValueError where it is not there, naming those that are."""
  folder = workdir / 'checkpoints'
  steps = sorted(int(p.name) for p in folder.glob('[0-9]*') if p.name.isdecimal() and p.is_dir())
  if not steps and step is None:
    raise ValueError(f'{workdir} holds no checkpoints; give the workdir of a run that has saved one.')
  if step is not None and step not in steps:
    raise ValueError(f'There is no checkpoint {step} in {folder}; those there are: {steps or "none"}.')
  return steps[-1] if step is None else step


def policy_of(parts: Parts, step: int | None) -> tuple[dict[str, Any], Params]:
  """The policy of a checkpoint, the newest for None, or the one a run would start from where the workdir has no checkpoint.

  Returns: {'checkpoint', 'stage', 'policy_step'} and the parameters.
  """
  if step is None and parts.checkpointer.latest_step() is None:
    return {'checkpoint': None, 'stage': 'start', 'policy_step': 0}, parts.learner.policy_params(initial_state(parts))
  number = checkpoint_step(parts.workdir, step)
  while True:
    try:
      return _restore(parts, number)
    except OSError:  # The run that is going on there may have deleted it for a newer one meanwhile.
      if step is not None or (newest := checkpoint_step(parts.workdir, None)) == number:
        raise
      number = newest


def _restore(parts: Parts, step: int) -> tuple[dict[str, Any], Params]:
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
