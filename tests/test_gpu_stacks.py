"""Stacks that one loop writes in another order than the next one reads, against XLA's GPU compiler."""

import jax
import jax.numpy as jnp
import pytest
from foreseen import foreseen_and_compiled
from jax import lax

from remat_opt.compilers.gpu_stacks import orders_in_body

LENGTH, BATCH = 40, 64


def chances(weight: jax.Array, x: jax.Array) -> jax.Array:
    """All ways through tags that neighbours share: sums over the tags before."""

    def step(state: jax.Array, given: jax.Array) -> tuple:
        return jax.nn.logsumexp(state[:, :, None] + weight + given[:, None], 1), None

    return lax.scan(step, jnp.zeros((BATCH, weight.shape[0])), x)[0].sum()


def avals(tags: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    return (
        jax.ShapeDtypeStruct((tags, tags), jnp.float32),
        jax.ShapeDtypeStruct((LENGTH, BATCH, tags), jnp.float32),
    )


@pytest.mark.parametrize("tags", [48, 40])
def test_a_stack_that_is_summed_otherwise_on_the_way_back_is_copied(tags: int) -> None:
    """It is written with the tags that are summed side by side, and read with the batch so."""
    stack = 4 * LENGTH * BATCH * tags * tags
    expected, compiled = foreseen_and_compiled(jax.grad(chances), *avals(tags), target="h200")
    assert compiled == pytest.approx(2 * stack, rel=0.1)
    assert expected == pytest.approx(compiled, rel=0.05)


def test_a_stack_that_is_only_multiplied_stays_as_it_is() -> None:
    def multiplied(weight: jax.Array, x: jax.Array) -> jax.Array:
        def step(state: jax.Array, given: jax.Array) -> tuple:
            state = jnp.sin(state) * given[:, None] * weight
            return state, None

        return lax.scan(step, jnp.ones((BATCH, 48, 48)), x)[0].sum()

    stack = 4 * LENGTH * BATCH * 48 * 48
    expected, compiled = foreseen_and_compiled(jax.grad(multiplied, 1), *avals(48), target="h200")
    assert expected == pytest.approx(compiled, abs=0.1 * stack)


@pytest.mark.parametrize(("mixed", "written"), [(False, (0, 1, 2)), (True, (0, 2, 1))])
def test_orders_spread_from_what_a_loop_carries(mixed: bool, written: tuple[int, ...]) -> None:
    def loss(weight: jax.Array, x: jax.Array) -> jax.Array:
        def step(state: jax.Array, given: jax.Array) -> tuple:
            following = jax.nn.logsumexp(state[:, :, None] + weight + given[:, None], 1)
            return (state + following if mixed else following), None

        return lax.scan(step, jnp.zeros((BATCH, 48)), x)[0].sum()

    closed = jax.make_jaxpr(jax.grad(loss, (0, 1)))(*avals(48))
    forwards, backwards = (one for one in closed.eqns if one.primitive.name == "scan")
    _, made = orders_in_body(forwards.params)
    given, _ = orders_in_body(backwards.params)
    assert written in made  # beside what is carried the tags that are summed lie side by side
    assert (1, 2, 0) in given  # the batch does: the weight's gradient is carried


def test_a_product_in_the_body_leaves_the_orders_to_it() -> None:
    def step(state: jax.Array, given: jax.Array) -> tuple:
        return (state @ given), state.sum(0)

    closed = jax.make_jaxpr(lambda state, xs: lax.scan(step, state, xs))(jnp.ones((64, 48)), jnp.ones((4, 48, 48)))
    given, made = orders_in_body(closed.eqns[0].params)
    assert {*given, *made} == {None}
