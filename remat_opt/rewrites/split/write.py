"""Writes a program whose equations are in stages: each loop as one `scan` over the chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from remat_opt.rewrites.split.chunks import ChunkValues
from remat_opt.rewrites.split.devices import Devices, as_varying, untyped
from remat_opt.rewrites.split.layouts import Chunk, Sum
from remat_opt.rewrites.split.stages import Stages, reads
from remat_opt.trace.avals import abstract
from remat_opt.trace.inline import Constant, Equation, Program, inline
from remat_opt.trace.traced import Tracing, renumbered


def write_chunks(stages: Stages, batch: int, chunks: int, devices: Devices | None = None) -> Program:
    """The program with each of its loops as a `scan`.

    Args:
        stages: the loops.
        batch: rows of the batch.
        chunks: equal parts of what each device has.
        devices: that the batch is divided among, where it is.
    """
    program = stages.analysis.program
    tracing = Tracing(program.avals, program.constants)
    equations: list[Equation] = []
    number: dict[int, int | Constant] = {}
    for stage in range(stages.loops + 1):
        if stage:
            loop = _Loop(stages, stage, batch, chunks, devices)
            made, instead = loop.write(tracing, number)
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


class _Loop:
    """One loop.

    It stands for

        for i in range(chunks):
            parts = equations of the loop, on slice i of what is read by rows
            rows[i] = parts; sums = sums + parts

    on each of the devices, whose sums are then added up.

    Args:
        stages: all loops.
        loop: its number.
        batch: see `write_chunks`, as the rest.
    """

    def __init__(self, stages: Stages, loop: int, batch: int, chunks: int, devices: Devices | None):
        self.analysis = stages.analysis
        self.program = stages.analysis.program
        first, again = stages.equations(loop), stages.runs_again(loop)
        self.order = sorted({*first, *again})
        self.batch, self.chunks, self.devices = batch, chunks, devices
        made = [value for at in first for value in self.program.equations[at].outputs]
        made_again = (value for at in again for value in self.program.equations[at].outputs)
        inside = (value for value in made_again if value not in stages.leaving)
        without = {*made, *inside, *(value for value, _ in self.program.constants)}
        every = dict.fromkeys(one for at in self.order for one in reads(self.analysis, at) if one[0] not in without)
        # Values as they are read: by rows along an axis, or whole.
        self.read = list(dict.fromkeys((v, layout if isinstance(layout, int) else None) for v, layout in every))
        self.leaving = [value for value in made if value in stages.leaving]

    def write(
        self, tracing: Tracing, number: Mapping[int, int | Constant]
    ) -> tuple[list[Equation], dict[int, int | Constant]]:
        """Its equations, and the values that stand for those which leave it."""
        avals = [abstract(self.program.avals[value]) for value, _ in self.read]
        run = untyped(self.on_all_devices, [self.program.avals[value] for value in self.leaving])
        part = inline(jax.make_jaxpr(run)(*avals), keep_checkpoints=True)
        equations, results = tracing.placed(part, [number.get(value, value) for value, _ in self.read])
        return equations, dict(zip(self.leaving, results, strict=True))

    def on_all_devices(self, *operands: Any) -> tuple[Any, ...]:
        """The values that leave it."""
        devices = self.devices
        if devices is None:
            return tuple(self.run(np.int32(0), operands))

        def on_one(device: Any, *operands: Any) -> tuple[Any, ...]:
            results = self.run(lax.mul(lax.squeeze(device, (0,)), np.int32(self.chunks)), operands)
            stacks = [self.is_summed(value) for value in self.leaving]
            return tuple(lax.expand_dims(x, (0,)) if is_sum else x for x, is_sum in zip(results, stacks, strict=True))

        in_specs = [devices.spec(0), *(devices.spec(layout) for _, layout in self.read)]
        mapped = devices.mapped(on_one, in_specs, [self.out_spec(value, devices) for value in self.leaving])
        results = mapped(np.arange(devices.count, dtype=np.int32), *operands)
        return tuple(self.added_up(value, x) for value, x in zip(self.leaving, results, strict=True))

    def is_summed(self, value: int) -> bool:
        """Whether devices have different parts of it."""
        layout = self.analysis.layouts[value]
        return isinstance(layout, Sum) and layout is not Sum.SAME

    def out_spec(self, value: int, devices: Devices) -> PartitionSpec:
        layout = self.analysis.layouts[value]
        return devices.spec(0 if self.is_summed(value) else layout if isinstance(layout, int) else None)

    def added_up(self, value: int, array: Any) -> Any:
        """The result of all devices."""
        layout = self.analysis.layouts[value]
        return layout.over(array) if isinstance(layout, Sum) and self.is_summed(value) else array

    def run(self, first: Any, operands: Sequence[Any]) -> list[Any]:
        """What one device does.

        Args:
            first: the number of its first chunk.
            operands: what it has of the values in `read`.
        """
        given = dict(zip(self.read, operands, strict=True))
        whole = {value: x for (value, layout), x in given.items() if layout is None}
        rows = {(value, axis): x for (value, axis), x in given.items() if axis is not None}

        def step(carry: Sequence[Any], turn: Any) -> tuple[list[Any], None]:
            index = turn if self.devices is None else lax.add(first, turn)
            count = self.chunks * (self.devices.count if self.devices else 1)
            chunk = Chunk(index, self.batch // count, self.batch, self.devices, turn)
            values = ChunkValues(self.analysis, chunk, whole, {}, rows)
            after = dict(zip(self.leaving, carry, strict=True))
            values.evaluate(self.order, lambda value: self.note(value, values, after))
            return list(after.values()), None

        start = [self.empty(value) for value in self.leaving]
        last, _ = lax.scan(step, start, np.arange(self.chunks, dtype=np.int32))
        avals = [self.program.avals[value] for value in self.leaving]
        return [lax.convert_element_type(x, aval.dtype) for aval, x in zip(avals, last, strict=True)]

    def note(self, value: int, values: ChunkValues, after: dict[int, Any]) -> None:
        """Add a value of a chunk to what leaves the loop, or put it into its place."""
        if value not in after:
            return
        layout, part, chunk = self.analysis.layouts[value], values.parts[value], values.chunk
        if isinstance(layout, Sum):
            after[value] = layout.combine(after[value], part)
        elif layout is not None:
            start = chunk.start_on_device(after[value].shape[layout])
            after[value] = lax.dynamic_update_slice_in_dim(after[value], part, start, layout)

    def empty(self, value: int) -> Any:
        """What leaves the loop, before it begins."""
        aval, layout = self.program.avals[value], self.analysis.layouts[value]
        if isinstance(layout, Sum):
            return as_varying(layout.start(aval), aval)
        count = self.devices.count if self.devices else 1
        shape = tuple(size // count if at == layout else size for at, size in enumerate(aval.shape))
        return as_varying(jnp.empty(shape, aval.dtype), aval)
