"""What an environment may ask of the engine: a restart, other tools, a limit for a turn, cut turns, tokens, and room; live and replayed."""

import dataclasses
import zlib

import numpy as np
import pytest

from sao_jax import host_state, tool_calls
from sao_jax.clock import InlineCalls
from sao_jax.config import TaskConfig
from sao_jax.environments.base import Environment, EnvironmentFailure, Observation, StepResult, Task
from sao_jax.models import conversation
from sao_jax.models.conversation import RawConversation
from sao_jax.models.tokenizers import ByteTokenizer
from sao_jax.rollout_check import check_rollout
from sao_jax.rollouts import SEGMENT_NOISE, RolloutEngine
from tests import tokenizer_factory as factory
from tests.test_rollouts import FakeFlow, FakeSampler

TEMPLATE = (  # ChatML that tells the names of tools, and nothing more of them.
    "{% if tools %}<|im_start|>tools\n{% for tool in tools %}{{ tool.function.name }}!{% endfor %}<|im_end|>\n{% endif %}"
    + factory.CHATML_TEMPLATE)
TASK = TaskConfig(max_turns=9, max_turn_tokens=60, max_tokens=400, max_segments=4, retries=1, max_failure_share=1.0)


class Recorder(Environment):
  """Plays `play(turn, what it was given)` and notes every call; a class attribute, so that replays are noted, too."""

  name, replayable, conversation = 'recorder', True, 'chat'
  log: list = []

  def __init__(self, play, first=None, make_room=lambda messages, room: None):
    self.play, self.first, self.make_room, self.turn = play, first or Observation(messages=(user('go'),)), make_room, 0

  def reset(self, task):
    self.turn = 0
    self.log.append('reset')
    return self.first

  def step(self, action):
    return self._next(action)

  def step_calls(self, calls, text):
    return self._next((tuple((c.name, c.arguments) if isinstance(c, tool_calls.ToolCall) else c.reason for c in calls), text))

  def _next(self, given):
    self.log.append(given)
    self.turn += 1
    return self.play(self.turn - 1, given)

  def sampled(self, turn):
    self.log.append(turn)

  def compact(self, messages, room):
    self.log.append(('compact', [(m['role'], m['content']) for m in messages], room))
    return self.make_room(messages, room)


def user(text):
  return {'role': 'user', 'content': text}


def assistant(text):
  return {'role': 'assistant', 'content': text}


def tool(name):
  return {'type': 'function', 'function': {'name': name, 'parameters': {'type': 'object', 'properties': {'x': {'type': 'integer'}}}}}


class Speaker(FakeSampler):
  """Draws what `turns` say, one after the other, with a stop token where a turn does not end in '...'; log-probs count positions."""

  def __init__(self, tokenizer, turns, stop='stop_id'):
    super().__init__(None)
    self.tokenizer, self.said, self.stop = tokenizer, turns, stop
    self.script = lambda prompt_id, turn, attempt: self.said[turn]

  def partials(self):
    return {s: (np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32)) for s in self.requests}

  def step(self):
    starts = {s: len(r.tokens) for s, r in self.requests.items()}
    found = []
    for c in super().step():
      log_probs = -np.arange(starts[c.session], starts[c.session] + len(c.tokens), dtype=np.float32) / 64
      stop = c.stop_reason if c.stop_reason == 'length' else self.stop
      found.append(dataclasses.replace(c, log_probs=log_probs, stop_reason=stop))
    return found


def make(turns, play, *, raw=False, count=1, task=TASK, tokenizer=None, environment=Recorder, sampler=None, **fields):
  Recorder.log = []
  tokenizer = tokenizer or (ByteTokenizer() if raw else factory.chatml(TEMPLATE))
  end = '' if raw else '<|im_end|>'
  sampler = sampler or Speaker(tokenizer, [t + end for t in turns], 'stop_string' if raw else 'stop_id')
  flow = FakeFlow(count)
  make_environment = lambda: environment(play, **fields)
  engine = RolloutEngine(
      sampler=sampler, calls=InlineCalls(), flow=flow, make_environment=make_environment,
      conversation=RawConversation(tokenizer) if raw else conversation.make(tokenizer, 'chat'), tokenizer=tokenizer, task=task,
      max_length=task.max_tokens, sessions=8, now=lambda: 0.0)
  return engine, sampler, flow


