"""What holds of every solver of graphs: valid schedules, budgets, the same answer whenever and wherever it is asked."""

import random

import milp
import pytest
from checks import printed
from random_graphs import Sketch, training_chain, training_graph

from remat_opt.graph.graph import Graph, chain
from remat_opt.graph.liveness import simulate
from remat_opt.graph.timeline import timeline
from remat_opt.search import SOLVERS as OURS
from remat_opt.search import Problem, Solution

SOLVERS = {**OURS, "milp": milp.solve}  # and the oracle of the tests

each_solver = pytest.mark.parametrize("name", SOLVERS)
# A budget below the least of these asks for the least again; the others have more than one forward pass to spend.
OF_ONE_LEAST = ("feng_huang", "lower_sets", "milp")
# They model the graph as a chain: what they find for more memory may take more time.
OF_CHAINS = ("chen", "hong", "rotor")
SAVING_NOTHING = (85, 253, 850)  # graphs on which a segment was taken for nothing


def random_problem(seed: int, most_layers: int = 8) -> Problem:
    source = random.Random(seed)
    return Problem(training_graph(source, source.randint(1, most_layers)))


def check(problem: Problem, solution: Solution) -> None:
    """What a solution says of its schedule is what the liveness model says."""
    graph, schedule = problem.graph, solution.schedule
    timeline(graph, schedule)  # raises where a value is read too early
    assert [op for run in schedule.runs if not run.recomputed for op in run.ops] == list(problem.order)
    assert all(graph.ops[op].repeatable for op in schedule.recomputed)
    assert solution.peak == simulate(graph, schedule).peak
    assert solution.extra_seconds == schedule.extra_seconds(graph)


@each_solver
def test_schedules_are_valid_never_worse_than_plain_and_within_budgets(name: str) -> None:
    solve, lowered = SOLVERS[name], 0
    for seed in (*range(16), *SAVING_NOTHING):
        problem = random_problem(seed, 8 if name in OF_ONE_LEAST else 12)
        plain, least = problem.plain.peak, solve(problem, None)
        check(problem, least)
        assert least.peak <= plain
        assert least.peak < plain or least.extra_seconds == 0, "expected no recomputation where it saves nothing"
        lowered += least.peak < plain
        for share in (0.0, 0.3, 0.6, 0.9):
            budget = least.peak + int(share * (plain - least.peak))
            found = solve(problem, budget)
            check(problem, found)
            assert found.peak <= budget
            assert name in OF_CHAINS or found.extra_seconds <= least.extra_seconds
        impossible = solve(problem, max(least.peak - 1, 0))
        check(problem, impossible)
        assert impossible.peak <= least.peak
        assert name not in OF_ONE_LEAST or (impossible.peak, impossible.schedule) == (least.peak, least.schedule)
        assert not solve(problem, plain).schedule.recomputed
    assert lowered > 5


NOTHING_TO_GAIN = [Graph((), ()), chain([3]), chain([3, 4]), chain([5, 1, 1]), training_chain([4])]
NOTHING_TO_GAIN += [training_chain([0, 0, 0]), Graph((4,), (), inputs=(0,), outputs=(0,))]


@each_solver
def test_where_nothing_can_be_gained_the_step_stays_as_it_is(name: str) -> None:
    for graph in NOTHING_TO_GAIN:
        problem = Problem(graph)
        for budget in (None, 0, 1000):
            assert SOLVERS[name](problem, budget).schedule == problem.plain.schedule


@each_solver
def test_ops_that_may_not_run_twice_are_not_repeated(name: str) -> None:
    sketch = Sketch()
    values = [sketch.op(size=1)]
    for layer in range(6):
        values.append(sketch.op(values[-1], size=8, repeatable=layer % 2 == 0))
    cotangent = sketch.op(values[-1], size=1)
    for value in reversed(values):
        cotangent = sketch.op(cotangent, value, size=1)
    problem = Problem(sketch.graph(cotangent))
    solution = SOLVERS[name](problem, None)
    check(problem, solution)
    assert solution.peak < problem.plain.peak


@each_solver
def test_on_a_chain_all_find_segments(name: str) -> None:
    # Nine layers of 9 bytes, plain: 9 results and 2 cotangents. Three segments: two results are saved, and two are made
    # again beside them, with two cotangents.
    problem = Problem(training_chain([9] * 9))
    assert problem.plain.peak == 11 * 9
    assert SOLVERS[name](problem, None).peak <= 7 * 9


@pytest.mark.parametrize("name", sorted(set(SOLVERS) - set(OF_ONE_LEAST)))
def test_the_more_memory_the_less_time_on_a_long_chain(name: str) -> None:
    problem = Problem(training_chain([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]))
    least = SOLVERS[name](problem, None)
    budgets = [least.peak + (problem.plain.peak - least.peak) * step // 8 for step in range(9)]
    seconds = [SOLVERS[name](problem, budget).extra_seconds for budget in budgets]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[4] > seconds[-1] == 0


@each_solver
def test_what_was_asked_before_changes_no_answer(name: str) -> None:
    for seed in range(3):
        asked = random_problem(seed)
        budgets = [asked.plain.peak * share // 5 for share in range(1, 5)]
        alone = {budget: SOLVERS[name](random_problem(seed), budget).schedule for budget in (*budgets, None)}
        for budget in (*budgets, None, *reversed(budgets)):
            assert SOLVERS[name](asked, budget).schedule == alone[budget]


ANSWERS = """
from random_graphs import training_chain
from test_search_solvers import SOLVERS, Problem, random_problem
from test_segments import two_humps
for name, solve in SOLVERS.items():
    graphs = [two_humps(9), training_chain([3, 5, 3, 5, 5, 5, 3, 3])] if name != "milp" else []
    for problem in [*map(random_problem, range(4)), *map(Problem, graphs)]:
        for budget in (None, problem.plain.peak * 4 // 5):
            solution = solve(problem, budget)
            print(solution.schedule, sorted(solution.choice.saved), solution.choice.boundaries, solution.choice.cuts)
"""


def test_the_same_graph_gives_the_same_schedule_under_every_hash_seed() -> None:
    first, second = (printed(ANSWERS, PYTHONHASHSEED=seed) for seed in "12")
    assert first == second
    assert "recomputed=True" in first
