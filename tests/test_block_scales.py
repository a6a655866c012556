"""Weights in 8-bit floats with scales, against plain loops in float64; whole folders of them, and folders in a bucket."""

import contextlib
import json
import logging
import pathlib
import shutil

from etils import epath
from etils.epath import testing as epath_testing
import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from sao_jax import models
from sao_jax.models import block_scales, files, pretrained, safetensors_io, transformer

GOLDENS = pathlib.Path(__file__).parent / 'goldens'
E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)


def oracle(q, s, block):
  out = np.zeros(q.shape)
  for *lead, i, j in np.ndindex(q.shape):
    out[*lead, i, j] = float(q[*lead, i, j]) * float(s[*lead, i // block[0], j // block[1]])
  return out


@pytest.mark.parametrize('dtype', [E4M3, E5M2])
@pytest.mark.parametrize('shape, block', [((5, 7), (2, 3)), ((4, 6), (2, 3)), ((3, 3), (128, 128)), ((2, 5, 4), (2, 2)), ((1, 9), (4, 4))])
def test_blocks_against_a_loop(dtype, shape, block):
  rng = np.random.default_rng(0)
  q = rng.normal(size=shape).astype(dtype)
  s = rng.uniform(0.5, 2, (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))).astype(np.float32)
  got = block_scales.dequantize(q, s, block, 'w')
  assert got.dtype == np.float32 and got.shape == shape
  np.testing.assert_allclose(got, oracle(q, s, block), rtol=1e-6)


def test_by_hand():
  q = np.array([[1, 2, 4], [0.5, -2, 8]], E4M3)
  s = np.array([[10, 100], [1, -1]], np.float32)
  np.testing.assert_array_equal(block_scales.dequantize(q, s, (1, 2), 'w'), [[10, 20, 400], [0.5, -2, -8]])
  np.testing.assert_array_equal(block_scales.dequantize(q, np.float32(2)[None], (1, 2), 'w'), [[2, 4, 8], [1, -4, 16]])
  for rows in (np.array([[2], [3]], np.float32), np.array([2, 3], np.float32)):
    np.testing.assert_array_equal(block_scales.dequantize(q, rows, (1, 2), 'w'), [[2, 4, 8], [1.5, -6, 24]])


@pytest.mark.parametrize('scale', [(2, 2), (3, 1), (2, 1, 1), (0,)])
def test_scales_of_another_shape_are_named(scale):
  with pytest.raises(ValueError, match=r"'w' of shape \(5, 7\) needs scales of shape \(1, 1\) .*got"):
    block_scales.dequantize(np.zeros((5, 7), E4M3), np.ones(scale, np.float32), (128, 128), 'w')


def test_what_is_a_scale():
  names = {'a.weight': E4M3, 'a.weight_scale_inv': np.dtype('f4'), 'b.weight': E4M3, 'b.weight_scale': np.dtype('f4'),
           'b.input_scale': np.dtype('f4'), 'norm.weight': np.dtype('f4'), 'logit_scale': np.dtype('f4')}
  weights, scales = block_scales.split(names, 'folder')
  assert weights == ['a.weight', 'b.weight', 'norm.weight', 'logit_scale']
  assert scales == {'a.weight': 'a.weight_scale_inv', 'b.weight': 'b.weight_scale'}
  with pytest.raises(ValueError, match="folder: tensor 'a.weight' holds 8-bit floats, but there is no a.weight_scale_inv"):
    block_scales.split({'a.weight': E4M3}, 'folder')
  with pytest.raises(ValueError, match="folder: tensor 'a.weight' is of type float32, not of 8-bit floats, but has a scale"):
    block_scales.split({'a.weight': np.dtype('f4'), 'a.weight_scale': np.dtype('f4')}, 'folder')


def compressed(strategy='channel', *, bits=8, kind='float', block=None, groups=1):
  """`quantization_config` as compressed-tensors writes it."""
  weights = {'num_bits': bits, 'type': kind, 'strategy': strategy, 'block_structure': block, 'symmetric': True, 'dynamic': False}
  activations = {'num_bits': 8, 'type': 'float', 'strategy': 'token', 'dynamic': True}
  return {
      'quant_method': 'compressed-tensors', 'format': 'float-quantized', 'quantization_status': 'compressed', 'kv_cache_scheme': None,
      'ignore': ['lm_head', 're:.*mlp.gate$'],
      'config_groups': {f'group_{i}': {'targets': ['Linear'], 'weights': weights, 'input_activations': activations} for i in range(groups)}}


@pytest.mark.parametrize('quantization, size', [
    (None, (128, 128)), ({'quant_method': 'fp8'}, (128, 128)), ({'quant_method': 'fp8', 'weight_block_size': [64, 32]}, (64, 32)),
    (compressed(), (128, 128)), (compressed('block', block=[64, 32], groups=2), (64, 32)), (compressed('block', block='64x32'), (64, 32))])
@pytest.mark.parametrize('key', ['quantization_config', 'compression_config'])
def test_the_size_of_a_block_in_both_spellings(quantization, size, key):
  assert block_scales.block_size({key: quantization}, 'folder') == size


@pytest.mark.parametrize('quantization, words', [
    ({'quant_method': 'gptq'}, "quantized by 'gptq' cannot be read, only by fp8, compressed-tensors"),
    (compressed(bits=4), "group_0 of quantization_config has weights of 4 bits, type 'float', scales by 'channel'"),
    (compressed(kind='int'), "weights of 8 bits, type 'int'"), (compressed('group'), "scales by 'group'.*by channel, tensor, block"),
    ({'quant_method': 'fp8', 'weight_block_size': [0, 128]}, r"two positive numbers like \[128, 128\], got \[0, 128\]"),
    ({'quant_method': 'fp8', 'weight_block_size': 128}, 'two positive numbers'),
    ({'quant_method': 'fp8', 'weight_block_size': [128]}, 'two positive numbers'),
    ({**compressed('block', block=[64, 32]), 'weight_block_size': [128, 128]}, 'blocks of several sizes'),
    ({'config_groups': 3}, 'config_groups of quantization_config must map'), ({'config_groups': {'a': {'weights': 3}}}, 'must map names'),
    ('fp8', "must be an object, got 'fp8'")])
def test_quantizations_that_cannot_be_read(quantization, words):
  with pytest.raises(ValueError, match=f'folder: .*{words}'):
    block_scales.block_size({'quantization_config': quantization}, 'folder')


# --- Whole folders -------------------------------------------------------------------------------------------------------------


def quantized(folder, settings, suffix, scale_of, kept=(), extra=()):
  """Replaces the projections of a folder, but those in `kept`, by 8-bit floats with scales.

  Args:
    folder: changed in place.
    settings: `quantization_config`, for its config.json.
    suffix: of the scales' names.
    scale_of: what (rows, columns) of a weight -> scales, and how they read in a float64 loop: block of (rows, columns).
    kept: parts of names that stay as they are.
    extra: names of further tensors, of one number.

  Returns: name -> what each weight stands for.
  """
  path = folder / 'model.safetensors'
  tensors, meaning, count = safetensors.numpy.load_file(path), {}, 0
  for name, x in list(tensors.items()):
    meaning[name] = x
    if x.ndim == 2 and '_proj' in name and not any(part in name for part in kept):
      s, block = scale_of(np.random.default_rng(len(name)), *x.shape)
      tensors[name], tensors[name + suffix] = x.astype(E4M3), s
      meaning[name] = oracle(x.astype(E4M3), s.astype(np.float64).reshape(-(-x.shape[0] // block[0]), -1), block).astype(np.float32)
      count += 1
  safetensors.numpy.save_file({**tensors, **{name: np.ones(1, np.float32) for name in extra}}, path)
  values = json.loads((folder / 'config.json').read_text())
  (folder / 'config.json').write_text(json.dumps({**values, 'quantization_config': settings}))
  assert count >= 14
  return meaning


def by_block(rng, rows, columns, block=(8, 16)):
  return rng.uniform(0.5, 2, (-(-rows // block[0]), -(-columns // block[1]))).astype(np.float32), block


def by_row(rng, rows, columns):
  return rng.uniform(0.5, 2, (rows, 1)).astype(ml_dtypes.bfloat16), (1, columns)


def by_tensor(rng, rows, columns):
  return rng.uniform(0.5, 2, (1,)).astype(np.float32), (rows, columns)


DEEPSEEK = {'quant_method': 'fp8', 'fmt': 'e4m3', 'activation_scheme': 'dynamic', 'weight_block_size': [8, 16]}


@pytest.mark.parametrize('name, settings, suffix, scale_of, kept', [
    ('tiny_qwen3', DEEPSEEK, '_scale_inv', by_block, ()),
    ('family_qwen3_moe', DEEPSEEK, '_scale_inv', by_block, ()),
    ('family_glm_moe_dsa', {**DEEPSEEK, 'modules_to_not_convert': ['model.layers.0.self_attn.indexers_proj']}, '_scale_inv', by_block,
     ('indexer.weights_proj',)),
    ('family_glm4_moe', compressed(), '_scale', by_row, ()),
    ('family_glm4_moe', compressed('tensor'), '_scale', by_tensor, ('layers.0.', 'shared_experts')),
    ('family_glm4_moe', compressed('block', block=[8, 16]), '_scale', by_block, ()),
])
def test_a_folder_of_8_bit_floats_loads_as_what_it_stands_for(name, settings, suffix, scale_of, kept, tmp_path, caplog):
  """Both spellings of GLM's folders: DeepSeek's blocks, as GLM-5-FP8 has them, and compressed-tensors, as GLM-4.5-FP8 has it."""
  folder, plain = tmp_path / 'fp8', tmp_path / 'plain'
  for target in (folder, plain):
    shutil.copytree(GOLDENS / name, target)
  beside = ('q_proj.input_scale', 'k_scale', 'v_scale') if suffix == '_scale' else ()  # Of activations and of cached keys and values.
  meaning = quantized(folder, settings, suffix, scale_of, kept, [f'model.layers.1.self_attn.{part}' for part in beside])
  safetensors.numpy.save_file(meaning, plain / 'model.safetensors')
  with caplog.at_level(logging.INFO):
    got, want = (transformer.split(models.load_pretrained(f)[0])[1] for f in (folder, plain))
  assert got.keys() == want.keys()
  for path, x in got.items():
    np.testing.assert_array_equal(x, want[path], err_msg=path)
  assert ('3 scales of activations' in caplog.text) == bool(beside)


# --- A bucket ------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def bucket(tmp_path):
  """'gs://bucket' is a local folder; nothing else of gs:// is reached."""
  calls = ('exists', 'glob', 'isdir', 'listdir', 'makedirs', 'mkdir', 'open', 'remove', 'rmtree', 'stat')
  with epath_testing.mock_epath(**{name: _redirected(tmp_path) for name in calls}):
    yield 'gs://bucket'


def _redirected(tmp_path):
  return lambda original, path, *args, **kwargs: original(str(path).replace('gs://bucket', str(tmp_path)), *args, **kwargs)


def test_a_model_in_a_bucket_is_saved_and_loaded(tmp_path):
  model, _ = models.load_pretrained(GOLDENS / 'tiny_qwen3')
  params = transformer.split(model)[1]
  with bucket(tmp_path) as root:
    models.save_pretrained(f'{root}/saved', model, shard_bytes=20_000)
    assert len(list((tmp_path / 'saved').glob('*.safetensors'))) > 1
    again = transformer.split(models.load_pretrained(f'{root}/saved')[0])[1]
    for path, x in params.items():
      np.testing.assert_array_equal(again[path], x)
    with pytest.raises(ValueError, match='already holds something'):
      models.save_pretrained(f'{root}/saved', model)
    with pytest.raises(ValueError, match='does not exist'):
      models.load_pretrained(f'{root}/nothing')
    with pytest.raises(ValueError, match='copy it to a local disk first'):
      models.load_pretrained(f'{root}/model.gguf')


def test_paths():
  assert files.path_of('a/b') == pathlib.Path('a/b') and not files.is_remote(files.path_of('~/x'))
  assert isinstance(files.path_of('gs://a/b'), epath.Path) and files.is_remote(files.path_of('gs://a/b'))


def test_half_a_folder_in_a_bucket_is_no_model(tmp_path):
  """config.json comes last, so a save that was cut off leaves nothing that loads."""
  model, _ = models.load_pretrained(GOLDENS / 'tiny_qwen3')
  with bucket(tmp_path) as root, pytest.MonkeyPatch.context() as patch:
    patch.setattr(safetensors_io, 'write', lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
      models.save_pretrained(f'{root}/saved', model)
    patch.undo()
    with pytest.raises(ValueError, match='has no config.json|does not exist'):
      models.load_pretrained(f'{root}/saved')


def test_a_file_cut_short_after_its_header_was_read(tmp_path):
  shutil.copytree(GOLDENS / 'tiny_qwen3', tmp_path / 'model')
  path = tmp_path / 'model' / 'model.safetensors'
  file = safetensors_io.SafetensorsFile(path)
  path.write_bytes(path.read_bytes()[:-100])
  with pytest.raises(ValueError, match='is cut short: tensor'):
    for name in file.shapes:
      file.read(name)


def test_loading_holds_no_second_copy_of_the_parameters(tmp_path):
  """The host's array of a tensor is free before the next one is read."""
  alive, most = 0, 0
  model, _ = models.load_pretrained(GOLDENS / 'tiny_qwen3')
  read, put = safetensors_io.SafetensorsFile.read, jax.device_put

  def counted_read(self, name):
    nonlocal alive, most
    alive += 1
    most = max(most, alive)
    return read(self, name)

  def counted_put(x, *args, **kwargs):
    nonlocal alive
    result = put(x, *args, **kwargs)
    alive -= 1
    return result

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(safetensors_io.SafetensorsFile, 'read', counted_read)
    patch.setattr(pretrained.jax, 'device_put', counted_put)
    models.load_pretrained(GOLDENS / 'tiny_qwen3')
  assert most == 1 and alive == 0
