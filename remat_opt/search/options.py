"""Segments with options: the least extra time under a budget.

The segments of `segments.py`, each with one of three options: *recompute* all of it; keep its *dear* results (products,
convolutions, reductions, opaque ops) and recompute the elementwise rest; or *keep* all that is read behind the peak.
With `b` bytes saved by the segments before cut i, a segment (i, j] under an option fits if b + transient ≤ budget, and

    time(i, b) = min over j, option of  seconds(i, j, option) + time(j, b + saved(i, j, option)),

a dynamic programme over cuts and saved bytes in slots, as Rotor's (Herrmann et al. 2019, section 4) with options as
Rockmate's (Zhao et al. 2023). Saved bytes are rounded up, so that what the programme holds feasible is, by its own
figures; the simulated schedule decides.

Gaps: as `segments.py`; the choice inside a segment is by kind of op, not by value.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence

import numpy as np

from remat_opt.graph.derive import Choice
from remat_opt.graph.graph import Graph, Kind
from remat_opt.graph.liveness import Liveness
from remat_opt.search.cuts import Cuts, SegmentCosts

MOST_CUTS = 120
SLOTS = 160


class Option(enum.IntEnum):
    """What becomes of a segment."""

    RECOMPUTE = 0
    DEAR = 1
    KEEP = 2


class OptionTable:
    """All segments before a turning point with their options: made once, asked for any budget."""

    def __init__(self, graph: Graph, order: Sequence[int], live: Liveness, turn: int):
        self.graph = graph
        self.order = order
        self.cuts = Cuts(graph, order, turn, MOST_CUTS)
        self.costs = SegmentCosts(self.cuts, live)
        self.residuals = {b.value for b in live.buffers if b.size and b.birth < turn <= b.death}
        # prefix sums over positions: seconds of cheap ops, bytes of dear residuals
        cheap, dear = np.zeros(turn + 1), np.zeros(turn + 1, dtype=np.int64)
        for position in range(turn):
            op = graph.ops[order[position]]
            cheap[position + 1] = op.seconds if op.kind is Kind.ELEMENTWISE else 0.0
            dear[position + 1] = sum(graph.sizes[value] for value in self._dear_results(position))
        self.cheap_seconds, self.dear_bytes = np.cumsum(cheap), np.cumsum(dear)

    def _dear_results(self, position: int) -> list[int]:
        op = self.graph.ops[self.order[position]]
        return [] if op.kind is Kind.ELEMENTWISE else [value for value in op.outputs if value in self.residuals]

    @functools.cached_property
    def segments(self) -> list[list[tuple[int, int, tuple[int, int, int], tuple[float, float, float]]]]:
        """For each cut i the segments from it: (j, transient, saved bytes by option, seconds by option)."""
        plain = self.costs.residual_bytes(0, None)
        return [
            [self._segment(i, j) for j in range(i + 1, len(self.cuts)) if self.costs.residual_bytes(i, j) <= plain]
            for i in range(len(self.cuts))
        ]

    def _segment(self, i: int, j: int) -> tuple[int, int, tuple[int, int, int], tuple[float, float, float]]:
        start, stop = self.cuts.positions[i], self.cuts.positions[j]
        crossing, kept = self.costs.crossing_bytes(i, j), self.costs.kept_bytes(i, j)
        dear = min(kept, crossing + int(self.dear_bytes[stop] - self.dear_bytes[start]))
        seconds = float(self.cuts.seconds[stop] - self.cuts.seconds[start])
        cheap = float(self.cheap_seconds[stop] - self.cheap_seconds[start])
        return j, self.costs.backward_peak(i, j), (crossing, dear, kept), (seconds, cheap, 0.0)

    def least_time(self, budget: int) -> Choice | None:
        """The choice with the least extra time whose peak, by the table's figures, is within a budget in bytes."""
        count, slot = len(self.cuts), max(budget, 1) / SLOTS
        time = np.full((count, SLOTS + 1), np.inf)
        step = np.full((count, SLOTS + 1, 2), -1, dtype=np.int64)
        saved_so_far = np.arange(SLOTS + 1) * slot
        for i in range(count - 1, -1, -1):
            last = self.costs.backward_peak(i, None)
            time[i, saved_so_far + last <= budget] = 0.0
            for j, backward, saved, seconds in self.segments[i]:
                if backward > budget:
                    continue
                for option in Option:
                    most = backward
                    if option is Option.RECOMPUTE:
                        most = max(backward, self.costs.forward_peak(i, j))
                    rooms = int((budget - most) // slot)  # the most slots that may be taken already
                    taken = -int(-saved[option] // slot)
                    rooms = min(rooms, SLOTS - taken)
                    if rooms < 0:
                        continue
                    total = seconds[option] + time[j, taken : taken + rooms + 1]
                    better = np.flatnonzero(total < time[i, : rooms + 1])
                    time[i, better] = total[better]
                    step[i, better] = (j, int(option))
        return self._choice(slot, step) if np.isfinite(time[0, 0]) else None

    def _choice(self, slot: float, step: np.ndarray) -> Choice:
        saved: set[int] = set()
        positions: list[int] = []
        i = taken = 0
        while step[i, taken, 0] >= 0:
            j, option = int(step[i, taken, 0]), Option(int(step[i, taken, 1]))
            start, stop = self.cuts.positions[i], self.cuts.positions[j]
            saved |= self.cuts.crossing(j)
            if option is Option.KEEP:
                saved.update(v for position in range(start, stop) for v in self.graph.ops[self.order[position]].outputs)
            elif option is Option.DEAR:
                saved.update(v for position in range(start, stop) for v in self._dear_results(position))
            positions.append(stop)
            _, _, bytes_of, _ = next(segment for segment in self.segments[i] if segment[0] == j)
            taken += -int(-bytes_of[option] // slot)
            i = j
        return Choice(frozenset(saved), tuple(positions[-1:]), tuple(positions))
