"""A step may need less for its order alone: nothing is recomputed, and yet it is written."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flop_walk import flops_of

import remat_opt
from remat_opt import Plan, PlanError, optimize
from remat_opt.callable.compiling import compile_candidate
from remat_opt.planner.prepared import prepare
from remat_opt.rewrites.captured import capture
from remat_opt.targets import resolve_target
from remat_opt.targets.options import compiler_options_for
from remat_opt.trace import compat

TIMES, WIDTH, ROWS = 24, 256, 64


def recurrent_step(weight: jax.Array, frames: jax.Array) -> jax.Array:
    """Every time uses the same weight, and XLA leaves its gradient's parts to be added up at the end."""

    def loss(weight: jax.Array) -> jax.Array:
        hidden, total = jnp.zeros((ROWS, WIDTH)), 0.0
        for frame in frames:
            hidden = jnp.tanh(hidden @ weight + frame)
            total += (hidden**2).mean()
        return total

    return weight - 0.1 * jax.grad(loss)(weight)


KEYS = jax.random.split(jax.random.key(0), 3)
WEIGHT = jax.random.normal(KEYS[0], (WIDTH, WIDTH)) / 16
FRAMES = jax.random.normal(KEYS[1], (TIMES, ROWS, WIDTH))
ON_ANOTHER_TARGET = pytest.mark.filterwarnings("ignore:remat_opt. recurrent_step. planned for h200")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return optimize(recurrent_step, target="h200", budget=0.6, donate_argnums=0).plan(WEIGHT, FRAMES)


@ON_ANOTHER_TARGET
def test_a_budget_that_our_order_keeps_costs_nothing(plan: Plan) -> None:
    assert plan.reordered
    assert not plan.is_plain
    assert not plan.schedule.recomputed
    assert plan.predicted.extra_flops == plan.predicted.extra_seconds == 0
    assert plan.measured is not None
    assert plan.plain_measured is not None
    assert plan.measured.temp_bytes <= 0.6 * plan.plain_measured.temp_bytes
    # One buffer of the weight's size is missing from the prediction.
    assert plan.predicted.peak_bytes == pytest.approx(plan.measured.temp_bytes, abs=1.1 * WEIGHT.nbytes)


@ON_ANOTHER_TARGET
def test_it_is_kept_in_a_file_and_taken_over_from_it(plan: Plan) -> None:
    again = Plan.from_json(plan.to_json())
    assert again == plan
    step = optimize(recurrent_step, target="h200", plan=again, donate_argnums=0)
    assert step.plan(WEIGHT, FRAMES).reordered
    assert "another order" in " ".join(str(step.explain(WEIGHT, FRAMES)).split())
    jaxpr = step.jaxpr(WEIGHT, FRAMES)
    assert "optimization_barrier" in str(jaxpr)
    given = compat.without_dead_code(jax.jit(recurrent_step).trace(WEIGHT, FRAMES).jaxpr)
    assert 0.999 * flops_of(given) < flops_of(jaxpr) <= flops_of(given)
    expected = recurrent_step(WEIGHT, FRAMES)
    np.testing.assert_allclose(step(WEIGHT + 0, FRAMES), expected, rtol=1e-5, atol=1e-6)


def test_a_file_that_does_not_say_so_any_more_is_damaged(plan: Plan) -> None:
    document = json.loads(plan.to_json())
    del document["in_our_order"]
    with pytest.raises(PlanError, match="schedule"):
        Plan.from_json(json.dumps(document))


def two_layers_step(weights: tuple[jax.Array, ...], frames: jax.Array) -> Any:
    """What the first layer makes is read by two weights: XLA has one product for the gradients of both."""

    def loss(weights: tuple[jax.Array, ...]) -> jax.Array:
        first = second = jnp.zeros((ROWS, WIDTH))
        total = jnp.zeros(())
        for frame in frames:
            first = jnp.tanh(first @ weights[0] + frame)
            second = jnp.tanh(second @ weights[1] + first @ weights[2])
            total += (second**2).mean()
        return total

    return jax.tree.map(lambda weight, gradient: weight - 0.1 * gradient, weights, jax.grad(loss)(weights))


def bytes_reordered() -> int:
    step = optimize(two_layers_step, target="h200", donate_argnums=0)
    ordered = step.prepare((WEIGHT,) * 3, FRAMES).ordered
    return compile_candidate(ordered, ordered.problem.plain).temp_bytes


def test_gradients_of_a_weight_wait_for_the_sum_of_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    with_barriers = bytes_reordered()
    monkeypatch.setattr("remat_opt.emit.train_step.barriers", lambda *_: {})
    without_barriers = bytes_reordered()
    assert with_barriers < 0.8 * without_barriers


def products(x: jax.Array, weights: jax.Array) -> jax.Array:
    """There is no gradient in it; the CPU's compiler makes what is independent before it needs it."""
    total = jnp.zeros(())
    for weight in weights:
        total += jnp.tanh(x @ weight).sum() * total
    return total


def test_a_function_without_a_gradient_may_need_less_reordered() -> None:
    x, weights = jnp.ones((512, 32)), jax.random.normal(KEYS[2], (16, 32, 512)) / 8
    found = remat_opt.measure(products, x, weights)
    assert not found.plan.is_plain  # with jax 0.12 slices are read again, too
    assert found.plan.predicted.extra_flops == 0
    assert found.optimized.temp_bytes < 0.5 * found.plain.temp_bytes
    np.testing.assert_allclose(optimize(products)(x, weights), products(x, weights), rtol=1e-4)


def test_what_runs_unchanged_is_compiled_without_our_options(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        "remat_opt.callable.compiling.compile_elsewhere", lambda *_, **how: asked.append(how["compiler_options"])
    )
    prepared = prepare(capture(jax.jit(lambda x: jnp.sin(x).sum()), (jnp.ones(8),), {}), resolve_target("cpu"))
    for solution in (prepared.problem.plain, None):
        compile_candidate(prepared, solution, {"compiler_options": {"xla_cpu_enable_fast_math": True}})
    assert asked[0] == {"xla_cpu_enable_fast_math": True}
    assert asked[1] == compiler_options_for("cpu", asked[0])
