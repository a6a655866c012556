"""Benchmarks run on a tiny model: what is written, resume in the middle, lost samples, the python tool, and workdirs that are only read."""

import dataclasses
import json
import os
import pathlib
import threading

import numpy as np
import pytest

from sao_jax import benchmark_run, benchmark_scores, benchmarks, environments, evaluate_run
from sao_jax.environments import base
from sao_jax.evaluation import ListFlow
from sao_jax.models import conversation
from tests import tokenizer_factory as factory
from tests.tiny_run import Interrupted, run, tiny_config

DATA = pathlib.Path(__file__).parent / 'data'
GSM8K = DATA / 'gsm8k' / 'test.jsonl'
K = 3


@dataclasses.dataclass(frozen=True)
class Verdict:
  verdict: str
  score: float = 0.0
  extracted: str | None = None
  reason: str = ''


class FakeGrader:
  """A verdict that is a function of response and answer; `fail` says which responses it cannot grade."""

  def __init__(self, fail=lambda response: None):
    self._fail, self.calls, self._lock = fail, [], threading.Lock()

  def grade(self, response, answer, *, metadata=None):
    with self._lock:
      self.calls.append((response, answer))
    assert metadata['solution']
    failure = self._fail(response)
    if isinstance(failure, Exception):
      raise failure
    if failure:
      return Verdict(failure, reason='as asked')
    number = sum(map(ord, response)) + len(answer)
    return (Verdict('right', 1.0, 'gold'), Verdict('wrong', 0.0, str(number % 3)), Verdict('no_answer'))[number % 3]


SETTINGS = dict(
    sft__steps=0, value_pretrain__rollouts=0, rl__policy_steps=0, model__max_length=1024, sampler__page_size=128, task__max_failure_share=1.0)
CONFIG = tiny_config(**SETTINGS)


def evaluate(output, *, grader=None, config=CONFIG, workdir=None, step=None, name='gsm8k', path=GSM8K, **request):
  request = benchmark_run.Request(**{'num_samples': K, 'temperature': 1.0, 'max_tokens': 6, **request})
  return benchmark_run.evaluate_benchmark(
      config, benchmarks.make(name), path, request, workdir=workdir, step=step, output=output, grader=grader or FakeGrader())


def lines(folder):
  return [json.loads(line) for line in (pathlib.Path(folder) / 'problems.jsonl').read_text().splitlines()]


def numbers(found):
  return {k: v for k, v in found.items() if k != 'output'}


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  folder = tmp_path_factory.mktemp('evaluation')
  grader = FakeGrader()
  return folder, evaluate(folder, grader=grader), grader


def test_every_problem_has_a_line_and_the_numbers_are_those_of_the_lines(whole):
  folder, found, grader = whole
  rows = sorted(lines(folder), key=lambda r: r['problem'])
  assert [r['problem'] for r in rows] == list(range(6)) and [r['answer'] for r in rows] == ['18', '3', '70000', '540', '20', '64']
  assert len(grader.calls) == 6 * K and all(len(r['samples']) == K for r in rows)
  samples = [s for r in rows for s in r['samples']]
  assert all(1 <= s['length'] <= 6 and s['truncated'] == (s['stop_reason'] == 'max_turn_tokens') for s in samples)
  assert len({s['response'] for s in samples}) > 12  # Samples of a problem have noise of their own.
  right = [sum(s['verdict'] == 'right' for s in r['samples']) for r in rows]
  assert found['avg'] == pytest.approx(np.mean(right) / K) and found['right'] == sum(right) > 0
  assert found['pass_at'][str(K)]['value'] == pytest.approx(np.mean([c > 0 for c in right]))
  assert found == json.loads((folder / 'summary.json').read_text())
  assert found['graded'] == 18 and found['lost'] == {} and found['benchmark'] == 'gsm8k' and found['policy'] == {'random': 0}


def test_a_finished_evaluation_started_again_samples_nothing(whole):
  folder, found, _ = whole
  before = (folder / 'problems.jsonl').read_bytes()
  grader = FakeGrader()
  assert evaluate(folder, grader=grader) == found and grader.calls == [] and (folder / 'problems.jsonl').read_bytes() == before


