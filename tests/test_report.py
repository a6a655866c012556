"""Progress, learning curve, readable trajectories and JSON files."""

import io
import json
import math

import numpy as np
import pytest

from sao_jax import report
from sao_jax.types import Rollout


class Terminal(io.StringIO):

  def isatty(self):
    return True


def make_rollout(text: str = 'Qaabb', mask: str = '.xx.x', turns: str = '00001', **changes) -> Rollout:
  action = np.array([m == 'x' for m in mask])
  fields = dict(
      tokens=np.frombuffer(text.encode(), np.uint8).astype(np.int32), action_mask=action,
      behaviour_log_prob=np.where(action, -0.5, 0).astype(np.float32), policy_version=np.where(action, 3, -1).astype(np.int32),
      reward=np.zeros(len(text), np.float32), turn=np.array([int(t) for t in turns], np.int32), ending='terminated', stop_reason='answer',
      prompt_id=7, attempt=0, environment='calculator', metrics={'success': 1.0})
  return Rollout(**{**fields, **changes})


def decode(ids):
  return bytes(ids).decode('utf-8', 'surrogateescape')


# --- Progress ---


def test_plain_lines_without_a_terminal(monkeypatch):
  now = [0.0]
  monkeypatch.setattr(report.time, 'monotonic', lambda: now[0])
  stream = io.StringIO()
  with report.Progress(10, 'rl', enabled=True, stream=stream, every_s=5.0) as progress:
    for done in range(1, 11):
      now[0] += 2.0
      progress.update(done, success=done / 10, entropy=math.nan)
    progress.note('saved')
  lines = stream.getvalue().splitlines()
  assert lines == [
      'rl: 3/10 after 6 s success 0.3 entropy -', 'rl: 6/10 after 12 s success 0.6 entropy -', 'rl: 9/10 after 18 s success 0.9 entropy -',
      'saved', 'rl: 10/10 after 20 s success 1 entropy -']
  assert '\r' not in stream.getvalue()


def test_bar_on_a_terminal():
  stream = Terminal()
  progress = report.Progress(4, 'rl', enabled=True, stream=stream)
  for done in range(1, 5):
    progress.update(done, loss=0.25)
  progress.note('evaluated')
  progress.close()
  progress.close()  # A second close is harmless.
  assert '4/4' in stream.getvalue() and 'loss 0.25' in stream.getvalue() and 'evaluated' in stream.getvalue()


@pytest.mark.parametrize('stream', [io.StringIO(), Terminal()])
def test_disabled_progress_writes_nothing(stream):
  with report.Progress(4, 'rl', enabled=False, stream=stream) as progress:
    progress.update(4, loss=1.0)
    progress.note('x')
  assert stream.getvalue() == ''


# --- JSON ---


def test_json_is_strict_and_whole(tmp_path):
  path = tmp_path / 'deep' / 'summary.json'
  report.write_json(path, {'a': np.float32(0.5), 'b': math.nan, 'c': (1, np.int64(2)), 'd': np.array([1.0, math.inf]), 'e': True})
  assert json.loads(path.read_text(), parse_constant=pytest.fail) == {'a': 0.5, 'b': None, 'c': [1, 2], 'd': [1.0, None], 'e': True}
  with pytest.raises(TypeError, match='object'):
    report.write_json(path, {'a': object()})
  assert json.loads(path.read_text())['a'] == 0.5  # The failed write left the old file.
  assert [p.name for p in path.parent.iterdir()] == ['summary.json']


