"""The sampler against full forward passes, and against itself under other slots, chunks, buckets, neighbours and page shortages."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax.models import transformer
from sao_jax.sampler import Sampler
from sao_jax.sessions import Request
from sao_jax.types import ParamSnapshot
from tests import sampler_factory as factory
from tests.sampler_factory import MODEL, full_log_probs, make_params, make_prompts, make_sampler, run, same


def check_log_probs(prompt, completion, tolerance=1e-4, **kwargs):
  sequence = [*prompt, *completion.tokens.tolist()]
  want = full_log_probs(sequence, **kwargs)[len(prompt):]
  assert len(want) == len(completion.log_probs) > 0
  np.testing.assert_allclose(completion.log_probs, want, atol=tolerance)


@pytest.mark.parametrize('numbers', [{'prompt_ids': [3]}, {'attempts': [0, 1, 2]}])
def test_every_prompt_needs_its_number(numbers):
  with pytest.raises(ValueError, match=f'{next(iter(numbers))} must have one number for each of 2 prompts'):
    make_sampler().generate([[1], [2]], max_new_tokens=2, **numbers)


# --- What is drawn and its log-probability -------------------------------------------------------------------------------------


@pytest.mark.parametrize('temperature', [0.7, 1.0, 1.3])
def test_log_probs_equal_a_full_forward_pass(temperature):
  prompts = make_prompts(9)
  sampler = make_sampler(temperature=temperature)
  out = sampler.generate(prompts, max_new_tokens=40)
  for prompt, completion in zip(prompts, out):
    assert completion.stop_reason == 'length' and len(completion.tokens) == 40
    assert completion.tokens.dtype == np.int32 and completion.log_probs.dtype == np.float32
    check_log_probs(prompt, completion, temperature=temperature)
  assert len({tuple(c.tokens) for c in out}) == 9


@pytest.mark.slow
@pytest.mark.parametrize('variant', [
    dict(scan_layers=True), dict(tie_embeddings=False, qkv_bias=True, qk_norm=False, num_kv_heads=1)])
def test_every_model_shape(variant):
  model = dataclasses.replace(MODEL, **variant)
  prompts = make_prompts(3, low=5)
  out = make_sampler(model).generate(prompts, max_new_tokens=12)
  for prompt, completion in zip(prompts, out):
    check_log_probs(prompt, completion, model=model)


@pytest.mark.slow
def test_scanned_layers_draw_the_same_tokens():
  model = dataclasses.replace(MODEL, scan_layers=True)
  stacked = transformer.stack_layers(make_params())
  prompts = make_prompts(4)
  plain = make_sampler().generate(prompts, max_new_tokens=20)
  scanned = make_sampler(model, params=stacked).generate(prompts, max_new_tokens=20)
  assert all(same(a, b) for a, b in zip(plain, scanned))


@pytest.mark.slow
def test_bfloat16_parameters_and_cache():
  """Parameters are cast, a draw is of the cast ones, and the log-probabilities keep the precision of the compute dtype."""
  prompts = make_prompts(4)
  sampler = make_sampler(dtype='bfloat16')
  out = sampler.generate(prompts, max_new_tokens=10)
  assert all(x.dtype == jnp.bfloat16 for x in sampler._params.values())
  rounded = {k: v.astype(jnp.bfloat16).astype(jnp.float32) for k, v in make_params().items()}
  for prompt, completion in zip(prompts, out):
    assert completion.log_probs.dtype == np.float32
    check_log_probs(prompt, completion, tolerance=0.15, params=rounded)


def test_a_model_or_bare_parameters_will_do():
  prompts = make_prompts(3)
  want = make_sampler().generate(prompts, max_new_tokens=np.int64(5))
  policy = transformer.merge(transformer.Policy, MODEL, make_params())
  for given in (policy, make_params()):
    out = Sampler(MODEL, factory.SETTINGS, given, seed=7).generate(np.array(prompts, object), max_new_tokens=np.full(3, 5))
    assert all(same(a, b, 0.0) for a, b in zip(want, out))


def test_greedy_takes_the_most_probable_token_and_needs_no_seed():
  prompts = make_prompts(5)
  out = make_sampler(greedy=True, seed=1).generate(prompts, max_new_tokens=15)
  other = make_sampler(temperature=0.0, seed=2).generate(prompts, max_new_tokens=15)
  for prompt, a, b in zip(prompts, out, other):
    assert same(a, b)
    check_log_probs(prompt, a)
    sequence = list(prompt)
    for token in a.tokens.tolist()[:4]:
      scores = [full_log_probs(sequence + [v])[-1] for v in range(MODEL.vocab_size)]
      assert int(np.argmax(scores)) == token
      sequence.append(token)


def test_first_token_follows_the_softmax():
  """1,200 attempts at one prompt against the model's distribution."""
  prompt, n = [3, 1, 4], 1200
  sampler = make_sampler()
  out = sampler.generate([prompt] * n, max_new_tokens=1, prompt_ids=[5] * n, attempts=range(n))
  counts = np.bincount([c.tokens[0] for c in out], minlength=MODEL.vocab_size)
  prob = np.exp([full_log_probs(prompt + [v])[-1] for v in range(MODEL.vocab_size)]).astype(np.float64)
  big = prob * n > 5
  expected, observed = np.append(prob[big], prob[~big].sum()) * n, np.append(counts[big], counts[~big].sum())
  assert np.sum((observed - expected) ** 2 / expected) < big.sum() + 5 * np.sqrt(2 * big.sum())