@pytest.mark.parametrize('stop_after, torn', [(1, False), (3, True), (5, True)])
def test_a_stopped_evaluation_goes_on_and_ends_alike(whole, tmp_path, monkeypatch, stop_after, torn):
  folder, found, _ = whole
  write = benchmark_run.ProblemLog.write

  def stop(self, problem, samples):
    if len(self.rows) == stop_after:
      raise Interrupted
    write(self, problem, samples)

  with monkeypatch.context() as patch:
    patch.setattr(benchmark_run.ProblemLog, 'write', stop)
    with pytest.raises(Interrupted):
      evaluate(tmp_path)
  path = tmp_path / 'problems.jsonl'
  if torn:
    path.write_bytes(path.read_bytes() + b'{"problem": 5, "id": "5", "sam')
  assert not (tmp_path / 'summary.json').exists()
  grader = FakeGrader()
  assert numbers(evaluate(tmp_path, grader=grader)) == numbers(found)
  assert len(grader.calls) == (6 - stop_after) * K
  by_problem = [sorted(lines(f), key=lambda r: r['problem']) for f in (tmp_path, folder)]
  assert by_problem[0] == by_problem[1]


@pytest.mark.parametrize('change, message', [
    (dict(num_samples=4), 'num_samples: 3 -> 4'), (dict(temperature=0.7), 'temperature: 1.0 -> 0.7'),
    (dict(max_tokens=7), 'max_tokens: 6 -> 7'),
    (dict(limit=2), 'problems: 6 -> 2'), (dict(config=dataclasses.replace(CONFIG, seed=1)), 'policy.random: 0 -> 1'),
    (dict(config=dataclasses.replace(CONFIG, evaluation=dataclasses.replace(CONFIG.evaluation, seed=5))), 'seed: 1000003 -> 5'),
    (dict(path=DATA / 'gsm8k' / 'train.jsonl'), 'data: '), (dict(name='math500', path=DATA / 'math500' / 'test.jsonl'), 'benchmark: ')])
def test_other_settings_in_the_same_folder_are_refused(whole, change, message):
  folder, _, _ = whole
  before = sorted((p.name, p.read_bytes()) for p in folder.iterdir())
  with pytest.raises(ValueError, match=f'other settings: .*{message}'):
    evaluate(folder, **change)
  assert sorted((p.name, p.read_bytes()) for p in folder.iterdir()) == before


def test_lost_samples_are_counted_by_reason_and_never_wrong(tmp_path):
  def fail(response):
    return {0: 'grader_timeout', 1: KeyError('broken'), 2: None}[len(response) % 3]
  found = evaluate(tmp_path, grader=FakeGrader(fail))
  samples = [s for r in lines(tmp_path) for s in r['samples']]
  lost = [s for s in samples if s['verdict'].startswith('grader_')]
  assert set(found['lost']) == {'grader_timeout', 'grader_error'} and sum(found['lost'].values()) == len(lost) > 2
  assert found['wrong'] == sum(s['verdict'] == 'wrong' for s in samples) and found['graded'] == 18 - len(lost)
  assert any("KeyError: 'broken'" in s['reason'] for s in lost) and all('response' in s for s in lost)


def test_a_grader_that_mostly_fails_ends_the_evaluation(tmp_path):
  with pytest.raises(RuntimeError, match='20 of the last 20 .*grader_timeout: as asked'):
    evaluate(
        tmp_path, grader=FakeGrader(lambda response: 'grader_timeout'), num_samples=8,
        config=tiny_config(**{**SETTINGS, 'task__max_failure_share': 0.5}))


def test_every_sample_lost_is_an_error_and_stays_one(tmp_path):
  for _ in range(2):
    with pytest.raises(RuntimeError, match='All 18 samples were lost: grader_timeout 18; the last one: as asked. Mend .* delete'):
      evaluate(tmp_path, grader=FakeGrader(lambda response: 'grader_timeout'))
  assert len(lines(tmp_path)) == 6 and not (tmp_path / 'summary.json').exists()


@pytest.mark.slow
def test_a_prompt_that_does_not_fit_is_lost_not_wrong(tmp_path, monkeypatch):
  monkeypatch.setattr(benchmark_run, '_context', lambda *args: 330)
  found = evaluate(tmp_path)
  long = [r['problem'] for r in lines(tmp_path) if r['samples'][0]['verdict'] == 'prompt_length']
  assert long and len(long) < 6 and found['lost'] == {'prompt_length': K * len(long)} and found['problems_lost'] == len(long)


def test_the_context_of_a_trained_model_is_kept_and_random_weights_take_any():
  for model, workdir, expected in (
      (CONFIG.model, None, 5000), (CONFIG.model, 'run', 1024), (dataclasses.replace(CONFIG.model, pretrained='x'), None, 1024)):
    assert benchmark_run._context(model, workdir, 5000) == expected


