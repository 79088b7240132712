"""`OptimizedFunction`: what `optimize` returns, called like `jax.jit`'s functions.

It answers for the function: calls go to the jit that `planned.py` keeps for what was decided, or, where there are
modules among the arguments, to the same function through their library.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from remat_opt.callable.adapters import AdaptedFunction, lifted
from remat_opt.callable.bound import BoundFunction
from remat_opt.callable.donation import Undonated
from remat_opt.callable.objects import refuse_objects
from remat_opt.callable.planned import PlannedFunction, PlanNeeded
from remat_opt.planner.collectives import number_of_devices
from remat_opt.planner.decision import Measure
from remat_opt.planner.plan import Plan
from remat_opt.planner.prepared import Prepared
from remat_opt.planner.settings import Settings
from remat_opt.planner.step import read_step
from remat_opt.report.explain import Explanation, explain
from remat_opt.targets import Target
from remat_opt.trace import compat


def _refusing_objects(method: Callable) -> Callable:
    """The method, whose error names an argument that `jax.jit` does not take."""

    @functools.wraps(method)
    def asked(self: OptimizedFunction, *args, **kwargs):
        try:
            return method(self, *args, **kwargs)
        except TypeError as error:
            refuse_objects(error, self.original, self.options, args, kwargs)
            raise

    return asked


class OptimizedFunction:
    """A training step that recomputes instead of saving. It is called like the `jax.jit` of the original function.

    `optimize` returns it. Besides `lower`, `trace` and `eval_shape` it has `plan`, `explain` and `jaxpr`.

    Attributes:
        original: the user's function.
        settings: what the user asked for.
        options: the user's of `jax.jit`, without ours.
        is_plain: the function was given without a jit; nnx modules among its arguments are then updated in place, as by
            `nnx.jit`. Under a user's `jax.jit` they are pytrees, and stay as they are.
    """

    def __init__(self, fun: Callable, settings: Settings, options: dict[str, Any], is_plain: bool = False):
        functools.update_wrapper(self, fun, updated=())
        self.original = fun
        self.settings = settings
        self.options = options
        self.is_plain = is_plain
        self._planned = PlannedFunction(fun, settings, options, is_plain)
        self._delegate: AdaptedFunction | None = None  # once it has been called with modules

    @property
    def jit_description(self) -> compat.JitDescription:
        """The user's function and its `jax.jit` options."""
        return compat.JitDescription(self.original, self.options, self.is_plain)

    @property
    def target(self) -> Target:
        """The device that it is planned for."""
        return self._planned.target

    def __repr__(self) -> str:
        return f"<remat_opt.optimize({self._planned.name})>"

    def __reduce__(self) -> Any:
        # Plans and compiled steps stay here.
        return OptimizedFunction, (self.original, self.settings, self.options, self.is_plain)

    # Calling

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else BoundFunction(self, instance)

    def __call__(self, *args, **kwargs):
        if self._delegate is not None:
            return self._delegate(*args, **kwargs)
        if not compat.outside_of_any_trace():
            if delegate := self._for_modules(args, kwargs):
                return delegate(*args, **kwargs)
            return self._planned.call_inside(args, kwargs)
        try:
            return (self._planned.jitted or self._planned.jit_for(args, kwargs, calling=True))(*args, **kwargs)
        except PlanNeeded:
            pass
        except jax.errors.JaxRuntimeError:
            if self._planned.jit_for(args, kwargs) is self._planned.jitted:
                raise  # else it was the compiler of another platform than in the calls before
        except Exception as error:
            if not self._for_modules(args, kwargs):  # jax.jit may not take them as arguments
                refuse_objects(error, self.original, self.options, args, kwargs)
                raise
        if delegate := self._for_modules(args, kwargs):
            return delegate(*args, **kwargs)
        return self._planned.with_plan(lambda jitted: jitted(*args, **kwargs), args, kwargs, compiling=True)

    def _for_modules(self, args: tuple, kwargs: dict) -> AdaptedFunction | None:
        """The adapter that replaces a plain function from its first call with modules on; None without modules."""
        if self._delegate is None and self.is_plain:
            self._delegate = lifted(self.original, self.options, self._make_inner, args, kwargs)
        return self._delegate

    def _make_inner(self, description: compat.JitDescription) -> OptimizedFunction:
        return OptimizedFunction(description.fun, self.settings, description.options)

    @_refusing_objects
    def lower(self, *args, **kwargs):
        """As `jax.jit(fun).lower`: the optimised step, lowered for these arguments."""
        if delegate := self._for_modules(args, kwargs):
            return delegate.lower(*args, **kwargs)
        lowered = self._planned.with_plan(lambda jitted: jitted.lower(*args, **kwargs), args, kwargs)
        self._planned.report_call(args, kwargs)
        return lowered

    @_refusing_objects
    def trace(self, *args, **kwargs):
        """As `jax.jit(fun).trace`: the optimised step, traced for these arguments."""
        if delegate := self._for_modules(args, kwargs):
            return delegate.trace(*args, **kwargs)
        return self._planned.with_plan(lambda jitted: jitted.trace(*args, **kwargs), args, kwargs)

    @_refusing_objects
    def eval_shape(self, *args, **kwargs):
        """As `jax.jit(fun).eval_shape`; nothing is planned."""
        if delegate := self._for_modules(args, kwargs):
            return delegate.eval_shape(*args, **kwargs)
        return self._planned.plain.eval_shape(*args, **kwargs)

    def jaxpr(self, *args, **kwargs):
        """The closed jaxpr of the optimised step; each recomputed segment is one `checkpoint` equation."""
        if delegate := self._for_modules(args, kwargs):
            return delegate.jaxpr(*args, **kwargs)
        return self.trace(*args, **kwargs).jaxpr

    @_refusing_objects
    def plan(self, *args, **kwargs) -> Plan:
        """What was decided for these arguments (arrays or `jax.ShapeDtypeStruct`s)."""
        if delegate := self._for_modules(args, kwargs):
            return delegate.plan(*args, **kwargs)
        return self._planned.decision(args, kwargs).plan

    @_refusing_objects
    def explain(self, *args, **kwargs) -> Explanation:
        """What is saved, what is recomputed, why, and what it costs; `print` it, or `.save("picture.png")`."""
        if delegate := self._for_modules(args, kwargs):
            return delegate.explain(*args, **kwargs)
        decision = self._planned.decision(args, kwargs)
        return explain(decision, self.devices(decision.prepared, args, kwargs))

    def devices(self, prepared: Prepared, args: tuple, kwargs: dict) -> int:
        """On how many devices the step runs; where it is more than one, the graph is of all of them together."""
        if not prepared.is_divided:
            return 1
        return number_of_devices(prepared.captured.program, (args, kwargs), self.options)

    def undonated(self, *args, **kwargs) -> Undonated | None:
        """State among these arguments that comes back as results and is not donated; None where it is little."""
        if delegate := self._for_modules(args, kwargs):
            return delegate.ask(lambda inner, a, k: inner.undonated(*a, **k), args, kwargs)
        return self._planned.undonated(self._planned.decision(args, kwargs), args)

    @_refusing_objects
    def prepare(self, *args, **kwargs) -> Prepared:
        """Trace and read the step for these arguments, without searching.

        Raises:
            ValueError: shapes are symbolic.
        """
        traced = self._planned.plain.trace(*args, **kwargs)
        if symbolic := compat.symbolic_inputs(traced):
            raise ValueError(f"expected shapes of numbers, whose bytes can be counted, got {symbolic[0]}")
        return read_step(traced, self.settings, self.options, (args, kwargs))

    def compiler(self, *args, **kwargs) -> Measure:
        """What compiles a candidate for the step that `prepare` reads for these arguments."""
        return functools.partial(self._planned.measure, args, kwargs)

    def ask(self, question: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """`question(function, args, kwargs)` of this function, or of what stands in for it when called with modules."""
        if delegate := self._for_modules(args, kwargs):
            return delegate.ask(question, args, kwargs)
        return question(self, args, kwargs)

    def clear_cache(self) -> None:
        """Forget all plans and compiled steps."""
        self._planned.clear_cache()

    _clear_cache = clear_cache  # as tests of jitted functions call it

    def _cache_size(self) -> int:
        """As of `jax.jit(fun)`: how many signatures of calls are compiled at present."""
        jitted = self._planned.jitted
        return jitted._cache_size() if jitted is not None else 0
