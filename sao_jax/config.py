"""Settings: frozen dataclasses, built and checked once at the border. Every default of the project stands in this file.

`from_dict` turns a nested mapping (an `ml_collections.ConfigDict.to_dict()`) into a `Config`, refusing unknown names and wrong types.
Checks that need no device are in `config_checks.py`; checks against a mesh are in `sharding.py`.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Any, Mapping

from sao_jax import config_checks
from sao_jax.config_checks import lookup


class Refused(ValueError):
  """A workdir is another run's, or another process's; nothing is written to it."""


@dataclasses.dataclass(frozen=True)
class RopeConfig:
  """How the rotary angles of positions are scaled, beside `model.rope_theta`."""

  kind: str = 'default'  # 'default' | 'linear' | 'llama3' | 'yarn'.
  fraction: float = 1.0  # Share of each head that is rotated, its first dimensions.
  factor: float = 1.0  # Positions are stretched by it; nothing reads it for 'default'.
  original_length: int = 0  # Longest position before the stretching ('llama3', 'yarn').
  low_frequency: float = 1.0  # 'llama3': waves longer than original_length / low_frequency are stretched,
  high_frequency: float = 4.0  # those shorter than original_length / high_frequency are not.
  beta_fast: float = 32.0  # 'yarn': turns within original_length from which on a dimension is not stretched,
  beta_slow: float = 1.0  # and up to which it is stretched in full.
  attention_factor: float = 0.0  # 'yarn': cosine and sine are multiplied by it; 0: from factor, mscale and mscale_all_dim.
  mscale: float = 0.0
  mscale_all_dim: float = 0.0
  truncate: bool = True  # 'yarn': round the borders between dimensions outwards.


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
  """Mixture of experts in place of the feed-forward; `count` 0 for none."""

  count: int = 0
  top_k: int = 1  # Experts of each token.
  mlp_dim: int = 0  # Feed-forward width of one expert.
  shared: int = 0  # Experts that every token passes, joined into one of `shared * mlp_dim`.
  router: str = 'softmax'  # 'softmax' over all experts, or 'sigmoid' of each, chosen with a correction bias.
  normalise: bool = True  # The weights of a token's experts are divided by their sum.
  scale: float = 1.0  # The weights are multiplied by it.
  groups: int = 1  # Experts come in groups; each token picks from
  top_groups: int = 1  # so many of them.
  dense_layers: tuple[int, ...] = ()  # Layers that keep a plain feed-forward of `model.mlp_dim`.


@dataclasses.dataclass(frozen=True)
class LatentConfig:
  """Multi-head latent attention in place of grouped-query attention, and its sparse index; `rank` 0 for none.

  `model.head_dim` is then `plain_dim + rotary_dim`, and `model.num_kv_heads` is `model.num_heads`.
  """

  rank: int = 0  # Of the latent from which keys and values are made.
  query_rank: int = 0
  plain_dim: int = 0  # Part of a query/key head without position.
  rotary_dim: int = 0  # Part that is rotated; its key is shared by all heads.
  value_dim: int = 0
  index_top_k: int = 0  # Keys that a query sees, chosen by the index; 0: all, no index.
  index_heads: int = 0
  index_dim: int = 0
  shared_index_layers: tuple[int, ...] = ()  # Layers that take the choice of the layer before.


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Shape of the decoder-only transformer; the value model has the same trunk."""

  vocab_size: int = 259
  embed_dim: int = 128
  num_layers: int = 3
  num_heads: int = 4
  num_kv_heads: int = 2
  head_dim: int = 32
  mlp_dim: int = 384
  rope_theta: float = 10_000.0
  rope: RopeConfig = RopeConfig()
  experts: ExpertsConfig = ExpertsConfig()
  latent: LatentConfig = LatentConfig()
  norm_eps: float = 1e-6
  qk_norm: bool = False  # RMS norm on queries and keys (Qwen3).
  qkv_bias: bool = False  # Bias on the query, key and value projections (Qwen2.5).
  tie_embeddings: bool = True
  max_length: int = 512  # Longest position the model was made for.
  scan_layers: bool = False  # True: parameters stacked over layers and scanned (compile time); False: unrolled (CPU decode).
  remat: bool = False  # Recompute each block in the backward pass.
  compute_dtype: str = 'float32'
  param_dtype: str = 'float32'
  attention: str = 'dense'  # 'dense' scores, or 'blockwise' (memory linear in length).
  attention_block: int = 256  # Positions in a block of blockwise attention.
  pretrained: str = ''  # '' for random weights; 'smollm2-135m-instruct', a .gguf file or a Hugging Face folder: its shape is then taken.
  tokenizer: str = 'byte'  # 'byte', or 'pretrained'.


