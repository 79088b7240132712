"""Copies of what a TPU's convolutions read, in two bytes an element.

Elementwise work on an operand is done by the convolution itself, so is a slice or a concatenation of stored images.
Kernels of their own are:

- a copy of an image that the step is given, where that lies with neither batch nor features in the lanes;
- a slice that is a piece of a concatenation;
- an image of a convolution in groups of several features: with the batch in the lanes, or with a group's features if
  they are more, and so is the result, which is copied back (of one feature each, as depthwise, they lie as others);
- an image whose features change places in groups, and one that a product makes in another order of dimensions;
- an operand reversed. XLA takes the larger one in space for the image (`conv_operand_swapper.cc`), as of the gradient
  of a transposed convolution's weights, and a filter that was an image is reversed before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jax.extend.core import primitives as P

from remat_opt.compilers.equations import is_strided
from remat_opt.compilers.tpu_grouped_convolutions import is_by_groups
from remat_opt.compilers.tpu_parts import MOST_IMAGES
from remat_opt.graph.graph import Kind, Op
from remat_opt.graph.tiles import LANES, SUBLANES, bytes_with_features_or_batch_in_lanes, lies_otherwise, padded_bytes
from remat_opt.program import compat
from remat_opt.program.inline import Constant, Equation, Program
from remat_opt.program.primitives import ELEMENTWISE

if TYPE_CHECKING:
    from remat_opt.compilers.tpu_reader import TpuReader

_MULTIPLIED = 2  # bytes of an element that the matrix units read
ROUNDED_SLICE = "slice in two bytes"


def with_copies(reader: TpuReader, equation: Equation, op: Op) -> list[Op]:
    """A convolution, before it the copies that it reads: each is made once for all convolutions that read it."""
    if is_by_groups(equation, reader.program):
        return _by_groups(reader, equation, op)
    if _is_along_lanes(equation, reader.program):
        return _along_lanes(reader, equation, op)
    copies: list[Op] = []
    instead: dict[int, int] = {}
    for x in reader.variables(equation):
        given, aval = reader.buffer(x), reader.program.avals[x]
        if x in reader.images and (_is_of_product(reader, x) or _is_shuffled(reader, x)):
            size = bytes_with_features_or_batch_in_lanes(aval.shape, _MULTIPLIED, 0, len(aval.shape) - 1)
            instead[given] = _computed(reader, copies, x, "rounded", size)
            continue
        if given not in reader.program.inputs or len(aval.shape) < 4 or aval.shape[0] <= MOST_IMAGES:
            continue
        if aval.shape != reader.program.avals[given].shape or not lies_otherwise(aval.shape, aval.dtype.itemsize):
            continue
        instead[given] = _copy(reader, copies, x, "copy", reader.behind([x]))
    filters = equation.inputs[1]
    if isinstance(filters, int) and filters not in reader.parts.cut and exchanges_operands(equation, reader.program):
        read, cut = reader.behind([filters]), reader.producer.get(filters)
        if cut is not None and cut.primitive is P.slice_p:
            read = (_copy(reader, copies, filters, ROUNDED_SLICE, reader.behind(reader.variables(cut))),)
        instead[reader.buffer(filters)] = _copy(reader, copies, filters, "rev", read)
    return [*copies, dataclasses.replace(op, inputs=tuple(instead.get(value, value) for value in op.inputs))]


def _is_of_product(reader: TpuReader, image: int) -> bool:
    """Whether elementwise work makes an image of what a product makes with its dimensions in another order."""
    made = reader.producer.get(image)
    while made is not None and made.primitive in ELEMENTWISE and made.primitive is not P.transpose_p:
        whole = [x for x in made.inputs if isinstance(x, int) and x in reader.images]
        if len(whole) != 1:
            return False
        made = reader.producer.get(whole[0])
    if made is None or made.primitive is not P.transpose_p or made.outputs[0] == image:
        return False
    product = reader.producer.get(made.inputs[0]) if isinstance(made.inputs[0], int) else None
    return product is not None and product.primitive is P.dot_general_p


def _is_shuffled(reader: TpuReader, image: int) -> bool:
    """Whether an image's features change places in groups (Zhang et al. 2018)."""
    joined = reader.producer.get(image)
    if joined is None or joined.primitive is not P.reshape_p or not isinstance(joined.inputs[0], int):
        return False
    turned, rank = reader.producer.get(joined.inputs[0]), len(reader.program.avals[image].shape)
    if turned is None or turned.primitive is not P.transpose_p:
        return False
    return tuple(turned.params["permutation"]) == (*range(rank - 1), rank, rank - 1)


