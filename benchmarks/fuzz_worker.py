"""The process in which `benchmarks.fuzz` checks programs: it says what it begins, as its own death could not.

    python -m benchmarks.fuzz_worker SEED NUMBER…

Each line it prints is JSON: {"number", "stage"} before a stage of a program, {"number", "outcome", "compiled"} after
the last one, and for a program that is wrong {"number", "failure"}, once as it was met and once more where a smaller
one fails alike.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import traceback
import warnings

import jax

from benchmarks.fuzz import MOST_SECONDS
from tests.program_checks import How, any_way, check_compiled, check_rewritten
from tests.random_programs import SIZES, RandomProgram, random_program

COMPILED = 10  # one in so many


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
    signal.signal(signal.SIGPROF, too_long)
    # Again every few seconds: an exception that is raised inside a weak reference's callback goes no further.
    signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS, 5)
    try:
        say(number, stage=f"{within}op by op")
        rewritten = check_rewritten(program, how)
        if rewritten and number % COMPILED == 0:
            check_compiled(program, 0.7, lambda stage: say(number, stage=f"{within}compiled, {stage}"))
        return rewritten
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def too_long(*_: object) -> None:
    raise TimeoutError(f"planning, writing and running one small program took more than {MOST_SECONDS} s")


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


def say_failure(number: int, statements: int, program: RandomProgram, how: How, error: Exception) -> None:
    message = "".join(traceback.format_exception(error, limit=-6))
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