@dataclasses.dataclass(frozen=True)
class TaskConfig:
  """The environment and its prompts."""

  name: str = 'calculator'
  settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # Passed to `environments.make(name, **settings)`.
  max_turns: int = 8
  max_turn_tokens: int = 32  # Tokens sampled in one turn.
  max_tokens: int = 128  # Length of a whole rollout, prompt included; of each segment, where it has several.
  max_segments: int = 1  # A history that the template or a compaction rewrites begins a segment, a learner row; beyond, the rollout is cut.
  compact_room: int = 0  # Ask the environment to make room when fewer tokens than this are left after an observation; 0: never.
  template: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # Variables of the chat template, e.g. {'enable_thinking': False}.
  time_limit_s: float = 600.0  # Of one rollout, on the run clock.
  step_timeout_s: float = 60.0  # Of one reset or step call.
  retries: int = 1  # Attempts after a failure of the environment itself.
  max_failure_share: float = 0.5  # Stop the run when more than this share of the last 100 rollouts died of infrastructure.
  workers: int = 8  # Threads that run environment calls.


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """How RL draws from tasks that have an end (rows of files); an environment that makes tasks without end takes the defaults alone."""

  epochs: int = 0  # How often a prompt may come; the RL stage ends when the prompts do. 0: no end.
  shuffle: bool = True  # Every epoch in an order of its own; False: in the order of the rows.
  skip_solved: int = 0  # Pass over a prompt whose last so many rollouts all solved it; 0: never.


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
  """Continuous batching over a paged cache."""

  slots: int = 64  # Rows that decode at once.
  sessions: int = 128  # Rollouts in flight: decoding, waiting for a slot, or waiting for their environment.
  page_size: int = 16  # Tokens of one cache page.
  pages: int = 0  # Pages of the cache; 0: enough for `sessions` rollouts of `task.max_tokens`.
  chunk_steps: int = 8  # Decode steps of one jitted call.
  prefill_lengths: tuple[int, ...] = (16, 64)  # Buckets of new tokens; longer prompts go in several chunks of the last one.
  prefill_rows: tuple[int, ...] = (8, 64)  # Buckets of rows in one prefill call.
  prefill_chunks: int = 4  # Prefill calls in a row for a long prompt, before the others decode their next chunk.
  cache_lengths: tuple[int, ...] = ()  # Buckets of cached length seen by attention; () for 4, 8, 16, ... pages up to the longest.
  temperature: float = 1.0
  top_p: float = 1.0
  top_k: int = 0  # 0: off.
  on_update: str = 'keep_cache'  # 'keep_cache' | 'recompute_cache' | 'finish_first'.
  dtype: str = 'float32'  # Of the sampler's parameters and cache.
  devices: tuple[int, ...] = ()  # Indices into jax.devices(); () for all (colocated with the learner).
  mesh: tuple[int, ...] = (1, -1, 1, 1, 1)  # Sizes of data, fsdp, expert, sequence, tensor; one may be -1.


@dataclasses.dataclass(frozen=True)
class AlgorithmConfig:
  """The update: an advantage estimator times a policy objective (spec: SAO, arXiv:2607.07508)."""

  advantage: str = 'skip_observation_gae'  # A name in `algorithms.ADVANTAGES`.
  objective: str = 'dis'  # A name in `algorithms.OBJECTIVES`.
  epsilon_low: float = 0.3
  epsilon_high: float = 5.0
  gamma: float = 1.0
  lambda_alpha: float = 1.5  # lambda = 1 - 1 / (alpha * l).
  gae_lambda: float = -1.0  # Fixed lambda of the policy's advantages; -1: length-adaptive.
  denominator: str = 'action_tokens'  # 'action_tokens' | 'kept_tokens' | 'trajectory'.
  truncation: str = 'bootstrap'  # 'bootstrap' | 'zero' | 'drop'.
  advantage_values: str = 'after_update'  # 'after_update' | 'before_update'.


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """AdamW with a schedule and gradient clipping by global norm."""

  learning_rate: float = 1e-6
  beta1: float = 0.9
  beta2: float = 0.95
  epsilon: float = 1e-8
  weight_decay: float = 0.0
  max_grad_norm: float = 1.0
  schedule: str = 'constant'  # 'constant' | 'linear' | 'cosine'.
  warmup_steps: int = 0
  decay_steps: int = 0  # Steps of the whole schedule; needed by 'linear' and 'cosine'.
  end_fraction: float = 0.0  # Rate at the end of the schedule over the peak rate.


