"""Sessions of the gateway over real HTTP: which requests go on, which begin anew, which are repeats; forms of answers; exact tokens."""

import concurrent.futures
import json
import random
import socket
import struct
import threading
import time

import pytest

from sao_jax import gateway, tool_calls
from sao_jax.gateway import history
from sao_jax.gateway.turns import make_answer
from tests.gateway_client import ask, connect, head_of, post, serving, turn_of, user, wait_until

TOOLS = [{'type': 'function', 'function': {'name': 'bash', 'description': 'Runs.', 'parameters': {
    'type': 'object', 'properties': {'command': {'type': 'string'}}, 'required': ['command']}}}]


def call(command, name='bash'):
  return tool_calls.write(tool_calls.Turn(calls=((name, {'command': command}),)), 'hermes')


def record(server, key):
  status, value, _ = post(server, key, None, '/v1/sessions/me', 'GET')
  assert status == 200
  return value


def check_record(server, policy, key):
  """Every sampled token is in the record once, in its place."""
  found = record(server, key)
  assert len(found['turns']) == len(policy.turns)
  for turn, drawn in zip(found['turns'], policy.turns):
    segment = found['segments'][turn['segment']]
    assert tuple(segment[turn['start']:turn['stop']]) == drawn.ids and tuple(segment[:turn['start']]) == drawn.prompt_ids
    assert turn['log_probs'] == list(drawn.log_probs) and turn['policy_versions'] == list(drawn.versions) and turn['text'] == drawn.text
  return found


def test_a_conversation_goes_on_by_its_new_messages_alone():
  with serving() as (server, [(policy, key)]):
    messages = [{'role': 'developer', 'content': 'be brief'}, user('one')]
    messages += [ask(server, key, messages), user('two'), user('three')]
    messages += [ask(server, key, messages), user([{'type': 'text', 'text': 'fo'}, {'type': 'text', 'text': 'ur'}])]
    ask(server, key, messages)
    shown = [[(m['role'], m['content']) for m in p.messages] for p in policy.prompts]
    assert shown == [[('system', 'be brief'), ('user', 'one')], [('user', 'two'), ('user', 'three')], [('user', 'four')]]
    assert not any(p.restart for p in policy.prompts)
    assert len(check_record(server, policy, key)['segments']) == 1


def changed(message, how):
  """The message as a careless client sends it back."""
  message = json.loads(json.dumps(message))
  if how == 'blanks' and message.get('content'):
    message['content'] = '\n ' + message['content'].replace(' ', ' \n\t') + '  '
  if how == 'parts' and message.get('content'):
    message['content'] = [{'type': 'text', 'text': message['content']}]
  if how == 'calls':
    for i, item in enumerate(message.get('tool_calls') or ()):
      item['id'] = f'x{i}'
      item['function']['arguments'] = json.dumps(json.loads(item['function']['arguments']), indent=2)
  if how == 'bare':
    message = {k: v for k, v in message.items() if k in ('role', 'content', 'tool_calls', 'tool_call_id') and v is not None}
  if how == 'more':
    message |= {'name': 'x', 'audio': None, 'annotations': [], 'function_call': None, 'provider_specific_fields': {'a': 1}}
  return message


@pytest.mark.parametrize('how', ['same', 'blanks', 'parts', 'calls', 'bare', 'more'])
def test_history_that_says_the_same_is_the_same(how):
  texts = ['<think>Look first.\nThen act.</think>\n\nI look.\n' + call('ls -la  "a b"') + call('pwd'), 'done  now ']
  with serving(lambda prompt, n: texts[n % 2]) as (server, [(policy, key)]):
    messages = [user('a task  of  two words')]
    said = ask(server, key, messages, tools=TOOLS)
    assert said['content'] == 'I look.' and said['reasoning_content'] == 'Look first.\nThen act.'
    assert [json.loads(c['function']['arguments']) for c in said['tool_calls']] == [{'command': 'ls -la  "a b"'}, {'command': 'pwd'}]
    answers = [{'role': 'tool', 'tool_call_id': c['id'], 'content': 'x'} for c in said['tool_calls']]
    ask(server, key, [changed(m, how) for m in [*messages, said, *answers]], tools=TOOLS)
    assert [m['role'] for m in policy.prompts[1].messages] == ['tool', 'tool'] and not policy.prompts[1].restart
    check_record(server, policy, key)