@pytest.mark.slow
@pytest.mark.parametrize('top_p, top_k', [(1.0, 3), (0.8, 5)])
def test_restricted_sampling_records_the_restricted_distribution(top_p, top_k):
  prompts = make_prompts(4)
  out = make_sampler(top_p=top_p, top_k=top_k).generate(prompts, max_new_tokens=6)
  for prompt, completion in zip(prompts, out):
    sequence = list(prompt)
    for token, log_prob in zip(completion.tokens.tolist(), completion.log_probs):
      prob = np.exp(np.array([full_log_probs(sequence + [v])[-1] for v in range(MODEL.vocab_size)], np.float64))
      ordered = np.argsort(-prob)
      kept = ordered[: top_k or None]
      inside = prob[kept] / prob[kept].sum()
      kept = kept[: int(np.searchsorted(np.cumsum(inside), top_p - 1e-6)) + 1] if top_p < 1 else kept
      assert token in kept
      np.testing.assert_allclose(log_prob, np.log(prob[token] / prob[kept].sum()), atol=1e-3)
      sequence.append(token)


# --- What must not matter ------------------------------------------------------------------------------------------------------

PROMPTS = make_prompts(11, seed=3)
LIMITS = [1, 2, 3, 5, 8, 13, 21, 30, 4, 17, 9]


@pytest.fixture(scope='module')
def reference():
  return make_sampler().generate(PROMPTS, max_new_tokens=LIMITS)


@pytest.mark.slow
@pytest.mark.parametrize('settings', [
    dict(slots=1, prefill_rows=(1,), chunk_steps=1), dict(slots=7, prefill_rows=(3, 7), page_size=7, chunk_steps=32),
    dict(slots=16, prefill_rows=(16,), page_size=1, prefill_lengths=(3,)), dict(page_size=96, prefill_lengths=(8, 96), cache_lengths=()),
    dict(prefill_chunks=1, prefill_lengths=(4,), cache_lengths=(8, 16, 24, 48)), dict(pages=24)], ids=str)
def test_settings_change_no_draw(reference, settings):
  out = make_sampler(**settings).generate(PROMPTS, max_new_tokens=LIMITS)
  assert [len(c.tokens) for c in out] == LIMITS
  assert all(same(a, b) for a, b in zip(reference, out))


def test_order_of_submission_and_neighbours_change_no_draw(reference):
  sampler = make_sampler()
  for i in np.random.default_rng(0).permutation(len(PROMPTS)):
    i = int(i)
    sampler.submit(Request(i, np.array(PROMPTS[i]), prompt_id=i, attempt=0, max_new_tokens=LIMITS[i]))
    sampler.step()
  late = run(sampler)
  alone = make_sampler()
  for i in (4, 7, 10):
    alone.submit(Request(50, np.array(PROMPTS[i]), prompt_id=i, attempt=0, max_new_tokens=LIMITS[i]))
    out = run(alone)[50]
    alone.release(50)
    assert same(dataclasses.replace(out, session=i), reference[i])
    assert i not in late or same(late[i], reference[i])


