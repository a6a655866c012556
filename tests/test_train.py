"""Whole runs: every stage, what they leave behind, resuming bit by bit, and what happens when a part fails."""

import json
import shutil
import threading
import time
import types

import jax
import numpy as np
import pytest

from sao_jax import environments
from sao_jax import rl
from sao_jax import train
from sao_jax.environments.base import EnvironmentFailure
from sao_jax.environments.scripted import Scripted
from sao_jax.metrics import read_rows
from sao_jax.run import Run
from sao_jax.sampler import Sampler
from tests.tiny_run import Interrupted, run, tiny_config

# Numbers that measure this machine, not the run.
OF_THE_MACHINE = (
    'time', 'time/run_s', 'time/publish_s', 'time/learner_wait_fraction', 'time/sampler_wait_fraction', 'sampler/tokens_per_s',
    'sampler/params_stall_s', 'sampler/tokens_recomputed')


def of_the_run(rows):
  return [{k: v for k, v in row.items() if k not in OF_THE_MACHINE} for row in rows]


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  workdir = tmp_path_factory.mktemp('whole')
  with pytest.MonkeyPatch.context() as patch:
    return workdir, *run(workdir, patch)


def test_a_run_leaves_what_it_promises(whole):
  workdir, summary, _, rows = whole
  for name in ('config.json', 'metrics.jsonl', 'summary.json', 'learning_curve.png'):
    assert (workdir / name).stat().st_size > 0, name
  assert list((workdir / 'rollouts').glob('*.md')) and list((workdir / 'checkpoints').iterdir())
  assert json.loads((workdir / 'summary.json').read_text())['policy_steps'] == summary['policy_steps'] == 8
  assert summary['learner_steps'] == 40 + 2 + 2 + 8  # Warm start, value pretraining, value-only and policy steps.
  for when in ('before', 'after'):
    found = summary['evaluation'][when]
    assert found['n'] == 8 and 0 <= found['success_temperature_1'] <= 1 and 0 <= found['success_greedy'] <= 1
  steps = [row['step'] for row in rows if 'policy_step' in row]
  assert steps == list(range(43, 53))


def test_every_ticket_ends_once(whole):
  _, summary, _, rows = whole
  accounting = summary['accounting']
  assert accounting['trained'] == 10 * 8
  assert accounting['admitted'] == accounting['trained'] + accounting['carried_over'] + sum(accounting['dropped'].values())
  assert max(row['queue/staleness_max'] for row in rows if 'queue/staleness_max' in row) <= 2


def test_success_is_measured_at_temperature_1_whatever_training_draws_with(tmp_path, monkeypatch):
  drawn_at = []
  reset = Sampler.reset

  def recorded(self, snapshot, *, seed, temperature):
    drawn_at.append(temperature)
    reset(self, snapshot, seed=seed, temperature=temperature)

  monkeypatch.setattr(Sampler, 'reset', recorded)
  run(tmp_path, monkeypatch, sampler__temperature=0.5, sft__steps=0, value_pretrain__rollouts=0, rl__policy_steps=0)
  assert drawn_at == [0.5, 1.0, 0.5, 0.0]  # A sampler is made with the settings, then set.


def test_sampler_and_learner_agree_and_every_metric_is_there(whole):
  *_, rows = whole
  last = rows[-2]
  for name in (
      'reward/mean', 'reward/success', 'dis/kept_fraction', 'dis/above', 'dis/below', 'ratio/log_p01', 'ratio/log_p50', 'ratio/log_p99',
      'value/explained_variance', 'value/grad_norm', 'value/loss', 'policy/grad_norm', 'policy/entropy', 'queue/depth',
      'queue/staleness_mean', 'queue/staleness_max', 'rollout/length_mean', 'rollout/turns', 'rollout/truncated_fraction',
      'sampler/tokens_per_s', 'sampler/slot_occupancy', 'time/learner_wait_fraction', 'time/sampler_wait_fraction', 'time/publish_s'):
    assert name in last, name
  assert any(row.get('advantage/abs_mean', 0) > 0 for row in rows) and any(row.get('policy/grad_norm', 0) > 0 for row in rows)
  gaps = [row['sampler_vs_learner/log_prob_gap_max'] for row in rows if 'sampler_vs_learner/log_prob_gap_max' in row]
  assert len(gaps) >= 1 and max(gaps) < 1e-4


