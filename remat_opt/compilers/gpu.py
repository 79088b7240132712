"""What is particular about XLA's GPU compiler: products that are split, and zeros that are shared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from remat_opt.graph.build import bytes_of
from remat_opt.program import compat

# Multiprocessors of an H100 and an H200, the side of the tile of a product that one of them computes at a time, and
# what XLA takes a product to cost (`splitk_rewriter.cc`, in units of its own): a FLOP of a multiprocessor, a byte moved
# by the product, a byte moved by the sum that follows, and the start of that sum's kernel.
_CORES, _TILE = 132, 128
_COST_OF_FLOP, _COST_OF_BYTE, _COST_OF_SUMMED_BYTE, _COST_OF_A_SUM = 100.0, 0.194, 193.0, 4.4e7
# A sum of fewer parts is computed in the kernels that read it (`priority_fusion.cc`).
MOST_FUSED_PARTS = 16
_ALIGNED = 16  # bytes: each part of a contracted dimension is a multiple of it


class Split(NamedTuple):
    """A product in parts.

    Attributes:
        parts: of the contracted dimension; 1 where it is not divided.
        written: bytes of the partial results.
        summed: length of the contracted dimension.
        padded: what its operands are padded to there.
    """

    parts: int
    written: int
    summed: int
    padded: int

    def grown(self, size: int) -> int:
        """Bytes of an operand as it is padded."""
        return size // self.summed * self.padded


WHOLE = Split(1, 0, 1, 1)


def split_of(params: dict[str, Any], operands: Sequence[Any], result: Any) -> Split:
    """How a product is divided with so few tiles that most multiprocessors would have none.

    A GPU's compiler lets each sum over a part of the contracted dimension, and adds the parts in a kernel of its own.
    Where the parts are not alike, or not aligned, the operands are written padded first.
    """
    (contracted, _), (batched, _) = params["dimension_numbers"]
    summed = math.prod(operands[0].shape[axis] for axis in contracted)
    batch = math.prod(operands[0].shape[axis] for axis in batched)
    if not contracted or not summed or not result.size:
        return WHOLE
    rows = math.prod(operands[0].shape) // (summed * batch)
    columns = math.prod(operands[1].shape) // (summed * batch)
    side = min(rows, _TILE), min(columns, _TILE)
    slots = _CORES * _TILE * _TILE / (side[0] * side[1])
    tiles = batch * -(-rows // _TILE) * -(-columns // _TILE)
    read, returned = sum(bytes_of(operand) for operand in operands), bytes_of(result)

    def cost(parts: int) -> float:
        flops = 2 * side[0] * side[1] * -(-summed // parts) * max(1.0, parts * tiles / slots)
        written = 4 * parts * result.size if parts > 1 else returned
        product = max(flops * _COST_OF_FLOP, (read + written) * _COST_OF_BYTE)
        return product if parts == 1 else product + _COST_OF_A_SUM + (written + returned) * _COST_OF_SUMMED_BYTE

    parts = min((2**power for power in range(12)), key=cost)
    if parts == 1:
        return WHOLE
    item = min(_ALIGNED, *(compat.item_bytes(operand.dtype) for operand in operands))
    multiple = parts * _ALIGNED // item
    return Split(parts, 4 * parts * result.size, summed, -(-summed // multiple) * multiple)
