"""The prompt stream: order, prompts given back, exact state, held-out prompts."""

import collections
import json

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from sao_jax import data, environments
from sao_jax.environments import base

ENVIRONMENT = environments.make('calculator')


def stream(seed=0, split='train'):
  return data.PromptStream(ENVIRONMENT, seed=seed, split=split)


def test_order_and_tasks():
  mine = stream(seed=3)
  items = [mine.next() for _ in range(20)]
  assert [(i, a) for i, a, _ in items] == [(i, 0) for i in range(20)]
  assert [t for _, _, t in items] == [ENVIRONMENT.sample_task(i, 'train', 3) for i in range(20)]
  assert [t for _, _, t in items] != [stream(seed=4).task(i, 0) for i in range(20)]


def test_given_back_prompts_come_first_whatever_the_order_they_came_back_in():
  for order in ([(4, 1), (1, 2), (3, 1)], [(3, 1), (4, 1), (1, 2)]):
    mine = stream()
    for _ in range(6):
      mine.next()
    for item in order:
      mine.give_back(*item)
    got = [mine.next() for _ in range(4)]
    assert [(i, a) for i, a, _ in got] == [(1, 2), (3, 1), (4, 1), (6, 0)]
    assert [t.attempt for _, _, t in got] == [2, 1, 1, 0]
    assert got[0][2].data == ENVIRONMENT.sample_task(1, 'train', 0).data


@pytest.mark.parametrize('item,message', [
    ((3, 1), 'never handed out'), ((-1, 1), 'never handed out'), ((0, -1), 'negative'), ((1, 1), 'twice')])
def test_give_back_refuses(item, message):
  mine = stream()
  for _ in range(3):
    mine.next()
  mine.give_back(1, 1)
  with pytest.raises(ValueError, match=message):
    mine.give_back(*item)


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(st.lists(st.integers(0, 9), max_size=60), st.integers(0, 60))
def test_nothing_is_lost_or_doubled_and_a_restored_stream_goes_on_alike(script, cut):
  """A script of draws (0-5) and returns of the k-th oldest prompt in flight (6-9), saved and restored at `cut`."""
  mine, twin, in_flight, seen = stream(), None, [], []
  for position, act in enumerate(script):
    if position == cut:
      twin = stream()
      twin.restore(json.loads(json.dumps(mine.state())))
      assert twin.state() == mine.state()
    if act < 6 or not in_flight:
      item = mine.next()
      assert twin is None or twin.next() == item
      assert all(item[0] != i for i, _ in in_flight)  # Never twice in flight.
      in_flight.append(item[:2])
      seen.append(item[:2])
    else:
      prompt_id, attempt = in_flight.pop((act - 6) % len(in_flight))
      for each in (mine, twin):
        if each is not None:
          each.give_back(prompt_id, attempt + 1)
  assert len(set(seen)) == len(seen)  # A prompt comes again only as another attempt.
  waiting = [tuple(x) for x in mine.state()['returned']]
  position = mine.state()['position']
  assert sorted([i for i, _ in in_flight] + [i for i, _ in waiting]) == list(range(position))
  assert [mine.next()[:2] for _ in waiting] == sorted(waiting) and mine.next()[0] == position


@pytest.mark.parametrize('other', [dict(seed=1), dict(split='test')])
def test_restore_refuses_the_state_of_another_stream(other):
  with pytest.raises(ValueError, match=next(iter(other))):
    stream().restore(stream(**other).state())
  state = stream().state() | {'environment': 'scripted'}
  with pytest.raises(ValueError, match='environment'):
    stream().restore(state)


def test_heldout_prompts_are_fixed_and_of_the_test_split():
  first, again = data.heldout(ENVIRONMENT, 50, 11), data.heldout(ENVIRONMENT, 20, 11)
  assert len(first) == 50 and first[:20] == again and [i for i, _ in first] == list(range(50))
  assert all(t.split == 'test' for _, t in first) and first != data.heldout(ENVIRONMENT, 50, 12)
  trained = {tuple(stream(seed=11).task(i, 0).data['expression']) for i in range(2000)}
  assert not trained & {tuple(t.data['expression']) for _, t in first}


def test_unknown_split():
  with pytest.raises(ValueError, match='train, test'):
    stream(split='valid')


# --- Tasks that have an end ---


class Rows(base.Environment):
  """As many tasks as `sizes` say, train and test alike."""

  name = 'rows'

  def __init__(self, sizes=(7, 12), weights=None, fingerprint='x'):
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    self._sets = tuple(
        base.TaskSet(f'set{i}', start, size, None if weights is None else weights[i], fingerprint)
        for i, (start, size) in enumerate(zip(starts, sizes)))

  def task_sets(self, split):
    return self._sets

  def sample_task(self, index, split, seed):
    assert 0 <= index < sum(s.size for s in self._sets)
    return base.Task(index, split, seed, {'row': index})


