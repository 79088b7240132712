"""Steps that really run, on the GPU that is attached: their time, what the allocator holds, the largest batch.

    python -m benchmarks.on_gpu plan --table feng_huang --rows resnet50    # anywhere: plans by the absent compiler
    python -m benchmarks.on_gpu plan --target attached --rows resnet50     # or on the GPU, checked by its own compiler
    python -m benchmarks.on_gpu run --table feng_huang --rows resnet50     # on the GPU, with those plans
    python -m benchmarks.on_gpu plan --session                             # anywhere: plans of the most telling steps
    python -m benchmarks.on_gpu run --session --minutes 12                 # on the GPU: these, as far as the time goes
    python -m benchmarks.on_gpu batch --rows resnet50 --batches plain=280,320 nn.remat=800,900 ours=1600,1800

Planning needs no GPU, so it is apart: what a GPU is lent for is spent on it. Plans are for the JAX that made them.
Beside the GPU each network is planned in a process of its own, all at once, and what another variant takes is that
compiler's word. Each network runs in a process of its own, in which all its variants take turns. `batch` tries numbers
of examples in a part of the GPU's memory, each in a process of its own, several at once. Results are kept in
`benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu_row import Request, compile_all, plan_file
from benchmarks.pages import page
from benchmarks.results_file import RESULTS, Results, file_of, load, save
from benchmarks.row import said_of
from benchmarks.tables import TABLES, TUNED, Row, is_planned
from remat_opt.targets import attached_target

ROOT = Path(__file__).resolve().parent.parent
FILE = RESULTS / "on_gpu.json"
BATCHES = RESULTS / "on_gpu_batches.json"
VARIANTS = ("plain", "nn.remat", "dots_saveable", "ours", "ours@nn.remat", "ours@dots_saveable")
ATTACHED = "attached"
_BY_HAND = ("plain", "nn.remat")
SESSION = {
    "resnet50": (*_BY_HAND, "dots_saveable", "ours@nn.remat", "ours@0.5", "ours@0.3", "offload@0.3", "ours"),
    "gpt_1b_scan": (*_BY_HAND, "ours@nn.remat", "ours@0.5", "ours@0.1", "offload@0.1", "ours"),
    "lstm_scan": ("nn.remat", "ours@nn.remat", "ours"),
    "gpt_scan": (*_BY_HAND, "dots_saveable", "ours@nn.remat", "ours@0.5", "ours@0.3", "offload@0.3", "tuned@0.3"),
    "vit_b16": (*_BY_HAND, "ours@nn.remat", "ours@0.3", "offload@0.3", "split@8", "ours"),
    "unet": (*_BY_HAND, "dots_saveable", "ours@nn.remat", "ours@0.3", "split@8"),
    "vgg16": (*_BY_HAND, "ours@nn.remat", "split@16", "tuned@0.5"),
}
"""What a GPU that is lent for minutes is to tell, the most telling network first."""


class Listed(NamedTuple):
    """A row, with the name of its table and what is to be planned or run of it."""

    table: str
    row: Row
    variants: Sequence[str]


def session() -> list[Listed]:
    """The rows of `SESSION`, in its order."""
    found = {row.network: (table, row) for table, rows in TABLES.items() for row in rows if not row.small}
    return [Listed(*found[network], variants) for network, variants in SESSION.items()]


def plan(rows: Sequence[Listed], options: argparse.Namespace) -> None:
    """Plan each network in a process of its own; on an attached GPU, which they share, several at once."""
    options.plans.mkdir(parents=True, exist_ok=True)
    is_attached = options.target == ATTACHED
    given = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if is_attached else {"JAX_PLATFORMS": "cpu"}

    def one(listed: Listed) -> None:
        table, row, variants = listed
        command = [sys.executable, "-m", "benchmarks.on_gpu", "plan-row", "--table", table, "--rows", row.network]
        command += ["--variants", ",".join(variants), "--plans", str(options.plans), "--target", options.target]
        try:
            subprocess.run(command, cwd=ROOT, env={**os.environ, **given}, timeout=options.time_limit)
        except subprocess.TimeoutExpired:
            print(row.key, f"took more than {options.time_limit:.0f} s", flush=True)

    with ThreadPoolExecutor(options.at_once if is_attached else 1) as pool:
        list(pool.map(one, rows))


def plan_row(table: str, row: Row, variants: Sequence[str], target: str, folder: Path) -> None:
    """Plan what has no plan yet of a network's variants, in this process, one after the other.

    Args:
        table: one of `TABLES`, whose kept results for the target a budget may speak of.
        row: of it.
        variants: see `benchmarks.variants`; on an attached device those that are not planned are compiled first, and
            budgets speak of these.
        target: name of the device, or `ATTACHED`.
        folder: of the plans.
    """
    from benchmarks.variants import write

    here = [variant for variant in filter(is_planned, variants) if not variant.startswith(TUNED)]  # that is on the GPU
    planned = [variant for variant in here if not plan_file(folder, row, variant).exists()]
    known = load(file_of(table, target)).get(row.key, {})
    if target == ATTACHED:
        target = attached_target().name
        ready, failed = compile_all(row, [variant for variant in variants if not is_planned(variant)], None)
        known = {variant: each.figures for variant, each in ready.items()}
        print(row.key, json.dumps({**known, **failed}), flush=True)
    for variant in planned:
        started = time.perf_counter()
        try:
            written = write(row, variant, target, known)
        except Exception as error:  # one variant's failure is told, and the others are planned
            print(row.key, variant, said_of(error), flush=True)
            continue
        assert written.plan is not None
        written.plan.save(plan_file(folder, row, variant))
        print(row.key, variant, f"planned in {time.perf_counter() - started:.0f} s", flush=True)


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
    for variant in request.variants[len(answers) :]:
        yield {"variant": variant, "result": {"error": f"its process died: {said[0][:200] if said else ''}"}}


def run(rows: Sequence[Listed], options: argparse.Namespace) -> None:
    """Run what has no result yet. Several networks compile at once, and run one after the other when all have."""
    file, end = options.results / FILE.name, time.monotonic() + 60 * options.minutes
    fraction = None if min(options.at_once, len(rows)) == 1 else options.memory_fraction

    def one(listed: Listed) -> tuple[Row, dict[str, Any]]:
        table, row, variants = listed
        request = Request(table, row.key, [*variants], str(options.plans), options.turns)
        left = min(options.time_limit, end - time.monotonic())
        answers = ask(request, memory_fraction=fraction, time_limit=left) if left > 0 else ()
        return row, {answer["variant"]: answer["result"] for answer in answers}

    def is_wanted(listed: Listed) -> bool:
        known = load(file).get(listed.row.key, {})
        return options.again or not all("step_seconds" in known.get(variant, {}) for variant in listed.variants)

    with ThreadPoolExecutor(options.at_once) as pool:
        running = [pool.submit(one, listed) for listed in rows if is_wanted(listed)]
        for done in as_completed(running):
            row, answers = done.result()
            results = load(file)
            save(file, {**results, row.key: {**results.get(row.key, {}), **answers}}, to_markdown=to_markdown)
            for variant, result in answers.items():
                print(row.key, variant, json.dumps(result), flush=True)


Result = dict[str, Any]
COLUMNS = [
    "network",
    "step",
    "predicted, MB",
    "absent compiler, MB",
    "compiler, MB",
    "allocator, MB",
    "of plain",
    "ms",
    "times plain",
]


def to_markdown(results: Results) -> str:
    """The page of the steps that ran."""
    absent = {key: found for table in TABLES for key, found in load(file_of(table, "h200")).items()}
    lines = [
        _cells(key, name, result, found.get("plain", {}), absent.get(key, {}).get(name, {}))
        for key, found in results.items()
        for name, result in found.items()
    ]
    devices = {
        f"{each['device']}, jax {each['jax_version']}"
        for row in results.values()
        for each in row.values()
        if "device" in each
    }
    about = (
        f"Written by `python -m benchmarks.on_gpu run` on: {'; '.join(sorted(devices))}. Steps are float32, SGD with "
        "momentum, state donated, at the batches of the tables. Memory is the physical peak: temporary memory, "
        "arguments and outputs, what is aliased once; as our model predicts it, by the compiler for an absent H200 (as "
        "in the tables), by the "
        "compiler beside the GPU, which tries kernels, and by the allocator while two steps ran alone (–: choosing "
        "kernels took more before). Time is the median of turns, all variants taking turns in one process."
    )
    steps = [each for row in results.values() for each in row.values()]
    for out, back in sorted({tuple(each["host_bandwidth"]) for each in steps if "host_bandwidth" in each}):
        about += f" A large copy to the host's memory ran at {out / 1e9:.0f} GB/s, back at {back / 1e9:.0f} GB/s."
    return page("Steps that ran on a GPU", about, COLUMNS, lines)


def _cells(key: str, name: str, result: Result, plain: Result, absent: Result) -> list[str]:
    if "error" in result:
        return [key, name, *("–" for _ in COLUMNS[2:-1]), result["error"][:80]]
    peak, seconds = result["physical_peak_bytes"], result["step_seconds"][1]
    predicted = result.get("predicted_peak_bytes")
    predicted = None if predicted is None else predicted + peak - result["temp_bytes"]
    sizes = (predicted, absent.get("physical_peak_bytes"), peak, result["allocated_bytes"])
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
    parser.add_argument("what", choices=("plan", "plan-row", "run", "batch"))
    parser.add_argument(
        "--table", default="feng_huang", help=f"with commas, of {', '.join(TABLES)}; default: %(default)s"
    )
    parser.add_argument("--rows", help="networks, with commas between them; default: all")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="with commas; default: %(default)s")
    parser.add_argument("--session", action="store_true", help="`plan` and `run`: the most telling steps of all tables")
    parser.add_argument("--minutes", type=float, default=math.inf, help="`run`: no network runs longer")
    parser.add_argument("--target", default="h200", help="to plan for, or `attached`; default: %(default)s")
    parser.add_argument("--plans", type=Path, default=ROOT / ".plans", help="folder of the plans")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--turns", type=int, default=8, help="turns of each variant; default: %(default)s")
    parser.add_argument("--time-limit", type=float, default=600.0, help="seconds for a process; default: %(default).0f")
    parser.add_argument("--batches", nargs="+", help="to try, for each variant; one network only")
    parser.add_argument(
        "--memory-fraction", type=float, default=0.16, help="of the GPU's memory, where several are at once"
    )
    parser.add_argument(
        "--at-once",
        type=int,
        default=5,
        help="tries of `batch`, networks planned on the GPU",
    )
    parser.add_argument("--again", action="store_true", help="also what has a result")
    options = parser.parse_args()
    tables = options.table.split(",")
    wanted = options.rows and options.rows.split(",")
    variants = options.variants.split(",")
    rows = [
        Listed(table, row, variants) for table in tables for row in TABLES[table] if not wanted or row.network in wanted
    ]
    if options.session:
        rows = session()
    if options.what == "plan":
        plan(rows, options)
    elif options.what == "plan-row":
        plan_row(*rows[0], options.target, options.plans)
    elif options.what == "run":
        run(rows, options)
    else:
        file = options.results / BATCHES.name
        for tried in options.batches:
            variant, _, batches = tried.partition("=")
            table, row, _ = rows[0]
            found = run_batches(table, row, variant, list(map(int, batches.split(","))), options)
            known = load(file).get(row.key, {})
            results = {**known, variant: {**known.get(variant, {}), **found}}
            save(file, {**load(file), row.key: results})


if __name__ == "__main__":
    main()
