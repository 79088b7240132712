"""What compilers are expected to make of a program: each rule on a graph or a program that can be checked by hand."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from remat_opt.compilers.gpu import split_of
from remat_opt.compilers.model import compiled, shared_places, sharing_places, with_copies_of_donated
from remat_opt.graph.cost import Rates
from remat_opt.graph.fusion_loops import fuse_loops
from remat_opt.graph.graph import Graph, Kind, Op
from remat_opt.graph.liveness import peak_of
from remat_opt.graph.ordering import behind_operands, breadth_first, depth_first, greedy
from remat_opt.program.inline import inline

RATES = Rates(bandwidth=1e12, flops={"float32": 1e14})
SIDE = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
MIB4 = 4 * 2**20  # one array of that type


def graph_of(
    platform: str, fun: Callable, *avals: jax.ShapeDtypeStruct, with_barriers: bool = True, **options
) -> Graph:
    program = inline(jax.make_jaxpr(fun)(*avals), with_barriers=with_barriers, keep_names=False)
    return compiled(program, RATES, platform=platform, **options)


# 0 → 1 → 2 and 0 → 3; 4 reads 2 and 3.
FORK = (
    Op((0,), (1,)),
    Op((1,), (2,)),
    Op((2,), (3,)),
    Op((1,), (4,)),
    Op((3, 4), (5,)),
)


def test_breadth_first_runs_what_waits_longest() -> None:
    graph = Graph((0, 1, 1, 1, 1, 1), FORK, inputs=(0,), outputs=(5,), fused=True)
    assert breadth_first(graph) == (0, 1, 3, 2, 4)


def test_the_greedy_order_frees_most_and_makes_least() -> None:
    # Op 3 makes 9 bytes and frees nothing yet, so that the chain goes on first.
    graph = Graph((0, 5, 5, 5, 9, 1), FORK, inputs=(0,), outputs=(5,), fused=True)
    assert greedy(graph) == (0, 1, 2, 3, 4)
    smaller = Graph((0, 5, 5, 5, 1, 1), FORK, inputs=(0,), outputs=(5,), fused=True)
    assert greedy(smaller) == (0, 3, 1, 2, 4)


def test_who_reads_another_shape_is_not_looked_at_again() -> None:
    # Op 2 is ready with op 1 and frees value 1 once op 1 has run, which the scheduler sees where it reads value 1.
    def ops(of_views: bool) -> tuple[Op, ...]:
        return (
            Op((0,), (1,)),
            Op((1,), (2,)),
            Op((1,), (3,), of_views=of_views),
            Op((2,), (4,)),
            Op((3, 4), (5,)),
        )

    sizes = (0, 10, 10, 11, 12, 1)
    assert greedy(Graph(sizes, ops(False), inputs=(0,), outputs=(5,), fused=True)) == (0, 1, 2, 3, 4)
    late = greedy(Graph(sizes, ops(True), inputs=(0,), outputs=(5,), fused=True))
    assert late == (0, 1, 3, 2, 4)


def test_depth_first_visits_the_operand_with_more_users_first() -> None:
    graph = Graph((0, 1, 1, 1, 1, 1), FORK, inputs=(0,), outputs=(5,), fused=True)
    assert depth_first(graph) == (0, 1, 2, 3, 4)


def test_depth_first_caps_sizes_as_the_compiler_lists_a_program() -> None:
    """Sizes behind an op are counted once for each way to it, up to all that stands before it in the compiler's list:
    that begins with what the result reads first, not with what the program made first."""
    levels = 8

    def ways(first: int) -> tuple[Op, ...]:
        """Ops on top of each other, of which each reads two ops that read the one before."""
        ops, below = [], 0
        for at in range(first, first + 3 * levels, 3):
            ops += [Op((below,), (at,)), Op((below,), (at + 1,)), Op((at, at + 1), (at + 2,))]
            below = at + 2
        return tuple(ops)

    read_first, read_second, result = 3 * levels, 6 * levels, 6 * levels + 1
    ops = (*ways(1 + 3 * levels), *ways(1), Op((read_first, read_second), (result,)))
    graph = Graph((0, *(1,) * result), ops, inputs=(0,), outputs=(result,), fused=True)
    order = [graph.ops[op].outputs[0] for op in depth_first(graph)]
    assert order.index(read_second) < order.index(read_first)
    as_made = [graph.ops[op].outputs[0] for op in depth_first(graph, range(len(graph.ops)))]
    assert as_made.index(read_first) < as_made.index(read_second)


def test_depth_first_begins_with_the_barrier_that_results_come_from() -> None:
    """What nothing reads behind a barrier is returned from it, and what is returned beside it comes with it."""
    small, large, barrier = Op((0,), (1,)), Op((0,), (2,)), Op((1, 2), (3,), kind=Kind.BARRIER)
    graph = Graph((0, 1, 3, 0, 2), (small, large, barrier, Op((0,), (4,))), inputs=(0,), outputs=(1, 4, 2), fused=True)
    assert depth_first(graph) == (1, 0, 2, 3)
    without = Graph((0, 1, 3, 0, 2), (small, large, Op((0,), (4,))), inputs=(0,), outputs=(1, 4, 2), fused=True)
    assert depth_first(without) == (1, 2, 0)


def kernels_of_an_elementwise_value(dear: bool, operands: int, reader: Kind) -> tuple[bool, tuple[int, ...]]:
    """Whether the value is stored, and what the loop that reads it reads, beside a second reader of some kind."""
    made = tuple(Op((0,), (1 + i,)) for i in range(operands))
    value = operands + 1
    read = Op(tuple(range(1, value)), (value,), kind=Kind.ELEMENTWISE, dear=dear)
    loop = Op((value,), (value + 1,), kind=Kind.REDUCTION)
    other = Op((value,), (value + 2,), kind=reader)
    graph = Graph((1,) * (value + 3), (*made, read, loop, other), inputs=(0,), outputs=(value + 1, value + 2))
    fused = fuse_loops(graph).graph
    return any(value in op.outputs for op in fused.ops), next(op.inputs for op in fused.ops if value + 1 in op.outputs)


@pytest.mark.parametrize(
    ("dear", "operands", "reader", "stored", "reads"),
    [
        (False, 1, Kind.REDUCTION, False, (1,)),  # computed in both kernels
        (False, 2, Kind.REDUCTION, False, (1, 2)),
        (True, 1, Kind.REDUCTION, True, (2,)),  # in one kernel only
        (False, 1, Kind.OPAQUE, True, (1,)),  # stored for the library, computed again in the loop
        (False, 2, Kind.OPAQUE, True, (3,)),  # would have to read two buffers
        (True, 1, Kind.OPAQUE, True, (2,)),
        (False, 1, Kind.BARRIER, True, (1,)),  # stored for who reads it behind the barrier
    ],
)
def test_what_the_loops_of_a_cpu_store(
    dear: bool, operands: int, reader: Kind, stored: bool, reads: tuple[int, ...]
) -> None:
    assert kernels_of_an_elementwise_value(dear, operands, reader) == (stored, reads)


def test_what_is_read_behind_a_barrier_is_not_computed_again() -> None:
    ops = (
        Op((0,), (1,), kind=Kind.CONTRACTION),
        Op((1,), (2,), kind=Kind.ELEMENTWISE),
        Op((2,), (3,), kind=Kind.BARRIER),
        Op((2, 3), (4,), kind=Kind.REDUCTION),
        Op((2,), (5,), kind=Kind.REDUCTION),
    )
    fused = fuse_loops(Graph((1,) * 6, ops, inputs=(0,), outputs=(4, 5))).graph
    assert [op.inputs for op in fused.ops[-2:]] == [(2, 3), (1,)]


def test_what_is_read_again_by_way_of_a_buffer_is_a_buffer() -> None:
    """Else the loop would read both operands beside what was made of them."""
    for buffer in (Kind.CONTRACTION, Kind.ELEMENTWISE):
        ops = (
            Op((0, 1), (2,), kind=Kind.ELEMENTWISE),
            Op((2,), (3,), kind=Kind.ELEMENTWISE),
            Op((3,), (4,), kind=buffer),
            Op((2, 4), (5,), kind=Kind.ELEMENTWISE),
        )
        fused = fuse_loops(Graph((1,) * 6, ops, inputs=(0, 1), outputs=(5,))).graph
        assert fused.ops[-1].inputs == ((2, 4) if buffer is Kind.CONTRACTION else (0, 1))


@pytest.mark.parametrize(("levels", "stored"), [(3, False), (4, True)])
def test_a_loop_computes_a_value_fifteen_times_at_most(levels: int, stored: bool) -> None:
    """Each level reads the one before it at two places."""
    ops: list[Op] = [Op((0,), (1,), kind=Kind.ELEMENTWISE)]
    value = 1
    for _ in range(levels):
        ops += [Op((value,), (value + at,), kind=Kind.ELEMENTWISE, name="slice") for at in (1, 2)]
        ops.append(Op((value + 1, value + 2), (value + 3,), kind=Kind.ELEMENTWISE))
        value += 3
    fused = fuse_loops(Graph((1,) * (value + 1), tuple(ops), inputs=(0,), outputs=(value,))).graph
    assert (len(fused.ops) > 1) == stored


def test_a_loop_does_not_write_over_what_it_reads_at_other_places() -> None:
    for name, shared in (("neg", {3: 1}), ("rev", {})):
        ops = (
            Op((0,), (1,)),
            Op((1,), (2,), kind=Kind.ELEMENTWISE, name=name),
            Op((2,), (3,), kind=Kind.ELEMENTWISE),
            Op((3,), (4,)),
        )
        fused = fuse_loops(Graph((1,) * 5, ops, inputs=(0,), outputs=(4,))).graph
        assert shared_places(fused, "cpu") == shared


def test_a_reader_that_an_update_does_not_depend_on_gets_a_copy_of_the_donated_argument() -> None:
    ops = (Op((0,), (1,)), Op((0, 1), (2,)), Op((0,), (3,)))  # op 1 writes over value 0, which op 2 reads, too
    graph = Graph((8, 1, 8, 1), ops, inputs=(0,), outputs=(2, 3), aliases=((0, 2),), fused=True)
    copied = with_copies_of_donated(graph)
    assert copied.sizes == (8, 1, 8, 1, 8)
    read_and_made = [(op.inputs, op.outputs) for op in copied.ops]
    assert read_and_made == [
        ((0,), (4,)),
        ((4,), (1,)),
        ((4, 1), (2,)),
        ((4,), (3,)),
    ]  # so that value 0's place is free
    assert with_copies_of_donated(graph, are_ordered=True).ops == ops
    assert with_copies_of_donated(Graph((8, 1, 8), ops[:2], (0,), (2,), ((0, 2),), fused=True)).ops == ops[:2]


def test_where_readers_run_before_updates_only_those_that_need_the_update_get_a_copy() -> None:
    ops = (Op((0,), (1,)), Op((0, 1), (2,)), Op((0, 2), (3,)), Op((0,), (4,)))
    graph = Graph((8, 1, 8, 1, 1), ops, inputs=(0,), outputs=(2, 3, 4), aliases=((0, 2),), fused=True)
    copied = with_copies_of_donated(graph, are_ordered=True)
    assert [(op.inputs, op.outputs) for op in copied.ops] == [
        ((0,), (1,)),
        ((0,), (5,)),
        ((0, 1), (2,)),
        ((5, 2), (3,)),
        ((0,), (4,)),
    ]


@pytest.mark.parametrize(
    ("kind", "size", "peak"), [(Kind.ELEMENTWISE, 8, 8), (Kind.ELEMENTWISE, 7, 15), (Kind.OPAQUE, 8, 16)]
)
def test_an_elementwise_kernel_writes_over_an_operand_that_dies(kind: Kind, size: int, peak: int) -> None:
    ops = (Op((), (0,)), Op((0,), (1,), kind=kind), Op((1,), (2,)))
    graph = Graph((8, size, 0), ops, outputs=(2,), fused=True)
    assert peak_of(sharing_places(graph)) == peak


@pytest.mark.parametrize(
    ("ops", "peaks"),
    [
        (
            (Op((), (0,), name="conv_general_dilated"), Op((0,), (1,), kind=Kind.ELEMENTWISE), Op((1,), (2,))),
            {"cuda": 16, "cpu": 8, "tpu": 8},
        ),
        (
            (Op((), (0,)), Op((0,), (1,), kind=Kind.ELEMENTWISE, changed_later=True), Op((1,), (2,))),
            {"cuda": 16, "cpu": 16, "tpu": 16},
        ),
        (
            (
                Op((), (0,)),
                Op((0,), (3,), kind=Kind.BARRIER),
                Op((0, 3), (1,), kind=Kind.ELEMENTWISE),
                Op((1,), (2,)),
            ),
            {"cuda": 16, "cpu": 16, "tpu": 8},
        ),
    ],
    ids=["of a convolution", "changed later", "from behind a barrier"],
)
def test_a_kernel_writes_over_what_it_reads_directly_unless_its_result_is_changed(
    ops: tuple[Op, ...], peaks: dict[str, int]
) -> None:
    graph = Graph((8, 8, 0, 0), ops, outputs=(2,), fused=True)
    assert {platform: peak_of(sharing_places(graph, platform)) for platform in peaks} == peaks


def test_a_product_with_few_tiles_is_split_over_the_multiprocessors() -> None:
    def space(rows: int, columns: int, summed: int) -> int:
        params = {"dimension_numbers": (((1,), (0,)), ((), ()))}
        shapes = [(rows, summed), (summed, columns)]
        operands = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        return split_of(params, operands, jax.ShapeDtypeStruct((rows, columns), jnp.float32)).written

    assert space(128, 128, 2048) == 32 * 128 * 128 * 4  # as XLA's dump of such a product shows
    assert space(4096, 4096, 4096) == 0


@pytest.mark.parametrize(("platform", "loops"), [("cpu", 1), ("cuda", 0)])
def test_the_cpu_calls_a_library_to_reduce_and_to_sum_products(platform: str, loops: int) -> None:
    def fun(x):
        activated = jnp.tanh(lax.dot(x, x))
        return activated.sum(1), (activated * x).sum(0)

    ops = graph_of(platform, fun, SIDE).ops
    assert sum(op.kind is Kind.ELEMENTWISE for op in ops) == loops  # the tanh, but not the product


def test_the_cpu_multiplies_half_precision_in_single() -> None:
    half = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    sizes = [
        graph.sizes[value]
        for graph in [graph_of("cpu", lambda x: lax.dot(x, x) + 1, half)]
        for value in range(len(graph.sizes))
    ]
    assert sizes.count(MIB4) == 2  # the operand and the exact result
    assert sizes.count(MIB4 // 2) >= 2


def test_the_cpu_draws_random_bits_from_four_arrays_of_counts() -> None:
    def fun(key):
        return jnp.sort(jax.random.bits(key, (2**16,), jnp.uint8)), key

    program = inline(jax.make_jaxpr(fun)(jax.random.key(0)), with_barriers=True, keep_names=False)
    assert peak_of(compiled(program, RATES, platform="cpu")) == 16 * 2**16


def test_a_checkpoint_of_the_users_is_a_barrier() -> None:
    def loss(weights, x):
        for weight in weights:
            x = jax.checkpoint(lambda x, weight: jnp.sin(jnp.tanh(x @ weight) @ weight))(x, weight)
        return x.sum()

    def step(x, *weights):
        return jax.grad(loss)(weights, x)

    big = jax.ShapeDtypeStruct((2**16, 256), jnp.float32)
    weights = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 6
    merged = peak_of(graph_of("cuda", step, big, *weights, with_barriers=False))
    assert peak_of(graph_of("cuda", step, big, *weights)) < 0.7 * merged


def test_a_loop_updates_its_carry_in_place() -> None:
    def fun(x, extra):
        start = lax.dot(x, x)
        return lax.dot(lax.scan(lambda carry, _: (carry + extra, None), start, length=3)[0], x).sum()

    graph = graph_of("cuda", fun, SIDE, SIDE)
    loop = next(op for op in graph.ops if op.name == "scan")
    assert [graph.sizes[value] for value in loop.outputs] == [0]


def test_without_ops_nothing_lives() -> None:
    assert peak_of(Graph((4,), (), inputs=(0,), outputs=(0,))) == 0


def test_ops_stand_behind_what_they_read_or_are_said_to_wait_for_each_other() -> None:
    ops = Op((1,), (2,), name="last"), Op((0,), (1,), name="middle"), Op((), (0,), name="first")
    assert behind_operands(ops) == [2, 1, 0]
    assert behind_operands(ops, left_out=[2]) == [1, 0]
    ring = *ops[:2], Op((2,), (0,), name="first")
    with pytest.raises(ValueError, match=r"ops wait for each other: \w+ for \w+"):
        behind_operands(ring)
