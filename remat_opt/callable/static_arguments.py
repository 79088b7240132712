"""Arguments that are no arrays and decide what is traced."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from remat_opt.callable.closed_over import leaving_modules
from remat_opt.trace import compat

_MOST_BOUND = 256  # sets of static arguments remembered for each function


class StaticArguments:
    """Takes static arguments out of a call, as `jax.checkpoint` does: they need not be hashable.

    Args:
        fun: the function.
        argnums: their positions, all of which a call has to have.
        argnames: the names of those that are given by name.
        optional: a call need not have all positions: `jax.jit` lets arguments be given by name instead.
    """

    def __init__(
        self, fun: Callable, argnums: int | Sequence[int], argnames: str | Iterable[str], *, optional: bool = False
    ):
        self.fun = fun
        self.optional = optional
        self.argnums = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        self.argnames = frozenset((argnames,) if isinstance(argnames, str) else argnames)
        self.jitted = jax.jit(fun)
        self.bound: collections.OrderedDict[Any, Any] = collections.OrderedDict()

    def split(self, args: tuple, kwargs: dict) -> tuple[Any, tuple, dict]:
        """The jitted function of the other arguments, and those."""
        if not self.argnums and self.argnames.isdisjoint(kwargs):
            return self.jitted, args, kwargs
        present = [number for number in self.argnums if -len(args) <= number < len(args)]
        if len(present) < len(self.argnums) and not self.optional:
            raise ValueError(
                f"expected static_argnums of at least {-len(args)} and less than {len(args)}, the number of positional "
                f"arguments in this call; got {self.argnums}"
            )
        numbers = {number % len(args) for number in present}
        static = {number: args[number] for number in sorted(numbers)}
        by_name = {name: kwargs[name] for name in sorted(self.argnames & kwargs.keys())}
        dynamic = tuple(x for number, x in enumerate(args) if number not in numbers)
        rest = {name: x for name, x in kwargs.items() if name not in by_name}
        return self.with_static(static, by_name), dynamic, rest

    def with_static(self, static: dict[int, Any], by_name: dict[str, Any]) -> Any:
        values = (*static.items(), *by_name.items())
        key = tuple((name, type(value), value) for name, value in values)  # 1 and True are equal
        try:
            known = self.bound.get(key)
        except TypeError:  # not hashable: traced anew at each call
            return jax.jit(self.bind(static, by_name))
        if known is not None:
            self.bound.move_to_end(key)
            return known
        jitted = jax.jit(self.bind(static, by_name))
        if not any(isinstance(value, compat.Tracer) for _, value in values):
            self.bound[key] = jitted
            if len(self.bound) > _MOST_BOUND:
                self.bound.popitem(last=False)
        return jitted

    def bind(self, static: dict[int, Any], by_name: dict[str, Any]) -> Callable:
        @functools.wraps(self.fun)
        def of_the_others(*dynamic, **kwargs):
            rest = iter(dynamic)
            count = len(dynamic) + len(static)
            args = [static[number] if number in static else next(rest) for number in range(count)]
            return self.fun(*args, **kwargs, **by_name)

        del of_the_others.__wrapped__  # its signature is another one
        return of_the_others


def statics_of(found: compat.JitDescription) -> StaticArguments:
    """The function that was given, with its static arguments. A user's jit stays round it, with its shardings."""
    options = dict(found.options)
    numbers, names = options.get("static_argnums", ()), options.get("static_argnames", ())
    inner = leaving_modules(found.fun if found.is_plain else jax.jit(found.fun, **options))
    return StaticArguments(inner, numbers, names, optional=not found.is_plain)
