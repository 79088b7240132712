"""One step of a reverse loop: its residuals, the backward body, the optimizer's update."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax

from remat_opt.loops.pair_plan import PairPlan
from remat_opt.loops.recomputation import Recomputation
from remat_opt.loops.stacks import slice_as_written, slice_at
from remat_opt.loops.update import update_slices
from remat_opt.rewrites.slices import Slice, at_once
from remat_opt.trace.evaluation import evaluate, read


class ReverseStep:
    """A step of a reverse loop, with the stacks that it reads one slice of.

    Args:
        plan: the pair, and what was decided about it.
        operands: `PairPlan.reverse_operands` by value of the program.
        saved: stacks of the values that the forward loop saved of each step.
    """

    def __init__(self, plan: PairPlan, operands: dict[int, Any], saved: Sequence[Any]):
        self.plan = plan
        self.pair = plan.pair
        self.operands = operands
        forward, backward = self.pair.forward, self.pair.backward
        self.in_place = dict(plan.update.in_place if plan.update else {})
        # What is a slice of a stack, by the stack's value in the program. One that several read is sliced once: of two
        # slices, a compiler that divides arrays among devices gathers each.
        reads = plan.repeats.reads
        self.of_forward: dict[int, Any] = {v: x for v, x in zip(forward.body_xs, forward.xs, strict=True) if v in reads}
        self.of_forward |= {value: forward.ys[y] for value, y in plan.repeats.stacked.items()}
        own = enumerate(zip(backward.body_xs, backward.xs, strict=True))
        self.of_backward: dict[int, Any] = {v: x for at, (v, x) in own if at not in self.pair.consumed}
        of_update = plan.update.stacks if plan.update else ()
        overwritten = {*self.in_place.values()}
        stacks = {*self.of_forward.values(), *self.of_backward.values(), *of_update} - overwritten
        self.stacks = {stack: operands[stack] for stack in sorted(stacks)}
        self.saved = dict(zip(plan.repeats.saved, saved, strict=True))

    @property
    def first_state(self) -> tuple[list[Any], list[Any]]:
        backward = [read(atom, self.operands) for atom in self.pair.backward.first_carry]
        return backward, [self.operands[given] for given in self.in_place.values()]

    @property
    def is_scheduled(self) -> bool:
        """Whether steps have a schedule of their own, in which slices may be read more than once."""
        return self.plan.choice.step_bytes is not None

    def slices(self, index: Any) -> tuple[dict[int, Any], dict[int, Any]]:
        """This step's slice of each of `saved` and of `stacks`."""
        return self.slices_of(self.saved, index), self.slices_of(self.stacks, index)

    def slices_of(self, stacks: Mapping[int, Any], index: Any) -> dict[int, Any]:
        """A step's slice of each of some stacks."""
        return {value: self.slice_of(stack, index) for value, stack in stacks.items()}

    def forward_stacks(self, in_place: Sequence[Any]) -> dict[int, Any]:
        """The stacks of values of the forward body, as they are when those of `in_place` have been updated so far."""
        stacks = self.stacks | dict(zip(self.in_place.values(), in_place, strict=True))
        return self.saved | {value: stacks[stack] for value, stack in self.of_forward.items()}

    def slice_of(self, stack: Any, index: Any, read: Callable[[Any, Any], Any] = slice_at) -> Any:
        """A step's slice of a stack; of a stack of one slice that slice, whatever the index, as compilers see it."""
        found = Slice(functools.partial(read, stack), index)
        return found if self.is_scheduled and stack.shape[0] > 1 else found.now()

    def residuals_at(self, stacks: Sequence[Any], step: Any) -> list[Any]:
        """The residuals that a chunk saved of one of its steps. XLA's SPMD partitioner gathers what a layout constraint
        reads."""
        read_slice = slice_as_written if self.plan.program.marks is None else slice_at
        return [self.slice_of(stack, step, read_slice) for stack in stacks]

    def forward_environment(self, carry: dict[int, Any]) -> dict[int, Any]:
        """Constants and some carries of the forward body."""
        forward = self.pair.forward
        constants = self.plan.constants(forward, self.operands)
        return constants | {forward.body_carry[at]: value for at, value in carry.items()}

    def run(
        self,
        state: Any,
        index: Any,
        recomputation: Recomputation,
        saved: list[Any],
        slices: Any,
        is_single: bool = False,
    ) -> Any:
        """One step: the residuals, the backward body, the update.

        Args:
            state: the backward carry and the stacks that are updated in place.
            index: the slice of the stacks that is at hand.
            recomputation: what it recomputes.
            saved: the forward carries that the recomputation starts from, and the residuals that the chunk has saved.
            slices: as of the method `slices`.
            is_single: its loop has no other step.

        Returns:
            The next state and one slice for each stack that is written.
        """
        cotangents, in_place = state
        of_saved, slices = slices
        update = self.plan.update
        starts = len(saved) if is_single else len(recomputation.carries)
        tied, cotangents = self.with_cotangents(saved[:starts], cotangents)
        saved = [*tied, *saved[starts:]]
        carries, residuals = saved[: len(recomputation.carries)], saved[len(recomputation.carries) :]
        overwritten = dict(zip(self.in_place.values(), in_place, strict=True))
        if self.plan.separate_slices:
            now = {stack: lax.optimization_barrier(slice_at(value, index)) for stack, value in overwritten.items()}
        else:
            now = {stack: self.slice_of(value, index) for stack, value in overwritten.items()}
        slices = slices | now
        forward = self.forward_environment(dict(zip(recomputation.carries, carries, strict=True)))
        forward |= of_saved | {value: slices[stack] for value, stack in self.of_forward.items()}
        forward |= dict(zip(recomputation.in_chunk, residuals, strict=True))
        backward = self.plan.constants(self.pair.backward, self.operands)
        backward |= dict(zip(self.pair.backward.body_carry, cotangents, strict=True))
        backward |= {value: slices[stack] for value, stack in self.of_backward.items()}
        next_carry, made = self.both_passes(recomputation, forward, backward)

        by_value = dict(zip(self.pair.backward.ys, made, strict=True))
        if update is not None:
            if not self.plan.separate_slices:
                # Read again for the update: the slices that the recomputation reads need not live until then.
                index_then, next_carry = lax.optimization_barrier((index, next_carry))
                slices |= {stack: slice_at(value, index_then) for stack, value in overwritten.items()}
            by_value |= {stack: at_once(slices[stack]) for stack in update.stacks}
            by_value |= {value: self.operands[value] for value in update.others}
            update_slices(self.plan.program, update, by_value)
        in_place = [
            lax.dynamic_update_index_in_dim(stack, by_value[value], index, 0)
            for value, stack in zip(self.in_place, in_place, strict=True)
        ]
        stacked = [by_value[value] for value in self.plan.stacked_results]
        return (next_carry, in_place), stacked

    def both_passes(
        self, recomputation: Recomputation, forward: dict[int, Any], backward: dict[int, Any]
    ) -> tuple[list[Any], list[Any]]:
        """What a step recomputes of the forward body, then the backward body, on the values of both that are there.

        Returns:
            The backward body's next carry and its slices of stacks.
        """
        loop = self.pair.backward
        if scheduled := self.plan.scheduled(recomputation):
            step, emit = scheduled
            made = emit([forward[v] if v < step.shift else backward[v - step.shift] for v in step.program.inputs])
        else:
            for values in (forward, backward):
                values |= {value: at_once(x) for value, x in values.items()}
            evaluate(self.pair.forward.body, recomputation.residuals.equations, forward, recomputed=True)
            for at, y in self.pair.consumed.items():
                backward[loop.body_xs[at]] = read(self.pair.forward.body_ys[y], forward)
            evaluate(loop.body, range(len(loop.body.equations)), backward)
            made = [read(atom, backward) for atom in loop.body.outputs]
        return made[: len(loop.body_carry)], made[len(loop.body_carry) :]

    def with_cotangents(self, carries: list[Any], cotangents: list[Any]) -> tuple[list[Any], list[Any]]:
        """Forward carries and their cotangents after one barrier.

        A loop of one step is inlined by compilers, which would then take what it recomputes from the forward pass, or
        recompute it long before its cotangents are there. What its chunk has saved of it goes through the barrier, too.
        Weights and sums of their gradients stay out: a barrier materialises what it covers.
        """
        shapes = {(aval.shape, aval.dtype) for aval in map(jax.typeof, map(at_once, carries))}
        waiting = [at for at, value in enumerate(cotangents) if (value.shape, value.dtype) in shapes]
        # Of a slice that can be read again its index goes through the barrier, and the slice need not be there.
        given = [carry.index if isinstance(carry, Slice) else carry for carry in carries]
        values = lax.optimization_barrier([*given, *(cotangents[at] for at in waiting)])
        tied = dict(zip(waiting, values[len(carries) :], strict=True))
        carries = [
            dataclasses.replace(carry, index=value) if isinstance(carry, Slice) else value
            for carry, value in zip(carries, values, strict=False)
        ]
        return carries, [tied.get(at, value) for at, value in enumerate(cotangents)]
