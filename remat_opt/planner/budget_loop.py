"""Meets a budget: compile a candidate, compare its figure with the prediction, search again, keep the cheapest.

The search has a frontier of candidates with predicted peaks. The compiler's figure for a candidate is its prediction
times a correction, which changes slowly along the frontier. So the loop is a bracketing search for the predicted peak
whose compiled figure equals the budget. As long as all candidates lie on one side, it scales by the last correction;
between a candidate that fits and one that does not, it interpolates. It ends when another compilation could not save a
noticeable part of the step's time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from remat_opt.planner.budget import InfeasibleBudget
from remat_opt.planner.candidates import Candidate
from remat_opt.planner.decision import Decision, Planner
from remat_opt.targets import Figures

MOST_COMPILATIONS = 4  # and one more before a refusal
FIRST_MARGIN = 1.02  # the first candidate is asked to be so much smaller than the budget
SECOND_MARGIN = 1.1  # after two candidates that were too large, beside the larger of their corrections
USES_IT = 0.97  # part of the budget above which a candidate that fits is taken at once
COMPILE_THRESHOLD = 0.015  # part of the step's seconds that another compilation has to save
OUT_OF_REACH = 1.5  # times the budget; what is predicted to need more is not compiled


def keep_budget(planner: Planner) -> Decision:
    """Decide for the least extra time that meets the budget in the settings.

    Raises:
        InfeasibleBudget: no candidate meets it.
    """
    if planner.compile is None:
        return _predicted(planner)
    fraction = planner.settings.budget.fraction
    if fraction == 1.0 and not planner.settings.split:
        unchanged = planner.original.unchanged
        figures = planner.measure(Candidate(unchanged, unchanged.problem.plain))
        return planner.plain("a budget of 1.0 is what the step as it was given needs", figures)
    if fraction is not None:
        return _BudgetLoop(planner, int(fraction * planner.measure(None).temp_bytes)).run()
    allowed = planner.settings.budget.physical_bytes
    assert allowed is not None
    original = planner.original
    may_be_plain = not planner.settings.split
    if may_be_plain and (original.is_divided or original.problem.plain.peak + fixed_bytes(planner) <= allowed * 1.1):
        plain = planner.measure_if_it_fits(None)
        if plain is not None and plain.physical_peak_bytes <= allowed:
            return planner.plain("the step as it was given fits the budget", plain)
    return _BudgetLoop(planner, allowed).run()


@dataclasses.dataclass(frozen=True)
class _Compiled:
    """A candidate with the compiler's figures."""

    candidate: Candidate
    figures: Figures

    @property
    def correction(self) -> float:
        """The compiler's figure as a multiple of the predicted peak."""
        return max(self.figures.temp_bytes, 1) / max(self.candidate.peak, 1)


