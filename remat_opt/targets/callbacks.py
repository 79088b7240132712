"""Programs without their callbacks to the host, for the compilers of absent devices, which have no host to call."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import io_callback
from jax.extend import core as extend_core

from remat_opt.trace import compat
from remat_opt.trace.avals import abstract, is_key
from remat_opt.trace.nested import with_jaxprs


def without_callbacks(closed: Any) -> Any:
    """A closed jaxpr with a stand-in for each callback and debug print, nested ones included.

    The same object where there is none. Results are not those of the program: it is to be compiled, not to be run.
    """
    jaxpr = compat.bare_jaxpr(closed)
    found = _replaced(jaxpr, {})
    return closed if found is jaxpr else extend_core.ClosedJaxpr(found, closed.consts)


def stand_in(results: Sequence[Any], *operands: Any) -> list[Any]:
    """What takes the same memory as a callback.

    A callback's operands are written to memory, none of them fused into what the host reads, and so are its results. An
    optimization barrier has its operands written, but XLA removes those that nothing reads afterwards, and fuses a
    constant or a broadcast into its readers. So all results depend on one element of each operand, taken after the
    barrier, and they go through a barrier of their own.

    Args:
        results: an abstract value for each result.
        operands: of the callback.

    Returns:
        The results, and a scalar that depends on all operands.
    """
    seen = jnp.float32(0)
    for operand in lax.optimization_barrier((*operands, seen)):
        if jnp.issubdtype(operand.dtype, jax.dtypes.extended):
            operand = jax.random.key_data(operand)
        if operand.size:
            seen += jnp.real(operand[(0,) * operand.ndim]).astype(jnp.float32)
    written = [lax.full(one.shape, seen.astype(one.dtype), one.dtype) for one in results]
    return list(lax.optimization_barrier((*written, seen)))


def _reading(value: Any, *seen: Any) -> Any:
    """The same value, which now depends on scalars. XLA does not know that it is the same."""
    return lax.select(sum(seen) == 1.25, lax.full_like(value, 0), value)


def _as_equation(fun: Any, inputs: Sequence[Any]) -> Any:
    """An equation that calls a function on variables of another jaxpr; its results are new variables."""
    (equation,) = jax.make_jaxpr(jax.jit(fun))(*(abstract(atom.aval) for atom in inputs)).jaxpr.eqns
    return equation.replace(invars=list(inputs))


def _replaced(jaxpr: Any, known: dict[int, tuple[Any, Any]]) -> Any:
    """An open jaxpr without callbacks. `known` has by the id of a jaxpr what was made of it, so that one that occurs
    several times is lowered once, and the jaxpr itself, which keeps the id its own."""
    if id(jaxpr) in known:
        return known[id(jaxpr)][1]
    seen: list[Any] = []
    equations = [_without_callback(equation, seen, known) for equation in jaxpr.eqns]
    found = jaxpr
    if any(one is not other for one, other in zip(equations, jaxpr.eqns, strict=True)):
        results = list(jaxpr.outvars)
        # What only a callback without results reads would not be computed. The smallest result waits for it.
        arrays = [at for at, atom in enumerate(results) if hasattr(atom.aval, "dtype") and not is_key(atom.aval)]
        if seen and arrays:
            at = min(arrays, key=lambda at: results[at].aval.size)
            equations.append(_as_equation(_reading, [results[at], *seen]))
            results[at] = equations[-1].outvars[0]
        found = jaxpr.replace(eqns=equations, outvars=results, effects=jaxpr.effects - _effects())
    known[id(jaxpr)] = jaxpr, found
    return found


def _without_callback(equation: Any, seen: list[Any], known: dict[int, tuple[Any, Any]]) -> Any:
    """The equation without callbacks; what stands for effects of this level is added to `seen`."""
    if compat.is_kernel(equation.params):
        return equation
    has_effect = bool(equation.effects & _effects())
    if not compat.jaxprs_in(equation.params) and (equation.primitive is compat.pure_callback_p or has_effect):
        results = [variable.aval for variable in equation.outvars]
        called = _as_equation(functools.partial(stand_in, results), equation.invars)
        if equation.effects:
            seen.append(called.outvars[-1])
        return called.replace(outvars=[*equation.outvars, called.outvars[-1]])
    params = with_jaxprs(equation.params, lambda jaxpr: _replaced(jaxpr, known))
    if params is equation.params:
        return equation
    return equation.replace(params=params, effects=equation.effects - _effects())


@functools.cache
def _effects() -> frozenset[Any]:
    """The effects of debug prints and of callbacks, by the object: read off traced ones."""
    found: set[Any] = set()
    for ordered in (False, True):
        found |= jax.make_jaxpr(lambda ordered=ordered: jax.debug.print("", ordered=ordered))().effects
        found |= jax.make_jaxpr(lambda ordered=ordered: io_callback(lambda: None, None, ordered=ordered))().effects
    return frozenset(found)
