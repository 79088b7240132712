"""Values that depend on no input (a mask, a stack of zeros): loops make them afresh instead of carrying them along.

A constant operand of a loop is a buffer as long as the loop runs; made inside the body it is fused into its readers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from remat_opt.trace.evaluation import evaluate
from remat_opt.trace.inline import Constant, Program
from remat_opt.trace.primitives import ELEMENTWISE


def constant_equations(program: Program) -> dict[int, int]:
    """For each value that depends on no input of the program the equation that makes it."""
    known: dict[int, int] = {}
    for index, equation in enumerate(program.equations):
        if equation.primitive in ELEMENTWISE and all(isinstance(x, Constant) or x in known for x in equation.inputs):
            known.update(dict.fromkeys(equation.outputs, index))
    return known


def make_afresh(program: Program, known: dict[int, int], values: Iterable[Any]) -> dict[int, Any]:
    """Evaluate the constant ones among some values; all that was made is in the result."""
    made: dict[int, Any] = {}
    evaluate(program, equations_for(program, known, values), made)
    return made


def equations_for(program: Program, known: dict[int, int], values: Iterable[Any]) -> tuple[int, ...]:
    """The equations that make the constant ones among some values, in program order."""
    return program.slice_back(value for value in values if value in known).equations
