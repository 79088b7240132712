"""The largest batch of a step that fits a budget.

Memory is close to affine in the batch, and so is the least memory that recomputation reaches. A few batches are
planned, a line through their predicted peaks says which to plan next, and the largest one that is predicted to fit is
compiled. The compiler's figure corrects the predictions, and the search goes on with the corrected ones, until another
compilation cannot gain a noticeable part of the batch.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from remat_opt.planner.budget import InfeasibleBudget
from remat_opt.planner.budget_loop import FIRST_MARGIN, MOST_COMPILATIONS, SECOND_MARGIN, fixed_bytes
from remat_opt.planner.candidates import Candidate
from remat_opt.planner.collectives import without_repeats
from remat_opt.planner.decision import Decision, Measure, Planner
from remat_opt.planner.plan import Plan
from remat_opt.planner.planning import decide
from remat_opt.planner.prepared import Prepared
from remat_opt.planner.settings import Settings
from remat_opt.targets import CompilationOutOfMemory, Figures

MOST_MISSES = 2  # compiled steps that do not fit
FIRST_BATCH = 8  # at least: smaller ones have shapes of 1, which compilers and models treat otherwise
RESOLUTION = 0.01  # of the batch; predictions are not better than that
GAIN = 0.02  # part of the batch that another compilation has to gain
MOST_ROWS = 2**31 - 1
MOST_GROWTH = 256  # times the largest batch that is predicted to fit
MOST_LINES = 6  # steps after which what is left is halved
BETWEEN = 3  # batches between the plain step's largest and the largest, whose time is predicted

ReadStep = Callable[[int], tuple[Prepared, Measure]]
"""A batch size → the step with it, and the compiler."""


@dataclasses.dataclass(frozen=True)
class BatchPoint:
    """A step with one batch size. All figures are predictions.

    Attributes:
        batch: rows of all devices together.
        peak_bytes: physical peak of one device.
        seconds: estimated time of a step on the target.
        extra_seconds: the part of it that recomputation takes.
        plan: to give to `optimize(fun, plan=point.plan)`.
    """

    batch: int
    peak_bytes: int
    seconds: float
    extra_seconds: float
    plan: Plan

    @property
    def samples_per_second(self) -> float:
        """Rows of the batch in a second."""
        return self.batch / self.seconds if self.seconds > 0 else math.inf


@dataclasses.dataclass(frozen=True)
class FoundBatch:
    """What a search found: points as of `LargestBatch`, and how it went.

    Attributes:
        largest: the largest batch that fits; its plan has the compiler's figures.
        fastest: the batch of most samples per second, among those that were planned for it.
        plain: the largest batch of the original step; None where none fits.
        compilations: how many steps were compiled.
        misses: how many of these did not fit.
    """

    largest: BatchPoint
    fastest: BatchPoint
    plain: BatchPoint | None
    compilations: int
    misses: int


@dataclasses.dataclass(frozen=True)
class _Line:
    """The compiler's bytes of one device as a function of predicted bytes."""

    predicted: float = 0.0
    compiled: float = 0.0
    slope: float = 1.0

    def __call__(self, predicted: float) -> float:
        return self.compiled + (predicted - self.predicted) * self.slope

    def inverse(self, compiled: float) -> float:
        """The predicted bytes at which the compiler's are expected to be `compiled`."""
        return self.predicted + (compiled - self.compiled) / self.slope


def _fit_line(fits: Sequence[tuple[int, int]], misses: Sequence[tuple[int, int]], devices: int) -> _Line:
    """The line through pairs of predicted and compiled bytes: of the largest step that fits and the smallest that does
    not, else of the last ones.

    On one device one pair is enough, they are proportional. The graph of a divided step has the bytes of all devices
    together: some are divided among them and some are on each, so that one pair says nothing of the slope.
    """
    if not fits and not misses:
        return _Line(slope=1 / devices)
    pair = [fits[-1], min(misses)] if fits and misses else [*fits, *misses][-2:]
    (lower, of_lower), (upper, of_upper) = pair[0], pair[-1]
    slope = (of_upper - of_lower) / (upper - lower) if upper != lower else 0.0
    if slope > 0 and (devices > 1 or (fits and misses)):
        return _Line(lower, of_lower, slope)
    return _Line(upper, of_upper, max(of_upper, 1) / max(upper, 1) if devices == 1 else 1 / devices)


