"""The staleness rule over random schedules: a model of engine and learner drives the queue, one random event at a time.

The model knows what the queue must guarantee without looking inside it: it has its own count of every ticket, its own versions, and its own
rule for when a step has to be possible.
"""

import dataclasses

from hypothesis import given, settings, strategies as st
import numpy as np
import pytest

from sao_jax import host_state
from sao_jax.rollout_queue import RolloutQueue
from tests.rollout_factory import make_rollout


@dataclasses.dataclass
class Running:
  """A rollout in flight, as the engine sees it."""

  prompt: int
  attempt: int
  oldest: int  # Bound: raised by the sampler's version until the first token is drawn.
  drawn: bool = False


class Simulation:
  """Engine, sampler and learner around one queue."""

  def __init__(self, *, batch_size, max_staleness, overdue, capacity, truncation='bootstrap', warmup=0, seed=0):
    self.settings = dict(
        batch_size=batch_size, max_staleness=max_staleness, overdue=overdue, capacity=capacity, truncation=truncation, vocab_size=256,
        max_length=64)
    self.queue = RolloutQueue(**self.settings)
    self.rng = np.random.default_rng(seed)
    self.warmup = warmup
    self.version = self.sampler_version = self.steps = 0
    self.running: dict[int, Running] = {}
    self.outbox: list[int] = []  # Finished, not yet taken in by the queue.
    self.prompts, self.returned = 0, []
    self.batch = None
    self.trained: list[int] = []
    self.prompt_of: dict[int, int] = {}
    self.attempts_of: dict[int, list[int]] = {}
    self.dropped: dict[str, int] = {}
    self.waited: dict[int, int] = {}

  # --- Events ------------------------------------------------------------------------------------------------------------------

  def start(self):
    """Starts a rollout if the queue lets it."""
    self.returned += self.queue.returned_prompts()
    ticket = self.queue.ticket(self.sampler_version)
    if ticket is None:
      return False
    if self.returned:
      prompt, attempt = self.returned.pop(0)
    else:
      prompt, attempt = self.prompts, 0
      self.prompts += 1
    self.running[ticket] = Running(prompt, attempt, self.sampler_version)
    self.prompt_of[ticket] = prompt
    self.attempts_of.setdefault(prompt, []).append(attempt)
    return True

  def adopt(self):
    """The sampler takes the newest parameters, or stays behind."""
    self.sampler_version = self.version

  def report(self):
    """As before every sampler step."""
    for running in self.running.values():
      if not running.drawn:
        running.oldest = self.sampler_version
    self.queue.set_oldest({t: r.oldest for t, r in self.running.items() if t not in self.outbox})

  def draw(self, ticket):
    """The first token of a rollout, at the sampler's version."""
    running = self.running[ticket]
    if not running.drawn:
      running.oldest, running.drawn = self.sampler_version, True

  def restart(self, ticket):
    """The environment failed and is tried again: the rollout begins anew."""
    self.running[ticket].drawn = False

  def finish(self, ticket):
    self.draw(ticket)
    self.outbox.append(ticket)

  def flush(self):
    """The engine hands over what has finished, in order, until the queue is full."""
    while self.outbox:
      ticket = self.outbox[0]
      running = self.running[ticket]
      n = 6
      versions = np.sort(self.rng.integers(running.oldest, self.sampler_version + 1, 3))
      versions[0] = running.oldest
      cut = self.rng.random() < 0.2
      bad = self.rng.random() < 0.05
      rollout = make_rollout(
          ticket=ticket, version=versions.astype(np.int32), length=n, prompt_id=-1 if bad else running.prompt, attempt=running.attempt,
          ending='truncated' if cut else 'terminated', stop_reason='max_tokens' if cut else 'answer')
      before = self.queue.accounting()['dropped']
      if not self.queue.put(rollout, self.version):
        return
      self.outbox.pop(0)
      del self.running[ticket]
      self.dropped = self.queue.accounting()['dropped']
      expected = 'quarantined' if bad else 'truncated' if cut and self.settings['truncation'] == 'drop' else None
      changed = {k: v - before.get(k, 0) for k, v in self.dropped.items() if v != before.get(k, 0)}
      if expected:
        assert changed == {expected: 1}
      else:
        assert changed in ({}, {'overdue': 1}) and (not changed or self.settings['overdue'] == 'drop')

  def fail(self, ticket):
    """An infrastructure failure ends a running rollout."""
    if ticket not in self.outbox:
      self.queue.drop(ticket, 'environment_error')
      del self.running[ticket]

  def cancel_overdue(self):
    for ticket in self.queue.overdue_running(self.sampler_version):
      if ticket not in self.outbox:
        running = self.running.pop(ticket)
        assert running.drawn  # One that has drawn nothing is never overdue.
        self.queue.drop(ticket, 'overdue', prompt=(running.prompt, running.attempt))

  def take(self):
    """The learner takes a batch if it gets one."""
    if self.batch is not None:
      return False
    batch = self.queue.take(self.version, 0.0)
    if batch is None:
      return False
    assert len(batch) == self.settings['batch_size']
    staleness = max(self.version - r.oldest_version for r in batch)
    assert staleness >= 0
    if self.settings['overdue'] != 'use':
      assert staleness <= self.settings['max_staleness'], (staleness, self.version)
    assert not set(self.trained) & {r.ticket for r in batch}
    self.batch = [r.ticket for r in batch]
    return True

  def train(self):
    """The learner's step ends and its parameters are published."""
    if self.batch is None:
      return
    advanced = self.steps >= self.warmup
    self.queue.trained(self.batch, version_advanced=advanced)
    self.trained += self.batch
    self.batch = None
    self.steps += 1
    self.version += advanced

  def save_and_resume(self):
    """A checkpoint and a new process; taken at a publish, with no step under way."""
    if self.batch is None:
      saved = host_state.decode(host_state.encode(self.queue.state()))
      accounting = self.queue.accounting()
      self.queue = RolloutQueue(**self.settings)
      self.queue.restore(saved)
      assert self.queue.accounting() == accounting

  # --- What must hold ----------------------------------------------------------------------------------------------------------

  def check(self):
    counts = self.queue.accounting()
    assert counts['admitted'] == counts['trained'] + counts['carried_over'] + sum(counts['dropped'].values())
    assert counts['admitted'] == len(self.prompt_of) and counts['trained'] == len(self.trained) == len(set(self.trained))
    assert counts['carried_over'] <= (self.settings['max_staleness'] + 1) * self.settings['batch_size']
    assert (self.queue.version, self.queue.steps) == (self.version, self.steps)
    for attempts in self.attempts_of.values():
      assert attempts in ([0], [0, 1])  # A prompt comes back once.

  def drain(self):
    """Everything running finishes, the engine goes on; then a step must become possible. True if one did."""
    for _ in range(4 * (self.settings['max_staleness'] + 2) * self.settings['batch_size'] + 8):
      self.adopt()
      self.report()
      for ticket in list(self.running):
        if ticket not in self.outbox:
          self.finish(ticket)
      self.flush()
      if self.batch is not None or self.take():
        self.train()
        return True
      if not self.outbox:
        self.start()
    return False


