"""For tests of the gateway: a policy that answers sessions, and a client that may do what no good client does."""

import contextlib
import http.client
import json
import socket
import time

from sao_jax import gateway
from sao_jax.environments.base import SampledTurn
from sao_jax.threads import WorkerGroup
from sao_jax.tool_calls import after_thinking, parse


def turn_of(text, prompt_ids=(1, 2, 3), stop_reason='stop'):
  ids = tuple(text.encode()) or (0,)
  return SampledTurn(tuple(prompt_ids), ids, (-0.5,) * len(ids), (3,) * len(ids), text, stop_reason)


def answer_with(session, turn):
  """Sends a turn as the environment does."""
  request = session.request
  if not request.tools:
    return session.answer(gateway.make_answer(turn, (), turn.text, request))
  parsed = parse(after_thinking(turn.text), 'hermes', request.tools)
  session.answer(gateway.make_answer(turn, parsed.calls, parsed.text, request))


class Policy:
  """Answers one session in a thread: `say(prompt, number of the turn)` gives the text. Keeps prompts and turns."""

  def __init__(self, session, say):
    self.session, self.say, self.prompts, self.turns = session, say, [], []
    self.tokens = []  # Of the present segment.
    self.group = WorkerGroup()
    self.group.start('policy', self._run)

  def _run(self, stop):
    while True:
      try:
        prompt = self.session.next(3600.0, poll_s=5.0)
      except gateway.Ended:
        return
      if prompt.restart:
        self.tokens = []
      self.tokens += [300 + len(m['content']) % 50 for m in prompt.messages]
      self.prompts.append(prompt)
      turn = turn_of(self.say(prompt, len(self.turns)), tuple(self.tokens))
      self.turns.append(turn)
      self.tokens += turn.ids
      try:
        answer_with(self.session, turn)
      except RuntimeError:
        if self.session.transcript()['ended']:
          return
        raise

  def close(self):
    self.session.end()
    assert not self.group.close(60.0)
    self.group.check()


@contextlib.contextmanager
def serving(say=lambda prompt, n: f'turn {n}', *, settings=None, sessions=1):
  """(gateway, [(policy, key)]); ends all of it, and has no fault."""
  with contextlib.ExitStack() as stack:
    server = gateway.Gateway(settings or gateway.GatewaySettings(requests_per_s=1e6, burst=10**6)).start()
    stack.callback(server.close)
    policies = []
    for _ in range(sessions):
      session, key = server.open()
      policies.append((Policy(session, say), key))
      stack.callback(policies[-1][0].close)
    yield server, policies
    assert not server.faults, server.faults


def connect(server, timeout=120.0):
  return socket.create_connection(('127.0.0.1', server.port), timeout)


def head_of(key, body, path='/v1/chat/completions', method='POST', extra=''):
  return (f'{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n{extra}\r\n').encode()


def raw(server, data, timeout=120.0):
  """All that the server answers to `data` until it closes."""
  with connect(server, timeout) as s:
    with contextlib.suppress(ConnectionError):
      s.sendall(data)
    out = b''
    with contextlib.suppress(ConnectionError):
      while piece := s.recv(65536):
        out += piece
    return out


def post(server, key, value, path='/v1/chat/completions', method='POST', timeout=120.0):
  """(status, parsed body, headers)."""
  connection = http.client.HTTPConnection('127.0.0.1', server.port, timeout=timeout)
  try:
    body = value if isinstance(value, bytes) else json.dumps(value).encode() if value is not None else None
    connection.request(method, path, body, {'Authorization': f'Bearer {key}'} if key else {})
    response = connection.getresponse()
    content = response.read()
    kind = response.headers.get('Content-Type', '')
    return response.status, json.loads(content) if kind.startswith('application/json') and content else content, response.headers
  finally:
    connection.close()


def wait_until(condition):
  end = time.monotonic() + 60.0
  while not condition():
    assert time.monotonic() < end, 'deadline passed'
    time.sleep(0.005)


def user(text):
  return {'role': 'user', 'content': text}


def ask(server, key, messages, **others):
  """The message that answers."""
  status, body, _ = post(server, key, {'model': 'm', 'messages': messages, **others})
  assert status == 200, (status, body)
  return body['choices'][0]['message']

