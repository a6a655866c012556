"""The mesh, the table from logical axis names to mesh axes, and everything that places arrays.

Every parameter and activation carries logical names, e.g. ('embed', 'heads', 'head_dim'). `RULES` (parameters) and `ACTIVATION_RULES` map a
name to a mesh axis, to several, or to None. A new layout is a new table. This is the only module that knows how meshes are made.

`data` and `fsdp` both split the batch; `fsdp` splits the parameters too. `tensor` splits heads, feed-forward and vocabulary, `expert` the
experts. `sequence` stands in the mesh so that its shape is final, and must be 1 as long as no rule names it.
"""

from __future__ import annotations

import logging
import math
from typing import Any, Callable, Mapping, Sequence

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
import numpy as np

from sao_jax.config import Config
from sao_jax.types import Batch, Params

AXES = ('data', 'fsdp', 'expert', 'sequence', 'tensor')
BATCH_AXES = ('data', 'fsdp')

Rules = Mapping[str, str | tuple[str, ...] | None]
Shardings = dict[str, NamedSharding]

RULES: Rules = {
    'vocab': 'tensor', 'embed': 'fsdp', 'heads': 'tensor', 'kv_heads': 'tensor', 'head_dim': None, 'mlp': 'tensor', 'layers': None,
    'expert': 'expert', 'router': None, 'latent': None, 'index_heads': None,
}
ACTIVATION_RULES: Rules = {
    'batch': BATCH_AXES, 'length': None, 'vocab': 'tensor', 'embed': None, 'heads': 'tensor', 'kv_heads': 'tensor', 'head_dim': None,
    'mlp': 'tensor',
}
# Parameter axes that stay whole where the mesh does not divide them: few key/value heads, and vocabularies of odd size.
MAY_STAY_WHOLE = ('kv_heads', 'vocab')

# --- Meshes --------------------------------------------------------------------------------------------------------------------


def pick_devices(indices: tuple[int, ...]) -> list[jax.Device]:
  """Devices at `indices` of `jax.devices()`; () for all of them. Raises ValueError on a repeated or unknown index."""
  devices = jax.devices()
  if len(set(indices)) != len(indices):
    raise ValueError(f'Device indices must differ, got {indices}.')
  unknown = [i for i in indices if not 0 <= i < len(devices)]
  if unknown:
    raise ValueError(f'No device {unknown[0]}: this process has devices 0 to {len(devices) - 1}, asked for {indices}.')
  return [devices[i] for i in indices] if indices else devices


def resolve_sizes(num_devices: int, sizes: Sequence[int]) -> tuple[int, ...]:
  """Mesh sizes with the -1 filled in so that their product is `num_devices`. Raises ValueError where that is impossible."""
  if len(sizes) != len(AXES):
    raise ValueError(f'A mesh needs {len(AXES)} sizes ({", ".join(AXES)}), got {tuple(sizes)}.')
  if any(s < 1 and s != -1 for s in sizes) or list(sizes).count(-1) > 1:
    raise ValueError(f'Mesh sizes must be positive, with at most one -1, got {tuple(sizes)}.')
  known = math.prod(s for s in sizes if s != -1)
  if num_devices % known or (-1 not in sizes and known != num_devices):
    raise ValueError(
        f'Mesh sizes {tuple(sizes)} ({", ".join(AXES)}) need {"a multiple of " if -1 in sizes else ""}{known} devices, '
        f'got {num_devices}; change the sizes or the list of devices.')
  return tuple(num_devices // known if s == -1 else s for s in sizes)


def make_mesh(devices: Sequence[jax.Device], sizes: Sequence[int]) -> Mesh:
  """Mesh over `devices` with axes `AXES`; one of the five sizes may be -1. Raises ValueError if the sizes do not fit the devices."""
  sizes = resolve_sizes(len(devices), sizes)
  return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=list(devices))


# --- From logical names to shardings -------------------------------------------------------------------------------------------


def _mesh_axes(rule: str | tuple[str, ...] | None) -> tuple[str, ...]:
  return () if rule is None else (rule,) if isinstance(rule, str) else rule


