"""The scaffold environment with real processes: tasks, what a program finds, how it ends, grades, and exact tokens in its rollouts."""

import dataclasses
import json
import os
import pathlib
import socket
import subprocess
import sys
import time

import pytest

from sao_jax import environments, parts, tool_calls
from sao_jax.config import Config, TaskConfig
from sao_jax.environments import base, scaffold
from sao_jax.environments.scaffold_grading import Outcome, as_grade
from sao_jax.environments.scaffold_process import Process, fill
from sao_jax.rollout_check import check_rollout
from tests import tokenizer_factory as factory
from tests.scripted_sampler import ScriptedSampler, run_engine

CLIENT = pathlib.Path(__file__).parent / 'scaffold_client.py'
ROWS = [{'question': f'{n} + {n + 1}?', 'answer': 2 * n + 1} for n in range(40)]


def grade(outcome: Outcome):
  """1 for the sum in answer.txt."""
  path = outcome.folder / 'answer.txt'
  return {'reward': float(path.is_file() and str(outcome.task['answer']) in path.read_text()), 'success': 1.0}


def broken_grade(outcome: Outcome):
  raise KeyError('no such thing')


def odd_grade(outcome: Outcome):
  return 'good'


def nothing_reached(outcome: Outcome):
  """1 for a program that got its answer and reached nothing else."""
  return float(json.loads((outcome.folder / 'reached.json').read_text()) == [] and grade(outcome)['reward'])


def last_folder(outcome: Outcome):
  """Leaves what the program saw where the test finds it."""
  pathlib.Path(os.environ['SAO_TEST_SEEN']).write_text((outcome.folder / 'seen.json').read_text())
  return 1.0


@pytest.fixture(scope='module')
def source(tmp_path_factory):
  path = tmp_path_factory.mktemp('tasks') / 'tasks.jsonl'
  path.write_text('\n'.join(map(json.dumps, ROWS)))
  return str(path)


@pytest.fixture
def make(source):
  def made(**settings):
    values = {'command': [sys.executable, '-S', str(CLIENT)], 'source': source, 'grade': 'tests.test_scaffold:grade', 'idle_limit_s': 60.0}
    if 'grade_command' in settings or 'result_file' in settings:
      del values['grade']
    return environments.make('scaffold', **{**values, **settings})

  yield made
  assert not scaffold._shared._gateways  # All ended with their environments.


def task_of(mode='solve', index=0, **fields):
  return base.Task(index, 'train', 0, {**ROWS[index], 'mode': mode, **fields})


def call(a, b):
  return tool_calls.write(tool_calls.Turn('I add.', (('add', {'a': a, 'b': b}),)), 'hermes')


def say(prompt, request):
  """Calls the tool, then says its answer."""
  del request
  last = prompt.rsplit('<|im_start|>', 2)[-2].split('<|im_end|>')[0]
  if last.startswith('tool\n'):
    return '<think>There it is.</think>It is ' + last[len('tool\n'):]
  numbers = [int(w.strip('?')) for w in last.split() if w.strip('?').isdigit()]
  return call(*numbers[:2]) if len(numbers) == 2 else 'so it is'


def check(flow, sampler, tokenizer=None):
  """All rollouts could be trained on, and hold what was sampled."""
  for rollout in flow.rollouts:
    assert check_rollout(rollout, oldest=3, newest=3, vocab_size=(tokenizer or factory.chatml()).vocab_size, max_length=20_000) == ''
    drawn = sampler.drawn_turns[rollout.ticket]
    assert rollout.tokens[rollout.action_mask].tolist() == [i for _, ids, _ in drawn for i in ids]
    assert rollout.behaviour_log_prob[rollout.action_mask].tolist() == [p for _, _, probs in drawn for p in probs]


def test_a_program_plays_to_its_end_and_its_tokens_are_exact(make):
  flow, sampler, _ = run_engine(make, [task_of(index=i) for i in range(4)], say)
  assert len(flow.rollouts) == 4 and not flow.dropped
  for rollout in flow.rollouts:
    assert (rollout.ending, rollout.total_reward, rollout.stop_reason) == ('terminated', 1.0, 'answer')
    assert rollout.metrics == {
        'success': 1.0, 'requests': 2.0, 'repeated': 0.0, 'restarts': 0.0, 'malformed': 0.0, 'overridden': 0.0, 'scaffold_failed': 0.0}
    assert len(rollout.segments) == 1 and rollout.turn.max() == 1
  check(flow, sampler)


