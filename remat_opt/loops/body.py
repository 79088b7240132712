"""A `scan` and its body: the body as a flat program that can be sliced and evaluated."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.extend.core import primitives

from remat_opt.rewrites.one_hot import by_comparison
from remat_opt.trace import compat
from remat_opt.trace.inline import Constant, Equation, Program, inline, within
from remat_opt.trace.mapped import in_two_parts

Atom = int | Constant


@dataclasses.dataclass(frozen=True, eq=False)
class Loop:
    """One `scan` equation of a program.

    Attributes:
        equation: the equation; its operands are [constants, carry, xs], its results [carry, ys].
        length: number of steps.
        reverse: whether it runs from the last index to the first.
        unroll: steps that are written out in one round of the loop.
        body: one step as a flat program, with the same order of inputs and outputs.
        constants: operands that are the same in every step, as values of the outer program, as are the next four.
        first_carry: the carry before the first step.
        xs: the stacks that are read, one slice a step.
        last_carry: the carry after the last step.
        ys: the stacks that are written, one slice a step.
        body_constants: the body's values for `constants`.
        body_carry: the body's values for the carry before a step.
        body_xs: the body's values for one slice of each of `xs`.
        next_carry: the body's values for the carry after a step.
        body_ys: the body's values for one slice of each of `ys`.
    """

    equation: Equation
    length: int
    reverse: bool
    unroll: Any
    body: Program
    constants: tuple[Atom, ...]
    first_carry: tuple[Atom, ...]
    xs: tuple[Atom, ...]
    last_carry: tuple[int, ...]
    ys: tuple[int, ...]
    body_constants: tuple[int, ...]
    body_carry: tuple[int, ...]
    body_xs: tuple[int, ...]
    next_carry: tuple[Atom, ...]
    body_ys: tuple[Atom, ...]


def is_loop(equation: Equation) -> bool:
    """Whether an equation is a `scan`."""
    return equation.primitive is primitives.scan_p


def read_loop(program: Program, equation: Equation, *, keep_checkpoints: bool) -> Loop:
    """Flatten the body of a `scan`; `keep_checkpoints` as of `inline`."""
    constants, carry = compat.scan_counts(equation.params)
    body = body_of(program, equation, equation.params["jaxpr"], keep_checkpoints=keep_checkpoints)

    def operands(atoms: tuple) -> tuple[tuple, tuple, tuple]:
        return atoms[:constants], atoms[constants : constants + carry], atoms[constants + carry :]

    def results(atoms: tuple) -> tuple[tuple, tuple]:
        return atoms[:carry], atoms[carry:]

    outside = (*operands(equation.inputs), *results(equation.outputs))
    length, reverse, unroll = (equation.params[name] for name in ("length", "reverse", "unroll"))
    inside = (*operands(body.inputs), *results(body.outputs))
    return Loop(equation, length, reverse, unroll, body, *outside, *inside)


def body_of(program: Program, equation: Equation, jaxpr: Any, *, keep_checkpoints: bool) -> Program:
    """Flatten a body, one of an equation's parameters; `keep_checkpoints` as of `inline`."""
    body = inline(jaxpr, keep_checkpoints=keep_checkpoints)
    return within(program, equation, in_two_parts(by_comparison(body) if program.compares else body))
