"""Slices that a TPU's compiler copies from the device's memory when they are needed."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import pytest
from foreseen import foreseen_and_compiled
from jax import lax

from remat_opt.compilers.model import compiled
from remat_opt.compilers.tpu import on_chip
from remat_opt.compilers.tpu_clock import Clock
from remat_opt.compilers.tpu_cuts import with_cuts_put_off
from remat_opt.graph.cost import Rates
from remat_opt.graph.fusion import fuse
from remat_opt.graph.graph import Graph, Kind, Op
from remat_opt.program.inline import inline

RATES = Rates(bandwidth=1e12, flops={"float32": 1e14})
MIB = 2**20
# The argument, what is cut, the piece, what keeps the chip busy (twice), the result, a barrier's token.
GIVEN, WHOLE, PIECE, FIRST, SECOND, RESULT, TOKEN = range(7)
SIZES = (4 * MIB, 4 * MIB, MIB, 4 * MIB, 4 * MIB, MIB, 0)


def kernels(
    seconds: float, *, of_buffers: bool = False, whole_is_read_last: bool = False, whole: int = 4 * MIB
) -> Graph:
    """A piece is cut at once of what the first kernel makes, and read by the last one after so many seconds."""
    ops = (
        Op((GIVEN,), (WHOLE,), kind=Kind.PRODUCT, seconds=1e-6),
        Op((WHOLE,), (PIECE,), kind=Kind.ELEMENTWISE, name="slice", seconds=1e-6, of_buffers=of_buffers),
        Op((PIECE,), (TOKEN,), kind=Kind.BARRIER),
        Op((GIVEN, TOKEN), (FIRST,), kind=Kind.PRODUCT, seconds=seconds),
        Op((FIRST,), (SECOND,), kind=Kind.PRODUCT, seconds=1e-6),
        Op((PIECE, SECOND), (RESULT,), kind=Kind.PRODUCT, seconds=1e-6),
        Op((RESULT, WHOLE) if whole_is_read_last else (RESULT,), (), kind=Kind.OPAQUE, seconds=1e-6),
    )
    sizes = (*SIZES[:WHOLE], whole, *SIZES[WHOLE + 1 :])
    return Graph(sizes, ops, inputs=(GIVEN,), fused=True)


def put_off(graph: Graph, rounded: frozenset[int] = frozenset()) -> tuple[list[str], Mapping[int, int]]:
    later, cuts = with_cuts_put_off(graph, rounded, Clock(graph, 112 * MIB, RATES))
    assert sorted(map(repr, (op.outputs for op in later.ops))) == sorted(map(repr, (op.outputs for op in graph.ops)))
    return [op.name or op.kind.name for op in later.ops], cuts


def test_a_slice_is_fetched_when_it_is_needed() -> None:
    order, cuts = put_off(kernels(1e-3))
    at = order.index("slice")
    assert order[at - 1] == "BARRIER"  # which is gone by then
    assert cuts == {WHOLE: at}


@pytest.mark.parametrize(
    ("graph", "rounded"),
    [
        (kernels(1e-7), frozenset()),  # no time to send four mebibytes away and to fetch one
        (kernels(3e-5, whole=64 * MIB), frozenset()),  # there is time to fetch one, but not to send so many
        (kernels(1e-3, of_buffers=True), frozenset()),  # in strides
        (kernels(1e-3, whole_is_read_last=True), frozenset()),
        (kernels(1e-3), frozenset({PIECE})),  # no mere copy
    ],
)
def test_other_slices_are_made_where_they_stand(graph: Graph, rounded: frozenset[int]) -> None:
    order, cuts = put_off(graph, rounded)
    assert order.index("slice") == 1
    assert not cuts


def test_a_slice_right_before_its_reader_is_fetched_too() -> None:
    graph = kernels(1e-3)
    made, cut, barrier, *others, last, end = graph.ops
    graph = dataclasses.replace(graph, ops=(made, dataclasses.replace(barrier, inputs=()), *others, cut, last, end))
    order, cuts = put_off(graph)
    assert cuts == {WHOLE: order.index("slice")}


@pytest.mark.parametrize("is_alone", [True, False])
def test_results_of_a_kernel_with_several_stay(is_alone: bool) -> None:
    graph = kernels(1e-3)
    made, *others = graph.ops
    beside = () if is_alone else (len(SIZES),)
    made = dataclasses.replace(made, outputs=(*made.outputs, *beside), kind=Kind.ELEMENTWISE)
    _, cuts = put_off(dataclasses.replace(graph, sizes=(*SIZES, SIZES[WHOLE]), ops=(made, *others)))
    assert (WHOLE in cuts) == is_alone


def test_what_a_slice_is_fetched_from_waits_in_the_devices_memory() -> None:
    later, sooner = (on_chip(kernels(seconds), rates=RATES) for seconds in (1e-4, 1e-7))
    assert not sooner.sizes[WHOLE]
    (sent,) = (op for op in later.ops if op.name == "sent")
    assert later.sizes[sent.outputs[0]] == 4 * MIB
    (cut,) = (op for op in later.ops if op.name == "slice")
    assert cut.inputs == sent.outputs


def test_a_slice_that_is_stored_is_cut_of_what_is_stored() -> None:
    ops = (
        Op((0,), (1,), kind=Kind.ELEMENTWISE, name="exp"),
        Op((1,), (2,), kind=Kind.ELEMENTWISE, name="slice"),
        Op((2,), (3,), kind=Kind.OPAQUE),
    )
    graph = Graph((8, 8, 4, 4), ops, inputs=(0,), outputs=(3,))
    assert [op.outputs for op in fuse(graph).graph.ops] == [(2,), (3,)]
    assert [op.outputs for op in fuse(graph, cut_from_buffers=True).graph.ops] == [(1,), (2,), (3,)]


@pytest.mark.parametrize(
    ("others", "stored"),
    [
        ((), False),  # the one slice is made in its reader, and so is what it is cut of
        ((Op((1,), (4,), kind=Kind.OPAQUE),), True),
        ((Op((1,), (4,), kind=Kind.ELEMENTWISE, name="slice"), Op((4,), (5,), kind=Kind.OPAQUE)), True),
        ((Op((1,), (4,), kind=Kind.ELEMENTWISE, name="slice"),), False),  # of which nobody reads anything
    ],
)
def test_what_is_cut_is_stored_if_others_read_it_too(others: tuple[Op, ...], stored: bool) -> None:
    ops = (
        Op((0,), (1,), kind=Kind.ELEMENTWISE, name="exp"),
        Op((1,), (2,), kind=Kind.ELEMENTWISE, name="slice"),
        *others,
        Op((*(value for op in others for value in op.outputs if op.kind is Kind.OPAQUE), 2), (3,), kind=Kind.PRODUCT),
        Op((3,), (6,), kind=Kind.OPAQUE),
    )
    graph = Graph((8, 8, 4, 4, 4, 4, 4), ops, inputs=(0,), outputs=(6,))
    made = [value for op in fuse(graph, cut_from_buffers=True).graph.ops for value in op.outputs]
    assert (1 in made) == stored


@pytest.mark.parametrize("is_read", [True, False])
def test_what_is_cut_for_nobody_is_not_stored(is_read: bool) -> None:
    """Two others read it, both in one kernel, which makes it itself."""
    ops = (
        Op((0,), (1,), kind=Kind.ELEMENTWISE, name="exp"),
        Op((1,), (2,), kind=Kind.ELEMENTWISE, name="slice"),
        Op((1,), (3,), kind=Kind.ELEMENTWISE),
        Op((1,), (4,), kind=Kind.ELEMENTWISE),
        Op((2, 3, 4) if is_read else (3, 4), (5,), kind=Kind.PRODUCT),
    )
    graph = Graph((8, 8, 4, 8, 8, 8), ops, inputs=(0,), outputs=(5,))
    made = [value for op in fuse(graph, cut_from_buffers=True).graph.ops for value in op.outputs]
    assert made == ([1, 5] if is_read else [5])


def test_gates_are_cut_of_a_product_that_is_kept_without_its_bias() -> None:
    """Kept is the product, and its sum with the bias is stored beside it, as two slices are read of that."""

    def gated(x: jax.Array, weight: jax.Array, bias: jax.Array, last: jax.Array) -> jax.Array:
        made = x @ weight
        signal, gate = jnp.split(made + bias, 2, -1)
        result = (jnp.tanh(signal) * jnp.sin(gate)) @ last
        kept, result = lax.optimization_barrier((made, result))
        return (jnp.tanh(kept + bias) * result.sum()).sum()

    shapes = (65536, 512), (512, 1024), (1024,), (512, 512)
    avals = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    foreseen, found = foreseen_and_compiled(gated, *avals)
    assert found > 2 * 65536 * 1024 * 4
    assert foreseen == pytest.approx(found, rel=0.05)


@pytest.mark.parametrize(("axis", "stored"), [(1, 2), (3, 0)])
def test_rows_that_are_rolled_are_cut_first(axis: int, stored: int) -> None:
    """Both pieces are kernels of their own; of an image's features they are read where they are put together."""

    def rolled(x: jax.Array) -> jax.Array:
        return lax.sort(jnp.roll(x * 2, 3, axis))

    program = inline(jax.make_jaxpr(rolled)(jax.ShapeDtypeStruct((8, 64, 64, 256), jnp.float32)))
    graph = compiled(program, RATES, platform="tpu")
    assert [op.name for op in graph.ops].count("slice") == stored