@dataclasses.dataclass(frozen=True)
class _CompiledBatch:
    """A compiled step, with predicted and compiled bytes of temporary memory (`temp`) and of arguments and results
    (`fixed`). The compiler's are of one device; predictions for a divided step are of all devices together."""

    batch: int
    candidate: Candidate
    predicted_temp: int
    predicted_fixed: int
    temp: int
    fixed: int
    figures: Figures | None = None  # None where the compiler refused it


class BatchSearch:
    """The search for the largest batch.

    Args:
        read: the step for a batch size.
        settings: what the user asked for; the budget is in bytes.
        multiple_of: batches are multiples of it.
        devices: on how many devices the step runs.
    """

    def __init__(self, read: ReadStep, settings: Settings, multiple_of: int, devices: int):
        assert settings.budget.physical_bytes is not None
        self.read = read
        self.settings = settings
        self.multiple_of = multiple_of
        self.devices = devices
        self.allowed = settings.budget.physical_bytes
        self.planners: dict[int, Planner] = {}
        self.least_peaks: dict[int, int] = {}  # by batch
        self.compiled: list[_CompiledBatch] = []
        self.plain_figures: Figures | None = None  # of a divided step

    # Predictions

    def planner(self, batch: int) -> Planner:
        """The step with this batch, read when it is first asked for."""
        if batch not in self.planners:
            prepared, measure = self.read(batch)
            self.planners[batch] = Planner(prepared, self.settings, measure)
        return self.planners[batch]

    def candidate(self, batch: int, limit: float) -> Candidate:
        """The fastest schedule with a predicted peak of at most `limit` bytes, or the least memory at any cost."""
        planner = self.planner(batch)
        if planner.original.captured.program.has_references:  # nothing can be changed
            return Candidate(planner.original.unchanged, planner.original.unchanged.problem.plain)
        return planner.search(max(int(limit), 0))

    @property
    def temp_line(self) -> _Line:
        """From predicted to compiled temporary memory."""
        return self.line(lambda one: (one.predicted_temp, one.temp))

    @property
    def fixed_line(self) -> _Line:
        """From predicted to compiled bytes of arguments and results."""
        return self.line(lambda one: (one.predicted_fixed, one.fixed))

    def line(self, read: Callable[[_CompiledBatch], tuple[int, int]]) -> _Line:
        """See `_fit_line`; `read` says which bytes of a compiled step are compared."""
        fits = [read(one) for one in self.fitting]
        return _fit_line(fits, [read(one) for one in self.compiled if not self.fits(one)], self.devices)

    @property
    def margin(self) -> float:
        """By how much smaller than the budget the next step is to be."""
        if self.must_go_on and self.misses >= MOST_MISSES:
            return SECOND_MARGIN
        is_first = len(self.compiled) == (self.devices > 1)
        return FIRST_MARGIN if is_first or self.misses else 1.0

    def fixed(self, batch: int) -> float:
        """Bytes of arguments and results of one device."""
        return self.fixed_line(fixed_bytes(self.planner(batch)))

    def least(self, batch: int) -> float:
        """The least physical peak of one device, in bytes, with the margin."""
        if batch not in self.least_peaks:
            self.least_peaks[batch] = self.candidate(batch, 0).peak
        return self.margin * self.temp_line(self.least_peaks[batch]) + self.fixed(batch)

    def plain(self, batch: int) -> float:
        """The physical peak of one device in bytes of the original step. Its buffers at the peak are other ones than
        those of rewritten steps, whose figures say nothing of it."""
        planner = self.planner(batch)
        peak, fixed = planner.original.plain_peak, fixed_bytes(planner)
        return peak + fixed if self.devices == 1 else self.temp_line(peak) + self.fixed(batch)

    def limit(self, batch: int) -> float:
        """The predicted peak of temporary memory, in bytes, at which the budget is expected to be met."""
        return self.temp_line.inverse((self.allowed - self.fixed(batch)) / self.margin)

    # The search

    def run(self) -> FoundBatch:
        """Plan and compile.

        Raises:
            InfeasibleBudget: the smallest batch does not fit.
            ValueError: every batch fits.
        """
        first = self.multiple_of * math.ceil(FIRST_BATCH / self.multiple_of)
        if self.devices > 1:
            self.compile(self.multiple_of if self.plain(first) > self.allowed else first, None)
        first = self.largest(self.plain, MOST_ROWS, first, self.planners) or first
        most = MOST_ROWS
        while len(self.compiled) < MOST_COMPILATIONS and (self.misses < MOST_MISSES or self.must_go_on):
            batch = self.largest(self.least, most, first, self.least_peaks)
            if not batch and not self.fitting:
                raise self.refusal()
            if self.fitting and batch < (1 + GAIN) * self.fitting[-1].batch:
                break
            candidate = self.candidate(batch, self.limit(batch))
            if any(one.batch == batch and candidate.is_the_same_as(one.candidate) for one in self.compiled):
                most = batch - 1  # it does not fit, and there is no smaller one
                continue
            self.compile(batch, candidate)
            most = most if self.fits(self.compiled[-1]) else batch
        if not self.fitting:
            raise self.refusal()
        last = self.fitting[-1]
        may_try = len(self.compiled) < MOST_COMPILATIONS and self.misses < MOST_MISSES
        if may_try and not last.candidate.is_unchanged and self.plain(last.batch) <= self.allowed:
            unchanged = self.planner(last.batch).original.unchanged
            self.compile(last.batch, Candidate(unchanged, unchanged.problem.plain))
        return self.found()

    def largest(self, needs: Callable[[int], float], most: int, first: int, known: Iterable[int]) -> int:
        """The largest multiple, of at most `most`, that needs no more than what is allowed; 0 where none does.

        Args:
            needs: bytes for a batch, close to affine.
            most: the largest batch that is asked for.
            first: the batch that is asked for first.
            known: batches for which it is cheap to ask.
        """
        step, end = self.multiple_of, most // self.multiple_of + 1
        found = {batch // step: needs(batch) for batch in list(known) if batch <= most}
        low, first_known = 0, len(found)
        while True:
            high = min((number for number, needed in found.items() if needed > self.allowed), default=end)
            low = max((number for number in found if number < high), default=0)
            number = _guess(found, self.allowed) if found else first // step
            is_near = low > 0 and len(found) > 2 and number - low < max(1, RESOLUTION * low)
            if high - low <= 1 or is_near:
                break
            if len(found) - first_known > MOST_LINES and high < end:
                number = (low + high) // 2
            number = min(max(number, low + 1), high - 1, *([MOST_GROWTH * low] if low else []))
            found[number] = needs(number * step)
        if low >= MOST_ROWS // step:
            raise ValueError(
                f"expected memory that grows with the batch, got a step in which {low * step} rows fit the budget; "
                "write make_args so that the arguments of the step have `batch` rows"
            )
        return low * step

    def compile(self, batch: int, candidate: Candidate | None) -> None:
        """Compile a candidate, or the original step (None), which says how a divided step lies on its devices."""
        planner = self.planner(batch)
        unchanged = planner.original.unchanged
        one = candidate or Candidate(unchanged, unchanged.problem.plain)
        fixed, figures = fixed_bytes(planner), None
        try:
            figures = planner.measure(candidate)
            temp, real_fixed = figures.temp_bytes, figures.physical_peak_bytes - figures.temp_bytes
        except CompilationOutOfMemory as refusal:
            self.allowed = min(self.allowed, refusal.limit_bytes or self.allowed)
            real_fixed = int(self.fixed_line(fixed))
            temp = max(refusal.needed_bytes or int(SECOND_MARGIN * self.allowed), self.allowed) - real_fixed
        peak = planner.original.plain_peak if candidate is None else one.peak
        self.compiled.append(_CompiledBatch(batch, one, peak, fixed, temp, real_fixed, figures))
        if candidate is None:
            self.plain_figures = figures

    @property
    def must_go_on(self) -> bool:
        """Whether nothing fits but, of a divided step, the one that was compiled to see how it lies on its devices."""
        return not any(map(self.fits, self.compiled[self.devices > 1 :]))

    @property
    def misses(self) -> int:
        """How many of the compiled steps do not fit."""
        return len(self.compiled) - len(self.fitting)

    @property
    def fitting(self) -> list[_CompiledBatch]:
        """The compiled steps that fit, of ascending batches, and of one batch the fastest last."""
        return sorted(filter(self.fits, self.compiled), key=lambda one: (one.batch, -one.candidate.extra_seconds))

    def fits(self, one: _CompiledBatch) -> bool:
        return one.figures is not None and one.temp + one.fixed <= self.allowed

    def refusal(self) -> InfeasibleBudget:
        """The error where not even the smallest batch fits."""
        batch = self.multiple_of
        least, fixed = math.ceil(self.least(batch)), math.ceil(self.fixed(batch))
        return InfeasibleBudget(
            f"expected a budget that the smallest batch of {batch} fits, got {self.settings.asked_budget!r} (at most "
            f"{self.allowed} bytes): it needs at least {least} bytes, {fixed} of them for arguments and results. Write "
            f"budget={least} or more, or a smaller multiple_of",
            least,
        )

    # Results

    def found(self) -> FoundBatch:
        """The points, once the largest batch is known."""
        last = self.fitting[-1]
        largest = self.point(last.batch, self.checked(last))
        plain_batch = self.largest(self.plain, last.batch, last.batch, self.planners)
        plain = self.point(plain_batch, None) if plain_batch else None
        every = [self.point(batch, self.candidate(batch, self.limit(batch))) for batch in self.between(plain_batch)]
        fastest = max([*every, largest, *filter(None, [plain])], key=lambda one: one.samples_per_second)
        return FoundBatch(largest, fastest, plain, len(self.compiled), self.misses)

    def checked(self, one: _CompiledBatch) -> Decision:
        """The decision for a compiled candidate; a divided step sends no more arrays than the original one."""
        planner = self.planner(one.batch)
        decision = planner.decision(one.candidate, one.figures)
        sent, before = (figures and figures.collectives for figures in (one.figures, self.plain_figures))
        if self.settings.repeat_collectives or not (
            sent and before and planner.compile and sent.arrays > before.arrays
        ):
            return decision
        return without_repeats(decision, planner.original, functools.partial(_decide, self.settings), planner.compile)

    def between(self, low: int) -> list[int]:
        """Batches between one and the largest that fits, in equal ratios."""
        low, high, step = max(low, self.multiple_of), self.fitting[-1].batch, self.multiple_of
        ratios = (number / (BETWEEN + 1) for number in range(1, BETWEEN + 1))
        batches = {round(low * (high / low) ** ratio / step) * step for ratio in ratios}
        return sorted(batch for batch in batches if low < batch < high)

    def point(self, batch: int, candidate: Candidate | None) -> BatchPoint:
        """A batch with a schedule, or with the original step (None)."""
        planner = self.planner(batch)
        if isinstance(candidate, Decision):
            plan = candidate.plan
        else:
            plan = planner.plain("").plan if candidate is None else planner.decision(candidate).plan
        predicted = plan.predicted
        extra = 0.0 if candidate is None else predicted.extra_seconds
        peak = self.temp_line(predicted.peak_bytes) + self.fixed(batch) if candidate else self.plain(batch)
        seconds = (predicted.seconds + extra) / self.devices  # a divided graph has the work of all devices
        return BatchPoint(batch, math.ceil(peak), seconds, extra / self.devices, plan)


def _decide(settings: Settings, prepared: Prepared, measure: Measure) -> Decision:
    return decide(prepared, settings, measure)


def _guess(found: Mapping[int, float], allowed: float) -> int:
    """Where the line through the two points nearest to the limit meets it."""
    nearest = sorted(found.items(), key=lambda one: abs(one[1] - allowed))[:2]
    if len(nearest) < 2:
        number, needed = nearest[0]
        return 2 * number if needed <= allowed else number // 2
    (low, of_low), (high, of_high) = sorted(nearest)
    slope = (of_high - of_low) / (high - low)
    return MOST_ROWS if slope <= 0 else low + math.floor((allowed - of_low) / slope)
