"""A process that lives for months: what is kept for a step, until when, and how often the user's function is traced."""

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import remat_opt.planner.step
from remat_opt import InfeasibleBudget, Plan, RematWarning, frontier, optimize

PARAMS = [jnp.eye(32) * 0.5] * 3
X = jnp.ones((128, 32))


def layers(params: Any, x: jax.Array) -> jax.Array:
    for weight in params:
        x = jnp.tanh(x @ weight)
    return x


def scanned(params: Any, x: jax.Array) -> jax.Array:
    return lax.scan(lambda x, weight: (jnp.tanh(x @ weight), None), x, jnp.stack(params))[0]


def step_of(network: Callable = layers, scale: Any = 1.0) -> Callable:
    def step(params: Any, x: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(lambda params: jnp.mean(network(params, x * jnp.max(scale)) ** 2))(params)
        return [weight - 0.1 * gradient for weight, gradient in zip(params, gradients, strict=True)], value

    return step


def twice(params: Any, x: jax.Array) -> jax.Array:
    return x * 2


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def decisions(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref]:
    """What is decided while a test runs."""
    made, decide = [], remat_opt.planner.step.decide

    def deciding(*arguments: Any) -> Any:
        decision = decide(*arguments)
        made.append(weakref.ref(decision))
        return decision

    monkeypatch.setattr(remat_opt.planner.step, "decide", deciding)
    return made


# What is kept, and until when


@pytest.mark.short
@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("step", [step_of(), twice], ids=["rewritten", "as_given"])
@pytest.mark.filterwarnings("ignore::remat_opt.RematWarning")
def test_clearing_jaxs_caches_frees_what_was_decided(step: Callable, decisions: list[weakref.ref]) -> None:
    optimized = optimize(step, verify=False)
    expected = optimized(PARAMS, X)
    for _ in range(3):
        jax.clear_caches()
        assert all(decision() is None for decision in decisions)
        jax.tree.map(np.testing.assert_array_equal, optimized(PARAMS, X), expected)
        assert decisions[-1]() is not None
    assert len(decisions) == 4


@pytest.mark.short
@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("clear", ["clear_cache", "_clear_cache"])
def test_an_optimised_function_counts_and_clears_its_cache_as_a_jitted_one(
    clear: str, decisions: list[weakref.ref]
) -> None:
    traces = []

    def step(params: Any, x: jax.Array) -> Any:
        traces.append(x)
        return step_of()(params, x)

    optimized = optimize(step, verify=False)
    assert optimized._cache_size() == 0
    for batch, size in ((X, 1), (X, 1), (X[::2], 2)):
        optimized(PARAMS, batch)
        assert optimized._cache_size() == size
    getattr(optimized, clear)()
    traces.clear()
    assert optimized._cache_size() == 0
    assert len(decisions) == 2
    assert all(decision() is None for decision in decisions)
    optimized(PARAMS, X)
    assert optimized._cache_size() == len(traces) == 1


USES: dict[str, Callable[[Any], Any]] = {
    "call": lambda optimized: optimized(PARAMS, X),
    "lower": lambda optimized: optimized.lower(PARAMS, X).compile(),
    "explain": lambda optimized: str(optimized.explain(PARAMS, X)),
    "jit": lambda optimized: jax.jit(lambda params, x: optimized(params, x))(PARAMS, X),
    "grad": lambda optimized: jax.grad(lambda params: jnp.sum(jax.tree.leaves(optimized(params, X))[-1]))(PARAMS),
    "vmap": lambda optimized: jax.vmap(lambda x: optimized(PARAMS, x))(X[None]),
}
OPTIONS: dict[str, dict] = {
    "least": {},
    "fraction": {"budget": 0.7},
    "bytes": {"budget": "10MB"},
    "plain_on_error": {"on_error": "plain"},
}
WAYS = [*((use, "least") for use in USES), *(("call", options) for options in OPTIONS if options != "least")]


@pytest.mark.usefixtures("without_collector")
@pytest.mark.filterwarnings("ignore::remat_opt.RematWarning")
@pytest.mark.parametrize(("use", "options"), WAYS)
def test_dropping_the_function_frees_what_it_closes_over(use: str, options: str) -> None:
    for network in (layers, scanned) if use == "call" else (layers,):
        scale = jnp.ones((50, 50))
        kept = weakref.ref(scale)
        optimized = optimize(step_of(network, scale), **OPTIONS[options])
        USES[use](optimized)
        del scale, optimized
        assert kept() is None


# Plans beside the persistent compilation cache


@pytest.fixture
def plan_folder(tmp_path: Path) -> Iterator[Path]:
    """Where plans are, with a persistent compilation cache that keeps all."""
    options = {"jax_compilation_cache_dir": str(tmp_path), "jax_persistent_cache_min_compile_time_secs": 0.0}
    before = {name: getattr(jax.config, name) for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    yield tmp_path / "remat_opt_plans"
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.parametrize("options", [{"verify": False}, {"budget": 0.7}, {"budget": "10MB"}], ids=str)
@pytest.mark.parametrize("network", [layers, scanned])
def test_a_step_is_planned_once_for_all_processes(
    network: Callable, options: dict, plan_folder: Path, decisions: list[weakref.ref]
) -> None:
    optimized = [optimize(step_of(network), **options) for _ in range(2)]
    plans = [one.plan(PARAMS, X) for one in optimized]
    assert plans[0] == plans[1]
    assert len(decisions) == len(list(plan_folder.iterdir())) == 1
    results = [one(PARAMS, X) for one in optimized]
    jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.filterwarnings("ignore::remat_opt.RematWarning")
def test_another_request_is_planned_anew(plan_folder: Path, decisions: list[weakref.ref]) -> None:
    requests: list[dict] = [{}, {"donate_argnums": 0}, {"target": "h200"}, {"budget": "min"}, {"solver": "chen"}]
    for request in requests:
        optimize(step_of(), verify=False, **request).plan(PARAMS, X)
    optimize(step_of(), verify=False).plan(PARAMS, X[::2])
    assert len(decisions) == len(list(plan_folder.iterdir())) == len(requests) + 1
    with pytest.raises(InfeasibleBudget):
        optimize(step_of(), budget=1).plan(PARAMS, X)
    assert len(list(plan_folder.iterdir())) == len(requests) + 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "\udc80",
        lambda text: "[" * 100_000,
        lambda text: text.replace('"fingerprint": "', '"fingerprint": "0'),
        lambda text: text.replace('"budget": "min"', '"budget": null'),
        lambda text: text.replace(jax.__version__, "0.0"),
        lambda text: "{}",
    ],
    ids=["cut", "bytes", "nested", "program", "request", "version", "empty"],
)
def test_a_damaged_plan_is_ignored_and_written_anew(
    damage: Callable, plan_folder: Path, decisions: list[weakref.ref]
) -> None:
    plan = optimize(step_of(), budget="min", verify=False).plan(PARAMS, X)
    (path,) = plan_folder.iterdir()
    text = path.read_text()
    path.write_text(damage(text), errors="surrogateescape")
    assert path.read_bytes() != text.encode()
    assert optimize(step_of(), budget="min", verify=False).plan(PARAMS, X) == plan
    assert len(decisions) == 2
    assert Plan.load(path) == plan


