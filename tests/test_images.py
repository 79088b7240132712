"""Which arrays a TPU stores as images."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from remat_opt.rewrites.captured import capture
from remat_opt.trace.images import images_of

pytestmark = pytest.mark.short

X = jax.ShapeDtypeStruct((8, 16, 16, 4), jnp.float32)
FILTERS = jax.ShapeDtypeStruct((3, 3, 4, 6), jnp.float32)
BIAS = jax.ShapeDtypeStruct((6,), jnp.float32)


def convolve(x: jax.Array, filters: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(x, filters, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def images(step, *arguments: jax.ShapeDtypeStruct) -> set[tuple[int, ...]]:
    """The shapes of the images of a step."""
    program = capture(jax.jit(step), arguments, {}).program
    return {program.avals[value].shape for value in images_of(program)}


def test_what_elementwise_work_makes_of_an_image_is_one() -> None:
    program = capture(jax.jit(lambda x, w: jnp.tanh(jnp.sin(convolve(x, w)))), (X, FILTERS), {}).program
    shapes = [program.avals[value].shape for value in images_of(program)]
    assert sorted(shapes) == [X.shape, *[(8, 16, 16, 6)] * 3]  # before, between and after sine and tanh


def test_a_bias_and_filters_are_none() -> None:
    found = images(lambda x, w, bias: convolve(x, 2 * w) + bias, X, FILTERS, BIAS)
    assert found == {X.shape, (8, 16, 16, 6)}


def test_what_is_cut_of_an_image_is_one_and_what_only_has_four_axes_is_not() -> None:
    other = X.update(shape=(9,) * 4)
    found = images(lambda x, w, other: (convolve(x, w)[:, :4, :5], jnp.sin(other)), X, FILTERS, other)
    assert found == {X.shape, (8, 16, 16, 6), (8, 4, 5, 6)}


def test_gradients_of_images_are_images_and_of_filters_none() -> None:
    found = images(jax.grad(lambda x, w: jnp.sin(convolve(x, w)).sum(), (0, 1)), X, FILTERS)
    assert FILTERS.shape not in found
    assert X.shape in found
