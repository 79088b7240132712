"""What a TPU's matrix units do for a convolution: more than its arithmetic, as they multiply 128 rows with 128 lanes.

At each place of the window they contract an image's features, of which fewer than 128 leave rows empty, and make the
result with features or examples in the lanes, as that leaves least empty. Colours are contracted at the places of a
window's row together. A gradient of weights contracts examples at all places, which fills the rows. XLA's estimates, by
which it decides what waits on the chip (`tpu_chip.py`), are of that: 3 × 3 places of 32 features are as long under way
as of 128, and longer than what they read and make of images.
"""

from __future__ import annotations

import math

from remat_opt.compilers.tpu_parts import Parts
from remat_opt.graph.tiles import LANES, SUBLANES
from remat_opt.program.inline import Equation, Program

MOST_COLOURS = 4  # half a tile's rows: images of as many lie in tiles of four rows


def share_in_use(convolution: Equation, program: Program, parts: Parts) -> float:
    """Which part of what matrix units do for a convolution is arithmetic of its own.

    Args:
        convolution: the equation.
        program: that it is of.
        parts: what is done on parts of images, which are examples then.

    Returns:
        A number above 0, at most 1; 1 for a convolution of nothing.
    """
    numbers = convolution.params["dimension_numbers"]
    filters = program.aval_of(convolution.inputs[1]).shape
    result = program.aval_of(convolution.outputs[0]).shape
    contracted, features = filters[numbers.rhs_spec[1]], filters[numbers.rhs_spec[0]]
    cut = parts.cut.get(convolution.outputs[0])
    examples = result[numbers.out_spec[0]] if cut is None else cut.shape_of(result)[cut.batch]
    window, places = (
        math.prod(shape[at] for at in spec[2:])
        for shape, spec in ((filters, numbers.rhs_spec), (result, numbers.out_spec))
    )
    if not contracted * features * examples * window * places:
        return 1.0
    if window > places:  # a gradient of weights
        contracted *= window
    elif contracted <= MOST_COLOURS and len(numbers.rhs_spec) > 2:
        contracted *= filters[numbers.rhs_spec[-1]]
    lanes = max(
        _filled(features, LANES) * _filled(examples, SUBLANES),
        _filled(features, SUBLANES) * _filled(examples, LANES),
    )
    return _filled(contracted, LANES) * lanes


def _filled(count: int, multiple: int) -> float:
    return count / (-(-count // multiple) * multiple)
