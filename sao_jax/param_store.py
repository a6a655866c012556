"""Versioned parameter snapshots, from the learner to the samplers.

    learner (main thread)                       sampler (rollouts thread)
      publish(params) --convert--> snapshot n+1 --one reference swap--> latest()

A reader sees version n or version n + 1, each whole, and never waits: conversion is over before the swap. A snapshot that a reader still
holds stays valid for as long as it is held.
"""

from __future__ import annotations

import threading
import time
from typing import Callable

import jax

from sao_jax.types import Params, ParamSnapshot


class ParamStore:
  """Holds the newest `ParamSnapshot`. One thread publishes, any number read."""

  def __init__(
      self, convert: Callable[[Params], Params], params: Params, version: int = 0, *, clock: Callable[[], float] = time.monotonic
  ):
    """Publishes `params` as `version`.

    Args:
      convert: from the learner's parameters to the sampler's sharding and dtype (`sharding.make_converter`); its result must share no
        buffer with its argument, which the learner donates at its next update.
      params: the learner's.
      version: of `params`; not 0 when a run is resumed.
      clock: seconds, for `publish_s`.
    """
    self._convert, self._clock = convert, clock
    self._publishing = threading.Lock()
    self.publish_s = 0.0  # Seconds that the last publish took, conversion included.
    self._snapshot = ParamSnapshot(version, self._converted(params))

  def publish(self, params: Params) -> ParamSnapshot:
    """Converts `params` and makes them visible as the next version; on return the argument may be donated."""
    with self._publishing:
      began_s = self._clock()
      snapshot = ParamSnapshot(self._snapshot.version + 1, self._converted(params))
      self._snapshot = snapshot
      self.publish_s = self._clock() - began_s
    return snapshot

  def latest(self) -> ParamSnapshot:
    """The newest snapshot."""
    return self._snapshot

  @property
  def version(self) -> int:
    """Version of the newest snapshot."""
    return self._snapshot.version

  def _converted(self, params: Params) -> Params:
    converted = self._convert(params)
    aliased = [path for path, array in converted.items() if array is params.get(path)]
    if aliased:
      raise ValueError(f'convert() must copy, but gave back the very array of {aliased[0]!r}; the learner would donate it.')
    return jax.block_until_ready(converted)
