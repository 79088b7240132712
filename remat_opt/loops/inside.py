"""Bodies of loops are programs, too: their own pairs are written again, and those with a turning point get segments.

A pair inside a body comes from nested loops; a turning point inside a body from a gradient that is taken there, as of
micro-batches. All of it is for the least memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from remat_opt.graph.cost import Rates
from remat_opt.loops.body import Loop, evaluate, is_loop, read, read_loop
from remat_opt.loops.choose import choose
from remat_opt.loops.pairs import Pair
from remat_opt.loops.rewrite import Splicing, rewrite_loops, values_among
from remat_opt.program import compat
from remat_opt.program.inline import Constant, Equation, Program, inline

OptimiseBody = Callable[[Program, "tuple[bool, ...]"], "Program | None"]
"""Divide a body with a turning point into segments; which of its inputs may be overwritten. None: nothing to gain."""


def rewrite_inside(
    program: Program,
    rates: Rates,
    optimise: OptimiseBody | None = None,
    *,
    pairs: Sequence[Pair] = (),
    keep_checkpoints: bool = False,
) -> tuple[Program, int]:
    """Write the bodies of a program's loops again where something is gained.

    Args:
        program: the flat step.
        rates: the target.
        optimise: what to do with a body beside its pairs; not asked for loops that repeat within already.
        pairs: loops with a forward and a reverse part. Those that stayed as they are stay so inside.
        keep_checkpoints: do not look into the user's own `jax.checkpoint` regions.

    Returns:
        The program, and how many bodies were written again.
    """
    return _Inside(rates, optimise, keep_checkpoints).rewrite(program, pairs=pairs)


class _Inside:
    def __init__(self, rates: Rates, optimise: OptimiseBody | None, keep_checkpoints: bool):
        self.rates = rates
        self.optimise = optimise
        self.keep_checkpoints = keep_checkpoints

    def rewrite(self, program: Program, repeating: bool = False, pairs: Sequence[Pair] = ()) -> tuple[Program, int]:
        """A program's bodies written again; `repeating` where it is part of a loop that repeats within already."""
        # What a pair's loops hand to each other is decided for the pair; results of those that stayed kept their ids.
        left = {value for pair in pairs for loop in (pair.forward, pair.backward) for value in loop.equation.outputs}
        splicing = Splicing(program)
        count = 0
        for index, equation in enumerate(program.equations):
            if equation.effects or not left.isdisjoint(equation.outputs):
                continue
            repeats = repeating or not program.run_once.isdisjoint(equation.outputs)
            if is_loop(equation):
                loop = read_loop(equation, keep_checkpoints=self.keep_checkpoints or repeats)
                body, inner = self.body(loop, repeats)
                if inner:
                    splicing.replace(index, _scan_of(loop, body))
            elif equation.primitive is compat.remat_p and repeats:
                region, inner = self.rewrite(inline(equation.params["jaxpr"], keep_checkpoints=True), repeating=True)
                if inner:
                    splicing.replace(index, _region_of(equation, region))
            else:
                continue
            count += inner
        return (splicing.result(), count) if count else (program, 0)

    def body(self, loop: Loop, repeats: bool) -> tuple[Program, int]:
        """A loop's body written again, and how many bodies that were, 0 if nothing was gained."""
        if loop.body.has_references or loop.body.effects:
            return loop.body, 0
        carried = [
            (before, after)
            for before, after in zip(loop.body_carry, loop.next_carry, strict=True)
            if not isinstance(after, Constant)
        ]
        loops = choose(loop.body, self.rates, carried, keep_checkpoints=self.keep_checkpoints or repeats)
        body = rewrite_loops(loop.body, loops.pairs, loops.chosen, carried)
        body, count = self.rewrite(body, repeats, loops.pairs)
        count += bool(loops.chosen)
        if self.optimise is not None and not repeats:
            overwritten = tuple(value in loop.body_carry for value in body.inputs)
            better = self.optimise(body, overwritten)
            if better is not None:
                body, count = better, count + (not loops.chosen)
        return body, count


def _scan_of(loop: Loop, body: Program) -> Callable[..., list[Any]]:
    """The loop with another body, as a function of the operands of its equation that are no literals."""
    constants, carry = loop.num_constants, loop.num_carry

    def scan(*values):
        operands = _operands(loop.equation, values)
        xs = operands[constants + carry :]

        def step(state, x):
            results = _run(body, [*operands[:constants], *state, *x])
            return results[:carry], results[carry:]

        first = operands[constants : constants + carry]
        unroll = max(1, int(loop.unroll) or loop.length)
        last, ys = lax.scan(step, first, xs, loop.length, reverse=loop.reverse, unroll=min(unroll, loop.length))
        return [*last, *ys]

    return scan


def _region_of(equation: Equation, region: Program) -> Callable[..., list[Any]]:
    """A region that is one operation to the outer program with other contents, likewise."""

    def whole(*values):
        operands = _operands(equation, values)
        jaxpr = compat.without_dead_code(jax.make_jaxpr(lambda *x: _run(region, x))(*operands))
        free = [*compat.constants_of(jaxpr), *operands]
        return compat.bind_remat(compat.open_jaxpr(jaxpr), free, [False] * len(free), None)

    return whole


def _operands(equation: Equation, values: Sequence[Any]) -> list[Any]:
    given = dict(zip(values_among(equation.inputs), values, strict=True))
    return [read(atom, given) for atom in equation.inputs]


def _run(program: Program, operands: Sequence[Any]) -> list[Any]:
    environment = dict(zip(program.inputs, operands, strict=True))
    evaluate(program, range(len(program.equations)), environment)
    return [read(atom, environment) for atom in program.outputs]
