"""The calculator task: arithmetic against an independent oracle, the grammar, endings, splits, demonstrations, hostile text."""

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from sao_jax import environments
from sao_jax.environments import base
from sao_jax.environments.calculator import MAX_DIGITS, next_operation, reduce_at, text_of, value_of


def make(**settings):
  return environments.make('calculator', **settings)


def task_of(expression, answer=None):
  answer = value_of(expression) if answer is None else answer
  return base.Task(0, 'train', 0, {'expression': expression, 'answer': answer, 'operations': sum(x in ('+', '-', '*') for x in expression)})


def play(environment, task, actions):
  """Texts shown, and the last result."""
  texts = [environment.reset(task).text]
  for action in actions:
    result = environment.step(action)
    texts.append(result.observation.text)
    if result.terminated or result.truncated:
      break
  return texts, result


# --- Arithmetic ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('parentheses', [0.0, 1.0])
def test_answers_equal_pythons_own(parentheses):
  """Oracle: Python's evaluation of the text that the environment made itself."""
  environment = make(min_operations=1, max_operations=6, min_operand=0, max_operand=99, max_value=10**11, parentheses=parentheses)
  wrapped = 0
  for index in range(1500):
    task = environment.sample_task(index, 'train', 0)
    text = environment.reset(task).text.strip()
    assert task.data['answer'] == eval(text)  # pylint: disable=eval-used
    wrapped += '(' in text
  assert (wrapped > 1000) if parentheses else wrapped == 0


def test_reduction_by_hand():
  expression = [12, '+', 7, '*', 3, '-', 4, '*', 2]
  steps = []
  while len(expression) > 1:
    expression = reduce_at(expression, next_operation(expression))
    steps.append(text_of(expression))
  assert steps == ['12+21-4*2', '12+21-8', '33-8', '25']
  assert text_of(reduce_at([5, '*', '(', 2, '-', 9, ')', '-', 1], 3)) == '5*-7-1'
  assert next_operation([9, '-', '(', 1, '+', 2, '*', 3, ')']) == 5
  assert value_of([100, '-', 20, '-', 3]) == 77


@hypothesis.settings(deadline=None, max_examples=80)
@hypothesis.given(st.integers(0, 10**6), st.integers(1, 5), st.integers(0, 1))
def test_the_clean_expert_always_succeeds(index, operations, wrapped):
  environment = make(min_operations=operations, max_operations=operations, max_value=10**9, parentheses=wrapped, demonstration_noise=0.0)
  task = environment.sample_task(index, 'test', 1)
  actions = environment.demonstration(task, np.random.default_rng(0))
  result = play(environment, task, actions)[1]
  assert result.reward == 1.0 and result.terminated and not result.truncated and len(actions) == operations + 1
  assert result.metrics == {
      'success': 1.0, 'tool_calls': operations, 'unused_calls': 0.0, 'malformed': 0.0, 'answered_directly': 0.0, 'direct_success': 0.0,
      'operations': operations}


def test_numbers_stay_within_max_value():
  environment = make(min_operations=1, max_operations=3, max_value=500, demonstration_noise=0.0)
  for index in range(300):
    task = environment.sample_task(index, 'train', 0)
    expression = list(task.data['expression'])
    while len(expression) > 1:
      expression = reduce_at(expression, next_operation(expression))
      assert all(abs(x) <= 500 for x in expression if isinstance(x, int))


# --- The tool ------------------------------------------------------------------------------------------------------------------

EXAMPLE = [12, '+', 7, '*', 3]  # 33


