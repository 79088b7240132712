"""What is particular about XLA's GPU compiler: products that are split, and zeros that are shared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from remat_opt.graph.build import bytes_of

# Multiprocessors of an H100 and an H200, the side of the tile of a product that one of them computes at a time, and
# what XLA takes a product to cost (`splitk_rewriter.cc`, in units of its own): a FLOP of a multiprocessor, a byte moved
# by the product, a byte moved by the sum that follows, and the start of that sum's kernel.
_CORES, _TILE = 132, 128
_COST_OF_FLOP, _COST_OF_BYTE, _COST_OF_SUMMED_BYTE, _COST_OF_A_SUM = 100.0, 0.194, 193.0, 4.4e7
# A sum of fewer parts is computed in the kernels that read it (`priority_fusion.cc`).
MOST_FUSED_PARTS = 16


def partial_products(params: dict[str, Any], operands: Sequence[Any], result: Any) -> int:
    """Bytes of the partial results of a product with so few tiles that most multiprocessors would have none.

    A GPU's compiler lets each sum over a part of the contracted dimension, and adds the parts in a kernel of its own.
    """
    (contracted, _), (batched, _) = params["dimension_numbers"]
    summed = math.prod(operands[0].shape[axis] for axis in contracted)
    batch = math.prod(operands[0].shape[axis] for axis in batched)
    if not contracted or not summed or not result.size:
        return 0
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
    return 4 * parts * result.size if parts > 1 else 0
