"""Slices that can be read again.

A slice depends on nothing but its stack and its index. What is computed of it twice, a compiler computes once and
keeps, or it keeps the slice, beside the stack from which it could be read again. Behind a barrier with what is computed
just before the second use, the index is another one to the compiler.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jax import lax


@dataclasses.dataclass(frozen=True, eq=False)
class Slice:
    """A slice of a stack.

    Attributes:
        read: makes it from its index.
        index: which one.
    """

    read: Callable[[Any], Any]
    index: Any

    def now(self) -> Any:
        """The slice, read at once."""
        return self.read(self.index)

    def after(self, values: list[Any]) -> tuple[Any, list[Any]]:
        """The slice, read when some values have been computed, and the values, which are to be read so from here on:
        compilers drop a barrier of which one result is not read."""
        index, values = lax.optimization_barrier((self.index, values))
        return self.read(index), values


def at_once(value: Any) -> Any:
    """A value itself, or a slice that is read at once."""
    return value.now() if isinstance(value, Slice) else value
