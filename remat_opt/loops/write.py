"""Write a pair of scans again, by tracing: the forward loop keeps less, the reverse loop computes the rest again.

One level: the forward loop stacks the carries that a recomputation of the body starts from; each step of the reverse
loop repeats the body up to its residuals and goes on as before. That is what `jax.checkpoint` on the body gives.

Two levels (Chen et al. 2016, section 4, on a loop): the forward loop keeps the first carry of each chunk of steps; the
reverse loop goes over chunks, makes the carries of one chunk again and then runs it in reverse, reading and writing the
whole stacks by index. What is left where the chunk does not divide the length is a chunk of its own.

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
from remat_opt.loops.update import Update, update_slices
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
    """

    program: Program
    pair: Pair
    choice: LoopChoice
    recomputation: Recomputation
    update: Update | None
    constant: dict[int, int]
    read_later: frozenset[int]

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
            carry, slots = state
            step_number, *slices = x
            constants = self.constants(loop, operands).values()
            environment = dict(zip(loop.body.inputs, [*constants, *carry, *slices], strict=True))
            evaluate(loop.body, equations, environment)
            stacked = [read(loop.body_ys[y], environment) for y in ys]
            stacked += [environment[value] for value in kept.saved]
            if chunk is None:
                stacked += [carry[at] for at in kept.carries]
            else:
                slot = jnp.where(step_number % chunk == 0, step_number // chunk, self.slots - 1)
                held = [carry[at] for at in kept.advanced]
                slots = [lax.dynamic_update_index_in_dim(s, c, slot, 0) for s, c in zip(slots, held, strict=True)]
            return ([read(atom, environment) for atom in loop.next_carry], slots), stacked

        slots = [] if chunk is None else [_room(first[at], self.slots) for at in kept.advanced]
        xs = [self.step_numbers(), *(read(atom, operands) for atom in loop.xs)]
        (last, slots), stacked = lax.scan(
            step, (first, slots), xs, length=loop.length, reverse=loop.reverse, unroll=_unroll(loop.unroll, loop.length)
        )
        results = dict(zip((*loop.last_carry, *(loop.ys[y] for y in ys)), [*last, *stacked[: len(ys)]], strict=True))
        return [results[value] for value in self.forward_results], [*stacked[len(ys) :], *slots]

    def constants(self, loop: Loop, operands: dict[int, Any]) -> dict[int, Any]:
        """The constant operands of a loop by value of its body, those that depend on no input made afresh."""
        fresh = make_afresh(self.program, self.constant, loop.constants)
        return {
            value: read(atom, operands if isinstance(atom, Constant) or atom not in fresh else fresh)
            for value, atom in zip(loop.body_constants, loop.constants, strict=True)
            if isinstance(atom, Constant) or atom in fresh or atom in operands
        }

    @property
    def slots(self) -> int:
        """Two levels: carries that the forward loop keeps, and one place more for the steps that keep none."""
        assert self.choice.chunk is not None
        return -(-self.pair.length // self.choice.chunk) + 1

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
        loop = _ReverseLoop(self, operands, handed_over)
        last, stacked, in_place = loop.in_one_level() if self.choice.chunk is None else loop.in_two_levels()
        carried = dict(zip(self.pair.backward.last_carry, last, strict=True))
        wanted = [carried[value] for value in self.pair.backward.last_carry if value in self.read_later]
        return [*wanted, *stacked, *in_place]


class _ReverseLoop:
    """The reverse loop while it is being traced."""

    def __init__(self, writer: PairWriter, operands: dict[int, Any], handed_over: Sequence[Any]):
        self.writer = writer
        self.pair = writer.pair
        self.kept = writer.recomputation
        self.operands = operands
        self.in_place = dict((writer.update.in_place if writer.update else {}).items())
        saved = len(self.kept.saved)
        forward, backward = self.pair.forward, self.pair.backward
        self.carries = handed_over[saved:]  # one level: stacks of all carries, two: of the first ones of each chunk
        # All stacks that are read one slice a step, by what the slice stands for in the environments of a step.
        reads = self.kept.again.reads | self.kept.advance.reads
        self.forward_stacks: dict[int, Any] = dict(zip(self.kept.saved, handed_over[:saved], strict=True))
        self.forward_stacks |= {value: operands[forward.ys[y]] for value, y in self.kept.given.items()}
        given_xs = [(v, a) for v, a in zip(forward.body_xs, forward.xs, strict=True) if v in reads]
        self.overwritten = set(self.in_place.values())
        self.forward_in_place = {v: a for v, a in given_xs if a in self.overwritten}
        self.forward_stacks |= {
            v: read(a, operands) for v, a in given_xs if a not in self.overwritten and v not in self.forward_stacks
        }
        own = {v: a for at, (v, a) in enumerate(zip(backward.body_xs, backward.xs, strict=True))
               if at not in self.pair.consumed}  # fmt: skip
        self.backward_in_place = {v: a for v, a in own.items() if a in self.overwritten}
        self.backward_stacks = {v: read(a, operands) for v, a in own.items() if a not in self.overwritten}
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
            unroll=_unroll(backward.unroll, backward.length),
        )
        return last, stacked, in_place

    def in_two_levels(self) -> tuple[list[Any], list[Any], list[Any]]:
        chunk = self.writer.choice.chunk
        assert chunk is not None
        whole, rest = divmod(self.pair.length, chunk)
        avals = [self.writer.program.avals[value] for value in self.writer.stacked_results]
        state = (*self.first_state, [jnp.zeros(aval.shape, aval.dtype) for aval in avals])
        if rest:
            state = self.one_chunk(state, jnp.int32(whole), rest)
        state, _ = lax.scan(
            lambda state, number: (self.one_chunk(state, number, chunk), None),
            state,
            jnp.arange(whole, dtype=jnp.int32),
            reverse=True,
        )
        last, in_place, stacked = state
        return last, stacked, in_place

    def one_chunk(self, state: Any, number: jax.Array, length: int) -> Any:
        """Make the carries of one chunk again, then run it in reverse.

        Args:
            state: the backward carry, the stacks that are updated in place, and the stacks of results.
            number: which chunk.
            length: steps in it.
        """
        chunk = self.writer.choice.chunk
        assert chunk is not None
        forward, backward = self.pair.forward, self.pair.backward
        start = number * chunk

        def index_of(step):
            position = start + step
            return self.pair.length - 1 - position if forward.reverse else position

        first = [lax.dynamic_index_in_dim(slots, number, 0, keepdims=False) for slots in self.carries]
        carries = self.advance(first, length, state[1], index_of)

        def step(state, x):
            step_number, held = x
            index = index_of(step_number)
            slices = [{v: _slice(stack, index) for v, stack in stacks.items()} for stacks in self.stacks]
            (last, in_place), made = self.step(state[:2], index, held, slices)
            stacked = [lax.dynamic_update_index_in_dim(s, m, index, 0) for s, m in zip(state[2], made, strict=True)]
            return (last, in_place, stacked), None

        numbers = jnp.arange(length, dtype=jnp.int32)
        state, _ = lax.scan(step, state, (numbers, carries), reverse=True, unroll=_unroll(backward.unroll, length))
        return state

    def advance(self, first: list[Any], length: int, in_place: list[Any], index_of: Any) -> list[Any]:
        """Stacks of the carries that the steps of one chunk start from."""
        forward, kept = self.pair.forward, self.kept
        given_now = dict(zip(self.in_place.values(), in_place, strict=True))
        held = [_room(value, length) for value in first]
        held = [lax.dynamic_update_index_in_dim(stack, value, 0, 0) for stack, value in zip(held, first, strict=True)]

        def step(state, step_number):
            carry, held = state
            index = index_of(step_number - 1)
            environment = self.forward_environment(dict(zip(kept.advanced, carry, strict=True)))
            for value, stack in self.forward_stacks.items():
                if value in kept.advance.reads:
                    environment[value] = _slice(stack, index)
            for value, given in self.forward_in_place.items():
                if value in kept.advance.reads:
                    environment[value] = _slice(given_now[given], index)
            evaluate(forward.body, kept.advance.equations, environment)
            carry = [read(forward.next_carry[at], environment) for at in kept.advanced]
            held = [lax.dynamic_update_index_in_dim(s, c, step_number, 0) for s, c in zip(held, carry, strict=True)]
            return (carry, held), None

        numbers = jnp.arange(1, length, dtype=jnp.int32)
        if length > 1:
            (_, held), _ = lax.scan(step, (first, held), numbers, unroll=_unroll(forward.unroll, length - 1))
        return [held[kept.advanced.index(at)] for at in kept.carries]

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
            carries: the forward carries that the recomputation starts from.
            slices: this step's slice of each of `stacks`.

        Returns:
            The next state and one slice for each stack that is written.
        """
        cotangents, in_place = state
        of_forward, of_backward, of_update = slices
        pair, kept, backward = self.pair, self.kept, self.pair.backward
        carries, cotangents = self.together(carries, cotangents)
        given_now = {given: _slice(s, index) for given, s in zip(self.in_place.values(), in_place, strict=True)}
        again = self.forward_environment(dict(zip(kept.carries, carries, strict=True)))
        again |= of_forward | {v: given_now[a] for v, a in self.forward_in_place.items()}
        evaluate(pair.forward.body, kept.again.equations, again)

        environment = self.writer.constants(backward, self.operands)
        environment |= dict(zip(backward.body_carry, cotangents, strict=True))
        environment |= of_backward | {v: given_now[a] for v, a in self.backward_in_place.items()}
        for at, y in pair.consumed.items():
            environment[backward.body_xs[at]] = read(pair.forward.body_ys[y], again)
        evaluate(backward.body, range(len(backward.body.equations)), environment)

        made = [read(atom, environment) for atom in backward.body_ys]
        by_value = dict(zip(backward.ys, made, strict=True))
        update = self.writer.update
        if update is not None:
            by_value |= given_now | of_update | {v: self.operands[v] for v in update.others}
            update_slices(self.writer.program, update, by_value)
        in_place = [
            lax.dynamic_update_index_in_dim(stack, by_value[value], index, 0)
            for value, stack in zip(self.in_place, in_place, strict=True)
        ]
        stacked = [by_value[value] for value in self.writer.stacked_results]
        return ([read(atom, environment) for atom in backward.next_carry], in_place), stacked

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


def _room(value: Any, places: int) -> Any:
    """A stack to write values like `value` to."""
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
        return jnp.broadcast_to(value, (places, *value.shape))
    return jnp.zeros((places, *value.shape), value.dtype)


def _unroll(given: Any, length: int) -> int:
    """The user's `unroll` for a loop of another length; 0 in a jaxpr stands for all steps."""
    return max(1, min(int(given) or length, length))