def test_clients_that_lose_patience_and_those_that_forget(make):
  tokenizer = factory.chatml()
  sampler = ScriptedSampler(tokenizer, say, delay_s=0.4)
  flow, sampler, _ = run_engine(make, [task_of('impatient'), task_of('forgetful', 1)], say, sampler=sampler)
  impatient, forgetful = flow.rollouts
  assert impatient.metrics['repeated'] >= 1 and impatient.metrics['restarts'] == 0 and len(impatient.segments) == 1
  assert len(sampler.drawn_turns[0]) == 2 and impatient.total_reward == 1.0
  assert forgetful.metrics['restarts'] == 1 and len(forgetful.segments) == 2 and forgetful.total_reward == 1.0
  check(flow, sampler)


@pytest.mark.parametrize('mode, code, failed', [('crash_later', 3, 1.0), ('hang_later', None, 1.0), ('children', 0, 0.0)])
def test_a_program_that_fails_later_is_graded_as_it_stands(make, mode, code, failed, tmp_path):
  del code
  for idle_s in (1.0, 10.0, 60.0) if mode == 'hang_later' else (60.0,):  # Long enough for what comes before it hangs.
    folder = tmp_path / str(idle_s)
    flow, sampler, _ = run_engine(
        lambda idle_s=idle_s, folder=folder: make(idle_limit_s=idle_s, keep_folders=str(folder)), [task_of(mode)], say)
    if flow.rollouts and flow.rollouts[0].total_reward:
      break
  assert flow.rollouts[0].total_reward == 1.0 and flow.rollouts[0].metrics['scaffold_failed'] == failed
  check(flow, sampler)
  kept = list(folder.iterdir())
  assert len(kept) == 1 and (kept[0] / 'work' / 'answer.txt').read_text() == 'It is 1'
  transcript = json.loads((kept[0] / 'transcript.json').read_text())
  assert transcript['turns'][1]['text'] == '<think>There it is.</think>It is 1' and transcript['ended']
  wait_until(lambda: not processes_of(str(CLIENT)) and not processes_of('time.sleep(600)') and not processes_of('sleep 600'))


def processes_of(text):
  found = []
  for folder in pathlib.Path('/proc').glob('[0-9]*'):
    try:
      arguments = (folder / 'cmdline').read_bytes().decode('utf-8', 'replace').split('\0')
      if any(text in a for a in arguments[1:]) and f'{os.getuid()}' in (folder / 'status').read_text() and b'SAO_PROCESS' in environ(folder):
        found.append(arguments)
    except OSError:
      continue
  return found


def environ(folder):
  try:
    return (folder / 'environ').read_bytes()
  except OSError:
    return b''


@pytest.mark.parametrize('mode, message', [
    ('crash_first', 'status 1 .*cannot start'), ('hang_first', 'asked for nothing within idle_limit_s=0.5')])
def test_a_program_that_never_asks_is_a_failure_of_the_environment(make, mode, message):
  environment = make(idle_limit_s=0.5 if mode == 'hang_first' else 60.0)
  with pytest.raises(base.EnvironmentFailure, match=message) as caught:
    environment.reset(task_of(mode))
  environment.close()
  assert caught.value.reason == 'environment_scaffold' and caught.value.retry
  wait_until(lambda: not processes_of(str(CLIENT)))
  flow, _, _ = run_engine(lambda: make(command=['/no/such/program']), [task_of()], say, retries=1)
  assert dict(flow.dropped) == {'environment_scaffold': 1}


def test_what_a_program_finds(make, tmp_path, monkeypatch):
  monkeypatch.setenv('SAO_TEST_SEEN', str(tmp_path / 'seen'))
  monkeypatch.setenv('SECRET_TOKEN', 'x')
  (tmp_path / 'work').mkdir()
  (tmp_path / 'work' / 'given.txt').write_text('x')
  flow, _, _ = run_engine(
      lambda: make(
          grade='tests.test_scaffold:last_folder', stdin='Q: {question} {answer} {"json": 1}', workspace='{where}',
          hidden=['answer', 'where'], variables={'MINE': 'yes'}), [task_of('environment', where=str(tmp_path / 'work'))], say)
  assert flow.rollouts[0].total_reward == 1.0
  seen = json.loads((tmp_path / 'seen').read_text())
  assert seen['names'] == sorted([
      'HOME', 'TMPDIR', 'MINE', 'NO_PROXY', 'OPENAI_API_BASE', 'OPENAI_API_KEY', 'OPENAI_BASE_URL', 'SAO_PROCESS', 'SAO_TASK_FILE'])
  assert seen['task'] == {'question': '0 + 1?', 'mode': 'environment'} and seen['stdin'] == 'Q: 0 + 1? {answer} {"json": 1}'
  assert seen['files'] == ['given.txt'] and not pathlib.Path(seen['folder']).exists()


