"""The rewritten program inside another transform: it computes as rewritten and differentiates as it was given.

The flat program has no `custom_jvp` and `custom_vjp` rules any more. Whoever differentiates it gets the derivative of
the original, with all its rules.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero


def with_derivative_of(
    original: Callable[..., list[Any]],
    rewritten: Callable[..., list[Any]],
    arguments: Sequence[Any],
    effects: Collection[Any] = (),
) -> list[Any]:
    """Evaluate `rewritten(*arguments)`, differentiable as `original(*arguments)`.

    Where the program has effects the original is evaluated: JAX allows few effects under a custom derivative.
    """
    if effects:
        return original(*arguments)

    @jax.custom_jvp
    def function(*values):
        return rewritten(*values)

    def derivative(primals, tangents):
        # Arguments that nobody differentiates are closed over, so that no derivative by them is computed.
        active = [not isinstance(tangent, SymbolicZero) for tangent in tangents]

        def of_active(*values):
            given = iter(values)
            return original(*(next(given) if on else primal for on, primal in zip(active, primals, strict=True)))

        some_primals = [primal for on, primal in zip(active, primals, strict=True) if on]
        some_tangents = [tangent for on, tangent in zip(active, tangents, strict=True) if on]
        if not some_primals:
            results = original(*primals)
            return results, [jax.custom_derivatives.zero_from_primal(result) for result in results]
        return jax.jvp(of_active, some_primals, some_tangents)

    function.defjvp(derivative, symbolic_zeros=True)
    return function(*arguments)
