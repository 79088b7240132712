"""What XLA's CPU compiler leaves to a library: reductions, with the arithmetic around them, each in one kernel.

A reduction of windows is such, too, where nothing is padded.

A kernel begins with a reduction, those nearest to the step's end first, and grows (`library_rewriter.cc`,
`ynn_matcher.h`): by what makes one of its operands where nobody else reads that, and by what reads its result where
only that one reads it. It has one result, which may take the place of an operand that is read for the same elements
alone. Loops are fused only afterwards, so that a kernel reads and writes buffers: what others read, too, is stored for
it, even a vector or a constant that is spread over an array.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import primitives as P

from remat_opt.compilers.equations import product_copies
from remat_opt.graph.graph import Kind, Op
from remat_opt.program.inline import Constant, Equation, Program
from remat_opt.program.primitives import named

FEWEST_ELEMENTS = 4096  # of a result or an operand: the library does not pay for less
_FEWEST_FACTORS = 8  # of a product along its longest dimension

_REDUCTIONS = named("reduce_sum reduce_max reduce_min")
_WINDOWS = named("reduce_window_sum reduce_window_max reduce_window_min")
_ARITHMETIC = named(
    "abs add add_jaxvals ceil convert_element_type cos div exp expm1 floor integer_pow log log1p logistic max min mul "
    "neg pow round rsqrt sign sin sqrt square sub tanh"
)
_OF_ANY_SIZE = named("broadcast_in_dim name stop_gradient copy")


def by_library(
    program: Program,
    ops: Sequence[Op],
    equations: Sequence[Equation],
    sizes: list[int],
    constants: dict[int, int],
    behind: Callable[[Sequence[int]], tuple[int, ...]],
) -> tuple[list[Op], list[Equation]]:
    """Ops with the library's kernels in the places of their last parts.

    Args:
        program: what the ops are of.
        ops: in an order in which they can run.
        equations: of each op.
        sizes: in bytes of each value; what is spread over arrays is added.
        constants: values that depend on no input, and the equations that make them.
        behind: buffers of some values, and tokens of the barriers behind which they are read.
    """
    regions = _Regions(program, ops, equations, constants, behind)
    made: dict[Hashable, int] = {}
    new_ops, new_equations = [], []
    for index, (op, equation) in enumerate(zip(ops, equations, strict=True)):
        region = regions.at.get(index)
        if region is not None and region.last != index:
            continue
        if region is not None:
            for key, (sources, aval) in regions.spread_for(region).items():
                if key not in made:
                    made[key] = len(sizes)
                    sizes.append(math.prod(aval.shape) * aval.dtype.itemsize)
                    new_ops.append(Op(sources, (made[key],), kind=Kind.ELEMENTWISE, name="broadcast"))
                    new_equations.append(equation)
            parts = [ops[part] for part in sorted(region.parts)]
            op = _as_one(op, parts, regions.operands(region, made), regions.written_over(region))
        new_ops.append(op)
        new_equations.append(equation)
    return new_ops, new_equations


def _as_one(last: Op, parts: Sequence[Op], operands: tuple[int, ...], written_over: tuple[int, ...]) -> Op:
    return last.but(
        inputs=operands,
        written_over=written_over,
        kind=Kind.REDUCTION,
        flops=sum(part.flops for part in parts),
        seconds=sum(part.seconds for part in parts),
        repeatable=all(part.repeatable for part in parts),
        workspace=max(part.workspace for part in parts),
        dear=False,
        of_buffers=True,
    )


@dataclasses.dataclass
class _Region:
    """Ops of one kernel, and the one that makes its result."""

    parts: set[int]
    last: int


class _Regions:
    """All kernels of the library in a program; `at` has that of each op that is in one."""

    def __init__(
        self,
        program: Program,
        ops: Sequence[Op],
        equations: Sequence[Equation],
        constants: dict[int, int],
        behind: Callable[[Sequence[int]], tuple[int, ...]],
    ):
        self.program, self.ops, self.equations, self.constants, self.behind = program, ops, equations, constants, behind
        self.producer = {value: index for index, op in enumerate(ops) for value in op.outputs}
        self.users: dict[int, set[int]] = {}
        for index, op in enumerate(ops):
            for value in op.inputs:
                self.users.setdefault(value, set()).add(index)
        for value in program.outputs:
            if isinstance(value, int):
                self.users.setdefault(value, set()).add(-1)
        self.at: dict[int, _Region] = {}
        for index in reversed(range(len(ops))):
            if index not in self.at and _reduces(equations[index]) and self.is_for_library(index):
                self.grow(index)
        self.readers_of_spread: dict[Hashable, set[int]] = {}
        for index in range(len(ops)):
            for key in self.spread(index):
                self.readers_of_spread.setdefault(key, set()).add(index)

    def grow(self, start: int) -> None:
        region = self.at[start] = _Region({start}, start)
        while found := self.next_to(region):
            for index in found:
                region.parts.add(index)
                self.at[index] = region
            region.last = max(region.parts)

    def next_to(self, region: _Region) -> list[int]:
        """Ops that can join a kernel: those that make its operands, or the one that reads its result."""
        (result,) = self.ops[region.last].outputs
        readers = self.users.get(result, set())
        found = [index for index in readers if len(readers) == 1 and index >= 0]
        for value in self.operands(region):
            if value in self.producer and self.users[value] <= region.parts:
                found.append(self.producer[value])
        return [index for index in dict.fromkeys(found) if index not in self.at and self.is_for_library(index)]

    def operands(self, region: _Region, arrays: Mapping[Hashable, int] | None = None) -> tuple[int, ...]:
        """What a kernel reads; with `arrays`, those in the places of what is spread over them."""
        made = {value for part in region.parts for value in self.ops[part].outputs}
        read: list[int] = []
        for part in sorted(region.parts):
            instead = {key: arrays[key] for key in self.spread(part) if key in arrays} if arrays else {}
            if not instead:
                read += self.ops[part].inputs
                continue
            read += instead.values()
            for x in self.equations[part].inputs:
                if self.key_of(part, x) not in instead:
                    read += self.buffers_of(x)
        return tuple(value for value in dict.fromkeys(read) if value not in made)

    def written_over(self, region: _Region) -> tuple[int, ...]:
        """Operands that go into a kernel's result by arithmetic alone, element by element: the result may take their
        places (`HloInstruction::IsElementwiseOnOperand`)."""
        (result,) = self.ops[region.last].outputs
        size = self.program.avals[result].size
        by_elements: set[int] = set()
        for part in sorted(region.parts, reverse=True):
            (made,) = self.ops[part].outputs
            is_arithmetic = self.equations[part].primitive in _ARITHMETIC and self.program.avals[made].size == size
            if is_arithmetic and (part == region.last or self.users[made] <= by_elements):
                by_elements.add(part)
        return tuple(value for value in self.operands(region) if self.users[value] & region.parts <= by_elements)

    def is_for_library(self, index: int) -> bool:
        """Whether the library can do an op, and pays."""
        op, equation = self.ops[index], self.equations[index]
        if op.outputs != equation.outputs or len(op.outputs) != 1:
            return False
        avals = [*self.avals_of(equation.inputs), *self.avals_of(equation.outputs)]
        if not all(jnp.issubdtype(aval.dtype, jnp.floating) for aval in avals):
            return False
        is_product = equation.primitive is P.dot_general_p
        if is_product and op.kind is not Kind.ELEMENTWISE:
            return _is_plain_product(equation, self.program, avals)
        if equation.primitive in _OF_ANY_SIZE:
            return True
        pays = max(aval.size for aval in avals) >= FEWEST_ELEMENTS
        return pays and (is_product or equation.primitive in _ARITHMETIC or _reduces(equation))

    def avals_of(self, values: Iterable[int | Constant]) -> list[Any]:
        return [self.program.aval_of(x) for x in values]

    def spread_for(self, region: _Region) -> dict[Hashable, tuple[tuple[int, ...], Any]]:
        """What a kernel reads spread over an array and others do, too: compilers make one array for all."""
        return {
            key: found
            for part in sorted(region.parts)
            for key, found in self.spread(part).items()
            if not self.readers_of_spread[key] <= region.parts
        }

    def spread(self, index: int) -> dict[Hashable, tuple[tuple[int, ...], Any]]:
        """What an elementwise op reads that is smaller than its result: of which buffers, and as an array of which
        type."""
        op, equation = self.ops[index], self.equations[index]
        if op.kind is not Kind.ELEMENTWISE or op.outputs != equation.outputs or equation.primitive in _OF_ANY_SIZE:
            return {}
        aval = self.program.avals[equation.outputs[0]]
        keys = {key: x for x in equation.inputs if (key := self.key_of(index, x)) is not None}
        return {key: (self.buffers_of(x), aval) for key, x in keys.items()}

    def buffers_of(self, x: int | Constant) -> tuple[int, ...]:
        """What an operand is read from; nothing for a constant."""
        return () if isinstance(x, Constant) or x in self.constants else self.behind([x])

    def key_of(self, index: int, x: int | Constant) -> Hashable | None:
        """What tells apart arrays over which something smaller is spread; None for what is not."""
        aval = self.program.avals[self.equations[index].outputs[0]]
        if isinstance(x, Constant) or x in self.constants:
            number = self.number(x)
            if number is None or not aval.shape:
                return None
            return ("number", number, aval.shape, str(aval.dtype), self.turned.get(self.equations[index].outputs[0]))
        given = self.program.avals[x]
        return ("value", self.behind([x]), given.shape, aval.shape) if given.size < aval.size else None

    @functools.cached_property
    def turned(self) -> dict[int, tuple[Hashable, ...]]:
        """Of what is transposed, and of what is computed of arrays that all are alike, how, with the shapes that they
        were given then: the compiler computes it of the arrays as they were (`reshape_mover.cc`)."""
        found: dict[int, tuple[Hashable, ...]] = {}
        for equation in self.program.equations:
            given = found.get(equation.inputs[0]) if equation.inputs and isinstance(equation.inputs[0], int) else None
            if equation.primitive is P.transpose_p:
                found[equation.outputs[0]] = (*(given or ()), equation.params["permutation"])
            elif equation.primitive is P.reshape_p and given is not None:
                found[equation.outputs[0]] = (*given, self.program.avals[equation.outputs[0]].shape)
            elif equation.primitive in _ARITHMETIC:
                (result,) = equation.outputs
                size = self.program.avals[result].size
                arrays = [x for x in equation.inputs if isinstance(x, int) and x not in self.constants]
                ways = {found.get(x) for x in arrays if self.program.avals[x].size == size}
                if len(ways) == 1 and (way := ways.pop()) is not None:
                    found[result] = way
        return found

    def number(self, x: int | Constant) -> complex | None:
        """The number that a constant has in all its elements, where that is known."""
        if isinstance(x, Constant):
            is_number = not jnp.issubdtype(x.aval.dtype, jax.dtypes.extended) and not x.aval.shape
            return np.asarray(x.value).item() if is_number else None
        maker = self.program.equations[self.constants[x]]
        return self.number(maker.inputs[0]) if maker.primitive in _OF_ANY_SIZE and maker.inputs else None


def _reduces(equation: Equation) -> bool:
    """Whether an equation is a reduction, of an array or of windows of one that is not padded."""
    if equation.primitive not in _WINDOWS:
        return equation.primitive in _REDUCTIONS
    dilations = (*equation.params["base_dilation"], *equation.params["window_dilation"])
    return all(size == 1 for size in dilations) and all(sum(padding) == 0 for padding in equation.params["padding"])


def _is_plain_product(equation: Equation, program: Program, avals: Sequence[Any]) -> bool:
    """Whether rows of the first operand are multiplied by columns of the second one, as both lie or are copied to."""
    (first, second), (before, also_before) = equation.params["dimension_numbers"]
    left, right, result = avals
    batch = tuple(range(len(before)))
    lies = (
        tuple(before) == batch and first == (len(left.shape) - 1,),
        tuple(also_before) == batch and second == (len(batch),),
    )
    if len(first) != 1 or not all(map(operator.or_, lies, product_copies(equation, program))):
        return False
    examples = math.prod(left.shape[axis] for axis in before)
    factors = left.shape[first[0]]
    rows, columns = (aval.size // max(examples * factors, 1) for aval in (left, right))
    return min(rows, columns) > 1 and max(rows, columns, factors) >= _FEWEST_FACTORS and result.dtype != jnp.float16
