"""Settings: building from dictionaries, range checks, every setting read, every file in configs/ sound."""

import dataclasses
import importlib.util
import json
import math
import pathlib

from hypothesis import given
from hypothesis import strategies as st
import config_usage
import pytest

from sao_jax import config as settings
from sao_jax import config_checks

ROOT = pathlib.Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / 'sao_jax').rglob('*.py'))
CONFIGS = sorted((ROOT / 'configs').glob('*.py'))


def changed(changes: dict) -> dict:
  """The default settings with {dotted path: value} replaced."""
  values = settings.default_dict()
  for path, value in changes.items():
    section = values
    *sections, name = path.split('.')
    for part in sections:
      section = section[part]
    section[name] = value
  return values


# --- Building ---


def test_defaults_are_sound_and_round_trip():
  config = settings.Config()
  settings.check(config)
  assert settings.from_dict(settings.default_dict()) == config
  assert settings.from_dict(json.loads(json.dumps(settings.to_dict(config)))) == config  # Lists become tuples again.


def test_a_part_is_enough_and_defaults_fill_the_rest():
  config = settings.from_dict({'seed': 3, 'rl': {'policy_steps': 7}})
  assert (config.seed, config.rl.policy_steps, config.learner) == (3, 7, settings.LearnerConfig())


@pytest.mark.parametrize('path', config_checks.LIMITS)
def test_sizes_that_no_machine_holds_are_refused_at_once(path):
  with pytest.raises(ValueError, match=f'{path.replace(".", "[.]")} must be at most .*lower it'):
    settings.from_dict(changed({path: 10**13}))


@pytest.mark.parametrize('changes', [
    {'learner.lengths': (128, 10**9)}, {'sampler.prefill_lengths': (16, 10**9)}, {'sampler.prefill_rows': (8, 10**7)},
    {'sampler.cache_lengths': (128, 10**9)}, {'sampler.pages': 2**30, 'sampler.page_size': 16}])
def test_lengths_and_caches_that_no_machine_holds_are_refused_at_once(changes):
  with pytest.raises(ValueError, match=f'{list(changes)[0].replace(".", "[.]")} .*lower'):
    settings.from_dict(changed(changes))


def test_the_largest_models_are_within_the_limits():
  """A model of 10^12 parameters with contexts of 10^6 tokens, in pages for 4096 rollouts of 131072 tokens."""
  config = settings.from_dict(changed({
      'model.vocab_size': 262_144, 'model.embed_dim': 16_384, 'model.num_layers': 126, 'model.num_heads': 128, 'model.num_kv_heads': 8,
      'model.head_dim': 128, 'model.mlp_dim': 65_536, 'model.max_length': 10**6, 'task.max_tokens': 10**6, 'learner.lengths': (10**6,),
      'sampler.sessions': 65_536, 'sampler.slots': 16_384, 'sampler.pages': 2**23, 'sampler.page_size': 64,
      'learner.batch_size': 16_384, 'queue.capacity': 65_536, 'sampler.chunk_steps': 1024, 'task.workers': 4096, 'rl.policy_steps': 10**7}))
  assert (config.model.max_length, config.sampler.pages) == (10**6, 2**23)


def test_int_for_float_is_taken_as_float():
  value = settings.from_dict(changed({'algorithm.epsilon_high': 5})).algorithm.epsilon_high
  assert value == 5.0 and isinstance(value, float)


@pytest.mark.parametrize('path, value', [
    ('seed', 1.5), ('seed', True), ('seed', '0'), ('model.qk_norm', 1), ('model.qk_norm', 'yes'), ('task.name', 3), ('learner.lengths', 128),
    ('learner.lengths', (128.0,)), ('learner.lengths', ('128',)), ('learner.lengths', (True,)), ('learner.policy', 0.1), ('model', None),
    ('algorithm.gamma', '1'), ('algorithm.gamma', None), ('task.settings', 3), ('rl.policy_steps', None)])
def test_wrong_type_names_the_setting(path, value):
  with pytest.raises(ValueError, match=path.replace('.', r'\.')):
    settings.from_dict(changed({path: value}))


