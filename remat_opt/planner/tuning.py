"""`tune`: of the plans that fit, the one that is fastest on the device.

Predicted seconds order plans, and a device may order them otherwise. So a few plans that are likely to fit are compiled
and run: the one that was planned, its neighbours on the frontier, the step in its other variants (as it was given, in
our order, with its loops written otherwise), in chunks of the batch, and without copies to the host.
`callable/tuning.py` runs them on the user's arguments.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from remat_opt.planner.candidates import Candidate
from remat_opt.planner.collectives import MORE
from remat_opt.planner.decision import Decision, Planner
from remat_opt.planner.forms import Forms
from remat_opt.planner.plan import Timing
from remat_opt.planner.progress import SearchProgress
from remat_opt.targets import Figures

MOST_PLANS = 6  # that are compiled
NOTICEABLE = 0.02  # of the planned step's seconds, that another plan has to save
WITHOUT_A_BUDGET = 1.05  # times the memory of the plan of least memory that its neighbours may take
UNCERTAIN = 1.1  # times the predicted limit, up to which a plan is compiled
MOST_PREDICTED = 1.5  # times the planned step's predicted seconds, up to which a plan is compiled
NEIGHBOURS = 2  # on the frontier, of less memory
BUDGETS = 12  # of a frontier, see `Variants.frontier`


class Timer(Protocol):
    """Compiles and runs candidates on the arguments of a call."""

    def compile(self, candidate: Candidate) -> Figures | None:
        """The compiler's figures; None where the compiler or the device refuses the candidate."""
        ...

    def run(self, candidate: Candidate) -> float | None:
        """Seconds of one run of a candidate that was compiled; None where the device's memory does not suffice."""
        ...

    def take(self, candidate: Candidate) -> None:
        """Let the next call run a candidate that was compiled."""
        ...


@dataclasses.dataclass
class _Timed:
    """A candidate that ran, and what it is in words."""

    what: str
    candidate: Candidate
    figures: Figures
    seconds: float


