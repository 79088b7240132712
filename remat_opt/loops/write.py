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

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from remat_opt.loops.body import evaluate, read
from remat_opt.loops.pair_plan import PairPlan
from remat_opt.loops.reverse import ReverseLoop
from remat_opt.loops.stacks import room_for, unroll_for


@dataclasses.dataclass(frozen=True, eq=False)
class PairWriter(PairPlan):
    """Writes the two loops of a pair as they were decided."""

    def forward(self, operands: dict[int, Any]) -> tuple[list[Any], list[Any]]:
        """Run the forward loop.

        Args:
            operands: the forward scan's operands by value of the program.

        Returns:
            One value for each of `forward_results`, and what the reverse loop is to be given.
        """
        loop, repeats = self.pair.forward, self.repeats
        first = [read(atom, operands) for atom in loop.first_carry]
        ys = [y for y in self.pair.kept_ys if loop.ys[y] in self.read_later]
        equations = range(len(loop.body.equations))
        one_level = repeats.alone.carries if self.choice.chunk is None else ()

        def step(state, x):
            carry, kept = state
            step_number, *slices = x
            constants = self.constants(loop, operands).values()
            environment = dict(zip(loop.body.inputs, [*constants, *carry, *slices], strict=True))
            evaluate(loop.body, equations, environment)
            stacked = [read(loop.body_ys[y], environment) for y in ys]
            stacked += [environment[value] for value in repeats.saved]
            stacked += [carry[at] for at in one_level]
            if kept:
                kept = self.kept_with(kept, step_number, carry, environment)
            return ([read(atom, environment) for atom in loop.next_carry], kept), stacked

        kept = self.room_for_chunks(first)
        xs = [self.step_numbers(), *(read(atom, operands) for atom in loop.xs)]
        unroll = unroll_for(loop.unroll, loop.length)
        state = (first, kept)
        (last, kept), stacked = lax.scan(step, state, xs, loop.length, reverse=loop.reverse, unroll=unroll)
        results = dict(zip((*loop.last_carry, *(loop.ys[y] for y in ys)), [*last, *stacked[: len(ys)]], strict=True))
        return [results[value] for value in self.forward_results], [*stacked[len(ys) :], *jax.tree.leaves(kept)]

    def room_for_chunks(self, first: Sequence[Any]) -> list[list[Any]]:
        """Stacks for the first carries of each group's chunks, then for the carries of the last chunk, then for its
        residuals; none with one level."""
        if not self.groups:
            return []
        firsts = [
            [room_for(first[at], chunks.number) for at in again.advanced]
            for chunks, again in zip(self.groups, self.repeats.of_group, strict=True)
        ]
        recent = [room_for(first[at], self.last_chunk) for at in self.repeats.alone.carries]
        avals = [self.pair.forward.body.avals[value] for value in self.residuals_of_last_chunk]
        return [*firsts, recent, [room_for(aval, self.last_chunk - 1) for aval in avals]]

    def kept_with(
        self, kept: list[list[Any]], step_number: jax.Array, carry: Sequence[Any], environment: dict[int, Any]
    ) -> list[list[Any]]:
        """The stacks of `room_for_chunks` when a step has been there.

        A step whose carry is not kept leaves it in the next place, which a later step writes to.
        """
        *firsts, recent, residuals = kept
        before, written = 0, []
        for chunks, again, stacks in zip(self.groups, self.repeats.of_group, firsts, strict=True):
            place = -(-(step_number - before) // chunks.steps)
            written.append(_put(stacks, [carry[at] for at in again.advanced], place))
            before += chunks.all_steps
        place = step_number - before
        values = [environment[value] for value in self.residuals_of_last_chunk]
        recent = _put(recent, [carry[at] for at in self.repeats.alone.carries], place, surely=True)
        return [*written, recent, _put(residuals, values, place)]

    def step_numbers(self) -> jax.Array:
        """For each index of the stacks, as which step the forward loop comes to it."""
        numbers = jnp.arange(self.pair.length, dtype=jnp.int32)
        return self.pair.length - 1 - numbers if self.pair.forward.reverse else numbers

    def reverse(self, operands: dict[int, Any], handed_over: Sequence[Any]) -> list[Any]:
        """Run the reverse loop.

        Args:
            operands: `reverse_operands` by value of the program.
            handed_over: the second result of `forward`.

        Returns:
            One value for each of `reverse_results`.
        """
        loop = ReverseLoop(self, operands, handed_over)
        last, stacked, in_place = loop.in_one_level() if self.choice.chunk is None else loop.in_two_levels()
        carried = dict(zip(self.pair.backward.last_carry, last, strict=True))
        wanted = [carried[value] for value in self.pair.backward.last_carry if value in self.read_later]
        return [*wanted, *stacked, *in_place]


def _put(stacks: Sequence[Any], values: Sequence[Any], place: jax.Array, *, surely: bool = False) -> list[Any]:
    """Stacks with values at a place: the first one if it is before; if it may be behind the end, nothing changes."""
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
