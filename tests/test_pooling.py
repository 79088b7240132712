"""The backward pass of max-pooling without a scatter: the same bits, and none of the scatter's buffers."""

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flop_walk import flops_of
from jax import lax
from jax.extend.core import primitives
from step_networks import conv

from remat_opt import Plan, optimize
from remat_opt.emit.train_step import write
from remat_opt.graph.build import build
from remat_opt.graph.cost import Rates
from remat_opt.graph.schedule import save_everything
from remat_opt.rewrites.pooling import without_scatter
from remat_opt.targets import measure_flat
from remat_opt.trace import compat
from remat_opt.trace.inline import Equation, Program, inline
from remat_opt.trace.pool_parts import PLACES, places_of, spread

RATES = Rates(bandwidth=1e9, flops={"float32": 1e9})


def max_pool(x: jax.Array, window: int, stride: int, padding: str | Sequence) -> jax.Array:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, window, window, 1), (1, stride, stride, 1), padding)


def backward(window: int, stride: int, padding: str | Sequence):
    def fun(x, cotangent):
        return jax.vjp(lambda x: max_pool(x, window, stride, padding), x)[1](cotangent)[0]

    return fun


def scatter_in(fun, *arguments) -> Equation:
    program = inline(jax.make_jaxpr(fun)(*arguments))
    return next(e for e in program.equations if e.primitive is primitives.select_and_scatter_add_p)


def in_two_parts(source: jax.Array, operand: jax.Array, params: dict) -> jax.Array:
    return spread(source, places_of(operand, pool=params), pool=params, shape=operand.shape)


@pytest.mark.parametrize(
    ("size", "window", "stride", "padding"),
    [
        (9, 3, 2, "VALID"),
        (8, 2, 2, "VALID"),
        (12, 3, 2, "SAME"),
        (7, 3, 1, "SAME"),
        (11, 5, 3, "SAME"),
        (9, 2, 3, "VALID"),
        (2, 3, 4, "SAME"),
    ],
)
@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_is_the_same_to_the_bit(size: int, window: int, stride: int, padding: str, ties: bool, dtype: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, size, size, 3))
    x = np.round(x) if ties else x
    x[0, 0, 0, 0], x[0, 1, 1, 0], x[1, :4, :4, 1] = np.nan, np.inf, -np.inf
    x = jnp.asarray(x, dtype)
    pooled = jax.eval_shape(lambda x: max_pool(x, window, stride, padding), x)
    cotangent = jnp.asarray(rng.normal(size=pooled.shape), dtype)
    fun = backward(window, stride, padding)
    equation = scatter_in(fun, x, cotangent)
    assert without_scatter(equation, "cpu")
    found = jax.jit(lambda x, g: in_two_parts(g, x, equation.params))(x, cotangent)
    expected = jax.jit(fun)(x, cotangent)
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(expected, np.float32))


def test_min_pooling_and_integers_are_searched_in_their_own_order() -> None:
    x = jnp.asarray(np.random.default_rng(1).integers(-3, 3, (1, 6, 6, 2)), jnp.float32)

    def fun(x, g):
        pool = lambda x: lax.reduce_window(x, jnp.inf, lax.min, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")  # noqa: E731
        return jax.vjp(pool, x)[1](g)[0]

    g = jnp.arange(18.0).reshape(1, 3, 3, 2)
    np.testing.assert_array_equal(in_two_parts(g, x, scatter_in(fun, x, g).params), fun(x, g))


IMAGE = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 6, 3)), jnp.float32)


def as_a_gpu_gets_it(fun, *arguments) -> Program:
    """The program that is written for a GPU, which gives the bits of the function."""
    bridge = build(inline(jax.make_jaxpr(fun)(*arguments)), RATES, platform="cuda")
    found = jax.jit(lambda *leaves: write(bridge, save_everything(bridge.graph), {}, leaves))(*arguments)
    for one, other in zip(found, jax.tree.leaves(jax.jit(fun)(*arguments)), strict=True):
        np.testing.assert_array_equal(one, other)
    return bridge.program


def is_rectified(program: Program) -> bool:
    (places,) = [one for one in program.equations if one.primitive is PLACES]
    return places.params["rectified"]


def rectified_backward(window: int, stride: int, padding: str):
    def fun(x, cotangent):
        return jax.vjp(lambda x: max_pool(jax.nn.relu(x), window, stride, padding), x)[1](cotangent)[0]

    return fun


@pytest.mark.parametrize(("window", "stride", "padding"), [(3, 2, "VALID"), (2, 2, "VALID"), (3, 1, "SAME")])
@pytest.mark.parametrize("mean", [0.0, -1.0])
def test_a_rectifiers_gradient_is_the_same_to_the_bit_without_its_mask(
    window: int, stride: int, padding: str, mean: float
) -> None:
    rng = np.random.default_rng(0)
    x = np.round(rng.normal(mean, size=(2, 9, 9, 3)), 1).astype(np.float32)
    x[0, 0, 0, 0], x[0, 1, 1, 0], x[1, :4, :4, 1], x[0, 5, 5, 2] = np.nan, np.inf, -np.inf, -0.0
    x[1, 7:, 7:, 2] = np.nan  # the last places of their windows, which NaNs are selected in
    x = jnp.asarray(x)
    pooled = jax.eval_shape(lambda x: max_pool(x, window, stride, padding), x)
    cotangent = jnp.asarray(rng.normal(size=pooled.shape), jnp.float32)
    fun = rectified_backward(window, stride, padding)
    program = as_a_gpu_gets_it(fun, x, cotangent)
    assert is_rectified(program)
    assert not any(one.primitive is primitives.gt_p for one in program.equations)


