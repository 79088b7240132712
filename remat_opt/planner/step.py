"""One signature of a step, from its trace to a decision: the planner's front door."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from remat_opt.planner.collectives import note_explicit_collectives, number_of_devices, without_repeats
from remat_opt.planner.decision import Decision, Measure, Planner
from remat_opt.planner.plan_files import saved_or_new
from remat_opt.planner.planning import Tune, decide
from remat_opt.planner.prepared import Prepared, prepare
from remat_opt.planner.settings import Settings, check_offload
from remat_opt.rewrites.captured import capture_traced
from remat_opt.rewrites.loop_bodies import has_loops
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
    check_offload(settings.offload, target, in_loops=has_loops(captured.program))
    marks = "" if number_of_devices(captured.program, arguments, options) > 1 else None
    if settings.offload and marks is not None:
        raise ValueError(
            "expected a step of one device for offload=True, got one that a mesh divides: copies to the hosts of "
            "several devices are not planned yet. Write offload=False"
        )
    program = dataclasses.replace(captured.program, marks=marks, repeats_collectives=settings.repeat_collectives)
    prepared = prepare(dataclasses.replace(captured, program=program), target)
    return dataclasses.replace(prepared, offloads=settings.offload)


def decide_step(
    prepared: Prepared, settings: Settings, options: dict[str, Any], measure: Measure | None, tune: Tune | None = None
) -> Decision:
    """Decide what is recomputed: by a saved plan, or by the planner; steps on several devices communicate no more.

    Args:
        prepared: the step.
        settings: what the user asked for.
        options: of `jax.jit`, part of the key of a saved plan.
        measure: the compiler; None where nothing may be compiled.
        tune: times plans; None where nothing may run.

    Raises:
        InfeasibleBudget: the budget cannot be kept.
        PlanError: the plan in the settings is for another program.
    """
    new = functools.partial(decide, prepared, settings, measure, None if prepared.is_divided else tune)
    decision = saved_or_new(prepared, settings, options, measure is not None, new)
    is_free = settings.repeat_collectives or settings.plan is not None
    if measure is not None and prepared.is_divided and not is_free:
        decision = without_repeats(decision, prepared, lambda one, ask: decide(one, settings, ask), measure)
    if tune is not None and prepared.is_divided:
        decision = tune(Planner(prepared, settings, measure), decision)
    return decision if is_free else note_explicit_collectives(decision)
