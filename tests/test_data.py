"""The prompt stream: order, prompts given back, exact state, held-out prompts."""

import json

import hypothesis
from hypothesis import strategies as st
import pytest

from sao_jax import data, environments

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
