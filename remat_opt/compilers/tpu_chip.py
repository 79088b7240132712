"""What lies on a TPU's chip, and when, as XLA's `memory_space_assignment` decides it.

Buffers come one after the other, those first from which kernels gain most. Each goes from one kernel that needs it to
the next: it stays on the chip for that where its place is free for so long and the next kernel comes soon. Else it is
sent to the device's memory, once, and is fetched for the next kernel, into any gap on the chip, where another kernel
leaves the time for the copy; a kernel that it is not fetched for reads it where it lies. The first few for which there
is no room have all that is there put together again, those that stay longest first (`best_fit_repacker.cc`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from remat_opt.compilers.tpu_clock import Clock

# A copy is begun where twice the time is that it needs (`preferred_overlap_to_async_copy_ratio`), or else near that; a
# small one where as much time is as for eight mebibytes.
PREFERRED_TIMES = 2
SMALL = 8 * 2**20
MOST_BEGINNINGS = 16
# At most so many are under way at once in each direction (`xla_msa_max_outstanding_prefetches` and `…_evictions`).
MOST_UNDER_WAY = 40
# What is on the chip when a step begins has no other in its place where it is read this late in the step.
FREED_BEFORE = 0.6  # `kCrossProgramPrefetchOccupyFreeingLimit`
MOST_REPACKS = 4  # `xla_msa_max_repacks`


@dataclasses.dataclass(frozen=True, slots=True)
class Stay:
    """Where a buffer is.

    Attributes:
        outside_until: the last kernel for which it lies in the device's memory; -1 where it never does.
        leaves: whether it is made on the chip and copied to the device's memory.
        fetched: how often it is copied to the chip.
        ends_inside: whether the last kernel that reads it reads it on the chip.
    """

    outside_until: int
    leaves: bool
    fetched: int
    ends_inside: bool = dataclasses.field(default=False, compare=False)


class ChipMemory:
    """The places on a chip, and the time for copies."""

    def __init__(self, capacity: int, clock: Clock):
        """
        Args:
            capacity: in bytes.
            clock: when the kernels run.
        """
        self.capacity = capacity
        self.clock = clock
        self.idle = np.diff(clock.begins)  # seconds of each kernel in which nothing is copied yet
        self.fetching = np.zeros(len(self.idle), dtype=np.int64)  # copies that are under way
        self.leaving = np.zeros(len(self.idle), dtype=np.int64)
        self.count = 0
        self.rows = np.zeros((64, 4), dtype=np.int64)  # first and last kernel, offset and bytes
        self.repacks = 0
        self.lacks_room = False  # for what a place is looked for
        self.lacked_room = False  # for anything

    def stay_with_room(self, find: Callable[[], Stay]) -> Stay:
        """What finds places for a buffer; once more after all is put together again, where it lacks room at first."""
        before = self._state()
        self.lacks_room = False
        stay = find()
        self.lacked_room |= self.lacks_room
        if not self.lacks_room or self.repacks == MOST_REPACKS:
            return stay
        self._restore(before)
        self.repacks += 1
        self.repack()
        return find()

    def repack(self) -> None:
        """Put together what is there, those that stay longest first and of these the largest, if all has room so."""
        rows = self.rows[: self.count].copy()
        placed = ChipMemory(self.capacity, self.clock)
        for at in np.lexsort((-rows[:, 3], rows[:, 0] - rows[:, 1])).tolist():
            first, last, _, size = rows[at].tolist()
            rows[at, 2] = placed.gap(size, first, [last])
            if placed.takes(int(rows[at, 2]), size, first, last) < 0:
                return
        self.rows[: self.count] = rows

    def _state(self) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
        return self.count, self.idle.copy(), self.fetching.copy(), self.leaving.copy()

    def _restore(self, state: tuple[int, np.ndarray, np.ndarray, np.ndarray]) -> None:
        self.count, self.idle, self.fetching, self.leaving = state

    def stay_of(self, size: int, made: int, reads: Sequence[int], *, is_argument: bool) -> Stay:
        """Find a place for a buffer.

        Args:
            size: in bytes.
            made: by which kernel.
            reads: by which kernels, in their order, each once.
            is_argument: it lies in the device's memory when the first kernel runs.
        """
        is_outside, leaves, fetched, until, there_from = is_argument, False, 0, -1, 0
        row, before = -1, made
        for at, read in enumerate(reads):
            comes_soon = self.clock.between(before, read) <= self.clock.patience
            if row < 0 and not is_outside and comes_soon:
                row = self.takes(self.gap(size, made, reads[at:]), size, made, read)
                if row >= 0:
                    before = read
                    continue
            elif row >= 0 and comes_soon and self.keeps(row, read):
                before = read
                continue
            if not is_outside:
                is_outside, leaves, there_from = True, row >= 0, before + 1
            until = read
            row = self.fetch(size, there_from, reads[at:])
            fetched += row >= 0
            before = read
        return Stay(until if is_outside or not reads else -1, leaves, fetched, row >= 0)

    def stay_of_constant(self, size: int, reads: Sequence[int]) -> Stay | None:
        """The place of what a loop's body is given in each turn, where it stays on the chip from turn to turn; None
        where it does not."""
        end = len(self.idle) - 1
        needed = sorted({0, *reads, end})
        waits = (self.clock.between(*pair) for pair in itertools.pairwise(needed))
        if max(waits, default=0.0) > self.clock.patience:
            return None
        is_there = self.takes(self.gap(size, 0, [end]), size, 0, end) >= 0
        return Stay(-1, leaves=False, fetched=0, ends_inside=True) if is_there else None

    def stay_from_beginning(self, size: int, last: int) -> Stay:
        """The place of what is on the chip when the step begins: until it was read for the last time, or to the end
        where that is late."""
        begins = self.clock.begins
        is_late = begins[last] > FREED_BEFORE * begins[-1]
        self.takes(0, size, 0, len(self.idle) - 1 if is_late else last)
        return Stay(-1, leaves=False, fetched=1, ends_inside=True)

    def stay_of_argument(self, size: int, reads: Sequence[int], written_by: int) -> Stay:
        """Find places for an argument that lies in the device's memory at first.

        Args:
            size: in bytes.
            reads: by which kernels, in their order, each once.
            written_by: the kernel whose result takes its place, which is sent back if that is on the chip; where it
                cannot be, the argument has no place there at all. -1 for none.
        """
        before = self._state()
        stay = self.stay_of(size, 0, reads, is_argument=True)
        if written_by < 0 or not stay.ends_inside or reads[-1] != written_by:
            return stay
        if self.send(size, written_by):
            return dataclasses.replace(stay, leaves=True)
        self._restore(before)
        return Stay(reads[-1], leaves=False, fetched=0)

    def send(self, size: int, made: int) -> bool:
        """Whether what a kernel makes on the chip can be copied to the device's memory; it is then."""
        seconds = PREFERRED_TIMES * max(size, SMALL) / self.clock.bandwidth
        until = int(np.searchsorted(self.clock.begins, self.clock.begins[made + 1] + seconds))
        under_way = self.leaving[made:until]
        if (under_way >= MOST_UNDER_WAY).any():
            return False
        under_way += 1
        return True

    def fetch(self, size: int, there_from: int, reads: Sequence[int]) -> int:
        """Copy a buffer to the chip for a kernel; its row there, -1 where there is no time or no room."""
        clock, read = self.clock, reads[0]
        needed = size / clock.bandwidth
        first = max(there_from, clock.last_before(read, clock.patience) + 1)
        last = min(clock.last_before(read, needed), read - 1)
        seconds = PREFERRED_TIMES * max(size, SMALL) / clock.bandwidth
        preferred = min(max(clock.last_before(read, seconds), first), last)
        beginnings = sorted(
            range(max(first, preferred - MOST_BEGINNINGS), min(last, preferred + MOST_BEGINNINGS) + 1),
            key=lambda begin: abs(begin - preferred),
        )
        lacked = self.lacks_room
        for begin in beginnings:
            if self.idle[begin:read].sum() < needed or (self.fetching[begin:read] >= MOST_UNDER_WAY).any():
                continue
            row = self.takes(self.gap(size, begin, reads), size, begin, read)
            if row >= 0:
                idle = self.idle[begin:read]
                used = np.minimum(np.cumsum(idle), needed)
                self.idle[begin:read] -= np.diff(used, prepend=0.0)
                self.fetching[begin:read] += 1
                self.lacks_room = lacked
                return row
        return -1

    def gap(self, size: int, first: int, reads: Sequence[int]) -> int:
        """The offset of the smallest gap from a kernel to the last of those that come soon after each other, or to one
        before it; -1 for none."""
        soon = 1
        while soon < len(reads) and self.clock.between(reads[soon - 1], reads[soon]) <= self.clock.patience:
            soon += 1
        for last in reversed(reads[:soon]):
            beside = self.beside(first, last)
            beside = beside[np.argsort(beside[:, 2], kind="stable")]
            ends = np.maximum.accumulate(np.concatenate([[0], beside[:, 2] + beside[:, 3]]))
            gaps = beside[:, 2] - ends[:-1]
            fitting = np.flatnonzero(gaps >= size)
            if len(fitting):
                return int(ends[fitting[gaps[fitting].argmin()]])
            if ends[-1] + size <= self.capacity:  # above all that is there only where nothing else fits
                return int(ends[-1])
        return -1

    def takes(self, offset: int, size: int, first: int, last: int) -> int:
        """Take a place from one kernel to another; its row, -1 where it is not free."""
        if not self._is_free(offset, size, first, last):
            self.lacks_room = True
            return -1
        if self.count == len(self.rows):
            self.rows = np.concatenate([self.rows, np.zeros_like(self.rows)])
        self.rows[self.count] = first, last, offset, size
        self.count += 1
        return self.count - 1

    def keeps(self, row: int, last: int) -> bool:
        """Whether a place that is taken is free until a later kernel; it is taken until then."""
        _, until, offset, size = self.rows[row].tolist()
        is_free = self._is_free(offset, size, until + 1, last)
        if is_free:
            self.rows[row, 1] = last
        else:
            self.lacks_room = True
        return is_free

    def _is_free(self, offset: int, size: int, first: int, last: int) -> bool:
        beside = self.beside(first, last)
        return offset >= 0 and not ((beside[:, 2] < offset + size) & (offset < beside[:, 2] + beside[:, 3])).any()

    def beside(self, first: int, last: int) -> np.ndarray:
        """What is there at any time from one kernel to another."""
        rows = self.rows[: self.count]
        return rows[(rows[:, 0] <= last) & (first <= rows[:, 1])]
