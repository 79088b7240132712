"""Restores nnx modules that a function closes over, if its trace fails.

flax takes a module apart before it finds that the module cannot be updated from inside a trace, and leaves it in
pieces. If tracing the user's function fails, the modules that it reaches are restored, and the error says what to
write.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

_MOST_VISITED = 10_000  # objects looked at for modules
_LIBRARIES = frozenset({"jax", "flax", "optax", "equinox", "numpy", "remat_opt"})  # whose globals are not the user's
_ADVICE = (
    "remat_opt: the function differentiates or updates an nnx module that is not among its arguments, which flax "
    "cannot do inside a trace. Write step(model, …) and give the module at each call; in place of "
    "optimize(nnx.cached_partial(step, model)) write nnx.cached_partial(optimize(step), model). Of a method "
    "make the class an nnx.Module, or give what it holds: step(self.model, self.optimizer, …)"
)


def leaving_modules(fun: Callable) -> Callable:
    """The same function for tracing, which leaves the modules that it closes over as they were where it fails."""

    @functools.wraps(fun)
    def traced(*args, **kwargs):
        nnx = sys.modules.get("flax.nnx")
        if nnx is None:
            return fun(*args, **kwargs)
        saved = [(node, dict(vars(node))) for module in _modules_of(fun, nnx) for node in _nodes(module, nnx)]
        try:
            return fun(*args, **kwargs)
        except Exception as error:
            for node, attributes in saved:
                vars(node).update(attributes)
                for name in vars(node).keys() - attributes.keys():
                    del vars(node)[name]
            if "different trace level" in str(error):
                error.add_note(_ADVICE)
            raise

    return traced


def _nodes(module: Any, nnx: Any) -> Iterator[Any]:
    return (node for _, node in nnx.iter_graph(module) if isinstance(node, nnx.Pytree))


def _modules_of(fun: Any, nnx: Any) -> Iterator[Any]:
    seen: dict[int, Any] = {}  # by id, and held so that ids stay their own
    queue = [fun]
    while queue and len(seen) < _MOST_VISITED:
        value = queue.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, nnx.Pytree):
            yield value
        else:
            queue += _reached_from(value)


def _reached_from(value: Any) -> list[Any]:
    if inspect.isfunction(value):
        return [*_cells(value), *_globals(value), *(value.__defaults__ or ()), *vars(value).values()]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    if isinstance(value, (type, types.ModuleType)):
        return []
    return list(getattr(value, "__dict__", {}).values())


def _cells(fun: types.FunctionType) -> Iterator[Any]:
    for cell in fun.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not yet assigned
            continue


def _globals(fun: types.FunctionType) -> Iterator[Any]:
    if (fun.__module__ or "").partition(".")[0] in _LIBRARIES:
        return
    codes = [fun.__code__]
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        yield from (fun.__globals__[name] for name in code.co_names if name in fun.__globals__)
