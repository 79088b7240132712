"""A budget is a promise: the compiled step keeps it, or the user is told what can be kept."""

import math
import re
import warnings
from decimal import Decimal
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_close, temp_bytes
from step_networks import sine_arguments
from step_networks import sine_step as step

from remat_opt import InfeasibleBudget, Plan, RematWarning, optimize
from remat_opt.planner.budget import Budget, parse_budget
from remat_opt.planner.candidates import Candidate
from remat_opt.planner.decision import Planner
from remat_opt.targets.figures import Figures

compiled: list[str] = []  # one entry for each time that XLA compiled something
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: compiled.append(event) if event.endswith("backend_compile_duration") else None
)

PARAMS, X = sine_arguments(width=32, layers=8, batch=256)
FEWER_LAYERS = sine_arguments(width=32, layers=4, batch=256)


def figures(fun: Any, *args: Any) -> Any:
    return fun.lower(*args).compile().memory_analysis()


def physical_peak(fun: Any, *args: Any) -> int:
    sizes = figures(fun, *args)
    return (
        sizes.temp_size_in_bytes + sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    )


@pytest.fixture(scope="module")
def plain_temp() -> int:
    """Temporary memory of the original step, with our option for the CPU, as a fraction counts it."""
    return optimize(step, budget=0.9).plan(PARAMS, X).plain_measured.temp_bytes


# Reading


@pytest.mark.short
@pytest.mark.parametrize(
    ("budget", "understood"),
    [
        (None, Budget()),
        ("min", Budget(at_any_cost=True)),
        (" MIN ", Budget(at_any_cost=True)),
        (1, Budget(physical_bytes=1)),
        (10**12, Budget(physical_bytes=10**12)),
        (1.0, Budget(fraction=1.0)),
        (0.25, Budget(fraction=0.25)),
        ("12GiB", Budget(physical_bytes=12 * 2**30)),
        ("800MB", Budget(physical_bytes=800 * 10**6)),
        ("1.5 GB", Budget(physical_bytes=1_500_000_000)),
        (".5TiB", Budget(physical_bytes=2**39)),
        ("64 kib", Budget(physical_bytes=2**16)),
        ("1000B", Budget(physical_bytes=1000)),
        ("1.GB", Budget(physical_bytes=10**9)),
        ("9007199254740993B", Budget(physical_bytes=2**53 + 1)),
        (2**63 - 1, Budget(physical_bytes=2**63 - 1)),
        (np.int64(5), Budget(physical_bytes=5)),
        (np.float32(0.5), Budget(fraction=0.5)),
        (np.str_("1kB"), Budget(physical_bytes=1000)),
        (Fraction(1, 4), Budget(fraction=0.25)),
    ],
    ids=repr,
)
def test_budgets_as_users_write_them(budget: Any, understood: Budget) -> None:
    assert parse_budget(budget) == understood


NO_NUMBERS = [
    *(0, -1, 0.0, -0.5, 1.0001, 12e9, math.nan, math.inf, -math.inf, 5e-324 / 2, 2**63, 10**400, 10**5000, -(10**400)),
    *(True, False, 1j, Decimal("0.5"), Fraction(3, 2), Fraction(1, 10**400), Fraction(10**5000, 3)),
    *(np.bool_(True), np.int64(0), np.int8(-1), np.float32(2), np.float16("nan"), np.float64("inf"), np.complex64(1)),
]
NO_TEXTS = [
    *("", " ", "12", "twelve", "-1GB", "+1GB", "0B", "0.0GB", ".GB", "0.1B", "50%", "12 GiB free", "1e9B", "nan"),
    *("inf", "nanGB", "infB", "1PB", "1 G", "1Gb/s", "1,5GB", "1_000B", "1.2.3GB", "GB", "None", "MINIMUM", "0x10B"),
    *("9" * 400 + "GB", "9" * 5000 + "B", "1." + "0" * 5000 + "B", "9" * 19 + "B", "1\0GB"),
    *("1\u212aB", "1K\u0130B", "1K\u0131B", "\u0661GB", "1\u00b2GB", "\uff11GB"),  # kelvin, Turkish i, other digits
]


@pytest.mark.short
@pytest.mark.parametrize("budget", [*NO_NUMBERS, *NO_TEXTS], ids=lambda one: f"{type(one).__name__}")
def test_numbers_and_texts_that_are_no_budgets_are_refused_with_what_to_write(budget: Any) -> None:
    with pytest.raises(ValueError, match=r"expected .*12GiB.*") as error:
        optimize(step, budget=budget)
    said = str(error.value)
    assert f"got {type(budget).__name__} " in said
    assert len(said) < 600
    if isinstance(budget, str) and len(repr(budget)) < 40:
        assert repr(budget) in said


@pytest.mark.short
@pytest.mark.parametrize("budget", [[1], b"12GiB", {}, object(), np.ones(1)], ids=lambda one: type(one).__name__)
def test_budgets_of_other_types_are_refused_with_what_to_write(budget: Any) -> None:
    with pytest.raises(TypeError, match=rf"expected .*12GiB.* got {type(budget).__name__}"):
        optimize(step, budget=budget)


