"""Splitting the batch: the same values, what is split and what ends a region, for each kind of operation."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from split_checks import assert_same, check_split, normal, program_of, sgd

from remat_opt.rewrites.split.batch import batch_along, find_batch, place_of

ROWS, WIDTH, TIME = 12, 5, 4
IDS = np.random.default_rng(5).integers(0, 9, (ROWS, TIME)).astype(np.int32)


class Case(NamedTuple):
    """`step(*args())` has one batch of `ROWS` rows, in so many loops."""

    step: Callable[..., Any]
    args: Callable[[], tuple]
    loops: int = 1


def dense(p: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ p)


def x() -> jax.Array:
    return normal(0, ROWS, WIDTH)


def p(seed: int = 4, *shape: int) -> jax.Array:
    return normal(seed, *(shape or (WIDTH, WIDTH)))


def masked(p: Any, x: jax.Array, mask: jax.Array) -> jax.Array:
    """The denominator is a sum over the batch that the gradients of all rows need."""
    return jnp.sum(jnp.mean((dense(p, x) - x) ** 2, -1) * mask) / jnp.sum(mask)


def centred(p: Any, x: jax.Array) -> jax.Array:
    h = dense(p, x)
    return jnp.mean(dense(p, h - h.mean(0)) ** 2)


def language_model(p: Any, ids: jax.Array) -> jax.Array:
    """A tied embedding: its gradient is the sum of a scatter and a product."""
    log = jax.nn.log_softmax(dense(p["w"], p["e"][ids]) @ p["e"].T)
    return -jnp.mean(jnp.take_along_axis(log[:, :-1], ids[:, 1:, None], -1))


def layers(p: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(lax.scan(lambda h, w: (dense(w, h), None), x, p)[0] ** 2)


def recurrent(p: Any, xs: jax.Array) -> jax.Array:
    """The batch is the second axis of the frames."""

    def step(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = jnp.tanh(x @ p["x"] + h @ p["h"])
        return h, h

    _, hs = lax.scan(step, jnp.zeros((ROWS, WIDTH), xs.dtype), xs)
    return jnp.mean(hs[-1] ** 2) + jnp.mean(hs)


def attention(p: Any, x: jax.Array) -> jax.Array:
    q, k, v = (jnp.einsum("btd,dhe->bhte", x, w) for w in p["qkv"])
    scores = jnp.where(jnp.tri(TIME) > 0, jnp.einsum("bhte,bhse->bhts", q, k), -1e9)
    merged = jnp.einsum("bhts,bhse->bthe", jax.nn.softmax(scores), v).reshape(ROWS * TIME, -1)
    return jnp.mean((merged @ p["o"]) ** 2)


def convolutions(p: Any, x: jax.Array) -> jax.Array:
    numbers = ("NHWC", "HWIO", "NHWC")
    h = jax.nn.relu(lax.conv_general_dilated(x, p["a"], (1, 1), "SAME", dimension_numbers=numbers))
    h = lax.reduce_window(h, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    h = lax.conv_general_dilated(h, p["b"], (2, 2), "SAME", dimension_numbers=numbers, feature_group_count=4)
    return jnp.mean(lax.conv_transpose(h, p["c"], (2, 2), "SAME", dimension_numbers=numbers) ** 2)


def branches(p: Any, flag: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean(lax.cond(flag > 0, lambda x: dense(p, x), lambda x: x @ p * 2, x) ** 2)


@jax.custom_vjp
def sine(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))


def dropped(p: Any, key: jax.Array, x: jax.Array) -> jax.Array:
    h = dense(p, x)
    return jnp.mean(jnp.where(jax.random.bernoulli(key, 0.7, h.shape), h / 0.7, 0) @ p)


def metrics(p: Any, x: jax.Array) -> Any:
    def loss(p: Any) -> Any:
        h = dense(p, x)
        among_all = {"median": jnp.sort(h.sum(1))[3], "reversed": h[::-1]}
        counted = {"any": (h > 0.4).any(), "all": (h > -2).all(), "n": (h > 0).sum(), "best": h.argmax(1)}
        return jnp.mean(h**2), {**among_all, **counted, "h": h, "most": abs(h).max(), "least": h.min()}

    return jax.value_and_grad(loss, has_aux=True)(p)


def scattered(p: Any, x: jax.Array, ids: jax.Array) -> jax.Array:
    """By rows of indices, by batching dimensions, and along whole windows."""
    rows = jax.vmap(lambda h, i: jnp.zeros((9,)).at[i].add(h[: i.size]).at[i[0]].max(0.3))(dense(p, x), ids)
    columns = jnp.zeros((ROWS, 9)).at[:, 2].set(x[:, 0] * p[0, 0]).at[:, 3:5].multiply(2.0)
    return jnp.mean((rows + columns) ** 2) + jnp.mean(jnp.sort(jnp.concatenate([x @ p, x], 1), axis=1)[:, 2:4] ** 3)


def histogram(p: Any, x: jax.Array, ids: jax.Array) -> Any:
    """Rows are added to what is no zero."""
    h = dense(p, x)
    return jnp.full((9,), 2.0).at[ids[:, 0]].add(h[:, 0]), h


def while_loop(p: Any, x: jax.Array) -> Any:
    h = lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, dense(p, s[1])), (0, x))[1]
    return jnp.sum(h), h


def second_order(p: Any, x: jax.Array) -> jax.Array:
    gradient = jax.grad(lambda p: jnp.mean(dense(p, x) ** 2))(p)
    return p - jax.grad(lambda p: jnp.sum(jax.grad(lambda p: jnp.mean(dense(p, x) ** 2))(p) ** 2))(p) + gradient


def keyed(loss: Callable) -> Callable:
    """A step with an argument between the parameters and the batch that has no gradient."""
    return lambda p, other, x: sgd(lambda p, x: loss(p, other, x))(p, x)


CASES = {
    "product": Case(sgd(lambda p, x: jnp.mean(dense(p, x) ** 2)), lambda: (p(), x())),
    "masked": Case(sgd(masked), lambda: (p(), x(), (x()[:, 0] > 0).astype(float))),
    "centred": Case(sgd(centred), lambda: (p(), x()), loops=3),
    "logarithm_of_the_loss": Case(sgd(lambda p, x: jnp.log(jnp.mean(dense(p, x) ** 2))), lambda: (p(), x()), loops=2),
    "language_model": Case(sgd(language_model), lambda: ({"e": p(6, 9, WIDTH), "w": p()}, jnp.asarray(IDS))),
    "layers": Case(sgd(layers), lambda: (p(2, 4, WIDTH, WIDTH), x())),
    "recurrent": Case(sgd(recurrent), lambda: ({"x": p(8), "h": p(9)}, normal(10, TIME, ROWS, WIDTH))),
    "attention": Case(
        sgd(attention), lambda: ({"qkv": p(3, 3, WIDTH, 2, 3), "o": p(5, 6, 2)}, normal(1, ROWS, TIME, WIDTH))
    ),
    "convolutions": Case(
        sgd(convolutions),
        lambda: ({"a": p(12, 3, 3, 3, 4), "b": p(13, 3, 3, 1, 8), "c": p(14, 3, 3, 8, 2)}, normal(11, ROWS, 8, 8, 3)),
    ),
    "branches": Case(keyed(branches), lambda: (p(), jnp.asarray(1.0), x())),
    "rules_and_jit": Case(sgd(lambda p, x: jnp.mean(jax.jit(sine)(x @ p) ** 2)), lambda: (p(), x())),
    "dropout": Case(keyed(dropped), lambda: (p(), jax.random.key(0), x())),
    "dropout_of_another_generator": Case(keyed(dropped), lambda: (p(), jax.random.key(0, impl="rbg"), x())),
    "metrics": Case(metrics, lambda: (p(3, WIDTH, 7), x())),
    "scattered": Case(sgd(scattered), lambda: (p(), x(), jnp.asarray(IDS))),
    "histogram": Case(histogram, lambda: (p(), x(), jnp.asarray(IDS))),
    "while_loop": Case(while_loop, lambda: (p(), x())),
    "second_order": Case(second_order, lambda: (p(), x()), loops=2),
}


@pytest.mark.parametrize("name", CASES)
def test_a_split_step_computes_the_same(name: str) -> None:
    case = CASES[name]
    with jax.enable_x64(True):
        args = case.args()
        batch = check_split(case.step, *args, chunks=(3,))
        assert batch.rows == ROWS
        assert batch.stages.loops == case.loops
        if name in ("masked", "layers", "dropout"):
            assert_same(batch.program, batch.split(ROWS), jax.tree.leaves(args))


def test_the_batch_may_be_any_axis_of_what_is_no_state() -> None:
    frames = normal(10, TIME, ROWS, WIDTH)
    batch = find_batch(program_of(sgd(recurrent), {"x": p(8), "h": p(9)}, frames))
    assert batch is not None
    assert batch.arguments == ((2, 1),)
    assert batch.numbers == (2, 3, 4, 6, 12)


def test_labels_and_masks_are_split_with_the_images() -> None:
    mask = (x()[:, 0] > 0).astype(jnp.float32)
    batch = find_batch(program_of(sgd(masked), p(), x(), mask))
    assert batch is not None
    assert batch.arguments == ((1, 0), (2, 0))


def test_masks_of_dropout_are_not_made_whole() -> None:
    batch = find_batch(program_of(keyed(dropped), p(), jax.random.key(0), x()))
    assert batch is not None
    drawn = [at for at, one in enumerate(batch.program.equations) if one.primitive.name == "random_bits"]
    assert drawn
    assert batch.stages.analysis.runs.keys() >= {*drawn}


def test_sums_are_carried_in_float32_and_integers_exactly() -> None:
    def step(p: jax.Array, x: jax.Array, ids: jax.Array) -> Any:
        return jax.grad(lambda p: jnp.mean(dense(p, x)))(p), jnp.sum(ids), jnp.sum(dense(p, x), 0)

    half = lambda one: one.astype(jnp.bfloat16)  # noqa: E731
    program = program_of(step, half(p()), half(x()), jnp.asarray(IDS * 2**24))
    batch = batch_along(program, 1, 0)
    (loop,) = [one for one in batch.split(4).equations if one.primitive.name == "scan"]
    carried = {str(batch.split(4).avals[value].dtype) for value in loop.outputs}
    assert carried <= {"float32", "int32"}


def test_what_meets_the_whole_batch_is_named() -> None:
    batch = find_batch(program_of(sgd(centred), p(), x()))
    assert batch is not None
    assert any("centred" in place_of(one) for one in batch.reductions_used_by_rows)
    one_loop = find_batch(program_of(sgd(masked), p(), x(), x()[:, 0]))
    assert one_loop is not None
    assert not one_loop.reductions_used_by_rows
    metric = batch_along(program_of(metrics, p(3, WIDTH, 7), x()), 1, 0)
    assert {one.primitive.name for one in metric.whole_batch_readers} >= {"sort", "rev"}
