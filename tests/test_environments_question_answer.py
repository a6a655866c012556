"""Questions with known answers: tasks, orders, replies, demonstrations, and failures of the grader under their own names."""

import dataclasses
import json

import numpy as np
import pytest

from sao_jax import environments, graders
from sao_jax.environments import base, question_answer

GSM8K = {  # The form of GSM8K's rows.
    'question': 'Natalia sold 48 clips in April and half as many in May. How many in all?',
    'answer': 'In May she sold 48/2 = <<48/2=24>>24 clips.\nIn all 48+24 = <<48+24=72>>72.\n#### 72'}


def write(path, rows):
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  return str(path)


@pytest.fixture
def source(tmp_path):
  train = write(tmp_path / 'train.jsonl', [{'question': f'What is {i}+1?', 'answer': str(i + 1)} for i in range(23)])
  test = write(tmp_path / 'test.jsonl', [{'question': f'What is {i}*2?', 'answer': str(2 * i)} for i in range(100, 105)])
  return {'train': {'path': train}, 'test': {'path': test}}


def make(source, **settings):
  return environments.make('question_answer', source=source, **{'grader': 'integer', **settings})


def play(environment, task, reply):
  environment.reset(task)
  return environment.step(reply)


def test_tasks_are_the_rows(source):
  environment = make(source)
  for split, size in (('train', 23), ('test', 5)):
    assert [s.size for s in environment.task_sets(split)] == [size]
    assert len({environment.sample_task(i, split, 7).data['question'] for i in range(size)}) == size
  assert environment.sample_task(5, 'train', 7) == make(source).sample_task(5, 'train', 7)


def test_one_source_is_divided_by_question(tmp_path):
  rows = [{'question': f'What is {i % 150}+1?', 'answer': str(i % 150 + 1)} for i in range(300)]
  environment = make(write(tmp_path / 'all.jsonl', rows), test_share=0.3)
  sizes = {split: environment.task_sets(split)[0].size for split in ('train', 'test')}
  asked = {split: {environment.sample_task(i, split, 0).data['question'] for i in range(size)} for split, size in sizes.items()}
  assert not asked['train'] & asked['test'] and len(asked['train'] | asked['test']) == 150 and len(asked['test']) > 20


def test_a_reply_is_graded_in_the_form_asked_for(source):
  environment = make(source)
  task = environment.sample_task(0, 'train', 0)
  answer = task.data['answer']
  result = play(environment, task, f'It is \\boxed{{{answer}}}.')
  assert result.terminated and result.reward == 1.0 and result.metrics == {'success': 1.0, 'answered': 1.0}
  result = play(environment, task, f'It is \\boxed{{{int(answer) + 1}}}.')
  assert result.terminated and result.reward == 0.0 and result.metrics == {'success': 0.0, 'answered': 1.0}
  result = play(environment, task, f'It is {answer}.')
  assert result.reward == 0.0 and result.metrics == {'success': 0.0, 'answered': 0.0}
  with pytest.raises(RuntimeError, match='reset'):
    environment.step('x')


def test_messages(source):
  environment = make(source, template='Q: {question} {braces} {other}', answer_format='hash')
  system, user = environment.reset(dataclasses.replace(environment.sample_task(0, 'train', 0), data={'question': 'a {other}',
      'answer': '1', 'other': 'b'})).messages
  assert system['role'] == 'system' and '####' in system['content']
  assert user == {'role': 'user', 'content': 'Q: a {other} {braces} b'}
  assert len(make(source, system_prompt='').reset(environment.sample_task(0, 'train', 0)).messages) == 1


@pytest.mark.parametrize('form', sorted(question_answer.FORMATS))
def test_demonstrations_are_right(tmp_path, form):
  rows = [{**GSM8K, 'question': f'{GSM8K["question"]} {i}'} for i in range(20)]
  environment = make(write(tmp_path / 'gsm8k.jsonl', rows), answer_format=form, test_share=0.3)
  task = environment.sample_task(3, 'train', 0)
  assert task.data['answer'] == '72'
  (text,) = environment.demonstration(task, np.random.default_rng(0))
  assert '<<' not in text and text.count('####') == (form == 'hash')
  assert form == 'whole' or 'In May she sold 48/2 = 24 clips.' in text
  assert play(environment, task, text).reward == 1.0


