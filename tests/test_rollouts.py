"""The rollout engine with a scripted sampler and scripted environments: every phase, every ending, saving and restoring."""

import copy
import dataclasses

import numpy as np
import pytest

from sao_jax.clock import InlineCalls
from sao_jax.config import TaskConfig
from sao_jax.environments.base import Environment, EnvironmentFailure, GraderError, GraderTimeout, Observation, StepResult, Task
from sao_jax.models.conversation import RawConversation
from sao_jax.models.tokenizers import ByteTokenizer
from sao_jax.rollouts import Admission, RolloutEngine
from sao_jax.sampler import Completion, Request

TASK = TaskConfig(max_turns=4, max_turn_tokens=8, max_tokens=40, time_limit_s=100.0, retries=1, max_failure_share=1.0)


class FakeSampler:
  """Completes each request at the next step with the text that `script(prompt_id, turn, attempt)` gives."""

  def __init__(self, script, version=3):
    self.script, self.version, self.tokenizer = script, version, ByteTokenizer()
    self.requests: dict[int, Request] = {}
    self.seen: list[Request] = []
    self.turns: dict[int, int] = {}
    self.released: list[int] = []

  def submit(self, request):
    assert request.session not in self.requests
    self.requests[request.session] = request
    self.seen.append(request)

  def cancel(self, session):
    self.requests.pop(session, None)

  def release(self, session):
    self.cancel(session)
    self.released.append(session)

  def drawn(self):
    return set()

  def partials(self):
    return {s: (np.asarray([65], np.int32), np.asarray([-0.5], np.float32), np.asarray([self.version], np.int32)) for s in self.requests}

  def order(self):
    return list(self.requests)

  def step(self):
    done = []
    for session, request in list(self.requests.items()):
      turn = self.turns.get(session, 0)
      self.turns[session] = turn + 1
      ids = np.asarray(self.tokenizer.encode(self.script(request.prompt_id, turn, request.attempt)), np.int32)
      cut = len(ids) > request.max_new_tokens
      ids = ids[:request.max_new_tokens]
      done.append(Completion(
          session, ids, np.full(len(ids), -0.25, np.float32), np.full(len(ids), self.version, np.int32),
          'length' if cut else 'stop_string'))
      del self.requests[session]
    return done


class FakeFlow:
  """`count` prompts; rollouts are kept, refused while `full`."""

  def __init__(self, count):
    self.left, self.given, self.full = count, 0, False
    self.rollouts, self.dropped, self.oldest, self.unwanted = [], [], {}, []

  def admit(self, version):
    if not self.left:
      return None
    self.left -= 1
    self.given += 1
    return Admission(self.given, 100 + self.given, 0, Task(100 + self.given, 'train', 0, {}))

  def finish(self, rollout, version):
    if self.full:
      return False
    self.rollouts.append(rollout)
    return True

  def drop(self, ticket, reason, *, prompt=None):
    self.dropped.append((ticket, reason, prompt))

  def set_oldest(self, oldest):
    self.oldest = dict(oldest)

  def overdue(self, version):
    return self.unwanted


class Scripted(Environment):
  """Gives the results of `play(turn, action)` in turn; counts its calls."""

  name, replayable, stop_strings = 'scripted', True, (';',)
  calls: list[str] = []

  def __init__(self, play, prompt='ask:'):
    self.play, self.prompt, self.turn = play, prompt, 0

  def reset(self, task):
    self.turn = 0
    self.calls.append('reset')
    return Observation(self.prompt)

  def step(self, action):
    self.calls.append(action)
    result = self.play(self.turn, action)
    self.turn += 1
    return result


def make(script, play, *, count=1, task=TASK, max_length=64, environment=Scripted, now=lambda: 0.0, prompt='ask:'):
  Scripted.calls = []
  flow, sampler = FakeFlow(count), FakeSampler(script)
  tokenizer = ByteTokenizer()
  engine = RolloutEngine(
      sampler=sampler, calls=InlineCalls(), flow=flow, make_environment=lambda: environment(play, prompt),
      conversation=RawConversation(tokenizer), tokenizer=tokenizer, task=task, max_length=max_length, sessions=8, now=now)
  return engine, sampler, flow


def run(engine, sampler, iterations=20):
  for _ in range(iterations):
    engine.before_chunk()
    engine.after_chunk(sampler.step())


def two_turns(turn, action):
  return StepResult(Observation('obs ') if turn == 0 else Observation(), reward=[0.25, 1.0][turn], terminated=turn == 1,
      metrics={'success': 1.0})


def text_of(rollout, mask):
  return bytes(int(t) for t in rollout.tokens[mask]).decode()


