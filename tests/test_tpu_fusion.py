"""What a TPU's products compute with their results before these are stored."""

import pytest

from remat_opt.compilers.tpu_fusion import with_pieces_beside, with_results_computed
from remat_opt.graph.graph import Graph, Kind, Op

GIVEN, WEIGHT, GRADIENT, OTHER, BEHIND, UPDATED, READ = range(7)


def names(graph: Graph) -> list[str]:
    return [op.name for op in with_results_computed(graph, [8] * len(graph.sizes)).ops]


def updated_behind_a_barrier(*waits_for: int) -> Graph:
    """A weight's gradient, another product, and the weight's update, which reads it behind a barrier."""
    ops = (
        Op((GIVEN,), (GRADIENT,), kind=Kind.PRODUCT, name="gradient"),
        Op((GIVEN,), (OTHER,), kind=Kind.PRODUCT, name="other"),
        Op((WEIGHT, *waits_for), (BEHIND,), kind=Kind.BARRIER, name="barrier"),
        Op((GRADIENT, BEHIND), (UPDATED,), kind=Kind.ELEMENTWISE, name="update"),
        Op((OTHER,), (READ,), kind=Kind.REDUCTION, name="sum"),
    )
    return Graph((8,) * 7, ops, (GIVEN, WEIGHT), (UPDATED, READ))


def test_a_product_waits_for_what_its_update_reads_behind_a_barrier() -> None:
    assert names(updated_behind_a_barrier(OTHER)) == ["other", "barrier", "gradient", "sum"]


def test_a_product_does_not_go_on_behind_a_barrier_that_waits_for_it() -> None:
    gradient, momentum, behind, updated = range(2, 6)
    ops = (
        Op((GIVEN,), (gradient,), kind=Kind.PRODUCT, name="gradient"),
        Op((gradient,), (momentum,), kind=Kind.ELEMENTWISE, name="momentum"),
        Op((WEIGHT, momentum), (behind,), kind=Kind.BARRIER, name="barrier"),
        Op((momentum, behind), (updated,), kind=Kind.ELEMENTWISE, name="update"),
    )
    graph = Graph((8,) * 6, ops, (GIVEN, WEIGHT), (momentum, updated))
    assert names(graph) == ["gradient", "barrier", "update"]


@pytest.mark.parametrize(("reader", "stored_by_the_product"), [(Kind.BARRIER, 2), (Kind.REDUCTION, 1)])
def test_a_product_goes_on_behind_a_result_of_the_step_that_a_barrier_holds(
    reader: Kind, stored_by_the_product: int
) -> None:
    product, momentum, held, weight = range(1, 5)
    ops = (
        Op((GIVEN,), (product,), kind=Kind.PRODUCT, name="gradient"),
        Op((product,), (momentum,), kind=Kind.ELEMENTWISE, name="momentum"),
        Op((momentum,), (held,), kind=reader, name="reader"),
        Op((momentum,), (weight,), kind=Kind.ELEMENTWISE, name="weight"),
    )
    graph = Graph((8,) * 5, ops, (GIVEN,), (momentum, weight, held))
    kernel = with_results_computed(graph, [8] * 5).ops[0]
    assert kernel.outputs == (momentum, weight)[:stored_by_the_product]


def advance(
    *, is_read_again: bool = True, with_later: bool = False, reader: Kind = Kind.PRODUCT
) -> list[tuple[int, ...]]:
    """The results of each kernel with several, of a step of an equation's solution: a slope, what is advanced by it,
    joined with the time for the next slope, and the sum of all slopes."""
    given, time, slope, later, advanced, joined, following, summed = range(8)
    ops = (
        Op((given,), (slope,), kind=Kind.PRODUCT, name="slope"),
        Op((slope if is_read_again else given,), (later,), name="later"),
        Op((slope, later if with_later else given), (advanced,), kind=Kind.ELEMENTWISE, name="advanced"),
        Op((advanced, time), (joined,), kind=Kind.ELEMENTWISE, name="concatenate"),
        Op((joined,), (following,), kind=reader, name="following"),
        Op((later, following), (summed,), name="summed"),
    )
    graph = Graph((8,) * 8, ops, (given, time), (summed,))
    return [op.outputs for op in with_pieces_beside(graph, [8] * 8, 16).ops if len(op.outputs) > 1]


def test_a_product_makes_a_piece_of_what_the_next_one_reads() -> None:
    slope, advanced = 2, 4  # in `advance`
    assert advance() == [(slope, advanced)]


@pytest.mark.parametrize(
    "changed",
    [{"is_read_again": False}, {"with_later": True}, {"reader": Kind.REDUCTION}],
    ids=["alone", "later", "no product"],
)
def test_a_product_makes_no_piece(changed: dict) -> None:
    assert advance(**changed) == []


def test_a_piece_beside_a_product_is_listed_in_a_table() -> None:
    ops = (
        Op((0,), (1,), kind=Kind.PRODUCT),
        Op((1,), (2,), kind=Kind.ELEMENTWISE),
        Op((2,), (3,), kind=Kind.ELEMENTWISE, name="concatenate"),
        Op((3,), (4,), kind=Kind.PRODUCT),
        Op((1, 4), (5,)),
    )
    kernel = with_pieces_beside(Graph((8,) * 6, ops, (0,), (5,)), [8] * 6, 16).ops[0]
    assert kernel.tables == 16
    assert kernel.in_tuple
