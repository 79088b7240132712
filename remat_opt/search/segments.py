"""Segments over cuts of the topological order, by the prefix-maximum objective (Hong et al. 2025, section 3).

Everything live at the step's peak was made before it. The ops before the peak are cut into contiguous segments; what
crosses a cut is saved, everything else is recomputed, a segment at a time, from the last to the first. When a segment
runs backward the segments behind it are done, so that

    least(i) = min over j > i of max(transient(i, j), crossing(i, j) + least(j))

with `crossing(i, j)` the bytes made in segment (i, j] and read behind it, and `transient(i, j)` the most bytes live
while the segment runs backward: its own buffers and the cotangents, both as the liveness model saw them in the plain
step. The last segment's backward follows its forward, so that it is not recomputed: the turning point is its start.

Gaps: one level of recomputation; segments are contiguous in the program's order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from remat_opt.graph.derive import Choice
from remat_opt.graph.graph import Graph
from remat_opt.graph.liveness import Liveness

MOST_CUTS = 400


def least_memory(graph: Graph, order: Sequence[int], live: Liveness, turn: int) -> Choice:
    """The cuts before position `turn` of `order` that make the peak least, by the recurrence above."""
    cuts = Cuts(graph, order, turn)
    tables = _Transients(cuts, live, turn)
    count = len(cuts.positions)
    least = np.full(count, np.inf)
    following = [-1] * count
    for i in range(count - 1, -1, -1):
        # the last segment: from this cut to the turn
        least[i] = tables.transient(i, None)
        for j in range(i + 1, count):
            if tables.residual_bytes(i, j) >= least[i]:
                break  # grows with the segment, and is a lower bound of its transient
            transient = tables.transient(i, j)
            total = max(transient, cuts.new_bytes(i, j) + least[j])
            if total < least[i]:
                least[i], following[i] = total, j
    chosen = []
    i = 0
    while following[i] >= 0:
        i = following[i]
        chosen.append(i)
    saved = frozenset().union(*(cuts.crossing(i) for i in chosen)) if chosen else frozenset()
    positions = tuple(cuts.positions[i] for i in chosen)
    return Choice(saved, positions[-1:], positions)


class Cuts:
    """Candidate cuts: the positions where few bytes cross, the start first."""

    def __init__(self, graph: Graph, order: Sequence[int], turn: int):
        self.graph = graph
        self.made: dict[int, int] = {}
        last_read: dict[int, int] = {}
        for position in range(turn):
            op = graph.ops[order[position]]
            for value in op.inputs:
                if value in self.made:
                    last_read[value] = position
            self.made.update(dict.fromkeys(op.outputs, position))
        self.values = sorted(last_read, key=lambda value: (self.made[value], value))
        self.born = np.array([self.made[value] for value in self.values], dtype=np.int64)
        self.dies = np.array([last_read[value] for value in self.values], dtype=np.int64)
        self.sizes = np.array([graph.sizes[value] for value in self.values], dtype=np.int64)
        flow = np.zeros(turn + 1, dtype=np.int64)
        np.add.at(flow, self.born + 1, self.sizes)
        np.add.at(flow, self.dies + 1, -self.sizes)
        crossing_bytes = np.cumsum(flow)
        self.positions = [0, *_low_positions(crossing_bytes[1:turn], MOST_CUTS)]

    def crossing(self, cut: int) -> frozenset[int]:
        """Values made before a cut and read behind it."""
        position = self.positions[cut]
        chosen = np.flatnonzero((self.born < position) & (self.dies >= position))
        return frozenset(self.values[index] for index in chosen)

    def new_bytes(self, i: int, j: int) -> int:
        """Bytes made between cuts i and j that cross j."""
        start, stop = self.positions[i], self.positions[j]
        return int(self.sizes[(self.born >= start) & (self.born < stop) & (self.dies >= stop)].sum())


def _low_positions(crossing_bytes: np.ndarray, most: int) -> list[int]:
    """At most `most` positions (from 1) where fewer bytes cross than anywhere near, the last of each plateau.

    "Near" begins with the neighbours and is widened until few enough positions are left, so that they stay spread over
    the whole step whatever its parts' sizes.
    """
    reach = 1
    while True:
        padded = np.pad(crossing_bytes.astype(np.float64), reach, constant_values=np.inf)
        windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach + 1)
        lowest = windows.min(axis=1) == crossing_bytes
        last_of_plateau = windows[:, reach + 1 :].min(axis=1) > crossing_bytes
        lows = np.flatnonzero(lowest & last_of_plateau)
        if len(lows) <= most:
            return [int(index) + 1 for index in lows]
        reach *= 2


class _Transients:
    """The most bytes live while a segment runs backward, from the plain step's buffers."""

    RELEVANT = 256  # buffers smaller than the largest by more than this factor do not date a segment

    def __init__(self, cuts: Cuts, live: Liveness, turn: int):
        self.cuts = cuts
        self.turn = turn
        residuals = [b for b in live.buffers if b.size and b.birth < turn <= b.death]
        residuals.sort(key=lambda b: b.birth)
        self.born = np.array([b.birth for b in residuals], dtype=np.int64)
        self.death = np.array([b.death for b in residuals], dtype=np.int64)
        self.first = np.array([b.first_read(turn) for b in residuals], dtype=np.int64)
        reads = dict(zip(cuts.values, cuts.dies, strict=True))
        self.last_forward = np.array([reads.get(b.value, -1) for b in residuals], dtype=np.int64)
        self.size = np.array([b.size for b in residuals], dtype=np.int64)
        self.summed = np.concatenate([[0], np.cumsum(self.size)])
        end = len(live.live)
        self.cotangents = np.zeros(end + 1, dtype=np.int64)
        for buffer in live.buffers:
            if buffer.birth >= turn:
                self.cotangents[buffer.birth] += buffer.size
                self.cotangents[buffer.death + 1 if buffer.death + 1 <= end else end] -= buffer.size
        self.cotangents = np.cumsum(self.cotangents)

    def residual_bytes(self, i: int, j: int) -> int:
        low, high = np.searchsorted(self.born, (self.cuts.positions[i], self.cuts.positions[j]))
        return int(self.summed[high] - self.summed[low])

    def transient(self, i: int, j: int | None) -> float:
        start = self.cuts.positions[i]
        stop = self.turn if j is None else self.cuts.positions[j]
        low, high = np.searchsorted(self.born, (start, stop))
        if low == high:
            return 0.0
        total = int(self.summed[high] - self.summed[low])
        # Scalars and statistics may be read much earlier or later than the rest; they do not say when a segment runs.
        large = np.flatnonzero(self.size[low:high] * self.RELEVANT >= self.size[low:high].max()) + low
        by_death = large[np.argsort(self.death[large], kind="stable")]
        deaths, size = self.death[by_death], self.size[by_death]
        remaining = total - np.concatenate([[0], np.cumsum(size)[:-1]])
        # What crosses into the next segment is saved and read there first; the others say when this one begins.
        inside = large[self.last_forward[large] < stop]
        begin = min(int(self.first[inside].min(initial=deaths[-1])), int(deaths[0]))
        edges = np.concatenate([[begin], deaths])
        peak = 0
        for k in range(len(deaths)):
            # between two deaths: the most cotangents, with what remains until the later of them
            a, b = int(edges[k]), int(edges[k + 1]) + 1
            peak = max(peak, int(remaining[k]) + int(self.cotangents[a:b].max(initial=0)))
        return float(peak)
