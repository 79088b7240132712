"""In which order kernels of convolutions lie in a GPU's memory (XLA's `gpu_layout_assignment.cc`, Hopper and later).

The library reads a kernel with the features that it makes outermost and those that it sums over innermost; of more than
two spatial dimensions, or of eight bytes, both lie outside of space. A kernel that lies otherwise is read as a copy, by
the forward convolution and by the gradient by its image alike. A gradient by the kernel is written in that order.

What a loop reads and carries has no order of its own: there it lies as the first convolution reads it, or as the
gradient that is added to it is written. It is copied before the loop, and where it is returned behind it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import primitives as P

from remat_opt.compilers.gpu_orders import Order
from remat_opt.program import compat
from remat_opt.program.inline import Constant, Equation, Program, inline
from remat_opt.program.primitives import ELEMENTWISE

_GIVEN_ON = frozenset({P.convert_element_type_p, compat.barrier_p})  # what gives on an array, in the order that it has


class Kernels:
    """The kernels of a program's convolutions.

    Args:
        program: of equations.
        producer: for each value the equation that makes it.
        carries: of a loop's body the positions of what it carries; None for what no loop runs.
    """

    def __init__(self, program: Program, producer: Mapping[int, Equation], carries: Sequence[int] | None = None):
        self.program = program
        self.producer = producer
        self.lying: dict[int, Order] = {} if carries is None else dict(_orders_in(program, producer, carries))

    def is_folded(self, equation: Equation, readers: Mapping[int, Sequence[Equation]]) -> bool:
        """Whether an equation reverses a kernel for convolutions alone, which read it as it was."""
        if equation.primitive is not P.rev_p or equation.outputs[0] in self.program.outputs:
            return False
        found = readers.get(equation.outputs[0], ())
        return all(
            one.primitive is P.conv_general_dilated_p
            and equation.outputs[0] is not one.inputs[0]
            and not is_gradient_by_kernel(one, self.program)
            for one in found
        )

    def read_by(self, equation: Equation) -> tuple[int, Order | None]:
        """A convolution's kernel as it was before it was reversed, and the order in which it has to be copied; None
        where it is read as it lies."""
        kernel, order = _kernel_of(equation, self.program, self.producer)
        return kernel, order if self.is_moved(kernel, order) else None

    def is_moved(self, value: int, order: Order | None) -> bool:
        """Whether a value has to be copied to lie in an order, which may be of its last dimensions only."""
        lies, shape = self.lies(value), self.program.avals[value].shape
        if order is None or lies is None:
            return False
        more = len(lies) - len(order)
        whole = (*range(more), *(axis + more for axis in order))
        return [axis for axis in lies if shape[axis] > 1] != [axis for axis in whole if shape[axis] > 1]

    def order_of_sum(self, value: int | Constant) -> Order | None:
        """The order of a gradient by a kernel that elementwise work makes a value of; None where there is none."""
        return _order_of_sum(value, self.program, self.producer)

    def lies(self, value: int) -> Order | None:
        """In which order a value lies; None of what is computed in whatever order it is read."""
        while value not in self.lying:
            maker = self.producer.get(value)
            if maker is not None and maker.primitive is compat.barrier_p:
                given = maker.inputs[maker.outputs.index(value)]
                if isinstance(given, int):
                    value = given
                    continue
                return None
            is_computed = maker is not None and maker.primitive in {*ELEMENTWISE, P.conv_general_dilated_p}
            return None if is_computed else tuple(range(len(self.program.avals[value].shape)))
        return self.lying[value]


def orders_of_loop(params: Mapping[str, Any]) -> tuple[Order | None, ...]:
    """For each operand of a loop the order in which it has it, without the dimension that it goes over; None of what
    has nothing to do with convolutions."""
    body = inline(params["jaxpr"], with_barriers=True, keep_names=False)
    producer = {value: equation for equation in body.equations for value in equation.outputs}
    constants, carries = compat.scan_counts(dict(params))
    orders = dict(_orders_in(body, producer, range(constants, constants + carries)))
    return tuple(orders.get(value) for value in body.inputs)


def is_gradient_by_kernel(equation: Equation, program: Program) -> bool:
    """Whether a convolution's window is an image, and its result a kernel."""
    image, window = (program.aval_of(x).shape for x in equation.inputs)
    numbers, params = equation.params["dimension_numbers"], equation.params
    windows = math.prod(window[axis] for axis in numbers.rhs_spec[2:])
    if max(params["lhs_dilation"], default=1) > 1:
        return windows > math.prod(image[axis] for axis in numbers.lhs_spec[2:])
    made = program.avals[equation.outputs[0]].shape
    return math.prod(made[axis] for axis in numbers.out_spec[2:]) < windows


