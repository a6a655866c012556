"""Rollouts of several segments: one ticket, one outcome, one count, a learner row for each segment."""

import dataclasses

from hypothesis import given, settings, strategies as st
import numpy as np
import pytest

from sao_jax import batching, metrics
from sao_jax.clock import InlineCalls
from sao_jax.config import TaskConfig
from sao_jax.environments.base import Environment, Observation, StepResult, Task
from sao_jax.models import conversation
from sao_jax.rollout_check import check_rollout
from sao_jax.rollout_queue import RolloutQueue
from sao_jax.rollouts import SEGMENT_NOISE, RolloutEngine
from sao_jax.types import Rollout
from tests import tokenizer_factory as factory
from tests.rollout_factory import make_rollout
from tests.test_rollouts import FakeFlow, FakeSampler

LIMITS = dict(oldest=0, newest=9, vocab_size=256, max_length=100)


def segmented(parts, *, ticket=0, seed=0, **fields) -> Rollout:
  """A rollout of segments; a part is (history tokens, action tokens)."""
  one = [make_rollout(ticket=ticket, seed=seed + i, length=prompt + actions, prompt=prompt, outcome=0.0) for i, (prompt, actions) in enumerate(parts)]
  rng = np.random.default_rng(seed)
  joined = {name: np.concatenate([getattr(r, name) for r in one]) for name in (
      'tokens', 'action_mask', 'behaviour_log_prob', 'policy_version')}
  starts = np.cumsum([0, *(r.length for r in one[:-1])])
  turn = np.concatenate([r.turn + 2 * i for i, r in enumerate(one)]).astype(np.int32)
  reward = np.where(joined['action_mask'] & (rng.random(len(turn)) < 0.5), rng.standard_normal(len(turn)), 0).astype(np.float32)
  return dataclasses.replace(
      one[0], **joined, turn=turn, reward=fields.pop('reward', reward), segment_starts=tuple(int(s) for s in starts), **fields)


PARTS = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6)), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(st.lists(PARTS, min_size=1, max_size=4))
def test_rows_hold_every_token_once(all_parts):
  rollouts = [segmented(parts, ticket=i, seed=i) for i, parts in enumerate(all_parts)]
  batch = batching.make_batch(rollouts, lengths=(4, 16), batch_size=4, pad_id=7, max_segments=4)
  segments = [(r, start, stop) for r in rollouts for start, stop in r.segments]
  assert batch.tokens.shape[0] == next(n for n in (4, 8, 16) if n >= len(segments))
  for row, (rollout, start, stop) in enumerate(segments):
    n = stop - start
    for name in ('tokens', 'action_mask', 'behaviour_log_prob', 'policy_version', 'turn'):
      np.testing.assert_array_equal(getattr(batch, name)[row, :n], getattr(rollout, name)[start:stop])
    np.testing.assert_array_equal(batch.reward[row, :n], rollout.reward[start:stop])  # Where they are: nothing is credited twice.
    assert batch.token_mask[row].sum() == n and batch.follows[row] == (start > 0)
  assert not batch.follows[len(segments):].any() and not batch.token_mask[len(segments):].any()


def test_a_cut_trajectory_is_cut_in_all_of_its_rows():
  cut = segmented([(2, 3), (3, 2)], ending='truncated', stop_reason='max_turns')
  batch = batching.make_batch([cut, segmented([(2, 2)])], lengths=(8,), batch_size=2, pad_id=0, max_segments=2)
  np.testing.assert_array_equal(batch.truncated, [True, True, False, False])
  np.testing.assert_array_equal(batch.follows, [False, True, False, False])


def test_more_segments_than_rows_are_made_for():
  with pytest.raises(ValueError, match='has 3 segments, batches are made for 2; raise task.max_segments'):
    batching.make_batch([segmented([(1, 1)] * 3)], lengths=(8,), batch_size=1, pad_id=0, max_segments=2)
  assert batching.row_buckets(6, 1) == (6,) and batching.row_buckets(6, 3) == (6, 12, 24)


@pytest.mark.parametrize('starts, reason', [
    ((), 'must ascend from 0'), ((1,), 'must ascend'), ((0, 5, 5), 'must ascend'), ((0, 99), 'must ascend'), ((0, 4), 'right after an action'),
    ((0, 6), 'right after an action'), ((0, 5), '')])
def test_the_queue_checks_segments(starts, reason):
  rollout = segmented([(2, 3), (3, 2)], reward=np.zeros(10, np.float32))
  assert check_rollout(rollout, **LIMITS) == ''
  assert reason in check_rollout(dataclasses.replace(rollout, segment_starts=starts), **LIMITS)
  assert bool(reason) == bool(check_rollout(dataclasses.replace(rollout, segment_starts=starts), **LIMITS))


