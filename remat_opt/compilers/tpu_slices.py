"""Slices of products that a TPU's compiler takes of the operands instead."""

from __future__ import annotations

import dataclasses
from collections import Counter

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
        chain = [maker.get(equation.inputs[0])]
        while chain[-1] is not None and chain[-1].primitive is P.convert_element_type_p:
            chain.append(maker.get(chain[-1].inputs[0]))
        product = chain[-1]
        if product is None or product.primitive is not P.dot_general_p:
            continue
        if any(reads[one.outputs[0]] > 1 for one in chain):
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
