"""The rollout queue by hand-worked cases: tickets, order, staleness rules, quarantine, shutdown, saving."""

import math
import re
import threading
import time

import numpy as np
import pytest

from sao_jax import rollout_queue
from sao_jax.rollout_queue import RolloutQueue
from tests.rollout_factory import make_rollout

DEADLINE_S = 60.0  # Of the threads in these tests.


def make_queue(**changes):
  settings = dict(capacity=64, batch_size=4, max_staleness=2, overdue='wait', truncation='bootstrap', vocab_size=256, max_length=64)
  return RolloutQueue(**{**settings, **changes})


def finish(queue, ticket, version=0, newest=None, **fields):
  return queue.put(make_rollout(ticket=ticket, version=version, **fields), version if newest is None else newest)


def tickets_of(batch):
  return [r.ticket for r in batch]


def step(queue, advance=True):
  """Takes and trains one batch at the queue's version; its tickets, or None if there is no batch now."""
  batch = queue.take(queue.version, timeout_s=0.0)
  if batch is None:
    return None
  queue.trained(tickets_of(batch), version_advanced=advance)
  return tickets_of(batch)


def balances(queue):
  counts = queue.accounting()
  return counts['admitted'] == counts['trained'] + counts['carried_over'] + sum(counts['dropped'].values())


# --- Order and tickets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('finished, batch_size', [(10, 4), (7, 3), (9, 2)])
def test_batches_in_order_of_completion_and_the_rest_waits(finished, batch_size):
  queue = make_queue(batch_size=batch_size, max_staleness=5)
  order = [queue.ticket(0) for _ in range(finished)]
  order = order[1::2] + order[::2]
  for ticket in order:
    assert finish(queue, ticket)
  whole = finished // batch_size
  for i in range(whole):
    assert step(queue) == order[i * batch_size:(i + 1) * batch_size]
  assert queue.take(queue.version, timeout_s=0.05) is None
  assert queue.accounting() == {'admitted': finished, 'trained': whole * batch_size, 'carried_over': finished % batch_size, 'dropped': {}}
  late = [queue.ticket(queue.version) for _ in range(batch_size - finished % batch_size)]
  for ticket in late:
    finish(queue, ticket, version=queue.version)
  assert step(queue) == order[whole * batch_size:] + late  # Nothing was lost.


@pytest.mark.parametrize('max_staleness', [0, 1, 3])
def test_tickets_are_bounded_where_work_starts(max_staleness):
  queue = make_queue(max_staleness=max_staleness)
  granted = [queue.ticket(0) for _ in range(4 * (max_staleness + 1))]
  assert granted == list(range(4 * (max_staleness + 1)))
  assert queue.ticket(0) is None
  queue.drop(0, 'environment_error')
  replacement = queue.ticket(0)
  assert replacement == len(granted) and queue.ticket(0) is None
  for ticket in [*granted[1:], replacement]:
    finish(queue, ticket)
  assert queue.ticket(0) is None
  assert step(queue)
  assert [queue.ticket(1) is not None for _ in range(5)] == [True] * 4 + [False]


def test_value_only_steps_make_room_without_a_new_version():
  queue = make_queue(max_staleness=0)
  for _ in range(3):
    for ticket in [queue.ticket(0) for _ in range(4)]:
      finish(queue, ticket)
    assert step(queue, advance=False)
  assert (queue.steps, queue.version, queue.accounting()['trained']) == (3, 0, 12)


def test_a_sampler_that_lags_gets_fewer_tickets():
  queue = make_queue(batch_size=2, max_staleness=1)
  for ticket in [queue.ticket(0) for _ in range(4)]:
    finish(queue, ticket)
  step(queue)  # Version 1; two left with deadline 1, which is the whole of the next step.
  assert queue.ticket(0) is None  # Drawn with version 0 it would be due in that step as well.
  assert queue.ticket(1) is not None


def test_with_staleness_0_nothing_starts_during_a_step():
  queue = make_queue(max_staleness=0)
  for ticket in [queue.ticket(0) for _ in range(4)]:
    finish(queue, ticket)
  batch = queue.take(0, 0.0)
  assert queue.ticket(0) is None
  queue.trained(tickets_of(batch), version_advanced=True)
  assert queue.ticket(0) is None and queue.ticket(1) is not None


