"""`measure`: the compiler's figures for a step, plain and optimised, for an attached or absent device."""

from __future__ import annotations

import dataclasses
import functools
import textwrap
import warnings
from collections.abc import Callable
from typing import Any

import jax

from remat_opt.callable.compiling import compile_elsewhere, compile_here
from remat_opt.callable.donation import Undonated
from remat_opt.callable.function import OptimizedFunction
from remat_opt.callable.warning import RematWarning
from remat_opt.planner.plan import Plan
from remat_opt.report.notebook import to_html
from remat_opt.targets import CompilationOutOfMemory, Figures, Target, is_attached
from remat_opt.targets.options import compiler_options_for, merges_checkpoints
from remat_opt.trace import compat
from remat_opt.trace.flops import UNKNOWN_LOOPS, FlopCount, count_flops
from remat_opt.units import format_bytes, format_change, format_count, format_flops, format_seconds

_WIDTH = 88


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A compiler's figures of one step for one target; `print` it for a table. All sizes are bytes of one device.

    Attributes:
        name: of the step.
        target: name of the device that was compiled for.
        plain: the original step; None where it does not fit.
        optimized: the step as `optimize` writes it; None where it does not fit.
        plan: what `optimize` decided.
        plain_refusal: why the compiler refused the plain step (TPU compilers refuse what does not fit the device; its
            `needed_bytes` says how much that would be); None where it did not.
        optimized_refusal: the same of the optimised step.
        plain_flops: FLOPs of the plain step, loops times their length.
        optimized_flops: the same of the optimised step.
        undonated: state that donation would save memory for; None where there is little.
    """

    name: str
    target: str
    plain: Figures | None
    optimized: Figures | None
    plan: Plan
    plain_refusal: CompilationOutOfMemory | None = None
    optimized_refusal: CompilationOutOfMemory | None = None
    plain_flops: FlopCount | None = None
    optimized_flops: FlopCount | None = None
    undonated: Undonated | None = None

    @property
    def temp_bytes(self) -> int | None:
        """Temporary memory of the optimised step."""
        return self.optimized.temp_bytes if self.optimized is not None else None

    @property
    def physical_peak_bytes(self) -> int | None:
        """Temporary memory + arguments + outputs − aliased of the optimised step: what has to fit the device."""
        return self.optimized.physical_peak_bytes if self.optimized is not None else None

    def __str__(self) -> str:
        return "\n".join([self._title(), "", *self._table(), *self._notes()])

    def _repr_html_(self) -> str:
        return to_html(str(self))

    def _title(self) -> str:
        figures = self.optimized or self.plain
        if figures is None:
            return f"{self.name} for {self.target}"
        compiler = f", {figures.compiler}" if figures.compiler else ""
        return f"{self.name} for {self.target}, jax {figures.jax_version}{compiler}"

    def _table(self) -> list[str]:
        columns = {"plain": (self.plain, self.plain_flops), "remat_opt": (self.optimized, self.optimized_flops)}
        lines = [f"{'':32}" + "".join(f"{name:>15}" for name in columns)]
        rows = [
            (label, [figures and read(figures) for figures, _ in columns.values()], show) for label, read, show in _ROWS
        ]
        counted = [count and count.flops for _, count in columns.values()]
        rows.insert(_AFTER_MEMORY, (_FLOPS, counted, format_flops))
        hidden = {label for label, found, _ in rows if label in (_SENT, _ARRAYS, _ON_HOST) and not any(found)}
        hidden |= set() if self._compiler_counts_the_same else {_COMPILERS_FLOPS}
        for label, found, show in rows:
            if label in hidden:
                continue
            cells = "".join(f"{'–' if value is None else show(value):>15}" for value in found)
            known = [value for value in found if value is not None]
            change = format_change(known[1], known[0]) if len(known) == 2 and label in _COMPARED else ""
            lines.append(f"{label:32}{cells}{change:>9}".rstrip())
        return lines

    @property
    def _compiler_counts_the_same(self) -> bool:
        """Whether XLA's count has the same meaning as ours: it has a loop's body once, and one device's share."""
        counts = [count for count in (self.plain_flops, self.optimized_flops) if count is not None]
        figures = [one for one in (self.plain, self.optimized) if one is not None and one.flops is not None]
        is_divided = any(one.collectives is not None for one in figures)
        return bool(figures) and not is_divided and not any(count.has_loops for count in counts)

    def _notes(self) -> list[str]:
        notes = []
        for refusal, step in ((self.plain_refusal, "plain"), (self.optimized_refusal, "optimised")):
            if refusal is not None and refusal.needed_bytes is not None and refusal.limit_bytes is not None:
                need, limit = format_bytes(refusal.needed_bytes), format_bytes(refusal.limit_bytes)
                notes.append(f"The {step} step does not fit the device: it needs {need} of {limit}.")
            elif refusal is not None:
                notes.append(f"The {step} step does not fit the device.")
        notes += self._recomputed_by_xla()
        figures = self.optimized or self.plain
        notes += [figures.note[0].upper() + figures.note[1:] + "."] if figures is not None and figures.note else []
        counts = (self.plain_flops, self.optimized_flops)
        if any(count.has_unknown_loops for count in counts if count is not None):
            notes.append(f"{UNKNOWN_LOOPS[0].upper()}{UNKNOWN_LOOPS[1:]}.")
        if any(one is not None and one.collectives is not None for one in (self.plain, self.optimized)):
            notes.append(_DIVIDED)
        notes += [f"{self.undonated}."] if self.undonated is not None else []
        notes += [f"Plan: {self.plan.note}."] if self.plan.note else []
        return [line for note in notes for line in ("", *textwrap.wrap(note, _WIDTH))]

    def _recomputed_by_xla(self) -> list[str]:
        """What the compiler recomputes on its own, in each step that was compiled."""
        steps = {"plain": self.plain, "optimised": self.optimized}
        found = {name: figures for name, figures in steps.items() if figures is not None}
        limits = [figures.xla_limit_bytes for figures in found.values() if figures.xla_limit_bytes is not None]
        if not limits and not any(figures.recomputed_by_xla for figures in found.values()):
            return []
        counts = ", ".join(
            f"{format_count(figures.recomputed_by_xla, 'instruction')} in the {name} step"
            for name, figures in found.items()
        )
        limit = f", where temporary memory would pass {format_bytes(min(limits))}" if limits else ""
        return [f"XLA itself recomputes{limit}: {counts}."]


