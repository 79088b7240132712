"""In which order the dimensions of a loop's stacks lie in a GPU's memory, where no product in its body says so.

XLA lays out what a body carries, then what it stacks, then what it is given, each as it is declared where nothing else
has laid it out yet; elementwise work lies as its operands, and what is summed over 32 numbers and more lies with those
side by side, so that a warp reads them at once (`gpu/transforms/layout_assignment.cc`,
`PropagateReductionLayoutToOperand`). A stack that one loop writes so and another one reads otherwise is copied between
them: a conditional random field sums over tags on its way forwards, and over the batch on its way back.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from jax.extend.core import primitives as P

from remat_opt.compilers.gpu_orders import Order
from remat_opt.program import compat
from remat_opt.program.inline import Equation, Program, inline
from remat_opt.program.primitives import ELEMENTWISE, REDUCTION

_ROW = 32  # numbers that are worth another order
_MOVING = {P.dynamic_slice_p, P.pad_p, P.reshape_p, P.rev_p, P.slice_p, P.squeeze_p, P.transpose_p}


def orders_in_body(params: dict[str, Any]) -> tuple[list[Order | None], list[Order | None]]:
    """In which order a loop's body has the slices of the stacks that it is given and of those that it makes, the
    outermost dimension first; None for all else, and where products, or what moves numbers, have a say.

    Args:
        params: of the loop.
    """
    constants, carries = compat.scan_counts(params)
    body = inline(params["jaxpr"], with_barriers=True, keep_names=False)
    nothing: tuple[list, list] = [None] * len(body.inputs), [None] * len(body.outputs)
    computed = (ELEMENTWISE | REDUCTION) - _MOVING
    if not all(one.primitive in computed or _is_renamed(one, body) for one in body.equations):
        return nothing
    spread = _Spread(body)
    first = constants + carries
    for value in (*body.inputs[constants:first], *body.outputs[carries:], *body.inputs[first:], *body.inputs):
        if isinstance(value, int):
            spread.lay(value, tuple(range(len(body.avals[value].shape))))
    given = [spread.orders.get(value) if at >= first else None for at, value in enumerate(body.inputs)]
    made = [
        spread.orders.get(value) if at >= carries and isinstance(value, int) else None
        for at, value in enumerate(body.outputs)
    ]
    return given, made


def _is_renamed(equation: Equation, body: Program) -> bool:
    """Whether an equation only drops or adds dimensions of one number, a sum over such a one included."""
    if equation.primitive not in (P.reshape_p, P.squeeze_p, *REDUCTION):
        return False
    shapes = (body.aval_of(equation.inputs[0]).shape, body.avals[equation.outputs[0]].shape)
    before, after = (tuple(side for side in shape if side > 1) for shape in shapes)
    return before == after


class _Spread:
    """Orders, from a value to all that lies as it does."""

    def __init__(self, body: Program):
        self.body = body
        self.orders: dict[int, Order] = {}
        self.maker = {value: one for one in body.equations for value in one.outputs}
        self.readers: dict[int, list[Equation]] = defaultdict(list)
        for one in body.equations:
            for value in {x for x in one.inputs if isinstance(x, int)}:
                self.readers[value].append(one)

    def lay(self, value: int, order: Order) -> None:
        """Lay out a value that lies nowhere yet, and all that follows."""
        pending = [(value, order)]
        while pending:
            value, order = pending.pop()
            if value in self.orders:
                continue
            self.orders[value] = order
            if value in self.maker:
                pending += self._operands(self.maker[value], order)
            for reader in self.readers[value]:
                pending += self._results(reader, value, order)

    def _operands(self, equation: Equation, order: Order) -> Iterator[tuple[int, Order]]:
        """How an equation's operands lie whose result lies in an order."""
        values = [x for x in equation.inputs if isinstance(x, int)]
        if not values:
            return
        result_shape, shape = (self.body.avals[x].shape for x in (equation.outputs[0], values[0]))
        if _is_renamed(equation, self.body):
            yield values[0], _of_renamed(order, result_shape, shape)
        elif equation.primitive in REDUCTION:
            axes = equation.params["axes"]
            kept = [axis for axis in range(len(shape)) if axis not in axes]
            if math.prod(shape[axis] for axis in axes) >= _ROW:
                yield values[0], (*(kept[at] for at in order), *axes)
        elif equation.primitive is P.broadcast_in_dim_p:
            places = equation.params["broadcast_dimensions"]
            yield values[0], tuple(places.index(axis) for axis in order if axis in places)
        else:
            yield from ((value, order) for value in values if self.body.avals[value].shape == result_shape)

    def _results(self, equation: Equation, value: int, order: Order) -> Iterator[tuple[int, Order]]:
        """How an equation's result lies of which an operand lies in an order."""
        (result, *_) = equation.outputs
        shape, result_shape = (self.body.avals[x].shape for x in (value, result))
        if _is_renamed(equation, self.body):
            yield result, _of_renamed(order, shape, result_shape)
        elif equation.primitive in REDUCTION:
            kept = [axis for axis in range(len(order)) if axis not in equation.params["axes"]]
            yield result, tuple(kept.index(axis) for axis in order if axis in kept)
        elif equation.primitive is not P.broadcast_in_dim_p and shape == result_shape:
            yield result, order


def _of_renamed(order: Order, before: tuple[int, ...], after: tuple[int, ...]) -> Order:
    """An order after dimensions of one number came or went; where these lie makes no difference."""
    wide_before = [axis for axis, side in enumerate(before) if side > 1]
    wide_after = [axis for axis, side in enumerate(after) if side > 1]
    wide = [wide_after[wide_before.index(axis)] for axis in order if axis in wide_before]
    return (*(axis for axis in range(len(after)) if axis not in wide_after), *wide)