def test_the_limit_on_length_is_of_a_segment():
  rollout = segmented([(2, 6), (3, 6)])
  assert check_rollout(rollout, **{**LIMITS, 'max_length': 9}) == ''
  assert '9 tokens are longer' in check_rollout(rollout, **{**LIMITS, 'max_length': 8})


def test_a_rollout_is_one_ticket_and_one_count_whatever_its_segments():
  queue = RolloutQueue(
      capacity=4, batch_size=2, max_staleness=2, overdue='wait', truncation='bootstrap', vocab_size=256, max_length=16, clock=lambda: 0.0)
  outcome = lambda n, value: np.eye(1, n, n - 1, dtype=np.float32)[0] * value
  short = segmented([(2, 1)], ticket=queue.ticket(0), reward=outcome(3, 1.0), metrics={'success': 1.0})
  long = segmented([(2, 1)] * 9, ticket=queue.ticket(0), reward=outcome(27, 0.0), metrics={'success': 0.0})
  assert queue.put(short, 0) and queue.put(long, 0)
  taken = queue.take(0, timeout_s=0.0)
  assert [len(r.segment_starts) for r in taken] == [1, 9]
  queue.trained([r.ticket for r in taken], version_advanced=True)
  assert queue.accounting() == {'admitted': 2, 'trained': 2, 'carried_over': 0, 'dropped': {}}
  found = {name: stat.mean() for name, stat in metrics.rollout_metrics(taken).items()}
  assert found['reward/mean'] == 0.5 and found['reward/success'] == 0.5  # Not 0.1, as a mean over segments would be.
  assert found['rollout/segments'] == 5.0 and found['rollout/action_tokens'] == 5.0


# --- The engine --------------------------------------------------------------------------------------------------------------------


class Talk(Environment):
  """A user who says something after every turn, and is content after the third."""

  name, replayable, conversation = 'talk', True, 'chat'

  def reset(self, task):
    self.turn = 0
    return Observation(messages=({'role': 'user', 'content': 'go'},))

  def step(self, action):
    self.turn += 1
    return StepResult(Observation('more' * (self.turn < 3)), reward=float(self.turn == 3), terminated=self.turn == 3, metrics={'success': 1.0})


class Speaker(FakeSampler):
  """Draws 'one', 'two', 'three', each with a stop token."""

  def __init__(self):
    super().__init__(None)
    self.tokenizer = factory.chatml(factory.REWRITING_TEMPLATE)

  def step(self):
    self.script = lambda prompt_id, turn, attempt: ['one', 'two', 'three'][turn] + '<|im_end|>'
    return [dataclasses.replace(c, stop_reason='stop_id') for c in super().step()]


def make_engine(max_segments, count=1, max_tokens=200):
  sampler, flow = Speaker(), FakeFlow(count)
  engine = RolloutEngine(
      sampler=sampler, calls=InlineCalls(), flow=flow, make_environment=Talk, conversation=conversation.make(sampler.tokenizer, 'chat'),
      tokenizer=sampler.tokenizer, task=TaskConfig(max_turns=9, max_turn_tokens=16, max_tokens=max_tokens, max_segments=max_segments),
      max_length=200, sessions=8, now=lambda: 0.0)
  return engine, sampler, flow


def run(engine, sampler, iterations=12):
  for _ in range(iterations):
    engine.before_chunk()
    engine.after_chunk(sampler.step())


HEADER = '<|im_start|>assistant\n<think>\n\n</think>\n\n'


def test_a_rewritten_history_begins_a_segment():
  engine, sampler, flow = make_engine(max_segments=3)
  run(engine, sampler)
  (rollout,) = flow.rollouts
  decode = sampler.tokenizer.decode
  texts = [decode(rollout.tokens[a:b]) for a, b in rollout.segments]
  user = lambda text: f'<|im_start|>user\n{text}<|im_end|>\n'
  said = lambda text: f'<|im_start|>assistant\n{text}<|im_end|>\n'
  assert texts == [
      user('go') + HEADER + 'one<|im_end|>', user('go') + said('one') + user('more') + HEADER + 'two<|im_end|>',
      user('go') + said('one') + user('more') + said('two') + user('more') + HEADER + 'three<|im_end|>']
  assert decode(rollout.tokens[rollout.action_mask]) == 'one<|im_end|>two<|im_end|>three<|im_end|>'  # Each drawn token once.
  assert not check_rollout(rollout, oldest=0, newest=9, vocab_size=sampler.tokenizer.vocab_size, max_length=200)
  assert rollout.reward[-1] == 1.0 and rollout.total_reward == 1.0 and rollout.ending == 'terminated'
  # The sampler sees each segment as a sequence of its own, with noise of its own, and forgets the one before.
  for request, (start, stop) in zip(sampler.seen, rollout.segments, strict=True):
    assert request.tokens.tolist() == rollout.tokens[start:start + len(request.tokens)].tolist() and request.turn_start == len(request.tokens)
  assert [r.attempt for r in sampler.seen] == [0, SEGMENT_NOISE, 2 * SEGMENT_NOISE] and sampler.released == [1, 1, 1]


