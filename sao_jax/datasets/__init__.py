"""TFDS builders for prompt data sets, from local files that lie where you say; nothing is downloaded.

    from sao_jax import datasets
    datasets.build('gsm8k', {'train': 'gsm8k/train.jsonl', 'test': 'gsm8k/test.jsonl'}, data_dir='tfds')

or, from the shell, launch/build_dataset.py.

Afterwards 'tfds:gsm8k' is a source like any other, see `sao_jax.data_sources`, and TFDS itself reads it, too:
`tfds.data_source('gsm8k', split='train', data_dir='tfds')` after `datasets.register()`. Examples have 'id', 'question' and 'answer' as
text, and in 'extra' the other fields as JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import json
import os
import pathlib
import re
import sys
from typing import Any, Mapping

VERSION = '1.0.0'
SOURCES = 'sources.json'  # In the folder of a data set: what it was built from.


@dataclasses.dataclass(frozen=True)
class Form:
  """A data set that can be built: `parse` is the form of its rows in `data_sources.rows`, '' for rows with 'question' and 'answer'."""

  parse: str
  description: str
  homepage: str
  license: str


FORMS: dict[str, Form] = {
    'gsm8k': Form('gsm8k', 'Grade school math word problems; the final number as answer.', 'https://github.com/openai/grade-school-math',
                  'MIT'),
    'math': Form('math', 'MATH and MATH-500: competition problems with LaTeX answers.', 'https://github.com/hendrycks/math', 'MIT'),
    'beyondaime': Form('beyondaime', 'BeyondAIME: problems with integer answers.',
                       'https://huggingface.co/datasets/ByteDance-Seed/BeyondAIME', 'CC0-1.0'),
    'imo_answerbench': Form('imo_answerbench', 'IMO-AnswerBench: olympiad problems with short answers.',
                            'https://github.com/google-deepmind/superhuman', 'CC-BY-4.0'),
    'prompts': Form('', "Any rows with 'question' and 'answer'.", '', "that of the rows' source"),
}


def library() -> Any:
  """The module `tensorflow_datasets`. Raises ImportError with the command that installs it."""
  try:
    return importlib.import_module('tensorflow_datasets')
  except ModuleNotFoundError as error:
    if error.name not in ('tensorflow_datasets', 'array_record'):
      raise
    raise ImportError('TFDS data sets need tensorflow-datasets: pip install -r requirements/tfds.txt') from error


@functools.cache
def register() -> dict[str, Any]:
  """Makes the builder classes, which TFDS then knows by name; {name: class}."""
  return {name: _builder(name, form) for name, form in FORMS.items()}


def _builder(name: str, form: Form) -> Any:
  tfds = library()

  class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Builds from the files that `build` gives it."""

    VERSION = tfds.core.Version(VERSION)
    source_files: Mapping[str, Mapping[str, Any]] = {}  # Split -> settings of a source.

    def _info(self):
      return tfds.core.DatasetInfo(
          builder=self, description=form.description, homepage=form.homepage, license=form.license,
          features=tfds.features.FeaturesDict({field: tfds.features.Text() for field in ('id', 'question', 'answer', 'extra')}))

    def _split_generators(self, dl_manager):
      del dl_manager
      return {split: self._generate_examples(settings) for split, settings in self.source_files.items()}

    def _generate_examples(self, settings):
      from sao_jax import data_sources

      source = data_sources.open(settings)
      for index in range(len(source)):
        yield index, example(source[index], index, source.where(index))

  class_name = ''.join(part.capitalize() for part in name.split('_'))
  return type(class_name, (Builder,), {'name': name, '__module__': __name__})


def example(row: Mapping[str, Any], index: int, where: str) -> dict[str, str]:
  """One example; a whole number as answer becomes text. Raises ValueError, naming where, unless question and answer are there."""
  if isinstance(row.get('answer'), int) and not isinstance(row['answer'], bool):
    row = {**row, 'answer': str(row['answer'])}
  for field in ('question', 'answer'):
    if not isinstance(row.get(field), str) or field == 'question' and not row[field].strip():
      raise ValueError(f'{where}: {field!r} must be text, got {row.get(field)!r:.80}; map a column to it with fields.')
  extra = {name: value for name, value in row.items() if name not in ('id', 'question', 'answer')}
  return {
      'id': str(row.get('id', index)), 'question': row['question'], 'answer': row['answer'],
      'extra': json.dumps(extra, ensure_ascii=False, sort_keys=True)}


def build(name: str, files: Mapping[str, Any], *, data_dir: str | os.PathLike[str]) -> pathlib.Path:
  """Prepares a data set from files, as ArrayRecord; one that is there already of the same files is kept as it is.

  Args:
    name: one of `FORMS`.
    files: split -> path, or settings of a source ({'path': ..., 'fields': ..., 'limit': ...}).
    data_dir: folder of TFDS data sets.

  Returns:
    The folder of the data set.

  Raises:
    ValueError: an unknown name, no files, a bad row (with file and number), or a folder that holds the data set of other files.
    ImportError: tensorflow-datasets is not installed.
  """
  if name not in FORMS:
    raise ValueError(f'Unknown data set {name!r}; known: {", ".join(FORMS)}.')
  if not os.fspath(data_dir):
    raise ValueError('data_dir must name a folder, got an empty name.')
  wrong = [split for split in files if not re.fullmatch(r'\w+', split) or split == 'all']
  if wrong:
    raise ValueError(f"The name of a split is of letters, digits and _, and not 'all': got {wrong[0]!r}.")
  if not files:
    raise ValueError(f"files must name at least one split, like {{'train': 'train.jsonl'}}; got {files!r}.")
  from sao_jax import data_sources

  settings, sources = {}, {}
  for split, given in files.items():
    given = dict(given) if isinstance(given, Mapping) else {'path': os.fspath(given)}
    settings[split] = {'parse': FORMS[name].parse, **given}
    source = data_sources.open(settings[split])
    sources[split] = source.fingerprint
    for index in range(len(source)):
      example(source[index], index, source.where(index))  # Bad rows are told before anything is written.
  builder = register()[name](data_dir=os.fspath(data_dir), file_format='array_record')
  builder.source_files = settings
  path, made = pathlib.Path(builder.data_path), json.dumps(sources, indent=2)
  if not path.exists():
    with contextlib.redirect_stdout(sys.stderr):  # What TFDS says is for people.
      builder.download_and_prepare()
    (path / SOURCES).write_text(made, encoding='utf-8')
  elif not (path / SOURCES).is_file() or (path / SOURCES).read_bytes() != made.encode():
    raise ValueError(f'{path} holds a data set that was built from other files; delete that folder, or use another data_dir.')
  return path


def prepared(name: str, data_dir: str) -> Any:
  """The builder of a data set that lies in `data_dir`. Raises ValueError where none does."""
  tfds = library()
  register()
  try:
    builder = tfds.builder(name, **({'data_dir': data_dir} if data_dir else {}))
    ready = pathlib.Path(builder.data_path).joinpath('dataset_info.json').is_file()
  except Exception as error:  # Of several libraries, for what is not there and what is damaged.
    told = str(error).split('\n')[0]  # The rest lists hundreds of data sets.
    raise ValueError(f'tfds:{name} is no data set that TFDS knows in {data_dir or "its own folder"}: {told}') from error
  if not ready:
    raise ValueError(
        f'tfds:{name} is not prepared in {data_dir or builder.data_path}; build it with launch/build_dataset.py.')
  return builder
