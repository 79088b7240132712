"""Which values of a program are images: arrays of (batch, space, features), as convolutions and pooling have them."""

from __future__ import annotations

import collections
import itertools
import math

from jax.extend.core import primitives as P

from remat_opt.trace import compat
from remat_opt.trace.inline import Constant, Equation, Program
from remat_opt.trace.primitives import ELEMENTWISE, named

POOLS = named("reduce_window_max reduce_window_min reduce_window_sum")
_WINDOWED = POOLS | {P.select_and_scatter_add_p}
_OF_IMAGES = _WINDOWED | {P.conv_general_dilated_p}
# What cuts arrays or puts them together, and leaves their dimensions, four at least, as they are. (Of images with one
# dimension in space, as sounds have, XLA has that in the lanes of what is cut.)
_CUTTING = frozenset({P.slice_p, P.pad_p, P.concatenate_p, P.rev_p, compat.split_p})
Edges = dict[int, list[int]]


def images_of(program: Program) -> frozenset[int]:
    """Values that convolutions and pooling make or read: arrays of (batch, space, features). What elementwise work and
    barriers make of such an array lies in memory as it does, and so does what is cut of it or put together of it.
    Filters and their gradients are none."""
    images: set[int] = set()
    filters: set[int] = set()
    alike: Edges = collections.defaultdict(list)  # values that are stored as each other
    made: Edges = collections.defaultdict(list)  # of an image an image; what others are cut of lies as suits those
    for equation in program.equations:
        primitive = equation.primitive
        if primitive in _OF_IMAGES:
            values = {*equation.reads, *equation.outputs}
            if primitive is P.conv_general_dilated_p:
                filters |= values & {_filter_of(equation, program)}
            images |= {x for x in values if len(program.avals[x].shape) > 2}
        elif primitive is compat.barrier_p or primitive in ELEMENTWISE or primitive in _CUTTING:
            pair_up = zip if primitive is compat.barrier_p else itertools.product
            for x, result in pair_up(equation.inputs, equation.outputs):
                if not isinstance(x, int):
                    continue
                one, other = program.avals[x], program.avals[result]
                if primitive is compat.barrier_p or (primitive in ELEMENTWISE and one.shape == other.shape):
                    alike[x].append(result)
                    alike[result].append(x)
                elif primitive in _CUTTING and one.ndim == other.ndim >= 4:
                    made[x].append(result)
    return _reached(images - _reached(filters, alike), alike, made)


def _reached(found: set[int], *edges: Edges) -> frozenset[int]:
    """Values, and all that edges lead to from them."""
    found, reached = set(found), list(found)
    while reached:
        value = reached.pop()
        new = {other for of in edges for other in of.get(value, ()) if other not in found}
        found |= new
        reached += new
    return frozenset(found)


def _filter_of(equation: Equation, program: Program) -> int | Constant:
    """Which of a convolution's arrays is the filter, or the filter's gradient: the smaller one in space of its second
    operand and its result."""
    numbers = equation.params["dimension_numbers"]
    second, result = equation.inputs[1], equation.outputs[0]
    shapes = [program.aval_of(x).shape for x in (second, result)]
    window, image = (
        math.prod(shape[at] for at in spec[2:])
        for shape, spec in zip(shapes, (numbers.rhs_spec, numbers.out_spec), strict=True)
    )
    return second if window <= image else result
