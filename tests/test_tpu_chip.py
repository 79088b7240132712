"""Where a TPU's buffers are from kernel to kernel, and how long XLA takes kernels to need."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from foreseen import foreseen_and_compiled
from jax import lax

from remat_opt.compilers import tpu
from remat_opt.compilers.model import allocated_by, compiled
from remat_opt.compilers.tpu_chip import FREED_BEFORE, MOST_REPACKS, MOST_UNDER_WAY, ChipMemory, Stay
from remat_opt.compilers.tpu_clock import RUNS_OF_A_BODY, Clock, bandwidth_of, with_seconds
from remat_opt.compilers.tpu_loops import with_loops_joined
from remat_opt.compilers.tpu_reader import TpuReader
from remat_opt.graph.cost import Rates
from remat_opt.graph.graph import Graph, Kind, Op
from remat_opt.graph.liveness import peak_of
from remat_opt.program.inline import Program, inline
from remat_opt.targets.compile import measure_flat
from remat_opt.targets.devices import resolve_target

RATES = Rates(bandwidth=1e12, flops={"float32": 1e14})
Pair = tuple[jax.Array, jax.Array]
CAPACITY = 1000  # bytes, which can be copied eight times in 8.9 ns


def memory(*nanoseconds: float) -> ChipMemory:
    """A chip while kernels run that take so long."""
    graph = Graph((), tuple(Op((), (), seconds=1e-9 * time) for time in nanoseconds), fused=True)
    return ChipMemory(CAPACITY, Clock(graph, CAPACITY, RATES))


def test_a_buffer_stays_while_the_next_reader_comes_soon() -> None:
    chip = memory(1, 8, 8, 8)
    assert chip.stay_of(100, 0, [2, 3], is_argument=False) == Stay(-1, leaves=False, fetched=0)


def test_a_buffer_is_in_the_devices_memory_until_it_is_fetched_for_the_last_time() -> None:
    chip = memory(1, 1, 5, 5, 1, 1, 1)  # too long between the second and the fifth
    assert chip.stay_of(100, 0, [1, 4, 6], is_argument=False) == Stay(4, leaves=True, fetched=1)


def test_what_is_read_late_for_the_first_time_is_made_outside() -> None:
    assert memory(1, 5, 5, 1).stay_of(100, 0, [3], is_argument=False) == Stay(3, leaves=False, fetched=1)


def test_what_finds_no_place_later_is_sent_away_and_comes_back_elsewhere() -> None:
    chip = memory(*[1.0] * 8)
    assert chip.takes(0, 500, 3, 4) == 0
    assert chip.stay_of(600, 0, [1, 6], is_argument=False) == Stay(6, leaves=True, fetched=1)
    chip = memory(*[1.0] * 8)
    assert chip.takes(0, 500, 3, 7) == 0  # until too late
    assert chip.stay_of(600, 0, [1, 6], is_argument=False) == Stay(6, leaves=True, fetched=0)


def test_what_is_there_is_put_together_where_something_finds_no_room() -> None:
    chip = memory(*[1.0] * 8)
    assert chip.takes(0, 400, 1, 3) == 0
    assert chip.takes(600, 400, 1, 7) == 1  # 200 bytes are left between, and 400 below from the fourth on
    assert chip.stay_with_room(lambda: chip.stay_of(300, 2, [5], is_argument=False)).outside_until == 5
    chip = memory(*[1.0] * 8)
    chip.takes(0, 200, 1, 3)
    chip.takes(600, 200, 1, 7)
    assert chip.stay_with_room(lambda: chip.stay_of(500, 2, [5], is_argument=False)) == Stay(-1, False, 0)
    assert chip.rows[:3, 2].tolist() == [200, 0, 400]  # what stays longest lies lowest
    assert chip.repacks == 1


def test_what_is_there_is_put_together_a_few_times_only() -> None:
    chip = memory(*[1.0] * 8)
    chip.takes(0, 600, 1, 7)
    for _ in range(MOST_REPACKS + 2):
        chip.stay_with_room(lambda: chip.stay_of(500, 2, [5], is_argument=False))
    assert chip.repacks == MOST_REPACKS


def test_what_is_to_be_put_together_stays_where_that_takes_more_room() -> None:
    """The longest lie lowest: 400 bytes, 300 above them, and then 500 only above those, which is too high."""
    chip = memory(*[1.0] * 8)
    for place in ((0, 400, 0, 3), (700, 300, 3, 6), (0, 500, 5, 6)):
        assert chip.takes(*place) >= 0
    chip.repack()
    assert chip.rows[:3, 2].tolist() == [0, 700, 0]


def test_an_argument_that_gains_nothing_comes_before_what_arithmetic_keeps_waiting() -> None:
    given, made, result = range(3)
    product = {"kind": Kind.PRODUCT, "flops": 1e6}
    ops = (Op((given,), (made,), **product), Op((given, made), (result,), **product))
    gains = tpu.gains_on_chip(Graph((4, 4, 4), ops, (given,), (result,), fused=True), RATES)
    assert gains[given] == 0.0
    assert gains[made] < 0.0


IMAGE = 16 * 64 * 64 * 128 * 4  # bytes: 32 features in 128 lanes


def gain_of_image(*moved: int) -> np.float32:
    """What an image gains on a v5e's chip: of how many bytes the kernel that makes it, and those that read it, are."""
    image, *others = range(1 + len(moved))
    made, *results = range(1 + len(moved), 1 + 2 * len(moved))
    ops = [Op((others[0],), (image, made), Kind.ELEMENTWISE)]
    ops += [Op((image, x), (result,), Kind.ELEMENTWISE) for x, result in zip(others[1:], results, strict=True)]
    sizes = (IMAGE, *(count - IMAGE for count in moved), *[0] * len(moved))
    graph = Graph(sizes, tuple(ops), tuple(others), tuple(results), fused=True)
    device = resolve_target("v5e")
    return tpu.gains_on_chip(graph, Rates(device.bandwidth, device.flops))[image]


