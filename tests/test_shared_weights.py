"""Weights that are used in many places: the parts of a gradient's sum are added up as they come."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_opt
from remat_opt.graph.derive import early_order
from remat_opt.graph.fusion import fuse
from remat_opt.graph.graph import Graph, Kind, Op
from remat_opt.graph.liveness import peak_of

TIMES, WIDTH, ROWS = 24, 256, 64


def product(made: int, *read: int) -> Op:
    return Op(read, (made,), kind=Kind.CONTRACTION)


def work(made: int, *read: int) -> Op:
    return Op(read, (made,), kind=Kind.ELEMENTWISE)


# Of a weight (0) and its momentum (1): a gradient is the sum 14 of four parts 2 to 5, between which the backward pass
# goes on by small steps 6 to 9.
PARTS = Graph(
    (8, 8, 8, 8, 8, 8, 1, 1, 1, 1, 8, 8, 8, 8, 8),
    (
        product(6, 0),
        product(2, 6),
        product(7, 6),
        product(3, 7),
        work(10, 2, 3),
        product(8, 7),
        product(4, 8),
        work(11, 10, 4),
        product(9, 8),
        product(5, 9),
        work(14, 11, 5),
        work(12, 14, 1),  # the momentum
        work(13, 0, 12),
    ),
    inputs=(0, 1),
    outputs=(12, 13),
    aliases=((1, 12), (0, 13)),
)


def test_a_part_of_a_sum_that_waits_for_the_rest_is_a_buffer() -> None:
    summed = fuse(PARTS, with_sums=True)
    assert summed.sums == {10, 11}, "the whole sum is read by the update at once"
    assert peak_of(summed.graph) < peak_of(fuse(PARTS).graph)


def test_what_frees_more_than_it_makes_is_not_put_off_to_the_update() -> None:
    graph = fuse(PARTS, with_sums=True).graph
    order = [graph.ops[op].outputs for op in early_order(graph)]
    assert order.index((10,)) < order.index((4,)) < order.index((11,)) < order.index((5,))


def step(state: Any, frames: jax.Array) -> Any:
    """A recurrent network, written out: every time uses the same two weights."""

    def loss(state: Any) -> jax.Array:
        hidden, total = jnp.zeros((ROWS, WIDTH)), 0.0
        for frame in frames:
            hidden = jnp.tanh(hidden @ state["hidden"] + jnp.sin(frame @ state["input"]))
            total += (hidden**2).mean()
        return total

    value, gradients = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda weight, gradient: weight - 0.1 * gradient, state, gradients), value


def arguments() -> tuple[Any, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    state = {
        name: jax.random.normal(key, (WIDTH, WIDTH)) / 16
        for name, key in zip(("hidden", "input"), keys[:2], strict=True)
    }
    return state, jax.random.normal(keys[2], (TIMES, ROWS, WIDTH))


@pytest.mark.parametrize("target", ["cpu", "h200"])
def test_a_recurrent_network_that_is_written_out_needs_few_gradients(target: str) -> None:
    state, frames = arguments()
    found = remat_opt.measure(jax.jit(step, donate_argnums=0), state, frames, target=target)
    weight = 4 * WIDTH * WIDTH
    assert found.plain is not None
    assert found.optimized is not None
    assert found.optimized.temp_bytes < 0.5 * found.plain.temp_bytes
    assert found.optimized.temp_bytes < TIMES * weight, "expected not one gradient for every time"


def test_it_computes_the_same() -> None:
    found = remat_opt.optimize(step)(*arguments())
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(jax.jit(step)(*arguments())), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
