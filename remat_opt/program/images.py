"""Which values of a program are images: arrays of (batch, space, features), as convolutions and pooling have them."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator

from jax.extend.core import primitives as P

from remat_opt.program import compat
from remat_opt.program.inline import Program
from remat_opt.program.primitives import ELEMENTWISE, named

POOLS = named("reduce_window_max reduce_window_min reduce_window_sum")
_OF_IMAGES = POOLS | {P.conv_general_dilated_p, P.select_and_scatter_add_p}


def images_of(program: Program) -> frozenset[int]:
    """Values that convolutions and pooling make or read: arrays of (batch, space, features). What elementwise work and
    barriers make of such an array lies in memory as it does."""
    found = {
        x
        for equation in program.equations
        if equation.primitive in _OF_IMAGES
        for x in (*equation.inputs, *equation.outputs)
        if isinstance(x, int) and len(program.avals[x].shape) > 2
    }
    alike = collections.defaultdict(list)
    for one, other in _stored_alike(program):
        alike[one].append(other)
        alike[other].append(one)
    reached = list(found)
    while reached:
        new = set(alike[reached.pop()]) - found
        found |= new
        reached += new
    return frozenset(found)


def _stored_alike(program: Program) -> Iterator[tuple[int, int]]:
    """Operands and results, of one shape, of elementwise work and barriers."""
    for equation in program.equations:
        if equation.primitive is compat.barrier_p:
            pairs = zip(equation.inputs, equation.outputs, strict=True)
        elif equation.primitive in ELEMENTWISE:
            pairs = itertools.product(equation.inputs, equation.outputs)
        else:
            continue
        for x, result in pairs:
            if isinstance(x, int) and program.avals[x].shape == program.avals[result].shape:
                yield x, result