@pytest.mark.parametrize('content', ['<think>Look first.</think>I look.', '<think>\nLook first.\n</think>\n\nI look.', 'I look.'])
def test_reasoning_may_come_back_or_not(content):
  with serving(lambda prompt, n: '<think>Look first.</think>\nI look.') as (server, [(policy, key)]):
    ask(server, key, [user('x')])
    ask(server, key, [user('x'), {'role': 'assistant', 'content': content}, user('y')])
    assert not policy.prompts[1].restart


@pytest.mark.parametrize('rewrite', ['drop_first', 'edit_user', 'edit_turn', 'edit_call', 'shorter', 'tools'])
def test_another_history_begins_anew(rewrite):
  with serving(lambda prompt, n: 'I look.\n' + call('ls') if n == 0 else f'turn {n}') as (server, [(policy, key)]):
    messages = [user('one'), user('two')]
    said = ask(server, key, messages, tools=TOOLS)
    messages += [said, {'role': 'tool', 'content': 'r'}]
    tools = TOOLS
    if rewrite == 'drop_first':
      messages = messages[1:]
    elif rewrite == 'edit_user':
      messages[0] = user('ones')
    elif rewrite == 'edit_turn':
      messages[2] = {**said, 'content': 'I do not look.'}
    elif rewrite == 'edit_call':
      messages[2]['tool_calls'][0]['function']['arguments'] = '{"command": "rm"}'
    elif rewrite == 'shorter':
      messages = messages[:1]
    else:
      tools = [*TOOLS, {'type': 'function', 'function': {'name': 'other', 'parameters': {'type': 'object', 'properties': {}}}}]
    ask(server, key, messages, tools=tools)
    prompt = policy.prompts[1]
    assert prompt.restart and len(prompt.messages) == len(messages) and len(prompt.tools) == len(tools)
    if rewrite in ('drop_first', 'edit_user', 'tools'):  # Its own turn as it was sampled, whatever the client shows.
      assert 'I look.\n' + call('ls') in [m['content'] for m in prompt.messages]
    if rewrite == 'edit_call':
      assert tool_calls.parse(prompt.messages[2]['content'], 'hermes').calls[0].arguments == {'command': 'rm'}
    assert len(check_record(server, policy, key)['segments']) == 2


def test_calls_that_others_made_up_are_shown_in_the_form_of_the_policy():
  turns = history.History('glm')
  shown, restart = turns.take([
      user('x'), {'role': 'assistant', 'content': 'so', 'tool_calls': (('bash', '{"command": "ls"}'), ('bash', '[1'))}, user('y')])
  assert not restart and tool_calls.parse(shown[1]['content'], 'glm').calls[0].arguments == {'command': 'ls'}
  assert shown[1]['content'].startswith('so\n') and '[1' in shown[1]['content']


@pytest.mark.parametrize('text', [
    '<tool_call>{"name": "bash"', '<tool_call>ls</tool_call>', call('ls', name='zsh'), call('ls') + '</tool_call>',
    call('ls') + call('x', name='y')])
def test_a_malformed_call_is_shown_as_it_was_sampled(text):
  with serving(lambda prompt, n: 'So: ' + text) as (server, [(policy, key)]):
    said = ask(server, key, [user('x')], tools=TOOLS)
    assert said['content'] == 'So: ' + text and 'tool_calls' not in said
    ask(server, key, [user('x'), said, user('that is no call')], tools=TOOLS)
    assert not policy.prompts[1].restart


