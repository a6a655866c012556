"""Continuous batching: who decodes, what is cached, when parameters change. The arithmetic is in `decoding.py`.

One call of `step`:
  1. Takes the newest snapshot, as `on_update` says.
  2. Gives free slots to waiting sessions, first come first served, as far as pages go.
  3. Prefills what those sessions have that is not cached.
  4. Decodes one chunk for all slots that are ready.
  5. Reads the tokens, applies the stop rules, returns the turns that ended.

A session is parked (its turn is over: no slot, pages kept), waiting (for a slot), or active (in a slot). Its cache holds the first `cached`
of its tokens, always fewer than all of them: the next decode step feeds the last one. What does not fit is made to fit in this order: pages
of parked sessions, the least recently used first; pages of waiting sessions, the last in line first; at last an active session, the latest
admitted, goes back to the head of the line. Nothing of this changes what is drawn: pages are recomputed, and the noise of a token depends
only on its seed, prompt, attempt and position.

The pages are the truth. `work`, the decoding rows' pages side by side, is a copy that a row enters when it starts to decode.
"""

from __future__ import annotations

import collections
import dataclasses
import time
import typing
from typing import Any, Sequence

import jax
import numpy as np

from sao_jax import decoding
from sao_jax import sharding
from sao_jax.config import ModelConfig, SamplerConfig
from sao_jax.paging import PagePool
from sao_jax.stopping import StopMatcher
from sao_jax.types import ParamSnapshot

if typing.TYPE_CHECKING:
  from sao_jax.models.tokenizers import Tokenizer

SHRINK_AFTER = 8  # Chunks in a row that a smaller bucket of cached length must do before rows move to it.


@dataclasses.dataclass(frozen=True)
class Request:
  """One turn to sample.

  Attributes:
    session: the caller's number for the sequence; its cache is found by it.
    tokens: i32[n], the whole sequence so far. A known session may only be extended: its cached tokens must be a prefix of these.
    prompt_id: in [0, 2^63); part of the noise.
    attempt: in [0, 2^31); part of the noise.
    max_new_tokens: at least 1; the sequence with them must fit into `max_length`.
    turn_start: index where this turn's drawn tokens began, -1 for the end of `tokens`. Where a turn is taken up again, tokens[turn_start:]
      were drawn earlier in it, and stop strings that began in them are seen.
    stop_ids: ids that end the turn; the id is kept, as an action.
    stop_strings: strings that end the turn at the first token which completes one; the token is kept whole.
  """

  session: int
  tokens: np.ndarray
  prompt_id: int
  attempt: int
  max_new_tokens: int
  turn_start: int = -1
  stop_ids: tuple[int, ...] = ()
  stop_strings: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Completion:
  """The tokens drawn for one request.

  Attributes:
    session: as in the request.
    tokens: i32[n], the new tokens only, n >= 1; a stop token is the last of them.
    log_probs: f32[n], nats, of the temperature-scaled softmax that drew each token (with top-p or top-k: of the restricted, renormalised
      one; at temperature 0: of the softmax at temperature 1).
    versions: i32[n], version of the parameters that drew each token.
    stop_reason: 'stop_id', 'stop_string' or 'length'.
  """

  session: int
  tokens: np.ndarray
  log_probs: np.ndarray
  versions: np.ndarray
  stop_reason: str


