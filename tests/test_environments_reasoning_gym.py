"""The reasoning-gym environment: items, splits, extraction, scoring, failures, and answers that try to run code."""

import ast
import concurrent.futures
import inspect
import sys
import threading
import time

import numpy as np
import pytest

from sao_jax import environments
from sao_jax.environments import base, reasoning_gym
from sao_jax.services import pool

SMALL = dict(min_terms=2, max_terms=2, min_digits=1, max_digits=2)


def make(dataset='chain_sum', **settings):
  return environments.make('reasoning_gym', dataset=dataset, **settings)


@pytest.fixture(scope='module', autouse=True)
def patient():
  """The processes have more time than a run gives them: a busy machine may need it for what is easy."""
  with pytest.MonkeyPatch.context() as patch:
    reasoning_gym._processes.cache_clear()
    patch.setattr(reasoning_gym, 'SCORE_LIMIT_S', 120.0)
    yield
  reasoning_gym._processes().close()
  reasoning_gym._processes.cache_clear()


def score(environment, task, reply):
  environment.reset(task)
  return environment.step(reply)


def test_one_turn_by_hand():
  environment = make(params=SMALL)
  task = environment.sample_task(3, 'train', 0)
  system, user = environment.reset(task).messages
  assert system == {'role': 'system', 'content': reasoning_gym.DEFAULT_SYSTEM}
  assert user == {'role': 'user', 'content': task.data['question']}
  a, sign, b, equals = user['content'].split(': ')[1].split()
  assert equals == '='
  right = int(a) + int(b) if sign == '+' else int(a) - int(b)
  good = score(environment, task, f'Let me see. <answer>{right}</answer>')
  assert (good.reward, good.terminated, good.truncated) == (1.0, True, False)
  assert good.metrics == {'success': 1.0, 'score': 1.0, 'answered': 1.0, 'rejected': 0.0}
  assert score(environment, task, f'<answer>{right + 1}</answer>').reward == 0.0
  assert score(environment, task, f'The answer is {right}').metrics == {'success': 0.0, 'score': 0.0, 'answered': 0.0, 'rejected': 0.0}
  with pytest.raises(RuntimeError, match='reset'):
    environment.step('again')
  assert make(params=SMALL, system_prompt='').reset(task).messages == (user,)


def test_reward_may_be_the_score_or_success():
  task = make(params=SMALL).sample_task(0, 'train', 0)
  answer = make(params=SMALL).demonstration(task, np.random.default_rng(0))[0][len('<answer>'):-len('</answer>')]
  reply = f'<answer>it is {answer}</answer>'  # The scorer gives a part of the score to an answer that contains the right one.
  partial = score(make(params=SMALL), task, reply)
  assert 0.0 < partial.reward < 1.0 and partial.metrics['success'] == 0.0 and partial.reward == partial.metrics['score']
  strict = score(make(params=SMALL, reward='success'), task, reply)
  assert strict.reward == 0.0 and strict.metrics['score'] == partial.reward
  lenient = score(make(params=SMALL, success_threshold=0.01), task, reply)
  assert lenient.metrics['success'] == 1.0


@pytest.mark.parametrize('dataset', ['chain_sum', 'gcd', 'number_sorting', 'spell_backward', 'leg_counting', 'countdown'])
def test_the_demonstrated_answer_scores_1(dataset):
  for extraction in ('tag', 'whole'):
    environment = make(dataset, extraction=extraction)
    for index in range(5):
      task = environment.sample_task(index, 'train', 0)
      assert score(environment, task, environment.demonstration(task, np.random.default_rng(0))[0]).metrics['success'] == 1.0


@pytest.mark.parametrize('extraction,reply,answer', [
    ('tag', 'a <answer> 12 </answer> b', '12'), ('tag', '<answer>1</answer> no: <answer>2</answer>', '2'), ('tag', '<answer>12', None),
    ('tag', '12</answer>', None), ('tag', '</answer><answer>', None), ('tag', '<answer></answer>', ''), ('tag', '', None),
    ('tag', '<answer>1\n2</answer>', '1\n2'),
    ('last_number', '12 + 7 = 19.', '19'), ('last_number', 'so 5 - 8 = -3', '-3'), ('last_number', '1,024.50 euros', '1024.50'),
    ('last_number', '12-7', '7'),
    ('last_number', 'none', None), ('last_number', '3, 4,', '4'), ('last_number', '(3)-4', '4'), ('last_number', '', None),
    ('last_number', 'hm...5', '5'), ('last_number', '=-0.5', '-0.5'), ('last_number', '$-7', '-7'),
    ('last_line', 'first\n  second \n\n', 'second'), ('last_line', ' \n', None), ('whole', ' a\nb ', 'a\nb'), ('whole', '', None),
])
def test_extraction(extraction, reply, answer):
  assert reasoning_gym.extract_answer(reply, extraction) == answer


