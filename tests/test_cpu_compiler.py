"""What XLA's CPU compiler makes of a program: our model against the compiler itself, each rule on its own."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from foreseen import foreseen_and_compiled
from jax import lax

from remat_opt import optimize
from remat_opt.compilers.model import allocated_by, compiled
from remat_opt.graph.cost import Rates
from remat_opt.graph.graph import Graph
from remat_opt.program.inline import inline
from remat_opt.targets import measure_flat

RATES = Rates(bandwidth=1e10, flops={"float32": 1e11})


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def graph_of(fun: Callable, *avals: jax.ShapeDtypeStruct) -> Graph:
    return compiled(inline(jax.make_jaxpr(fun)(*avals), with_barriers=True, keep_names=False), RATES, platform="cpu")


def pooled(x: jax.Array, padding: str) -> jax.Array:
    return lax.reduce_window(x, 0.0, lax.add, (3, 3), (1, 1), padding)


def names(graph: Graph) -> list[str]:
    return [op.name for op in graph.ops]


@pytest.mark.parametrize(
    ("fun", "kernels"),
    [
        (lambda x: jnp.tanh(x - x.max(1, keepdims=True)).sum(1), ["reduce_sum"]),  # all in one
        (lambda x: jnp.where(x > 0, x, 0.1).sum(1), ["select_n", "reduce_sum"]),  # the library has no choice
        (lambda x: (jnp.exp(x).sum(1), jnp.exp(x[:8])), ["reduce_sum", "exp"]),
        (lambda x: (lambda y: (y.sum(1), y))(jnp.tanh(x)), ["tanh", "reduce_sum"]),  # a kernel has one result
        (lambda x: 0.25 * pooled(jnp.tanh(x), "VALID"), ["mul"]),  # windows, but none with padding
        (lambda x: 0.25 * pooled(jnp.tanh(x), "SAME"), ["tanh", "reduce_window_sum", "mul"]),
        (lambda x: (x - x.max(1, keepdims=True)) @ jnp.ones((128, 64)), ["dot_general"]),  # products, too
    ],
)
def test_the_library_reduces_with_the_arithmetic_around(fun: Callable, kernels: list[str]) -> None:
    assert names(graph_of(fun, array(512, 128))) == kernels


def test_the_library_leaves_small_arrays_to_loops() -> None:
    """Below 4,096 elements what is made of a sum is a kernel of its own."""
    fun = lambda x: jnp.tanh(x.sum(0))  # noqa: E731
    assert names(graph_of(fun, array(64, 32))) == ["reduce_sum", "tanh"]
    assert names(graph_of(fun, array(2, 4096))) == ["tanh"]


@pytest.mark.parametrize(
    ("advance", "arrays"),
    [
        (lambda x, y: (x - x.max(1, keepdims=True)) + y, 2),  # in the place of y, which is read for the same elements
        (lambda x, y: (x - x.max(1, keepdims=True)) + (y - y.max(1, keepdims=True)), 3),
    ],
    ids=["one by elements", "both reduced"],
)
def test_a_library_kernel_writes_over_what_it_reads_element_by_element(advance: Callable, arrays: int) -> None:
    def fun(x: jax.Array, y: jax.Array) -> jax.Array:
        z = advance(jnp.where(x > 0, x, 0.1), jnp.where(y > 0, y, 0.2))
        return jnp.sort(z.sum(1)) @ jnp.sort(z, 0)

    avals = array(2048, 512), array(2048, 512)
    found = allocated_by(graph_of(fun, *avals), "cpu")
    measured = measure_flat(lambda *arguments: [fun(*arguments)], avals, target="cpu").temp_bytes
    assert found == pytest.approx(measured, rel=0.02)
    assert found / (4 * 2048 * 512) == pytest.approx(arrays, abs=0.1)


def test_the_library_multiplies_what_is_copied_to_lie_as_it_reads_it() -> None:
    """Attention of four heads to a key: both operands are transposed first."""

    def fun(queries: jax.Array, keys: jax.Array) -> jax.Array:
        scores = jnp.einsum("bhdgq,bkhd->bhgqk", queries, keys)
        return scores - scores.max(-1, keepdims=True)

    avals = array(2, 2, 32, 4, 256), array(2, 256, 2, 32)
    graph = graph_of(fun, *avals)
    assert names(graph) == ["copy", "copy", "sub"]
    measured = measure_flat(lambda *arguments: [fun(*arguments)], avals, target="cpu").temp_bytes
    assert allocated_by(graph, "cpu") == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("mode", ["clip", "fill"])
def test_loops_do_not_write_over_what_is_gathered(mode: str) -> None:
    def fun(x: jax.Array, y: jax.Array, at: jax.Array) -> jax.Array:
        one, other = x.at[at].get(mode=mode), y.at[at].get(mode="clip")
        found = x.at[at].add(jnp.where(other > 0, other, 0.1))
        found = found.at[at].add(jnp.where(one > 0, other, 0.2))
        return found.at[at].add(jnp.where(one > found[0, 0], one, 0.1))

    avals = array(256, 64), array(256, 64), jax.ShapeDtypeStruct((4096,), jnp.int32)
    measured = measure_flat(lambda *arguments: [fun(*arguments)], avals, target="cpu").temp_bytes
    assert allocated_by(graph_of(fun, *avals), "cpu") == pytest.approx(measured, rel=0.05)


def test_what_is_spread_over_an_array_for_library_and_loop_is_an_array() -> None:
    def shared(x: jax.Array, y: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        return (x * scale).sum(1), y * scale

    graph = graph_of(shared, array(512, 128), array(512, 128), array(1, 128))
    assert [graph.sizes[op.outputs[0]] for op in graph.ops if op.name == "broadcast"] == [4 * 512 * 128]
    alone = graph_of(lambda x, scale: (x * scale).sum(1), array(512, 128), array(1, 128))
    assert names(alone) == ["reduce_sum"]


def test_a_number_is_spread_once_over_arrays_that_lie_alike() -> None:
    """What is transposed is computed before, in another shape, so that nothing else reads what is spread for it."""

    def alike(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        return (jnp.exp(x) * 2.0).sum(1), (jnp.exp(y) * 2.0).sum(1)

    def turned(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        return (jnp.exp(x) * 2.0).sum(1), (jnp.exp(y).T * 2.0).sum(1)

    for fun, other, kernels in (
        (alike, array(512, 128), ["broadcast", "reduce_sum", "reduce_sum"]),
        (turned, array(128, 512), ["reduce_sum", "transpose", "reduce_sum"]),
    ):
        graph = graph_of(fun, array(512, 128), other)
        assert names(graph) == kernels
        measured = measure_flat(fun, [array(512, 128), other], target="cpu").temp_bytes
        assert allocated_by(graph, "cpu") == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(
    ("fun", "kernels"),
    [
        (lambda x: jnp.concatenate([jnp.sin(x), x * 2]), ["concatenate"]),  # of what is computed as it is joined
        (lambda x: jnp.concatenate([jnp.sin(x), x * 2], 1), ["sin", "mul", "concatenate"]),  # row by row: copied
        (lambda x: jnp.concatenate([x * 2, *[x] * 7]) * 2, ["mul"]),
        (lambda x: jnp.concatenate([x * 2, *[x] * 8]) * 2, ["mul", "concatenate", "mul"]),  # too many
        (lambda x: (lambda y: (y * 2 + 1, y * 3 + 1))(jnp.pad(jnp.sin(x), ((0, 1), (0, 0)))), ["pad", "add", "add"]),
    ],
)
def test_pieces_are_put_together_for_one_reader(fun: Callable, kernels: list[str]) -> None:
    assert names(graph_of(fun, array(512, 128))) == kernels


def test_a_mask_counts_as_an_operand_as_large_as_what_it_chooses_from() -> None:
    """So that what is chosen is not chosen again by a loop, beside the product that reads it stored."""
    chosen = lambda x, mask: jnp.where(mask, x, 0)  # noqa: E731
    fun = lambda x, mask: (chosen(x, mask) @ jnp.ones((128, 64)), jnp.sin(chosen(x, mask)))  # noqa: E731
    graph = graph_of(fun, array(512, 128), jax.ShapeDtypeStruct((512, 128), bool))
    (last,) = (op for op in graph.ops if op.name == "sin")
    assert [graph.ops[graph.producer[value]].name for value in last.inputs] == ["select_n"]


def normalised_chain(params: list[dict[str, jax.Array]], x: jax.Array) -> Any:
    """Layers with normalisation, with an update of each."""

    def loss(params: list[dict[str, jax.Array]]) -> jax.Array:
        hidden = x
        for layer in params:
            centred = hidden - hidden.mean(1, keepdims=True)
            normal = centred * (jax.lax.rsqrt((centred**2).mean(1, keepdims=True) + 1e-6) * layer["scale"])
            hidden = hidden + jnp.tanh(normal @ layer["weight"])
        return (hidden**2).mean()

    gradients = jax.grad(loss)(params)
    return jax.tree.map(lambda value, gradient: value - 0.1 * gradient, params, gradients)


def large_layers(weights: list[jax.Array], x: jax.Array) -> Any:
    """Weights that are larger than activations."""

    def loss(weights: list[jax.Array]) -> jax.Array:
        hidden = x
        for weight in weights:
            hidden = jnp.tanh(hidden @ weight)
        return (hidden**2).mean()

    gradients = jax.grad(loss)(weights)
    return [weight - 0.1 * gradient for weight, gradient in zip(weights, gradients, strict=True)]


def attention(weight: jax.Array, x: jax.Array) -> Any:
    """Products over more than matrices."""

    def loss(weight: jax.Array) -> jax.Array:
        queries = jnp.einsum("bsd,dhe->bshe", x, weight)
        scores = jax.nn.softmax(jnp.einsum("bqhe,bkhe->bhqk", queries, queries))
        return (jnp.einsum("bhqk,bkhe->bqhe", scores, queries) ** 2).mean()

    return weight - 0.1 * jax.grad(loss)(weight)


def words(table: jax.Array, read: jax.Array) -> Any:
    """A table that is gathered from, and multiplied by: its gradient is scattered into a product."""

    def loss(table: jax.Array) -> jax.Array:
        logits = table[read] @ table.T
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), read[..., None], -1).mean()

    return table - 0.1 * jax.grad(loss)(table)


def rolled(weight: jax.Array, x: jax.Array) -> Any:
    """Pieces that are joined, and in the backward pass padded."""

    def loss(weight: jax.Array) -> jax.Array:
        hidden = x @ weight
        for _ in range(4):
            hidden = jnp.roll(hidden, 1, 0) * hidden + x
        return (hidden**2).mean()

    return weight - 0.1 * jax.grad(loss)(weight)


def tables(tables: list[jax.Array], read: jax.Array) -> Any:
    """What is read from many tables is stacked, and its gradient taken apart."""

    def loss(tables: list[jax.Array]) -> jax.Array:
        words = jnp.stack([table[ids].sum(1) for table, ids in zip(tables, read, strict=True)], 1)
        return (jnp.einsum("bfe,bge->bfg", words, words) ** 2).mean()

    gradients = jax.grad(loss)(tables)
    return [table - 0.1 * gradient for table, gradient in zip(tables, gradients, strict=True)]


def layers(count: int, width: int) -> list[dict[str, jax.ShapeDtypeStruct]]:
    return [{"scale": array(1, width), "weight": array(width, width)} for _ in range(count)]


@pytest.mark.parametrize(
    ("step", "args"),
    [
        (normalised_chain, (layers(6, 128), array(2048, 128))),
        (large_layers, ([array(1024, 1024)] * 5, array(256, 1024))),
        (attention, (array(64, 4, 16), array(4, 128, 64))),
        (words, (array(2000, 64), jax.ShapeDtypeStruct((8, 64), jnp.int32))),
        (rolled, (array(64, 64), array(1024, 64))),
        (tables, ([array(100, 64)] * 12, jax.ShapeDtypeStruct((12, 1024, 3), jnp.int32))),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("donated", [(), (0,)], ids=["kept", "donated"])
def test_the_plain_step_needs_what_is_foreseen(step: Callable, args: tuple, donated: tuple[int, ...]) -> None:
    foreseen = optimize(step, target="cpu", donate_argnums=donated).prepare(*args).as_given
    leaves, tree = jax.tree.flatten(args)
    count = len(jax.tree.leaves(args[0]))
    flat = lambda *leaves: jax.tree.leaves(step(*jax.tree.unflatten(tree, leaves)))  # noqa: E731
    figures = measure_flat(flat, leaves, donated=tuple(range(count)) if donated else (), target="cpu")
    assert foreseen == pytest.approx(figures.temp_bytes, rel=0.03)


@pytest.mark.parametrize(
    ("equation", "left", "right"),
    [
        ("bco,bpc->bpco", (64, 10, 16), (64, 576, 10)),
        ("i,j->ij", (4096,), (4096,)),
        ("bik,bkj->bij", (64, 300, 1), (64, 1, 400)),
    ],
)
def test_a_product_that_sums_nothing_is_a_multiplication(equation: str, left: tuple, right: tuple) -> None:
    def function(left: jax.Array, right: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.einsum(equation, left, right)) + jnp.einsum(equation, jnp.sin(left), right)

    avals = [array(*shape) for shape in (left, right)]
    foreseen, found = foreseen_and_compiled(function, *avals, target="cpu")
    assert foreseen == pytest.approx(found, abs=2**16)
    assert found < jax.eval_shape(function, *avals).size  # far less than an array of the result's shape


def test_the_library_multiplies_without_a_sum_in_its_reductions() -> None:
    def function(left: jax.Array, right: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.einsum("bi,bj->bij", left, right)).sum(0)

    assert foreseen_and_compiled(function, array(64, 512), array(64, 256), target="cpu") == (0, 0)


def test_gradients_for_each_example_are_computed_as_a_matrix_too() -> None:
    """Weighted by their norms (Abadi et al. 2016): what norms read is an array of three dimensions."""

    def clipped(left: jax.Array, right: jax.Array) -> jax.Array:
        gradients = jnp.einsum("bi,bj->bij", left, right)
        norms = jnp.sqrt((gradients**2).sum((1, 2)))
        return jnp.einsum("b,bij->ij", jnp.minimum(1, 1 / norms), gradients)

    foreseen, found = foreseen_and_compiled(clipped, array(64, 512), array(64, 256), target="cpu")
    assert found >= 2 * 64 * 512 * 256 * 4
    assert foreseen == pytest.approx(found, rel=0.01)
