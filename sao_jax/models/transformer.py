"""Decoder-only transformer (Llama, Qwen2.5 and Qwen3 dense shapes), its policy head and the value model.

    tokens i32[B, T] --embed--> [B, T, D] --L blocks--> final norm --> hidden [B, T, D]
    policy: logits [.., V] = hidden @ unembed        value model: scalar = hidden . head

How queries see keys is not decided here: each block hands its rotated q, k, v and one layer of the caller's attention state to the
`attend` function it was given. The learner passes `causal_attention` and no state, the sampler its cache.

Every parameter carries logical axis names in its metadata `axes`. Parameters travel as a flat dictionary from dotted path to array.
"""

from __future__ import annotations

from typing import Any, Callable

from flax import nnx
import jax
import jax.numpy as jnp

from sao_jax.config import ModelConfig
from sao_jax.types import Params

# attend(q [B,T,H,d], k [B,T,K,d], v [B,T,K,d], state of one layer) -> (out [B,T,H,d], new state of that layer)
Attend = Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]
Shard = Callable[[jax.Array, tuple[str | None, ...]], jax.Array]


def no_shard(x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
  """Leaves activations where the compiler puts them."""
  del axes
  return x


def _param(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], fan_in: int, dtype: Any) -> nnx.Param:
  value = jax.random.truncated_normal(rngs.params(), -2.0, 2.0, shape, jnp.float32) * (fan_in**-0.5)
  return nnx.Param(value.astype(dtype), axes=axes)


def _constant(shape: tuple[int, ...], axes: tuple[str, ...], value: float, dtype: Any) -> nnx.Param:
  return nnx.Param(jnp.full(shape, value, dtype), axes=axes)


