"""What a choice means for a pair: which stacks exist, what each step of the reverse loop computes again."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from remat_opt.loops.body import Atom, Slice, slice_back
from remat_opt.loops.choice import LoopChoice
from remat_opt.loops.pairs import Pair
from remat_opt.program.inline import Constant, Program


@dataclasses.dataclass(frozen=True, eq=False)
class Recomputation:
    """What is kept from the forward to the reverse loop, in terms of the forward body.

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


def recomputation(pair: Pair, choice: LoopChoice) -> Recomputation:
    """Work out what a choice keeps and repeats."""
    loop = pair.forward
    available = {*choice.saved, *pair.given, *pair.never_repeated}
    again = slice_back(loop, pair.residuals, available | choice.in_chunk)
    in_chunk = tuple(sorted(again.reads & choice.in_chunk - available))
    carries = _carries(pair, again.reads - available)
    reads = set(again.reads)
    advance, advanced = Slice((), frozenset()), ()
    if choice.chunk is not None and (carries or in_chunk):
        wanted = set(carries)
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


def joint_step(pair: Pair, again: Recomputation) -> Program:
    """One step of the reverse loop as a program: what is repeated of the forward body, then the backward body.

    Its inputs are what the step reads of stacks, carries and constants.
    """
    forward, backward = pair.forward.body, pair.backward.body
    shift = len(forward.avals)
    number: dict[int, Atom] = {value: value + shift for value in range(len(backward.avals))}
    for at, y in pair.consumed.items():
        number[pair.backward.body_xs[at]] = pair.forward.body_ys[y]

    def renumbered(atom: Atom) -> Atom:
        return atom if isinstance(atom, Constant) else number[atom]

    equations = [forward.equations[index] for index in again.again.equations]
    for equation in backward.equations:
        outputs = tuple(value + shift for value in equation.outputs)
        equations.append(dataclasses.replace(equation, inputs=tuple(map(renumbered, equation.inputs)), outputs=outputs))
    own = [value for at, value in enumerate(pair.backward.body_xs) if at not in pair.consumed]
    there = {*again.saved, *again.given, *again.in_chunk}
    given = {*again.again.reads, *(value for value in pair.residuals if value in there)}
    # What is there already, and an equation that is repeated for another of its results makes again.
    given -= {value for index in again.again.equations for value in forward.equations[index].outputs}
    return Program(
        avals=(*forward.avals, *backward.avals),
        inputs=(
            *sorted(given),
            *(value + shift for value in (*pair.backward.body_constants, *pair.backward.body_carry, *own)),
        ),
        constants=(*forward.constants, *((value + shift, constant) for value, constant in backward.constants)),
        equations=tuple(equations),
        outputs=tuple(map(renumbered, backward.outputs)),
    )