# --- The staleness rule --------------------------------------------------------------------------------------------------------


def slow_and_fast(overdue):
  """Batch 2, bound 1: tickets 0..3 at version 0; 1, 2 finish and are trained; then 4, 5 at version 1 finish before 0 and 3 do."""
  queue = make_queue(batch_size=2, max_staleness=1, overdue=overdue)
  for _ in range(4):
    queue.ticket(0)
  finish(queue, 1), finish(queue, 2)
  assert step(queue) == [1, 2]
  assert [queue.ticket(1), queue.ticket(1)] == [4, 5]
  finish(queue, 4, version=1), finish(queue, 5, version=1)
  return queue


def test_wait_holds_the_step_that_would_push_a_running_one_over_the_bound():
  queue = slow_and_fast('wait')
  assert step(queue) is None  # 0 and 3 are both due at version 1 and fill that step.
  finish(queue, 0)
  assert step(queue) is None
  finish(queue, 3)
  assert step(queue) == [0, 3]
  assert step(queue) == [4, 5]


def test_a_running_one_that_is_dropped_holds_nothing():
  queue = slow_and_fast('wait')
  queue.drop(0, 'environment_timeout')
  finish(queue, 3)
  assert step(queue) == [3, 4]


def test_a_later_first_token_releases_the_hold():
  queue = slow_and_fast('wait')
  queue.set_oldest({0: 1, 3: 1})  # They had drawn nothing yet, and the sampler has version 1 now.
  assert step(queue) == [4, 5]


def test_drop_goes_on_and_returns_the_prompt_once():
  queue = slow_and_fast('drop')
  assert queue.overdue_running(1) == []
  assert step(queue) == [4, 5]
  assert queue.overdue_running(1) == queue.overdue_running(2) == [0, 3]
  assert queue.overdue_running(0) == []  # A sampler that still has version 0 will draw with a later one first.
  finish(queue, 0, prompt_id=70), queue.drop(3, 'overdue', prompt=(73, 0))
  assert queue.accounting()['dropped'] == {'overdue': 2}
  assert queue.returned_prompts() == [(70, 1), (73, 1)] and queue.returned_prompts() == []


def test_drop_returns_a_prompt_only_the_first_time():
  queue = make_queue(batch_size=1, max_staleness=0, overdue='drop')
  for attempt in (0, 1):
    queue.drop(queue.ticket(0), 'overdue', prompt=(9, attempt))
  assert queue.returned_prompts() == [(9, 1)]
  assert queue.accounting()['dropped'] == {'overdue': 2}


def test_drop_drops_queued_ones_past_their_deadline():
  queue = make_queue(batch_size=2, max_staleness=1, overdue='drop')
  for _ in range(4):
    queue.ticket(0)
  finish(queue, 0), finish(queue, 1)
  step(queue)
  a, b = queue.ticket(1), queue.ticket(1)
  finish(queue, a, version=1), finish(queue, b, version=1)
  assert step(queue) == [a, b]  # Version 2; 2 and 3 (oldest 0) can no longer be trained.
  finish(queue, 2, prompt_id=20)
  assert queue.accounting()['dropped'] == {'overdue': 1} and queue.returned_prompts() == [(20, 1)]


def test_use_trains_what_is_overdue_and_reports_it():
  queue = slow_and_fast('use')
  assert step(queue) == [4, 5]
  finish(queue, 0), finish(queue, 3)
  assert step(queue) == [0, 3]
  metrics = queue.metrics()
  assert metrics['queue/staleness_max'].total == 2
  assert (metrics['queue/staleness_mean'].total, metrics['queue/staleness_mean'].count) == (4.0, 6.0)


def test_those_at_the_bound_come_first():
  queue = make_queue(batch_size=2, max_staleness=1)
  for _ in range(4):
    queue.ticket(0)
  finish(queue, 0), finish(queue, 1)
  step(queue)
  a = queue.ticket(1)
  finish(queue, a, version=1), finish(queue, 3), finish(queue, 2)
  assert step(queue) == [3, 2]