def test_gains_are_those_of_libtpus_log() -> None:
    """`Definition benefit = 4.3466e-05 use benefit = 4.3466e-05` of 33,554,432 bytes."""
    assert gain_of_image(37_767_168, 67_257_344) == pytest.approx(2 * 4.3466e-05, rel=1e-5)


def test_of_what_gains_as_much_the_last_digit_decides() -> None:
    """As libtpu's log has a generator's images come (`Processing buffer`): that first whose kernels move less, although
    the other one stays longer."""
    assert gain_of_image(41_943_040, 41_944_576, 100_810_752) > gain_of_image(67_257_344, 71_303_168, 100_810_752)


def test_a_v5es_bandwidth_is_libtpus() -> None:
    assert bandwidth_of(Rates(resolve_target("v5e").bandwidth, {})) == 687 * 2**30


def test_a_place_above_all_others_is_the_last_choice() -> None:
    chip = memory(*[1.0] * 8)
    chip.takes(300, 600, 1, 7)
    assert chip.gap(50, 2, [3]) == 0  # 300 bytes are free there, 100 above


def test_so_many_copies_are_under_way_at_most() -> None:
    chip = memory(*[1.0] * 8)
    assert sum(chip.stay_of(1, 0, [7], is_argument=True).fetched for _ in range(50)) == MOST_UNDER_WAY


def test_an_argument_whose_successor_cannot_be_sent_back_has_no_place_on_the_chip() -> None:
    chip = memory(*[1.0] * 8)
    updated = [chip.stay_of_argument(1, [2, 5], written_by=5) for _ in range(MOST_UNDER_WAY + 1)]
    assert updated[:-1] == [Stay(2, leaves=True, fetched=1)] * MOST_UNDER_WAY
    assert updated[-1] == Stay(5, leaves=False, fetched=0)
    assert chip.count == MOST_UNDER_WAY


def test_copies_share_the_time_of_kernels() -> None:
    chip = memory(1, 1, 1, 1)  # of three of them 2.7 kB can be copied
    assert [chip.stay_of(400, 0, [3], is_argument=True).fetched for _ in range(7)] == [1, 1, 0, 0, 0, 0, 0]  # no room
    chip = memory(0.5, 0.1, 1)  # 540 bytes before the third
    assert [chip.stay_of(300, 0, [2], is_argument=True).fetched for _ in range(3)] == [1, 0, 0]  # room, but no time


