"""Runs every test on the CPU with eight virtual devices; set before JAX is imported."""

import os

FLAG = '--xla_force_host_platform_device_count=8'
if FLAG not in os.environ.get('XLA_FLAGS', ''):
  os.environ['XLA_FLAGS'] = (os.environ.get('XLA_FLAGS', '') + ' ' + FLAG).strip()
os.environ['JAX_PLATFORMS'] = 'cpu'
