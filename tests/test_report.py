"""Progress, learning curve, readable trajectories and JSON files."""

import io
import json
import math

import numpy as np
import pytest

from sao_jax import report
from sao_jax.types import Rollout, Stat

EVALUATED = {'': 0.5, '_low': 0.4, '_high': 0.6}


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
  bar = report.ProgressBar(enabled=True, stream=stream, every_s=5.0)
  for done in range(1, 6):
    now[0] += 2.0
    bar.update('sft', done, 5)
    bar.show('sft', {'sft/loss': Stat(np.float32(done), np.float32(2)), 'other': 3.0})
  bar.line('saved')
  for done in range(1, 3):
    now[0] += 2.0
    bar.update('rl', done, 9)
    bar.show('rl', {'reward/success': Stat(0.0, 0.0), 'reward/mean': 0.25})
  bar.close()
  bar.close()  # A second close is harmless.
  assert stream.getvalue().splitlines() == [
      'sft: 3/5 after 4 s, loss 1', 'sft: 5/5 after 8 s, loss 2.5', 'saved', 'rl: 2/9 after 2 s, reward 0.25']
  assert '\r' not in stream.getvalue()


class Full(io.StringIO):
  """A stream whose reader is gone after `room` writes."""

  def __init__(self, room, terminal):
    super().__init__()
    self._room, self._terminal = room, terminal

  def isatty(self):
    return self._terminal

  def write(self, text):
    self._room -= 1
    if self._room < 0:
      raise BrokenPipeError(32, 'Broken pipe')
    return super().write(text)


@pytest.mark.parametrize('terminal', [False, True])
@pytest.mark.parametrize('room', [0, 1, 5])
def test_progress_that_nobody_can_read_ends_nothing(room, terminal):
  bar = report.ProgressBar(enabled=True, stream=Full(room, terminal), every_s=0.0)
  for done in range(1, 4):
    bar.update('sft', done, 3)
    bar.show('sft', {'sft/loss': 1.0})
    bar.note('evaluation: 3/8')
    bar.waiting(9.0, 'none in flight')
  bar.line('saved')
  bar.close()
  assert bar._done == bar._total == 3  # It went on counting.


def test_no_standard_error_is_no_progress(monkeypatch):
  monkeypatch.setattr(report.sys, 'stderr', None)
  bar = report.ProgressBar(enabled=True)
  bar.update('sft', 1, 3)
  bar.line('saved')
  bar.close()
  assert bar._done == 1 and not bar._terminal


def test_waiting_before_the_first_step_names_no_stage():
  stream = io.StringIO()
  report.ProgressBar(enabled=True, stream=stream, every_s=0.0).waiting(12.0, '3 rollouts in flight')
  assert stream.getvalue() == 'waiting for rollouts since 12 s, 3 rollouts in flight\n'


def test_settings_of_another_shape_are_told(tmp_path):
  report.write_json(tmp_path / 'config.json', [1, 2])
  with pytest.raises(ValueError, match='config.json is damaged .it holds a list, not settings'):
    report.read_settings(tmp_path / 'config.json')


def test_plain_notes_are_rare(monkeypatch):
  now = [0.0]
  monkeypatch.setattr(report.time, 'monotonic', lambda: now[0])
  stream = io.StringIO()
  bar = report.ProgressBar(enabled=True, stream=stream, every_s=5.0)
  for done in range(12):
    now[0] += 1.0
    bar.note(f'evaluation {done}')
  bar.waiting(4.0, 'x')
  assert stream.getvalue().splitlines() == ['evaluation 4', 'evaluation 9']


def test_a_note_does_not_hide_the_end_of_a_stage(monkeypatch):
  now = [0.0]
  monkeypatch.setattr(report.time, 'monotonic', lambda: now[0])
  stream = io.StringIO()
  bar = report.ProgressBar(enabled=True, stream=stream, every_s=5.0)
  bar.update('sft', 1, 2)
  now[0] = 1.0
  bar.update('sft', 2, 2)
  now[0] = 9.0
  bar.note('evaluation 1/4')
  bar.line('evaluated')
  bar.update('rl', 1, 4)
  assert stream.getvalue().splitlines() == ['evaluation 1/4', 'sft: 2/2 after 1 s', 'evaluated']


