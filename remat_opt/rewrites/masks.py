"""Computes the mask of a rectifier from its output instead of its input, if that frees the input.

The derivative of `jax.nn.relu` uses the mask `x > 0` of its input. The mask of the output is the same, bit for bit, and
the output is saved for the next layer anyway. If `x` is a convolution or product, with at most a bias added, the rest
of the backward pass does not read it. Then `x` needs neither saving nor recomputation. (A normalisation needs its own
input in any case.) The compiler would simplify the new mask back to the old one, so the output is read after a barrier.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from jax.extend.core import primitives

from remat_opt.trace.inline import Constant, Program

_CONTRACTIONS = frozenset({primitives.conv_general_dilated_p, primitives.dot_general_p})
_BIASES = frozenset({primitives.add_p, primitives.sub_p})


def mask_by_outputs(program: Program) -> Program:
    """The same program with such masks made from the rectified values; the program itself where there are none."""
    rectified: dict[int, int] = {}
    equations, asked = [], set()
    for equation in program.equations:
        x = equation.inputs[0] if equation.inputs else None
        if isinstance(x, int) and len(equation.inputs) == 2 and is_zero(equation.inputs[1]):
            if equation.primitive is primitives.max_p:
                rectified[x] = equation.outputs[0]
            elif equation.primitive is primitives.gt_p and x in rectified and _is_read_by_two(program, x):
                equation = dataclasses.replace(equation, inputs=(rectified[x], equation.inputs[1]))
                asked.add(rectified[x])
        equations.append(equation)
    return dataclasses.replace(program, equations=tuple(equations), opaque=frozenset(asked)) if asked else program


def _is_read_by_two(program: Program, value: int) -> bool:
    """Whether a value is a contraction's result, with at most a bias, that only the rectifier and its mask read."""

    def made_by(value: int) -> Any:
        index = program.producer.get(value)
        return None if index is None else program.equations[index].primitive

    def uses(value: int) -> int:
        return len(program.readers[value]) + program.outputs.count(value)

    if uses(value) != 2:
        return False
    if made_by(value) in _BIASES:
        operands = [x for x in program.equations[program.producer[value]].inputs if isinstance(x, int)]
        return sum(uses(one) == 1 and made_by(one) in _CONTRACTIONS for one in operands) == 1
    return made_by(value) in _CONTRACTIONS


def is_zero(operand: int | Constant) -> bool:
    """Whether an operand is the number zero, written in the program."""
    return isinstance(operand, Constant) and operand.aval.shape == () and bool(np.asarray(operand.value) == 0)
