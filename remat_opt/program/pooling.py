"""The backward pass of max-pooling without a scatter.

JAX differentiates max-pooling into `select_and_scatter_add`. XLA's CPU and GPU compilers expand that into a windowed
reduction that carries an index for every dimension (four arrays of integers beside the maximum, for images), an array
of zeros of the input's size, and a scatter. On a TPU it is one instruction, which needs none of that.

The form here needs one byte for each window, which says where in the window its maximum was found; the rest is
elementwise and is fused. Windows are visited in the same order and each element sums its windows in the same order, so
that the results are the same to the bit, for ties, infinities and NaNs too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives

from remat_opt.program.inline import Equation

# One term of the sum for each place in a window; beyond this a scatter is the shorter program.
LARGEST_WINDOW = 64
EXPANDING_PLATFORMS = frozenset({"cpu", "cuda", "rocm"})


def without_scatter(equation: Equation, platform: str) -> bool:
    """Whether an equation is to be written by `scatter_free`: the platform's compiler would expand it, and the window
    is small and not padded by a whole window."""
    if equation.primitive is not primitives.select_and_scatter_add_p or platform not in EXPANDING_PLATFORMS:
        return False
    window, padding = equation.params["window_dimensions"], equation.params["padding"]
    inside = all(0 <= pad < size for size, pads in zip(window, padding, strict=True) for pad in pads)
    return inside and math.prod(window) <= LARGEST_WINDOW


def scatter_free(source: jax.Array, operand: jax.Array, params: dict[str, Any]) -> jax.Array:
    """What `select_and_scatter_add` computes.

    Args:
        source: one number for each window, (windows along each dimension of `operand`).
        operand: the array that is searched for each window's selected element.
        params: of the equation: `select_prim` ("ge" for a maximum), window dimensions, strides and padding.

    Returns:
        For each element of `operand` the sum of `source` over the windows that selected it.
    """
    window, strides, padding = params["window_dimensions"], params["window_strides"], params["padding"]
    places = list(itertools.product(*map(range, window)))
    which = _selected(source.shape, operand, places, params)
    # Elements that are a multiple of the stride apart are at the same places of windows: they are summed up together,
    # as many as there are windows, and spread once.
    sums: dict[tuple[int, ...], jax.Array] = {}
    for index in reversed(range(len(places))):  # windows in their order: the first has the element at its end
        begins = [place - low for place, (low, _) in zip(places[index], padding, strict=True)]
        first = tuple(begin % stride for begin, stride in zip(begins, strides, strict=True))
        counts = [-(-(n - start) // stride) for n, start, stride in zip(operand.shape, first, strides, strict=True)]
        if min(counts) <= 0:  # in the padding, in all windows
            continue
        skipped = [begin // stride for begin, stride in zip(begins, strides, strict=True)]
        part = lax.select(which == index, source, jnp.zeros_like(source))
        shift = [(low, n - low - windows, 0) for low, n, windows in zip(skipped, counts, source.shape, strict=True)]
        part = lax.pad(part, np.zeros((), source.dtype), shift)
        sums[first] = sums[first] + part if first in sums else part
    total = None
    for first, part in sums.items():
        spread = [
            (start, n - start - (count - 1) * stride - 1, stride - 1)
            for start, n, count, stride in zip(first, operand.shape, part.shape, strides, strict=True)
        ]
        part = lax.pad(part, np.zeros((), source.dtype), spread)
        total = part if total is None else total + part
    return jnp.zeros_like(operand) if total is None else total


def _selected(
    windows: tuple[int, ...], operand: jax.Array, places: Sequence[tuple[int, ...]], params: dict[str, Any]
) -> jax.Array:
    """For each window the index of the place that is selected; int8, as there are at most `LARGEST_WINDOW` places."""
    select, strides = params["select_prim"], params["window_strides"]
    least = -np.inf if select is primitives.ge_p else np.inf
    if not jnp.issubdtype(operand.dtype, jnp.floating):
        limits = jnp.iinfo(operand.dtype)
        least = limits.min if select is primitives.ge_p else limits.max
    padded = lax.pad(operand, jnp.asarray(least, operand.dtype), [(low, high, 0) for low, high in params["padding"]])

    def at(place: tuple[int, ...]) -> jax.Array:
        ends = [start + (count - 1) * step + 1 for start, count, step in zip(place, windows, strides, strict=True)]
        return lax.slice(padded, place, ends, strides)

    best, which = at(places[0]), jnp.zeros(windows, jnp.int8)
    for index, place in enumerate(places[1:], 1):
        candidate = at(place)
        keep = select.bind(best, candidate)
        best = lax.select(keep, best, candidate)
        which = lax.select(keep, which, jnp.full(windows, index, jnp.int8))
    return which
