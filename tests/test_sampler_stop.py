"""Stop ids and stop strings: found wherever tokens split them, their tokens kept, nothing drawn beyond them."""

import dataclasses

import numpy as np
import pytest

from sao_jax.sessions import Request
from sao_jax.stopping import StopMatcher
from tests.sampler_factory import MODEL, make_sampler, run


class PieceTokenizer:
  """Token i stands for PIECES[i]; ids beyond have no bytes of their own."""

  PIECES = (b'</', b'tool', b'>\n', b'<', b'/to', b'ol', b'>', b'x', b'\xc3', b'\xa9', b'', b'ab', b'cab', b'abca')
  vocab_size = len(PIECES)

  def token_bytes(self, token: int) -> bytes:
    if not 0 <= token < self.vocab_size:
      raise ValueError(f'no token {token}')
    return self.PIECES[token]


bytes_of = PieceTokenizer().token_bytes


@pytest.mark.parametrize('tokens, strings, want', [
    ([7, 0, 1, 2, 7], ('</tool>',), 4),  # '</' 'tool' '>\n': ends inside the third piece.
    ([3, 4, 5, 6, 7], ('</tool>',), 4),  # Four pieces.
    ([0, 1, 7, 2, 7], ('</tool>',), None),
    ([7, 7, 0, 1, 2], ('nothing', '>'), 5),
    ([8, 9, 7], ('é',), 2),  # Bytes of one character in two tokens.
    ([0, 10, 1, 10, 6], ('</tool>',), 5),  # Tokens without bytes in between.
    ([11, 12, 7], ('abcab',), 2), ([11, 13, 11], ('ababca',), 2), ([12, 11], ('ab',), 1), ([7, 7], ('xx', 'x'), 1),
    ([0, 0, 1, 6], ('</tool>',), 4), ([3, 3, 4, 5, 6], ('</tool>',), 5)])
@pytest.mark.parametrize('split', [1, 2, 3, 100])
def test_matcher_over_token_borders(tokens, strings, want, split):
  """The same whatever pieces the tokens come in, and wherever the turn was interrupted."""
  for interrupted in range(len(tokens) if want is None else want):
    matcher = StopMatcher((), strings, bytes_of, tokens[:interrupted])
    found, at = None, interrupted
    while found is None and at < len(tokens):
      stop = matcher.feed(np.array(tokens[at: at + split], np.int32))
      found = at + stop[0] if stop else None
      assert stop is None or stop[1] == 'stop_string'
      at += split
    assert found == want


def test_text_before_the_turn_is_not_searched():
  assert StopMatcher((), ('</tool>',), bytes_of, []).feed(np.array([1, 6], np.int32)) is None
  assert StopMatcher((), ('</tool>',), bytes_of, [0]).feed(np.array([1, 6], np.int32)) == (2, 'stop_string')


def test_ids_come_first_on_the_same_token_and_in_order():
  feed = lambda ids, tokens: StopMatcher(ids, ('x',), bytes_of, []).feed(np.array(tokens, np.int32))
  assert feed((7,), [0, 7]) == (2, 'stop_id')
  assert feed((1,), [0, 7, 1]) == (2, 'stop_string')
  assert feed((1, 2), [0, 2, 1]) == (2, 'stop_id')
  assert feed((), [0, 1]) is None


def test_a_matcher_that_cannot_work_is_refused():
  with pytest.raises(ValueError, match='empty'):
    StopMatcher((), ('',), bytes_of, [])
  with pytest.raises(ValueError, match='tokenizer'):
    StopMatcher((), ('x',), None, [])


PROMPT = [9, 8, 7, 6]


@pytest.fixture(scope='module')
def free():
  """What the prompt draws when nothing stops it."""
  return make_sampler().generate([PROMPT], max_new_tokens=40)[0]


@pytest.mark.parametrize('at', [0, 1, 3, 4, 6, 7, 20])
def test_stop_id_ends_the_turn_and_is_kept(free, at):
  """At every place of a chunk. Of several ids the first drawn counts."""
  stop = int(free.tokens[at])
  first = int(np.flatnonzero(free.tokens == stop)[0])
  out = make_sampler().generate([PROMPT], max_new_tokens=40, stop_ids=(stop, 66, 66))[0]
  end = min(first, int(np.flatnonzero(free.tokens == 66)[0]) if 66 in free.tokens else 99)
  assert out.stop_reason == 'stop_id' and len(out.tokens) == len(out.log_probs) == len(out.versions) == end + 1
  np.testing.assert_array_equal(out.tokens, free.tokens[: end + 1])
  np.testing.assert_array_equal(out.log_probs, free.log_probs[: end + 1])


