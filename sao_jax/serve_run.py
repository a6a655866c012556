"""A policy behind the gateway, for any OpenAI client: the engine and the sampler of a run, conversations in the place of tasks.

Every conversation is a rollout whose exact tokens are written, when it ends, as one line of OUTPUT:

    {"conversation", "ending", "stop_reason", "tokens", "action_mask", "behaviour_log_prob", "policy_version", "turn", "segment_starts",
     "turns": what was asked and said}
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import pathlib
import threading
import time
from typing import Any, Callable, Mapping

from sao_jax import config as settings_lib, gateway
from sao_jax.config import AlgorithmConfig, Config
from sao_jax.environments.base import Task
from sao_jax.environments.served import Served
from sao_jax.evaluate_run import opened, policy_of
from sao_jax.gateway.switchboard import Switchboard
from sao_jax.rollouts import Admission, RolloutEngine
from sao_jax.types import ParamSnapshot, Rollout
from sao_jax.workers import EnvironmentPool

FOREVER_S = 7 * 24 * 3600.0
MAX_TURNS, MAX_SEGMENTS = 10_000, 64
CLOSE_S = 5.0


class ServeFlow:
  """Conversations in, lines out; implements `rollouts.Flow`. The ticket is the number of the conversation."""

  def __init__(self, board: Switchboard, output: pathlib.Path, sessions: int):
    self._board, self._sessions, self._open = board, sessions, 0
    self._file = open(output, 'a', encoding='utf-8')
    if _ends_in_half_a_line(output):
      self._file.write('\n')  # Else the first conversation would be lost with it.
    self.counts: collections.Counter[str] = collections.Counter()

  def admit(self, version: int) -> Admission | None:
    del version
    if self._open >= self._sessions:
      return None
    number = self._board.take()
    if number is None:
      return None
    self._open += 1
    return Admission(number, number, 0, Task(number, 'test', 0, {'conversation': number}))

  def make_room(self) -> None:
    """Where every place is taken, the quietest conversation ends for a new one."""
    if self._open >= self._sessions:
      self._board.make_room()

  def finish(self, rollout: Rollout, version: int) -> bool:
    del version
    error = None
    if rollout.ending == 'truncated':
      error = gateway.HttpError(
          400, f'The conversation has come to a limit ({rollout.stop_reason}): {rollout.longest_segment} tokens so far. Shorten it.',
          code='context_length_exceeded', param='messages')
    self._over(rollout.stop_reason)
    transcript = self._board.end(rollout.ticket, error)
    self._file.write(json.dumps({
        'conversation': rollout.ticket, 'ending': rollout.ending, 'stop_reason': rollout.stop_reason, 'tokens': rollout.tokens.tolist(),
        'action_mask': rollout.action_mask.tolist(), 'behaviour_log_prob': rollout.behaviour_log_prob.tolist(),
        'policy_version': rollout.policy_version.tolist(), 'turn': rollout.turn.tolist(), 'segment_starts': list(rollout.segment_starts),
        'turns': transcript['turns']}) + '\n')
    self._file.flush()
    return True

  def drop(self, ticket: int, reason: str, *, prompt: tuple[int, int] | None = None) -> None:
    del prompt
    self._over(reason)
    code = 'context_length_exceeded' if reason == 'prompt_length' else 'conversation_lost'
    what = 'It is longer than the model can read.' if reason == 'prompt_length' else f'Lost: {reason}.'
    self._board.end(ticket, gateway.HttpError(400, f'The conversation could not be taken up. {what}', code=code, param='messages'))

  def _over(self, reason: str) -> None:
    self._open -= 1
    self.counts[reason] += 1

  def set_oldest(self, oldest: Mapping[int, int]) -> None:
    del oldest

  def overdue(self, version: int) -> list[int]:
    del version
    return []

  def close(self) -> None:
    self._file.close()


def serve_run(
    config: Config, workdir: str | os.PathLike[str] | None, *, step: int | None, settings: gateway.GatewaySettings, key: str | None,
    output: str | os.PathLike[str], quiet_s: float, greedy: bool, on_ready: Callable[[str, str], None], stop: threading.Event,
) -> dict[str, Any]:
  """Serves a policy until `stop` is set.

  Args:
    config: settings of the model, the sampler and the limits of `task`; those of training are ignored.
    workdir: folder of a run whose checkpoint is served; it is only read. None for the weights that `config` names.
    step: number of the checkpoint; None for the newest.
    settings: where to listen.
    key: that clients must give; None for a new one.
    output: file that conversations are appended to.
    quiet_s: a conversation without a request for so long is over.
    greedy: take the most probable token each time, in place of sampling.
    on_ready: gets the base URL and the key once requests are taken.
    stop: set from anywhere.

  Returns:
    {'checkpoint', 'policy_step', 'conversations', 'ended': their number by reason, 'output'}.

  Raises:
    ValueError: settings that do not fit, or no such checkpoint.
    OSError: an address or a file that cannot be had.
  """
  fitted = _fitted(config, quiet_s)
  with opened(fitted, workdir) as parts:
    where, policy = policy_of(parts, step)
    snapshot = ParamSnapshot(int(where['policy_step']), parts.convert(policy))
    sampler = parts.make_sampler(snapshot, seed=fitted.seed)
    sampler.reset(snapshot, seed=fitted.seed, temperature=0.0 if greedy else fitted.sampler.temperature)
    server = gateway.Gateway(settings).start()
    board = Switchboard(loop=server.loop, tool_format=parts.conversation.tool_format)
    flow = ServeFlow(board, pathlib.Path(output), fitted.sampler.sessions)
    pool = EnvironmentPool(fitted.task.workers, fitted.task.step_timeout_s)
    engine = RolloutEngine(
        sampler=sampler, calls=pool, flow=flow, make_environment=lambda: Served(board, quiet_s), conversation=parts.conversation,
        tokenizer=parts.tokenizer, task=fitted.task, max_length=parts.model.max_length, sessions=fitted.sampler.sessions,
        now=time.monotonic)
    try:
      on_ready(server.url, server.add(board, key))
      _loop(engine, flow, stop)
      board.close()
      _drain(engine)
    finally:
      board.close()
      engine.close()
      server.close()
      pool.close(CLOSE_S)
      flow.close()
  return {
      'checkpoint': where['checkpoint'], 'policy_step': where['policy_step'], 'conversations': flow.counts.total(),
      'ended': dict(flow.counts), 'output': str(output)}


def _ends_in_half_a_line(path: pathlib.Path) -> bool:
  """Whether a server before this one was killed, or had no room, while it wrote."""
  if not path.is_file() or not path.stat().st_size:
    return False
  with open(path, 'rb') as file:
    file.seek(-1, os.SEEK_END)
    return file.read() != b'\n'


def _loop(engine: RolloutEngine, flow: ServeFlow, stop: threading.Event) -> None:
  while not stop.is_set():
    moved = engine.before_chunk()
    flow.make_room()
    if engine.sampler.busy:
      engine.after_chunk(engine.sampler.step())
    elif not moved:
      stop.wait(0.001)


def _drain(engine: RolloutEngine) -> None:
  """Ends what waits for its clients, so that it is written; what is being sampled is given up."""
  deadline = time.monotonic() + CLOSE_S
  while engine.in_flight and time.monotonic() < deadline:
    if engine.before_chunk():
      deadline = time.monotonic() + CLOSE_S  # They end one after the other; how fast is the machine's matter.
    elif engine.sampler.busy:
      engine.after_chunk(engine.sampler.step())
    else:
      time.sleep(0.001)


def _fitted(config: Config, quiet_s: float) -> Config:
  """The settings with a task that holds any conversation; nothing is trained."""
  sessions = config.sampler.sessions
  total = min(config.task.max_tokens, config.model.max_length) if not config.model.pretrained else config.task.max_tokens
  fitted = dataclasses.replace(
      config,
      task=dataclasses.replace(
          config.task, name='ask', settings={'conversation': 'chat'}, max_turns=MAX_TURNS, max_segments=MAX_SEGMENTS, compact_room=0,
          max_turn_tokens=min(config.task.max_turn_tokens, total), time_limit_s=FOREVER_S, step_timeout_s=quiet_s + 60.0, retries=0,
          max_failure_share=1.0, workers=max(sessions, config.task.workers)),
      sampler=dataclasses.replace(config.sampler, pages=0, cache_lengths=()), algorithm=AlgorithmConfig(),
      learner=dataclasses.replace(config.learner, lengths=(total,)), sft=dataclasses.replace(config.sft, steps=0),
      value_pretrain=dataclasses.replace(config.value_pretrain, rollouts=0), rl=dataclasses.replace(config.rl, policy_steps=0))
  settings_lib.check(fitted)
  return fitted
