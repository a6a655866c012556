"""The openai package, unchanged, as a client of the gateway."""

import json

import openai
import pytest

from sao_jax import gateway, tool_calls
from tests.gateway_client import serving, user, wait_until

BASH = {'type': 'function', 'function': {'name': 'bash', 'description': 'Runs a command.', 'parameters': {
    'type': 'object', 'properties': {'command': {'type': 'string'}}, 'required': ['command']}}}
CALL = tool_calls.write(tool_calls.Turn('', (('bash', {'command': 'ls'}),)), 'hermes')


@pytest.fixture
def client():
  texts = ['<think>hm</think>\nI look.\n' + CALL]
  with serving(lambda prompt, n: texts[n] if n < len(texts) else f'turn {n}') as (server, [(policy, key)]):
    with openai.OpenAI(base_url=server.url, api_key=key, max_retries=0, timeout=120.0) as made:
      yield made, policy


def test_the_openai_client_plays_a_conversation(client):
  made, policy = client
  messages = [{'role': 'developer', 'content': 'x'}, user('q')]
  raw = made.chat.completions.with_raw_response.create(model='m', messages=messages, tools=[BASH], temperature=0.3, logprobs=True)
  assert raw.headers['X-Sao-Overridden'] == 'temperature'
  whole = raw.parse()
  choice = whole.choices[0]
  assert choice.finish_reason == 'tool_calls' and json.loads(choice.message.tool_calls[0].function.arguments) == {'command': 'ls'}
  assert [t.logprob for t in choice.logprobs.content] == list(policy.turns[0].log_probs) and whole.usage.completion_tokens
  messages += [choice.message, {'role': 'tool', 'tool_call_id': choice.message.tool_calls[0].id, 'content': 'a.py'}]
  text, usage = '', None
  for chunk in made.chat.completions.create(
      model='m', messages=messages, tools=[BASH], stream=True, stream_options={'include_usage': True}):
    text += ''.join(c.delta.content or '' for c in chunk.choices)
    usage = chunk.usage or usage
  assert text == 'turn 1' and usage.total_tokens
  messages += [{'role': 'assistant', 'content': text}, user('again')]
  more = made.chat.completions.create(model='m', messages=messages, tools=[BASH], extra_body={'return_token_ids': True})
  assert more.choices[0].token_ids == list(policy.turns[2].ids) and more.prompt_token_ids == list(policy.turns[2].prompt_ids)
  assert not any(p.restart for p in policy.prompts) and [len(p.messages) for p in policy.prompts] == [2, 1, 1]
  assert [m.id for m in made.models.list()] == ['policy'] and made.models.retrieve('policy').id == 'policy'


def test_the_openai_client_understands_what_is_refused(client):
  made, policy = client
  with pytest.raises(openai.BadRequestError, match='n must be 1') as caught:
    made.chat.completions.create(model='m', messages=[user('q')], n=2)
  assert caught.value.param == 'n'
  with pytest.raises(openai.AuthenticationError):
    made.with_options(api_key='sk-wrong').models.list()
  with pytest.raises(openai.NotFoundError):
    made.embeddings.create(model='m', input='x')
  policy.session.end(gateway.HttpError(400, 'Too long.', code='context_length_exceeded'))
  with pytest.raises(openai.BadRequestError) as caught:
    made.chat.completions.create(model='m', messages=[user('q')])
  assert caught.value.code == 'context_length_exceeded'


def test_an_impatient_openai_client_gets_one_sample():
  """The policy takes longer than the client waits: until it has asked again."""
  policies = []

  def say(prompt, n):
    wait_until(lambda: policies and policies[0].session.counts['repeated'])
    return f'turn {n}'

  with serving(say) as (server, [(policy, key)]):
    policies.append(policy)
    with openai.OpenAI(base_url=server.url, api_key=key, max_retries=30, timeout=0.4) as made:
      said = made.chat.completions.create(model='m', messages=[user('q')]).choices[0].message.content
    assert said == 'turn 0' and len(policy.turns) == 1 and policy.session.counts['repeated'] >= 1
