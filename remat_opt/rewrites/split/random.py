"""The rules of random numbers: each chunk draws those that its rows would have in the whole batch.

JAX's default generator gives each element the Threefry hash of its position (`jax_threefry_partitionable`), so that a
part of an array can be drawn by itself. What other generators draw is drawn whole, before the loop, and sliced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives as P

from remat_opt.rewrites.split.layouts import Chunk, Factor, View
from remat_opt.trace import compat
from remat_opt.trace.inline import Equation

_MOST_POSITIONS = 2**32  # that one word of a counter tells apart


def of_keys(view: View) -> list[Factor]:
    """Axes of an array of random keys lead the results."""
    shapes = [view.shape(at) for at in range(len(view.inputs))]
    axes = range(min(len(shapes[0]), len(view.shape_out())))
    return [Factor(tuple(axis if shape else None for shape in shapes), (axis,)) for axis in axes]


def random_bits(view: View) -> list[Factor]:
    """Axes of the keys, or of what one key draws."""
    shape = view.shape_out()
    by_position = compat.draws_by_position(view.program.aval_of(view.equation.inputs[0]), view.equation.context)
    if view.shape(0) or not by_position or math.prod(shape) > _MOST_POSITIONS:
        return of_keys(view)
    return [Factor((None,), (axis,), _Part(axis).bind) for axis in range(len(shape))]


class _Part:
    """The bits of a part of an array, along an axis."""

    def __init__(self, axis: int):
        self.axis = axis

    def bind(self, equation: Equation, operands: Sequence[Any], chunk: Chunk) -> Sequence[Any]:
        whole, width = equation.params["shape"], equation.params["bit_width"]
        shape = chunk.shape(whole, self.axis)
        position = jnp.zeros(shape, jnp.uint32)
        for axis in range(len(shape)):
            index = lax.broadcasted_iota(jnp.uint32, shape, axis)
            if axis == self.axis:
                index = index + lax.convert_element_type(chunk.start(whole[axis]), "uint32")
            position = position + index * np.uint32(math.prod(whole[axis + 1 :]))
        first, second = jax.random.key_data(operands[0])
        high, low = P.threefry2x32_p.bind(first, second, lax.full_like(position, 0), position)
        if width == 64:
            high, low = (lax.convert_element_type(one, "uint64") for one in (high, low))
            return [lax.bitwise_or(lax.shift_left(high, np.uint64(32)), low)]
        return [lax.convert_element_type(lax.bitwise_xor(high, low), f"uint{width}")]
