r"""Arithmetic with a calculator tool that does one binary operation a call; multi-turn, made for a byte tokenizer and tiny models.

The environment shows an expression. The policy names one operation in it; the tool computes it and writes the result in its place; and so
on until a number is left, which the policy gives as its answer:

    \n12+7*3 [7*3] \n12+21 [12+21] \n33 =33.        (blanks only here; actions in brackets or after '=')

Actions, each ending with its stop string:
    [a+b] [a-b] [a*b]   one call; numbers are decimal, with a minus sign if negative, without leading zeros, at most `MAX_DIGITS` digits
    =n.                 the final answer; ends the episode (terminated), reward 1 if it is the value of the given expression, else 0
Answers of the tool:
    \n12+21             the expression with the operation replaced, also where precedence forbids it: the tool does what it is told, and
                        the expression then has another value. Of several places that fit, one that keeps the value goes first.
    \n19?\n12+7*3       the operation stands nowhere in the expression: its value, and the expression as it was
    \n?form\n12+7*3     not an action of this grammar (malformed); the `max_malformed`-th one ends the episode (terminated, reward 0)
    \n?size\n12+7*3     the result would have more than `MAX_DIGITS` digits
After `max_calls` calls without an answer the episode is cut (truncated).

With `chat=True` the same task is a conversation with a tool, for models with a chat template: the user gives the expression, the policy
calls

    calculator(left: integer, operation: '+' | '-' | '*', right: integer)      any number of times in a turn, in the model's own form

each call is answered by a `tool` message with what the tool answers above, and the final answer is a turn without calls that ends in
`Answer: n`. Calls that are none (unknown tool, bad JSON, wrong types) and turns that neither call nor answer are malformed; they are
answered by `error: ` and the reason.

The policy's text is only ever matched against two regular expressions, never evaluated, and nothing longer than `MAX_ACTION` is looked at.
"""

from __future__ import annotations

import re
from typing import Any, Sequence

import numpy as np

from sao_jax.environments import base, compaction as compaction_lib
from sao_jax.tool_calls import ToolCall, ToolCallError, Turn

MAX_DIGITS = 12
MAX_ACTION = 64  # Characters; the longest legal action has 2 * (MAX_DIGITS + 1) + 3.
OPERATIONS = {'+': lambda a, b: a + b, '-': lambda a, b: a - b, '*': lambda a, b: a * b}
NOISE_KINDS = ('order', 'early', 'digit')

_NUMBER = r'(-?(?:0|[1-9][0-9]{0,%d}))' % (MAX_DIGITS - 1)
_CALL = re.compile(r'\[%s([+\-*])%s\]' % (_NUMBER, _NUMBER))
_ANSWER = re.compile(r'=%s\.' % _NUMBER)
_CHAT_ANSWER = re.compile(r'Answer: %s\.?\s*' % _NUMBER)

SYSTEM = (
    'You work out arithmetic expressions step by step with the calculator, which does one operation a call and writes the result in its '
    'place. When one number is left, reply with a line "Answer: " and that number.')
TOOL = {'type': 'function', 'function': {
    'name': 'calculator', 'description': 'Computes one operation and replaces it in the expression.', 'parameters': {
        'type': 'object', 'required': ['left', 'operation', 'right'], 'properties': {
            'left': {'type': 'integer'}, 'operation': {'type': 'string', 'enum': list(OPERATIONS)}, 'right': {'type': 'integer'}}}}}
MAX_CALLS_A_TURN = 8  # Further calls of one turn are not looked at.

Expression = list[int | str]  # Numbers, operators and parentheses in order, e.g. ['(', 12, '+', 7, ')', '*', 3].


def text_of(expression: Sequence[int | str]) -> str:
  return ''.join(map(str, expression))


def next_operation(expression: Sequence[int | str]) -> int:
  """Index of the left operand of the operation to do next: in the first innermost parentheses if any, products first, then leftmost."""
  start, stop = 0, len(expression)
  if ')' in expression:
    stop = expression.index(')')
    start = max(i for i in range(stop) if expression[i] == '(') + 1
  operators = [i for i in range(start, stop) if expression[i] in OPERATIONS]
  return next((i for i in operators if expression[i] == '*'), operators[0]) - 1


def reduce_at(expression: Sequence[int | str], index: int) -> Expression:
  """The expression with the three items at `index` replaced by their result, and parentheses around a single number removed."""
  left, operator, right = expression[index:index + 3]
  before, after = list(expression[:index]), list(expression[index + 3:])
  while before and after and before[-1] == '(' and after[0] == ')':
    before, after = before[:-1], after[1:]
  return [*before, OPERATIONS[operator](left, right), *after]


