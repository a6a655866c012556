"""Parts that all blocks are made of: makers of parameters, norms, linear maps and the SwiGLU feed-forward."""

from __future__ import annotations

from typing import Any, Callable

from flax import nnx
import jax
import jax.numpy as jnp

from sao_jax.config import ModelConfig

Shard = Callable[[jax.Array, tuple[str | None, ...]], jax.Array]


def no_shard(x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
  """Leaves activations where the compiler puts them."""
  del axes
  return x


class Maker:
  """Makes the parameters of one block, or of `stack` blocks at once with a leading axis 'layers'."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs, *, stack: int = 0):
    self.dtype = jnp.dtype(config.param_dtype)
    self.rngs = rngs
    self.lead: tuple[int, ...] = (stack,) if stack else ()
    self.lead_axes: tuple[str, ...] = ('layers',) if stack else ()

  def random(self, shape: tuple[int, ...], axes: tuple[str, ...], fan_in: int, dtype: Any = None) -> nnx.Param:
    """Truncated normal with variance about 1 / fan_in."""
    value = jax.random.truncated_normal(self.rngs.params(), -2.0, 2.0, self.lead + shape, jnp.float32) * (fan_in**-0.5)
    return nnx.Param(value.astype(self.dtype if dtype is None else dtype), axes=self.lead_axes + axes)

  def constant(self, shape: tuple[int, ...], axes: tuple[str, ...], value: float, dtype: Any = None) -> nnx.Param:
    return nnx.Param(jnp.full(self.lead + shape, value, self.dtype if dtype is None else dtype), axes=self.lead_axes + axes)


class RMSNorm(nnx.Module):
  """x / rms(x) * scale over the last axis, computed in float32."""

  def __init__(self, size: int, axis: str, eps: float, make: Maker):
    self.scale = make.constant((size,), (axis,), 1.0)
    self.eps = eps

  def __call__(self, x: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
    return (y * self.scale[...].astype(jnp.float32)).astype(x.dtype)


class LayerNorm(nnx.Module):
  """(x - mean(x)) / std(x) * scale + bias over the last axis, computed in float32."""

  def __init__(self, size: int, axis: str, eps: float, make: Maker):
    self.scale = make.constant((size,), (axis,), 1.0)
    self.bias = make.constant((size,), (axis,), 0.0)
    self.eps = eps

  def __call__(self, x: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
    return (y * self.scale[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)).astype(x.dtype)


def residual(config: ModelConfig, fan_in: int) -> int:
  """`fan_in` of the weights that write to the residual stream: what 2 L of them add starts below the embeddings (rms D**-0.5 each),
  which attention must be able to find again; with unscaled weights small models learn to copy late or not at all."""
  return fan_in * 4 * config.num_layers


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


def to_heads(x: jax.Array, weight: jax.Array) -> jax.Array:
  """[B, T, H, d] of x [B, T, D] and weight [D, H, d]."""
  return linear(x, weight.reshape(weight.shape[0], -1)).reshape(*x.shape[:2], *weight.shape[1:])


def from_heads(x: jax.Array, weight: jax.Array) -> jax.Array:
  """[B, T, D] of x [B, T, H, d] and weight [H, d, D]."""
  return linear(x.reshape(*x.shape[:2], -1), weight.reshape(-1, weight.shape[-1]))


class Mlp(nnx.Module):
  """SwiGLU: (silu(x @ gate) * (x @ up)) @ down."""

  def __init__(self, config: ModelConfig, size: int, make: Maker):
    c = config
    self.gate = make.random((c.embed_dim, size), ('embed', 'mlp'), c.embed_dim)
    self.up = make.random((c.embed_dim, size), ('embed', 'mlp'), c.embed_dim)
    self.down = make.random((size, c.embed_dim), ('mlp', 'embed'), residual(c, size))

  def __call__(self, x: jax.Array, shard: Shard) -> jax.Array:
    gate, up = linear(x, self.gate[...].astype(x.dtype)), linear(x, self.up[...].astype(x.dtype))
    return linear(shard(jax.nn.silu(gate) * up, ('batch', 'length', 'mlp')), self.down[...].astype(x.dtype))
