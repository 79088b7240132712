"""Other bodies for the loops of a function that is still to be differentiated."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
from jax.extend.core import jaxpr_as_fun, primitives

from remat_opt.trace import compat
from remat_opt.trace.avals import abstract
from remat_opt.trace.inline import Equation, Program


def has_loops(program: Program) -> bool:
    """Whether there is a `lax.scan` among a program's equations."""
    return any(equation.primitive is primitives.scan_p for equation in program.equations)


def with_bodies(
    program: Program, wrap: Callable[[Callable, tuple[int, ...]], Callable], *, keep_checkpoints: bool
) -> Program:
    """A program whose loops have other bodies.

    Args:
        program: a function before differentiation.
        wrap: gives the new body, of a flat function and of the positions of what its loop carries.
        keep_checkpoints: whether loops in which the user has placed a `jax.checkpoint` stay as they are.
    """

    def written(equation: Equation) -> Equation:
        inside = compat.equations_in(equation.params) if keep_checkpoints else ()
        if equation.primitive is not primitives.scan_p or any(one.primitive is compat.remat_p for one in inside):
            return equation
        return _with_body(equation, wrap)

    return dataclasses.replace(program, equations=tuple(map(written, program.equations)))


def _with_body(loop: Equation, wrap: Callable[[Callable, tuple[int, ...]], Callable]) -> Equation:
    body = loop.params["jaxpr"]
    constants, carries = compat.scan_counts(loop.params)
    wrapped = wrap(jaxpr_as_fun(body), tuple(range(constants, constants + carries)))
    params = {**loop.params, "jaxpr": jax.make_jaxpr(wrapped)(*map(abstract, body.in_avals))}
    return dataclasses.replace(loop, params=params)


def handed_on(program: Program) -> tuple[int, ...]:
    """Positions of those arguments of a layer that become one of its results, as far as their types tell."""
    results = [program.aval_of(x) for x in program.outputs]
    found = []
    for position, value in enumerate(program.inputs):
        aval = program.avals[value]
        at = next((at for at, x in enumerate(results) if (x.shape, x.dtype) == (aval.shape, aval.dtype)), None)
        if at is not None:
            del results[at]
            found.append(position)
    return tuple(found)
