"""TFDS builders: local files become ArrayRecord data sets, which give the rows back through `tfds.data_source`, without TensorFlow."""

import json
import pathlib
import shutil
import subprocess
import sys

import pytest

from sao_jax import data_sources, datasets

ROOT = pathlib.Path(__file__).resolve().parents[1]
DATA = ROOT / 'tests' / 'data'
FILES = {
    'gsm8k': {'train': 'gsm8k/train.jsonl', 'test': 'gsm8k/test.jsonl'}, 'math': {'test': 'math500/test.jsonl'},
    'beyondaime': {'test': 'beyondaime/BeyondAIME.jsonl'}, 'imo_answerbench': {'test': 'imo_answerbench/answerbench.csv'},
    'prompts': {'train': {'path': str(DATA / 'made' / 'hmmt.json'), 'fields': {'question': 'problem'}, 'limit': 2}}}


def files_of(name):
  return {split: given if isinstance(given, dict) else DATA / given for split, given in FILES[name].items()}


def rows(source):
  return [source[i] for i in range(len(source))]


@pytest.fixture(scope='module')
def built(tmp_path_factory):
  folder = tmp_path_factory.mktemp('tfds')
  for name in FILES:
    path = datasets.build(name, files_of(name), data_dir=folder)
    assert list(path.glob('*.array_record*')), path
  return folder


def test_every_form_is_tested():
  assert set(FILES) == set(datasets.FORMS)


@pytest.mark.parametrize('name', list(FILES))
def test_rows_come_back_as_they_were(built, name):
  for split, given in files_of(name).items():
    settings = given if isinstance(given, dict) else {'path': str(given), 'parse': datasets.FORMS[name].parse}
    expected = rows(data_sources.open(settings))
    found = rows(data_sources.open({'path': f'tfds:{name}', 'split': split, 'data_dir': str(built)}))
    key = lambda row: row['question']  # TFDS writes examples in an order of its own.
    assert len(found) == len(expected) >= 2
    for mine, theirs in zip(sorted(found, key=key), sorted(expected, key=key)):
      assert (mine['question'], mine['answer']) == (theirs['question'], theirs['answer'])
      extra = {k: v for k, v in theirs.items() if k not in ('id', 'question', 'answer')}
      assert json.loads(mine['extra']) == json.loads(json.dumps(extra)) and type(mine['question']) is str
      assert mine['id'] == theirs.get('id', mine['id'])


def test_splits_can_be_cut_and_mixed(built):
  settings = {'path': 'tfds:gsm8k', 'data_dir': str(built)}
  whole, part = (data_sources.open({**settings, 'split': s}) for s in ('train', 'train[:5]'))
  assert len(whole) == 12 and rows(part) == rows(whole)[:5] and whole.fingerprint != part.fingerprint
  file = {'path': str(DATA / FILES['gsm8k']['test']), 'parse': 'gsm8k', 'weight': 2}
  mixed = data_sources.open([{**settings, 'split': 'train', 'weight': 1}, file])
  assert len(mixed) == 18 and 'example 3' in mixed.where(2)


def test_tfds_itself_reads_them_by_name(built):
  """In a process of its own that has no TensorFlow, as the documentation says."""
  code = (
      'import sys; from sao_jax import datasets; import tensorflow_datasets as tfds; datasets.register()\n'
      f"source = tfds.data_source('gsm8k', split='test', data_dir={str(built)!r})\n"
      "print(len(source), source[0]['answer'].decode(), 'tensorflow' in sys.modules)")
  done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
  assert done.returncode == 0, done.stderr
  count, answer, tensorflow = done.stdout.split()
  assert count == '6' and answer in ('18', '3', '70000', '540', '20', '64') and tensorflow == 'False'


def test_what_is_there_is_kept(built):
  before = {p: p.stat().st_mtime_ns for p in (built / 'gsm8k').rglob('*') if p.is_file()}
  datasets.build('gsm8k', files_of('gsm8k'), data_dir=built)
  assert before and before == {p: p.stat().st_mtime_ns for p in (built / 'gsm8k').rglob('*') if p.is_file()}


def test_a_data_set_of_other_files_is_told_and_left_alone(tmp_path, capsys):
  first, second = (tmp_path / name for name in ('a.csv', 'b.csv'))
  first.write_text('question,answer\nq,1\n')
  second.write_text('question,answer\nq,2\n')
  path = datasets.build('prompts', {'train': first}, data_dir=tmp_path / 'tfds')
  assert datasets.build('prompts', {'train': first}, data_dir=tmp_path / 'tfds') == path
  for files in ({'train': second}, {'train': first, 'test': second}):
    with pytest.raises(ValueError, match='was built from other files; delete that folder, or use another data_dir'):
      datasets.build('prompts', files, data_dir=tmp_path / 'tfds')
  source = data_sources.open({'path': 'tfds:prompts', 'split': 'train', 'data_dir': str(tmp_path / 'tfds')})
  assert source[0]['answer'] == '1' and capsys.readouterr().out == ''


