r"""A byte-level model of 0.6M parameters learns to work with a Python interpreter, on a CPU in minutes; its code runs in a sandbox.

A question is a small program, `a=47*83;a%97+a`, whose value is asked for. The policy writes a line of code after `>`, sees what it
comes to, and answers with a number; the interpreter keeps its state, so the second line may use what the first one has set. A short warm start on
flawed demonstrations (they answer without the tool, leave out the first line, or miscopy a digit) teaches the form; SAO does the rest.

Command: python launch/train.py --config=configs/python_tool_tiny.py --workdir=runs/python_tool_tiny
Hardware: 2 CPU cores; Linux with user namespaces, or root, or bubblewrap (docs/sandbox.md).
Expected: see docs/results.md; `summary.json` of the run holds held-out success before and after.
"""

from ml_collections import ConfigDict

from sao_jax import config as settings


def get_config() -> ConfigDict:
  config = ConfigDict(settings.default_dict())

  config.model.qk_norm = True

  config.task.name = 'python_tool'
  config.task.settings = {
      'conversation': 'raw', 'markers': ('>', '\n'), 'grader': 'integer', 'answer_format': 'last_line', 'system_prompt': '',
      'traceback': False, 'max_turns': 4, 'max_malformed': 2, 'time_limit_s': 5.0, 'memory_mb': 128, 'expressions': {'noise': 0.4}}
  config.task.max_turns = 4
  config.task.max_turn_tokens = 20
  config.task.max_tokens = 72
  config.task.workers = 8
  config.learner.lengths = (72,)

  config.sampler.slots = 64
  config.sampler.sessions = 96
  config.sampler.prefill_lengths = (16, 32)
  config.sampler.prefill_rows = (32,)
  config.sampler.cache_lengths = (80,)

  config.sft.steps = 700
  config.sft.batch_size = 16
  config.sft.demonstrations = 3000  # Each is played in a box of its own.
  config.sft.optimizer.learning_rate = 3e-3
  config.sft.optimizer.schedule = 'cosine'
  config.sft.optimizer.warmup_steps = 30
  config.sft.optimizer.decay_steps = 700
  config.sft.optimizer.end_fraction = 0.05
  config.value_pretrain.rollouts = 256

  config.rl.policy_steps = 50
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