_LOOKED_UP = 1e-3  # seconds; no compiler is as fast: JAX had the program, as from a call


def _compiling(seconds: float) -> str:
    return format_seconds(seconds) if seconds > _LOOKED_UP else "done before"


_SENT = "sent to other devices"
_ARRAYS = "arrays sent between devices"
_ON_HOST = "temporary memory of the host"
_FLOPS = "FLOPs, loops times their length"
_COMPILERS_FLOPS = "FLOPs, as the compiler counts"
_ROWS: tuple[tuple[str, Callable[[Figures], Any], Callable[[Any], str]], ...] = (
    ("temporary memory", lambda figures: figures.temp_bytes, format_bytes),
    ("arguments", lambda figures: figures.argument_bytes, format_bytes),
    ("outputs", lambda figures: figures.output_bytes, format_bytes),
    ("aliased (donated)", lambda figures: figures.alias_bytes, format_bytes),
    ("physical peak", lambda figures: figures.physical_peak_bytes, format_bytes),
    (_ON_HOST, lambda figures: figures.host_temp_bytes, format_bytes),
    (_COMPILERS_FLOPS, lambda figures: figures.flops, format_flops),
    (_SENT, lambda figures: figures.collectives and figures.collectives.bytes, format_bytes),
    (_ARRAYS, lambda figures: figures.collectives and figures.collectives.arrays, str),
    ("compiling", lambda figures: figures.compile_seconds, _compiling),
)
_DIVIDED = "Figures are those of one device; FLOPs are those of all devices together."
_AFTER_MEMORY = 6  # where our own count stands among the compiler's figures
_COMPARED = frozenset({"temporary memory", "physical peak", _FLOPS, _COMPILERS_FLOPS})


