"""What XLA's GPU compiler takes an equation to cost where it is a part of a kernel (`gpu_hlo_cost_analysis.cc`)."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax.extend.core import primitives as P

from remat_opt.compilers.equations import WINDOWED
from remat_opt.compilers.gpu_fusion import Work
from remat_opt.program import compat
from remat_opt.program.inline import Equation, Program
from remat_opt.program.primitives import ELEMENTWISE, REDUCTION, named

# Cycles for each element, of an H100 and in float32: XLA's own measurements (`hlo_op_profiles_data.h`). Numbers of two
# bytes are computed in float32, but for sums and products.
_CYCLES: dict[Any, float] = {
    primitive: cycles
    for names, cycles in (
        ("add sub add_jaxvals", 7.0),
        ("div", 19.0),
        ("rsqrt sqrt", 75.0),
        ("exp exp2", 79.0),
        ("logistic", 79.0 + 19.0 + 7.0),  # as it is expanded
        ("log", 166.0),
        ("cbrt", 178.0),
        ("expm1", 190.0),
        ("log1p", 229.0),
        ("atan2", 431.0),
        ("tanh", 467.0),
        ("pow", 510.0),
        ("sin cos", 970.0),
    )
    for primitive in named(names)
}
_USUAL_CYCLES = 3.0
# Elements that a thread block computes of an elementwise result: 128 threads, 4 each. Rows that one computes of a
# reduction of long rows, columns of one over columns; more elements than that are reduced in two steps.
BLOCK, _ROW_THREADS, _COLUMNS, _MOST_ROWS, _MOST_COLUMNS = 512, 256, 32, 4096, 16384
_SECTOR = 32  # bytes


def work_of(equation: Equation, program: Program) -> Work:
    """What a kernel does for the result of an equation."""
    result = program.avals[equation.outputs[0]]
    if not hasattr(result, "shape"):  # tokens and references
        return Work(0.0, 1.0)
    operands = {
        x: program.avals[x] for x in equation.inputs if isinstance(x, int) and hasattr(program.avals[x], "shape")
    }
    if equation.primitive in REDUCTION and operands:
        (operand, *_) = operands.values()
        return Work(7.0 * operand.size, _blocks_of_reduction(operand.shape, equation.params.get("axes", ())))
    blocks = result.size / BLOCK
    if equation.primitive is P.dot_general_p:
        _, (batch, _) = equation.params["dimension_numbers"]
        return Work(result.size, blocks, is_view=len(result.shape) != bool(batch) + 2)
    if equation.primitive in WINDOWED:
        window = math.prod(equation.params["window_dimensions"])
        uses = {x: max(1.0, window * result.size / max(aval.size, 1)) for x, aval in operands.items()}
        return Work(7.0 * window * result.size, blocks, uses)
    if equation.primitive is P.scatter_add_p and isinstance(equation.inputs[2], int):
        updates = operands[equation.inputs[2]]
        return Work(7.0 * updates.size, updates.size / BLOCK)
    if equation.primitive is P.transpose_p and _moves_neighbours(equation.params["permutation"], result.shape):
        return Work(_cycles(equation, result) * result.size, blocks, within=_used_apart(result))
    uses = {x: result.size / max(aval.size, 1) for x, aval in operands.items() if equation.primitive in _PARTS}
    return Work(_cycles(equation, result) * result.size, blocks, uses)


_PARTS = named("broadcast_in_dim slice dynamic_slice gather")


def copy_of(aval: Any, lies: tuple[int, ...], order: tuple[int, ...]) -> Work:
    """What a copy does that changes the order in which an array's dimensions lie. Neighbours in the result are read
    from as far apart as the dimensions behind theirs are large, and memory gives 32 bytes at a time."""
    apart = math.prod(aval.shape[axis] for axis in lies[lies.index(order[-1]) + 1 :])
    return Work(0.0, aval.size / BLOCK, used=max(1 / max(apart, 1), _used_apart(aval)))


def _moves_neighbours(permutation: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether neighbours in a transposed array are none in what it is made of.

    Args:
        permutation: of the transpose.
        shape: of its result.
    """
    large = [axis for axis, size in zip(permutation, shape, strict=True) if size > 1]
    return bool(large) and large[-1] != max(large)


def _used_apart(aval: Any) -> float:
    """Which part of what memory gives is used where an array is read one element here and one there."""
    return min(1.0, compat.item_bytes(aval.dtype) / _SECTOR)


def _cycles(equation: Equation, result: Any) -> float:
    if equation.primitive is P.integer_pow_p:
        return _USUAL_CYCLES * max(1, abs(equation.params["y"]).bit_length() - 1)
    cycles = _CYCLES.get(equation.primitive, _USUAL_CYCLES if equation.primitive in ELEMENTWISE else 7.0)
    return _USUAL_CYCLES if cycles < 10 and result.dtype != jnp.float32 else cycles


def _blocks_of_reduction(shape: tuple[int, ...], axes: tuple[int, ...]) -> float:
    """Thread blocks of a reduction: a block computes some rows, or some columns; where one would have to read very
    much, the reduction is divided by the square root of its length first."""
    rank = len(shape)
    reduced = math.prod(shape[axis] for axis in axes)
    kept = math.prod(shape) // max(reduced, 1)
    if not kept or not reduced:
        return 1.0
    if not axes or rank - 1 in axes:
        parts = math.isqrt(reduced) if reduced > _MOST_COLUMNS else 1
        return kept * parts * min(1.0, max(reduced / parts, 32) / _ROW_THREADS)
    columns = math.prod(shape[axis] for axis in range(max(axes) + 1, rank))
    parts = math.isqrt(reduced) if reduced > _MOST_ROWS else 1
    return kept / columns * -(-columns // _COLUMNS) * parts