def test_bar_on_a_terminal():
  stream = Terminal()
  bar = report.ProgressBar(enabled=True, stream=stream)
  for done in range(1, 5):
    bar.update('rl', done, 4)
    bar.show('rl', {'value/loss': 0.25})
  bar.line('evaluated')
  bar.update('late', 1, 4)
  bar.note('evaluation 3/4')
  bar.waiting(9.0, '3 rollouts in flight')
  bar.line('still alive')
  bar.close()
  for text in ('4/4', 'value loss 0.25', 'evaluation 3/4', 'waiting for rollouts since 9 s, 3 rollouts in flight', 'still alive'):
    assert text in stream.getvalue()
  assert 'after' not in stream.getvalue()  # No plain lines beside the bars.


@pytest.mark.parametrize('stream', [io.StringIO(), Terminal()])
def test_disabled_progress_writes_nothing(stream):
  bar = report.ProgressBar(enabled=False, stream=stream, every_s=0.0)
  bar.update('rl', 4, 4)
  bar.show('rl', {'value/loss': 1.0})
  bar.note('x')
  bar.line('x')
  bar.waiting(100.0, 'x')
  bar.close()
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


def test_series_leaves_out_missing_and_null():
  rows = [{'step': 1, 'a': 1.0}, {'step': 2}, {'step': 3, 'a': None}, {'step': 4, 'a': 0}]
  assert report.series(rows, 'a') == [(1, 1.0), (4, 0)]


def test_trailing_mean():
  assert report.trailing_mean([1, 2, 3, 4], 2) == [1.0, 1.5, 2.5, 3.5]


def test_learning_curve_is_a_png(tmp_path):
  metrics, png = tmp_path / 'metrics.jsonl', tmp_path / 'curve.png'
  assert not report.learning_curve(metrics, png, title='none') and not png.exists()
  metrics.write_text('')
  assert not report.learning_curve(metrics, png, title='none') and not png.exists()
  rows = [{'step': s, 'reward/success': s / 20, 'value/explained_variance': 0.1 * s, 'dis/above': 0.0, 'dis/below': 0.01} for s in range(20)]
  evaluated = {f'evaluation/success{end}_{name}': value for name in ('greedy', 'temperature_1') for end, value in EVALUATED.items()}
  rows += [{'step': s, **evaluated} for s in (0, 19)]
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
  assert 'No rollouts.' in (tmp_path / 'none.md').read_text() and (tmp_path / 'none.jsonl').read_bytes() == b''


def test_lines_are_appended(tmp_path):
  path = tmp_path / 'rollouts' / 'quarantine.jsonl'
  for reason in ('late', 'odd'):
    report.append_line(path, {'reason': reason, 'x': math.inf})
  assert [json.loads(line) for line in path.read_text().splitlines()] == [{'reason': 'late', 'x': None}, {'reason': 'odd', 'x': None}]


def test_a_full_disk_is_told(tmp_path):
  (tmp_path / 'lines.jsonl').symlink_to('/dev/full')
  with pytest.raises(OSError, match='lines.jsonl cannot be written: No space left on device; make room'):
    report.append_line(tmp_path / 'lines.jsonl', {'a': 1})


def test_a_damaged_json_file_is_named(tmp_path):
  report.write_json(tmp_path / 'good.json', {'a': (1, 2)})
  assert report.read_json(tmp_path / 'good.json') == {'a': [1, 2]}
  (tmp_path / 'bad.json').write_text('{"a": ')
  with pytest.raises(ValueError, match='bad.json is damaged'):
    report.read_json(tmp_path / 'bad.json')
