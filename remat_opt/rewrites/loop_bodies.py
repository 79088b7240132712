"""Replaces the bodies of `lax.scan` loops in a function before it is differentiated."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.extend.core import jaxpr_as_fun, primitives

from remat_opt.trace import compat
from remat_opt.trace.avals import abstract, bytes_of, is_inexact
from remat_opt.trace.inline import Equation, Program

_PAGE = 4096  # bytes; less is not worth a copy, and small copies fail on TPUs (jax issue 24115)


class Body(NamedTuple):
    """What is known of a function that is the body of a loop.

    Attributes:
        carried: positions of those arguments that the loop hands from step to step and that are worth a copy.
        kept_bytes: of all that it hands on, over all steps; 0 where the loop is not known.
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
    avals = step.in_avals
    kept = loop.params["length"] * sum(map(bytes_of, avals[constants : constants + carries]))
    carried = tuple(at for at in range(constants, constants + carries) if _is_worth_a_copy(avals[at]))
    again = jax.make_jaxpr(wrap(jaxpr_as_fun(step), Body(carried, kept)))(*map(abstract, avals))
    return dataclasses.replace(loop, params={**loop.params, "jaxpr": again})


def as_body(program: Program) -> Body | None:
    """Treats a layer as the body of an unknown loop: arguments with the shape and dtype of a result count as its carry.

    None where none of them is worth a copy.
    """
    results = [program.aval_of(x) for x in program.outputs]
    found = []
    for position, value in enumerate(program.inputs):
        aval = program.avals[value]
        at = next((at for at, x in enumerate(results) if (x.shape, x.dtype) == (aval.shape, aval.dtype)), None)
        if at is not None and _is_worth_a_copy(aval):
            del results[at]
            found.append(position)
    return Body(tuple(found)) if found else None


def _is_worth_a_copy(aval: Any) -> bool:
    return is_inexact(aval) and bytes_of(aval) >= _PAGE
