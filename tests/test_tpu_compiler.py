"""What is expected of a TPU's compiler: tiles, whole buffers on the chip, tables of addresses, concatenations."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from foreseen import foreseen_and_compiled
from jax import lax

from remat_opt.compilers import tpu
from remat_opt.compilers.model import compiled
from remat_opt.compilers.tpu_indexing import SCATTERED, seconds_by_index
from remat_opt.compilers.tpu_precision import stored_in_two_bytes
from remat_opt.graph.cost import Rates
from remat_opt.graph.graph import Graph, Kind, Op
from remat_opt.graph.liveness import peak_of
from remat_opt.program.inline import Program, inline

RATES = Rates(bandwidth=1e12, flops={"float32": 1e14})
MIB = 2**20


def program_of(fun: Callable, *avals: jax.ShapeDtypeStruct) -> Program:
    return inline(jax.make_jaxpr(fun)(*avals), with_barriers=True, keep_names=False)


def of_bandwidth(bandwidth: float) -> Rates:
    return Rates(bandwidth=bandwidth, flops={"float32": 1e30})


def graph_of(fun: Callable, *avals: jax.ShapeDtypeStruct) -> Graph:
    return compiled(program_of(fun, *avals), RATES, platform="tpu")


def joined(pieces: int, *, behind_a_barrier: bool = False) -> tuple[Op, ...]:
    """The concatenations of a block that adds one piece after the other."""

    def block(x: jax.Array) -> jax.Array:
        whole = lax.cumsum(x)
        for _ in range(pieces - 1):
            whole = jnp.concatenate([whole, lax.cumsum(whole)[:, :128]], 1)
            if behind_a_barrier:
                whole = lax.optimization_barrier(whole)
        return lax.cumsum(whole)

    graph = graph_of(block, jax.ShapeDtypeStruct((8, 128), jnp.float32))
    return tuple(op for op in graph.ops if op.name == "concatenate")


def test_a_concatenation_is_one_of_all_pieces() -> None:
    assert [len(op.inputs) for op in joined(6)] == [2, 3, 4, 5, 6]
    assert {len(op.inputs) for op in joined(6, behind_a_barrier=True)} == {2, 3}  # with the barrier's token


def test_one_of_many_pieces_is_a_kernel_of_its_own() -> None:
    assert [op.kind for op in joined(6)] == [Kind.ELEMENTWISE] * 3 + [Kind.OPAQUE] * 2


@pytest.mark.parametrize(("features", "stored"), [(4, 1), (8, 0)])
def test_what_is_dear_to_fuse_is_dear_in_tiles(features: int, stored: int) -> None:
    # Two arrays of 4 features take tiles of 8 each, and so does what they are put together to.
    def block(x: jax.Array, weights: list[jax.Array]) -> list[jax.Array]:
        whole = jnp.concatenate([lax.cumsum(x), lax.cumsum(x, reverse=True)], 1)
        return [whole @ weight for weight in weights]

    weights = [jax.ShapeDtypeStruct((2 * features, 256), jnp.float32)] * 4
    graph = graph_of(block, jax.ShapeDtypeStruct((1000, features), jnp.float32), weights)
    assert sum(op.name == "concatenate" for op in graph.ops) == stored


def running(*ops: Op) -> tuple[Op, ...]:
    """Ops of half a microsecond each."""
    return tuple(dataclasses.replace(op, seconds=5e-7) for op in ops)


def test_gaps_on_the_chip_are_put_together() -> None:
    # When value 2 comes, which is read least, 20 bytes are free, 10 below value 1 and 10 above it. All is put together.
    makes = (Op((), (0,)), Op((0,), (1,)), *[Op((0,), ())] * 3, Op((), (2,)))
    reads = (Op((1,), ()), Op((1,), ()), Op((2,), (3,)))
    graph = Graph((10, 10, 20, 0), running(*makes, *reads), outputs=(3,), fused=True)
    assert peak_of(tpu.on_chip(graph, rates=of_bandwidth(2e7), capacity=29)) == tpu.PAGE
    assert peak_of(tpu.on_chip(graph, rates=of_bandwidth(2e7), capacity=30)) == 0


@pytest.mark.parametrize(
    ("between", "tables"),
    [(1, 0), (3, tpu.TABLES_OF_SLICES)],  # it stays on the chip; it is made outside and fetched
)
def test_a_large_buffer_is_fetched_in_slices_and_stays_for_the_next_reader(between: int, tables: int) -> None:
    ops = running(Op((), (0,)), Op((), (1,)), *[Op((1,), ())] * 3, Op((), ()), Op((0,), ()), Op((0,), (2,)))
    graph = Graph((2 * MIB, between * MIB, 0), ops, outputs=(2,), fused=True)
    waiting = 2 * MIB if tables else 0
    assert peak_of(tpu.on_chip(graph, rates=of_bandwidth(1e13), capacity=4 * MIB)) == waiting + tables * tpu.PAGE


def test_a_large_argument_is_fetched_in_slices_for_each_reader_that_it_cannot_stay_for() -> None:
    ops = running(Op((), ()), Op((0,), ()), Op((), (1,)), Op((1,), ()), Op((), ()), Op((0,), (2,)))
    graph = Graph((2 * MIB, 3 * MIB, 0), ops, inputs=(0,), outputs=(2,), fused=True)
    assert (
        peak_of(tpu.on_chip(graph, rates=of_bandwidth(1e13), capacity=4 * MIB)) == 2 * tpu.TABLES_OF_SLICES * tpu.PAGE
    )
    assert peak_of(tpu.on_chip(graph, rates=of_bandwidth(1e13), capacity=MIB)) == 3 * MIB  # it is read where it lies


@pytest.mark.parametrize(("bandwidth", "fetched"), [(5e12, 1), (3e12, 0)])
def test_a_copy_takes_its_time_and_room_for_it(bandwidth: float, fetched: int) -> None:
    # Of 2 MiB in half a microsecond, while nothing else is there, or in more, while something is.
    ops = running(Op((), (1,)), Op((1,), ()), Op((), ()), Op((0,), (2,)))
    graph = Graph((2 * MIB, 3 * MIB, 0), ops, inputs=(0,), outputs=(2,), fused=True)
    tables = fetched * tpu.TABLES_OF_SLICES
    assert peak_of(tpu.on_chip(graph, rates=of_bandwidth(bandwidth), capacity=4 * MIB)) == tables * tpu.PAGE


@pytest.mark.parametrize(("seconds", "waiting"), [(8.8e-6, 0), (9e-6, 1)])
@pytest.mark.parametrize("is_read_before", [False, True])
def test_what_nobody_reads_for_long_is_sent_away(seconds: float, waiting: int, is_read_before: bool) -> None:
    # All of a chip of 1 MB can be copied eight times in 8.9 µs.
    reads = [Op((0,), (), seconds=1.0)] * is_read_before
    waits = [Op((), (), seconds=seconds / 2)] * 2
    ops = (Op((), (0,), seconds=1.0), *reads, *waits, Op((0,), (1,), seconds=1.0))
    graph = Graph((10, 0), ops, outputs=(1,), fused=True)
    tables = waiting * (1 + is_read_before)  # it is fetched, and if it was on the chip before that it is copied out
    assert peak_of(tpu.on_chip(graph, rates=of_bandwidth(1e12), capacity=10**6)) == (waiting + tables) * tpu.PAGE


def test_a_buffer_waits_from_when_it_is_made() -> None:
    ops = (Op((), (0,)), Op((0,), ()), Op((), (), seconds=1.0), Op((), (1,)), Op((1,), (2,)))
    graph = Graph((10, 10, 0), ops, outputs=(2,), fused=True)
    assert peak_of(tpu.on_chip(graph, rates=of_bandwidth(1e12), capacity=10**6)) == 0


def test_what_kernels_gain_most_from_is_on_the_chip() -> None:
    ops = running(Op((), (0,)), Op((), (1,)), Op((1,), (2,)), Op((1, 2), (3,)), Op((0, 3), (4,)))
    graph = Graph((10, 10, 10, 10, 0), ops, outputs=(4,), fused=True)
    assert peak_of(graph) == 40
    assert peak_of(tpu.on_chip(graph, rates=of_bandwidth(2e7), capacity=30)) == tpu.PAGE
    assert peak_of(tpu.on_chip(graph, rates=of_bandwidth(2e7), capacity=40)) == 0


@pytest.mark.parametrize(("flops", "outside"), [(0.0, 1), (1.0, 0)])
def test_kernels_that_are_bound_by_arithmetic_gain_nothing(flops: float, outside: int) -> None:
    # Of two buffers the larger gains more, unless the product that makes and the one that reads it compute for longer.
    ops = running(
        Op((), (0,), kind=Kind.PRODUCT, flops=flops), Op((), (1,)), Op((1,), ()), Op((0,), (2,), Kind.PRODUCT, flops)
    )
    graph = Graph((20, 10, 0), ops, outputs=(2,), fused=True)
    rates = Rates(bandwidth=2e7, flops={"float32": 1e3})
    kept = tpu.on_chip(graph, rates=rates, capacity=20)
    assert [kept.sizes[outside], kept.sizes[1 - outside]] == [tpu.PAGE, 0]


def test_a_fetched_argument_takes_room_on_the_chip() -> None:
    ops = running(Op((), ()), Op((0,), ()), Op((), (1,)), Op((0, 1), ()), Op((0,), (2,)))
    for size, outside in ((20, tpu.PAGE), (10, 0)):  # of the argument, on a chip of 25 bytes
        graph = Graph((size, 10, 0), ops, inputs=(0,), outputs=(2,), fused=True)
        assert tpu.on_chip(graph, rates=of_bandwidth(2e8), capacity=25).sizes[1] == outside


def test_each_argument_that_goes_to_the_chip_has_a_table() -> None:
    ops = running(Op((), ()), Op((0,), (3,)), Op((2,), (4,)))
    graph = Graph((10,) * 5, ops, inputs=(0, 1, 2), outputs=(3, 4), fused=True)
    assert peak_of(tpu.on_chip(graph, rates=of_bandwidth(1e12))) == 2 * tpu.PAGE


def test_what_has_no_time_to_come_is_read_where_it_lies() -> None:
    ops = running(Op((0,), ()), Op((1,), (2,)))
    for size, tables in ((MIB // 2, 1), (MIB - 1, 0)):  # of half a microsecond
        graph = Graph((10, size, 0), ops, inputs=(0, 1), outputs=(2,), fused=True)
        assert peak_of(tpu.on_chip(graph, rates=of_bandwidth(1.2e12), capacity=4 * MIB)) == tables * tpu.PAGE


def test_what_takes_a_donated_arguments_place_has_a_table_too() -> None:
    ops = running(Op((), ()), Op((0,), (2,)), Op((1,), (3,)))
    graph = Graph((10,) * 4, ops, inputs=(0, 1), outputs=(2, 3), aliases=((0, 2),), fused=True)
    assert peak_of(tpu.on_chip(graph, rates=of_bandwidth(1e12))) == 3 * tpu.PAGE


def test_a_tpu_stores_what_only_products_read_as_bfloat16() -> None:
    def fun(x, y):
        pooled = lax.cumsum(x)
        return lax.dot(pooled, y), lax.dot(y, pooled)

    def read_otherwise(x, y):
        pooled = lax.cumsum(x)
        return lax.dot(pooled, y), pooled.sum()

    big = jax.ShapeDtypeStruct((8192, 8192), jnp.float32)  # does not fit the chip
    narrow, wide = (graph_of(one, big, big) for one in (fun, read_otherwise))
    assert peak_of(wide) - peak_of(narrow) == pytest.approx(8192 * 8192 * 2, rel=0.01)


@pytest.mark.parametrize(
    ("arithmetic", "bytes_each"),
    [
        (lambda x: [jnp.maximum(x, 0.0)], 2),  # what is stored is its result, which the product reads
        (lambda x: [x * (x - 1.0)], 2),
        (lambda x: [x * (x - 1.0), x + 1.0], 4),
        (lambda x: [lax.optimization_barrier(x) * 2.0], 4),
    ],
)
def test_a_product_computes_what_is_all_that_is_made_of_its_result(arithmetic: Callable, bytes_each: int) -> None:
    def layers(x: jax.Array, *weights: jax.Array) -> jax.Array:
        read = arithmetic(x @ weights[0])
        return sum(one @ weight for one, weight in zip(read, weights, strict=False))

    graph = graph_of(layers, *[jax.ShapeDtypeStruct((8192, 8192), jnp.float32)] * 3)  # do not fit the chip
    first, *_, last = (op for op in graph.ops if op.name == "dot_general")
    assert graph.sizes[first.outputs[0]] == bytes_each * 8192**2
    assert graph.sizes[last.outputs[0]] == 4 * 8192**2  # it is returned


def test_a_product_does_not_wait_for_another_to_compute_with_its_result() -> None:
    def summed(x: jax.Array, y: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.tanh(x @ weight) + jnp.exp(y @ weight)

    graph = graph_of(summed, *[jax.ShapeDtypeStruct((2048, 2048), jnp.float32)] * 3)
    assert [op.name for op in graph.ops if op.outputs and op.name != "tables"] == ["dot_general"] * 2
    first, last = (op for op in graph.ops if op.name == "dot_general")
    assert first.outputs[0] in last.inputs


def test_a_weights_gradient_is_not_stored_where_only_updates_read_it() -> None:
    def step(weight: jax.Array, momentum: jax.Array, x: jax.Array, ct: jax.Array) -> tuple[jax.Array, jax.Array]:
        momentum = 0.9 * momentum + x.T @ ct
        return weight - 0.1 * momentum, momentum

    square = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    graph = compiled(program_of(step, *[square] * 4), RATES, (True, True), platform="tpu")
    (product,) = (op for op in graph.ops if op.name == "dot_general")
    assert set(product.outputs) == set(graph.outputs)


def stored(fun: Callable, *shapes: tuple[int, ...]) -> list[str]:
    """The primitives by which what is stored in two bytes is made."""
    program = program_of(fun, *[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes])
    narrow = stored_in_two_bytes(program)
    return [e.primitive.name for e in program.equations if not narrow.isdisjoint(e.outputs)]


def summed_and_multiplied(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x @ w, x.sum(0)


@pytest.mark.parametrize(
    ("read", "narrow"),
    [
        (lambda x, w: x @ w, ["sin"]),
        (lambda x, w: jnp.matmul(x, w, precision="highest"), []),
        (lambda x, w: lax.optimization_barrier(x) @ w, ["sin", "optimization_barrier"]),
        (lambda x, w: (x @ w, x.sum(0)), ["sin"]),  # summed where it is made
        (lambda x, w: summed_and_multiplied(lax.optimization_barrier(x), w), []),
        (lambda x, w: summed_and_multiplied((x @ w).T, w), ["sin", "dot_general", "transpose"]),
        (lambda x, w: summed_and_multiplied((x @ w).reshape(8, 8, 64), w), ["sin", "reshape"]),
        (lambda x, w: summed_and_multiplied(2.0 * (x @ w), w), ["sin", "dot_general", "mul"]),
        (lambda x, w: summed_and_multiplied(x * (x @ w), w), ["mul"]),  # of two arrays
        (lambda x, w: jnp.maximum(x, 0.0) @ w, ["sin", "max"]),
        (lambda x, w: (jnp.maximum(x, 0.0) @ w, x > 0.0), ["max"]),
        (lambda x, w: (x + 1.0) @ w, ["add"]),
        (lambda x, w: (x @ w, x), []),
        (lambda x, w: (x @ w, lax.optimization_barrier(x)), []),
    ],
)
def test_what_products_alone_read_is_rounded_where_it_is_made(read: Callable, narrow: list[str]) -> None:
    assert stored(lambda x, w: read(jnp.sin(x), w), (64, 64), (64, 64)) == narrow


def test_what_is_cut_shorter_is_not_written_over_what_it_is_cut_from() -> None:
    # 511 rows take as many tiles as 512.
    def fun(x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
        rows = (x @ y)[:511]
        return rows.max(0), rows.min(0), lax.cumsum(rows)[0]

    graph = graph_of(
        fun, *[jax.ShapeDtypeStruct((512, 65536), jnp.float32), jax.ShapeDtypeStruct((65536, 65536), jnp.float32)]
    )
    whole = 512 * 65536 * 4
    assert peak_of(graph) >= 2 * whole


def test_what_a_barrier_reads_padded_others_pad_themselves() -> None:
    def fun(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        padded = jnp.pad(jnp.sin(x), ((0, 1), (0, 0)))
        return padded.T @ weight, lax.optimization_barrier(padded) + 1.0

    graph = graph_of(
        fun, jax.ShapeDtypeStruct((1023, 512), jnp.float32), jax.ShapeDtypeStruct((1024, 512), jnp.float32)
    )
    (product,) = (op for op in graph.ops if op.name == "dot_general")
    (pad,) = (op for op in graph.ops if op.name == "pad")
    assert not set(pad.outputs) & set(product.inputs)
    assert set(pad.inputs) & set(product.inputs)


def waiting_for(read: Callable) -> Callable:
    """A function in which 4 MiB of hidden numbers wait for what is read or written by index."""

    def fun(x, weights, values, indices, table):
        hidden = jnp.tanh(x @ weights)
        found = jnp.sum(read(table, indices, values + hidden.sum()) ** 2)
        return jnp.tanh(hidden * found).sum(0)

    return fun


def scattered(table: jax.Array, indices: jax.Array, values: jax.Array) -> jax.Array:
    return table.at[indices].add(values)


def gathered(table: jax.Array, indices: jax.Array, values: jax.Array) -> jax.Array:
    return (table + values[0, 0])[indices]


def scattered_into_zeros(table: jax.Array, indices: jax.Array, values: jax.Array) -> jax.Array:
    return jnp.zeros_like(table).at[indices].add(values)


@pytest.mark.parametrize(
    ("read", "rows", "waits_outside"),
    [
        (scattered, 512, False),
        (scattered, 1024, True),  # of two indices, which lie in 128 lanes
        (scattered_into_zeros, 1024, False),
        (gathered, 1024, False),
        (gathered, 4096, True),
    ],
)
def test_what_is_read_or_written_by_index_takes_long(read: Callable, rows: int, waits_outside: bool) -> None:
    shapes = (1024, 1024), (1024, 1024), (rows, 2), (rows, 2), (16384,)
    avals = [jax.ShapeDtypeStruct(shape, jnp.int32 if at == 3 else jnp.float32) for at, shape in enumerate(shapes)]
    for temporary in foreseen_and_compiled(waiting_for(read), *avals):
        assert (temporary > 4 * MIB) == waits_outside


def test_rows_have_one_turn_each() -> None:
    table, rows = jax.ShapeDtypeStruct((2000, 32), jnp.float32), jax.ShapeDtypeStruct((64, 3, 32), jnp.float32)
    indices = jax.ShapeDtypeStruct((64, 3), jnp.int32)
    program = program_of(scattered, table, indices, rows)
    seconds = [seconds_by_index(equation, program) for equation in program.equations]
    assert sum(seconds) == pytest.approx(64 * 3 * SCATTERED)


def test_a_product_over_a_batch_has_it_outside_of_its_tiles() -> None:
    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        features = jnp.tanh(x @ weights)
        return jnp.sum(jnp.tanh(jnp.einsum("bfe,bge->bfg", features, features)))

    shapes = (32, 32), (8192, 17, 32)
    avals = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    foreseen, found = foreseen_and_compiled(jax.grad(loss), *avals)
    assert found > 8192 * 24 * 128 * 4  # of 17 × 32 numbers for each of 8192
    assert foreseen == pytest.approx(found, rel=0.2)
