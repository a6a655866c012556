r"""Questions with known answers, solved with a Python interpreter: tool-integrated reasoning.

The policy may run Python any number of times before it answers; the interpreter keeps its state over a rollout's calls and runs in a box
(docs/sandbox.md) that is the rollout's own. Rows, graders and forms of an answer are those of `question_answer`; without a source the
questions make themselves (`python_tasks`).

In a chat the interpreter is the tool `python`, with the argument `code`, called in the model's own form; every call is answered by a `tool`
message: what was printed, then the value of the last expression, or the error with the part of the traceback that is the code's own. A
turn without calls is the answer.

In a raw conversation code stands between two markers, and a turn without the first marker is the answer:

    a=47*83;a%97+a\n   >a=47*83\n   ok\n   >a%97+a\n   3918\n   3918\n        markers=('>', '\n'); blanks only here

There the result is followed by a line break, and `ok` stands for no output at all.

Whatever the code does is an observation: output that is too long is cut in the middle, with a note; code that takes too long or too much
memory ends its interpreter, which is said, and the next call has a new one. What is wrong with a call is told in its place. A box that
fails is a failure of the environment, 'environment_sandbox'.
"""

from __future__ import annotations

import atexit
import inspect
import threading
from typing import Any, Mapping, Sequence

import numpy as np

from sao_jax import sandbox
from sao_jax.environments import base, compaction as compaction_lib, question_answer
from sao_jax.environments.python_tasks import Expressions
from sao_jax.tool_calls import ToolCall, ToolCallError, Turn

TOOL = {'type': 'function', 'function': {
    'name': 'python', 'description': 'Runs Python code in an interpreter that keeps its state between calls. The result is what the code '
    'prints and the value of its last expression. There is no network.', 'parameters': {
        'type': 'object', 'required': ['code'], 'properties': {'code': {'type': 'string', 'description': 'Python source code.'}}}}}
MAX_CALLS_A_TURN = 8  # Further calls of one turn are not run.
WARM_BOXES = 4


class SandboxFailure(base.EnvironmentFailure):
  """The box of a rollout failed; says nothing about the code in it."""

  reason = 'environment_sandbox'


