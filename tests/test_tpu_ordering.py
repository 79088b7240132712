"""In which order a TPU's compiler runs kernels, and what single numbers take, against the compiler itself."""

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import remat_opt
from benchmarks.predicted_memory import Row, load_step
from remat_opt.compilers import tpu
from remat_opt.compilers.model import allocated_by, compiled
from remat_opt.compilers.tpu_fusion import NUMBER, with_numbers_apart, with_widened_beside
from remat_opt.compilers.tpu_ordering import NEGLIGIBLE, as_loops_read, tpu_order, with_updates_behind_readers
from remat_opt.graph.cost import Rates
from remat_opt.graph.graph import Graph, Kind, Op
from remat_opt.graph.liveness import peak_of
from remat_opt.graph.ordering import as_operands, depth_first, greedy, in_order
from remat_opt.program import compat
from remat_opt.program.inline import inline
from remat_opt.targets import read_live_buffers
from remat_opt.targets.compile import measure_flat
from remat_opt.targets.devices import resolve_target


def op(inputs: tuple[int, ...], *made: int, kind: Kind = Kind.OPAQUE, name: str = "", workspace: int = 0) -> Op:
    return Op(inputs, made, kind=kind, name=name, workspace=workspace)


def graph_of(sizes: tuple[int, ...], ops: list[Op], inputs: tuple[int, ...], aliases: tuple = ()) -> Graph:
    return Graph(sizes, tuple(ops), inputs, ops[-1].outputs, aliases, fused=True)


def two_branches(wide_first: int, unit: int = 2 * NEGLIGIBLE) -> Graph:
    """Two chains from one argument, each with a wide value that becomes a narrow one."""
    ops = [op((0,), 1), op((1,), 2), op((0,), 3), op((3,), 4), op((2, 4), 5)]
    return graph_of(tuple(unit * size for size in (0, wide_first, 1, 10, 1, 1)), ops, (0,))


@pytest.mark.parametrize("graph", [two_branches(10), two_branches(12), two_branches(3)])
def test_the_order_that_peaks_lower_is_taken(graph: Graph) -> None:
    taken = peak_of(in_order(graph, tpu_order(graph)))
    assert taken == min(peak_of(in_order(graph, order)) for order in (greedy(graph), depth_first(graph)))


