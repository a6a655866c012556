"""Metrics: means made once, rows that survive, resume, timers."""

import json
import math
import os
import signal
import subprocess
import sys
import time

from hypothesis import given, settings, strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax import metrics
from sao_jax.types import Stat
from tests.rollout_factory import make_rollout


def written(values):
  return {name: metrics.value_of(value) for name, value in metrics.merge_steps(values).items()}


# --- Means ---------------------------------------------------------------------------------------------------------------------


def test_tokens_are_weighed_not_averaged_per_part():
  """3 tokens of mean 1 and 1 token of mean 5: 2, not 3."""
  assert written([{'x': Stat(3.0, 3.0)}, {'x': Stat(5.0, 1.0)}]) == {'x': 2.0}


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(-100, 100), st.integers(0, 9)), min_size=1, max_size=12), st.data())
def test_grouping_of_steps_changes_nothing(parts, data):
  steps = [{'x': Stat(total * count, float(count))} for total, count in parts]
  cut = data.draw(st.integers(0, len(steps)))
  halves = [metrics.merge_steps(steps[:cut]), metrics.merge_steps(steps[cut:])]
  whole, regrouped = written(steps)['x'], written(halves)['x']
  count = sum(count for _, count in parts)
  if count == 0:
    assert whole is None and regrouped is None
  else:
    assert whole == pytest.approx(sum(t * c for t, c in parts) / count, abs=1e-9)
    assert regrouped == pytest.approx(whole, abs=1e-9)


def test_a_maximum_stays_a_maximum_and_a_number_is_the_newest():
  steps = [{'queue/staleness_max': Stat(2.0, 1.0), 'queue/depth': 7.0}, {'queue/staleness_max': Stat(0.0, 0.0)},
           {'queue/staleness_max': Stat(1.0, 1.0), 'queue/depth': 3.0}]
  assert written(steps) == {'queue/staleness_max': 2.0, 'queue/depth': 3.0}
  assert written([{'a/max': Stat(-2.0, 1.0)}, {'a/max': Stat(-1.0, 1.0)}]) == {'a/max': -1.0}
  assert written([{'a/max': Stat(0.0, 0.0)}]) == {'a/max': None}


def test_a_fraction_of_a_short_time_is_not_divided_by_one():
  assert metrics.value_of(Stat(0.25, 0.5)) == 0.5


def test_step_metrics_fetches_device_values_and_empties():
  steps = metrics.StepMetrics()
  steps.add({'policy/loss': Stat(jnp.float32(6.0), jnp.float32(4.0))})
  steps.add({'policy/loss': Stat(jnp.float32(2.0), jnp.float32(4.0)), 'queue/depth': 1.0})
  merged = steps.collect()
  assert merged == {'policy/loss': Stat(8.0, 8.0), 'queue/depth': 1.0}
  assert steps.collect() == {}


# --- Rollouts ------------------------------------------------------------------------------------------------------------------


def many_turns(turns, **fields):
  """A prompt token, then one action token a turn."""
  n = turns + 1
  mask = np.arange(n) > 0
  return make_rollout(
      length=n, prompt=1, action_mask=mask, turn=np.maximum(np.arange(n) - 1, 0).astype(np.int32),
      policy_version=np.where(mask, 0, -1).astype(np.int32), behaviour_log_prob=np.where(mask, -1.0, 0.0).astype(np.float32),
      reward=np.zeros(n, np.float32), **fields)


def test_a_rollout_counts_once_however_many_turns_it_has():
  """One turn with reward 1, nine turns with reward 0: mean 0.5, not 0.1."""
  good = many_turns(1, metrics={'success': 1.0})
  good.reward[-1] = 1.0
  bad = many_turns(9, metrics={'success': 0.0, 'tool_calls': 9.0}, ending='truncated', stop_reason='max_turns')
  values = {name: metrics.value_of(stat) for name, stat in metrics.rollout_metrics([good, bad]).items()}
  assert values == {
      'reward/mean': 0.5, 'reward/mean_all': 0.5, 'reward/success': 0.5, 'rollout/length_mean': 6.0, 'rollout/length_max': 10.0,
      'rollout/action_tokens': 5.0, 'rollout/segments': 1.0, 'rollout/turns': 5.0, 'rollout/truncated_fraction': 0.5,
      'environment/tool_calls': 9.0}


