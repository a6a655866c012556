"""Checkpoints: device arrays and host state of one step, whole or not there.

    DIRECTORY/
      20/arrays/...        Orbax: every leaf under its path in the tree, in shards
      20/host/state_0.npz  host state of process 0, and the dtypes and shapes of the arrays
      20/checksums.json    size and CRC of every file above
      40.orbax-checkpoint-tmp/...   being written; removed when the directory is opened next
      0.deleting/...                being deleted; likewise

Orbax writes into a temporary folder in the background and renames it once everything, checksums included, is in it. So a numbered folder
is complete, whenever the process was killed; if it fails its checksums, something else damaged it, and that is an error, not a fallback.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pathlib
import re
import shutil
import traceback
from typing import Any, Mapping
import zlib

import jax
import numpy as np
import orbax.checkpoint as ocp

from sao_jax import host_state
from sao_jax.host_state import load_rollouts, rollout_from_state, rollout_to_state, save_rollouts

__all__ = ['Checkpointer', 'CheckpointError', 'load_rollouts', 'rollout_from_state', 'rollout_to_state', 'save_rollouts']

CHECKSUMS = 'checksums.json'
_TEMPORARY = '*.orbax-checkpoint-tmp*'
_DELETING = '.deleting'


class CheckpointError(OSError):
  """A checkpoint cannot be written or read. The message names the folder and says what to do."""


class _HostHandler(ocp.AsyncCheckpointHandler):
  """Writes the encoded host state of each process beside the arrays."""

  async def async_save(self, directory, args: '_HostSave'):
    path = directory / f'state_{jax.process_index()}.npz'

    async def write():
      path.write_bytes(args.data)

    return [ocp.future.CommitFutureAwaitingContractedSignals(write(), name='host_state_save')]

  def save(self, directory, args: '_HostSave'):
    (directory / f'state_{jax.process_index()}.npz').write_bytes(args.data)

  def restore(self, directory, args: '_HostRestore'):
    del args
    return (directory / f'state_{jax.process_index()}.npz').read_bytes()


@ocp.args.register_with_handler(_HostHandler, for_save=True)
class _HostSave(ocp.args.CheckpointArgs):

  def __init__(self, data: bytes):
    self.data = data


@ocp.args.register_with_handler(_HostHandler, for_restore=True)
class _HostRestore(ocp.args.CheckpointArgs):
  pass


class _Handler(ocp.CompositeCheckpointHandler):
  """Arrays and host state; adds the checksums just before Orbax commits the folder."""

  def finalize(self, directory):
    super().finalize(directory)
    folder = pathlib.Path(os.fspath(directory))
    files = [p for item in ('arrays', 'host') for p in sorted((folder / item).rglob('*')) if p.is_file()]
    sums = {p.relative_to(folder).as_posix(): [p.stat().st_size, _crc(p)] for p in files}
    (folder / CHECKSUMS).write_text(json.dumps(sums), encoding='utf-8')


@ocp.args.register_with_handler(_Handler, for_save=True, for_restore=True)
class _Items(ocp.args.Composite):
  """Items of a step: `arrays` and `host`."""


def _not_of_saving(record: logging.LogRecord) -> bool:
  """False for tracebacks that Orbax logs in its threads of a save that failed: `Checkpointer` raises the same error."""
  return not (
      record.exc_info and record.levelno >= logging.ERROR
      and any('orbax' in frame.filename for frame in traceback.extract_tb(record.exc_info[2])))


def _reason(error: BaseException) -> str:
  """What the operating system said, without the name of every file of the checkpoint."""
  if getattr(error, 'strerror', None):
    return error.strerror
  told = re.search(r"os_error_code='?(\d+)", str(error))
  return os.strerror(int(told[1])) if told else str(error).strip() or type(error).__name__


def _crc(path: pathlib.Path) -> int:
  value = 0
  with open(path, 'rb') as file:
    while block := file.read(1 << 22):
      value = zlib.crc32(block, value)
  return value


def flatten(tree: Any) -> dict[str, Any]:
  """Leaves of a pytree under their paths, e.g. 'policy:trunk.embedding'."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  flat = {jax.tree_util.keystr(path, simple=True, separator=':'): leaf for path, leaf in leaves}
  if len(flat) != len(leaves):
    raise ValueError('Two leaves of the tree have the same path.')
  return flat