def run(engine, sampler, iterations=25):
  for _ in range(iterations):
    engine.before_chunk()
    engine.after_chunk(sampler.step())


def played(*args, **fields):
  """The rollout of an engine, checked as the queue does."""
  engine, sampler, flow = make(*args, **fields)
  run(engine, sampler)
  (rollout,) = flow.rollouts
  assert not check_rollout(rollout, oldest=0, newest=9, vocab_size=sampler.tokenizer.vocab_size, max_length=400)
  return rollout, sampler


def end(**fields):
  return StepResult(terminated=True, reward=1.0, metrics={'success': 1.0}, **fields)


def say(*messages, **fields):
  return StepResult(Observation(messages=messages, **fields))


def texts(rollout, sampler):
  return [sampler.tokenizer.decode(rollout.tokens[a:b]) for a, b in rollout.segments]


HEADER = '<|im_start|>assistant\n'


def shown(*messages):
  return ''.join(f'<|im_start|>{m["role"]}\n{m["content"]}<|im_end|>\n' for m in messages) + HEADER


# --- Restarts, tools, limits of a turn ---------------------------------------------------------------------------------------------


def test_a_restart_begins_a_segment_with_the_whole_conversation():
  whole = (user('in short'), assistant('one'), user('go on'))
  rollout, sampler = played(['one', 'two', 'three'], lambda t, a: [say(user('more')), say(*whole, restart=True), end()][t])
  assert texts(rollout, sampler) == [
      shown(user('go')) + 'one<|im_end|>' + '\n' + shown(user('more')) + 'two<|im_end|>', shown(*whole) + 'three<|im_end|>']
  assert sampler.tokenizer.decode(rollout.tokens[rollout.action_mask]) == 'one<|im_end|>two<|im_end|>three<|im_end|>'
  assert [r.attempt for r in sampler.seen] == [0, 0, SEGMENT_NOISE] and sampler.seen[2].turn_start == len(sampler.seen[2].tokens)
  assert rollout.total_reward == rollout.reward[-1] == 1.0 and list(dict.fromkeys(rollout.turn)) == [0, 1, 2]


def test_a_conversation_goes_on_from_its_restart():
  """What follows is the difference to the conversation that was given, not to the one before."""
  play = lambda t, a: [say(user('new'), restart=True), say(user('and')), end()][t]
  rollout, sampler = played(['one', 'two', 'three'], play)
  assert texts(rollout, sampler)[1] == shown(user('new')) + 'two<|im_end|>\n' + shown(user('and')) + 'three<|im_end|>'
  assert len(rollout.segment_starts) == 2


def test_a_restart_with_the_same_beginning_is_a_new_segment_all_the_same():
  """Whatever the template says: noise belongs to the segment, and nothing of the old sequence is taken for granted."""
  play = lambda t, a: [say(user('go'), assistant('one'), user('more'), restart=True), end()][t]
  rollout, sampler = played(['one', 'two'], play)
  assert len(rollout.segment_starts) == 2 and sampler.released[0] == 1


def test_a_restart_in_a_raw_conversation():
  play = lambda t, a: [StepResult(Observation('anew:', restart=True)), end()][t]
  rollout, sampler = played(['one', 'two'], play, raw=True, first=Observation('ask:'))
  assert texts(rollout, sampler) == ['ask:one', 'anew:two']


@pytest.mark.parametrize('most, segments, reason', [(1, 1, 'max_segments'), (2, 2, 'max_segments'), (9, 9, 'max_turns')])
def test_restarts_are_bounded_by_the_setting(most, segments, reason):
  task = dataclasses.replace(TASK, max_segments=most)
  rollout, _ = played(['x'] * 20, lambda t, a: say(user(str(t)), restart=True), task=task)
  assert (len(rollout.segment_starts), rollout.stop_reason, rollout.ending) == (segments, reason, 'truncated')


def test_a_restart_that_does_not_fit_is_not_begun():
  rollout, _ = played(['x', 'y'], lambda t, a: say(user('long ' * 500), restart=True))
  assert rollout.stop_reason == 'max_tokens' and rollout.segment_starts == (0,) and rollout.action_mask[-1]


