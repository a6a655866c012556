"""Decoder-only transformer, its policy head and the value model; every family of models is this one, chosen by `ModelConfig`.

    tokens i32[B, T] --embed--> [B, T, D] --L blocks--> final norm --> hidden [B, T, D]
    policy: logits [.., V] = hidden @ unembed        value model: scalar = hidden . head
    block: x + attention(norm(x)), then x + feed-forward(norm(x))
    attention: grouped-query (here) or latent (`latent_attention.py`);  feed-forward: SwiGLU or experts (`moe.py`)

How queries see keys is not decided here: each block hands its rotated q, k, v and one layer of the caller's attention state to the
`attend` function it was given. The learner passes a function of `attention.py` and no state, the sampler its cache.

Blocks are unrolled ('trunk.layers.3.mlp.up', one state per layer in a list), or with `scan_layers` stacked and scanned
('trunk.layers.mlp.up' with a leading axis 'layers', states stacked the same way). Where the first layers have a plain feed-forward and the
others experts, the first ones are a stack of their own, 'trunk.first_layers'. `stack_layers` and `unstack_layers` turn one form into the
other.

Every parameter carries logical axis names in its metadata `axes`. Parameters travel as a flat dictionary from dotted path to array.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

from flax import nnx
import jax
from jax.sharding import Mesh
import jax.numpy as jnp

from sao_jax import sharding
from sao_jax.config import ModelConfig
from sao_jax.models import moe
from sao_jax.models import rope as rope_lib
from sao_jax.models.attention import Attend, blockwise_attention, causal_attention  # Re-exported: callers find them here.
from sao_jax.models.latent_attention import LatentAttention
from sao_jax.models.layers import Maker, Mlp, RMSNorm, Shard, from_heads, no_shard, residual, to_heads
from sao_jax.types import Params


class Attention(nnx.Module):
  """Grouped-query attention: H query heads share K key/value heads."""

  def __init__(self, config: ModelConfig, make: Maker):
    c = config
    self.config = config
    self.query = make.random((c.embed_dim, c.num_heads, c.head_dim), ('embed', 'heads', 'head_dim'), c.embed_dim)
    self.key = make.random((c.embed_dim, c.num_kv_heads, c.head_dim), ('embed', 'kv_heads', 'head_dim'), c.embed_dim)
    self.value = make.random((c.embed_dim, c.num_kv_heads, c.head_dim), ('embed', 'kv_heads', 'head_dim'), c.embed_dim)
    self.out = make.random((c.num_heads, c.head_dim, c.embed_dim), ('heads', 'head_dim', 'embed'), residual(c, c.num_heads * c.head_dim))
    if c.qkv_bias:
      self.query_bias = make.constant((c.num_heads, c.head_dim), ('heads', 'head_dim'), 0.0)
      self.key_bias = make.constant((c.num_kv_heads, c.head_dim), ('kv_heads', 'head_dim'), 0.0)
      self.value_bias = make.constant((c.num_kv_heads, c.head_dim), ('kv_heads', 'head_dim'), 0.0)
    if c.qk_norm:
      self.query_norm = RMSNorm(c.head_dim, 'head_dim', c.norm_eps, make)
      self.key_norm = RMSNorm(c.head_dim, 'head_dim', c.norm_eps, make)

  def __call__(
      self, x: jax.Array, rope: rope_lib.Rope, attend: Attend, state: Any, shard: Shard, selected: jax.Array | None
  ) -> tuple[jax.Array, Any, jax.Array | None]:
    """Output [B, T, D], new state, and `selected` as it came: every query sees all keys before it."""
    c, dtype = self.config, x.dtype
    q, k, v = (to_heads(x, w[...].astype(dtype)) for w in (self.query, self.key, self.value))
    if c.qkv_bias:
      q, k, v = (y + b[...].astype(dtype) for y, b in ((q, self.query_bias), (k, self.key_bias), (v, self.value_bias)))
    if c.qk_norm:
      q, k = self.query_norm(q), self.key_norm(k)
    q = shard(rope_lib.rotate(q, rope), ('batch', 'length', 'heads', 'head_dim'))
    k, v = (shard(y, ('batch', 'length', 'kv_heads', 'head_dim')) for y in (rope_lib.rotate(k, rope), v))
    out, state = attend(q, k, v, state)
    return from_heads(out, self.out[...].astype(dtype)), state, selected


class Block(nnx.Module):
  """Pre-norm attention and feed-forward with residuals; `layer` decides between plain feed-forward and experts, and on the index."""

  def __init__(self, config: ModelConfig, make: Maker, layer: int):
    c = config
    self.attention_norm = RMSNorm(c.embed_dim, 'embed', c.norm_eps, make)
    self.attention = LatentAttention(c, make, layer) if c.latent.rank else Attention(c, make)
    self.mlp_norm = RMSNorm(c.embed_dim, 'embed', c.norm_eps, make)
    self.mlp = moe.Moe(c, make) if has_experts(c, layer) else Mlp(c, c.mlp_dim, make)

  def __call__(
      self, x: jax.Array, state: Any, selected: jax.Array | None, *, rope: rope_lib.Rope, attend: Attend, mask: jax.Array | None,
      shard: Shard
  ) -> tuple[jax.Array, Any, jax.Array | None, moe.Load | None]:
    """New x, attention state, the choice of keys for the next layer, and the load of the experts by the tokens in `mask`."""
    out, state, selected = self.attention(self.attention_norm(x), rope, attend, state, shard, selected)
    x = shard(x + out, ('batch', 'length', 'embed'))
    y = self.mlp_norm(x)
    y, load = self.mlp(y, shard, mask) if isinstance(self.mlp, moe.Moe) else (self.mlp(y, shard), None)
    return shard(x + y, ('batch', 'length', 'embed')), state, selected, load


def has_experts(config: ModelConfig, layer: int) -> bool:
  """Whether the feed-forward of a layer is a mixture of experts."""
  return config.experts.count > 0 and layer not in config.experts.dense_layers


def stacked_layers(config: ModelConfig) -> tuple[int, int]:
  """Numbers of layers in the two stacks of `scan_layers`, with a plain feed-forward and of the kind of the last layer.

  Raises:
    ValueError: the layers are of more kinds than that.
  """
  sparse = [has_experts(config, i) for i in range(config.num_layers)]
  first = 0 if all(sparse) or not any(sparse) else sparse.index(True)
  if not all(s == sparse[-1] for s in sparse[first:]) or config.latent.shared_index_layers:
    what = 'layers that share an index' if config.latent.shared_index_layers else 'plain feed-forwards behind the first layer with experts'
    raise ValueError(f'model.scan_layers needs layers of one kind, or plain ones followed by ones with experts; got {what}. Use False.')
  return first, config.num_layers - first


class Trunk(nnx.Module):
  """Embedding, blocks and final norm."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    c, make = config, Maker(config, rngs)
    self.config = config
    self.embedding = make.random((c.vocab_size, c.embed_dim), ('vocab', 'embed'), c.embed_dim)
    if c.scan_layers:
      first, rest = stacked_layers(c)
      if first:
        self.first_layers = Block(c, Maker(c, rngs, stack=first), 0)
      self.layers = Block(c, Maker(c, rngs, stack=rest), first)
    else:
      self.layers = nnx.List([Block(c, make, i) for i in range(c.num_layers)])
    self.final_norm = RMSNorm(c.embed_dim, 'embed', c.norm_eps, make)

  def __call__(
      self, tokens: jax.Array, positions: jax.Array, attend: Attend, states: Any = None, *, mask: jax.Array | None = None,
      shard: Shard = no_shard
  ) -> tuple[jax.Array, Any, moe.Load | None]:
    """Hidden states [B, T, D] in the compute dtype, the new attention states, and the experts' load.

    `states` is a list with the state of every layer, or with `scan_layers` one pytree with a leading axis L; None where there is none.
    The load counts the tokens in `mask` bool[B, T]; it is None without a mask or without experts.
    """
    c = self.config
    x = jnp.take(self.embedding[...], tokens, axis=0).astype(jnp.dtype(c.compute_dtype))
    x = shard(x, ('batch', 'length', 'embed'))
    run = functools.partial(_run, rope=rope_lib.table(positions, c), attend=attend, mask=mask, shard=shard)
    x, states, load = (self._scan if c.scan_layers else self._unroll)(run, x, states)
    return shard(self.final_norm(x), ('batch', 'length', 'embed')), states, load

  def _unroll(self, run: Callable[..., Any], x: jax.Array, states: list[Any] | None) -> tuple[jax.Array, list[Any], moe.Load | None]:
    new_states, loads, selected = [], [], None
    for block, state in zip(self.layers, [None] * len(self.layers) if states is None else states, strict=True):
      definition, params = nnx.split(block)
      # The CPU compiler merges this recomputation with the first pass again: there, remat saves memory only together with scan_layers.
      one = functools.partial(run, definition)
      x, state, selected, load = (jax.checkpoint(one) if self.config.remat else one)(params, x, state, selected)
      new_states.append(state)
      loads += [] if load is None else [load]
    return x, new_states, jax.tree.map(lambda *layers: jnp.stack(layers), *loads) if loads else None

  def _scan(self, run: Callable[..., Any], x: jax.Array, states: Any) -> tuple[jax.Array, Any, moe.Load | None]:
    first, rest = stacked_layers(self.config)
    new_states, loads = [], []
    for stack, start, count in (('first_layers', 0, first), ('layers', first, rest)):
      if not count:
        continue
      definition, params = nnx.split(getattr(self, stack))

      def one(x: jax.Array, layer: tuple[Any, Any], definition: nnx.GraphDef = definition) -> tuple[jax.Array, Any]:
        x, state, _, load = run(definition, layer[0], x, layer[1], None)
        return x, (state, load)

      # Inside a scan the compiler cannot merge the recomputation with the first pass, so the guard against it is not needed.
      part = jax.tree.map(lambda s, start=start, count=count: s[start: start + count], states) if first else states
      x, (state, load) = jax.lax.scan(jax.checkpoint(one, prevent_cse=False) if self.config.remat else one, x, (params, part))
      new_states.append(state)
      loads += [] if load is None else [load]
    join = lambda *parts: jnp.concatenate(parts) if len(parts) > 1 else parts[0]
    return x, jax.tree.map(join, *new_states), loads[0] if loads else None


