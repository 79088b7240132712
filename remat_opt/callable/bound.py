"""Functions of ours with arguments bound to them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class BoundFunction(functools.partial):
    """A function of ours with arguments bound to it: a method taken from an object, or a partial.

    Whatever is asked of it is asked of the function, with the bound arguments in front of those that are given.
    """

    def __getattr__(self, name: str) -> Any:
        if name == "__wrapped__":  # the signature is another one
            raise AttributeError(name)
        return getattr(self.func, name)

    def __repr__(self) -> str:
        return f"<{self.func!r} with bound arguments>"

    def _on(self, method: str, args: tuple, kwargs: dict) -> Any:
        return getattr(self.func, method)(*self.args, *args, **{**self.keywords, **kwargs})

    def lower(self, *args, **kwargs) -> Any:
        """The function, lowered for the bound arguments and these."""
        return self._on("lower", args, kwargs)

    def trace(self, *args, **kwargs) -> Any:
        """The function, traced for the bound arguments and these."""
        return self._on("trace", args, kwargs)

    def eval_shape(self, *args, **kwargs) -> Any:
        """The shapes of its results."""
        return self._on("eval_shape", args, kwargs)

    def jaxpr(self, *args, **kwargs) -> Any:
        """The closed jaxpr of the optimised step."""
        return self._on("jaxpr", args, kwargs)

    def plan(self, *args, **kwargs) -> Any:
        """What was decided for the bound arguments and these."""
        return self._on("plan", args, kwargs)

    def explain(self, *args, **kwargs) -> Any:
        """What is saved, what is recomputed, why, and what it costs."""
        return self._on("explain", args, kwargs)

    def ask(self, question: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """`question(function, args, kwargs)` of the innermost function and all its arguments."""
        return ask(self.func, question, (*self.args, *args), {**self.keywords, **kwargs})


def ask(fun: Any, question: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """`question(function, args, kwargs)` of the innermost function of ours in `fun`, and its arguments."""
    return fun.ask(question, args, kwargs) if hasattr(fun, "ask") else question(fun, args, kwargs)
