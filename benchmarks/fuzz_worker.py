"""The process in which `benchmarks.fuzz` checks programs: it says what it begins, as its own death could not.

    python -m benchmarks.fuzz_worker SEED NUMBER…

Each line it prints is JSON: {"number", "stage"} before a stage of a program, {"number", "outcome", "compiled"} after
the last one, and for a program that is wrong {"number", "failure"}, once as it was met and once more where a smaller
one fails alike.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator

import jax

from benchmarks.fuzz import MOST_SECONDS
from tests.program_checks import How, any_way, check_compiled, check_rewritten
from tests.random_programs import SIZES, RandomProgram, random_program

COMPILED = 10  # one in so many
WATCHED_EVERY = 0.25  # seconds


def drawn(seed: int, number: int, statements: int | None = None) -> tuple[RandomProgram, How, int]:
    """A program of a seed, by its number, with fewer statements on request; how it is rewritten; its statements."""
    source = random.Random(f"{seed}/{number}")
    how, count = any_way(source), source.choice(SIZES)
    return random_program(source, statements or count), how, statements or count


def say(number: int, **what: object) -> None:
    """A line for the parent."""
    print(json.dumps({"number": number, **what}), flush=True)


def check(program: RandomProgram, how: How, number: int, within: str = "") -> bool:
    """Whether a program was rewritten; raises where anything is wrong."""
    with limited_time(program, how, number):
        say(number, stage=f"{within}op by op")
        rewritten = check_rewritten(program, how)
        if rewritten and number % COMPILED == 0:
            check_compiled(program, 0.7, lambda stage: say(number, stage=f"{within}compiled, {stage}"))
        return rewritten


@contextlib.contextmanager
def limited_time(program: RandomProgram, how: How, number: int) -> Iterator[None]:
    """Say that a program failed and end the process once it has taken `MOST_SECONDS` of the processor.

    A thread watches: an exception that a signal handler raises may come up in any callback, and go no further.
    """
    began, done, watched = time.process_time(), threading.Event(), threading.get_ident()

    def watch() -> None:
        while not done.wait(WATCHED_EVERY):
            if time.process_time() - began > MOST_SECONDS:
                message = "".join(traceback.format_stack(sys._current_frames()[watched])[-6:])
                error = TimeoutError(f"planning, writing and running one small program took over {MOST_SECONDS} s")
                say_failure(number, len(program.source.splitlines()), program, how, error, message)
                return end_process()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def end_process() -> None:
    """Without the interpreter's own end, which waits for other threads."""
    os._exit(1)


def check_number(seed: int, number: int) -> None:
    """Check a program and say what came of it."""
    program, how, statements = drawn(seed, number)
    try:
        rewritten = check(program, how, number)
    except Exception as error:
        if refused_by_jax(program, number):
            return say(number, outcome="refused by JAX", compiled=False)
        say_failure(number, statements, program, how, error)
        make_smaller(seed, number, statements, type(error))
        say(number, outcome="wrong", compiled=False)
    else:
        outcome = "rewritten" if rewritten else "nothing to gain"
        say(number, outcome=outcome, compiled=rewritten and number % COMPILED == 0)


def refused_by_jax(program: RandomProgram, number: int) -> bool:
    """Whether JAX does not lower a program as it was given, as some derivatives of custom rules within custom rules."""
    say(number, stage="as it was given")
    try:
        jax.jit(program.step).lower(*program.arguments())
    except Exception:
        return True
    return False


def make_smaller(seed: int, number: int, statements: int, kind: type[Exception]) -> None:
    """The same failure with as few statements as it needs: the first ones of a program are a program, too."""
    for fewer in range(1, statements):
        smaller, how, _ = drawn(seed, number, fewer)
        try:
            check(smaller, how, number, f"made smaller ({fewer} of {statements} statements), ")
        except kind as error:
            return say_failure(number, fewer, smaller, how, error)
        except Exception:
            continue


def say_failure(
    number: int, statements: int, program: RandomProgram, how: How, error: Exception, message: str = ""
) -> None:
    message = message or "".join(traceback.format_exception(error, limit=-6))
    brief = f"{type(error).__name__}: {str(error)[:300]}"
    found = {"statements": statements, "source": repr(program), "how": repr(how), "brief": brief, "message": message}
    say(number, failure=found)


def main() -> None:
    warnings.simplefilter("ignore")
    seed, *numbers = map(int, sys.argv[1:])
    for number in numbers:
        check_number(seed, number)


if __name__ == "__main__":
    main()
