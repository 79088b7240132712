"""What is live when: peaks counted by hand, and agreement with a slow simulator written from the documented rules."""

import dataclasses
import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import Sketch, graphs_with_choices, training_chain, training_graphs, unfused_training_graphs

from remat_opt.graph.derive import Choice, derive, early_order
from remat_opt.graph.fusion import MOST_SOURCES, fuse, materialised
from remat_opt.graph.graph import Graph, Kind, Op, chain
from remat_opt.graph.liveness import Buffer, minimum_possible, simulate
from remat_opt.graph.schedule import Run, Schedule, save_everything


def live_bytes(graph: Graph, *runs: Run) -> list[int]:
    """Bytes at each position; without runs, of the program as it was written.

    Runs and positions are those of the kernels: elementwise ops that are fused into their readers have none.
    """
    graph = fuse(graph).graph
    schedule = Schedule(runs) if runs else save_everything(graph)
    return simulate(graph, schedule).live.tolist()


def test_values_that_are_no_buffers_are_refused() -> None:
    sketch = Sketch()
    virtual = sketch.elementwise(sketch.op(size=1), size=1)
    graph = sketch.graph(sketch.op(virtual, size=1, kind=Kind.REDUCTION))
    with pytest.raises(ValueError, match="values are all buffers"):
        simulate(graph, save_everything(graph))


def test_a_schedule_that_cannot_run_is_refused() -> None:
    graph = chain([1, 1, 1])
    with pytest.raises(ValueError, match="every op in exactly one run"):
        simulate(graph, Schedule((Run((0, 1)),)))
    with pytest.raises(ValueError, match="value 1 is read at position 1, too early"):
        simulate(graph, Schedule((Run((0, 2, 1)),)))
    with pytest.raises(ValueError, match="value 0 is read at position 1, too early"):
        simulate(graph, Schedule((Run((1,), recomputed=True), Run((0, 1, 2)))))


def recompute(*ops: int) -> Run:
    return Run(ops, recomputed=True)


def test_a_chain_holds_two_neighbours_at_a_time() -> None:
    # The last value is the step's result and costs nothing; the last position is the return.
    assert live_bytes(chain([3, 5, 2, 7])) == [3, 8, 7, 2, 0]


def test_a_training_chain_holds_its_results_until_their_backward() -> None:
    # Results 10, 20, 30; the loss's cotangent 30; then the cotangents of 20, of 10, and the returned one.
    assert live_bytes(training_chain([10, 20, 30])) == [10, 30, 60, 90, 110, 60, 20, 0]


def test_what_is_held_counts_until_the_return() -> None:
    graph = dataclasses.replace(fuse(chain([3, 5, 2, 7])).graph, held=frozenset({3}))
    assert simulate(graph, save_everything(graph)).live.tolist() == [3, 8, 7, 9, 7]
    assert minimum_possible(graph) == 9


def test_nothing_runs_nothing_lives() -> None:
    result = simulate(Graph((4,), (), inputs=(0,), outputs=(0,)), Schedule(()))
    assert result.live.tolist() == [0]
    assert result.peak == result.peak_position == 0


def test_a_virtual_value_costs_nothing_and_keeps_its_sources_alive() -> None:
    sketch = Sketch()
    a = sketch.op(size=10)
    b = sketch.op(size=20)
    virtual = sketch.elementwise(a, b, size=1000)
    longer = sketch.elementwise(virtual, size=1000)
    c = sketch.op(size=5)  # reads neither of them
    total = sketch.op(longer, c, size=1, kind=Kind.REDUCTION)
    assert live_bytes(sketch.graph(total)) == [10, 30, 35, 35, 0]


@pytest.mark.parametrize(
    ("reader", "live"),
    [
        (Kind.REDUCTION, [10, 15, 5, 0]),  # fused into the reduction: only its source is held
        (Kind.ELEMENTWISE, [10, 10, 0]),  # never stored, nor is what reads it
        (Kind.CONTRACTION, [10, 110, 105, 5, 0]),  # operands of library products are stored
        (Kind.OPAQUE, [10, 110, 105, 5, 0]),
    ],
)
def test_the_reader_decides_whether_an_elementwise_result_is_stored(reader: Kind, live: list[int]) -> None:
    sketch = Sketch()
    a = sketch.op(size=10)
    b = sketch.elementwise(a, size=100)
    c = sketch.op(b, size=5, kind=reader)
    assert live_bytes(sketch.graph(sketch.op(c, size=1, kind=Kind.REDUCTION))) == live


