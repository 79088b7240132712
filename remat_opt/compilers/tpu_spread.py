"""What a TPU's compiler spreads in a loop's body instead of before the loop.

An array that a loop is given in all turns, and that one with fewer dimensions is spread to, is spread in the body: the
loop is given what has fewer dimensions. (GPUs and CPUs keep the whole array, and so does a TPU behind a barrier.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jax import lax
from jax.extend import core as extend_core
from jax.extend.core import primitives as P

from remat_opt.program import compat
from remat_opt.program.inline import Equation, Program


def with_spread_in_loops(program: Program) -> Program:
    """The same program with loops that spread what they are given themselves."""
    spread = {
        equation.outputs[0]: equation
        for equation in program.equations
        if equation.primitive is P.broadcast_in_dim_p and len(equation.inputs) == 1
        if isinstance(equation.inputs[0], int)
    }
    equations = [
        _spreading(program, equation, spread) if equation.primitive is P.scan_p else equation
        for equation in program.equations
    ]
    if all(one is other for one, other in zip(equations, program.equations, strict=True)):
        return program
    read = {x for equation in equations for x in equation.inputs if isinstance(x, int)}.union(
        x for x in program.outputs if isinstance(x, int)
    )
    left = [one for one in equations if one.primitive is not P.broadcast_in_dim_p or not read.isdisjoint(one.outputs)]
    return dataclasses.replace(program, equations=tuple(left))


def _spreading(program: Program, loop: Equation, spread: Mapping[int, Equation]) -> Equation:
    """A loop that spreads what it was given spread."""
    constants, _ = compat.scan_counts(loop.params)
    found = {at: spread[x] for at, x in enumerate(loop.inputs[:constants]) if isinstance(x, int) and x in spread}
    if not found:
        return loop
    body = loop.params["jaxpr"]
    step_of = extend_core.jaxpr_as_fun(body)

    def step(*given: Any) -> Any:
        inputs = list(given)
        for at, one in found.items():
            inputs[at] = lax.broadcast_in_dim(given[at], one.params["shape"], one.params["broadcast_dimensions"])
        return step_of(*inputs)

    sources = {at: one.inputs[0] for at, one in found.items()}
    avals = [program.aval_of(sources[at]) if at in found else aval for at, aval in enumerate(body.in_avals)]
    jaxpr = jax.make_jaxpr(step)(*map(compat.abstract, avals))
    inputs = tuple(sources.get(at, x) for at, x in enumerate(loop.inputs))
    return dataclasses.replace(loop, inputs=inputs, params={**loop.params, "jaxpr": jaxpr})
