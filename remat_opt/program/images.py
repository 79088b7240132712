"""Which values of a program are images: arrays of (batch, space, features), as convolutions and pooling have them."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from jax.extend.core import primitives as P

from remat_opt.program import compat
from remat_opt.program.inline import Constant, Equation, Program
from remat_opt.program.primitives import ELEMENTWISE, named

POOLS = named("reduce_window_max reduce_window_min reduce_window_sum")
_OF_IMAGES = POOLS | {P.conv_general_dilated_p, P.select_and_scatter_add_p}


def images_of(program: Program) -> frozenset[int]:
    """Values that convolutions and pooling make or read: arrays of (batch, space, features). What elementwise work and
    barriers make of such an array lies in memory as it does. Filters and their gradients are none."""
    images: set[int] = set()
    filters: set[int] = set()
    for equation in program.equations:
        if equation.primitive not in _OF_IMAGES:
            continue
        made_of = {x for x in (*equation.inputs, *equation.outputs) if isinstance(x, int)}
        if equation.primitive is P.conv_general_dilated_p:
            filters |= made_of & {_filter_of(equation, program)}
        images |= {x for x in made_of if len(program.avals[x].shape) > 2}
    alike = _alike(program)
    return _reached(images - _reached(filters, alike), alike)


def with_split_batch(program: Program) -> frozenset[int]:
    """Images of which several dimensions number the examples, as a mapped function's (`jax.vmap`): those of more than
    two dimensions in space that no convolution has."""
    pools: set[int] = set()
    convolutions: set[int] = set()
    for equation in program.equations:
        if equation.primitive in _OF_IMAGES:
            found = convolutions if equation.primitive is P.conv_general_dilated_p else pools
            found |= {
                x for x in (*equation.inputs, *equation.outputs) if isinstance(x, int) and program.avals[x].ndim > 4
            }
    if not pools:
        return frozenset()
    alike = _alike(program)
    return _reached(pools, alike) - _reached(convolutions, alike)


def lying_as(program: Program, found: set[int]) -> frozenset[int]:
    """Values, and what elementwise work and barriers make of them or make them of; but for what convolutions and
    pooling make, which lies as suits these."""
    made = {value for e in program.equations if e.primitive in _OF_IMAGES for value in e.outputs}
    alike = {value: [x for x in others if x not in made] for value, others in _alike(program).items()}
    return _reached(found, alike)


def _alike(program: Program) -> Mapping[int, Sequence[int]]:
    """For each value those that are stored as it is."""
    alike = collections.defaultdict(list)
    for one, other in _stored_alike(program):
        alike[one].append(other)
        alike[other].append(one)
    return alike


def _reached(found: set[int], alike: Mapping[int, Sequence[int]]) -> frozenset[int]:
    """Values, and all that are stored as they are."""
    found, reached = set(found), list(found)
    while reached:
        new = {value for value in alike.get(reached.pop(), ()) if value not in found}
        found |= new
        reached += new
    return frozenset(found)


def _filter_of(equation: Equation, program: Program) -> int | Constant:
    """Which of a convolution's arrays is the filter, or the filter's gradient: the smaller one in space of its second
    operand and its result."""
    numbers = equation.params["dimension_numbers"]
    second, result = equation.inputs[1], equation.outputs[0]
    shapes = [x.aval.shape if isinstance(x, Constant) else program.avals[x].shape for x in (second, result)]
    window, image = (
        math.prod(shape[at] for at in spec[2:])
        for shape, spec in zip(shapes, (numbers.rhs_spec, numbers.out_spec), strict=True)
    )
    return second if window <= image else result


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