def test_overflow_is_told_where_there_may_be_more_segments(make):
  flow, sampler, _ = run_engine(
      make, [task_of('overflow')], lambda prompt, request: 'It is 1', max_tokens=600, max_turn_tokens=40, compact_room=60)
  rollout, = flow.rollouts
  assert rollout.ending == 'terminated' and rollout.total_reward == 1.0 and len(rollout.segments) == 2 and rollout.longest_segment < 600
  check(flow, sampler)
  flow, sampler, _ = run_engine(make, [task_of('overflow')], lambda prompt, request: 'It is 1', max_tokens=600, max_turn_tokens=40)
  assert (flow.rollouts[0].ending, flow.rollouts[0].stop_reason) == ('truncated', 'max_tokens')
  check(flow, sampler)


def test_turns_that_a_limit_cut_reach_the_program(make):
  flow, sampler, _ = run_engine(make, [task_of(max_tokens=5)], say)
  assert flow.rollouts[0].ending == 'terminated' and flow.rollouts[0].num_actions == 5 and flow.rollouts[0].metrics['malformed'] == 0.0
  check(flow, sampler)


def test_stop_strings_hold_for_one_turn(make):
  seen = []
  flow, _, _ = run_engine(make, [task_of('stop')], lambda prompt, request: seen.append(request.stop_strings) or say(prompt, request))
  assert seen[:3] == [('END', 'OVER'), (), ()] and flow.rollouts[0].metrics['restarts'] == 2
  with pytest.raises(ValueError, match='stop of an observation'):
    base.Observation(stop='END')


def test_a_run_with_too_few_threads_is_refused(source, tmp_path):
  settings = {'command': ['x'], 'source': source, 'result_file': 'x'}
  config = dataclasses.replace(Config(), task=TaskConfig(name='scaffold', settings=settings, workers=8))
  with pytest.raises(ValueError, match='task.workers must be at least sampler.sessions=128'):
    parts.build(config, tmp_path)


STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


def test_messages_that_the_template_refuses_lose_the_rollout_and_not_the_run(make):
  flow, _, _ = run_engine(make, [task_of('odd_message'), task_of()], say, tokenizer=factory.chatml(STRICT))
  assert dict(flow.dropped) == {'environment_messages': 1} and flow.rollouts[0].total_reward == 1.0


@pytest.mark.parametrize('command, outcome', [
    ('echo noise; echo 0.5', 0.5), (['/bin/echo', '{"reward": 2, "success": 0}'], 2.0),
    ('test "$SAO_EXIT_CODE" = 0 && test -s answer.txt && echo 1', 1.0),
    (f'{sys.executable} -c "import json, os; print(json.load(open(os.environ[\'SAO_TASK_FILE\']))[\'answer\'])"', 1.0),
    (f'{sys.executable} -c "import json, os; print(len(json.load(open(os.environ[\'SAO_TRANSCRIPT_FILE\']))[\'turns\']))"', 2.0),
    ('exit 3', 'grader_error'), ('echo good', 'grader_error'), ('echo NaN', 'grader_error'), ('true', 'grader_error'),
    ('sleep 600', 'grader_timeout'), ('/no/such/grader', 'grader_error')])
def test_a_command_grades(make, command, outcome):
  flow, _, _ = run_engine(lambda: make(grade_command=command, grade_timeout_s=1.0 if 'sleep' in command else 60.0), [task_of()], say)
  if isinstance(outcome, float):
    success = float('success' not in str(command))
    assert flow.rollouts[0].total_reward == outcome and flow.rollouts[0].metrics['success'] == success
  else:
    assert dict(flow.dropped) == {outcome: 1}


@pytest.mark.parametrize('result, reward', [('0.25', 0.25), ('{"reward": 1}', 1.0), (None, 0.0), ('nonsense', 0.0),
    ('{"reward": NaN}', 0.0)])
def test_a_file_grades(make, result, reward):
  fields = {} if result is None else {'result': result}
  flow, _, _ = run_engine(lambda: make(result_file='result.json'), [task_of(**fields)], say)
  found = flow.rollouts[0]
  assert found.total_reward == reward and found.metrics['scaffold_failed'] == float(reward == 0.0)