class PythonTool(compaction_lib.Compaction, question_answer.QuestionAnswer):
  """The task of the module's docstring.

  A task with 'messages' in its data (of a benchmark, which grades by itself) shows these, and ends with the answer and reward 0.

  Args:
    source, grader, grader_settings, answer_format, system_prompt, template, test_share: as for `question_answer`; without a source the
      questions are made by `expressions`.
    expressions: settings of `python_tasks.Expressions`.
    conversation: 'chat' or 'raw'.
    markers: in a raw conversation, what stands before and after code; a turn ends with the second one.
    answer_stop: in a raw conversation, what ends an answer besides the end of the text; '' for nothing else.
    max_turns: with calls; after as many the episode is cut (truncated).
    max_malformed: as many calls that are none end the episode (terminated, reward 0).
    time_limit_s: of one call.
    memory_mb: of a rollout's code.
    max_output: characters of one observation.
    traceback: whether an observation holds the traceback of an error, or its last line only.
    packages: whether the code can import the packages of this process's Python besides the standard library.
    compaction: how a chat makes room where `task.compact_room` asks for it: 'drop' (older outputs), 'summary', or ''; see `compaction`.
    backend, image: how the code is kept apart, see `sandbox.open`.
    replayable: set it where all code of the policy does the same when it runs again (no clock, no random numbers of its own); a rollout
      that was interrupted then goes on instead of starting over.

  Raises:
    ValueError: a setting out of range.
    sandbox.Unavailable: where no box can be made.
  """

  name = 'python_tool'
  metric_names = ('success', 'answered', 'tool_calls', 'tool_errors', 'tool_timeouts', 'malformed')

  def __init__(
      self, *, source: question_answer.Source = None, grader: str = 'math', grader_settings: Mapping[str, Any] | None = None,
      answer_format: str = 'boxed', system_prompt: str | None = None, template: str = '{question}', test_share: float = 0.1,
      expressions: Mapping[str, Any] | None = None, conversation: str = 'chat', markers: Sequence[str] = ('<python>', '</python>'),
      answer_stop: str = '', max_turns: int = 50, max_malformed: int = 10, time_limit_s: float = 10.0, memory_mb: int = 512,
      max_output: int = 4000, traceback: bool = True, packages: bool = False, compaction: str = 'drop', backend: str = 'auto',
      image: str = '', replayable: bool = False,
  ):
    super().__init__(
        source=source, grader=grader, grader_settings=grader_settings, answer_format=answer_format, system_prompt=system_prompt,
        template=template, test_share=test_share)
    if conversation not in base.CONVERSATIONS:
      raise ValueError(f'conversation must be one of {", ".join(base.CONVERSATIONS)}, got {conversation!r}.')
    if not isinstance(markers, (list, tuple)) or len(markers) != 2 or not all(isinstance(m, str) and m for m in markers):
      raise ValueError(f'markers must be two texts, what stands before and after code, got {markers!r}.')
    for name, value in (('traceback', traceback), ('packages', packages), ('replayable', replayable)):
      if not isinstance(value, bool):
        raise ValueError(f'{name} must be True or False, got {value!r}.')
    if not isinstance(answer_stop, str):
      raise ValueError(f'answer_stop must be a text, got {answer_stop!r}.')
    known = inspect.signature(Expressions).parameters
    if expressions is not None and not (isinstance(expressions, Mapping) and set(expressions) <= set(known)):
      raise ValueError(f'expressions must map {", ".join(known)} to values, got {expressions!r}.')
    if source is not None and expressions is not None:
      raise ValueError('expressions make questions where there is no source; give one of the two.')
    compaction_lib.check_way('compaction', compaction)
    base.check_range('time_limit_s', time_limit_s, 0.01, 86_400.0)
    base.check_range('max_turns', max_turns, 1, 10_000)
    base.check_range('max_malformed', max_malformed, 1, 10_000)
    base.check_range('max_output', max_output, 16, 1 << 20)
    self._expressions = None if source is not None else Expressions(**dict(expressions or {}))
    self.conversation, self.replayable, self._markers = conversation, replayable, tuple(markers)
    self.compaction = compaction if conversation == 'chat' else ''  # Raw text has no messages to leave out.
    if conversation == 'chat':
      self.tools = (TOOL,)
    else:
      self.stop_strings = tuple(dict.fromkeys(s for s in (markers[1], answer_stop) if s))
    self._max_turns, self._max_malformed, self._max_output, self._traceback = max_turns, max_malformed, max_output, traceback
    self._test_share = test_share
    limits = sandbox.Limits(time_s=float(time_limit_s), memory_mb=memory_mb, output_bytes=4 * max_output)
    self._pool = _shared_pool(backend, image, limits, packages)
    self._box: sandbox.Box | None = None
    self._session: sandbox.PythonSession | None = None
    self._lock, self._closed = threading.Lock(), False  # Of the box, which `close` may take away from a call that hangs.
    self._metrics: dict[str, float] = {}
    if self._expressions is not None:
      for split in base.SPLITS:
        self.sample_task(0, split, 0)

  def _split_rows(self, source: question_answer.Source, test_share: float) -> dict[str, Any]:
    return {} if source is None else super()._split_rows(source, test_share)

  # --- Tasks ------------------------------------------------------------------------------------------------------------------

  def task_sets(self, split: str) -> tuple[base.TaskSet, ...]:
    return super().task_sets(split) if self._expressions is None else ()

  def sample_task(self, index: int, split: str, seed: int) -> base.Task:
    """A row of the source, or a question made from the index: 'question', 'answer' and 'calls'."""
    if self._expressions is None:
      return super().sample_task(index, split, seed)
    base.check_split(split)
    return base.Task(index, split, seed, self._expressions.row(index, split, seed, self._test_share))

  def reset(self, task: base.Task) -> base.Observation:
    self._give_back()
    self.begin_episode()
    self._data, self._turns = task.data, 0
    self._metrics = dict.fromkeys(self.metric_names, 0.0)
    messages = tuple(task.data['messages']) if 'messages' in task.data else self.messages(task.data)
    if self.conversation == 'chat':
      return base.Observation(messages=messages)
    return base.Observation('\n\n'.join(m['content'] for m in messages) + '\n')

  # --- Turns ------------------------------------------------------------------------------------------------------------------

  def step(self, action: str) -> base.StepResult:
    """A turn of a raw conversation."""
    self._check_running('step')
    opening, closing = self._markers
    if opening not in action:
      return self._answered(action)
    code = action[action.index(opening) + len(opening):]
    if closing not in code:
      self._metrics['malformed'] += 1
      return self._continued(text=f'error: there is no {closing!r} after the code\n')
    said = self._run(code[:code.index(closing)])
    return self._continued(text=(said or 'ok') + '\n')

  def step_calls(self, calls: Sequence[ToolCall | ToolCallError], text: str) -> base.StepResult:
    """A turn of a chat: the answer, or calls."""
    self._check_running('step_calls')
    if (shorter := self.take_summary(text)) is not None:
      return self._continued(messages=shorter.messages, restart=True)
    if not calls:
      return self._answered(text)
    replies = []
    for call in calls[:MAX_CALLS_A_TURN]:
      if isinstance(call, ToolCallError):
        self._metrics['malformed'] += 1
        replies.append(f'error: {call.reason[:500]}')
      else:
        replies.append(self._run(call.arguments['code']) or '(no output)')
    if len(calls) > MAX_CALLS_A_TURN:
      replies.append(f'error: at most {MAX_CALLS_A_TURN} calls a turn, the others were left out')
    return self._continued(messages=tuple({'role': 'tool', 'content': reply} for reply in replies))

  def _check_running(self, name: str) -> None:
    if self._data is None:
      raise RuntimeError(f'{name} was called without a running episode; call reset first.')

  def _answered(self, reply: str) -> base.StepResult:
    data, self._data = self._data, None
    self._give_back()
    if 'messages' not in data:
      self._metrics |= self.graded(reply, data)
    return base.StepResult(reward=self._metrics['success'], terminated=True, metrics=self._metrics)

  def _continued(self, **observation: Any) -> base.StepResult:
    self._turns += 1
    ended, cut = self._metrics['malformed'] >= self._max_malformed, self._turns >= self._max_turns
    if ended or cut:
      self._data = None
      self._give_back()
    return base.StepResult(base.Observation(**observation), terminated=ended, truncated=cut, metrics=self._metrics)

  # --- The interpreter --------------------------------------------------------------------------------------------------------

  def _run(self, code: str) -> str:
    """Runs a piece of code; what the policy is told. Raises SandboxFailure."""
    self._metrics['tool_calls'] += 1
    try:
      if self._session is None:
        self._session = self._own_box().python()
      result = self._session.run(code)
    except sandbox.SandboxError as error:
      raise SandboxFailure(str(error)) from error
    if result.state_lost:
      self._session = None
    self._metrics['tool_errors'] += result.error is not None
    self._metrics['tool_timeouts'] += result.ending == 'time'
    error = result.error if result.error is None or self._traceback else result.error.rstrip('\n').rpartition('\n')[2]
    parts = [part.rstrip('\n') for part in (result.output, result.value, error) if part]
    return sandbox.shorten('\n'.join(parts), self._max_output)

  def _own_box(self) -> sandbox.Box:
    """The box of this rollout, taken when it is first needed."""
    if self._box is None:
      box = self._pool.take()
      with self._lock:
        if not self._closed:
          self._box = box
          return box
      self._pool.give_back(box)
      raise SandboxFailure('closed while its box was made')
    return self._box

  def _give_back(self) -> None:
    with self._lock:
      box, self._box, self._session = self._box, None, None
    if box is not None:
      self._pool.give_back(box)

  def close(self) -> None:
    """Ends the interpreter, also one that runs in another thread."""
    with self._lock:
      self._closed = True
    self._give_back()

  # --- Demonstrations ---------------------------------------------------------------------------------------------------------

  def demonstration(self, task: base.Task, rng: np.random.Generator) -> list[str | Turn]:
    """Calls and answer of a question that made itself, with the mistakes of its settings; of a row, its own solution without calls."""
    if self._expressions is None:
      texts = super().demonstration(task, rng)
      return [Turn(text) for text in texts] if self.tools else texts
    calls, answer = self._expressions.demonstrated(task.data, rng)
    final = question_answer.FORMATS[self.answer_format][1] % answer
    if self.tools:
      return [*(Turn(calls=(('python', {'code': code}),)) for code in calls), Turn(final)]
    opening, closing = self._markers
    return [*(opening + code + closing for code in calls), final + self.stop_strings[-1]]


_pools: dict[tuple[Any, ...], sandbox.Pool] = {}
_pools_lock = threading.Lock()


def _shared_pool(backend: str, image: str, limits: sandbox.Limits, packages: bool) -> sandbox.Pool:
  """The one pool of these settings in this process; a box is made first, so that settings that cannot work are told at once."""
  key = (backend, image, limits, packages)
  with _pools_lock:
    if key not in _pools:
      def make() -> sandbox.Box:
        return sandbox.open(backend, image=image, limits=limits, packages=packages)

      make().close()
      _pools[key] = pool = sandbox.Pool(make, WARM_BOXES)
      atexit.register(pool.close)
    return _pools[key]
