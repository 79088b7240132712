"""Masks of rectifiers made from their outputs, where that frees the input."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import primitives
from step_networks import conv
from written_programs import evaluate

from remat_opt.rewrites.masks import mask_by_outputs
from remat_opt.trace.inline import Constant, Program, inline

pytestmark = pytest.mark.short

X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 6, 3)), jnp.float32)
KERNEL = jnp.asarray(np.random.default_rng(1).normal(size=(3, 3, 3, 3)), jnp.float32)
BIAS = jnp.zeros(3)


def with_bias(kernel, bias):
    return (jax.nn.relu(conv(jax.nn.relu(conv(X, kernel) + bias), kernel)) ** 2).sum()


def with_product(kernel, bias):
    return (jax.nn.relu(X @ kernel[0, 0] + bias) ** 2).sum()


def with_norm(kernel, bias):
    y = conv(X, kernel)
    return (jax.nn.relu((y - y.mean()) * lax.rsqrt(y.var() + 1e-5) + bias) ** 2).sum()


def with_residual(kernel, bias):
    return (jax.nn.relu(X + conv(X, kernel) * bias) ** 2).sum()


def also_read(kernel, bias):
    y = conv(X, kernel) + bias
    return (jax.nn.relu(y) + jnp.tanh(y)).sum()


def masks_of_outputs(program: Program) -> list[bool]:
    """For each `x > 0` whether x is a rectifier's output."""
    made = {value: equation.primitive for equation in program.equations for value in equation.outputs}
    asked = [e.inputs[0] for e in program.equations if e.primitive is primitives.gt_p]
    return [not isinstance(x, Constant) and made.get(x) is primitives.max_p for x in asked]


@pytest.mark.parametrize(
    ("loss", "changed"), [(with_bias, 2), (with_product, 1), (with_norm, 0), (with_residual, 0), (also_read, 0)]
)
def test_where_the_mask_is_made_from_the_output(loss: Callable, changed: int) -> None:
    given = inline(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(KERNEL, BIAS))
    found = mask_by_outputs(given)
    assert sum(masks_of_outputs(given)) == 0
    assert sum(masks_of_outputs(found)) == changed
    for one, other in zip(evaluate(found, KERNEL, BIAS), evaluate(given, KERNEL, BIAS), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, -1e-45, np.inf, -np.inf, np.nan])
def test_the_output_says_the_same_as_the_input(value: float) -> None:
    x = jnp.float32(value)
    assert bool(jnp.maximum(x, 0.0) > 0) == bool(x > 0)
