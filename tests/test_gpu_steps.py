"""What XLA's GPU compiler makes of a program: our model against the compiler itself, each rule on its own."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from remat_opt import optimize
from remat_opt.compilers.gpu_work import copy_of
from remat_opt.compilers.model import compiled
from remat_opt.graph.cost import Rates
from remat_opt.graph.graph import Graph, Kind, Op
from remat_opt.graph.ordering import depth_first, greedy, order_of
from remat_opt.program.inline import inline
from remat_opt.targets import measure_flat

RATES = Rates(bandwidth=4.8e12, flops={"float32": 1e14})


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def graph_of(fun: Callable, *avals: jax.ShapeDtypeStruct) -> Graph:
    program = inline(jax.make_jaxpr(fun)(*avals), with_barriers=True, keep_names=False)
    return compiled(program, RATES, platform="cuda")


def bytes_of(graph: Graph, name: str) -> list[int]:
    """What kernels of a name make, in bytes."""
    return sorted(graph.sizes[value] for op in graph.ops if op.name == name for value in op.outputs)


def updated(loss: Callable, weights: list[jax.Array]) -> list[jax.Array]:
    return [weight - 0.1 * gradient for weight, gradient in zip(weights, jax.grad(loss)(weights), strict=True)]


def attention_of_few_keys(weights: list[jax.Array], x: jax.Array) -> Any:
    """Queries in groups that share keys: the product's rows are of two dimensions, which are then transposed."""

    def loss(weights: list[jax.Array]) -> jax.Array:
        hidden = x
        for weight in weights:
            queries = jnp.einsum("bsd,dkhe->bskhe", hidden, weight)
            keys = queries.mean(3)
            scores = jax.nn.softmax(jnp.einsum("bqkhe,bske->bkhqs", queries, keys) / 8)
            hidden = hidden + jnp.einsum("bkhqs,bske->bqkhe", scores, keys).reshape(x.shape)
        return (hidden**2).mean()

    return updated(loss, weights)


def strided(kernels: list[jax.Array], images: jax.Array) -> Any:
    """Convolutions with steps of two, which pad behind an image only, and transposed ones back."""

    def loss(kernels: list[jax.Array]) -> jax.Array:
        hidden, half = images, len(kernels) // 2
        numbers = ("NHWC", "HWIO", "NHWC")
        for kernel in kernels[:half]:
            hidden = jax.nn.relu(lax.conv_general_dilated(hidden, kernel, (2, 2), "SAME", dimension_numbers=numbers))
        for kernel in kernels[half:]:
            hidden = jax.nn.relu(lax.conv_transpose(hidden, kernel, (2, 2), "SAME", dimension_numbers=numbers))
        return (hidden**2).mean()

    return updated(loss, kernels)


def messages(weights: list[jax.Array], nodes: jax.Array, receivers: jax.Array) -> Any:
    """Sums over a graph's edges, forwards and backwards into zeros."""

    def loss(weights: list[jax.Array]) -> jax.Array:
        hidden = nodes
        for weight in weights:
            hidden = jnp.tanh(jax.ops.segment_sum(hidden[receivers[::-1]], receivers, nodes.shape[0]) @ weight)
        return (hidden**2).mean()

    return updated(loss, weights)


