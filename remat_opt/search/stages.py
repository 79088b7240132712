"""Stages: the ops before the plain step's peak, divided at cuts; and what the chain searches need to work with them.

Stage a holds the ops between cut a and cut a + 1; the last stage ends at the *forward/backward boundary*, the position
of the plain step's peak. A search may make segments of several stages (`segments.py`, one level of recomputation) or a
nested plan (`nested.py`), in which an op runs again several times.

Limitations: one forward/backward boundary; the stages are contiguous in the program's order.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np

from remat_opt.search.cuts import Cuts, SegmentCosts
from remat_opt.search.problem import Problem, Solution, memory_first, time_first

Model = TypeVar("Model")

_PATIENCE = 6  # plans that are no better, of those near the least memory


@dataclasses.dataclass(frozen=True, eq=False)
class Stages:
    """The stages of a problem, with what they cost.

    Attributes:
        problem: the step.
        cuts: where the stages begin.
        costs: what segments of them cost, in bytes.
        with_later: the same where later segments' residuals count too (`SegmentCosts.with_later`).
    """

    problem: Problem
    cuts: Cuts
    costs: SegmentCosts
    with_later: SegmentCosts

    def __len__(self) -> int:
        return len(self.cuts)

    def values(self, stage: int) -> list[int]:
        """What the ops of a stage make, in order."""
        return [v for op in self.ops(stage) for v in self.problem.graph.ops[op].outputs]

    @functools.cached_property
    def made_at(self) -> list[int]:
        """For each value the position of the order at which it is made; −1 for arguments."""
        place = self.problem.place
        return [place[op] if op >= 0 else -1 for op in self.problem.graph.producer]

    @functools.cached_property
    def last_read(self) -> list[int]:
        """For each value the position of the order at which it is read last; −1 for those that nobody reads."""
        last_read = [-1] * len(self.problem.graph.sizes)
        for position, op in enumerate(self.problem.order):
            for value in self.problem.graph.ops[op].inputs:
                last_read[value] = position
        return last_read

    @functools.cached_property
    def early_reads(self) -> list[list[int]]:
        """For each op those of its operands that are made before the last stage."""
        end = self.cuts.positions[-1]
        return [[v for v in op.inputs if 0 <= self.made_at[v] < end] for op in self.problem.graph.ops]

    def ops(self, stage: int) -> tuple[int, ...]:
        """The ops of a stage, in order."""
        stop = self.cuts.positions[stage + 1] if stage + 1 < len(self) else self.cuts.forward_end
        return self.problem.order[self.cuts.positions[stage] : stop]


def stages_before_peak(problem: Problem, most: int) -> Stages | None:
    """At most `most` + 1 stages, the same for every budget; None where fewer than two ops come before the peak."""
    forward_end = problem.plain.liveness.peak_position
    return stages_before(problem, forward_end, most) if forward_end >= 2 else None


def stages_before(problem: Problem, forward_end: int, most: int) -> Stages:
    """At most `most` + 1 stages before a forward/backward boundary, the same for every budget."""
    return problem.cached(
        f"at most {most} stages before {forward_end}", lambda: _stages_before(problem, forward_end, most)
    )


def _stages_before(problem: Problem, forward_end: int, most: int) -> Stages:
    live = problem.plain.liveness
    every = Cuts(problem.graph, problem.order, forward_end)
    positions = _spread_positions(every, SegmentCosts(every, live).residual[0], most)
    cuts = Cuts(problem.graph, problem.order, forward_end, positions=positions)
    return Stages(problem, cuts, SegmentCosts(cuts, live), SegmentCosts(cuts, live, with_later=True))


def _spread_positions(cuts: Cuts, before: np.ndarray, most: int) -> list[int]:
    """At most `most` + 1 cuts: divides the plain step's residual bytes into `most` equal parts and takes from each the
    cut that fewest bytes cross.

    Args:
        cuts: all candidates.
        before: bytes of the residuals made before each cut, and of all.
        most: how many parts.
    """
    if len(cuts) <= most:
        return cuts.positions
    parts = before[:-1] * most // (before[-1] + 1)
    chosen: dict[int, tuple[int, int]] = {}
    for part, position, crossing in zip(parts[1:], cuts.positions[1:], cuts.crossing_bytes[1:], strict=True):
        found = int(crossing), position
        chosen[int(part)] = min(chosen.get(int(part), found), found)
    return sorted({0, *(position for _, position in chosen.values())})


def later_bytes(stages: Stages) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of the values that are made after a stage and live when its backward pass begins.

    Returns:
        For each stage the bytes of all of them, gradients too; and of those made before the forward/backward boundary.
    """
    forward_end, lives = stages.cuts.forward_end, stages.problem.plain.liveness.lives
    first, _ = stages.costs.backward_range
    gradients, residuals = np.zeros((2, len(stages)), dtype=np.int64)
    begin = forward_end
    for a in range(len(stages) - 2, -1, -1):
        if stages.costs.residual[a, a + 1]:
            begin = max(begin, int(first[a, a + 1]))
        there = (lives.birth >= stages.cuts.positions[a + 1]) & (lives.birth < begin) & (lives.death >= begin)
        gradients[a] = lives.size[there].sum()
        residuals[a] = lives.size[there & (lives.birth < forward_end)].sum()
    return gradients, residuals


