"""The reverse loop of a pair while it is being traced; see `write.py`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from remat_opt.loops.body import evaluate, read
from remat_opt.loops.pair_plan import PairPlan
from remat_opt.loops.recomputation import Recomputation
from remat_opt.loops.reverse_step import ReverseStep
from remat_opt.loops.stacks import room_for, slice_at, unroll_for


@dataclasses.dataclass(frozen=True)
class KeptOfChunk:
    """What there is of a chunk's steps before it is turned round.

    Attributes:
        again: what its steps repeat; where that is less than all, the last step repeats all.
        of: for a step of the chunk the carries that its recomputation starts from, and its residuals.
        of_last: the same for the last step, where that repeats more.
    """

    again: Recomputation
    of: Callable[[Any], list[Any]]
    of_last: Callable[[Any], list[Any]] = lambda _: []


class ReverseLoop:
    """The reverse loop while it is being traced."""

    def __init__(self, plan: PairPlan, operands: dict[int, Any], handed_over: Sequence[Any]):
        self.plan = plan
        self.pair = plan.pair
        self.repeats = plan.repeats
        saved = len(self.repeats.saved)
        self.body = ReverseStep(plan, operands, handed_over[:saved])
        handed = iter(handed_over[saved:])
        # One level: the carries of all steps. Two: of each group the first ones of its chunks.
        self.carries = [] if plan.groups else list(handed)
        self.slots = [list(itertools.islice(handed, len(again.advanced))) for again in self.repeats.of_group]
        # Of the last chunk: its carries, and its residuals.
        self.recent = list(itertools.islice(handed, len(self.repeats.alone.carries))) if plan.groups else []
        self.residuals = list(handed)

    def in_one_level(self) -> tuple[list[Any], list[Any], list[Any]]:
        backward = self.pair.backward
        numbers = jnp.arange(backward.length, dtype=jnp.int32)

        def step(state, x):
            index, given = x
            carries, slices = given or (
                [self.body.slice_of(stack, index) for stack in self.carries],
                self.body.slices(index),
            )
            return self.body.run(state, index, self.repeats.alone, carries, slices)

        (last, in_place), stacked = lax.scan(
            step,
            self.body.first_state,
            (numbers, None if self.body.is_scheduled else (list(self.carries), self.body.stacks)),
            length=backward.length,
            reverse=backward.reverse,
            unroll=unroll_for(backward.unroll, backward.length),
        )
        return last, stacked, in_place

    def in_two_levels(self) -> tuple[list[Any], list[Any], list[Any]]:
        plan = self.plan
        avals = [plan.program.avals[value] for value in plan.stacked_results]
        state = (*self.body.first_state, [lax.full(aval.shape, 0, aval.dtype) for aval in avals])
        before = self.pair.length - plan.last_chunk
        state = self.turn_round(state, jnp.int32(before), plan.last_chunk, self.kept_of_last_chunk())
        for number in reversed(range(len(plan.groups))):
            chunks = plan.groups[number]
            before -= chunks.all_steps
            if chunks.number:
                state = self.chunks_in_reverse(state, number, before)
        last, in_place, stacked = state
        return last, stacked, in_place

    def chunks_in_reverse(self, state: Any, group: int, before: int) -> Any:
        """The chunks of a group, the last one first.

        Args:
            state: the backward carry, the stacks that are updated in place, and the stacks of results.
            group: which one.
            before: steps of the loop before it.
        """
        chunks = self.plan.groups[group]

        def one_chunk(state, number):
            first_step = before + number * chunks.steps
            kept = self.advance(group, number, first_step, state[1])
            return self.turn_round(state, first_step, chunks.steps, kept), None

        return lax.scan(one_chunk, state, jnp.arange(chunks.number, dtype=jnp.int32), reverse=True)[0]

    def kept_of_last_chunk(self) -> KeptOfChunk:
        """What the forward loop kept for the last chunk."""
        alone = self.repeats.alone
        again = self.repeats.last_chunk if self.residuals else alone

        def carries_at(step: Any, positions: Sequence[int]) -> list[Any]:
            return [self.body.slice_of(self.recent[alone.carries.index(at)], step) for at in positions]

        return KeptOfChunk(
            again,
            lambda step: [*carries_at(step, again.carries), *self.body.residuals_at(self.residuals, step)],
            lambda step: carries_at(step, alone.carries),
        )

    def index_of(self, step: Any) -> Any:
        """Where in the stacks a step of the loop is."""
        return self.pair.length - 1 - step if self.pair.forward.reverse else step

    def turn_round(self, state: Any, first_step: Any, length: int, kept: KeptOfChunk) -> Any:
        """Run one chunk in reverse.

        Args:
            state: the backward carry, the stacks that are updated in place, and the stacks of results.
            first_step: its first step in the loop.
            length: steps in it.
            kept: what there is of its steps.
        """

        def step(state, number, again, held, is_single):
            index = self.index_of(first_step + number)
            (last, in_place), made = self.body.run(state[:2], index, again, held, self.body.slices(index), is_single)
            stacked = [lax.dynamic_update_index_in_dim(s, m, index, 0) for s, m in zip(state[2], made, strict=True)]
            return last, in_place, stacked

        def in_reverse(state, numbers, again, held_of):
            unroll = unroll_for(self.pair.backward.unroll, len(numbers))
            return lax.scan(
                lambda state, number: (step(state, number, again, held_of(number), len(numbers) == 1), None),
                state,
                numbers,
                reverse=True,
                unroll=unroll,
            )[0]

        numbers = jnp.arange(length, dtype=jnp.int32)
        if kept.again is not self.repeats.alone:  # the others find their residuals in the chunk
            state = in_reverse(state, numbers[-1:], self.repeats.alone, kept.of_last)
            if state[1]:  # loops of one step are none to compilers, which would do the updates of both at the end
                state = lax.optimization_barrier(state)
            numbers = numbers[:-1]
        return in_reverse(state, numbers, kept.again, kept.of) if len(numbers) else state

    def advance(self, group: int, number: Any, first_step: Any, in_place: list[Any]) -> KeptOfChunk:
        """The carries that the steps of one chunk start from, and what it keeps besides: stacks of the chunk's size.

        Args:
            group: of which chunks.
            number: which one of them.
            first_step: its first step in the loop.
            in_place: the stacks that are updated in place.
        """
        forward, chunk = self.pair.forward, self.plan.groups[group].steps
        again, alone = self.repeats.of_group[group], self.repeats.alone
        given_now = dict(zip(self.body.in_place.values(), in_place, strict=True))
        reads = again.advance.reads
        stacks = {v: stack for v, stack in self.body.forward_stacks.items() if v in reads}
        stacks |= {v: given_now[given] for v, given in self.body.forward_in_place.items() if v in reads}

        def among(carry, positions):
            return [carry[again.advanced.index(at)] for at in positions]

        def hold(held, carry, place):
            values = among(carry, again.carries)
            return [lax.dynamic_update_index_in_dim(s, c, place, 0) for s, c in zip(held, values, strict=True)]

        def advanced(carry, step_number):
            environment = self.body.forward_environment(dict(zip(again.advanced, carry, strict=True)))
            index = self.index_of(first_step + step_number)
            environment |= {value: slice_at(stack, index) for value, stack in stacks.items()}
            evaluate(forward.body, again.advance.equations, environment, again=True)
            return [read(forward.next_carry[at], environment) for at in again.advanced], environment

        def step(state, step_number):
            carry, held = state
            carry, _ = advanced(carry, step_number - 1)
            return (carry, hold(held, carry, step_number)), None

        def step_with_residuals(carry, step_number):
            next_carry, environment = advanced(carry, step_number)
            return next_carry, [*among(carry, again.carries), *(environment[value] for value in again.in_chunk)]

        first = [slice_at(slots, number) for slots in self.slots[group]]
        unroll = unroll_for(forward.unroll, max(chunk - 1, 1))
        if again.in_chunk:
            numbers = jnp.arange(chunk - 1, dtype=jnp.int32)
            last, held = lax.scan(step_with_residuals, first, numbers, unroll=unroll)
            count = len(again.carries)
            return KeptOfChunk(
                again,
                lambda at: [
                    *(self.body.slice_of(stack, at) for stack in held[:count]),
                    *self.body.residuals_at(held[count:], at),
                ],
                lambda _: among(last, alone.carries),
            )
        held = hold([room_for(carry, chunk) for carry in among(first, again.carries)], first, 0)
        if chunk > 1:
            numbers = jnp.arange(1, chunk, dtype=jnp.int32)
            (_, held), _ = lax.scan(step, (first, held), numbers, unroll=unroll)
        return KeptOfChunk(alone, lambda at: [self.body.slice_of(stack, at) for stack in held])