def test_an_update_costs_a_buffer_only_while_the_donated_argument_is_still_read() -> None:
    """A donated weight of 50 bytes, its update, and another op that reads the old weight; then an op of 7 bytes."""
    sketch = Sketch()
    weight = sketch.input(50)
    gradient = sketch.op(size=50)
    new = sketch.elementwise(weight, gradient, size=50)
    last = sketch.op(sketch.op(sketch.op(weight, size=3), size=7), size=1)
    # Two buffers of 50 at op 1; from op 3 on nobody reads the old weight and its place can be taken.
    assert live_bytes(sketch.graph(new, last, donated={weight: new})) == [50, 100, 53, 10, 7, 0]


def test_a_recomputed_run_frees_the_first_instance_after_its_last_use_before() -> None:
    graph = training_chain([10, 20, 30])
    # Forward 0 1 2, loss 3, backward 4 5 6. Results 10 and 20 are recomputed before the last two backward ops.
    runs = (Run((0, 1, 2, 3, 4)), recompute(0, 1), Run((5, 6)))
    #  op    0   1   2   3   4  barrier 0   1   5   6  return
    assert live_bytes(graph, *runs) == [10, 30, 50, 80, 100, 20, 30, 50, 60, 20, 0]


def test_the_peak_can_be_looked_into() -> None:
    graph = training_chain([10, 20, 30])
    result = simulate(graph, save_everything(graph))
    assert (result.peak, result.peak_position) == (110, 4)
    # Results 1, 2, 3 (10, 20, 30 bytes), the cotangent 4 of result 3, the cotangent 5 of result 2.
    assert [(buffer.value, buffer.size) for buffer in result.at(4)] == [(3, 30), (4, 30), (2, 20), (5, 20), (1, 10)]
    assert result.at(7) == []


def test_a_buffer_knows_its_reads() -> None:
    buffer = Buffer(value=0, size=1, birth=2, reads=(4, 4, 7))
    assert buffer.death == 7
    assert Buffer(value=0, size=1, birth=2, reads=()).death == 2


@given(training_graphs(), st.booleans())
def test_buffers_add_up_to_the_live_bytes(graph: Graph, overwriting: bool) -> None:
    graph = in_place(graph) if overwriting else graph
    result = simulate(graph, save_everything(graph))
    assert [sum(buffer.size for buffer in result.at(t)) for t in range(len(result.live))] == result.live.tolist()


def in_place(graph: Graph) -> Graph:
    """The same graph, whose ops read all their operands at the place where they write."""
    ops = tuple(dataclasses.replace(op, same_place=op.inputs) for op in graph.ops)
    return dataclasses.replace(graph, ops=ops)


@settings(max_examples=300)
@given(graphs_with_choices(max_layers=7), st.booleans())
def test_the_simulation_agrees_with_the_rules_read_slowly(drawn: tuple[Graph, Choice], overwriting: bool) -> None:
    graph, choice = drawn
    graph = in_place(graph) if overwriting else graph
    schedule = derive(graph, choice, early_order(graph))
    assert simulate(graph, schedule).live.tolist() == SlowSimulation(graph, schedule).live()


def test_a_result_is_written_over_an_operand_of_its_size_that_nobody_reads_later() -> None:
    sketch = Sketch()
    made = sketch.op(size=10)
    square = sketch.elementwise(made, size=10)
    graph = fuse(sketch.graph(sketch.op(sketch.op(square, size=4), size=1))).graph
    schedule = save_everything(graph)
    assert simulate(graph, schedule).live.tolist() == [10, 20, 14, 4, 0]
    assert simulate(in_place(graph), schedule).live.tolist() == [10, 10, 14, 4, 0]
    assert simulate(in_place(graph), schedule).at(1) == [Buffer(1, 10, 1, (2,))]
    assert minimum_possible(in_place(graph)) == 14
    later = dataclasses.replace(in_place(graph), outputs=(made, *graph.outputs), held=frozenset([made]))
    assert simulate(later, schedule).live[1] == 20  # what is read later stays


def test_what_a_kernel_reads_behind_a_barrier_of_its_own_is_not_written_over() -> None:
    ops = (
        Op((0,), (1,), Kind.OPAQUE),
        Op((1,), (2,), Kind.ELEMENTWISE, same_place=(1,)),
        Op((2,), (3,), Kind.ELEMENTWISE, same_place=(2,)),
        Op((3,), (4,), Kind.REDUCTION),
        Op((3, 2, 4), (5,), Kind.ELEMENTWISE, same_place=(3,)),
        Op((5,), (6,), Kind.OPAQUE),
    )
    graph = Graph((10, 10, 10, 10, 1, 10, 1), ops, inputs=(0,), outputs=(6,), fused=True)
    # Op 1, run again, reads value 1 through the run's barrier; op 4 reads value 3 behind one that waits for op 3.
    again = Schedule((Run((0, 1, 2)), recompute(1), Run((3, 4, 5))))
    assert simulate(graph, again).live.tolist() == [10, 20, 30, 20, 30, 21, 31, 10, 0]
    # If the reduction does not read value 3, op 4 reads that as it was before the run's barrier.
    alone = dataclasses.replace(graph, ops=(*ops[:3], Op((2,), (4,), Kind.REDUCTION), *ops[4:]))
    assert simulate(alone, again).live.tolist() == [10, 20, 20, 20, 30, 21, 21, 10, 0]
    assert simulate(graph, save_everything(graph)).live.tolist() == [10, 10, 20, 21, 21, 10, 0]


