"""What lies row by row on a TPU: what gathers make, and the cheap work that is done on it."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from foreseen import foreseen

from remat_opt.compilers.model import allocated_by, compiled
from remat_opt.compilers.tpu_rows import Rows
from remat_opt.graph.cost import Rates
from remat_opt.graph.tiles import padded_rows
from remat_opt.program.inline import Program, inline
from remat_opt.targets.compile import measure_flat
from remat_opt.targets.devices import resolve_target

NODES, EDGES = 16384, 131072


def program_of(fun: Callable, *avals: jax.ShapeDtypeStruct) -> Program:
    return inline(jax.make_jaxpr(fun)(*avals), with_barriers=True, keep_names=False)


@pytest.mark.parametrize(
    ("row", "places"),
    [
        ((), 1),
        ((1,), 1),
        ((32,), 128),
        ((4, 32), 4 * 128),
        ((3, 40), 4 * 128),  # a tile has as few rows as it needs, of a power of two
        ((2, 64), 2 * 128),
        ((16, 8), 8 * 128),  # the 16 in the lanes
    ],
)
def test_rows_are_outside_of_tiles(row: tuple[int, ...], places: int) -> None:
    assert padded_rows((EDGES, *row), 4, 1) == EDGES * places * 4


def arrays(*row: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Of each node, and the ends of the edges."""
    ends = jax.ShapeDtypeStruct((EDGES,), jnp.int32)
    return jax.ShapeDtypeStruct((NODES, *row), jnp.float32), ends, ends


def summed(nodes: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
    return jax.ops.segment_sum(nodes[senders] + nodes[receivers], receivers, NODES)


def test_sums_over_edges_take_what_is_gathered_row_by_row() -> None:
    target, avals = resolve_target("v5e"), arrays(4, 32)
    graph = compiled(program_of(summed, *avals), Rates(target.bandwidth, target.flops), platform="tpu")
    found = measure_flat(lambda *args: [summed(*args)], avals, target="v5e").temp_bytes
    assert found > 2 * EDGES * 4 * 128 * 4
    assert allocated_by(graph, "tpu") == pytest.approx(found, rel=0.2)


@pytest.mark.parametrize(
    ("work", "lies_by_rows"),
    [
        (lambda of_edge, other: jnp.exp(of_edge - other), True),
        (lambda of_edge, other: jnp.exp(of_edge) + jnp.exp(other), False),
        (lambda of_edge, other: of_edge @ jnp.ones((32, 32)), False),
    ],
)
def test_cheap_work_on_rows_lies_by_rows(work: Callable, lies_by_rows: bool) -> None:
    def of_edges(nodes: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
        return work(nodes[senders], nodes[receivers])

    program = program_of(of_edges, *arrays(4, 32))
    assert (program.outputs[0] in Rows(program).lying) == lies_by_rows


def moved(nodes: jax.Array, senders: jax.Array, receivers: jax.Array, weight: jax.Array, of_sums: bool) -> jax.Array:
    """Vectors between points, scaled by what a network makes of their lengths."""
    apart = nodes[senders] - nodes[receivers]
    scale = jnp.tanh(jnp.sum(apart**2, -1, keepdims=True) @ jnp.ones((1, 64)) + 1.0) @ weight
    return (apart * scale).sum(0) if of_sums else jax.ops.segment_sum(apart * scale, senders, 4096)


@pytest.mark.parametrize(("of_sums", "compiled_mb"), [(True, 141.8), (False, 275.1)])
def test_vectors_are_packed_where_three_sums_go_over_them(of_sums: bool, compiled_mb: float) -> None:
    """As libtpu 0.0.51 compiles it: the copies take little, and one array that is gathered or scattered is there at a
    time."""

    def loss(nodes: jax.Array, weight: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
        return jnp.sum(moved(nodes, senders, receivers, weight, of_sums) ** 2)

    nodes, weight = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4096, 3), (64, 1)))
    ends = jax.ShapeDtypeStruct((262144,), jnp.int32)
    found = foreseen(jax.grad(loss, argnums=(0, 1)), nodes, weight, ends, ends, gaps_twice=False)
    assert found == pytest.approx(compiled_mb * 1e6, rel=0.05)


def test_sums_of_different_layers_do_not_count_together() -> None:
    """Of three layers, each with one sum, nothing is packed: where vectors are gathered and scattered, XLA's layouts
    end. Compiled by libtpu 0.0.51; two arrays of 134 MB."""

    def energy(nodes: jax.Array, weight: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
        for _ in range(3):
            nodes = nodes + moved(nodes, senders, receivers, weight, False)
        return jnp.sum(nodes**2)

    nodes, weight = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4096, 3), (64, 1)))
    ends = jax.ShapeDtypeStruct((262144,), jnp.int32)
    found = foreseen(energy, nodes, weight, ends, ends, gaps_twice=False)
    assert found == pytest.approx(271.0e6, rel=0.05)


@pytest.mark.parametrize(("layers", "packed"), [(1, 0), (2, 2)])
def test_gathers_that_fill_up_with_zeros_lie_alike(layers: int, packed: int) -> None:
    """Behind the barriers of rematerialized layers two sums go over the vectors of the first, and three over those of
    the second. Both are packed, as their cotangents are gathered with zeros where an index is out of bounds, which is
    one array; the first alone is not, nor is a forward pass (as libtpu 0.0.51 compiles them)."""

    def layer(nodes: jax.Array, weight: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
        apart = nodes[senders] - nodes[receivers]
        squared = jnp.sum(apart**2, -1, keepdims=True)
        scale = jnp.tanh(jnp.tanh(squared @ jnp.ones((1, 64))) @ weight)
        return nodes + jax.ops.segment_sum(apart / (jnp.sqrt(squared) + 1.0) * scale, senders, 4096)

    def loss(weight: jax.Array, nodes: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
        for _ in range(layers):
            nodes = jax.checkpoint(layer)(nodes, weight, senders, receivers)
        return jnp.sum(nodes**2)

    nodes, weight = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4096, 3), (64, 1)))
    ends = jax.ShapeDtypeStruct((65536,), jnp.int32)
    program = program_of(jax.grad(loss), weight, nodes, ends, ends)
    cotangents = {
        equation.outputs[0]
        for equation in program.equations
        if equation.primitive.name == "gather" and "FILL" in str(equation.params["mode"])
    }
    assert len(cotangents & Rows(program).packed.keys()) == packed
