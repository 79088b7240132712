"""`auto` against every other solver, against the exact one, and its laws."""

import gc
import random
import weakref
from collections.abc import Sequence

import milp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import training_graph, training_graphs
from step_graphs import NETWORKS, PLAIN_STEPS, TWINS, graph_of

from remat_opt.graph.graph import Graph
from remat_opt.graph.liveness import simulate
from remat_opt.search import SOLVERS, Problem, Solution, search_of
from remat_opt.search.auto import Search
from remat_opt.search.drop_recomputation import fill

OTHERS = [name for name in SOLVERS if name != "auto"]


def auto(problem: Problem, budget: int | None) -> Solution:
    return SOLVERS["auto"](problem, budget)


NINE = tuple(range(1, 10))
THREE = (2, 5, 8)  # tight, half-way and with room
IN_NINE = {"alexnet", "conv_net", "u_net"}  # a chain, skips of one block, skips over all of it


def budgets_between(problem: Problem, tenths: Sequence[int]) -> list[int]:
    """So many tenths of the way from the least peak to the plain one."""
    least, plain = search_of(problem).minimum_at_any_cost.peak, problem.plain.peak
    return sorted({least + (plain - least) * tenth // 10 for tenth in tenths})


def assert_never_worse(graph: Graph, tenths: Sequence[int] = THREE) -> int:
    """Compare with every other solver; how often `auto` takes less time, or fits where the other does not."""
    problem, better = Problem(graph), 0
    least = search_of(problem).minimum_at_any_cost.peak
    answers = {budget: auto(problem, budget) for budget in budgets_between(problem, tenths)}
    for name in OTHERS:
        assert SOLVERS[name](problem, None).peak >= least, name
        for budget, ours in answers.items():
            theirs = SOLVERS[name](problem, budget)
            assert ours.peak <= budget
            if theirs.peak <= budget:
                assert ours.extra_seconds <= theirs.extra_seconds * (1 + 1e-9), (name, budget)
            better += theirs.peak > budget or ours.extra_seconds < theirs.extra_seconds
    return better


def tenths_for(name: str) -> Sequence[int]:
    """Nine budgets for some networks, three for the others, which take the longest."""
    return NINE if name in IN_NINE else THREE


@pytest.mark.parametrize("seed", range(12))
def test_auto_is_never_worse_than_another_solver_on_random_graphs(seed: int) -> None:
    source = random.Random(seed)
    graph = training_graph(source, source.randint(3, 16))
    while len(graph.ops) > 40:
        graph = training_graph(source, source.randint(3, 16))
    assert_never_worse(graph, NINE)


@pytest.mark.parametrize("name", PLAIN_STEPS)
def test_auto_is_never_worse_than_another_solver_on_the_training_steps(name: str) -> None:
    graph = graph_of(name)
    assert assert_never_worse(graph, tenths_for(name)) > 0 or len(graph.ops) < 100


@pytest.mark.parametrize("name", NETWORKS)
def test_auto_is_never_worse_than_another_solver_on_networks(name: str) -> None:
    tenths = tenths_for(name)
    assert assert_never_worse(graph_of(name), tenths) > len(tenths)


@pytest.mark.parametrize("name", TWINS)
def test_auto_is_never_worse_than_another_solver_on_small_networks(name: str) -> None:
    assert assert_never_worse(graph_of(name, small=True)) > len(THREE)


def problems_of_12_to_16_ops(first: int, count: int) -> list[tuple[Problem, Solution]]:
    """Forward and backward, with something to gain, and the least peak that there is."""
    found: list[tuple[Problem, Solution]] = []
    seed = first
    while len(found) < count:
        source = random.Random(seed)
        problem = Problem(training_graph(source, source.randint(3, 8)))
        seed += 1
        if 12 <= len(problem.order) <= 16 and (least := milp.solve(problem, None)).schedule.recomputed:
            found.append((problem, least))
    return found


@pytest.mark.parametrize("first", [0, 1000])
def test_auto_finds_a_schedule_where_there_is_one_and_takes_little_more_time_than_the_optimum(
    first: int, record_property
) -> None:
    ratios = []
    for problem, least in problems_of_12_to_16_ops(first, 13):
        seconds, tight = problem.graph.seconds, least.peak * 11 // 10
        for budget in (tight, (tight + problem.plain.peak) // 2):
            ours, best = auto(problem, budget), milp.solve(problem, budget)
            assert ours.peak <= budget, f"{ours.peak} bytes where {best.peak} are enough"
            assert best.extra_seconds <= ours.extra_seconds
            ratios.append((seconds + ours.extra_seconds) / (seconds + best.extra_seconds))
    mean = sum(ratios) / len(ratios)
    record_property("time, mean", mean)
    record_property("time, worst", max(ratios))
    assert mean <= 1.02, f"on average {mean:.4f} of the optimum's time"


@settings(max_examples=15)
@given(graph=training_graphs(), shares=st.tuples(st.floats(0, 1.1), st.floats(0, 1.1)))
def test_a_budget_is_kept_and_more_of_it_never_costs_more_time(graph: Graph, shares: tuple[float, float]) -> None:
    problem = Problem(graph)
    least, plain = search_of(problem).minimum_at_any_cost.peak, problem.plain.peak
    less, more = (auto(problem, round(least + share * (plain - least))) for share in sorted(shares))
    assert less.peak <= round(least + min(shares) * (plain - least))
    assert more.extra_seconds <= less.extra_seconds
    assert less.peak == simulate(graph, less.schedule).peak


@settings(max_examples=15)
@given(training_graphs(max_layers=4))
def test_the_exact_search_is_never_worse_than_any_other(graph: Graph) -> None:
    exact = milp.solve(Problem(graph), None)
    for name in ("auto", *OTHERS):
        assert exact.peak <= SOLVERS[name](Problem(graph), None).peak, name


@settings(max_examples=15)
@given(training_graphs())
def test_the_frontier_leads_from_the_minimum_memory_to_saving_everything(graph: Graph) -> None:
    problem = Problem(graph)
    frontier = search_of(problem).frontier
    assert frontier[-1].extra_seconds == 0
    assert frontier[-1].peak <= problem.plain.peak
    assert [one.peak for one in frontier] == sorted({one.peak for one in frontier})
    assert [one.extra_seconds for one in frontier] == sorted({one.extra_seconds for one in frontier}, reverse=True)


def test_the_gaps_of_a_frontier_are_filled(monkeypatch) -> None:
    problem = Problem(graph_of("conv_net"))
    filled = Search(problem).short_frontier
    monkeypatch.setattr(Search, "filled", lambda search, front: ())
    as_found = Search(problem).short_frontier
    least, plain = as_found[0].peak, problem.plain.peak
    seconds = [
        [min(one.extra_seconds for one in front if one.peak <= budget) for front in (as_found, filled)]
        for budget in range(least, plain, (plain - least) // 100)
    ]
    assert all(after <= before for before, after in seconds)
    before, after = map(sum, zip(*seconds, strict=True))
    assert after < 0.97 * before


@settings(max_examples=15)
@given(training_graphs())
def test_without_a_budget_at_most_one_forward_pass_is_repeated(graph: Graph) -> None:
    problem = Problem(graph)
    least = auto(problem, None)
    assert search_of(problem).is_one_pass(least)
    assert least.extra_seconds <= graph.seconds
    assert auto(problem, least.peak).extra_seconds <= least.extra_seconds


def test_backward_passes_of_earlier_micro_batches_are_no_forward_pass() -> None:
    graph = graph_of("micro_batches")
    assert auto(Problem(graph), None).schedule.extra_flops(graph) <= 0.35 * graph.flops


@settings(max_examples=30)
@given(graph=training_graphs(), share=st.floats(0, 1))
def test_filling_keeps_the_budget_and_takes_no_longer(graph: Graph, share: float) -> None:
    problem = Problem(graph)
    start = min((SOLVERS[name](problem, None) for name in ("rotor", "lower_sets")), key=lambda one: one.peak)
    budget = start.peak + int(share * (problem.plain.peak - start.peak))
    filled = fill(problem, start, budget)
    assert filled.peak <= budget
    assert filled.extra_seconds <= start.extra_seconds
    assert fill(problem, start, problem.plain.peak).extra_seconds == 0  # everything can be kept


def test_a_search_is_not_held_once_nobody_asks_it() -> None:
    problem = Problem(training_graph(random.Random(0), 6))
    search = search_of(problem)
    assert search.frontier
    gone = weakref.ref(search)
    del problem, search
    gc.collect()
    assert gone() is None
