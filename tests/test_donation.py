"""State that is not donated: one warning, with the line to write and the bytes that it saves."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import remat_opt
from remat_opt import RematWarning, optimize

WIDTH, LAYERS = 384, 2
STATE = LAYERS * WIDTH**2 * 4
SAVED = f"{STATE / 1e6:.1f} MB"


def params() -> list[jax.Array]:
    return [jnp.eye(WIDTH) / 2 for _ in range(LAYERS)]


X = jnp.ones((512, WIDTH))


def forward(weights: Any, x: jax.Array) -> jax.Array:
    for weight in weights:
        x = jnp.sin(jnp.sin(x @ weight))
    return x


def step(params, x):
    value, gradients = jax.value_and_grad(lambda params: jnp.mean(forward(params, x) ** 2))(params)
    return jax.tree.map(lambda weight, gradient: weight - 0.1 * gradient, params, gradients), value


def warnings_of(use: Callable[[], Any]) -> list[str]:
    """What a call warns of undonated state."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        use()
    return [
        str(one.message) for one in caught if issubclass(one.category, RematWarning) and "donate" in str(one.message)
    ]


def line_in(message: str) -> str:
    return re.search(r"write (.*?) in (jax|nnx)\.jit or remat_opt\.optimize", message)[1]


def test_state_that_is_not_donated_is_reported_once_with_the_line_and_the_bytes() -> None:
    optimized = optimize(step, verify=False)
    (message,) = warnings_of(lambda: [optimized(params(), X), optimized(params(), X[::2]), optimized.plan(params(), X)])
    assert message.startswith("remat_opt: step: ")
    assert f"saves {SAVED}" in message
    assert "params;" in message
    assert "If you do not use the old" in message
    assert line_in(message) == "donate_argnums=0"


def test_the_line_saves_what_it_says_and_silences_the_warning() -> None:
    optimized = optimize(step, verify=False, donate_argnums=0)
    assert warnings_of(lambda: optimized(params(), X)) == []
    plain, donated = (remat_opt.measure(jax.jit(step, **o), params(), X) for o in ({}, {"donate_argnums": 0}))
    assert donated.optimized.alias_bytes == pytest.approx(plain.undonated.saved_bytes, rel=0.01)
    assert donated.undonated is None
    shown = " ".join(str(plain).split())
    assert f"write donate_argnums=0 in jax.jit or remat_opt.optimize: it saves {SAVED}." in shown
    assert "donate_argnums" not in str(donated)


def with_momentum(rate, params, x, momentum):
    (new, value), decay = step(params, x), 0.9 * (1 if rate == "slow" else 2)
    return new, [decay * old + 1 for old in momentum], value


def by_keyword(x, *, params):
    return step(params, x)


