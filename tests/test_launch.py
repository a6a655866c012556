"""The entry points as a person meets them: errors in one clear message with the right status, before anything compiles; resume; results."""

import json
import math
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np
import pytest
import safetensors.numpy
from tiny_run import tiny_config
import tokenizer_factory as factory

from sao_jax import config as settings
from sao_jax import evaluate_run, evaluation, report, train
from sao_jax.parts import Parts

ROOT = pathlib.Path(__file__).resolve().parents[1]
CACHE = tempfile.TemporaryDirectory()
TINY = '--config=configs/tiny_debug.py'
FAST = ('--config.sft.steps=4', '--config.rl.policy_steps=3', '--config.evaluation.prompts=8', '--config.evaluation.every=0')


def launch(script: str, *arguments: str | bytes, timeout: float = 1800, **environment: str) -> subprocess.CompletedProcess:
  """Runs a script of launch/ in the repository root, with one CPU device; the runs of this module share what they compile."""
  env = {k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'} | {
      'JAX_PLATFORMS': 'cpu', 'JAX_COMPILATION_CACHE_DIR': CACHE.name, 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0', **environment}
  return subprocess.run(
      [sys.executable, str(ROOT / 'launch' / script), *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout, env=env,
      stdin=subprocess.DEVNULL, check=False)


def assert_told(done: subprocess.CompletedProcess, *texts: str, status: int) -> None:
  """One clear message on standard error that holds `texts`, no traceback, nothing on standard output, and the right status."""
  assert done.returncode == status, done.stderr
  assert 'Traceback' not in done.stderr and done.stdout == ''
  assert done.stderr.count('Error') >= 1 and len(done.stderr.splitlines()) <= 6, done.stderr
  for text in texts:
    assert text in done.stderr, done.stderr


# --- The command line ---

CONFIG_FILES = {
    'NO_GET': 'x = 1', 'DICT': 'def get_config(): return {"seed": 1}', 'NONE': 'def get_config(): return None',
    'WRONG': 'def get_config():\n  import os\n  return os.nothing',
    'RAISES': 'def get_config(): raise ValueError("depth must be 3")'}


@pytest.mark.parametrize('script', ['train.py', 'evaluate.py'])
def test_help_needs_no_jax(script, tmp_path):
  (tmp_path / 'jax.py').write_text('raise SystemExit("jax was imported")')
  done = launch(script, '--help', PYTHONPATH=str(tmp_path))
  assert done.returncode == 0 and '--workdir' in done.stdout and '--config' in done.stdout and done.stderr == ''


@pytest.mark.parametrize('arguments, text', [
    ([], '--config'),
    ([TINY], '--workdir'),
    (['--workdir=W', '--config=configs/none.py'], "No such file or directory: 'configs/none.py'"),
    (['--workdir=W', '--config=requirements.txt'], 'SyntaxError'),
    (['--workdir=W', TINY, '--wrkdir=x'], "'wrkdir'"),
    (['--workdir=W', TINY, 'learner.batch_size=3'], 'learner.batch_size=3'),
    (['--workdir=W', TINY, '--config.learner.batchsize=3'], 'unknown setting learner.batchsize; known here: balance_coefficient, batch_size'),
    (['--workdir=W', TINY, '--config.trainer.steps=3'], 'unknown setting trainer; known here: algorithm'),
    (['--workdir=W', '--config=NO_GET'], 'the config file must define get_config()'),
    (['--workdir=W', '--config=DICT'], 'must return an ml_collections.ConfigDict, got dict'),
    (['--workdir=W', '--config=NONE'], 'returned None; it must return an ml_collections.ConfigDict'),
    (['--workdir=W', '--config=WRONG'], "the config file raised AttributeError: module 'os' has no attribute 'nothing'"),
    (['--workdir=W', '--config=RAISES'], 'the config file raised ValueError: depth must be 3'),
    (['--workdir=W', TINY, '--config.learner.batch_size=many'], 'many'),
    (['--workdir=W', TINY, '--config.learner.batch_size=1.5'], '1.5'),
    (['--workdir=W', TINY, '--config.algorithm.gamma=high'], 'high'),
    (['--workdir=W', TINY, '--config.model.qk_norm=perhaps'], 'perhaps'),
    (['--workdir=W', TINY, '--config.learner=3'], 'not a dict'),
])
def test_wrong_command_line(arguments, text, tmp_path):
  (tmp_path / 'jax.py').write_text('raise SystemExit("jax was imported")')
  for name, body in CONFIG_FILES.items():
    (tmp_path / f'{name}.py').write_text(body)
  arguments = [a.replace('=W', f'={tmp_path / "work"}') if a == '--workdir=W' else a for a in arguments]
  arguments = [f'--config={tmp_path / a[9:]}.py' if a[9:] in CONFIG_FILES else a for a in arguments]
  assert_told(launch('train.py', *arguments, PYTHONPATH=str(tmp_path)), text, status=2)
  assert not (tmp_path / 'work').exists()


@pytest.mark.parametrize('form', ['--config={}', '--config={}:word', '--config {}'])
def test_a_config_file_finds_the_modules_beside_it(form, tmp_path):
  (tmp_path / 'mine.py').write_text('WORD = "found beside it"')
  (tmp_path / 'json.py').write_text('WORD = "hides the one of Python"')
  (tmp_path / 'settings.py').write_text('import json, mine\ndef get_config(word=""): raise ValueError(getattr(json, "WORD", mine.WORD))')
  done = launch('evaluate.py', *form.format(tmp_path / 'settings.py').split(' '))
  assert_told(done, 'Error in the command line: the config file raised ValueError: found beside it', status=2)


@pytest.mark.parametrize('override, text', [
    ('learner.lengths=(8,4)', 'learner.lengths must be positive and strictly increasing'),
    ('learner.micro_batches=3', 'multiple of learner.micro_batches: got 8 and 3'),
    ('learner.mesh=(16,1,1,1,1)', 'multiple of the data and fsdp axes'),
    ('sampler.temperature=0.0', 'sampler.temperature must be above 0'),
    ('sampler.top_p=0.9', 'sampler.top_p must be 1 in training'),
    ('learner.policy.learning_rate=nan', 'finite'),
    ('model.head_dim=3', 'even'),
])
def test_impossible_settings_end_before_jax_is_loaded(override, text, tmp_path):
  (tmp_path / 'jax.py').write_text('raise SystemExit("jax was imported")')
  done = launch('train.py', TINY, f'--workdir={tmp_path / "work"}', f'--config.{override}', PYTHONPATH=str(tmp_path))
  assert_told(done, text, status=1)
  assert not (tmp_path / 'work').exists()


@pytest.mark.slow
@pytest.mark.parametrize('override, text', [
    ('algorithm.objective=trpo', 'algorithm.objective must be one of'),
    ('task.name=chess', 'chess'),
    ("task.settings={'digits':3}", 'digits'),
    ('task.settings.digits=3', 'digits'),
    ('task.settings.max_value=3', 'max_value'),  # Not in the config file, but known to the environment, which judges it.
    ('task.settings.operators=%', 'operators'),
    ("task.settings={'min_operations':0}", 'min_operations'),
    ('learner.devices=(0,99)', '99'),
    ('learner.mesh=(2,1,1,1,1)', 'learner.mesh'),
    ('model.pretrained=/no/such/model.gguf', '/no/such/model.gguf'),
])
def test_settings_that_do_not_fit_the_machine_or_the_task(override, text, tmp_path):
  extra = ['--config.sampler.devices=(0,99)'] if 'devices' in override else []
  done = launch('train.py', TINY, f'--workdir={tmp_path / "work"}', f'--config.{override}', *extra)
  assert_told(done, text, status=1)
  assert not (tmp_path / 'work' / 'metrics.jsonl').exists()


def test_debug_shows_the_traceback(tmp_path):
  done = launch('train.py', TINY, f'--workdir={tmp_path}', '--config.sampler.top_p=0.9', '--debug')
  assert done.returncode == 1 and 'Traceback' in done.stderr and 'Error: sampler.top_p' in done.stderr


def test_evaluate_tells_what_is_missing(tmp_path):
  assert_told(launch('evaluate.py'), 'Give --workdir', status=1)
  assert_told(launch('evaluate.py', f'--workdir={tmp_path}'), 'config.json does not exist', status=1)
  assert_told(launch('evaluate.py', TINY, '--task_settings=3'), '--task_settings must be a Python dictionary', status=1)
  assert_told(launch('evaluate.py', TINY, '--task_settings={1: 2}'), 'must have names of settings as keys, in quotes: got 1', status=1)
  for text, told in (
      ('[1, 2]', 'it holds a list, not settings'), ('{"task": 3}', "it has no section of settings 'model'"), ('{', 'damaged')):
    (tmp_path / 'config.json').write_text(text)
    assert_told(launch('evaluate.py', f'--workdir={tmp_path}'), 'config.json is damaged', told, status=1)
  assert_told(launch('evaluate.py', TINY, '--num_prompts=0'), 'num_prompts', status=2)


def break_weights(folder):
  path = folder / 'model.safetensors'
  path.write_bytes(path.read_bytes()[:-10])


def break_shape(folder):
  path = folder / 'config.json'
  path.write_text(json.dumps({**json.loads(path.read_text()), 'intermediate_size': 40}))


def break_template(folder):
  path = folder / 'tokenizer_config.json'
  path.write_text(json.dumps({**json.loads(path.read_text()), 'chat_template': '{% for m in'}))


def explode_template(folder):
  path = folder / 'tokenizer_config.json'
  path.write_text(json.dumps({**json.loads(path.read_text()), 'chat_template': "{{ messages[0].content }}{{ 'a' * 10**10 }}"}))


@pytest.mark.slow
@pytest.mark.parametrize('script, spoil, text', [
    ('train.py', break_weights, 'model.safetensors is cut short'),
    ('train.py', break_shape, 'model.layers.0.mlp.gate_proj.weight (48, 32) instead of (40, 32)'),
    ('evaluate.py', break_weights, 'model.safetensors is cut short'),
    ('evaluate.py', break_template, 'The chat template cannot be rendered'),
    ('evaluate.py', explode_template, 'The chat template was stopped: more memory')])
def test_a_broken_model_is_told_before_anything_is_compiled(script, spoil, text, tmp_path):
  folder = tmp_path / 'model'
  shutil.copytree(ROOT / 'tests' / 'goldens' / 'tiny_llama', folder)
  factory.write_folder(
      folder, factory.small_backend(('</s>',)), tokenizer_config={'eos_token': '</s>', 'chat_template': '{{ messages[0].content }}'})
  tensors = safetensors.numpy.load_file(folder / 'model.safetensors')
  for name in ('model.embed_tokens.weight', 'lm_head.weight'):
    tensors[name] = np.zeros((500, 32), np.float32)
  safetensors.numpy.save_file(tensors, folder / 'model.safetensors')
  settings = json.loads((folder / 'config.json').read_text())
  (folder / 'config.json').write_text(json.dumps({**settings, 'vocab_size': 500}))
  spoil(folder)
  (tmp_path / 'compiled').mkdir()
  arguments = {
      'train.py': [TINY, f'--workdir={tmp_path / "work"}', f'--config.model.pretrained={folder}', '--config.model.tokenizer=pretrained'],
      'evaluate.py': [*BENCHMARK, f'--pretrained={folder}', f'--output={tmp_path / "out"}']}[script]
  done = launch(script, *arguments, JAX_COMPILATION_CACHE_DIR=str(tmp_path / 'compiled'))
  assert_told(done, text, status=1)
  assert not list((tmp_path / 'compiled').iterdir())


BENCHMARK = ('--benchmark=gsm8k', f'--benchmark_path={ROOT / "tests" / "data" / "gsm8k" / "test.jsonl"}')


@pytest.mark.parametrize('arguments, text', [
    (['--benchmark=gsm9k', '--benchmark_path=x.jsonl', TINY], "Unknown benchmark 'gsm9k'; known: aime, beyondaime"),
    (['--benchmark=gsm8k', TINY], 'Give --benchmark_path'),
    (['--benchmark=gsm8k', '--benchmark_path=none.jsonl', TINY], 'none.jsonl'),
    (['--benchmark=math500', BENCHMARK[1], TINY], "test.jsonl, line 1: has no field 'problem'"),
    ([BENCHMARK[1], TINY], '--benchmark_path is for a benchmark'),
    (['--num_samples=2', TINY], '--num_samples is for a benchmark'),
    ([*BENCHMARK, TINY, '--num_prompts=4'], '--num_prompts is for held-out prompts'),
    ([*BENCHMARK, TINY, '--task=calculator'], '--task is for held-out prompts'),
    (BENCHMARK, 'Give --workdir'),
    ([*BENCHMARK, '--workdir=w', '--pretrained=p'], 'not both'),
    ([*BENCHMARK, TINY, '--checkpoint=3'], '--checkpoint is that of a --workdir'),
    (['--pretrained=p'], 'what is to be evaluated?'),
    ([*BENCHMARK, '--workdir=no/such'], 'config.json does not exist'),
])
def test_wrong_evaluations_are_told_before_jax_is_loaded(arguments, text, tmp_path):
  (tmp_path / 'jax.py').write_text('raise SystemExit("jax was imported")')
  assert_told(launch('evaluate.py', *arguments, PYTHONPATH=str(tmp_path)), text, status=1)


@pytest.mark.parametrize('arguments, text', [
    (['--num_samples=0'], 'num_samples'), (['--limit=0'], 'limit'), (['--max_tokens=0'], 'max_tokens'),
    (['--temperature=-1'], 'temperature'),
    (['--slots=no'], 'slots')])
def test_flags_of_a_benchmark_have_ranges(arguments, text):
  assert_told(launch('evaluate.py', *BENCHMARK, TINY, *arguments), text, status=2)


@pytest.mark.slow
@pytest.mark.parametrize('arguments, text', [
    (['--temperature=0', '--num_samples=2'], 'use num_samples=1'), (['--pretrained=/no/such'], "/no/such"),
    (['--output=tests'], 'no folder of an evaluation')])
def test_evaluations_that_cannot_be_are_told(arguments, text):
  settings = [] if 'pretrained' in arguments[0] else [TINY]
  assert_told(launch('evaluate.py', *BENCHMARK, *settings, *arguments), text, status=1)


@pytest.mark.slow
def test_a_killed_benchmark_goes_on(tmp_path):
  """Killed (-9) as soon as two problems are written; the rest of the same command gives what an uninterrupted one gives."""
  command = [*BENCHMARK, TINY, '--config.model.max_length=1024', '--num_samples=2', '--max_tokens=8', '--slots=2']
  whole = launch('evaluate.py', *command, f'--output={tmp_path / "whole"}')
  assert whole.returncode == 0, whole.stderr
  env = {k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'} | {
      'JAX_PLATFORMS': 'cpu', 'JAX_COMPILATION_CACHE_DIR': CACHE.name, 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0'}
  path = tmp_path / 'cut' / 'problems.jsonl'
  child = subprocess.Popen(
      [sys.executable, str(ROOT / 'launch' / 'evaluate.py'), *command, f'--output={tmp_path / "cut"}'], cwd=ROOT, env=env,
      stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
  until = time.monotonic() + 1200
  while time.monotonic() < until and child.poll() is None and not (path.exists() and path.read_bytes().count(b'\n') >= 2):
    time.sleep(0.001)
  child.kill()
  child.wait(300)
  written = path.read_bytes()
  assert 2 <= written.count(b'\n') <= 6
  done = launch('evaluate.py', *command, f'--output={tmp_path / "cut"}')
  assert done.returncode == 0, done.stderr
  assert path.read_bytes().startswith(written[:written.rfind(b'\n') + 1])
  found, expected = json.loads(done.stdout), json.loads(whole.stdout)
  assert found.pop('output') != expected.pop('output') and found == expected
  assert found['graded'] == 12 and 0 <= found['avg_low'] <= found['avg'] <= found['avg_high'] <= 1 and found['length']['max'] <= 8
  for text in ('avg@2', 'pass@1', 'pass@2', 'maj@2', 'truncated', 'lost samples'):
    assert text in done.stderr
  assert_told(launch('evaluate.py', *command, '--seed=3', f'--output={tmp_path / "cut"}'), 'seed: 1000003 -> 3', status=1)


# --- Standard streams, workdirs, signals ---


def python(code: str, redirection: str = '') -> subprocess.CompletedProcess:
  """Runs `code` with launch/ on its path, through a shell that redirects."""
  command = f'exec "$0" -c "$1" {redirection}'
  code = f'import sys; sys.path[:0] = [{str(ROOT / "launch")!r}, {str(ROOT)!r}]; import command_line; {code}'
  return subprocess.run(
      ['bash', '-c', command, sys.executable, code], capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL, check=False,
      env={k: v for k, v in os.environ.items() if k != 'PYTHONUNBUFFERED'})


@pytest.mark.parametrize('redirection', [
    '', '>&-', '2>&-', '>&- 2>&-', '>/dev/full', '2>/dev/full', '>/dev/full 2>/dev/full', '<&- >&- 2>&-'])
def test_the_exit_status_is_the_same_wherever_output_goes(redirection):
  for prepare in ('', 'command_line.open_standard_streams(); ', 'print("pending", end=""); '):
    done = python(f'{prepare}command_line.say("told"); command_line.leave(143)', redirection)
    assert done.returncode == 143 and 'Traceback' not in done.stderr
    assert ('told' in done.stderr) == ('2>' not in redirection)


@pytest.mark.parametrize('redirection', ['', '2>&-', '2>/dev/full', '>&- 2>/dev/full'])
def test_a_main_that_ends_well_has_status_0(redirection):
  code = 'sys.argv = ["x"]; command_line.run(lambda: (command_line.say("told"), command_line.answer("x", "")), "usage")'
  done = python(code, redirection)
  assert done.returncode == 0 and done.stdout == ('' if '>&- 2' in redirection else 'x\n')


def test_an_error_is_told_once_without_standard_output(tmp_path):
  command = f'exec "$0" launch/train.py {TINY} --workdir={tmp_path} --config.sampler.top_p=0.9 >&-'
  done = subprocess.run(['bash', '-c', command, sys.executable], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
  assert_told(done, 'sampler.top_p must be 1', status=1)


def test_a_result_that_cannot_be_written_is_told():
  done = python('command_line.answer("x" * 10000, "It is saved in W.")', '>/dev/full')
  assert done.returncode == 1
  assert done.stderr == 'Error: standard output could not be written (No space left on device). It is saved in W.\n'
  done = python('import os; r, w = os.pipe(); os.close(r); os.dup2(w, 1); command_line.answer("x", "It is saved in W.")')
  assert done.returncode == 1 and 'Broken pipe' in done.stderr and 'Traceback' not in done.stderr
  assert python('command_line.open_standard_streams(); command_line.answer("x", "")', '>&-').returncode == 0


def test_closed_streams_get_no_other_file(tmp_path):
  path = tmp_path / 'file'
  code = f'command_line.open_standard_streams(); import os; f = open({str(path)!r}, "w"); os.write(1, b"a"); os.write(2, b"b"); f.close()'
  assert python(code, '<&- >&- 2>&-').returncode == 0 and path.read_text() == ''


def test_what_the_system_said_is_told_once():
  code = """
sys.argv = ['x']
command_line.flags.FLAGS(sys.argv)
class Late:
  exc_type, exc_value = RuntimeError, RuntimeError('Event loop is closed')
command_line._show_unless_late(Late)
with command_line.reported_errors(None):
  try:
    raise ValueError('raw')
  except ValueError as error:
    raise OSError('A checkpoint could not be written: No space left on device.') from error
"""
  assert python(code).stderr == 'Error: OSError: A checkpoint could not be written: No space left on device.\n'


def test_half_a_traceback_is_removed(tmp_path):
  code = f"""
import pathlib
def full(self, *args, **kwargs):
  self.touch()
  raise OSError(28, 'No space left on device')
pathlib.Path.write_text = full
sys.argv = ['x']
command_line.flags.FLAGS(sys.argv)
with command_line.reported_errors(pathlib.Path({str(tmp_path)!r})):
  raise ValueError('the cause')
"""
  done = python(code)
  assert done.returncode == 1 and 'Error: the cause' in done.stderr and 'could not be written' in done.stderr
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('script', ['train.py', 'evaluate.py'])
@pytest.mark.parametrize('module', ['absl', 'ml_collections'])
def test_a_python_without_the_requirements_is_told(script, module, tmp_path):
  (tmp_path / f'{module}.py').write_text(f'raise ModuleNotFoundError("No module named {module!r}", name={module!r})')
  done = launch(script, '--help', PYTHONPATH=str(tmp_path))
  assert_told(done, f'{module} is not installed in {sys.executable}', '.venv/bin/python', '-r requirements.txt', status=1)


def test_a_python_without_jax_is_told(tmp_path):
  (tmp_path / 'jax.py').write_text('raise ModuleNotFoundError("No module named \'jax\'", name="jax")')
  done = launch('train.py', TINY, f'--workdir={tmp_path / "work"}', PYTHONPATH=str(tmp_path))
  assert_told(done, "No module named 'jax'", f'not installed in {sys.executable}', '-r requirements.txt', status=1)


@pytest.mark.parametrize('script', ['train.py', 'evaluate.py'])
def test_names_that_are_no_folder(script):
  assert_told(launch(script, TINY, '--workdir='), '--workdir must name a folder, got an empty name', status=1)
  plain = {'LC_ALL': 'C', 'PYTHONUTF8': '0', 'PYTHONCOERCECLOCALE': '0'}
  assert_told(launch(script, TINY, '--workdir=/tmp/lä/none', **plain), 'Set PYTHONUTF8=1 or LC_ALL=C.UTF-8', status=1)
  assert_told(launch(script, TINY, b'--workdir=/tmp/\xff\xfe'), 'this locale cannot write', status=1)


def test_the_current_folder_is_not_moved(tmp_path):
  (tmp_path / 'config.json').write_text('{}')
  for name in ('.', str(tmp_path), '..'):
    code = f'import os, pathlib; os.chdir({str(tmp_path)!r}); command_line.keep_previous(pathlib.Path({name!r}), dict(seed=1))'
    done = python(code)
    assert done.returncode == (0 if name == '..' else 1), done.stderr
    assert name == '..' or 'cannot move' in done.stderr
  assert (tmp_path / 'config.json').exists()


def test_a_first_start_that_was_refused_binds_nobody(tmp_path):
  too_large = {'sampler__sessions': 1_000_000, 'task__max_tokens': 500}
  for wrong in ({'algorithm__objective': 'trpo'}, {'task__settings': {'digits': 3}}, too_large):
    changes = {'model__num_kv_heads': 2, 'model__head_dim': 512, 'learner__lengths': (512,), 'sampler__cache_lengths': (), **wrong}
    with pytest.raises(ValueError):
      train.run(tiny_config(**changes), tmp_path)
    assert not (tmp_path / 'config.json').exists()


def test_settings_bind_once_something_was_trained(tmp_path):
  report.write_json(tmp_path / 'config.json', settings.to_dict(tiny_config(seed=1)))
  (tmp_path / 'checkpoints').mkdir()
  (tmp_path / 'metrics.jsonl').write_text('')
  train.compare_settings(tiny_config(seed=2), tmp_path)
  (tmp_path / 'metrics.jsonl').write_text('{}\n')
  with pytest.raises(settings.Refused, match='seed: 1 -> 2'):
    train.compare_settings(tiny_config(seed=2), tmp_path)
  (tmp_path / 'metrics.jsonl').unlink()
  (tmp_path / 'checkpoints' / '3').mkdir()
  with pytest.raises(settings.Refused, match='seed: 1 -> 2'):
    train.compare_settings(tiny_config(seed=2), tmp_path)
  train.compare_settings(tiny_config(seed=1), tmp_path)
  older = settings.to_dict(tiny_config(seed=1))
  del older['seed'], older['algorithm']['gamma'], older['learner']['balance_coefficient']
  report.write_json(tmp_path / 'config.json', older)
  train.compare_settings(tiny_config(), tmp_path)  # What it lacks came later, and has its default.
  train.write_settings(tiny_config(), tmp_path)
  assert 'seed' not in report.read_settings(tmp_path / 'config.json')
  with pytest.raises(settings.Refused, match='seed: 0 -> 2'):
    train.compare_settings(tiny_config(seed=2), tmp_path)
  report.write_json(tmp_path / 'config.json', [])
  with pytest.raises(ValueError, match='it holds a list, not settings'):
    train.compare_settings(tiny_config(seed=1), tmp_path)


@pytest.mark.parametrize('name, is_folder', [
    *((name, True) for name in ('config.json', 'lock', 'ledger.jsonl', 'metrics.jsonl', 'learning_curve.png', 'summary.json')),
    *((name, False) for name in ('tensorboard', 'checkpoints', 'rollouts'))])
def test_a_folder_in_the_place_of_a_file_is_told(name, is_folder, tmp_path):
  (tmp_path / name).mkdir() if is_folder else (tmp_path / name).write_text('')
  with pytest.raises(OSError, match=f'{name} is a (file|folder), and a run keeps a (file|folder) of that name there; move it away'):
    with train.locked(tmp_path):
      pass


def test_a_workdir_that_cannot_be_one_is_told(tmp_path, monkeypatch):
  (tmp_path / 'file').write_text('')
  for path in (tmp_path / 'file', tmp_path / 'file' / 'run'):
    with pytest.raises(OSError, match='cannot be a workdir: it, or what it lies in, is a file; choose another'):
      with train.locked(path):
        pass

  def denied(*args, **kwargs):
    raise PermissionError(13, 'Permission denied')

  monkeypatch.setattr('builtins.open', denied)
  with pytest.raises(OSError, match='cannot be a workdir: Permission denied; make it writable, or choose another'):
    with train.locked(tmp_path):
      pass


def test_every_prompt_lost_is_an_error(monkeypatch):
  none = evaluation.Evaluation(math.nan, math.nan, math.nan, math.nan, 0, {'environment_error': 7}, {}, math.nan, [])
  monkeypatch.setattr(evaluate_run, 'policy_of', lambda parts, step: ({'checkpoint': None, 'stage': 'start', 'policy_step': 0}, None))
  monkeypatch.setattr(Parts, 'evaluate', lambda self, *args, **kwargs: {'temperature_1': none, 'greedy': none})
  with pytest.raises(RuntimeError, match=r'All prompts were lost \(temperature_1\): environment_error 7. Mend'):
    evaluate_run.evaluate_run(tiny_config(), None, step=None, prompts=7)


@pytest.mark.slow
def test_the_workdir_of_another_process_is_left_alone(tmp_path):
  with train.locked(tmp_path):
    assert_told(launch('train.py', TINY, f'--workdir={tmp_path}'), 'Another process is running in', status=1)
  report.write_json(tmp_path / 'config.json', settings.to_dict(tiny_config()))
  (tmp_path / 'checkpoints' / '1').mkdir(parents=True)
  done = launch('train.py', TINY, f'--workdir={tmp_path}')
  assert_told(done, 'holds a run with other settings', status=1)
  assert 'caused by' not in done.stderr and sorted(p.name for p in tmp_path.iterdir()) == ['checkpoints', 'config.json', 'lock']


@pytest.mark.slow
@pytest.mark.parametrize('signum, name', [(signal.SIGINT, 'Ctrl-C'), (signal.SIGTERM, 'SIGTERM')])
def test_the_first_signal_saves(signum, name, tmp_path):
  env = {k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'} | {
      'JAX_PLATFORMS': 'cpu', 'JAX_COMPILATION_CACHE_DIR': CACHE.name, 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0'}
  before = signal.signal(signal.SIGINT, signal.default_int_handler)  # Ignored here, it would be ignored there.
  try:
    child = subprocess.Popen(
        [sys.executable, str(ROOT / 'launch' / 'train.py'), TINY, f'--workdir={tmp_path}', '--config.sft.steps=100000',
         '--config.checkpoint.every=100000'],
        cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)
  finally:
    signal.signal(signal.SIGINT, before)
  until = time.monotonic() + 1200
  while time.monotonic() < until and child.poll() is None and not (
      (tmp_path / 'metrics.jsonl').exists() and (tmp_path / 'metrics.jsonl').read_bytes().count(b'\n') >= 2):
    time.sleep(0.01)
  child.send_signal(signum)
  _, told = child.communicate(timeout=1200)
  assert child.returncode == 128 + signum, told
  assert f'{name}: stopped after step' in told and 'Traceback' not in told
  assert ('stopping after this step; press Ctrl-C again' in told) == (signum == signal.SIGINT)
  assert [p.name for p in (tmp_path / 'checkpoints').iterdir()] == ['1']


def test_the_second_signal_ends_at_once():
  code = """
import os, signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv = ['x']
command_line.flags.FLAGS(sys.argv)
with command_line.reported_errors(None):
  with command_line.stop_on_signals() as stop:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.1)
    assert stop.is_set() and stop.status == 130
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(100)
"""
  done = python(code)
  assert done.returncode == 130 and done.stderr.count('stopping after this step') == 1 and 'Stopped. Run the same' in done.stderr


def test_a_signal_that_comes_while_the_event_is_waited_for():
  code = """
import faulthandler, os, signal, time
faulthandler.dump_traceback_later(400, exit=True)  # A lock taken twice by one thread is never freed.
parent = os.getpid()
for i in range(1000):
  with command_line.stop_on_signals() as stop:
    if not (child := os.fork()):
      time.sleep(i % 50 * 1e-5)
      os.kill(parent, signal.SIGTERM)
      os._exit(0)
    while not stop.is_set():
      stop.wait(1e-6)
    assert stop.wait() and stop.wait(0.0)
    os.waitpid(child, 0)
print('done')
"""
  done = python(code)
  assert done.returncode == 0 and done.stdout == 'done\n', done.stderr


# --- Whole runs ---


@pytest.fixture(scope='module')
def finished(tmp_path_factory) -> tuple[pathlib.Path, subprocess.CompletedProcess]:
  workdir = tmp_path_factory.mktemp('runs') / 'tiny'
  done = launch('train.py', TINY, f'--workdir={workdir}', *FAST, '--config.checkpoint.keep=3')
  assert done.returncode == 0, done.stderr
  return workdir, done


@pytest.mark.slow
def test_a_run_leaves_what_the_readme_says(finished):
  workdir, done = finished
  summary = json.loads((workdir / 'summary.json').read_text())
  accounting = summary['accounting']
  assert accounting['admitted'] == accounting['trained'] + accounting['carried_over'] + sum(accounting['dropped'].values())
  assert summary['policy_steps'] == 3 and summary['seed'] == 0 and summary['packages']['jax'] and summary['seconds']
  for when in ('before', 'after'):
    found = summary['evaluation'][when]
    assert found['n'] == 8 and 0 <= found['success_temperature_1'] <= 1 and 0 <= found['success_greedy'] <= 1
  assert (workdir / 'learning_curve.png').read_bytes().startswith(b'\x89PNG')
  assert list((workdir / 'checkpoints').iterdir()) and list((workdir / 'rollouts').glob('*_after.md'))
  assert list(workdir.rglob('events.out.tfevents.*'))
  assert json.loads((workdir / 'config.json').read_text())['rl']['policy_steps'] == 3
  for name in ('learning_curve.png', 'rollouts', 'summary.json'):
    assert str(workdir / name) in done.stdout
  assert 'after: held-out success' in done.stdout
  assert '\r' not in done.stderr  # No bar where there is no terminal.
  assert 'rl: compiling sampler and learner\n' in done.stderr  # Said before minutes of silence, in a log too.


@pytest.mark.slow
def test_the_same_command_again_changes_nothing(finished):
  workdir, _ = finished
  before = json.loads((workdir / 'summary.json').read_text())
  done = launch('train.py', TINY, f'--workdir={workdir}', *FAST, '--config.checkpoint.keep=3')
  assert done.returncode == 0, done.stderr
  after = json.loads((workdir / 'summary.json').read_text())
  assert after['accounting'] == before['accounting'] and after['evaluation'] == before['evaluation']


@pytest.mark.slow
def test_other_settings_in_the_same_workdir_are_refused(finished):
  workdir, _ = finished
  before = (workdir / 'summary.json').read_bytes()
  done = launch('train.py', TINY, f'--workdir={workdir}', *FAST, '--config.checkpoint.keep=3', '--config.seed=5')
  assert_told(done, 'seed: 0 -> 5', status=1)
  assert (workdir / 'summary.json').read_bytes() == before


@pytest.mark.slow
def test_evaluate_a_checkpoint(finished):
  workdir, _ = finished
  done = launch('evaluate.py', f'--workdir={workdir}', '--num_prompts=10', '--top_p=0.9')
  assert done.returncode == 0, done.stderr
  found = json.loads(done.stdout)
  assert found['prompts'] == found['greedy']['n'] == found['temperature_1']['n'] == 10
  assert found['policy_step'] == 3 and found['stage'] == 'done'
  for name in ('temperature_1', 'greedy'):
    assert found[name]['low'] <= found[name]['success'] <= found[name]['high']
    assert found[name]['reward_low'] <= found[name]['reward'] <= found[name]['reward_high']
  assert 'temperature 1' in done.stderr and 'greedy' in done.stderr
  assert_told(launch('evaluate.py', f'--workdir={workdir}', '--checkpoint=99'), 'no checkpoint 99', status=1)


@pytest.mark.slow
def test_evaluate_before_training_on_another_task():
  done = launch('evaluate.py', TINY, '--num_prompts=4', '--task=calculator', "--task_settings={'min_operations': 3, 'max_operations': 3}")
  assert done.returncode == 0, done.stderr
  found = json.loads(done.stdout)
  assert found['checkpoint'] is None and found['prompts'] == 4 and found['policy_step'] == 0


@pytest.mark.slow
def test_a_finished_run_is_kept_when_asked(finished, tmp_path):
  workdir, _ = finished
  (tmp_path / 'run').mkdir()
  for name in ('config.json', 'summary.json'):
    (tmp_path / 'run' / name).write_bytes((workdir / name).read_bytes())
  (tmp_path / 'run-1').mkdir()  # Taken.
  done = launch(
      'train.py', TINY, f'--workdir={tmp_path / "run"}', *FAST, '--keep_previous', '--config.seed=1', '--config.rl.policy_steps=1')
  assert done.returncode == 0, done.stderr
  assert json.loads((tmp_path / 'run-2' / 'summary.json').read_text())['seed'] == 0
  assert json.loads((tmp_path / 'run' / 'summary.json').read_text())['seed'] == 1


@pytest.mark.slow
def test_an_unwritable_workdir_is_told(tmp_path):
  (tmp_path / 'file').write_text('')
  assert_told(launch('train.py', TINY, f'--workdir={tmp_path / "file" / "run"}'), 'file', status=1)


# --- Shell scripts ---


def shell(script: str, *arguments: str, cwd: pathlib.Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
  return subprocess.run(
      ['bash', str(ROOT / 'launch' / script), *arguments], cwd=cwd, capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL,
      env=os.environ | environment, check=False)


@pytest.mark.parametrize('script', ['quickstart.sh', 'test.sh'])
def test_scripts_explain_themselves_from_any_folder(script, tmp_path):
  done = shell(script, '--help', cwd=tmp_path)
  assert done.returncode == 0 and f'bash launch/{script}' in done.stdout


@pytest.mark.parametrize('arguments, text', [
    (['--seed=abc'], "--seed must be a whole number from 0 to 4294967295, got 'abc'"), (['--seed', '-1'], '--seed must be'),
    (['--seed='], '--seed must be'), (['--seed=4294967296'], '--seed must be'), (['--seed=99999999999999999999'], '--seed must be'),
    (['--sed', '3'], 'unknown argument --sed'), (['--seed'], '--seed needs a value'), (['extra'], 'unknown argument extra')])
def test_quickstart_refuses_what_it_does_not_know(arguments, text, tmp_path):
  done = shell('quickstart.sh', *arguments, SAO_VENV=str(tmp_path / 'venv'))
  assert done.returncode == 1 and text in done.stderr and not (tmp_path / 'venv').exists()


def test_an_old_python_is_told(tmp_path):
  old = tmp_path / 'bin'
  old.mkdir()
  for name in ('python3.11', 'python3.12', 'python3.13', 'python3', 'python'):
    (old / name).write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.2\nexit 1\n')
    (old / name).chmod(0o755)
  done = shell('quickstart.sh', SAO_VENV=str(tmp_path / 'venv'), PATH=f'{old}:{os.environ["PATH"]}')
  assert done.returncode == 1 and 'Python 3.11 or newer is needed' in done.stderr and 'Python 3.9.2' in done.stderr


def test_a_folder_that_is_no_environment_is_left_alone(tmp_path):
  (tmp_path / 'thesis.txt').write_text('precious')
  done = shell('quickstart.sh', SAO_VENV=str(tmp_path))
  assert done.returncode == 1 and 'is not a virtual environment' in done.stderr and (tmp_path / 'thesis.txt').read_text() == 'precious'


@pytest.fixture
def pretend_venv(tmp_path) -> pathlib.Path:
  """An environment whose Python records what it is asked; `pip install` fails as long as there is a file `offline`."""
  bin_folder = tmp_path / 'venv' / 'bin'
  bin_folder.mkdir(parents=True)
  (tmp_path / 'venv' / 'pyvenv.cfg').write_text('')
  python = bin_folder / 'python'
  python.write_text(f'''#!/bin/bash
case "$*" in *"pip --version"*) exit 0;; --version) echo Python 3.11.0; exit 0;; esac
echo "$*" >> "{tmp_path}/calls"
if [ -e "{tmp_path}/offline" ] && [ "$3" = install ]; then echo "no network" >&2; exit 1; fi
''')
  python.chmod(0o755)
  return tmp_path


def test_requirements_are_installed_once(pretend_venv):
  environment = {'SAO_VENV': str(pretend_venv / 'venv')}
  (pretend_venv / 'offline').write_text('')
  done = shell('quickstart.sh', '--workdir', 'w', **environment)
  assert done.returncode == 1 and 'no network' in done.stderr and 'pip install -r requirements.txt failed' in done.stderr
  (pretend_venv / 'offline').unlink()
  for _ in range(2):
    done = shell('quickstart.sh', '--seed', '3', '--workdir', 'w', **environment)
    assert done.returncode == 0, done.stderr
  calls = (pretend_venv / 'calls').read_text().splitlines()
  assert sum('pip install' in call for call in calls) == 2  # The failed one and its repetition.
  trained = [call for call in calls if 'train.py' in call]
  assert len(trained) == 2 and trained[0].endswith('--workdir=w --config.seed=3')
  assert 'keep_previous' not in trained[0]


def test_the_default_workdir_keeps_earlier_runs(pretend_venv):
  shell('quickstart.sh', SAO_VENV=str(pretend_venv / 'venv'), cwd=pretend_venv)
  call = (pretend_venv / 'calls').read_text().splitlines()[-1]
  assert f'--workdir={ROOT}/runs/quickstart --keep_previous' in call
