"""Zeros that loops begin with, and loops of one turn, against the compilers."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from foreseen import foreseen, foreseen_and_compiled
from jax import lax
from jax.extend import core as extend_core
from jax.extend.core import primitives as P

from remat_opt.program.inline import inline
from remat_opt.program.unrolled import single_turn

LENGTH, BATCH, WIDTH = 256, 32, 64
STACK = 4 * LENGTH * BATCH * WIDTH
XS = jax.ShapeDtypeStruct((LENGTH, BATCH, WIDTH), jnp.float32)
WEIGHT = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
NOTHING = jnp.zeros((BATCH, WIDTH))


def turn(weight: jax.Array) -> Callable:
    def step(state: jax.Array, given: jax.Array) -> tuple:
        state = jnp.tanh(state @ weight + given)
        return state, state

    return step


def later(x: jax.Array, weight: jax.Array) -> jax.Array:
    """A loop behind other work."""
    x = jnp.cumsum(x @ weight, 0) @ weight
    return lax.scan(turn(weight), NOTHING, x)[1].sum()


def one_behind_the_other(x: jax.Array, weight: jax.Array) -> jax.Array:
    for _ in range(3):
        _, x = lax.scan(turn(weight), NOTHING, x)
    return x.sum()


def side_by_side(x: jax.Array, weight: jax.Array) -> jax.Array:
    _, one = lax.scan(turn(weight), NOTHING, x)
    _, other = lax.scan(turn(weight), NOTHING, x, reverse=True)
    return (one @ weight).sum() + (other @ weight).max()


def differentiated(x: jax.Array, weight: jax.Array) -> jax.Array:
    """What a turn stacks twice, as its result and for its derivative, is one stack on a GPU."""

    def loss(weight: jax.Array) -> jax.Array:
        _, hidden = lax.scan(turn(weight), NOTHING, x)
        return lax.scan(turn(weight), NOTHING, hidden)[1].sum()

    return jax.grad(loss)(weight)


@pytest.mark.parametrize(
    ("function", "target", "stacks"),
    [
        (later, "cpu", 3),  # the zeros are there before everything
        (later, "h200", 2),  # and only before the loop
        (one_behind_the_other, "cpu", 3),
        (one_behind_the_other, "h200", 3),  # in one kernel
        (side_by_side, "cpu", 3),  # neither loop may change the zeros that the other copies
        (differentiated, "h200", 7),
    ],
)
def test_zeros_that_loops_begin_with_are_foreseen(function: Callable, target: str, stacks: int) -> None:
    expected, compiled = foreseen_and_compiled(function, XS, WEIGHT, target=target)
    assert compiled == pytest.approx(stacks * STACK, abs=0.1 * STACK)
    assert expected == pytest.approx(compiled, abs=0.1 * STACK)


def test_zeros_whose_first_array_nobody_changes_come_first_on_a_gpu() -> None:
    """Loops side by side change copies of it, and XLA's depth-first order begins with what nobody reads: zeros for what
    is wide later are there when the first loop begins."""

    def remembered(x: jax.Array, weight: jax.Array, reverse: bool) -> jax.Array:
        def step(state: tuple[jax.Array, jax.Array], given: jax.Array) -> tuple:
            hidden, cells = state
            inwards, candidate, outwards = jnp.split(given + hidden @ weight, 3, -1)
            cells = jax.nn.sigmoid(inwards) * cells + jnp.tanh(candidate)
            hidden = jax.nn.sigmoid(outwards) * jnp.tanh(cells)
            return (hidden, cells), hidden

        return lax.scan(step, (NOTHING, NOTHING), x, reverse=reverse)[1]

    def loss(x: jax.Array, first: jax.Array, second: jax.Array, last: jax.Array) -> jax.Array:
        hidden = (jnp.tanh(remembered(x, first, False)) + remembered(x, second, True)) @ last

        def add(state: jax.Array, given: jax.Array) -> tuple:
            return jnp.tanh(state + given), None

        return jnp.square(lax.scan(add, jnp.zeros((BATCH, 4 * WIDTH)), hidden)[0]).sum()

    x, weight, last = (
        jax.ShapeDtypeStruct(shape, jnp.float32)
        for shape in ((LENGTH, BATCH, 3 * WIDTH), (WIDTH, 3 * WIDTH), (WIDTH, 4 * WIDTH))
    )
    expected, compiled = foreseen_and_compiled(jax.grad(loss, (0, 1, 2, 3)), x, weight, weight, last, target="h200")
    assert compiled == pytest.approx(41 * STACK, abs=0.1 * STACK)
    assert expected == pytest.approx(compiled, abs=0.1 * STACK)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_loop_of_one_turn_is_none(reverse: bool) -> None:
    def run(weight: jax.Array, state: jax.Array, x: jax.Array) -> tuple:
        return lax.scan(turn(weight), state, x, reverse=reverse)

    weight, state, x = (jnp.full(shape, 0.1) for shape in ((4, 4), (2, 4), (1, 2, 4)))
    closed = jax.make_jaxpr(run)(weight, state, x)
    (loop,) = closed.eqns
    assert P.scan_p not in {one.primitive for one in inline(closed, with_barriers=True).equations}
    assert P.scan_p in {one.primitive for one in inline(closed).equations}
    once = extend_core.jaxpr_as_fun(single_turn(loop))
    for found, expected in zip(once(weight, state, x), jax.tree.leaves(run(weight, state, x)), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("length", "width", "arrays"),
    [
        (95, 48, 1),  # turns fill the lanes best: what one turn puts there is as large as the stack
        (100, 72, 2),  # neither is on the chip
        (120, 40, 0),  # both are
        (30, 48, 0),
    ],
)
def test_slices_of_stacks_with_turns_in_the_lanes_are_foreseen(length: int, width: int, arrays: int) -> None:
    """As libtpu 0.0.51 compiles it: 75.6, 339.9, 0.0 and 0.0 MB."""

    def loss(weight: jax.Array, x: jax.Array) -> jax.Array:
        def step(state: jax.Array, given: jax.Array) -> tuple:
            return jax.nn.logsumexp(state[:, :, None] + weight + given[:, None], 1), None

        return lax.scan(step, jnp.zeros((64, width)), x)[0].sum()

    weight, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((width, width), (length, 64, width)))
    stack = 4 * 128 * 64 * width * width
    assert foreseen(jax.grad(loss), weight, x, gaps_twice=False) == pytest.approx(arrays * stack, abs=0.02 * stack)
