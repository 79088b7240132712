"""What users are told that leaves results right: the category, and where in their code it points to."""

from __future__ import annotations

import inspect


class RematWarning(UserWarning):
    """Something that a user of `optimize` should know and that leaves results right."""


def callers_level() -> int:
    """How far up the stack the first frame outside of this package and of JAX is."""
    level = 1
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("remat_opt", "jax"):
        frame = frame.f_back
        level += 1
    return max(level - 1, 1)
