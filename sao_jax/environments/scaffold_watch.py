"""Ends what the scaffolds of a process that was killed have left. A script of the standard library alone: it starts in no time.

    python scaffold_watch.py MARK      reads lines NAME<tab>FOLDER: a scaffold has started; without FOLDER: it has ended, and left nothing

When its input ends, so has the process that wrote to it: processes that carry MARK=NAME in their environment are then killed, and the
folders removed, of all scaffolds that had not ended.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import sys
import time

LAST_S = 5.0  # For processes that start others while they are killed.


def carriers(mark: str, name: str) -> list[int]:
  """Processes that carry the mark in their environment and are not dead yet."""
  text, found = f'{mark}={name}'.encode(), []
  for folder in pathlib.Path('/proc').glob('[0-9]*'):
    try:
      if text in (folder / 'environ').read_bytes():  # Empty for the dead.
        found.append(int(folder.name))
    except OSError:
      continue
  return found


def kill_carriers(mark: str, name: str, seconds: float) -> None:
  """Kills them until there are none, at most for so long."""
  deadline = time.monotonic() + seconds
  while (left := carriers(mark, name)) and time.monotonic() < deadline:
    for number in left:
      try:
        os.kill(number, signal.SIGKILL)
      except (ProcessLookupError, PermissionError):
        pass
    time.sleep(0.005)


def main() -> None:
  running: dict[str, str] = {}
  for line in sys.stdin:
    name, _, folder = line.rstrip('\n').partition('\t')
    if folder:
      running[name] = folder
    else:
      running.pop(name, None)
  for name, folder in running.items():
    kill_carriers(sys.argv[1], name, LAST_S)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == '__main__':
  main()