def _run(
    definition: nnx.GraphDef, params: Any, x: jax.Array, state: Any, selected: jax.Array | None, **settings: Any
) -> tuple[jax.Array, Any, jax.Array | None, moe.Load | None]:
  """One block with its parameters."""
  return nnx.merge(definition, params)(x, state, selected, **settings)


class Policy(nnx.Module):
  """Trunk and unembedding; with tied embeddings there is one leaf, read at every call."""

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
    self.config = config
    self.trunk = Trunk(config, rngs)
    if not config.tie_embeddings:
      self.unembedding = Maker(config, rngs).random((config.embed_dim, config.vocab_size), ('embed', 'vocab'), config.embed_dim)

  def hidden(self, tokens: jax.Array, positions: jax.Array, attend: Attend, states: Any = None, *, shard: Shard = no_shard):
    """Hidden states [B, T, D] and the new attention states."""
    return self.trunk(tokens, positions, attend, states, shard=shard)[:2]

  def hidden_and_load(
      self, tokens: jax.Array, positions: jax.Array, attend: Attend, mask: jax.Array, *, shard: Shard = no_shard
  ) -> tuple[jax.Array, moe.Load | None]:
    """Hidden states [B, T, D], and how the tokens in `mask` bool[B, T] used the experts; None for a model without."""
    hidden, _, load = self.trunk(tokens, positions, attend, mask=mask, shard=shard)
    return hidden, load

  def logits(self, hidden: jax.Array) -> jax.Array:
    """f32[..., V] of hidden states [..., D]; accumulated in float32 whatever the compute dtype."""
    if self.config.tie_embeddings:
      weight = self.trunk.embedding[...].astype(hidden.dtype)
      return jnp.einsum('...d,vd->...v', hidden, weight, preferred_element_type=jnp.float32)
    return jnp.einsum('...d,dv->...v', hidden, self.unembedding[...].astype(hidden.dtype), preferred_element_type=jnp.float32)


