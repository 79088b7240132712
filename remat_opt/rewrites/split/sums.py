"""Linear operations on sums over the batch: they give the same on the parts, and may run before these are added up.

They do so where the result is no larger than what would be carried otherwise: gradients of one weight that is read in
two places are added before they are carried.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import primitives as P

from remat_opt.rewrites.split.layouts import Layout, Run, Sum, View, bytes_of
from remat_opt.trace.avals import is_inexact

_OF_ONE = frozenset(
    {P.neg_p, P.reshape_p, P.transpose_p, P.squeeze_p, P.broadcast_in_dim_p, P.reduce_sum_p, P.copy_p, P.name_p, P.rev_p}
)
_OF_ALL = frozenset({P.add_p, P.add_jaxvals_p, P.sub_p, P.concatenate_p})


def on_parts(view: View) -> Run | None:
    """How an equation runs on parts of sums; None where it is not linear in them, or would make more to carry."""
    found = _linear(view)
    if found is None:
        return None
    avals = [view.program.aval_of(x) for x in view.equation.inputs]
    before = sum(bytes_of(aval) for aval, layout in zip(avals, found, strict=True) if layout is Sum.ADD)
    after = sum(bytes_of(view.program.avals[value]) for value in view.equation.outputs)
    return Run(tuple(found), (Sum.ADD,) * len(view.equation.outputs)) if after <= before else None


def _linear(view: View) -> Sequence[Layout] | None:
    """The layouts of the operands where an equation is linear in sums."""
    primitive, layouts = view.equation.primitive, view.inputs
    are_sums = [layout is Sum.ADD for layout in layouts]
    if any(isinstance(layout, int) for layout in layouts):
        return None
    if primitive in _OF_ONE or primitive in _OF_ALL:
        return layouts if all(are_sums) else None
    if primitive is P.convert_element_type_p:
        return layouts if _keeps_fractions(view) else None
    if primitive is P.mul_p:
        return layouts if sum(are_sums) == 1 and None in layouts and is_inexact(_aval_out(view)) else None
    if primitive is P.div_p:
        return layouts if are_sums == [True, False] and layouts[1] is None and is_inexact(_aval_out(view)) else None
    return None


def _keeps_fractions(view: View) -> bool:
    return view.inputs == (Sum.ADD,) and is_inexact(view.program.aval_of(view.equation.inputs[0])) and is_inexact(
        _aval_out(view)
    )


def _aval_out(view: View) -> Any:
    return view.program.avals[view.equation.outputs[0]]
