"""Budgets of 0.3 to 0.9 of the plain step's memory, network by network: each holds in the compiled step or is refused.

    python -m benchmarks.budgets                                # all rows that are not finished, hours
    python -m benchmarks.budgets --target cpu --network gan     # one of them
    python -m benchmarks.budgets --again

The rows are those of `benchmarks.predicted_memory` for the CPU and an H200. Each row is planned and compiled in a
process of its own, and each budget is kept in `benchmarks/results/budgets.json` as soon as it is there, so that a run
can be stopped and taken up again; `budgets.md` is the same as a table. Nothing runs and nothing is allocated.

A refusal counts as right where the budget is below 1.02 × the least temporary memory that any schedule of ours ever had
for the network on that target, in this benchmark or in `benchmarks.predicted_memory`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import results_file
from benchmarks.pages import NETWORK, megabytes, page
from benchmarks.predicted_memory import ROWS, Row, load_step
from benchmarks.results_file import RESULTS, load

BUDGETS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
TARGETS = ("cpu", "h200")
CLOSE = 1.02  # times the least that was ever measured: below, a refusal is right
BUDGET_ROWS = tuple(row for row in ROWS if row.target in TARGETS)


class Compiler:
    """Compiles a network's schedules, the same one once, and remembers what they need."""

    def __init__(self) -> None:
        self.least: int | None = None  # temporary bytes of ours
        self.compilations = 0
        self._known: dict[Any, Any] = {}

    def __call__(self, prepared: Any, solution: Any) -> Any:
        """`remat_opt.planner.decision.Measure`."""
        from remat_opt.callable.compiling import compile_candidate

        key = None if solution is None else (prepared, solution.schedule)
        if key in self._known:
            return self._known[key]
        figures = compile_candidate(prepared, solution)
        self._known[key] = figures
        self.compilations += 1
        if solution is not None:
            self.least = min(figures.temp_bytes, self.least or figures.temp_bytes)
        return figures


def measure_row(row: Row, budgets: list[float]) -> Iterator[dict[str, Any]]:
    """What becomes of each budget, in this process.

    Yields:
        `plain_bytes`, `budget`, `least_bytes` so far, and `temp_bytes` with its `extra_flops`, or `refused_bytes`, what
        the refusal says would have been kept.
    """
    import remat_opt
    from remat_opt.planner.planning import decide
    from remat_opt.planner.settings import check_settings

    given, args, kwargs, options = load_step(row)
    step = remat_opt.optimize(given, target=row.target, **options)
    prepared = step.ask(lambda inner, args, kwargs: inner.prepare(*args, **kwargs), args, kwargs)
    compiler = Compiler()
    plain = compiler(prepared, None)
    for budget in budgets:
        settings = check_settings(target=row.target, solver="auto", budget=budget, verify=True)
        started, compiled = time.perf_counter(), compiler.compilations
        try:
            plan = decide(prepared, settings, compiler).plan
            figures = plan.measured
            assert figures is not None, "a budget is a promise"
            found = {
                "temp_bytes": figures.temp_bytes,
                "predicted_bytes": plan.predicted.peak_bytes,
                "extra_flops": round(plan.predicted.extra_flops / plan.predicted.flops, 5),
                "extra_time": round(plan.predicted.extra_seconds / plan.predicted.seconds, 5),
            }
        except remat_opt.InfeasibleBudget as refusal:
            found = {"refused_bytes": refusal.least_bytes}
        yield {
            "plain_bytes": plain.temp_bytes,
            "budget": budget,
            "least_bytes": compiler.least,
            "found": {
                **found,
                "compilations": compiler.compilations - compiled,
                "seconds": round(time.perf_counter() - started, 1),
                "jax_version": plain.jax_version,
            },
        }


def least_ever(key: str, result: dict[str, Any]) -> int:
    """The least temporary memory in bytes that a schedule of ours had for a network on a target."""
    predictions = load(RESULTS / "predicted_memory.json").get(key, {}).get("measured", {}).get("optimized")
    figures = [result["least_bytes"], predictions and predictions["temp_bytes"]]
    figures += [found["temp_bytes"] for found in result["budgets"].values() if "temp_bytes" in found]
    return min(figure for figure in (*figures, result["plain_bytes"]) if figure is not None)


