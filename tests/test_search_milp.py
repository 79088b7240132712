"""The exact search, against all schedules that there are."""

import itertools
import random
import warnings

import milp
import pytest
from random_graphs import Sketch, training_chain, training_graph

from remat_opt.graph.graph import Graph
from remat_opt.graph.liveness import simulate
from remat_opt.graph.schedule import Run, Schedule, join_runs
from remat_opt.search import Problem


def recompute(*ops: int) -> Run:
    return Run(ops, recomputed=True)


def hand_typed() -> Graph:
    """Two layers of 10 bytes, the second expensive; the plain peak is that of its backward: both results and
    cotangents."""
    sketch = Sketch()
    data = sketch.input(10)
    first = sketch.op(data, size=10)
    second = sketch.op(first, size=10, seconds=5)
    loss = sketch.op(second, size=1)
    back = sketch.op(loss, second, first, size=10)
    return sketch.graph(sketch.op(back, first, data, size=10))


def test_milp_on_a_graph_typed_by_hand() -> None:
    # Plain: 10 + 10 + 1 + 10 bytes in op 3. Nothing is gained there by making the first result again, since the second
    # is made from it, and the backward reads both.
    problem = Problem(hand_typed())
    assert problem.plain.peak == 31
    assert milp.solve(problem, None).schedule == problem.plain.schedule


def test_milp_recomputes_a_cheap_branch_and_keeps_the_expensive_one() -> None:
    sketch = Sketch()
    data = sketch.input(1)
    expensive = sketch.op(data, size=10, seconds=9)
    cheap = sketch.op(data, size=10, seconds=1)
    bottom = sketch.op(expensive, cheap, size=1)
    wide = sketch.op(bottom, size=20)
    narrow = sketch.op(wide, size=1)
    graph = sketch.graph(sketch.op(narrow, expensive, cheap, size=1))
    problem = Problem(graph)
    assert problem.plain.peak == 10 + 10 + 1 + 20
    solution = milp.solve(problem, 31)
    assert solution.schedule.runs == (Run((0, 1, 2, 3, 4)), recompute(1), Run((5,)))
    assert (solution.peak, solution.extra_seconds) == (31, 1)
    assert solution.choice.saved == {expensive, narrow}
    # With no budget both are recomputed: 20 + 1 bytes in op 4, 10 + 10 + 1 in ops 2 and 5 (what it returns is free).
    least = milp.solve(problem, None)
    assert (least.peak, least.extra_seconds) == (21, 10)


def schedules(problem: Problem, most: int) -> list[Schedule] | None:
    """All schedules in which each op runs again at most once before any other, and every repeat is read; None if there
    are more than `most`."""
    graph, order = problem.graph, problem.order
    outputs = set(graph.outputs)
    can_recompute = [graph.ops[op].repeatable and not outputs.issuperset(graph.ops[op].outputs) for op in order]
    found: list[Schedule] = []

    def from_the_end(place: int, stage: int, read: set[int], repeats: list[int], runs: list[Run]) -> None:
        """`place` is the next op that may be repeated before the first run of op `stage`."""
        if len(found) > most:
            return
        if place < 0:
            runs = [*runs, Run((order[stage],)), recompute(*reversed(repeats))]
            if stage:
                op = graph.ops[order[stage - 1]]
                from_the_end(stage - 2, stage - 1, read - {*op.outputs} | {*op.inputs}, [], runs)
            else:
                found.append(join_runs(reversed(runs)))
            return
        from_the_end(place - 1, stage, read, repeats, runs)
        op = graph.ops[order[place]]
        if can_recompute[place] and not read.isdisjoint(op.outputs):
            read = read - {*op.outputs} | {*op.inputs}
            from_the_end(place - 1, stage, read, [*repeats, order[place]], runs)

    last = graph.ops[order[-1]]
    from_the_end(len(order) - 2, len(order) - 1, outputs - {*last.outputs} | {*last.inputs}, [], [])
    return found if len(found) <= most else None


def small_graph(source: random.Random) -> Graph:
    """Forward and backward of two or three layers, a training graph, or any graph at all, of few ops."""
    kind = source.random()
    if kind < 0.2:
        return training_graph(source, source.randint(1, 4))
    sketch = Sketch()
    values: list[int] = []
    if kind < 0.4:
        for _ in range(source.randint(4, 8)):
            reads = source.sample(values, min(len(values), source.randint(0, 3)))
            sizes = [source.randint(0, 9) for _ in range(source.choice([1, 1, 1, 2]))]
            seconds, repeatable = source.randint(0, 5), source.random() > 0.1
            values += sketch.ops_of(*reads, sizes=sizes, seconds=seconds, repeatable=repeatable)
        return sketch.graph(*source.sample(values, 2))
    layers = 2 if source.random() < 0.8 else 3
    for _ in range(layers):
        reads = source.sample(values[-2:], min(len(values), source.randint(1, 2)))
        values.append(sketch.op(*reads, size=source.randint(0, 9), seconds=source.randint(0, 5)))
    cotangent = sketch.op(values[-1], size=source.randint(0, 9))
    for _ in range(layers):
        cotangent = sketch.op(cotangent, *source.sample(values, source.randint(1, 2)), size=source.randint(0, 9))
    return sketch.graph(cotangent)


def test_milp_finds_the_minimum_peak_and_the_minimum_time_of_all_schedules() -> None:
    graphs = gained = 0
    for seed in itertools.count():
        if graphs == 100:
            break
        problem = Problem(small_graph(random.Random(seed)))
        if len(problem.order) < 4 or (every := schedules(problem, 600)) is None:
            continue
        graphs += 1
        costs = [(simulate(problem.graph, schedule).peak, schedule.extra_seconds(problem.graph)) for schedule in every]
        least = milp.solve(problem, None)
        assert (least.peak, least.extra_seconds) == min(costs), seed
        gained += least.peak < problem.plain.peak
        for budget in sorted({peak for peak, _ in costs if least.peak <= peak < problem.plain.peak})[:3]:
            solution = milp.solve(problem, budget)
            assert solution.peak <= budget, seed
            assert solution.extra_seconds == min(seconds for peak, seconds in costs if peak <= budget), seed
    assert gained >= 20


def test_milp_says_when_it_ran_out_of_time() -> None:
    problem = Problem(training_graph(random.Random(6), 24))
    with pytest.warns(milp.OutOfTime, match="0 seconds"):
        solution = milp.solve(problem, None, time_limit=0)
    assert solution.schedule == problem.plain.schedule
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        milp.solve(Problem(hand_typed()), None)


def test_milp_refuses_graphs_that_it_would_never_finish() -> None:
    with pytest.raises(ValueError, match="at most 200 ops"):
        milp.solve(Problem(training_chain([1] * 200)), None)
