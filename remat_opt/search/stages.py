"""Stages: the ops before the plain step's peak, divided at cuts; and what the chain searches need to work with them.

Stage a holds the ops between cut a and cut a + 1; the last stage ends at the *forward/backward boundary*, the position
of the plain step's peak. A search may make segments of several stages (`segments.py`, one level of recomputation) or a
nested plan (`nested.py`), in which an op runs again several times.

Gaps: one forward/backward boundary; the stages are contiguous in the program's order.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

import numpy as np

from remat_opt.search.cuts import Cuts, SegmentCosts
from remat_opt.search.problem import Problem, Solution, memory_first, time_first

Model = TypeVar("Model")


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
        made_at = [-1] * len(self.problem.graph.sizes)
        for position, op in enumerate(self.problem.order):
            for value in self.problem.graph.ops[op].outputs:
                made_at[value] = position
        return made_at

    @functools.cached_property
    def last_read(self) -> list[int]:
        """For each value the position of the order at which it is read last; −1 for those that nobody reads."""
        last_read = [-1] * len(self.problem.graph.sizes)
        for position, op in enumerate(self.problem.order):
            for value in self.problem.graph.ops[op].inputs:
                last_read[value] = position
        return last_read

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
    """At most `most` + 1 cuts: where fewest bytes cross, of each `most`-th part of the plain step's bytes.

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
    """What was made behind a stage and is there when its backward begins.

    Returns:
        For each stage the bytes of all of that, gradients too; and of what was made before the forward/backward
        boundary.
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


def sweep(evaluate: Callable[[int], Solution], count: int, budget: int | None, patience: int = 6) -> list[Solution]:
    """Simulate some of `count` plans that a model orders from least memory to least time.

    The model's peak and the simulated one differ, so that the order of simulated peaks is only nearly the model's.
    Without a budget the first plans are tried, and then ever fewer, until `patience` in a row were no better. With one,
    bisection finds a plan that fits, and the `patience` plans behind it are tried, too, as long as one of them fits.
    """
    found: dict[int, Solution] = {}

    def solution(index: int) -> Solution:
        if index not in found:
            found[index] = evaluate(index)
        return found[index]

    if budget is None:
        index = failed = 0
        best = (float("inf"), float("inf"))
        while index < count and failed < patience:
            rank = memory_first(solution(index))
            best, failed = (rank, 0) if rank < best else (best, failed + 1)
            index += 1 + index // patience
        return list(found.values())
    low, high = -1, count  # fits, as far as is known; does not fit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if solution(middle).peak <= budget else (low, middle)
    tried = low
    while tried < min(low + patience, count - 1):
        tried += 1
        low = tried if solution(tried).peak <= budget else low
    return list(found.values())


class Plans(Protocol):
    """What one model of the stages offers for a size of memory."""

    def near(self, budget: int | None) -> Iterable[Solution]:
        """Simulated plans whose peaks come near a budget, or the least one."""
        ...


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
        models_of: the first two are what stages take, and may take; the others guide to the least memory only.
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