@pytest.mark.parametrize('path', ['sed', 'learner.batchsize', 'learner.policy.lr', 'evaluation.seeds'])
def test_unknown_setting_is_named_with_its_neighbours(path):
  with pytest.raises(ValueError) as error:
    settings.from_dict(changed({path: 1}))
  assert f'Unknown setting {path}' in str(error.value)
  neighbours = {'sed': 'seed', 'learner.batchsize': 'batch_size', 'learner.policy.lr': 'learning_rate', 'evaluation.seeds': 'seed'}
  assert neighbours[path] in str(error.value)


def test_unknown_section():
  with pytest.raises(ValueError, match='Unknown setting trainer'):
    settings.from_dict({'trainer': {'steps': 1}})


# --- Ranges ---

EXPERTS = {'model.experts.count': 8, 'model.experts.top_k': 2, 'model.experts.mlp_dim': 16}
LATENT = {
    'model.latent.rank': 16, 'model.latent.query_rank': 16, 'model.latent.plain_dim': 8, 'model.latent.rotary_dim': 8,
    'model.latent.value_dim': 8, 'model.head_dim': 16, 'model.num_kv_heads': 4}
IMPOSSIBLE = [
    ({'learner.value_steps': 0, 'learner.value_warmup_steps': 3}, 'learner.value_steps=0 trains none'),
    ({'model.param_dtype': 'bfloat16'}, 'model.param_dtype must be float32 in training'),
    ({'seed': -1}, 'seed must be in'),
    ({'model.num_heads': 4, 'model.num_kv_heads': 3}, 'multiple of model.num_kv_heads: got 4 and 3; use one of 1, 2, 4'),
    ({'model.head_dim': 31}, 'model.head_dim must be even'),
    ({'model.vocab_size': 258}, 'model.vocab_size must be at least 259'),
    ({'model.tokenizer': 'pretrained'}, 'model.pretrained names, which is empty'),
    ({'model.num_layers': 0}, 'model.num_layers must be at least 1, got 0'),
    ({'model.rope_theta': -1.0}, 'model.rope_theta must be above 0'),
    ({'model.norm_eps': math.nan}, 'model.norm_eps must be a finite number'),
    ({'model.attention': 'flash'}, 'model.attention must be one of dense, blockwise'),
    ({'model.rope.kind': 'longrope'}, 'model.rope.kind must be one of default, linear, llama3, yarn'),
    ({'model.rope.fraction': 0.03}, 'even number of rotated dimensions, at least 2: got 0 of head_dim=32'),
    ({'model.rope.kind': 'yarn', 'model.rope.factor': 4.0}, "model.rope.original_length must be at least 1 for kind='yarn'"),
    ({'model.rope.kind': 'llama3', 'model.rope.original_length': 64, 'model.rope.low_frequency': 4.0}, 'high_frequency must be above'),
    ({**EXPERTS, 'model.experts.mlp_dim': 0}, 'model.experts.mlp_dim must be at least 1'),
    ({**EXPERTS, 'model.experts.top_k': 9}, 'model.experts.top_k must be at most .* 8: got 9'),
    ({**EXPERTS, 'model.experts.groups': 3}, 'model.experts.groups must divide .* got 3 and 8'),
    ({**EXPERTS, 'model.experts.groups': 8}, 'into groups of at least 2: got 8 and 8'),
    ({**EXPERTS, 'model.experts.groups': 4, 'model.experts.top_groups': 5}, 'top_groups must be at most groups: got 5 of 4'),
    ({**EXPERTS, 'model.experts.groups': 4, 'model.experts.top_k': 3}, 'in the groups that a token picks, 2: got 3'),
    ({**EXPERTS, 'model.experts.dense_layers': (3,)}, r'numbers of layers, 0 to 2: got \(3,\)'),
    ({**EXPERTS, 'model.experts.dense_layers': (0, 1, 2)}, 'names every layer; set model.experts.count=0'),
    ({'model.experts.shared': 1}, 'need experts: got model.experts.count=0'),
    ({'learner.balance_coefficient': 0.1}, 'balances experts, and the model has none'),
    ({**EXPERTS, 'learner.balance_coefficient': 0.1, 'algorithm.denominator': 'kept_tokens'}, 'must be 0 with algorithm.denominator'),
    ({'model.latent.rank': 16}, 'model.latent.query_rank must be at least 1'),
    ({**LATENT, 'model.head_dim': 32}, 'model.head_dim must be plain_dim . rotary_dim.*head_dim=32 for 8 . 8'),
    ({**LATENT, 'model.qk_norm': True}, 'set model.qk_norm and model.qkv_bias to False'),
    ({**LATENT, 'model.latent.index_top_k': 4}, 'model.latent.index_heads of at least 1'),
    ({**LATENT, 'model.latent.shared_index_layers': (1,)}, 'take the choice of the layer before'),
    ({**LATENT, 'model.latent.rotary_dim': 7, 'model.latent.plain_dim': 9}, 'even number of rotated dimensions'),
    ({'task.max_turns': 0}, 'task.max_turns'),
    ({'task.max_turn_tokens': 129}, 'task.max_turn_tokens must be at most task.max_tokens'),
    ({'task.max_tokens': 129}, 'learner.lengths must cover the longest rollout, 129 tokens'),
    ({'task.max_tokens': 1024, 'model.max_length': 300}, 'learner.lengths must cover the longest rollout, 300 tokens'),
    ({'task.step_timeout_s': 0}, 'task.step_timeout_s'),
    ({'task.max_failure_share': 0.0}, 'task.max_failure_share'),
    ({'learner.lengths': ()}, 'learner.lengths must hold at least one number'),
    ({'learner.lengths': (128, 64)}, r'strictly increasing, got \(128, 64\); use \(64, 128\)'),
    ({'learner.lengths': (128, 128)}, 'strictly increasing'),
    ({'learner.lengths': (0, 128)}, 'positive and strictly increasing'),
    ({'sampler.prefill_lengths': (64, 16)}, 'sampler.prefill_lengths'),
    ({'sampler.prefill_rows': ()}, 'sampler.prefill_rows'),
    ({'sampler.cache_lengths': (64,)}, 'sampler.cache_lengths must cover'),
    ({'sampler.page_size': 0}, 'sampler.page_size'),
    ({'sampler.pages': 7}, 'sampler.pages must hold at least one rollout of 128 tokens, 8 pages of 16: got 7'),
    ({'sampler.slots': 0}, 'sampler.slots'),
    ({'sampler.sessions': 63}, 'sampler.sessions'),
    ({'sampler.temperature': 0.0}, 'sampler.temperature must be above 0'),
    ({'sampler.temperature': -1.0}, 'sampler.temperature must be above 0'),
    ({'sampler.top_p': 0.9}, 'sampler.top_p must be 1 in training.*exact distribution'),
    ({'sampler.top_p': 0.0}, 'sampler.top_p'),
    ({'sampler.top_p': 1.5}, 'sampler.top_p'),
    ({'sampler.top_k': 50}, 'sampler.top_k must be 0 .off. in training'),
    ({'sampler.top_k': 50, 'rl.policy_steps': 0, 'value_pretrain.rollouts': 64}, 'sampler.top_k'),
    ({'sampler.on_update': 'never'}, 'sampler.on_update must be one of'),
    ({'queue.capacity': 63}, 'queue.capacity must hold a whole batch: got 63 with learner.batch_size=64; use 64 or more'),
    ({'queue.max_staleness': -1}, 'queue.max_staleness'),
    ({'queue.overdue': 'keep'}, 'queue.overdue'),
    ({'algorithm.epsilon_low': 1.1}, 'algorithm.epsilon_low'),
    ({'algorithm.epsilon_low': 0.0}, 'algorithm.epsilon_low'),
    ({'algorithm.epsilon_high': -0.1}, 'algorithm.epsilon_high'),
    ({'algorithm.gamma': 1.01}, 'algorithm.gamma'),
    ({'algorithm.gae_lambda': -0.5}, 'algorithm.gae_lambda.*or -1'),
    ({'algorithm.gae_lambda': 1.5}, 'algorithm.gae_lambda'),
    ({'algorithm.lambda_alpha': 0.0}, 'algorithm.lambda_alpha'),
    ({'learner.batch_size': 0}, 'learner.batch_size'),
    ({'learner.micro_batches': 3}, 'learner.batch_size must be a multiple of learner.micro_batches: got 64 and 3'),
    ({'learner.mesh': (4, 4, 1, 1, 1), 'learner.batch_size': 60}, 'multiple of the data and fsdp axes.*got 60 with 16 shards; use 48 or 64'),
    ({'learner.mesh': (1, -1, 1, 1, 1), 'learner.devices': (0, 1, 2, 3), 'sampler.devices': (4, 5), 'learner.batch_size': 66},
     'got 66 with 4 shards'),
    ({'learner.mesh': (8, 1, 1, 1, 1), 'sft.batch_size': 12, 'sft.steps': 5}, 'sft.batch_size must be a multiple'),
    ({'learner.mesh': (1, 2, 1, 1)}, 'learner.mesh must be five positive sizes'),
    ({'learner.mesh': (-1, -1, 1, 1, 1)}, 'at most one of them -1'),
    ({'sampler.mesh': (1, 0, 1, 1, 1)}, 'sampler.mesh'),
    ({'learner.mesh': (1, 3, 1, 1, 1), 'learner.devices': (0, 1), 'sampler.devices': (2,)}, 'multiply to the number of its devices'),
    ({'learner.mesh': (1, -1, 1, 1, 3), 'learner.devices': (0, 1), 'sampler.devices': (2,)}, 'multiply to the number of its devices'),
    ({'learner.devices': (0, 0), 'sampler.devices': (0, 0)}, 'must be different, non-negative'),
    ({'learner.devices': (0, 1), 'sampler.devices': (1, 2)}, 'must be the same .colocated. or have none in common'),
    ({'learner.devices': (0, 1)}, 'must be the same .colocated. or have none in common'),
    ({'clock.kind': 'sun'}, 'clock.kind'),
    ({'clock.chunk_s': 0.0}, 'clock.chunk_s'),
    ({'clock.sigma': -0.1}, 'clock.sigma'),
    ({'sft.steps': -1}, 'sft.steps'),
    ({'sft.demonstrations': 0}, 'sft.demonstrations'),
    ({'value_pretrain.rollouts': 10}, 'value_pretrain.rollouts must be 0 or fill at least one batch'),
    ({'value_pretrain.epochs': 0}, 'value_pretrain.epochs'),
    ({'rl.policy_steps': -5}, 'rl.policy_steps'),
    ({'evaluation.prompts': -1}, 'evaluation.prompts'),
    ({'checkpoint.every': 0}, 'checkpoint.every'),
    ({'checkpoint.keep': 0}, 'checkpoint.keep'),
    ({'logging.every': 0}, 'logging.every'),
    ({'task.max_segments': 0}, 'task.max_segments'),
    ({'task.compact_room': -1}, 'task.compact_room'),
    ({'task.compact_room': 10}, 'task.compact_room=10 needs task.max_segments of at least 2'),
    ({'task.compact_room': 128, 'task.max_segments': 2}, 'task.compact_room must be less than task.max_tokens=128'),
]
OPTIMIZER = [
    ({'learning_rate': -1e-4}, 'learning_rate must be at least 0'),
    ({'learning_rate': math.nan}, 'learning_rate must be a finite number'),
    ({'learning_rate': math.inf}, 'learning_rate must be a finite number'),
    ({'beta2': 1.0}, 'beta2'),
    ({'epsilon': 0.0}, 'epsilon'),
    ({'max_grad_norm': 0.0}, 'max_grad_norm'),
    ({'schedule': 'step'}, 'schedule must be one of constant, linear, cosine'),
    ({'schedule': 'cosine'}, 'decay_steps is the length of the whole cosine schedule'),
    ({'schedule': 'linear', 'warmup_steps': 10, 'decay_steps': 10}, 'must exceed warmup_steps: got 10 with warmup_steps=10'),
    ({'end_fraction': 2.0}, 'end_fraction'),
]


