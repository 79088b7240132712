"""Planning: from a captured program to a `Decision`, with the compiler's word where a promise needs it.

This module knows the stages from capture to plan; `optimized.py` knows how a decision gets into a jitted function.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jaxlib

from remat_opt.budget import InfeasibleBudget
from remat_opt.forms import Forms, Found
from remat_opt.graph.derive import Choice
from remat_opt.loops.choose import LoopChoices
from remat_opt.loops.pairs import find_pairs
from remat_opt.plan import Plan, PlanError, Prediction, check_fit, digest
from remat_opt.prepared import Prepared
from remat_opt.program.names import name_values
from remat_opt.report.progress import SearchProgress
from remat_opt.search import Solution, search_of
from remat_opt.search.watching import watched_by
from remat_opt.settings import Settings
from remat_opt.targets import CompilationOutOfMemory, Figures
from remat_opt.version import __version__

MOST_ATTEMPTS = 4  # the first plan, and three more with what the compiler said of the one before
WORTH_WRITING = 0.98  # a predicted peak above this part of the plain one is no gain
FAR_OFF = 1.5  # a compiled figure above so many times the predicted one: another order is tried
OUT_OF_REACH = 1.5  # times a budget: what is foreseen to need more is not compiled
ROOM = 0.75  # of a budget: what needs less may leave room for something faster
TOO_CLOSE_TO_CALL = 0.7  # above this part of the plain one a predicted peak is checked by compiling both

Measure = Callable[["Prepared", "Solution | None"], Figures]
"""Compile the step with a solution (None: as it was given) for the target and read the compiler's figures."""


@dataclasses.dataclass(frozen=True, eq=False)
class Decision:
    """What happens to one signature of a step.

    Attributes:
        prepared: the program and its graph.
        solution: the schedule to write.
        plan: the same for the user, with figures.
        seconds: time spent on each stage.
    """

    prepared: Prepared
    solution: Solution
    plan: Plan

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds spent on tracing, building the graph, searching and compiling."""
        return self.prepared.seconds

    @property
    def runs_as_given(self) -> bool:
        """Whether nothing was changed."""
        return runs_as_given(self.prepared, self.solution)

    def emit(self, arguments: Sequence[Any]) -> list[Any]:
        """Write the planned step on the program's flat inputs."""
        return self.prepared.emit(self.solution, arguments)


def decide(prepared: Prepared, settings: Settings, measure: Measure | None) -> Decision:
    """Find the schedule that the settings ask for.

    Args:
        prepared: the program.
        settings: what the user asked for.
        measure: the compiler, or None where nothing may be compiled; then predictions are all there is.

    Raises:
        InfeasibleBudget: the budget cannot be kept.
        PlanError: the plan in the settings is for another program.
    """
    decider = _Decider(prepared, settings, measure if settings.verify else None)
    if prepared.captured.program.has_references:
        return decider.plain("it reads or writes mutable references, whose order cannot be changed")
    if settings.plan is not None:
        return decider.take_over(settings.plan)
    if settings.budget.is_promise:
        return decider.keep_budget()
    return decider.least_memory()


def run_as_given(prepared: Prepared, settings: Settings, note: str) -> Decision:
    """The decision to change nothing."""
    return _Decider(prepared, settings, None).plain(note)


def decision_of(found: Found, settings: Settings) -> Decision:
    """The decision for a schedule that was found elsewhere; nothing is compiled, and its peak is the search's."""
    return _Decider(found.prepared.given or found.prepared, settings, None).decision(found, as_searched=True)


