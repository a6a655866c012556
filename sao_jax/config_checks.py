"""Range checks of the settings that need neither a device nor a file: each raises ValueError before anything compiles.

Every message says what was required, what came, and what to do. Checks against a mesh are in `sharding.py`; names that live in a
registry (environments, advantages, objectives) are checked where the registry is.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from typing import Any

if typing.TYPE_CHECKING:
  from sao_jax.config import Config, ModelConfig

BYTE_VOCABULARY = 259  # 256 bytes, padding, start and end of turn: what `model.tokenizer='byte'` needs.
OPTIMIZERS = ('learner.policy', 'learner.value', 'sft.optimizer', 'value_pretrain.optimizer')
INF = math.inf


@dataclasses.dataclass(frozen=True)
class Interval:
  """Numbers from `low` to `high`, the ends included unless marked open."""

  low: float
  high: float = INF
  low_open: bool = False
  high_open: bool = False

  def __contains__(self, value: float) -> bool:
    above = value > self.low if self.low_open else value >= self.low
    below = value < self.high if self.high_open else value <= self.high
    return above and below  # False for NaN.

  def __str__(self) -> str:
    if self.high == INF:
      return f'{"above" if self.low_open else "at least"} {self.low:g}'
    return f'in {"(" if self.low_open else "["}{self.low:g}, {self.high:g}{")" if self.high_open else "]"}'


ANY_SIZE = Interval(0)
SIZE = Interval(1)
POSITIVE = Interval(0, low_open=True)
SHARE = Interval(0, 1)
BELOW_ONE = Interval(0, 1, high_open=True)
SEED = Interval(0, 2**32 - 1)

RANGES: dict[str, Interval] = {
    'seed': SEED,
    **{f'model.{name}': SIZE for name in (
        'vocab_size', 'embed_dim', 'num_layers', 'num_heads', 'num_kv_heads', 'head_dim', 'mlp_dim',
        'attention_block')},
    'model.max_length': Interval(2),
    'model.rope_theta': POSITIVE,
    'model.norm_eps': POSITIVE,
    'model.rope.fraction': Interval(0, 1, low_open=True),
    'model.rope.factor': Interval(1),
    **{f'model.rope.{name}': POSITIVE for name in ('low_frequency', 'high_frequency', 'beta_fast', 'beta_slow')},
    **{f'model.rope.{name}': ANY_SIZE for name in ('original_length', 'attention_factor', 'mscale', 'mscale_all_dim')},
    **{f'model.experts.{name}': ANY_SIZE for name in ('count', 'mlp_dim', 'shared')},
    **{f'model.experts.{name}': SIZE for name in ('top_k', 'groups', 'top_groups')},
    'model.experts.scale': POSITIVE,
    **{f'model.latent.{name}': ANY_SIZE for name in (
        'rank', 'query_rank', 'plain_dim', 'rotary_dim', 'value_dim', 'index_top_k', 'index_heads', 'index_dim')},
    'task.max_turns': SIZE,
    'task.max_turn_tokens': SIZE,
    'task.max_tokens': Interval(2),
    'task.time_limit_s': POSITIVE,
    'task.step_timeout_s': POSITIVE,
    'task.retries': ANY_SIZE,
    'task.max_failure_share': Interval(0, 1, low_open=True),
    'task.workers': SIZE,
    'task.max_segments': Interval(1, 1024),
    'task.compact_room': ANY_SIZE,
    'data.epochs': ANY_SIZE,
    'data.skip_solved': ANY_SIZE,
    'sampler.slots': SIZE,
    'sampler.page_size': SIZE,
    'sampler.pages': ANY_SIZE,
    'sampler.chunk_steps': SIZE,
    'sampler.prefill_chunks': SIZE,
    'sampler.top_p': Interval(0, 1, low_open=True),
    'sampler.top_k': ANY_SIZE,
    'algorithm.epsilon_low': Interval(0, 1, low_open=True),
    'algorithm.epsilon_high': POSITIVE,
    'algorithm.gamma': SHARE,
    'algorithm.lambda_alpha': POSITIVE,
    'learner.batch_size': SIZE,
    'learner.micro_batches': SIZE,
    'learner.value_steps': ANY_SIZE,
    'learner.value_warmup_steps': ANY_SIZE,
    'learner.logits_chunk': ANY_SIZE,
    'learner.balance_coefficient': ANY_SIZE,
    'queue.max_staleness': ANY_SIZE,
    **{f'clock.{name}': POSITIVE for name in ('chunk_s', 'update_s')},
    **{f'clock.{name}': ANY_SIZE for name in ('environment_s', 'publish_s', 'sigma')},
    'sft.steps': ANY_SIZE,
    'sft.batch_size': SIZE,
    'sft.demonstrations': SIZE,
    'value_pretrain.rollouts': ANY_SIZE,
    'value_pretrain.epochs': SIZE,
    'rl.policy_steps': ANY_SIZE,
    'evaluation.prompts': ANY_SIZE,
    'evaluation.every': ANY_SIZE,
    'evaluation.during_prompts': SIZE,
    'evaluation.seed': SEED,
    'checkpoint.every': SIZE,
    'checkpoint.keep': SIZE,
    'logging.every': SIZE,
    'logging.sample_rollouts': ANY_SIZE,
    **{f'{path}.{name}': interval for path in OPTIMIZERS for name, interval in {
        'learning_rate': ANY_SIZE, 'beta1': BELOW_ONE, 'beta2': BELOW_ONE, 'epsilon': POSITIVE, 'weight_decay': ANY_SIZE,
        'max_grad_norm': POSITIVE, 'warmup_steps': ANY_SIZE, 'decay_steps': ANY_SIZE, 'end_fraction': SHARE}.items()},
}

# The largest sizes that make sense on any machine, a model of 10^12 parameters on a pod included; what this machine holds is judged in
# `memory.py`. Durations and counts beyond these overflow or never end.
MAX_LENGTH = 2**24  # Tokens of a rollout, and of every bucket.
MAX_ROWS = 2**20  # Rows of a batch, slots, rollouts in flight.
MAX_COUNT = 2**24  # Episodes held in the host's memory.
MAX_STEPS = 10**12
LIMITS: dict[str, float] = {
    'model.vocab_size': 2**22, 'model.embed_dim': 2**18, 'model.num_layers': 2**12, 'model.num_heads': 2**14, 'model.num_kv_heads': 2**14,
    'model.head_dim': 2**14, 'model.mlp_dim': 2**22, 'model.attention_block': MAX_LENGTH, 'model.max_length': 2**30,
    'model.rope.original_length': 2**30, 'model.experts.count': 2**16, 'model.experts.top_k': 2**16, 'model.experts.mlp_dim': 2**22,
    'model.experts.shared': 2**10, 'model.experts.groups': 2**16, 'model.experts.top_groups': 2**16,
    **{f'model.latent.{name}': 2**18 for name in (
        'rank', 'query_rank', 'plain_dim', 'rotary_dim', 'value_dim', 'index_heads', 'index_dim')},
    'model.latent.index_top_k': MAX_LENGTH,
    **{f'task.{name}': MAX_LENGTH for name in ('max_turns', 'max_turn_tokens', 'max_tokens', 'compact_room')},
    'task.time_limit_s': 1e9, 'task.step_timeout_s': 1e9, 'task.retries': 1000, 'task.workers': 2**14,
    'data.epochs': MAX_STEPS, 'data.skip_solved': MAX_COUNT,
    'sampler.slots': MAX_ROWS, 'sampler.sessions': MAX_ROWS, 'sampler.page_size': 2**20, 'sampler.pages': 2**31 - 1,
    'sampler.chunk_steps': 2**16, 'sampler.prefill_chunks': MAX_LENGTH, 'sampler.top_k': 2**22,
    'learner.batch_size': MAX_ROWS, 'learner.micro_batches': MAX_ROWS, 'learner.value_steps': 10_000,
    'learner.value_warmup_steps': MAX_STEPS, 'learner.logits_chunk': MAX_LENGTH,
    'queue.capacity': MAX_COUNT, 'queue.max_staleness': 10**6,
    **{f'clock.{name}': 1e9 for name in ('chunk_s', 'update_s', 'environment_s', 'publish_s')}, 'clock.sigma': 10.0,
    'sft.steps': MAX_STEPS, 'sft.batch_size': MAX_ROWS, 'sft.demonstrations': MAX_COUNT,
    'value_pretrain.rollouts': MAX_COUNT, 'value_pretrain.epochs': 10**6, 'rl.policy_steps': MAX_STEPS,
    **{f'evaluation.{name}': MAX_COUNT for name in ('prompts', 'during_prompts')}, 'evaluation.every': MAX_STEPS,
    'checkpoint.every': MAX_STEPS, 'checkpoint.keep': 10**6, 'logging.every': MAX_STEPS, 'logging.sample_rollouts': MAX_COUNT,
    **{f'{path}.{name}': MAX_STEPS for path in OPTIMIZERS for name in ('warmup_steps', 'decay_steps')},
}


def check_all(config: Config) -> None:
  """Raises ValueError on the first setting, or pair of settings, that cannot work."""
  check_ranges(config)
  check_model(config)
  check_lengths(config)
  check_sampler(config)
  check_behaviour_distribution(config)
  check_learner(config)
  check_compaction(config)
  check_optimizers(config)
  check_devices(config)


def lookup(config: Any, path: str) -> Any:
  """Value at a dotted path."""
  for name in path.split('.'):
    config = getattr(config, name)
  return config


def check_ranges(config: Config) -> None:
  """Single numbers: finite and in their interval."""
  _check_numbers(config, '')
  gae_lambda = config.algorithm.gae_lambda
  if gae_lambda != -1.0 and gae_lambda not in SHARE:
    raise ValueError(f'algorithm.gae_lambda must be {SHARE}, or -1 for the length-adaptive lambda, got {gae_lambda}.')


def _check_numbers(section: Any, prefix: str) -> None:
  """The numbers of a section of settings, whose path is `prefix`."""
  for path, value in _numbers(section, prefix):
    if isinstance(value, float) and not math.isfinite(value):
      raise ValueError(f'{path} must be a finite number, got {value}.')
  for path, interval in RANGES.items():
    if path.startswith(prefix) and (value := lookup(section, path.removeprefix(prefix))) not in interval:
      raise ValueError(f'{path} must be {interval}, got {value}.')
  for path, limit in LIMITS.items():
    if path.startswith(prefix) and (value := lookup(section, path.removeprefix(prefix))) > limit:
      raise ValueError(f'{path} must be at most {limit:,}, more than any machine can use: got {value:,}; lower it.')


def _numbers(section: Any, prefix: str):
  for field in dataclasses.fields(section):
    value = getattr(section, field.name)
    if dataclasses.is_dataclass(value):
      yield from _numbers(value, f'{prefix}{field.name}.')
    elif isinstance(value, (int, float)):
      yield prefix + field.name, value


def check_model(config: Config) -> None:
  """Shape of the transformer. With `model.pretrained` the file's own shape replaces these numbers, and is judged when it is read."""
  model = config.model
  if model.pretrained:
    return
  if model.tokenizer == 'pretrained':
    raise ValueError(
        "model.tokenizer='pretrained' takes the tokenizer of the file that model.pretrained names, which is empty; use 'byte'.")
  if model.head_dim % 2:
    raise ValueError(f'model.head_dim must be even, since rotary embeddings turn pairs: got {model.head_dim}; use {model.head_dim + 1}.')
  if model.tokenizer == 'byte' and model.vocab_size < BYTE_VOCABULARY:
    raise ValueError(
        f"model.vocab_size must be at least {BYTE_VOCABULARY} for model.tokenizer='byte': got {model.vocab_size}; use {BYTE_VOCABULARY}.")
  check_shape(model)


