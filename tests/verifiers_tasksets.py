"""Tasksets written against verifiers.v1, for tests: they run with the library and with its stand-in."""

import verifiers.v1 as vf


class SumData(vf.TaskData):
  answer: str = ''


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):

  @vf.reward(weight=0.75)
  async def exact(self, trace) -> float:
    return float(trace.last_reply == self.data.answer)

  @vf.reward(weight=0.25)
  async def short(self, trace) -> float:
    return float(len(trace.last_reply) < 5)

  @vf.metric
  async def turns(self, trace) -> float:
    return float(trace.num_turns)


class SumSet(vf.Taskset[SumTask, vf.TasksetConfig]):
  TASK, SIZE = SumTask, 40

  def load(self):
    for i in range(self.SIZE):
      yield self.TASK(SumData(prompt=f'What is {i} plus {i + 3}?', answer=str(2 * i + 3)), self.config.task)


class Adder(vf.Toolset[vf.ToolsetConfig, vf.State]):
  TOOL_PREFIX = 'math'

  async def setup_task(self, task):
    self.limit = 100 if task.answer else 0

  @vf.tool
  async def add(self, a: int, b: int) -> str:
    """Adds two numbers."""
    if a + b > self.limit:
      raise ValueError('too large for me')
    return str(a + b)


class ToolTask(SumTask):

  @vf.stop
  async def enough(self, trace: vf.Trace) -> bool:
    return len(trace.tool_messages) >= 3

  @classmethod
  def toolsets(cls, config):
    return [Adder(vf.ToolsetConfig())]


class ToolSet(SumSet):
  TASK = ToolTask


class BrokenTask(SumTask):

  @vf.reward
  async def broken(self, trace) -> float:
    raise RuntimeError('no grader here')


class ContainerTask(SumTask):
  NEEDS_CONTAINER = True


class SetupTask(SumTask):

  async def setup(self, trace, runtime):
    await runtime.run(['true'])


class RuntimeRewardTask(SumTask):

  @vf.reward
  async def on_disk(self, runtime) -> float:
    return 1.0


class InterceptTask(SumTask):

  @vf.intercept
  async def change(self, request: vf.Request):
    return None


class RequestStopTask(SumTask):

  @vf.stop
  async def early(self, request: vf.Request) -> bool:
    return False


class FarTools(Adder):
  pass


class FarToolTask(SumTask):

  @classmethod
  def toolsets(cls, config):
    return [FarTools(vf.ToolsetConfig(url='http://127.0.0.1:1'))]


class Counter(vf.State):
  count: int = 0


class StateTools(vf.Toolset[vf.ToolsetConfig, Counter]):
  STATE = Counter


class StateToolTask(SumTask):

  @classmethod
  def toolsets(cls, config):
    return [StateTools(vf.ToolsetConfig())]


class OpenSet(SumSet):

  def load(self):
    yield self.TASK(SumData(prompt=None, answer=''), self.config.task)


class ImageSet(SumSet):

  def load(self):
    part = vf.ImageUrlContentPart(image_url=vf.ImageUrlSource(url='data:,'))
    yield self.TASK(SumData(prompt=[vf.UserMessage(content=[part])], answer=''), self.config.task)


class MessageSet(SumSet):

  def load(self):
    for i in range(40):
      messages = [vf.SystemMessage(content='Reply with a number.'), vf.UserMessage(content=f'{i}+1')]
      yield self.TASK(SumData(prompt=messages, answer=str(i + 1)), self.config.task)


class EndlessSet(SumSet):
  INFINITE = True

  def load(self):
    i = 0
    while True:
      yield self.TASK(SumData(prompt=f'What is {i}?', answer=str(i)), self.config.task)
      i += 1


def make(name, task=''):
  """A taskset of this module, its tasks of another class where one is named."""
  cls = globals()[name]
  if task:
    cls = type(cls.__name__, (cls,), {'TASK': globals()[task]})
  return cls(vf.TasksetConfig())


def make_number():
  return 3


TASKSET = SumSet
__all__ = ['SumSet']
