"""Under an outer transform `optimize(step)` computes what `step` computes, and has its derivatives and its effects."""

import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import checkpoints_in, temp_bytes
from jax.sharding import AxisType, PartitionSpec
from step_networks import sine_arguments, step_with

from remat_opt import RematWarning, optimize

WIDTH, LAYERS, BATCH = 16, 3, 128

pytestmark = pytest.mark.filterwarnings("ignore:.*nothing will be saved on the CPU:remat_opt.RematWarning")


@jax.custom_jvp
def tripled(x: jax.Array) -> jax.Array:
    """The sine, with three times its derivative."""
    return jnp.sin(x)


tripled.defjvp(lambda primals, tangents: (tripled(primals[0]), 3 * jnp.cos(primals[0]) * tangents[0]))


@jax.custom_vjp
def doubled(x: jax.Array) -> jax.Array:
    """The sine, with twice its derivative."""
    return jnp.sin(x)


doubled.defvjp(lambda x: (doubled(x), jnp.cos(x)), lambda cosine, cotangent: (2 * cosine * cotangent,))


X = sine_arguments(WIDTH, LAYERS, BATCH)[1]


def new_params() -> Any:
    return sine_arguments(WIDTH, LAYERS, BATCH)[0]


STEPS = {"sin": step_with(jnp.sin), "custom_jvp": step_with(tripled), "custom_vjp": step_with(doubled)}
step = STEPS["sin"]


def total(result: Any) -> jax.Array:
    """One number of everything a step returns."""
    return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(result))


def assert_close(found: Any, expected: Any, rtol: float = 1e-4) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        if jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        scale = np.max(np.abs(other), initial=0)
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=rtol, atol=rtol * scale)


# Each takes a step and gives something to compare.
TRANSFORMS: dict[str, Callable[[Callable], Any]] = {
    "jit": lambda f: jax.jit(f)(new_params(), X),
    "grad": lambda f: jax.grad(lambda p, x: total(f(p, x)), argnums=(0, 1))(new_params(), X),
    "value_and_grad": lambda f: jax.value_and_grad(lambda p: f(p, X)[1])(new_params()),
    "has_aux": lambda f: jax.grad(lambda p: f(p, X)[::-1], has_aux=True)(new_params()),
    "vmap": lambda f: jax.vmap(f, in_axes=(None, 0))(new_params(), jnp.stack([X, 2 * X])),
    "scan": lambda f: jax.lax.scan(f, new_params(), jnp.stack([X, 2 * X])),
    "jit_of_grad": lambda f: jax.jit(jax.grad(lambda p: total(f(p, X))))(new_params()),
    "vmap_of_grad": lambda f: jax.vmap(jax.grad(lambda x: total(f(new_params(), x))))(jnp.stack([X, 2 * X])),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(lambda p: total(f(p, X))))(new_params()),
    "fori_loop": lambda f: jax.lax.fori_loop(0, 2, lambda i, p: f(p, X)[0], new_params()),
    "grad_of_grad": lambda f: jax.grad(lambda t: jax.grad(lambda u: total(f(new_params(), X * u)))(t) ** 2)(1.0),
}
FORWARD_MODE: dict[str, Callable[[Callable], Any]] = {
    "jvp": lambda f: jax.jvp(f, (new_params(), X), (new_params(), jnp.cos(X))),
    "linearize": lambda f: jax.linearize(lambda x: f(new_params(), x), X)[1](jnp.cos(X)),
    "hessian": lambda f: jax.hessian(lambda t: total(f(new_params(), X * t)))(1.0),
}


@pytest.mark.parametrize("transform", [*TRANSFORMS, *FORWARD_MODE])
def test_values_and_derivatives_under_a_transform(transform: str) -> None:
    use = {**TRANSFORMS, **FORWARD_MODE}[transform]
    assert_close(use(optimize(step)), use(step))


@pytest.mark.parametrize("rule", ["custom_jvp", "custom_vjp"])
@pytest.mark.parametrize("transform", ["jit", "grad_of_grad", "jvp", "vmap", "checkpoint"])
def test_the_rules_of_the_original_are_used(rule: str, transform: str) -> None:
    if (rule, transform) == ("custom_vjp", "jvp"):
        transform = "jit_of_grad"  # a custom_vjp has no forward mode
    use = {**TRANSFORMS, **FORWARD_MODE}[transform]
    expected = use(STEPS[rule])
    assert_close(use(optimize(STEPS[rule])), expected)
    without_rule = use(step)
    assert any(
        not np.allclose(one, other, rtol=1e-2)
        for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(without_rule), strict=True)
    ), "the rules do not show in this transform, so it proves nothing"


@pytest.mark.parametrize("transform", ["jit", "grad", "vmap", "scan"])
def test_the_rewritten_program_is_what_runs_inside(transform: str) -> None:
    optimized = optimize(step)
    assert checkpoints_in(lambda: TRANSFORMS[transform](step)) == 0
    # Whoever differentiates the step differentiates the original; what is only computed is the rewritten one.
    assert (checkpoints_in(lambda: TRANSFORMS[transform](optimized)) > 0) == (transform != "grad")


def test_closing_over_values_of_an_outer_transform() -> None:
    def outer(wrap: Callable, scale: jax.Array) -> Any:
        noise = jnp.cos(X) * scale
        closing = wrap(lambda params, x: step(params, x * scale + noise))
        return closing(new_params(), X)

    for use in (
        lambda wrap: jax.jit(lambda scale: outer(wrap, scale))(2.0),
        lambda wrap: jax.grad(lambda scale: total(outer(wrap, scale)))(2.0),
        lambda wrap: jax.vmap(lambda scale: outer(wrap, scale)[1])(jnp.arange(3.0)),
        lambda wrap: jax.jit(jax.grad(lambda scale: total(outer(wrap, scale))))(2.0),
    ):
        assert_close(use(optimize), use(lambda fun: fun))


