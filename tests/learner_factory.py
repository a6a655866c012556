"""A tiny learner for tests, and batches for it."""

import dataclasses
import functools

import jax
import numpy as np

from sao_jax import config as config_lib, sharding
from sao_jax.config import AlgorithmConfig, LearnerConfig, ModelConfig, OptimizerConfig, SamplerConfig, SftConfig
from sao_jax.learner import Learner
from sao_jax.models import transformer
from sao_jax.types import Batch

ROWS, LENGTH, VOCAB = 8, 12, 64
MODEL = ModelConfig(
    vocab_size=VOCAB, embed_dim=16, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=32, qk_norm=True)
# A large epsilon makes a step nearly proportional to its gradient, so that comparing parameters compares gradients.
POLICY = OptimizerConfig(learning_rate=0.1, epsilon=1.0, max_grad_norm=1e9)
VALUE = OptimizerConfig(learning_rate=0.2, epsilon=1.0, max_grad_norm=1e9)


def make_config(*, model=None, algorithm=None, temperature=1.0, **learner) -> config_lib.Config:
  defaults = dict(
      batch_size=ROWS, lengths=(LENGTH,), logits_chunk=16, policy=POLICY, value=VALUE, mesh=(1, -1, 1, 1, 1))
  defaults |= learner
  return config_lib.Config(
      model=dataclasses.replace(MODEL, **(model or {})), algorithm=AlgorithmConfig(**(algorithm or {})),
      sampler=SamplerConfig(temperature=temperature), learner=LearnerConfig(**defaults),
      sft=SftConfig(steps=1, batch_size=ROWS, optimizer=POLICY),
      value_pretrain=config_lib.ValuePretrainConfig(freeze='attention_and_embeddings', optimizer=VALUE))


LEARNERS: dict[str, Learner] = {}  # A learner has no state of its own but its compiled programs.


def make_learner(devices=1, **settings) -> Learner:
  key = repr((devices, sorted(settings.items())))
  if key not in LEARNERS:
    config = make_config(**settings)
    LEARNERS[key] = Learner(config, sharding.make_mesh(jax.devices()[:devices], config.learner.mesh))
  return LEARNERS[key]


@functools.cache
def start_params(tie_embeddings=True):
  """Policy and value parameters on the host, with a value head and norms that are not at their start."""
  model = dataclasses.replace(MODEL, tie_embeddings=tie_embeddings)
  rng = np.random.default_rng(0)
  trees = []
  for kind in (transformer.Policy, transformer.ValueModel):
    _, shapes, _ = transformer.abstract(kind, model)
    trees.append({p: (rng.normal(size=s.shape) * 0.3 + (p.endswith('scale'))).astype(np.float32) for p, s in shapes.items()})
  return tuple(trees)


def start(learner: Learner, stage='rl'):
  """A state at the begin of `stage`, always the same numbers."""
  policy, value = start_params(learner.config.model.tie_embeddings)
  state = learner.init_state(jax.device_put(policy), None if stage == 'sft' else jax.device_put(value))
  return learner.begin_stage(state, stage)


def make_batch(seed=0, rows=ROWS, length=LENGTH, *, all_truncated=False, none_truncated=False) -> Batch:
  """Rows of different lengths with prompt, actions and observations; the last row is empty."""
  rng = np.random.default_rng(seed)
  sizes = rng.integers(4, length + 1, rows)
  sizes[-1] = 0
  place = np.arange(length)[None]
  token_mask = place < sizes[:, None]
  action_mask = token_mask & (place >= 2) & (rng.random((rows, length)) < 0.7)
  truncated = np.ones(rows, bool) if all_truncated else np.zeros(rows, bool) if none_truncated else np.arange(rows) % 3 == 0
  behaviour = np.where(action_mask, -4.0 + 0.8 * rng.normal(size=token_mask.shape), 0.0)
  return Batch(
      tokens=rng.integers(0, VOCAB, token_mask.shape).astype(np.int32), token_mask=token_mask, action_mask=action_mask,
      behaviour_log_prob=behaviour.astype(np.float32),
      reward=np.where(action_mask, rng.normal(size=token_mask.shape), 0.0).astype(np.float32),
      policy_version=np.where(action_mask, rng.integers(0, 3, token_mask.shape), -1).astype(np.int32), truncated=truncated,
      turn=np.zeros(token_mask.shape, np.int32))


def host(tree):
  return jax.device_get(tree)
