"""What a TPU's products compute with their results before these are stored."""

import pytest

from remat_opt.compilers.tpu_beside import with_pieces_beside
from remat_opt.compilers.tpu_fusion import with_results_computed
from remat_opt.graph.fusion import fuse
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
    return [op.outputs for op in with_pieces_beside(graph, [8] * 8).ops if len(op.outputs) > 1]


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


def test_who_reads_a_product_beside_a_piece_takes_it_out_of_a_tuple() -> None:
    ops = (
        Op((0,), (1,), kind=Kind.PRODUCT),
        Op((1,), (2,), kind=Kind.ELEMENTWISE),
        Op((2,), (3,), kind=Kind.ELEMENTWISE, name="concatenate"),
        Op((3,), (4,), kind=Kind.PRODUCT),
        Op((1, 4), (5,)),
    )
    assert with_pieces_beside(Graph((8,) * 6, ops, (0,), (5,)), [8] * 6).ops[0].in_tuple


@pytest.mark.parametrize(("reads_a_source_anyhow", "is_stored"), [(True, False), (False, True)])
def test_what_kernels_read_anyhow_is_no_reason_to_store_what_is_made_of_it(
    *, reads_a_source_anyhow: bool, is_stored: bool
) -> None:
    """Five products of something that is made of two arrays (storing it moves 8 arrays, not doing so 10), of which each
    reads one of the two arrays for something else, too (storing it moves 13, not doing so 10)."""
    one, other, made = range(3)
    products = [
        Op((made, one) if reads_a_source_anyhow else (made,), (3 + at,), kind=Kind.PRODUCT, name="product")
        for at in range(5)
    ]
    ops = (Op((one, other), (made,), kind=Kind.ELEMENTWISE, name="made"), *products)
    graph = Graph((8,) * 8, ops, (one, other), tuple(range(3, 8)))
    assert (made in {value for op in fuse(graph, by_kernels=True).graph.ops for value in op.outputs}) is is_stored


@pytest.mark.parametrize(("arrays", "is_stored"), [(1, False), (2, True)])
def test_what_is_made_of_one_array_is_made_again_in_each_product(arrays: int, is_stored: bool) -> None:
    """One op reads it, for five products: storing it moves 32 or 40 bytes, making it in each of them 40 or 80."""
    made, passed_on = arrays, arrays + 1
    products = [Op((passed_on,), (passed_on + 1 + at,), kind=Kind.PRODUCT, name="product") for at in range(5)]
    ops = (
        Op(tuple(range(arrays)), (made,), kind=Kind.ELEMENTWISE, name="made"),
        Op((made,), (passed_on,), kind=Kind.ELEMENTWISE, name="passed on"),
        *products,
    )
    count = passed_on + 1 + len(products)
    graph = Graph(
        (8,) * made + (4,) + (8,) * (count - made - 1), ops, tuple(range(arrays)), tuple(range(passed_on + 1, count))
    )
    kernels = fuse(graph, by_kernels=True).graph.ops
    assert (made in {value for op in kernels for value in op.outputs}) is is_stored


@pytest.mark.parametrize(("dear", "readers", "is_stored"), [(True, 3, True), (False, 3, False), (True, 2, False)])
def test_where_as_much_is_moved_what_takes_much_arithmetic_is_stored(
    *, dear: bool, readers: int, is_stored: bool
) -> None:
    """Something that is made of two arrays: for three products storing it moves 6 arrays, not doing so 6."""
    one, other, curved, made = range(4)
    products = [Op((made,), (4 + at,), kind=Kind.PRODUCT, name="product") for at in range(readers)]
    ops = (
        Op((one,), (curved,), kind=Kind.ELEMENTWISE, name="tanh", dear=dear),
        Op((curved, other), (made,), kind=Kind.ELEMENTWISE, name="made"),
        *products,
    )
    graph = Graph((8,) * (4 + readers), ops, (one, other), tuple(range(4, 4 + readers)))
    assert (made in {value for op in fuse(graph, by_kernels=True).graph.ops for value in op.outputs}) is is_stored


@pytest.mark.parametrize(("name", "is_stored"), [("slice", False), ("convert", True)])
def test_a_slice_is_not_stored_for_its_readers(name: str, *, is_stored: bool) -> None:
    """A fourth of an array, for two products: they read that much of the array, too."""
    whole, part = range(2)
    products = [Op((part,), (2 + at,), kind=Kind.PRODUCT, name="product") for at in range(4)]
    ops = (Op((whole,), (part,), kind=Kind.ELEMENTWISE, name=name), *products)
    graph = Graph((16, 4, *[4] * 4), ops, (whole,), tuple(range(2, 6)))
    assert (part in {value for op in fuse(graph, by_kernels=True).graph.ops for value in op.outputs}) is is_stored
