"""The names of verifiers.v1 that the adapter uses, in small."""

import hashlib
import inspect
import sys

from verifiers.v1.state import State


class _Record:
  """Keyword arguments as attributes, over the defaults of the class."""

  def __init__(self, **values):
    for name, value in values.items():
      setattr(self, name, value)

  @classmethod
  def model_validate(cls, values):
    return cls(**values)


class _Generic:

  def __class_getitem__(cls, parameters):
    return cls


class TaskData(_Record):
  idx = id = name = prompt = system_prompt = image = agent_user = None
  skills = artifacts = ()

  @property
  def prompt_text(self):
    return self.prompt if isinstance(self.prompt, str) else '\n\n'.join(m.content for m in self.prompt or ())


class TaskConfig(_Record):
  pass


class TasksetConfig(_Record):
  id, task = '', TaskConfig()


class ToolsetConfig(_Record):
  url, colocated = None, False


class SystemMessage(_Record):
  role = 'system'


class UserMessage(_Record):
  role = 'user'


class AssistantMessage(_Record):
  role, tool_calls = 'assistant', None


class ToolMessage(_Record):
  role = 'tool'


class ImageUrlContentPart(_Record):
  type = 'image_url'


class ImageUrlSource(_Record):
  pass


class Request(_Record):
  pass


class ToolCall(_Record):
  pass


class TraceTask(_Record):
  pass


class AgentConfig(_Record):
  pass


class AgentInfo(_Record):
  pass


class MessageNode(_Record):
  pass


class Reward(_Record):

  @property
  def value(self):
    return self.score * self.weight


class Trace(_Record):

  def __init__(self, **values):
    super().__init__(nodes=[], rewards={}, metrics={}, stop_condition=None, **values)

  @property
  def assistant_messages(self):
    return [n.message for n in self.nodes if n.sampled]

  @property
  def num_turns(self):
    return len(self.assistant_messages)

  @property
  def last_reply(self):
    return (self.assistant_messages[-1].content or '').strip()

  @property
  def tool_messages(self):
    return [n.message for n in self.nodes if n.message.role == 'tool']

  @property
  def reward(self):
    return sum(r.value for r in self.rewards.values() if r is not None)

  def stop(self, condition):
    self.stop_condition = condition


def _mark(kind):
  def decorate(function=None, weight=1.0, **_):
    if function is None:
      return lambda f: decorate(f, weight)
    setattr(function, kind, True)
    function.weight = weight
    return function
  return decorate


tool, stop, metric, reward, intercept = (_mark(kind) for kind in ('tool', 'stop', 'metric', 'reward', 'intercept'))


class Toolset(_Generic):
  TOOL_PREFIX = ''

  def __init__(self, config):
    self.config, self.state = config, getattr(type(self), 'STATE', State)()

  @property
  def server_name(self):
    return '' if self.TOOL_PREFIX is None else self.TOOL_PREFIX or type(self).__name__.lower()

  async def setup(self):
    pass

  async def setup_task(self, task):
    pass

  def register(self, mcp):
    for name, f in inspect.getmembers(self, lambda f: getattr(f, 'tool', False)):
      mcp.add_tool(f, name, f.__doc__)


class Task(_Generic):
  NEEDS_CONTAINER = False

  def __init__(self, data, config=None):
    self.data, self.config = data, config
    self.key = self.hash = hashlib.sha256(repr(sorted(vars(data).items(), key=str)).encode()).hexdigest()

  async def setup(self, trace, runtime):
    pass

  async def finalize(self, trace, runtime):
    pass

  async def stage_verifier(self, trace, runtime):
    pass

  def runtime_env(self):
    return {}

  def hooks(self, kind):
    return [f for _, f in inspect.getmembers(self, lambda f: getattr(f, kind, False) is True)]

  def plugged_judges(self):
    return []

  @classmethod
  def toolsets(cls, config):
    return []

  async def score(self, trace, runtime=None):
    for kind, values in (('metric', trace.metrics), ('reward', trace.rewards)):
      for f in self.hooks(kind):
        found = await f(**{'trace': trace} if 'trace' in inspect.signature(f).parameters else {})
        values[f.__name__] = float(found) if kind == 'metric' else Reward(score=float(found), weight=f.weight)


class Taskset(_Generic):
  INFINITE = False

  def __init__(self, config):
    self.config = config

  @property
  def bounded(self):
    return not self.INFINITE

  def __iter__(self):
    for idx, task in enumerate(self.load()):
      task.data.idx = idx
      yield task

  @classmethod
  def toolsets(cls, config):
    return []


class SingleAgentEnv:
  pass


def environment_class(id):
  return getattr(sys.modules.get(id), 'ENVIRONMENT', SingleAgentEnv)


def taskset_config_type(id):
  return TasksetConfig


def load_taskset(config):
  import importlib
  return importlib.import_module(config.id).TASKSET(config)


