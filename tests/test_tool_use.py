"""The calculator as a chat with tool calls: its answers, and a whole run with a tiny model, a small BPE and a template that rewrites history."""

import json

import jax
import numpy as np
import pytest

from sao_jax import environments, tool_calls
from sao_jax.config import ModelConfig
from sao_jax.environments import calculator
from sao_jax.environments.base import AsyncEnvironment, Environment, Observation, StepResult, Task
from sao_jax.models import conversation, pretrained, transformer
from sao_jax.episodes import actor
from tests import tokenizer_factory as factory
from tests.tiny_run import Interrupted, run


def call(left, operation, right, name='calculator'):
  return tool_calls.write(tool_calls.Turn(calls=((name, {'left': left, 'operation': operation, 'right': right}),)), 'hermes')


def task_of(expression, answer):
  return Task(0, 'train', 0, {'expression': expression, 'answer': answer, 'operations': sum(x in ('+', '-', '*') for x in expression)})


def play(texts, expression=(12, '+', 7, '*', 3), answer=33, **settings):
  """Messages that answered each turn, as (role, content), and the last result."""
  environment = environments.make('calculator', chat=True, **settings)
  act = actor(conversation.make(factory.chatml(), 'chat'), environment.tools)
  first = environment.reset(task_of(list(expression), answer))
  assert [m['role'] for m in first.messages] == ['system', 'user'] and first.messages[1]['content'] == '12+7*3'
  shown = []
  for text in texts:
    result = act(environment, text)
    shown.append([(m['role'], m['content']) for m in result.observation.messages])
    if result.terminated or result.truncated:
      break
  return shown, result


def test_an_episode():
  shown, result = play(['<think>7*3 first</think>\n\n' + call(7, '*', 3), 'So: ' + call(12, '+', 21), 'It is.\nAnswer: 33.'])
  assert shown == [[('tool', '12+21')], [('tool', '33')], []]
  assert (result.reward, result.terminated) == (1.0, True)
  assert result.metrics['tool_calls'] == 2 and result.metrics['malformed'] == 0 and result.metrics['answered_directly'] == 0
  assert play(['Answer: 32'])[1].reward == 0.0 and play(['Answer: 33'])[1].metrics['direct_success'] == 1.0


def test_several_calls_in_a_turn_are_answered_one_by_one():
  shown, _ = play([call(7, '*', 3) + '\n' + call(1, '+', 1) + call(12, '+', 21)])
  assert shown == [[('tool', '12+21'), ('tool', '2?\n12+21'), ('tool', '33')]]
  shown, result = play([call(1, '+', 1) * 12], max_calls=100)
  assert len(shown[0]) == calculator.MAX_CALLS_A_TURN + 1 and 'at most 8 calls' in shown[0][-1][1] and result.metrics['tool_calls'] == 8


@pytest.mark.parametrize('text, reason', [
    (call(7, '/', 3), 'must be one of'), (call('7', '*', 3), 'must be of type integer'), (call(7, '*', 3, name='abacus'), 'unknown tool "abacus"'),
    ('<tool_call>{"name"', 'unterminated'), ('<tool_call>7*3</tool_call>', 'not valid JSON'), ('hello', 'call the calculator'),
    ('', 'call the calculator'), ('Answer: 12.5', 'call the calculator'), ('<think>Answer: 33', 'call the calculator')])
def test_a_bad_call_is_told_and_the_third_ends_the_episode(text, reason):
  shown, result = play([text] * 5, max_malformed=3)
  assert len(shown) == 3 and all(reason in answer[0][1] and answer[0][1].startswith('error: ') for answer in shown)
  assert result.terminated and result.reward == 0.0 and result.metrics['malformed'] == 3


def test_huge_numbers_and_too_many_calls():
  shown, result = play([call(10**40, '*', 10**40)] * 9, max_calls=3)
  assert shown[0] == [('tool', '?size\n12+7*3')] and result.truncated and not result.terminated and len(shown) == 3


@pytest.mark.parametrize('make', [factory.chatml, factory.glm])
def test_demonstrations_solve_the_task_in_both_forms(make):
  chat = conversation.make(make(), 'chat')
  environment = environments.make('calculator', chat=True, demonstration_noise=0.0)
  act = actor(chat, environment.tools)
  assert chat.tool_format == ('glm' if make is factory.glm else 'hermes')
  for index in range(20):
    task = environment.sample_task(index, 'train', 0)
    environment.reset(task)
    for turn in environment.demonstration(task, np.random.default_rng(index)):
      result = act(environment, tool_calls.write(turn, chat.tool_format))
    assert result.reward == 1.0 and result.metrics['tool_calls'] == task.data['operations'] and not result.metrics['malformed']


