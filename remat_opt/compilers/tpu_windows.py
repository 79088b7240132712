"""Rows' maxima and sums that a TPU's compiler spreads where it finds them.

A maximum along the rows of an array that is spread over these rows again, and read by nobody else, is a windowed one
to XLA (`reduce-window`), with a window of the whole row: it makes an array, and as a product does the kernel goes on
with that, up to the exponentials of a softmax, which it stores where several kernels read them. (Where the maximum is
an argument, or was found before, each kernel makes the exponentials again.) Not where a product reads what is made of
it, which would make the exponentials in its own kernel, nor of matrices, nor with rows that do not fill their tiles.
So is the sum of exponentials whose logarithm is spread again, and that nobody else reads: the scores of a softmax that
nothing is learnt from. Its kernel reads them from memory. Seen by compiling small functions with libtpu 0.0.51.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping, Sequence

import numpy as np
from jax.extend.core import primitives as P

from remat_opt.program.inline import Constant, Equation, Program
from remat_opt.program.primitives import CONTRACTION, ELEMENTWISE, RESHAPING, named

ROWS_OF_A_TILE = 8
(REDUCE_WINDOW,) = named("reduce_window")


def with_windowed_maxima(program: Program) -> Program:
    """The same program with windowed maxima, and sums of exponentials."""
    readers: dict[int, list[Equation]] = {}
    for equation in program.equations:
        for x in {x for x in equation.inputs if isinstance(x, int)}:
            readers.setdefault(x, []).append(equation)
    outputs = frozenset(x for x in program.outputs if isinstance(x, int))
    exponentials = {one.outputs[0] for one in program.equations if one.primitive is P.exp_p}
    avals = list(program.avals)
    equations: list[Equation] = []
    instead: dict[int, int] = {}
    left_out: set[int] = set()
    for equation in program.equations:
        spread = _spread(program, readers, outputs, exponentials, equation)
        if spread:
            given = equation.inputs[0]
            instead[spread[-1]] = len(avals)
            left_out.update(spread[1:])
            shape = program.aval_of(given).shape
            is_sum = equation.primitive is P.reduce_sum_p
            params = {"window_dimensions": (*([1] * (len(shape) - 1)), shape[-1]), "of_buffers": is_sum}
            equations.append(
                dataclasses.replace(equation, primitive=REDUCE_WINDOW, outputs=(len(avals),), params=params)
            )
            avals.append(program.aval_of(given))
            for one in (one for one in program.equations if one.primitive is P.log_p and one.outputs[0] in spread):
                equations.append(dataclasses.replace(one, inputs=(len(avals) - 1,), outputs=(len(avals),)))
                instead[spread[-1]] = len(avals)
                avals.append(program.aval_of(given))
        elif left_out.isdisjoint(equation.outputs):
            inputs = tuple(instead.get(x, x) if isinstance(x, int) else x for x in equation.inputs)
            equations.append(equation if inputs == equation.inputs else dataclasses.replace(equation, inputs=inputs))
    return dataclasses.replace(program, avals=tuple(avals), equations=tuple(equations)) if instead else program


def _spread(
    program: Program,
    readers: Mapping[int, Sequence[Equation]],
    outputs: frozenset[int],
    exponentials: Container[int],
    equation: Equation,
) -> list[int]:
    """What a rows' maximum is, or the logarithm of its exponentials' sum, with other shapes, up to that in which
    elementwise work reads it; empty where it is no windowed one."""
    if equation.primitive not in (P.reduce_max_p, P.reduce_sum_p):
        return []
    given, is_sum = equation.inputs[0], equation.primitive is P.reduce_sum_p
    if not isinstance(given, int) or (is_sum and given not in exponentials):
        return []
    shape = program.avals[given].shape
    if len(shape) < 3 or shape[-1] % ROWS_OF_A_TILE or tuple(equation.params["axes"]) != (len(shape) - 1,):
        return []
    found, is_logarithm = [equation.outputs[0]], False
    while True:
        following = readers.get(found[-1], ())
        goes_on = any(map(_is_the_same, following)) or (is_sum and any(one.primitive is P.log_p for one in following))
        if program.avals[found[-1]].shape in (shape, (*shape[:-1], 1)) and not goes_on:
            break
        if len(following) != 1 or not goes_on:
            return []
        is_logarithm |= following[0].primitive is P.log_p
        found += following[0].outputs
    if is_sum and not is_logarithm:
        return []
    read = readers.get(found[-1], ())
    is_spread = all(one.primitive in ELEMENTWISE and program.avals[one.outputs[0]].shape == shape for one in read)
    if not read or not is_spread or not outputs.isdisjoint(found) or _is_read_by_products(program, readers, read):
        return []
    return found


def _is_the_same(equation: Equation) -> bool:
    """Whether an equation gives numbers another shape, or takes the larger one of them and of minus infinity."""
    if equation.primitive is P.max_p:
        (*numbers,) = (x for x in equation.inputs if isinstance(x, Constant))
        return bool(numbers) and np.ndim(numbers[0].value) == 0 and float(numbers[0].value) == -np.inf
    return equation.primitive in RESHAPING or equation.primitive.name == "stop_gradient"


def _is_read_by_products(program: Program, readers: Mapping[int, Sequence[Equation]], work: Sequence[Equation]) -> bool:
    """Whether products read what elementwise work makes, maybe of it and of single numbers for each row."""
    seen, waiting = set[int](), [x for equation in work for x in equation.outputs]
    while waiting:
        value = waiting.pop()
        size = program.avals[value].size
        for reader in readers.get(value, ()):
            if reader.primitive in CONTRACTION:
                return True
            whole = {x for x in reader.inputs if isinstance(x, int) and program.avals[x].size == size}
            if reader.primitive in ELEMENTWISE and whole == {value}:
                new = {x for x in reader.outputs if program.avals[x].size == size} - seen
                seen |= new
                waiting += new
    return False
