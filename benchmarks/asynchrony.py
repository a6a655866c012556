"""Asynchronous training against the synchronous schedule, at the same learner batch, model, environment and machine.

    python benchmarks/asynchrony.py            # prints one JSON object; progress goes to standard error

Every run is the real one (`train.run`, wall clock, threads), on an environment whose calls take lognormal time with a long tail: median
`--latency_s`, sigma `--latency_sigma`, cut at `--latency_max_s`; an episode makes three calls. The schedules:

    synchronous     queue.max_staleness=0: the next batch of rollouts starts when the last one was trained, and the slowest is waited for
    asynchronous    a pool of `--sessions` rollouts in flight, staleness bound `--max_staleness`
    tight           asynchronous with the staleness bound `--tight_staleness`
    group barrier   tight, but a rollout may be trained only once all `--group` of its group have finished, as group estimators need

Rollouts per second are trained rollouts over the time between learner steps, the first steps left out. All schedules are run in turn,
`--repeats` times; ratios are taken within a repeat, and medians are reported.
"""

import collections
import json
import pathlib
import statistics
import sys
import tempfile
from typing import Any
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # The repository, for `import sao_jax` without an installation.

from absl import app
from absl import flags
from absl import logging
import ml_collections

from sao_jax import config as settings
from sao_jax import rl
from sao_jax import train
from sao_jax.metrics import read_rows

_REPEATS = flags.DEFINE_integer('repeats', 5, 'Repeats of every schedule.', lower_bound=1)
_BATCH = flags.DEFINE_integer('batch_size', 32, 'Rollouts per learner step.', lower_bound=1)
_SESSIONS = flags.DEFINE_integer('sessions', 384, 'Rollouts in flight of the asynchronous schedules.', lower_bound=1)
_STALENESS = flags.DEFINE_integer('max_staleness', 32, 'Staleness bound of the asynchronous schedule.', lower_bound=0)
_TIGHT = flags.DEFINE_integer('tight_staleness', 3, 'Staleness bound of the tight schedule and of the group barrier.', lower_bound=0)
_GROUP = flags.DEFINE_integer('group', 8, 'Rollouts of a group.', lower_bound=1)
_LATENCY = flags.DEFINE_float('latency_s', 0.15, 'Median of an environment call, in seconds.', lower_bound=0.0)
_SIGMA = flags.DEFINE_float('latency_sigma', 1.2, 'Sigma of its lognormal distribution.', lower_bound=0.0)
_LATENCY_MAX = flags.DEFINE_float('latency_max_s', 10.0, 'Longest call, in seconds.', lower_bound=0.0)
_STEPS = flags.DEFINE_integer('steps', 40, 'Learner steps of an asynchronous run.', lower_bound=4)
_SYNC_STEPS = flags.DEFINE_integer('sync_steps', 8, 'Learner steps of a synchronous run.', lower_bound=4)

SKIPPED = 0.25  # Share of the steps that are left out at the start.


