"""Which arrays of a TPU's program lie row by row, as gathers make them.

What is read at one index lies in as few tiles as hold it: 4 × 32 numbers for each of 131,072 indices take 4 × 128
places each. XLA fixes these layouts of gathers and gives them to the cheap work that is done on their results. Work
with two exponentials or more it does as it pads least, on copies.
"""

from __future__ import annotations

from collections.abc import Mapping

from jax.extend.core import primitives as P

from remat_opt.program import compat
from remat_opt.program.inline import Constant, Equation, Program
from remat_opt.program.primitives import DEAR, ELEMENTWISE, REDUCTION

_Equations = frozenset[Equation]


def rows_of(program: Program) -> Mapping[int, int]:
    """For each value that lies row by row, how many leading dimensions count its rows."""
    found: dict[int, int] = {}
    dear: dict[int, _Equations] = {}  # for each such value the dear work since its gather
    for equation in program.equations:
        if equation.primitive is compat.barrier_p:
            for x, result in zip(equation.inputs, equation.outputs, strict=True):
                if isinstance(x, int) and x in found:
                    found[result], dear[result] = found[x], dear[x]
            continue
        count = _gathered(equation, program)
        work: _Equations = frozenset()
        if not count:
            count = _passed_on(equation, program, found)
            work = work.union(*(dear.get(x, frozenset()) for x in equation.inputs if isinstance(x, int)))
            work |= {equation} if equation.primitive in DEAR else set()
        if count and len(work) < 2:
            found.update(dict.fromkeys(equation.outputs, count))
            dear.update(dict.fromkeys(equation.outputs, work))
    return found


def _gathered(equation: Equation, program: Program) -> int:
    """Of a gather the number of dimensions that its indices have, if these come first; else 0."""
    if equation.primitive is not P.gather_p:
        return 0
    window = equation.params["dimension_numbers"].offset_dims
    rank = len(program.avals[equation.outputs[0]].shape)
    count = rank - len(window)
    return count if tuple(window) == tuple(range(count, rank)) else 0


def _passed_on(equation: Equation, program: Program, found: Mapping[int, int]) -> int:
    """How many dimensions count the rows of what is made of rows alone; 0 if it is made of anything else, too."""
    if equation.primitive not in ELEMENTWISE and equation.primitive not in REDUCTION:
        return 0
    shape = program.avals[equation.outputs[0]].shape
    counts: set[int] = set()
    for x in equation.inputs:
        if isinstance(x, Constant) or not program.avals[x].shape:
            continue
        count = found.get(x, 0)
        if program.avals[x].shape[:count] != shape[:count]:
            return 0
        counts.add(count)
    return counts.pop() if len(counts) == 1 else 0
