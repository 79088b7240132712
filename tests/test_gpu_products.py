"""Products of matrices on a GPU: which are one, what they do to operands and results, and what stays beside them.
Each rule on a graph or a program that can be checked by hand; sizes in bytes."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from test_gpu_compiler import MB, RATES, array, graph_of, made
from test_gpu_siblings import normalised

from remat_opt.compilers.gpu_fusion import Work, fuse_by_cost
from remat_opt.compilers.gpu_products import merged_products
from remat_opt.compilers.gpu_work import work_of
from remat_opt.compilers.model import allocated_by
from remat_opt.graph.graph import Graph, Kind, Op
from remat_opt.program.inline import inline
from remat_opt.targets import measure_flat


@pytest.mark.parametrize(("of_views", "reads"), [(True, 0), (False, 1)])
def test_what_products_read_in_another_shape_is_computed_again_by_kernels(of_views: bool, reads: int) -> None:
    ops = (
        Op((), (0,)),
        Op((0,), (1,), kind=Kind.ELEMENTWISE),
        Op((1,), (2,), kind=Kind.CONTRACTION, of_views=of_views),
        Op((1,), (3,), kind=Kind.REDUCTION),
    )
    graph = Graph((MB, MB, MB, 4), ops, outputs=(2, 3))
    fused = fuse_by_cost(graph, {}, RATES.bandwidth).graph
    assert [op.inputs for op in fused.ops if 3 in op.outputs] == [(reads,)]
    assert any(1 in op.outputs for op in fused.ops)  # for the product


@pytest.mark.parametrize("is_view", [False, True])
def test_a_mask_of_what_all_read_in_another_shape_is_stored(is_view: bool) -> None:
    """Three kernels read a product anyway, and one would for its mask: but each reads the product anew for that."""
    product, mask, last = 0, 1, 6
    ops = (
        Op((), (product,)),
        Op((product,), (mask,), kind=Kind.ELEMENTWISE),
        *(Op((product, mask), (value,), kind=Kind.REDUCTION) for value in range(2, 5)),
        Op((mask,), (5,), kind=Kind.REDUCTION),
        Op((mask,), (last,), kind=Kind.REDUCTION),
    )
    graph = Graph((128 * MB, 32 * MB, 4, 4, 4, 4, 4), ops, outputs=tuple(range(2, 7)))
    work = {value: Work(0.0, 1e6, is_view=is_view and value == product) for value in range(last + 1)}
    fused = fuse_by_cost(graph, work, RATES.bandwidth).graph
    assert any(mask in op.outputs for op in fused.ops) is is_view


@pytest.mark.parametrize(
    ("subscripts", "is_view"),
    [("ij,jk->ik", False), ("bij,jk->bik", True), ("bij,bjk->bik", False), ("bhij,bhjk->bhik", True)],
)
def test_products_are_matrices_or_batches_of_them_to_the_compiler(subscripts: str, is_view: bool) -> None:
    operands, _ = subscripts.split("->")
    avals = [array(*(8 for _ in letters)) for letters in operands.split(",")]
    program = inline(jax.make_jaxpr(lambda *arrays: jnp.einsum(subscripts, *arrays))(*avals))
    (product,) = [equation for equation in program.equations if equation.primitive.name == "dot_general"]
    assert work_of(product, program).is_view is is_view


def test_where_the_largest_of_a_biased_product_is_stays_a_mask() -> None:
    """A bias is added where the product is written, which is a matrix then, too: as in a network for points."""

    step, vector = jax.grad(normalised, (1, 2, 3, 4)), array(512)
    avals = array(32, 2048, 128), array(128, 512), vector, vector, vector
    graph = graph_of(step, *avals)
    assert ("eq", 2 * 32 * 2048 * 512) in made(graph)  # and where the rectifier lets through
    assert allocated_by(graph, "cuda") == pytest.approx(measure_flat(step, avals, target="h200").temp_bytes, rel=0.02)


def test_products_that_share_an_operand_are_one() -> None:
    def fun(x, y, w):
        return jnp.sin(x @ w).sum(), jnp.cos(y @ w).sum()

    graph = graph_of(fun, array(4096, 512), array(2048, 512), array(512, 512))
    products = [one for one in made(graph) if one[0] == "dot_general"]
    assert products == [("dot_general", 6144 * 512 * 4)]
    large = graph_of(fun, array(2**16, 512), array(2**15, 512), array(512, 512))
    assert len([one for one in made(large) if one[0] == "dot_general"]) == 2


def test_products_that_depend_on_each_other_are_two() -> None:
    def chain(x, w):
        return (x @ w) @ w

    def apart(x, w):
        return x @ w + jnp.sin(x) @ w

    small = array(128, 128)
    assert merged_products(inline(jax.make_jaxpr(chain)(small, small))) == []
    (merged,) = merged_products(inline(jax.make_jaxpr(apart)(small, small)))
    assert (len(merged.equations), merged.side, merged.matrices.rows) == (2, 1, 256)


def test_three_products_are_one_unless_the_third_waits_for_the_first() -> None:
    def fun(x, y, w):
        first = x @ w
        second = y @ w
        return second, (first + y) @ w

    small = array(128, 128)
    program = inline(jax.make_jaxpr(fun)(small, small, small))
    assert [len(merged.equations) for merged in merged_products(program)] == [2]


def test_no_products_are_one_that_would_wait_for_themselves() -> None:
    def fun(x, z, w, v):
        first = z @ v
        return first @ w, (x @ w) @ v  # with both products by `w` in one, the second by `v` waits for the first

    program = inline(jax.make_jaxpr(fun)(*[array(128, 128)] * 4))
    assert [len(merged.equations) for merged in merged_products(program)] == [2]


def test_a_product_does_the_work_on_its_operand_and_on_its_result() -> None:
    def layers(x, w, bias):
        hidden = x @ w + bias
        return (jax.nn.relu(hidden) @ w).sum(), (hidden > 0).astype(jnp.float32).sum()

    big = array(2**14, 4096)
    sizes = [size for _, size in made(graph_of(layers, big, array(4096, 4096), array(4096)))]
    assert sum(size >= 2**14 * 4096 * 4 for size in sizes) == 2  # what is rectified, and the second product


def test_what_is_made_of_two_arrays_is_an_operand_in_memory() -> None:
    def fun(x, y, w):
        return (x * y) @ w, (jnp.exp(x) @ w)

    names = [name for name, _ in made(graph_of(fun, array(2**14, 4096), array(2**14, 4096), array(4096, 4096)))]
    assert sorted(names) == ["dot_general", "dot_general", "mul"]


@pytest.mark.parametrize(
    ("work", "is_stored"),
    [(jax.nn.relu, False), (jnp.square, True), (lambda x: x**3, True), (lambda x: x * x, True)],
)
def test_a_product_squares_nothing_that_it_reads(work: Callable, is_stored: bool) -> None:
    """An array times itself has two operands."""
    graph = graph_of(lambda x, w: work(x) @ w, array(2**14, 4096), array(4096, 4096))
    assert [op.kind is Kind.ELEMENTWISE for op in graph.ops] == [True] * is_stored + [False]


def test_shares_of_attention_that_a_divided_product_reads_as_they_are_stay() -> None:
    """The gradient of values that four heads share sums over heads and queries, in four parts: of one batch dimension
    it reads the shares in their own shape, which are kept for that; of two in another, so that they are made again."""
    length, width, heads, layers = 256, 64, 4, 3

    def step_over(batch: tuple[int, ...]) -> tuple[Callable, list[jax.ShapeDtypeStruct]]:
        axes = "bg"[: len(batch)]

        def attention(queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
            scores = jnp.einsum(f"{axes}qhc,{axes}kc->{axes}hqk", queries, keys)
            return jnp.einsum(f"{axes}hqk,{axes}kc->{axes}qhc", jax.nn.softmax(scores), values)

        def loss(x: jax.Array, *weights: jax.Array) -> jax.Array:
            for weight in weights:
                queries = (x @ weight).reshape(*batch, length, heads, width)
                x = x + attention(queries, x[..., :width], x[..., width : 2 * width]).reshape(x.shape)
            return jnp.square(x).sum()

        shapes = (*batch, length, heads * width), *[(heads * width,) * 2] * layers
        return jax.grad(loss, argnums=(1, 2, 3)), [array(*shape) for shape in shapes]

    found = []
    for batch in ((8,), (4, 2)):
        step, avals = step_over(batch)
        foreseen = allocated_by(graph_of(step, *avals), "cuda")
        found.append(measure_flat(step, avals, target="h200").temp_bytes)
        assert foreseen == pytest.approx(found[-1], rel=0.1)
    assert found[0] - found[1] > 8 * heads * length * length * 4


def test_parts_of_a_product_are_a_buffer_until_they_are_summed_up() -> None:
    graph = graph_of(lambda x, y: x.T @ y, array(2048, 128), array(2048, 128))
    assert made(graph) == [("dot_general", 32 * 128 * 128 * 4), ("sum of parts", 128 * 128 * 4)]