class Checkpointer:
  """Saves and restores numbered steps in one directory. Used from one thread; files are written behind."""

  def __init__(self, directory: str | os.PathLike[str], keep: int, *, read_only: bool = False):
    """Opens the directory, making it if need be, and clears away what a killed process left half-done.

    Args:
      directory: on a local or shared file system, used by one run at a time.
      keep: how many of the newest checkpoints stay.
      read_only: only look: nothing is made, cleared or deleted, and `save` is refused. Another process may be writing there meanwhile.

    Raises:
      CheckpointError: the directory cannot be written to; with `read_only`, that it does not exist.
    """
    if keep < 1:
      raise ValueError(f'checkpoint.keep must be at least 1, got {keep}.')
    self._directory, self._keep, self._read_only = pathlib.Path(directory).absolute(), keep, read_only
    self._verified: set[int] = set()
    self._saved = False
    self._checkpointer: ocp.AsyncCheckpointer | None = None
    if read_only:
      if not self._directory.is_dir():
        raise CheckpointError(f'{self._directory} is no folder of checkpoints.')
    else:
      self._prepare()
    for name in ('absl', 'asyncio'):
      logging.getLogger(name).addFilter(_not_of_saving)  # Once: a filter that is there is not added again.
    self._checkpointer = ocp.AsyncCheckpointer(_Handler(arrays=ocp.StandardCheckpointHandler(), host=_HostHandler()))

  def _prepare(self) -> None:
    """Makes the directory, tries to write there, and clears it up."""
    try:
      self._directory.mkdir(parents=True, exist_ok=True)
      probe = self._directory / f'.writable_{os.getpid()}'
      probe.write_bytes(b'x')
      probe.unlink()
      self._clear()
    except OSError as error:
      raise CheckpointError(
          f'Checkpoints cannot be written to {self._directory}: {error.strerror or error}. Choose a workdir that is writable and has room.'
      ) from error

  def save(self, step: int, arrays: Any, host: Mapping[str, Any]) -> None:
    """Starts saving; on return the arrays may be donated and `host` changed. Waits for the save before it.

    Args:
      step: larger than every saved one.
      arrays: pytree of `jax.Array`s, sharded in any way; typed PRNG keys too.
      host: whatever `host_state.encode` takes.

    Raises:
      CheckpointError: this save cannot start, or the one before it failed; older checkpoints stay.
    """
    if self._read_only:
      raise RuntimeError('This checkpointer was opened to read only.')
    self.wait()
    latest = self.latest_step()
    if latest is not None and step <= latest:
      raise ValueError(f'Checkpoints go forward: step {step} is to be saved, {latest} is there already in {self._directory}.')
    flat = flatten(arrays)
    wrong = [name for name, leaf in flat.items() if not isinstance(leaf, jax.Array)]
    if wrong:
      raise TypeError(f'{wrong[0]} is a {type(flat[wrong[0]]).__name__}, not a jax.Array; other values belong in the host state.')
    data = host_state.encode({'host': dict(host), 'arrays': {name: _description(leaf) for name, leaf in flat.items()}})
    args = _Items(arrays=ocp.args.StandardSave({n: leaf for n, leaf in flat.items() if leaf.size}), host=_HostSave(data))
    try:
      with jax.transfer_guard('allow'):  # The copies to the host are what this is for.
        self._checkpointer.save(self._directory / str(step), args=args)
        self._saved = True
    except Exception as error:
      raise self._write_error(error) from error

  def wait(self) -> None:
    """Returns when nothing is being written. Once something was saved here, checkpoints beyond `keep` are deleted; reading deletes none.

    Raises:
      CheckpointError: the save under way failed.
    """
    if self._read_only:
      return
    try:
      self._checkpointer.wait_until_finished()
    except Exception as error:
      raise self._write_error(error) from error
    if self._saved and jax.process_index() == 0:
      for step in self.steps()[:-self._keep]:
        self._delete(step)

  def steps(self) -> list[int]:
    """Steps that are saved, ascending; the one being written isn't among them."""
    return sorted(int(p.name) for p in self._directory.iterdir() if p.name.isdecimal() and p.is_dir())

  def latest_step(self) -> int | None:
    """The newest saved step, or None."""
    return max(self.steps(), default=None)

  def restore(self, step: int, like: Any) -> Any:
    """Arrays of `step` in the structure, shapes, dtypes and shardings of `like`; the mesh may differ from the one that saved.

    Args:
      like: pytree of `jax.Array`s or `jax.ShapeDtypeStruct`s with shardings.

    Raises:
      CheckpointError: the checkpoint is missing or damaged.
      ValueError: it holds other arrays than `like`.
    """
    saved = self._read_host(step)['arrays']
    flat = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) for name, leaf in flatten(like).items()}
    self._compare(step, saved, {name: _description(leaf) for name, leaf in flat.items()})
    args = _Items(arrays=ocp.args.StandardRestore({n: leaf for n, leaf in flat.items() if leaf.size}))
    try:
      with jax.transfer_guard('allow'):
        found = self._checkpointer.restore(self._directory / str(step), args=args)['arrays']
    except Exception as error:
      raise self._damaged(step, str(error)) from error
    empty = {n: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding) for n, x in flat.items() if not x.size}  # Orbax writes none.
    return jax.tree.unflatten(jax.tree.structure(like), [(found | empty)[name] for name in flat])

  def restore_host(self, step: int) -> dict[str, Any]:
    """Host state of `step`. Raises CheckpointError when it is missing or damaged."""
    return self._read_host(step)['host']

  def close(self) -> None:
    """Waits for the save under way and ends; may be called again. Raises CheckpointError when that save failed."""
    if self._checkpointer is None:
      return
    try:
      self.wait()
    finally:
      checkpointer, self._checkpointer = self._checkpointer, None
      checkpointer.close()

  # --- Inside ------------------------------------------------------------------------------------------------------------------

  def _read_host(self, step: int) -> dict[str, Any]:
    self.wait()
    self._verify(step)
    path = self._directory / str(step) / 'host' / f'state_{jax.process_index()}.npz'
    if not path.is_file():
      raise CheckpointError(
          f'{path.parent.parent} holds no host state of process {jax.process_index()} of {jax.process_count()}; '
          'resume with as many processes as saved it.')
    try:
      return host_state.read_file(path)
    except (ValueError, OSError) as error:
      raise self._damaged(step, str(error)) from error

  def _verify(self, step: int) -> None:
    """Compares size and CRC of every file of a step, once."""
    if step in self._verified:
      return
    folder = self._directory / str(step)
    if not folder.is_dir():
      raise CheckpointError(f'There is no checkpoint of step {step} in {self._directory}; saved are {self.steps()}.')
    try:
      sums = json.loads((folder / CHECKSUMS).read_text(encoding='utf-8'))
      there = {p.relative_to(folder).as_posix() for item in ('arrays', 'host') for p in (folder / item).rglob('*') if p.is_file()}
      if there - set(sums) or not sums:
        raise self._damaged(step, f'{CHECKSUMS} lists {len(sums)} files, but there are {len(there)}')
      for name, (size, crc) in sums.items():
        path = folder / name
        if not path.is_file():
          raise self._damaged(step, f'{name} is missing')
        if path.stat().st_size != size:
          raise self._damaged(step, f'{name} has {path.stat().st_size} bytes instead of {size}')
        if _crc(path) != crc:
          raise self._damaged(step, f'{name} has changed since it was written')
    except FileNotFoundError as error:
      raise self._damaged(step, f'{CHECKSUMS} is missing') from error
    except (ValueError, AttributeError, TypeError) as error:
      raise self._damaged(step, f'{CHECKSUMS} is unreadable') from error
    self._verified.add(step)

  def _damaged(self, step: int, what: str) -> CheckpointError:
    older = [s for s in self.steps() if s < step]
    then = f'the run then goes on from step {older[-1]}' if older else 'there is no older checkpoint, so the run then starts afresh'
    return CheckpointError(f'The checkpoint {self._directory / str(step)} is damaged: {what}. Delete that folder to go on; {then}.')

  def _compare(self, step: int, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    folder = self._directory / str(step)
    different = sorted(set(saved) ^ set(wanted))
    if different:
      where = 'only in the checkpoint' if different[0] in saved else 'not in the checkpoint'
      raise ValueError(
          f'{folder} was saved by a run of other settings: {len(different)} arrays differ, e.g. {different[0]} is {where}. '
          'Resume with the settings in the config.json beside it.')
    for name, description in wanted.items():
      if saved[name] != description:
        raise ValueError(
            f'{folder} was saved by a run of other settings: {name} is {saved[name]} there, {description} here. '
            'Resume with the settings in the config.json beside it.')

  def _write_error(self, error: Exception) -> CheckpointError:
    with contextlib.suppress(OSError):  # What was written of it only takes room; something may be written there still.
      self._clear()
    reason = _reason(error)
    return CheckpointError(
        f'A checkpoint could not be written to {self._directory}: {reason}. Saved and untouched: steps {self.steps()}. '
        'Make room there, or make it writable, and resume.')

  def _clear(self) -> None:
    """Removes folders that were being written or deleted."""
    if jax.process_index() == 0:
      for folder in (*self._directory.glob(_TEMPORARY), *self._directory.glob(f'*{_DELETING}')):
        shutil.rmtree(folder)

  def _delete(self, step: int) -> None:
    """Deletes a step in a way that never leaves a part of it under its number."""
    doomed = self._directory / f'{step}{_DELETING}'
    os.replace(self._directory / str(step), doomed)
    shutil.rmtree(doomed)


def _description(leaf: Any) -> str:
  """Dtype and shape as text, e.g. 'bfloat16[8, 4]'; of typed keys too."""
  return f'{leaf.dtype}{list(np.shape(leaf))}'
