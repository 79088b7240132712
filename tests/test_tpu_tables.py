"""A TPU's kernels with several results: their tables of addresses, who may write over them, and single numbers."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from remat_opt.compilers import tpu
from remat_opt.compilers.model import compiled, shared_places
from remat_opt.compilers.tpu_fusion import NUMBER
from remat_opt.compilers.tpu_loops import with_loops_joined
from remat_opt.compilers.tpu_tables import with_small_tables
from remat_opt.graph.cost import Rates
from remat_opt.graph.graph import Graph, Kind, Op
from remat_opt.program.inline import inline

RATES = Rates(bandwidth=1e12, flops={"float32": 1e14})
LARGE = 2 * tpu.ON_CHIP  # never on the chip


def placed(graph: Graph, *, numbers: frozenset[int] = frozenset(), accumulated: frozenset[int] = frozenset()) -> Graph:
    graph = with_small_tables(graph, accumulated, numbers, tpu.PAGE)
    elements = [1 if value in numbers else max(size // 4, 2) for value, size in enumerate(graph.sizes)]
    loops = dict.fromkeys(range(len(graph.sizes)), (LARGE // 4,))
    return tpu.on_chip(with_loops_joined(graph, loops, elements, accumulated), numbers, rates=RATES)


def tables(graph: Graph) -> float:
    """How many there are."""
    listed = next(op for op in graph.ops if op.name == "tables").outputs
    return graph.sizes[listed[0]] / tpu.PAGE


@pytest.mark.parametrize(("first", "pages"), [("slice", 1), ("reduce_sum", 0)])
def test_what_is_made_of_an_arrays_elements_is_an_array_to_kernels(first: str, pages: int) -> None:
    ops = (
        Op((0,), (1,), Kind.OPAQUE, name=first),
        Op((1,), (2,), Kind.OPAQUE, name=NUMBER),
        Op((2,), (3,), Kind.OPAQUE, name=NUMBER),
        Op((0, 3), (4,), Kind.OPAQUE),
    )
    graph = placed(Graph((LARGE, 512, 512, 512, 0), ops, (0,), (4,), fused=True), numbers=frozenset({1, 2, 3}))
    assert graph.sizes[2:4] == (0, pages * tpu.PAGE)


def with_sums(count: int) -> Graph:
    """A product, sums of its rows, what is made of it, and what is made of that."""
    sums = tuple(Op((1,), (4 + at,), Kind.REDUCTION, name="reduce_sum") for at in range(count))
    ops = (
        Op((0,), (1,), Kind.PRODUCT, name="dot_general"),
        *sums,
        Op((1, *range(4, 4 + count)), (2,), Kind.ELEMENTWISE),
        Op((2,), (3,), Kind.ELEMENTWISE),
        Op((3,), (4 + count,), Kind.REDUCTION),
    )
    return Graph((0, LARGE, LARGE, LARGE, *([64] * count), 0), ops, (0,), (4 + count,), fused=True)


@pytest.mark.parametrize("count", [0, 1])
def test_what_is_taken_out_of_a_tuple_is_not_written_over(count: int) -> None:
    shared = shared_places(placed(with_sums(count)), "tpu")
    assert shared.get(2) == (None if count else 1)
    assert shared[3] == 2  # which no sum is made beside


def test_a_reduction_of_several_arrays_is_done_beside_the_product_that_makes_one() -> None:
    ops = (
        Op((0,), (1,), Kind.PRODUCT, name="dot_general"),
        Op((0,), (2,), name="copy"),
        Op((1, 2), (3,), Kind.REDUCTION, name="reduce_sum"),
        Op((1, 2, 3), (4,)),
    )
    found = placed(Graph((0, LARGE, LARGE, 64, 0), ops, (0,), (4,), fused=True))
    assert [op.name for op in found.ops if op.in_tuple] == ["dot_general"]


def test_elementwise_work_beside_sums_is_no_array_of_its_own() -> None:
    ops = (
        Op((0,), (1,), Kind.PRODUCT),
        Op((1,), (2,), Kind.ELEMENTWISE),
        Op((2,), (3,), Kind.REDUCTION, name="reduce_sum"),
        Op((2, 3), (4,), Kind.ELEMENTWISE),
        Op((4,), (5,)),
    )
    found = placed(Graph((0, LARGE, LARGE, 64, LARGE, 0), ops, (0,), (5,), fused=True), accumulated=frozenset({3}))
    assert shared_places(found, "tpu") == {2: 1, 4: 2}


def test_of_two_products_a_reduction_is_done_beside_the_last() -> None:
    ops = (
        Op((0,), (2,), Kind.PRODUCT, name="dot_general"),
        Op((0,), (1,), Kind.PRODUCT, name="dot_general"),
        Op((1, 2), (3,), Kind.REDUCTION, name="reduce_sum"),
        Op((1, 2, 3), (4,)),
    )
    found = placed(Graph((0, LARGE, LARGE, 64, 0), ops, (0,), (4,), fused=True))
    assert [op.outputs for op in found.ops if op.in_tuple] == [(1, 3)]


def test_what_is_put_in_a_tuple_may_take_an_operands_place() -> None:
    ops = (Op((0,), (1,), Kind.PRODUCT), Op((1,), (2,), Kind.ELEMENTWISE, in_tuple=True), Op((2,), (3,)))
    assert shared_places(Graph((0, 8, 8, 8), ops, (0,), (3,), fused=True), "tpu") == {2: 1}


@pytest.mark.parametrize(("count", "expected"), [(0, 0), (1, 1), (2, 2)])
def test_two_sums_make_one_more_kernel_with_several_results(count: int, expected: int) -> None:
    assert tables(placed(with_sums(count))) == expected


def test_two_norms_of_an_array_are_the_scalar_units() -> None:
    assert tables(placed(with_sums(2), numbers=frozenset({4, 5}))) == 1


def test_tables_of_a_loop_are_there_for_all_of_the_step() -> None:
    body, count = tpu.without_tables(placed(with_sums(2)))
    assert (tables(body), count) == (0, 2 * tpu.PAGE)
    loops = (Op((0,), (1,), name="scan", tables=count), Op((1,), (2,), name="scan", tables=count))
    assert tables(placed(Graph((0, LARGE, 0), loops, (0,), (2,), fused=True))) == 4


@pytest.mark.parametrize(("is_body", "copies"), [(False, 1), (True, 0)])
def test_what_a_loop_is_given_stays_on_the_chip_from_turn_to_turn(is_body: bool, copies: int) -> None:
    soon = Op((), (), seconds=1e-4)
    ops = (soon, soon, Op((0,), (1,), Kind.OPAQUE), soon)
    graph = Graph((2**19, 0), ops, (0,), (1,), fused=True)
    assert tables(tpu.on_chip(graph, rates=RATES, is_body=is_body)) == copies


def names_of(fun: object, *avals: jax.ShapeDtypeStruct) -> list[str]:
    program = inline(jax.make_jaxpr(fun)(*avals), with_barriers=True, keep_names=False)
    return [op.name for op in compiled(program, RATES, platform="tpu").ops]


@pytest.mark.parametrize(("implementation", "is_stored"), [("threefry2x32", False), ("rbg", True)])
def test_random_bits_by_arithmetic_are_drawn_where_they_are_read(implementation: str, is_stored: bool) -> None:
    def dropped(x: jax.Array) -> jax.Array:
        return jnp.where(jax.random.bernoulli(jax.random.key(0, impl=implementation), 0.5, x.shape), x, 0.0)

    assert ("random_bits" in names_of(dropped, jax.ShapeDtypeStruct((4096, 4096), jnp.float32))) is is_stored


def test_concatenations_that_only_others_read_are_none() -> None:
    def dense(x: jax.Array) -> jax.Array:
        pieces = [lax.cumsum(x + number) for number in range(12)]
        for piece in pieces:
            x = jnp.concatenate([x, piece], axis=1)
        return lax.cumsum(x)

    assert names_of(dense, jax.ShapeDtypeStruct((256, 128), jnp.float32)).count("concatenate") == 1


def kernels_of_attention(*, is_reduced_before: bool) -> list[str]:
    """Scores that go through a barrier, and of which softmaxes are made behind it, or before it, too."""

    def attention(queries: jax.Array, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
        scores = jnp.einsum("bhqd,bhkd->bhqk", queries, keys)
        before = jnp.max(scores, axis=-1) if is_reduced_before else jnp.zeros(())
        return jax.nn.softmax(lax.optimization_barrier(scores)), before

    aval = jax.ShapeDtypeStruct((8, 8, 512, 128), jnp.float32)
    return names_of(attention, aval, aval)


def test_scores_that_go_into_a_barrier_alone_are_copied_behind_it() -> None:
    assert "copy" in kernels_of_attention(is_reduced_before=False)
    assert "copy" not in kernels_of_attention(is_reduced_before=True)


def test_a_loops_buffers_lie_in_the_steps_heap_one_by_one() -> None:
    def turn(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        summed = lax.cumsum(x)
        return lax.cumsum(jnp.sin(summed) @ summed), None

    aval = jax.ShapeDtypeStruct((8192, 8192), jnp.float32)
    program = inline(jax.make_jaxpr(lambda x: lax.scan(turn, x, None, 10)[0])(aval), with_barriers=True)
    (loop,) = (op for op in compiled(program, RATES, platform="tpu").ops if op.name == "scan")
    assert [size for size, *_ in loop.inside] == [2**28] * 2
    (_, begins, ends), (_, begins_later, _) = loop.inside
    assert begins < begins_later == ends  # the product, as it is made of the sums


@pytest.mark.parametrize("is_typed", [False, True])
def test_keys_are_cut_in_one_kernel_and_lie_in_two_pages_each(is_typed: bool) -> None:
    def noise(seed: jax.Array) -> list[jax.Array]:
        keys = jax.random.split(jax.random.wrap_key_data(seed) if is_typed else seed, 4)
        return [jax.random.normal(key, (256, 256)) for key in keys]

    aval = jax.ShapeDtypeStruct((2,), jnp.uint32)
    program = inline(jax.make_jaxpr(noise)(aval), with_barriers=True, keep_names=False)
    graph = compiled(program, RATES, platform="tpu")
    (cut,) = (op for op in graph.ops if len(op.outputs) > 1)
    assert [graph.sizes[key] for key in cut.outputs] == [2 * tpu.PAGE] * 4