def test_tokens_masks_rewards_and_turns_of_a_rollout():
  engine, sampler, flow = make(lambda p, turn, a: ['go;', 'end;'][turn], two_turns)
  run(engine, sampler)
  (rollout,) = flow.rollouts
  assert bytes(rollout.tokens.tolist()) == b'ask:go;obs end;'
  assert text_of(rollout, rollout.action_mask) == 'go;end;'
  np.testing.assert_array_equal(rollout.turn, [0] * 7 + [1] * 8)
  np.testing.assert_array_equal(np.flatnonzero(rollout.reward), [6, 14])  # The last action token of each turn.
  assert rollout.reward[6] == 0.25 and rollout.reward[14] == 1.0
  np.testing.assert_array_equal(rollout.behaviour_log_prob, np.where(rollout.action_mask, -0.25, 0).astype(np.float32))
  np.testing.assert_array_equal(rollout.policy_version, np.where(rollout.action_mask, 3, -1))
  assert (rollout.ending, rollout.stop_reason, rollout.prompt_id, rollout.metrics) == ('terminated', 'answer', 101, {'success': 1.0})
  # What was sampled is what the next request starts with, byte for byte.
  np.testing.assert_array_equal(sampler.seen[1].tokens, rollout.tokens[:11])
  assert sampler.seen[1].turn_start == 11


def on(turn, action):
  return StepResult(Observation('more '))


@pytest.mark.parametrize('name, script, task, max_length, play, now', [
    ('max_turns', 'a;', TASK, 64, on, 0),
    ('max_turn_tokens', 'abcdefghijk;', TASK, 64, on, 0),
    ('max_tokens', 'abcd;', dataclasses.replace(TASK, max_turns=9, max_tokens=20), 64, on, 0),
    ('context', 'abcd;', dataclasses.replace(TASK, max_turns=9, max_tokens=40), 20, on, 0),
    ('environment_limit', 'a;', TASK, 64, lambda t, a: StepResult(truncated=True), 0),
    ('time_limit', 'a;', TASK, 64, on, 1000),
])
def test_every_limit_is_a_truncation_of_its_own_name(name, script, task, max_length, play, now):
  clock = [0.0]
  engine, sampler, flow = make(lambda *_: script, play, task=task, max_length=max_length, now=lambda: clock[0])
  engine.before_chunk()
  engine.before_chunk()
  clock[0] = float(now)
  engine.after_chunk(sampler.step())
  run(engine, sampler)
  (rollout,) = flow.rollouts
  assert (rollout.ending, rollout.stop_reason) == ('truncated', name)
  assert rollout.action_mask[-1] and rollout.length <= min(task.max_tokens, max_length)


def test_terminated_wins_over_truncated():
  engine, sampler, flow = make(lambda *_: 'a;', lambda t, a: StepResult(terminated=True, truncated=True, reward=1.0))
  run(engine, sampler)
  assert flow.rollouts[0].ending == 'terminated'


def test_time_limit_in_the_middle_of_a_turn_keeps_what_was_drawn():
  clock = [0.0]
  engine, sampler, flow = make(lambda *_: 'a;', on, now=lambda: clock[0])
  engine.before_chunk()
  engine.before_chunk()  # Now sampling, with one token drawn (FakeSampler.partials).
  clock[0] = 1000.0
  engine.before_chunk()
  engine.after_chunk([])
  (rollout,) = flow.rollouts
  assert rollout.stop_reason == 'time_limit' and text_of(rollout, rollout.action_mask) == 'A'
  assert not sampler.requests


def failing_once():
  failures = [EnvironmentFailure('lost')]

  def play(turn, action):
    if turn == 1 and failures:
      raise failures.pop()
    return two_turns(turn, action)
  return play


def test_a_failed_call_is_retried_by_replay_and_changes_nothing():
  engine, sampler, flow = make(lambda p, turn, a: ['go;', 'end;'][turn], failing_once())
  run(engine, sampler)
  assert bytes(flow.rollouts[0].tokens.tolist()) == b'ask:go;obs end;'
  assert flow.rollouts[0].attempt == 0 and not flow.dropped
  assert Scripted.calls == ['reset', 'go;', 'end;', 'reset', 'go;', 'end;']


def test_without_replay_the_rollout_starts_over_as_another_attempt():
  class Unreplayable(Scripted):
    replayable = False

  engine, sampler, flow = make(lambda p, turn, a: 'go;' if turn in (0, 2) else 'end;', failing_once(), environment=Unreplayable)
  run(engine, sampler)
  assert bytes(flow.rollouts[0].tokens.tolist()) == b'ask:go;obs end;'
  assert flow.rollouts[0].attempt == 1 and flow.rollouts[0].ticket == 1


@pytest.mark.parametrize('error, reason', [
    (EnvironmentFailure('x'), 'environment_error'), (TimeoutError('x'), 'environment_timeout'), (GraderTimeout('x'), 'grader_timeout'),
    (GraderError('x'), 'grader_error')])
