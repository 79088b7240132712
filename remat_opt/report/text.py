"""An explanation as plain text, for terminals of 80 columns and more. Needs nothing but the standard library."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import NamedTuple

from remat_opt.report.curves import Curve, draw
from remat_opt.report.findings import Findings
from remat_opt.report.saved import Group, Reason
from remat_opt.targets.figures import Figures
from remat_opt.units import format_bytes, format_change, format_count, format_flops, format_seconds

WIDTH = 88
CURVE_WIDTH = 72
CURVE_HEIGHT = 8
MOST_GROUPS = 8  # of saved tensors, for each reason
MOST_PRIMITIVES = 5
STAGES = {
    "trace": "tracing",
    "graph": "graph",
    "search": "search",
    "compile": "compiling to check",
    "tune": "timing plans",
}


def to_text(explanation: Findings) -> str:
    """All of an explanation, in sections with a blank line between."""
    sections = [
        _heading(explanation),
        _summary(explanation),
        _figures(explanation),
        *([_timings(explanation)] if explanation.plan.timings else []),
        *([_loops(explanation)] if explanation.loops else []),
        *([_saved(explanation), _recomputed(explanation)] if explanation.segments else []),
        _curves(explanation),
        _closing(explanation),
    ]
    return "\n\n".join("\n".join(section) for section in sections)


def _heading(explanation: Findings) -> list[str]:
    plan = explanation.plan
    budget = "no budget (least memory)" if plan.budget is None else f"budget {_budget(plan.budget)}"
    return [f"Plan for target {plan.target}, solver {plan.solver}, {budget}"]


def _budget(budget: int | float | str) -> str:
    if isinstance(budget, float):
        return f"{budget:g} of the plain step's temporary memory"
    return format_bytes(budget) if isinstance(budget, int) else f'"{budget}"'


def _summary(explanation: Findings) -> list[str]:
    plan, predicted = explanation.plan, explanation.predicted
    if plan.is_plain:
        reason = f": {plan.note}" if plan.note else ""
        text = (
            f"The step runs as it was given{reason}. "
            f"Its predicted peak of temporary memory is {format_bytes(predicted.plain_peak_bytes)}."
        )
        return textwrap.wrap(text, WIDTH)
    first_runs = [op for run in plan.schedule.runs if not run.recomputed for op in run.ops]
    updates = "; updates of the optimizer run as soon as they can" if first_runs != sorted(first_runs) else ""
    segments = format_count(len(explanation.segments), "segment")
    done = []
    if plan.chunks:
        done.append(f"The batch runs in {plan.chunks} chunks, one after another; sums over it are equal to rounding.")
    if explanation.loops:
        pairs = format_count(len(explanation.loops), "pair")
        keep = "keeps" if len(explanation.loops) == 1 else "keep"
        done.append(
            f"{pairs} of a forward and a backward loop {keep} less, and the rest is computed again step by step."
        )
    if plan.loop_bodies:
        bodies = format_count(plan.loop_bodies, "loop")
        done.append(f"In the body of {bodies} values are computed again before their gradients are due.")
    if explanation.segments:
        done.append(
            f"{format_count(len(explanation.held), 'tensor')} ({format_bytes(explanation.held_bytes)}) "
            f"{'is' if len(explanation.held) == 1 else 'are'} saved, and what else the backward pass reads is computed "
            f"again in {segments}, each when its gradients are due{updates}."
        )
    if predicted.host_bytes:
        loops = sum(bool(loop.choice.host) for loop in explanation.loops)
        tensors = len({one.value for one in plan.transfers})
        moved = " and ".join(
            text
            for text in (
                format_count(tensors, "saved tensor") if tensors else "",
                f"what {format_count(loops, 'loop')} keep{'s' if loops == 1 else ''} of each step" if loops else "",
            )
            if text
        )
        waits = f"waits {format_seconds(predicted.stall_seconds)} for them" if predicted.stall_seconds else "hides them"
        done.append(
            f"{moved} ({format_bytes(predicted.host_bytes)} at a time) go to the host's memory and come back; the "
            f"work beside the copies {waits}."
        )
    if not done:
        what = "order" if plan.reordered else "form"
        done.append(f"Operations are written in another {what} that keeps less; nothing is computed again.")
    extra, less = predicted.extra_flops, "more" if predicted.extra_flops >= 0 else "fewer"
    what, before, after = _goes_from(explanation)
    done.append(
        f"{what} goes from {format_bytes(before)} to {format_bytes(after)} ({format_change(after, before)}) for "
        f"{_percent(abs(extra), predicted.flops)} {less} FLOPs."
    )
    return textwrap.wrap(" ".join(done), WIDTH)


def _goes_from(explanation: Findings) -> tuple[str, int, int]:
    """What the summary says of memory, with its bytes before and after: of several devices the compiler knows best."""
    plan, predicted = explanation.plan, explanation.predicted
    if explanation.devices > 1 and plan.plain_measured and plan.measured:
        return "Temporary memory of one device", plan.plain_measured.temp_bytes, plan.measured.temp_bytes
    return "The predicted peak of temporary memory", predicted.plain_peak_bytes, predicted.peak_bytes


def _percent(part: float, whole: float) -> str:
    percent = 100 * part / whole if whole else 0.0
    return "<0.1 %" if 0 < percent < 0.05 else f"{percent:.1f} %"


# Figures


class _Quantity(NamedTuple):
    """A quantity before and after (None: not known), and what writes it with its unit."""

    label: str
    write: Callable[[float], str]
    before: float | None
    after: float | None

    def as_row(self, alone: bool) -> str:
        """One line, with the change; `alone` leaves out all but the first figure."""
        first, second = ("–" if amount is None else self.write(amount) for amount in (self.before, self.after))
        if alone:
            return _row(self.label, first, "", "")
        known = self.before is not None and self.after is not None
        return _row(self.label, first, second, format_change(self.after or 0, self.before or 0) if known else "")


def _figures(explanation: Findings) -> list[str]:
    plan, predicted = explanation.plan, explanation.predicted
    before, after = plan.plain_measured, plan.measured
    peaks = (predicted.plain_peak_bytes, predicted.peak_bytes)
    flops = (predicted.flops, predicted.flops + predicted.extra_flops)
    seconds = (predicted.seconds, predicted.seconds + predicted.extra_seconds)
    quantities = [_Quantity("temporary memory, predicted peak", format_bytes, *peaks)]
    if not plan.is_plain and explanation.all_saved_peak < 0.99 * predicted.plain_peak_bytes:
        label = "  … with everything saved, updates early"
        quantities.append(_Quantity(label, format_bytes, None, explanation.all_saved_peak))
    if plan.is_plain:
        before = before or after
    if before or after:
        temp = [figures and figures.temp_bytes for figures in (before, after)]
        physical = [figures and figures.physical_peak_bytes for figures in (before, after)]
        quantities.append(_Quantity("temporary memory, compiled", format_bytes, *temp))
        quantities.append(_Quantity("physical peak, compiled", format_bytes, *physical))
    if predicted.host_bytes:
        host = plan.measured.host_temp_bytes if plan.measured else predicted.host_bytes
        label = "the host's memory, compiled" if plan.measured else "the host's memory, predicted"
        quantities.append(_Quantity(label, format_bytes, None, host))
    quantities.append(_Quantity("FLOPs", format_flops, *flops))
    quantities.append(_Quantity("time, estimated", format_seconds, *seconds))
    heads = ("as given", "", "") if plan.is_plain else ("before", "after", "")
    rows = [quantity.as_row(alone=plan.is_plain) for quantity in quantities]
    note = explanation.flops_note
    counted = [f"{note[0].upper()}{note[1:]}."] if note else []
    said = [
        *counted,
        *_of_devices(explanation),
        *_how_measured(explanation, before, after),
        *_recomputed_by_xla(explanation),
    ]
    return [_row("", *heads), *rows, *said]


def _of_devices(explanation: Findings) -> list[str]:
    if explanation.devices == 1:
        return []
    text = (
        f"Memory and time are those of one of {explanation.devices} devices, predicted as if all were divided equally; "
        "FLOPs are those of all devices together."
    )
    return textwrap.wrap(text, WIDTH)


def _how_measured(explanation: Findings, before: Figures | None, after: Figures | None) -> list[str]:
    compiled, plan = after or before, explanation.plan
    if compiled is None:
        return ["Not compiled while planning: the figures are predicted."]
    said = [f"{compiled.note[0].upper()}{compiled.note[1:]}."] if compiled.note else []
    if before is not None and isinstance(plan.budget, float) and plan.target.startswith("cpu"):
        said.append(
            "The step before is compiled with the options that keep recomputation on the CPU: the budget is a part of "
            "what it needs with them. `measure` compiles it without."
        )
    return [line for text in said for line in textwrap.wrap(text, WIDTH)]


def _recomputed_by_xla(explanation: Findings) -> list[str]:
    limit = explanation.xla_limit_bytes
    if limit is None or explanation.peak_bytes <= limit:
        return []
    text = (
        f"The peak of {format_bytes(explanation.peak_bytes)} lies above {format_bytes(limit)}, XLA's limit for "
        "temporary memory: its compiler recomputes on its own, beside this plan. It does not where the step fits in "
        f"budget={limit:_}."
    )
    return textwrap.wrap(text, WIDTH)


def _row(label: str, before: str, after: str, change: str) -> str:
    return f"{label:<42}{before:>14}{after:>14}{change:>9}".rstrip()


def _timings(explanation: Findings) -> list[str]:
    timings = sorted(explanation.plan.timings, key=lambda one: one.seconds)
    lines = [f"Timed on the device: {format_count(len(timings), 'plan')}, with their seconds and physical peaks"]
    for one in timings:
        taken = ", which is taken" if one.is_taken else ""
        lines.append(
            f"  {format_seconds(one.seconds):>10}{format_bytes(one.physical_peak_bytes):>12}  {one.what}{taken}"
        )
    return lines


# What is saved, what is recomputed


def _loops(explanation: Findings) -> list[str]:
    lines = [f"Loops: {format_count(len(explanation.loops), 'pair')} of a forward and a backward loop"]
    parts = explanation.devices
    for loop in explanation.loops:
        choice = loop.choice
        kept = "its carry at every step"
        if choice.chunk is not None:
            kept = f"its carry at every {choice.chunk}. step, and what lies between from there on"
        if choice.saved:
            kept += f", {format_count(len(choice.saved), 'tensor')} of each step"
        if choice.in_chunk:
            kept += (
                f", and for so many steps at a time {format_count(len(choice.in_chunk), 'tensor')} that are made again"
            )
        if choice.host:
            kept += f", {format_count(len(choice.host), 'stack')} of it in the host's memory"
        for chunks in choice.earlier:
            kept += f"; in its first {chunks.all_steps} steps at every {chunks.steps}."
            if chunks.in_chunk:
                kept += f", with {format_count(len(chunks.in_chunk), 'tensor')} for so many steps at a time"
        sizes = (
            f", {format_bytes(loop.given_bytes / parts)} → {format_bytes(loop.bytes / parts)}"
            if loop.given_bytes and loop.bytes
            else ""
        )
        update = "; the optimizer's update is done inside the backward loop" if choice.update else ""
        if choice.step_bytes is not None:
            update = f"; each step is scheduled for {format_bytes(choice.step_bytes)}{update}"
        text = f"{loop.length} steps{sizes}: keeps {kept}{update}"
        lines += textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ")
    return lines


def _saved(explanation: Findings) -> list[str]:
    there = explanation.plain.at(explanation.plain.peak_position)
    lines = [
        f"Saved: {format_count(len(explanation.held), 'tensor')}, {format_bytes(explanation.held_bytes)}   "
        f"(with everything saved {len(there)} are live at the peak, {format_bytes(explanation.all_saved_peak)})"
    ]
    for reason in Reason:
        groups = [group for group in explanation.groups if group.reason is reason]
        if groups:
            lines.extend(_saved_for(reason, groups))
    rest = len(explanation.names) - len(explanation.held)
    if rest:
        lines.append(
            f"  {rest} more that the plan names cost nothing: fused into their readers, returned by the step, or"
        )
        lines.append("    done with before anything is recomputed")
    return lines


def _saved_for(reason: Reason, groups: list[Group]) -> list[str]:
    count, total = sum(group.count for group in groups), sum(group.total for group in groups)
    lines = textwrap.wrap(
        f"{count} ({format_bytes(total)}) {reason.value}", WIDTH, initial_indent="  ", subsequent_indent="    "
    )
    for group in groups[:MOST_GROUPS]:
        spared = f"   spares {format_flops(group.flops)}" if group.flops else ""
        times = f"{group.count} ×" if group.count > 1 else ""
        lines.extend(_named(f"    {times:>5}{format_bytes(group.size):>11}  ", group.name, spared))
    rest = groups[MOST_GROUPS:]
    if rest:
        tensors = format_count(sum(group.count for group in rest), "smaller tensor")
        lines.append(f"    {'…':>5}{format_bytes(sum(group.total for group in rest)):>11}  in {tensors}")
    return lines


def _named(begin: str, name: str, end: str) -> list[str]:
    """One line, or two where a name is long; a name is never cut, so that it can be found in the plan."""
    if len(begin + name + end) <= WIDTH:
        return [begin + name + end]
    return [begin + name, *([f"{'':{len(begin)}}{end.strip()}"] if end else [])]


def _recomputed(explanation: Findings) -> list[str]:
    sizes, whole = explanation.segments, explanation.plan.predicted.flops
    flops = sum(total.flops for total in explanation.repeated)
    seconds = sum(total.seconds for total in explanation.repeated)
    lines = [
        f"Recomputed: {format_count(len(sizes), 'segment')} of {_span(sizes)} operations, "
        f"{format_flops(flops)}, {_percent(flops, whole)} of the step's"
    ]
    for total in explanation.repeated[:MOST_PRIMITIVES]:
        share = _percent(total.seconds, seconds)
        flops = format_flops(total.flops) if total.flops else ""
        lines.append(f"    {total.count:>5} × {total.primitive:<28}{flops:>14}   {share:>7} of the extra time")
    rest = explanation.repeated[MOST_PRIMITIVES:]
    if rest:
        share = _percent(sum(total.seconds for total in rest), seconds)
        others = f"of {format_count(len(rest), 'other primitive')}"
        lines.append(f"    {sum(total.count for total in rest):>5} × {others:<42}   {share:>7} of the extra time")
    return lines


def _span(sizes: list[int]) -> str:
    return f"{min(sizes):,}" if min(sizes) == max(sizes) else f"{min(sizes):,} to {max(sizes):,}"


# Curves


def _curves(explanation: Findings) -> list[str]:
    before, after = explanation.before, explanation.after
    top, seconds = max(before.peak, after.peak), max(before.seconds, after.seconds)
    lines = ["Live memory over the step (temporary memory, predicted; estimated time; ▼ is the peak)"]
    if explanation.plan.is_plain:
        return [*lines, *_curve("as given", before, seconds, top)]
    lines += _curve("before", before, seconds, top)
    lines += ["", *_curve("after, to the same scale; ━ is recomputation", after, seconds, top)]
    return lines


def _curve(title: str, curve: Curve, seconds: float, top: int) -> list[str]:
    peak, *rows = draw(curve, width=CURVE_WIDTH, height=CURVE_HEIGHT, seconds=seconds, top=top)
    blocks, underline = rows[:CURVE_HEIGHT], rows[CURVE_HEIGHT:]
    label = f"{title}: {format_bytes(curve.peak)}"
    axis = [format_bytes(top), *[""] * (CURVE_HEIGHT - 1)]
    return [
        f"{'':>11}{label}",
        f"{'':>11}{peak}",
        *(f"{mark:>10}│{row}".rstrip() for mark, row in zip(axis, blocks, strict=True)),
        *(f"{'':>11}{line}" for line in underline),
    ]


# Time and note


def _closing(explanation: Findings) -> list[str]:
    plan = explanation.plan
    spent = [f"{label} {format_seconds(explanation.seconds[stage])}" for stage, label in _stages(explanation)]
    lines = textwrap.wrap(f"Planning took: {', '.join(spent) or 'no time that was recorded'}.", WIDTH)
    if plan.note and not plan.is_plain:
        lines += textwrap.wrap(f"Note: {plan.note}.", WIDTH)
    return lines


def _stages(explanation: Findings) -> list[tuple[str, str]]:
    known = [(stage, label) for stage, label in STAGES.items() if stage in explanation.seconds]
    return [*known, *((stage, stage) for stage in explanation.seconds if stage not in STAGES)]
