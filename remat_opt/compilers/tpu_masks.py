"""Masks that a TPU's compiler stores in bits.

Where what a product makes is compared with a number, as a rectifier's gradient asks for, the product writes the answers
beside its result, a bit each: those along one dimension outside of the tiles share a word of 8, 16 or 32. Nothing else
is kept of the result then but what the rectifier made of it, and a kernel unpacks the answers to a byte each. A leaky
rectifier reads both the result and the answers, so that both are kept (seen in dumps of libtpu 0.0.51).
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
from jax.extend.core import primitives as P

from remat_opt.graph.graph import Kind, Op
from remat_opt.graph.tiles import padded_bytes
from remat_opt.program.inline import Equation, Program
from remat_opt.program.primitives import CONTRACTION, ELEMENTWISE

if TYPE_CHECKING:
    from remat_opt.compilers.tpu_reader import TpuReader

MASK, UNPACK = "mask", "unpack"
COMPARISONS = frozenset({P.gt_p, P.ge_p, P.lt_p, P.le_p})
WORDS = (8, 16, 32)  # bits


class Packed(NamedTuple):
    """Answers in bits.

    Attributes:
        words: bytes that they take so.
        by_kernel: whether a kernel unpacks them, and not who reads them.
    """

    words: int
    by_kernel: bool


def packed_masks(
    program: Program, images: Container[int], merged: Mapping[int, tuple[int, ...]]
) -> Mapping[int, Packed]:
    """Answers that are stored in bits.

    Args:
        program: as it is lowered.
        images: values that lie as convolutions have them.
        merged: images that lie with one dimension for all examples, with their shapes so.
    """
    maker = {value: equation for equation in program.equations for value in equation.outputs}
    readers: dict[int, list[Equation]] = {}
    for equation in program.equations:
        for value in {x for x in equation.inputs if isinstance(x, int)}:
            readers.setdefault(value, []).append(equation)
    found: dict[int, Packed] = {}
    for equation in program.equations:
        if equation.primitive not in COMPARISONS:
            continue
        (answers,) = equation.outputs
        shape = program.avals[answers].shape
        numbers = [
            x
            for x in equation.inputs
            if isinstance(x, int) and program.avals[x].shape == shape and not _is_constant(maker.get(x))
        ]
        if len(numbers) != 1 or not jnp.issubdtype(program.avals[numbers[0]].dtype, jnp.floating):
            continue
        (number,) = numbers
        beside = [number in one.inputs for one in readers.get(answers, ())]  # these choose between it and another
        is_image = number in images or number in merged
        words = _words(merged.get(number, shape), 1 if is_image else 0)
        if words and not all(beside) and _is_of_product(program, maker, readers, number):
            found[answers] = Packed(words, by_kernel=not any(beside))
    return found


def with_words(reader: TpuReader, equation: Equation, ops: Sequence[Op]) -> Sequence[Op]:
    """A comparison's ops, with what packs the answers and what unpacks them: a kernel, or who reads them where some
    choose between what was compared and something else."""
    mask = reader.masks.get(equation.outputs[0]) if equation.outputs else None
    if mask is None:
        return ops
    (op,), words = ops, reader.new(mask.words)
    packing = op.but(outputs=(words,), repeatable=False, name=MASK)
    return [packing, Op((words,), op.outputs, kind=Kind.ELEMENTWISE, repeatable=not mask.by_kernel, name=UNPACK)]


def _is_constant(maker: Equation | None) -> bool:
    """Whether an array is one number everywhere."""
    return maker is not None and maker.primitive is P.broadcast_in_dim_p and not isinstance(maker.inputs[0], int)


def _words(shape: Sequence[int], dimension: int) -> int:
    """Bytes of words along a dimension; 0 where it has too many elements for one, or lies in the tiles."""
    if len(shape) < 3:
        return 0
    bits = next((bits for bits in WORDS if bits >= shape[dimension]), 0)
    return padded_bytes([size for at, size in enumerate(shape) if at != dimension], bits // 8) if bits else 0


def _is_of_product(
    program: Program, maker: Mapping[int, Equation], readers: Mapping[int, Sequence[Equation]], value: int
) -> bool:
    """Whether a product makes a value, with elementwise work on its result that nobody else reads."""
    while True:
        equation = maker.get(value)
        if equation is None:
            return False
        if equation.primitive in CONTRACTION:
            return True
        whole = [
            x for x in equation.inputs if isinstance(x, int) and program.avals[x].size == program.avals[value].size
        ]
        if equation.primitive not in ELEMENTWISE or not whole:
            return False
        value = max(whole)  # the last one made
        if len(readers[value]) > 1:
            return False
