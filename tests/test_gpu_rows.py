"""Arithmetic on rows that XLA's GPU compiler does in one kernel with their reductions, against the compiler itself."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from remat_opt import optimize
from remat_opt.compilers.gpu_orders import Orders
from remat_opt.compilers.gpu_rows import Rows
from remat_opt.program.inline import Equation, inline
from remat_opt.targets import measure_flat

ROWS, HIDDEN, WORDS = 4096, 512, 8192
LONG = 20_000  # more than fit into a multiprocessor's registers


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def gathered(logits: jax.Array, words: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), words[:, None], -1).mean()


def one_hot(logits: jax.Array, words: jax.Array) -> jax.Array:
    wanted = jax.nn.one_hot(words, logits.shape[-1], dtype=logits.dtype)
    return -(jax.nn.log_softmax(logits) * wanted).sum(-1).mean()


def chosen(logits: jax.Array, words: jax.Array) -> jax.Array:
    return -jnp.log(jnp.take_along_axis(jax.nn.softmax(logits), words[:, None], -1)).mean()


def squared(logits: jax.Array, words: jax.Array) -> jax.Array:
    return (jax.nn.softmax(logits) ** 2).mean()


def step(loss: Callable) -> Callable[..., list[jax.Array]]:
    """The gradients of a last layer."""

    def gradients(weight: jax.Array, hidden: jax.Array, words: jax.Array) -> list[jax.Array]:
        def of(weight: jax.Array, hidden: jax.Array) -> jax.Array:
            return loss((hidden @ weight).astype(jnp.float32), words)

        value, (first, second) = jax.value_and_grad(of, (0, 1))(weight, hidden)
        return [value, first, second]

    return gradients


def arguments(dtype: Any = jnp.float32, length: int = WORDS) -> list[jax.ShapeDtypeStruct]:
    return [array(HIDDEN, length, dtype=dtype), array(ROWS, HIDDEN, dtype=dtype), array(ROWS, dtype=jnp.int32)]


@pytest.mark.parametrize(
    ("loss", "dtype", "length"),
    [
        (gathered, jnp.float32, WORDS),
        (gathered, jnp.bfloat16, LONG),
        (one_hot, jnp.float32, WORDS),
        (one_hot, jnp.bfloat16, WORDS),
        (chosen, jnp.float32, WORDS),
        (chosen, jnp.bfloat16, WORDS),
        (chosen, jnp.bfloat16, LONG),
        (squared, jnp.float32, WORDS),
    ],
)
def test_a_loss_of_rows_needs_what_is_foreseen(loss: Callable, dtype: Any, length: int) -> None:
    args = arguments(dtype, length)
    foreseen = optimize(step(loss), target="h200").prepare(*args).as_given
    assert foreseen == pytest.approx(measure_flat(step(loss), args, target="h200").temp_bytes, rel=0.02)


def test_what_reads_rows_is_not_written_over_them() -> None:
    both = 2 * 4 * ROWS * WORDS
    assert optimize(step(squared), target="h200").prepare(*arguments()).as_given == pytest.approx(both, rel=0.01)


def rows_of(fun: Callable, *shape: int) -> dict[str, int | None]:
    """By primitive what arithmetic on rows is computed from, for those equations that are."""
    program = inline(jax.make_jaxpr(fun)(array(*shape)), with_barriers=True, keep_names=False)
    producer: dict[int, Equation] = {value: one for one in program.equations for value in one.outputs}
    readers: dict[int, list[Equation]] = {}
    for equation in program.equations:
        for value in {x for x in equation.inputs if isinstance(x, int)}:
            readers.setdefault(value, []).append(equation)
    rows = Rows(Orders(program, producer, readers, frozenset(value for value, _ in program.constants)))
    found = {one.primitive.name: rows.source(one) for one in program.equations}
    return {name: source for name, source in found.items() if source is not None}


def test_a_softmax_is_two_kernels_of_rows_one_behind_the_other() -> None:
    assert rows_of(jax.nn.softmax, 64, 512).keys() == {"sub", "div"}


def test_a_distance_from_the_mean_is_computed_from_the_rows() -> None:
    assert rows_of(lambda x: jnp.exp(x - x.mean(-1, keepdims=True)), 64, 512) == {"sub": 0}


@pytest.mark.parametrize(
    ("fun", "shape"),
    [
        (lambda x: x - x.mean(0), (64, 512)),  # of columns
        (lambda x: x - x.mean(-1, keepdims=True), (4, 20_000)),  # too long for the registers
        (lambda x: x - x.mean(-1), (64, 64)),  # spread over columns
        (lambda x: x.T - x.mean(-1, keepdims=True), (64, 64)),  # of another array
        (lambda x: x.mean(-1, keepdims=True) - x, (64, 512)),  # the compiler looks at the second operand alone
    ],
    ids=["columns", "long", "spread over columns", "transposed", "the other way round"],
)
def test_other_arithmetic_is_not(fun: Callable, shape: tuple[int, ...]) -> None:
    assert rows_of(fun, *shape) == {}


def test_a_reduction_that_something_else_reads_is_a_kernel_of_its_own() -> None:
    def shared(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        largest = x.max(-1, keepdims=True)
        return x - largest, jnp.exp(largest)

    assert rows_of(shared, 64, 512) == {}
