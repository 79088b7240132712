"""A cache for methods whose entries live exactly as long as the object."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])


def cached_method(method: Method) -> Method:
    """Cache the results of a method for each object and positional arguments.

    `functools.cache` on a method would keep every object alive, with its graph and schedules.
    """
    name = f"_answers_of_{getattr(method, '__name__', '')}"

    @functools.wraps(method)
    def ask(self: Any, *arguments: Hashable) -> Any:
        known = self.__dict__.setdefault(name, {})
        if arguments not in known:
            known[arguments] = method(self, *arguments)
        return known[arguments]

    return ask  # type: ignore[return-value]
