"""Continuous batching over a paged cache: requests in, drawn turns out.

One call of `step`:
  1. Takes the newest snapshot, as `on_update` says.
  2. Gives free slots to waiting sessions, first come first served, as far as pages go (`schedule.py`).
  3. Prefills what those sessions have that is not cached.
  4. Decodes one chunk for all slots that are ready (`decoding.py` holds the compiled functions).
  5. Reads the tokens, applies the stop rules (`stopping.py`), returns the turns that ended.

The cache of a session holds the first tokens of its sequence, always fewer than all: the next decode step feeds the last one. Eviction and
preemption change nothing of what is drawn: pages are recomputed, and the noise of a token depends only on seed, prompt, attempt and
position. The pages are the truth; `work`, the decoding rows' pages side by side, is a copy that a row enters when it starts to decode.
"""

from __future__ import annotations

import time
import typing
from typing import Any, Sequence

import jax
import numpy as np

from sao_jax import decoding
from sao_jax import sampling
from sao_jax import sharding
from sao_jax.config import ModelConfig, SamplerConfig
from sao_jax.models import transformer
from sao_jax.paging import PagePool
from sao_jax.schedule import Schedule
from sao_jax.sessions import Completion, Request, Session
from sao_jax.stopping import StopMatcher
from sao_jax.types import Params, ParamSnapshot

if typing.TYPE_CHECKING:
  from sao_jax.models.tokenizers import Tokenizer

SHRINK_AFTER = 8  # Chunks in a row that a smaller bucket of cached length must do before rows move to it.


