"""Functions that keep a `jax.jit` inside: `nnx.jit` and `eqx.filter_jit` objects.

Each splits its arguments, calls its inner jit, and puts the results back. A copy of such an object with an optimised
function in the inner jit's place does all that its library does, and updates modules as it would. Neither library is
imported here: objects are told by where they come from.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
import types
from collections.abc import Callable
from typing import Any, cast

import jax

from remat_opt.program import compat

Optimize = Callable[[Callable], Any]
"""Makes an optimised function of an inner jit."""


class _Answer(Exception):
    """Carries a result through another library's call."""

    def __init__(self, value: Any):
        super().__init__()
        self.value = value


class _InnerFunction:
    """Stands where the library's jit stood; answers a question about its arguments instead of running when asked."""

    def __init__(self, optimized: Any):
        functools.update_wrapper(self, optimized, updated=())
        self.optimized = optimized
        self.question: Callable[..., Any] | None = None

    def __call__(self, *args, **kwargs):
        return self.optimized(*args, **kwargs)

    def lower(self, *args, **kwargs):
        if self.question is not None:
            raise _Answer(self.question(*args, **kwargs))
        return self.optimized.lower(*args, **kwargs)

    def trace(self, *args, **kwargs):
        return self.optimized.trace(*args, **kwargs)

    def eval_shape(self, *args, **kwargs):
        return self.optimized.eval_shape(*args, **kwargs)


class AdaptedFunction:
    """An `nnx.jit` or `eqx.filter_jit` object whose inner jit is optimised; called as the object it was made from."""

    def __init__(self, wrapper: Any, inner: _InnerFunction):
        functools.update_wrapper(self, wrapper, updated=())
        self._wrapper = wrapper
        self._inner = inner

    def __call__(self, *args, **kwargs):
        return self._wrapper(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapper, name)  # lower, trace, eval_shape where the library has them

    def _ask(self, question: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        self._inner.question = question
        try:
            self._wrapper.lower(*args, **kwargs)
        except _Answer as answer:
            return answer.value
        finally:
            self._inner.question = None
        raise RuntimeError("expected the library's jit object to lower its inner function; it did not")

    def ask(self, question: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """`question(function, args, kwargs)` of the inner optimised function and the arrays that it is called with."""
        return self._ask(lambda *a, **k: question(self._inner.optimized, a, k), args, kwargs)

    def plan(self, *args, **kwargs) -> Any:
        """What was decided for these arguments."""
        return self._ask(self._inner.optimized.plan, args, kwargs)

    def explain(self, *args, **kwargs) -> Any:
        """What is saved, what is recomputed, why, and what it costs."""
        return self._ask(self._inner.optimized.explain, args, kwargs)

    def jaxpr(self, *args, **kwargs) -> Any:
        """The closed jaxpr of the optimised step, on the arrays that the library passes to its jit."""
        return self._ask(self._inner.optimized.jaxpr, args, kwargs)


def adapt(fun: Any, optimize: Optimize) -> AdaptedFunction | None:
    """Optimise the jit inside an `nnx.jit` or `eqx.filter_jit` object; None for anything else."""
    if _comes_from(fun, "flax.nnx") and compat.is_jitted(getattr(fun, "jitted_fn", None)):
        return _adapt_nnx(fun, optimize)
    if _comes_from(fun, "equinox") and compat.is_jitted(getattr(fun, "_cached", None)):
        return _adapt_equinox(fun, optimize)
    return None


def adapt_function_of_modules(fun: Callable, optimize: Optimize, options: dict[str, Any]) -> AdaptedFunction | None:
    """Treat a plain function as `nnx.jit` would, and optimise that."""
    return adapt(sys.modules["flax.nnx"].jit(fun, **options), optimize)


def takes_modules(args: tuple, kwargs: dict) -> bool:
    """Whether there is an nnx module (or optimizer, or metric) among the arguments."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return False
    is_module = lambda x: isinstance(x, nnx.Pytree)  # noqa: E731
    return any(is_module(leaf) for leaf in jax.tree.leaves((args, kwargs), is_leaf=is_module))


def _comes_from(fun: Any, package: str) -> bool:
    return type(fun).__module__.startswith(package)


def _adapt_nnx(wrapper: Any, optimize: Optimize) -> AdaptedFunction:
    twin = copy.copy(wrapper)
    inner_jit = wrapper.jitted_fn
    pure = compat.describe_jit(inner_jit).fun
    if getattr(pure, "ctxtag", None) is wrapper:
        # nnx ties a call to its trace by this tag, so the twin needs a pure function tagged with itself.
        pure = dataclasses.replace(cast(Any, pure), ctxtag=twin)
    inner = _InnerFunction(optimize(jax.jit(pure, **compat.describe_jit(inner_jit).options)))
    twin.jitted_fn = inner
    return AdaptedFunction(twin, inner)


def _adapt_equinox(wrapper: Any, optimize: Optimize) -> AdaptedFunction:
    twin = copy.copy(wrapper)
    inner = _InnerFunction(optimize(wrapper._cached))
    object.__setattr__(twin, "_cached", inner)  # equinox modules are frozen
    return AdaptedFunction(twin, inner)
