"""One signature of a step, from its trace to a decision: the planner's front door."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from remat_opt.planner.collectives import note_explicit_collectives, number_of_devices, without_repeats
from remat_opt.planner.decision import Decision, Measure
from remat_opt.planner.plan_files import saved_or_new
from remat_opt.planner.planning import decide
from remat_opt.planner.prepared import Prepared, prepare
from remat_opt.planner.settings import Settings
from remat_opt.rewrites.captured import capture_traced
from remat_opt.targets import resolve_target


def read_step(traced: Any, settings: Settings, options: dict[str, Any], arguments: Any) -> Prepared:
    """Read a traced step into a graph, without searching.

    Args:
        traced: what `jax.jit(step).trace(...)` returns.
        settings: what the user asked for.
        options: of `jax.jit`.
        arguments: a tree of the call's arrays or `jax.ShapeDtypeStruct`s, which say whether the step is divided.
    """
    target = resolve_target(settings.target)
    captured = capture_traced(traced, platform=target.platform, keep_checkpoints=settings.keep_user_checkpoints)
    marks = "" if number_of_devices(captured.program, arguments, options) > 1 else None
    program = dataclasses.replace(captured.program, marks=marks, repeats_collectives=settings.repeat_collectives)
    return prepare(dataclasses.replace(captured, program=program), target)


def decide_step(prepared: Prepared, settings: Settings, options: dict[str, Any], measure: Measure | None) -> Decision:
    """Decide what is recomputed: by a saved plan, or by the planner; steps on several devices communicate no more.

    Args:
        prepared: the step.
        settings: what the user asked for.
        options: of `jax.jit`, part of the key of a saved plan.
        measure: the compiler; None where nothing may be compiled.

    Raises:
        InfeasibleBudget: the budget cannot be kept.
        PlanError: the plan in the settings is for another program.
    """
    new = functools.partial(decide, prepared, settings, measure)
    decision = saved_or_new(prepared, settings, options, measure is not None, new)
    if settings.repeat_collectives or settings.plan is not None:
        return decision
    if measure is not None and prepared.captured.program.marks is not None:
        decision = without_repeats(decision, prepared, lambda one, ask: decide(one, settings, ask), measure)
    return note_explicit_collectives(decision)
