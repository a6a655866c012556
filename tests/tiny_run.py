"""A run of every stage in seconds, for tests: two layers of width 32 on the scripted environment, whose reward is a share of characters."""

import pathlib
from typing import Any

import jax
import ml_collections

from sao_jax import config as settings
from sao_jax import train
from sao_jax.metrics import read_rows
from sao_jax.run import Run

TINY: dict[str, Any] = {
    'model.embed_dim': 32, 'model.num_layers': 2, 'model.num_heads': 2, 'model.num_kv_heads': 1, 'model.head_dim': 16, 'model.mlp_dim': 64,
    'task.name': 'scripted', 'task.settings': {'turns': 1, 'max_turns': 3}, 'task.max_tokens': 64, 'task.max_turns': 4, 'task.max_turn_tokens': 12,
    'sampler.slots': 8, 'sampler.sessions': 24, 'sampler.chunk_steps': 4, 'sampler.prefill_lengths': (16,), 'sampler.prefill_rows': (8,),
    'sampler.cache_lengths': (64,), 'sampler.on_update': 'recompute_cache',
    'learner.batch_size': 8, 'learner.lengths': (64,), 'learner.value_warmup_steps': 2, 'learner.policy.learning_rate': 1e-3,
    'learner.value.learning_rate': 1e-3, 'queue.capacity': 32, 'clock.kind': 'virtual',
    'sft.steps': 40, 'sft.batch_size': 8, 'sft.demonstrations': 64, 'sft.optimizer.learning_rate': 1e-2, 'value_pretrain.rollouts': 16, 'value_pretrain.epochs': 1,
    'rl.policy_steps': 8, 'evaluation.prompts': 8, 'evaluation.every': 4, 'evaluation.during_prompts': 4, 'checkpoint.every': 3,
    'logging.tensorboard': False, 'logging.progress': False,
}


def tiny_config(**overrides: Any) -> settings.Config:
  """The tiny settings with overrides by dotted name ('learner.batch_size' written as `learner__batch_size`)."""
  values = ml_collections.ConfigDict(settings.default_dict())
  for path, value in {**TINY, **{k.replace('__', '.'): v for k, v in overrides.items()}}.items():
    section = values
    *parents, name = path.split('.')
    for parent in parents:
      section = section[parent]
    section[name] = ml_collections.ConfigDict(value) if isinstance(value, dict) else value
  return settings.from_dict(values.to_dict())


class Interrupted(Exception):
  """Stands for a kill."""


def run(workdir, monkeypatch, *, stop_at=None, **overrides):
  """Runs to the end, or until learner step `stop_at` is done; returns summary, final state and metric rows."""
  kept = {}

  def keep(this):
    kept['state'] = jax.device_get(this.state)
    return finish(this)

  def stop(self, *args, **kwargs):
    step_done(self, *args, **kwargs)
    if self.progress.step == stop_at:
      raise Interrupted

  finish, step_done = train.finish, Run.step_done
  with monkeypatch.context() as patch:
    patch.setattr(train, 'finish', keep)
    patch.setattr(Run, 'step_done', stop)
    summary = train.run(tiny_config(**overrides), workdir)
  return summary, kept['state'], read_rows(pathlib.Path(workdir) / 'metrics.jsonl')
