"""What may be done to one pair of scans."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class LoopChoice:
    """How a pair is written.

    Attributes:
        saved: values of the forward body that are stacked beside the carry, so that they are not recomputed.
        chunk: None for one level, which stacks the carry of every step. For two levels the number of steps whose
            carries are recomputed together; the forward loop keeps the first carry of each chunk.
        update: whether the optimizer's elementwise update is done inside the reverse loop.
        in_chunk: two levels: values of the forward body that are stacked for the steps of one chunk while its carries
            are recomputed, so that they are not recomputed once more. All residuals: one extra forward pass in all.
    """

    saved: frozenset[int] = frozenset()
    chunk: int | None = None
    update: bool = False
    in_chunk: frozenset[int] = frozenset()

    @property
    def steps_in_chunk(self) -> int:
        """`chunk`, where there are two levels."""
        assert self.chunk is not None
        return self.chunk

    def __post_init__(self):
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"expected a chunk of at least 1 step, got {self.chunk}; write chunk=None for one level")
        if self.chunk is None and self.in_chunk:
            raise ValueError("expected a chunk with in_chunk, got chunk=None; write saved=… for one level")
