"""Elementwise work between a TPU's convolutions: the first does it on its result, or the second on its operand."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from foreseen import foreseen_and_compiled
from jax import lax

from remat_opt.compilers.model import compiled
from remat_opt.graph.cost import Rates
from remat_opt.program.inline import inline

IMAGES, FEATURES = (64, 64, 64, 64), 64
FOUR_BYTES = 64 * 64 * 64 * 128 * 4  # of an image, whose features lie in 128 lanes
SHAPES = IMAGES, (3, 3, FEATURES, FEATURES), (1, 1, FEATURES, FEATURES), (FEATURES,), (3, 3, FEATURES, 32)


def convolved(image: jax.Array, kernel: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def leaky(x: jax.Array) -> jax.Array:
    return jnp.where(x >= 0, x, 0.2 * x)


def pooled(x: jax.Array) -> jax.Array:
    return lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


@pytest.mark.parametrize(
    ("function", "stored"),
    [
        pytest.param(lambda x, w, v, b, u: convolved(convolved(x, w) + jnp.sin(x), u), 1, id="with another image"),
        pytest.param(lambda x, w, v, b, u: convolved(convolved(x, w) + convolved(x, v), u), 2, id="of two"),
        pytest.param(lambda x, w, v, b, u: convolved(leaky(convolved(x, w) + b), u), 1, id="read by several"),
        pytest.param(lambda x, w, v, b, u: pooled(convolved(x, w) + convolved(x, v)), 2, id="of two for a pool"),
    ],
)
def test_the_second_convolution_does_what_needs_more_than_one_result(function: Callable, stored: int) -> None:
    avals = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in SHAPES]
    foreseen, found = foreseen_and_compiled(function, *avals)
    assert found == pytest.approx(stored * FOUR_BYTES, abs=2**20)
    assert foreseen == pytest.approx(found, abs=2**20)


@pytest.mark.parametrize(("work", "readers", "rounded"), [(jnp.tanh, 1, True), (leaky, 1, False), (leaky, 2, True)])
def test_the_first_convolution_stores_two_bytes_of_what_it_does_to_the_end(
    work: Callable, readers: int, rounded: bool
) -> None:
    def step(x: jax.Array, w: jax.Array, v: jax.Array, b: jax.Array, u: jax.Array) -> list[jax.Array]:
        seen = work(convolved(x, w) + b)
        return [convolved(seen, at * u) for at in range(1, 1 + readers)]

    avals = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in SHAPES]
    program = inline(jax.make_jaxpr(step)(*avals), with_barriers=True, keep_names=False)
    graph = compiled(program, Rates(1e9, {"float32": 1e16}), platform="tpu")
    first, *others = [op for op in graph.ops if op.name == "conv_general_dilated"]
    assert len(first.inputs) == 3  # with the bias
    assert all(first.outputs[0] in op.inputs for op in others)
    assert first.seconds == pytest.approx(sum_of_bytes(rounded) / 1e9, rel=0.2)


def sum_of_bytes(rounded: bool) -> int:
    """What the first convolution reads and writes."""
    return FOUR_BYTES + FOUR_BYTES // (1 + rounded)
