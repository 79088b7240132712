"""How a TPU's compiler lays out images, and arrays in tiles."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from remat_opt.compilers.model import compiled
from remat_opt.compilers.tpu_reader import TpuReader
from remat_opt.compilers.tpu_tiles import in_tiles
from remat_opt.graph.cost import Rates
from remat_opt.graph.graph import Graph
from remat_opt.graph.tiles import bytes_with_features_or_batch_in_lanes, bytes_without_features, padded_bytes
from remat_opt.program.images import images_of, without_features
from remat_opt.program.inline import Program, inline

RATES = Rates(bandwidth=1e12, flops={"float32": 1e14})


def program_of(fun: Callable, *avals: jax.ShapeDtypeStruct) -> Program:
    return inline(jax.make_jaxpr(fun)(*avals), with_barriers=True, keep_names=False)


def graph_of(fun: Callable, *avals: jax.ShapeDtypeStruct) -> Graph:
    return compiled(program_of(fun, *avals), RATES, platform="tpu")


def test_tiles_of_a_tpu() -> None:
    assert padded_bytes((64, 224, 224, 64), 4, is_image=True) == 2 * 64 * 224 * 224 * 64 * 4  # 64 of 128 lanes
    assert padded_bytes((256, 112, 112, 64), 4, is_image=True) == 256 * 112 * 112 * 64 * 4  # the batch in the lanes
    assert padded_bytes((4, 256, 256, 64), 4, is_image=True) == 4 * 256 * 256 * 64 * 4  # a small batch is in no tile
    assert padded_bytes((8, 388, 388, 2), 4, is_image=True) == 388 * 388 * 128 * 2 * 4  # XLA's {0,3,2,1:T(2,128)}
    assert padded_bytes((8, 388, 388, 3), 4, is_image=True) == 388 * 388 * 128 * 4 * 4
    assert bytes_without_features((8, 388, 388), 4) == 388 * 392 * 128 * 4  # XLA's {0,2,1:T(8,128)}
    assert bytes_without_features((8, 388, 388, 1), 4) == 388 * 392 * 128 * 4
    assert bytes_without_features((4, 388, 388), 4) == padded_bytes((4, 388, 388), 4)
    # Where it has to be in one, as in XLA's dumps: four rows, and of two bytes each no fewer than two.
    assert bytes_with_features_or_batch_in_lanes((4, 256, 256, 64), 4, 0, 3) == 4 * 256 * 256 * 128 * 4
    assert bytes_with_features_or_batch_in_lanes((1, 256, 256, 64), 2, 0, 3) == 2 * 256 * 256 * 128 * 2
    assert padded_bytes((16, 1000), 2) == 16 * 1024 * 2
    assert padded_bytes((17, 1000), 2) == 24 * 1024 * 2  # eight rows of any number
    assert padded_bytes((3,), 4) == 512
    assert padded_bytes((), 4) == 512
    assert padded_bytes((0, 8), 4) == 0


def test_what_lies_behind_a_barrier_is_the_image_that_lies_before_it() -> None:
    def pooled(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        relu = lax.optimization_barrier(jax.nn.relu(x) * 2)
        return lax.reduce_window(relu, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"), jnp.sum(x, 3)

    program = program_of(pooled, jax.ShapeDtypeStruct((4, 8, 8, 3), jnp.float32))
    shapes = [program.avals[value].shape for value in images_of(program)]
    assert shapes.count((4, 4, 4, 3)) == 1  # what the pool makes
    assert shapes.count((4, 8, 8, 3)) == sum(aval.shape == (4, 8, 8, 3) for aval in program.avals)
    assert len(shapes) == 1 + shapes.count((4, 8, 8, 3))  # sums over the features are none


def test_what_is_reduced_over_features_and_spread_over_them_lies_as_images_without_them() -> None:
    def loss(x: jax.Array, filters: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = lax.conv_general_dilated(x, filters, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        chosen = jnp.where(jnp.arange(3.0) == labels[..., None], logits, 0)
        return jnp.max(logits, 3) * 2, (logits + 2.0 * labels[..., None] + chosen).sum((0, 1, 2))

    x, filters = jax.ShapeDtypeStruct((8, 16, 16, 3), jnp.float32), jax.ShapeDtypeStruct((3, 3, 3, 3), jnp.float32)
    program = program_of(loss, x, filters, jax.ShapeDtypeStruct((8, 16, 16), jnp.float32))
    found = without_features(program, images_of(program))
    (maximum,) = (e.outputs[0] for e in program.equations if e.primitive.name == "reduce_max")
    doubled = {e.outputs[0] for e in program.equations if e.primitive.name == "mul"}
    assert {maximum, *doubled} <= found
    assert found.isdisjoint(program.inputs)
    (summed,) = (e.outputs[0] for e in program.equations if e.primitive.name == "reduce_sum")
    assert summed not in found
    graph = in_tiles(TpuReader(program, RATES, "tpu"), TpuReader(program, RATES, "tpu").read(()))
    assert graph.sizes[maximum] == 16 * 16 * 128 * 4


def test_a_filter_and_its_gradient_are_no_images() -> None:
    def gradient(x: jax.Array, filters: jax.Array) -> jax.Array:
        def loss(filters: jax.Array) -> jax.Array:
            numbers = ("NHWC", "HWIO", "NHWC")
            return lax.conv_general_dilated(x, filters, (1, 1), "SAME", dimension_numbers=numbers).sum()

        return filters - jax.grad(loss)(filters)

    x, filters = jax.ShapeDtypeStruct((4, 8, 8, 3), jnp.float32), jax.ShapeDtypeStruct((3, 3, 3, 5), jnp.float32)
    program = program_of(gradient, x, filters)
    found = {program.avals[value].shape for value in images_of(program)}
    assert (4, 8, 8, 3) in found
    assert (4, 8, 8, 5) in found
    assert not any(program.avals[value].size == 3 * 3 * 3 * 5 for value in images_of(program))


def test_arguments_come_as_they_pad_least() -> None:
    def pooled(x: jax.Array) -> jax.Array:
        return lax.reduce_window(x * 2, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    graph = graph_of(pooled, jax.ShapeDtypeStruct((8, 48, 48, 1), jnp.float32))
    assert graph.sizes[graph.inputs[0]] == 8 * 48 * 128 * 4  # the rows in the lanes


@pytest.mark.parametrize(("features", "lanes"), [(36, (128, 144)), (128, (256, 64))])
def test_images_lie_as_the_pieces_that_they_are_joined_of(features: int, lanes: tuple[int, int]) -> None:
    # A batch of 64 lies in the lanes beside 36 features, which pads less, and stays there beside 144.
    def block(x: jax.Array, y: jax.Array, filters: jax.Array) -> tuple[jax.Array, jax.Array]:
        pieces = [lax.cumsum(array, 1) for array in (x, y)]
        whole = jnp.concatenate(pieces, -1) if features == 128 else jnp.concatenate([*pieces, *pieces], -1)
        behind = lax.optimization_barrier(jax.nn.relu(whole))
        numbers = ("NHWC", "HWIO", "NHWC")
        return behind, behind + lax.conv_general_dilated(behind, filters, (1, 1), "SAME", dimension_numbers=numbers)

    total = {36: 144, 128: 256}[features]
    image = jax.ShapeDtypeStruct((64, 8, 8, features), jnp.float32)
    program = program_of(block, image, image, jax.ShapeDtypeStruct((1, 1, total, total), jnp.float32))
    reader = TpuReader(program, RATES, "tpu")
    sizes = in_tiles(reader, reader.read(())).sizes
    by_primitive = {e.primitive.name: sizes[e.outputs[0]] for e in program.equations}
    assert by_primitive["concatenate"] == 8 * 8 * 4 * lanes[0] * lanes[1]
    assert by_primitive["max"] == by_primitive["concatenate"]
    assert by_primitive["conv_general_dilated"] == 8 * 8 * 4 * 256 * 64  # it has the features there
