"""Write a pair of scans again, by tracing: the forward loop keeps less, the reverse loop computes the rest again.

One level: the forward loop stacks the carries that a recomputation of the body starts from; each step of the reverse
loop repeats the body up to its residuals and goes on as before. That is what `jax.checkpoint` on the body gives.

Two levels (Chen et al. 2016, section 4, on a loop): the forward loop keeps the first carry of each chunk of steps, and
all carries of the last chunk, which is turned round at once. The reverse loop goes over the other chunks, makes the
carries of one again and then runs it in reverse, reading and writing the whole stacks by index. The last chunk is
shorter where the chunk does not divide the length. A chunk may keep residuals, too, while it makes its carries, so that
they are not made a third time.

In both the optimizer's update may be done inside the reverse loop (`update.py`): stacks of parameters and moments are
then carries of the loop, updated in place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from remat_opt.loops.body import Atom, Loop, evaluate, read
from remat_opt.loops.choice import LoopChoice
from remat_opt.loops.constants import make_afresh
from remat_opt.loops.pairs import Pair
from remat_opt.loops.recomputation import Recomputation
from remat_opt.loops.reverse import ReverseLoop, room_for, unroll_for
from remat_opt.loops.update import Update
from remat_opt.program.inline import Constant, Program


@dataclasses.dataclass(frozen=True, eq=False)
class PairWriter:
    """One pair with all that was decided about it.

    Attributes:
        program: the flat step.
        pair: the loops.
        choice: what is to be done.
        recomputation: what that means.
        update: what moves into the reverse loop, if anything.
        constant: the program's `constant_equations`.
        read_later: values of the program that somebody reads; what nobody reads is not written.
        slices_apart: see `rewrite_loops`.
    """

    program: Program
    pair: Pair
    choice: LoopChoice
    recomputation: Recomputation
    update: Update | None
    constant: dict[int, int]
    read_later: frozenset[int]
    slices_apart: bool = False

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
        loop = self.pair.forward
        kept = self.recomputation
        first = [read(atom, operands) for atom in loop.first_carry]
        ys = [y for y in self.pair.kept_ys if loop.ys[y] in self.read_later]
        equations = range(len(loop.body.equations))
        chunk = self.choice.chunk

        def step(state, x):
            carry, slots, recent = state
            step_number, *slices = x
            constants = self.constants(loop, operands).values()
            environment = dict(zip(loop.body.inputs, [*constants, *carry, *slices], strict=True))
            evaluate(loop.body, equations, environment)
            stacked = [read(loop.body_ys[y], environment) for y in ys]
            stacked += [environment[value] for value in kept.saved]
            if chunk is None:
                stacked += [carry[at] for at in kept.carries]
            else:
                slots = [
                    lax.dynamic_update_index_in_dim(slot, carry[at], self.place_of(step_number), 0)
                    for at, slot in zip(kept.advanced, slots, strict=True)
                ]
                place = jnp.maximum(step_number - chunk * self.whole_chunks, 0)  # the first until the last chunk
                held = [*(carry[at] for at in kept.carries), *(environment[value] for value in kept.in_chunk)]
                recent = [
                    lax.dynamic_update_index_in_dim(stack, value, place, 0)
                    for value, stack in zip(held, recent, strict=True)
                ]
            return ([read(atom, environment) for atom in loop.next_carry], slots, recent), stacked

        slots, recent = [], []
        if chunk is not None:
            slots = [room_for(first[at], self.whole_chunks + 1) for at in kept.advanced]
            avals = [loop.body.avals[value] for value in kept.in_chunk]
            recent = [room_for(value, self.last_chunk) for value in (*(first[at] for at in kept.carries), *avals)]
        xs = [self.step_numbers(), *(read(atom, operands) for atom in loop.xs)]
        unroll = unroll_for(loop.unroll, loop.length)
        state = (first, slots, recent)
        (last, slots, recent), stacked = lax.scan(step, state, xs, loop.length, reverse=loop.reverse, unroll=unroll)
        results = dict(zip((*loop.last_carry, *(loop.ys[y] for y in ys)), [*last, *stacked[: len(ys)]], strict=True))
        return [results[value] for value in self.forward_results], [*stacked[len(ys) :], *slots, *recent]

    def constants(self, loop: Loop, operands: dict[int, Any]) -> dict[int, Any]:
        """The constant operands of a loop by value of its body, those that depend on no input made afresh."""
        fresh = make_afresh(self.program, self.constant, loop.constants)
        return {
            value: read(atom, operands if isinstance(atom, Constant) or atom not in fresh else fresh)
            for value, atom in zip(loop.body_constants, loop.constants, strict=True)
            if isinstance(atom, Constant) or atom in fresh or atom in operands
        }

    @property
    def whole_chunks(self) -> int:
        """Two levels: how many chunks come before the last one."""
        return (self.pair.length - 1) // self.choice.steps_in_chunk

    @property
    def last_chunk(self) -> int:
        """Two levels: steps of the last chunk."""
        return self.pair.length - self.whole_chunks * self.choice.steps_in_chunk

    def place_of(self, step_number: jax.Array) -> jax.Array:
        """Where a step's carry is kept if it is a chunk's first; there is one place more for all others."""
        chunk = self.choice.steps_in_chunk
        first_of_chunk = (step_number % chunk == 0) & (step_number < chunk * self.whole_chunks)
        return jnp.where(first_of_chunk, step_number // chunk, self.whole_chunks)

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
        kept = self.recomputation
        reads = kept.again.reads | kept.advance.reads
        own_xs = [x for at, x in enumerate(backward.xs) if at not in self.pair.consumed]
        constants = [*backward.constants]
        constants += [a for a, v in zip(forward.constants, forward.body_constants, strict=True) if v in reads]
        atoms: list[Atom] = [a for a in constants if isinstance(a, Constant) or a not in self.constant]
        atoms += [*backward.first_carry, *own_xs]
        atoms += [a for a, v in zip(forward.xs, forward.body_xs, strict=True) if v in reads]
        atoms += [forward.ys[y] for y in kept.given.values()]
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