def check_shape(model: ModelConfig) -> None:
  """What the numbers of a model must be, wherever they come from."""
  _check_numbers(model, 'model.')
  if model.num_heads % model.num_kv_heads:
    raise ValueError(
        f'model.num_heads must be a multiple of model.num_kv_heads: got {model.num_heads} and {model.num_kv_heads}; '
        f'use one of {_divisors(model.num_heads)} key/value heads.')
  check_experts(model)
  check_latent(model)
  check_rope(model)


def check_rope(model: ModelConfig) -> None:
  """Scaled rotary angles have what their kind needs."""
  rope = model.rope
  turned = model.latent.rotary_dim if model.latent.rank else int(model.head_dim * rope.fraction)
  if turned < 2 or turned % 2:
    raise ValueError(
        f'model.rope.fraction must leave an even number of rotated dimensions, at least 2: got {turned} of head_dim={model.head_dim}.')
  if rope.kind in ('llama3', 'yarn') and rope.original_length < 1:
    raise ValueError(
        f'model.rope.original_length must be at least 1 for kind={rope.kind!r}, got {rope.original_length}; set it to the longest position '
        'that the model had before its rotary angles were scaled.')
  if rope.kind == 'llama3' and rope.high_frequency <= rope.low_frequency:
    raise ValueError(
        f'model.rope.high_frequency must be above low_frequency: got {rope.high_frequency} and {rope.low_frequency}; Llama 3 has 4 and 1.')