def best_of(problem: Problem, solutions: Iterable[Solution], budget: int | None) -> Solution:
    """The solution that a `Solver` has to return: of these and the plain one. The first among equals."""
    return min((problem.plain, *solutions), key=lambda solution: _rank(solution, budget))


def _rank(solution: Solution, budget: int | None) -> tuple[float, ...]:
    if budget is None or solution.peak > budget:
        return (1, *memory_first(solution))
    return (0, *time_first(solution))


class Plans:
    """The plans of one model for one size of memory, from least memory to least time.

    A model's peak and the simulated peak differ, so that the order of simulated peaks is only nearly the model's. Plans
    are simulated when they are looked at, once.

    Args:
        needs: bytes that each plan needs by the model's word, rising.
        evaluate: the simulated schedule of a plan, by its index.
    """

    def __init__(self, needs: Sequence[int] | np.ndarray, evaluate: Callable[[int], Solution]):
        self.needs = np.asarray(needs, dtype=np.int64)
        self.evaluate = evaluate
        self.known: dict[int, Solution] = {}

    def solution(self, index: int) -> Solution:
        """A plan's schedule."""
        if index not in self.known:
            self.known[index] = self.evaluate(index)
        return self.known[index]

    def near(self, budget: int | None) -> list[Solution]:
        """Plans that fit, the last of them with a peak just below the budget; without one `near_minimum`.

        Starts at the plan that fits by the model's estimate, moves in doubling steps to where simulated plans stop (or
        start) fitting, then bisects.
        """
        if budget is None:
            return self.near_minimum()
        count = len(self.needs)
        looked_at: list[Solution] = []
        low, high = -1, count  # fits, as far as is known; does not fit
        at, step = max(int(np.searchsorted(self.needs, budget, side="right")) - 1, 0), 1
        while high - low > 1:
            looked_at.append(self.solution(at))
            low, high = (at, high) if looked_at[-1].peak <= budget else (low, at)
            if low < 0 or high == count:
                at = min(max(at + (step if high == count else -step), 0), count - 1)
                step *= 2
                if at in (low, high):
                    break
            else:
                at = (low + high) // 2
        return [solution for solution in looked_at if solution.peak <= budget]

    def all_within(self, budget: int) -> list[Solution]:
        """All plans looked at so far that fit, `near` a budget and for other ones."""
        self.near(budget)
        return [solution for solution in self.known.values() if solution.peak <= budget]

    def near_minimum(self, most: int | None = None) -> list[Solution]:
        """The first plans, and then ever fewer, until `_PATIENCE` in a row have no lower peak; of the first `most`."""
        found: list[Solution] = []
        index = failed = 0
        best = (math.inf, math.inf)
        while index < len(self.needs[:most]) and failed < _PATIENCE:
            found.append(self.solution(index))
            rank = memory_first(found[-1])
            best, failed = (rank, 0) if rank < best else (best, failed + 1)
            index += 1 + index // _PATIENCE
        return found


def solve_by_models(
    problem: Problem,
    budget: int | None,
    most: int,
    models_of: Callable[[Stages], Sequence[Model]],
    plans_of: Callable[[Stages, Model, int], Plans],
) -> Solution:
    """What a `Solver` has to return, from a search that works on several models of the same stages.

    Args:
        problem: the step.
        budget: in bytes, or None.
        most: cuts between the stages.
        models_of: the first two models (what the stages take, and what they may take instead) find plans within a
            budget; all of them find the least memory.
        plans_of: of a model, for a capacity in bytes.
    """
    stages = stages_before_peak(problem, most)
    if stages is None or (budget is not None and problem.plain.peak <= budget):
        return problem.plain
    models = models_of(stages)

    def simulated(number: int, capacity: int, limit: int | None) -> Solution:
        name = f"{plans_of.__qualname__} of model {number} within {capacity}"  # the same for many budgets
        plans = problem.cached(name, lambda: plans_of(stages, models[number], capacity))
        return best_of(problem, plans.near(limit), limit)

    def fitting(limit: int) -> Solution:
        capacity = min(2 * limit, problem.plain.peak)
        return best_of(problem, [simulated(number, capacity, limit) for number in range(min(2, len(models)))], limit)

    best = problem.plain if budget is None else fitting(budget)
    if budget is not None and best.peak <= budget:
        return best
    found = [(simulated(number, problem.plain.peak, None), number) for number in range(len(models))]
    least, number = min(found, key=lambda pair: memory_first(pair[0]))
    finer = simulated(number, least.peak * 5 // 4, None)  # in smaller slots
    best = best_of(problem, [best, least, finer], budget)
    return best_of(problem, [best, fitting(best.peak)], budget)
