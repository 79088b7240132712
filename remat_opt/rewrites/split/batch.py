"""Finds the batch among the arguments of a program, and writes the program split into chunks of it.

The batch is an axis of an argument. It is not told which: every axis of every argument is tried, and the one is taken
along which most bytes of the program can be split. Other arguments that are read row by row with it (labels, masks) are
found on the way. Tries are cheap where little can be split: an axis of a weight ends in the first product.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

from remat_opt.rewrites.split.analysis import Analysis, analyse
from remat_opt.rewrites.split.bodies import BODIES
from remat_opt.rewrites.split.layouts import Context, bytes_of
from remat_opt.rewrites.split.rules import RULES
from remat_opt.rewrites.split.stages import Stages, put_in_stages, reads
from remat_opt.rewrites.split.write import write_chunks
from remat_opt.trace import compat
from remat_opt.trace.inline import Equation, Program

SMALL_SHARE = 0.01  # of the bytes in the largest loop: a loop of fewer runs on the whole batch


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """The batch of a program.

    Attributes:
        rows: how many rows it has.
        arguments: the program's inputs that are split, by position, each with its axis.
        stages: the loops and what is between them.
    """

    rows: int
    arguments: tuple[tuple[int, int], ...]
    stages: Stages

    @property
    def program(self) -> Program:
        """The program, as it was."""
        return self.stages.analysis.program

    @functools.cached_property
    def held_bytes(self) -> int:
        """Bytes of rows that never leave their loop: of which k chunks need a k-th."""
        return sum(self.stages.held_bytes(loop) for loop in range(1, self.stages.loops + 1))

    @functools.cached_property
    def meetings(self) -> tuple[Equation, ...]:
        """Equations that need the whole batch, whose results are read by rows again."""
        return tuple(_meetings(self.stages))

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of chunks that the batch can be split into."""
        return tuple(k for k in range(2, self.rows + 1) if self.rows % k == 0)

    def split(self, chunks: int) -> Program:
        """The program with its loops over so many chunks.

        Args:
            chunks: one of `numbers`.
        """
        return write_chunks(self.stages, self.rows, chunks)


def find_batch(program: Program) -> Batch | None:
    """The batch of a program; None where nothing can be split."""
    best, tried = None, set()
    bodies: dict = {}
    for at, axis in _axes(program):
        if (at, axis) in tried:
            continue
        rows = program.avals[program.inputs[at]].shape[axis]
        context = Context(rows, {**RULES, **BODIES}, bodies)
        analysis = analyse(program, context, {program.inputs[at]: axis})
        found = _batch(analysis, rows)
        tried.update(found.arguments)
        if best is None or found.held_bytes > best.held_bytes:
            best = found
    return best if best is not None and best.held_bytes else None


def _axes(program: Program) -> Iterator[tuple[int, int]]:
    """Axes of arguments, leading ones first."""
    shapes = [getattr(program.avals[value], "shape", ()) for value in program.inputs]
    for axis in range(max(map(len, shapes), default=0)):
        yield from ((at, axis) for at, shape in enumerate(shapes) if len(shape) > axis and shape[axis] > 1)


def _batch(analysis: Analysis, rows: int) -> Batch:
    """The loops of an analysis, without those that are not worth one."""
    layouts, program = analysis.layouts, analysis.program
    while True:
        stages = put_in_stages(analysis)
        held = [stages.held_bytes(loop) for loop in range(1, stages.loops + 1)]
        small = {loop for loop, size in enumerate(held, 1) if size < SMALL_SHARE * max(held)}
        kept = {index: run for index, run in analysis.runs.items() if stages.stage[index] not in small}
        if len(kept) == len(analysis.runs):
            break
        analysis = _with_runs(analysis, kept)
    arguments = [(at, layouts.get(value)) for at, value in enumerate(program.inputs)]
    return Batch(rows, tuple((at, axis) for at, axis in arguments if isinstance(axis, int)), stages)


def _with_runs(analysis: Analysis, runs: dict) -> Analysis:
    """An analysis in which fewer equations run on chunks; the results of others are whole."""
    program = analysis.program
    layouts = {value: one for value, one in analysis.layouts.items() if program.producer.get(value, -1) in {*runs, -1}}
    return dataclasses.replace(analysis, layouts=layouts, runs=runs)


def _meetings(stages: Stages) -> Iterator[Equation]:
    """Equations that read what a loop makes otherwise than it lies there, and are needed by a later loop."""
    program = stages.analysis.program
    needed: set[int] = set()  # values that later loops read, or that these are made of
    for index in reversed(range(len(program.equations))):
        equation, in_loop = program.equations[index], index in stages.analysis.runs
        if not in_loop and needed.isdisjoint(equation.outputs):
            continue
        for value, _ in reads(stages.analysis, index):
            made = program.producer.get(value)
            if made is None or (in_loop and made in stages.analysis.runs and stages.stage[made] == stages.stage[index]):
                continue
            needed.add(value)
    for index, equation in enumerate(program.equations):
        if index in stages.analysis.runs and not needed.isdisjoint(equation.outputs):
            sums = [v for v in equation.outputs if v in needed and not isinstance(stages.analysis.layouts.get(v), int)]
            if sums:
                yield equation


def place_of(equation: Equation) -> str:
    """An operation with its name in the model and its line, for errors."""
    return f"{equation.primitive.name} ({compat.place_of(equation.source_info).strip()})"


def bytes_split(batch: Batch) -> int:
    """Bytes of the arguments that are split."""
    return sum(bytes_of(batch.program.avals[batch.program.inputs[at]]) for at, _ in batch.arguments)
