"""Products of groups of rows with a matrix of each group: what a mixture of experts computes, with no row dropped.

    x [N, D]: rows sorted by group, sizes[g] of each; rows behind the last group belong to none
    product(x, weight [G, D, F], sizes)[n] = x[n] @ weight[group of n], 0 for rows of no group

By platform: megablox kernels on TPUs, `jax.lax.ragged_dot` on GPUs, and on the CPU, where `ragged_dot` multiplies every row with every
matrix, a loop over blocks of rows of one group. The platform is the one that a program is lowered for, which need not be the one it is
traced on; so both products are primitives with a lowering for each.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, Callable

import jax
from jax.extend import core as jax_core
from jax.interpreters import mlir
import jax.numpy as jnp

TILE = 128  # Rows and columns of a megablox tile.
LARGEST_BLOCK, SMALLEST_BLOCK = 256, 8  # Rows of a block on the CPU.


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def product(x: jax.Array, weight: jax.Array, sizes: jax.Array, transposed: bool = False) -> jax.Array:
  """Each row times the matrix of its group.

  Args:
    x: [N, D], rows sorted by group.
    weight: [G, D, F] in the dtype of x; [G, F, D] if `transposed`.
    sizes: i32[G], rows of each group; their sum is at most N.
    transposed: whether rows are multiplied with the transposed matrices.

  Returns:
    [N, F] in the dtype of x; 0 in rows that belong to no group.
  """
  return _PRODUCT.bind(x, weight, sizes, transposed=transposed)


def outer(x: jax.Array, y: jax.Array, sizes: jax.Array) -> jax.Array:
  """Sum over the rows of each group of x[n]^T y[n]: f32[G, D, F] of x [N, D] and y [N, F]; 0 for an empty group."""
  return _OUTER.bind(x, y, sizes)


def _forward(x: jax.Array, weight: jax.Array, sizes: jax.Array, transposed: bool) -> tuple[jax.Array, Any]:
  return product(x, weight, sizes, transposed), (x, weight, sizes)


def _backward(transposed: bool, saved: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array, None]:
  x, weight, sizes = saved
  pair = (gradient, x) if transposed else (x, gradient)
  return product(gradient, weight, sizes, not transposed), outer(*pair, sizes).astype(weight.dtype), None


product.defvjp(_forward, _backward)

# --- GPU and others ------------------------------------------------------------------------------------------------------------


def _ragged_product(x: jax.Array, weight: jax.Array, sizes: jax.Array, *, transposed: bool) -> jax.Array:
  return jax.lax.ragged_dot(x, weight.swapaxes(1, 2) if transposed else weight, sizes)


def _ragged_outer(x: jax.Array, y: jax.Array, sizes: jax.Array) -> jax.Array:
  numbers = jax.lax.RaggedDotDimensionNumbers(
      dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[])
  return jax.lax.ragged_dot_general(x, y, sizes, numbers, preferred_element_type=jnp.float32)


# --- TPU -----------------------------------------------------------------------------------------------------------------------


def _megablox() -> Any:
  """The module of the kernels; its package hides it behind a function of the same name."""
  return importlib.import_module('jax.experimental.pallas.ops.tpu.megablox.gmm')


def _whole_tiles(x: jax.Array) -> jax.Array:
  return jnp.pad(x, [(0, -x.shape[0] % TILE), (0, 0)])


def _tpu_product(x: jax.Array, weight: jax.Array, sizes: jax.Array, *, transposed: bool) -> jax.Array:
  out = _megablox().gmm(_whole_tiles(x), weight, sizes, x.dtype, (TILE, TILE, TILE), transpose_rhs=transposed)[:x.shape[0]]
  return _clear_rest(out, sizes)  # The kernel leaves rows of no group as they were in memory.


def _tpu_outer(x: jax.Array, y: jax.Array, sizes: jax.Array) -> jax.Array:
  return _megablox().tgmm(_whole_tiles(x).T, _whole_tiles(y), sizes, jnp.float32, (TILE, TILE, TILE))


# --- CPU -----------------------------------------------------------------------------------------------------------------------


def _clear_rest(x: jax.Array, sizes: jax.Array) -> jax.Array:
  return jnp.where(jnp.arange(x.shape[0])[:, None] < jnp.sum(sizes), x, 0)


def block_size(rows: int, groups: int) -> int:
  """Rows of a block: about half of a group of average size, so that little of the last blocks is empty."""
  size = SMALLEST_BLOCK
  while size < LARGEST_BLOCK and size * 2 * groups <= rows:
    size *= 2
  return size


def _blocks(sizes: jax.Array, rows: int, block: int) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Group and first row of every block, i32[M], and the number of blocks; a block never starts inside another one's group."""
  groups = sizes.shape[0]
  blocks = (sizes + block - 1) // block
  most = rows // block + min(groups, rows)
  owner = jnp.repeat(jnp.arange(groups), blocks, total_repeat_length=most)
  first = jnp.cumsum(blocks) - blocks
  start = (jnp.cumsum(sizes) - sizes)[owner] + (jnp.arange(most) - first[owner]) * block
  return owner, start, jnp.sum(blocks)


