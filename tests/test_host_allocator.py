"""Freed memory is kept: what was given back once costs no page faults the next time."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PROGRAM = '''
import resource, sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from sao_jax import host_allocator
if sys.argv[2] == 'keep':
  assert host_allocator.keep_freed_memory() and host_allocator.keep_freed_memory()
faults = []
for _ in range(3):
  before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
  block = np.empty(2**24, np.float32)
  block.fill(1.0)
  del block
  faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(*faults)
'''


def faults(mode: str) -> list[int]:
  done = subprocess.run([sys.executable, '-c', PROGRAM, str(ROOT), mode], capture_output=True, text=True, timeout=300, check=True)
  return [int(x) for x in done.stdout.split()]


@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='glibc alone')
def test_the_second_time_is_free():
  first, second, third = faults('keep')
  assert first > 20 and second + third < 10, (first, second, third)


def test_elsewhere_nothing_is_done(monkeypatch):
  from sao_jax import host_allocator
  host_allocator.keep_freed_memory.cache_clear()
  monkeypatch.setattr(sys, 'platform', 'darwin')
  assert not host_allocator.keep_freed_memory()
  host_allocator.keep_freed_memory.cache_clear()