@pytest.mark.parametrize('extraction', reasoning_gym.EXTRACTIONS)
@pytest.mark.parametrize('text', [
    '<answer>' * 125_000, '</answer>' * 110_000, '(' * 10**6, '9' * 10**6, '1,' * 500_000, '-' * 10**6, '\n' * 10**6])
def test_a_million_characters_score_0(extraction, text):
  environment = make(params=SMALL, extraction=extraction)
  result = score(environment, environment.sample_task(0, 'train', 0), text + '</answer>')
  assert result.reward < 0.01 and result.terminated


# --- Items and splits ----------------------------------------------------------------------------------------------------------


def test_items_repeat_and_splits_never_meet_whatever_the_seeds():
  """chain_sum of two numbers of one digit has 200 questions: meeting by chance would be certain."""
  environment = make(params=dict(min_terms=2, max_terms=2, min_digits=1, max_digits=1))
  questions = {
      split: [environment.sample_task(i, split, seed).data['question'] for seed in (0, 1) for i in range(n)]
      for split, n in (('train', 2500), ('test', 800))}
  assert not set(questions['train']) & set(questions['test'])
  assert len(set(questions['train']) | set(questions['test'])) == 200 and len(set(questions['test'])) > 20
  again = make(params=dict(min_terms=2, max_terms=2, min_digits=1, max_digits=1))
  assert questions['test'][:50] == [again.sample_task(i, 'test', 0).data['question'] for i in range(50)]


def test_nearby_seeds_share_no_items_in_a_row():
  """The library seeds items with seed + index; seeds 0 and 1 must not give the same sequence shifted by one."""
  environment = make(params=dict(min_terms=3, max_terms=3, min_digits=4, max_digits=4))
  first = [environment.sample_task(i, 'train', 0).data['question'] for i in range(100)]
  second = [environment.sample_task(i, 'train', 1).data['question'] for i in range(100)]
  assert not set(first) & set(second)


def test_a_data_set_with_too_few_questions_is_told(monkeypatch):
  environment = make()
  monkeypatch.setattr(environment, '_item', lambda seed: {'question': 'always the same', 'answer': '1'})
  splits = [split for split in base.SPLITS if base.split_of('always the same', environment.test_share) != split]
  with pytest.raises(ValueError, match='too few different questions'):
    environment.sample_task(0, splits[0], 0)


def test_generators_and_scorers_work_from_many_threads():
  """B23: rewards from worker threads equal those of the main thread."""
  environment = make(params=SMALL)
  tasks = [environment.sample_task(i, 'train', 0) for i in range(64)]
  replies = [environment.demonstration(t, np.random.default_rng(0))[0] for t in tasks]

  def work(i):
    mine = make(params=SMALL)
    assert mine.sample_task(i, 'train', 0) == tasks[i]
    return score(mine, tasks[i], replies[i]).reward, score(mine, tasks[i], replies[i - 1]).reward, threading.current_thread().name

  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    results = list(pool.map(work, range(64)))
  assert [r[0] for r in results] == [1.0] * 64
  assert [r[1] for r in results] == [score(environment, tasks[i], replies[i - 1]).reward for i in range(64)]
  assert all(name != threading.main_thread().name for _, _, name in results)


# --- Failures ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('outcome', [RuntimeError('broken'), float('nan'), float('inf'), None])
def test_a_broken_scorer_is_a_failure_and_no_reward(outcome, monkeypatch):
  environment = make(params=SMALL)
  task = environment.sample_task(0, 'train', 0)

  class Broken:
    def score_answer(self, answer, entry):
      if isinstance(outcome, Exception):
        raise outcome
      return outcome

  environment.reset(task)
  monkeypatch.setattr(reasoning_gym, '_create', lambda dataset, params: Broken())
  monkeypatch.setattr(reasoning_gym, '_local', threading.local())
  with pytest.raises(base.EnvironmentFailure):
    environment.step('<answer>1</answer>')


def test_a_broken_generator_is_a_failure(monkeypatch):
  environment = make(params=SMALL)
  task = environment.sample_task(0, 'train', 0)

  def broken(dataset, params):
    raise IndexError('empty')

  monkeypatch.setattr(reasoning_gym, '_create', broken)
  with pytest.raises(base.EnvironmentFailure, match='IndexError'):
    environment.reset(task)


# --- Answers that try to run code (B26) ----------------------------------------------------------------------------------------

ATTACKS = (
    "__import__('os').system('touch owned')", "[__import__('pathlib').Path('owned').touch()]", '().__class__.__mro__[1].__subclasses__()',
    "open('owned', 'w')", '9**9**9', '9 * * 9', '(9)**(9)**(9)', '(' * 400 + ')' * 400, '[' * 10**5, "S('x')",
    '1' * 499, '1' * 400 + 'x', '9' * 10**6, 'lambda: 0', '\\', "f'{1}'")


