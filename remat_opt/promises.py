"""A budget is a promise: what is foreseen to fit is compiled, and the compiler's figure decides."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from remat_opt.budget import InfeasibleBudget
from remat_opt.deciding import Decider, Decision
from remat_opt.forms import Found
from remat_opt.least import least_foreseen, near_least, our_order_alone
from remat_opt.targets import Figures

MOST_ATTEMPTS = 4  # the first plan, and three more with what the compiler said of the one before
OUT_OF_REACH = 1.5  # times a budget: what is foreseen to need more is not compiled
ROOM = 0.75  # of a budget: what needs less may leave room for something faster
SAFER = 1.1  # times what is foreseen after two misses, if nothing fits: the last attempt is the least, at any cost
LESS = 0.9  # of a budget that was missed: what is found for less may be faster, and fits


def keep_budget(decider: Decider) -> Decision:
    """The least extra time that fits the budget in the settings.

    Raises:
        InfeasibleBudget: nothing that was found fits.
    """
    if decider.compile is None:
        return _predicted(decider)
    fraction = decider.settings.budget.fraction
    if fraction == 1.0:
        unchanged = decider.given.unchanged
        figures = decider.measure(Found(unchanged, unchanged.problem.plain))
        return decider.plain("a budget of 1.0 is what the step as it was given needs", figures)
    if fraction is not None:
        return _Promise(decider, int(fraction * decider.measure(None).temp_bytes)).keep()
    allowed = decider.settings.budget.physical_bytes
    assert allowed is not None
    given = decider.given
    if given.is_divided or given.problem.plain.peak + fixed_bytes(decider) <= allowed * 1.1:
        plain = decider.measure_if_it_fits(None)
        if plain is not None and plain.physical_peak_bytes <= allowed:
            return decider.plain("the step as it was given fits the budget", plain)
    return _Promise(decider, allowed).keep()


class _Promise:
    """A budget while it is being kept.

    Args:
        decider: the step.
        allowed: bytes, of what `counted` says.
    """

    def __init__(self, decider: Decider, allowed: int):
        self.decider = decider
        self.allowed = allowed
        self.fraction = decider.settings.budget.fraction
        self.beside = 0 if self.fraction is not None else fixed_bytes(decider)  # what counts and is not temporary
        self.correction = 1.0  # of what is foreseen, from what the compiler said
        self.measured: list[tuple[Found, Figures]] = []
        self.smallest: Iterator[Found] | None = None  # once nothing else is foreseen to fit
        self.near: Found | None = None  # what needs about least and is faster than what is searched for, asked once
        plain = decider.plain_figures
        if plain is not None and decider.given.is_divided:  # the graph has the sizes on all devices together
            self.correction = plain.temp_bytes / max(decider.given.as_given, 1)
            self.beside = self.counted(plain) - plain.temp_bytes

    def keep(self) -> Decision:
        """Search for what is foreseen to fit, and compile it. Where it needs more, or so much less that there may be
        something faster, all else is foreseen to do so, too, and searched again."""
        for attempt in range(MOST_ATTEMPTS):
            found = self.next(last=attempt == MOST_ATTEMPTS - 1)
            if found is None:
                break
            figures = self.decider.measure(found)
            self.measured.append((found, figures))
            if self.is_enough(found, figures):
                break
            self.beside = self.counted(figures) - figures.temp_bytes
            misses = len(self.measured) - len(self.fitting)
            # Where nothing is computed again other buffers are live; what needs about least is no word for the rest.
            if not found.prepared.in_our_order and found is not self.near:
                self.correction = figures.temp_bytes / max(self.decider.foreseen(found), 1)
                self.correction *= SAFER if misses > 1 and not self.fitting else 1
        if fitting := self.fitting:
            return self.decider.decision(*min(fitting, key=lambda one: one[0].extra_seconds))
        raise self.refusal()

    def next(self, *, last: bool) -> Found | None:
        """What is to be compiled next; None where nothing new is left."""
        if self.smallest is None and (self.fitting or not last):
            found = self.fastest()
            if not self.was_measured(found):
                return found
            if self.fitting:
                return None
        if self.smallest is None:
            self.smallest = iter(self.that_may_need_least())
        return next(self.smallest, None)

    def fastest(self) -> Found:
        """What is foreseen to take the least time within the limit."""
        found = [self.decider.search(self.limit, self.size)]
        if len(self.measured) > len(self.fitting):  # sizes and peaks, by which is searched, do not rise together
            found.append(self.decider.search(int(LESS * self.limit), self.size))
        fitting = [one for one in found if self.size(one) <= self.limit]
        best = min(fitting, key=lambda one: one.extra_seconds, default=None)
        if self.near is None:
            near = near_least(self.decider, found[0].prepared, math.inf if best is None else best.extra_seconds)
            self.near = next((one for one in near if self.size(one) <= self.limit), None)
            if self.near is not None:
                return self.near
        return best or found[0]

    def is_enough(self, found: Found, figures: Figures) -> bool:
        """Whether a compiled schedule keeps the budget, and uses it."""
        uses_it = figures.temp_bytes >= ROOM * self.limit or found.extra_seconds <= 0 or self.smallest is not None
        return uses_it and self.counted(figures) <= self.allowed

    @property
    def limit(self) -> int:
        """Bytes of temporary memory."""
        return max(self.allowed - self.beside, 0)

    @property
    def fitting(self) -> list[tuple[Found, Figures]]:
        """What keeps the budget of all that was compiled."""
        return [one for one in self.measured if self.counted(one[1]) <= self.allowed]

    def size(self, found: Found) -> int:
        """Temporary memory of a schedule: the compiler's figure where it was asked, else foreseen."""
        known = [figures.temp_bytes for other, figures in self.measured if other.is_the_same_as(found)]
        return known[0] if known else math.ceil(self.decider.foreseen(found) * self.correction)

    def was_measured(self, found: Found) -> bool:
        return any(found.is_the_same_as(other) for other, _ in self.measured)

    def that_may_need_least(self) -> Sequence[Found]:
        """What may need least, whatever that costs, what is taken without a budget, and our order alone, from the
        smallest; without what is out of reach."""
        search, decider = self.decider.search, self.decider
        without_budget = search(None)
        least = [search(0), without_budget, least_foreseen(decider, without_budget), search(0, self.size)]
        new = [one for one in (*least, *our_order_alone(decider)) if not self.was_measured(one)]
        different = [one for index, one in enumerate(new) if not any(map(one.is_the_same_as, new[:index]))]
        reachable = [one for one in different if self.size(one) <= self.limit * OUT_OF_REACH]
        return sorted(reachable, key=self.size) or (different[:1] if not self.measured else [])

    def counted(self, figures: Figures) -> int:
        """The figure that the budget bounds."""
        return figures.temp_bytes if self.fraction is not None else figures.physical_peak_bytes

    def refusal(self) -> InfeasibleBudget:
        """The error that names the least that was found."""
        plain = self.decider.plain_figures
        least = min(self.counted(one) for one in (*(f for _, f in self.measured), plain) if one is not None)
        of_what = " of temporary memory" if self.fraction is not None else ""
        return InfeasibleBudget(
            f"expected a budget of at least {least} bytes, got {self.decider.settings.asked_budget!r} ({self.allowed} "
            f"bytes{of_what}): the least that was found needs {least}. Write {self.attainable(least)}",
            least,
        )

    def attainable(self, least: int) -> str:
        """The argument that would have worked, for the error's text."""
        if self.fraction is None:
            return f"budget={least}, or budget=None for the least memory"
        plain = self.decider.plain_figures.temp_bytes if self.decider.plain_figures is not None else 0
        if least >= plain:
            return "budget=1.0, the step as it was given: nothing that was found needs less"
        return f"budget={math.ceil(100 * least / plain) / 100:.2f}, or budget=None for the least memory"


def _predicted(decider: Decider) -> Decision:
    """The same where nothing may be compiled: by what is foreseen."""
    budget = decider.settings.budget
    beside = 0 if budget.fraction is not None else fixed_bytes(decider)
    if budget.fraction is not None:
        limit = int(budget.fraction * decider.given.as_given)
    else:
        limit = (budget.physical_bytes or 0) - beside
    found = decider.search(max(limit, 0), decider.foreseen)
    needed = decider.foreseen(found)
    if needed > limit:
        raise InfeasibleBudget(
            f"expected a budget of at least {needed + beside} bytes (predicted), got "
            f"{decider.settings.asked_budget!r}: no schedule was found that needs less",
            needed + beside,
        )
    return decider.decision(found, note="predicted, not compiled")


def fixed_bytes(decider: Decider) -> int:
    """Arguments and results that are not aliased: on the device whatever the schedule."""
    graph = decider.given.bridge.graph
    outputs = set(graph.outputs) - {output for _, output in graph.aliases}
    inputs = decider.given.captured.program.inputs
    return sum(graph.sizes[value] for value in inputs) + sum(graph.sizes[value] for value in outputs)
