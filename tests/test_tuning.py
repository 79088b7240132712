"""Tuning: of the plans that fit, the one that runs fastest. Times are recorded, so that no test depends on how busy the
machine is."""

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from checks import assert_close
from flax import nnx
from loop_models import long_lstm
from step_networks import sine_arguments
from step_networks import sine_step as step

from remat_opt import Plan, RematWarning, optimize
from remat_opt.callable.tuning import CallTimer
from remat_opt.planner.candidates import Candidate
from remat_opt.planner.decision import Decision, Planner
from remat_opt.planner.plan import Timing
from remat_opt.planner.planning import decide
from remat_opt.planner.tuning import MOST_PLANS, Tuner
from remat_opt.targets import Figures

PARAMS, X = sine_arguments(width=16, layers=4, batch=128)
BUDGET = 0.7


class RecordedTimer:
    """Says that a candidate takes the next of some times, and as much memory as is predicted.

    Args:
        times: seconds, one for each candidate; None for one that does not run.
        counted: makes the compiler's bytes of predicted ones.
    """

    def __init__(self, figures: Figures, times: Iterator[float | None], counted: Callable[[int], int] = lambda x: x):
        self.figures, self.times, self.counted = figures, times, counted
        self.compiled: list[Candidate] = []
        self.seconds: dict[int, float | None] = {}
        self.taken: Candidate | None = None

    def compile(self, candidate: Candidate) -> Figures | None:
        self.compiled.append(candidate)
        is_first = len(self.compiled) == 1
        temporary = self.figures.temp_bytes if is_first else self.counted(candidate.peak)
        return dataclasses.replace(self.figures, temp_bytes=temporary)

    def run(self, candidate: Candidate) -> float | None:
        if id(candidate) not in self.seconds:
            self.seconds[id(candidate)] = next(self.times)
        return self.seconds[id(candidate)]

    def take(self, candidate: Candidate) -> None:
        self.taken = candidate


def planned(step: Callable, arguments: Any, **options: Any) -> tuple[Planner, Decision]:
    """A step that was planned by predictions."""
    function = optimize(step, **options)
    prepared = function.prepare(*arguments)
    return Planner(prepared, function.settings, None), decide(prepared, function.settings, None)


@functools.cache
def planned_lstm() -> tuple[Planner, Decision]:
    """A step whose loop can be written in many ways."""
    lstm, arguments = long_lstm(64)
    return planned(lstm, arguments, budget="1.5MB", donate_argnums=0, split=False)


def tuned(times: Iterator[float | None], **options: Any) -> tuple[Decision, RecordedTimer]:
    planner, decision = planned_lstm()
    fixed = 500_000
    figures = Figures(decision.peak, fixed, 0, 0, 0, None, 0.0, "cpu", "", "", True)
    counted = options.pop("counted", lambda peak: peak)
    timer = RecordedTimer(figures, times, counted)
    return Tuner(planner, decision, timer, options.pop("seconds", 60.0), **options).run(), timer


# What is compiled, what is taken


def test_the_fastest_of_a_few_different_plans_is_taken() -> None:
    found, timer = tuned(iter([1.0, 0.9, 0.5, 0.8, 0.7, 0.95]))
    assert len(timer.compiled) == MOST_PLANS
    assert timer.taken is timer.compiled[2]
    assert found.solution is timer.compiled[2].solution
    assert [one.seconds for one in found.plan.timings] == [1.0, 0.9, 0.5, 0.8, 0.7, 0.95]
    assert [one.is_taken for one in found.plan.timings] == [False, False, True, False, False, False]
    assert found.plan.timings[0].what == "as planned"
    assert "the fastest of 6 plans" in found.plan.note
    assert found.plan.measured is not None
    assert found.plan.measured.physical_peak_bytes == found.plan.timings[2].physical_peak_bytes <= 1.5e6
    assert len({one.what for one in found.plan.timings}) >= 3
    assert not any(one.is_the_same_as(other) for one, other in itertools.combinations(timer.compiled, 2))


