"""The exact search for small graphs: Checkmate's integer programme (Jain et al. 2020, arXiv:1910.02653, sections 4.3
to 4.7), solved by scipy's HiGHS. The oracle that every other search is tested against.

An op may run again before any op that stands behind it in the order of first runs, once before each:
`integer_programme.py` has the variables and rows. Checkmate's own model knows neither results that cost nothing, nor
donated arguments, nor ops with several results, and allocates before it frees; the programme here counts what
`liveness.simulate` counts, but for results that are written over operands:

- arguments are free; results of the step are free in their last copy;
- a result that takes the place of a donated argument has a buffer of its own until that argument's last read;
- an op's operands and results are live together, and a result that nobody reads is live while it is made;
- barriers cost nothing where all values are buffers: what they cover is live behind them anyway.

The solver's word is never taken: its rounded `run` variables become a schedule, needless repeats are dropped, and the
schedule is simulated. Where rounding has lost bytes the budget is tightened by them and the programme solved again.

Optimal over: the given order of first runs; ops that are repeatable and do not only make results of the step; each op
at most once between two first runs; graphs whose values are all buffers (`Graph.fused`, as `build` makes them). On
other graphs the virtual values are counted as buffers too, so that the answer is a valid schedule and no optimum.

Limitations: tens of ops only (`MOST_OPS` at most). Under a time limit the answer depends on the machine; a warning says
so.
The `choice` of an answer names what stays, for reports; its schedule cannot be derived from it again, since an op may
be repeated several times and apart from its neighbours.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import numpy as np

from remat_opt.graph.derive import Choice
from remat_opt.graph.schedule import Run, join_runs
from remat_opt.search.problem import Problem, Solution, memory_first
from tests.integer_programme import Programme, matrix

TIME_LIMIT = 60.0
MOST_OPS = 200
_MOST_TIGHTENINGS = 4
_SCALE = 1000.0  # HiGHS takes a row for satisfied within 1e-6: a budget of 1 GiB becomes 1000, its error 1 byte


class OutOfTime(UserWarning):
    """A search stopped at its time limit; what it returned is the best that it had found."""


def solve(problem: Problem, budget: int | None, *, time_limit: float = TIME_LIMIT) -> Solution:
    """The least extra time within `budget` bytes; the least peak, and among those the least time, without a budget.

    Args:
        problem: a step of tens of ops.
        budget: bytes. Where no schedule fits it, the answer is the least peak.
        time_limit: seconds for the solver. When they are over, the best schedule so far is returned, with a warning
            `OutOfTime`.

    Raises:
        ValueError: more than `MOST_OPS` ops.
    """
    plain = problem.plain
    if not problem.order or (budget is not None and plain.peak <= budget):
        return plain
    if len(problem.order) > MOST_OPS:
        raise ValueError(
            f"expected at most {MOST_OPS} ops for the exact search, this step has {len(problem.order)}: "
            "take another solver"
        )
    search: _Search = problem.cached("milp", lambda: _Search(problem))
    search.start(time_limit)
    found = None if budget is None else search.minimum_time(budget)
    if found is None:
        least = search.minimum_peak()
        best = min((least, plain), key=memory_first)
        found = search.minimum_time(best.peak) or best
        found = min((found, best), key=memory_first)
    if search.out_of_time:
        warnings.warn(
            f"milp ran out of its {time_limit:g} seconds: the schedule is the best it found, and perhaps not optimal",
            OutOfTime,
            stacklevel=2,
        )
    return found


class _Search:
    def __init__(self, problem: Problem):
        self.problem = problem
        self.programme = Programme(problem)
        self.bounds: Any  # scipy's annotations know numbers only
        self.rows, self.bounds = matrix(self.programme.rows, self.programme.variables)
        self.memory, below = matrix(self.programme.moments, self.programme.variables)
        self.constant_bytes = -below

    def start(self, time_limit: float) -> None:
        """Give all that follows this many seconds."""
        self.deadline = time.monotonic() + time_limit
        self.out_of_time = False

    def minimum_peak(self) -> Solution:
        """Minimise the peak; the plain step if the solver finds nothing in time."""
        found = self._solve(None)
        return self.problem.plain if found is None else found

    def minimum_time(self, budget: int) -> Solution | None:
        """Minimise the extra time; None if nothing fits, or nothing was found in time."""
        bytes_allowed = budget
        for _ in range(_MOST_TIGHTENINGS):
            found = self._solve(bytes_allowed)
            if found is None or found.peak <= budget:
                return found
            bytes_allowed -= found.peak - budget
        return None

    def _solve(self, budget: int | None) -> Solution | None:
        """Solve the programme; its last variable is the peak, in units of `unit` bytes."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array, hstack

        count = self.programme.variables
        unit = max(self.problem.plain.peak if budget is None else budget, 1) / _SCALE
        peak_column = csr_array(np.full((len(self.constant_bytes), 1), -1.0))
        no_column = csr_array((len(self.bounds), 1))
        objective = np.zeros(count + 1)
        if budget is None:
            objective[-1] = 1.0
        else:
            objective[:-1] = self._seconds()
        integrality = np.zeros(count + 1)
        integrality[: self.programme.integers] = 1
        remaining = self.deadline - time.monotonic()
        if remaining <= 0:
            self.out_of_time = True
            return None
        largest: Any = np.append(np.ones(count), np.inf if budget is None else max(budget, 0) / unit)
        spare: Any = -self.constant_bytes / unit
        rows = hstack([self.rows, no_column], format="csc")
        memory = hstack([self.memory * (1 / unit), peak_column], format="csc")
        result = milp(
            objective,
            integrality=integrality,
            bounds=Bounds(0.0, largest),
            constraints=[LinearConstraint(rows, -np.inf, self.bounds), LinearConstraint(memory, -np.inf, spare)],
            options={"time_limit": remaining, "mip_rel_gap": 0.0},
        )
        self.out_of_time |= result.status == 1
        return None if result.x is None else self._solution(result.x)

    def _seconds(self) -> np.ndarray:
        """Seconds of each variable, in shares of the step's."""
        seconds = np.zeros(self.programme.variables)
        total = self.problem.graph.seconds or 1.0
        for (_, op), term in self.programme.run.items():
            seconds[term.parts[0][0]] = self.programme.ops[op].seconds / total
        return seconds

    def _solution(self, values: np.ndarray) -> Solution:
        order = self.problem.order
        again: list[list[int]] = [[] for _ in order]
        for (stage, op), term in self.programme.run.items():
            if values[term.parts[0][0]] > 0.5:
                again[stage].append(op)
        return solution_of_stages(self.problem, [tuple(sorted(ops)) for ops in again])


def solution_of_stages(problem: Problem, again: list[tuple[int, ...]]) -> Solution:
    """The schedule in which the ops `again[t]` (places in the order of first runs) are repeated before the first run of
    op t; repeats that nobody reads are left out."""
    graph, order = problem.graph, problem.order
    runs: list[Run] = []
    read = set(graph.outputs)  # read behind this point before they are recomputed
    for stage in range(len(order) - 1, -1, -1):
        repeats: list[int] = []
        for place in (stage, *reversed(again[stage])):
            op = graph.ops[order[place]]
            if place != stage:
                if read.isdisjoint(op.outputs):
                    continue
                repeats.append(order[place])
            read.difference_update(op.outputs)
            read.update(op.inputs)
        runs.append(Run((order[stage],)))
        runs.append(Run(tuple(reversed(repeats)), recomputed=True))
    return problem.scheduled(join_runs(reversed(runs)), Choice())
