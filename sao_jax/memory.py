"""What a run will hold in memory, summed from shapes alone, and compared with what there is before anything is allocated.

Counted is only what is certainly there at the same time, so a run that is refused cannot work; one that is not refused may still be too
large, since compiled programs need room of their own. A host is judged by all of its memory: what others hold at the start may be free a
moment later, so that is worth a warning and no refusal.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import pathlib
from typing import Any, Sequence

import jax
from jax.sharding import Mesh
import numpy as np

from sao_jax import decoding, log_probs, sharding
from sao_jax.config import Config
from sao_jax.learner import Learner
from sao_jax.models import kv_cache, transformer

MODEL = 'model.vocab_size, model.embed_dim, model.num_layers, model.mlp_dim'
CONTROL_GROUP = pathlib.Path('/sys/fs/cgroup')
BATCH_BYTES = 22  # Of one position of a batch: ids, masks, log-probabilities, rewards, versions, turns.


@dataclasses.dataclass(frozen=True)
class Item:
  """One of the things that a run holds."""

  name: str
  device_bytes: float  # On each device of its mesh.
  settings: str  # What makes it large.
  mesh: Mesh


def items(config: Config, learner: Learner, sampler_mesh: Mesh, max_length: int) -> list[Item]:
  """What the last stage of the run holds, at least.

  Args:
    config: with the model's own shape in `config.model`.
    learner: built, with nothing allocated.
    sampler_mesh: where the sampler works.
    max_length: longest sequence in tokens.
  """
  stage = 'rl' if config.rl.policy_steps else 'value_pretrain' if config.value_pretrain.rollouts else 'sft' if config.sft.steps else ''
  state = learner.abstract_state(stage or 'sft')
  found = [Item('parameters of the policy', _tree_bytes(state.policy), MODEL, learner.mesh)]
  if stage:
    value = _tree_bytes(state.value_trainable) + _tree_bytes(state.value_frozen)
    gradient = max(_tree_bytes(state.policy) if stage != 'value_pretrain' else 0.0, _tree_bytes(state.value_trainable))
    found += [
        Item("the policy's optimizer state", _tree_bytes(state.policy_opt), MODEL, learner.mesh),
        Item('parameters of the value model', value, MODEL, learner.mesh),
        Item("the value model's optimizer state", _tree_bytes(state.value_opt), MODEL, learner.mesh),
        Item('gradients', gradient, MODEL, learner.mesh), *_batch_items(config, stage, learner.mesh)]
  return found + _sampler_items(config, sampler_mesh, max_length)


def _batch_items(config: Config, stage: str, mesh: Mesh) -> list[Item]:
  """The batch, one residual stream a layer for the backward pass, and the logits of a chunk."""
  model, learner, devices = config.model, config.learner, mesh.devices.size
  rows, setting = (config.sft.batch_size, 'sft.batch_size') if stage == 'sft' else (learner.batch_size, 'learner.batch_size')
  length, micro = learner.lengths[-1], rows // learner.micro_batches
  chunk = learner.logits_chunk or log_probs.chunk_for(model.vocab_size)
  found = [
      Item('one batch', BATCH_BYTES * rows * length / devices, f'{setting}, learner.lengths', mesh),
      Item(
          'activations of one micro-batch', micro * length * model.num_layers * model.embed_dim * _itemsize(model.compute_dtype) / devices,
          f'{setting} / learner.micro_batches, learner.lengths, model.num_layers, model.embed_dim', mesh)]
  if stage != 'value_pretrain':
    logits = 4.0 * min(chunk, micro * length) * model.vocab_size / devices
    found.append(Item('logits', logits, 'learner.logits_chunk, model.vocab_size', mesh))
  return found


def _sampler_items(config: Config, mesh: Mesh, max_length: int) -> list[Item]:
  model, sampler = config.model, config.sampler
  shapes, devices = decoding.make_shapes(model, sampler, mesh, max_length), mesh.devices.size
  _, params, axes = transformer.abstract(transformer.Policy, dataclasses.replace(model, param_dtype=sampler.dtype))
  placed = sharding.param_shardings(axes, params, mesh)
  copy = sum(math.prod(placed[p].shard_shape(x.shape)) * np.dtype(x.dtype).itemsize for p, x in params.items())
  one = jax.eval_shape(lambda: kv_cache.zeros(model, 1, 1, jax.numpy.dtype(sampler.dtype)))
  token = sum(math.prod(x.shape) for x in jax.tree.leaves(one)) * _itemsize(sampler.dtype) / devices
  pages = 'sampler.pages' if sampler.pages else 'sampler.sessions, task.max_tokens'
  return [
      Item("the sampler's copy of the policy", copy, f'{MODEL}, sampler.dtype', mesh),
      Item('pages of the cache', token * shapes.pages * shapes.page_size, f'{pages}, sampler.page_size', mesh),
      Item(
          "the decoding rows' cache", token * shapes.slots * (shapes.cached[0] + shapes.chunk_steps),
          'sampler.slots, sampler.chunk_steps, sampler.cache_lengths', mesh),
      Item("the sampler's logits", 4.0 * shapes.slots * model.vocab_size / devices, 'sampler.slots, model.vocab_size', mesh)]


def check(found: Sequence[Item], total: int | None = None, free: int | None = None) -> None:
  """Raises ValueError where a device of this process, or for CPU devices the host, has less memory than the items take together.

  A host whose memory is enough, but held by others for now, gets a warning.

  Args:
    found: from `items`.
    total: bytes on each device (CPU: on the host); None to ask the machine, which may not know: then nothing is refused.
    free: those of a host that nobody holds; None to ask the machine.
  """
  devices = sorted({d for item in found for d in item.mesh.local_devices}, key=lambda d: d.id)
  on_host = bool(devices) and devices[0].platform == 'cpu'
  for group in [devices] if on_host else [[d] for d in devices]:
    sizes = [(item.device_bytes * len(set(group) & set(item.mesh.local_devices)), item) for item in found]
    needed, room = sum(size for size, _ in sizes), total
    if room is None:
      room = host_bytes() if on_host else _device_room(group[0])
    needs = f'This run needs at least {_readable(needed)} of memory {"on this host" if on_host else f"on {group[0]}"}, and '
    if room is not None and needed > room:
      largest = sorted(sizes, key=lambda pair: -pair[0])[:3]
      raise ValueError(
          f'{needs}{"it has" if on_host else "there are"} {_readable(room)}. The largest parts: '
          + '; '.join(f'{item.name}, {_readable(size)} ({item.settings})' for size, item in largest)
          + '. Lower these settings' + ('.' if on_host else ', or use more devices.'))
    unused = (free_host_bytes() if free is None else free) if on_host else None
    if unused is not None and needed > unused:
      logging.warning(
          '%s%s of its %s are free now: if other processes keep theirs, it will be ended for lack of memory.',
          needs, _readable(unused), 'memory' if room is None else _readable(room))


def host_bytes() -> int | None:
  """Memory of this host in bytes, whoever holds it; at most the limit of this process's control group. None where unknown."""
  try:
    room = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
  except (ValueError, OSError):
    return None
  for name in ('memory.max', 'memory/memory.limit_in_bytes'):  # Control groups, version 2 and 1.
    try:
      room = min(room, int((CONTROL_GROUP / name).read_text()))
    except (OSError, ValueError):  # None, or 'max'.
      continue
  return room


def free_host_bytes() -> int | None:
  """What a process may still take of `host_bytes` without another one giving way. None where unknown."""
  try:
    import psutil  # Comes with Orbax.
  except ImportError:
    return None
  room, free = host_bytes(), int(psutil.virtual_memory().available)
  return free if room is None else min(room, free)


def _device_room(device: jax.Device) -> int | None:
  stats: dict[str, Any] = device.memory_stats() or {}
  limit = stats.get('bytes_limit')
  return None if limit is None else int(limit) - int(stats.get('bytes_in_use', 0))


def _tree_bytes(tree: Any) -> float:
  """Bytes of abstract arrays on each device."""
  return float(sum(math.prod(x.sharding.shard_shape(x.shape)) * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree)))


def _itemsize(dtype: str) -> int:
  return jax.numpy.dtype(dtype).itemsize


def _readable(size: float) -> str:
  for unit in ('bytes', 'kB', 'MB'):
    if size < 1000:
      return f'{size:.3g} {unit}'
    size /= 1000
  return f'{size:,.1f} GB' if size < 1e4 else f'{size / 1000:,.0f} TB'
