"""Linear operations on sums over the batch: they give the same on the parts, and may run before these are added up.

They do so where the result is no larger than what would be carried otherwise: gradients of one weight that is read in
two places are added before they are carried. In a body they always do, as no sum is complete before the loop over
chunks has ended; what is added to a sum and is whole, such as the zeros that a loop begins with, counts in the first
chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import primitives as P

from remat_opt.rewrites.split.layouts import Layout, Run, Sum, View
from remat_opt.trace import compat
from remat_opt.trace.avals import bytes_of, is_inexact
from remat_opt.trace.inline import Constant

# Linear in these operands together.
_LINEAR: dict[Any, slice] = {
    **dict.fromkeys((P.neg_p, P.reshape_p, P.transpose_p, P.squeeze_p, P.broadcast_in_dim_p), slice(1)),
    **dict.fromkeys((P.reduce_sum_p, P.copy_p, P.name_p, P.rev_p, P.slice_p, P.dynamic_slice_p), slice(1)),
    P.convert_element_type_p: slice(1),
    P.gather_p: slice(1),
    **dict.fromkeys((P.add_p, P.add_jaxvals_p, P.sub_p, P.pad_p, P.dynamic_update_slice_p), slice(2)),
    P.concatenate_p: slice(None),
    P.select_n_p: slice(1, None),
    P.scatter_add_p: slice(0, 3, 2),
    **dict.fromkeys((compat.sharding_constraint_p, compat.reshard_p, compat.pvary_p), slice(1)),
}
_PLACES = frozenset({compat.sharding_constraint_p, compat.reshard_p})  # say where the whole sum is
# Linear in one operand, if all others are whole.
_BILINEAR: dict[Any, slice] = {P.mul_p: slice(2), P.dot_general_p: slice(2), P.div_p: slice(1)}


def on_parts(view: View) -> Run | None:
    """How an equation runs on parts of sums; None where it is not linear in them, or would make more to carry."""
    found = _linear(view)
    if found is None:
        return None
    avals = [view.program.aval_of(x) for x in view.equation.inputs]
    before = sum(bytes_of(aval) for aval, layout in zip(avals, found, strict=True) if layout is Sum.ADD)
    after = sum(bytes_of(view.program.avals[value]) for value in view.equation.outputs)
    if after > before and not view.context.is_body:
        return None
    return Run(tuple(found), (Sum.ADD,) * len(view.equation.outputs))


def _linear(view: View) -> Sequence[Layout] | None:
    """The layouts in which the operands are read where an equation is linear in sums."""
    primitive, layouts = view.equation.primitive, list(view.inputs)
    if any(layout not in (None, Sum.ADD) for layout in layouts):
        return None
    sums = [at for at, layout in enumerate(layouts) if layout is Sum.ADD]
    positions = range(len(layouts))
    if primitive in _BILINEAR:
        fits = len(sums) == 1 and sums[0] in positions[_BILINEAR[primitive]] and _is_fraction(view)
        return layouts if fits else None
    if primitive not in _LINEAR or (primitive in _PLACES and not view.context.is_body):
        return None
    linear = positions[_LINEAR[primitive]]
    others = [at for at in linear if at not in sums]
    if not set(sums) <= set(linear) or (primitive is P.convert_element_type_p and not _is_fraction(view)):
        return None
    if not view.context.is_body and any(not isinstance(view.equation.inputs[at], Constant) for at in others):
        return None
    return [Sum.ADD if at in linear else None for at in positions]


def _is_fraction(view: View) -> bool:
    """Whether operands and result are floating point: integers are rounded by a product or another type."""
    avals = [view.program.aval_of(view.equation.inputs[0]), view.program.avals[view.equation.outputs[0]]]
    return all(map(is_inexact, avals))