def test_a_kernel_writes_over_what_it_reads_at_the_same_place_alone() -> None:
    sketch = Sketch()
    here, turned = sketch.op(size=8), sketch.op(size=8)
    transposed = sketch.elementwise(turned, size=8)
    both = sketch.elementwise(here, transposed, size=8)
    graph = sketch.graph(sketch.op(both, size=1))
    ops = [dataclasses.replace(op, same_place=(here, transposed) if op.outputs == (both,) else ()) for op in graph.ops]
    graph = dataclasses.replace(graph, ops=tuple(ops))

    def places(**options) -> list[tuple[int, ...]]:
        return [op.same_place for op in fuse(graph, **options).graph.ops if op.outputs == (both,)]

    assert places(overwrites=True) == [(here,)]
    assert places(overwrites=True, in_tuples={here}) == places() == [()]


def test_no_schedule_needs_less_than_one_op() -> None:
    assert minimum_possible(chain([3, 5, 2, 7])) == 8
    assert minimum_possible(training_chain([10, 20, 30])) == 110 - 10  # the cotangent of 20 is made of 30, its and 20


@settings(max_examples=300)
@given(graphs_with_choices(max_layers=7))
def test_the_minimum_possible_peak_is_below_that_of_any_schedule(drawn: tuple[Graph, Choice]) -> None:
    graph, choice = in_place(drawn[0]), drawn[1]
    assert minimum_possible(graph) <= simulate(graph, derive(graph, choice, early_order(graph))).peak


@given(unfused_training_graphs())
def test_results_and_operands_that_need_a_buffer_are_stored_and_single_reads_are_not(graph: Graph) -> None:
    has_few_buffers = sum(materialised(graph)) <= MOST_SOURCES
    for value, stored in enumerate(materialised(graph)):
        made_by = [op.kind for op in graph.ops if value in op.outputs]
        read_by = [op.kind for op in graph.ops if value in op.inputs]
        virtual = made_by == [Kind.ELEMENTWISE] and graph.ops[graph.producer[value]].repeatable
        virtual = virtual and value not in graph.outputs
        virtual = virtual and Kind.CONTRACTION not in read_by and Kind.OPAQUE not in read_by
        if not virtual:
            assert stored
        elif len(read_by) <= 1 and has_few_buffers:  # fused into its one reader it costs no traffic
            assert not stored


@pytest.mark.parametrize(
    ("readers", "source", "size", "stored"),
    [
        (2, 90, 30, False),  # fusing reads 2 · 90; storing reads 90, writes 30, reads 2 · 30: equal
        (2, 91, 30, True),
        (3, 60, 30, False),  # 3 · 60 against 60 + 30 + 3 · 30: equal
        (3, 61, 30, True),
        (5, 30, 30, False),  # as large as what it is made of: dearer to store than to make again
    ],
)
def test_a_value_that_is_expensive_to_fuse_is_stored(readers: int, source: int, size: int, stored: bool) -> None:
    sketch = Sketch()
    cheap = sketch.elementwise(sketch.op(size=source), size=size)
    totals = [sketch.op(cheap, size=1, kind=Kind.REDUCTION) for _ in range(readers)]
    assert materialised(sketch.graph(*totals))[cheap] is stored