def test_a_grader_that_fails_is_no_reward(make):
  for name in ('broken_grade', 'odd_grade'):
    flow, _, _ = run_engine(lambda name=name: make(grade=f'tests.test_scaffold:{name}'), [task_of()], say)
    assert dict(flow.dropped) == {'grader_error': 1}
  for wrong in ('x', None, {}, {'reward': 1, 'more': 2}, float('inf'), {'reward': 'x'}):
    with pytest.raises(ValueError):
      as_grade(wrong)


def test_closing_ends_a_call_that_waits(make):
  from concurrent.futures import ThreadPoolExecutor
  environment = make()
  with ThreadPoolExecutor(1) as pool:
    waiting = pool.submit(environment.reset, task_of('hang_first'))
    wait_until(lambda: processes_of(str(CLIENT)))
    environment.close()
    with pytest.raises(base.EnvironmentFailure, match='closed'):
      waiting.result(60.0)
  wait_until(lambda: not processes_of(str(CLIENT)))
  environment.close()


def test_closing_while_the_workspace_is_copied_leaves_nothing(make, tmp_path, monkeypatch):
  (tmp_path / 'given').mkdir()
  env, copied, copy = make(workspace=str(tmp_path / 'given')), [], scaffold.shutil.copytree

  def slow(source, target, **kwargs):
    env.close()
    copied.append(target)
    return copy(source, target, **kwargs)

  monkeypatch.setattr(scaffold.shutil, 'copytree', slow)
  with pytest.raises(base.EnvironmentFailure, match='closed'):
    env.reset(task_of())
  assert copied and not copied[0].parent.exists()


def test_a_gateway_that_does_not_end_leaves_no_folder(make, monkeypatch):
  env, give_back = make(), scaffold._shared.give_back

  def hanging(settings):
    give_back(settings)
    raise TimeoutError('it did not end')

  monkeypatch.setattr(scaffold._shared, 'give_back', hanging)
  env.reset(task_of())
  root = env._episode.root
  with pytest.raises(TimeoutError):
    env.close()
  assert not root.exists()


@pytest.mark.parametrize('removed', ['work', 'root'])
def test_a_program_that_removes_its_folders_is_graded_as_it_stands(make, tmp_path, removed):
  env = make(grade_command=['/bin/echo', '0.25'], keep_folders=str(tmp_path / 'kept'))
  env.reset(task_of('remove', folder=removed))
  env.sampled(base.SampledTurn((1,), (65,), (-0.5,), (0,), 'A', 'stop'))
  result = env.step('A')
  assert result.terminated and result.reward == 0.25
  env.close()
  assert len(list((tmp_path / 'kept').iterdir())) == 1


def test_what_runs_when_its_trainer_is_killed_is_ended_and_removed(source, tmp_path):
  script = (
      'import sys, time\nfrom sao_jax import environments\n'
      'env = environments.make("scaffold", command=sys.argv[2:], source=sys.argv[1], grade="json:dumps", idle_limit_s=1000.0)\n'
      'env.reset(env.sample_task(0, "train", 0))\n')
  program = 'echo $$ > "$PIDS/one"; setsid sleep 999 & echo $! > "$PIDS/two"; pwd > "$PIDS/folder"; echo > "$PIDS/ready"; sleep 999'
  trainer = subprocess.Popen(
      [sys.executable, '-c', script, source, 'env', f'PIDS={tmp_path}', '/bin/sh', '-c', program],
      cwd=pathlib.Path(__file__).parents[1], env={**os.environ, 'TMPDIR': str(tmp_path)})
  try:
    wait_until((tmp_path / 'ready').exists)
    numbers = [int((tmp_path / name).read_text()) for name in ('one', 'two')]
    folders = [path.name for path in tmp_path.iterdir() if path.is_dir()]
    assert all(map(runs, numbers)) and sorted(name[:7] for name in folders) == ['sao_gat', 'sao_sca']
  finally:
    trainer.kill()
    trainer.wait()
  wait_until(lambda: not any(map(runs, numbers)) and not any((tmp_path / name).exists() for name in folders))


def runs(number):
  try:
    return pathlib.Path(f'/proc/{number}/stat').read_text().rsplit(')', 1)[1].split()[0] != 'Z'
  except OSError:
    return False


def wait_until(done):
  deadline = time.monotonic() + 90.0
  while not done():
    assert time.monotonic() < deadline
    time.sleep(0.02)


