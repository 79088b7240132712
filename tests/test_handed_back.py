"""What a loop hands back as it was is read where it went in, and no copy of it is made."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import remat_opt
from remat_opt.rewrites.captured import capture
from remat_opt.trace.inline import Program

LENGTH, BATCH, WIDTH = 6, 64, 16


def layers(w: jax.Array, x: jax.Array) -> tuple:
    """A scan that hands back its stack, in the middle of its results, and a carry that no step changes."""
    layer = jax.checkpoint(lambda h, w: ((jnp.tanh(h[0] @ w), h[1]), (h[0], w)))  # else JAX sees it by itself
    (y, same), (_, back) = lax.scan(layer, (x, w[0]), w)
    return y, same, back


def nested(w: jax.Array, x: jax.Array) -> tuple:
    def turn(h: jax.Array, w: jax.Array) -> tuple:
        y, _, back = layers(jnp.stack([w, 2 * w]), h)
        return y, back[0]

    y, back = lax.scan(turn, x, w)
    return y, w[0], back


def step_of(function: Callable) -> Callable:
    """An update of what came out of the loop."""

    def step(w: jax.Array, x: jax.Array) -> tuple:
        def loss(w: jax.Array) -> tuple:
            y, same, back = function(w, x)
            return jnp.mean(y**2), (same, back)

        (value, (same, back)), gradient = jax.value_and_grad(loss, has_aux=True)(w)
        return back - 0.1 * gradient, value, same

    return step


def arguments(width: int = WIDTH) -> tuple:
    keys = jax.random.split(jax.random.key(0))
    return jax.random.normal(keys[0], (LENGTH, width, width)) / 8, jax.random.normal(keys[1], (BATCH, width))


def stacks_made_forward(program: Program) -> int:
    """How many stacks of weights the first loop of a program makes."""
    loop = next(one for one in program.equations if one.primitive.name == "scan")
    return sum(program.avals[value].shape == (LENGTH, WIDTH, WIDTH) for value in loop.outputs)


@pytest.mark.short
@pytest.mark.parametrize("function", [layers, jax.jit(layers)])
def test_a_stack_and_a_carry_are_read_where_they_went_in(function: Callable) -> None:
    found = capture(jax.jit(step_of(function)), arguments(), {})
    assert (stacks_made_forward(found.original), stacks_made_forward(found.program)) == (1, 0)


@pytest.mark.short
def test_a_program_without_them_is_not_read_again() -> None:
    found = capture(jax.jit(lambda w, x: lax.scan(lambda h, w: (h @ w, 2 * w), x, w)), arguments(), {})
    assert found.program is found.original


@pytest.mark.filterwarnings("ignore::remat_opt.RematWarning")
@pytest.mark.parametrize("function", [layers, jax.jit(layers), nested])
def test_values(function: Callable) -> None:
    step = step_of(function)
    expected = jax.jit(step)(*arguments())
    optimized = remat_opt.optimize(jax.jit(step, donate_argnums=0), verify=False)
    for one, other in zip(optimized(*arguments()), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore::remat_opt.RematWarning")
def test_what_comes_back_alone_is_the_argument() -> None:
    expected, given = jax.jit(layers)(*arguments()), arguments()
    found = remat_opt.optimize(jax.jit(layers, donate_argnums=0))(*given)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("target", ["cpu", "h200"])
def test_an_update_of_the_stack_needs_no_second_one(target: str) -> None:
    def temporary(function: Callable) -> int:
        step = jax.jit(step_of(function), donate_argnums=0)
        return remat_opt.measure(step, *arguments(256), target=target).optimized.temp_bytes

    assert temporary(layers) < 1.05 * temporary(lambda w, x: (*layers(w, x)[:2], w))
