"""Rewrites a pair of scans by tracing: the forward loop saves less, the reverse loop recomputes the rest.

One level: the forward loop stacks the carries that a recomputation of the body starts from. Each step of the reverse
loop repeats the body up to its residuals and then goes on as before. `jax.checkpoint` on the body does the same.

Two levels (Chen et al. 2016, section 4, on a loop): the forward loop saves the first carry of each chunk of steps, and
all carries of the last chunk, which is reversed at once. For each of the other chunks the reverse loop recomputes the
carries and then runs the chunk in reverse, reading and writing the whole stacks by index. The last chunk is shorter if
the chunk does not divide the length. A chunk may also save residuals while it recomputes its carries, so that they are
not computed a third time; its last step, which is reversed at once, computes its own.

The first steps of the loop may be in chunks of another kind. Their carries have separate stacks, so that those of the
later steps are free when the reverse loop reaches them (as in Griewank & Walther 2000, "revolve", where free memory is
used for the steps that are left).

With one level and with two, the optimizer's update can run inside the reverse loop (`update.py`): stacks of parameters
and moments are then carries of the loop, updated in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from remat_opt.loops.pair_plan import PairPlan
from remat_opt.loops.stacks import room_for, to_host, unroll_for
from remat_opt.trace.evaluation import evaluate, read


def run_forward(plan: PairPlan, operands: dict[int, Any]) -> tuple[list[Any], list[Any]]:
    """Run the forward loop of a pair on the forward scan's operands, by value of the program.

    Returns:
        One value for each of `PairPlan.forward_results`, and what the reverse loop is to be given.
    """
    loop, repeats = plan.pair.forward, plan.repeats
    first = [read(atom, operands) for atom in loop.first_carry]
    ys = [y for y in plan.pair.kept_ys if loop.ys[y] in plan.read_later]
    equations = range(len(loop.body.equations))
    one_level = repeats.alone.carries if plan.choice.chunk is None else ()

    def step(state, x):
        carry, chunks = state
        step_number, *slices = x
        constants = plan.constants(loop, operands).values()
        environment = dict(zip(loop.body.inputs, [*constants, *carry, *slices], strict=True))
        evaluate(loop.body, equations, environment)
        stacked = [read(loop.body_ys[y], environment) for y in ys]
        handed_over = [(value, environment[value]) for value in repeats.saved]
        handed_over += [(loop.body_carry[at], carry[at]) for at in one_level]
        stacked += [to_host(x) if value in plan.choice.host else x for value, x in handed_over]
        if chunks:
            chunks = _saved_for_chunks(plan, chunks, step_number, carry, environment)
        return ([read(atom, environment) for atom in loop.next_carry], chunks), stacked

    numbers = jnp.arange(loop.length, dtype=jnp.int32)
    xs = [loop.length - 1 - numbers if loop.reverse else numbers, *(read(atom, operands) for atom in loop.xs)]
    state = (first, _room_for_chunks(plan, first))
    unroll = unroll_for(loop.unroll, loop.length)
    (last, chunks), stacked = lax.scan(step, state, xs, loop.length, reverse=loop.reverse, unroll=unroll)
    results = dict(zip((*loop.last_carry, *(loop.ys[y] for y in ys)), [*last, *stacked[: len(ys)]], strict=True))
    return [results[value] for value in plan.forward_results], [*stacked[len(ys) :], *jax.tree.leaves(chunks)]


def _room_for_chunks(plan: PairPlan, first: Sequence[Any]) -> list[list[Any]]:
    """Stacks for the first carries of each group's chunks, then for the carries of the last chunk, then for its
    residuals; none with one level."""
    if not plan.groups:
        return []
    firsts = [
        [room_for(first[at], chunks.number) for at in group.forward_carries]
        for chunks, group in zip(plan.groups, plan.repeats.of_group, strict=True)
    ]
    carries = [room_for(first[at], plan.last_chunk) for at in plan.repeats.alone.carries]
    avals = [plan.pair.forward.body.avals[value] for value in plan.residuals_of_last_chunk]
    return [*firsts, carries, [room_for(aval, plan.last_chunk - 1) for aval in avals]]


def _saved_for_chunks(
    plan: PairPlan, stacks: list[list[Any]], step_number: jax.Array, carry: Sequence[Any], environment: dict[int, Any]
) -> list[list[Any]]:
    """The stacks of `_room_for_chunks` after a step.

    A step whose carry is not saved leaves it in the next place, which a later step writes to.
    """
    *firsts, carries, residuals = stacks
    before, written = 0, []
    for chunks, group, of_chunks in zip(plan.groups, plan.repeats.of_group, firsts, strict=True):
        place = -(-(step_number - before) // chunks.steps)
        written.append(_put(of_chunks, [carry[at] for at in group.forward_carries], place))
        before += chunks.all_steps
    place = step_number - before
    values = [environment[value] for value in plan.residuals_of_last_chunk]
    carries = _put(carries, [carry[at] for at in plan.repeats.alone.carries], place, surely=True)
    return [*written, carries, _put(residuals, values, place)]


def _put(stacks: Sequence[Any], values: Sequence[Any], place: jax.Array, *, surely: bool = False) -> list[Any]:
    """Stacks with values at a place: the first one if it is before; nothing changes if it is after the last."""
    written = []
    for stack, value in zip(stacks, values, strict=True):
        if not len(stack):
            written.append(stack)
            continue
        at = jnp.clip(place, 0, len(stack) - 1)
        if not surely:
            value = jnp.where(place < len(stack), value, lax.dynamic_index_in_dim(stack, at, 0, keepdims=False))
        written.append(lax.dynamic_update_index_in_dim(stack, value, at, 0))
    return written
