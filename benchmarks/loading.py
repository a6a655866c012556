"""Peak host memory and time of loading a checkpoint onto eight virtual CPU devices.

    python benchmarks/loading.py [--gigabytes=2] [--shards=16]        prints one JSON object

Writes a synthetic Qwen3-shaped folder of float32 weights in so many files, then loads it in a fresh process onto a mesh of fsdp=4,
tensor=2, with unrolled and with stacked layers. The peak is that of the resident memory above what the process held before loading, from
/proc/self/status (Linux); goal: at most 1.25 times the parameters.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import numpy as np

from sao_jax.config import ModelConfig

CHILD = '''
import json, re, sys, time
import jax
from sao_jax import sharding
from sao_jax.config import ModelConfig
from sao_jax.models import pretrained
mesh = sharding.make_mesh(jax.devices(), (1, 4, 1, 1, 2))
jax.block_until_ready(jax.device_put(jax.numpy.ones((8, 8)), sharding.replicated(mesh)))
def status(name):
  return 1024 * int(re.search(name + r':\\s+(\\d+) kB', open('/proc/self/status').read())[1])
config = pretrained.resolve_config(ModelConfig(pretrained=sys.argv[1], scan_layers=sys.argv[2] == 'scan'))
open('/proc/self/clear_refs', 'w').write('5')  # Forgets the peak so far.
before, start = status('VmRSS'), time.perf_counter()
params = jax.block_until_ready(pretrained.load_params(config, mesh))
seconds = time.perf_counter() - start
size = sum(x.nbytes for x in params.values())
print(json.dumps({'peak_bytes': status('VmHWM') - before, 'parameter_bytes': size, 'seconds': seconds, 'devices': len(jax.devices())}))
'''


def shape_of(size_bytes: int) -> ModelConfig:
  """A Qwen3 of about `size_bytes` of float32 weights."""
  from sao_jax.models import pretrained

  width = 2048
  base = dict(vocab_size=16384, embed_dim=width, num_heads=16, num_kv_heads=8, head_dim=128, mlp_dim=3 * width, qk_norm=True)
  one, two = (sum(pretrained.stored(ModelConfig(num_layers=layers, **base))[2].values()) for layers in (1, 2))
  return ModelConfig(num_layers=max(1, round((size_bytes - one) / (two - one)) + 1), **base)


def shard_limit(sizes: dict[str, int], shards: int) -> int:
  """The smallest limit of bytes a file that makes exactly so many files."""
  from sao_jax.models import pretrained

  limits = sorted({sum(list(sizes.values())[i:j]) for i in range(len(sizes)) for j in range(i + 1, len(sizes) + 1)})
  for limit in limits:
    if limit >= sum(sizes.values()) / shards and len(pretrained.shards(sizes, limit)) == shards:
      return limit
  raise SystemExit(f'{len(sizes)} tensors cannot be written in {shards} files; choose another --shards.')


def write_folder(folder: pathlib.Path, size_bytes: int, shards: int) -> None:
  """A Qwen3-shaped checkpoint of about `size_bytes` in `shards` files; the values are noise."""
  from sao_jax.models import pretrained, transformer

  config = shape_of(size_bytes)
  rng = np.random.default_rng(0)
  noise = rng.standard_normal(1 << 22, np.float32)

  class Lazy(dict):
    """Parameters made when they are asked for."""

    def __contains__(self, path):
      return path in shapes

    def __getitem__(self, path):
      return np.resize(noise, shapes[path].shape)

  shapes = transformer.abstract(transformer.Policy, config)[1]
  pretrained.save_params(folder, config, Lazy(), shard_bytes=shard_limit(pretrained.stored(config)[2], shards))


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--gigabytes', type=float, default=2.0)
  parser.add_argument('--shards', type=int, default=16)
  args = parser.parse_args()
  result = {}
  with tempfile.TemporaryDirectory() as work:
    folder = pathlib.Path(work) / 'model'
    start = time.perf_counter()
    write_folder(folder, int(args.gigabytes * 1e9), args.shards)
    result['write_seconds'] = time.perf_counter() - start
    result['files'] = len(list(folder.glob('*.safetensors')))
    environment = {**os.environ, 'XLA_FLAGS': '--xla_force_host_platform_device_count=8', 'PYTHONPATH': sys.path[0]}
    for layers in ('unrolled', 'scan'):
      command = [sys.executable, '-c', CHILD, str(folder), layers]
      out = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
      found = json.loads(out.stdout.splitlines()[-1])
      result[layers] = {**found, 'peak_over_parameters': found['peak_bytes'] / found['parameter_bytes']}
  print(json.dumps(result))


if __name__ == '__main__':
  main()
