"""Cuts of a topological order before a turning point, and what segments between them cost.

All figures come from the plain step's buffers, as the liveness model saw them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from remat_opt.graph.graph import Graph
from remat_opt.graph.liveness import Liveness

MOST_CUTS = 400


class Cuts:
    """Candidate cuts: the positions where few bytes cross, the start first."""

    def __init__(self, graph: Graph, order: Sequence[int], turn: int, most: int = MOST_CUTS):
        self.graph = graph
        made: dict[int, int] = {}
        last_read: dict[int, int] = {}
        self.seconds = np.zeros(turn + 1)  # of all ops before a position
        for position in range(turn):
            op = graph.ops[order[position]]
            last_read.update((value, position) for value in op.inputs if value in made)
            made.update(dict.fromkeys(op.outputs, position))
            self.seconds[position + 1] = self.seconds[position] + op.seconds
        self.turn = turn
        self.values = sorted(last_read, key=lambda value: (made[value], value))
        self.born = np.array([made[value] for value in self.values], dtype=np.int64)
        self.dies = np.array([last_read[value] for value in self.values], dtype=np.int64)
        self.sizes = np.array([graph.sizes[value] for value in self.values], dtype=np.int64)
        flow = np.zeros(turn + 1, dtype=np.int64)
        np.add.at(flow, self.born + 1, self.sizes)
        np.add.at(flow, self.dies + 1, -self.sizes)
        self.positions = [0, *_low_positions(np.cumsum(flow)[1:turn], most)]

    def __len__(self) -> int:
        return len(self.positions)

    def stop(self, j: int | None) -> int:
        """The position of a cut; None stands for the turning point."""
        return self.turn if j is None else self.positions[j]

    def crossing(self, cut: int) -> frozenset[int]:
        """Values made before a cut and read behind it by ops before the turning point."""
        position = self.positions[cut]
        chosen = np.flatnonzero((self.born < position) & (self.dies >= position))
        return frozenset(self.values[index] for index in chosen)

    def new_crossing(self, i: int, j: int) -> np.ndarray:
        """Indices of the values made between cuts i and j that cross j."""
        start, stop = self.positions[i], self.positions[j]
        low, high = np.searchsorted(self.born, (start, stop))
        return low + np.flatnonzero(self.dies[low:high] >= stop)


def _low_positions(crossing_bytes: np.ndarray, most: int) -> list[int]:
    """At most `most` positions (from 1) where no fewer bytes cross anywhere near.

    "Near" begins with the neighbours and is widened until few enough are left, so that they stay spread over the
    whole step whatever its parts' sizes. Among equal neighbours one in each stretch of that width is taken.
    """
    if len(crossing_bytes) <= most:
        return list(range(1, len(crossing_bytes) + 1))
    reach = 1
    while True:
        padded = np.pad(crossing_bytes.astype(np.float64), reach, constant_values=np.inf)
        windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach + 1)
        chosen: list[int] = []
        for index in np.flatnonzero(windows.min(axis=1) == crossing_bytes):
            if not chosen or index - chosen[-1] > reach:
                chosen.append(int(index))
        if len(chosen) <= most:
            return [index + 1 for index in chosen]
        reach *= 2


class SegmentCosts:
    """What a segment from cut i to cut j costs when it is recomputed, and when it is kept.

    A *residual* is a buffer of the plain step that is made before the turning point and read behind it.
    """

    RELEVANT = 256  # buffers smaller than the largest by more than this factor do not date a segment

    def __init__(self, cuts: Cuts, live: Liveness):
        self.cuts = cuts
        turn = cuts.turn
        residuals = sorted((b for b in live.buffers if b.size and b.birth < turn <= b.death), key=lambda b: b.birth)
        reads = dict(zip(cuts.values, cuts.dies, strict=True))
        self.born = np.array([b.birth for b in residuals], dtype=np.int64)
        self.death = np.array([b.death for b in residuals], dtype=np.int64)
        self.first = np.array([b.first_read(turn) for b in residuals], dtype=np.int64)
        self.size = np.array([b.size for b in residuals], dtype=np.int64)
        self.last_forward = np.array([reads.get(b.value, -1) for b in residuals], dtype=np.int64)
        self.summed = np.concatenate([[0], np.cumsum(self.size)])
        stored = {b.value for b in residuals}
        self.not_residual = np.array([value not in stored for value in cuts.values], dtype=bool)
        needed = _needed_to_make(cuts.graph, stored)
        self.forward = [b for b in live.buffers if b.size and b.birth < turn and b.value in needed]
        self.cotangents = _curve([b for b in live.buffers if b.birth >= turn], len(live.live) + 1)
        self._peaks: dict[int, np.ndarray] = {}
        self._backward_peaks: dict[tuple[int, int | None], int] = {}

    def residual_bytes(self, i: int, j: int | None) -> int:
        """Bytes of all residuals that a segment makes."""
        low, high = np.searchsorted(self.born, (self.cuts.positions[i], self.cuts.stop(j)))
        return int(self.summed[high] - self.summed[low])

    def crossing_bytes(self, i: int, j: int) -> int:
        """Bytes that have to be saved at j when the segment is recomputed."""
        return int(self.cuts.sizes[self.cuts.new_crossing(i, j)].sum())

    def kept_bytes(self, i: int, j: int) -> int:
        """Bytes that stay when the segment is kept: its residuals, and what crosses j."""
        crossing = self.cuts.new_crossing(i, j)
        return self.residual_bytes(i, j) + int(self.cuts.sizes[crossing[self.not_residual[crossing]]].sum())

    def forward_peak(self, i: int, j: int) -> int:
        """The most bytes live while the segment is recomputed, of what it makes itself."""
        if i not in self._peaks:
            start, turn = self.cuts.positions[i], self.cuts.turn
            inside = [(b.birth, min(b.death, turn - 1), b.size) for b in self.forward if b.birth >= start]
            curve = np.zeros(turn + 1, dtype=np.int64)
            for birth, death, size in inside:
                curve[birth] += size
                curve[death + 1] -= size
            self._peaks[i] = np.maximum.accumulate(np.cumsum(curve)[:turn])
        return int(self._peaks[i][self.cuts.positions[j] - 1])

    def backward_peak(self, i: int, j: int | None) -> int:
        """The most bytes live while a segment runs backward: what is left of its residuals, and the cotangents."""
        if (i, j) not in self._backward_peaks:
            self._backward_peaks[i, j] = self._backward_peak(i, j)
        return self._backward_peaks[i, j]

    def _backward_peak(self, i: int, j: int | None) -> int:
        stop = self.cuts.stop(j)
        low, high = np.searchsorted(self.born, (self.cuts.positions[i], stop))
        if low == high:
            return 0
        total = int(self.summed[high] - self.summed[low])
        # Scalars and statistics may be read much earlier or later than the rest; they do not say when a segment runs.
        large = np.flatnonzero(self.size[low:high] * self.RELEVANT >= self.size[low:high].max()) + low
        by_death = large[np.argsort(self.death[large], kind="stable")]
        deaths = self.death[by_death]
        remaining = total - np.concatenate([[0], np.cumsum(self.size[by_death])[:-1]])
        # What crosses into the next segment is saved and read there first; the others say when this one begins.
        inside = large[self.last_forward[large] < stop]
        begin = min(int(self.first[inside].min(initial=deaths[-1])), int(deaths[0]))
        edges = np.concatenate([[begin], deaths])
        peak = 0
        for k in range(len(deaths)):
            # between two deaths: the most cotangents, with what remains until the later of them
            most = self.cotangents[edges[k] : edges[k + 1] + 1].max(initial=0)
            peak = max(peak, int(remaining[k]) + int(most))
        return peak


def _needed_to_make(graph: Graph, values: set[int]) -> set[int]:
    """All values that have to be made again when these are; what the step returns is there anyway."""
    there = {*graph.inputs, *graph.outputs}
    needed: set[int] = set()
    stack = list(values - there)
    while stack:
        value = stack.pop()
        if value not in needed:
            needed.add(value)
            stack.extend(v for v in graph.ops[graph.producer[value]].inputs if v not in there)
    return needed


def _curve(buffers: Sequence, length: int) -> np.ndarray:
    curve = np.zeros(length + 1, dtype=np.int64)
    for buffer in buffers:
        curve[buffer.birth] += buffer.size
        curve[buffer.death + 1] -= buffer.size
    return np.cumsum(curve)[:length]
