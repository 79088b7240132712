"""What compilers see in an equation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import jax.numpy as jnp
from jax.extend.core import primitives as P

from remat_opt.program import compat
from remat_opt.program.inline import Constant, Equation, Program
from remat_opt.program.primitives import CONTRACTION, DEAR, ELEMENTWISE, MOVES, named

_DIVISIONS = named("div rem")
_OF_KNOWN_INVERSE = named("sqrt rsqrt exp pow")
SUMS = named("add add_jaxvals")
CUTTING = named("pad slice dynamic_slice")  # or making longer
WINDOWED = named("reduce_window reduce_window_max reduce_window_min reduce_window_sum")


def is_dear(equation: Equation, program: Program, producer: Mapping[int, Equation]) -> bool:
    """Whether the CPU's compiler does an elementwise equation in one kernel only: it takes many instructions. So does
    rounding to bfloat16, with which all arithmetic on such numbers ends, as the CPU computes them in float32.

    Args:
        equation: of `program`.
        program: what it is in.
        producer: for each value the equation that makes it.
    """
    if not equation.outputs or equation.primitive not in ELEMENTWISE:
        return False
    dtype = program.avals[equation.outputs[0]].dtype
    if equation.primitive in DEAR:
        return True
    if equation.primitive in _DIVISIONS and not _multiplies_by_inverse(equation, program, producer):
        return not jnp.issubdtype(dtype, jnp.integer)
    return dtype == jnp.bfloat16 and equation.primitive not in MOVES


def _multiplies_by_inverse(equation: Equation, program: Program, producer: Mapping[int, Equation]) -> bool:
    """Whether compilers multiply where an equation divides: by what is spread over its result, which they invert
    before that, and by roots, powers and exponentials, which they compute as their inverses
    (`AlgebraicSimplifierVisitor::HandleDivide`)."""
    if equation.primitive is not P.div_p:
        return False
    divisor, (result,) = equation.inputs[1], equation.outputs
    if isinstance(divisor, Constant) or program.avals[divisor].size < program.avals[result].size:
        return True
    maker = producer.get(divisor)
    return maker is not None and (maker.primitive is P.broadcast_in_dim_p or maker.primitive in _OF_KNOWN_INVERSE)


def multiplies_only(equation: Equation, value: int) -> bool:
    """Whether an equation is a product, or a `scan` that reads a value, the same in all turns or as a stack of slices,
    for products alone."""
    return equation.primitive in CONTRACTION or (
        equation.primitive is P.scan_p and handed_on_by_loop(equation, value) == frozenset()
    )


def handed_on_by_loop(loop: Equation, value: int) -> frozenset[int] | None:
    """Which results of a `scan` are parts of a value that it reads, or are carried in its place, where products are all
    else that reads any of it; None where others do."""
    handed_on = _handed_on_by_loop(loop.params, {at for at, x in enumerate(loop.inputs) if x == value})
    return None if handed_on is None else frozenset(loop.outputs[at] for at in handed_on)


def sums_nothing(equation: Equation, program: Program) -> bool:
    """Whether an equation is a product that sums over no dimension of more than one number."""
    if equation.primitive is not P.dot_general_p:
        return False
    (contracted, _), _ = equation.params["dimension_numbers"]
    shape = program.aval_of(equation.inputs[0]).shape
    return all(shape[at] == 1 for at in contracted)


def features_of_groups(params: dict[str, Any], shapes: Sequence[Sequence[int]]) -> tuple[int, tuple[int, ...]]:
    """A convolution's groups, and how many features of each group its images have. Of a gradient of weights these are
    both operands: what it sums over are the images, and their features are what it takes for these.

    Args:
        params: the convolution's.
        shapes: of its operands.
    """
    numbers = params["dimension_numbers"]
    groups = params["feature_group_count"] * params["batch_group_count"]
    if params["batch_group_count"] == 1:
        return groups, (shapes[0][numbers.lhs_spec[1]] // groups,)
    specs = numbers.lhs_spec, numbers.rhs_spec
    return groups, tuple(shape[spec[0]] // groups for shape, spec in zip(shapes, specs, strict=False))


def takes_features_apart(primitive: Any, params: dict[str, Any], shapes: Sequence[Sequence[int]]) -> bool:
    """Whether a product is a gradient of weights that takes each feature of its first operand for a group, with several
    of its second: a TPU's compiler gives those features a dimension of their own, and rounds in a copy."""
    if primitive is not P.conv_general_dilated_p or params["batch_group_count"] == 1:
        return False
    _, (first, second) = features_of_groups(params, shapes)
    return first == 1 < second


def _handed_on_by_loop(params: dict[str, Any], operands: Set[int]) -> Set[int] | None:
    """The same of the params of a `scan` and of its operands, by their places. What is carried has one type in all
    turns, so that what a turn makes for the next one counts as read."""
    constants, carries = compat.scan_counts(params)
    read = {*operands}
    while True:
        carried = {at - constants for at in read if constants <= at < constants + carries}
        handed_on = _handed_on_by(params["jaxpr"], read, carried)
        if handed_on is None:
            return None
        more = {constants + at for at in handed_on if at < carries} - read
        if not more:
            return handed_on
        read |= more


