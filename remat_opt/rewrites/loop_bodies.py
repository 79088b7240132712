"""Other bodies for the loops of a function that is still to be differentiated."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
from jax.extend.core import jaxpr_as_fun, primitives

from remat_opt.trace import compat
from remat_opt.trace.avals import abstract, bytes_of
from remat_opt.trace.inline import Equation, Program


class Body(NamedTuple):
    """What is known of a function that is the body of a loop.

    Attributes:
        carried: positions of those arguments that the loop hands from step to step.
        kept_bytes: of them, over all steps; 0 where the loop is not known.
    """

    carried: tuple[int, ...]
    kept_bytes: int = 0


def has_loops(program: Program) -> bool:
    """Whether there is a `lax.scan` among a program's equations."""
    return any(equation.primitive is primitives.scan_p for equation in program.equations)


def with_bodies(program: Program, wrap: Callable[[Callable, Body], Callable], *, keep_checkpoints: bool) -> Program:
    """A program whose loops have other bodies.

    Args:
        program: a function before differentiation.
        wrap: gives the new body of a flat function.
        keep_checkpoints: whether loops in which the user has placed a `jax.checkpoint` stay as they are.
    """

    def written(equation: Equation) -> Equation:
        inside = compat.equations_in(equation.params) if keep_checkpoints else ()
        if equation.primitive is not primitives.scan_p or any(one.primitive is compat.remat_p for one in inside):
            return equation
        return _with_body(equation, wrap)

    return dataclasses.replace(program, equations=tuple(map(written, program.equations)))


def _with_body(loop: Equation, wrap: Callable[[Callable, Body], Callable]) -> Equation:
    step = loop.params["jaxpr"]
    constants, carries = compat.scan_counts(loop.params)
    carried = range(constants, constants + carries)
    kept = loop.params["length"] * sum(bytes_of(step.in_avals[position]) for position in carried)
    again = jax.make_jaxpr(wrap(jaxpr_as_fun(step), Body(tuple(carried), kept)))(*map(abstract, step.in_avals))
    return dataclasses.replace(loop, params={**loop.params, "jaxpr": again})


def as_body(program: Program) -> Body:
    """A layer as the body of a loop that is not known: it hands on what has the type of one of its results."""
    results = [program.aval_of(x) for x in program.outputs]
    found = []
    for position, value in enumerate(program.inputs):
        aval = program.avals[value]
        at = next((at for at, x in enumerate(results) if (x.shape, x.dtype) == (aval.shape, aval.dtype)), None)
        if at is not None:
            del results[at]
            found.append(position)
    return Body(tuple(found))
