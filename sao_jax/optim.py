"""Optimizers from settings: global-norm clipping, AdamW with float32 moments, and the learning-rate schedules."""

from __future__ import annotations

from typing import Callable

import jax
import jax.numpy as jnp
import optax

from sao_jax.config import OptimizerConfig
from sao_jax.types import Params


def schedule(config: OptimizerConfig) -> Callable[[jax.Array], jax.Array]:
  """Learning rate of optimizer step `count` (0 for the first), f32[].

  During warm-up it rises linearly and reaches the peak at step `warmup_steps - 1`; no step has rate 0. 'linear' and 'cosine' then fall
  from the peak at the last warm-up step to `end_fraction` of it at step `decay_steps - 1`, and stay there.
  """

  def rate(count: jax.Array) -> jax.Array:
    step = jnp.asarray(count, jnp.float32) + 1.0
    rise = jnp.minimum(1.0, step / max(config.warmup_steps, 1))
    start = max(config.warmup_steps, 1)
    progress = jnp.clip((step - start) / max(config.decay_steps - start, 1), 0.0, 1.0)
    remaining = {'constant': 1.0, 'linear': 1.0 - progress, 'cosine': 0.5 * (1.0 + jnp.cos(jnp.pi * progress))}[config.schedule]
    return config.learning_rate * rise * (config.end_fraction + (1.0 - config.end_fraction) * remaining)

  return rate


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
  """Clips the global norm to `max_grad_norm`, then AdamW; decoupled weight decay acts on every parameter, as in PyTorch's AdamW."""
  return optax.chain(
      optax.clip_by_global_norm(config.max_grad_norm),
      optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon),
      optax.add_decayed_weights(config.weight_decay) if config.weight_decay else optax.identity(),
      optax.scale_by_learning_rate(schedule(config)),
  )


def init(optimizer: optax.GradientTransformation, params: Params) -> optax.OptState:
  """Fresh optimizer state; moments are float32 whatever the parameters are."""
  return optimizer.init(_float32(params))


def apply(
    optimizer: optax.GradientTransformation, gradient: Params, state: optax.OptState, params: Params, *, accept: jax.Array
) -> tuple[Params, optax.OptState]:
  """One optimizer step in float32.

  Args:
    optimizer: from `make_optimizer`.
    gradient: same paths and shapes as `params`.
    state: from `init` or the last `apply`.
    params: in their own dtype, which the result keeps.
    accept: bool[]; where False, parameters and state come back unchanged, bit for bit (a non-finite or an empty step).

  Returns:
    New parameters and optimizer state.
  """
  updates, new_state = optimizer.update(_float32(gradient), state, _float32(params))
  new_params = {p: jnp.where(accept, (x.astype(jnp.float32) + updates[p]).astype(x.dtype), x) for p, x in params.items()}
  return new_params, jax.tree.map(lambda new, old: jnp.where(accept, new, old), new_state, state)


def _float32(tree: Params) -> Params:
  return {p: x.astype(jnp.float32) for p, x in tree.items()}
