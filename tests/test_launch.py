"""The entry points as a person meets them: errors in one clear message with the right status, before anything compiles; resume; results."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
CACHE = tempfile.TemporaryDirectory()
TINY = '--config=configs/tiny_debug.py'
FAST = ('--config.sft.steps=4', '--config.rl.policy_steps=3', '--config.evaluation.prompts=8', '--config.evaluation.every=0')


def launch(script: str, *arguments: str, timeout: float = 300, **environment: str) -> subprocess.CompletedProcess:
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
    (['--workdir=W', TINY, '--config.learner.batchsize=3'], 'unknown setting learner.batchsize; known here: batch_size'),
    (['--workdir=W', TINY, '--config.trainer.steps=3'], 'unknown setting trainer; known here: algorithm'),
    (['--workdir=W', TINY, '--config.task.settings.digits=3'], 'digits'),
    (['--workdir=W', TINY, '--config.learner.batch_size=many'], 'many'),
    (['--workdir=W', TINY, '--config.learner.batch_size=1.5'], '1.5'),
    (['--workdir=W', TINY, '--config.algorithm.gamma=high'], 'high'),
    (['--workdir=W', TINY, '--config.model.qk_norm=perhaps'], 'perhaps'),
    (['--workdir=W', TINY, '--config.learner=3'], 'not a dict'),
])
def test_wrong_command_line(arguments, text, tmp_path):
  (tmp_path / 'jax.py').write_text('raise SystemExit("jax was imported")')
  arguments = [a.replace('=W', f'={tmp_path / "work"}') for a in arguments]
  assert_told(launch('train.py', *arguments, PYTHONPATH=str(tmp_path)), text, status=2)
  assert not (tmp_path / 'work').exists()


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
  assert_told(launch('evaluate.py', TINY, '--num_prompts=0'), 'num_prompts', status=2)


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
  until = time.monotonic() + 240
  while time.monotonic() < until and child.poll() is None and not (path.exists() and path.read_bytes().count(b'\n') >= 2):
    time.sleep(0.001)
  child.kill()
  child.wait(60)
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
  assert found['n'] == 10 and found['policy_step'] == 3 and found['stage'] == 'done'
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
  assert found['checkpoint'] is None and found['n'] == 4 and found['policy_step'] == 0


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
      ['bash', str(ROOT / 'launch' / script), *arguments], cwd=cwd, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL,
      env=os.environ | environment, check=False)


@pytest.mark.parametrize('script', ['quickstart.sh', 'test.sh'])
def test_scripts_explain_themselves_from_any_folder(script, tmp_path):
  done = shell(script, '--help', cwd=tmp_path)
  assert done.returncode == 0 and f'bash launch/{script}' in done.stdout


@pytest.mark.parametrize('arguments, text', [
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