def partition_spec(axes: Sequence[str | None], rules: Rules = RULES) -> PartitionSpec:
  """Spec of an array with logical `axes`. Raises ValueError on a name without a rule, or on a mesh axis used twice."""
  used: list[str] = []
  for name in axes:
    if name is not None and name not in rules:
      raise ValueError(f'Logical axis {name!r} has no sharding rule; known: {", ".join(sorted(rules))}.')
    used += _mesh_axes(rules[name]) if name is not None else ()
  twice = sorted({a for a in used if used.count(a) > 1})
  if twice:
    raise ValueError(f'Mesh axis {twice[0]!r} would split two dimensions of an array with axes {tuple(axes)}; change the rules.')
  return PartitionSpec(*(None if name is None else rules[name] for name in axes))


def _fit(
    axes: Sequence[str | None], shape: Sequence[int], mesh: Mesh, rules: Rules, may_stay_whole: Callable[[str], bool], label: str
) -> PartitionSpec:
  """Spec with the dimensions left whole that the mesh does not divide, where that is allowed; ValueError where it is not."""
  if len(axes) != len(shape):
    raise ValueError(f'{label}: {len(axes)} axis names {tuple(axes)} for shape {tuple(shape)}.')
  entries = list(partition_spec(axes, rules))
  for i, (name, size) in enumerate(zip(axes, shape)):
    parts = math.prod(mesh.shape[a] for a in _mesh_axes(entries[i]))
    if size % parts and may_stay_whole(name):
      entries[i] = None
    elif size % parts:
      raise ValueError(
          f'{label}: axis {name!r} of size {size} does not divide over mesh axis {entries[i]!r} of size {parts}; '
          'choose a mesh size that divides it.')
  return PartitionSpec(*entries)


def param_shardings(
    axes: Mapping[str, tuple[str, ...]], shapes: Mapping[str, Any], mesh: Mesh, rules: Rules = RULES
) -> Shardings:
  """Sharding of every parameter.

  Args:
    axes: path -> logical axes, from `transformer.abstract`.
    shapes: path -> anything with a `shape`.
    mesh: where the parameters go.
    rules: logical axis -> mesh axes.

  Raises:
    ValueError: unknown name, mesh axis used twice, or a size that the mesh does not divide. Only the axes in `MAY_STAY_WHOLE` stay whole
      instead, with a warning for all but key/value heads.
  """
  shardings = {}
  for path, names in axes.items():
    spec = _fit(names, shapes[path].shape, mesh, rules, lambda name: name in MAY_STAY_WHOLE, path)
    if 'vocab' in names and spec != partition_spec(names, rules):
      logging.warning('%s: vocabulary stays whole, %s does not divide over the mesh %s.', path, shapes[path].shape, dict(mesh.shape))
    shardings[path] = NamedSharding(mesh, spec)
  return shardings


