"""Images of small batches on a TPU, which its compiler cuts into parts. Figures are those of XLA's dumps."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from remat_opt.compilers.model import compiled
from remat_opt.compilers.tpu_parts import Parts, parts_of
from remat_opt.compilers.tpu_reader import TpuReader
from remat_opt.graph.cost import Rates
from remat_opt.graph.graph import Graph
from remat_opt.program.inline import Program, inline

RATES = Rates(bandwidth=1e12, flops={"float32": 1e14})
FILTER = jax.ShapeDtypeStruct((3, 3, 64, 64), jnp.float32)


def images(batch: int, size: int = 256) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((batch, size, size, 64), jnp.float32)


def convolve(x: jax.Array, w: jax.Array, stride: int = 1) -> jax.Array:
    return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def pool(x: jax.Array, low: int = 0) -> jax.Array:
    padding = [(0, 0), (low, 0), (low, 0), (0, 0)]
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), padding)


def program_of(fun, *avals: jax.ShapeDtypeStruct) -> Program:
    return inline(jax.make_jaxpr(fun)(*avals), with_barriers=True, keep_names=False)


def widths(program: Program, parts: Parts) -> list[int | None]:
    """Of the program's results."""
    return [parts.cut[x].width if x in parts.cut else None for x in program.outputs if isinstance(x, int)]


@pytest.mark.parametrize(("batch", "width"), [(1, 33), (7, 33), (8, None)])
def test_rows_of_a_small_batch_are_cut_in_eight(batch: int, width: int | None) -> None:
    program = program_of(convolve, images(batch), FILTER)
    assert widths(program, parts_of(program)) == [width]


def test_parts_are_as_wide_as_the_pool_behind_them_strides() -> None:
    def pooled(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = convolve(x, w)
        return y, pool(jnp.maximum(y, 0))

    program = program_of(pooled, images(4), FILTER)
    assert widths(program, parts_of(program)) == [34, 17]


def test_a_pool_behind_parts_of_another_width_reads_them_cut_anew() -> None:
    def pooled(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = convolve(jnp.tanh(convolve(x, w)), w)
        return y, pool(y)

    program = program_of(pooled, images(4), FILTER)
    parts = parts_of(program)
    assert widths(program, parts) == [33, 16]
    assert parts.resized == {program.outputs[1]}


def test_a_pool_that_pads_its_first_column_reads_whole_images() -> None:
    program = program_of(lambda x, w: pool(convolve(x, w), low=1), images(4), FILTER)
    assert widths(program, parts_of(program)) == [None]


def test_arithmetic_goes_on_with_parts_until_something_is_whole() -> None:
    def summed(x: jax.Array, w: jax.Array, bias: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = convolve(x, w)
        return jnp.tanh(y) * bias, y + x

    bias = jax.ShapeDtypeStruct((64,), jnp.float32)
    program = program_of(summed, images(4), FILTER, bias)
    assert widths(program, parts_of(program)) == [33, None]


@pytest.mark.parametrize(("batch", "axes", "on_parts"), [(4, (0, 1, 2), True), (4, (1, 2), False), (1, (1, 2), True)])
def test_sums_over_images_and_rows_are_done_on_parts(batch: int, axes: tuple[int, ...], on_parts: bool) -> None:
    program = program_of(lambda x, w: jnp.sum(convolve(x, w), axes), images(batch), FILTER)
    (summed,) = (e for e in program.equations if e.primitive.name == "reduce_sum")
    assert (summed.outputs[0] in parts_of(program).done) == on_parts


def graph_of(fun, *avals: jax.ShapeDtypeStruct) -> Graph:
    return compiled(program_of(fun, *avals), RATES, platform="tpu")


def test_a_convolution_reads_parts_in_two_bytes_that_are_made_for_it() -> None:
    graph = graph_of(lambda x, w: convolve(jnp.tanh(convolve(x, w)), w).sum((0, 1, 2)), images(4), FILTER)
    made = [op.name for op in graph.ops if op.name in ("parts", "conv_general_dilated")]
    assert made == ["parts", "conv_general_dilated"] * 2


def test_a_barrier_holds_images_that_are_put_together() -> None:
    def behind(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.optimization_barrier(convolve(x, w))

    program = program_of(behind, images(4), FILTER)
    reader = TpuReader(program, RATES, "tpu")
    graph = reader.read(())
    *_, copy = (op for op in graph.ops if op.name == "copy")
    assert graph.sizes[copy.outputs[0]] == 4 * 256 * 256 * 64 * 4
    assert graph.outputs == copy.outputs
    assert any(op.name == "barrier" for op in graph_of(behind, images(4), FILTER).ops)  # of what is no value of ours


def test_a_gradient_of_weights_reads_parts_shifted_by_a_column_each() -> None:
    def loss(x: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
        return jnp.sum(convolve(jnp.tanh(convolve(x, first)), second) ** 2)

    names = [op.name for op in graph_of(jax.grad(loss, 2), images(4), FILTER, FILTER).ops]
    assert names.count("shifted parts") == 1
    assert names.count("stacked parts") == 1


def made_and_read(fun, *avals: jax.ShapeDtypeStruct) -> tuple[Graph, list[int]]:
    """A program's ops before fusion, and the places of those that make parts."""
    graph = TpuReader(program_of(fun, *avals), RATES, "tpu").read(())
    return graph, [at for at, op in enumerate(graph.ops) if op.name == "parts"]


def test_columns_of_neighbours_are_no_part_of_what_a_convolution_reads_in_parts() -> None:
    graph, (first, second) = made_and_read(
        lambda x, w: convolve(jnp.tanh(convolve(x, w)), w).sum((0, 1, 2)), images(4), FILTER
    )
    column = 256 * 4 * 8 * 128 * 2  # of all parts, with their features in the lanes
    assert [graph.sizes[made] for made in graph.ops[second].outputs] == [33 * column]
    assert [graph.sizes[made] for made in graph.ops[first].outputs] == [35 * column]  # where the image is cut


def test_what_a_gradient_of_weights_cuts_is_made_beside_parts_for_a_convolution() -> None:
    def loss(x: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
        pooled = pool(jnp.maximum(convolve(x, first), 0))
        return jnp.sum(pool(jnp.maximum(convolve(pooled, second), 0)) ** 2)

    graph, parts = made_and_read(jax.grad(loss, (1, 2)), images(4, 224), FILTER, FILTER)
    image, gradient = (graph.ops[at] for at in parts if len(graph.ops[at].outputs) == 2)
    row = gradient.outputs[1]
    assert graph.sizes[row] == 4 * 112 * 128 * 64 * 2  # 112 columns are eight parts of 16
    assert row in {value for at in parts for value in graph.ops[at].inputs}
    assert image.outputs[1] in {value for op in graph.ops if op.name == "stacked parts" for value in op.inputs}


def test_no_parts_are_made_for_a_convolution_that_reads_an_image_as_it_is() -> None:
    def loss(x: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
        y = pool(jnp.maximum(convolve(x, first), 0))
        return jnp.sum(jnp.tanh(convolve(y, second)) ** 2)

    pointwise = jax.ShapeDtypeStruct((1, 1, 64, 64), jnp.float32)
    graph, parts = made_and_read(jax.grad(loss, (1, 2)), images(4, 224), FILTER, pointwise)
    read = {value for op in graph.ops for value in op.inputs}
    assert {value for at in parts for value in graph.ops[at].outputs} <= read
