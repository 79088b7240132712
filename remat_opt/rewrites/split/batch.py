"""Finds the batch among the arguments of a program, and writes the program split into chunks of it.

The batch is an axis of an argument. It is not told which: every axis of every argument that is no state is tried, and
the one is taken along which most bytes of the program can be split. Other arguments that are read row by row with it
(labels, masks) are found on the way.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from remat_opt.rewrites.split.analysis import Analysis, analyse
from remat_opt.rewrites.split.bodies import BODIES
from remat_opt.rewrites.split.devices import Devices, NotDivisible, devices_of
from remat_opt.rewrites.split.layouts import Context
from remat_opt.rewrites.split.rules import RULES
from remat_opt.rewrites.split.stages import Stages, making_rows_again, put_in_stages, reads
from remat_opt.rewrites.split.write import write_chunks
from remat_opt.trace import compat
from remat_opt.trace.flops import flops_of
from remat_opt.trace.inline import Equation, Program
from remat_opt.trace.primitives import ELEMENTWISE

LEAST_SHARE = 0.1  # of the bytes of all values, that have to gain by a split
ENOUGH_SHARE = 0.4  # of these bytes: with such a gain no other arguments are tried
MOST_WHOLE = 0.03  # rows passed between loops are recomputed if they reach this share of the bytes of all values
# Share of the step's FLOPs that recomputing rows may take: enough for a forward pass, too little for recomputing each
# layer for every later one.
MOST_AGAIN = 0.5
SMALL_SHARE = 0.01  # of the bytes in the largest loop: a loop of fewer runs on the whole batch


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """The batch of a program.

    Attributes:
        rows: how many rows it has.
        arguments: the program's inputs that are split, by position, each with its axis.
        stages: the loops and what is between them.
        shardings: of the program's inputs; None for one that is not known, or on one device.
    """

    rows: int
    arguments: tuple[tuple[int, int], ...]
    stages: Stages
    shardings: Sequence[Any] = ()

    @property
    def program(self) -> Program:
        """The program, as it was."""
        return self.stages.analysis.program

    @functools.cached_property
    def held_bytes(self) -> int:
        """Bytes of the rows that stay inside the largest loop; k chunks need 1/k of them."""
        return max(self.stages.held_in_loops, default=0)

    @property
    def gain(self) -> int:
        """`held_bytes` minus the bytes of rows passed between loops."""
        return self.held_bytes - self.stages.handed_on_bytes

    @property
    def can_be_split(self) -> bool:
        """Whether a loop over chunks holds a good part of the program, and more than has to be whole between loops."""
        return self.gain > LEAST_SHARE * self.stages.all_bytes

    @property
    def rank(self) -> tuple[int, int]:
        """The highest is the batch: most bytes that never leave their loop, summed over loops and less the bytes passed
        on. (The largest loop alone could prefer the sequence axis for a loss between samples.) Where no axis gains: the
        one with most equations in loops."""
        stages = self.stages
        gain = sum(stages.held_in_loops) - stages.handed_on_bytes if self.can_be_split else 0
        return gain, len(stages.in_loops)

    @functools.cached_property
    def reductions_used_by_rows(self) -> tuple[Equation, ...]:
        """Reductions over the batch whose results a later loop needs to compute rows: batch norm, losses between
        samples."""
        return tuple(_reductions_used_by_rows(self.stages))

    @functools.cached_property
    def whole_batch_readers(self) -> tuple[Equation, ...]:
        """Equations outside the loops that read rows made in a loop."""
        return tuple(_whole_batch_readers(self.stages))

    @functools.cached_property
    def devices(self) -> Devices | None:
        """The devices that the rows are divided among; None where every device has all of them.

        Raises:
            NotDivisible: they are divided in a way in which no chunks can be taken.
        """
        shardings = dict(enumerate(self.shardings))
        given = [(shardings[at], axis) for at, axis in self.arguments if shardings.get(at) is not None]
        found = devices_of(given) or devices_of(_constrained(self.stages.analysis))
        if found is not None and self.rows % found.count:
            raise NotDivisible(
                f"expected a batch that {found.count} devices divide evenly, got one of {self.rows}. Write "
                "split=False, or another size"
            )
        return found

    @property
    def parts(self) -> int:
        """How many parts the rows are divided into, each on devices of its own."""
        return self.devices.count if self.devices else 1

    @property
    def rows_of_device(self) -> int:
        """How many rows one device has."""
        return self.rows // self.parts

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of chunks that each device's rows can be split into."""
        return tuple(k for k in range(2, self.rows_of_device + 1) if self.rows_of_device % k == 0)

    def split(self, chunks: int) -> Program:
        """The program with its loops over so many chunks.

        Args:
            chunks: one of `numbers`.
        """
        rows = self.rows_of_device
        assert rows % chunks == 0, f"expected a number that divides {rows}, got {chunks}"
        return write_chunks(self.stages, self.rows, chunks, self.devices)


def find_batch(program: Program, shardings: Sequence[Any] = ()) -> Batch | None:
    """The batch of a program, or what comes nearest to one (see `Batch.can_be_split`); None where there is no array.

    Args:
        program: the program.
        shardings: of its inputs; none on one device.
    """
    found = _find(program)
    if found is None:
        return None
    # Recomputation is decided after the axis is chosen: it does not help to find the axis. An axis of a state argument
    # is not a batch.
    is_data = not any(_is_state(program, program.inputs[at]) for at, _ in found.arguments)
    stages = _with_rows_again(found.stages) if is_data else found.stages
    return dataclasses.replace(found, stages=stages, shardings=shardings)


