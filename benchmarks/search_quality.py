"""How far each search is from the optimum, on random steps that the exact search can solve.

    python -m benchmarks.search_quality [--graphs 60]

For each solver: its least peak over the optimal one; how often it finds a schedule at 1.1 times the optimal peak, and
at a budget halfway from there to the plain peak; and its time there, recomputation included, over the optimal one.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics

from rich.console import Console
from rich.table import Table

from remat_opt.graph.graph import Graph
from remat_opt.search import SOLVERS, Problem, search_of
from tests import milp
from tests.random_graphs import training_graph


@dataclasses.dataclass(frozen=True)
class Optimum:
    """A graph with what the exact search says of it: the least peak, and seconds of recomputation for each budget."""

    graph: Graph
    peak: int
    seconds: dict[int, float]


def optima(count: int) -> list[Optimum]:
    """Random forward and backward graphs of 12 to 16 ops in which something can be gained, solved exactly."""
    found: list[Optimum] = []
    seed = 0
    while len(found) < count:
        source = random.Random(seed)
        graph = training_graph(source, source.randint(3, 8))
        seed += 1
        if not 12 <= len(graph.ops) <= 16:
            continue
        problem = Problem(graph)
        least = milp.solve(problem, None)
        if least.schedule.recomputed:
            tight = least.peak * 11 // 10
            budgets = (tight, (tight + problem.plain.peak) // 2)
            found.append(Optimum(graph, least.peak, {b: milp.solve(problem, b).extra_seconds for b in budgets}))
    return found


def row_of(name: str, cases: list[Optimum]) -> tuple[str, ...]:
    """One solver's line of the table."""
    peaks, times, asked = [], [], 0
    for case in cases:
        problem = Problem(case.graph)
        least = search_of(problem).minimum_at_any_cost if name == "auto" else SOLVERS[name](problem, None)
        peaks.append(least.peak / case.peak)
        for budget, seconds in case.seconds.items():
            solution = SOLVERS[name](problem, budget)
            asked += 1
            if solution.peak <= budget:
                times.append((case.graph.seconds + solution.extra_seconds) / (case.graph.seconds + seconds))
    shares = (f"{statistics.mean(peaks):.3f}", f"{max(peaks):.2f}", f"{sum(p == 1 for p in peaks) / len(peaks):.0%}")
    return (name, *shares, f"{len(times) / asked:.0%}", f"{statistics.mean(times):.4f}", f"{max(times):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--graphs", type=int, default=60, help="how many random graphs")
    cases = optima(parser.parse_args().graphs)
    table = Table(title=f"{len(cases)} random steps of 12 to 16 ops, against the exact search")
    for column in ("solver", "least peak, mean", "worst", "optimal", "fits the budget", "time, mean", "worst"):
        table.add_column(column, justify="left" if column == "solver" else "right")
    for name in SOLVERS:
        table.add_row(*row_of(name, cases))
    Console().print(table)


if __name__ == "__main__":
    main()