class _Session:
  """Host state of one sequence. `tokens[:length]` is the sequence, the first `cached` of it have their keys and values in pages."""

  def __init__(self, number: int):
    self.number = number
    self.tokens = np.zeros(0, np.int32)
    self.length = self.cached = 0
    self.request: Request | None = None
    self.matcher: StopMatcher | None = None
    self.log_probs, self.versions = np.zeros(0, np.float32), np.zeros(0, np.int32)
    self.submitted = 0  # Length of the sequence at submit.
    self.slot = -1
    self.loaded = False  # In `work`, hence decoding.
    self.order = 0  # Of admission while active, of last use while parked.

  def begin(self, request: Request, tokens: np.ndarray, matcher: StopMatcher) -> None:
    """Takes the request; `tokens` i32[n] extend what is cached."""
    self.request, self.matcher = request, matcher
    self.submitted = self.length = len(tokens)
    self.tokens = np.zeros(len(tokens) + request.max_new_tokens, np.int32)
    self.tokens[: len(tokens)] = tokens
    self.log_probs = np.zeros(request.max_new_tokens, np.float32)
    self.versions = np.zeros(request.max_new_tokens, np.int32)

  @property
  def drawn(self) -> int:
    return self.length - self.submitted if self.request is not None else 0

  @property
  def remaining(self) -> int:
    return len(self.tokens) - self.length

  def append(self, tokens: np.ndarray, log_probs: np.ndarray, version: int) -> None:
    n, drawn = len(tokens), self.drawn
    self.tokens[self.length: self.length + n] = tokens
    self.log_probs[drawn: drawn + n] = log_probs
    self.versions[drawn: drawn + n] = version
    self.length += n

  def drawn_arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Copies of what was drawn since submit: tokens, log_probs, versions."""
    n = self.drawn
    return self.tokens[self.submitted: self.length].copy(), self.log_probs[:n].copy(), self.versions[:n].copy()


class Sampler:
  """Draws turns for many sessions at once. One thread owns it."""

  def __init__(
      self, model_config: ModelConfig, sampler_config: SamplerConfig, snapshot: ParamSnapshot, *, tokenizer: Tokenizer | None = None,
      seed: int = 0, max_length: int = 0, mesh: jax.sharding.Mesh | None = None, greedy: bool = False
  ):
    """
    Args:
      model_config: shape of the policy.
      sampler_config: slots, pages, buckets, temperature.
      snapshot: parameters to begin with.
      tokenizer: needed for stop strings only.
      seed: of the noise, in [0, 2^64).
      max_length: longest sequence in tokens; 0: the model's.
      mesh: where to sample; None: the device of the first parameter.
      greedy: take the most probable token; the same as temperature 0.

    Raises:
      ValueError: sequences longer than the model's, pages that cannot hold one sequence, or parameters of another shape.
    """
    max_length = max_length or model_config.max_length
    if not 2 <= max_length <= model_config.max_length:
      raise ValueError(f'max_length must be in [2, {model_config.max_length}], the longest position of the model: got {max_length}.')
    if mesh is None:
      device = min(next(iter(snapshot.params.values())).devices(), key=lambda d: d.id)
      mesh = sharding.make_mesh([device], (1, 1, 1, 1, 1))
    self.config, self.model_config, self.max_length = sampler_config, model_config, max_length
    self._shapes = decoding.make_shapes(model_config, sampler_config, mesh, max_length)
    self._programs = decoding.programs(self._shapes)
    self._tokenizer = tokenizer
    self._steps = [self._programs.put(np.int32(n)) for n in range(self._shapes.chunk_steps + 1)]
    self._pages = PagePool(self._shapes.pages, self._shapes.page_size)
    self._pool = self._programs.init_pool()
    self._work: Any = None
    self._stats: dict[str, float] = {}
    self.reset(snapshot, seed=seed, temperature=0.0 if greedy else sampler_config.temperature)

  def reset(self, snapshot: ParamSnapshot, *, seed: int, temperature: float) -> None:
    """Forgets every session and counter and starts anew with other parameters, seed and temperature; compiled functions stay."""
    if not temperature >= 0.0:
      raise ValueError(f'temperature must be at least 0, got {temperature}.')
    words = np.array([seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF], np.uint32)
    self._seed_key = self._programs.seed_key(self._programs.put(words))
    self._temperature = self._programs.put(np.float32(temperature))
    self._sessions: dict[int, _Session] = {}
    self._waiting: collections.deque[_Session] = collections.deque()
    self._slots: list[_Session | None] = [None] * self._shapes.slots
    self._clock = 0  # Counts admissions and uses.
    self._pending: ParamSnapshot | None = None
    self._stats = dict.fromkeys((
        'tokens_drawn', 'tokens_discarded', 'tokens_prefilled', 'tokens_recomputed', 'evictions', 'preemptions', 'chunks', 'prefills',
        'slot_steps', 'slot_steps_total', 'updates', 'params_stall_s', 'params_stall_max_s', 'pages_used_max'), 0)
    self._forget_cache()
    self._adopt(snapshot)

  # --- Requests ----------------------------------------------------------------------------------------------------------------

  def submit(self, request: Request) -> None:
    """Puts a turn in line. Of a known session only the tokens that are not cached are computed.

    Raises:
      ValueError: an empty or too long sequence, ids outside the vocabulary, a session that is already at work, a history that was
        rewritten (release the session first), an empty stop string, or stop strings without a tokenizer.
    """
    tokens = self._checked_tokens(request)
    session = self._sessions.get(request.session)
    if session is not None and session.request is not None:
      raise ValueError(f'Session {request.session} has an unfinished request; take its completion or cancel it first.')
    if session is not None and not np.array_equal(session.tokens[: session.cached], tokens[: session.cached]):
      raise ValueError(f'Session {request.session} may only be extended, but its first {session.cached} tokens changed; release it first.')
    start = len(tokens) if request.turn_start < 0 else request.turn_start
    token_bytes = self._tokenizer.token_bytes if self._tokenizer is not None else None
    matcher = StopMatcher(request.stop_ids, request.stop_strings, token_bytes, tokens[start:])
    if session is None:
      session = self._sessions[request.session] = _Session(request.session)
    session.cached = min(session.cached, len(tokens) - 1)
    session.begin(request, tokens, matcher)
    self._waiting.append(session)

  def _checked_tokens(self, request: Request) -> np.ndarray:
    tokens = np.asarray(request.tokens, np.int32)
    if tokens.ndim != 1 or not len(tokens):
      raise ValueError(f'Session {request.session}: tokens must be a non-empty list of ids, got shape {tokens.shape}.')
    if request.max_new_tokens < 1:
      raise ValueError(f'Session {request.session}: max_new_tokens must be at least 1, got {request.max_new_tokens}.')
    if len(tokens) + request.max_new_tokens > self.max_length:
      raise ValueError(
          f'Session {request.session}: {len(tokens)} tokens and {request.max_new_tokens} new ones pass max_length={self.max_length}; '
          f'shorten the prompt or ask for at most {max(self.max_length - len(tokens), 0)}.')
    if tokens.min() < 0 or tokens.max() >= self.model_config.vocab_size:
      raise ValueError(
          f'Session {request.session}: ids must be in [0, {self.model_config.vocab_size}), got {tokens.min()} to {tokens.max()}.')
    if not (0 <= request.prompt_id < 2**63 and 0 <= request.attempt < 2**31 and request.turn_start <= len(tokens)):
      raise ValueError(
          f'Session {request.session}: prompt_id must be in [0, 2^63), attempt in [0, 2^31), turn_start at most {len(tokens)}: got '
          f'{request.prompt_id}, {request.attempt}, {request.turn_start}.')
    return tokens

  def cancel(self, session: int) -> None:
    """Withdraws the unfinished request of a session, if any; its pages stay."""
    found = self._sessions.get(session)
    if found is None or found.request is None:
      return
    if found.slot >= 0:
      self._leave_slot(found)
    else:
      self._waiting.remove(found)
    self._park(found)

  def release(self, session: int) -> None:
    """Forgets a session and frees its pages; does nothing where there is none. Its number may be used again."""
    self.cancel(session)
    self._sessions.pop(session, None)
    self._pages.release(session)

  def update(self, snapshot: ParamSnapshot) -> None:
    """Makes `snapshot` the next parameters; the next `step` takes them, as `on_update` says. Only the newest one given counts."""
    self._pending = snapshot

  # --- What others look at -----------------------------------------------------------------------------------------------------

  @property
  def busy(self) -> bool:
    """True while a session waits or decodes."""
    return bool(self._waiting) or any(s is not None for s in self._slots)

  @property
  def version(self) -> int:
    """Version of the parameters that the next draw uses, as far as it is known before `step`."""
    if self._pending is not None and not self._holds_back():
      return self._pending.version
    return self._version

  def drawn(self) -> set[int]:
    """Sessions whose unfinished request has drawn tokens."""
    return {s.number for s in self._unfinished() if s.drawn}

  def partials(self) -> dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Tokens i32[n], log_probs f32[n] and versions i32[n] drawn since submit, n >= 0, of every unfinished request."""
    return {s.number: s.drawn_arrays() for s in self._unfinished()}

  def order(self) -> list[int]:
    """Sessions with unfinished requests: the active ones by slot, then the waiting ones. Submitted anew in this order after an update
    in 'recompute_cache' mode, they continue exactly as they would have."""
    return [s.number for s in self._unfinished()]

  def _unfinished(self) -> list[_Session]:
    return [s for s in self._slots if s is not None] + list(self._waiting)

  def stats(self) -> dict[str, float]:
    """Counters since the start or `reset`. Occupancy is slot_steps / slot_steps_total; 'params_stall_s' is time spent taking parameters."""
    return {**self._stats, 'pages_used': self._pages.used, 'pages_total': self._pages.num_pages}

  # --- One iteration -----------------------------------------------------------------------------------------------------------

  def step(self) -> list[Completion]:
    """One iteration, see the top of the module. Returns the turns that ended, in the order of slots.

    Raises:
      FloatingPointError: a log-probability is not finite. It names session, position and version; the whole cache is dropped.
    """
    if self._pending is not None and not self._holds_back():
      snapshot, self._pending = self._pending, None
      self._adopt(snapshot)
    self._admit()
    self._prefill()
    self._make_room()
    ready = [s for s in self._slots if s is not None and s.cached == s.length - 1]
    return self._decode(ready) if ready else []

  def _holds_back(self) -> bool:
    """True while 'finish_first' keeps the old parameters for turns that began under them."""
    begun = any(s is not None for s in self._slots) or any(s.drawn for s in self._waiting)
    return self.config.on_update == 'finish_first' and begun

  # --- Parameters --------------------------------------------------------------------------------------------------------------

  def _adopt(self, snapshot: ParamSnapshot) -> None:
    """Decodes with `snapshot` from now on. Only 'keep_cache' keeps what the old parameters computed."""
    begin = time.perf_counter()
    shapes = {path: x.shape for path, x in snapshot.params.items()}
    if shapes != self._programs.param_shapes:
      wrong = sorted(p for p in shapes.keys() | self._programs.param_shapes.keys() if shapes.get(p) != self._programs.param_shapes.get(p))
      raise ValueError(
          f'Parameters do not fit the model: {wrong[0]} is {shapes.get(wrong[0])}, expected {self._programs.param_shapes.get(wrong[0])}.')
    self._params = jax.device_put(dict(snapshot.params), self._programs.param_shardings)
    self._version = snapshot.version
    if self.config.on_update != 'keep_cache':
      for session in reversed([s for s in self._slots if s is not None]):
        self._leave_slot(session)
        self._waiting.appendleft(session)
      for session in self._sessions.values():
        self._stats['tokens_recomputed'] += session.cached
      self._forget_cache()
    stall = time.perf_counter() - begin
    self._stats['updates'] += 1
    self._stats['params_stall_s'] += stall
    self._stats['params_stall_max_s'] = max(stall, self._stats['params_stall_max_s'])

  def _forget_cache(self) -> None:
    """Frees every page. What follows depends only on the sessions and their order."""
    self._pages.reset()
    for session in self._sessions.values():
      session.cached, session.loaded = 0, False
    self._bucket, self._small_chunks = 0, 0

  # --- Slots and pages ---------------------------------------------------------------------------------------------------------

  def _tick(self) -> int:
    self._clock += 1
    return self._clock

  def _leave_slot(self, session: _Session) -> None:
    self._slots[session.slot] = None
    session.slot, session.loaded = -1, False

  def _park(self, session: _Session) -> None:
    session.request, session.matcher, session.order = None, None, self._tick()

  def _evict(self, session: _Session) -> None:
    self._stats['evictions'] += 1
    self._stats['tokens_recomputed'] += session.cached
    self._pages.release(session.number)
    session.cached = 0

  def _preempt(self, session: _Session) -> None:
    self._stats['preemptions'] += 1
    self._leave_slot(session)
    self._waiting.appendleft(session)
    self._evict(session)

  def _reserve(self, session: _Session, length: int) -> bool:
    """Pages for `length` tokens of `session`, from sessions that hold no slot if need be. False where that is not enough."""
    while self._pages.missing(session.number, length) > self._pages.free:
      parked = [s for s in self._sessions.values() if s.request is None and self._pages.pages(s.number)]
      waiting = [s for s in self._waiting if s is not session and self._pages.pages(s.number)]
      if not parked and not waiting:
        return False
      self._evict(min(parked, key=lambda s: s.order) if parked else waiting[-1])
    self._pages.grow(session.number, length)
    self._stats['pages_used_max'] = max(self._stats['pages_used_max'], self._pages.used)
    return True

  def _admit(self) -> None:
    """Gives free slots to the waiting, in order; stops at the first that finds no pages for its tokens and one chunk."""
    held_back = self._pending is not None  # Then only turns that began under the old parameters may go on.
    for slot in [i for i, s in enumerate(self._slots) if s is None]:
      session = next((s for s in self._waiting if s.drawn or not held_back), None)
      if session is None:
        return
      if not self._reserve(session, session.length - 1 + min(self._shapes.chunk_steps, session.remaining)):
        return
      self._waiting.remove(session)
      session.slot, session.order = slot, self._tick()
      self._slots[slot] = session

  def _make_room(self) -> None:
    """Pages for the next chunk of every active session; the latest admitted give way where there are too few."""
    for session in sorted((s for s in self._slots if s is not None), key=lambda s: s.order):
      while session.slot >= 0 and not self._reserve(session, session.length - 1 + min(self._shapes.chunk_steps, session.remaining)):
        self._preempt(max((s for s in self._slots if s is not None), key=lambda s: s.order))

  # --- Prefill -----------------------------------------------------------------------------------------------------------------

  def _prefill(self) -> None:
    """Computes what active sessions have not cached. Long prompts take several calls; while others decode, `prefill_chunks` a step."""
    longest = self._shapes.prefill_lengths[-1]
    for _ in range(self.config.prefill_chunks):
      due = [s for s in self._slots if s is not None and s.cached < s.length - 1]
      groups: dict[int, list[_Session]] = {}
      for session in due:
        length = decoding.bucket(self._shapes.prefill_lengths, min(session.length - 1 - session.cached, longest))
        groups.setdefault(length, []).append(session)
      for length, sessions in sorted(groups.items()):
        most = self._shapes.prefill_rows[-1]
        for i in range(0, len(sessions), most):
          self._prefill_call(sessions[i: i + most], length)

  def _prefill_call(self, sessions: list[_Session], length: int) -> None:
    shapes = self._shapes
    rows = decoding.bucket(shapes.prefill_rows, len(sessions))
    cached = decoding.bucket(shapes.prefill_cached, max(s.cached for s in sessions))
    packed = np.zeros((rows, decoding.PREFILL_HEADER + 2 * length), np.int32)
    packed[:, decoding.PREFILL_HEADER + length:] = shapes.pages * shapes.page_size  # Not to be written.
    tables = np.zeros((rows, cached // shapes.page_size), np.int32)
    for row, session in enumerate(sessions):
      begin, n = session.cached, min(length, session.length - 1 - session.cached)
      pages = self._fill_table(tables[row], session)
      packed[row, 0] = begin
      packed[row, 1: 1 + n] = session.tokens[begin: begin + n]
      packed[row, 1 + length: 1 + length + n] = self._page_slots(pages, begin, n)
      session.cached += n
      self._stats['tokens_prefilled'] += n
    self._stats['prefills'] += 1
    self._pool = self._programs.prefill(self._params, self._pool, *self._programs.put((packed, tables)))

  def _fill_table(self, table: np.ndarray, session: _Session) -> np.ndarray:
    """Writes the session's pages to `table` i32[n], as many as fit; returns all of them."""
    pages = np.asarray(self._pages.pages(session.number), np.int32)
    n = min(len(pages), len(table))
    table[:n] = pages[:n]
    return pages

  def _page_slots(self, pages: np.ndarray, begin: int, n: int) -> np.ndarray:
    """Places of positions begin .. begin + n - 1 in the pool, i32[n]."""
    page, offset = np.divmod(np.arange(begin, begin + n), self._shapes.page_size)
    return pages[page] * self._shapes.page_size + offset

  # --- Decode ------------------------------------------------------------------------------------------------------------------

  def _decode(self, ready: list[_Session]) -> list[Completion]:
    shapes = self._shapes
    self._bring_in(ready)
    steps = self._chunk_length(ready)
    packed = np.zeros((shapes.slots, decoding.DECODE_HEADER + shapes.chunk_steps), np.int32)
    packed[:, decoding.DECODE_HEADER:] = shapes.pages * shapes.page_size
    for session in ready:
      request, row = session.request, packed[session.slot]
      row[0], row[1] = session.tokens[session.length - 1], session.cached
      row[2:4] = np.array([request.prompt_id], np.int64).view(np.int32)
      row[4] = request.attempt
      n = min(steps, session.remaining)
      pages = np.asarray(self._pages.pages(session.number), np.int32)
      row[decoding.DECODE_HEADER: decoding.DECODE_HEADER + n] = self._page_slots(pages, session.cached, n)
    self._pool, self._work, tokens, log_probs = self._programs.decode(
        self._params, self._pool, self._work, self._programs.put(packed), self._steps[steps], self._temperature, self._seed_key)
    tokens, log_probs = jax.device_get((tokens, log_probs))
    self._stats['chunks'] += 1
    self._stats['slot_steps_total'] += steps * shapes.slots
    return self._collect(ready, tokens[:steps].T, log_probs[:steps].T)

  def _chunk_length(self, ready: list[_Session]) -> int:
    """Steps of the next chunk: no longer than any row can use, and short enough for the waiting to enter soon."""
    remaining = [s.remaining for s in ready]
    wanted = max(min(remaining), -(-self._shapes.chunk_steps // 2)) if self._waiting else max(remaining)
    return min(self._shapes.chunk_steps, wanted)

  def _bring_in(self, ready: list[_Session]) -> None:
    """Makes `work` hold the rows of `ready`, in the smallest bucket that covers them."""
    shapes = self._shapes
    needed = decoding.bucket(shapes.cached, max(s.cached for s in ready))
    self._small_chunks = self._small_chunks + 1 if needed < self._bucket else 0
    if needed > self._bucket or self._small_chunks > SHRINK_AFTER:
      self._bucket, self._small_chunks = needed, 0
      tables = np.zeros((shapes.slots, needed // shapes.page_size), np.int32)
      for session in ready:
        self._fill_table(tables[session.slot], session)
        session.loaded = True
      self._work = self._programs.rebuild(self._pool, self._programs.put(tables))
      return
    new = [s for s in ready if not s.loaded]
    most = shapes.prefill_rows[-1]
    for i in range(0, len(new), most):
      part = new[i: i + most]
      packed = np.zeros((decoding.bucket(shapes.prefill_rows, len(part)), 1 + self._bucket // shapes.page_size), np.int32)
      packed[:, 0] = shapes.slots  # Rows to skip.
      for row, session in zip(packed, part):
        row[0] = session.slot
        self._fill_table(row[1:], session)
        session.loaded = True
      self._work = self._programs.load(self._work, self._pool, self._programs.put(packed))

  def _collect(self, ready: list[_Session], tokens: np.ndarray, log_probs: np.ndarray) -> list[Completion]:
    """Applies the stop rules to what was drawn, tokens and log_probs [B, steps]."""
    finished = []
    for session in ready:
      row = tokens[session.slot, : session.remaining]
      stop = session.matcher.feed(row)
      n = len(row) if stop is None else stop[0]
      self._check_finite(session, log_probs[session.slot, :n])
      session.append(row[:n], log_probs[session.slot, :n], self._version)
      session.cached = session.length - 1
      self._stats['tokens_drawn'] += n
      self._stats['tokens_discarded'] += tokens.shape[1] - n
      self._stats['slot_steps'] += n
      if stop is not None or not session.remaining:
        finished.append(Completion(session.number, *session.drawn_arrays(), stop_reason=stop[1] if stop else 'length'))
        self._leave_slot(session)
        self._park(session)
    return finished

  def _check_finite(self, session: _Session, log_probs: np.ndarray) -> None:
    bad = np.flatnonzero(~np.isfinite(log_probs))
    if not bad.size:
      return
    self._forget_cache()
    self._pool, self._work = self._programs.init_pool(), None
    raise FloatingPointError(
        f'Session {session.number}: log-probability {log_probs[bad[0]]} at position {session.length + int(bad[0])} with parameters of '
        f'version {self._version}; the logits are not finite. Check the parameters of this version.')

  # --- Whole prompts -----------------------------------------------------------------------------------------------------------

  def generate(
      self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int | Sequence[int], stop_ids: Sequence[int] = (),
      stop_strings: Sequence[str] = (), prompt_ids: Sequence[int] | None = None, attempts: Sequence[int] | None = None,
  ) -> list[Completion]:
    """Samples one completion of every prompt; `session` of the i-th is i.

    Args:
      prompts: lists of token ids.
      max_new_tokens: of each, or of all.
      stop_ids, stop_strings: end a completion.
      prompt_ids: numbers of the prompts, part of the noise; None: 0, 1, ... in order.
      attempts: numbers of the attempts, part of the noise; None: 0 for all. Several samples of one prompt need different ones (or
        different prompt ids).

    Returns:
      Completions in the order of the prompts. Equal for equal calls with the same seed.

    Raises:
      RuntimeError: other requests are under way.
      ValueError: as `submit`.
    """
    if self.busy or self._sessions:
      raise RuntimeError('generate needs a sampler without other sessions; finish and release them first.')
    count = len(prompts)
    limits = [max_new_tokens] * count if isinstance(max_new_tokens, int) else list(max_new_tokens)
    done: dict[int, Completion] = {}
    try:
      for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        self.submit(Request(
            session=i, tokens=np.asarray(prompt, np.int32), prompt_id=prompt_ids[i] if prompt_ids is not None else i,
            attempt=attempts[i] if attempts is not None else 0, max_new_tokens=limit, stop_ids=tuple(stop_ids),
            stop_strings=tuple(stop_strings)))
      while len(done) < count:
        for completion in self.step():
          done[completion.session] = completion
          self.release(completion.session)
    finally:
      for i in range(count):
        self.release(i)
    return [done[i] for i in range(count)]

  def warm_up(self) -> None:
    """Compiles every shape; afterwards nothing compiles. Leaves sessions and their pages as they are."""
    shapes, programs, put = self._shapes, self._programs, self._programs.put
    nowhere = shapes.pages * shapes.page_size
    for rows in shapes.prefill_rows:
      for length in shapes.prefill_lengths:
        for cached in shapes.prefill_cached:
          packed = np.zeros((rows, decoding.PREFILL_HEADER + 2 * length), np.int32)
          packed[:, decoding.PREFILL_HEADER + length:] = nowhere
          self._pool = programs.prefill(
              self._params, self._pool, *put((packed, np.zeros((rows, cached // shapes.page_size), np.int32))))
    packed = np.full((shapes.slots, decoding.DECODE_HEADER + shapes.chunk_steps), nowhere, np.int32)
    packed[:, : decoding.DECODE_HEADER] = 0
    for cached in shapes.cached:
      n = cached // shapes.page_size
      work = programs.rebuild(self._pool, put(np.zeros((shapes.slots, n), np.int32)))
      for rows in shapes.prefill_rows:
        skip = np.zeros((rows, 1 + n), np.int32)
        skip[:, 0] = shapes.slots
        work = programs.load(work, self._pool, put(skip))
      self._pool, *_ = programs.decode(
          self._params, self._pool, work, put(packed), self._steps[1], self._temperature, self._seed_key)
    jax.block_until_ready(self._pool)
