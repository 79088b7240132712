"""`optimize` gives a function that is called, jitted and looked at as `jax.jit(fun)` is, and computes the same."""

import inspect
import threading
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import step_networks as networks
from checks import assert_close, numbers, temp_bytes
from jax.extend.core import primitives
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import remat_opt.planner.step
from remat_opt import RematWarning, optimize

pytestmark = pytest.mark.short

WIDTH, LAYERS, BATCH = 32, 8, 256

compiled: list[str] = []  # one entry for each time that XLA compiled something
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: compiled.append(event) if event.endswith("backend_compile_duration") else None
)


X = networks.sine_arguments(WIDTH, LAYERS, BATCH)[1]
step = networks.step_with(jnp.sin)


def new_params() -> Any:
    return networks.sine_arguments(WIDTH, LAYERS, BATCH)[0]


def loss(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(networks.mlp(params, x, jnp.sin) ** 2)


def descend(params: Any, grads: Any) -> Any:
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


@pytest.fixture(scope="module")
def optimized() -> Any:
    return optimize(step)


def assert_same(found: Any, expected: Any) -> None:
    """The same tree, types (weak ones too) and bits."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert jax.typeof(one) == jax.typeof(other)
        assert numbers(one).tobytes() == numbers(other).tobytes()


@pytest.mark.short
def test_a_plain_function_takes_less_memory_and_gives_the_same(optimized: Any) -> None:
    assert_same(optimized(new_params(), X), jax.jit(step)(new_params(), X))
    assert temp_bytes(optimized, new_params(), X) <= 0.7 * temp_bytes(jax.jit(step), new_params(), X)
    again = optimize(optimized, budget=0.7)
    assert_same(again(new_params(), X), jax.jit(step)(new_params(), X))
    assert again.plan(new_params(), X).budget == 0.7


# Arguments and results


class State(NamedTuple):
    params: Any
    extra: Any


def test_trees_keep_their_structure() -> None:
    def tree_step(state: State, batch: dict) -> tuple[State, dict]:
        params, value = step(state.params, batch["x"])
        return State(params, state.extra), {"loss": value, "nothing": None, "empty": (), "deep": [{"x": {}}, (value,)]}

    state = State(new_params(), {"none": None, "empty": {}, "tuple": ()})
    assert_same(optimize(tree_step)(state, {"x": X, "unused": None}), jax.jit(tree_step)(state, {"x": X}))


def test_keyword_arguments_and_defaults() -> None:
    def by_keyword(params: Any, *, z: jax.Array, a: Any, scale: float = 2.0) -> Any:
        return step(params, z * scale + a)

    optimized = optimize(by_keyword)
    for kwargs in ({"z": X, "a": 1.0}, {"a": 1.0, "z": X}, {"scale": 3.0, "z": X, "a": 1.0}):
        assert_same(optimized(new_params(), **kwargs), jax.jit(by_keyword)(new_params(), **kwargs))
    assert_same(optimized(params=new_params(), z=X, a=1.0), jax.jit(by_keyword)(new_params(), a=1.0, z=X))


@pytest.mark.parametrize("key", [jax.random.key(0), jax.random.PRNGKey(0), jax.random.key(1, impl="rbg")], ids=str)
def test_integers_booleans_and_keys(key: jax.Array) -> None:
    def noisy_step(params: Any, key: jax.Array, count: Any, training: Any, x: jax.Array) -> Any:
        key, used = jax.random.split(key)
        params, value = step(params, jnp.where(training, x + jax.random.uniform(used), x))
        return params, key, count + 1, ~training, value

    args = (new_params(), key, 3, np.True_, X)
    optimized = optimize(noisy_step)
    assert_same(optimized(*args), jax.jit(noisy_step)(*args))
    args = (new_params(), key, np.int16(3), jnp.array(False), np.asarray(X))
    assert_same(optimized(*args), jax.jit(noisy_step)(*args))


def test_results_that_are_arguments_constants_or_repeated() -> None:
    def many_results(params: Any, x: jax.Array, count: Any) -> Any:
        new, value = step(params, x)
        constants = 1.0, 2, True, np.int16(4), jnp.bfloat16(3), jnp.zeros((3,)), jnp.arange(4), np.arange(2.0)
        return new, params, x, x, value, value, value * 1, count, constants, None

    optimized = optimize(many_results)
    assert_same(optimized(new_params(), X, 5), jax.jit(many_results)(new_params(), X, 5))
    assert not optimized.plan(new_params(), X, 5).is_plain


def test_arrays_of_the_closure() -> None:
    noise, bias, key = X[::-1] + 0, np.linspace(0, 1, WIDTH, dtype=np.float32), jax.random.key(3)

    def closing_step(params: Any, x: jax.Array) -> Any:
        def noisy(params: Any) -> jax.Array:
            return loss(params, x + noise * jax.random.uniform(key)) + jnp.sum(params[0]["b"] * bias)

        value, grads = jax.value_and_grad(noisy)(params)
        return descend(params, grads), value, noise, bias, key

    optimized = optimize(closing_step)
    assert_close(optimized(new_params(), X), jax.jit(closing_step)(new_params(), X))
    assert not optimized.plan(new_params(), X).is_plain


# Options of jax.jit


@pytest.mark.parametrize(
    "make",
    [
        lambda: optimize(jax.jit(step, donate_argnums=0)),
        lambda: optimize(jax.jit(step, donate_argnames="params")),
        lambda: optimize(step, donate_argnums=(0,)),
        lambda: optimize(jax.jit(step, donate_argnums=1), donate_argnames=("params",)),
        lambda: optimize(step, donate_argnums=0, budget=0.7),
    ],
    ids=["argnums", "argnames", "option", "overridden", "budget"],
)
def test_donated_buffers_are_given_up(make: Any) -> None:
    given, x, optimized = new_params(), X + 0, make()
    result = optimized(given, x)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))
    assert not x.is_deleted()
    assert_same(result, jax.jit(step)(new_params(), X))
    figures = [
        fun.lower(new_params(), X).compile().memory_analysis() for fun in (optimized, jax.jit(step, donate_argnums=0))
    ]
    assert figures[0].alias_size_in_bytes == figures[1].alias_size_in_bytes


def test_donation_can_be_taken_back_and_named_for_keywords() -> None:
    given = new_params()
    optimize(jax.jit(step, donate_argnums=0), donate_argnums=())(given, X)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(given))
    optimize(jax.jit(lambda *, params, x: step(params, x), donate_argnames="params"))(x=X, params=given)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))


@pytest.mark.parametrize(
    "options",
    [{"static_argnums": (0, -2), "static_argnames": ("negate",)}, {"static_argnames": ("power", "mode", "negate")}],
    ids=str,
)
def test_static_arguments(options: dict) -> None:
    def static_step(power: int, params: Any, mode: str, x: jax.Array, *, negate: bool, scale: float = 1.0) -> Any:
        assert (type(power), mode) == (int, "train")
        value, grads = jax.value_and_grad(lambda params: scale * loss(params, x) ** power)(params)
        return descend(params, grads), -value if negate else value

    jitted = jax.jit(static_step, **options)
    for optimized in (optimize(jitted), optimize(static_step, **options)):
        for power, kwargs in ((1, {"negate": False}), (2, {"negate": True, "scale": 2.0})):
            args = (power, new_params(), "train", X)
            assert_same(optimized(*args, **kwargs), jitted(*args, **kwargs))
        with pytest.raises(ValueError, match="on-hashable static arg"):
            optimized([1], new_params(), "train", X, negate=True)


@pytest.mark.parametrize("budget", [None, 0.7])
def test_shardings_are_kept(budget: float | None) -> None:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    split, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    options = {"in_shardings": (whole, split), "out_shardings": (whole, whole)}
    for optimized in (optimize(jax.jit(step, **options), budget=budget), optimize(step, budget=budget, **options)):
        result = optimized(new_params(), X)
        assert all(leaf.sharding == whole for leaf in jax.tree.leaves(result))
        assert_same(result, jax.jit(step, **options)(new_params(), X))
    args = jax.device_put(new_params(), whole), jax.device_put(X, split)
    by_argument = optimize(step, budget=budget)
    by_argument.plan(*args)
    before = len(compiled)
    result = by_argument(*args)
    assert len(compiled) - before == (budget is None)
    assert [leaf.sharding for leaf in jax.tree.leaves(result)] == [
        leaf.sharding for leaf in jax.tree.leaves(jax.jit(step)(*args))
    ]


def test_compiler_options_of_the_user_are_merged_with_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = {"xla_disable_hlo_passes": "dot_decomposer,tree_reduction_rewriter"}
    more = {"xla_disable_hlo_passes": "logistic_expander"}
    jitted, jit = jax.jit(step, compiler_options=theirs), jax.jit
    disabled = []

    def spying_jit(fun: Any, **options: Any) -> Any:
        passes = options.get("compiler_options", {}).get("xla_disable_hlo_passes", "")
        disabled.append(set(passes.split(",")))
        return jit(fun, **options)

    monkeypatch.setattr(jax, "jit", spying_jit)
    optimized = optimize(jitted)
    assert temp_bytes(optimized, new_params(), X) <= 0.7 * temp_bytes(jitted, new_params(), X)
    ours = {"cse_barrier_expander", "small-while-loop-hoisting"}
    assert {"dot_decomposer", "tree_reduction_rewriter", *ours} in disabled
    optimize(jitted, compiler_options=more)(new_params(), X)
    passes = {"dot_decomposer", "tree_reduction_rewriter", "logistic_expander", *ours}
    assert passes in disabled


def test_options_that_jax_refuses_are_refused_alike() -> None:
    for options in ({"static_argnums": 7}, {"static_argnames": "nobody"}, {"donate_argnames": "x", "frobnicate": 1}):
        with pytest.raises((TypeError, ValueError)) as of_jax:
            jax.jit(step, **options)
        with pytest.raises(type(of_jax.value)) as ours:
            optimize(step, **options)
        assert str(ours.value) == str(of_jax.value)


# Like a jax.jit function


def test_it_looks_like_the_jitted_function(optimized: Any) -> None:
    jitted = jax.jit(step)
    for name in ("__name__", "__qualname__", "__doc__", "__module__", "__wrapped__"):
        assert getattr(optimized, name) == getattr(jitted, name)
    assert inspect.signature(optimized) == inspect.signature(jitted)
    assert optimized.lower(new_params(), X).as_text().startswith("module @jit_step")
    shapes = jax.eval_shape(lambda: (new_params(), X))
    assert optimized.eval_shape(*shapes) == jitted.eval_shape(*shapes) == jax.eval_shape(optimized, *shapes)
    assert optimized.lower(*shapes).out_info == jitted.lower(*shapes).out_info
    traced = optimized.trace(*shapes)
    assert traced.out_info == jitted.trace(*shapes).out_info
    assert traced.jaxpr.in_avals == jitted.trace(*shapes).jaxpr.in_avals
    assert_same(optimized.lower(*shapes).compile()(new_params(), X), jitted(new_params(), X))


def test_the_jaxpr_shows_what_is_saved_and_what_is_recomputed(optimized: Any) -> None:
    jaxpr, plan = optimized.jaxpr(new_params(), X), optimized.plan(new_params(), X)
    segments = [one for one in jaxpr.eqns if one.primitive is primitives.remat_p]
    assert segments
    assert all(one.params["differentiated"] for one in segments)
    names = {one.params["name"] for one in jaxpr.eqns if one.primitive is primitives.name_p}
    assert names == set(plan.saved) != set()


def test_disable_jit_and_leak_checks_still_work(optimized: Any) -> None:
    expected = step(new_params(), X)
    with jax.disable_jit():
        assert_close(optimized(new_params(), X), expected)
        assert_close(optimize(step)(new_params(), X), expected)
    with jax.checking_leaks(), jax.debug_nans(True):
        assert_close(optimize(step)(new_params(), X), expected)


@pytest.mark.parametrize("fun", [lambda x: x, lambda x: (x, 1.0), lambda x: None, lambda x: x @ x.T])
def test_a_function_without_a_gradient_runs_unchanged(fun: Any) -> None:
    with pytest.warns(RematWarning, match="as it was given"):
        assert_same(optimize(fun)(X), jax.jit(fun)(X))


# Once per signature


def test_nothing_of_ours_runs_once_a_signature_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    traces, plans = [], []
    decide = remat_opt.planner.step.decide
    monkeypatch.setattr(remat_opt.planner.step, "decide", lambda *args: plans.append(args) or decide(*args))

    def traced_step(params: Any, x: jax.Array) -> Any:
        traces.append(x)
        return step(params, x)

    optimized = optimize(traced_step)
    for batch in (X, X[::2]):
        expected = jax.jit(step)(new_params(), batch)
        assert_same(optimized(new_params(), batch), expected)
        seen = len(traces), len(plans), len(compiled)
        assert_same(optimized(new_params(), batch), expected)
        for ask in (optimized.plan, optimized.jaxpr, optimized.explain):
            ask(new_params(), batch)
        assert (len(traces), len(plans), len(compiled)) == seen
    assert (len(traces), len(plans)) == (2, 2)
    optimized(new_params(), X)
    assert (len(traces), len(plans)) == (2, 2)


@pytest.mark.parametrize("options", [{}, {"budget": 0.6}, {"on_error": "plain"}], ids=str)
def test_concurrent_first_calls(options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    plans, results = [], {}
    decide = remat_opt.planner.step.decide
    monkeypatch.setattr(remat_opt.planner.step, "decide", lambda *args: plans.append(args) or decide(*args))
    optimized, start = optimize(step, **options), threading.Barrier(4)

    def call(index: int) -> None:
        start.wait()
        results[index] = optimized(new_params(), X if index % 2 else X[::2])

    threads = [threading.Thread(target=call, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(plans) == 2
    for index in range(4):
        assert_same(results[index], jax.jit(step)(new_params(), X if index % 2 else X[::2]))


def test_the_least_memory_is_asked_of_chunks_where_recomputation_gains_nothing() -> None:
    """Every schedule of a wide layer has two arrays of its result's size at once."""

    def step(p: jax.Array, x: jax.Array) -> jax.Array:
        return p - jax.grad(lambda p: jnp.mean(jnp.tanh(jnp.tanh(x @ p) @ p.T) ** 2))(p)

    args = jnp.ones((8, 256)), jnp.ones((4096, 8))
    plan = optimize(step, budget="min").plan(*args)
    assert plan.chunks
    assert plan.measured.temp_bytes < 0.3 * plan.plain_measured.temp_bytes
