"""From equations to what a compiler makes of each, as far as those of all platforms agree."""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend.core import primitives as P

from remat_opt.compilers.equations import (
    SUMS,
    is_matrix_transpose,
)
from remat_opt.graph.build import (
    PeakOfBody,
    aliases_of,
    bytes_of,
    in_its_own_order,
    is_constant,
    op_of,
    workspace_of,
    workspace_of_loops,
)
from remat_opt.graph.cost import Rates
from remat_opt.graph.graph import Graph, Kind, Op
from remat_opt.program import compat
from remat_opt.program.inline import Constant, Equation, Program
from remat_opt.program.masks import is_zero
from remat_opt.program.primitives import RESHAPING

VIEW = "view"  # ops of this name give an array another shape, with the arithmetic that is fused into them


class Reader:
    """Equations as the ops of a compiler."""

    def __init__(self, program: Program, rates: Rates, platform: str, peak_of_body: PeakOfBody | None = None):
        """
        Args:
            program: as it is lowered.
            rates: FLOP/s and bytes/s of the target.
            platform: "cpu", "cuda" or "tpu".
            peak_of_body: of loops, branches and what each device runs; None for the searches' own.
        """
        self.program = program
        self.rates = rates
        self.platform = platform
        self.peak_of_body = peak_of_body or in_its_own_order(rates)
        self.sizes = [bytes_of(aval) for aval in program.avals]
        self.donated: set[int] = set()
        self.ops: list[Op] = []
        self.equations: list[Equation] = []  # of each op
        self.constants: dict[int, int] = {}
        # For what comes out of a barrier the buffer, and the barrier's token; for what is renamed the buffer.
        self.same: dict[int, tuple[int, ...]] = {}
        self.producer = {value: equation for equation in program.equations for value in equation.outputs}
        self.readers: dict[int, list[Equation]] = {}
        for equation in program.equations:
            for value in {x for x in equation.inputs if isinstance(x, int)}:
                self.readers.setdefault(value, []).append(equation)
        self.copies: dict[tuple, int] = {}  # values that are made once for all readers
        self.transposed: dict[int, int] = {}  # for a transposed matrix the matrix
        self.changed: set[int] = set()  # buffers that an op changes where they lie
        self.scatters: dict[int, Op] = {}  # what is scattered into a sum, by the scatter's result
        self.scattered_onto: dict[int, int] = {}  # the array that it was to change, if that is not zeros

    def read(self, donated: tuple[bool, ...]) -> Graph:
        program = self.program
        self.donated = {value for value, is_given in zip(program.inputs, donated, strict=False) if is_given}
        self.prepare()
        for index, equation in enumerate(program.equations):
            if is_constant(equation, self.constants):
                self.constants.update(dict.fromkeys(equation.outputs, index))
            elif equation.primitive is compat.barrier_p:
                self.barrier(equation)
            elif self.is_renamed(equation):
                self.rename(equation)
            else:
                ops = self.ops_at(index, equation)
                self.ops += ops
                self.equations += [equation] * len(ops)
        self.finish()
        self.mark_changed()
        aliases = {output: given for given, output in aliases_of(program, donated, self.constants)}
        outputs = dict.fromkeys(x for x in program.outputs if not isinstance(x, Constant) and x not in self.constants)
        return Graph(
            sizes=tuple(self.sizes),
            ops=tuple(self.ops),
            inputs=(*program.inputs, *(value for value, _ in program.constants)),
            outputs=tuple(dict.fromkeys(self.buffer(value) for value in outputs)),
            aliases=tuple(
                {self.buffer(output): (given, self.buffer(output)) for output, given in aliases.items()}.values()
            ),
            constants=frozenset(self.constants),
        )

    def prepare(self) -> None:
        """What is to be known of the whole program first."""

    def ops_at(self, index: int, equation: Equation) -> Sequence[Op]:
        """What an equation adds where it stands."""
        if equation.primitive in SUMS and not self.scatters.keys().isdisjoint(equation.inputs):
            return self.scatter_into(equation)
        ops = self.ops_of(equation)
        if equation.primitive is P.dynamic_update_slice_p and len(ops) == 1:
            return [self.into(equation.inputs[0], ops[0], last=equation)]
        if equation.primitive is not P.scatter_add_p or self.platform == "tpu":
            return ops
        (op,) = ops
        if self.is_scattered_into_sum(equation):
            array = equation.inputs[0]
            if isinstance(array, int) and array not in self.constants:
                self.scattered_onto[equation.outputs[0]] = array
                (_, *others) = equation.inputs
                read = dict.fromkeys(x for x in others if isinstance(x, int) and x not in self.constants)
                op = op.but(inputs=self.behind(list(read)))
            self.scatters[equation.outputs[0]] = op.but(outputs=())
            return []
        return [self.into(equation.inputs[0], op)]

    def into(self, array: int | Constant, op: Op, last: Equation | None = None) -> Op:
        """An op that changes elements of an array, where it lies if nobody else reads that, or nobody behind an
        equation."""
        if isinstance(array, Constant) or array in self.constants:
            return op
        readers = self.readers[array]
        if len(readers) > 1 and readers[-1] is not last:
            return op
        place = self.buffer(array)
        if place in self.program.inputs:
            return op
        token = self.new(0)
        self.same[op.outputs[0]] = (place, token)
        self.changed.add(place)
        return op.but(outputs=(token,))

    def is_scattered_into_sum(self, equation: Equation) -> bool:
        """Whether a scatter is into zeros, and another array is added to that: compilers scatter into the array."""
        return self.begins_with_zeros(equation) and self.is_only_summed(equation.outputs[0])

    def is_scattered_into_zeros(self, equation: Equation) -> bool:
        """Whether a scatter makes an array of zeros and what it adds: a TPU's compiler has other code for that, which
        it takes to need no longer than what it reads and writes."""
        if equation.primitive is not P.scatter_add_p:
            return False
        return self.begins_with_zeros(equation) and not self.is_only_summed(equation.outputs[0])

    def begins_with_zeros(self, equation: Equation) -> bool:
        zeros = equation.inputs[0]
        is_known = isinstance(zeros, Constant) or zeros in self.constants
        return is_known and is_zero(self.number_in(zeros))

    def number_in(self, array: int | Constant) -> int | Constant:
        """Of a constant the number that it is spread from, or itself."""
        maker = self.producer.get(array) if isinstance(array, int) else None
        return maker.inputs[0] if maker is not None and len(maker.inputs) == 1 else array

    def is_only_summed(self, value: int) -> bool:
        """Whether a sum with another array of its shape is all that is made of a value."""
        readers = self.readers.get(value, [])
        if len(readers) != 1 or readers[0].primitive not in SUMS or value in self.program.outputs:
            return False
        summands = self.variables(readers[0])
        return all(self.program.avals[x].shape == self.program.avals[value].shape for x in summands)

    def scatter_into(self, equation: Equation) -> Sequence[Op]:
        """A sum with what a scatter makes: it scatters into the other summand."""
        scattered = next(x for x in self.variables(equation) if x in self.scatters)
        scatter = self.scatters.pop(scattered)
        others = [x for x in self.variables(equation) if x != scattered]
        (result,) = equation.outputs
        if scattered in self.scattered_onto:
            return self.scatter_onto(self.scattered_onto[scattered], scatter, equation, others)
        if not others:
            return [scatter.but(outputs=(result,))]
        (other,) = others
        ops: list[Op] = []
        if other in self.scatters:  # which is into zeros after all
            ops.append(self.scatters.pop(other).but(outputs=(other,)))
        into_it = scatter.but(inputs=(*scatter.inputs, *self.behind([other])), outputs=(result,))
        return [*ops, self.into(other, into_it)]

    def scatter_onto(self, array: int, scatter: Op, equation: Equation, others: Sequence[int]) -> Sequence[Op]:
        """A sum with what a scatter makes of an array: that of both arrays, which the scatter changes."""
        (result,) = equation.outputs
        total, token = self.new(self.sizes[result]), self.new(0)
        ops: list[Op] = []
        for other in others:
            if other in self.scatters:  # by itself after all
                both = (*self.scatters[other].inputs, *self.behind([self.scattered_onto.get(other, array)]))
                ops.append(self.scatters.pop(other).but(inputs=both, outputs=(other,)))
        added = Op(self.behind([array, *others]), (total,), kind=Kind.ELEMENTWISE, name=equation.primitive.name)
        self.same[result] = (total, token)
        self.changed.add(total)
        return [*ops, added, scatter.but(inputs=(*scatter.inputs, total), outputs=(token,))]

    def variables(self, equation: Equation) -> list[int]:
        """Operands that are no constants."""
        return list(dict.fromkeys(x for x in equation.inputs if isinstance(x, int) and x not in self.constants))

    def finish(self) -> None:
        """What a compiler does with ops that are there."""
        self.fold_transposes()
        self.drop_unread()

    def buffer(self, value: int) -> int:
        return self.same[value][0] if value in self.same else value

    def behind(self, inputs: Sequence[int]) -> tuple[int, ...]:
        """Operands as buffers, with the tokens of the barriers behind which they are read."""
        found: dict[int, None] = {}
        for value in inputs:
            found.update(dict.fromkeys(self.same.get(value, (value,))))
        return tuple(found)

    def is_renamed(self, equation: Equation) -> bool:
        """Whether an equation gives the bytes of an array another shape; nothing is run for that."""
        if equation.primitive is compat.layout_constraint_p:
            return True
        if equation.primitive not in RESHAPING or len(equation.inputs) != 1 or isinstance(equation.inputs[0], Constant):
            return False
        return self.program.avals[equation.inputs[0]].size == self.program.avals[equation.outputs[0]].size

    def rename(self, equation: Equation) -> None:
        """What has another shape is the buffer that it was."""
        (given,) = (x for x in equation.inputs if isinstance(x, int))
        self.same[equation.outputs[0]] = (self.buffer(given), *self.same.get(given, ())[1:])

    def barrier(self, equation: Equation) -> None:
        """A barrier's results are its operands' buffers; who reads them runs after it."""
        values = [x for x in equation.inputs if not isinstance(x, Constant) and x not in self.constants]
        token = len(self.sizes)
        self.sizes.append(0)
        made = [token]
        for x, output in zip(equation.inputs, equation.outputs, strict=True):
            if isinstance(x, Constant) or x in self.constants:
                made.append(output)
            else:
                self.same[output] = (self.buffer(x), token)
        self.ops.append(Op(self.behind(values), tuple(made), kind=Kind.BARRIER, repeatable=False, name="barrier"))
        self.equations.append(equation)

    def ops_of(self, equation: Equation) -> Sequence[Op]:
        op = op_of(self.program, equation, self.rates, self.constants)
        inputs = op.inputs
        if is_matrix_transpose(equation) and inputs:
            self.transposed[equation.outputs[0]] = inputs[0]
        elif equation.primitive is P.dot_general_p:  # a transposed matrix is a matrix that is read otherwise
            inputs = tuple(self.transposed.get(value, value) for value in inputs)
        inputs = self.behind(inputs)
        if equation.primitive in (P.scan_p, P.while_p):
            op = self.in_place(equation, op)
        loops = workspace_of_loops(equation.primitive, equation.params, self.peak_of_body)
        workspace = max(workspace_of(equation, self.program, self.platform), loops)
        is_as_written = (inputs, workspace) == (op.inputs, op.workspace)
        return [op if is_as_written else op.but(inputs=inputs, workspace=workspace)]

    def in_place(self, equation: Equation, op: Op) -> Op:
        """A loop's carries are updated where they lie: a last one takes the first one's place, where the loop is the
        only one to read that, and for nothing else. Who reads it then runs after the loop."""
        constants, carries = compat.loop_counts(equation.params)
        given = set(self.program.inputs) - self.donated
        token = self.new(0)
        kept = list(op.outputs)
        for first, last in zip(equation.inputs[constants : constants + carries], equation.outputs, strict=False):
            if isinstance(first, Constant) or first in self.constants or len(self.readers[first]) > 1:
                continue
            if equation.inputs.count(first) > 1:
                continue
            if self.buffer(first) not in given and self.sizes[self.buffer(first)] == self.sizes[last]:
                self.same[last] = (self.buffer(first), token)
                self.changed.add(self.buffer(first))
                kept.remove(last)
        return op.but(outputs=(*kept, token))

    def new(self, size: int) -> int:
        """A value that the compiler adds."""
        self.sizes.append(size)
        return len(self.sizes) - 1

    def fold_transposes(self) -> None:
        """Put a product that is only transposed behind all other readers of its operands: compilers fold the transpose
        into the product, which they write anew, as the last in the lists that their orders follow."""
        users: dict[int, list[int]] = {}
        for index, op in enumerate(self.ops):
            for value in op.inputs:
                users.setdefault(value, []).append(index)
        rank = [float(index) for index in range(len(self.ops))]
        for index, op in enumerate(self.ops):
            readers = users.get(op.outputs[0], []) if op.kind is Kind.CONTRACTION else []
            if len(readers) != 1 or not is_matrix_transpose(self.equations[readers[0]]):
                continue
            (transposed,) = self.ops[readers[0]].outputs
            needed = min(users.get(transposed, [len(self.ops)]))
            others = [user for value in op.inputs for user in users[value] if user < needed]
            rank[index] = max(others) + 0.5
            rank[readers[0]] = max(others) + 0.75
        order = sorted(range(len(self.ops)), key=rank.__getitem__)
        self.ops = [self.ops[index] for index in order]
        self.equations = [self.equations[index] for index in order]

    def mark_changed(self) -> None:
        """Say of ops that their results are changed later."""
        for index, op in enumerate(self.ops):
            if op.outputs and not self.changed.isdisjoint(op.outputs):
                self.ops[index] = op.but(changed_later=True)

    def drop_unread(self) -> None:
        """Leave out what nothing reads of what may go."""
        read = {self.buffer(value) for value in self.program.outputs if isinstance(value, int)}
        kept = []
        for index in reversed(range(len(self.ops))):
            op = self.ops[index]
            if not self.may_go(op, self.equations[index]) or not read.isdisjoint(op.outputs):
                read.update(op.inputs)
                kept.append(index)
        kept.reverse()
        self.ops = [self.ops[index] for index in kept]
        self.equations = [self.equations[index] for index in kept]

    def may_go(self, op: Op, equation: Equation) -> bool:
        """Whether others read something else instead of what an op makes: matrices that products turn, and the pieces
        of concatenations among concatenations."""
        return is_matrix_transpose(equation) or equation.primitive is P.concatenate_p
