"""The reverse loop of a pair while it is being traced; see `write.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from remat_opt.loops.body import evaluate, read
from remat_opt.loops.update import update_slices

if TYPE_CHECKING:
    from remat_opt.loops.write import PairWriter


class ReverseLoop:
    """The reverse loop while it is being traced."""

    def __init__(self, writer: PairWriter, operands: dict[int, Any], handed_over: Sequence[Any]):
        self.writer = writer
        self.pair = writer.pair
        self.kept = writer.recomputation
        self.operands = operands
        self.in_place = dict((writer.update.in_place if writer.update else {}).items())
        saved = len(self.kept.saved)
        forward, backward = self.pair.forward, self.pair.backward
        # One level: the carries of all steps. Two: the first ones of each chunk, and all of the last chunk.
        slots = len(self.kept.advanced) if writer.choice.chunk is not None else 0
        self.slots, self.carries = handed_over[saved : saved + slots], handed_over[saved + slots :]
        # All stacks that are read one slice a step, by what the slice stands for in the environments of a step.
        reads = self.kept.again.reads | self.kept.advance.reads
        self.forward_stacks: dict[int, Any] = dict(zip(self.kept.saved, handed_over[:saved], strict=True))
        self.forward_stacks |= {value: operands[forward.ys[y]] for value, y in self.kept.given.items()}
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
            index, carries, slices = x
            return self.step(state, index, carries, slices)

        (last, in_place), stacked = lax.scan(
            step,
            self.first_state,
            (numbers, list(self.carries), self.stacks),
            length=backward.length,
            reverse=backward.reverse,
            unroll=unroll_for(backward.unroll, backward.length),
        )
        return last, stacked, in_place

    def in_two_levels(self) -> tuple[list[Any], list[Any], list[Any]]:
        writer, chunk = self.writer, self.writer.choice.steps_in_chunk
        avals = [writer.program.avals[value] for value in writer.stacked_results]
        state = (*self.first_state, [jnp.zeros(aval.shape, aval.dtype) for aval in avals])
        whole = jnp.arange(writer.whole_chunks, dtype=jnp.int32)
        state = self.in_reverse(state, jnp.int32(writer.whole_chunks), writer.last_chunk, self.carries)

        def one_chunk(state, number):
            return self.in_reverse(state, number, chunk, self.advance(number, state[1])), None

        if writer.whole_chunks:
            state, _ = lax.scan(one_chunk, state, whole, reverse=True)
        last, in_place, stacked = state
        return last, stacked, in_place

    def index_of(self, number: jax.Array, step: jax.Array) -> jax.Array:
        """Where in the stacks a step of a chunk is."""
        position = number * self.writer.choice.steps_in_chunk + step
        return self.pair.length - 1 - position if self.pair.forward.reverse else position

    def in_reverse(self, state: Any, number: jax.Array, length: int, carries: Sequence[Any]) -> Any:
        """Run one chunk in reverse.

        Args:
            state: the backward carry, the stacks that are updated in place, and the stacks of results.
            number: which chunk.
            length: steps in it.
            carries: the forward carries of its steps.
        """

        def step(state, x):
            step_number, held = x
            index = self.index_of(number, step_number)
            slices = [{v: _slice(stack, index) for v, stack in stacks.items()} for stacks in self.stacks]
            (last, in_place), made = self.step(state[:2], index, held, slices)
            stacked = [lax.dynamic_update_index_in_dim(s, m, index, 0) for s, m in zip(state[2], made, strict=True)]
            return (last, in_place, stacked), None

        numbers = jnp.arange(length, dtype=jnp.int32)
        unroll = unroll_for(self.pair.backward.unroll, length)
        return lax.scan(step, state, (numbers, list(carries)), reverse=True, unroll=unroll)[0]

    def advance(self, number: jax.Array, in_place: list[Any]) -> list[Any]:
        """The carries that the steps of one chunk start from, and what it keeps besides: stacks of the chunk's size.

        Args:
            number: which chunk.
            in_place: the stacks that are updated in place.
        """
        forward, kept, chunk = self.pair.forward, self.kept, self.writer.choice.steps_in_chunk
        given_now = dict(zip(self.in_place.values(), in_place, strict=True))
        reads = kept.advance.reads
        stacks = {v: stack for v, stack in self.forward_stacks.items() if v in reads}
        stacks |= {v: given_now[given] for v, given in self.forward_in_place.items() if v in reads}

        def hold(held, carry, place):
            values = [carry[kept.advanced.index(at)] for at in kept.carries]
            return [lax.dynamic_update_index_in_dim(s, c, place, 0) for s, c in zip(held, values, strict=True)]

        def advanced(carry, step_number):
            environment = self.forward_environment(dict(zip(kept.advanced, carry, strict=True)))
            index = self.index_of(number, step_number)
            environment |= {value: _slice(stack, index) for value, stack in stacks.items()}
            evaluate(forward.body, kept.advance.equations, environment, again=True)
            return [read(forward.next_carry[at], environment) for at in kept.advanced], environment

        def step(state, step_number):
            carry, held = state
            carry, _ = advanced(carry, step_number - 1)
            return (carry, hold(held, carry, step_number)), None

        def step_with_residuals(carry, step_number):
            next_carry, environment = advanced(carry, step_number)
            before = [carry[kept.advanced.index(at)] for at in kept.carries]
            return next_carry, [*before, *(environment[value] for value in kept.in_chunk)]

        first = [_slice(slots, number) for slots in self.slots]
        if kept.in_chunk:
            numbers = jnp.arange(chunk, dtype=jnp.int32)
            return lax.scan(step_with_residuals, first, numbers, unroll=unroll_for(forward.unroll, chunk))[1]
        held = hold([room_for(first[kept.advanced.index(at)], chunk) for at in kept.carries], first, 0)
        if chunk > 1:
            numbers = jnp.arange(1, chunk, dtype=jnp.int32)
            (_, held), _ = lax.scan(step, (first, held), numbers, unroll=unroll_for(forward.unroll, chunk - 1))
        return held

    def forward_environment(self, carry: dict[int, Any]) -> dict[int, Any]:
        """Constants and some carries of the forward body."""
        forward = self.pair.forward
        constants = self.writer.constants(forward, self.operands)
        return constants | {forward.body_carry[at]: value for at, value in carry.items()}

    def step(self, state: Any, index: jax.Array, carries: list[Any], slices: Any) -> Any:
        """One step: the residuals again, the backward body, the update.

        Args:
            state: the backward carry and the stacks that are updated in place.
            index: the slice of the stacks that is at hand.
            carries: the forward carries that the recomputation starts from, and what the chunk has kept besides.
            slices: this step's slice of each of `stacks`.

        Returns:
            The next state and one slice for each stack that is written.
        """
        cotangents, in_place = state
        of_forward, of_backward, of_update = slices
        pair, kept, backward = self.pair, self.kept, self.pair.backward
        carries, residuals = carries[: len(kept.carries)], carries[len(kept.carries) :]
        carries, cotangents = self.together(carries, cotangents)
        given_now = {given: _slice(s, index) for given, s in zip(self.in_place.values(), in_place, strict=True)}
        if self.writer.slices_apart:
            given_now = {given: lax.optimization_barrier(now) for given, now in given_now.items()}
        again = self.forward_environment(dict(zip(kept.carries, carries, strict=True)))
        again |= of_forward | {v: given_now[a] for v, a in self.forward_in_place.items()}
        again |= dict(zip(kept.in_chunk, residuals, strict=True))
        evaluate(pair.forward.body, kept.again.equations, again, again=True)

        environment = self.writer.constants(backward, self.operands)
        environment |= dict(zip(backward.body_carry, cotangents, strict=True))
        environment |= of_backward | {v: of_forward[shared] for v, shared in self.shared.items()}
        environment |= {v: given_now[a] for v, a in self.backward_in_place.items()}
        for at, y in pair.consumed.items():
            environment[backward.body_xs[at]] = read(pair.forward.body_ys[y], again)
        evaluate(backward.body, range(len(backward.body.equations)), environment)

        made = [read(atom, environment) for atom in backward.body_ys]
        by_value = dict(zip(backward.ys, made, strict=True))
        update = self.writer.update
        next_carry = [read(atom, environment) for atom in backward.next_carry]
        if update is not None:
            if not self.writer.slices_apart:
                # Read again for the update: the slices that the recomputation reads need not live until then.
                index_then, next_carry = lax.optimization_barrier((index, next_carry))
                given_now = {g: _slice(s, index_then) for g, s in zip(self.in_place.values(), in_place, strict=True)}
            by_value |= given_now | of_update | {v: self.operands[v] for v in update.others}
            update_slices(self.writer.program, update, by_value)
        in_place = [
            lax.dynamic_update_index_in_dim(stack, by_value[value], index, 0)
            for value, stack in zip(self.in_place, in_place, strict=True)
        ]
        stacked = [by_value[value] for value in self.writer.stacked_results]
        return (next_carry, in_place), stacked

    def together(self, carries: list[Any], cotangents: list[Any]) -> tuple[list[Any], list[Any]]:
        """Forward carries and their cotangents behind one barrier.

        A loop of one step is inlined by compilers, which would then take what it recomputes from the forward pass.
        Weights and sums of their gradients stay out: a barrier materialises what it covers.
        """
        shapes = {(value.shape, value.dtype) for value in carries}
        behind = [at for at, value in enumerate(cotangents) if (value.shape, value.dtype) in shapes]
        values = lax.optimization_barrier([*carries, *(cotangents[at] for at in behind)])
        tied = dict(zip(behind, values[len(carries) :], strict=True))
        return values[: len(carries)], [tied.get(at, value) for at, value in enumerate(cotangents)]


def _slice(stack: Any, index: jax.Array) -> Any:
    return lax.dynamic_index_in_dim(stack, index, 0, keepdims=False)


def room_for(value: Any, places: int) -> Any:
    """A stack to write values like `value` to."""
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
        return jnp.broadcast_to(value, (places, *value.shape))
    return jnp.zeros((places, *value.shape), value.dtype)


def unroll_for(given: Any, length: int) -> int:
    """The user's `unroll` for a loop of another length; 0 in a jaxpr stands for all steps."""
    return max(1, min(int(given) or length, length))
