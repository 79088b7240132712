"""How compilers lay buffers into one allocation, by hand and by the laws that any layout has to keep."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat_opt.compilers.model import allocated_by, sharing_places
from remat_opt.compilers.packing import Chunks, pack, places
from remat_opt.graph.graph import Graph, Kind, Op
from remat_opt.graph.liveness import peak_of

# As in AlexNet's backward pass: what is made on top of a large buffer keeps two later ones from lying side by side.
LARGE, BETWEEN, ONE, OTHER = 13, 2, 8, 8
IN_THE_WAY = Graph(
    (LARGE, BETWEEN, ONE, OTHER, 0),
    (
        Op((), (0,)),
        *(Op((), (), workspace=1) for _ in range(3)),  # so that the large one lives longest
        Op((0,), (1,)),
        Op((), (2,)),
        Op((1,), (3,)),
        Op((2, 3), (4,)),
    ),
    outputs=(4,),
    fused=True,
)


@pytest.mark.parametrize("platform", ["cuda", "cpu"])
def test_the_better_of_two_orders_is_taken(platform: str) -> None:
    assert peak_of(IN_THE_WAY) == ONE + OTHER + BETWEEN
    assert allocated_by(IN_THE_WAY, platform) == ONE + OTHER + BETWEEN


def test_a_tpus_heap_takes_buffers_as_they_come() -> None:
    assert allocated_by(IN_THE_WAY, "tpu") == LARGE + BETWEEN + OTHER


def test_what_was_there_before_leaves_a_gap_however_short_it_lived() -> None:
    """Three do not fit below what was put on top of two that are gone."""
    ops = (Op((), (0,)), Op((0,), (1,)), Op((), (2,)), *(Op((), (), workspace=1) for _ in range(9)), Op((1, 2), (3,)))
    graph = Graph((2, 8, 3, 0), ops, outputs=(3,), fused=True)
    assert allocated_by(graph, "cpu") == peak_of(graph) == 12
    assert allocated_by(graph, "tpu") == 13


@pytest.mark.parametrize("sizes", [(4, 6), (6, 4)])
def test_of_those_that_come_at_once_what_goes_first_lies_lowest(sizes: tuple[int, int]) -> None:
    """So five do not fit below the six that stay; above them they would."""
    goes = sizes.index(4)
    ops = (Op((), (0, 1)), Op((goes,), ()), Op((), (2,)), Op((1 - goes, 2), (3,)))
    assert allocated_by(Graph((*sizes, 5, 0), ops, outputs=(3,), fused=True), "tpu") == 15


@pytest.mark.parametrize(("name", "height"), [("conv_general_dilated", 13), ("dot_general", 13), ("gather", 9)])
def test_elementwise_work_right_behind_a_product_comes_with_it(name: str, height: int) -> None:
    """So it lies below what the product makes, as it goes first, and five do not fit in its place."""
    ops = (
        Op((), (0,), kind=Kind.PRODUCT, name=name),
        Op((0,), (1,), kind=Kind.ELEMENTWISE),
        Op((1,), ()),
        Op((), (2,)),
        Op((0, 2), (3,)),
    )
    assert allocated_by(Graph((4, 4, 5, 0), ops, outputs=(3,), fused=True), "tpu") == height


def test_a_result_that_takes_an_operands_place_is_no_chunk_of_its_own() -> None:
    ops = (Op((), (0,)), Op((0,), (1,), kind=Kind.ELEMENTWISE), Op((1,), (2,)))
    graph = sharing_places(Graph((8, 8, 0), ops, outputs=(2,), fused=True))
    assert allocated_by(graph, "cpu") == 8


def test_a_workspace_is_a_chunk_while_its_kernel_runs() -> None:
    ops = (Op((), (0,)), Op((0,), (1,), workspace=5), Op((1,), (2,)))
    assert allocated_by(Graph((8, 4, 0), ops, outputs=(2,), fused=True), "cpu") == 17


def test_what_lives_in_a_loops_body_lies_in_gaps() -> None:
    """Eight of fourteen lie below what was put on top of something that is gone by then."""

    def graph(name: str) -> Graph:
        ops = (
            Op((), (0,)),
            *(Op((), (), workspace=1) for _ in range(20)),
            Op((), (1,)),
            Op((0,), (2,)),
            Op((), (), name=name, workspace=14),
            Op((1, 2), (3,)),
        )
        return Graph((8, 1, 0, 0), ops, outputs=(3,), fused=True)

    assert peak_of(graph("scan")) == peak_of(graph("")) == 15
    assert allocated_by(graph("scan"), "tpu") == 15
    assert allocated_by(graph(""), "tpu") == 23


def test_a_step_without_kernels_allocates_nothing() -> None:
    assert allocated_by(Graph((8,), (), inputs=(0,), outputs=(0,), fused=True), "tpu") == 0


LIVES = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 12), st.integers(0, 6)), min_size=1, max_size=12)


@given(LIVES, st.randoms())
def test_what_lives_at_once_lies_apart_and_as_low_as_it_may(lives: list[tuple[int, int, int]], random) -> None:
    size, birth, length = (np.array(column, dtype=np.int64) for column in zip(*lives, strict=True))
    chunks = Chunks(size, birth, birth + length)
    order = list(range(len(lives)))
    random.shuffle(order)
    offset = places(chunks, np.array(order))

    def meet(one: int, other: int) -> bool:
        return bool(birth[one] <= chunks.death[other] and birth[other] <= chunks.death[one])

    for one, other in itertools.combinations(range(len(lives)), 2):
        if meet(one, other):
            assert offset[one] + size[one] <= offset[other] or offset[other] + size[other] <= offset[one]
    for position, index in enumerate(order):
        below = {int(offset[other] + size[other]) for other in order[:position] if meet(index, other)}
        assert int(offset[index]) in below | {0}


@given(LIVES, st.randoms(), st.integers(0, 40))
def test_what_finds_no_place_within_a_capacity_has_none(
    lives: list[tuple[int, int, int]], random, capacity: int
) -> None:
    size, birth, length = (np.array(column, dtype=np.int64) for column in zip(*lives, strict=True))
    chunks = Chunks(size, birth, birth + length)
    order = list(range(len(lives)))
    random.shuffle(order)
    offset = places(chunks, np.array(order), capacity)
    for position, index in enumerate(order):
        beside = [
            other
            for other in order[:position]
            if offset[other] >= 0 and birth[index] <= chunks.death[other] and birth[other] <= chunks.death[index]
        ]

        def free(low: int, index: int = index, beside: list[int] = beside) -> bool:
            high = low + size[index]
            return high <= capacity and all(
                high <= offset[other] or offset[other] + size[other] <= low for other in beside
            )

        if offset[index] < 0:
            assert not any(free(low) for low in range(capacity))
        else:
            assert free(int(offset[index]))


def test_an_old_libtpu_reports_what_lies_idle_once_more() -> None:
    allocated = allocated_by(IN_THE_WAY, "tpu")
    idle = allocated - (ONE + OTHER + BETWEEN)
    assert idle > 0
    assert allocated_by(IN_THE_WAY, "tpu", gaps_twice=True) == allocated + idle


@given(LIVES)
def test_gaps_are_what_is_allocated_beyond_what_lives_at_once(lives: list[tuple[int, int, int]]) -> None:
    ops = []
    for now in range(max(birth + length for _, birth, length in lives) + 1):
        ops.append(Op((), tuple(value for value, (_, birth, _) in enumerate(lives) if birth == now)))
        ops.append(Op(tuple(value for value, (_, birth, length) in enumerate(lives) if birth + length == now), ()))
    graph = Graph(tuple(size for size, _, _ in lives), tuple(ops), fused=True)
    allocation = pack(graph, {}, as_they_come=True)
    assert allocation.size - allocation.gaps == peak_of(graph)


def test_what_takes_a_page_divides_no_gap_on_a_tpu() -> None:
    """A number that comes while something large is there lies in the way of what follows that."""
    large, page = 2**20, 2**14
    ops = (
        Op((), (0,)),
        Op((0,), (1,)),  # the number
        Op((0,), (2,)),
        Op((2,), (3,)),
        Op((1, 3), (4,)),
    )
    graph = Graph((large, page, page // 2, large + page, 0), ops, outputs=(4,), fused=True)
    assert allocated_by(graph, "tpu") == peak_of(graph)
    larger = Graph((large, 2 * page, page // 2, large + page, 0), ops, outputs=(4,), fused=True)
    assert allocated_by(larger, "tpu") > peak_of(larger) + large // 2