def check_experts(model: ModelConfig) -> None:
  """Sizes of the router's choice."""
  experts = model.experts
  if not experts.count:
    if experts.shared or experts.dense_layers:
      raise ValueError('model.experts.shared and dense_layers need experts: got model.experts.count=0.')
    return
  if experts.mlp_dim < 1:
    raise ValueError(f'model.experts.mlp_dim must be at least 1 for model.experts.count={experts.count}, got {experts.mlp_dim}.')
  if experts.count % experts.groups or (experts.groups > 1 and experts.count // experts.groups < 2):
    raise ValueError(
        f'model.experts.groups must divide model.experts.count into groups of at least 2: got {experts.groups} and {experts.count}.')
  if experts.top_groups > experts.groups:
    raise ValueError(f'model.experts.top_groups must be at most groups: got {experts.top_groups} of {experts.groups}.')
  choice = experts.top_groups * (experts.count // experts.groups)
  if experts.top_k > choice:
    raise ValueError(
        f'model.experts.top_k must be at most the number of experts in the groups that a token picks, {choice}: got {experts.top_k}.')
  _check_layers('model.experts.dense_layers', experts.dense_layers, model.num_layers)
  if len(experts.dense_layers) == model.num_layers:
    raise ValueError('model.experts.dense_layers names every layer; set model.experts.count=0 for a model without experts.')


def check_latent(model: ModelConfig) -> None:
  """Sizes of latent attention and of its index."""
  latent = model.latent
  if not latent.rank:
    return
  for name in ('query_rank', 'plain_dim', 'rotary_dim', 'value_dim'):
    if getattr(latent, name) < 1:
      raise ValueError(f'model.latent.{name} must be at least 1 for latent attention (model.latent.rank={latent.rank}), got 0.')
  if model.head_dim != latent.plain_dim + latent.rotary_dim or model.num_kv_heads != model.num_heads:
    raise ValueError(
        'With latent attention model.head_dim must be plain_dim + rotary_dim and model.num_kv_heads equal num_heads: got '
        f'head_dim={model.head_dim} for {latent.plain_dim} + {latent.rotary_dim}, {model.num_kv_heads} for {model.num_heads} heads.')
  if model.qk_norm or model.qkv_bias:
    raise ValueError('Latent attention has norms of its own and no bias: set model.qk_norm and model.qkv_bias to False.')
  if latent.index_top_k and (latent.index_heads < 1 or latent.index_dim < latent.rotary_dim):
    raise ValueError(
        'The index needs model.latent.index_heads of at least 1 and index_dim of at least rotary_dim: got '
        f'{latent.index_heads} and {latent.index_dim} with rotary_dim={latent.rotary_dim}.')
  _check_layers('model.latent.shared_index_layers', latent.shared_index_layers, model.num_layers)
  if latent.shared_index_layers and (not latent.index_top_k or 0 in latent.shared_index_layers):
    raise ValueError(
        'model.latent.shared_index_layers take the choice of the layer before: that needs index_top_k above 0, and layer 0 must have an '
        f'index of its own; got {latent.shared_index_layers} with index_top_k={latent.index_top_k}.')


def _check_layers(path: str, layers: tuple[int, ...], count: int) -> None:
  if list(layers) != sorted(set(layers)) or any(not 0 <= i < count for i in layers):
    raise ValueError(f'{path} must be increasing numbers of layers, 0 to {count - 1}: got {layers}.')


def _divisors(n: int) -> str:
  return ', '.join(str(d) for d in range(1, n + 1) if n % d == 0)


def _longest(config: Config) -> int:
  """Longest rollout in tokens; a pretrained model brings its own limit, known only when its file is read."""
  return config.task.max_tokens if config.model.pretrained else min(config.task.max_tokens, config.model.max_length)


def check_lengths(config: Config) -> None:
  """Buckets are increasing, and the learner's cover the longest rollout."""
  for path in ('learner.lengths', 'sampler.prefill_lengths', 'sampler.prefill_rows', 'sampler.cache_lengths'):
    values = lookup(config, path)
    if not values and path != 'sampler.cache_lengths':
      raise ValueError(f'{path} must hold at least one number, got ().')
    if any(v < 1 for v in values) or any(a >= b for a, b in zip(values, values[1:])):
      better = tuple(sorted({v for v in values if v > 0}))
      raise ValueError(f'{path} must be positive and strictly increasing, got {values}; use {better}.')
    limit = MAX_ROWS if path == 'sampler.prefill_rows' else MAX_LENGTH
    if values and values[-1] > limit:
      raise ValueError(f'{path} must be at most {limit:,}, more than any machine can use: got {values}; lower the last one.')
  task, longest = config.task, _longest(config)
  if task.max_turn_tokens > task.max_tokens:
    raise ValueError(
        f'task.max_turn_tokens must be at most task.max_tokens, the length of a whole rollout with its prompt: '
        f'got {task.max_turn_tokens} with max_tokens={task.max_tokens}.')
  if config.learner.lengths[-1] < longest:
    raise ValueError(
        f'learner.lengths must cover the longest rollout, {longest} tokens (task.max_tokens, at most model.max_length): '
        f'got {config.learner.lengths}; add {longest}, or lower task.max_tokens to {config.learner.lengths[-1]}.')
  cached = config.sampler.cache_lengths
  if cached and cached[-1] < longest:
    raise ValueError(f'sampler.cache_lengths must cover the longest rollout, {longest} tokens: got {cached}; add {longest} or use ().')


def check_sampler(config: Config) -> None:
  """Slots, sessions, pages and the queue behind them."""
  sampler, queue, learner = config.sampler, config.queue, config.learner
  if sampler.sessions < sampler.slots:
    raise ValueError(
        f'sampler.sessions (rollouts in flight) must be at least sampler.slots (rows that decode at once): '
        f'got {sampler.sessions} with slots={sampler.slots}; use sessions={sampler.slots} or more.')
  needed = -(-_longest(config) // sampler.page_size)
  if 0 < sampler.pages < needed:
    raise ValueError(
        f'sampler.pages must hold at least one rollout of {_longest(config)} tokens, {needed} pages of {sampler.page_size}: '
        f'got {sampler.pages}; use {needed} or more, or 0 for enough pages for all sessions.')
  if sampler.pages * sampler.page_size > 2**31 - 1:
    raise ValueError(
        f'sampler.pages times sampler.page_size must be below 2^31 tokens, since positions in the cache are 32 bits wide: '
        f'got {sampler.pages} pages of {sampler.page_size}; lower sampler.pages.')
  if queue.capacity < learner.batch_size:
    raise ValueError(
        f'queue.capacity must hold a whole batch: got {queue.capacity} with learner.batch_size={learner.batch_size}; '
        f'use {learner.batch_size} or more.')


def check_behaviour_distribution(config: Config) -> None:
  """Training divides by the probability of what was drawn, so it needs the whole softmax at a positive temperature."""
  sampler = config.sampler
  if sampler.temperature <= 0.0:
    raise ValueError(
        f'sampler.temperature must be above 0, got {sampler.temperature}: log-probabilities are those of the temperature-scaled softmax. '
        'Greedy decoding is a part of evaluation and needs no setting.')
  trains = config.rl.policy_steps > 0 or config.value_pretrain.rollouts > 0
  if trains and sampler.top_p < 1.0:
    raise ValueError(
        f'sampler.top_p must be 1 in training, got {sampler.top_p}: the importance ratio needs the exact distribution that drew each '
        'token, and a cut one gives probability 0 to what the learner gives weight. Use 1 here and --top_p in launch/evaluate.py.')
  if trains and sampler.top_k != 0:
    raise ValueError(
        f'sampler.top_k must be 0 (off) in training, got {sampler.top_k}: the importance ratio needs the exact distribution that drew each '
        'token, and a cut one gives probability 0 to what the learner gives weight. Use 0 here and --top_k in launch/evaluate.py.')


def check_learner(config: Config) -> None:
  """Batch sizes of the stages."""
  learner = config.learner
  if learner.batch_size % learner.micro_batches:
    raise ValueError(
        f'learner.batch_size must be a multiple of learner.micro_batches: got {learner.batch_size} and {learner.micro_batches}; '
        f'use one of {_divisors(learner.batch_size)} micro-batches.')
  if config.rl.policy_steps and learner.value_warmup_steps and not learner.value_steps:
    raise ValueError(
        f'learner.value_warmup_steps={learner.value_warmup_steps} are steps in which only the value model learns, but '
        'learner.value_steps=0 trains none; set one of them otherwise.')
  trains = config.rl.policy_steps or config.sft.steps or config.value_pretrain.rollouts
  if trains and config.model.param_dtype != 'float32':
    raise ValueError(
        f'model.param_dtype must be float32 in training, got {config.model.param_dtype}: steps of usual learning rates round to nothing in '
        "16 bits. For speed and memory set model.compute_dtype and sampler.dtype to 'bfloat16'.")
  if learner.balance_coefficient and not config.model.experts.count and not config.model.pretrained:
    raise ValueError(
        f'learner.balance_coefficient balances experts, and the model has none: got {learner.balance_coefficient} with '
        'model.experts.count=0; use 0.')
  if learner.balance_coefficient and config.algorithm.denominator == 'kept_tokens':
    raise ValueError(
        'learner.balance_coefficient must be 0 with algorithm.denominator=\'kept_tokens\', which is known only after the forward pass: got '
        f'{learner.balance_coefficient}; use \'action_tokens\' or \'trajectory\'.')
  pretrain = config.value_pretrain.rollouts
  if 0 < pretrain < learner.batch_size:
    raise ValueError(
        f'value_pretrain.rollouts must be 0 or fill at least one batch: got {pretrain} with learner.batch_size={learner.batch_size}; '
        f'use 0 to leave the stage out, or {learner.batch_size} or more.')


def check_compaction(config: Config) -> None:
  """A compacted conversation begins a segment, and must leave room within the limit."""
  task = config.task
  if task.compact_room and task.max_segments == 1:
    raise ValueError(
        f'task.compact_room={task.compact_room} needs task.max_segments of at least 2, since a shortened conversation begins a segment: '
        'got 1; raise it, or use task.compact_room=0.')
  if task.compact_room >= task.max_tokens:
    raise ValueError(f'task.compact_room must be less than task.max_tokens={task.max_tokens}, got {task.compact_room}; lower it.')


def check_optimizers(config: Config) -> None:
  """Schedules have the steps that they need."""
  for path in OPTIMIZERS:
    optimizer = lookup(config, path)
    if optimizer.schedule not in ('constant', 'linear', 'cosine'):
      raise ValueError(f"{path}.schedule must be one of constant, linear, cosine, got {optimizer.schedule!r}.")
    if optimizer.schedule != 'constant' and optimizer.decay_steps <= optimizer.warmup_steps:
      raise ValueError(
          f'{path}.decay_steps is the length of the whole {optimizer.schedule} schedule and must exceed warmup_steps: '
          f'got {optimizer.decay_steps} with warmup_steps={optimizer.warmup_steps}; set it to the number of optimizer steps.')


def check_devices(config: Config) -> None:
  """Device lists and mesh sizes, as far as they can be judged without asking JAX for its devices."""
  sides = {'sampler': config.sampler, 'learner': config.learner}
  for name, side in sides.items():
    _check_mesh_sizes(f'{name}.mesh', side.mesh, len(side.devices))
    if any(d < 0 for d in side.devices) or len(set(side.devices)) != len(side.devices):
      raise ValueError(f'{name}.devices must be different, non-negative indices into jax.devices(), got {side.devices}.')
  mine, theirs = set(config.sampler.devices), set(config.learner.devices)
  split = bool(mine) and bool(theirs) and not mine & theirs
  if mine != theirs and not split:
    raise ValueError(
        f'sampler.devices and learner.devices must be the same (colocated) or have none in common (split): '
        f'got {config.sampler.devices or "all"} and {config.learner.devices or "all"}; () means all devices.')
  rows = _batch_shards(config.learner.mesh, len(config.learner.devices))
  batches = {
      'learner.batch_size / learner.micro_batches': config.learner.batch_size // config.learner.micro_batches,
      'sft.batch_size': config.sft.batch_size if config.sft.steps else rows,
  }
  for name, size in batches.items():
    if size % rows:
      raise ValueError(
          f'{name} must be a multiple of the data and fsdp axes of learner.mesh: got {size} with {rows} shards; '
          f'use {max(size // rows, 1) * rows} or {(size // rows + 1) * rows}.')


def _check_mesh_sizes(path: str, sizes: tuple[int, ...], num_devices: int) -> None:
  if len(sizes) != 5 or any(s < 1 and s != -1 for s in sizes) or sizes.count(-1) > 1:
    raise ValueError(
        f'{path} must be five positive sizes (data, fsdp, expert, sequence, tensor), at most one of them -1 for what is left: got {sizes}.')
  fixed = math.prod(s for s in sizes if s != -1)
  if num_devices and (num_devices % fixed if -1 in sizes else num_devices != fixed):
    raise ValueError(f'{path} must multiply to the number of its devices: got {sizes}, {fixed} in all, with {num_devices} devices.')


def _batch_shards(sizes: tuple[int, ...], num_devices: int) -> int:
  """Product of the data and fsdp axes as far as known; an axis of -1 on all devices counts as 1 (`sharding.check_mesh` knows more)."""
  fixed = math.prod(s for s in sizes if s != -1)
  rest = num_devices // fixed if num_devices else 1
  return math.prod(rest if s == -1 else s for s in sizes[:2])
