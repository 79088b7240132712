"""`split="auto"`: when a budget has the batch split, and the seconds by which that is decided."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from step_graphs import graph_of
from training_steps import smaller_case

from remat_opt import InfeasibleBudget, optimize
from remat_opt.graph.build import build
from remat_opt.graph.cost import Rates
from remat_opt.search import Problem, search_of
from remat_opt.targets import Target, resolve_target
from remat_opt.trace.inline import inline

RATES = Rates(bandwidth=1e12, flops={"float32": 1e14})
ROWS = 4096


def step(p: jax.Array, x: jax.Array) -> jax.Array:
    """A wide layer, of which every schedule has two arrays of its result's size at once."""
    return p - jax.grad(lambda p: jnp.mean(jnp.tanh(jnp.tanh(x @ p) @ p.T) ** 2))(p)


def arguments() -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0))
    return jax.random.normal(keys[0], (8, 256)) / 8, jax.random.normal(keys[1], (ROWS, 8))


def with_starts(seconds: float) -> Target:
    """A GPU on which a kernel takes at least so many seconds, and is as fast for few rows as for many."""
    return dataclasses.replace(resolve_target("h200"), kernel_seconds=seconds, multiprocessors=0)


@pytest.mark.short
def test_a_budget_that_recomputation_cannot_meet_is_met_in_chunks() -> None:
    with pytest.raises(InfeasibleBudget):
        optimize(step, budget=0.2, split=False).plan(*arguments())
    function = optimize(step, budget=0.2)
    plan = function.plan(*arguments())
    assert plan.chunks >= 4
    assert plan.measured is not None
    assert plan.plain_measured is not None
    assert plan.measured.temp_bytes <= 0.2 * plan.plain_measured.temp_bytes
    np.testing.assert_allclose(function(*arguments()), step(*arguments()), rtol=1e-4, atol=1e-6)
    text = str(function.explain(*arguments()))
    assert f"The batch runs in {plan.chunks} chunks" in text


def test_without_a_budget_and_for_what_recomputation_meets_nothing_is_split() -> None:
    case = smaller_case("vjp")
    args = case.make_args()
    assert optimize(case.step, target="h200", verify=False).plan(*args).chunks == 0
    assert optimize(case.step, target="h200", verify=False, budget=0.9).plan(*args).chunks == 0


def test_the_time_of_kernel_starts_decides_between_chunks_and_recomputation() -> None:
    case = smaller_case("vjp")
    args = case.make_args()
    chunks = [
        optimize(case.step, target=with_starts(seconds), verify=False, budget=0.4).plan(*args).chunks
        for seconds in (0.0, 1e-3)
    ]
    assert chunks[0] >= 2
    assert chunks[1] == 0


def test_what_needs_the_whole_batch_and_the_solvers_of_the_papers_are_never_split() -> None:
    def normed(p: jax.Array, x: jax.Array) -> jax.Array:
        def loss(p: jax.Array) -> jax.Array:
            h = jnp.tanh(x @ p)
            return jnp.mean(((h - h.mean(0)) / (h.std(0) + 1e-3) @ p.T) ** 2 * x)

        return p - jax.grad(loss)(p)

    for fun, solver in ((normed, "auto"), (step, "chen")):
        with pytest.raises(InfeasibleBudget):
            optimize(fun, budget=0.05, solver=solver, verify=False).plan(*arguments())


def test_the_least_that_an_error_names_is_that_of_the_smallest_chunks() -> None:
    with pytest.raises(InfeasibleBudget) as whole:
        optimize(step, budget=0.001, verify=False, split=False).plan(*arguments())
    with pytest.raises(InfeasibleBudget) as chunks:
        optimize(step, budget=0.001, verify=False).plan(*arguments())
    assert chunks.value.least_bytes < 0.2 * whole.value.least_bytes


def test_the_least_memory_is_of_as_few_chunks_as_need_hardly_more() -> None:
    """A sum over the rows in float32 is what counts at last; more chunks take longer for nothing."""

    def wide(p: jax.Array, x: jax.Array) -> jax.Array:
        return p - jax.grad(lambda p: jnp.mean(jnp.tanh(x @ p) ** 2))(p)

    args = jnp.ones((128, 4096)), jnp.ones((256, 128))
    least = optimize(wide, budget="min", verify=False).plan(*args)
    most = optimize(wide, split=256, verify=False).plan(*args)
    assert 1 < least.chunks < 256
    assert least.predicted.peak_bytes <= 1.01 * most.predicted.peak_bytes


def read(fun: Callable, *args: Any) -> Any:
    return build(inline(jax.make_jaxpr(fun)(*args)), RATES)


@pytest.mark.short
def test_a_loop_takes_the_time_of_its_kernels_as_often_as_they_run() -> None:
    x, w = jnp.ones((64, 64)), jnp.ones((64, 64))

    def once(x: jax.Array) -> jax.Array:
        return jnp.sin(x @ w) @ w

    alone = read(once, x).graph.seconds
    loop = read(lambda x: lax.scan(lambda x, _: (once(x), None), x, None, 7)[0], x)
    assert loop.graph.seconds == pytest.approx(7 * alone)
    branch = read(lambda x: lax.cond(x[0, 0] > 0, once, jnp.sin, x), x)
    assert alone <= branch.graph.seconds <= 1.1 * alone


def test_barriers_take_no_time() -> None:
    x = jnp.ones((64, 64))
    assert read(lambda x: lax.optimization_barrier(x @ x), x).graph.seconds == read(lambda x: x @ x, x).graph.seconds


def test_the_search_round_a_budget_finds_about_what_the_whole_frontier_has() -> None:
    problem = Problem(graph_of("resnet50"))
    search = search_of(problem)
    for share in (0.3, 0.6):
        budget = int(share * problem.plain.peak)
        near = [one for one in search.near(budget) if one.peak <= budget][-1]
        best = [one for one in search.frontier if one.peak <= budget][-1]
        assert near.extra_seconds <= best.extra_seconds + 0.02 * problem.graph.seconds


def test_what_a_loop_writes_in_place_takes_the_time_of_what_is_written() -> None:
    rows, width = 10_000, 64

    def stacked(x: jax.Array) -> jax.Array:
        def one(stack: jax.Array, at: jax.Array) -> tuple[jax.Array, None]:
            return lax.dynamic_update_slice_in_dim(stack, jnp.sin(x), at, 0), None

        return lax.scan(one, jnp.zeros((rows, width)), jnp.arange(100))[0]

    once = 4 * rows * width / RATES.bandwidth
    assert read(stacked, jnp.ones((1, width))).graph.seconds < 5 * once
