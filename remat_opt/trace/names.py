"""Stable names for values, from where in the user's model they come."""

from __future__ import annotations

import re
from collections.abc import Iterable

from remat_opt.trace.inline import Program

_TRANSFORM = re.compile(r"\b(?:jit|jvp|vmap|transpose|checkpoint|remat)\(([^()]*)\)")


def name_values(program: Program, values: Iterable[int]) -> dict[int, str]:
    """A name for each value: the modules it was made in, then the primitive, numbered where that repeats.

    Numbers count over the whole program, so that a value's name does not depend on which others are named.
    """
    wanted = set(values)
    names: dict[int, str] = {}
    seen: dict[str, int] = {}
    for equation in program.equations:
        stem = _stem(str(equation.source_info.name_stack), equation.primitive.name)
        for value in equation.outputs:
            count = seen[stem] = seen.get(stem, 0) + 1
            if value in wanted:
                names[value] = stem if count == 1 else f"{stem}#{count}"
    return names


def _stem(stack: str, primitive: str) -> str:
    previous = None
    while previous != stack:
        previous, stack = stack, _TRANSFORM.sub(r"\1", stack)
    parts = [part for part in stack.split("/") if part]
    return "/".join([*parts, primitive])
