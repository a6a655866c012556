r"""Builds a TFDS data set of prompts from local files; nothing is downloaded.

  python launch/build_dataset.py --name=gsm8k --files=train=gsm8k/train.jsonl,test=gsm8k/test.jsonl --data_dir=tfds
  python launch/build_dataset.py --name=prompts --files=train=mine.csv --fields=question=Problem,answer=Solution --data_dir=tfds

Needs requirements/tfds.txt. Afterwards 'tfds:NAME' is a source of prompts, see docs/data.md.
"""

import pathlib
import sys
from typing import Sequence

sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[1]))  # The repository, for `import sao_jax` without an installation.

import command_line

from absl import flags  # After command_line, which tells what to do where it is missing.

NAME = flags.DEFINE_string('name', None, 'Which: gsm8k, math, beyondaime, imo_answerbench, or prompts for any rows.')
FILES = flags.DEFINE_list('files', None, 'SPLIT=PATH, one or more with commas between them.')
FIELDS = flags.DEFINE_list('fields', [], 'NAME=COLUMN: the columns that are question and answer, where they have other names.')
DATA_DIR = flags.DEFINE_string('data_dir', None, 'Folder of TFDS data sets.')
flags.mark_flags_as_required(['name', 'files', 'data_dir'])


def pairs(values: Sequence[str], flag: str) -> dict[str, str]:
  """{'train': 'a.jsonl'} of ['train=a.jsonl']. Raises ValueError for what is no pair."""
  found: dict[str, str] = {}
  for value in values:
    name, equals, rest = value.partition('=')
    if not (name and equals and rest) or name in found:
      raise ValueError(f'--{flag} must be NAME=VALUE pairs, each name once; got {value!r}.')
    found[name] = rest
  return found


def main() -> None:
  from sao_jax import datasets

  fields = pairs(FIELDS.value, 'fields')
  files = {split: {'path': path, 'fields': fields} for split, path in pairs(FILES.value, 'files').items()}
  command_line.answer(str(datasets.build(NAME.value, files, data_dir=DATA_DIR.value)), f'The data set is in {DATA_DIR.value}.')


if __name__ == '__main__':
  command_line.run(main, __doc__, interrupted='Run the same command again.')
