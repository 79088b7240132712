"""Schedules for one step of a reverse loop, which the search is asked for; see `StepSearch`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from remat_opt.graph.cost import Rates
from remat_opt.loops.recomputation import JointStep

ABOUT_NOTHING = 0.005  # of a step's FLOPs

Emit = Callable[[Sequence[Any]], "list[Any]"]
"""Evaluates a body on its inputs, values or tracers."""


@dataclasses.dataclass(frozen=True)
class StepCost:
    """One schedule of a step.

    Attributes:
        peak: bytes, without the stacks that the step reads.
        extra_flops: FLOPs beyond those of the step in its own order.
        extra_seconds: estimated seconds beyond.
    """

    peak: int
    extra_flops: float
    extra_seconds: float


@dataclasses.dataclass(frozen=True)
class StepCosts:
    """What a step can be.

    Attributes:
        schedules: from least memory to least time; the last one is the step in its own order.
        flops, seconds: of the step in its own order.
    """

    schedules: tuple[StepCost, ...]
    flops: float
    seconds: float

    @property
    def in_order(self) -> StepCost:
        """The step in its own order."""
        return self.schedules[-1]

    def chosen(self, most_bytes: int | None, *, is_alone: bool = True) -> StepCost:
        """The least time with a peak of so many bytes, or the least memory; None is the step in its own order.

        Of a step whose chunk saved residuals for it the least memory for about those FLOPs: it reads more of its
        operands from stacks than its costs know, as slices that a compiler stores.
        """
        if most_bytes is None:
            return self.in_order
        fitting = next((one for one in reversed(self.schedules) if one.peak <= most_bytes), self.schedules[0])
        most = fitting.extra_flops + ABOUT_NOTHING * self.flops
        return fitting if is_alone else next(one for one in self.schedules if one.extra_flops <= most)


class StepSearch(Protocol):
    """Schedules steps of reverse loops: what a step recomputes need not all be there at its beginning."""

    rates: Rates

    def costs(self, step: JointStep) -> StepCosts:
        """What a step can be."""
        ...

    def written(self, step: JointStep, most_bytes: int) -> Emit | None:
        """The step as `StepCosts.chosen` has it; None where that is its own order."""
        ...
