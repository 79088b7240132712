"""One row in a process of its own: `python -m benchmarks.row`, started by `benchmarks.run`.

Reads a request as JSON from standard input and writes a line of JSON as each variant begins and as it is done.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from benchmarks.tables import TABLES, Row


class Request(NamedTuple):
    """What a process is asked for.

    Attributes:
        table: one of `TABLES`.
        key: of its row.
        target: name of the target.
        variants: to be measured, in this order.
        known: results of the row's variants so far.
        steps: on the CPU, how many steps are timed of each variant; 0 for none.
        replan: plan the variants, and measure only those whose plan is not the one of the known result.
    """

    table: str
    key: str
    target: str
    variants: list[str]
    known: dict[str, dict[str, Any]]
    steps: int = 0
    replan: bool = False


def find_row(table: str, key: str) -> Row:
    """The row of a table."""
    return next(row for row in TABLES[table] if row.key == key)


def measure(request: Request) -> Iterator[dict[str, Any]]:
    """`{"begins": variant}` and `{"variant": …, "result": …}` in turn; a failure is a result, too."""
    from benchmarks import variants

    row, known = find_row(request.table, request.key), dict(request.known)
    plain_flops = variants.count_flops(variants.write(row, "plain", request.target, known))
    for variant in request.variants:
        yield {"begins": variant}
        try:
            result = None
            if request.replan:
                result = variants.predict_variant(row, variant, request.target, known, plain_flops)
            if result is None:
                result = variants.measure_variant(row, variant, request.target, known, plain_flops)
        except Exception as error:  # one variant's failure is told in the table, and the others are measured
            traceback.print_exc()
            result = {"error": said_of(error)}
        known[variant] = result
        yield {"variant": variant, "result": result}
    if request.steps:
        from benchmarks.step_time import time_variants

        yield {"begins": "timing"}
        working = [variant for variant in known if "temp_bytes" in known[variant]]
        for variant, ratio in time_variants(row, working, known, request.steps).items():
            yield {"variant": variant, "result": {**known[variant], "step_time_ratio": round(ratio, 3)}}


def said_of(error: Exception) -> str:
    """The first line of an error, as results keep it."""
    return f"{type(error).__name__}: {error}".partition("\n")[0][:300]


def answer(messages: Callable[[dict[str, Any]], Iterator[dict[str, Any]]]) -> None:
    """Answer the request on standard input, a line of JSON for each message."""
    out, sys.stdout = sys.stdout, sys.stderr  # whatever else is printed is no answer
    for message in messages(json.load(sys.stdin)):
        print(json.dumps(message), file=out, flush=True)


if __name__ == "__main__":
    answer(lambda asked: measure(Request(**asked)))
