"""In place of `benchmarks.fuzz_worker`: ends over some programs, as the compiler may. Starts in no time, without JAX.

    python dying_worker.py FOLDER SEED NUMBER…

Over 3 it aborts, once (a file in the folder remembers it), over 5 every time; over 7 it falls silent; 9 is wrong, and
it aborts while 9 is made smaller.
"""

import json
import os
import sys
import time
from pathlib import Path


def say(number: int, **what: object) -> None:
    print(json.dumps({"number": number, **what}), flush=True)


folder = Path(sys.argv[1])
for number in map(int, sys.argv[3:]):
    print("a line of the program's own")
    say(number, stage="op by op")
    (folder / f"{number}").open("a").write("begun\n")
    if number == 3 and not (folder / "died").exists():
        (folder / "died").touch()
        say(number, stage="compiled, rewritten")
        print("Check failed: buffer != nullptr", file=sys.stderr, flush=True)
        os.abort()
    if number == 5:
        os.abort()
    if number == 7:
        time.sleep(60)
    if number == 9:
        say(number, failure={"source": "…", "brief": "AssertionError", "message": "", "statements": 8, "how": ""})
        say(number, stage="made smaller (1 of 8 statements), op by op")
        os.abort()
    say(number, outcome="rewritten", compiled=number % 2 == 0)
