"""Graphs refuse what is no dataflow graph and know who makes and reads what; schedules add up their repeats."""

import random

import pytest
from hypothesis import given
from random_graphs import KINDS, Sketch, training_graph, unfused_training_graphs

from remat_opt.graph.fusion import fuse, materialised
from remat_opt.graph.graph import Graph, Kind, Op, chain
from remat_opt.graph.schedule import Run, Schedule, join_runs, save_everything
from remat_opt.graph.timeline import guards, timeline


def diamond() -> Graph:
    """x → a; a → b, c; b, c, b → d."""
    sketch = Sketch()
    x = sketch.input(1)
    a = sketch.op(x, size=2, seconds=1)
    b = sketch.op(a, size=3, seconds=10)
    c = sketch.op(a, size=4, seconds=100)
    d = sketch.op(b, c, b, size=5, seconds=1000)
    return sketch.graph(d)


# No dataflow graphs: sizes, ops, inputs, outputs, and what is said of them.
REFUSED = {
    "a cycle": ((1, 1), [((1,), (0,)), ((0,), (1,))], (), (1,), r"op 0 reads value 1.*cycle"),
    "an op that reads its result": ((1,), [((0,), (0,))], (), (0,), "op 0 reads value 0"),
    "an op before what it reads": (
        (1, 1, 1, 1), [((0,), (1,)), ((3,), (2,)), ((1,), (3,))], (0,), (2,), r"op 1 reads value 3.*stands too early"
    ),
    "a negative size": ((0, -3), [((), (0, 1))], (), (1,), "value 1 has -3"),
    "an output that nothing makes": ((1, 1), [((), (0,))], (), (0, 1), r"expected every output.*value 1 is not"),
    "a value of two ops": ((1, 1), [((), (0,)), ((), (1, 0))], (), (0,), "op 1 makes value 0 again"),
    "an input that is made": ((1, 1), [((), (1,)), ((), (0,))], (0,), (0,), "op 1 makes value 0 again"),
    "a result twice": ((1,), [((), (0, 0))], (), (0,), "value 0"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_what_is_no_dataflow_graph_is_refused(case: tuple) -> None:
    sizes, ops, inputs, outputs, said = case
    with pytest.raises(ValueError, match=said):
        Graph(sizes, tuple(Op(*op) for op in ops), inputs=inputs, outputs=outputs)


def test_an_input_may_be_an_output_and_nothing_need_be_read() -> None:
    graph = Graph((1, 1), (Op((), (1,)),), inputs=(0,), outputs=(0,))
    assert graph.producer == (-1, 0)
    assert graph.users == ((), ())


def test_flops_and_seconds_add_up_over_the_ops() -> None:
    assert (diamond().flops, diamond().seconds) == (1111, 1111)


@given(unfused_training_graphs())
def test_producer_and_users_say_the_same_as_the_ops(graph: Graph) -> None:
    made = {(value, index) for index, op in enumerate(graph.ops) for value in op.outputs}
    read = {(value, index) for index, op in enumerate(graph.ops) for value in op.inputs}
    assert {(value, index) for value, index in enumerate(graph.producer) if index >= 0} == made
    assert {(value, index) for value, users in enumerate(graph.users) for index in users} == read
    assert all(list(users) == sorted(set(users)) for users in graph.users)
    assert all(graph.producer[value] == -1 for value in graph.inputs)


def test_a_chain_hands_one_value_on() -> None:
    graph = chain([5, 6, 7], seconds=2.0)
    assert graph.sizes == (5, 6, 7)
    assert [(op.inputs, op.outputs) for op in graph.ops] == [((), (0,)), ((0,), (1,)), ((1,), (2,))]
    assert graph.outputs == (2,)
    assert graph.seconds == 6.0


def test_a_chain_of_elementwise_ops_becomes_part_of_the_kernel_that_reads_it() -> None:
    sketch = Sketch()
    x, scale = sketch.input(10), sketch.input(1)
    product = sketch.op(x, size=10, seconds=100, kind=Kind.CONTRACTION)
    scaled = sketch.elementwise(product, scale, size=10)
    activated = sketch.elementwise(scaled, size=10)
    total = sketch.op(activated, size=1, seconds=5, kind=Kind.REDUCTION)
    unread = sketch.elementwise(product, size=10)
    fusion = fuse(sketch.graph(total))
    assert [(op.inputs, op.outputs) for op in fusion.graph.ops] == [((x,), (product,)), ((product, scale), (total,))]
    assert fusion.op_of == (0, 3)
    assert fusion.virtual == {scaled: 1, activated: 2, unread: 4}
    assert [op.flops for op in fusion.graph.ops] == [100, 5 + 1 + 1]  # recomputing the sum recomputes its chain
    assert fusion.graph.sizes == sketch.graph(total).sizes


@given(unfused_training_graphs())
def test_a_fused_graph_has_the_stored_values_and_reads_their_sources(graph: Graph) -> None:
    stored = materialised(graph)
    kernels = [index for index, op in enumerate(graph.ops) if not op.outputs or any(stored[v] for v in op.outputs)]

    def sources(value: int) -> set[int]:
        maker = graph.producer[value]
        if maker < 0 or maker in kernels:  # a kernel stores all its results if it stores one
            return {value}
        return set().union(*map(sources, graph.ops[maker].inputs))

    fusion = fuse(graph)
    fused = fusion.graph
    assert all(materialised(fused))
    assert (fused.inputs, fused.outputs, fused.aliases) == (graph.inputs, graph.outputs, graph.aliases)
    assert list(fusion.op_of) == kernels
    for kernel, index in zip(fused.ops, fusion.op_of, strict=True):
        assert set(kernel.inputs) == set().union(*map(sources, graph.ops[index].inputs))
        assert kernel.outputs == graph.ops[index].outputs
    rest = [index for index in range(len(graph.ops)) if index not in kernels]
    assert fusion.virtual == {value: index for index in rest for value in graph.ops[index].outputs}


@pytest.mark.parametrize(
    ("read_again", "size", "stored"), [(False, 10, True), (True, 10, False), (False, 4, True), (False, 11, False)]
)
def test_the_last_sum_of_two_buffers_is_a_buffer_in_what_is_written(read_again: bool, size: int, stored: bool) -> None:
    sketch = Sketch()
    first, second = (sketch.op(sketch.input(1), size=10, kind=Kind.CONTRACTION) for _ in range(2))
    total = sketch.elementwise(sketch.elementwise(first, size=10), second, size=size)
    used = sketch.op(total, size=1, kind=Kind.REDUCTION)
    again = [sketch.op(first, size=1, kind=Kind.REDUCTION)] if read_again else []
    graph = sketch.graph(used, *again)
    fusion = fuse(graph, with_sums=True)
    assert fusion.sums == ({total} if stored else set())
    assert (total in fusion.virtual) is not stored
    assert fuse(graph).sums == set()
    assert total in fuse(graph).virtual


def test_what_a_compiler_does_not_compute_in_each_reader_is_a_buffer() -> None:
    sketch = Sketch()
    made = sketch.op(size=10, kind=Kind.CONTRACTION)
    shared, single, smaller = (sketch.elementwise(made, size=size) for size in (10, 10, 4))
    totals = [sketch.op(value, size=1, kind=Kind.REDUCTION) for value in (shared, shared, single, smaller, smaller)]
    graph = sketch.graph(*totals)
    assert set(fuse(graph).virtual) == {shared, single, smaller}
    assert set(fuse(graph, is_stored_if_shared=lambda op: op.outputs != (smaller,)).virtual) == {single, smaller}
    assert set(fuse(graph, is_stored_if_shared=lambda op: op.outputs == (single,)).virtual) == {shared, single, smaller}


def test_saving_everything_is_one_run_in_program_order() -> None:
    graph = diamond()
    schedule = save_everything(graph)
    assert schedule.runs == (Run((0, 1, 2, 3)),)
    assert schedule.order == (0, 1, 2, 3)
    assert schedule.recomputed == ()
    assert schedule.extra_flops(graph) == schedule.extra_seconds(graph) == 0


def test_each_repeat_is_paid_for() -> None:
    graph = diamond()
    schedule = Schedule((Run((0, 1, 2)), Run((0, 1), recomputed=True), Run((3,)), Run((1,), recomputed=True)))
    assert schedule.order == (0, 1, 2, 0, 1, 3, 1)
    assert schedule.recomputed == (0, 1, 1)
    assert schedule.extra_seconds(graph) == 21
    assert schedule.extra_flops(graph) == 21


def test_joining_drops_empty_runs_and_joins_neighbours_that_are_not_recomputed() -> None:
    runs = [Run((0,)), Run(()), Run((1,)), Run((), True), Run((0,), True), Run((1,), True), Run((2,)), Run((3,))]
    joined = join_runs(runs)
    # Two recomputed runs stay two: each has its own barrier.
    assert joined.runs == (Run((0, 1)), Run((0,), True), Run((1,), True), Run((2, 3)))


def test_the_boundary_of_a_recomputed_run() -> None:
    sketch = Sketch()
    x, weight = sketch.input(1), sketch.input(1)
    a = sketch.op(x, size=1)
    b, unread = sketch.ops_of(a, sizes=(1, 1))
    loss = sketch.op(b, size=1)
    cotangent = sketch.op(loss, b, size=1)
    output = sketch.op(cotangent, size=1)
    inner = sketch.op(cotangent, b, a, size=1)
    last = sketch.op(inner, weight, size=1)
    graph = sketch.graph(last, output)
    first, second, third = Run((0, 1, 2)), Run((3, 4)), Run((5, 6))
    schedule = Schedule((first, Run((1,), True), second, Run((0, 1), True), third))
    stages = timeline(graph, schedule)
    assert [stage.run for stage in stages] == list(schedule.runs)
    assert [stage.crossing is None for stage in stages] == [not run.recomputed for run in schedule.runs]
    one, two = stages[1].crossing, stages[3].crossing
    assert one.reads == (a,)
    assert one.makes == (b,)  # of its two results nobody reads the other
    assert one.waits == (loss,)  # not a and b: the next run makes them again before they are read
    assert one.window == ()
    assert two.reads == (x,)
    assert two.makes == (a, b)
    assert two.waits == (cotangent, output)  # the caller waits for the output
    assert two.window == (weight,)  # older, and read behind this barrier
    assert two.covered == (x, cotangent, output, weight)
    assert two.passed_on == (cotangent, output, weight)
    assert unread not in {*one.covered, *two.covered}


def test_a_schedule_has_every_op_once_and_reads_nothing_too_early() -> None:
    graph = chain([1, 1, 1])
    for runs in [(Run((0, 1)),), (Run((0, 1, 2, 2)),), (Run((0, 1)), Run((2,), True))]:
        with pytest.raises(ValueError, match="every op in exactly one run"):
            timeline(graph, Schedule(runs))
    with pytest.raises(ValueError, match="op 2 reads value 1 too early"):
        timeline(graph, Schedule((Run((0, 2, 1)),)))


@pytest.mark.parametrize(
    ("gradient_reads_it", "read_behind", "guarded"),
    [
        (False, True, True),  # nothing but the guard says that the reader comes first
        (True, True, False),  # the update waits for its gradient, and that for the reader
        (False, False, False),  # the reader's result is done with
    ],
)
def test_an_update_is_guarded_where_nothing_else_keeps_it_behind_the_last_reader(
    gradient_reads_it: bool, read_behind: bool, guarded: bool
) -> None:
    sketch = Sketch()
    weight = sketch.input(1)
    reader = sketch.op(weight, size=1)
    gradient = sketch.op(*([reader] if gradient_reads_it else []), size=1)
    before = sketch.op(reader, size=1)
    new = sketch.elementwise(weight, gradient, size=1)
    last = sketch.op(*([reader] if read_behind else [before]), size=1)
    graph = sketch.graph(new, last, donated={weight: new})
    assert guards(graph, save_everything(graph)) == ({graph.producer[new]: (weight, reader)} if guarded else {})
    assert guards(sketch.graph(new, last), save_everything(graph)) == {}


def test_random_graphs_have_all_that_the_laws_are_about() -> None:
    graphs = [training_graph(random.Random(seed), 8) for seed in range(100)]
    ops = [op for graph in graphs for op in graph.ops]
    assert {op.kind for op in ops} == set(KINDS)
    assert any(not op.repeatable for op in ops)
    assert any(len(op.outputs) > 1 for op in ops)
    assert any(graph.aliases for graph in graphs)
    assert any(not graph.aliases for graph in graphs)
    assert any(set(graph.outputs) & {v for op in graph.ops for v in op.inputs} for graph in graphs)
