"""Speed of the sampler on the CPU, side by side with transformers' `generate` (PyTorch).

    python benchmarks/sampler.py [--torch-python=PATH] [--repeats=5] [--requests=512] [--only-stalls]        prints one JSON object

A 42M-parameter Qwen3 shape (8 layers, width 512, feed-forward 1536, 8 query and 4 key/value heads of 64, vocabulary 32768, tied), float32,
prompts of 32 random tokens, temperature 1, log-probabilities on, 16 rows on both sides.

    uniform     16 prompts, 64 tokens each
    stream      512 requests with output lengths lognormal(3.3, 0.9) clipped to 4..256, the same for both sides. The sampler refills slots
                as rows end; transformers takes static batches of 16 in order of arrival, each until its longest row is done. Useful
                tokens are those that were asked for.
    tiny        the default model (0.6M parameters), 64 slots, 256 prompts of 24, 40 tokens each: what surrounds the model counts here
    stalls      what publishing parameters from another thread, as a learner does, costs decoding

Both sides alternate in one run; the figures are medians. The stream takes transformers about four minutes a repeat, a whole run about half
an hour. PyTorch runs in a process of its own, by any Python that has torch and transformers.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import pathlib
import queue
import statistics
import subprocess
import sys
import threading
import time

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import numpy as np

from sao_jax import sharding
from sao_jax.config import ModelConfig, SamplerConfig
from sao_jax.models import transformer
from sao_jax.param_store import ParamStore
from sao_jax.sampler import Request, Sampler
from sao_jax.types import ParamSnapshot

ROWS, PROMPT, UNIFORM = 16, 32, 64
MODEL = ModelConfig(
    vocab_size=32768, embed_dim=512, num_layers=8, num_heads=8, num_kv_heads=4, head_dim=64, mlp_dim=1536, rope_theta=1e6, qk_norm=True,
    tie_embeddings=True, max_length=288)
SETTINGS = SamplerConfig(
    slots=ROWS, sessions=64, page_size=16, chunk_steps=8, prefill_lengths=(32,), prefill_rows=(1, 2, 4, 16),
    cache_lengths=(64, 96, 128, 192, 288))
TINY = ModelConfig(max_length=128)
TINY_SETTINGS = SamplerConfig(slots=64, sessions=128, prefill_lengths=(32,))

TORCH_WORKER = '''
import json, sys, time
import torch, transformers
from transformers import Qwen3Config, Qwen3ForCausalLM
torch.manual_seed(0)
model = Qwen3ForCausalLM(Qwen3Config(
    vocab_size=32768, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4,
    head_dim=64, tie_word_embeddings=True, max_position_embeddings=2048, rope_theta=1e6)).eval()
def generate(rows, length):
  ids = torch.randint(3, 32768, (rows, 32))
  with torch.inference_mode():
    model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=length,
        min_new_tokens=length, eos_token_id=None, pad_token_id=0)
generate(16, 8)
print('ready', torch.__version__, transformers.__version__, flush=True)
for line in sys.stdin:
  batches = json.loads(line)
  start = time.perf_counter()
  for rows, length in batches:
    generate(rows, length)
  print(time.perf_counter() - start, flush=True)
'''


class TorchSide:
  """transformers in another process: static batches of (rows, new tokens), one after the other."""

  def __init__(self, python: str):
    self._process = subprocess.Popen(
        [python, '-c', TORCH_WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    ready, *versions = self._process.stdout.readline().split() or ['']
    if ready != 'ready':
      raise SystemExit(
          f'{python} cannot run transformers (its error is above). Install requirements/parity.txt there, or name a Python that has torch '
          'and transformers with --torch-python.')
    self.versions = dict(zip(('torch', 'transformers'), versions))

  def seconds(self, batches: list[tuple[int, int]]) -> float:
    self._process.stdin.write(json.dumps(batches) + '\n')
    self._process.stdin.flush()
    return float(self._process.stdout.readline())

  def close(self) -> None:
    self._process.stdin.close()
    self._process.wait(timeout=60)


def make_sampler(model: ModelConfig, settings: SamplerConfig) -> Sampler:
  params = jax.jit(lambda key: transformer.init(transformer.Policy, model, key))(jax.random.key(0))
  sampler = Sampler(model, settings, ParamSnapshot(0, params), seed=0)
  sampler.warm_up()
  return sampler


def seconds(sampler: Sampler, lengths: list[int], prompt: int, rng: np.random.Generator) -> float:
  """Time for one completion of each length."""
  prompts = rng.integers(3, sampler.model_config.vocab_size, (len(lengths), prompt)).tolist()
  start = time.perf_counter()
  out = sampler.generate(prompts, max_new_tokens=lengths)
  elapsed = time.perf_counter() - start
  assert [len(c.tokens) for c in out] == lengths
  return elapsed


def stream_lengths(requests: int) -> list[int]:
  return np.clip(np.random.default_rng(0).lognormal(3.3, 0.9, requests).astype(int), 4, 256).tolist()


class Publisher:
  """Publishes in a thread of its own, as a learner does, whenever it is asked to."""

  def __init__(self, sampler: Sampler):
    shapes = sampler._shapes
    convert = sharding.make_converter(sampler._programs.param_shardings, shapes.dtype)
    self._params = {path: jax.numpy.copy(x) for path, x in sampler._params.items()}
    self.store = ParamStore(convert, self._params)
    self._asked: queue.SimpleQueue[bool] = queue.SimpleQueue()
    threading.Thread(target=self._loop, daemon=True).start()

  def ask(self) -> None:
    self._asked.put(True)

  def _loop(self) -> None:
    while True:
      self._asked.get()
      self.store.publish(self._params)


def stalls(sampler: Sampler, publishes: int = 20) -> dict[str, float]:
  """What publishes beside decoding cost it: between two of them a few chunks without, then the time that the chunks from the request until
  the new version is drawn with took beyond the median chunk."""
  publisher, original = Publisher(sampler), sampler.step
  plain, added = [], []
  sampler.reset(publisher.store.latest(), seed=0, temperature=1.0)

  def chunk() -> float:
    start = time.perf_counter()
    snapshot = publisher.store.latest()
    if snapshot.version != sampler.version:
      sampler.update(snapshot)
    original()
    return time.perf_counter() - start

  for publish in range(publishes):
    for row in range(ROWS):
      sampler.release(row)
      sampler.submit(Request(session=row, tokens=np.full(PROMPT, 5), prompt_id=row, attempt=publish, max_new_tokens=200))
    chunk()  # The prefill.
    quiet = [chunk() for _ in range(6)]
    version, during = sampler.version, []
    publisher.ask()
    while sampler.version == version:
      during.append(chunk())
    plain += quiet
    added.append(sum(during) - len(during) * statistics.median(quiet))
  return {
      'publish_stall_median_s': statistics.median(added), 'publish_stall_max_s': max(added), 'chunk_median_s': statistics.median(plain),
      'params_stall_max_s': sampler.stats()['params_stall_max_s']}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--torch-python', default=sys.executable, help='a Python that has torch and transformers')
  parser.add_argument('--repeats', type=int, default=5)
  parser.add_argument('--requests', type=int, default=512, help='length of the stream; the goal is stated for 512')
  parser.add_argument('--skip-torch', action='store_true', help='measure our side only')
  parser.add_argument('--only-stalls', action='store_true', help='measure what publishing parameters costs decoding, nothing else')
  args = parser.parse_args()
  if args.only_stalls:
    print(json.dumps({**stalls(make_sampler(MODEL, SETTINGS)), 'cores': os.cpu_count(), 'jax': importlib.metadata.version('jax')}))
    return
  torch = None if args.skip_torch else TorchSide(args.torch_python)
  sampler, tiny = make_sampler(MODEL, SETTINGS), make_sampler(TINY, TINY_SETTINGS)
  rng, lengths = np.random.default_rng(1), stream_lengths(args.requests)
  uniform = [UNIFORM] * ROWS
  batches = [(len(lengths[i: i + ROWS]), max(lengths[i: i + ROWS])) for i in range(0, len(lengths), ROWS)]
  seconds(sampler, uniform, PROMPT, rng), seconds(tiny, [40] * 64, 24, rng)
  samples: dict[str, list[float]] = {}

  def record(name: str, tokens: int, elapsed: float) -> None:
    samples.setdefault(name, []).append(tokens / elapsed)
    print(f'{name}: {tokens / elapsed:.1f}', file=sys.stderr, flush=True)

  for _ in range(args.repeats):
    record('uniform_tok_s', sum(uniform), seconds(sampler, uniform, PROMPT, rng))
    if torch:
      record('transformers_uniform_tok_s', sum(uniform), torch.seconds([(ROWS, UNIFORM)]))
    record('stream_useful_tok_s', sum(lengths), seconds(sampler, lengths, PROMPT, rng))
    if torch:
      record('transformers_stream_useful_tok_s', sum(lengths), torch.seconds(batches))
    record('tiny_tok_s', 40 * 256, seconds(tiny, [40] * 256, 24, rng))
  result = {name: statistics.median(values) for name, values in samples.items()}
  for name in ('uniform_tok_s', 'stream_useful_tok_s'):
    if torch:
      ratios = [a / b for a, b in zip(samples[name], samples[f'transformers_{name}'])]
      result[name.replace('_tok_s', '_ratio')] = statistics.median(ratios)
  if torch:
    torch.close()
  stats = sampler.stats()
  result.update(stalls(sampler))
  result.update({
      'slot_occupancy': stats['tokens_drawn'] / stats['slot_steps_total'], 'requests': args.requests, 'repeats': args.repeats,
      'cores': os.cpu_count(), 'jax': importlib.metadata.version('jax'),
      **(torch.versions if torch else {}), 'samples': samples})
  print(json.dumps(result))


if __name__ == '__main__':
  main()
