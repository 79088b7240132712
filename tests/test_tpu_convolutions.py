"""What a TPU's convolutions read that is no array of the program, and how images are cut and put together."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from foreseen import foreseen
from jax import lax

from remat_opt.compilers.model import compiled
from remat_opt.compilers.tpu_convolutions import ROUNDED_SLICE, exchanges_operands
from remat_opt.compilers.tpu_reader import TpuReader
from remat_opt.graph.build import build
from remat_opt.graph.cost import Rates
from remat_opt.graph.graph import Graph
from remat_opt.program.images import images_of
from remat_opt.program.inline import Program, inline

RATES = Rates(bandwidth=1e12, flops={"float32": 1e14})
NUMBERS = ("NHWC", "HWIO", "NHWC")


def program_of(fun: Callable, *shapes: tuple[int, ...]) -> Program:
    avals = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    return inline(jax.make_jaxpr(fun)(*avals), with_barriers=True, keep_names=False)


def graph_of(fun: Callable, *shapes: tuple[int, ...]) -> Graph:
    return compiled(program_of(fun, *shapes), RATES, platform="tpu")


def sizes_of(graph: Graph, name: str) -> list[int]:
    return [graph.sizes[op.outputs[0]] for op in graph.ops if op.name == name]


def convolve(x: jax.Array, filters: jax.Array, padding: str = "SAME") -> jax.Array:
    return lax.conv_general_dilated(x, filters, (1, 1), padding, dimension_numbers=NUMBERS)


def upsample(x: jax.Array, filters: jax.Array) -> jax.Array:
    """A transposed convolution by a stride of two, as a U-Net has it."""
    return lax.conv_transpose(x, filters, (2, 2), "VALID")


def gradient_of_weights(fun: Callable) -> Callable:
    def gradient(x: jax.Array, filters: jax.Array, cotangent: jax.Array) -> jax.Array:
        return jax.vjp(lambda filters: fun(x, filters), filters)[1](cotangent)[0]

    return gradient


@pytest.mark.parametrize(
    ("fun", "image", "filters", "result", "exchanged"),
    [
        (upsample, (8, 14, 14, 16), (2, 2, 16, 8), (8, 28, 28, 8), True),
        (convolve, (8, 14, 14, 16), (3, 3, 16, 8), (8, 14, 14, 8), False),
        (lambda x, f: convolve(x, f, "VALID"), (8, 14, 14, 16), (3, 3, 16, 8), (8, 12, 12, 8), False),
        (lambda x, f: convolve(x, f, [(2, 2), (2, 2)]), (8, 14, 14, 16), (3, 3, 16, 8), (8, 16, 16, 8), True),
        (convolve, (8, 14, 14, 16), (1, 1, 16, 8), (8, 14, 14, 8), False),
    ],
)
def test_the_larger_operand_of_a_convolution_is_its_image(
    fun: Callable, image: tuple, filters: tuple, result: tuple, exchanged: bool
) -> None:
    """XLA's `conv_operand_swapper.cc`."""
    program = program_of(gradient_of_weights(fun), image, filters, result)
    (convolution,) = (e for e in program.equations if e.primitive is lax.conv_general_dilated_p)
    assert exchanges_operands(convolution, program) == exchanged


def test_grouped_convolutions_keep_their_operands() -> None:
    def grouped(x: jax.Array, filters: jax.Array) -> jax.Array:
        padding = [(14, 14), (14, 14)]
        return lax.conv_general_dilated(x, filters, (1, 1), padding, feature_group_count=2, dimension_numbers=NUMBERS)

    program = program_of(grouped, (8, 4, 4, 16), (15, 15, 8, 8))
    assert not exchanges_operands(program.equations[-1], program)


