"""Options of `jax.jit`: those of a jitted function, and those that a user adds."""

from __future__ import annotations

from typing import Any

from remat_opt.targets.options import merge_compiler_options


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
