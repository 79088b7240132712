"""Slices of products that a TPU's compiler takes of the operands instead."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping

from jax.extend.core import primitives as P

from remat_opt.program.inline import Equation, Program


def before_products(program: Program) -> Program:
    """A program in which a product makes no more than the slice that alone reads its result, maybe as another type, as
    XLA cuts the operands (`algebraic_simplifier.cc`). What the cut operands take is not counted."""
    maker = {value: equation for equation in program.equations for value in equation.outputs}
    reads = Counter(x for equation in program.equations for x in {*equation.inputs} if isinstance(x, int))
    reads.update(x for x in program.outputs if isinstance(x, int))
    avals = list(program.avals)
    replaced: dict[int, list[Equation]] = {}
    for equation in program.equations:
        if equation.primitive is not P.slice_p:
            continue
        chain = _from_product(equation, maker)
        if not chain or any(reads[one.outputs[0]] > 1 for one in chain):
            continue
        shape = avals[equation.outputs[0]].shape
        for one in chain:
            avals[one.outputs[0]] = avals[one.outputs[0]].update(shape=shape)
        replaced[id(equation)] = []
        replaced[id(chain[0])] = [dataclasses.replace(chain[0], outputs=equation.outputs)]
    if not replaced:
        return program
    equations = [one for equation in program.equations for one in replaced.get(id(equation), [equation])]
    return dataclasses.replace(program, equations=tuple(equations), avals=tuple(avals))


def _from_product(cut: Equation, maker: Mapping[int, Equation]) -> list[Equation]:
    """What makes the array that a slice is taken of, the last first, if that is a product's result, maybe as another
    type; else nothing."""
    chain: list[Equation] = []
    value = cut.inputs[0]
    while isinstance(value, int) and value in maker:
        chain.append(maker[value])
        if chain[-1].primitive is P.dot_general_p:
            return chain
        if chain[-1].primitive is not P.convert_element_type_p:
            break
        (value,) = chain[-1].inputs
    return []