def test_a_budget_of_numpy_is_written_in_the_plan_as_a_number_of_python() -> None:
    plan = optimize(step, budget=np.float32(0.75)).plan(PARAMS, X)
    assert type(plan.budget) is float
    assert Plan.from_json(plan.to_json()) == plan


# Keeping


@pytest.mark.parametrize("fraction", [0.5, 0.65, 0.8])
def test_a_fraction_of_the_temporary_memory_is_kept(fraction: float, plain_temp: int) -> None:
    optimized = optimize(step, budget=fraction)
    plan = optimized.plan(PARAMS, X)
    assert plan.measured.temp_bytes == temp_bytes(optimized, PARAMS, X) <= fraction * plain_temp
    assert plan.plain_measured.temp_bytes == plain_temp
    assert_close(optimized(PARAMS, X), jax.jit(step)(PARAMS, X))


@pytest.mark.parametrize(
    ("part", "unit", "donate"), [(0.6, "B", ()), (0.8, None, ()), (0.6, None, (0,)), (0.8, "B", (0,))]
)
def test_a_budget_in_bytes_bounds_the_physical_peak(part: float, unit: str | None, donate: tuple) -> None:
    bytes_ = int(part * physical_peak(jax.jit(step, donate_argnums=donate), PARAMS, X))
    optimized = optimize(step, budget=f"{bytes_}{unit}" if unit else bytes_, donate_argnums=donate)
    assert physical_peak(optimized, PARAMS, X) <= bytes_
    assert optimized.plan(PARAMS, X).measured.physical_peak_bytes == physical_peak(optimized, PARAMS, X)


@pytest.mark.parametrize("budget", [1.0, "1GiB"])
def test_a_budget_that_the_step_keeps_anyway_changes_nothing(budget: Any) -> None:
    optimized = optimize(step, budget=budget)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RematWarning)  # it is what was asked for: nothing to be warned of
        plan = optimized.plan(PARAMS, X)
    assert plan.is_plain
    assert plan.note
    assert str(optimized.jaxpr(PARAMS, X)) == str(jax.jit(step).trace(PARAMS, X).jaxpr)


def test_what_was_refused_is_refused_again() -> None:
    optimized = optimize(step, budget=1000, split=False)
    for use in (optimized.plan, optimized.lower, optimized, optimized):
        with pytest.raises(InfeasibleBudget):
            use(*FEWER_LAYERS)


@pytest.mark.parametrize("budget", [1, 0.01], ids=repr)
def test_what_cannot_be_done_is_refused_with_the_least_that_can(budget: Any) -> None:
    with pytest.raises(InfeasibleBudget) as error:
        optimize(step, budget=budget)(*FEWER_LAYERS)
    least = error.value.least_bytes
    assert str(least) in str(error.value)
    suggestion = re.search(r"budget=([0-9.]+)[,)]", str(error.value))
    with_suggestion = optimize(step, budget=type(budget)(suggestion[1]))
    sizes = figures(with_suggestion, *FEWER_LAYERS)
    counted = sizes.temp_size_in_bytes if isinstance(budget, float) else physical_peak(with_suggestion, *FEWER_LAYERS)
    assert counted <= least
    assert temp_bytes(optimize(step), *FEWER_LAYERS) >= sizes.temp_size_in_bytes


def test_the_suggestion_for_a_step_with_nothing_to_recompute_works_too() -> None:
    def linear(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.sin(x @ w)))(w)

    w = PARAMS[0]["w"]
    for budget in (1, 0.5):
        with pytest.raises(InfeasibleBudget) as error:
            optimize(linear, budget=budget, split=False)(w, X)
        suggestion = type(budget)(re.search(r"budget=([0-9.]+)[,)]", str(error.value))[1])
        assert_close(optimize(linear, budget=suggestion, split=False)(w, X), linear(w, X))
        assert error.value.least_bytes <= physical_peak(jax.jit(linear), w, X)


def test_without_verification_nothing_is_compiled() -> None:
    for budget in (0.6, 1.0, "1GiB", "min", None):
        before = len(compiled)
        plan = optimize(step, budget=budget, verify=False).plan(*FEWER_LAYERS)
        assert len(compiled) == before
        assert plan.measured is None
    with pytest.raises(InfeasibleBudget, match="predicted"):
        optimize(step, budget=1, verify=False, split=False).plan(*FEWER_LAYERS)


def test_minimum_memory_of_a_clear_case_needs_no_compilation() -> None:
    before = len(compiled)
    assert not optimize(step).plan(PARAMS, X).is_plain
    assert len(compiled) == before


