"""Warnings about a decision; each is given once for each function."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from remat_opt.callable.donation import Undonated
from remat_opt.callable.warning import RematWarning, callers_level
from remat_opt.planner.decision import Decision
from remat_opt.planner.fallback import has_failed
from remat_opt.planner.planning import made_elsewhere
from remat_opt.planner.settings import Settings
from remat_opt.targets.devices import target_of
from remat_opt.trace.placement import device_lowered_for


class Reporter:
    """Warns the user of one function.

    Args:
        fun: the function, for its name.
        settings: what the user asked for.
    """

    def __init__(self, fun: Callable, settings: Settings):
        self._fun = fun
        self._settings = settings
        self._reported: set[str] = set()
        self._has_reported_undonated = False

    @property
    def name(self) -> str:
        """The function's."""
        return getattr(self._fun, "__qualname__", None) or repr(self._fun)

    def report(self, decision: Decision) -> None:
        """Warn if the step runs unchanged, or by a plan from elsewhere."""
        plan = decision.plan
        if self._settings.offload and decision.prepared.target.host_bandwidth is None:
            self.warn(f"{self.name}: nothing goes to the host: the memory of {plan.target} is the host's")
        if plan.is_plain:
            if self._settings.budget.has_limit and not has_failed(plan.note):
                return  # it fits as it was given
            self.warn(f"{self.name}: {plan.note}; the step runs as it was given")
            return
        if self._settings.plan is not None and (elsewhere := made_elsewhere(self._settings.plan, plan.target)):
            self.warn(f"{self.name}: {elsewhere} and were not checked here")

    def report_call(self, decision: Decision) -> None:
        """Warn if a step is called, or lowered, for another device than it is planned for."""
        plan = decision.plan
        if plan.is_plain:
            return
        device = device_lowered_for(decision.prepared.captured.traced)
        planned_for = plan.target.partition(":")[0]  # a topology is of several devices of one target
        called_on = planned_for if device is None else target_of(device).name
        if called_on != planned_for:
            self.warn(
                f"{self.name}: planned for {plan.target}, called on {called_on}: its figures were not checked here"
            )

    def report_undonated(self, decision: Decision, undonated: Undonated | None) -> None:
        """Warn once that donation would save memory; not if the original step already meets the budget."""
        fits = decision.plan.is_plain and self._settings.budget.has_limit
        if undonated is not None and not fits and not self._has_reported_undonated:
            self._has_reported_undonated = True
            self.warn(f"{self.name}: {undonated}")

    def warn(self, message: str) -> None:
        """Give a warning, unless it was given before."""
        if message not in self._reported:
            self._reported.add(message)
            warnings.warn(f"remat_opt: {message}", RematWarning, stacklevel=callers_level())
