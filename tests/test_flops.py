"""FLOPs of one equation, against XLA's own count where it has one and against hand counts where it has not."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from loop_kernels import kernel_tanh

from remat_opt.graph.build import build, kind_of
from remat_opt.graph.cost import Rates
from remat_opt.graph.graph import Kind
from remat_opt.trace.avals import bytes_of
from remat_opt.trace.flops import flops_of
from remat_opt.trace.inline import inline

pytestmark = pytest.mark.short


def ours(fun: Callable, *shapes: Sequence[int], dtype: str = "float32") -> float:
    """The sum over all equations of a function of arrays."""
    program = inline(jax.make_jaxpr(fun)(*[jax.ShapeDtypeStruct(tuple(shape), dtype) for shape in shapes]))
    return sum(flops_of(equation, program) for equation in program.equations)


def xlas(fun: Callable, *shapes: Sequence[int]) -> float:
    """What the CPU compiler counts; it counts a loop's body once."""
    arguments = [jax.ShapeDtypeStruct(tuple(shape), jnp.float32) for shape in shapes]
    return jax.jit(fun).lower(*arguments).compile().cost_analysis()["flops"]


def assert_counted_alike(fun: Callable, *shapes: Sequence[int]) -> None:
    expected = xlas(fun, *shapes)
    assert expected > 100
    assert ours(fun, *shapes) == pytest.approx(expected, rel=0.03)


DOTS = {
    "matrices": (((1,), (0,)), ((), ())),
    "transposed": (((0,), (1,)), ((), ())),
    "two axes": (((0, 1), (0, 1)), ((), ())),
    "batch": (((1,), (1,)), ((0,), (0,))),
}


@pytest.mark.parametrize("name", DOTS)
def test_a_product_takes_two_flops_for_each_multiplication(name: str) -> None:
    (contracted, contracted_right), (batch, batch_right) = numbers = DOTS[name]
    axes, axes_right = (7, 8, 9), [5, 6, 4]
    for left, right in zip((*contracted, *batch), (*contracted_right, *batch_right), strict=True):
        axes_right[right] = axes[left]
    free = [n for axis, n in enumerate(axes_right) if axis not in (*contracted_right, *batch_right)]
    assert ours(lambda a, b: lax.dot_general(a, b, numbers), axes, axes_right) == 2 * 7 * 8 * 9 * np.prod(free)
    assert_counted_alike(lambda a, b: lax.dot_general(a, b, numbers), axes, axes_right)


def conv(*, transposed: bool = False, **options: Any) -> Callable:
    numbers = ("NCHW", "OIHW", "NCHW") if transposed else ("NHWC", "HWIO", "NHWC")
    strides = options.pop("window_strides", (1, 1))
    padding = options.pop("padding", "VALID")
    return lambda x, w: lax.conv_general_dilated(x, w, strides, padding, dimension_numbers=numbers, **options)


IMAGES = (2, 12, 13, 6)
CONVS = {
    "valid": (conv(), IMAGES, (3, 2, 6, 8)),
    "same": (conv(padding="SAME"), IMAGES, (3, 3, 6, 8)),
    "one by one": (conv(), IMAGES, (1, 1, 6, 8)),
    "strided": (conv(window_strides=(2, 3), padding="SAME"), IMAGES, (5, 3, 6, 8)),
    "uneven padding": (conv(padding=((2, 0), (0, 3))), IMAGES, (3, 3, 6, 8)),
    "cropping": (conv(padding=((-2, -1), (1, -3))), IMAGES, (3, 3, 6, 8)),
    "dilated kernel": (conv(rhs_dilation=(2, 3), padding="SAME"), IMAGES, (3, 3, 6, 8)),
    "dilated image": (conv(lhs_dilation=(2, 2), padding=((1, 2), (2, 1))), IMAGES, (3, 3, 6, 8)),
    "all of it": (
        conv(window_strides=(2, 1), lhs_dilation=(3, 1), rhs_dilation=(1, 2), padding=((1, 2), (0, 3))),
        IMAGES,
        (3, 3, 6, 8),
    ),
    "groups": (conv(feature_group_count=3, padding="SAME"), IMAGES, (3, 3, 2, 9)),
    "depthwise": (conv(feature_group_count=6, padding="SAME"), IMAGES, (3, 3, 1, 12)),
    "batch groups": (conv(batch_group_count=2, padding="SAME"), (4, 12, 13, 6), (3, 3, 6, 8)),
    "other layout": (conv(transposed=True, padding="SAME"), (2, 6, 12, 13), (8, 6, 3, 2)),
}


@pytest.mark.parametrize("name", CONVS)
def test_a_convolution_takes_what_xla_counts(name: str) -> None:
    assert_counted_alike(*CONVS[name])


@pytest.mark.parametrize("name", ["same", "strided", "dilated kernel", "groups", "batch groups"])
def test_the_gradients_of_a_convolution_take_what_xla_counts(name: str) -> None:
    fun, images, kernel = CONVS[name]
    assert_counted_alike(jax.grad(lambda x, w: (fun(x, w) ** 2).sum(), (0, 1)), images, kernel)


@settings(max_examples=200)
@given(data=st.data())
def test_positions_along_an_axis_are_counted_as_if_one_by_one(data: st.DataObject) -> None:
    image, kernel = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    stride, dilation, spread = (data.draw(st.integers(1, 3)) for _ in range(3))
    low, high = data.draw(st.integers(-1, 4)), data.draw(st.integers(-1, 4))
    padded = (image - 1) * dilation + 1 + low + high
    results = (padded - (kernel - 1) * spread - 1) // stride + 1
    if padded < 1 or results < 1:
        return
    there = [low <= at < low + (image - 1) * dilation + 1 and (at - low) % dilation == 0 for at in range(padded)]
    pairs = sum(there[result * stride + tap * spread] for result in range(results) for tap in range(kernel))
    fun = conv(
        window_strides=(stride, 1), padding=((low, high), (0, 0)), lhs_dilation=(dilation, 1), rhs_dilation=(spread, 1)
    )
    assert ours(fun, (1, image, 1, 1), (kernel, 1, 1, 1)) == 2 * pairs