@pytest.mark.parametrize('changes, message', IMPOSSIBLE)
def test_impossible_settings_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    settings.from_dict(changed(changes))


@pytest.mark.parametrize('section', config_checks.OPTIMIZERS)
@pytest.mark.parametrize('changes, message', OPTIMIZER)
def test_impossible_optimizers_are_refused(section, changes, message):
  with pytest.raises(ValueError, match=f'{section}.*{message}'):
    settings.from_dict(changed({f'{section}.{name}': value for name, value in changes.items()}))


@pytest.mark.parametrize('changes', [
    {'learner.devices': (0, 1), 'sampler.devices': (2, 3)},
    {'learner.devices': (0, 1), 'sampler.devices': (1, 0)},
    {'learner.mesh': (2, 4, 1, 1, 1), 'learner.micro_batches': 4},
    {'sampler.top_p': 0.5, 'sampler.top_k': 5, 'rl.policy_steps': 0},  # No RL stage, so nothing is trained on what is drawn.
    {'learner.policy.schedule': 'cosine', 'learner.policy.decay_steps': 100, 'learner.policy.warmup_steps': 10},
    {'learner.policy.learning_rate': 0.0},
    {**EXPERTS, 'model.experts.dense_layers': (0,), 'learner.balance_coefficient': 0.01, 'learner.freeze_router': True},
    LATENT,
    {'algorithm.gae_lambda': 0.0},
    {'model.pretrained': 'smollm2-135m-instruct', 'model.tokenizer': 'pretrained', 'model.num_heads': 9, 'model.num_kv_heads': 3},
    {'model.pretrained': 'x.gguf', 'task.max_tokens': 1000, 'learner.lengths': (1000,)},
    {'sampler.pages': 8},
    {'queue.max_staleness': 0},
    {'task.max_segments': 3, 'algorithm.denominator': 'trajectory', 'algorithm.advantage': 'reinforce_batch_centred', 'task.compact_room': 20},
])
def test_unusual_settings_are_allowed(changes):
  config = settings.from_dict(changed(changes))
  assert {path: settings.lookup(config, path) for path in changes} == changes


