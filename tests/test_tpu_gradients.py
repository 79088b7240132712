"""Features in two dimensions on a TPU, which lie as the gradient of their weights has them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from foreseen import foreseen_and_compiled

from remat_opt.compilers.tpu_gradients import lying_for_gradients
from remat_opt.program.inline import inline

BATCH, OUTPUTS = 4096, 128


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def features_of(x: jax.Array, count: int) -> jax.Array:
    """Some features of each figure, each made of two of one more, as splines are."""
    found = jnp.maximum(x[..., None], jnp.arange(count + 3.0))
    for _ in range(3):
        found = found[..., 1:] * found[..., :-1] + found[..., 1:]
    return found


def gradient(count: int, order: str = "iko", *, of_features: bool = False) -> Callable:
    """The gradient of a layer's weights in some order, and maybe of what their features are made of."""

    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sin(jnp.einsum(f"bik,{order}->bo", features_of(x, count), weights)).sum()

    return jax.grad(loss, (0, 1) if of_features else 0)


def weights_of(figures: int, count: int, order: str = "iko") -> jax.ShapeDtypeStruct:
    sizes = {"i": figures, "k": count, "o": OUTPUTS}
    return array(*(sizes[letter] for letter in order))


@pytest.mark.parametrize(("figures", "count", "order"), [(784, 8, "iko"), (784, 8, "oik"), (896, 8, "iko")])
def test_features_lie_as_the_gradient_of_their_weights(figures: int, count: int, order: str) -> None:
    avals = weights_of(figures, count, order), array(BATCH, figures)
    predicted, found = foreseen_and_compiled(gradient(count, order), *avals)
    assert predicted == pytest.approx(found, rel=0.1)


def test_features_that_fill_no_sublanes_are_outside_of_the_tiles() -> None:
    assert _lying(gradient(16), 784, 16) == {(0, 2)}
    assert not _lying(gradient(10), 784, 10)
    assert not _lying(gradient(16), 768, 16)  # the other ones fill the lanes


@pytest.mark.parametrize(("batch", "features", "tile"), [(8, 8, (0, 2)), (64, 64, (0, 2)), (48, 64, (2, 0))])
def test_batch_or_last_features_are_in_the_lanes(batch: int, features: int, tile: tuple[int, int]) -> None:
    """As found in the compiler's layouts."""
    assert _lying(gradient(features), 95, features, batch) == {tile}


def test_sequences_of_features_lie_as_they_pad_least() -> None:
    """What a dense layer sums over comes last there, and is in the sublanes."""

    def dense(weights: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.exp(jnp.sin(x)) @ weights

    jaxpr = jax.make_jaxpr(dense)(array(48, OUTPUTS), array(95, 64, 48))
    assert not lying_for_gradients(inline(jaxpr, with_barriers=True, keep_names=False))


def test_cotangents_of_the_features_decide_how_these_lie() -> None:
    assert not _lying(gradient(8, of_features=True), 784, 8)


def test_a_later_product_decides_how_features_lie() -> None:
    def both(weights: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        features = features_of(x, 8)
        made = jnp.einsum("bik,bo->iko", features, x[:, :OUTPUTS])
        return made, jnp.einsum("bik,iko->bo", features, weights)

    assert not _lying(both, 784, 8)


@pytest.mark.parametrize(
    ("read", "arrays"),
    [(lambda x: x, 1), (lambda x: x[:, 1:] * x[:, :-1], 2)],
    ids=["at its places", "cut"],
)
def test_what_is_read_at_other_places_is_no_place_for_a_result(read: Callable, arrays: int) -> None:
    """A hundred columns, and 99 of them, lie in 104 sublanes."""
    rows = 400128

    def made(x: jax.Array) -> jax.Array:
        held = jax.lax.optimization_barrier(jnp.sin(x))
        last = jax.lax.optimization_barrier(jnp.exp(read(held) * 2.0))
        return last.max() + (last @ jnp.ones((last.shape[1], 128))).max()

    predicted, found = foreseen_and_compiled(made, array(rows, 100))
    assert predicted == pytest.approx(found, rel=0.05)
    assert found == pytest.approx(arrays * rows * 104 * 4, rel=0.05)


def test_what_is_turned_is_a_place_for_a_result() -> None:
    """Where layouts are free it lies as it did."""

    def made(x: jax.Array) -> jax.Array:
        held = jax.lax.optimization_barrier(jnp.sin(x))
        last = jax.lax.optimization_barrier(jnp.exp(held.T * 2.0))
        return last.max() + (last @ jnp.ones((last.shape[1], 128))).max()

    predicted, found = foreseen_and_compiled(made, array(8192, 8192))
    assert predicted == pytest.approx(found, rel=0.01)
    assert found == pytest.approx(8192 * 8192 * 4, rel=0.01)


def _lying(function: Callable, figures: int, count: int, batch: int = BATCH) -> set[tuple[int, int]]:
    """In which tiles lies what is made for a gradient."""
    jaxpr = jax.make_jaxpr(function)(weights_of(figures, count), array(batch, figures))
    return set(lying_for_gradients(inline(jaxpr, with_barriers=True, keep_names=False)).values())
