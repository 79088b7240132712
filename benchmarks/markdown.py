"""Results as Markdown: memory and FLOPs of all variants, ours in detail, and the source's own figures beside ours."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.results_file import Results
from benchmarks.tables import BY_FLOPS, OURS, POLICIES, SPLIT, TITLES, TUNED, VARIANTS, Row

Result = dict[str, Any]

# Ours with the least memory at about one more forward pass; what is asked of it is in the summary.
LEAST = "ours"
BY_JAX = ("nn.remat", *POLICIES)
HEADINGS = {"chen": "√n segments", **{name: f"`{name}`" for name in ("nn.remat",)}}


def to_markdown(table: str, target: str, rows: Sequence[Row], results: Results) -> str:
    """All results of a table for a target.

    Args:
        table: its name.
        target: name of the target.
        rows: of the table.
        results: of its rows; those without any are left out.
    """
    shown = [row for row in rows if row.key in results]
    measured = dict.fromkeys(name for row in shown for name in results[row.key])
    variants = [*(name for name in VARIANTS if name in measured), *(name for name in measured if name not in VARIANTS)]
    lines = [
        f"# {TITLES[table]}, compiled for {target}",
        "",
        f"Written by `python -m benchmarks.run {table} --target {target}`. Steps are float32, SGD with momentum, state "
        "donated; MB are 10^6 bytes of temporary memory, as the compiler reports it. FLOPs are counted on the written "
        "jaxpr, apart from the package. Figures for an absent GPU are without autotuning and its scratch memory.",
        "",
        *_summary(shown, results),
        "## Temporary memory, MB",
        "",
        *_grid(["network", *map(_heading, variants)], [_memory_row(row, variants, results) for row in shown]),
        "",
        "## Extra FLOPs",
        "",
        *_grid(["network", *map(_heading, variants)], [_flops_row(row, variants, results) for row in shown]),
        "",
        *_times(shown, variants, results),
        *_least(shown, results),
        *_beside_their_programs(shown, results),
        *_failures(shown, results),
    ]
    return "\n".join(lines) + "\n"


OURS_COLUMNS = [
    *("network", "temp, MB", "predicted, MB", "error", "cut", "physical peak, MB", "cut", "extra FLOPs"),
    *("planning, s", "compiling, s", "step time", "published cut", "published MB", "published time", "jax"),
]


def cut_of(results: dict[str, Result], name: str = "temp_bytes") -> float | None:
    """The part of the plain step's memory that ours saves; None where one of the two is not there."""
    plain, ours = (results.get(variant, {}).get(name) for variant in ("plain", LEAST))
    return 1 - ours / plain if plain and ours is not None else None


def below_our_frontier(results: dict[str, Result]) -> list[str]:
    """The stock policies and the `nn.remat` by hand that no variant of ours matches, in memory and FLOPs at once."""
    ours = [found for name, found in results.items() if _is_ours(name) and "temp_bytes" in found]
    return [
        name
        for name in BY_JAX
        if "temp_bytes" in results.get(name, {})
        and not any(
            mine["temp_bytes"] <= results[name]["temp_bytes"] and mine["extra_flops"] <= results[name]["extra_flops"]
            for mine in ours
        )
    ]


def _is_ours(variant: str) -> bool:
    """Ours, at any budget; our frontier ends at the step as it was given."""
    return variant.partition("@")[0] in (*OURS, "plain")


def _summary(rows: Sequence[Row], results: Results) -> list[str]:
    cuts = {row: cut for row in rows if (cut := cut_of(results[row.key])) is not None}
    if not cuts:
        return []
    lines = [f"- Ours saves {statistics.mean(cuts.values()):.0%} on average over {len(cuts)} of {len(rows)} rows."]
    asked = [row for row in cuts if row.published is not None]
    if asked:
        reached = [row for row in asked if row.published and cuts[row] >= row.published.cut]
        lines.append(f"- A cut at least as large as the published one in {len(reached)} of {len(asked)} rows.")
    in_bytes = [row for row in asked if row.published and row.published.optimized_mb]
    if in_bytes:
        below = [row for row in in_bytes if results[row.key][LEAST]["temp_bytes"] / 1e6 < _published_mb(row)]
        lines.append(f"- Less memory than the published one, in MB, in {len(below)} of {len(in_bytes)} rows.")
    flops = [results[row.key][LEAST]["extra_flops"] for row in cuts]
    lines.append(f"- Extra FLOPs: {statistics.mean(flops):.0%} on average, {max(flops):.0%} at most.")
    unmatched = {row.key: names for row in rows if (names := below_our_frontier(results[row.key]))}
    compared = [row for row in rows if any(name in BY_JAX for name in results[row.key])]
    lines.append(
        f"- In {len(compared) - len(unmatched)} of {len(compared)} rows `nn.remat` and each stock policy measured are "
        "matched, in memory and FLOPs at once, by a compiled variant of ours."
    )
    lines += [f"- Not matched so, {key}: {', '.join(names)}." for key, names in unmatched.items()]
    return [*lines, ""]


def _published_mb(row: Row) -> float:
    return row.published.optimized_mb if row.published and row.published.optimized_mb else 0.0


