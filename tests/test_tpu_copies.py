"""What XLA's TPU compiler copies, cuts and widens before others read it, against the compiler itself."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from remat_opt.compilers.equations import mixes_dimensions, multiplies_only
from remat_opt.compilers.model import allocated_by, compiled
from remat_opt.compilers.tpu_slices import before_products
from remat_opt.graph.cost import Rates
from remat_opt.graph.tiles import lies_otherwise
from remat_opt.program.images import with_split_batch
from remat_opt.program.inline import Program, inline
from remat_opt.targets import reports_gaps_twice
from remat_opt.targets.compile import measure_flat
from remat_opt.targets.devices import resolve_target

RATES = Rates(bandwidth=1e12, flops={"float32": 1e14})


def array(*shape: int, dtype: jnp.dtype = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def program_of(fun: Callable, *avals: jax.ShapeDtypeStruct) -> Program:
    return inline(jax.make_jaxpr(fun)(*avals), with_barriers=True, keep_names=False)


def convolved(image: jax.Array, weight: jax.Array, stride: int = 1) -> jax.Array:
    return lax.conv_general_dilated(image, weight, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def pooled(reduce: Callable, start: float, image: jax.Array) -> jax.Array:
    window = (1,) * (image.ndim - 3) + (2, 2, 1)
    return lax.reduce_window(image, start, reduce, window, window, "VALID")


def of_an_image(weight: jax.Array, image: jax.Array) -> jax.Array:
    made = convolved(image, weight, stride=2)
    return (jnp.maximum(made - made.mean((0, 1, 2)), 0.0) ** 2).sum()


def of_means(weight: jax.Array, other: jax.Array, image: jax.Array) -> jax.Array:
    means = pooled(lax.add, 0.0, jnp.maximum(convolved(image, weight), 0.0))
    return (convolved(means, other) ** 2).sum()


def of_words(weight: jax.Array, hidden: jax.Array, words: jax.Array) -> jax.Array:
    logits = (hidden.astype(jnp.bfloat16) @ weight.astype(jnp.bfloat16)).astype(jnp.float32)[:, :-1]
    own = jnp.take_along_axis(logits, words[..., None], -1)[..., 0]
    return (jax.nn.logsumexp(logits, -1) - own).mean()


def of_a_loop(weight: jax.Array, carry: jax.Array, steps: jax.Array) -> jax.Array:
    def turn(carry: jax.Array, step: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(carry @ weight)[:, :4096] + step, None

    return lax.scan(turn, carry, steps)[0]


def of_epochs(weight: jax.Array, other: jax.Array, games: jax.Array) -> jax.Array:
    def loss(weights: tuple[jax.Array, jax.Array]) -> jax.Array:
        images = games.reshape(-1, *games.shape[-3:])
        return (jnp.maximum(convolved(jnp.maximum(convolved(images, weights[0]), 0.0), weights[1]), 0.0) ** 2).mean()

    def epoch(weights: tuple[jax.Array, jax.Array], _: None) -> tuple[tuple[jax.Array, jax.Array], None]:
        return jax.tree.map(lambda weight, slope: weight - slope, weights, jax.grad(loss)(weights)), None

    return lax.scan(epoch, (weight, other), None, length=3)[0][1]


@pytest.mark.parametrize(
    ("loss", "avals", "differentiated"),
    [
        pytest.param(of_an_image, [array(3, 3, 3, 32), array(8, 256, 256, 3)], (0,), id="an image lies otherwise"),
        pytest.param(of_an_image, [array(3, 3, 3, 32), array(1024, 64, 64, 3)], (0,), id="an image lies as it is read"),
        pytest.param(
            of_means, [array(3, 3, 3, 32), array(3, 3, 32, 64), array(1024, 32, 32, 3)], (0, 1), id="a windowed sum"
        ),
        pytest.param(
            of_words,
            [array(384, 8000), array(8, 512, 384), array(8, 511, dtype=jnp.int32)],
            (0, 1),
            id="words after a slice",
        ),
        pytest.param(of_a_loop, [array(4096, 16384), array(256, 4096), array(8, 256, 4096)], (), id="a loop's weights"),
        pytest.param(
            of_epochs, [array(3, 3, 3, 16), array(3, 3, 16, 32), array(64, 24, 16, 16, 3)], (), id="a loop's images"
        ),
        pytest.param(
            of_epochs,
            [array(3, 3, 3, 16), array(3, 3, 16, 32), array(16, 16, 32, 32, 3)],
            (),
            id="a loop's images of which 32 columns lie in the lanes",
        ),
    ],
)
def test_memory_is_foreseen(loss: Callable, avals: Sequence[jax.ShapeDtypeStruct], differentiated: Sequence) -> None:
    fun = jax.value_and_grad(loss, differentiated) if differentiated else loss
    target = resolve_target("v5e")
    graph = compiled(program_of(fun, *avals), Rates(target.bandwidth, target.flops), platform="tpu")
    foreseen = allocated_by(graph, "tpu", gaps_twice=reports_gaps_twice("tpu"))
    found = measure_flat(lambda *args: jax.tree.leaves(fun(*args)), avals, target="v5e").temp_bytes
    assert foreseen == pytest.approx(found, rel=0.15, abs=1e6)


@pytest.mark.parametrize(
    ("shape", "otherwise"),
    [
        ((64, 224, 224, 3), True),  # 224 columns lie in the lanes, and not 64 images
        ((1024, 224, 224, 3), False),
        ((64, 28, 28, 256), False),  # with its features in the lanes
        ((8, 256, 256, 3), True),
    ],
)
def test_images_that_pad_least_with_neither_batch_nor_features_in_the_lanes(
    shape: tuple[int, ...], otherwise: bool
) -> None:
    assert lies_otherwise(shape, 4) == otherwise


def test_a_product_makes_what_a_slice_takes_of_it() -> None:
    def fun(x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
        made = (x @ y).astype(jnp.float32)
        other = x @ (2 * y)
        return made[:7], other[:7], other

    program = before_products(program_of(fun, *[array(8, 8, dtype=jnp.bfloat16)] * 2))
    (cut,) = (e for e in program.equations if e.primitive.name == "slice")  # of what is read twice
    first, other = (e.outputs[0] for e in program.equations if e.primitive.name == "dot_general")
    assert cut.inputs == (other,)
    assert [program.avals[value].shape for value in (first, other)] == [(7, 8), (8, 8)]
    (widened,) = (e for e in program.equations if e.primitive.name == "convert_element_type")
    assert widened.outputs[0] == program.outputs[0]


def scanned(turn: Callable) -> Callable:
    def fun(weight: jax.Array, carry: jax.Array) -> jax.Array:
        return lax.scan(lambda carry, _: (turn(carry, weight), None), carry, length=3)[0]

    return fun


def added(weight: jax.Array, carry: jax.Array) -> jax.Array:
    return carry @ weight + jnp.tanh(carry)


def begun_with(first: jax.Array, turn: Callable) -> jax.Array:
    """A loop that carries an array, which what a turn makes for the next one is of one type with."""
    return lax.scan(lambda h, _: (turn(h), None), first, length=2)[0]


@pytest.mark.parametrize(
    ("turn", "multiplies"),
    [
        (lambda carry, weight: carry @ weight, True),
        (lambda carry, weight: carry @ weight.T, True),
        (lambda carry, weight: carry @ lax.optimization_barrier(weight), True),
        (lambda carry, weight: jax.checkpoint(lambda c, w: jnp.tanh(c @ w))(carry, weight), True),
        (lambda carry, weight: scanned(lambda c, w: c @ w)(weight, carry), True),
        (lambda carry, weight: added(*lax.optimization_barrier((weight, carry))), True),  # each comes out as it went in
        (lambda carry, weight: carry @ begun_with(weight, lambda h: jnp.tanh(carry @ h)), True),
        (lambda carry, weight: carry + begun_with(weight, lambda h: jnp.tanh(carry @ h)), False),
        (lambda carry, weight: carry @ begun_with(weight, lambda h: jnp.tanh(carry + h)), False),
        (lambda carry, weight: carry @ jnp.tanh(weight), False),
        (lambda carry, weight: jax.checkpoint(lambda c, w: jnp.tanh(c + w))(carry, weight), False),
        (lambda carry, weight: scanned(lambda c, w: c + w)(weight, carry), False),
    ],
)
def test_whether_products_alone_read_what_a_loop_is_given(turn: Callable, multiplies: bool) -> None:
    program = program_of(scanned(turn), array(8, 8), array(8, 8))
    (loop,) = (e for e in program.equations if e.primitive.name == "scan")
    weight, carry = program.inputs
    assert multiplies_only(loop, weight) == multiplies
    assert not multiplies_only(loop, carry)


@pytest.mark.parametrize(
    ("before", "after", "mixes"),
    [
        ((8, 192, 385), (8, 385, 192), True),  # rows of another length
        ((8, 6, 6, 32), (6, 6, 256), True),
        ((8, 192, 384), (8, 192, 4, 96), False),
        ((8, 192, 4, 96), (1536, 384), False),
        ((4, 1, 6), (1, 4, 6, 1), False),
        ((6, 4), (2, 3, 2, 2), False),
        ((0, 3), (3, 0), False),
    ],
)
def test_reshapes_that_do_more_than_to_join_and_divide_dimensions(
    before: tuple[int, ...], after: tuple[int, ...], mixes: bool
) -> None:
    program = program_of(lambda x: jnp.reshape(x, after), array(*before))
    assert mixes_dimensions(program.equations[0], program) == mixes
    graph = compiled(program_of(lambda x: jnp.reshape(x + 1, after) * 2, array(*before)), RATES, platform="tpu")
    assert ("reshape" in [op.name for op in graph.ops]) == mixes


def test_mapped_pools_have_images_with_several_dimensions_of_examples() -> None:
    def mapped(images: jax.Array) -> jax.Array:
        return jax.vmap(lambda image: pooled(lax.max, -jnp.inf, jnp.tanh(image)))(images)

    def of_films(films: jax.Array, weight: jax.Array) -> jax.Array:
        window = (1, 1, 2, 2, 1)
        made = lax.conv_general_dilated(films, weight, (1, 1, 1), "SAME", dimension_numbers=("NDHWC", "DHWIO", "NDHWC"))
        return lax.reduce_window(made, -jnp.inf, lax.max, window, window, "VALID")

    program = program_of(mapped, array(8, 25, 16, 16, 32))
    made = {value for equation in program.equations for value in equation.outputs}
    assert with_split_batch(program) == {*program.inputs, *made}
    films = program_of(of_films, array(8, 25, 16, 16, 3), array(1, 3, 3, 3, 32))
    made = {value for equation in films.equations for value in equation.outputs}
    assert with_split_batch(films) == made - {
        e.outputs[0] for e in films.equations if e.primitive.name != "reduce_window_max"
    }