def test_errored_rollouts_count_in_all_and_only_there():
  values = metrics.rollout_metrics([make_rollout(outcome=1.0)], errored=3)
  assert (metrics.value_of(values['reward/mean']), metrics.value_of(values['reward/mean_all'])) == (1.0, 0.25)


def test_success_is_over_those_that_report_it():
  stats = metrics.rollout_metrics([make_rollout(metrics={'success': 1.0}), make_rollout(metrics={})])
  assert stats['reward/success'] == Stat(1.0, 1.0)


def test_a_turn_without_an_action_is_no_turn():
  rollout = make_rollout(length=6, turn=np.array([0, 0, 0, 1, 1, 2], np.int32), action_mask=np.array([0, 0, 1, 0, 1, 0], bool))
  assert metrics.rollout_metrics([rollout])['rollout/turns'] == Stat(2.0, 1.0)


def test_no_rollouts_write_nothing(tmp_path):
  writer = metrics.MetricsWriter(tmp_path, False, None)
  assert writer.last == {}
  writer.write(0, metrics.rollout_metrics([]))
  assert set(writer.last) == {'step', 'time'}
  writer.close()


# --- The writer ----------------------------------------------------------------------------------------------------------------


def rows_of(tmp_path):
  return metrics.read_rows(tmp_path / 'metrics.jsonl')


def test_rows_are_readable_at_once_and_are_plain_json(tmp_path):
  writer = metrics.MetricsWriter(tmp_path / 'new' / 'folder', False, None)
  writer.write(3, {'a/b': Stat(jnp.float32(1.0), jnp.float32(4.0)), 'c': 2, 'd': math.nan, 'e': Stat(math.inf, 1.0), 'f': Stat(0.0, 0.0)})
  text = (tmp_path / 'new' / 'folder' / 'metrics.jsonl').read_text()
  assert 'NaN' not in text and 'Infinity' not in text
  (row,) = rows_of(tmp_path / 'new' / 'folder')
  assert abs(row.pop('time') - time.time()) < 600
  assert row == {'step': 3, 'a/b': 0.25, 'c': 2.0, 'd': None, 'e': None}
  writer.close()
  writer.close()


@pytest.mark.parametrize('tail', [b'', b'{"step": 4, "ti', b'{"step": 4, "time": 1.0}'])
def test_resume_drops_later_rows_and_a_half_written_one(tmp_path, tail):
  writer = metrics.MetricsWriter(tmp_path, False, None)
  for step in range(4):
    writer.write(step, {'x': float(step), 'y': math.nan})
  writer.close()
  with open(tmp_path / 'metrics.jsonl', 'ab') as file:
    file.write(tail)
  writer = metrics.MetricsWriter(tmp_path, False, 2)
  assert [(row['step'], row['x'], row['y']) for row in rows_of(tmp_path)] == [(0, 0.0, None), (1, 1.0, None), (2, 2.0, None)]
  assert writer.last['x'] == 2.0
  writer.write(3, {'x': 30.0})
  writer.close()
  assert writer.last['x'] == 30.0
  assert [row['x'] for row in rows_of(tmp_path)] == [0.0, 1.0, 2.0, 30.0]


def test_a_new_run_starts_a_new_file(tmp_path):
  for _ in range(2):
    writer = metrics.MetricsWriter(tmp_path, False, None)
    writer.write(0, {'x': 1.0})
    writer.close()
  assert len(rows_of(tmp_path)) == 1


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
  (tmp_path / 'metrics.jsonl').write_text('{"step": 0, "time": 0.0}\n{"step"\n{"step": 2, "time": 0.0}\n')
  with pytest.raises(ValueError, match='line 2 is no row of a run'):
    metrics.MetricsWriter(tmp_path, False, 2)