def test_integers_and_keys_pass_through_derivatives() -> None:
    def keyed(params: Any, key: jax.Array, count: jax.Array, x: jax.Array) -> tuple:
        key, used = jax.random.split(key)
        params, value = step(params, x + jax.random.uniform(used))
        return params, key, count + 1, value

    args = (jax.random.key(0), jnp.asarray(3), X)
    for use in (
        lambda f: jax.jit(f)(new_params(), *args),
        lambda f: jax.value_and_grad(lambda p: f(p, *args)[3])(new_params()),
        lambda f: jax.grad(lambda p: (lambda r: (r[3], r[1:3]))(f(p, *args)), has_aux=True)(new_params()),
        lambda f: jax.vmap(f, in_axes=(None, 0, None, None))(new_params(), jax.random.split(args[0], 2), *args[1:]),
    ):
        assert_close(use(optimize(keyed)), use(keyed))


def test_effects_happen_once_and_in_order(capfd: pytest.CaptureFixture) -> None:
    def printing(params: Any, x: jax.Array) -> Any:
        def activation(x: jax.Array) -> jax.Array:
            jax.debug.print("{}", x.shape[0], ordered=True)
            return jnp.sin(x)

        jax.debug.print("first", ordered=True)
        result = step_with(activation)(params, x)
        jax.debug.print("last", ordered=True)
        return result

    for use in (
        lambda f: f(new_params(), X),
        lambda f: jax.jit(f)(new_params(), X),
        lambda f: jax.value_and_grad(lambda p: f(p, X)[1])(new_params()),
    ):
        capfd.readouterr()
        found = use(optimize(printing))
        jax.effects_barrier()
        assert capfd.readouterr().out.split() == ["first", *[str(BATCH)] * (LAYERS - 1), "last"]
        assert_close(found, use(printing))


def test_under_shard_map_and_a_named_vmap() -> None:
    mesh = jax.make_mesh((1,), ("batch",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": (PartitionSpec(), PartitionSpec("batch")), "out_specs": PartitionSpec()}

    def averaged(params: Any, x: jax.Array) -> Any:
        return jax.lax.pmean(step(params, x), "batch")

    expected = jax.jit(jax.shard_map(averaged, mesh=mesh, **specs))(new_params(), X)
    assert_close(jax.jit(jax.shard_map(optimize(averaged), mesh=mesh, **specs))(new_params(), X), expected)
    assert_close(optimize(jax.shard_map(averaged, mesh=mesh, **specs))(new_params(), X), expected)
    both = jnp.stack([X, 2 * X])
    named = [
        jax.vmap(f, in_axes=(None, 0), axis_name="batch")(new_params(), both) for f in (optimize(averaged), averaged)
    ]
    assert_close(*named)


@pytest.mark.filterwarnings("default:.*nothing will be saved on the CPU:remat_opt.RematWarning")
def test_the_cpu_user_is_reported_once_that_nothing_is_saved() -> None:
    optimized = optimize(step)
    with pytest.warns(RematWarning, match="nothing will be saved on the CPU") as caught:
        jax.jit(lambda p, x: optimized(p, x))(new_params(), X)
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.jit(lambda p, x: optimized(p, 2 * x))(new_params(), X)
        jax.vmap(optimized, in_axes=(None, 0))(new_params(), jnp.stack([X, X]))
        optimized(new_params(), X)


def test_the_warning_names_the_users_line_also_when_jax_calls_the_step() -> None:
    with pytest.warns(RematWarning, match="nothing will be saved on the CPU") as caught:
        jax.jit(optimize(step))(new_params(), X)
    assert [warning.filename for warning in caught] == [__file__]


def test_a_call_inside_a_transform_does_not_loosen_the_promise_of_a_budget() -> None:
    optimized = optimize(step, budget=0.7)
    jax.jit(lambda p, x: optimized(p, x))(new_params(), X)  # nothing can be compiled and checked in here
    plan = optimized.plan(new_params(), X)
    assert plan.measured.temp_bytes <= 0.7 * plan.plain_measured.temp_bytes


def test_an_optimised_function_can_be_optimised_with_what_is_around_it() -> None:
    inner = optimize(step)
    outer = optimize(jax.jit(lambda params, x: inner(params, x)))
    assert_close(outer(new_params(), X), step(new_params(), X))
    assert temp_bytes(outer, new_params(), X) <= 0.7 * temp_bytes(jax.jit(step), new_params(), X)


def test_an_equinox_step_inside_another_filter_jit() -> None:
    @eqx.filter_jit
    def eqx_step(model: eqx.nn.MLP, x: jax.Array) -> tuple[eqx.nn.MLP, jax.Array]:
        value, grads = eqx.filter_value_and_grad(lambda model: jnp.mean(jax.vmap(model)(x) ** 2))(model)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), value

    model = eqx.nn.MLP(WIDTH, WIDTH, WIDTH, LAYERS, jnp.sin, key=jax.random.key(0))
    optimized = optimize(eqx_step)
    found = eqx.filter_jit(lambda model, x: optimized(model, x))(model, X)
    assert_close(eqx.filter(found, eqx.is_array), eqx.filter(eqx_step(model, X), eqx.is_array))
