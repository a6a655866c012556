"""Questions that make themselves, for a policy with a Python tool: small programs whose value is asked for.

    a=47*83;a%97+a          two steps, the second uses the first
    12*34+56                one step

The values are too large to be guessed, and a tiny model cannot work them out; but it can copy an expression into a call. The answer is
worked out here, by the same operations, without evaluating any text.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, Callable, Mapping

import numpy as np

from sao_jax.environments import base

OPERATIONS: Mapping[str, Callable[[int, int], int]] = {'+': operator.add, '-': operator.sub, '*': operator.mul, '%': operator.mod}
NOISE_KINDS = ('direct', 'skip', 'digit')


@dataclasses.dataclass(frozen=True)
class Expressions:
  """A source of such questions.

  Args:
    min_steps, max_steps: of 1 and 2, drawn uniformly.
    min_operand, max_operand: numbers in them.
    noise: probability that a demonstration makes a mistake.
    noise_kinds: drawn uniformly among the possible ones: 'direct' (answers without the tool), 'skip' (leaves out the first of two
      steps), 'digit' (a digit is miscopied into a call).
  """

  min_steps: int = 1
  max_steps: int = 2
  min_operand: int = 10
  max_operand: int = 99
  noise: float = 0.3
  noise_kinds: tuple[str, ...] = NOISE_KINDS

  def __post_init__(self):
    base.check_range('min_steps', self.min_steps, 1, 2)
    base.check_range('max_steps', self.max_steps, self.min_steps, 2)
    base.check_range('min_operand', self.min_operand, 1, 10**6)
    base.check_range('max_operand', self.max_operand, self.min_operand, 10**6)
    base.check_range('noise', self.noise, 0.0, 1.0)
    if isinstance(self.noise_kinds, str) or not self.noise_kinds or not set(self.noise_kinds) <= set(NOISE_KINDS):
      raise ValueError(f'noise_kinds must be a list of one or more of {", ".join(NOISE_KINDS)}, got {self.noise_kinds!r}.')
    object.__setattr__(self, 'noise_kinds', tuple(k for k in NOISE_KINDS if k in self.noise_kinds))

  def row(self, index: int, split: str, seed: int, test_share: float) -> dict[str, Any]:
    """'question', 'answer' (a text) and 'calls' (the pieces of code that lead to it). Raises ValueError when 10,000 draws give none."""
    rng = base.generator('python_tool/task/' + split, seed, index)
    for _ in range(10_000):
      calls, value = self._draw(rng)
      question = ';'.join(calls)
      if base.split_of(question, test_share) == split:
        return {'question': question, 'answer': str(value), 'calls': calls}
    raise ValueError(f'No question of the {split} split was drawn; change test_share, or give more operands.')

  def _draw(self, rng: np.random.Generator) -> tuple[list[str], int]:
    """(pieces of code, value of the last one)."""
    steps = int(rng.integers(self.min_steps, self.max_steps + 1))
    x, y, z = (int(n) for n in rng.integers(self.min_operand, self.max_operand + 1, size=3))
    if steps == 1:
      first, second = '*', '+-'[int(rng.integers(2))]
      return [f'{x}{first}{y}{second}{z}'], OPERATIONS[second](x * y, z)
    a = OPERATIONS['*'](x, y)
    first, second = '+-%'[int(rng.integers(3))], '+-'[int(rng.integers(2))]
    if first == '%':
      return [f'a={x}*{y}', f'a%{z}{second}a'], OPERATIONS[second](a % z, a)
    return [f'a={x}*{y}', f'a{first}{z}'], OPERATIONS[first](a, z)

  def demonstrated(self, row: Mapping[str, Any], rng: np.random.Generator) -> tuple[list[str], str]:
    """(calls, answer) of a demonstrator that makes a mistake with probability `noise`; the answer is what its calls come to, as far as it
    knows: after a mistake a wrong one."""
    calls, answer = list(row['calls']), row['answer']
    if rng.random() >= self.noise:
      return calls, answer
    kinds = [k for k in self.noise_kinds if k != 'skip' or len(calls) == 2]
    kind = kinds[int(rng.integers(len(kinds)))] if kinds else 'direct'
    wrong = str(int(rng.integers(100, 10_000)))
    if kind == 'direct':
      return [], wrong
    if kind == 'skip':
      return calls[1:], wrong
    at = int(rng.choice([i for i, c in enumerate(calls[0]) if c.isdigit()]))
    digit = str(rng.choice([d for d in '123456789' if d != calls[0][at]]))
    changed = calls[0][:at] + digit + calls[0][at + 1:]
    return [changed, *calls[1:]], str(_value([changed, *calls[1:]]))


def _value(calls: list[str]) -> int:
  """Value of the last piece of code of this module's own making."""
  known: dict[str, int] = {}
  result = 0
  for call in calls:
    name, _, body = call.rpartition('=')
    result = _evaluate(body, known)
    if name:
      known[name] = result
  return result


def _evaluate(body: str, known: Mapping[str, int]) -> int:
  """Sums of products and remainders, from left to right, without parentheses."""
  terms, current, sign, pending = 0, 1, 1, '*'
  token = ''
  for c in body + '+':
    if c not in OPERATIONS:
      token += c
      continue
    number = known[token] if token in known else int(token)
    current = OPERATIONS[pending](current, number)
    token = ''
    if c in '*%':
      pending = c
    else:
      terms += sign * current
      current, sign, pending = 1, 1 if c == '+' else -1, '*'
  return terms
