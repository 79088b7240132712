"""A TPU's kernels with several results: loops that are done together, and work beside products."""

import pytest

from remat_opt.compilers.model import shared_places
from remat_opt.compilers.tpu_beside import with_work_beside
from remat_opt.compilers.tpu_loops import with_loops_joined
from remat_opt.graph.graph import Graph, Kind, Op

ROWS, COLUMNS = 16, 8
ARRAY = ROWS * COLUMNS  # elements


def kernels(*ops: Op, sums: tuple[int, ...] = (), numbers: tuple[int, ...] = (), columns: bool = True) -> list:
    """The results of each kernel of a step that is given one array and reads in the end what nobody else does.

    Args:
        ops: kernels; each value is of one array's elements.
        sums: values that are sums of an array.
        numbers: values of one element.
        columns: whether the sums go over columns.
    """
    made = [value for op in ops for value in op.outputs]
    count = 1 + max(made)
    read = {value for op in ops for value in op.inputs}
    last = Op(tuple(value for value in made if value not in read), (count,), name="last")
    elements = [1 if at in numbers else COLUMNS if at in sums else ARRAY for at in range(count + 1)]
    graph = Graph(tuple(4 * one for one in elements), (*ops, last), (0,), (count,), fused=True)
    shapes = dict.fromkeys(made, (ROWS, COLUMNS))
    joined = with_loops_joined(graph, shapes, elements, frozenset(sums if columns else ()))
    return [op.outputs for op in with_work_beside(joined, elements).ops[:-1]]


def product(*read: int, makes: int) -> Op:
    return Op(read, (makes,), Kind.PRODUCT, name="dot_general")


def summed(*read: int, makes: int) -> Op:
    return Op(read, (makes,), Kind.REDUCTION, name="reduce_sum")


def elementwise(*read: int, makes: int) -> Op:
    return Op(read, (makes,), Kind.ELEMENTWISE, name="mul")


def other(*read: int, makes: int) -> Op:
    return Op(read, (makes,), name="other")


def test_what_a_product_makes_is_summed_up_in_its_kernel() -> None:
    ops = (product(0, makes=1), summed(1, makes=2), other(1, makes=3))
    assert kernels(*ops, sums=(2,)) == [(1, 2), (3,)]


def test_what_is_only_summed_up_is_not_stored() -> None:
    assert kernels(product(0, makes=1), summed(1, makes=2), sums=(2,)) == [(2,)]


def test_of_two_products_the_last_sums_up_what_is_made_of_both() -> None:
    ops = (product(0, makes=1), product(0, makes=2), summed(1, 2, makes=3), other(1, 2, makes=4))
    assert kernels(*ops, sums=(3,)) == [(1,), (2, 3), (4,)]


def test_a_sum_of_a_sums_result_waits_for_it() -> None:
    """A variance is summed up when the mean is known."""
    ops = (product(0, makes=1), summed(1, makes=2), summed(1, 2, makes=3), other(1, makes=4))
    assert kernels(*ops, sums=(2, 3)) == [(1, 2), (3,), (4,)]


@pytest.mark.parametrize(("columns", "expected"), [(True, [(1, 2)]), (False, [(1,), (2,)])])
def test_elementwise_work_is_summed_up_over_columns(columns: bool, expected: list) -> None:
    ops = (elementwise(0, makes=1), summed(1, makes=2), other(1, makes=3))
    assert kernels(*ops, sums=(2,), columns=columns)[:-1] == expected


def test_sums_of_two_passes_that_share_an_operand_are_one_kernel() -> None:
    """They run when the later one can, so that both passes are live."""
    ops = (other(0, makes=1), other(0, makes=2), summed(0, 1, makes=3), other(3, makes=4), summed(0, 2, makes=5))
    assert kernels(*ops, sums=(3, 5)) == [(1,), (2,), (3, 5), (4,)]


def test_what_they_share_may_be_no_single_number() -> None:
    ops = (other(0, makes=1), other(0, makes=2), other(0, makes=3), summed(1, 2, makes=4), summed(1, 3, makes=5))
    assert (4, 5) in kernels(*ops, sums=(4, 5))
    assert (4, 5) not in kernels(*ops, sums=(4, 5), numbers=(1,))


