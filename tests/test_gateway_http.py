"""The gateway's HTTP: what is no request, what is too much, and what a chat request may not ask."""

import json
import re
import select
import socket
import struct
import time

import pytest

from sao_jax import gateway
from sao_jax.gateway import chat
from sao_jax.gateway.http import HttpError, HttpLimits
from tests.gateway_client import ask, connect, head_of, post, raw, serving, user, wait_until

CHAT = '/v1/chat/completions'
GOOD = json.dumps({'messages': [user('hi')]}).encode()


@pytest.fixture(scope='module')
def served():
  """Has time for everyone."""
  limits = HttpLimits(head_bytes=4096, headers=20, body_bytes=20_000, head_s=60.0, body_s=60.0)
  with serving(settings=gateway.GatewaySettings(requests_per_s=1e6, burst=10**6, http=limits)) as (server, [(_, key)]):
    yield server, key
    assert ask(server, key, [user('still there?')])['content'].startswith('turn')


@pytest.fixture(scope='module')
def hasty():
  """Waits for no one."""
  limits = HttpLimits(head_s=0.3, body_s=0.3)
  with serving(settings=gateway.GatewaySettings(http=limits)) as (server, _):
    yield server


def status_of(answer):
  found = re.match(rb'HTTP/1\.1 (\d{3}) [A-Za-z -]+\r\n', answer)
  return int(found[1]) if found else None


CLOSE = 'Connection: close\r\n'


REQUESTS = [
    (b'\x16\x03\x01\x02\x00\x01\x00\r\n\r\n', 400), (b'GARBAGE\r\n\r\n', 400), (b'\r\n\r\n', 408), (b'GET /health\r\n\r\n', 400),
    (b'GET /health HTTP/1.1\r\n\r\n', 400), (b'GET /health HTTP/2.0\r\nHost: x\r\n\r\n', 505),
    (b'GET /health HTTP/1.1\r\nHost : x\r\n\r\n', 400),
    (b'GET /health HTTP/1.1\r\nHost: x\r\n folded: y\r\n\r\n', 400), (b'GET /health HTTP/1.1\r\nHost: x\x00\r\n\r\n', 400),
    (b'GET /health HTTP/1.1\r\nHost: x\nA: b\r\n\r\n', 400), (b'GET /health HTTP/1.1\r\nHost: x\rA: b\r\n\r\n', 400),
    (b'GET /health HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n', 400), (b'G\xc3\xa4T /health HTTP/1.1\r\nHost: x\r\n\r\n', 400),
    (b'GET /he alth HTTP/1.1\r\nHost: x\r\n\r\n', 400), (b'GET /health HTTP/1.1\r\nHost: x\r\nA: ' + b' ' * 3000 + b'\x01\r\n\r\n', 400),
    (b'GET /' + b'a' * 5000 + b' HTTP/1.1\r\nHost: x\r\n\r\n', 431),
    (b'GET /health HTTP/1.1\r\nHost: x\r\nA: ' + b'b' * 5000 + b'\r\n\r\n', 431),
    (b'GET /health HTTP/1.1\r\nHost: x\r\n' + b'A: b\r\n' * 30 + b'\r\n', 431), (b'A' * 200_000, 431), (b'GET /health HTTP/1.1\r\nHo', 408),
    (b'POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n\r\n', 411),
    (b'POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n', 411),
    (b'POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\nhello', 400),
    (b'POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello', 400),
    (b'POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n', 400),
    (b'POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5, 5\r\n\r\nhello', 400),
    (b'POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: +5\r\n\r\nhello', 400),
    (b'POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n', 400),
    (b'POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 30000\r\n\r\n' + b'x' * 30000, 413),
    (b'POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 30\r\n\r\nhello', 408),
    (b'POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nExpect: magic\r\nContent-Length: 0\r\n\r\n', 417),
    (b'GET /health HTTP/1.0\r\n\r\n', 200), (b'\r\nGET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n', 200),
    (b'GET /health?x=1 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n', 200),]


