"""The environment of questions over data sources: task sets, mixtures, and rows that are told with file and number."""

import json
import pathlib

import pytest

from sao_jax import data, environments

DATA = pathlib.Path(__file__).parent / 'data'
TRAIN = {'path': str(DATA / 'gsm8k' / 'train.jsonl'), 'parse': 'gsm8k'}
TEST = {'path': str(DATA / 'gsm8k' / 'test.jsonl'), 'parse': 'gsm8k'}
MATH = {'path': str(DATA / 'math500' / 'test.jsonl'), 'parse': 'math'}


def make(source, **settings):
  return environments.make('question_answer', source=source, grader='exact', **settings)


def test_both_splits_are_rows_with_an_end():
  environment = make({'train': TRAIN, 'test': TEST})
  assert [(s.name, s.start, s.size, s.weight) for s in environment.task_sets('train')] == [('gsm8k/train', 0, 12, None)]
  assert [s.size for s in environment.task_sets('test')] == [6]
  assert environment.sample_task(0, 'train', 3).data['question'].startswith('Natalia sold clips')
  assert environment.sample_task(0, 'train', 3).data == environment.sample_task(0, 'train', 4).data
  for index in (-1, 12):
    with pytest.raises(ValueError, match='train split has tasks 0 to 11'):
      environment.sample_task(index, 'train', 0)


def test_one_source_is_divided_and_every_row_is_on_one_side():
  environment = make([{**TRAIN, 'weight': 1}, {**MATH, 'weight': 2}], test_share=0.3)
  sides = {split: environment.task_sets(split) for split in ('train', 'test')}
  assert [s.weight for s in sides['train']] == [1, 2] and sides['train'][1].start == sides['train'][0].size
  assert sum(s.size for sets in sides.values() for s in sets) == 20
  questions = {
      split: [environment.sample_task(i, split, 0).data['question'] for i in range(sum(s.size for s in sets))] for split, sets in sides.items()}
  assert len(set(questions['train']) | set(questions['test'])) == 20 and not set(questions['train']) & set(questions['test'])


def test_a_stream_draws_the_parts_by_their_weights():
  environment = make({'train': [{**TRAIN, 'weight': 1}, {**MATH, 'weight': 3}], 'test': TEST})
  mine = data.PromptStream(environment, seed=0)
  drawn = [mine.next()[2].data for _ in range(40)]
  assert sum('level' in row for row in drawn) == 30
  assert len({row['question'] for row in drawn if 'level' in row}) == 8 and len({row['question'] for row in drawn if 'level' not in row}) == 10
  assert len(data.heldout(environment, 50, 0)) == 6


@pytest.mark.parametrize('row, message', [
    ({'question': 'q'}, "'answer' must be a text with something in it, got None; the row has 'question'"),
    ({'question': ' ', 'answer': '1'}, "'question' must be a text"), ({'problem': 'q', 'answer': '1'}, r"fields=\{'question': COLUMN\}"),
    ({'question': 'q', 'answer': ['1']}, "'answer' must be a text")])
def test_a_late_bad_row_is_told_before_any_work(tmp_path, row, message):
  path = tmp_path / 'rows.jsonl'
  path.write_text('\n'.join(json.dumps(r) for r in [*({'question': f'q{i}', 'answer': i} for i in range(20)), row]))
  with pytest.raises(ValueError, match=rf'rows.jsonl, line 21: .*{message}'):
    make(str(path))


@pytest.mark.parametrize('content, message', [
    ('Question;Answer\nq;1\n', "row 1 .line 2.: 'question' must be a text with something in it, got None; the row has 'Question;Answer'"),
    ('question,answer\nq,\n', "row 1 .line 2.: 'answer' must be a text")])
def test_rows_of_a_small_file_are_judged_before_they_are_divided(tmp_path, content, message):
  """A single row leaves one of the splits empty; that is not what is wrong here."""
  (tmp_path / 'rows.csv').write_text(content)
  with pytest.raises(ValueError, match=message):
    make(str(tmp_path / 'rows.csv'))


@pytest.mark.parametrize('source, settings, message', [
    ({'train': TRAIN}, {}, "has train and test, and nothing else; got 'train'"),
    ({'train': TRAIN, 'test': TEST, 'val': TEST}, {}, "nothing else; got 'train', 'test', 'val'"),
    (TRAIN, {'grader_settings': ['auto']}, 'grader_settings must map names'), (TRAIN, {'grader_settings': 'ab'}, 'grader_settings must map names')])
def test_wrong_settings_are_told(source, settings, message):
  with pytest.raises(ValueError, match=message):
    make(source, **settings)


def test_a_missing_setting_and_a_grader_that_is_no_name():
  with pytest.raises(ValueError, match="'question_answer' needs the setting 'source'; it has source, grader"):
    environments.make('question_answer')
  with pytest.raises(ValueError, match=r"Unknown grader \['math'\]"):
    environments.make('question_answer', source=TRAIN, grader=['math'])


def test_more_hosts_than_prompts():
  environment = make({'train': TRAIN, 'test': TEST})
  with pytest.raises(ValueError, match='data.epochs=2 gives 24 prompts, fewer than the 25 hosts'):
    data.PromptStream(environment, seed=0, epochs=2, host=0, hosts=25)
  assert not data.PromptStream(environment, seed=0, epochs=2, host=23, hosts=24).exhausted
