"""The Python tool as an environment: turns in both conversations, state, errors, limits, failures, demonstrations, many at once."""


import numpy as np
import pytest

import sandbox_load
import tokenizer_factory
from sao_jax import environments, sandbox, tool_calls
from sao_jax.environments import base, python_tasks, python_tool
from sao_jax.episodes import actor
from sao_jax.models import conversation
from sao_jax.tool_calls import ToolCall, ToolCallError

try:
  sandbox.open().close()
  BACKEND = 'auto'
except sandbox.Unavailable:
  BACKEND = 'plain'
isolated = pytest.mark.skipif(BACKEND == 'plain', reason='no boxes here')
ROW = {'question': 'What is 6 * 7?', 'answer': '42'}


def made(**settings):
  return environments.make('python_tool', **{'backend': BACKEND, 'grader': 'integer', 'time_limit_s': 60.0, 'max_output': 500, **settings})


def task_of(**data):
  return base.Task(0, 'train', 0, {**ROW, **data})


def call(code):
  return ToolCall('python', {'code': code}, code)


def play(texts, **settings):
  environment = made(conversation='raw', **settings)
  environment.reset(task_of())
  results = [environment.step(text) for text in texts]
  environment.close()
  return results


def code(text):
  return f'<python>{text}</python>'


def test_an_episode_in_a_raw_conversation():
  first, second, third, last = play(['Let me see.' + code('\nx = 6\n'), code('print("hm")\nx * 7'), code('y'), 'It is \\boxed{42}.'])
  assert first.observation.text == 'ok\n' and second.observation.text == 'hm\n42\n'
  assert third.observation.text.startswith('Traceback') and third.observation.text.endswith("NameError: name 'y' is not defined\n")
  assert not (first.terminated or second.terminated or third.terminated)
  assert last.terminated and last.reward == 1.0
  assert last.metrics == {'success': 1.0, 'answered': 1.0, 'tool_calls': 3.0, 'tool_errors': 1.0, 'tool_timeouts': 0.0, 'malformed': 0.0}


def test_an_episode_in_a_chat():
  environment = made()
  observation = environment.reset(task_of())
  assert [m['role'] for m in observation.messages] == ['system', 'user'] and environment.tools[0]['function']['name'] == 'python'
  result = environment.step_calls([call('x = 6'), ToolCallError('no such tool', ''), call('x * 7')], 'thinking')
  assert [m['content'] for m in result.observation.messages] == ['(no output)', 'error: no such tool', '42']
  assert {m['role'] for m in result.observation.messages} == {'tool'}
  result = environment.step_calls([call('x')] * 10, '')
  assert len(result.observation.messages) == 9 and 'at most 8 calls' in result.observation.messages[-1]['content']
  last = environment.step_calls([], 'So \\boxed{41}')
  assert last.terminated and last.reward == 0.0 and (last.metrics['answered'], last.metrics['malformed']) == (1.0, 1.0)
  environment.close()


@pytest.mark.parametrize('make', [tokenizer_factory.chatml, tokenizer_factory.glm])
def test_calls_in_the_forms_of_model_families(make):
  chat = conversation.make(make(), 'chat')
  environment = made(expressions={'noise': 0.0})
  act = actor(chat, environment.tools)
  turn = tool_calls.Turn(calls=(('python', {'code': 'print("a\\n<b>")\nx = "</arg>"\nx'}),))
  environment.reset(task_of())
  result = act(environment, tool_calls.write(turn, chat.tool_format))
  assert result.observation.messages[0]['content'] == "a\n<b>\n'</arg>'"
  assert act(environment, '\\boxed{42}').reward == 1.0
  environment.close()


@pytest.mark.parametrize('chat', [False, True])
def test_demonstrations_solve_their_tasks_and_flawed_ones_do_not(chat):
  for noise, kinds in ((0.0, ('direct',)), (1.0, ('direct', 'skip', 'digit'))):
    environment = made(conversation='chat' if chat else 'raw', expressions={'noise': noise, 'noise_kinds': kinds})
    rewards = []
    for index in range(6):
      task = environment.sample_task(index, 'train', 3)
      environment.reset(task)
      for action in environment.demonstration(task, np.random.default_rng(index)):
        if chat:
          result = environment.step_calls([ToolCall(n, dict(a), '') for n, a in action.calls], action.text)
        else:
          result = environment.step(action)
      assert result.terminated
      rewards.append(result.reward)
    assert rewards == [1.0 - noise] * 6
    environment.close()