@pytest.mark.parametrize('data, status', REQUESTS, ids=range(len(REQUESTS)))
def test_what_is_no_request_is_answered_and_closed(served, hasty, data, status):
  answer = raw(hasty if status == 408 else served[0], data)
  assert status_of(answer) == status and len(re.findall(rb'HTTP/1\.1 \d{3} ', answer)) == 1
  head, body = answer.split(b'\r\n\r\n', 1)
  assert b'Connection: close' in head and int(re.search(rb'Content-Length: (\d+)', head)[1]) == len(body)
  if status != 200:
    error = json.loads(body)['error']
    assert error['message'] and error['type'] == 'invalid_request_error'


def test_nothing_is_said_to_one_who_leaves(served):
  for data in (b'', b'GET /hea', b'POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\nhel'):
    with connect(served[0]) as s:
      s.sendall(data)
      s.shutdown(socket.SHUT_WR)
      answer = s.recv(65536)
      assert status_of(answer) in (None, 400)


@pytest.mark.parametrize('path, method, key, status', [
    ('/v1/nothing', 'GET', True, 404), ('/', 'GET', True, 404), ('/v1/chat/completions/', 'POST', True, 404), (CHAT, 'GET', True, 405),
    (CHAT, 'DELETE', True, 405), ('/v1/models', 'POST', True, 405), ('/health', 'OPTIONS', False, 405), ('/v1/models', 'GET', False, 401),
    (CHAT, 'POST', False, 401), ('/v1/sessions/me', 'GET', False, 401), ('/health', 'GET', False, 200), ('/v1/models', 'GET', True, 200),
    ('/v1/models/policy', 'GET', True, 200), ('/v1/sessions/me', 'GET', True, 200), ('/health', 'HEAD', False, 200)])
def test_paths_methods_and_keys(served, path, method, key, status):
  found, _, headers = post(served[0], served[1] if key else '', GOOD if method == 'POST' else None, path, method)
  assert found == status
  assert status != 405 or headers['Allow'] in ('POST', 'GET, HEAD')
  assert status != 401 or headers['WWW-Authenticate'] == 'Bearer'


@pytest.mark.parametrize('header', [
    '', 'Authorization: Bearer', 'Authorization: Bearer ', 'Authorization: Basic {key}', 'Authorization: Bearer {key}x',
    'Authorization: {key}', 'Authorization: Bearer \xe4\xf6', 'Authorization: Bearer sk-', 'Authorization: Bearer {key} {key}'])
def test_wrong_keys_are_refused(served, header):
  server, key = served
  data = f'GET /v1/models HTTP/1.1\r\nHost: x\r\n{CLOSE}{header.format(key=key)}{chr(13) + chr(10) if header else ""}\r\n'
  assert status_of(raw(server, data.encode('latin-1'))) == 401


BODIES = [
    b'', b'{', b'[]', b'null', b'"x"', b'{"messages": NaN}', b'{"messages": [], "x": Infinity}',
    b'{"messages": [], "x": 1e999}', b'\xff\xfe', b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}',
    b'[' * 15_000, b'{"a":' * 3000 + b'1' + b'}' * 3000, b'{"messages": ' + b'9' * 5000 + b'}']


@pytest.mark.parametrize('body', BODIES, ids=range(len(BODIES)))
def test_bodies_that_are_no_json_of_ours(served, body):
  status, error, _ = post(served[0], served[1], body)
  assert status == 400 and error['error']['message']


TOOL = {'type': 'function', 'function': {'name': 'f', 'parameters': {'type': 'object', 'properties': {'x': {'type': 'string'}}}}}


def tool_with(**parameters):
  return {'type': 'function', 'function': {'name': 'f', 'parameters': {'type': 'object', **parameters}}}


