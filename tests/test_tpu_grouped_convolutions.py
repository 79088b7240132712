"""How images lie between a TPU's convolutions in groups, and what is copied there."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import pytest
from foreseen import foreseen_and_compiled
from jax import lax

from remat_opt.compilers.tpu_precision import stored_in_two_bytes
from remat_opt.compilers.tpu_reader import TpuReader
from remat_opt.compilers.tpu_tiles import in_tiles
from remat_opt.graph.cost import Rates
from remat_opt.graph.graph import Graph, Kind
from remat_opt.program.inline import inline

BATCH, SIDE, FEATURES, GROUPS = 64, 24, 128, 4
IMAGE = (BATCH, SIDE, SIDE, FEATURES)
AS_IMAGE = BATCH * SIDE * SIDE * FEATURES * 4  # bytes, its features in the lanes
BY_GROUPS = 2 * AS_IMAGE  # 64 examples in 128 lanes
FILTERS = (1, 1, FEATURES // GROUPS, FEATURES)  # of a convolution in groups


def convolve(x: jax.Array, filters: jax.Array, stride: int = 1) -> jax.Array:
    groups = x.shape[-1] // filters.shape[-2]
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, filters, (stride, stride), "SAME", dimension_numbers=numbers, feature_group_count=groups
    )


def normalised(x: jax.Array) -> jax.Array:
    mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
    return (x - mean) * lax.rsqrt(variance + 1e-5)


def pooled(x: jax.Array) -> jax.Array:
    return lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")


def residual(x: jax.Array, filters: Sequence[jax.Array]) -> jax.Array:
    for one in filters[:-1]:
        x = jax.nn.relu(x + normalised(convolve(x, one)))
    return convolve(x, filters[-1])


def alone(x: jax.Array, *filters: jax.Array) -> jax.Array:
    return residual(x, filters)


def pooled_after(x: jax.Array, *filters: jax.Array) -> jax.Array:
    return pooled(jax.nn.relu(normalised(residual(x, filters))))


def beside_another(x: jax.Array, first: jax.Array, *filters: jax.Array) -> jax.Array:
    return residual(jax.nn.relu(normalised(convolve(x, first))), filters).mean((1, 2))


def behind_pooling(x: jax.Array, first: jax.Array, *filters: jax.Array) -> jax.Array:
    return residual(pooled(jax.nn.relu(normalised(convolve(x, first)))), filters).mean((1, 2))


def behind_a_joint(x: jax.Array, first: jax.Array, strided: jax.Array, *filters: jax.Array) -> jax.Array:
    x = jax.nn.relu(normalised(convolve(x, first)))
    x = jax.nn.relu(jnp.concatenate([pooled(x), normalised(convolve(x, strided, stride=2))], -1))
    return residual(x, filters).mean((1, 2))


WHOLE = (1, 1, FEATURES, FEATURES)
LARGE = (BATCH, 2 * SIDE, 2 * SIDE, FEATURES)
HALF = (BATCH, 2 * SIDE, 2 * SIDE, FEATURES // 2)
NETWORKS = {
    alone: [IMAGE, FILTERS, FILTERS, FILTERS],
    pooled_after: [IMAGE, FILTERS, FILTERS, FILTERS],
    beside_another: [IMAGE, WHOLE, FILTERS, FILTERS, FILTERS],
    behind_pooling: [LARGE, WHOLE, FILTERS, FILTERS, FILTERS],
    behind_a_joint: [HALF, (1, 1, 64, 64), (1, 1, 16, 64), FILTERS, FILTERS, FILTERS],
}


def gradients_of(network: Callable) -> Callable:
    def gradients(x: jax.Array, *filters: jax.Array) -> list[jax.Array]:
        return jax.grad(lambda filters: (network(x, *filters) ** 2).sum())(list(filters))

    return gradients


def read(function: Callable, shapes: Sequence[tuple[int, ...]]) -> tuple[TpuReader, Graph]:
    avals = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    program = inline(jax.make_jaxpr(function)(*avals), with_barriers=True, keep_names=False)
    reader = TpuReader(program, Rates(bandwidth=1e12, flops={"float32": 1e14}), "tpu")
    return reader, in_tiles(reader, reader.read(()))


def copies_of(graph: Graph, kind: Kind = Kind.OPAQUE) -> list[int]:
    """Bytes of each copy of an image as it is, or of what is computed otherwise than it lies."""
    made = [op.outputs[0] for op in graph.ops if op.name == "copy" and op.kind is kind]
    return sorted(graph.sizes[value] for value in made)


def results_of(reader: TpuReader) -> list[int]:
    """What convolutions in groups make, but for gradients of their weights."""
    made = [e for e in reader.program.equations if e.primitive is lax.conv_general_dilated_p]
    return [e.outputs[0] for e in made if e.params["feature_group_count"] > 1]


def test_alone_they_lie_as_convolutions_in_groups_have_them() -> None:
    reader, graph = read(alone, NETWORKS[alone])
    assert [graph.sizes[value] for value in results_of(reader)] == [BY_GROUPS] * 3
    assert not reader.grouped.mixed
    assert copies_of(graph) == [BY_GROUPS]  # of what is given


def test_pooling_goes_on_so() -> None:
    reader, graph = read(pooled_after, NETWORKS[pooled_after])
    (result,) = reader.program.outputs
    assert isinstance(result, int)
    assert graph.sizes[result] == BY_GROUPS // 4
    assert copies_of(graph) == [BY_GROUPS]


def test_beside_another_convolution_they_lie_as_images() -> None:
    reader, graph = read(gradients_of(beside_another), NETWORKS[beside_another])
    *beside, last = results_of(reader)[:3]
    assert reader.grouped.layouts.keys().isdisjoint(beside)
    assert last in reader.grouped.layouts  # which is summed alone
    assert BY_GROUPS not in copies_of(graph)


def test_a_single_convolution_in_groups_has_a_copy_in_two_bytes() -> None:
    reader, graph = read(lambda x, filters: convolve(convolve(x * 2, filters), filters[:, :, :1]), [IMAGE, FILTERS])
    assert not reader.grouped.layouts
    assert copies_of(graph, Kind.ELEMENTWISE) == [BY_GROUPS // 2]


def test_behind_pooling_what_is_given_and_pooled_is_copied() -> None:
    _, graph = read(behind_pooling, NETWORKS[behind_pooling])
    assert copies_of(graph) == [BY_GROUPS]


def test_behind_pooling_gradients_are_computed_of_images() -> None:
    """Of convolutions' results and of what is made of cotangents there are copies as images; what is computed of these
    is in two bytes, and is copied for the convolutions."""
    reader, graph = read(gradients_of(behind_pooling), NETWORKS[behind_pooling])
    assert copies_of(graph, Kind.ELEMENTWISE) == [AS_IMAGE // 2, AS_IMAGE // 2, BY_GROUPS // 2]
    made = {value: op for op in graph.ops for value in op.outputs}
    for op in graph.ops:
        if op.name == "copy" and op.kind is Kind.ELEMENTWISE and graph.sizes[op.outputs[0]] == AS_IMAGE // 2:
            images = [made[value] for value in op.inputs if graph.sizes[value] >= AS_IMAGE // 2]
            assert images
            assert {one.name for one in images} == {"copy"}
    assert len(reader.grouped.cotangents) == 2  # the last convolution is not beside a window
    assert copies_of(graph).count(BY_GROUPS) == 1


def test_what_a_window_reads_alone_is_computed_as_an_image() -> None:
    """The cotangent of what was pooled: beside it neither what it is a sum of nor a copy of it lies by groups."""
    reader, graph = read(gradients_of(behind_pooling), NETWORKS[behind_pooling])
    (_, window) = [e for e in reader.program.equations if "reduce_window" in e.primitive.name]
    (padded,) = [e for e in reader.program.equations if e.outputs[0] == window.inputs[0]]
    cotangent = padded.inputs[0]
    assert isinstance(cotangent, int)
    assert cotangent not in reader.grouped.layouts
    assert graph.sizes[cotangent] == AS_IMAGE


def test_barriers_hold_images() -> None:
    def held(x: jax.Array, first: jax.Array, *filters: jax.Array) -> jax.Array:
        x = residual(pooled(convolve(x, first)), filters[:-1])
        return residual(lax.optimization_barrier(x), filters[-1:] * 2).mean((1, 2))

    reader, graph = read(held, NETWORKS[behind_pooling])
    (barrier,) = [e for e in reader.program.equations if e.primitive.name == "optimization_barrier"]
    (behind,) = barrier.outputs
    assert behind not in reader.grouped.layouts
    (op,) = [op for op in graph.ops if op.kind is Kind.BARRIER]
    assert graph.sizes[op.inputs[0]] == AS_IMAGE


def test_shuffled_features_are_copied_in_two_bytes() -> None:
    """Zhang et al. 2018: a convolution of one feature each reads them behind a transpose."""

    def shuffled(x: jax.Array, filters: jax.Array, depthwise: jax.Array) -> jax.Array:
        x = jnp.tanh(convolve(x, filters))
        x = x.reshape(*x.shape[:3], GROUPS, -1).swapaxes(3, 4).reshape(x.shape)
        return convolve(x, depthwise)

    _, graph = read(shuffled, [IMAGE, FILTERS, (3, 3, 1, FEATURES)])
    assert AS_IMAGE // 2 in copies_of(graph, Kind.ELEMENTWISE)


@pytest.mark.parametrize(("multiplier", "rounded", "copies"), [(1, ["sin", "cos"], 0), (3, ["cos"], 2)])
def test_a_gradient_that_takes_features_apart_rounds_them_in_a_copy(
    multiplier: int, rounded: list[str], copies: int
) -> None:
    """Of a depthwise convolution's weights, with one feature or several of each: the cotangent is copied, too."""

    def gradient(x: jax.Array, filters: jax.Array, cotangent: jax.Array) -> jax.Array:
        return jax.vjp(lambda filters: convolve(jnp.sin(x), filters), filters)[1](jnp.cos(cotangent))[0]

    reader, graph = read(gradient, [(8, 32, 32, 16), (3, 3, 1, 16 * multiplier), (8, 32, 32, 16 * multiplier)])
    narrow = stored_in_two_bytes(reader.program)
    assert [e.primitive.name for e in reader.program.equations if not narrow.isdisjoint(e.outputs)] == rounded
    assert len(copies_of(graph, Kind.ELEMENTWISE)) == copies


@pytest.mark.parametrize("network", [pooled_after, behind_pooling, behind_a_joint])
def test_gradients_are_foreseen(network: Callable) -> None:
    """170, 293 and 436 MB; if all were images, 95, 228 and 285 would be foreseen."""
    avals = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in NETWORKS[network]]
    predicted, compiled = foreseen_and_compiled(gradients_of(network), *avals)
    assert abs(predicted / compiled - 1) < 0.2
