"""Threads: failures carried, hung calls given up, turns kept."""

import threading
import time

import pytest

from sao_jax.rollouts import Call
from sao_jax.workers import DeviceTurns, EnvironmentPool, WorkerGroup, bounded

DEADLINE_S = 20.0


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
  assert group.close(0.3) == ['stays']
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


def test_hung_calls_time_out_and_are_replaced():
  pool = EnvironmentPool(1, step_timeout_s=0.2)
  release = threading.Event()
  pool.submit(Call(1, 0, 0, lambda: release.wait(DEADLINE_S)))
  pool.submit(Call(2, 0, 0, lambda: 'after the hang'))  # Needs the replacement of the only thread.
  results = {r.ticket: r for r in collect(pool, 2)}
  assert isinstance(results[1].error, TimeoutError) and 'step_timeout_s=0.2' in str(results[1].error)
  assert results[2].value == 'after the hang'
  assert pool.abandoned == 1
  release.set()
  wait_until(lambda: pool.abandoned == 0)  # It came back after all.
  assert pool.ready() == []  # Its late result is thrown away.
  pool.close()


def test_waiting_for_a_thread_is_not_time_in_the_call():
  pool = EnvironmentPool(1, step_timeout_s=0.4)
  for ticket in range(4):
    pool.submit(Call(ticket, 0, 0, lambda: time.sleep(0.2)))
  assert [r.error for r in collect(pool, 4)] == [None] * 4
  pool.close()


def test_too_many_hung_calls_stop_the_run():
  pool = EnvironmentPool(1, step_timeout_s=0.05, max_abandoned=2)
  release = threading.Event()
  for ticket in range(3):
    pool.submit(Call(ticket, 0, 0, lambda: release.wait(DEADLINE_S)))
  with pytest.raises(RuntimeError, match='hang beyond task.step_timeout_s'):
    collect(pool, 3)
  release.set()
  pool.close()


@pytest.mark.parametrize('enabled', [True, False])
def test_turns_exclude_each_other_only_where_devices_are_shared(enabled):
  turns, inside, most = DeviceTurns(enabled), [0], [0]
  lock = threading.Lock()

  def work():
    for _ in range(20):
      with turns.turn():
        with lock:
          inside[0] += 1
          most[0] = max(most[0], inside[0])
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


def test_calls_that_came_back_are_not_held_against_the_pool():
  pool = EnvironmentPool(1, step_timeout_s=0.05, max_abandoned=1)
  for ticket in range(4):
    pool.submit(Call(ticket, 0, 0, lambda: time.sleep(0.15)))
    assert isinstance(collect(pool, 1)[0].error, TimeoutError)
    wait_until(lambda: pool.abandoned == 0)
  pool.close()


def test_a_closed_pool_makes_no_more_calls_but_runs_what_was_put_aside():
  pool, began, release, done = EnvironmentPool(1, step_timeout_s=30.0), threading.Event(), threading.Event(), []
  pool.submit(Call(0, 0, 0, lambda: began.set() or release.wait(DEADLINE_S)))
  began.wait(DEADLINE_S)
  pool.submit(Call(1, 0, 0, lambda: done.append('call')))
  pool.run_aside(lambda: done.append('aside'))
  assert not pool.close(0.1)  # Its thread is at work.
  release.set()
  assert pool.close(DEADLINE_S)
  assert done == ['aside']


def test_a_close_that_hangs_stops_nothing_else():
  pool, release = EnvironmentPool(1, step_timeout_s=0.1), threading.Event()
  pool.run_aside(lambda: release.wait(DEADLINE_S))
  pool.submit(Call(1, 0, 0, lambda: 'value'))
  (result,) = collect(pool, 1)
  assert result.ticket == 1 and result.value == 'value' and pool.abandoned == 1
  release.set()
  assert pool.close(DEADLINE_S)


def test_bounded_gives_the_value_or_the_error_in_time():
  release = threading.Event()
  assert bounded(lambda: 3, DEADLINE_S, 'counting') == 3
  with pytest.raises(KeyError, match='x'):
    bounded(lambda: {}['x'], DEADLINE_S, 'looking')
  with pytest.raises(TimeoutError, match='closing took more than 0.1 s'):
    bounded(lambda: release.wait(DEADLINE_S), 0.1, 'closing')
  release.set()
