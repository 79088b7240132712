"""Which values of a program are images: arrays of (batch, space, features), as convolutions and pooling have them."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from jax.extend.core import primitives as P

from remat_opt.trace import compat
from remat_opt.trace.inline import Constant, Equation, Program
from remat_opt.trace.primitives import ELEMENTWISE, named

POOLS = named("reduce_window_max reduce_window_min reduce_window_sum")
_WINDOWED = POOLS | {P.select_and_scatter_add_p}
_OF_IMAGES = _WINDOWED | {P.conv_general_dilated_p}


def images_of(program: Program) -> frozenset[int]:
    """Values that convolutions and pooling make or read: arrays of (batch, space, features). What elementwise work and
    barriers make of such an array lies in memory as it does, and so does what is cut of it or put together of it.
    Filters and their gradients are none."""
    images: set[int] = set()
    filters: set[int] = set()
    for equation in program.equations:
        if equation.primitive not in _OF_IMAGES:
            continue
        made_of = {*equation.reads, *equation.outputs}
        if equation.primitive is P.conv_general_dilated_p:
            filters |= made_of & {_filter_of(equation, program)}
        images |= {x for x in made_of if len(program.avals[x].shape) > 2}
    alike = _alike(program)
    made = {value: list(others) for value, others in alike.items()}
    for x, result in _cut_of_arrays(program):  # of an image an image; what others are cut of lies as suits those
        made.setdefault(x, []).append(result)
    return _reached(images - _reached(filters, alike), made)


def _alike(program: Program) -> Mapping[int, Sequence[int]]:
    """For each value those that are stored as it is."""
    found = collections.defaultdict(list)
    for one, other in itertools.chain(_held_alike(program), _done_alike(program)):
        found[one].append(other)
        found[other].append(one)
    return found


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
    shapes = [program.aval_of(x).shape for x in (second, result)]
    window, image = (
        math.prod(shape[at] for at in spec[2:])
        for shape, spec in zip(shapes, (numbers.rhs_spec, numbers.out_spec), strict=True)
    )
    return second if window <= image else result


def _held_alike(program: Program) -> Iterator[tuple[int, int]]:
    """Operands and results of barriers."""
    for equation in program.equations:
        if equation.primitive is compat.barrier_p:
            pairs = zip(equation.inputs, equation.outputs, strict=True)
            yield from ((x, result) for x, result in pairs if isinstance(x, int))


def _done_alike(program: Program) -> Iterator[tuple[int, int]]:
    """Operands and results, of one shape, of elementwise work."""
    for equation in program.equations:
        if equation.primitive not in ELEMENTWISE:
            continue
        for x, result in itertools.product(equation.reads, equation.outputs):
            if program.avals[x].shape == program.avals[result].shape:
                yield x, result


def _cut_of_arrays(program: Program) -> Iterator[tuple[int, int]]:
    """Operands and results, of four dimensions at least, of what cuts arrays or puts them together and leaves their
    dimensions as they are. (Of images with one dimension in space, as sounds have, XLA has that in the lanes of what is
    cut.)"""
    for equation in program.equations:
        if equation.primitive not in (P.slice_p, P.pad_p, P.concatenate_p, P.rev_p, compat.split_p):
            continue
        for x, result in itertools.product(equation.reads, equation.outputs):
            if program.avals[x].ndim == program.avals[result].ndim >= 4:
                yield x, result
