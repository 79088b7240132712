"""Splits and stacks as compilers are given them: a slice for each piece (`jnp.split`, `jnp.unstack`, the derivatives of
concatenations and stacks), and a concatenation for a stack.

What reads a piece can then be fused with its slice, so that the piece is not stored, and the whole is live until the
last piece has been read.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

from jax.extend.core import primitives

from remat_opt.trace import compat
from remat_opt.trace.inline import Equation, Program


def by_slices(program: Program, chosen: Callable[[Equation], bool] = lambda equation: True) -> Program:
    """The same program without splits and stacks, or without those that are chosen, and without pieces that nobody
    reads. A stack's pieces keep their shape, without the stack's dimension."""
    lowered = (compat.split_p, compat.unstack_p, compat.stack_p)
    found = [equation.primitive in lowered and chosen(equation) for equation in program.equations]
    if not any(found):
        return program
    read = program.readers.keys() | program.returned
    pieces = (
        (piece for piece in _lowered(program, equation) if not read.isdisjoint(piece.outputs))
        if is_lowered
        else (equation,)
        for equation, is_lowered in zip(program.equations, found, strict=True)
    )
    return dataclasses.replace(program, equations=tuple(itertools.chain.from_iterable(pieces)))


def _lowered(program: Program, equation: Equation) -> Iterator[Equation]:
    if equation.primitive is compat.stack_p:
        params = {"dimension": equation.params["axis"]}
        yield dataclasses.replace(equation, primitive=primitives.concatenate_p, params=params)
        return
    (whole,) = equation.inputs
    shape = program.aval_of(whole).shape
    axis = equation.params["axis"]
    sizes = map(int, equation.params["sizes"]) if equation.primitive is compat.split_p else [1] * shape[axis]
    ends = itertools.accumulate(sizes, initial=0)
    for piece, (start, end) in zip(equation.outputs, itertools.pairwise(ends), strict=True):
        first, last = [0] * len(shape), list(shape)
        first[axis], last[axis] = start, end
        params = {"start_indices": tuple(first), "limit_indices": tuple(last), "strides": None}
        yield dataclasses.replace(equation, primitive=primitives.slice_p, outputs=(piece,), params=params)