def test_repeated_failure_is_dropped_under_its_name_never_a_zero_reward(error, reason):
  def play(turn, action):
    raise error

  engine, sampler, flow = make(lambda *_: 'a;', play, count=3)
  run(engine, sampler)
  assert flow.rollouts == [] and [r for _, r, _ in flow.dropped] == [reason] * 3


@pytest.mark.parametrize('error, calls', [(GraderError('x'), 4), (GraderTimeout('x'), 2)])
def test_what_would_fail_again_is_not_tried_again(error, calls):
  def play(turn, action):
    raise error

  engine, sampler, flow = make(lambda *_: 'a;', play)
  run(engine, sampler)
  assert len(Scripted.calls) == calls and [r for _, r, _ in flow.dropped] == [error.reason]


def test_a_grader_that_mostly_fails_stops_the_run_under_its_own_name():
  def play(turn, action):
    raise GraderTimeout('no result within 5 s')

  engine, sampler, _ = make(lambda *_: 'a;', play, count=100, task=dataclasses.replace(TASK, max_failure_share=0.5))
  with pytest.raises(RuntimeError, match='max_failure_share=0.5.*grader_timeout: no result within 5 s'):
    run(engine, sampler, 100)


def test_an_error_that_is_no_failure_of_the_environment_goes_up():
  def play(turn, action):
    raise KeyError('a bug')

  engine, sampler, _ = make(lambda *_: 'a;', play)
  with pytest.raises(RuntimeError, match='a bug'):
    run(engine, sampler)


def test_mostly_failing_environments_stop_the_run():
  def play(turn, action):
    raise EnvironmentFailure('sandbox lost')

  engine, sampler, _ = make(lambda *_: 'a;', play, count=100, task=dataclasses.replace(TASK, max_failure_share=0.5))
  with pytest.raises(RuntimeError, match='max_failure_share=0.5.*sandbox lost'):
    run(engine, sampler, 100)


def test_a_prompt_that_does_not_fit_is_dropped_and_counted():
  engine, sampler, flow = make(lambda *_: 'a;', on, prompt='p' * 40)
  run(engine, sampler)
  assert [r for _, r, _ in flow.dropped] == ['prompt_length']


def test_a_full_queue_pauses_starts_and_loses_nothing():
  engine, sampler, flow = make(lambda *_: 'a;', lambda t, a: StepResult(terminated=True), count=30)
  flow.full = True
  run(engine, sampler)
  started = flow.given
  assert started == 8 and flow.rollouts == [] and engine.in_flight == 8  # Those that ran finished; nothing new began.
  flow.full = False
  run(engine, sampler)
  assert sorted(r.ticket for r in flow.rollouts) == list(range(1, 31))


def test_overdue_sessions_are_dropped_and_their_prompt_handed_back():
  engine, sampler, flow = make(lambda *_: 'a;', on)
  engine.before_chunk()
  engine.before_chunk()
  flow.unwanted = [1, 99]
  engine.before_chunk()
  assert flow.dropped == [(1, 'overdue', (101, 0))] and not sampler.requests and engine.in_flight == 0


def test_oldest_version_is_a_bound_before_the_first_draw_and_exact_after():
  engine, sampler, flow = make(lambda p, turn, a: 'go;', on)
  engine.before_chunk()
  engine.before_chunk()
  assert flow.oldest == {1: 3}
  sampler.version = 5
  engine.before_chunk()
  assert flow.oldest == {1: 5}  # Nothing drawn yet.
  engine.after_chunk(sampler.step())
  sampler.version = 9
  engine.before_chunk()
  assert flow.oldest == {1: 5}


def test_saved_sessions_continue_where_they_were():
  script = lambda p, turn, a: ['go;', 'end;'][turn]
  engine, sampler, flow = make(script, two_turns)
  engine.before_chunk()
  engine.before_chunk()
  engine.after_chunk(sampler.step())
  engine.before_chunk()  # Sampling its second turn, one token of it drawn.
  saved = engine.state()
  before = copy.deepcopy(saved['sessions'][0])
  run(engine, sampler)  # What is written to disk later must not know of what happens meanwhile.
  assert len(flow.rollouts) == 1 and saved['sessions'][0].keys() == before.keys()
  for name, value in before.items():
    np.testing.assert_equal(saved['sessions'][0][name], value)
  Scripted.calls = []
  other, other_sampler, other_flow = make(script, two_turns, count=0)
  other.restore(saved, lambda prompt_id, attempt: Task(prompt_id, 'train', 0, {}))
  (request,) = other_sampler.seen
  assert bytes(request.tokens.tolist()) == b'ask:go;obs A' and request.turn_start == 11
  assert request.max_new_tokens == TASK.max_turn_tokens - 1
  other_sampler.turns[1] = 1
  run(other, other_sampler)
  (rollout,) = other_flow.rollouts
  assert bytes(rollout.tokens.tolist()) == b'ask:go;obs Aend;' and rollout.total_reward == 1.25
  assert Scripted.calls == ['reset', 'go;', 'Aend;']  # Brought up to date by replay, in the call that needed it.


