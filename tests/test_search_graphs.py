"""`milp`, `lower_sets` and `feng_huang` as solvers of graphs, and the exact one against all schedules there are."""

import itertools
import os
import random
import subprocess
import sys
import warnings
from pathlib import Path

import milp
import pytest
from random_graphs import Sketch, training_chain, training_graph

from remat_opt.graph.graph import Graph, chain
from remat_opt.graph.liveness import simulate
from remat_opt.graph.schedule import Run, Schedule, join_runs
from remat_opt.graph.timeline import timeline
from remat_opt.search import Problem, Solution, Solver, feng_huang, lower_sets

SOLVERS = {"milp": milp.solve, "lower_sets": lower_sets.solve, "feng_huang": feng_huang.solve}
each_solver = pytest.mark.parametrize("solve", SOLVERS.values(), ids=SOLVERS.keys())


def random_problem(seed: int, most_layers: int = 8) -> Problem:
    source = random.Random(seed)
    return Problem(training_graph(source, source.randint(1, most_layers)))


def recompute(*ops: int) -> Run:
    return Run(ops, recomputed=True)


def check(problem: Problem, solution: Solution) -> None:
    """What a solution says of its schedule is what the liveness model says."""
    graph, schedule = problem.graph, solution.schedule
    timeline(graph, schedule)  # raises where a value is read too early
    assert [op for run in schedule.runs if not run.recomputed for op in run.ops] == list(problem.order)
    assert all(graph.ops[op].repeatable for op in schedule.recomputed)
    assert solution.peak == simulate(graph, schedule).peak
    assert solution.extra_seconds == schedule.extra_seconds(graph)


@each_solver
def test_minimum_memory_is_a_valid_schedule_and_never_worse_than_saving_everything(solve: Solver) -> None:
    lowered = 0
    for seed in range(60):
        problem = random_problem(seed)
        solution = solve(problem, None)
        check(problem, solution)
        assert solution.peak <= problem.plain.peak
        lowered += solution.peak < problem.plain.peak
    assert lowered > 10


@each_solver
def test_a_budget_is_kept_from_the_minimum_peak_to_the_plain_one(solve: Solver) -> None:
    for seed in range(30):
        problem = random_problem(seed)
        least = solve(problem, None)
        for share in (0.0, 0.3, 0.6, 0.9):
            budget = least.peak + int(share * (problem.plain.peak - least.peak))
            solution = solve(problem, budget)
            check(problem, solution)
            assert solution.peak <= budget
            assert solution.extra_seconds <= least.extra_seconds


@each_solver
def test_where_the_budget_cannot_be_reached_the_answer_is_the_minimum_peak(solve: Solver) -> None:
    for seed in range(20):
        least = solve(random_problem(seed), None)
        impossible = solve(random_problem(seed), max(least.peak - 1, 0))
        assert (impossible.peak, impossible.schedule) == (least.peak, least.schedule)


@each_solver
def test_where_the_plain_step_fits_nothing_is_recomputed(solve: Solver) -> None:
    problem = Problem(training_chain([1, 2, 3, 4]))
    assert solve(problem, problem.plain.peak) is problem.plain


@each_solver
def test_what_was_asked_before_changes_no_answer(solve: Solver) -> None:
    for seed in range(6):
        asked = random_problem(seed)
        budgets = [asked.plain.peak * share // 5 for share in range(1, 5)]
        for budget in budgets:
            solve(asked, budget)
        for budget in (None, *reversed(budgets)):
            assert solve(asked, budget).schedule == solve(random_problem(seed), budget).schedule


@each_solver
@pytest.mark.parametrize(
    "graph",
    [Graph((), ()), chain([3]), chain([3, 4, 5]), training_chain([1]), Graph((4,), (), inputs=(0,), outputs=(0,))],
    ids=["empty", "one op", "forward only", "one layer", "no op"],
)
def test_where_nothing_can_be_gained_the_step_stays_as_it_is(solve: Solver, graph: Graph) -> None:
    problem = Problem(graph)
    assert solve(problem, None).schedule == problem.plain.schedule


@each_solver
def test_ops_that_may_not_run_twice_are_not_repeated(solve: Solver) -> None:
    sketch = Sketch()
    values = [sketch.op(size=1)]
    for layer in range(6):
        values.append(sketch.op(values[-1], size=8, repeatable=layer % 2 == 0))
    cotangent = sketch.op(values[-1], size=1)
    for value in reversed(values):
        cotangent = sketch.op(cotangent, value, size=1)
    problem = Problem(sketch.graph(cotangent))
    solution = solve(problem, None)
    check(problem, solution)
    assert solution.peak < problem.plain.peak


DIGEST = """
import random
import milp
from random_graphs import training_graph
from remat_opt.search import Problem, feng_huang, lower_sets
for seed in range(8):
    for solver in (milp, lower_sets, feng_huang):
        problem = Problem(training_graph(random.Random(seed), 6))
        least = solver.solve(problem, None)
        middle = solver.solve(problem, (least.peak + problem.plain.peak) // 2)
        print(least.schedule, middle.schedule, sorted(middle.choice.saved))
"""


def test_the_schedules_are_the_same_under_every_hash_seed() -> None:
    here = Path(__file__).parent
    path = os.pathsep.join([str(here.parent), str(here)])
    printed = {
        subprocess.run(
            [sys.executable, "-c", DIGEST],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert len(printed) == 1
    assert "recomputed=True" in printed.pop()


def test_on_a_chain_all_find_the_segments_that_make_the_peak_least() -> None:
    # Nine layers of 9 bytes, plain: 9 results and 2 cotangents. Three segments: two results are saved, and two are made
    # again beside them, with two cotangents.
    problem = Problem(training_chain([9] * 9))
    assert problem.plain.peak == 11 * 9
    for name, solve in SOLVERS.items():
        peak = solve(problem, None).peak
        print(name, peak / 9)
        assert peak <= 7 * 9


# The exact search


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
    graphs = gained = count = 0
    for seed in itertools.count():
        if graphs == 300:
            break
        problem = Problem(small_graph(random.Random(seed)))
        if len(problem.order) < 4 or (every := schedules(problem, 600)) is None:
            continue
        graphs, count = graphs + 1, count + len(every)
        costs = [(simulate(problem.graph, schedule).peak, schedule.extra_seconds(problem.graph)) for schedule in every]
        least = milp.solve(problem, None)
        assert (least.peak, least.extra_seconds) == min(costs), seed
        gained += least.peak < problem.plain.peak
        for budget in sorted({peak for peak, _ in costs if least.peak <= peak < problem.plain.peak})[:3]:
            solution = milp.solve(problem, budget)
            assert solution.peak <= budget, seed
            assert solution.extra_seconds == min(seconds for peak, seconds in costs if peak <= budget), seed
    print(f"\n{graphs} graphs with {count} schedules; on {gained} of them the plain peak is not the least")
    assert gained >= 60


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


def test_milp_is_never_worse_than_the_others_and_their_distance() -> None:
    ratios: dict[str, list[float]] = {"lower_sets": [], "feng_huang": []}
    for seed in range(40):
        problem = random_problem(seed)
        least = milp.solve(problem, None)
        for name, peaks in ratios.items():
            peak = SOLVERS[name](problem, None).peak
            assert peak >= least.peak
            peaks.append(peak / max(least.peak, 1))
    print("\nLeast simulated peak over the optimum of all schedules:")
    for name, values in ratios.items():
        print(f"  {name}: mean {sum(values) / len(values):.3f}, most {max(values):.3f}")
