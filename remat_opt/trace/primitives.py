"""Which primitives are what to a compiler."""

from __future__ import annotations

from jax.extend.core import primitives as P

from remat_opt.trace import compat
from remat_opt.trace.pool_parts import BOTH, PLACES, SPREAD

_ELEMENTWISE_NAMES = """
    abs acos acosh add add_jaxvals and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type
    broadcast_in_dim cbrt ceil clamp clz complex concatenate conj convert_element_type copy cos cosh digamma
    div dynamic_slice eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag
    integer_pow iota is_finite le lgamma log log1p log2 logistic lt max min mul name ne neg nextafter not
    one_minus_square or pad polygamma polynomial population_count pow real reduce_precision
    regularized_incomplete_beta rem reshape rev round rsqrt select_n shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh slice sqrt square squeeze stop_gradient sub tan tanh transpose xor zeta
    random_wrap random_unwrap
"""
_REDUCTION_NAMES = """
    argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor
"""


def named(names: str) -> frozenset:
    """The primitives of some names, as far as this version of JAX has them."""
    found = (getattr(P, f"{name}_p", None) for name in names.split())
    return frozenset(primitive for primitive in found if primitive is not None)


ELEMENTWISE = named(_ELEMENTWISE_NAMES) | {compat.pvary_p, SPREAD, BOTH}
REDUCTION = named(_REDUCTION_NAMES) | {PLACES}
CONTRACTION = frozenset({P.conv_general_dilated_p, P.dot_general_p})
# Their result is no new number: they move bytes, or do nothing, and take no FLOPs.
MOVES = named(
    "broadcast_in_dim concatenate copy dynamic_slice dynamic_update_slice iota name pad reshape rev slice squeeze "
    "stop_gradient transpose"
) | {compat.pvary_p, compat.barrier_p, compat.layout_constraint_p}
# Of elementwise work what reads its operands at other places than it writes.
PERMUTING = named("broadcast_in_dim concatenate dynamic_slice pad rev slice transpose") | {SPREAD, BOTH}
# What takes too many instructions for compilers to do it in more than one kernel.
EXPENSIVE = named(
    "acos acosh asin asinh atan atan2 atanh cbrt cosh erf erf_inv erfc exp exp2 expm1 log log1p logistic pow rsqrt "
    "sinh sqrt tanh"
)
# Of whose bodies one runs at a time.
WITH_BODIES = frozenset({P.scan_p, P.while_p, P.cond_p, compat.shard_map_p})
