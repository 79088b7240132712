"""Matrices that a TPU's compiler stores turned, so that a transpose of them is no work.

Where elementwise work reads a transpose, one of both sides lies with its rows in the lanes. It is the side on which
elementwise work reads or makes what the step is given: a matrix's momentum and its update where the momentum is turned
to be made orthogonal (Jordan et al. 2024). What the step is given of it is copied first, and what it returns of it is
copied back. (A transpose that products alone read is part of these.)
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend.core import primitives as P

from remat_opt.compilers.reader import Reader
from remat_opt.graph.graph import Kind, Op
from remat_opt.graph.tiles import lies_turned
from remat_opt.program import compat
from remat_opt.program.images import stored_as
from remat_opt.program.inline import Equation, Program
from remat_opt.program.primitives import ELEMENTWISE


def turned(program: Program) -> frozenset[int]:
    """Matrices that are stored turned, but for those that come so. (Square ones are not looked at: no network of the
    benchmark turns them.)"""
    transposes = [equation for equation in program.equations if _turns_matrix(equation, program)]
    if not transposes:
        return frozenset()
    arithmetic = ELEMENTWISE - {P.transpose_p}
    work = [equation for equation in program.equations if equation.primitive in arithmetic]
    made, read = ({x for e in work for x in (e.outputs if of_results else e.inputs)} for of_results in (True, False))
    side_of, found = stored_as(program), set[int]()
    for equation in transposes:
        if equation.inputs[0] in made and equation.outputs[0] in read:
            sides = [side_of(x for x in one if isinstance(x, int)) for one in (equation.inputs, equation.outputs)]
            of_given = [side for side in sides if not side.isdisjoint(program.inputs)]
            found.update(*of_given[: len(of_given) == 1])
    avals = {value: program.avals[value] for value in found}
    return frozenset(v for v, aval in avals.items() if not lies_turned(aval.shape, compat.item_bytes(aval.dtype)))


def _turns_matrix(equation: Equation, program: Program) -> bool:
    if equation.primitive is not P.transpose_p or not isinstance(equation.inputs[0], int):
        return False
    shape = program.avals[equation.inputs[0]].shape
    return tuple(equation.params["permutation"]) == (1, 0) and shape[0] != shape[1]


class Turned:
    """What is stored turned of a program, and its copies."""

    def __init__(self, reader: Reader):
        """
        Args:
            reader: of the program.
        """
        self.reader = reader
        self.found = turned(reader.program)
        self.given = self.found.intersection(reader.program.inputs)
        self.copies: dict[int, int] = {}  # of what is given

    def with_copies(self, equation: Equation, ops: Sequence[Op]) -> Sequence[Op]:
        """An equation's ops with the copies that are made for them."""
        given = self.given.intersection(x for x in equation.inputs if isinstance(x, int))
        if not given or self.found.isdisjoint(equation.outputs):
            return ops
        copies = [self._copy(x) for x in sorted(given - self.copies.keys())]
        self.copies.update((op.inputs[0], op.outputs[0]) for op in copies)
        read = [tuple(self.copies.get(x, x) for x in op.inputs) for op in ops]
        return [*copies, *(op.but(inputs=inputs) for op, inputs in zip(ops, read, strict=True))]

    def copied_back(self) -> dict[int, Op]:
        """By what the step returns, the copies that take the places of what it was given."""
        results = (x for x in self.reader.program.outputs if isinstance(x, int) and x in self.found - self.given)
        return {x: self._copy(x) for x in dict.fromkeys(results)}

    def _copy(self, value: int) -> Op:
        copy = self.reader.new(self.reader.sizes[value])
        return Op(self.reader.behind([value]), (copy,), kind=Kind.OPAQUE, name="copy")
