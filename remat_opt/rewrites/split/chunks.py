"""Evaluate the equations of a program on one chunk of the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jax import lax

from remat_opt.rewrites.split.analysis import Analysis
from remat_opt.rewrites.split.devices import as_here
from remat_opt.rewrites.split.layouts import Chunk, Layout, Sum
from remat_opt.trace import compat
from remat_opt.trace.evaluation import bind
from remat_opt.trace.inline import Constant


class ChunkValues:
    """The values of a program while one chunk is evaluated.

    Args:
        analysis: how equations run, and the layouts of their results.
        chunk: the chunk.
        whole: values that are there for the whole batch.
        parts: values of this chunk, in their layouts.
        rows: by value and axis what this device has of values that are read by rows.
    """

    def __init__(
        self,
        analysis: Analysis,
        chunk: Chunk,
        whole: Mapping[int, Any],
        parts: Mapping[int, Any],
        rows: Mapping[tuple[int, int], Any] | None = None,
    ):
        self.analysis = analysis
        self.chunk = chunk
        self.whole = {**dict(analysis.program.constants), **whole}
        self.parts = dict(parts)
        self.rows = rows or {}
        self.converted: dict[tuple[int, Layout], Any] = {}

    def read(self, atom: int | Constant, layout: Layout) -> Any:
        """A value in a layout: as it lies in this chunk, or taken of the whole."""
        if isinstance(atom, Constant):
            return atom.value if layout is None else self.of_whole(atom.value, layout)
        lies = self.analysis.layouts.get(atom)
        if atom in self.parts and (lies == layout or (lies is Sum.SAME and layout is None)):
            return self.parts[atom]
        if isinstance(layout, int) and (atom, layout) in self.rows:
            self.converted.setdefault((atom, layout), self.chunk.slice_on_device(self.rows[atom, layout], layout))
        elif (atom, layout) not in self.converted:
            array = self.parts[atom] if lies is Sum.SAME and atom in self.parts else self.whole[atom]
            self.converted[atom, layout] = self.of_whole(array, layout)
        return self.converted[atom, layout]

    def of_whole(self, array: Any, layout: Layout) -> Any:
        if isinstance(layout, int):
            return self.chunk.slice(array, layout)
        return self.chunk.first_only(array) if layout is Sum.ADD else array

    def evaluate(self, equations: Iterable[int], note: Callable[[int], None] = lambda value: None) -> None:
        """Run equations, by index in program order; `note` is told each value of the chunk as soon as it is there."""
        for index in equations:
            equation = as_here(self.analysis.program.equations[index])
            run = self.analysis.runs.get(index)
            if run is None:
                results = bind(equation, [self.read(x, None) for x in equation.inputs])
                self.whole.update(zip(equation.outputs, results, strict=True))
                continue
            operands = [self.read(x, layout) for x, layout in zip(equation.inputs, run.inputs, strict=True)]
            with compat.equation_context(equation.source_info, equation.context):
                results = run.bind(equation, operands, self.chunk)
            opaque = self.analysis.program.opaque
            results = [
                lax.optimization_barrier(x) if value in opaque else x
                for value, x in zip(equation.outputs, results, strict=True)
            ]
            self.parts.update(zip(equation.outputs, results, strict=True))
            for value in equation.outputs:
                note(value)