class _Decider:
    def __init__(self, prepared: Prepared, settings: Settings, measure: Measure | None):
        self.given = prepared
        self.settings = settings
        self.forms = Forms(prepared, settings.solver, settings.keep_user_checkpoints)
        self.compile = measure
        self.plain_figures: Figures | None = None

    def search(self, limit: int | None, size: Callable[[Found], int] | None = None) -> Found:
        started = time.perf_counter()
        with SearchProgress() as progress, watched_by(progress):
            found = self.forms.least() if limit is None else self.forms.within(limit, size)
        self.spend("search", started)
        return found

    def measure(self, found: Found | None) -> Figures:
        """The compiler's figures of a schedule, or of the step as it was given (None)."""
        assert self.compile is not None
        started = time.perf_counter()
        figures = self.compile(self.given, None) if found is None else self.compile(found.prepared, found.solution)
        self.spend("compile", started)
        if found is None:
            self.plain_figures = figures
        return figures

    def measure_if_it_fits(self, found: Found | None) -> Figures | None:
        """The same; None where the compiler refuses a step that is too large for the device, as a TPU's does."""
        try:
            return self.measure(found)
        except CompilationOutOfMemory:
            return None

    def spend(self, stage: str, started: float) -> None:
        seconds = self.given.seconds
        seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - started

    # Least memory

    def least_memory(self) -> Decision:
        found = self.search(None)
        if found.runs_as_given or found.peak > WORTH_WRITING * self.given.peak_in_order:
            return self.plain(
                "nothing to gain: recomputing anything would not lower the peak (if there is no gradient in it, give "
                "optimize the whole training step, with jax.grad and the update, not the loss alone)"
            )
        candidates = [found]
        if self.settings.budget.at_any_cost:
            candidates.insert(0, self.search(0))
        if self.compile is None:
            return self.decision(min(candidates, key=lambda one: one.peak))
        # With the user's own checkpoints the step as given may need less than our model of it without them says.
        clear = found.peak <= TOO_CLOSE_TO_CALL * self.given.peak_in_order
        clear = clear and self.foreseen(found) <= TOO_CLOSE_TO_CALL * self.given.as_given
        clear = clear and not self.given.captured.program.entered_checkpoints
        if clear and candidates[0].is_the_same_as(found):
            return self.decision(found)
        return self.by_the_compiler(candidates, compare_with_plain=not clear)

    def by_the_compiler(self, candidates: Sequence[Found], *, compare_with_plain: bool) -> Decision:
        """The candidate that needs least when it is compiled, where asked for only if plain needs more."""
        plain = self.measure_if_it_fits(None) if compare_with_plain else None
        different: list[Found] = []
        for candidate in candidates:
            if not any(candidate.is_the_same_as(other) for other in different):
                different.append(candidate)
        measured = [(f, candidate) for candidate in different if (f := self.measure_if_it_fits(candidate)) is not None]
        if not measured:
            return self.decision(min(different, key=lambda one: one.peak))  # the call says what the compiler says
        figures, found = min(measured, key=lambda pair: pair[0].temp_bytes)
        if plain is None:
            return self.decision(found, figures)
        if self.settings.solver == "auto" and figures.temp_bytes > found.peak * FAR_OFF:
            other = Found(found.prepared, search_of(found.prepared.problem).most_barriers)
            of_other = self.measure(other)
            if of_other.temp_bytes < figures.temp_bytes:
                figures, found = of_other, other
        if figures.temp_bytes < plain.temp_bytes:
            return self.decision(found, figures)
        return self.plain(
            f"nothing to gain: the compiler needs {figures.temp_bytes} bytes for the rewritten step and "
            f"{plain.temp_bytes} for the step as it was given"
        )

    def foreseen(self, found: Found) -> int:
        """Predicted peak in bytes of what is compiled."""
        prepared = found.prepared
        if found.runs_as_given:
            return prepared.as_given
        return prepared.as_written(found.solution) if prepared.can_be_foreseen else found.peak

    # A budget

    def keep_budget(self) -> Decision:
        if self.compile is None:
            return self.keep_budget_unverified()
        fraction = self.settings.budget.fraction
        if fraction == 1.0:
            figures = self.measure(Found(self.given, self.given.problem.plain))
            return self.plain("a budget of 1.0 is what the step as it was given needs", figures)
        if fraction is not None:
            allowed = int(fraction * self.measure(None).temp_bytes)
        else:
            assert self.settings.budget.physical_bytes is not None
            allowed = self.settings.budget.physical_bytes
            if self.given.is_divided or self.given.problem.plain.peak + self.fixed_bytes() <= allowed * 1.1:
                plain = self.measure_if_it_fits(None)
                if plain is not None and plain.physical_peak_bytes <= allowed:
                    return self.plain("the step as it was given fits the budget", plain)
        return self.tighten(allowed)

    def tighten(self, allowed: int) -> Decision:
        """Search for what is foreseen to fit, and compile it. Where it needs more, or so much less that there may be
        something faster, all else is foreseen to do so, too, and searched again."""
        beside = 0 if self.settings.budget.fraction is not None else self.fixed_bytes()
        correction, plain = 1.0, self.plain_figures
        if plain is not None and self.given.is_divided:  # sizes in the graph are those on all devices together
            correction = plain.temp_bytes / max(self.given.as_given, 1)
            beside = self.counted(plain) - plain.temp_bytes
        measured: list[tuple[Found, Figures]] = []
        candidates: Iterator[Found] | None = None

        def size(found: Found) -> int:
            known = [figures.temp_bytes for other, figures in measured if other.is_the_same_as(found)]
            return known[0] if known else math.ceil(self.foreseen(found) * correction)

        def fitting() -> list[tuple[Found, Figures]]:
            return [one for one in measured if self.counted(one[1]) <= allowed]

        for attempt in range(MOST_ATTEMPTS):
            found = None
            if candidates is None and (attempt < MOST_ATTEMPTS - 1 or fitting()):
                found = self.search(max(allowed - beside, 0), size)
            if found is None or any(found.is_the_same_as(other) for other, _ in measured):
                if fitting():
                    break
                candidates = candidates or iter(self.smallest(size, measured, allowed - beside))
                found = next(candidates, None)
            if found is None:
                break
            figures = self.measure(found)
            measured.append((found, figures))
            if self.counted(figures) <= allowed and (
                candidates is not None or found.extra_seconds <= 0 or figures.temp_bytes >= ROOM * (allowed - beside)
            ):
                break
            beside = self.counted(figures) - figures.temp_bytes
            correction = figures.temp_bytes / max(self.foreseen(found), 1)
        if fits := fitting():
            return self.decision(*min(fits, key=lambda one: one[0].extra_seconds))
        least = min(self.counted(one) for one in (*(figures for _, figures in measured), plain) if one is not None)
        raise InfeasibleBudget(
            f"expected a budget of at least {least} bytes, got {self.settings.asked_budget!r} ({allowed} bytes"
            f"{' of temporary memory' if self.settings.budget.fraction is not None else ''}): the least that was "
            f"found needs {least}. Write {self.attainable(least)}",
            least,
        )

    def smallest(
        self, size: Callable[[Found], int], measured: Sequence[tuple[Found, Figures]], limit: int
    ) -> Sequence[Found]:
        """What may need least, whatever that costs, from the smallest; without what is out of reach."""
        found = [self.search(0), self.search(None), self.search(0, size)]
        new = [one for one in found if not any(one.is_the_same_as(other) for other, _ in measured)]
        different = [one for index, one in enumerate(new) if not any(map(one.is_the_same_as, new[:index]))]
        reachable = [one for one in different if size(one) <= limit * OUT_OF_REACH]
        return sorted(reachable, key=size) or (different[:1] if not measured else [])

    def attainable(self, least: int) -> str:
        """The argument that would have worked, for an error's text."""
        if self.settings.budget.fraction is None:
            return f"budget={least}, or budget=None for the least memory"
        plain = self.plain_figures.temp_bytes if self.plain_figures is not None else 0
        if least >= plain:
            return "budget=1.0, the step as it was given: nothing that was found needs less"
        return f"budget={math.ceil(100 * least / plain) / 100:.2f}, or budget=None for the least memory"

    def counted(self, figures: Figures) -> int:
        """The figure that the budget bounds."""
        return figures.temp_bytes if self.settings.budget.fraction is not None else figures.physical_peak_bytes

    def keep_budget_unverified(self) -> Decision:
        budget = self.settings.budget
        if budget.fraction is not None:
            limit = int(budget.fraction * self.given.as_given)
        else:
            limit = (budget.physical_bytes or 0) - self.fixed_bytes()
        found = self.search(max(limit, 0), self.foreseen)
        needed = self.foreseen(found)
        if needed > limit:
            least = needed + (0 if budget.fraction is not None else self.fixed_bytes())
            raise InfeasibleBudget(
                f"expected a budget of at least {least} bytes (predicted), got {self.settings.asked_budget!r}: no "
                "schedule was found that needs less",
                least,
            )
        return self.decision(found, note="predicted, not compiled")

    def fixed_bytes(self) -> int:
        """Arguments and results that are not aliased: on the device whatever the schedule."""
        graph = self.given.bridge.graph
        outputs = set(graph.outputs) - {output for _, output in graph.aliases}
        inputs = self.given.captured.program.inputs
        return sum(graph.sizes[value] for value in inputs) + sum(graph.sizes[value] for value in outputs)

    # A plan of the user's

    def take_over(self, plan: Plan) -> Decision:
        check_fit(plan, self.given.fingerprint, self.given.inputs, len(self.given.captured.program.equations))
        try:
            pairs = find_pairs(self.given.captured.program, keep_checkpoints=self.settings.keep_user_checkpoints)
            loops = LoopChoices(pairs.pairs, plan.loops, (), pairs.left)
            prepared = self.forms.written(loops, plan.inside_loops)
            found = Found(prepared, solution_of(plan, prepared))
        except (ValueError, IndexError, KeyError) as error:
            if isinstance(error, PlanError):
                raise
            raise PlanError(
                f"expected a schedule of this program, found a damaged one: {error}. Plan again with "
                "step.plan(*args).save(path)"
            ) from error
        note = made_elsewhere(plan, self.given.target.name) or plan.note
        return self.decision(found, plan.measured if not plan.edited else None, note=note)

    # Results

    def plain(self, note: str, figures: Figures | None = None) -> Decision:
        return self.decision(Found(self.given, self.given.problem.plain), figures or self.plain_figures, note=note)

    def decision(
        self, found: Found, measured: Figures | None = None, note: str = "", *, as_searched: bool = False
    ) -> Decision:
        prepared, solution = found.prepared, found.solution
        peak = found.peak if as_searched and not found.runs_as_given else self.foreseen(found)
        names = prepared.names(solution.choice)
        graph, given = prepared.bridge.graph, self.given.bridge.graph
        predicted = Prediction(
            plain_peak_bytes=prepared.as_given,
            peak_bytes=peak,
            saved_bytes=sum(graph.sizes[value] for value in solution.choice.saved),
            flops=given.flops,
            extra_flops=found.extra_flops,
            seconds=given.seconds,
            extra_seconds=found.extra_seconds,
        )
        saved = tuple(names[value] for value in sorted(names))
        written = prepared.loops if prepared.given else None
        loops = prepared.loops or self.forms.loops
        said = loops.summary(written=written is not None) if loops else ""
        plan = Plan(
            fingerprint=prepared.fingerprint,
            inputs=prepared.inputs,
            equations=len(self.given.captured.program.equations),
            target=prepared.target.name,
            solver=self.settings.solver,
            budget=self.settings.asked_budget,
            saved=saved,
            saved_digest=digest(saved),
            choice=solution.choice,
            schedule=solution.schedule,
            predicted=predicted,
            measured=measured,
            plain_measured=self.plain_figures,
            versions=versions(),
            note="; ".join(filter(None, (note, said))),
            loops=written.chosen if written else (),
            loop_bodies=written.bodies if written else 0,
            inside_loops=written.inside if written else None,
        )
        return Decision(prepared, solution, plan)