def test_saved_sessions_of_an_environment_without_replay_start_over():
  class Unreplayable(Scripted):
    replayable = False

  engine, sampler, _ = make(lambda p, turn, a: 'go;', two_turns, environment=Unreplayable)
  for _ in range(2):
    engine.before_chunk()
  engine.after_chunk(sampler.step())
  engine.before_chunk()
  saved = engine.state()
  other, other_sampler, other_flow = make(lambda p, turn, a: ['go;', 'end;'][turn], two_turns, count=0, environment=Unreplayable)
  other.restore(saved, lambda prompt_id, attempt: Task(prompt_id, 'train', 0, {}))
  run(other, other_sampler)
  assert bytes(other_flow.rollouts[0].tokens.tolist()) == b'ask:go;obs end;' and other_flow.rollouts[0].attempt == 1


def test_finished_rollouts_without_room_are_saved():
  engine, sampler, flow = make(lambda *_: 'a;', lambda t, a: StepResult(terminated=True), count=2)
  flow.full = True
  run(engine, sampler)
  saved = engine.state()
  other, other_sampler, other_flow = make(lambda *_: 'a;', on, count=0)
  other.restore(saved, lambda prompt_id, attempt: Task(prompt_id, 'train', 0, {}))
  run(other, other_sampler)
  assert sorted(r.ticket for r in other_flow.rollouts) == [1, 2]


# --- Environments are closed ---------------------------------------------------------------------------------------------------


def fail():
  raise EnvironmentFailure('broken')


class Counted(Scripted):
  """Counts what is open."""

  made, closed = 0, 0

  def __init__(self, *args):
    super().__init__(*args)
    Counted.made += 1

  def close(self):
    Counted.closed += 1


@pytest.mark.parametrize('play, expected', [
    (two_turns, 'finished'), (lambda t, a: fail(), 'dropped'), (lambda t, a: StepResult(Observation('x' * 99)), 'finished')])
def test_every_environment_is_closed_once_however_the_rollout_ends(play, expected):
  Counted.made = Counted.closed = 0
  engine, sampler, flow = make(lambda p, turn, a: ['go;', 'end;'][turn], play, count=3, environment=Counted)
  run(engine, sampler)
  assert len(flow.rollouts if expected == 'finished' else flow.dropped) == 3
  assert Counted.made == Counted.closed == 1 + (3 if expected == 'finished' else 6)  # One to ask for its name; a retry has its own.


def test_an_engine_that_ends_closes_what_is_in_flight():
  Counted.made = Counted.closed = 0
  engine, sampler, _ = make(lambda *_: 'go;', two_turns, count=4, environment=Counted)
  engine.before_chunk()
  engine.before_chunk()
  engine.close()
  assert Counted.made == Counted.closed == 5 and engine.in_flight == 0


def test_an_error_while_closing_is_counted_and_harms_nothing():
  class Stubborn(Scripted):
    def close(self):
      if self.turn:
        raise OSError('still busy')

  engine, sampler, flow = make(lambda p, turn, a: ['go;', 'end;'][turn], two_turns, count=2, environment=Stubborn)
  run(engine, sampler)
  assert len(flow.rollouts) == 2 and engine.close_failures == 2


def test_a_rollout_that_never_draws_counts_as_a_failure():
  clock = [0.0]
  task = dataclasses.replace(TASK, time_limit_s=1.0, max_failure_share=0.5)
  engine, sampler, flow = make(lambda *_: 'go;', two_turns, count=50, task=task, now=lambda: clock[0])
  sampler.partials = lambda: {s: (np.zeros(0, np.int32),) * 3 for s in sampler.requests}
  with pytest.raises(RuntimeError, match='time_limit'):
    for _ in range(50):
      engine.before_chunk()
      clock[0] += 2.0
  assert {reason for _, reason, _ in flow.dropped} == {'time_limit'}


@pytest.mark.parametrize('play, words', [
    (lambda t, a: None, "Environment 'scripted', prompt 101, step, turn 0: TypeError: step must return StepResult, got NoneType"),
    (lambda t, a: {}['x'], "Environment 'scripted', prompt 101, step, turn 0: KeyError: 'x'"),
])
def test_a_fault_of_the_environments_code_names_it(play, words):
  engine, sampler, _ = make(lambda *_: 'go;', play)
  with pytest.raises(RuntimeError) as error:
    run(engine, sampler)
  assert str(error.value) == words and error.value.__cause__ is not None
