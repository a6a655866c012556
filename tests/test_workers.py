"""Threads: failures carried, hung calls given up, turns kept."""

import threading
import time

import pytest

from sao_jax import workers
from sao_jax.rollouts import Call
from sao_jax.workers import DeviceTurns, EnvironmentPool, WorkerGroup, bounded

DEADLINE_S = 60.0


class Clock:
  """Stands still until it is told to go on."""

  now = 0.0

  def monotonic(self):
    return self.now


@pytest.fixture
def clock(monkeypatch):
  made = Clock()
  monkeypatch.setattr(workers, 'time', made)
  return made


class Hanging:
  """A call that says when it began, and goes on until it is released."""

  def __init__(self):
    self.began, self.release = threading.Event(), threading.Event()

  def __call__(self):
    self.began.set()
    assert self.release.wait(DEADLINE_S)


def wait_until(condition, deadline_s=DEADLINE_S):
  end = time.monotonic() + deadline_s
  while not condition():
    assert time.monotonic() < end, 'deadline passed'
    time.sleep(0.005)


def collect(pool, count):
  results = []
  wait_until(lambda: results.extend(pool.ready()) or len(results) >= count)
  return results


def test_worker_failure_reaches_check_with_its_cause():
  group = WorkerGroup()

  def loop(stop):
    raise ValueError('the first cause')

  group.start('bad', loop)
  wait_until(group.stop.is_set)
  with pytest.raises(RuntimeError, match="Worker 'bad' failed: ValueError: the first cause") as caught:
    group.check()
  assert isinstance(caught.value.__cause__, ValueError)


def test_close_names_threads_that_stay():
  group = WorkerGroup()
  release = threading.Event()
  group.start('leaves', lambda stop: stop.wait())
  group.start('stays', lambda stop: release.wait(DEADLINE_S))
  wait_until(lambda: group.close(0.05) == ['stays'])  # The other one may need longer on a machine that is busy.
  release.set()


def test_pool_gives_values_and_errors():
  pool = EnvironmentPool(2, step_timeout_s=30.0)

  def bad():
    raise KeyError('x')

  pool.submit(Call(1, 0, 0, lambda: 'value'))
  pool.submit(Call(2, 0, 0, bad))
  results = {r.ticket: r for r in collect(pool, 2)}
  assert results[1].value == 'value' and results[1].error is None
  assert isinstance(results[2].error, KeyError)
  pool.close()


def test_hung_calls_time_out_and_are_replaced(clock):
  pool, call = EnvironmentPool(1, step_timeout_s=0.2), Hanging()
  pool.submit(Call(1, 0, 0, call))
  pool.submit(Call(2, 0, 0, lambda: 'after the hang'))  # Needs the replacement of the only thread.
  assert call.began.wait(DEADLINE_S) and pool.ready() == []
  clock.now += 0.3
  results = {r.ticket: r for r in collect(pool, 2)}
  assert isinstance(results[1].error, TimeoutError) and 'step_timeout_s=0.2' in str(results[1].error)
  assert results[2].value == 'after the hang'
  assert pool.abandoned == 1
  call.release.set()
  wait_until(lambda: pool.abandoned == 0)  # It came back after all.
  assert pool.ready() == []  # Its late result is thrown away.
  pool.close()


def test_waiting_for_a_thread_is_not_time_in_the_call(clock):
  pool, calls, results = EnvironmentPool(1, step_timeout_s=0.4), [Hanging() for _ in range(4)], []
  for ticket, call in enumerate(calls):
    pool.submit(Call(ticket, 0, 0, call))
  for call in calls:
    assert call.began.wait(DEADLINE_S)
    clock.now += 0.3
    results += pool.ready()
    call.release.set()
  wait_until(lambda: results.extend(pool.ready()) or len(results) >= 4)
  assert [r.error for r in results] == [None] * 4
  pool.close()


