"""`chen`, `hong` and `rotor` as solvers of graphs, by hand; `test_search_solvers.py` has what holds of all."""

import collections
import itertools
import random

import numpy as np
import pytest
from random_graphs import training_chain
from test_search_solvers import check, random_problem

from remat_opt.graph.schedule import Run
from remat_opt.search import Problem, Solution, chen, hong, rotor
from remat_opt.search.nested import Held, NestedPlan, nested_solution
from remat_opt.search.segments import Option, Plan, choice_of, in_slots
from remat_opt.search.stages import Plans, Stages, stages_before_peak

SOLVERS = {"chen": chen.solve, "hong": hong.solve, "rotor": rotor.solve}


def recompute(*ops: int) -> Run:
    return Run(ops, recomputed=True)


def stages_of(problem: Problem, most: int = 60) -> Stages:
    stages = stages_before_peak(problem, most)
    assert stages is not None
    return stages


# Chains of unit values: the plain step of n layers holds n results and two cotangents.


def test_chen_by_hand() -> None:
    problem = Problem(training_chain([1] * 9))
    assert problem.plain.peak == 11
    solution = chen.solve(problem, None)
    # Two segments, of five and six ops; the second is not recomputed.
    assert solution.choice.saved == {5}
    runs = (Run(tuple(range(14))), recompute(0, 1, 2, 3), Run((14, 15, 16, 17, 18)))
    assert solution.schedule.runs == runs
    assert (solution.peak, solution.extra_seconds) == (7, 4.0)


def test_hong_by_hand() -> None:
    problem = Problem(training_chain([1] * 9))
    solution = hong.solve(problem, None)
    # Longer segments first: the checkpoints behind a segment are free when it runs backward.
    assert solution.choice.saved == {3, 6, 8}
    assert solution.schedule.runs == (
        Run(tuple(range(11))),
        recompute(6),
        Run((11, 12)),
        recompute(3, 4),
        Run((13, 14, 15)),
        recompute(0, 1),
        Run((16, 17, 18)),
    )
    assert (solution.peak, solution.extra_seconds) == (6, 5.0)


def test_rotor_by_hand() -> None:
    problem = Problem(training_chain([1] * 9))
    solution = rotor.solve(problem, None)
    # Everything from the start, two layers at a time: what is made on the way is evicted, and recomputed.
    assert solution.schedule.runs == (
        Run(tuple(range(10))),
        recompute(7),
        Run((10, 11)),
        recompute(0, 1, 2, 3, 4, 5),
        Run((12, 13)),
        recompute(0, 1, 2, 3),
        Run((14, 15)),
        recompute(0, 1),
        Run((16, 17, 18)),
    )
    assert (solution.peak, solution.extra_seconds) == (5, 13.0)


def test_an_op_may_run_again_several_times_and_a_long_chain_needs_no_more_memory_than_a_short_one() -> None:
    found = {layers: rotor.solve(Problem(training_chain([1] * layers)), None) for layers in (9, 30)}
    assert found[9].peak == found[30].peak == 5
    assert max(collections.Counter(found[30].schedule.recomputed).values()) > 5
    budget = 8
    nested = rotor.solve(Problem(training_chain([1] * 30)), budget)
    assert nested.peak <= budget < hong.solve(Problem(training_chain([1] * 30)), None).peak
    assert nested.extra_seconds < found[30].extra_seconds / 2


def test_a_nested_plan_is_followed() -> None:
    # Stages are single ops here. First the inputs of 0, 3 and 5 are saved; stages 5 and 6 are kept.
    stages = stages_of(Problem(training_chain([1] * 6)))
    plan = NestedPlan(
        Held((0, 3, 5), (5, 6)),
        {4: Held((3, 4), (4,)), 3: Held((3,), (3,)), 0: Held((0, 1), (0, 1)), 1: Held((0, 1), (0, 1))},
    )
    solution = nested_solution(stages, plan)
    assert solution.schedule.runs == (
        Run((0, 1, 2, 3, 4, 5, 6, 7)),
        recompute(3),  # the result of stage 4 is the saved input of stage 5
        Run((8, 9)),
        recompute(0, 1),  # stage 2 has no sweep of its own: its result is saved, its operand is recomputed
        Run((10, 11, 12)),
    )
    check(stages.problem, solution)


@pytest.mark.parametrize("seed", range(60))
def test_any_nested_plan_gives_a_valid_schedule(seed: int) -> None:
    source = random.Random(seed)
    stages = stages_before_peak(random_problem(seed, 12), 60)
    if stages is None:
        return

    def held() -> Held:
        return Held(*(tuple(s for s in range(len(stages)) if source.random() < 0.3) for _ in range(2)))

    before = {stage: held() for stage in range(len(stages)) if source.random() < 0.7}
    check(stages.problem, nested_solution(stages, NestedPlan(held(), before)))