def test_arguments_are_fetched_once_for_readers_that_come_soon() -> None:
    assert memory(1, 1, 1, 1).stay_of(100, 0, [1, 3], is_argument=True) == Stay(1, leaves=False, fetched=1)
    assert memory(1, 1, 5, 5, 1).stay_of(100, 0, [1, 4], is_argument=True) == Stay(4, leaves=False, fetched=2)


def test_what_a_loop_is_given_stays_where_no_turn_leaves_it_alone_for_long() -> None:
    assert memory(1, 1, 1, 1).stay_of_constant(100, [2]) == Stay(-1, leaves=False, fetched=0)
    assert memory(1, 5, 5, 1).stay_of_constant(100, [3]) is None
    assert memory(1, 1, 5, 5).stay_of_constant(100, [1]) is None
    chip = memory(1, 1, 1, 1)
    assert [chip.stay_of_constant(600, [2]) is None for _ in range(2)] == [False, True]  # no room


def test_a_barrier_is_no_reader() -> None:
    def graph(between: Kind) -> Graph:
        waits = Op((), (), seconds=5e-9)
        ops = (Op((), (0,)), waits, Op((0,), (), kind=between), waits, Op((0,), (1,)))
        return Graph((10, 0), ops, outputs=(1,), fused=True)

    assert peak_of(tpu.on_chip(graph(Kind.OPAQUE), rates=RATES, capacity=CAPACITY)) == 0
    assert peak_of(tpu.on_chip(graph(Kind.BARRIER), rates=RATES, capacity=CAPACITY)) == 2 * tpu.PAGE  # one of a table


def test_what_leaves_the_chip_comes_to_the_devices_memory_behind_the_kernel_that_makes_it() -> None:
    waits = Op((), (), seconds=5e-9)
    ops = (Op((), (0,)), Op((0,), ()), waits, waits, Op((0,), (1,)))
    found = tpu.on_chip(Graph((10, 0), ops, outputs=(1,), fused=True), rates=RATES, capacity=CAPACITY)
    tables, maker, sent, soon, *_, late, _ = found.ops
    assert (tables.name, sent.name, sent.inputs) == ("tables", "sent", maker.outputs)
    assert [found.sizes[op.outputs[0]] for op in (maker, sent)] == [0, tpu.PAGE]
    assert soon.inputs == late.inputs == sent.outputs


def test_a_barrier_holds_nothing_in_the_devices_memory_that_was_fetched_for_good() -> None:
    waits = Op((), (), seconds=5e-9)
    barrier = Op((0,), (), Kind.BARRIER, name="barrier")
    ops = (Op((), (0,)), waits, barrier, waits, Op((0,), ()), barrier, Op((0,), (1,)))
    found = tpu.on_chip(Graph((10, 0), ops, outputs=(1,), fused=True), rates=RATES, capacity=CAPACITY)
    assert [len(op.inputs) for op in found.ops if op.name == "barrier"] == [1, 0]


def seconds(sizes: tuple[int, ...], *ops: Op) -> list[float]:
    """In units of the time that a byte takes."""
    graph = with_seconds(Graph(sizes, ops, inputs=(0,), fused=True), RATES)
    return [round(op.seconds * bandwidth_of(RATES), 3) for op in graph.ops]


def test_kernels_take_the_time_of_what_they_move_or_compute() -> None:
    copy = Op((0,), (1,), Kind.ELEMENTWISE, name="pad")
    product = Op((1,), (2,), Kind.PRODUCT, flops=1e6)
    assert seconds((100, 200, 50), copy, product) == [300, pytest.approx(1e6 / 1e14 * bandwidth_of(RATES))]
    assert seconds((100, 200, 50), copy, Op((1,), (2,), Kind.PRODUCT)) == [300, 250]


def test_of_what_is_cut_a_part_is_read() -> None:
    assert seconds((1000, 10), Op((0,), (1,), Kind.ELEMENTWISE, moved_of=(0,))) == [20]


