"""FLOPs of a jaxpr, counted apart from the package: what the optimiser says of its own costs is compared with this.

Products and convolutions take 2 FLOPs for each product of two numbers that are not zeros of padding or of dilation;
a reduction one for each number that it reads, and whatever else is computed one an element. Loops count their length
times.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import primitives

# They move numbers, or do nothing: a slice that is written into a stack is no work on the whole stack, and neither a
# name nor a layout computes anything.
MOVES = frozenset({
    "broadcast_in_dim", "concatenate", "copy", "dynamic_slice", "dynamic_update_slice", "layout_constraint", "name",
    "optimization_barrier", "pad", "reshape", "rev", "slice", "squeeze", "stop_gradient", "transpose",
})  # fmt: skip


def flops_of(jaxpr: Any) -> float:
    """FLOPs when a jaxpr (closed or not) runs once."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    return sum(map(_flops_of_equation, jaxpr.eqns))


def _flops_of_equation(equation: Any) -> float:
    inner = [leaf for leaf in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr) if _is_jaxpr(leaf)]
    if inner:
        times = equation.params.get("length", 1) if equation.primitive is primitives.scan_p else 1
        if "grid_mapping" in equation.params:
            times = math.prod(equation.params["grid_mapping"].grid)
        if "newly_manual_axes" in equation.params:  # of a shard_map: one device's part
            times = math.prod(equation.params["mesh"].shape[axis] for axis in equation.params["newly_manual_axes"])
        return times * sum(map(flops_of, inner))
    results = [math.prod(variable.aval.shape) for variable in equation.outvars if hasattr(variable.aval, "shape")]
    if equation.primitive is primitives.dot_general_p:
        (contracted, _), _ = equation.params["dimension_numbers"]
        return 2.0 * results[0] * math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
    if equation.primitive is primitives.conv_general_dilated_p:
        return _flops_of_convolution(equation)
    if _does_nothing(equation):
        return 0.0
    name = equation.primitive.name
    if name.startswith("reduce_window"):
        return float(results[0] * math.prod(equation.params["window_dimensions"]))
    if name.startswith("select_and_scatter"):
        # What XLA makes of it and counts itself (`select_and_scatter_expander.cc`): a number is compared with the one
        # found so far, six operations ask whether either is the first, and it is selected with its index along every
        # dimension; then a sum for each window.
        windows = equation.invars[0].aval.shape
        numbers = math.prod(equation.params["window_dimensions"]) - 1
        return float(math.prod(windows) * ((7 + len(windows)) * numbers + 1))
    if name.startswith(("reduce_", "argmax", "argmin")) and equation.invars:
        return float(math.prod(equation.invars[0].aval.shape))
    return float(max(results, default=0))


def _does_nothing(equation: Any) -> bool:
    if equation.primitive is primitives.reduce_precision_p:  # `jax.checkpoint` rounds what it saves to what it is
        kept = jnp.finfo(equation.invars[0].aval.dtype)
        return (equation.params["exponent_bits"], equation.params["mantissa_bits"]) == (kept.nexp, kept.nmant)
    return equation.primitive.name in MOVES


def _flops_of_convolution(equation: Any) -> float:
    image, kernel, result = (atom.aval.shape for atom in (*equation.invars, *equation.outvars))
    numbers, params = equation.params["dimension_numbers"], equation.params
    flops = 2.0 * result[numbers.out_spec[0]] * result[numbers.out_spec[1]] * kernel[numbers.rhs_spec[1]]
    axes = zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)
    for axis, (i, k, o) in enumerate(axes):
        options = ("window_strides", "padding", "lhs_dilation", "rhs_dilation")
        flops *= _products_along(image[i], kernel[k], result[o], *(params[name][axis] for name in options))
    return flops


@functools.cache
def _products_along(image: int, kernel: int, result: int, stride: int, padding: Any, spread: int, reach: int) -> int:
    """Pairs of a result and a kernel element along one axis that meet a number of the image."""
    there = {index * spread + padding[0] for index in range(image)}
    return sum(place * stride + tap * reach in there for place in range(result) for tap in range(kernel))


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")
