"""Plans one signature of a function under `remat_opt.checkpoint`: a search, and the layout of its segments.

Budgets here bound the predicted *residuals*: the bytes saved between the forward and the backward pass of one call.

A *loss* returns few bytes. Its backward pass follows its forward pass at once, so that the residuals of its last
segment need no recomputation. Any other function is treated as a *layer*: many of them may run before the backward pass
begins. So the residuals of one call count most, and are never more than its results, as with `jax.checkpoint` on the
layer.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable

import numpy as np

from remat_opt.emit.checkpoint import Layout, is_repeatable
from remat_opt.graph.derive import Choice
from remat_opt.planner.budget import Budget, parse_budget
from remat_opt.planner.candidates import Candidate
from remat_opt.planner.decision import Decision
from remat_opt.planner.plan import PlanError
from remat_opt.planner.planning import decide, decision_of
from remat_opt.planner.segmentation import Differentiated, close, enclose, kept_bytes, layout_of, user_names
from remat_opt.planner.settings import Settings
from remat_opt.search import SOLVERS, Solution, Solver

LOSS_SHARE = 0.01  # results of at most this part of the residuals' bytes are those of a loss
NESTING_THRESHOLD = 0.7  # a layer is divided inside where that lowers its peak, and what a loop keeps, to this part
_CLOSED = "what is saved outside the segments is recomputed, too"
_LAYER = f"{_CLOSED}: the function is treated as one layer of many"
_NOT_ENCLOSED = f"{_CLOSED}, except for operations that may not run twice"
_ENCLOSED = (
    "the whole function is recomputed as one region: only its arguments are saved between the forward and the "
    "backward pass"
)
_FEW_NAMES = 5
_OF_STRETCHES = ("hong", "rotor")
_MORE_MEMORY = (1.1, 1.2, 1.35)
_LOWER = 0.9
_ABOUT_LEAST = 1.1
_SEARCHES = 6  # to find the least time whose residuals fit a budget


@dataclasses.dataclass(frozen=True, eq=False)
class CheckpointDecision:
    """What was decided.

    Attributes:
        differentiated: the function with its forward and backward pass as one program.
        decision: the solution and the plan.
        layout: the segments; None where nothing that is stored is recomputed.
    """

    differentiated: Differentiated
    decision: Decision
    layout: Layout | None

    @property
    def kept_bytes(self) -> int:
        """Bytes of the device that are kept between forward and backward pass; arguments and results not counted."""
        if self.layout is not None:
            return 0 if self.layout.on_host else kept_bytes(self.differentiated, self.layout)
        return 0 if self.is_one_region else self.differentiated.residual_bytes

    @property
    def fits(self) -> bool:
        """Whether that is within the budget, where there is one."""
        budget = parse_budget(self.decision.plan.budget)
        return budget.has_limit and self.kept_bytes <= residual_limit(self.differentiated, budget)

    @property
    def is_one_region(self) -> bool:
        """Whether a function without segments stands under one `jax.checkpoint`, or runs as it is.

        What a compiler recomputes for nothing inside a kernel, JAX still keeps: for a derivative outside `jit`,
        and for the backward loop of a scan. So a layer is one region even where nothing stored is recomputed.
        """
        if self.layout is not None or parse_budget(self.decision.plan.budget).has_limit:
            return False
        return not is_loss(self.differentiated) and all(map(is_repeatable, self.differentiated.program.equations))


def choose_form(forms: Iterable[Differentiated], settings: Settings) -> CheckpointDecision:
    """Search segments for a function in its forms, the fastest first.

    With a budget: the first variant that fits, else the one that saves fewest bytes. Without: a slower variant is taken
    only if its peak is below 0.9 of the best so far.

    Raises:
        PlanError: the plan in the settings is for another function.
    """
    found: list[CheckpointDecision] = []
    refused: list[PlanError] = []
    for form in forms:
        try:
            found.append(decide_checkpoint(form, settings))
        except PlanError as error:
            refused.append(error)
            continue
        if settings.plan is not None or found[-1].fits:
            return _noted(found[-1])
    if not found:
        raise refused[0]
    best = found[0]
    for other in found[1:]:
        if settings.budget.has_limit:
            is_better = other.kept_bytes < best.kept_bytes
        else:
            is_better = other.decision.solution.peak < _LOWER * best.decision.solution.peak
        best = other if is_better else best
    return _noted(best)


def _noted(found: CheckpointDecision) -> CheckpointDecision:
    """A decision whose plan says what became of the loops."""
    said, note = found.differentiated.loops.value, found.decision.plan.note
    if said in note:  # as in a plan that the user gave
        return found
    decision = found.decision.with_plan(note="; ".join(filter(None, (said, note))))
    form = found.differentiated
    if form.given is not None:
        given, ours, predicted = form.given.problem, form.problem.graph, decision.plan.predicted
        predicted = dataclasses.replace(
            predicted,
            plain_peak_bytes=given.plain.peak,
            flops=given.graph.flops,
            extra_flops=ours.flops + predicted.extra_flops - given.graph.flops,
            seconds=given.graph.seconds,
            extra_seconds=ours.seconds + predicted.extra_seconds - given.graph.seconds,
        )
        decision = decision.with_plan(predicted=predicted, loop_bodies=form.rewritten_loops)
    return dataclasses.replace(found, decision=decision)


def steps_at_a_time(length: int, carried: int, kept: int) -> int:
    """How many steps of a loop to recompute together, so that the carries that the chunks start from and what the steps
    of one chunk keep take the least bytes (Chen et al. 2016, section 4.1, with residuals unlike carries).

    Args:
        length: steps of the loop.
        carried: bytes of its carry.
        kept: bytes that one step of a chunk keeps for its backward pass.
    """
    steps = np.arange(1, max(length, 1) + 1)
    needed = -(-length // steps) * carried + steps * kept
    good = steps[needed <= _ABOUT_LEAST * needed.min()]
    whole = good[length % good == 0]  # no chunk is left, whose inputs are copied
    among = whole if len(whole) else good
    return int(among[np.argmin(needed[among - 1])])


def settings_of_bodies(settings: Settings, *, offload: bool) -> Settings:
    """What is asked of a loop's body: the least memory, as the steps before it are kept, too."""
    asked = "min" if settings.budget.at_any_cost else None
    return dataclasses.replace(settings, budget=parse_budget(asked), asked_budget=asked, plan=None, offload=offload)