def call(name):
  return tool_calls.write(tool_calls.Turn(calls=((name, {'x': 1}),)), 'hermes')


def test_tools_that_come_and_go():
  """Each turn is stepped with the tools that the policy was shown before it, and sees them in its prompt."""
  play = lambda t, a: [
      say(user('b'), tools=(tool('new'),)), say(user('c')), say(user('d'), tools=(tool('new'),)), say(user('e'), tools=()), end()][t]
  rollout, sampler = played(
      [call('old'), call('new'), call('old'), 'two', call('new')], play, first=Observation(messages=(user('a'),), tools=(tool('old'),)))
  called = lambda name: (((name, {'x': 1}),), '')
  assert Recorder.log == ['reset', called('old'), called('new'), (('unknown tool "old"; there are: new',), ''), ((), 'two'), call('new')]
  prompts = [sampler.tokenizer.decode(r.tokens) for r in sampler.seen]
  assert [('old!' in p, 'new!' in p) for p in prompts] == [(True, False), (False, True), (False, True), (False, True), (False, False)]
  assert len(rollout.segment_starts) == 3  # Where the tools changed; telling the same ones again changes nothing.
  assert [r.attempt // SEGMENT_NOISE for r in sampler.seen] == [0, 1, 1, 1, 2]


def test_other_tools_change_no_raw_conversation():
  play = lambda t, a: [StepResult(Observation(' b:', tools=(tool('new'),))), end()][t]
  rollout, sampler = played(['x', 'y'], play, raw=True, first=Observation('a:'))
  assert texts(rollout, sampler) == ['a:x b:y'] and Recorder.log == ['reset', 'x', ((), 'y')]


def test_tools_that_are_none_are_a_fault_that_names_the_environment():
  engine, sampler, _ = make(['x', 'y'], lambda t, a: say(user('b'), tools=({'name': 'not a name!'},)))
  with pytest.raises(RuntimeError, match="Environment 'recorder', prompt 101, step, turn 0: ValueError: A tool must be a function"):
    run(engine, sampler)


@pytest.mark.parametrize('value', [0, -1, True, 2.0, '3'])
def test_bad_observations_are_refused(value):
  with pytest.raises(ValueError, match='max_tokens of an observation must be None or an integer of at least 1'):
    Observation('x', max_tokens=value)
  with pytest.raises(ValueError, match='restart=True must hold the whole conversation'):
    Observation(restart=True)


@pytest.mark.parametrize('first, then, limits', [(None, 3, [8, 3, 8]), (5, None, [5, 8, 8]), (100, 100, [8, 8, 8])])
def test_the_limit_of_a_turn_is_of_one_turn(first, then, limits):
  play = lambda t, a: [StepResult(Observation('b', max_tokens=then)), StepResult(Observation('c')), end()][t]
  _, sampler = played(
      ['x', 'y', 'z'], play, raw=True, first=Observation('a', max_tokens=first), task=dataclasses.replace(TASK, max_turn_tokens=8))
  assert [r.max_new_tokens for r in sampler.seen] == limits


class Taker(Recorder):
  takes_cut_turns = wants_tokens = True


def test_a_cut_turn_ends_the_rollout_unless_it_is_taken():
  play = lambda t, a: [StepResult(Observation('b', max_tokens=3)), StepResult(Observation('c')), end()][t]
  first = Observation('a')
  rollout, _ = played(['xyz', 'abcdef', 'z'], play, raw=True, first=first)
  assert (rollout.stop_reason, rollout.ending) == ('max_turn_tokens', 'truncated') and Recorder.log == ['reset', 'xyz']
  rollout, sampler = played(['xyz', 'abcdef', 'z'], play, raw=True, first=first, environment=Taker)
  assert texts(rollout, sampler) == ['axyzbabccz'] and rollout.ending == 'terminated'
  assert [x for x in Recorder.log if isinstance(x, str)] == ['reset', 'xyz', 'abc', 'z']
  assert [x.stop_reason for x in Recorder.log if not isinstance(x, str)] == ['stop', 'length', 'stop']


def test_a_cut_turn_of_a_chat_is_closed_by_the_template():
  sampler = Speaker(factory.chatml(TEMPLATE), ['one two three', 'end<|im_end|>'])
  engine, sampler, flow = make(
      [], lambda t, a: [say(user('go on')), end()][t], environment=Taker, sampler=sampler, task=dataclasses.replace(TASK, max_turn_tokens=4))
  run(engine, sampler)
  (rollout,) = flow.rollouts
  cut = sampler.tokenizer.decode(sampler.tokenizer.encode('one two three')[:4])
  assert cut != 'one two three'
  assert texts(rollout, sampler) == [shown(user('go')) + cut + '<|im_end|>\n' + shown(user('go on')) + 'end<|im_end|>']
  assert sampler.tokenizer.decode(rollout.tokens[rollout.action_mask]) == cut + 'end<|im_end|>'  # The closing is no action.


def test_a_turn_that_the_context_cuts_ends_the_rollout_though_cut_turns_are_taken():
  rollout, _ = played(['abcdefgh'], lambda t, a: end(), raw=True, first=Observation('ask:'), environment=Taker,
                      task=dataclasses.replace(TASK, max_tokens=8))
  assert (rollout.stop_reason, rollout.length) == ('max_tokens', 8) and Recorder.log == ['reset']


# --- Tokens ------------------------------------------------------------------------------------------------------------------------


def test_an_environment_gets_the_tokens_of_each_turn_before_the_turn():
  play = lambda t, a: [say(user('more')), say(user('anew'), restart=True), end()][t]
  rollout, sampler = played(['one', 'two', 'three'], play, environment=Taker)
  assert [type(x).__name__ for x in Recorder.log] == ['str'] + ['SampledTurn', 'str'] * 3
  turns = [x for x in Recorder.log if not isinstance(x, str)]
  assert [t.text for t in turns] == ['one', 'two', 'three'] == Recorder.log[2::2]
  for turn, request, number in zip(turns, sampler.seen, range(3), strict=True):
    mine = rollout.action_mask & (rollout.turn == number)
    assert turn.prompt_ids == tuple(request.tokens.tolist()) and all(type(x) is int for x in turn.prompt_ids + turn.ids + turn.versions)
    assert turn.ids == tuple(rollout.tokens[mine].tolist()) and turn.versions == tuple(rollout.policy_version[mine].tolist())
    assert turn.log_probs == tuple(rollout.behaviour_log_prob[mine].tolist()) and turn.stop_reason == 'stop'
    assert len(set(turn.log_probs)) == len(turn.ids) > 1


def test_who_wants_tokens_must_take_them():
  with pytest.raises(NotImplementedError, match='Environment wants tokens but has no sampled'):
    Environment().sampled(None)


# --- Room --------------------------------------------------------------------------------------------------------------------------


def shorten(messages, room):
  return Observation(messages=(user('so far: ' + '/'.join(m['content'] for m in messages if m['role'] == 'assistant')),), restart=True)


ROOM = dataclasses.replace(TASK, max_tokens=200, compact_room=50)
MORE = 'more ' * 15


def test_an_environment_is_asked_for_room_and_shortens():
  play = lambda t, a: say(user(MORE)) if t < 3 else end()
  rollout, sampler = played(['one', 'two', 'three', 'four'], play, task=ROOM, make_room=shorten)
  asked = [x for x in Recorder.log if isinstance(x, tuple)]
  more = ('user', MORE)
  assert [messages for _, messages, _ in asked] == [
      [('user', 'go'), ('assistant', 'one'), more, ('assistant', 'two'), more]]
  assert texts(rollout, sampler)[1].startswith(shown(user('so far: one/two'))) and rollout.ending == 'terminated'
  # `room` is what the observation would have left: the segment with it, up to the limit.
  told = len(sampler.tokenizer.encode_run('\n', after='special')) + len(
      conversation.make(sampler.tokenizer, 'chat').first([user(MORE)]))
  assert asked[0][2] == 200 - rollout.segment_starts[1] - told
  task = dataclasses.replace(ROOM, compact_room=0, max_tokens=150)
  plain, _ = played(['one', 'two', 'three', 'four'], play, task=task, make_room=shorten)
  assert plain.stop_reason == 'max_tokens' and not [x for x in Recorder.log if isinstance(x, tuple)]


def test_an_environment_asks_for_a_summary_and_restarts_with_it():
  def ask(messages, room):
    return Observation(messages=(user('Sum up.'),), max_tokens=20)

  play = lambda t, a: [say(user(MORE)), say(user(MORE)), say(user('Summary: ' + str(a)), restart=True), end()][t]
  rollout, sampler = played(['one', 'two', 'SUM', 'done'], play, task=ROOM, make_room=ask)
  assert [x[0] if isinstance(x, tuple) else x for x in Recorder.log] == ['reset', 'one', 'two', 'compact', 'SUM', 'done']
  first, second = texts(rollout, sampler)
  assert first.endswith('two<|im_end|>\n' + shown(user('Sum up.')) + 'SUM<|im_end|>')  # In place of the observation that filled the room.
  assert second == shown(user('Summary: SUM')) + 'done<|im_end|>'
  assert [r.max_new_tokens for r in sampler.seen][2] == 20 and rollout.total_reward == 1.0


def test_none_goes_on_to_the_limit():
  rollout, _ = played(['one'] * 9, lambda t, a: say(user(MORE)), task=ROOM)
  assert rollout.stop_reason == 'max_tokens' and rollout.segment_starts == (0,)
  assert [x for x in Recorder.log if isinstance(x, tuple)]


def test_tools_of_a_replaced_observation_hold_on():
  """The environment said them, whatever it says afterwards to make room."""
  play = lambda t, a: [say(user('more ' * 40), tools=(tool('new'),)), end()][t]
  rollout, sampler = played(['one', 'two'], play, task=ROOM, make_room=lambda m, r: Observation(messages=(user('short'),), restart=True))
  assert Recorder.log[-1] == ((), 'two') and 'new!' in sampler.tokenizer.decode(sampler.seen[1].tokens)


def test_the_last_segment_is_not_asked_for_room():
  task = dataclasses.replace(ROOM, max_segments=2)
  rollout, _ = played(['one'] * 9, lambda t, a: say(user(MORE)), task=task, make_room=shorten)
  assert (rollout.stop_reason, len(rollout.segment_starts)) == ('max_tokens', 2)
  assert len([x for x in Recorder.log if isinstance(x, tuple)]) == 1


def test_a_compaction_that_gives_something_else_names_the_environment():
  engine, sampler, _ = make(['one'] * 9, lambda t, a: say(user('more ' * 40)), task=ROOM, make_room=lambda m, r: 'short')
  with pytest.raises(RuntimeError, match="prompt 101, compact, turn 0: TypeError: compact must return Observation, got str"):
    run(engine, sampler)


# --- Replay and checkpoints --------------------------------------------------------------------------------------------------------


class Everything(Recorder):
  """Uses all of it; replayed, it must be given the same again: it answers with a digest of all that it was given."""

  takes_cut_turns = wants_tokens = True

  def __init__(self, play, failing=()):
    super().__init__(play)
    self.seen, self.failing = [], failing

  def reset(self, task):
    self.seen = [('reset', task.index)]
    return Observation(messages=(user('go'),), tools=(tool('t0'),), max_tokens=30)

  def sampled(self, turn):
    self.seen.append(turn)

  def _next(self, given):
    self.seen.append(given)
    turn = sum(not isinstance(x, (tuple, str)) for x in self.seen) - 1
    if self.failing and self.failing[0] == ('step', turn):
      self.failing.pop(0)
      raise EnvironmentFailure('lost')
    if turn == 5:
      return StepResult(terminated=True, reward=1.0, metrics={'success': 1.0})
    fields = [
        dict(tools=(tool('t1'),)), dict(max_tokens=4), dict(restart=True), dict(), dict(tools=())][turn]
    return StepResult(Observation(messages=(user(f'{turn} {self._digest()} ' + 'fill ' * {0: 20, 3: 24}.get(turn, 0)),), **fields))

  def compact(self, messages, room):
    self.seen.append(('compact', str(messages), room))
    if self.failing and self.failing[0] == ('compact', len(messages)):
      self.failing.pop(0)
      raise TimeoutError('slow')
    return Observation(messages=(user(f'shorter {self._digest()}'),), restart=True)

  def _digest(self):
    return format(zlib.crc32(repr(self.seen).encode()), 'x')


SAID = [tool_calls.write(tool_calls.Turn(calls=((n, {'x': 1}),)), 'hermes') for n in ('t0', 't1')] + ['a b c d e f g h i j', 'four', 'five', 'six']
FULL = dataclasses.replace(TASK, max_tokens=200, compact_room=60, max_segments=9)


def everything(count=1, **fields):
  return make(SAID, None, environment=Everything, task=FULL, count=count, **fields)


def same(a, b):
  for field in dataclasses.fields(a):
    if field.name not in ('started_s', 'finished_s'):
      np.testing.assert_equal(getattr(a, field.name), getattr(b, field.name), err_msg=field.name)


@pytest.fixture(scope='module')
def undisturbed():
  engine, sampler, flow = everything()
  run(engine, sampler)
  (rollout,) = flow.rollouts
  assert rollout.ending == 'terminated' and len(rollout.segment_starts) >= 4
  assert {r.max_new_tokens for r in sampler.seen} >= {30, 4}
  return rollout


def test_lost_environments_are_replayed_to_the_same_end(undisturbed):
  failing = [('step', 1), ('step', 3), ('step', 5)]
  task = dataclasses.replace(FULL, retries=9)
  engine, sampler, flow = make(SAID, None, environment=Everything, task=task, failing=failing)
  run(engine, sampler)
  assert failing == []
  same(flow.rollouts[0], undisturbed)


def test_a_lost_compaction_is_asked_again(undisturbed):
  hits = []

  class Once(Everything):
    def compact(self, messages, room):
      if not hits:
        hits.append(len(messages))
        raise EnvironmentFailure('lost')
      return super().compact(messages, room)

  engine, sampler, flow = make(SAID, None, environment=Once, task=FULL)
  run(engine, sampler)
  assert hits
  same(flow.rollouts[0], undisturbed)


class HeldCalls(InlineCalls):
  """Calls whose results wait until they are let go, one at a time: every phase can be looked at."""

  def __init__(self):
    super().__init__()
    self.waiting = []

  def submit(self, call, *, due_s=None):
    self.waiting.append(call)

  def ready(self):
    if self.waiting:
      super().submit(self.waiting.pop(0))
    return super().ready()


def test_saved_anywhere_a_session_goes_on_to_the_same_end(undisturbed):
  """Saved through its bytes in every phase, compaction included, and taken up by another engine with fresh environments."""
  phases = []
  for stop in range(50):
    engine, sampler, _ = everything()
    engine.calls = HeldCalls()
    for half in range(stop):
      engine.before_chunk() if half % 2 else engine.after_chunk(sampler.step())
    if stop > 2 and not engine.in_flight:
      break
    phases += [s.phase for s in engine._sessions.values()]
    saved = host_state.decode(host_state.encode(engine.state()))
    other, other_sampler, flow = everything(count=0 if engine._sessions else 1)
    other.restore(saved, lambda prompt_id, attempt: Task(prompt_id, 'train', 0, {}))
    other_sampler.turns = dict(sampler.turns)
    run(other, other_sampler)
    same(flow.rollouts[0], undisturbed)
  assert set(phases) == {'reset', 'sampling', 'step', 'compact'} and phases.count('step') >= 5


def test_without_replay_a_lost_compaction_starts_over():
  class Unreplayable(Everything):
    replayable = False
    lost = []

    def compact(self, messages, room):
      if not self.lost:
        self.lost.append(1)
        raise EnvironmentFailure('lost')
      return super().compact(messages, room)

  engine, sampler, flow = make([], None, environment=Unreplayable, task=FULL)
  sampler.script = lambda prompt_id, turn, attempt: (SAID + SAID)[turn if attempt % SEGMENT_NOISE == 0 else turn - first[0]] + '<|im_end|>'
  first = [0]
  for _ in range(40):
    engine.before_chunk()
    if engine._sessions and next(iter(engine._sessions.values())).attempt == 1 and not first[0]:
      first[0] = sampler.turns[1]
    engine.after_chunk(sampler.step())
  (rollout,) = flow.rollouts
  assert (rollout.attempt, rollout.ending, rollout.turn[-1]) == (1, 'terminated', 5) and first[0] > 0
