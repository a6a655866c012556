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
