"""Decoder-only transformer (Llama, Qwen2.5 and Qwen3 dense shapes), its policy head and the value model.

    tokens i32[B, T] --embed--> [B, T, D] --L blocks--> final norm --> hidden [B, T, D]
    policy: logits [.., V] = hidden @ unembed        value model: scalar = hidden . head

How queries see keys is not decided here: each block hands its rotated q, k, v and one layer of the caller's attention state to the
`attend` function it was given. The learner passes a function of `attention.py` and no state, the sampler its cache.

Blocks are unrolled ('trunk.layers.3.mlp.up', one state per layer in a list), or with `scan_layers` stacked and scanned
('trunk.layers.mlp.up' with a leading axis 'layers', states stacked the same way). `stack_layers` and `unstack_layers` turn one into
the other.

Every parameter carries logical axis names in its metadata `axes`. Parameters travel as a flat dictionary from dotted path to array.
"""

from __future__ import annotations

from typing import Any, Callable

from flax import nnx
import jax
from jax.sharding import Mesh
import jax.numpy as jnp
import numpy as np

from sao_jax import sharding
from sao_jax.config import ModelConfig
from sao_jax.models.attention import Attend, blockwise_attention, causal_attention  # Re-exported: callers find them here.
from sao_jax.types import Params

Rope = tuple[jax.Array, jax.Array]  # Cosine and sine, f32[B, T, 1, d/2].
Shard = Callable[[jax.Array, tuple[str | None, ...]], jax.Array]


