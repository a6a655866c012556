"""Tiny samplers for tests, and the full forward pass that they are held to."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from sao_jax.config import ModelConfig, SamplerConfig
from sao_jax.models import transformer
from sao_jax.sampler import Sampler
from sao_jax.sessions import Completion
from sao_jax.types import ParamSnapshot, Params

MODEL = ModelConfig(
    vocab_size=67, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=64, qk_norm=True, max_length=96)
SETTINGS = SamplerConfig(
    slots=4, sessions=16, page_size=4, chunk_steps=4, prefill_lengths=(16,), prefill_rows=(4,), cache_lengths=(96,))


@functools.lru_cache(maxsize=None)
def _init(model: ModelConfig):
  return jax.jit(lambda key: transformer.init(transformer.Policy, model, key))


@functools.lru_cache(maxsize=None)
def make_params(model: ModelConfig = MODEL, seed: int = 0, scale: float = 4.0) -> Params:
  """Random parameters whose logits are spread by `scale`, so that distributions are far from uniform."""
  params = _init(model)(jax.random.key(seed))
  return {**params, 'trunk.final_norm.scale': params['trunk.final_norm.scale'] * scale}


def make_sampler(
    model: ModelConfig = MODEL, *, version: int = 0, param_seed: int = 0, seed: int = 7, tokenizer=None, mesh=None, greedy=False,
    params: Params | None = None, max_length: int = 0, **settings
) -> Sampler:
  config = dataclasses.replace(SETTINGS, **settings)
  params = make_params(model, param_seed) if params is None else params
  return Sampler(
      model, config, ParamSnapshot(version, params), tokenizer=tokenizer, seed=seed, mesh=mesh, greedy=greedy, max_length=max_length)


@functools.lru_cache(maxsize=None)
def _forward(model: ModelConfig):
  def forward(params, tokens, temperature):
    policy = transformer.merge(transformer.Policy, model, params)
    positions = jnp.arange(tokens.shape[1])[None]
    hidden, _ = policy.hidden(tokens, positions, transformer.causal_attention)
    return jax.nn.log_softmax(policy.logits(hidden) / temperature, axis=-1)[0]

  return jax.jit(forward)


def full_log_probs(tokens, *, model: ModelConfig = MODEL, param_seed: int = 0, temperature: float = 1.0, params=None) -> np.ndarray:
  """f32[n]: log-probability of tokens[t] given tokens[:t] by one full forward pass; 0 at t = 0."""
  tokens = np.asarray(tokens, np.int32)
  padded = np.zeros((1, model.max_length), np.int32)
  padded[0, : len(tokens)] = tokens
  table = np.asarray(_forward(model)(make_params(model, param_seed) if params is None else params, padded, temperature))
  return np.concatenate([[0.0], table[np.arange(len(tokens) - 1), tokens[1:]]]).astype(np.float32)


def make_prompts(count: int, low: int = 1, high: int = 40, seed: int = 0, vocab: int = MODEL.vocab_size) -> list[list[int]]:
  rng = np.random.default_rng(seed)
  return [rng.integers(0, vocab, rng.integers(low, high + 1)).tolist() for _ in range(count)]


def run(sampler: Sampler, limit: int = 500) -> dict[int, Completion]:
  """Steps until nothing is left to do."""
  done = {}
  for _ in range(limit):
    if not sampler.busy:
      return done
    done.update({c.session: c for c in sampler.step()})
  raise AssertionError(f'Still busy after {limit} steps.')


def same(a: Completion, b: Completion, tolerance: float = 1e-5) -> bool:
  return (
      np.array_equal(a.tokens, b.tokens) and a.stop_reason == b.stop_reason and np.array_equal(a.versions, b.versions)
      and float(np.max(np.abs(a.log_probs - b.log_probs))) <= tolerance)
