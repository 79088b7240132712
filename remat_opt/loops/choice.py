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
    """

    saved: frozenset[int] = frozenset()
    chunk: int | None = None
    update: bool = False

    @property
    def steps_in_chunk(self) -> int:
        """`chunk`, where there are two levels."""
        assert self.chunk is not None
        return self.chunk

    def __post_init__(self):
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"expected a chunk of at least 1 step, got {self.chunk}; write chunk=None for one level")