@pytest.mark.parametrize('split', ['tr/ain', 'all', 'train[:5]', ''])
def test_names_that_no_split_can_have(tmp_path, split):
  (tmp_path / 'a.csv').write_text('question,answer\nq,1\n')
  with pytest.raises(ValueError, match='The name of a split'):
    datasets.build('prompts', {split: tmp_path / 'a.csv'}, data_dir=tmp_path / 'tfds')
  assert not (tmp_path / 'tfds').exists()


def test_an_empty_question_and_an_empty_folder_name(tmp_path):
  (tmp_path / 'a.csv').write_text('question,answer\n ,1\n')
  with pytest.raises(ValueError, match="a.csv, row 1 .line 2.: 'question' must be text"):
    datasets.build('prompts', {'train': tmp_path / 'a.csv'}, data_dir=tmp_path / 'tfds')
  with pytest.raises(ValueError, match='data_dir must name a folder'):
    datasets.build('prompts', {'train': tmp_path / 'a.csv'}, data_dir='')


@pytest.mark.parametrize('path, split, message', [
    ('tfds:gsm8k', 'train', 'is not prepared in .*build_dataset.py'), ('tfds:no_such_set', 'train', 'no data set that TFDS knows'),
    ('tfds:gsm8k', '', "needs a split, e.g. 'train'")])
def test_what_is_not_prepared_is_told(tmp_path, path, split, message):
  with pytest.raises(ValueError, match=message) as told:
    data_sources.open({'path': path, 'split': split, 'data_dir': str(tmp_path)})
  assert '\n' not in str(told.value)


@pytest.mark.parametrize('name, content, message', [
    ('gsm8k-test.array_record-00000-of-00001', None, 'is damaged'), ('gsm8k-test.array_record-00000-of-00001', b'', 'is damaged'),
    ('dataset_info.json', b'{', 'no data set that TFDS knows'), ('dataset_info.json', b'\xff', 'no data set that TFDS knows')])
def test_a_damaged_data_set_is_told(built, tmp_path, name, content, message):
  shutil.copytree(built / 'gsm8k', tmp_path / 'gsm8k')
  path = tmp_path / 'gsm8k' / '1.0.0' / name
  path.unlink() if content is None else path.write_bytes(content)
  with pytest.raises(ValueError, match=f'tfds:gsm8k.*{message}'):
    data_sources.open({'path': 'tfds:gsm8k', 'split': 'test', 'data_dir': str(tmp_path)})


def test_unknown_splits_are_told(built):
  with pytest.raises(ValueError, match="cannot be read as 'validation'.*its splits are"):
    data_sources.open({'path': 'tfds:gsm8k', 'split': 'validation', 'data_dir': str(built)})


def test_bad_rows_are_told_before_anything_is_written(tmp_path):
  (tmp_path / 'a.jsonl').write_text('{"question": "q", "answer": "so 3"}\n')
  with pytest.raises(ValueError, match='a.jsonl, line 1: the answer must end in'):
    datasets.build('gsm8k', {'train': tmp_path / 'a.jsonl'}, data_dir=tmp_path / 'tfds')
  assert not (tmp_path / 'tfds').exists()
  with pytest.raises(ValueError, match="hmmt.json, element 1: 'question' must be text, got None; map a column"):
    datasets.build('prompts', {'train': DATA / 'made' / 'hmmt.json'}, data_dir=tmp_path / 'tfds')
  with pytest.raises(ValueError, match='Unknown data set'):
    datasets.build('gsm9k', {'train': 'x'}, data_dir=tmp_path)
  with pytest.raises(ValueError, match='at least one split'):
    datasets.build('gsm8k', {}, data_dir=tmp_path)


def launch(*arguments):
  return subprocess.run(
      [sys.executable, str(ROOT / 'launch' / 'build_dataset.py'), *arguments], cwd=ROOT, capture_output=True, text=True, timeout=900,
      check=False)


def test_the_command_builds_one(tmp_path):
  done = launch('--name=prompts', f'--files=train={DATA / "made" / "hmmt.json"}', '--fields=question=problem', f'--data_dir={tmp_path}')
  assert done.returncode == 0, done.stderr
  assert pathlib.Path(done.stdout.splitlines()[-1]).is_dir()  # TFDS writes there, too.
  source = data_sources.open({'path': 'tfds:prompts', 'split': 'train', 'data_dir': str(tmp_path)})
  assert sorted(row['answer'] for row in rows(source))[0] == '1023'


@pytest.mark.parametrize('arguments, status, message', [
    ([], 2, '--name'), (['--name=gsm8k', '--files=train', '--data_dir=D'], 1, '--files must be NAME=VALUE pairs'),
    (['--name=gsm8k', '--files=train=none.jsonl', '--data_dir=D'], 1, 'none.jsonl'),
    (['--name=gsm9k', '--files=train=none.jsonl', '--data_dir=D'], 1, 'Unknown data set')])
def test_wrong_commands_are_told(tmp_path, arguments, status, message):
  done = launch(*(a.replace('=D', f'={tmp_path}') for a in arguments))
  assert done.returncode == status and message in done.stderr and 'Traceback' not in done.stderr
