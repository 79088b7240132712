"""Which values of a program are images: arrays of (batch, space, features), as convolutions and pooling have them."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set

from jax.extend.core import primitives as P

from remat_opt.program import compat
from remat_opt.program.inline import Constant, Equation, Program
from remat_opt.program.primitives import ELEMENTWISE, REDUCTION, RESHAPING, named

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
        made_of = {x for x in (*equation.inputs, *equation.outputs) if isinstance(x, int)}
        if equation.primitive is P.conv_general_dilated_p:
            filters |= made_of & {_filter_of(equation, program)}
        images |= {x for x in made_of if len(program.avals[x].shape) > 2}
    alike = _alike(program)
    made = {value: list(others) for value, others in alike.items()}
    for x, result in _cut_of_arrays(program):  # of an image an image; what others are cut of lies as suits those
        made.setdefault(x, []).append(result)
    return _reached(images - _reached(filters, alike), made)


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


def with_merged_batch(program: Program) -> Mapping[int, tuple[int, ...]]:
    """Images of which several dimensions number the examples, as films' frames, and which convolutions read and make
    with one for all of them: elementwise work lies as these do. For each its shape with one."""
    images, apart = images_of(program), with_split_batch(program)
    alike = _alike(program)
    found: dict[int, tuple[int, ...]] = {}
    for equation in program.equations:
        if equation.primitive is not P.reshape_p or not isinstance(equation.inputs[0], int):
            continue
        merged, split = sorted((equation.inputs[0], equation.outputs[0]), key=lambda x: program.avals[x].ndim)
        shapes = program.avals[merged].shape, program.avals[split].shape
        of_image = len(shapes[0]) - 1
        if merged in images and 2 < len(shapes[0]) < len(shapes[1]) and shapes[0][1:] == shapes[1][-of_image:]:
            found.update((value, shapes[0]) for value in _reached({split}, alike) - apart)
    return found


def without_features(program: Program, images: Set[int]) -> frozenset[int]:
    """What is reduced of images over their features alone or spread over these, and what elementwise work makes of
    that."""
    found: set[int] = set()
    for equation in program.equations:
        if equation.primitive in REDUCTION:
            (result, *_), (image, *_) = equation.outputs, equation.inputs
            if image in images and tuple(equation.params.get("axes", ())) == (len(program.avals[result].shape),):
                found.update(equation.outputs)
        elif len(equation.outputs) == 1 and equation.outputs[0] in images:
            found.update(_spread_over_features(program, equation))
    return _reached(found, _alike(program, _renamed(program))).difference(program.inputs) if found else frozenset()


def _spread_over_features(program: Program, equation: Equation) -> Iterator[int]:
    """Operands of which an equation makes an image, each number of theirs for all features of a place."""
    shape = program.avals[equation.outputs[0]].shape
    places = shape[:-1]
    for x in equation.inputs:
        if not isinstance(x, int):
            continue
        given = program.avals[x].shape
        if equation.primitive is P.broadcast_in_dim_p:
            if given[: len(places)] == places and given != shape:
                yield x
        elif equation.primitive in ELEMENTWISE and given == (*places, 1) != shape:
            yield x


def lying_as(program: Program, found: set[int]) -> frozenset[int]:
    """Values, and what elementwise work and barriers make of them or make them of; but for what convolutions and
    pooling make, which lies as suits these."""
    made = {value for e in program.equations if e.primitive in _OF_IMAGES for value in e.outputs}
    alike = {value: [x for x in others if x not in made] for value, others in _alike(program).items()}
    return _reached(found, alike)


def stored_as(program: Program) -> Callable[[Iterable[int]], frozenset[int]]:
    """What finds to some values all that elementwise work and barriers make of them or make them of."""
    alike = _alike(program)
    return lambda found: _reached(set(found), alike)


def elementwise_images(program: Program) -> Callable[[Iterable[int]], frozenset[int]]:
    """What finds to some images all that are reached over elementwise work."""
    alike = _both_ways(_done_alike(program))
    return lambda found: _reached(set(found), alike)


def connected_images(program: Program) -> Callable[[Iterable[int]], frozenset[int]]:
    """What finds to some images all that are reached over elementwise work, pooling, and what cuts and joins arrays."""
    pools = [equation for equation in program.equations if equation.primitive in _WINDOWED]
    pairs = (pair for e in pools for pair in itertools.product(e.inputs, e.outputs))
    windows = [(x, result) for x, result in pairs if isinstance(x, int)]
    alike = _both_ways([*_done_alike(program), *windows, *_cut_of_arrays(program)])
    return lambda found: _reached(set(found), alike)


def connected_arrays(program: Program) -> Callable[[Iterable[int]], frozenset[int]]:
    """What finds to some arrays of three dimensions and more all that are reached over elementwise work, barriers, and
    what cuts and joins arrays."""
    alike = _alike(program, _cut_of_arrays(program, 3))
    return lambda found: _reached(set(found), alike)


def _alike(program: Program, more: Iterable[tuple[int, int]] = ()) -> Mapping[int, Sequence[int]]:
    """For each value those that are stored as it is, some pairs more of these included."""
    return _both_ways(itertools.chain(_held_alike(program), _done_alike(program), more))


def _both_ways(pairs: Iterable[tuple[int, int]]) -> Mapping[int, Sequence[int]]:
    found = collections.defaultdict(list)
    for one, other in pairs:
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
    shapes = [x.aval.shape if isinstance(x, Constant) else program.avals[x].shape for x in (second, result)]
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
        for x, result in itertools.product(equation.inputs, equation.outputs):
            if isinstance(x, int) and program.avals[x].shape == program.avals[result].shape:
                yield x, result


def _renamed(program: Program) -> Iterator[tuple[int, int]]:
    """Operands and results that differ in dimensions of one element."""
    for equation in program.equations:
        if equation.primitive not in RESHAPING:
            continue
        x, result = equation.inputs[0], equation.outputs[0]
        if isinstance(x, int):
            shapes = ([size for size in program.avals[one].shape if size != 1] for one in (x, result))
            if next(shapes) == next(shapes):
                yield x, result


def _cut_of_arrays(program: Program, rank: int = 4) -> Iterator[tuple[int, int]]:
    """Operands and results, of some dimensions at least, of what cuts arrays or puts them together and leaves their
    dimensions as they are. (Of images with one dimension in space, as sounds have, XLA has that in the lanes of what is
    cut.)"""
    for equation in program.equations:
        if equation.primitive not in (P.slice_p, P.pad_p, P.concatenate_p, P.rev_p, compat.split_p):
            continue
        for x, result in itertools.product(equation.inputs, equation.outputs):
            if isinstance(x, int) and program.avals[x].ndim == program.avals[result].ndim >= rank:
                yield x, result
