"""mini-swe-agent, unchanged, on a small repository with a scripted policy.

It brings many packages, so it runs where SAO_MINI_PYTHON names a Python that has it. What it sent in such a run
(tests/data/gateway/mini_swe_agent.json, written anew with SAO_RECORD=1) is sent again in every run of the tests.
"""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

from sao_jax import environments, tool_calls
from sao_jax.gateway import chat
from sao_jax.rollout_check import check_rollout
from tests import tokenizer_factory as factory
from tests.gateway_client import post, serving
from tests.scripted_sampler import run_engine

RECORDED = pathlib.Path(__file__).parent / 'data' / 'gateway' / 'mini_swe_agent.json'


def bash(command, text):
  return tool_calls.write(tool_calls.Turn(text, (('bash', {'command': command}),)), 'hermes')


SCRIPT = [
    bash('ls -la && cat calc.py', 'THOUGHT: I look at the files first.'),
    bash("sed -i 's/a - b/a + b/' calc.py && python3 -c 'import calc; print(calc.add(2, 3))'",
         '<think>The sign is wrong.</think>\n\nTHOUGHT: I mend it.'),
    '<tool_call>{"name": "bash", "arguments": {"command": "ls"}</tool_call>',  # Malformed: it is left out of the history.
    bash('echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT', 'THOUGHT: It is done.')]
FILES = {'calc.py': '"""Sums."""\n\n\ndef add(a, b):\n  return a - b\n', 'README': 'Sums of numbers.\n'}


def mini_python():
  """A Python with mini-swe-agent, '' for none."""
  if os.environ.get('SAO_MINI_PYTHON'):
    return os.environ['SAO_MINI_PYTHON']
  return sys.executable if importlib.util.find_spec('minisweagent') else ''


def test_mini_swe_agent_mends_a_repository(tmp_path, monkeypatch):
  python = mini_python()
  if not python:
    pytest.skip('needs mini-swe-agent: name a Python that has it with SAO_MINI_PYTHON')
  (tmp_path / 'repo').mkdir()
  for name, text in FILES.items():
    (tmp_path / 'repo' / name).write_text(text)
  (tmp_path / 'tasks.jsonl').write_text('\n'.join(json.dumps({'issue': f'add(2, 3) gives -1. ({i})'}) for i in range(20)))
  bodies = []
  real = chat.parse
  monkeypatch.setattr(chat, 'parse', lambda body: bodies.append(json.loads(body)) or real(body))
  made = lambda: environments.make(
      'scaffold', source=str(tmp_path / 'tasks.jsonl'), workspace=str(tmp_path / 'repo'), idle_limit_s=100.0,
      command=[str(pathlib.Path(python).parent / 'mini'), '-m', 'openai/policy', '-y', '--exit-immediately', '-t', '{issue}'],
      variables={'MSWEA_CONFIGURED': 'true', 'MSWEA_COST_TRACKING': 'ignore_errors', 'LITELLM_LOCAL_MODEL_COST_MAP': 'True'},
      grade_command="python3 -c 'import calc; print(int(calc.add(2, 3) == 5))'")
  turns = iter(SCRIPT)
  task = made().sample_task(0, 'train', 0)
  flow, sampler, _ = run_engine(
      made, [task], lambda prompt, request: next(turns), deadline_s=300.0, time_limit_s=300.0, step_timeout_s=200.0)
  assert not flow.dropped
  rollout, = flow.rollouts
  assert (rollout.ending, rollout.total_reward, rollout.metrics['scaffold_failed']) == ('terminated', 1.0, 0.0)
  assert rollout.metrics['requests'] == len(SCRIPT) and rollout.metrics['malformed'] == 1 and rollout.metrics['restarts'] == 1
  assert len(rollout.segments) == 2
  assert check_rollout(rollout, oldest=3, newest=3, vocab_size=factory.chatml().vocab_size, max_length=20_000) == ''
  assert rollout.tokens[rollout.action_mask].tolist() == [i for _, ids, _ in sampler.drawn_turns[0] for i in ids]
  if os.environ.get('SAO_RECORD'):
    asked = [python, '-c', 'import minisweagent; print(minisweagent.__version__)']
    version = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()[-1]
    RECORDED.write_text(json.dumps({'mini_swe_agent': version, 'requests': [without_prompts(b) for b in bodies]}, indent=1) + '\n')


def without_prompts(body):
  """The request without the program's own texts, which tell of the machine, too."""
  messages = [
      {**m, 'content': f'({m["role"]}, {len(m["content"])} characters)'} if m['role'] in ('system', 'user') else m
      for m in body['messages']]
  return {**body, 'messages': messages}


def test_what_mini_swe_agent_sends_goes_on_but_where_it_leaves_a_turn_out():
  recorded = json.loads(RECORDED.read_text())
  assert len(recorded['requests']) == len(SCRIPT)
  with serving(lambda prompt, n: SCRIPT[n]) as (server, [(policy, key)]):
    for i, body in enumerate(recorded['requests']):
      status, answer, _ = post(server, key, body)
      assert status == 200 and (answer['choices'][0]['finish_reason'] == 'tool_calls') == (i != 2)
    assert [p.restart for p in policy.prompts] == [False, False, False, True]
    assert [[m['role'] for m in p.messages] for p in policy.prompts] == [
        ['system', 'user'], ['tool'], ['tool'], ['system', 'user', 'assistant', 'tool', 'assistant', 'tool', 'user']]
    assert [m['content'] for m in policy.prompts[3].messages if m['role'] == 'assistant'] == SCRIPT[:2]  # As sampled, reasoning and all.
