"""Stages: the ops before the plain step's peak, divided at cuts; and what the chain searches need to work with them.

Stage a holds the ops between cut a and cut a + 1; the last stage ends at the *turning point*, the position of the plain
step's peak. A search may make segments of several stages (`segments_choice`, one level of recomputation) or a nested
plan (`nested_solution`), in which an op runs again several times.

Gaps: one turning point; the stages are contiguous in the program's order.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from remat_opt.graph.derive import Choice
from remat_opt.graph.liveness import simulate
from remat_opt.graph.schedule import Run, join_runs
from remat_opt.search.cuts import Cuts, SegmentCosts
from remat_opt.search.problem import Problem, Solution


@dataclasses.dataclass(frozen=True, eq=False)
class Stages:
    """The stages of a problem, with what they cost.

    Attributes:
        problem: the step.
        cuts: where the stages begin.
        costs: what segments of them cost, in bytes.
    """

    problem: Problem
    cuts: Cuts
    costs: SegmentCosts

    def __len__(self) -> int:
        return len(self.cuts)

    def values(self, stage: int) -> list[int]:
        """What the ops of a stage make, in order."""
        return [v for op in self.ops(stage) for v in self.problem.graph.ops[op].outputs]

    def ops(self, stage: int) -> tuple[int, ...]:
        """The ops of a stage, in order."""
        stop = self.cuts.positions[stage + 1] if stage + 1 < len(self) else self.cuts.turn
        return self.problem.order[self.cuts.positions[stage] : stop]


def stages_before_peak(problem: Problem, most: int) -> Stages | None:
    """At most `most` + 1 stages, the same for every budget; None where fewer than two ops come before the peak."""
    turn = problem.plain.liveness.peak_position
    if turn < 2:
        return None
    name = f"at most {most} stages"
    if name not in problem.memo:
        cuts = Cuts(problem.graph, problem.order, turn)
        costs = SegmentCosts(cuts, problem.plain.liveness)
        cuts.positions = _spread_positions(cuts, costs, most)
        problem.memo[name] = cuts, costs
    return Stages(problem, *problem.memo[name])


def _spread_positions(cuts: Cuts, costs: SegmentCosts, most: int) -> list[int]:
    """At most `most` + 1 cuts: where fewest bytes cross, of each `most`-th part of the plain step's bytes."""
    if len(cuts) <= most:
        return cuts.positions
    before = [costs.residual_bytes(0, k) for k in range(len(cuts))]
    parts = [bytes_ * most // (costs.residual_bytes(0, None) + 1) for bytes_ in before]
    chosen: dict[int, tuple[int, int]] = {}
    for part, position in zip(parts[1:], cuts.positions[1:], strict=True):
        crossing = int(cuts.sizes[(cuts.born < position) & (cuts.dies >= position)].sum())
        chosen[part] = min(chosen.get(part, (crossing, position)), (crossing, position))
    return sorted({0, *(position for _, position in chosen.values())})


def _backward_starts(stages: Stages) -> list[int]:
    """For each stage the position in the plain step at which its backward begins."""
    costs, turn = stages.costs, stages.cuts.turn
    starts = [turn] * len(stages)
    for a in range(len(stages) - 2, -1, -1):
        start, stop = stages.cuts.positions[a : a + 2]
        low, high = np.searchsorted(costs.born, (start, stop))
        starts[a] = starts[a + 1]
        if low < high:
            # Neither what the stage behind reads nor a small buffer says when.
            large = np.flatnonzero(costs.size[low:high] * costs.RELEVANT >= costs.size[low:high].max()) + low
            inside = large[costs.last_forward[large] < stop]
            starts[a] = max(starts[a], min([*costs.first[inside], *costs.death[large]]))
    return [int(start) for start in starts]


def later_bytes(stages: Stages) -> tuple[np.ndarray, np.ndarray]:
    """What was made behind a stage and is there when its backward begins.

    Returns:
        For each stage the bytes of all of that, gradients too; and of what was made before the turning point.
    """
    turn = stages.cuts.turn
    buffers = [buffer for buffer in stages.problem.plain.liveness.buffers if buffer.size]
    gradients, residuals = np.zeros((2, len(stages)), dtype=np.int64)
    for a, begin in enumerate(_backward_starts(stages)[:-1]):
        stop = stages.cuts.positions[a + 1]
        there = [buffer for buffer in buffers if stop <= buffer.birth < begin <= buffer.death]
        gradients[a] = sum(buffer.size for buffer in there)
        residuals[a] = sum(buffer.size for buffer in there if buffer.birth < turn)
    return gradients, residuals


def in_slots(sizes: np.ndarray, slot: int) -> np.ndarray:
    """Bytes in slots, rounded so that sums of many are right.

    Equal small sizes rounded to the nearest all err to one side. So the share of a slot that is rounded up is another
    one in each column (multiples of the golden ratio lie evenly). Exact for slots of one byte.
    """
    share = np.arange(sizes.shape[-1]) * 618034 % 1000000
    return (sizes + share * slot // 1000000) // slot


def segments_choice(stages: Stages, ends: Sequence[int], kept: Sequence[bool] = ()) -> Choice:
    """Segments that end at the cuts `ends`: what crosses an end is saved, and all that a kept segment makes.

    The segment behind the last end is not recomputed: its backward follows at once. Without ends all is saved.
    """
    saved: set[int] = set()
    start = 0
    for index, end in enumerate(ends):
        saved |= stages.cuts.crossing(end)
        if kept and kept[index]:
            saved.update(value for stage in range(start, end) for value in stages.values(stage))
        start = end
    positions = tuple(stages.cuts.positions[end] for end in ends)
    return Choice(frozenset(saved), positions[-1:], positions)


def best_of(problem: Problem, solutions: Iterable[Solution], budget: int | None) -> Solution:
    """The solution that a `Solver` has to return: of these and the plain one. The first among equals."""
    return min((problem.plain, *solutions), key=lambda solution: _rank(solution, budget))


def _rank(solution: Solution, budget: int | None) -> tuple[float, ...]:
    if budget is None or solution.peak > budget:
        return (1, solution.peak, solution.extra_seconds)
    return (0, solution.extra_seconds, solution.peak)


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
            rank = (solution(index).peak, solution(index).extra_seconds)
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


@dataclasses.dataclass(frozen=True)
class Held:
    """What one sweep over stages leaves in memory.

    Attributes:
        inputs: stages whose input is saved: all that crosses the cut at which they begin.
        stages: stages of which everything is kept that is still to be read.
    """

    inputs: tuple[int, ...] = ()
    stages: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class NestedPlan:
    """A sweep over all stages, and for each stage that it does not keep the sweep that comes before its backward."""

    first: Held
    before: Mapping[int, Held]


def nested_solution(stages: Stages, plan: NestedPlan) -> Solution:
    """The schedule of a nested plan, simulated.

    Backward ops stand in the program's order. When one reads a value that is not held, the sweep before its stage's
    backward runs: all ops that make what the sweep leaves in memory from what is held now. The last stage is always
    kept. The `choice` of the solution is that of the first sweep alone; the schedule cannot be derived from it.
    """
    builder = _Nesting(stages, plan)
    schedule = join_runs(builder.run())
    problem = stages.problem
    liveness = simulate(problem.graph, schedule)
    return Solution(builder.choice, schedule, liveness, schedule.extra_seconds(problem.graph))


class _Nesting:
    def __init__(self, stages: Stages, plan: NestedPlan):
        self.stages, self.plan = stages, plan
        self.graph, self.order = stages.problem.graph, stages.problem.order
        self.starts = stages.cuts.positions
        self.end = self.starts[-1]  # of all that may be forgotten
        self.made_at = [-1] * len(self.graph.sizes)
        self.last_read = [-1] * len(self.graph.sizes)
        for position, op in enumerate(self.order):
            for value in self.graph.ops[op].outputs:
                self.made_at[value] = position
            for value in self.graph.ops[op].inputs:
                self.last_read[value] = position
        last = len(stages) - 1
        first = Held((*plan.first.inputs, last), plan.first.stages)
        saved = {value for stage in first.inputs for value in stages.cuts.crossing(stage)}
        saved.update(value for stage in first.stages if stage < last for value in stages.values(stage))
        self.choice = Choice(frozenset(saved), (self.end,) if self.end else (), tuple(self.starts[1:]))
        self.held = saved.union(self.graph.inputs, self.graph.outputs)
        for op in self.graph.ops:
            if not op.repeatable:
                self.held.update(op.outputs)

    def run(self) -> list[Run]:
        runs: list[Run] = []
        pending = list(self.order[: self.end])
        for position in range(self.end, len(self.order)):
            op = self.order[position]
            missing = self.missing(op)
            while missing:  # those of the last stage first: its backward is the next
                stage = max(map(self.stage_of, missing))
                targets = self.targets(stage, position)
                targets.update(value for value in missing if self.stage_of(value) == stage)
                runs += [Run(tuple(pending)), Run(self.making(targets), recomputed=True)]
                pending = []
                self.held |= targets
                missing = self.missing(op)
            pending.append(op)
        return [*runs, Run(tuple(pending))]

    def missing(self, op: int) -> list[int]:
        return [v for v in self.graph.ops[op].inputs if self.made_at[v] < self.end and v not in self.held]

    def stage_of(self, value: int) -> int:
        return bisect.bisect_right(self.starts, self.made_at[value]) - 1

    def targets(self, stage: int, position: int) -> set[int]:
        """What the sweep before a stage's backward makes to be held; `position` is that of the next first run."""
        sweep = self.plan.before.get(stage, Held(stages=(stage,)))
        kept = {value for index in sweep.stages for value in self.stages.values(index)}
        targets = {value for value in kept if self.last_read[value] >= position}
        for start in sweep.inputs:
            targets.update(self.read_by(start, stage))
        return targets - self.held

    def read_by(self, first: int, last: int) -> set[int]:
        """What the stages from `first` to `last` read of earlier ones."""
        ops = [op for stage in range(first, last + 1) for op in self.stages.ops(stage)]
        return {v for op in ops for v in self.graph.ops[op].inputs if self.made_at[v] < self.starts[first]}

    def making(self, targets: Iterable[int]) -> tuple[int, ...]:
        """The ops that make values from what is held, in order."""
        producer = self.graph.producer
        ops: set[int] = set()
        stack = list(targets)
        while stack:
            op = producer[stack.pop()]
            if op not in ops:
                ops.add(op)
                stack.extend(self.missing(op))
        return tuple(sorted(ops, key=lambda op: self.made_at[self.graph.ops[op].outputs[0]]))
