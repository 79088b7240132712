"""Stacks of one slice a step, through which loops hand values to each other: room for them, reading one slice."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from remat_opt.trace import compat


def slice_at(stack: Any, index: Any) -> Any:
    """A step's slice of a stack."""
    if stack.shape[0] == 1:  # nothing to choose from: the same bytes, to compilers and to our model of them
        return lax.squeeze(stack, (0,))
    return lax.dynamic_index_in_dim(stack, index, 0, keepdims=False)


def slice_as_written(stack: Any, index: Any) -> Any:
    """A slice in the layout that it was written in. A compiler that is free to choose may like another one for its
    readers, and copies the whole stack for it."""
    return compat.row_major(slice_at(stack, index))


def to_host(value: Any) -> Any:
    """A slice for a stack in the host's memory."""
    return jax.device_put(value, jax.memory.Space.Host)


def fetched(stack: Any, index: Any) -> Any:
    """A step's slice of a stack in the host's memory, in the device's."""
    return jax.device_put(slice_at(stack, index), jax.memory.Space.Device)


def room_for(value: Any, places: int) -> Any:
    """A stack to write values to that have the shape and type of one, or of an abstract one."""
    return lax.full((places, *value.shape), 0, value.dtype)  # random keys, too


def unroll_for(given: Any, length: int) -> int:
    """The user's `unroll` for a loop of another length; 0 in a jaxpr stands for all steps."""
    return max(1, min(int(given) or length, length))
