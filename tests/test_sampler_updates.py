"""Parameters that change while turns are under way, exact continuation from saved state, and the closed list of shapes."""

import jax
import numpy as np
import pytest

from sao_jax.sessions import Request
from sao_jax.types import ParamSnapshot
from tests.sampler_factory import full_log_probs, make_params, make_prompts, make_sampler, run, same


def snapshot(version):
  return ParamSnapshot(version, make_params(seed=version))


def submit_all(sampler, prompts, limit=24):
  for i, prompt in enumerate(prompts):
    sampler.submit(Request(i, np.array(prompt), prompt_id=i, attempt=0, max_new_tokens=limit))


def run_with_updates(sampler, updates):
  """Steps until done; `updates` is {number of the step: version}."""
  done = {}
  for step in range(300):
    if step in updates:
      sampler.update(snapshot(updates[step]))
    if not sampler.busy:
      return done
    done.update({c.session: c for c in sampler.step()})
  raise AssertionError('still busy')


def check_version_of_every_token(prompt, completion):
  """Each token's log-probability is that of a full forward pass under the version it names."""
  sequence = [*prompt, *completion.tokens.tolist()]
  tables = {int(v): full_log_probs(sequence, param_seed=int(v))[len(prompt):] for v in np.unique(completion.versions)}
  want = np.array([tables[int(v)][i] for i, v in enumerate(completion.versions)])
  np.testing.assert_allclose(completion.log_probs, want, atol=1e-4)


def test_recompute_cache_equals_a_full_forward_pass_under_the_new_parameters():
  prompts = make_prompts(6)
  sampler = make_sampler(on_update='recompute_cache')
  submit_all(sampler, prompts)
  done = run_with_updates(sampler, {2: 1, 5: 2})
  for i, prompt in enumerate(prompts):
    check_version_of_every_token(prompt, done[i])
    assert np.all(np.diff(done[i].versions) >= 0)
  assert {tuple(np.unique(c.versions)) for c in done.values()} >= {(0, 1, 2)}
  assert sampler.stats()['tokens_recomputed'] > 0 and sampler.version == 2


def test_keep_cache_goes_on_with_old_keys_and_values():
  """The versions say what drew each token. The first token after an update, fed through the new parameters, still sees the old cache."""
  prompts = make_prompts(4, low=20)
  kept, recomputed = make_sampler(on_update='keep_cache'), make_sampler(on_update='recompute_cache')
  for sampler in (kept, recomputed):
    submit_all(sampler, prompts)
  a, b = run_with_updates(kept, {2: 1}), run_with_updates(recomputed, {2: 1})
  assert kept.stats()['tokens_recomputed'] == 0
  for i in range(4):
    assert list(a[i].versions) == list(b[i].versions) == [0] * 8 + [1] * 16
    np.testing.assert_array_equal(a[i].tokens[:8], b[i].tokens[:8])
    assert np.max(np.abs(a[i].log_probs[8:] - b[i].log_probs[8:])) > 1e-3
  same_params = make_sampler(on_update='keep_cache')
  submit_all(same_params, prompts)
  same_params.step()
  same_params.update(ParamSnapshot(9, make_params()))
  again = run(same_params)
  still = make_sampler().generate(prompts, max_new_tokens=24)
  for i in range(4):  # The same parameters under another number change no draw.
    np.testing.assert_array_equal(again[i].tokens, still[i].tokens)
    assert list(again[i].versions) == [0] * 4 + [9] * 20


@pytest.mark.parametrize('pages', [0, 24])
def test_finish_first_never_mixes_versions_in_a_turn(pages):
  """Also where pages are short and turns under way were sent back to the line."""
  prompts = make_prompts(9, low=10)
  sampler = make_sampler(on_update='finish_first', pages=pages)
  submit_all(sampler, prompts, limit=40)
  done = run_with_updates(sampler, {2: 1, 9: 2, 14: 3})
  assert len(done) == 9
  if pages:
    assert sampler.stats()['preemptions'] > 0
  for i, prompt in enumerate(prompts):
    assert len(np.unique(done[i].versions)) == 1
    check_version_of_every_token(prompt, done[i])
  assert len({c.versions[0] for c in done.values()}) > 1


def test_version_is_that_of_the_next_draw():
  for mode, at_once in (('keep_cache', True), ('recompute_cache', True), ('finish_first', False)):
    sampler = make_sampler(on_update=mode)
    submit_all(sampler, [[1, 2, 3]], limit=6)
    sampler.step()
    sampler.update(snapshot(1))
    sampler.update(snapshot(4))  # The newest counts.
    assert sampler.version == (4 if at_once else 0)
    done = run(sampler)
    assert list(done[0].versions) == ([0] * 4 + [4] * 2 if at_once else [0] * 6)
    assert sampler.version == 4
    sampler.release(0)
    submit_all(sampler, [[1, 2, 3]], limit=2)
    assert list(run(sampler)[0].versions) == [4, 4]


def test_parked_sessions_are_recomputed_after_an_update():
  for mode in ('recompute_cache', 'finish_first'):
    sampler = make_sampler(on_update=mode)
    submit_all(sampler, [[5, 6, 7, 8]], limit=10)
    first = run(sampler)[0]
    sampler.update(snapshot(1))
    tokens = [5, 6, 7, 8, *first.tokens.tolist(), 3, 3]
    sampler.submit(Request(0, np.array(tokens), prompt_id=0, attempt=0, max_new_tokens=10))
    second = run(sampler)[0]
    assert set(second.versions) == {1}
    check_version_of_every_token(tokens, second)


