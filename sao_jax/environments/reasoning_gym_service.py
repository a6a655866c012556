"""What a worker process does for scorers of reasoning-gym that evaluate formulas. A service of `services.worker`."""

from __future__ import annotations

import importlib
from typing import Any

_scorers: dict[str, Any] = {}


def prepare() -> None:
  """Loads the library, before the clock of the first item runs."""
  importlib.import_module('reasoning_gym')
  importlib.import_module('sympy')


def answer(request: dict[str, Any]) -> dict[str, str]:
  """The score of `request['answer']`, as the reason of a verdict. These scorers take every error for a wrong answer."""
  name = request['dataset']
  try:
    if name not in _scorers:
      _scorers[name] = importlib.import_module('reasoning_gym.factory').create_dataset(name, seed=0, size=1)
    return {'verdict': 'right', 'reason': repr(float(_scorers[name].score_answer(request['answer'], request['entry'])))}
  except Exception as error:
    return {'verdict': 'grader_error', 'reason': f'{type(error).__name__}: {str(error)[:200]}'}
