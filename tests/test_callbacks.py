"""Steps with callbacks to the host, planned and measured for devices that are not attached."""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import checkify, io_callback
from jax.extend.core import jaxpr_as_fun, jaxprs_in_params

import remat_opt
from remat_opt.targets import measure_flat
from remat_opt.targets.callbacks import without_callbacks

X = jax.ShapeDtypeStruct((64, 64), jnp.float32)


def ignore(*_: Any) -> None: ...


def answered(call: Callable) -> Callable:
    return lambda x: call(lambda value: value, x, x)


CALLS: dict[str, Callable[[jax.Array], Any]] = {
    "debug print": lambda x: jax.debug.print("{x}", x=x),
    "ordered debug print": lambda x: jax.debug.print("{x}", x=x, ordered=True),
    "debug callback": lambda x: jax.debug.callback(ignore, x),
    "debug callback of a key": lambda x: jax.debug.callback(ignore, jax.random.key(x[0, 0].astype(int))),
    "debug callback of nothing": lambda x: jax.debug.callback(ignore),
    "io callback": answered(io_callback),
    "ordered io callback": answered(partial(io_callback, ordered=True)),
    "io callback without result": lambda x: io_callback(ignore, None, x),
    "pure callback": answered(jax.pure_callback),
    "pure callback of integers": lambda x: jax.pure_callback(lambda v: v > 0, x.astype(bool), x),
    "error_if": lambda x: eqx.error_if(x, jnp.any(x > 3), "too large"),
}


def flat(call: Callable, x: jax.Array) -> Any:
    return x * 2, call(jnp.sin(x))


def in_a_loop(call: Callable, x: jax.Array) -> Any:
    return lax.scan(lambda h, _: (h * 2, call(jnp.sin(h))), x, None, length=3)


def in_a_while_loop(call: Callable, x: jax.Array) -> Any:
    def body(h: jax.Array) -> jax.Array:
        call(h)
        return h * 2

    return lax.while_loop(lambda h: h[0, 0] < 10, body, x)


def in_a_branch(call: Callable, x: jax.Array) -> Any:
    lax.cond(x[0, 0] > 0, lambda x: [call(x), None][1], lambda x: None, x)
    return x * 2


def in_calls(call: Callable, x: jax.Array) -> Any:
    return jax.jit(jax.checkpoint(lambda x: (jnp.sin(x), call(x))))(x)


PLACES = {place.__name__: place for place in (flat, in_a_loop, in_a_while_loop, in_a_branch, in_calls)}


def primitives_in(jaxpr: Any) -> set[str]:
    names = {equation.primitive.name for equation in jaxpr.eqns}
    return names.union(
        *(primitives_in(inner) for equation in jaxpr.eqns for inner in jaxprs_in_params(equation.params))
    )


@pytest.mark.short
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("call", CALLS)
def test_a_program_without_its_callbacks_is_one_of_the_same_types(call: str, place: str) -> None:
    closed = jax.jit(partial(PLACES[place], CALLS[call])).trace(X).jaxpr
    portable = without_callbacks(closed)
    assert not portable.effects
    assert not {name for name in primitives_in(portable.jaxpr) if "callback" in name or "debug" in name}
    assert portable.out_avals == closed.out_avals
    jax.jit(jaxpr_as_fun(portable)).trace(X).lower(lowering_platforms=("cuda",))


@pytest.mark.short
def test_a_program_without_callbacks_is_left_as_it_is() -> None:
    closed = jax.make_jaxpr(lambda x: lax.scan(lambda h, _: (jnp.sin(h), None), x, None, length=3))(X)
    assert without_callbacks(closed) is closed


WIDE = jax.ShapeDtypeStruct((2048, 2048), jnp.float32)
WIDE_BYTES = 4 * 2048 * 2048


def halves(call: Callable, x: jax.Array) -> list[jax.Array]:
    """Without the call all of it is one kernel, which writes the result alone."""
    before = jnp.sin(x)
    answer = call(before)
    return [jnp.sum(before if answer is None else answer)]


