"""Tasksets of verifiers v1, with a stand-in for the library, and with the library where it is installed."""

import asyncio
import importlib.util
import pathlib
import sys

import pytest

from sao_jax import environments
from sao_jax.environments import base, verifiers
from sao_jax.tool_calls import ToolCall, ToolCallError

HERE = pathlib.Path(__file__).parent
INSTALLED = importlib.util.find_spec('verifiers') is not None
OURS = ('verifiers', 'mcp', 'verifiers_tasksets')


@pytest.fixture(params=['stand-in', 'library'], autouse=True)
def library(request, monkeypatch):
  """Both libraries in turn; the modules of one are gone when the other comes."""
  if request.param == 'library' and not INSTALLED:
    pytest.skip('needs verifiers')
  kept = {name: module for name, module in sys.modules.items() if name.split('.')[0] in OURS}
  if request.param == 'stand-in':
    for name in kept:
      del sys.modules[name]
    monkeypatch.syspath_prepend(str(HERE / 'fake_verifiers'))
  monkeypatch.syspath_prepend(str(HERE))
  verifiers._read.cache_clear()
  yield request.param
  if request.param == 'stand-in':
    for name in [name for name in sys.modules if name.split('.')[0] in OURS]:
      del sys.modules[name]
    sys.modules.update(kept)
  verifiers._read.cache_clear()


def make(name='SumSet', task='', **settings):
  config = {'name': name, **({'task': task} if task else {})}
  return environments.make('verifiers', env='verifiers_tasksets:make', config=config, test_share=0.3, **settings)


def test_one_turn():
  environment = make(system_prompt='Reply with a number.')
  task = environment.sample_task(0, 'train', 0)
  system, user = environment.reset(task).messages
  assert system == {'role': 'system', 'content': 'Reply with a number.'} and user['role'] == 'user'
  a, b = (int(word) for word in user['content'].rstrip('?').split() if word.isdigit())
  result = environment.step(f'<think>{a} and {b}</think> {a + b}')
  assert (result.reward, result.terminated) == (1.0, True)
  assert result.metrics == {'success': 1.0, 'tool_calls': 0.0, 'malformed': 0.0, 'exact': 1.0, 'short': 1.0, 'turns': 1.0}
  with pytest.raises(RuntimeError, match='reset'):
    environment.step('again')
  environment.reset(task)
  result = environment.step('12')
  assert result.reward == 0.25 and result.metrics['success'] == 0.0 and result.metrics['exact'] == 0.0  # The sum of the weighted rewards.
  environment.reset(task)
  assert environment.step('I do not know.').reward == 0.0
  assert environment.metric_names == ('success', 'tool_calls', 'malformed', 'exact', 'short', 'turns')
  environment.close()


def test_tasks_are_divided_and_have_an_end():
  environment = make()
  sizes = {split: environment.task_sets(split)[0].size for split in base.SPLITS}
  assert sum(sizes.values()) == 40 and min(sizes.values()) > 3
  places = {split: [environment.sample_task(i, split, 5).data['place'] for i in range(size)] for split, size in sizes.items()}
  assert sorted(places['train'] + places['test']) == list(range(40))
  with pytest.raises(ValueError, match='tasks 0 to'):
    environment.sample_task(sizes['test'], 'test', 0)
  assert make(max_tasks=20).task_sets('train')[0].size < sizes['train']
  assert make('EndlessSet', max_tasks=30).task_sets('train')[0].size > 10


def test_a_prompt_of_messages():
  environment = make('MessageSet', system_prompt='')
  task = environment.sample_task(0, 'train', 0)
  messages = environment.reset(task).messages
  assert [m['role'] for m in messages] == ['system', 'user'] and messages[0]['content'] == 'Reply with a number.'
  assert environment.step(str(int(messages[1]['content'][:-2]) + 1)).reward == 1.0


def test_tools():
  environment = make('ToolSet')
  assert [t['function']['name'] for t in environment.tools] == ['math_add']
  function = environment.tools[0]['function']
  assert function['description'] == 'Adds two numbers.' and set(function['parameters']['properties']) == {'a', 'b'}
  task = environment.sample_task(0, 'train', 0)
  user = environment.reset(task).messages[-1]['content']
  a, b = (int(word) for word in user.rstrip('?').split() if word.isdigit())
  result = environment.step_calls([ToolCall('math_add', {'a': a, 'b': b}, '')], 'I add them.')
  assert not result.terminated and result.observation.messages == ({'role': 'tool', 'content': str(a + b)},)
  result = environment.step_calls([], str(a + b))
  assert result.terminated and result.reward == 1.0
  assert result.metrics == {'success': 1.0, 'tool_calls': 1.0, 'malformed': 0.0, 'exact': 1.0, 'short': 1.0, 'turns': 2.0}
  environment.close()


