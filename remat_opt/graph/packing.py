"""How much memory a compiler allocates for buffers whose lives are known: they have to be placed beside each other.

Buffers of different sizes leave gaps, so that more is allocated than is ever live: a U-Net's least memory is 2,152 MB
live and 2,657 MB allocated on an H200. XLA places the buffers one after another, each in the smallest gap that it fits
in while it is live, largest first and, in a second trial, longest-lived first (`GlobalDecreasingSizeBestFitHeap`), and
takes the smaller result. So does this file. Gap: XLA counts lives in its own instructions, so that what is about
equally long or large may come in another order.
"""

from __future__ import annotations

import numpy as np

from remat_opt.graph.liveness import Liveness, bytes_live

SMALL = 0.001  # of the peak: smaller buffers fit in the gaps of others


def allocated_bytes(liveness: Liveness) -> int:
    """Bytes that a compiler allocates for a schedule's buffers; at least the peak.

    Args:
        liveness: of the schedule.
    """
    size, birth, death = _placed_buffers(liveness)
    small = size < SMALL * liveness.peak
    room = int(bytes_live(size[small], birth[small], death[small], len(liveness.live)).max(initial=0))
    size, birth, death = size[~small], birth[~small], death[~small]
    length = death - birth
    trials = (np.lexsort((birth, -length, -size)), np.lexsort((birth, -size, -length)))
    return max(liveness.peak, room + min(_end(size[order], birth[order], death[order]) for order in trials))


def _placed_buffers(liveness: Liveness) -> np.ndarray:
    """Size, birth and death of what is placed: buffers, results together with the operands that they are written over,
    a buffer that was in the host's memory again, and workspaces."""
    lives = liveness.lives
    size, death = lives.size.copy(), lives.death.copy()
    over = np.searchsorted(lives.birth, lives.death[liveness.overwritten])  # the first that is made at the position
    for operand, result in sorted(zip(liveness.overwritten.tolist(), over.tolist(), strict=True), reverse=True):
        size[operand], death[operand] = max(size[operand], size[result]), max(death[operand], death[result])
        size[result] = 0
    again = []
    for value, gone, back in sorted(liveness.on_host, reverse=True):
        there = np.flatnonzero((lives.value == value) & (lives.birth < gone) & (death >= back))[0]
        again.append((size[there], back, death[there]))
        death[there] = gone - 1
    used = np.flatnonzero(liveness.workspace)
    return np.concatenate(
        [
            np.stack([size, lives.birth, death]),
            np.array(again, dtype=np.int64).reshape(-1, 3).T,
            np.stack([liveness.workspace[used], used, used]),
        ],
        axis=1,
    )


def _end(size: np.ndarray, birth: np.ndarray, death: np.ndarray) -> int:
    """Where the last byte lies if the buffers are placed in this order, each in the smallest gap that it fits in."""
    starts, ends = np.zeros_like(size), np.zeros_like(size)
    for index in range(len(size)):
        beside = np.flatnonzero((birth[:index] <= death[index]) & (death[:index] >= birth[index]))
        beside = beside[np.argsort(starts[beside], kind="stable")]
        # A gap lies behind all that begin before it.
        gaps = np.concatenate([[0], np.maximum.accumulate(ends[beside])])
        room = starts[beside] - gaps[:-1]
        fitting = np.flatnonzero(room >= size[index])
        starts[index] = gaps[fitting[room[fitting].argmin()] if len(fitting) else -1]
        ends[index] = starts[index] + size[index]
    return int(ends.max(initial=0))