def test_greedy_has_one_sample(tmp_path):
  with pytest.raises(ValueError, match='use num_samples=1'):
    evaluate(tmp_path / 'a', temperature=0.0)
  first, again = (evaluate(tmp_path / name, temperature=0.0, num_samples=1, limit=2) for name in 'bc')
  assert numbers(first) == numbers(again) and first['samples'] == 2 and lines(tmp_path / 'b') == lines(tmp_path / 'c')


def test_code_benchmarks_have_no_majority(tmp_path):
  class Code(FakeGrader):
    def grade(self, response, answer, *, metadata=None):
      assert metadata['entry_point']
      return Verdict('right', 1.0)
  found = evaluate(tmp_path, name='humaneval', path=DATA / 'humaneval' / 'HumanEval.jsonl', grader=Code(), limit=1)
  assert found['avg'] == 1.0 and 'maj' not in found


# --- Folders ---


def test_a_damaged_line_a_foreign_folder_and_a_folder_in_use(whole, tmp_path):
  folder, _, _ = whole
  for name in ('settings.json', 'problems.jsonl'):
    (tmp_path / name).write_bytes((folder / name).read_bytes())
  text = (tmp_path / 'problems.jsonl').read_text().splitlines()
  (tmp_path / 'problems.jsonl').write_text('\n'.join([text[0], text[1][:40], *text[2:]]) + '\n')
  with pytest.raises(ValueError, match='problems.jsonl, line 2 is damaged'):
    evaluate(tmp_path)
  (tmp_path / 'run').mkdir()
  (tmp_path / 'run' / 'config.json').write_text('{}')
  with pytest.raises(ValueError, match='no folder of an evaluation'):
    evaluate(tmp_path / 'run')
  problems, _ = benchmarks.load(benchmarks.make('gsm8k'), GSM8K)
  with benchmark_run.ProblemLog(tmp_path / 'held', {'num_samples': K}, problems):
    with pytest.raises(ValueError, match='Another process'):
      evaluate(tmp_path / 'held')


LOG_SETTINGS = {'num_samples': 2, 'policy': {'pretrained': 'a', 'crc': 1}}
SAMPLE = {'verdict': 'right', 'extracted': '18', 'length': 3, 'truncated': False}
ROW = {'problem': 0, 'id': '0', 'answer': '18', 'right': 2, 'graded': 2, 'samples': [SAMPLE, SAMPLE]}


def problem_log(folder, line=None, settings=None):
  """A log on what a folder holds; no model is needed for it."""
  if line is not None:
    (folder / 'problems.jsonl').write_text(line)
  (folder / 'settings.json').write_text(json.dumps(LOG_SETTINGS) if settings is None else settings)
  return benchmark_run.ProblemLog(folder, LOG_SETTINGS, benchmarks.load(benchmarks.make('gsm8k'), GSM8K)[0])


@pytest.mark.parametrize('change, message', [
    ({'problem': 99}, 'no problem of this evaluation'), ({'problem': 0.0}, 'no problem of this'), ({'problem': [0]}, 'no problem of this'),
    ({'id': 'x'}, "problem 0 has the id '0'"), ({'answer': '19'}, "and the answer '18'"),
    *[({'samples': found}, 'must have 2 samples') for found in (
        [SAMPLE], 'ab', None, [1, 2], [{}, SAMPLE], [SAMPLE, {**SAMPLE, 'verdict': ['right']}], [SAMPLE, {**SAMPLE, 'length': -1}],
        [SAMPLE, {**SAMPLE, 'length': 'x'}], [SAMPLE, {**SAMPLE, 'extracted': None}], [SAMPLE, {**SAMPLE, 'truncated': 'no'}])]])
def test_a_line_that_is_not_of_this_evaluation_is_told(tmp_path, change, message):
  line = json.dumps({**ROW, **change}) + '\n'
  with pytest.raises(ValueError, match=f'problems.jsonl, line 1 is damaged .*{message}.*delete that line'):
    problem_log(tmp_path, line).__enter__()
  assert (tmp_path / 'problems.jsonl').read_text() == line


def test_a_line_twice_and_lines_that_are_none(tmp_path):
  good = json.dumps(ROW) + '\n'
  for text, message in (
      (good * 2, 'line 2 is damaged .problem 0 stands in a line before'), ('[' * 99_999 + '\n', 'line 1 is damaged'), ('null\n', 'line 1')):
    with pytest.raises(ValueError, match=message):
      problem_log(tmp_path, text).__enter__()