def test_what_a_tool_raises_and_what_is_no_call_are_told_to_the_policy():
  environment = make('ToolSet', max_malformed=2)
  environment.reset(environment.sample_task(0, 'train', 0))
  result = environment.step_calls([ToolCall('math_add', {'a': 99, 'b': 99}, ''), ToolCallError('no such tool', '')], '')
  first, second = (m['content'] for m in result.observation.messages)
  assert 'too large for me' in first and second == 'error: no such tool' and not result.terminated
  result = environment.step_calls([ToolCallError('still none', '')], '')
  assert result.terminated and result.metrics['malformed'] == 2.0 and result.reward == 0.25  # Scored as it is.


def test_a_stop_hook_ends_the_episode():
  environment = make('ToolSet')
  environment.reset(environment.sample_task(0, 'train', 0))
  call = ToolCall('math_add', {'a': 1, 'b': 1}, '')
  assert not environment.step_calls([call, call], '').terminated
  assert environment.step_calls([call], '7').terminated
  assert environment._trace.stop_condition == 'enough'


def test_a_scorer_that_raises_is_a_failure_and_no_reward():
  environment = make(task='BrokenTask')
  environment.reset(environment.sample_task(0, 'train', 0))
  with pytest.raises(base.GraderError, match='no grader here'):
    environment.step('3')


def test_many_episodes_at_once_share_nothing():
  environments_ = [make('ToolSet') for _ in range(8)]

  async def play(one, index):
    await one.reset_async(one.sample_task(index, 'train', 0))
    for _ in range(2):
      await one.step_calls_async([ToolCall('math_add', {'a': index, 'b': 1}, '')], '')
    return [m.content for m in one._trace.tool_messages]

  async def all_of_them():
    return await asyncio.gather(*(play(one, i) for i, one in enumerate(environments_)))

  assert asyncio.run(all_of_them()) == [[str(i + 1)] * 2 for i in range(8)]


@pytest.mark.parametrize('settings,message', [
    (dict(task='ContainerTask'), 'container'), (dict(task='SetupTask'), "'setup' hook"),
    (dict(task='RuntimeRewardTask'), "'on_disk'.*runtime"),
    (dict(task='InterceptTask'), 'intercept'), (dict(task='RequestStopTask'), "'early'"), (dict(task='FarToolTask'), 'FarTools.*elsewhere'),
    (dict(task='StateToolTask'), 'StateTools.*state'), (dict(name='OpenSet'), 'a user opens'), (dict(name='ImageSet'), 'more than texts'),
    (dict(name='EndlessSet'), 'max_tasks'), (dict(max_tasks=1), 'split'), (dict(max_malformed=0), 'max_malformed')])
def test_what_cannot_be_played_is_refused_by_name(settings, message):
  with pytest.raises(ValueError, match=message):
    make(**settings)


def test_tasksets_by_id_and_what_is_none():
  environment = environments.make('verifiers', env='verifiers_tasksets', test_share=0.3)
  assert environment.task_sets('train')[0].size > 10
  for env, message in (
      ('no_such_taskset', 'cannot be loaded'), ('verifiers_tasksets:make_number', 'Taskset, got int'), ('', 'id of a taskset')):
    with pytest.raises(ValueError, match=message):
      environments.make('verifiers', env=env)


def test_an_environment_with_a_run_of_its_own_is_refused(library):
  if library == 'stand-in':
    import verifiers_tasksets
    verifiers_tasksets.ENVIRONMENT = type('Debate', (), {})
    env = 'verifiers_tasksets'
  else:
    env = 'user_sim'
  with pytest.raises(ValueError, match='run of its own|cannot be loaded'):
    environments.make('verifiers', env=env)


def test_a_missing_library_is_told_with_the_way_out(monkeypatch):
  monkeypatch.setitem(sys.modules, 'verifiers', None)
  monkeypatch.delitem(sys.modules, 'verifiers.v1', raising=False)
  with pytest.raises(ImportError, match='pip install -r requirements/verifiers.txt'):
    environments.make('verifiers', env='verifiers_tasksets')