@given(st.sampled_from(sorted(config_checks.RANGES)), st.sampled_from([math.nan, math.inf, -math.inf, -1e9, 1e12]))
def test_no_number_of_the_table_takes_an_absurd_value(path, value):
  number = settings.lookup(settings.Config(), path)
  if isinstance(number, int):
    value = -(10**9) if not math.isfinite(value) or value < 0 else -1
  elif value in config_checks.RANGES[path] and math.isfinite(value):
    value = math.nan  # 1e12 is large but meaningful, e.g. as a rope base.
  with pytest.raises(ValueError, match=path.replace('.', r'\.')):
    settings.from_dict(changed({path: value}))


def test_every_number_has_a_range():
  """A new number without a range fails here; give it one in config_checks.RANGES, or name the check that it has."""
  checked_elsewhere = {'algorithm.gae_lambda', 'sampler.temperature', 'sampler.sessions', 'queue.capacity'}
  numbers = {path for path, value in config_checks._numbers(settings.Config(), '') if not isinstance(value, bool)}
  assert numbers - set(config_checks.RANGES) == checked_elsewhere
  assert set(config_checks.RANGES) <= numbers


def test_every_string_has_choices():
  free = {'model.pretrained', 'task.name', 'algorithm.advantage', 'algorithm.objective'}  # Files, and registries of other modules.
  free |= {f'{path}.schedule' for path in config_checks.OPTIMIZERS}  # Checked with their steps.
  assert set(_strings(settings.Config(), '')) - free <= set(settings.CHOICES)
  for path, choices in settings.CHOICES.items():
    assert settings.lookup(settings.Config(), path) in choices


