"""Masks in bits on a TPU, and images of which several dimensions number the examples."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from remat_opt.compilers.model import allocated_by, compiled
from remat_opt.compilers.tpu_masks import MASK, UNPACK, Packed, packed_masks
from remat_opt.compilers.tpu_reader import TpuReader
from remat_opt.compilers.tpu_tiles import in_tiles
from remat_opt.graph.cost import Rates
from remat_opt.graph.graph import Graph
from remat_opt.program.images import images_of, with_merged_batch
from remat_opt.program.inline import Program, inline
from remat_opt.targets import measure_flat, reports_gaps_twice
from remat_opt.targets.devices import resolve_target

V5E = resolve_target("v5e")


def program_of(fun: Callable, *shapes: tuple[int, ...]) -> Program:
    avals = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return inline(jax.make_jaxpr(fun)(*avals), with_barriers=True, keep_names=False)


def graph_of(fun: Callable, *shapes: tuple[int, ...]) -> Graph:
    return compiled(program_of(fun, *shapes), Rates(V5E.bandwidth, V5E.flops), platform="tpu")


def masks_of(fun: Callable, *shapes: tuple[int, ...]) -> list[Packed]:
    program = program_of(fun, *shapes)
    return list(packed_masks(program, images_of(program), with_merged_batch(program)).values())


def conv(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def gradients(layer: Callable, *shapes: tuple[int, ...]) -> tuple:
    """A function of an image and kernels, and its arguments' shapes."""

    def loss(x: jax.Array, *kernels: jax.Array) -> jax.Array:
        for kernel in kernels:
            x = layer(x, kernel)
        return jnp.square(x).sum()

    return jax.grad(loss, argnums=tuple(range(1, len(shapes)))), *shapes


KERNEL = (3, 3, 128, 128)
FILMS, SMALL = (8, 16, 24, 24, 32), (3, 3, 32, 32)


@pytest.mark.parametrize(
    ("rows", "bits"),
    [(8, 8), (16, 16), (24, 32), (32, 32), (40, 0)],  # in the rows of an image; more find no word
)
def test_a_rectifiers_mask_is_packed_along_the_rows_of_an_image(rows: int, bits: int) -> None:
    found = masks_of(*gradients(lambda x, kernel: jax.nn.relu(conv(x, kernel)), (64, rows, 16, 128), KERNEL))
    assert len(found) == bool(bits)
    for mask in found:
        assert mask.words == 64 * 16 * 128 * bits // 8


def test_of_other_arrays_the_first_dimension_is_packed() -> None:
    (found,) = masks_of(*gradients(lambda x, weight: jax.nn.relu(x @ weight), (8, 256, 128), (128, 512)))
    assert found == Packed(words=256 * 512, by_kernel=True)
    assert not masks_of(*gradients(lambda x, weight: jax.nn.relu(x @ weight), (256, 128), (128, 512)))  # all in tiles


def test_a_mask_may_be_of_a_comparison_with_an_array_of_one_number() -> None:
    def rectified(x: jax.Array, kernel: jax.Array) -> jax.Array:
        made = conv(x, kernel)
        return jnp.where(made > jnp.full_like(made, 0.5), made, 0.5)

    assert [mask.by_kernel for mask in masks_of(*gradients(rectified, (64, 16, 16, 128), KERNEL))] == [False]


def normalised(x: jax.Array) -> jax.Array:
    return (x - x.mean((0, 1, 2))) * lax.rsqrt(x.var((0, 1, 2)) + 1e-5)


@pytest.mark.parametrize(
    "layer",
    [
        lambda x, kernel: jax.nn.relu(normalised(conv(x, kernel))),  # what is compared is made again of what is there
        lambda x, kernel: conv(jnp.where(x > 0, x, 0.1 * x), kernel),  # no product makes it
        lambda x, kernel: jnp.where(lax.stop_gradient(conv(x, kernel)) > 0, conv(x, kernel), 0.0),  # nor alone
    ],
)
def test_other_masks_are_made_again(layer: Callable) -> None:
    assert not masks_of(*gradients(layer, (64, 16, 16, 128), KERNEL))


def test_a_product_writes_the_mask_beside_what_the_rectifier_makes() -> None:
    """Of two layers: the first one's result in two bytes, for the second product, with the answers in bits."""
    layer = lambda x, kernel: jax.nn.relu(conv(x, kernel))  # noqa: E731
    graph = graph_of(*gradients(layer, (128, 16, 16, 128), KERNEL, KERNEL))
    made = {value: op for op in graph.ops for value in op.outputs}
    masks = [op for op in graph.ops if op.name == MASK]
    assert not masks  # none is a kernel of its own
    unpacked = [op for op in graph.ops if op.name == UNPACK]
    assert len(unpacked) == 2
    assert graph.sizes[unpacked[0].outputs[0]] in (0, 128 * 16 * 16 * 128)  # on the chip, or a byte each
    (words,) = unpacked[0].inputs
    assert made[words].name == "conv_general_dilated"
    assert len(made[words].outputs) == 2


