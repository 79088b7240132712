"""Values that take no buffer of their own."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import temp_bytes
from jax import lax

import remat_opt
from remat_opt.rewrites.captured import capture
from remat_opt.trace.inline import Program
from remat_opt.trace.views import views_of

pytestmark = pytest.mark.short

X = jax.ShapeDtypeStruct((64, 32), jnp.float32)


def program_of(step: Callable) -> Program:
    return capture(jax.jit(step), (X,), {}).program


def summed(x: jax.Array) -> jax.Array:
    return lax.scan(lambda total, row: (total + jnp.sin(row).sum(), None), 0.0, x)[0]


def rows(x: jax.Array) -> jax.Array:
    return lax.scan(lambda _, row: (None, jnp.sin(row)), None, x)[1]


@pytest.mark.parametrize(
    ("step", "views"),
    [
        (lambda x: summed(x.reshape(8, 8, 32)), 1),
        (lambda x: summed(x.reshape(2048, 1).reshape(16, 128)), 2),
        (lambda x: summed((2 * x).reshape(8, 8, 32)), 0),  # of what is no argument
        (lambda x: summed(x.T.reshape(8, 8, 32)), 0),
        (lambda x: x.reshape(8, 8, 32), 0),  # a result of its own
        (lambda x: rows(x).reshape(8, 8, 32), 1),
        (lambda x: (lambda y: (y, y.reshape(8, 8, 32)))(rows(x)), 0),  # two results
        (lambda x: (2 * x).reshape(8, 8, 32), 0),
    ],
)
def test_reshapes_of_arguments_and_of_stacks_that_are_results_are_views(step: Callable, views: int) -> None:
    program = program_of(step)
    assert len(views_of(program, "cuda")) == len(views_of(program, "cpu")) == views
    assert views_of(program, "tpu") == {}


def micro_batches(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Gradients added up over parts of the batch, whose losses are returned in another shape."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        h = x
        for _ in range(6):
            h = jnp.tanh(jnp.sin(h) @ w)
        return (h**2).mean()

    def step(total: jax.Array, part: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(w, part)
        return total + gradient, value * part

    total, losses = lax.scan(step, jnp.zeros_like(w), x.reshape(8, -1, x.shape[1]))
    return w - 0.1 * total, losses.reshape(x.shape)


def test_a_step_with_views_is_predicted_and_computes_the_same() -> None:
    w, x = (jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32) for shape in ((64, 64), (4096, 64)))
    optimized, plain = remat_opt.optimize(micro_batches, split=False), jax.jit(micro_batches)
    for one, other in zip(optimized(w, x), plain(w, x), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    predicted = optimized.plan(w, x).predicted.plain_peak_bytes
    assert predicted == pytest.approx(temp_bytes(plain, w, x), rel=0.2)
    donated = remat_opt.optimize(micro_batches, split=False, donate_argnums=1)
    expected = plain(w, x)
    for one, other in zip(donated(w, jnp.array(x)), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
