"""Which float32 values a TPU's compiler stores in two bytes.

The matrix units multiply bfloat16, and XLA propagates that backwards (`bfloat16_propagation.cc`): a value of which only
products read anything, and what hands it on to products unchanged, is rounded where it is made. What is summed up in
the kernel that makes it is summed up before that.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives as P

from remat_opt.compilers.equations import handed_on_by_loop, takes_features_apart
from remat_opt.program import compat
from remat_opt.program.inline import Equation, Program
from remat_opt.program.primitives import CONTRACTION, ELEMENTWISE, MOVES, REDUCTION, named

_CHOOSING = named("abs clamp max min select_n")  # their results are elements of their operands


def stored_in_two_bytes(program: Program, constants: Sequence[int] = ()) -> frozenset[int]:
    """The float32 values of a program that a TPU's compiler stores in two bytes.

    Args:
        program: as it is lowered.
        constants: of a loop's body the inputs that are the same in all turns: who runs the loop rounds them.
    """
    readers: dict[int, list[Equation]] = {}
    for equation in program.equations:
        for value in {x for x in equation.inputs if isinstance(x, int)}:
            readers.setdefault(value, []).append(equation)
    results = {x for x in program.outputs if isinstance(x, int)}
    rounded: set[int] = set()  # of no use with more digits
    stored: set[int] = set()
    summed: set[int] = set()  # also summed up, and of no other use with more digits
    for equation in reversed(program.equations):
        for value in equation.outputs:
            if value in results:
                continue
            if value not in readers:
                rounded.add(value)
                continue
            if program.avals[value].dtype != jnp.float32:
                continue
            others = [reader for reader in readers[value] if not _takes_two_bytes(program, reader, value, rounded)]
            if not others:
                rounded.add(value)
                stored.add(value)
            elif all(reader.primitive in REDUCTION or _turns(reader, summed) for reader in others) and any(
                reader.primitive not in REDUCTION for reader in readers[value]
            ):
                summed.add(value)
                if equation.primitive in ELEMENTWISE | CONTRACTION:
                    stored |= _turned_with(value, readers, summed)
            elif equation.primitive in CONTRACTION and _goes_on_inside(program, value, readers, stored):
                stored.add(value)
    for value in constants:
        of_products = all(_takes_two_bytes(program, reader, value, rounded) for reader in readers.get(value, ()))
        if program.avals[value].dtype == jnp.float32 and of_products:
            stored.add(value)
    return frozenset(stored)


def _turns(equation: Equation, values: Container[int]) -> bool:
    """Whether an equation only turns one of some values, which costs nothing where layouts are chosen freely. (What is
    reshaped is not one buffer any more where tiles do not fit into its dimensions.)"""
    return equation.primitive is P.transpose_p and equation.outputs[0] in values


def _turned_with(value: int, readers: Mapping[int, Sequence[Equation]], values: Container[int]) -> set[int]:
    """A value and all of some values that it is turned to."""
    found, waiting = {value}, [value]
    while waiting:
        made = {r.outputs[0] for r in readers.get(waiting.pop(), ()) if _turns(r, values)} - found
        found |= made
        waiting += made
    return found


def _goes_on_inside(
    program: Program, value: int, readers: Mapping[int, Sequence[Equation]], stored: Container[int]
) -> bool:
    """Whether all that is done with a product is elementwise work on it and numbers, which is done where it is made,
    and stored in two bytes."""
    while len(readers.get(value, ())) == 1:
        (reader,) = readers[value]
        arrays = {x for x in reader.inputs if isinstance(x, int) and program.avals[x].size > 1}
        computes = reader.primitive in ELEMENTWISE - MOVES and arrays == {value}
        if not computes and reader.primitive is not P.transpose_p:
            return False
        (value,) = reader.outputs
        if computes and value in stored:
            return True
    return False


def _takes_two_bytes(program: Program, reader: Equation, value: int, rounded: Container[int]) -> bool:
    """Whether nothing that an equation makes of a value needs more digits."""
    if reader.primitive in CONTRACTION:
        shapes = [program.aval_of(x).shape for x in reader.inputs]
        is_apart = reader.inputs[0] == value and takes_features_apart(reader.primitive, reader.params, shapes)
        return has_default_precision(reader) and not is_apart
    if reader.primitive is P.scan_p:
        handed_on = handed_on_by_loop(reader, value)
        return handed_on is not None and all(output in rounded for output in handed_on)
    if reader.primitive is compat.barrier_p:
        made = zip(reader.inputs, reader.outputs, strict=True)
        return all(output in rounded for given, output in made if given == value)
    if reader.primitive is P.convert_element_type_p:
        return jnp.dtype(reader.params["new_dtype"]) == jnp.bfloat16
    hands_on = reader.primitive in MOVES or reader.primitive in _CHOOSING
    return hands_on and all(output in rounded for output in reader.outputs)


def has_default_precision(product: Equation) -> bool:
    """Whether a product's operands may be rounded."""
    asked = product.params.get("precision")
    return all(one in (None, lax.Precision.DEFAULT) for one in (asked if isinstance(asked, tuple) else (asked,)))
