"""Planning: from a captured program to a `Decision`, with the compiler's word where a promise needs it.

This module knows the stages from capture to plan; `optimized.py` knows how a decision gets into a jitted function.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jaxlib

from remat_opt.budget import Budget, InfeasibleBudget, parse_budget
from remat_opt.graph.build import Bridge, build
from remat_opt.graph.cost import Rates
from remat_opt.graph.derive import Choice
from remat_opt.graph.liveness import simulate
from remat_opt.graph.schedule import save_everything
from remat_opt.plan import Plan, PlanError, Prediction, digest
from remat_opt.program.capture import Captured
from remat_opt.program.fingerprint import fingerprint
from remat_opt.program.inline import Program
from remat_opt.program.names import name_values
from remat_opt.program.pooling import without_scatter
from remat_opt.search import SOLVERS, Problem, Solution
from remat_opt.targets import Figures, Target, resolve_target
from remat_opt.version import __version__
from remat_opt.write.train_step import write

MOST_ATTEMPTS = 4  # the first plan, and three more with what the compiler said of the one before
WORTH_WRITING = 0.98  # a predicted peak above this part of the plain one is no gain
TOO_CLOSE_TO_CALL = 0.7  # above this part of the plain one a predicted peak is checked by compiling both

Measure = Callable[["Solution | None"], Figures]
"""Compile the step with a solution (None: as it was given) for the target and read the compiler's figures."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """The arguments of `optimize`, checked."""

    budget: Budget
    asked_budget: int | float | str | None
    target: str | Target | None
    solver: str
    plan: Plan | None
    verify: bool
    keep_user_checkpoints: bool
    on_error: str


def check_settings(
    *,
    budget: int | float | str | None,
    target: str | Target | None,
    solver: str,
    plan: Plan | None,
    verify: bool,
    keep_user_checkpoints: bool,
    on_error: str,
) -> Settings:
    """Read and check what a user wrote; see `optimize` for the errors."""
    if solver not in SOLVERS:
        raise ValueError(f"expected a solver among {', '.join(map(repr, sorted(SOLVERS)))}; got {solver!r}")
    if on_error not in ("raise", "plain"):
        raise ValueError(f"expected on_error='raise' or on_error='plain'; got {on_error!r}")
    if plan is not None and not isinstance(plan, Plan):
        raise TypeError(f"expected a Plan, as step.plan(*args) or Plan.load(path) gives it; got {type(plan).__name__}")
    if plan is not None and budget is not None:
        raise ValueError(
            f"expected a plan or a budget, got both (budget={budget!r}): a plan is what was found for its own budget. "
            "Write optimize(fun, plan=plan), or optimize(fun, budget=...) to search again"
        )
    if target is not None:
        resolve_target(target)  # an unknown name is an error now, not at the first call
    return Settings(parse_budget(budget), budget, target, solver, plan, verify, keep_user_checkpoints, on_error)


@dataclasses.dataclass(frozen=True, eq=False)
class Prepared:
    """A captured program with its graph, ready for any search."""

    captured: Captured
    bridge: Bridge
    target: Target
    seconds: dict[str, float]

    @functools.cached_property
    def problem(self) -> Problem:
        """The graph as the searches see it."""
        return Problem(self.bridge.graph)

    @functools.cached_property
    def fingerprint(self) -> str:
        """What a plan must match."""
        return fingerprint(self.captured.program)

    @functools.cached_property
    def as_given(self) -> int:
        """Predicted peak in bytes of the step as it was given, in its own order."""
        graph, captured = self.bridge.graph, self.captured
        other_forms = any(without_scatter(equation, self.target.platform) for equation in captured.program.equations)
        if captured.given is not captured.program or other_forms:
            graph = _bridge(captured.given, captured, self.target, as_given=True).graph
        return simulate(graph, save_everything(graph)).peak if graph.ops else 0

    @property
    def inputs(self) -> tuple[str, ...]:
        """Types of the program's inputs, as text."""
        return tuple(f"{aval.dtype}{list(aval.shape)}" for aval in self.captured.input_avals)

    def emit(self, solution: Solution, arguments: Sequence[Any]) -> list[Any]:
        """Write a solution's schedule on the program's flat inputs, closed-over values first."""
        return write(self.bridge, solution.schedule, self.names(solution.choice), arguments)

    def names(self, choice: Choice) -> dict[int, str]:
        """Names of the saved values."""
        return name_values(self.captured.program, choice.saved)


def prepare(captured: Captured, target: Target) -> Prepared:
    """Build the graph of a captured program with the costs of a target."""
    started = time.perf_counter()
    bridge = _bridge(captured.program, captured, target)
    return Prepared(captured, bridge, target, {"graph": time.perf_counter() - started})


def _bridge(program: Program, captured: Captured, target: Target, *, as_given: bool = False) -> Bridge:
    rates = Rates(target.bandwidth, target.flops)
    return build(program, rates, captured.donated, platform=target.platform, as_given=as_given)


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