@pytest.mark.parametrize('actions,texts,reward', [
    (['[7*3]', '[12+21]', '=33.'], ['\n12+7*3', '\n12+21', '\n33', '\n33'], 1.0),
    (['[12+7]', '[19*3]', '=57.'], ['\n12+7*3', '\n19*3', '\n57', '\n57'], 0.0),  # Precedence ignored.
    (['[7+3]', '[7*3]', '[12+21]', '=33.'], ['\n12+7*3', '\n10?\n12+7*3', '\n12+21', '\n33', '\n33'], 1.0),  # A call that is of no use.
    (['7*3', '[7*3]', '=33.'], ['\n12+7*3', '\n?form\n12+7*3', '\n12+21', '\n12+21'], 1.0),
    (['[999999999999*999999999999]', '=33.'], ['\n12+7*3', '\n?size\n12+7*3', '\n12+7*3'], 1.0),
    (['=12.'], ['\n12+7*3', '\n12+7*3'], 0.0),
])
def test_episodes_by_hand(actions, texts, reward):
  got, result = play(make(), task_of(EXAMPLE), actions)
  assert got == texts and result.reward == reward and result.terminated and not result.truncated


def test_metrics_tell_direct_answers_and_useless_calls():
  environment = make()
  assert play(environment, task_of(EXAMPLE), ['=33.'])[1].metrics == {
      'success': 1.0, 'tool_calls': 0.0, 'unused_calls': 0.0, 'malformed': 0.0, 'answered_directly': 1.0, 'direct_success': 1.0,
      'operations': 2.0}
  assert play(environment, task_of(EXAMPLE), ['junk\n', '[7+3]', '=1.'])[1].metrics == {
      'success': 0.0, 'tool_calls': 1.0, 'unused_calls': 1.0, 'malformed': 1.0, 'answered_directly': 0.0, 'direct_success': 0.0,
      'operations': 2.0}


def test_metrics_are_there_at_every_step():
  environment = make()
  environment.reset(task_of(EXAMPLE))
  assert set(environment.step('[7*3]').metrics) == set(environment.metric_names)


def test_of_two_places_the_one_that_keeps_the_value_is_replaced():
  # 2*3+4+3+4: '3+4' stands at the product (wrong) and at the end (right).
  assert play(make(), task_of([2, '*', 3, '+', 4, '+', 3, '+', 4]), ['[3+4]'])[0][1] == '\n2*3+4+7'


def test_negative_numbers():
  texts, result = play(make(), task_of([5, '*', '(', 12, '-', 50, ')', '-', 3]), ['[12-50]', '[5*-38]', '[-190-3]', '=-193.'])
  assert texts[1:] == ['\n5*-38-3', '\n-190-3', '\n-193', '\n-193'] and result.reward == 1.0


def test_endings():
  """Terminated: an answer, or too many malformed actions. Truncated: too many calls. Never both."""
  limited = play(make(max_calls=3), task_of(EXAMPLE), ['[1+1]'] * 9)
  assert len(limited[0]) == 4 and limited[1].truncated and not limited[1].terminated and limited[1].reward == 0.0
  malformed = play(make(max_malformed=2), task_of(EXAMPLE), ['x'] * 9)
  assert len(malformed[0]) == 3 and malformed[1].terminated and not malformed[1].truncated and malformed[1].reward == 0.0
  environment = make()
  with pytest.raises(RuntimeError, match='reset'):
    environment.step('=1.')
  play(environment, task_of(EXAMPLE), ['=33.'])
  with pytest.raises(RuntimeError, match='reset'):
    environment.step('=1.')


def test_reset_leaves_nothing_of_an_earlier_episode():
  environment = make(max_malformed=2)
  task = task_of(EXAMPLE)
  fresh = play(make(max_malformed=2), task, ['x', '[7*3]', '=33.'])
  environment.reset(task_of([1, '+', 1]))
  environment.step('x')
  environment.step('[1+1]')
  assert play(environment, task, ['x', '[7*3]', '=33.']) == fresh
  assert task.data['expression'] == EXAMPLE  # Tasks are never changed.


