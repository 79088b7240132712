"""Masks that a TPU's compiler stores in bits.

Where what a product makes is compared with a number, as a rectifier's gradient asks for, the product writes the answers
beside its result, a bit each: those along one dimension outside of the tiles share a word of 8, 16 or 32. Nothing else
is kept of the result then but what the rectifier made of it. Before they are read they are unpacked, a byte each (seen
in dumps of libtpu 0.0.51).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax.extend.core import primitives as P

from remat_opt.graph.graph import Kind, Op
from remat_opt.graph.tiles import padded_bytes
from remat_opt.program.inline import Equation, Program
from remat_opt.program.primitives import CONTRACTION, ELEMENTWISE

if TYPE_CHECKING:
    from remat_opt.compilers.tpu_reader import TpuReader

MASK = "mask"
COMPARISONS = frozenset({P.gt_p, P.ge_p, P.lt_p, P.le_p})
WORDS = (8, 16, 32)  # bits


def packed_masks(
    program: Program, images: Container[int], merged: Mapping[int, tuple[int, ...]]
) -> Mapping[int, int]:
    """Answers that are stored in bits: for each the bytes that its words take.

    Args:
        program: as it is lowered.
        images: values that lie as convolutions have them.
        merged: images that lie with one dimension for all examples, with their shapes so.
    """
    maker = {value: equation for equation in program.equations for value in equation.outputs}
    readers: dict[int, int] = {}
    for equation in program.equations:
        for value in {x for x in equation.inputs if isinstance(x, int)}:
            readers[value] = readers.get(value, 0) + 1
    found: dict[int, int] = {}
    for equation in program.equations:
        if equation.primitive not in COMPARISONS:
            continue
        (answers,) = equation.outputs
        shape = program.avals[answers].shape
        compared = [x for x in equation.inputs if isinstance(x, int) and program.avals[x].shape == shape]
        floats = [x for x in compared if jnp.issubdtype(program.avals[x].dtype, jnp.floating) and x in maker]
        if len(floats) == 1 and _is_of_product(program, maker, readers, floats[0]):
            is_image = floats[0] in images or floats[0] in merged
            size = _bytes(merged.get(floats[0], shape), 1 if is_image else 0)
            if size:
                found[answers] = size
    return found


def packed(reader: TpuReader, op: Op) -> Sequence[Op]:
    """A comparison that packs its answers, and what unpacks them."""
    (answers,) = op.outputs
    words = reader.new(reader.masks[answers])
    stored = dataclasses.replace(op, outputs=(words,), repeatable=False, name=MASK)
    return [stored, Op((words,), (answers,), kind=Kind.ELEMENTWISE, repeatable=False, name="unpack")]


def _bytes(shape: Sequence[int], dimension: int) -> int:
    """Of words along a dimension; 0 where it has too many elements for one, or lies in the tiles."""
    if len(shape) < 3:
        return 0
    bits = next((bits for bits in WORDS if bits >= shape[dimension]), 0)
    return padded_bytes([size for at, size in enumerate(shape) if at != dimension], bits // 8) if bits else 0


def _is_of_product(
    program: Program, maker: Mapping[int, Equation], readers: Mapping[int, int], value: int
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
        value = max(whole)
        if readers[value] > 1:
            return False
