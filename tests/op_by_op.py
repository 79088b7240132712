"""Runs a jaxpr one op at a time, each compiled alone.

Two programs that compute the same may still round differently once XLA has fused their ops in different groups. Op by
op there is nothing to fuse: a rewritten step must give the very bits of the step it was made from.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Values = Sequence[Any]


def run_op_by_op(closed: Any, arguments: Values) -> list[Any]:
    """The results of a closed jaxpr; calls, checkpoints and scans are entered, whatever else is one op."""
    return _run(closed.jaxpr, closed.consts, arguments)


def bits(value: Any) -> bytes:
    """The bytes of an array, or of a key's data."""
    is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(value) if is_key else value).tobytes()


def _run(jaxpr: Any, constants: Values, arguments: Values) -> list[Any]:
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *arguments), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if hasattr(atom, "val") else values[atom]

    for equation in jaxpr.eqns:
        results = _apply(equation, [read(atom) for atom in equation.invars])
        values.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _apply(equation: Any, arguments: Values) -> Values:
    params = equation.params
    if equation.primitive.name == "scan":
        return _scan(params, arguments)
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if name in params:
            inner = params[name]
            return _run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), arguments)
    results = equation.primitive.bind(*arguments, **params)
    return results if equation.primitive.multiple_results else [results]


def _scan(params: dict[str, Any], arguments: Values) -> Values:
    first_carry, first_slice = params["num_consts"], params["num_consts"] + params["num_carry"]
    constants, carry, stacks = arguments[:first_carry], arguments[first_carry:first_slice], arguments[first_slice:]
    turns = range(params["length"])
    slices: list[Values] = []
    for turn in reversed(turns) if params["reverse"] else turns:
        results = run_op_by_op(params["jaxpr"], [*constants, *carry, *(stack[turn] for stack in stacks)])
        carry = results[: params["num_carry"]]
        slices.append(results[params["num_carry"] :])
    if params["reverse"]:
        slices.reverse()
    return [*carry, *(jnp.stack(stack) for stack in zip(*slices, strict=True))]
