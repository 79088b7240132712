"""The reverse loop of a pair while it is being traced; `forward.py` says what it does."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from remat_opt.loops.pair_plan import PairPlan
from remat_opt.loops.recomputation import Recomputation
from remat_opt.loops.reverse_step import ReverseStep
from remat_opt.loops.stacks import fetched, room_for, slice_at, unroll_for
from remat_opt.trace.evaluation import evaluate, read


@dataclasses.dataclass(frozen=True)
class SavedOfChunk:
    """What is saved of a chunk's steps before they run in reverse.

    Attributes:
        recomputation: of its steps; where that is less than all, the last step recomputes all.
        of: for a step of the chunk the carries that its recomputation starts from, and its residuals.
        of_last: the same for the last step, where that recomputes more.
    """

    recomputation: Recomputation
    of: Callable[[Any], list[Any]]
    of_last: Callable[[Any], list[Any]] = lambda _: []


class ReverseLoop:
    """The reverse loop while it is being traced; `handed_over` is the second result of `run_forward`."""

    def __init__(self, plan: PairPlan, operands: dict[int, Any], handed_over: Sequence[Any]):
        self.plan = plan
        self.pair = plan.pair
        self.repeats = plan.repeats
        saved = len(self.repeats.saved)
        self.body = ReverseStep(plan, operands, handed_over[:saved])
        handed = iter(handed_over[saved:])
        # One level: the carries of all steps. Two: of each group the first ones of its chunks.
        self.carries = [] if plan.groups else list(handed)
        self.slots = [list(itertools.islice(handed, len(group.forward_carries))) for group in self.repeats.of_group]
        # One level: stacks in the host's memory, by value of the forward body.
        host = self.body.saved | dict(zip(self.starts, self.carries, strict=False))
        self.host = {value: stack for value, stack in host.items() if value in plan.choice.host}
        # Of the last chunk: its carries, and its residuals.
        self.carries_of_last = list(itertools.islice(handed, len(self.repeats.alone.carries))) if plan.groups else []
        self.residuals = list(handed)

    def run(self) -> list[Any]:
        """One value for each of `PairPlan.reverse_results`."""
        last, stacked, in_place = self.in_two_levels() if self.plan.groups else self.in_one_level()
        carried = dict(zip(self.pair.backward.last_carry, last, strict=True))
        wanted = [value for value in self.pair.backward.last_carry if value in self.plan.read_later]
        return [*(carried[value] for value in wanted), *stacked, *in_place]

    @property
    def starts(self) -> list[int]:
        """One level: the values of the forward body that `carries` are the stacks of."""
        return [self.pair.forward.body_carry[at] for at in self.repeats.alone.carries]

    def in_one_level(self) -> tuple[list[Any], list[Any], list[Any]]:
        """Slices of stacks in the host's memory are fetched one step ahead: the loop carries them."""
        backward, starts = self.pair.backward, self.starts
        carries = {v: stack for v, stack in zip(starts, self.carries, strict=True) if v not in self.host}
        saved = {v: stack for v, stack in self.body.saved.items() if v not in self.host}
        by_value = (carries, saved, self.body.stacks)
        numbers = jnp.arange(backward.length, dtype=jnp.int32)
        first, ahead = (backward.length - 1, -1) if backward.reverse else (0, 1)

        def fetch(index):
            return {value: fetched(stack, index) for value, stack in self.host.items()}

        def step(state, x):
            state, arrived = state
            index, given = x
            coming = fetch(lax.clamp(jnp.int32(0), index + ahead, jnp.int32(backward.length - 1)))
            carries, saved, stacks = given or [self.body.slices_of(stacks, index) for stacks in by_value]
            carries = carries | arrived
            saved = saved | {value: slice for value, slice in arrived.items() if value not in starts}
            in_order = [carries[value] for value in starts]
            state, made = self.body.run(state, index, self.repeats.alone, in_order, (saved, stacks))
            return (state, coming), made

        ((last, in_place), _), stacked = lax.scan(
            step,
            (self.body.first_state, fetch(jnp.int32(first))),
            (numbers, None if self.body.is_scheduled else by_value),
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
        state = self.run_in_reverse(state, jnp.int32(before), plan.last_chunk, self.saved_of_last_chunk())
        for number in reversed(range(len(plan.groups))):
            chunks = plan.groups[number]
            before -= chunks.all_steps
            if chunks.number:
                state = self.chunks_in_reverse(state, number, before)
        last, in_place, stacked = state
        return last, stacked, in_place

    def chunks_in_reverse(self, state: Any, group: int, before: int) -> Any:
        """The chunks of a group, the last one first; `before` steps of the loop come before them. The state is the
        backward carry, the stacks that are updated in place, and the stacks of results."""
        chunks = self.plan.groups[group]

        def one_chunk(state, number):
            first_step = before + number * chunks.steps
            saved = self.recompute_forward(group, number, first_step, state[1])
            return self.run_in_reverse(state, first_step, chunks.steps, saved), None

        return lax.scan(one_chunk, state, jnp.arange(chunks.number, dtype=jnp.int32), reverse=True)[0]

    def saved_of_last_chunk(self) -> SavedOfChunk:
        """What the forward loop saved for the last chunk."""
        alone = self.repeats.alone
        others = self.repeats.last_chunk if self.residuals else alone

        def carries_at(step: Any, positions: Sequence[int]) -> list[Any]:
            return [self.body.slice_of(self.carries_of_last[alone.carries.index(at)], step) for at in positions]

        return SavedOfChunk(
            others,
            lambda step: [*carries_at(step, others.carries), *self.body.residuals_at(self.residuals, step)],
            lambda step: carries_at(step, alone.carries),
        )

    def index_of(self, step: Any) -> Any:
        """Where in the stacks a step of the loop is."""
        return self.pair.length - 1 - step if self.pair.forward.reverse else step

    def run_in_reverse(self, state: Any, first_step: Any, length: int, saved: SavedOfChunk) -> Any:
        """Run one chunk of `length` steps in reverse; the state as of `chunks_in_reverse`."""

        def in_reverse(state, numbers, recomputation, saved_of):
            def step(state, number):
                *state, stacks = state
                index = self.index_of(first_step + number)
                is_single = len(numbers) == 1
                slices = self.body.slices(index)
                state, made = self.body.run(state, index, recomputation, saved_of(number), slices, is_single)
                written = [lax.dynamic_update_index_in_dim(s, m, index, 0) for s, m in zip(stacks, made, strict=True)]
                return (*state, written), None

            unroll = unroll_for(self.pair.backward.unroll, len(numbers))
            return lax.scan(step, state, numbers, reverse=True, unroll=unroll)[0]

        numbers = jnp.arange(length, dtype=jnp.int32)
        if saved.recomputation is not self.repeats.alone:  # the others find their residuals in the chunk
            state = in_reverse(state, numbers[-1:], self.repeats.alone, saved.of_last)
            if state[1]:  # loops of one step are none to compilers, which would do the updates of both at the end
                state = lax.optimization_barrier(state)
            numbers = numbers[:-1]
        return in_reverse(state, numbers, saved.recomputation, saved.of) if len(numbers) else state

    def recompute_forward(self, group: int, number: Any, first_step: Any, in_place: list[Any]) -> SavedOfChunk:
        """What the steps of one chunk start from, carries and saved residuals: stacks of the chunk's size."""
        forward, chunk = self.pair.forward, self.plan.groups[group].steps
        recomputation, alone = self.repeats.of_group[group], self.repeats.alone
        reads, positions = recomputation.forward.reads, recomputation.forward_carries
        stacks = {v: stack for v, stack in self.body.forward_stacks(in_place).items() if v in reads}

        def among(carry, wanted):
            return [carry[positions.index(at)] for at in wanted]

        def write(stacks, carry, place):
            values = among(carry, recomputation.carries)
            return [lax.dynamic_update_index_in_dim(s, c, place, 0) for s, c in zip(stacks, values, strict=True)]

        def next_step(carry, step_number):
            environment = self.body.forward_environment(dict(zip(positions, carry, strict=True)))
            index = self.index_of(first_step + step_number)
            environment |= {value: slice_at(stack, index) for value, stack in stacks.items()}
            evaluate(forward.body, recomputation.forward.equations, environment, recomputed=True)
            return [read(forward.next_carry[at], environment) for at in positions], environment

        def step(state, step_number):
            carry, stacks = state
            carry, _ = next_step(carry, step_number - 1)
            return (carry, write(stacks, carry, step_number)), None

        def step_with_residuals(carry, step_number):
            next_carry, environment = next_step(carry, step_number)
            residuals = [environment[value] for value in recomputation.in_chunk]
            return next_carry, (among(carry, recomputation.carries), residuals)

        first = [slice_at(slots, number) for slots in self.slots[group]]
        unroll = unroll_for(forward.unroll, max(chunk - 1, 1))
        if recomputation.in_chunk:
            numbers = jnp.arange(chunk - 1, dtype=jnp.int32)
            last, (carries, residuals) = lax.scan(step_with_residuals, first, numbers, unroll=unroll)
            return SavedOfChunk(
                recomputation,
                lambda at: [*self.slices_of(carries, at), *self.body.residuals_at(residuals, at)],
                lambda _: among(last, alone.carries),
            )
        saved = write([room_for(carry, chunk) for carry in among(first, recomputation.carries)], first, 0)
        if chunk > 1:
            numbers = jnp.arange(1, chunk, dtype=jnp.int32)
            (_, saved), _ = lax.scan(step, (first, saved), numbers, unroll=unroll)
        return SavedOfChunk(alone, lambda at: self.slices_of(saved, at))

    def slices_of(self, stacks: Sequence[Any], index: Any) -> list[Any]:
        return [self.body.slice_of(stack, index) for stack in stacks]