class AsyncTool(AsyncEnvironment):
  """Answers calls from coroutines."""

  tools = ({'name': 'echo', 'parameters': {'type': 'object', 'properties': {'x': {'type': 'string'}}}},)

  async def step_calls_async(self, calls, text):
    return StepResult(Observation(messages=tuple({'role': 'tool', 'content': c.arguments['x'] + text} for c in calls)))


def test_tools_of_an_asynchronous_environment():
  environment = AsyncTool()
  act = actor(conversation.make(factory.glm(), 'chat'), environment.tools)
  result = act(environment, 'ha<tool_call>echo<arg_key>x</arg_key><arg_value>3</arg_value></tool_call>')
  assert result.observation.messages == ({'role': 'tool', 'content': '3ha'},)
  environment.close()
  with pytest.raises(NotImplementedError, match='has tools but no step_calls'):
    Environment().step_calls((), '')
  with pytest.raises(ValueError, match='must be a function with a name'):
    actor(conversation.make(factory.glm(), 'chat'), ({'x': 1},))
  strict = factory.chatml("{% for m in messages %}{% if m.role not in ('user', 'assistant') %}{{ raise_exception('no ' + m.role) }}{% endif %}"
                          "{{ m.role + m.content + '<|im_end|>' }}{% endfor %}{{ tools or '' }}")
  with pytest.raises(ValueError, match='cannot be rendered: no tool'):  # Before anything is sampled.
    actor(conversation.make(strict, 'chat'), environment.tools)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """A tiny random model with a small BPE, as a Hugging Face folder."""
  tokenizer = factory.chatml(factory.REWRITING_TEMPLATE)
  config = ModelConfig(
      vocab_size=tokenizer.vocab_size + 5, embed_dim=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, mlp_dim=64, max_length=320)
  params = jax.jit(lambda key: transformer.init(transformer.Policy, config, key))(jax.random.key(0))
  path = tmp_path_factory.mktemp('model') / 'tiny'
  pretrained.save_params(path, config, params, tokenizer)
  return str(path)


def settings(folder):
  return dict(
      model__pretrained=folder, model__tokenizer='pretrained', task__name='calculator',
      task__settings={'chat': True, 'min_operations': 1, 'max_operations': 1, 'max_operand': 30, 'demonstration_noise': 0.0},
      task__max_tokens=256, task__max_segments=2, task__max_turns=6, task__max_turn_tokens=40, learner__lengths=(256,),
      learner__batch_size=8, sampler__cache_lengths=(256,), sampler__prefill_lengths=(128,), sft__steps=60, sft__batch_size=8,
      learner__value_warmup_steps=0, rl__policy_steps=4, value_pretrain__rollouts=0, evaluation__prompts=8, evaluation__every=0,
      checkpoint__every=1)


@pytest.fixture(scope='module')
def whole(folder, tmp_path_factory):
  workdir = tmp_path_factory.mktemp('whole')
  with pytest.MonkeyPatch.context() as patch:
    return workdir, *run(workdir, patch, **settings(folder))


@pytest.mark.slow
def test_a_whole_run_with_tool_calls_and_segments(whole):
  workdir, summary, _, rows = whole
  accounting = summary['accounting']
  assert accounting['trained'] == 4 * 8  # Tickets are counted, not segments.
  assert accounting['admitted'] == accounting['trained'] + accounting['carried_over'] + sum(accounting['dropped'].values())
  trained = [row for row in rows if 'rollout/segments' in row]
  assert max(row['rollout/segments'] for row in trained) > 1.0 and max(row['environment/tool_calls'] for row in trained) > 0.2
  gaps = [row['sampler_vs_learner/log_prob_gap_max'] for row in rows if 'sampler_vs_learner/log_prob_gap_max' in row]
  assert gaps and max(gaps) < 1e-3
  samples = [json.loads(line) for path in (workdir / 'rollouts').glob('*.jsonl') for line in path.read_text().splitlines()]
  text = ''.join(s['text'] for sample in samples for s in sample['segments'])
  assert '<|im_start|>tool\n' in text and '<tool_call>' in text


@pytest.mark.slow
def test_a_run_resumed_in_the_middle_of_segments_is_the_same_run(whole, folder, tmp_path, monkeypatch):
  _, summary, state, _ = whole
  with pytest.raises(Interrupted):
    run(tmp_path, monkeypatch, stop_at=62, **settings(folder))
  resumed, resumed_state, _ = run(tmp_path, monkeypatch, **settings(folder))
  assert resumed['accounting'] == summary['accounting']
  for path, value in state.policy.items():
    np.testing.assert_array_equal(resumed_state.policy[path], value)