CALLS = {
    "two arguments": (lambda p, x, m: with_momentum("slow", p, x, m), {}, (params(), X, params()), {}, (0, 2)),
    "static": (with_momentum, {"static_argnums": 0}, ("slow", params(), X, params()), {}, (1, 3)),
    "static from the end": (
        lambda p, x, m, rate: with_momentum(rate, p, x, m),
        {"static_argnums": -1},
        (params(), X, params(), "slow"),
        {},
        (0, 2),
    ),
    "one is donated": (with_momentum, {"static_argnums": 0, "donate_argnums": 3}, ("slow", params(), X, params()), {},
                       (1, 3)),
    "keyword": (by_keyword, {}, (X,), {"params": params()}, "params"),
    "keyword for a position": (step, {}, (), {"params": params(), "x": X}, "params"),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("jit", [False, True])
def test_the_line_counts_arguments_as_jit_does(call: tuple, jit: bool) -> None:
    fun, options, args, kwargs, expected = call
    optimized = optimize(jax.jit(fun, **options), verify=False) if jit else optimize(fun, verify=False, **options)
    (message,) = warnings_of(lambda: optimized.plan(*args, **kwargs))
    line = line_in(message)
    assert line == (f"donate_argnums={expected}" if isinstance(expected, tuple) else f"donate_argnames={expected!r}")
    again = optimize(fun, verify=False, **{**options, **eval(f"dict({line})")})
    assert warnings_of(lambda: again.plan(*args, **kwargs)) == []


def ema(teacher, params, x):
    new, value = step(params, x)
    return new, value + jnp.mean(forward(teacher, x))


def forwarded(frozen, params, x):
    new, value = step(params, x)
    return frozen, new, value


def teacher_of_its_own(teacher, params, x):
    new, value = step(params, x)
    return [0.9 * old + 0.1 * one for old, one in zip(teacher, new, strict=True)], new, value


@pytest.mark.parametrize(
    ("fun", "numbers"),
    [(ema, "1"), (forwarded, "1"), (teacher_of_its_own, "(0, 1)")],
    ids=lambda one: getattr(one, "__name__", str(one)),
)
def test_what_is_only_read_or_comes_back_as_it_was_is_no_state(fun: Callable, numbers: str) -> None:
    (message,) = warnings_of(lambda: optimize(fun, verify=False).plan(params(), params(), X))
    assert line_in(message) == f"donate_argnums={numbers}"


LARGE = jnp.ones((512, 1024))
SILENT = {
    "inference": (lambda p, x: forward(p, x), (params(), X)),
    "an image from an image": (lambda p, x: x + forward(p, x), (params(), X)),
    "a module hands itself back": (lambda p, x: (p, forward(p, x)), (params(), X)),
    "gradients, no update": (lambda p, x: jax.grad(lambda p: forward(p, x).sum())(p), (params(), X)),
    "toy": (step, ([jnp.eye(64)] * 3, jnp.ones((64, 64)))),
    "little state beside much else": (
        lambda p, x: (step(p, x)[0], jnp.sin(x[:, 1:])), (params(), jnp.ones((20_000, WIDTH)))
    ),
    "another type": (lambda p, x: [one.astype(jnp.bfloat16) for one in step(p, x)[0]], (params(), X)),
}  # fmt: skip


@pytest.mark.parametrize("case", SILENT.values(), ids=SILENT)
def test_where_nothing_of_worth_can_be_donated_nothing_is_said(case: tuple) -> None:
    fun, args = case
    assert warnings_of(lambda: optimize(fun, verify=False).plan(*args)) == []


def test_inside_another_jit_where_nothing_can_be_donated_nothing_is_said() -> None:
    optimized = optimize(step, verify=False)
    assert warnings_of(lambda: jax.jit(optimized).trace(params(), X)) == []


def test_state_of_a_step_with_nothing_to_gain_is_reported_too() -> None:
    def decode(cache, token):
        return {name: jax.lax.dynamic_update_slice(old, token, (3, 0)) for name, old in cache.items()}

    cache = {"key": LARGE, "value": LARGE}
    (message,) = warnings_of(lambda: optimize(decode)(cache, jnp.ones((1, 1024))))
    assert line_in(message) == "donate_argnums=0"


def test_equinox_is_told_its_own_line() -> None:
    def eqx_step(model, x):
        return step(model, x)

    def data_first(x, model):
        return step(model, x)

    for fun, args, line in (
        (eqx_step, (params(), X), 'eqx.filter_jit(eqx_step, donate="all")'),
        (data_first, (X, params()), 'eqx.filter_jit(data_first, donate="all-except-first")'),
    ):
        (message,) = warnings_of(lambda fun=fun, args=args: optimize(eqx.filter_jit(fun), verify=False).plan(*args))
        assert f"write {line}" in message
        assert f"saves {SAVED}" in message
        donate = re.search('donate="(.*?)"', line)[1]
        donated = optimize(eqx.filter_jit(fun, donate=donate), verify=False)
        assert warnings_of(lambda donated=donated, args=args: donated.plan(*args)) == []


@pytest.mark.parametrize("is_jitted", [False, True])
def test_nnx_is_told_its_own_line(is_jitted: bool) -> None:
    class Model(nnx.Module):
        def __init__(self):
            self.weights = nnx.List([nnx.Param(weight) for weight in params()])

    def nnx_step(scale, model, x):
        def loss(model):
            return scale * jnp.mean(forward([weight[...] for weight in model.weights], x) ** 2)

        gradients = nnx.grad(loss)(model)
        for weight, gradient in zip(model.weights, gradients["weights"].values(), strict=True):
            weight[...] -= 0.1 * gradient[...]

    def infer(model, x):
        return forward([weight[...] for weight in model.weights], x)

    def optimized(fun: Callable, **options: Any) -> Any:
        return optimize(nnx.jit(fun, **options), verify=False) if is_jitted else optimize(fun, verify=False, **options)

    (message,) = warnings_of(lambda: optimized(nnx_step)(1.0, Model(), X))
    assert line_in(message) == "donate_argnums=1"
    assert f"saves {SAVED}" in message
    assert "nnx.jit" in message
    assert "nnx_step: " in message
    assert warnings_of(lambda: optimized(nnx_step, donate_argnums=1)(1.0, Model(), X)) == []
    assert warnings_of(lambda: optimized(infer)(Model(), X)) == []