def _strings(section, prefix):
  for field in dataclasses.fields(section):
    value = getattr(section, field.name)
    if dataclasses.is_dataclass(value):
      yield from _strings(value, f'{prefix}{field.name}.')
    elif isinstance(value, str):
      yield prefix + field.name


# --- Differences ---


def test_differences_name_what_changed():
  before, after = changed({}), changed({'seed': 1, 'learner.policy.learning_rate': 0.5, 'task.settings': {'operations': 2}})
  assert settings.differences(before, after) == [
      'seed: 0 -> 1', 'task.settings.operations: None -> 2', 'learner.policy.learning_rate: 1e-06 -> 0.5']
  assert settings.differences(before, json.loads(json.dumps(before))) == []


def test_a_setting_newer_than_a_run_is_a_difference_only_without_its_default():
  now = changed({'learner.policy.learning_rate': 0.5, 'task.settings': {'operations': 2}})
  stored = json.loads(json.dumps(now))
  for section, name in (('algorithm', 'gamma'), ('learner', 'micro_batches'), ('task', 'compact_room')):
    stored[section].pop(name, None)  # As before these settings came to be.
  del stored['model']['rope'], stored['clock']
  assert settings.differences_from_stored(stored, now) == []
  assert settings.differences(stored, now) != []
  default = settings.default_dict()
  later = changed({
      'learner.policy.learning_rate': 0.5, 'task.settings': {'operations': 2}, 'model.rope.factor': 4.0, 'clock.kind': 'virtual',
      'algorithm.gamma': 0.5})
  assert settings.differences_from_stored(stored, later) == [
      f'model.rope.factor: {default["model"]["rope"]["factor"]} -> 4.0', f'algorithm.gamma: {default["algorithm"]["gamma"]} -> 0.5',
      "clock.kind: 'wall' -> 'virtual'"]
  del stored['task']['settings']['operations']  # Defaults of an environment's own settings are not known here.
  assert settings.differences_from_stored(stored, now) == ['task.settings.operations: None -> 2']