@pytest.mark.parametrize("name", ["io callback", "pure callback", "debug print", "error_if"])
@pytest.mark.parametrize("target", ["h200", "v5e"])
def test_operands_and_results_of_callbacks_are_written_to_memory(name: str, target: str) -> None:
    wide = WIDE if target == "h200" else jax.ShapeDtypeStruct((2**14, 2048), jnp.float32)  # more than is on the chip
    figures = measure_flat(partial(halves, CALLS[name]), [wide], target=target)
    without = measure_flat(partial(halves, ignore), [wide], target=target)
    assert figures.temp_bytes - without.temp_bytes >= wide.size * 4
    assert "in place of callbacks to the host and debug prints" in figures.note
    assert "callbacks" not in without.note


def test_what_only_the_host_reads_is_computed() -> None:
    def step(x: jax.Array) -> list[jax.Array]:
        io_callback(ignore, None, x @ x)
        return [x[0, 0] + 1]

    assert measure_flat(step, [WIDE], target="h200").temp_bytes >= WIDE_BYTES


# Steps with the checks of libraries: what does not hold for weights that are not a number.


def descend(loss: Callable, weights: jax.Array) -> jax.Array:
    return weights - 0.1 * jax.grad(loss)(weights)


def step_of_equinox(weights: jax.Array, x: jax.Array) -> Any:
    def loss(weights: jax.Array) -> jax.Array:
        h = x
        for weight in weights:
            h = jnp.tanh(jnp.sin(h @ weight))
        h = eqx.error_if(h, jnp.any(jnp.isnan(h)), "not a number")
        return jnp.mean(h**2)

    return descend(loss, weights)


def step_of_checkify(weights: jax.Array, x: jax.Array) -> Any:
    def checked(weights: jax.Array) -> jax.Array:
        checkify.check(~jnp.any(jnp.isnan(weights)), "not a number")
        return descend(lambda weights: jnp.mean(forward(weights, x) ** 2), weights)

    return checkify.checkify(checked)(weights)


def forward(weights: jax.Array, h: jax.Array) -> jax.Array:
    for weight in weights:
        h = jnp.tanh(jnp.sin(h @ weight))
    return h


def step_of_diffrax(weights: jax.Array, x: jax.Array) -> Any:
    def loss(weights: jax.Array) -> jax.Array:
        term = diffrax.ODETerm(lambda t, y, args: jnp.tanh(y @ args[0]))
        found = diffrax.diffeqsolve(term, diffrax.Euler(), 0.0, x[0, 0], 0.5, x, weights, max_steps=3)
        return jnp.mean(jnp.asarray(found.ys) ** 2)

    return descend(loss, weights)


# Each with a target, factors for its arguments with which its check does not hold, and what is said then.
STEPS = {
    step_of_equinox: ("h200", jnp.nan, 1, "not a number"),
    step_of_checkify: ("h200", jnp.nan, 1, "not a number"),
    step_of_diffrax: ("cpu", 1, 9, "maximum number of solver steps"),  # a large program, 14 s for an absent GPU
}


@pytest.mark.parametrize("step", STEPS)
def test_the_checks_of_libraries_stay_in_the_step_and_out_of_what_is_measured(step: Callable) -> None:
    weights, x = jnp.ones((2, 16, 16)) / 16, jnp.ones((256, 16))
    target, of_weights, of_x, message = STEPS[step]
    figures = remat_opt.measure(step, weights, x, target=target)
    assert figures.plain is not None
    assert figures.optimized is not None
    assert ("in place of callbacks" in figures.optimized.note) == (step is step_of_equinox)
    optimized = remat_opt.optimize(step)
    jax.block_until_ready(optimized(weights, x))
    if step is step_of_checkify:
        assert message in optimized(of_weights * weights, of_x * x)[0].get()
    else:
        with pytest.raises(Exception, match=message):
            jax.block_until_ready(optimized(of_weights * weights, of_x * x))
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            jax.effects_barrier()  # else the error comes again at exit