@pytest.mark.parametrize('deadlines, version, expected', [
    ([], 3, {}),
    ([5, 5, 5], 5, {5: 3}),  # All due now.
    ([6, 6, 6], 5, {6: 1}),  # The step at 6 takes two of them.
    ([6, 7, 7, 7, 7], 5, {7: 1}),
    ([5, 6, 6, 6, 9], 5, {5: 1, 6: 2}),
    ([1, 5], 5, {5: 2}),  # Long overdue counts as due now.
])
def test_forced_counts(deadlines, version, expected):
  assert rollout_queue.forced_counts(deadlines, version, batch_size=2) == expected


# --- A full queue --------------------------------------------------------------------------------------------------------------


def test_a_full_queue_refuses_at_once_and_starts_nothing():
  queue = make_queue(capacity=2, batch_size=2, max_staleness=3)
  tickets = [queue.ticket(0) for _ in range(4)]
  assert finish(queue, tickets[0]) and finish(queue, tickets[1])
  assert queue.ticket(0) is None
  assert not finish(queue, tickets[2])
  assert queue.accounting()['carried_over'] == 4
  assert step(queue) == tickets[:2]
  assert finish(queue, tickets[2]) and queue.ticket(1) is not None


def test_a_full_queue_lets_in_what_a_held_step_waits_for():
  queue = make_queue(capacity=2, batch_size=2, max_staleness=1)
  for _ in range(4):
    queue.ticket(0)
  finish(queue, 1), finish(queue, 2)
  step(queue)
  for ticket in (queue.ticket(1), queue.ticket(1)):
    finish(queue, ticket, version=1)  # Full, and held for 0 and 3.
  assert step(queue) is None
  assert finish(queue, 0) and finish(queue, 3)
  assert step(queue) == [0, 3]


# --- The check at entry --------------------------------------------------------------------------------------------------------


def changed(name, **positions):
  """A valid rollout with some positions of one array changed."""
  array = getattr(make_rollout(version=2), name).copy()
  for position, value in positions.items():
    array[int(position[1:])] = value
  return {name: array}


GOOD = make_rollout(version=2)  # Prompt 0, 1; action 2; observation 3; actions 4, 5.
BAD = {
    'short log-probs': (dict(behaviour_log_prob=GOOD.behaviour_log_prob[:-1]), '5 positions, tokens has 6'),
    'long turns': (dict(turn=np.zeros(7, np.int32)), 'turn has 7 positions'),
    'wide tokens': (dict(tokens=GOOD.tokens.astype(np.int64)), r'tokens must be a NumPy array int32\[T\], got int64\[6\]'),
    'double log-probs': (dict(behaviour_log_prob=GOOD.behaviour_log_prob.astype(np.float64)), 'float32'),
    'integer mask': (dict(action_mask=GOOD.action_mask.astype(np.int32)), 'action_mask must be a NumPy array bool'),
    'a list': (dict(tokens=GOOD.tokens.tolist()), 'got list'),
    'two axes': (dict(reward=GOOD.reward[None]), r'float32\[1, 6\]'),
    'nan log-prob': (changed('behaviour_log_prob', _2=np.nan), 'not finite'),
    'nan log-prob off the actions': (changed('behaviour_log_prob', _0=np.nan), 'not finite'),
    'impossible log-prob': (changed('behaviour_log_prob', _2=-np.inf), 'not finite'),
    'positive log-prob': (changed('behaviour_log_prob', _4=0.01), 'above 0'),
    'log-prob of an observation': (changed('behaviour_log_prob', _3=-0.5), 'off the action tokens is not 0'),
    'version of an observation': (changed('policy_version', _3=2), 'off the action tokens is not -1'),
    'no version': (changed('policy_version', _2=-1), 'version -1 is older'),
    'future': (changed('policy_version', _5=4), 'version 4 is from the future; the newest is 3'),
    'older than its ticket': (changed('policy_version', _2=0), 'version 0 is older than 1'),
    'no action': (dict(action_mask=np.zeros(6, bool)), 'no action token'),
    'action without a prefix': (dict(action_mask=np.ones(6, bool)), 'nothing comes before'),
    'token too high': (changed('tokens', _1=256), 'token 256 is outside the vocabulary of 256'),
    'token too low': (changed('tokens', _1=-1), 'token -1'),
    'infinite reward': (changed('reward', _5=np.inf), 'reward is not finite'),
    'reward of an observation': (changed('reward', _3=0.5), 'reward off the action tokens'),
    'reward of the prompt': (changed('reward', _0=1.0), 'reward off the action tokens'),
    'unknown ending': (dict(ending='done'), "unknown ending 'done'"),
    'unknown stop reason': (dict(stop_reason='bored'), "unknown stop_reason 'bored'"),
    'cut but answered': (dict(ending='truncated'), 'does not go with'),
    'over but cut': (dict(stop_reason='max_turns'), 'does not go with'),
    'turns go back': (changed('turn', _4=0), 'never go back'),
    'negative turn': (dict(turn=np.full(6, -1, np.int32)), 'turns must start'),
    'too long': (dict(length=65), 'longer than the longest rollout, 64'),
    'negative prompt': (dict(prompt_id=-1), 'prompt_id -1'),
    'nan metric': (dict(metrics={'success': math.nan}), "metric 'success'"),
    'text metric': (dict(metrics={'note': 'fine'}), "metric 'note'"),
}