def draw(mine, count):
  return [mine.next() for _ in range(count)]


def test_rows_come_in_whole_epochs_under_ids_of_their_own():
  items = draw(data.PromptStream(Rows(), seed=3), 19 * 3)
  assert [i for i, _, _ in items] == list(range(57)) and all(a == 0 for _, a, _ in items)
  visits = collections.Counter(t.data['row'] for _, _, t in items)
  assert visits == dict.fromkeys(range(19), 3)
  assert [t.data['row'] for _, _, t in items[:19]] != [t.data['row'] for _, _, t in items[19:38]]
  unshuffled = draw(data.PromptStream(Rows((19,)), seed=3, shuffle=False), 38)
  assert [t.data['row'] for _, _, t in unshuffled] == list(range(19)) * 2


@pytest.mark.parametrize('seed', range(10))
def test_hosts_share_the_prompts_out(seed):
  """Together the hosts have every prompt of one host's stream, each exactly once."""
  rng = np.random.default_rng(seed)
  hosts, epochs = int(rng.integers(1, 6)), int(rng.integers(1, 4))
  sizes, weights = tuple(int(n) for n in rng.integers(1, 15, size=2)), tuple(float(w) for w in rng.integers(1, 4, size=2))
  whole = data.PromptStream(Rows(sizes, weights), seed=seed, epochs=epochs)
  expected = []
  while not whole.exhausted:
    expected.append(whole.next())
  found = []
  for host in range(hosts):
    mine = data.PromptStream(Rows(sizes, weights), seed=seed, epochs=epochs, host=host, hosts=hosts)
    while not mine.exhausted:
      prompt_id, attempt, task = mine.next()
      assert prompt_id % hosts == host
      found.append((prompt_id, attempt, task))
    with pytest.raises(ValueError, match='exhausted'):
      mine.next()
  assert len(expected) >= 2 and sorted(found, key=lambda x: x[0]) == expected


def test_endless_tasks_are_shared_out_too():
  mine = data.PromptStream(ENVIRONMENT, seed=0, host=2, hosts=3)
  assert [i for i, _, _ in draw(mine, 4)] == [2, 5, 8, 11]
  mine.give_back(5, 1)
  for wrong in (4, 14, 0):
    with pytest.raises(ValueError, match='never handed out'):
      mine.give_back(wrong, 1)
  assert mine.next()[:2] == (5, 1)


def test_a_prompt_that_comes_back_ends_the_end():
  mine = data.PromptStream(Rows((3,)), seed=0, epochs=1)
  items = draw(mine, 3)
  assert mine.exhausted
  mine.give_back(items[1][0], 1)
  assert not mine.exhausted and mine.next()[2].data == items[1][2].data and mine.exhausted


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(st.lists(st.integers(0, 9), max_size=80), st.integers(0, 80), st.integers(0, 3), st.integers(0, 2))
def test_a_restored_stream_of_rows_goes_on_alike(script, cut, skip_solved, epochs):
  """As above, with results recorded: 0-5 draws, 6-7 gives the oldest back, 8-9 records it as failed or solved."""
  def new():
    return data.PromptStream(Rows(weights=(2, 1)), seed=4, epochs=epochs, skip_solved=skip_solved)

  mine, twin, in_flight = new(), None, []
  for position, act in enumerate(script):
    if position == cut:
      twin = new()
      twin.restore(json.loads(json.dumps(mine.state())))
    both = [x for x in (mine, twin) if x is not None]
    assert len({x.exhausted for x in both}) == 1
    if act < 6 or not in_flight:
      if not mine.exhausted:
        items = [x.next() for x in both]
        assert all(item == items[0] for item in items)
        in_flight.append(items[0][:2])
    elif act < 8:
      prompt_id, attempt = in_flight.pop(0)
      for x in both:
        x.give_back(prompt_id, attempt + 1)
    else:
      prompt_id, _ = in_flight.pop(0)
      for x in both:
        x.record(prompt_id, 0.1 * act, act == 9)
  if twin is not None:
    assert twin.state() == mine.state() and twin.difficulty_rows() == mine.difficulty_rows()


