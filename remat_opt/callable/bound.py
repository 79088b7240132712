"""Functions of ours with arguments bound to them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_ASKED_WITH_ARGUMENTS = frozenset({"lower", "trace", "eval_shape", "jaxpr", "plan", "explain"})


class BoundFunction(functools.partial):
    """A function of ours with arguments bound to it: a method taken from an object, or a partial.

    Whatever is asked of it is asked of the function, with the bound arguments in front of those that are given.
    """

    def __getattr__(self, name: str) -> Any:
        if name == "__wrapped__":  # the signature is another one
            raise AttributeError(name)
        found = getattr(self.func, name)
        return functools.partial(found, *self.args, **self.keywords) if name in _ASKED_WITH_ARGUMENTS else found

    def __repr__(self) -> str:
        return f"<{self.func!r} with bound arguments>"

    def ask(self, question: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """`question(function, args, kwargs)` of the innermost function and all its arguments."""
        return ask(self.func, question, (*self.args, *args), {**self.keywords, **kwargs})


def ask(fun: Any, question: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """`question(function, args, kwargs)` of the innermost function of ours in `fun`, and its arguments."""
    return fun.ask(question, args, kwargs) if hasattr(fun, "ask") else question(fun, args, kwargs)
