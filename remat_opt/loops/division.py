"""Which chunks a loop's steps are divided into: the fewest extra FLOPs within a number of bytes, exactly.

The forward loop saves the first carries of each chunk, and the reverse loop takes the last chunk first. When it
reverses chunk k, the first carries of k chunks are live, as is what the chunk itself needs. So a kind of chunk that
needs much memory can be used while k is small, that is for the loop's first steps. The division is a shortest path; a
state has the number of chunks, the number of steps, the number of changes of kind, and the kind of the latest chunk.

It is optimal for the model of `costs.py`, except for loops of more than `MOST_UNITS` steps: these are divided in
units.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from remat_opt.graph.tables import min_along
from remat_opt.loops.choice import Chunks

MOST_UNITS = 128
SAME = -1


@dataclasses.dataclass(frozen=True)
class ChunkKind:
    """Chunks that are written alike.

    Attributes:
        steps: of one chunk.
        in_chunk: see `Chunks`.
        bytes: that are needed while one runs in reverse, without the first carries of chunks.
        flops: extra ones of one chunk.
    """

    steps: int
    in_chunk: frozenset[int]
    bytes: int
    flops: float


@dataclasses.dataclass(frozen=True)
class LastChunk:
    """The last chunk, which the forward loop leaves ready to run in reverse.

    Attributes:
        in_chunk: see `Chunks`.
        bytes: that are needed for one of a single step, without the first carries of the others.
        more_bytes: for each further step.
        flops: extra ones of one of a single step.
        more_flops: for each further step.
    """

    in_chunk: frozenset[int]
    bytes: int
    more_bytes: int
    flops: float
    more_flops: float


@dataclasses.dataclass(frozen=True)
class Division:
    """A division of all steps.

    Attributes:
        earlier: the chunks from the first step on, without the last one.
        last_steps: of the last chunk.
        in_last: what it saves in addition to carries.
        flops: extra ones of all chunks, and `group_flops` for each group.
    """

    earlier: tuple[Chunks, ...]
    last_steps: int
    in_last: frozenset[int]
    flops: float


def divide(
    length: int,
    kinds: Sequence[ChunkKind],
    last: Sequence[LastChunk],
    first_bytes: int,
    limits: Sequence[int],
    most_groups: int,
    group_flops: float = 0.0,
) -> list[Division | None]:
    """Divide a loop for several numbers of bytes. No FLOPs are below zero.

    Args:
        length: steps of the loop.
        kinds: of chunks.
        last: what the last chunk may be.
        first_bytes: of the first carries of one chunk.
        limits: bytes.
        most_groups: how often the kind may change, and one more.
        group_flops: what another kind of chunks, which is compiled for itself, has to save.

    Returns:
        For each limit the division with the fewest extra FLOPs, None where nothing fits.
    """
    search = _Search(length, kinds, last, first_bytes, np.asarray(limits, np.int64), most_groups, group_flops)
    return search.found()


def unit_of(length: int) -> int:
    """Of how many steps chunks have a multiple."""
    return -(-length // MOST_UNITS)


def _worth_trying(kinds: Sequence[ChunkKind]) -> list[ChunkKind]:
    """For each number of steps those of which no other one is better in bytes or FLOPs and no worse in both."""
    found: list[ChunkKind] = []
    for kind in sorted(kinds, key=lambda kind: (kind.steps, kind.bytes, kind.flops)):
        if not (found and found[-1].steps == kind.steps and found[-1].flops <= kind.flops):
            found.append(kind)
    return found


class _Search:
    """Arrays of FLOPs by (kind, limit, group, units), after each number of chunks.

    Left out are limits for which nothing better can be found any more, and units that so many chunks have in any case.
    """

    def __init__(
        self,
        length: int,
        kinds: Sequence[ChunkKind],
        last: Sequence[LastChunk],
        first_bytes: int,
        limits: np.ndarray,
        most_groups: int,
        group_flops: float,
    ):
        unit = unit_of(length)
        self.kinds = _worth_trying([kind for kind in kinds if kind.steps % unit == 0 and kind.steps < length])
        self.length, self.unit, self.last, self.first_bytes, self.limits = length, unit, last, first_bytes, limits
        self.most_groups, self.group_flops = most_groups, group_flops
        self.units = (length - 1) // unit + 1  # covered before the last chunk: 0, …, units − 1
        self.fewest = min((kind.steps // unit for kind in self.kinds), default=1)  # units of a chunk
        more = length - unit * np.arange(self.units) - 1  # steps of the last chunk after its first one, by units
        self.last_bytes = np.array([one.bytes + more * one.more_bytes for one in last])  # [last chunk, units]
        self.last_flops = [(one.flops, more * one.more_flops) for one in last]
        self.rows = np.argsort(-limits, kind="stable")  # the limits that are left, the largest first
        self.came_from: list[np.ndarray] = []  # for each number of chunks the kind before it changed, else SAME
        self.rows_of: list[np.ndarray] = []  # with it the limits
        self.best = np.full(len(limits), math.inf)
        self.best_at = [(0, 0, 0, 0, 0)] * len(limits)  # chunks, group, kind, units, last chunk

    def found(self) -> list[Division | None]:
        nothing = np.full((1, len(self.limits), 1, self.units), math.inf)
        nothing[..., 0] = 0.0
        self.end(0, nothing)
        flops = np.full((max(len(self.kinds), 1), len(self.rows), self.most_groups, self.units), math.inf)
        for number in range(1, (self.units - 1) // self.fewest + 1):
            flops = self.one_more(number, flops)
            flops = self.end(number, flops)
            if not len(self.rows):
                break
        return [self.division(at) if math.isfinite(self.best[at]) else None for at in range(len(self.limits))]

    def one_more(self, number: int, flops: np.ndarray) -> np.ndarray:
        """After one more chunk; `number` counts it."""
        kinds, limits, groups, units = flops.shape
        changed = np.full((limits, groups, units), math.inf)  # the kind has just changed, to any
        came_from = np.full(changed.shape, SAME, np.int8)
        if number == 1:
            changed[:, 0, 0] = self.group_flops
        elif groups > 1:
            changed[:, 1:], came_from[:, 1:] = min_along(flops[:, :, :-1])
            changed[:, 1:] += self.group_flops
        after = np.full((kinds, limits, groups, units - self.fewest), math.inf)
        origin = np.full(after.shape, SAME, np.int8)
        for at, kind in enumerate(self.kinds):
            more = kind.steps // self.unit - self.fewest
            fitting = np.count_nonzero(number * self.first_bytes + kind.bytes <= self.limits[self.rows])
            before = np.s_[:fitting, :, : max(units - self.fewest - more, 0)]
            stays, changes, here = flops[at][before], changed[before], np.s_[at, :fitting, :, more:]
            np.minimum(stays, changes, out=after[here])
            after[here] += kind.flops
            np.copyto(origin[here], came_from[before], where=stays > changes)
        self.came_from.append(origin)
        self.rows_of.append(self.rows)
        return after

    def end(self, number: int, flops: np.ndarray) -> np.ndarray:
        """Take what ends with a last chunk after so many others; what is left of the limits goes on."""
        kinds, _, groups, _ = flops.shape
        covered = number * self.fewest  # at least
        limits, least = self.limits[self.rows], flops.min(axis=0).min(axis=1)
        for at, (own, more) in enumerate(self.last_flops):
            total = least + own + more[covered:]
            total[number * self.first_bytes + self.last_bytes[at, covered:] > limits[:, None]] = math.inf
            here = total.argmin(axis=1)
            for row in np.flatnonzero(total.min(axis=1) < self.best[self.rows]):
                limit, units = self.rows[row], int(here[row])
                group, kind = np.unravel_index(flops[:, row, :, units].T.argmin(), (groups, kinds))
                self.best[limit] = total[row, units]
                self.best_at[limit] = (number, int(group), int(kind), covered + units, at)
        goes_on = (number + 1) * self.first_bytes + self.last_bytes.min() <= limits
        goes_on &= least.min(axis=1) < self.best[self.rows]  # no chunk takes FLOPs away
        if goes_on.all():
            return flops
        self.rows = self.rows[goes_on]
        return flops[:, goes_on]

    def division(self, limit: int) -> Division:
        number, group, kind, units, last = self.best_at[limit]
        steps = self.length - units * self.unit
        chunks: list[ChunkKind] = []
        while number:
            chunks.append(self.kinds[kind])
            row = int(np.flatnonzero(self.rows_of[number - 1] == limit)[0])
            before = int(self.came_from[number - 1][kind, row, group, units - number * self.fewest])
            units -= self.kinds[kind].steps // self.unit
            number -= 1
            if before != SAME:
                group, kind = group - 1, before
        groups: list[Chunks] = []
        for one in reversed(chunks):
            if groups and (groups[-1].steps, groups[-1].in_chunk) == (one.steps, one.in_chunk):
                groups[-1] = dataclasses.replace(groups[-1], number=groups[-1].number + 1)
            else:
                groups.append(Chunks(1, one.steps, one.in_chunk))
        return Division(tuple(groups), steps, self.last[last].in_chunk, float(self.best[limit]))
