"""A step's loops and the rest of it are searched together: for least memory, for budgets and for the frontier."""

import itertools

import jax
import jax.numpy as jnp
import loop_models as models
import numpy as np
import optax
import pytest
from flop_walk import flops_of
from jax import lax

import remat_opt
from remat_opt.loops import choose
from remat_opt.loops.choose import MOST_EXTRA
from remat_opt.planner.candidates import Variants
from remat_opt.search import SOLVERS
from remat_opt.units import format_bytes

LAYERS, BATCH, WIDTH = 12, 1024, 32


def scanned():
    """Layers in a scan between two that are not."""

    def loss(params, x):
        x = jnp.tanh(jnp.sin(x @ params["first"]))
        x, _ = lax.scan(lambda h, w: (models.block(w, h), None), x, params["layers"])
        return (jnp.tanh(x @ params["last"]) ** 2).mean()

    layers = {"w1": models.normal(0, LAYERS, WIDTH, 2 * WIDTH), "w2": models.normal(1, LAYERS, 2 * WIDTH, WIDTH)}
    params = {"first": models.normal(2, WIDTH, WIDTH), "layers": layers, "last": models.normal(3, WIDTH, WIDTH)}
    return models.step_of(loss, params, models.normal(4, BATCH, WIDTH), tx=optax.adam(1e-2))


STEPS = {"layers": scanned, "micro-batches": models.updates_in_a_scan}


@pytest.fixture(scope="module", params=STEPS)
def variants(request) -> Variants:
    step, arguments = STEPS[request.param]()
    return Variants(remat_opt.optimize(step).prepare(*arguments), "auto")


def test_one_of_the_variants_is_the_original_step(variants):
    assert sum(variant.original is None for variant in variants.all) == 1
    assert len(variants.all) >= 4
    extra = [variant.extra_seconds for variant in variants.all]
    assert extra == sorted(extra)


def test_a_budget_takes_no_more_time_than_any_variant_of_the_frontier(variants):
    every = [(s.peak, f.extra_seconds + s.extra_seconds) for f in variants.all for s in variants.frontier_of(f, 0)]
    least, most = min(every)[0], max(every)[0]
    for limit in np.linspace(least, most, 9).astype(int).tolist():
        found = variants.within(limit)
        assert found.peak <= limit
        assert found.extra_seconds <= min(seconds for peak, seconds in every if peak <= limit)
    assert variants.within(least - 1).peak == least


def test_the_frontier_is_of_all_variants(variants):
    frontier = variants.frontier(0)
    assert len({id(found.prepared) for found in frontier}) >= 2
    for less, more in itertools.pairwise(frontier):
        assert less.peak < more.peak
        assert less.extra_seconds > more.extra_seconds
    assert frontier[0].peak == variants.within(0).peak
    for found in frontier:
        assert variants.within(found.peak).extra_seconds <= found.extra_seconds


def test_without_a_budget_loops_and_all_the_rest_repeat_one_forward_pass_together():
    step, arguments = scanned()
    optimized = remat_opt.optimize(step)
    plan = optimized.plan(*arguments)
    assert plan.loops
    extra = flops_of(optimized.jaxpr(*arguments)) / flops_of(jax.make_jaxpr(step)(*arguments)) - 1
    assert 0 < extra <= MOST_EXTRA + 0.01  # the walk counts a few scalars more
    frontier = remat_opt.frontier(step, *arguments)
    assert frontier.cheapest_within(plan.predicted.peak_bytes).extra_seconds <= plan.predicted.extra_seconds


@pytest.mark.parametrize("name", STEPS)
def test_every_point_of_a_frontier_with_loops_can_be_used(name):
    step, arguments = STEPS[name]()
    expected = jax.jit(step)(*arguments)
    frontier = remat_opt.frontier(step, *arguments)
    for point in (frontier[0], frontier[len(frontier) // 2]):
        assert point.plan.loops or point.plan.loop_bodies
        optimized = remat_opt.optimize(step, plan=remat_opt.Plan.from_json(point.plan.to_json()))
        plan = optimized.plan(*arguments)
        assert (plan.loops, plan.inside_loops) == (point.plan.loops, point.plan.inside_loops)
        assert plan.predicted.extra_flops == point.extra_flops
        found = optimized(*arguments)
        jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5), found, expected)