@pytest.mark.parametrize(
    ("examples", "features", "groups", "padded"),
    [
        (32, 128, 32, 128 * 128),  # four features each: 32 examples in 128 lanes
        (32, 256, 4, 32 * 4 * 128),  # 64 features each: they are more than the examples
        (8, 128, 16, 8 * 16 * 128),  # as many
        (32, 128, 128, None),  # one feature each
        (32, 256, 2, None),  # each fills the lanes
    ],
)
def test_a_convolution_in_groups_has_more_of_batch_and_features_in_the_lanes(
    examples: int, features: int, groups: int, padded: int | None
) -> None:
    """As libtpu's dumps have them: bf16[32,64,64,32,4]{0,4,3,2,1}, f32[32,64,64,4,64]{4,0,3,2,1}."""

    def step(x: jax.Array, filters: jax.Array) -> jax.Array:
        given = {"feature_group_count": groups, "dimension_numbers": NUMBERS}
        image = lax.conv_general_dilated(x * 2, filters, (1, 1), "SAME", **given)
        return convolve(image, jnp.ones((1, 1, features, 8)))

    side = 256  # beyond what the chip takes
    graph = graph_of(step, (examples, side, side, features), (3, 3, features // groups, features))
    copies = sizes_of(graph, "copy")
    found = [size for size in copies if padded is not None and size == side * side * padded * 2]
    assert len(found) == (padded is not None)
    assert bool(copies) == (padded is not None)


def test_windows_that_take_one_element_each_keep_their_operands() -> None:
    """Each number of the image is between zeros, as a grouped convolution is written."""

    def spread(x: jax.Array, filters: jax.Array) -> jax.Array:
        given = {"lhs_dilation": (3, 3), "dimension_numbers": NUMBERS}
        return lax.conv_general_dilated(x, filters, (2, 2), [(0, 0), (0, 0)], **given)

    program = program_of(spread, (8, 2, 2, 16), (3, 3, 16, 8))
    assert not exchanges_operands(program.equations[-1], program)


def test_what_becomes_the_image_is_reversed_in_two_bytes() -> None:
    def step(x: jax.Array, filters: jax.Array, cotangent: jax.Array) -> jax.Array:
        return gradient_of_weights(upsample)(x, filters, jnp.split(cotangent * 2, 2, 3)[1])

    graph = graph_of(step, (8, 196, 196, 128), (2, 2, 128, 64), (8, 392, 392, 128))
    in_two_bytes = 8 * 392 * 392 * 128 * 2  # 64 features in 128 lanes: the U-Net's bf16[8,392,392,64]{3,0,2,1}
    assert sizes_of(graph, ROUNDED_SLICE) == [in_two_bytes]
    assert sizes_of(graph, "rev") == [in_two_bytes]


def test_slices_are_cut_before_they_are_put_together_for_a_convolution() -> None:
    def step(skipped: jax.Array, x: jax.Array, filters: jax.Array) -> jax.Array:
        cut = (skipped * 2)[:, 8:-8, 8:-8]
        return convolve(jnp.concatenate([x * 2, cut], 3), filters)

    graph = graph_of(step, (8, 216, 216, 64), (8, 200, 200, 64), (3, 3, 128, 64))
    assert sizes_of(graph, ROUNDED_SLICE) == [8 * 200 * 200 * 128 * 2]
    assert not sizes_of(graph, "concatenate")


def test_the_first_features_of_a_tile_are_there_as_they_are() -> None:
    def step(x: jax.Array, filters: jax.Array, *, first: bool) -> jax.Array:
        image = convolve(x, filters)
        half = image[..., :64] if first else image[..., 64:]
        return lax.pad(half, 0.0, [(0, 0, 0), (8, 8, 0), (8, 8, 0), (0, 0, 0)])

    shapes = (8, 200, 200, 64), (3, 3, 64, 128)
    first, second = (graph_of(lambda x, f, of=of: step(x, f, first=of), *shapes) for of in (True, False))
    assert not sizes_of(first, "slice")
    assert sizes_of(second, "slice") == [8 * 200 * 200 * 128 * 4]


def test_what_is_cut_of_images_and_put_together_of_them_is_an_image() -> None:
    def step(x: jax.Array, filters: jax.Array) -> tuple[jax.Array, ...]:
        image = convolve(x, filters)
        rows, features = image[:, 1:3], jnp.split(image, [3], 3)
        return rows, lax.pad(features[0], 0.0, [(0, 0, 0)] * 4), lax.rev(features[1], (1,)), image[0]

    program = program_of(step, (8, 16, 16, 4), (3, 3, 4, 8))
    *cut, example = program.outputs
    images = images_of(program)
    assert images.issuperset(cut)
    assert example not in images


@pytest.mark.parametrize(("platform", "written"), [("tpu", {"slice"}), ("cuda", {"split"}), ("cpu", {"split"})])
def test_halves_of_a_tile_are_read_from_the_whole(platform: str, written: set[str]) -> None:
    """Each takes as many bytes in tiles as both together."""

    def step(x: jax.Array, filters: jax.Array) -> jax.Array:
        first, second = jnp.split(convolve(x, filters), 2, 3)
        return jnp.tanh(first) + jnp.sin(second)

    shapes = (8, 16, 16, 4), (3, 3, 4, 128)
    names = {e.primitive.name for e in build(program_of(step, *shapes), RATES, platform=platform).program.equations}
    assert names & {"slice", "split"} == written


def test_pieces_that_fill_their_tiles_are_split_at_once() -> None:
    def step(x: jax.Array, filters: jax.Array) -> jax.Array:
        first, second = jnp.split(convolve(x, filters), 2, 3)
        return jnp.tanh(first) + jnp.sin(second)

    program = build(program_of(step, (8, 16, 16, 4), (3, 3, 4, 256)), RATES, platform="tpu").program
    assert [e.primitive.name for e in program.equations].count("split") == 1


@pytest.mark.parametrize(("places", "features", "copies"), [(4096, 16, 2), (4096, 128, 0)])
def test_convolutions_along_the_lanes_read_and_make_copies(places: int, features: int, copies: int) -> None:
    def along(x: jax.Array, filters: jax.Array) -> jax.Array:
        numbers = ("NWC", "WIO", "NWC")
        return jnp.sin(lax.conv_general_dilated(jnp.sin(x), filters, (1,), "SAME", dimension_numbers=numbers))

    graph = graph_of(along, (8, places, features), (3, features, features))
    assert len(sizes_of(graph, "copy")) == copies


def grown(groups: int) -> Callable:
    """The gradient of what grows in 48 turns, by a convolution in groups and a dense layer."""

    def loss(image: jax.Array, kernel: jax.Array, weight: jax.Array) -> jax.Array:
        def turn(image: jax.Array, _: None) -> tuple[jax.Array, None]:
            seen = lax.conv_general_dilated(
                image, kernel, (1, 1), "SAME", dimension_numbers=NUMBERS, feature_group_count=groups
            )
            return image + 0.1 * (jnp.tanh(seen) @ weight), None

        return lax.scan(turn, image, None, length=48)[0].sum()

    return jax.grad(loss, (1, 2))


@pytest.mark.parametrize(
    ("groups", "shapes", "stacks", "compiled_bytes"),
    [
        # In 128 lanes the 64 features of two arrays of each turn, and its image in two bytes.
        (1, ((16, 32, 32, 64), (3, 3, 64, 64), (64, 64)), 48 * 16 * 32 * 32 * 128 * (4 + 4 + 2), 1_006_796_800),
        # Three features of each come of one: the image, which lies with 64 columns in the lanes, is not rounded.
        (16, ((8, 64, 64, 16), (3, 3, 1, 48), (48, 16)), 48 * 8 * 64 * 128 * (64 * (4 + 4) + 16 * 4), 2_080_571_392),
    ],
)
def test_images_of_all_turns_lie_one_behind_the_other(
    groups: int, shapes: tuple[tuple[int, ...], ...], stacks: int, compiled_bytes: int
) -> None:
    """With what libtpu 0.0.51 allocates; an older one makes of the second 1,946 MB."""
    found = foreseen(grown(groups), *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    assert found >= stacks
    assert found == pytest.approx(compiled_bytes, rel=0.001)


def test_what_a_loop_carries_is_no_stack() -> None:
    """An image as others, with its 256 examples in the lanes; cut by these it would lie with 64 columns there."""

    def grow(image: jax.Array, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
        def turn(image: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            image = jnp.tanh(convolve(image, kernel))
            return image, image

        return lax.scan(turn, image, None, length=6)

    graph = graph_of(grow, (256, 64, 64, 16), (3, 3, 16, 16))
    (loop,) = (op for op in graph.ops if op.name == "scan")
    assert [graph.sizes[value] / (256 * 64 * 64 * 16 * 4) for value in loop.outputs[:2]] == [1, 6]


@pytest.mark.parametrize(
    ("batch", "features", "result"),
    [
        (8, 3, 16 * 64 * 64 * 8 * 128),  # the batch fills the rows of tiles, of which each has one lane filled
        (10, 3, 16 * 64 * 64 * 128),
        (4, 3, 16 * 64 * 64 * 128),
    ],
)
def test_what_groups_make_of_one_feature_each(batch: int, features: int, result: int) -> None:
    def function(image: jax.Array, kernel: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(
            image, kernel, (1, 1), "SAME", dimension_numbers=NUMBERS, feature_group_count=16
        )

    program = program_of(function, (batch, 64, 64, 16 * features), (3, 3, features, 16))
    sizes = TpuReader(program, RATES, "tpu").read(()).sizes
    assert 4 * result in sizes[len(program.avals) :]


@pytest.mark.parametrize(
    ("method", "is_scaled", "copies"), [("linear", True, 1), ("linear", False, 0), ("nearest", True, 0)]
)
def test_what_is_made_of_a_resized_image_is_copied_for_convolutions(method: str, is_scaled: bool, copies: int) -> None:
    """Resized linearly an image comes from a product with its columns last (as `bf16[32,128,128,64]{3,0,2,1}` beside
    `f32[128,32,64,128]{3,0,2,1}` in a dump); by nearest neighbours it is gathered as it lies."""

    def loss(kernel: jax.Array, scale: jax.Array, image: jax.Array, first: jax.Array) -> jax.Array:
        batch, height, width, features = image.shape
        large = jax.image.resize(convolve(image, first), (batch, 2 * height, 2 * width, features), method)
        large = large * scale[:, None, None, :] if is_scaled else large
        return jnp.sum(jnp.tanh(convolve(large, kernel))) + jnp.sum(scale)

    shapes = (3, 3, 64, 64), (32, 64), (32, 64, 64, 64), (3, 3, 64, 64)
    graph = graph_of(jax.grad(loss, (0, 1)), *shapes)
    assert sizes_of(graph, "copy").count(2 * 32 * 128 * 128 * 128) == copies


def test_what_is_made_of_a_product_whose_features_are_last_is_copied_too() -> None:
    """Of `f32[128,32,128,128]{3,0,2,1}` a dump has `bf16[32,128,128,128]{3,1,2,0}` beside it, for both convolutions."""

    def loss(kernel: jax.Array, scale: jax.Array, heights: jax.Array, image: jax.Array) -> jax.Array:
        product = lax.dot_general(heights, image, (((1,), (1,)), ((), ())))
        large = product.transpose(1, 0, 2, 3) * scale[:, None, None, :]
        return jnp.sum(jnp.tanh(convolve(large, kernel))) + jnp.sum(scale)

    graph = graph_of(jax.grad(loss, (0, 1)), (3, 3, 128, 128), (32, 128), (128, 64), (32, 64, 128, 128))
    assert sizes_of(graph, "copy") == [2 * 32 * 128 * 128 * 128]
