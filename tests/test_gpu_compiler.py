"""What a GPU's compiler is expected to make of a program: each rule on a graph or a program that can be checked by
hand. Sizes in bytes; a kernel's start is worth about as much as moving 5 MB."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from foreseen import foreseen_and_compiled
from jax import lax

from remat_opt.compilers.gpu_fusion import Work, fuse_by_cost
from remat_opt.compilers.gpu_work import work_of
from remat_opt.compilers.model import allocated_by, compiled
from remat_opt.graph.cost import Rates
from remat_opt.graph.graph import Graph, Kind, Op
from remat_opt.graph.liveness import peak_of
from remat_opt.program.inline import inline
from remat_opt.targets import measure_flat

RATES = Rates(bandwidth=4.8e12, flops={"float32": 1e14})
MB = 10**6


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def graph_of(fun: Callable, *avals: jax.ShapeDtypeStruct, platform: str = "cuda", **options) -> Graph:
    program = inline(jax.make_jaxpr(fun)(*avals), with_barriers=True, keep_names=False)
    return compiled(program, RATES, platform=platform, **options)


def made(graph: Graph) -> list[tuple[str, int]]:
    """The kernels' names with the bytes that they make."""
    return [(op.name, sum(graph.sizes[value] for value in op.outputs)) for op in graph.ops]


def sums_with_two_readers(size: int, cycles: float = 1.0, blocks: float = 1e6) -> bool:
    """Whether the sum of four buffers is stored that two kernels read, the first of them of some blocks."""
    ops = (
        *(Op((), (value,)) for value in range(4)),
        Op((0, 1, 2, 3), (4,), kind=Kind.ELEMENTWISE),
        Op((4,), (5,), kind=Kind.REDUCTION),
        Op((4,), (6,), kind=Kind.ELEMENTWISE),
    )
    work = {4: Work(cycles * size / 4, 1e6), 5: Work(size / 4, blocks), 6: Work(size / 4, 1e6)}
    graph = Graph((size,) * 5 + (4, size), ops, outputs=(5, 6))
    fused = fuse_by_cost(graph, work, RATES.bandwidth).graph
    return any(4 in op.outputs for op in fused.ops)


@pytest.mark.parametrize(
    ("size", "options", "is_stored"),
    [
        (MB, {}, False),  # a kernel less is worth more than reading four buffers twice
        (100 * MB, {}, True),
        (MB, {"cycles": 467.0}, True),  # tanh
        (MB, {"blocks": 4.0}, True),  # a reduction to few results reads slowly
    ],
)
def test_a_small_value_is_computed_again_and_a_large_or_dear_one_stored(
    size: int, options: dict, is_stored: bool
) -> None:
    assert sums_with_two_readers(size, **options) is is_stored


@pytest.mark.parametrize(("operands", "is_stored"), [(90, False), (100, True)])
def test_a_kernel_has_a_limited_number_of_operands(operands: int, is_stored: bool) -> None:
    ops = (
        *(Op((), (value,)) for value in range(operands)),
        Op(tuple(range(operands)), (operands,), kind=Kind.ELEMENTWISE),
        Op((operands,), (operands + 1,), kind=Kind.REDUCTION),
    )
    graph = Graph((1000,) * (operands + 2), ops, outputs=(operands + 1,))
    fused = fuse_by_cost(graph, {}, RATES.bandwidth).graph
    assert any(operands in op.outputs for op in fused.ops) is is_stored


def test_what_reads_a_view_comes_before_what_was_ready_with_it() -> None:
    """The weights' gradients of an H200 are of 64 parts, as large as the next layer's gradient: with these first all
    layers' would wait to the end."""

    def loss(weights: list[jax.Array], hidden: jax.Array) -> jax.Array:
        for weight in weights:
            hidden = jnp.tanh(hidden @ weight)
        return jnp.mean(hidden**2)

    def step(x: jax.Array, *weights: jax.Array) -> list[jax.Array]:
        gradients = jax.grad(loss)(list(weights), x)
        return [weight - 0.1 * gradient for weight, gradient in zip(weights, gradients, strict=True)]

    avals = [array(8192, 128)] + [array(128, 128)] * 4
    layer = 4 * 8192 * 128
    assert 5 * layer <= allocated_by(graph_of(step, *avals), "cuda") < 5.1 * layer
    assert 5 * layer <= measure_flat(step, avals, target="h200").temp_bytes < 5.1 * layer