class Sampler:
  """Draws turns for many sessions at once. One thread owns it."""

  def __init__(
      self, model_config: ModelConfig, sampler_config: SamplerConfig, snapshot: ParamSnapshot | Params | transformer.Policy, *,
      tokenizer: Tokenizer | None = None, seed: int = 0, max_length: int = 0, mesh: jax.sharding.Mesh | None = None, greedy: bool = False
  ):
    """
    Args:
      model_config: shape of the policy.
      sampler_config: slots, pages, buckets, temperature.
      snapshot: parameters to begin with; bare parameters or a model are version 0.
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
    if isinstance(snapshot, transformer.Policy):
      snapshot = transformer.split(snapshot)[1]
    if not isinstance(snapshot, ParamSnapshot):
      snapshot = ParamSnapshot(0, snapshot)
    if mesh is None:
      device = min(next(iter(snapshot.params.values())).devices(), key=lambda d: d.id)
      mesh = sharding.make_mesh([device], (1, 1, 1, 1, 1))
    self.config, self.model_config, self.max_length = sampler_config, model_config, max_length
    self._shapes = decoding.make_shapes(model_config, sampler_config, mesh, max_length)
    self._programs = decoding.programs(self._shapes)
    self._tokenizer = tokenizer
    self._steps = [self._programs.put(np.int32(n)) for n in range(self._shapes.chunk_steps + 1)]
    self._pool = self._programs.init_pool()
    self._work: Any = None
    self.reset(snapshot, seed=seed, temperature=0.0 if greedy else sampler_config.temperature)

  def reset(self, snapshot: ParamSnapshot, *, seed: int, temperature: float) -> None:
    """Forgets every session and counter and starts anew with other parameters, seed and temperature (0: greedy); nothing compiles."""
    if not 0.0 <= temperature < float('inf'):
      raise ValueError(f'temperature must be a number of at least 0, got {temperature}.')
    if not 0 <= seed < 2**64:
      raise ValueError(f'seed must be in [0, 2^64), got {seed}.')
    self._seed = seed
    self._temperature = self._programs.put(np.float32(temperature))
    self._schedule = Schedule(self._shapes.slots, PagePool(self._shapes.pages, self._shapes.page_size))
    self._stats = dict.fromkeys((
        'tokens_drawn', 'tokens_discarded', 'tokens_prefilled', 'chunks', 'prefills', 'slot_steps_total', 'updates',
        'params_stall_s', 'params_stall_max_s'), 0)
    self._bucket = self._small_chunks = 0
    self._pending: ParamSnapshot | None = None
    self._adopt(snapshot)

  # --- Requests ----------------------------------------------------------------------------------------------------------------

  def submit(self, request: Request) -> None:
    """Puts a turn in line. Of a known session only the tokens that are not cached are computed.

    Raises:
      ValueError: an empty or too long sequence, ids outside the vocabulary, a session that is already at work, a history that was
        rewritten (release the session first), an empty stop string, or stop strings without a tokenizer.
    """
    tokens = request.checked_tokens(self.model_config.vocab_size, self.max_length)
    sessions = self._schedule.sessions
    session = sessions.get(request.session) or Session(request.session)
    if session.request is not None:
      raise ValueError(f'Session {request.session} has an unfinished request; take its completion or cancel it first.')
    if not np.array_equal(session.tokens[: session.cached], tokens[: session.cached]):
      raise ValueError(f'Session {request.session} may only be extended, but its first {session.cached} tokens changed; release it first.')
    start = len(tokens) if request.turn_start < 0 else request.turn_start
    token_bytes = self._token_bytes if self._tokenizer is not None else None
    matcher = StopMatcher(request.stop_ids, request.stop_strings, token_bytes, tokens[start:])
    session.begin(request, tokens, matcher, sampling.row_key(self._seed, request.prompt_id, request.attempt))
    sessions[request.session] = session
    self._schedule.waiting.append(session)

  def _token_bytes(self, token: int) -> bytes:
    """Bytes of a token; none for ids that the model has beyond the tokenizer's vocabulary."""
    return self._tokenizer.token_bytes(token) if token < self._tokenizer.vocab_size else b''

  def cancel(self, session: int) -> None:
    """Withdraws the unfinished request of a session, if any; its pages stay."""
    found = self._schedule.sessions.get(session)
    if found is not None and found.request is not None:
      self._schedule.park(found)

  def release(self, session: int) -> None:
    """Forgets a session and frees its pages; does nothing where there is none. Its number may be used again."""
    self.cancel(session)
    if session in self._schedule.sessions:
      self._schedule.remove(self._schedule.sessions[session])

  def update(self, snapshot: ParamSnapshot) -> None:
    """Makes `snapshot` the next parameters; the next `step` takes them. Only the newest one given counts. By `on_update`:

    'keep_cache': turns go on, and what the old parameters cached stays, unless pages run out: what is recomputed is of the new ones.
    'recompute_cache': every cached token is computed anew; active sessions return to the head of the line first.
    'finish_first': turns that hold a slot or have drawn end under the old parameters, none begins before; then every cache is computed
      anew, so that each turn is of one version throughout.
    """
    self._pending = snapshot

  # --- What others look at -----------------------------------------------------------------------------------------------------

  @property
  def busy(self) -> bool:
    """True while a session waits or decodes."""
    return bool(self._schedule.unfinished())

  @property
  def version(self) -> int:
    """Version of the parameters that the next draw uses, as far as it is known before `step`."""
    return self._pending.version if self._pending is not None and not self._holds_back() else self._version

  def block_until_ready(self) -> None:
    """Returns when no work of this sampler is under way on its devices."""
    jax.block_until_ready((self._pool, self._work))

  def drawn(self) -> set[int]:
    """Sessions whose unfinished request has drawn tokens."""
    return {s.number for s in self._schedule.unfinished() if s.drawn}

  def partials(self) -> dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Tokens i32[n], log_probs f32[n] and versions i32[n] drawn since submit, n >= 0, of every unfinished request."""
    return {s.number: s.drawn_arrays() for s in self._schedule.unfinished()}

  def order(self) -> list[int]:
    """Sessions with unfinished requests: the active ones by slot, then the waiting ones. Submitted anew in this order after an update
    in 'recompute_cache' mode, they continue exactly as they would have."""
    return [s.number for s in self._schedule.unfinished()]

  def stats(self) -> dict[str, float]:
    """Counters since the start or `reset`. Occupancy is tokens_drawn / slot_steps_total; 'params_stall_s' is time spent on taking
    parameters."""
    pages = self._schedule.pages
    return {**self._stats, **self._schedule.counts, 'pages_used': pages.used, 'pages_total': pages.num_pages}

  # --- One iteration -----------------------------------------------------------------------------------------------------------

  def step(self) -> list[Completion]:
    """One iteration, see the top of the module. Returns the turns that ended, in the order of slots.

    Raises:
      FloatingPointError: a log-probability is not finite. It names session, position and version. Nothing of the chunk is kept and the
        whole cache is dropped, so that other parameters can go on from there.
    """
    if self._pending is not None and not self._holds_back():
      snapshot, self._pending = self._pending, None
      self._adopt(snapshot)
    self._schedule.admit(self._shapes.chunk_steps, only_begun=self._pending is not None)
    self._prefill()
    self._schedule.make_room(self._shapes.chunk_steps)
    ready = [s for s in self._schedule.active() if s.ready]
    return self._decode(ready) if ready else []

  def _holds_back(self) -> bool:
    """True while 'finish_first' keeps the old parameters for turns that began under them."""
    begun = self._schedule.active() or any(s.drawn for s in self._schedule.waiting)
    return self.config.on_update == 'finish_first' and bool(begun)

  def _adopt(self, snapshot: ParamSnapshot) -> None:
    """Decodes with `snapshot` from now on. Only 'keep_cache' keeps what the old parameters computed."""
    begin = time.perf_counter()
    shapes = {path: x.shape for path, x in snapshot.params.items()}
    if shapes != self._programs.param_shapes:
      wrong = sorted(p for p in shapes.keys() | self._programs.param_shapes.keys() if shapes.get(p) != self._programs.param_shapes.get(p))
      raise ValueError(
          f'Parameters do not fit the model: {wrong[0]} is {shapes.get(wrong[0])}, expected {self._programs.param_shapes.get(wrong[0])}.')
    self._params = self._programs.place(snapshot.params)
    self._version = snapshot.version
    if self.config.on_update != 'keep_cache':
      self._schedule.start_over()
      self._bucket = self._small_chunks = 0
    stall = time.perf_counter() - begin
    self._stats['updates'] += 1
    self._stats['params_stall_s'] += stall
    self._stats['params_stall_max_s'] = max(stall, self._stats['params_stall_max_s'])

  # --- Prefill -----------------------------------------------------------------------------------------------------------------

  def _prefill(self) -> None:
    """Computes what active sessions have not cached. Long prompts take several calls; while others decode, `prefill_chunks` a step."""
    longest = self._shapes.prefill_lengths[-1]
    for _ in range(self.config.prefill_chunks):
      due = [s for s in self._schedule.active() if not s.ready]
      groups: dict[int, list[Session]] = {}
      for session in due:
        length = decoding.bucket(self._shapes.prefill_lengths, min(session.length - 1 - session.cached, longest))
        groups.setdefault(length, []).append(session)
      for length, sessions in sorted(groups.items()):
        most = self._shapes.prefill_rows[-1]
        for i in range(0, len(sessions), most):
          self._prefill_call(sessions[i: i + most], length)

  def _prefill_call(self, sessions: list[Session], length: int) -> None:
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
    read = self._programs.read(self._pool, self._programs.put(tables)) if cached else None
    self._pool = self._programs.prefill(self._params, self._pool, read, self._programs.put(packed))

  def _fill_table(self, table: np.ndarray, session: Session) -> np.ndarray:
    """Writes the session's pages to `table` i32[n], as many as fit; returns all of them."""
    pages = np.asarray(self._schedule.pages.pages(session.number), np.int32)
    n = min(len(pages), len(table))
    table[:n] = pages[:n]
    return pages

  def _page_slots(self, pages: np.ndarray, begin: int, n: int) -> np.ndarray:
    """Places of positions begin .. begin + n - 1 in the pool, i32[n]."""
    page, offset = np.divmod(np.arange(begin, begin + n), self._shapes.page_size)
    return pages[page] * self._shapes.page_size + offset

  # --- Decode ------------------------------------------------------------------------------------------------------------------

  def _decode(self, ready: list[Session]) -> list[Completion]:
    shapes = self._shapes
    self._bring_in(ready)
    steps = self._chunk_length(ready)
    packed = np.zeros((shapes.slots, decoding.DECODE_HEADER + shapes.chunk_steps), np.int32)
    packed[:, decoding.DECODE_HEADER:] = shapes.pages * shapes.page_size
    for session in ready:
      row = packed[session.slot]
      row[0], row[1], row[2:4] = session.tokens[session.length - 1], session.cached, session.key
      n = min(steps, session.remaining)
      pages = np.asarray(self._schedule.pages.pages(session.number), np.int32)
      row[decoding.DECODE_HEADER: decoding.DECODE_HEADER + n] = self._page_slots(pages, session.cached, n)
    self._pool, self._work, tokens, log_probs = self._programs.decode(
        self._params, self._pool, self._work, self._programs.put(packed), self._steps[steps], self._temperature)
    tokens, log_probs = jax.device_get((tokens, log_probs))
    self._stats['chunks'] += 1
    self._stats['slot_steps_total'] += steps * shapes.slots
    return self._collect(ready, tokens[:steps].T, log_probs[:steps].T)

  def _chunk_length(self, ready: list[Session]) -> int:
    """Steps of the next chunk: no longer than any row can use, and short enough for the waiting to enter soon."""
    remaining = [s.remaining for s in ready]
    wanted = max(min(remaining), -(-self._shapes.chunk_steps // 2)) if self._schedule.waiting else max(remaining)
    return min(self._shapes.chunk_steps, wanted)

  def _bring_in(self, ready: list[Session]) -> None:
    """Makes `work` hold the rows of `ready`, in the smallest bucket that covers them."""
    shapes = self._shapes
    needed = decoding.bucket(shapes.cached, max(s.cached for s in ready))
    new = [s for s in ready if not s.loaded]
    most = shapes.load_rows
    self._small_chunks = self._small_chunks + 1 if needed < self._bucket else 0
    if needed > self._bucket or self._small_chunks > SHRINK_AFTER or len(new) > shapes.slots // 2:
      self._bucket, self._small_chunks = needed, 0
      tables = np.zeros((shapes.slots, needed // shapes.page_size), np.int32)
      for session in ready:
        self._fill_table(tables[session.slot], session)
        session.loaded = True
      self._work = self._programs.rebuild(self._pool, self._programs.put(tables))
      return
    for i in range(0, len(new), most):
      packed = np.zeros((most, 1 + self._bucket // shapes.page_size), np.int32)
      packed[:, 0] = shapes.slots  # Rows to skip.
      for row, session in zip(packed, new[i: i + most]):
        row[0] = session.slot
        self._fill_table(row[1:], session)
        session.loaded = True
      self._work = self._programs.load(self._work, self._pool, self._programs.put(packed))

  def _collect(self, ready: list[Session], tokens: np.ndarray, log_probs: np.ndarray) -> list[Completion]:
    """Applies the stop rules to what was drawn, tokens and log_probs [B, steps]."""
    self._check_finite(ready, log_probs)
    finished = []
    for session in ready:
      row = tokens[session.slot, : session.remaining]
      stop = session.matcher.feed(row)
      n = len(row) if stop is None else stop[0]
      session.append(row[:n], log_probs[session.slot, :n], self._version)
      self._stats['tokens_drawn'] += n
      self._stats['tokens_discarded'] += tokens.shape[1] - n
      if stop is not None or not session.remaining:
        finished.append(Completion(session.number, *session.drawn_arrays(), stop_reason=stop[1] if stop else 'length'))
        self._schedule.park(session)
    return finished

  def _check_finite(self, ready: list[Session], log_probs: np.ndarray) -> None:
    if np.isfinite(log_probs).all():
      return
    for session in ready:
      bad = np.flatnonzero(~np.isfinite(log_probs[session.slot, : session.remaining]))
      if bad.size:
        self._schedule.start_over()
        self._pool, self._work, self._bucket = self._programs.init_pool(), None, 0
        raise FloatingPointError(
            f'Session {session.number}: log-probability {log_probs[session.slot, bad[0]]} at position {session.length + int(bad[0])} with '
            f'parameters of version {self._version}; the logits are not finite. Check the parameters of this version.')

  # --- Whole prompts -----------------------------------------------------------------------------------------------------------

  def generate(
      self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int | Sequence[int], stop_ids: Sequence[int] = (),
      stop_strings: Sequence[str] = (), prompt_ids: Sequence[int] | None = None, attempts: Sequence[int] | None = None,
  ) -> list[Completion]:
    """Samples one completion of every prompt; `session` of the i-th is i.

    Args:
      prompts: lists of token ids.
      max_new_tokens: one number for all, or one for each.
      stop_ids, stop_strings: end a completion.
      prompt_ids: numbers of the prompts, part of the noise; None: 0, 1, ... in order.
      attempts: numbers of the attempts, part of the noise; None: 0 for all. Several samples of one prompt need different ones (or
        different prompt ids).

    Returns:
      Completions in the order of the prompts. Equal for equal calls with the same seed.

    Raises:
      RuntimeError: other requests are under way.
      ValueError: as `submit`; or not as many numbers as prompts.
    """
    if self._schedule.sessions:
      raise RuntimeError('generate needs a sampler without other sessions; finish and release them first.')
    count = len(prompts)
    for name, numbers in (('prompt_ids', prompt_ids), ('attempts', attempts)):
      if numbers is not None and len(numbers) != count:
        raise ValueError(f'{name} must have one number for each of {count} prompts, got {len(numbers)}.')
    limits = [int(n) for n in np.broadcast_to(max_new_tokens, (count,))]
    done: dict[int, Completion] = {}
    try:
      for i, (prompt, limit) in enumerate(zip(prompts, limits)):
        self.submit(Request(
            session=i, tokens=np.asarray(prompt), prompt_id=int(prompt_ids[i]) if prompt_ids is not None else i,
            attempt=int(attempts[i]) if attempts is not None else 0, max_new_tokens=limit, stop_ids=tuple(stop_ids),
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
    self._pool = self._programs.warm_up(self._params, self._pool)
