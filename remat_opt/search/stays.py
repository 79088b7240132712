"""When a schedule's values may be on the host: the times in which nothing reads them.

Copies begin and end at ops of first runs, or before a recomputed run, where the writer can put a barrier.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from remat_opt.graph.graph import Graph
from remat_opt.graph.schedule import Run, Schedule
from remat_opt.graph.transfers import SMALLEST_COPY, places
from remat_opt.search.problem import Solution


@dataclasses.dataclass(frozen=True, slots=True)
class Stay:
    """A time in which a value may be on the host. Places are indices in `Schedule.order`.

    Attributes:
        value: the value.
        size: its bytes.
        made: the place of the op that makes it.
        start: the first place after the last read of its buffer.
        stop: the last place before the next read.
    """

    value: int
    size: int
    made: int
    start: int
    stop: int


class Timeline:
    """The places of some runs with their time."""

    def __init__(self, graph: Graph, runs: tuple[Run, ...]):
        self.graph = graph
        self.schedule = Schedule(runs)
        self.order = np.array(self.schedule.order, dtype=np.int64)
        self.seconds = np.concatenate([[0.0], np.cumsum(graph.op_seconds[self.order])])
        self.allowed = np.fromiter(places(self.schedule), dtype=np.int64)

    def last_until(self, place: int) -> int:
        """The last place up to this one at which a copy may begin or end."""
        return int(self.allowed[max(np.searchsorted(self.allowed, place, side="right") - 1, 0)])

    def first_from(self, place: int) -> int:
        """The first such place from this one on."""
        at = np.searchsorted(self.allowed, place)
        return int(self.allowed[at]) if at < len(self.allowed) else len(self.order)

    def touches(self, values: Iterable[int]) -> dict[int, list[int]]:
        """Where each value is made and read."""
        found: dict[int, list[int]] = {value: [] for value in values}
        for place, op in enumerate(self.order.tolist()):
            for value in found.keys() & {*self.graph.ops[op].inputs, *self.graph.ops[op].outputs}:
                found[value].append(place)
        return found

    def stay(self, value: int, made: int, before: int, after: int) -> Stay:
        """From one touch to the next."""
        size = self.graph.sizes[value]
        return Stay(value, size, made, self.first_from(before + 1), self.last_until(after))

    def idle(self, stay: Stay) -> float:
        """Seconds in which nothing reads the value."""
        return float(self.seconds[stay.stop] - self.seconds[stay.start]) if stay.start < stay.stop else 0.0

    def live(self, solution: Solution) -> np.ndarray:
        """Bytes that are live at each place of a schedule with these runs."""
        position = solution.occurrences.position
        before = np.concatenate([[-1], position[:-1]]) + 1  # the barrier of a recomputed run stands before its op
        return np.maximum(solution.liveness.live[position], solution.liveness.live[before])


class Stays:
    """The values of a schedule that may go to the host, each for the longest time in which nothing reads it."""

    def __init__(self, solution: Solution):
        graph = solution.graph
        self.timeline = Timeline(graph, solution.schedule.runs)
        self.live = self.timeline.live(solution)
        again, outputs = {*solution.schedule.recomputed}, {*graph.outputs}
        values = [
            op.outputs[0]
            for index, op in enumerate(graph.ops)
            if len(op.outputs) == 1 and index not in again and graph.sizes[op.outputs[0]] >= SMALLEST_COPY
        ]
        self.every: list[Stay] = []
        for value, touches in self.timeline.touches(set(values) - outputs).items():
            pairs = itertools.pairwise(touches)
            stays = [self.timeline.stay(value, touches[0], before, after) for before, after in pairs]
            longest = max(stays, key=self.timeline.idle, default=None)
            if longest is not None and longest.start < longest.stop:
                self.every.append(longest)
        self.every.sort(key=lambda stay: (-self.timeline.idle(stay), stay.value))

    def hidden(self, room: float) -> list[Stay]:
        """The stays of longest time, of so many bytes."""
        found = []
        for stay in self.every:
            if stay.size <= room:
                room -= stay.size
                found.append(stay)
        return found

    def until(self, budget: int, chosen: Sequence[Stay]) -> list[Stay] | None:
        """Some stays, and more until no more is live than a budget allows; None where that cannot be reached."""
        live, found, there = self.live.copy(), [*chosen], []
        for stay in chosen:
            live[stay.start : stay.stop] -= stay.size
        waiting = sorted((stay for stay in self.every if stay not in {*chosen}), key=lambda stay: -stay.start)
        while len(over := np.flatnonzero(live > budget)):
            place = int(over[0])
            while waiting and waiting[-1].start <= place:
                there.append(waiting.pop())
            there = [stay for stay in there if stay.stop > place]
            if not there:
                return None
            last = max(there, key=lambda stay: (stay.stop, stay.size, stay.value))
            there.remove(last)
            found.append(last)
            live[last.start : last.stop] -= last.size
        return found
