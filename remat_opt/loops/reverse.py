"""The reverse loop of a pair while it is being traced; see `write.py`."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from remat_opt.loops.body import evaluate, read
from remat_opt.loops.recomputation import JointStep, Recomputation
from remat_opt.loops.steps import Emit
from remat_opt.loops.update import update_slices
from remat_opt.rewrites.slices import Slice, at_once
from remat_opt.trace import compat

if TYPE_CHECKING:
    from remat_opt.loops.write import PairWriter


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


@dataclasses.dataclass(frozen=True)
class StepBody:
    """A step of the reverse loop with a schedule of its own.

    Attributes:
        step: the step as a program.
        emit: evaluates it on its inputs.
    """

    step: JointStep
    emit: Emit


class ReverseLoop:
    """The reverse loop while it is being traced."""

    def __init__(self, writer: PairWriter, operands: dict[int, Any], handed_over: Sequence[Any]):
        self.writer = writer
        self.pair = writer.pair
        self.repeats = writer.repeats
        self.operands = operands
        self.in_place = dict((writer.update.in_place if writer.update else {}).items())
        saved = len(self.repeats.saved)
        forward, backward = self.pair.forward, self.pair.backward
        handed = iter(handed_over[saved:])
        # One level: the carries of all steps. Two: of each group the first ones of its chunks.
        self.carries = [] if writer.groups else list(handed)
        self.slots = [list(itertools.islice(handed, len(again.advanced))) for again in self.repeats.of_group]
        # Of the last chunk: its carries, and its residuals.
        self.recent = list(itertools.islice(handed, len(self.repeats.alone.carries))) if writer.groups else []
        self.residuals = list(handed)
        # All stacks that are read one slice a step, by what the slice stands for in the environments of a step.
        reads = self.repeats.reads
        self.forward_stacks: dict[int, Any] = dict(zip(self.repeats.saved, handed_over[:saved], strict=True))
        self.forward_stacks |= {value: operands[forward.ys[y]] for value, y in self.repeats.given.items()}
        given_xs = [(v, a) for v, a in zip(forward.body_xs, forward.xs, strict=True) if v in reads]
        self.overwritten = set(self.in_place.values())
        self.forward_in_place = {v: a for v, a in given_xs if isinstance(a, int) and a in self.overwritten}
        self.forward_stacks |= {
            v: read(a, operands) for v, a in given_xs if a not in self.overwritten and v not in self.forward_stacks
        }
        own = {v: a for at, (v, a) in enumerate(zip(backward.body_xs, backward.xs, strict=True))
               if at not in self.pair.consumed}  # fmt: skip
        self.backward_in_place = {v: a for v, a in own.items() if isinstance(a, int) and a in self.overwritten}
        # Read by both, one slice is taken: of two, a compiler that divides arrays among devices gathers each.
        by_stack = {a: v for v, a in given_xs if v in self.forward_stacks and isinstance(a, int)}
        self.shared = {v: by_stack[a] for v, a in own.items() if isinstance(a, int) and a in by_stack}
        left = {v: a for v, a in own.items() if a not in self.overwritten and v not in self.shared}
        self.backward_stacks = {v: read(a, operands) for v, a in left.items()}
        update = writer.update
        self.update_stacks = {v: operands[v] for v in update.stacks if v not in self.overwritten} if update else {}

    @property
    def first_state(self) -> tuple[list[Any], list[Any]]:
        backward = [read(atom, self.operands) for atom in self.pair.backward.first_carry]
        return backward, [self.operands[given] for given in self.in_place.values()]

    @property
    def stacks(self) -> tuple[dict[int, Any], ...]:
        return self.forward_stacks, self.backward_stacks, self.update_stacks

    def in_one_level(self) -> tuple[list[Any], list[Any], list[Any]]:
        backward = self.pair.backward
        numbers = jnp.arange(backward.length, dtype=jnp.int32)

        def step(state, x):
            index, given = x
            carries, slices = given or ([self.slice_of(stack, index) for stack in self.carries], self.slices(index))
            return self.step(state, index, self.repeats.alone, carries, slices)

        (last, in_place), stacked = lax.scan(
            step,
            self.first_state,
            (numbers, None if self.is_scheduled else (list(self.carries), self.stacks)),
            length=backward.length,
            reverse=backward.reverse,
            unroll=unroll_for(backward.unroll, backward.length),
        )
        return last, stacked, in_place

    @property
    def is_scheduled(self) -> bool:
        """Whether steps have a schedule of their own, in which slices may be read more than once."""
        return self.writer.choice.step_bytes is not None

    def slices(self, index: Any) -> list[dict[int, Any]]:
        """This step's slice of each of `stacks`."""
        return [{v: self.slice_of(stack, index) for v, stack in stacks.items()} for stacks in self.stacks]

    def slice_of(self, stack: Any, index: Any, read: Callable[[Any, Any], Any] | None = None) -> Any:
        """A step's slice of a stack; of a stack of one slice that slice, whatever the index, as compilers see it."""
        found = Slice(functools.partial(read or _slice, stack), index)
        return found if self.is_scheduled and stack.shape[0] > 1 else found.now()

    def in_two_levels(self) -> tuple[list[Any], list[Any], list[Any]]:
        writer = self.writer
        avals = [writer.program.avals[value] for value in writer.stacked_results]
        state = (*self.first_state, [lax.full(aval.shape, 0, aval.dtype) for aval in avals])
        before = self.pair.length - writer.last_chunk
        state = self.turn_round(state, jnp.int32(before), writer.last_chunk, self.kept_of_last_chunk())
        for number in reversed(range(len(writer.groups))):
            chunks = writer.groups[number]
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
        chunks = self.writer.groups[group]

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
            return [self.slice_of(self.recent[alone.carries.index(at)], step) for at in positions]

        return KeptOfChunk(
            again,
            lambda step: [*carries_at(step, again.carries), *self.residuals_at(self.residuals, step)],
            lambda step: carries_at(step, alone.carries),
        )

    def residuals_at(self, stacks: Sequence[Any], step: Any) -> list[Any]:
        """What a chunk keeps of one of its steps, beside its carry."""
        return [self.slice_of(stack, step, _slice_as_it_is) for stack in stacks]

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
            (last, in_place), made = self.step(state[:2], index, again, held, self.slices(index), is_single)
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
        forward, chunk = self.pair.forward, self.writer.groups[group].steps
        again, alone = self.repeats.of_group[group], self.repeats.alone
        given_now = dict(zip(self.in_place.values(), in_place, strict=True))
        reads = again.advance.reads
        stacks = {v: stack for v, stack in self.forward_stacks.items() if v in reads}
        stacks |= {v: given_now[given] for v, given in self.forward_in_place.items() if v in reads}

        def among(carry, positions):
            return [carry[again.advanced.index(at)] for at in positions]

        def hold(held, carry, place):
            values = among(carry, again.carries)
            return [lax.dynamic_update_index_in_dim(s, c, place, 0) for s, c in zip(held, values, strict=True)]

        def advanced(carry, step_number):
            environment = self.forward_environment(dict(zip(again.advanced, carry, strict=True)))
            index = self.index_of(first_step + step_number)
            environment |= {value: _slice(stack, index) for value, stack in stacks.items()}
            evaluate(forward.body, again.advance.equations, environment, again=True)
            return [read(forward.next_carry[at], environment) for at in again.advanced], environment

        def step(state, step_number):
            carry, held = state
            carry, _ = advanced(carry, step_number - 1)
            return (carry, hold(held, carry, step_number)), None

        def step_with_residuals(carry, step_number):
            next_carry, environment = advanced(carry, step_number)
            return next_carry, [*among(carry, again.carries), *(environment[value] for value in again.in_chunk)]

        first = [_slice(slots, number) for slots in self.slots[group]]
        unroll = unroll_for(forward.unroll, max(chunk - 1, 1))
        if again.in_chunk:
            numbers = jnp.arange(chunk - 1, dtype=jnp.int32)
            last, held = lax.scan(step_with_residuals, first, numbers, unroll=unroll)
            count = len(again.carries)
            return KeptOfChunk(
                again,
                lambda at: [
                    *(self.slice_of(stack, at) for stack in held[:count]),
                    *self.residuals_at(held[count:], at),
                ],
                lambda _: among(last, alone.carries),
            )
        held = hold([room_for(carry, chunk) for carry in among(first, again.carries)], first, 0)
        if chunk > 1:
            numbers = jnp.arange(1, chunk, dtype=jnp.int32)
            (_, held), _ = lax.scan(step, (first, held), numbers, unroll=unroll)
        return KeptOfChunk(alone, lambda at: [self.slice_of(stack, at) for stack in held])

    def forward_environment(self, carry: dict[int, Any]) -> dict[int, Any]:
        """Constants and some carries of the forward body."""
        forward = self.pair.forward
        constants = self.writer.constants(forward, self.operands)
        return constants | {forward.body_carry[at]: value for at, value in carry.items()}

    def step(
        self, state: Any, index: Any, kept: Recomputation, held: list[Any], slices: Any, is_single: bool = False
    ) -> Any:
        """One step: the residuals again, the backward body, the update.

        Args:
            state: the backward carry and the stacks that are updated in place.
            index: the slice of the stacks that is at hand.
            kept: what it repeats.
            held: the forward carries that the recomputation starts from, and what the chunk has kept besides.
            slices: this step's slice of each of `stacks`.
            is_single: its loop has no other step.

        Returns:
            The next state and one slice for each stack that is written.
        """
        cotangents, in_place = state
        of_forward, of_backward, of_update = slices
        starts = len(held) if is_single else len(kept.carries)
        found, cotangents = self.together(held[:starts], cotangents)
        held = [*found, *held[starts:]]
        carries, residuals = held[: len(kept.carries)], held[len(kept.carries) :]
        stacks = zip(self.in_place.values(), in_place, strict=True)
        if self.writer.slices_apart:
            given_now = {given: lax.optimization_barrier(_slice(stack, index)) for given, stack in stacks}
        else:
            given_now = {given: self.slice_of(stack, index) for given, stack in stacks}
        again = self.forward_environment(dict(zip(kept.carries, carries, strict=True)))
        again |= of_forward | {v: given_now[a] for v, a in self.forward_in_place.items()}
        again |= dict(zip(kept.in_chunk, residuals, strict=True))
        environment = self.writer.constants(self.pair.backward, self.operands)
        environment |= dict(zip(self.pair.backward.body_carry, cotangents, strict=True))
        environment |= of_backward | {v: of_forward[shared] for v, shared in self.shared.items()}
        environment |= {v: given_now[a] for v, a in self.backward_in_place.items()}
        next_carry, made = self.both_passes(kept, again, environment)

        by_value = dict(zip(self.pair.backward.ys, made, strict=True))
        update = self.writer.update
        if update is not None:
            if not self.writer.slices_apart:
                # Read again for the update: the slices that the recomputation reads need not live until then.
                index_then, next_carry = lax.optimization_barrier((index, next_carry))
                given_now = {g: _slice(s, index_then) for g, s in zip(self.in_place.values(), in_place, strict=True)}
            by_value |= {v: at_once(x) for v, x in (given_now | of_update).items()}
            by_value |= {v: self.operands[v] for v in update.others}
            update_slices(self.writer.program, update, by_value)
        in_place = [
            lax.dynamic_update_index_in_dim(stack, by_value[value], index, 0)
            for value, stack in zip(self.in_place, in_place, strict=True)
        ]
        stacked = [by_value[value] for value in self.writer.stacked_results]
        return (next_carry, in_place), stacked

    def both_passes(
        self, kept: Recomputation, again: dict[int, Any], environment: dict[int, Any]
    ) -> tuple[list[Any], list[Any]]:
        """What a step repeats of the forward body, then the backward body.

        Args:
            kept: what is repeated.
            again: values of the forward body that are there.
            environment: values of the backward body that are there.

        Returns:
            The backward body's next carry and its slices of stacks.
        """
        forward, backward = self.pair.forward, self.pair.backward
        scheduled = self.writer.scheduled(kept)
        if scheduled:
            shift = scheduled.step.shift
            inputs = scheduled.step.program.inputs
            made = scheduled.emit([again[v] if v < shift else environment[v - shift] for v in inputs])
            return made[: backward.num_carry], made[backward.num_carry :]
        for values in (again, environment):
            values |= {value: at_once(x) for value, x in values.items()}
        evaluate(forward.body, kept.again.equations, again, again=True)
        for at, y in self.pair.consumed.items():
            environment[backward.body_xs[at]] = read(forward.body_ys[y], again)
        evaluate(backward.body, range(len(backward.body.equations)), environment)
        made = [read(atom, environment) for atom in backward.body.outputs]
        return made[: backward.num_carry], made[backward.num_carry :]

    def together(self, carries: list[Any], cotangents: list[Any]) -> tuple[list[Any], list[Any]]:
        """Pass forward carries and their cotangents through one barrier.

        Compilers inline a loop of one step. They would then take the recomputed values from the forward pass (CSE), or
        recompute them long before their cotangents are there. The values that its chunk has saved go through the
        barrier, too. Weights and sums of their gradients stay out: a barrier materialises what it covers.
        """
        shapes = {(aval.shape, aval.dtype) for aval in map(jax.typeof, map(at_once, carries))}
        behind = [at for at, value in enumerate(cotangents) if (value.shape, value.dtype) in shapes]
        # Of a slice that can be read again its index goes through the barrier, and the slice need not be there.
        given = [carry.index if isinstance(carry, Slice) else carry for carry in carries]
        values = lax.optimization_barrier([*given, *(cotangents[at] for at in behind)])
        tied = dict(zip(behind, values[len(carries) :], strict=True))
        carries = [
            dataclasses.replace(carry, index=value) if isinstance(carry, Slice) else value
            for carry, value in zip(carries, values, strict=False)
        ]
        return carries, [tied.get(at, value) for at, value in enumerate(cotangents)]


def _slice(stack: Any, index: jax.Array) -> Any:
    if stack.shape[0] == 1:  # nothing to choose from: the same bytes, to compilers and to our model of them
        return lax.squeeze(stack, (0,))
    return lax.dynamic_index_in_dim(stack, index, 0, keepdims=False)


def _slice_as_it_is(stack: Any, index: Any) -> Any:
    """A slice in the layout that it was written in. A compiler that is free to choose may like another one for its
    readers, and copies the whole stack for it."""
    return compat.row_major(_slice(stack, index))


def room_for(value: Any, places: int) -> Any:
    """A stack to write values to that have the shape and type of one, or of an abstract one."""
    return lax.full((places, *value.shape), 0, value.dtype)  # random keys, too


def unroll_for(given: Any, length: int) -> int:
    """The user's `unroll` for a loop of another length; 0 in a jaxpr stands for all steps."""
    return max(1, min(int(given) or length, length))