def test_a_last_line_without_its_end_is_kept_where_it_is_whole(tmp_path):
  with problem_log(tmp_path, json.dumps(ROW)) as log:
    assert list(log.rows) == [0]
  assert (tmp_path / 'problems.jsonl').read_text() == json.dumps(ROW) + '\n'
  with problem_log(tmp_path, json.dumps(ROW) + '\n' + json.dumps(ROW)[:-3]) as log:
    assert list(log.rows) == [0]
  assert (tmp_path / 'problems.jsonl').read_text() == json.dumps(ROW) + '\n'


@pytest.mark.parametrize('settings, message', [
    ('', 'settings.json is damaged'), ('[]', 'settings.json is damaged .it holds a list'), ('null', 'settings.json is damaged'),
    ('[' * 99_999, 'settings.json is damaged'),
    (json.dumps({**LOG_SETTINGS, 'policy': {'pretrained': 'b', 'crc': 1}}), "holds .* other settings: policy.pretrained: 'b' -> 'a'")])
def test_damaged_settings_and_those_of_another_model_are_told(tmp_path, settings, message):
  with pytest.raises(ValueError, match=message):
    problem_log(tmp_path, settings=settings).__enter__()
  assert (tmp_path / 'settings.json').read_text() == settings


def test_what_cannot_be_the_folder_is_told_before_anything_is_sampled(tmp_path):
  (tmp_path / 'file').write_text('x')
  for folder in (tmp_path / 'file', tmp_path / 'file' / 'x'):
    with pytest.raises(ValueError, match='cannot be a folder: it, or what it lies in, is a file'):
      evaluate(folder)
  (tmp_path / 'summary.json').mkdir()
  with pytest.raises(ValueError, match='summary.json is a folder'):
    problem_log(tmp_path).__enter__()


@pytest.mark.parametrize('settings, message', [
    ({'num_samples': 0}, 'num_samples must be from 1 to 10000, got 0'), ({'num_samples': 10**9}, 'num_samples must be from 1 to'),
    ({'max_tokens': 10**12}, 'max_tokens must be from 1 to'), ({'temperature': float('nan')}, 'temperature must be a number'),
    ({'temperature': float('inf')}, 'temperature must be a number'), ({'temperature': -1.0}, 'temperature must be a number')])
def test_requests_that_cannot_be(settings, message):
  with pytest.raises(ValueError, match=message):
    benchmark_run.Request(**{'num_samples': 1, 'temperature': 1.0, 'max_tokens': 8, **settings})


def test_the_length_of_a_prompt_counts_the_tools_it_tells_of():
  problem = benchmarks.load(benchmarks.make('gsm8k'), GSM8K)[0][0]
  form = conversation.make(factory.chatml(), 'chat')
  plain, with_tool = (benchmark_run.Request(num_samples=1, temperature=1.0, max_tokens=8, python_tool=use) for use in (False, True))
  assert plain.tools == () and [t['function']['name'] for t in with_tool.tools] == ['python']
  length = benchmark_run._prompt_length(form, 'chat', problem, with_tool.tools)
  assert length == len(form.first(list(problem.messages), with_tool.tools)) > benchmark_run._prompt_length(form, 'chat', problem, ()) + 100


def test_prompts_that_all_exceed_the_model_end_before_it_is_built(tmp_path, monkeypatch):
  monkeypatch.setattr(benchmark_run, '_context', lambda *args: 100)
  monkeypatch.setattr(evaluate_run, 'opened', None)
  with pytest.raises(ValueError, match='No problem fits: the shortest prompt has .* tokens, and the model takes 100'):
    evaluate(tmp_path)


