"""The page on environments: its example works, and its table is complete."""

import pathlib
import re
import sys
import types

import pytest

from sao_jax import environments
from sao_jax.environments import base

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = (ROOT / 'docs' / 'environments.md').read_text()
TABLE = dict(re.findall(r'^\| `(\w+)` \| (.*) \|$', PAGE, flags=re.MULTILINE))


@pytest.fixture
def double(monkeypatch):
  """The module that the page's example is."""
  monkeypatch.setattr(environments, 'REGISTRY', dict(environments.REGISTRY))
  module = types.ModuleType('page_example')
  monkeypatch.setitem(sys.modules, 'page_example', module)
  example, = re.findall(r'```python\n(.*?)```', PAGE, flags=re.DOTALL)
  exec(compile(example, 'docs/environments.md', 'exec'), module.__dict__)
  return environments.make('double')


def test_the_example_works(double):
  task = double.sample_task(0, 'train', 0)
  assert task == double.sample_task(0, 'train', 0)
  number = task.data['number']
  assert double.reset(task).text == f'twice {number} is '
  for action, reward in ((f'{2 * number}\n', 1.0), (f' {2 * number}', 1.0), (f'{2 * number + 1}\n', 0.0)):
    double.reset(task)
    result = double.step(action)
    assert result.reward == reward and result.terminated and result.metrics['success'] == reward
  double.reset(task)
  for action, ends in (('²', False), ('9' * 10**6, True)):
    result = double.step(action)
    assert result.reward == 0.0 and result.terminated == ends and set(result.metrics) == set(double.metric_names)
  numbers = {split: {double.sample_task(i, split, 0).data['number'] for i in range(300)} for split in base.SPLITS}
  assert not numbers['train'] & numbers['test']


def test_the_table_names_every_environment_and_what_it_names_is_there():
  assert set(environments.REGISTRY) <= set(TABLE)
  for name in environments.REGISTRY:
    for file in re.findall(r'`(\w+\.txt)`', TABLE[name]):
      assert (ROOT / 'requirements' / file).is_file(), file
    for file in re.findall(r'`(\w+\.py)`', TABLE[name]):
      assert (ROOT / 'configs' / file).is_file(), file
