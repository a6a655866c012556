"""Every stage in seconds: a model of 2 layers and width 32 under the virtual clock, for debugging and tests. It learns nothing.

With `clock.kind='virtual'` and `sampler.on_update='recompute_cache'` the run is a function of the seed alone, also across kill and resume.

Command: python launch/train.py --config=configs/tiny_debug.py --workdir=runs/tiny_debug
Hardware: 2 CPU cores.
Expected: ends within half a minute with a balanced accounting in `summary.json`.
"""

from ml_collections import ConfigDict

from sao_jax import config as settings


def get_config() -> ConfigDict:
  config = ConfigDict(settings.default_dict())

  config.model.embed_dim = 32
  config.model.num_layers = 2
  config.model.num_heads = 2
  config.model.num_kv_heads = 1
  config.model.head_dim = 16
  config.model.mlp_dim = 64

  config.task.settings = {'min_operations': 1, 'max_operations': 2}
  config.task.max_turns = 4
  config.task.max_turn_tokens = 12
  config.task.max_tokens = 64

  config.clock.kind = 'virtual'
  config.sampler.on_update = 'recompute_cache'
  config.sampler.slots = 8
  config.sampler.sessions = 16
  config.sampler.prefill_lengths = (16,)
  config.sampler.prefill_rows = (8,)

  config.learner.batch_size = 8
  config.learner.lengths = (64,)
  config.learner.value_warmup_steps = 2
  config.learner.policy.learning_rate = 1e-3
  config.learner.value.learning_rate = 1e-3
  config.queue.capacity = 32

  config.sft.steps = 20
  config.sft.batch_size = 16
  config.sft.demonstrations = 128
  config.value_pretrain.rollouts = 16
  config.value_pretrain.epochs = 1
  config.rl.policy_steps = 6
  config.evaluation.prompts = 16
  config.evaluation.every = 3
  config.evaluation.during_prompts = 8
  config.checkpoint.every = 2
  return config