def test_the_default_folder_is_named_by_the_settings(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  first, other = evaluate(None, limit=1), evaluate(None, limit=1, max_tokens=5)
  assert first['output'] != other['output'] and pathlib.Path(first['output']).parent == pathlib.Path('runs/evaluations')
  assert evaluate(None, limit=1) == first


# --- The python tool ---


class FakeTool(base.Environment):
  """Two turns: the first gets a result, the second is the answer."""

  name = 'python_tool'
  replayable = True

  def __init__(self, *, conversation):
    assert conversation == 'raw'

  def reset(self, task):
    self._turns = 0
    return base.Observation(task.data['messages'][0]['content'])

  def step(self, action):
    self._turns += 1
    return base.StepResult(base.Observation('\nresult: 4\n'), terminated=self._turns == 2, metrics={'success': 0.0})


@pytest.mark.slow
def test_the_python_tool_is_used_where_there_is_one(tmp_path, monkeypatch):
  monkeypatch.setattr(environments, 'REGISTRY', {k: v for k, v in environments.REGISTRY.items() if k != 'python_tool'})
  with pytest.raises(ValueError, match="needs an environment named 'python_tool', and there is none"):
    evaluate(tmp_path, python_tool=True)
  environments.register('python_tool', __name__, 'FakeTool')
  found = evaluate(tmp_path, python_tool=True, limit=2, max_tokens=40, num_samples=2)
  samples = [s for r in lines(tmp_path) for s in r['samples']]
  assert found['python_tool'] is True and len(samples) == 4
  assert all(s['turns'] == 2 or s['truncated'] for s in samples) and all('result: 4' not in s['response'] for s in samples)


@pytest.mark.slow
def test_a_policy_that_calls_the_real_tool(tmp_path, monkeypatch):
  """The sampler's text is replaced by a script, for a tiny model writes no code; the sandbox, the environment and the grading are the real ones."""
  from sao_jax.environments import python_tool
  try:
    made = python_tool.PythonTool(conversation='raw')
  except python_tool.sandbox.Unavailable as error:
    pytest.skip(str(error))
  made.close()
  seen = []
  real = python_tool.PythonTool.step

  def step(self, action):
    turn = self._turns
    seen.append((turn, real(self, '<python>x = 6\nx * 7</python>' if turn == 0 else '<python>x</python>' if turn == 1 else action)))
    return seen[-1][1]

  monkeypatch.setattr(python_tool.PythonTool, 'step', step)
  found = evaluate(tmp_path, python_tool=True, limit=2, max_tokens=60, num_samples=1)
  samples = [s for r in lines(tmp_path) for s in r['samples']]
  texts = [(turn, result.observation.text) for turn, result in seen]
  assert found['python_tool'] is True and len(samples) == 2
  assert (0, '42\n') in texts and all(text in ('42\n', '6\n', '') for _, text in texts)
  assert all(s['turns'] == 3 or s['truncated'] for s in samples)


# --- Workdirs are only read ---


def tree(folder):
  return sorted((str(p.relative_to(folder)), p.stat().st_size, p.stat().st_mtime_ns) for p in folder.rglob('*'))


@pytest.mark.slow
def test_a_run_that_goes_on_is_evaluated_and_not_touched(tmp_path, monkeypatch):
  """The workdir is locked by its run, half-written folders lie in it, and nothing of it may be written to."""
  workdir = tmp_path / 'run'
  with pytest.raises(Interrupted):
    run(workdir, monkeypatch, stop_at=8, sft__steps=10)
  os.mkdir(workdir / 'checkpoints' / '99.orbax-checkpoint-tmp')
  os.mkdir(workdir / 'checkpoints' / '1.deleting')
  before = tree(workdir)
  opened = []
  import builtins
  real = builtins.open

  def watched(file, mode='r', *args, **kwargs):
    if isinstance(file, (str, os.PathLike)) and str(file).startswith(str(workdir)) and set(mode) & set('wax+'):
      opened.append((str(file), mode))
    return real(file, mode, *args, **kwargs)

  from sao_jax import train
  config = tiny_config(sft__steps=10)
  with train.locked(workdir):
    before = tree(workdir)
    monkeypatch.setattr(builtins, 'open', watched)
    plain = evaluate_run.evaluate_run(config, workdir, step=None, prompts=4)
    found = evaluate(tmp_path / 'out', workdir=workdir, config=config, limit=2)
    monkeypatch.undo()
  assert opened == [] and tree(workdir) == before
  newest = max(int(p.name) for p in (workdir / 'checkpoints').iterdir() if p.name.isdecimal())
  assert plain['checkpoint'] == found['policy']['checkpoint'] == newest and plain['prompts'] == plain['greedy']['n'] == 4
  with pytest.raises(ValueError, match='no checkpoint 77'):
    evaluate(tmp_path / 'out2', workdir=workdir, config=config, step=77)


def test_a_prompt_that_comes_several_times_has_another_attempt_each_time():
  flow = ListFlow([(3, base.Task(3, 'test', 0, {}, attempt=i)) for i in range(2)])
  admitted = [flow.admit(0) for _ in range(3)]
  assert [(a.ticket, a.prompt_id, a.attempt) for a in admitted[:2]] == [(0, 3, 0), (1, 3, 1)] and admitted[2] is None


def test_verdicts_that_count_are_those_of_the_scores():
  assert benchmark_scores.GRADED == ('right', 'wrong', 'no_answer')