def step_with_pool(padding: str, with_skip: bool) -> Callable:
    def loss(x, kernel):
        hidden = jax.nn.relu(lax.conv(x, kernel, (1, 1), "SAME"))
        pooled = lax.reduce_window(hidden, -jnp.inf, lax.max, (1, 1, 3, 3), (1, 1, 2, 2), padding)
        return pooled.sum() + (jnp.square(hidden).sum() if with_skip else 0.0)

    return jax.value_and_grad(loss, argnums=(0, 1))


SIDE = 65  # three windows of three in steps of two fit exactly


@pytest.mark.parametrize(
    ("padding", "with_skip", "elements", "is_early"),
    [
        ("VALID", False, 2 * SIDE**2, True),  # for the rectifiers, and a copy for the scatter
        ("SAME", False, (SIDE + 2) ** 2, False),  # of a shape that no rectifier has
        ("VALID", True, 0, False),  # the scatter writes into the gradient of the other reader
    ],
)
def test_zeros_of_a_pool_are_there_from_the_first_rectifier_on(
    padding: str, with_skip: bool, elements: int, is_early: bool
) -> None:
    graph = graph_of(step_with_pool(padding, with_skip), array(8, 64, SIDE, SIDE), array(64, 64, 3, 3))
    assert dict(made(graph)).get("zeros", 0) == 8 * 64 * elements * 4
    assert any(op.name == "zeros" and op.inputs for op in graph.ops) is is_early  # made with what the rectifier reads


def test_an_image_is_written_dilated_unless_the_kernel_is_a_reversed_one() -> None:
    def fun(x, kernel, reverse):
        kernel = lax.rev(kernel, (2, 3)) if reverse else kernel
        return lax.conv_general_dilated(x, kernel, (1, 1), ((1, 2), (1, 2)), lhs_dilation=(2, 2)).sum()

    avals = array(8, 32, 16, 16), array(32, 32, 3, 3)
    names = [name for name, _ in made(graph_of(lambda x, kernel: fun(x, kernel, False), *avals))]
    assert names.count("pad") == 1
    padded = dict(made(graph_of(lambda x, kernel: fun(x, kernel, False), *avals)))["pad"]
    assert padded == 8 * 32 * 34 * 34 * 4
    assert "pad" not in dict(made(graph_of(lambda x, kernel: fun(x, kernel, True), *avals)))


@pytest.mark.parametrize(("platform", "copies"), [("cuda", 0), ("tpu", 0), ("cpu", 1)])
def test_a_gpu_and_a_tpu_have_no_copies_of_donated_arguments(platform: str, copies: int) -> None:
    def step(w, x):
        return w - x.T @ x, x @ w

    graph = graph_of(step, array(1024, 1024), array(1024, 1024), platform=platform, donated=(True, False))
    assert [name for name, _ in made(graph)].count("copy") == copies


@pytest.mark.parametrize(
    ("shape", "axes", "blocks"),
    [
        ((2048, 128), (0,), 4),  # 32 columns a block
        ((2**20, 128), (0,), 4 * 1024),  # divided by the root of its length
        ((1024, 64), (1,), 256),  # 64 threads for each row
        ((1024,), (0,), 1),
    ],
)
def test_a_reduction_to_few_results_has_few_blocks(shape: tuple[int, ...], axes: tuple[int, ...], blocks: int) -> None:
    program = inline(jax.make_jaxpr(lambda x: x.sum(axes))(array(*shape)))
    assert work_of(program.equations[-1], program).blocks == blocks


def test_arithmetic_has_its_price_and_a_window_reads_each_element_several_times() -> None:
    def fun(x):
        return lax.reduce_window(jnp.tanh(x), -jnp.inf, lax.max, (3, 3), (1, 1), "SAME")

    program = inline(jax.make_jaxpr(fun)(array(32, 32)))
    tanh, window = (work_of(equation, program) for equation in program.equations[-2:])
    assert tanh.cycles == 467 * 32 * 32
    assert list(window.uses.values()) == [9]