def test_a_finished_run_started_again_does_no_work(whole, monkeypatch):
  workdir, summary, state, rows = whole
  again, same, rows_again = run(workdir, monkeypatch)
  assert again['accounting'] == summary['accounting'] and again['evaluation'] == json.loads(json.dumps(summary['evaluation']))
  assert [r['step'] for r in rows_again] == [r['step'] for r in rows]
  chex_equal(same, state)


def chex_equal(a, b):
  leaves_a, leaves_b = jax.tree.leaves(a), jax.tree.leaves(b)
  assert len(leaves_a) == len(leaves_b) > 0
  for x, y in zip(leaves_a, leaves_b):
    np.testing.assert_array_equal(x, y)


@pytest.mark.slow
@pytest.mark.parametrize('stop_at', [20, 41, 43, 47, 51])  # In the warm start, value pretraining, value-only steps, and twice in RL.
def test_a_resumed_run_is_bit_equal(whole, tmp_path, monkeypatch, stop_at):
  _, summary, state, rows = whole
  with pytest.raises(Interrupted):
    run(tmp_path, monkeypatch, stop_at=stop_at)
  resumed, resumed_state, resumed_rows = run(tmp_path, monkeypatch)
  chex_equal(resumed_state, state)
  assert of_the_run(resumed_rows) == of_the_run(rows)
  assert resumed['accounting'] == summary['accounting']


@pytest.mark.slow
@pytest.mark.parametrize('overrides', [
    dict(evaluation__every=0), dict(evaluation__every=2, evaluation__seed=7, evaluation__during_prompts=7)])
def test_evaluation_during_training_changes_nothing(whole, tmp_path, monkeypatch, overrides):
  """Never, or twice as often on other prompts: parameters, ledger, accounting and every number of training stay, bit for bit."""
  workdir, summary, state, rows = whole
  other, other_state, other_rows = run(tmp_path, monkeypatch, **overrides)
  chex_equal(other_state, state)
  assert other['accounting'] == summary['accounting']
  ledger = (workdir / 'ledger.jsonl').read_bytes()
  assert len(ledger.splitlines()) >= 10 and (tmp_path / 'ledger.jsonl').read_bytes() == ledger

  def training(found):
    """Rows of training; those of an evaluation are rows of their own."""
    kept = [row for row in of_the_run(found) if not any(name.startswith('evaluation/') for name in row)]
    assert len(kept) < len(found)
    return kept

  assert training(other_rows) == training(rows)
  assert sum('evaluation/success_greedy' in row for row in rows) != sum('evaluation/success_greedy' in row for row in other_rows)


ROWS = dict(
    sft__steps=0, value_pretrain__rollouts=0, evaluation__prompts=6, evaluation__every=0, learner__value_warmup_steps=0, rl__policy_steps=6,
    task__name='scripted_rows', checkpoint__every=2)


@pytest.fixture
def scripted_rows(monkeypatch):
  monkeypatch.setattr(environments, 'REGISTRY', dict(environments.REGISTRY))
  environments.register('scripted_rows', 'tests.rows_environment', 'ScriptedRows')


def difficulty(workdir):
  return [json.loads(line) for line in (workdir / 'difficulty.jsonl').read_text().splitlines()]


