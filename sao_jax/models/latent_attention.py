"""Multi-head latent attention (DeepSeek-V2) and its sparse index (DeepSeek-V3.2, GLM-5), in the form that keeps keys and values latent.

    query   x --down--> norm --up--> H heads of [plain | rotary]
    latent  x --down--> [latent | rotary key], norm on the latent: all that is cached, one "head" for all query heads
    score   (plain query through the key part of `up`) . latent  +  rotary query . rotary key
    output  attention-weighted latent, through the value part of `up`, through `out`

So the keys are [latent | rotary key], the values the latent itself, and `attend` sees one key/value head. Expanding keys and values first
gives the same numbers with H times the memory.

The index scores every earlier position with a few small heads and lets each query see the best `index_top_k` alone. Layers in
`shared_index_layers` have no index of their own and take the choice of the layer before.

Source: DeepSeek-AI 2024, arXiv:2405.04434, section 2.1; DeepSeek-AI 2025 (V3.2), section 2; Hugging Face's `glm_moe_dsa`.
"""

from __future__ import annotations

from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from sao_jax.config import ModelConfig
from sao_jax.models import rope as rope_lib
from sao_jax.models.attention import Attend, Index
from sao_jax.models.layers import LayerNorm, Maker, RMSNorm, Shard, residual

INNER_EPS = 1e-6  # Of the norms inside attention, whatever the epsilon of the others.


class Indexer(nnx.Module):
  """Small heads that score how much a query needs each position. No gradient reaches them: what they give is a choice."""

  def __init__(self, config: ModelConfig, make: Maker):
    c, latent = config, config.latent
    self.config = config
    self.query = make.random(
        (latent.query_rank, latent.index_heads, latent.index_dim), ('latent', 'index_heads', 'head_dim'), latent.query_rank)
    self.key = make.random((c.embed_dim, latent.index_dim), ('embed', 'head_dim'), c.embed_dim)
    self.key_norm = LayerNorm(latent.index_dim, 'head_dim', INNER_EPS, make)
    self.weight = make.random((c.embed_dim, latent.index_heads), ('embed', 'index_heads'), c.embed_dim)

  def __call__(self, x: jax.Array, query: jax.Array, rope: rope_lib.Rope) -> Index:
    """Index of x [B, T, D]; `query` [B, T, Q] is the low-rank query of attention. The rotary part comes first in a head."""
    latent, dtype = self.config.latent, x.dtype
    q = jnp.einsum('btr,rhk->bthk', query, self.query[...].astype(dtype))
    k = self.key_norm(x @ self.key[...].astype(dtype))[:, :, None]
    q, k = (rope_lib.rotate(y, rope, interleaved=True) for y in (q, k))
    weight = (x @ self.weight[...].astype(dtype)).astype(jnp.float32) * (latent.index_heads**-0.5)
    return Index(top_k=latent.index_top_k, query=q, weight=weight, key=k)


class LatentAttention(nnx.Module):
  """Attention of one layer; `layer` says whether it has an index of its own."""

  def __init__(self, config: ModelConfig, make: Maker, layer: int):
    c, latent = config, config.latent
    self.config = config
    size = latent.plain_dim + latent.rotary_dim
    self.query_down = make.random((c.embed_dim, latent.query_rank), ('embed', 'latent'), c.embed_dim)
    self.query_down_norm = RMSNorm(latent.query_rank, 'latent', INNER_EPS, make)
    self.query_up = make.random((latent.query_rank, c.num_heads, size), ('latent', 'heads', 'head_dim'), latent.query_rank)
    self.latent_down = make.random((c.embed_dim, latent.rank + latent.rotary_dim), ('embed', 'latent'), c.embed_dim)
    self.latent_norm = RMSNorm(latent.rank, 'latent', INNER_EPS, make)
    self.latent_up = make.random(
        (latent.rank, c.num_heads, latent.plain_dim + latent.value_dim), ('latent', 'heads', 'head_dim'), latent.rank)
    self.out = make.random(
        (c.num_heads, latent.value_dim, c.embed_dim), ('heads', 'head_dim', 'embed'), residual(c, c.num_heads * latent.value_dim))
    if latent.index_top_k and layer not in latent.shared_index_layers:
      self.indexer = Indexer(config, make)

  def __call__(
      self, x: jax.Array, rope: rope_lib.Rope, attend: Attend, state: Any, shard: Shard, selected: jax.Array | None
  ) -> tuple[jax.Array, Any, jax.Array | None]:
    """Output [B, T, D], new state, and which keys each query saw (None: all), for the layers that share it."""
    c, latent, dtype = self.config, self.config.latent, x.dtype
    query = self.query_down_norm(x @ self.query_down[...].astype(dtype))
    q = jnp.einsum('btr,rhk->bthk', query, self.query_up[...].astype(dtype))
    q_plain, q_turned = q[..., :latent.plain_dim], rope_lib.rotate(q[..., latent.plain_dim:], rope, interleaved=True)
    down = x @ self.latent_down[...].astype(dtype)
    value = self.latent_norm(down[..., :latent.rank])[:, :, None]
    k_turned = rope_lib.rotate(down[..., latent.rank:][:, :, None], rope, interleaved=True)
    up = self.latent_up[...].astype(dtype)
    q = jnp.concatenate([jnp.einsum('bthk,rhk->bthr', q_plain, up[..., :latent.plain_dim]), q_turned], axis=-1)
    # `attend` divides by the root of the size it sees; the scale that is meant is that of the expanded heads.
    scale = (q.shape[-1] / (latent.plain_dim + latent.rotary_dim))**0.5 * rope_lib.score_factor(c.rope)
    q = shard(q * jnp.asarray(scale, dtype), ('batch', 'length', 'heads', 'head_dim'))
    k, v = (shard(y, ('batch', 'length', 'kv_heads', 'head_dim')) for y in (jnp.concatenate([value, k_turned], axis=-1), value))
    if latent.index_top_k:
      index = self.indexer(x, query, rope) if hasattr(self, 'indexer') else Index(top_k=latent.index_top_k, selected=selected)
      out, state, selected = attend(q, k, v, state, index)
    else:
      out, state = attend(q, k, v, state)
    out = jnp.einsum('bthr,rhv->bthv', out, up[..., latent.plain_dim:])
    return jnp.einsum('bthv,hvd->btd', out, self.out[...].astype(dtype)), state, selected
