"""What a step does beside computing happens as often as in the original step, and in its order."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_close, equations_in
from jax import lax
from jax.experimental import checkify, io_callback
from jax.extend.core import primitives

from remat_opt import RematWarning, optimize

pytestmark = pytest.mark.short

WIDTH, LAYERS, BATCH = 16, 4, 128
W = jnp.asarray(np.random.default_rng(0).normal(size=(LAYERS, WIDTH, WIDTH)) / 4, jnp.float32)
X = jnp.asarray(np.random.default_rng(1).normal(size=(BATCH, WIDTH)), jnp.float32)

Effect = Callable[[Any, jax.Array], jax.Array]
"""Does something with a layer's number and its result, and gives the result on."""


class Recorder:
    """What reached the host, in the order in which it did."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, float]] = []

    def __call__(self, layer: Any, value: Any) -> None:
        self.seen.append((int(layer), float(value)))

    def doubled(self, layer: Any, values: Any) -> Any:
        self(layer, values[0, 0])
        return 2 * np.asarray(values)

    def take(self) -> list[tuple[int, float]]:
        jax.effects_barrier()
        seen, self.seen = self.seen, []
        return seen


RECORDER = Recorder()


def told(call: Callable) -> Effect:
    def effect(layer: Any, h: jax.Array) -> jax.Array:
        call(layer, lax.stop_gradient(h[0, 0]))
        return h

    return effect


def asked(call: Callable) -> Effect:
    """The host's answer is a factor of the loss: as large as an activation, and needed by the derivative."""

    def effect(layer: Any, h: jax.Array) -> jax.Array:
        like = jax.ShapeDtypeStruct(h.shape, h.dtype)
        answer = call(RECORDER.doubled, like, jnp.int32(layer), lax.stop_gradient(h))
        return h * (1 + 0.01 * lax.stop_gradient(answer))

    return effect


EFFECTS: dict[str, Effect] = {
    "debug callback": told(lambda *args: jax.debug.callback(RECORDER, *args)),
    "ordered debug callback": told(lambda *args: jax.debug.callback(RECORDER, *args, ordered=True)),
    "io callback": asked(io_callback),
    "ordered io callback": asked(partial(io_callback, ordered=True)),
    "io callback without result": told(lambda *args: io_callback(RECORDER, None, *args)),
    "pure callback": asked(jax.pure_callback),
}
ORDERED = {"ordered debug callback", "ordered io callback"}


def flat(block: Callable, w: jax.Array, h: jax.Array) -> jax.Array:
    for layer in range(LAYERS):
        h = block(layer, w[layer], h)
    return h


def in_a_loop(block: Callable, w: jax.Array, h: jax.Array) -> jax.Array:
    return lax.scan(lambda h, one: (block(one[0], one[1], h), None), h, (jnp.arange(LAYERS), w))[0]


def in_a_branch(block: Callable, w: jax.Array, h: jax.Array) -> jax.Array:
    for layer in range(LAYERS):
        h = lax.cond(h[0, 0] < 10, partial(block, layer), lambda w, h: h, w[layer], h)
    return h


def in_a_checkpoint(block: Callable, w: jax.Array, h: jax.Array) -> jax.Array:
    """JAX runs what is in a checkpoint twice; so do we, neither more often nor less."""
    for layer in range(LAYERS):
        h = jax.checkpoint(partial(block, layer))(w[layer], h)
    return h


def in_a_rule(block: Callable, w: jax.Array, h: jax.Array) -> jax.Array:
    """In the forward part of a hand-written derivative."""
    for layer in range(LAYERS):
        plain = partial(lambda layer, w, h: jnp.sin(h @ w), layer)
        rule = jax.custom_vjp(partial(block, layer))
        rule.defvjp(
            lambda w, h, layer=layer, plain=plain: (block(layer, w, h), (w, h)),
            lambda kept, g, plain=plain: jax.vjp(plain, *kept)[1](g),
        )
        h = rule(w[layer], h)
    return h


PLACES = {place.__name__: place for place in (flat, in_a_loop, in_a_branch, in_a_checkpoint, in_a_rule)}


def step_with(effect: Effect, place: Callable) -> Callable:
    def block(layer: Any, w: jax.Array, h: jax.Array) -> jax.Array:
        return effect(layer, jnp.sin(h @ w))

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, grad = jax.value_and_grad(lambda w: jnp.mean(place(block, w, jnp.sin(x @ w[0])) ** 2))(w)
        return w - 0.1 * grad, value

    return step


def segments_of(optimized: Any, *args: Any) -> list[Any]:
    return [one for one in optimized.jaxpr(*args).eqns if one.primitive is primitives.remat_p]


EVERYWHERE = ("debug callback", "ordered debug callback", "io callback")


@pytest.mark.parametrize(
    ("name", "place"), [(name, place) for place in PLACES for name in EFFECTS if place == "flat" or name in EVERYWHERE]
)
def test_callbacks_run_as_often_as_before_and_in_order(name: str, place: str) -> None:
    step = step_with(EFFECTS[name], PLACES[place])
    if place == "in_a_checkpoint" and "io" in name.split():  # JAX refuses these, and so do we
        with pytest.raises(NotImplementedError, match="Effects not supported"):
            optimize(step)(W, X)
        return
    expected = jax.jit(step)(W, X)
    seen_before = RECORDER.take()
    optimized = optimize(step)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RematWarning)  # loops with effects stay as they are
        found = optimized(W, X)
    seen = RECORDER.take()
    assert_close(found, expected)
    assert len(seen) == len(seen_before) >= LAYERS
    in_order = (seen, seen_before) if name in ORDERED else (sorted(seen), sorted(seen_before))
    assert [layer for layer, _ in in_order[0]] == [layer for layer, _ in in_order[1]]
    np.testing.assert_allclose(*([value for _, value in one] for one in in_order), rtol=1e-5, atol=1e-6)
    if place in ("flat", "in_a_rule"):
        assert not optimized.plan(W, X).is_plain


