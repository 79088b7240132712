"""Which products XLA's GPU compiler makes one of: those that share an operand (`dot_merger.cc`).

Of two products of which neither depends on the other, and at least one is small, the compiler puts the operands that
differ side by side. The results are parts of one buffer, which is there from the time that the later one can be
computed until nobody reads either.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
from jax.extend.core import primitives as P

from remat_opt.graph.build import bytes_of
from remat_opt.graph.dependencies import Dependencies
from remat_opt.program.inline import Equation, Program

SMALL = 32 * 2**20  # bytes of operands and result (XLA's `xla_gpu_dot_merger_threshold_mb`)
_FRAGMENT = 64  # operands whose sides are multiples lie side by side for the product alone,
_MOST_PARTS = 4  # if they are no more than a kernel reads for one operand (`triton_fusion_analysis.h`)


class Matrices(NamedTuple):
    """A product as one of (batches of) matrices: (rows, summed) by (summed, columns)."""

    batch: int
    rows: int
    columns: int
    summed: int
    dtypes: tuple[Any, Any, Any]

    @classmethod
    def of(cls, equation: Equation, program: Program) -> Matrices:
        """Of a `dot_general`."""
        avals = [program.aval_of(x) for x in equation.inputs]
        (contracted, _), (batched, _) = equation.params["dimension_numbers"]
        summed = math.prod(avals[0].shape[axis] for axis in contracted)
        batch = math.prod(avals[0].shape[axis] for axis in batched)
        rows, columns = (aval.size // max(summed * batch, 1) for aval in avals)
        result = program.avals[equation.outputs[0]]
        return cls(batch, rows, columns, summed, (avals[0].dtype, avals[1].dtype, result.dtype))

    @property
    def params(self) -> dict[str, Any]:
        """Of a `dot_general` of these matrices."""
        return {"dimension_numbers": (((2,), (1,)), ((0,), (0,)))}

    @property
    def avals(self) -> tuple[Any, Any, Any]:
        """Operands and result."""
        shapes = (self.rows, self.summed), (self.summed, self.columns), (self.rows, self.columns)
        made = (
            jax.ShapeDtypeStruct((self.batch, *shape), dtype) for shape, dtype in zip(shapes, self.dtypes, strict=True)
        )
        first, second, result = made
        return first, second, result

    @property
    def is_small(self) -> bool:
        """Whether it is worth merging."""
        return sum(map(bytes_of, self.avals)) <= SMALL

    def beside(self, other: Matrices, side: int) -> Matrices:
        """Both products in one; they share the operand of a side."""
        if side == 0:
            return self._replace(columns=self.columns + other.columns)
        return self._replace(rows=self.rows + other.rows)

    def needs_copy(self, others: list[Matrices], side: int) -> bool:
        """Whether the operands that differ are copied side by side before the product."""
        is_even = not any((one.columns if side == 0 else one.rows) % _FRAGMENT for one in others)
        return not is_even or len(others) > _MOST_PARTS


class Merged(NamedTuple):
    """Products that become one: their equations, the side of the operand that they share, and what they are then."""

    equations: tuple[int, ...]
    side: int
    matrices: Matrices
    is_copied: bool


def merged_products(program: Program) -> list[Merged]:
    """The products of a program that become one."""
    classes: dict[tuple, list[int]] = {}
    for index, equation in enumerate(program.equations):
        if equation.primitive is P.dot_general_p:
            for side, value in enumerate(equation.inputs):
                if isinstance(value, int):
                    contracted, batched = (axes[side] for axes in equation.params["dimension_numbers"])
                    classes.setdefault((value, side, contracted, batched), []).append(index)
    classes = {key: found for key, found in classes.items() if len(found) > 1}
    if not classes:
        return []
    candidates = {index for found in classes.values() for index in found}
    reads = ([value for value in equation.inputs if isinstance(value, int)] for equation in program.equations)
    makes = (equation.outputs for equation in program.equations)
    before = Dependencies(zip(reads, makes, strict=True), candidates)
    matrices = {index: Matrices.of(program.equations[index], program) for index in candidates}
    merged: list[Merged] = []
    gone: set[int] = set()
    for (_, side, _, _), found in sorted(classes.items(), key=lambda item: item[0][:2]):
        merged += _merge_class(side, found, matrices, before, gone)
    return merged


def _merge_class(
    side: int, found: list[int], matrices: dict[int, Matrices], before: Dependencies, gone: set[int]
) -> list[Merged]:
    """Merge what shares one operand, in order; `before` and `gone` are kept up to date."""
    merged = []
    for at, first in enumerate(found):
        group, whole = [first], matrices[first]
        for other in found[at + 1 :]:
            if first in gone or other in gone or whole.dtypes != matrices[other].dtypes:
                continue
            apart = all(before.are_apart(index, other) for index in group)
            if apart and (whole.is_small or matrices[other].is_small):
                group.append(other)
                whole = whole.beside(matrices[other], side)
                before.join(group)
        if len(group) > 1:
            gone.update(group)
            is_copied = whole.needs_copy([matrices[index] for index in group], side)
            merged.append(Merged(tuple(group), side, whole, is_copied))
    return merged
