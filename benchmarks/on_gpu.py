"""Steps that really run, on the GPU that is attached: their time, what the allocator holds, the largest batch.

    python -m benchmarks.on_gpu plan --table feng_huang --rows resnet50    # anywhere: plans by the absent compiler
    python -m benchmarks.on_gpu run --table feng_huang --rows resnet50     # on the GPU, with those plans
    python -m benchmarks.on_gpu batch --rows resnet50 --batches plain=280,320 nn.remat=800,900 ours=1600,1800

Planning needs no GPU, so it is apart: what a GPU is lent for is spent on it. Plans are for the JAX that made them. Each
network runs in a process of its own, in which all its variants take turns. `batch` tries numbers of examples in a part
of the GPU's memory, each in a process of its own, several at once. Results are kept in `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.gpu_row import Request, plan_file
from benchmarks.pages import page
from benchmarks.results_file import RESULTS, Results, file_of, load, save
from benchmarks.tables import TABLES, Row, is_planned

ROOT = Path(__file__).resolve().parent.parent
FILE = RESULTS / "on_gpu.json"
BATCHES = RESULTS / "on_gpu_batches.json"
VARIANTS = ("plain", "nn.remat", "dots_saveable", "ours", "ours@nn.remat", "ours@dots_saveable")


def plan(table: str, rows: Sequence[Row], variants: Sequence[str], target: str, folder: Path) -> None:
    """Plan each of our variants in a process of its own, with the budgets of the kept table for the target."""
    folder.mkdir(parents=True, exist_ok=True)
    for row in rows:
        for variant in filter(is_planned, variants):
            file = plan_file(folder, row, variant)
            if not file.exists():
                command = [
                    sys.executable,
                    "-m",
                    "benchmarks.on_gpu",
                    "plan-one",
                    "--table",
                    table,
                    "--rows",
                    row.network,
                ]
                options = ["--variants", variant, "--target", target, "--plans", str(folder)]
                done = subprocess.run([*command, *options], cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"})
                print(row.key, variant, "planned" if done.returncode == 0 else "failed", flush=True)


def plan_one(table: str, row: Row, variant: str, target: str, folder: Path) -> None:
    """Plan one variant in this process."""
    from benchmarks.variants import write

    known = load(file_of(table, target)).get(row.key, {})
    written = write(row, variant, target, known)
    assert written.plan is not None
    written.plan.save(plan_file(folder, row, variant))


def ask(request: Request, memory_fraction: float | None = None, time_limit: float = 600.0) -> Iterator[dict[str, Any]]:
    """The messages of a process of `benchmarks.gpu_row`; an error for each variant where it dies.

    Args:
        request: what to run.
        memory_fraction: of the GPU's memory that JAX takes; None for its default.
        time_limit: seconds for the process.
    """
    environment = dict(os.environ)
    if memory_fraction is not None:
        environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(memory_fraction)
    command, asked = [sys.executable, "-m", "benchmarks.gpu_row"], json.dumps(request._asdict())
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, input=asked, capture_output=True, encoding="utf-8", timeout=time_limit
        )
        answers, said = list(map(json.loads, done.stdout.splitlines())), done.stderr.strip().splitlines()[-1:]
    except subprocess.TimeoutExpired:
        answers, said = [], [f"took more than {time_limit:.0f} s"]
    yield from answers
    for variant in set(request.variants) - {answer["variant"] for answer in answers}:
        yield {"variant": variant, "result": {"error": f"its process died: {said[0][:200] if said else ''}"}}


def run(table: str, rows: Sequence[Row], variants: Sequence[str], options: argparse.Namespace) -> None:
    """Run what has no result yet."""
    file = options.results / FILE.name
    for row in rows:
        found = load(file).get(row.key, {})
        if not options.again and all("step_seconds" in found.get(variant, {}) for variant in variants):
            continue
        request = Request(table, row.key, list(variants), str(options.plans), options.turns)
        answers = {answer["variant"]: answer["result"] for answer in ask(request, time_limit=options.time_limit)}
        save(file, {**load(file), row.key: {**found, **answers}}, to_markdown=to_markdown)
        for variant, result in answers.items():
            print(row.key, variant, json.dumps(result), flush=True)


Result = dict[str, Any]
COLUMNS = ["network", "step", "absent compiler, MB", "compiler, MB", "allocator, MB", "of plain", "ms", "times plain"]


def to_markdown(results: Results) -> str:
    """The page of the steps that ran."""
    absent = {key: found for table in TABLES for key, found in load(file_of(table, "h200")).items()}
    lines = [
        _cells(key, name, result, found.get("plain", {}), absent.get(key, {}).get(name, {}))
        for key, found in results.items()
        for name, result in found.items()
    ]
    devices = {f"{each['device']}, jax {each['jax_version']}" for row in results.values() for each in row.values()}
    about = (
        f"Written by `python -m benchmarks.on_gpu run` on: {'; '.join(sorted(devices))}. Steps are float32, SGD with "
        "momentum, state donated, at the batches of the tables. Memory is the physical peak: temporary memory, "
        "arguments and outputs, what is aliased once; by the compiler for an absent H200 (as in the tables), by the "
        "compiler beside the GPU, which tries kernels, and by the allocator while two steps ran alone (–: choosing "
        "kernels took more before). Time is the median of turns, all variants taking turns in one process."
    )
    return page("Steps that ran on a GPU", about, COLUMNS, lines)


def _cells(key: str, name: str, result: Result, plain: Result, absent: Result) -> list[str]:
    if "error" in result:
        return [key, name, *("–" for _ in COLUMNS[2:-1]), result["error"][:80]]
    peak, seconds = result["physical_peak_bytes"], result["step_seconds"][1]
    sizes = (absent.get("physical_peak_bytes"), peak, result["allocated_bytes"])
    return [
        *(key, name, *("–" if size is None else f"{size / 1e6:.0f}" for size in sizes)),
        f"{peak / plain['physical_peak_bytes']:.0%}" if "step_seconds" in plain else "–",
        f"{seconds * 1e3:.1f}",
        f"{seconds / plain['step_seconds'][1]:.3f}" if "step_seconds" in plain else "–",
    ]


def run_batches(
    table: str, row: Row, variant: str, batches: Sequence[int], options: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """What becomes of a variant at each of these batches, several tries at once, each in a part of the GPU's memory."""

    def one(batch: int) -> dict[str, Any]:
        request = Request(table, row.key, [variant], str(options.plans), 2, batch)
        (answer,) = ask(request, memory_fraction=options.memory_fraction, time_limit=options.time_limit)
        print(row.key, variant, batch, json.dumps(answer["result"]), flush=True)
        return answer["result"]

    with ThreadPoolExecutor(options.at_once) as pool:
        return {str(batch): result for batch, result in zip(batches, pool.map(one, batches), strict=True)}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("plan", "plan-one", "run", "batch"))
    parser.add_argument("--table", choices=sorted(TABLES), default="feng_huang")
    parser.add_argument("--rows", help="networks, with commas between them; default: all")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="with commas; default: %(default)s")
    parser.add_argument("--target", default="h200", help="to plan for; default: %(default)s")
    parser.add_argument("--plans", type=Path, default=ROOT / ".plans", help="folder of the plans")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--turns", type=int, default=8, help="turns of each variant; default: %(default)s")
    parser.add_argument("--time-limit", type=float, default=600.0, help="seconds for a process; default: %(default).0f")
    parser.add_argument("--batches", nargs="+", help="to try, for each variant; one network only")
    parser.add_argument(
        "--memory-fraction", type=float, default=0.16, help="of the GPU's memory, for one try of `batch`"
    )
    parser.add_argument("--at-once", type=int, default=5, help="tries of `batch`; default: %(default)s")
    parser.add_argument("--again", action="store_true", help="also what has a result")
    options = parser.parse_args()
    wanted = options.rows.split(",") if options.rows else [row.network for row in TABLES[options.table]]
    rows = [row for row in TABLES[options.table] if row.network in wanted]
    variants = options.variants.split(",")
    if options.what == "plan":
        plan(options.table, rows, variants, options.target, options.plans)
    elif options.what == "plan-one":
        plan_one(options.table, rows[0], variants[0], options.target, options.plans)
    elif options.what == "run":
        run(options.table, rows, variants, options)
    else:
        file = options.results / BATCHES.name
        for tried in options.batches:
            variant, _, batches = tried.partition("=")
            found = run_batches(options.table, rows[0], variant, list(map(int, batches.split(","))), options)
            known = load(file).get(rows[0].key, {})
            results = {**known, variant: {**known.get(variant, {}), **found}}
            save(file, {**load(file), rows[0].key: results})


if __name__ == "__main__":
    main()
