"""Describes how one pair of scans is written."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Chunks:
    """Consecutive chunks of a loop's steps, written alike.

    Attributes:
        number: how many chunks.
        steps: in each of them.
        in_chunk: values of the forward body that are stacked for the steps of one chunk, but its last one, while their
            carries are recomputed, so that they are not recomputed once more. Empty: nothing but the carries.
    """

    number: int
    steps: int
    in_chunk: frozenset[int] = frozenset()

    def __post_init__(self):
        if self.number < 0 or self.steps < 1:
            raise ValueError(f"expected chunks of at least 1 step, got {self.number} of {self.steps} steps")

    @property
    def all_steps(self) -> int:
        """Steps of all the chunks."""
        return self.number * self.steps


@dataclasses.dataclass(frozen=True)
class LoopChoice:
    """How a pair is written.

    Attributes:
        saved: values of the forward body that are stacked beside the carry, so that they are not recomputed.
        chunk: None for one level, which stacks the carry of every step. For two levels the number of steps whose
            carries are recomputed together; the forward loop keeps the first carry of each chunk.
        update: whether the optimizer's elementwise update is done inside the reverse loop.
        in_chunk: two levels: what a chunk keeps beside carries; see `Chunks`.
        earlier: two levels: the loop's first steps may be in other chunks. The reverse loop comes to them last, when
            what was kept for later steps is free: their chunks may be longer and keep more.
        step_bytes: None repeats what a step of the reverse loop needs at its beginning. Else a step is scheduled as a
            program of its own, for a peak of so many bytes.
    """

    saved: frozenset[int] = frozenset()
    chunk: int | None = None
    update: bool = False
    in_chunk: frozenset[int] = frozenset()
    earlier: tuple[Chunks, ...] = ()
    step_bytes: int | None = None

    def __post_init__(self):
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"expected a chunk of at least 1 step, got {self.chunk}; write chunk=None for one level")
        if self.chunk is None and (self.in_chunk or self.earlier):
            raise ValueError("expected a chunk with in_chunk or earlier, got chunk=None; write saved=… for one level")

    @property
    def is_plain(self) -> bool:
        """Whether steps are in their own order and chunks keep nothing but carries, all in one way."""
        return not self.earlier and not self.in_chunk and self.step_bytes is None

    def groups(self, length: int) -> tuple[Chunks, ...]:
        """Two levels: all chunks of a loop of so many steps, but its last one, which is turned round at once."""
        return *self.earlier, Chunks(self._whole_chunks(length), self._steps_in_chunk, self.in_chunk)

    def last_chunk(self, length: int) -> int:
        """Two levels: steps of the last chunk, at least one."""
        return length - self._before(length) - self._whole_chunks(length) * self._steps_in_chunk

    def _whole_chunks(self, length: int) -> int:
        return (length - self._before(length) - 1) // self._steps_in_chunk

    def _before(self, length: int) -> int:
        before = sum(chunks.all_steps for chunks in self.earlier)
        if before >= length:
            raise ValueError(f"expected fewer than {length} steps in earlier chunks, got {before}")
        return before

    @property
    def _steps_in_chunk(self) -> int:
        assert self.chunk is not None
        return self.chunk