def restored(sampler, prompts, limit, done, version):
  """A new sampler that takes up what `sampler` has not finished, from `partials` and `order` alone."""
  fresh = make_sampler(on_update='recompute_cache', version=version, param_seed=version)
  partials, saved = sampler.partials(), {}
  for session in sampler.order():
    tokens, log_probs, versions = partials[session]
    saved[session] = (tokens, log_probs, versions)
    fresh.submit(Request(
        session, np.concatenate([prompts[session], tokens]), prompt_id=session, attempt=0, max_new_tokens=limit - len(tokens),
        turn_start=len(prompts[session])))
  return fresh, saved


@pytest.mark.parametrize('steps', [1, 3, 7])
def test_a_sampler_restored_at_an_update_continues_bit_for_bit(steps):
  prompts, limit = make_prompts(9, seed=5), 24
  sampler = make_sampler(on_update='recompute_cache')
  submit_all(sampler, prompts, limit)
  done = {}
  for _ in range(steps):
    done.update({c.session: c for c in sampler.step()})
  twin, saved = restored(sampler, prompts, limit, done, version=1)
  assert len(saved) + len(done) == 9 and any(len(s[0]) for s in saved.values())
  sampler.update(snapshot(1))
  order = []
  for _ in range(60):
    a, b = sampler.step(), twin.step()
    assert [c.session for c in a] == [c.session for c in b]
    for whole, rest in zip(a, b):
      tokens, log_probs, versions = saved[rest.session]
      np.testing.assert_array_equal(whole.tokens, np.concatenate([tokens, rest.tokens]))
      np.testing.assert_array_equal(whole.log_probs, np.concatenate([log_probs, rest.log_probs]))  # To the last bit.
      np.testing.assert_array_equal(whole.versions, np.concatenate([versions, rest.versions]))
      assert whole.stop_reason == rest.stop_reason
      order.append(whole.session)
    assert sampler.order() == twin.order()
  assert sorted(order) == sorted(saved)


# --- The closed list of shapes -------------------------------------------------------------------------------------------------


class CompileCounter:
  """Counts JAX's own compilation events."""

  def __init__(self):
    self.events: list[str] = []
    self._on = True
    jax.monitoring.register_event_duration_secs_listener(self._hear)

  def _hear(self, name, duration, **kwargs):
    del duration
    if self._on and name == '/jax/core/compile/backend_compile_duration':
      self.events.append(str(kwargs.get('fun_name', name)))

  def close(self):
    self._on = False


@pytest.mark.slow
@pytest.mark.parametrize('mode', ['keep_cache', 'recompute_cache', 'finish_first'])
def test_nothing_compiles_after_warm_up(mode):
  """Mixed lengths, several turns, evictions, preemptions, updates; every transfer is an explicit one."""
  counter = CompileCounter()
  jax.jit(lambda x: x * 3 + 1)(np.float32(2)).block_until_ready()
  assert counter.events  # The event has this name in the JAX at hand.
  snapshots = [snapshot(v) for v in range(6)]
  sampler = make_sampler(
      on_update=mode, pages=40, prefill_lengths=(5, 16), prefill_rows=(2, 4), cache_lengths=(16, 48, 96), tokenizer=None)
  sampler.warm_up()
  counter.events.clear()
  rng = np.random.default_rng(0)
  sequences = {s: rng.integers(0, 67, rng.integers(1, 60)).tolist() for s in range(40)}
  with jax.transfer_guard('disallow'):
    waiting, turns, version = list(sequences), dict.fromkeys(sequences, 0), 0
    for step in range(2000):
      while waiting and len(sampler.order()) < 9:
        s = waiting.pop(0)
        limit = int(rng.integers(1, 12))
        sampler.submit(Request(
            s, np.array(sequences[s]), prompt_id=s, attempt=0, max_new_tokens=min(limit, 96 - len(sequences[s])), stop_ids=(3,)))
      if step % 17 == 16:
        version += 1
        sampler.update(snapshots[version % 6] if version < 6 else ParamSnapshot(version, snapshots[version % 6].params))
      for completion in sampler.step():
        s = completion.session
        sequences[s] += completion.tokens.tolist() + rng.integers(0, 67, rng.integers(1, 20)).tolist()
        turns[s] += 1
        if turns[s] < 4 and len(sequences[s]) < 90:
          waiting.append(s)
        else:
          sampler.release(s)
      if not waiting and not sampler.busy:
        break
    else:
      raise AssertionError('still busy')
    sampler.reset(snapshots[0], seed=3, temperature=0.0)
    sampler.generate([[1, 2, 3]] * 5, max_new_tokens=9)
  counter.close()
  assert version > 5 and sum(turns.values()) > 80
  assert counter.events == []


def test_stall_of_an_update_is_measured():
  sampler = make_sampler()
  submit_all(sampler, make_prompts(4))
  sampler.step()
  before = sampler.stats()['params_stall_s']
  sampler.update(snapshot(1))
  sampler.step()
  after = sampler.stats()
  assert after['updates'] == 2 and 0 < after['params_stall_s'] - before <= after['params_stall_max_s']


def test_the_sampler_keeps_no_buffer_that_others_donate():
  """A snapshot stays whole: drawing donates the cache, never the parameters."""
  params = {k: jax.numpy.copy(v) for k, v in make_params().items()}
  sampler = make_sampler(params=params)
  sampler.generate(make_prompts(5), max_new_tokens=12)
  assert all(not x.is_deleted() for x in params.values())


def test_every_mode_draws_the_same_without_updates():
  prompts = make_prompts(5)
  outs = [make_sampler(on_update=m).generate(prompts, max_new_tokens=9) for m in ('keep_cache', 'recompute_cache', 'finish_first')]
  assert all(same(a, b, 0.0) and same(a, c, 0.0) for a, b, c in zip(*outs))
