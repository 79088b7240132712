"""What a step is jitted with: the options of a jitted function, those that a user adds, and ours."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from remat_opt.targets.options import compiler_options_for, merge_compiler_options


def merge_options(given: dict[str, Any], overriding: dict[str, Any]) -> dict[str, Any]:
    """Options of a jitted function under those that a user adds; compiler options are merged by name."""
    merged = {**given, **overriding}
    for kind in ("static", "donate"):
        # What is said by number replaces what was said by name, and the other way round.
        if f"{kind}_argnums" in overriding and f"{kind}_argnames" not in overriding:
            merged.pop(f"{kind}_argnames", None)
        if f"{kind}_argnames" in overriding and f"{kind}_argnums" not in overriding:
            merged.pop(f"{kind}_argnums", None)
    options = merge_compiler_options(given.get("compiler_options") or {}, overriding.get("compiler_options") or {})
    if options:
        merged["compiler_options"] = options
    return merged


def with_ours(options: dict[str, Any], platform: str) -> dict[str, Any]:
    """A user's options of `jax.jit` with the compiler options that a rewritten step needs on a platform."""
    ours = compiler_options_for(platform, options.get("compiler_options"))
    return {**options, "compiler_options": ours} if ours else dict(options)


def standing_for(fun: Callable, write: Callable[[tuple, dict], Any]) -> Callable:
    """`write(args, kwargs)` with the name and the signature of the user's function, which jit reads its options by."""

    @functools.wraps(fun)
    def standing(*args, **kwargs):
        return write(args, kwargs)

    named = fun
    while isinstance(named, functools.partial):
        named = named.func
    standing.__name__ = getattr(named, "__name__", type(named).__name__)
    return standing
