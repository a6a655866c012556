"""The file that says which listed tests are fit to judge with, made by running the gold patches.

A line a instance: {"instance_id", "usable", "left_out": {test: reason}, "patches_runner", "detail"}.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any, Mapping

from sao_jax.environments.swe.judge import Measured


def line_of(instance_id: str, measured: Measured) -> str:
  return json.dumps({'instance_id': instance_id, **dataclasses.asdict(measured)})


def load_measured(path: str) -> dict[str, Measured]:
  """instance_id -> what was measured. Raises ValueError with file and line, OSError."""
  found = {}
  for number, line in enumerate(pathlib.Path(path).read_text(encoding='utf-8').split('\n'), start=1):
    if not line.strip():
      continue
    try:
      row = json.loads(line)
      found[_text(row, 'instance_id')] = Measured(
          {str(k): str(v) for k, v in row['left_out'].items()}, bool(row['usable']), str(row['detail']), bool(row['patches_runner']))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
      raise ValueError(f'{path}, line {number}: no line of a measurement ({error!r}); measure again.') from None
  return found


def _text(row: Mapping[str, Any], name: str) -> str:
  if not isinstance(row[name], str):
    raise ValueError(f'{name} must be a text')
  return row[name]
