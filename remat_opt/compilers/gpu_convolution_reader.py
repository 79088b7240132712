"""What XLA's GPU compiler makes of convolutions, and of loops that they are in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jax.extend.core import primitives as P

from remat_opt.compilers.gpu_convolutions import padded_elements, written_for
from remat_opt.compilers.gpu_fusion import Work
from remat_opt.compilers.gpu_kernels import Kernels, is_gradient_by_kernel, orders_of_loop
from remat_opt.compilers.gpu_orders import Order
from remat_opt.compilers.gpu_stacks import orders_in_body
from remat_opt.compilers.gpu_work import BLOCK, copy_of
from remat_opt.compilers.loop_reader import LoopReader
from remat_opt.graph.build import PeakOfBody
from remat_opt.graph.cost import Rates
from remat_opt.graph.graph import Kind, Op
from remat_opt.program import compat
from remat_opt.program.inline import Constant, Equation, Program
from remat_opt.program.primitives import ELEMENTWISE


class ConvolutionReader(LoopReader):
    """Convolutions with the arrays that are written for them."""

    def __init__(
        self,
        program: Program,
        rates: Rates,
        platform: str,
        peak_of_body: PeakOfBody | None = None,
        loop: tuple[int, int] | None = None,
        bodies: Mapping[int, tuple[tuple[int, int, int], ...]] | None = None,
    ):
        """
        Args:
            program, rates, platform, peak_of_body: as of `Reader`.
            loop: of a loop's body how many constants it is given first, and how much it carries; None of others.
            bodies: by the id of its jaxpr, a body's buffers once its peak was asked for, as `Op.inside`.
        """
        super().__init__(program, rates, platform, peak_of_body)
        self.work: dict[int, Work] = {}  # by result
        self.is_body = loop is not None
        constants, carries = loop or (0, len(program.inputs))
        self.slices = {*program.inputs[constants + carries :]}  # of stacks that a loop goes over
        self.bodies = {} if bodies is None else bodies  # filled later
        self.in_orders: set[int] = set()  # copies of kernels
        self.kernels = Kernels(program, self.producer, range(constants, constants + carries) if loop else None)

    def convolution(self, equation: Equation, op: Op) -> Sequence[Op]:
        """A convolution with the arrays that are written for it, which others that need the same read, too."""
        kernel = self.producer.get(equation.inputs[1]) if isinstance(equation.inputs[1], int) else None
        written = written_for(equation, self.program, is_reversed=kernel is not None and kernel.primitive is P.rev_p)
        numbers = equation.params["dimension_numbers"]
        ops, op = self.with_kernel(equation, op)
        for value in self.slices.intersection(op.inputs):  # the library reads no slice where it lies
            if (value, "slice") not in self.copies:
                self.copies[value, "slice"] = self.new(self.sizes[value])
                ops.append(Op((value,), (self.copies[value, "slice"],), kind=Kind.ELEMENTWISE, name="slice"))
            op = _reading(op, value, self.copies[value, "slice"])
        specs = (numbers.lhs_spec[2:], written.image), (numbers.rhs_spec[2:], written.kernel)
        for operand, (spatial, sides) in zip(equation.inputs, specs, strict=True):
            if sides is None or isinstance(operand, Constant) or operand in self.constants:
                continue
            key = (operand, "padded", sides)
            if key not in self.copies:
                aval = self.program.avals[operand]
                elements = padded_elements(aval.shape, spatial, sides)
                self.copies[key] = self.new(elements * compat.item_bytes(aval.dtype))
                ops.append(Op(self.behind([operand]), (self.copies[key],), kind=Kind.ELEMENTWISE, name="pad"))
            buffer = self.buffer(operand)
            op = op.but(inputs=tuple(self.copies[key] if x == buffer else x for x in op.inputs))
        (result,) = op.outputs
        aval = self.program.avals[result]
        if written.is_turned:
            turned = self.new(self.sizes[result])
            last = tuple(range(len(aval.shape)))
            self.work[result] = copy_of(aval, (last[-1], *last[1:-1], last[0]), last)
            back = Op((turned,), (result,), kind=Kind.ELEMENTWISE, name="transpose", of_views=True)
            return [*ops, op.but(outputs=(turned,)), back]
        if written.elements == aval.size:
            return [*ops, op]
        whole = self.new(written.elements * compat.item_bytes(aval.dtype))
        self.work[result] = Work(0.0, aval.size / BLOCK, {whole: aval.size / written.elements})
        part = Op((whole,), (result,), kind=Kind.ELEMENTWISE, name="slice")
        return [*ops, op.but(outputs=(whole,)), part]

    def with_kernel(self, equation: Equation, op: Op) -> tuple[list[Op], Op]:
        """A copy of a convolution's kernel in the order in which the library reads it, once for all who need the same,
        and the convolution that reads that."""
        image, kernel = equation.inputs
        if isinstance(kernel, Constant) or kernel in self.constants or is_gradient_by_kernel(equation, self.program):
            return [], op
        given, order = self.kernels.read_by(equation)
        copies, read = ([], self.behind([given])) if order is None else self.in_order(given, order)
        images = [x for x in [image] if isinstance(x, int) and x not in self.constants]
        return copies, op.but(inputs=tuple(dict.fromkeys((*self.behind(images), *read))))

    def read_copies_in_updates(self) -> None:
        """Let elementwise work on a kernel and its gradient read the copy, which lies as the gradient is written."""
        copied: dict[int, Order] = {}
        for value, order, *more in self.copies:
            if not more and value in self.program.inputs and len(order) == len(self.program.avals[value].shape):
                copied.setdefault(value, order)
        for at, equation in enumerate(self.equations):
            if equation.primitive not in ELEMENTWISE or copied.keys().isdisjoint(equation.inputs):
                continue
            for value in copied.keys() & {x for x in equation.inputs if isinstance(x, int)}:
                others = [x for x in equation.inputs if x != value]
                if any(self.kernels.order_of_sum(x) == copied[value] for x in others):
                    self.ops[at] = _reading(self.ops[at], value, self.copies[value, copied[value]])

    def copy_kernels_first(self) -> None:
        """Put the copies of kernels that are given in front, the last one first: all wait for nothing, and of what is
        worth the same the compiler takes the last. It copies them in the order in which they are read."""
        given = {*self.program.inputs}
        first = [at for at, op in enumerate(self.ops) if op.outputs[:1] and op.outputs[0] in self.in_orders]
        first = [at for at in first if given.issuperset(self.ops[at].inputs)]
        order = [*reversed(first), *(at for at in range(len(self.ops)) if at not in {*first})]
        self.ops = [self.ops[at] for at in order]
        self.equations = [self.equations[at] for at in order]

    def in_order(self, value: int, order: Order) -> tuple[list[Op], tuple[int, ...]]:
        """A copy of a value whose last dimensions lie in an order, and what has to be done for it."""
        key, copies = (value, order), []
        if key not in self.copies:
            copies.append(self.copy_in(value, order))
            (self.copies[key],) = copies[0].outputs
        return copies, (self.copies[key],)

    def copy_in(self, value: int, order: Order) -> Op:
        """The making of a copy of a value whose last dimensions lie in an order."""
        aval, made = self.program.avals[value], self.new(self.sizes[value])
        self.in_orders.add(made)
        axes = tuple(range(len(aval.shape)))
        more = len(axes) - len(order)
        self.work[made] = copy_of(aval, axes, (*axes[:more], *(axis + more for axis in order)))
        return Op(self.behind([value]), (made,), kind=Kind.ELEMENTWISE, name="copy", of_views=True)

    def loop(self, equation: Equation, op: Op) -> Sequence[Op]:
        """A loop with copies of the kernels that it has in another order than they are given in, and of those that it
        carries as they are returned."""
        first, count = compat.scan_counts(equation.params)
        before: list[Op] = []
        behind: list[Op] = []
        op = op.but(inside=self.bodies.get(id(equation.params["jaxpr"]), ()))
        for at, (value, order) in enumerate(zip(equation.inputs, orders_of_loop(equation.params), strict=True)):
            if order is None:
                continue
            moved = None
            if isinstance(value, int) and value not in self.constants and self.kernels.is_moved(value, order):
                moved = value
            if first <= at < first + count:
                op, copied, returned = self.carried(moved, equation.outputs[at - first], order, op)
                before += copied
                behind += returned
            elif moved is not None:
                copies, (made,) = self.in_order(moved, order)
                before += copies
                op = _reading(op, self.buffer(moved), made)
        copies, op = self.with_stacks_turned(equation, op)
        before += copies
        return [*before, op, *reversed(behind)]  # of what is worth the same the compiler does the last first

    def with_stacks_turned(self, equation: Equation, op: Op) -> tuple[list[Op], Op]:
        """A loop that reads copies of stacks where these lie in another order, and those copies."""
        given, made = orders_in_body(equation.params)
        copies: list[Op] = []
        for value, order in zip(equation.inputs, given, strict=True):
            if not isinstance(value, int) or value in self.constants or order is None:
                continue
            if self.kernels.is_moved(value, order):
                more, (copy,) = self.in_order(value, order)
                copies += more
                op = _reading(op, self.buffer(value), copy)
        for value, order in zip(equation.outputs, made, strict=True):
            if order is not None:
                self.kernels.lying[value] = (0, *(axis + 1 for axis in order))
        return copies, op

    def carried(self, given: int | None, last: int, order: Order, op: Op) -> tuple[Op, list[Op], list[Op]]:
        """A loop that carries a kernel in an order, with what copies it before and behind the loop.

        Args:
            given: what it begins with, if that has to be copied.
            last: what it ends with.
            order: of what it carries.
            op: the loop, which changes what it carries where it lies, or makes a buffer for it.
        """
        before: list[Op] = []
        place, *tokens = self.same.get(last, (last,))
        if given is not None and tokens:  # else the buffer that it makes is the copy
            before = [self.copy_in(given, order)]
            (made,) = before[0].outputs
            op = _reading(op, place, made)
            self.changed.discard(place)
            self.changed.add(made)
            place = made
        if self.is_body or not self.is_returned(last):
            self.kernels.lying[last] = order
            if tokens:
                self.same[last] = (place, *tokens)
            return op, before, []
        if not tokens:
            place = self.new(self.sizes[last])
            op = op.but(outputs=tuple(place if value == last else value for value in op.outputs))
        self.same.pop(last, None)
        aval = self.program.avals[last]
        self.work[last] = copy_of(aval, order, tuple(range(len(aval.shape))))
        returned = Op((place, *tokens), (last,), kind=Kind.ELEMENTWISE, name="copy", of_views=True)
        return op, before, [returned]

    def is_returned(self, value: int) -> bool:
        """Whether a value is a result of the program, as it is or from behind a barrier."""
        handing_on = (compat.barrier_p, compat.layout_constraint_p)
        behind = (
            made
            for reader in self.readers.get(value, ())
            if reader.primitive in handing_on
            for given, made in zip(reader.inputs, reader.outputs, strict=True)
            if given == value
        )
        return value in self.program.outputs or any(map(self.is_returned, behind))


def _reading(op: Op, value: int, instead: int) -> Op:
    return op.but(inputs=tuple(instead if x == value else x for x in op.inputs))
