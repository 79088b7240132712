"""Cuts of a topological order before a forward/backward boundary, and what segments between them cost.

All figures come from the plain step's buffers, as the liveness model saw them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from remat_opt.graph.graph import Graph, Kind
from remat_opt.graph.liveness import Liveness

MOST_CUTS = 240
_MOST_MOMENTS = 512


class Cuts:
    """Candidate cuts: the positions where few bytes cross, the start first.

    Args:
        graph: the step.
        order: every op once, in the order of first runs.
        forward_end: the forward/backward boundary, a position of the order.
        most: at most so many cuts besides the start.
        positions: these and no others.
    """

    def __init__(
        self,
        graph: Graph,
        order: Sequence[int],
        forward_end: int,
        most: int = MOST_CUTS,
        positions: Sequence[int] | None = None,
    ):
        self.graph = graph
        made: dict[int, int] = {}
        last_read: dict[int, int] = {}
        self.seconds = np.zeros(forward_end + 1)  # of all ops before a position
        for position in range(forward_end):
            op = graph.ops[order[position]]
            last_read.update((value, position) for value in op.inputs if value in made)
            made.update(dict.fromkeys(op.outputs, position))
            self.seconds[position + 1] = self.seconds[position] + op.seconds
        self.forward_end = forward_end
        self.values = sorted(last_read, key=lambda value: (made[value], value))
        self.born = np.array([made[value] for value in self.values], dtype=np.int64)
        self.dies = np.array([last_read[value] for value in self.values], dtype=np.int64)
        self.sizes = np.array([graph.sizes[value] for value in self.values], dtype=np.int64)
        if positions is None:
            flow = _curve(self.born + 1, self.dies, self.sizes, forward_end + 1)
            positions = [0, *_low_positions(flow[1:forward_end], most)]
        self.positions = list(positions)
        self.stops = np.array([*self.positions, forward_end], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.positions)

    def crossing(self, cut: int) -> frozenset[int]:
        """Values made before a cut and read behind it by ops before the forward/backward boundary."""
        position = self.positions[cut]
        chosen = np.flatnonzero((self.born < position) & (self.dies >= position))
        return frozenset(self.values[index] for index in chosen)

    @functools.cached_property
    def crossing_bytes(self) -> np.ndarray:
        """[j], bytes that cross each cut."""
        flow = _curve(self.born + 1, self.dies, self.sizes, self.forward_end + 1)
        return flow[self.stops[:-1]]


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
    """What the segment from cut i to cut j costs when it is recomputed, and when it is kept.

    A *residual* is a buffer of the plain step that is made before the forward/backward boundary and read behind it. All
    tables are indexed [i, j] with i < j, in bytes; the last column is the segment from cut i to the forward/backward
    boundary.

    Args:
        cuts: where segments may begin.
        live: the plain step's liveness in the cuts' order.
        with_later: whether later segments' residuals count while a segment runs backward, as far as they are live then
            in the plain step. Exact where that is so in the schedule, too (a chain); where backward ops of several
            segments mix it may be too much.
    """

    RELEVANT = 256  # buffers smaller than the largest near by more than this factor do not date a segment

    def __init__(self, cuts: Cuts, live: Liveness, *, with_later: bool = False):
        self.cuts = cuts
        self.with_later = with_later
        lives, forward_end = live.lives, cuts.forward_end
        self.length = len(live.live) + 1
        held = np.flatnonzero((lives.size > 0) & (lives.birth < forward_end) & (lives.death >= forward_end))
        self.born, self.death, self.size = lives.birth[held], lives.death[held], lives.size[held]
        self.values = lives.value[held]
        self.first = _first_reads(lives, forward_end)[held]
        reads = np.full(len(cuts.graph.sizes), -1, dtype=np.int64)
        reads[cuts.values] = cuts.dies
        self.last_forward = reads[self.values]
        self.stage = np.searchsorted(cuts.stops, self.born, side="right") - 1  # the cut before it is made
        stored = np.zeros(len(cuts.graph.sizes), dtype=bool)
        stored[self.values] = True
        self.not_residual = ~stored[np.array(cuts.values, dtype=np.int64)]
        self.needed = np.zeros(len(cuts.graph.sizes), dtype=bool)  # to make the residuals again
        self.needed[list(_needed_to_make(cuts.graph, set(self.values.tolist())))] = True
        forward = np.flatnonzero((lives.size > 0) & (lives.birth < forward_end) & self.needed[lives.value])
        self._forward = lives.birth[forward], np.minimum(lives.death[forward], forward_end - 1), lives.size[forward]
        behind = np.flatnonzero(lives.birth >= forward_end)
        self.cotangents = _curve(lives.birth[behind], lives.death[behind], lives.size[behind], self.length)

    @functools.cached_property
    def residual(self) -> np.ndarray:
        """Bytes of all residuals that a segment makes."""
        before = np.concatenate([[0], np.cumsum(self.size)])[np.searchsorted(self.born, self.cuts.stops)]
        return before[None, :] - before[:-1, None]

    @functools.cached_property
    def crossing(self) -> np.ndarray:
        """Bytes that have to be saved at j when the segment is recomputed."""
        return self._crossing(np.ones(len(self.cuts.values), dtype=bool))

    @functools.cached_property
    def kept(self) -> np.ndarray:
        """Bytes that stay when the segment is kept: its residuals, and what crosses j."""
        return self.residual + self._crossing(self.not_residual)

    def expensive(self, order: Sequence[int]) -> np.ndarray:
        """Bytes that stay when a segment's elementwise work is recomputed, and nothing else.

        That is what the rest makes and the backward or the elementwise work reads, and what crosses j.
        """
        cuts, graph = self.cuts, self.cuts.graph
        read = set(self.values.tolist())
        for op in order[: cuts.forward_end]:
            if graph.ops[op].kind is Kind.ELEMENTWISE and any(self.needed[v] for v in graph.ops[op].outputs):
                read.update(graph.ops[op].inputs)
        before = np.zeros(cuts.forward_end + 1, dtype=np.int64)
        among = np.zeros(len(graph.sizes), dtype=bool)
        for position, op in enumerate(order[: cuts.forward_end]):
            if graph.ops[op].kind is not Kind.ELEMENTWISE:
                made = [v for v in graph.ops[op].outputs if v in read and self.needed[v]]
                among[made] = True
                before[position + 1] = sum(graph.sizes[v] for v in made)
        before = np.cumsum(before)[cuts.stops]
        return before[None, :] - before[:-1, None] + self._crossing(~among[np.array(cuts.values, dtype=np.int64)])

    def _crossing(self, which: np.ndarray) -> np.ndarray:
        cuts, count = self.cuts, len(self.cuts)
        stage = np.searchsorted(cuts.stops, cuts.born[which], side="right") - 1
        until = np.searchsorted(cuts.stops[:-1], cuts.dies[which], side="right") - 1  # the last cut that it crosses
        table = np.zeros((count, count), dtype=np.int64)
        np.add.at(table, (stage, until), cuts.sizes[which])
        crossing = np.cumsum(table[:, ::-1], axis=1)[:, ::-1]  # [a, j]: made in stage a, across j
        made_before = np.concatenate([np.zeros((1, count), dtype=np.int64), np.cumsum(crossing, axis=0)])
        found = made_before[np.arange(count), np.arange(count)][None, :] - made_before[:-1]
        return np.concatenate([np.triu(found, 1), np.zeros((count, 1), dtype=np.int64)], axis=1)

    @functools.cached_property
    def forward(self) -> np.ndarray:
        """The most bytes live while a segment is recomputed, of what it makes itself."""
        return self.peaks_of(*self._forward)

    def peaks_of(self, birth: np.ndarray, death: np.ndarray, size: np.ndarray) -> np.ndarray:
        """[i, j], the most bytes live at once before j, of buffers that are born behind i."""
        count, forward_end, stops = len(self.cuts), self.cuts.forward_end, self.cuts.stops
        stage = np.searchsorted(stops, birth, side="right") - 1
        by_stage = np.argsort(stage, kind="stable")
        bounds = np.searchsorted(stage[by_stage], np.arange(count + 1))
        curve = np.zeros(forward_end + 1, dtype=np.int64)
        table = np.zeros((count, count + 1), dtype=np.int64)
        for i in range(count - 1, -1, -1):
            own = by_stage[bounds[i] : bounds[i + 1]]
            curve += _curve(birth[own], death[own], size[own], forward_end + 1)
            most = np.maximum.accumulate(curve[stops[i] :])
            table[i, i + 1 :] = most[stops[i + 1 :] - 1 - stops[i]]
        return table

    @functools.cached_property
    def backward_range(self) -> tuple[np.ndarray, np.ndarray]:
        """[i, j], when the segment's backward begins and ends: positions in the plain step.

        Scalars and statistics may be read much earlier or later than the rest; they do not say when. What crosses into
        the next segment is saved and read there first; what does not says when this one begins.
        """
        count, never = len(self.cuts), self.length
        nearby = np.zeros(count, dtype=np.int64)
        np.maximum.at(nearby, self.stage, self.size)
        large = self.size * self.RELEVANT >= np.maximum(nearby[self.stage], self.size.max(initial=0) // 64)
        stage = self.stage[large]
        inside_from = np.searchsorted(self.cuts.stops, self.last_forward[large], side="right")
        first = np.full((count, count + 1), never, dtype=np.int64)
        np.minimum.at(first, (stage, np.maximum(inside_from, stage + 1)), self.first[large])
        np.minimum.at(first, (stage, stage + 1), self.death[large])
        first = np.minimum.accumulate(np.minimum.accumulate(first, axis=1)[::-1], axis=0)[::-1]
        last = np.full((count, count + 1), -1, dtype=np.int64)
        np.maximum.at(last, (stage, stage + 1), self.death[large])
        last = np.maximum.accumulate(np.maximum.accumulate(last, axis=1)[::-1], axis=0)[::-1]
        return first, last

    @functools.cached_property
    def backward(self) -> np.ndarray:
        """The most bytes live while a segment runs backward: what is left of its residuals, and the cotangents."""
        count = len(self.cuts)
        table = np.zeros((count, count + 1), dtype=np.int64)
        if not len(self.size):
            return table
        first, last = self.backward_range
        left, cotangents, moment = self._left()
        for i in range(count):
            begin, end = moment[first[i, i + 1 :]], moment[last[i, i + 1 :].clip(0)]
            own = left[i][None, :] - (0 if self.with_later else left[i + 1 :]) + cotangents[None, :]
            at = np.arange(len(cotangents))[None, :]
            outside = (at < begin[:, None]) | (at > end[:, None])
            table[i, i + 1 :] = np.where(outside, 0, own).max(axis=1)
        return np.where(self.residual > 0, np.maximum(table, 0), 0)

    def _left(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """[i, t], bytes left at moment t of the residuals made behind cut i; [t], the most bytes of cotangents; for
        each position its moment.

        Moments are the stretches between deaths of residuals, or every so many of them where there are many.
        """
        count = len(self.cuts)
        deaths = np.unique(self.death)
        step = -(-len(deaths) // _MOST_MOMENTS)
        ends = deaths[step - 1 :: step]
        moment = np.searchsorted(ends, np.arange(self.length + 1), side="left")
        starts = np.flatnonzero(np.diff(moment[:-1], prepend=-1))
        cotangents = np.maximum.reduceat(self.cotangents, starts)
        change = np.zeros((count + 1, len(starts) + 1), dtype=np.int64)
        np.add.at(change, (self.stage, np.zeros_like(self.stage)), self.size)
        np.add.at(change, (self.stage, moment[self.death] + 1), -self.size)
        made_after = np.cumsum(change[::-1], axis=0)[::-1]
        return np.cumsum(made_after, axis=1)[:, :-1], cotangents, moment

    @functools.cached_property
    def seconds(self) -> np.ndarray:
        """Seconds of all ops of a segment."""
        before = self.cuts.seconds[self.cuts.stops]
        return before[None, :] - before[:-1, None]


def _first_reads(lives, forward_end: int) -> np.ndarray:
    """For each buffer its first read at or after a position; its death where there is none."""
    owner = np.repeat(np.arange(len(lives)), lives.read_counts)
    late = np.flatnonzero(lives.reads >= forward_end)
    first = lives.death.copy()
    owners, index = np.unique(owner[late], return_index=True)
    first[owners] = np.minimum(first[owners], lives.reads[late[index]])
    return first


def _needed_to_make(graph: Graph, values: set[int]) -> set[int]:
    """All values that have to be recomputed when these are; what the step returns is there anyway."""
    there = {*graph.inputs, *graph.outputs}
    needed: set[int] = set()
    stack = list(values - there)
    while stack:
        value = stack.pop()
        if value not in needed:
            needed.add(value)
            stack.extend(v for v in graph.ops[graph.producer[value]].inputs if v not in there)
    return needed


def _curve(birth: np.ndarray, death: np.ndarray, size: np.ndarray, length: int) -> np.ndarray:
    """Bytes live at each position."""
    change = np.bincount(birth, size, minlength=length + 1) - np.bincount(death + 1, size, minlength=length + 1)
    return np.cumsum(change.astype(np.int64))[:length]