@pytest.mark.slow
def test_a_run_over_rows_counts_their_difficulty_and_resumes_bit_equal(tmp_path, monkeypatch, scripted_rows):
  settings = {**ROWS, 'task__settings': {'turns': 1, 'rows': 12, 'weighted': True}, 'data__skip_solved': 3}
  summary, state, rows = run(tmp_path / 'whole', monkeypatch, **settings)
  with pytest.raises(Interrupted):
    run(tmp_path / 'cut', monkeypatch, stop_at=3, **settings)
  resumed, resumed_state, resumed_rows = run(tmp_path / 'cut', monkeypatch, **settings)
  chex_equal(resumed_state, state)
  assert of_the_run(resumed_rows) == of_the_run(rows) and resumed['accounting'] == summary['accounting']
  found = difficulty(tmp_path / 'whole')
  assert found == difficulty(tmp_path / 'cut')
  assert {r['set'] for r in found} == {'a', 'b'} and [r['task'] for r in found] == list(range(12))
  accounting = summary['accounting']
  assert 6 * 8 <= sum(r['visits'] for r in found) <= accounting['admitted']
  assert all(0.0 <= r['mean_reward'] <= 1.0 for r in found)
  per_set = {name: sum(r['visits'] for r in found if r['set'] == name) for name in 'ab'}
  assert per_set['a'] > 1.5 * per_set['b']  # Twice its share, with a third of the rows.


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['virtual', 'wall'])
def test_the_stage_ends_when_the_prompts_do(tmp_path, monkeypatch, scripted_rows, kind):
  """Two epochs of 15 rows are 30 rollouts: three steps of 8, and 6 rollouts that make no batch."""
  summary, _, _ = run(
      tmp_path, monkeypatch, clock__kind=kind, data__epochs=2, **{**ROWS, 'task__settings': {'turns': 1, 'rows': 15}})
  accounting = summary['accounting']
  assert summary['policy_steps'] == 3 and accounting == {'admitted': 30, 'trained': 24, 'carried_over': 6, 'dropped': {}}
  assert [r['visits'] for r in difficulty(tmp_path)] == [2] * 15
  assert json.loads((tmp_path / 'summary.json').read_text())['evaluation']['after']['n'] == 6


@pytest.mark.parametrize('overrides, message', [
    (dict(data__epochs=1), "data.epochs=1 needs tasks that come again, but 'scripted'"),
    (dict(data__skip_solved=2), 'data.skip_solved=2')])
def test_settings_for_rows_are_refused_where_tasks_never_end(tmp_path, overrides, message):
  with pytest.raises(ValueError, match=message):
    train.run(tiny_config(**overrides), tmp_path)
  assert not (tmp_path / 'checkpoints').exists()


def test_other_settings_in_the_same_workdir_are_refused(whole):
  workdir = whole[0]
  with pytest.raises(ValueError, match='rl.policy_steps: 8 -> 9'):
    train.run(tiny_config(rl__policy_steps=9), workdir)


@pytest.mark.parametrize('overrides, message', [
    (dict(algorithm__objective='nonsense'), 'algorithm.objective must be one of'),
    (dict(algorithm__advantage='nonsense'), 'algorithm.advantage must be one of'),
    (dict(task__name='nonsense'), 'nonsense'),
    (dict(task__name='calculator', task__settings={'min_operations': 99}), 'min_operations'),
    (dict(model__vocab_size=300, sampler__mesh=(1, 3, 1, 1, 1)), 'mesh'),
    (dict(task__compact_room=8, task__max_segments=2), "'scripted' has no `compact`; use task.compact_room=0"),
])
def test_impossible_settings_are_told_before_anything_compiles(tmp_path, overrides, message):
  start = time.monotonic()
  with pytest.raises(ValueError, match=message):
    train.run(tiny_config(**overrides), tmp_path / 'run')
  assert time.monotonic() - start < 60


def test_a_workdir_in_use_is_refused(tmp_path):
  with train.locked(tmp_path):
    with pytest.raises(ValueError, match='Another process'):
      train.run(tiny_config(), tmp_path)