def test_a_kernel_of_several_sums_reads_what_they_share_once() -> None:
    sums = [Op((0,), (1 + at,), Kind.REDUCTION, name="reduce_sum") for at in range(2)]
    read = Op((1, 2), (3,))
    graph = Graph((100, 1, 1, 0), (*sums, read), (0,), (3,), fused=True)
    joined = with_loops_joined(graph, dict.fromkeys(range(3), (100,)), [100, 1, 1, 2], frozenset())
    assert seconds(graph.sizes, *graph.ops)[:-1] == [101, 101]
    assert seconds(graph.sizes, *joined.ops)[:-1] == [102]


def program_of(fun: Callable, *avals: jax.ShapeDtypeStruct) -> Program:
    return inline(jax.make_jaxpr(fun)(*avals), with_barriers=True, keep_names=False)


def graph_of(fun: Callable, *avals: jax.ShapeDtypeStruct) -> Graph:
    return compiled(program_of(fun, *avals), RATES, platform="tpu")


@pytest.mark.parametrize("turns", [10, 1000])
def test_a_loop_takes_the_time_of_five_turns(turns: int) -> None:
    def turn(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return lax.cumsum(x), None

    x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    (once,) = (op for op in graph_of(lax.cumsum, x).ops if op.name == "cumsum")
    (loop,) = (op for op in graph_of(lambda x: lax.scan(turn, x, None, turns), x).ops if op.name == "scan")
    assert loop.seconds == pytest.approx(RUNS_OF_A_BODY * once.seconds)


def interleaved(x: jax.Array) -> jax.Array:
    """Two sums of neighbours, put between each other, as in an associative scan."""
    first, second = jnp.exp(x[::2]), jnp.exp(x[1::2])
    config = ((0, 1, 1), (0, 0, 0))
    return lax.pad(first + second, 0.0, config) + lax.pad(first * second, 0.0, ((1, 0, 1), (0, 0, 0)))


def test_what_is_spread_is_a_kernel_of_its_own_and_what_is_strided_reads_a_buffer() -> None:
    def fun(x: jax.Array) -> jax.Array:
        return interleaved(jnp.tanh(x)) @ jnp.ones((256, 4))

    graph = graph_of(fun, jax.ShapeDtypeStruct((4096, 256), jnp.float32))
    names = [op.name for op in graph.ops]
    assert names.count("pad") == 2
    assert "tanh" in names


def test_what_an_associative_scan_keeps_is_foreseen() -> None:
    def states(decay: jax.Array, x: jax.Array) -> jax.Array:
        def combine(left: Pair, right: Pair) -> Pair:
            return left[0] * right[0], right[0] * left[1] + right[1]

        return lax.associative_scan(combine, (jnp.exp(decay), x), axis=1)[1]

    def loss(decay: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(states(decay, jnp.sin(states(decay, x)))))

    gradient = jax.grad(loss, (0, 1))
    avals = [jax.ShapeDtypeStruct((4, 256, 8192), jnp.float32)] * 2
    target = resolve_target("v5e")
    graph = compiled(program_of(gradient, *avals), Rates(target.bandwidth, target.flops), platform="tpu")
    found = measure_flat(gradient, avals, target=target).temp_bytes
    assert allocated_by(graph, "tpu") == pytest.approx(found, rel=0.2)


@pytest.mark.parametrize(("first", "expected", "asked"), [(200, 150, 7), (300, 300, 1)])
def test_where_nearly_all_is_on_the_chip_a_median_of_orders_is_taken(
    first: int, expected: int, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two buffers of 600 bytes at once one has no room. What seven orders leave outside is made up here; of a chip
    of 1000 bytes a quarter may be."""
    outside = [first, 10, 240, 20, 230, 150, 30]
    given = list[Graph]()

    def placed(graph: Graph, *_: object) -> Graph:
        given.append(graph)
        return Graph((outside[len(given) - 1],), (Op((), (0,)), Op((0,), ())), fused=True)

    monkeypatch.setattr(tpu, "_with_stays", placed)
    ops = Op((), (0,), seconds=1e-9), Op((), (1,), seconds=1e-9), Op((0, 1), (), seconds=1e-9)
    found = tpu.on_chip(Graph((600, 600), ops, fused=True), rates=RATES, capacity=CAPACITY)
    assert peak_of(found) == expected
    assert len(given) == asked


def test_where_all_has_room_one_order_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu, "_about_one", None)
    ops = Op((), (0,), seconds=1e-9), Op((), (1,), seconds=1e-9), Op((0, 1), (), seconds=1e-9)
    assert peak_of(tpu.on_chip(Graph((400, 400), ops, fused=True), rates=RATES, capacity=CAPACITY)) == 0


def test_what_gains_the_same_stays_the_same_in_other_orders() -> None:
    factors = tpu._about_one(np.array([3.0, 1.0, 3.0, -np.inf, 1.0]), seed=1)
    assert factors[0] == factors[2] != factors[1] == factors[4]
    assert abs(factors - 1).max() < 5 * tpu.KNOWN_TO


def kept_by(function: Callable, *avals: jax.ShapeDtypeStruct, donated: tuple[bool, ...] = ()) -> frozenset[int]:
    reader = TpuReader(inline(jax.make_jaxpr(function)(*avals), with_barriers=True, keep_names=False), RATES, "tpu")
    reader.read(donated)
    return reader.kept_between_steps()


def test_an_argument_that_products_alone_read_may_be_on_the_chip_before_the_step() -> None:
    avals = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((256, 512), (512, 128), (256, 128))]

    def step(x: jax.Array, weight: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
        held = lax.optimization_barrier(x)
        error = x @ weight - target
        return weight - held.T @ error, error

    assert kept_by(step, *avals) == {0}
    assert kept_by(step, *avals, donated=(True, False, False)) == set()
    assert kept_by(lambda x, weight, target: x @ weight - target, *avals) == {0, 1}
    assert kept_by(lambda x, weight, target: (x @ weight - target, x), *avals) == {1}


def test_a_branch_keeps_nothing_between_steps() -> None:
    """Of three arrays of 64 MiB it has what is made between its products on the chip, in the place of a weight."""

    def step(x: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
        return lax.cond(x[0, 0] > 0, lambda: jax.nn.softmax(x @ first) @ second, lambda: x)

    avals = [jax.ShapeDtypeStruct((4096, 4096), jnp.float32)] * 3
    assert max(foreseen_and_compiled(step, *avals)) < 2**20


@pytest.mark.parametrize(("read_late", "stays"), [(False, False), (True, True)])
def test_what_is_there_from_the_beginning_goes_when_it_was_read_early(read_late: bool, stays: bool) -> None:
    times = [1.0, 1.0, 100 * FREED_BEFORE, 10.0, 90 - 100 * FREED_BEFORE]
    graph = Graph((), tuple(Op((), (), seconds=1e-9 * time) for time in times), fused=True)
    chip = tpu.ChipMemory(1000, tpu.Clock(graph, 1000, RATES))
    stay = chip.stay_from_beginning(600, 3 if read_late else 1)
    assert (stay.outside_until, stay.ends_inside) == (-1, True)
    assert chip.takes(0, 500, 0, 0) < 0
    assert (chip.takes(0, 500, 4, 4) < 0) == stays


@pytest.mark.parametrize(
    ("kept", "sizes", "reader", "is_inside"),
    [
        ((), (500, 300), Kind.PRODUCT, True),
        ((1,), (500, 300), Kind.PRODUCT, True),
        ((0,), (500, 300), Kind.PRODUCT, False),
        ((0, 1), (500, 300), Kind.PRODUCT, False),
        ((0, 1), (500, 300), Kind.BARRIER, False),
        ((0, 1), (500, 300), Kind.OPAQUE, True),
        ((0, 1), (5000, 300), Kind.PRODUCT, True),
        ((0, 1), (5000, 500), Kind.PRODUCT, False),
    ],
)
def test_the_largest_that_has_room_is_on_the_chip_from_the_beginning(
    kept: tuple[int, ...], sizes: tuple[int, int], reader: Kind, is_inside: bool
) -> None:
    ops = (Op((), (2,)), Op((0, 2), (3,), Kind.PRODUCT), Op((0,), (), reader), Op((1, 3), (4,), Kind.PRODUCT))
    graph = Graph((*sizes, 600, 10, 0), ops, inputs=(0, 1), outputs=(4,), fused=True)
    found = tpu.on_chip(graph, rates=RATES, capacity=1000, kept=frozenset(kept))
    assert (found.sizes[2] == 0) == is_inside
