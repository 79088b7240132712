"""Networks written as loops: what their training steps need on an H200, plain and optimised, without hints.

    python -m benchmarks.loops                 # what has no result yet, a minute each
    python -m benchmarks.loops lstm gru --again

Results are kept in `benchmarks/results/loops_h200.json`, and the same as a table in `loops_h200.md`. Nothing runs and
nothing is allocated.
"""

from __future__ import annotations

import argparse
import time
import warnings
from typing import Any, NamedTuple

from benchmarks.pages import megabytes, page
from benchmarks.results_file import RESULTS, load, save

TARGET = "h200"
FILE = RESULTS / f"loops_{TARGET}.json"


class Row(NamedTuple):
    """One step.

    Attributes:
        network: of `benchmarks.loop_networks`.
        budget: as of `optimize`.
        asked_mb: how little memory was asked for when the project began, MB; None where nothing was.
        asked_flops: how many extra FLOPs were allowed for that, as a part of the plain step's.
    """

    network: str
    budget: float | None = None
    asked_mb: float | None = None
    asked_flops: float | None = None

    @property
    def key(self) -> str:
        """Its name in the results."""
        return self.network if self.budget is None else f"{self.network}, budget {self.budget}"


ROWS = (
    Row("gpt", None, 400, 0.35),
    Row("deep gpt", None, 200, 0.35),
    Row("lstm", None, 28, 0.70),
    Row("gru", None, 17, 0.70),
    Row("gpt", 0.5, None, 0.08),
    Row("gpt, Python loop", None, None, 0.35),
    Row("lstm, 256 steps"),
    Row("lstm, 4096 steps"),
)


def measure_row(row: Row) -> dict[str, Any]:
    """Plan and compile one step."""
    import jax

    import remat_opt
    from benchmarks.loop_networks import NETWORKS
    from tests.flop_walk import flops_of

    given, args = NETWORKS[row.network]()
    plain = jax.jit(given, donate_argnums=0)
    step = remat_opt.optimize(plain, target=TARGET, budget=row.budget)
    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", remat_opt.RematWarning)
        plan = step.plan(*args)
    seconds = time.perf_counter() - started
    measured = remat_opt.measure(step, *args)
    figures, optimized = measured.plain, measured.optimized
    assert figures is not None, "an H200's compiler refuses nothing"
    assert optimized is not None
    return {
        "plain_bytes": figures.temp_bytes,
        "temp_bytes": optimized.temp_bytes,
        "predicted_bytes": plan.predicted.peak_bytes,
        "extra_flops": round(flops_of(step.trace(*args).jaxpr) / flops_of(plain.trace(*args).jaxpr) - 1, 4),
        "seconds": round(seconds, 1),
        "jax_version": optimized.jax_version,
        "note": plan.note,
    }


def to_markdown(results: dict[str, dict[str, Any]]) -> str:
    """The results as a table."""
    return page(
        f"Loops, {TARGET}",
        "Temporary memory as the compiler says, MB (10^6 bytes), without autotuning; the state is donated. FLOPs are "
        "counted over what is written. Written by `python -m benchmarks.loops`.",
        ["step", "plain", "optimised", "asked", "part", "extra FLOPs", "asked", "predicted", "jax"],
        (_cells(row, results[row.key]) for row in ROWS if row.key in results),
    )


def _cells(row: Row, found: dict[str, Any]) -> list[str]:
    """One line of the table."""
    return [
        row.key,
        megabytes(found["plain_bytes"]),
        megabytes(found["temp_bytes"]),
        f"≤ {row.asked_mb:g}" if row.asked_mb else "–",
        f"{found['temp_bytes'] / found['plain_bytes']:.1%}",
        f"{found['extra_flops']:+.1%}",
        f"≤ {row.asked_flops:.0%}" if row.asked_flops else "–",
        megabytes(found["predicted_bytes"]),
        found["jax_version"],
    ]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", help="default: all")
    parser.add_argument("--again", action="store_true", help="also what has a result")
    options = parser.parse_args()
    for row in ROWS:
        wanted = not options.networks or row.network in options.networks
        if not wanted or (row.key in load(FILE) and not options.again):
            continue
        print(row.key, flush=True)
        save(FILE, {**load(FILE), row.key: measure_row(row)}, to_markdown=to_markdown)
    print(to_markdown(load(FILE)))


if __name__ == "__main__":
    main()
