"""Slots, the waiting line and pages under random load: nobody is starved, no page is held twice. No model is involved."""

import numpy as np
import pytest

from sao_jax.paging import PagePool
from sao_jax.schedule import Schedule
from sao_jax.sessions import Request, Session
from sao_jax.stopping import StopMatcher

PAGE, LONGEST, CHUNK = 4, 40, 5


def submit(schedule, number, length, new_tokens):
  session = schedule.sessions.setdefault(number, Session(number))
  tokens = np.concatenate([session.tokens[: session.cached], np.zeros(length - session.cached, np.int32)])
  request = Request(number, tokens, prompt_id=0, attempt=0, max_new_tokens=new_tokens)
  session.begin(request, tokens, StopMatcher((), (), None, []), np.zeros(2, np.uint32))
  schedule.waiting.append(session)
  return session


def check(schedule):
  held = [p for s in schedule.sessions for p in schedule.pages.pages(s)]
  assert len(held) == len(set(held)) == schedule.pages.used <= schedule.pages.num_pages
  for slot, session in enumerate(schedule.slots):
    assert session is None or (session.slot == slot and session.request is not None and session not in schedule.waiting)
  for session in schedule.sessions.values():
    assert schedule.pages.missing(session.number, session.cached) == 0  # What is cached has its pages.
    assert session.slot >= 0 or not session.loaded
    assert (session.request is None) == (session.slot < 0 and session not in schedule.waiting)


def iterate(schedule, rng, *, only_begun=False):
  """One step of a sampler, without the arithmetic. Returns sessions whose turn ended."""
  schedule.admit(CHUNK, only_begun=only_begun)
  check(schedule)
  for session in schedule.active():
    if rng.random() < 0.8:  # Else a long prompt that takes more steps.
      session.cached = session.length - 1
  schedule.make_room(CHUNK)
  check(schedule)
  ended = []
  for session in schedule.active():
    if session.ready:
      session.loaded = True
      n = min(CHUNK, session.remaining)
      assert schedule.pages.missing(session.number, session.length - 1 + n) == 0
      session.append(np.zeros(n, np.int32), np.zeros(n, np.float32), 0)
      if not session.remaining or rng.random() < 0.1:
        schedule.park(session)
        ended.append(session.number)
  check(schedule)
  return ended


@pytest.mark.parametrize('seed', range(40))
def test_every_turn_ends_and_pages_stay_whole(seed):
  rng = np.random.default_rng(seed)
  pages = int(rng.integers(LONGEST // PAGE, 60))
  schedule = Schedule(int(rng.integers(1, 7)), PagePool(pages, PAGE))
  turns, open_turns = dict.fromkeys(range(int(rng.integers(1, 20))), 0), set()
  for number in turns:
    submit(schedule, number, int(rng.integers(1, 20)), int(rng.integers(1, 21)))
    open_turns.add(number)
  hold = 0
  for _ in range(3000):
    if not open_turns:
      break
    hold = max(hold - 1, 0) if rng.random() < 0.98 else 12
    for number in iterate(schedule, rng, only_begun=hold > 0):
      open_turns.discard(number)
      turns[number] += 1
      session = schedule.sessions[number]
      length = session.length + int(rng.integers(0, 4))
      if turns[number] < 4 and length < LONGEST - 1:
        submit(schedule, number, length, int(rng.integers(1, LONGEST - length + 1)))
        open_turns.add(number)
      elif rng.random() < 0.5:
        schedule.remove(session)
    if rng.random() < 0.03:
      order = [s.number for s in schedule.unfinished()]
      schedule.start_over()
      assert schedule.pages.used == 0 and [s.number for s in schedule.unfinished()] == order
      assert all(s.cached == 0 for s in schedule.sessions.values()) and not schedule.active()
    if rng.random() < 0.05 and schedule.unfinished():
      session = schedule.unfinished()[int(rng.integers(len(schedule.unfinished())))]
      schedule.park(session)
      open_turns.discard(session.number)
    check(schedule)
  assert not open_turns


def test_turns_that_began_go_first_while_an_update_is_held_back():
  schedule = Schedule(1, PagePool(20, PAGE))
  submit(schedule, 0, 4, 20)
  begun = submit(schedule, 1, 4, 20)
  begun.cached = 3
  schedule.pages.grow(1, 4)
  begun.append(np.zeros(2, np.int32), np.zeros(2, np.float32), 0)
  schedule.admit(CHUNK, only_begun=True)
  assert schedule.slots[0] is begun
  schedule.park(begun)
  schedule.admit(CHUNK, only_begun=True)
  assert schedule.slots[0] is None and len(schedule.waiting) == 1
  schedule.admit(CHUNK, only_begun=False)
  assert schedule.slots[0].number == 0


def test_the_latest_admitted_gives_way_and_comes_back_first():
  schedule = Schedule(3, PagePool(10, PAGE))
  for number in range(4):
    submit(schedule, number, 9, 30)
  schedule.admit(4, only_begun=False)
  assert [s.number for s in schedule.active()] == [0, 1, 2]  # Three pages each.
  for session in schedule.active():
    session.cached = session.length - 1
    session.append(np.zeros(4, np.int32), np.zeros(4, np.float32), 0)
  schedule.make_room(4)  # Four pages each are twelve.
  assert [s.number for s in schedule.active()] == [0, 1] and [s.number for s in schedule.waiting] == [2, 3]
  assert schedule.sessions[2].drawn == 4 and schedule.sessions[2].cached == 0 and schedule.counts['preemptions'] == 1
