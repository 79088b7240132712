"""What a compiler makes of an equation before anything else: pieces that are cut out one by one."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from remat_opt.trace.avals import is_placed


def unstacked(whole: Any, *, axis: int) -> Any | None:
    """What takes the pieces of an array apart, each when it is read, as compilers do; in one equation all of them would
    be there from the first on. None on a mesh, whose axes its pieces would have to be told."""
    if is_placed(whole.aval):
        return None

    def pieces(x: jax.Array) -> list[jax.Array]:
        return [lax.index_in_dim(x, at, axis, keepdims=False) for at in range(x.shape[axis])]

    return jax.make_jaxpr(pieces)(jax.ShapeDtypeStruct(whole.aval.shape, whole.aval.dtype))
