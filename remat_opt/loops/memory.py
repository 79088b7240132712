"""Bytes of a pair as it is written: what the forward loop keeps, and what the reverse loop needs beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from remat_opt.graph.build import bytes_of
from remat_opt.loops.choice import LoopChoice
from remat_opt.loops.pairs import Pair
from remat_opt.loops.recomputation import Recomputation, Recomputations


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

    def size(values: Iterable[int]) -> int:
        return sum(bytes_of(loop.body.avals[value]) for value in values)

    def carries(positions: Iterable[int]) -> int:
        return size(loop.body_carry[at] for at in positions)

    alone = peak_of_step(repeats.alone)
    saved = pair.length * size(repeats.saved)
    if choice.chunk is None:
        return saved + pair.length * carries(repeats.alone.carries), alone

    # From the chunks that are turned round last to those that are first.
    needed = firsts = saved
    for chunks, again in zip(choice.groups(pair.length), repeats.of_group, strict=True):
        if chunks.number:
            firsts += chunks.number * carries(again.advanced)
            working, step = chunks.steps * carries(repeats.alone.carries), alone
            if again.in_chunk and chunks.steps > 1:
                held = carries(again.carries) + size(again.in_chunk)
                working = (chunks.steps - 1) * held + carries(again.advanced)
                step = max(alone, peak_of_step(again))
            needed = max(needed, firsts + working + step)
    last, again = choice.last_chunk(pair.length), repeats.last_chunk
    kept = firsts + last * carries(repeats.alone.carries) + (last - 1) * size(again.in_chunk)
    step = max(alone, peak_of_step(again)) if again.in_chunk and last > 1 else alone
    return kept, max(needed, kept + step) - kept
