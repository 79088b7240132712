"""In which order the dimensions of an array lie in a GPU's memory, where that is not their own.

What is made of a product lies as the product writes it (XLA's `layout_assignment.cc`), a transpose of it, too: nothing
is moved for that. Who cannot read it so reads a copy.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence

from jax.extend.core import primitives as P

from remat_opt.compilers.equations import product_orders
from remat_opt.program import compat
from remat_opt.program.inline import Constant, Equation, Program
from remat_opt.program.primitives import ELEMENTWISE

Order = tuple[int, ...]


class Orders:
    """The orders of a program's values.

    Args:
        program: of equations.
        producer: for each value the equation that makes it.
        readers: for each value the equations that read it.
        constants: values that are no buffers.
    """

    def __init__(
        self,
        program: Program,
        producer: Mapping[int, Equation],
        readers: Mapping[int, Sequence[Equation]],
        constants: Container[int],
    ):
        self.program = program
        self.producer = producer
        self.readers = readers
        self.constants = constants

    def of(self, value: int) -> Order | None:
        """The dimensions of elementwise work on a transposed product, in the order in which they lie in memory, where
        that is another than their own and the product cannot write it; None of all others."""
        start = value
        while (equation := self.producer.get(value)) is not None and value not in self.constants:
            if equation.primitive is P.transpose_p:
                return None if value == start else self._of_transposed(equation)
            if equation.primitive is compat.barrier_p:
                given = equation.inputs[equation.outputs.index(value)]
            else:
                given = next(iter(self._alike(equation)), None) if equation.primitive in ELEMENTWISE else None
            if not isinstance(given, int):
                return None
            value = given
        return None

    def _of_transposed(self, transpose: Equation) -> Order | None:
        (given,) = transpose.inputs
        permutation = transpose.params["permutation"]
        maker = self.producer.get(given) if isinstance(given, int) else None
        if maker is None or maker.primitive is not P.dot_general_p or _is_written_by_product(maker, permutation):
            return None
        return tuple(permutation.index(axis) for axis in range(len(permutation)))

    def copied_for(self, product: Equation) -> Iterator[tuple[int, Order, Order]]:
        """A product's operands that it cannot read as they lie, with their order and the one that it wants."""
        orders = product_orders(product, self.program)
        for operand, wanted, summed, batch in zip(
            product.inputs, orders, *product.params["dimension_numbers"], strict=True
        ):
            lies = self.of(operand) if isinstance(operand, int) else None
            if isinstance(operand, int) and lies is not None and not _can_be_read(lies, summed, batch):
                yield operand, lies, wanted

    def is_read_otherwise(self, product: Equation) -> bool:
        """Whether elementwise work reads a product's result beside what lies in another order than it is written in."""
        (result,) = product.outputs
        if len(self.program.avals[result].shape) <= 3:
            return False
        made, pending = {result}, [result]
        while pending:
            for reader in self.readers.get(pending.pop(), []):
                alike = self._alike(reader) if reader.primitive in ELEMENTWISE else []
                if any(self.of(x) is not None for x in alike if x not in made):
                    return True
                if alike:
                    pending += [x for x in reader.outputs if x not in made]
                    made.update(reader.outputs)
        return False

    def _alike(self, equation: Equation) -> list[int]:
        """An equation's operands of its result's shape."""
        shape = self.program.avals[equation.outputs[0]].shape
        values = (x for x in equation.inputs if not isinstance(x, Constant) and x not in self.constants)
        return [x for x in values if self.program.avals[x].shape == shape]


def _can_be_read(lies: tuple[int, ...], summed: tuple[int, ...], batch: tuple[int, ...]) -> bool:
    """Whether a product reads an operand as it lies: batch first, then rows and columns or columns and rows.

    Args:
        lies: its dimensions in the order in which they lie in memory.
        summed: those that are summed over; in which order makes no difference.
        batch: those of the batch.
    """
    stays = tuple(axis for axis in range(len(lies)) if axis not in summed and axis not in batch)
    matrix = lies[len(batch) :]
    ways = (matrix[: len(summed)], matrix[len(summed) :]), (matrix[len(stays) :], matrix[: len(stays)])
    return lies[: len(batch)] == tuple(batch) and any(set(over) == set(summed) and kept == stays for over, kept in ways)


def _is_written_by_product(product: Equation, permutation: tuple[int, ...]) -> bool:
    """Whether a product can write its transposed result: rows and columns change places, and are one dimension each."""
    batch = len(product.params["dimension_numbers"][1][0])
    rank = len(permutation)
    return rank == batch + 2 and permutation == (*range(batch), rank - 1, rank - 2)
