"""The gradient of picking one element of each row, without a scatter.

`jnp.take_along_axis` with one index for each row, as in a cross entropy with integer labels, is differentiated into a
scatter of one number into each row of an array of zeros, as large as the array that was picked from: all logits. No
compiler fuses a scatter, so that its result is stored besides the logits. Comparing each position with the index is
elementwise instead: it is fused and never stored. The values are the same, also for an index out of bounds (but minus
zero stays minus zero).

On the CPU the scatter stays: different fusions round differently there, and the results would not be bit-identical.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives

from remat_opt.rewrites.masks import is_zero
from remat_opt.trace.avals import is_placed
from remat_opt.trace.inline import Equation, Program
from remat_opt.trace.platforms import GPUS
from remat_opt.trace.traced import Tracing

FUSING_PLATFORMS = GPUS | {"tpu"}


def by_comparison(program: Program) -> Program:
    """The same program with such scatters made by comparison.

    Bodies of its loops are to be read so, too (`Program.compares`).
    """
    zeros = {
        equation.outputs[0]
        for equation in program.equations
        if equation.primitive is primitives.broadcast_in_dim_p and is_zero(equation.inputs[0])
    }
    tracing, equations = Tracing(program.avals, program.constants), []
    for equation in program.equations:
        if _puts_one_in_each_row(program, equation, zeros):
            equations += _compared(program, equation, tracing)
        else:
            equations.append(equation)
    avals, constants = tuple(tracing.avals), tuple(tracing.constants)
    return dataclasses.replace(program, avals=avals, constants=constants, equations=tuple(equations), compares=True)


def _puts_one_in_each_row(program: Program, equation: Equation, zeros: set[int]) -> bool:
    if equation.primitive is not primitives.scatter_add_p or equation.inputs[0] not in zeros:
        return False
    if any(is_placed(program.aval_of(operand)) for operand in equation.inputs):
        return False  # what is traced for them would have to be placed alike
    numbers, mode = equation.params["dimension_numbers"], equation.params["mode"]
    array, index = (program.aval_of(equation.inputs[at]) for at in (0, 1))
    rows = tuple(axis for axis in range(array.ndim) if axis not in numbers.scatter_dims_to_operand_dims)
    return (
        mode in (lax.GatherScatterMode.FILL_OR_DROP, lax.GatherScatterMode.PROMISE_IN_BOUNDS)
        and not numbers.update_window_dims
        and len(numbers.scatter_dims_to_operand_dims) == 1
        and numbers.inserted_window_dims == numbers.scatter_dims_to_operand_dims
        and numbers.operand_batching_dims == rows
        and numbers.scatter_indices_batching_dims == tuple(sorted(numbers.scatter_indices_batching_dims))
        and index.size == array.size // max(array.shape[numbers.scatter_dims_to_operand_dims[0]], 1)
    )


def _compared(program: Program, equation: Equation, tracing: Tracing) -> list[Equation]:
    """The equations instead; the result keeps its number."""
    (axis,) = equation.params["dimension_numbers"].scatter_dims_to_operand_dims
    array, index, _ = (program.aval_of(operand) for operand in equation.inputs)
    rows = tuple(other for other in range(array.ndim) if other != axis)
    counted = index.dtype if jnp.iinfo(index.dtype).max >= array.shape[axis] else jnp.dtype("int32")

    def put(index: jax.Array, number: jax.Array) -> list[jax.Array]:
        index, number = (
            lax.broadcast_in_dim(lax.reshape(one, [array.shape[row] for row in rows]), array.shape, rows)
            for one in (lax.convert_element_type(index, counted), number)
        )
        places = lax.broadcasted_iota(counted, array.shape, axis)
        return [lax.select(places == index, number, lax.full(array.shape, 0, array.dtype))]

    operands = equation.inputs[1:]
    equations, _ = tracing.placed(tracing.traced(put, equation, operands), operands)
    return [*equations[:-1], dataclasses.replace(equations[-1], outputs=equation.outputs)]
