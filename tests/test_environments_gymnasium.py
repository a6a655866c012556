"""Games with Gymnasium's interface: our own small ones, and some of the library's."""

import pathlib
import sys

import pytest

from sao_jax import environments
from sao_jax.environments import base


def make(**settings):
  return environments.make('gymnasium', **{'make': 'text_games:Corridor', **settings})


@pytest.fixture(autouse=True)
def games(monkeypatch):
  monkeypatch.syspath_prepend(str(pathlib.Path(__file__).parent))


def won(environment, task):
  """Plays by asking where the door is; the last result."""
  environment.reset(task)
  way = environment.step('look\n').observation.text.split('.')[0].split()[-1]
  assert not environment.step(f'{way}\n').terminated
  return environment.step(f'{way}\n')


def test_a_game_by_hand():
  environment = make(describe='Find the door. Say look, east or west.')
  task = environment.sample_task(0, 'train', 0)
  assert environment.reset(task).text == 'Find the door. Say look, east or west.\nA corridor.\n> '
  assert environment.step('dance\n').observation.text == 'You cannot dance.\n> '  # The game's own answer.
  result = won(environment, task)
  assert (result.reward, result.terminated, result.truncated) == (1.0, True, False)
  assert result.metrics == {'success': 1.0, 'return': 1.0, 'steps': 3.0, 'invalid': 0.0}
  with pytest.raises(RuntimeError, match='reset'):
    environment.step('look')
  environment.close()
  assert environment._game.closed


def test_the_limit_of_the_game_is_truncation_and_its_end_is_not():
  environment = make(kwargs={'limit': 2})
  environment.reset(environment.sample_task(0, 'train', 0))
  assert not environment.step('look').truncated
  result = environment.step('look')
  assert result.truncated and not result.terminated and result.metrics['success'] == 0.0
  environment = make(kwargs={'limit': 1, 'length': 1})
  task = environment.sample_task(0, 'train', 0)
  results = []
  for way in ('east', 'west'):
    environment.reset(task)
    results.append(environment.step(way))
  assert all(r.terminated and not r.truncated for r in results)  # Ended and cut on the same step: ended.
  assert sorted(r.reward for r in results) == [0.0, 1.0]


def test_the_same_seed_and_actions_give_the_same_game_and_splits_share_no_seed():
  environment = make()
  assert environment.replayable and not make(replayable=False).replayable
  seeds = {split: {environment.sample_task(i, split, s).data['seed'] for i in range(500) for s in (0, 1)} for split in base.SPLITS}
  assert len(seeds['train']) == len(seeds['test']) == 1000 and not seeds['train'] & seeds['test']
  texts = set()
  for index in range(20):
    task = environment.sample_task(index, 'train', 0)
    played = []
    for one in (environment, make()):
      one.reset(task)
      played.append(one.step('look').observation.text)
    assert played[0] == played[1]
    texts.add(played[0])
  assert len(texts) == 2


def test_a_chat():
  environment = make(chat=True, system_prompt='Play.', describe='Rules.', options={'colour': 'red'})
  task = environment.sample_task(0, 'train', 0)
  assert environment.conversation == 'chat' and environment.stop_strings == ()
  assert environment.reset(task).messages == (
      {'role': 'system', 'content': 'Play.'}, {'role': 'user', 'content': 'Rules.\nA red corridor.'})
  result = environment.step('<think>Where is it?\nwest</think>I look around.\nlook')
  assert result.observation.messages[0]['role'] == 'user' and 'A door to the' in result.observation.messages[0]['content']
  whole = make(chat=True, extraction='whole')
  whole.reset(task)
  assert whole.step(' a\nb ').observation.messages[0]['content'] == 'You cannot a\nb.'


def test_names_stand_for_values_and_what_is_none_is_told():
  environment = make(make='text_games:Coin', actions=['even', 'Odd'], show='text_games:show_number', max_invalid=2)
  task = environment.sample_task(0, 'train', 0)
  number = int(environment.reset(task).text.split()[3].rstrip('.'))
  right, wrong = ('ODD', 'even') if number % 2 else ('even', 'odd')
  result = environment.step('perhaps\n')
  assert result.observation.text == "Not an action: 'perhaps'. Actions: even, odd.\n> " and not result.terminated
  assert environment.step(f' {right} \n').reward == 1.0
  environment.reset(task)
  assert environment.step(wrong).reward == -1.0
  environment.reset(task)
  environment.step('')
  result = environment.step('x' * 10**6)
  assert result.terminated and result.reward == 0.0 and result.metrics == {'success': 0.0, 'return': 0.0, 'steps': 0.0, 'invalid': 2.0}
  assert len(result.observation.text) < 200


