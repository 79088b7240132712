"""A `shard_map` that communicates becomes two: what depends on a collective, and what may be recomputed."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import remat_opt
from remat_opt.trace.effects import communicates
from remat_opt.trace.inline import Program, can_recompute, inline
from remat_opt.trace.mapped import in_two_parts

P = PartitionSpec
MESH = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
X, W = jnp.ones((512, 16)), 0.1 * jnp.ones((16, 64))


def mapped(fun: Any, outputs: Any) -> Any:
    return jax.shard_map(fun, mesh=MESH, in_specs=(P(), P(None, "model")), out_specs=outputs)


def sent(program: Any) -> list[bool]:
    return [communicates(equation.primitive, equation.params) for equation in program.equations]


def test_what_does_not_depend_on_a_collective_stands_alone() -> None:
    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        hidden = jnp.sin(x @ w)
        return lax.psum(hidden.sum(1), "model"), hidden

    program = inline(jax.make_jaxpr(mapped(layer, (P(), P(None, "model"))))(X, W))
    assert sent(program) == [True]
    divided = in_two_parts(program)
    assert sent(divided) == [True, False]
    assert [equation.outputs for equation in divided.equations] == [(program.outputs[0],), (program.outputs[1],)]


@pytest.mark.parametrize("collective", [lambda x: lax.ppermute(x, "model", [(0, 0)]), lambda x: lax.pmax(x, "model")])
def test_collectives_are_known_without_their_effects(collective: Any) -> None:
    program = inline(jax.make_jaxpr(mapped(lambda x, w: collective(x @ w), P(None, "model")))(X, W))
    assert sent(program) == [True]


def test_indices_and_casts_send_nothing() -> None:
    def tell(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.pcast(x, "model", to="varying") @ w + lax.axis_index("model")

    program = inline(jax.make_jaxpr(mapped(tell, P(None, "model")))(X, W))
    assert sent(program) == [False]


def test_what_an_explicit_reshard_puts_together_is_not_put_together_again() -> None:
    mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Explicit,))

    def resharding(before: PartitionSpec, after: PartitionSpec) -> Program:
        with jax.set_mesh(mesh):
            return inline(jax.make_jaxpr(lambda x: jax.sharding.reshard(x, after))(jax.device_put(X, before)))

    gathering, dividing = (resharding(*specs) for specs in ((P("model", None), P()), (P(), P("model", None))))
    assert not can_recompute(gathering, gathering.equations[0])
    assert can_recompute(dataclasses.replace(gathering, repeats_collectives=True), gathering.equations[0])
    assert can_recompute(dividing, dividing.equations[0])


def test_one_that_cannot_be_divided_stays_and_the_user_is_told() -> None:
    def layers(x: jax.Array, w: jax.Array) -> jax.Array:
        for _ in range(6):
            x = lax.psum(jnp.sin(x @ w) @ w.T, "model") / 8
        return x

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, gradient = jax.value_and_grad(lambda w: (mapped(layers, P())(x, w) ** 2).mean())(w)
        return w - 0.1 * gradient, loss

    optimized = remat_opt.optimize(step)
    with pytest.warns(remat_opt.RematWarning, match="repeat_collectives=True allows it"):
        plan = optimized.plan(W, X)
    assert plan.is_plain
    np.testing.assert_allclose(optimized(W, X)[1], jax.jit(step)(W, X)[1], rtol=1e-6)
