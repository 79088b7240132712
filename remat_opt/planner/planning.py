"""Planning: from a captured program to a `Decision`, checked by the compiler where a budget needs it.

This module has the stages from capture to plan; `callable/function.py` puts a decision into a jitted function.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from remat_opt.graph.derive import Choice
from remat_opt.loops.choose import LoopChoices
from remat_opt.loops.no_gain import why_nothing_is_gained
from remat_opt.loops.pairs import find_pairs
from remat_opt.planner.budget_loop import keep_budget
from remat_opt.planner.candidates import Candidate
from remat_opt.planner.decision import Decision, Measure, Planner, versions
from remat_opt.planner.offloading import with_transfers
from remat_opt.planner.plan import Plan, PlanError, check_fit, check_loops
from remat_opt.planner.prepared import Prepared
from remat_opt.planner.settings import Settings
from remat_opt.planner.splitting import in_chunks
from remat_opt.search import Solution, search_of
from remat_opt.trace.names import name_values

GAIN_THRESHOLD = 0.98  # a peak above this part of the plain one, predicted or compiled, is no gain
FAR_OFF = 1.5  # a compiled figure above so many times the predicted one: another order is tried
SMALLEST_GAIN = 4096  # bytes, a page: what is less is no gain on any device
TOO_CLOSE_TO_CALL = 0.7  # above this part of the plain one a predicted peak is checked by compiling both
TOO_CLOSE_ON_A_TPU = 0.5


Tune = Callable[[Planner, Decision], Decision]
"""Take the fastest of the plans that fit, which a device tells."""


def decide(prepared: Prepared, settings: Settings, measure: Measure | None, tune: Tune | None = None) -> Decision:
    """Find the schedule that the settings ask for.

    Args:
        prepared: the program.
        settings: what the user asked for.
        measure: the compiler, or None where nothing may be compiled; then predictions are all there is.
        tune: times plans; None where nothing may run.

    Raises:
        InfeasibleBudget: the budget cannot be kept.
        PlanError: the plan in the settings is for another program.
    """
    planner = Planner(prepared, settings, measure if settings.verify else None)
    if prepared.offloads and settings.plan is None:
        alone = functools.partial(decide, dataclasses.replace(prepared, offloads=False), settings, measure)
        decision = with_transfers(planner, decide_with, alone)
    else:
        decision = decide_with(planner)
    return decision if tune is None else tune(planner, decision)


def decide_with(planner: Planner) -> Decision:
    """`decide` with a planner."""
    prepared, settings = planner.original, planner.settings
    if prepared.captured.program.has_references:
        return planner.plain("it reads or writes mutable references, whose order cannot be changed")
    if settings.plan is not None:
        return take_over(planner, settings.plan)
    if settings.budget.has_limit:
        return keep_budget(planner)
    return minimum_memory(planner)


def keep_original(prepared: Prepared, settings: Settings, note: str) -> Decision:
    """The decision to change nothing."""
    return Planner(prepared, settings, None).plain(note)


def decision_of(candidate: Candidate, settings: Settings) -> Decision:
    """The decision for a schedule that another search found; nothing is compiled."""
    given = candidate.prepared
    while given.original:
        given = given.original
    return Planner(given, dataclasses.replace(settings, split=0), None).decision(candidate)  # it is split already


def minimum_memory(planner: Planner) -> Decision:
    """The least memory for at most one more forward pass, or two; see `Variants.minimum_memory`."""
    candidate = planner.search(None)
    if planner.settings.split:
        return split_for_minimum(planner, candidate)
    gains_little = candidate.is_unchanged or candidate.peak > GAIN_THRESHOLD * planner.original.comparable_peak
    if gains_little:
        candidate = min(planner.reordered, candidate, key=lambda one: (one.is_unchanged, one.peak))
    candidates = [*([planner.search(0)] if planner.settings.budget.at_any_cost else []), candidate]
    if planner.compile is None:
        least = min(candidates, key=lambda one: one.peak)
        if gains_little and least.peak >= GAIN_THRESHOLD * planner.original.comparable_peak:
            return planner.plain(
                "nothing to gain: recomputing anything would not lower the peak "
                f"({why_nothing_is_gained(planner.original.bridge)})"
            )
        return planner.decision(least)
    if gains_little:  # compilers have an order of their own for the original step
        return by_the_compiler(planner, candidates, compare_with_plain=True)
    clear = is_clear(planner, candidate)
    if clear and candidates[0].is_the_same_as(candidate):
        return planner.decision(candidate)
    return by_the_compiler(planner, candidates, compare_with_plain=not clear)


def split_for_minimum(planner: Planner, candidate: Candidate) -> Decision:
    """The least memory of a step that is split as the user says: whether that gains anything is not asked."""
    every = [candidate, planner.reordered]
    if planner.settings.budget.at_any_cost:
        every.append(planner.search(0))
    return planner.decision(min(every, key=lambda one: one.peak))


def is_clear(planner: Planner, candidate: Candidate) -> bool:
    """Whether a schedule is predicted to need so much less than the original step that no compilation is needed."""
    original = planner.original
    # With the user's own checkpoints the original step may need less than our model of it without them says.
    if original.captured.program.entered_checkpoints:
        return False
    is_tpu = original.target.platform == "tpu"
    if is_tpu and original.comparable_peak <= original.target.on_chip_bytes:
        return False
    part = TOO_CLOSE_ON_A_TPU if is_tpu else TOO_CLOSE_TO_CALL
    return candidate.peak <= part * original.comparable_peak


def by_the_compiler(planner: Planner, candidates: Sequence[Candidate], *, compare_with_plain: bool) -> Decision:
    """Compile candidates, take the smallest. With `compare_with_plain`, keep the original step if nothing is gained."""
    plain = planner.measure_if_it_fits(None) if compare_with_plain else None
    different: list[Candidate] = []
    for candidate in candidates:
        if not any(candidate.is_the_same_as(other) for other in different):
            different.append(candidate)
    measured = [(f, candidate) for candidate in different if (f := planner.measure_if_it_fits(candidate)) is not None]
    if not measured:
        return planner.decision(min(different, key=lambda one: one.peak))  # the call says what the compiler says
    figures, found = min(measured, key=lambda pair: pair[0].temp_bytes)
    if plain is None:
        return planner.decision(found, figures)
    if planner.settings.solver == "auto" and figures.temp_bytes > found.peak * FAR_OFF:
        other = Candidate(found.prepared, search_of(found.prepared.problem).most_barriers)
        of_other = planner.measure(other)
        if of_other.temp_bytes < figures.temp_bytes:
            figures, found = of_other, other
    if figures.temp_bytes <= min(GAIN_THRESHOLD * plain.temp_bytes, plain.temp_bytes - SMALLEST_GAIN):
        return planner.decision(found, figures)
    return planner.plain(
        f"nothing to gain: the compiler needs {figures.temp_bytes} bytes for the rewritten step and "
        f"{plain.temp_bytes} for the step as it was given ({why_nothing_is_gained(planner.original.bridge)})"
    )


def take_over(planner: Planner, plan: Plan) -> Decision:
    """The decision that a user's plan describes.

    Raises:
        PlanError: the plan is for another program, or damaged.
    """
    check_fit(
        plan, planner.original.fingerprint, planner.original.inputs, len(planner.original.captured.program.equations)
    )
    note = made_elsewhere(plan, planner.original.target.name) or plan.note
    if plan.is_plain and not plan.edited:
        return planner.plain(note, plan.measured).with_plan(timings=plan.timings)
    try:
        prepared = in_chunks(planner.original, plan.chunks) if plan.chunks else planner.original
        pairs = find_pairs(prepared.captured.program, keep_checkpoints=planner.settings.keep_user_checkpoints)
        check_loops(plan, pairs.pairs)
        loops = LoopChoices(pairs.pairs, plan.loops, (), pairs.left)
        prepared = prepared.gathering_once(plan.gathers_once)
        prepared = prepared.written(loops, plan.inside_loops, planner.settings.keep_user_checkpoints)
        if plan.reordered:
            prepared = prepared.unchanged.ordered
        found = Candidate(prepared, solution_of(plan, prepared))
    except (ValueError, IndexError, KeyError) as error:
        if isinstance(error, PlanError):
            raise
        raise PlanError(
            f"expected a schedule of this program, found a damaged one: {error}. Plan again with "
            "step.plan(*args).save(path)"
        ) from error
    if plan.edited:
        return planner.decision(found, note=note)
    return planner.decision(found, plan.measured, note=note).with_plan(timings=plan.timings)


def made_elsewhere(plan: Plan, target: str) -> str:
    """The versions and the target of a plan that differ from the present ones, as text; empty if none does."""
    here = versions()
    elsewhere = [f"{name} {found}" for name, found in plan.versions.items() if here.get(name) != found]
    if plan.target != target:
        elsewhere.append(f"target {plan.target}")
    return f"planned with {', '.join(elsewhere)}; its figures are from there" if elsewhere else ""


def solution_of(plan: Plan, prepared: Prepared) -> Solution:
    """The schedule of a plan; derived again if the plan's saved set was edited."""
    problem = prepared.problem
    unknown = [v for v in plan.choice.saved if not 0 <= v < len(problem.graph.sizes)]
    if unknown:
        raise PlanError(f"expected ids of this program's values among the saved ones, found {min(unknown)}")
    schedule = plan.schedule_for(problem.graph)
    choice = edited_choice(plan, prepared) if plan.edited else plan.choice
    if choice.saved != plan.choice.saved:
        return problem.solution(choice)
    return problem.scheduled(schedule, plan.choice)


def edited_choice(plan: Plan, prepared: Prepared) -> Choice:
    """A plan's choice, with the tensors named under `saved` as its saved values."""
    program = prepared.bridge.program
    names = name_values(program, range(len(program.avals)))
    by_name = {name: value for value, name in names.items()}
    unknown = [name for name in plan.saved if name not in by_name]
    if unknown:
        raise PlanError(f"expected names of values of this program; it has none named {unknown[0]!r}")
    saved = frozenset(by_name[name] for name in plan.saved)
    return Choice(saved, plan.choice.boundaries, plan.choice.cuts)
