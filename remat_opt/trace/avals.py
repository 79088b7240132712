"""What an abstract value says: its dtype, the bytes of an element, where it is. Public JAX alone."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import numpy as np


def is_on_device(aval: Any) -> bool:
    """Whether a value is in its device's own memory, and not in the host's, where offloading puts it."""
    return getattr(aval, "memory_space", None) in (None, jax.memory.Space.Device)


def is_placed(aval: Any) -> bool:
    """Whether an abstract value says where it is on a mesh, or over which axes of one it varies."""
    own, manual = getattr(aval, "sharding", None), getattr(aval, "manual_axis_type", None)
    return bool((own is not None and not own.mesh.empty) or getattr(manual, "varying", ()))


def is_inexact(aval: Any) -> bool:
    """Whether values of a type have a derivative: floating point and complex numbers."""
    return jax.dtypes.issubdtype(getattr(aval, "dtype", np.bool_), np.inexact)


def is_key(aval: Any) -> bool:
    """Whether something is of typed random keys."""
    return jax.dtypes.issubdtype(getattr(aval, "dtype", None), jax.dtypes.prng_key)


def abstract(aval: Any, sharding: Any = None) -> Any:
    """An abstract value as an argument to trace with: its own sharding or another one, the mesh axes it varies over."""
    kept = {"weak_type": aval.weak_type} if getattr(aval, "weak_type", False) else {}
    own = getattr(aval, "sharding", None)
    sharding = own if sharding is None and own is not None and not own.mesh.empty else sharding
    if sharding is not None:
        kept["sharding"] = sharding
    if manual := getattr(aval, "manual_axis_type", None):
        kept["manual_axis_type"] = manual
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, **kept)


@functools.cache
def dtype_name(dtype: Any) -> str:
    """A dtype as text, which NumPy takes its time to write."""
    return str(dtype)


@functools.cache
def item_bytes(dtype: Any) -> int:
    """Bytes of one element, of JAX's extended dtypes (typed random keys) too."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return dtype.itemsize
    return np.dtype(dtype).itemsize


def bytes_of(aval: Any) -> int:
    """Bytes of one value in its device's memory; 0 for what has no storage there (tokens, references, values in the
    host's memory)."""
    return bytes_anywhere(aval) if is_on_device(aval) else 0


def bytes_anywhere(aval: Any) -> int:
    """Bytes of one value in whichever memory; 0 for what has no storage (tokens, references)."""
    shape, dtype = getattr(aval, "shape", None), getattr(aval, "dtype", None)
    if shape is None or dtype is None:
        return 0
    return math.prod(shape) * item_bytes(dtype)