def test_solved_prompts_are_passed_over_until_they_fail():
  mine = data.PromptStream(Rows((6,)), seed=0, skip_solved=2)
  for _ in range(2):
    for prompt_id, _, task in draw(mine, 6):
      mine.record(prompt_id, 1.0, task.data['row'] < 4)
  third = draw(mine, 6)
  assert sorted(t.data['row'] for _, _, t in third) == [4, 4, 4, 5, 5, 5]  # Three epochs of the two that are left.
  assert len({i for i, _, _ in third}) == 6
  plain = data.PromptStream(Rows((6,)), seed=0)
  for prompt_id, _, _ in draw(plain, 12):
    plain.record(prompt_id, 1.0, True)
  assert sorted(t.data['row'] for _, _, t in draw(plain, 6)) == list(range(6))  # Off by default.


def test_a_failure_brings_a_prompt_back_and_all_solved_is_no_end():
  mine = data.PromptStream(Rows((4,)), seed=0, skip_solved=1)
  items = draw(mine, 4)
  for prompt_id, _, _ in items:
    mine.record(prompt_id, 1.0, True)
  again = mine.next()  # All are solved: after two epochs passed over, one is served all the same.
  assert again[0] == 12
  mine.record(again[0], 0.0, False)
  assert {t.data['row'] for _, _, t in draw(mine, 3)} == {again[2].data['row']}
  limited = data.PromptStream(Rows((4,)), seed=0, skip_solved=1, epochs=2)
  for prompt_id, _, _ in draw(limited, 4):
    limited.record(prompt_id, 1.0, True)
  assert limited.exhausted


def test_difficulty_is_counted_by_task():
  mine = data.PromptStream(Rows((2, 3)), seed=1)
  rewards = collections.defaultdict(list)
  for k, (prompt_id, _, task) in enumerate(draw(mine, 15)):
    rewards[task.data['row']].append(k / 4)
    mine.record(prompt_id, k / 4, k % 2 == 1)
  rows = mine.difficulty_rows()
  assert [r['task'] for r in rows] == list(range(5)) and [(r['set'], r['row']) for r in rows][1:3] == [('set0', 1), ('set1', 0)]
  for row in rows:
    assert row['visits'] == 3 and row['mean_reward'] == pytest.approx(np.mean(rewards[row['task']]))
  assert sum(r['successes'] for r in rows) == 7
  mine.record(0, float('nan'), False)
  assert mine.difficulty_rows() == rows
  endless = stream()
  endless.next()
  endless.record(0, 1.0, True)
  assert endless.difficulty_rows() == [] and endless.state()['difficulty'] == []


@pytest.mark.parametrize('other, message', [
    (dict(environment=Rows((7, 13))), 'order'), (dict(environment=Rows(fingerprint='y')), 'have changed'),
    (dict(environment=Rows(weights=(1, 2))), 'order'), (dict(shuffle=False), 'order'), (dict(epochs=2), 'order'),
    (dict(hosts=2), r'hosts \[0, 2\], this run has \[0, 1\]')])
def test_restore_refuses_other_data_and_another_order(other, message):
  settings = {'environment': Rows(), 'seed': 0, **other}
  state = json.loads(json.dumps(data.PromptStream(settings.pop('environment'), **settings).state()))
  with pytest.raises(ValueError, match=message):
    data.PromptStream(Rows(), seed=0).restore(state)


def test_a_state_from_before_there_were_rows_is_taken():
  old = {'environment': 'calculator', 'seed': 0, 'split': 'train', 'position': 5, 'returned': [[2, 1]]}
  mine = stream()
  mine.restore(old)
  assert [i for i, _, _ in draw(mine, 2)] == [2, 5]


@pytest.mark.parametrize('settings', [dict(epochs=1), dict(skip_solved=1)])
def test_settings_for_rows_are_refused_where_tasks_never_end(settings):
  with pytest.raises(ValueError, match='calculator'):
    data.PromptStream(ENVIRONMENT, seed=0, **settings)


@pytest.mark.parametrize('host, hosts', [(1, 1), (-1, 2), (0, 0)])
def test_host_out_of_range(host, hosts):
  with pytest.raises(ValueError, match='host'):
    data.PromptStream(ENVIRONMENT, seed=0, host=host, hosts=hosts)


def test_heldout_rows_are_drawn_without_return():
  few, all_of_them = data.heldout(Rows(), 8, 5), data.heldout(Rows(), 100, 5)
  assert few == all_of_them[:8] and len(all_of_them) == 19 and [i for i, _ in all_of_them] == list(range(19))
  assert sorted(t.data['row'] for _, t in all_of_them) == list(range(19)) and all(t.split == 'test' for _, t in few)
  assert [t for _, t in few] != [t for _, t in data.heldout(Rows(), 8, 6)]
