"""Replaces the body of an equation that has one: a `scan`, `while`, `cond`, `shard_map` or checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from remat_opt.loops.body import Loop, evaluate, read
from remat_opt.loops.rewrite import values_among
from remat_opt.loops.steps import Emit
from remat_opt.trace import compat
from remat_opt.trace.inline import Equation, Program


@dataclasses.dataclass(frozen=True)
class Body:
    """A body in segments.

    Attributes:
        emit: evaluates it.
        peak: bytes that it needs.
    """

    emit: Emit
    peak: int


Instead = Callable[..., "list[Any]"]
"""What is done instead of an equation, on its operands that are no literals; it gives what the equation gave."""


def emit_of(program: Program) -> Emit:
    """Evaluates a program as it is."""

    def emit(operands: Sequence[Any]) -> list[Any]:
        environment = dict(zip(program.inputs, operands, strict=True))
        evaluate(program, range(len(program.equations)), environment)
        return [read(atom, environment) for atom in program.outputs]

    return emit


def scan_of(loop: Loop, body: Emit) -> Instead:
    """The loop with another body."""
    constants, carry = loop.num_constants, loop.num_carry

    def scan(*values):
        operands = _operands(loop.equation, values)
        xs = operands[constants + carry :]

        def step(state, x):
            results = body([*operands[:constants], *state, *x])
            return results[:carry], results[carry:]

        first = operands[constants : constants + carry]
        unroll = max(1, int(loop.unroll) or loop.length)
        last, ys = lax.scan(step, first, xs, loop.length, reverse=loop.reverse, unroll=min(unroll, loop.length))
        return [*last, *ys]

    return scan


def while_of(equation: Equation, body: Emit) -> Instead:
    """The loop with another body, and its condition as it is, which may be of a whole batch."""
    given = equation.params["body_jaxpr"].in_avals

    def loop(*values):
        params = {**equation.params, "body_jaxpr": jax.make_jaxpr(lambda *x: body(x))(*given)}
        return compat.bind_equation(equation.primitive, params, _operands(equation, values))

    return loop


def cond_of(equation: Equation, branches: Sequence[Emit]) -> Instead:
    """The choice among other branches."""

    def choice(*values):
        index, *operands = _operands(equation, values)
        return lax.switch(index, [lambda *x, branch=branch: branch(x) for branch in branches], *operands)

    return choice


def shard_map_of(equation: Equation, body: Emit) -> Instead:
    """The same devices with another program for each."""

    def mapped(*values):
        return list(compat.shard_map_like(equation.params, lambda *x: tuple(body(x)))(*_operands(equation, values)))

    return mapped


def checkpoint_of(equation: Equation, body: Emit) -> Instead:
    """A region that is recomputed, with other contents."""

    def whole(*values):
        operands = _operands(equation, values)
        jaxpr = compat.without_dead_code(jax.make_jaxpr(lambda *x: body(x))(*operands))
        free = [*compat.constants_of(jaxpr), *operands]
        return compat.bind_remat(compat.open_jaxpr(jaxpr), free, [False] * len(free), None)

    return whole


def _operands(equation: Equation, values: Sequence[Any]) -> list[Any]:
    given = dict(zip(values_among(equation.inputs), values, strict=True))
    return [read(atom, given) for atom in equation.inputs]
