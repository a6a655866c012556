"""The stand-alone server: conversations told apart, ended and written; a real tiny model behind `launch/serve.py`."""

import asyncio
import concurrent.futures
import json
import os
import pathlib
import signal
import subprocess
import sys
import types

import jax
import pytest

from sao_jax import gateway
from sao_jax.config import ModelConfig
from sao_jax.gateway.switchboard import Switchboard
from sao_jax.models import pretrained, transformer
from sao_jax.serve_run import ServeFlow
from tests import tokenizer_factory as factory
from tests.gateway_client import Policy, ask, post, user, wait_until

ROOT = pathlib.Path(__file__).resolve().parents[1]


def test_conversations_of_one_key_are_told_apart():
  server = gateway.Gateway().start()
  board = Switchboard(loop=server.loop)
  key, policies, taken = server.add(board), [], []
  try:
    with concurrent.futures.ThreadPoolExecutor(2) as pool:

      def begin(text):
        asked = pool.submit(ask, server, key, [user(text)])
        wait_until(lambda: taken.append(board.take()) or taken[-1] is not None)
        number = taken[-1]
        policies.append((number, Policy(board.session(number), lambda prompt, n: f'{prompt.messages[-1]["content"]}!{n}')))
        return [user(text), asked.result(60.0)]

      first, second = begin('a'), begin('b')
      assert [m['content'] for m in (first[1], second[1])] == ['a!0', 'b!0']
      for _ in range(2):  # In turns, each where it was.
        first += [user('a2')]
        first += [ask(server, key, first)]
        second += [user('b2')]
        second += [ask(server, key, second)]
      assert first[-1]['content'] == 'a2!2' and second[-1]['content'] == 'b2!2'
      again = begin('a')  # Delivered before: another conversation, and another sample.
      assert again[1]['content'] == 'a!0' and len(policies) == 3
      assert not any(p.restart for _, policy in policies for p in policy.prompts)
      found = post(server, key, None, '/v1/sessions/me', 'GET')[1]['conversations']
      assert [len(found[str(number)]['turns']) for number, _ in policies] == [3, 3, 1]
      assert not board.make_room()  # None waits for a place.
      waiting = pool.submit(post, server, key, {'messages': [user('new')]})
      wait_until(board.make_room)
      transcript = board.end(policies[0][0])  # The one that was quiet for longest.
      assert transcript['ended'] and len(transcript['turns']) == 3
      board.close()
      assert waiting.result(60.0)[0] == 410 and post(server, key, {'messages': [user('x')]})[0] == 410
  finally:
    for _, policy in policies:
      policy.close()
    server.close()


def test_a_request_that_meets_the_end_of_its_conversation_begins_another(monkeypatch):
  loop, found, real = asyncio.new_event_loop(), [], Switchboard._session_of

  def ended_just_now(self, *arguments):
    found.append(real(self, *arguments))
    if len(found) == 1:
      found[0].end()
    return found[-1]

  monkeypatch.setattr(Switchboard, '_session_of', ended_just_now)
  board = Switchboard(loop=loop)
  waiting, _ = board.ask(gateway.ChatRequest('m', (user('x'),)))
  assert not waiting.done() and len(found) == 2 and [session.over for session in found] == [True, False]
  board.close()
  with pytest.raises(gateway.HttpError, match='ending'):
    board.ask(gateway.ChatRequest('m', (user('x'),)))
  loop.close()


def test_half_a_line_of_a_server_that_was_killed_costs_no_conversation(tmp_path):
  path = tmp_path / 'out.jsonl'
  for before, after in ((None, ''), ('', ''), ('{"whole": 1}\n', '{"whole": 1}\n'), ('{"whole": 1}\n{"ha', '{"whole": 1}\n{"ha\n')):
    if before is not None:
      path.write_text(before)
    ServeFlow(None, path, 1).close()
    assert path.read_text() == after


def serve(*arguments, **variables):
  return subprocess.Popen(
      [sys.executable, str(ROOT / 'launch' / 'serve.py'), *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
      env={**os.environ, 'JAX_PLATFORMS': 'cpu', **variables})


@pytest.mark.parametrize('arguments, text', [
    ((), 'what is to be served'), (('--workdir=x', '--pretrained=y'), 'what is to be served'),
    (('--pretrained=y', '--checkpoint=1'), 'of a --workdir')])
def test_flags_that_do_not_go_together(arguments, text):
  process = serve(*arguments)
  output, errors = process.communicate(timeout=300)
  assert process.returncode == 1 and text in errors and not output


@pytest.mark.slow
def test_a_tiny_model_is_served(tmp_path):
  tokenizer = factory.chatml()
  config = ModelConfig(
      vocab_size=tokenizer.vocab_size, embed_dim=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, mlp_dim=64, max_length=256)
  params = jax.jit(lambda key: transformer.init(transformer.Policy, config, key))(jax.random.key(0))
  pretrained.save_params(tmp_path / 'model', config, params, tokenizer)
  process = serve(
      f'--pretrained={tmp_path / "model"}', '--max_tokens=256', '--max_turn_tokens=24', '--sessions=4',
      f'--output={tmp_path / "out.jsonl"}', SAO_SERVE_KEY='sk-mine')
  try:
    told = []
    while not (told and told[-1].startswith('OPENAI_API_KEY=')):
      told.append(process.stderr.readline())
      assert told[-1], ''.join(told)
    url = told[-2].strip().removeprefix('OPENAI_BASE_URL=')
    assert told[-1].strip() == 'OPENAI_API_KEY=sk-mine'
    server = types.SimpleNamespace(port=int(url.split(':')[2].split('/')[0]))

    def talk(number):
      messages, drawn = [user(f'say {number}')], []
      for _ in range(3):
        status, body, _ = post(server, 'sk-mine', {'messages': messages, 'return_token_ids': True, 'temperature': 0}, timeout=600.0)
        if status == 400:
          assert body['error']['code'] == 'context_length_exceeded'
          break
        choice = body['choices'][0]
        drawn.append((body['prompt_token_ids'], choice['token_ids']))
        messages += [choice['message'], user('and on')]
      return drawn

    with concurrent.futures.ThreadPoolExecutor(6) as pool:  # More conversations than places.
      seen = list(pool.map(talk, range(6)))
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
  finally:
    process.kill()
    process.communicate()
  summary = json.loads(output)
  written = [json.loads(line) for line in (tmp_path / 'out.jsonl').read_text().splitlines()]
  assert summary['conversations'] == len(written) and summary['policy_step'] == 0
  turns = [
      (w['tokens'][:t['start']], w['tokens'][t['start']:t['stop']])
      for w in written for t in w['turns'] if len(w['segment_starts']) == 1]
  assert sum(map(len, seen)) >= 6 and all(turn in turns for drawn in seen for turn in [(list(p), list(i)) for p, i in drawn])
  for w in written:
    assert [v for v, action in zip(w['policy_version'], w['action_mask']) if action] == [0] * sum(w['action_mask'])
