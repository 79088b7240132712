"""Moves the optimizer's update into the reverse loop.

If the stacked gradient of a stacked weight is only used elementwise, each step of the reverse loop can update the
parameter and the moments of its layer in place. The stack of gradients then never exists. This module finds the
equations that can move; `reverse.py` emits them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from jax import lax
from jax.extend.core import primitives as P

from remat_opt.loops.pairs import Pair
from remat_opt.trace import compat
from remat_opt.trace.avals import bytes_of
from remat_opt.trace.evaluation import bind, read
from remat_opt.trace.inline import Constant, Equation, Program
from remat_opt.trace.primitives import ELEMENTWISE, named

# Of what is elementwise by cost without what speaks of axes, and so cannot be applied to one slice.
_EACH_ELEMENT = ELEMENTWISE - named(
    "bitcast_convert_type broadcast_in_dim concatenate dynamic_slice iota pad reshape rev slice squeeze transpose"
)


@dataclasses.dataclass(frozen=True, eq=False)
class Update:
    """Equations that follow the backward scan and work on each of its stacked results' slices alone.

    Attributes:
        equations: indices of the program's equations that move into the loop, in program order.
        gradients: positions among the backward scan's `ys` that exist as slices only.
        stacks: values of the program that the equations read, slice by slice.
        others: values that they read as they are, the same in every step.
        results: values that they make and that are read outside, or that the program returns.
        in_place: for results that take a donated argument's place, that argument.
    """

    equations: tuple[int, ...]
    gradients: tuple[int, ...]
    stacks: tuple[int, ...]
    others: tuple[int, ...]
    results: tuple[int, ...]
    in_place: Mapping[int, int]


def find_update(
    program: Program, pair: Pair, aliases: Sequence[tuple[int, int]], pairs: Sequence[Pair] = ()
) -> Update | None:
    """What of a program can move into the backward scan of a pair; None where nothing would be gained.

    Args:
        program: the flat step.
        pair: the loops.
        aliases: (input, output) pairs of the program that share one buffer.
        pairs: all loops of the program; what needs results of two of them stays outside of both.
    """
    return _Search(program, pair, {output: given for given, output in aliases}, pairs).run()


class _Search:
    def __init__(self, program: Program, pair: Pair, given_of: dict[int, int], pairs: Sequence[Pair]):
        self.program = program
        self.pair = pair
        self.given_of = given_of
        self.returned = program.returned
        self.users = {value: set(readers) for value, readers in program.readers.items()}
        loops = {pair.backward_index, *(other.backward_index for other in pairs)}
        self.after_loops = self.dependent_on(loops)

    def dependent_on(self, loops: Collection[int]) -> set[int]:
        """Values that need the results of one of some equations, or of an effect that comes after this loop."""
        found: set[int] = set()
        for index, equation in enumerate(self.program.equations):
            late_effect = equation.effects and index > self.pair.backward_index
            if index in loops or late_effect or not found.isdisjoint(equation.reads):
                found.update(equation.outputs)
        return found

    def run(self) -> Update | None:
        gradients = {value for value in self.pair.backward.ys if self.users.get(value)}
        while gradients:
            region, made = self.grow(gradients)
            read_elsewhere = {g for g in gradients if g in self.returned or not self.users[g] <= region}
            if not read_elsewhere:
                region, gradients = self.worthwhile(region, made, gradients)
                return self.result(region, gradients) if gradients else None
            gradients -= read_elsewhere
        return None

    def grow(self, gradients: set[int]) -> tuple[set[int], set[int]]:
        """Equations that can be done on slices of the gradients, with what only feeds them, and what they make."""
        region: set[int] = set()
        made = set(gradients)
        for index in range(self.pair.backward_index + 1, len(self.program.equations)):
            equation = self.program.equations[index]
            if self.fits(equation, made) and not made.isdisjoint(equation.reads):
                region.add(index)
                made.update(equation.outputs)
        pending = list(region)
        while pending:
            for x in self.program.equations[pending.pop()].reads:
                index = self.program.producer.get(x)
                if x in made or index is None or x in self.after_loops or x in self.returned:
                    continue
                equation = self.program.equations[index]
                stacked = self.is_stack(x) and (self.fits(equation, made) or self.is_filled(equation))
                if stacked and self.users[x] <= region:
                    region.add(index)
                    made.update(equation.outputs)
                    pending.append(index)
        return region, made

    def is_stack(self, value: int) -> bool:
        shape = self.program.avals[value].shape
        return bool(shape) and shape[0] == self.pair.length

    def fits(self, equation: Equation, made: Collection[int]) -> bool:
        """Whether an equation can be applied to one slice of its operands."""
        if equation.primitive not in _EACH_ELEMENT or equation.effects or len(equation.outputs) != 1:
            return False
        if not self.is_stack(equation.outputs[0]):
            return False
        shape = self.program.avals[equation.outputs[0]].shape
        for x in equation.inputs:
            if isinstance(x, Constant):
                if np.ndim(x.value):
                    return False
                continue
            if x not in made and x in self.after_loops:
                return False  # it waits for another result of the loop
            if self.program.avals[x].shape not in ((), shape):
                return False
        return True

    def is_filled(self, equation: Equation) -> bool:
        """Whether an equation fills a stack with one number."""
        if equation.primitive is not P.broadcast_in_dim_p or len(equation.inputs) != 1:
            return False
        x = equation.inputs[0]
        return not (np.shape(x.value) if isinstance(x, Constant) else self.program.avals[x].shape)

    def worthwhile(self, region: set[int], made: set[int], gradients: set[int]) -> tuple[set[int], set[int]]:
        """The connected parts of the region that leave fewer bytes of stacks behind than they take away."""
        kept: set[int] = set()
        kept_gradients: set[int] = set()
        for part in self.connected(region, made):
            own = {g for g in gradients if self.users[g] & part}
            left = [v for v in self.results(part) if v not in self.returned]
            size = sum(bytes_of(self.program.avals[v]) for v in own)
            if size > sum(bytes_of(self.program.avals[v]) for v in left):
                kept |= part
                kept_gradients |= own
        return kept, kept_gradients

    def connected(self, region: set[int], made: set[int]) -> list[set[int]]:
        """The region in parts that have none of the values `made` in common."""
        parts: list[tuple[set[int], set[int]]] = []  # equations, and values that they make or read
        for index in sorted(region):
            equation = self.program.equations[index]
            joined, values = {index}, made.intersection((*equation.reads, *equation.outputs))
            others = []
            for part in parts:
                if values.isdisjoint(part[1]):
                    others.append(part)
                else:
                    joined |= part[0]
                    values |= part[1]
            parts = [*others, (joined, values)]
        return [equations for equations, _ in parts]

    def results(self, region: set[int]) -> list[int]:
        values = [v for index in sorted(region) for v in self.program.equations[index].outputs]
        return [v for v in values if v in self.returned or not self.users.get(v, set()) <= region]

    def result(self, region: set[int], gradients: set[int]) -> Update:
        inside = {v for index in region for v in self.program.equations[index].outputs} | gradients
        read_by = dict.fromkeys(x for index in sorted(region) for x in self.program.equations[index].reads)
        outside = [x for x in read_by if x not in inside]
        stacks = tuple(x for x in outside if self.is_stack(x))
        results = tuple(self.results(region))
        in_place = {}
        for value in results:
            given = self.given_of.get(value)
            if given in stacks and not any(self.reads_late(given, index, region) for index in self.users[given]):
                in_place[value] = given
        return Update(
            equations=tuple(sorted(region)),
            gradients=tuple(at for at, value in enumerate(self.pair.backward.ys) if value in gradients),
            stacks=stacks,
            others=tuple(x for x in outside if not self.is_stack(x)),
            results=results,
            in_place=in_place,
        )

    def reads_late(self, given: int, index: int, region: set[int]) -> bool:
        """Whether an equation reads a donated argument when the loop has overwritten it."""
        if index in region or index == self.pair.backward_index:
            return False
        return not self.after_loops.isdisjoint(self.program.equations[index].outputs)


def update_slices(program: Program, update: Update, environment: dict[int, Any]) -> None:
    """Evaluate an update's equations on one slice of each gradient and stack, and on the others as they are."""
    for index in update.equations:
        equation = program.equations[index]
        inputs = [read(atom, environment) for atom in equation.inputs]
        if equation.primitive is P.broadcast_in_dim_p:
            shape = program.avals[equation.outputs[0]].shape[1:]
            with compat.equation_context(equation.source_info, equation.context):
                results = [lax.broadcast_in_dim(inputs[0], shape, ())]
        else:
            results = bind(equation, inputs)
        environment.update(zip(equation.outputs, results, strict=True))
