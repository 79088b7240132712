"""What the compilers of the platforms need beside an equation's operands and results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jax.extend.core import primitives as P

from remat_opt.program import compat
from remat_opt.program.inline import Constant, Equation, Program
from remat_opt.program.pooling import EXPANDING_PLATFORMS


def bytes_of(aval: Any) -> int:
    """Bytes of one value; 0 for what has no storage (tokens, references)."""
    shape, dtype = getattr(aval, "shape", None), getattr(aval, "dtype", None)
    if shape is None or dtype is None:
        return 0
    return math.prod(shape) * compat.item_bytes(dtype)


def workspace_of(equation: Equation, program: Program, platform: str) -> int:
    """Bytes of what the platform's compiler adds to an equation, beside its operands and results."""
    operands = [x.aval if isinstance(x, Constant) else program.avals[x] for x in equation.inputs]
    if equation.primitive is P.select_and_scatter_add_p and platform in EXPANDING_PLATFORMS:
        return _scatter_workspace(operands[0], operands[1], platform)
    if equation.primitive is P.concatenate_p and platform == "cpu":
        return bytes_of(program.avals[equation.outputs[0]])  # copied by a routine of its own, never fused
    if equation.primitive is P.conv_general_dilated_p and platform == "cpu":
        copied = cpu_conv_copies(equation.params["dimension_numbers"])
        avals = (*operands[:2], program.avals[equation.outputs[0]])
        return sum(bytes_of(aval) for aval, is_copied in zip(avals, copied, strict=True) if is_copied)
    return 0


def _scatter_workspace(source: Any, operand: Any, platform: str) -> int:
    """A windowed reduction of each number with its index along every dimension; the zeros to scatter into are the
    result's place. The CPU's compiler stores the indices of the operand's elements, too."""
    indices = 4 * len(source.shape)
    windows = math.prod(source.shape) * indices + bytes_of(source)
    elements = math.prod(operand.shape) * indices if platform == "cpu" else 0
    return windows + elements


def cpu_conv_copies(numbers: Any) -> tuple[bool, bool, bool]:
    """Whether image, kernel and result of a convolution are copied: the CPU has kernels for images as (batch, space,
    features) and weights as (space, inputs, features) alone. Both operands of a weight's gradient lie otherwise."""
    last = len(numbers.lhs_spec) - 1
    of_image, of_kernel = (0, last, *range(1, last)), (last, last - 1, *range(last - 1))
    return (
        tuple(numbers.lhs_spec) != of_image,
        tuple(numbers.rhs_spec) != of_kernel,
        tuple(numbers.out_spec) != of_image,
    )


# Multiprocessors of an H100 and an H200, the side of the tile of a product that one of them computes at a time, and
# what XLA takes a product to cost (`splitk_rewriter.cc`, in units of its own): a FLOP of a multiprocessor, a byte moved
# by the product, a byte moved by the sum that follows, and the start of that sum's kernel.
_CORES, _TILE = 132, 128
_COST_OF_FLOP, _COST_OF_BYTE, _COST_OF_SUMMED_BYTE, _COST_OF_A_SUM = 100.0, 0.194, 193.0, 4.4e7
SPLITTING = frozenset({"cuda", "rocm"})


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
