"""Online learning in small: a byte-level model of 0.6M parameters writes about topics while the rewarded style changes.

A warm start on sentences of two styles and of none gives a policy that writes in each of them now and then. SAO follows what is rewarded: academic
at first, cute from the sixth version on, told by nothing but rewards. A policy that has come to write in one style alone finds no other one again,
so the change comes while the other style is still seen. lambda is 1: with the length-adaptive one the change
is followed too, but proper writing suffers on the way. docs/results.md has both, and what did not work, four styles among it.

Command: python launch/train.py --config=configs/style_shift_tiny.py --workdir=runs/style_shift_tiny
Hardware: 2 CPU cores.
Expected: held-out success from 0.2 at temperature 1 and 0 greedy to above 0.9 in both, in about 7 minutes on shared cores (docs/results.md).
`metrics.jsonl` holds the share of every style at every step ('environment/cute', ...).
"""

from ml_collections import ConfigDict

from sao_jax import config as settings

STYLES = ['academic', 'cute']


def get_config() -> ConfigDict:
  config = ConfigDict(settings.default_dict())

  config.model.qk_norm = True

  config.task.name = 'style_shift'
  config.task.settings = {'styles': STYLES, 'phase_by': 'version', 'phase_length': 6, 'demonstration_noise': 0.1}
  config.task.max_turns = 1
  config.task.max_turn_tokens = 48
  config.task.max_tokens = 64
  config.learner.lengths = (64,)

  config.sampler.slots = 64
  config.sampler.sessions = 384
  config.sampler.prefill_lengths = (16,)
  config.sampler.prefill_rows = (32,)
  config.sampler.cache_lengths = (64,)

  config.sft.steps = 300
  config.sft.batch_size = 16
  config.sft.demonstrations = 300 * 16  # None is seen twice.
  config.sft.optimizer.learning_rate = 3e-3
  config.sft.optimizer.schedule = 'cosine'
  config.sft.optimizer.warmup_steps = 30
  config.sft.optimizer.decay_steps = 300
  config.sft.optimizer.end_fraction = 0.05
  config.value_pretrain.rollouts = 256

  config.rl.policy_steps = 60
  config.queue.max_staleness = 1
  config.algorithm.gae_lambda = 1.0
  config.algorithm.truncation = 'zero'  # An answer without an end is none.
  config.learner.batch_size = 256
  config.learner.value_warmup_steps = 2
  config.learner.policy.learning_rate = 3e-4
  config.learner.value.learning_rate = 2e-3

  config.evaluation.prompts = 256
  config.evaluation.every = 20
  config.checkpoint.every = 20
  return config
