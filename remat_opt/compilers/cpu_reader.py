"""From equations to what the CPU's compiler makes of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jax.extend.core import primitives as P

from remat_opt.compilers.cpu_library import by_library
from remat_opt.compilers.equations import is_dear, is_half, product_copies, product_orders, sums_nothing
from remat_opt.compilers.loop_reader import LoopReader
from remat_opt.compilers.reader import VIEW
from remat_opt.graph.build import bytes_of, cpu_conv_copies
from remat_opt.graph.graph import Kind, Op
from remat_opt.graph.ordering import ZEROS
from remat_opt.program.inline import Constant, Equation
from remat_opt.program.primitives import CONTRACTION, ELEMENTWISE, MOVES

# A concatenation of up to eight pieces is fused, but not of pieces of rows that long.
MOST_PIECES = 8
WIDE_ROW = 128


class CpuReader(LoopReader):
    """Reads a program as the CPU's compiler does."""

    def finish(self) -> None:
        super().finish()
        self.begin_at_once()
        self.ops, self.equations = by_library(
            self.program, self.ops, self.equations, self.sizes, self.constants, self.behind
        )

    def is_scattered_into_sum(self, equation: Equation) -> bool:
        """Also where an array is changed that is not zeros: it is added first."""
        return self.is_only_summed(equation.outputs[0])

    def begin_at_once(self) -> None:
        """Make the zeros that loops begin with, which depend on nothing, at the beginning of the program: one array of
        a shape, and copies for all loops but one that runs behind all others."""
        maker = {value: index for index, op in enumerate(self.ops) for value in op.outputs}
        first: dict[int, list[Op]] = {}
        for places in self.begun.values():
            *others, last = sorted({maker[result] for result in places.values()})
            of_last = [place for place, result in places.items() if maker[result] == last]
            is_behind = {*others} <= self.behind_which(last, maker)
            zeros = of_last[0] if is_behind else self.new(self.sizes[of_last[0]])
            copies = [Op((zeros,), (place,), name="copy") for place in places if place != zeros]
            first.setdefault(min([*others, last]), []).extend([Op((), (zeros,), name=ZEROS), *copies])
        self.insert(first)

    def behind_which(self, index: int, maker: Mapping[int, int]) -> set[int]:
        """The ops that one needs the results of."""
        found: set[int] = set()
        waiting = [index]
        while waiting:
            needed = {maker[value] for value in self.ops[waiting.pop()].inputs if value in maker} - found
            found |= needed
            waiting += needed
        return found

    def insert(self, added: Mapping[int, Sequence[Op]]) -> None:
        """Put ops before others, by the positions of these."""
        for index in sorted(added, reverse=True):
            self.ops[index:index] = added[index]
            self.equations[index:index] = [self.equations[index]] * len(added[index])

    def ops_of(self, equation: Equation) -> Sequence[Op]:
        (op,) = super().ops_of(equation)
        if equation.primitive is P.scan_p:
            return [self.with_places(equation, op)]
        if equation.primitive is P.concatenate_p:
            kind = Kind.OPAQUE if self.is_copied_together(equation) else op.kind
            return [op.but(kind=kind, workspace=0)]
        if sums_nothing(equation, self.program):  # broadcasts, multiplied (`AlgebraicSimplifierVisitor::HandleDot`)
            return [op.but(kind=Kind.ELEMENTWISE, name=P.mul_p.name)]
        if equation.primitive in CONTRACTION:
            return self.by_library(equation, op)
        if equation.primitive is P.select_and_scatter_add_p:
            return self.by_windows(equation, op)
        if equation.primitive is P.gather_p:  # which loops do as any of their work, once
            return [op.but(kind=Kind.ELEMENTWISE, dear=True)]
        dear = is_dear(equation, self.program, self.producer)
        of_buffers = op.kind is Kind.REDUCTION
        is_as_read = (dear, of_buffers) == (op.dear, op.of_buffers)
        return [op if is_as_read else op.but(dear=dear, of_buffers=of_buffers)]

    def is_copied_together(self, equation: Equation) -> bool:
        """Whether the CPU's compiler copies a concatenation's pieces by a routine of its own and fuses it with nothing:
        where they lie side by side in each row, or are many (`cpu_instruction_fusion.cc`)."""
        shape = self.program.avals[equation.outputs[0]].shape
        is_by_rows = len(shape) > 1 and equation.params["dimension"] == len(shape) - 1 and shape[-1] >= WIDE_ROW
        return is_by_rows or len(equation.inputs) > MOST_PIECES

    def by_library(self, equation: Equation, op: Op) -> Sequence[Op]:
        """A contraction as the CPU's library computes it: with the copies of its operands that it wants, as ops of
        their own, which the compiler does as soon as it can and once for all who need the same; and for a number format
        that it does not have with the rounding of its float32 result."""
        ops: list[Op] = []
        is_conv = equation.primitive is P.conv_general_dilated_p
        numbers = equation.params["dimension_numbers"]
        transposed = cpu_conv_copies(numbers) if is_conv else product_copies(equation, self.program)
        specs = (
            (tuple(numbers.lhs_spec), tuple(numbers.rhs_spec)) if is_conv else product_orders(equation, self.program)
        )
        for operand, is_transposed, spec in zip(equation.inputs, transposed, specs, strict=False):
            if isinstance(operand, Constant) or operand in self.constants:
                continue
            halved = is_half(self.program.avals[operand])
            is_view = not is_conv and not is_transposed and self.is_computed_as_view(operand)
            if not is_transposed and not halved and not is_view:
                continue
            key = (operand, spec if is_transposed else ())
            if key not in self.copies:
                self.copies[key] = len(self.sizes)
                self.sizes.append(self.sizes[operand] * (2 if halved else 1))
                made, given = (self.copies[key],), self.behind([operand])
                if is_transposed and not is_conv and not halved and self.is_made_a_matrix(equation, operand):
                    ops.append(Op(given, (self.new(self.sizes[operand]),), kind=Kind.ELEMENTWISE, name="transpose"))
                    given = ops[-1].outputs
                name = VIEW if is_view and not halved else "copy"
                ops.append(Op(given, made, kind=Kind.ELEMENTWISE, name=name, of_views=not halved))
            buffer = self.buffer(operand)
            inputs = tuple(self.copies[key] if value == buffer else value for value in op.inputs)
            op = op.but(inputs=inputs, workspace=op.workspace - is_conv * is_transposed * self.sizes[operand])
        (result,) = op.outputs
        if not is_half(self.program.avals[result]):
            return [*ops, op]
        self.sizes.append(2 * self.sizes[result])
        exact = op.but(outputs=(len(self.sizes) - 1,))
        return [*ops, exact, Op(exact.outputs, (result,), kind=Kind.ELEMENTWISE, name="round", dear=True)]

    def is_computed_as_view(self, operand: int) -> bool:
        """Whether a product's operand is an array of more than two dimensions that loops compute, which they do as the
        matrix that the product reads, beside the array as others read it."""
        maker = self.producer.get(operand)
        if maker is None or len(self.program.avals[operand].shape) <= 2:
            return False
        if maker.primitive in ELEMENTWISE and maker.primitive not in MOVES:
            return True
        # What multiplies without a sum has its own dimensions last, and is turned to those that were asked for.
        given = maker.inputs[0] if maker.primitive is P.transpose_p else operand
        product = self.producer.get(given) if isinstance(given, int) else None
        return product is not None and sums_nothing(product, self.program)

    def is_made_a_matrix(self, equation: Equation, operand: int) -> bool:
        """Whether a product's operand has more dimensions than the matrices that are multiplied: it is transposed, and
        then given another shape, two steps that a loop is counted to have."""
        _, (before, _) = equation.params["dimension_numbers"]
        return len(self.program.avals[operand].shape) > len(before) + 2

    def by_windows(self, equation: Equation, op: Op) -> Sequence[Op]:
        """A max-pool's backward as the CPU's compiler expands it: arrays of each element's indices, a reduction of
        each window to its maximum and that one's indices, zeros of the operand's size, and a scatter into them. All but
        the last wait for nothing that is made in the backward pass, the indices and the zeros for nothing at all."""
        source, operand = equation.inputs
        if isinstance(source, Constant) or isinstance(operand, Constant):
            return [op]
        windows, elements = self.program.avals[source], self.program.avals[operand]
        dimensions = sum(size > 1 for size in elements.shape)
        ops: list[Op] = []
        key = ("indices", elements.shape)
        if key not in self.copies:
            self.copies[key] = self.new(4 * elements.size * dimensions)
            ops.append(Op((), (self.copies[key],), name="iota"))
        zeros, found = self.new(bytes_of(elements)), self.new(bytes_of(windows) + 4 * windows.size * dimensions)
        ops.append(Op((), (zeros,), name=ZEROS))
        ops.append(Op((*self.behind([operand]), self.copies[key]), (found,), name="reduce_window"))
        return [*ops, op.but(inputs=(*self.behind([source]), found, zeros), workspace=0)]
