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

from remat_opt.loops.body import Atom, Loop, evaluate, read
from remat_opt.loops.choice import Chunks, LoopChoice
from remat_opt.loops.constants import make_afresh
from remat_opt.loops.pairs import Pair
from remat_opt.loops.recomputation import Recomputation, Recomputations, joint_step
from remat_opt.loops.reverse import ReverseLoop, StepBody, room_for, unroll_for
from remat_opt.loops.steps import StepSearch
from remat_opt.loops.update import Update
from remat_opt.trace.inline import Constant, Program


@dataclasses.dataclass(frozen=True, eq=False)
class PairWriter:
    """One pair with all that was decided about it.

    Attributes:
        program: the flat step.
        pair: the loops.
        choice: what is to be done.
        repeats: what that means.
        update: what moves into the reverse loop, if anything.
        constant: the program's `constant_equations`.
        read_later: values of the program that somebody reads; what nobody reads is not written.
        slices_apart: see `rewrite_loops`.
        steps: schedules steps of the reverse loop, where the choice says so.
    """

    program: Program
    pair: Pair
    choice: LoopChoice
    repeats: Recomputations
    update: Update | None
    constant: dict[int, int]
    read_later: frozenset[int]
    slices_apart: bool = False
    steps: StepSearch | None = None

    # The forward loop

    @property
    def forward_results(self) -> tuple[int, ...]:
        """Values of the program that the forward loop still makes."""
        loop = self.pair.forward
        ys = [loop.ys[y] for y in self.pair.kept_ys]
        return tuple(v for v in (*loop.last_carry, *ys) if v in self.read_later)

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

    @property
    def groups(self) -> tuple[Chunks, ...]:
        """Two levels: the chunks but the last one; none with one level."""
        return self.choice.groups(self.pair.length) if self.choice.chunk is not None else ()

    @property
    def last_chunk(self) -> int:
        """Two levels: steps of the last chunk."""
        return self.choice.last_chunk(self.pair.length)

    @property
    def residuals_of_last_chunk(self) -> tuple[int, ...]:
        """Values of the forward body that the forward loop keeps for the last chunk, but its last step."""
        return self.repeats.last_chunk.in_chunk if self.groups and self.last_chunk > 1 else ()

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

    def constants(self, loop: Loop, operands: dict[int, Any]) -> dict[int, Any]:
        """The constant operands of a loop by value of its body, those that depend on no input made afresh."""
        fresh = make_afresh(self.program, self.constant, loop.constants)
        return {
            value: read(atom, operands if isinstance(atom, Constant) or atom not in fresh else fresh)
            for value, atom in zip(loop.body_constants, loop.constants, strict=True)
            if isinstance(atom, Constant) or atom in fresh or atom in operands
        }

    def step_numbers(self) -> jax.Array:
        """For each index of the stacks, as which step the forward loop comes to it."""
        numbers = jnp.arange(self.pair.length, dtype=jnp.int32)
        return self.pair.length - 1 - numbers if self.pair.forward.reverse else numbers

    # The reverse loop

    @property
    def gradient_ys(self) -> tuple[int, ...]:
        """Positions among the backward scan's `ys` of stacks that are still written."""
        gone = self.update.gradients if self.update else ()
        ys = self.pair.backward.ys
        return tuple(y for y in range(len(ys)) if y not in gone and ys[y] in self.read_later)

    @property
    def stacked_results(self) -> tuple[int, ...]:
        """Values of the program that the reverse loop writes slice by slice to new stacks."""
        update = self.update
        new = [value for value in update.results if value not in update.in_place] if update else []
        return (*(self.pair.backward.ys[y] for y in self.gradient_ys), *new)

    @property
    def in_place_results(self) -> tuple[int, ...]:
        """Values of the program that the reverse loop writes over donated arguments."""
        return tuple(self.update.in_place) if self.update else ()

    @property
    def reverse_results(self) -> tuple[int, ...]:
        """Values of the program that the reverse loop makes."""
        last = [value for value in self.pair.backward.last_carry if value in self.read_later]
        return (*last, *self.stacked_results, *self.in_place_results)

    @property
    def reverse_operands(self) -> tuple[int, ...]:
        """Values of the program that the reverse loop reads, beside what the forward loop hands over."""
        forward, backward = self.pair.forward, self.pair.backward
        reads = self.repeats.reads
        own_xs = [x for at, x in enumerate(backward.xs) if at not in self.pair.consumed]
        constants = [*backward.constants]
        constants += [a for a, v in zip(forward.constants, forward.body_constants, strict=True) if v in reads]
        atoms: list[Atom] = [a for a in constants if isinstance(a, Constant) or a not in self.constant]
        atoms += [*backward.first_carry, *own_xs]
        atoms += [a for a, v in zip(forward.xs, forward.body_xs, strict=True) if v in reads]
        atoms += [forward.ys[y] for y in self.repeats.given.values()]
        if self.update:
            atoms += [*self.update.stacks, *self.update.others]
        return tuple(dict.fromkeys(atom for atom in atoms if not isinstance(atom, Constant)))

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

    def scheduled(self, again: Recomputation) -> StepBody | None:
        """A step of the reverse loop as the choice has it scheduled; None leaves it in its own order."""
        if self.choice.step_bytes is None or self.steps is None:
            return None
        step = joint_step(self.pair, again, self.program)
        cost = self.steps.costs(step).chosen(self.choice.step_bytes, is_alone=again is self.repeats.alone)
        emit = self.steps.written(step, cost.peak)
        return StepBody(step, emit) if emit else None


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
