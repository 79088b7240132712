"""Segments over cuts of the topological order, by the prefix-maximum objective (Hong et al. 2025, section 3).

Everything live at the step's peak was made before it. The ops before the peak are cut into contiguous segments. A
segment is *recomputed*: what crosses its end is saved, the rest is made again when its backward comes; or it is *kept*:
all that is read behind the peak is saved. Segments run backward from the last to the first, so that those behind are
done when one runs:

    least(i) = min over j > i of  max(backward(i, j), forward(i, j), crossing(i, j) + least(j))   recomputed
                              or  max(backward(i, j), kept(i, j) + least(j))                      kept

`crossing` and `kept` are bytes that stay until the segment's own backward; `backward` is the most bytes live while it
runs, its own buffers and the cotangents; `forward` is the most while it is recomputed. All are taken from the plain
step's true live sets. Among equal peaks the shorter recomputation wins. The last segment's backward follows its
forward, so that it is not recomputed: the turning point is its start.

Gaps: one level of recomputation; segments are contiguous in the program's order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from remat_opt.graph.derive import Choice
from remat_opt.graph.graph import Graph
from remat_opt.graph.liveness import Liveness
from remat_opt.search.cuts import Cuts, SegmentCosts


@dataclasses.dataclass(frozen=True, slots=True)
class _Best:
    """The best way on from a cut: peak in bytes, then seconds of recomputation; the next cut and what becomes of the
    segment up to there."""

    peak: int
    seconds: float
    following: int | None = None
    kept: bool = False

    def better_than(self, other: _Best) -> bool:
        return (self.peak, self.seconds) < (other.peak, other.seconds)


def least_memory(graph: Graph, order: Sequence[int], live: Liveness, turn: int, *, keep: bool = True) -> Choice:
    """The segments before position `turn` of `order` that make the peak least, by the recurrence above.

    Args:
        graph: the step.
        order: every op once, in the order of first runs.
        live: the plain step's liveness in that order.
        turn: the position of the peak.
        keep: whether segments may be kept. What is kept stays to its last read, beyond a second turning point too.
    """
    return choose_segments(SegmentCosts(Cuts(graph, order, turn), live), order, keep=keep)


def choose_segments(costs: SegmentCosts, order: Sequence[int], *, keep: bool) -> Choice:
    """The same from costs that were made before."""
    return _choice(costs.cuts.graph, order, costs.cuts, _recurrence(costs.cuts, costs, keep))


def _recurrence(cuts: Cuts, costs: SegmentCosts, keep: bool) -> list[_Best]:
    best: list[_Best] = [_Best(0, 0.0)] * len(cuts)
    for i in range(len(cuts) - 1, -1, -1):
        here = _Best(costs.backward_peak(i, None), 0.0)
        for j in range(i + 1, len(cuts)):
            if costs.residual_bytes(i, j) > here.peak:
                break  # grows with the segment, and bounds its backward peak from below
            behind = best[j]
            backward = costs.backward_peak(i, j)
            if backward > here.peak:
                continue
            kept = _Best(max(backward, costs.kept_bytes(i, j) + behind.peak), behind.seconds, j, True)
            if keep and kept.better_than(here):
                here = kept
            stay = max(backward, costs.crossing_bytes(i, j) + behind.peak)
            if stay <= here.peak:
                seconds = float(cuts.seconds[cuts.positions[j]] - cuts.seconds[cuts.positions[i]])
                again = _Best(max(stay, costs.forward_peak(i, j)), behind.seconds + seconds, j, False)
                if again.better_than(here):
                    here = again
        best[i] = here
    return best


def _choice(graph: Graph, order: Sequence[int], cuts: Cuts, best: Sequence[_Best]) -> Choice:
    saved: set[int] = set()
    positions: list[int] = []
    i = 0
    while (step := best[i]).following is not None:
        start, stop = cuts.positions[i], cuts.positions[step.following]
        saved |= cuts.crossing(step.following)
        if step.kept:
            # All of it, virtual values too: what is not forgotten is not made again.
            saved.update(value for position in range(start, stop) for value in graph.ops[order[position]].outputs)
        positions.append(stop)
        i = step.following
    return Choice(frozenset(saved), tuple(positions[-1:]), tuple(positions))