@pytest.mark.parametrize('name', metrics.RESERVED)
def test_reserved_names(tmp_path, name):
  writer = metrics.MetricsWriter(tmp_path, False, None)
  with pytest.raises(ValueError, match=repr(name)):
    writer.write(0, {name: 1.0})
  writer.close()


def test_an_unwritable_workdir_is_named(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(OSError, match='metrics cannot be written to .*file'):
    metrics.MetricsWriter(tmp_path / 'file' / 'run', False, None)


def test_kill_9_keeps_every_written_row(tmp_path):
  code = (
      'import sys; from sao_jax.metrics import MetricsWriter\n'
      'writer = MetricsWriter(sys.argv[1], False, None)\n'
      'for step in range(10 ** 6):\n'
      '  writer.write(step, {"x": float(step)})\n'
      '  print(step, flush=True)\n')
  child = subprocess.Popen([sys.executable, '-c', code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
  while int(child.stdout.readline()) < 200:
    pass
  os.kill(child.pid, signal.SIGKILL)
  reported = [200] + [int(line) for line in child.stdout.read().split('\n')[:-1]]
  child.wait()
  rows = rows_of(tmp_path)
  assert [row['step'] for row in rows] == list(range(len(rows))) and len(rows) > reported[-1]


def test_tensorboard_events(tmp_path):
  writer = metrics.MetricsWriter(tmp_path, True, None)
  writer.write(0, {'reward/mean': Stat(1.0, 2.0), 'bad': math.nan})
  writer.close()
  (events,) = (tmp_path / 'tensorboard').iterdir()
  content = events.read_bytes()
  assert b'reward/mean' in content and b'bad' not in content


# --- Timers --------------------------------------------------------------------------------------------------------------------


def test_timers_give_shares_of_the_time_gone_by():
  now = [0.0]
  timers = metrics.Timers(lambda: now[0])
  for start, end in ((1.0, 2.0), (3.0, 3.5)):
    now[0] = start
    with timers.measure('sampler_wait'):
      now[0] = end
  timers.add('publish', 1.0)
  now[0] = 5.0
  assert timers.metrics() == {'time/sampler_wait_fraction': Stat(1.5, 5.0), 'time/publish_fraction': Stat(1.0, 5.0)}
  now[0] = 7.0
  assert timers.metrics()['time/sampler_wait_fraction'] == Stat(0.0, 2.0)


def test_a_wait_that_raises_is_measured():
  now = [0.0]
  timers = metrics.Timers(lambda: now[0])
  with pytest.raises(KeyError):
    with timers.measure('x'):
      now[0] = 2.0
      raise KeyError
  assert timers.metrics()['time/x_fraction'] == Stat(2.0, 2.0)


def test_json_row_types_are_exact(tmp_path):
  writer = metrics.MetricsWriter(tmp_path, False, None)
  writer.write(np.int64(1), {'x': np.float32(0.1), 'n': np.int64(3)})
  writer.close()
  row = json.loads((tmp_path / 'metrics.jsonl').read_text())
  assert row['x'] == float(np.float32(0.1)) and row['n'] == 3.0


# --- A full disk ---------------------------------------------------------------------------------------------------------------


def full(tmp_path, name):
  """A file to which nothing can be written for want of room."""
  (tmp_path / name).symlink_to('/dev/full')
  return tmp_path / name


def test_a_full_disk_is_told_with_the_file_and_what_to_do(tmp_path):
  for name, write in (
      ('ledger.jsonl', lambda: ledger.write(1, 0, [])),
      ('metrics.jsonl', lambda: writer.write(1, {'x': 1.0}))):
    ledger, writer = metrics.Ledger(tmp_path, 0), metrics.MetricsWriter(tmp_path, False, 0)
    (tmp_path / name).unlink(missing_ok=True)
    writer._file = open(full(tmp_path, name), 'a')
    with pytest.raises(OSError, match=f'{name} cannot be written: No space left on device; make room'):
      write()
    (tmp_path / name).unlink()
