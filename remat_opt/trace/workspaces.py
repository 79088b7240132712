"""Bytes that compilers need beside an equation's operands and results."""

from __future__ import annotations

import math
from typing import Any

from jax.extend.core import primitives as P

from remat_opt.trace.avals import bytes_of
from remat_opt.trace.inline import Equation, Program
from remat_opt.trace.platforms import EXPANDING


def workspace_of(equation: Equation, program: Program, platform: str) -> int:
    """Bytes of what the platform's compiler adds to an equation, beside its operands and results."""
    if equation.primitive is P.select_and_scatter_add_p and platform in EXPANDING:
        source, operand = (program.aval_of(x) for x in equation.inputs)
        return _scatter_workspace(source, operand, platform)
    if equation.primitive is P.concatenate_p and platform == "cpu":
        return bytes_of(program.avals[equation.outputs[0]])  # copied by a routine of its own, never fused
    if equation.primitive is P.random_bits_p and platform == "cpu":
        # Threefry works in a loop on two numbers for each result, which it starts from copies.
        result = program.avals[equation.outputs[0]]
        return 4 * 4 * result.size - bytes_of(result)
    if equation.primitive is P.conv_general_dilated_p and platform == "cpu":
        copied = cpu_conv_copies(equation.params["dimension_numbers"])
        avals = (*map(program.aval_of, equation.inputs[:2]), program.avals[equation.outputs[0]])
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
