"""What a TPU stores of elementwise work on what loops have stacked; figures are those of libtpu 0.0.51."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
import pytest
from foreseen import foreseen
from jax import lax

from remat_opt.compilers import tpu_reader
from remat_opt.compilers.tpu_meetings import with_meetings
from remat_opt.compilers.tpu_reader import TpuReader

TURNS, BATCH, SIZE, FEATURES = 10, 16, 40, 16
NUMBERS = ("NHWC", "HWIO", "NHWC")


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def convolved(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=NUMBERS)


def stacked(params: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
    """Images that a loop makes, one in each turn."""
    inner, last = params

    def step(hidden: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        hidden = jnp.tanh(convolved(hidden, inner))
        return hidden, convolved(hidden, last)

    return lax.scan(step, x, None, length=TURNS)[1]


PARAMS = (floats(3, 3, FEATURES, FEATURES), floats(1, 1, FEATURES, FEATURES))
IMAGES, STACK = floats(BATCH, SIZE, SIZE, FEATURES), floats(TURNS, BATCH, SIZE, SIZE, FEATURES)


def squares(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return (logits - targets) ** 2


@pytest.mark.parametrize(("loss", "compiled_mb"), [(optax.sigmoid_binary_cross_entropy, 983.6), (squares, 380.4)])
def test_what_is_read_across_layouts_is_stored(loss: Callable, compiled_mb: float) -> None:
    """A cross-entropy's parts are stored, each of 131 MB; a difference reads both arrays as they lie."""

    def total(params: tuple, x: jax.Array, targets: jax.Array) -> jax.Array:
        return loss(stacked(params, x), targets).sum()

    found = foreseen(jax.grad(total), PARAMS, IMAGES, STACK, gaps_twice=False)
    assert found == pytest.approx(compiled_mb * 1e6, rel=0.06)


def test_zeros_that_are_added_and_signs_that_are_changed_twice_change_nothing() -> None:
    """A cross-entropy alone, of targets that have the batch first: four arrays of 131 MB, not six."""

    def total(params: tuple, x: jax.Array, targets: jax.Array) -> jax.Array:
        turned = targets.transpose(1, 0, 2, 3, 4)
        return optax.sigmoid_binary_cross_entropy(stacked(params, x), turned).sum((0, 2, 3, 4)).mean()

    targets = floats(BATCH, TURNS, SIZE, SIZE, FEATURES)
    assert foreseen(total, PARAMS, IMAGES, targets, gaps_twice=False) == pytest.approx(524.3e6, rel=0.01)


def test_what_reads_zeros_beside_an_array_lies_as_the_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stack began as the same zeros."""
    found: set[str] = set()

    def noted(reader: TpuReader, stacks: frozenset[int]) -> frozenset[int]:
        alike = with_meetings(reader, stacks)
        found.update(e.primitive.name for e in reader.program.equations if not alike.isdisjoint(e.outputs))
        return frozenset(alike)

    def hinge(params: tuple, x: jax.Array, targets: jax.Array) -> jax.Array:
        return jnp.maximum(1.0 - stacked(params, x) * targets, 0.0).sum()

    monkeypatch.setattr(tpu_reader, "with_meetings", noted)
    foreseen(hinge, PARAMS, IMAGES, STACK)
    assert "max" in found
    assert "sub" not in found


def test_what_is_made_of_stacked_images_lies_as_these() -> None:
    """Two results, each 131 MB as the stack, not 52 as they would pad least; and neither is in the stack's place."""

    def total(params: tuple, x: jax.Array) -> jax.Array:
        images = stacked(params, x)
        one, other = lax.optimization_barrier((jnp.sin(images), jnp.cos(images)))
        return jnp.sum(one * other + 2.0)

    assert foreseen(total, PARAMS, IMAGES, gaps_twice=False) == pytest.approx(393.3e6, rel=0.01)


def test_nothing_is_written_over_what_comes_out_of_a_loop() -> None:
    def total(weight: jax.Array, x: jax.Array) -> jax.Array:
        rows = lax.scan(lambda hidden, _: (jnp.tanh(hidden @ weight),) * 2, x, None, length=TURNS)[1]
        return jnp.sum(jnp.exp(lax.optimization_barrier(jnp.sin(rows))) * 2)

    found = foreseen(total, floats(128, 128), floats(32768, 128), gaps_twice=False)
    assert found == pytest.approx(335.6e6, rel=0.01)
