"""Adapters for objects that contain a `jax.jit`: those of `nnx.jit` and `eqx.filter_jit`.

Such an object splits its arguments, calls its inner jit, and merges the results. An adapter is a copy of the object
with our function in place of the inner jit, so that the library still updates modules. Neither library is imported
here: objects are recognised by the module of their class.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax

from remat_opt.callable.bound import BoundFunction
from remat_opt.callable.jit_options import merge_options
from remat_opt.trace import compat

Make = Callable[[compat.JitDescription], Any]
"""Makes a function of ours of a function and its options of `jax.jit`."""

_DONATED = frozenset({"donate_argnums", "donate_argnames"})
_READ_BY_NNX = frozenset({"static_argnums", "static_argnames", "in_shardings", "out_shardings"})
_OF_JAX_JIT_ALONE = frozenset({"compiler_options"})


class _Answer(Exception):
    """Carries a result through another library's call."""

    def __init__(self, value: Any):
        super().__init__()
        self.value = value


class _InnerFunction:
    """Stands where the library's jit stood; answers a question about its arguments instead of running when asked."""

    def __init__(self, made: Any):
        functools.update_wrapper(self, made, updated=())
        self.made = made
        self.asked = threading.local()

    def __call__(self, *args, **kwargs):
        return self.made(*args, **kwargs)

    def lower(self, *args, **kwargs):
        question = getattr(self.asked, "question", None)
        if question is not None:
            raise _Answer(question(self.made, args, kwargs))
        return self.made.lower(*args, **kwargs)

    def trace(self, *args, **kwargs):
        return self.made.trace(*args, **kwargs)

    def eval_shape(self, *args, **kwargs):
        return self.made.eval_shape(*args, **kwargs)


