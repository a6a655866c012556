"""Speed and memory of the learner on the CPU, side by side with PyTorch.

    python benchmarks/learner.py [--torch-python=PATH]        prints one JSON object

One policy step (forward, DIS loss, backward, clipping, AdamW) of a 42M-parameter Qwen3 shape on 8 x 256 tokens, every token but the first
an action, against the same forward-backward-AdamW step of transformers' Qwen3ForCausalLM. One full SAO step (2 value steps, values again,
policy step) against the policy step alone. The three alternate in one run; the medians are compared.

The memory figure is the peak temporary memory of loss and gradients at vocabulary 151,936 and 8,192 positions, from the compiler, over the
bytes of one float32 logits array of all positions. PyTorch runs in a process of its own, by any Python that has torch and transformers.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

from sao_jax import algorithms, config as config_lib, host_allocator, log_probs, sharding, updates
from sao_jax.learner import Learner
from sao_jax.models import transformer
from sao_jax.types import Batch

ROWS, LENGTH = 8, 256
SHAPE = dict(
    vocab_size=32768, embed_dim=512, num_layers=8, num_heads=8, num_kv_heads=4, head_dim=64, mlp_dim=1536, rope_theta=1e6, qk_norm=True,
    tie_embeddings=True, max_length=2048)
LOSS = dict(vocabulary=151936, rows=8, length=1024, width=512)

TORCH_WORKER = '''
import sys, time
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
torch.manual_seed(0)
rows, length = 8, 256
model = Qwen3ForCausalLM(Qwen3Config(
    vocab_size=32768, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4,
    head_dim=64, tie_word_embeddings=True, max_position_embeddings=2048, rope_theta=1e6))
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0)
ids = torch.randint(0, 32768, (rows, length))
def step():
  start = time.perf_counter()
  logits = model(ids, use_cache=False).logits[:, :-1].float()
  log_prob = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])
  (-log_prob.mean()).backward()
  torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
  optimizer.step()
  optimizer.zero_grad()
  return time.perf_counter() - start
print('ready', torch.__version__, flush=True)
for line in sys.stdin:
  print(step(), flush=True)
'''


class TorchStep:
  """The PyTorch step in a process of its own, one step a call."""

  def __init__(self, python: str):
    self._process = subprocess.Popen([python, '-c', TORCH_WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    ready = self._process.stdout.readline().split()
    if not ready or ready[0] != 'ready':
      self.close()
      raise SystemExit(f'{python} cannot run the PyTorch side (its error stands above): install torch and transformers there, or name '
                       'another Python with --torch-python.')
    self.version = ready[1]

  def __call__(self) -> float:
    self._process.stdin.write('step\n')
    self._process.stdin.flush()
    line = self._process.stdout.readline()
    if not line:
      raise RuntimeError('The PyTorch process ended; its error stands above.')
    return float(line)

  def close(self) -> None:
    self._process.stdin.close()
    self._process.wait(timeout=60)


def make_batch(rows: int, length: int, vocabulary: int) -> Batch:
  """Random tokens, every one but the first an action of version 0, near the log-probability of an untrained model."""
  rng = np.random.default_rng(0)
  mask = np.broadcast_to(np.arange(length) > 0, (rows, length)).copy()
  behaviour = np.where(mask, -np.log(vocabulary) + 0.1 * rng.normal(size=mask.shape), 0.0).astype(np.float32)
  reward = np.array(algorithms.place_outcome_reward(rng.integers(0, 2, rows).astype(np.float32), mask))
  return Batch(
      tokens=rng.integers(0, vocabulary, mask.shape).astype(np.int32), token_mask=np.ones_like(mask), action_mask=mask,
      behaviour_log_prob=behaviour, reward=reward, policy_version=np.where(mask, 0, -1).astype(np.int32),
      truncated=np.zeros(rows, bool), turn=np.zeros(mask.shape, np.int32))


class SaoStep:
  """An RL update of the learner, one a call; without value steps and values it is the policy step alone."""

  def __init__(self, *, policy_only: bool, logits_chunk: int):
    learner_config = config_lib.LearnerConfig(
        batch_size=ROWS, lengths=(LENGTH,), value_steps=0 if policy_only else 2, value_warmup_steps=0, logits_chunk=logits_chunk)
    advantage = 'reinforce_batch_centred' if policy_only else 'skip_observation_gae'
    config = config_lib.Config(
        model=config_lib.ModelConfig(**SHAPE), learner=learner_config, algorithm=config_lib.AlgorithmConfig(advantage=advantage))
    self._learner = Learner(config, sharding.make_mesh(jax.devices()[:1], learner_config.mesh))
    state = self._learner.init_state(self._learner.init_policy(jax.random.key(0)))
    self._state = self._learner.begin_stage(state, 'rl')
    self._batch = make_batch(ROWS, LENGTH, SHAPE['vocab_size'])
    self._learner.warm_up('rl')

  def __call__(self) -> float:
    start = time.perf_counter()
    self._state, metrics = self._learner.update(self._state, self._batch, version=0, train_policy=True)
    jax.block_until_ready((self._state, metrics))
    return time.perf_counter() - start


def loss_memory(vocabulary: int, rows: int, length: int, width: int) -> dict[str, int]:
  """Bytes of the learner's compiled loss with its gradients by hidden states and unembedding, at default settings, from the compiler."""
  model = config_lib.ModelConfig(vocab_size=vocabulary, embed_dim=width, num_layers=1, max_length=length)
  update = updates.Updates(config_lib.Config(model=model), lambda x, axes: x, 1, lambda gradient: gradient)
  params = transformer.abstract(transformer.Policy, model)[1]
  objective = functools.partial(algorithms.dis_policy_loss, epsilon_low=0.3, epsilon_high=5.0)

  def loss(hidden, weight, tokens, mask, behaviour, advantage):
    _, unembed = update._head({**params, 'trunk.embedding': weight})
    terms = log_probs.token_terms(
        update._make_head(unembed, 1.0), hidden, weight, tokens, mask, objective, (behaviour, advantage), with_gradient=True)
    return terms.stats['loss'], terms.hidden_gradient, terms.weight_gradient

  shapes = [(rows, length, width), (vocabulary, width)] + [(rows, length)] * 4
  dtypes = ['float32', 'float32', 'int32', 'bool', 'float32', 'float32']
  arguments = [jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, dtypes, strict=True)]
  analysis = jax.jit(loss).lower(*arguments).compile().memory_analysis()
  return {
      'temp_bytes': analysis.temp_size_in_bytes, 'logits_bytes': vocabulary * rows * length * 4,
      'output_bytes': analysis.output_size_in_bytes}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--torch-python', default=sys.executable, help='a Python that has torch and transformers')
  parser.add_argument('--repeats', type=int, default=5)
  parser.add_argument(
      '--logits-chunk', type=int, default=0, help='positions whose logits exist at once in the timed steps; 0: as the learner chooses')
  args = parser.parse_args()
  host_allocator.keep_freed_memory()  # As a run does; PyTorch has a process, and an allocator, of its own.
  torch_step = TorchStep(args.torch_python)
  steps = {
      'policy': SaoStep(policy_only=True, logits_chunk=args.logits_chunk), 'torch': torch_step,
      'sao': SaoStep(policy_only=False, logits_chunk=args.logits_chunk)}
  seconds: dict[str, list[float]] = {name: [] for name in steps}
  for repeat in range(args.repeats + 1):
    for name, step in steps.items():
      elapsed = step()
      if repeat:  # The first round warms up.
        seconds[name].append(elapsed)
  torch_step.close()
  median = {name: statistics.median(samples) for name, samples in seconds.items()}
  memory = loss_memory(**LOSS)
  print(json.dumps({
      'policy_step_tok_s': ROWS * LENGTH / median['policy'], 'torch_step_tok_s': ROWS * LENGTH / median['torch'],
      'policy_over_torch': median['torch'] / median['policy'], 'sao_step_over_policy_step': median['sao'] / median['policy'],
      'loss_temp_bytes_over_logits_bytes': memory['temp_bytes'] / memory['logits_bytes'],
      'seconds': seconds, 'loss_memory': memory, 'loss_shape': LOSS, 'shape': SHAPE, 'batch': [ROWS, LENGTH],
      'jax': jax.__version__, 'torch': torch_step.version, 'cpus': os.cpu_count()}))


if __name__ == '__main__':
  main()
