"""How much of a TPU's matrix units convolutions fill."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from remat_opt.compilers.tpu_matrix_units import share_in_use
from remat_opt.compilers.tpu_parts import Parts, parts_of
from remat_opt.program.inline import Equation, Program, inline

NUMBERS = ("NHWC", "HWIO", "NHWC")


def convolution_of(
    examples: int, side: int, contracted: int, features: int, *, is_gradient: bool = False
) -> tuple[Equation, Program, Parts]:
    def convolve(x: jax.Array, filters: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(x, filters, (1, 1), "SAME", dimension_numbers=NUMBERS)

    def gradient(x: jax.Array, filters: jax.Array, cotangent: jax.Array) -> jax.Array:
        (found,) = jax.vjp(lambda filters: convolve(x, filters), filters)[1](cotangent)
        return found

    shapes = (examples, side, side, contracted), (3, 3, contracted, features), (examples, side, side, features)
    avals = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    jaxpr = jax.make_jaxpr(gradient)(*avals) if is_gradient else jax.make_jaxpr(convolve)(*avals[:2])
    program = inline(jaxpr, with_barriers=True, keep_names=False)
    (found,) = [e for e in program.equations if e.primitive is lax.conv_general_dilated_p]
    return found, program, parts_of(program)


@pytest.mark.parametrize(
    ("examples", "contracted", "features", "share"),
    [
        (16, 128, 128, 1.0),
        (16, 128, 256, 1.0),
        (16, 192, 128, 0.75),  # two passes of 128 rows
        (16, 64, 128, 0.5),
        (16, 32, 32, 1 / 16),
        (128, 128, 8, 1.0),  # the examples are in the lanes
        (128, 128, 3, 3 / 8),
        (12, 128, 128, 0.75),  # eight rows at a time
        (16, 3, 32, 9 / 512),  # colours of three places
        (16, 5, 32, 5 / 512),
    ],
)
def test_few_features_leave_rows_and_lanes_empty(examples: int, contracted: int, features: int, share: float) -> None:
    assert math.isclose(share_in_use(*convolution_of(examples, 16, contracted, features)), share)


@pytest.mark.parametrize(("examples", "contracted", "share"), [(8, 128, 1.0), (8, 32, 1.0), (9, 128, 1.0)])
def test_gradients_of_weights_contract_examples_and_places(examples: int, contracted: int, share: float) -> None:
    """The filter's features are the result's examples and features."""
    found = share_in_use(*convolution_of(examples, 16, contracted, 128, is_gradient=True))
    assert math.isclose(found, share)


def test_parts_of_images_are_examples() -> None:
    convolution, program, parts = convolution_of(4, 16, 128, 128)
    assert convolution.outputs[0] in parts.cut
    assert share_in_use(convolution, program, parts) == 1.0
    whole = dataclasses.replace(parts, cut={})
    assert share_in_use(convolution, program, whole) == 0.5


def test_a_convolution_of_nothing_fills_them() -> None:
    assert share_in_use(*convolution_of(0, 16, 128, 128)) == 1.0
