"""Mixture of experts: the router, the experts' feed-forwards over sorted tokens, a shared expert, and how evenly experts are used.

    probs [.., E] = softmax or sigmoid of x @ router, in float32
    each token: the k experts of largest prob (+ correction), weights = their probs, normalised and scaled
    y = sum over the k experts of weight * down(silu(gate(x)) * up(x))  +  shared expert(x)

No token is ever dropped: the (token, expert) pairs are sorted by expert and go through `grouped.product`. On a mesh each device of the axis
`expert` holds E / n experts and computes the pairs that chose one of them; the results are summed over the axis.

Source: Shazeer et al. 2017, arXiv:1701.06538; DeepSeek-AI 2024 (V3), arXiv:2412.19437, section 2.1.2; Qwen3 and GLM-4.5 in Hugging Face.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from flax import nnx
import jax
from jax.sharding import Mesh, PartitionSpec
import jax.numpy as jnp

from sao_jax import sharding
from sao_jax.config import ExpertsConfig, ModelConfig
from sao_jax.models import grouped
from sao_jax.models.layers import Maker, Mlp, Shard, residual

FEW_TOKENS = 32  # Up to so many, a CPU computes all experts for all tokens, if there are as many choices as experts.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Choice:
  """Where tokens go: ids i32[.., k], weights f32[.., k], and probs f32[.., E], which sum to 1 over the experts."""

  ids: jax.Array
  weights: jax.Array
  probs: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Load:
  """How some tokens used the experts of L layers; loads of parts of a batch add up.

  Attributes:
    chosen: f32[L, E], how often each expert was chosen; no gradient.
    probs: f32[L, E], sum of the router's probabilities; carries the gradient.
    tokens: f32[L], how many tokens were counted.
  """

  chosen: jax.Array
  probs: jax.Array
  tokens: jax.Array


def balance_loss(load: Load, chosen: jax.Array, tokens: jax.Array) -> jax.Array:
  """Load-balancing loss, f32[]: mean over layers of E * sum_e f_e P_e; 1 where all experts are used alike, E / k at worst.

  f_e is the share of choices that fell on expert e, P_e the mean probability of it.

  Args:
    load: of some tokens; the gradient flows through its `probs`.
    chosen: f32[L, E], choices of all tokens of the batch, for f_e: the loss of a batch is not the mean of those of its parts.
    tokens: f32[L], all tokens of the batch.

  Source: Fedus et al. 2021, arXiv:2101.03961, equation 4, with f_e over all k choices as in DeepSeek-V3, equation 18.
  """
  share = chosen / jnp.maximum(jnp.sum(chosen, axis=-1, keepdims=True), 1.0)
  mean = load.probs / jnp.maximum(tokens, 1.0)[:, None]
  return jnp.mean(jnp.sum(jax.lax.stop_gradient(share) * mean, axis=-1)) * chosen.shape[-1]


def route(logits: jax.Array, correction: jax.Array | None, config: ExpertsConfig) -> Choice:
  """Experts of each token from router logits f32[.., E]; `correction` f32[E] moves the choice but not the weights."""
  c = config
  if c.router == 'softmax':
    scores = probs = jax.nn.softmax(logits, axis=-1)
  else:
    scores = jax.nn.sigmoid(logits)
    probs = scores / jnp.sum(scores, axis=-1, keepdims=True)
  ranking = jax.lax.stop_gradient(scores if correction is None else scores + correction)
  if c.groups > 1:
    by_group = ranking.reshape(*ranking.shape[:-1], c.groups, c.count // c.groups)
    best = jax.lax.top_k(jnp.sum(jax.lax.top_k(by_group, 2)[0], axis=-1), c.top_groups)[1]
    kept = jnp.any(best[..., None] == jnp.arange(c.groups), axis=-2)
    ranking = jnp.where(kept[..., None], by_group, -jnp.inf).reshape(ranking.shape)
  ids = jax.lax.top_k(ranking, c.top_k)[1]
  # As a masked sum: the gradient of a gather is a scatter, which is slow on most platforms.
  weights = jnp.sum(jnp.where(ids[..., None] == jnp.arange(c.count), scores[..., None, :], 0.0), axis=-1)
  if c.normalise:
    weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + (1e-20 if c.router == 'sigmoid' else 0.0))
  return Choice(ids, weights * c.scale, probs)


class Router(nnx.Module):
  """Linear router; weights, logits and choice are float32 whatever the rest is."""

  def __init__(self, config: ModelConfig, make: Maker):
    self.config = config.experts
    self.weight = make.random((config.embed_dim, self.config.count), ('embed', 'router'), config.embed_dim, jnp.float32)
    if self.config.router == 'sigmoid':
      self.correction = make.constant((self.config.count,), ('router',), 0.0, jnp.float32)

  def __call__(self, x: jax.Array) -> Choice:
    logits = jnp.einsum('...d,de->...e', x.astype(jnp.float32), self.weight[...])
    return route(logits, self.correction[...] if self.config.router == 'sigmoid' else None, self.config)


class Experts(nnx.Module):
  """The SwiGLU weights of all experts."""

  def __init__(self, config: ModelConfig, make: Maker):
    count, size, width = config.experts.count, config.experts.mlp_dim, config.embed_dim
    self.gate = make.random((count, width, size), ('expert', 'embed', 'mlp'), width)
    self.up = make.random((count, width, size), ('expert', 'embed', 'mlp'), width)
    self.down = make.random((count, size, width), ('expert', 'mlp', 'embed'), residual(config, size))

  def __call__(self, x: jax.Array, choice: Choice, shard: Shard) -> jax.Array:
    """[B, T, D]: the weighted sum of the outputs of each token's experts."""
    weights = [w[...].astype(x.dtype) for w in (self.gate, self.up, self.down)]
    mesh = getattr(shard, 'mesh', None)
    if mesh is None or mesh.size == 1:
      return mix(x, choice.ids, choice.weights, *weights, first=0)
    return _mix_on_mesh(x, choice, weights, mesh)