@pytest.mark.parametrize('change, told', [
    ({'older': 3}, 'older: 3 -> None'), ({'model': 3}, 'model: 3 -> {'), ({'seed': None}, 'seed: None -> 0')])
def test_a_setting_that_is_gone_or_of_another_kind_is_a_difference(change, told):
  found = settings.differences_from_stored({**changed({}), **change}, changed({}))
  assert len(found) == 1 and found[0].startswith(told)


# --- Every setting is read ---


def test_every_setting_is_read():
  unread = sorted(f'{owner}.{name}' for owner, name in config_usage.all_settings() - config_usage.read_settings(FILES))
  assert not unread, f'read these somewhere in sao_jax, or remove them: {unread}'


def test_the_reader_is_not_fooled_by_the_same_name(tmp_path):
  code = tmp_path / 'sample.py'
  code.write_text('''
import dataclasses
from sao_jax.config import Config, ModelConfig, SamplerConfig

def top(config: Config, sampler, seed):
  learner = config.learner
  a, b = learner.policy, sampler.temperature      # LearnerConfig.policy; not SamplerConfig.temperature
  print(a.beta1, seed.policy_steps)               # OptimizerConfig.beta1; not RlConfig.policy_steps
  any_name, both = getattr(config.task, seed), getattr(config.clock, f'{seed}date_s') + getattr(config.clock, 'sigma')
  wider = dataclasses.replace(config.model, num_layers=2)
  return wider.head_dim                           # ModelConfig.head_dim

def shape() -> ModelConfig:
  "config.model.vocab_size in a docstring is no use of it."

class Thing:

  def __init__(self, config: 'SamplerConfig'):
    self.config = config
    self.top_k = 3
    config.pages = 3

  def use(self):
    return self.config.slots, self.top_k, self.pages, shape().rope_theta

@dataclasses.dataclass
class Parts:
  config: Config

def last(parts: Parts):
  return parts.config.rl
''')
  assert config_usage.read_settings([code]) == {
      ('Config', 'learner'), ('LearnerConfig', 'policy'), ('OptimizerConfig', 'beta1'), ('Config', 'model'), ('ModelConfig', 'head_dim'),
      ('Config', 'task'), ('Config', 'clock'), ('ClockConfig', 'update_s'), ('ClockConfig', 'sigma'), ('SamplerConfig', 'slots'), ('ModelConfig', 'rope_theta'), ('Config', 'rl')}


# --- The files in configs/ ---


def load(path: pathlib.Path):
  spec = importlib.util.spec_from_file_location(f'configs_{path.stem}', path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def test_there_are_configs():
  assert {'quickstart', 'smollm2_chain_sum', 'tiny_debug'} <= {p.stem for p in CONFIGS}


@pytest.mark.parametrize('path', CONFIGS, ids=lambda p: p.stem)
def test_config_file_is_sound(path):
  module = load(path)
  values = module.get_config()
  config = settings.from_dict(values.to_dict())
  assert config != settings.Config()
  assert f'--config=configs/{path.name}' in module.__doc__ or f'launch/{path.stem}.sh' in module.__doc__
  for word in ('Command', 'Hardware', 'Expected'):
    assert f'{word}:' in module.__doc__, f'the docstring of {path.name} gives no {word}'
