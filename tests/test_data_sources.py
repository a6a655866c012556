"""Sources of prompts: every format gives the same plain rows, known forms are parsed, and what is wrong is told with file and row."""

import csv
import gzip
import json
import os
import pathlib
import threading

import pytest

from sao_jax import data_sources
from sao_jax.data_sources import rows

DATA = pathlib.Path(__file__).parent / 'data'
ROWS = [{'problem': f'What is {i} + {i}?', 'answer': str(2 * i)} for i in range(7)]


def write_jsonl(path, values, newline='\n'):
  path.write_bytes(newline.join(json.dumps(v) for v in values).encode())
  return str(path)


def write_csv(path, values, delimiter=','):
  with open(path, 'w', newline='', encoding='utf-8') as file:
    writer = csv.DictWriter(file, list(values[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(values)
  return str(path)


def all_rows(source):
  return [source[i] for i in range(len(source))]


def test_every_format_gives_the_same_rows(tmp_path):
  import pyarrow
  from pyarrow import parquet

  parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / 'a.parquet')
  (tmp_path / 'a.json').write_text(json.dumps(ROWS))
  paths = [
      write_jsonl(tmp_path / 'a.jsonl', ROWS), write_csv(tmp_path / 'a.csv', ROWS), write_csv(tmp_path / 'a.tsv', ROWS, '\t'),
      tmp_path / 'a.json', tmp_path / 'a.parquet']
  for name in ('a.jsonl', 'a.csv', 'a.json'):
    (tmp_path / f'{name}.gz').write_bytes(gzip.compress((tmp_path / name).read_bytes()))
    paths.append(tmp_path / f'{name}.gz')
  for path in paths:
    source = data_sources.open(path)
    assert all_rows(source) == ROWS, path
    assert [p.size for p in source.parts] == [7]


@pytest.mark.parametrize('text', [
    '{"a": 1}\r\n\r\n{"a": 2}\r\n', '\ufeff{"a": 1}\n{"a": 2}', '{"a": 1}\n   \n{"a": 2}\n\n', '{"a": "\\u2028x"}\n{"a": "\u2028"}'])
def test_lines_end_at_newlines_alone(tmp_path, text):
  (tmp_path / 'a.jsonl').write_bytes(text.encode())
  assert len(data_sources.open(tmp_path / 'a.jsonl')) == 2


def test_csv_fields_hold_line_breaks_and_commas(tmp_path):
  values = [{'Problem': 'a,\n"b"\n\nc', 'Short Answer': '$x,\\ y$'}, {'Problem': 'd', 'Short Answer': ''}]
  assert all_rows(data_sources.open(write_csv(tmp_path / 'a.csv', values))) == values


def test_fields_skip_and_limit(tmp_path):
  path = write_jsonl(tmp_path / 'a.jsonl', ROWS)
  source = data_sources.open({'path': path, 'fields': {'question': 'problem'}, 'skip': 2, 'limit': 3})
  assert [r['question'] for r in all_rows(source)] == [r['problem'] for r in ROWS[2:5]] and source[0]['answer'] == '4'
  assert source.where(0) == f'{path}, line 3'
  assert len(data_sources.open({'path': path, 'limit': 99})) == 7
  for index in (-1, 3):
    with pytest.raises(IndexError, match='rows 0 to 2'):
      source[index]


def test_split_in_the_path(tmp_path):
  write_jsonl(tmp_path / 'train.jsonl', ROWS)
  template = str(tmp_path / '{split}.jsonl')
  assert len(data_sources.open({'path': template, 'split': 'train'})) == 7
  with pytest.raises(ValueError, match='needs a split'):
    data_sources.open(template)
  with pytest.raises(ValueError, match='only tfds: data sets and paths with {split}'):
    data_sources.open({'path': str(tmp_path / 'train.jsonl'), 'split': 'train'})


def test_a_changed_file_is_read_again_and_has_another_fingerprint(tmp_path):
  path = write_jsonl(tmp_path / 'a.jsonl', ROWS)
  first = data_sources.open(path)
  assert data_sources.open(path) is first
  cut = data_sources.open({'path': path, 'limit': 3})
  renamed = data_sources.open({'path': path, 'fields': {'question': 'problem'}})
  write_jsonl(tmp_path / 'a.jsonl', [*ROWS[:-1], {'problem': 'other', 'answer': '1'}])
  changed = data_sources.open(path)
  assert changed[6]['problem'] == 'other' and len({s.fingerprint for s in (first, cut, renamed, changed)}) == 4
  (tmp_path / 'b').mkdir()
  assert data_sources.open(write_jsonl(tmp_path / 'b' / 'other.jsonl', ROWS)).fingerprint == first.fingerprint


def test_rows_are_read_from_many_threads(tmp_path):
  source = data_sources.open(write_jsonl(tmp_path / 'a.jsonl', ROWS * 50))
  wrong = []

  def read():
    wrong.extend(i for i in range(len(source)) if source[i] != ROWS[i % 7])

  threads = [threading.Thread(target=read) for _ in range(8)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(120)
  assert len(source) == 350 and not wrong


# --- What is wrong ---


@pytest.mark.parametrize('name, content, message', [
    ('a.jsonl', '', 'holds 0 rows'),
    ('a.jsonl', '\n\n', 'holds 0 rows'),
    ('a.jsonl', '{"a": 1}\n{"a": \n', r'a.jsonl, line 2: not JSON'),
    ('a.jsonl', '{"a": 1}\n\n[1]\n', r'a.jsonl, line 3: a row must be a JSON object.*list'),
    ('a.jsonl', '{"a": NaN}', r'line 1: NaN and Infinity are no JSON numbers'), ('a.json', '[{"a": 1}, {"a": -Infinity}]', r'a.json, element 2: NaN and'),
    ('a.jsonl', '{"a": 1e999}', r'line 1: NaN and Infinity'), ('a.jsonl', '{"a": ' + '9' * 5000 + '}', r'line 1: a number has too many digits'),
    ('a.jsonl', '{"a": 1}\n{"a": "\\udfff"}', r'line 2: half of a surrogate pair .*udfff.* is no text'),
    ('a.jsonl', b'{"a": 1}\n{"a": "\xff"}', r'line 2: not UTF-8'),
    ('a.jsonl', '{"a": ' + '[' * 200_000, r'line 1: n'),
    ('a.json', '{"a": 1}\n{"a": 2}', r'a.json: not JSON.*ends in .jsonl'),
    ('a.json', '{"a": 1}', 'one JSON array of objects, got dict'),
    ('a.json', '[{"a": 1}, 2]', r'a.json, element 2: a row must be'),
    ('a.csv', 'a,b\n1,2\n3\n', r'a.csv, row 2 \(line 3\): 1 fields, the header has 2 \(a, b\)'),
    ('a.csv', 'a,b\n"1\n\n",2\n3,4,5\n', r'a.csv, row 2 \(line 5\): 3 fields'),
    ('a.csv', 'a,b\n1,"2', r'row 1 \(line 2\): not CSV'),
    ('a.csv', 'a,a\n1,2\n', "header names the column 'a' more than once"),
    ('a.csv', 'a,b\n', 'holds 0 rows'),
    ('a.csv', b'a\n\xff\n', r'a.csv, line 2: not UTF-8'),
    ('a.jsonl.gz', 'no gzip', 'not a whole gzip file'),
    ('a.parquet', 'no parquet', 'not a whole Parquet file'),
    ('a.jsonl', '{"a": 1}'.encode('utf-16'), 'is UTF-16'), ('a.csv', 'a,b\n1,2'.encode('utf-16-le'), 'line 1: holds a zero byte'),
    ('a.jsonl', b'{"a": 1}\n\0', 'line 2: holds a zero byte'), ('a.jsonl.gz', gzip.compress('{"a": 1}'.encode('utf-16'), mtime=0), 'is UTF-16'),
    ('a.jsonl', gzip.compress(b'{"a": 1}', mtime=0), 'is packed by gzip; its name must end in .gz'), ('a.json', 'PK\x03\x04', 'is a zip archive'),
    ('a.jsonl', b'PAR1\x15\x04', 'is a Parquet file; its name'), ('a.csv', '<!DOCTYPE html>\n', 'is a web page'),
    *[(f'a.{ending}', 'version https://git-lfs.github.com/spec/v1', 'is a pointer of Git LFS') for ending in ('csv', 'parquet', 'json.gz')],
    ('a.txt', 'x', 'must end in one of .jsonl, .json, .csv, .tsv, .parquet'),
    ('a', 'x', 'must end in one of'),
])
def test_a_bad_file_is_told_with_its_row(tmp_path, name, content, message):
  (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
  with pytest.raises(ValueError, match=message):
    data_sources.open(tmp_path / name)


def test_a_cut_gzip_file_and_missing_files(tmp_path):
  whole = gzip.compress(json.dumps(ROWS[0]).encode() * 100)
  (tmp_path / 'a.jsonl.gz').write_bytes(whole[:-9])
  with pytest.raises(ValueError, match='not a whole gzip file'):
    data_sources.open(tmp_path / 'a.jsonl.gz')
  with pytest.raises(FileNotFoundError, match='none.jsonl'):
    data_sources.open(tmp_path / 'none.jsonl')
  (tmp_path / 'b.jsonl').mkdir()
  with pytest.raises(ValueError, match='is a folder'):
    data_sources.open(tmp_path / 'b.jsonl')
  with pytest.raises(FileNotFoundError, match='~nosuchuser'):
    data_sources.open('~nosuchuser/a.jsonl')
  with pytest.raises(ValueError, match="nothing here opens addresses that begin with 'foo://'"):
    data_sources.open('foo://bucket/a.jsonl')


def test_pipes_and_devices_are_told_and_not_waited_for(tmp_path):
  os.mkfifo(tmp_path / 'a.jsonl')
  (tmp_path / 'b.csv').symlink_to('/dev/zero')
  for name in ('a.jsonl', 'b.csv'):
    with pytest.raises(ValueError, match=f'{name} is no file but a pipe or a device'):
      data_sources.open(tmp_path / name)


def test_long_fields_of_csv_are_read(tmp_path):
  values = [{'Problem': 'x' * 200_000, 'Short Answer': '1'}]
  assert all_rows(data_sources.open(write_csv(tmp_path / 'a.csv', values))) == values


@pytest.mark.parametrize('column, message', [
    (lambda pa: pa.array([1], pa.duration('s')), "row 1: column 't': a timedelta is no plain value. Leave the column out"),
    (lambda pa: pa.array([2**55], pa.timestamp('ms')), "row 1: column 't': .*out of range"),
    (lambda pa: pa.array([b'\xff']), "row 1: column 't': bytes that are not UTF-8"),
    (lambda pa: pa.array([float('nan')]), "row 1: column 't': nan is no number")])
def test_a_column_of_parquet_that_cannot_be_read_is_named(tmp_path, column, message):
  import pyarrow
  from pyarrow import parquet

  parquet.write_table(pyarrow.table({'question': ['q'], 't': column(pyarrow)}), tmp_path / 'a.parquet')
  with pytest.raises(ValueError, match=f'a.parquet, {message}'):
    data_sources.open(tmp_path / 'a.parquet')


def test_a_column_of_parquet_twice(tmp_path):
  import pyarrow
  from pyarrow import parquet

  parquet.write_table(pyarrow.Table.from_arrays([pyarrow.array(['a'])] * 2, names=['x', 'x']), tmp_path / 'a.parquet')
  with pytest.raises(ValueError, match="names the column 'x' more than once"):
    data_sources.open(tmp_path / 'a.parquet')


@pytest.mark.parametrize('settings, message', [
    ({}, 'needs a path'), ({'path': ''}, 'needs a path'), (3, 'needs a path'), ({'file': 'a.jsonl'}, "Unknown setting 'file'.*known: path"),
    ({'path': 'P', 'skip': -1}, 'skip .* at least 0'), ({'path': 'P', 'limit': 0}, 'limit .* at least 1'),
    ({'path': 'P', 'limit': True}, 'limit .* an integer'), ({'path': 'P', 'skip': 7}, 'skip=7 leaves none'),
    ({'path': 'P', 'fields': ['a']}, 'fields .* must map'),
    ({'path': 'P', 'fields': {'question': 'text'}}, r"line 1: has no field 'text'; it has 'problem', 'answer'"),
    ({'path': 'P', 'parse': 'gsm9k'}, 'parse .* one of gsm8k, math'), ({'path': 'P', 'weight': 1}, 'parts of a mixture'),
    ({'path': 'P', 'check': 1}, 'check'), ([], 'at least one source'), ([{'path': 'P', 'weight': 0}], 'positive number'),
    ([{'path': 'P', 'weight': float('nan')}], 'positive number'), ([{'path': 'P', 'weight': 10**400}], 'positive number, at most 1e.12'),
    ({'path': 'P', 'data_dir': 'd'}, 'only tfds: data sets have one'), ({'path': 'a\0.jsonl'}, 'needs a path'), ([{'path': 'P', 'weight': 2}, 'P'], 'Either every part'),
])
def test_wrong_settings_are_told(tmp_path, settings, message):
  path = write_jsonl(tmp_path / 'a.jsonl', ROWS)

  def fill(value):
    if isinstance(value, dict):
      return {k: path if v == 'P' else v for k, v in value.items()}
    return [fill(v) for v in value] if isinstance(value, list) else path if value == 'P' else value

  with pytest.raises(ValueError, match=message):
    data_sources.open(fill(settings))


def test_a_later_bad_row_is_told_when_it_is_opened_or_when_it_is_read(tmp_path):
  path = write_jsonl(tmp_path / 'a.jsonl', [*ROWS, {'problem': 'x'}])
  settings = {'path': path, 'fields': {'reply': 'answer'}}
  with pytest.raises(ValueError, match="line 8: has no field 'answer'"):
    data_sources.open(settings)
  source = data_sources.open({**settings, 'check': False})
  assert source[6]['reply'] == '12'
  with pytest.raises(ValueError, match="line 8: has no field 'answer'"):
    source[7]


# --- Mixtures ---


def test_a_mixture_is_its_parts_one_after_the_other(tmp_path):
  a, b = write_jsonl(tmp_path / 'a.jsonl', ROWS[:3]), write_jsonl(tmp_path / 'b.jsonl', ROWS[3:])
  mixed = data_sources.open([{'path': a, 'weight': 3}, {'path': b, 'weight': 1}])
  assert all_rows(mixed) == ROWS and mixed.where(3) == f'{b}, line 1'
  assert [(p.start, p.size, p.weight) for p in mixed.parts] == [(0, 3, 3), (3, 4, 1)]
  plain = data_sources.open([a, b])
  assert [p.weight for p in plain.parts] == [None, None] and plain.fingerprint != mixed.fingerprint
  assert data_sources.open([a, b]) is plain
  twice = data_sources.open([a, a])
  assert len({p.name for p in twice.parts}) == 2
  with pytest.raises(IndexError):
    mixed[7]


# --- Known forms, on published rows ---


@pytest.mark.parametrize('path, form, questions, answers', [
    ('gsm8k/test.jsonl', 'gsm8k', 'Janet', ['18', '3', '70000', '540', '20', '64']),
    ('math500/test.jsonl', 'math', 'Convert the point', None),
    ('beyondaime/BeyondAIME.jsonl', 'beyondaime', 'An explorer', None),
    ('imo_answerbench/answerbench.csv', 'imo_answerbench', 'Given a positive integer', None),
    ('humaneval/HumanEval.jsonl', 'humaneval', 'from typing import List', ['', '', '']),
    ('mbpp/mbpp.jsonl', 'mbpp', 'Write a function', [''] * 5),
    ('made/aime.jsonl', 'aime', 'Find the remainder', ['1', '30', '78']),
    ('made/hmmt.json', 'hmmt', 'Compute', ['\\frac{5}{6}', '5\\sqrt{3}', '1023']),
])
def test_published_rows_are_parsed(path, form, questions, answers):
  source = data_sources.open({'path': str(DATA / path), 'parse': form})
  found = all_rows(source)
  assert len(found) >= 3 and found[0]['question'].startswith(questions)
  assert all(isinstance(r['question'], str) and isinstance(r['answer'], str) for r in found)
  if answers is not None:
    assert [r['answer'] for r in found] == answers
  if form == 'math':
    raw = all_rows(data_sources.open(str(DATA / path)))
    assert [r['answer'] for r in found] == [r['answer'] for r in raw]
    assert [rows.last_boxed(r['solution']) for r in raw] == [r['answer'] for r in raw]  # Gold answers are the last boxes.
    assert [rows.math({k: v for k, v in r.items() if k != 'answer'})['answer'] for r in raw] == [r['answer'] for r in raw]
  if form == 'gsm8k':
    assert all('<<' not in r['solution'] and '####' not in r['solution'] for r in found)
    assert found[0]['solution'].startswith('Janet sells 16 - 3 - 4 = 9 duck eggs a day.')


@pytest.mark.parametrize('form, row, message', [
    ('gsm8k', {'question': 'q'}, "no field 'answer'; it has 'question'"),
    ('gsm8k', {'question': 'q', 'answer': 'so 18'}, 'must end in "#### NUMBER"'),
    ('gsm8k', {'question': 'q', 'answer': '#### eighteen'}, 'must end in'),
    ('gsm8k', {'question': '  ', 'answer': '#### 1'}, "'question' is empty"),
    ('gsm8k', {'question': None, 'answer': '#### 1'}, "'question' must be text, got None"),
    ('math', {'problem': 'q', 'answer': ''}, "'answer' is empty"),
    ('math', {'problem': 'q', 'solution': 'so it is \\boxed{3'}, 'no answer, and no'),
    ('beyondaime', {'problem': 'q', 'answer': '3.5'}, 'must be an integer'),
    ('beyondaime', {'problem': 'q', 'answer': True}, 'must be text'),
    ('aime', {'problem': 'q', 'answer': 1000}, 'from 0 to 999'),
    ('aime', {'answer': 10}, "no field 'problem' or 'question'"),
    ('hmmt', {'problem': 'q', 'answer': ['1', '2']}, "'answer' must be text"),
    ('imo_answerbench', {'Problem': 'q', 'Short Answer': '', 'Problem ID': 'x'}, "'Short Answer' is empty"),
    ('imo_answerbench', {'Problem': 'q', 'Short Answer': '1'}, "no field 'Problem ID'"),
    ('humaneval', {'prompt': 'def f():', 'entry_point': 'f; import os', 'test': 'def check(c): pass'}, 'name of a function'),
    ('humaneval', {'prompt': 'def f():', 'entry_point': 'f', 'test': 'assert True'}, 'must define check'),
    ('mbpp', {'text': 'q', 'test_list': []}, 'list of assertions'),
    ('mbpp', {'text': 'q', 'test_list': 'assert 1'}, 'list of assertions'),
    ('mbpp', {'text': 'q', 'test_list': ['assert 1'], 'test_setup_code': 3}, 'must be text'),
    ('mbpp', {'text': 'q', 'test_list': ['assert 1']}, "no field 'task_id'"),
    ('mbpp', {'text': 'q', 'task_id': 11, 'test_list': ['assert 1', 'assert (']}, "'test_list' is no Python code: '.' was never closed"),
    ('mbpp', {'text': 'q', 'task_id': 11, 'test_list': ['assert 1'], 'test_setup_code': 'def ('}, "'test_setup_code' is no Python code"),
    ('mbpp', {'text': 'q', 'task_id': '1' * 5000, 'test_list': ['assert 1']}, "'task_id' must be a text of at most 200 characters or an integer"),
    *[('math', {'problem': 'q', 'answer': '1', 'unique_id': found}, "'unique_id' must be a text") for found in ('', {'a': 1}, 1.5, True)],
    ('math', {'problem': 'q'}, "no field 'answer' or 'solution'"),
    ('humaneval', {'prompt': 'def f():', 'entry_point': 'class', 'test': 'def check(c): pass'}, 'name of a function'),
    ('humaneval', {'prompt': 'def g():', 'entry_point': 'f', 'test': 'def check(c): pass'}, "must begin the function 'f'"),
    ('humaneval', {'prompt': 'def f():', 'entry_point': 'f', 'test': 'def check(c):'}, "'test' is no Python code"),
    *[('beyondaime', {'problem': 'q', 'answer': found}, 'must be an integer') for found in ('1,2', '1,23', '1' * 5000)],
    ('gsm8k', {'question': 'q', 'answer': '#### 1,2'}, 'must end in'), ('gsm8k', {'question': 'q', 'answer': '#### ' + '1' * 5000}, 'must end in'),
])
def test_a_malformed_row_is_told_with_file_and_number(tmp_path, form, row, message):
  good = {'gsm8k': 'gsm8k/test.jsonl', 'math': 'math500/test.jsonl', 'beyondaime': 'beyondaime/BeyondAIME.jsonl', 'aime': 'made/aime.jsonl',
          'humaneval': 'humaneval/HumanEval.jsonl', 'mbpp': 'mbpp/mbpp.jsonl'}
  first = [json.loads((DATA / good[form]).read_text().splitlines()[0])] if form in good else []
  path = write_jsonl(tmp_path / 'a.jsonl', [*first, row])
  with pytest.raises(ValueError, match=rf'a\.jsonl, line {len(first) + 1}: .*{message}'):
    data_sources.open({'path': path, 'parse': form})


@pytest.mark.parametrize('text, box', [
    (r'\boxed{3}', '3'), (r'\boxed{1} and \boxed{\frac{1}{2}}', r'\frac{1}{2}'), (r'\boxed{\{1, 2\}}', r'\{1, 2\}'), (r'\fbox{7}', '7'),
    (r'\boxed{4} then \boxed{5', '4'), ('none', ''), (r'\boxed {8}', '8'), (r'\boxed{a \\}', r'a \\'), (r'\boxed{\boxed{2}}', '2')])
def test_last_boxed(text, box):
  assert rows.last_boxed(text) == box


@pytest.mark.parametrize('answer, final', [
    ('x\n#### 1,234', '1234'), ('x #### -5', '-5'), ('a #### b\n#### 2.50', '2.50'), ('####$18', '18')])
def test_gsm8k_answers(answer, final):
  assert rows.gsm8k({'question': 'q', 'answer': answer})['answer'] == final
