"""Unwraps the functions that users pass to the public API, and wraps the replacement in the same way.

`optimize`, `frontier`, `measure`, `checkpoint` and `policy` take the same kinds of function: plain functions, those of
`jax.jit`, `nnx.jit` and `eqx.filter_jit`, bound methods and partials of any of them, and results of `optimize`.
`resolve` finds the inner function and its options of `jax.jit`, makes the replacement, and puts it where the inner
function was: inside the library's object, and under the bound arguments.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from remat_opt.callable.adapters import AdaptedFunction, Make, adapt, is_adaptable, takes_nnx_modules
from remat_opt.callable.bound import BoundFunction
from remat_opt.callable.jit_options import merge_options
from remat_opt.trace import compat


class Parts(NamedTuple):
    """A bound method or a partial, taken apart."""

    func: Any
    args: tuple
    keywords: dict[str, Any]


def resolve(fun: Any, options: dict[str, Any], make: Make, name: str, *, lifts_modules: bool = False) -> Any:
    """Replace the function inside `fun` by what `make` makes of it.

    Args:
        fun: what the user gave.
        options: options of `jax.jit` that override those of `fun`; positions count as a caller of `fun` counts.
        make: makes the replacement of a function and its options; the result is called with the same arguments.
        name: of the public function, for errors.
        lifts_modules: nnx modules that are bound to a plain function (its `self`, say) become arguments, so that they
            can be updated.

    Returns:
        What `make` made, for `nnx.jit` and `eqx.filter_jit` objects in an `AdaptedFunction`, for bound methods and
        partials of jitted functions in a `BoundFunction`.

    Raises:
        TypeError: `fun` is no function.
        ValueError: an option that has to be given to the library's own jit.
    """
    if holds_jitted(fun):
        return _replace(fun, options, make, 0)
    if not callable(fun) or isinstance(fun, (jax.stages.Traced, jax.stages.Lowered, jax.stages.Compiled)):
        raise TypeError(
            "expected a function (plain, jax.jit, nnx.jit or eqx.filter_jit, or a bound method or partial of one), got "
            f"{type(fun).__name__}; write remat_opt.{name}(fun, …) with the function itself, without calling it"
        )
    lifted = _with_modules_first(fun) if lifts_modules else None
    if lifted is None:
        return make(compat.JitDescription(fun, dict(options), is_plain=True))
    of_modules, modules = lifted
    description = compat.JitDescription(of_modules, {}, is_plain=True)
    return BoundFunction(make(description._replace(options=merge_options(description, options, 1))), modules)


def bind(fun: Any) -> Any:
    """A bound method or a partial of what `optimize` made as one that can be asked; anything else as it is."""
    parts = parts_of(fun)
    if parts is None:
        return fun
    inner = bind(parts.func)
    return BoundFunction(inner, *parts.args, **parts.keywords) if is_optimized(inner) else fun


def is_optimized(fun: Any) -> bool:
    """Whether `optimize` made `fun`."""
    return not compat.is_jitted(fun) and (
        isinstance(fun, (AdaptedFunction, BoundFunction)) or _description_of(fun) is not None
    )


def parts_of(fun: Any) -> Parts | None:
    """The function and the bound arguments of a bound method, a partial or a callable object; None for others."""
    if isinstance(fun, functools.partial):
        return Parts(fun.func, fun.args, fun.keywords)
    if inspect.isfunction(fun) or inspect.isclass(fun) or inspect.isbuiltin(fun):
        return None
    if isinstance(fun, types.MethodType) or (hasattr(fun, "__func__") and hasattr(fun, "__self__")):
        return Parts(fun.__func__, (fun.__self__,), {})
    if type(fun).__module__.startswith("equinox") and type(fun).__name__ == "Partial":
        return Parts(fun.func, tuple(fun.args), dict(fun.keywords))
    call = getattr(type(fun), "__call__", None)  # noqa: B004, of the class: a method that is not bound
    return None if call is None or isinstance(call, types.WrapperDescriptorType) else Parts(call, (fun,), {})


def holds_jitted(fun: Any) -> bool:
    """Whether there is a jitted function inside, which has options of its own."""
    if _description_of(fun) is not None or is_adaptable(fun) or isinstance(fun, AdaptedFunction):
        return True
    parts = parts_of(fun)
    return parts is not None and holds_jitted(parts.func)


def _description_of(fun: Any) -> compat.JitDescription | None:
    """Of a function of `jax.jit`, and of what `optimize` made; None for others."""
    if compat.is_jitted(fun):
        return compat.describe_jit(fun)
    return fun.jit_description if isinstance(getattr(type(fun), "jit_description", None), property) else None


def _with_modules_first(fun: Any) -> tuple[Callable, tuple[dict[int, Any], dict[str, Any]]] | None:
    """A plain function whose first argument is the nnx modules that are bound to `fun`, and these, by position and by
    name; None where none is."""
    func, args, keywords = fun, (), {}
    while (parts := parts_of(func)) is not None:
        func, args, keywords = parts.func, (*parts.args, *args), {**parts.keywords, **keywords}
    at = {position: value for position, value in enumerate(args) if takes_nnx_modules((value,), {})}
    by = {name: value for name, value in keywords.items() if takes_nnx_modules((value,), {})}
    if not at and not by:
        return None
    others = tuple(None if position in at else value for position, value in enumerate(args))
    others_by = {name: value for name, value in keywords.items() if name not in by}

    def of_modules(modules, *args, **kwargs):
        at, by = modules
        bound = (at.get(position, value) for position, value in enumerate(others))
        return func(*bound, *args, **{**others_by, **by, **kwargs})

    functools.update_wrapper(of_modules, func, updated=())
    del of_modules.__wrapped__  # its signature is another one  # pyright: ignore[reportFunctionMemberAccess]
    first = inspect.Parameter("modules", inspect.Parameter.POSITIONAL_ONLY)
    of_modules.__signature__ = inspect.Signature([first, *inspect.signature(fun).parameters.values()])  # pyright: ignore[reportFunctionMemberAccess]
    return of_modules, (at, by)


def _replace(fun: Any, options: dict[str, Any], make: Make, bound: int) -> Any:
    """The same with `bound` arguments bound outside, which the positions in `options` leave out."""
    if isinstance(fun, AdaptedFunction):
        fun = fun.wrapper
    if is_adaptable(fun):
        return adapt(fun, options, make, bound)
    description = _description_of(fun)
    if description is not None:
        return make(description._replace(options=merge_options(description, options, bound)))
    parts = parts_of(fun)
    assert parts is not None
    inner = _replace(parts.func, options, make, bound + len(parts.args))
    return BoundFunction(inner, *parts.args, **parts.keywords)