def test_questions_that_make_themselves_have_right_answers_and_two_splits():
  source = python_tasks.Expressions()
  rows = [source.row(i, split, 7, 0.2) for split in base.SPLITS for i in range(200)]
  for row in rows:
    space = {}
    for piece in row['calls'][:-1]:
      exec(piece, space)  # Of this module's own making.
    assert row['answer'] == str(eval(row['calls'][-1], space)) and row['question'] == ';'.join(row['calls'])
    assert python_tasks._value(row['calls']) == int(row['answer'])
  assert not {r['question'] for r in rows[:200]} & {r['question'] for r in rows[200:]}
  assert rows[3] == source.row(3, 'train', 7, 0.2) and {len(r['calls']) for r in rows} == {1, 2}


def test_long_output_is_cut_in_the_middle():
  (result,) = play([code('print("begin")\nprint("x" * 5000)\n"end"')])
  text = result.observation.text
  assert text.startswith('begin') and text.endswith("'end'\n") and 'left out' in text and len(text) < 600


def test_an_error_may_be_told_in_a_line():
  (result,) = play([code('def f():\n  1 / 0\nf()')], traceback=False)
  assert result.observation.text == 'ZeroDivisionError: division by zero\n'


def test_a_call_that_takes_too_long_loses_the_state_and_says_so():
  for limit_s in (0.5, 5.0, 50.0):  # What takes no time may take longer than the limit on a machine that is busy.
    first, second, third = play([code('x = 1'), code('while True: pass'), code('x')], time_limit_s=limit_s)
    if first.observation.text == 'ok\n' and 'NameError' in third.observation.text:
      break
  assert first.observation.text == 'ok\n'
  assert f'more than {limit_s:g} s' in second.observation.text and 'state is lost' in second.observation.text
  assert 'NameError' in third.observation.text  # A new interpreter.
  assert (third.metrics['tool_timeouts'], third.metrics['tool_errors']) == (1.0, 2.0)


def test_malformed_turns_are_told_and_the_last_one_allowed_ends_the_episode():
  results = play(['<python>1', 'x <python>', '<python>2'], max_malformed=3)
  assert [r.terminated for r in results] == [False, False, True] and results[-1].reward == 0.0
  assert "no '</python>'" in results[0].observation.text


def test_turns_are_limited():
  results = play([code('1')] * 3, max_turns=3)
  assert [r.truncated for r in results] == [False, False, True]


def test_a_chat_that_nears_its_limit_goes_on_with_a_summary():
  env = made(conversation='chat', compaction='summary', max_turns=4)
  opening = env.reset(task_of(question='What is it?', answer='7')).messages
  said = env.step_calls([ToolCall('python', {'code': 'x = 7'}, '')], '').observation.messages
  asked = env.compact((*opening, {'role': 'assistant', 'content': '...'}, *said), 9)
  assert 'summary' in asked.messages[-1]['content'] and not asked.restart
  result = env.step_calls([], 'It is in x.')
  assert result.observation.restart and result.observation.messages[-1]['content'].endswith('It is in x.') and not result.terminated
  assert env.step_calls([ToolCall('python', {'code': 'x'}, '')], '').observation.messages[0]['content'] == '7'
  assert env.step_calls([], '\\boxed{7}').reward == 1.0
  env.close()


@pytest.mark.parametrize('settings, shorter', [({'conversation': 'chat'}, True), ({'conversation': 'chat', 'compaction': ''}, False),
                                               ({'conversation': 'raw'}, False)])
def test_older_outputs_are_left_out_of_a_chat(settings, shorter):
  talk = [{'role': 'user', 'content': 'x'}, {'role': 'assistant', 'content': 'y'}, {'role': 'tool', 'content': '1' * 99},
          {'role': 'assistant', 'content': 'z'}, {'role': 'tool', 'content': '2' * 99}]
  env = made(**settings)
  found = env.compact(talk, 9)
  assert (found is not None) == shorter and (not shorter or [m['content'] for m in found.messages][2::2] == ['[left out]', '2' * 99])
  env.close()


def test_other_markers():
  environment = made(conversation='raw', markers=('>', '\n'), answer_format='last_line', system_prompt='', traceback=False)
  assert environment.stop_strings == ('\n',) and environment.reset(task_of()).text == 'What is 6 * 7?\n'
  assert environment.step('>6*7\n').observation.text == '42\n'
  assert environment.step('42\n').reward == 1.0
  environment.close()


