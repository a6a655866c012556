"""Every notebook runs from its first cell to its last, with the sizes made small."""

import pathlib

import nbclient
import nbformat
import pytest

NOTEBOOKS = sorted((pathlib.Path(__file__).resolve().parents[1] / 'notebooks').glob('*.ipynb'))


def test_there_are_notebooks():
  assert NOTEBOOKS


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_is_committed_without_outputs(path):
  for cell in nbformat.read(path, as_version=4).cells:
    assert not cell.get('outputs') and cell.get('execution_count') is None


@pytest.mark.slow
@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_runs(path, monkeypatch):
  monkeypatch.setenv('SAO_NOTEBOOK', 'small')
  monkeypatch.delenv('XLA_FLAGS', raising=False)  # One device, as a reader has.
  notebook = nbformat.read(path, as_version=4)
  nbclient.NotebookClient(
      notebook, timeout=1800, startup_timeout=600, kernel_name='python3', resources={'metadata': {'path': str(path.parent)}}).execute()
  texts = [output.get('text', '') for cell in notebook.cells for output in cell.get('outputs', ())]
  assert any('after' in text and 'held-out success' in text for text in texts)