@pytest.mark.parametrize('action', [
    '', ' ', ']', '.', '\n', '[]', '=.', '[7*3', '7*3]', '[ 7*3]', '[7 *3]', '[7**3]', '[07*3]', '[7*3]]'[1:], '[7/3]', '[7*3.0]', '=33',
    '=033.', '=3e1.', '=+33.', '=--33.', '=٣٣.', '[７*3]', '[7*3*1]', '[1_0+2]', '=0x21.', '[(7)*3]', '\x00',
    '[7*' + '3' * (MAX_DIGITS + 1) + ']', '=' + '1' * 5000 + '.',
    '[__import__("os").system("true")]', '=().__class__.__mro__[1].__subclasses__().', '[9**9**9]', '=9**9**9.',
])
def test_malformed_actions_are_told_and_run_nothing(action, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  environment = make()
  environment.reset(task_of(EXAMPLE))
  result = environment.step(action)
  assert result.observation.text == '\n?form\n12+7*3' and result.metrics['malformed'] == 1.0 and result.reward == 0.0
  assert not result.terminated and not result.truncated and not list(tmp_path.iterdir())


def test_what_trails_the_stop_string_is_not_looked_at():
  assert play(make(), task_of(EXAMPLE), ['[7*3]] =9', '[12+21]\n', '=33. '])[1].reward == 1.0


@pytest.mark.parametrize('text', [
    '(' * 10**6, '[' * 10**6, '9' * 10**6, '=' + '9' * 10**6 + '.', '[' + '1+' * 500_000 + '1]', '\U0010ffff' * 10**6])
def test_a_million_characters_are_one_malformed_action(text):
  environment = make(max_malformed=100)
  environment.reset(task_of(EXAMPLE))
  for count in range(1, 51):  # A scan in quadratic time would need days.
    result = environment.step(text)
    assert result.metrics['malformed'] == count and len(result.observation.text) < 20


@hypothesis.settings(deadline=None, max_examples=300)
@hypothesis.given(st.lists(st.text(alphabet='0123456789+-*[]=.()\n x', max_size=12), min_size=1, max_size=12))
def test_no_text_of_the_policy_raises_and_rewards_are_0_or_1(actions):
  environment = make(max_calls=6)
  texts, result = play(environment, task_of(EXAMPLE), actions)
  assert result.reward in (0.0, 1.0) and not (result.terminated and result.truncated)
  assert all(len(t) < 60 for t in texts)
  assert result.reward == float(any(a.split('.')[0] == '=33' for a in actions) and result.terminated and result.metrics['success'] == 1.0)
  assert set(result.metrics) == set(environment.metric_names) and all(np.isfinite(v) for v in result.metrics.values())


def test_replay_gives_the_same_episode():
  environment = make(demonstration_noise=0.5, noise_kinds=('order', 'early', 'digit'))
  for index in range(50):
    task = environment.sample_task(index, 'train', 0)
    actions = environment.demonstration(task, np.random.default_rng(index))
    assert play(environment, task, actions) == play(make(), task, actions)


# --- Tasks ---------------------------------------------------------------------------------------------------------------------


def test_tasks_are_a_function_of_seed_split_and_index():
  one, two = make(), make()
  for split in ('train', 'test'):
    tasks = [one.sample_task(i, split, 5) for i in range(200)]
    assert tasks == [two.sample_task(i, split, 5) for i in reversed(range(200))][::-1]
    assert len({text_of(t.data['expression']) for t in tasks}) > 190
    assert tasks[:20] != [one.sample_task(i, split, 6) for i in range(20)]


@pytest.mark.parametrize('settings', [{}, dict(min_operations=1, max_operations=1, max_operand=20)])
def test_splits_never_meet_whatever_the_seeds(settings):
  """By the hash of the expression; the second case has 363 expressions in all, so that meeting by chance would be certain."""
  environment = make(**settings)
  train = {text_of(environment.sample_task(i, 'train', seed).data['expression']) for seed in range(2) for i in range(3000)}
  test = {text_of(environment.sample_task(i, 'test', seed).data['expression']) for seed in range(2) for i in range(1000)}
  assert not train & test
  if settings:
    assert len(train) + len(test) == 363 and len(test) > 15
  else:
    assert len(train) > 5_900 and len(test) > 1_950


def test_difficulty_varies_as_set():
  environment = make(min_operations=1, max_operations=4, max_value=10**8)
  counts = np.bincount([environment.sample_task(i, 'train', 0).data['operations'] for i in range(2000)], minlength=5)
  assert counts[0] == 0 and min(counts[1:]) > 400


@pytest.mark.parametrize('settings,message', [
    (dict(min_operations=0), 'min_operations'), (dict(min_operations=3, max_operations=2), 'max_operations'),
    (dict(min_operand=-1), 'min_operand'),
    (dict(min_operand=50, max_operand=40), 'max_operand'), (dict(operators='+/'), 'operators'), (dict(operators=''), 'operators'),
    (dict(parentheses=1.5), 'parentheses'), (dict(max_value=5), 'max_value'), (dict(max_malformed=0), 'max_malformed'),
    (dict(max_calls=2), 'max_calls'), (dict(test_share=0), 'test_share'), (dict(demonstration_noise=float('nan')), 'demonstration_noise'),
    (dict(noise_kinds='order'), 'noise_kinds'), (dict(noise_kinds=('typo',)), 'noise_kinds'), (dict(min_operations='2'), 'min_operations'),
    (dict(min_operand=95, operators='*', max_value=100), 'No expression'),
])
def test_settings_that_cannot_work_are_refused_at_once(settings, message):
  with pytest.raises(ValueError, match=message):
    make(**settings)


# --- Demonstrations ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('noise,kinds', [(0.0, ('order', 'early')), (0.3, ('order', 'early')), (0.3, ('early',)), (1.0, ('early',))])
def test_demonstrations_succeed_as_often_as_the_noise_says(noise, kinds):
  """A mistake is possible at each of n turns with n operations, so success is (1 - noise) ** n, up to lucky mistakes."""
  environment = make(demonstration_noise=noise, noise_kinds=kinds)
  rewards, expected = [], []
  for index in range(3000):
    task = environment.sample_task(index, 'train', 0)
    rewards.append(play(environment, task, environment.demonstration(task, np.random.default_rng(index)))[1].reward)
    expected.append((1 - noise) ** task.data['operations'])
  assert abs(np.mean(rewards) - np.mean(expected)) < 4 * (0.25 / 3000) ** 0.5 + 0.003


def test_the_right_action_is_the_most_frequent_one_at_every_decision():
  environment = make(demonstration_noise=0.4)
  for index in range(20):
    task = environment.sample_task(index, 'train', 0)
    actions = [environment.demonstration(task, np.random.default_rng([index, i]))[0] for i in range(300)]
    right = text_of(task.data['expression'][next_operation(task.data['expression']):][:3])
    assert max(set(actions), key=actions.count) == f'[{right}]'


def test_each_kind_of_noise_is_what_it_says():
  rng = np.random.default_rng(0)
  ordered = make(demonstration_noise=1.0, noise_kinds=('order',)).demonstration(task_of(EXAMPLE), rng)
  assert ordered == ['[12+7]', '[19*3]', '=57.']
  assert make(demonstration_noise=1.0, noise_kinds=('early',)).demonstration(task_of(EXAMPLE), rng) == ['=12.']
  miscopied, slips = make(demonstration_noise=0.5, noise_kinds=('digit',)), 0
  for seed in range(200):
    actions = miscopied.demonstration(task_of(EXAMPLE), np.random.default_rng(seed))
    result = play(make(), task_of(EXAMPLE), actions)[1]
    assert result.metrics['malformed'] == 0 and all(sum(a != b for a, b in zip(x, y)) <= 1 for x, y in zip(actions[-1:], ['=33.']))
    slips += result.metrics['unused_calls'] > 0
    assert (actions[-1] == '=33.') == (result.reward == 1.0)
  assert 100 < slips < 200


def test_demonstrations_are_a_function_of_their_generator():
  environment = make()
  task = environment.sample_task(0, 'train', 0)
  assert [environment.demonstration(task, np.random.default_rng(s)) for s in range(30)] == [
      environment.demonstration(task, np.random.default_rng(s)) for s in range(30)]
