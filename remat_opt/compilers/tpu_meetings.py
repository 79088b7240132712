"""Elementwise work on a TPU where arrays meet that lie otherwise.

What a loop has stacked of images lies with each turn's rows and columns outside of the tiles, so that a batch of eight
and more is in their sublanes; what a program is given lies with the columns there. XLA lets elementwise work on both
lie as either: what reads the stack itself lies as that does, and so does what reads zeros, as the stack began as these;
all else lies as the other array. A kernel reads arrays that lie otherwise, but stores none, so that whatever is read
across is stored, however little arithmetic it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import TYPE_CHECKING

from jax.extend.core import Primitive
from jax.extend.core import primitives as P

from remat_opt.graph.graph import Kind
from remat_opt.graph.tiles import SUBLANES
from remat_opt.program import compat
from remat_opt.program.images import elementwise_images
from remat_opt.program.inline import Constant, Equation, Program
from remat_opt.program.masks import is_zero
from remat_opt.program.primitives import ELEMENTWISE, RESHAPING

if TYPE_CHECKING:
    from remat_opt.compilers.tpu_reader import TpuReader


def with_meetings(reader: TpuReader, stacks: Set[int]) -> Set[int]:
    """Have a reader's ops store what elementwise work makes of stacks of images and of what lies otherwise, and others
    read across. Returns what of it lies as the stacks."""
    program = reader.program
    stacks, given = _behind_barriers(program, stacks), _as_given(program)
    shapes = {program.avals[stack].shape for stack in stacks if _lies_apart(program.avals[stack].shape)}
    stored, alike, same = set[int](), set[int](), dict[int, int]()
    for shape in shapes:
        work = [equation for equation in program.equations if _is_work(equation, program, shape)]
        for part in _connected(work, program):
            read = {x for equation in part for x in _arrays(equation, program)}
            if stacks.isdisjoint(read):
                continue
            if given.isdisjoint(read):
                alike.update(value for equation in part for value in equation.outputs)
                continue
            unchanged = _unchanged(part)
            same.update(unchanged)
            as_stacks = _lying_as_stacks(part, program, stacks, given, unchanged)
            stored |= _read_across(part, program, as_stacks, unchanged)
            alike |= as_stacks
    if not stored:
        return alike
    for at, op in enumerate(reader.ops):
        if op.kind is Kind.ELEMENTWISE:
            read = (reader.behind([same[value]]) if value in same else (value,) for value in op.inputs)
            inputs = tuple(dict.fromkeys(buffer for buffers in read for buffer in buffers))
            reader.ops[at] = op.but(inputs=inputs, repeatable=op.repeatable and stored.isdisjoint(op.outputs))
    return alike


def _lies_apart(shape: tuple[int, ...]) -> bool:
    """Whether a stack of images of this shape has the batch, and not the columns, in the sublanes."""
    return len(shape) > 4 and shape[1] >= SUBLANES


def _is_work(equation: Equation, program: Program, shape: tuple[int, ...]) -> bool:
    is_spread = equation.primitive is P.broadcast_in_dim_p
    return equation.primitive in ELEMENTWISE and not is_spread and program.avals[equation.outputs[0]].shape == shape


def _unchanged(work: list[Equation]) -> Mapping[int, int]:
    """What is another value but for zeros that are added, or signs that are changed twice: that value."""
    same: dict[int, int] = {}
    negated: dict[int, int] = {}
    for equation in work:
        (first, *others), (result, *_) = equation.inputs, equation.outputs
        if not isinstance(first, int):
            continue
        first = same.get(first, first)
        if equation.primitive in (P.add_p, P.sub_p) and is_zero(others[0]):
            same[result] = first
        elif equation.primitive is P.neg_p and first in negated:
            same[result] = negated[first]
        elif equation.primitive is P.neg_p:
            negated[result] = first
    return same


def _connected(work: list[Equation], program: Program) -> list[list[Equation]]:
    """The work in parts that have no array in common."""
    connected, seen = elementwise_images(program), set[int]()
    parts: list[list[Equation]] = []
    for equation in work:
        if seen.isdisjoint(equation.outputs):
            group = connected(equation.outputs)
            parts.append([one for one in work if not group.isdisjoint(one.outputs)])
            seen |= group
    return parts


def _arrays(equation: Equation, program: Program) -> list[int]:
    """Operands of an equation as large as its result."""
    shape = program.avals[equation.outputs[0]].shape
    return [x for x in equation.inputs if isinstance(x, int) and program.avals[x].shape == shape]


def _as_given(program: Program) -> frozenset[int]:
    """A program's arguments, also with other shapes and behind barriers."""
    return _behind_barriers(program, program.inputs, RESHAPING | {P.transpose_p})


def _behind_barriers(program: Program, values: Iterable[int], others: Set[Primitive] = frozenset()) -> frozenset[int]:
    """Values, also behind barriers, and behind other equations of one operand."""
    found = set(values)
    for equation in program.equations:
        if equation.primitive is compat.barrier_p:
            found.update(made for x, made in zip(equation.inputs, equation.outputs, strict=True) if x in found)
        elif equation.primitive in others:
            found.update(equation.outputs if equation.inputs[0] in found else ())
    return frozenset(found)


def _lying_as_stacks(
    meeting: list[Equation], program: Program, stacks: Set[int], given: Set[int], same: Mapping[int, int]
) -> set[int]:
    """What is made of stacks themselves, or of zeros and other numbers than truths, and not of what is given."""
    zeros = {e.outputs[0] for e in program.equations if e.primitive is P.broadcast_in_dim_p and is_zero(e.inputs[0])}
    found: set[int] = set()
    for equation in meeting:
        read = {same.get(x, x) for x in _arrays(equation, program)}
        has_zeros = any(is_zero(x) if isinstance(x, Constant) else x in zeros for x in equation.inputs)
        has_numbers = any(program.avals[x].dtype != bool and x not in zeros for x in read)
        is_alike = not stacks.isdisjoint(read) or (has_zeros and has_numbers)
        if is_alike and given.isdisjoint(read) and equation.outputs[0] not in same:
            found.update(equation.outputs)
    return found


def _read_across(meeting: list[Equation], program: Program, as_stacks: Set[int], same: Mapping[int, int]) -> set[int]:
    """What is made in a meeting and read by work of which the result lies otherwise."""
    found: set[int] = set()
    made = {value for equation in meeting for value in equation.outputs}
    for equation in meeting:
        if equation.outputs[0] not in same:
            read = {same.get(x, x) for x in _arrays(equation, program)}
            found |= {x for x in read & made if (x in as_stacks) != (equation.outputs[0] in as_stacks)}
    return found
