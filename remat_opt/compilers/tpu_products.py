"""Copies of what a TPU's products over a batch read and make.

Such a product has its batch outside of the tiles: 17 × 32 numbers for each of 8192 examples take 24 × 128 places each.
Elementwise work lies as it pads least, with the examples in the lanes, and where that is much less XLA copies it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from remat_opt.graph.graph import Op
from remat_opt.graph.tiles import padded_bytes
from remat_opt.program import compat
from remat_opt.program.inline import Constant, Equation

if TYPE_CHECKING:
    from remat_opt.compilers.tpu_reader import TpuReader

PADS_MUCH = 2  # times as much as it could


def with_copies(reader: TpuReader, equation: Equation, op: Op) -> list[Op]:
    """A `dot_general`, with copies of its operands before it and of its result behind it."""
    _, batch = equation.params["dimension_numbers"]
    ops: list[Op] = []
    for operand, of_batch in zip(equation.inputs, batch, strict=True):
        if isinstance(operand, Constant) or operand in reader.constants:
            continue
        aval = reader.program.avals[operand]
        size = _larger(aval.shape, of_batch, min(compat.item_bytes(aval.dtype), 2))
        if not size:
            continue
        key = ("batch outside", operand, tuple(of_batch))
        if key not in reader.copies:
            reader.copies[key] = reader.new(size)
            ops.append(Op(reader.behind([operand]), (reader.copies[key],), name="copy"))
        buffer = reader.buffer(operand)
        inputs = tuple(reader.copies[key] if value == buffer else value for value in op.inputs)
        op = dataclasses.replace(op, inputs=inputs)
    (result,) = equation.outputs
    aval = reader.program.avals[result]
    size = _larger(aval.shape, range(len(batch[0])), 2 if result in reader.rounded else compat.item_bytes(aval.dtype))
    if not size:
        return [*ops, op]
    padded = reader.new(size)
    return [*ops, dataclasses.replace(op, outputs=(padded,)), Op((padded,), (result,), name="copy")]


def _larger(shape: Sequence[int], batch: Sequence[int], item: int) -> int:
    """Bytes of an array with the batch outside of the tiles, where that is much more than it needs; 0 elsewhere."""
    if not batch or len(shape) < 3:
        return 0
    outside = [shape[at] for at in batch]
    inside = [size for at, size in enumerate(shape) if at not in batch]
    size = padded_bytes(inside, item)
    for count in outside:
        size *= count
    return size if size > PADS_MUCH * padded_bytes(shape, item) else 0