def mix(
    x: jax.Array, ids: jax.Array, weights: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array, *, first: Any
) -> jax.Array:
  """What the experts `first`, first + 1, ... add to the output of each token.

  Args:
    x: [B, T, D].
    ids: i32[B, T, k], the experts of each token, each at most once.
    weights: f32[B, T, k].
    gate, up: [G, D, F] of these experts.
    down: [G, F, D].
    first: number of the first of them.

  Returns:
    [B, T, D] in the dtype of x; pairs with other experts add nothing.
  """
  tokens, top_k = x.reshape(-1, x.shape[-1]), ids.shape[-1]
  own = ids.reshape(-1, top_k) - first
  arguments = (tokens, own, weights.reshape(-1, top_k).astype(x.dtype), gate, up, down)
  if tokens.shape[0] <= FEW_TOKENS and own.size >= gate.shape[0]:
    return jax.lax.platform_dependent(*arguments, cpu=_mix_all, default=_mix_sorted).reshape(x.shape)
  return _mix_sorted(*arguments).reshape(x.shape)


def _mix_sorted(
    x: jax.Array, ids: jax.Array, weights: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array
) -> jax.Array:
  """[N, D]: pairs sorted by expert, then products of groups. `ids` outside 0 .. G - 1 go to no group."""
  count, (n, top_k) = gate.shape[0], ids.shape
  own = jnp.where((ids >= 0) & (ids < count), ids, count).reshape(-1)  # Others sort behind.
  order = jnp.argsort(own, stable=True)
  inverse = jnp.zeros_like(order).at[order].set(jnp.arange(n * top_k, dtype=order.dtype), unique_indices=True)
  sizes = jnp.sum(own[:, None] == jnp.arange(count), axis=0, dtype=jnp.int32)
  rows = _repeat_sorted(x, order, inverse.reshape(n, top_k))
  hidden = jax.nn.silu(grouped.product(rows, gate, sizes)) * grouped.product(rows, up, sizes)
  out = _reorder(grouped.product(hidden, down, sizes), inverse, order).reshape(n, top_k, -1)
  return jnp.einsum('nkd,nk->nd', out, weights)


