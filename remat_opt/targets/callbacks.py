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


def without_callbacks(closed: Any) -> Any:
    """A closed jaxpr with a stand-in for each callback and debug print, nested ones included.

    The same object where there is none. Results are not those of the program: it is to be compiled, not to be run.
    """
    return _Replacing().closed(closed)


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


class _Replacing:
    """Jaxprs that occur several times stay one, so that they are lowered once."""

    def __init__(self) -> None:
        self._done: dict[int, tuple[Any, Any]] = {}  # by id, with the jaxpr, which keeps the id its own

    def closed(self, closed: Any) -> Any:
        jaxpr = self.jaxpr(compat.bare_jaxpr(closed))
        return closed if jaxpr is compat.bare_jaxpr(closed) else extend_core.ClosedJaxpr(jaxpr, closed.consts)

    def jaxpr(self, jaxpr: Any) -> Any:
        if id(jaxpr) not in self._done:
            self._done[id(jaxpr)] = jaxpr, self._replaced(jaxpr)
        return self._done[id(jaxpr)][1]

    def _replaced(self, jaxpr: Any) -> Any:
        seen: list[Any] = []
        equations = [self._equation(equation, seen) for equation in jaxpr.eqns]
        if all(one is other for one, other in zip(equations, jaxpr.eqns, strict=True)):
            return jaxpr
        results = list(jaxpr.outvars)
        # What only a callback without results reads would not be computed. The smallest result waits for it.
        arrays = [at for at, atom in enumerate(results) if hasattr(atom.aval, "dtype") and not is_key(atom.aval)]
        if seen and arrays:
            at = min(arrays, key=lambda at: results[at].aval.size)
            equations.append(_as_equation(_reading, [results[at], *seen]))
            results[at] = equations[-1].outvars[0]
        return jaxpr.replace(eqns=equations, outvars=results, effects=jaxpr.effects - _effects())

    def _equation(self, equation: Any, seen: list[Any]) -> Any:
        """The equation without callbacks; what stands for effects of this level is added to `seen`."""
        if compat.is_kernel(equation.params):
            return equation
        inner = list(extend_core.jaxprs_in_params(equation.params))
        if not inner and (equation.primitive is compat.pure_callback_p or equation.effects & _effects()):
            results = [variable.aval for variable in equation.outvars]
            called = _as_equation(functools.partial(stand_in, results), equation.invars)
            if equation.effects:
                seen.append(called.outvars[-1])
            return called.replace(outvars=[*equation.outvars, called.outvars[-1]])
        params = {name: self._parameter(value) for name, value in equation.params.items()}
        if all(params[name] is value for name, value in equation.params.items()):
            return equation
        return equation.replace(params=params, effects=equation.effects - _effects())

    def _parameter(self, value: Any) -> Any:
        """A parameter of an equation: jaxprs are replaced, alone or in a tuple or list, the rest is the same object."""
        if type(value) in (tuple, list):
            parts = [self._parameter(part) for part in value]
            return value if all(map(lambda one, other: one is other, parts, value)) else type(value)(parts)
        if isinstance(value, extend_core.ClosedJaxpr):
            return self.closed(value)
        return self.jaxpr(value) if isinstance(value, extend_core.Jaxpr) else value


@functools.cache
def _effects() -> frozenset[Any]:
    """The effects of debug prints and of callbacks, by the object: read off traced ones."""
    found: set[Any] = set()
    for ordered in (False, True):
        found |= jax.make_jaxpr(lambda ordered=ordered: jax.debug.print("", ordered=ordered))().effects
        found |= jax.make_jaxpr(lambda ordered=ordered: io_callback(lambda: None, None, ordered=ordered))().effects
    return frozenset(found)
