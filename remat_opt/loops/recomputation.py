"""What a choice means for a pair: which stacks exist, and what each step of the reverse loop recomputes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from remat_opt.loops.body import Atom, Slice, slice_back
from remat_opt.loops.choice import LoopChoice
from remat_opt.loops.constants import constant_equations, equations_for
from remat_opt.loops.pairs import Pair
from remat_opt.trace.inline import Constant, Equation, Program


@dataclasses.dataclass(frozen=True, eq=False)
class Recomputation:
    """What some steps of the reverse loop have and repeat, in terms of the forward body.

    Attributes:
        again: the equations that a step of the reverse loop repeats to have its residuals.
        carries: positions of the carries that `again` starts from.
        advance: two levels: the equations that a chunk repeats to have the carries of all of its steps, and `in_chunk`.
        advanced: two levels: positions of the carries that are handed on so; the first ones of each chunk are kept.
        saved: values whose stacks are written beside the carries.
        given: values whose stacks are there anyway, with their position among the forward scan's `ys`.
        in_chunk: two levels: values that a chunk stacks, beside the carries, while it advances.
    """

    again: Slice
    carries: tuple[int, ...]
    advance: Slice
    advanced: tuple[int, ...]
    saved: tuple[int, ...]
    given: dict[int, int]
    in_chunk: tuple[int, ...] = ()

    @property
    def reads(self) -> frozenset[int]:
        """Values of the forward body that are there before a step."""
        return self.again.reads | self.advance.reads


@dataclasses.dataclass(frozen=True, eq=False)
class Recomputations:
    """What is kept from the forward to the reverse loop, and what each group of steps repeats.

    Attributes:
        alone: of a step whose residuals were not kept in its chunk: the last one of each chunk, and all of one level.
        of_group: two levels: of the other steps, for each group of `LoopChoice.groups`.
        saved: values whose stacks are written beside the carries, by any of them.
        given: values whose stacks are there anyway, with their position among the forward scan's `ys`.
        reads: values of the forward body that some step reads.
    """

    alone: Recomputation
    of_group: tuple[Recomputation, ...]

    @property
    def all(self) -> tuple[Recomputation, ...]:
        return (self.alone, *self.of_group)

    @property
    def last_chunk(self) -> Recomputation:
        """Of the steps that are turned round at once: what their group keeps in a chunk the forward loop keeps."""
        return self.of_group[-1] if self.of_group else self.alone

    @property
    def saved(self) -> tuple[int, ...]:
        return tuple(sorted({value for one in self.all for value in one.saved}))

    @property
    def given(self) -> dict[int, int]:
        return {value: y for one in self.all for value, y in one.given.items()}

    @property
    def reads(self) -> frozenset[int]:
        return frozenset().union(*(one.reads for one in self.all))


def recomputations(pair: Pair, choice: LoopChoice) -> Recomputations:
    """Work out what a choice keeps and repeats."""
    if choice.chunk is None:
        return Recomputations(recomputation(pair, choice), ())
    kept = {frozenset[int](): recomputation(pair, LoopChoice(choice.saved, chunk=1))}
    for chunks in (groups := choice.groups(pair.length)):
        if chunks.in_chunk not in kept:
            kept[chunks.in_chunk] = recomputation(pair, LoopChoice(choice.saved, chunk=1, in_chunk=chunks.in_chunk))
    return Recomputations(kept[frozenset()], tuple(kept[chunks.in_chunk] for chunks in groups))


def recomputation(pair: Pair, choice: LoopChoice) -> Recomputation:
    """Work out what the steps of a choice's main chunks have and repeat."""
    loop = pair.forward
    available = {*choice.saved, *pair.given, *pair.never_repeated}
    again = slice_back(loop, pair.residuals, available | choice.in_chunk)
    in_chunk = tuple(sorted(again.reads & choice.in_chunk - available))
    carries = _carries(pair, again.reads - available)
    reads = set(again.reads)
    advance, advanced = Slice((), frozenset()), ()
    if choice.chunk is not None and (carries or in_chunk):
        wanted = set(carries)
        if in_chunk:  # a chunk's last step starts from carries alone
            wanted.update(_carries(pair, slice_back(loop, pair.residuals, available).reads - available))
        while True:
            advance = slice_back(loop, [*(loop.next_carry[at] for at in sorted(wanted)), *in_chunk], available)
            more = wanted.union(_carries(pair, advance.reads - available))
            if more == wanted:
                break
            wanted = more
        advanced = tuple(sorted(wanted))
        reads |= advance.reads
    given = {value: y for value, y in pair.given.items() if value in reads}
    saved = tuple(sorted((reads & available) - given.keys()))
    return Recomputation(again, carries, advance, advanced, saved, given, in_chunk)


