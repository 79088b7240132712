"""Shared by all ways to plan a step: search its variants, ask the compiler, build the `Decision`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jaxlib

from remat_opt.graph.transfers import host_peak
from remat_opt.planner.candidates import Candidate
from remat_opt.planner.forms import Forms
from remat_opt.planner.plan import Plan, Prediction, digest, pack
from remat_opt.planner.prepared import Prepared
from remat_opt.planner.progress import SearchProgress
from remat_opt.planner.settings import Settings
from remat_opt.planner.splitting import note_of_split
from remat_opt.search import Solution
from remat_opt.search.progress import reporting_to
from remat_opt.targets import CompilationOutOfMemory, Figures
from remat_opt.version import __version__

Measure = Callable[["Prepared", "Solution | None"], Figures]
"""Compile the step with a solution (None: the original step) for the target and read the compiler's figures."""


@dataclasses.dataclass(frozen=True, eq=False)
class Decision(Candidate):
    """What happens to one signature of a step.

    Attributes:
        plan: the same for the user, with figures.
    """

    plan: Plan

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds spent on tracing, building the graph, searching and compiling."""
        return self.prepared.seconds

    def with_plan(self, **changes: Any) -> Decision:
        """The same decision with changed fields of its plan."""
        return dataclasses.replace(self, plan=dataclasses.replace(self.plan, **changes))

    def emit(self, arguments: Sequence[Any]) -> list[Any]:
        """Write the planned step on the program's flat inputs."""
        return self.prepared.emit(self.solution, arguments)


class Planner:
    """Plans one step with the user's settings.

    Args:
        prepared: the original step.
        settings: what the user asked for.
        measure: the compiler; None where nothing may be compiled.
    """

    def __init__(self, prepared: Prepared, settings: Settings, measure: Measure | None):
        self.original = prepared
        self.settings = settings
        self.forms = Forms(prepared, settings)
        self.compile = measure
        self.plain_figures: Figures | None = None
        self.compiled = 0  # candidates

    def search(self, limit: int | None) -> Candidate:
        """The fastest candidate within a predicted peak, or the least memory (None: for one more forward pass, with the
        batch as it was given or as the user splits it)."""
        started = time.perf_counter()
        with SearchProgress() as progress, reporting_to(progress):
            candidate = self.forms.given.minimum_memory() if limit is None else self.forms.within(limit)
        self.spend("search", started)
        return candidate

    @property
    def reordered(self) -> Candidate:
        """The step in our order, with nothing recomputed."""
        return self.forms.given.reordered

    def measure(self, candidate: Candidate | None) -> Figures:
        """Compile a candidate, or the original step (None), and return the compiler's figures."""
        assert self.compile is not None
        started = time.perf_counter()
        figures = (
            self.compile(self.original, None)
            if candidate is None
            else self.compile(candidate.prepared, candidate.solution)
        )
        self.spend("compile", started)
        if candidate is None:
            self.plain_figures = figures
        else:
            self.compiled += 1
        return figures

    def measure_if_it_fits(self, candidate: Candidate | None) -> Figures | None:
        """Like `measure`; None if the compiler refuses a step that is too large for the device, as a TPU's does."""
        try:
            return self.measure(candidate)
        except CompilationOutOfMemory:
            return None

    def spend(self, stage: str, started: float) -> None:
        seconds = self.original.seconds
        seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - started

    # Results

    def plain(self, note: str, figures: Figures | None = None) -> Decision:
        unchanged = self.original.unchanged
        return self.decision(Candidate(unchanged, unchanged.problem.plain), figures or self.plain_figures, note=note)

    def decision(self, candidate: Candidate, measured: Figures | None = None, note: str = "") -> Decision:
        prepared, solution = candidate.prepared, candidate.solution
        names = prepared.names(solution.choice)
        graph, original = prepared.bridge.graph, self.original.unchanged.bridge.graph
        written = prepared.loops if prepared.original else None
        stalls = solution.extra_seconds - solution.schedule.extra_seconds(graph)
        predicted = Prediction(
            plain_peak_bytes=prepared.plain_peak,
            peak_bytes=candidate.peak,
            saved_bytes=sum(graph.sizes[value] for value in solution.choice.saved),
            flops=original.flops,
            extra_flops=candidate.extra_flops,
            seconds=original.seconds,
            extra_seconds=candidate.extra_seconds,
            host_bytes=host_peak(graph, solution.schedule) + (written.host_bytes if written else 0),
            stall_seconds=stalls + (written.stall_seconds if written else 0.0),
        )
        saved = tuple(names[value] for value in sorted(names))
        loops = prepared.loops or self.forms.given.loops
        said = loops.summary(written=written is not None) if loops else ""
        split = note_of_split(self.original, prepared.chunks, candidate.extra_seconds)
        plan = Plan(
            fingerprint=self.original.fingerprint,
            inputs=self.original.inputs,
            equations=len(self.original.captured.program.equations),
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
            note="; ".join(filter(None, (note, split, said))),
            loops=written.chosen if written else (),
            loop_bodies=written.bodies if written else 0,
            inside_loops=written.inside if written else None,
            gathers_once=prepared.captured.program.gathers_once,
            rewritten=prepared.is_reformed,
            reordered=prepared.reordered,
            chunks=prepared.chunks,
            transfers=solution.schedule.transfers,
        )
        return Decision(prepared, solution, plan)


def versions() -> dict[str, str]:
    """Versions that a plan is tagged with."""
    return {"remat_opt": __version__, "jax": jax.__version__, "jaxlib": jaxlib.__version__}