class GroupBarrierFlow(rl.TrainingFlow):
  """Holds finished rollouts back until their group (consecutive prompts) is complete."""

  def __init__(self, *args: Any):
    super().__init__(*args)
    self._put, self.finish = self.finish, self._finish_group
    self._held: dict[int, list[Any]] = collections.defaultdict(list)
    self._ready: collections.deque[Any] = collections.deque()

  def _finish_group(self, rollout: Any, version: int) -> bool:
    group = self._held[rollout.prompt_id // _GROUP.value]
    group.append(rollout)
    if len(group) == _GROUP.value:
      self._ready.extend(self._held.pop(rollout.prompt_id // _GROUP.value))
    self._hand_over(version)
    return True

  def _hand_over(self, version: int) -> None:
    while self._ready and self._put(self._ready[0], version):
      self._ready.popleft()

  def admit(self, version: int) -> Any:
    self._hand_over(version)  # What a full queue refused before.
    return super().admit(version)


def make_config(*, sessions: int, max_staleness: int, steps: int, seed: int) -> settings.Config:
  """A model of 3M parameters on the latency environment, RL alone."""
  config = ml_collections.ConfigDict(settings.default_dict())
  config.seed = seed
  config.model.update({'embed_dim': 256, 'num_layers': 4, 'mlp_dim': 768, 'head_dim': 32, 'num_heads': 8, 'num_kv_heads': 4})
  config.task.update({
      'name': 'scripted', 'max_turns': 4, 'max_turn_tokens': 8, 'max_tokens': 48, 'workers': sessions,
      'settings': {'turns': 2, 'latency_s': _LATENCY.value, 'latency_sigma': _SIGMA.value, 'latency_max_s': _LATENCY_MAX.value}})
  config.sampler.update({'slots': 32, 'sessions': sessions, 'prefill_lengths': (16,), 'prefill_rows': (8, 32), 'cache_lengths': (48,)})
  config.learner.update({'batch_size': _BATCH.value, 'lengths': (48,), 'value_warmup_steps': 0})
  config.queue.update({'capacity': max(4 * _BATCH.value, sessions), 'max_staleness': max_staleness})
  config.rl.policy_steps = steps
  config.evaluation.prompts = 0
  config.checkpoint.every = 10 * steps
  config.logging.update({'tensorboard': False, 'progress': False})
  return settings.from_dict(config.to_dict())


def measure(name: str, repeat: int) -> dict[str, float]:
  """One run of a schedule: rollouts trained per second, share of the learner's time spent waiting, mean and maximal staleness."""
  synchronous = name == 'synchronous'
  bound = {'synchronous': 0, 'asynchronous': _STALENESS.value}.get(name, _TIGHT.value)
  steps = _SYNC_STEPS.value if synchronous else _STEPS.value
  config = make_config(sessions=_BATCH.value if synchronous else _SESSIONS.value, max_staleness=bound, steps=steps, seed=repeat)
  flow = GroupBarrierFlow if name == 'group_barrier' else rl.TrainingFlow
  with tempfile.TemporaryDirectory() as workdir, mock.patch.object(rl, 'TrainingFlow', flow):
    train.run(config, workdir)
    rows = [row for row in read_rows(f'{workdir}/metrics.jsonl') if 'time/run_s' in row]
  kept = rows[max(1, int(SKIPPED * len(rows))):]
  seconds = kept[-1]['time/run_s'] - kept[0]['time/run_s']
  result = {
      'rollouts_per_s': (len(kept) - 1) * _BATCH.value / seconds,
      'learner_wait_fraction': statistics.fmean(row['time/learner_wait_fraction'] for row in kept[1:]),
      'staleness_mean': statistics.fmean(row['queue/staleness_mean'] for row in kept),
      'staleness_max': max(row['queue/staleness_max'] for row in kept)}
  print(name, repeat, json.dumps(result), file=sys.stderr, flush=True)
  return result


def main(unused_argv: list[str]) -> None:
  logging.set_verbosity(logging.WARNING)
  names = ('synchronous', 'asynchronous', 'tight', 'group_barrier')
  runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
  for repeat in range(_REPEATS.value):
    for name in names:
      runs[name].append(measure(name, repeat))

  def ratio(above: str, below: str) -> float:
    return statistics.median(a['rollouts_per_s'] / b['rollouts_per_s'] for a, b in zip(runs[above], runs[below], strict=True))

  print(json.dumps({
      'async_over_sync': ratio('asynchronous', 'synchronous'),
      'tight_async_over_sync': ratio('tight', 'synchronous'),
      'async_over_group_barrier': ratio('tight', 'group_barrier'),
      'learner_wait_fraction': statistics.median(r['learner_wait_fraction'] for r in runs['asynchronous']),
      'settings': {name: value for name, value in flags.FLAGS.flag_values_dict().items() if name in (
          'repeats', 'batch_size', 'sessions', 'max_staleness', 'tight_staleness', 'group', 'latency_s', 'latency_sigma', 'latency_max_s',
          'steps', 'sync_steps')},
      'runs': runs}))


if __name__ == '__main__':
  app.run(main)
