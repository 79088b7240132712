"""`python -m remat_opt plan package.module:make_step`: what is decided for a step, and what its compiler says."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Callable
from typing import Any

from remat_opt.api import frontier, largest_batch, optimize
from remat_opt.callable.frontier import Frontier
from remat_opt.callable.largest_batch import LargestBatch
from remat_opt.callable.measure import Measurement, measure_step
from remat_opt.report.explain import Explanation
from remat_opt.targets import resolve_target


class WrongStep(Exception):
    """What was named makes no step; the message says what was expected."""


@dataclasses.dataclass(frozen=True)
class Report:
    """All that the command prints.

    Attributes:
        explanation: of the plan.
        measurement: the compiler's figures, plain and planned.
        frontier: what every amount of memory would cost.
        largest: the largest batch, which the others are then of; None where it was not asked for.
    """

    explanation: Explanation
    measurement: Measurement
    frontier: Frontier
    largest: LargestBatch | None = None

    def __str__(self) -> str:
        sections = {
            "Largest batch": self.largest,
            "Plan": self.explanation,
            "Compiled": self.measurement,
            "Memory against time (predicted)": self.frontier,
        }
        return "\n\n".join(f"── {title} ──\n\n{said}" for title, said in sections.items() if said is not None)

    def as_json(self) -> dict[str, Any]:
        """All of it as values that `json.dump` writes; bytes, FLOPs and seconds."""
        figures = {"plain": self.measurement.plain, "optimized": self.measurement.optimized}
        return {
            "largest_batch": self.largest and self.largest.as_json(),
            "plan": json.loads(self.explanation.plan.to_json()),
            "explanation": str(self.explanation),
            "measured": {name: found and found.as_json() for name, found in figures.items()},
            "frontier": [
                {name: getattr(point, name) for name in ("peak_bytes", "extra_seconds", "extra_flops")}
                for point in self.frontier
            ],
        }


def find_function(name: str) -> Callable[..., Any]:
    """The function that "package.module:function" names.

    Raises:
        WrongStep: there is none.
    """
    module_name, _, path = name.partition(":")
    if not module_name or not path:
        raise WrongStep(f"expected package.module:function, got {name!r}")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # something that the user's module imports
        raise WrongStep(f"expected a module that can be imported from here, got {module_name!r} ({error})") from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise WrongStep(f"expected a function of {module_name}, got {path!r}, which it does not have")
        found = getattr(found, part)
    if not callable(found):
        raise WrongStep(f"expected {name} to be a function, got {type(found).__name__}")
    return found


def make_report(
    make_step: Callable[..., Any], target: str | None, budget: int | float | str | None, multiple_of: int | None
) -> Report:
    """Plan, compile and look at the frontier.

    Args:
        make_step: returns a step and its arguments (abstract ones are enough) as a tuple; where the largest batch is
            asked for, of a batch size.
        target: see `optimize`.
        budget: see `optimize`; bytes where the largest batch is asked for.
        multiple_of: find the largest batch, a multiple of this; None plans what `make_step` returns.

    Raises:
        WrongStep: `make_step` returns something else.
    """
    if multiple_of is None:
        step, args = _checked(make_step())
        planned, largest = optimize(step, target=target, budget=budget), None
    else:
        step, _ = _checked(make_step(multiple_of))
        assert not isinstance(budget, float)
        largest = largest_batch(
            step, lambda batch: _checked(make_step(batch))[1], budget, target, multiple_of=multiple_of
        )
        args = _checked(make_step(largest.batch))[1]
        planned = optimize(step, target=target, plan=largest.plan)
    measurement = measure_step(planned, resolve_target(target), args, {})
    return Report(planned.explain(*args), measurement, frontier(step, *args, target=target), largest)


def _checked(made: Any) -> tuple[Any, tuple]:
    if not isinstance(made, tuple) or len(made) != 2 or not callable(made[0]) or not isinstance(made[1], tuple):
        kinds = ", ".join(type(one).__name__ for one in made) if isinstance(made, tuple) else ""
        got = f"a tuple of ({kinds})" if kinds else type(made).__name__
        raise WrongStep(
            f"expected the function to return a step and a tuple of its arguments, got {got}; write "
            "return train_step, (state, batch)"
        )
    return made
