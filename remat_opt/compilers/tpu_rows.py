"""Which arrays of a TPU's program lie row by row, as gathers make them.

What is read at one index lies in as few tiles as hold it: 4 × 32 numbers for each of 131,072 indices take 4 × 128
places each. XLA fixes these layouts of gathers, and gives them to the cheap work that is done on their results. Where
two exponentials, quotients or the like are among all the work that goes on from there, its arrays lie as they pad
least: what is gathered is copied at once, and what is scattered is copied back.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING

from jax import lax
from jax.extend.core import primitives as P

from remat_opt.graph.graph import Op
from remat_opt.graph.tiles import padded_rows
from remat_opt.program import compat
from remat_opt.program.inline import Constant, Equation, Program
from remat_opt.program.primitives import DEAR, ELEMENTWISE, REDUCTION

if TYPE_CHECKING:
    from remat_opt.compilers.tpu_reader import TpuReader

MOST_DEAR = 1  # that are done row by row
MOST_SUMS = 2  # over vectors that elementwise work connects, which lie row by row
_Equations = frozenset[Equation]


class Rows:
    """What gathers make, and what is made of rows alone.

    Attributes:
        lying: for each value that lies row by row how many leading dimensions count its rows.
        packed: in the same way what is made of rows, or gathered, and lies as it pads least.
    """

    def __init__(self, program: Program):
        self._program = program
        self._counts: dict[int, int] = {}
        self._free: set[int] = set()  # made of less than there is in it, so that it may lie in any way
        self._dear: dict[int, _Equations] = {}  # for each value of rows the dear work since its gather
        self._groups = _Groups()
        self._sums: list[int] = []  # vectors that are summed up
        self._filled: list[int] = []  # gathered, with zeros where the index is out of bounds
        self._fixed: list[int] = []  # vectors that are made of rows with more dimensions
        for equation in program.equations:
            if equation.primitive is compat.barrier_p:
                self._hand_on(equation)
            else:
                self._read(equation)
        sums = [self._groups.of(value) for value in self._sums]
        fixed = {self._groups.of(value) for value in self._fixed}
        packed = self._with_filled({group for group in sums if sums.count(group) > MOST_SUMS} - fixed) - fixed
        self.packed = {
            value: count
            for value, count in self._counts.items()
            if _is_of_vectors(value, count, program) and self._groups.of(value) in packed
        }
        self.lying = {value: count for value, count in self._counts.items() if value not in self.packed}

    def _hand_on(self, barrier: Equation) -> None:
        for x, result in zip(barrier.inputs, barrier.outputs, strict=True):
            if isinstance(x, int) and x in self._counts:
                self._counts[result], self._dear[result] = self._counts[x], self._dear[x]

    def _read(self, equation: Equation) -> None:
        operands = [x for x in equation.inputs if isinstance(x, int) and (x in self._counts or x in self._free)]
        if equation.primitive in REDUCTION:
            self._sums += [x for x in operands if x in self._counts and self._is_wide(x)]
        count, work = _gathered(equation, self._program), frozenset[Equation]()
        if count and equation.params["mode"] is lax.GatherScatterMode.FILL_OR_DROP:
            self._filled += equation.outputs
        if not count:
            count = _passed_on(equation, self._program, self._counts, self._free)
            if not count and _is_free(equation, self._program, self._free):
                self._free.update(equation.outputs)
            elif not count:
                return
            work = work.union(*(self._dear.get(x, frozenset()) for x in operands))
            work |= {equation} if equation.primitive in DEAR else set()
        for result in equation.outputs:
            for x in operands:
                self._groups.join(x, result)
            if any(len(self._program.avals[x].shape) > count + 1 for x in operands if x in self._counts):
                self._fixed.append(result)
            if count and (len(work) <= MOST_DEAR or _is_of_vectors(result, count, self._program)):
                self._counts[result], self._dear[result] = count, work

    def _with_filled(self, packed: set[int]) -> set[int]:
        """Groups that are packed, and those that have an array of zeros in common with them, as of several gathers
        that fill up what is out of bounds."""
        filled = [(self._program.avals[value].shape, self._groups.of(value)) for value in self._filled]
        shapes = {shape for shape, group in filled if group in packed}
        return packed | {group for shape, group in filled if shape in shapes}

    def _is_wide(self, value: int) -> bool:
        shape = self._program.avals[value].shape
        return len(shape) == 2 and shape[-1] > 1


def _is_of_vectors(value: int, count: int, program: Program) -> bool:
    """Whether each row is one vector."""
    return len(program.avals[value].shape) == count + 1


class _Groups:
    """Values that are connected."""

    def __init__(self) -> None:
        self._next: dict[int, int] = {}

    def of(self, value: int) -> int:
        while value in self._next:
            value = self._next[value]
        return value

    def join(self, one: int, other: int) -> None:
        one, other = self.of(one), self.of(other)
        if one != other:
            self._next[other] = one


def with_row_copies(reader: TpuReader, equation: Equation, op: Op) -> Sequence[Op]:
    """A gather with the copy of what it reads, and a scatter with the copy of what it adds, where these lie otherwise
    than row by row."""
    if equation.primitive is P.gather_p:
        (result,) = equation.outputs
        if result not in reader.rows.packed or op.outputs != (result,):
            return [op]
        by_rows = reader.new(_bytes_by_rows(reader, result, reader.rows.packed[result]))
        return [op.but(outputs=(by_rows,)), Op((by_rows,), (result,), name="copy")]
    added = equation.inputs[2]
    if not isinstance(added, int) or added not in reader.rows.packed:
        return [op]
    by_rows = reader.new(_bytes_by_rows(reader, added, reader.rows.packed[added]))
    inputs = tuple(by_rows if value == reader.buffer(added) else value for value in op.inputs)
    return [Op(reader.behind([added]), (by_rows,), name="copy"), op.but(inputs=inputs)]


def _bytes_by_rows(reader: TpuReader, value: int, count: int) -> int:
    aval = reader.program.avals[value]
    return padded_rows(aval.shape, compat.item_bytes(aval.dtype), count)


def _gathered(equation: Equation, program: Program) -> int:
    """Of a gather the number of dimensions that its indices have, if these come first; else 0."""
    if equation.primitive is not P.gather_p:
        return 0
    window = equation.params["dimension_numbers"].offset_dims
    rank = len(program.avals[equation.outputs[0]].shape)
    count = rank - len(window)
    return count if tuple(window) == tuple(range(count, rank)) else 0


def _passed_on(equation: Equation, program: Program, found: Mapping[int, int], free: Container[int]) -> int:
    """How many dimensions count the rows of what is made of rows, and maybe of what has no place of its own; 0 if it is
    made of anything else, too."""
    if equation.primitive not in ELEMENTWISE and equation.primitive not in REDUCTION:
        return 0
    shape = program.avals[equation.outputs[0]].shape
    counts: set[int] = set()
    for x in equation.inputs:
        if isinstance(x, Constant) or not program.avals[x].shape:
            continue
        count = found.get(x, 0)
        if not count and (x in free or program.avals[x].size < program.avals[equation.outputs[0]].size):
            continue
        if program.avals[x].shape[:count] != shape[:count]:
            return 0
        counts.add(count)
    return counts.pop() if len(counts) == 1 else 0


def _is_free(equation: Equation, program: Program, free: Container[int]) -> bool:
    """Whether elementwise work has no operand of its result's size that lies in some way."""
    if equation.primitive not in ELEMENTWISE or program.avals[equation.outputs[0]].size <= 1:
        return False
    size = program.avals[equation.outputs[0]].size
    return all(isinstance(x, Constant) or x in free or program.avals[x].size < size for x in equation.inputs)