def decide_checkpoint(differentiated: Differentiated, settings: Settings) -> CheckpointDecision:
    """Search segments for a function.

    Args:
        differentiated: the function.
        settings: budget, solver or plan, as the user gave them.

    Raises:
        PlanError: the plan in the settings is for another function.
    """
    if settings.plan is not None:
        decision = decide(differentiated.prepared, settings, None)
        divided = _Divided(differentiated, decision.solution)
        budget = parse_budget(settings.plan.budget)
    else:
        budget = settings.budget
        find = _minimum_time if budget.has_limit else _minimum_memory
        divided = find(differentiated, settings)
        decision = decision_of(Candidate(differentiated.prepared, divided.solution), settings)
    layout, note = _layout(divided, budget)
    if note:
        decision = decision.with_plan(note=note)
    found = CheckpointDecision(differentiated, decision, layout)
    return _from_host(found, divided) if settings.offload and not found.fits else found


@dataclasses.dataclass(frozen=True, eq=False)
class _Divided:
    """A solution with the segments of its schedule, which are found when they are first asked for."""

    differentiated: Differentiated
    solution: Solution

    @functools.cached_property
    def layout(self) -> Layout:
        return layout_of(self.differentiated, self.solution)

    @functools.cached_property
    def kept_bytes(self) -> int:
        return kept_bytes(self.differentiated, self.layout)


def _layout(divided: _Divided, budget: Budget) -> tuple[Layout | None, str]:
    """The segments to emit, and a note on what they recompute beyond the solution's schedule."""
    differentiated, program = divided.differentiated, divided.differentiated.program
    if not divided.solution.schedule.recomputed:
        return None, ""
    layout = divided.layout
    if budget.has_limit:
        if divided.kept_bytes <= residual_limit(differentiated, budget):
            return layout, ""
    elif is_loss(differentiated):
        return layout, ""
    elif differentiated.body is None:
        closed = close(layout, program)
        if kept_bytes(differentiated, closed) <= differentiated.result_bytes:
            return closed, "" if closed == layout else _LAYER
    if all(map(is_repeatable, program.equations)):
        return enclose(layout), _ENCLOSED
    closed = close(layout, program)
    return closed, "" if closed == layout else _NOT_ENCLOSED


def _from_host(found: CheckpointDecision, divided: _Divided) -> CheckpointDecision:
    """The same decision with the loop's carry in host memory; unchanged where the function is no loop body, carries
    nothing large, or has an op that may not run twice."""
    body, program = found.differentiated.body, found.differentiated.program
    if body is None or not body.carried or not all(map(is_repeatable, program.equations)):
        return found
    on_host = {program.inputs[position]: f"carry_{number}" for number, position in enumerate(body.carried)}
    return dataclasses.replace(found, layout=dataclasses.replace(divided.layout, on_host=on_host))


def is_loss(differentiated: Differentiated) -> bool:
    """Whether the function is a loss, judged by the size of its results: its backward pass then follows its forward
    pass at once."""
    if differentiated.body is not None:
        return False
    return differentiated.result_bytes <= LOSS_SHARE * differentiated.residual_bytes


def residual_limit(differentiated: Differentiated, budget: Budget) -> int:
    """A budget in bytes of residuals."""
    if budget.fraction is not None:
        return int(budget.fraction * (differentiated.given or differentiated).residual_bytes)
    assert budget.physical_bytes is not None
    return budget.physical_bytes