def normalised_and_pooled(kernels: list[jax.Array], images: jax.Array) -> Any:
    """Convolutions, each normalised, rectified and pooled: the rectifier's gradient needs zeros when the pool's has
    been scattered into zeros."""

    def loss(kernels: list[jax.Array]) -> jax.Array:
        hidden = images
        for kernel in kernels:
            hidden = lax.conv_general_dilated(
                hidden, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            hidden = jax.nn.relu((hidden - hidden.mean((0, 1, 2))) * lax.rsqrt(hidden.var((0, 1, 2)) + 1e-5))
            hidden = lax.reduce_window(hidden, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return (hidden**2).mean()

    return updated(loss, kernels)


def logits_of_odd_words(weights: list[jax.Array], x: jax.Array) -> Any:
    """A number of words that no power of two divides: their gradient is padded for the product that sums over them."""

    def loss(weights: list[jax.Array]) -> jax.Array:
        first, second = weights
        return jax.nn.logsumexp(jnp.tanh(x @ first) @ second).mean()

    return updated(loss, weights)


def keys_of_all_layers(weights: list[jax.Array], x: jax.Array, latents: jax.Array) -> Any:
    """Layers with the same weights, whose keys and values are made of the same array: the weights' gradients of all
    layers are one product, of all keys' gradients side by side, which lie transposed in part."""

    def loss(weights: list[jax.Array]) -> jax.Array:
        hidden, (scale, *projections) = latents, weights
        for _ in range(3):
            keys, values = (jnp.einsum("bsd,dhe->bshe", x * scale, weight) for weight in projections)
            scores = jax.nn.softmax(jnp.einsum("bqhe,bshe->bhqs", hidden, keys))
            hidden = hidden + jnp.einsum("bhqs,bshe->bqhe", scores, values)
        return (hidden**2).mean()

    return updated(loss, weights)


STEPS = [
    (attention_of_few_keys, ([array(256, 2, 4, 32)] * 4, array(4, 256, 256))),
    (strided, ([array(3, 3, 32, 32)] * 6, array(16, 128, 128, 32))),
    (messages, ([array(128, 128)] * 4, array(16384, 128), jax.ShapeDtypeStruct((65536,), jnp.int32))),
    (normalised_and_pooled, ([array(3, 3, 3, 16), array(3, 3, 16, 32)], array(32, 64, 64, 3))),
    (logits_of_odd_words, ([array(128, 128), array(128, 16382)], array(1024, 128))),
    (keys_of_all_layers, ([array(48), *[array(48, 1, 128)] * 2], array(8, 2048, 48), array(8, 64, 1, 128))),
]


@pytest.mark.parametrize(("step", "args"), STEPS, ids=lambda value: getattr(value, "__name__", ""))
def test_the_plain_step_needs_what_is_foreseen(step: Callable, args: tuple) -> None:
    foreseen = optimize(step, target="h200", donate_argnums=0).prepare(*args).as_given
    leaves, tree = jax.tree.flatten(args)
    flat = lambda *leaves: jax.tree.leaves(step(*jax.tree.unflatten(tree, leaves)))  # noqa: E731
    figures = measure_flat(flat, leaves, donated=tuple(range(len(args[0]))), target="h200")
    assert foreseen == pytest.approx(figures.temp_bytes, rel=0.05)


def test_probabilities_lie_as_their_scores_and_are_copied_for_a_product_that_cannot_read_them_so() -> None:
    def attended(queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
        scores = jax.nn.softmax(jnp.einsum("bqkhe,bske->bkhqs", queries, keys))
        return jnp.einsum("bkhqs,bske->bqkhe", scores, values)

    size = 4 * 4 * 8 * 256 * 256
    grouped = graph_of(attended, array(4, 256, 2, 4, 32), array(4, 256, 2, 32), array(4, 256, 2, 32))
    assert bytes_of(grouped, "copy") == [size]
    single = lambda q, k, v: jnp.einsum("bkqs,bske->bqke", jax.nn.softmax(jnp.einsum("bqke,bske->bkqs", q, k)), v)  # noqa: E731
    assert bytes_of(graph_of(single, *[array(4, 256, 8, 32)] * 3), "copy") == []


@pytest.mark.parametrize(
    ("lies", "order", "used"),
    [((0, 2, 1), (0, 1, 2), 1 / 4), ((0, 1, 2), (0, 1, 2), 1.0), ((2, 1, 0), (0, 1, 2), 1 / 8)],
)
def test_a_copy_in_another_order_uses_a_part_of_what_memory_gives(
    lies: tuple[int, ...], order: tuple[int, ...], used: float
) -> None:
    assert copy_of(array(16, 4, 64), lies, order).used == used


def test_zeros_of_one_shape_are_made_at_once() -> None:
    def sums(x: jax.Array, receivers: jax.Array) -> list[jax.Array]:
        first = jax.ops.segment_sum(x, receivers, 64)
        return [jax.ops.segment_sum(jnp.tanh(first)[receivers], receivers, 64).sum()]

    graph = graph_of(sums, array(256, 128), jax.ShapeDtypeStruct((256,), jnp.int32))
    assert bytes_of(graph, "zeros") == [4 * 64 * 128] * 2
    assert [op.name for op in graph.ops].count("zeros") == 1


def test_of_two_orders_the_one_that_peaks_lower_is_taken() -> None:
    """Greedily both halves begin before one of them makes its large array."""
    ops = (
        Op((0,), (1,)),
        Op((1,), (2,)),
        Op((2,), (3,)),
        Op((0,), (4,)),
        Op((4,), (5,)),
        Op((5,), (6,)),
        Op((3, 6), (7,)),
    )
    graph = Graph((0, 5, 50, 1, 5, 50, 1, 1), ops, inputs=(0,), outputs=(7,), fused=True)
    assert set(greedy(graph)[:2]) == {0, 3}
    assert depth_first(graph) == (0, 1, 2, 3, 4, 5, 6)
    assert order_of(graph, "cuda", saving_memory=False) == depth_first(graph)
    # Depth first the large operand waits while the other one is made of a larger one.
    ops = Op((0,), (1,)), Op((0,), (2,)), Op((2,), (3,)), Op((1, 3), (4,))
    graph = Graph((0, 50, 30, 1, 1), ops, inputs=(0,), outputs=(4,), fused=True)
    assert depth_first(graph) == (0, 1, 2, 3)
    assert order_of(graph, "cuda", saving_memory=False) == greedy(graph) == (1, 2, 0, 3)


def test_a_reader_behind_a_barrier_is_no_user_of_an_instruction() -> None:
    """Ops 1 and 2 make as much; that with more users comes first, of which those behind the barrier are none."""
    ops = (
        Op((0,), (1,)),
        Op((1,), (2,)),
        Op((1,), (3,)),
        Op((2,), (4,), kind=Kind.BARRIER),
        Op((2, 4), (5,)),
        Op((2, 4), (6,)),
        Op((3,), (7,)),
        Op((3, 5, 6, 7), (8,)),
    )
    graph = Graph((0, 1, 10, 10, 0, 10, 10, 10, 1), ops, inputs=(0,), outputs=(8,), fused=True)
    assert greedy(graph)[1] == 2


def test_no_kernel_pads_in_place() -> None:
    """The loss of all but the last word: its gradient is padded to the logits' shape, beside the logits."""

    def loss(weight: jax.Array, hidden: jax.Array) -> jax.Array:
        return jax.nn.logsumexp((hidden @ weight)[:, :-1]).mean()

    avals = array(64, 4096), array(16, 128, 64)
    step = jax.value_and_grad(loss, argnums=(0, 1))
    logits = 4 * 16 * 128 * 4096
    foreseen = optimize(step, target="h200").prepare(*avals).as_given
    measured = measure_flat(lambda *given: jax.tree.leaves(step(*given)), list(avals), target="h200").temp_bytes
    assert 2 * logits <= measured < 2.1 * logits
    assert 2 * logits <= foreseen < 2.1 * logits
