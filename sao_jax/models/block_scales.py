"""Weights in 8-bit floats with scales, as public checkpoints store them: w = q * s, with one s for

    a block      NAME_scale_inv or NAME_scale [..., ceil(O / 128), ceil(I / 128)] for q [..., O, I]; config.json gives the size of a block
    a row        NAME_scale [..., O, 1] or [..., O]
    a tensor     NAME_scale or NAME_scale_inv, one number

In spite of its name, `scale_inv` multiplies. Scales of activations are for 8-bit products, which are not made here, and are left out.

What config.json says of it (`quantization_config`) comes in two spellings, that of DeepSeek and GLM-5-FP8, and that of compressed-tensors
and GLM-4.5-FP8. Which modules were left as they are is not read there: a tensor of 8-bit floats says it by its type.

    {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": [...]}
    {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {
        "type": "float", "num_bits": 8, "strategy": "channel" | "tensor" | "block", "block_structure": [128, 128]}}}, "ignore": [...]}
"""

from __future__ import annotations

import logging
import math
from typing import Any, Mapping

import ml_dtypes
import numpy as np

FLOAT8 = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2))
METHODS = ('fp8', 'compressed-tensors')
STRATEGIES = ('channel', 'tensor', 'block')
BLOCK = (128, 128)
SUFFIXES = ('_scale_inv', '_scale')
OF_ACTIVATIONS = ('.input_scale', '.activation_scale', '.q_scale', '.k_scale', '.v_scale', '.output_scale')


def block_size(settings: Mapping[str, Any], label: str) -> tuple[int, int]:
  """Rows and columns of a block.

  Args:
    settings: config.json.
    label: of the folder, for messages.

  Raises:
    ValueError: weights quantized to anything but 8-bit floats, or a size that is none.
  """
  found = settings.get('quantization_config') or settings.get('compression_config') or {}  # The latter is an older name.
  if not isinstance(found, Mapping):
    raise ValueError(f'{label}: quantization_config of config.json must be an object, got {found!r}.')
  method = found.get('quant_method', 'fp8')
  if method not in METHODS:
    raise ValueError(f'{label}: weights quantized by {method!r} cannot be read, only by {", ".join(METHODS)}; use the original checkpoint.')
  sizes = [found['weight_block_size']] if found.get('weight_block_size') is not None else []
  groups = found.get('config_groups') or {}
  whole = lambda group: isinstance(group, Mapping) and isinstance(group.get('weights') or {}, Mapping)
  if not isinstance(groups, Mapping) or not all(map(whole, groups.values())):
    raise ValueError(f'{label}: config_groups of quantization_config must map names to objects with weights, got {groups!r:.80}.')
  for name, group in groups.items():
    weights = group.get('weights') or {}
    kind = (weights.get('type', 'float'), weights.get('num_bits', 8), weights.get('strategy', 'channel'))
    if kind[:2] != ('float', 8) or kind[2] not in STRATEGIES:
      raise ValueError(
          f'{label}: {name} of quantization_config has weights of {kind[1]} bits, type {kind[0]!r}, scales by {kind[2]!r}; what can be '
          f'read is 8-bit floats with scales by {", ".join(STRATEGIES)}. Use the original checkpoint.')
    sizes += [weights['block_structure']] if weights.get('block_structure') is not None else []
  sizes = sorted({_size(value, label) for value in sizes})
  if len(sizes) > 1:
    raise ValueError(f'{label}: quantization_config names blocks of several sizes, {sizes}; one is needed.')
  return sizes[0] if sizes else BLOCK


def _size(value: Any, label: str) -> tuple[int, int]:
  """[128, 128] or '128x128' as two numbers."""
  parts = value.lower().split('x') if isinstance(value, str) else value
  try:
    rows, columns = (int(n) for n in parts)
  except (TypeError, ValueError):
    rows = columns = 0
  if rows < 1 or columns < 1:
    raise ValueError(f'{label}: a block of quantization_config must be two positive numbers like [128, 128], got {value!r}.')
  return rows, columns


def split(dtypes: Mapping[str, np.dtype], label: str) -> tuple[list[str], dict[str, str]]:
  """Tells weights from scales.

  Args:
    dtypes: name -> type of every stored tensor.
    label: of the folder, for messages.

  Returns:
    Names of the weights, and weight -> name of its scale for those that have one.

  Raises:
    ValueError: an 8-bit float without a scale, or a scale of something else.
  """
  scales = {}
  for name in dtypes:
    for suffix in SUFFIXES:
      if name.endswith(suffix) and name.removesuffix(suffix) in dtypes:
        scales[name.removesuffix(suffix)] = name
  unneeded = [name for name in dtypes if name.endswith(OF_ACTIVATIONS)]
  if unneeded:
    logging.info('%s: %d scales of activations, e.g. %s, are left out.', label, len(unneeded), unneeded[0])
  bare = [name for name, dtype in dtypes.items() if dtype in FLOAT8 and name not in scales]
  if bare:
    raise ValueError(f'{label}: tensor {bare[0]!r} holds 8-bit floats, but there is no {bare[0]}_scale_inv or {bare[0]}_scale beside it.')
  whole = [name for name in scales if dtypes[name] not in FLOAT8]
  if whole:
    raise ValueError(
        f'{label}: tensor {whole[0]!r} is of type {dtypes[whole[0]].name}, not of 8-bit floats, but has a scale, {scales[whole[0]]}: '
        'whether it is to be multiplied cannot be known. Store it as 8-bit floats, or without the scale.')
  left_out = {*scales.values(), *unneeded}
  return [name for name in dtypes if name not in left_out], scales


def dequantize(weight: np.ndarray, scale: np.ndarray, block: tuple[int, int], name: str) -> np.ndarray:
  """weight * scale, f32 in the shape of `weight`; never more than the result and a row of blocks in memory.

  Raises:
    ValueError: a scale whose shape fits neither blocks, rows nor the whole tensor.
  """
  scale = scale.astype(np.float32)
  if scale.size == 1:
    return weight.astype(np.float32) * scale.reshape(())
  *lead, rows, columns = weight.shape
  out = np.empty((math.prod(lead), rows, columns), np.float32)
  if scale.shape in (weight.shape[:-1], (*weight.shape[:-1], 1)):
    np.multiply(weight.reshape(out.shape), scale.reshape(-1, rows, 1), out=out, dtype=np.float32)
    return out.reshape(weight.shape)
  down, across = -(-rows // block[0]), -(-columns // block[1])
  if scale.shape != (*lead, down, across):
    raise ValueError(
        f'Tensor {name!r} of shape {weight.shape} needs scales of shape {(*lead, down, across)} for blocks of {block[0]} x {block[1]}, '
        f'{(*weight.shape[:-1], 1)} for rows, or one number: got {scale.shape}.')
  for matrix, q, s in zip(out, weight.reshape(out.shape), scale.reshape(-1, down, across)):
    for i in range(down):
      part = slice(i * block[0], (i + 1) * block[0])
      np.multiply(q[part].astype(np.float32), np.repeat(s[i], block[1])[:columns], out=matrix[part])
  return out.reshape(weight.shape)