def test_the_distance_to_the_best_segments() -> None:
    """One level of recomputation on chains: all sets of segments, recomputed or kept, simulated."""
    ratios: dict[str, list[float]] = {name: [] for name in SOLVERS}
    for seed in range(40):
        source = random.Random(seed)
        problem = Problem(training_chain([source.randint(1, 20) for _ in range(source.randint(3, 6))]))
        stages = stages_of(problem)
        inner = range(1, len(stages))
        ends = [chosen for number in range(len(inner) + 1) for chosen in itertools.combinations(inner, number)]
        plans = [Plan(chosen, (Option.RECOMPUTE,) * len(chosen)) for chosen in ends]
        choices = [choice_of(stages.costs, problem.order, plan) for plan in plans]
        best = min(problem.solution(choice).peak for choice in choices)
        for name, solve in SOLVERS.items():
            ratios[name].append(solve(problem, None).peak / best)
    assert min(ratios["chen"]) >= 1
    assert max(ratios["hong"]) <= 1.25
    assert max(ratios["rotor"]) <= 1.25


@pytest.mark.parametrize("needs", [[1] * 10, list(range(1, 11)), [4] * 10], ids=["too few", "right", "too many"])
def test_a_plan_with_a_peak_just_below_a_budget_is_found(needs: list[int]) -> None:
    peaks = [1, 2, 3, 4, 5, 6, 7, 9, 8, 10]
    problem = Problem(training_chain([1]))
    asked: list[int] = []

    class Simulated(Solution):
        @property
        def peak(self) -> int:
            return self.extra_seconds.__trunc__()

    def evaluate(index: int) -> Solution:
        asked.append(index)
        plain = problem.plain
        return Simulated(problem.graph, plain.choice, plain.schedule, plain.liveness, peaks[index])

    plans = Plans(needs, evaluate)
    assert max(one.peak for one in plans.near(4)) == 4
    assert max(one.peak for one in plans.near(7)) == 7
    assert [one.peak for one in plans.near(None)][:6] == peaks[:6]
    assert len(asked) == len(set(asked))
    assert Plans([], evaluate).near(4) == Plans([], evaluate).near(None) == []


def test_slots_of_many_equal_sizes_sum_to_their_bytes() -> None:
    for size in (1, 30, 99, 100, 101, 149, 150, 151):
        slots = in_slots(np.full(200, size), 100)
        assert abs(int(slots.sum()) * 100 - 200 * size) <= 200
    sizes = np.array([[0, 3, 7], [1, 2, 5]])
    assert (in_slots(sizes, 1) == sizes).all()


def test_the_stages_are_spread_over_the_bytes_of_the_plain_step() -> None:
    stages = stages_of(Problem(training_chain([1, 9] * 100)), most=20)
    assert 15 <= len(stages) <= 21
    # The cuts stand where 1 byte crosses, ten layers apart.
    assert all(stages.costs.crossing[stage, stage + 1] == 1 for stage in range(len(stages) - 1))
    assert all(len(stages.ops(stage)) <= 20 for stage in range(len(stages)))


def test_rotor_solves_a_programme_once_for_many_budgets_and_reads_few_of_its_plans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    solved, read = [], []
    solve, plan = rotor.Programme.__init__, rotor.Programme.plan
    monkeypatch.setattr(rotor.Programme, "__init__", lambda self, *args: (solved.append(args), solve(self, *args))[1])
    monkeypatch.setattr(rotor.Programme, "plan", lambda self, memory: (read.append(0), plan(self, memory))[1])
    problem = Problem(training_chain([1] * 30))
    plain = problem.plain.peak
    found = [rotor.solve(problem, budget) for budget in range(plain // 2, plain, plain // 20)]
    assert all(one.schedule.recomputed for one in found)
    assert len(solved) == 2  # of the two models of what stages take
    plans = sum(len(one.needs) for one in problem.memo.values() if isinstance(one, Plans))
    assert len(read) < plans  # for all budgets together, as each is read once


def test_hong_solves_a_table_once_for_many_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    solved = []
    solve = hong.minimum_seconds
    monkeypatch.setattr(hong, "minimum_seconds", lambda table, size: (solved.append(size), solve(table, size))[1])
    problem = Problem(training_chain([1] * 30))
    plain = problem.plain.peak
    found = [hong.solve(problem, budget) for budget in range(plain // 2, plain, plain // 20)]
    assert all(one.schedule.recomputed for one in found)
    assert len(solved) == 2  # of what segments take, and may take; the third guides to the least memory only
