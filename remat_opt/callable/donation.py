"""Finds undonated state: arguments that the step returns updated, so that old and new are in memory at once."""

from __future__ import annotations

import collections
import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import jax

from remat_opt.rewrites.captured import Captured
from remat_opt.trace import compat
from remat_opt.trace.avals import bytes_of
from remat_opt.trace.inline import Constant, Program
from remat_opt.trace.primitives import ELEMENTWISE, MOVES
from remat_opt.units import format_bytes

LEAST_SHARE = 0.05  # of the physical peak
LEAST_BYTES = 10**6
MOSTLY = 0.9  # of an argument's bytes: the rest would be donated for nothing


@dataclasses.dataclass(frozen=True)
class Undonated:
    """What donation would save.

    Attributes:
        names: of the arguments.
        saved_bytes: of their arrays that a result could take the place of; of all devices together.
        share: the same as a part of the physical peak.
        how: what to write.
    """

    names: tuple[str, ...]
    saved_bytes: int
    share: float
    how: str

    def __str__(self) -> str:
        size = format_bytes(self.saved_bytes)
        return (
            f"{size} of state ({', '.join(self.names)}; {100 * self.share:.0f} % of the physical peak) come back as "
            f"results of the same shapes and types and are not donated, so that old and new are in memory together. If "
            f"you do not use the old arrays after the call, write {self.how}: it saves {size}"
        )


@dataclasses.dataclass
class _Argument:
    """One argument of the user's call: all its bytes, those that come back, and those of them that change."""

    name: str
    place: int | str
    arrays: int = 0
    all_bytes: int = 0
    returned_bytes: int = 0
    changed_bytes: int = 0


def find_undonated(
    captured: Captured, fun: Callable, options: dict[str, Any], args: tuple, *, temp_bytes: int, several: bool
) -> Undonated | None:
    """Find arguments that a step updates and that are not donated.

    Args:
        captured: the step.
        fun: the function that `jax.jit` was given; of an `nnx.jit` or `eqx.filter_jit` object the one inside.
        options: of `jax.jit`.
        args: positional arguments of the call.
        temp_bytes: temporary memory of the step as it runs.
        several: consider only arguments of several arrays; a single one may be an input that a result is like.

    Returns:
        None where less than `LEAST_SHARE` of the physical peak or `LEAST_BYTES` could be saved.
    """
    program = captured.original
    fixed = [*program.inputs, *(x for x in program.outputs if not isinstance(x, Constant))]
    peak = temp_bytes + sum(bytes_of(program.avals[value]) for value in fixed)
    peak -= sum(bytes_of(aval) for aval, donated in zip(captured.input_avals, captured.donated, strict=True) if donated)
    least = max(LEAST_BYTES, LEAST_SHARE * peak)
    if sum(bytes_of(aval) for aval in captured.input_avals) < least:
        return None
    described = compat.describe_jit(jax.jit(fun, **options)).options
    arguments = [
        one
        for one in _arguments(captured, fun, described, args)
        if one.changed_bytes and one.returned_bytes >= MOSTLY * one.all_bytes and (one.arrays > 1 or not several)
    ]
    saved = sum(one.changed_bytes for one in arguments)
    if saved < least:
        return None
    return Undonated(tuple(one.name for one in arguments), saved, saved / peak, _how(fun, described, arguments))


def _arguments(captured: Captured, fun: Callable, options: dict[str, Any], args: tuple) -> Iterable[_Argument]:
    """The arguments of a call with what comes back of each; what is donated takes its results first."""
    program = captured.original
    leaves, _ = jax.tree_util.tree_flatten_with_path(captured.traced.args_info)
    inputs = program.inputs[len(captured.closed_over) :]
    returned = [x for x in program.outputs if not isinstance(x, Constant)]
    free = collections.Counter(_type_of(program, value) for value in {*returned} - {*program.inputs})
    for value, (_, info) in zip(inputs, leaves, strict=True):
        if info.donated:
            free[_type_of(program, value)] -= 1
    updated = _updated(program)
    names = _Names(fun, options, args)
    found: dict[int | str, _Argument] = {}
    for value, (path, info) in zip(inputs, leaves, strict=True):
        name, place = names.of(path)
        argument = found.setdefault(place, _Argument(name, place))
        size, kind = bytes_of(program.avals[value]), _type_of(program, value)
        argument.arrays += 1
        argument.all_bytes += size
        if value in returned:
            argument.returned_bytes += size  # as it came: no second copy
        elif not info.donated and value in updated and free[kind] > 0:
            free[kind] -= 1
            argument.returned_bytes += size
            argument.changed_bytes += size
    return found.values()


