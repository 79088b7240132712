"""What a compiler makes of an equation before anything else: pieces that are cut out one by one, a loop's only turn."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax.extend import core as extend_core

from remat_opt.program import compat


def unstacked(whole: Any, *, axis: int) -> Any | None:
    """What takes the pieces of an array apart, each when it is read, as compilers do; in one equation all of them would
    be there from the first on. None on a mesh, whose axes its pieces would have to be told."""
    if compat.is_placed(whole.aval):
        return None

    def pieces(x: jax.Array) -> list[jax.Array]:
        return [lax.index_in_dim(x, at, axis, keepdims=False) for at in range(x.shape[axis])]

    return jax.make_jaxpr(pieces)(jax.ShapeDtypeStruct(whole.aval.shape, whole.aval.dtype))


def single_turn(loop: Any) -> Any | None:
    """What a `scan` of one turn computes, without a loop, as XLA's `while_loop_simplifier.cc` takes it. None where
    something else happens in it, and on a mesh."""
    given = [variable.aval for variable in loop.invars]
    if loop.effects or any(compat.is_placed(aval) or compat.is_reference(aval) for aval in given):
        return None
    constants, carries = compat.scan_counts(loop.params)
    turn = extend_core.jaxpr_as_fun(loop.params["jaxpr"])

    def once(*operands: jax.Array) -> list[jax.Array]:
        known, stacked = operands[: constants + carries], operands[constants + carries :]
        made = turn(*known, *(lax.squeeze(stack, (0,)) for stack in stacked))
        return [*made[:carries], *(lax.expand_dims(value, (0,)) for value in made[carries:])]

    return jax.make_jaxpr(once)(*(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in given))
