"""sao_jax: single-rollout asynchronous policy optimisation for language-model agents, in JAX.

`sao_jax.Sampler`, `sao_jax.algorithms`, `sao_jax.environments`, `sao_jax.models` and `sao_jax.train` are imported when first used, so that
`import sao_jax` costs nothing and environments never pull in JAX.
"""

import importlib
from typing import Any

__version__ = '0.1.0'

_MODULES = ('algorithms', 'config', 'environments', 'evaluation', 'models', 'report', 'train', 'types')


def __getattr__(name: str) -> Any:
  if name == 'Sampler':
    return importlib.import_module('sao_jax.sampler').Sampler
  if name in _MODULES:
    return importlib.import_module(f'sao_jax.{name}')
  raise AttributeError(f'module sao_jax has no attribute {name!r}')


def __dir__() -> list[str]:
  return sorted([*_MODULES, 'Sampler', '__version__'])