def test_padding_id_that_is_the_stop_id(free):
  """Id 0 fills padded prefill rows; as a prompt token it does nothing, as a drawn one it stops."""
  prompt = [0, 0, 5, 0]
  plain = make_sampler().generate([prompt], max_new_tokens=30)[0]
  out = make_sampler().generate([prompt], max_new_tokens=30, stop_ids=(0,))[0]
  n = int(np.flatnonzero(plain.tokens == 0)[0]) + 1 if 0 in plain.tokens else 30
  np.testing.assert_array_equal(out.tokens, plain.tokens[:n])
  assert out.stop_reason == ('stop_id' if n < 30 else 'length')


class LetterTokenizer:
  """Every id is two letters of its own, so that any run of drawn tokens can be asked for as a string."""

  vocab_size = MODEL.vocab_size - 3  # The model knows ids that the tokenizer does not.

  def token_bytes(self, token: int) -> bytes:
    if not 0 <= token < self.vocab_size:
      raise ValueError(f'no token {token}')
    return bytes([0x30 + token // 8, 0x61 + token % 8])


def text_of(tokens) -> bytes:
  return b''.join(LetterTokenizer().token_bytes(t) if t < LetterTokenizer.vocab_size else b'' for t in map(int, tokens))


@pytest.mark.parametrize('begin, length', [(0, 2), (1, 2), (5, 4), (7, 5), (6, 6), (21, 5)])
def test_stop_string_across_tokens_and_chunks(free, begin, length):
  string = text_of(free.tokens)[begin: begin + length].decode()
  want = next(n for n in range(1, 41) if string.encode() in text_of(free.tokens[:n]))
  out = make_sampler(tokenizer=LetterTokenizer()).generate([PROMPT], max_new_tokens=40, stop_strings=('~~', string))[0]
  assert out.stop_reason == 'stop_string' and len(out.tokens) == len(out.log_probs) == want
  np.testing.assert_array_equal(out.tokens, free.tokens[:want])


@pytest.mark.parametrize('cut', [1, 2, 3])
def test_stop_string_that_began_before_the_turn_was_taken_up_again(free, cut):
  string = text_of(free.tokens[:4]).decode()
  whole = Request(0, np.array(PROMPT), prompt_id=0, attempt=0, max_new_tokens=40, stop_strings=(string,))
  sampler = make_sampler(tokenizer=LetterTokenizer())
  resumed = dataclasses.replace(
      whole, tokens=np.concatenate([PROMPT, free.tokens[:cut]]), max_new_tokens=40 - cut, turn_start=len(PROMPT))
  sampler.submit(resumed)
  out = run(sampler)[0]
  assert out.stop_reason == 'stop_string'
  np.testing.assert_array_equal(out.tokens, free.tokens[cut:4])
  sampler.release(0)
  sampler.submit(dataclasses.replace(resumed, turn_start=-1))  # As a prompt the same tokens are not searched.
  assert len(run(sampler)[0].tokens) > 4 - cut


def test_the_stop_token_is_context_of_the_next_turn(free):
  """It is fed, not forgotten: a second turn equals one drawn from the whole sequence at once."""
  stop = int(free.tokens[5])
  sampler = make_sampler()
  request = Request(0, np.array(PROMPT), prompt_id=0, attempt=0, max_new_tokens=40, stop_ids=(stop,))
  sampler.submit(request)
  first = run(sampler)[0]
  tokens = np.concatenate([PROMPT, first.tokens, [1, 2]])
  sampler.submit(dataclasses.replace(request, tokens=tokens, max_new_tokens=10, stop_ids=()))
  second = run(sampler)[0]
  fresh = make_sampler()
  fresh.submit(dataclasses.replace(request, tokens=tokens, max_new_tokens=10, stop_ids=()))
  want = run(fresh)[0]
  np.testing.assert_array_equal(second.tokens, want.tokens)
  np.testing.assert_allclose(second.log_probs, want.log_probs, atol=1e-5)