@dataclasses.dataclass(frozen=True)
class LearnerConfig:
  """The update step: batch, value steps, both optimizers, mesh."""

  batch_size: int = 64  # Rollouts per policy step.
  micro_batches: int = 1
  lengths: tuple[int, ...] = (128,)  # Buckets of padded length.
  value_steps: int = 2  # K optimizer steps of the value model for one of the policy.
  value_warmup_steps: int = 10  # First RL steps in which only the value model learns.
  value_freeze: str = 'attention_and_embeddings'  # 'attention_and_embeddings' | 'nothing'.
  logits_chunk: int = 0  # Positions whose logits exist at once; 0: as many as fit 64 MB, between 128 and 1024.
  freeze_router: bool = False  # The routers of experts learn in no stage and in neither model.
  balance_coefficient: float = 0.0  # Of the load-balancing loss of the policy's experts (never of the value model's); 0: no such loss.
  policy: OptimizerConfig = OptimizerConfig()
  value: OptimizerConfig = OptimizerConfig(learning_rate=5e-6)
  devices: tuple[int, ...] = ()
  mesh: tuple[int, ...] = (1, -1, 1, 1, 1)


@dataclasses.dataclass(frozen=True)
class QueueConfig:
  """The bounded queue between rollouts and learner."""

  capacity: int = 256  # Finished rollouts held; a full queue pauses new starts.
  max_staleness: int = 2  # Versions between the oldest action token of a rollout and the step that trains it.
  overdue: str = 'wait'  # 'wait' | 'drop' | 'use'.


@dataclasses.dataclass(frozen=True)
class ClockConfig:
  """'wall': real threads. 'virtual': one thread, durations in virtual seconds from seeded lognormal distributions."""

  kind: str = 'wall'
  chunk_s: float = 0.1  # Median duration of one decode chunk.
  update_s: float = 1.0  # Of one learner update.
  environment_s: float = 0.2  # Of one environment call.
  publish_s: float = 0.02
  sigma: float = 0.5  # Of the lognormal of environment calls; the others use a tenth of it.


@dataclasses.dataclass(frozen=True)
class SftConfig:
  """Supervised warm start on demonstrations of the environment."""

  steps: int = 0  # 0: no such stage.
  batch_size: int = 64
  demonstrations: int = 2048  # Size of the demonstration set.
  optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-3)


@dataclasses.dataclass(frozen=True)
class ValuePretrainConfig:
  """Fits the value model on rollouts recorded from the warm-started policy."""

  rollouts: int = 0  # 0: no such stage.
  epochs: int = 2
  freeze: str = 'nothing'  # As `learner.value_freeze`, in this stage: the method freezes attention during RL alone.
  optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-3)


@dataclasses.dataclass(frozen=True)
class RlConfig:
  """The asynchronous stage."""

  policy_steps: int = 100  # Policy steps, after the value-only warm-up steps; 0: no such stage, and no warm-up steps either.


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
  """Held-out success, before, during and after training."""

  prompts: int = 256  # Held-out prompts; 0: no evaluation before and after.
  every: int = 0  # Policy steps between evaluations during RL; 0: only before and after.
  during_prompts: int = 128
  seed: int = 1_000_003  # Of the held-out prompts; never those of training.


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """When checkpoints are taken, and how many stay."""

  every: int = 20  # Learner steps between checkpoints.
  keep: int = 2


@dataclasses.dataclass(frozen=True)
class LoggingConfig:
  """What a run writes and shows."""

  every: int = 1  # Learner steps between metric rows.
  tensorboard: bool = True
  sample_rollouts: int = 4  # Readable trajectories written at each evaluation.
  progress: bool = True


@dataclasses.dataclass(frozen=True)
class Config:
  """All settings of a run."""

  seed: int = 0
  model: ModelConfig = ModelConfig()
  task: TaskConfig = TaskConfig()
  data: DataConfig = DataConfig()
  sampler: SamplerConfig = SamplerConfig()
  algorithm: AlgorithmConfig = AlgorithmConfig()
  learner: LearnerConfig = LearnerConfig()
  queue: QueueConfig = QueueConfig()
  clock: ClockConfig = ClockConfig()
  sft: SftConfig = SftConfig()
  value_pretrain: ValuePretrainConfig = ValuePretrainConfig()
  rl: RlConfig = RlConfig()
  evaluation: EvaluationConfig = EvaluationConfig()
  checkpoint: CheckpointConfig = CheckpointConfig()
  logging: LoggingConfig = LoggingConfig()