def scanned(length: int) -> Callable:
    return lambda x, w: lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=length)[0]


def test_a_scan_takes_its_body_times_its_length() -> None:
    once = ours(lambda x, w: jnp.tanh(x @ w), (8, 16), (16, 16))
    assert once == 2 * 8 * 16 * 16 + 8 * 16
    assert [ours(scanned(length), (8, 16), (16, 16)) for length in (1, 7, 100)] == [once, 7 * once, 100 * once]


def test_a_scan_that_is_unrolled_takes_what_xla_counts() -> None:
    # XLA counts the body of a loop once; without the loop it counts all.
    def unrolled(x, w):
        return lax.scan(lambda c, _: (c @ w, None), x, length=6, unroll=6)[0]

    assert_counted_alike(unrolled, (8, 16), (16, 16))


def test_the_gradient_of_a_scan_takes_two_scans_more() -> None:
    def loss(x, w):
        return lax.scan(lambda c, _: (c @ w, None), x, length=9)[0].sum()

    forward = 9 * 2 * 8 * 16 * 16
    assert ours(jax.grad(loss, (0, 1)), (8, 16), (16, 16)) == pytest.approx(3 * forward, rel=0.1)


def test_a_kernel_takes_its_program_once_for_each_place_of_its_grid() -> None:
    """Two halves of 32 numbers, each read, changed and written, one FLOP an element."""
    program = inline(jax.make_jaxpr(kernel_tanh)(jnp.ones((8, 4))))
    assert sum(flops_of(equation, program) for equation in program.equations) == 3 * 32


def test_a_branch_takes_its_dearest_and_calls_what_is_in_them() -> None:
    def branch(x, w):
        return lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: jnp.tanh(x))

    product = 2 * 8 * 16 * 16
    assert ours(branch, (8, 16), (16, 16)) == pytest.approx(product, abs=10)
    kept = jax.jit(lambda x, w: x @ w, out_shardings=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    assert ours(kept, (8, 16), (16, 16)) == product


def test_elementwise_work_takes_one_flop_an_element_and_moving_takes_none() -> None:
    assert ours(lambda x: jnp.tanh(x) + 1.0, (3, 5)) == 30
    assert ours(lambda x: x.sum(), (3, 5)) == 15
    assert ours(lambda x: jnp.flip(x.T.reshape(-1)[2:]), (3, 5)) == 0


def test_a_graph_counts_what_several_kernels_repeat_once() -> None:
    """Of a scan by halves hundreds of kernels read the same elementwise values."""

    def fun(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.associative_scan(lambda one, other: (one[0] * other[0], other[0] * one[1] + other[1]), (a, b))[1]

    shapes = (256, 8), (256, 8)
    program = inline(jax.make_jaxpr(fun)(*[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]))
    assert build(program, Rates(1e12, {"float32": 1e14})).graph.flops == pytest.approx(ours(fun, *shapes), rel=0.01)


def test_a_shard_map_takes_what_all_its_devices_do() -> None:
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("data")
    mapped = jax.shard_map(lambda x: jnp.sin(x @ x.T), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    assert ours(mapped, (64, 4)) == 8 * ours(lambda x: jnp.sin(x @ x.T), (8, 4))


def test_a_network_takes_what_xla_counts() -> None:
    def loss(x, first, second):
        return (jnp.maximum(jnp.maximum(x @ first, 0) @ second, 0) ** 2).sum()

    assert_counted_alike(jax.grad(loss, (1, 2)), (32, 64), (64, 64), (64, 48))


def kinds(fun: Callable, *arguments: Any) -> list[Kind]:
    return [kind_of(equation.primitive) for equation in inline(jax.make_jaxpr(fun)(*arguments)).equations]


def test_kinds_say_what_a_compiler_does() -> None:
    x = jnp.ones((4, 4))
    assert kinds(lambda x: jnp.tanh(x) * 2.0, x) == [Kind.ELEMENTWISE] * 2
    assert kinds(lambda x: x.sum(), x) == [Kind.REDUCTION]
    assert kinds(lambda x: x @ x, x) == [Kind.CONTRACTION]
    assert kinds(conv(), jnp.ones(IMAGES), jnp.ones((3, 3, 6, 8))) == [Kind.CONTRACTION]
    assert kinds(lambda x: lax.cumsum(x), x) == [Kind.OPAQUE]
    assert kinds(lambda x: lax.sort(x), x) == [Kind.OPAQUE]
    assert kinds(lambda x: scanned(3)(x, x), x) == [Kind.OPAQUE]


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("float32", 4), ("bfloat16", 2), ("int8", 1), ("bool", 1), ("complex64", 8), ("float8_e4m3fn", 1)],
)
def test_bytes_by_dtype(dtype: str, size: int) -> None:
    assert bytes_of(jax.ShapeDtypeStruct((3, 5), dtype)) == 15 * size
    assert bytes_of(jax.ShapeDtypeStruct((), dtype)) == size


def test_bytes_of_keys_and_of_what_has_no_storage() -> None:
    key = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 3))
    assert bytes_of(key) == 3 * 8
    assert bytes_of(object()) == 0
