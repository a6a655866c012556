"""Tasksets of the `verifiers` library (its v1 interface, release 0.4) as environments.

A v1 environment is a taskset (data, scoring, tools) played by an agent program that talks to an OpenAI endpoint from a runtime of its own.
Here the taskset is taken without program and endpoint: this loop plays the plain chat with tools that the library's `null` harness plays,
and calls the taskset's own code where that is open to it, so that the tokens that are trained on are the ones that were sampled.

    tasks      the taskset is read once for a process; each task's prompt and system prompt begin a conversation
    tools      methods marked `tool` of the tasks' and the taskset's toolsets, called in this process through the library's own
               registration, under the names and schemas that an agent would see; what a tool raises is told to the policy
    ending     a turn without tool calls, or a `stop` hook on the trace, ends the episode
    scoring    `Task.score` on a trace of the conversation, with rewards, metrics and judges; the sum of the weighted rewards comes at the
               end. What scoring raises is a 'grader_error'. A rollout that a limit of this library cuts is not scored.

What needs the library's machinery is refused by name: environments with a `run` of their own (several agents, user simulators), tasks in
containers or images, hooks that get a runtime (`setup`, `finalize`, scoring with a `runtime`), `intercept` hooks, stops on requests or
responses, toolsets at a URL or with state shared through the library's channel, prompts with images, and tasks that a user opens. The older
interface, `load_environment` with a rubric, is no part of the library any more (release 0.4).

Code of a taskset is trusted: it runs in this process, with its rights.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import json
from typing import Any, Mapping, Sequence

from sao_jax.environments import base
from sao_jax.environments.gymnasium import load
from sao_jax.tool_calls import ToolCall, ToolCallError, after_thinking

RUNTIME_HOOKS = ('setup', 'finalize', 'stage_verifier', 'runtime_env')
MAX_RESULT = 20_000  # Characters of a tool's result that the policy sees.


class Verifiers(base.AsyncEnvironment):
  """One taskset.

  Args:
    env: id of an installed taskset, or 'module:function' of a function that gives one.
    config: fields of the taskset's config, or arguments of the function.
    max_tasks: read at most this many tasks; 0 for all, which a taskset without end refuses.
    system_prompt: system message where a task has none; '' for none.
    success_threshold: reward from which a task counts as solved.
    max_malformed: this many malformed tool calls end the episode; it is then scored as it is.
    test_share: share of the tasks that belong to the test split, by what their prompts say.
    replayable: whether tools and scoring are functions of what they are given.

  Raises:
    ImportError: when verifiers is not installed.
    ValueError: on an unknown taskset, one that is refused, or a split without tasks.
  """

  name = 'verifiers'
  conversation = 'chat'

  def __init__(
      self, *, env: str, config: Mapping[str, Any] | None = None, max_tasks: int = 0, system_prompt: str = '',
      success_threshold: float = 1.0, max_malformed: int = 3, test_share: float = 0.1, replayable: bool = False,
  ):
    super().__init__()
    base.check_range('max_tasks', max_tasks, 0, 10**9)
    base.check_range('success_threshold', success_threshold, -1e9, 1e9)
    base.check_range('max_malformed', max_malformed, 1, 1000)
    base.check_range('test_share', test_share, 0.001, 0.999)
    if not isinstance(env, str) or not env:
      raise ValueError(f"env must be the id of a taskset or 'module:function', got {env!r}.")
    if not isinstance(replayable, bool):
      raise ValueError(f'replayable must be True or False, got {replayable!r}.')
    self._vf = _library()
    self._set = _read(env, json.dumps(dict(config or {}), sort_keys=True), max_tasks)
    splits = [base.split_of(prompt, test_share) for prompt in self._set.prompts]
    self._sides = {split: [i for i, other in enumerate(splits) if other == split] for split in base.SPLITS}
    empty = [split for split, places in self._sides.items() if not places]
    if empty:
      raise ValueError(f'None of the {len(splits)} tasks of {env!r} falls to the {empty[0]} split; change test_share or max_tasks.')
    self.system_prompt, self.success_threshold, self.max_malformed = system_prompt, success_threshold, max_malformed
    self.replayable, self.tools = replayable, self._set.schemas
    self.metric_names = ('success', 'tool_calls', 'malformed', *self._set.signals)
    self._toolbox: _Toolbox | None = None
    self._task: Any = None

  def task_sets(self, split: str) -> tuple[base.TaskSet, ...]:
    base.check_split(split)
    return (base.TaskSet(self._set.name, 0, len(self._sides[split]), None, self._set.fingerprint),)

  def sample_task(self, index: int, split: str, seed: int) -> base.Task:
    """Task whose data are its 'place' in the taskset; the order is the prompt stream's business."""
    base.check_split(split)
    places = self._sides[split]
    if not 0 <= index < len(places):
      raise ValueError(f'The {split} split has tasks 0 to {len(places) - 1}, got {index}.')
    return base.Task(index, split, seed, {'place': places[index]})

  async def reset_async(self, task: base.Task) -> base.Observation:
    vf, self._task = self._vf, self._set.tasks[task.data['place']]
    data = self._task.data
    from verifiers.v1.state import state_cls
    messages = [vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else list(data.prompt)
    if system := data.system_prompt or self.system_prompt:
      messages.insert(0, vf.SystemMessage(content=system))
    self._trace = vf.Trace(
        task=vf.TraceTask(type=type(self._task).__name__, data=data, key=self._task.key, hash=self._task.hash),
        state=state_cls(type(self._task))(), agent=vf.AgentInfo(config=vf.AgentConfig()))
    for message in messages:
      self._add(message)
    self._metrics = dict.fromkeys(self.metric_names, 0.0)
    try:
      self._toolbox = await _Toolbox.open(self._set.taskset, self._task) if self.tools else None
    except Exception as error:
      raise base.EnvironmentFailure(f'The tools of {self._set.name} failed to start: {type(error).__name__}: {error}') from error
    return base.Observation(messages=tuple({'role': m.role, 'content': _text(m.content)} for m in messages))

  def _add(self, message: Any, sampled: bool = False) -> None:
    nodes = self._trace.nodes
    nodes.append(self._vf.MessageNode(parent=len(nodes) - 1 if nodes else None, message=message, sampled=sampled))

  async def step_async(self, action: str) -> base.StepResult:
    self._check_running()
    self._add(self._vf.AssistantMessage(content=after_thinking(action).strip()), sampled=True)
    return await self._score('agent_completed')

  async def step_calls_async(self, calls: Sequence[ToolCall | ToolCallError], text: str) -> base.StepResult:
    self._check_running()
    made = [
        self._vf.ToolCall(id=f'call_{len(self._trace.nodes)}_{i}', name=call.name, arguments=json.dumps(call.arguments))
        for i, call in enumerate(calls) if isinstance(call, ToolCall)]
    self._add(self._vf.AssistantMessage(content=text.strip(), tool_calls=made or None), sampled=True)
    if not calls:
      return await self._score('agent_completed')
    replies, ids = [], iter(made)
    for call in calls:
      if isinstance(call, ToolCallError):
        self._metrics['malformed'] += 1
        replies.append(f'error: {call.reason[:200]}')
        continue
      self._metrics['tool_calls'] += 1
      replies.append(await self._toolbox.call(call.name, call.arguments))
      self._add(self._vf.ToolMessage(tool_call_id=next(ids).id, content=replies[-1], name=call.name))
    if self._metrics['malformed'] >= self.max_malformed:
      return await self._score('malformed_calls')
    for stop in self._task.hooks('stop'):
      if await self._asked(stop):
        return await self._score(stop.__name__)
    messages = tuple({'role': 'tool', 'content': reply} for reply in replies)
    return base.StepResult(base.Observation(messages=messages), metrics=dict(self._metrics))

  def _check_running(self) -> None:
    if self._task is None:
      raise RuntimeError('step was called without a running episode; call reset first.')

  async def _asked(self, stop: Any) -> bool:
    """What a stop hook says of the trace; its parameters have any name."""
    try:
      result = stop(self._trace)
      return bool(await result if inspect.isawaitable(result) else result)
    except Exception as error:
      raise base.EnvironmentFailure(f'The stop hook {stop.__name__} raised {type(error).__name__}: {error}') from error

  async def _score(self, condition: str) -> base.StepResult:
    task, trace, self._task = self._task, self._trace, None
    trace.stop(condition)
    try:
      await task.score(trace, None)
      reward = float(trace.reward)
    except Exception as error:  # The taskset's own fault, or its judge's, whatever it raises.
      raise base.GraderError(f'Scoring a task of {self._set.name} raised {type(error).__name__}: {error}') from error
    missing = [name for name, value in trace.rewards.items() if value is None]
    if missing:
      raise base.GraderError(f'Scoring a task of {self._set.name} left {", ".join(missing)} without a score.')
    signals = {name: reward.score for name, reward in trace.rewards.items()} | dict(trace.metrics)
    self._metrics |= {name: signals[name] for name in self._set.signals if signals.get(name) is not None}
    self._metrics['success'] = float(reward >= self.success_threshold)
    return base.StepResult(reward=reward, terminated=True, metrics=dict(self._metrics))


class _Toolbox:
  """The toolsets of one task, in this process."""

  def __init__(self):
    self.schemas: list[dict[str, Any]] = []
    self._servers: dict[str, tuple[Any, str]] = {}  # Name of a tool -> its server, and its name there.

  @classmethod
  async def open(cls, taskset: Any, task: Any, *, setup: bool = True) -> _Toolbox:
    from mcp.server.mcpserver import MCPServer
    box = cls()
    for shared, toolset in _toolsets(taskset, task):
      if setup:
        await toolset.setup()
        if not shared:
          await toolset.setup_task(task.data)
      server = MCPServer(toolset.server_name or type(toolset).__name__)
      toolset.register(server)
      for tool in await server.list_tools():
        name = f'{toolset.server_name}_{tool.name}' if toolset.server_name else tool.name
        if name in box._servers:
          raise ValueError(f'two tools have the name {name!r}')
        box._servers[name] = (server, tool.name)
        box.schemas.append({'type': 'function', 'function': {
            'name': name, 'description': tool.description or '', 'parameters': tool.input_schema}})
    return box

  async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
    """The result of a tool as a text; what it raises, too, as an agent would be told."""
    server, tool = self._servers[name]
    try:
      result = await server.call_tool(tool, dict(arguments))
      text = '\n'.join(getattr(block, 'text', str(block)) for block in getattr(result, 'content', result))
    except Exception as error:
      text = f'error: {error}'
    return text if len(text) <= MAX_RESULT else f'{text[:MAX_RESULT]}\n[{len(text) - MAX_RESULT} more characters]'


def _toolsets(taskset: Any, task: Any) -> list[tuple[bool, Any]]:
  """(whether it is of the whole taskset, toolset) of a task's tools."""
  shared = [(True, toolset) for toolset in type(taskset).toolsets(taskset.config)]
  return shared + [(False, toolset) for toolset in type(task).toolsets(task.config)]


class _Read:
  """A taskset that was read and found playable: its tasks, their tools, and the names of its rewards and metrics."""

  def __init__(self, name: str, taskset: Any, max_tasks: int):
    import asyncio
    self.name, self.taskset = name, taskset
    if not max_tasks and not taskset.bounded:
      raise ValueError(f'The taskset {name!r} has no end; give max_tasks.')
    self.tasks = list(itertools.islice(taskset, max_tasks or None))
    if not self.tasks:
      raise ValueError(f'The taskset {name!r} has no tasks.')
    for task in self.tasks:
      reason = refusal(taskset, task)
      if reason:
        raise ValueError(f'The taskset {name!r} cannot be played here: task {task.data.idx} {reason}.')
    self.prompts = [task.data.prompt_text for task in self.tasks]
    first = self.tasks[0]
    self.signals = tuple(fn.__name__ for kind in ('reward', 'metric') for fn in first.hooks(kind)) + tuple(
        judge.reward_name for judge in first.plugged_judges())
    self.schemas: tuple[dict[str, Any], ...] = ()
    if _toolsets(taskset, first):
      self.schemas = tuple(base._drive(asyncio.new_event_loop(), _Toolbox.open(taskset, first, setup=False)).schemas)
    self.fingerprint = f'{len(self.tasks)}/{first.hash[:16]}/{self.tasks[-1].hash[:16]}'


def refusal(taskset: Any, task: Any) -> str:
  """Why a task cannot be played without the library's own machinery; '' where it can."""
  vf, cls, data = _library(), type(task), task.data
  if cls.NEEDS_CONTAINER or data.image or data.agent_user or data.skills or data.artifacts:
    return 'needs a container, an image, a user, skills or artifacts'
  for hook in RUNTIME_HOOKS:
    if getattr(cls, hook) is not getattr(vf.Task, hook):
      return f'has a {hook!r} hook, which works on a runtime'
  for kind in ('reward', 'metric'):
    for fn in task.hooks(kind):
      if 'runtime' in inspect.signature(fn).parameters:
        return f'has the {kind} {fn.__name__!r}, which works on a runtime'
  for judge in task.plugged_judges():
    if 'runtime' in inspect.signature(judge.score).parameters:
      return f'has the judge {judge.reward_name!r}, which works on a runtime'
  if any(hasattr(getattr(cls, name, None), 'intercept') for name in dir(cls)):
    return 'has intercept hooks'
  for stop in task.hooks('stop'):
    kinds = [str(p.annotation).split('.')[-1].split('[')[0] for p in inspect.signature(stop).parameters.values()]
    if len(kinds) != 1 or not kinds[0].startswith('Trace') and "'Trace" not in kinds[0]:
      return f'has the stop hook {stop.__name__!r}, which is not on the trace alone'
  for _, toolset in _toolsets(taskset, task):
    if getattr(toolset.config, 'url', None) or getattr(toolset.config, 'colocated', False):
      return f'has the toolset {type(toolset).__name__}, which lives elsewhere'
    if type(toolset.state) is not vf.State:
      return f'has the toolset {type(toolset).__name__}, whose state goes through the library\'s channel'
  if data.prompt is None:
    return 'has no prompt: a user opens the conversation'
  if not isinstance(data.prompt, str) and not all(_is_text(m.content) and m.role in ('system', 'user') for m in data.prompt):
    return 'has a prompt of more than texts of system and user'
  return ''


def _is_text(content: Any) -> bool:
  return isinstance(content, str) or all(getattr(part, 'type', '') == 'text' for part in content or ())


def _text(content: Any) -> str:
  return content if isinstance(content, str) else '\n'.join(part.text for part in content or ())


@functools.lru_cache(maxsize=16)
def _read(env: str, config: str, max_tasks: int) -> _Read:
  """The taskset of these settings, read once. Raises ValueError."""
  vf, fields = _library(), json.loads(config)
  if ':' in env:
    taskset = load(env)(**fields)
  else:
    try:
      found = vf.environment_class(env)
      if found is not vf.SingleAgentEnv:
        raise ValueError(f'The environment {env!r} has a run of its own ({found.__name__}), for several agents or users: not played here.')
      taskset = vf.load_taskset(vf.taskset_config_type(env).model_validate({**fields, 'id': env}))
    except (ModuleNotFoundError, AttributeError, TypeError) as error:
      raise ValueError(f'The taskset {env!r} cannot be loaded: {error}') from error
  if not isinstance(taskset, vf.Taskset):
    raise ValueError(f'{env!r} must give a verifiers.v1 Taskset, got {type(taskset).__name__}.')
  return _Read(env, taskset, max_tasks)


def _library() -> Any:
  try:
    import verifiers.v1
  except ImportError as error:
    raise ImportError("The environment 'verifiers' needs the package verifiers: pip install -r requirements/verifiers.txt") from error
  return verifiers.v1