CHOICES = {
    'model.attention': ('dense', 'blockwise'),
    'model.compute_dtype': ('float32', 'bfloat16'),
    'model.param_dtype': ('float32', 'bfloat16'),
    'model.rope.kind': ('default', 'linear', 'llama3', 'yarn'),
    'model.experts.router': ('softmax', 'sigmoid'),
    'model.tokenizer': ('byte', 'pretrained'),
    'sampler.dtype': ('float32', 'bfloat16'),
    'sampler.on_update': ('keep_cache', 'recompute_cache', 'finish_first'),
    'algorithm.denominator': ('action_tokens', 'kept_tokens', 'trajectory'),
    'algorithm.truncation': ('bootstrap', 'zero', 'drop'),
    'algorithm.advantage_values': ('after_update', 'before_update'),
    'learner.value_freeze': ('attention_and_embeddings', 'nothing'),
    'value_pretrain.freeze': ('attention_and_embeddings', 'nothing'),
    'queue.overdue': ('wait', 'drop', 'use'),
    'clock.kind': ('wall', 'virtual'),
}


def default_dict() -> dict[str, Any]:
  """The default settings as a nested dictionary, the start of every `configs/*.py`."""
  return to_dict(Config())


def to_dict(config: Any) -> dict[str, Any]:
  """Nested plain dictionary of a settings dataclass; `from_dict` is its inverse."""
  return dataclasses.asdict(config)


def from_dict(values: Mapping[str, Any]) -> Config:
  """Builds and checks a `Config`. Raises ValueError with the dotted name of what is unknown, of a wrong type, or out of range."""
  config = _build(Config, values, '')
  check(config)
  return config


def _build(cls: type, values: Mapping[str, Any], path: str) -> Any:
  hints = typing.get_type_hints(cls)
  unknown = sorted(set(values) - set(hints))
  if unknown:
    raise ValueError(f'Unknown setting {path}{unknown[0]}; known here: {", ".join(sorted(hints))}.')
  return cls(**{name: _coerce(hints[name], value, path + name) for name, value in values.items()})


def _coerce(hint: Any, value: Any, path: str) -> Any:
  if dataclasses.is_dataclass(hint):
    if not isinstance(value, Mapping):
      raise ValueError(f'{path} must be a section of settings, got {value!r}.')
    return _build(hint, value, path + '.')
  if typing.get_origin(hint) is tuple:
    if not isinstance(value, (tuple, list)) or not all(_is_int(v) for v in value):
      raise ValueError(f'{path} must be a tuple of integers, got {value!r}.')
    return tuple(int(v) for v in value)
  if hint is float and (_is_int(value) or isinstance(value, float)):
    return float(value)
  if hint is int and _is_int(value):
    return int(value)
  if hint in (bool, str) and isinstance(value, hint):
    return value
  if typing.get_origin(hint) is not None and isinstance(value, Mapping):
    return dict(value)
  raise ValueError(f'{path} must be of type {getattr(hint, "__name__", hint)}, got {value!r} ({type(value).__name__}).')


def _is_int(value: Any) -> bool:
  return isinstance(value, int) and not isinstance(value, bool)


def check(config: Config) -> None:
  """Raises ValueError on the first setting that cannot work, before anything compiles."""
  for path, choices in CHOICES.items():
    if lookup(config, path) not in choices:
      raise ValueError(f'{path} must be one of {", ".join(choices)}, got {lookup(config, path)!r}.')
  config_checks.check_all(config)


def differences(before: Mapping[str, Any], after: Mapping[str, Any], path: str = '') -> list[str]:
  """Settings in which two nested dictionaries differ, each as 'dotted.name: old -> new', in their order; empty where they are equal.

  Tuples and lists of the same values are equal, so that a dictionary that went through JSON can be compared.
  """
  found = []
  for name in [*before, *(n for n in after if n not in before)]:
    a, b = before.get(name), after.get(name)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
      found += differences(a, b, f'{path}{name}.')
    elif _plain(a) != _plain(b):
      found.append(f'{path}{name}: {a!r} -> {b!r}')
  return found


def differences_from_stored(stored: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
  """`differences` between what a run wrote and the settings `after` of one that would go on with it.

  A setting that is not in `stored` came to be in a later version. Its default value computes what that run computed, so where it has its
  default now, nothing differs. One that is only in `stored` is a difference: what it did is not done any more.
  """
  return differences(_filled(stored, default_dict()), after)


def _filled(stored: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
  """`stored` with the settings that it lacks, section by section."""
  found = dict(stored)
  for name, default in defaults.items():
    if name not in found:
      found[name] = default
    elif isinstance(default, Mapping) and isinstance(found[name], Mapping):
      found[name] = _filled(found[name], default)
  return found


def _plain(value: Any) -> Any:
  """`value` with tuples as lists, which is how JSON gives them back."""
  if isinstance(value, Mapping):
    return {k: _plain(v) for k, v in value.items()}
  return [_plain(v) for v in value] if isinstance(value, (tuple, list)) else value