def test_beyond_the_most_segments_a_rollout_is_cut():
  engine, sampler, flow = make_engine(max_segments=2)
  run(engine, sampler)
  (rollout,) = flow.rollouts
  assert (rollout.ending, rollout.stop_reason, len(rollout.segment_starts)) == ('truncated', 'max_segments', 2)
  assert rollout.action_mask[-1]


def test_a_segment_that_does_not_fit_is_not_begun():
  engine, sampler, flow = make_engine(max_segments=3, max_tokens=45)
  run(engine, sampler)
  (rollout,) = flow.rollouts
  assert rollout.stop_reason == 'max_tokens' and rollout.longest_segment <= 45 and rollout.action_mask[-1]


def test_a_segment_in_which_nothing_was_drawn_is_left_out():
  engine, sampler, flow = make_engine(max_segments=3)
  run(engine, sampler, 2)
  sampler.partials = lambda: {s: (np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32)) for s in sampler.requests}
  engine.before_chunk()
  assert len(sampler.seen) == 2
  engine._now = lambda: 1e9
  engine.before_chunk()
  engine.before_chunk()
  (rollout,) = flow.rollouts
  assert rollout.stop_reason == 'time_limit' and rollout.segment_starts == (0,) and rollout.action_mask[-1]


def test_saved_sessions_go_on_in_their_segment():
  whole, sampler, flow = make_engine(max_segments=3)
  run(whole, sampler)
  engine, first_sampler, _ = make_engine(max_segments=3)
  run(engine, first_sampler, 2)
  engine.before_chunk()  # In its second segment.
  first_sampler.partials = lambda: {s: (np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32)) for s in first_sampler.requests}
  saved = engine.state()
  other, other_sampler, other_flow = make_engine(max_segments=3, count=0)
  other.restore(saved, lambda prompt_id, attempt: Task(prompt_id, 'train', 0, {}))
  other_sampler.turns[1] = 1
  run(other, other_sampler)
  for name in ('tokens', 'action_mask', 'reward', 'turn'):
    np.testing.assert_array_equal(getattr(other_flow.rollouts[0], name), getattr(flow.rollouts[0], name))
  assert other_flow.rollouts[0].segment_starts == flow.rollouts[0].segment_starts


# --- The learner -------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_learner_trains_all_segments_in_one_step():
  """A step on 4 rollouts of 8 segments is the step of a learner of 8 rows on these rows."""
  import jax

  from sao_jax import sharding
  from sao_jax.learner import Learner
  from tests import learner_factory

  parts = [[(2, 3), (3, 2)], [(2, 3)] * 3, [(4, 4)], [(3, 2), (2, 5)]]
  rollouts = [segmented(p, ticket=i, seed=i) for i, p in enumerate(parts)]
  rollouts = [dataclasses.replace(r, tokens=r.tokens % learner_factory.VOCAB) for r in rollouts]
  make = dict(lengths=(learner_factory.LENGTH,), pad_id=0)
  results = []
  for size, most in ((4, 3), (8, 2)):
    config = dataclasses.replace(learner_factory.make_config(batch_size=size), task=TaskConfig(max_segments=most))
    learner = Learner(config, sharding.make_mesh(jax.devices()[:1], config.learner.mesh))
    batch = batching.make_batch(rollouts, batch_size=4, max_segments=3, **make)
    assert batch.tokens.shape[0] == 8
    state, stats = learner.update(learner_factory.start(learner), batch, version=0, train_policy=True)
    results.append((jax.device_get(state.policy), float(stats['policy/loss'].mean())))
  assert results[0][1] == results[1][1] != 0
  for path, value in results[0][0].items():
    np.testing.assert_array_equal(value, results[1][0][path])
  with pytest.raises(ValueError, match='takes 8 or 16 rows of length'):
    learner.update(state, batching.make_batch(rollouts[2:3], batch_size=4, **make), version=0, train_policy=True)
