"""Planning: from a captured program to a `Decision`, checked by the compiler where a budget needs it.

This module has the stages from capture to plan; `callable/function.py` puts a decision into a jitted function.
"""

from __future__ import annotations

from collections.abc import Sequence

from remat_opt.graph.derive import Choice
from remat_opt.loops.choose import LoopChoices
from remat_opt.loops.pairs import find_pairs
from remat_opt.loops.peak import why_nothing_is_gained
from remat_opt.planner.budget_loop import keep_budget
from remat_opt.planner.candidates import Found
from remat_opt.planner.decision import Decider, Decision, Measure, versions
from remat_opt.planner.plan import Plan, PlanError, check_fit, check_loops
from remat_opt.planner.prepared import Prepared
from remat_opt.planner.settings import Settings
from remat_opt.search import Solution, search_of
from remat_opt.trace.names import name_values

WORTH_WRITING = 0.98  # a peak above this part of the plain one, predicted or compiled, is no gain
FAR_OFF = 1.5  # a compiled figure above so many times the predicted one: another order is tried
SMALLEST_GAIN = 4096  # bytes, a page: what is less is no gain on any device
TOO_CLOSE_TO_CALL = 0.7  # above this part of the plain one a predicted peak is checked by compiling both
TOO_CLOSE_ON_A_TPU = 0.5


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
    decider = Decider(prepared, settings, measure if settings.verify else None)
    if prepared.captured.program.has_references:
        return decider.plain("it reads or writes mutable references, whose order cannot be changed")
    if settings.plan is not None:
        return take_over(decider, settings.plan)
    if settings.budget.is_promise:
        return keep_budget(decider)
    return least_memory(decider)


def run_as_given(prepared: Prepared, settings: Settings, note: str) -> Decision:
    """The decision to change nothing."""
    return Decider(prepared, settings, None).plain(note)


def decision_of(found: Found, settings: Settings) -> Decision:
    """The decision for a schedule that another search found; nothing is compiled."""
    return Decider(found.prepared.given or found.prepared, settings, None).decision(found)


def least_memory(decider: Decider) -> Decision:
    """The least memory for at most one more forward pass, or two; see `Forms.least`."""
    found = decider.search(None)
    if found.runs_as_given or found.peak > WORTH_WRITING * decider.given.plain_peak:
        found = min(decider.forms.in_our_order, found, key=lambda one: (one.runs_as_given, one.peak))
        if decider.compile is not None:  # compilers have an order of their own for the step as it was given
            return by_the_compiler(decider, [found], compare_with_plain=True)
        if found.peak >= WORTH_WRITING * decider.given.plain_peak:
            return decider.plain(
                "nothing to gain: recomputing anything would not lower the peak "
                f"({why_nothing_is_gained(decider.given.bridge)})"
            )
    candidates = [found]
    if decider.settings.budget.at_any_cost:
        candidates.insert(0, decider.search(0))
    if decider.compile is None:
        return decider.decision(min(candidates, key=lambda one: one.peak))
    clear = is_clear(decider, found)
    if clear and candidates[0].is_the_same_as(found):
        return decider.decision(found)
    return by_the_compiler(decider, candidates, compare_with_plain=not clear)


def is_clear(decider: Decider, found: Found) -> bool:
    """Whether a schedule is predicted to need so much less than the original step that no compilation is needed."""
    given = decider.given
    # With the user's own checkpoints the step as given may need less than our model of it without them says.
    if given.captured.program.entered_checkpoints:
        return False
    is_tpu = given.target.platform == "tpu"
    if is_tpu and given.plain_peak <= given.target.on_chip_bytes:
        return False
    part = TOO_CLOSE_ON_A_TPU if is_tpu else TOO_CLOSE_TO_CALL
    return found.peak <= part * given.plain_peak


def by_the_compiler(decider: Decider, candidates: Sequence[Found], *, compare_with_plain: bool) -> Decision:
    """Compile candidates, take the smallest. With `compare_with_plain`, keep the original step if nothing is gained."""
    plain = decider.measure_if_it_fits(None) if compare_with_plain else None
    different: list[Found] = []
    for candidate in candidates:
        if not any(candidate.is_the_same_as(other) for other in different):
            different.append(candidate)
    measured = [(f, candidate) for candidate in different if (f := decider.measure_if_it_fits(candidate)) is not None]
    if not measured:
        return decider.decision(min(different, key=lambda one: one.peak))  # the call says what the compiler says
    figures, found = min(measured, key=lambda pair: pair[0].temp_bytes)
    if plain is None:
        return decider.decision(found, figures)
    if decider.settings.solver == "auto" and figures.temp_bytes > found.peak * FAR_OFF:
        other = Found(found.prepared, search_of(found.prepared.problem).most_barriers)
        of_other = decider.measure(other)
        if of_other.temp_bytes < figures.temp_bytes:
            figures, found = of_other, other
    if figures.temp_bytes <= min(WORTH_WRITING * plain.temp_bytes, plain.temp_bytes - SMALLEST_GAIN):
        return decider.decision(found, figures)
    return decider.plain(
        f"nothing to gain: the compiler needs {figures.temp_bytes} bytes for the rewritten step and "
        f"{plain.temp_bytes} for the step as it was given ({why_nothing_is_gained(decider.given.bridge)})"
    )


def take_over(decider: Decider, plan: Plan) -> Decision:
    """The decision that a user's plan describes.

    Raises:
        PlanError: the plan is for another program, or damaged.
    """
    check_fit(plan, decider.given.fingerprint, decider.given.inputs, len(decider.given.captured.program.equations))
    note = made_elsewhere(plan, decider.given.target.name) or plan.note
    if plan.is_plain and not plan.edited:
        return decider.plain(note, plan.measured)
    try:
        pairs = find_pairs(decider.given.captured.program, keep_checkpoints=decider.settings.keep_user_checkpoints)
        check_loops(plan, pairs.pairs)
        loops = LoopChoices(pairs.pairs, plan.loops, (), pairs.left)
        prepared = decider.given.gathering_once(plan.gathers_once)
        prepared = prepared.written(loops, plan.inside_loops, decider.settings.keep_user_checkpoints)
        if plan.in_our_order:
            prepared = prepared.unchanged.ordered
        found = Found(prepared, solution_of(plan, prepared))
    except (ValueError, IndexError, KeyError) as error:
        if isinstance(error, PlanError):
            raise
        raise PlanError(
            f"expected a schedule of this program, found a damaged one: {error}. Plan again with "
            "step.plan(*args).save(path)"
        ) from error
    return decider.decision(found, plan.measured if not plan.edited else None, note=note)


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
    return Choice(saved, plan.choice.turning_points, plan.choice.cuts)