EVENTS = (
    'start', 'start', 'start', 'adopt', 'draw', 'draw', 'finish', 'finish', 'finish', 'flush', 'fail', 'restart', 'take', 'take', 'train',
    'train', 'resume', 'cancel', 'refill')


def run_events(sim, events, picks, newest_first):
  """Applies events; those about one rollout go to a random one that runs. `newest_first`: only the newest end, old ones stay behind."""
  for event, pick in zip(events, picks):
    alive = [t for t in sim.running if t not in sim.outbox]
    alive = alive[-2:] if newest_first and event != 'draw' else alive
    chosen = alive[pick % len(alive)] if alive else None
    if event in ('draw', 'finish', 'fail', 'restart'):
      if chosen is not None:
        sim.report()
        getattr(sim, event)(chosen)
    elif event == 'refill':
      while not sim.outbox and sim.start():
        pass
    elif event == 'cancel':
      sim.report()
      sim.cancel_overdue()
    elif event == 'resume':
      sim.save_and_resume()
    elif event == 'start':
      if not sim.outbox:
        sim.start()
    else:
      getattr(sim, event)()
    if event in ('finish', 'take', 'train'):
      sim.flush()
    sim.check()


@pytest.mark.parametrize('overdue', ['wait', 'drop', 'use'])
@settings(max_examples=120, deadline=None)
@given(
    batch_size=st.integers(1, 4), max_staleness=st.integers(0, 3), spare=st.integers(0, 12), warmup=st.integers(0, 3),
    truncation=st.sampled_from(['bootstrap', 'drop']), newest_first=st.booleans(), seed=st.integers(0, 2**16),
    count=st.integers(20, 250))