def _minimum_memory(differentiated: Differentiated, settings: Settings) -> _Divided:
    """The least peak of one call of a loss; for a layer the fewest residuals, then the least peak."""
    at_any_cost = settings.budget.at_any_cost
    problem = differentiated.problem
    found = [solver(problem, None) for solver in _solvers(settings)]
    if settings.solver == "auto" and not at_any_cost:
        # Also search nested plans with larger peaks; then keep those within one extra forward pass (all if none is).
        lowest = min(solution.peak for solution in found)
        found += [SOLVERS["rotor"](problem, int(lowest * factor)) for factor in _MORE_MEMORY]
        one_pass = sum(problem.graph.ops[op].seconds for op in problem.order[: differentiated.forward_end])
        found = [solution for solution in found if solution.extra_seconds <= one_pass] or found
    least = min(found, key=lambda solution: (solution.peak, solution.extra_seconds))
    if is_loss(differentiated) or _is_worth_nesting(differentiated, least):
        return _Divided(differentiated, least)
    return _Divided(differentiated, _keep_nothing(differentiated))


def _solvers(settings: Settings) -> list[Solver]:
    """By default the solvers whose plans recompute contiguous, nested parts of the program, which `jax.checkpoint` can
    express."""
    return [SOLVERS[name] for name in (_OF_STRETCHES if settings.solver == "auto" else (settings.solver,))]


def _minimum_time(differentiated: Differentiated, settings: Settings) -> _Divided:
    """The least extra time of those solutions whose residuals fit the budget."""
    problem, solvers = differentiated.problem, _solvers(settings)
    limit = residual_limit(differentiated, settings.budget)
    if differentiated.residual_bytes <= limit:
        return _Divided(differentiated, problem.plain)
    found = [_Divided(differentiated, solver(problem, None)) for solver in solvers]
    least = min((one.solution for one in found), key=lambda solution: (solution.peak, solution.extra_seconds))
    low, high = least.peak, problem.plain.peak
    for _ in range(_SEARCHES):
        middle = (low + high) // 2
        here = [_Divided(differentiated, solver(problem, middle)) for solver in solvers]
        found += here
        if any(one.kept_bytes <= limit for one in here):
            low = middle
        else:
            high = middle
    fitting = [one for one in found if one.kept_bytes <= limit]
    if fitting:
        return min(fitting, key=lambda one: (one.solution.extra_seconds, one.solution.peak))
    is_nested = _is_worth_nesting(differentiated, least)
    return _Divided(differentiated, least if is_nested else _keep_nothing(differentiated))


def _is_worth_nesting(differentiated: Differentiated, solution: Solution) -> bool:
    kept = differentiated.body.kept_bytes if differentiated.body is not None else 0
    peak = kept + differentiated.problem.plain.peak
    return bool(solution.schedule.recomputed) and kept + solution.peak <= NESTING_THRESHOLD * peak


def _keep_nothing(differentiated: Differentiated) -> Solution:
    """What one `jax.checkpoint` round the function does."""
    forward_end = differentiated.forward_end
    return differentiated.problem.solution(Choice(frozenset(), (forward_end,), (forward_end,)))


def choose_names(differentiated: Differentiated, budget: Budget) -> tuple[str, ...]:
    """Which of the names in a function to save.

    All sets where there are few names; else names are added one by one, as long as that helps.

    Raises:
        ValueError: there are no names in the function.
    """
    named = user_names(differentiated)
    if not named:
        raise ValueError(
            "expected jax.ad_checkpoint.checkpoint_name on some tensors of the function, found none; place names, or "
            "write remat_opt.checkpoint(fun), which finds tensors itself"
        )
    limit = residual_limit(differentiated, budget) if budget.has_limit else None
    sizes = differentiated.problem.graph.sizes

    def rank(names: frozenset[str]) -> tuple[float, ...]:
        values = frozenset().union(*(named[name] for name in names))
        solution = _saving(differentiated, values)
        if limit is None:
            return (0, solution.peak, solution.extra_seconds, len(names))
        over = max(0, sum(sizes[value] for value in values) - limit)
        return (over, solution.extra_seconds, solution.peak, len(names))

    if len(named) <= _FEW_NAMES:
        some = (frozenset(c) for count in range(len(named) + 1) for c in itertools.combinations(sorted(named), count))
        return tuple(sorted(min(some, key=rank)))
    chosen: frozenset[str] = frozenset()
    while rest := sorted(named.keys() - chosen):
        best = min((chosen | {name} for name in rest), key=rank)
        if rank(best) >= rank(chosen):
            break
        chosen = best
    return tuple(sorted(chosen))


def _saving(differentiated: Differentiated, values: frozenset[int]) -> Solution:
    """Everything before the first cotangent recomputed, between some saved values."""
    problem, forward_end = differentiated.problem, differentiated.forward_end
    made = {problem.place[problem.graph.producer[value]] + 1 for value in values if problem.graph.producer[value] >= 0}
    return problem.solution(
        Choice(values, (forward_end,), tuple(sorted({at for at in made if at <= forward_end} | {forward_end})))
    )
