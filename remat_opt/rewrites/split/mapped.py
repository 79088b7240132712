"""The batch of what each device runs in the user's own `shard_map`: its body is split, by the rows of one device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from remat_opt.rewrites.split.batch import SMALL_SHARE, Batch, find_batch
from remat_opt.trace import compat
from remat_opt.trace.avals import bytes_of
from remat_opt.trace.evaluation import evaluate_all
from remat_opt.trace.inline import Constant, Equation, Program, inline
from remat_opt.trace.traced import Tracing, renumbered


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class MappedBatch(Batch):
    """A batch inside of a program's `shard_map`.

    Attributes:
        outer: the program.
        index: of the equation.
    """

    outer: Program
    index: int

    @property
    def equation(self) -> Equation:
        """The `shard_map`."""
        return self.outer.equations[self.index]

    @property
    def rows_of_device(self) -> int:
        """All: the program is that of one device."""
        return self.rows

    @property
    def parts(self) -> int:
        """How many devices run it."""
        return math.prod(self.equation.params["mesh"].shape[axis] for axis in self.equation.params["newly_manual_axes"])

    def split(self, chunks: int) -> Program:
        """The program, each device's part of which has its loops over so many chunks."""
        equation, program = self.equation, self.outer
        with compat.mapped_context(equation.params):
            body = super().split(chunks)

        def mapped(*operands: Any) -> Sequence[Any]:
            return compat.shard_map_like(equation.params, lambda *x: tuple(evaluate_all(body, x)))(*operands)

        tracing = Tracing(program.avals, program.constants)
        part = tracing.traced(mapped, equation, equation.inputs)
        instead, results = tracing.placed(part, equation.inputs)
        number = dict(zip(equation.outputs, results, strict=True))
        before, after = program.equations[: self.index], program.equations[self.index + 1 :]
        return dataclasses.replace(
            program,
            avals=tuple(tracing.avals),
            constants=tuple(tracing.constants),
            equations=(*before, *instead, *(renumbered(one, number) for one in after)),
            outputs=tuple(x if isinstance(x, Constant) else number.get(x, x) for x in program.outputs),
        )


def find_mapped_batch(program: Program) -> MappedBatch | None:
    """The batch of the body of a program's `shard_map`; None where there is none, or several of some size, of which one
    may do again what another does (`trace/mapped.py`)."""
    bodies = {
        index: inline(one.params["jaxpr"], keep_checkpoints=True)
        for index, one in enumerate(program.equations)
        if one.primitive is compat.shard_map_p
    }
    sizes = {index: _bytes_made(body) for index, body in bodies.items()}
    large = [index for index, size in sizes.items() if size > SMALL_SHARE * sum(sizes.values())]
    found = find_batch(bodies[large[0]]) if len(large) == 1 else None
    if found is None:
        return None
    inputs = program.equations[large[0]].inputs
    positions = {value: at for at, value in enumerate(program.inputs)}
    given = [(inputs[at], axis) for at, axis in found.arguments]
    arguments = tuple((positions[x], axis) for x, axis in given if isinstance(x, int) and x in positions)
    return MappedBatch(found.rows, arguments, found.stages, outer=program, index=large[0])


def _bytes_made(program: Program) -> int:
    return sum(bytes_of(program.avals[value]) for value in program.producer)
