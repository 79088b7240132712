"""Equations in the place of one: what a function does of its operands."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from remat_opt.trace import compat
from remat_opt.trace.inline import Constant, Equation, inline


def traced_instead(
    function: Callable[..., Any], equation: Equation, operands: Sequence[int | Constant], avals: list[Any]
) -> list[Equation]:
    """What a function does instead of an equation with one result, which keeps its number.

    Args:
        function: of arrays as the operands are; makes its result, and does not return an operand as it is.
        equation: in whose place and context it is traced.
        operands: what the function is given, of the equation's.
        avals: of the program, to which those of values in between are added.
    """

    def in_context(*arrays: Any) -> Any:
        with compat.equation_context(equation.source_info, equation.context):
            return function(*arrays)

    types = [one.aval if isinstance(one, Constant) else avals[one] for one in operands]
    part = inline(jax.make_jaxpr(in_context)(*(jax.ShapeDtypeStruct(one.shape, one.dtype) for one in types)))
    known: dict[int, int | Constant] = dict(zip(part.inputs, operands, strict=True))
    known[part.outputs[0]] = equation.outputs[0]  # type: ignore[index]  # it is made, no constant
    written = []
    for one in part.equations:
        for value in one.outputs:
            if value not in known:
                known[value] = len(avals)
                avals.append(part.avals[value])
        inputs = tuple(atom if isinstance(atom, Constant) else known[atom] for atom in one.inputs)
        outputs = tuple(known[value] for value in one.outputs)
        written.append(dataclasses.replace(one, inputs=inputs, outputs=outputs))
    return written
