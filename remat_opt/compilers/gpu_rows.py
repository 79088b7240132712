"""What XLA's GPU compiler computes row by row: arithmetic on an array and a reduction of each of its rows, as in a
softmax or a normalisation, is one kernel, which reads a row once (`softmax_rewriter_triton.cc`).

A row has to fit into a multiprocessor's registers. Such a kernel is fused on into what reads it, as long as that can be
computed by rows, too, and a kernel that it is a part of is written over nothing of which it reads rows.
"""

from __future__ import annotations

from jax.extend.core import primitives as P

from remat_opt.compilers.gpu_orders import Orders
from remat_opt.program.inline import Constant, Equation, Program
from remat_opt.program.primitives import ELEMENTWISE, MOVES, RESHAPING, named

_REDUCTIONS = named("reduce_sum reduce_max reduce_min")
_IN_PLACE = (ELEMENTWISE - MOVES) | RESHAPING | named("copy name stop_gradient")
# Numbers in a row, as it is padded to a power of two: four tenths of the registers of a multiprocessor
# (`gpu_indexing_performance_model.cc`).
_LONGEST_ROW = 16384


class Rows:
    """The arithmetic on rows in a program.

    Args:
        orders: of the program's values; rows are looked for among arrays only that lie in their own.
    """

    def __init__(self, orders: Orders):
        self.orders = orders
        self.program = orders.program
        self.producer = orders.producer
        self.readers = orders.readers
        self.constants = orders.constants
        self.returned = frozenset(x for x in self.program.outputs if isinstance(x, int))

    def source(self, equation: Equation) -> int | None:
        """For arithmetic on an array and a reduction of its rows that array; None of all other equations."""
        if equation.primitive not in ELEMENTWISE or equation.primitive in MOVES or len(equation.inputs) != 2:
            return None
        whole, spread = equation.inputs
        if not isinstance(whole, int) or not isinstance(spread, int) or whole == spread:
            return None
        reduction = self._reduction_behind(spread)
        if reduction is None or self.orders.of(equation.outputs[0]) is not None:
            return None
        (source,) = reduction.inputs
        assert isinstance(source, int)
        while self._is_read_once(source) and (before := self._alike(source)) is not None:
            source = before
        while whole != source:
            before = self._alike(whole)
            if before is None or not self._is_read_once(whole):
                return None
            whole = before
        return source

    def _reduction_behind(self, spread: int) -> Equation | None:
        """The reduction of rows that is spread over them again, and that nothing else reads."""
        while self._is_read_once(spread):
            equation = self.producer.get(spread)
            if equation is not None and equation.primitive in _REDUCTIONS:
                (operand,) = equation.inputs
                if not isinstance(operand, int) or operand in self.constants:
                    return None
                shape = self.program.avals[operand].shape
                is_of_rows = tuple(equation.params["axes"]) == (len(shape) - 1,)
                return equation if is_of_rows and 1 < shape[-1] <= _LONGEST_ROW else None
            before = self._before(spread)
            if before is None:
                return None
            spread = before
        return None

    def _is_read_once(self, value: int) -> bool:
        return len(self.readers.get(value, ())) == 1 and value not in self.returned

    def _alike(self, value: int) -> int | None:
        """The same as `_before`, of as many numbers."""
        before = self._before(value)
        return before if before is not None and self._size(before) == self._size(value) else None

    def _size(self, value: int) -> int:
        return self.program.avals[value].size

    def _before(self, value: int) -> int | None:
        """What a value is made of, by arithmetic on that alone, by giving it another shape or by spreading it over
        rows."""
        equation = self.producer.get(value)
        if equation is None or equation.primitive not in _IN_PLACE or value in self.constants:
            return None
        read = {x for x in equation.inputs if isinstance(x, int) and x not in self.constants}
        others = [x for x in equation.inputs if isinstance(x, Constant) or x in self.constants]
        if len(read) != 1 or len(others) > 1 or _is_spread_over_columns(equation, self.program):
            return None
        return next(iter(read))


def _is_spread_over_columns(equation: Equation, program: Program) -> bool:
    """Whether the last dimension of an array stays the last, and others are added before it."""
    if equation.primitive is not P.broadcast_in_dim_p or not isinstance(equation.inputs[0], int):
        return False
    axes, shape = equation.params["broadcast_dimensions"], program.avals[equation.inputs[0]].shape
    rank = len(equation.params["shape"])
    return bool(axes) and axes[-1] == rank - 1 and shape[-1] > 1
