"""`on_error="plain"`: if planning fails, the step runs unchanged, and the plan's note says why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from remat_opt.graph.build import Bridge
from remat_opt.graph.graph import Graph
from remat_opt.planner.decision import Decision
from remat_opt.planner.planning import keep_original
from remat_opt.planner.prepared import Prepared
from remat_opt.planner.settings import Settings
from remat_opt.rewrites.captured import Captured
from remat_opt.targets import Target
from remat_opt.trace import compat
from remat_opt.trace.avals import bytes_of
from remat_opt.trace.inline import Program

_FAILED = " failed: "


def failure_note(stage: str, error: Exception) -> str:
    """What a plan says of a stage that failed."""
    return f"{stage}{_FAILED}{type(error).__name__}: {error}"


def has_failed(note: str) -> bool:
    """Whether a plan's note says that a stage failed."""
    return _FAILED in note


def original_after(error: Exception, stage: str, prepared: Prepared, settings: Settings) -> Decision:
    """The decision to change nothing, after an error in a stage."""
    note = failure_note(stage, error)
    try:
        return keep_original(prepared.original or prepared, settings, note)
    except Exception:  # what failed is asked for the plan's figures, too
        return keep_original(unread(prepared.captured.traced, prepared.target), settings, note)


def of_symbolic_shapes(traced: Any, target: Target, settings: Settings, symbolic: Sequence[str]) -> Decision:
    """The decision for a step with symbolic shapes: it runs unchanged, for memory is counted in sizes.

    Args:
        traced: the step.
        target: the device that it is for.
        settings: what the user asked for.
        symbolic: types of its inputs with symbolic dimensions.

    Raises:
        ValueError: a budget or a plan was given, which only sizes can be held to.
    """
    asked = "a plan" if settings.plan is not None else "a budget" if settings.budget.has_limit else None
    error = ValueError(
        f"expected shapes of numbers to keep {asked}, got {symbolic[0]}, whose size is not known. Export the step once "
        f"for each size, or without {asked}: then it runs as it was given"
    )
    if asked and settings.on_error == "raise":
        raise error
    note = f"symbolic shapes ({', '.join(symbolic)}) have no size to plan for"
    note = failure_note("planning", error) if asked else note
    return keep_original(unread(traced, target), settings, note)


def unread(traced: Any, target: Target) -> Prepared:
    """A step that runs unchanged and of which only the inputs are known: it has no graph and no model."""
    closed_over = compat.closed_over_tracers(traced)
    avals = tuple(variable.aval for variable in compat.input_variables(traced.jaxpr))
    program = Program(avals, tuple(range(len(avals))), (), (), ())
    captured = Captured(traced, program, program, (False,) * len(avals), closed_over)
    no_sizes = bool(compat.symbolic_inputs(traced))
    graph = Graph(tuple(0 if no_sizes else bytes_of(aval) for aval in avals), (), tuple(range(len(avals))))
    prepared = Prepared(captured, Bridge(graph, program, (), {}), target, {"graph": 0.0})
    prepared.__dict__.update(plain_graph=graph, plain_peak=0, fingerprint="unread", names=lambda choice: {})
    return prepared