def test_unwritable_path_is_named(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(OSError, match='file'):
    report.write_json(tmp_path / 'file' / 'summary.json', {})


def test_package_versions():
  versions = report.package_versions()
  assert versions['jax'].startswith('0.') and versions['python'].startswith('3.')


# --- Metrics and the curve ---


def test_read_metrics_forgives_only_a_cut_last_line(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  path.write_text('{"step": 1, "a": 2}\n{"step": 2, "a"')
  assert report.read_metrics(path) == [{'step': 1, 'a': 2}]
  path.write_text('{"step": 1, "a"\n{"step": 2, "a": 3}\n')
  with pytest.raises(ValueError, match='line 1'):
    report.read_metrics(path)


def test_series_leaves_out_missing_and_null():
  rows = [{'step': 1, 'a': 1.0}, {'step': 2}, {'step': 3, 'a': None}, {'step': 4, 'a': 0}]
  assert report.series(rows, 'a') == [(1, 1.0), (4, 0)]


def test_trailing_mean():
  assert report.trailing_mean([1, 2, 3, 4], 2) == [1.0, 1.5, 2.5, 3.5]


def test_learning_curve_is_a_png(tmp_path):
  metrics, png = tmp_path / 'metrics.jsonl', tmp_path / 'curve.png'
  metrics.write_text('')
  assert not report.learning_curve(metrics, png, title='t') and not png.exists()
  rows = [{'step': s, 'reward/success': s / 20, 'value/explained_variance': 0.1 * s, 'dis/above': 0.0, 'dis/below': 0.01} for s in range(20)]
  rows += [{'step': s, 'evaluation/success_temperature_1': 0.5, 'evaluation/success_greedy': 0.9} for s in (0, 19)]
  metrics.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  assert report.learning_curve(metrics, png, title='calculator, seed 0')
  assert png.read_bytes().startswith(b'\x89PNG') and png.stat().st_size > 10_000
  assert sorted(p.name for p in tmp_path.iterdir()) == ['curve.png', 'metrics.jsonl']


# --- Trajectories ---


def test_segments_cover_every_token_once():
  found = list(report.segments(make_rollout(), decode))
  assert [(s.source, s.turn, s.text, s.start, s.stop, s.versions) for s in found] == [
      ('prompt', 0, 'Q', 0, 1, None), ('policy', 0, 'aa', 1, 3, (3, 3)), ('environment', 0, 'b', 3, 4, None), ('policy', 1, 'b', 4, 5, (3, 3))]


def test_segment_cuts_between_turns_of_adjacent_actions():
  found = list(report.segments(make_rollout(mask='.xxxx', turns='00011', policy_version=np.array([-1, 3, 4, 4, 5])), decode))
  assert [(s.text, s.turn, s.versions) for s in found] == [('Q', 0, None), ('aa', 0, (3, 4)), ('bb', 1, (4, 5))]


def test_trajectory_text_tells_who_wrote_what():
  text = report.trajectory_text(make_rollout(reward=np.array([0, 0, 0, 0, 1], np.float32)), decode)
  assert 'Prompt 7, attempt 0: reward 1' in text and '5 tokens, 3 of them sampled; turns: 2; success 1' in text
  assert text.index('**prompt**') < text.index('**policy, version 3**') < text.index('**environment**')


def test_text_of_the_policy_cannot_break_the_page():
  text = report.trajectory_text(make_rollout('Q```\x1b'), decode)
  assert '\x1b' not in text and '\\x1b' in text
  assert '````text' in report.trajectory_text(make_rollout('`' * 3 + 'ab', mask='...xx'), decode)


def test_samples_are_readable_and_data(tmp_path):
  rollout = make_rollout(metrics={'success': 1.0, 'other': math.nan})
  odd = make_rollout(tokens=np.array([81, 200, 97, 98, 99], np.int32))  # Bytes that are no UTF-8.
  report.write_samples(tmp_path, 'before', [rollout, odd], decode, title='Before')
  data = [json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / 'before.jsonl').read_text().splitlines()]
  assert len(data) == 2 and data[0]['tokens'] == rollout.tokens.tolist() and data[0]['metrics'] == {'success': 1.0, 'other': None}
  assert ''.join(s['text'] for s in data[0]['segments']) == 'Qaabb'
  assert (tmp_path / 'before.md').read_text().startswith('# Before\n')
  report.write_samples(tmp_path, 'none', [], decode, title='None')
  assert 'No rollouts.' in (tmp_path / 'none.md').read_text()
