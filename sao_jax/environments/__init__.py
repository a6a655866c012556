"""Tasks for agents: `make(name, **settings)` builds one. Modules are imported when first used; none of them imports JAX."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from sao_jax.environments.base import AsyncEnvironment, Environment, EnvironmentFailure, Observation, SampledTurn, StepResult, Task

REGISTRY = {  # name -> (module, class)
    'ask': ('sao_jax.environments.ask', 'Ask'),
    'calculator': ('sao_jax.environments.calculator', 'Calculator'),
    'gymnasium': ('sao_jax.environments.gymnasium', 'TextGame'),
    'python_tool': ('sao_jax.environments.python_tool', 'PythonTool'),
    'question_answer': ('sao_jax.environments.question_answer', 'QuestionAnswer'),
    'reasoning_gym': ('sao_jax.environments.reasoning_gym', 'ReasoningGym'),
    'scaffold': ('sao_jax.environments.scaffold', 'Scaffold'),
    'scripted': ('sao_jax.environments.scripted', 'Scripted'),
    'style_shift': ('sao_jax.environments.style_shift', 'StyleShift'),
    'swe': ('sao_jax.environments.swe.environment', 'SWE'),
    'verifiers': ('sao_jax.environments.verifiers', 'Verifiers'),
}

__all__ = [
    'AsyncEnvironment', 'Environment', 'EnvironmentFailure', 'Observation', 'REGISTRY', 'SampledTurn', 'StepResult', 'Task', 'make',
    'register']


def register(name: str, module: str, attribute: str) -> None:
  """Adds an environment class to the registry; it is imported at its first `make`. Raises ValueError when the name is taken."""
  if name in REGISTRY and REGISTRY[name] != (module, attribute):
    raise ValueError(f'The environment name {name!r} is taken by {".".join(REGISTRY[name])}.')
  REGISTRY[name] = (module, attribute)


def make(name: str, **settings: Any) -> Environment:
  """Builds an environment.

  Args:
    name: one of `REGISTRY`.
    **settings: keyword arguments of its class.

  Raises:
    ValueError: on an unknown name or setting, or a value out of range; the message lists what is known.
    ImportError: when the environment needs a package that is not installed; the message says how to install it.
  """
  if name not in REGISTRY:
    raise ValueError(f'Unknown environment {name!r}; known: {", ".join(sorted(REGISTRY))}.')
  module, attribute = REGISTRY[name]
  cls = getattr(importlib.import_module(module), attribute)
  known = inspect.signature(cls).parameters
  unknown = sorted(set(settings) - set(known))
  if unknown:
    raise ValueError(f'Unknown setting {unknown[0]!r} of the environment {name!r}; known: {", ".join(known) or "none"}.')
  named = [x for x in known.values() if x.kind in (x.KEYWORD_ONLY, x.POSITIONAL_OR_KEYWORD)]
  missing = [x.name for x in named if x.default is x.empty and x.name not in settings]
  if missing:
    raise ValueError(f'The environment {name!r} needs the setting {missing[0]!r}; it has {", ".join(known)}.')
  environment = cls(**settings)
  environment.name = name
  return environment