def runs_as_given(prepared: Prepared, solution: Solution) -> bool:
    """Whether a solution changes nothing."""
    return Found(prepared, solution).runs_as_given


def made_elsewhere(plan: Plan, target: str) -> str:
    """What a plan was made with that is not what there is here, in words; empty where it was made with the same."""
    here = versions()
    elsewhere = [f"{name} {found}" for name, found in plan.versions.items() if here.get(name) != found]
    if plan.target != target:
        elsewhere.append(f"target {plan.target}")
    return f"planned with {', '.join(elsewhere)}; its figures are from there" if elsewhere else ""


def solution_of(plan: Plan, prepared: Prepared) -> Solution:
    """The schedule of a plan, or, where its saved set was edited, the one derived from that."""
    problem = prepared.problem
    unknown = [v for v in plan.choice.saved if not 0 <= v < len(problem.graph.sizes)]
    if unknown:
        raise PlanError(f"expected ids of this program's values among the saved ones, found {min(unknown)}")
    choice = edited_choice(plan, prepared) if plan.edited else plan.choice
    if choice.saved != plan.choice.saved:
        return problem.solution(choice)
    return dataclasses.replace(problem.scheduled(plan.schedule, plan.choice), choice=plan.choice)


def edited_choice(plan: Plan, prepared: Prepared) -> Choice:
    """A plan's choice with the tensors that it names as the saved ones."""
    program = prepared.captured.program
    names = name_values(program, range(len(program.avals)))
    by_name = {name: value for value, name in names.items()}
    unknown = [name for name in plan.saved if name not in by_name]
    if unknown:
        raise PlanError(f"expected names of values of this program; it has none named {unknown[0]!r}")
    saved = frozenset(by_name[name] for name in plan.saved)
    return Choice(saved, plan.choice.turning_points, plan.choice.cuts)


def versions() -> dict[str, str]:
    """Versions that a plan is tagged with."""
    return {"remat_opt": __version__, "jax": jax.__version__, "jaxlib": jaxlib.__version__}
