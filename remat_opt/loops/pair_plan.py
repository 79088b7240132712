"""One pair of loops with all that was decided about it: what its two loops read, save and make when rewritten."""

from __future__ import annotations

import dataclasses
from typing import Any

from remat_opt.loops.body import Loop
from remat_opt.loops.choice import Chunks, LoopChoice
from remat_opt.loops.pairs import Pair
from remat_opt.loops.recomputation import JointStep, Recomputation, Recomputations, joint_step
from remat_opt.loops.steps import Emit, StepSearch
from remat_opt.loops.update import Update
from remat_opt.trace.evaluation import evaluate, read
from remat_opt.trace.inline import Constant, Program, values_among


@dataclasses.dataclass(frozen=True, eq=False)
class PairPlan:
    """One pair with all that was decided about it.

    Attributes:
        program: the flat step.
        pair: the loops.
        choice: what is to be done.
        repeats: what that means.
        update: what moves into the reverse loop, if anything.
        read_later: values of the program that somebody reads; what nobody reads is not written.
        separate_slices: see `rewrite_loops`.
        steps: schedules steps of the reverse loop, where the choice says so.
    """

    program: Program
    pair: Pair
    choice: LoopChoice
    repeats: Recomputations
    update: Update | None
    read_later: frozenset[int]
    separate_slices: bool = False
    steps: StepSearch | None = None

    def constants(self, loop: Loop, operands: dict[int, Any]) -> dict[int, Any]:
        """The constant operands of a loop by value of its body.

        Constants that depend on no input are recomputed in the body, where they fuse into their readers; an operand
        would be a live buffer for the whole loop.
        """
        fresh: dict[int, Any] = {}
        equations = self.program.slice_back(atom for atom in loop.constants if atom in self.program.constant).equations
        evaluate(self.program, equations, fresh)
        return {
            value: read(atom, operands if isinstance(atom, Constant) or atom not in fresh else fresh)
            for value, atom in zip(loop.body_constants, loop.constants, strict=True)
            if isinstance(atom, Constant) or atom in fresh or atom in operands
        }

    # The forward loop

    @property
    def forward_results(self) -> tuple[int, ...]:
        """Values of the program that the forward loop still makes."""
        loop = self.pair.forward
        ys = [loop.ys[y] for y in self.pair.kept_ys]
        return tuple(v for v in (*loop.last_carry, *ys) if v in self.read_later)

    @property
    def groups(self) -> tuple[Chunks, ...]:
        """Two levels: the chunks but the last one; none with one level."""
        return self.choice.groups(self.pair.length)

    @property
    def last_chunk(self) -> int:
        """Two levels: steps of the last chunk."""
        return self.choice.last_chunk(self.pair.length)

    @property
    def residuals_of_last_chunk(self) -> tuple[int, ...]:
        """Values of the forward body that the forward loop saves for the last chunk, but its last step."""
        return self.repeats.last_chunk.in_chunk if self.groups and self.last_chunk > 1 else ()

    # The reverse loop

    @property
    def stacked_results(self) -> tuple[int, ...]:
        """Values of the program that the reverse loop writes slice by slice to new stacks."""
        update, ys = self.update, self.pair.backward.ys
        gone = {ys[y] for y in update.gradients} if update else set()
        new = [value for value in update.results if value not in update.in_place] if update else []
        return (*(value for value in ys if value not in gone and value in self.read_later), *new)

    @property
    def reverse_results(self) -> tuple[int, ...]:
        """Values of the program that the reverse loop makes."""
        last = [value for value in self.pair.backward.last_carry if value in self.read_later]
        return (*last, *self.stacked_results, *(self.update.in_place if self.update else ()))

    @property
    def reverse_operands(self) -> tuple[int, ...]:
        """Values of the program that the reverse loop reads, in addition to what the forward loop hands over."""
        forward, backward = self.pair.forward, self.pair.backward
        reads = self.repeats.reads
        own_xs = [x for at, x in enumerate(backward.xs) if at not in self.pair.consumed]
        constants = [*backward.constants]
        constants += [a for a, v in zip(forward.constants, forward.body_constants, strict=True) if v in reads]
        atoms = [a for a in constants if a not in self.program.constant]
        atoms += [*backward.first_carry, *own_xs]
        atoms += [a for a, v in zip(forward.xs, forward.body_xs, strict=True) if v in reads]
        atoms += [forward.ys[y] for y in self.repeats.stacked.values()]
        if self.update:
            atoms += [*self.update.stacks, *self.update.others]
        return tuple(values_among(atoms))

    def scheduled(self, recomputation: Recomputation) -> tuple[JointStep, Emit] | None:
        """A step of the reverse loop as the choice has it scheduled; None leaves it in its own order."""
        if self.choice.step_bytes is None or self.steps is None:
            return None
        step = joint_step(self.pair, recomputation, self.program)
        is_alone = recomputation is self.repeats.alone
        cost = self.steps.costs(step).chosen(self.choice.step_bytes, is_alone=is_alone)
        emit = self.steps.written(step, cost.peak)
        return (step, emit) if emit else None
