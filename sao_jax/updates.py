"""The update as pure functions: K value steps, values again, advantages, one policy step.

    targets   returns at lambda 1; the bootstrap of truncated rollouts is from the first value step's own forward pass
    value     K steps on the mean squared error to those fixed targets; frozen leaves get no gradient
    policy    advantages from the values after (or before) these steps, then one step on the objective

A rollout of several segments is a chain of rows; advantages, targets and whatever counts rollouts run over whole chains. Its rows may lie
in different micro-batches and on different devices: what goes along a chain is computed for the whole batch at once, outside of
micro-batches. With several of these, the bootstrap values that the targets need come from a forward pass of their own.

Losses travel as totals; they and their gradients are divided once, by counts of the whole global batch, so that micro-batches and devices
change nothing but round-off.

With experts and `learner.balance_coefficient`, the policy also learns to use them evenly. That loss multiplies shares of the whole batch,
so with several micro-batches a first forward pass counts the choices of all of them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable

import jax
import jax.numpy as jnp
import optax

from sao_jax import algorithms, log_probs, optim
from sao_jax.config import Config
from sao_jax.masking import masked_stat, masked_variance
from sao_jax.models import attention, moe, transformer
from sao_jax.types import Batch, Params, Stat

Metrics = dict[str, Stat]
NEVER_LEARN = ('indexer', 'correction')  # Parts of the model that only make a choice: no gradient reaches them.


def is_frozen(path: str, freeze: str, *, freeze_router: bool = False) -> bool:
  """Whether the leaf at `path` has no gradient and no optimizer state.

  Decided by whole components of the path: 'attention_norm', the norm before the block, is not 'attention'.

  Args:
    path: dotted path of the leaf.
    freeze: 'attention_and_embeddings' (all inside an attention block, its norms and index too) or 'nothing'; for the policy 'nothing'.
    freeze_router: whether the routers of experts are frozen.
  """
  names = {*NEVER_LEARN}
  if freeze == 'attention_and_embeddings':
    names |= {'attention', 'embedding'}
  if freeze_router:
    names.add('router')
  return bool(names & set(path.split('.')))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """Everything that training changes.

  Attributes:
    policy: parameters of the policy.
    policy_opt: its optimizer state in this stage; () where the stage does not train it.
    value_trainable, value_frozen: parameters of the value model, split by path; both empty before the value model exists.
    value_opt: optimizer state of `value_trainable` alone; () where the stage does not train it.
    step: i32[], updates done, over all stages.
  """

  policy: Params
  policy_opt: Any
  value_trainable: Params
  value_frozen: Params
  value_opt: Any
  step: jax.Array


@dataclasses.dataclass(frozen=True)
class Updates:
  """The update functions of one run; static, closed over by jit.

  Attributes:
    config: the settings.
    shard: constrains an activation by logical axes.
    groups: number of shards of the batch axis.
    constrain: puts gradients, by path, into the sharding of their parameters.
  """

  config: Config
  shard: log_probs.Shard
  groups: int
  constrain: Callable[[Params], Params]

  # --- Stages ------------------------------------------------------------------------------------------------------------------

  def rl(
      self, policy_optimizer: optax.GradientTransformation, value_optimizer: optax.GradientTransformation,
      state: TrainState, batch: Batch, version: jax.Array, *, train_policy: bool,
  ) -> tuple[TrainState, Metrics]:
    """K value steps, and one policy step unless `train_policy` is False (value warm-up); `version` i32[] is the current one."""
    batch, metrics = self._selected(batch)
    steps = self.config.learner.value_steps
    state, target, before, metrics_ = self._value_steps(value_optimizer, state, batch, steps)
    metrics |= metrics_
    if train_policy:
      after = self.config.algorithm.advantage_values == 'after_update'
      value, bootstrap = self.values(state.value_trainable | state.value_frozen, batch) if after else before
      advantage = self._advantages(batch, value, bootstrap)
      state, metrics_ = self._policy_step(policy_optimizer, state, batch, advantage, version)
      metrics |= metrics_
    return dataclasses.replace(state, step=state.step + 1), metrics

  def value(self, optimizer: optax.GradientTransformation, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    """One value step (value pretraining)."""
    batch, metrics = self._selected(batch)
    state, _, _, metrics_ = self._value_steps(optimizer, state, batch, 1)
    return dataclasses.replace(state, step=state.step + 1), metrics | metrics_

  def sft(self, optimizer: optax.GradientTransformation, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    """One supervised step: mean negative log-likelihood of the action tokens at temperature 1."""
    actions = jnp.sum(batch.action_mask, dtype=jnp.float32)
    gradient, terms, experts = self._policy_gradient(state.policy, batch, algorithms.supervised_loss, (), actions, temperature=1.0)
    loss = terms.stats['loss']
    state, norm = self._apply_policy(optimizer, state, gradient, loss, finite=jnp.bool_(True))
    metrics = {'sft/loss': loss, 'sft/grad_norm': norm, 'sft/entropy': masked_stat(terms.entropy, batch.action_mask)}
    return dataclasses.replace(state, step=state.step + 1), metrics | experts

  # --- Forward passes ----------------------------------------------------------------------------------------------------------

  def values(self, params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """value f32[B, T], of the state before each token, and bootstrap_value f32[B] under the `truncation` setting."""
    return self._over_micro_batches(lambda part: ((), self._value_forward(params, part)), batch)[1]

  def log_probs(self, params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """log_prob and entropy f32[B, T] of the action tokens at the sampling temperature, 0 elsewhere; the code of training."""

    def forward(part: Batch) -> tuple[tuple[()], tuple[jax.Array, jax.Array]]:
      path, unembed = self._head(params)
      head = self._make_head(unembed, self.config.sampler.temperature)
      terms = log_probs.token_terms(
          head, self._hidden(params, part), params[path], part.tokens, part.action_mask, algorithms.supervised_loss, (),
          with_gradient=False)
      return (), (terms.log_prob, terms.entropy)

    return self._over_micro_batches(forward, batch)[1]

  def _hidden(self, params: Params, batch: Batch) -> jax.Array:
    return self._hidden_and_load(params, batch)[0]

  def _hidden_and_load(self, params: Params, batch: Batch) -> tuple[jax.Array, moe.Load | None]:
    """Hidden states, and how the real tokens (prompts, observations, actions; never padding) used the experts."""
    model = transformer.merge(transformer.Policy, self.config.model, params)
    attend = attention.make(self.config.model)
    return model.hidden_and_load(batch.tokens, _positions(batch.tokens), attend, batch.token_mask, shard=self.shard)

  def _value_forward(self, params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
    model = transformer.merge(transformer.ValueModel, self.config.model, params)
    # after[t]: value of the state once tokens[t] is seen.
    after = model(batch.tokens, _positions(batch.tokens), attention.make(self.config.model), shard=self.shard)
    value = jnp.concatenate([jnp.zeros_like(after[:, :1]), after[:, :-1]], axis=1)
    last = jnp.maximum(jnp.sum(batch.token_mask, axis=1, dtype=jnp.int32) - 1, 0)
    bootstrap = jnp.take_along_axis(after, last[:, None], axis=1)[:, 0]
    use = batch.truncated & (self.config.algorithm.truncation == 'bootstrap')
    return value, jnp.where(use, bootstrap, 0.0)

  def _head(self, params: Params) -> tuple[str, Callable[[jax.Array, jax.Array], jax.Array]]:
    """Path of the unembedding, and (hidden, that weight) -> logits."""
    path = 'trunk.embedding' if self.config.model.tie_embeddings else 'unembedding'

    def unembed(hidden: jax.Array, weight: jax.Array) -> jax.Array:
      return transformer.merge(transformer.Policy, self.config.model, params | {path: weight}).logits(hidden)

    return path, unembed

  def _make_head(self, unembed: Callable[[jax.Array, jax.Array], jax.Array], temperature: float) -> log_probs.Head:
    chunk = self.config.learner.logits_chunk or log_probs.chunk_for(self.config.model.vocab_size)
    return log_probs.Head(unembed=unembed, temperature=temperature, chunk=chunk, groups=self.groups, shard=self.shard)

  # --- Value model -------------------------------------------------------------------------------------------------------------

  def _value_steps(
      self, optimizer: optax.GradientTransformation, state: TrainState, batch: Batch, steps: int
  ) -> tuple[TrainState, jax.Array, tuple[jax.Array, jax.Array], Metrics]:
    """`steps` optimizer steps; also the targets f32[B, T], (values, bootstrap values) before the first step, and metrics."""
    target, before, losses, norms = None, None, [], []
    if not steps:  # No value learning; where the estimator does not use the values, the compiler leaves this forward pass out.
      value, bootstrap = self.values(state.value_trainable | state.value_frozen, batch)
      return state, jnp.zeros_like(value), (value, bootstrap), {}
    if self._follows(batch) is not None and self.config.learner.micro_batches > 1:
      target = self._chained_target(state, batch)
    for _ in range(steps):
      gradient, loss, seen = self._value_gradient(state, batch, target)
      if before is None:
        target, before = seen[0], seen[1:]
      mean, gradient, norm = _normalise(loss, gradient)
      accept = _acceptable(mean, norm, loss.count)
      trainable, value_opt = optim.apply(optimizer, gradient, state.value_opt, state.value_trainable, accept=accept)
      state = dataclasses.replace(state, value_trainable=trainable, value_opt=value_opt)
      losses.append(loss)
      norms.append(norm)
    explained = algorithms.explained_variance(before[0], target, batch.action_mask)
    varies = (masked_variance(target, batch.action_mask) > 0).astype(jnp.float32)
    metrics = {
        'value/loss': losses[0], 'value/last_loss': losses[-1],
        'value/grad_norm': Stat(sum(norms), jnp.where(losses[0].count > 0, float(steps), 0.0)),
        'value/explained_variance': Stat(explained, varies),
        'value/mean': masked_stat(before[0], batch.action_mask), 'value/target_mean': masked_stat(target, batch.action_mask),
    }
    return state, target, before, metrics

  def _value_gradient(
      self, state: TrainState, batch: Batch, target: jax.Array | None
  ) -> tuple[Params, Stat, tuple[jax.Array, jax.Array, jax.Array]]:
    """Gradient of the loss total by the trainable leaves, the loss, and (target, value, bootstrap value) of this forward pass."""

    def total(trainable: Params, part: Batch, target: jax.Array | None) -> tuple[jax.Array, Any]:
      value, bootstrap = self._value_forward(trainable | state.value_frozen, part)
      if target is None:
        target = self._target(part, jax.lax.stop_gradient(bootstrap))
      loss = algorithms.squared_error_value_loss(value, target, part.action_mask)['loss']
      return loss.total, (loss, (target, value, bootstrap))

    def gradient(part: tuple[Batch, jax.Array | None]) -> tuple[tuple[Params, Stat], Any]:
      gradient, (loss, seen) = jax.grad(total, has_aux=True)(state.value_trainable, *part)
      return (self.constrain(gradient), loss), seen

    (gradients, loss), seen = self._over_micro_batches(gradient, (batch, target))
    return gradients, loss, seen

  def _target(self, batch: Batch, bootstrap: jax.Array) -> jax.Array:
    """Returns at lambda 1, f32[B, T]."""
    return algorithms.skip_observation_gae(
        batch.reward, jnp.zeros_like(batch.reward), bootstrap, batch.action_mask, gamma=self.config.algorithm.gamma, gae_lambda=1.0,
        follows=self._follows(batch))[1]

  def _chained_target(self, state: TrainState, batch: Batch) -> jax.Array:
    """The same of a batch whose chains may be split over micro-batches; a forward pass where trajectories are bootstrapped."""
    bootstrap = jnp.zeros(batch.truncated.shape, jnp.float32)
    if self.config.algorithm.truncation == 'bootstrap':
      bootstrap = self.values(state.value_trainable | state.value_frozen, batch)[1]
    return self._target(batch, bootstrap)

  def _follows(self, batch: Batch) -> jax.Array | None:
    """Which rows continue the one before; None where the settings allow no rollout of several rows."""
    return batch.follows if self.config.task.max_segments > 1 else None

  # --- Policy ------------------------------------------------------------------------------------------------------------------

  def _advantages(self, batch: Batch, value: jax.Array, bootstrap: jax.Array) -> jax.Array:
    """f32[B, T] from the estimator that the settings name."""
    c, follows = self.config.algorithm, self._follows(batch)
    if c.gae_lambda < 0:
      gae_lambda = algorithms.length_adaptive_lambda(batch.action_mask, alpha=c.lambda_alpha, follows=follows)
    else:
      gae_lambda = jnp.float32(c.gae_lambda)
    estimator = algorithms.ADVANTAGES[c.advantage]
    return estimator(batch.reward, value, bootstrap, batch.action_mask, gamma=c.gamma, gae_lambda=gae_lambda, follows=follows)[0]

  def _policy_step(
      self, optimizer: optax.GradientTransformation, state: TrainState, batch: Batch, advantage: jax.Array, version: jax.Array
  ) -> tuple[TrainState, Metrics]:
    """One optimizer step of the policy on the objective that the settings name."""
    c, mask, follows = self.config.algorithm, batch.action_mask, self._follows(batch)
    weighted, rollouts = advantage, jnp.sum(algorithms.rollouts(mask, follows), dtype=jnp.float32)
    if c.denominator == 'trajectory':  # Each rollout is its mean over tokens; objectives scale with the advantage.
      weighted = advantage / jnp.maximum(algorithms.num_actions(mask, follows), 1.0)[:, None]

    def objective(log_prob: jax.Array, behaviour: jax.Array, advantage: jax.Array, mask: jax.Array) -> Metrics:
      bounds = dict(epsilon_low=c.epsilon_low, epsilon_high=c.epsilon_high)
      return algorithms.OBJECTIVES[c.objective](log_prob, behaviour, advantage, mask, **bounds)

    expected = rollouts if c.denominator == 'trajectory' else jnp.sum(mask, dtype=jnp.float32)
    gradient, terms, experts = self._policy_gradient(
        state.policy, batch, objective, (batch.behaviour_log_prob, weighted), expected, temperature=self.config.sampler.temperature)
    stats = terms.stats
    count = {'action_tokens': stats['loss'].count, 'kept_tokens': stats['kept_fraction'].total, 'trajectory': rollouts}[c.denominator]
    loss = Stat(stats['loss'].total, count)
    # An objective may skip the token with the bad advantage: such a step is refused all the same.
    state, norm = self._apply_policy(optimizer, state, gradient, loss, finite=jnp.isfinite(jnp.sum(advantage)))
    metrics = {'policy/loss': loss, 'policy/grad_norm': norm, 'policy/entropy': masked_stat(terms.entropy, mask)}
    metrics |= {f'{c.objective}/{name}': stats[name] for name in ('kept_fraction', 'above', 'below')}
    metrics |= {'advantage/mean': masked_stat(advantage, mask), 'advantage/abs_mean': masked_stat(jnp.abs(advantage), mask)}
    return state, metrics | experts | _ratio_metrics(terms.log_prob, batch, version)

  def _policy_gradient(
      self, params: Params, batch: Batch, objective: log_probs.Objective, inputs: tuple[jax.Array, ...], count: jax.Array,
      *, temperature: float
  ) -> tuple[Params, log_probs.TokenTerms, Metrics]:
    """Gradient of the objective's total by every parameter that learns, the terms (without their gradients), and expert metrics.

    `count` f32[] is what the gradient will be divided by: the load-balancing loss, which is a mean already, is multiplied by it.
    """
    path, unembed = self._head(params)
    head = self._make_head(unembed, temperature)
    learns = {p: x for p, x in params.items() if not self.policy_frozen(p)}
    coefficient, of_all = self.config.learner.balance_coefficient, self._load_of_all(params, batch)

    def gradient(part: tuple[Batch, tuple[jax.Array, ...]]) -> tuple[tuple[Params, Metrics, moe.Load | None], Any]:
      batch, inputs = part
      trunk = {p: x for p, x in learns.items() if p != path or self.config.model.tie_embeddings}
      (hidden, loss), back, load = jax.vjp(lambda trunk: self._hidden_and_balance(params | trunk, batch, of_all), trunk, has_aux=True)
      weight = self.shard(params[path], ('vocab', 'embed') if self.config.model.tie_embeddings else ('embed', 'vocab'))
      terms = log_probs.token_terms(
          head, hidden, weight, batch.tokens, batch.action_mask, objective, inputs, with_gradient=True)
      gradients = back((terms.hidden_gradient, None if loss is None else coefficient * count))[0]
      gradients[path] = gradients[path] + terms.weight_gradient if path in gradients else terms.weight_gradient
      return (self.constrain(gradients), terms.stats, load), (terms.log_prob, terms.entropy)

    (gradients, stats, load), (log_prob, entropy) = self._over_micro_batches(gradient, (batch, inputs))
    return gradients, log_probs.TokenTerms(log_prob, entropy, stats, None, None), {} if load is None else _expert_metrics(load)

  def policy_frozen(self, path: str) -> bool:
    """Whether a leaf of the policy learns nothing."""
    return is_frozen(path, 'nothing', freeze_router=self.config.learner.freeze_router)

  def _hidden_and_balance(
      self, params: Params, batch: Batch, of_all: moe.Load | None
  ) -> tuple[tuple[jax.Array, jax.Array | None], moe.Load | None]:
    """(hidden states, this part of the load-balancing loss or None where its coefficient is 0), and the load."""
    hidden, load = self._hidden_and_load(params, batch)
    if load is None or not self.config.learner.balance_coefficient:
      return (hidden, None), load
    whole = load if of_all is None else of_all
    return (hidden, moe.balance_loss(load, whole.chosen, whole.tokens)), load

  def _load_of_all(self, params: Params, batch: Batch) -> moe.Load | None:
    """Load of all micro-batches together, where the load-balancing loss needs it; it costs a forward pass."""
    learner = self.config.learner
    if learner.micro_batches == 1 or not learner.balance_coefficient or not self.config.model.experts.count:
      return None
    return jax.lax.stop_gradient(self._over_micro_batches(lambda part: (self._hidden_and_load(params, part)[1], ()), batch)[0])

  def _apply_policy(
      self, optimizer: optax.GradientTransformation, state: TrainState, gradient: Params, loss: Stat, *, finite: jax.Array
  ) -> tuple[TrainState, Stat]:
    """One optimizer step on the gradient of loss.total / loss.count, if `finite`; also the gradient norm before clipping."""
    mean, gradient, norm = _normalise(loss, gradient)
    accept = _acceptable(mean, norm, loss.count) & finite
    learns = {p: state.policy[p] for p in gradient}
    learns, policy_opt = optim.apply(optimizer, gradient, state.policy_opt, learns, accept=accept)
    state = dataclasses.replace(state, policy=state.policy | learns, policy_opt=policy_opt)
    return state, Stat(norm, jnp.where(loss.count > 0, 1.0, 0.0))

  # --- Batches -----------------------------------------------------------------------------------------------------------------

  def _selected(self, batch: Batch) -> tuple[Batch, Metrics]:
    """The batch with truncated rollouts taken out under 'drop' (also from every denominator), and the share of truncated rollouts."""
    rollouts = algorithms.rollouts(batch.action_mask, self._follows(batch))
    metrics = {'batch/truncated_fraction': masked_stat(batch.truncated.astype(jnp.float32), rollouts)}
    if self.config.algorithm.truncation == 'drop':
      batch = dataclasses.replace(batch, action_mask=batch.action_mask & ~batch.truncated[:, None])
    return batch, metrics

  def _over_micro_batches(self, f: Callable[[Any], tuple[Any, Any]], rows: Any) -> tuple[Any, Any]:
    """Runs f(part of rows) -> (sums, per row) over `micro_batches` parts: sums are added, what is per row is put together again.

    Part m takes rows m, m + M, ...: each device keeps its own rows in every part.
    """
    parts = self.config.learner.micro_batches
    if parts == 1:
      return f(rows)

    def split(x: jax.Array) -> jax.Array:  # [B, ...] -> [M, B / M, ...]
      x = x.reshape((x.shape[0] // parts, parts) + x.shape[1:]).swapaxes(0, 1)
      return self.shard(x, (None, 'batch') + (None,) * (x.ndim - 2))

    def join(x: jax.Array) -> jax.Array:
      return x.swapaxes(0, 1).reshape((-1,) + x.shape[2:])

    def step(sums: Any, part: Any) -> tuple[Any, Any]:
      more, per_row = f(part)
      return jax.tree.map(jnp.add, sums, more), per_row

    split_rows = jax.tree.map(split, rows)
    shapes = jax.eval_shape(f, jax.tree.map(lambda x: x[0], split_rows))[0]
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    sums, per_row = jax.lax.scan(step, zeros, split_rows)
    return sums, jax.tree.map(join, per_row)


def _positions(tokens: jax.Array) -> jax.Array:
  """i32[B, T]; rows start at position 0 and are padded on the right."""
  return jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)


def _normalise(loss: Stat, gradient: Params) -> tuple[jax.Array, Params, jax.Array]:
  """Mean loss, its gradient and the global norm of that, from totals; all 0 where the count is 0."""
  scale = jnp.where(loss.count > 0, 1.0 / jnp.maximum(loss.count, 1.0), 0.0)
  gradient = jax.tree.map(lambda g: g * scale.astype(g.dtype), gradient)
  return loss.total * scale, gradient, optax.tree.norm(gradient)


def _acceptable(loss: jax.Array, norm: jax.Array, count: jax.Array) -> jax.Array:
  """bool[]: whether a step may change anything: finite, and with something to learn from."""
  return jnp.isfinite(loss) & jnp.isfinite(norm) & (count > 0)


def _expert_metrics(load: moe.Load) -> Metrics:
  """How evenly the tokens of a batch used the experts, as means over layers."""
  some = (jnp.sum(load.tokens) > 0).astype(jnp.float32)
  mean = jnp.maximum(jnp.mean(load.chosen, axis=-1), 1e-9)
  values = {
      'balance_loss': moe.balance_loss(load, load.chosen, load.tokens),
      'load_max_over_mean': jnp.mean(jnp.max(load.chosen, axis=-1) / mean),
      'unused_fraction': jnp.mean((load.chosen == 0).astype(jnp.float32))}
  return {f'experts/{name}': Stat(value * some, some) for name, value in values.items()}


def _ratio_metrics(log_prob: jax.Array, batch: Batch, version: jax.Array) -> Metrics:
  """Quantiles of the log-ratio to the sampler, and its gap on tokens that the current version drew."""
  mask = batch.action_mask
  log_ratio = jnp.where(mask, log_prob - batch.behaviour_log_prob, 0.0)
  count = jnp.sum(mask, dtype=jnp.int32)
  ordered = jnp.sort(jnp.where(mask, log_ratio, jnp.inf).reshape(-1))
  some = (count > 0).astype(jnp.float32)
  metrics = {}
  for percent in (1, 50, 99):
    index = jnp.round((count - 1).astype(jnp.float32) * (percent / 100)).astype(jnp.int32)
    metrics[f'ratio/log_p{percent:02d}'] = Stat(jnp.where(count > 0, ordered[jnp.maximum(index, 0)], 0.0), some)
  same = mask & (batch.policy_version == version)
  gap = jnp.max(jnp.where(same, jnp.abs(log_ratio), 0.0))
  metrics['sampler_vs_learner/log_prob_gap_max'] = Stat(gap, jnp.any(same).astype(jnp.float32))
  off = same & ((log_ratio < jnp.log(0.99)) | (log_ratio > jnp.log(1.01)))
  metrics['ratio/outside_1pct'] = Stat(jnp.sum(off, dtype=jnp.float32), jnp.sum(same, dtype=jnp.float32))
  return metrics
