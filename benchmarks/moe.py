"""Speed of a mixture of experts on the CPU, side by side with transformers (PyTorch).

    python benchmarks/moe.py [--torch-python=PATH] [--repeats=5]        prints one JSON object

A small Qwen3-MoE shape (6 layers, width 512, 8 query and 4 key/value heads of 64, 32 experts of 256 with 4 for each token, vocabulary 32768,
tied), float32.

    decode      16 prompts of 32 random tokens, 64 tokens each, temperature 1, log-probabilities on, against `generate`
    train       one policy step (forward, DIS loss, backward, clipping, AdamW) on 8 x 256 tokens, every token but the first an action,
                against the same forward-backward-AdamW step of transformers' Qwen3MoeForCausalLM

transformers computes the experts in the way that --torch-experts names: 'grouped_mm' (its default), 'batched_mm' or 'eager'. Both sides
alternate in one run; the figures are medians. PyTorch runs in a process of its own, by any Python that has torch and transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from typing import Any

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import numpy as np

from benchmarks.learner import make_batch
from sao_jax import config as config_lib, host_allocator, sharding
from sao_jax.config import ExpertsConfig, ModelConfig, SamplerConfig
from sao_jax.learner import Learner
from sao_jax.models import transformer
from sao_jax.sampler import Sampler
from sao_jax.types import ParamSnapshot

ROWS, PROMPT, NEW = 16, 32, 64
TRAIN_ROWS, TRAIN_LENGTH = 8, 256
MODEL = ModelConfig(
    vocab_size=32768, embed_dim=512, num_layers=6, num_heads=8, num_kv_heads=4, head_dim=64, mlp_dim=1536, rope_theta=1e6, qk_norm=True,
    tie_embeddings=True, max_length=2048, experts=ExpertsConfig(count=32, top_k=4, mlp_dim=256))
SETTINGS = SamplerConfig(
    slots=ROWS, sessions=16, page_size=16, chunk_steps=8, prefill_lengths=(32,), prefill_rows=(16,), cache_lengths=(64, 96))

TORCH_WORKER = '''
import json, sys, time
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
torch.manual_seed(0)
model = Qwen3MoeForCausalLM(Qwen3MoeConfig(
    vocab_size=32768, hidden_size=512, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4,
    head_dim=64, tie_word_embeddings=True, max_position_embeddings=2048, rope_parameters=dict(rope_type='default', rope_theta=1e6),
    num_experts=32, num_experts_per_tok=4, moe_intermediate_size=256, norm_topk_prob=True))
model.set_experts_implementation(sys.argv[1])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0)
def decode(rows, prompt, new):
  ids = torch.randint(3, 32768, (rows, prompt))
  model.eval()
  with torch.inference_mode():
    model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=new,
        min_new_tokens=new, eos_token_id=None, pad_token_id=0)
def train(rows, length):
  ids = torch.randint(0, 32768, (rows, length))
  model.train()
  logits = model(ids, use_cache=False).logits[:, :-1].float()
  log_prob = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])
  (-log_prob.mean()).backward()
  torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
  optimizer.step()
  optimizer.zero_grad()
print('ready', torch.__version__, flush=True)
for line in sys.stdin:
  name, *sizes = json.loads(line)
  start = time.perf_counter()
  {'decode': decode, 'train': train}[name](*sizes)
  print(time.perf_counter() - start, flush=True)
'''


class TorchSide:
  """transformers in another process; each call is timed there."""

  def __init__(self, python: str, experts: str):
    self._process = subprocess.Popen([python, '-c', TORCH_WORKER, experts], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    ready = self._process.stdout.readline().split()
    if not ready or ready[0] != 'ready':
      raise SystemExit(f'{python} cannot run the PyTorch side (its error stands above): install torch and transformers there, or name '
                       'another Python with --torch-python.')
    self.version = ready[1]

  def seconds(self, *call: Any) -> float:
    self._process.stdin.write(json.dumps(call) + '\n')
    self._process.stdin.flush()
    line = self._process.stdout.readline()
    if not line:
      raise RuntimeError('The PyTorch process ended; its error stands above.')
    return float(line)

  def close(self) -> None:
    self._process.stdin.close()
    self._process.wait(timeout=60)


class Decode:
  """One batch of completions a call."""

  def __init__(self):
    params = jax.jit(lambda key: transformer.init(transformer.Policy, MODEL, key))(jax.random.key(0))
    self._sampler = Sampler(MODEL, SETTINGS, ParamSnapshot(0, params), seed=0, max_length=PROMPT + NEW)
    self._sampler.warm_up()
    self._rng = np.random.default_rng(1)

  def __call__(self) -> float:
    prompts = self._rng.integers(3, MODEL.vocab_size, (ROWS, PROMPT)).tolist()
    start = time.perf_counter()
    done = self._sampler.generate(prompts, max_new_tokens=[NEW] * ROWS)
    elapsed = time.perf_counter() - start
    assert all(len(c.tokens) == NEW for c in done)
    return elapsed


class Train:
  """One policy step a call."""

  def __init__(self):
    learner_config = config_lib.LearnerConfig(
        batch_size=TRAIN_ROWS, lengths=(TRAIN_LENGTH,), value_steps=0, value_warmup_steps=0)
    config = config_lib.Config(
        model=MODEL, learner=learner_config, algorithm=config_lib.AlgorithmConfig(advantage='reinforce_batch_centred'))
    self._learner = Learner(config, sharding.make_mesh(jax.devices()[:1], learner_config.mesh))
    self._state = self._learner.begin_stage(self._learner.init_state(self._learner.init_policy(jax.random.key(0))), 'rl')
    self._batch = make_batch(TRAIN_ROWS, TRAIN_LENGTH, MODEL.vocab_size)
    self._learner.warm_up('rl')

  def __call__(self) -> float:
    start = time.perf_counter()
    self._state, metrics = self._learner.update(self._state, self._batch, version=0, train_policy=True)
    jax.block_until_ready((self._state, metrics))
    return time.perf_counter() - start


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--torch-python', default=sys.executable, help='a Python that has torch and transformers')
  parser.add_argument('--torch-experts', default='grouped_mm', choices=('grouped_mm', 'batched_mm', 'eager'))
  parser.add_argument('--repeats', type=int, default=5)
  parser.add_argument('--skip-torch', action='store_true', help='measure our side only')
  args = parser.parse_args()
  host_allocator.keep_freed_memory()  # As a run does; PyTorch has a process, and an allocator, of its own.
  torch = None if args.skip_torch else TorchSide(args.torch_python, args.torch_experts)
  calls: dict[str, Any] = {'decode': Decode(), 'train': Train()}
  if torch:
    calls['torch_decode'] = lambda: torch.seconds('decode', ROWS, PROMPT, NEW)
    calls['torch_train'] = lambda: torch.seconds('train', TRAIN_ROWS, TRAIN_LENGTH)
  seconds: dict[str, list[float]] = {name: [] for name in calls}
  for repeat in range(args.repeats + 1):
    for name in sorted(calls, key=lambda n: n.removeprefix('torch_')):
      elapsed = calls[name]()
      print(f'{name}: {elapsed:.3f} s', file=sys.stderr, flush=True)
      if repeat:  # The first round warms up.
        seconds[name].append(elapsed)
  median = {name: statistics.median(samples) for name, samples in seconds.items()}
  result = {
      'decode_tok_s': ROWS * NEW / median['decode'], 'train_tok_s': TRAIN_ROWS * TRAIN_LENGTH / median['train'],
      'seconds': seconds, 'experts': vars(MODEL.experts), 'jax': jax.__version__, 'cpus': os.cpu_count(), 'repeats': args.repeats}
  if torch:
    torch.close()
    result |= {
        'torch_decode_tok_s': ROWS * NEW / median['torch_decode'],
        'torch_train_tok_s': TRAIN_ROWS * TRAIN_LENGTH / median['torch_train'],
        'decode_over_torch': median['torch_decode'] / median['decode'], 'train_over_torch': median['torch_train'] / median['train'],
        'torch': torch.version, 'torch_experts': args.torch_experts}
  print(json.dumps(result))


if __name__ == '__main__':
  main()