@pytest.mark.parametrize('name', BAD)
def test_bad_rollouts_are_quarantined_with_the_reason(name):
  fields, words = BAD[name]
  queue = make_queue()
  ticket = queue.ticket(1)
  rollout = make_rollout(ticket=ticket, version=2, **fields)
  assert queue.put(rollout, 3)
  (kept, reason), = queue.drain_quarantine()
  assert kept is rollout
  assert re.search(words, reason), reason
  assert queue.accounting() == {'admitted': 1, 'trained': 0, 'carried_over': 0, 'dropped': {'quarantined': 1}}
  with pytest.raises(ValueError, match='has ended'):
    queue.put(make_rollout(ticket=ticket, version=2), 3)


@pytest.mark.parametrize('fields', [
    {}, dict(ending='truncated', stop_reason='time_limit'), dict(metrics={}), changed('behaviour_log_prob', _2=1e-6),
    changed('policy_version', _2=1, _5=3), dict(reward=np.zeros(6, np.float32)),
])
def test_good_rollouts_pass(fields):
  queue = make_queue()
  assert queue.put(make_rollout(ticket=queue.ticket(1), version=2, **fields), 3)
  assert queue.drain_quarantine() == [] and queue.accounting()['carried_over'] == 1


def test_the_quarantine_is_bounded_and_still_counted():
  queue = make_queue()
  for _ in range(rollout_queue.QUARANTINE_KEPT + 5):
    finish(queue, queue.ticket(0), prompt_id=-1)
  assert len(queue.drain_quarantine()) == rollout_queue.QUARANTINE_KEPT
  assert queue.accounting()['dropped'] == {'quarantined': rollout_queue.QUARANTINE_KEPT + 5}


def test_truncated_rollouts_under_drop():
  queue = make_queue(truncation='drop')
  finish(queue, queue.ticket(0), ending='truncated', stop_reason='max_tokens')
  finish(queue, queue.ticket(0))
  assert queue.accounting() == {'admitted': 2, 'trained': 0, 'carried_over': 1, 'dropped': {'truncated': 1}}


# --- Misuse --------------------------------------------------------------------------------------------------------------------


def test_a_ticket_ends_once():
  queue = make_queue()
  ticket = queue.ticket(0)
  finish(queue, ticket)
  for call in (lambda: finish(queue, ticket), lambda: queue.drop(ticket, 'overdue'), lambda: queue.set_oldest({ticket: 1})):
    with pytest.raises(ValueError, match='has ended'):
      call()
  for call in (lambda: finish(queue, 7), lambda: finish(queue, -1), lambda: queue.drop(7, 'overdue')):
    with pytest.raises(ValueError, match='never granted'):
      call()
  assert balances(queue)


def test_versions_that_go_back_are_refused():
  queue = make_queue()
  ticket = queue.ticket(3)
  with pytest.raises(ValueError, match='bounded below by version 3, now 2'):
    queue.set_oldest({ticket: 2})


