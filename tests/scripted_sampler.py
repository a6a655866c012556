"""A sampler that says what it is told, in tokens that no tokenizer would choose; for the engine with real threads and processes."""

import time

import numpy as np

from sao_jax import evaluation
from sao_jax.config import TaskConfig
from sao_jax.models import conversation as conversations
from sao_jax.rollouts import RolloutEngine
from sao_jax.sampler import Completion
from sao_jax.workers import EnvironmentPool
from tests import tokenizer_factory as factory


class ScriptedSampler:
  """Completes each request with the text that `say(prompt text, request)` gives, letter by letter, `delay_s` after it came.

  `drawn_turns` keeps (prompt ids, ids, log-probs) of every turn, by session, and `spent_s` the seconds that each took. Where `fixed_ids`
  are given, every turn has these and nothing else is done.
  """

  def __init__(self, tokenizer, say, version=3, delay_s=0.0):
    self.tokenizer, self.say, self.version, self.delay_s = tokenizer, say, version, delay_s
    self.requests, self.drawn_turns, self.spent_s, self.fixed_ids = {}, {}, {}, None

  def submit(self, request):
    assert request.session not in self.requests
    self.requests[request.session] = (request, time.perf_counter())

  def cancel(self, session):
    self.requests.pop(session, None)

  release = cancel

  @property
  def busy(self):
    now = time.perf_counter()
    return any(now - came >= self.delay_s for _, came in self.requests.values())

  def drawn(self):
    return set()

  def partials(self):
    return {s: (np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32)) for s in self.requests}

  def order(self):
    return list(self.requests)

  def ids_of(self, text, stop_ids):
    ids = [i for letter in text for i in self.tokenizer.encode_run(letter, after='text')]
    return ids + list(stop_ids[:1])

  def step(self):
    done, now = [], time.perf_counter()
    for session, (request, came) in list(self.requests.items()):
      if now - came < self.delay_s:
        continue
      ids = self.fixed_ids
      if ids is None:
        text = self.say(self.tokenizer.decode([int(t) for t in request.tokens]), request)
        ids = np.asarray(self.ids_of(text, request.stop_ids), np.int32)
      cut = len(ids) > request.max_new_tokens
      ids = ids[:request.max_new_tokens]
      log_probs = -np.linspace(0.1, 0.9, len(ids)).astype(np.float32)
      if self.fixed_ids is None:
        turn = tuple(map(int, request.tokens)), tuple(map(int, ids)), tuple(map(float, log_probs))
        self.drawn_turns.setdefault(session, []).append(turn)
      done.append(Completion(session, ids, log_probs, np.full(len(ids), self.version, np.int32), 'length' if cut else 'stop_id'))
      self.spent_s.setdefault(session, []).append(now - came)
      del self.requests[session]
    return done


def run_engine(
    make_environment, tasks, say, *, tokenizer=None, workers=None, sampler=None, deadline_s=300.0, **settings):
  """Plays the tasks to their end; (flow with rollouts and drops, sampler, engine)."""
  tokenizer = tokenizer or factory.chatml()
  task = TaskConfig(**{
      'max_turns': 50, 'max_turn_tokens': 2000, 'max_tokens': 20_000, 'max_segments': 8, 'time_limit_s': 300.0, 'step_timeout_s': 120.0,
      'retries': 0, 'max_failure_share': 1.0, **settings})
  sampler = sampler or ScriptedSampler(tokenizer, say)
  flow = evaluation.ListFlow([(t.index, t) for t in tasks])
  pool = EnvironmentPool(workers or max(4, len(tasks)), task.step_timeout_s)
  engine = RolloutEngine(
      sampler=sampler, calls=pool, flow=flow, make_environment=make_environment, conversation=conversations.make(tokenizer, 'chat', {}),
      tokenizer=tokenizer, task=task, max_length=task.max_tokens, sessions=max(4, len(tasks)), now=time.monotonic)
  ends = time.monotonic() + deadline_s

  def watch(done):
    del done
    assert time.monotonic() < ends, 'the engine did not end in time'

  try:
    while flow.done < flow.total:
      watch(flow.done)
      moved = engine.before_chunk()
      if sampler.busy:
        engine.after_chunk(sampler.step())
      elif not moved:
        time.sleep(0.0005)
  finally:
    engine.close()
    assert pool.close(60.0)
  flow.rollouts.sort(key=lambda r: r.ticket)
  return flow, sampler, engine
