"""Fourier transforms on a TPU: products with matrices of sines and cosines, one dimension after the other.

Of real numbers a product makes real and one imaginary parts. Of complex ones three products make both (Gauss's): that
of the parts' sum, and two which read what it made. Long dimensions are two, the inner one of 128 numbers (Cooley's and
Tukey's), with three products for each; all frequencies are made then, of which readers take the half that they want. A
transform of half of the frequencies to real numbers is one of all of them, so that the other half is put beside it
first, the other way round. Products read and make their dimensions in the lanes; where the parts lie otherwise, they
are copied before and behind (seen in dumps of libtpu 0.0.51).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax.extend.core import primitives as P

from remat_opt.graph.graph import Kind, Op
from remat_opt.graph.tiles import bytes_with_lanes, padded_bytes
from remat_opt.program.inline import Constant, Equation, Program
from remat_opt.program.primitives import ELEMENTWISE

if TYPE_CHECKING:
    from remat_opt.compilers.tpu_reader import TpuReader

ITEM = 4  # bytes of a real or imaginary part; of double precision there is none on a TPU
OF_COMPLEX = 3  # products for complex numbers
LONGEST = 256  # of a dimension that one product transforms


def by_products(reader: TpuReader, equation: Equation, op: Op) -> Sequence[Op]:
    """The kernels of a transform, in the order in which they run.

    Args:
        reader: of the program.
        equation: an `fft`.
        op: what it is by itself.
    """
    (given,) = equation.inputs
    return [op] if isinstance(given, Constant) else _Transform(reader, equation, given, op.inputs).kernels()


def lying_as_transforms(program: Program) -> frozenset[int]:
    """Real results of transforms, and elementwise work of as many elements on them, turned or not: these lie as the
    transforms made them, and other products read copies."""
    found = set[int]()
    for equation in program.equations:
        if equation.primitive is P.fft_p:
            made = equation.outputs
        elif equation.primitive in ELEMENTWISE or equation.primitive is P.transpose_p:
            sizes = {program.avals[x].size for x in equation.inputs if isinstance(x, int) and x in found}
            made = [value for value in equation.outputs if program.avals[value].size in sizes]
        else:
            continue
        found.update(value for value in made if not _is_complex(program, value))
    return frozenset(found)


def places_of_spectra(program: Program) -> Mapping[int, int]:
    """For what transforms make, and read, of complex numbers, as it is or turned, how many places each part takes."""
    lanes = _lanes(program)
    found: dict[int, int] = {}
    for equation in program.equations:
        if equation.primitive is P.fft_p:
            for value in (*equation.inputs, *equation.outputs):
                if isinstance(value, int) and _is_complex(program, value):
                    shape = _made(program, equation) if value in equation.outputs else program.avals[value].shape
                    found[value] = _bytes(shape, lanes.get(value)) // ITEM
    for equation in program.equations:
        if equation.primitive is P.transpose_p:
            (given,), (result,) = equation.inputs, equation.outputs
            if isinstance(given, int) and given in found:
                found.setdefault(result, found[given])
            elif isinstance(given, int) and result in found:
                found.setdefault(given, found[result])
    return found


def _lanes(program: Program) -> Mapping[int, int]:
    """Which dimension of a spectrum lies in the lanes: that which is the last where it is no transform's."""
    found: dict[int, int] = {}
    for equation in program.equations:
        if equation.primitive is P.transpose_p:
            (given,), (result,) = equation.inputs, equation.outputs
            permutation = tuple(equation.params["permutation"])
            if permutation and isinstance(given, int):
                found[given] = permutation[-1]
                found[result] = permutation.index(len(permutation) - 1)
    return found


def _made(program: Program, equation: Equation) -> tuple[int, ...]:
    """The shape of what a transform makes: of a long dimension all frequencies."""
    (result,) = equation.outputs
    shape, length = program.avals[result].shape, equation.params["fft_lengths"][-1]
    return (*shape[:-1], length) if length > LONGEST else shape


def _is_complex(program: Program, value: int) -> bool:
    return jnp.issubdtype(program.avals[value].dtype, jnp.complexfloating)


def _bytes(shape: Sequence[int], lanes: int | None) -> int:
    return padded_bytes(shape, ITEM) if lanes is None else bytes_with_lanes(shape, ITEM, lanes)


