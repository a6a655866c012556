"""Ways to shorten a conversation: the pure parts, the mixin, and the calculator with the engine around it."""

import dataclasses

import numpy as np
import pytest

from sao_jax import environments, tool_calls
from sao_jax.clock import InlineCalls
from sao_jax.config import TaskConfig
from sao_jax.environments import compaction
from sao_jax.environments.base import Environment, Observation, StepResult, Task
from sao_jax.models import conversation
from sao_jax.rollout_check import check_rollout
from sao_jax.rollouts import RolloutEngine
from tests import tokenizer_factory as factory
from tests.test_rollout_contract import TEMPLATE, Speaker, assistant, user
from tests.test_rollouts import FakeFlow
from tests.test_tool_use import call, task_of


def output(text):
  return {'role': 'tool', 'content': text}


LONG = 'x' * 99
TALK = (user('task'), assistant('a'), output(LONG), output(LONG), assistant('b'), output(LONG))


@pytest.mark.parametrize('keep, left', [(0, [2, 3, 5]), (1, [2, 3]), (2, [2]), (3, []), (9, [])])
def test_old_outputs_are_left_out(keep, left):
  shorter = compaction.without_outputs(TALK, keep=keep)
  if not left:
    assert shorter is None
    return
  assert [i for i, (m, n) in enumerate(zip(TALK, shorter, strict=True)) if m != n] == left
  assert all(shorter[i] == output(compaction.LEFT_OUT) for i in left) and all(m['content'] == LONG for m in TALK if m['role'] == 'tool')


def test_what_is_short_already_stays_and_nothing_is_left_out_twice():
  assert compaction.without_outputs((user('x'), assistant('a'), output('33'), assistant('b'), output('34')), keep=0) is None
  once = compaction.without_outputs(TALK, keep=0)
  assert compaction.without_outputs(once, keep=0) is None
  extra = compaction.without_outputs((assistant('a'), {**output(LONG), 'tool_call_id': '7'}), keep=0)
  assert extra[1] == {'role': 'tool', 'content': compaction.LEFT_OUT, 'tool_call_id': '7'}


def test_a_request_answers_every_call_and_asks():
  assert compaction.summary_request(TALK[:4]) == (output(compaction.LEFT_OUT), output(compaction.LEFT_OUT), user(compaction.REQUEST))
  assert compaction.summary_request((user('task'), assistant('a'), user(LONG)), text='?') == (user('?'),)
  with pytest.raises(ValueError, match='holds none'):
    compaction.summary_request((user('task'),))


def test_a_summary_goes_to_the_user_message_that_told_the_task():
  assert compaction.opening(TALK) == (user('task'),)
  assert compaction.with_summary((user('task'),), 'done: a') == (user(f'task\n\n{compaction.SUMMARY}\ndone: a'),)
  system = {'role': 'system', 'content': 's'}
  assert compaction.with_summary((system,), 'a') == (system, user(f'{compaction.SUMMARY}\na'))


class Mine(compaction.Compaction, Environment):
  compaction = 'summary'


def test_the_mixin_asks_once_and_keeps_the_first_opening():
  mine = Mine()
  mine.begin_episode()
  assert mine.take_summary('no summary') is None
  assert mine.compact(TALK, 3).messages[-1] == user(compaction.REQUEST)
  first = mine.take_summary('<think>hm</think>\n\nfound a ')
  assert first == Observation(messages=(user(f'task\n\n{compaction.SUMMARY}\nfound a'),), restart=True)
  assert mine.take_summary('another') is None
  mine.compact((*first.messages, assistant('c'), output(LONG)), 3)
  assert mine.take_summary('').messages == (user(f'task\n\n{compaction.SUMMARY}\n(none)'),)  # The summary before is not kept, too.
  mine.begin_episode()
  mine.compact((user('other'), assistant('c')), 3)
  assert mine.take_summary('d').messages[0]['content'].startswith('other')
  mine.compaction = ''
  assert mine.compact(TALK, 3) is None


@pytest.mark.parametrize('value', ['both', None, 1, True])
def test_unknown_ways_are_refused(value):
  with pytest.raises(ValueError, match="compaction must be one of drop, summary, or '' for none"):
    environments.make('calculator', chat=True, compaction=value)


def solve(way, turns, *, compact_room, max_segments=3, max_tokens=420, max_turn_tokens=400):
  """The calculator's rollout of 12+7*3+1 with scripted turns, and what the sampler saw."""
  tokenizer = factory.chatml(TEMPLATE)
  sampler, flow = Speaker(tokenizer, [t + '<|im_end|>' for t in turns]), FakeFlow(1)
  task = task_of([12, '+', 7, '*', 3, '+', 1], 34)
  admit = flow.admit
  flow.admit = lambda version: (a := admit(version)) and dataclasses.replace(a, task=task)
  engine = RolloutEngine(
      sampler=sampler, calls=InlineCalls(), flow=flow, make_environment=lambda: environments.make('calculator', chat=True, compaction=way),
      conversation=conversation.make(tokenizer, 'chat'), tokenizer=tokenizer, max_length=max_tokens, sessions=2, now=lambda: 0.0,
      task=TaskConfig(
          max_turns=9, max_turn_tokens=max_turn_tokens, max_tokens=max_tokens, compact_room=compact_room, max_segments=max_segments))
  for _ in range(30):
    engine.before_chunk()
    engine.after_chunk(sampler.step())
  (rollout,) = flow.rollouts
  assert not check_rollout(rollout, oldest=0, newest=9, vocab_size=tokenizer.vocab_size, max_length=max_tokens)
  return rollout, [tokenizer.decode(rollout.tokens[a:b]) for a, b in rollout.segments], sampler


WORK = [call(7, '*', 3) + call(5, '+', 5) * 3, call(12, '+', 21), call(33, '+', 1)]


def test_the_calculator_goes_on_with_less():
  whole, texts, _ = solve('drop', [*WORK, 'Answer: 34'], compact_room=0, max_tokens=900)
  assert whole.total_reward == 1.0 and len(texts) == 1
  room = 900 - whole.length + 40  # Asked for before the last turn.
  rollout, texts, _ = solve('drop', [*WORK, 'Answer: 34'], compact_room=room, max_tokens=900)
  assert rollout.total_reward == 1.0 and len(texts) > 1 and rollout.ending == 'terminated'
  assert texts[1].count('<|im_start|>tool\n' + compaction.LEFT_OUT) == 3  # The answers to 5+5, longer than the note.
  assert rollout.metrics['success'] == 1.0 and rollout.metrics['tool_calls'] == whole.metrics['tool_calls']


def test_the_calculator_asks_for_a_summary():
  whole, _, _ = solve('summary', [*WORK, 'Answer: 34'], compact_room=0, max_tokens=900)
  turns = [WORK[0], WORK[1], 'The value is 33+1.', WORK[2], 'Answer: 34']
  room = 900 - int(np.flatnonzero(whole.action_mask & (whole.turn == 2))[0]) + 1  # Asked for before the third turn.
  rollout, texts, sampler = solve('summary', turns, compact_room=room, max_tokens=900, max_segments=2)
  assert rollout.total_reward == 1.0 and len(texts) == 2 and rollout.metrics['malformed'] == 0
  assert texts[0].endswith(compaction.REQUEST + '<|im_end|>\n<|im_start|>assistant\nThe value is 33+1.<|im_end|>')
  assert f'12+7*3+1\n\n{compaction.SUMMARY}\nThe value is 33+1.<|im_end|>' in texts[1]
  np.testing.assert_array_equal(np.unique(rollout.turn[rollout.action_mask]), range(5))  # The summary is a turn that is trained.
