"""Quickstart: a byte-level model of 0.6M parameters learns to work with a calculator tool, on a CPU in minutes.

A short warm start on flawed demonstrations (they do operations in the wrong order, or answer too early) teaches the grammar of the tool;
SAO then raises held-out success.

Command: bash launch/quickstart.sh
  or     python launch/train.py --config=configs/quickstart.py --workdir=runs/quickstart
Hardware: 2 CPU cores.
Expected: see the table in README.md; `summary.json` of the run holds held-out success before and after.
"""

from ml_collections import ConfigDict

from sao_jax import config as settings


def get_config() -> ConfigDict:
  config = ConfigDict(settings.default_dict())

  config.model.qk_norm = True

  config.task.name = 'calculator'
  config.task.settings = {'min_operations': 2, 'max_operations': 2, 'demonstration_noise': 0.3}
  config.task.max_turns = 5
  config.task.max_turn_tokens = 16
  config.task.max_tokens = 56
  config.learner.lengths = (56,)

  config.sampler.slots = 64
  config.sampler.sessions = 96
  config.sampler.prefill_lengths = (16,)
  config.sampler.prefill_rows = (32,)
  config.sampler.cache_lengths = (64,)

  config.sft.steps = 700
  config.sft.batch_size = 16
  config.sft.demonstrations = 700 * 16  # None is seen twice.
  config.sft.optimizer.learning_rate = 3e-3
  config.sft.optimizer.schedule = 'cosine'
  config.sft.optimizer.warmup_steps = 30
  config.sft.optimizer.decay_steps = 700
  config.sft.optimizer.end_fraction = 0.05
  config.value_pretrain.rollouts = 512

  config.rl.policy_steps = 100
  config.queue.max_staleness = 1
  config.algorithm.truncation = 'zero'  # Turns are limited: an answer that does not come in time is worth nothing.
  config.learner.batch_size = 64
  config.learner.value_warmup_steps = 2
  config.learner.policy.learning_rate = 5e-4
  config.learner.value.learning_rate = 1e-3

  config.evaluation.prompts = 256
  config.evaluation.every = 25
  config.checkpoint.every = 25
  return config
