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
        saved: values of the forward body that are stacked in addition to the carry, so that they are not recomputed.
        chunk: None for one level, which stacks the carry of every step. For two levels the number of steps whose
            carries are recomputed in one forward loop; the forward loop saves the first carry of each chunk.
        update: whether the optimizer's elementwise update is done inside the reverse loop.
        in_chunk: two levels: what a chunk saves in addition to carries; see `Chunks`.
        earlier: two levels: the loop's first steps may be in other chunks. The reverse loop comes to them last, when
            what was saved for later steps is free: their chunks may be longer and save more.
        host: one level: values of the forward body, of those that are saved and of the carry, whose stacks are in the
            host's memory.
        step_bytes: None repeats what a step of the reverse loop needs at its beginning. Else a step is scheduled as a
            program of its own, for a peak of so many bytes.
    """

    saved: frozenset[int] = frozenset()
    chunk: int | None = None
    update: bool = False
    in_chunk: frozenset[int] = frozenset()
    earlier: tuple[Chunks, ...] = ()
    step_bytes: int | None = None
    host: frozenset[int] = frozenset()

    def __post_init__(self):
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"expected a chunk of at least 1 step, got {self.chunk}; write chunk=None for one level")
        if self.chunk is None and (self.in_chunk or self.earlier):
            raise ValueError("expected a chunk with in_chunk or earlier, got chunk=None; write saved=… for one level")
        if self.chunk is not None and self.host:
            raise ValueError(f"expected one level for stacks in the host's memory, got a chunk of {self.chunk} steps")

    @property
    def is_several_operations(self) -> bool:
        """Whether the reverse loop is written as more than one loop."""
        return self.chunk is not None or bool(self.host)

    def groups(self, length: int) -> tuple[Chunks, ...]:
        """Two levels: all chunks of a loop of so many steps, but its last one, which runs in reverse at once. None with
        one level."""
        if self.chunk is None:
            return ()
        left = self._left(length)
        return *self.earlier, Chunks((left - 1) // self.chunk, self.chunk, self.in_chunk)

    def last_chunk(self, length: int) -> int:
        """Two levels: steps of the last chunk, at least one."""
        assert self.chunk is not None
        return (self._left(length) - 1) % self.chunk + 1

    def _left(self, length: int) -> int:
        before = sum(chunks.all_steps for chunks in self.earlier)
        if before >= length:
            raise ValueError(f"expected fewer than {length} steps in earlier chunks, got {before}")
        return length - before