class RMSNorm(nnx.Module):
  """x / rms(x) * scale over the last axis, computed in float32."""

  def __init__(self, size: int, axis: str, eps: float, dtype: Any):
    self.scale = _constant((size,), (axis,), 1.0, dtype)
    self.eps = eps

  def __call__(self, x: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
    return (y * self.scale[...].astype(jnp.float32)).astype(x.dtype)


def rotate(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
  """Rotary embedding of x [B, T, N, d] at positions i32[B, T]: halves rotated, as in Hugging Face's Llama."""
  half = x.shape[-1] // 2
  frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)  # [d/2]
  angle = positions.astype(jnp.float32)[..., None, None] * frequency  # [B, T, 1, d/2]
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class Attention(nnx.Module):
  """Grouped-query attention: H query heads share K key/value heads."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    c, dtype = config, jnp.dtype(config.param_dtype)
    self.config = config
    self.query = _param(rngs, (c.embed_dim, c.num_heads, c.head_dim), ('embed', 'heads', 'head_dim'), c.embed_dim, dtype)
    self.key = _param(rngs, (c.embed_dim, c.num_kv_heads, c.head_dim), ('embed', 'kv_heads', 'head_dim'), c.embed_dim, dtype)
    self.value = _param(rngs, (c.embed_dim, c.num_kv_heads, c.head_dim), ('embed', 'kv_heads', 'head_dim'), c.embed_dim, dtype)
    self.out = _param(rngs, (c.num_heads, c.head_dim, c.embed_dim), ('heads', 'head_dim', 'embed'), c.num_heads * c.head_dim, dtype)
    if c.qkv_bias:
      self.query_bias = _constant((c.num_heads, c.head_dim), ('heads', 'head_dim'), 0.0, dtype)
      self.key_bias = _constant((c.num_kv_heads, c.head_dim), ('kv_heads', 'head_dim'), 0.0, dtype)
      self.value_bias = _constant((c.num_kv_heads, c.head_dim), ('kv_heads', 'head_dim'), 0.0, dtype)
    if c.qk_norm:
      self.query_norm = RMSNorm(c.head_dim, 'head_dim', c.norm_eps, dtype)
      self.key_norm = RMSNorm(c.head_dim, 'head_dim', c.norm_eps, dtype)

  def __call__(self, x: jax.Array, positions: jax.Array, attend: Attend, state: Any, shard: Shard) -> tuple[jax.Array, Any]:
    c, dtype = self.config, x.dtype
    q = jnp.einsum('btd,dhk->bthk', x, self.query[...].astype(dtype))
    k = jnp.einsum('btd,dhk->bthk', x, self.key[...].astype(dtype))
    v = jnp.einsum('btd,dhk->bthk', x, self.value[...].astype(dtype))
    if c.qkv_bias:
      q, k, v = (y + b[...].astype(dtype) for y, b in ((q, self.query_bias), (k, self.key_bias), (v, self.value_bias)))
    if c.qk_norm:
      q, k = self.query_norm(q), self.key_norm(k)
    q, k = rotate(q, positions, c.rope_theta), rotate(k, positions, c.rope_theta)
    q = shard(q, ('batch', 'length', 'heads', 'head_dim'))
    out, state = attend(q, k, v, state)
    return jnp.einsum('bthk,hkd->btd', out, self.out[...].astype(dtype)), state


class Mlp(nnx.Module):
  """SwiGLU: (silu(x @ gate) * (x @ up)) @ down."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    c, dtype = config, jnp.dtype(config.param_dtype)
    self.gate = _param(rngs, (c.embed_dim, c.mlp_dim), ('embed', 'mlp'), c.embed_dim, dtype)
    self.up = _param(rngs, (c.embed_dim, c.mlp_dim), ('embed', 'mlp'), c.embed_dim, dtype)
    self.down = _param(rngs, (c.mlp_dim, c.embed_dim), ('mlp', 'embed'), c.mlp_dim, dtype)

  def __call__(self, x: jax.Array, shard: Shard) -> jax.Array:
    gate, up = x @ self.gate[...].astype(x.dtype), x @ self.up[...].astype(x.dtype)
    return shard(jax.nn.silu(gate) * up, ('batch', 'length', 'mlp')) @ self.down[...].astype(x.dtype)


class Block(nnx.Module):
  """Pre-norm attention and feed-forward with residuals."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    dtype = jnp.dtype(config.param_dtype)
    self.attention_norm = RMSNorm(config.embed_dim, 'embed', config.norm_eps, dtype)
    self.attention = Attention(config, rngs)
    self.mlp_norm = RMSNorm(config.embed_dim, 'embed', config.norm_eps, dtype)
    self.mlp = Mlp(config, rngs)

  def __call__(self, x: jax.Array, positions: jax.Array, attend: Attend, state: Any, shard: Shard) -> tuple[jax.Array, Any]:
    out, state = self.attention(self.attention_norm(x), positions, attend, state, shard)
    x = shard(x + out, ('batch', 'length', 'embed'))
    return shard(x + self.mlp(self.mlp_norm(x), shard), ('batch', 'length', 'embed')), state


class Trunk(nnx.Module):
  """Embedding, blocks and final norm."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    c = config
    self.config = config
    self.embedding = _param(rngs, (c.vocab_size, c.embed_dim), ('vocab', 'embed'), c.embed_dim, jnp.dtype(c.param_dtype))
    self.layers = nnx.List([Block(c, rngs) for _ in range(c.num_layers)])
    self.final_norm = RMSNorm(c.embed_dim, 'embed', c.norm_eps, jnp.dtype(c.param_dtype))

  def __call__(
      self, tokens: jax.Array, positions: jax.Array, attend: Attend, states: list[Any] | None = None, *, shard: Shard = no_shard
  ) -> tuple[jax.Array, list[Any]]:
    """Hidden states [B, T, D] in the compute dtype, and the new attention state of every layer."""
    x = jnp.take(self.embedding[...], tokens, axis=0).astype(jnp.dtype(self.config.compute_dtype))
    x = shard(x, ('batch', 'length', 'embed'))
    states = [None] * len(self.layers) if states is None else states
    new_states = []
    for block, state in zip(self.layers, states, strict=True):
      x, state = block(x, positions, attend, state, shard)
      new_states.append(state)
    return self.final_norm(x), new_states


class Policy(nnx.Module):
  """Trunk and unembedding; with tied embeddings there is one leaf, read at every call."""

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
    self.config = config
    self.trunk = Trunk(config, rngs)
    if not config.tie_embeddings:
      dtype = jnp.dtype(config.param_dtype)
      self.unembedding = _param(rngs, (config.embed_dim, config.vocab_size), ('embed', 'vocab'), config.embed_dim, dtype)

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
    self.head = _constant((config.embed_dim,), ('embed',), 0.0, jnp.float32)
    self.head_bias = _constant((), (), 0.0, jnp.float32)

  def __call__(self, tokens: jax.Array, positions: jax.Array, attend: Attend, *, shard: Shard = no_shard) -> jax.Array:
    """f32[B, T]: value of the state *after* each position, i.e. of the state before the next token."""
    hidden, _ = self.trunk(tokens, positions, attend, shard=shard)
    return jnp.einsum('btd,d->bt', hidden.astype(jnp.float32), self.head[...]) + self.head_bias[...]


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array, state: Any = None) -> tuple[jax.Array, Any]:
  """Dense causal attention over right-padded rows: a real token comes before all padding, so it never sees any.

  Scores and softmax are float32. q [B, T, H, d]; k, v [B, T, K, d]; query head h reads key head h // (H // K).
  """
  b, t, h, d = q.shape
  groups = k.shape[2]
  grouped = q.reshape(b, t, groups, h // groups, d)
  scores = jnp.einsum('btkgd,bskd->bkgts', grouped, k, preferred_element_type=jnp.float32) * (d**-0.5)
  mask = jnp.arange(t)[:, None] >= jnp.arange(t)[None, :]
  probs = jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1).astype(v.dtype)
  return jnp.einsum('bkgts,bskd->btkgd', probs, v).reshape(b, t, h, d), state


# --- Parameters as a flat dictionary -------------------------------------------------------------------------------------------


def _path(parts: tuple[Any, ...]) -> str:
  return '.'.join(str(p) for p in parts)


def split(model: nnx.Module) -> tuple[nnx.GraphDef, Params]:
  """Definition (hashable) and flat parameters of a model."""
  definition, state = nnx.split(model, nnx.Param)
  return definition, {_path(p): v.get_value() for p, v in nnx.to_flat_state(state)}


def abstract(kind: type[nnx.Module], config: ModelConfig) -> tuple[nnx.GraphDef, dict[str, jax.ShapeDtypeStruct], dict[str, tuple[str, ...]]]:
  """Definition, shapes and logical axes of `Policy` or `ValueModel`, without allocating anything."""
  model = nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0)))
  definition, state = nnx.split(model, nnx.Param)
  flat = nnx.to_flat_state(state)
  return definition, {_path(p): v.get_value() for p, v in flat}, {_path(p): v.get_metadata('axes') for p, v in flat}


def init(kind: type[nnx.Module], config: ModelConfig, key: jax.Array) -> Params:
  """Random parameters; jit it with out_shardings so that no full copy sits on one device."""
  return split(kind(config, rngs=nnx.Rngs(key)))[1]


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