def test_a_workdir_that_cannot_be_made_is_an_os_error(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(OSError):
    train.run(tiny_config(), tmp_path / 'file' / 'run')


WALL = dict(clock__kind='wall', sft__steps=0, value_pretrain__rollouts=0, evaluation__prompts=0, evaluation__every=0, rl__policy_steps=3)


@pytest.mark.slow
def test_wall_clock_run_with_failing_and_hanging_environments(tmp_path, monkeypatch):
  """Some episodes fail for good, some calls hang: both are counted under their names, and the run ends."""
  summary, _, rows = run(
      tmp_path, monkeypatch, task__settings={'turns': 1, 'max_turns': 3, 'failure_rate': 0.3, 'hang_rate': 0.15, 'hang_s': 30.0},
      task__step_timeout_s=1.0, task__retries=0, task__max_failure_share=1.0,
      **{**WALL, 'sft__steps': 40})
  accounting = summary['accounting']
  assert accounting['trained'] == 5 * 8 and accounting['dropped'].get('environment_error', 0) >= 1
  assert set(accounting['dropped']) == {'environment_error', 'environment_timeout'}
  assert accounting['admitted'] == accounting['trained'] + accounting['carried_over'] + sum(accounting['dropped'].values())
  means = [(row['reward/mean_all'], row['reward/mean']) for row in rows if 'reward/mean' in row]
  assert sum(a for a, _ in means) < sum(m for _, m in means)  # Lost rollouts count as 0 in the mean of all, and nowhere else.


@pytest.mark.slow
@pytest.mark.parametrize('where', ['learner', 'worker'])
def test_a_failure_ends_the_run_with_the_first_cause(tmp_path, monkeypatch, where):
  failed = []

  def broken(*args, **kwargs):
    failed.append(time.monotonic())
    raise KeyError('the first cause')

  monkeypatch.setattr(Scripted, 'reset', broken) if where == 'worker' else monkeypatch.setattr(
      'sao_jax.learner.Learner.update', broken)
  with pytest.raises((RuntimeError, KeyError), match='the first cause'):
    train.run(tiny_config(**WALL), tmp_path)
  assert time.monotonic() - failed[0] < 15
  assert not [t for t in threading.enumerate() if t.name == 'rollouts' and t.is_alive()]


@pytest.mark.slow
def test_nothing_compiles_after_warm_up(tmp_path, monkeypatch):
  """50 updates on 400 multi-turn rollouts of mixed lengths: not one compilation, by JAX's own events."""
  events, during = [], []
  jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: events.append(name))
  loop = rl.ReinforcementLearning._run_virtual

  def counted(self):
    before = len(events)
    loop(self)
    during.extend(events[before:])

  monkeypatch.setattr(rl.ReinforcementLearning, '_run_virtual', counted)
  summary, _, rows = run(
      tmp_path, monkeypatch, sft__steps=0, value_pretrain__rollouts=0, rl__policy_steps=50, evaluation__prompts=0, evaluation__every=0,
      learner__value_warmup_steps=0, learner__lengths=(32, 64), sampler__cache_lengths=(32, 64))
  assert summary['accounting']['trained'] == 400
  assert len({row['rollout/length_max'] for row in rows}) > 1 and max(row['rollout/turns'] for row in rows) > 1
  assert any('compile' in name for name in events)  # The listener hears of compilations at all.
  assert [name for name in during if 'compile' in name or 'trace' in name] == []


@pytest.mark.slow
@pytest.mark.parametrize('temperature', [0.7, 1.0, 1.3])
def test_same_version_log_probs_agree_at_every_temperature(tmp_path, monkeypatch, temperature):
  _, _, rows = run(
      tmp_path, monkeypatch, sampler__temperature=temperature, sft__steps=3, value_pretrain__rollouts=0, evaluation__prompts=0,
      evaluation__every=0, rl__policy_steps=3, learner__value_warmup_steps=0, queue__max_staleness=0)
  gaps = [row['sampler_vs_learner/log_prob_gap_max'] for row in rows if 'policy_step' in row]
  outside = [row['ratio/outside_1pct'] for row in rows if 'policy_step' in row]
  assert len(gaps) == len(outside) == 3  # With staleness 0 every token is of the current version.
  assert max(gaps) <= 1e-4 and max(outside) == 0


@pytest.mark.slow
@pytest.mark.parametrize('overrides', [
    dict(queue__overdue='drop', queue__max_staleness=1, clock__sigma=1.5),
    dict(queue__overdue='wait', queue__max_staleness=0),
    dict(queue__overdue='use', queue__max_staleness=1, sampler__on_update='keep_cache', algorithm__objective='ppo_clip'),
    dict(sampler__on_update='finish_first', algorithm__truncation='drop', algorithm__advantage='reinforce_batch_centred'),
    dict(learner__micro_batches=2, learner__devices=(0,), sampler__devices=(0,), algorithm__denominator='trajectory',
         algorithm__advantage_values='before_update', model__scan_layers=True),
])
def test_every_way_to_run_ends_with_balanced_books(tmp_path, monkeypatch, overrides):
  summary, _, rows = run(
      tmp_path, monkeypatch, sft__steps=2, value_pretrain__rollouts=0, evaluation__prompts=0, evaluation__every=0, rl__policy_steps=5,
      **overrides)
  accounting = summary['accounting']
  assert accounting['trained'] == 7 * 8
  assert accounting['admitted'] == accounting['trained'] + accounting['carried_over'] + sum(accounting['dropped'].values())
  if overrides.get('queue__overdue') != 'use':
    bound = overrides.get('queue__max_staleness', 2)
    assert max(row['queue/staleness_max'] for row in rows if 'queue/staleness_max' in row) <= bound