def test_seeds_prompts_and_attempts_differ_and_repeat():
  prompts = [[1, 2, 3]] * 6
  sampler = make_sampler(seed=42)
  one = sampler.generate(prompts, max_new_tokens=12, prompt_ids=[0, 0, 0, 1, 2**32, 2**62], attempts=[0, 1, 2, 0, 0, 0])
  two = sampler.generate(prompts, max_new_tokens=12, prompt_ids=[0, 0, 0, 1, 2**32, 2**62], attempts=[0, 1, 2, 0, 0, 0])
  assert all(same(a, b, 0.0) for a, b in zip(one, two))
  assert len({tuple(c.tokens) for c in one}) == 6
  other = make_sampler(seed=43).generate(prompts, max_new_tokens=12, prompt_ids=[0, 0, 0, 1, 2**32, 2**62], attempts=[0, 1, 2, 0, 0, 0])
  assert all(tuple(a.tokens) != tuple(b.tokens) for a, b in zip(one, other))


# --- Sessions, pages, eviction -------------------------------------------------------------------------------------------------


def play(sampler, sessions, turns, rng_seed=0, new_tokens=6):
  """Several turns of several sessions, which come back in an order of their own: {(session, turn): (sequence before, completion)}."""
  rng = np.random.default_rng(rng_seed)
  observations = {(s, t): rng.integers(0, MODEL.vocab_size, rng.integers(1, 6)).tolist() for s in range(sessions) for t in range(turns)}
  sequences = {s: make_prompts(1, 3, 12, seed=100 + s)[0] for s in range(sessions)}
  results, turn = {}, dict.fromkeys(range(sessions), 0)

  def submit(s):
    sampler.submit(Request(s, np.array(sequences[s]), prompt_id=s, attempt=0, max_new_tokens=new_tokens))

  for s in range(sessions):
    submit(s)
  for _ in range(1000):
    if not sampler.busy:
      break
    for completion in sampler.step():
      s = completion.session
      results[s, turn[s]] = (list(sequences[s]), completion)
      sequences[s] += completion.tokens.tolist() + observations[s, turn[s]]
      turn[s] += 1
      if turn[s] < turns:
        submit(s)
  assert len(results) == sessions * turns
  return results


@pytest.fixture(scope='module')
def unhurried():
  sampler = make_sampler(sessions=16)
  results = play(sampler, 10, 4)
  assert sampler.stats()['evictions'] == 0
  return results, sampler.stats()


def test_turns_prefill_only_what_is_new(unhurried):
  results, stats = unhurried
  for before, completion in results.values():
    check_log_probs(before, completion)
  longest = {s: len(results[s, 3][0]) for s in range(10)}
  # Of a session's last input all but its last token was cached by prefills, except what decoding itself cached: six tokens a turn.
  assert stats['tokens_prefilled'] == sum(longest.values()) - 10 - 10 * 3 * 6
  assert stats['tokens_drawn'] == 10 * 4 * 6 and stats['tokens_recomputed'] == 0


@pytest.mark.parametrize('pages', [24, pytest.param(45, marks=pytest.mark.slow)])
def test_eviction_and_preemption_change_nothing(unhurried, pages):
  sampler = make_sampler(pages=pages)
  results = play(sampler, 10, 4)
  assert sampler.stats()['evictions'] > 0 and sampler.stats()['tokens_recomputed'] > 0
  assert sampler.stats()['pages_used_max'] <= pages
  for key, (_, want) in unhurried[0].items():
    assert same(results[key][1], want), key


def test_preemption_keeps_what_was_drawn():
  """Four rows of 90 tokens in pages for one: they take turns, and draw what they would have drawn in peace."""
  prompts = make_prompts(4, 10, 10)
  want = make_sampler().generate(prompts, max_new_tokens=80)
  sampler = make_sampler(pages=24)
  out = sampler.generate(prompts, max_new_tokens=80)
  assert sampler.stats()['preemptions'] >= 3
  assert all(same(a, b) for a, b in zip(want, out))