def test_a_solution_that_ends_in_a_box_is_its_own_demonstration(tmp_path):
  rows = [{'question': f'Double {i}.', 'answer': str(2 * i), 'solution': f'It is $\\boxed{{{2 * i}}}$.'} for i in range(30)]
  environment = make(write(tmp_path / 'math.jsonl', rows), test_share=0.3)
  task = environment.sample_task(0, 'train', 0)
  assert environment.demonstration(task, np.random.default_rng(0)) == [task.data['solution']]
  assert environment.demonstration(dataclasses.replace(task, data={'question': 'x', 'answer': '5'}),
      np.random.default_rng(0)) == ['\\boxed{5}']


@pytest.mark.parametrize('settings, message', [
    ({'answer_format': 'box'}, 'answer_format'), ({'template': 'none'}, 'template'), ({'system_prompt': 3}, 'system_prompt'),
    ({'grader': 'maths'}, 'Unknown grader'),
    ({'grader_settings': {'speed': 1}}, "Unknown setting 'speed'"), ({'test_share': 0}, 'test_share')])
def test_wrong_settings_are_told(source, settings, message):
  with pytest.raises(ValueError, match=message):
    make(source, **settings)


@pytest.mark.parametrize('rows, message', [
    ([{'question': 'a'}] * 3, "'answer'"), ([{'answer': '5'}] * 3, "'question'"), ([{'question': 'a', 'answer': ''}] * 3, "'answer'"),
    ([{'question': 'a', 'answer': '1'}], 'no rows for the')])
def test_wrong_rows_are_told(tmp_path, rows, message):
  path = write(tmp_path / 'rows.jsonl', rows)
  with pytest.raises(ValueError, match=message):
    make({'train': path, 'test': path} if len(rows) > 1 else path)


def test_a_missing_file_is_told(tmp_path):
  with pytest.raises(OSError):
    make(str(tmp_path / 'none.jsonl'))


class Scripted(graders.Grader):
  """Gives the verdict that the reply names."""

  def _grade(self, response, answer, metadata):
    assert metadata == {'level': 3}
    if response == 'raise':
      raise KeyError('x')
    return graders.base.grade_of(response, 'x', 'as told')


@pytest.fixture
def scripted(monkeypatch, tmp_path):
  monkeypatch.setattr(graders, 'REGISTRY', dict(graders.REGISTRY))
  graders.register('scripted', __name__, 'Scripted')
  monkeypatch.setattr(question_answer.graders, 'make', lambda name, **settings: Scripted())
  graders.close_shared()
  path = write(tmp_path / 'rows.jsonl', [{'question': f'q{i}', 'answer': 'a', 'level': 3} for i in range(40)])
  yield environments.make('question_answer', source=path, grader='scripted', test_share=0.3)
  graders.close_shared()


@pytest.mark.parametrize('verdict, failure, reason', [
    ('grader_timeout', base.GraderTimeout, 'grader_timeout'), ('grader_error', base.GraderError, 'grader_error'), ('raise',
    base.GraderError, 'grader_error')])
def test_a_grader_that_fails_is_a_failure_of_its_own_name_and_no_reward(scripted, verdict, failure, reason):
  task = scripted.sample_task(0, 'train', 0)
  with pytest.raises(base.EnvironmentFailure) as caught:
    play(scripted, task, verdict)
  assert type(caught.value) is failure and caught.value.reason == reason
  assert play(scripted, task, 'right').reward == 1.0 and play(scripted, task, 'wrong').reward == play(scripted, task,
      'no_answer').reward == 0.0


def test_failures_have_names_that_are_counted_as_failures():
  assert [f.reason for f in (base.EnvironmentFailure, base.GraderTimeout, base.GraderError)] == ['environment_error', 'grader_timeout',
      'grader_error']
  assert all(map(base.is_failure, ('environment_error', 'environment_timeout', 'grader_timeout', 'grader_error')))
  assert not any(map(base.is_failure, ('overdue', 'time_limit', 'prompt_length')))
  with pytest.raises(ValueError, match='must begin with'):
    type('Odd', (base.EnvironmentFailure,), {'reason': 'odd'})


def test_all_environments_share_one_grader(source):
  assert make(source)._grader is make(source)._grader
  assert make(source)._grader is not make(source, answer_format='hash')._grader