def test_a_tasks_own_messages_are_shown_and_not_graded():
  environment = made(conversation='raw')
  observation = environment.reset(base.Task(0, 'test', 0, {'messages': [{'role': 'user', 'content': 'Say it.'}], 'answer': '1'}))
  assert observation.text == 'Say it.\n'
  result = environment.step('\\boxed{1}')
  assert result.terminated and result.reward == 0.0
  environment.close()


def test_a_source_of_rows_and_its_solutions(tmp_path):
  path = tmp_path / 'rows.jsonl'
  path.write_text(''.join(f'{{"question": "What is {i} + 1?", "answer": "{i + 1}", "solution": "We add."}}\n' for i in range(30)))
  environment = made(source=str(path), test_share=0.3)
  sizes = [s.size for split in base.SPLITS for s in environment.task_sets(split)]
  assert sum(sizes) == 30
  task = environment.sample_task(0, 'train', 0)
  environment.reset(task)
  (turn,) = environment.demonstration(task, np.random.default_rng(0))
  assert environment.step_calls([], turn.text).reward == 1.0
  with pytest.raises(ValueError, match='give one of the two'):
    made(source=str(path), expressions={})
  environment.close()


@pytest.mark.parametrize('settings, message', [
    ({'conversation': 'voice'}, 'conversation must be'), ({'markers': '<>'}, 'markers must be two'), ({'markers': ('a', '')},
        'markers must be two'),
    ({'max_turns': 0}, 'max_turns must be'), ({'time_limit_s': -1}, 'time_limit_s must be'), ({'traceback': 1}, 'traceback must be'),
    ({'time_limit_s': None}, 'time_limit_s must be'), ({'markers': 5}, 'markers must be two'), ({'answer_stop': 5}, 'answer_stop must be'),
    ({'expressions': 5}, 'expressions must map'), ({'expressions': {'steps': 1}}, 'expressions must map min_steps'),
    ({'expressions': {'noise': 2}}, 'noise must be'), ({'expressions': {'noise_kinds': ['x']}}, 'noise_kinds must be'),
    ({'backend': 'cloud'}, 'backend must be'), ({'max_output': 1}, 'max_output must be')])
def test_settings_are_checked(settings, message):
  with pytest.raises(ValueError, match=message):
    made(**settings)


def test_every_episode_has_an_interpreter_of_its_own():
  environment, other = made(conversation='raw'), made(conversation='raw')
  for one in (environment, other):
    one.reset(task_of())
  environment.step(code('secret = 5\nopen("kept", "w").write("x")'))
  assert 'NameError' in other.step(code('secret')).observation.text
  environment.reset(task_of())
  assert environment.step(code('import os; "secret" in dir(), os.path.exists("kept")')).observation.text == '(False, False)\n'
  environment.close()
  other.close()
  with pytest.raises(python_tool.SandboxFailure):
    other.reset(task_of())
    other.step(code('1'))


@isolated
def test_a_box_that_fails_is_the_environments_failure():
  environment = made(conversation='raw')
  environment.reset(task_of())
  environment.step(code('1'))
  keeper = environment._box._connection.process
  keeper.kill()
  keeper.wait(60)
  with pytest.raises(base.EnvironmentFailure) as caught:
    environment.step(code('1'))
  assert caught.value.reason == 'environment_sandbox' and caught.value.retry
  environment.close()


def test_calls_cannot_be_made_after_the_end():
  environment = made(conversation='raw')
  with pytest.raises(RuntimeError, match='call reset first'):
    environment.step('x')
  environment.close()


# --- Many at once -----------------------------------------------------------------------------------------------------------------


def check_load(found, calls):
  assert found['calls'] >= calls and found['counted_once'], found
  assert sum(found['ended'].values()) == found['rollouts'] > 0
  assert set(found['ended']) <= {'answer', 'environment_limit', 'max_turns', 'environment_error', 'environment_timeout',
      'environment_sandbox'}
  assert found['sampler_longest_pause_s'] < 3.0, found


@isolated
def test_troubled_environments_are_counted_once_and_hold_nobody_up():
  found = sandbox_load.run(200, 24, deadline_s=600.0)
  check_load(found, 200)
  assert found['environments'] == 24


@isolated
@pytest.mark.slow
def test_two_hundred_troubled_environments():
  found = sandbox_load.run(1500, 200, deadline_s=1800.0)
  check_load(found, 1500)
  assert found['environments'] == 200
  assert found['memory_mb'][-1] - found['memory_mb'][2] < 40.0, found