class ValueModel(nnx.Module):
  """The policy's trunk with a scalar head (zero at the start) and no vocabulary projection (SAO, section 2 of the method)."""

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
    self.config = config
    self.trunk = Trunk(config, rngs)
    make = Maker(config, rngs)
    self.head = make.constant((config.embed_dim,), ('embed',), 0.0, jnp.float32)
    self.head_bias = make.constant((), (), 0.0, jnp.float32)

  def __call__(self, tokens: jax.Array, positions: jax.Array, attend: Attend, *, shard: Shard = no_shard) -> jax.Array:
    """f32[B, T]: value of the state *after* each position, i.e. of the state before the next token."""
    hidden = self.trunk(tokens, positions, attend, shard=shard)[0]
    return jnp.einsum('btd,d->bt', hidden.astype(jnp.float32), self.head[...]) + self.head_bias[...]


# --- Parameters as a flat dictionary -------------------------------------------------------------------------------------------


def _path(parts: tuple[Any, ...]) -> str:
  return '.'.join(str(p) for p in parts)


def split(model: nnx.Module) -> tuple[nnx.GraphDef, Params]:
  """Definition (hashable) and flat parameters of a model."""
  definition, state = nnx.split(model, nnx.Param)
  return definition, {_path(p): v.get_value() for p, v in nnx.to_flat_state(state)}


