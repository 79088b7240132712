"""Multiples of an array that XLA makes again.

XLA takes a number out of a product of arrays, `(c * x) * y` is `c * (x * y)` to it, so that who multiplies a multiple
reads the array that it is of. Where a loop is given the multiple, both wait until the loop is done: a deep equilibrium
keeps what its group normalisation reads, and twice that for the variance's gradient.
"""

from __future__ import annotations

import dataclasses

from jax.extend.core import primitives as P

from remat_opt.program.inline import Constant, Equation, Program


def with_multiples_made_again(program: Program) -> Program:
    """The same program in which products of arrays read what multiples that loops are given are of."""
    given = {x for one in program.equations if one.primitive is P.scan_p for x in one.inputs if isinstance(x, int)}
    multiples = (one for one in program.equations if one.primitive is P.mul_p and one.outputs[0] in given)
    of = {one.outputs[0]: arrays[0] for one in multiples if len(arrays := _arrays(one)) == 1}
    if not of:
        return program
    equations = (
        dataclasses.replace(one, inputs=tuple(of.get(x, x) if isinstance(x, int) else x for x in one.inputs))
        if one.primitive is P.mul_p
        else one
        for one in program.equations
    )
    return dataclasses.replace(program, equations=tuple(equations))


def _arrays(product: Equation) -> list[int]:
    """Factors that are no numbers written in the program."""
    return [x for x in product.inputs if not isinstance(x, Constant)]
