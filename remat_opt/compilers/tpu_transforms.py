"""Fourier transforms on a TPU: products with matrices of sines and cosines, one dimension after the other.

Of real numbers a product makes real and one imaginary parts. Of complex ones three products make both (Gauss's): that
of the parts' sum, and two which read what it made. A transform of half of the frequencies to real numbers is one of all
of them, so that the other half is put beside it first, the other way round. Products read and make their dimensions in
the lanes; where the parts lie otherwise, as other products read them, they are copied before and behind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax.extend.core import primitives as P

from remat_opt.graph.graph import Kind, Op
from remat_opt.graph.tiles import padded_bytes
from remat_opt.program.inline import Constant, Equation, Program
from remat_opt.program.primitives import ELEMENTWISE

if TYPE_CHECKING:
    from remat_opt.compilers.tpu_reader import TpuReader

ITEM = 4  # bytes of a real or imaginary part; of double precision there is none on a TPU
OF_COMPLEX = 3  # products for complex numbers


def by_products(reader: TpuReader, equation: Equation, op: Op) -> Sequence[Op]:
    """The kernels of a transform, in the order in which they run.

    Args:
        reader: of the program.
        equation: an `fft`.
        op: what it is by itself.
    """
    (given,), (result,) = equation.inputs, equation.outputs
    if isinstance(given, Constant):
        return [op]
    return _Transform(reader, given, result, op.inputs).kernels(len(equation.params["fft_lengths"]))


def lying_as_transforms(program: Program) -> frozenset[int]:
    """Real results of transforms, and elementwise work of as many elements on them, turned or not: these lie as the
    transforms made them, and other products read copies."""
    found = set[int]()
    for equation in program.equations:
        made = equation.outputs
        if equation.primitive is P.fft_p:
            is_found = True
        elif equation.primitive in ELEMENTWISE or equation.primitive is P.transpose_p:
            sizes = {program.avals[x].size for x in equation.inputs if x in found}
            is_found = any(program.avals[value].size in sizes for value in made)
        else:
            is_found = False
        if is_found:
            found.update(value for value in made if not jnp.issubdtype(program.avals[value].dtype, jnp.complexfloating))
    return frozenset(found)


class _Transform:
    def __init__(self, reader: TpuReader, given: int, result: int, inputs: Sequence[int]):
        self.reader = reader
        self.given = given
        self.result = result
        self.inputs = tuple(inputs)
        avals = reader.program.avals
        self.shape, self.last_shape = avals[given].shape, avals[result].shape
        self.from_real = not jnp.issubdtype(avals[given].dtype, jnp.complexfloating)
        self.to_real = not jnp.issubdtype(avals[result].dtype, jnp.complexfloating)
        self.ops: list[Op] = []

    def kernels(self, dimensions: int) -> list[Op]:
        outer = dimensions - 1
        parts = self.inputs
        shape = self.shape
        is_real = self.from_real
        for _ in range(outer):
            parts = self.stage(parts, shape, is_real=is_real, shape=shape)
            is_real = False
        if self.to_real:
            self.to_real_numbers(parts)
        else:
            self.stage(parts, self.shape, is_real=is_real, shape=self.last_shape, result=self.result)
        return self.ops

    def size(self, shape: Sequence[int]) -> int:
        return padded_bytes(shape, ITEM)

    def as_read(self, value: int, shape: Sequence[int]) -> int:
        """Bytes of one part as products read a value of the program, in another shape of the same batch; 0 where it
        lies as transforms read it."""
        places = self.reader.as_products_read.get(value, 0)
        if not places:
            return 0
        return ITEM * places * math.prod(shape) // math.prod(self.reader.program.avals[value].shape)

    def new(self, size: int) -> int:
        return self.reader.new(size)

    def add(self, inputs: Sequence[int], output: int, kind: Kind, length: int = 0) -> int:
        flops = 2.0 * length * self.reader.sizes[output] / ITEM if kind is Kind.PRODUCT else 0.0
        name = P.dot_general_p.name if kind is Kind.PRODUCT else "copy" if kind is Kind.OPAQUE else P.add_p.name
        self.ops.append(Op(tuple(inputs), (output,), kind=kind, flops=flops, name=name))
        return output

    def copied(self, parts: Sequence[int], size: int) -> list[int]:
        return [self.add((part,), self.new(size), Kind.OPAQUE) for part in parts]

    def stage(
        self,
        parts: Sequence[int],
        before: Sequence[int],
        *,
        is_real: bool,
        shape: Sequence[int],
        result: int | None = None,
    ) -> tuple[int, ...]:
        """A transform along one dimension, of real parts and imaginary ones to such."""
        size, length = self.size(shape), before[-1]
        lying = self.as_read(self.given, before) if tuple(parts) == self.inputs else 0
        if lying:
            operands = [self.add(parts, self.new(lying), Kind.ELEMENTWISE) for _ in range(OF_COMPLEX)]
            parts = self.copied(operands, self.size(before))
        if is_real:
            made = [self.add(parts, self.new(size), Kind.PRODUCT, length) for _ in range(2)]
        else:
            both = self.add(parts[:1], self.new(size), Kind.PRODUCT, length)
            made = [both, *(self.add((both, *parts[1:]), self.new(size), Kind.PRODUCT, length) for _ in range(2))]
        back = lying or (self.as_read(self.result, shape) if result is not None else 0)
        if back:
            made = self.copied(made, back)
        if result is None and not back:
            return tuple(made[-2:])
        if result is None:
            return tuple(self.add(made, self.new(back), Kind.ELEMENTWISE) for _ in range(2))
        self.add(made, result, Kind.OPAQUE)
        return (result,)

    def to_real_numbers(self, parts: Sequence[int]) -> None:
        half, whole = self.shape, self.last_shape
        lying = self.as_read(self.given, half)
        size = self.size(whole)
        if lying:
            lying_whole = self.as_read(self.given, whole)
            turned_size = self.as_read(self.given, (*half[:-1], whole[-1] - half[-1]))
        else:
            lying_whole = size
            turned_size = self.size((*half[:-1], whole[-1] - half[-1]))
        turned = [self.add((part,), self.new(turned_size), Kind.OPAQUE) for part in parts]
        all_of = [self.add((*parts, *turned), self.new(lying_whole), Kind.ELEMENTWISE) for _ in range(OF_COMPLEX)]
        operands = self.copied(all_of, size) if lying else all_of
        length = whole[-1]
        first = self.add(operands[:1], self.new(size), Kind.PRODUCT, length)
        second = self.add((first, operands[1]), self.new(size), Kind.PRODUCT, length)
        self.add((first, second, operands[2]), self.result, Kind.PRODUCT, length)
