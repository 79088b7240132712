"""One signature of a step, from its trace to a decision: the planner's front door."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from jax.extend.core import primitives as P

from remat_opt.planner.collectives import note_explicit_collectives, number_of_devices, without_repeats
from remat_opt.planner.decision import Decision, Measure, Planner
from remat_opt.planner.plan_files import saved_or_new
from remat_opt.planner.planning import Tune, decide
from remat_opt.planner.prepared import Prepared, prepare
from remat_opt.planner.settings import Settings, check_offload
from remat_opt.rewrites.captured import capture_traced
from remat_opt.targets import resolve_target
from remat_opt.trace.inline import Program
from remat_opt.trace.supported import miscompiles_offloaded_loops


def read_step(traced: Any, settings: Settings, options: dict[str, Any], arguments: Any) -> Prepared:
    """Read a traced step into a graph, without searching.

    Args:
        traced: what `jax.jit(step).trace(...)` returns.
        settings: what the user asked for.
        options: of `jax.jit`.
        arguments: a tree of the call's arrays or `jax.ShapeDtypeStruct`s, which say whether the step is divided.
    """
    target = resolve_target(settings.target)
    check_offload(settings.offload, target)
    captured = capture_traced(traced, platform=target.platform, keep_checkpoints=settings.keep_user_checkpoints)
    if settings.offload and miscompiles_offloaded_loops(target.platform) and has_loops(captured.program):
        raise ValueError(
            "expected jaxlib 0.11.1 or newer for offload=True in a step with lax.scan, got jaxlib 0.11.0, whose GPU "
            "compiler computes wrong gradients there (openxla/xla issue 46231). Write offload=False"
        )
    marks = "" if number_of_devices(captured.program, arguments, options) > 1 else None
    if settings.offload and marks is not None:
        raise ValueError(
            "expected a step of one device for offload=True, got one that a mesh divides: copies to the hosts of "
            "several devices are not planned yet. Write offload=False"
        )
    program = dataclasses.replace(captured.program, marks=marks, repeats_collectives=settings.repeat_collectives)
    prepared = prepare(dataclasses.replace(captured, program=program), target)
    return dataclasses.replace(prepared, offloads=settings.offload)


def has_loops(program: Program) -> bool:
    """Whether there is a `lax.scan` among a program's equations."""
    return any(equation.primitive is P.scan_p for equation in program.equations)


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
