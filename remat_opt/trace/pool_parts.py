"""The two parts of max-pooling's backward pass as primitives of the flat program; `pooling.py` writes them.

They stand in equations where JAX's `select_and_scatter_add` stood. JAX itself never sees them: `bind` is an ordinary
JAX function.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Stands in an equation for a primitive: several operations that are one to the planner."""

    name: str
    bind: Callable[..., jax.Array]
    multiple_results: bool = False

    def get_bind_params(self, params: dict[str, Any]) -> dict[str, Any]:
        """As of JAX's primitives."""
        return params


def places_of(operand: jax.Array, *, pool: dict[str, Any], rectified: bool = False) -> jax.Array:
    """For each window of an array the index, within the window, of the selected element.

    Args:
        operand: the array.
        pool: parameters of `select_and_scatter_add`: `select_prim` ("ge" for a maximum), window dimensions, strides and
            padding.
        rectified: give -1 where the selected element is not positive.

    Returns:
        int8 (windows along each dimension of `operand`); there are at most `pooling.LARGEST_WINDOW` places.
    """
    window, padding, strides = pool["window_dimensions"], pool["padding"], pool["window_strides"]
    select = pool["select_prim"]
    places = list(itertools.product(*map(range, window)))
    counts = [
        (size + low + high - reach) // stride + 1
        for size, (low, high), reach, stride in zip(operand.shape, padding, window, strides, strict=True)
    ]
    least = -np.inf if select is primitives.ge_p else np.inf
    if not jnp.issubdtype(operand.dtype, jnp.floating):
        limits = jnp.iinfo(operand.dtype)
        least = limits.min if select is primitives.ge_p else limits.max
    padded = lax.pad(operand, jnp.asarray(least, operand.dtype), [(low, high, 0) for low, high in padding])

    def at(place: tuple[int, ...]) -> jax.Array:
        ends = [start + (count - 1) * step + 1 for start, count, step in zip(place, counts, strides, strict=True)]
        return lax.slice(padded, place, ends, strides)

    best = at(places[0])
    which = jnp.zeros_like(best, jnp.int8)
    for index, place in enumerate(places[1:], 1):
        candidate = at(place)
        keep = select.bind(best, candidate)
        best = lax.select(keep, best, candidate)
        which = lax.select(keep, which, jnp.full_like(which, index))
    return lax.select(best > 0, which, jnp.full_like(which, -1)) if rectified else which


def spread(source: jax.Array, which: jax.Array, *, pool: dict[str, Any], shape: tuple[int, ...]) -> jax.Array:
    """For each element of a pooled array the sum over the windows that selected it.

    Args:
        source: one number for each window.
        which: the place that each window selected, from `places_of`.
        pool: as of `places_of`.
        shape: of the array that was pooled.
    """
    window, strides, padding = pool["window_dimensions"], pool["window_strides"], pool["padding"]
    places = list(itertools.product(*map(range, window)))
    # Elements that are a multiple of the stride apart are at the same places of windows. So there is one small array of
    # sums for each remainder, which is spread over the shape once.
    sums: dict[tuple[int, ...], jax.Array] = {}
    for index in reversed(range(len(places))):  # adds windows in order: an element is last in the first one it is in
        begins = [place - low for place, (low, _) in zip(places[index], padding, strict=True)]
        first = tuple(begin % stride for begin, stride in zip(begins, strides, strict=True))
        counts = [-(-(n - start) // stride) for n, start, stride in zip(shape, first, strides, strict=True)]
        if min(counts) <= 0:  # in the padding, in all windows
            continue
        skipped = [begin // stride for begin, stride in zip(begins, strides, strict=True)]
        part = lax.select(which == index, source, jnp.zeros_like(source))
        shift = [(low, n - low - windows, 0) for low, n, windows in zip(skipped, counts, source.shape, strict=True)]
        part = lax.pad(part, np.zeros((), source.dtype), shift)
        sums[first] = sums[first] + part if first in sums else part
    total = None
    for first, part in sums.items():
        wide = [
            (start, n - start - (count - 1) * stride - 1, stride - 1)
            for start, n, count, stride in zip(first, shape, part.shape, strides, strict=True)
        ]
        part = lax.pad(part, np.zeros((), source.dtype), wide)
        total = part if total is None else total + part
    return jnp.zeros(shape, source.dtype) if total is None else total


def both(source: jax.Array, operand: jax.Array, *, pool: dict[str, Any]) -> jax.Array:
    """The whole backward pass: `spread` to the places of an array."""
    return spread(source, places_of(operand, pool=pool), pool=pool, shape=operand.shape)


PLACES = Part("max_pool_places", places_of)
SPREAD = Part("max_pool_spread", spread)
BOTH = Part("max_pool_backward", both)