def _computed(reader: TpuReader, copies: list[Op], image: int, lying: str, size: int) -> int:
    """A copy of so many bytes that lies otherwise than an image, in whose kernel that is computed; one for all."""
    read = reader.behind([image])
    key = (lying, image, *read)
    if key not in reader.copies:
        reader.copies[key] = reader.new(size)
        copies.append(Op(read, (reader.copies[key],), kind=Kind.ELEMENTWISE, repeatable=False, name="copy"))
    return reader.copies[key]


def _is_along_lanes(equation: Equation, program: Program) -> bool:
    """Whether a convolution is in one dimension, of images that lie with that in the lanes, as they pad least so."""
    avals = [program.aval_of(x) for x in (*equation.inputs[:2], *equation.outputs)]
    params = equation.params
    is_in_groups = params["feature_group_count"] * params["batch_group_count"] > 1
    of_images = (aval.shape for aval in avals if aval.shape[0] > 0 and len(aval.shape) == 3)
    return not is_in_groups and any(lies_otherwise(shape, 4) for shape in of_images)


def _along_lanes(reader: TpuReader, equation: Equation, op: Op) -> list[Op]:
    """A convolution of images that lie with their places in the lanes, with the copies that it reads and makes."""
    copies: list[Op] = []
    instead: dict[int, int] = {}
    least = min(reader.program.aval_of(x).size for x in (*equation.inputs[:2], *equation.outputs))
    for x in reader.variables(equation):
        aval = reader.program.avals[x]
        if aval.size == least or x in reader.constants:
            continue  # the kernel
        size = bytes_with_features_or_batch_in_lanes(aval.shape, _MULTIPLIED, 0, 2)
        instead[reader.buffer(x)] = _computed(reader, copies, x, "along lanes", size)
    op = dataclasses.replace(op, inputs=tuple(instead.get(value, value) for value in op.inputs))
    (result,) = op.outputs
    aval = reader.program.avals[result]
    if aval.size == least:
        return [*copies, op]
    made = reader.new(bytes_with_features_or_batch_in_lanes(aval.shape, compat.item_bytes(aval.dtype), 0, 2))
    return [*copies, dataclasses.replace(op, outputs=(made,)), Op((made,), (result,), kind=Kind.OPAQUE, name="copy")]


def _by_groups(reader: TpuReader, equation: Equation, op: Op) -> list[Op]:
    """A convolution in groups, or a gradient of its weights, with the copies of images that it reads and makes."""
    params, numbers = equation.params, equation.params["dimension_numbers"]
    groups = params["feature_group_count"] * params["batch_group_count"]
    is_gradient = params["batch_group_count"] > 1

    def size_of(image: int, spec: Sequence[int], item: int) -> int:
        aval = reader.program.avals[image]
        examples, in_group = aval.shape[spec[is_gradient]], aval.shape[spec[not is_gradient]] // groups
        others = aval.size // (examples * in_group)
        return bytes_with_features_or_batch_in_lanes((others, examples, in_group), item, 1, 2)

    copies: list[Op] = []
    instead: dict[int, int] = {}
    specs = (numbers.lhs_spec, numbers.rhs_spec) if is_gradient else (numbers.lhs_spec,)
    for x, spec in zip(equation.inputs, specs, strict=False):
        if isinstance(x, Constant) or x in reader.constants:
            continue
        copy = reader.grouped.as_read(copies, x)
        if copy is not None:
            instead[reader.buffer(x)] = copy
        elif x not in reader.grouped.layouts:
            instead[reader.buffer(x)] = _computed(reader, copies, x, "groups", size_of(x, spec, _MULTIPLIED))
    op = dataclasses.replace(op, inputs=tuple(instead.get(value, value) for value in op.inputs))
    if is_gradient:
        return [*copies, op]
    (result,) = op.outputs
    if result in reader.grouped.layouts:
        return [*copies, op]
    aval = reader.program.avals[result]
    item = compat.item_bytes(aval.dtype)
    fills_rows = aval.shape[numbers.out_spec[1]] == groups and aval.shape[numbers.out_spec[0]] == SUBLANES
    # The rows of tiles stay a batch's that fills them, with nothing but the one feature of a group in the lanes.
    made = reader.new(aval.size * LANES * item if fills_rows else size_of(result, numbers.out_spec, item))
    return [*copies, dataclasses.replace(op, outputs=(made,)), Op((made,), (result,), kind=Kind.OPAQUE, name="copy")]


