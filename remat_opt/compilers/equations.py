"""What compilers see in an equation."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.extend.core import primitives as P

from remat_opt.program import compat
from remat_opt.program.inline import Constant, Equation, Program
from remat_opt.program.primitives import CONTRACTION, DEAR, ELEMENTWISE, MOVES, named

_DIVISIONS = named("div rem")
PRODUCTS = named("mul square")
RESHAPING = named("reshape squeeze broadcast_in_dim")
BIASES = named("add sub")
WINDOWED = named("reduce_window reduce_window_max reduce_window_min reduce_window_sum")


def is_dear(equation: Equation, program: Program) -> bool:
    """Whether the CPU's compiler does an elementwise equation in one kernel only: it takes many instructions. So does
    rounding to bfloat16, with which all arithmetic on such numbers ends, as the CPU computes them in float32."""
    if not equation.outputs or equation.primitive not in ELEMENTWISE:
        return False
    dtype = program.avals[equation.outputs[0]].dtype
    if equation.primitive in DEAR:
        return True
    if equation.primitive in _DIVISIONS:
        if equation.primitive is P.div_p and isinstance(equation.inputs[1], Constant):
            return False  # it multiplies by the inverse
        return not jnp.issubdtype(dtype, jnp.integer)
    return dtype == jnp.bfloat16 and equation.primitive not in MOVES


def multiplies_only(equation: Equation, value: int) -> bool:
    """Whether an equation is a product, or a `scan` that reads a value as a stack whose slices only products read."""
    if equation.primitive in CONTRACTION:
        return True
    if equation.primitive is not P.scan_p:
        return False
    first = sum(compat.scan_counts(equation.params))
    body = compat.bare_jaxpr(equation.params["jaxpr"])
    slices = {body.invars[at] for at, x in enumerate(equation.inputs) if x == value and at >= first}
    if len(slices) != equation.inputs.count(value):
        return False
    for inner in body.eqns:
        if slices.isdisjoint(atom for atom in inner.invars if not isinstance(atom, compat.Literal)):
            continue
        if inner.primitive in MOVES:
            slices.update(inner.outvars)
        elif inner.primitive not in CONTRACTION:
            return False
    return slices.isdisjoint(atom for atom in body.outvars if not isinstance(atom, compat.Literal))


def is_matrix_transpose(equation: Equation) -> bool:
    """Whether an equation transposes a matrix."""
    return equation.primitive is P.transpose_p and len(equation.params["permutation"]) == 2


def is_half(aval: Any) -> bool:
    """Whether a number takes two bytes and has a fraction."""
    return aval.dtype in (jnp.bfloat16, jnp.float16)


def draws_by_arithmetic(equation: Equation, program: Program) -> bool:
    """Whether random bits are Threefry's: some hundred steps of arithmetic on a key and a position, of which none alone
    is too much to be done in every kernel that reads them."""
    if equation.primitive is not P.random_bits_p:
        return False
    (key,) = (x.aval if isinstance(x, Constant) else program.avals[x] for x in equation.inputs)
    return str(key.dtype) == "key<fry>"