class Tuner:
    """Tunes one signature of a step.

    Args:
        planner: of the step.
        decision: what was decided by predictions and the compiler.
        timer: compiles and runs candidates.
        seconds: that all of it may take.
        clock: counts them.
    """

    def __init__(
        self,
        planner: Planner,
        decision: Decision,
        timer: Timer,
        seconds: float,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.planner = planner
        self.decision = decision
        self.timer = timer
        self.allowed = seconds
        self.clock = clock
        self.timed: list[_Timed] = []
        self.compiled = 0
        self.longest = 0.0  # seconds of one candidate

    def run(self) -> Decision:
        """Time candidates as long as there is time and take the fastest; the decision that was made where it is within
        `NOTICEABLE` of it."""
        started = time.perf_counter()
        with SearchProgress(what="timing plans") as progress:
            best = self.search(progress)
        if best is None:
            return not_tuned(self.decision, "the device has no memory for it beside a copy of the donated arguments")
        self.timer.take(best.candidate)
        decision = self.tuned(best)
        self.planner.spend("tune", started)
        return decision

    def search(self, progress: Callable[[float], None]) -> _Timed | None:
        """The fastest candidate; None where not even the planned one runs."""
        started = self.clock()
        self.time("as planned", self.decision)
        if not self.timed:
            return None
        self.planner.plain_figures = self.decision.plan.plain_measured
        for what, candidate in self.candidates():
            spent = self.clock() - started
            if self.compiled == MOST_PLANS or spent + self.longest > self.allowed:
                break
            progress(max(self.compiled / MOST_PLANS, spent / self.allowed))
            self.time(what, candidate)
        return self.fastest()

    def time(self, what: str, candidate: Candidate) -> None:
        """Compile a candidate, and run it if it fits."""
        started = self.clock()
        self.compiled += 1
        figures = self.timer.compile(candidate)
        if figures is not None and (not self.timed or self.fits(figures)):
            seconds = self.timer.run(candidate)
            if seconds is not None:
                self.timed.append(_Timed(what, candidate, figures, seconds))
        self.longest = max(self.longest, self.clock() - started)

    def fastest(self) -> _Timed:
        """The fastest that was timed. It and the planned one run once more, one after the other: a device that gets
        warmer gets slower."""
        first, best = self.timed[0], min(self.timed, key=lambda one: one.seconds)
        if best is not first:
            for one in (first, best):
                again = self.timer.run(one.candidate)
                one.seconds = one.seconds if again is None else min(one.seconds, again)
        return best if best.seconds < (1 - NOTICEABLE) * first.seconds else first

    # What is compiled

    def fits(self, figures: Figures) -> bool:
        """Whether a candidate keeps the budget, and sends no more to other devices than the planned step."""
        ours, theirs = self.timed[0].figures.collectives, figures.collectives
        sends_more = ours is not None and theirs is not None and theirs.bytes > MORE * ours.bytes
        if sends_more and not self.planner.settings.repeat_collectives:
            return False
        budget, planned = self.planner.settings.budget, self.timed[0].figures
        if budget.physical_bytes is not None:
            return figures.physical_peak_bytes <= budget.physical_bytes
        if budget.fraction is not None:
            plain = self.planner.plain_figures or planned
            return figures.temp_bytes <= max(budget.fraction * plain.temp_bytes, planned.temp_bytes)
        return figures.temp_bytes <= WITHOUT_A_BUDGET * planned.temp_bytes

    @property
    def limit(self) -> int:
        """The predicted peak, in bytes, at which the compiler's figure is expected to be what is allowed."""
        budget, planned = self.planner.settings.budget, self.timed[0].figures
        if budget.physical_bytes is not None:
            allowed = budget.physical_bytes - (planned.physical_peak_bytes - planned.temp_bytes)
        elif budget.fraction is not None:
            allowed = budget.fraction * (self.planner.plain_figures or planned).temp_bytes
        else:
            allowed = WITHOUT_A_BUDGET * planned.temp_bytes
        return int(allowed * max(self.decision.peak, 1) / max(planned.temp_bytes, 1))

    def candidates(self) -> Iterator[tuple[str, Candidate]]:
        """Different candidates that are likely to fit, one of each kind first."""
        seconds = self.planner.original.plain_graph.seconds
        most_seconds = MOST_PREDICTED * (seconds + self.decision.extra_seconds) - seconds
        seen = {_content(self.decision)}
        kinds = (self.as_given(), self.loops(), self.chunks(), self.on_device(), self.neighbours())
        for found in itertools.chain.from_iterable(itertools.zip_longest(*kinds)):
            if found is None:
                continue
            what, candidate = found
            is_likely = candidate.peak <= UNCERTAIN * self.limit and candidate.extra_seconds <= most_seconds
            if is_likely and _content(candidate) not in seen:
                seen.add(_content(candidate))
                yield what, candidate

    def as_given(self) -> Iterator[tuple[str, Candidate]]:
        if not self.planner.settings.split:
            unchanged = self.planner.original.unchanged
            yield "the step as it was given", Candidate(unchanged, unchanged.problem.plain)
        yield "nothing recomputed, in another order", self.planner.reordered

    def loops(self) -> Iterable[tuple[str, Candidate]]:
        """The fastest of each variant."""
        forms, limit = self.planner.forms.given, self.limit
        every = [forms.candidate(variant, limit) for variant in forms.all]
        within = sorted((one for one in every if one.peak <= limit), key=lambda one: one.extra_seconds)
        return (("another variant of the step", one) for one in within)

    def chunks(self) -> Iterator[tuple[str, Candidate]]:
        forms = self.planner.forms
        if self.decision.prepared.chunks and not self.planner.settings.split:
            yield "with the whole batch", forms.given.within(self.limit)
        for number in forms.numbers if forms.may_be_split else ():
            form = forms.split(number)
            whole = form.reordered
            yield f"in {number} chunks", whole if whole.peak <= self.limit else form.within(self.limit)

    def on_device(self) -> Iterator[tuple[str, Candidate]]:
        if self.decision.plan.predicted.host_bytes:
            alone = dataclasses.replace(self.planner.original, offloads=False)
            yield "without copies to the host", Forms(alone, self.planner.settings).within(self.limit)

    def neighbours(self) -> Iterator[tuple[str, Candidate]]:
        frontier = self.planner.forms.given.frontier(BUDGETS)
        less = [one for one in frontier if one.peak < self.decision.peak]
        more = [one for one in frontier if one.peak > self.decision.peak]
        yield from (("a neighbour with more memory", one) for one in more[:1])
        yield from (("a neighbour with less memory", one) for one in reversed(less[-NEIGHBOURS:]))

    # Results

    def tuned(self, best: _Timed) -> Decision:
        """The decision for a candidate, with the times of all."""
        decision = self.decision
        if best is not self.timed[0]:
            note = f"the fastest of {len(self.timed)} plans that ran"
            is_plain = best.candidate.is_unchanged
            decision = (
                self.planner.plain(note, best.figures)
                if is_plain
                else self.planner.decision(best.candidate, best.figures, note=note)
            )
        timings = tuple(
            Timing(one.what, one.seconds, one.figures.physical_peak_bytes, one is best) for one in self.timed
        )
        return decision.with_plan(timings=timings, measured=decision.plan.measured or best.figures)


def not_tuned(decision: Decision, why: str) -> Decision:
    """The same decision, whose note says why nothing was timed."""
    return decision.with_plan(note="; ".join(filter(None, (decision.plan.note, f"not tuned: {why}"))))


def _content(candidate: Candidate) -> Any:
    """What tells candidates of one step apart that were made by different searches."""
    prepared = candidate.prepared
    written = prepared.loops if prepared.original else None
    loops = (written.chosen, written.inside) if written else None
    return prepared.chunks, prepared.is_rewritten, loops, candidate.solution.schedule
