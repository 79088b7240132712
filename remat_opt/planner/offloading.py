"""Plans with copies to the host, checked: what the compiler does not copy is left out, what cannot run is refused."""

from __future__ import annotations

import os
from collections.abc import Callable

from remat_opt.planner.budget import InfeasibleBudget
from remat_opt.planner.decision import Decision, Planner

POOL_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
POOL_GB = 64  # of pinned host memory that JAX's GPU runtime has by default


def with_transfers(
    planner: Planner, decide: Callable[[Planner], Decision], decide_alone: Callable[[], Decision]
) -> Decision:
    """The decision for a step whose values may go to the host.

    Args:
        planner: of the step.
        decide: what is decided with it.
        decide_alone: what is decided without transfers, for where the compiler makes no copies, or needs more memory
            with them.

    Raises:
        InfeasibleBudget: the budget can be kept neither with transfers nor without.
        ValueError: the copies need more of the host's memory than the runtime has.
    """
    try:
        decision = decide(planner)
    except InfeasibleBudget as refusal:
        try:
            return decide_alone()
        except InfeasibleBudget as other:
            raise min(refusal, other, key=lambda one: one.least_bytes) from None
    has_limit = planner.settings.budget.has_limit
    if not decision.plan.predicted.host_bytes:
        if planner.compiled <= 1:
            return decision
        return min(decision, decide_alone(), key=lambda one: one.extra_seconds if has_limit else _bytes(one))
    check_pool(decision)
    if planner.compile is None:
        return decision
    is_first = planner.compiled <= 1
    figures = decision.plan.measured or planner.measure(decision)
    measured = decision.with_plan(measured=figures)
    if figures.host_temp_bytes and has_limit and is_first:
        return measured
    other = decide_alone()
    if figures.host_temp_bytes and has_limit:  # it took several, and the last may be far from the best
        return min(measured, other, key=lambda one: one.extra_seconds)
    if figures.host_temp_bytes and figures.temp_bytes <= planner.measure(other).temp_bytes:
        return measured
    why = "need more memory when they are compiled" if figures.host_temp_bytes else "are not made by the compiler"
    note = "; ".join(filter(None, (f"copies to the host {why}, nothing goes there", other.plan.note)))
    return other.with_plan(note=note)


def _bytes(decision: Decision) -> int:
    """Temporary memory, compiled where it was."""
    return decision.plan.measured.temp_bytes if decision.plan.measured else decision.peak


def check_pool(decision: Decision) -> None:
    """Raise ValueError where copies need more of the host's memory than the GPU runtime's pool has."""
    pool = int(os.environ.get(POOL_VARIABLE) or POOL_GB)
    needed = decision.plan.predicted.host_bytes
    if needed > pool << 30:
        least = -(-needed // (1 << 30)) + 1
        raise ValueError(
            f"expected copies of at most {pool} GiB, the pool of host memory that JAX's GPU runtime has, got {needed} "
            f"bytes. Set {POOL_VARIABLE}={least} before JAX starts, or give a larger budget"
        )
