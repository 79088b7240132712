"""Writes a program whose equations are in stages: each loop as one `scan` over the chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from remat_opt.rewrites.split.chunks import ChunkValues
from remat_opt.rewrites.split.layouts import Chunk, Sum
from remat_opt.rewrites.split.stages import Stages, reads
from remat_opt.trace.avals import abstract
from remat_opt.trace.inline import Constant, Equation, Program, inline, values_among
from remat_opt.trace.traced import Tracing, renumbered


def write_chunks(stages: Stages, batch: int, chunks: int) -> Program:
    """The program with each of its loops as a `scan`; `batch` rows in `chunks` equal parts."""
    program = stages.analysis.program
    tracing = Tracing(program.avals, program.constants)
    equations: list[Equation] = []
    number: dict[int, int | Constant] = {}
    for stage in range(stages.loops + 1):
        if stage:
            made, instead = _loop(stages, stage, batch, chunks, tracing, number)
            equations += made
            number |= instead
        outside = (at for at, one in enumerate(stages.stage) if one == stage and at not in stages.analysis.runs)
        equations += (renumbered(program.equations[at], number) for at in outside)
    outputs = tuple(x if isinstance(x, Constant) else number.get(x, x) for x in program.outputs)
    return dataclasses.replace(
        program,
        avals=tuple(tracing.avals),
        constants=tuple(tracing.constants),
        equations=tuple(equations),
        outputs=outputs,
    )


def _loop(
    stages: Stages, loop: int, batch: int, chunks: int, tracing: Tracing, number: dict[int, int | Constant]
) -> tuple[list[Equation], dict[int, int | Constant]]:
    """The equations of one loop, and the values that stand for those which leave it."""
    program, order = stages.analysis.program, stages.equations(loop)
    made = [value for at in order for value in program.equations[at].outputs]
    here = {*made}
    known = {value for value, _ in program.constants}
    read = values_among(x for at in order for x, _ in reads(stages.analysis, at) if x not in here and x not in known)
    left = [value for value in made if value in stages.left]

    def run(*operands: Any) -> list[Any]:
        whole = dict(zip(read, operands, strict=True))
        return _in_chunks(stages, order, left, whole, batch, chunks)

    avals = [abstract(program.avals[value]) for value in read]
    part = inline(jax.make_jaxpr(run)(*avals), keep_checkpoints=True)
    equations, results = tracing.placed(part, [number.get(value, value) for value in read])
    return equations, dict(zip(left, results, strict=True))


def _in_chunks(
    stages: Stages, order: Sequence[int], left: Sequence[int], whole: dict[int, Any], batch: int, chunks: int
) -> list[Any]:
    """The values that leave a loop.

    It stands for

        for i in range(chunks):
            parts = equations of the loop, on slice i of what is read by rows
            rows[i] = parts; sums = sums + parts
    """
    program, layouts = stages.analysis.program, stages.analysis.layouts

    def empty(value: int) -> Any:
        aval, layout = program.avals[value], layouts[value]
        return layout.start(aval) if isinstance(layout, Sum) else jnp.empty(aval.shape, aval.dtype)

    def step(carry: Sequence[Any], index: Any) -> tuple[list[Any], None]:
        chunk = Chunk(index, batch // chunks, batch)
        values = ChunkValues(stages.analysis, chunk, whole, {})
        after = dict(zip(left, carry, strict=True))

        def note(value: int) -> None:
            if value not in after:
                return
            layout, part = layouts[value], values.parts[value]
            if isinstance(layout, Sum):
                after[value] = layout.combine(after[value], part)
            elif layout is not None:
                start = chunk.start(after[value].shape[layout])
                after[value] = lax.dynamic_update_slice_in_dim(after[value], part, start, layout)

        values.evaluate(order, note)
        return list(after.values()), None

    last, _ = lax.scan(step, [empty(value) for value in left], np.arange(chunks, dtype=np.int32))
    return [lax.convert_element_type(x, program.avals[v].dtype) for v, x in zip(left, last, strict=True)]
