"""Emits arrays of zeros late, just before something is written into them.

Scatters write into zeros, and so do the steps of a loop that fill stacks. XLA's GPU compiler makes all zeros of a
program in one kernel at the beginning, and they stay live until they are used; its CPU compiler makes them before it
computes the values to add. Zeros that are broadcast from a number after a barrier have to wait for everything in that
barrier.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as extend_core

from remat_opt.trace import compat
from remat_opt.trace.avals import is_on_device
from remat_opt.trace.inline import Equation

# A scatter's zeros, or a loop's stacks together; smaller ones are left as they are. A barrier has a price: one round 32
# numbers, the gradient of picked logits, made 436 MB of DenseNet-169's 412 (H200).
LEAST_BYTES = 2**20


def zeros_after(avals: Sequence[Any], wanted: Any) -> tuple[list[Any], Any]:
    """Arrays of zeros that are made when what is wanted is there; and that, as it is to be read from then on.

    Returns:
        The arrays, and what was waited for.
    """
    numbers, wanted = lax.optimization_barrier(([jnp.zeros((), aval.dtype) for aval in avals], wanted))
    return [lax.broadcast(number, aval.shape) for number, aval in zip(numbers, avals, strict=True)], wanted


def may_wait(equation: Equation) -> bool:
    """Whether a `scan` fills stacks of some size on its device, which can be zeros, and nothing else happens in it."""
    stacks = stacks_of(equation.params)
    if equation.effects or not all(map(is_on_device, equation.params["jaxpr"].out_avals)):
        return False
    if any(jax.dtypes.issubdtype(stack.dtype, jax.dtypes.extended) for stack in stacks):
        return False
    return are_worth_a_barrier(stacks)


def are_worth_a_barrier(zeros: Sequence[jax.ShapeDtypeStruct]) -> bool:
    """Whether arrays of zeros are large enough together to be made late."""
    return sum(math.prod(one.shape) * one.dtype.itemsize for one in zeros) >= LEAST_BYTES


def stacks_of(params: dict[str, Any]) -> list[jax.ShapeDtypeStruct]:
    """Shapes and types of what a `scan` stacks up."""
    _, carries = compat.scan_counts(params)
    made = params["jaxpr"].out_avals[carries:]
    return [jax.ShapeDtypeStruct((params["length"], *aval.shape), aval.dtype) for aval in made]


def loop_with_late_stacks(params: dict[str, Any], inputs: Sequence[Any], awaited: Sequence[int]) -> list[Any]:
    """A `scan` whose stacks are made when those of its inputs that are awaited are there: they are carried from step to
    step."""
    constants, carries = compat.scan_counts(params)
    inputs = list(inputs)
    stacks, given = zeros_after(stacks_of(params), [inputs[index] for index in awaited])
    for index, one in zip(awaited, given, strict=True):
        inputs[index] = one
    fixed, first, arrays = inputs[:constants], inputs[constants : constants + carries], inputs[constants + carries :]
    step_of = extend_core.jaxpr_as_fun(params["jaxpr"])
    length, is_reversed = params["length"], params["reverse"]

    def step(state: tuple, slices: list[Any]) -> tuple[tuple, None]:
        index, carried, filled = state
        made = step_of(*fixed, *carried, *slices)
        filled = [
            lax.dynamic_update_index_in_dim(stack, one, index, 0)
            for stack, one in zip(filled, made[carries:], strict=True)
        ]
        return (index - 1 if is_reversed else index + 1, made[:carries], filled), None

    start = jnp.asarray(length - 1 if is_reversed else 0, jnp.int32)
    (_, last, filled), _ = lax.scan(
        step, (start, list(first), stacks), list(arrays), length, reverse=is_reversed, unroll=params["unroll"]
    )
    return [*last, *filled]
