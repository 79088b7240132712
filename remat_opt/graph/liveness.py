"""Liveness: how many bytes are live at each moment of a schedule. The only definition of a peak in this project.

What it counts is what a compiler reports as temporary memory: arguments are not counted, results that the caller gets
are not counted, and a result that takes the place of a donated argument costs a buffer only while that argument is
still to be read.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence

import numpy as np

from remat_opt.graph.fusion import materialised
from remat_opt.graph.graph import Graph
from remat_opt.graph.schedule import Schedule
from remat_opt.graph.timeline import Stage, timeline


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One buffer's life: from `birth` to its last read, both included, in positions of the schedule."""

    value: int
    size: int
    birth: int
    reads: tuple[int, ...]

    @property
    def death(self) -> int:
        """The position of the last read; `birth` for what nobody reads."""
        return self.reads[-1] if self.reads else self.birth

    def first_read(self, position: int) -> int:
        """The first read at or after a position; `death` where there is none."""
        index = bisect.bisect_left(self.reads, position)
        return self.reads[index] if index < len(self.reads) else self.death


@dataclasses.dataclass(frozen=True)
class Liveness:
    """The result of simulating a schedule.

    Attributes:
        live: bytes live at each position (one position for each op run, one for each barrier).
        buffers: all buffers with their lives.
    """

    live: np.ndarray
    buffers: tuple[Buffer, ...]

    @property
    def peak(self) -> int:
        """The most bytes live at one moment."""
        return int(self.live.max(initial=0))

    @property
    def peak_position(self) -> int:
        """The first position at which `peak` is reached."""
        return int(self.live.argmax()) if len(self.live) else 0

    def at(self, position: int) -> list[Buffer]:
        """The buffers that are live at a position, the largest first."""
        there = [buffer for buffer in self.buffers if buffer.birth <= position <= buffer.death and buffer.size]
        return sorted(there, key=lambda buffer: (-buffer.size, buffer.value))


def simulate(graph: Graph, schedule: Schedule) -> Liveness:
    """Run a schedule on paper and record every buffer's life."""
    return _Simulation(graph).run(timeline(graph, schedule))


class _Simulation:
    def __init__(self, graph: Graph):
        self.graph = graph
        self.stored = materialised(graph)
        self.position = 0
        # One entry for each time that a value is made.
        self.value: list[int] = []
        self.birth: list[int] = []
        self.reads: list[list[int]] = []
        self.roots: list[tuple[int, ...]] = []  # the buffers that hold it: itself, or for a virtual value its sources
        self.current = [-1] * len(graph.sizes)
        self.workspace: dict[int, int] = {}  # by position
        self.argument = {value: instance for instance, value in enumerate(graph.inputs)}
        for value in graph.inputs:
            self.make(value, stored=True, sources=())

    def make(self, value: int, stored: bool, sources: Sequence[int]) -> None:
        instance = len(self.value)
        self.value.append(value)
        self.birth.append(self.position)
        self.reads.append([])
        self.roots.append((instance,) if stored else tuple(dict.fromkeys(sources)))
        self.current[value] = instance

    def read(self, value: int) -> tuple[int, ...]:
        roots = self.roots[self.current[value]]
        for root in roots:
            self.reads[root].append(self.position)
        return roots

    def run(self, stages: Sequence[Stage]) -> Liveness:
        for stage in stages:
            if stage.crossing is not None:
                for value in stage.crossing.covered:
                    roots = self.read(value)
                    if len(roots) != 1 or self.value[roots[0]] != value:
                        self.make(value, stored=True, sources=())
                self.position += 1
            for index in stage.run.ops:
                op = self.graph.ops[index]
                sources = [root for value in op.inputs for root in self.read(value)]
                for value in op.outputs:
                    self.make(value, self.stored[value], sources)
                if op.workspace:
                    self.workspace[self.position] = op.workspace
                self.position += 1
        for value in self.graph.outputs:
            self.read(value)
        return self.result()

    def result(self) -> Liveness:
        sizes, in_place_from = self.temporary_sizes()
        live = np.zeros(self.position + 2, dtype=np.int64)
        buffers = []
        for instance, value in enumerate(self.value):
            if self.roots[instance] != (instance,):
                continue
            reads = self.reads[instance]
            if instance in in_place_from:
                # It waits in a buffer of its own until nobody reads the argument whose place it takes.
                reads = [*(r for r in reads if r < in_place_from[instance]), in_place_from[instance]]
            buffer = Buffer(value, sizes[instance], self.birth[instance], tuple(reads))
            live[buffer.birth] += buffer.size
            live[buffer.death + 1] -= buffer.size
            buffers.append(buffer)
        live = np.cumsum(live)[: self.position + 1]
        for position, size in self.workspace.items():
            live[position] += size
        return Liveness(live, tuple(buffers))

    def temporary_sizes(self) -> tuple[list[int], dict[int, int]]:
        """Bytes of each instance, and for results that come too early for their donated argument's place the position
        of that argument's last read."""
        in_place_from: dict[int, int] = {}
        sizes = [self.graph.sizes[value] for value in self.value]
        outputs = set(self.graph.outputs)
        inputs = len(self.graph.inputs)
        taken_from = {output: given for given, output in self.graph.aliases}
        for instance, value in enumerate(self.value):
            if instance < inputs:
                sizes[instance] = 0
            elif value in outputs and self.current[value] == instance:
                given = taken_from.get(value)
                # In place only if nobody reads the donated argument after its successor has been made.
                if given is None or self.last_read(given) <= self.birth[instance]:
                    sizes[instance] = 0
                else:
                    in_place_from[instance] = self.last_read(given)
        return sizes, in_place_from

    def last_read(self, given: int) -> int:
        reads = self.reads[self.argument[given]]
        return reads[-1] if reads else -1