# --- Ends that are not the end -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize('stop_at', [20, 41, 46])  # In each of the stages.
def test_a_run_that_is_asked_to_stop_saves_and_resumes_bit_equal(whole, tmp_path, monkeypatch, stop_at):
  _, summary, state, rows = whole
  stop, step_done = threading.Event(), Run.step_done

  def ask(self, *args, **kwargs):
    step_done(self, *args, **kwargs)
    if self.progress.step == stop_at:
      stop.set()

  with monkeypatch.context() as patch:
    patch.setattr(Run, 'step_done', ask)
    with pytest.raises(train.Stopped, match=f'after step {stop_at}'):
      train.run(tiny_config(), tmp_path, stop=stop)
  steps_done = [row['step'] for row in read_rows(tmp_path / 'metrics.jsonl')]
  assert steps_done[-1] == stop_at  # Nothing after the stop, and nothing before it is lost.
  resumed, resumed_state, resumed_rows = run(tmp_path, monkeypatch)
  chex_equal(resumed_state, state)
  assert of_the_run(resumed_rows) == of_the_run(rows)
  assert resumed['accounting'] == summary['accounting']


@pytest.mark.slow
def test_a_waiting_run_can_be_stopped(tmp_path, monkeypatch):
  """The learner waits for an environment that takes its time."""
  stop = threading.Event()
  timer = threading.Timer(6.0, stop.set)
  timer.start()
  try:
    with pytest.raises(train.Stopped):
      hanging = {'turns': 1, 'hang_rate': 1.0, 'hang_s': 3600.0}
      train.run(tiny_config(**WALL, task__settings=hanging, task__step_timeout_s=500.0), tmp_path, stop=stop)
  finally:
    timer.cancel()


@pytest.mark.slow
def test_no_policy_steps_means_no_such_stage(tmp_path, monkeypatch):
  summary, _, rows = run(tmp_path, monkeypatch, sft__steps=3, value_pretrain__rollouts=0, rl__policy_steps=0)
  assert summary['learner_steps'] == 3 and summary['policy_steps'] == 0 and summary['accounting'] == {}
  assert set(summary['evaluation']) == {'before'} and not any('policy_step' in row for row in rows)


@pytest.mark.slow
def test_rows_of_several_steps_leave_no_step_out(tmp_path, monkeypatch):
  """sft 7, value pretraining 2, RL 5 steps, in rows of at most 3; checkpoints and ends of stages close a row."""
  settings = dict(
      logging__every=3, sft__steps=7, rl__policy_steps=3, evaluation__prompts=0, evaluation__every=0, checkpoint__every=100)
  _, _, rows = run(tmp_path / 'a', monkeypatch, **settings)
  assert [row['step'] for row in rows if 'sft/loss' in row] == [3, 6, 7]
  assert [row['step'] for row in rows if 'policy_step' in row] == [12, 14]
  with pytest.raises(Interrupted):
    run(tmp_path / 'b', monkeypatch, stop_at=5, **{**settings, 'checkpoint__every': 4})
  _, _, resumed = run(tmp_path / 'b', monkeypatch, **{**settings, 'checkpoint__every': 4})
  assert [row['step'] for row in resumed if 'sft/loss' in row] == [3, 4, 6, 7]


@pytest.mark.slow
def test_recorded_rollouts_that_are_all_lost_are_told(tmp_path, monkeypatch):
  def broken(self, task):
    raise EnvironmentFailure('no sandbox')

  monkeypatch.setattr(Scripted, 'reset', broken)
  with pytest.raises(RuntimeError, match='All 16 rollouts for value pretraining were lost: .*environment_error.: 16'):
    run(tmp_path, monkeypatch, sft__steps=0, evaluation__prompts=0, task__max_failure_share=1.0, task__retries=0)


