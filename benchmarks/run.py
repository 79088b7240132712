"""The tables of the papers, made again: networks in rows, ways to save memory in columns.

    python -m benchmarks.run feng_huang --target h200                          # what has no result yet
    python -m benchmarks.run feng_huang --target h200 --variants plain,ours    # these columns first
    python -m benchmarks.run chen --target v5e --rows lstm_scan --again
    python -m benchmarks.run small --target cpu --time 5                       # with the time of a step
    python -m benchmarks.run feng_huang --target h200 --rows resnet50 --pictures
    python -m benchmarks.run feng_huang --target h200 --replan                # again where today's plan is another

Each row is planned and compiled in a process of its own. Each result is kept in `benchmarks/results/` as soon as it is
there, so that a run can be stopped and taken up again, and the same as a Markdown table beside it. Nothing runs (but
with `--time`) and nothing is allocated; the devices need not be here (extras `cuda-aot`, `tpu-aot`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks.markdown import to_markdown
from benchmarks.results_file import RESULTS, Results, file_of, keep, load
from benchmarks.row import Request
from benchmarks.tables import TABLES, VARIANTS, Row, is_planned

ROOT = Path(__file__).resolve().parent.parent


def missing_of(row: Row, variants: Sequence[str], results: Results, again: bool) -> list[str]:
    """The variants of a row that are to be measured; those that failed are tried again."""
    found = results.get(row.key, {})
    return [variant for variant in variants if again or variant not in found or "error" in found[variant]]


def planned_of(row: Row, results: Results) -> list[str]:
    """The variants of a row that have a result and are planned by us."""
    found = results.get(row.key, {})
    return [variant for variant in found if is_planned(variant) and "error" not in found[variant]]


def run_in_process(request: Request, time_limit: float) -> Iterator[dict[str, Any]]:
    """The messages of `benchmarks.row` in a process of its own.

    Where that dies or takes too long, the variant it was at has failed, and a new process goes on with the next.

    Args:
        request: what to measure.
        time_limit: seconds for one process.
    """
    waiting, known = list(request.variants), dict(request.known)
    while waiting or request.steps:
        current = None
        try:
            for message in _messages(request._replace(variants=waiting, known=known), time_limit):
                current = message.get("begins", current)
                if "result" in message:
                    known[message["variant"]] = message["result"]
                    waiting = [variant for variant in waiting if variant != message["variant"]]
                yield message
            return
        except RowDied as death:
            failed = current or (waiting[0] if waiting else None)
            waiting = [variant for variant in waiting if variant != failed]
            if failed in (None, "timing"):
                raise
            yield {"variant": failed, "result": {"error": str(death)}}
            if current is None:
                return  # it did not even begin: the next would not either


class RowDied(RuntimeError):
    """The process of a row ended before its answer did."""


def _messages(request: Request, time_limit: float) -> Iterator[dict[str, Any]]:
    environment = {**os.environ, "JAX_TRACEBACK_FILTERING": "off"}  # the last line is then the error itself
    command = [sys.executable, "-m", "benchmarks.row"]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors, tempfile.TemporaryFile("w+") as asked:
        json.dump(request._asdict(), asked)
        asked.seek(0)
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=asked, stdout=subprocess.PIPE, stderr=errors, encoding="utf-8"
        )
        expired = threading.Event()
        timer = threading.Timer(time_limit, lambda: (expired.set(), process.kill()))
        timer.start()
        try:
            assert process.stdout is not None
            with process.stdout:
                yield from map(json.loads, process.stdout)
            if process.wait() == 0:
                return
        finally:
            timer.cancel()
            process.kill()
            process.wait()
        errors.seek(0)
        last = (errors.read().strip().splitlines() or ["it said nothing"])[-1]
    if expired.is_set():
        raise RowDied(f"took more than {time_limit:.0f} s")
    raise RowDied(f"its process died: {last[:200]}")


def run_table(
    table: str,
    target: str,
    rows: Sequence[Row],
    variants: Sequence[str],
    *,
    folder: Path = RESULTS,
    again: bool = False,
    replan: bool = False,
    steps: int = 0,
    time_limit: float = 7200.0,
    tell: Callable[[str, int], None] = lambda text, done: None,
) -> Results:
    """Measure what a table lacks, row by row.

    Args:
        table: one of `TABLES`.
        target: name of the target.
        rows: of the table, those that are wanted.
        variants: the columns that are wanted.
        folder: where the results are kept.
        again: measure what has a result, too.
        replan: plan what has a result again, and measure it again where the plan is another; no other `variants`.
        steps: on the CPU, how many steps are timed of each variant; 0 for none.
        time_limit: seconds for the process of one row.
        tell: called with what is done now, and how many results are there since the last call.

    Returns:
        All results of the table, those of earlier runs included.
    """
    file = file_of(table, target, folder)
    for row in rows:
        known = load(file)
        wanted = planned_of(row, known) if replan else missing_of(row, variants, known, again)
        if not wanted and not steps:
            continue
        request = Request(table, row.key, target, wanted, known.get(row.key, {}), steps, replan)
        for message in run_in_process(request, time_limit):
            if "begins" in message:
                tell(f"{row.key}, {message['begins']}", 0)
                continue
            results = keep(file, TABLES[table], row.key, message["variant"], message["result"])
            file.with_suffix(".md").write_text(to_markdown(table, target, TABLES[table], results), encoding="utf-8")
            tell(f"{row.key}, {message['variant']}: {_said(message['result'])}", 1)
    return load(file)


def _said(result: dict[str, Any]) -> str:
    if "error" in result:
        return f"failed, {result['error']}"
    if "infeasible" in result:
        return result["infeasible"]
    size = f"{result['temp_bytes'] / 1e6:.0f} MB" if "temp_bytes" in result else "does not fit the device"
    return f"{size}, {result['extra_flops']:+.1%} FLOPs"


def _show(table: str, target: str, rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Run with a bar on a terminal, and with a line for each result."""
    variants = options.variants.split(",")
    known = load(file_of(table, target, options.results))
    total = sum(
        len(planned_of(row, known) if options.replan else missing_of(row, variants, known, options.again))
        for row in rows
    )
    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=total)

        def tell(text: str, done: int) -> None:
            progress.update(task, advance=done, description=text)
            if done:
                console.print(text, highlight=False, markup=False, soft_wrap=True)

        run_table(
            table,
            target,
            rows,
            variants,
            folder=options.results,
            again=options.again,
            replan=options.replan,
            steps=options.time,
            time_limit=options.time_limit,
            tell=tell,
        )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=sorted(TABLES))
    parser.add_argument("--target", default="cpu", help="cpu, h200, v5e, …")
    parser.add_argument("--rows", help="networks, with commas between them; default: all")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="with commas; default: %(default)s")
    parser.add_argument("--again", action="store_true", help="also what has a result")
    parser.add_argument("--replan", action="store_true", help="plan ours again; measure what is planned otherwise")
    parser.add_argument("--time", type=int, default=0, metavar="STEPS", help="on the CPU: time so many steps of each")
    parser.add_argument("--time-limit", type=float, default=7200.0, help="seconds for one row; default: %(default).0f")
    parser.add_argument("--pictures", action="store_true", help="draw memory over the step, and memory against FLOPs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    if options.time and options.target != "cpu":
        parser.error(f"expected --target cpu with --time, got {options.target}: steps are timed where they can run")
    rows = TABLES[options.table]
    if options.rows:
        wanted = options.rows.split(",")
        if unknown := set(wanted) - {row.network for row in rows}:
            parser.error(f"expected rows of {options.table} ({', '.join(row.network for row in rows)}), got {unknown}")
        rows = tuple(row for row in rows if row.network in wanted)
    _show(options.table, options.target, rows, options)
    file = file_of(options.table, options.target, options.results)
    if options.pictures:
        from benchmarks.pictures import PICTURES, draw_row

        for row in rows:
            results = load(file).get(row.key, {})
            for picture in draw_row(row, options.target, results, PICTURES):
                print(picture)
    print(to_markdown(options.table, options.target, TABLES[options.table], load(file)))


if __name__ == "__main__":
    main()
