"""A coding run that a small machine can train on: functions as repositories, judged by hidden tests in sandboxes, all stages.

The tasks are generated one-line functions in the form of MBPP items as repositories (`environments/swe/small_tasks.py`): the policy sees a
file that ends in 'return ' and writes the rest; every rollout's file is run with hidden tests in a sandbox of its own, with a control run
where all pass. With FILE, the items of MBPP come along, in proportion to their number. A model of this size solves none of them worth the
name: they show that real items go through the same path, and cost time.

Command: python launch/train.py --config=configs/mbpp_tiny.py --workdir=runs/mbpp_tiny
         python launch/train.py --config=configs/mbpp_tiny.py:FILE --workdir=runs/mbpp_tiny_mixed
FILE: mbpp.jsonl of github.com/google-research/google-research (CC-BY-4.0), rows with 'text', 'code' and 'test_list'.
Hardware: 2 CPU cores, with a sandbox (see docs/sandbox.md).
Expected: ends with a balanced accounting; most of its time goes to judging, about 0.3 s of CPU a rollout and twice that where all tests pass.
The first policy steps see prompts of the demonstrations, so their success is above that of the later ones. No gain was shown yet: docs/results.md.
"""

from ml_collections import ConfigDict

from sao_jax import config as settings


def get_config(file: str = '') -> ConfigDict:
  config = ConfigDict(settings.default_dict())

  config.model.embed_dim = 96
  config.model.num_layers = 3
  config.model.num_heads = 4
  config.model.num_kv_heads = 4
  config.model.head_dim = 24
  config.model.mlp_dim = 256

  config.task.name = 'swe'
  config.task.settings = {
      'source': file, 'items': bool(file), 'generated': 4000, 'interface': 'reply', 'conversation': 'raw',
      'stop_strings': () if file else ('\n',), 'test_time_s': 10.0, 'memory_mb': 512, 'test_share': 0.1}
  config.task.max_turns = 1
  config.task.max_turn_tokens = 256 if file else 24
  config.task.max_tokens = 1024 if file else 96
  config.task.workers = 4
  config.learner.lengths = (96, 1024) if file else (96,)
  config.model.max_length = 1024 if file else 96

  config.sft.steps = 120
  config.sft.batch_size = 16
  config.sft.demonstrations = 200  # Each is played, and so judged: this costs more than the steps.
  config.sft.optimizer.learning_rate = 2e-3
  config.sft.optimizer.warmup_steps = 20

  config.sampler.slots = 32
  config.sampler.sessions = 32
  config.sampler.prefill_lengths = (64,)
  config.sampler.prefill_rows = (8, 32)

  config.algorithm.truncation = 'zero'  # A line that does not come to its end is no function.
  config.learner.batch_size = 48
  config.learner.micro_batches = 8 if file else 1  # 48 rows of 1,024 tokens at once take more than 20 GB.
  config.learner.value_warmup_steps = 2
  config.learner.policy.learning_rate = 1e-4
  config.learner.value.learning_rate = 1e-3
  config.value_pretrain.rollouts = 96
  config.value_pretrain.epochs = 4
  config.queue.capacity = 64

  config.rl.policy_steps = 16
  config.evaluation.prompts = 96
  config.checkpoint.every = 12
  config.checkpoint.keep = 1
  return config