class _BudgetLoop:
    """The search for one budget.

    Args:
        planner: the step.
        allowed: bytes that `counted` may be.
    """

    def __init__(self, planner: Planner, allowed: int):
        self.planner = planner
        self.allowed = allowed
        self.compiled: list[_Compiled] = []
        self.fraction = planner.settings.budget.fraction
        self.fixed = 0 if self.fraction is not None else fixed_bytes(planner)  # counted, and not temporary
        self.first_correction = FIRST_MARGIN
        plain = planner.plain_figures
        if plain is not None and planner.original.is_divided:  # the graph has the sizes on all devices together
            self.first_correction *= plain.temp_bytes / max(planner.original.comparable_peak, 1)
            self.fixed = self.counted(plain) - plain.temp_bytes

    def run(self) -> Decision:
        """Compile some candidates and take the cheapest that fits."""
        while len(self.compiled) < MOST_COMPILATIONS + (self.best is None) and (candidate := self.next()) is not None:
            figures = self.planner.measure(candidate)
            self.compiled.append(_Compiled(candidate, figures))
            self.fixed = self.counted(figures) - figures.temp_bytes
        if self.best is None:
            raise self.refusal()
        return self.planner.decision(self.best.candidate, self.best.figures)

    def next(self) -> Candidate | None:
        """The candidate to compile next; None where none is left that could help."""
        if self.best is None:
            is_last = len(self.compiled) == MOST_COMPILATIONS
            candidate = None if is_last else self.new_within(self.predicted_limit)
            return candidate or next(self.smallest(), None)
        if self.counted(self.best.figures) > USES_IT * self.allowed:
            return None
        if len(self.compiled) > 2 and not self.fits(self.compiled[-1]):
            return None  # something fits, and what should have been cheaper missed
        most = self.best.candidate.extra_seconds - COMPILE_THRESHOLD * self.planner.original.plain_graph.seconds
        _, large = self.bracket(self.compiled)
        # Candidates are few: what lies a little above may fit, too.
        limits = [limit := self.predicted_limit, self.limit if large is None else (limit + large.candidate.peak) / 2]
        every = map(self.new_within, limits)
        return next(
            (candidate for candidate in every if candidate is not None and candidate.extra_seconds < most), None
        )

    @property
    def predicted_limit(self) -> float:
        """The predicted peak, in bytes, at which the compiler's figure is expected to be the budget."""
        # Where nothing is recomputed other buffers are live at the peak; that says little of other candidates.
        alike = [one for one in self.compiled if not one.candidate.prepared.reordered]
        small, large = self.bracket(alike)
        if small is None:
            if len(self.compiled) > 1:
                least = min(one.candidate.peak for one in self.compiled)
                worst = max(one.correction for one in self.compiled)
                return min(self.limit / (worst * SECOND_MARGIN), least - 1)
            if large is None:
                return self.limit / self.first_correction
            return min(self.limit / (large.correction * FIRST_MARGIN), large.candidate.peak - 1)
        if large is None:
            return self.limit / small.correction
        low, high = small.figures.temp_bytes, large.figures.temp_bytes
        share = (self.limit - low) / (high - low)
        return small.candidate.peak + share * (large.candidate.peak - small.candidate.peak)

    def bracket(self, compiled: list[_Compiled]) -> tuple[_Compiled | None, _Compiled | None]:
        """The largest candidate that fits, and the smallest one predicted to be larger that does not."""
        small = max((one for one in compiled if self.fits(one)), key=lambda one: one.candidate.peak, default=None)
        least = small.candidate.peak if small else -1
        misses = (one for one in compiled if not self.fits(one) and one.candidate.peak > least)
        return small, min(misses, key=lambda one: one.candidate.peak, default=None)

    def new_within(self, peak: float) -> Candidate | None:
        """The fastest candidate not yet compiled whose predicted peak is at most `peak`; None if there is none."""
        limit = int(peak)
        while limit > 0:
            candidate = self.planner.search(limit)
            if candidate.is_unchanged:  # it was compiled, or is too large; compilers order it otherwise than we do
                candidate = self.planner.reordered
            if candidate.peak > limit:
                return None
            if not self.was_compiled(candidate):
                return candidate
            if self.best is not None:
                return None
            limit = candidate.peak - 1
        return None

    def smallest(self) -> Iterator[Candidate]:
        """Candidates that may need the least memory: those that fit by the corrections so far, the cheapest first, then
        the others, at any cost, in the order of their predicted peaks. What is predicted to need no more than was
        compiled may need less."""
        search = self.planner.search
        worst = max([1.0, *(one.correction for one in self.compiled)])

        def order(one: Candidate) -> tuple[bool, float]:
            fits = one.peak * worst * SECOND_MARGIN <= self.limit
            return not fits, one.extra_seconds if fits else one.peak

        limits = [0, None, *sorted(one.figures.temp_bytes for one in self.compiled)[:1]]
        every = sorted([*map(search, limits), self.planner.reordered], key=order)
        reachable = OUT_OF_REACH * self.limit / (self.compiled[-1].correction if self.compiled else 1)
        for number, candidate in enumerate(every):
            if not self.was_compiled(candidate) and (candidate.peak <= reachable or not (number or self.compiled)):
                yield candidate

    def was_compiled(self, candidate: Candidate) -> bool:
        return any(candidate.is_the_same_as(one.candidate) for one in self.compiled)

    @property
    def limit(self) -> int:
        """Bytes of temporary memory that the budget leaves."""
        return max(self.allowed - self.fixed, 0)

    def fits(self, one: _Compiled) -> bool:
        return self.counted(one.figures) <= self.allowed

    @property
    def best(self) -> _Compiled | None:
        """The cheapest compiled candidate that fits."""
        return min(filter(self.fits, self.compiled), key=lambda one: one.candidate.extra_seconds, default=None)

    def counted(self, figures: Figures) -> int:
        """The figure that the budget bounds."""
        return figures.temp_bytes if self.fraction is not None else figures.physical_peak_bytes

    def refusal(self) -> InfeasibleBudget:
        """The error for a budget that cannot be met; it names the least memory that was found."""
        plain = self.planner.plain_figures
        every = [*(one.figures for one in self.compiled), *([plain] if plain is not None else [])]
        least = min(map(self.counted, every))
        of_what = " of temporary memory" if self.fraction is not None else ""
        return InfeasibleBudget(
            f"expected a budget of at least {least} bytes, got {self.planner.settings.asked_budget!r} ({self.allowed} "
            f"bytes{of_what}): the least that was found needs {least}. Write {self.attainable(least)}",
            least,
        )

    def attainable(self, least: int) -> str:
        """The argument that would have worked, for the error's text."""
        if self.fraction is None:
            return f'budget={least}, or budget="min" for the least memory'
        plain = self.planner.plain_figures.temp_bytes if self.planner.plain_figures is not None else 0
        if least >= plain:
            return "budget=1.0, the step as it was given: nothing that was found needs less"
        return f'budget={math.ceil(100 * least / plain) / 100:.2f}, or budget="min" for the least memory'


def _predicted(planner: Planner) -> Decision:
    """`keep_budget` by predicted peaks, where nothing may be compiled."""
    budget = planner.settings.budget
    fixed = 0 if budget.fraction is not None else fixed_bytes(planner)
    if budget.fraction is not None:
        limit = int(budget.fraction * planner.original.plain_peak)
    else:
        limit = (budget.physical_bytes or 0) - fixed
    candidate = planner.search(max(limit, 0))
    if candidate.peak > limit:
        raise InfeasibleBudget(
            f"expected a budget of at least {candidate.peak + fixed} bytes (predicted), got "
            f"{planner.settings.asked_budget!r}: no schedule was found that needs less",
            candidate.peak + fixed,
        )
    return planner.decision(candidate, note="predicted, not compiled")


def fixed_bytes(planner: Planner) -> int:
    """Arguments and results that are not aliased: on the device whatever the schedule."""
    graph = planner.original.bridge.graph
    outputs = set(graph.outputs) - {output for _, output in graph.aliases}
    inputs = planner.original.captured.program.inputs
    return sum(graph.sizes[value] for value in inputs) + sum(graph.sizes[value] for value in outputs)