@pytest.mark.parametrize(("unit", "is_depth_first"), [(2 * NEGLIGIBLE, True), (NEGLIGIBLE // 32, False)])
def test_of_orders_that_peak_nearly_alike_the_first_is_taken(unit: int, is_depth_first: bool) -> None:
    """Which of them peaks lower by a few numbers is not for us to say."""
    graph = two_branches(12, unit)
    first, second = greedy(graph), depth_first(graph)
    peaks = [peak_of(in_order(graph, order)) for order in (first, second)]
    assert first != second
    assert peaks[0] > peaks[1]
    assert tpu_order(graph) == (second if is_depth_first else first)


def test_an_update_runs_behind_all_that_read_the_argument_whose_place_it_takes() -> None:
    # Op 2 overwrites the argument and frees a gradient; op 3, which makes something, reads the argument.
    ops = [op((0,), 1), op((1,), 2), op((2,), 3), op((0, 1), 4), op((4,), 5)]
    graph = Graph((0, 8, 4, 0, 9, 1), tuple(ops), (0,), (3, 5), ((0, 3),), fused=True)
    order = tpu_order(graph)
    assert order.index(3) < order.index(2)
    alone = tpu_order(Graph(graph.sizes, graph.ops, (0,), (3, 5), fused=True))
    assert alone.index(2) < alone.index(3)


def test_states_that_are_updated_by_each_other_do_not_wait_for_each_other() -> None:
    ops = [op((), 2), op((0, 1, 2), 3), op((0, 1, 2), 4)]
    graph = Graph((0, 0, 8, 8, 8), tuple(ops), (0, 1), (3, 4), ((0, 3), (1, 4)), fused=True)
    assert with_updates_behind_readers(graph)[0].ops == graph.ops
    assert sorted(tpu_order(graph)) == [0, 1, 2]


def test_updates_that_would_wait_for_themselves_wait_for_nothing() -> None:
    # Op 2 reads the first argument and the second's successor, op 3 the other way round.
    ops = [op((0,), 2), op((1,), 3), op((0, 3), 4), op((1, 2), 5)]
    graph = Graph((0, 0, 8, 8, 1, 1), tuple(ops), (0, 1), (2, 3, 4, 5), ((0, 2), (1, 3)), fused=True)
    assert with_updates_behind_readers(graph) == (graph, [0, 1, 2, 3])
    assert sorted(tpu_order(graph)) == [0, 1, 2, 3]


@pytest.mark.parametrize(("name", "takes"), [("scan", as_operands), ("", greedy)])
def test_a_third_order_is_taken_where_loops_decide_on_it(name: str, takes: Callable) -> None:
    """Of other kernels nobody knows in which order they read."""
    unit = 2 * NEGLIGIBLE
    ops = [op((0,), 1, workspace=9 * unit), op((0,), 2), op((1,), 3, name=name, workspace=6 * unit)]
    ops += [op((2,), 4), op((3, 4), 5, workspace=6 * unit)]
    graph = graph_of(tuple(unit * size for size in (0, 6, 8, 6, 9, 5)), ops, (0,))
    assert greedy(graph) == depth_first(graph) != as_operands(graph)
    peaks = [peak_of(in_order(graph, order(graph))) for order in (as_operands, greedy)]
    assert peaks[0] < peaks[1]
    assert tpu_order(graph) == takes(graph)


def test_a_loop_reads_what_it_carries_then_its_stacks_then_what_all_turns_share() -> None:
    def fun(shared: jax.Array, stack: jax.Array, carry: jax.Array) -> tuple:
        return jax.lax.scan(lambda carry, x: (carry * shared + x, None), carry, stack)

    program = inline(jax.make_jaxpr(fun)(jnp.ones(3), jnp.ones((4, 3)), jnp.ones(3)))
    (loop,) = (equation for equation in program.equations if equation.primitive.name == "scan")
    shared, stack, carry = program.inputs
    other = 1000  # not in its tuple
    assert as_loops_read(loop, (other, shared, stack, carry)) == (carry, stack, shared, other)


def test_a_body_moves_no_more_of_a_stack_than_a_turn_reads_or_writes_there() -> None:
    """A product takes a slice of it where it lies, and a result goes where it belongs."""
    rates = Rates(bandwidth=1e11, flops={"float32": 1e14, "bfloat16": 1e14})

    def fun(stack: jax.Array, weight: jax.Array, carry: jax.Array) -> tuple:
        def turn(given: tuple, at: jax.Array) -> tuple:
            carry, made = given
            carry = jnp.tanh(carry @ weight + stack[at])
            return (carry, jax.lax.dynamic_update_index_in_dim(made, carry, at, 0)), None

        return jax.lax.scan(turn, (carry, stack), jnp.arange(stack.shape[0]))[0]

    stack, weight, carry = (jnp.zeros(shape) for shape in ((512, 64, 256), (256, 256), (64, 256)))
    program = inline(jax.make_jaxpr(fun)(stack, weight, carry), with_barriers=True, keep_names=False)
    graph = compiled(program, rates, platform="tpu")
    (loop,) = (one for one in graph.ops if one.name == "scan")
    assert 0 < loop.seconds < 0.5 * stack.nbytes / rates.bandwidth


@pytest.mark.parametrize(("stack", "takes"), [(2, greedy), (12, depth_first)])
def test_loops_begin_with_buffers_that_a_list_scheduler_makes_before_all_that_is_larger(
    stack: int, takes: Callable
) -> None:
    # Of the kernels alone the list order peaks lower, but not with a large stack that waits from the beginning.
    ops = [op((0,), 1), op((0,), 2), op((2,), 3), op((1, 2), 4), op((1, 4), 5), op((3, 5), 6, name="scan"), op((6,), 7)]
    graph = graph_of(tuple(2 * NEGLIGIBLE * size for size in (0, 20, 9, 1, 20, 9, stack, 1)), ops, (0,))
    assert peak_of(in_order(graph, greedy(graph))) < peak_of(in_order(graph, depth_first(graph)))
    assert tpu_order(graph) == takes(graph)


def test_numbers_are_computed_apart_and_are_no_memory_but_those_that_kernels_make() -> None:
    ops = [
        op((0,), 1, kind=Kind.REDUCTION),
        op((1,), 2, kind=Kind.ELEMENTWISE),
        op((0, 2), 3, kind=Kind.ELEMENTWISE),
        op((3,), 4, kind=Kind.OPAQUE),
    ]
    graph = Graph((4000, 512, 512, 4000, 0), tuple(ops), (0,), (4,))
    apart = with_numbers_apart(graph, [1000, 1, 1, 1000, 0])
    assert [one.name == NUMBER for one in apart.ops] == [False, True, False, False]
    rates = Rates(bandwidth=1e12, flops={"float32": 1e14})
    kept = tpu.on_chip(Graph(apart.sizes, apart.ops, (0,), (4,), fused=True), numbers=frozenset({1, 2}), rates=rates)
    assert kept.sizes[1:3] == (tpu.PAGE, 0)


def test_a_product_writes_both_what_is_stored_in_two_bytes_and_what_is_widened_for_others() -> None:
    product, other = op((0,), 1, kind=Kind.PRODUCT), op((0,), 1, kind=Kind.REDUCTION)
    convert = op((1,), 2, kind=Kind.ELEMENTWISE, name="convert_element_type")
    for first, ops in ((product, 2), (other, 3)):
        graph = with_widened_beside(Graph((8, 8, 16, 1), (first, convert, op((1, 2), 3)), (0,), (3,), fused=True))
        assert len(graph.ops) == ops
        assert graph.ops[0].outputs == ((1, 2) if ops == 2 else (1,))


def array(*shape: int, dtype: jnp.dtype = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def normed(weights: list[jax.Array], x: jax.Array) -> list[jax.Array]:
    """One step that divides all gradients by the length of all."""

    def loss(weights: list[jax.Array]) -> jax.Array:
        out = x
        for weight in weights:
            out = jnp.tanh(out @ weight)
        return (out**2).mean()

    gradients = jax.grad(loss)(weights)
    length = jnp.sqrt(sum(jnp.sum(gradient**2) for gradient in gradients))
    return [weight - gradient / length for weight, gradient in zip(weights, gradients, strict=True)]


def allocated(fun: Callable, avals: list, donated: list[int], folder: Path) -> int:
    """Bytes that XLA allocates for a program, whatever libtpu reports of them."""
    measure_flat(fun, avals, donated=donated, target="v5e", dump_to=folder)
    return read_live_buffers(folder).allocated_bytes


def test_numbers_wait_in_pages_of_the_devices_memory(tmp_path: Path) -> None:
    target, flat = resolve_target("v5e"), [array(128, 128)] * 64 + [array(512, 128)]
    program = inline(jax.make_jaxpr(normed)(flat[:-1], flat[-1]), with_barriers=True, keep_names=False)
    graph = compiled(program, Rates(target.bandwidth, target.flops), (True,) * 64 + (False,), platform="tpu")
    found = allocated(lambda *args: normed(list(args[:-1]), args[-1]), flat, list(range(64)), tmp_path)
    assert found > 64 * tpu.PAGE
    assert allocated_by(graph, "tpu") == pytest.approx(found, rel=0.2)


@pytest.mark.parametrize("network", ["unseen/wavenet", "held_out/two_towers", "unseen/private"])
def test_memory_is_foreseen_in_the_compilers_order(network: str, tmp_path: Path) -> None:
    given, args, kwargs, options = load_step(Row(network, None, None, "v5e"))
    graph = remat_opt.optimize(given, target="v5e", verify=False, **options).prepare(*args, **kwargs).graph_as_given
    traced = jax.jit(given, **options).trace(*args, **kwargs)
    avals = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves((args, kwargs))]
    donated = [at for at, leaf in enumerate(jax.tree.leaves(traced.args_info)) if leaf.donated]
    found = allocated(compat.function_of_jaxpr(traced), avals, donated, tmp_path)
    assert allocated_by(graph, "tpu") == pytest.approx(found, rel=0.1)
