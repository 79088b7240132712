"""Rewrites bodies, which are programs of their own: their pairs of loops, and segments if they have a forward/backward
boundary.

Nested loops give pairs inside a body. A gradient taken inside a body gives it a forward/backward boundary:
micro-batches in a `scan`, the steps of a solver in a `while`, one device's step in a `shard_map`, or a step under a
`cond`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import primitives

from remat_opt.graph.build import peak_as_written
from remat_opt.graph.cost import Rates
from remat_opt.loops.body import Atom, body_of, read_loop
from remat_opt.loops.choose import choose
from remat_opt.loops.pairs import Pair, reason_to_stay_out
from remat_opt.loops.rewrite import Splicing, in_one_equation, rewrite_loops
from remat_opt.loops.stacks import unroll_for
from remat_opt.loops.steps import Emit
from remat_opt.trace import compat
from remat_opt.trace.evaluation import evaluate_all
from remat_opt.trace.flops import devices_of
from remat_opt.trace.inline import BodyFigures, Constant, Equation, Program, inline, within


@dataclasses.dataclass(frozen=True)
class Body:
    """A body in segments.

    Attributes:
        emit: evaluates it.
        peak: bytes that it needs.
        seconds: that it takes.
    """

    emit: Emit
    peak: int
    seconds: float


OptimiseBody = Callable[[Program, "tuple[bool, ...]"], "Body | None"]
"""Divide a body with a forward/backward boundary into segments; which of its inputs may be overwritten. None: nothing
to gain."""

Entered = tuple[Emit, int, BodyFigures]
"""What is done instead of an equation on its operands, how many of its bodies were rewritten, and what is known of
them."""


def rewrite_inside(
    program: Program,
    rates: Rates,
    optimise: OptimiseBody | None = None,
    *,
    pairs: Sequence[Pair] = (),
    donated: Collection[int] = (),
    keep_checkpoints: bool = False,
) -> tuple[Program, int]:
    """Rewrite the bodies of a program's loops where something is gained.

    Args:
        program: the flat step.
        rates: the target.
        optimise: what to do with a body in addition to its pairs; not asked for loops that repeat within already.
        pairs: loops with a forward and a reverse part. Those that stayed as they are stay so inside.
        donated: inputs of the program whose buffers may be reused.
        keep_checkpoints: do not look into the user's own `jax.checkpoint` regions.

    Returns:
        The program, and how many bodies were rewritten.
    """
    return _Inside(rates, optimise, keep_checkpoints).rewrite(program, pairs=pairs, donated=donated)


class _Inside:
    def __init__(self, rates: Rates, optimise: OptimiseBody | None, keep_checkpoints: bool):
        self.rates = rates
        self.optimise = optimise
        self.keep_checkpoints = keep_checkpoints

    def rewrite(
        self,
        program: Program,
        repeating: bool = False,
        pairs: Sequence[Pair] = (),
        donated: Collection[int] = (),
    ) -> tuple[Program, int]:
        """A program's bodies rewritten; `repeating` where it is part of a loop that repeats within already."""
        # What a pair's loops hand to each other is decided for the pair; results of those that stayed kept their ids.
        left = {value for pair in pairs for loop in (pair.forward, pair.backward) for value in loop.equation.outputs}
        # One equation reads them, and nothing else.
        reusable = {v for v in donated if len(program.readers.get(v, ())) == 1 and v not in program.returned}
        splicing = Splicing(program)
        count = 0
        for index, equation in enumerate(program.equations):
            enter = _ENTERED.get(equation.primitive)
            if enter is None or not left.isdisjoint(equation.outputs) or reason_to_stay_out(equation):
                continue
            repeats = repeating or not program.run_once.isdisjoint(equation.outputs)
            free = tuple(value in reusable for value in equation.inputs)
            instead, inner, figures = enter(self, program, equation, repeats, free)
            if inner:
                splicing.replace(index, instead, figures)
                count += inner
        return (splicing.result(), count) if count else (program, 0)

    def scan(self, program: Program, equation: Equation, repeats: bool, free: tuple[bool, ...]) -> Entered:
        loop = read_loop(program, equation, keep_checkpoints=self.keep_checkpoints or repeats)
        body, count, once = self.body(loop.body, loop.body_carry, loop.next_carry, repeats)
        figures = once._replace(seconds=once.seconds and loop.length * once.seconds)
        constants, carries = len(loop.constants), len(loop.first_carry)

        def scan(operands: Sequence[Any]) -> list[Any]:
            def step(state, x):
                results = evaluate_all(body, [*operands[:constants], *state, *x])
                return results[:carries], results[carries:]

            first, xs = operands[constants : constants + carries], operands[constants + carries :]
            unroll = unroll_for(loop.unroll, loop.length)
            last, ys = lax.scan(step, first, xs, loop.length, reverse=loop.reverse, unroll=unroll)
            return [*last, *ys]

        return scan, count, figures

    def while_loop(self, program: Program, equation: Equation, repeats: bool, free: tuple[bool, ...]) -> Entered:
        """The condition, which may be of a whole batch, stays as it is."""
        keep, given = self.keep_checkpoints or repeats, equation.params["body_jaxpr"]
        body = body_of(program, equation, given, keep_checkpoints=keep)
        _, constants = compat.while_counts(equation.params)
        body, count, figures = self.body(body, body.inputs[constants:], body.outputs, repeats)

        def loop(operands: Sequence[Any]) -> list[Any]:
            jaxpr = jax.make_jaxpr(lambda *x: evaluate_all(body, x))(*given.in_avals)
            return compat.bind_equation(equation.primitive, {**equation.params, "body_jaxpr": jaxpr}, operands)

        return loop, count, figures

    def branches(self, program: Program, equation: Equation, repeats: bool, free: tuple[bool, ...]) -> Entered:
        branches, count, workspace = [], 0, 0
        for jaxpr in () if repeats else equation.params["branches"]:
            body = body_of(program, equation, jaxpr, keep_checkpoints=self.keep_checkpoints)
            body, inner, (peak, _) = self.body(body, (), (), repeats)
            branches.append(lambda *x, body=body: evaluate_all(body, x))
            count += inner
            workspace = max(workspace, peak_as_written(body, self.rates) if peak is None else peak)
        return lambda operands: lax.switch(operands[0], branches, *operands[1:]), count, BodyFigures(workspace)

    def mapped(self, program: Program, equation: Equation, repeats: bool, free: tuple[bool, ...]) -> Entered:
        body = within(program, equation, inline(equation.params["jaxpr"], keep_checkpoints=self.keep_checkpoints))
        with compat.mapped_context(equation.params):
            body, count = self.rewrite(body, repeats)
            better = None if repeats or self.optimise is None else self.optimise(body, free)
        emit = functools.partial(evaluate_all, body) if better is None else better.emit

        def mapped(operands: Sequence[Any]) -> list[Any]:
            return list(compat.shard_map_like(equation.params, lambda *x: tuple(emit(x)))(*operands))

        devices = devices_of(equation.params)
        figures = BodyFigures() if better is None else BodyFigures(devices * better.peak, devices * better.seconds)
        return mapped, count + (better is not None and not count), figures

    def checkpoint(self, program: Program, equation: Equation, repeats: bool, free: tuple[bool, ...]) -> Entered:
        """A region in a loop that repeats within already, as its bodies may hold loops."""
        region = within(program, equation, inline(equation.params["jaxpr"], keep_checkpoints=True))
        region, count = self.rewrite(region, repeating=True) if repeats else (region, 0)
        return in_one_equation(functools.partial(evaluate_all, region)), count, BodyFigures()

    def body(
        self, body: Program, before: Sequence[int], after: Sequence[Atom], repeats: bool
    ) -> tuple[Program, int, BodyFigures]:
        """A body rewritten, how many bodies that were, 0 if nothing was gained, and what is known of one run of it.

        Args:
            body: one step of a loop, or a branch.
            before: its inputs that are carried.
            after: what is carried to the next step, in the same order.
            repeats: whether it is part of a loop that repeats within already.
        """
        carried = [(one, next) for one, next in zip(before, after, strict=True) if not isinstance(next, Constant)]
        loops = choose(body, self.rates, carried, keep_checkpoints=self.keep_checkpoints or repeats)
        body = rewrite_loops(body, loops.pairs, loops.chosen, carried, rates=self.rates)
        body, count = self.rewrite(body, repeats, loops.pairs)
        count += bool(loops.chosen)
        figures = BodyFigures()
        if self.optimise is not None and not repeats:
            overwritten = tuple(value in before for value in body.inputs)
            better = self.optimise(body, overwritten)
            if better is not None:
                avals = [body.avals[value] for value in body.inputs]
                body = inline(jax.make_jaxpr(lambda *x: better.emit(x))(*avals), keep_checkpoints=True)
                count, figures = count + (not loops.chosen), BodyFigures(better.peak, better.seconds)
        return body, count, figures


_ENTERED = {
    primitives.scan_p: _Inside.scan,
    primitives.while_p: _Inside.while_loop,
    primitives.cond_p: _Inside.branches,
    compat.shard_map_p: _Inside.mapped,
    compat.remat_p: _Inside.checkpoint,
}