def is_right(key: str, result: dict[str, Any], budget: str) -> bool:
    """Whether a budget holds, or was refused because nothing of ours ever kept it."""
    found, allowed = result["budgets"][budget], float(budget) * result["plain_bytes"]
    if "temp_bytes" in found:
        return found["temp_bytes"] <= allowed
    return allowed < CLOSE * least_ever(key, result)


def to_markdown(results: dict[str, dict]) -> str:
    """All results as a table."""
    every = [(key, budget) for key, result in results.items() for budget in map(str, BUDGETS)]
    every = [(key, budget) for key, budget in every if budget in results[key]["budgets"]]
    wrong = sum(not is_right(key, results[key], budget) for key, budget in every)
    compilations = sum(results[key]["budgets"][budget]["compilations"] for key, budget in every)
    summary = f"{len(every)} budgets, {wrong} neither held nor rightly refused; {compilations} compilations."
    return page(
        "Budgets",
        "Temporary memory of the compiled step as a part of the plain one's (both with our compiler options), and "
        "extra FLOPs as predicted, for each budget; – where it was refused. Written by `python -m benchmarks.budgets`; "
        "figures for an absent GPU are without autotuning.",
        [NETWORK, "target", "plain, MB", *map(str, BUDGETS), "least ever"],
        (_cells(key, result) for key, result in results.items()),
        summary if every else "",
    )


def _cells(key: str, result: dict[str, Any]) -> list[str]:
    """One line of the table."""
    row, plain = Row(*result["row"]), result["plain_bytes"]
    cells = [row.name, row.target, megabytes(plain)]
    for budget in map(str, BUDGETS):
        found = result["budgets"].get(budget)
        if found is None:
            cells.append("")
            continue
        cells.append("–" if "refused_bytes" in found else f"{found['temp_bytes'] / plain:.2f}")
        cells[-1] += "" if "refused_bytes" in found else f" {found['extra_flops']:+.1%}"
        cells[-1] += "" if is_right(key, result, budget) else " **wrong**"
    return [*cells, f"{least_ever(key, result) / plain:.2f}"]


def save(results: dict[str, dict], file: Path) -> None:
    """Write results, and the table beside them, in the order of the rows."""
    results_file.save(file, results, (row.key for row in BUDGET_ROWS), to_markdown)


def run_in_process(row: Row, budgets: list[float]) -> Iterator[dict[str, Any]]:
    """`measure_row` in a process of its own; what comes before that fails is kept."""
    command = [sys.executable, "-m", "benchmarks.budgets", "--row", json.dumps([row, budgets])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        yield from map(json.loads, process.stdout)
        said = process.stderr.read()
    if process.returncode:
        print(said[-2000:], file=sys.stderr)


def add(results: dict[str, dict], row: Row, message: dict[str, Any]) -> dict[str, dict]:
    """The results with what `measure_row` found of one budget."""
    known = results.get(row.key, {"row": list(row), "budgets": {}, "least_bytes": None})
    least = [bytes_ for bytes_ in (known["least_bytes"], message["least_bytes"]) if bytes_ is not None]
    known = {
        **known,
        "plain_bytes": message["plain_bytes"],
        "least_bytes": min(least, default=None),
        "budgets": {**known["budgets"], str(message["budget"]): message["found"]},
    }
    return {**results, row.key: known}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", help="this network only")
    parser.add_argument("--target", choices=TARGETS, help="this target only")
    parser.add_argument("--again", action="store_true", help="also what has a result")
    parser.add_argument("--results", type=Path, default=RESULTS / "budgets.json")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        row, budgets = json.loads(options.row)
        out, sys.stdout = sys.stdout, sys.stderr  # whatever else is printed is no answer
        for message in measure_row(Row(*row), budgets):
            print(json.dumps(message), file=out, flush=True)
        return
    for row in BUDGET_ROWS:
        known = load(options.results).get(row.key, {}).get("budgets", {})
        budgets = [budget for budget in BUDGETS if options.again or str(budget) not in known]
        if options.network not in (None, row.network) or options.target not in (None, row.target) or not budgets:
            continue
        print(row.key, flush=True)
        for message in run_in_process(row, budgets):
            results = add(load(options.results), row, message)
            save(results, options.results)
            budget = str(message["budget"])
            verdict = "" if is_right(row.key, results[row.key], budget) else "  WRONG"
            print(f"  {budget}: {message['found']}{verdict}", flush=True)
    print(to_markdown(load(options.results)))


if __name__ == "__main__":
    main()