def _mix_all(x: jax.Array, ids: jax.Array, weights: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
  """[N, D]: every expert for every token, most of it weighted with 0. For a few tokens that use most experts: on a CPU the time is that of
  reading the weights, and they are read once, in order."""
  count = gate.shape[0]
  share = jnp.sum(jnp.where(ids[..., None] == jnp.arange(count), weights[..., None], 0), axis=1)  # [N, G]
  many = jnp.broadcast_to(x, (count, *x.shape))
  hidden = jax.nn.silu(jnp.einsum('gnd,gdf->gnf', many, gate)) * jnp.einsum('gnd,gdf->gnf', many, up)
  hidden = jnp.where(share[..., None] != 0, hidden.swapaxes(0, 1) * share[..., None], 0)  # An output not asked for may be inf.
  return hidden.reshape(x.shape[0], -1) @ down.reshape(-1, down.shape[-1])


@jax.custom_vjp
def _repeat_sorted(x: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
  """Rows x[order // k] for the pairs of x [N, D] with k experts each; `inverse` i32[N, k] is where they went. Its gradient gathers too."""
  return x[order // inverse.shape[1]]


_repeat_sorted.defvjp(
    lambda x, order, inverse: (_repeat_sorted(x, order, inverse), inverse),
    lambda inverse, g: (jnp.sum(g[inverse], axis=1), None, None))


@jax.custom_vjp
def _reorder(x: jax.Array, places: jax.Array, back: jax.Array) -> jax.Array:
  """x[places], a permutation whose inverse is `back`."""
  return x[places]


_reorder.defvjp(lambda x, places, back: (_reorder(x, places, back), back), lambda back, g: (g[back], None, None))


def _mix_on_mesh(x: jax.Array, choice: Choice, weights: list[jax.Array], mesh: Mesh) -> jax.Array:
  """`mix` with tokens split like the batch, experts over the axis 'expert' and their width over 'tensor'."""
  rows = sharding.activation_sharding(('batch', 'length', None), x.shape, mesh).spec
  split = [sharding.partition_spec(axes) for axes in (('expert', None, 'mlp'), ('expert', None, 'mlp'), ('expert', 'mlp', None))]

  def local(x: jax.Array, ids: jax.Array, weights: jax.Array, *own: jax.Array) -> jax.Array:
    first = jax.lax.axis_index('expert') * own[0].shape[0]
    return jax.lax.psum(mix(x, ids, weights, *own, first=first), ('expert', 'tensor'))

  run = jax.shard_map(
      local, mesh=mesh, in_specs=(rows, rows, rows, *split), out_specs=PartitionSpec(*rows), check_vma=False)
  return run(x, choice.ids, choice.weights, *weights)


class Moe(nnx.Module):
  """The feed-forward of a layer with experts."""

  def __init__(self, config: ModelConfig, make: Maker):
    c = config.experts
    self.router = Router(config, make)
    self.experts = Experts(config, make)
    if c.shared:
      self.shared = Mlp(config, c.shared * c.mlp_dim, make)

  def __call__(self, x: jax.Array, shard: Shard, mask: jax.Array | None = None) -> tuple[jax.Array, Load | None]:
    """Output [B, T, D], and the load (of one layer, without the axis L) of the tokens in `mask` bool[B, T]; None without one."""
    choice = self.router(x)
    y = self.experts(x, choice, shard)
    if hasattr(self, 'shared'):
      y = y + self.shared(x, shard)
    return y, None if mask is None else load_of(choice, mask)


def load_of(choice: Choice, mask: jax.Array) -> Load:
  """Load of one layer by the tokens in `mask` bool[B, T]."""
  count = choice.probs.shape[-1]
  chosen = jnp.any(choice.ids[..., None] == jnp.arange(count), axis=-2) & mask[..., None]
  probs = jnp.where(mask[..., None], choice.probs, 0.0)
  return Load(
      jnp.sum(chosen, axis=(0, 1), dtype=jnp.float32), jnp.sum(probs, axis=(0, 1)), jnp.sum(mask, dtype=jnp.float32))
