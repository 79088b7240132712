"""The forms of a step that are searched: as it was given, and with its batch split.

With `split="auto"` a budget decides. The batch is split where that is estimated to take noticeably less time than to
recompute as much, or where nothing else is small enough. Without a budget it is not split: in chunks of one row almost
every step takes its least memory, and results are then equal to rounding only.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Iterator

import numpy as np

from remat_opt.planner.candidates import Candidate, Variants
from remat_opt.planner.prepared import Prepared
from remat_opt.planner.settings import Settings
from remat_opt.planner.splitting import in_chunks
from remat_opt.search.caching import cached_method
from remat_opt.search.problem import pareto_front

SPLIT_THRESHOLD = 0.05  # of the step's seconds, that a split or more chunks have to save: sums are rounded otherwise
AS_SMALL = 1.01  # times the least peak
LAST_FORMS = 2  # those of most chunks, one of which has the least memory


class Forms:
    """The forms of one step, made when they are first asked for.

    Args:
        original: the step as it was given.
        settings: what the user asked for.
    """

    def __init__(self, original: Prepared, settings: Settings):
        self.original = original
        self.settings = settings
        given = in_chunks(original, settings.split) if settings.split else original
        self.given = Variants(given, settings.solver, settings.keep_user_checkpoints)

    @functools.cached_property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of chunks that are tried, each at least twice the one before; none where the batch stays whole."""
        batch = self.original.batch
        found: list[int] = []
        for number in batch.numbers if batch is not None and batch.can_be_split else ():
            if not found or number >= 2 * found[-1]:
                found.append(number)
        return tuple(found)

    @property
    def may_be_split(self) -> bool:
        """Whether other forms than the given one are looked at. The solvers of the papers know none."""
        is_left_to_us = self.settings.split is None and self.settings.solver == "auto"
        return is_left_to_us and not self.original.captured.program.has_references

    @cached_method
    def split(self, chunks: int) -> Variants:
        """The step in so many chunks."""
        prepared = self.original.in_chunks(chunks)
        return Variants(prepared, self.settings.solver, self.settings.keep_user_checkpoints)

    def within(self, limit: int) -> Candidate:
        """The least time with a peak of at most `limit` bytes, or the least peak at any cost where nothing fits.

        Where recomputation alone fits, chunks are weighed in which nothing is recomputed: that is no search.
        """
        best, threshold = self.given.within(limit), SPLIT_THRESHOLD * self.original.plain_graph.seconds
        fits = best.peak <= limit
        most = best.extra_seconds - threshold if fits else math.inf  # seconds that a split may take
        for form in self.splits_within(limit, best.peak) if self.seconds_of_two < most else ():
            if form.original.extra_seconds >= most:
                break  # more chunks take longer
            found = form.reordered
            if found.peak > limit and not fits:
                found = form.minimum_memory()
                found = form.within(limit) if found.peak <= limit else found
            if found.peak <= limit and found.extra_seconds < most:
                best, fits, most = found, True, found.extra_seconds - threshold
            elif not fits and found.peak < best.peak:
                best = found
        return best if fits or not best.prepared.chunks else self.fewest_chunks(best)

    def fewest_chunks(self, least: Candidate) -> Candidate:
        """The least memory of as few chunks as need hardly more: at some number it is no longer the rows that count."""
        fewer = [number for number in self.numbers if number < least.prepared.chunks]
        most = AS_SMALL * least.peak
        at = bisect.bisect_left(fewer, True, key=lambda number: self.split(number).minimum_memory().peak <= most)
        return self.split(fewer[at]).minimum_memory() if at < len(fewer) else least

    @property
    def seconds_of_two(self) -> float:
        """What two chunks take more at least, each kernel being started twice; infinite where the batch stays whole."""
        if not self.may_be_split:
            return math.inf
        seconds = self.original.unchanged.bridge.graph.op_seconds
        twice = 2 * self.original.rates.kernel_seconds
        return float(np.maximum(twice - seconds[seconds > 0], 0.0).sum())

    def splits_within(self, limit: int, given: int) -> Iterator[Variants]:
        """Splits that may have a peak of so many bytes, of fewest chunks first, and those of most chunks in any case.

        Args:
            limit: the bytes.
            given: the least peak of the form as it was given, or one that fits.
        """
        for number in self.numbers:
            if given <= limit * number or number in self.numbers[-LAST_FORMS:]:
                yield self.split(number)

    def frontier(self, budgets: int) -> tuple[Candidate, ...]:
        """The Pareto front of all forms that take at most twice the step's time; see `Variants.frontier`."""
        points = [*self.given.frontier(budgets)]
        for number in self.numbers if self.may_be_split else ():
            form = self.split(number)
            if form.original.extra_seconds > self.original.plain_graph.seconds:
                break
            points += form.frontier(budgets)
        return pareto_front(points)
