"""`largest_batch`: the largest batch of a step that fits a budget, with what it costs in time."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable
from typing import Any

import jax

from remat_opt.callable.function import OptimizedFunction
from remat_opt.planner.batch_size import BatchPoint, BatchSearch
from remat_opt.planner.budget import parse_budget
from remat_opt.planner.collectives import number_of_devices
from remat_opt.planner.decision import Measure
from remat_opt.planner.plan import Plan
from remat_opt.planner.prepared import Prepared
from remat_opt.planner.settings import Settings, check_settings
from remat_opt.report.notebook import to_html
from remat_opt.targets import Figures, Target, check_installed, is_attached, resolve_target
from remat_opt.units import format_bytes, format_change, format_count, format_seconds

_WIDTH = 88


@dataclasses.dataclass(frozen=True)
class LargestBatch:
    """The largest batch of a step that fits a budget; `print` it for a table.

    Attributes:
        name: of the step.
        target: name of the device.
        budget_bytes: physical peak of one device that is allowed.
        multiple_of: batches are multiples of it.
        largest: the largest batch; its plan has the compiler's figures.
        fastest: the batch of most predicted samples per second between the plain step's largest one and `largest`.
        plain: the largest batch of the original step, as predicted; None where none fits.
        compilations: how many steps were compiled.
        misses: how many of these did not fit.
    """

    name: str
    target: str
    budget_bytes: int
    multiple_of: int
    largest: BatchPoint
    fastest: BatchPoint
    plain: BatchPoint | None
    compilations: int
    misses: int

    @property
    def batch(self) -> int:
        """Rows of the largest batch, of all devices together."""
        return self.largest.batch

    @property
    def plan(self) -> Plan:
        """The plan for the largest batch."""
        return self.largest.plan

    @property
    def measured(self) -> Figures:
        """The compiler's figures for the largest batch."""
        assert self.plan.measured is not None, "the largest batch is compiled"
        return self.plan.measured

    def as_json(self) -> dict[str, Any]:
        """All figures as values that `json.dump` writes; bytes and seconds, without the plans."""
        points = {"plain": self.plain, "fastest": self.fastest, "largest": self.largest}
        return {
            "name": self.name,
            "target": self.target,
            "budget_bytes": self.budget_bytes,
            "multiple_of": self.multiple_of,
            "batch": self.batch,
            "physical_peak_bytes": self.measured.physical_peak_bytes,
            "compilations": self.compilations,
            "misses": self.misses,
            **{name: point and _figures_of(point) for name, point in points.items()},
        }

    def _repr_html_(self) -> str:
        return to_html(str(self))

    def __str__(self) -> str:
        title = f"{self.name} for {self.target}, budget {format_bytes(self.budget_bytes)}"
        points = {"plain step, largest": self.plain, "most samples/s": self.fastest, "largest": self.largest}
        lines = [f"{'':22}{'batch':>9}{'peak':>13}{'extra time':>13}{'a step':>12}{'samples/s':>12}"]
        for label, point in points.items():
            if point is None:
                lines.append(f"{label:22}{'–':>9}")
                continue
            extra = format_change(point.seconds, point.seconds - point.extra_seconds)
            lines.append(
                f"{label:22}{point.batch:9,}{format_bytes(point.peak_bytes):>13}{extra:>13}"
                f"{format_seconds(point.seconds):>12}{point.samples_per_second:12,.0f}"
            )
        missed = f", {self.misses} of which did not fit" if self.misses else ""
        compiled = (
            f"Compiled, the largest batch has a physical peak of {format_bytes(self.measured.physical_peak_bytes)} "
            f"({format_count(self.compilations, 'compilation')}{missed}). Times and the other peaks are predicted."
        )
        by_xla = self.measured.recomputed_by_xla
        notes = [compiled, f"XLA itself recomputes {format_count(by_xla, 'instruction')} in it." if by_xla else ""]
        notes.append(f"Plan: {self.plan.note}." if self.plan.note else "")
        said = [line for note in filter(None, notes) for line in ("", *textwrap.wrap(note, _WIDTH))]
        return "\n".join([title, "", *lines, *said])


def _figures_of(point: BatchPoint) -> dict[str, Any]:
    fields = {name: getattr(point, name) for name in ("batch", "peak_bytes", "seconds", "extra_seconds")}
    return {**fields, "samples_per_second": point.samples_per_second}


