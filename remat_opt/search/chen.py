"""Checkpoints at a limit of bytes: Chen, Xu, Zhang, Guestrin 2016, "Training deep nets with sublinear memory cost"
(arXiv:1604.06174), section 4.

*A chain of n equal layers*: a checkpoint every √n layers needs memory for O(√n) of them and one more forward pass
(`square_root_split`).

*Any graph*, their algorithm 3 (`close_segments`): walk a topological order, sum the bytes since the last checkpoint,
and close the segment at the next allowed split where the sum passes a limit B. With x, the bytes of the checkpoints,
and y, the bytes of the largest segment, of the run with B = 0, the limits of a grid between B₀/√2 and √2·B₀,
B₀ = √(x·y), are tried, and the best is kept. Best is what the liveness model says; the bytes that are summed are those
that the plain step keeps for its backward; the allowed splits are the positions where few bytes cross.

*Under a budget*, two of the paper's remarks become candidates: longer segments (a larger B; the last segment is never
recomputed, so that this takes less time), and to drop cheap results only, so that of a recomputed segment the results
of convolutions and products stay saved.

Limitations: the paper walks the whole forward, and here it ends at the plain step's peak, of which there is one; the
recursion to O(log n) memory is left to `rotor`; in-place operation and memory sharing are the compiler's.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from remat_opt.graph.derive import Choice
from remat_opt.graph.graph import Kind
from remat_opt.search.cuts import MOST_CUTS
from remat_opt.search.problem import Problem, Solution
from remat_opt.search.segments import Option, Plan, choice_of
from remat_opt.search.stages import Stages, best_of, stages_before_peak

GRID = 8


def solve(problem: Problem, budget: int | None) -> Solution:
    """See `Solver`."""
    stages = stages_before_peak(problem, MOST_CUTS)
    if stages is None or (budget is not None and problem.plain.peak <= budget):
        return problem.plain
    choices = list(dict.fromkeys(_choices(stages, budget)))
    return best_of(problem, map(problem.solution, choices), budget)


def square_root_split(layers: int) -> tuple[int, ...]:
    """Where segments of ⌊√n⌋ layers end: the indices of the layers that begin the next ones."""
    return tuple(range(math.isqrt(layers), layers, math.isqrt(layers))) if layers else ()


def close_segments(sizes: Sequence[int], limit: float) -> tuple[int, ...]:
    """One walk of algorithm 3.

    Args:
        sizes: bytes between neighbouring allowed splits.
        limit: B, in bytes.

    Returns:
        Where segments end, as indices into `sizes` of what begins the next ones; the end of all is not among them.
    """
    ends: list[int] = []
    since = 0
    for index, size in enumerate(sizes[:-1]):
        since += size
        if since > limit:
            ends.append(index + 1)
            since = 0
    return tuple(ends)


def limits(checkpoints: int, largest: int, count: int = GRID) -> list[float]:
    """The grid: `count` limits in bytes from B₀/√2 to √2·B₀, each the same factor above the one before.

    Args:
        checkpoints: x, bytes of the checkpoints of the run with B = 0.
        largest: y, bytes of its largest segment.
        count: how many limits, at least 2.
    """
    middle = math.sqrt(checkpoints * largest)
    return [middle * 2 ** (step / (count - 1) - 0.5) for step in range(count)]


def _choices(stages: Stages, budget: int | None) -> Iterator[Choice]:
    sizes = [int(stages.costs.residual[k, k + 1]) for k in range(len(stages))]
    bounds = list(itertools.pairwise((0, *close_segments(sizes, 0), len(sizes))))
    checkpoints = sum(int(stages.costs.crossing[start, end]) for start, end in bounds[:-1])
    grid = limits(checkpoints, max(sum(sizes[start:end]) for start, end in bounds))
    while budget is not None and 0 < grid[-1] < sum(sizes):
        grid.append(grid[-1] * math.sqrt(2))
    for ends in (square_root_split(len(stages)), *(close_segments(sizes, limit) for limit in grid)):
        plan = Plan(ends, (Option.RECOMPUTE,) * len(ends))
        choice = choice_of(stages.costs, stages.problem.order, plan)
        yield choice
        if budget is not None:
            yield _with_expensive_results(stages, choice)


def _with_expensive_results(stages: Stages, choice: Choice) -> Choice:
    graph = stages.problem.graph
    end = max(choice.boundaries, default=0)
    ops = [graph.ops[op] for op in stages.problem.order[:end]]
    expensive = frozenset(v for op in ops if op.kind in (Kind.CONTRACTION, Kind.OPAQUE) for v in op.outputs)
    return dataclasses.replace(choice, saved=choice.saved | expensive)
