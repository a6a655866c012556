"""Quickstart: a byte-level model of 0.6M parameters learns to work with a calculator tool, on a CPU in minutes.

A short warm start on flawed demonstrations teaches the grammar of the tool; SAO then raises held-out success.

Command: bash launch/quickstart.sh
  or     python launch/train.py --config=configs/quickstart.py --workdir=runs/quickstart
Hardware: 2 CPU cores.
Expected: see the table in README.md; `summary.json` of the run holds held-out success before and after.
"""

from ml_collections import ConfigDict

from sao_jax import config as settings


def get_config() -> ConfigDict:
  config = ConfigDict(settings.default_dict())

  config.task.name = 'calculator'
  config.task.settings = {'min_operations': 2, 'max_operations': 2}
  config.task.max_turns = 8
  config.task.max_turn_tokens = 16
  config.task.max_tokens = 96
  config.learner.lengths = (64, 96)

  config.sft.steps = 250
  config.sft.demonstrations = 4096
  config.value_pretrain.rollouts = 512

  config.rl.policy_steps = 60
  config.learner.batch_size = 64
  config.learner.value_warmup_steps = 5
  config.learner.policy.learning_rate = 3e-4
  config.learner.value.learning_rate = 1e-3

  config.evaluation.prompts = 256
  config.evaluation.every = 20
  return config
