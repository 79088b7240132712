"""Pairs: a `scan` of the forward pass and the `scan` of opposite direction that consumes its residuals.

Differentiation turns one loop into two. The first one writes, in addition to what the user asked for, a stack for every
residual of its body; the second one reads these stacks as the very same variables (design facts of `jax.lax.scan`'s
partial evaluation and transposition).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

from remat_opt.loops.body import Loop, is_loop, read_loop
from remat_opt.trace import compat
from remat_opt.trace.avals import bytes_anywhere, is_on_device
from remat_opt.trace.inline import Constant, Equation, Program, can_recompute, values_among


@dataclasses.dataclass(frozen=True, eq=False)
class Pair:
    """A forward and a backward scan.

    Attributes:
        forward_index: position of the forward scan among the program's equations.
        backward_index: position of the backward scan.
        forward: the forward scan.
        backward: the backward scan.
        residual_ys: positions among the forward scan's `ys` of stacks that only the backward scan reads.
        kept_ys: positions of stacks that somebody else reads; they are written in any case.
    """

    forward_index: int
    backward_index: int
    forward: Loop
    backward: Loop
    residual_ys: tuple[int, ...]
    kept_ys: tuple[int, ...]

    @property
    def length(self) -> int:
        """Number of steps of both scans."""
        return self.forward.length

    @functools.cached_property
    def consumed(self) -> dict[int, int]:
        """For each position of the backward scan's xs that holds a stack of the forward scan: which of its ys."""
        made = {value: position for position, value in enumerate(self.forward.ys)}
        return {at: made[x] for at, x in enumerate(self.backward.xs) if isinstance(x, int) and x in made}

    @functools.cached_property
    def residuals(self) -> tuple[int, ...]:
        """Values of the forward body that the backward scan reads as stacks, each once."""
        return tuple(values_among(self.forward.body_ys[y] for y in self.consumed.values()))

    @functools.cached_property
    def stacked(self) -> dict[int, int]:
        """Values of the forward body whose stack is written in any case, with the position of that stack."""
        ys = [(self.forward.body_ys[y], y) for y in reversed(self.kept_ys)]
        return {value: y for value, y in ys if not isinstance(value, Constant)}

    @functools.cached_property
    def never_repeated(self) -> frozenset[int]:
        """Values of the forward body that have to be saved because they must not be computed twice."""
        body = self.forward.body
        once = (equation for equation in body.equations if not can_recompute(body, equation))
        return frozenset(value for equation in once for value in equation.outputs)


@dataclasses.dataclass(frozen=True, eq=False)
class Pairs:
    """All pairs of a program, and for the loops that are left as they are the reason, once for each."""

    pairs: tuple[Pair, ...]
    left: tuple[str, ...]


EFFECTS = "its body has effects, whose number and order must stay"
REFERENCES = "its body reads or writes mutable references"
SHARED = "one of its scans belongs to another pair"
OFFLOADED = "its body moves residuals to the host's memory and back"


def find_pairs(program: Program, *, keep_checkpoints: bool = False) -> Pairs:
    """Pair each backward scan with the earlier scan of equal length and opposite direction it gets most bytes from."""
    makers = {v: i for i, e in enumerate(program.equations) if is_loop(e) for v in _ys(e)}
    taken: set[int] = set()
    pairs, left = [], []
    for index, backward in enumerate(program.equations):
        if not is_loop(backward):
            continue
        gained: dict[int, int] = {}
        for x in _xs(backward):
            maker = makers.get(x)
            if maker is not None and _opposite(program.equations[maker], backward) and maker not in taken:
                own = program.readers[x] == [index] and x not in program.returned
                gained[maker] = gained.get(maker, 0) + (bytes_anywhere(program.avals[x]) if own else 0)
        best = max(gained, key=lambda maker: (gained[maker], maker), default=None)
        if best is None or not gained[best]:
            continue
        if index in taken:
            left.append(SHARED)  # a derivative of a derivative: the scan belongs to an earlier pair
            continue
        taken |= {best, index}
        reason = _reason_to_leave(program.equations[best]) or _reason_to_leave(backward)
        if reason:
            left.append(reason)
        else:
            pairs.append(_pair(program, best, index, keep_checkpoints))
    return Pairs(tuple(pairs), tuple(left))


def _pair(program: Program, first: int, second: int, keep_checkpoints: bool) -> Pair:
    forward = read_loop(program, program.equations[first], keep_checkpoints=keep_checkpoints)
    backward = read_loop(program, program.equations[second], keep_checkpoints=True)
    readers, returned = program.readers, program.returned
    only = [y for y, value in enumerate(forward.ys) if readers.get(value) == [second] and value not in returned]
    others = [y for y, value in enumerate(forward.ys) if y not in only and (value in readers or value in returned)]
    return Pair(first, second, forward, backward, tuple(only), tuple(others))


def _xs(equation: Equation) -> tuple[Any, ...]:
    return equation.inputs[sum(compat.scan_counts(equation.params)) :]


def _ys(equation: Equation) -> tuple[int, ...]:
    return equation.outputs[compat.scan_counts(equation.params)[1] :]


def _opposite(forward: Equation, backward: Equation) -> bool:
    one, other = forward.params, backward.params
    return one["length"] == other["length"] and one["reverse"] != other["reverse"]


def _reason_to_leave(equation: Equation) -> str | None:
    if reason := reason_to_stay_out(equation):
        return reason
    return None if all(map(is_on_device, _avals_inside(equation))) else OFFLOADED


def reason_to_stay_out(equation: Equation) -> str | None:
    """Why the bodies of an equation have to stay as they are; None where they may be rewritten."""
    if any(map(compat.is_reference, _avals_inside(equation))):
        return REFERENCES
    return EFFECTS if equation.effects else None


def _avals_inside(equation: Equation) -> Iterable[Any]:
    for inside in compat.equations_in(equation.params):
        yield from (variable.aval for variable in (*inside.invars, *inside.outvars))
