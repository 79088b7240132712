"""What XLA's GPU compiler makes of scatters, and of the backward of a max-pool, which is one.

A scatter changes zeros, or what it is added to. The zeros of one shape are one array, of which copies are changed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from jax.extend.core import primitives as P

from remat_opt.compilers.gpu_convolution_reader import ConvolutionReader
from remat_opt.compilers.gpu_fusion import Work
from remat_opt.compilers.gpu_work import BLOCK
from remat_opt.graph.build import op_of, workspace_of
from remat_opt.graph.graph import Kind, Op
from remat_opt.graph.ordering import ZEROS
from remat_opt.program import compat
from remat_opt.program.inline import Constant, Equation
from remat_opt.program.masks import is_zero


class ScatterReader(ConvolutionReader):
    """Scatters, max-pools' backwards, and the zeros that they begin with."""

    def prepare(self) -> None:
        super().prepare()
        self.zeros: dict[tuple, int] = {}  # arrays of zeros in memory, by shape and dtype
        self.changed_zeros: dict[tuple, list[int]] = {}  # such arrays that scatters write into

    def into(self, array: int | Constant, op: Op, last: Equation | None = None) -> Op:
        """As of all platforms; into zeros of its own where there are none yet."""
        (result,) = op.outputs
        is_constant = isinstance(array, Constant) or array in self.constants
        if is_constant and is_zero(self.number_in(array)):
            aval = self.program.avals[result]
            place, token = self.new(self.sizes[result]), self.new(0)
            self.changed_zeros.setdefault((aval.shape, aval.dtype), []).append(place)
            self.same[result] = (place, token)
            self.changed.add(place)
            op = op.but(inputs=(*op.inputs, place), outputs=(token,))
        else:
            op = super().into(array, op, last)
        if result in self.work:
            self.work[op.outputs[0]] = self.work[result]
        return op

    def make_changed_zeros(self) -> None:
        """Make all zeros of one shape that scatters and loops write into at once: the compiler sees one array of zeros,
        of which each changes a copy, and copies them as soon as it is there.

        The array itself is for the last that changes one, if it waits for all others. Where none does, all change
        copies; the array is in none's way later, but does not wait for a reader when kernels are ordered.
        """
        for key, places in self.begun.items():
            self.changed_zeros.setdefault(key, []).extend(places)
        for places in self.changed_zeros.values():
            changing = {next(at for at, op in enumerate(self.ops) if place in op.inputs) for place in places}
            made = [*places] if self.waits_for_all(sorted(changing)) else [*places, self.new(0)]
            self.ops.insert(min(changing), Op((), tuple(made), name=ZEROS))
            self.equations.insert(min(changing), self.equations[min(changing)])

    def waits_for_all(self, changing: Sequence[int]) -> bool:
        """Whether the last of some ops waits for all others."""
        *others, last = changing
        waited_for = {*self.ops[last].inputs}
        for at in range(last - 1, -1, -1):
            if not waited_for.isdisjoint(self.ops[at].outputs):
                waited_for.update(self.ops[at].inputs)
                others = [other for other in others if other != at]
        return not others

    def pooled_backwards(self, equation: Equation) -> Sequence[Op]:
        """A max-pool's backward as it is expanded: a reduction of each window to its maximum and that one's indices,
        and a scatter into zeros, or into what the result is added to. Where the windows are padded, so are the
        operand, for the reduction, and the result."""
        source, operand = equation.inputs
        (result,) = equation.outputs
        op = op_of(self.program, equation, self.rates, self.constants)
        op = op.but(inputs=self.behind(op.inputs))
        if isinstance(source, Constant) or isinstance(operand, Constant) or operand in self.constants:
            return [op]
        params, aval = equation.params, self.program.avals[operand]
        sides = zip(aval.shape, params["padding"], strict=True)
        elements = math.prod(side + sum(padding) for side, padding in sides)
        wide = elements * compat.item_bytes(aval.dtype)
        read = self.buffer(operand)
        reads = self.behind([operand])
        ops: list[Op] = []
        is_padded = elements > aval.size
        if is_padded:
            read = self.new(wide)
            self.work[read] = Work(3.0 * elements, elements / BLOCK)
            ops.append(Op(reads, (read,), kind=Kind.ELEMENTWISE, name="pad"))
            reads = (read,)
        found, more = self.places_in_windows(equation, read, reads, elements)
        ops += more
        scatter = op.but(inputs=(*self.behind([source][source in self.constants :]), found), outputs=(), workspace=0)
        if not is_padded and self.is_only_summed(result):
            self.scatters[result] = scatter
            return ops
        key = (aval.shape, aval.dtype)
        zeros = self.new(wide)
        if found in self.copies.values() and not is_padded:
            self.changed_zeros.setdefault(key, []).append(zeros)
        else:
            if not is_padded:
                self.zeros.setdefault(key, zeros)
            ops.append(Op((), (zeros,), kind=Kind.ELEMENTWISE, name=ZEROS))
        token = self.new(0)
        ops.append(scatter.but(inputs=(*scatter.inputs, zeros), outputs=(token,)))
        if is_padded:
            self.work[result] = Work(0.0, aval.size / BLOCK)
            ops.append(Op((zeros, token), (result,), kind=Kind.ELEMENTWISE, name="slice"))
        else:
            self.same[result] = (zeros, token)
        return ops

    def places_in_windows(
        self, equation: Equation, read: int, reads: tuple[int, ...], elements: int
    ) -> tuple[int, Sequence[Op]]:
        """What a max-pool's backward scatters to, and the ops that find it: each window's maximum with its indices. If
        twice is scattered to the same places, as for derivatives of a derivative, the indices are put together for
        both."""
        source, operand = (x for x in equation.inputs if isinstance(x, int))
        windows = self.program.avals[source]
        key = ("places", operand, *_windows_of(equation))
        if key in self.copies:
            return self.copies[key], []
        found = self.new(workspace_of(equation, self.program, self.platform))
        window = math.prod(equation.params["window_dimensions"])
        uses = {read: max(1.0, window * windows.size / max(elements, 1))}
        self.work[found] = Work(20.0 * window * windows.size, windows.size / BLOCK, uses)
        ops = [Op(reads, (found,), kind=Kind.REDUCTION, name="reduce_window")]
        readers = [one for one in self.readers[operand] if one.primitive is equation.primitive]
        if sum(one.inputs[1] == operand and _windows_of(one) == _windows_of(equation) for one in readers) > 1:
            places = self.copies[key] = self.new(self.sizes[found] - self.sizes[source])
            ops.append(Op((found,), (places,), kind=Kind.REDUCTION, name="concatenate"))
            return places, ops
        return found, ops

    def share_zeros(self) -> None:
        """Let the zeros that a max-pool's backward scatters into live from the first rectifier of that shape on.

        Rectifiers of that shape compare with the same zeros; and what one reader needs in memory is in memory for all.
        """
        selects = (equation for equation in self.equations if equation.primitive is P.select_n_p)
        chosen = (one for one in selects if any(is_zero(self.number_in(x)) for x in one.inputs[1:]))
        selected = {(aval.shape, aval.dtype) for one in chosen for aval in [self.program.avals[one.outputs[0]]]}
        for index, equation in enumerate(self.equations):
            if equation.primitive is not P.max_p or not is_zero(equation.inputs[1]):
                continue
            aval = self.program.avals[equation.outputs[0]]
            zeros = self.zeros.get((aval.shape, aval.dtype))
            op = self.ops[index]
            if zeros is None or op.outputs != equation.outputs:
                continue
            maker = next(at for at, other in enumerate(self.ops) if zeros in other.outputs)
            if not self.ops[maker].inputs:
                self.ops[maker] = self.ops[maker].but(inputs=op.inputs)
                if (aval.shape, aval.dtype) in selected:
                    self.copy_zeros(maker, zeros)
            self.ops[index] = op.but(inputs=(*op.inputs, zeros))

    def copy_zeros(self, maker: int, zeros: int) -> None:
        """Give the scatter zeros of its own: a rectifier's gradient is a choice between those and what is scattered."""
        own = self.new(self.sizes[zeros])
        for at, op in enumerate(self.ops):
            if zeros in op.inputs:
                self.ops[at] = op.but(inputs=tuple(own if x == zeros else x for x in op.inputs))
        for value, (buffer, *tokens) in self.same.items():
            if buffer == zeros:
                self.same[value] = (own, *tokens)
        self.ops[maker] = self.ops[maker].but(outputs=(zeros, own))


def _windows_of(equation: Equation) -> tuple:
    """What tells a max-pool's windows apart from others."""
    return tuple(equation.params[name] for name in ("window_dimensions", "window_strides", "padding"))