@pytest.mark.slow
def test_a_damaged_checkpoint_stops_the_resume_and_nothing_is_touched(tmp_path, monkeypatch):
  with pytest.raises(Interrupted):
    run(tmp_path, monkeypatch, stop_at=10)
  newest = max((tmp_path / 'checkpoints').iterdir(), key=lambda p: int(p.name))
  victim = max((p for p in (newest / 'arrays').rglob('*') if p.is_file()), key=lambda p: p.stat().st_size)
  victim.write_bytes(victim.read_bytes()[:-1] + b'!')
  before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob('*') if p.is_file() and p.name != 'lock'}
  with pytest.raises(OSError, match='is damaged.*Delete that folder to go on'):
    run(tmp_path, monkeypatch)
  assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob('*') if p.is_file() and p.name != 'lock'} == before


def test_closing_hides_no_error():
  class Parts:
    def close(self):
      raise OSError('disk full')

  with pytest.raises(KeyError, match='first') as caught:
    with train.closed_at_end(Parts()):
      raise KeyError('first')
  assert 'disk full' in caught.value.__notes__[0]
  with pytest.raises(OSError, match='disk full'):
    with train.closed_at_end(Parts()):
      pass


@pytest.mark.slow
@pytest.mark.parametrize('name', ['before', 'step 4', 'after'])
def test_a_stop_during_an_evaluation_resumes_bit_equal(whole, tmp_path, monkeypatch, name):
  _, summary, state, rows = whole
  stop, evaluate = threading.Event(), Run.evaluate

  def ask(self, label, prompts):
    if label == name:
      stop.set()
    return evaluate(self, label, prompts)

  with monkeypatch.context() as patch:
    patch.setattr(Run, 'evaluate', ask)
    with pytest.raises(train.Stopped):
      train.run(tiny_config(), tmp_path, stop=stop)
  resumed, resumed_state, resumed_rows = run(tmp_path, monkeypatch)
  chex_equal(resumed_state, state)
  assert of_the_run(resumed_rows) == of_the_run(rows)
  assert resumed['accounting'] == summary['accounting'] and resumed['evaluation'] == summary['evaluation']


@pytest.mark.slow
@pytest.mark.parametrize('harm, words', [
    (lambda d: shutil.rmtree(d / 'checkpoints'), 'its checkpoints are gone'),
    (lambda d: (d / 'ledger.jsonl').write_text(''), r'ledger.jsonl has 0 of the \d rows'),
    (lambda d: (d / 'ledger.jsonl').unlink(), r'ledger.jsonl has 0 of the \d rows'),
    (lambda d: (d / 'metrics.jsonl').write_text(''), r'metrics.jsonl has 0 of the \d+ rows'),
    (lambda d: (d / 'ledger.jsonl').write_text('[1]\n'), 'ledger.jsonl, line 1 is no row'),
])
def test_a_workdir_that_lost_files_is_not_resumed(interrupted, tmp_path, monkeypatch, harm, words):
  shutil.copytree(interrupted, tmp_path / 'run')
  harm(tmp_path / 'run')
  with pytest.raises(ValueError, match=words):
    run(tmp_path / 'run', monkeypatch)


def test_a_run_that_was_killed_before_a_checkpoint_was_whole_is_no_lost_one(tmp_path):
  """Steps 3 and 6 begin to save; the first save is whole when the second returns, before step 7."""
  parts = types.SimpleNamespace(workdir=tmp_path, config=tiny_config(checkpoint__every=3))
  train.refuse_lost_checkpoints(parts)
  rows = [json.dumps({'step': step}) + '\n' for step in range(1, 8)]
  (tmp_path / 'metrics.jsonl').write_text(''.join(rows[:6]))
  train.refuse_lost_checkpoints(parts)
  (tmp_path / 'metrics.jsonl').write_text(''.join(rows))
  with pytest.raises(ValueError, match='holds 7 steps of a run, but its checkpoints are gone'):
    train.refuse_lost_checkpoints(parts)


@pytest.fixture(scope='module')
def interrupted(tmp_path_factory):
  workdir = tmp_path_factory.mktemp('interrupted') / 'run'
  with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
    run(workdir, patch, stop_at=49)
  return workdir


def test_an_environment_that_hangs_when_it_is_closed_is_told(tmp_path, monkeypatch):
  hang = threading.Event()
  monkeypatch.setattr(Scripted, 'close', lambda self: hang.wait(60))
  with pytest.raises(TimeoutError, match="closing the environment 'scripted' took more than 0.2 s"):
    train.run(tiny_config(task__step_timeout_s=0.2), tmp_path)
  hang.set()
