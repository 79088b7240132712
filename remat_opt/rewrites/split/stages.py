"""Puts the equations that run on chunks into loops, one after another, and the others before, between and behind them.

Stage 0 is what runs before the first loop, stage n what runs after loop n. A loop can use a sum only if an earlier loop
completed it, and values of its own chunk only in the layout in which they were made. So a network with batch norm
becomes a chain of loops, a loss that is divided by a sum of weights one loop of weights and one of all else. Most
equations could be in one of several loops: all are put as early, or all as late as they can be, whichever hands on
fewer bytes of rows from loop to loop.

Rows that a loop hands on are whole in memory. Where they are many, later loops make them again, chunk by chunk, from
the rows that are whole in any case (`making_rows_again`). For a loss between samples (in-batch negatives) one loop runs
the network forward and passes on only the embeddings; another runs it forward again and backward, as GradCache does by
hand (Gao et al., arXiv 2101.06983).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping

from remat_opt.rewrites.split.analysis import Analysis
from remat_opt.rewrites.split.layouts import Layout, Sum
from remat_opt.trace.avals import bytes_of
from remat_opt.trace.flops import flops_of
from remat_opt.trace.inline import Constant

STAY_WHOLE = 0.01  # of the bytes of rows that loops hand on, where the rest is made again


@dataclasses.dataclass(frozen=True, eq=False)
class Stages:
    """An order of loops.

    Attributes:
        analysis: which equations run on chunks.
        stage: for each equation: the loop it runs in (from 1), or for one outside loops, the loop after which it runs
            (0: before the first).
        loops: how many loops there are.
        again: for each loop the equations of earlier ones that it runs again; none at all if empty.
    """

    analysis: Analysis
    stage: tuple[int, ...]
    loops: int
    again: tuple[frozenset[int], ...] = ()

    def equations(self, loop: int) -> list[int]:
        """The equations that run in a loop for the first time, in program order."""
        return [index for index in self.in_loops if self.stage[index] == loop]

    def runs_again(self, loop: int) -> frozenset[int]:
        """The equations of earlier loops that a loop runs again."""
        return self.again[loop - 1] if self.again else frozenset()

    @functools.cached_property
    def in_loops(self) -> list[int]:
        """The equations of all loops, in program order."""
        return sorted(self.analysis.runs)

    def comes_before(self, value: int, index: int) -> bool:
        """Whether a value is made in an earlier stage than an equation runs in."""
        made = self.analysis.program.producer.get(value)
        return made is not None and self.stage[made] < self.stage[index]

    @functools.cached_property
    def leaving(self) -> frozenset[int]:
        """Values that are read outside of their loop: rows are then whole in memory, and sums are complete."""
        program, runs = self.analysis.program, self.analysis.runs
        found = {*program.returned}
        again = ((index, loop) for loop in range(1, self.loops + 1) for index in self.runs_again(loop))
        for index, stage in (*enumerate(self.stage), *again):
            for value, layout in reads(self.analysis, index):
                made = program.producer.get(value)
                is_inside = made is not None and {index, made} <= runs.keys() and self._makes(stage, made)
                if not (is_inside and lies_as_read(self.analysis, value, layout)):
                    found.add(value)
        return frozenset(value for value in found if program.producer.get(value) in runs)

    def _makes(self, loop: int, index: int) -> bool:
        """Whether a loop runs an equation, for the first time or again."""
        return self.stage[index] == loop or index in self.runs_again(loop)

    def held_bytes(self, loop: int) -> int:
        """Bytes, for the whole batch, of the rows that never leave a loop."""
        avals = self.analysis.program.avals
        return sum(bytes_of(avals[value]) for value in self._rows(loop) if value not in self.leaving)

    @functools.cached_property
    def held_in_loops(self) -> tuple[int, ...]:
        """`held_bytes` of each loop, from the first."""
        return tuple(self.held_bytes(loop) for loop in range(1, self.loops + 1))

    @functools.cached_property
    def handed_on_bytes(self) -> int:
        """Bytes of the rows that leave their loop, without those that the program returns."""
        program = self.analysis.program
        rows = (value for loop in range(1, self.loops + 1) for value in self._rows(loop))
        return sum(bytes_of(program.avals[v]) for v in rows if v in self.leaving and v not in program.returned)

    @functools.cached_property
    def all_bytes(self) -> int:
        """Bytes of all values of the program."""
        return sum(map(bytes_of, self.analysis.program.avals))

    def _rows(self, loop: int) -> Iterator[int]:
        for index in self.equations(loop):
            for value in self.analysis.program.equations[index].outputs:
                if isinstance(self.analysis.layouts.get(value), int):
                    yield value


def reads(analysis: Analysis, index: int) -> Iterator[tuple[int, Layout]]:
    """The values that an equation reads, each with the layout in which it does."""
    equation, run = analysis.program.equations[index], analysis.runs.get(index)
    layouts = (None,) * len(equation.inputs) if run is None else run.inputs
    for x, layout in zip(equation.inputs, layouts, strict=True):
        if not isinstance(x, Constant):
            yield x, layout


def lies_as_read(analysis: Analysis, value: int, layout: Layout) -> bool:
    """Whether a value of a chunk can be read in a layout before the loop has ended."""
    lies = analysis.layouts.get(value)
    return lies == layout or (lies is Sum.SAME and layout is None)


def put_in_stages(analysis: Analysis) -> Stages:
    """Put all equations in stages."""
    early = _earliest(analysis, {})
    loops = max((early[index] for index in analysis.runs), default=0)
    late = _latest(analysis, loops)
    # What is outside of loops, or adds sums alone, runs as early as the loops let it.
    late = _earliest(analysis, {index: late[index] for index in analysis.runs if _is_of_rows(analysis, index)})
    return min((Stages(analysis, tuple(order), loops) for order in (early, late)), key=lambda one: one.handed_on_bytes)


def making_rows_again(stages: Stages, most: float) -> Stages:
    """The same loops, which make again what they read of earlier ones.

    They start from inputs, sums, rows that are whole in any case (read outside of loops, or along another axis), and
    the smallest others, such as embeddings: these stay whole.

    Args:
        stages: the loops.
        most: FLOPs that this may take; where it takes more, the loops stay as they are.
    """
    analysis, program = stages.analysis, stages.analysis.program
    whole = {*program.returned}
    for index in range(len(program.equations)):
        for value, layout in reads(analysis, index):
            if index not in analysis.runs or not lies_as_read(analysis, value, layout):
                whole.add(value)
    room = STAY_WHOLE * stages.handed_on_bytes
    for value in sorted(stages.leaving - whole, key=lambda value: bytes_of(program.avals[value])):
        room -= bytes_of(program.avals[value])
        if room < 0:
            break
        whole.add(value)
    again, flops = [], 0.0
    for loop in range(1, stages.loops + 1):
        found: set[int] = set()
        waiting = stages.equations(loop)
        while waiting:
            for value, _ in reads(analysis, waiting.pop()):
                made = program.producer.get(value, -1)
                if made not in analysis.runs or stages.stage[made] == loop or value in whole or made in found:
                    continue
                found.add(made)
                waiting.append(made)
                flops += flops_of(program.equations[made], program)
                if flops > most:
                    return stages
        again.append(frozenset(found))
    return dataclasses.replace(stages, again=tuple(again))


def _is_of_rows(analysis: Analysis, index: int) -> bool:
    run = analysis.runs[index]
    return any(isinstance(layout, int) for layout in (*run.inputs, *run.outputs))


def _steps_after(analysis: Analysis, index: int) -> Iterator[tuple[int, int]]:
    """The equations that an equation needs, and by how many stages it comes at least after each.

    Those with effects come in the order of the program.
    """
    program = analysis.program
    for value, layout in reads(analysis, index):
        made = program.producer.get(value)
        if made is not None:
            at_once = index not in analysis.runs or (made in analysis.runs and lies_as_read(analysis, value, layout))
            yield made, int(not at_once)
    if program.equations[index].effects:
        earlier = (at for at in reversed(range(index)) if program.equations[at].effects)
        yield from ((at, 0) for at in earlier)


def _earliest(analysis: Analysis, fixed: Mapping[int, int]) -> list[int]:
    stage: list[int] = []
    for index in range(len(analysis.program.equations)):
        least = max((stage[made] + steps for made, steps in _steps_after(analysis, index)), default=0)
        stage.append(fixed.get(index, max(least, int(index in analysis.runs))))
    return stage


def _latest(analysis: Analysis, loops: int) -> list[int]:
    stage = [loops] * len(analysis.program.equations)
    for index in reversed(range(len(stage))):
        for made, steps in _steps_after(analysis, index):
            stage[made] = min(stage[made], stage[index] - steps)
    return stage