@pytest.mark.parametrize("name", STEPS)
def test_a_budget_holds_in_the_compiled_step_and_costs_less_than_the_minimum_memory(name):
    step, arguments = STEPS[name]()
    plans = [remat_opt.optimize(step, budget=budget).plan(*arguments) for budget in (0.8, None)]
    assert plans[0].measured.temp_bytes <= 0.8 * plans[0].plain_measured.temp_bytes
    assert plans[0].predicted.extra_flops < plans[1].predicted.extra_flops


@pytest.mark.parametrize("solver", ["chen", "auto"])
def test_a_search_is_asked_once_for_each_variant_and_limit(solver, monkeypatch):
    asked = []
    given = remat_opt.optimize(scanned()[0]).prepare(*scanned()[1])
    solve = SOLVERS[solver]
    monkeypatch.setitem(SOLVERS, solver, lambda *question: asked.append(question) or solve(*question))
    variants = Variants(given, solver)
    variants.minimum_memory()
    variants.frontier(3)
    assert len(asked) == len(set(asked)) >= len(variants.for_minimum_memory)


def test_explain_says_what_is_done_to_loops():
    step, arguments = scanned()
    found = remat_opt.optimize(step).explain(*arguments)
    (loop,) = found.loops
    assert loop.length == LAYERS
    assert loop.bytes < loop.given_bytes
    text = str(found)
    assert f"{LAYERS} steps, {format_bytes(loop.given_bytes)} → {format_bytes(loop.bytes)}: keeps its carry" in text
    step, arguments = models.updates_in_a_scan()
    inside = remat_opt.optimize(step).explain(*arguments)
    assert "In the body of 1 loop values are computed again" in str(inside)


def equal_loops(count: int):
    """A derivative through loops one behind the other, each with the same body."""

    def body(p, x, t):
        return 0.1 * (x + jnp.sin(p * x) + jnp.cos(p * jnp.sin(p * x))) + 0.0 * t

    def loss(p, x):
        for number in range(count):
            x, _ = jax.lax.scan(lambda x, t: (body(p, x, t), None), x, jnp.arange(50.0) + 50 * number)
        return jnp.sum(x)

    return jax.value_and_grad(loss), jnp.float32(0.8), jnp.ones((30, 10))


def test_equal_loops_are_searched_once_and_bring_no_more_variants(monkeypatch):
    searched = []
    options_of = choose.pair_options
    monkeypatch.setattr(choose, "pair_options", lambda *given: searched.append(given) or options_of(*given))

    def forms_of(count: int) -> Variants:
        step, *arguments = equal_loops(count)
        return Variants(remat_opt.optimize(step, target="h200", verify=False).prepare(*arguments), "auto")

    one, four = forms_of(1), forms_of(4)
    assert [len(variants.ways.given.pairs) for variants in (one, four)] == [1, 4]
    assert len(searched) == 2
    assert len(four.for_minimum_memory) <= len(one.for_minimum_memory)
    for way in four.ways.least:
        assert len({choice for _, choice in way.chosen}) <= 1
    between = [four.ways.between(share / 7) for share in range(7)]
    partial = [way for way in between if 0 < len(way.chosen) < 4 or len({choice for _, choice in way.chosen}) > 1]
    assert partial  # for budgets only as many of them are rewritten as it needs


def test_loops_of_other_sizes_are_not_equal(monkeypatch):
    searched = []
    options_of = choose.pair_options
    monkeypatch.setattr(choose, "pair_options", lambda *given: searched.append(given) or options_of(*given))

    def loss(p, x):
        for length in (50, 50, 60):
            x, _ = jax.lax.scan(lambda x, t: (jnp.sin(p * x) * t, None), x, jnp.ones(length))
        return jnp.sum(x)

    step = remat_opt.optimize(jax.value_and_grad(loss), target="h200", verify=False)
    assert len(Variants(step.prepare(jnp.float32(0.8), jnp.ones((30, 10))), "auto").ways.given.pairs) == 3
    assert len(searched) == 2