REFUSED = [
    ({'n': 2}, 'n'), ({'n': True}, 'n'), ({'messages': []}, 'messages'), ({'messages': 'hi'}, 'messages'), ({'messages': None}, 'messages'),
    ({'messages': [1]}, 'messages[0]'), ({'messages': [{'role': 'king', 'content': 'x'}]}, 'messages[0].role'),
    ({'messages': [{'role': 'user'}]}, 'messages[0].content'), ({'messages': [user(3)]}, 'messages[0].content'),
    ({'messages': [user([{'type': 'image_url', 'image_url': {'url': 'x'}}])]}, 'messages[0].content'),
    ({'messages': [user([{'type': 'text', 'text': 3}])]}, 'messages[0].content'), ({'messages': [user(['x'])]}, 'messages[0].content'),
    ({'messages': [user('x'), {'role': 'assistant', 'content': 'y'}]}, 'messages'),
    ({'messages': [{'role': 'assistant', 'tool_calls': {}}, user('x')]}, None),
    ({'messages': [{'role': 'assistant', 'tool_calls': [{}]}, user('x')]}, 'messages[0].tool_calls'),
    ({'messages': [{'role': 'user', 'content': 'x', 'tool_calls': [{}]}]}, 'messages[0].tool_calls'),
    ({'messages': [{'role': 'assistant', 'content': 'x', 'function_call': {}}, user('x')]}, 'messages[0].function_call'),
    ({'response_format': {'type': 'json_schema'}}, 'response_format'), ({'response_format': 'json'}, 'response_format'),
    ({'functions': []}, 'functions'), ({'modalities': ['audio']}, 'modalities'), ({'top_logprobs': 3}, 'top_logprobs'),
    ({'tool_choice': 'required'}, 'tool_choice'), ({'tool_choice': {'type': 'function'}}, 'tool_choice'), ({'max_tokens': 0}, 'max_tokens'),
    ({'max_tokens': 1.5}, 'max_tokens'), ({'max_completion_tokens': 'x'}, 'max_completion_tokens'), ({'max_tokens': True}, 'max_tokens'),
    ({'stop': ['']}, 'stop'), ({'stop': 3}, 'stop'), ({'stop': ['x'] * 50}, 'stop'), ({'stream': 1}, 'stream'),
    ({'stream_options': 1}, 'stream_options'),
    ({'logprobs': 'yes'}, 'logprobs'), ({'model': 3}, 'model'), ({'tools': {}}, 'tools'), ({'tools': [{}]}, 'tools'),
    ({'tools': [TOOL, TOOL]}, 'tools'),
    ({'tools': [{'type': 'function', 'function': {'name': 'a b'}}]}, 'tools'), ({'tools': [{'type': 'custom', 'custom': {}}]}, 'tools'),
    ({'tools': [tool_with(properties=[])]}, 'tools'), ({'tools': [tool_with(properties={'x': True})]}, 'tools'),
    ({'tools': [tool_with(properties={'x': {'type': [{}]}})]}, 'tools'), ({'tools': [tool_with(required='x')]}, 'tools'),
    ({'tools': [tool_with(properties={'x': {'enum': 3}})]}, 'tools'), ({'tools': [tool_with(additionalProperties='x')]}, 'tools')]