def measure_step(step: Any, target: Target | None, args: tuple, kwargs: dict) -> Measurement:
    """Compile an optimised step, and the one that it was made from, and read the compiler's figures.

    Args:
        step: what `optimize` returned.
        target: the device to compile for; None for the one that the step is planned for.
        args: arguments of the step, arrays or `jax.ShapeDtypeStruct`s.
        kwargs: its keyword arguments.
    """
    return step.ask(functools.partial(_measure, target=target), args, kwargs)


def _measure(step: OptimizedFunction, args: tuple, kwargs: dict, *, target: Target | None) -> Measurement:
    target = target or step.target
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RematWarning)  # what they say is in the plan
        plan = step.plan(*args, **kwargs)
        jitted = jax.jit(step.original, **step.options)
        plain, plain_refusal = _known_plain(plan, step, target), None
        if plain is None:
            plain, plain_refusal = _compile(jitted, step, target, False, args, kwargs)
        plain_flops = _count(jitted, step, target, False, args, kwargs)
        optimized, optimized_refusal = _compile(step, step, target, not plan.is_plain, args, kwargs)
        optimized_flops = _count(step, step, target, not plan.is_plain, args, kwargs)
        undonated = step.undonated(*args, **kwargs)
    name = getattr(step.original, "__qualname__", repr(step.original))
    refusals, counts = (plain_refusal, optimized_refusal), (plain_flops, optimized_flops)
    return Measurement(name, target.name, plain, optimized, plan, *refusals, *counts, undonated)


def _known_plain(plan: Plan, step: OptimizedFunction, target: Target) -> Figures | None:
    """The figures of the original step where planning compiled it as a call of it would."""
    given = step.options.get("compiler_options") or {}
    ours = compiler_options_for(target.platform, given, offloads=step.settings.offload)
    if step.settings.plan is not None or plan.target != target.name:
        return None  # made elsewhere, or for another device
    return None if step.settings.budget.fraction is not None and ours != given else plan.plain_measured


def _count(
    jitted: Any, step: OptimizedFunction, target: Target, rewritten: bool, args: tuple, kwargs: dict
) -> FlopCount:
    options = step.options.get("compiler_options")
    merges = not rewritten and merges_checkpoints(target.platform, options)
    return count_flops(jitted.trace(*args, **kwargs).jaxpr, merges_checkpoints=merges)


def _compile(
    jitted: Any, step: OptimizedFunction, target: Target, rewritten: bool, args: tuple, kwargs: dict
) -> tuple[Figures | None, CompilationOutOfMemory | None]:
    try:
        if is_attached(target):
            return compile_here(jitted, target, args, kwargs), None
        return _compile_elsewhere(jitted, step, target, rewritten, args, kwargs), None
    except CompilationOutOfMemory as refusal:
        return None, refusal


def _compile_elsewhere(
    jitted: Any, step: OptimizedFunction, target: Target, rewritten: bool, args: tuple, kwargs: dict
) -> Figures:
    traced, options = jitted.trace(*args, **kwargs), step.options
    given = options.get("compiler_options") or {}
    ours = compiler_options_for(target.platform, given, offloads=step.settings.offload)
    return compile_elsewhere(
        compat.function_of_jaxpr(traced),
        [variable.aval for variable in compat.input_variables(traced.jaxpr)],
        traced,
        donated=[index for index, info in enumerate(jax.tree.leaves(traced.args_info)) if info.donated],
        target=target,
        compiler_options=ours if rewritten else given,
        keep_unused=options.get("keep_unused", False),
    )
