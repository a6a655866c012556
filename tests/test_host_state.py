"""Host state to bytes and back, exactly."""

import math

from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from sao_jax import host_state
from sao_jax.types import Rollout
from tests.rollout_factory import make_rollout


def assert_same(a, b):
  """Equal in type, dtype, shape and bits, all the way down."""
  assert type(a) is type(b), (a, b)
  if isinstance(a, (np.ndarray, np.generic)):
    assert a.dtype == b.dtype and a.shape == b.shape
    if a.dtype.kind == 'U':
      np.testing.assert_array_equal(a, b)
    else:
      assert np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()
  elif isinstance(a, Rollout):
    assert_same(host_state.rollout_to_state(a), host_state.rollout_to_state(b))
  elif isinstance(a, dict):
    assert list(a) == list(b)
    for key in a:
      assert_same(a[key], b[key])
  elif isinstance(a, (list, tuple)):
    assert len(a) == len(b)
    for x, y in zip(a, b):
      assert_same(x, y)
  elif isinstance(a, float):
    assert (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
  else:
    assert a == b


DTYPES = st.sampled_from([np.int8, np.int32, np.int64, np.uint32, np.bool_, np.float16, np.float32, np.float64, ml_dtypes.bfloat16])


@st.composite
def arrays(draw):
  """Any bits of any dtype, NaN payloads and signed zeros included."""
  dtype = np.dtype(draw(DTYPES))
  shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
  raw = draw(st.binary(min_size=math.prod(shape) * dtype.itemsize, max_size=math.prod(shape) * dtype.itemsize))
  array = np.frombuffer(raw, np.uint8)
  array = (array % 2).astype(bool) if dtype == np.bool_ else array.view(dtype)
  return np.array(array.reshape(shape), order=draw(st.sampled_from('CF')))


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), arrays(), st.integers(-2**63, 2**63 - 1).map(np.int64),
    st.floats(width=32).map(np.float32), st.integers(0, 9).map(lambda i: make_rollout(ticket=i, seed=i)))
TREES = st.recursive(
    LEAVES,
    lambda t: st.one_of(st.lists(t, max_size=4), st.lists(t, max_size=3).map(tuple), st.dictionaries(st.text(max_size=3), t, max_size=4)),
    max_leaves=12)


@settings(max_examples=150, deadline=None)
@given(TREES)
def test_round_trip(tree):
  assert_same(host_state.decode(host_state.encode(tree)), tree)


def test_hand_picked_values():
  tree = {
      '!': 'taken', 'nan': [math.nan, math.inf, -math.inf, -0.0], 'big': 2**200, 'text': 'é\ud800\n"', 'empty': [{}, [], (), ''],
      'int64': np.array([2**62 + 1, -2**63]), 'big_endian': np.array([1, 2], '>i4'), 'names': np.array(['a', 'bc']),
      'payload': np.array([0x7fc00001, 0xff800001], np.uint32).view(np.float32), 'scalar': np.bool_(True),
      'bfloat16': np.array([1.0, -2.5], ml_dtypes.bfloat16), 'none': None, 'tuple': (1, (2.0, [np.float64(3)]))}
  assert_same(host_state.decode(host_state.encode(tree)), tree)


def test_the_same_tree_gives_the_same_bytes():
  tree = {'a': np.arange(5), 'b': [make_rollout()]}
  assert host_state.encode(tree) == host_state.encode(tree)


@pytest.mark.parametrize('tree, words', [
    ({'a': {3: 1}}, r'state\.a has the key 3'),
    ({'a': [1, {'b': object()}]}, r'state\.a\[1\]\.b is a object'),
    ({'a': {1, 2}}, r'state\.a is a set'),
    ({'x': np.array([object()])}, r'state\.x is an array of object'),
    ({'x': b'bytes'}, r'state\.x is a bytes'),
])
def test_what_cannot_be_saved_is_named(tree, words):
  with pytest.raises(TypeError, match=words):
    host_state.encode(tree)


def test_device_arrays_are_sent_elsewhere():
  with pytest.raises(TypeError, match='Device arrays go into the arrays of a checkpoint'):
    host_state.encode({'x': jnp.zeros(3)})


def test_damage_is_noticed():
  data = host_state.encode({'x': np.arange(1000), 'rollouts': [make_rollout()]})
  rng = np.random.default_rng(0)
  for cut in rng.integers(0, len(data), 50):
    with pytest.raises(ValueError, match='damaged host state'):
      host_state.decode(data[:cut])
  body = data.index(np.arange(1000).tobytes()[:64])
  for position in rng.integers(body, body + 8000, 50):
    with pytest.raises(ValueError, match='damaged host state'):
      host_state.decode(data[:position] + bytes([data[position] ^ 1]) + data[position + 1:])


def test_files_of_rollouts(tmp_path):
  path = tmp_path / 'new' / 'rollouts.npz'
  rollouts = [make_rollout(ticket=i, seed=i, metrics={'success': 0.1 * i}, started_s=1 / 3) for i in range(5)]
  host_state.save_rollouts(path, rollouts)
  assert_same(host_state.load_rollouts(path), rollouts)
  path.write_bytes(path.read_bytes()[:-7])
  with pytest.raises(ValueError, match='rollouts.npz cannot be read'):
    host_state.load_rollouts(path)
  assert [p.name for p in path.parent.iterdir()] == ['rollouts.npz']