def test_learner_misuse():
  queue = make_queue(batch_size=1)
  finish(queue, queue.ticket(0)), finish(queue, queue.ticket(0))
  with pytest.raises(ValueError, match='version 1, but trained'):
    queue.take(1, 0.0)
  batch = queue.take(0, 0.0)
  with pytest.raises(RuntimeError, match='before trained'):
    queue.take(0, 0.0)
  with pytest.raises(ValueError, match='were taken'):
    queue.trained([99], True)
  queue.trained(tickets_of(batch), True)
  with pytest.raises(ValueError, match='were taken'):
    queue.trained(tickets_of(batch), True)  # Nothing is trained twice.


@pytest.mark.parametrize('settings, words', [
    (dict(capacity=3), 'hold a batch of 4, got 3'),
    (dict(batch_size=0), 'batch_size'),
    (dict(max_staleness=-1), 'max_staleness'),
    (dict(overdue='ignore'), 'overdue'),
    (dict(truncation='mask'), 'truncation'),
])
def test_impossible_settings(settings, words):
  with pytest.raises(ValueError, match=words):
    make_queue(**settings)


# --- Threads and shutdown ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('queued', [0, 3, 8])
def test_close_ends_every_wait(queued):
  queue = make_queue(capacity=8, batch_size=4, max_staleness=1)
  tickets = [queue.ticket(0) for _ in range(8)]
  for ticket in tickets[:queued]:
    finish(queue, ticket)
  results = []
  if queued < 4:
    waiter = threading.Thread(target=lambda: results.append(queue.take(0, timeout_s=600.0)), daemon=True)
    waiter.start()
    time.sleep(0.05)
  queue.close()
  queue.close()
  if queued < 4:
    waiter.join(DEADLINE_S)
    assert not waiter.is_alive() and results == [None]
  assert queue.take(0, timeout_s=60.0) is None and queue.ticket(0) is None
  assert all(not finish(queue, ticket) for ticket in tickets[queued:])
  assert queue.accounting()['carried_over'] == 8


def test_a_put_ends_the_wait_of_take():
  queue = make_queue(batch_size=2)
  tickets = [queue.ticket(0), queue.ticket(0)]
  results = []
  waiter = threading.Thread(target=lambda: results.append(queue.take(0, timeout_s=600.0)), daemon=True)
  waiter.start()
  for ticket in tickets:
    finish(queue, ticket)
  waiter.join(DEADLINE_S)
  assert [tickets_of(r) for r in results] == [tickets]


@pytest.mark.parametrize('overdue', rollout_queue.OVERDUE)
def test_threads(overdue):
  """Four producers, one learner, small queue: everything ends, adds up, and the bound holds."""
  queue = make_queue(capacity=6, batch_size=4, max_staleness=1, overdue=overdue)
  stop, failures, seen = threading.Event(), [], []

  def produce(seed):
    rng = np.random.default_rng(seed)
    try:
      while not stop.is_set():
        version = queue.version
        ticket = queue.ticket(version)
        if ticket is None:
          time.sleep(0.0005)
          continue
        time.sleep(float(rng.exponential(0.001)))
        if rng.random() < 0.1:
          queue.drop(ticket, 'environment_error')
          continue
        rollout = make_rollout(ticket=ticket, version=version, prompt_id=-1 if rng.random() < 0.05 else ticket)
        while not queue.put(rollout, version + 1):
          if stop.is_set():
            return
          time.sleep(0.0005)
    except BaseException as error:
      failures.append(error)
      stop.set()

  workers = [threading.Thread(target=produce, args=(seed,), daemon=True) for seed in range(4)]
  for worker in workers:
    worker.start()
  until_s = time.monotonic() + 600.0
  while queue.steps < 60 and not failures and time.monotonic() < until_s:
    version = queue.version
    batch = queue.take(version, timeout_s=0.5)
    if batch is not None:
      seen += tickets_of(batch)
      if overdue != 'use':
        assert max(version - r.oldest_version for r in batch) <= 1
      queue.trained(tickets_of(batch), version_advanced=queue.steps >= 5)
    assert balances(queue)
  stop.set()
  queue.close()
  for worker in workers:
    worker.join(DEADLINE_S)
  assert not failures and not any(w.is_alive() for w in workers)
  assert queue.steps == 60 and len(set(seen)) == len(seen) == 240