class _Transform:
    """The kernels of one transform while they are put together."""

    def __init__(self, reader: TpuReader, equation: Equation, given: int, inputs: Sequence[int]):
        self.reader = reader
        self.lengths = equation.params["fft_lengths"]
        self.given = given
        (self.result,) = equation.outputs
        self.inputs = tuple(inputs)
        self.before = reader.program.avals[self.given].shape
        self.behind = _made(reader.program, equation)
        self.ops: list[Op] = []

    def kernels(self) -> list[Op]:
        parts: tuple[int, ...] = self.inputs
        is_real = not _is_complex(self.reader.program, self.given)
        for length in self.lengths[:-1]:
            for _ in range(_products(length)):
                parts = self.stage(parts, self.before, length, is_real=is_real)
                is_real = False
        length = self.lengths[-1]
        if not _is_complex(self.reader.program, self.result):
            self.to_real_numbers(parts)
            return self.ops
        for _ in range(_products(length) - 1):
            parts = self.stage(parts, self.behind, length, is_real=is_real)
            is_real = False
        self.stage(parts, self.behind, length, is_real=is_real, is_last=True)
        return self.ops

    def lying(self, value: int, shape: Sequence[int]) -> int:
        """Bytes of one part, in the layout of a value of the program; 0 where it lies as transforms have it."""
        places = self.reader.as_products_read.get(value)
        own = self.behind if value == self.result else self.before
        if places is None or not _is_complex(self.reader.program, value) or ITEM * places == padded_bytes(own, ITEM):
            return 0
        return ITEM * places * math.prod(shape) // math.prod(own)

    def add(self, kind: Kind, inputs: Sequence[int], size: int | None, length: int = 0) -> int:
        """One more kernel, whose result takes so many bytes, or is the transform's."""
        output = self.result if size is None else self.reader.new(size)
        # For the time of this kernel; what the step computes is counted of the transform (`program/flops.py`).
        flops = 2.0 * length * self.reader.sizes[output] / ITEM if kind is Kind.PRODUCT else 0.0
        self.ops.append(Op(tuple(inputs), (output,), kind=kind, flops=flops, name=_NAMES[kind]))
        return output

    def copied(self, parts: Sequence[int], size: int) -> list[int]:
        return [self.add(Kind.OPAQUE, (part,), size) for part in parts]

    def products(self, parts: Sequence[int], size: int, length: int, *, is_real: bool) -> list[int]:
        if is_real:
            return [self.add(Kind.PRODUCT, parts, size, length) for _ in range(2)]
        first = self.add(Kind.PRODUCT, parts[:1], size, length)
        return [first, *(self.add(Kind.PRODUCT, (first, *parts[1:]), size, length) for _ in range(2))]

    def stage(
        self, parts: Sequence[int], shape: Sequence[int], length: int, *, is_real: bool, is_last: bool = False
    ) -> tuple[int, ...]:
        """Products along a dimension, of a value of the program or of real and imaginary parts, and what these are."""
        lying = self.lying(self.given, self.before) if tuple(parts) == self.inputs else 0
        if lying:
            operands = [self.add(Kind.ELEMENTWISE, parts, lying) for _ in range(OF_COMPLEX)]
            parts = self.copied(operands, padded_bytes(self.before, ITEM))
        made = self.products(parts, padded_bytes(shape, ITEM), length, is_real=is_real)
        back = self.lying(self.result, shape) if is_last else lying
        if back and _products(length) == 1:
            made = self.copied(made, back)
        if is_last:
            return (self.add(Kind.OPAQUE, made, None),)
        return tuple(self.add(Kind.ELEMENTWISE, made, back) for _ in range(2)) if back else tuple(made[-2:])

    def to_real_numbers(self, parts: Sequence[int]) -> None:
        """Products of half of the frequencies, with those put beside them that are the same the other way round."""
        length, size = self.lengths[-1], padded_bytes(self.behind, ITEM)
        other_half = (*self.before[:-1], self.behind[-1] - self.before[-1])
        lying = functools.partial(self.lying, self.given)
        turned = [
            self.add(Kind.OPAQUE, (part,), lying(other_half) or padded_bytes(other_half, ITEM))
            for part in (parts if len(parts) == 2 else (*parts, *parts))
        ]
        whole = [self.add(Kind.ELEMENTWISE, (*parts, *turned), lying(self.behind) or size) for _ in range(OF_COMPLEX)]
        parts = self.copied(whole, size) if lying(self.behind) else whole
        for _ in range(_products(length) - 1):
            parts = self.products(parts, size, length, is_real=False)[-2:]
        first = self.add(Kind.PRODUCT, parts[:1], size, length)
        second = self.add(Kind.PRODUCT, (first, parts[1]), size, length)
        self.add(Kind.PRODUCT, (first, second, parts[-1]), None, length)


_NAMES = {Kind.PRODUCT: P.dot_general_p.name, Kind.OPAQUE: "copy", Kind.ELEMENTWISE: P.add_p.name}


def _products(length: int) -> int:
    return 1 if length <= LONGEST else 2
