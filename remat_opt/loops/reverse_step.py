"""One step of a reverse loop: its residuals again, the backward body, the optimizer's update."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from remat_opt.loops.body import evaluate, read
from remat_opt.loops.pair_plan import PairPlan
from remat_opt.loops.recomputation import Recomputation
from remat_opt.loops.stacks import slice_as_written, slice_at
from remat_opt.loops.update import update_slices
from remat_opt.rewrites.slices import Slice, at_once


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
        # All stacks that are read one slice a step, by what the slice stands for in the environments of a step.
        reads = plan.repeats.reads
        self.forward_stacks: dict[int, Any] = dict(zip(plan.repeats.saved, saved, strict=True))
        self.forward_stacks |= {value: operands[forward.ys[y]] for value, y in plan.repeats.given.items()}
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
        update = plan.update
        self.update_stacks = {v: operands[v] for v in update.stacks if v not in self.overwritten} if update else {}

    @property
    def first_state(self) -> tuple[list[Any], list[Any]]:
        backward = [read(atom, self.operands) for atom in self.pair.backward.first_carry]
        return backward, [self.operands[given] for given in self.in_place.values()]

    @property
    def stacks(self) -> tuple[dict[int, Any], ...]:
        return self.forward_stacks, self.backward_stacks, self.update_stacks

    @property
    def is_scheduled(self) -> bool:
        """Whether steps have a schedule of their own, in which slices may be read more than once."""
        return self.plan.choice.step_bytes is not None

    def slices(self, index: Any) -> list[dict[int, Any]]:
        """This step's slice of each of `stacks`."""
        return [{v: self.slice_of(stack, index) for v, stack in stacks.items()} for stacks in self.stacks]

    def slice_of(self, stack: Any, index: Any, read: Callable[[Any, Any], Any] = slice_at) -> Any:
        """A step's slice of a stack; of a stack of one slice that slice, whatever the index, as compilers see it."""
        found = Slice(functools.partial(read, stack), index)
        return found if self.is_scheduled and stack.shape[0] > 1 else found.now()

    def residuals_at(self, stacks: Sequence[Any], step: Any) -> list[Any]:
        """What a chunk keeps of one of its steps, beside its carry."""
        return [self.slice_of(stack, step, slice_as_written) for stack in stacks]

    def forward_environment(self, carry: dict[int, Any]) -> dict[int, Any]:
        """Constants and some carries of the forward body."""
        forward = self.pair.forward
        constants = self.plan.constants(forward, self.operands)
        return constants | {forward.body_carry[at]: value for at, value in carry.items()}

    def run(
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
        if self.plan.separate_slices:
            given_now = {given: lax.optimization_barrier(slice_at(stack, index)) for given, stack in stacks}
        else:
            given_now = {given: self.slice_of(stack, index) for given, stack in stacks}
        again = self.forward_environment(dict(zip(kept.carries, carries, strict=True)))
        again |= of_forward | {v: given_now[a] for v, a in self.forward_in_place.items()}
        again |= dict(zip(kept.in_chunk, residuals, strict=True))
        environment = self.plan.constants(self.pair.backward, self.operands)
        environment |= dict(zip(self.pair.backward.body_carry, cotangents, strict=True))
        environment |= of_backward | {v: of_forward[shared] for v, shared in self.shared.items()}
        environment |= {v: given_now[a] for v, a in self.backward_in_place.items()}
        next_carry, made = self.both_passes(kept, again, environment)

        by_value = dict(zip(self.pair.backward.ys, made, strict=True))
        update = self.plan.update
        if update is not None:
            if not self.plan.separate_slices:
                # Read again for the update: the slices that the recomputation reads need not live until then.
                index_then, next_carry = lax.optimization_barrier((index, next_carry))
                given_now = {g: slice_at(s, index_then) for g, s in zip(self.in_place.values(), in_place, strict=True)}
            by_value |= {v: at_once(x) for v, x in (given_now | of_update).items()}
            by_value |= {v: self.operands[v] for v in update.others}
            update_slices(self.plan.program, update, by_value)
        in_place = [
            lax.dynamic_update_index_in_dim(stack, by_value[value], index, 0)
            for value, stack in zip(self.in_place, in_place, strict=True)
        ]
        stacked = [by_value[value] for value in self.plan.stacked_results]
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
        scheduled = self.plan.scheduled(kept)
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
        """Forward carries and their cotangents behind one barrier.

        A loop of one step is inlined by compilers, which would then take what it recomputes from the forward pass, or
        recompute it long before its cotangents are there. What its chunk has kept of it goes through the barrier, too.
        Weights and sums of their gradients stay out: a barrier materialises what it covers.
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