def no_shard(x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
  """Leaves activations where the compiler puts them."""
  del axes
  return x


class _Maker:
  """Makes the parameters of one block, or of all blocks at once with a leading axis 'layers'."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs, *, stacked: bool = False):
    self.dtype = jnp.dtype(config.param_dtype)
    self.rngs = rngs
    self.lead: tuple[int, ...] = (config.num_layers,) if stacked else ()
    self.lead_axes: tuple[str, ...] = ('layers',) if stacked else ()

  def random(self, shape: tuple[int, ...], axes: tuple[str, ...], fan_in: int) -> nnx.Param:
    """Truncated normal with variance about 1 / fan_in."""
    value = jax.random.truncated_normal(self.rngs.params(), -2.0, 2.0, self.lead + shape, jnp.float32) * (fan_in**-0.5)
    return nnx.Param(value.astype(self.dtype), axes=self.lead_axes + axes)

  def constant(self, shape: tuple[int, ...], axes: tuple[str, ...], value: float, dtype: Any = None) -> nnx.Param:
    return nnx.Param(jnp.full(self.lead + shape, value, self.dtype if dtype is None else dtype), axes=self.lead_axes + axes)


class RMSNorm(nnx.Module):
  """x / rms(x) * scale over the last axis, computed in float32."""

  def __init__(self, size: int, axis: str, eps: float, make: _Maker):
    self.scale = make.constant((size,), (axis,), 1.0)
    self.eps = eps

  def __call__(self, x: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
    return (y * self.scale[...].astype(jnp.float32)).astype(x.dtype)


def rope_frequencies(head_dim: int, theta: float) -> np.ndarray:
  """theta^(-2i/d) for i < d/2, f32[d/2]; computed in float64."""
  return (theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)).astype(np.float32)


def rope_table(positions: jax.Array, head_dim: int, theta: float) -> Rope:
  """Cosine and sine of the rotary angles at positions i32[B, T]; made once for all layers."""
  angle = positions.astype(jnp.float32)[..., None, None] * rope_frequencies(head_dim, theta)
  return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, rope: Rope) -> jax.Array:
  """Rotary embedding of x [B, T, N, d]: first and second half of d rotated against each other, as in Hugging Face's Llama."""
  cos, sin = rope
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def residual(config: ModelConfig, fan_in: int) -> int:
  """`fan_in` of the weights that write to the residual stream: what 2 L of them add starts below the embeddings (rms D**-0.5 each),
  which attention must be able to find again; with unscaled weights small models learn to copy late or not at all."""
  return fan_in * 4 * config.num_layers


class Attention(nnx.Module):
  """Grouped-query attention: H query heads share K key/value heads."""

  def __init__(self, config: ModelConfig, make: _Maker):
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

  def __call__(self, x: jax.Array, rope: Rope, attend: Attend, state: Any, shard: Shard) -> tuple[jax.Array, Any]:
    c, dtype = self.config, x.dtype
    q = jnp.einsum('btd,dhk->bthk', x, self.query[...].astype(dtype))
    k = jnp.einsum('btd,dhk->bthk', x, self.key[...].astype(dtype))
    v = jnp.einsum('btd,dhk->bthk', x, self.value[...].astype(dtype))
    if c.qkv_bias:
      q, k, v = (y + b[...].astype(dtype) for y, b in ((q, self.query_bias), (k, self.key_bias), (v, self.value_bias)))
    if c.qk_norm:
      q, k = self.query_norm(q), self.key_norm(k)
    q = shard(rotate(q, rope), ('batch', 'length', 'heads', 'head_dim'))
    k, v = (shard(y, ('batch', 'length', 'kv_heads', 'head_dim')) for y in (rotate(k, rope), v))
    out, state = attend(q, k, v, state)
    return jnp.einsum('bthk,hkd->btd', out, self.out[...].astype(dtype)), state


@jax.custom_vjp
def linear(x: jax.Array, weight: jax.Array) -> jax.Array:
  """x [B, T, D] @ weight [D, F], with the weight's gradient as x^T g.

  JAX's own rule makes (g^T x)^T, for which XLA on the CPU writes transposed copies of g: a sixth of a training step.
  """
  return x @ weight


def _linear_backward(saved: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
  x, weight = saved
  return g @ weight.T, jnp.einsum('btd,btf->df', x, g)


linear.defvjp(lambda x, weight: (x @ weight, (x, weight)), _linear_backward)


class Mlp(nnx.Module):
  """SwiGLU: (silu(x @ gate) * (x @ up)) @ down."""

  def __init__(self, config: ModelConfig, make: _Maker):
    c = config
    self.gate = make.random((c.embed_dim, c.mlp_dim), ('embed', 'mlp'), c.embed_dim)
    self.up = make.random((c.embed_dim, c.mlp_dim), ('embed', 'mlp'), c.embed_dim)
    self.down = make.random((c.mlp_dim, c.embed_dim), ('mlp', 'embed'), residual(c, c.mlp_dim))

  def __call__(self, x: jax.Array, shard: Shard) -> jax.Array:
    gate, up = linear(x, self.gate[...].astype(x.dtype)), linear(x, self.up[...].astype(x.dtype))
    return linear(shard(jax.nn.silu(gate) * up, ('batch', 'length', 'mlp')), self.down[...].astype(x.dtype))


class Block(nnx.Module):
  """Pre-norm attention and feed-forward with residuals."""

  def __init__(self, config: ModelConfig, make: _Maker):
    self.attention_norm = RMSNorm(config.embed_dim, 'embed', config.norm_eps, make)
    self.attention = Attention(config, make)
    self.mlp_norm = RMSNorm(config.embed_dim, 'embed', config.norm_eps, make)
    self.mlp = Mlp(config, make)

  def __call__(self, x: jax.Array, rope: Rope, attend: Attend, state: Any, shard: Shard) -> tuple[jax.Array, Any]:
    out, state = self.attention(self.attention_norm(x), rope, attend, state, shard)
    x = shard(x + out, ('batch', 'length', 'embed'))
    return shard(x + self.mlp(self.mlp_norm(x), shard), ('batch', 'length', 'embed')), state


class Trunk(nnx.Module):
  """Embedding, blocks and final norm."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    c, make = config, _Maker(config, rngs)
    self.config = config
    self.embedding = make.random((c.vocab_size, c.embed_dim), ('vocab', 'embed'), c.embed_dim)
    if c.scan_layers:
      self.layers = Block(c, _Maker(c, rngs, stacked=True))
    else:
      self.layers = nnx.List([Block(c, make) for _ in range(c.num_layers)])
    self.final_norm = RMSNorm(c.embed_dim, 'embed', c.norm_eps, make)

  def __call__(
      self, tokens: jax.Array, positions: jax.Array, attend: Attend, states: Any = None, *, shard: Shard = no_shard
  ) -> tuple[jax.Array, Any]:
    """Hidden states [B, T, D] in the compute dtype, and the new attention states.

    `states` is a list with the state of every layer, or with `scan_layers` one pytree with a leading axis L; None where there is none.
    """
    c = self.config
    x = jnp.take(self.embedding[...], tokens, axis=0).astype(jnp.dtype(c.compute_dtype))
    x = shard(x, ('batch', 'length', 'embed'))
    angles = rope_table(positions, c.head_dim, c.rope_theta)

    def run(block: Block, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
      return block(x, angles, attend, state, shard)

    x, states = (self._scan if c.scan_layers else self._unroll)(run, x, states)
    return shard(self.final_norm(x), ('batch', 'length', 'embed')), states

  def _unroll(self, run: Callable[..., tuple[jax.Array, Any]], x: jax.Array, states: list[Any] | None) -> tuple[jax.Array, list[Any]]:
    new_states = []
    for block, state in zip(self.layers, [None] * len(self.layers) if states is None else states, strict=True):
      definition, params = nnx.split(block)
      # The CPU compiler merges this recomputation with the first pass again: there, remat saves memory only together with scan_layers.
      one = lambda params, x, state, definition=definition: run(nnx.merge(definition, params), x, state)
      x, state = (jax.checkpoint(one) if self.config.remat else one)(params, x, state)
      new_states.append(state)
    return x, new_states

  def _scan(self, run: Callable[..., tuple[jax.Array, Any]], x: jax.Array, states: Any) -> tuple[jax.Array, Any]:
    definition, params = nnx.split(self.layers)

    def one(x: jax.Array, layer: tuple[Any, Any]) -> tuple[jax.Array, Any]:
      return run(nnx.merge(definition, layer[0]), x, layer[1])

    # Inside a scan the compiler cannot merge the recomputation with the first pass, so the guard against it is not needed.
    return jax.lax.scan(jax.checkpoint(one, prevent_cse=False) if self.config.remat else one, x, (params, states))


class Policy(nnx.Module):
  """Trunk and unembedding; with tied embeddings there is one leaf, read at every call."""

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
    self.config = config
    self.trunk = Trunk(config, rngs)
    if not config.tie_embeddings:
      self.unembedding = _Maker(config, rngs).random((config.embed_dim, config.vocab_size), ('embed', 'vocab'), config.embed_dim)

  def hidden(self, tokens: jax.Array, positions: jax.Array, attend: Attend, states: Any = None, *, shard: Shard = no_shard):
    """Hidden states [B, T, D] and the new attention states."""
    return self.trunk(tokens, positions, attend, states, shard=shard)

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
    make = _Maker(config, rngs)
    self.head = make.constant((config.embed_dim,), ('embed',), 0.0, jnp.float32)
    self.head_bias = make.constant((), (), 0.0, jnp.float32)

  def __call__(self, tokens: jax.Array, positions: jax.Array, attend: Attend, *, shard: Shard = no_shard) -> jax.Array:
    """f32[B, T]: value of the state *after* each position, i.e. of the state before the next token."""
    hidden, _ = self.trunk(tokens, positions, attend, shard=shard)
    return jnp.einsum('btd,d->bt', hidden.astype(jnp.float32), self.head[...]) + self.head_bias[...]


# --- Parameters as a flat dictionary -------------------------------------------------------------------------------------------


def _path(parts: tuple[Any, ...]) -> str:
  return '.'.join(str(p) for p in parts)


def split(model: nnx.Module) -> tuple[nnx.GraphDef, Params]:
  """Definition (hashable) and flat parameters of a model."""
  definition, state = nnx.split(model, nnx.Param)
  return definition, {_path(p): v.get_value() for p, v in nnx.to_flat_state(state)}


def abstract(
    kind: type[nnx.Module], config: ModelConfig
) -> tuple[nnx.GraphDef, dict[str, jax.ShapeDtypeStruct], dict[str, tuple[str, ...]]]:
  """Definition, shapes and logical axes of `Policy` or `ValueModel`, without allocating anything."""
  model = nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0)))
  definition, state = nnx.split(model, nnx.Param)
  flat = nnx.to_flat_state(state)
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
  model = nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0)))
  definition, state = nnx.split(model, nnx.Param)
  flat = [(p, v.replace(params[_path(p)])) for p, v in nnx.to_flat_state(state)]
  return nnx.merge(definition, nnx.from_flat_state(flat))


def value_params_from_policy(policy: Params, config: ModelConfig) -> Params:
  """Parameters of a value model that starts from the policy's weights: copied trunk, zero head. Shares no buffer with `policy`."""
  _, shapes, _ = abstract(ValueModel, config)
  return {p: jnp.copy(policy[p]) if p in policy else jnp.zeros(s.shape, s.dtype) for p, s in shapes.items()}


LAYERS = 'trunk.layers.'


def stack_layers(params: Params) -> Params:
  """Unrolled parameters as those of `scan_layers`: 'trunk.layers.0.mlp.up', ... become one 'trunk.layers.mlp.up' of [L, ...]."""
  stacks: dict[str, dict[int, jax.Array]] = {}
  result = {}
  for path, x in params.items():
    if path.startswith(LAYERS):
      layer, rest = path[len(LAYERS):].split('.', 1)
      stacks.setdefault(LAYERS + rest, {})[int(layer)] = x
    else:
      result[path] = x
  return {**result, **{path: jnp.stack([layers[i] for i in range(len(layers))]) for path, layers in stacks.items()}}


def unstack_layers(params: Params) -> Params:
  """The inverse of `stack_layers`."""
  result = {}
  for path, x in params.items():
    if path.startswith(LAYERS):
      result.update({f'{LAYERS}{i}.{path[len(LAYERS):]}': x[i] for i in range(x.shape[0])})
    else:
      result[path] = x
  return result
