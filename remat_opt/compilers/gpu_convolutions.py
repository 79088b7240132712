"""What XLA's GPU compiler writes for a convolution beside its operands and its result (`conv_padding_legalization.cc`).

The library pads an image alike on both sides, and takes it dilated only where it computes the gradient of a strided
convolution. For all other convolutions images are written padded and dilated; of a gradient that leaves out more on
one side than on the other, more is written than is asked for.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from remat_opt.program.inline import Equation, Program

Sides = tuple[tuple[int, int, int], ...]  # for each dimension of an image: elements before and behind it, and dilation


class Written(NamedTuple):
    """What is written for a convolution.

    Attributes:
        image: how its first operand is padded and dilated in memory; None where it is read as it is.
        kernel: the same of its second operand.
        elements: of its result as the library writes it.
        is_turned: whether that has batch and features the other way round.
    """

    image: Sides | None
    kernel: Sides | None
    elements: int
    is_turned: bool = False


def written_for(equation: Equation, program: Program, *, is_reversed: bool) -> Written:
    """What is written for a `conv_general_dilated`.

    Args:
        equation: the convolution.
        program: that it is an equation of.
        is_reversed: whether its kernel is reversed, as for the gradient by the image.
    """
    image, kernel = (program.aval_of(x).shape for x in equation.inputs)
    result = program.avals[equation.outputs[0]].shape
    params, numbers = equation.params, equation.params["dimension_numbers"]
    sizes = [image[axis] for axis in numbers.lhs_spec[2:]]
    windows = [kernel[axis] for axis in numbers.rhs_spec[2:]]
    made = [result[axis] for axis in numbers.out_spec[2:]]
    dilations, padding = params["lhs_dilation"], params["padding"]
    elements = math.prod(result)
    if max(dilations, default=1) > 1:
        change_places = math.prod(windows) > math.prod(sizes)  # with batch and features, before gradients are known
        if is_reversed and not change_places:
            apart = params["rhs_dilation"]
            given = zip(made, windows, apart, sizes, dilations, padding, strict=True)
            more = [
                _uneven(size, (window - 1) * wide + 1, count, stride, (window - 1) * wide - low)
                for size, window, wide, count, stride, (low, _) in given
            ]
            grown = math.prod(size + extra for size, extra in zip(made, more, strict=True))
            return Written(None, None, elements // max(math.prod(made), 1) * grown)
        if change_places:
            spans = [_span(size, dilation) for size, dilation in zip(sizes, dilations, strict=True)]
            around = zip(spans, windows, padding, strict=True)
            sides = tuple((span - window + low, span - window + high, 1) for span, window, (low, high) in around)
            dilated = tuple((0, 0, dilation if _is_uneven(sides) else 1) for dilation in dilations)
            return Written(dilated, sides if _is_uneven(sides) else tuple((0, 0, 1) for _ in sides), elements, True)
        sides = tuple((low, high, dilation) for (low, high), dilation in zip(padding, dilations, strict=True))
        return Written(None if max(windows) == 1 else sides, None, elements)
    if math.prod(made) < math.prod(windows):  # the gradient by the kernel
        given = zip(sizes, made, params["window_strides"], windows, params["rhs_dilation"], padding, strict=True)
        more = tuple(
            (0, _uneven(size, (window - 1) * wide + 1, count, stride, low), 1)
            for size, window, wide, count, stride, (low, _) in given
        )
        return Written(more if _is_uneven(more) else None, None, elements)
    sides = tuple((low, high, 1) for low, high in padding)
    return Written(sides if _is_uneven(sides) else None, None, elements)


def padded_elements(shape: tuple[int, ...], spatial: tuple[int, ...], sides: Sides) -> int:
    """Elements of an array that is padded and dilated in some dimensions."""
    sizes = list(shape)
    for axis, (low, high, dilation) in zip(spatial, sides, strict=True):
        sizes[axis] = _span(sizes[axis], dilation) + max(low, 0) + max(high, 0)
    return math.prod(sizes)


def _span(size: int, dilation: int) -> int:
    return (size - 1) * dilation + 1


def _is_uneven(sides: Sides) -> bool:
    return any(low != high for low, high, _ in sides)


def _uneven(size: int, window: int, count: int, stride: int, low: int) -> int:
    """By how much a convolution's padding behind an image differs from that before it.

    Args:
        size: of the image.
        window: of the kernel.
        count: of results; what of the image is behind the last one may be padding, or not.
        stride: between results.
        low: padding before the image.
    """
    least = window + (count - 1) * stride - size - low
    return max(least - low, low - (least + stride - 1), 0)