class AdaptedFunction:
    """An `nnx.jit` or `eqx.filter_jit` object with a function of ours inside; called as the object it was made from."""

    def __init__(self, wrapper: Any, twin: Any, inner: _InnerFunction):
        functools.update_wrapper(self, wrapper, updated=())
        self.wrapper = wrapper
        self._twin = twin
        self._inner = inner

    def __call__(self, *args, **kwargs):
        return self._twin(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else BoundFunction(self, instance)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._twin, name)  # lower, trace, eval_shape where the library has them

    def ask(self, question: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """`question(function, args, kwargs)` of the function inside and the arguments that it is called with."""
        self._inner.asked.question = question
        try:
            self._twin.lower(*args, **kwargs)
        except _Answer as answer:
            return answer.value
        finally:
            self._inner.asked.question = None
        raise RuntimeError("expected the library's jit object to lower its inner function; it did not")

    def plan(self, *args, **kwargs) -> Any:
        """What was decided for these arguments."""
        return self.ask(lambda made, args, kwargs: made.plan(*args, **kwargs), args, kwargs)

    def explain(self, *args, **kwargs) -> Any:
        """What is saved, what is recomputed, why, and what it costs."""
        return self.ask(lambda made, args, kwargs: made.explain(*args, **kwargs), args, kwargs)

    def jaxpr(self, *args, **kwargs) -> Any:
        """The closed jaxpr of the optimised step, on the arrays that the library passes to its jit."""
        return self.ask(lambda made, args, kwargs: made.jaxpr(*args, **kwargs), args, kwargs)


def is_adaptable(fun: Any) -> bool:
    """Whether `fun` is an `nnx.jit` or `eqx.filter_jit` object."""
    return compat.is_jitted(_inner_jit(fun))


def adapt(wrapper: Any, options: dict[str, Any], make: Make, bound: int = 0) -> AdaptedFunction:
    """Replace the jit inside an `nnx.jit` or `eqx.filter_jit` object.

    Args:
        wrapper: the library's object.
        options: options of `jax.jit` that override those of the inner jit.
        make: makes the replacement.
        bound: how many leading arguments are bound, see `merge_options`.

    Raises:
        ValueError: an option that has to be given to the library itself, which reads its arguments by it.
    """
    given = compat.describe_jit(_inner_jit(wrapper))
    if _comes_from(wrapper, "equinox"):
        _refuse(options, _READ_BY_NNX | _DONATED, 'eqx.filter_jit(step, donate="all")')
        inner = _InnerFunction(make(given._replace(options=merge_options(given, options))))
        twin = copy.copy(wrapper)
        object.__setattr__(twin, "_cached", inner)  # equinox modules are frozen
        return AdaptedFunction(wrapper, twin, inner)
    _refuse(options, _READ_BY_NNX, "nnx.jit(step, …)")
    twin = copy.copy(wrapper)
    merged = merge_options(given, options, bound)
    twin.jitted_fn = _InnerFunction(
        make(compat.JitDescription(_pure(given.fun, wrapper, twin, options, merged), merged))
    )
    return AdaptedFunction(wrapper, twin, twin.jitted_fn)


def lifted(fun: Callable, options: dict[str, Any], make: Make, args: tuple, kwargs: dict) -> AdaptedFunction | None:
    """A plain function as `nnx.jit` or `eqx.filter_jit` would call it, where there are modules among its arguments that
    `jax.jit` would not take as they do; None where there are none.

    Raises:
        ValueError: options that `eqx.filter_jit` does not take.
    """
    if takes_nnx_modules(args, kwargs):
        for_nnx = {name: value for name, value in options.items() if name not in _OF_JAX_JIT_ALONE}
        rest = {name: value for name, value in options.items() if name in _OF_JAX_JIT_ALONE}
        return adapt(sys.modules["flax.nnx"].jit(fun, **for_nnx), rest, make)
    if takes_equinox_modules(args, kwargs):
        return through_equinox(fun, options, make)
    return None


def through_equinox(fun: Callable, options: dict[str, Any], make: Make) -> AdaptedFunction:
    """A plain function as `eqx.filter_jit` would call it, which keeps leaves that are no arrays out of the trace.

    Raises:
        ValueError: options that `eqx.filter_jit` does not take.
    """
    return adapt(sys.modules["equinox"].filter_jit(fun), options, make)


def takes_nnx_modules(args: tuple, kwargs: dict) -> bool:
    """Whether there is an nnx module (or optimizer, metric or variable) among the arguments."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and any(True for _ in _nodes((args, kwargs), (nnx.Pytree, nnx.Variable)))


def takes_equinox_modules(args: tuple, kwargs: dict) -> bool:
    """Whether there is an equinox module with leaves that are no arrays among the arguments."""
    equinox = sys.modules.get("equinox")
    if equinox is None:
        return False
    modules = _nodes((args, kwargs), equinox.Module)
    return any(not _is_array_like(leaf) for module in modules for leaf in jax.tree.leaves(module))


def _nodes(tree: Any, kinds: Any) -> Iterator[Any]:
    is_node = lambda x: isinstance(x, kinds)  # noqa: E731
    return filter(is_node, jax.tree.leaves(tree, is_leaf=is_node))


def _is_array_like(leaf: Any) -> bool:
    return isinstance(leaf, (bool, int, float, complex)) or hasattr(leaf, "dtype")


def _comes_from(fun: Any, package: str) -> bool:
    return type(fun).__module__.startswith(package)


def _inner_jit(fun: Any) -> Any:
    if _comes_from(fun, "flax.nnx"):
        return getattr(fun, "jitted_fn", None)
    return getattr(fun, "_cached", None) if _comes_from(fun, "equinox") else None


def _refuse(options: dict[str, Any], refused: frozenset[str], instead: str) -> None:
    found = sorted(refused & options.keys())
    if found:
        raise ValueError(
            f"expected {', '.join(found)} to be given to the library that splits the modules among the arguments; "
            f"write remat_opt.optimize({instead})"
        )


def _pure(pure: Any, wrapper: Any, twin: Any, overriding: dict[str, Any], options: dict[str, Any]) -> Any:
    """The function inside `nnx.jit`, as the twin calls it."""
    changes: dict[str, Any] = {}
    if getattr(pure, "ctxtag", None) is wrapper:
        changes["ctxtag"] = twin  # nnx ties a call to its trace by this tag
    for name in _DONATED:
        if _DONATED & overriding.keys() and hasattr(pure, name):
            value = options.get(name, ())  # nnx hands donated variables back, unchanged ones too
            changes[name] = frozenset((value,) if isinstance(value, (int, str)) else value)
    return dataclasses.replace(cast(Any, pure), **changes) if changes else pure
