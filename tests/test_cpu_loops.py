"""What the loops of XLA's CPU compiler compute, and what they begin with: our model against the compiler itself."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from remat_opt.compilers.model import allocated_by, compiled
from remat_opt.graph.cost import Rates
from remat_opt.graph.graph import Graph
from remat_opt.program.inline import inline
from remat_opt.targets import measure_flat

RATES = Rates(bandwidth=1e10, flops={"float32": 1e11})
ROWS, COLUMNS = 1024, 512
ARRAY = 4 * ROWS * COLUMNS  # bytes


def array(*shape: int, dtype: jnp.dtype = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def graph_of(fun: Callable, *avals: jax.ShapeDtypeStruct) -> Graph:
    return compiled(inline(jax.make_jaxpr(fun)(*avals), with_barriers=True, keep_names=False), RATES, platform="cpu")


def arrays_in(graph: Graph) -> float:
    """Temporary memory as foreseen, in arrays of 1024 × 512 numbers."""
    return allocated_by(graph, "cpu") / ARRAY


def arrays_compiled(fun: Callable, *avals: jax.ShapeDtypeStruct) -> float:
    """The same as compiled."""
    return measure_flat(lambda *args: jax.tree.leaves(fun(*args)), avals, target="cpu").temp_bytes / ARRAY


WHOLE, COLUMN, NUMBER = array(ROWS, COLUMNS), array(ROWS, 1), array()
PLACES = array(ROWS, dtype=jnp.int32)


@pytest.mark.parametrize(
    ("divisor", "stored"),
    [
        (lambda x, column, number: column, []),  # inverted first, and multiplied by
        (lambda x, column, number: number, []),
        (lambda x, column, number: jnp.broadcast_to(column, x.shape), []),
        (lambda x, column, number: jnp.exp(x), ["exp"]),  # which is dear, and is made as the inverse
        (lambda x, column, number: x * x + 1, ["div"]),
    ],
    ids=["column", "number", "spread", "exponential", "whole"],
)
def test_to_divide_by_what_is_spread_is_to_multiply(divisor: Callable, stored: list[str]) -> None:
    """What is cheap is computed by both that read it."""

    def fun(x: jax.Array, y: jax.Array, column: jax.Array, number: jax.Array) -> tuple:
        z = x / divisor(y, column, number)
        return lax.top_k(z + y, 2), lax.top_k(z * y, 2)

    graph = graph_of(fun, WHOLE, WHOLE, COLUMN, NUMBER)
    arrays = [op.name for op in graph.ops if graph.sizes[op.outputs[0]] == ARRAY]
    assert [name for name in arrays if name not in ("add", "mul")] == stored
    measured = arrays_compiled(fun, WHOLE, WHOLE, COLUMN, NUMBER)
    assert arrays_in(graph) == pytest.approx(measured, abs=0.1)


def test_what_is_gathered_is_computed_in_loops_and_its_operand_in_the_gather() -> None:
    """The shifted logits of a text's words, and of each the one that comes next."""

    def fun(logits: jax.Array, bias: jax.Array, words: jax.Array) -> tuple:
        shifted = logits + bias
        picked = jnp.take_along_axis(shifted, words[:, None], 1, mode="clip")
        return jnp.tanh(picked), lax.top_k(jnp.tanh(shifted), 2)

    graph = graph_of(fun, WHOLE, array(COLUMNS), PLACES)
    assert [op.name for op in graph.ops if "gather" in op.name] == []
    assert arrays_in(graph) == pytest.approx(arrays_compiled(fun, WHOLE, array(COLUMNS), PLACES), abs=0.1)


def test_what_is_padded_is_stored_for_a_product_that_reads_it_transposed_and_in_another_shape() -> None:
    """Transposed and given another shape are two steps of one loop, and no loop of two has pieces that others read."""

    def gradient(given: jax.Array, read: jax.Array) -> tuple:
        padded = jnp.pad(jnp.tanh(given), ((0, 0), (0, 1), (0, 0)))
        return jnp.einsum("bsv,bsf->vf", padded, read), padded.sum((0, 1)) @ jnp.ones((COLUMNS, 4))

    avals = array(8, ROWS // 8 - 1, COLUMNS), array(8, ROWS // 8, 64)
    graph = graph_of(gradient, *avals)
    padded = next(op for op in graph.ops if op.name == "pad")
    copy = next(op for op in graph.ops if op.name == "copy" and graph.sizes[op.outputs[0]] == ARRAY)
    assert copy.inputs == padded.outputs
    assert arrays_in(graph) == pytest.approx(arrays_compiled(gradient, *avals), abs=0.1)


def test_loops_do_not_compute_again_what_is_changed_where_it_lies() -> None:
    def fun(x: jax.Array, at: jax.Array) -> tuple:
        scaled = x * 0.5
        changed = scaled.at[jnp.arange(ROWS), at].add(1.0, mode="clip")
        return lax.top_k(changed[:-8], 2), changed.sum()

    graph = graph_of(fun, WHOLE, PLACES)
    scaled = next(op for op in graph.ops if op.name == "mul")
    scatter = next(op for op in graph.ops if op.name == "scatter-add")
    readers = [op for op in graph.ops if {*scatter.outputs} & {*op.inputs}]
    assert readers
    assert all({*scaled.outputs} <= {*op.inputs} for op in readers)
    assert arrays_in(graph) == pytest.approx(arrays_compiled(fun, WHOLE, PLACES), abs=0.1)


@pytest.mark.parametrize(
    "changed",
    [
        lambda x, number: jnp.zeros_like(x),
        lambda x, number: jnp.broadcast_to(number, x.shape),
        lambda x, number: jnp.broadcast_to(lax.optimization_barrier(number), x.shape),
        lambda x, number: x * 2,
    ],
    ids=["zeros", "a number", "a number behind a barrier", "an array"],
)
def test_what_is_scattered_into_an_array_is_scattered_into_its_sum_with_another(changed: Callable) -> None:
    def fun(x: jax.Array, at: jax.Array, number: jax.Array) -> jax.Array:
        scattered = changed(x, number).at[jnp.arange(ROWS), at].add(1.0, mode="clip")
        return lax.top_k(jnp.tanh(x) + scattered, 2)

    graph = graph_of(fun, WHOLE, PLACES, NUMBER)
    scatter = next(op for op in graph.ops if op.name == "scatter-add")
    arrays = [op for op in graph.ops if sum(graph.sizes[value] for value in op.outputs) == ARRAY]
    assert len(arrays) == 1  # the sum, which it changes
    assert {*arrays[0].outputs} <= {*scatter.inputs}
    assert arrays_in(graph) == pytest.approx(arrays_compiled(fun, WHOLE, PLACES, NUMBER), abs=0.1)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_stacks_of_one_shape_begin_as_one_array_of_zeros(layers: int) -> None:
    """All but the last loop change copies of it: it is there as long as there are such."""
    width = 64

    def fun(x: jax.Array, weight: jax.Array) -> jax.Array:
        def step(state: jax.Array, given: jax.Array) -> tuple:
            state = jnp.tanh(state @ weight + given)
            return state, state

        for _ in range(layers):
            _, x = lax.scan(step, jnp.zeros((32, width)), x)
        return x.sum()

    avals = array(ROWS * COLUMNS // (32 * width), 32, width), array(width, width)
    measured = arrays_compiled(fun, *avals)
    assert arrays_in(graph_of(fun, *avals)) == pytest.approx(measured, abs=0.1)
    assert measured == pytest.approx(min(layers, 2) + (layers > 2), abs=0.1)
