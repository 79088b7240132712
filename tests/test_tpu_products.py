"""Products over a batch on a TPU: what lies between them, and copies with the batch outside of the tiles."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from foreseen import foreseen_and_compiled

from remat_opt.compilers.model import compiled
from remat_opt.compilers.tpu_products import arithmetic_of, complex_for_products, lying_between
from remat_opt.compilers.tpu_reader import TpuReader
from remat_opt.compilers.tpu_tiles import in_tiles
from remat_opt.graph.cost import Rates
from remat_opt.graph.graph import Kind
from remat_opt.program.inline import Program, inline


def program_of(fun: Callable, *avals: jax.ShapeDtypeStruct) -> Program:
    return inline(jax.make_jaxpr(fun)(*avals), with_barriers=True, keep_names=False)


def attention(queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", queries, keys))
    return jnp.einsum("bhqk,bkhd->bqhd", scores, values)


@pytest.mark.parametrize(("windows", "length", "heads"), [(2048, 96, 4), (2048, 80, 4)])
def test_scores_lie_as_the_products_between_which_they_are(windows: int, length: int, heads: int) -> None:
    def loss(queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(attention(jnp.sin(queries), jnp.sin(keys), jnp.sin(values))))

    aval = jax.ShapeDtypeStruct((windows, length, heads, 32), jnp.float32)
    foreseen, found = foreseen_and_compiled(jax.grad(loss), aval, aval, aval)
    assert found > 2 * windows * heads * length * 128 * 4  # two arrays of scores, with rows of 128 places
    assert foreseen == pytest.approx(found, rel=0.25)


@pytest.mark.parametrize(("rows", "copies"), [(64, 1), (112, 1), (128, 0)])
def test_operands_are_copied_where_they_could_pad_less(rows: int, copies: int) -> None:
    def product(x: jax.Array) -> jax.Array:
        return jnp.einsum("bqd,bkd->bqk", jnp.sin(x), jnp.sin(x))

    program = program_of(product, jax.ShapeDtypeStruct((8192, rows, 32), jnp.float32))
    graph = compiled(program, Rates(1e12, {"float32": 1e14}), platform="tpu")
    assert sum(op.name == "copy" for op in graph.ops) == 2 * copies  # of the operand and of the result


def test_a_transform_lies_as_products_over_its_frequencies_read_it() -> None:
    """Of 64 × 33 frequencies 16 × 32 numbers each, in tiles of 16 × 128, twice four bytes."""

    def low(x: jax.Array, weight: jax.Array) -> jax.Array:
        found = jnp.moveaxis(jnp.fft.rfft2(jnp.moveaxis(x, 3, 1)), 1, 3)
        return jnp.einsum("bxyi,xyio->bxyo", found[:, :12, :12], weight * (1 + 1j)).real

    program = program_of(
        low, jax.ShapeDtypeStruct((16, 64, 64, 32), jnp.float32), jax.ShapeDtypeStruct((12, 12, 32, 32), jnp.float32)
    )
    found = complex_for_products(program)
    assert set(found.values()) == {64 * 33 * 16 * 128}
    assert {program.avals[value].shape for value in found} == {(16, 64, 33, 32), (16, 32, 64, 33)}
    reader = TpuReader(program, Rates(1e12, {"float32": 1e14}), "tpu", lambda *_: 0)
    sizes = in_tiles(reader, reader.read(())).sizes
    assert {sizes[value] for value in found} == {8 * 64 * 33 * 16 * 128}


def test_what_products_make_for_a_transform_lies_as_they_do() -> None:
    """Padded to 64 × 33 frequencies and turned, each with its 16 × 32 numbers in a tile of 16 × 128."""

    def spread(x: jax.Array, weight: jax.Array) -> jax.Array:
        found = jnp.einsum("bxyi,xyio->bxyo", x * (1 + 1j), weight * (1 + 1j))
        padded = jnp.pad(found, ((0, 0), (0, 52), (0, 21), (0, 0)))
        return jnp.fft.irfft2(jnp.moveaxis(padded, 3, 1))

    shapes = (16, 12, 12, 32), (12, 12, 32, 32)
    program = program_of(spread, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    found = complex_for_products(program)
    assert set(found.values()) == {64 * 33 * 16 * 128}
    assert {program.avals[value].shape for value in found} == {(16, 64, 33, 32), (16, 32, 64, 33)}


def test_what_lies_between_products() -> None:
    program = program_of(attention, *[jax.ShapeDtypeStruct((16, 24, 2, 32), jnp.float32)] * 3)
    found = lying_between(program, ())
    scores = [value for value, aval in enumerate(program.avals) if aval.shape[-2:] == (24, 24)]
    assert set(scores) <= set(found)
    assert {found[value] for value in scores} == {16 * 2 * 24 * 128}
    assert not found.keys() & {*program.inputs, *program.outputs}


def test_what_scores_are_multiplied_with_lies_between_products_if_that_is_all_it_is_for() -> None:
    def masked(features: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        features = jnp.tanh(features)
        kept, seen = jnp.cos(mask), jnp.sin(mask)
        scores = jnp.tanh(jnp.einsum("bqd,bkd->bqk", features, features)) * kept * seen
        return jnp.einsum("bqk,bkd->bqd", scores, features) * features, seen, features

    program = program_of(masked, *(jax.ShapeDtypeStruct((64, 24, *end), jnp.float32) for end in ((32,), (24,))))
    found = lying_between(program, ())
    made = {equation.primitive.name: equation.outputs[0] for equation in program.equations}
    assert made["cos"] in found
    assert made["sin"] not in found  # it is returned
    features = [value for value, aval in enumerate(program.avals) if aval.shape == (64, 24, 32)]
    assert not found.keys() & set(features)


def convolved(image: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def test_features_of_images_that_are_multiplied_with_each_other_lie_as_images() -> None:
    """64 features in 128 lanes, of which a gradient's two parts are copied (as styles of pictures, Johnson 2016)."""

    def loss(image: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
        seen = jax.nn.relu(convolved(image, first))
        alike = jnp.einsum("bhwc,bhwd->bcd", seen, seen)
        return jnp.sum(jnp.tanh(alike)) + jnp.sum(jnp.sin(convolved(seen, second)))

    shapes = (8, 128, 128, 3), (3, 3, 3, 64), (3, 3, 64, 32)
    foreseen, found = foreseen_and_compiled(
        jax.grad(loss), *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    )
    assert found > 2 * 8 * 128 * 128 * 128 * 4 - 2**20
    assert foreseen == pytest.approx(found, rel=0.05)


def test_images_between_products_lie_as_images() -> None:
    """With the 128 examples in the lanes, as copies of what products make with them outside of the tiles: a dump of 256
    has `f32[256,32,32,32]{0,3,2,1}` of `{3,2,1,0}`, and copies back in two bytes."""

    def loss(weights: jax.Array, kernel: jax.Array, image: jax.Array) -> jax.Array:
        mixed = jnp.tanh(jnp.einsum("bhwc,bcd->bhwd", jnp.tanh(convolved(image, kernel)), weights))
        alike = jnp.einsum("bhwc,bhwd->bcd", mixed, mixed)
        return jnp.sum(jnp.tanh(alike).mean(2) * convolved(mixed, kernel).mean((1, 2)))

    shapes = (128, 64, 64), (3, 3, 64, 64), (128, 32, 32, 64)
    foreseen, found = foreseen_and_compiled(
        jax.grad(loss, (0, 1)), *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    )
    assert foreseen == pytest.approx(found, rel=0.05)


@pytest.mark.parametrize(
    ("equation", "left", "right", "kind"),
    [
        ("ij,j->i", (64, 32), (32,), Kind.REDUCTION),
        ("i,ijk->jk", (64,), (64, 16, 8), Kind.REDUCTION),
        ("bi,bj->bij", (64, 16), (64, 8), Kind.ELEMENTWISE),
        ("ij,jk->ik", (64, 32), (32, 16), None),
        ("bij,bjk->bik", (64, 32, 16), (64, 16, 8), None),
    ],
)
def test_a_product_with_a_vector_is_arithmetic(
    equation: str, left: tuple[int, ...], right: tuple[int, ...], kind: Kind | None
) -> None:
    avals = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (left, right)]
    program = program_of(lambda x, y: jnp.einsum(equation, x, y), *avals)
    (found,) = (one for one in program.equations if one.primitive.name == "dot_general")
    assert arithmetic_of(found, program) is kind


def test_gradients_for_each_example_are_not_stored_to_be_weighed() -> None:
    def weighed(left: jax.Array, right: jax.Array, weights: jax.Array) -> jax.Array:
        return jnp.einsum("b,bij->ij", jnp.sin(weights), jnp.einsum("bi,bj->bij", left, right))

    avals = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 2048), (64, 128), (64,))]
    foreseen, found = foreseen_and_compiled(weighed, *avals)
    assert max(foreseen, found) < 64 * 2048 * 128
