"""A split, as by `jnp.split` or in the derivative of a concatenation, as compilers are given it: a slice for each piece.

What reads a piece can then be fused with its slice, so that the piece is not stored, and the whole is live until the
last piece has been read.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from jax.extend.core import primitives

from remat_opt.program import compat
from remat_opt.program.inline import Constant, Equation, Program


def by_slices(program: Program) -> Program:
    """The same program without splits."""
    if not any(equation.primitive is compat.split_p for equation in program.equations):
        return program
    equations = (piece for equation in program.equations for piece in _lowered(program, equation))
    return dataclasses.replace(program, equations=tuple(equations))


def _lowered(program: Program, equation: Equation) -> Iterator[Equation]:
    if equation.primitive is not compat.split_p:
        yield equation
        return
    (whole,) = equation.inputs
    shape = whole.aval.shape if isinstance(whole, Constant) else program.avals[whole].shape
    axis, ends = equation.params["axis"], itertools.accumulate(map(int, equation.params["sizes"]), initial=0)
    for piece, (start, end) in zip(equation.outputs, itertools.pairwise(ends), strict=True):
        first, last = [0] * len(shape), list(shape)
        first[axis], last[axis] = start, end
        params = {"start_indices": tuple(first), "limit_indices": tuple(last), "strides": None}
        yield dataclasses.replace(equation, primitive=primitives.slice_p, outputs=(piece,), params=params)
