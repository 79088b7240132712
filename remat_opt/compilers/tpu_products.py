"""Copies of what a TPU's products over a batch read and make.

Such a product has its batch outside of the tiles: 17 × 32 numbers for each of 8192 examples take 24 × 128 places each.
Elementwise work lies as it pads least, with the examples in the lanes, and where that is less XLA copies it. What lies
between two such products, as attention's scores do, is not copied, however much it pads: it lies as they do.

Scores of which rows are reduced lie with the queries in the lanes, but for those that go from the product into a
barrier and nowhere else: they lie by rows, keys in the lanes, so that who reads them behind it reads a copy.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax.extend.core import primitives as P

from remat_opt.compilers.equations import sums_nothing
from remat_opt.graph.graph import Kind, Op
from remat_opt.graph.tiles import padded_bytes
from remat_opt.program import compat
from remat_opt.program.inline import Constant, Equation, Program
from remat_opt.program.primitives import CONTRACTION, ELEMENTWISE, REDUCTION, RESHAPING

if TYPE_CHECKING:
    from remat_opt.compilers.tpu_reader import TpuReader

PADS_MORE = 1.1  # times as much as it could; a few rows of a tile are no reason to copy


def with_copies(reader: TpuReader, equation: Equation, op: Op) -> list[Op]:
    """A `dot_general`, with copies of its operands before it and of its result behind it."""
    _, batch = equation.params["dimension_numbers"]
    ops: list[Op] = []
    for operand, of_batch in zip(equation.inputs, batch, strict=True):
        if isinstance(operand, Constant) or operand in reader.constants or operand in reader.between_products:
            continue
        aval = reader.program.avals[operand]
        size = _larger(aval.shape, of_batch, min(compat.item_bytes(aval.dtype), 2))
        if not size:
            continue
        key = ("batch outside", operand, tuple(of_batch))
        if key not in reader.copies:
            reader.copies[key] = reader.new(size)
            ops.append(Op(reader.behind([operand]), (reader.copies[key],), name="copy"))
        buffer = reader.buffer(operand)
        inputs = tuple(reader.copies[key] if value == buffer else value for value in op.inputs)
        op = dataclasses.replace(op, inputs=inputs)
    (result,) = equation.outputs
    if result in reader.between_products:
        return [*ops, op]
    aval = reader.program.avals[result]
    size = _larger(aval.shape, range(len(batch[0])), 2 if result in reader.rounded else compat.item_bytes(aval.dtype))
    if not size:
        return [*ops, op]
    padded = reader.new(size)
    return [*ops, dataclasses.replace(op, outputs=(padded,)), Op((padded,), (result,), name="copy")]


def with_scores_turned(reader: TpuReader, equation: Equation, ops: Sequence[Op]) -> list[Op]:
    """An equation's ops, with copies before them of scores that they read behind a barrier."""
    copies: list[Op] = []
    instead: dict[int, int] = {}
    for x in reader.variables(equation):
        if x not in reader.scores_behind_barriers:
            continue
        key = ("turned", x)
        if key not in reader.copies:
            aval = reader.program.avals[x]
            item = 2 if x in reader.rounded else compat.item_bytes(aval.dtype)
            places = reader.between_products.get(x, 0) * item or padded_bytes(aval.shape, item)
            reader.copies[key] = reader.new(places)
            seconds = 2 * places / reader.rates.bandwidth
            copies.append(Op(reader.behind([x]), (reader.copies[key],), seconds=seconds, name="copy"))
        instead[reader.buffer(x)] = reader.copies[key]
    reading = [dataclasses.replace(op, inputs=tuple(instead.get(value, value) for value in op.inputs)) for op in ops]
    return [*copies, *reading]


def scores_behind_barriers(program: Program) -> frozenset[int]:
    """What barriers return of products over a batch whose rows are reduced then, and not before; and for who else reads
    them the products' results."""
    reduced = set[int]()
    for equation in reversed(program.equations):
        if equation.primitive is compat.barrier_p:
            continue
        if equation.primitive in REDUCTION and isinstance(equation.inputs[0], int):
            rank = len(program.avals[equation.inputs[0]].shape)
            if tuple(equation.params.get("axes", ())) == (rank - 1,):
                reduced.add(equation.inputs[0])
        else:
            reduced.update(one for one, other in _stored_alike(program, equation) if other in reduced)
    by_rows, behind, read_too = set[int](), set[int](), set[int]()
    for equation in program.equations:
        if equation.primitive is P.dot_general_p:
            _, batch = equation.params["dimension_numbers"]
            (result,) = equation.outputs
            if batch[0] and len(program.avals[result].shape) > 2 and result not in reduced:
                by_rows.add(result)
        elif equation.primitive is compat.barrier_p:
            found = {other: one for one, other in _stored_alike(program, equation) if one in by_rows}
            by_rows.update(found)
            behind.update(found)
            read_too.update(one for other, one in found.items() if other in reduced)
    return frozenset(behind & reduced | read_too)