def test_the_planned_one_is_taken_where_no_other_is_noticeably_faster() -> None:
    found, timer = tuned(iter([1.0, *[0.99] * 5]))
    assert timer.taken is timer.compiled[0]
    assert found.plan.timings[0].is_taken
    assert found.plan.runs == planned_lstm()[1].plan.runs
    assert "fastest" not in found.plan.note


def test_a_plan_that_was_fast_by_chance_runs_again_beside_the_planned_one() -> None:
    class Warming(RecordedTimer):
        def run(self, candidate: Candidate) -> float | None:
            ran_before = id(candidate) in self.seconds
            seconds = super().run(candidate)
            return 0.5 if ran_before and candidate is self.compiled[0] else seconds

    planner, decision = planned_lstm()
    figures = Figures(decision.peak, 0, 0, 0, 0, None, 0.0, "cpu", "", "", True)
    timer = Warming(figures, iter([1.0, *[0.8] * 5]))
    assert Tuner(planner, decision, timer, 60.0).run().plan.timings[0].is_taken


def test_what_does_not_keep_the_budget_does_not_run() -> None:
    found, timer = tuned(iter([1.0]), counted=lambda peak: 10**7)
    assert len(timer.compiled) == MOST_PLANS
    assert len(found.plan.timings) == 1


def test_a_fraction_is_one_of_the_plain_steps_memory() -> None:
    planner, decision = planned(step, (PARAMS, X), budget=0.5, split=False)
    figures = Figures(300, 0, 0, 0, 0, None, 0.0, "cpu", "", "", True)
    of_plain = dataclasses.replace(decision.plan, plain_measured=dataclasses.replace(figures, temp_bytes=1000))
    decision = dataclasses.replace(decision, plan=of_plain)
    tuner = Tuner(planner, decision, RecordedTimer(figures, iter([1.0] * MOST_PLANS)), 60.0)
    tuner.run()
    within, beyond = (dataclasses.replace(figures, temp_bytes=bytes) for bytes in (500, 501))
    assert tuner.fits(within)
    assert not tuner.fits(beyond)


def test_what_does_not_run_is_left_out_and_without_memory_nothing_is_tuned() -> None:
    found, _ = tuned(iter([1.0, None, 0.5, None, None, 0.6]))
    assert [one.seconds for one in found.plan.timings] == [1.0, 0.5, 0.6]
    found, _ = tuned(iter([None]))
    assert found.plan.timings == ()
    assert "not tuned: the device has no memory" in found.plan.note


def test_no_more_is_compiled_when_the_time_is_up() -> None:
    """Each look at the clock is a second later: one candidate takes several."""
    _, timer = tuned(itertools.repeat(1.0), seconds=10.0, clock=functools.partial(next, itertools.count()))
    assert 1 < len(timer.compiled) < MOST_PLANS
    _, timer = tuned(itertools.repeat(1.0), seconds=0.5, clock=functools.partial(next, itertools.count()))
    assert len(timer.compiled) == 1


def test_chunks_of_the_batch_are_among_what_is_timed() -> None:
    planner, decision = planned(step, (PARAMS, X), budget="100kB")
    figures = Figures(decision.peak, 0, 0, 0, 0, None, 0.0, "cpu", "", "", True)
    found = Tuner(planner, decision, RecordedTimer(figures, itertools.repeat(1.0)), 60.0).run()
    assert any(one.what == "in 2 chunks" for one in found.plan.timings)


# With calls


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Candidate]:
    """Candidates run, and each is said to take less time than the one before; they are listed."""
    ran: list[Candidate] = []
    run = CallTimer.run

    def recorded_run(self: CallTimer, candidate: Candidate) -> float | None:
        assert run(self, candidate) is not None
        if candidate not in ran:
            ran.append(candidate)
        return 1.0 / (1 + ran.index(candidate))

    monkeypatch.setattr(CallTimer, "run", recorded_run)
    monkeypatch.setattr("remat_opt.callable.tuning.MOST_RUNS", 1)
    return ran


