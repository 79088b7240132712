"""Evaluate equations of a flat program on values or tracers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from remat_opt.trace import compat
from remat_opt.trace.inline import Constant, Equation, Program, scope_of


def read(atom: int | Constant, environment: dict[int, Any]) -> Any:
    """The value of an operand."""
    return atom.value if isinstance(atom, Constant) else environment[atom]


def bind(equation: Equation, inputs: Sequence[Any], scope: str | None = None) -> list[Any]:
    """Evaluate one equation where its author had it, with one more name in front where there is a scope."""
    with compat.equation_context(equation.source_info, equation.context, scope):
        return compat.bind_equation(equation.primitive, equation.params, inputs)


def evaluate(
    program: Program, equations: Iterable[int], environment: dict[int, Any], *, recomputed: bool = False
) -> None:
    """Evaluate equations, by index in program order, on values or tracers; what is in the environment already stays.
    `recomputed`: they have run before."""
    for value, constant in program.constants:
        environment.setdefault(value, constant)
    for index in equations:
        equation = program.equations[index]
        inputs = [read(atom, environment) for atom in equation.inputs]
        results = bind(equation, inputs, scope_of(program, equation) if recomputed else None)
        for value, result in zip(equation.outputs, results, strict=True):
            environment.setdefault(value, result)


def evaluate_all(program: Program, arguments: Sequence[Any]) -> list[Any]:
    """Evaluate a program as it stands; a value for each of its outputs, literals as they are."""
    environment = dict(zip(program.inputs, arguments, strict=True))
    evaluate(program, range(len(program.equations)), environment)
    return [read(atom, environment) for atom in program.outputs]


def make_on_demand(
    program: Program,
    makers: Mapping[int, int],
    wanted: int,
    made: dict[int, Any],
    run: Callable[[Equation], list[Any]],
) -> None:
    """Make a value that is made wherever it is read, after those that it needs; without recursion, chains may be long.

    Args:
        program: the flat program.
        makers: for each value on demand the equation that makes it.
        wanted: the value.
        made: values on demand that are there; results are added.
        run: gives the results of an equation.
    """
    stack = [wanted]
    while stack:
        equation = program.equations[makers[stack[-1]]]
        missing = [x for x in equation.reads if x in makers and x not in made]
        if stack[-1] in made:
            stack.pop()
        elif missing:
            stack += missing
        else:
            made.update(zip(equation.outputs, run(equation), strict=True))
