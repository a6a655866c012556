"""Graders: `make(name, **settings)` builds one, `shared(name, **settings)` gives the process's own. None of them imports JAX."""

from __future__ import annotations

import importlib
import inspect
import json
import threading
from typing import Any

from sao_jax.graders.base import FAILURES, VERDICTS, Grade, Grader

REGISTRY = {  # name -> (module, class)
    'code': ('sao_jax.graders.code_tests', 'CodeTests'),
    'exact': ('sao_jax.graders.simple', 'Exact'),
    'integer': ('sao_jax.graders.simple', 'Integer'),
    'math': ('sao_jax.graders.mathematics', 'Mathematics'),
}

__all__ = ['FAILURES', 'Grade', 'Grader', 'REGISTRY', 'VERDICTS', 'close_shared', 'make', 'register', 'shared']

_lock = threading.Lock()
_shared: dict[str, Grader] = {}


def register(name: str, module: str, attribute: str) -> None:
  """Adds a grader class to the registry; it is imported at its first `make`. Raises ValueError when the name is taken."""
  if name in REGISTRY and REGISTRY[name] != (module, attribute):
    raise ValueError(f'The grader name {name!r} is taken by {".".join(REGISTRY[name])}.')
  REGISTRY[name] = (module, attribute)


def make(name: str, **settings: Any) -> Grader:
  """Builds a grader; whoever makes it closes it.

  Args:
    name: one of `REGISTRY`.
    **settings: keyword arguments of its class.

  Raises:
    ValueError: on an unknown name or setting, or a value out of range; the message lists what is known.
    ImportError: when the grader needs a package that is not installed; the message says how to install it.
  """
  if not isinstance(name, str) or name not in REGISTRY:
    raise ValueError(f'Unknown grader {name!r}; known: {", ".join(sorted(REGISTRY))}.')
  module, attribute = REGISTRY[name]
  cls = getattr(importlib.import_module(module), attribute)
  known = list(inspect.signature(cls).parameters)
  unknown = sorted(set(settings) - set(known))
  if unknown:
    raise ValueError(f'Unknown setting {unknown[0]!r} of the grader {name!r}; known: {", ".join(known) or "none"}.')
  return cls(**settings)


def shared(name: str, **settings: Any) -> Grader:
  """The grader of these settings that all users in this process share; it is theirs together, so nobody closes it.

  Environments use it: there are as many of them as rollouts in flight, but only so many CPUs for grading processes. Its processes end
  with this one, or with `close_shared`. Raises as `make` does.
  """
  key = json.dumps([name, settings], sort_keys=True, default=repr)
  with _lock:
    if key not in _shared:
      _shared[key] = make(name, **settings)
    return _shared[key]


def close_shared() -> None:
  """Closes all shared graders; the next `shared` makes new ones."""
  with _lock:
    graders = list(_shared.values())
    _shared.clear()
  for grader in graders:
    grader.close()
