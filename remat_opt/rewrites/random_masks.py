"""Masks drawn at random, as dropout's: what to keep of random bits until the backward pass.

A mask is a comparison of a uniform number, which is a few operations on random bits: all elementwise, so that a
compiler keeps the bits and compares again where the mask is read. On the CPU a key's bits come out of a loop as two
arrays of four bytes a number, the mask takes one byte: so there it is marked as one to be read behind a barrier. (A
GPU's compiler makes the bits in the kernel that reads them, from the key.)
"""

from __future__ import annotations

from jax.extend.core import primitives as P

from remat_opt.trace.inline import Program
from remat_opt.trace.primitives import ELEMENTWISE, named

_COMPARISONS = named("eq ge gt le lt ne")


def masks_of_bits(program: Program) -> frozenset[int]:
    """Comparisons of nothing but random bits, and what is as large as one number or constant."""
    of_bits: set[int] = set()
    masks: set[int] = set()
    for equation in program.equations:
        if equation.primitive is P.random_bits_p:
            of_bits.update(equation.outputs)
            continue
        if equation.primitive not in ELEMENTWISE or len(equation.outputs) != 1:
            continue
        (made,) = equation.outputs
        read = [value for value in equation.reads if program.avals[value].size > 1]
        if not read or not of_bits.issuperset(read) or program.avals[read[0]].size != program.avals[made].size:
            continue
        if equation.primitive in _COMPARISONS:
            masks.add(made)
        else:
            of_bits.add(made)
    return frozenset(masks)