def with_pieces_cut(reader: TpuReader, equation: Equation, op: Op) -> list[Op]:
    """A concatenation, before it the slices among its pieces if a convolution reads it, or if it puts whole rows one
    behind the other, as rolling an image does."""
    readers = reader.readers.get(equation.outputs[0], ())
    is_multiplied = any(one.primitive is P.conv_general_dilated_p for one in readers)
    is_outside = equation.params["dimension"] < len(reader.program.avals[equation.outputs[0]].shape) - 2
    if op.kind is not Kind.ELEMENTWISE or not (is_multiplied or is_outside):
        return [op]
    copies: list[Op] = []
    instead: dict[int, int] = {}
    for x in reader.variables(equation):
        cut = reader.producer.get(x)
        if cut is None or cut.primitive is not P.slice_p or is_strided(cut) or len(reader.program.avals[x].shape) < 4:
            continue
        read, name = reader.behind(reader.variables(cut)), ROUNDED_SLICE if is_multiplied else P.slice_p.name
        instead[reader.buffer(x)] = _copy(reader, copies, x, name, read)
    return [*copies, dataclasses.replace(op, inputs=tuple(instead.get(value, value) for value in op.inputs))]


def _copy(reader: TpuReader, copies: list[Op], value: int, name: str, read: tuple[int, ...]) -> int:
    """What is copied of some buffers, with a value's shape."""
    key = (name, *read) if name == "copy" else (name, value, *read)
    if key not in reader.copies:
        aval = reader.program.avals[value]
        if name == P.slice_p.name:
            size = padded_bytes(aval.shape, compat.item_bytes(aval.dtype))
        else:
            size = bytes_with_features_or_batch_in_lanes(aval.shape, _MULTIPLIED, 0, len(aval.shape) - 1)
        reader.copies[key] = reader.new(size)
        copies.append(Op(read, (reader.copies[key],), kind=Kind.OPAQUE, name=name))
    return reader.copies[key]


def exchanges_operands(equation: Equation, program: Program) -> bool:
    """Whether XLA exchanges a convolution's operands: where the second is larger in space than the first."""
    params = equation.params
    if params["feature_group_count"] > 1 or params["batch_group_count"] > 1:
        return False
    shapes = [program.aval_of(x).shape for x in equation.inputs]
    numbers = params["dimension_numbers"]
    filters = images = 1
    for at, (image_at, filter_at) in enumerate(zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], strict=True)):
        image, window = shapes[0][image_at], shapes[1][filter_at]
        stride, padding = params["window_strides"][at], tuple(params["padding"][at])
        spread, dilated = params["lhs_dilation"][at], params["rhs_dilation"][at]
        if dilated == 1 and padding == (0, 0) and spread == window and stride == window - 1:
            continue
        is_one = image == stride == dilated == 1 and padding == (window - 1, window - 1)
        filters, images = filters * window, images * (window if is_one else image)
    return filters > images
