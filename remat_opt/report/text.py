"""An explanation as plain text, for terminals of 80 columns and more. Needs nothing but the standard library."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from remat_opt.report.curves import Curve, draw
from remat_opt.report.saved import Group, Reason
from remat_opt.report.units import format_bytes, format_change, format_count, format_flops, format_seconds

if TYPE_CHECKING:
    from remat_opt.report.explain import Explanation

WIDTH = 88
CURVE_WIDTH = 72
CURVE_HEIGHT = 8
MOST_GROUPS = 8  # of saved tensors, for each reason
MOST_PRIMITIVES = 5
STAGES = {"trace": "tracing", "graph": "graph", "search": "search", "compile": "compiling to check"}


def to_text(explanation: Explanation) -> str:
    """All of an explanation, in sections with a blank line between."""
    sections = [
        _heading(explanation),
        _summary(explanation),
        _figures(explanation),
        *([] if explanation.plan.is_plain else [_saved(explanation), _recomputed(explanation)]),
        _curves(explanation),
        _closing(explanation),
    ]
    return "\n\n".join("\n".join(section) for section in sections)


def _heading(explanation: Explanation) -> list[str]:
    plan = explanation.plan
    budget = "no budget (least memory)" if plan.budget is None else f"budget {_budget(plan.budget)}"
    return [f"Plan for target {plan.target}, solver {plan.solver}, {budget}"]


def _budget(budget: int | float | str) -> str:
    if isinstance(budget, float):
        return f"{budget:g} of the plain step's temporary memory"
    return format_bytes(budget) if isinstance(budget, int) else repr(budget)


def _summary(explanation: Explanation) -> list[str]:
    plan, predicted = explanation.plan, explanation.plan.predicted
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
    text = (
        f"{format_count(len(explanation.names), 'tensor')} ({format_bytes(predicted.saved_bytes)}) "
        f"{'is' if len(explanation.names) == 1 else 'are'} saved, and what else the backward pass reads is computed "
        f"again in {segments}, each when its gradients are due{updates}. The predicted peak of temporary memory goes "
        f"from {format_bytes(predicted.plain_peak_bytes)} to {format_bytes(predicted.peak_bytes)} "
        f"({format_change(predicted.peak_bytes, predicted.plain_peak_bytes)}) for "
        f"{_percent(predicted.extra_flops, predicted.flops)} more FLOPs."
    )
    return textwrap.wrap(text, WIDTH)


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.3g} %" if whole else "0 %"


# Figures


def _figures(explanation: Explanation) -> list[str]:
    plan, predicted = explanation.plan, explanation.plan.predicted
    lines = [_row("", "before", "after", "")]
    lines.append(_bytes_row("temporary memory, predicted peak", predicted.plain_peak_bytes, predicted.peak_bytes))
    if not plan.is_plain and explanation.plain.peak < 0.99 * predicted.plain_peak_bytes:
        lines.append(_bytes_row("  … with everything saved, updates early", None, explanation.plain.peak))
    before, after = plan.plain_measured, plan.measured
    if before or after:
        for label, name in (("temp_bytes", "temporary memory"), ("physical_peak_bytes", "physical peak")):
            found = [figures and getattr(figures, label) for figures in (before, after)]
            lines.append(_bytes_row(f"{name}, compiled", *found))
    whole = predicted.flops + predicted.extra_flops
    lines.append(
        _row("FLOPs", format_flops(predicted.flops), format_flops(whole), format_change(whole, predicted.flops))
    )
    seconds = predicted.seconds + predicted.extra_seconds
    change = format_change(seconds, predicted.seconds)
    lines.append(
        _row("time, estimated by roofline", format_seconds(predicted.seconds), format_seconds(seconds), change)
    )
    compiled = after or before
    if compiled is None:
        lines.append("Not compiled while planning: the figures are predicted.")
    elif not compiled.autotuned:
        lines.append(f"Compiled for an absent {compiled.target}: without autotuning and its scratch memory.")
    return lines


def _bytes_row(label: str, before: int | None, after: int | None) -> str:
    change = format_change(after, before) if before is not None and after is not None else ""
    return _row(label, *("–" if count is None else format_bytes(count) for count in (before, after)), change)


def _row(label: str, before: str, after: str, change: str) -> str:
    return f"{label:<42}{before:>14}{after:>14}{change:>9}".rstrip()


# What is saved, what is recomputed


def _saved(explanation: Explanation) -> list[str]:
    there = [buffer for buffer in explanation.plain.at(explanation.plain.peak_position) if buffer.size]
    lines = [
        f"Saved: {format_count(len(explanation.names), 'tensor')}, "
        f"{format_bytes(explanation.plan.predicted.saved_bytes)}   (with everything saved {len(there)} are live at the "
        f"peak, {format_bytes(explanation.plain.peak)})"
    ]
    for reason in Reason:
        groups = [group for group in explanation.saved if group.reason is reason]
        if groups:
            lines.extend(_saved_for(reason, groups))
    return lines


def _saved_for(reason: Reason, groups: list[Group]) -> list[str]:
    count, total = sum(group.count for group in groups), sum(group.total for group in groups)
    lines = textwrap.wrap(f"{count} ({format_bytes(total)}) {reason.value}", WIDTH, initial_indent="  ")
    for group in groups[:MOST_GROUPS]:
        spared = f"   spares {format_flops(group.flops)}" if reason is Reason.DEAR and group.flops else ""
        times = f"{group.count} ×" if group.count > 1 else ""
        lines.append(f"    {times:>5}{format_bytes(group.size):>11}  {group.name}{spared}")
    rest = groups[MOST_GROUPS:]
    if rest:
        tensors = format_count(sum(group.count for group in rest), "smaller tensor")
        lines.append(f"    {'…':>5}{format_bytes(sum(group.total for group in rest)):>11}  in {tensors}")
    return lines


def _recomputed(explanation: Explanation) -> list[str]:
    predicted, sizes = explanation.plan.predicted, explanation.segments
    lines = [
        f"Recomputed: {format_count(len(sizes), 'segment')} of {_span(sizes)} operations, "
        f"{format_flops(predicted.extra_flops)}, {_percent(predicted.extra_flops, predicted.flops)} of the step's"
    ]
    for total in explanation.repeated[:MOST_PRIMITIVES]:
        share = _percent(round(total.seconds, 12), predicted.extra_seconds)
        flops = format_flops(total.flops) if total.flops else ""
        lines.append(f"    {total.count:>5} × {total.primitive:<28}{flops:>14}   {share:>7} of the extra time")
    rest = explanation.repeated[MOST_PRIMITIVES:]
    if rest:
        share = _percent(sum(total.seconds for total in rest), predicted.extra_seconds)
        others = f"of {format_count(len(rest), 'other primitive')}"
        lines.append(f"    {sum(total.count for total in rest):>5} × {others:<42}   {share:>7} of the extra time")
    return lines


def _span(sizes: list[int]) -> str:
    return f"{min(sizes):,}" if min(sizes) == max(sizes) else f"{min(sizes):,} to {max(sizes):,}"


# Curves


def _curves(explanation: Explanation) -> list[str]:
    before, after = explanation.before, explanation.after
    top, seconds = max(before.peak, after.peak), max(before.seconds, after.seconds)
    lines = ["Live memory over the step (predicted temporary memory over estimated time; ▼ is the peak)"]
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


def _closing(explanation: Explanation) -> list[str]:
    plan = explanation.plan
    spent = [f"{label} {format_seconds(explanation.seconds[stage])}" for stage, label in _stages(explanation)]
    lines = textwrap.wrap(f"Planning took: {', '.join(spent) or 'no time that was recorded'}.", WIDTH)
    if plan.note and not plan.is_plain:
        lines += textwrap.wrap(f"Note: {plan.note}.", WIDTH)
    return lines


def _stages(explanation: Explanation) -> list[tuple[str, str]]:
    known = [(stage, label) for stage, label in STAGES.items() if stage in explanation.seconds]
    return [*known, *((stage, stage) for stage in explanation.seconds if stage not in STAGES)]