def test_tasks_and_settings(make, source, tmp_path):
  environment = make()
  sets = {split: environment.task_sets(split)[0] for split in ('train', 'test')}
  assert sets['train'].size + sets['test'].size == len(ROWS) and sets['test'].size
  questions = {split: {environment.sample_task(i, split, 0).data['question'] for i in range(s.size)} for split, s in sets.items()}
  assert not questions['train'] & questions['test'] and len(questions['train']) == sets['train'].size
  with pytest.raises(ValueError, match='tasks 0 to'):
    environment.sample_task(40, 'train', 0)
  environment.check_run(workers=8, sessions=8, step_timeout_s=100.0)
  with pytest.raises(ValueError, match='task.workers must be at least sampler.sessions=64'):
    environment.check_run(workers=8, sessions=64, step_timeout_s=100.0)
  with pytest.raises(ValueError, match='task.step_timeout_s must be above 60'):
    environment.check_run(workers=8, sessions=8, step_timeout_s=60.0)
  for wrong in (
      {'command': ''}, {'command': []}, {'command': [1]}, {'grade': ''}, {'grade': 'no.such:thing'}, {'network': 'none'},
      {'grade': 'json:dumps', 'result_file': 'x'}, {'result_file': '../x'}, {'result_file': '/x'}, {'tool_format': 'xml'},
      {'idle_limit_s': 0}, {'variables': {'A': 1}}, {'file_mb': 0.5}, {'source': str(tmp_path / 'none.jsonl')}):
    with pytest.raises((ValueError, OSError)):
      values = {'command': ['x'], 'source': source, 'grade': 'json:dumps', **wrong}
      if wrong.keys() == {'result_file'}:
        del values['grade']
      environments.make('scaffold', **values)


def test_a_process_is_ended_once(tmp_path, monkeypatch):
  process = Process(['true'], folder=tmp_path, home=tmp_path, output=tmp_path / 'output', stdin=b'', variables={}, file_mb=1)
  assert process.wait(60.0)
  process.end()
  monkeypatch.setattr(os, 'killpg', lambda *_: pytest.fail('the number may belong to another group by now'))
  process.end()


@pytest.mark.parametrize('name, value, message', [
    ('hidden', 'answer', 'hidden must be a list'), ('hidden', [5], 'hidden must be a list'), ('hidden', None, 'hidden must be a list'),
    ('workspace', 5, 'workspace must be a text'), ('stdin', None, 'stdin must be a text'), ('keep_folders', 5, 'keep_folders must be a text'),
    ('grade', 5, 'grade must be a text'), ('variables', ['A'], 'variables must map'), ('variables', {'A=B': 'x'}, 'variables must map'),
    ('variables', {'A': '\0'}, 'variables must map'), ('command', ['a\0b'], 'command must be'), ('command', 'a\0b', 'command must be')])
def test_settings_of_wrong_types_are_told_at_once(source, name, value, message):
  with pytest.raises(ValueError, match=message):
    environments.make('scaffold', **{'command': ['x'], 'source': source, 'grade': 'json:dumps', name: value})


def test_commands_are_filled_and_quoted():
  fields = {'a': "it's $HOME", 'n': 3, 'list': [1]}
  assert fill(['x', '{a}-{n}-{list}-{other}-{}'], fields) == ['x', "it's $HOME-3-{list}-{other}-{}"]
  assert fill('echo {a} {n} ${HOME} {x}', fields) == ['/bin/sh', '-c', "echo 'it'\"'\"'s $HOME' 3 ${HOME} {x}"]


def test_a_program_that_reaches_nothing_but_the_gateway(make):
  try:
    scaffold.check_namespaces()
  except ValueError as error:
    pytest.skip(f'mounting needs more rights: {error}')
  with socket.create_server(('127.0.0.1', 0)) as listener:
    port = listener.getsockname()[1]
    flow, sampler, _ = run_engine(
        lambda: make(network='gateway', grade='tests.test_scaffold:nothing_reached'), [task_of('outside', port=port)], say)
    assert flow.rollouts[0].total_reward == 1.0 and flow.rollouts[0].metrics['scaffold_failed'] == 0.0
    check(flow, sampler)
    flow, _, _ = run_engine(lambda: make(grade='tests.test_scaffold:nothing_reached'), [task_of('outside', port=port)], say)
    assert flow.rollouts[0].total_reward == 0.0  # The test can fail.


@pytest.mark.slow
def test_64_programs_at_once(make):
  flow, sampler, _ = run_engine(
      lambda: make(idle_limit_s=600.0), [task_of(index=i % 40) for i in range(64)], say, workers=64, deadline_s=1200.0, time_limit_s=1200.0,
      step_timeout_s=700.0)
  assert len(flow.rollouts) == 64 and all(r.total_reward == 1.0 for r in flow.rollouts)
  check(flow, sampler)