def decision_of(prepared: Prepared, settings: Settings, solution: Solution) -> Decision:
    """The decision for a solution that was found elsewhere; nothing is compiled."""
    return _Decider(prepared, settings, None).decision(solution)


class _Decider:
    def __init__(self, prepared: Prepared, settings: Settings, measure: Measure | None):
        self.prepared = prepared
        self.settings = settings
        self.compile = measure
        self.plain_figures: Figures | None = None

    def search(self, limit: int | None) -> Solution:
        started = time.perf_counter()
        solution = SOLVERS[self.settings.solver](self.prepared.problem, limit)
        self.spend("search", started)
        return solution

    def measure(self, solution: Solution | None) -> Figures:
        assert self.compile is not None
        started = time.perf_counter()
        figures = self.compile(solution)
        self.spend("compile", started)
        if solution is None:
            self.plain_figures = figures
        return figures

    def spend(self, stage: str, started: float) -> None:
        seconds = self.prepared.seconds
        seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - started

    # Least memory

    def least_memory(self) -> Decision:
        solution = self.search(None)
        plain_peak = self.prepared.as_given
        if not solution.schedule.recomputed or solution.peak > WORTH_WRITING * plain_peak:
            return self.plain(
                "nothing to gain: recomputing anything would not lower the peak (if there is no gradient in it, give "
                "optimize the whole training step, with jax.grad and the update, not the loss alone)"
            )
        # With the user's own checkpoints the step as given may need less than our model of it without them says.
        if self.settings.budget.at_any_cost and self.settings.solver == "auto":
            return self.least_at_any_cost(solution)
        clear = solution.peak <= TOO_CLOSE_TO_CALL * plain_peak
        if self.compile is None or (clear and not self.prepared.captured.program.entered_checkpoints):
            return self.decision(solution)
        plain, figures = self.measure(None), self.measure(solution)
        if figures.temp_bytes < plain.temp_bytes:
            return self.decision(solution, figures)
        return self.plain(
            f"nothing to gain: the compiler needs {figures.temp_bytes} bytes for the rewritten step and "
            f"{plain.temp_bytes} for the step as it was given"
        )

    def least_at_any_cost(self, once: Solution) -> Decision:
        """The better of recomputing each op once, as "auto" does, and nested recomputation, by the compiler's word."""
        started = time.perf_counter()
        nested = SOLVERS["rotor"](self.prepared.problem, None)
        self.spend("search", started)
        if self.compile is None:
            return self.decision(min(once, nested, key=lambda one: one.peak))
        measured = [(self.measure(solution), solution) for solution in (nested, once)]
        figures, solution = min(measured, key=lambda pair: pair[0].temp_bytes)
        return self.decision(solution, figures)

    # A budget

    def keep_budget(self) -> Decision:
        if self.compile is None:
            return self.keep_budget_unverified()
        fraction = self.settings.budget.fraction
        if fraction == 1.0:
            figures = self.measure(self.prepared.problem.plain)
            return self.plain("a budget of 1.0 is what the step as it was given needs", figures)
        if fraction is not None:
            allowed = int(fraction * self.measure(None).temp_bytes)
        else:
            assert self.settings.budget.physical_bytes is not None
            allowed = self.settings.budget.physical_bytes
            if self.prepared.problem.plain.peak + self.fixed_bytes() <= allowed * 1.1:
                plain = self.measure(None)
                if plain.physical_peak_bytes <= allowed:
                    return self.plain("the step as it was given fits the budget", plain)
        return self.tighten(allowed)

    def tighten(self, allowed: int) -> Decision:
        """Search under the budget, compile, and search again under less where the compiler needs more."""
        limit = allowed if self.settings.budget.fraction is not None else allowed - self.fixed_bytes()
        least = self.counted(self.plain_figures) if self.plain_figures is not None else None
        for attempt in range(MOST_ATTEMPTS):
            # The last attempt is the least memory that the search knows, whatever the model says of it.
            solution = self.search(max(limit, 0) if attempt < MOST_ATTEMPTS - 1 else None)
            figures = self.measure(solution)
            needed = self.counted(figures)
            if needed <= allowed:
                return self.decision(solution, figures)
            least = needed if least is None else min(least, needed)
            if solution.peak > limit:
                break  # the search gave its least already
            over = needed - allowed
            limit = min(int(solution.peak * allowed / needed), solution.peak - over // 2) - 1
        assert least is not None
        raise InfeasibleBudget(
            f"expected a budget of at least {least} bytes, got {self.settings.asked_budget!r} ({allowed} bytes"
            f"{' of temporary memory' if self.settings.budget.fraction is not None else ''}): the least that was "
            f"found needs {least}. Write {self.attainable(least)}",
            least,
        )

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
            limit = int(budget.fraction * self.prepared.as_given)
        else:
            limit = (budget.physical_bytes or 0) - self.fixed_bytes()
        solution = self.search(max(limit, 0))
        if solution.peak > limit:
            least = solution.peak + (0 if budget.fraction is not None else self.fixed_bytes())
            raise InfeasibleBudget(
                f"expected a budget of at least {least} bytes (predicted), got {self.settings.asked_budget!r}: no "
                "schedule was found that needs less",
                least,
            )
        return self.decision(solution, note="predicted, not compiled")

    def fixed_bytes(self) -> int:
        """Arguments and results that are not aliased: on the device whatever the schedule."""
        graph = self.prepared.bridge.graph
        outputs = set(graph.outputs) - {output for _, output in graph.aliases}
        inputs = self.prepared.captured.program.inputs
        return sum(graph.sizes[value] for value in inputs) + sum(graph.sizes[value] for value in outputs)

    # A plan of the user's

    def take_over(self, plan: Plan) -> Decision:
        check_fit(self.prepared, plan)
        try:
            solution = self.solution_of(plan)
        except (ValueError, IndexError, KeyError) as error:
            if isinstance(error, PlanError):
                raise
            raise PlanError(
                f"expected a schedule of this program, found a damaged one: {error}. Plan again with "
                "step.plan(*args).save(path)"
            ) from error
        here = versions()
        elsewhere = [f"{name} {found}" for name, found in plan.versions.items() if here.get(name) != found]
        if plan.target != self.prepared.target.name:
            elsewhere.append(f"target {plan.target}")
        note = f"planned with {', '.join(elsewhere)}; its figures are from there" if elsewhere else plan.note
        return self.decision(solution, plan.measured if not plan.edited else None, note=note)

    def solution_of(self, plan: Plan) -> Solution:
        problem = self.prepared.problem
        unknown = [v for v in plan.choice.saved if not 0 <= v < len(problem.graph.sizes)]
        if unknown:
            raise PlanError(f"expected ids of this program's values among the saved ones, found {min(unknown)}")
        if plan.edited:
            return problem.solution(self.choice_of(plan))
        liveness = simulate(problem.graph, plan.schedule)
        return Solution(plan.choice, plan.schedule, liveness, plan.schedule.extra_seconds(problem.graph))

    def choice_of(self, plan: Plan) -> Choice:
        program = self.prepared.captured.program
        names = name_values(program, range(len(program.avals)))
        by_name = {name: value for value, name in names.items()}
        unknown = [name for name in plan.saved if name not in by_name]
        if unknown:
            raise PlanError(f"expected names of values of this program; it has none named {unknown[0]!r}")
        saved = frozenset(by_name[name] for name in plan.saved)
        return Choice(saved, plan.choice.turning_points, plan.choice.cuts)

    # Results

    def plain(self, note: str, figures: Figures | None = None) -> Decision:
        solution = self.prepared.problem.plain
        return self.decision(solution, figures or self.plain_figures, note=note)

    def decision(self, solution: Solution, measured: Figures | None = None, note: str = "") -> Decision:
        prepared = self.prepared
        names = prepared.names(solution.choice)
        graph = prepared.bridge.graph
        predicted = Prediction(
            plain_peak_bytes=prepared.as_given,
            peak_bytes=solution.peak if solution.schedule.recomputed else prepared.as_given,
            saved_bytes=sum(graph.sizes[value] for value in solution.choice.saved),
            flops=graph.flops,
            extra_flops=solution.schedule.extra_flops(graph),
            seconds=graph.seconds,
            extra_seconds=solution.extra_seconds,
        )
        saved = tuple(names[value] for value in sorted(names))
        plan = Plan(
            fingerprint=prepared.fingerprint,
            inputs=prepared.inputs,
            equations=len(prepared.captured.program.equations),
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
            note=note,
        )
        return Decision(prepared, solution, plan)


def check_fit(prepared: Prepared, plan: Plan) -> None:
    """Raise PlanError, naming what differs, where a plan is for another program."""
    if plan.fingerprint == prepared.fingerprint:
        return
    found, expected = prepared.inputs, plan.inputs
    if found != expected:
        if len(found) != len(expected):
            what = f"it was made for {len(expected)} input arrays, this program has {len(found)}"
        else:
            index = next(i for i in range(len(found)) if found[i] != expected[i])
            what = f"its input {index} is {expected[index]}, here it is {found[index]}"
    elif plan.equations != len(prepared.captured.program.equations):
        what = f"it has {plan.equations} equations, this program {len(prepared.captured.program.equations)}"
    else:
        what = "an operation or one of its parameters differs"
    raise PlanError(
        f"expected a plan for this program, got one for another: {what}. Plan again with step.plan(*args).save(path)"
    )


def versions() -> dict[str, str]:
    """Versions that a plan is tagged with."""
    return {"remat_opt": __version__, "jax": jax.__version__, "jaxlib": jaxlib.__version__}
