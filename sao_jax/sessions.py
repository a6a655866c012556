"""What goes into the sampler and what comes out of it, and the host state of one sequence in between."""

from __future__ import annotations

import dataclasses

import numpy as np

from sao_jax.stopping import StopMatcher


@dataclasses.dataclass(frozen=True)
class Request:
  """One turn to sample.

  Attributes:
    session: the caller's number for the sequence; its cache is found by it.
    tokens: i32[n], the whole sequence so far. A known session may only be extended: its cached tokens must be a prefix of these.
    prompt_id: in [0, 2^63); part of the noise.
    attempt: in [0, 2^31); part of the noise.
    max_new_tokens: at least 1; the sequence with them must fit into the sampler's `max_length`.
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

  def checked_tokens(self, vocab_size: int, max_length: int) -> np.ndarray:
    """The tokens as i32[n]. Raises ValueError for a request that can never be served."""
    tokens = np.asarray(self.tokens)
    if tokens.ndim != 1 or not len(tokens) or not np.issubdtype(tokens.dtype, np.integer):
      raise ValueError(f'Session {self.session}: tokens must be a non-empty list of ids, got shape {tokens.shape} of {tokens.dtype}.')
    if self.max_new_tokens < 1:
      raise ValueError(f'Session {self.session}: max_new_tokens must be at least 1, got {self.max_new_tokens}.')
    if len(tokens) + self.max_new_tokens > max_length:
      raise ValueError(
          f'Session {self.session}: {len(tokens)} tokens and {self.max_new_tokens} new ones pass max_length={max_length}; '
          f'shorten the prompt or ask for at most {max(max_length - len(tokens), 0)}.')
    if tokens.min() < 0 or tokens.max() >= vocab_size:
      raise ValueError(f'Session {self.session}: ids must be in [0, {vocab_size}), got {tokens.min()} to {tokens.max()}.')
    if not (0 <= self.prompt_id < 2**63 and 0 <= self.attempt < 2**31 and self.turn_start <= len(tokens)):
      raise ValueError(
          f'Session {self.session}: prompt_id must be in [0, 2^63), attempt in [0, 2^31), turn_start at most {len(tokens)}: got '
          f'{self.prompt_id}, {self.attempt}, {self.turn_start}.')
    return tokens.astype(np.int32)


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


class Session:
  """Host state of one sequence. `tokens[:length]` is the sequence; the first `cached` of it have their keys and values in pages."""

  def __init__(self, number: int):
    self.number = number
    self.tokens = np.zeros(0, np.int32)
    self.length = self.cached = 0
    self.request: Request | None = None
    self.matcher: StopMatcher | None = None
    self.key = np.zeros(2, np.int32)
    self.log_probs, self.versions = np.zeros(0, np.float32), np.zeros(0, np.int32)
    self.submitted = 0  # Length of the sequence at submit.
    self.slot = -1
    self.loaded = False  # In the rows that decode.
    self.order = 0  # Of admission while active, of last use while parked.

  def begin(self, request: Request, tokens: np.ndarray, matcher: StopMatcher, key: np.ndarray) -> None:
    """Takes the request; `tokens` i32[n] extend what is cached; `key` u32[2] is that of its noise."""
    self.request, self.matcher, self.key = request, matcher, key.view(np.int32)
    self.submitted = self.length = len(tokens)
    self.cached = min(self.cached, len(tokens) - 1)
    self.tokens = np.zeros(len(tokens) + request.max_new_tokens, np.int32)
    self.tokens[: len(tokens)] = tokens
    self.log_probs = np.zeros(request.max_new_tokens, np.float32)
    self.versions = np.zeros(request.max_new_tokens, np.int32)

  def end(self) -> None:
    """Drops the request; tokens and cache stay."""
    self.request, self.matcher = None, None

  @property
  def drawn(self) -> int:
    """Tokens drawn for the present request."""
    return self.length - self.submitted if self.request is not None else 0

  @property
  def remaining(self) -> int:
    """Tokens that the present request may still draw."""
    return len(self.tokens) - self.length

  @property
  def ready(self) -> bool:
    """All but the last token are cached: the next decode step feeds that one."""
    return self.cached == self.length - 1

  def append(self, tokens: np.ndarray, log_probs: np.ndarray, version: int) -> None:
    """Adds drawn tokens, whose predecessors were cached while they were drawn."""
    n, drawn = len(tokens), self.drawn
    self.tokens[self.length: self.length + n] = tokens
    self.log_probs[drawn: drawn + n] = log_probs
    self.versions[drawn: drawn + n] = version
    self.length += n
    self.cached = self.length - 1

  def drawn_arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Copies of what was drawn since submit: tokens, log_probs, versions."""
    n = self.drawn
    return self.tokens[self.submitted: self.length].copy(), self.log_probs[:n].copy(), self.versions[:n].copy()
