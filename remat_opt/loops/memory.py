"""Bytes of a rewritten pair: what the forward loop saves, and what the reverse loop needs besides."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from remat_opt.graph.build import bytes_of
from remat_opt.loops.choice import Chunks, LoopChoice
from remat_opt.loops.pairs import Pair
from remat_opt.loops.recomputation import Recomputation, Recomputations


@dataclasses.dataclass(frozen=True)
class ChunkSizes:
    """Bytes of one chunk of a loop.

    Attributes:
        first: the carries that it starts from, which the forward loop keeps.
        each: carries and residuals of one of its steps, but the last one.
        last: carries of its last step, whose residuals are not kept.
        step: peak of one of its steps, without the stacks that it reads.
    """

    first: int
    each: int
    last: int
    step: int

    def turned_round(self, steps: int) -> int:
        """What a chunk of so many steps needs beside the first carries of the chunks."""
        return (steps - 1) * self.each + self.last + self.step

    def kept_as_last(self, steps: int) -> int:
        """What the forward loop keeps of the last chunk, which it leaves ready to be turned round."""
        return (steps - 1) * self.each + self.last


def chunk_sizes(
    pair: Pair,
    alone: Recomputation,
    again: Recomputation,
    peak_of_step: Callable[[Recomputation], int],
    *,
    is_single: bool = False,
    is_last: bool = False,
) -> ChunkSizes:
    """Bytes of chunks of one kind.

    Args:
        pair: the loops.
        alone: what a step repeats whose residuals were not kept.
        again: what the chunk's other steps repeat.
        peak_of_step: see `memory_of`.
        is_single: it has one step.
        is_last: of the last chunk, all of whose carries the forward loop keeps.
    """
    body = pair.forward

    def carries(positions: Iterable[int]) -> int:
        return _size(pair, (body.body_carry[at] for at in positions))

    first, one = carries(again.advanced), carries(alone.carries)
    if is_single or not again.in_chunk:
        return ChunkSizes(first, one, one, peak_of_step(alone))
    held = _size(pair, again.in_chunk) + (one if is_last else carries(again.carries))
    return ChunkSizes(first, held, one if is_last else first, max(peak_of_step(alone), peak_of_step(again)))


def _size(pair: Pair, values: Iterable[int]) -> int:
    return sum(bytes_of(pair.forward.body.avals[value]) for value in values)


def memory_of(
    pair: Pair, choice: LoopChoice, repeats: Recomputations, peak_of_step: Callable[[Recomputation], int]
) -> tuple[int, int]:
    """What is kept from the forward to the reverse loop, and what the reverse loop needs beside, in bytes.

    Args:
        pair: the loops.
        choice: how they are written.
        repeats: what that means.
        peak_of_step: of one step of the reverse loop, without the stacks that it reads.
    """
    loop = pair.forward
    saved = pair.length * _size(pair, repeats.saved)
    if choice.chunk is None:
        carries = _size(pair, (loop.body_carry[at] for at in repeats.alone.carries))
        return saved + pair.length * carries, peak_of_step(repeats.alone)

    def needed_by(chunks: Chunks, again: Recomputation, *, is_last: bool = False) -> ChunkSizes:
        single = chunks.steps == 1
        return chunk_sizes(pair, repeats.alone, again, peak_of_step, is_single=single, is_last=is_last)

    # From the chunks that are turned round last to those that are first.
    needed = firsts = saved
    for chunks, again in zip(choice.groups(pair.length), repeats.of_group, strict=True):
        if chunks.number:
            sizes = needed_by(chunks, again)
            firsts += chunks.number * sizes.first
            needed = max(needed, firsts + sizes.turned_round(chunks.steps))
    last = Chunks(1, choice.last_chunk(pair.length))
    sizes = needed_by(last, repeats.last_chunk, is_last=True)
    kept = firsts + sizes.kept_as_last(last.steps)
    return kept, max(needed, kept + sizes.step) - kept
