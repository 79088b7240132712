"""What a step is jitted with: the options of a jitted function, those that a user adds, and ours."""

from __future__ import annotations

import difflib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import jax

from remat_opt.targets.options import compiler_options_for, merge_compiler_options
from remat_opt.trace.compat import JitDescription


def check_names(options: dict[str, Any], function: Callable) -> None:
    """Check that no option is nearly one of a function's or of `jax.jit`; what is like none is left to `jax.jit`.

    Raises:
        TypeError: one is; the message has the name that comes nearest.
    """
    named = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    own, of_jit = (inspect.signature(one).parameters.values() for one in (function, jax.jit))
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in of_jit):
        return
    known = [one.name for one in (*own, *of_jit) if one.kind in named]
    for name in options:
        if name not in known and (alike := difflib.get_close_matches(name, known, 1)):
            ours = f"remat_opt.{function.__name__}"
            raise TypeError(f"expected options of {ours} or of jax.jit, got {name!r}; write {alike[0]!r}, say")


def merge_options(description: JitDescription, overriding: dict[str, Any], bound: int = 0) -> dict[str, Any]:
    """Options of a jitted function under those that a user adds; compiler options are merged by name.

    Args:
        description: the jitted function.
        overriding: options that replace them.
        bound: how many leading arguments are bound (the `self` of a method). Positions in `overriding` count from the
            argument after them, as for `jax.jit(bound_method)`; what is given of the bound ones stays.
    """
    given = description.options
    merged = {**given, **overriding}
    for kind in ("static", "donate"):
        numbers, names = f"{kind}_argnums", f"{kind}_argnames"
        # What is said by number replaces what was said by name, and the other way round.
        if numbers in overriding and names not in overriding:
            merged.pop(names, None)
        if names in overriding and numbers not in overriding:
            merged.pop(numbers, None)
        if bound and (numbers in overriding or names in overriding):
            kept = [number for number in _as_tuple(given.get(numbers)) if 0 <= number < bound]
            added = [number + bound if number >= 0 else number for number in _as_tuple(overriding.get(numbers))]
            if kept and names in overriding:  # of both, jax.jit infers no position from a name
                added += _positions(description.fun, overriding[names])
            if kept or added:
                merged[numbers] = (*kept, *added)
    if bound and isinstance(overriding.get("in_shardings"), (tuple, list)):
        traced = bound - sum(0 <= number < bound for number in _as_tuple(merged.get("static_argnums")))
        of_bound = given.get("in_shardings")
        leading = tuple(of_bound)[:traced] if isinstance(of_bound, (tuple, list)) else (of_bound,) * traced
        merged["in_shardings"] = (*leading, *overriding["in_shardings"])
    options = merge_compiler_options(given.get("compiler_options") or {}, overriding.get("compiler_options") or {})
    if options:
        merged["compiler_options"] = options
    return merged


def _positions(fun: Callable, names: str | Iterable[str]) -> list[int]:
    parameters = list(inspect.signature(fun).parameters)
    return [parameters.index(name) for name in ([names] if isinstance(names, str) else names) if name in parameters]


def _as_tuple(numbers: int | Iterable[int] | None) -> tuple[int, ...]:
    if numbers is None:
        return ()
    return (numbers,) if isinstance(numbers, int) else tuple(numbers)


def with_ours(options: dict[str, Any], platform: str, offloads: bool) -> dict[str, Any]:
    """A user's options of `jax.jit` with the compiler options that a rewritten step needs on a platform."""
    ours = compiler_options_for(platform, options.get("compiler_options"), offloads=offloads)
    return {**options, "compiler_options": ours} if ours else dict(options)


def standing_for(fun: Callable, writer: weakref.WeakMethod) -> Callable:
    """A function for `jax.jit` with the name and the signature of the user's, which jit reads its options by.

    Args:
        fun: the user's function.
        writer: called with `(args, kwargs)` in its place; a method of the object that keeps the jitted function, which
            must not keep the object.
    """

    @functools.wraps(fun)
    def standing(*args, **kwargs):
        write = writer()
        assert write is not None, "the object is alive while the jitted function that it keeps is called"
        return write(args, kwargs)

    named = fun
    while isinstance(named, functools.partial):
        named = named.func
    standing.__name__ = getattr(named, "__name__", type(named).__name__)
    return standing