def _orders_in(body: Program, producer: Mapping[int, Equation], carries: Sequence[int]) -> Iterator[tuple[int, Order]]:
    """Inputs of a body with the orders in which they lie there, each once."""
    given, found = {*body.inputs}, set()

    def first_of(value: int | Constant) -> int | None:
        while isinstance(value, int) and value not in given:
            maker = producer.get(value)
            if maker is None or maker.primitive not in _GIVEN_ON:
                return None
            value = maker.inputs[maker.outputs.index(value)]
        return value if isinstance(value, int) and value not in found else None

    for equation in body.equations:
        wanted: list[tuple[int | Constant, Order | None]] = []
        if equation.primitive is P.conv_general_dilated_p and isinstance(equation.inputs[1], int):
            if not is_gradient_by_kernel(equation, body):
                wanted.append(_kernel_of(equation, body, producer))
        elif equation.primitive is P.scan_p:
            wanted += zip(equation.inputs, orders_of_loop(equation.params), strict=True)
        for value, order in wanted:
            read = first_of(value)
            if read is not None and order is not None and len(order) == len(body.avals[read].shape):
                found.add(read)
                yield read, order
    for at, last in zip(carries, body.outputs, strict=False):
        order = _order_of_sum(last, body, producer) if body.inputs[at] not in found else None
        if order is not None:
            yield body.inputs[at], order


def _order_of_sum(value: int | Constant, body: Program, producer: Mapping[int, Equation]) -> Order | None:
    """The order of a gradient by a kernel that elementwise work makes a value of."""
    pending, seen = [value], set()
    while pending:
        one = pending.pop()
        maker = producer.get(one) if isinstance(one, int) and one not in seen else None
        if maker is None or not isinstance(one, int):
            continue
        seen.add(one)
        if maker.primitive is P.conv_general_dilated_p and is_gradient_by_kernel(maker, body):
            numbers = maker.params["dimension_numbers"].out_spec
            return _order(numbers[1], numbers[0], numbers[2:], body.avals[one])
        if maker.primitive is compat.barrier_p:
            pending.append(maker.inputs[maker.outputs.index(one)])
        elif maker.primitive in ELEMENTWISE:
            shape = body.avals[one].shape
            pending += [x for x in maker.inputs if isinstance(x, int) and body.avals[x].shape == shape]
    return None


def _kernel_of(equation: Equation, program: Program, producer: Mapping[int, Equation]) -> tuple[int, Order]:
    """A convolution's kernel before it was reversed, and the order in which the library reads it. The gradient of a
    convolution by its image is one with the reversed kernel, or with one of a single element and a dilated image."""
    kernel, params = equation.inputs[1], equation.params
    assert isinstance(kernel, int)
    maker = producer.get(kernel)
    given = maker.inputs[0] if maker is not None and maker.primitive is P.rev_p else None
    made, summed, *space = params["dimension_numbers"].rhs_spec
    aval = program.avals[kernel]
    is_single = math.prod(aval.shape[axis] for axis in space) == 1
    is_gradient = max(params["lhs_dilation"], default=1) > 1 if is_single else isinstance(given, int)
    if is_gradient:
        made, summed = summed, made
    return given if isinstance(given, int) else kernel, _order(made, summed, space, aval)


def _order(made: int, summed: int, space: Sequence[int], aval: Any) -> Order:
    is_outside = len(space) > 2 or compat.item_bytes(aval.dtype) == 8
    return (made, summed, *space) if is_outside else (made, *space, summed)