def check_batch_settings(
    make_args: Any, budget: Any, target: str | Target | None, multiple_of: Any, **options: Any
) -> Settings:
    """The settings of a search, with its budget in bytes; see `remat_opt.largest_batch` for the errors."""
    if not callable(make_args):
        raise TypeError(
            f"expected make_args to be a function of the batch size, got {type(make_args).__name__}; write for example "
            "make_args=lambda batch: (state, jax.ShapeDtypeStruct((batch, 128), jnp.float32))"
        )
    if isinstance(multiple_of, bool) or not isinstance(multiple_of, int) or multiple_of < 1:
        raise ValueError(f"expected multiple_of to be a whole number of at least 1, got {multiple_of!r}; write 8, say")
    device = resolve_target(target)
    if not is_attached(device):
        check_installed(device)
    asked = parse_budget(budget)
    if budget is None and device.memory_bytes is None:
        raise ValueError(
            f'expected a budget in bytes, got None, and {device.name} has no memory of its own; write budget="8GB", say'
        )
    if budget is not None and asked.physical_bytes is None:
        raise ValueError(
            f"expected a budget in bytes, as an int or as text, got {budget!r}: a fraction has no fixed meaning, "
            'because the plain step\'s memory changes with the batch. Write budget="80GB", say, or None for all of '
            "the device's memory"
        )
    allowed = asked.physical_bytes or device.memory_bytes
    return check_settings(budget=allowed, target=target, solver="auto", verify=True, **options)


def search_largest_batch(
    step: Any, settings: Settings, make_args: Callable[[int], tuple], multiple_of: int
) -> LargestBatch:
    """Find the largest batch of an optimised step.

    Args:
        step: what `optimize` returned.
        settings: its settings; the budget is in bytes.
        make_args: the step's arguments for a batch size.
        multiple_of: see `remat_opt.largest_batch`.
    """
    arguments = _Arguments(make_args, multiple_of)

    def read(batch: int) -> tuple[Prepared, Measure]:
        return step.ask(_read, arguments(batch), {})

    first = arguments(multiple_of)
    devices, name, target = step.ask(_about, first, {})
    allowed = settings.budget.physical_bytes
    assert allowed is not None
    found = BatchSearch(read, settings, multiple_of, devices).run()
    points = (found.largest, found.fastest, found.plain)
    return LargestBatch(name, target, allowed, multiple_of, *points, found.compilations, found.misses)


def _read(function: OptimizedFunction, args: tuple, kwargs: dict) -> tuple[Prepared, Measure]:
    return function.prepare(*args, **kwargs), function.compiler(*args, **kwargs)


def _about(function: OptimizedFunction, args: tuple, kwargs: dict) -> tuple[int, str, str]:
    """On how many devices the step runs, its name and its target's."""
    program = function.prepare(*args, **kwargs).captured.program
    name = getattr(function.original, "__qualname__", repr(function.original))
    return number_of_devices(program, (args, kwargs), function.options), name, function.target.name


class _Arguments:
    """A user's `make_args`, checked: the same trees for every batch, and arrays that grow with it."""

    def __init__(self, make_args: Callable[[int], tuple], first: int):
        self.make_args = make_args
        self.first = first
        self.structure: Any = None
        self.structure = jax.tree.structure(self(first))
        once, twice = (_shapes(self(batch)) for batch in (first, 2 * first))
        if once == twice:
            raise ValueError(
                f"expected make_args(batch) to return arguments whose shapes change with the batch, got the same for "
                f"{first} and {2 * first}: {', '.join(map(str, once[:3]))}{', …' if len(once) > 3 else ''}. Write for "
                "example: lambda batch: (state, jax.ShapeDtypeStruct((batch, 224, 224, 3), jnp.float32))"
            )

    def __call__(self, batch: int) -> tuple:
        args = self.make_args(batch)
        if not isinstance(args, tuple):
            raise TypeError(
                f"expected make_args({batch}) to return the step's arguments as a tuple, got {type(args).__name__}; "
                "write return (state, batch)"
            )
        structure = jax.tree.structure(args)
        if self.structure is not None and structure != self.structure:
            raise ValueError(
                f"expected make_args to return the same tree for every batch, got {structure} for {batch} and "
                f"{self.structure} for {self.first}; let only the shapes of arrays change"
            )
        return args


def _shapes(tree: Any) -> list[tuple[int, ...]]:
    return [getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(tree)]
