"""Products with vectors, which XLA's GPU compiler does as loops: they multiply, and sums are reductions as others.

A product without a dimension to sum over is a multiplication, and so is one with a vector, before its sums, where both
operands are vectors or the matrix is small (`HandleDot` in `algebraic_simplifier.cc`, and of GPUs
`ShouldStrengthReduceDotToReduce`). A dimension of one is none.

Sums over a batch of products are left as products: they are loops, too, but XLA then lets the arrays that they read lie
otherwise, and stores more of them, which is not in the model (a selective state-space model, plain, 65 MB compiled, is
foreseen at 57 so and at 47 with loops).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
from jax import lax
from jax.extend.core import primitives as P

from remat_opt.program import compat
from remat_opt.program.inline import Equation, Program
from remat_opt.program.traced import traced_instead

LARGEST = 10_000_000  # numbers of both operands


def with_vectors_by_loops(program: Program) -> Program:
    """A program in which such products are multiplications and sums."""
    avals, equations = list(program.avals), []
    for equation in program.equations:
        if equation.primitive is P.dot_general_p and _is_by_loops(program, equation):
            equations += _multiplied(program, equation, avals)
        else:
            equations.append(equation)
    return dataclasses.replace(program, avals=tuple(avals), equations=tuple(equations))


def _is_by_loops(program: Program, equation: Equation) -> bool:
    left, right = (program.aval_of(operand) for operand in equation.inputs)
    if compat.is_placed(left) or compat.is_placed(right) or not left.size or not right.size:
        return False
    (contracted, _), (batched, _) = equation.params["dimension_numbers"]
    batch, summed = (math.prod(left.shape[axis] for axis in axes) for axes in (batched, contracted))
    rows, columns = (one.size // (batch * summed) for one in (left, right))
    if summed == 1:
        return True
    if batch > 1:
        return False
    if rows == columns == 1:
        return True
    return 1 in (rows, columns) and summed * (rows + columns) < LARGEST


def _multiplied(program: Program, equation: Equation, avals: list[Any]) -> list[Equation]:
    """The equations instead."""
    contracted, batched = equation.params["dimension_numbers"]
    made = program.avals[equation.outputs[0]]
    shapes = [program.aval_of(operand).shape for operand in equation.inputs]
    free = [
        [axis for axis in range(len(shape)) if axis not in (*contracted[at], *batched[at])]
        for at, shape in enumerate(shapes)
    ]
    is_summed = math.prod(shapes[0][axis] for axis in contracted[0]) > 1

    def over_result(operands: tuple[jax.Array, ...], at: int) -> jax.Array:
        array = lax.transpose(operands[at], (*batched[at], *free[at], *contracted[at]))
        count = len(batched[at])
        behind = len(free[0]) * at
        places = (*range(count), *range(count + behind, count + behind + len(free[at])))
        array = lax.reshape(array, [made.shape[place] for place in places])
        return lax.broadcast_in_dim(array, made.shape, places)

    def outer(*operands: jax.Array) -> jax.Array:
        return over_result(operands, 0) * over_result(operands, 1)

    def by_vector(*operands: jax.Array) -> jax.Array:
        """The vector over the matrix, which stays as it is; all other dimensions of the vector are one, and so is the
        batch."""
        kept = int(operands[1].size > operands[0].size)
        matrix, vector = operands[kept], operands[1 - kept]
        places, axes = contracted[kept], contracted[1 - kept]
        order = sorted(range(len(places)), key=lambda at: places[at])
        left = [axis for axis in range(vector.ndim) if axis not in axes]
        turned = lax.transpose(vector, (*(axes[at] for at in order), *left))
        vector = lax.reshape(turned, [matrix.shape[places[at]] for at in order])
        vector = lax.broadcast_in_dim(vector, matrix.shape, [places[at] for at in order])
        return lax.reshape((matrix * vector).sum(tuple(places), dtype=made.dtype), made.shape)

    def multiply(*operands: jax.Array) -> jax.Array:
        numbers = [lax.convert_element_type(operand, made.dtype) for operand in operands]
        return by_vector(*numbers) if is_summed else outer(*numbers)

    return traced_instead(multiply, equation, equation.inputs, avals)
