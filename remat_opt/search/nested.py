"""Nested plans over stages: the ops of a stage may run again several times, each time to save what later sweeps need.

A *sweep* runs stages forward and leaves some inputs and some whole stages in memory. The first one is the forward pass;
before the backward of a stage that is not there comes another one.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Mapping

from remat_opt.graph.derive import Choice
from remat_opt.graph.schedule import Run, join_runs
from remat_opt.search.problem import Solution
from remat_opt.search.stages import Stages


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
    return stages.problem.scheduled(schedule, builder.choice)


class _Nesting:
    def __init__(self, stages: Stages, plan: NestedPlan):
        self.stages, self.plan = stages, plan
        self.graph, self.order = stages.problem.graph, stages.problem.order
        self.starts = stages.cuts.positions
        self.end = self.starts[-1]  # of all that may be evicted
        self.made_at, self.last_read = stages.made_at, stages.last_read
        last = len(stages) - 1
        first = Held((*plan.first.inputs, last), plan.first.stages)
        saved = {value for stage in first.inputs for value in stages.cuts.crossing(stage)}
        saved.update(value for stage in first.stages if stage < last for value in stages.values(stage))
        self.choice = Choice(frozenset(saved), (self.end,) if self.end else (), tuple(self.starts[1:]))
        self.held = saved.union(self.graph.always_there.tolist())

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
        return [v for v in self.stages.early_reads[op] if v not in self.held]

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