def test_the_least_recently_used_parked_session_goes_first():
  sampler = make_sampler(pages=24)  # 96 tokens.
  sequences = {s: np.arange(20) for s in range(3)}
  for s in (0, 1, 2, 0):  # The first is used once more.
    sampler.submit(Request(s, sequences[s], prompt_id=s, attempt=0, max_new_tokens=4))
    sequences[s] = np.concatenate([sequences[s], run(sampler)[s].tokens])
  sampler.submit(Request(3, np.arange(28), prompt_id=3, attempt=0, max_new_tokens=14))
  run(sampler)
  assert sampler.stats()['evictions'] == 1
  pages = {s: len(sampler._schedule.pages.pages(s)) for s in range(4)}
  assert pages[1] == 0 and pages[0] and pages[2]


def test_release_and_cancel_free_pages_and_slots():
  sampler = make_sampler()
  for s in range(6):
    sampler.submit(Request(s, np.arange(10), prompt_id=s, attempt=0, max_new_tokens=50))
  sampler.step()
  assert sampler.busy and sampler.stats()['pages_used'] > 0
  assert sampler.order() == list(range(6)) and sampler.drawn() == {0, 1, 2, 3}
  partial = sampler.partials()
  assert set(partial) == set(range(6)) and len(partial[0][0]) == 4 and len(partial[5][0]) == 0
  sampler.cancel(1)
  sampler.cancel(5)
  sampler.cancel(5)
  assert sampler.order() == [0, 2, 3, 4]
  for s in range(6):
    sampler.release(s)
  sampler.release(99)
  assert not sampler.busy and sampler.stats()['pages_used'] == 0 and sampler.step() == []
  again = make_sampler().generate([list(range(10))], max_new_tokens=4)[0]
  assert np.array_equal(partial[0][0], again.tokens)


def test_a_resumed_turn_continues_exactly():
  want = make_sampler().generate([list(range(10))], max_new_tokens=30)[0]
  first = make_sampler()
  first.submit(Request(0, np.arange(10), prompt_id=0, attempt=0, max_new_tokens=30))
  first.step(), first.step()
  tokens, log_probs, versions = first.partials()[0]
  assert 0 < len(tokens) < 30
  second = make_sampler()
  second.submit(Request(
      0, np.concatenate([np.arange(10), tokens]), prompt_id=0, attempt=0, max_new_tokens=30 - len(tokens), turn_start=10))
  rest = run(second)[0]
  assert np.array_equal(np.concatenate([tokens, rest.tokens]), want.tokens)
  np.testing.assert_allclose(np.concatenate([log_probs, rest.log_probs]), want.log_probs, atol=1e-5)


# --- Bad input -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('change, message', [
    (dict(tokens=[]), 'non-empty'), (dict(tokens=[[1]]), 'non-empty'), (dict(tokens=[0.5]), 'non-empty'),
    (dict(tokens=list(range(60)), max_new_tokens=37), 'max_length=96'), (dict(tokens=[1] * 97), 'shorten'),
    (dict(tokens=[67]), r'ids must be in \[0, 67\)'), (dict(tokens=[-1]), 'ids must be'), (dict(max_new_tokens=0), 'at least 1'),
    (dict(prompt_id=2**63), 'prompt_id'), (dict(prompt_id=-1), 'prompt_id'), (dict(attempt=-1), 'attempt'),
    (dict(turn_start=9), 'turn_start'), (dict(stop_strings=('',)), 'empty'), (dict(stop_strings=('a',)), 'tokenizer')])
def test_a_bad_request_is_refused(change, message):
  sampler = make_sampler()
  request = Request(0, np.arange(5), prompt_id=0, attempt=0, max_new_tokens=4)
  with pytest.raises(ValueError, match=message):
    sampler.submit(dataclasses.replace(request, **change))
  assert not sampler.busy and not sampler.partials()
  sampler.submit(request)
  assert len(run(sampler)[0].tokens) == 4


