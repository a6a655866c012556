"""The compiled update against the method written out with full logits, and what must not change it."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax import algorithms
from sao_jax.learner import is_frozen
from sao_jax.models import attention, transformer
from tests.learner_factory import LENGTH, POLICY, ROWS, VALUE, VOCAB, host, make_batch, make_learner, start, start_params


SLOW = pytest.mark.slow  # Each compiles another program.


def positions(tokens):
  return jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)


def dense_log_prob(params, config, tokens, temperature=1.0):
  """log_prob f32[B, T] from full logits."""
  model = transformer.merge(transformer.Policy, config.model, params)
  logits = model.logits(model.hidden(tokens, positions(tokens), attention.make(config.model))[0]) / temperature
  logs = jax.nn.log_softmax(logits[:, :-1], axis=-1)
  return jnp.pad(jnp.take_along_axis(logs, tokens[:, 1:, None], axis=-1)[..., 0], [(0, 0), (1, 0)])


def dense_values(params, config, batch):
  """Values before each token, and after the last one of truncated rows."""
  model = transformer.merge(transformer.ValueModel, config.model, params)
  after = model(batch.tokens, positions(batch.tokens), attention.make(config.model))
  bootstrap = jnp.stack([after[b, n - 1] if n else jnp.zeros(()) for b, n in enumerate(batch.token_mask.sum(axis=1))])
  return jnp.pad(after[:, :-1], [(0, 0), (1, 0)]), jnp.where(batch.truncated, bootstrap, 0.0)


def first_adam_step(params, gradient, config):
  """First AdamW step without clipping: lr * g / (|g| + epsilon)."""
  return {p: params[p] - config.learning_rate * g / (jnp.abs(g) + config.epsilon) for p, g in gradient.items()}


def assert_close(got, want, rtol=2e-4, atol=2e-5):
  assert set(got) == set(want) and len(got) > 3
  for path in want:
    np.testing.assert_allclose(got[path], want[path], rtol=rtol, atol=atol, err_msg=path)


@pytest.mark.parametrize('denominator', ['action_tokens', pytest.param('kept_tokens', marks=SLOW), pytest.param('trajectory', marks=SLOW)])
def test_one_update_is_the_method(denominator):
  """One value step, values again, length-adaptive GAE, DIS at temperature 0.7: written out with full logits and autodiff."""
  learner = make_learner(algorithm=dict(denominator=denominator, epsilon_low=0.6), temperature=0.7, value_steps=1, micro_batches=2)
  batch, config = make_batch(), learner.config
  policy, value = start_params()
  mask, count = batch.action_mask, batch.action_mask.sum()
  zeros = np.zeros(mask.shape, np.float32)
  value_before, bootstrap = dense_values(value, config, batch)
  target = algorithms.skip_observation_gae(batch.reward, zeros, bootstrap, mask, gamma=1.0, gae_lambda=1.0)[1]
  trainable = {p: x for p, x in value.items() if not is_frozen(p, 'attention_and_embeddings')}

  def value_loss(trainable):
    v = dense_values(value | trainable, config, batch)[0]
    return jnp.sum(jnp.where(mask, jnp.square(v - target), 0.0)) / count

  loss, gradient = jax.value_and_grad(value_loss)(trainable)
  new_value = value | first_adam_step(value, gradient, VALUE)
  v, b = dense_values(new_value, config, batch)
  gae_lambda = algorithms.length_adaptive_lambda(mask, alpha=1.5)
  advantage = algorithms.skip_observation_gae(batch.reward, v, b, mask, gamma=1.0, gae_lambda=gae_lambda)[0]
  ratio = np.exp(np.where(mask, dense_log_prob(policy, config, batch.tokens, 0.7) - batch.behaviour_log_prob, 0.0))
  kept = mask & (ratio > 0.4) & (ratio < 6.0)
  assert 0 < kept.sum() < count
  lengths, rows = np.maximum(mask.sum(axis=1, keepdims=True), 1), mask.any(axis=1).sum()
  weight = {'action_tokens': 1 / count, 'kept_tokens': 1 / kept.sum(), 'trajectory': 1 / lengths / rows}[denominator]

  def policy_loss(policy):
    log_prob = dense_log_prob(policy, config, batch.tokens, 0.7)
    return -jnp.sum(jnp.where(kept, weight * ratio * advantage * log_prob, 0.0))

  state, metrics = learner.update(start(learner), batch, version=1, train_policy=True)
  metrics = {name: stat.mean() for name, stat in learner.fetch(metrics, 0).items()}
  assert_close(host(state.value_trainable), {p: new_value[p] for p in trainable})
  assert_close(host(state.policy), first_adam_step(policy, jax.grad(policy_loss)(policy), POLICY))
  np.testing.assert_allclose(metrics['value/loss'], loss, rtol=1e-4)
  np.testing.assert_allclose(metrics['policy/loss'], policy_loss(policy), rtol=1e-3, atol=1e-5)
  np.testing.assert_allclose(metrics['dis/kept_fraction'], kept.sum() / count, rtol=1e-6)
  np.testing.assert_allclose(
      metrics['value/explained_variance'], algorithms.explained_variance(value_before, target, mask), rtol=1e-3, atol=1e-4)
  same = batch.policy_version == 1
  np.testing.assert_allclose(metrics['sampler_vs_learner/log_prob_gap_max'], np.max(np.abs(np.log(ratio[same]))), rtol=1e-3)
  outside = np.mean((ratio[same] < 0.99) | (ratio[same] > 1.01))
  np.testing.assert_allclose(metrics['ratio/outside_1pct'], outside, rtol=1e-6)
  for percent in (1, 50, 99):
    want = np.quantile(np.log(ratio[mask]), percent / 100, method='nearest')
    np.testing.assert_allclose(metrics[f'ratio/log_p{percent:02d}'], want, rtol=1e-3, atol=1e-4)


@SLOW
def test_untied_embeddings_and_the_second_registry_entries():
  learner = make_learner(
      model=dict(tie_embeddings=False), algorithm=dict(advantage='reinforce_batch_centred', objective='ppo_clip'), value_steps=0)
  batch, config = make_batch(none_truncated=True), learner.config
  policy, mask = start_params(False)[0], batch.action_mask
  zeros = np.zeros(mask.shape, np.float32)
  advantage = algorithms.reinforce_batch_centred(batch.reward, zeros, zeros[:, 0], mask, gamma=1.0, gae_lambda=1.0)[0]

  def loss(policy):
    log_prob = dense_log_prob(policy, config, batch.tokens)
    stats = algorithms.ppo_clip_policy_loss(log_prob, batch.behaviour_log_prob, advantage, mask, epsilon_low=0.3, epsilon_high=5.0)
    return stats['loss'].total / stats['loss'].count

  state, metrics = learner.update(start(learner), batch, version=0, train_policy=True)
  assert 'unembedding' in state.policy
  assert_close(host(state.policy), first_adam_step(policy, jax.grad(loss)(policy), POLICY))
  assert 'ppo_clip/above' in metrics and 'value/loss' not in metrics


def test_sft_is_the_mean_negative_log_likelihood_of_the_actions():
  learner = make_learner(temperature=0.5)  # The sampling temperature is none of the warm start's business.
  batch, policy = make_batch(), start_params()[0]

  def loss(policy):
    return -jnp.sum(jnp.where(batch.action_mask, dense_log_prob(policy, learner.config, batch.tokens), 0.0)) / batch.action_mask.sum()

  state, metrics = learner.sft_update(start(learner, 'sft'), batch)
  np.testing.assert_allclose(learner.fetch(metrics, 0)['sft/loss'].mean(), loss(policy), rtol=1e-5)
  assert_close(host(state.policy), first_adam_step(policy, jax.grad(loss)(policy), POLICY))
  assert state.value_trainable == {} and state.value_opt == () and int(state.step) == 1


def test_k_value_steps_are_k_single_steps_on_fixed_targets():
  learner = make_learner(value_steps=2)
  batch = make_batch(none_truncated=True)
  together, _ = learner.update(start(learner), batch, version=0, train_policy=False)
  state = start(learner, 'value_pretrain')
  for _ in range(2):
    state, _ = learner.value_update(state, batch)
  assert_close(host(together.value_trainable), host(state.value_trainable), rtol=1e-6, atol=1e-7)


def test_value_warm_up_leaves_the_policy_alone():
  learner = make_learner()
  state = start(learner)
  before = host((state.policy, state.policy_opt, state.value_frozen))
  trainable = host(state.value_trainable)
  state, metrics = learner.update(state, make_batch(), version=0, train_policy=False)
  jax.tree.map(np.testing.assert_array_equal, before, host((state.policy, state.policy_opt, state.value_frozen)))
  assert all(np.any(trainable[p] != x) for p, x in host(state.value_trainable).items())
  assert not any(name.startswith(('policy', 'dis', 'ratio')) for name in metrics)


def test_frozen_leaves_by_whole_path_components():
  """Per block 6 leaves inside attention (q, k, v, out, two norms); embeddings; the norm before attention trains."""
  learner = make_learner(model=dict(num_layers=2, qkv_bias=True))
  state = learner.abstract_state('rl')
  assert len(state.value_frozen) == 2 * 9 + 1
  assert len(state.value_trainable) == 2 * 5 + 1 + 2
  assert 'trunk.layers.0.attention_norm.scale' in state.value_trainable
  assert 'trunk.layers.1.attention.query_norm.scale' in state.value_frozen
  moments = [x for x in jax.tree.leaves(state.value_opt) if x.dtype == np.float32]
  assert len(moments) == 2 * len(state.value_trainable)
  assert make_learner(value_freeze='nothing').abstract_state('rl').value_frozen == {}
  assert is_frozen('a.attention.b', 'attention_and_embeddings') and not is_frozen('a.attention_out.b', 'attention_and_embeddings')


@pytest.mark.parametrize('truncation,count', [
    pytest.param('bootstrap', 'all', marks=SLOW), pytest.param('zero', 'all', marks=SLOW), ('drop', 'rest')])
def test_b04_truncation_settings(truncation, count):
  learner = make_learner(algorithm=dict(truncation=truncation), value_steps=1)
  batch = make_batch()
  rest = batch.action_mask & ~batch.truncated[:, None]
  value = start_params()[1]
  bootstrap = dense_values(value, learner.config, batch)[1]
  bootstrap = bootstrap if truncation == 'bootstrap' else np.zeros(ROWS, np.float32)
  zeros, mask = np.zeros(rest.shape, np.float32), batch.action_mask if count == 'all' else rest
  target = algorithms.skip_observation_gae(batch.reward, zeros, bootstrap, mask, gamma=1.0, gae_lambda=1.0)[1]
  _, metrics = learner.update(start(learner), batch, version=0, train_policy=True)
  metrics = learner.fetch(metrics, 0)
  np.testing.assert_allclose(metrics['value/target_mean'].total, np.sum(target), rtol=1e-4, atol=1e-4)
  assert metrics['policy/loss'].count == metrics['value/loss'].count == mask.sum()
  rows = batch.action_mask.any(axis=1)
  np.testing.assert_allclose(metrics['batch/truncated_fraction'].mean(), batch.truncated[rows].mean())


def test_b06_everything_dropped_changes_nothing_even_with_momentum():
  learner = make_learner(algorithm=dict(truncation='drop'))
  state, _ = learner.update(start(learner), make_batch(), version=0, train_policy=True)
  before = host(dataclasses.replace(state, step=0))
  state, metrics = learner.update(state, make_batch(1, all_truncated=True), version=0, train_policy=True)
  jax.tree.map(np.testing.assert_array_equal, before, host(dataclasses.replace(state, step=0)))
  metrics = learner.fetch(metrics, 1)
  assert metrics['policy/loss'].total == 0 and metrics['policy/loss'].count == 0
  assert all(s.count == 0 for name, s in metrics.items() if name != 'batch/truncated_fraction')


def test_b06_denominator_counts_the_complete_rows_only():
  """Three rows of which two are cut at 8 tokens and one of 4 is complete: divide by 4, not 20."""
  learner = make_learner(algorithm=dict(truncation='drop'))
  batch = make_batch()
  mask = np.zeros((ROWS, LENGTH), bool)
  mask[:2, 1:9], mask[2, 1:5] = True, True
  truncated = np.arange(ROWS) < 2
  batch = dataclasses.replace(batch, token_mask=np.ones_like(mask), action_mask=mask, truncated=truncated)
  metrics = learner.fetch(learner.update(start(learner), batch, version=0, train_policy=True)[1], 0)
  assert metrics['policy/loss'].count == 4 and metrics['dis/kept_fraction'].count == 4 and metrics['value/loss'].count == 4


def test_b07_poison_off_the_actions_and_in_padding_changes_no_bit():
  learner = make_learner()
  batch = make_batch()
  poison = lambda x: np.where(batch.action_mask, x, np.nan).astype(np.float32)
  dirty = dataclasses.replace(
      batch, behaviour_log_prob=poison(batch.behaviour_log_prob), reward=poison(batch.reward),
      tokens=np.where(batch.token_mask, batch.tokens, VOCAB - 1), policy_version=np.where(batch.action_mask, batch.policy_version, 1))
  before = host(start(learner))
  one, two = (host(learner.update(start(learner), b, version=1, train_policy=True)) for b in (batch, dirty))
  jax.tree.map(np.testing.assert_array_equal, one, two)
  assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(two))
  assert any(np.any(x != y) for x, y in zip(jax.tree.leaves(before.policy), jax.tree.leaves(two[0].policy), strict=True))


@pytest.mark.parametrize('field', ['reward', 'behaviour_log_prob'])
def test_a_non_finite_step_is_refused_and_named(field):
  learner = make_learner()
  state, _ = learner.update(start(learner), make_batch(), version=0, train_policy=True)
  before = host(dataclasses.replace(state, step=0))
  batch = make_batch(1)
  bad = np.where(batch.action_mask, getattr(batch, field), 0.0).astype(np.float32)
  bad[tuple(np.argwhere(batch.action_mask)[0])] = np.nan
  state, metrics = learner.update(state, dataclasses.replace(batch, **{field: bad}), version=0, train_policy=True)
  after = host(dataclasses.replace(state, step=0))
  changed = ('value_trainable', 'value_opt') if field == 'behaviour_log_prob' else ()  # The value steps were good ones.
  for name in ('policy', 'policy_opt', 'value_trainable', 'value_opt'):
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(getattr(after, name)))
    if name not in changed:
      jax.tree.map(np.testing.assert_array_equal, getattr(before, name), getattr(after, name))
  with pytest.raises(FloatingPointError, match=r'Update 7: [a-z]+/[a-z_0-9]+ is not finite'):
    learner.fetch(metrics, 7)


@pytest.mark.parametrize('temperature', [0.7, pytest.param(0.5, marks=SLOW), pytest.param(1.3, marks=SLOW)])
def test_b09_same_weights_same_log_probs_at_any_temperature(temperature):
  """The sampler's log-probabilities, here of full logits / T, equal the learner's; values do not know the temperature."""
  learner = make_learner(temperature=temperature)
  batch = make_batch()
  want = np.where(batch.action_mask, dense_log_prob(start_params()[0], learner.config, batch.tokens, temperature), 0.0)
  version = np.where(batch.action_mask, 4, -1).astype(np.int32)
  batch = dataclasses.replace(batch, behaviour_log_prob=want.astype(np.float32), policy_version=version)
  state = start(learner)
  log_prob, entropy = learner.log_probs(state.policy, batch)
  np.testing.assert_allclose(log_prob, want, rtol=1e-5, atol=1e-5)
  assert np.all(np.asarray(entropy)[batch.action_mask] > 0)
  value, bootstrap = learner.values(state, batch)
  dense = dense_values(start_params()[1], learner.config, batch)
  np.testing.assert_allclose(value, dense[0], rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(bootstrap, dense[1], rtol=1e-4, atol=1e-5)
  metrics = learner.fetch(learner.update(state, batch, version=4, train_policy=True)[1], 0)
  gap = metrics['sampler_vs_learner/log_prob_gap_max']
  assert gap.count == 1 and gap.total < 1e-4
  assert metrics['ratio/outside_1pct'].total == 0 and metrics['ratio/outside_1pct'].count == batch.action_mask.sum()


@SLOW
def test_advantages_use_the_values_that_the_settings_name():
  batch, means = make_batch(), {}
  for choice in ('after_update', 'before_update'):
    learner = make_learner(algorithm=dict(advantage_values=choice, gae_lambda=1.0))
    state = start(learner)
    before = host(learner.values(state, batch))
    state, metrics = learner.update(state, batch, version=0, train_policy=True)
    value, bootstrap = host(learner.values(state, batch)) if choice == 'after_update' else before
    advantage = algorithms.skip_observation_gae(batch.reward, value, bootstrap, batch.action_mask, gamma=1.0, gae_lambda=1.0)[0]
    means[choice] = learner.fetch(metrics, 0)['advantage/mean'].total
    np.testing.assert_allclose(means[choice], np.sum(advantage), rtol=1e-3, atol=1e-3)
  assert abs(means['after_update'] - means['before_update']) > 0.01


def test_no_array_holds_the_logits_of_all_positions():
  """Nor of a quarter of them: the largest array with the vocabulary in it is a chunk or the embedding."""
  learner = make_learner(model=dict(vocab_size=1009), logits_chunk=8)
  learner.warm_up('rl')
  text = learner._program('rl', ROWS, LENGTH, True).as_text()
  sizes = [math.prod(map(int, shape.split(','))) for shape in re.findall(r'f32\[([\d,]+)\]', text) if '1009' in shape.split(',')]
  assert len(sizes) > 10 and max(sizes) <= 1009 * max(8, learner.config.model.embed_dim)
  assert ROWS * LENGTH > 4 * max(8, learner.config.model.embed_dim)


def test_value_model_starts_from_the_policy_with_a_zero_head():
  """B17: it shares no buffer with the policy, and keeps its embedding."""
  learner = make_learner()
  state = learner.begin_stage(learner.init_state(jax.device_put(start_params()[0])), 'rl')
  value = state.value_trainable | state.value_frozen
  for path, x in value.items():
    np.testing.assert_array_equal(x, state.policy[path] if path in state.policy else np.zeros(x.shape))
  assert sorted(set(value) - set(state.policy)) == ['head', 'head_bias']
  state, _ = learner.update(state, make_batch(), version=0, train_policy=True)
  assert all(np.all(np.isfinite(x)) for x in host(state.policy).values())


def test_errors_name_what_is_wrong():
  learner = make_learner()
  state = start(learner)
  with pytest.raises(ValueError, match='8 rows of length 12'):
    learner.update(state, make_batch(length=13), version=0, train_policy=True)
  with pytest.raises(ValueError, match='Batch.tokens must be int32, got int64'):
    batch = make_batch()
    learner.update(state, dataclasses.replace(batch, tokens=batch.tokens.astype(np.int64)), version=0, train_policy=True)
  with pytest.raises(ValueError, match='Unknown stage'):
    learner.begin_stage(state, 'warm')
  with pytest.raises(ValueError, match='warm start'):
    learner.begin_stage(state, 'sft')
  with pytest.raises(ValueError, match='missing or unknown: head'):
    learner.init_state(start_params()[1])
  with pytest.raises(ValueError, match='learner.batch_size must be a multiple'):
    make_learner(micro_batches=3)