def pooled_and_more(x):
    rectified = jax.nn.relu(x)
    return max_pool(rectified, 2, 2, "VALID").sum() + (rectified**2).sum()


def pooled_sevenths(x):
    return max_pool(jnp.where(x > 0, x, x / 7), 2, 2, "VALID").sum()


def least_pooled(x):
    least = lax.reduce_window(jax.nn.relu(x), jnp.inf, lax.min, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return (least**2).sum()


@pytest.mark.parametrize("loss", [pooled_and_more, pooled_sevenths, least_pooled])
def test_masks_that_others_need_or_of_other_rectifiers_stay(loss) -> None:
    assert not is_rectified(as_a_gpu_gets_it(jax.grad(loss), IMAGE))


def relu(x):
    return jnp.maximum(x, 0.0)


def masked(x, g, otherwise=0):
    return lax.select(x > 0, g, lax.full_like(g, otherwise))


def with_gradient(forward, backward):
    """A function of an array with a gradient that is said to be that of a rectifier, or nearly."""
    fun = jax.custom_vjp(forward)
    fun.defvjp(lambda x: (forward(x), x), lambda x, g: (backward(x, g),))
    return fun


NEARLY_RECTIFIERS = {
    "it is one": (relu, masked, True),
    "at least one": (lambda x: jnp.maximum(x, 1.0), masked, False),
    "ones where it is not": (relu, lambda x, g: masked(x, g, 1), False),
    "above one": (relu, lambda x, g: lax.select(x > 1, g, lax.full_like(g, 0)), False),
    "below zero": (relu, lambda x, g: masked(-x, g), False),
    "what is not": (relu, lambda x, g: lax.select(x > 0, lax.full_like(g, 0), g), False),
    "gradient, too": (relu, lambda x, g: masked(x, g) + g, False),
    "mask, too": (relu, lambda x, g: masked(x, g) + (x > 0).astype(x.dtype), True),
}


@pytest.mark.parametrize("name", NEARLY_RECTIFIERS)
def test_what_only_looks_like_a_rectifier_keeps_its_gradient(name: str) -> None:
    forward, backward, rectified = NEARLY_RECTIFIERS[name]
    loss = lambda x: max_pool(with_gradient(forward, backward)(x), 2, 2, "VALID").sum()  # noqa: E731
    assert is_rectified(as_a_gpu_gets_it(jax.grad(loss), IMAGE)) == rectified


def test_the_gradient_behind_a_pool_may_be_a_result_of_the_step() -> None:
    def with_both_gradients(x):
        rectified = relu(x)
        pooled, unpool = jax.vjp(lambda x: max_pool(x, 2, 2, "VALID"), rectified)
        (of_rectified,) = unpool(pooled)
        return of_rectified, masked(x, of_rectified)

    as_a_gpu_gets_it(with_both_gradients, IMAGE)


def test_places_are_read_behind_one_barrier_with_what_was_pooled() -> None:
    """Else a compiler may put off making them, and keep for that what was pooled."""
    kernels = [jax.ShapeDtypeStruct((3, 3, 8, 8), jnp.float32)] * 3
    images = jax.ShapeDtypeStruct((2, 64, 64, 8), jnp.float32)
    closed = jax.make_jaxpr(deep_pooling_step)(kernels, images)
    bridge = build(inline(closed), RATES, platform="cuda")
    written = jax.make_jaxpr(lambda *leaves: write(bridge, save_everything(bridge.graph), {}, leaves))(*closed.in_avals)
    barriers = [
        [(value.aval.shape, str(value.aval.dtype)) for value in equation.invars]
        for equation in written.eqns
        if equation.primitive.name == "optimization_barrier"
    ]
    places = {shape: sorted([*together]) for together in barriers for shape, dtype in together if dtype == "int8"}
    assert len(places) == len(kernels)
    assert places == {shape: [(shape, "float32"), (shape, "int8")] for shape in places}


@pytest.mark.parametrize("rank", [2, 3, 4])
def test_the_count_of_a_scatters_flops_is_the_compilers_own(rank: int) -> None:
    window = (1, *(2 for _ in range(rank - 2)), 3)
    x = jnp.zeros((2, *(8 for _ in range(rank - 2)), 9))
    pool = lambda x: lax.reduce_window(x, -jnp.inf, lax.max, window, window, "VALID")  # noqa: E731
    closed = jax.make_jaxpr(lambda x, g: jax.vjp(pool, x)[1](g)[0])(x, pool(x))
    (scatter,) = [e for e in closed.jaxpr.eqns if e.primitive is primitives.select_and_scatter_add_p]
    alone = jax.jit(lambda x, g: scatter.primitive.bind(g, x, **scatter.params)).trace(x, pool(x))
    ours = build(inline(alone.jaxpr), RATES, platform="cpu", keep_scatters=True).graph.flops
    assert flops_of(alone.jaxpr) == alone.lower().compile().cost_analysis()["flops"] == ours


@pytest.mark.parametrize(("platform", "scatters"), [("cpu", 0), ("cuda", 0), ("tpu", 1), ("", 1)])
def test_only_compilers_that_expand_the_scatter_get_the_other_form(platform: str, scatters: int) -> None:
    x, g = jnp.zeros((1, 6, 6, 1)), jnp.zeros((1, 3, 3, 1))
    bridge = build(inline(jax.make_jaxpr(backward(2, 2, "VALID"))(x, g)), RATES, platform=platform)
    jaxpr = jax.make_jaxpr(lambda *leaves: write(bridge, save_everything(bridge.graph), {}, leaves))(x, g)
    found = [e for e in jaxpr.eqns if e.primitive is primitives.select_and_scatter_add_p]
    assert len(found) == scatters


def test_large_windows_keep_the_scatter() -> None:
    x, g = jnp.zeros((1, 9, 9, 1)), jnp.zeros((1, 1, 1, 1))
    assert not without_scatter(scatter_in(backward(9, 9, "VALID"), x, g), "cpu")
    assert without_scatter(scatter_in(backward(8, 8, "VALID"), x, g), "cpu")


def test_the_scatters_buffers_are_gone_on_a_gpu() -> None:
    x = jax.ShapeDtypeStruct((64, 56, 56, 64), jnp.float32)
    g = jax.ShapeDtypeStruct((64, 28, 28, 64), jnp.float32)
    fun = backward(2, 2, "VALID")
    params = scatter_in(fun, x, g).params
    given = measure_flat(lambda x, g: [fun(x, g)], [x, g], target="h200")
    found = measure_flat(lambda x, g: [in_two_parts(g, x, params)], [x, g], target="h200")
    windows = 64 * 28 * 28 * 64
    assert found.temp_bytes <= 1.1 * windows  # one byte for each
    assert given.temp_bytes >= 16 * windows  # an index of four bytes for each dimension, and more


KERNEL = jax.ShapeDtypeStruct((3, 3, 64, 64), jnp.float32)
IMAGES = jax.ShapeDtypeStruct((16, 56, 56, 64), jnp.float32)


def pooling_step(kernel, images):
    def loss(kernel):
        x = jax.nn.relu(conv(images, kernel) + 1.0)
        return (max_pool(x, 2, 2, "VALID") ** 2).mean()

    return kernel - 0.1 * jax.grad(loss)(kernel)


def deep_pooling_step(kernels, images):
    def loss(kernels):
        x = images
        for kernel in kernels:
            x = max_pool(jax.nn.relu(conv(x, kernel) + 1.0), 2, 2, "VALID")
        return (x**2).mean()

    return jax.tree.map(lambda kernel, gradient: kernel - 0.1 * gradient, kernels, jax.grad(loss)(kernels))


def test_pools_by_places_pay_where_nothing_is_recomputed(tmp_path: Path) -> None:
    target = "h200"
    kernels = [KERNEL, KERNEL, KERNEL]
    images = jax.ShapeDtypeStruct((16, 64, 64, 64), jnp.float32)
    measured = measure_flat(
        lambda *leaves: deep_pooling_step(leaves[:3], leaves[3]), [*kernels, images], donated=(0, 1, 2), target=target
    )
    optimized = optimize(deep_pooling_step, target=target, donate_argnums=0, budget=0.8)
    plan = optimized.plan(kernels, images)
    assert not plan.is_plain
    assert not plan.schedule.recomputed
    assert plan.rewritten
    assert plan.predicted.extra_flops < 0
    assert "fewer FLOPs" in " ".join(str(optimized.explain(kernels, images)).split())
    assert plan.measured.temp_bytes <= 0.8 * measured.temp_bytes
    plan.save(tmp_path / "plan.json")
    again = optimize(deep_pooling_step, target=target, donate_argnums=0, plan=Plan.load(tmp_path / "plan.json"))
    assert not again.plan(kernels, images).is_plain
    written = again.jaxpr(kernels, images)
    assert not any(e.primitive is primitives.select_and_scatter_add_p for e in compat.bare_jaxpr(written).eqns)
    assert optimize(deep_pooling_step, target=target, donate_argnums=0, budget=1.0).plan(kernels, images).is_plain


@pytest.mark.parametrize("target", ["cpu", "h200"])
def test_what_the_scatter_takes_in_the_original_step_is_predicted(target: str) -> None:
    prepared = optimize(pooling_step, target=target, donate_argnums=0).prepare(KERNEL, IMAGES)
    measured = measure_flat(lambda *leaves: [pooling_step(*leaves)], [KERNEL, IMAGES], donated=(0,), target=target)
    assert prepared.plain_peak == pytest.approx(measured.temp_bytes, rel=0.2)
