"""Runs a jaxpr one op at a time, each compiled alone.

Two programs that compute the same may still round differently once XLA has fused their ops in different groups. Op by
op there is nothing to fuse: a rewritten step must give the very bits of the step it was made from.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import primitives

from remat_opt.trace import compat

Values = Sequence[Any]

Apply = Callable[[Any, Values], "Values | None"]
"""Does one equation on values, in place of JAX; None where JAX is to do it."""


def run_op_by_op(closed: Any, arguments: Values, apply: Apply = lambda equation, arguments: None) -> list[Any]:
    """The results of a closed jaxpr; calls, checkpoints, loops and branches are entered, whatever else is one op.

    So is a loop that was batched together with its condition. What nobody reads does not run: the derivative of a
    `custom_vjp` of which only the residuals are used leaves an op behind that JAX drops, and cannot run.
    """
    return _OpByOp(apply).closed(compat.without_dead_code(closed), arguments)


def bits(value: Any) -> bytes:
    """The bytes of an array, or of a key's data."""
    is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(value) if is_key else value).tobytes()


def assert_same_arithmetic(given: Any, written: Any, arguments: Values, expected: Values, found: Values) -> None:
    """Check that a rewritten jaxpr computes what it was made from, to the bit.

    Where a compiler fuses the two otherwise, which on XLA:CPU depends on the machine's instructions too, what was
    compiled may differ by rounding; then each op alone must give the same bits.

    Args:
        given, written: closed jaxprs.
        arguments: of both.
        expected, found: what they gave when they were compiled.
    """
    pairs = list(zip(expected, found, strict=True))
    if all(bits(one) == bits(other) for one, other in pairs):
        return
    for one, other in pairs:
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)
    one_by_one = [run_op_by_op(closed, arguments) for closed in (given, written)]
    assert [bits(value) for value in one_by_one[0]] == [bits(value) for value in one_by_one[1]]


class _OpByOp:
    def __init__(self, apply: Apply):
        self.apply = apply

    def closed(self, closed: Any, arguments: Values) -> list[Any]:
        return self.run(closed.jaxpr, closed.consts, arguments)

    def run(self, jaxpr: Any, constants: Values, arguments: Values) -> list[Any]:
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *arguments), strict=True))

        def read(atom: Any) -> Any:
            return atom.val if hasattr(atom, "val") else values[atom]

        for equation in jaxpr.eqns:
            results = self.equation(equation, [read(atom) for atom in equation.invars])
            values.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, equation: Any, arguments: Values) -> Values:
        params = equation.params
        if equation.primitive is primitives.scan_p:
            return self.scan(params, arguments)
        if equation.primitive is primitives.while_p and not params["cond_jaxpr"].out_avals[0].shape:
            return self.turns(params, arguments)
        if equation.primitive is primitives.cond_p:
            branches = params["branches"]
            return self.closed(branches[min(max(int(arguments[0]), 0), len(branches) - 1)], arguments[1:])
        for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
            if name in params:
                inner = params[name]
                return self.run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), arguments)
        results = self.apply(equation, arguments)
        return compat.bind_equation(equation.primitive, params, arguments) if results is None else results

    def scan(self, params: dict[str, Any], arguments: Values) -> Values:
        first_carry, carried = compat.scan_counts(params)
        first_slice = first_carry + carried
        constants, carry, stacks = arguments[:first_carry], arguments[first_carry:first_slice], arguments[first_slice:]
        turns = range(params["length"])
        slices: list[Values] = []
        for turn in reversed(turns) if params["reverse"] else turns:
            results = self.closed(params["jaxpr"], [*constants, *carry, *(stack[turn] for stack in stacks)])
            carry = results[:carried]
            slices.append(results[carried:])
        if params["reverse"]:
            slices.reverse()
        return [*carry, *(self.stack(stack) for stack in zip(*slices, strict=True))]

    def stack(self, values: Values) -> Any:
        return (np if all(isinstance(value, np.ndarray) for value in values) else jnp).stack(values)

    def turns(self, params: dict[str, Any], arguments: Values) -> Values:
        first_of_body, first_carried = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        test, body = arguments[:first_of_body], arguments[first_of_body:first_carried]
        carry = arguments[first_carried:]
        while bool(self.closed(params["cond_jaxpr"], [*test, *carry])[0]):
            carry = self.closed(params["body_jaxpr"], [*body, *carry])
        return carry