def _handed_on_by(jaxpr: Any, inputs: Set[int], results: Set[int] = frozenset()) -> Set[int] | None:
    """Which results of a jaxpr are some of its inputs, or some of its results, by their places; None where others than
    products read these."""
    body = compat.bare_jaxpr(jaxpr)
    read = {body.invars[at] for at in inputs}
    read.update(x for x in (body.outvars[at] for at in results) if not isinstance(x, compat.Literal))
    for inner in body.eqns:
        operands = {at for at, x in enumerate(inner.invars) if not isinstance(x, compat.Literal) and x in read}
        if not operands:
            continue
        if inner.primitive in CONTRACTION:
            shapes = [x.aval.shape for x in inner.invars]
            if 0 in operands and takes_features_apart(inner.primitive, inner.params, shapes):
                return None
            continue
        if inner.primitive is compat.barrier_p:
            read.update(inner.outvars[at] for at in operands)
            continue
        if inner.primitive in MOVES:
            read.update(inner.outvars)
            continue
        called = compat.jaxprs_in(inner.params)
        if inner.primitive is P.scan_p:
            handed_on = _handed_on_by_loop(inner.params, operands)
        elif len(called) == 1 and len(compat.bare_jaxpr(called[0]).invars) == len(inner.invars):
            handed_on = _handed_on_by(called[0], operands)
        else:
            handed_on = None
        if handed_on is None:
            return None
        read.update(inner.outvars[at] for at in handed_on)
    return {at for at, x in enumerate(body.outvars) if not isinstance(x, compat.Literal) and x in read}


def merges_examples(jaxpr: Any, at: int) -> bool:
    """Whether a jaxpr joins all but the last three dimensions of an input, of images, given by its place."""
    body = compat.bare_jaxpr(jaxpr)
    given = body.invars[at]
    for inner in body.eqns:
        for operand, x in enumerate(inner.invars):
            if x is not given:
                continue
            called = compat.jaxprs_in(inner.params)
            if inner.primitive is P.reshape_p:
                (made,) = inner.outvars
                return len(made.aval.shape) == 4 and made.aval.shape[1:] == given.aval.shape[-3:]
            calls = len(called) == 1 and len(compat.bare_jaxpr(called[0]).invars) == len(inner.invars)
            if calls and merges_examples(called[0], operand):
                return True
    return False


def mixes_dimensions(equation: Equation, program: Program) -> bool:
    """Whether a reshape does more than to join neighbouring dimensions and to divide dimensions: rows of one length
    become rows of another."""
    if equation.primitive is not P.reshape_p or not isinstance(equation.inputs[0], int):
        return False
    left = [size for size in program.avals[equation.inputs[0]].shape if size != 1]
    right = [size for size in program.avals[equation.outputs[0]].shape if size != 1]
    while left and right:
        counts, products = [1, 1], [left.pop(), right.pop()]
        while products[0] != products[1]:
            smaller, sizes = (0, left) if products[0] < products[1] else (1, right)
            if not sizes:
                return False  # an empty array
            counts[smaller] += 1
            products[smaller] *= sizes.pop()
        if min(counts) > 1:
            return True
    return False


def is_strided(equation: Equation) -> bool:
    """Whether an equation takes elements that do not lie beside each other."""
    return equation.primitive is P.slice_p and any(step != 1 for step in equation.params["strides"] or ())


def is_spread(equation: Equation) -> bool:
    """Whether an equation puts something between elements."""
    return equation.primitive is P.pad_p and any(between for _, _, between in equation.params["padding_config"])


def is_matrix_transpose(equation: Equation) -> bool:
    """Whether an equation transposes a matrix."""
    return equation.primitive is P.transpose_p and len(equation.params["permutation"]) == 2


def moves_ones_only(equation: Equation, program: Program) -> bool:
    """Whether an equation transposes an array of which all dimensions that are larger than one stay in their order."""
    if equation.primitive is not P.transpose_p or not isinstance(equation.inputs[0], int):
        return False
    shape = program.avals[equation.inputs[0]].shape
    large = [axis for axis in equation.params["permutation"] if shape[axis] > 1]
    return large == sorted(large)


def is_half(aval: Any) -> bool:
    """Whether a number takes two bytes and has a fraction."""
    return aval.dtype in (jnp.bfloat16, jnp.float16)


def draws_by_arithmetic(equation: Equation, program: Program) -> bool:
    """Whether random bits are Threefry's: some hundred steps of arithmetic on a key and a position, of which none alone
    is too much to be done in every kernel that reads them."""
    if equation.primitive is not P.random_bits_p:
        return False
    (key,) = (program.aval_of(x) for x in equation.inputs)
    return str(key.dtype) == "key<fry>"


def product_orders(equation: Equation, program: Program) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Dimensions of a product's operands in the order in which XLA's compilers want them (`dot_decomposer.cc`): those
    of the batch, and then for the first one those that stay and those that are summed over, for the second one the
    other way round."""
    summed, batch = equation.params["dimension_numbers"]
    ranks = [len(program.aval_of(x).shape) for x in equation.inputs]
    orders = []
    for rank, over, of_batch, stays_first in zip(ranks, summed, batch, (True, False), strict=True):
        stays = tuple(axis for axis in range(rank) if axis not in over and axis not in of_batch)
        orders.append((*of_batch, *stays, *over) if stays_first else (*of_batch, *over, *stays))
    return orders[0], orders[1]


def product_copies(equation: Equation, program: Program) -> tuple[bool, bool]:
    """Which of a product's operands are copied into that order. Rows and columns may change places without."""
    _, batch = equation.params["dimension_numbers"]
    copies = []
    for order, of_batch in zip(product_orders(equation, program), batch, strict=True):
        first = len(of_batch)
        matrices_only = order[:first] == tuple(range(first)) and len(order) == first + 2
        copies.append(not matrices_only and order != tuple(range(len(order))))
    return copies[0], copies[1]