def copied(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


@pytest.mark.short
@pytest.mark.parametrize("tune", [True, 100])
def test_a_call_runs_the_plan_that_was_fastest_and_computes_the_same(recorded: list[Candidate], tune: Any) -> None:
    optimized = optimize(step, budget=BUDGET, donate_argnums=0, tune=tune, split=False)
    params = copied(PARAMS)
    results = optimized(params, X)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params))  # by the call, as ever
    assert_close(results, jax.jit(step)(PARAMS, X), atol=1e-7)
    plan = optimized.plan(PARAMS, X)
    assert len(plan.timings) == len(recorded) > 1
    assert plan.timings[-1].is_taken
    assert plan.measured is not None
    compiled = optimized.lower(PARAMS, X).compile()
    assert compiled.memory_analysis().temp_size_in_bytes == plan.measured.temp_bytes
    timed = len(recorded)
    for _ in range(2):
        assert_close(optimized(copied(PARAMS), X), results, atol=0)
    assert len(recorded) == timed  # once for a signature


def test_nothing_is_lost_of_what_a_plan_is_timed_on(recorded: list[Candidate]) -> None:
    optimized = optimize(step, budget=BUDGET, donate_argnums=0, tune=True, split=False)
    params = copied(PARAMS)
    assert len(optimized.plan(params, X).timings) > 1
    assert_close(params, PARAMS, atol=0)


def test_arguments_without_values_are_planned_and_timed_when_they_have_them(recorded: list[Candidate]) -> None:
    optimized = optimize(step, budget=BUDGET, tune=True, split=False)
    abstract = jax.eval_shape(lambda: (PARAMS, X))
    assert optimized.plan(*abstract).timings == ()
    optimized.lower(*abstract).compile()
    jax.jit(lambda params, x: optimized(params, x)).lower(PARAMS, X)
    assert not recorded
    optimized(PARAMS, X)
    assert recorded
    assert len(optimized.plan(*abstract).timings) == len(recorded)


def test_donation_by_name_and_static_arguments(recorded: list[Candidate]) -> None:
    def scaled(x: jax.Array, scales: tuple[float, float], *, params: Any) -> Any:
        return step(params, x * scales[0] * scales[1])

    options: dict[str, Any] = {"static_argnums": 1, "donate_argnames": "params"}
    optimized = optimize(scaled, budget=BUDGET, tune=True, split=False, **options)
    params = copied(PARAMS)
    found = optimized(X, (0.5, 2.0), params=params)
    assert len(recorded) > 1
    assert jax.tree.leaves(params)[0].is_deleted()
    assert_close(found, jax.jit(step)(PARAMS, X), atol=1e-7)


def test_modules_of_nnx_and_equinox(recorded: list[Candidate]) -> None:
    class Deep(nnx.Module):
        def __init__(self) -> None:
            self.layers = nnx.List([nnx.Linear(16, 16, rngs=nnx.Rngs(at)) for at in range(6)])

    def loss_of(model: Any, layers: Any, x: jax.Array) -> jax.Array:
        for layer in layers(model):
            x = jnp.sin(jnp.cos(layer(x)))
        return (x**2).mean()

    def nnx_step(model: Deep, x: jax.Array) -> jax.Array:
        loss, gradients = nnx.value_and_grad(lambda m: loss_of(m, lambda m: m.layers, x))(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), gradients))
        return loss

    plain, ours = Deep(), Deep()
    optimized = optimize(nnx_step, budget=BUDGET, tune=True, split=False)
    for _ in range(2):  # runs that were timed have updated nothing
        assert_close(optimized(ours, X), nnx.jit(nnx_step)(plain, X), atol=1e-6)
    timed = len(recorded)
    assert timed > 1

    model = eqx.nn.MLP(16, 16, 16, 6, key=jax.random.key(0))

    def eqx_step(model: Any, x: jax.Array) -> Any:
        gradients = eqx.filter_grad(lambda m: (jax.vmap(m)(x) ** 2).mean())(model)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, gradients))

    jitted = eqx.filter_jit(eqx_step)
    ours = optimize(eqx.filter_jit(eqx_step), budget=BUDGET, tune=True, split=False)(model, X)
    assert len(recorded) > timed
    assert_close(eqx.filter(ours, eqx.is_array), eqx.filter(jitted(model, X), eqx.is_array), atol=1e-6)


