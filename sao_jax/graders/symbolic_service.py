"""What a grading process does for mathematical answers: symbolic comparison. A service of `worker`."""

from __future__ import annotations

from typing import Any

from sao_jax.graders import symbolic
from sao_jax.graders.arithmetic import TooLarge


def prepare() -> None:
  """Loads the libraries and fills the parser's tables, before the clock of the first item runs."""
  import latex2sympy2_extended  # noqa: F401
  import math_verify  # noqa: F401
  symbolic.decide(r'\sqrt{2}', r'2^{1/2}')


def answer(request: dict[str, Any]) -> dict[str, str]:
  """Whether `request['gold']` and `request['response']` are equal."""
  try:
    return {'verdict': 'right' if symbolic.decide(request['gold'], request['response']) else 'wrong', 'reason': 'algebra'}
  except TooLarge as error:
    return {'verdict': 'grader_timeout', 'reason': f'not worked out: {error}'}
  except MemoryError:
    return {'verdict': 'grader_timeout', 'reason': 'memory limit'}
  except RecursionError:
    return {'verdict': 'grader_timeout', 'reason': 'recursion limit'}
  except Exception as error:
    return {'verdict': 'grader_error', 'reason': f'{type(error).__name__}: {str(error)[:200]}'}