def test_a_folder_that_cannot_be_written_is_left(plan_folder: Path) -> None:
    plan_folder.write_text("a file in its place")
    assert not optimize(step_of(), verify=False).plan(PARAMS, X).is_plain
    assert plan_folder.read_text() == "a file in its place"


# How often the user's function is traced


@pytest.mark.short
@pytest.mark.filterwarnings("ignore::remat_opt.RematWarning")
@pytest.mark.parametrize(("use", "options"), WAYS)
def test_the_users_function_is_traced_once(use: str, options: str) -> None:
    for original in (twice, step_of()):
        traces = []

        def step(params: Any, x: jax.Array) -> Any:
            traces.append(x)  # noqa: B023
            return original(params, x)  # noqa: B023

        optimized = optimize(step, **OPTIONS[options])
        USES[use](optimized)
        USES[use](optimized)
        assert len(traces) == 1


@jax.custom_jvp
def doubling_sine(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


doubling_sine.defjvp(lambda primals, tangents: (doubling_sine(*primals), tangents[0] * 2))


def weak_and_constant(x: jax.Array, scale: Any = 2.0) -> Any:
    return x * scale, scale, 1.0, True, None, jnp.zeros(3), np.ones(2, np.float32), x


def control(x: jax.Array) -> Any:
    turns = lax.while_loop(lambda c: c[1] < 3, lambda c: (c[0] * 2, c[1] + 1), (x, 0))
    return lax.cond(x.sum() > 0, lambda x: x + X[0, 0], lambda x: x, x), turns, lax.fori_loop(0, 3, jnp.add, 0)


def called(x: jax.Array) -> Any:
    with jax.named_scope("scope"), jax.default_matmul_precision("highest"):
        return jax.jit(jnp.tanh)(x @ x.T), jax.grad(lambda x: doubling_sine(x).sum())(x), jax.checkpoint(jnp.sin)(x)


def effects(x: jax.Array) -> Any:
    jax.debug.print("{x}", x=x.sum(), ordered=True)
    counter = jax.new_ref(x)
    counter[...] += 1.0
    return counter[...], jax.random.normal(jax.random.key(0), (3,))


@pytest.mark.short
@pytest.mark.filterwarnings("ignore::remat_opt.RematWarning")
@pytest.mark.parametrize(
    ("fun", "arguments", "options"),
    [
        (weak_and_constant, (X,), {"donate_argnums": 0}),
        (weak_and_constant, (X, 3), {}),
        (weak_and_constant, (X, 3), {"static_argnums": 1}),
        (control, (X,), {}),
        (called, (X,), {"keep_unused": True}),
        (effects, (X,), {}),
    ],
)
def test_a_step_that_runs_unchanged_lowers_to_the_text_of_the_jitted_one(
    fun: Callable, arguments: tuple, options: dict
) -> None:
    optimized, jitted = optimize(fun, **options), jax.jit(fun, **options)
    assert optimized.plan(*arguments).is_plain
    assert optimized.lower(*arguments).as_text() == jitted.lower(*arguments).as_text()
    assert str(optimized.trace(*arguments).jaxpr) == str(jitted.trace(*arguments).jaxpr)


# Warnings that are errors


@pytest.mark.parametrize(
    ("step", "options"), [(twice, {}), (step_of(), {"target": "h200", "verify": False})], ids=["as_given", "rewritten"]
)
@pytest.mark.parametrize("on_error", ["raise", "plain"])
def test_a_warning_that_is_an_error_loses_no_decision(
    step: Callable, options: dict, on_error: str, decisions: list[weakref.ref]
) -> None:
    optimized = optimize(step, on_error=on_error, donate_argnums=0, **options)
    params = jax.tree.map(jnp.copy, PARAMS)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RematWarning)
        with pytest.raises(RematWarning):
            optimized(params, X)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 1e-5), optimized(params, X), step(PARAMS, X))
    assert len(decisions) == 1


