"""Shared by all ways to plan a step: search its forms, ask the compiler, build the `Decision`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jaxlib

from remat_opt.planner.candidates import Forms, Found
from remat_opt.planner.plan import Plan, Prediction, digest, pack
from remat_opt.planner.prepared import Prepared
from remat_opt.planner.progress import SearchProgress
from remat_opt.planner.settings import Settings
from remat_opt.search import Solution
from remat_opt.search.watching import watched_by
from remat_opt.targets import CompilationOutOfMemory, Figures
from remat_opt.version import __version__

Measure = Callable[["Prepared", "Solution | None"], Figures]
"""Compile the step with a solution (None: the original step) for the target and read the compiler's figures."""


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


class Decider:
    """Plans one step with the user's settings.

    Args:
        prepared: the step as it was given.
        settings: what the user asked for.
        measure: the compiler; None where nothing may be compiled.
    """

    def __init__(self, prepared: Prepared, settings: Settings, measure: Measure | None):
        self.given = prepared
        self.settings = settings
        self.forms = Forms(prepared, settings.solver, settings.keep_user_checkpoints)
        self.compile = measure
        self.plain_figures: Figures | None = None

    def search(self, limit: int | None) -> Found:
        """The fastest candidate within a predicted peak, or the least memory (None: for one more forward pass)."""
        started = time.perf_counter()
        with SearchProgress() as progress, watched_by(progress):
            found = self.forms.least() if limit is None else self.forms.within(limit)
        self.spend("search", started)
        return found

    def measure(self, found: Found | None) -> Figures:
        """Compile a candidate, or the original step (None), and return the compiler's figures."""
        assert self.compile is not None
        started = time.perf_counter()
        figures = self.compile(self.given, None) if found is None else self.compile(found.prepared, found.solution)
        self.spend("compile", started)
        if found is None:
            self.plain_figures = figures
        return figures

    def measure_if_it_fits(self, found: Found | None) -> Figures | None:
        """Like `measure`; None if the compiler refuses a step that is too large for the device, as a TPU's does."""
        try:
            return self.measure(found)
        except CompilationOutOfMemory:
            return None

    def spend(self, stage: str, started: float) -> None:
        seconds = self.given.seconds
        seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - started

    # Results

    def plain(self, note: str, figures: Figures | None = None) -> Decision:
        unchanged = self.given.unchanged
        return self.decision(Found(unchanged, unchanged.problem.plain), figures or self.plain_figures, note=note)

    def decision(self, found: Found, measured: Figures | None = None, note: str = "") -> Decision:
        prepared, solution = found.prepared, found.solution
        names = prepared.names(solution.choice)
        graph, given = prepared.bridge.graph, self.given.unchanged.bridge.graph
        predicted = Prediction(
            plain_peak_bytes=prepared.plain_peak,
            peak_bytes=found.peak,
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
            fingerprint=self.given.fingerprint,
            inputs=self.given.inputs,
            equations=len(self.given.captured.program.equations),
            target=prepared.target.name,
            solver=self.settings.solver,
            budget=self.settings.asked_budget,
            saved=saved,
            saved_digest=digest(saved),
            choice=solution.choice,
            runs=pack(solution.schedule),
            predicted=predicted,
            measured=measured,
            plain_measured=self.plain_figures,
            versions=versions(),
            note="; ".join(filter(None, (note, said))),
            loops=written.chosen if written else (),
            loop_bodies=written.bodies if written else 0,
            inside_loops=written.inside if written else None,
            gathers_once=prepared.captured.program.gathers_once,
            rewritten=prepared.is_reformed,
            in_our_order=prepared.in_our_order,
        )
        return Decision(prepared, solution, plan)


def runs_as_given(prepared: Prepared, solution: Solution) -> bool:
    """Whether a solution changes nothing."""
    return Found(prepared, solution).runs_as_given


def versions() -> dict[str, str]:
    """Versions that a plan is tagged with."""
    return {"remat_opt": __version__, "jax": jax.__version__, "jaxlib": jaxlib.__version__}