def test_a_session_is_extended_not_rewritten():
  sampler = make_sampler()
  request = Request(0, np.arange(12), prompt_id=0, attempt=0, max_new_tokens=4)
  sampler.submit(request)
  with pytest.raises(ValueError, match='unfinished request'):
    sampler.submit(request)
  tokens = np.concatenate([np.arange(12), run(sampler)[0].tokens])
  tokens[3] += 1
  with pytest.raises(ValueError, match='only be extended'):
    sampler.submit(dataclasses.replace(request, tokens=tokens))
  sampler.release(0)
  sampler.submit(dataclasses.replace(request, tokens=tokens))
  assert len(run(sampler)[0].tokens) == 4


@pytest.mark.parametrize('arguments, message', [
    (dict(pages=23), 'sampler.pages must hold'), (dict(max_length=97), 'max_length'), (dict(max_length=1), 'max_length'),
    (dict(seed=-1), 'seed'), (dict(temperature=-1.0), 'temperature'), (dict(temperature=float('nan')), 'temperature')])
def test_a_sampler_that_cannot_work_is_refused(arguments, message):
  with pytest.raises(ValueError, match=message):
    make_sampler(**arguments)


def test_parameters_of_another_model_are_refused():
  params = dict(make_params())
  del params['trunk.final_norm.scale']
  with pytest.raises(ValueError, match='final_norm'):
    make_sampler(params=params)


@pytest.mark.parametrize('max_length, page_size, pages', [(17, 4, 5), (95, 7, 14), (2, 16, 1)])
@pytest.mark.slow
def test_odd_lengths_and_pools_of_one_sequence(max_length, page_size, pages):
  sampler = make_sampler(max_length=max_length, page_size=page_size, pages=pages, slots=3)
  prompts = make_prompts(5, 1, max_length - 1)
  out = sampler.generate(prompts, max_new_tokens=[max_length - len(p) for p in prompts])
  for prompt, completion in zip(prompts, out):
    assert len(prompt) + len(completion.tokens) == max_length
    check_log_probs(prompt, completion)


@pytest.mark.parametrize('greedy', [False, True])
def test_logits_that_are_not_finite_stop_the_sampler_by_name(greedy):
  poisoned = {**make_params(), 'trunk.final_norm.scale': np.full(MODEL.embed_dim, np.nan, np.float32)}
  poisoned = jax.device_put(poisoned)
  sampler = make_sampler(params=poisoned, version=12, greedy=greedy)
  sampler.submit(Request(31, np.arange(5), prompt_id=0, attempt=0, max_new_tokens=20))
  with pytest.raises(FloatingPointError, match='Session 31.*position 5.*version 12'):
    sampler.step()
  sampler.update(ParamSnapshot(13, make_params()))
  want = make_sampler(greedy=greedy).generate([list(range(5))], max_new_tokens=20)[0]
  out = run(sampler)[31]
  assert np.array_equal(out.tokens, want.tokens) and set(out.versions) == {13}


def test_generate_is_orderly():
  sampler = make_sampler()
  assert sampler.generate([], max_new_tokens=3) == []
  with pytest.raises(ValueError, match='non-empty'):
    sampler.generate([[1, 2], []], max_new_tokens=3)
  assert not sampler.busy and sampler.stats()['pages_used'] == 0
  sampler.submit(Request(0, np.arange(5), prompt_id=0, attempt=0, max_new_tokens=4))
  with pytest.raises(RuntimeError, match='other sessions'):
    sampler.generate([[1]], max_new_tokens=1)
  sampler.release(0)
  out = sampler.generate(make_prompts(30), max_new_tokens=5)
  assert [c.session for c in out] == list(range(30)) and sampler.stats()['pages_used'] == 0


def test_reset_starts_anew():
  sampler = make_sampler(seed=1)
  sampler.submit(Request(0, np.arange(5), prompt_id=0, attempt=0, max_new_tokens=40))
  sampler.step()
  sampler.reset(ParamSnapshot(5, make_params(seed=1)), seed=9, temperature=0.7)
  assert not sampler.busy and sampler.version == 5 and sampler.stats()['tokens_drawn'] == 0
  out = sampler.generate([[4, 5]], max_new_tokens=9)[0]
  want = make_sampler(seed=9, param_seed=1, temperature=0.7, version=5).generate([[4, 5]], max_new_tokens=9)[0]
  assert same(out, want) and set(out.versions) == {5}