def _cpu_product(x: jax.Array, weight: jax.Array, sizes: jax.Array, *, transposed: bool) -> jax.Array:
  """A loop over blocks. The last block of a group runs over into the next one's rows, which come later and overwrite what it left."""
  rows, groups = x.shape[0], weight.shape[0]
  block = block_size(rows, groups)
  owner, start, count = _blocks(sizes, rows, block)
  x = jnp.pad(x, [(0, block), (0, 0)])
  contract = (((1,), (1 if transposed else 0,)), ((), ()))

  def step(i: jax.Array, out: jax.Array) -> jax.Array:
    part = jax.lax.dynamic_slice_in_dim(x, start[i], block)
    part = jax.lax.dot_general(part, jax.lax.dynamic_index_in_dim(weight, owner[i], keepdims=False), contract)
    return jax.lax.dynamic_update_slice_in_dim(out, part, start[i], 0)

  out = jnp.zeros((rows + block, weight.shape[1 if transposed else 2]), x.dtype)
  return _clear_rest(jax.lax.fori_loop(0, count, step, out)[:rows], sizes)


def _cpu_outer(x: jax.Array, y: jax.Array, sizes: jax.Array) -> jax.Array:
  rows, groups = x.shape[0], sizes.shape[0]
  block = block_size(rows, groups)
  owner, start, count = _blocks(sizes, rows, block)
  end = jnp.cumsum(sizes)
  x, y = (jnp.pad(z, [(0, block), (0, 0)]) for z in (x, y))

  def step(i: jax.Array, out: jax.Array) -> jax.Array:
    group = owner[i]
    inside = start[i] + jnp.arange(block) < end[group]
    left = jnp.where(inside[:, None], jax.lax.dynamic_slice_in_dim(x, start[i], block), 0)
    part = jnp.einsum('nd,nf->df', left, jax.lax.dynamic_slice_in_dim(y, start[i], block), preferred_element_type=jnp.float32)
    return out.at[group].add(part)

  return jax.lax.fori_loop(0, count, step, jnp.zeros((groups, x.shape[1], y.shape[1]), jnp.float32))


# --- One name, three ways ------------------------------------------------------------------------------------------------------


def _primitive(name: str, abstract: Callable[..., Any], **ways: Callable[..., jax.Array]) -> jax_core.Primitive:
  """A primitive with a lowering for each platform in `ways`; 'default' is that of all others."""
  primitive = jax_core.Primitive(name)
  primitive.def_impl(lambda *arrays, **settings: jax.jit(functools.partial(primitive.bind, **settings))(*arrays))
  primitive.def_abstract_eval(abstract)
  for platform, way in ways.items():
    lowering = mlir.lower_fun(way, multiple_results=False)
    mlir.register_lowering(primitive, lowering, **({} if platform == 'default' else {'platform': platform}))
  return primitive


_PRODUCT = _primitive(
    'grouped_product',
    lambda x, weight, sizes, *, transposed: jax.core.ShapedArray((x.shape[0], weight.shape[1 if transposed else 2]), x.dtype),
    cpu=_cpu_product, tpu=_tpu_product, default=_ragged_product)
_OUTER = _primitive(
    'grouped_outer', lambda x, y, sizes: jax.core.ShapedArray((sizes.shape[0], x.shape[1], y.shape[1]), jnp.dtype(jnp.float32)),
    cpu=_cpu_outer, tpu=_tpu_outer, default=_ragged_outer)
