"""Removes loop results that equal a loop operand: stacks that a `scan` returns unchanged, and unchanged carries.

`nnx.scan` returns the state of a module in this way, and the optimizer's update reads it. XLA copies such a stack slice
by slice. Its readers can read the operand instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.extend.core import primitives

from remat_opt.trace import compat
from remat_opt.trace.nested import with_jaxprs


def without_copies(closed: Any) -> Any:
    """A closed jaxpr whose readers of such results read the operands; the same object where there are none."""
    jaxpr = compat.bare_jaxpr(closed)
    found = _without_copies(jaxpr, {})
    if found is jaxpr:
        return closed
    return compat.without_dead_code(compat.ClosedJaxpr(found, compat.constants_of(closed)))


def _without_copies(jaxpr: Any, known: dict[int, Any]) -> Any:
    """An open jaxpr, in which what nobody reads any more still stands.

    `known` has by the id of a jaxpr what was made of it, so that equal calls stay equal.
    """
    if id(jaxpr) in known:
        return known[id(jaxpr)]
    same: dict[Any, Any] = {}  # a result of a loop -> the operand that it is

    def read(atom: Any) -> Any:
        return atom if isinstance(atom, compat.Literal) else same.get(atom, atom)

    equations, is_changed = [], False
    for equation in jaxpr.eqns:
        params = with_jaxprs(equation.params, lambda inner: _without_copies(inner, known))
        if params is not equation.params or any(
            not isinstance(x, compat.Literal) and x in same for x in equation.invars
        ):
            equation, is_changed = equation.replace(invars=[read(x) for x in equation.invars], params=params), True
        equations.append(equation)
        if equation.primitive is primitives.scan_p:
            same.update(_handed_back(equation))
    outputs = [read(x) for x in jaxpr.outvars]
    is_changed |= any(one is not other for one, other in zip(outputs, jaxpr.outvars, strict=True))
    known[id(jaxpr)] = jaxpr.replace(eqns=equations, outvars=outputs) if is_changed else jaxpr
    return known[id(jaxpr)]


def _handed_back(loop: Any) -> Iterator[tuple[Any, Any]]:
    """Results of a `scan` with the operands that they are equal to."""
    constants, carries = compat.scan_counts(loop.params)
    body = compat.bare_jaxpr(loop.params["jaxpr"])
    inputs = compat.input_variables(loop.params["jaxpr"])
    stacks = {variable: at for at, variable in enumerate(inputs) if at >= constants + carries}
    for at, (made, result) in enumerate(zip(body.outvars, loop.outvars, strict=True)):
        if isinstance(made, compat.Literal):
            continue
        is_kept = at < carries and made is inputs[constants + at]
        source = constants + at if is_kept else stacks.get(made) if at >= carries else None
        if source is not None and loop.invars[source].aval == result.aval:
            yield result, loop.invars[source]