def test_what_chooses_reads_the_bits_and_the_result() -> None:
    """A leaky rectifier compares, and chooses between what it compared and a tenth of it: whoever reads it does so."""
    layer = lambda x, kernel: jax.nn.leaky_relu(conv(x, kernel), 0.1)  # noqa: E731
    program = program_of(*gradients(layer, (128, 16, 16, 128), KERNEL, KERNEL))
    rates = Rates(V5E.bandwidth, V5E.flops)
    reader = TpuReader(program, rates, "tpu", lambda *_: 0)
    words = [op.outputs[0] for op in reader.read(()).ops if op.name == MASK]
    graph = compiled(program, rates, platform="tpu")
    assert len(words) == 2
    assert not any(op.name == UNPACK for op in graph.ops)
    products = [op for op in graph.ops if op.name == "conv_general_dilated"]
    assert set(words) < {value for op in products for value in op.outputs}
    assert set(words) < {value for op in products for value in op.inputs}


def test_rectified_convolutions_are_foreseen() -> None:
    """Seven of 67 MB in float32, of which a v5e's compiler keeps 34 MB in two bytes, and masks of 2 MB."""

    def loss(x: jax.Array, *kernels: jax.Array) -> jax.Array:
        for kernel in kernels:
            x = jax.nn.relu(conv(x, kernel))
        return jnp.square(x.mean((1, 2))).sum()

    step = jax.grad(loss, argnums=tuple(range(1, 8)))
    shapes = (512, 16, 16, 3), (3, 3, 3, 128), *[KERNEL] * 6
    foreseen = allocated_by(graph_of(step, *shapes), "tpu", gaps_twice=reports_gaps_twice("tpu"))
    avals = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    assert foreseen == pytest.approx(measure_flat(step, avals, target="v5e").temp_bytes, rel=0.1)


def test_frames_lie_as_the_images_that_convolutions_make_of_them() -> None:
    def step(films: jax.Array, kernel: jax.Array) -> jax.Array:
        frames = films.reshape(-1, *films.shape[2:])
        return jnp.tanh(jax.nn.relu(conv(frames, kernel)).reshape(8, 16, 24, 24, 32) * 2.0)

    program = program_of(step, (8, 16, 24, 24, 3), (3, 3, 3, 32))
    found = with_merged_batch(program)
    assert set(found.values()) == {(128, 24, 24, 3), (128, 24, 24, 32)}
    assert program.outputs[0] in found
    assert all(program.avals[value].shape[:2] == (8, 16) for value in found)


def test_frames_and_masks_take_as_much_as_those_images() -> None:
    program = program_of(
        *gradients(
            lambda x, kernel: jax.nn.relu(conv(x.reshape(128, 24, 24, 32), kernel).reshape(x.shape)), FILMS, SMALL
        )
    )
    reader = TpuReader(program, Rates(V5E.bandwidth, V5E.flops), "tpu", lambda *_: 0)
    sizes = in_tiles(reader, reader.read(()), narrow=False).sizes
    found = [value for value in reader.merged if program.avals[value].dtype == jnp.float32]
    assert found
    assert {sizes[value] for value in found if sizes[value]} == {24 * 24 * 128 * 32 * 4}  # 128 frames in the lanes
    (mask,) = reader.masks
    assert sizes[mask] == 24 * 24 * 128 * 32
    assert reader.masks[mask].words == 24 * 128 * 32 * 4


def test_mapped_pools_have_their_examples_apart() -> None:
    def pooled(x: jax.Array, kernel: jax.Array) -> jax.Array:
        window = (1, 1, 2, 2, 1)
        found = jnp.tanh(lax.reduce_window(x, -jnp.inf, lax.max, window, window, "VALID"))
        return conv(found.reshape(-1, *found.shape[2:]), kernel)

    assert not with_merged_batch(program_of(pooled, FILMS, SMALL))


def test_of_a_product_of_which_only_the_mask_is_read_nothing_else_is_stored() -> None:
    def gradient(x: jax.Array, kernel: jax.Array, target: jax.Array) -> jax.Array:
        return jax.grad(lambda kernel: (jax.nn.relu(conv(x, kernel)) * target).sum())(kernel)

    shapes = [(512, 32, 16, 128), KERNEL, (512, 32, 16, 128)]
    avals = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    figures = measure_flat(lambda *arrays: [gradient(*arrays)], avals, target="v5e")
    foreseen = allocated_by(graph_of(gradient, *shapes), "tpu", gaps_twice=reports_gaps_twice("tpu"))
    assert max(foreseen, figures.temp_bytes) < 2**20  # words and what is unpacked are on the chip