def test_tool_choice_none_and_stop_strings_shape_the_message_only():
  with serving(lambda prompt, n: 'abc END def' if n else call('ls')) as (server, [(policy, key)]):
    said = ask(server, key, [user('x')], tools=TOOLS, tool_choice='none')
    assert said['content'] == call('ls') and 'tool_calls' not in said
    status, body, _ = post(server, key, {'messages': [user('x'), said, user('y')], 'tools': TOOLS, 'stop': ['END', 'nothing']})
    assert status == 200 and body['choices'][0]['message']['content'] == 'abc ' and body['choices'][0]['finish_reason'] == 'stop'
    ask(server, key, [user('x'), said, user('y'), body['choices'][0]['message'], user('z')], tools=TOOLS)
    assert [p.restart for p in policy.prompts] == [False] * 3


def test_the_form_of_answers():
  with serving(lambda prompt, n: '<think>why</think>Well.' + call('ls')) as (server, [(policy, key)]):
    body = {
        'model': 'any', 'messages': [user('x')], 'tools': TOOLS, 'logprobs': True, 'return_token_ids': True,
        'temperature': 0.2, 'top_p': 0.9, 'odd:name': 1}
    status, whole, headers = post(server, key, body)
    choice, turn = whole['choices'][0], policy.turns[0]
    assert status == 200 and whole['object'] == 'chat.completion' and whole['model'] == 'any' and choice['finish_reason'] == 'tool_calls'
    assert headers['X-Sao-Overridden'] == 'temperature,top_p'
    assert whole['prompt_token_ids'] == list(turn.prompt_ids) and choice['token_ids'] == list(turn.ids)
    assert choice['policy_versions'] == list(turn.versions)
    assert [t['logprob'] for t in choice['logprobs']['content']] == list(turn.log_probs)
    assert whole['usage'] == {
        'prompt_tokens': len(turn.prompt_ids), 'completion_tokens': len(turn.ids), 'total_tokens': len(turn.prompt_ids) + len(turn.ids)}
    status, stream, headers = post(
        server, key, {**body, 'messages': [user('y')], 'stream': True, 'stream_options': {'include_usage': True}})
    assert headers['Content-Type'].startswith('text/event-stream')
    events = stream.decode().split('\n\n')
    assert events[-2:] == ['data: [DONE]', '']
    chunks = [json.loads(e.removeprefix('data: ')) for e in events[:-2]]
    assert {c['object'] for c in chunks} == {'chat.completion.chunk'} and len({c['id'] for c in chunks}) == 1
    deltas = [c['choices'][0]['delta'] for c in chunks[:-1]]
    assert ''.join(d.get('content') or '' for d in deltas) == 'Well.' and ''.join(d.get('reasoning_content', '') for d in deltas) == 'why'
    calls = [d['tool_calls'][0] for d in deltas if 'tool_calls' in d]
    assert calls[0]['function']['name'] == 'bash' and ''.join(c['function']['arguments'] for c in calls) == '{"command": "ls"}'
    assert chunks[-2]['choices'][0]['finish_reason'] == 'tool_calls' and chunks[-1]['choices'] == [] and chunks[-1]['usage']['total_tokens']
    assert [c['choices'][0]['finish_reason'] for c in chunks[:-2]] == [None] * (len(chunks) - 2)


def test_a_turn_that_was_cut_says_so():
  request = gateway.ChatRequest('m', (user('x'),), tools=tuple(TOOLS))
  for text, calls in (('abc', ()), (call('ls')[:-3], (tool_calls.ToolCallError('open', ''),))):
    answer = make_answer(turn_of(text, stop_reason='length'), calls, '', request)
    assert answer.finish_reason == 'length' and answer.content == text and not answer.calls


# --- Repeats, drops and further samples ------------------------------------------------------------------------------------------


