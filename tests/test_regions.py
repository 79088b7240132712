"""A gradient that is taken inside a `shard_map` or under a condition is divided into segments there."""

import jax
import jax.numpy as jnp
import loop_models as models
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import remat_opt
from remat_opt.graph.cost import Rates
from remat_opt.planner.loop_search import body_in_segments
from remat_opt.rewrites.captured import capture
from remat_opt.search import SOLVERS

LAYERS, WIDTH, BATCH = 12, 16, 512
P = PartitionSpec


def loss(params, x):
    for w in params:
        x = jnp.tanh(jnp.sin(x @ w))
    return (x**2).mean()


def descend(params, gradients):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


def mapped(devices):
    """Each device takes the gradient of its part of the batch."""
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def of_one_device(params, x):
        value, gradients = jax.value_and_grad(lambda p: loss(lax.pcast(p, "data", to="varying"), x))(params)
        return descend(params, lax.pmean(gradients, "data")), lax.pmean(value, "data")

    step = jax.shard_map(of_one_device, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P()))
    return step, (params(), models.normal(20, devices * BATCH, WIDTH))


def conditional():
    """Nothing is learnt from a batch without numbers."""

    def step(params, x):
        def learn(params, x):
            return descend(params, jax.grad(loss)(params, x))

        return lax.cond(jnp.isfinite(x).all(), learn, lambda params, x: params, params, x), jnp.float32(0)

    return step, (params(), models.normal(20, BATCH, WIDTH))


def params():
    return [models.normal(i, WIDTH, WIDTH) for i in range(LAYERS)]


STEPS = {"one device": lambda: mapped(1), "cond": conditional}


@pytest.mark.short
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("donate", [(), (0,)])
def test_it_takes_less_memory_and_computes_the_same(name, donate):
    step, arguments = STEPS[name]()
    plain, optimized = jax.jit(step, donate_argnums=donate), remat_opt.optimize(step, donate_argnums=donate)
    assert optimized.plan(*arguments).loop_bodies == 1
    temporary = [f.lower(*arguments).compile().memory_analysis().temp_size_in_bytes for f in (plain, optimized)]
    assert temporary[1] < 0.6 * temporary[0]
    expected = jax.jit(step)(*arguments)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), optimized(*arguments), expected)


def test_a_branch_that_is_not_taken_changes_nothing():
    step, (weights, x) = conditional()
    found, _ = remat_opt.optimize(step)(weights, x.at[0, 0].set(jnp.nan))
    jax.tree.map(np.testing.assert_array_equal, found, weights)


def test_a_body_in_which_one_operation_needs_almost_all_is_not_searched(monkeypatch):
    searched = []
    search = SOLVERS["auto"]
    monkeypatch.setitem(SOLVERS, "auto", lambda problem, budget: searched.append(problem) or search(problem, budget))

    def in_segments(fun):
        program = capture(jax.jit(fun), (params(), models.normal(20, BATCH, WIDTH)), {}).program
        return body_in_segments(program, Rates(4e12, {"float32": 6e13}), (False,) * len(program.inputs), 0.0, {})

    assert in_segments(loss) is None  # forward alone: a layer's operand and result, and nothing else
    assert not searched
    assert in_segments(jax.grad(loss)) is not None
    assert searched


def test_a_step_with_optax_microbatch_is_scheduled_inside_its_loop():
    def of_part(params, x):
        return jax.value_and_grad(loss)(params, x)

    def step(params, x):
        value, gradients = optax.microbatch(of_part, argnums=1, microbatch_size=BATCH)(params, x)
        return descend(params, jax.tree.map(lambda g: g / 4, gradients)), value / 4

    arguments = params(), models.normal(21, 4 * BATCH, WIDTH)
    optimized = remat_opt.optimize(step, budget=0.7)
    plan = optimized.plan(*arguments)
    assert (plan.chunks, plan.loop_bodies) == (0, 1)
    found, expected = optimized(*arguments), jax.jit(step)(*arguments)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6), found, expected)