def _find(program: Program) -> Batch | None:
    best, tried, bodies = None, set(), {}
    for arguments in _candidates(program):
        for at, axis in _axes(program, arguments):
            if (at, axis) not in tried:
                found = batch_along(program, at, axis, bodies)
                tried.update({(at, axis), *found.arguments})
                if best is None or found.rank > best.rank:
                    best = found
        if best is not None and best.gain > ENOUGH_SHARE * best.stages.all_bytes:
            return best
    return best


def batch_along(program: Program, argument: int, axis: int, bodies: dict[int, Any] | None = None) -> Batch:
    """What there is to split if an axis of one of the arguments, by position, holds the batch.

    Args:
        program: the program.
        argument: its position.
        axis: of the argument.
        bodies: of the program's equations, if others were tried before; filled here.
    """
    value = program.inputs[argument]
    rows = program.avals[value].shape[axis]
    context = Context(rows, {**RULES, **BODIES}, {} if bodies is None else bodies)
    return _batch(analyse(program, context, {value: axis}), rows)


def _candidates(program: Program) -> Iterator[list[int]]:
    """Arguments, by position, that may have the batch: first non-state arguments whose shape and dtype match no result,
    then all non-state arguments, or all arguments if every one is state."""
    types = [_type(program.avals[value]) for value in program.inputs]
    results = {_type(program.aval_of(x)) for x in program.outputs}
    data = [at for at, value in enumerate(program.inputs) if not _is_state(program, value)]
    yield [at for at in data if types[at] not in results]
    yield data or list(range(len(types)))


def _type(aval: Any) -> tuple[tuple[int, ...], Any]:
    return getattr(aval, "shape", ()), getattr(aval, "dtype", None)


def _axes(program: Program, arguments: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Axes of some arguments, leading ones first."""
    shapes = {at: getattr(program.avals[program.inputs[at]], "shape", ()) for at in arguments}
    for axis in range(max(map(len, shapes.values()), default=0)):
        yield from ((at, axis) for at, shape in shapes.items() if axis < len(shape) and shape[axis] > 1)


def _is_state(program: Program, value: int) -> bool:
    """Whether an input is updated: elementwise work leads from it to a result of its shape."""
    shape, seen, stack = program.avals[value].shape, {value}, [value]
    while stack:
        found = stack.pop()
        if found in program.returned:
            return True
        for index in program.readers.get(found, ()):
            equation = program.equations[index]
            if equation.primitive in ELEMENTWISE and program.avals[equation.outputs[0]].shape == shape:
                stack += (one for one in equation.outputs if one not in seen)
                seen.update(equation.outputs)
    return False


def _batch(analysis: Analysis, rows: int) -> Batch:
    """The loops of an analysis, without those that are not worth one."""
    layouts, program = analysis.layouts, analysis.program
    while True:
        stages = put_in_stages(analysis)
        held = stages.held_in_loops
        small = {loop for loop, size in enumerate(held, 1) if size < SMALL_SHARE * max(held)}
        kept = {index: run for index, run in analysis.runs.items() if stages.stage[index] not in small}
        if len(kept) == len(analysis.runs):
            break
        analysis = _with_runs(analysis, kept)
    arguments = [(at, layouts.get(value)) for at, value in enumerate(program.inputs)]
    return Batch(rows, tuple((at, axis) for at, axis in arguments if isinstance(axis, int)), stages)


def _with_rows_again(stages: Stages) -> Stages:
    """The same, in which rows are made again, where that saves a good part and takes about a forward pass at most."""
    program = stages.analysis.program
    if stages.handed_on_bytes < MOST_WHOLE * stages.all_bytes:
        return stages
    every = sum(flops_of(equation, program) for equation in program.equations)
    return making_rows_again(stages, MOST_AGAIN * every)


def _with_runs(analysis: Analysis, runs: dict) -> Analysis:
    """An analysis in which fewer equations run on chunks; the results of others are whole."""
    program = analysis.program
    layouts = {value: one for value, one in analysis.layouts.items() if program.producer.get(value, -1) in {*runs, -1}}
    return dataclasses.replace(analysis, layouts=layouts, runs=runs)


def _reductions_used_by_rows(stages: Stages) -> Iterator[Equation]:
    analysis, program = stages.analysis, stages.analysis.program
    needed: set[int] = set()  # values of which rows are made in a later loop than their own
    for index in reversed(range(len(program.equations))):
        in_loop = index in analysis.runs
        if in_loop or not needed.isdisjoint(program.equations[index].outputs):
            values = (value for value, layout in reads(analysis, index) if not isinstance(layout, int))
            needed.update(v for v in values if not in_loop or stages.comes_before(v, index))
    for index in stages.in_loops:
        equation = program.equations[index]
        if any(v in needed and not isinstance(analysis.layouts.get(v), int) for v in equation.outputs):
            yield equation


def _whole_batch_readers(stages: Stages) -> Iterator[Equation]:
    analysis, program = stages.analysis, stages.analysis.program
    for index, equation in enumerate(program.equations):
        if index not in analysis.runs and any(
            isinstance(analysis.layouts.get(value), int) and value in program.producer for value in equation.reads
        ):
            yield equation


def _constrained(analysis: Analysis) -> Iterator[tuple[Any, int]]:
    """The shardings that rows are told to have on the way, each with the axis of the rows."""
    for index, run in analysis.runs.items():
        equation = analysis.program.equations[index]
        if equation.primitive is compat.sharding_constraint_p and isinstance(run.outputs[0], int):
            yield equation.params["sharding"], run.outputs[0]


def place_of(equation: Equation) -> str:
    """An operation with its name in the model and its line, for errors."""
    return f"{equation.primitive.name} ({compat.place_of(equation.source_info).strip()})"
