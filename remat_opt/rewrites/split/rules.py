"""The rules of primitives without a body, by the primitive: along which dimensions each can be split.

What is not in the table runs on the whole batch, which ends a region. That is right for any primitive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from jax import lax
from jax.extend.core import primitives as P

from remat_opt.rewrites.split.indexing import gather, scatter, scatter_add
from remat_opt.rewrites.split.layouts import Bind, Chunk, Factor, Rule, Sum, View, along, resized
from remat_opt.rewrites.split.random import of_keys, random_bits
from remat_opt.trace import compat
from remat_opt.trace.inline import Equation
from remat_opt.trace.pool_parts import BOTH, SPREAD
from remat_opt.trace.primitives import ELEMENTWISE, named


def _elementwise(view: View) -> list[Factor]:
    """Each axis of the result; scalars and axes of one element are the same everywhere."""
    shape = view.shape_out()
    shapes = [view.shape(at) for at in range(len(view.inputs))]
    if any(one and (len(one) != len(shape) or {*one} - {*shape, 1}) for one in shapes):
        return []  # `bitcast_convert_type` to another size
    outputs = len(view.equation.outputs)
    return [
        Factor(tuple(axis if one and one[axis] == size else None for one in shapes), (axis,) * outputs)
        for axis, size in enumerate(shape)
    ]


def _other_axes(read: Callable[[dict[str, Any]], Sequence[int]], reduces: bool = False) -> Rule:
    """A rule for operands that are alike: all axes but some, which results do not have if it `reduces`."""

    def factors(view: View) -> list[Factor]:
        rank = len(view.shape(0))
        taken = {axis % rank for axis in read(view.params)} if rank else set()
        found = []
        for axis in range(rank):
            if axis not in taken:
                after = axis - (sum(one < axis for one in taken) if reduces else 0)
                inputs = [axis if len(view.shape(at)) == rank else None for at in range(len(view.inputs))]
                found.append(Factor(tuple(inputs), (after,) * len(view.equation.outputs)))
        return found

    return along(factors)


def _reduction(kind: Sum | None) -> Rule:
    """Reductions over `axes`: along others, or along one of these if parts can be combined."""

    def factors(view: View) -> list[Factor]:
        axes, found = view.params["axes"], []
        for axis in range(len(view.shape(0))):
            if axis not in axes:
                found.append(Factor((axis,), (axis - sum(one < axis for one in axes),)))
            elif kind is not None:
                found.append(Factor((axis,), (kind,)))
        return found

    return along(factors)


def _broadcast_in_dim(view: View) -> list[Factor]:
    shape, places = view.params["shape"], view.params["broadcast_dimensions"]
    found = []
    for axis, size in enumerate(shape):
        at = places.index(axis) if axis in places else None
        at = at if at is not None and view.shape(0)[at] == size else None
        found.append(Factor((at,), (axis,), resized("shape", axis)))
    return found


def _reshape(view: View) -> list[Factor]:
    """Axes that begin at the same place of the flat array: what follows in their group stays within a row."""
    if view.params.get("dimensions") is not None:
        return []
    before, after = view.shape(0), view.params["new_sizes"]
    found = []
    for axis, start in enumerate(_starts(before)):
        for other, other_start in enumerate(_starts(after)):
            if start == other_start and before[axis] > 1 and after[other] > 1:
                found.append(Factor((axis,), (other,), resized("new_sizes", other)))
    return found


def _starts(shape: Sequence[int]) -> list[int]:
    """For each axis how many blocks the axes in front of it make."""
    return [math.prod(shape[:axis]) for axis in range(len(shape))]


def _transpose(view: View) -> list[Factor]:
    return [Factor((axis,), (at,)) for at, axis in enumerate(view.params["permutation"])]


def _squeeze(view: View) -> list[Factor]:
    gone, rank = view.params["dimensions"], len(view.shape(0))
    left = [axis for axis in range(rank) if axis not in gone]
    return [Factor((axis,), (at,)) for at, axis in enumerate(left)]


def _pad(view: View) -> list[Factor]:
    return [Factor((axis, None), (axis,)) for axis, one in enumerate(view.params["padding_config"]) if not any(one)]


def _slice(view: View) -> list[Factor]:
    shape, strides = view.shape(0), view.params["strides"]
    whole = [
        axis
        for axis, size in enumerate(shape)
        if view.params["start_indices"][axis] == 0
        and view.params["limit_indices"][axis] == size
        and (strides is None or strides[axis] == 1)
    ]
    return [Factor((axis,), (axis,), resized("limit_indices", axis)) for axis in whole]


def _dynamic_slice(view: View) -> list[Factor]:
    shape, sizes = view.shape(0), view.params["slice_sizes"]
    indices = (None,) * (len(view.inputs) - 1)
    whole = [axis for axis, size in enumerate(shape) if size == sizes[axis]]
    return [Factor((axis, *indices), (axis,), resized("slice_sizes", axis)) for axis in whole]


def _dynamic_update_slice(view: View) -> list[Factor]:
    shape, update = view.shape(0), view.shape(1)
    indices = (None,) * (len(view.inputs) - 2)
    return [Factor((axis, axis, *indices), (axis,)) for axis, size in enumerate(shape) if size == update[axis]]


def _iota(view: View) -> list[Factor]:
    def counted(equation: Equation, operands: Sequence[Any], chunk: Chunk) -> Sequence[Any]:
        axis, shape = equation.params["dimension"], equation.params["shape"]
        (part,) = resized("shape", axis)(equation, operands, chunk)
        return [lax.add(part, lax.full_like(part, lax.convert_element_type(chunk.start(shape[axis]), part.dtype)))]

    sized = view.params["dimension"]
    binds: dict[int, Bind] = {sized: counted}
    rest = (None,) * len(view.inputs)
    return [Factor(rest, (axis,), binds.get(axis, resized("shape", axis))) for axis in range(len(view.shape_out()))]


def _dot_general(view: View) -> list[Factor]:
    (left, right), (left_batch, right_batch) = view.params["dimension_numbers"]
    found = [Factor((a, b), (at,)) for at, (a, b) in enumerate(zip(left_batch, right_batch, strict=True))]
    found += [Factor((a, b), (Sum.ADD,)) for a, b in zip(left, right, strict=True)]
    at = len(left_batch)
    for side, taken in enumerate(((*left, *left_batch), (*right, *right_batch))):
        for axis in range(len(view.shape(side))):
            if axis not in taken:
                found.append(Factor((axis, None) if side == 0 else (None, axis), (at,)))
                at += 1
    return found


def _convolution(view: View) -> list[Factor]:
    numbers = view.params["dimension_numbers"]
    images, kernel, result = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    groups, batch_groups = view.params["feature_group_count"], view.params["batch_group_count"]
    found = []
    if batch_groups == 1:
        found.append(Factor((images[0], None), (result[0],)))
    if batch_groups == 1 and groups == 1:
        found.append(Factor((None, kernel[0]), (result[1],)))
    if groups == 1:
        found.append(Factor((images[1], kernel[1]), (Sum.ADD,)))
    return found


def _window(view: View) -> list[Factor]:
    """Axes along which a window is one element that moves by one."""
    rank = len(view.params["window_dimensions"])
    ones = [view.params[name] for name in ("window_dimensions", "window_strides")]
    ones += [view.params[name] for name in ("base_dilation", "window_dilation") if name in view.params]
    padding = view.params["padding"]
    found = []
    for axis in range(rank):
        if all(one[axis] == 1 for one in ones) and tuple(padding[axis]) == (0, 0):
            inputs = tuple(axis if len(view.shape(at)) == rank else None for at in range(len(view.inputs)))
            found.append(Factor(inputs, (axis,) * len(view.equation.outputs)))
    return found


def _leading(trailing: int) -> Rule:
    """All axes of all operands and results but the last ones, as in linear algebra."""

    def factors(view: View) -> list[Factor]:
        axes = range(len(view.shape(0)) - trailing)
        inputs, outputs = len(view.inputs), len(view.equation.outputs)
        return [Factor((axis,) * inputs, (axis,) * outputs) for axis in axes]

    return along(factors)


def _barrier(view: View) -> list[Factor]:
    """Values that wait for each other, each by its own axis; those that are whole are read whole, and wait, too."""
    axes = [layout if isinstance(layout, int) else view.wanted.get(at) for at, layout in enumerate(view.inputs)]
    return [Factor(tuple(axes), tuple(axes))] if None not in axes else []  # type: ignore[arg-type]


# Shapes change in some of them, which have rules of their own.
_ELEMENTWISE = (ELEMENTWISE - {SPREAD, BOTH}) | named("eq_to le_to lt_to random_gamma threefry2x32")


RULES: dict[Any, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, along(_elementwise)),
    P.broadcast_in_dim_p: along(_broadcast_in_dim),
    P.reshape_p: along(_reshape),
    P.transpose_p: along(_transpose),
    P.squeeze_p: along(_squeeze),
    P.rev_p: _other_axes(lambda params: params["dimensions"]),
    P.pad_p: along(_pad),
    P.slice_p: along(_slice),
    P.dynamic_slice_p: along(_dynamic_slice),
    P.dynamic_update_slice_p: along(_dynamic_update_slice),
    P.iota_p: along(_iota),
    P.concatenate_p: _other_axes(lambda params: [params["dimension"]]),
    compat.split_p: _other_axes(lambda params: [params["axis"]]),
    P.sort_p: _other_axes(lambda params: [params["dimension"]]),
    P.top_k_p: _other_axes(lambda params: [params.get("axis", -1)]),
    **dict.fromkeys(
        (P.cumsum_p, P.cumprod_p, P.cummax_p, P.cummin_p, P.cumlogsumexp_p),
        _other_axes(lambda params: [params["axis"]]),
    ),
    **dict.fromkeys((P.argmax_p, P.argmin_p), _other_axes(lambda params: params["axes"], reduces=True)),
    P.reduce_sum_p: _reduction(Sum.ADD),
    P.reduce_max_p: _reduction(Sum.MAX),
    P.reduce_min_p: _reduction(Sum.MIN),
    P.reduce_or_p: _reduction(Sum.OR),
    P.reduce_and_p: _reduction(Sum.AND),
    **dict.fromkeys((P.reduce_prod_p, P.reduce_xor_p), _reduction(None)),
    P.dot_general_p: along(_dot_general),
    P.conv_general_dilated_p: along(_convolution),
    **dict.fromkeys(
        (P.reduce_window_max_p, P.reduce_window_min_p, P.reduce_window_sum_p, P.reduce_window_p), along(_window)
    ),
    **dict.fromkeys((P.select_and_scatter_add_p, P.select_and_gather_add_p), along(_window)),
    P.gather_p: along(gather),
    P.scatter_add_p: scatter_add,
    **dict.fromkeys((P.scatter_p, P.scatter_mul_p, P.scatter_min_p, P.scatter_max_p), along(scatter)),
    **dict.fromkeys((P.cholesky_p, P.triangular_solve_p), _leading(2)),
    P.random_bits_p: along(random_bits),
    **dict.fromkeys((P.random_split_p, P.random_fold_in_p), along(of_keys)),
    **dict.fromkeys((compat.random_wrap_p, compat.random_unwrap_p), along(of_keys)),
    compat.barrier_p: along(_barrier),
    # On a mesh, whose axes of the batch are taken out of the parameters.
    **dict.fromkeys((compat.sharding_constraint_p, compat.reshard_p, compat.pvary_p), along(_elementwise)),
}