def _heading(variant: str) -> str:
    name, _, budget = variant.partition("@")
    if name == SPLIT:
        chunks, _, budget = budget.partition("@")
        return f"{chunks} chunks, {float(budget):.0%} of plain" if budget else f"{chunks} chunks"
    if name in (*OURS, TUNED) and budget:
        heading = {BY_FLOPS: "ours by FLOPs", TUNED: "timed"}.get(name, "ours")
        return f"{heading}, {float(budget):.0%} of plain" if _is_fraction(budget) else f"{heading}, as {budget}"
    return HEADINGS.get(variant, f"`{variant}`" if "_" in variant else variant)


def _is_fraction(budget: str) -> bool:
    return budget.replace(".", "").isdigit()


def _grid(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    rule = ["---", *("---:" for _ in header[1:])]
    return ["| " + " | ".join(cells) + " |" for cells in (header, rule, *rows)]


def _memory_row(row: Row, variants: Sequence[str], results: Results) -> list[str]:
    return [row.key, *(_memory(results[row.key].get(variant)) for variant in variants)]


def _times(rows: Sequence[Row], variants: Sequence[str], results: Results) -> list[str]:
    """Times of steps that ran, of all variants."""
    timed = [name for name in variants if any("step_time_ratio" in results[row.key].get(name, {}) for row in rows)]
    if not timed:
        return []
    said = "## Time of a step, as a multiple of the plain step's"
    return [said, "", *_grid(["network", *map(_heading, timed)], [_times_row(row, timed, results) for row in rows]), ""]


def _times_row(row: Row, variants: Sequence[str], results: Results) -> list[str]:
    found = (results[row.key].get(variant, {}).get("step_time_ratio") for variant in variants)
    return [row.key, *("–" if ratio is None else f"{ratio:.2f}" for ratio in found)]


def _least(rows: Sequence[Row], results: Results) -> list[str]:
    """Ours with the least memory, in detail."""
    found = [_our_row(row, results[row.key]) for row in rows if LEAST in results[row.key]]
    heading = "## Ours, the least memory for at most one more forward pass"
    return [heading, "", *_grid(OURS_COLUMNS, found)] if found else []


def _flops_row(row: Row, variants: Sequence[str], results: Results) -> list[str]:
    found = (results[row.key].get(variant, {}).get("extra_flops") for variant in variants)
    return [row.key, *("–" if flops is None else f"{flops + 0.0:.1%}" for flops in found)]


def _memory(result: Result | None) -> str:
    if result is None:
        return "–"
    if "error" in result:
        return "failed"
    if "infeasible" in result:
        return "cannot be done"
    if "temp_bytes" not in result:
        needed = result.get("needed_bytes")
        return "does not fit" if needed is None else f"does not fit: {needed / 1e6:.0f}"
    return f"{result['temp_bytes'] / 1e6:.0f}"


def _our_row(row: Row, results: dict[str, Result]) -> list[str]:
    ours, published = results[LEAST], row.published
    temp, predicted, physical = (
        ours.get(name) for name in ("temp_bytes", "predicted_peak_bytes", "physical_peak_bytes")
    )
    return [
        row.key,
        _memory(ours),
        _shown(predicted, 1e-6),
        f"{predicted / temp - 1:+.0%}" if temp and predicted is not None else "–",
        _percent(cut_of(results)),
        _shown(physical, 1e-6),
        _percent(cut_of(results, "physical_peak_bytes")),
        _percent(ours.get("extra_flops")),
        _shown(ours.get("plan_seconds"), digits=1),
        _shown(ours.get("compile_seconds"), digits=1),
        f"{ours['step_time_ratio']:.2f}×" if "step_time_ratio" in ours else "–",
        _percent(published and published.cut),
        _shown(published and published.optimized_mb),
        _percent(published and published.extra_time, "+"),
        ours.get("jax_version", "–"),
    ]


def _beside_their_programs(rows: Sequence[Row], results: Results) -> list[str]:
    """Ours as compiled, and what the sources' own programs say of their own graphs."""
    grid = []
    for row in rows:
        theirs = row.published
        if theirs is None or theirs.in_theory_mb is None or LEAST not in results[row.key]:
            continue
        plain, least = theirs.in_theory_mb
        ours = [row.key, _memory(results[row.key][LEAST]), _percent(cut_of(results[row.key]))]
        grid.append(
            [*ours, _shown(plain), _shown(least), _percent(1 - least / plain), _shown(theirs.by_partitioner_mb)]
        )
    if not grid:
        return []
    said = (
        "Feng & Huang's solver says what checkpoints and the largest segment of its graph take, and ignores gradients; "
        "the other is the lowest peak of PyTorch 2.13's min-cut partitioner at any `activation_memory_budget`, by a "
        "liveness walk over its graphs with gradients and without parameters. Ours is what the compiler allocates."
    )
    columns = ["network", "ours, MB", "cut", "their plain, MB", "their solver, MB", "cut", "PyTorch's partitioner, MB"]
    return ["", "## Beside the sources' own programs", "", said, "", *_grid(columns, grid)]


def _shown(value: float | None, scale: float = 1.0, digits: int = 0) -> str:
    return "–" if value is None else f"{value * scale:.{digits}f}"


def _percent(value: float | None, sign: str = "") -> str:
    return "–" if value is None else f"{value:{sign}.0%}"


def _failures(rows: Sequence[Row], results: Results) -> list[str]:
    failures = [
        f"- {row.key}, {variant}: {result['error']}"
        for row in rows
        for variant, result in results[row.key].items()
        if "error" in result
    ]
    return ["", "## Failed", "", *failures] if failures else []