def test_a_parser_of_ones_own():
  environment = make(parse='text_games:parse_walk')
  task = environment.sample_task(0, 'train', 0)
  environment.reset(task)
  assert environment.step('run').observation.text == 'Say "go east" or "go west", not \'run\'.\n> '
  assert environment.step('go east').observation.text == 'You walk.\n> '


@pytest.mark.parametrize('broken,error,message', [
    ('step', base.EnvironmentFailure, 'RuntimeError: the corridor fell in'), ('shape', base.EnvironmentFailure, 'must give 5 values'),
    ('reward', base.EnvironmentFailure, 'finite'), ('observation', TypeError, 'show must make texts')])
def test_a_broken_game_is_no_reward(broken, error, message):
  environment = make(kwargs={'broken': broken})
  environment.reset(environment.sample_task(0, 'train', 0))
  with pytest.raises(error, match=message):
    environment.step('look')


@pytest.mark.parametrize('settings,message', [
    (dict(make=''), 'either id'), (dict(id='FrozenLake-v1'), 'either id'), (dict(make='text_games:Nothing'), 'cannot be loaded'),
    (dict(make='text_games'), 'module:function'), (dict(make='no_such_module:f'), 'cannot be loaded'),
    (dict(make='text_games:Coin'), 'name them with actions'), (dict(make='text_games:Coin', actions=['a', 'b', 'c']), 'do not fit: c=2'),
    (dict(actions=['a', 'A']), 'different names'), (dict(actions='ab'), 'different names'), (dict(actions=[]), 'different names'),
    (dict(actions=['a'], parse='text_games:parse_walk'), 'not both'), (dict(extraction='first'), 'extraction'),
    (dict(max_invalid=0), 'max_invalid'), (dict(chat='yes'), 'chat'), (dict(make='', id='NoSuchGame-v0'), 'no game')])
def test_settings_that_cannot_work_are_refused_at_once(settings, message):
  with pytest.raises(ValueError, match=message):
    make(**settings)


# --- The library's games ---------------------------------------------------------------------------------------------------------


def test_frozen_lake():
  environment = make(
      make='', id='FrozenLake-v1', kwargs={'is_slippery': False}, actions=['left', 'down', 'right', 'up'], show='str')
  task = environment.sample_task(0, 'train', 0)
  assert environment.reset(task).text == '0\n> '
  for action in ('down', 'down', 'right', 'right', 'down'):
    assert not environment.step(action).terminated
  result = environment.step('right')
  assert (result.observation.text, result.reward, result.terminated, result.metrics['success']) == ('15\n> ', 1.0, True, 1.0)
  environment.reset(task)
  environment.step('right')
  assert environment.step('down').terminated  # Into a hole.
  environment.reset(task)
  for _ in range(99):
    assert not environment.step('up').truncated
  assert environment.step('up').truncated  # The library's limit of 100 steps.
  environment.close()


def test_blackjack():
  environment = make(make='', id='Blackjack-v1', actions={'stick': 0, 'hit': 1}, show='str', success_threshold=0.5)
  outcomes = set()
  for index in range(30):
    task = environment.sample_task(index, 'train', 0)
    first = environment.reset(task).text
    assert first.startswith('(') and environment.reset(task).text == first
    outcomes.add(environment.step('stick').reward)
  assert outcomes == {-1.0, 0.0, 1.0} or outcomes == {-1.0, 1.0}
  environment.close()


def test_a_missing_library_is_told_with_the_way_out(monkeypatch):
  monkeypatch.setitem(sys.modules, 'gymnasium', None)
  with pytest.raises(ImportError, match='pip install -r requirements/gymnasium.txt'):
    make(make='', id='FrozenLake-v1')
  make()  # Needs no library.