def test_a_step_with_effects_is_not_timed(recorded: list[Candidate]) -> None:
    seen: list[float] = []

    def printing(params: Any, x: jax.Array) -> Any:
        jax.debug.callback(lambda value: seen.append(float(value)), x[0, 0])
        return step(params, x)

    optimized = optimize(printing, budget=BUDGET, tune=True, split=False)
    with pytest.warns(RematWarning, match="not tuned: it has effects"):
        optimized(PARAMS, X)
    jax.effects_barrier()
    assert len(seen) == 1
    assert not recorded
    assert "not tuned: it has effects" in optimized.plan(PARAMS, X).note


# Plans and settings


def test_files_and_explanations_have_the_times(recorded: list[Candidate], tmp_path: Path) -> None:
    optimized = optimize(step, budget=BUDGET, tune=True, split=False)
    plan = optimized.plan(PARAMS, X)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    again = optimize(step, plan=Plan.load(tmp_path / "plan.json"))
    for function in (optimized, again):
        text = str(function.explain(PARAMS, X))
        assert f"Timed on the device: {len(recorded)} plans" in text
        (taken,) = (line for line in text.splitlines() if line.endswith("which is taken"))
        assert plan.timings[-1].what in taken
    assert "timing plans" in str(optimized.explain(PARAMS, X))
    timed = len(recorded)
    again(PARAMS, X)
    assert len(recorded) == timed


def test_a_saved_plan_is_not_timed_again(recorded: list[Candidate], tmp_path: Path) -> None:
    options = {"jax_compilation_cache_dir": str(tmp_path), "jax_persistent_cache_min_compile_time_secs": 0.0}
    before = {name: getattr(jax.config, name) for name in options}
    try:
        for name, value in options.items():
            jax.config.update(name, value)
        first = optimize(step, budget=BUDGET, tune=True, split=False).plan(PARAMS, X)
        timed = len(recorded)
        second = optimize(step, budget=BUDGET, tune=True, split=False).plan(PARAMS, X)
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
    assert first == second
    assert len(recorded) == timed > 1


def test_damaged_times_are_refused(recorded: list[Candidate]) -> None:
    plan = optimize(step, budget=BUDGET, tune=True, split=False).plan(PARAMS, X)
    damaged = dataclasses.replace(plan, timings=(Timing("as planned", 1.0, -1, True),)).to_json()
    with pytest.raises(ValueError, match="physical_peak_bytes, expected an integer from 0"):
        Plan.from_json(damaged)


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), float("inf"), "60", None, []])
def test_what_is_no_time_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"expected tune=True, tune=False or a number of seconds above 0, got tune="):
        optimize(step, tune=wrong)


def test_what_cannot_be_tuned_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = optimize(step, budget=BUDGET).plan(PARAMS, X)
    with pytest.raises(ValueError, match="expected a plan or tune, got both"):
        optimize(step, plan=plan, tune=True)
    with pytest.raises(ValueError, match="expected verify=True for tune"):
        optimize(step, verify=False, tune=True)
    with pytest.raises(ValueError, match=r"expected the attached device .* got h200:8, which is not attached"):
        optimize(step, target="h200:8", tune=True).plan(PARAMS, X)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match=r"expected a single process for tune=True, got 2: .* plan=Plan.load"):
        optimize(step, tune=True)(PARAMS, X)


def test_without_it_nothing_runs(recorded: list[Candidate]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert optimize(step, budget=BUDGET).plan(PARAMS, X).timings == ()
    assert not recorded
