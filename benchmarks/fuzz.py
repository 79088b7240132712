"""Random programs, rewritten and compared with what they were made from: the nightly form of `tests/test_fuzz.py`.

    python -m benchmarks.fuzz --programs 2000 --seed 0
    python -m benchmarks.fuzz --programs 2000 --seed 0 --start 1200      # goes on where it was stopped
    python -m benchmarks.fuzz --seed 0 --start 17 --programs 1           # one of them again

Each program is planned for a random target, with a random solver and budget, and run op by op, plain and rewritten:
every result must have the same bits. One in ten is compiled and called as users do, too. A program that fails is made
smaller, and the smallest one is printed as source. The exit status is 1 where any failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import random
import resource
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

# Nothing here is timed, and most of the time goes into compiling single operations. Before jax is imported.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.syntax import Syntax
from rich.table import Table

from tests.program_checks import How, any_way, check_compiled, check_rewritten
from tests.random_programs import SIZES, RandomProgram, random_program

MOST_MEMORY = 3 << 30  # bytes, above which compiled operations are forgotten
COMPILED = 10  # one in so many
MOST_SECONDS = 300  # for one program; one that takes longer has failed


@dataclasses.dataclass(frozen=True)
class Failure:
    """A program for which something did not hold, as small as it was found."""

    number: int
    statements: int
    program: RandomProgram
    how: How
    message: str


def drawn(seed: int, number: int, statements: int | None = None) -> tuple[RandomProgram, How, int]:
    """A program of a seed, by its number, with fewer statements on request; how it is rewritten; its statements."""
    source = random.Random(f"{seed}/{number}")
    how, count = any_way(source), source.choice(SIZES)
    return random_program(source, statements or count), how, statements or count


def check(program: RandomProgram, how: How, number: int) -> bool:
    """Whether a program was rewritten; raises where anything is wrong."""
    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(MOST_SECONDS)
    try:
        rewritten = check_rewritten(program, how)
        if rewritten and number % COMPILED == 0:
            check_compiled(program, 0.7)
        return rewritten
    finally:
        signal.alarm(0)


def too_long(*_: object) -> None:
    raise TimeoutError(f"planning, writing and running one small program took more than {MOST_SECONDS} s")


def failure_of(seed: int, number: int, statements: int, error: Exception) -> Failure:
    """The same failure with as few statements as it needs: the first ones of a program are a program, too."""
    program, how, _ = drawn(seed, number, statements)
    message = "".join(traceback.format_exception(error, limit=-6))
    for fewer in range(1, statements):
        smaller, _, _ = drawn(seed, number, fewer)
        try:
            check(smaller, how, number)
        except type(error) as found:
            return Failure(number, fewer, smaller, how, "".join(traceback.format_exception(found, limit=-6)))
        except Exception:
            continue
    return Failure(number, statements, program, how, message)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--programs", type=int, default=2000, help="how many random programs")
    parser.add_argument("--seed", type=int, default=0, help="another seed gives other programs")
    parser.add_argument("--start", type=int, default=0, help="number of the first one")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no further program after so long")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    console = Console()
    numbers = range(arguments.start, arguments.start + arguments.programs)
    failures: list[Failure] = []
    counts: Counter[str] = Counter()
    began = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("programs", total=len(numbers))
        for number in numbers:
            if time.monotonic() - began > 60 * arguments.minutes:
                console.print(f"stopped before program {number}; go on with --start {number}")
                break
            program, how, statements = drawn(arguments.seed, number)
            counts["programs"] += 1
            try:
                rewritten = check(program, how, number)
                counts["rewritten"] += rewritten
                counts["compiled, too"] += rewritten and number % COMPILED == 0
            except Exception as error:
                failures.append(failure_of(arguments.seed, number, statements, error))
                console.print(f"program {number} failed: {type(error).__name__}: {str(error)[:300]}", markup=False)
            progress.update(task, advance=1, description=f"{counts['rewritten']} rewritten, {len(failures)} failed")
            if not console.is_terminal and counts["programs"] % 100 == 0:
                console.print(f"{counts['programs']} programs, {counts['rewritten']} rewritten, {len(failures)} failed")
            if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 > MOST_MEMORY and number % 50 == 0:
                jax.clear_caches()
    report(console, arguments.seed, counts, failures)
    return 1 if failures else 0


def report(console: Console, seed: int, counts: Counter[str], failures: list[Failure]) -> None:
    """How many programs there were, and the smallest one that failed."""
    table = Table(title=f"random programs of seed {seed}")
    for column in ("", "programs", "share"):
        table.add_column(column, justify="left" if not column else "right")
    for name in ("programs", "rewritten", "compiled, too"):
        table.add_row(name, str(counts[name]), f"{counts[name] / max(counts['programs'], 1):.0%}")
    table.add_row("failed", str(len(failures)), f"{len(failures) / max(counts['programs'], 1):.0%}")
    console.print(table)
    if failures:
        smallest = min(failures, key=lambda failure: len(failure.program.source))
        console.print(Syntax(repr(smallest.program), "python", word_wrap=True))
        console.print(smallest.message, markup=False)
        console.print(f"number {smallest.number}, {smallest.statements} statements, {smallest.how}", markup=False)
        console.print(f"all that failed: {[failure.number for failure in failures]}", markup=False)


if __name__ == "__main__":
    sys.exit(main())
