"""What a choice means for a pair: which stacks exist, and what each step of the reverse loop recomputes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from remat_opt.loops.body import Atom, Loop
from remat_opt.loops.choice import LoopChoice
from remat_opt.loops.pairs import Pair
from remat_opt.trace.inline import BackwardSlice, Constant, Equation, Program, values_among


@dataclasses.dataclass(frozen=True, eq=False)
class Recomputation:
    """What some steps of the reverse loop have and recompute, in terms of the forward body.

    Attributes:
        residuals: the equations that make the residuals of a step.
        carries: positions of the carries that these start from.
        forward: two levels: the equations of a step of the recomputed forward loop of a chunk, which makes the carries
            of all steps, and `in_chunk`.
        forward_carries: two levels: positions of the carries of that loop; the first ones of each chunk are saved.
        saved: values that the forward loop stacks in addition to the carries.
        stacked: values whose stacks are there anyway, with their position among the forward scan's `ys`.
        in_chunk: two levels: values that the recomputed forward loop stacks in addition to the carries.
    """

    residuals: BackwardSlice
    carries: tuple[int, ...]
    forward: BackwardSlice
    forward_carries: tuple[int, ...]
    saved: tuple[int, ...]
    stacked: dict[int, int]
    in_chunk: tuple[int, ...] = ()

    @property
    def reads(self) -> frozenset[int]:
        """Values of the forward body that are there before a step."""
        return self.residuals.reads | self.forward.reads


@dataclasses.dataclass(frozen=True, eq=False)
class Recomputations:
    """What is saved from the forward to the reverse loop, and what each group of steps recomputes.

    Attributes:
        alone: of a step whose residuals were not saved in its chunk: the last one of each chunk, and all of one level.
        of_group: two levels: of the other steps, for each group of `LoopChoice.groups`.
    """

    alone: Recomputation
    of_group: tuple[Recomputation, ...]

    @property
    def all(self) -> tuple[Recomputation, ...]:
        return (self.alone, *self.of_group)

    @property
    def last_chunk(self) -> Recomputation:
        """Of the last chunk: what its group saves in a chunk the forward loop saves."""
        return self.of_group[-1] if self.of_group else self.alone

    @property
    def saved(self) -> tuple[int, ...]:
        """Values that the forward loop stacks in addition to the carries."""
        return tuple(sorted({value for one in self.all for value in one.saved}))

    @property
    def stacked(self) -> dict[int, int]:
        """Values whose stacks are there anyway, with their position among the forward scan's `ys`."""
        return {value: y for one in self.all for value, y in one.stacked.items()}

    @property
    def reads(self) -> frozenset[int]:
        """Values of the forward body that some step reads."""
        return frozenset().union(*(one.reads for one in self.all))


def recomputations(pair: Pair, choice: LoopChoice) -> Recomputations:
    """Work out what a choice saves and recomputes."""
    if choice.chunk is None:
        return Recomputations(recomputation(pair, choice.saved), ())
    in_chunks = [chunks.in_chunk for chunks in choice.groups(pair.length)]
    of = {one: recomputation(pair, choice.saved, one) for one in {frozenset(), *in_chunks}}
    return Recomputations(of[frozenset()], tuple(of[one] for one in in_chunks))


def recomputation(
    pair: Pair, saved: frozenset[int] = frozenset(), in_chunk: frozenset[int] | None = None
) -> Recomputation:
    """Work out what some steps have and recompute.

    Args:
        pair: the loops.
        saved: values that the forward loop stacks, where they are needed.
        in_chunk: values that their chunk stacks, where they are needed; None for one level.
    """
    loop = pair.forward
    available = {*saved, *pair.stacked, *pair.never_repeated}
    of_chunk = in_chunk or frozenset()
    residuals = loop.body.slice_back(pair.residuals, available | of_chunk)
    held = tuple(sorted(residuals.reads & of_chunk - available))
    carries = _carries(pair, residuals.reads - available)
    reads = set(residuals.reads)
    forward, forward_carries = BackwardSlice((), frozenset()), ()
    if in_chunk is not None and (carries or held):
        wanted = set(carries)
        if held:  # a chunk's last step starts from carries alone
            wanted.update(_carries(pair, loop.body.slice_back(pair.residuals, available).reads - available))
        while True:
            forward = loop.body.slice_back([*(loop.next_carry[at] for at in sorted(wanted)), *held], available)
            more = wanted.union(_carries(pair, forward.reads - available))
            if more == wanted:
                break
            wanted = more
        forward_carries = tuple(sorted(wanted))
        reads |= forward.reads
    stacked = {value: y for value, y in pair.stacked.items() if value in reads}
    needed = tuple(sorted((reads & available) - stacked.keys()))
    return Recomputation(residuals, carries, forward, forward_carries, needed, stacked, held)


def _carries(pair: Pair, reads: Iterable[int]) -> tuple[int, ...]:
    reads = set(reads)
    return tuple(at for at, value in enumerate(pair.forward.body_carry) if value in reads)


