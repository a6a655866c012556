"""What a run is made of, built once from its settings: `build` checks, allocates, and starts nothing.

`Parts` holds what does not change during a run; `Progress` is where the run stands, and with the learner's `TrainState` all that a
checkpoint needs. Both belong to the main thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pathlib
import threading
import time
from typing import Any, Callable, Iterator, Sequence

import jax
from sao_jax import batching, environments, evaluation, memory, prng, report, sharding
from sao_jax.checkpoint import Checkpointer
from sao_jax.clock import InlineCalls
from sao_jax.config import Config, ModelConfig, SamplerConfig
from sao_jax.data import heldout
from sao_jax.environments.base import Environment, Task
from sao_jax.learner import Learner
from sao_jax.metrics import Ledger, MetricsWriter
from sao_jax.models import conversation, pretrained, tokenizers, transformer
from sao_jax.rollouts import Calls, Flow, RolloutEngine
from sao_jax.sampler import Sampler
from sao_jax.types import Batch, ParamSnapshot, Params, Rollout
from sao_jax.updates import TrainState
from sao_jax.workers import EnvironmentPool, bounded

CLOSE_S = 5.0  # For environments to be closed after an evaluation.
STAGES = ('sft', 'value_pretrain', 'rl', 'done')


@dataclasses.dataclass
class Progress:
  """Where a run stands."""

  stage: str = 'sft'
  stage_step: int = 0  # Learner steps done in this stage.
  step: int = 0  # Learner steps done in all stages: the x-axis of the metrics.
  version: int = 0  # Of the policy; policy steps of RL done.
  saves: int = 0  # Number of the last checkpoint.
  metric_rows: int = 0  # Rows of metrics written by then.
  ledger_rows: int = 0  # Lines of the ledger written by then.
  evaluation: dict[str, Any] = dataclasses.field(default_factory=dict)
  evaluation_due: str = ''  # Name of an evaluation that was begun and not finished.
  seconds: dict[str, float] = dataclasses.field(default_factory=dict)  # By stage.
  rl: dict[str, Any] | None = None  # State of the RL stage: queue, prompts, sessions, clock.


@dataclasses.dataclass
class Parts:
  """Everything a stage works with."""

  config: Config
  model: ModelConfig
  workdir: pathlib.Path
  tokenizer: tokenizers.Tokenizer
  conversation: conversation.Conversation
  environment: Environment  # For tasks and demonstrations; each rollout makes its own.
  learner: Learner
  learner_mesh: jax.sharding.Mesh
  sampler_mesh: jax.sharding.Mesh
  convert: Callable[[Params], Params]  # From the learner's layout to the sampler's, sharing no buffer.
  checkpointer: Checkpointer
  progress_bar: report.ProgressBar
  stop: threading.Event = dataclasses.field(default_factory=threading.Event)  # Set from anywhere to end the run, with a checkpoint.
  writer: MetricsWriter | None = None  # This and the ledger are opened when it is known at which step the run goes on.
  ledger: Ledger | None = None

  def open_files(self, progress: Progress) -> None:
    self.writer = MetricsWriter(
        self.workdir, tensorboard=self.config.logging.tensorboard, resume_step=progress.step, resume_rows=progress.metric_rows)
    self.ledger = Ledger(self.workdir, resume_step=progress.step)
    for file, found, saved in (
        ('metrics.jsonl', self.writer.rows, progress.metric_rows), ('ledger.jsonl', self.ledger.rows, progress.ledger_rows)):
      if found != saved:
        raise ValueError(
            f'{self.workdir / file} has {found} of the {saved} rows that belong to the checkpoint; restore the file, or use another '
            '--workdir.')

  def close(self) -> None:
    """Ends writers; a checkpoint that is being written is finished first. Everything is closed, whatever fails."""
    with contextlib.ExitStack() as stack:
      stack.callback(self.progress_bar.close)
      if self.writer is not None:
        stack.callback(self.writer.close)
      stack.callback(self.checkpointer.close)
      stack.callback(bounded, self.environment.close, CLOSE_S, f'closing the environment {self.config.task.name!r}')

  def make_batch(self, rollouts: Sequence[Rollout], batch_size: int) -> Batch:
    """A padded batch of `batch_size` rollouts for the learner."""
    c = self.config
    return batching.make_batch(
        rollouts, lengths=c.learner.lengths, batch_size=batch_size, pad_id=self.tokenizer.pad_id, max_segments=c.task.max_segments)

  @property
  def max_length(self) -> int:
    return min(self.config.task.max_tokens, self.model.max_length)

  @property
  def shared_devices(self) -> bool:
    """Sampler and learner use the same several devices, and must take turns on them."""
    return self.learner_mesh.devices.size > 1 and set(self.learner_mesh.devices.flat) == set(self.sampler_mesh.devices.flat)

  def make_environment(self) -> Environment:
    return environments.make(self.config.task.name, **self.config.task.settings)

  def make_sampler(self, snapshot: ParamSnapshot, *, seed: int) -> Sampler:
    return Sampler(
        self.model, self.config.sampler, snapshot, tokenizer=self.tokenizer, seed=seed, max_length=self.max_length, mesh=self.sampler_mesh)

  def make_engine(self, sampler: Sampler, calls: Calls, flow: Flow, now: Callable[[], float]) -> RolloutEngine:
    return RolloutEngine(
        sampler=sampler, calls=calls, flow=flow, make_environment=self.make_environment, conversation=self.conversation,
        tokenizer=self.tokenizer, task=self.config.task, max_length=self.model.max_length, sessions=self.config.sampler.sessions, now=now)

  def run_prompts(
      self, params: Params, prompts: list[tuple[int, Task]], *, label: str, seed: int, version: int = 0, temperature: float | None = None
  ) -> evaluation.ListFlow:
    """Rolls out a fixed list of prompts with `params` (in the learner's layout), apart from any training that goes on.

    `temperature` 0 is greedy; None is that of training.
    """
    temperature = self.config.sampler.temperature if temperature is None else temperature
    snapshot = ParamSnapshot(version, self.convert(params))
    sampler = self.make_sampler(snapshot, seed=seed)  # Its cache lives only as long as this.
    sampler.reset(snapshot, seed=seed, temperature=temperature)
    with self.environment_calls() as calls:
      flow = evaluation.ListFlow(prompts)
      engine = self.make_engine(sampler, calls, flow, time.monotonic)
      try:
        evaluation.run_list(
            engine, flow, on_progress=lambda done: self.progress_bar.note(f'{label}: {done}/{len(prompts)}'), stop=self.stop)
      finally:
        engine.close()
      return flow

  @contextlib.contextmanager
  def environment_calls(self) -> Iterator[Calls]:
    """Environment calls apart from those of training: in threads, or on the spot under the virtual clock."""
    if self.config.clock.kind == 'virtual':
      yield InlineCalls()
      return
    pool = EnvironmentPool(self.config.task.workers, self.config.task.step_timeout_s)
    try:
      yield pool
    finally:
      pool.close(CLOSE_S)

  def evaluate(
      self, params: Params, *, version: int, prompts: int, label: str, temperature: float = 1.0
  ) -> dict[str, evaluation.Evaluation]:
    """Held-out success at `temperature`, as 'temperature_1', and greedily, as 'greedy'; whatever the temperature of training is."""
    held_out = heldout(self.environment, prompts, self.config.evaluation.seed)
    return {
        name: evaluation.summarize(self.run_prompts(
            params, held_out, label=f'evaluation {label}, {name}', seed=self.config.evaluation.seed, version=version,
            temperature=value))
        for name, value in (('temperature_1', temperature), ('greedy', 0.0))
    }


def build(config: Config, workdir: pathlib.Path, *, read_only: bool = False) -> Parts:
  """Builds the parts of a run. Raises ValueError for settings that do not fit together or the machine, before anything compiles.

  With `read_only` nothing is written to the workdir: its checkpoints are there to be read, also while a run is writing them.
  """
  model = pretrained.resolve_config(config.model)
  tokenizer = tokenizers.make(model)
  environment = environments.make(config.task.name, **config.task.settings)
  if model.vocab_size < tokenizer.vocab_size:
    raise ValueError(f'model.vocab_size must be at least the tokenizer\'s {tokenizer.vocab_size}, got {model.vocab_size}.')
  if config.task.compact_room and type(environment).compact is environments.Environment.compact:
    raise ValueError(
        f'task.compact_room={config.task.compact_room} needs an environment that can shorten a conversation, and {config.task.name!r} has '
        'no `compact`; use task.compact_room=0.')
  environment.check_run(
      workers=config.task.workers, sessions=config.sampler.sessions, step_timeout_s=config.task.step_timeout_s)
  config = dataclasses.replace(config, model=model)
  sharding.check_mesh(config)
  learner_mesh = sharding.make_mesh(sharding.pick_devices(config.learner.devices), config.learner.mesh)
  sampler_mesh = sharding.make_mesh(sharding.pick_devices(config.sampler.devices), config.sampler.mesh)
  learner = Learner(config, learner_mesh)
  memory.check(memory.items(config, learner, sampler_mesh, min(config.task.max_tokens, model.max_length)))
  _, shapes, axes = transformer.abstract(transformer.Policy, dataclasses.replace(model, param_dtype=config.sampler.dtype))
  dtypes = {path: s.dtype for path, s in shapes.items()}
  return Parts(
      config=config, model=model, workdir=workdir, tokenizer=tokenizer, environment=environment,
      conversation=conversation.make(tokenizer, environment.conversation, config.task.template), learner=learner,
      learner_mesh=learner_mesh, sampler_mesh=sampler_mesh,
      progress_bar=report.ProgressBar(enabled=config.logging.progress),
      convert=sharding.make_converter(sharding.param_shardings(axes, shapes, sampler_mesh), dtypes),
      checkpointer=Checkpointer(workdir / 'checkpoints', keep=config.checkpoint.keep, read_only=read_only))


def initial_state(parts: Parts) -> TrainState:
  """Policy from pretrained weights or from the seed; the value model is made from it when its first stage begins."""
  if parts.model.pretrained:
    policy = pretrained.load_params(parts.model, parts.learner_mesh)
  else:
    policy = parts.learner.init_policy(prng.stream(jax.random.key(parts.config.seed), 'policy'))
  return parts.learner.init_state(policy)


def num_parameters(params: Params) -> int:
  return sum(math.prod(x.shape) for x in params.values())