# Symbolic shapes


def symbolic_arguments() -> Any:
    (batch,) = jax.export.symbolic_shape("batch")
    return [jax.ShapeDtypeStruct((32, 32), jnp.float32)] * len(PARAMS), jax.ShapeDtypeStruct((batch, 32), jnp.float32)


@pytest.mark.short
@pytest.mark.parametrize("options", [{}, {"budget": "min"}, {"on_error": "plain"}], ids=str)
def test_a_step_of_symbolic_shapes_is_exported_unchanged(options: dict) -> None:
    step, arguments = step_of(), symbolic_arguments()
    optimized = optimize(step, **options)
    with pytest.warns(RematWarning, match=r"symbolic shapes \(float32\[batch,32\]\) have no size to plan for"):
        assert optimized.plan(*arguments).is_plain
    expected = jax.jit(step)(PARAMS, X)
    for jitted in (optimized, jax.jit(lambda *args: optimized(*args))):
        found = jax.export.export(jitted)(*arguments).call(PARAMS, X)
        jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert optimized.lower(*arguments).as_text() == jax.jit(step).lower(*arguments).as_text()
    assert not optimized.plan(PARAMS, X).is_plain


@pytest.mark.short
def test_what_needs_sizes_is_refused_for_symbolic_shapes() -> None:
    step, arguments = step_of(), symbolic_arguments()
    plan = optimize(step, verify=False).plan(PARAMS, X)
    assert isinstance(plan, Plan)
    for options, asked in (({"budget": 0.5}, "a budget"), ({"plan": plan}, "a plan")):
        with pytest.raises(ValueError, match=rf"keep {asked}, got float32\[batch,32\].*Export the step once"):
            optimize(step, **options).lower(*arguments)
        with pytest.warns(RematWarning, match="planning failed"):
            optimize(step, on_error="plain", **options).lower(*arguments)
    with pytest.raises(ValueError, match=r"expected shapes of numbers.*float32\[batch,32\]"):
        frontier(step, *arguments)