def test_any_schedule(overdue, batch_size, max_staleness, spare, warmup, truncation, newest_first, seed, count):
  """The bound holds at every step, every operation leaves the counts right, and the run can always go on."""
  sim = Simulation(
      batch_size=batch_size, max_staleness=max_staleness, overdue=overdue, capacity=batch_size + spare, truncation=truncation,
      warmup=warmup, seed=seed)
  rng = np.random.default_rng(seed)
  run_events(sim, rng.choice(EVENTS, count), rng.integers(0, 1000, count), newest_first)
  for _ in range(4):  # From wherever it is, it goes on.
    assert sim.drain()
    sim.check()
  if overdue == 'wait':
    assert 'overdue' not in sim.queue.accounting()['dropped']


@pytest.mark.parametrize('overdue', ['wait', 'drop'])
@pytest.mark.parametrize('max_staleness, capacity', [(0, 4), (1, 4), (1, 5), (3, 16), (4, 6)])
def test_long_run_with_slow_tasks(overdue, max_staleness, capacity):
  """Durations with a long tail over many steps. 'wait': every prompt is trained, in bounded time; 'drop': slow ones are lost after two."""
  sim = Simulation(batch_size=4, max_staleness=max_staleness, overdue=overdue, capacity=capacity, warmup=2, seed=max_staleness)
  rng = np.random.default_rng(capacity)
  due: dict[int, float] = {}
  slow: dict[int, float] = {}
  now, learner_free = 0.0, 0.0
  admitted_at: dict[int, int] = {}
  while sim.steps < 150 and now < 1e5:
    now += 0.5
    sim.flush()
    while not sim.outbox and sim.start():
      ticket = max(sim.prompt_of)
      admitted_at[ticket] = sim.steps
      duration = slow.setdefault(sim.prompt_of[ticket], 200.0 if rng.random() < 0.03 else float(rng.lognormal(1.0, 1.0)))
      due[ticket] = now + duration
    if rng.random() < 0.7:
      sim.adopt()
    sim.report()
    if overdue == 'drop':
      sim.cancel_overdue()
    for ticket in [t for t in sim.running if t not in sim.outbox]:
      if rng.random() < 0.001:
        sim.fail(ticket)
      elif due[ticket] <= now:
        sim.finish(ticket)
      elif rng.random() < 0.8:
        sim.draw(ticket)
    sim.flush()
    if sim.batch is not None and now >= learner_free:
      sim.train()
    if sim.take():
      learner_free = now + 1.0
    if rng.random() < 0.02:
      sim.save_and_resume()
    sim.check()
  assert sim.steps == 150
  if overdue == 'wait':
    waits = [sim.steps - at for ticket, at in admitted_at.items() if ticket in sim.running]
    assert max(waits, default=0) <= 2 * (max_staleness + 1)  # Nobody is left behind.
    lost = set(sim.prompt_of) - set(sim.trained) - set(sim.running)
    counted = sim.queue.accounting()
    assert len(lost) == sum(counted['dropped'].values()) + counted['carried_over'] - len(sim.running)
  else:
    assert sim.queue.accounting()['dropped'].get('overdue', 0) > 0 or max_staleness == 0
    assert max(len(a) for a in sim.attempts_of.values()) <= 2