@functools.lru_cache(maxsize=64)  # Making a model is most of the time it takes to trace a small program.
def _outline(kind: type[nnx.Module], config: ModelConfig) -> tuple[nnx.GraphDef, tuple[tuple[Any, nnx.Variable], ...]]:
  """Definition, and paths and variables with shapes for values, of `Policy` or `ValueModel`."""
  definition, state = nnx.split(nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0))), nnx.Param)
  return definition, tuple(nnx.to_flat_state(state))


def abstract(
    kind: type[nnx.Module], config: ModelConfig
) -> tuple[nnx.GraphDef, dict[str, jax.ShapeDtypeStruct], dict[str, tuple[str, ...]]]:
  """Definition, shapes and logical axes of `Policy` or `ValueModel`, without allocating anything."""
  definition, flat = _outline(kind, config)
  return definition, {_path(p): v.get_value() for p, v in flat}, {_path(p): v.get_metadata('axes') for p, v in flat}


def init(kind: type[nnx.Module], config: ModelConfig, key: jax.Array) -> Params:
  """Random parameters; jit it with out_shardings so that no full copy sits on one device."""
  return split(kind(config, rngs=nnx.Rngs(key)))[1]


def init_on_mesh(kind: type[nnx.Module], config: ModelConfig, key: jax.Array, mesh: Mesh) -> Params:
  """The parameters of `init`, made where they belong: each device computes its own shards."""
  _, shapes, axes = abstract(kind, config)
  placement = sharding.param_shardings(axes, shapes, mesh)
  return jax.jit(lambda key: init(kind, config, key), out_shardings=placement)(key)


def merge(kind: type[nnx.Module], config: ModelConfig, params: Params) -> nnx.Module:
  """The model with `params` in place; cheap, meant for use inside jit."""
  definition, flat = _outline(kind, config)
  return nnx.merge(definition, nnx.from_flat_state([(p, v.replace(params[_path(p)])) for p, v in flat]))


def value_params_from_policy(policy: Params, config: ModelConfig) -> Params:
  """Parameters of a value model that starts from the policy's weights: copied trunk, zero head. Shares no buffer with `policy`."""
  _, shapes, _ = abstract(ValueModel, config)
  return {p: jnp.copy(policy[p]) if p in policy else jnp.zeros(s.shape, s.dtype) for p, s in shapes.items()}


LAYERS, FIRST_LAYERS = 'trunk.layers.', 'trunk.first_layers.'


def stack_layers(params: Params) -> Params:
  """Unrolled parameters as those of `scan_layers`: 'trunk.layers.0.mlp.up', ... become one 'trunk.layers.mlp.up' of [L, ...].

  Layers that have not the parameters of the last one go to 'trunk.first_layers'.
  """
  layers: dict[int, Params] = {}
  result = {}
  for path, x in params.items():
    if path.startswith(LAYERS):
      layer, rest = path[len(LAYERS):].split('.', 1)
      layers.setdefault(int(layer), {})[rest] = x
    else:
      result[path] = x
  first = sum(set(leaves) != set(layers[len(layers) - 1]) for leaves in layers.values())  # Of layers unlike the last one.
  for prefix, numbers in ((FIRST_LAYERS, range(first)), (LAYERS, range(first, len(layers)))):
    result.update({prefix + rest: jnp.stack([layers[i][rest] for i in numbers]) for rest in (layers[numbers[0]] if numbers else ())})
  return result


def unstack_layers(params: Params) -> Params:
  """The inverse of `stack_layers`."""
  result, first = {}, max((x.shape[0] for p, x in params.items() if p.startswith(FIRST_LAYERS)), default=0)
  for path, x in params.items():
    prefix = next((p for p in (FIRST_LAYERS, LAYERS) if path.startswith(p)), None)
    if prefix is None:
      result[path] = x
    else:
      start = first if prefix == LAYERS else 0
      result.update({f'{LAYERS}{start + i}.{path[len(prefix):]}': x[i] for i in range(x.shape[0])})
  return result


def stacked_place(path: str, config: ModelConfig) -> tuple[str, int]:
  """Path and index in the stack of an unrolled layer parameter: 'trunk.layers.4.mlp.up' is 'trunk.layers.mlp.up', 3 after one first."""
  layer, rest = path.removeprefix(LAYERS).split('.', 1)
  first = stacked_layers(config)[0]
  return (FIRST_LAYERS + rest, int(layer)) if int(layer) < first else (LAYERS + rest, int(layer) - first)
