"""The input (`Problem`) and the output (`Solution`) of every search."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from remat_opt.graph.derive import Choice, derive, early_order
from remat_opt.graph.graph import Graph
from remat_opt.graph.liveness import Liveness, simulate, stable_order
from remat_opt.graph.packing import allocated_bytes
from remat_opt.graph.schedule import Run, Schedule
from remat_opt.graph.transfers import stalls


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """A graph with the order in which its ops run for the first time.

    Attributes:
        graph: the step.
        memo: what searches keep from one budget to the next, by name.
        host_bandwidth: bytes per second each way to the host's memory; None where no value may go there.
    """

    graph: Graph
    memo: dict[str, Any] = dataclasses.field(default_factory=dict)
    host_bandwidth: float | None = None

    @functools.cached_property
    def order(self) -> tuple[int, ...]:
        """Program order, updates as early as they can be."""
        return early_order(self.graph)

    @functools.cached_property
    def place(self) -> dict[int, int]:
        """Of each op in `order`."""
        return {op: index for index, op in enumerate(self.order)}

    @functools.cached_property
    def plain(self) -> Solution:
        """Everything saved, in `order`."""
        schedule = Schedule((Run(self.order),)) if self.order else Schedule(())
        return Solution(self.graph, Choice(), schedule, simulate(self.graph, schedule), 0.0)

    def cached(self, name: str, make: Callable[[], Any]) -> Any:
        """What `memo` has by a name, made when it is first asked for."""
        if name not in self.memo:
            self.memo[name] = make()
        return self.memo[name]

    def solution(self, choice: Choice) -> Solution:
        """Derive and simulate the schedule of a choice."""
        return self.scheduled(derive(self.graph, choice, self.order), choice)

    def scheduled(self, schedule: Schedule, choice: Choice) -> Solution:
        """Simulate a schedule.

        Args:
            schedule: any schedule of the graph with first runs in `order`.
            choice: what it came from.
        """
        seconds = schedule.extra_seconds(self.graph)
        if schedule.transfers:
            seconds += stalls(self.graph, schedule, self.host_bandwidth or math.inf)
        return Solution(self.graph, choice, schedule, simulate(self.graph, schedule), seconds)


@dataclasses.dataclass(frozen=True, eq=False)
class Occurrences:
    """The ops of a schedule one by one, with the buffers that each makes.

    Attributes:
        op: the op of each occurrence.
        recomputed: whether it is a repeat.
        position: its position in the schedule's liveness.
        run: the index of its run.
        buffer_start: the first buffer that it makes; the others follow.
        previous: for each buffer the one before it of the same value, or −1.
    """

    op: np.ndarray
    recomputed: np.ndarray
    position: np.ndarray
    run: np.ndarray
    buffer_start: np.ndarray
    previous: np.ndarray

    @property
    def first_runs(self) -> np.ndarray:
        """Positions of the ops that run for the first time, in their order."""
        return self.position[~self.recomputed]

    @classmethod
    def of(cls, graph: Graph, schedule: Schedule, liveness: Liveness) -> Occurrences:
        """Number the ops of a schedule that was simulated."""
        lengths = np.array([len(run.ops) for run in schedule.runs], dtype=np.int64)
        again = np.array([run.recomputed for run in schedule.runs], dtype=bool)
        op = np.array(schedule.order, dtype=np.int64)
        run = np.repeat(np.arange(len(lengths)), lengths)
        made = graph.makes.counts[op]
        value = liveness.lives.value
        by_value = stable_order(value, len(graph.sizes))
        previous = np.full(len(value), -1, dtype=np.int64)
        same = value[by_value][1:] == value[by_value][:-1]
        previous[by_value[1:][same]] = by_value[:-1][same]
        return cls(
            op,
            again[run],
            np.arange(len(op)) + np.cumsum(again)[run],
            run,
            len(graph.inputs) + np.cumsum(made) - made,
            previous,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Solution:
    """A schedule with what the liveness model says of it (bytes) and its estimated extra time (seconds).

    `Solution.extra_seconds` has what is recomputed, and what waits for copies to and from the host.

    Attributes:
        graph: the step.
        origin: the choice that it came from.
        schedule: all ops in order.
        liveness: its buffers.
        extra_seconds: of its repeats and stalls.
    """

    graph: Graph
    origin: Choice
    schedule: Schedule
    liveness: Liveness
    extra_seconds: float

    @property
    def peak(self) -> int:
        """Peak of temporary memory in bytes."""
        return self.liveness.peak

    @functools.cached_property
    def allocated(self) -> int:
        """Bytes that a compiler allocates for its buffers; see `packing.py`."""
        return allocated_bytes(self.liveness)

    @functools.cached_property
    def choice(self) -> Choice:
        """That of `origin` with its forward/backward boundaries (without any: where the first repeat stands) and cuts,
        and as saved what the schedule really holds over a forward/backward boundary."""
        boundaries = self.origin.boundaries or tuple(np.flatnonzero(self.occurrences.recomputed)[:1].tolist())
        return Choice(self._held_over(boundaries), boundaries, self.origin.cuts)

    def _held_over(self, boundaries: Sequence[int]) -> frozenset[int]:
        """Values that are held from where they are first made over a forward/backward boundary; arguments and results
        are not named."""
        lives, first_runs = self.liveness.lives, self.occurrences.first_runs
        first = np.full(len(self.graph.sizes), -1, dtype=np.int64)
        first[lives.value[::-1]] = np.arange(len(lives) - 1, -1, -1)  # the first buffer of each value
        first = first[first >= len(self.graph.inputs)]
        positions = sorted(int(first_runs[boundary - 1]) + 1 if boundary else 0 for boundary in boundaries)
        following = np.array([*positions, np.iinfo(np.int64).max])  # behind the last there is none
        held = following[np.searchsorted(positions, lives.birth[first], side="right")] <= lives.death[first]
        return frozenset(lives.value[first[held]].tolist()) - set(self.graph.outputs)

    @functools.cached_property
    def occurrences(self) -> Occurrences:
        """The schedule's ops one by one."""
        return Occurrences.of(self.graph, self.schedule, self.liveness)


Solver = Callable[[Problem, "int | None"], Solution]
"""`solve(problem, budget)`: the least extra time with a peak of at most `budget` bytes, or, where that cannot be
reached, the least peak that the algorithm finds. Where `budget` is None, the least memory: what is allocated for it may
count more than the peak (`packing.py`)."""


class Priced(Protocol):
    """What has a price in memory (bytes) and in time (seconds)."""

    @property
    def peak(self) -> int: ...

    @property
    def extra_seconds(self) -> float: ...


Answer = TypeVar("Answer", bound=Priced)


def memory_first(solution: Priced) -> tuple[float, float]:
    """The order of solutions in which the least peak comes first, among equals the least time."""
    return solution.peak, solution.extra_seconds


def time_first(solution: Priced) -> tuple[float, float]:
    """The order of solutions in which the least time comes first, among equals the least peak."""
    return solution.extra_seconds, solution.peak


def pareto_front(solutions: Iterable[Answer]) -> tuple[Answer, ...]:
    """Those that none of the others beats in both memory and time, from least memory to least time."""
    front: list[Answer] = []
    for solution in sorted(solutions, key=memory_first):
        if not front or solution.extra_seconds < front[-1].extra_seconds:
            front.append(solution)
    return tuple(front)