def lying_between(program: Program, images: Container[int]) -> Mapping[int, int]:
    """What lies between products over a batch: what elementwise work makes of one's result for another of as many
    places, and what is made for nothing but that, as masks of scores. For each such value the places that it takes with
    the batch outside of the tiles. (Images lie as convolutions have them. What a product's result is multiplied with
    lies as it pads least, where it is not made of one itself.)"""
    made: dict[int, int] = {}
    read: dict[int, set[int]] = collections.defaultdict(set)  # the places of the products that a value is for
    steps = [
        (equation, [pair for pair in _stored_alike(program, equation) if not any(x in images for x in pair)])
        for equation in program.equations
    ]
    for equation, pairs in steps:
        if equation.primitive is P.dot_general_p:
            _, batch = equation.params["dimension_numbers"]
            made |= _places(program, equation.outputs[0], range(len(batch[0])))
            for operand, of_batch in zip(equation.inputs, batch, strict=True):
                if isinstance(operand, int):
                    read[operand].update(_places(program, operand, of_batch).values())
        made |= {other: made[one] for one, other in pairs if one in made}
    for _, pairs in reversed(steps):
        for one, other in pairs:
            read[one] |= read[other]
    found = {value: places for value, places in made.items() if places in read[value]}
    uses: dict[int, set[int]] = collections.defaultdict(set)  # the places of what a value is for; 0 for other uses
    uses.update({x: {0} for x in program.outputs if isinstance(x, int)})
    for equation, pairs in reversed(steps):
        for x in equation.outputs if equation.primitive not in CONTRACTION else ():
            if x not in found and len(uses[x]) == 1 and 0 not in uses[x]:
                (found[x],) = uses[x]
        made_for = dict(pairs)
        for x in equation.inputs:
            if isinstance(x, int):
                uses[x].add(found.get(made_for.get(x, -1), 0))
    return found


def complex_for_products(program: Program) -> Mapping[int, int]:
    """Complex arrays of which products over a batch read slices, and that are padded of what such products make: for
    each the places that it takes with the batch outside of the tiles. A TPU has real and imaginary parts, which are
    made, and put together, as the products have them."""
    cut = {e.outputs[0]: e.inputs[0] for e in program.equations if e.primitive is P.slice_p}
    turned = {e.outputs[0]: e.inputs[0] for e in program.equations if e.primitive is P.transpose_p}
    found: dict[int, int] = {}
    batches: dict[int, tuple[int, ...]] = {}  # of what products made, which dimensions number their batch
    for equation in program.equations:
        if equation.primitive is P.transpose_p:
            (given,), (result,) = equation.inputs, equation.outputs
            if isinstance(given, int) and given in batches:
                permutation = tuple(equation.params["permutation"])
                batches[result] = tuple(permutation.index(at) for at in batches[given])
                if given in found:
                    found[result] = found[given]
        elif equation.primitive is P.pad_p:
            (given, _), (result,) = equation.inputs, equation.outputs
            if isinstance(given, int) and given in batches:
                batches[result] = batches[given]
                found[result] = _outside(program.avals[result].shape, batches[result], 1)
        if equation.primitive is not P.dot_general_p:
            continue
        _, batch = equation.params["dimension_numbers"]
        (result,) = equation.outputs
        if batch[0] and _is_complex(program, result) and _places(program, result, range(len(batch[0]))):
            batches[result] = tuple(range(len(batch[0])))
        for operand, of_batch in zip(equation.inputs, batch, strict=True):
            whole = cut.get(operand) if isinstance(operand, int) else None
            if isinstance(whole, int) and _is_complex(program, whole):
                places = _outside(program.avals[whole].shape, of_batch, 1)
                while places and isinstance(whole, int):
                    found[whole] = places
                    whole = turned.get(whole)
    return found


def _is_complex(program: Program, value: int) -> bool:
    return jnp.issubdtype(program.avals[value].dtype, jnp.complexfloating)


def _places(program: Program, value: int, batch: Sequence[int]) -> dict[int, int]:
    """Those of a value with the batch outside of the tiles; nothing for a matrix."""
    places = _outside(program.avals[value].shape, batch, 1)
    return {value: places} if places else {}


def _stored_alike(program: Program, equation: Equation) -> Sequence[tuple[int, int]]:
    """Operands and results of as many elements, of elementwise work, barriers, and what is only named otherwise."""
    if equation.primitive is compat.barrier_p:
        pairs = list(zip(equation.inputs, equation.outputs, strict=True))
    elif equation.primitive in ELEMENTWISE or equation.primitive in RESHAPING or equation.primitive is P.transpose_p:
        pairs = [(operand, result) for operand in equation.inputs for result in equation.outputs]
    else:
        return []
    size = {value: program.avals[value].size for pair in pairs for value in pair if isinstance(value, int)}
    return [(x, result) for x, result in pairs if isinstance(x, int) and size[x] == size[result]]


def _outside(shape: Sequence[int], batch: Sequence[int], item: int) -> int:
    """Bytes of an array with the batch outside of the tiles; 0 for a matrix."""
    if not batch or len(shape) < 3:
        return 0
    size = padded_bytes([size for at, size in enumerate(shape) if at not in batch], item)
    for at in batch:
        size *= shape[at]
    return size


def _larger(shape: Sequence[int], batch: Sequence[int], item: int) -> int:
    """Bytes of an array with the batch outside of the tiles, where that is more than it needs; 0 elsewhere."""
    size = _outside(shape, batch, item)
    return size if size > PADS_MORE * padded_bytes(shape, item) else 0


def arithmetic_of(equation: Equation, program: Program) -> Kind | None:
    """What a product is that is none: elementwise work where nothing is summed up, a reduction where an operand is a
    vector (`AlgebraicSimplifier::HandleDotStrengthReduction`); None for real products."""
    if equation.primitive is not P.dot_general_p:
        return None
    (contracted, _), batch = equation.params["dimension_numbers"]
    shapes = [program.aval_of(x).shape for x in equation.inputs]
    summed = math.prod(shapes[0][at] for at in contracted)
    free = [
        math.prod(shape) // max(summed * math.prod(shape[at] for at in own), 1)
        for shape, own in zip(shapes, batch, strict=True)
    ]
    if sums_nothing(equation, program):
        return Kind.ELEMENTWISE if min(free) > 1 else None
    return Kind.REDUCTION if min(free) == 1 < max(free) else None
