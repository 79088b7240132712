"""Random programs, rewritten and compared with what they were made from: the nightly form of `tests/test_fuzz.py`.

    python -m benchmarks.fuzz --programs 2000 --seed 0
    python -m benchmarks.fuzz --programs 2000 --seed 0 --start 1200      # goes on where it was stopped
    python -m benchmarks.fuzz --seed 0 --start 17 --programs 1           # one of them again

Each program is planned for a random target, with a random solver and budget, and run op by op, plain and rewritten:
every result must have the same bits. One in ten is compiled and called as users do, too. A program that is wrong is
made smaller, and the smallest one is printed as source.

The programs run in child processes (`fuzz_worker`), a hundred in each: the compiler can end a process. A program in
which one died is run again in a fresh process, and then the next one. The exit status is 1 where any was wrong or any
process died twice over the same program.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.syntax import Syntax
from rich.table import Table

CHECKOUT = Path(__file__).parent.parent
WORKER = (sys.executable, "-W", "ignore", "-m", "benchmarks.fuzz_worker")
# Nothing here is timed, and most of the time goes into compiling. (To divide a program among threads takes a tenth of
# that.) With the last XLA makes its older code of fusions, in a third of the time; where there is none nothing changes.
QUICK = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_parallel_codegen_split_count=1 --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)
CHUNK = 100  # programs of one process; what they compile takes 2 GB
MOST_SECONDS = 300  # of the processor, whatever else runs, for one program; one that takes longer is wrong
MOST_SILENCE = 4 * MOST_SECONDS  # where a process does not even notice that, it is ended
LAST_LINES = 12  # of what a process that died had printed


@dataclasses.dataclass(frozen=True)
class Death:
    """The end of a process over a program.

    Attributes:
        number: of the program.
        stage: what was being done with it.
        cause: the signal or exit status, and the last lines of the process's errors.
    """

    number: int
    stage: str
    cause: str


@dataclasses.dataclass
class Found:
    """What came of the programs so far.

    Attributes:
        outcomes: by number: "rewritten", "nothing to gain", "refused by JAX", "wrong", "died twice".
        compiled: how many were compiled and called as well.
        failures: by number, of those that are wrong: as the worker printed them, the smallest found.
        deaths: of processes.
    """

    outcomes: dict[int, str] = dataclasses.field(default_factory=dict)
    compiled: int = 0
    failures: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)
    deaths: list[Death] = dataclasses.field(default_factory=list)

    def count(self, *outcomes: str) -> int:
        """How many programs came to one of these."""
        return sum(outcome in outcomes for outcome in list(self.outcomes.values()))  # while others add to it

    @property
    def died_once(self) -> list[Death]:
        """Deaths over programs that passed when they were run again."""
        failed = ("wrong", "died twice")
        return [one for one in self.deaths if self.outcomes.get(one.number, failed[0]) not in failed]

    @property
    def is_right(self) -> bool:
        """Whether every program kept what it has to keep."""
        return not self.count("wrong", "died twice")


class Runner:
    """Runs programs in child processes and notes what becomes of them.

    Args:
        seed: of the programs.
        tell: called with a line for the user.
        until: time of `time.monotonic`, after which no further program begins.
        command: of the process, to which the seed and the numbers are added.
        silence: seconds after which a process that prints nothing is ended.
    """

    def __init__(
        self,
        seed: int,
        tell: Callable[[str], None] = print,
        until: float = math.inf,
        command: Sequence[str] = WORKER,
        silence: float = MOST_SILENCE,
    ):
        self.seed, self.tell, self.until, self.command, self.silence = seed, tell, until, command, silence
        self.found = Found()
        self.lock = threading.Lock()

    def run(self, numbers: Sequence[int]) -> None:
        """Run programs by their numbers, in a process of their own, and in another one after each death."""
        rest = list(numbers)
        while rest and time.monotonic() < self.until:
            death = self.one_process(rest)
            if death is not None:
                self.note_death(death)
            rest = [number for number in rest if number not in self.found.outcomes]

    def one_process(self, numbers: Sequence[int]) -> Death | None:
        """Run programs in one process until all are done, the time is up, or the process dies."""
        number, stage, done = numbers[0], "starting", 0
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                [*self.command, str(self.seed), *map(str, numbers)],
                cwd=CHECKOUT,
                env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            assert process.stdout is not None
            watch = _Watch(process, self.silence)
            for line in process.stdout:
                watch.heard()
                if not line.startswith('{"number"'):
                    continue  # a program's own
                said = json.loads(line)
                number, stage = said["number"], said.get("stage", stage)
                self.note(said)
                if "outcome" in said:
                    done += 1
                    number, stage = (*numbers, number)[done], "between programs"
                    if time.monotonic() > self.until:
                        process.kill()
                        break
            status = process.wait()
            watch.stop()
            if done == len(numbers) or time.monotonic() > self.until:
                return None
            errors.seek(0)
            last = errors.read().splitlines()[-LAST_LINES:]
        return Death(number, stage, "\n".join((watch.said or _cause(status), *last)))

    def note(self, said: dict[str, Any]) -> None:
        """Keep what a process printed."""
        number = said["number"]
        with self.lock:
            if "failure" in said:
                if number not in self.found.failures:
                    self.tell(f"program {number} is wrong: {said['failure']['brief']}")
                self.found.failures[number] = said["failure"]
            if "outcome" in said:
                self.found.outcomes[number] = said["outcome"]
                self.found.compiled += said["compiled"]

    def note_death(self, death: Death) -> None:
        """Keep how a process ended; over which program one ends twice, it is not run again."""
        with self.lock:
            found, number = self.found, death.number
            self.tell(f"the process died over program {number} ({death.stage}): {death.cause}")
            if number in found.failures:  # while it was made smaller
                found.outcomes[number] = "wrong"
            elif any(one.number == number for one in found.deaths):
                found.outcomes[number] = "died twice"
            found.deaths.append(death)


class _Watch:
    """Ends a process that has printed nothing for so many seconds."""

    def __init__(self, process: subprocess.Popen, seconds: float):
        self.process, self.seconds, self.said = process, seconds, ""
        self.heard()

    def heard(self) -> None:
        self.stop()
        self.timer = threading.Timer(self.seconds, self.end)
        self.timer.daemon = True
        self.timer.start()

    def end(self) -> None:
        self.said = f"ended after {self.seconds:g} s without a word"
        self.process.kill()

    def stop(self) -> None:
        if hasattr(self, "timer"):
            self.timer.cancel()


def _cause(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"


def report(console: Console, seed: int, found: Found) -> None:
    """How many programs there were, the smallest one that is wrong, and every death."""
    table = Table(title=f"random programs of seed {seed}")
    for column in ("", "programs", "share"):
        table.add_column(column, justify="left" if not column else "right")
    rows = {
        "programs": len(found.outcomes),
        "rewritten": found.count("rewritten"),
        "compiled, too": found.compiled,
        "refused by JAX as they were given": found.count("refused by JAX"),
        "wrong": found.count("wrong"),
        "the process died twice": found.count("died twice"),
        "the process died, and passed when run again": len(found.died_once),
    }
    for name, count in rows.items():
        table.add_row(name, str(count), f"{count / max(len(found.outcomes), 1):.0%}")
    console.print(table)
    for death in found.deaths:
        console.print(f"died over {death.number} ({death.stage}): {death.cause}", markup=False)
    if found.failures:
        number, smallest = min(found.failures.items(), key=lambda item: len(item[1]["source"]))
        console.print(Syntax(smallest["source"], "python", word_wrap=True))
        console.print(smallest["message"], markup=False)
        console.print(f"number {number}, {smallest['statements']} statements, {smallest['how']}", markup=False)
        console.print(f"all that are wrong: {sorted(found.failures)}", markup=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--programs", type=int, default=2000, help="how many random programs")
    parser.add_argument("--seed", type=int, default=0, help="another seed gives other programs")
    parser.add_argument("--start", type=int, default=0, help="number of the first one")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no further program after so long")
    parser.add_argument("--jobs", type=int, default=1, help="how many processes at once")
    arguments = parser.parse_args()
    console = Console()
    numbers = range(arguments.start, arguments.start + arguments.programs)
    runner = Runner(
        arguments.seed,
        tell=lambda line: console.print(line, markup=False),
        until=time.monotonic() + 60 * arguments.minutes,
    )
    found, told = runner.found, 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress, ThreadPoolExecutor(arguments.jobs) as pool:
        task = progress.add_task("programs", total=len(numbers))
        chunks = [pool.submit(runner.run, numbers[i : i + CHUNK]) for i in range(0, len(numbers), CHUNK)]
        try:
            while any(not chunk.done() for chunk in chunks):
                time.sleep(0.5)
                done, bad = len(found.outcomes), found.count("wrong", "died twice")
                said = f"{found.count('rewritten')} rewritten, {bad} failed, {len(found.deaths)} deaths"
                progress.update(task, completed=done, description=said)
                if not console.is_terminal and done // 50 > told:
                    told = done // 50
                    console.print(f"{done} programs, {said}")
        except KeyboardInterrupt:
            runner.until = 0
        for chunk in chunks:
            chunk.result()
    missing = [number for number in numbers if number not in found.outcomes]
    if missing:
        console.print(f"stopped before program {missing[0]}; go on with --start {missing[0]}")
    report(console, arguments.seed, found)
    return 0 if found.is_right else 1


if __name__ == "__main__":
    sys.exit(main())