# --- Metrics and saving --------------------------------------------------------------------------------------------------------


def test_metrics_count_each_step_once_and_measure_the_wait():
  now = [0.0]
  queue = make_queue(batch_size=1, clock=lambda: now[0])
  first = queue.ticket(0)
  assert queue.take(0, 0.0) is None  # The wait begins at the first call that finds nothing...
  now[0] = 3.0
  assert queue.take(0, 0.0) is None
  finish(queue, first)
  now[0] = 4.0
  queue.trained(tickets_of(queue.take(0, 0.0)), True)  # ...and ends at the one that gets a batch.
  now[0] = 8.0
  queue.drop(queue.ticket(1), 'grader_timeout')
  metrics = queue.metrics()
  wait = metrics['time/learner_wait_fraction']
  assert (wait.total, wait.count) == (4.0, 8.0)
  assert metrics['queue/dropped_grader_timeout'] == 1.0 and metrics['queue/depth'] == 0.0
  again = queue.metrics()
  assert again['queue/staleness_mean'].count == 0 and 'queue/staleness_max' not in again


def test_state_goes_on_where_it_was():
  queue = slow_and_fast('wait')
  finish(queue, 0)
  other = make_queue(batch_size=2, max_staleness=1)
  other.restore(queue.state())
  assert other.accounting() == queue.accounting()
  for each in (queue, other):
    assert (each.steps, each.version) == (1, 1)
    assert step(each) is None
    finish(each, 3)
    assert step(each) == [0, 3] and step(each) == [4, 5]
    assert each.ticket(3) == 6


def test_a_batch_under_way_is_saved_as_queued():
  queue = make_queue(batch_size=2)
  for ticket in [queue.ticket(0) for _ in range(3)]:
    finish(queue, ticket)
  queue.take(0, 0.0)
  other = make_queue(batch_size=2)
  other.restore(queue.state())
  assert tickets_of(other.take(0, 0.0)) == [0, 1]


def test_returned_prompts_survive():
  queue = make_queue(overdue='drop')
  queue.drop(queue.ticket(0), 'overdue', prompt=(5, 0))
  other = make_queue(overdue='drop')
  other.restore(queue.state())
  other.drop(other.ticket(0), 'overdue', prompt=(5, 1))
  assert other.returned_prompts() == [(5, 1)]


def test_a_state_of_other_settings_is_refused():
  queue = slow_and_fast('wait')
  with pytest.raises(ValueError, match='learner.batch_size=4'):
    make_queue(batch_size=4, max_staleness=1).restore(queue.state())
  with pytest.raises(ValueError, match='queue.max_staleness=0'):
    make_queue(batch_size=2, max_staleness=0).restore(queue.state())
  with pytest.raises(RuntimeError, match='no ticket'):
    queue.restore(queue.state())


# --- Nothing to train on -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('how', ['quarantined', 'truncated', 'environment_error'])
def test_a_run_of_which_nothing_can_be_trained_on_ends(how):
  queue = make_queue(batch_size=4, truncation='drop')

  def lose():
    ticket = queue.ticket(0)
    if how == 'environment_error':
      queue.drop(ticket, how)
    else:
      wrong = {'tokens': np.full(6, 999, np.int32)}
      finish(queue, ticket, **({'ending': 'truncated', 'stop_reason': 'max_tokens'} if how == 'truncated' else wrong))

  with pytest.raises(RuntimeError, match=f'256 rollouts gave nothing to train on: dropped as .*{how}'):
    for _ in range(300):
      lose()
  assert balances(queue)


def test_one_rollout_now_and_then_is_enough():
  queue = make_queue(batch_size=1, max_staleness=9)
  for _ in range(3):
    for _ in range(255):
      queue.drop(queue.ticket(0), 'environment_error')
    finish(queue, queue.ticket(0))
    step(queue, advance=False)
  assert queue.accounting()['dropped'] == {'environment_error': 765}