# checkify


def guarded(w: jax.Array, x: jax.Array) -> Any:
    def loss(w: jax.Array) -> jax.Array:
        h = x
        for layer in range(LAYERS):
            h = jnp.sin(h @ w[layer])
            checkify.check(jnp.all(h < 0.99), "layer {layer} is full", layer=jnp.int32(layer))
        return jnp.mean(h**2)

    value, grad = jax.value_and_grad(loss)(w)
    return w - 0.1 * grad, value


def test_checked_errors_are_those_of_the_original_step() -> None:
    checked = checkify.checkify(guarded)
    optimized = optimize(checked)
    for x in (X, 1e-3 * X):
        (error, results), (expected_error, expected) = optimized(W, x), jax.jit(checked)(W, x)
        assert error.get() == expected_error.get()
        assert (error.get() is None) == (x is not X)
        assert_close(results, expected)
        assert not optimized.plan(W, x).is_plain


def test_checks_can_be_put_on_an_optimised_step() -> None:
    step = optimize(step_with(told(lambda *args: None), flat))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RematWarning)
        error, results = jax.jit(checkify.checkify(step, errors=checkify.float_checks))(W, X)
        of_nan, _ = jax.jit(checkify.checkify(step, errors=checkify.float_checks))(W, X * jnp.nan)
    assert error.get() is None
    assert "nan" in str(of_nan.get())
    assert_close(results, step(W, X))


# References


def test_a_step_with_references_runs_unchanged_and_says_so() -> None:
    def counting(count: Any, w: jax.Array, x: jax.Array) -> Any:
        inner = jax.new_ref(jnp.zeros(()))
        new, value = step_with(told(lambda *args: None), flat)(w, x + inner[...])
        inner[...] += value
        count[...] += 1
        return new, inner[...]

    ours, plain = jax.new_ref(jnp.zeros(())), jax.new_ref(jnp.zeros(()))
    optimized = optimize(counting)
    with pytest.warns(RematWarning, match="references"):
        found = optimized(ours, W, X)
    assert_close(found, jax.jit(counting)(plain, W, X))
    optimized(ours, W, X)
    assert float(ours[...]) == 2


# Random numbers


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("kind", ["noise", "mask"])
def test_random_numbers_are_the_same_in_both_passes(kind: str, impl: str) -> None:
    """The gradient of a noisy layer is scaled as the layer was, so that the numbers of both passes have to agree. Noise
    is drawn again; of a mask the bytes are kept on the CPU, and not the bits."""

    def drawn(key: jax.Array, layer: Any, shape: tuple[int, ...]) -> jax.Array:
        folded = jax.random.fold_in(key, layer)
        return jax.random.uniform(folded, shape) if kind == "noise" else jax.random.bernoulli(folded, 0.5, shape)

    def step(w: jax.Array, key: jax.Array, x: jax.Array) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            def block(layer: Any, w: jax.Array, h: jax.Array) -> jax.Array:
                h = jnp.sin(h @ w)
                numbers = drawn(key, layer, h.shape)
                return h * numbers if kind == "noise" else jnp.where(numbers, 2 * h, 0)

            return jnp.mean(flat(block, w, x) ** 2)

        value, grad = jax.value_and_grad(loss)(w)
        return w - 0.1 * grad, jax.random.split(key)[0], value

    key, x = jax.random.key(5, impl=impl), jnp.tile(X, (4, 1))
    optimized = optimize(step, verify=False)
    assert not optimized.plan(W, key, x).is_plain
    for found, expected in zip(optimized(W, key, x), jax.jit(step)(W, key, x), strict=True):
        if jax.dtypes.issubdtype(found.dtype, jax.dtypes.prng_key):
            assert bool(jnp.all(jax.random.key_data(found) == jax.random.key_data(expected)))
        else:
            assert_close(found, expected)
    segments = segments_of(optimized, W, key, x)
    again = [one for segment in segments for one in equations_in(segment.params["jaxpr"])]
    drawing = (primitives.random_bits_p, primitives.rng_bit_generator_p)
    drawn_again = sum(one.primitive in drawing for one in again)
    kept = {one.aval.dtype for segment in segments for one in segment.invars if one.aval.shape == x.shape}
    if kind == "noise":
        assert drawn_again
        assert jnp.dtype(bool) not in kept
    else:
        assert drawn_again <= 1  # that of the layer at the peak
        assert kept == {jnp.dtype(bool), x.dtype}


def test_numbers_of_a_generator_with_a_state_are_drawn_once() -> None:
    """`rng_uniform` gives others each time: what is drawn is kept, and the update belongs to the loss."""

    def step(w: jax.Array, x: jax.Array) -> Any:
        noise = [lax.rng_uniform(0.5, 1.5, x.shape) for _ in range(LAYERS)]

        def loss(w: jax.Array) -> tuple[jax.Array, Any]:
            h = x
            for layer in range(LAYERS):
                h = jnp.sin((h * noise[layer]) @ w[layer])
            return jnp.mean(h**2), noise

        (value, drawn), grad = jax.value_and_grad(loss, has_aux=True)(w)
        return grad, value, drawn

    optimized = optimize(step, verify=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RematWarning)
        grad, value, drawn = optimized(W, X)

    def with_given(w: jax.Array) -> jax.Array:
        h = X
        for layer in range(LAYERS):
            h = jnp.sin((h * drawn[layer]) @ w[layer])
        return jnp.mean(h**2)

    assert_close((value, grad), jax.value_and_grad(with_given)(W))