EVALUATED = sorted({'binary_matrix', 'spiral_matrix', 'countdown', 'puzzle24', 'n_queens', 'string_insertion'})


@pytest.mark.parametrize('dataset', EVALUATED)
def test_scorers_that_evaluate_see_nothing_dangerous(dataset, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  environment = make(dataset, extraction='whole')
  task = environment.sample_task(0, 'train', 0)
  for attack in ATTACKS:
    result = score(environment, task, attack)
    assert result.reward <= 0.05 and result.metrics['success'] == 0.0 and result.terminated
  assert not list(tmp_path.iterdir())
  assert score(environment, task, ATTACKS[0]).metrics == {'success': 0.0, 'score': 0.0, 'answered': 1.0, 'rejected': 1.0}
  right = environment.demonstration(task, np.random.default_rng(0))[0]
  assert score(environment, task, right).metrics['success'] == 1.0


def test_every_evaluating_scorer_of_the_library_is_known():
  """By the sources of the installed library: a data set whose scorer calls eval, exec, sympify or parse_expr is guarded."""
  from reasoning_gym.factory import DATASETS  # Not at the top: the library is optional.
  evaluating = set()
  for name, (cls, _) in DATASETS.items():
    tree = ast.parse(inspect.getsource(sys.modules[cls.__module__]))
    for function in ast.walk(tree):
      if isinstance(function, ast.FunctionDef) and ('score' in function.name or 'verify' in function.name):
        calls = {getattr(c.func, 'id', getattr(c.func, 'attr', '')) for c in ast.walk(function) if isinstance(c, ast.Call)}
        if calls & {'eval', 'exec', 'sympify', 'parse_expr'}:
          evaluating.add(name)
  assert len(evaluating) > 5
  assert evaluating - set(reasoning_gym.GUARDS) == {'bitwise_arithmetic', 'number_sorting'}  # They evaluate what is not the reply.
  assert set(reasoning_gym.GUARDS) - evaluating == {'coin_flip', 'complex_arithmetic', 'game_of_life_halting', 'rubiks_cube', 'rush_hour'}
  assert set(reasoning_gym.SYMBOLIC) <= evaluating and set(reasoning_gym.UNREADABLE) <= set(DATASETS)


def test_formulas_are_worked_out_in_a_process_with_limits(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  processes = pool.Pool(
      size=1, time_limit_s=120.0, memory_mb=2048, wait_limit_s=300.0, service='sao_jax.environments.reasoning_gym_service')
  monkeypatch.setattr(reasoning_gym, '_processes', lambda: processes)
  try:
    for dataset in reasoning_gym.SYMBOLIC:
      environment = make(dataset, extraction='whole')
      task = environment.sample_task(1, 'train', 0)
      right = environment.demonstration(task, np.random.default_rng(0))[0]
      assert score(environment, task, right).metrics['success'] == 1.0
      assert score(environment, task, f'{right} + x*y').metrics == {'success': 0.0, 'score': 0.0, 'answered': 1.0, 'rejected': 0.0}
      for attack in (
          *ATTACKS[:4], "S('x')", 'x.func', 'getattr(x)', 'x if x else x', 'lambda x: x', '[x for x in x]', 'x' * 501, '(' * 30 + ')' * 30):
        assert score(environment, task, attack).metrics['rejected'] == 1.0, attack
    processes._time_limit_s = 1.0
    with pytest.raises(base.GraderTimeout):
      score(environment, task, '9**9**9**9')
    processes._time_limit_s = 120.0
    assert score(environment, task, right).metrics['success'] == 1.0  # By another process.
  finally:
    processes.close()
  assert not list(tmp_path.iterdir())


# --- Every data set ------------------------------------------------------------------------------------------------------------

EVERY = 105  # Data sets of reasoning-gym 0.1.25, besides 'composite'.
HOSTILE = (
    '', 'nan', '1e999999999', '9e9999999/7', 'F999999999', 'F ' * 5000, '9**9**9', '(' * 2000, '{}', '[[1,2],[3]]', '-1', '1/0', '\x00',
    '9' * 9999, 'a ' * 5000, '[{"x": "move(box_red, square[9.5, 9.5])"}]', '\ud800', 'm' * 300 + '^', '{"a":' * 1500)
TIME_LIMIT_S = 30.0  # For one answer, on a machine that is busy.


def composite(*names, weight=1.0):
  return dict(dataset='composite', params={'datasets': [{'name': name, 'weight': weight, 'config': {}} for name in names]})


def all_datasets():
  from reasoning_gym.factory import DATASETS
  return sorted(set(DATASETS) - {'composite'})


@pytest.mark.parametrize('part', range(8))
def test_every_data_set_works(part):
  """Item, right answer where the library names one, wrong and hostile answers: each quick, none a failure, none right by accident."""
  names = all_datasets()
  assert len(names) == EVERY
  for name in names[part::8]:
    environment = make(name, extraction='whole')
    task = environment.sample_task(0, 'train', 0)
    assert task == make(name, extraction='whole').sample_task(0, 'train', 0)
    question = environment.reset(task).messages[-1]['content']
    assert question == task.data['question'] and 0 < len(question) < 20_000, name
    assert environment._entry['metadata']['source_dataset'] == name  # What a composite, and the guards, go by.
    best = 0.0
    try:
      right = environment.demonstration(task, np.random.default_rng(0))[0]
    except ValueError:
      assert name in ('boxnet', 'graph_color', 'propositional_logic', 'rubiks_cube', 'rush_hour'), name
    else:
      best = environment.step(right).reward
      assert best == 1.0, (name, right)
    symbolic = name in reasoning_gym.SYMBOLIC
    for answer in HOSTILE:
      environment.reset(task)
      start = time.monotonic()
      result = environment.step(answer if not symbolic else answer.replace('9**9**9', '9 + 9'))
      assert time.monotonic() - start < TIME_LIMIT_S + 60 * symbolic, (name, answer[:20])  # The first one starts a process.
      assert result.terminated and 0.0 <= result.reward <= 1.0 and result.metrics['success'] == 0.0, (name, answer[:20])


@pytest.mark.parametrize('dataset', reasoning_gym.REUSED)
def test_a_data_set_that_is_kept_makes_the_same_items(dataset):
  kept = make(dataset)
  for seed in (7, 2**31 - 1):
    fresh = reasoning_gym._create(dataset, {'seed': seed, 'size': 1})[0]
    item = kept._item(seed)
    assert (item['question'], item['answer']) == (fresh['question'], fresh['answer'])


def test_a_composite_treats_each_item_as_its_data_set_does():
  environment = environments.make('reasoning_gym', **composite('chain_sum', 'puzzle24', 'prime_factorization'), extraction='whole')
  seen = {}
  for index in range(12):
    task = environment.sample_task(index, 'train', 0)
    right = environment.demonstration(task, np.random.default_rng(0))[0]
    assert score(environment, task, right).metrics['success'] == 1.0
    environment.reset(task)
    name = environment._entry['metadata']['source_dataset']
    seen[name] = environment.step("open('owned', 'w')").metrics['rejected']
  assert seen == {'chain_sum': 0.0, 'puzzle24': 1.0, 'prime_factorization': 1.0}


def test_an_answer_that_a_scorer_cannot_read_scores_0_and_any_other_error_is_a_failure(monkeypatch):
  environment = make('prime_factorization', extraction='whole')
  task = environment.sample_task(0, 'train', 0)
  assert score(environment, task, 'two times three').metrics == {'success': 0.0, 'score': 0.0, 'answered': 1.0, 'rejected': 1.0}
  monkeypatch.setattr(reasoning_gym, 'UNREADABLE', {})
  with pytest.raises(base.GraderError, match='prime_factorization raised ValueError'):
    score(environment, task, 'two times three')


# --- Settings ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('settings,message', [
    (dict(dataset='chain_sums'), 'Unknown data set.*chain_sum,'), (dict(dataset='composite'), "'datasets'"),
    (dict(dataset='composite', params={'datasets': [{'name': 'gcd', 'weight': 1.0}]}), 'weight.*config'), (composite('gcd', 'gcd'), 'once'),
    (composite('composite'), 'no other composite'), (composite('gcm'), 'Unknown data set'), (composite('gcd', weight=0.0), 'weight of gcd'),
    (dict(params={'terms': 3}), "Unknown parameter 'terms'.*max_terms"),
    (dict(params={'seed': 3}), "Unknown parameter 'seed'"), (dict(params={'min_terms': 5, 'max_terms': 2}), 'rejects.*max_terms must be'),
    (dict(params={'min_terms': 'two'}), 'rejects'), (dict(extraction='boxed'), 'extraction must be'),
    (dict(reward='half'), 'reward must be'),
    (dict(success_threshold=0.0), 'success_threshold'), (dict(test_share=1.0), 'test_share'), (dict(system_prompt=None), 'system_prompt'),
])
def test_settings_that_cannot_work_are_refused_at_once(settings, message):
  with pytest.raises(ValueError, match=message):
    environments.make('reasoning_gym', **settings)


def test_a_missing_library_is_told_with_the_way_out(monkeypatch):
  monkeypatch.setitem(sys.modules, 'reasoning_gym', None)
  with pytest.raises(ImportError, match='pip install -r requirements/reasoning_gym.txt'):
    make()