def _type_of(program: Program, value: int) -> tuple[Any, Any]:
    aval = program.avals[value]
    return getattr(aval, "shape", None), getattr(aval, "dtype", None)


def _updated(program: Program) -> set[int]:
    """Values that a result of the same shape is made of by elementwise work alone, as an optimizer updates its state.

    That sets state apart from an input that happens to be like a result.
    """
    reached = {x for x in program.outputs if not isinstance(x, Constant)}
    for equation in reversed(program.equations):
        if equation.primitive not in ELEMENTWISE | MOVES or reached.isdisjoint(equation.outputs):
            continue
        shapes = {_type_of(program, value)[0] for value in equation.outputs if value in reached}
        operands = (x for x in equation.inputs if not isinstance(x, Constant))
        reached.update(x for x in operands if _type_of(program, x)[0] in shapes)
    return reached


def _is_from(fun: Callable, package: str) -> bool:
    """Whether a function that is jitted is a library's own, around the user's."""
    module = getattr(fun, "__module__", None) if inspect.isfunction(fun) else type(fun).__module__
    return module is not None and f"{module}.".startswith(f"{package}.")


class _Names:
    """What the user calls an argument, and its position or its keyword, by the path of an array in a jit's arguments.

    Args:
        fun: the function that was jitted.
        options: of its jit, with positions of static arguments.
        args: positional arguments of the call.
    """

    def __init__(self, fun: Callable, options: dict[str, Any], args: tuple):
        self.is_equinox = _is_from(fun, "equinox")
        static = {
            number % len(args) for number in options.get("static_argnums", ()) if -len(args) <= number < len(args)
        }
        self.positions = [number for number in range(len(args)) if number not in static]
        self.parameters = positional_parameters(fun)
        if self.is_equinox:
            _, _, (leaves, structure) = args[2]  # the third is static: what is no array, and the trees of all
            numbered, _ = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(structure, range(len(leaves))))
            self.rest = [path for path, _ in numbered]

    def of(self, path: tuple) -> tuple[str, int | str]:
        if self.is_equinox:
            return self.of_equinox(path)
        (side, key, *_) = path
        if side.idx == 1:
            return key.key, key.key
        position = self.positions[key.idx]
        is_named = position < len(self.parameters)
        return self.parameters[position] if is_named else f"argument {position}", position

    def of_equinox(self, path: tuple) -> tuple[str, int | str]:
        """`filter_jit` hands on the function, its first argument and the others as dictionary entries, all flat."""
        part, leaf = path[2].key, path[3]
        if part != "rest":
            return ("argument 0", 0) if part == "first" else ("the function's own arrays", "fun")
        side, key, *_ = self.rest[leaf.idx]
        return (key.key, key.key) if side.idx == 1 else (f"argument {key.idx + 1}", key.idx + 1)


def positional_parameters(fun: Callable) -> list[str]:
    """Names of a function's positional parameters, as far as it says them."""
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):
        return []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [one.name for one in parameters if one.kind in positional]


def _how(fun: Callable, options: dict[str, Any], arguments: list[_Argument]) -> str:
    """The line to write for a kind of function."""
    name = getattr(fun, "__name__", "step")
    if _is_from(fun, "equinox"):
        if all(one.place not in (0, "fun") for one in arguments):
            return f'eqx.filter_jit({name}, donate="all-except-first"), which donates all arguments but the first'
        return (
            f'eqx.filter_jit({name}, donate="all"), which donates all arguments (with "all-except-first" what you use '
            "again can be the first)"
        )
    numbers = {one.place for one in arguments if isinstance(one.place, int)}
    keywords = {one.place for one in arguments if isinstance(one.place, str)}
    numbers |= {*options.get("donate_argnums", ())}
    positional = {name for at, name in enumerate(positional_parameters(fun)) if at in numbers}
    keywords |= {*options.get("donate_argnames", ())} - positional
    written = [f"donate_argnums={_tuple(sorted(numbers))}"] if numbers else []
    written += [f"donate_argnames={_tuple(sorted(keywords))}"] if keywords else []
    where = "nnx.jit or remat_opt.optimize" if _is_from(fun, "flax.nnx") else "jax.jit or remat_opt.optimize"
    return f"{', '.join(written)} in {where}"


def _tuple(items: list[Any]) -> str:
    return repr(tuple(items)) if len(items) > 1 else repr(items[0])
