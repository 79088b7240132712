"""A `scan` and its body: the body as a flat program that can be sliced and evaluated again."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterable
from typing import Any

from jax.extend.core import primitives

from remat_opt.rewrites.one_hot import by_comparison
from remat_opt.trace import compat
from remat_opt.trace.inline import Constant, Equation, Program, can_recompute, inline, scope_of, within
from remat_opt.trace.mapped import in_two_parts

Atom = int | Constant


@dataclasses.dataclass(frozen=True, eq=False)
class Loop:
    """One `scan` equation of a program.

    Attributes:
        equation: the equation; its operands are [constants, carry, xs], its results [carry, ys].
        num_constants: how many operands are the same in every step.
        num_carry: how many are handed from step to step.
        body: one step as a flat program, with the same order of inputs and outputs.
    """

    equation: Equation
    num_constants: int
    num_carry: int
    body: Program

    @property
    def length(self) -> int:
        """Number of steps."""
        return self.equation.params["length"]

    @property
    def reverse(self) -> bool:
        """Whether it runs from the last index to the first."""
        return self.equation.params["reverse"]

    @property
    def unroll(self) -> Any:
        """Steps that are written out in one round of the loop."""
        return self.equation.params["unroll"]

    @property
    def constants(self) -> tuple[Atom, ...]:
        """Operands that are the same in every step, as values of the outer program."""
        return self.equation.inputs[: self.num_constants]

    @property
    def first_carry(self) -> tuple[Atom, ...]:
        """The carry before the first step, as values of the outer program."""
        return self.equation.inputs[self.num_constants : self.num_constants + self.num_carry]

    @property
    def xs(self) -> tuple[Atom, ...]:
        """The stacks that are read, one slice a step, as values of the outer program."""
        return self.equation.inputs[self.num_constants + self.num_carry :]

    @property
    def last_carry(self) -> tuple[int, ...]:
        """The carry after the last step, as values of the outer program."""
        return self.equation.outputs[: self.num_carry]

    @property
    def ys(self) -> tuple[int, ...]:
        """The stacks that are written, one slice a step, as values of the outer program."""
        return self.equation.outputs[self.num_carry :]

    @property
    def body_constants(self) -> tuple[int, ...]:
        """The body's values for `constants`."""
        return self.body.inputs[: self.num_constants]

    @property
    def body_carry(self) -> tuple[int, ...]:
        """The body's values for the carry before a step."""
        return self.body.inputs[self.num_constants : self.num_constants + self.num_carry]

    @property
    def body_xs(self) -> tuple[int, ...]:
        """The body's values for one slice of each of `xs`."""
        return self.body.inputs[self.num_constants + self.num_carry :]

    @property
    def next_carry(self) -> tuple[Atom, ...]:
        """The body's values for the carry after a step."""
        return self.body.outputs[: self.num_carry]

    @property
    def body_ys(self) -> tuple[Atom, ...]:
        """The body's values for one slice of each of `ys`."""
        return self.body.outputs[self.num_carry :]

    @functools.cached_property
    def producer(self) -> dict[int, int]:
        """For each value of the body the equation that makes it."""
        return {value: i for i, equation in enumerate(self.body.equations) for value in equation.outputs}


def is_loop(equation: Equation) -> bool:
    """Whether an equation is a `scan`."""
    return equation.primitive is primitives.scan_p


def read_loop(program: Program, equation: Equation, *, keep_checkpoints: bool) -> Loop:
    """Flatten the body of a `scan`.

    Args:
        program: that the scan is part of.
        equation: the scan.
        keep_checkpoints: leave the user's own `jax.checkpoint` regions in the body as single equations.
    """
    constants, carry = compat.scan_counts(equation.params)
    body = body_of(program, equation, equation.params["jaxpr"], keep_checkpoints=keep_checkpoints)
    return Loop(equation, constants, carry, body)


def body_of(program: Program, equation: Equation, jaxpr: Any, *, keep_checkpoints: bool) -> Program:
    """Flatten a body of an equation.

    Args:
        program: that the equation is part of.
        equation: a loop.
        jaxpr: the body, one of the equation's parameters.
        keep_checkpoints: leave the user's own `jax.checkpoint` regions in the body as single equations.
    """
    body = inline(jaxpr, keep_checkpoints=keep_checkpoints)
    return within(program, equation, in_two_parts(by_comparison(body) if program.compares else body))


@dataclasses.dataclass(frozen=True)
class Slice:
    """What makes some values of a body: equations in program order, and the values they start from."""

    equations: tuple[int, ...]
    reads: frozenset[int]


def slice_back(loop: Loop, wanted: Iterable[Atom], available: Collection[int] = ()) -> Slice:
    """The equations of a body that make `wanted` from its inputs and from `available` values.

    Args:
        loop: the scan.
        wanted: values of the body; literals need nothing.
        available: values that are there already.

    Returns:
        The slice; its `reads` are inputs of the body and available values.
    """
    inputs = {*loop.body.inputs, *(value for value, _ in loop.body.constants)}
    equations: set[int] = set()
    reads: set[int] = set()
    stack = [value for value in wanted if not isinstance(value, Constant)]
    while stack:
        value = stack.pop()
        if value in available or value in inputs:
            reads.add(value)
            continue
        index = loop.producer[value]
        if index not in equations:
            equations.add(index)
            stack.extend(x for x in loop.body.equations[index].inputs if not isinstance(x, Constant))
    return Slice(tuple(sorted(equations)), frozenset(reads - {value for value, _ in loop.body.constants}))


def stateful_results(loop: Loop) -> frozenset[int]:
    """Values of a body whose equations must not run a second time; they are always saved."""
    return frozenset(
        value
        for equation in loop.body.equations
        if not can_recompute(loop.body, equation)
        for value in equation.outputs
    )


def evaluate(program: Program, equations: Iterable[int], environment: dict[int, Any], *, again: bool = False) -> None:
    """Evaluate some equations of a program on values or tracers; what is in the environment already stays.

    Args:
        program: the flat program.
        equations: indices, in program order.
        environment: values by id; results are added.
        again: whether they have run before.
    """
    for value, constant in program.constants:
        environment.setdefault(value, constant)
    for index in equations:
        equation = program.equations[index]
        inputs = [read(atom, environment) for atom in equation.inputs]
        scope = scope_of(program, equation) if again else None
        with compat.equation_context(equation.source_info, equation.context, scope):
            results = compat.bind_equation(equation.primitive, equation.params, inputs)
        for value, result in zip(equation.outputs, results, strict=True):
            environment.setdefault(value, result)


def read(atom: Atom, environment: dict[int, Any]) -> Any:
    """The value of an operand."""
    return atom.value if isinstance(atom, Constant) else environment[atom]