def test_too_many_hung_calls_stop_the_run(clock):
  pool, calls = EnvironmentPool(1, step_timeout_s=0.05, max_abandoned=2), [Hanging() for _ in range(3)]
  for ticket, call in enumerate(calls):
    pool.submit(Call(ticket, 0, 0, call))
  with pytest.raises(RuntimeError, match='hang beyond task.step_timeout_s'):
    for call in calls:
      assert call.began.wait(DEADLINE_S)
      clock.now += 0.1
      assert isinstance(collect(pool, 1)[0].error, TimeoutError)
  assert calls[2].began.is_set()
  for call in calls:
    call.release.set()
  pool.close()


@pytest.mark.parametrize('enabled', [True, False])
def test_turns_exclude_each_other_only_where_devices_are_shared(enabled):
  turns, inside, most = DeviceTurns(enabled), [0], [0]
  lock, meet = threading.Lock(), threading.Barrier(2)

  def work():
    meet.wait(DEADLINE_S)
    for _ in range(20):
      with turns.turn():
        with lock:
          inside[0] += 1
          most[0] = max(most[0], inside[0])
        if not enabled:
          meet.wait(DEADLINE_S)  # Both are inside.
        time.sleep(0.002)
        with lock:
          inside[0] -= 1

  threads = [threading.Thread(target=work) for _ in range(2)]
  [t.start() for t in threads]
  [t.join(DEADLINE_S) for t in threads]
  assert most[0] == (1 if enabled else 2)


def test_who_waits_for_a_turn_gets_it_before_who_had_it_last():
  turns, order = DeviceTurns(True), []

  def other():
    with turns.turn():
      order.append('other')

  thread = threading.Thread(target=other)
  with turns.turn():
    thread.start()
    wait_until(lambda: turns.waiting == 1)
  with turns.turn():
    order.append('first again')
  thread.join(DEADLINE_S)
  assert order == ['other', 'first again']


def test_calls_that_came_back_are_not_held_against_the_pool(clock):
  pool = EnvironmentPool(1, step_timeout_s=0.05, max_abandoned=1)
  for ticket in range(4):
    call = Hanging()
    pool.submit(Call(ticket, 0, 0, call))
    assert call.began.wait(DEADLINE_S)
    clock.now += 0.1
    assert isinstance(collect(pool, 1)[0].error, TimeoutError)
    call.release.set()
    wait_until(lambda: pool.abandoned == 0)
  pool.close()


def test_a_closed_pool_makes_no_more_calls_but_runs_what_was_put_aside():
  pool, call, done = EnvironmentPool(1, step_timeout_s=30.0), Hanging(), []
  pool.submit(Call(0, 0, 0, call))
  assert call.began.wait(DEADLINE_S)
  pool.submit(Call(1, 0, 0, lambda: done.append('call')))
  pool.run_aside(lambda: done.append('aside'))
  assert not pool.close(0.1)  # Its thread is at work.
  call.release.set()
  assert pool.close(DEADLINE_S)
  assert done == ['aside']


def test_a_close_that_hangs_stops_nothing_else(clock):
  pool, closing = EnvironmentPool(1, step_timeout_s=0.1), Hanging()
  pool.run_aside(closing)
  pool.submit(Call(1, 0, 0, lambda: 'value'))
  assert closing.began.wait(DEADLINE_S)
  clock.now += 0.2
  (result,) = collect(pool, 1)
  assert result.ticket == 1 and result.value == 'value' and pool.abandoned == 1
  closing.release.set()
  assert pool.close(DEADLINE_S)


def test_bounded_gives_the_value_or_the_error_in_time():
  release = threading.Event()
  assert bounded(lambda: 3, DEADLINE_S, 'counting') == 3
  with pytest.raises(KeyError, match='x'):
    bounded(lambda: {}['x'], DEADLINE_S, 'looking')
  with pytest.raises(TimeoutError, match='closing took more than 0.1 s'):
    bounded(lambda: release.wait(DEADLINE_S), 0.1, 'closing')
  release.set()
