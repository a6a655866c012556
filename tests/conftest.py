"""Runs every test on the CPU with eight virtual devices; set before JAX is imported.

Programs that several tests compile are compiled once: a compilation cache of this session alone, which child processes use as well.
"""

import atexit
import gc
import os
import shutil
import tempfile

import hypothesis

FLAG = '--xla_force_host_platform_device_count=8 --xla_cpu_collective_call_terminate_timeout_seconds=1200'  # Eight on few cores, busy ones.
if FLAG not in os.environ.get('XLA_FLAGS', ''):
  os.environ['XLA_FLAGS'] = (os.environ.get('XLA_FLAGS', '') + ' ' + FLAG).strip()
os.environ['JAX_PLATFORMS'] = 'cpu'
hypothesis.settings.register_profile('busy', deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile('busy')  # How long an example takes is the machine's matter.

if 'JAX_COMPILATION_CACHE_DIR' not in os.environ:
  os.environ['JAX_COMPILATION_CACHE_DIR'] = tempfile.mkdtemp(prefix='sao_jax_tests_')
  os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0.3'
  os.environ['JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES'] = '-1'
  atexit.register(shutil.rmtree, os.environ['JAX_COMPILATION_CACHE_DIR'], ignore_errors=True)


def pytest_sessionfinish() -> None:
  """What is alive now lives until the end: pytest collects garbage five times then, each time over a heap full of JAX objects."""
  gc.collect()
  gc.freeze()
