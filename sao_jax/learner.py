"""The learner: parameters and optimizer states on a mesh, and one compiled update for each stage and bucket of length.

`Learner` owns shardings and compiled programs; the update itself is in `updates.py`. Programs are compiled from shapes alone
(`warm_up`), donate the state they are given, and never compile again: a batch of an unforeseen shape is an error.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any, Callable

import jax
from jax.sharding import Mesh
import numpy as np

from sao_jax import optim, sharding
from sao_jax.batching import row_buckets
from sao_jax.config import Config
from sao_jax.models import transformer
from sao_jax.types import Batch, Params, Stat
from sao_jax.updates import Metrics, TrainState, Updates, is_frozen  # is_frozen: re-exported.

STAGES = ('sft', 'value_pretrain', 'rl')
BATCH_DTYPES = {
    'tokens': np.int32, 'token_mask': np.bool_, 'action_mask': np.bool_, 'behaviour_log_prob': np.float32, 'reward': np.float32,
    'policy_version': np.int32, 'truncated': np.bool_, 'turn': np.int32, 'follows': np.bool_,
}


class Learner:
  """Trains the policy and the value model on one mesh.

  A `TrainState` belongs to one stage ('sft', 'value_pretrain' or 'rl'): `begin_stage` gives it that stage's fresh optimizer states.
  """

  def __init__(self, config: Config, mesh: Mesh):
    """Raises ValueError where batch sizes or the model do not divide over the mesh; compiles nothing."""
    self.config, self.mesh = config, mesh
    self._groups = math.prod(mesh.shape[a] for a in sharding.BATCH_AXES)
    self._check_rows()
    if config.learner.balance_coefficient and not config.model.experts.count:  # Known only here where the model is pretrained.
      raise ValueError(f'learner.balance_coefficient must be 0 for a model without experts, got {config.learner.balance_coefficient}.')
    self._shapes, self._shardings = {}, {}
    for name, kind in (('policy', transformer.Policy), ('value', transformer.ValueModel)):
      _, shapes, axes = transformer.abstract(kind, config.model)
      self._shapes[name], self._shardings[name] = shapes, sharding.param_shardings(axes, shapes, mesh)
    self._updates = Updates(config, sharding.shard_fn(mesh), self._groups, self._constrain)
    self._optimizers = {
        'sft': {'policy': optim.make_optimizer(config.sft.optimizer)},
        'value_pretrain': {'value': optim.make_optimizer(config.value_pretrain.optimizer)},
        'rl': {'policy': optim.make_optimizer(config.learner.policy), 'value': optim.make_optimizer(config.learner.value)},
    }
    self._programs: dict[tuple[Any, ...], Any] = {}

  # --- State -------------------------------------------------------------------------------------------------------------------

  def init_policy(self, key: jax.Array) -> Params:
    """Random policy parameters, made in place on the mesh."""
    make = functools.partial(transformer.init, transformer.Policy, self.config.model)
    return jax.jit(make, out_shardings=self._shardings['policy'])(key)

  def init_state(self, policy_params: Params, value_params: Params | None = None) -> TrainState:
    """State before any stage. The parameters are copied: the caller keeps its own.

    Without `value_params` the value model does not exist until `begin_stage` makes it from the policy of that moment.
    """
    policy = self._place('policy', policy_params)
    value = self._place('value', value_params) if value_params else {}
    step = jax.device_put(np.int32(0), sharding.replicated(self.mesh))
    return TrainState(policy=policy, policy_opt=(), value_trainable=value, value_frozen={}, value_opt=(), step=step)

  def begin_stage(self, state: TrainState, stage: str) -> TrainState:
    """The state with fresh optimizer states for `stage`, and with the value model split into what that stage trains and the rest.

    A value model that does not exist yet starts from the policy's trunk, with a zero head. The state that was given is used up.
    """
    if stage not in STAGES:
      raise ValueError(f'Unknown stage {stage!r}; known: {", ".join(STAGES)}.')
    value = state.value_trainable | state.value_frozen
    if stage == 'sft' and value:
      raise ValueError("The value model starts from the policy after the warm start: begin 'sft' with a state without value parameters.")
    if stage != 'sft' and not value:
      make = functools.partial(transformer.value_params_from_policy, config=self.config.model)
      value = jax.jit(make, out_shardings=self._shardings['value'])(state.policy)
    frozen = {p for p in value if self._value_frozen(p, stage)}
    trainable = {p: x for p, x in value.items() if p not in frozen}
    return TrainState(
        policy=state.policy, policy_opt=self._fresh(stage, 'policy', self._learns(state.policy)), value_trainable=trainable,
        value_frozen={p: value[p] for p in frozen}, value_opt=self._fresh(stage, 'value', trainable), step=state.step)

  def abstract_state(self, stage: str) -> TrainState:
    """Shapes, dtypes and shardings of the state in `stage`, for restoring a checkpoint and for compiling."""
    policy, value = self._abstract_params('policy'), self._abstract_params('value') if stage != 'sft' else {}
    trainable = {p: x for p, x in value.items() if not self._value_frozen(p, stage)}
    return TrainState(
        policy=policy, policy_opt=self._abstract_opt(stage, 'policy', self._learns(policy)), value_trainable=trainable,
        value_frozen={p: x for p, x in value.items() if p not in trainable},
        value_opt=self._abstract_opt(stage, 'value', trainable),
        step=jax.ShapeDtypeStruct((), np.int32, sharding=sharding.replicated(self.mesh)))

  def policy_params(self, state: TrainState) -> Params:
    """The policy's parameters, by reference: they are gone at the next update. `ParamStore.publish` copies them."""
    return state.policy

  # --- Updates -----------------------------------------------------------------------------------------------------------------

  def warm_up(self, stage: str) -> None:
    """Compiles every program of `stage`, from shapes alone; afterwards none of its calls compiles."""
    for rows, length in itertools.product(self._rows(stage), self.config.learner.lengths):
      self._program(stage, rows, length, True)
      if stage == 'rl' and self.config.learner.value_warmup_steps:
        self._program('rl', rows, length, False)

  def update(self, state: TrainState, batch: Batch, *, version: int, train_policy: bool) -> tuple[TrainState, Metrics]:
    """One RL update; donates `state`.

    Args:
      state: of stage 'rl'.
      batch: NumPy batch of `learner.batch_size` rows (or one of its `row_buckets`) in one of `learner.lengths`.
      version: the policy's current version; tokens of this version are compared with the sampler's log-probabilities.
      train_policy: False while only the value model learns; nothing of the policy is then computed.

    Returns:
      The next state and metrics, still on the device: see `fetch`.
    """
    placed, shape = self._place_batch(batch, 'rl')
    number = jax.device_put(np.int32(version), sharding.replicated(self.mesh))
    return self._program('rl', *shape, train_policy)(state, placed, number)

  def value_update(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    """One step of value pretraining; donates `state`."""
    placed, shape = self._place_batch(batch, 'value_pretrain')
    return self._program('value_pretrain', *shape, True)(state, placed)

  def sft_update(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    """One supervised step on the action tokens, `sft.batch_size` rows; donates `state`."""
    placed, shape = self._place_batch(batch, 'sft')
    return self._program('sft', *shape, True)(state, placed)

  def log_probs(self, policy_params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """log_prob and entropy f32[B, T] of the action tokens, by the code that training uses; 0 elsewhere."""
    placed, shape = self._place_batch(batch, 'rl')
    return self._program('log_probs', *shape, True)(policy_params, placed)

  def values(self, state: TrainState, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """value f32[B, T], of the state before each token, and bootstrap value f32[B]."""
    placed, shape = self._place_batch(batch, 'rl')
    return self._program('values', *shape, True)(state.value_trainable | state.value_frozen, placed)

  def fetch(self, metrics: Metrics, step: int) -> Metrics:
    """Metrics on the host.

    Raises:
      FloatingPointError: a metric is not finite. The update that found it left parameters and optimizer states as they were.
    """
    values = jax.device_get(metrics)
    for name, stat in sorted(values.items()):
      if not (np.isfinite(stat.total) and np.isfinite(stat.count)):
        raise FloatingPointError(
            f'Update {step}: {name} is not finite ({stat.total}). The parameters were left unchanged; the last checkpoint is good. '
            'Lower the learning rate, or look at the batch.')
    return {name: Stat(float(s.total), float(s.count)) for name, s in values.items()}

  # --- Programs ----------------------------------------------------------------------------------------------------------------

  def _program(self, name: str, rows: int, length: int, train_policy: bool) -> Callable[..., Any]:
    """The compiled program, made on first use."""
    key = (name, rows, length, train_policy)
    if key not in self._programs:
      function, arguments, out_shardings = self._define(name, rows, length, train_policy)
      donate = (0,) if name in STAGES else ()
      self._programs[key] = jax.jit(function, donate_argnums=donate, out_shardings=out_shardings).lower(*arguments).compile()
    return self._programs[key]

  def _define(self, name: str, rows: int, length: int, train_policy: bool) -> tuple[Callable[..., Any], tuple[Any, ...], Any]:
    """Function, abstract arguments (with shardings) and output shardings of a program."""
    updates, whole = self._updates, sharding.replicated(self.mesh)
    batch = self._abstract_batch(rows, length)
    by_row = sharding.batch_sharding(self.mesh)
    if name == 'log_probs':
      return updates.log_probs, (self._abstract_params('policy'), batch), (by_row, by_row)
    if name == 'values':
      return updates.values, (self._abstract_params('value'), batch), (by_row, by_row)
    optimizers, state = self._optimizers[name], self.abstract_state(name)
    out_shardings = (jax.tree.map(lambda x: x.sharding, state), whole)
    if name == 'rl':
      update = functools.partial(updates.rl, optimizers['policy'], optimizers['value'], train_policy=train_policy)
      return update, (state, batch, jax.ShapeDtypeStruct((), np.int32, sharding=whole)), out_shardings
    if name == 'value_pretrain':
      return functools.partial(updates.value, optimizers['value']), (state, batch), out_shardings
    return functools.partial(updates.sft, optimizers['policy']), (state, batch), out_shardings

  def _rows(self, name: str) -> tuple[int, ...]:
    """Numbers of rows that the batches of a stage may have."""
    size = self.config.sft.batch_size if name == 'sft' else self.config.learner.batch_size
    return row_buckets(size, self.config.task.max_segments)

  def _value_frozen(self, path: str, stage: str) -> bool:
    learner = self.config.learner
    freeze = self.config.value_pretrain.freeze if stage == 'value_pretrain' else learner.value_freeze
    return is_frozen(path, freeze, freeze_router=learner.freeze_router)

  def _learns(self, policy: Params) -> Params:
    """What training changes of the policy."""
    return {p: x for p, x in policy.items() if not self._updates.policy_frozen(p)}

  def _check_rows(self) -> None:
    parts = self.config.learner.micro_batches * self._groups
    used = {'learner.batch_size': self.config.learner.batch_size}
    if self.config.sft.steps:
      used['sft.batch_size'] = self.config.sft.batch_size
    for name, rows in used.items():
      if rows % parts:
        raise ValueError(
            f'{name} must be a multiple of learner.micro_batches times the data and fsdp axes of the learner\'s mesh: got {rows} with '
            f'micro_batches={self.config.learner.micro_batches}, data*fsdp={self._groups}; use a multiple of {parts}.')

  def _place_batch(self, batch: Batch, stage: str) -> tuple[Batch, tuple[int, int]]:
    """The batch on the mesh, and its shape; raises ValueError on a shape or dtype that no program was made for."""
    rows, length = batch.tokens.shape
    if batch.follows is None:
      batch = dataclasses.replace(batch, follows=np.zeros((rows,), np.bool_))
    if rows not in self._rows(stage) or length not in self.config.learner.lengths:
      raise ValueError(
          f'The learner takes {" or ".join(map(str, self._rows(stage)))} rows of length '
          f'{", ".join(map(str, self.config.learner.lengths))}, got {batch.tokens.shape}.')
    if self.config.task.max_segments == 1 and batch.follows.any():
      raise ValueError('A batch with rollouts of several segments (Batch.follows) needs task.max_segments of at least 2; raise it.')
    for field, dtype in BATCH_DTYPES.items():
      if getattr(batch, field).dtype != dtype:
        raise ValueError(f'Batch.{field} must be {np.dtype(dtype)}, got {getattr(batch, field).dtype}.')
    return sharding.place_batch(batch, self.mesh), (rows, length)

  def _abstract_batch(self, rows: int, length: int) -> Batch:
    by_row = sharding.batch_sharding(self.mesh)
    return Batch(**{
        field: jax.ShapeDtypeStruct((rows,) if field in ('truncated', 'follows') else (rows, length), dtype, sharding=by_row)
        for field, dtype in BATCH_DTYPES.items()})

  # --- Shardings ---------------------------------------------------------------------------------------------------------------

  def _constrain(self, gradient: Params) -> Params:
    """Gradients in the sharding of their parameters; trunk paths are laid out alike in both models."""
    shardings = self._shardings['value'] | self._shardings['policy']
    return {p: jax.lax.with_sharding_constraint(x, shardings[p]) for p, x in gradient.items()}

  def _place(self, name: str, params: Params) -> Params:
    if set(params) != set(self._shapes[name]):
      different = sorted(set(params) ^ set(self._shapes[name]))
      raise ValueError(f'Parameters of the {name} model do not match the settings; missing or unknown: {", ".join(different[:5])}.')
    for path, x in params.items():
      if x.shape != self._shapes[name][path].shape:
        raise ValueError(f'Parameter {path} must have shape {self._shapes[name][path].shape}, got {x.shape}.')
    return sharding.make_converter(self._shardings[name], {p: s.dtype for p, s in self._shapes[name].items()})(params)

  def _abstract_params(self, name: str) -> Params:
    return {p: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=self._shardings[name][p]) for p, s in self._shapes[name].items()}

  def _fresh(self, stage: str, name: str, params: Params) -> Any:
    optimizer = self._optimizers[stage].get(name)
    if optimizer is None:
      return ()
    shardings = jax.tree.map(lambda x: x.sharding, self._abstract_opt(stage, name, params))
    return jax.jit(functools.partial(optim.init, optimizer), out_shardings=shardings)(params)

  def _abstract_opt(self, stage: str, name: str, params: Params) -> Any:
    """Shapes and shardings of an optimizer state: moments like their parameter, counters replicated."""
    optimizer = self._optimizers[stage].get(name)
    if optimizer is None:
      return ()

    def with_sharding(path: tuple[Any, ...], x: Any) -> jax.ShapeDtypeStruct:
      of = getattr(path[-1], 'key', None) if path else None
      where = self._shardings[name][of] if of in self._shardings[name] else sharding.replicated(self.mesh)
      return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    return jax.tree_util.tree_map_with_path(with_sharding, jax.eval_shape(functools.partial(optim.init, optimizer), params))