def conv(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    return lax.conv_general_dilated(x, kernel, (stride,) * 2, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


@pytest.mark.parametrize("between", [0, 1])
def test_no_kernel_writes_over_a_convolutions_result(between: int) -> None:
    """The first kernel behind a convolution needs a place of its own, the next one writes over the first's result."""
    image, kernel = array(8, 64, 64, 64), array(3, 3, 64, 64)

    def fun(x, kernel):
        made = jnp.tanh(conv(x, kernel, 1))
        for _ in range(between):
            made = lax.optimization_barrier(made)
            made = jnp.tanh(made)
        return [conv(made, kernel, 8)]

    measured = measure_flat(fun, [image, kernel], target="h200")
    foreseen = peak_of(graph_of(fun, image, kernel))
    assert measured.temp_bytes == pytest.approx(2 * 4 * image.size, rel=0.02)
    assert foreseen == pytest.approx(measured.temp_bytes, rel=0.02)


def dropped_out(x: jax.Array, *weights: jax.Array, implementation: str = "threefry2x32") -> list[jax.Array]:
    """Layers with dropout, of which the masks are read again at the end."""
    first, masks = jax.random.key(jnp.int32(x[0, 0]), impl=implementation), []
    for key, weight in zip(jax.random.split(first, len(weights)), weights, strict=True):
        masks.append(jax.random.bernoulli(key, 0.9, x.shape))
        x = jnp.where(masks[-1], x @ weight, 0)
    for mask, weight in zip(reversed(masks), weights, strict=True):
        x = jnp.where(mask, x, 0) @ weight
    return [x]


def test_threefrys_bits_are_made_where_they_are_read() -> None:
    avals = [array(4096, 1024), *[array(1024, 1024)] * 6]
    graph = graph_of(dropped_out, *avals)
    assert all(name != "random_bits" for name, _ in made(graph))
    beyond = measure_flat(dropped_out, avals, target="h200").temp_bytes - peak_of(graph)
    assert 0 <= beyond <= 1.1 * 4096 * 1024  # that of one layer is stored, at most
    stored = graph_of(lambda *given: dropped_out(*given, implementation="rbg"), *avals)
    assert ("random_bits", 4 * 4096 * 1024) in made(stored)


def summed(gradient: jax.Array) -> jax.Array:
    return jnp.tanh(gradient).sum((1, 2))


def summed_and_sorted(gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    return summed(gradient), jnp.sort(gradient, 0)


def multiplied(gradient: jax.Array) -> jax.Array:
    return gradient.reshape(256, -1) @ jnp.ones((gradient.size // 256, 128))


@pytest.mark.parametrize(
    ("size", "window", "padding", "read"),
    [
        (20, 9, "VALID", summed),
        (8, 5, "SAME", summed),
        (6, 7, "SAME", summed),
        (5, 3, "VALID", summed),
        (6, 7, "SAME", summed_and_sorted),  # turned back where the sorted one is
        (5, 3, "VALID", multiplied),  # beside it, for a product
    ],
)
def test_a_gradient_of_an_image_smaller_than_its_window_exchanges_the_operands(
    size: int, window: int, padding: str, read: Callable
) -> None:
    """The kernel is the image then, padded in memory, and the result has batch and features the other way round."""
    made = -(-size // 2) if padding == "SAME" else (size - window) // 2 + 1

    def function(image: jax.Array, kernel: jax.Array, cotangent: jax.Array) -> Any:
        def convolved(image: jax.Array) -> jax.Array:
            numbers = ("NHWC", "HWIO", "NHWC")
            return jax.lax.conv_general_dilated(image, kernel, (2, 2), padding, dimension_numbers=numbers)

        return read(jax.vjp(convolved, jnp.sin(image))[1](jnp.cos(cotangent))[0])

    shapes = (256, size, size, 128), (window, window, 128, 128), (256, made, made, 128)
    avals = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    foreseen, found = foreseen_and_compiled(function, *avals, target="h200")
    assert foreseen == pytest.approx(found, rel=0.02)