def value_of(expression: Sequence[int | str], limit: int | None = None) -> int | None:
  """Value of the expression by the usual precedence; None when a step of the way to it lies beyond `limit` in size."""
  while len(expression) > 1:
    expression = reduce_at(expression, next_operation(expression))
    if limit is not None and max(abs(item) for item in expression if isinstance(item, int)) > limit:
      return None
  return expression[0]


def places(expression: Sequence[int | str]) -> list[int]:
  """Indices where a number, an operator and a number stand side by side."""
  return [i - 1 for i, item in enumerate(expression) if item in OPERATIONS and isinstance(expression[i - 1], int)
          and isinstance(expression[i + 1], int)]


class Calculator(compaction_lib.Compaction, base.Environment):
  """The task of the module's docstring.

  Args:
    min_operations, max_operations: operations of an expression, drawn uniformly; the more, the harder.
    min_operand, max_operand: operands, drawn uniformly; two digits and more, so that the tool is needed.
    operators: which of '+-*' occur, drawn uniformly.
    parentheses: share of the expressions (of two operations and more) with one pair of parentheses.
    max_value: largest size of any number on the right way to the answer; other expressions are drawn again.
    max_malformed: this many malformed actions end the episode.
    max_calls: this many calls without an answer cut the episode.
    test_share: share of all expressions that belong to the test split, by a hash of the expression.
    demonstration_noise: probability of a mistake at each turn of a demonstration where one of `noise_kinds` is possible.
    chat: a chat with tool calls instead of raw text.
    compaction: how a chat makes room where `task.compact_room` asks for it: 'drop' (older answers of the tool), 'summary', or ''.
    noise_kinds: mistakes of demonstrations, drawn uniformly among the possible ones: 'order' (an operation whose turn it is not, so that
      the value changes), 'early' (answers with the first number though operations are left), 'digit' (one digit miscopied).
  """

  name = 'calculator'
  replayable = True
  conversation = 'raw'
  stop_strings = (']', '.', '\n')
  has_demonstrations = True
  metric_names = ('success', 'tool_calls', 'unused_calls', 'malformed', 'answered_directly', 'direct_success', 'operations')

  def __init__(
      self, *, min_operations: int = 2, max_operations: int = 3, min_operand: int = 10, max_operand: int = 99, operators: str = '+-*',
      parentheses: float = 0.0, max_value: int = 9999, max_malformed: int = 2, max_calls: int = 12, test_share: float = 0.1,
      demonstration_noise: float = 0.3, noise_kinds: Sequence[str] = ('order', 'early'),
      chat: bool = False, compaction: str = 'drop',
  ):
    base.check_range('min_operations', min_operations, 1, 8)
    base.check_range('max_operations', max_operations, min_operations, 8)
    base.check_range('min_operand', min_operand, 0, 9999)
    base.check_range('max_operand', max_operand, min_operand, 9999)
    base.check_range('parentheses', parentheses, 0.0, 1.0)
    base.check_range('max_value', max_value, max_operand, 10**MAX_DIGITS - 1)
    base.check_range('max_malformed', max_malformed, 1, 100)
    base.check_range('max_calls', max_calls, max_operations, 1000)
    base.check_range('test_share', test_share, 0.01, 0.99)
    base.check_range('demonstration_noise', demonstration_noise, 0.0, 1.0)
    if not isinstance(operators, str) or not operators or not set(operators) <= set(OPERATIONS):
      raise ValueError(f'operators must be one or more of {"".join(OPERATIONS)}, got {operators!r}.')
    if isinstance(noise_kinds, str) or not set(noise_kinds) <= set(NOISE_KINDS) or not noise_kinds:
      raise ValueError(f'noise_kinds must be a list of one or more of {", ".join(NOISE_KINDS)}, got {noise_kinds!r}.')
    if not isinstance(chat, bool):
      raise ValueError(f'chat must be True or False, got {chat!r}.')
    compaction_lib.check_way('compaction', compaction)
    self.compaction = compaction if chat else ''  # Raw text has no messages to leave out.
    if chat:
      self.conversation, self.tools, self.stop_strings = 'chat', (TOOL,), ()
    self.operations = (min_operations, max_operations)
    self.operands = (min_operand, max_operand)
    self.operators = ''.join(sorted(set(operators)))
    self.parentheses = parentheses
    self.max_value = max_value
    self.max_malformed = max_malformed
    self.max_calls = max_calls
    self.test_share = test_share
    self.demonstration_noise = demonstration_noise
    self.noise_kinds = tuple(kind for kind in NOISE_KINDS if kind in noise_kinds)
    self._expression: Expression | None = None
    for split in base.SPLITS:  # Tells settings that admit no expression before any work is done.
      self.sample_task(0, split, 0)

  def sample_task(self, index: int, split: str, seed: int) -> base.Task:
    """Task whose data are 'expression' (list of items), 'answer' and 'operations'. Raises ValueError when 10,000 draws give none."""
    base.check_split(split)
    rng = base.generator('calculator/task/' + split, seed, index)
    for _ in range(10_000):
      expression = self._draw(rng)
      answer = value_of(expression, self.max_value)
      if answer is not None and base.split_of(text_of(expression), self.test_share) == split:
        data = {'expression': expression, 'answer': answer, 'operations': sum(item in OPERATIONS for item in expression)}
        return base.Task(index, split, seed, data)
    raise ValueError(
        f'No expression of the {split} split within max_value={self.max_value}; raise it, or lower max_operand or max_operations.')

  def _draw(self, rng: np.random.Generator) -> Expression:
    n = int(rng.integers(self.operations[0], self.operations[1] + 1))
    operands = [int(x) for x in rng.integers(self.operands[0], self.operands[1] + 1, size=n + 1)]
    operators = [self.operators[i] for i in rng.integers(len(self.operators), size=n)]
    wrapped = int(rng.integers(n)) if n > 1 and rng.random() < self.parentheses else -1
    expression: Expression = []
    for i, operand in enumerate(operands):
      expression += ['('] * (i == wrapped) + [operand] + [')'] * (i == wrapped + 1 and wrapped >= 0) + operators[i:i + 1]
    return expression

  def reset(self, task: base.Task) -> base.Observation:
    self.begin_episode()
    self._expression = list(task.data['expression'])
    self._answer = int(task.data['answer'])
    self._metrics = dict.fromkeys(self.metric_names, 0.0) | {'operations': float(task.data['operations'])}
    if self.tools:
      return base.Observation(messages=({'role': 'system', 'content': SYSTEM}, {'role': 'user', 'content': text_of(self._expression)}))
    return base.Observation('\n' + text_of(self._expression))

  def step(self, action: str) -> base.StepResult:
    if self._expression is None:
      raise RuntimeError('step was called without a running episode; call reset first.')
    action = self._up_to_stop(action)
    if answer := _ANSWER.fullmatch(action):
      return self._finish(int(answer[1]) == self._answer)
    if call := _CALL.fullmatch(action):
      return self._call(int(call[1]), call[2], int(call[3]))
    self._metrics['malformed'] += 1
    if self._metrics['malformed'] >= self.max_malformed:
      return self._result('', terminated=True)
    return self._result('\n?form')

  def _up_to_stop(self, action: str) -> str:
    """`action` without what follows its first stop string (the rest of a longer token); '' where that is too long to be an action."""
    head = action[:MAX_ACTION + 1]
    ends = [head.index(stop) + len(stop) for stop in self.stop_strings if stop in head]
    head = head[:min(ends)] if ends else head
    return head if len(head) <= MAX_ACTION else ''

  def _finish(self, right: bool) -> base.StepResult:
    direct = self._metrics['tool_calls'] == 0
    self._metrics |= {'success': float(right), 'answered_directly': float(direct), 'direct_success': float(direct and right)}
    return self._result('', reward=float(right), terminated=True)

  def step_calls(self, calls: Sequence[ToolCall | ToolCallError], text: str) -> base.StepResult:
    if self._expression is None:
      raise RuntimeError('step_calls was called without a running episode; call reset first.')
    if (shorter := self.take_summary(text)) is not None:
      return base.StepResult(shorter, metrics=dict(self._metrics))
    if not calls:
      answer = _CHAT_ANSWER.fullmatch(text[text.rfind('Answer: '):]) if 'Answer: ' in text else None
      if answer:
        return self._finish(int(answer[1]) == self._answer)
      self._metrics['malformed'] += 1
      return self._replies([('user', 'error: call the calculator, or end with "Answer: " and a number')])
    replies = []
    for call in calls[:MAX_CALLS_A_TURN]:
      if isinstance(call, ToolCallError):
        self._metrics['malformed'] += 1
        replies.append(('tool', f'error: {call.reason[:200]}'))
      else:
        a = call.arguments
        replies.append(('tool', self._compute(a['left'], a['operation'], a['right']).lstrip('\n')))
    if len(calls) > MAX_CALLS_A_TURN:
      replies.append(('tool', f'error: at most {MAX_CALLS_A_TURN} calls a turn, the others were left out'))
    return self._replies(replies)

  def _replies(self, replies: list[tuple[str, str]]) -> base.StepResult:
    """(role, text) of every message that answers a turn; the last malformed action or call allowed ends the episode."""
    ended = self._metrics['malformed'] >= self.max_malformed
    cut = not ended and self._metrics['tool_calls'] >= self.max_calls
    if ended or cut:
      self._expression = None
    messages = tuple({'role': role, 'content': text} for role, text in replies)
    return base.StepResult(base.Observation(messages=messages), terminated=ended, truncated=cut, metrics=dict(self._metrics))

  def _call(self, left: int, operator: str, right: int) -> base.StepResult:
    reply = self._compute(left, operator, right)
    truncated = self._metrics['tool_calls'] >= self.max_calls
    return self._result(reply.removesuffix('\n' + text_of(self._expression)), truncated=truncated)

  def _compute(self, left: int, operator: str, right: int) -> str:
    """Does one operation; the tool's answer, as the module's text gives it."""
    self._metrics['tool_calls'] += 1
    sized = max(abs(left), abs(right)) < 10**MAX_DIGITS
    result = OPERATIONS[operator](left, right) if sized else 10**MAX_DIGITS
    if abs(result) >= 10**MAX_DIGITS:
      return '\n?size\n' + text_of(self._expression)
    fits = [i for i in places(self._expression) if self._expression[i:i + 3] == [left, operator, right]]
    if not fits:
      self._metrics['unused_calls'] += 1
      return f'\n{result}?\n{text_of(self._expression)}'
    reduced = [reduce_at(self._expression, i) for i in fits]
    value = value_of(self._expression)
    self._expression = next((e for e in reduced if value_of(e) == value), reduced[0])
    return '\n' + text_of(self._expression)

  def _result(self, note: str, **ending: Any) -> base.StepResult:
    observation = base.Observation(note + '\n' + text_of(self._expression))
    if ending.get('terminated') or ending.get('truncated'):
      self._expression = None
    return base.StepResult(observation, metrics=dict(self._metrics), **ending)

  def demonstration(self, task: base.Task, rng: np.random.Generator) -> list[str | Turn]:
    """Actions of a scripted expert that makes a mistake of `noise_kinds` with probability `demonstration_noise` at each turn."""
    actions = self._expert(task, rng)
    return [_as_turn(action) for action in actions] if self.tools else actions

  def _expert(self, task: base.Task, rng: np.random.Generator) -> list[str]:
    expression, actions = list(task.data['expression']), []
    while True:
      mistakes = self._mistakes(expression)
      kind = mistakes[int(rng.integers(len(mistakes)))] if mistakes and rng.random() < self.demonstration_noise else ''
      if len(expression) == 1 or kind == 'early':
        first = next(item for item in expression if isinstance(item, int))
        return [*actions, f'={_miscopied(str(first), rng) if kind == "digit" else first}.']
      index = int(rng.choice(_changing(expression))) if kind == 'order' else next_operation(expression)
      call = text_of(expression[index:index + 3])
      if kind == 'digit':
        actions.append(f'[{_miscopied(call, rng)}]')  # Stands nowhere in the expression, which stays; the expert notices and tries again.
        continue
      expression = reduce_at(expression, index)
      actions.append(f'[{call}]')

  def _mistakes(self, expression: Expression) -> list[str]:
    possible = {'order': bool(_changing(expression)), 'early': len(expression) > 1, 'digit': True}
    return [kind for kind in self.noise_kinds if possible[kind]]


def _as_turn(action: str) -> Turn:
  """An action of the raw form as a turn of the chat."""
  if call := _CALL.fullmatch(action):
    return Turn(calls=(('calculator', {'left': int(call[1]), 'operation': call[2], 'right': int(call[3])}),))
  return Turn(f'Answer: {action[1:-1]}')


def _changing(expression: Expression) -> list[int]:
  """Places whose operation may not be done next: doing it changes the value."""
  value = value_of(expression)
  return [i for i in places(expression) if value_of(reduce_at(expression, i)) != value]


def _miscopied(text: str, rng: np.random.Generator) -> str:
  """`text` with one digit replaced by another one that leaves no leading zero."""
  index = int(rng.choice([i for i, c in enumerate(text) if c.isdigit()]))
  return text[:index] + str(rng.choice([d for d in '123456789' if d != text[index]])) + text[index + 1:]
