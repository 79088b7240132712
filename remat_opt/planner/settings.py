"""The arguments of `optimize`, checked."""

from __future__ import annotations

import dataclasses
import math
import numbers
from pathlib import Path

from remat_opt.planner.budget import Budget, parse_budget, plain_budget
from remat_opt.planner.plan import Plan
from remat_opt.search import SOLVERS
from remat_opt.targets import Target, resolve_target
from remat_opt.trace.supported import miscompiles_offloaded_loops

TUNE_SECONDS = 60.0  # of tune=True


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
    repeat_collectives: bool = False
    split: int | None = 0  # None: as the budget says
    offload: bool = False
    tune: float = 0.0  # seconds that timing plans may take


def check_settings(
    *,
    target: str | Target | None,
    solver: str,
    budget: int | float | str | None = None,
    plan: Plan | None = None,
    verify: bool = False,
    keep_user_checkpoints: bool = False,
    on_error: str = "raise",
    repeat_collectives: bool = False,
    split: bool | int | str = False,
    offload: bool = False,
    tune: bool | float = False,
) -> Settings:
    """Read and check what a user wrote; see `optimize` for the errors."""
    if solver not in SOLVERS:
        raise ValueError(f"expected a solver among {', '.join(map(repr, sorted(SOLVERS)))}; got {solver!r}")
    if on_error not in ("raise", "plain"):
        raise ValueError(f"expected on_error='raise' or on_error='plain'; got {on_error!r}")
    if plan is not None and not isinstance(plan, Plan):
        write = f"; write plan=remat_opt.Plan.load({str(plan)!r})" if isinstance(plan, (str, Path)) else ""
        got = type(plan).__name__
        raise TypeError(f"expected a Plan, as step.plan(*args) or Plan.load(path) gives it; got {got}{write}")
    if plan is not None and budget is not None:
        raise ValueError(
            f"expected a plan or a budget, got both (budget={budget!r}): a plan is what was found for its own budget. "
            "Write optimize(fun, plan=plan), or optimize(fun, budget=...) to search again"
        )
    if target is not None:
        resolve_target(target)  # an unknown name is an error now, not at the first call
    return Settings(
        parse_budget(budget),
        plain_budget(budget),
        target,
        solver,
        plan,
        verify,
        keep_user_checkpoints,
        on_error,
        repeat_collectives,
        check_split(split),
        check_offload(offload, None if target is None else resolve_target(target)),
        check_tune(tune, plan, verify),
    )


def check_offload(offload: bool, target: Target | None, *, in_loops: bool = False) -> bool:
    """What a user wrote.

    Args:
        offload: whether values may go to the host's memory.
        target: the device; None where it is not known yet.
        in_loops: whether there are loops.

    Raises:
        ValueError: there is no bandwidth to move them at (on a CPU nothing can move, and a warning says so), or the
            compiler fails at it.
    """
    if not isinstance(offload, bool):
        raise ValueError(f"expected offload=True or offload=False, got offload={offload!r}")
    if offload and target is not None and target.host_bandwidth is None and target.platform != "cpu":
        raise ValueError(
            f"expected a target with a host_bandwidth for offload=True, {target.name} has none. Write "
            f"target=dataclasses.replace(remat_opt.targets.resolve_target({target.name!r}), host_bandwidth=25e9) with "
            "what its host reaches, in bytes per second each way"
        )
    if offload and in_loops and target is not None and miscompiles_offloaded_loops(target.platform):
        raise ValueError(
            "expected jaxlib 0.11.1 or newer for offload=True in a step with lax.scan, got jaxlib 0.11.0, whose GPU "
            "compiler computes wrong gradients there (openxla/xla issue 46231). Write offload=False"
        )
    return offload


def check_split(split: bool | int | str) -> int | None:
    """The number of chunks that a user wrote, 0 for none, None where a budget decides."""
    if isinstance(split, str) and split == "auto":
        return None
    if split is False:
        return 0
    if split is True or not isinstance(split, int):
        raise ValueError(
            f'expected split="auto", split=False or a number of chunks, got split={split!r}. Write split=4 for four '
            "chunks"
        )
    if split < 2:
        raise ValueError(
            f"expected at least 2 chunks, got split={split}. Write split=False to run the whole batch at once, or "
            "split=2 for two halves"
        )
    return split


def check_tune(tune: bool | float, plan: Plan | None, verify: bool) -> float:
    """Seconds that a user allows for timing plans, 0 for none."""
    if tune is False:
        return 0.0
    if not isinstance(tune, numbers.Real) or not 0 < tune < math.inf:
        raise ValueError(
            f"expected tune=True, tune=False or a number of seconds above 0, got tune={tune!r}. Write tune=30 for half "
            "a minute"
        )
    if plan is not None:
        raise ValueError(
            "expected a plan or tune, got both: a plan is what was decided. Write optimize(fun, plan=plan)"
        )
    if not verify:
        raise ValueError(
            "expected verify=True for tune, got verify=False: what is timed is compiled. Write verify=True"
        )
    return TUNE_SECONDS if tune is True else float(tune)
