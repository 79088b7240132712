"""Equations in the place of one: what a function does with its operands."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from remat_opt.trace import compat
from remat_opt.trace.inline import Constant, Equation, Program, inline


class Tracing:
    """New equations of a program, which is longer by their values and constants."""

    def __init__(self, avals: Sequence[Any], constants: Sequence[tuple[int, Any]]):
        self.avals = list(avals)
        self.constants = list(constants)
        self.known = {id(constant): value for value, constant in constants}

    def traced(self, function: Callable[..., Any], equation: Equation, operands: Sequence[int | Constant]) -> Program:
        """A function of some operands as a program, traced in the place and context of an equation."""

        def in_context(*arrays: Any) -> Sequence[Any]:
            with compat.equation_context(equation.source_info, equation.context):
                return function(*arrays)

        avals = [x.aval if isinstance(x, Constant) else self.avals[x] for x in operands]
        return inline(compat.without_dead_code(jax.make_jaxpr(in_context)(*avals)), keep_checkpoints=True)

    def placed(self, part: Program, operands: Sequence[int | Constant]) -> tuple[list[Equation], list[int | Constant]]:
        """The equations of what was traced, on some operands, and the values of its results."""
        number: dict[int, int | Constant] = dict(zip(part.inputs, operands, strict=True))
        for value, constant in part.constants:
            if id(constant) not in self.known:
                self.known[id(constant)] = self.new_value(part.avals[value])
                self.constants.append((self.known[id(constant)], constant))
            number[value] = self.known[id(constant)]
        equations = []
        for one in part.equations:
            number.update((value, self.new_value(part.avals[value])) for value in one.outputs)
            equations.append(renumbered(one, number))
        return equations, [x if isinstance(x, Constant) else number[x] for x in part.outputs]

    def new_value(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1


def renumbered(equation: Equation, number: Mapping[int, int | Constant]) -> Equation:
    """An equation on other values; those that have no other number stay."""
    inputs, outputs = (
        tuple(number.get(x, x) if isinstance(x, int) else x for x in atoms)
        for atoms in (equation.inputs, equation.outputs)
    )
    return dataclasses.replace(equation, inputs=inputs, outputs=outputs)
