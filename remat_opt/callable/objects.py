"""Says what to write where an argument is an object that neither JAX nor flax takes apart, such as a plain trainer."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax

from remat_opt.callable.donation import positional_parameters
from remat_opt.trace import compat

_NO_OBJECTS = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)


def refuse_objects(error: Exception, fun: Callable, options: dict[str, Any], args: tuple, kwargs: dict) -> None:
    """Raise another error in place of JAX's, where that is about an object.

    Args:
        error: what JAX raised.
        fun: the function that was called.
        options: its options of `jax.jit`.
        args: its arguments.
        kwargs: its keyword arguments.

    Raises:
        TypeError: an argument is, or holds, an object that is no tree of arrays; the message says what to write.
    """
    if not isinstance(error, TypeError):
        return
    for place, name, value in _dynamic(fun, options, args, kwargs):
        for leaf in jax.tree.leaves(value):
            if _is_object(leaf):
                kind, step = type(leaf).__name__, getattr(fun, "__qualname__", "the function")
                static = f"static_argnums={place}" if isinstance(place, int) else f"static_argnames={place!r}"
                raise TypeError(
                    f"expected arrays, trees of arrays or nnx modules as arguments of {step}, got {kind} for {name}. "
                    f"Give what the step changes as arguments, as in step(model, optimizer, batch), or make {kind} an "
                    f"nnx.Module or a pytree; if the step only reads settings from it, write {static}"
                ) from error


def _dynamic(fun: Callable, options: dict[str, Any], args: tuple, kwargs: dict) -> Iterator[tuple[int | str, str, Any]]:
    """Arguments that are not static: position or keyword, what to call it, and the value."""
    described = compat.describe_jit(jax.jit(fun, **options)).options
    static = {number % len(args) for number in described.get("static_argnums", ()) if -len(args) <= number < len(args)}
    names = positional_parameters(fun)
    for number, value in enumerate(args):
        if number not in static:
            yield number, names[number] if number < len(names) else f"argument {number}", value
    yield from ((name, name, kwargs[name]) for name in kwargs.keys() - {*described.get("static_argnames", ())})


def _is_object(leaf: Any) -> bool:
    """Whether it is an instance of somebody's class that is no array."""
    is_array = hasattr(leaf, "dtype") or hasattr(leaf, "__jax_array__")
    return hasattr(leaf, "__dict__") and not is_array and not isinstance(leaf, _NO_OBJECTS)