def test_after_whole_delivery_the_same_request_is_another_sample():
  with serving() as (server, [(policy, key)]):
    assert [ask(server, key, [user('x')])['content'] for _ in range(3)] == ['turn 0', 'turn 1', 'turn 2']
    assert [p.restart for p in policy.prompts] == [False, True, True]
    assert len(check_record(server, policy, key)['segments']) == 3


def drop(s):
  """Closes a connection without reading what has come: the other side is told by a reset."""
  s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
  s.close()


@pytest.mark.parametrize('how', ['close', 'reset', 'unread', 'half'])
def test_who_leaves_before_the_answer_gets_it_later(how):
  gate = gateway_gate()
  with serving(gate.say) as (server, [(policy, key)]):
    body = json.dumps({'messages': [user('x')]}).encode()
    s = connect(server)
    s.sendall(head_of(key, body) + body)
    gate.wait_for(1)
    if how == 'close':
      s.close()
    elif how == 'reset':
      drop(s)
    elif how == 'half':
      s.shutdown(socket.SHUT_WR)
      assert s.recv(100) == b''
    time.sleep(0.02)
    gate.open()
    if how == 'unread':
      s.recv(50)
      drop(s)
      time.sleep(0.02)
    assert ask(server, key, [user('x')])['content'] == 'turn 0' and len(policy.turns) == 1
    assert ask(server, key, [user('x')])['content'] == 'turn 1'  # That one was delivered.
    assert check_record(server, policy, key)['counts']['repeated'] == 1


def test_a_repeat_joins_the_turn_that_is_being_sampled():
  gate = gateway_gate()
  with serving(gate.say) as (server, [(policy, key)]), concurrent.futures.ThreadPoolExecutor(4) as pool:
    asked = [pool.submit(ask, server, key, [user('x')]) for _ in range(4)]
    gate.wait_for(1)
    wait_until(lambda: record(server, key)['counts']['requests'] == 4)
    gate.open()
    assert {f.result(60)['content'] for f in asked} == {'turn 0'} and len(policy.turns) == 1


def test_other_requests_of_a_session_wait_their_turn_and_those_who_leave_are_forgotten():
  gate = gateway_gate()
  with serving(gate.say) as (server, [(policy, key)]), concurrent.futures.ThreadPoolExecutor(4) as pool:
    first = pool.submit(ask, server, key, [user('a')])
    gate.wait_for(1)
    body = json.dumps({'messages': [user('b')]}).encode()
    with connect(server) as gone:
      gone.sendall(head_of(key, body) + body)
      wait_until(lambda: record(server, key)['counts']['requests'] == 2)
    second = pool.submit(ask, server, key, [user('c')])
    wait_until(lambda: record(server, key)['counts']['requests'] == 3)
    time.sleep(0.02)
    gate.open()
    assert (first.result(60)['content'], second.result(60)['content']) == ('turn 0', 'turn 1')
    assert [p.messages[0]['content'] for p in policy.prompts] == ['a', 'c'] and policy.prompts[1].restart


def test_too_many_that_wait_and_the_end_of_a_session():
  gate = gateway_gate()
  with serving(gate.say) as (server, [(policy, key)]), concurrent.futures.ThreadPoolExecutor(80) as pool:
    futures = [pool.submit(post, server, key, {'messages': [user('x0')]})]
    gate.wait_for(1)  # This one is being sampled, and waits no more.
    futures += [pool.submit(post, server, key, {'messages': [user(f'x{i}')]}) for i in range(1, 70)]
    wait_until(lambda: record(server, key)['counts']['requests'] == 70)
    policy.session.end()
    gate.open()
    statuses = [f.result(60)[0] for f in futures]
    assert set(statuses) <= {410, 429} and statuses.count(429) == 70 - 65
    assert post(server, key, {'messages': [user('x')]})[0] == 410
    policy.session.refuse(gateway.HttpError(400, 'x'))
    policy.session.answer(make_answer(turn_of('late'), (), 'late', gateway.ChatRequest('m', (user('x'),))))  # Nobody waits, nothing breaks.