@pytest.mark.parametrize(("target", "asked"), [("cpu", False), ("v5e", True)])
def test_the_compiler_is_asked_about_what_fits_on_a_tpus_chip(
    target: str, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def more_than_original(planner: Planner, found: Any) -> Any:
        temp_bytes = 1000 if found is None else 1100
        return Figures(temp_bytes, 0, 0, 0, 0, None, 0.0, target, "", "", autotuned=False)

    monkeypatch.setattr(Candidate, "peak", property(lambda found: int(0.3 * found.prepared.plain_peak)))
    monkeypatch.setattr(Planner, "measure", more_than_original)
    assert optimize(step, target=target).plan(PARAMS, X).is_plain is asked


@pytest.mark.parametrize("verify", [True, False])
def test_a_hundredth_is_no_gain_by_whoever_has_the_last_word(verify: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled_to(planner: Planner, found: Any) -> Any:
        temp_bytes = 1000 if found is None else 990
        return Figures(temp_bytes, 0, 0, 0, 0, None, 0.0, "cpu", "", "", autotuned=False)

    monkeypatch.setattr(Candidate, "peak", property(lambda found: int(0.99 * found.prepared.plain_peak)))
    monkeypatch.setattr(Planner, "measure", compiled_to)
    plan = optimize(step, verify=verify).plan(PARAMS, X)
    assert plan.is_plain
    assert "nothing to gain" in plan.note


@pytest.mark.filterwarnings("ignore::remat_opt.RematWarning")
@pytest.mark.parametrize("budget", [0.6, 0.8, 1.0, "1GiB"])
def test_what_was_compiled_to_check_a_budget_is_what_the_call_runs(budget: float | str) -> None:
    optimized = optimize(step, budget=budget)
    assert optimized.plan(PARAMS, X).measured is not None
    before = len(compiled)
    optimized(PARAMS, X)
    assert len(compiled) == before


@pytest.mark.parametrize("budget", [None, "1GiB"])
def test_a_signature_stays_compiled_when_another_is_planned_at_the_first_attempt(budget: str | None) -> None:
    # A second attempt needs a new jit, which compiles the first signature again: see optimized.py.
    optimized = optimize(step, budget=budget)
    optimized(PARAMS, X)
    optimized(PARAMS, X[::2])
    before = len(compiled)
    optimized(PARAMS, X)
    assert len(compiled) == before


# Arguments that make no sense


@pytest.mark.short
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"solver": "magic"}, r"solver.*'auto'.*'magic'"),
        ({"target": "h9000"}, r"h9000.*cpu.*h200.*v5e"),
        ({"on_error": "ignore"}, r"'raise'.*'plain'.*'ignore'"),
    ],
)
def test_unknown_names_are_refused_with_those_there_are(options: dict, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        optimize(step, **options)


# Errors of the user's function, and ours


class OwnError(Exception):
    pass


def raises(params: Any, x: jax.Array) -> Any:
    raise OwnError("mine", 3)


def decides_by_value(params: Any, x: jax.Array) -> Any:
    return step(params, x) if x.sum() > 0 else params


def multiplies_wrongly(params: Any, x: jax.Array) -> Any:
    return step(params, x @ jnp.ones((3, 3)))


def returns_text(params: Any, x: jax.Array) -> Any:
    return "text"


@pytest.mark.parametrize("on_error", ["raise", "plain"])
@pytest.mark.parametrize("budget", [None, 0.5])
@pytest.mark.parametrize(
    ("fun", "args"),
    [
        (raises, (PARAMS, X)),
        (decides_by_value, (PARAMS, X)),
        (multiplies_wrongly, (PARAMS, X)),
        (returns_text, (PARAMS, X)),
        (step, (PARAMS,)),
        (step, (PARAMS, "text")),
    ],
    ids=["own", "tracer", "shapes", "result", "arity", "argument"],
)
def test_errors_of_the_function_come_through_as_jax_gives_them(
    fun: Any, args: tuple, budget: Any, on_error: str
) -> None:
    with pytest.raises(Exception) as of_jax:  # noqa: PT011
        jax.jit(fun)(*args)
    with pytest.raises(type(of_jax.value)) as ours:
        optimize(fun, budget=budget, on_error=on_error)(*args)
    assert type(ours.value) is type(of_jax.value)
    # JAX names some functions by their address, and ours stands for the user's.
    assert re.sub("0x[0-9a-f]+", "", str(ours.value)) == re.sub("0x[0-9a-f]+", "", str(of_jax.value))


def test_an_infeasible_budget_may_fall_back_too() -> None:
    optimized = optimize(step, budget=1, on_error="plain", split=False)
    with pytest.warns(RematWarning, match="budget"):
        assert_close(optimized(*FEWER_LAYERS), jax.jit(step)(*FEWER_LAYERS))
    assert optimized.plan(*FEWER_LAYERS).is_plain


def test_the_minimum_memory_at_any_cost_is_no_more_and_computes_the_same() -> None:
    least, at_any_cost = optimize(step), optimize(step, budget="min")
    assert temp_bytes(at_any_cost, *FEWER_LAYERS) <= temp_bytes(least, *FEWER_LAYERS)
    assert_close(at_any_cost(*FEWER_LAYERS), jax.jit(step)(*FEWER_LAYERS))
