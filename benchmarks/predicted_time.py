"""Time of a step as our model predicts it against what was measured on a GPU, both relative to the plain step.

    python -m benchmarks.predicted_time                       # all networks that have run on a GPU
    python -m benchmarks.predicted_time --network gpt vgg16   # some of them

Nothing is compiled and nothing runs: steps are traced, those of ours are planned in the memory in which they were
measured. What was measured is kept by `benchmarks.on_gpu`; what is predicted goes to
`benchmarks/results/predicted_time.json`, and beside it as a table.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from typing import Any, NamedTuple

import jax

from benchmarks import on_gpu
from benchmarks.pages import NETWORK, page
from benchmarks.results_file import RESULTS, load, save
from benchmarks.tables import TABLES, Row, is_planned
from benchmarks.variants import example_of, write
from remat_opt.graph.build import build
from remat_opt.planner.prepared import rates_of
from remat_opt.targets import resolve_target
from remat_opt.trace import compat
from remat_opt.trace.inline import inline

FILE = RESULTS / "predicted_time.json"
TARGET = "h200"
SAME = 0.03  # relative times that differ by less are the same


class Times(NamedTuple):
    """Times of one variant relative to the plain step, measured and predicted."""

    variant: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def seconds_as_written(row: Row, variant: str) -> float:
    """Predicted seconds of a step that we do not write, with the checkpoints that the variant puts into it."""
    example, target = example_of(row, variant), resolve_target(TARGET)
    traced = jax.make_jaxpr(example.train_step)(*example.abstract_args)
    program = inline(compat.without_dead_code(traced), merge_checkpoints=False)
    options = {"platform": target.platform, "keep_scatters": True, "as_compiled": True}
    return build(program, rates_of(target), **options).graph.seconds


def predicted(row: Row, variant: str, known: dict[str, Any]) -> float:
    """Predicted time of a variant relative to the plain step.

    Args:
        row: the network.
        variant: see `benchmarks.variants`.
        known: what was measured of the row's variants, of which a budget may speak.
    """
    if not is_planned(variant):
        return seconds_as_written(row, variant) / seconds_as_written(row, "plain")
    plan = write(row, variant, TARGET, known, verify=False).plan
    assert plan is not None
    return 1 + plan.predicted.extra_seconds / plan.predicted.seconds


def measured_seconds(result: dict[str, Any]) -> float | None:
    """Of a variant as `benchmarks.on_gpu` keeps it; None where it did not run."""
    return statistics.median(result["step_seconds"]) if result.get("step_seconds") else None


def times_of(known: dict[str, Any], found: dict[str, float]) -> list[Times]:
    """The variants of one network that were measured and predicted, without the plain step."""
    plain = measured_seconds(known.get("plain", {}))
    seconds = {variant: measured_seconds(result) for variant, result in known.items() if variant in found}
    return [Times(variant, spent / plain, found[variant]) for variant, spent in seconds.items() if plain and spent]


def is_in_order(one: Times, other: Times) -> bool:
    """Whether the slower of two variants is predicted to be the slower one, or both are measured about as fast."""
    if abs(one.measured - other.measured) < SAME * max(one.measured, other.measured):
        return True
    return (one.measured < other.measured) == (one.predicted < other.predicted)


def to_markdown(results: dict[str, dict[str, float]]) -> str:
    """All predictions beside what was measured."""
    known = load(on_gpu.FILE)
    networks = {key: times_of(known[key], found) for key, found in results.items()}
    every = [one for times in networks.values() for one in times]
    plain = Times("plain", 1.0, 1.0)
    pairs = [pair for times in networks.values() for pair in itertools.combinations([plain, *times], 2)]
    errors = sorted(abs(one.error) for one in every)
    return page(
        "Predicted time",
        "Written by `python -m benchmarks.predicted_time`. Times of a step on an NVIDIA H200 relative to the plain "
        "step: measured by `benchmarks.on_gpu`, and predicted by the time model of the searches "
        "(`remat_opt/graph/cost.py`). The shares of the peak rates in that model were chosen by the rows of `nn.remat` "
        "and `dots_saveable`, and by no other. Rows of ours are predicted for today's plan in the same memory; the "
        "plan that was measured is an older one.",
        [NETWORK, "step", "measured", "predicted", "error"],
        [
            [key, one.variant, f"{one.measured:.3f}", f"{one.predicted:.3f}", f"{one.error:+.1%}"]
            for key, times in networks.items()
            for one in times
        ],
        f"Errors: median {statistics.median(errors):.1%}, {sum(e < 0.1 for e in errors)} of {len(errors)} rows within "
        f"10 %. Of {len(pairs)} pairs of variants of one network {sum(is_in_order(*pair) for pair in pairs)} are in "
        f"the measured order or within {SAME:.0%} of each other.",
    )


def main() -> None:
    """Predict what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", nargs="*", help="keys of rows; all that have run by default")
    options = parser.parse_args()
    known, results = load(on_gpu.FILE), load(FILE)
    rows = {row.key: row for table in TABLES.values() for row in table if row.key in known}
    for key in options.network or [key for key in known if measured_seconds(known[key].get("plain", {}))]:
        variants = [variant for variant in known[key] if variant != "plain" and measured_seconds(known[key][variant])]
        results[key] = {variant: predicted(rows[key], variant, known[key]) for variant in variants}
        results = save(FILE, results, known, to_markdown)
        print(key, {variant: round(ratio, 3) for variant, ratio in results[key].items()}, flush=True)


if __name__ == "__main__":
    main()
