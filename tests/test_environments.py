"""The protocol of environments, the registry, the asynchronous adapter, and the scripted environment."""

import ast
import asyncio
import dataclasses
import pathlib
import threading
import time

import numpy as np
import pytest

from sao_jax import environments
from sao_jax.environments import base, scripted

ROOT = pathlib.Path(environments.__file__).parent
HOST_CODE = tuple(
    f'sao_jax.{name}' for name in (
        'environments', 'graders', 'services', 'config', 'tool_calls', 'data_order', 'data_sources', 'gateway', 'sandbox'))


def test_no_module_imports_jax():
  files = [*ROOT.glob('*.py'), ROOT.parent / 'data.py', ROOT.parent / 'tool_calls.py']
  assert len(files) >= 5
  for file in files:
    for node in ast.walk(ast.parse(file.read_text())):
      names = [a.name for a in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
      for name in (f'{node.module}.{n}' if isinstance(node, ast.ImportFrom) else n for n in names):
        assert name.split('.')[0] not in ('jax', 'flax', 'optax', 'chex'), (file.name, name)
        assert not name.startswith('sao_jax') or name.startswith(HOST_CODE), (file.name, name)


def test_terminated_wins_over_truncated():
  both = base.StepResult(terminated=True, truncated=True)
  assert both.terminated and not both.truncated
  assert base.StepResult(truncated=True).truncated and not base.StepResult(truncated=True).terminated


@pytest.mark.parametrize('value', [float('nan'), float('inf'), -float('inf'), np.float32('nan'), None, '1', [1.0]])
def test_a_reward_or_metric_that_is_no_finite_number_is_a_failure_of_the_environment(value):
  with pytest.raises(base.EnvironmentFailure, match='reward'):
    base.StepResult(reward=value)
  with pytest.raises(base.EnvironmentFailure, match='success'):
    base.StepResult(metrics={'success': value})


def test_numbers_become_plain_floats():
  result = base.StepResult(reward=np.float32(0.5), metrics={'success': True, 'n': np.int64(3)})
  assert type(result.reward) is float and result.reward == 0.5
  assert result.metrics == {'success': 1.0, 'n': 3.0} and all(type(v) is float for v in result.metrics.values())


def test_make_names_what_is_known():
  with pytest.raises(ValueError, match="Unknown environment 'calculater'; known: ask, calculator, .*reasoning_gym, .*scripted"):
    environments.make('calculater')
  with pytest.raises(ValueError, match="Unknown setting 'operations'.*min_operations, max_operations"):
    environments.make('calculator', operations=3)
  assert environments.make('calculator').name == 'calculator'


def test_register_refuses_a_taken_name(monkeypatch):
  monkeypatch.setattr(environments, 'REGISTRY', dict(environments.REGISTRY))
  environments.register('mine', 'sao_jax.environments.scripted', 'Scripted')
  environments.register('mine', 'sao_jax.environments.scripted', 'Scripted')
  assert environments.make('mine', turns=2).name == 'mine'
  with pytest.raises(ValueError, match='taken'):
    environments.register('mine', 'sao_jax.environments.calculator', 'Calculator')


def test_generators_of_different_streams_differ_and_repeat():
  draws = {}
  for name in ('a', 'b'):
    for counters in ((0, 0), (0, 1), (1, 0), (-1, 0), (2**63, 5)):
      draws[name, counters] = tuple(base.generator(name, *counters).integers(2**62, size=2))
      assert draws[name, counters] == tuple(base.generator(name, *counters).integers(2**62, size=2))
  assert len(set(draws.values())) == 10


def test_split_of_has_the_share_asked_for():
  share = np.mean([base.split_of(f'question {i}', 0.2) == 'test' for i in range(20_000)])
  assert abs(share - 0.2) < 4 * (0.2 * 0.8 / 20_000) ** 0.5


@pytest.mark.parametrize('low,high,value', [(0, 3, 1.0), (0, 3, True), (0, 3, 4), (0, 3, '1'), (0.0, 1.0, float('nan')), (0.0, 1.0, None)])
def test_check_range_refuses(low, high, value):
  with pytest.raises(ValueError, match='width must be'):
    base.check_range('width', value, low, high)


# --- Asynchronous environments -------------------------------------------------------------------------------------------------


class Echo(base.AsyncEnvironment):
  """Answers with its action; 'hang' never returns, 'fail' fails. Uses one queue over all calls, so it needs one loop for all of them."""

  name = 'echo'

  def __init__(self):
    super().__init__()
    self.loops, self.closed_in = [], None

  async def reset_async(self, task):
    self.loops.append(asyncio.get_running_loop())
    self.queue = asyncio.Queue()
    return base.Observation('go')

  async def step_async(self, action):
    self.loops.append(asyncio.get_running_loop())
    if action == 'hang':
      await asyncio.Event().wait()
    if action == 'fail':
      raise base.EnvironmentFailure('lost')
    await self.queue.put(action)
    return base.StepResult(base.Observation(await self.queue.get()), reward=1.0)

  async def close_async(self):
    self.closed_in = asyncio.get_running_loop()


TASK = base.Task(0, 'train', 0, {})


def test_async_environment_keeps_one_loop_over_threads():
  environment, results = Echo(), []
  assert environment.reset(TASK).text == 'go'
  threads = [threading.Thread(target=lambda i=i: results.append(environment.step(f'a{i}').observation.text)) for i in range(3)]
  for thread in threads:
    thread.start()
    thread.join(60)
  assert results == ['a0', 'a1', 'a2'] and len(environment.loops) == 4 and len(set(map(id, environment.loops))) == 1
  environment.close()
  environment.close()
  assert environment.closed_in is environment.loops[0] and environment.loops[0].is_closed()
  with pytest.raises(base.EnvironmentFailure, match='closed'):
    environment.step('late')


def test_async_environment_passes_its_errors_on_and_goes_on():
  environment = Echo()
  environment.reset(TASK)
  with pytest.raises(base.EnvironmentFailure, match='lost'):
    environment.step('fail')
  assert environment.step('x').observation.text == 'x'
  environment.close()


def test_close_frees_a_thread_that_hangs_in_an_async_environment():
  environment, errors = Echo(), []
  environment.reset(TASK)

  def call():
    try:
      environment.step('hang')
    except base.EnvironmentFailure as error:
      errors.append(str(error))

  thread = threading.Thread(target=call, daemon=True)
  thread.start()
  deadline = time.monotonic() + 60.0
  while len(environment.loops) < 2:
    assert time.monotonic() < deadline
    time.sleep(0.001)
  with pytest.raises(base.EnvironmentFailure, match='still running'):
    environment.step('second')
  environment.close()
  thread.join(60)
  assert not thread.is_alive() and errors == ['cancelled by close'] and environment.loops[0].is_closed()
  assert environment.closed_in is environment.loops[0]


def test_async_environment_works_inside_a_running_loop():
  """As in a notebook, whose main thread runs a loop."""
  environment = Echo()

  async def cell():
    assert environment.reset(TASK).text == 'go'
    assert environment.step('x').observation.text == 'x'
    environment.close()

  asyncio.run(cell())
  assert environment.closed_in is environment.loops[0] and environment.loops[0].is_closed()


def test_async_environment_closed_before_its_first_call():
  environment = Echo()
  environment.close()
  with pytest.raises(base.EnvironmentFailure, match='closed'):
    environment.reset(TASK)


# --- Scripted environment ------------------------------------------------------------------------------------------------------


def play(environment, task, actions):
  """Observations, rewards and the last result of an episode."""
  texts, rewards = [environment.reset(task).text], []
  for action in actions:
    result = environment.step(action)
    texts.append(result.observation.text)
    rewards.append(result.reward)
    if result.terminated or result.truncated:
      break
  return texts, rewards, result


def test_scripted_reward_is_the_share_of_the_target():
  environment = scripted.Scripted(turns=2)
  task = environment.sample_task(5, 'train', 0)
  texts, rewards, result = play(environment, task, ['aab\n', 'a\n', 'never'])
  assert texts == [task.data['prompt'] + ':', 'ok\n', ''] and rewards == [0.0, 0.75] and result.terminated
  assert result.metrics == {'success': 0.0, 'target_share': 0.75, 'calls': 3.0}
  assert play(environment, task, ['aa\n', 'a\n'])[2].metrics['success'] == 1.0
  assert play(environment, task, ['\n', '\n'])[1] == [0.0, 0.0]  # Nothing written: 0, not a division by zero.
  with pytest.raises(RuntimeError, match='reset'):
    environment.step('a\n')


def test_scripted_ending_by_a_limit_is_truncated():
  environment = scripted.Scripted(truncate_rate=1.0)
  result = play(environment, environment.sample_task(0, 'train', 0), ['a\n'])[2]
  assert result.truncated and not result.terminated and result.reward == 1.0


def test_scripted_is_a_function_of_its_seeds():
  settings = dict(turns=1, max_turns=5, failure_rate=0.3, hang_rate=0.2, truncate_rate=0.5, latency_s=0.1)
  one, two = scripted.Scripted(**settings), scripted.Scripted(**settings)
  tasks = [one.sample_task(i, 'train', 7) for i in range(2000)]
  assert tasks == [two.sample_task(i, 'train', 7) for i in reversed(range(2000))][::-1]
  assert [one.latency(t, 1) for t in tasks] == [two.latency(t, 1) for t in tasks]
  assert {t.data['turns'] for t in tasks} == {1, 2, 3, 4, 5}
  for name, share in (('fails_at', 0.3), ('hangs_at', 0.2)):
    assert abs(np.mean([t.data[name] >= 0 for t in tasks]) - share) < 4 * (share * (1 - share) / 2000) ** 0.5
    assert all(t.data[name] <= t.data['turns'] for t in tasks)
  assert tasks[0] != one.sample_task(0, 'train', 8)


def test_scripted_latency_is_lognormal_with_the_settings_median_and_sigma():
  environment = scripted.Scripted(latency_s=0.2, latency_sigma=1.5, latency_max_s=1e6)
  task = environment.sample_task(0, 'train', 0)
  logs = np.log([environment.latency(dataclasses.replace(task, index=i), 0) for i in range(4000)])
  assert abs(np.median(logs) - np.log(0.2)) < 0.1 and abs(np.std(logs) - 1.5) < 0.08
  assert max(scripted.Scripted(latency_s=0.2, latency_max_s=1.0).latency(dataclasses.replace(task, index=i), 0) for i in range(500)) == 1.0


def test_scripted_failures_are_raised_and_pass_with_the_attempt():
  environment = scripted.Scripted(failure_rate=1.0, failing_attempts=1, turns=2)
  failed = 0
  for index in range(50):
    task = environment.sample_task(index, 'train', 0)
    with pytest.raises(base.EnvironmentFailure, match=f'task {index}, attempt 0, call {task.data["fails_at"]}'):
      play(environment, task, ['a\n'] * 2)
    failed += 1
    assert play(environment, dataclasses.replace(task, attempt=1), ['a\n'] * 2)[2].terminated
  assert failed == 50
  always = scripted.Scripted(failure_rate=1.0)
  with pytest.raises(base.EnvironmentFailure):
    play(always, dataclasses.replace(always.sample_task(0, 'train', 0), attempt=9), ['a\n'])


def test_scripted_waits_and_close_ends_a_hang():
  environment = scripted.Scripted(hang_rate=1.0, hang_s=3600.0)
  task = environment.sample_task(0, 'train', 0)
  done = threading.Event()
  thread = threading.Thread(target=lambda: (play(environment, task, ['a\n']), done.set()), daemon=True)
  thread.start()
  assert not done.wait(0.05)
  environment.close()
  assert done.wait(60)
  patient = scripted.Scripted(latency_s=0.03, latency_sigma=0.0)
  start = time.monotonic()
  play(patient, patient.sample_task(0, 'train', 0), ['a\n'])
  assert time.monotonic() - start >= 0.05  # Two waits of 0.03 s, which a timer may cut by a little.
  dreamer = scripted.Scripted(latency_s=1e6, latency_sigma=0.0, latency_max_s=1e6, sleep=False)
  play(dreamer, dreamer.sample_task(0, 'train', 0), ['a\n'])  # Would take 23 days if it slept.


def test_scripted_demonstrations_have_the_noise_asked_for():
  environment = scripted.Scripted(turns=3, noise=0.25)
  shares = []
  for index in range(300):
    task = environment.sample_task(index, 'train', 0)
    actions = environment.demonstration(task, np.random.default_rng(index))
    assert len(actions) == 3 and all(a.endswith('\n') for a in actions)
    shares.append(play(environment, task, actions)[2].reward)
  assert abs(np.mean(shares) - 0.75) < 4 * (0.25 * 0.75 / 3600) ** 0.5


@pytest.mark.parametrize('settings,message', [
    (dict(turns=0), 'turns must be'), (dict(turns=3, max_turns=2), 'max_turns must be'), (dict(target='ab'), 'one character'),
    (dict(target='\n'), 'newline'), (dict(failure_rate=1.5), 'failure_rate'), (dict(latency_s=-1), 'latency_s'),
    (dict(observation=''), 'empty'),
    (dict(hang_rate=float('nan')), 'hang_rate'), (dict(sleep=1), 'sleep'),
])
def test_scripted_refuses(settings, message):
  with pytest.raises(ValueError, match=message):
    environments.make('scripted', **settings)