def replicated(mesh: Mesh) -> NamedSharding:
  """A full copy on every device of the mesh."""
  return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Leading axis over data and fsdp, the rest whole."""
  return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def batch_parts(mesh: Mesh) -> int:
  """Number of pieces into which the mesh splits a batch."""
  return math.prod(mesh.shape[a] for a in BATCH_AXES)


def activation_sharding(axes: Sequence[str | None], shape: Sequence[int], mesh: Mesh, rules: Rules = ACTIVATION_RULES) -> NamedSharding:
  """Sharding of one activation or cache array; a dimension that the mesh does not divide stays whole."""
  return NamedSharding(mesh, _fit(axes, shape, mesh, rules, lambda name: True, 'activation'))


class ShardActivations:
  """The `shard(x, logical_axes)` that a model calls on its activations, inside jit.

  An activation dimension that the mesh does not divide (a prefill of few rows, few key/value heads) stays whole.

  Attributes:
    mesh: where the activations are; parts that place their work by hand (experts) read it.
  """

  def __init__(self, mesh: Mesh, rules: Rules):
    self.mesh, self._rules = mesh, rules

  def __call__(self, x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, activation_sharding(axes, x.shape, self.mesh, self._rules))


def shard_fn(mesh: Mesh, rules: Rules = ACTIVATION_RULES) -> ShardActivations:
  """What constrains activations on `mesh`."""
  return ShardActivations(mesh, rules)


# --- Moving arrays -------------------------------------------------------------------------------------------------------------


def place_batch(batch: Batch, mesh: Mesh) -> Batch:
  """The NumPy batch on the mesh, rows split over data and fsdp; one explicit transfer, sharing no memory with `batch`."""
  return jax.device_put(batch, batch_sharding(mesh), may_alias=False)


def _devices(x: jax.Array) -> tuple[jax.Device, ...]:
  """Devices of an array, in the order of its mesh."""
  sharding = x.sharding
  return tuple(sharding.mesh.devices.flat) if isinstance(sharding, NamedSharding) else tuple(sharding.device_set)


def _read_piece(x: jax.Array, index: tuple[slice, ...]) -> np.ndarray:
  """`x[index]` on the host, put together from the shards; no device ever holds more than its own."""
  bounds = [s.indices(size)[:2] for s, size in zip(index, x.shape)]
  piece = np.empty([stop - start for start, stop in bounds], x.dtype)
  for shard in x.addressable_shards:
    if shard.replica_id:
      continue
    here = [s.indices(size)[:2] for s, size in zip(shard.index, x.shape)]
    both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(bounds, here)]
    if any(start >= stop for start, stop in both):
      continue
    target = tuple(slice(start - a, stop - a) for (start, stop), (a, _) in zip(both, bounds))
    source = tuple(slice(start - c, stop - c) for (start, stop), (c, _) in zip(both, here))
    piece[target] = jax.device_get(shard.data)[source]
  return piece


def _through_host(x: jax.Array, sharding: NamedSharding) -> jax.Array:
  """`x` in `sharding`, each shard put together on the host and sent to its device."""
  indices = sharding.addressable_devices_indices_map(x.shape)
  shards = [jax.device_put(_read_piece(x, index), device, may_alias=False) for device, index in indices.items()]
  return jax.make_array_from_single_device_arrays(x.shape, sharding, shards)


def make_converter(shardings: Shardings, dtype: Any) -> Callable[[Params], Params]:
  """Function from parameters on any mesh to parameters in `shardings` and `dtype`, one for all or a mapping from path to dtype.

  The result shares no buffer with its argument, which may be donated afterwards, and no device holds a full copy of a sharded array on
  the way. Between meshes of equally many devices, arrays are cast and laid out where they are and then go from device to device; otherwise
  each shard is put together on the host. The jitted part compiles once for each mesh that parameters come from.
  """
  dtypes = {p: jax.numpy.dtype(dtype[p] if isinstance(dtype, Mapping) else dtype) for p in shardings}
  target_devices = tuple(next(iter(shardings.values())).mesh.devices.flat)
  casts: dict[Any, Callable[[Params], Params]] = {}

  def cast_leaf(x: jax.Array, dtype: Any) -> jax.Array:
    return x.astype(dtype) if jax.numpy.issubdtype(x.dtype, jax.numpy.floating) and x.dtype != dtype else jax.numpy.copy(x)

  def in_place(sharding: NamedSharding, devices: tuple[jax.Device, ...]) -> NamedSharding:
    mesh = sharding.mesh
    here = Mesh(np.array(devices, object).reshape(mesh.devices.shape), mesh.axis_names, axis_types=mesh.axis_types)
    return NamedSharding(here, sharding.spec)

  def convert(params: Params) -> Params:
    if set(params) != set(shardings):
      raise ValueError(f'Parameters and shardings name different paths: {sorted(set(params) ^ set(shardings))[:5]}.')
    devices = _devices(next(iter(params.values())))
    same_size = len(devices) == len(target_devices)
    if devices not in casts:
      out = {p: in_place(s, devices) for p, s in shardings.items()} if same_size else None
      casts[devices] = jax.jit(lambda tree: {p: cast_leaf(x, dtypes[p]) for p, x in tree.items()}, out_shardings=out)
    fresh = casts[devices](params)
    if devices == target_devices:
      return fresh
    if same_size:
      return jax.device_put(fresh, shardings)
    if not all(x.is_fully_addressable for x in fresh.values()):
      raise ValueError('Parameters that span hosts cannot go to a mesh of another size; gather them over hosts first.')
    return {p: _through_host(x, shardings[p]) for p, x in fresh.items()}

  return convert


# --- Checks --------------------------------------------------------------------------------------------------------------------


def _check_side(config: Config, name: str, mesh_shape: Mapping[str, int]) -> None:
  """Raises ValueError where the model does not divide over the mesh of the learner or the sampler."""
  experts = config.model.experts
  for axis in ('sequence',) if experts.count else ('expert', 'sequence'):
    if mesh_shape[axis] != 1:
      raise ValueError(f'{name}.mesh: axis {axis!r} must be 1, no array is split over it; got {mesh_shape[axis]}.')
  sizes = [(logical, setting, getattr(config.model, setting)) for logical, setting in (('embed', 'embed_dim'), ('heads', 'num_heads'))]
  if not experts.count or experts.dense_layers:
    sizes.append(('mlp', 'mlp_dim', config.model.mlp_dim))
  if experts.count:
    sizes += [('expert', 'experts.count', experts.count), ('mlp', 'experts.mlp_dim', experts.mlp_dim)]
  for logical, setting, size in sizes:
    parts = math.prod(mesh_shape[a] for a in _mesh_axes(RULES[logical]))
    if size % parts:
      raise ValueError(
          f'model.{setting} must be a multiple of the {RULES[logical]!r} axis of {name}.mesh: got {size} with '
          f'{RULES[logical]}={parts}; change {name}.mesh.')


def check_mesh(config: Config) -> None:
  """Raises ValueError where the settings do not fit the devices of this process; compiles nothing, allocates nothing.

  Checks that device indices exist, that mesh sizes fit, that learner and sampler use the same devices or disjoint ones, that micro-batches
  divide over the batch axes, and that the model divides over both meshes.
  """
  learner, sampler = pick_devices(config.learner.devices), pick_devices(config.sampler.devices)
  if set(learner) != set(sampler) and set(learner) & set(sampler):
    raise ValueError(
        'learner.devices and sampler.devices must be the same set (colocated) or disjoint (split): got '
        f'{config.learner.devices or "all"} and {config.sampler.devices or "all"}.')
  shapes = {}
  for name, devices, sizes in (('learner', learner, config.learner.mesh), ('sampler', sampler, config.sampler.mesh)):
    try:
      shapes[name] = dict(zip(AXES, resolve_sizes(len(devices), sizes)))
    except ValueError as error:
      raise ValueError(f'{name}.mesh: {error}') from error
    _check_side(config, name, shapes[name])
  rows, micro = config.learner.batch_size, config.learner.micro_batches
  parts = math.prod(shapes['learner'][a] for a in BATCH_AXES)
  if micro < 1 or rows % micro or (rows // micro) % parts:
    raise ValueError(
        f'learner.batch_size must be a multiple of learner.micro_batches times the data and fsdp axes of learner.mesh: got {rows} with '
        f'micro_batches={micro}, data*fsdp={parts}; use a multiple of {max(micro, 1) * parts}, or change learner.mesh or learner.devices.')


def replicated_bytes(params: Params) -> int:
  """Bytes of the parameters of which every device of a mesh of several holds a full copy."""
  return sum(x.nbytes for x in params.values() if len(x.sharding.device_set) > 1 and x.sharding.is_fully_replicated)


def check_replication(params: Params, limit_bytes: int) -> None:
  """Raises ValueError when more than `limit_bytes` of parameters are fully replicated over a mesh of several devices.

  A mesh that splits nothing but the batch (data only) replicates on purpose: set the limit accordingly.
  """
  total = replicated_bytes(params)
  if total > limit_bytes:
    whole = [(x.nbytes, p) for p, x in params.items() if len(x.sharding.device_set) > 1 and x.sharding.is_fully_replicated]
    worst = ', '.join(f'{p} ({n} bytes)' for n, p in sorted(whole, reverse=True)[:3])
    raise ValueError(
        f'{total} bytes of parameters are replicated on every device, the limit is {limit_bytes}; largest: {worst}. '
        'Use larger fsdp or tensor axes, or sizes that they divide.')