class gateway_gate:
  """A policy that waits until the gate is open."""

  def __init__(self):
    self._open, self._came = threading.Event(), threading.Semaphore(0)

  def say(self, prompt, n):
    self._came.release()
    assert self._open.wait(120.0)
    return f'turn {n}'

  def wait_for(self, count):
    for _ in range(count):
      assert self._came.acquire(timeout=60.0)

  def open(self):
    self._open.set()


# --- Many sessions ---------------------------------------------------------------------------------------------------------------


def random_text(rng):
  words = ['yes', 'no', 'ünïcode', '你好', '🎉', 'a  b', 'tab\tbed', '"quoted"', '{"json": 1}', '\\n', 'line\nbreak']
  return ' '.join(rng.choice(words) for _ in range(rng.randint(1, 6)))


def random_turn(rng):
  text = random_text(rng)
  if rng.random() < 0.3:
    text = f'<think>{random_text(rng)}</think>\n\n{text}'
  for _ in range(rng.choice([0, 0, 1, 1, 2])):
    text += '\n' + call(random_text(rng))
  if rng.random() < 0.1:
    text += '<tool_call>{"name": '
  return text


def live(server, key, rng, turns):
  """A client that changes blanks, drops connections and asks again; the number of turns that it saw."""
  messages, seen = [user(random_text(rng))], 0
  while seen < turns:
    body = {'messages': [changed(m, rng.choice(['same', 'blanks', 'calls', 'bare', 'parts'])) for m in messages], 'tools': TOOLS}
    if rng.random() < 0.3:
      data = json.dumps({**body, 'stream': rng.random() < 0.5}).encode()
      s = connect(server)
      s.sendall(head_of(key, data) + data)
      if rng.random() < 0.5:
        s.recv(rng.choice([1, 100]))  # Some of the answer, and not all of it.
      drop(s)
      if rng.random() < 0.5:
        continue
    said = ask(server, key, body.pop('messages'), **body)
    seen += 1
    messages.append(said)
    for item in said.get('tool_calls') or ():
      messages.append({'role': 'tool', 'tool_call_id': item['id'], 'content': random_text(rng)})
    if not said.get('tool_calls'):
      messages.append(user(random_text(rng)))
  return seen


def exact_sessions(count, turns, concurrent_sessions, seed=0):
  """Runs sessions that misbehave; every sampled token is recorded, each client saw what was sampled, and no segment was begun anew."""
  rng = random.Random(seed)
  left = count
  with concurrent.futures.ThreadPoolExecutor(concurrent_sessions) as pool:
    while left:
      n = min(left, concurrent_sessions)
      left -= n
      draws = [random.Random(rng.random()) for _ in range(n)]
      with serving(lambda prompt, i, draws=draws: random_turn(draws[0]), sessions=n) as (server, policies):
        futures = [pool.submit(live, server, key, random.Random(rng.random()), turns) for _, key in policies]
        seen = [f.result(600) for f in futures]
        for (policy, key), n_seen in zip(policies, seen):
          found = check_record(server, policy, key)
          assert len(policy.turns) == n_seen and len(found['segments']) == 1, (len(policy.turns), n_seen, len(found['segments']))


def test_ids_are_exact_in_sessions_that_drop_retry_and_change_blanks():
  exact_sessions(24, 3, 8)


@pytest.mark.slow
def test_ids_are_exact_in_500_sessions():
  exact_sessions(500, 4, 64, seed=1)


def test_64_sessions_at_once():
  with serving(sessions=64) as (server, policies), concurrent.futures.ThreadPoolExecutor(64) as pool:

    def talk(key):
      messages = [user('x')]
      for _ in range(2):
        messages += [ask(server, key, messages), user('go on')]
      return [m['content'] for m in messages if m['role'] == 'assistant']

    assert list(pool.map(talk, [key for _, key in policies], timeout=600)) == [['turn 0', 'turn 1']] * 64
    assert all(not p.restart for policy, _ in policies for p in policy.prompts)
