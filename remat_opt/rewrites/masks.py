"""Computes the mask of a rectifier from its output instead of its input, if that frees the input.

The derivative of `jax.nn.relu` uses the mask `x > 0` of its input. The mask of the output is the same, bit for bit, and
the output is saved for the next layer anyway. If `x` is a convolution or product, with at most a bias added, the rest
of the backward pass does not read it. Then `x` needs neither saving nor recomputation. (A normalisation needs its own
input in any case.) The compiler would simplify the new mask back to the old one, so the output is read after a barrier.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jax.extend.core import primitives

from remat_opt.trace.inline import Constant, Equation, Program

_CONTRACTIONS = frozenset({primitives.conv_general_dilated_p, primitives.dot_general_p})
_BIASES = frozenset({primitives.add_p, primitives.sub_p})


def mask_by_outputs(program: Program) -> Program:
    """The same program with such masks made from the rectified values; the program itself where there are none."""
    producer = {value: equation for equation in program.equations for value in equation.outputs}
    users: dict[int, int] = {}
    for equation in program.equations:
        for value in {atom for atom in equation.inputs if not isinstance(atom, Constant)}:
            users[value] = users.get(value, 0) + 1
    for value in program.outputs:
        if not isinstance(value, Constant):
            users[value] = users.get(value, 0) + 1
    rectified: dict[int, int] = {}
    equations, asked = [], set()
    for equation in program.equations:
        x = equation.inputs[0] if equation.inputs else None
        if isinstance(x, int) and len(equation.inputs) == 2 and is_zero(equation.inputs[1]):
            if equation.primitive is primitives.max_p:
                rectified[x] = equation.outputs[0]
            elif equation.primitive is primitives.gt_p and x in rectified and _is_read_by_two(x, producer, users):
                equation = dataclasses.replace(equation, inputs=(rectified[x], equation.inputs[1]))
                asked.add(rectified[x])
        equations.append(equation)
    return dataclasses.replace(program, equations=tuple(equations), opaque=frozenset(asked)) if asked else program


def _is_read_by_two(value: int, producer: dict[int, Equation], users: dict[int, int]) -> bool:
    """Whether a value is a contraction's result, with at most a bias, that only the rectifier and its mask read."""
    if users[value] != 2:
        return False
    equation = producer.get(value)
    if equation is None or equation.primitive in _CONTRACTIONS:
        return equation is not None
    if equation.primitive not in _BIASES:
        return False
    made = [producer.get(atom) for atom in equation.inputs if isinstance(atom, int) and users[atom] == 1]
    return sum(maker is not None and maker.primitive in _CONTRACTIONS for maker in made) == 1


def is_zero(operand: int | Constant) -> bool:
    """Whether an operand is the number zero, written in the program."""
    return isinstance(operand, Constant) and operand.aval.shape == () and bool(np.asarray(operand.value) == 0)