@pytest.mark.parametrize('others, param', REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_done_is_refused(others, param):
  with pytest.raises(HttpError) as caught:
    chat.parse(json.dumps({'messages': [user('hi')], **others}).encode())
  assert caught.value.status == 400 and (param is None or caught.value.param == param)


def test_what_is_read():
  request = chat.parse(json.dumps({
      'model': 'x', 'messages': [
          {'role': 'developer', 'content': [{'type': 'text', 'text': 'a'}, {'type': 'text', 'text': 'b'}]}, user('q'),
          {'role': 'assistant', 'content': None,
           'tool_calls': [{'id': '1', 'type': 'function', 'function': {'name': 'f', 'arguments': '{}'}}], 'refusal': None, 'audio': None},
          {'role': 'tool', 'tool_call_id': '1', 'content': 'r'}],
      'tools': [TOOL], 'max_tokens': 9, 'max_completion_tokens': 7, 'stop': 'END', 'temperature': 0.1, 'seed': None, 'user': 'me', 'odd': 1,
      'parallel_tool_calls': False, 'n': 1, 'response_format': {'type': 'text'}, 'stream': True,
      'stream_options': {'include_usage': True}}).encode())
  assert [(m['role'], m['content']) for m in request.messages] == [('system', 'ab'), ('user', 'q'), ('assistant', ''), ('tool', 'r')]
  assert request.messages[2]['tool_calls'] == (('f', '{}'),) and request.stop == ('END',) and request.max_tokens == 7
  assert request.overridden == ('odd', 'temperature', 'parallel_tool_calls') and request.stream and request.include_usage and request.calls


def test_pipelined_requests_are_answered_in_order(served):
  server, key = served
  one = head_of(key, GOOD) + GOOD
  last = f'GET /health HTTP/1.1\r\nHost: x\r\n{CLOSE}\r\n'.encode()
  answer = raw(server, one + b'GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n' + one + last)
  assert re.findall(rb'HTTP/1\.1 (\d{3})', answer) == [b'200', b'404', b'200', b'200']
  assert answer.index(b'chat.completion') < answer.index(b'/nowhere') < answer.rindex(b'chat.completion') < answer.index(b'{"status":"ok"}')


def test_a_client_that_waits_to_be_told_to_go_on(served):
  server, key = served
  with connect(server) as s:
    s.sendall(head_of(key, GOOD, extra='Expect: 100-continue\r\n'))
    assert s.recv(100) == b'HTTP/1.1 100 Continue\r\n\r\n'
    s.sendall(GOOD)
    assert status_of(s.recv(65536)) == 200


def test_slow_clients_are_ended(hasty):
  """While they still send: a byte now and then is not enough."""
  with connect(hasty) as s:
    for byte in b'GET /health HTTP/1.1\r\nA: ' + b'b' * 1000:
      s.sendall(bytes([byte]))
      if select.select([s], [], [], 0.05)[0]:
        break
    else:
      pytest.fail('all of it was waited for')
    assert status_of(s.recv(65536)) == 408


def test_connections_that_end_under_the_server_are_no_errors(caplog):
  with serving() as (server, _):
    for _ in range(20):  # Reset while they are refused.
      with connect(server) as s:
        s.sendall(b'GET /hea')
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
    idle, half = connect(server), connect(server)
    half.sendall(b'GET /hea')
    time.sleep(0.05)
  for s in (idle, half):
    s.close()
  assert not caplog.records


def test_rates_connections_and_keys_that_are_over():
  limits = HttpLimits(connections=3)
  settings = gateway.GatewaySettings(requests_per_s=0.002, burst=2, http=limits)  # The third in 500 s is too much.
  with serving(settings=settings, sessions=2) as (server, [(_, one), (_, two)]):
    found = [post(server, one, None, '/v1/models', 'GET') for _ in range(3)]
    assert [status for status, _, _ in found] == [200, 200, 429] and found[2][1]['error']['type'] == 'rate_limit_error'
    wait_s, wait_ms = (int(found[2][2][name]) for name in ('Retry-After', 'Retry-After-Ms'))
    assert 0 < wait_ms <= 500_001 and wait_s == (wait_ms - 1) // 1000 + 1
    assert post(server, two, None, '/v1/models', 'GET')[0] == 200  # Another key has its own.
    wait_until(lambda: server._http.open_connections == 0)
    held = [connect(server) for _ in range(3)]
    wait_until(lambda: server._http.open_connections == 3)
    answer = raw(server, b'GET /health HTTP/1.1\r\nHost: x\r\n\r\n')
    assert status_of(answer) == 503 and b'Retry-After: 1' in answer
    for s in held:
      s.close()
    wait_until(lambda: server._http.open_connections == 0)
    server.remove(one)
    assert post(server, one, GOOD)[0] == 410 and post(server, two, None, '/v1/models', 'GET')[0] == 200


def test_a_connection_that_says_nothing_is_closed():
  with serving(settings=gateway.GatewaySettings(http=HttpLimits(idle_s=0.3))) as (server, _):
    with connect(server) as s:
      assert s.recv(10) == b''


def test_an_address_that_is_taken_and_one_that_is_not_loopback(caplog):
  with serving() as (server, _):
    with pytest.raises(OSError, match='cannot listen on 127.0.0.1'):
      gateway.Gateway(gateway.GatewaySettings(port=server.port)).start()
  other = gateway.Gateway(gateway.GatewaySettings(host='0.0.0.0')).start()
  other.close()
  assert 'not a loopback address' in caplog.text
  for wrong in ({'port': 70_000}, {'port': True}, {'host': ''}, {'requests_per_s': 0.0}, {'burst': 0}):
    with pytest.raises(ValueError):
      gateway.GatewaySettings(**wrong)
  with pytest.raises(ValueError, match='body_bytes'):
    HttpLimits(body_bytes=0)
