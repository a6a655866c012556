"""Weights in 8-bit floats with scales, as public checkpoints store them: w = q * s, with one s for

    a block      NAME_scale_inv [..., ceil(O / 128), ceil(I / 128)] for q [..., O, I]; `weight_block_size` in config.json gives the sizes
    a row        NAME_scale [..., O, 1] or [..., O]
    a tensor     NAME_scale or NAME_scale_inv, one number

In spite of its name, `scale_inv` multiplies. Scales of activations are for 8-bit products, which are not made here, and are left out.
"""

from __future__ import annotations

import logging
import math
from typing import Any, Mapping

import ml_dtypes
import numpy as np

FLOAT8 = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2))
METHODS = ('fp8', 'compressed-tensors')
SUFFIXES = ('_scale_inv', '_scale')
OF_ACTIVATIONS = ('.input_scale', '.activation_scale', '.k_scale', '.v_scale', '.output_scale')


def split(dtypes: Mapping[str, np.dtype], settings: Mapping[str, Any], label: str) -> tuple[list[str], dict[str, str]]:
  """Tells weights from scales.

  Args:
    dtypes: name -> type of every stored tensor.
    settings: config.json.
    label: of the folder, for messages.

  Returns:
    Names of the weights, and weight -> name of its scale for those that have one.

  Raises:
    ValueError: a quantization other than 8-bit floats, or an 8-bit float without a scale.
  """
  method = (settings.get('quantization_config') or {}).get('quant_method', 'fp8')
  if method not in METHODS:
    raise ValueError(f'{label}: weights quantized by {method!r} cannot be read, only by {", ".join(METHODS)}; use the original checkpoint.')
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
  left_out = {*scales.values(), *unneeded}
  return [name for name in dtypes if name not in left_out], scales


def block_size(settings: Mapping[str, Any]) -> tuple[int, int]:
  """Rows and columns of a block."""
  size = (settings.get('quantization_config') or {}).get('weight_block_size') or (128, 128)
  return int(size[0]), int(size[1])


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
