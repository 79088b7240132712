"""Which equations of a program run on chunks of the batch, from the layouts of its inputs.

Layouts go forward, from operands to results, and back: what is whole and read by rows is made by rows where its own
equation can be split, so that labels, masks and broadcast zeros follow the images. Every equation is looked at again
when something about it has changed, a few times at most. What it then says is always right: reading a value otherwise
than it lies only means that it is read after the loop that makes it (`stages.py`).
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Mapping

from remat_opt.rewrites.split.layouts import Context, Layout, Run, Sum, View
from remat_opt.rewrites.split.sums import on_parts
from remat_opt.trace.effects import communicates, is_stateful
from remat_opt.trace.inline import Constant, Equation, Program

MOST_LOOKS = 6  # at one equation


@dataclasses.dataclass(frozen=True)
class Analysis:
    """What runs on chunks.

    Attributes:
        program: the program.
        layouts: of values that are not whole. An input of the program is read so; it may be read whole, too.
        runs: by the index of an equation that runs on chunks how it does.
    """

    program: Program
    layouts: Mapping[int, Layout]
    runs: Mapping[int, Run]

    def is_one_loop(self) -> bool:
        """Whether nothing needs the whole of what is made of chunks."""
        for index, equation in enumerate(self.program.equations):
            run = self.runs.get(index)
            wanted = (None,) * len(equation.inputs) if run is None else run.inputs
            for x, layout in zip(equation.inputs, wanted, strict=True):
                lies = None if isinstance(x, Constant) else self.layouts.get(x)
                if lies not in (None, layout) and not (lies is Sum.SAME and layout is None):
                    return False
        return True


def analyse(
    program: Program, context: Context, layouts: Mapping[int, Layout], wanted: Mapping[int, int] | None = None
) -> Analysis:
    """Find what runs on chunks.

    Args:
        program: a flat program.
        context: what is split.
        layouts: of its inputs, those that are not whole.
        wanted: for values that are read by rows the axis.
    """
    finder = _Finder(program, context)
    for value, layout in layouts.items():
        finder.lay(value, layout)
    for value, axis in (wanted or {}).items():
        finder.want(value, axis)
    finder.run()
    return Analysis(program, finder.layouts, finder.runs)


class _Finder:
    def __init__(self, program: Program, context: Context):
        self.program = program
        self.context = context
        self.inputs = frozenset(program.inputs)
        self.layouts: dict[int, Layout] = {}
        self.wanted: dict[int, int] = {}
        self.runs: dict[int, Run] = {}
        self.looks: dict[int, int] = {}
        self.queue: list[int] = []
        self.queued: set[int] = set()

    def put(self, index: int) -> None:
        if index not in self.queued and self.looks.get(index, 0) < MOST_LOOKS:
            self.queued.add(index)
            heapq.heappush(self.queue, index)

    def lay(self, value: int, layout: Layout) -> None:
        if self.layouts.get(value) != layout:
            self.layouts[value] = layout
            for index in self.program.readers.get(value, ()):
                self.put(index)

    def want(self, value: int, axis: int) -> None:
        """Let a value that is whole be made by rows along an axis, if it can be."""
        shape = self.program.avals[value].shape
        if self.layouts.get(value) is not None or shape[axis] % self.context.batch:
            return
        if value in self.inputs:
            self.lay(value, axis)
        elif value in self.program.producer and value not in self.wanted:
            self.wanted[value] = axis
            self.put(self.program.producer[value])

    def run(self) -> None:
        while self.queue:
            index = heapq.heappop(self.queue)
            self.queued.discard(index)
            self.looks[index] = self.looks.get(index, 0) + 1
            self.look(index, self.program.equations[index])

    def look(self, index: int, equation: Equation) -> None:
        inputs = tuple(None if isinstance(x, Constant) else self.layouts.get(x) for x in equation.inputs)
        wanted = {at: self.wanted[value] for at, value in enumerate(equation.outputs) if value in self.wanted}
        run = None
        if can_be_split(equation):
            view = View(self.program, equation, self.context, inputs, wanted)
            run = on_parts(view) if any(one is Sum.ADD for one in inputs) else None
            rule = self.context.rules.get(equation.primitive)
            if run is None and rule is not None and (wanted or any(isinstance(one, int) for one in inputs)):
                run = rule(view)
        if run is None:
            self.runs.pop(index, None)
        else:
            self.runs[index] = run
            for x, layout in zip(equation.inputs, run.inputs, strict=True):
                if isinstance(layout, int) and not isinstance(x, Constant):
                    self.want(x, layout)
        for at, value in enumerate(equation.outputs):
            self.lay(value, None if run is None else run.outputs[at])


def can_be_split(equation: Equation) -> bool:
    """Whether an equation may run more than once, on parts of its operands."""
    if equation.effects or is_stateful(equation.primitive, equation.params):
        return False
    return not communicates(equation.primitive, equation.params)