@dataclasses.dataclass(frozen=True, eq=False)
class JointStep:
    """One step of the reverse loop: what is recomputed of the forward body, then the backward body.

    Attributes:
        program: its inputs are what the step reads of stacks, carries and constants, but for values that depend on no
            input of the whole step: it makes these itself.
        shift: values of the backward body have their number there plus this one, values of the forward body their own.
        overwritten: for each input whether its buffer may be reused: the cotangents' may.
        held: what it returns in addition to the cotangents for the step before: gradients, which wait for their update.
        recomputes_all: whether nothing but carries was saved for it.
    """

    program: Program
    shift: int
    overwritten: tuple[bool, ...]
    held: frozenset[int]
    recomputes_all: bool


def joint_step(pair: Pair, recomputed: Recomputation, program: Program) -> JointStep:
    """One step of the reverse loop as a program."""
    forward, backward = pair.forward.body, pair.backward.body
    shift = len(forward.avals)
    first = shift + len(backward.avals)  # of the program's own values
    instead = _made_inside(pair.forward, program, 0, first) | _made_inside(pair.backward, program, shift, first)
    for at, y in pair.consumed.items():
        atom = pair.forward.body_ys[y]
        instead[pair.backward.body_xs[at] + shift] = atom if isinstance(atom, Constant) else instead.get(atom, atom)

    own = [value + shift for at, value in enumerate(pair.backward.body_xs) if at not in pair.consumed]
    there = {*recomputed.saved, *recomputed.stacked, *recomputed.in_chunk}
    given = {*recomputed.residuals.reads, *(value for value in pair.residuals if value in there)}
    # What is there already, and an equation that is recomputed for another of its results makes a second time.
    given -= {value for index in recomputed.residuals.equations for value in forward.equations[index].outputs}
    cotangents = [value + shift for value in pair.backward.body_carry]
    constants = [value + shift for value in pair.backward.body_constants]
    joint = Program(
        avals=(*forward.avals, *backward.avals, *program.avals),
        inputs=tuple(value for value in (*sorted(given), *constants, *cotangents, *own) if value not in instead),
        constants=(*forward.constants, *((value + shift, constant) for value, constant in backward.constants)),
        equations=(
            *_made(instead, program, first),
            *(_placed(forward.equations[index], 0, instead) for index in recomputed.residuals.equations),
            *(_placed(equation, shift, instead) for equation in backward.equations),
        ),
        outputs=tuple(_moved(x, shift, instead) for x in backward.outputs),
        marks=program.marks,
    )
    recomputes_all = not recomputed.saved and not recomputed.in_chunk
    held = {x for x in joint.outputs[len(cotangents) :] if isinstance(x, int)} - {*joint.outputs[: len(cotangents)]}
    overwritten = tuple(value in cotangents for value in joint.inputs)
    return JointStep(joint, shift, overwritten, frozenset(held), recomputes_all)


def forward_step(pair: Pair, equations: Iterable[int], stored: Iterable[Atom], program: Program) -> Program:
    """Some equations of the forward body as a program that returns what is stored; its inputs as of `JointStep`."""
    body, first = pair.forward.body, len(pair.forward.body.avals)
    instead = _made_inside(pair.forward, program, 0, first)
    placed = [*_made(instead, program, first), *(_placed(body.equations[index], 0, instead) for index in equations)]
    outputs = tuple(_moved(x, 0, instead) for x in stored)
    made = {value for equation in placed for value in equation.outputs}.union(value for value, _ in body.constants)
    read = values_among([*(x for equation in placed for x in equation.inputs), *outputs])
    return Program(
        avals=(*body.avals, *program.avals),
        inputs=tuple(value for value in dict.fromkeys(read) if value not in made),
        constants=body.constants,
        equations=tuple(placed),
        outputs=outputs,
        marks=program.marks,
    )


def _made_inside(loop: Loop, program: Program, start: int, first: int) -> dict[int, Atom]:
    """For the constants of a body that depend on no input of the whole step what they are there."""
    instead: dict[int, Atom] = {}
    for value, atom in zip(loop.body_constants, loop.constants, strict=True):
        if isinstance(atom, Constant):
            instead[value + start] = atom
        elif atom in program.constant:
            instead[value + start] = first + atom
    return instead


def _made(instead: dict[int, Atom], program: Program, first: int) -> list[Equation]:
    """The equations of the whole step that make them."""
    fresh = (atom - first for atom in instead.values() if isinstance(atom, int))
    made = program.slice_back(value for value in fresh if value in program.constant).equations
    return [_placed(program.equations[index], first, instead) for index in made]


def _placed(equation: Equation, start: int, instead: dict[int, Atom]) -> Equation:
    inputs = tuple(_moved(x, start, instead) for x in equation.inputs)
    return dataclasses.replace(equation, inputs=inputs, outputs=tuple(x + start for x in equation.outputs))


def _moved(atom: Atom, start: int, instead: dict[int, Atom]) -> Atom:
    return atom if isinstance(atom, Constant) else instead.get(atom + start, atom + start)
