"""From equations to what XLA's GPU compiler makes of each, before it fuses them (`gpu_fusion.py`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.extend.core import primitives as P

from remat_opt.compilers.equations import WINDOWED, draws_by_arithmetic, moves_ones_only
from remat_opt.compilers.gpu import MOST_FUSED_PARTS, Split, split_of
from remat_opt.compilers.gpu_fusion import Work
from remat_opt.compilers.gpu_orders import Orders
from remat_opt.compilers.gpu_products import Merged, merged_products
from remat_opt.compilers.gpu_rows import Rows
from remat_opt.compilers.gpu_scatter_reader import ScatterReader
from remat_opt.compilers.gpu_siblings import Reduced
from remat_opt.compilers.gpu_work import BLOCK, copy_of, work_of
from remat_opt.graph.build import bytes_of, op_of
from remat_opt.graph.graph import Kind, Op
from remat_opt.graph.ordering import behind_operands
from remat_opt.program.inline import Constant, Equation
from remat_opt.program.primitives import ELEMENTWISE, MOVES, REDUCTION

_TOLERATED = 1024  # bytes by which what a product reads or writes may grow


class GpuReader(ScatterReader):
    """Equations as the ops of a GPU's compiler."""

    def prepare(self) -> None:
        super().prepare()
        self.merged: dict[int, Merged] = {
            index: one for one in merged_products(self.program) for index in one.equations
        }
        self.members: dict[int, Op] = {}  # products that become one, by equation
        self.summed: set[int] = set()  # products that no library writes: parts of others, and sums of parts
        self.orders = Orders(self.program, self.producer, self.readers, self.constants)
        self.rows = Rows(self.orders)

    def is_renamed(self, equation: Equation) -> bool:
        return moves_ones_only(equation, self.program) or super().is_renamed(equation)

    def ops_at(self, index: int, equation: Equation) -> Sequence[Op]:
        if equation.outputs:
            self.work[equation.outputs[0]] = self.with_buffers(work_of(equation, self.program))
        if index in self.merged:
            return self.merge(index)
        if equation.primitive is P.select_and_scatter_add_p:
            return self.pooled_backwards(equation)
        if self.kernels.is_folded(equation, self.readers) or self.is_done_by_product(equation):
            return []
        return super().ops_at(index, equation)

    def ops_of(self, equation: Equation) -> Sequence[Op]:
        (op, *more) = super().ops_of(equation)
        if equation.primitive is P.dot_general_p:
            op = self.product(equation)
            operands = [self.program.aval_of(x) for x in equation.inputs]
            result = self.program.avals[equation.outputs[0]]
            split = split_of(equation.params, operands, result)
            is_plain = all(len(aval.shape) == 2 for aval in operands)
            of_views = (split.parts > 1 or not is_plain) and not _is_divided_as_it_is(equation, operands[0], split)
            copies, op = self.copied_for(equation, op.but(of_views=of_views))
            if split.padded > split.summed:
                copies, op = self.padded_for(equation, op, split)
            if split.parts == 1 and self.orders.is_read_otherwise(equation):
                (made,) = op.outputs
                as_written = self.new(self.sizes[made])
                copies.append(op.but(outputs=(as_written,)))
                # Not an elementwise kernel: it is not done in its readers, which would read in steps, nor in place.
                return [*copies, Op((as_written,), (made,), kind=Kind.REDUCTION, name="copy")]
            return [*copies, *self.in_parts(op, split, result.size)]
        if equation.primitive is P.conv_general_dilated_p:
            return self.convolution(equation, op)
        if equation.primitive is P.scan_p:
            return self.loop(equation, self.with_places(equation, op))
        if equation.primitive in WINDOWED or equation.primitive is P.scatter_add_p:  # loops that compute what they read
            return [op.but(kind=Kind.REDUCTION)]
        if equation.primitive is P.gather_p or draws_by_arithmetic(equation, self.program):
            return [op.but(kind=Kind.ELEMENTWISE)]
        if equation.primitive is P.rev_p:  # neighbours in the result are none in the operand
            return [op.but(of_views=True)]
        if op.kind is Kind.ELEMENTWISE and not more:
            return [self.by_rows(equation, op)]
        return [op, *more]

    def by_rows(self, equation: Equation, op: Op) -> Op:
        """Elementwise work, which reads whole rows where reductions of these are done in the same kernel."""
        source = self.rows.source(equation)
        return op if source is None else op.but(rows_of=self.behind([source]))

    def finish(self) -> None:
        self.read_copies_in_updates()
        self.copy_kernels_first()
        self.make_changed_zeros()
        self.share_zeros()
        self.sort()
        self.fold_transposes()

    def reductions(self) -> dict[int, Reduced]:
        """By its result what each reduction reduces."""
        found: dict[int, Reduced] = {}
        for one in (equation for equation in self.equations if equation.primitive in REDUCTION):
            operand, axes = one.inputs[0], one.params.get("axes", ())
            if isinstance(operand, int):
                buffer, *tokens = self.same.get(operand, (operand,))
                aval = self.program.avals[operand]
                found[one.outputs[0]] = Reduced(None if tokens else buffer, aval.size, len(aval.shape) - 1 not in axes)
        return found

    def product(self, equation: Equation) -> Op:
        """A product with its operands as buffers."""
        op = op_of(self.program, equation, self.rates, self.constants)
        # A transposed matrix is a matrix that is read otherwise.
        values = [self.transposed.get(value, value) for value in op.inputs]
        sources = [source for value in values for source in self.sources_in_product(value)]
        return op.but(inputs=self.behind(sources))

    def copied_for(self, equation: Equation, op: Op) -> tuple[list[Op], Op]:
        """Copies of a product's operands that lie otherwise than it can read them, and the product that reads those."""
        copies: list[Op] = []
        for operand, lies, wanted in self.orders.copied_for(equation):
            buffer = self.buffer(operand)
            if buffer not in op.inputs:  # it reads what that is made of
                continue
            key = (operand, wanted)
            if key not in self.copies:
                made = self.copies[key] = self.new(self.sizes[operand])
                self.work[made] = copy_of(self.program.avals[operand], lies, wanted)
                copies.append(Op(self.behind([operand]), (made,), kind=Kind.ELEMENTWISE, name="copy", of_views=True))
            op = op.but(inputs=tuple(self.copies[key] if x == buffer else x for x in op.inputs))
        return copies, op

    def padded_for(self, equation: Equation, op: Op, split: Split) -> tuple[list[Op], Op]:
        """Operands of a product as they are padded to be divided, once for all who need the same, and the product that
        reads those."""
        pads: list[Op] = []
        inputs = []
        for operand, axes in zip(equation.inputs, equation.params["dimension_numbers"][0], strict=True):
            if isinstance(operand, Constant) or operand in self.constants:
                continue
            key = (operand, axes, split.padded)
            if key not in self.copies:
                self.copies[key] = self.new(split.grown(self.sizes[operand]))
                pads.append(Op(self.behind([operand]), (self.copies[key],), kind=Kind.ELEMENTWISE, name=P.pad_p.name))
            inputs.append(self.copies[key])
        return pads, op.but(inputs=tuple(dict.fromkeys(inputs)))

    def is_done_by_product(self, equation: Equation) -> bool:
        """Whether work on the result of a product, that nobody else reads, is done where the product writes it."""
        whole = self.whole_operand(equation)
        if whole is None or len(self.readers[whole]) != 1 or not self.ends_product(whole):
            return False
        (result,) = equation.outputs
        if self.sizes[result] > self.sizes[whole] + _TOLERATED or whole in self.program.outputs:
            return False
        buffer = self.buffer(whole)
        at = next((at for at in range(len(self.ops) - 1, -1, -1) if buffer in self.ops[at].outputs), None)
        if at is None or self.ops[at].kind is not Kind.CONTRACTION:
            return False
        others = [x for x in self.variables(equation) if x != whole]
        small = self.behind([given for x in others if (given := self.spread(x, result)) is not None])
        op = self.ops[at]
        self.ops[at] = op.but(inputs=tuple(dict.fromkeys((*op.inputs, *small))), outputs=(result,))
        is_view = op.outputs[0] in self.work and self.work[op.outputs[0]].is_view
        self.work[result] = dataclasses.replace(self.work[result], is_view=is_view)
        return True

    def with_buffers(self, work: Work) -> Work:
        if self.same.keys().isdisjoint(work.uses):
            return work
        return dataclasses.replace(work, uses={self.buffer(value): uses for value, uses in work.uses.items()})

    def sources_in_product(self, value: int) -> Sequence[int]:
        """What a product reads for an operand. Work on one array, with constants and what is spread over it, it
        does itself as it reads that array; not what the product before does with its result, and no square, whose two
        operands are taken to be two arrays (`gemm_fusion.cc`)."""
        small: list[int] = []
        while not self.ends_product(value):
            equation = self.producer.get(value)
            if equation is None or value in self.constants:
                break
            if self.is_renamed(equation):
                (value,) = self.variables(equation)
                continue
            whole = self.whole_operand(equation)
            if whole is None or self.sizes[whole] > self.sizes[value] + _TOLERATED or _multiplies_itself(equation):
                break
            spread = [self.spread(x, value) for x in self.variables(equation) if x != whole]
            if len(small) + len(spread) >= 4:
                break
            small += [x for x in spread if x is not None]
            value = whole
        return (value, *small)

    def whole_operand(self, equation: Equation) -> int | None:
        """The one operand of elementwise work that is neither a constant nor spread from fewer elements."""
        if equation.primitive not in ELEMENTWISE or equation.primitive in MOVES or len(equation.outputs) != 1:
            return None
        whole = [x for x in self.variables(equation) if self.spread(x, equation.outputs[0]) is None]
        return whole[0] if len(whole) == 1 else None

    def spread(self, value: int, result: int) -> int | None:
        """For an operand that is one row, a bias or a scale, and is broadcast over all rows of the result, that row."""
        avals = self.program.avals
        maker = self.producer.get(value)
        is_broadcast = maker is not None and maker.primitive is P.broadcast_in_dim_p
        given = maker.inputs[0] if is_broadcast and maker is not None else value
        row = avals[result].shape[-1] if avals[result].shape else 1
        return given if isinstance(given, int) and avals[given].size <= row < avals[result].size else None

    def ends_product(self, value: int) -> bool:
        """Whether a product makes a value: its result, or what is done with that before anything else reads it."""
        while True:
            equation = self.producer.get(value)
            if equation is None or value in self.constants:
                return False
            if equation.primitive is P.dot_general_p:
                return value not in self.summed
            whole = self.whole_operand(equation)
            if self.is_renamed(equation):
                (whole,) = self.variables(equation)
            if whole is None or len(self.readers.get(whole, ())) != 1:
                return False
            value = whole

    def merge(self, index: int) -> Sequence[Op]:
        """Products that become one, where the last of them stands, and the parts of its result."""
        merged, program = self.merged[index], self.program
        self.members[index] = self.product(program.equations[index])
        if index != merged.equations[-1]:
            return []
        members = [self.members[one] for one in merged.equations]
        inputs = tuple(dict.fromkeys(value for member in members for value in member.inputs))
        ops: list[Op] = []
        first, second, result = merged.matrices.avals
        split = split_of(merged.matrices.params, (first, second), result)
        is_padded = split.padded > split.summed
        if merged.is_copied or is_padded:
            in_all = set.intersection(*(set(member.inputs) for member in members))
            apart = tuple(value for value in inputs if value not in in_all)
            inputs = tuple(value for value in inputs if value in in_all)
            shared, other = (bytes_of(aval) for aval in ((first, second) if merged.side == 0 else (second, first)))
            if is_padded:
                ops.append(Op(inputs, (self.new(split.grown(shared)),), kind=Kind.ELEMENTWISE, name=P.pad_p.name))
                inputs = ops[-1].outputs
            copied = self.new(split.grown(other))
            ops.append(Op(apart, (copied,), kind=Kind.ELEMENTWISE, name=P.concatenate_p.name))
            inputs = (*inputs, copied)
        whole = self.new(bytes_of(result))
        flops = sum(member.flops for member in members)
        product = members[-1].but(inputs=inputs, outputs=(whole,), flops=flops, of_views=True)
        ops += self.in_parts(product, split, result.size)
        for member in members:
            self.summed.update(member.outputs)
            (part,) = member.outputs
            share = self.sizes[part] / max(self.sizes[whole], 1)
            self.work[part] = dataclasses.replace(self.work[part], cycles=0.0, uses={whole: share})
            ops.append(Op((whole,), (part,), kind=Kind.ELEMENTWISE, name="slice"))
        return ops

    def in_parts(self, op: Op, split: Split, elements: int) -> Sequence[Op]:
        """A product of which parts are summed up in a kernel of their own; a sum of few is fused like other work."""
        if split.parts == 1:
            return [op]
        (result,) = op.outputs
        kind = Kind.ELEMENTWISE if split.parts < MOST_FUSED_PARTS else Kind.REDUCTION
        self.summed.add(result)
        made = self.new(split.written)
        self.work[result] = Work(7.0 * split.parts * elements, elements / BLOCK)
        return [op.but(outputs=(made,)), Op((made,), (result,), kind=kind, name="sum of parts")]

    def sort(self) -> None:
        """Put ops behind what they read."""
        order = behind_operands(self.ops)
        self.ops = [self.ops[index] for index in order]
        self.equations = [self.equations[index] for index in order]


def _multiplies_itself(equation: Equation) -> bool:
    """Whether an array is multiplied by itself."""
    if equation.primitive in (P.square_p, P.integer_pow_p):
        return True
    values = [x for x in equation.inputs if isinstance(x, int)]
    return equation.primitive is P.mul_p and len(values) > len(set(values))


def _is_divided_as_it_is(product: Equation, operand: Any, split: Split) -> bool:
    """Whether the parts of the contracted dimensions of a product over a batch are the first of these: its operands
    are read in the shape that they have. (Without a batch they are matrices before they are divided, and of several
    batch dimensions one is made.)"""
    (contracted, _), (batch, _) = product.params["dimension_numbers"]
    return len(batch) == 1 and len(contracted) > 1 and operand.shape[contracted[0]] == split.parts