def _carries(pair: Pair, reads: Iterable[int]) -> tuple[int, ...]:
    reads = set(reads)
    return tuple(at for at, value in enumerate(pair.forward.body_carry) if value in reads)


@dataclasses.dataclass(frozen=True, eq=False)
class JointStep:
    """One step of the reverse loop: what is repeated of the forward body, then the backward body.

    Attributes:
        program: its inputs are what the step reads of stacks, carries and constants, but for values that depend on no
            input of the whole step: it makes these itself.
        shift: values of the backward body have their number there plus this one, values of the forward body their own.
        overwritten: for each input whether its buffer may be reused: the cotangents' may.
        held: what it returns beside the cotangents for the step before: gradients, which wait for their update.
        repeats_all: whether nothing but carries was kept for it.
    """

    program: Program
    shift: int
    overwritten: tuple[bool, ...]
    held: frozenset[int]
    repeats_all: bool


def joint_step(pair: Pair, again: Recomputation, program: Program) -> JointStep:
    """One step of the reverse loop as a program.

    Args:
        pair: the loops.
        again: what the step repeats.
        program: that the loops are part of.
    """
    forward, backward = pair.forward.body, pair.backward.body
    shift = len(forward.avals)
    known = constant_equations(program)
    first = shift + len(backward.avals)  # of the program's own values
    instead: dict[int, Atom] = {}
    for loop, start in ((pair.forward, 0), (pair.backward, shift)):
        for value, atom in zip(loop.body_constants, loop.constants, strict=True):
            if isinstance(atom, Constant):
                instead[value + start] = atom
            elif atom in known:
                instead[value + start] = first + atom
    for at, y in pair.consumed.items():
        atom = pair.forward.body_ys[y]
        instead[pair.backward.body_xs[at] + shift] = atom if isinstance(atom, Constant) else instead.get(atom, atom)

    def placed(equation: Equation, start: int) -> Equation:
        inputs = tuple(x if isinstance(x, Constant) else instead.get(x + start, x + start) for x in equation.inputs)
        return dataclasses.replace(equation, inputs=inputs, outputs=tuple(x + start for x in equation.outputs))

    own = [value + shift for at, value in enumerate(pair.backward.body_xs) if at not in pair.consumed]
    there = {*again.saved, *again.given, *again.in_chunk}
    given = {*again.again.reads, *(value for value in pair.residuals if value in there)}
    # What is there already, and an equation that is repeated for another of its results makes again.
    given -= {value for index in again.again.equations for value in forward.equations[index].outputs}
    cotangents = [value + shift for value in pair.backward.body_carry]
    constants = [value + shift for value in pair.backward.body_constants]
    made = equations_for(program, known, (x - first for x in instead.values() if not isinstance(x, Constant)))
    joint = Program(
        avals=(*forward.avals, *backward.avals, *program.avals),
        inputs=tuple(value for value in (*sorted(given), *constants, *cotangents, *own) if value not in instead),
        constants=(*forward.constants, *((value + shift, constant) for value, constant in backward.constants)),
        equations=(
            *(placed(program.equations[index], first) for index in made),
            *(placed(forward.equations[index], 0) for index in again.again.equations),
            *(placed(equation, shift) for equation in backward.equations),
        ),
        outputs=tuple(x if isinstance(x, Constant) else instead.get(x + shift, x + shift) for x in backward.outputs),
        marks=program.marks,
    )
    repeats_all = not again.saved and not again.in_chunk
    held = {x for x in joint.outputs[len(cotangents) :] if isinstance(x, int)} - {*joint.outputs[: len(cotangents)]}
    overwritten = tuple(value in cotangents for value in joint.inputs)
    return JointStep(joint, shift, overwritten, frozenset(held), repeats_all)