def test_what_depends_on_a_sum_is_not_in_its_kernel() -> None:
    ops = (summed(0, makes=1), other(1, makes=2), summed(0, 2, makes=3))
    assert kernels(*ops, sums=(1, 3)) == [(1,), (2,), (3,)]


def test_kernels_that_became_one_depend_on_what_each_needs() -> None:
    """The third sum needs the first; the fourth needs the second, which is in one kernel with the first."""
    ops = (
        other(0, makes=1),
        summed(0, 1, makes=2),
        summed(0, makes=3),
        other(3, makes=4),
        summed(0, 4, makes=5),
    )
    assert kernels(*ops, sums=(2, 3, 5)) == [(1,), (2, 3), (4,), (5,)]


def test_elementwise_work_that_is_stored_is_done_beside_the_product_that_makes_its_last_operand() -> None:
    ops = (product(0, makes=1), product(0, makes=2), elementwise(1, 2, makes=3), other(1, 2, 3, makes=4))
    assert kernels(*ops) == [(1,), (2, 3), (4,)]


def test_what_nobody_reads_but_work_beside_a_product_is_not_stored() -> None:
    assert kernels(product(0, makes=1), elementwise(0, 1, makes=2), other(2, makes=3)) == [(2,), (3,)]


def test_a_product_is_written_over_what_only_the_work_beside_it_reads() -> None:
    elements = [ARRAY] * 7
    ops = (
        other(0, makes=1),
        other(0, makes=2),
        product(1, makes=3),
        elementwise(1, 2, 3, makes=4),
        other(3, 4, makes=5),
    )
    graph = Graph(tuple(4 * one for one in elements), ops, (0,), (5,), fused=True)
    joined = with_work_beside(graph, elements)
    assert joined.ops[2].written_over == (2,)
    assert shared_places(joined, "tpu") == {3: 2}


def test_one_result_of_a_product_with_work_beside_it_is_in_no_tuple() -> None:
    ops = (product(0, makes=1), elementwise(0, 1, makes=2), other(2, makes=3))
    (joined, _) = with_work_beside(Graph((4 * ARRAY,) * 4, ops, (0,), (3,), fused=True), [ARRAY] * 4).ops
    assert joined.outputs == (2,)
    assert not joined.in_tuple


def test_what_is_made_of_something_later_is_not_done_beside_a_product() -> None:
    ops = (product(0, makes=1), other(1, makes=2), elementwise(1, 2, makes=3), other(3, makes=4))
    assert kernels(*ops) == [(1,), (2,), (3,), (4,)]


def test_what_needs_a_products_sums_is_not_done_in_its_kernel() -> None:
    """All of its rows are there only when it has ended: a batch normalisation."""
    ops = (product(0, makes=1), summed(1, makes=2), elementwise(1, 2, makes=3), other(3, makes=4))
    assert kernels(*ops, sums=(2,)) == [(1, 2), (3,), (4,)]


def test_a_kernel_of_loops_goes_beside_the_last_product_as_a_whole() -> None:
    """Three derivatives of a network: what their last layers make, and its sums, is one kernel of the last product."""
    ops = (
        product(0, makes=1),
        product(0, makes=2),
        elementwise(0, 1, makes=3),
        summed(3, makes=4),
        elementwise(0, 2, makes=5),
        summed(5, makes=6),
        other(1, 3, 5, makes=7),
    )
    assert kernels(*ops, sums=(4, 6)) == [(1,), (3, 4, 5, 6), (7,)]


@pytest.mark.parametrize(("shared", "is_one"), [((), True), ((1,), False)])
def test_elementwise_work_is_one_kernel_for_an_array_of_its_size(shared: tuple[int, ...], is_one: bool) -> None:
    """What is smaller is read again and again for one result: no reason to make both at once."""
    ops = (other(0, makes=1), elementwise(1, makes=2), elementwise(1, makes=3), other(2, makes=4), other(3, makes=5))
    assert ((2, 3) in kernels(*ops, sums=shared)) is is_one