class SlowSimulation:
    """The documented rules, one moment and one value at a time.

    A step is a list of moments: each op that runs, each barrier, the return. An *instance* is a value and the moment at
    which it was made (−1 for arguments). Every question is answered by looking through all moments.
    """

    def __init__(self, graph: Graph, schedule: Schedule):
        self.graph = graph
        self.moments: list[tuple[str, int]] = []  # ("op", its index) or ("barrier", index of its run)
        self.barrier_runs = schedule.runs
        for index, run in enumerate(schedule.runs):
            self.moments += [("barrier", index)] if run.recomputed else []
            self.moments += [("op", op) for op in run.ops]
        self.end = len(self.moments)

    def made(self, moment: int) -> tuple[int, ...]:
        what, index = self.moments[moment]
        return self.graph.ops[index].outputs if what == "op" else ()

    def reads(self, moment: int) -> tuple[int, ...]:
        if moment == self.end:
            return self.graph.outputs
        what, index = self.moments[moment]
        return self.graph.ops[index].inputs if what == "op" else self.covered(moment)

    def is_read_again(self, value: int, moment: int) -> bool:
        """By an op after a moment, or by the caller, before it is recomputed."""
        for later in range(moment + 1, self.end):
            if self.moments[later][0] == "op" and value in self.reads(later):
                return True
            if value in self.made(later):
                return False
        return value in self.graph.outputs

    def run_length(self, barrier: int) -> int:
        return len(self.barrier_runs[self.moments[barrier][1]].ops)

    @functools.cache  # noqa: B019
    def covered(self, barrier: int) -> tuple[int, ...]:
        stop = barrier + 1 + self.run_length(barrier)
        made_inside = {v for t in range(barrier + 1, stop) for v in self.made(t)}
        reads, waits, window = set(), set(), set()
        known: set[int] = set()
        for t in range(barrier + 1, stop):
            reads.update(v for v in self.reads(t) if v not in known)
            known.update(self.made(t))
        others = [t for t in range(barrier) if self.moments[t][0] == "barrier"]
        since = others[-1] + 1 + self.run_length(others[-1]) if others else 0
        fresh = {v for t in range(since, barrier) for v in self.made(t)}
        waits.update(v for v in fresh - made_inside if self.is_read_again(v, stop - 1))
        newer = fresh | made_inside
        for t in range(stop, self.end):
            if self.moments[t][0] == "barrier":
                break
            window.update(v for v in self.reads(t) if v not in newer)
            newer = newer | set(self.made(t))
        return tuple(reads | waits | window)

    @functools.cache  # noqa: B019
    def instance(self, value: int, moment: int) -> tuple[int, int]:
        """The one that is read at a moment: the newest that was made before."""
        for earlier in range(moment - 1, -1, -1):
            if value in self.made(earlier):
                return value, earlier
        assert value in self.graph.inputs
        return value, -1

    @functools.cache  # noqa: B019
    def last_needed(self, instance: tuple[int, int]) -> int:
        for moment in range(self.end, instance[1], -1):
            if any(instance == self.instance(value, moment) for value in self.reads(moment)):
                return moment
        return instance[1]

    def buffers(self) -> list[tuple[int, int]]:
        return [(value, moment) for moment in range(self.end) for value in self.made(moment)]

    def life(self, instance: tuple[int, int]) -> range:
        """The moments at which a buffer counts."""
        value, birth = instance
        until = self.last_needed(instance)
        if value in self.graph.outputs and self.instance(value, self.end) == instance:
            given = {output: argument for argument, output in self.graph.aliases}.get(value)
            until = -1 if given is None else self.last_needed((given, -1))
            until = until if until > birth else -1
        return range(birth, until + 1)

    def overwritten(self, moment: int) -> list[int]:
        """The sizes of what an op writes its result over, of which there is one at most."""
        what, index = self.moments[moment]
        op = self.graph.ops[index]
        if what != "op" or len(op.outputs) != 1 or not self.life((op.outputs[0], moment)):
            return []
        if any(op.outputs[0] in other.inputs and other.kind is Kind.REDUCTION for other in self.graph.ops):
            return []
        operands = [self.instance(value, moment) for value in op.same_place if value not in self.graph.inputs]
        dying = [(value, birth) for value, birth in operands if self.life((value, birth)) == range(birth, moment + 1)]
        size = self.graph.sizes[op.outputs[0]]
        fit = [one for one in dying if self.graph.sizes[one[0]] == size]
        return [size for one in fit if not self.is_behind_barrier(one, moment)][:1]

    def is_behind_barrier(self, instance: tuple[int, int], moment: int) -> bool:
        """Whether the op at a moment reads a buffer behind a barrier: of its recomputed run, or one for it alone."""
        before = [at for at in range(moment) if self.moments[at][0] == "barrier"]
        if not before:
            return False
        if moment <= before[-1] + self.run_length(before[-1]) and instance[1] < before[-1]:
            return True
        reductions = (at for at in range(before[-1] + 1, moment) if self.is_reduction(at))
        return any(instance[0] in self.reads(at) and self.instance(instance[0], at) == instance for at in reductions)

    def is_reduction(self, moment: int) -> bool:
        what, index = self.moments[moment]
        return what == "op" and self.graph.ops[index].kind is Kind.REDUCTION

    def live(self) -> list[int]:
        lives = [(self.graph.sizes[instance[0]], self.life(instance)) for instance in self.buffers()]
        for moment in range(self.end):
            lives += [(-size, range(moment, moment + 1)) for size in self.overwritten(moment)]
        return [sum(size for size, life in lives if moment in life) for moment in range(self.end + 1)]
